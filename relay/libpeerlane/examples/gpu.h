/*
 * The little of CUDA that the examples need: memory of a GPU that can be exported,
 * filled from the host and read back. A program of your own has CUDA's headers and
 * is linked with libcuda; this opens the library at run time, so that the examples
 * build on machines without either. PEERLANE_CUDA_LIBRARY names another library,
 * such as Peerlane's simulator.
 */
#ifndef EXAMPLE_GPU_H
#define EXAMPLE_GPU_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "peerlane.h"

/* As cuda.h has them; handles are pointers there. */
struct gpu_allocation_properties {
	int type, handle_types;
	struct {
		int type, id;
	} location;
	void *windows;
	unsigned char flags[8];
};
struct gpu_access {
	struct {
		int type, id;
	} location;
	int flags;
};

/* X(member, symbol, parameters) */
#define GPU_CALLS(X) \
	X(init, "cuInit", (unsigned)) \
	X(error_name, "cuGetErrorName", (int, const char **)) \
	X(device_count, "cuDeviceGetCount", (int *)) \
	X(device, "cuDeviceGet", (int *, int)) \
	X(device_uuid, "cuDeviceGetUuid_v2", (peerlane_gpu *, int)) \
	X(context, "cuCtxCreate_v2", (void **, unsigned, int)) \
	X(set_context, "cuCtxSetCurrent", (void *)) \
	X(create, "cuMemCreate", (uint64_t *, size_t, const struct gpu_allocation_properties *, uint64_t)) \
	X(release, "cuMemRelease", (uint64_t)) \
	X(export, "cuMemExportToShareableHandle", (int *, uint64_t, int, uint64_t)) \
	X(reserve, "cuMemAddressReserve", (uint64_t *, size_t, size_t, uint64_t, uint64_t)) \
	X(map, "cuMemMap", (uint64_t, size_t, size_t, uint64_t, uint64_t)) \
	X(access, "cuMemSetAccess", (uint64_t, size_t, const struct gpu_access *, size_t)) \
	X(to_gpu, "cuMemcpyHtoDAsync_v2", (uint64_t, const void *, size_t, void *)) \
	X(from_gpu, "cuMemcpyDtoHAsync_v2", (void *, uint64_t, size_t, void *)) \
	X(stream, "cuStreamCreate", (void **, unsigned)) \
	X(synchronize, "cuStreamSynchronize", (void *)) \
	X(write_value, "cuStreamWriteValue64_v2", (void *, uint64_t, uint64_t, unsigned)) \
	X(wait_value, "cuStreamWaitValue64_v2", (void *, uint64_t, uint64_t, unsigned))

static struct {
#define X(member, symbol, parameters) int(*member) parameters;
	GPU_CALLS(X)
#undef X
} cuda;

static inline void gpu_check(int result, const char *what)
{
	const char *name = NULL;

	if (!result)
		return;
	if (cuda.error_name)
		cuda.error_name(result, &name);
	fprintf(stderr, "%s: %s (%d)\n", what, name ? name : "no name", result);
	exit(1);
}

static inline void gpu_open(void)
{
	const char *path = getenv("PEERLANE_CUDA_LIBRARY");
	void *library = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW);

	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
#define X(member, symbol, parameters) \
	*(void **)&cuda.member = dlsym(library, symbol); \
	if (!cuda.member) { \
		fprintf(stderr, "the CUDA driver has no %s\n", symbol); \
		exit(1); \
	}
	GPU_CALLS(X)
#undef X
	gpu_check(cuda.init(0), "cuInit");
}

/* A GPU of this process: a context, current in the calling thread, and a stream. */
struct gpu {
	int device;
	peerlane_gpu uuid;
	void *context, *stream;
};

/* gpu_use makes a context on the GPU of that UUID, on the first without. */
static inline struct gpu gpu_use(const peerlane_gpu *wanted)
{
	struct gpu g;
	int n;

	gpu_check(cuda.device_count(&n), "cuDeviceGetCount");
	for (int i = 0; i < n; i++) {
		gpu_check(cuda.device(&g.device, i), "cuDeviceGet");
		gpu_check(cuda.device_uuid(&g.uuid, g.device), "cuDeviceGetUuid");
		if (wanted && memcmp(wanted, &g.uuid, sizeof g.uuid))
			continue;
		gpu_check(cuda.context(&g.context, 0, g.device), "cuCtxCreate");
		gpu_check(cuda.stream(&g.stream, 1), "cuStreamCreate");
		return g;
	}
	fprintf(stderr, "no such GPU here\n");
	exit(1);
}

/* VMM memory, and the descriptor to export it by; bytes is a multiple of 2 MiB. */
struct gpu_memory {
	uint64_t address, bytes;
	int fd;
};

static inline struct gpu_memory gpu_allocate(const struct gpu *g, uint64_t bytes)
{
	/* Pinned memory of a device, with POSIX file descriptors. */
	struct gpu_allocation_properties properties = {.type = 1, .handle_types = 1, .location = {1, g->device}};
	struct gpu_access access = {{1, g->device}, 3};
	struct gpu_memory m = {.bytes = bytes};
	uint64_t handle;

	gpu_check(cuda.create(&handle, bytes, &properties, 0), "cuMemCreate");
	gpu_check(cuda.export(&m.fd, handle, 1, 0), "cuMemExportToShareableHandle");
	gpu_check(cuda.reserve(&m.address, bytes, 0, 0, 0), "cuMemAddressReserve");
	gpu_check(cuda.map(m.address, bytes, 0, handle, 0), "cuMemMap");
	gpu_check(cuda.access(m.address, bytes, &access, 1), "cuMemSetAccess");
	gpu_check(cuda.release(handle), "cuMemRelease"); /* the mapping keeps it */
	return m;
}

static inline void gpu_write(const struct gpu *g, uint64_t address, const void *from, size_t n)
{
	gpu_check(cuda.to_gpu(address, from, n, g->stream), "cuMemcpyHtoDAsync");
	gpu_check(cuda.synchronize(g->stream), "cuStreamSynchronize");
}

static inline void gpu_read(const struct gpu *g, void *to, uint64_t address, size_t n)
{
	gpu_check(cuda.from_gpu(to, address, n, g->stream), "cuMemcpyDtoHAsync");
	gpu_check(cuda.synchronize(g->stream), "cuStreamSynchronize");
}

#endif
