/*
 * Two programs of which one reads and writes the GPU memory of the other, which does
 * nothing for it: its relay does. It may even be stopped.
 *
 *	cc -o remote remote.c $(pkg-config --cflags --libs peerlane) -ldl
 *
 *	remote SOCKET GPU offer BYTES SEED            prints a handle and a key
 *	remote SOCKET GPU change HANDLE KEY BYTES SEED
 *
 * SOCKET is the relay's, "-" for the usual one; GPU is a UUID, "-" for the first. The
 * memory that is offered holds what SEED makes. The other one reads and checks it, and
 * writes what SEED + 1 makes. When the first one gets a line it checks that.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"
#include "peerlane.h"

/* check ends the program with the library's sentence. */
static void check(int status, const char *what)
{
	if (!status)
		return;
	fprintf(stderr, "%s: %s (status %d)\n", what, peerlane_error(), status);
	exit(1);
}

static void fill(unsigned char *to, uint64_t bytes, uint64_t seed)
{
	for (uint64_t i = 0; i < bytes; i++)
		to[i] = (unsigned char)((seed + i / 8 * 0xbf58476d1ce4e5b9u) >> i % 8 * 8);
}

static void demand(const unsigned char *got, uint64_t bytes, uint64_t seed)
{
	unsigned char *want = malloc(bytes + 1);

	fill(want, bytes, seed);
	if (memcmp(got, want, bytes)) {
		fprintf(stderr, "the memory does not hold what it should\n");
		exit(1);
	}
	free(want);
}

static void print_hex(const uint8_t *bytes, size_t n, char end)
{
	for (size_t i = 0; i < n; i++)
		printf("%02x", bytes[i]);
	putchar(end);
	fflush(stdout);
}

static void read_hex(uint8_t *bytes, size_t n, const char *text)
{
	for (size_t i = 0; i < n; i++) {
		unsigned byte;

		if (sscanf(text + 2 * i, "%2x", &byte) != 1) {
			fprintf(stderr, "%zu hexadecimal digits are needed\n", 2 * n);
			exit(2);
		}
		bytes[i] = (uint8_t)byte;
	}
}

int main(int argc, char **argv)
{
	int offers = argc == 6 && !strcmp(argv[3], "offer");
	peerlane_gpu wanted;

	if (!offers && !(argc == 8 && !strcmp(argv[3], "change"))) {
		fprintf(stderr, "usage: remote SOCKET GPU offer BYTES SEED\n       remote SOCKET GPU change HANDLE KEY BYTES SEED\n");
		return 2;
	}
	if (strcmp(argv[2], "-"))
		check(peerlane_gpu_parse(argv[2], &wanted), "the GPU");

	uint64_t bytes = strtoull(argv[argc - 2], NULL, 10), seed = strtoull(argv[argc - 1], NULL, 10);

	gpu_open();
	struct gpu gpu = gpu_use(strcmp(argv[2], "-") ? &wanted : NULL);
	/* What CUDA allocates is a multiple of 2 MiB. */
	struct gpu_memory room = gpu_allocate(&gpu, bytes / (2 << 20) * (2 << 20) + (2 << 20));
	unsigned char *host = malloc(bytes + 1);

	peerlane_session *session;
	check(peerlane_dial(strcmp(argv[1], "-") ? argv[1] : NULL, &gpu.uuid, 1, -1, &session), "dialing");

	struct peerlane_allocation allocation = {.fd = room.fd, .bytes = room.bytes};
	peerlane_memory memory;
	check(peerlane_export(session, &allocation, 1, &gpu.uuid, 0, &memory), "exporting");

	peerlane_handle handle;
	peerlane_remote_key key;

	if (offers) {
		peerlane_listener listener;
		peerlane_region region;

		fill(host, bytes, seed);
		gpu_write(&gpu, room.address, host, bytes);
		check(peerlane_listen(session, &gpu.uuid, &listener, &handle), "listening");
		check(peerlane_expose(session, listener, 0, memory, 0, bytes, PEERLANE_REMOTE_READ | PEERLANE_REMOTE_WRITE, &region, &key), "exposing");
		print_hex(handle.bytes, sizeof handle.bytes, ' ');
		print_hex(key.bytes, sizeof key.bytes, '\n');

		/* From here on the relays need nothing of this program: not even to accept who
		 * connects. */
		getchar();

		/* Nobody touches the memory any more when this returns. */
		check(peerlane_revoke(session, region), "revoking");
		gpu_read(&gpu, host, room.address, bytes);
		demand(host, bytes, seed + 1);
	} else {
		peerlane_connection connection;
		peerlane_operation operation;

		read_hex(handle.bytes, sizeof handle.bytes, argv[4]);
		read_hex(key.bytes, sizeof key.bytes, argv[5]);
		check(peerlane_connect(session, &gpu.uuid, &handle, &connection), "connecting");
		check(peerlane_read(session, connection, memory, 0, bytes, &key, 0, NULL, &operation), "reading");
		check(peerlane_wait(session, operation, -1, NULL), "the read");
		gpu_read(&gpu, host, room.address, bytes);
		demand(host, bytes, seed);

		fill(host, bytes, seed + 1);
		gpu_write(&gpu, room.address, host, bytes);
		/* In two halves, whose ends nobody takes: the flush tells of both. */
		check(peerlane_write(session, connection, memory, 0, bytes / 2, &key, 0, NULL, NULL), "writing");
		check(peerlane_write(session, connection, memory, bytes / 2, bytes - bytes / 2, &key, bytes / 2, NULL, NULL), "writing");
		check(peerlane_flush(session, connection, NULL, &operation), "flushing");
		check(peerlane_wait(session, operation, -1, NULL), "the writes");
	}
	printf("%s %llu bytes\n", offers ? "were changed:" : "changed", (unsigned long long)bytes);
	peerlane_close(session);
	free(host);
	return 0;
}
