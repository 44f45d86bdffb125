/* handover SOCKET_A SOCKET_B GPU_A GPU_B: captured graphs hand data over, 1,000 replays
 * of each; then replays wait for what never comes, while the sender's relay is killed. */
#include "test.h"

#define BYTES (8 * 1024)
#define AHEAD 25
#define FULL 3 /* timelines */
#define ARRIVED 255

/* X(member, symbol, parameters) */
#define MORE_CALLS(X) \
	X(begin, "cuStreamBeginCapture_v2", (void *, int)) \
	X(end, "cuStreamEndCapture", (void *, void **)) \
	X(instantiate, "cuGraphInstantiateWithFlags", (void **, void *, unsigned long long)) \
	X(launch, "cuGraphLaunch", (void *, void *)) \
	X(destroy_graph, "cuGraphDestroy", (void *)) \
	X(destroy, "cuGraphExecDestroy", (void *)) \
	X(query, "cuStreamQuery", (void *)) \
	X(host_alloc, "cuMemHostAlloc", (void **, size_t, unsigned)) \
	X(host_free, "cuMemFreeHost", (void *))

static struct {
#define X(member, symbol, parameters) int(*member) parameters;
	MORE_CALLS(X)
#undef X
} more;

static void find_more(void)
{
	const char *path = getenv("PEERLANE_CUDA_LIBRARY");
	void *library = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW);

	must(library);
#define X(member, symbol, parameters) \
	*(void **)&more.member = dlsym(library, symbol); \
	must(more.member);
	MORE_CALLS(X)
#undef X
}

static void use(const struct side *s) { gpu_check(cuda.set_context(s->gpu.context), "cuCtxSetCurrent"); }

static void begin(const struct side *s)
{
	use(s);
	gpu_check(more.begin(s->gpu.stream, 0), "cuStreamBeginCapture");
}

static void *end(const struct side *s)
{
	void *graph, *launchable;

	gpu_check(more.end(s->gpu.stream, &graph), "cuStreamEndCapture");
	gpu_check(more.instantiate(&launchable, graph, 0), "cuGraphInstantiate");
	gpu_check(more.destroy_graph(graph), "cuGraphDestroy");
	return launchable;
}

static void launch(const struct side *s, void *graph)
{
	use(s);
	gpu_check(more.launch(graph, s->gpu.stream), "cuGraphLaunch");
}

static void synchronize(const struct side *s)
{
	use(s);
	gpu_check(cuda.synchronize(s->gpu.stream), "cuStreamSynchronize");
}

int main(int argc, char **argv)
{
	struct peerlane_options full = {.flags = PEERLANE_HAND_OVER, .after_timeline = FULL}, wrong = full;
	struct peerlane_options arrived = {.flags = PEERLANE_HAND_OVER, .after_timeline = ARRIVED};
	peerlane_operation sends[AHEAD], receives[AHEAD], operation;
	unsigned char *from, *to, *want = malloc(BYTES);
	uint64_t base, moved;
	void *fills, *empties;

	must(argc == 5);
	gpu_open();
	find_more();
	struct side a = attach(argv[1], argv[3], 2 * MIB), b = attach(argv[2], argv[4], 2 * MIB);
	join(&a, &b);
	use(&a);
	demand(PEERLANE_STATUS_INVALID, peerlane_stream_wait(a.session, a.gpu.stream, 0, 1)); /* not registered */
	ok(peerlane_register_timelines(a.session, &base));
	gpu_check(more.host_alloc((void **)&from, BYTES, 3), "cuMemHostAlloc");
	use(&b);
	ok(peerlane_register_timelines(b.session, &base));
	gpu_check(more.host_alloc((void **)&to, BYTES, 3), "cuMemHostAlloc");

	demand(PEERLANE_STATUS_INVALID, peerlane_stream_take(a.session, a.gpu.stream, FULL)); /* no hand-over yet */
	demand(PEERLANE_STATUS_INVALID, peerlane_send(a.session, a.connection, a.memory, 0, BYTES, &full, NULL));
	demand(PEERLANE_STATUS_INVALID, peerlane_hand_over(a.session, FULL, 0));
	demand(PEERLANE_STATUS_INVALID, peerlane_hand_over(a.session, PEERLANE_TIMELINES, PEERLANE_TURN_STREAM));
	ok(peerlane_hand_over(a.session, FULL, PEERLANE_TURN_STREAM));
	ok(peerlane_hand_over(b.session, ARRIVED, PEERLANE_TURN_RELAY));
	wrong.flags |= PEERLANE_SIGNAL;
	demand(PEERLANE_STATUS_INVALID, peerlane_send(a.session, a.connection, a.memory, 0, BYTES, &wrong, NULL));

	/* Values that grow cannot be captured, and the capture goes on. */
	begin(&a);
	demand(PEERLANE_STATUS_INVALID, peerlane_stream_wait(a.session, a.gpu.stream, 0, 1));
	must(strstr(peerlane_error(), "two-phase") && strstr(peerlane_error(), "peerlane_hand_over"));
	demand(PEERLANE_STATUS_INVALID, peerlane_stream_advance(a.session, a.gpu.stream, 0, 1));
	ok(peerlane_stream_take(a.session, a.gpu.stream, FULL));
	gpu_check(cuda.to_gpu(a.room.address, from, BYTES, a.gpu.stream), "cuMemcpyHtoDAsync");
	ok(peerlane_stream_give(a.session, a.gpu.stream, FULL));
	fills = end(&a);
	begin(&b);
	ok(peerlane_stream_take(b.session, b.gpu.stream, ARRIVED));
	gpu_check(cuda.from_gpu(to, b.room.address, BYTES, b.gpu.stream), "cuMemcpyDtoHAsync");
	ok(peerlane_stream_give(b.session, b.gpu.stream, ARRIVED));
	empties = end(&b);
	use(&a);
	ok(peerlane_stream_advance(a.session, a.gpu.stream, 0, 7)); /* outside of a capture */
	ok(peerlane_stream_wait(a.session, a.gpu.stream, 0, 7));
	synchronize(&a);

	for (unsigned replay = 0; replay < (thorough() ? 1000 : 250); replay++) {
		/* Several operations at once wait for the turns to come. */
		for (unsigned i = 0; replay % AHEAD == 0 && i < AHEAD; i++) {
			ok(peerlane_receive(b.session, b.connection, b.memory, 0, BYTES, &arrived, &receives[i]));
			ok(peerlane_send(a.session, a.connection, a.memory, 0, BYTES, &full, &sends[i]));
		}
		if (!replay) { /* they would take turns of a new one */
			demand(PEERLANE_STATUS_INVALID, peerlane_hand_over(a.session, FULL, PEERLANE_TURN_STREAM));
			must(strstr(peerlane_error(), "have not ended"));
		}
		launch(&b, empties);
		fill(from, BYTES, replay + 1);
		launch(&a, fills);
		synchronize(&b);
		fill(want, BYTES, replay + 1);
		if (memcmp(to, want, BYTES)) {
			fprintf(stderr, "replay %u has wrong bytes\n", replay);
			return 1;
		}
		synchronize(&a); /* from is read */
		for (unsigned i = 0; replay % AHEAD == AHEAD - 1 && i < AHEAD; i++) {
			ok(peerlane_wait(a.session, sends[i], -1, &moved));
			must(moved == BYTES);
			ok(peerlane_wait(b.session, receives[i], -1, &moved));
			must(moved == BYTES);
		}
	}
	ok(peerlane_hand_over_status(a.session, FULL));
	ok(peerlane_hand_over_status(b.session, ARRIVED));

	/* b's relay dies: for b the relay, for a the other side. Both wait in replays whose
	 * operation cannot end, and no thread of this program is in the library. */
	ok(peerlane_receive(b.session, b.connection, b.memory, 0, BYTES, &arrived, &operation));
	for (int i = 0; i < 3; i++)
		launch(&b, empties);
	/* Its first send goes where nothing is received; the second has no turn. */
	ok(peerlane_send(a.session, a.connection, a.memory, 0, BYTES, &(struct peerlane_options){.flags = PEERLANE_HAND_OVER, .after_timeline = FULL, .tag = 1}, NULL));
	for (int i = 0; i < 3; i++)
		launch(&a, fills);
	use(&a);
	must(more.query(a.gpu.stream) == 600); /* CUDA_ERROR_NOT_READY */
	say("kill b");
	synchronize(&b);
	synchronize(&a);
	for (int i = 0; i < 3; i++) { /* replays of later, whose graph sets the turn back */
		launch(&b, empties);
		launch(&a, fills);
	}
	synchronize(&b);
	synchronize(&a);
	for (int i = 0; i < 2; i++) {
		demand(PEERLANE_STATUS_RELAY_DIED, peerlane_hand_over_status(b.session, ARRIVED));
		demand(PEERLANE_STATUS_RELAY_DIED, peerlane_stream_take(b.session, b.gpu.stream, ARRIVED));
		demand(PEERLANE_STATUS_PEER_RELAY_DIED, peerlane_hand_over_status(a.session, FULL));
		must(strstr(peerlane_error(), "container b")); /* how it was detected differs */
		demand(PEERLANE_STATUS_PEER_RELAY_DIED, peerlane_stream_take(a.session, a.gpu.stream, FULL));
		demand(PEERLANE_STATUS_PEER_RELAY_DIED, peerlane_send(a.session, a.connection, a.memory, 0, BYTES, &full, NULL));
	}
	ok(peerlane_session_status(a.session)); /* which goes on, and its timeline begins anew */
	ok(peerlane_hand_over(a.session, FULL, PEERLANE_TURN_STREAM));
	ok(peerlane_hand_over_status(a.session, FULL));
	launch(&a, fills);
	synchronize(&a);
	ok(peerlane_timeline_value(a.session, FULL, &moved));
	must(moved == PEERLANE_TURN_RELAY);

	use(&b);
	gpu_check(more.destroy(empties), "cuGraphExecDestroy");
	gpu_check(more.host_free(to), "cuMemFreeHost");
	peerlane_close(b.session);
	use(&a);
	gpu_check(more.destroy(fills), "cuGraphExecDestroy");
	gpu_check(more.host_free(from), "cuMemFreeHost");
	peerlane_close(a.session);
	free(want);
	say("done");
	return 0;
}
