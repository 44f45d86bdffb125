/*
 * The program of a container: it exchanges messages with another container through the relays, and
 * starts again with a new session after an error. It prints one line per event:
 *
 *	listening VERSION HANDLE   VERSION is the version of the protocol of the session
 *	moving ROUNDS              the rounds that were verified
 *	error STATUS TEXT
 *
 * It reads the peer's handle from a line of standard input.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpu.h"
#include "peerlane.h"

enum { BYTES = 1 << 20 };

static int report(int status)
{
	if (status)
		printf("error %d %s\n", status, peerlane_error());
	return status;
}

static void fill(unsigned char *to, uint64_t seed)
{
	for (uint64_t i = 0; i < BYTES; i++)
		to[i] = (unsigned char)((seed + i / 8 * 0xbf58476d1ce4e5b9u) >> i % 8 * 8);
}

static int read_handle(peerlane_handle *handle)
{
	char line[4096];

	if (!fgets(line, sizeof line, stdin))
		exit(0);
	for (size_t i = 0; i < sizeof handle->bytes; i++) {
		unsigned byte;

		if (sscanf(line + 2 * i, "%2x", &byte) != 1)
			exit(2);
		handle->bytes[i] = (uint8_t)byte;
	}
	return 0;
}

/* exchange sends and receives messages until an operation fails. The first half of the memory is
 * sent, the second half received. */
static int exchange(struct gpu *gpu, struct gpu_memory *room, peerlane_session *session, peerlane_memory memory,
	peerlane_connection sending, peerlane_connection receiving)
{
	static unsigned char sent[BYTES], received[BYTES];
	time_t printed = 0;

	for (uint64_t round = 0;; round++) {
		struct peerlane_options options = {.tag = round};
		peerlane_operation send, receive;
		uint64_t moved = 0;
		int status;

		fill(sent, round);
		gpu_write(gpu, room->address, sent, BYTES);
		status = peerlane_receive(session, receiving, memory, BYTES, BYTES, &options, &receive);
		if (!status)
			status = peerlane_send(session, sending, memory, 0, BYTES, &options, &send);
		if (!status)
			status = peerlane_wait(session, send, -1, &moved);
		if (!status)
			status = peerlane_wait(session, receive, -1, &moved);
		if (report(status))
			return status;
		gpu_read(gpu, received, room->address + BYTES, BYTES);
		if (moved != BYTES || memcmp(sent, received, BYTES)) {
			printf("corrupt %" PRIu64 "\n", round);
			exit(3);
		}
		if (time(NULL) != printed) {
			printed = time(NULL);
			printf("moving %" PRIu64 "\n", round + 1);
		}
	}
}

static void session(struct gpu *gpu, struct gpu_memory *room)
{
	struct peerlane_allocation allocation = {.fd = room->fd, .bytes = room->bytes};
	peerlane_connection sending, receiving;
	peerlane_session *session;
	peerlane_listener listener;
	peerlane_handle handle;
	peerlane_memory memory;

	if (report(peerlane_dial(NULL, &gpu->uuid, 1, -1, &session)))
		return;
	if (!report(peerlane_export(session, &allocation, 1, &gpu->uuid, 0, &memory)) &&
		!report(peerlane_listen(session, &gpu->uuid, &listener, &handle))) {
		printf("listening %u ", peerlane_protocol(session));
		for (size_t i = 0; i < sizeof handle.bytes; i++)
			printf("%02x", handle.bytes[i]);
		printf("\n");
		read_handle(&handle);
		if (!report(peerlane_connect(session, &gpu->uuid, &handle, &sending)) &&
			!report(peerlane_accept(session, listener, -1, &receiving)))
			exchange(gpu, room, session, memory, sending, receiving);
	}
	peerlane_close(session);
}

int main(void)
{
	struct timespec pause = {.tv_nsec = 100000000};

	setvbuf(stdout, NULL, _IOLBF, 0);
	gpu_open();

	struct gpu gpu = gpu_use(NULL);
	struct gpu_memory room = gpu_allocate(&gpu, 2 * BYTES);

	for (;;) {
		session(&gpu, &room);
		nanosleep(&pause, NULL);
	}
}
