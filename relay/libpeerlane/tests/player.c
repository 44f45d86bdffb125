/* player SOCKET GPU BYTES: a client that does what it is told, line by line, and answers
 * each line with one: numbers, the first of which is a status. Its memory is descriptor
 * 3, of whoever started it, who sees it whatever becomes of this process. */
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "test.h"

static peerlane_session *session;
static peerlane_memory memory;
static peerlane_listener listener;

/* orphan is what a child does: it looks that it has no session, where it was forked as
 * programs fork, and stays for as long as somebody lets it. */
static void orphan(int raw, peerlane_connection connection)
{
	int wrong = 0;

	for (int fd = 0; fd < 4; fd++)
		close(fd);
	alarm(300);
	if (!raw) {
		peerlane_operation o;

		wrong |= peerlane_session_status(session) != PEERLANE_STATUS_FORKED;
		wrong |= peerlane_send(session, connection, memory, 0, 8, NULL, &o) != PEERLANE_STATUS_FORKED;
		if (connection % 2)
			peerlane_close(session);
	}
	while (!wrong)
		pause();
	_exit(1);
}

int main(int argc, char **argv)
{
	struct peerlane_allocation allocation = {.fd = 3};
	peerlane_gpu gpu;
	char line[1024], text[300], word[16];

	must(argc == 4);
	ok(peerlane_gpu_parse(argv[2], &gpu));
	allocation.bytes = strtoull(argv[3], NULL, 10);
	ok(peerlane_dial(argv[1], NULL, 0, -1, &session));
	ok(peerlane_export(session, &allocation, 1, &gpu, 0, &memory));
	{
		peerlane_handle handle;

		ok(peerlane_listen(session, &gpu, &listener, &handle));
		for (unsigned i = 0; i < sizeof handle.bytes; i++)
			printf("%02x", handle.bytes[i]);
		say("");
	}
	while (fgets(line, sizeof line, stdin)) {
		unsigned long long c = 0, offset = 0, bytes = 0, tag = 0, number = 0, moved = 0;
		struct peerlane_options options = {0};
		peerlane_connection connection = 0;
		peerlane_operation o = 0;
		int status = PEERLANE_STATUS_INVALID;

		if (sscanf(line, "%15s", word) != 1)
			continue;
		if (!strcmp(word, "connect")) {
			peerlane_handle handle;

			must(sscanf(line, "connect %256s", text) == 1 && strlen(text) == 256);
			for (unsigned i = 0; i < sizeof handle.bytes; i++)
				must(sscanf(text + 2 * i, "%2hhx", &handle.bytes[i]) == 1);
			status = peerlane_connect(session, &gpu, &handle, &connection);
			number = connection;
		} else if (!strcmp(word, "accept")) {
			status = peerlane_accept(session, listener, 60000, &connection);
			number = connection;
		} else if (sscanf(line, "send %llu %llu %llu %llu", &c, &offset, &bytes, &tag) == 4) {
			options.tag = tag;
			status = peerlane_send(session, (peerlane_connection)c, memory, offset, bytes, &options, &o);
			number = o;
		} else if (sscanf(line, "receive %llu %llu %llu %llu", &c, &offset, &bytes, &tag) == 4) {
			options.tag = tag;
			status = peerlane_receive(session, (peerlane_connection)c, memory, offset, bytes, &options, &o);
			number = o;
		} else if (sscanf(line, "test %llu", &number) == 1) {
			status = peerlane_test(session, number, (uint64_t *)&moved);
		} else if (sscanf(line, "wait %llu", &number) == 1) {
			status = peerlane_wait(session, number, 60000, (uint64_t *)&moved);
		} else if (sscanf(line, "cancel %llu", &number) == 1) {
			status = peerlane_cancel(session, number);
		} else if (sscanf(line, "disconnect %llu", &c) == 1) {
			status = peerlane_disconnect(session, (peerlane_connection)c);
		} else if (sscanf(line, "fork %llu %llu", &number, &c) == 2) {
			/* raw: libpeerlane does not hear of it, and the socket stays open in the child. */
			pid_t pid = number ? (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();

			if (!pid)
				orphan((int)number, (peerlane_connection)c);
			number = (unsigned long long)pid;
			status = pid > 0 ? PEERLANE_STATUS_OK : PEERLANE_STATUS_SYSTEM;
		} else if (!strcmp(word, "close")) {
			peerlane_close(session);
			puts("0 0 0");
			return 0;
		}
		printf("%d %llu %llu\n", status, number, moved);
		fflush(stdout);
	}
	peerlane_close(session);
	return 0;
}
