/*
 * Two programs that exchange GPU memory through their relays.
 *
 *	cc -o transfer transfer.c $(pkg-config --cflags --libs peerlane) -ldl
 *
 *	transfer SOCKET GPU receive BYTES COUNT SEED         prints a handle, then receives
 *	transfer SOCKET GPU send HANDLE BYTES COUNT SEED
 *
 * SOCKET is the relay's, "-" for the usual one; GPU is a UUID, "-" for the first. COUNT
 * messages of BYTES each cross, at once; their contents are made of SEED, and the
 * receiver checks every byte. transfer.py is the same in Python.
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

/* fill makes the contents of a message: each word says where it belongs. */
static void fill(unsigned char *to, uint64_t bytes, uint64_t seed, uint64_t message)
{
	for (uint64_t i = 0; i < bytes; i++) {
		uint64_t word = seed + message * 0x9e3779b97f4a7c15u + i / 8 * 0xbf58476d1ce4e5b9u;

		to[i] = (unsigned char)(word >> i % 8 * 8);
	}
}

static void print_handle(const peerlane_handle *handle)
{
	for (size_t i = 0; i < sizeof handle->bytes; i++)
		printf("%02x", handle->bytes[i]);
	printf("\n");
	fflush(stdout);
}

static void read_handle(peerlane_handle *handle, const char *text)
{
	for (size_t i = 0; i < sizeof handle->bytes; i++) {
		unsigned byte;

		if (sscanf(text + 2 * i, "%2x", &byte) != 1) {
			fprintf(stderr, "a handle has %zu hexadecimal digits\n", 2 * sizeof handle->bytes);
			exit(2);
		}
		handle->bytes[i] = (uint8_t)byte;
	}
}

int main(int argc, char **argv)
{
	int sends = argc == 8 && !strcmp(argv[3], "send");
	const char *socket;
	peerlane_gpu wanted;

	if (!sends && !(argc == 7 && !strcmp(argv[3], "receive"))) {
		fprintf(stderr, "usage: transfer SOCKET GPU receive BYTES COUNT SEED\n"
				"       transfer SOCKET GPU send HANDLE BYTES COUNT SEED\n");
		return 2;
	}
	socket = strcmp(argv[1], "-") ? argv[1] : NULL;
	if (strcmp(argv[2], "-"))
		check(peerlane_gpu_parse(argv[2], &wanted), "the GPU");

	uint64_t bytes = strtoull(argv[argc - 3], NULL, 10), seed = strtoull(argv[argc - 1], NULL, 10);
	uint64_t count = strtoull(argv[argc - 2], NULL, 10), whole = bytes * count;

	gpu_open();
	struct gpu gpu = gpu_use(strcmp(argv[2], "-") ? &wanted : NULL);
	/* What CUDA allocates is a multiple of 2 MiB. */
	struct gpu_memory room = gpu_allocate(&gpu, whole / (2 << 20) * (2 << 20) + (2 << 20));

	peerlane_session *session;
	check(peerlane_dial(socket, &gpu.uuid, 1, -1, &session), "dialing");

	/* Once: the relay maps the memory. */
	struct peerlane_allocation allocation = {.fd = room.fd, .bytes = room.bytes};
	peerlane_memory memory;
	check(peerlane_export(session, &allocation, 1, &gpu.uuid, 0, &memory), "exporting");

	unsigned char *host = malloc(whole + 1), *expected = malloc(bytes + 1);
	peerlane_connection connection;
	peerlane_handle handle;

	if (sends) {
		read_handle(&handle, argv[4]);
		check(peerlane_connect(session, &gpu.uuid, &handle, &connection), "connecting");
		for (uint64_t i = 0; i < count; i++)
			fill(host + i * bytes, bytes, seed, i);
		gpu_write(&gpu, room.address, host, whole);
	} else {
		peerlane_listener listener;

		check(peerlane_listen(session, &gpu.uuid, &listener, &handle), "listening");
		print_handle(&handle);
		check(peerlane_accept(session, listener, -1, &connection), "accepting");
		check(peerlane_unlisten(session, listener), "closing the listener");
	}

	/* All at once; none of this is a system call, but to wake a relay that sleeps. */
	peerlane_operation *operations = calloc(count, sizeof *operations);
	for (uint64_t i = 0; i < count; i++) {
		struct peerlane_options options = {.tag = i};

		if (sends)
			check(peerlane_send(session, connection, memory, i * bytes, bytes, &options, &operations[i]), "sending");
		else
			check(peerlane_receive(session, connection, memory, i * bytes, bytes, &options, &operations[i]), "receiving");
	}
	for (uint64_t i = 0; i < count; i++) {
		uint64_t moved;

		check(peerlane_wait(session, operations[i], -1, &moved), sends ? "a send" : "a receive");
		if (moved != bytes) {
			fprintf(stderr, "message %llu: %llu bytes of %llu\n", (unsigned long long)i, (unsigned long long)moved, (unsigned long long)bytes);
			return 1;
		}
	}

	if (!sends) {
		gpu_read(&gpu, host, room.address, whole);
		for (uint64_t i = 0; i < count; i++) {
			fill(expected, bytes, seed, i);
			if (memcmp(host + i * bytes, expected, bytes)) {
				fprintf(stderr, "message %llu arrived wrong\n", (unsigned long long)i);
				return 1;
			}
		}
	}
	printf("%s %llu messages of %llu bytes\n", sends ? "sent" : "received", (unsigned long long)count, (unsigned long long)bytes);
	check(peerlane_disconnect(session, connection), "disconnecting");
	check(peerlane_unexport(session, memory), "unexporting");
	peerlane_close(session);
	free(operations);
	free(expected);
	free(host);
	return 0;
}
