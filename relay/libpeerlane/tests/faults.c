/* faults SOCKET GPU CALL AFTER ERRNO: the library's call of that name fails with ERRNO,
 * once, after so many of them. It says three lines, of a session before that, of one that
 * meets it and of one after that: status, descriptors, mappings of relays' memory, whether
 * the fault was met, and the error. CALL "-": the second line has the calls instead. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "test.h"

/* The names that can fail. The library finds these functions before libc's. */
#define CALLS(X) X(socket) X(connect) X(setsockopt) X(sendmsg) X(recvmsg) X(mmap) X(eventfd) X(poll)

enum {
#define X(name) call_##name,
	CALLS(X)
#undef X
	call_count
};
static const char *const names[] = {
#define X(name) #name,
	CALLS(X)
#undef X
};
static atomic_int seen[call_count], armed, struck;
static int which = -1, after, error;

/* fails reports whether a call meets the fault. Only the library's are counted. */
static int fails(int call, const void *caller)
{
	Dl_info from;

	if (!armed || !dladdr(caller, &from) || !strstr(from.dli_fname, "libpeerlane.so"))
		return 0;
	int n = seen[call]++;
	if (call != which || n != after)
		return 0;
	struck = 1;
	errno = error;
	return 1;
}

#define FAULT(call, value) \
	do { \
		if (fails(call_##call, __builtin_return_address(0))) \
			return value; \
	} while (0)
#define NEXT(call) ((__typeof__(&call))dlsym(RTLD_NEXT, #call))

int socket(int domain, int type, int protocol)
{
	FAULT(socket, -1);
	return NEXT(socket)(domain, type, protocol);
}

int connect(int fd, const struct sockaddr *to, socklen_t bytes)
{
	FAULT(connect, -1);
	return NEXT(connect)(fd, to, bytes);
}

int setsockopt(int fd, int level, int name, const void *value, socklen_t bytes)
{
	FAULT(setsockopt, -1);
	return NEXT(setsockopt)(fd, level, name, value, bytes);
}

ssize_t sendmsg(int fd, const struct msghdr *m, int flags)
{
	FAULT(sendmsg, -1);
	return NEXT(sendmsg)(fd, m, flags);
}

ssize_t recvmsg(int fd, struct msghdr *m, int flags)
{
	FAULT(recvmsg, -1);
	return NEXT(recvmsg)(fd, m, flags);
}

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
	FAULT(mmap, MAP_FAILED);
	return NEXT(mmap)(at, bytes, protection, flags, fd, offset);
}

int eventfd(unsigned value, int flags)
{
	FAULT(eventfd, -1);
	return NEXT(eventfd)(value, flags);
}

int poll(struct pollfd *list, nfds_t count, int timeout)
{
	FAULT(poll, -1);
	return NEXT(poll)(list, count, timeout);
}

#define LONG 60000 /* ms: what takes so long hangs */
#define BYTES 4096

static char told[512];

#define step(call) \
	do { \
		if ((status = (call))) { \
			snprintf(told, sizeof told, "%s: %s", #call, peerlane_error()); \
			goto out; \
		} \
	} while (0)

/* use sends a message from a session to itself. */
static int use(const char *socket, const peerlane_gpu *gpu, int fd)
{
	struct peerlane_allocation allocation = {.fd = fd, .bytes = 2 * MIB};
	peerlane_operation send, receive;
	peerlane_connection a, b;
	peerlane_session *s = NULL;
	peerlane_listener listener;
	peerlane_memory from, to, exported;
	peerlane_handle handle;
	void *out, *in;
	int status, event;

	*told = 0;
	step(peerlane_dial(socket, NULL, 0, LONG, &s));
	step(peerlane_event_descriptor(s, &event));
	step(peerlane_export(s, &allocation, 1, gpu, 0, &exported));
	step(peerlane_host_memory(s, BYTES, gpu, 0, &out, &from));
	step(peerlane_host_memory(s, BYTES, gpu, 0, &in, &to));
	step(peerlane_listen(s, gpu, &listener, &handle));
	step(peerlane_connect(s, gpu, &handle, &a));
	step(peerlane_accept(s, listener, LONG, &b));
	fill(out, BYTES, 9);
	step(peerlane_receive(s, b, to, 0, BYTES, NULL, &receive));
	step(peerlane_send(s, a, from, 0, BYTES, NULL, &send));
	step(peerlane_wait(s, send, LONG, NULL));
	step(peerlane_wait(s, receive, LONG, NULL));
	must(!memcmp(in, out, BYTES));
	step(peerlane_unexport(s, from));
	step(peerlane_disconnect(s, a));
	step(peerlane_unlisten(s, listener));
out:
	peerlane_close(s);
	return status;
}

static int descriptors(void)
{
	DIR *list = opendir("/proc/self/fd");
	int n = 0;

	must(list);
	while (readdir(list))
		n++;
	closedir(list);
	return n;
}

static int mappings(void)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	char line[512];
	int n = 0;

	must(maps);
	while (fgets(line, sizeof line, maps))
		n += strstr(line, "/memfd:peerlane-") && !strstr(line, "peerlane-sim");
	fclose(maps);
	return n;
}

int main(int argc, char **argv)
{
	peerlane_gpu uuid;

	must(argc == 6);
	ok(peerlane_gpu_parse(argv[2], &uuid));
	for (int i = 0; i < call_count; i++)
		if (!strcmp(argv[3], names[i]))
			which = i;
	after = atoi(argv[4]);
	error = atoi(argv[5]);
	gpu_open();
	struct gpu gpu = gpu_use(&uuid);
	struct gpu_memory room = gpu_allocate(&gpu, 2 * MIB);
	for (int round = 0; round < 3; round++) {
		armed = round == 1;
		int status = use(argv[1], &uuid, room.fd);
		armed = 0;
		if (round == 1 && !strcmp(argv[3], "-")) {
			must(status == 0);
			for (int i = 0; i < call_count; i++)
				printf("%s=%d ", names[i], seen[i]);
			say("");
			continue;
		}
		printf("%d %d %d %d %s", status, descriptors(), mappings(), struck, told);
		say("");
	}
	return 0;
}
