// Operations of streams on memory: copies, and values that streams write and wait for.
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// present reports whether a page of host memory is mapped.
static bool present(uintptr_t p)
{
	unsigned char resident;
	return mincore((void *)(p & ~(uintptr_t)4095), 1, &resident) == 0;
}

// end is one end of a copy.
struct end {
	uintptr_t address;
	struct device *device; // the device whose access is checked
	enum rights need;
	struct piece *pieces;
	size_t count;
	bool pageable;
};

// find finds the memory of an end. CUDA knows nothing of pageable host memory: the call
// reads a pageable source before it returns, and waits for a copy to a pageable
// destination. A captured copy reads and writes pageable memory when the graph runs.
static CUresult find(struct end *e, size_t n, bool captured)
{
	CUresult r = locate(e->address, n, e->device, e->need, &e->pieces, &e->count);
	if (r != CUDA_SUCCESS || e->count)
		return r;
	if (!present(e->address) || !present(e->address + n - 1))
		return CUDA_ERROR_INVALID_VALUE;
	e->pageable = true;
	e->pieces = calloc(1, sizeof *e->pieces);
	if (!e->pieces)
		return CUDA_ERROR_OUT_OF_MEMORY;
	e->count = 1;
	e->pieces->size = n;
	if (e->need == READ_WRITE || captured) {
		e->pieces->data = (char *)e->address;
		return CUDA_SUCCESS;
	}
	e->pieces->memory = memory_host(n);
	if (!e->pieces->memory)
		return CUDA_ERROR_OUT_OF_MEMORY;
	e->pieces->data = e->pieces->memory->data;
	memcpy(e->pieces->data, (void *)e->address, n);
	return CUDA_SUCCESS;
}

// pair splits a copy at each boundary between two memories of an end.
static CUresult pair(struct operation *op, const struct end *to, const struct end *from, size_t n)
{
	op->segments = calloc(to->count + from->count, sizeof *op->segments);
	if (!op->segments)
		return CUDA_ERROR_OUT_OF_MEMORY;
	size_t t = 0, f = 0, t_at = 0, f_at = 0;
	while (n) {
		const struct piece *tp = &to->pieces[t], *fp = &from->pieces[f];
		size_t step = tp->size - t_at < fp->size - f_at ? tp->size - t_at : fp->size - f_at;
		op->segments[op->count++] =
			(struct segment){tp->data + t_at, fp->data + f_at, step, retain(tp->memory), retain(fp->memory)};
		n -= step;
		t_at += step;
		f_at += step;
		if (t_at == tp->size)
			t++, t_at = 0;
		if (f_at == fp->size)
			f++, f_at = 0;
	}
	return CUDA_SUCCESS;
}

#define LEAST_LINEAR ((size_t)32 << 10)

// by_copy_engine reports whether a copy uses a copy engine, which does not wait for
// kernels of other processes.
static bool by_copy_engine(const struct end *to, const struct end *from, size_t n, bool rectangle)
{
	struct memory *t = to->pieces->memory, *f = from->pieces->memory;
	struct device *into = t ? t->device : NULL, *out_of = f ? f->device : NULL;

	if (!into)
		return true;
	return out_of ? into != out_of : rectangle || n >= LEAST_LINEAR;
}

// copy_with enqueues a copy of a call that has entered, with the call's fault. Ends
// without a device are addressed by the stream's device.
static CUresult copy_with(struct fault fault, uintptr_t dst, struct device *dst_device, uintptr_t src,
			  struct device *src_device, size_t n, bool rectangle, CUstream h)
{
	struct stream *s;
	CUresult r = stream_get(h, &s);
	if (r != CUDA_SUCCESS)
		return r;
	struct device *own = s->context->device;
	struct end to = {.address = dst, .device = dst_device ? dst_device : own, .need = READ_WRITE};
	struct end from = {.address = src, .device = src_device ? src_device : own, .need = READ};
	struct operation *op = NULL;
	if (n) {
		bool captured = capturing(s);
		r = find(&to, n, captured);
		if (r == CUDA_SUCCESS)
			r = find(&from, n, captured);
		if (r == CUDA_SUCCESS && !captured)
			r = stream_engine(s, by_copy_engine(&to, &from, n, rectangle), &fault);
		if (r == CUDA_SUCCESS && !(op = operation_new(COPY, &fault)))
			r = CUDA_ERROR_OUT_OF_MEMORY;
		if (r == CUDA_SUCCESS && (r = pair(op, &to, &from, n)) != CUDA_SUCCESS)
			free(op);
		if (r == CUDA_SUCCESS) {
			uint64_t number;
			r = stream_submit(s, op, &number);
			if (r == CUDA_SUCCESS && to.pageable && number)
				r = stream_wait(s, number);
		}
	}
	pieces_free(to.pieces, to.count);
	pieces_free(from.pieces, from.count);
	release(s);
	return r;
}

static CUresult copy(const char *call, uintptr_t dst, struct device *dst_device, uintptr_t src, struct device *src_device,
		     size_t n, CUstream s)
{
	struct fault fault;
	CUresult r = enter(call, &fault);
	return r == CUDA_SUCCESS ? copy_with(fault, dst, dst_device, src, src_device, n, false, s) : r;
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s)
{
	return copy("cuMemcpyAsync", dst, NULL, src, NULL, n, s);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t n, CUstream s)
{
	return copy("cuMemcpyHtoDAsync", dst, NULL, (uintptr_t)src, NULL, n, s);
}

CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t n, CUstream s)
{
	return copy("cuMemcpyDtoHAsync", (uintptr_t)dst, NULL, src, NULL, n, s);
}

// Rectangles of host memory for a device; the simulator refuses other pairs. A corrupt
// copy has a wrong first byte: a later copy may overlap the other bytes of this
// rectangle, and correct them.
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream s)
{
	if (!c || c->WidthInBytes > c->srcPitch || c->WidthInBytes > c->dstPitch)
		return CUDA_ERROR_INVALID_VALUE;
	if (c->srcMemoryType != CU_MEMORYTYPE_HOST || c->dstMemoryType != CU_MEMORYTYPE_DEVICE)
		return CUDA_ERROR_NOT_SUPPORTED;
	struct fault fault;
	CUresult r = enter("cuMemcpy2DAsync", &fault);
	fault.first = true;
	for (size_t y = 0; y < c->Height && r == CUDA_SUCCESS; y++) {
		r = copy_with(fault, c->dstDevice + (c->dstY + y) * c->dstPitch + c->dstXInBytes, NULL,
			      (uintptr_t)c->srcHost + (c->srcY + y) * c->srcPitch + c->srcXInBytes, NULL, c->WidthInBytes,
			      c->Height > 1, s);
		fault = (struct fault){0};
	}
	return r;
}

// Copies with equal attributes, in the order of the list: a driver may choose this order.
CUresult cuMemcpyBatchAsync(CUdeviceptr *dst, CUdeviceptr *src, size_t *sizes, size_t n, CUmemcpyAttributes *attributes,
			    size_t *from, size_t count, size_t *failed, CUstream s)
{
	if (!dst || !src || !sizes || !n || !attributes || !from || count != 1 || from[0] != 0 || !failed || !s ||
	    attributes->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = CUDA_SUCCESS;
	for (size_t i = 0; i < n && r == CUDA_SUCCESS; i++)
		if ((r = copy("cuMemcpyBatchAsync", dst[i], NULL, src[i], NULL, sizes[i], s)) != CUDA_SUCCESS)
			*failed = i;
	return r;
}

CUresult cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dc, CUdeviceptr src, CUcontext sc, size_t n, CUstream s)
{
	struct context *to = handle_get(CONTEXT, dc), *from = handle_get(CONTEXT, sc);
	CUresult r = CUDA_ERROR_INVALID_CONTEXT;
	if (to && from)
		r = copy("cuMemcpyPeerAsync", dst, to->device, src, from->device, n, s);
	release(to);
	release(from);
	return r;
}

CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char v, size_t n, CUstream h)
{
	struct fault fault;
	CUresult r = enter("cuMemsetD8Async", &fault);
	struct stream *s;
	if (r != CUDA_SUCCESS || (r = stream_get(h, &s)) != CUDA_SUCCESS)
		return r;
	struct end to = {.address = p, .device = s->context->device, .need = READ_WRITE};
	struct operation *op = NULL;
	if (n)
		r = locate(p, n, to.device, to.need, &to.pieces, &to.count);
	if (n && r == CUDA_SUCCESS && !to.count)
		r = CUDA_ERROR_INVALID_VALUE;
	if (n && r == CUDA_SUCCESS && !capturing(s))
		r = stream_engine(s, false, &fault);
	if (n && r == CUDA_SUCCESS && !(op = operation_new(SET, &fault)))
		r = CUDA_ERROR_OUT_OF_MEMORY;
	if (op && (r = pair(op, &to, &to, n)) != CUDA_SUCCESS) {
		free(op);
	} else if (op) {
		uint64_t number;
		op->target = v;
		r = stream_submit(s, op, &number);
	}
	pieces_free(to.pieces, to.count);
	release(s);
	return r;
}

// value enqueues an operation on the 8 bytes at p.
static CUresult value(const char *call, enum work work, CUstream h, CUdeviceptr p, uint64_t v)
{
	struct fault fault;
	CUresult r = enter(call, &fault);
	struct stream *s;
	struct piece *pieces;
	size_t count;
	if (r != CUDA_SUCCESS || (r = stream_get(h, &s)) != CUDA_SUCCESS)
		return r;
	r = p % 8 ? CUDA_ERROR_INVALID_VALUE
		  : locate(p, 8, s->context->device, work == WRITE_VALUE ? READ_WRITE : READ, &pieces, &count);
	if (r != CUDA_SUCCESS) {
		release(s);
		return r;
	}
	if (work == WRITE_VALUE && !capturing(s) &&
	    (r = stream_engine(s, atomic_load(&s->copy_engine), &fault)) != CUDA_SUCCESS) {
		pieces_free(pieces, count);
		release(s);
		return r;
	}
	struct operation *op = count == 1 ? operation_new(work, &fault) : NULL;
	if (op) {
		op->value = (_Atomic uint64_t *)pieces->data;
		op->memory = retain(pieces->memory);
		op->target = v;
		uint64_t number;
		r = stream_submit(s, op, &number);
	} else {
		r = count == 1 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
	}
	pieces_free(pieces, count);
	release(s);
	return r;
}

CUresult cuStreamWriteValue64_v2(CUstream s, CUdeviceptr p, uint64_t v, unsigned flags)
{
	if (flags > 1) // 1: without a memory barrier; the flag permits the omission and does not demand it
		return CUDA_ERROR_INVALID_VALUE;
	return value("cuStreamWriteValue64", WRITE_VALUE, s, p, v);
}

// Only value operations; each is a separate operation of the stream.
CUresult cuStreamBatchMemOp_v2(CUstream s, unsigned n, CUstreamBatchMemOpParams *list, unsigned flags)
{
	CUresult r = CUDA_SUCCESS;
	if (!list || flags)
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned i = 0; i < n; i++)
		if (list[i].operation != CU_STREAM_MEM_OP_WRITE_VALUE_64 || list[i].flags)
			return CUDA_ERROR_INVALID_VALUE;
	for (unsigned i = 0; i < n && r == CUDA_SUCCESS; i++)
		r = value("cuStreamBatchMemOp", WRITE_VALUE, s, list[i].address, list[i].value64);
	return r;
}

CUresult cuStreamWaitValue64_v2(CUstream s, CUdeviceptr p, uint64_t v, unsigned flags)
{
	if (flags != CU_STREAM_WAIT_VALUE_GEQ && flags != CU_STREAM_WAIT_VALUE_AND)
		return CUDA_ERROR_NOT_SUPPORTED;
	return value("cuStreamWaitValue64", flags == CU_STREAM_WAIT_VALUE_AND ? WAIT_BITS : WAIT_VALUE, s, p, v);
}
