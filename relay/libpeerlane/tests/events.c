/* events SOCKET_A SOCKET_B GPU_A GPU_B: sends that wait for events of CUDA's IPC, which the
 * relay of a takes and that of b does not. */
#include "test.h"

#define BYTES (200 * 1024)
#define ROUNDS 20
#define INTERPROCESS (4 | 2) /* and without timing, as it has to be */
#define GATE 7               /* a timeline that holds the stream up */

static uint64_t at(uint64_t base, uint32_t timeline) { return base + timeline * PEERLANE_TIMELINE_STRIDE; }

int main(int argc, char **argv)
{
	int (*create)(void **, unsigned), (*record)(void *, void *), (*get_handle)(uint8_t *, void *), (*copy)(uint64_t, uint64_t, size_t, void *);
	uint8_t handle[64], forged[64] = {1};
	struct peerlane_options after = {.flags = PEERLANE_AFTER_EVENT};
	struct peerlane_staged out;
	peerlane_operation send, receive;
	peerlane_event event, other;
	uint64_t base;
	void *library, *of_cuda;

	must(argc == 5);
	gpu_open();
	library = dlopen(getenv("PEERLANE_CUDA_LIBRARY"), RTLD_NOW);
	must(library);
	*(void **)&create = dlsym(library, "cuEventCreate");
	*(void **)&record = dlsym(library, "cuEventRecord");
	*(void **)&get_handle = dlsym(library, "cuIpcGetEventHandle");
	*(void **)&copy = dlsym(library, "cuMemcpyAsync");
	must(create && record && get_handle && copy);
	struct side b = attach(argv[2], argv[4], 2 * MIB), a = attach(argv[1], argv[3], 2 * MIB);
	join(&a, &b);
	ok(peerlane_register_timelines(a.session, &base));
	ok(peerlane_staging_memory(a.session, 2 * MIB, &a.gpu.uuid, 0, &out));
	gpu_check(create(&of_cuda, INTERPROCESS), "cuEventCreate");
	gpu_check(get_handle(handle, of_cuda), "cuIpcGetEventHandle");
	ok(peerlane_open_event(a.session, handle, &a.gpu.uuid, &event));
	must(event != 0);

	after.after_event = event;
	for (uint64_t round = 1; round <= ROUNDS; round++) {
		put(&a, 0, BYTES, round);
		/* The stream does not come to the copy, and so not to the event, before it may. */
		gpu_check(cuda.wait_value(a.gpu.stream, at(base, GATE), round, 0), "cuStreamWaitValue64");
		gpu_check(copy(out.address, a.room.address, BYTES, a.gpu.stream), "cuMemcpyAsync");
		gpu_check(record(of_cuda, a.gpu.stream), "cuEventRecord");
		ok(peerlane_receive(b.session, b.connection, b.memory, 0, BYTES, NULL, &receive));
		ok(peerlane_send(a.session, a.connection, out.memory, 0, BYTES, &after, &send));
		if (round < 4)
			demand(PEERLANE_STATUS_TIMED_OUT, peerlane_wait(a.session, send, 20, NULL));
		else
			demand(PEERLANE_STATUS_PENDING, peerlane_test(a.session, send, NULL));
		ok(peerlane_timeline_advance(a.session, GATE, round));
		ok(peerlane_wait(a.session, send, -1, NULL));
		ok(peerlane_wait(b.session, receive, -1, NULL));
		gpu_check(cuda.set_context(b.gpu.context), "cuCtxSetCurrent");
		verify(&b, 0, BYTES, round);
		gpu_check(cuda.set_context(a.gpu.context), "cuCtxSetCurrent");
	}

	/* One that is cancelled while it waits; and what is closed under a send that waits
	 * goes when that does not any more. */
	gpu_check(cuda.wait_value(a.gpu.stream, at(base, GATE), ROUNDS + 1, 0), "cuStreamWaitValue64");
	gpu_check(record(of_cuda, a.gpu.stream), "cuEventRecord");
	ok(peerlane_send(a.session, a.connection, out.memory, 0, BYTES, &after, &send));
	ok(peerlane_cancel(a.session, send));
	demand(PEERLANE_STATUS_CANCELED, peerlane_wait(a.session, send, -1, NULL));
	ok(peerlane_receive(b.session, b.connection, b.memory, 0, BYTES, NULL, &receive));
	ok(peerlane_send(a.session, a.connection, out.memory, 0, BYTES, &after, &send));
	ok(peerlane_close_event(a.session, event));
	demand(PEERLANE_STATUS_PENDING, peerlane_test(a.session, send, NULL));
	ok(peerlane_timeline_advance(a.session, GATE, ROUNDS + 1));
	ok(peerlane_wait(a.session, send, -1, NULL));
	ok(peerlane_wait(b.session, receive, -1, NULL));
	ok(peerlane_send(a.session, a.connection, out.memory, 0, BYTES, &after, &send));
	demand(PEERLANE_STATUS_UNKNOWN_EVENT, peerlane_wait(a.session, send, -1, NULL));
	demand(PEERLANE_STATUS_UNKNOWN_EVENT, peerlane_close_event(a.session, event));

	/* What is refused. */
	demand(PEERLANE_STATUS_BAD_DESCRIPTOR, peerlane_open_event(a.session, forged, &a.gpu.uuid, &other));
	must(strstr(peerlane_error(), "/dev/shm") && strstr(peerlane_error(), "timeline"));
	demand(PEERLANE_STATUS_NOT_PERMITTED, peerlane_open_event(b.session, handle, &b.gpu.uuid, &other));
	must(strstr(peerlane_error(), "relay.events"));
	demand(PEERLANE_STATUS_WRONG_GPU, peerlane_open_event(a.session, handle, &out.server, &other));
	ok(peerlane_open_event(a.session, handle, &b.gpu.uuid, &other)); /* of another lane than the connection's */
	after.after_event = other;
	ok(peerlane_send(a.session, a.connection, out.memory, 0, BYTES, &after, &send));
	demand(PEERLANE_STATUS_WRONG_GPU, peerlane_wait(a.session, send, -1, NULL));
	ok(peerlane_close_event(a.session, other));
	demand(PEERLANE_STATUS_INVALID, peerlane_open_event(a.session, NULL, &a.gpu.uuid, &other));
	demand(PEERLANE_STATUS_INVALID, peerlane_open_event(a.session, handle, &a.gpu.uuid, NULL));
	demand(PEERLANE_STATUS_INVALID, peerlane_open_event(NULL, handle, &a.gpu.uuid, &other));
	for (int i = 0; i < PEERLANE_MAX_EVENTS; i++)
		ok(peerlane_open_event(a.session, handle, &a.gpu.uuid, &other));
	demand(PEERLANE_STATUS_LIMIT, peerlane_open_event(a.session, handle, &a.gpu.uuid, &other));

	/* A session that ends while a send waits. */
	after.after_event = other;
	gpu_check(cuda.wait_value(a.gpu.stream, at(base, GATE), ROUNDS + 2, 0), "cuStreamWaitValue64");
	gpu_check(record(of_cuda, a.gpu.stream), "cuEventRecord");
	ok(peerlane_send(a.session, a.connection, out.memory, 0, BYTES, &after, &send));
	ok(peerlane_timeline_advance(a.session, GATE + 1, 1));
	ok(peerlane_disconnect(a.session, a.connection));
	demand(PEERLANE_STATUS_PEER_CLOSED, peerlane_wait(a.session, send, -1, NULL));
	ok(peerlane_timeline_advance(a.session, GATE, ROUNDS + 2));
	gpu_check(cuda.synchronize(a.gpu.stream), "cuStreamSynchronize");
	ok(peerlane_unregister_timelines(a.session));
	peerlane_close(a.session);
	peerlane_close(b.session);
	return 0;
}
