// Events. A record is an operation of its stream. A wait is for the latest record at the
// time of the call.
#include "sim.h"

#include <stdlib.h>

struct event {
	struct object object;
	struct context *context;
	pthread_mutex_t mutex;
	struct stream *stream; // of the latest record
	uint64_t number;       // number of the latest record, in stream or in ipc
	struct ipc *ipc;       // of an interprocess event
	bool opened;           // the event is of another process
	struct mark mark;      // place of the record in a capture
};

static void destroy(struct object *o)
{
	struct event *e = (struct event *)o;
	if (e->ipc)
		ipc_remove(e->ipc);
	release(e->mark.capture);
	release(e->stream);
	release(e->ipc);
	release(e->context);
	pthread_mutex_destroy(&e->mutex);
	free(e);
}

static CUresult new(struct context *c, struct ipc *ipc, bool opened, CUevent *out)
{
	struct event *e = calloc(1, sizeof *e);
	if (!e) {
		release(ipc);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	object_init(&e->object, destroy);
	pthread_mutex_init(&e->mutex, NULL);
	e->context = retain(c);
	e->ipc = ipc;
	e->opened = opened;
	*out = handle_new(EVENT, e);
	return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuEventCreate(CUevent *out, unsigned flags)
{
	CUresult r = enter("cuEventCreate", NULL);
	struct context *c;
	struct ipc *ipc = NULL;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	if (!out || flags & ~(unsigned)(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS))
		return CUDA_ERROR_INVALID_VALUE;
	if (flags & CU_EVENT_INTERPROCESS) {
		if (!(flags & CU_EVENT_DISABLE_TIMING))
			return CUDA_ERROR_INVALID_VALUE;
		if ((r = ipc_create(&ipc)) != CUDA_SUCCESS)
			return r;
	}
	return new(c, ipc, false, out);
}

// get begins a call on an event.
static CUresult get(const char *call, CUevent h, struct event **e)
{
	CUresult r = enter(call, NULL);
	struct context *c;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	*e = handle_get(EVENT, h);
	if (!*e)
		return CUDA_ERROR_INVALID_HANDLE;
	r = context_state((*e)->context);
	if (r != CUDA_SUCCESS)
		release(*e);
	return r;
}

CUresult cuEventDestroy_v2(CUevent h)
{
	CUresult r = enter("cuEventDestroy", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	struct event *e = handle_take(EVENT, h);
	release(e);
	return e ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventRecord(CUevent h, CUstream sh)
{
	struct event *e;
	struct stream *s = NULL;
	CUresult r = get("cuEventRecord", h, &e);
	if (r != CUDA_SUCCESS)
		return r;
	r = stream_get(sh, &s);
	struct operation *op = NULL;
	if (r == CUDA_SUCCESS && capturing(s)) {
		pthread_mutex_lock(&e->mutex);
		r = e->ipc ? capture_refuse(s, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) : capture_record(s, &e->mark);
		pthread_mutex_unlock(&e->mutex);
		release(s);
	} else if (r == CUDA_SUCCESS && s->context != e->context && !e->opened) {
		r = CUDA_ERROR_INVALID_HANDLE;
		release(s);
	} else if (r == CUDA_SUCCESS && !(op = operation_new(e->ipc ? RECORD_IPC : RECORD, &(struct fault){0}))) {
		r = CUDA_ERROR_OUT_OF_MEMORY;
		release(s);
	} else if (r == CUDA_SUCCESS) {
		pthread_mutex_lock(&e->mutex);
		if (e->ipc) {
			op->ipc = retain(e->ipc);
			op->target = ipc_record(e->ipc);
		}
		uint64_t number = stream_enqueue(s, op);
		struct capture *captured = e->mark.capture;
		struct stream *before = e->stream;
		e->mark.capture = NULL;
		e->stream = s;
		e->number = number;
		pthread_mutex_unlock(&e->mutex);
		release(before);
		release(captured);
	}
	release(e);
	return r;
}

// captured reports whether the latest record of an event is part of a capture: the host
// cannot query such a record.
static bool captured(struct event *e)
{
	pthread_mutex_lock(&e->mutex);
	bool is = e->mark.capture != NULL;
	pthread_mutex_unlock(&e->mutex);
	return is;
}

// latest returns the object of a wait for the event: an operation of a stream (with a
// reference to the stream), a record in ipc, or nothing. With demand, a delayed record
// runs now.
static void latest(struct event *e, bool demand, struct stream **s, uint64_t *number)
{
	pthread_mutex_lock(&e->mutex);
	if (demand && e->stream)
		stream_demand(e->stream, e->number);
	*s = e->ipc ? NULL : retain(e->stream);
	*number = e->ipc ? ipc_latest(e->ipc) : e->number;
	pthread_mutex_unlock(&e->mutex);
}

CUresult cuEventQuery(CUevent h)
{
	struct event *e;
	struct stream *s;
	uint64_t number;
	CUresult r = get("cuEventQuery", h, &e);
	if (r != CUDA_SUCCESS)
		return r;
	if (captured(e)) {
		release(e);
		return CUDA_ERROR_CAPTURED_EVENT;
	}
	latest(e, false, &s, &number);
	bool done = e->ipc ? ipc_done(e->ipc, number) : !s || stream_done(s, number);
	// Check this after done: a lost context drops work, which is then not complete.
	r = context_state(e->context);
	release(s);
	release(e);
	return r == CUDA_SUCCESS && !done ? CUDA_ERROR_NOT_READY : r;
}

CUresult cuEventSynchronize(CUevent h)
{
	struct event *e;
	struct stream *s;
	uint64_t number;
	CUresult r = get("cuEventSynchronize", h, &e);
	if (r != CUDA_SUCCESS)
		return r;
	if (captured(e)) {
		release(e);
		return CUDA_ERROR_CAPTURED_EVENT;
	}
	latest(e, true, &s, &number);
	if (s)
		r = stream_wait(s, number);
	else if (e->ipc)
		r = ipc_wait(e->ipc, number, e->context);
	release(s);
	release(e);
	return r;
}

CUresult cuStreamWaitEvent(CUstream sh, CUevent h, unsigned flags)
{
	struct event *e;
	struct stream *s, *other;
	uint64_t number;
	CUresult r = get("cuStreamWaitEvent", h, &e);
	if (r != CUDA_SUCCESS)
		return r;
	if (flags > 1 || (r = stream_get(sh, &s)) != CUDA_SUCCESS) {
		release(e);
		return r == CUDA_SUCCESS ? CUDA_ERROR_INVALID_VALUE : r;
	}
	if (captured(e)) {
		pthread_mutex_lock(&e->mutex);
		r = capture_wait(s, &e->mark);
		pthread_mutex_unlock(&e->mutex);
		release(s);
		release(e);
		return r;
	}
	latest(e, false, &other, &number);
	if ((other || e->ipc) && capturing(s)) {
		r = capture_refuse(s, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
	} else if (other || e->ipc) {
		struct operation *op = operation_new(e->ipc ? WAIT_IPC : WAIT_STREAM, &(struct fault){0});
		if (op) {
			op->other = retain(other);
			op->ipc = retain(e->ipc);
			op->target = number;
			stream_enqueue(s, op);
		} else {
			r = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	release(other);
	release(s);
	release(e);
	return r;
}

CUresult cuIpcGetEventHandle(CUipcEventHandle *out, CUevent h)
{
	struct event *e;
	CUresult r = get("cuIpcGetEventHandle", h, &e);
	if (r != CUDA_SUCCESS)
		return r;
	if (!out || !e->ipc || e->opened)
		r = CUDA_ERROR_INVALID_VALUE;
	else
		ipc_handle(e->ipc, out);
	release(e);
	return r;
}

CUresult cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle h)
{
	CUresult r = enter("cuIpcOpenEventHandle", NULL);
	struct context *c;
	struct ipc *ipc;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	r = ipc_open(&h, &ipc);
	return r == CUDA_SUCCESS ? new(c, ipc, true, out) : r;
}
