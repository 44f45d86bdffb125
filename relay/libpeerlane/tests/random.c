/* random SOCKET_A SOCKET_B SEED ROUNDS GPU...: a thread for each GPU does what its seed
 * says, first with sessions of its own, then all with the same two: messages of all
 * sizes, some canceled, some too long, connections that end under them, memory that is
 * taken back. What an operation used is used again the moment that it has ended. */
#include <pthread.h>

#include "test.h"

#define ROOM (256u * 1024)
#define DEPTH 6
#define GUARD 16u

struct slot {
	peerlane_operation ops[2]; /* of sender and receiver */
	uint64_t number, n;
	int busy, too_long, canceled; /* canceled: which end was; -1: none */
};

struct work {
	const char *a, *b, *gpu;
	peerlane_session *sessions[2]; /* shared, or NULL */
	uint64_t seed;
	int rounds;
	pthread_t thread;

	struct side sides[2];
	unsigned char *host[2]; /* host memory in place of the GPU's, or NULL */
	struct slot slots[DEPTH];
	uint64_t holds[2][DEPTH]; /* what was left in memory that nobody uses */
	uint64_t sizes[2][DEPTH];
	uint64_t numbers;
};

static uint64_t draw(struct work *w, uint64_t below)
{
	w->seed ^= w->seed << 13;
	w->seed ^= w->seed >> 7;
	w->seed ^= w->seed << 17;
	return w->seed % below;
}

/* leave fills an end's memory of a slot with what belongs to a new number. */
static uint64_t leave(struct work *w, int end, int i, uint64_t n)
{
	uint64_t number = w->numbers += 0x9e3779b97f4a7c15u;

	if (w->host[end])
		fill(w->host[end] + (uint64_t)i * ROOM, n, number);
	else
		put(&w->sides[end], (uint64_t)i * ROOM, n, number);
	w->holds[end][i] = number;
	w->sizes[end][i] = n;
	return number;
}

static void look(struct work *w, int end, int i, uint64_t n, uint64_t number)
{
	unsigned char *want;

	if (!w->host[end]) {
		verify(&w->sides[end], (uint64_t)i * ROOM, n, number);
		return;
	}
	must((want = malloc(n + 1)));
	fill(want, n, number);
	must(!memcmp(want, w->host[end] + (uint64_t)i * ROOM, n));
	free(want);
}

static void begin(struct work *w, int i)
{
	struct slot *s = &w->slots[i];
	struct peerlane_options options = {0};
	int first = (int)draw(w, 2);

	for (int end = 0; end < 2; end++)
		look(w, end, i, w->sizes[end][i], w->holds[end][i]);
	s->n = 2 + draw(w, draw(w, 8) ? 1000 : ROOM - GUARD - 2);
	s->too_long = !draw(w, 32);
	s->canceled = -1;
	leave(w, 1, i, s->n + GUARD);
	options.tag = s->number = leave(w, 0, i, s->n);
	for (int k = 0; k < 2; k++) {
		int end = k ^ first;
		struct side *side = &w->sides[end];

		if (end)
			ok(peerlane_receive(side->session, side->connection, side->memory, (uint64_t)i * ROOM, s->n - (uint64_t)s->too_long, &options, &s->ops[1]));
		else
			ok(peerlane_send(side->session, side->connection, side->memory, (uint64_t)i * ROOM, s->n, &options, &s->ops[0]));
	}
	s->busy = 1;
	if (!draw(w, 12)) {
		s->canceled = (int)draw(w, 2);
		ok(peerlane_cancel(w->sides[s->canceled].session, s->ops[s->canceled]));
	}
}

/* complete takes both results. broken: somebody ended the connection. */
static void complete(struct work *w, int i, int broken)
{
	struct slot *s = &w->slots[i];
	int first = (int)draw(w, 2);

	if (!s->busy)
		return;
	if (s->canceled >= 0)
		first = s->canceled;
	for (int k = 0; k < 2; k++) {
		int end = k ^ first, status;
		peerlane_session *session = w->sides[end].session;
		uint64_t moved = 0;

		if (draw(w, 2))
			status = peerlane_wait(session, s->ops[end], 120000, &moved);
		else
			while ((status = peerlane_test(session, s->ops[end], &moved)) == PEERLANE_STATUS_PENDING)
				;
		if (status == PEERLANE_STATUS_OK) {
			must(moved == s->n);
			if (end)
				look(w, 1, i, s->n, s->number);
		} else if (!broken) {
			must(s->too_long ? status == PEERLANE_STATUS_TRUNCATED || (status == PEERLANE_STATUS_CANCELED && s->canceled >= 0)
					 : status == PEERLANE_STATUS_CANCELED && s->canceled >= 0);
		}
		must(status != PEERLANE_STATUS_TIMED_OUT);
		leave(w, end, i, s->n + (end ? GUARD : 0));
		if (end == s->canceled && status == PEERLANE_STATUS_CANCELED)
			peerlane_cancel(w->sides[!end].session, s->ops[!end]); /* it may have ended */
	}
	s->busy = 0;
}

static void complete_all(struct work *w, int broken)
{
	for (int i = 0; i < DEPTH; i++)
		complete(w, i, broken);
}

/* memory makes an end's. */
static void memory(struct work *w, int end)
{
	struct side *side = &w->sides[end];
	void *data = NULL;

	if (draw(w, 2)) {
		ok(peerlane_host_memory(side->session, DEPTH * ROOM, &side->gpu.uuid, 0, &data, &side->memory));
	} else if (side->room.bytes) {
		struct peerlane_allocation allocation = {.fd = side->room.fd, .bytes = side->room.bytes};

		ok(peerlane_export(side->session, &allocation, 1, &side->gpu.uuid, 0, &side->memory));
	} else {
		export_room(side, 2 * MIB);
	}
	w->host[end] = data;
	for (int i = 0; i < DEPTH; i++)
		leave(w, end, i, 8);
}

static void *work(void *argument)
{
	struct work *w = argument;
	peerlane_gpu uuid;

	ok(peerlane_gpu_parse(w->gpu, &uuid));
	w->sides[0].gpu = w->sides[1].gpu = gpu_use(&uuid);
	for (int end = 0; end < 2; end++) {
		struct side *side = &w->sides[end];

		if (!(side->session = w->sessions[end]))
			ok(peerlane_dial(end ? w->b : w->a, NULL, 0, -1, &side->session));
		memory(w, end);
	}
	join(&w->sides[0], &w->sides[1]);
	for (int round = 0; round < w->rounds; round++) {
		int i = (int)draw(w, DEPTH), end = (int)draw(w, 2);

		complete(w, i, 0);
		begin(w, i);
		if (!draw(w, 40)) {
			ok(peerlane_disconnect(w->sides[end].session, w->sides[end].connection));
			complete_all(w, 1);
			ok(peerlane_disconnect(w->sides[!end].session, w->sides[!end].connection));
			join(&w->sides[0], &w->sides[1]);
		} else if (!draw(w, 30)) {
			complete_all(w, 0);
			ok(peerlane_unexport(w->sides[end].session, w->sides[end].memory));
			memory(w, end);
		}
	}
	if (w->sessions[0]) {
		complete_all(w, 0);
		for (int end = 0; end < 2; end++) {
			ok(peerlane_disconnect(w->sides[end].session, w->sides[end].connection));
			ok(peerlane_unexport(w->sides[end].session, w->sides[end].memory));
		}
		return NULL;
	}
	for (int end = 0; end < 2; end++) /* whatever is under way */
		peerlane_close(w->sides[end].session);
	return NULL;
}

int main(int argc, char **argv)
{
	static struct work all[64];
	peerlane_session *sessions[2];
	int n = argc - 5;

	must(n > 0 && n <= 64);
	gpu_open();
	ok(peerlane_dial(argv[1], NULL, 0, -1, &sessions[0]));
	ok(peerlane_dial(argv[2], NULL, 0, -1, &sessions[1]));
	for (int shared = 0; shared < 2; shared++) {
		for (int i = 0; i < n; i++) {
			all[i] = (struct work){.a = argv[1], .b = argv[2], .gpu = argv[5 + i], .rounds = atoi(argv[4])};
			all[i].seed = strtoull(argv[3], NULL, 10) * 64 + (uint64_t)i * 2 + (uint64_t)shared + 1;
			all[i].numbers = all[i].seed << 32;
			if (shared)
				memcpy(all[i].sessions, sessions, sizeof sessions);
			must(!pthread_create(&all[i].thread, NULL, work, &all[i]));
		}
		for (int i = 0; i < n; i++)
			must(!pthread_join(all[i].thread, NULL));
	}
	peerlane_close(sessions[0]);
	peerlane_close(sessions[1]);
	return 0;
}
