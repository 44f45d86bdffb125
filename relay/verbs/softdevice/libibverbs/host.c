// The host: files in the directory that this library lies in, or in
// PEERLANE_SOFTDEVICE_DIRECTORY.
//
//	devices  one a line: NAME key=value...
//	           guid=HEX transport=IB|iWARP layer=Ethernet|InfiniBand
//	           state=ACTIVE|DOWN lid=N address=IPV4 entry=N (of the GID table)
//	           dmabuf=yes|no peermem=no|alloc|yes
//	           holds=yes|no (what is written into a GPU's memory is there when it is read)
//	           fault=none|no-flush|reordered-flush|stale-read|lost-tail|wrong-gpu|torn-64
//	             (of writes into GPUs' memory: a read flushes nothing; a read passes the write
//	             before it; a read of its own side brings what was there at the read before;
//	             some writes lose their last bytes; writes go to another region; some
//	             writes leave half a cache line as it was)
//	           rate=BYTES (a second, of all the device's requests; 0 for any)
//	           seed=N (the order of writes, within the limits of the specification; 0 for that of
//	             the requests)
//	         It is read anew when it is replaced, and ports come and go with it, and addresses.
//	script   one a line: CALL key=value...; what is not there is not asked for
//	           device=NAME call=N (the Nth in this process) from=N (that and later)
//	           each=1 (call and from count the calls for the device) bytes=N (registrations of at least N)
//	           errno=N status=N (of a completion) delay=MS
//	           corrupt=1 (a wrong byte in what a request moves)
//	           hold=1 (it blocks as long as the script has this; the log has "held")
//	log      each call, with its arguments and what came of it; without this file there is no record,
//	         and the script is not read
//	number   the last number that was given to a queue pair or a key, and when the port of each
//	         device is due
#include "softdevice.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

pthread_mutex_t lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;

// Where package verbs sees that this is no rdma-core.
API extern const char peerlane_software_device[];
const char peerlane_software_device[] = "peerlane-software-device:" SOFTDEVICE_SOURCE;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int directory = -1, logging = -1;
static _Atomic uint32_t *number;

static void begin(void)
{
	Dl_info self;
	char path[PATH_MAX];
	if (!dladdr(peerlane_software_device, &self))
		return;
	snprintf(path, sizeof path, "%s", self.dli_fname);
	const char *elsewhere = getenv("PEERLANE_SOFTDEVICE_DIRECTORY");
	directory = open(elsewhere ? elsewhere : dirname(path), O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (directory < 0)
		return;
	logging = openat(directory, "log", O_WRONLY | O_APPEND | O_CLOEXEC);
	int fd = openat(directory, "number", O_RDWR | O_CREAT | O_CLOEXEC, 0666);
	if (fd < 0 || ftruncate(fd, 4096) != 0)
		return;
	void *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (p != MAP_FAILED)
		number = p;
}

int host_directory(void)
{
	pthread_once(&once, begin);
	if (directory < 0)
		errno = ENOENT;
	return directory;
}

uint32_t host_number(void)
{
	host_directory();
	return number ? atomic_fetch_add(number, 1) + 0x11 : 0;
}

void host_log(const char *form, ...)
{
	if (host_directory() < 0 || logging < 0)
		return;
	char line[1024];
	int n = snprintf(line, sizeof line, "%d ", (int)getpid());
	va_list arguments;
	va_start(arguments, form);
	n += vsnprintf(line + n, sizeof line - (size_t)n - 1, form, arguments);
	va_end(arguments);
	if (n > (int)sizeof line - 2)
		n = sizeof line - 2;
	line[n++] = '\n';
	// One write is one line, whoever else writes. What the log has no room for is lost.
	if (write(logging, line, (size_t)n) < 0)
		return;
}

uint64_t host_nanoseconds(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

// Behind the last number the file of numbers has a line for each device, which the engine knows as well.
enum { LINE = 64 };

_Atomic uint64_t *host_due(int node)
{
	host_directory();
	return number && node >= 0 && node < DEVICES ? (_Atomic uint64_t *)((char *)number + LINE * (node + 1)) : NULL;
}

uint64_t host_now(void)
{
	return host_nanoseconds() / 1000;
}

enum { SPIN = 200, MANY_PROCESSORS = 16 };

uint64_t host_spin(void)
{
	static _Atomic long processors;
	if (!processors)
		processors = sysconf(_SC_NPROCESSORS_ONLN);
	return processors >= MANY_PROCESSORS ? host_now() + SPIN : 0;
}

static FILE *reading(const char *name)
{
	if (host_directory() < 0)
		return NULL;
	int fd = openat(directory, name, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return NULL;
	FILE *f = fdopen(fd, "r");
	if (!f)
		close(fd);
	return f;
}

static void describe(struct description *d, const char *key, const char *value)
{
	if (!strcmp(key, "guid"))
		d->guid = strtoull(value, NULL, 16);
	else if (!strcmp(key, "transport"))
		d->transport = strcmp(value, "iWARP") ? IBV_TRANSPORT_IB : IBV_TRANSPORT_IWARP;
	else if (!strcmp(key, "layer"))
		d->link_layer = strcmp(value, "InfiniBand") ? IBV_LINK_LAYER_ETHERNET : IBV_LINK_LAYER_INFINIBAND;
	else if (!strcmp(key, "state"))
		d->state = strcmp(value, "DOWN") ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
	else if (!strcmp(key, "lid"))
		d->lid = (uint16_t)atoi(value);
	else if (!strcmp(key, "address")) {
		unsigned a, b, c, e;
		if (sscanf(value, "%u.%u.%u.%u", &a, &b, &c, &e) == 4)
			d->address = a << 24 | b << 16 | c << 8 | e;
	} else if (!strcmp(key, "entry"))
		d->entry = (unsigned)atoi(value);
	else if (!strcmp(key, "dmabuf"))
		d->dmabuf = !strcmp(value, "yes");
	else if (!strcmp(key, "prefix"))
		d->prefix = strtoull(value, NULL, 16);
	else if (!strcmp(key, "ece"))
		d->ece = (uint32_t)strtoul(value, NULL, 16);
	else if (!strcmp(key, "entries"))
		d->entries = atoi(value);
	else if (!strcmp(key, "grh"))
		d->grh = !strcmp(value, "yes");
	else if (!strcmp(key, "direct"))
		d->direct = !strcmp(value, "yes");
	else if (!strcmp(key, "resize"))
		d->resize = !strcmp(value, "yes");
	else if (!strcmp(key, "holds"))
		d->holds = !strcmp(value, "yes");
	else if (!strcmp(key, "fault")) {
		static const char *const faults[] = {"none", "no-flush", "reordered-flush", "stale-read", "lost-tail", "wrong-gpu", "torn-64"};
		for (unsigned i = 0; i < sizeof faults / sizeof *faults; i++)
			if (!strcmp(value, faults[i]))
				d->fault = i;
	} else if (!strcmp(key, "rate"))
		d->rate = strtoull(value, NULL, 10);
	else if (!strcmp(key, "seed"))
		d->seed = strtoull(value, NULL, 10);
	else if (!strcmp(key, "peermem"))
		d->peermem = !strcmp(value, "yes") ? PEERMEM_YES : !strcmp(value, "alloc") ? PEERMEM_ALLOC : PEERMEM_NO;
}

int host_devices(struct description *into, int n)
{
	FILE *f = reading("devices");
	if (!f)
		return -1;
	char line[512];
	int got = 0;
	while (got < n && fgets(line, sizeof line, f)) {
		char *rest = line, *word = strsep(&rest, " \n");
		if (!*word)
			continue;
		struct description *d = &into[got];
		*d = (struct description){.link_layer = IBV_LINK_LAYER_ETHERNET, .state = IBV_PORT_ACTIVE, .node = got, .entry = 2};
		snprintf(d->name, sizeof d->name, "%s", word);
		while ((word = strsep(&rest, " \n"))) {
			char *value = strchr(word, '=');
			if (!value)
				continue;
			*value++ = 0;
			describe(d, word, value);
		}
		got++;
	}
	fclose(f);
	return got;
}

bool host_device(const char *name, struct description *d)
{
	struct description all[DEVICES];
	int n = host_devices(all, DEVICES);
	for (int i = 0; i < n; i++)
		if (!strcmp(all[i].name, name)) {
			*d = all[i];
			return true;
		}
	return false;
}

// Calls of each name, so far.
static struct {
	char call[96];
	long n;
} counts[256];

static long count(const char *name, const char *device)
{
	char call[96];
	snprintf(call, sizeof call, "%s %s", name, device);
	static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
	long n = 0;
	pthread_mutex_lock(&mutex);
	for (unsigned i = 0; i < sizeof counts / sizeof *counts; i++) {
		if (!counts[i].call[0])
			snprintf(counts[i].call, sizeof counts[i].call, "%s", call);
		if (!strcmp(counts[i].call, call)) {
			n = ++counts[i].n;
			break;
		}
	}
	pthread_mutex_unlock(&mutex);
	return n;
}

static struct rule scripted(const char *call, const char *device, size_t bytes, long n, long of_device)
{
	struct rule rule = {0};
	FILE *f = reading("script");
	if (!f)
		return rule;
	char line[256];
	while (fgets(line, sizeof line, f)) {
		char *rest = line, *word = strsep(&rest, " \n");
		if (strcmp(word, call))
			continue;
		struct rule r = {0};
		bool applies = true;
		long only = 0, first = 0, counted = n;
		while ((word = strsep(&rest, " \n"))) {
			char *value = strchr(word, '=');
			if (!value)
				continue;
			*value++ = 0;
			long v = atol(value);
			if (!strcmp(word, "device"))
				applies &= device && !strcmp(value, device);
			else if (!strcmp(word, "call"))
				only = v;
			else if (!strcmp(word, "from"))
				first = v;
			else if (!strcmp(word, "each"))
				counted = of_device;
			else if (!strcmp(word, "bytes"))
				applies &= bytes >= (size_t)v;
			else if (!strcmp(word, "errno"))
				r.error = (int)v;
			else if (!strcmp(word, "status"))
				r.status = (int)v;
			else if (!strcmp(word, "corrupt"))
				r.corrupt = v;
			else if (!strcmp(word, "hold"))
				r.hold = v;
			else if (!strcmp(word, "delay"))
				r.delay_ms = (unsigned)v;
		}
		if (applies && (!only || counted == only) && counted >= first)
			rule = r;
	}
	fclose(f);
	return rule;
}

struct rule host_script(const char *call, const char *device)
{
	return host_script_of(call, device, 0);
}

struct rule host_script_of(const char *call, const char *device, size_t bytes)
{
	if (host_directory() < 0 || logging < 0)
		return (struct rule){0};
	long n = count(call, ""), of_device = device ? count(call, device) : n;
	struct rule rule = scripted(call, device, bytes, n, of_device);
	if (rule.hold)
		host_log("held call=%s device=%s", call, device ? device : "none");
	while (rule.hold) {
		usleep(10 * 1000);
		rule = scripted(call, device, bytes, n, of_device);
	}
	if (rule.delay_ms)
		usleep(rule.delay_ms * 1000);
	return rule;
}

bool host_scripted(void)
{
	struct stat st;
	return logging >= 0 && fstatat(directory, "script", &st, 0) == 0 && st.st_size > 1;
}

static void (*on_change)(void);
static int watched = -1, enough = -1;
static pthread_t watcher;

static void *watch(void *none)
{
	struct pollfd ready[] = {{.fd = watched, .events = POLLIN}, {.fd = enough, .events = POLLIN}};
	char buffer[4096] __attribute__((aligned(8)));
	while (poll(ready, 2, -1) > 0 || errno == EINTR) {
		if (ready[1].revents)
			break;
		if (ready[0].revents && read(watched, buffer, sizeof buffer) > 0)
			on_change();
	}
	return none;
}

int host_watch(void (*changed)(void))
{
	char path[64];
	snprintf(path, sizeof path, "/proc/self/fd/%d", host_directory());
	on_change = changed;
	watched = inotify_init1(IN_CLOEXEC);
	enough = eventfd(0, EFD_CLOEXEC);
	// It is replaced by renaming.
	int error = watched < 0 || enough < 0 || inotify_add_watch(watched, path, IN_MOVED_TO) < 0 ? errno : 0;
	if (!error)
		error = pthread_create(&watcher, NULL, watch, NULL);
	if (error) {
		close(watched);
		close(enough);
		watched = enough = -1;
	}
	return error;
}

void host_unwatch(void)
{
	if (watched < 0 || eventfd_write(enough, 1) != 0)
		return;
	pthread_join(watcher, NULL);
	close(watched);
	close(enough);
	watched = enough = -1;
}
