/* kinds SOCKET_A SOCKET_B GPU_A GPU_B: memory of several allocations, host memory, and
 * memory of cudaMalloc, which the relay of a takes and that of b does not. */
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

#define GRANULE (2 * MIB)
#define PARTS 4

/* several makes a range of PARTS allocations, of 1, 2, 1 and 2 granules. */
static uint64_t several(const struct gpu *g, struct peerlane_allocation list[PARTS])
{
	struct gpu_allocation_properties properties = {.type = 1, .handle_types = 1, .location = {1, g->device}};
	struct gpu_access access = {{1, g->device}, 3};
	uint64_t address, handle, used = 0;

	gpu_check(cuda.reserve(&address, 6 * GRANULE, 0, 0, 0), "cuMemAddressReserve");
	for (int i = 0; i < PARTS; i++) {
		list[i] = (struct peerlane_allocation){.bytes = (uint64_t)(1 + i % 2) * GRANULE};
		gpu_check(cuda.create(&handle, list[i].bytes, &properties, 0), "cuMemCreate");
		gpu_check(cuda.export(&list[i].fd, handle, 1, 0), "cuMemExportToShareableHandle");
		gpu_check(cuda.map(address + used, list[i].bytes, 0, handle, 0), "cuMemMap");
		gpu_check(cuda.release(handle), "cuMemRelease");
		used += list[i].bytes;
	}
	must(used == 6 * GRANULE);
	gpu_check(cuda.access(address, used, &access, 1), "cuMemSetAccess");
	return address;
}

static int mapped(const void *at)
{
	unsigned long from, to;
	char line[256];
	FILE *f = fopen("/proc/self/maps", "r");
	int found = 0;

	must(f);
	while (fgets(line, sizeof line, f))
		found |= sscanf(line, "%lx-%lx", &from, &to) == 2 && from <= (uintptr_t)at && (uintptr_t)at < to && strstr(line, "memfd") != NULL;
	fclose(f);
	return found;
}

static void move(struct side *a, peerlane_memory from, uint64_t at, struct side *b, peerlane_memory to, uint64_t n)
{
	peerlane_operation send, receive;
	uint64_t moved;

	ok(peerlane_receive(b->session, b->connection, to, 0, n, NULL, &receive));
	ok(peerlane_send(a->session, a->connection, from, at, n, NULL, &send));
	ok(peerlane_wait(a->session, send, -1, &moved));
	must(moved == n);
	ok(peerlane_wait(b->session, receive, -1, &moved));
	must(moved == n);
}

int main(int argc, char **argv)
{
	struct peerlane_allocation list[PARTS], spoiled[PARTS];
	peerlane_memory range, middle, host_a, host_b, plain;
	unsigned char *want = malloc(6 * GRANULE), *data_a, *data_b;
	const uint64_t n = 4 * GRANULE + 4242, first = GRANULE / 2;
	void *data;
	pid_t pid;
	int status;

	must(argc == 5);
	gpu_open();
	struct side b = attach(argv[2], argv[4], 6 * GRANULE), a = attach(argv[1], argv[3], 0);
	join(&a, &b); /* in a's context from here on */

	/* Several allocations, part of the first and of the last. */
	a.room.address = several(&a.gpu, list);
	list[0].offset = first;
	list[PARTS - 1].length = GRANULE + 1;
	ok(peerlane_export(a.session, list, PARTS, &a.gpu.uuid, 0, &range));
	put(&a, first, n, 1);
	ok(peerlane_host_memory(b.session, 6 * GRANULE - 5, &b.gpu.uuid, 0, &data, &host_b));
	data_b = data;
	must(data_b[0] == 0 && data_b[6 * GRANULE - 6] == 0 && mapped(data_b));
	move(&a, range, 0, &b, host_b, n);
	fill(want, n, 1);
	must(!memcmp(data_b, want, n));
	/* The same by its address; and what is inside one. */
	ok(peerlane_export_pointer(a.session, (void *)(uintptr_t)(a.room.address + first), n, 0, &middle));
	put(&a, first, n, 2);
	move(&a, middle, 0, &b, host_b, n);
	fill(want, n, 2);
	must(!memcmp(data_b, want, n));
	peerlane_operation refused;
	ok(peerlane_send(a.session, a.connection, middle, 1, n, NULL, &refused));
	demand(PEERLANE_STATUS_OUT_OF_RANGE, peerlane_wait(a.session, refused, -1, NULL));
	demand(PEERLANE_STATUS_CUDA, peerlane_export_pointer(a.session, (void *)(uintptr_t)a.room.address, 6 * GRANULE + 1, 0, &plain));

	/* A list that cannot be leaves nothing behind. */
	memcpy(spoiled, list, sizeof list);
	spoiled[1].offset = 8;
	demand(PEERLANE_STATUS_INVALID, peerlane_export(a.session, spoiled, PARTS, &a.gpu.uuid, 0, &plain));
	memcpy(spoiled, list, sizeof list);
	spoiled[2].fd = 1000;
	demand(PEERLANE_STATUS_INVALID, peerlane_export(a.session, spoiled, PARTS, &a.gpu.uuid, 0, &plain));
	spoiled[2].fd = STDIN_FILENO;
	demand(PEERLANE_STATUS_BAD_DESCRIPTOR, peerlane_export(a.session, spoiled, PARTS, &a.gpu.uuid, 0, &plain));
	demand(PEERLANE_STATUS_LIMIT, peerlane_export(a.session, spoiled, PEERLANE_MAX_PARTS + 1, &a.gpu.uuid, 0, &plain));
	ok(peerlane_unexport(a.session, range));
	ok(peerlane_export(a.session, list, PARTS, &a.gpu.uuid, 0, &range));

	/* Host memory sends as well. */
	ok(peerlane_host_memory(a.session, 100000, &a.gpu.uuid, PEERLANE_ACCESS_SEND, &data, &host_a));
	data_a = data;
	fill(data_a, 100000, 3);
	move(&a, host_a, 0, &b, b.memory, 100000);
	gpu_check(cuda.set_context(b.gpu.context), "cuCtxSetCurrent");
	verify(&b, 0, 100000, 3);
	gpu_check(cuda.set_context(a.gpu.context), "cuCtxSetCurrent");
	ok(peerlane_send(a.session, a.connection, host_a, 99999, 2, NULL, &refused));
	demand(PEERLANE_STATUS_OUT_OF_RANGE, peerlane_wait(a.session, refused, -1, NULL));
	/* A child shares it. */
	must((pid = fork()) >= 0);
	if (!pid) {
		data_a[7] = 99;
		demand(PEERLANE_STATUS_FORKED, peerlane_unexport(a.session, host_a));
		peerlane_close(a.session);
		peerlane_close(b.session);
		must(!mapped(data_b));
		_exit(0);
	}
	must(waitpid(pid, &status, 0) == pid && status == 0);
	must(data_a[7] == 99);
	ok(peerlane_unexport(a.session, host_a));
	must(!mapped(data_a));
	demand(PEERLANE_STATUS_UNKNOWN_MEMORY, peerlane_unexport(a.session, host_a));
	/* More than there is. */
	demand(PEERLANE_STATUS_LIMIT, peerlane_host_memory(a.session, (uint64_t)1 << 50, &a.gpu.uuid, 0, &data, &host_a));

	/* cudaMalloc's. */
	void *library = dlopen(getenv("PEERLANE_CUDA_LIBRARY"), RTLD_NOW);
	int (*allocate)(uint64_t *, size_t) = library ? (int (*)(uint64_t *, size_t))dlsym(library, "cuMemAlloc_v2") : NULL;
	int (*get_handle)(uint8_t *, uint64_t) = library ? (int (*)(uint8_t *, uint64_t))dlsym(library, "cuIpcGetMemHandle") : NULL;
	uint8_t handle[64];
	must(allocate && get_handle);
	gpu_check(allocate(&a.room.address, GRANULE), "cuMemAlloc");
	gpu_check(get_handle(handle, a.room.address), "cuIpcGetMemHandle");
	put(&a, 16, 5000, 4);
	ok(peerlane_export_ipc(a.session, handle, 16, 5000, &a.gpu.uuid, 0, &plain));
	move(&a, plain, 0, &b, host_b, 5000);
	fill(want, 5000, 4);
	must(!memcmp(data_b, want, 5000));
	demand(PEERLANE_STATUS_CUDA, peerlane_export_pointer(a.session, (void *)(uintptr_t)a.room.address, 8, 0, &plain));
	must(strstr(peerlane_error(), "peerlane_export_ipc"));
	demand(PEERLANE_STATUS_NOT_PERMITTED, peerlane_export_ipc(b.session, handle, 0, 8, &b.gpu.uuid, 0, &plain));
	must(strstr(peerlane_error(), "relay.cuda_ipc"));
	peerlane_close(a.session);
	peerlane_close(b.session);
	must(!mapped(data_b));
	free(want);
	return 0;
}
