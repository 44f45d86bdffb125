// GPU memory. The engine, a process of its own (package engine), copies GPU memory by the GPUs: where
// the host's directory has the engine's socket, this library registers GPU memory with the engine, by
// CUDA's export of the allocation, and maps none of it.
#include "softdevice.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { REGISTER_GPU = 1, REGISTER_HOST, FORGET, MOVE, SHARE, CONNECT, DISCONNECT };

// order and answer are package engine's, little-endian as all machines with these GPUs.
struct order {
	uint32_t kind, access;
	uint64_t id;
	uint32_t from, to;
	uint64_t source, target, bytes, size;
	uint64_t domain;
};
_Static_assert(sizeof(struct order) == 64, "as package engine has it");

struct answer {
	uint64_t id;
	uint32_t error, none;
};
_Static_assert(sizeof(struct answer) == 16, "as package engine has it");

// move is an order whose answer has not come, or has not been taken.
struct move {
	uint64_t id;
	int error;
	bool over, abandoned;
	pthread_cond_t ended;
	struct move *next;
};

static pthread_mutex_t orders = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
static struct move *unanswered;
static int connection = -1;
static bool ending; // of the connection: there is no other one before its end
static uint64_t last;

enum { SCRATCH = 1 << 20 };
static pthread_mutex_t scratching = PTHREAD_MUTEX_INITIALIZER;
static char *scratch;
static uint32_t scratch_key;
static bool shares;

// lost ends the devices of this process with their engine, as the death of a NIC does. The next
// registration connects to another engine.
static void lost(int fd)
{
	rings_end();
	pthread_mutex_lock(&lock);
	device_lost();
	pthread_mutex_unlock(&lock);
	pthread_mutex_lock(&scratching);
	scratch_key = 0;
	shares = false;
	pthread_mutex_unlock(&scratching);
	close(fd);
	pthread_mutex_lock(&orders);
	ending = false;
	pthread_mutex_unlock(&orders);
}

static void *answers(void *socket)
{
	int fd = (int)(intptr_t)socket;
	struct answer a;
	for (uint64_t spin = 0;;) {
		ssize_t n = recv(fd, &a, sizeof a, spin ? MSG_DONTWAIT : 0);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && spin && errno == EAGAIN) {
			if (host_now() >= spin)
				spin = 0;
			continue;
		}
		spin = host_spin();
		pthread_mutex_lock(&orders);
		if (n != sizeof a) {
			connection = -1;
			ending = true;
		}
		for (struct move **at = &unanswered; *at;) {
			struct move *w = *at;
			if (n == sizeof a && w->id != a.id) {
				at = &w->next;
				continue;
			}
			*at = w->next;
			w->error = n == sizeof a ? (int)a.error : EIO;
			w->over = true;
			if (w->abandoned)
				free(w);
			else
				pthread_cond_signal(&w->ended);
		}
		pthread_mutex_unlock(&orders);
		if (n != sizeof a) {
			lost(fd);
			return NULL;
		}
	}
}

// start sends an order with descriptors; NULL for want of memory.
static struct move *start(struct order o, const int *fds, unsigned count)
{
	struct move *w = calloc(1, sizeof *w);
	if (!w)
		return NULL;
	pthread_cond_init(&w->ended, NULL);
	pthread_mutex_lock(&orders);
	o.id = w->id = ++last;
	w->next = unanswered;
	unanswered = w;
	char control[CMSG_SPACE(4 * sizeof *fds)] __attribute__((aligned(8))) = {0};
	struct iovec v = {&o, sizeof o};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
	if (count > 0) {
		m.msg_control = control;
		m.msg_controllen = CMSG_SPACE(count * sizeof *fds);
		struct cmsghdr *c = CMSG_FIRSTHDR(&m);
		*c = (struct cmsghdr){.cmsg_len = CMSG_LEN(count * sizeof *fds), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
		memcpy(CMSG_DATA(c), fds, count * sizeof *fds);
	}
	ssize_t n;
	do
		n = connection >= 0 ? sendmsg(connection, &m, MSG_NOSIGNAL) : -1;
	while (n < 0 && connection >= 0 && errno == EINTR);
	if (n < 0 && !w->over) {
		for (struct move **at = &unanswered; *at; at = &(*at)->next)
			if (*at == w) {
				*at = w->next;
				break;
			}
		w->error = EIO;
		w->over = true;
	}
	pthread_mutex_unlock(&orders);
	return w;
}

int engine_end(struct move *w)
{
	for (uint64_t spin = host_spin(); spin && !__atomic_load_n(&w->over, __ATOMIC_ACQUIRE) && host_now() < spin;)
		;
	pthread_mutex_lock(&orders);
	while (!w->over)
		pthread_cond_wait(&w->ended, &orders);
	pthread_mutex_unlock(&orders);
	int error = w->error;
	free(w);
	return error;
}

void engine_abandon(struct move *w)
{
	pthread_mutex_lock(&orders);
	bool over = w->over;
	w->abandoned = true;
	pthread_mutex_unlock(&orders);
	if (over)
		free(w);
}

// place sends an order and waits for its answer, which is an errno.
static int place(struct order o, int fd)
{
	struct move *w = start(o, &fd, fd >= 0);
	return w ? engine_end(w) : ENOMEM;
}

// share gives the engine the rings. Without them the threads of pairs do all requests.
static void share(void)
{
	int fds[] = {-1, -1, -1, -1};
	int error = rings_begin(fds);
	bool begun = !error;
	if (begun) {
		struct move *w = start((struct order){.kind = SHARE, .size = RINGS_BYTES}, fds, 4);
		error = w ? engine_end(w) : ENOMEM;
		if (error)
			rings_end();
	}
	shares = !error;
	host_log("engine_share = %d", error);
	for (int i = 0; i < 4; i++)
		if (fds[i] >= 0 && (!begun || i == 0 || i == 3)) // the eventfds are in use
			close(fds[i]);
}

// begin connects to the engine and registers the memory by which bytes of GPUs pass through this
// process.
static int begin(void)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	snprintf(a.sun_path, sizeof a.sun_path, "/proc/self/fd/%d/engine", host_directory());
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), shared = -1, error = 0;
	pthread_t reader;
	if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof a) != 0 || (shared = memfd_create("softdevice", MFD_CLOEXEC | MFD_ALLOW_SEALING)) < 0 ||
	    ftruncate(shared, SCRATCH) != 0 || fcntl(shared, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
		error = errno;
	void *p = error ? MAP_FAILED : mmap(NULL, SCRATCH, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
	if (!error && p == MAP_FAILED)
		error = errno;
	if (!error) {
		connection = fd;
		error = pthread_create(&reader, NULL, answers, (void *)(intptr_t)fd);
	}
	if (!error) {
		pthread_detach(reader);
		uint32_t key = host_number() << 8;
		error = place((struct order){.kind = REGISTER_HOST, .access = IBV_ACCESS_LOCAL_WRITE, .from = key, .bytes = SCRATCH, .size = SCRATCH}, shared);
		scratch = p;
		scratch_key = error ? 0 : key;
		if (!error && !shares)
			share();
	} else {
		connection = -1;
		if (fd >= 0)
			close(fd);
	}
	if (shared >= 0)
		close(shared);
	host_log("engine = %d", error);
	return error;
}

static bool there(void)
{
	struct sockaddr_un a;
	snprintf(a.sun_path, sizeof a.sun_path, "/proc/self/fd/%d/engine", host_directory());
	return access(a.sun_path, F_OK) == 0;
}

// connected connects once; after a failure the next registration tries again.
static bool connected(void)
{
	pthread_mutex_lock(&scratching);
	pthread_mutex_lock(&orders);
	bool may = !ending;
	pthread_mutex_unlock(&orders);
	bool is = may && (scratch_key || (there() && begin() == 0));
	pthread_mutex_unlock(&scratching);
	return is;
}

// allocation exports the allocation of the driver that has n bytes at p: its descriptor, -1 for
// none, its size, and the place of p in it.
static int allocation(uintptr_t p, size_t n, uint64_t *at, uint64_t *size)
{
	const char *path = getenv("PEERLANE_CUDA_LIBRARY");
	void *driver = dlopen(path ? path : "libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	if (!driver)
		return -1;
	int (*range)(unsigned long long *, size_t *, unsigned long long);
	int (*retain)(unsigned long long *, void *);
	int (*export)(void *, unsigned long long, int, unsigned long long);
	int (*release)(unsigned long long);
	*(void **)&range = dlsym(driver, "cuMemGetAddressRange_v2");
	*(void **)&retain = dlsym(driver, "cuMemRetainAllocationHandle");
	*(void **)&export = dlsym(driver, "cuMemExportToShareableHandle");
	*(void **)&release = dlsym(driver, "cuMemRelease");
	unsigned long long base = 0, handle = 0;
	size_t bytes = 0;
	int fd = -1;
	if (range && retain && export && release && range(&base, &bytes, p) == 0 && p - base <= bytes && n <= bytes - (p - base) &&
	    retain(&handle, (void *)p) == 0) {
		if (export(&fd, handle, 1, 0) != 0)
			fd = -1;
		release(handle);
	}
	dlclose(driver);
	*at = p - base;
	*size = bytes;
	return fd;
}

int engine_connect(struct pair *p)
{
	const struct description *d = &p->context->device->described;
	if (d->fault != FAULT_NONE || d->holds || d->transport == IBV_TRANSPORT_IWARP || !connected())
		return ENOENT;
	pthread_mutex_lock(&lock);
	int slot = rings_reserve(p);
	pthread_mutex_unlock(&lock);
	if (slot < 0)
		return ENOSPC;
	int error = place((struct order){
		.kind = CONNECT,
		.access = (uint32_t)p->attributes.qp_access_flags,
		.from = p->ibv.qp_num,
		.to = p->attributes.dest_qp_num,
		.source = (uint64_t)slot,
		.target = (uint64_t)d->node,
		.bytes = d->rate,
		.size = d->seed,
		.domain = (uintptr_t)p->ibv.pd,
	}, -1);
	pthread_mutex_lock(&lock);
	if (error)
		rings_release(p, slot);
	else
		rings_use(p, slot);
	pthread_mutex_unlock(&lock);
	return error;
}

void engine_disconnect(struct pair *p)
{
	pthread_mutex_lock(&lock);
	int slot = p->slot;
	pthread_mutex_unlock(&lock);
	if (slot < 0)
		return;
	place((struct order){.kind = DISCONNECT, .from = p->ibv.qp_num}, -1);
	pthread_mutex_lock(&lock);
	if (p->slot >= 0)
		rings_release(p, slot);
	p->slot = -1;
	pthread_mutex_unlock(&lock);
}

int engine_register(struct ibv_pd *pd, uint32_t key, uintptr_t p, size_t n, unsigned access)
{
	uint64_t at, size;
	if (!connected())
		return ENOENT;
	int fd = allocation(p, n, &at, &size);
	if (fd < 0)
		return ENOENT;
	fcntl(fd, F_SETFD, FD_CLOEXEC);
	int error = place((struct order){.kind = REGISTER_GPU, .access = access, .from = key, .source = p, .target = at, .bytes = n, .size = size, .domain = (uintptr_t)pd}, fd);
	close(fd);
	return error;
}

void engine_forget(uint32_t key)
{
	place((struct order){.kind = FORGET, .from = key}, -1);
}

struct move *engine_start(uint32_t from, uint64_t source, uint32_t to, uint64_t target, uint64_t n)
{
	return start((struct order){.kind = MOVE, .from = from, .source = source, .to = to, .target = target, .bytes = n}, NULL, 0);
}

static int move(uint32_t from, uint64_t source, uint32_t to, uint64_t target, uint64_t n)
{
	return place((struct order){.kind = MOVE, .from = from, .source = source, .to = to, .target = target, .bytes = n}, -1);
}

bool engine_read(uint32_t key, uint64_t address, uint64_t n, char *into)
{
	int error = 0;
	pthread_mutex_lock(&scratching);
	for (uint64_t part; n && !error; n -= part, address += part, into += part) {
		part = n < SCRATCH ? n : SCRATCH;
		error = move(key, address, scratch_key, 0, part);
		memcpy(into, scratch, part);
	}
	pthread_mutex_unlock(&scratching);
	return !error;
}

bool engine_write(uint32_t key, uint64_t address, uint64_t n, const char *data)
{
	int error = 0;
	pthread_mutex_lock(&scratching);
	for (uint64_t part; n && !error; n -= part, address += part, data += part) {
		part = n < SCRATCH ? n : SCRATCH;
		memcpy(scratch, data, part);
		error = move(scratch_key, 0, key, address, part);
	}
	pthread_mutex_unlock(&scratching);
	return !error;
}
