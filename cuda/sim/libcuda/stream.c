// Streams. Each stream has a thread that runs its operations in order, so that a call
// returns before its work is complete, and streams overtake each other as on a GPU.
//
// PEERLANE_SIM_LATE_MS delays every operation until a call waits for the operation, or
// until the time has passed: the latest moment that the order permits. A program that
// relies on fast operations then fails.
//
// PEERLANE_SIM_BUSY=refuse refuses work that would wait for the time slice of another
// process's kernel, and PEERLANE_SIM_BUSY=MS delays such work (measured,
// docs/benchmarks.md): copies within a device, less than 32 KiB of host memory in one
// row, memset, and values that a stream writes unless a copy engine did its last work.
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define CHUNK ((size_t)4 << 20) // bytes of a copy between two checks for the end
#define SPIN_NS 20000           // time without work after which a thread sleeps

static uint64_t late_ns;
static bool refuses;     // refuses work that waits for a time slice
static unsigned busy_ms; // delay of such work

uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void stream_load(void)
{
	const char *late = getenv("PEERLANE_SIM_LATE_MS");
	if (late)
		late_ns = strtoull(late, NULL, 10) * 1000000u;
	const char *other = getenv("PEERLANE_SIM_BUSY");
	refuses = other && !strcmp(other, "refuse");
	busy_ms = other && !refuses ? (unsigned)strtoul(other, NULL, 10) : 0;
}

CUresult stream_engine(struct stream *s, bool copy_engine, struct fault *f)
{
	atomic_store(&s->copy_engine, copy_engine);
	if (copy_engine)
		return CUDA_SUCCESS;
	atomic_fetch_add(&s->context->device->log->slices, 1);
	f->delay_ms += busy_ms;
	return refuses ? CUDA_ERROR_NOT_PERMITTED : CUDA_SUCCESS;
}

// sleep_until waits for a signal on c, until the given time at the latest.
static void sleep_until(pthread_cond_t *c, pthread_mutex_t *m, uint64_t ns)
{
	struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
	pthread_cond_timedwait(c, m, &t);
}

// patience paces a loop that polls memory of other processes: at first without a pause,
// then at intervals of an eighth of the elapsed wait.
void patience(uint64_t since)
{
	uint64_t waited = now_ns() - since;
	if (waited < SPIN_NS) {
		sched_yield();
		return;
	}
	uint64_t pause = waited / 8;
	struct timespec t = {0, pause > 500000 ? 500000 : (long)pause};
	nanosleep(&t, NULL);
}

bool stream_over(struct stream *s)
{
	return atomic_load(&s->abandoned) || atomic_load(&s->context->sticky);
}

void segment_count(const struct segment *g)
{
	struct device *to = g->to ? g->to->device : NULL, *from = g->from ? g->from->device : NULL;
	if (to == from) {
		if (to)
			atomic_fetch_add(&to->log->bytes_within, g->n);
	} else {
		if (to)
			atomic_fetch_add(&to->log->bytes_in, g->n);
		if (from)
			atomic_fetch_add(&from->log->bytes_out, g->n);
	}
	if (to)
		atomic_fetch_add(&to->log->copies, 1);
	if (from && from != to)
		atomic_fetch_add(&from->log->copies, 1);
}

static void copy(struct stream *s, struct operation *op)
{
	for (size_t i = 0; i < op->count; i++) {
		struct segment *g = &op->segments[i];
		for (size_t at = 0; at < g->n; at += CHUNK) {
			if (stream_over(s))
				return;
			memmove(g->dst + at, g->src + at, g->n - at < CHUNK ? g->n - at : CHUNK);
		}
		// Addition: an exclusive or of the same fault in another process would undo this
		// one.
		if (op->fault.corrupt && i == 0)
			g->dst[op->fault.first ? 0 : g->n / 2] += 0xda;
		segment_count(g);
	}
}

static void wait_stream(struct stream *s, struct stream *other, uint64_t number)
{
	stream_demand(other, number);
	pthread_mutex_lock(&other->mutex);
	other->waiting++;
	while (!stream_over(s) && !atomic_load(&other->abandoned) && atomic_load(&other->completed) < number)
		sleep_until(&other->done, &other->mutex, now_ns() + 2000000);
	other->waiting--;
	pthread_mutex_unlock(&other->mutex);
}

void operation_do(struct stream *s, struct operation *op)
{
	uint64_t since = now_ns();
	while (op->fault.delay_ms && !stream_over(s) && now_ns() - since < op->fault.delay_ms * 1000000ull)
		patience(since);
	if (op->fault.strike) {
		int none = 0;
		atomic_compare_exchange_strong(&s->context->sticky, &none, (int)op->fault.strike);
	}
	if (stream_over(s))
		return;
	switch (op->work) {
	case COPY:
		copy(s, op);
		break;
	case SET:
		for (size_t i = 0; i < op->count; i++)
			memset(op->segments[i].dst, (int)op->target, op->segments[i].n);
		break;
	case WRITE_VALUE:
		atomic_store(op->value, op->target);
		break;
	case WAIT_VALUE: // cyclic comparison, as CU_STREAM_WAIT_VALUE_GEQ of cuda.h
		since = now_ns();
		while (!stream_over(s) && (int64_t)(atomic_load(op->value) - op->target) < 0)
			patience(since);
		break;
	case WAIT_BITS:
		since = now_ns();
		while (!stream_over(s) && !(atomic_load(op->value) & op->target))
			patience(since);
		break;
	case WAIT_STREAM:
		wait_stream(s, op->other, op->target);
		break;
	case WAIT_IPC:
		since = now_ns();
		while (!stream_over(s) && !ipc_done(op->ipc, op->target))
			patience(since);
		break;
	case RECORD:
		break;
	case RECORD_IPC:
		ipc_complete(op->ipc, op->target);
		break;
	case KERNEL:
		launch_run(s, op->launch);
		break;
	case LAUNCH:
		exec_run(s, op->exec);
		break;
	}
}

void operation_free(struct operation *op)
{
	for (size_t i = 0; i < op->count; i++) {
		release(op->segments[i].to);
		release(op->segments[i].from);
	}
	free(op->segments);
	release(op->memory);
	release(op->other);
	release(op->ipc);
	release(op->launch);
	release(op->exec);
	free(op);
}

// next returns the next operation, NULL when the thread must end. The caller holds the
// mutex.
static struct operation *next(struct stream *s)
{
	uint64_t since = now_ns();
	for (;;) {
		if (atomic_load(&s->abandoned))
			return NULL;
		struct operation *op = s->head;
		if (op) {
			if (!late_ns || s->demanded >= op->number || now_ns() >= op->enqueued_ns + late_ns)
				return op;
			sleep_until(&s->work, &s->mutex, op->enqueued_ns + late_ns);
		} else if (s->closing) {
			return NULL;
		} else if (now_ns() - since < SPIN_NS) {
			pthread_mutex_unlock(&s->mutex);
			sched_yield();
			pthread_mutex_lock(&s->mutex);
		} else {
			pthread_cond_wait(&s->work, &s->mutex);
		}
	}
}

// unlist removes an ended stream from its context's list. A destroyed stream with pending
// work stays in the list, because the context waits for the work.
static void unlist(struct stream *s)
{
	pthread_mutex_lock(&s->context->mutex);
	struct stream **at = &s->context->streams;
	while (*at && *at != s)
		at = &(*at)->next;
	bool listed = *at;
	if (listed)
		*at = s->next;
	pthread_mutex_unlock(&s->context->mutex);
	if (listed)
		release(s);
}

static void *work(void *argument)
{
	struct stream *s = argument;
	struct operation *op;
	prctl(PR_SET_TIMERSLACK, 1000ul);
	prctl(PR_SET_NAME, "sim-stream"); // tests count the threads
	pthread_mutex_lock(&s->mutex);
	while ((op = next(s))) {
		pthread_mutex_unlock(&s->mutex);
		operation_do(s, op);
		pthread_mutex_lock(&s->mutex);
		s->head = op->next;
		if (!s->head)
			s->tail = NULL;
		atomic_store(&s->completed, op->number);
		if (s->waiting)
			pthread_cond_broadcast(&s->done);
		pthread_mutex_unlock(&s->mutex);
		operation_free(op);
		pthread_mutex_lock(&s->mutex);
	}
	struct operation *rest = s->head;
	s->head = s->tail = NULL;
	s->ended = true;
	pthread_cond_broadcast(&s->done);
	pthread_mutex_unlock(&s->mutex);
	while ((op = rest)) {
		rest = op->next;
		operation_free(op);
	}
	unlist(s);
	release(s);
	return NULL;
}

static void destroy(struct object *o)
{
	struct stream *s = (struct stream *)o;
	release(s->context);
	pthread_cond_destroy(&s->work);
	pthread_cond_destroy(&s->done);
	pthread_mutex_destroy(&s->mutex);
	free(s);
}

// start starts the thread, which holds a reference. The thread blocks all signals: the
// program handles signals, and the handlers of a Go program expect Go's threads.
static bool start(struct stream *s)
{
	pthread_attr_t a;
	sigset_t all, before;
	pthread_t thread;
	sigfillset(&all);
	pthread_attr_init(&a);
	pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&a, 256 << 10);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int error = pthread_create(&thread, &a, work, retain(s));
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&a);
	if (error)
		release(s);
	return error == 0;
}

// stream_new creates a stream with two references: that of the caller and that of the
// context's list. The caller holds the context's mutex.
CUresult stream_new(struct context *c, struct stream **out)
{
	struct stream *s = calloc(1, sizeof *s);
	if (!s)
		return CUDA_ERROR_OUT_OF_MEMORY;
	object_init(&s->object, destroy);
	s->context = retain(c);
	pthread_condattr_t monotonic;
	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_cond_init(&s->work, &monotonic);
	pthread_cond_init(&s->done, &monotonic);
	pthread_condattr_destroy(&monotonic);
	pthread_mutex_init(&s->mutex, NULL);
	if (!start(s)) {
		release(s);
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	s->next = c->streams;
	c->streams = retain(s);
	*out = s;
	return CUDA_SUCCESS;
}

CUresult stream_get(uint64_t handle, struct stream **s)
{
	struct context *c;
	CUresult r = context_current(&c);
	if (r != CUDA_SUCCESS)
		return r;
	if (handle) {
		*s = handle_get(STREAM, handle);
		if (!*s)
			return CUDA_ERROR_INVALID_HANDLE;
		r = context_state((*s)->context);
		if (r != CUDA_SUCCESS)
			release(*s);
		return r;
	}
	pthread_mutex_lock(&c->mutex);
	if (c->legacy)
		*s = retain(c->legacy);
	else if ((r = stream_new(c, s)) == CUDA_SUCCESS)
		c->legacy = *s;
	pthread_mutex_unlock(&c->mutex);
	return r;
}

struct operation *operation_new(enum work work, const struct fault *f)
{
	struct operation *op = calloc(1, sizeof *op);
	if (op) {
		op->work = work;
		op->fault = *f;
	}
	return op;
}

uint64_t stream_enqueue(struct stream *s, struct operation *op)
{
	op->enqueued_ns = now_ns();
	pthread_mutex_lock(&s->mutex);
	uint64_t number = op->number = ++s->enqueued;
	if (s->ended) { // the context was destroyed meanwhile
		pthread_mutex_unlock(&s->mutex);
		operation_free(op);
		return number;
	}
	if (s->tail)
		s->tail->next = op;
	else
		s->head = op;
	s->tail = op;
	pthread_cond_signal(&s->work);
	pthread_mutex_unlock(&s->mutex);
	return number;
}

CUresult stream_submit(struct stream *s, struct operation *op, uint64_t *number)
{
	*number = 0;
	if (capturing(s))
		return capture_add(s, op);
	*number = stream_enqueue(s, op);
	return CUDA_SUCCESS;
}

uint64_t stream_last(struct stream *s)
{
	pthread_mutex_lock(&s->mutex);
	uint64_t number = s->enqueued;
	pthread_mutex_unlock(&s->mutex);
	return number;
}

bool stream_done(struct stream *s, uint64_t number) { return atomic_load(&s->completed) >= number; }

void stream_demand(struct stream *s, uint64_t number)
{
	if (!late_ns)
		return;
	pthread_mutex_lock(&s->mutex);
	if (s->demanded < number) {
		s->demanded = number;
		pthread_cond_signal(&s->work);
	}
	pthread_mutex_unlock(&s->mutex);
}

CUresult stream_wait(struct stream *s, uint64_t number)
{
	stream_demand(s, number);
	for (uint64_t since = now_ns(); !stream_done(s, number) && now_ns() - since < SPIN_NS;)
		sched_yield();
	pthread_mutex_lock(&s->mutex);
	s->waiting++;
	while (!stream_done(s, number) && !s->ended)
		pthread_cond_wait(&s->done, &s->mutex);
	s->waiting--;
	pthread_mutex_unlock(&s->mutex);
	return context_state(s->context);
}

void stream_abandon(struct stream *s)
{
	atomic_store(&s->abandoned, true);
	pthread_mutex_lock(&s->mutex);
	pthread_cond_broadcast(&s->work);
	pthread_cond_broadcast(&s->done);
	while (!s->ended)
		pthread_cond_wait(&s->done, &s->mutex);
	pthread_mutex_unlock(&s->mutex);
}

// --- the API

CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
	CUresult r = enter("cuStreamCreate", NULL);
	struct context *c;
	struct stream *s;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	if (!out || flags > CU_STREAM_NON_BLOCKING)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&c->mutex);
	r = stream_new(c, &s);
	if (r == CUDA_SUCCESS) {
		s->handle = handle_new(STREAM, s); // takes over the reference
		*out = s->handle;
		if (!s->handle)
			r = CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_unlock(&c->mutex);
	return r;
}

CUresult cuStreamDestroy_v2(CUstream h)
{
	CUresult r = enter("cuStreamDestroy", NULL);
	struct context *c;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	struct stream *s = handle_take(STREAM, h);
	if (!s)
		return CUDA_ERROR_INVALID_HANDLE;
	capture_leave(s);
	pthread_mutex_lock(&s->mutex);
	s->closing = true;
	pthread_cond_signal(&s->work);
	pthread_mutex_unlock(&s->mutex);
	release(s);
	return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream h)
{
	CUresult r = enter("cuStreamSynchronize", NULL);
	struct stream *s;
	if (r != CUDA_SUCCESS || (r = stream_get(h, &s)) != CUDA_SUCCESS)
		return r;
	r = capture_refuse(s, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	if (r == CUDA_SUCCESS)
		r = stream_wait(s, stream_last(s));
	release(s);
	return r;
}

CUresult cuStreamQuery(CUstream h)
{
	CUresult r = enter("cuStreamQuery", NULL);
	struct stream *s;
	if (r != CUDA_SUCCESS || (r = stream_get(h, &s)) != CUDA_SUCCESS)
		return r;
	r = capture_refuse(s, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	bool done = stream_done(s, stream_last(s));
	if (r == CUDA_SUCCESS)
		r = context_state(s->context);
	release(s);
	return r == CUDA_SUCCESS && !done ? CUDA_ERROR_NOT_READY : r;
}
