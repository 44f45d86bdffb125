/* hot SOCKET_A SOCKET_B GPU: operations allocate nothing, and make no system call but
 * the write that wakes a relay. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "test.h"

#define MESSAGES 1000

static _Thread_local int counting;
static unsigned allocations;

extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);

/* The library's calls come here, too. */
void *malloc(size_t n)
{
	allocations += counting;
	return __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
	allocations += counting;
	return __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
	allocations += counting;
	return __libc_realloc(p, n);
}

/* only_writes has this thread killed for any other system call: recvmsg is the look
 * whether the relay lives, sched_yield is main's. */
static void only_writes(void)
{
	static const int allowed[] = {SYS_write, SYS_recvmsg, SYS_futex, SYS_exit_group, SYS_clock_gettime, SYS_sched_yield};
	struct sock_filter f[16];
	unsigned n = 0, last = sizeof allowed / sizeof *allowed;
	struct sock_fprog program = {.filter = f};

	f[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	for (unsigned i = 0; i < last; i++)
		f[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)allowed[i], (unsigned char)(last - i), 0);
	f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
	f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	program.len = (unsigned short)n;
	must(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	must(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

int main(int argc, char **argv)
{
	peerlane_operation send, receive;
	unsigned count;

	must(argc == 4);
	gpu_open();
	struct side a = attach(argv[1], argv[3], 2 * MIB), b = attach(argv[2], argv[3], 2 * MIB);
	join(&a, &b);
	say("ready");
	only_writes();
	counting = 1;
	for (int i = 0; i < MESSAGES; i++) {
		struct peerlane_options options = {.tag = (uint64_t)i % 3};
		struct peerlane_result result;
		int sent, received;

		if (peerlane_receive(b.session, b.connection, b.memory, 0, 64, &options, i % 2 ? &receive : NULL) ||
		    peerlane_send(a.session, a.connection, a.memory, 0, 64, &options, &send))
			_exit(2);
		received = i % 2 ? PEERLANE_STATUS_PENDING : 0;
		sent = PEERLANE_STATUS_PENDING;
		while (sent == PEERLANE_STATUS_PENDING || received == PEERLANE_STATUS_PENDING) {
			if (received == PEERLANE_STATUS_PENDING)
				received = peerlane_test(b.session, receive, NULL);
			if (sent == PEERLANE_STATUS_PENDING) {
				if (peerlane_poll(a.session, &result, 1, &count))
					_exit(3);
				if (count)
					sent = result.status;
			}
			/* The relays' threads need a processor, too. */
			sched_yield();
		}
		if (sent || received)
			_exit(4);
	}
	counting = 0;
	_exit(allocations ? 5 : 0);
}
