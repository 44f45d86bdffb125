/* threads SOCKET_A SOCKET_B GPU...: a thread for each GPU, first with sessions of its
 * own, then all with the same two. Every byte is checked. */
#include <poll.h>
#include <pthread.h>

#include "test.h"

#define BYTES (300 * 1024 + 1)
#define DEPTH 4

struct work {
	const char *a, *b, *gpu;
	peerlane_session *session_a, *session_b; /* shared, or NULL */
	uint64_t seed;
	pthread_t thread;
};

/* take takes an operation's result, by one of the ways that there are. */
static void take(peerlane_session *s, peerlane_operation o, int by_waiting)
{
	uint64_t moved = 0;
	int status;

	if (by_waiting) {
		ok(peerlane_wait(s, o, -1, &moved));
	} else {
		while ((status = peerlane_test(s, o, &moved)) == PEERLANE_STATUS_PENDING)
			;
		ok(status);
	}
	must(moved == BYTES);
	demand(PEERLANE_STATUS_INVALID, peerlane_test(s, o, &moved)); /* once only */
}

static void *work(void *argument)
{
	struct work *w = argument;
	struct side a = {0}, b = {0};
	peerlane_gpu uuid;

	ok(peerlane_gpu_parse(w->gpu, &uuid));
	a.gpu = b.gpu = gpu_use(&uuid);
	a.session = w->session_a;
	b.session = w->session_b;
	if (!a.session) {
		ok(peerlane_dial(w->a, NULL, 0, -1, &a.session));
		ok(peerlane_dial(w->b, NULL, 0, -1, &b.session));
	}
	export_room(&a, 4 * MIB);
	export_room(&b, 4 * MIB);
	join(&a, &b);
	for (uint64_t round = 0; round < (thorough() ? 6 : 2); round++) {
		peerlane_operation sends[DEPTH], receives[DEPTH];

		for (uint64_t i = 0; i < DEPTH; i++) {
			struct peerlane_options options = {.tag = i};

			put(&a, i * BYTES, BYTES, w->seed + round * 1000 + i);
			ok(peerlane_receive(b.session, b.connection, b.memory, i * BYTES, BYTES, &options, &receives[i]));
			ok(peerlane_send(a.session, a.connection, a.memory, i * BYTES, BYTES, &options, &sends[i]));
		}
		for (uint64_t i = 0; i < DEPTH; i++) {
			take(b.session, receives[i], (round + i) % 2);
			take(a.session, sends[i], w->seed % 2);
			verify(&b, i * BYTES, BYTES, w->seed + round * 1000 + i);
		}
	}
	/* What fails here is this thread's to read. */
	demand(PEERLANE_STATUS_UNKNOWN_MEMORY, peerlane_unexport(a.session, 1u << 30));
	must(strstr(peerlane_error(), "memory 1073741824"));
	must(peerlane_error_status() == PEERLANE_STATUS_UNKNOWN_MEMORY);
	ok(peerlane_disconnect(a.session, a.connection));
	ok(peerlane_disconnect(b.session, b.connection));
	ok(peerlane_unexport(a.session, a.memory));
	ok(peerlane_unexport(b.session, b.memory));
	if (!w->session_a) {
		peerlane_close(a.session);
		peerlane_close(b.session);
	}
	return NULL;
}

static void *wait_for(void *argument)
{
	struct side *b = argument;
	peerlane_operation o;

	ok(peerlane_receive(b->session, b->connection, b->memory, MIB, 8, &(struct peerlane_options){.tag = 1}, &o));
	ok(peerlane_wait(b->session, o, -1, NULL));
	return NULL;
}

/* events: a loop waits for the event descriptor while a thread that sleeps in the
 * library reads the ring. No end may be lost between them. */
static void events(const char *socket_a, const char *socket_b, const char *gpu)
{
	struct side a = attach(socket_a, gpu, 2 * MIB), b = attach(socket_b, gpu, 2 * MIB);
	struct pollfd ready = {.events = POLLIN};
	pthread_t thread;

	join(&a, &b);
	ok(peerlane_event_descriptor(b.session, &ready.fd));
	must(!pthread_create(&thread, NULL, wait_for, &b));
	for (uint64_t round = 0; round < (thorough() ? 300 : 100); round++) {
		struct peerlane_result result;
		peerlane_operation posted;
		unsigned count = 0;

		ok(peerlane_receive(b.session, b.connection, b.memory, 0, 8, &(struct peerlane_options){.context = round}, &posted));
		ok(peerlane_send(a.session, a.connection, a.memory, 0, 8, NULL, NULL));
		for (;;) {
			ok(peerlane_poll(b.session, &result, 1, &count));
			if (count)
				break;
			must(poll(&ready, 1, 60000) == 1);
		}
		must(result.operation == posted && result.context == round);
	}
	ok(peerlane_send(a.session, a.connection, a.memory, 0, 8, &(struct peerlane_options){.tag = 1}, NULL));
	must(!pthread_join(thread, NULL));
	peerlane_close(a.session);
	peerlane_close(b.session);
}

int main(int argc, char **argv)
{
	peerlane_session *a, *b;
	struct work all[64];
	int n = argc - 3;

	must(n > 0 && n <= 64);
	gpu_open();
	ok(peerlane_dial(argv[1], NULL, 0, -1, &a));
	ok(peerlane_dial(argv[2], NULL, 0, -1, &b));
	for (int shared = 0; shared < 2; shared++) {
		for (int i = 0; i < n; i++) {
			all[i] = (struct work){argv[1], argv[2], argv[3 + i], shared ? a : NULL, shared ? b : NULL, (uint64_t)(i + 1) * 100000 + (uint64_t)i % 2, 0};
			must(!pthread_create(&all[i].thread, NULL, work, &all[i]));
		}
		for (int i = 0; i < n; i++)
			must(!pthread_join(all[i].thread, NULL));
	}
	events(argv[1], argv[2], argv[3]);
	must(!strcmp(peerlane_error(), "")); /* others' failures are others' */
	peerlane_close(a);
	peerlane_close(b);
	return 0;
}
