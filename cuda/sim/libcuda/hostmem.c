// Memory that belongs to a context: cuMemAlloc, cuMemHost*.
#include "sim.h"

// add enters a range of memory that the current context owns. It takes over
// the reference to the memory.
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

// remove ends the range that begins at p, if it is of that kind.
static bool drop(uintptr_t p, int kind)
{
	pthread_mutex_lock(&ranges_mutex);
	struct range *r = range_find(p);
	bool found = r && r->base == p && (int)r->kind == kind;
	if (found) {
		size_t size = r->size;
		range_remove(r);
		if (kind == ALLOCATED)
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
	r = cuCtxSynchronize(); // work that uses it completes, as on the driver
	if (r != CUDA_SUCCESS)
		return r;
	return drop(p, ALLOCATED) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void memory_forget(struct context *c)
{
	for (uintptr_t p = 0;;) {
		pthread_mutex_lock(&ranges_mutex);
		struct range *r = range_next(p);
		while (r && (r->kind != ALLOCATED || r->owner != c))
			r = range_next(r->base + r->size);
		p = r ? r->base : 0;
		pthread_mutex_unlock(&ranges_mutex);
		if (!r)
			return;
		drop(p, ALLOCATED);
	}
}

CUresult cuMemHostAlloc(void **p, size_t n, unsigned flags)
{
	(void)flags; // portable and mapped, as everything is under unified addressing
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
