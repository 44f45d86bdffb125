// Memory of a context: cuMemAlloc, cuMemHost*, cuIpc*MemHandle.
#define _GNU_SOURCE
#include "sim.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

// add adds a range of memory that the current context owns. add takes over the reference
// to the memory.
static CUresult add(struct memory *m, uintptr_t base, size_t size, int kind, struct context *c)
{
	pthread_mutex_lock(&ranges_mutex);
	struct range *r = range_add(base, size);
	if (r) {
		r->kind = kind;
		r->memory = m;
		r->owner = retain(c);
	}
	pthread_mutex_unlock(&ranges_mutex);
	if (r)
		return CUDA_SUCCESS;
	release(m);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

// drop ends the range that begins at p, if the range has that kind.
static bool drop(uintptr_t p, int kind)
{
	pthread_mutex_lock(&ranges_mutex);
	struct range *r = range_find(p);
	bool found = r && r->base == p && (int)r->kind == kind;
	if (found) {
		size_t size = r->size;
		range_remove(r);
		if (kind == ALLOCATED || kind == OPENED)
			unreserve(p, (size + GRANULARITY - 1) & ~(GRANULARITY - 1));
	}
	pthread_mutex_unlock(&ranges_mutex);
	return found;
}

static CUresult begin(const char *call, struct context **c)
{
	CUresult r = enter(call, NULL);
	return r == CUDA_SUCCESS ? context_current(c) : r;
}

CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n)
{
	struct context *c;
	struct memory *m;
	CUresult r = begin("cuMemAlloc", &c);
	if (r != CUDA_SUCCESS)
		return r;
	if (!p || !n || n > SIZE_MAX - GRANULARITY)
		return CUDA_ERROR_INVALID_VALUE;
	size_t whole = (n + GRANULARITY - 1) & ~(GRANULARITY - 1);
	r = memory_create(c->device, whole, false, true, &m);
	if (r != CUDA_SUCCESS)
		return r;
	pthread_mutex_lock(&ranges_mutex);
	uintptr_t base = reserve(whole, 0);
	pthread_mutex_unlock(&ranges_mutex);
	if (!base) {
		release(m);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*p = base;
	return add(m, base, n, ALLOCATED, c);
}

CUresult cuMemFree_v2(CUdeviceptr p)
{
	struct context *c;
	CUresult r = begin("cuMemFree", &c);
	if (r != CUDA_SUCCESS)
		return r;
	r = cuCtxSynchronize(); // pending work on the memory completes, as with the driver
	if (r != CUDA_SUCCESS)
		return r;
	return drop(p, ALLOCATED) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void memory_forget(struct context *c)
{
	for (uintptr_t p = 0;;) {
		pthread_mutex_lock(&ranges_mutex);
		struct range *r = range_next(p);
		while (r && ((r->kind != ALLOCATED && r->kind != OPENED) || r->owner != c))
			r = range_next(r->base + r->size);
		p = r ? r->base : 0;
		int kind = r ? (int)r->kind : 0;
		pthread_mutex_unlock(&ranges_mutex);
		if (!r)
			return;
		drop(p, kind);
	}
}

// An IPC handle of memory names a process and its open file; the kernel decides whether
// another process may open the file. As with the driver, a handle is no secret.
struct mem_handle {
	char magic[8];
	int32_t pid, fd;
	uint64_t nonce;
};
_Static_assert(sizeof(struct mem_handle) <= sizeof(CUipcMemHandle), "a handle holds 64 bytes");

static const char handle_magic[8] = "PLSIMIPC";

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr p)
{
	CUresult r = enter("cuIpcGetMemHandle", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	pthread_mutex_lock(&ranges_mutex);
	struct range *range = range_find(p);
	struct memory *m = range && range->kind == ALLOCATED ? retain(range->memory) : NULL;
	r = m && out ? memory_name(m, range->size) : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&ranges_mutex);
	if (r == CUDA_SUCCESS) {
		struct mem_handle h = {.pid = getpid(), .fd = m->fd, .nonce = m->nonce};
		memcpy(h.magic, handle_magic, sizeof h.magic);
		memset(out, 0, sizeof *out);
		memcpy(out, &h, sizeof h);
	}
	release(m);
	return r;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *p, CUipcMemHandle handle, unsigned flags)
{
	struct context *c;
	struct mem_handle h;
	CUresult r = begin("cuIpcOpenMemHandle", &c);
	if (r != CUDA_SUCCESS)
		return r;
	memcpy(&h, &handle, sizeof h);
	if (!p || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || memcmp(h.magic, handle_magic, sizeof h.magic) != 0)
		return CUDA_ERROR_INVALID_VALUE;
	if (h.pid == getpid())
		return CUDA_ERROR_INVALID_CONTEXT; // a process cannot open its own memory
	pthread_mutex_lock(&ranges_mutex);
	for (struct range *known = range_next(0); known; known = range_next(known->base + known->size)) {
		if (known->kind == OPENED && known->owner == c && known->memory->nonce == h.nonce) {
			known->opens++;
			*p = known->base;
			pthread_mutex_unlock(&ranges_mutex);
			return CUDA_SUCCESS;
		}
	}
	pthread_mutex_unlock(&ranges_mutex);
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
	struct memory *m;
	size_t size;
	int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (fd < 0)
		return CUDA_ERROR_MAP_FAILED;
	r = memory_import_named(fd, h.nonce, &m, &size);
	close(fd);
	if (r != CUDA_SUCCESS)
		return r == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_MAP_FAILED : r;
	pthread_mutex_lock(&ranges_mutex);
	uintptr_t base = reserve(m->size, 0);
	pthread_mutex_unlock(&ranges_mutex);
	if (!base) {
		release(m);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*p = base;
	r = add(m, base, size, OPENED, c);
	if (r == CUDA_SUCCESS) {
		pthread_mutex_lock(&ranges_mutex);
		range_find(base)->opens = 1;
		pthread_mutex_unlock(&ranges_mutex);
	}
	return r;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr p)
{
	struct context *c;
	CUresult r = begin("cuIpcCloseMemHandle", &c);
	if (r != CUDA_SUCCESS)
		return r;
	pthread_mutex_lock(&ranges_mutex);
	struct range *range = range_find(p);
	bool found = range && range->base == p && range->kind == OPENED, more = found && --range->opens > 0;
	pthread_mutex_unlock(&ranges_mutex);
	if (found && !more)
		drop(p, OPENED);
	return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// dirty is the number of nonzero bytes in newly allocated host memory: the driver
// promises no content.
static const size_t dirty = 1 << 20;

CUresult cuMemHostAlloc(void **p, size_t n, unsigned flags)
{
	(void)flags; // portable and mapped: under unified addressing all memory is
	struct context *c;
	CUresult r = begin("cuMemHostAlloc", &c);
	if (r != CUDA_SUCCESS)
		return r;
	if (!p || !n)
		return CUDA_ERROR_INVALID_VALUE;
	struct memory *m = memory_host(n);
	if (!m)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*p = m->data;
	memset(m->data, 0xff, n < dirty ? n : dirty);
	return add(m, (uintptr_t)m->data, n, HOST_ALLOCATED, c);
}

CUresult cuMemFreeHost(void *p)
{
	struct context *c;
	CUresult r = begin("cuMemFreeHost", &c);
	if (r != CUDA_SUCCESS)
		return r;
	return drop((uintptr_t)p, HOST_ALLOCATED) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned flags)
{
	(void)flags;
	struct context *c;
	CUresult r = begin("cuMemHostRegister", &c);
	if (r != CUDA_SUCCESS)
		return r;
	if (!p || !n || (uintptr_t)p + n < (uintptr_t)p)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&ranges_mutex);
	struct range *known = range_next((uintptr_t)p);
	bool taken = known && known->base < (uintptr_t)p + n;
	pthread_mutex_unlock(&ranges_mutex);
	if (taken)
		return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	struct memory *m = memory_borrow(p, n);
	if (!m)
		return CUDA_ERROR_INVALID_VALUE;
	return add(m, (uintptr_t)p, n, HOST_REGISTERED, c);
}

CUresult cuMemHostUnregister(void *p)
{
	struct context *c;
	CUresult r = begin("cuMemHostUnregister", &c);
	if (r != CUDA_SUCCESS)
		return r;
	return drop((uintptr_t)p, HOST_REGISTERED) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *d, void *p, unsigned flags)
{
	struct context *c;
	CUresult r = begin("cuMemHostGetDevicePointer", &c);
	if (r != CUDA_SUCCESS)
		return r;
	pthread_mutex_lock(&ranges_mutex);
	struct range *range = range_find((uintptr_t)p);
	bool found = range && !range->memory->device;
	pthread_mutex_unlock(&ranges_mutex);
	if (!d || flags || !found)
		return CUDA_ERROR_INVALID_VALUE;
	*d = (uintptr_t)p;
	return CUDA_SUCCESS;
}
