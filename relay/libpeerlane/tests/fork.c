/* fork SOCKET_A SOCKET_B GPU: sessions stay their process's. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

static struct side a, b;
static const char *socket_a;
static _Atomic int stop;

static int has_line(const char *path, const char *words)
{
	char line[512];
	FILE *f = fopen(path, "r");
	int found = 0;

	must(f);
	while (fgets(line, sizeof line, f))
		found |= strstr(line, words) != NULL;
	fclose(f);
	return found;
}

/* sockets counts those that this process has open. */
static int sockets(void)
{
	DIR *d = opendir("/proc/self/fd");
	struct dirent *e;
	int n = 0;

	must(d);
	while ((e = readdir(d))) {
		char target[64];
		ssize_t length = readlinkat(dirfd(d), e->d_name, target, sizeof target - 1);

		if (length <= 0)
			continue;
		target[length] = 0;
		n += !strncmp(target, "socket:", 7) || strstr(target, "eventpoll");
	}
	closedir(d);
	return n;
}

/* child is what a child can do. */
static int child(peerlane_operation pending, int deep)
{
	peerlane_connection connection;
	peerlane_listener listener;
	peerlane_operation operation;
	peerlane_memory memory;
	peerlane_handle handle = {{0}};
	peerlane_region region;
	peerlane_remote_key key;
	struct peerlane_counters counters;
	struct peerlane_connection_info info;
	struct peerlane_result result;
	struct peerlane_allocation allocation = {.fd = a.room.fd, .bytes = a.room.bytes};
	struct peerlane_lane lane;
	unsigned count;
	uint64_t value;
	size_t bytes;
	void *page;
	int fd;

	must(sockets() == 0);
	must(!has_line("/proc/self/maps", "peerlane-submit") && !has_line("/proc/self/maps", "peerlane-complete"));
	const int F = PEERLANE_STATUS_FORKED;
	demand(F, peerlane_session_status(a.session));
	must(strstr(peerlane_error(), "this process was forked"));
	demand(F, peerlane_send(a.session, a.connection, a.memory, 0, 8, NULL, &operation));
	demand(F, peerlane_receive(b.session, b.connection, b.memory, 0, 8, NULL, &operation));
	demand(F, peerlane_flush(a.session, a.connection, NULL, &operation));
	demand(F, peerlane_expose(b.session, 0, b.connection, b.memory, 0, 8, PEERLANE_REMOTE_READ, &region, &key));
	demand(F, peerlane_revoke(b.session, 1));
	demand(F, peerlane_cancel(b.session, pending));
	demand(F, peerlane_wait(b.session, pending, -1, &value));
	demand(PEERLANE_STATUS_INVALID, peerlane_test(b.session, pending, &value));
	/* A busy thread's of the parent: had ended, or ended here. */
	while (!peerlane_poll(b.session, &result, 1, &count))
		must(count == 1 && (result.status == F || !result.status));
	demand(F, peerlane_error_status());
	demand(F, peerlane_export(a.session, &allocation, 1, &a.gpu.uuid, 0, &memory));
	demand(F, peerlane_unexport(a.session, a.memory));
	demand(F, peerlane_listen(a.session, &a.gpu.uuid, &listener, &handle));
	demand(F, peerlane_accept(a.session, 1, -1, &connection));
	demand(F, peerlane_unlisten(a.session, 1));
	demand(F, peerlane_connect(a.session, &a.gpu.uuid, &handle, &connection));
	demand(F, peerlane_disconnect(a.session, a.connection));
	demand(F, peerlane_connection_get(a.session, a.connection, &info));
	demand(F, peerlane_connection_status(a.session, a.connection));
	demand(F, peerlane_statistics(a.session, &counters, sizeof counters));
	demand(F, peerlane_lanes(a.session, &lane, 1, &count));
	demand(F, peerlane_event_descriptor(a.session, &fd));
	demand(F, peerlane_timeline_value(a.session, 0, &value));
	must(value == PEERLANE_TIMELINE_END);
	demand(F, peerlane_timeline_advance(a.session, 0, 1));
	demand(F, peerlane_timelines(a.session, &page, &bytes));
	demand(F, peerlane_hand_over(a.session, 0, PEERLANE_TURN_STREAM));
	demand(F, peerlane_hand_over_status(a.session, 0));
	demand(F, peerlane_stream_take(a.session, NULL, 0));
	peerlane_close(a.session);

	/* It can have one of its own, and fork as well. */
	ok(peerlane_dial(socket_a, NULL, 0, -1, &a.session));
	ok(peerlane_lanes(a.session, &lane, 1, &count));
	must(count == 1);
	if (deep) {
		pid_t grandchild = fork();
		int status;

		must(grandchild >= 0);
		if (!grandchild) {
			demand(F, peerlane_session_status(a.session));
			demand(F, peerlane_session_status(b.session));
			peerlane_close(a.session);
			peerlane_close(b.session);
			return 0;
		}
		must(waitpid(grandchild, &status, 0) == grandchild && status == 0);
	}
	ok(peerlane_session_status(a.session));
	peerlane_close(a.session);
	peerlane_close(b.session);
	return 0;
}

/* busy moves messages for as long as there are forks. */
static void *busy(void *unused)
{
	uint64_t n = 0;

	(void)unused;
	for (; !stop || n == 0; n++) {
		peerlane_operation send, receive;
		struct peerlane_counters counters;

		ok(peerlane_receive(b.session, b.connection, b.memory, 0, 4096, NULL, &receive));
		ok(peerlane_send(a.session, a.connection, a.memory, 0, 4096, NULL, &send));
		ok(peerlane_wait(a.session, send, -1, NULL));
		ok(peerlane_wait(b.session, receive, -1, NULL));
		ok(peerlane_statistics(b.session, &counters, sizeof counters));
	}
	return NULL;
}

static void *waits(void *argument)
{
	peerlane_operation *pending = argument;

	ok(peerlane_wait(b.session, *pending, -1, NULL));
	return NULL;
}

int main(int argc, char **argv)
{
	peerlane_operation pending, send;
	pthread_t thread, waiting;
	peerlane_connection first_a, first_b;
	size_t bytes;
	void *page;
	int fd, status;
	pid_t pid;

	must(argc == 4);
	socket_a = argv[1];
	gpu_open();
	a = attach(argv[1], argv[3], 2 * MIB);
	b = attach(argv[2], argv[3], 2 * MIB);
	join(&a, &b);
	ok(peerlane_event_descriptor(b.session, &fd));
	must(fcntl(fd, F_GETFD) & FD_CLOEXEC);
	ok(peerlane_timelines(b.session, &page, &bytes)); /* and with it a thread */

	/* A thread is asleep in the library, and another is told of nothing. */
	ok(peerlane_receive(b.session, b.connection, b.memory, 0, 8, NULL, &pending));
	must(!pthread_create(&waiting, NULL, waits, &pending));
	must((pid = fork()) >= 0);
	if (!pid)
		_exit(child(pending, 1));
	must(waitpid(pid, &status, 0) == pid && status == 0);
	/* Nothing of the parent's has changed. */
	ok(peerlane_send(a.session, a.connection, a.memory, 0, 8, NULL, &send));
	ok(peerlane_wait(a.session, send, -1, NULL));
	must(!pthread_join(waiting, NULL));

	/* Forks at any moment of others. */
	first_a = a.connection;
	first_b = b.connection;
	join(&a, &b);
	must(!pthread_create(&thread, NULL, busy, NULL));
	for (int i = 0; i < 20; i++) {
		ok(peerlane_receive(b.session, first_b, b.memory, 8192, 8, NULL, &pending));
		must((pid = fork()) >= 0);
		if (!pid)
			_exit(child(pending, 0));
		must(waitpid(pid, &status, 0) == pid && status == 0);
		ok(peerlane_send(a.session, first_a, a.memory, 8192, 8, NULL, &send));
		ok(peerlane_wait(a.session, send, -1, NULL));
		ok(peerlane_wait(b.session, pending, -1, NULL));
	}
	stop = 1;
	must(!pthread_join(thread, NULL));

	/* exec: nothing of ours is there. */
	must((pid = vfork()) >= 0);
	if (!pid) {
		execl("/bin/sh", "sh", "-c", "for f in /proc/self/fd/*; do case $(readlink $f) in socket:*|*eventpoll*|*eventfd*) exit 1;; esac; done; exit 0", (char *)NULL);
		_exit(127);
	}
	must(waitpid(pid, &status, 0) == pid && status == 0);
	ok(peerlane_session_status(a.session));
	ok(peerlane_session_status(b.session));
	peerlane_close(a.session);
	peerlane_close(b.session);
	return 0;
}
