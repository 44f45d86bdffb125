/* copies SOCKET_A SOCKET_B GPU_A GPU_B SOCKET_C: clients that copy themselves, to and
 * from memory on their server GPUs, on streams of theirs. The container of a sees the
 * server GPU, and so does that of b; that of c, with the lane of a's GPU, does not. */
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

#define DEPTH 4
#define ROUNDS 40
#define BYTES (300 * 1024 + 3)
#define ROOM (512 * 1024)

static uint64_t at(uint64_t base, uint32_t timeline) { return base + timeline * PEERLANE_TIMELINE_STRIDE; }

int main(int argc, char **argv)
{
	int (*copy)(uint64_t, uint64_t, size_t, void *) = NULL;
	struct peerlane_staged out, in, more;
	uint64_t base_a, base_b;
	peerlane_operation sends[DEPTH], receives[DEPTH], refused;
	peerlane_session *c;
	uint64_t moved;
	void *library;
	pid_t pid;
	int status;

	must(argc == 6);
	gpu_open();
	library = dlopen(getenv("PEERLANE_CUDA_LIBRARY"), RTLD_NOW);
	must(library);
	*(void **)&copy = dlsym(library, "cuMemcpyAsync");
	must(copy);
	struct side a = attach(argv[1], argv[3], ROUNDS * ROOM), b = attach(argv[2], argv[4], ROUNDS * ROOM);
	join(&a, &b);
	ok(peerlane_register_timelines(b.session, &base_b));
	gpu_check(cuda.set_context(a.gpu.context), "cuCtxSetCurrent");
	ok(peerlane_register_timelines(a.session, &base_a));
	ok(peerlane_staging_memory(a.session, DEPTH * ROOM, &a.gpu.uuid, PEERLANE_ACCESS_SEND, &out));
	gpu_check(cuda.set_context(b.gpu.context), "cuCtxSetCurrent");
	ok(peerlane_staging_memory(b.session, DEPTH * ROOM, &b.gpu.uuid, 0, &in));
	must(out.bytes >= DEPTH * ROOM && out.address && memcmp(&out.server, &in.server, sizeof in.server) && out.server_index != in.server_index);

	/* A ring of slots at each side. */
	for (uint64_t round = 0; round < ROUNDS; round++) {
		struct peerlane_options after = {.flags = PEERLANE_AFTER, .after_timeline = 1, .after_value = round + 1};
		struct peerlane_options signals = {.flags = PEERLANE_SIGNAL, .signal_timeline = 2, .signal_value = round + 1};
		uint64_t slot = round % DEPTH, offset = slot * ROOM;

		if (round >= DEPTH) {
			ok(peerlane_wait(a.session, sends[slot], -1, &moved));
			must(moved == BYTES);
			ok(peerlane_wait(b.session, receives[slot], -1, &moved));
			must(moved == BYTES);
		}
		gpu_check(cuda.set_context(b.gpu.context), "cuCtxSetCurrent");
		gpu_check(cuda.synchronize(b.gpu.stream), "cuStreamSynchronize"); /* it has been copied out */
		ok(peerlane_receive(b.session, b.connection, in.memory, offset, BYTES, &signals, &receives[slot]));
		gpu_check(cuda.wait_value(b.gpu.stream, at(base_b, 2), round + 1, 0), "cuStreamWaitValue64");
		gpu_check(copy(b.room.address + round * ROOM, in.address + offset, BYTES, b.gpu.stream), "cuMemcpyAsync");
		gpu_check(cuda.set_context(a.gpu.context), "cuCtxSetCurrent");
		put(&a, round * ROOM, BYTES, round);
		gpu_check(copy(out.address + offset, a.room.address + round * ROOM, BYTES, a.gpu.stream), "cuMemcpyAsync");
		gpu_check(cuda.write_value(a.gpu.stream, at(base_a, 1), round + 1, 0), "cuStreamWriteValue64");
		ok(peerlane_send(a.session, a.connection, out.memory, offset, BYTES, &after, &sends[slot]));
	}
	for (int i = 0; i < DEPTH; i++) {
		ok(peerlane_wait(a.session, sends[i], -1, NULL));
		ok(peerlane_wait(b.session, receives[i], -1, NULL));
	}
	gpu_check(cuda.set_context(b.gpu.context), "cuCtxSetCurrent");
	gpu_check(cuda.synchronize(b.gpu.stream), "cuStreamSynchronize");
	for (uint64_t round = 0; round < ROUNDS; round++)
		verify(&b, round * ROOM, BYTES, round);

	/* What is not asked for as it should be. */
	ok(peerlane_receive(b.session, b.connection, in.memory, in.bytes, 1, NULL, &refused));
	demand(PEERLANE_STATUS_OUT_OF_RANGE, peerlane_wait(b.session, refused, -1, NULL));
	demand(PEERLANE_STATUS_INVALID, peerlane_staging_memory(NULL, 8, &a.gpu.uuid, 0, &more));
	demand(PEERLANE_STATUS_INVALID, peerlane_staging_memory(a.session, 8, NULL, 0, &more));
	demand(PEERLANE_STATUS_INVALID, peerlane_staging_memory(a.session, 8, &a.gpu.uuid, 0, NULL));
	demand(PEERLANE_STATUS_OUT_OF_RANGE, peerlane_staging_memory(a.session, 0, &a.gpu.uuid, 0, &more));
	demand(PEERLANE_STATUS_MALFORMED, peerlane_staging_memory(a.session, 8, &a.gpu.uuid, 4, &more));
	demand(PEERLANE_STATUS_WRONG_GPU, peerlane_staging_memory(a.session, 8, &out.server, 0, &more));
	demand(PEERLANE_STATUS_LIMIT, peerlane_staging_memory(a.session, (uint64_t)1 << 50, &a.gpu.uuid, 0, &more));
	must(strstr(peerlane_error(), "relay.limits.client_staging"));
	ok(peerlane_dial(argv[5], NULL, 0, -1, &c));
	demand(PEERLANE_STATUS_NOT_PERMITTED, peerlane_staging_memory(c, 8, &a.gpu.uuid, 0, &more));
	must(strstr(peerlane_error(), "--device peerlane.dev/gpu="));
	peerlane_close(c);

	/* A child has none of it, and takes nothing from its parent. */
	must((pid = fork()) >= 0);
	if (!pid) {
		demand(PEERLANE_STATUS_FORKED, peerlane_unexport(a.session, out.memory));
		peerlane_close(a.session);
		peerlane_close(b.session);
		_exit(0);
	}
	must(waitpid(pid, &status, 0) == pid && status == 0);
	gpu_check(cuda.set_context(a.gpu.context), "cuCtxSetCurrent");
	gpu_check(copy(out.address, a.room.address, BYTES, a.gpu.stream), "cuMemcpyAsync");
	gpu_check(cuda.synchronize(a.gpu.stream), "cuStreamSynchronize");

	/* Taken back it is nobody's, and there is room for as much again. */
	ok(peerlane_unexport(a.session, out.memory));
	must(copy(out.address, a.room.address, BYTES, a.gpu.stream) != 0);
	demand(PEERLANE_STATUS_UNKNOWN_MEMORY, peerlane_unexport(a.session, out.memory));
	for (int i = 0; i < 4; i++) {
		ok(peerlane_staging_memory(a.session, (uint64_t)1 << 30, &a.gpu.uuid, 0, &more));
		ok(peerlane_unexport(a.session, more.memory));
	}
	ok(peerlane_unregister_timelines(a.session));
	peerlane_close(a.session);
	gpu_check(cuda.set_context(b.gpu.context), "cuCtxSetCurrent");
	ok(peerlane_unregister_timelines(b.session));
	peerlane_close(b.session); /* which unmaps what is left */
	must(copy(b.room.address, in.address, BYTES, b.gpu.stream) != 0);
	return 0;
}
