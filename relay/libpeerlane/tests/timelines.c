/* timelines SOCKET_A SOCKET_B GPU_A GPU_B: streams hand data over, without a CPU in
 * between; then a stream waits for what never comes, while the relay is killed, and
 * its successor serves. */
#include <fcntl.h>
#include <unistd.h>

#include "test.h"

#define BYTES (100 * 1024)
#define ROUNDS 50

static uint64_t at(uint64_t base, uint32_t timeline) { return base + timeline * PEERLANE_TIMELINE_STRIDE; }

static int threads(void)
{
	char line[128];
	FILE *f = fopen("/proc/self/status", "r");
	int n = 0;

	must(f);
	while (fgets(line, sizeof line, f))
		if (sscanf(line, "Threads: %d", &n) == 1)
			break;
	fclose(f);
	return n;
}

int main(int argc, char **argv)
{
	uint64_t base_a, base_b, value;
	unsigned char *host = malloc(BYTES), *want = malloc(BYTES);
	peerlane_operation pending, send, receive;
	size_t bytes;
	void *page;
	int before;

	must(argc == 5);
	gpu_open();
	struct side a = attach(argv[1], argv[3], 2 * MIB), b = attach(argv[2], argv[4], 2 * MIB);
	join(&a, &b);

	gpu_check(cuda.set_context(b.gpu.context), "cuCtxSetCurrent");
	before = threads();
	ok(peerlane_register_timelines(b.session, &base_b));
	demand(PEERLANE_STATUS_INVALID, peerlane_register_timelines(b.session, &base_b));
	ok(peerlane_timelines(b.session, &page, &bytes));
	must(bytes == PEERLANE_TIMELINES * PEERLANE_TIMELINE_STRIDE);
	must(threads() <= before + 1); /* one for the session, and no more for a second call */
	gpu_check(cuda.set_context(a.gpu.context), "cuCtxSetCurrent");
	ok(peerlane_register_timelines(a.session, &base_a));

	for (uint64_t round = 1; round <= ROUNDS; round++) {
		struct peerlane_options after = {.flags = PEERLANE_AFTER, .after_timeline = 3, .after_value = round};
		struct peerlane_options signals = {.flags = PEERLANE_SIGNAL, .signal_timeline = 255, .signal_value = round};

		/* All is posted before there is anything to send. */
		ok(peerlane_receive(b.session, b.connection, b.memory, 0, BYTES, &signals, NULL));
		ok(peerlane_send(a.session, a.connection, a.memory, 0, BYTES, &after, &send));
		demand(PEERLANE_STATUS_PENDING, peerlane_test(a.session, send, NULL));
		gpu_check(cuda.set_context(b.gpu.context), "cuCtxSetCurrent");
		gpu_check(cuda.wait_value(b.gpu.stream, at(base_b, 255), round, 0), "cuStreamWaitValue64");
		fill(want, BYTES, round);
		gpu_check(cuda.set_context(a.gpu.context), "cuCtxSetCurrent");
		gpu_check(cuda.to_gpu(a.room.address, want, BYTES, a.gpu.stream), "cuMemcpyHtoDAsync");
		gpu_check(cuda.write_value(a.gpu.stream, at(base_a, 3), round, 0), "cuStreamWriteValue64");
		gpu_check(cuda.set_context(b.gpu.context), "cuCtxSetCurrent");
		gpu_check(cuda.synchronize(b.gpu.stream), "cuStreamSynchronize");
		gpu_read(&b.gpu, host, b.room.address, BYTES);
		must(!memcmp(host, want, BYTES));
		ok(peerlane_wait(a.session, send, -1, NULL));
		ok(peerlane_timeline_value(b.session, 255, &value));
		must(value == round && peerlane_reached(value, round) && !peerlane_reached(value, round + 1));
	}
	/* From the CPU. */
	struct peerlane_options after = {.flags = PEERLANE_AFTER, .after_timeline = 9, .after_value = 5};
	ok(peerlane_receive(b.session, b.connection, b.memory, 0, 8, NULL, &receive));
	ok(peerlane_send(a.session, a.connection, a.memory, 0, 8, &after, &send));
	ok(peerlane_timeline_advance(a.session, 9, 4));
	demand(PEERLANE_STATUS_TIMED_OUT, peerlane_wait(a.session, send, 20, NULL));
	ok(peerlane_timeline_advance(a.session, 9, 5));
	ok(peerlane_wait(a.session, send, -1, NULL));
	ok(peerlane_wait(b.session, receive, -1, NULL));
	after.after_timeline = PEERLANE_TIMELINES;
	demand(PEERLANE_STATUS_INVALID, peerlane_send(a.session, a.connection, a.memory, 0, 8, &after, &send));
	demand(PEERLANE_STATUS_INVALID, peerlane_timeline_value(a.session, PEERLANE_TIMELINES, &value));
	demand(PEERLANE_STATUS_INVALID, peerlane_timeline_advance(a.session, ~0u, 1));

	/* The receiver's relay dies: no thread of this program is in the library. */
	ok(peerlane_receive(b.session, b.connection, b.memory, 0, BYTES, NULL, &pending));
	gpu_check(cuda.wait_value(b.gpu.stream, at(base_b, 77), 1, 0), "cuStreamWaitValue64");
	say("kill b");
	gpu_check(cuda.synchronize(b.gpu.stream), "cuStreamSynchronize");
	/* The result first, then the session's error, which stays. */
	struct peerlane_result result;
	unsigned count;
	ok(peerlane_poll(b.session, &result, 1, &count));
	must(count == 1 && result.operation == pending && result.status == PEERLANE_STATUS_RELAY_DIED);
	demand(PEERLANE_STATUS_RELAY_DIED, peerlane_poll(b.session, &result, 1, &count));
	for (int i = 0; i < 2; i++) {
		demand(PEERLANE_STATUS_RELAY_DIED, peerlane_session_status(b.session));
		must(strstr(peerlane_error(), "the relay of this container died; connect to it again"));
		demand(PEERLANE_STATUS_RELAY_DIED, peerlane_receive(b.session, b.connection, b.memory, 0, 8, NULL, &receive));
		demand(PEERLANE_STATUS_RELAY_DIED, peerlane_timeline_value(b.session, 0, &value));
		must(value == PEERLANE_TIMELINE_END);
	}
	must(*(uint64_t *)page == PEERLANE_TIMELINE_END);
	/* The other side hears of it. */
	ok(peerlane_send(a.session, a.connection, a.memory, 0, 8, NULL, &send));
	demand(PEERLANE_STATUS_PEER_RELAY_DIED, peerlane_wait(a.session, send, -1, NULL));
	must(strstr(peerlane_error(), "the relay of container b died"));
	demand(PEERLANE_STATUS_PEER_RELAY_DIED, peerlane_connection_status(a.session, a.connection));
	ok(peerlane_disconnect(a.session, a.connection));

	gpu_check(cuda.set_context(b.gpu.context), "cuCtxSetCurrent");
	ok(peerlane_unregister_timelines(b.session));
	demand(PEERLANE_STATUS_INVALID, peerlane_unregister_timelines(b.session));
	peerlane_close(b.session);
	must(fcntl(b.room.fd, F_GETFD) >= 0); /* which stays the caller's */

	say("start b");
	hear();
	/* With the memory that is there. */
	struct peerlane_allocation allocation = {.fd = b.room.fd, .bytes = b.room.bytes};
	ok(peerlane_dial(argv[2], NULL, 0, -1, &b.session));
	ok(peerlane_export(b.session, &allocation, 1, &b.gpu.uuid, 0, &b.memory));
	join(&a, &b);
	gpu_check(cuda.set_context(a.gpu.context), "cuCtxSetCurrent");
	put(&a, 0, BYTES, 4711);
	ok(peerlane_receive(b.session, b.connection, b.memory, 0, BYTES, NULL, &receive));
	ok(peerlane_send(a.session, a.connection, a.memory, 0, BYTES, NULL, &send));
	ok(peerlane_wait(b.session, receive, -1, &value));
	ok(peerlane_wait(a.session, send, -1, &value));
	gpu_check(cuda.set_context(b.gpu.context), "cuCtxSetCurrent");
	verify(&b, 0, BYTES, 4711);
	ok(peerlane_register_timelines(b.session, &base_b));
	peerlane_close(b.session); /* which takes them from CUDA */
	gpu_check(cuda.set_context(a.gpu.context), "cuCtxSetCurrent");
	ok(peerlane_unregister_timelines(a.session));
	peerlane_close(a.session);
	free(host);
	free(want);
	say("done");
	return 0;
}
