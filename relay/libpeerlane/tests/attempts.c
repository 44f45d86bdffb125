/* attempts SOCKET_A SOCKET_B GPU_A GPU_B: connecting without waiting, and results that
 * nobody takes.
 * attempts SOCKET GPU: the same at a relay that reads nothing. It says "full" when the
 * socket is, and waits for a line: then 65 answers to nothing have come. */
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

#define MANY 1000 /* at once: fewer than the ring has */
#define CROWD 64  /* attempts: more than the relay takes at once */

/* crowd begins many attempts before it finishes one, and has a connection of each. */
static void crowd(struct side *a, const peerlane_handle *handle)
{
	peerlane_attempt attempts[CROWD];
	peerlane_connection connections[CROWD];

	for (int i = 0; i < CROWD; i++) {
		int status;

		while ((status = peerlane_connect_begin(a->session, &a->gpu.uuid, handle, &attempts[i])) == PEERLANE_STATUS_FULL)
			usleep(100);
		ok(status);
	}
	for (int i = 0; i < CROWD; i++)
		ok(peerlane_connect_finish(a->session, attempts[i], -1, &connections[i]));
	for (int i = 0; i < CROWD; i++)
		ok(peerlane_disconnect(a->session, connections[i]));
}

static int at_the_deaf(const char *socket, const char *gpu)
{
	peerlane_handle handle = {{0}};
	peerlane_connection connection;
	peerlane_listener listener = 1;
	peerlane_attempt attempt;
	peerlane_session *s;
	peerlane_gpu uuid;
	int status;

	ok(peerlane_gpu_parse(gpu, &uuid));
	ok(peerlane_dial(socket, NULL, 0, -1, &s));
	while ((status = peerlane_accept(s, listener, 0, &connection)) == PEERLANE_STATUS_TIMED_OUT && strstr(peerlane_error(), "no sender"))
		listener++;
	must(status == PEERLANE_STATUS_FULL && strstr(peerlane_error(), "at the moment"));
	demand(PEERLANE_STATUS_FULL, peerlane_accept(s, listener, 0, &connection));
	demand(PEERLANE_STATUS_FULL, peerlane_connect_begin(s, &uuid, &handle, &attempt));
	say("full");
	hear();
	while (!(status = peerlane_session_status(s)))
		usleep(100);
	must(status == PEERLANE_STATUS_INTERNAL);
	/* Not TIMED_OUT, after which a program goes on asking. */
	demand(PEERLANE_STATUS_INTERNAL, peerlane_accept(s, 1, 0, &connection));
	peerlane_close(s);
	return 0;
}

int main(int argc, char **argv)
{
	peerlane_operation operations[MANY];
	peerlane_connection connection;
	peerlane_attempt attempt, other;
	peerlane_listener listener;
	peerlane_handle handle, wrong = {{0}};
	pid_t pid;
	int status;

	if (argc == 3)
		return at_the_deaf(argv[1], argv[2]);
	must(argc == 5);
	gpu_open();
	struct side b = attach(argv[2], argv[4], 2 * MIB), a = attach(argv[1], argv[3], 2 * MIB);
	ok(peerlane_listen(b.session, &b.gpu.uuid, &listener, &handle));

	/* Two at once; nobody has accepted. The second one is finished first. */
	ok(peerlane_connect_begin(a.session, &a.gpu.uuid, &handle, &attempt));
	ok(peerlane_connect_begin(a.session, &a.gpu.uuid, &handle, &other));
	must(attempt != other);
	ok(peerlane_connect_finish(a.session, other, -1, &connection));
	while ((status = peerlane_connect_finish(a.session, attempt, 0, &a.connection)) == PEERLANE_STATUS_TIMED_OUT)
		;
	must(status == PEERLANE_STATUS_OK && connection && a.connection && connection != a.connection);
	demand(PEERLANE_STATUS_INVALID, peerlane_connect_finish(a.session, attempt, 0, &connection)); /* it is over */
	demand(PEERLANE_STATUS_INVALID, peerlane_connect_finish(a.session, 0, 0, &connection));
	demand(PEERLANE_STATUS_INVALID, peerlane_connect_begin(a.session, &a.gpu.uuid, &handle, NULL));
	ok(peerlane_accept(b.session, listener, -1, &b.connection));
	ok(peerlane_disconnect(a.session, connection));

	/* An error is the attempt's, once. */
	ok(peerlane_connect_begin(a.session, &a.gpu.uuid, &wrong, &attempt));
	status = peerlane_connect_finish(a.session, attempt, -1, &connection);
	must(status && status != PEERLANE_STATUS_TIMED_OUT && *peerlane_error());
	demand(PEERLANE_STATUS_INVALID, peerlane_connect_finish(a.session, attempt, 0, &connection));

	crowd(&a, &handle);

	/* One that nobody finishes is given back with the session; a child has none. */
	ok(peerlane_connect_begin(a.session, &a.gpu.uuid, &handle, &attempt));
	must((pid = fork()) >= 0);
	if (!pid) {
		demand(PEERLANE_STATUS_FORKED, peerlane_connect_finish(a.session, attempt, -1, &connection));
		demand(PEERLANE_STATUS_FORKED, peerlane_connect_begin(a.session, &a.gpu.uuid, &handle, &attempt));
		peerlane_close(a.session);
		_exit(0);
	}
	must(waitpid(pid, &status, 0) == pid && status == 0);

	/* Forgotten before their end, and after it: in all more than a session has room for
	 * results that nobody takes. */
	join(&a, &b); /* who was accepted above may have gone */
	for (int round = 0; round < 6; round++) {
		for (int i = 0; i < MANY; i++)
			ok(peerlane_receive(b.session, b.connection, b.memory, 0, 8, NULL, &operations[i]));
		for (int i = 0; round % 2 && i < MANY; i++)
			ok(peerlane_forget(b.session, operations[i]));
		ok(peerlane_disconnect(b.session, b.connection));
		if (round % 2 == 0)
			must(peerlane_wait(b.session, operations[MANY - 1], -1, NULL) != 0);
		for (int i = 0; round % 2 == 0 && i + 1 < MANY; i++)
			ok(peerlane_forget(b.session, operations[i]));
		if (round % 2 == 0)
			demand(PEERLANE_STATUS_INVALID, peerlane_forget(b.session, operations[7]));
		join(&a, &b);
	}
	peerlane_close(a.session);
	peerlane_close(b.session);
	return 0;
}
