/* lent SOCKET GPU: exports memory that NICs can have, by its address, beginning in its midst;
 * memory that they cannot; memory of two allocations; and the first by its descriptor. */
#include "test.h"

#define GRANULE (2 * MIB)

/* allocate makes an allocation and maps it. */
static int allocate(const struct gpu *g, uint64_t address, unsigned char capable)
{
	struct gpu_allocation_properties properties = {.type = 1, .handle_types = 1, .location = {1, g->device}, .flags = {0, capable}};
	struct gpu_access access = {{1, g->device}, 3};
	uint64_t handle;
	int fd;

	gpu_check(cuda.create(&handle, GRANULE, &properties, 0), "cuMemCreate");
	gpu_check(cuda.export(&fd, handle, 1, 0), "cuMemExportToShareableHandle");
	gpu_check(cuda.map(address, GRANULE, 0, handle, 0), "cuMemMap");
	gpu_check(cuda.release(handle), "cuMemRelease");
	gpu_check(cuda.access(address, GRANULE, &access, 1), "cuMemSetAccess");
	return fd;
}

int main(int argc, char **argv)
{
	struct peerlane_allocation one = {.bytes = GRANULE};
	peerlane_session *s;
	peerlane_memory memory;
	peerlane_gpu uuid;
	uint64_t at;

	must(argc == 3);
	gpu_open();
	ok(peerlane_gpu_parse(argv[2], &uuid));
	struct gpu g = gpu_use(&uuid);
	gpu_check(cuda.reserve(&at, 4 * GRANULE, 0, 0, 0), "cuMemAddressReserve");
	one.fd = allocate(&g, at, 1);
	allocate(&g, at + GRANULE, 0);
	allocate(&g, at + 2 * GRANULE, 1);
	allocate(&g, at + 3 * GRANULE, 1);
	ok(peerlane_dial(argv[1], NULL, 0, -1, &s));
	ok(peerlane_export_pointer(s, (void *)(uintptr_t)(at + 4242), 4096, PEERLANE_ACCESS_SEND, &memory));
	ok(peerlane_export_pointer(s, (void *)(uintptr_t)(at + GRANULE), 4096, PEERLANE_ACCESS_SEND, &memory));
	ok(peerlane_export_pointer(s, (void *)(uintptr_t)(at + 3 * GRANULE - 8), 16, PEERLANE_ACCESS_SEND, &memory));
	ok(peerlane_export(s, &one, 1, &uuid, PEERLANE_ACCESS_SEND, &memory));
	peerlane_close(s);
	printf("done\n");
	return 0;
}
