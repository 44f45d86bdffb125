#include "sim.h"

#include <stdlib.h>

// The stack of contexts is per operating system thread, as in CUDA.
#define DEPTH 64
static __thread struct context *stack[DEPTH]; // each with a reference
static __thread int depth;

static void destroy(struct object *o)
{
	struct context *c = (struct context *)o;
	pthread_mutex_destroy(&c->mutex);
	free(c);
}

CUresult context_state(struct context *c)
{
	if (atomic_load(&c->destroyed))
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	return (CUresult)atomic_load(&c->sticky);
}

CUresult context_current(struct context **c)
{
	if (depth == 0)
		return CUDA_ERROR_INVALID_CONTEXT;
	*c = stack[depth - 1];
	return context_state(*c);
}

void context_fail(CUresult r)
{
	int none = 0;
	if (depth > 0)
		atomic_compare_exchange_strong(&stack[depth - 1]->sticky, &none, (int)r);
}

CUresult cuCtxCreate_v2(CUcontext *ctx, unsigned flags, CUdevice dev)
{
	(void)flags; // the method by which a thread waits
	CUresult r = enter("cuCtxCreate", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	struct device *d = host_device(dev);
	if (!d)
		return CUDA_ERROR_INVALID_DEVICE;
	if (!ctx || depth == DEPTH)
		return CUDA_ERROR_INVALID_VALUE;
	struct context *c = calloc(1, sizeof *c);
	if (!c)
		return CUDA_ERROR_OUT_OF_MEMORY;
	object_init(&c->object, destroy);
	pthread_mutex_init(&c->mutex, NULL);
	c->device = d;
	c->handle = handle_new(CONTEXT, retain(c));
	if (!c->handle) {
		release(c);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	stack[depth++] = c;
	atomic_fetch_add(&d->log->contexts, 1);
	*ctx = c->handle;
	return CUDA_SUCCESS;
}

CUresult cuCtxDestroy_v2(CUcontext ctx)
{
	CUresult r = enter("cuCtxDestroy", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	struct context *c = handle_take(CONTEXT, ctx);
	if (!c)
		return CUDA_ERROR_INVALID_CONTEXT;
	atomic_store(&c->destroyed, true);
	pthread_mutex_lock(&c->mutex);
	struct stream *s = c->streams;
	c->streams = c->legacy = NULL;
	pthread_mutex_unlock(&c->mutex);
	while (s) {
		struct stream *next = s->next;
		capture_leave(s);
		release(handle_take(STREAM, s->handle));
		stream_abandon(s);
		release(s);
		s = next;
	}
	memory_forget(c);
	if (depth > 0 && stack[depth - 1] == c)
		release(stack[--depth]);
	release(c);
	return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext ctx)
{
	CUresult r = enter("cuCtxSetCurrent", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	struct context *c = NULL;
	if (ctx && !(c = handle_get(CONTEXT, ctx)))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (depth > 0)
		release(stack[--depth]);
	if (c)
		stack[depth++] = c;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *ctx)
{
	CUresult r = enter("cuCtxGetCurrent", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	if (!ctx)
		return CUDA_ERROR_INVALID_VALUE;
	*ctx = depth > 0 ? stack[depth - 1]->handle : 0;
	return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void)
{
	CUresult r = enter("cuCtxSynchronize", NULL);
	struct context *c;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	// The list can change during the wait for a stream: first record the last operation
	// of each stream.
	pthread_mutex_lock(&c->mutex);
	size_t n = 0;
	for (struct stream *s = c->streams; s; s = s->next)
		n++;
	struct point { struct stream *stream; uint64_t number; } *points = calloc(n ? n : 1, sizeof *points);
	if (!points)
		n = 0, r = CUDA_ERROR_OUT_OF_MEMORY;
	struct stream *s = c->streams;
	for (size_t i = 0; i < n; i++, s = s->next) {
		points[i].stream = retain(s);
		points[i].number = stream_last(s);
	}
	pthread_mutex_unlock(&c->mutex);
	for (size_t i = 0; i < n; i++)
		stream_demand(points[i].stream, points[i].number);
	for (size_t i = 0; i < n; i++) {
		CUresult one = stream_wait(points[i].stream, points[i].number);
		if (r == CUDA_SUCCESS)
			r = one;
		release(points[i].stream);
	}
	free(points);
	return r;
}

CUresult cuCtxSetLimit(int limit, size_t value)
{
	(void)value; // of kernels, which have no stack in the simulator
	CUresult r = enter("cuCtxSetLimit", NULL);
	struct context *c;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	return limit >= 0 && limit < CU_LIMIT_MAX ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
	CUresult r = enter("cuCtxEnablePeerAccess", NULL);
	struct context *c;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	struct context *p = handle_get(CONTEXT, peer);
	if (!p || p == c)
		r = CUDA_ERROR_INVALID_CONTEXT;
	else if (flags)
		r = CUDA_ERROR_INVALID_VALUE;
	else {
		uint64_t bit = 1ull << host_place(p->device);
		if (atomic_fetch_or(&c->peers, bit) & bit)
			r = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
	}
	release(p);
	return r;
}

// Free memory is the device's memory less this process's allocations: the simulator does
// not know the allocations of other processes.
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
	CUresult r = enter("cuMemGetInfo", NULL);
	struct context *c;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	if (!free_bytes || !total)
		return CUDA_ERROR_INVALID_VALUE;
	*total = c->device->memory;
	*free_bytes = c->device->memory - atomic_load(&c->device->used);
	return CUDA_SUCCESS;
}
