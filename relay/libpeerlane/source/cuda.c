/* Calls of the CUDA driver that this process has loaded. The library is linked with
 * none, and loads none. */
#include "internal.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* As cuda.h, CUDA 11.7 to 13, on 64-bit Linux. */
enum {
	CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
	CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
	CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE = 15,
	CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1,
	CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
	CU_MEM_LOCATION_TYPE_DEVICE = 1,
	CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
	CUDA_ERROR_INVALID_DEVICE = 101,
	CU_MEMHOSTREGISTER_PORTABLE = 1,
	CU_MEMHOSTREGISTER_DEVICEMAP = 2,
	CU_STREAM_WAIT_VALUE_GEQ = 0,
	CU_STREAM_WAIT_VALUE_AND = 2,
};

/* CUmemAccessDesc */
struct access {
	int type, id; /* of the location */
	int flags;
};

/* X(member, symbol, parameters) */
#define CALLS(X) \
	X(error_name, "cuGetErrorName", (int, const char **)) \
	X(attribute, "cuPointerGetAttribute", (void *, int, uint64_t)) \
	X(device, "cuDeviceGet", (int *, int)) \
	X(uuid, "cuDeviceGetUuid_v2", (peerlane_gpu *, int)) \
	X(count, "cuDeviceGetCount", (int *)) \
	X(import, "cuMemImportFromShareableHandle", (uint64_t *, void *, int)) \
	X(reserve, "cuMemAddressReserve", (uint64_t *, size_t, size_t, uint64_t, unsigned long long)) \
	X(unreserve, "cuMemAddressFree", (uint64_t, size_t)) \
	X(map, "cuMemMap", (uint64_t, size_t, size_t, uint64_t, unsigned long long)) \
	X(unmap, "cuMemUnmap", (uint64_t, size_t)) \
	X(access, "cuMemSetAccess", (uint64_t, size_t, const struct access *, size_t)) \
	X(range, "cuMemGetAddressRange_v2", (uint64_t *, size_t *, uint64_t)) \
	X(ipc_handle, "cuIpcGetMemHandle", (uint8_t *, uint64_t)) \
	X(retain, "cuMemRetainAllocationHandle", (uint64_t *, const void *)) \
	X(export, "cuMemExportToShareableHandle", (void *, uint64_t, int, uint64_t)) \
	X(release, "cuMemRelease", (uint64_t)) \
	X(dma_buf, "cuMemGetHandleForAddressRange", (void *, uint64_t, size_t, int, unsigned long long)) \
	X(host_register, "cuMemHostRegister_v2", (void *, size_t, unsigned)) \
	X(host_unregister, "cuMemHostUnregister", (const void *)) \
	X(host_address, "cuMemHostGetDevicePointer_v2", (uint64_t *, void *, unsigned)) \
	X(capturing, "cuStreamIsCapturing", (void *, int *)) \
	X(write_value, "cuStreamWriteValue64_v2", (void *, uint64_t, uint64_t, unsigned)) \
	X(wait_value, "cuStreamWaitValue64_v2", (void *, uint64_t, uint64_t, unsigned))

struct driver {
#define X(member, symbol, parameters) int(*member) parameters;
	CALLS(X)
#undef X
};

static int find(struct driver *d)
{
	static const char probe[] = "cuMemRetainAllocationHandle";
	const char *named = getenv("PEERLANE_CUDA_LIBRARY");
	void *library = RTLD_DEFAULT;

	/* RTLD_NOLOAD counts a use of a library that is there; it stays. */
	if (!dlsym(library, probe))
		library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	if (library == NULL && named && *named && !dlsym(RTLD_DEFAULT, probe))
		library = dlopen(named, RTLD_NOW | RTLD_NOLOAD);
	if (library == NULL && !dlsym(RTLD_DEFAULT, probe))
		return fail_call(PEERLANE_STATUS_NO_CUDA, "this process has not loaded the CUDA driver (libcuda.so.1); call CUDA first");
#define X(member, symbol, parameters) \
	*(void **)&d->member = dlsym(library, symbol); \
	if (!d->member) \
		return fail_call(PEERLANE_STATUS_NO_CUDA, "the CUDA driver that this process has loaded lacks %s; it is older than 11.7", symbol);
	CALLS(X)
#undef X
	return 0;
}

static const char exporting[] = "exporting GPU memory by its address";
static const char staging[] = "staging memory";

static int failed(const struct driver *d, int result, const char *call, const char *what)
{
	const char *name = NULL;

	if (d->error_name(result, &name) || !name)
		name = "an error without a name";
	return fail_call(PEERLANE_STATUS_CUDA, "%s: %s: %s (%d)", what, call, name, result);
}

/* part makes a descriptor of the allocation that an address is in, from there on, or
 * up to `length` bytes behind. */
static int part(const struct driver *d, uint64_t at, uint64_t length, struct peerlane_allocation *a)
{
	uint64_t base, handle;
	size_t size;
	int result;

	if ((result = d->range(&base, &size, at)))
		return failed(d, result, "cuMemGetAddressRange", exporting);
	if (at < base || at - base >= size)
		return fail_call(PEERLANE_STATUS_CUDA, "%s: cuMemGetAddressRange says that %#llx lies in %zu bytes at %#llx",
			exporting, (unsigned long long)at, size, (unsigned long long)base);
	if ((result = d->retain(&handle, (const void *)(uintptr_t)at)))
		return failed(d, result, "cuMemRetainAllocationHandle, which takes memory of cuMemCreate (for cudaMalloc's: peerlane_export_ipc)", exporting);
	*a = (struct peerlane_allocation){.fd = -1, .bytes = size, .offset = at - base};
	a->length = length < size - a->offset ? length : size - a->offset;
	result = d->export(&a->fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	d->release(handle);
	if (result)
		return failed(d, result, "cuMemExportToShareableHandle, which takes memory created for POSIX file descriptors", exporting);
	fcntl(a->fd, F_SETFD, FD_CLOEXEC); /* which the driver does not promise */
	return 0;
}

int peerlane_pointer_id(const void *pointer, uint64_t length, uint64_t *id)
{
	static const char what[] = "telling which GPU memory is at an address";
	uint64_t at = (uintptr_t)pointer, end = at + length, all = 0;
	struct driver d;
	int status, result;

	if (!length || end < at || !id)
		return fail_call(PEERLANE_STATUS_INVALID, "%s: no bytes, or nowhere to write it", what);
	if ((status = find(&d)))
		return status;
	while (at < end) {
		unsigned long long one = 0;
		uint64_t base;
		size_t size;

		if ((result = d.attribute(&one, CU_POINTER_ATTRIBUTE_BUFFER_ID, at)))
			return failed(&d, result, "cuPointerGetAttribute", what);
		if ((result = d.range(&base, &size, at)))
			return failed(&d, result, "cuMemGetAddressRange", what);
		if (!one || at < base || at - base >= size)
			return fail_call(PEERLANE_STATUS_CUDA, "%s: CUDA has no number for what is at %#llx", what, (unsigned long long)at);
		/* Of several allocations, in their order (the finalizer of splitmix64). */
		all += one + 0x9e3779b97f4a7c15u;
		all = (all ^ all >> 30) * 0xbf58476d1ce4e5b9u;
		all = (all ^ all >> 27) * 0x94d049bb133111ebu;
		all ^= all >> 31;
		at = base + size;
	}
	*id = all;
	return 0;
}

/* lend gives the relay a DMA-BUF of exported allocations, which begin at an address, or says
 * why there is none: then their data is copied. A session that has failed says so at the next
 * call. */
static void lend(const struct driver *d, peerlane_session *s, uint64_t at, uint64_t bytes, peerlane_memory memory)
{
	struct peerlane_dma_buf m = {.type = PEERLANE_MESSAGE_DMA_BUF, .memory = memory};
	const char *call = "cuPointerGetAttribute", *name = NULL;
	uint64_t capable = 0; /* a bool or an int, by the driver's version */
	int fd = -1, result = d->attribute(&capable, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, at);

	if (!result && !capable) {
		snprintf(m.reason, sizeof m.reason, "it was created without gpuDirectRDMACapable (CUmemAllocationProp), so no NIC may have it");
	} else {
		if (!result) {
			call = "cuMemGetHandleForAddressRange";
			result = d->dma_buf(&fd, at, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
		}
		if (result)
			snprintf(m.reason, sizeof m.reason, "%s: %s (%d)", call, d->error_name(result, &name) || !name ? "an error without a name" : name, result);
		else
			fcntl(fd, F_SETFD, FD_CLOEXEC); /* which the driver does not promise */
	}
	if (result)
		fd = -1;
	send_alone(s, &m, sizeof m, fd);
	if (fd >= 0)
		close(fd);
}

int peerlane_export_pointer(peerlane_session *s, const void *pointer, uint64_t length, uint32_t access, peerlane_memory *memory)
{
	struct peerlane_allocation *list = NULL;
	uint64_t at = (uintptr_t)pointer, left = length;
	int ordinal, device, result, status;
	uint32_t wants = 0;
	unsigned count = 0;
	struct driver d;
	peerlane_gpu gpu;

	if (!s || !memory || !length)
		return fail_call(PEERLANE_STATUS_INVALID, "%s: no session, no bytes, or nowhere to write the memory", exporting);
	if ((status = find(&d)))
		return status;
	if ((result = d.attribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at)))
		return failed(&d, result, "cuPointerGetAttribute", exporting);
	if ((result = d.device(&device, ordinal)) || (result = d.uuid(&gpu, device)))
		return failed(&d, result, "cuDeviceGetUuid", exporting);
	while (left && !status) {
		struct peerlane_allocation *longer;

		if (count == PEERLANE_MAX_PARTS) {
			status = fail_call(PEERLANE_STATUS_LIMIT, "%s: %llu bytes in more than %d allocations: export them in several ranges", exporting, (unsigned long long)length, PEERLANE_MAX_PARTS);
			break;
		}
		longer = realloc(list, (count + 1) * sizeof *list);
		if (!longer) {
			status = fail_call(PEERLANE_STATUS_SYSTEM, "%s: out of memory", exporting);
			break;
		}
		list = longer;
		if ((status = part(&d, at, left, &list[count])))
			break;
		at += list[count].length;
		left -= list[count].length;
		count++;
	}
	if (!status)
		status = export_list(s, list, count, &gpu, access, memory, &wants);
	if (!status && wants == PEERLANE_WANTS_DMA_BUF) {
		uint64_t bytes = 0;

		for (unsigned i = 0; i < count; i++)
			bytes += list[i].bytes;
		lend(&d, s, (uintptr_t)pointer - list->offset, bytes, *memory);
	}
	while (count > 0)
		close(list[--count].fd);
	free(list);
	return status;
}

int peerlane_export_pointer_ipc(peerlane_session *s, const void *pointer, uint64_t length, uint32_t access, peerlane_memory *memory)
{
	uint64_t at = (uintptr_t)pointer, base;
	int ordinal, device, result, status;
	uint32_t wants = 0;
	uint8_t handle[64];
	struct driver d;
	peerlane_gpu gpu;
	size_t size;

	if (!s || !memory || !length)
		return fail_call(PEERLANE_STATUS_INVALID, "%s: no session, no bytes, or nowhere to write the memory", exporting);
	if ((status = find(&d)))
		return status;
	if ((result = d.attribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at)))
		return failed(&d, result, "cuPointerGetAttribute", exporting);
	if ((result = d.device(&device, ordinal)) || (result = d.uuid(&gpu, device)))
		return failed(&d, result, "cuDeviceGetUuid", exporting);
	if ((result = d.range(&base, &size, at)))
		return failed(&d, result, "cuMemGetAddressRange", exporting);
	if (at < base || at - base >= size || length > size - (at - base))
		return fail_call(PEERLANE_STATUS_OUT_OF_RANGE, "%s: %llu bytes at %#llx are more than one allocation, of %zu bytes at %#llx",
			exporting, (unsigned long long)length, (unsigned long long)at, size, (unsigned long long)base);
	if ((result = d.ipc_handle(handle, base))) /* of an allocation, which the offset lies in */
		return failed(&d, result, "cuIpcGetMemHandle, which takes memory of cudaMalloc", exporting);
	status = export_ipc(s, handle, at - base, length, &gpu, access, memory, &wants);
	if (!status && wants == PEERLANE_WANTS_DMA_BUF)
		lend(&d, s, base, (size + 4095) / 4096 * 4096, *memory); /* whole pages */
	return status;
}

int peerlane_register_timelines(peerlane_session *s, uint64_t *address)
{
	static const char what[] = "registering the session's timelines with CUDA";
	struct driver d;
	void *page;
	size_t bytes;
	int status, result;

	if (!address)
		return fail_call(PEERLANE_STATUS_INVALID, "%s: nowhere to write the address: NULL", what);
	if ((status = peerlane_timelines(s, &page, &bytes)) || (status = find(&d)) || (status = enter(s)))
		return status;
	if (s->registered) {
		leave(s);
		return fail_call(PEERLANE_STATUS_INVALID, "%s: they are registered", what);
	}
	s->registered = page;
	leave(s);
	/* Without the lock: a call of CUDA's can wait for a kernel. */
	if ((result = d.host_register(page, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP))) {
		status = failed(&d, result, "cuMemHostRegister", what);
	} else if ((result = d.host_address(address, page, 0))) {
		status = failed(&d, result, "cuMemHostGetDevicePointer", what);
		d.host_unregister(page);
	}
	pthread_mutex_lock(&s->lock);
	s->address = status ? 0 : *address;
	if (status)
		s->registered = NULL;
	pthread_mutex_unlock(&s->lock);
	return status;
}

int peerlane_unregister_timelines(peerlane_session *s)
{
	struct driver d;
	const void *page;
	int status, result;

	if (!s)
		return enter(s);
	if ((status = find(&d)))
		return status;
	pthread_mutex_lock(&s->lock); /* also of a session that has failed */
	page = s->registered;
	s->registered = NULL;
	s->address = 0;
	pthread_mutex_unlock(&s->lock);
	if (!page)
		return fail_call(PEERLANE_STATUS_INVALID, "the session's timelines are not registered with CUDA");
	if ((result = d.host_unregister(page)))
		return failed(&d, result, "cuMemHostUnregister", "taking the session's timelines from CUDA");
	return 0;
}

/* ordinal_of finds a GPU among those that CUDA shows. */
static int ordinal_of(const struct driver *d, const peerlane_gpu *gpu, int *device)
{
	peerlane_gpu other;
	int n, result;

	if ((result = d->count(&n)))
		return failed(d, result, "cuDeviceGetCount", staging);
	for (int i = 0; i < n; i++) {
		if ((result = d->device(device, i)) || (result = d->uuid(&other, *device)))
			return failed(d, result, "cuDeviceGetUuid", staging);
		if (!memcmp(&other, gpu, sizeof other))
			return 0;
	}
	return fail_call(PEERLANE_STATUS_WRONG_GPU, "%s: CUDA does not show its GPU to this process, whose streams are to copy", staging);
}

int map_staging(int fd, uint64_t bytes, const peerlane_gpu *gpu, const struct peerlane_staged *where, uint64_t *address)
{
	struct access access = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	const char *call = "cuMemImportFromShareableHandle";
	uint64_t handle, at = 0;
	struct driver d;
	char what[160], server[41];
	int status, result;

	peerlane_gpu_format(&where->server, server);
	snprintf(what, sizeof what, "%s on server GPU %u (%s)", staging, where->server_index, server);
	if ((status = find(&d)) || (status = ordinal_of(&d, gpu, &access.id)))
		return status;
	result = d.import(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	if (result == CUDA_ERROR_INVALID_DEVICE)
		return fail_call(PEERLANE_STATUS_CUDA, "%s: %s: CUDA_ERROR_INVALID_DEVICE (%d): that GPU's device node is not in this container; start it with --device peerlane.dev/gpu=N, where N is the client GPU's number on the host", what, call, result);
	if (result)
		return failed(&d, result, call, what);
	call = "cuMemAddressReserve";
	if (!(result = d.reserve(&at, bytes, 0, 0, 0))) {
		call = "cuMemMap";
		if ((result = d.map(at, bytes, 0, handle, 0))) {
			d.unreserve(at, bytes);
		} else {
			call = "cuMemSetAccess";
			if ((result = d.access(at, bytes, &access, 1))) {
				d.unmap(at, bytes);
				d.unreserve(at, bytes);
			}
		}
	}
	d.release(handle); /* the mapping keeps the memory */
	if (result)
		return failed(&d, result, call, what);
	*address = at;
	return 0;
}

void unmap_staging(const struct mapped *m)
{
	struct driver d;

	if (find(&d))
		return; /* it was there when this was mapped */
	d.unmap(m->address, m->bytes);
	d.unreserve(m->address, m->bytes);
}

/* on_stream finds the driver and a timeline's address for a stream. Of one that
 * changes hands it gives the error that ended it. */
static int on_stream(peerlane_session *s, uint32_t timeline, bool hands, struct driver *d, uint64_t *address)
{
	int status;

	if (timeline >= PEERLANE_TIMELINES)
		return fail_call(PEERLANE_STATUS_INVALID, "timeline %u: a session has %d, numbered from 0", timeline, PEERLANE_TIMELINES);
	if ((status = enter(s)))
		return status;
	*address = s->address + timeline * PEERLANE_TIMELINE_STRIDE;
	if (!s->address)
		status = fail_call(PEERLANE_STATUS_INVALID, "the session's timelines are not registered with CUDA; peerlane_register_timelines() does it");
	else if (hands)
		status = hand_over_status(s, timeline);
	leave(s);
	return status ? status : find(d);
}

/* uncaptured refuses a stream that is captured: what the values of a graph wait for is
 * there from the first replay on. */
static int uncaptured(const struct driver *d, void *stream, uint32_t timeline, const char *what)
{
	int capturing = 0, result = d->capturing(stream, &capturing);

	if (result)
		return failed(d, result, "cuStreamIsCapturing", what);
	if (!capturing)
		return 0;
	return fail_call(PEERLANE_STATUS_INVALID, "%s %u: it cannot be captured: every replay of the graph would have the same value, and none but the "
		"first would wait; capture the two-phase form, a hand-over (peerlane_hand_over, peerlane_stream_take and peerlane_stream_give), "
		"which waits for its turn and sets it back in the graph", what, timeline);
}

int peerlane_stream_wait(peerlane_session *s, void *stream, uint32_t timeline, uint64_t value)
{
	static const char what[] = "a stream's wait for timeline";
	struct driver d;
	uint64_t address;
	int result, status = on_stream(s, timeline, false, &d, &address);

	if (status || (status = uncaptured(&d, stream, timeline, what)))
		return status;
	result = d.wait_value(stream, address, value, CU_STREAM_WAIT_VALUE_GEQ);
	return result ? failed(&d, result, "cuStreamWaitValue64", what) : 0;
}

int peerlane_stream_advance(peerlane_session *s, void *stream, uint32_t timeline, uint64_t value)
{
	static const char what[] = "a stream's advance of timeline";
	struct driver d;
	uint64_t address;
	int result, status = on_stream(s, timeline, false, &d, &address);

	if (status || (status = uncaptured(&d, stream, timeline, what)))
		return status;
	result = d.write_value(stream, address, value, 0);
	return result ? failed(&d, result, "cuStreamWriteValue64", what) : 0;
}

int peerlane_stream_take(peerlane_session *s, void *stream, uint32_t timeline)
{
	struct driver d;
	uint64_t address;
	int result, status = on_stream(s, timeline, true, &d, &address);

	if (status)
		return status;
	result = d.wait_value(stream, address, PEERLANE_TURN_STREAM | PEERLANE_TIMELINE_END, CU_STREAM_WAIT_VALUE_AND);
	return result ? failed(&d, result, "cuStreamWaitValue64", "a stream's wait for its turn") : 0;
}

int peerlane_stream_give(peerlane_session *s, void *stream, uint32_t timeline)
{
	struct driver d;
	uint64_t address;
	int result, status = on_stream(s, timeline, true, &d, &address);

	if (status)
		return status;
	result = d.write_value(stream, address, PEERLANE_TURN_RELAY, 0);
	return result ? failed(&d, result, "cuStreamWriteValue64", "the end of a stream's turn") : 0;
}
