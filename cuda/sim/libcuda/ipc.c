// The state of an interprocess event: a file in /dev/shm with mode 0600, named by user
// and process, as the driver creates one. Another process can open the file only if it
// shares the directory and the user.
//
// A killed process leaves its files, as with the driver. The next process of the user
// that creates an interprocess event removes these files. A live process holds a lock on
// each file, which the kernel releases at the end of the process.
#define _GNU_SOURCE
#include "sim.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define DIRECTORY "/dev/shm"
#define SIZE 4096

struct state {
	uint64_t nonce; // of the event's handle
	_Atomic uint64_t recorded, completed;
};

struct handle {
	char name[40];
	uint64_t nonce, process;
};
_Static_assert(sizeof(struct handle) <= sizeof(CUipcEventHandle), "a handle holds 64 bytes");

struct ipc {
	struct object object;
	struct state *state;
	struct handle handle;
	int fd; // locked by the owner; -1 for an opened file
};

static uint64_t process; // a random name of this process
static unsigned serial;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void destroy(struct object *o)
{
	struct ipc *i = (struct ipc *)o;
	if (i->state)
		munmap(i->state, SIZE);
	ipc_remove(i);
	free(i);
}

// ipc_remove removes the file if this process created it. Processes that have the event
// open keep the file.
void ipc_remove(struct ipc *i)
{
	if (i->fd < 0)
		return;
	char path[64];
	snprintf(path, sizeof path, DIRECTORY "/%s", i->handle.name);
	unlink(path);
	close(i->fd);
	i->fd = -1;
}

// sweep removes the files of dead processes of this user.
static void sweep(void)
{
	char prefix[32];
	snprintf(prefix, sizeof prefix, "cuda.sim.%u.", geteuid());
	DIR *d = opendir(DIRECTORY);
	struct dirent *entry;
	while (d && (entry = readdir(d))) {
		if (strncmp(entry->d_name, prefix, strlen(prefix)) != 0)
			continue;
		int fd = openat(dirfd(d), entry->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
		if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0)
			unlinkat(dirfd(d), entry->d_name, 0);
		if (fd >= 0)
			close(fd);
	}
	if (d)
		closedir(d);
}

// make creates and locks the file. Between the two steps, sweep of another process can
// remove the file; make then tries again.
static bool make(struct ipc *i)
{
	for (int attempt = 0; attempt < 1000; attempt++) {
		char path[64];
		snprintf(i->handle.name, sizeof i->handle.name, "cuda.sim.%u.%d.%u", geteuid(), getpid(), serial++);
		snprintf(path, sizeof path, DIRECTORY "/%s", i->handle.name);
		i->fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
		if (i->fd < 0 && errno != EEXIST)
			return false;
		struct stat st;
		if (i->fd >= 0 && flock(i->fd, LOCK_EX | LOCK_NB) == 0 && fstat(i->fd, &st) == 0 && st.st_nlink == 1)
			return ftruncate(i->fd, SIZE) == 0;
		if (i->fd >= 0)
			close(i->fd);
		i->fd = -1;
	}
	return false;
}

CUresult ipc_create(struct ipc **out)
{
	struct ipc *i = calloc(1, sizeof *i);
	if (!i)
		return CUDA_ERROR_OUT_OF_MEMORY;
	object_init(&i->object, destroy);
	i->fd = -1;
	pthread_mutex_lock(&mutex);
	bool named = process || getrandom(&process, sizeof process, 0) == sizeof process;
	if (serial == 0)
		sweep();
	bool made = named && getrandom(&i->handle.nonce, sizeof i->handle.nonce, 0) == sizeof i->handle.nonce && make(i);
	pthread_mutex_unlock(&mutex);
	if (made) {
		void *p = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, i->fd, 0);
		i->state = p == MAP_FAILED ? NULL : p;
	}
	if (!i->state) {
		complain("an interprocess event in " DIRECTORY ": %s", strerror(errno));
		release(i);
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	i->handle.process = process;
	i->state->nonce = i->handle.nonce;
	*out = i;
	return CUDA_SUCCESS;
}

void ipc_handle(const struct ipc *i, CUipcEventHandle *h)
{
	memset(h, 0, sizeof *h);
	memcpy(h, &i->handle, sizeof i->handle);
}

CUresult ipc_open(const CUipcEventHandle *h, struct ipc **out)
{
	struct handle handle;
	char path[64];
	struct stat st;
	memcpy(&handle, h, sizeof handle);
	handle.name[sizeof handle.name - 1] = 0;
	if (strncmp(handle.name, "cuda.sim.", 9) != 0 || strchr(handle.name, '/'))
		return CUDA_ERROR_INVALID_VALUE;
	if (handle.process == process)
		return CUDA_ERROR_INVALID_CONTEXT; // a process cannot open its own event
	snprintf(path, sizeof path, DIRECTORY "/%s", handle.name);
	int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	if (fd < 0)
		return CUDA_ERROR_MAP_FAILED;
	void *p = MAP_FAILED;
	if (fstat(fd, &st) == 0 && st.st_uid == geteuid() && st.st_size == SIZE)
		p = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (p == MAP_FAILED)
		return CUDA_ERROR_MAP_FAILED;
	struct ipc *i = calloc(1, sizeof *i);
	if (!i || ((struct state *)p)->nonce != handle.nonce) {
		munmap(p, SIZE);
		CUresult r = i ? CUDA_ERROR_MAP_FAILED : CUDA_ERROR_OUT_OF_MEMORY;
		free(i);
		return r;
	}
	object_init(&i->object, destroy);
	i->fd = -1;
	i->state = p;
	i->handle = handle;
	*out = i;
	return CUDA_SUCCESS;
}

uint64_t ipc_record(struct ipc *i) { return atomic_fetch_add(&i->state->recorded, 1) + 1; }
uint64_t ipc_latest(struct ipc *i) { return atomic_load(&i->state->recorded); }
bool ipc_done(struct ipc *i, uint64_t number) { return atomic_load(&i->state->completed) >= number; }

void ipc_complete(struct ipc *i, uint64_t number)
{
	uint64_t now = atomic_load(&i->state->completed);
	while (now < number && !atomic_compare_exchange_weak(&i->state->completed, &now, number))
		;
}

CUresult ipc_wait(struct ipc *i, uint64_t number, struct context *c)
{
	for (uint64_t since = now_ns(); !ipc_done(i, number) && context_state(c) == CUDA_SUCCESS;)
		patience(since);
	return context_state(c);
}
