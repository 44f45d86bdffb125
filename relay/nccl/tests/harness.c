/* harness PLUGIN VERSION MODE SEED LINKS GROUPS BYTES DEPTH SOCKET GPU SOCKET GPU
 *
 * Two ranks, each a process with a relay of its own, load the plugin as NCCL does and
 * move messages over LINKS connections, every other one in the other direction: on each
 * GROUPS groups of 1 to 8 receives, DEPTH of them at once, of 0 to BYTES bytes, in host
 * and GPU memory, in an order that SEED and the machine's load decide; where SEED is odd
 * nobody receives before all have tried to send for a while. MODE:
 *
 *	run    to the end
 *	fork   the same, with children of fork()
 *	kill   until each link has an error, for each of which there is a line
 *	anew   as kill; each rank then says "ended", waits for a byte, and runs to the end
 *	       over new communicators
 *	ahead  sends of 8 bytes of host memory end before their receives are posted, and those that are
 *	       under way when their communicator is closed arrive
 *	stop   as run; rank 0 first says "ready", waits for a byte, and says "waits" when
 *	       connect has returned a hundred times for each link without a communicator
 *
 * HARNESS_RANK_0 and HARNESS_RANK_1 are each one NAME=VALUE of that rank alone. With
 * HARNESS_OLD the listeners are those of a plugin that tells no settings.
 *
 * What breaks NCCL's contract is a line "violation: ...", and exit status 3. A call that
 * must not wait may last HARNESS_LIMIT seconds, else 60, and nothing may end for
 * HARNESS_QUIET, else 120. */
#define _GNU_SOURCE
#include <ctype.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "gpu.h"
#include "net.h"

#define GRANULE ((uint64_t)2 << 20)
#define MOST_LINKS 128
#define MOST_DEPTH 32
#define POISON 0xee

/* --- what goes wrong -------------------------------------------------------------- */

static int rank;
static const char *volatile calling = "nothing";
static char said[2048]; /* the plugin's last warning */

static void line(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void line(const char *format, ...)
{
	char text[4096];
	va_list arguments;
	int n = snprintf(text, sizeof text, "rank %d: ", rank);

	va_start(arguments, format);
	n += vsnprintf(text + n, sizeof text - (size_t)n - 1, format, arguments);
	va_end(arguments);
	if (n > (int)sizeof text - 2)
		n = sizeof text - 2;
	text[n++] = '\n';
	if (write(1, text, (size_t)n) != n)
		_exit(1);
}

#define violation(...) (line("violation: " __VA_ARGS__), _exit(3))

static void must(bool so, const char *what)
{
	if (!so) {
		line("%s: %s", what, said);
		_exit(1);
	}
}

static void blocked(int signal)
{
	(void)signal;
	violation("%s blocks", calling);
}

static unsigned limit = 60, quiet_limit = 120;

/* prompt makes a call that must not wait. */
#define prompt(name, call) (calling = name, alarm(limit), prompted(call))
static int prompted(int result)
{
	alarm(0);
	return result;
}

static void logger(int level, unsigned long flags, const char *file, int at, const char *format, ...)
{
	char text[sizeof said];
	va_list arguments;

	(void)flags, (void)file, (void)at;
	va_start(arguments, format);
	vsnprintf(text, sizeof text, format, arguments);
	va_end(arguments);
	if (level == NCCL_LOG_WARN)
		memcpy(said, text, sizeof said);
	if (getenv("HARNESS_DEBUG"))
		line("log %d %s", level, text);
}

/* --- the schedule ------------------------------------------------------------------- */

static uint64_t seed, bytes_most;
static unsigned links, groups, depth;

static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15u;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

static uint64_t mark(unsigned link, unsigned group, unsigned i) { return mix(seed ^ mix((uint64_t)link << 40 | (uint64_t)group << 8 | i)); }

struct message {
	int tag;
	uint64_t bytes, room, mark;
	bool from_host, to_host;
};

struct group {
	unsigned n, first; /* the sender begins with this one */
	struct message m[NCCL_MAX_RECEIVES];
};

/* Large messages come one by one: all places of a link have to be registered. */
static unsigned group_most(void) { return bytes_most > (4 << 20) ? 1 : NCCL_MAX_RECEIVES; }

static struct group plan(unsigned link, unsigned group)
{
	uint64_t r = mark(link, group, 99);
	struct group g = {.n = 1 + r % group_most()};

	g.first = (r >> 8) % g.n;
	for (unsigned i = 0; i < g.n; i++) {
		struct message *m = &g.m[i];
		uint64_t x = mark(link, group, i), kind = x % 8;

		m->mark = x;
		m->tag = (int)(((r >> 16) + i) % NCCL_MAX_RECEIVES); /* each once in a group, again and again over groups */
		m->bytes = kind == 0 ? 0 : kind < 3 ? mix(x) % 65 : kind == 3 ? bytes_most : mix(x) % (bytes_most + 1);
		m->room = m->bytes + (x & 64 ? 0 : mix(x + 1) % (bytes_most - m->bytes + 1));
		m->from_host = x >> 20 & 1;
		m->to_host = x >> 21 & 1;
	}
	return g;
}

static void fill(uint8_t *to, uint64_t n, uint64_t from)
{
	for (uint64_t i = 0; i < n; i++)
		to[i] = (uint8_t)((from + i / 8 * 0xbf58476d1ce4e5b9u) >> i % 8 * 8);
}

/* --- a link --------------------------------------------------------------------------- */

struct posted {
	void *request;
	unsigned group, i;
};

static struct link {
	bool sends, dead;
	unsigned number;
	void *listener, *communicator;
	char handle[NCCL_HANDLE_BYTES];
	uint8_t *host;
	struct gpu_memory device;
	void *host_memory, *device_memory;
	unsigned group, i;         /* next to post */
	unsigned done;             /* groups */
	unsigned left[MOST_DEPTH]; /* messages of the group in this place that have not ended */
	struct posted posted[MOST_DEPTH * NCCL_MAX_RECEIVES];
	unsigned waiting;
} link_[MOST_LINKS];

static struct gpu gpu;
static uint8_t *scratch, *expected;
static uint64_t stride, chance;
static bool killing, stopping;

static unsigned dice(unsigned n) { return (unsigned)((chance = mix(chance)) % n); }

/* failed says whether a call has, which is what a killed relay is for. */
static bool failed(struct link *l, const char *call, int result)
{
	if (!result)
		return false;
	if (!killing) {
		line("%s on link %u: %d: %s", call, l->number, result, said);
		_exit(1);
	}
	l->dead = true;
	line("link %u ended: %d: %s", l->number, result, said);
	return true;
}

static uint64_t at(unsigned group, unsigned i) { return ((uint64_t)(group % depth) * group_most() + i) * stride; }

static void *address(struct link *l, bool host, unsigned group, unsigned i)
{
	return host ? (void *)(l->host + at(group, i)) : (void *)(uintptr_t)(l->device.address + at(group, i));
}

static void put(struct link *l, bool host, unsigned group, unsigned i, const uint8_t *from, uint64_t n)
{
	if (host)
		memcpy(address(l, host, group, i), from, n);
	else if (n)
		gpu_write(&gpu, l->device.address + at(group, i), from, n);
}

static void known_once(struct link *l, void *request)
{
	if (request == NCCL_OPTIONAL_RECEIVE_COMPLETION)
		violation("a request of link %u is what NCCL put there", l->number);
	for (unsigned k = 0; k < l->waiting; k++)
		if (l->posted[k].request == request)
			violation("link %u: two operations have one request", l->number);
}

static void post_send(struct link *l)
{
	struct group g = plan(l->number, l->group);
	unsigned i = (g.first + l->i) % g.n;
	struct message *m = &g.m[i];
	void *request = &g;

	if (l->i == 0 && l->left[l->group % depth])
		return;
	fill(scratch, m->bytes, m->mark);
	put(l, m->from_host, l->group, i, scratch, m->bytes);
	if (failed(l, "isend", prompt("isend", net_send(l->communicator, address(l, m->from_host, l->group, i), m->bytes, m->tag,
					   m->from_host ? l->host_memory : l->device_memory, &request))))
		return;
	if (l->waiting < NCCL_MAX_REQUESTS && request == &g)
		violation("isend of link %u left the request as it was", l->number);
	if (!request)
		return; /* no room; again later */
	known_once(l, request);
	if (l->i == 0)
		l->left[l->group % depth] = g.n;
	l->posted[l->waiting++] = (struct posted){request, l->group, i};
	if (++l->i == g.n)
		l->i = 0, l->group++;
}

static void post_receive(struct link *l)
{
	struct group g = plan(l->number, l->group);
	void *data[NCCL_MAX_RECEIVES], *memory[NCCL_MAX_RECEIVES], *request = l->group % 3 ? NULL : NCCL_OPTIONAL_RECEIVE_COMPLETION;
	size_t sizes[NCCL_MAX_RECEIVES];
	int tags[NCCL_MAX_RECEIVES];

	if (l->left[l->group % depth])
		return;
	memset(scratch, POISON, stride);
	for (unsigned i = 0; i < g.n; i++) {
		struct message *m = &g.m[i];

		put(l, m->to_host, l->group, i, scratch, stride);
		data[i] = address(l, m->to_host, l->group, i);
		memory[i] = m->to_host ? l->host_memory : l->device_memory;
		sizes[i] = m->room;
		tags[i] = m->tag;
	}
	if (failed(l, "irecv", prompt("irecv", net_receive(l->communicator, (int)g.n, data, sizes, tags, memory, &request))) || !request)
		return;
	known_once(l, request);
	l->left[l->group % depth] = g.n;
	l->posted[l->waiting++] = (struct posted){request, l->group, 0};
	l->group++;
}

/* whose says which message of that tag the bytes are. */
static const char *whose(struct link *l, unsigned group, int tag, const uint8_t *got, uint64_t n)
{
	for (unsigned other = 0; n >= 8 && other < group + 2 * MOST_DEPTH; other++) {
		struct group g = plan(l->number, other);

		for (unsigned i = 0; i < g.n; i++)
			if (other != group && g.m[i].tag == tag && g.m[i].bytes >= 8 && !memcmp(got, &g.m[i].mark, 8))
				return "order is broken: the bytes of another message of its tag";
	}
	return "the wrong bytes";
}

static void check(struct link *l, unsigned group, int *sizes)
{
	struct group g = plan(l->number, group);
	void *data[NCCL_MAX_RECEIVES], *memory[NCCL_MAX_RECEIVES], *request = &g;
	int done = 0;

	for (unsigned i = 0; i < g.n; i++) {
		data[i] = address(l, g.m[i].to_host, group, i);
		memory[i] = g.m[i].to_host ? l->host_memory : l->device_memory;
	}
	if (failed(l, "iflush", prompt("iflush", ALL(flush(l->communicator, (int)g.n, data, sizes, memory, &request)))))
		return;
	while (request && !done)
		if (failed(l, "test", prompt("test", ALL(test(request, &done, NULL)))))
			return;
	for (unsigned i = 0; i < g.n; i++) {
		struct message *m = &g.m[i];
		const uint8_t *got = data[i];

		if (!m->to_host) {
			gpu_read(&gpu, scratch, (uintptr_t)data[i], stride);
			got = scratch;
		}
		memset(expected, POISON, stride);
		fill(expected, m->bytes, m->mark);
		if (memcmp(got, expected, m->bytes))
			violation("link %u, group %u, receive %u (tag %d, %zu bytes): %s", l->number, group, i, m->tag, (size_t)m->bytes,
				whose(l, group, m->tag, got, (uint64_t)sizes[i] < m->bytes ? (uint64_t)sizes[i] : m->bytes));
		if ((uint64_t)sizes[i] != m->bytes)
			violation("link %u, group %u, receive %u: a size of %d, not %zu", l->number, group, i, sizes[i], (size_t)m->bytes);
		if (memcmp(got + m->bytes, expected + m->bytes, stride - m->bytes))
			violation("link %u, group %u, receive %u: bytes behind the message", l->number, group, i);
	}
}

static bool look(struct link *l, unsigned k)
{
	struct posted p = l->posted[k];
	struct group g = plan(l->number, p.group);
	int done = 0, sizes[NCCL_MAX_RECEIVES];

	memset(sizes, 0xff, sizeof sizes);
	if (failed(l, "test", prompt("test", ALL(test(p.request, &done, sizes)))) || !done)
		return false;
	l->posted[k] = l->posted[--l->waiting];
	if (l->sends) {
		if ((uint64_t)sizes[0] != g.m[p.i].bytes)
			violation("link %u, group %u: a sent size of %d, not %zu", l->number, p.group, sizes[0], (size_t)g.m[p.i].bytes);
		if (--l->left[p.group % depth] == 0)
			l->done++;
	} else {
		check(l, p.group, sizes);
		l->left[p.group % depth] = 0;
		l->done++;
	}
	return true;
}

/* --- a rank ----------------------------------------------------------------------------- */

static void tell(int fd, const void *data, size_t n) { must(write(fd, data, n) == (ssize_t)n, "the other rank has gone"); }

static void hear(int fd, void *data, size_t n) { must(recv(fd, data, n, MSG_WAITALL) == (ssize_t)n, "the other rank has gone"); }

static void make_memory(struct link *l)
{
	uint64_t n = depth * group_most() * stride;
	uint8_t *raw = malloc(n + 8);

	must(raw, "memory");
	l->host = raw + 8 * (l->number % 2); /* not all at a page's or a cache line's begin */
	l->device = gpu_allocate(&gpu, (n + GRANULE - 1) / GRANULE * GRANULE);
	close(l->device.fd);
	must(!ALL(register_memory(l->communicator, l->host, n, NCCL_POINTER_HOST, &l->host_memory)), "regMr of host memory");
	must(!ALL(register_memory(l->communicator, (void *)(uintptr_t)l->device.address, n, NCCL_POINTER_CUDA, &l->device_memory)), "regMr of GPU memory");
}

/* connect_to_the_stopped connects all while the other side's relay does nothing. */
static void connect_to_the_stopped(void)
{
	char byte;

	line("ready");
	must(read(0, &byte, 1) == 1, "a byte to go on");
	for (int i = 0; i < 100; i++)
		for (struct link *l = link_; l < link_ + links; l++) {
			if (!l->sends)
				continue;
			must(!prompt("connect", net_connect(0, l->handle, &l->communicator)), "connect");
			if (l->communicator)
				violation("connect has a communicator while the other side's relay is stopped");
		}
	line("waits");
}

static void connect_all(int other)
{
	unsigned up = 0;

	for (unsigned i = 0; i < links; i++) {
		struct link *l = &link_[i];

		*l = (struct link){.number = i, .sends = i % 2 == (unsigned)rank};
		if (l->sends)
			continue;
		must(!prompt("listen", net_listen(0, l->handle, &l->listener)), "listen");
		if (!l->listener)
			violation("listen gives out no listener");
		/* Nobody can have come. */
		l->communicator = l;
		must(!prompt("accept", ALL(accept(l->listener, &l->communicator, NULL))), "accept");
		if (l->communicator)
			violation("accept has a communicator before anybody could connect");
	}
	for (unsigned i = 0; i < links; i++)
		if (!link_[i].sends) {
			if (getenv("HARNESS_OLD"))
				memset(link_[i].handle + NCCL_HANDLE_BYTES - 16, 0, 16);
			tell(other, link_[i].handle, NCCL_HANDLE_BYTES);
		}
	for (unsigned i = 0; i < links; i++)
		if (link_[i].sends)
			hear(other, link_[i].handle, NCCL_HANDLE_BYTES);
	if (stopping && rank == 0)
		connect_to_the_stopped();
	while (up < links) {
		for (unsigned i = 0; i < links; i++) {
			struct link *l = &link_[i];

			if (l->communicator)
				continue;
			if (l->sends)
				must(!prompt("connect", net_connect(0, l->handle, &l->communicator)), "connect");
			else
				must(!prompt("accept", ALL(accept(l->listener, &l->communicator, NULL))), "accept");
			up += l->communicator != NULL;
		}
		sched_yield();
	}
	for (unsigned i = 0; i < links; i++)
		make_memory(&link_[i]);
}

/* children are what a data loader makes: one that uses what it must not, one that begins
 * anew, and one that lives on. */
static pid_t children(void)
{
	struct link *l = &link_[0];
	void *request = NULL;
	int status, n = 0;
	pid_t pid = fork();

	if (!pid) {
		int result = l->sends ? net_send(l->communicator, l->host, 8, 1, l->host_memory, &request)
				      : net_receive(l->communicator, 1, (void *[]){l->host}, (size_t[]){8}, (int[]){1}, &l->host_memory, &request);

		if (!result)
			violation("a child of fork() uses its parent's communicator");
		must(!net_init(logger), "init in a child");
		must(!ALL(devices(&n)) && n == 1, "devices in a child");
		must(!net_listen(0, l->handle, &l->listener), "listen in a child");
		_exit(0);
	}
	must(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0, "a child");
	pid = fork();
	if (!pid)
		for (;;)
			pause();
	must(pid > 0, "a second child");
	return pid;
}

/* alone: the other rank is in another container, and the device has the index of the host's GPU. */
static bool alone;

static void check_properties(void)
{
	struct nccl_net_properties_v12 p = {0}; /* the others are shorter */
	int n = 0;

	must(!ALL(devices(&n)) && n >= 1, "devices");
	must(!EACH(net.v8->properties(0, (void *)&p), net.v9->properties(0, (void *)&p), net.v10->properties(0, (void *)&p), net.v11->properties(0, (void *)&p), net.v12->properties(0, &p)), "getProperties");
	must(!strncmp(p.name, "peerlane_", 9) && (alone ? isdigit(p.name[9]) : p.name[9] == '0' + rank) && !p.name[10] && p.pointers == 3 && !p.registration_is_global && p.guid, "properties");
	must((net.version == 8 ? ((struct nccl_net_properties_v8 *)(void *)&p)->max_receives : p.max_receives) == NCCL_MAX_RECEIVES, "maxRecvs");
}

/* move moves messages over all links until each is done, or dead. The child that was
 * made meanwhile and lives on, 0 if none was. */
static pid_t move(const char *mode)
{
	unsigned ended = 0, progress = 0, quiet = 0, sends_only = seed & 1 ? 300 : 0;
	time_t since = time(NULL);
	pid_t child = 0;

	while (ended < links) {
		unsigned before = progress;

		ended = 0;
		for (unsigned i = 0; i < links; i++) {
			struct link *l = &link_[i];

			if (l->dead || (!killing && l->done == groups)) {
				ended++;
				continue;
			}
			if (sends_only && !l->sends)
				continue;
			if ((killing || l->group < groups) && dice(3) && l->waiting < MOST_DEPTH * NCCL_MAX_RECEIVES)
				l->sends ? post_send(l) : post_receive(l);
			if (l->waiting && !l->dead)
				progress += look(l, dice(l->waiting));
		}
		sends_only -= sends_only > 0;
		if (progress != before) {
			since = time(NULL);
			quiet = 0;
		} else if (++quiet > 200) {
			usleep(50);
			if (time(NULL) - since > (time_t)quiet_limit)
				violation("nothing ends any more");
		}
		if (before < 20 && progress >= 20 && killing)
			line("running");
		if (before == 0 && progress && !strcmp(mode, "fork"))
			child = children();
	}
	return child;
}

#define AHEAD 64 /* more than the 8 steps of NCCL's buffers */

/* send_ahead sends numbers from the same place, each after the end of the send before. */
static void send_ahead(struct link *l, uint64_t from)
{
	for (uint64_t n = from; n < from + AHEAD; n++) {
		void *request = NULL;
		int done = 0, sizes[NCCL_MAX_RECEIVES] = {-1};
		time_t since = time(NULL);

		memcpy(l->host, &n, sizeof n);
		must(!prompt("isend", net_send(l->communicator, l->host, sizeof n, 3, l->host_memory, &request)) && request, "isend");
		while (!done) {
			must(!prompt("test", ALL(test(request, &done, sizes))), "test");
			if (time(NULL) - since > (time_t)limit)
				violation("send %u of host memory does not end before its receive", (unsigned)n);
		}
		if (sizes[0] != sizeof n)
			violation("a sent size of %d", sizes[0]);
	}
	memset(l->host, POISON, sizeof(uint64_t));
}

static void receive_behind(struct link *l, uint64_t from)
{
	for (uint64_t n = from; n < from + AHEAD; n++) {
		void *request = NULL;
		int done = 0;
		uint64_t got;

		while (!request)
			must(!prompt("irecv", net_receive(l->communicator, 1, (void *[]){l->host}, (size_t[]){sizeof n}, (int[]){3}, &l->host_memory, &request)), "irecv");
		while (!done)
			must(!prompt("test", ALL(test(request, &done, NULL))), "test");
		memcpy(&got, l->host, sizeof got);
		if (got != n)
			violation("receive %u has the bytes of send %llu", (unsigned)n, (unsigned long long)got);
	}
}

static void run_ahead(int other)
{
	struct link *l = &link_[0];
	char byte = 0;

	if (l->sends) {
		send_ahead(l, 0);
		tell(other, &byte, 1);
		hear(other, &byte, 1);
		send_ahead(l, AHEAD);
		tell(other, &byte, 1); /* and close_all() */
	} else {
		hear(other, &byte, 1);
		receive_behind(l, 0);
		tell(other, &byte, 1);
		hear(other, &byte, 1);
		usleep(300000); /* the sender closes meanwhile */
		receive_behind(l, AHEAD);
	}
}

static void close_all(void)
{
	for (unsigned i = 0; i < links; i++) {
		struct link *l = &link_[i];

		must(!ALL(deregister(l->communicator, l->host_memory)) && !ALL(deregister(l->communicator, l->device_memory)), "deregMr");
		must(!(l->sends ? ALL(close_send(l->communicator)) : ALL(close_receive(l->communicator))), "close");
		must(!l->listener || !ALL(close_listen(l->listener)), "closeListen");
		free(l->host - 8 * (l->number % 2));
	}
}

static int be_rank(char **argument, const char *mode, const char *plugin, int version, int other)
{
	peerlane_gpu uuid = {{0}};
	pid_t child = 0;
	char byte = 0;
	bool ahead = !strcmp(mode, "ahead");

	char *own = getenv(rank ? "HARNESS_RANK_1" : "HARNESS_RANK_0");

	if (own && putenv(own))
		return 2;
	if (*argument[0])
		setenv("PEERLANE_SOCKET", argument[0], 1);
	for (unsigned i = 0, digit = 0; argument[1][4 + i]; i++)
		if (argument[1][4 + i] != '-') {
			const char pair[2] = {argument[1][4 + i], 0};

			uuid.bytes[digit / 2] = (uint8_t)(uuid.bytes[digit / 2] << 4 | strtoul(pair, NULL, 16));
			digit++;
		}
	gpu_open();
	gpu = gpu_use(&uuid);
	net_load(plugin, version);
	must(!net_init(logger), "init");
	check_properties();
	connect_all(other);
	if (ahead)
		run_ahead(other);
	else
		child = move(mode);
	if (!strcmp(mode, "anew")) {
		close_all();
		killing = false;
		line("ended");
		must(read(0, &byte, 1) == 1, "a byte to go on");
		connect_all(other);
		move(mode);
	}
	if (!killing && !ahead) {
		tell(other, &byte, 1);
		hear(other, &byte, 1);
	}
	close_all();
	must(!net_finalize(), "finalize");
	if (child) {
		kill(child, SIGKILL);
		waitpid(child, NULL, 0);
	}
	line("done");
	free(scratch);
	free(expected);
	return 0;
}

int main(int argc, char **argv)
{
	int pair[2], status, worst = 0;
	pid_t ranks[2];

	if (argc != 13) {
		fprintf(stderr, "usage: harness PLUGIN VERSION MODE SEED LINKS GROUPS BYTES DEPTH SOCKET GPU SOCKET GPU\n");
		return 2;
	}
	seed = strtoull(argv[4], NULL, 10);
	links = (unsigned)atoi(argv[5]);
	groups = (unsigned)atoi(argv[6]);
	bytes_most = strtoull(argv[7], NULL, 10);
	depth = (unsigned)atoi(argv[8]);
	killing = !strcmp(argv[3], "kill") || !strcmp(argv[3], "anew");
	stopping = !strcmp(argv[3], "stop");
	if (getenv("HARNESS_LIMIT"))
		limit = (unsigned)atoi(getenv("HARNESS_LIMIT"));
	if (getenv("HARNESS_QUIET"))
		quiet_limit = (unsigned)atoi(getenv("HARNESS_QUIET"));
	if (links > MOST_LINKS || depth > MOST_DEPTH || !bytes_most)
		return 2;
	stride = (bytes_most + 63) / 64 * 64 + 64;
	scratch = malloc(stride);
	expected = malloc(stride);
	for (int i = 0; i < 2; i++)
		/* A rank without a GPU is in another container, behind descriptor 3. */
		if (!*argv[10 + 2 * !i]) {
			alone = true;
			rank = i;
			chance = mix(seed + (unsigned)i);
			signal(SIGALRM, blocked);
			return be_rank(argv + 9 + 2 * i, argv[3], argv[1], atoi(argv[2]), 3);
		}
	must(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair), "a socket pair");
	for (int i = 0; i < 2; i++) {
		must((ranks[i] = fork()) >= 0, "fork");
		if (ranks[i])
			continue;
		rank = i;
		chance = mix(seed + (unsigned)i);
		signal(SIGALRM, blocked);
		close(pair[!i]);
		exit(be_rank(argv + 9 + 2 * i, argv[3], argv[1], atoi(argv[2]), pair[i]));
	}
	close(pair[0]);
	close(pair[1]);
	for (int i = 0; i < 2; i++) {
		pid_t ended = waitpid(-1, &status, 0);

		status = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
		if (status && i == 0) /* the other one waits for it */
			kill(ranks[ended == ranks[0]], SIGTERM);
		if (status > worst)
			worst = status;
	}
	free(scratch);
	free(expected);
	return worst;
}
