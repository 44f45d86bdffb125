/* What the tests' programs share. */
#ifndef TEST_H
#define TEST_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"
#include "peerlane.h"

#define MIB (1u << 20)

/* thorough says that `make sanitize` runs the program, and not `make test`. */
static inline int thorough(void)
{
	return getenv("PEERLANE_RANDOM_ROUNDS") != NULL;
}

/* demand ends the program unless the call gives that status. */
#define demand(want, call) \
	do { \
		int got_ = (call); \
		if (got_ != (want)) { \
			fprintf(stderr, "%s:%d: %s: %d (%s), not %d (%s): %s\n", __FILE__, __LINE__, #call, got_, peerlane_status_text(got_), want, \
				peerlane_status_text(want), peerlane_error()); \
			exit(1); \
		} \
	} while (0)

#define ok(call) demand(PEERLANE_STATUS_OK, call)

#define must(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #condition, peerlane_error()); \
			exit(1); \
		} \
	} while (0)

/* A side of a connection. */
struct side {
	struct gpu gpu;
	struct gpu_memory room;
	peerlane_session *session;
	peerlane_memory memory;
	peerlane_connection connection;
};

static inline void export_room(struct side *s, uint64_t bytes)
{
	struct peerlane_allocation allocation = {.bytes = bytes};

	s->room = gpu_allocate(&s->gpu, bytes);
	allocation.fd = s->room.fd;
	ok(peerlane_export(s->session, &allocation, 1, &s->gpu.uuid, 0, &s->memory));
}

static inline struct side attach(const char *socket, const char *gpu, uint64_t bytes)
{
	struct side s = {0};
	peerlane_gpu uuid;

	ok(peerlane_gpu_parse(gpu, &uuid));
	s.gpu = gpu_use(&uuid);
	ok(peerlane_dial(socket, NULL, 0, -1, &s.session));
	if (bytes)
		export_room(&s, bytes);
	return s;
}

/* join connects a to b. */
static inline void join(struct side *a, struct side *b)
{
	peerlane_listener listener;
	peerlane_handle handle;

	ok(peerlane_listen(b->session, &b->gpu.uuid, &listener, &handle));
	ok(peerlane_connect(a->session, &a->gpu.uuid, &handle, &a->connection));
	ok(peerlane_accept(b->session, listener, -1, &b->connection));
	ok(peerlane_unlisten(b->session, listener));
}

static inline void fill(unsigned char *to, uint64_t bytes, uint64_t seed)
{
	for (uint64_t i = 0; i < bytes; i++)
		to[i] = (unsigned char)((seed + i / 8 * 0xbf58476d1ce4e5b9u) >> i % 8 * 8);
}

static inline void put(struct side *s, uint64_t offset, uint64_t bytes, uint64_t seed)
{
	unsigned char *b = malloc(bytes + 1);

	fill(b, bytes, seed);
	gpu_write(&s->gpu, s->room.address + offset, b, bytes);
	free(b);
}

static inline void verify(struct side *s, uint64_t offset, uint64_t bytes, uint64_t seed)
{
	unsigned char *got = malloc(bytes + 1), *want = malloc(bytes + 1);

	fill(want, bytes, seed);
	gpu_read(&s->gpu, got, s->room.address + offset, bytes);
	must(!memcmp(got, want, bytes));
	free(got);
	free(want);
}

/* say writes a line that the test waits for; hear waits for one of the test's. */
static inline void say(const char *line)
{
	puts(line);
	fflush(stdout);
}

static inline void hear(void)
{
	char line[64];

	must(fgets(line, sizeof line, stdin));
}

#endif
