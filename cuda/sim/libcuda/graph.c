// Stream capture and graphs. A graph is a list of captured operations in the order of the
// calls, which satisfies every dependency. A launch is one operation of its stream and
// runs the list in order. A GPU may run independent operations concurrently, and CUDA
// promises no other order.
#include "sim.h"

#include <stdlib.h>
#include <string.h>

struct graph { // constant after the end of the capture
	struct object object;
	struct context *context;
	struct operation *head, *tail;
};

// capture is a capture from begin to end. Members are the participating streams; each
// member records how much of every other member it must wait for.
struct capture {
	struct object object;
	struct capture *next; // of the captures that have not ended
	struct graph *graph;
	int mode;
	pthread_t thread; // the thread that began the capture
	bool ended, invalid;
	int count;
	struct member {
		struct capture *capture;
		struct stream *stream;       // no reference: a destroyed stream leaves
		uint64_t seen[MAX_MEMBERS]; // at its own index: the number of operations of this member
	} members[MAX_MEMBERS]; // the first is the stream of the begin
};

struct exec {
	struct object object;
	struct graph *graph;
	atomic_bool running;
};

// Captures are rare, so one lock guards all captures. A thread may take the lock while
// holding that of an event, and before that of a stream.
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct capture *captures;
static atomic_int under_way; // number of captures: without a capture, streams take no lock

static void graph_destroy(struct object *o)
{
	struct graph *g = (struct graph *)o;
	for (struct operation *op = g->head, *next; op; op = next) {
		next = op->next;
		operation_free(op);
	}
	release(g->context);
	free(g);
}

static void capture_destroy(struct object *o)
{
	struct capture *c = (struct capture *)o;
	release(c->graph);
	free(c);
}

static void exec_destroy(struct object *o)
{
	release(((struct exec *)o)->graph);
	free(o);
}

bool capturing(struct stream *s)
{
	if (!atomic_load(&under_way))
		return false;
	pthread_mutex_lock(&mutex);
	bool is = s->captured != NULL;
	pthread_mutex_unlock(&mutex);
	return is;
}

// ready returns the stream's member if its capture has not ended. The caller holds the
// mutex.
static CUresult ready(struct stream *s, struct member **m)
{
	*m = s->captured;
	if (!*m)
		return CUDA_ERROR_ILLEGAL_STATE;
	return (*m)->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

static size_t place(const struct member *m) { return (size_t)(m - m->capture->members); }

CUresult capture_add(struct stream *s, struct operation *op)
{
	struct member *m;
	pthread_mutex_lock(&mutex);
	CUresult r = ready(s, &m);
	if (r == CUDA_SUCCESS) {
		struct graph *g = m->capture->graph;
		if (g->tail)
			g->tail->next = op;
		else
			g->head = op;
		g->tail = op;
		m->seen[place(m)]++;
	}
	pthread_mutex_unlock(&mutex);
	if (r != CUDA_SUCCESS)
		operation_free(op);
	return r;
}

CUresult capture_record(struct stream *s, struct mark *mark)
{
	struct member *m;
	struct capture *before = NULL;
	pthread_mutex_lock(&mutex);
	CUresult r = ready(s, &m);
	if (r == CUDA_SUCCESS) {
		before = mark->capture;
		mark->capture = retain(m->capture);
		memcpy(mark->seen, m->seen, sizeof mark->seen);
	}
	pthread_mutex_unlock(&mutex);
	release(before);
	return r;
}

// join makes a stream a member. The caller holds the mutex.
static CUresult join(struct capture *c, struct stream *s, struct member **m)
{
	if (c->count == MAX_MEMBERS)
		return CUDA_ERROR_NOT_SUPPORTED;
	*m = &c->members[c->count++];
	**m = (struct member){.capture = c, .stream = s};
	s->captured = *m;
	return CUDA_SUCCESS;
}

CUresult capture_wait(struct stream *s, const struct mark *mark)
{
	struct capture *c = mark->capture;
	pthread_mutex_lock(&mutex);
	struct member *m = s->captured;
	CUresult r = CUDA_SUCCESS;
	if (c->ended)
		r = CUDA_ERROR_CAPTURED_EVENT;
	else if (c->invalid || (m && m->capture->invalid))
		r = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	else if (m && m->capture != c)
		r = CUDA_ERROR_STREAM_CAPTURE_MERGE;
	else if (!m)
		r = join(c, s, &m);
	if (r == CUDA_ERROR_STREAM_CAPTURE_MERGE)
		c->invalid = m->capture->invalid = true;
	for (size_t i = 0; r == CUDA_SUCCESS && i < MAX_MEMBERS; i++)
		if (m->seen[i] < mark->seen[i])
			m->seen[i] = mark->seen[i];
	pthread_mutex_unlock(&mutex);
	return r;
}

CUresult capture_refuse(struct stream *s, CUresult r)
{
	struct member *m;
	if (!atomic_load(&under_way))
		return CUDA_SUCCESS;
	pthread_mutex_lock(&mutex);
	bool is = ready(s, &m) != CUDA_ERROR_ILLEGAL_STATE;
	if (is)
		m->capture->invalid = true;
	pthread_mutex_unlock(&mutex);
	return is ? r : CUDA_SUCCESS;
}

CUresult capture_forbids(const char *call)
{
	static const char *const unsafe[] = {"cuMemAlloc", "cuMemFree", "cuMemHostAlloc", "cuMemFreeHost"};
	CUresult r = CUDA_SUCCESS;
	bool is = false;
	if (!atomic_load(&under_way))
		return CUDA_SUCCESS;
	for (size_t i = 0; i < sizeof unsafe / sizeof *unsafe; i++)
		is |= strcmp(call, unsafe[i]) == 0;
	if (!is)
		return CUDA_SUCCESS;
	pthread_mutex_lock(&mutex);
	for (struct capture *c = captures; c; c = c->next) {
		if (c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL ||
		    (c->mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL && pthread_equal(c->thread, pthread_self()))) {
			c->invalid = true;
			r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
		}
	}
	pthread_mutex_unlock(&mutex);
	return r;
}

// end removes all streams from a capture. The caller holds the mutex, and gets the
// reference of the list.
static void end(struct capture *c)
{
	for (int i = 0; i < c->count; i++)
		if (c->members[i].stream)
			c->members[i].stream->captured = NULL;
	c->ended = true;
	struct capture **at = &captures;
	while (*at != c)
		at = &(*at)->next;
	*at = c->next;
	atomic_fetch_sub(&under_way, 1);
}

void capture_leave(struct stream *s)
{
	struct capture *ended = NULL;
	pthread_mutex_lock(&mutex);
	struct member *m = s->captured;
	if (m) {
		m->capture->invalid = true;
		m->stream = NULL;
		s->captured = NULL;
		if (place(m) == 0) { // no call can end the capture any more
			ended = m->capture;
			end(ended);
		}
	}
	pthread_mutex_unlock(&mutex);
	release(ended);
}

// --- the API

CUresult cuStreamBeginCapture_v2(CUstream h, int mode)
{
	CUresult r = enter("cuStreamBeginCapture", NULL);
	struct stream *s;
	if (r != CUDA_SUCCESS || (r = stream_get(h, &s)) != CUDA_SUCCESS)
		return r;
	struct capture *c = calloc(1, sizeof *c);
	struct graph *g = calloc(1, sizeof *g);
	if (!h)
		r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	else if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
		r = CUDA_ERROR_INVALID_VALUE;
	else if (!c || !g)
		r = CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&mutex);
	if (r == CUDA_SUCCESS && s->captured)
		r = CUDA_ERROR_ILLEGAL_STATE;
	if (r == CUDA_SUCCESS) {
		struct member *first;
		object_init(&g->object, graph_destroy);
		g->context = retain(s->context);
		object_init(&c->object, capture_destroy);
		c->graph = g;
		c->mode = mode;
		c->thread = pthread_self();
		c->next = captures;
		captures = c;
		atomic_fetch_add(&under_way, 1);
		join(c, s, &first);
	} else {
		free(c);
		free(g);
	}
	pthread_mutex_unlock(&mutex);
	release(s);
	return r;
}

CUresult cuStreamEndCapture(CUstream h, CUgraph *out)
{
	CUresult r = enter("cuStreamEndCapture", NULL);
	struct stream *s;
	if (r != CUDA_SUCCESS || (r = stream_get(h, &s)) != CUDA_SUCCESS)
		return r;
	if (!out) {
		release(s);
		return CUDA_ERROR_INVALID_VALUE;
	}
	*out = 0;
	struct graph *g = NULL;
	struct capture *c = NULL;
	pthread_mutex_lock(&mutex);
	struct member *m = s->captured;
	if (!m)
		r = CUDA_ERROR_ILLEGAL_STATE;
	else if (place(m) != 0) {
		r = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
		m->capture->invalid = true;
	} else if (m->capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(m->capture->thread, pthread_self()))
		r = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
	else
		c = m->capture;
	if (c) {
		if (c->invalid)
			r = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
		for (int i = 1; r == CUDA_SUCCESS && i < c->count; i++)
			if (m->seen[i] < c->members[i].seen[i])
				r = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
		if (r == CUDA_SUCCESS)
			g = retain(c->graph);
		end(c);
	}
	pthread_mutex_unlock(&mutex);
	release(c);
	release(s);
	if (g && !(*out = handle_new(GRAPH, g)))
		r = CUDA_ERROR_OUT_OF_MEMORY;
	return r;
}

CUresult cuStreamIsCapturing(CUstream h, int *status)
{
	CUresult r = enter("cuStreamIsCapturing", NULL);
	struct stream *s;
	struct member *m;
	if (r != CUDA_SUCCESS || (r = stream_get(h, &s)) != CUDA_SUCCESS)
		return r;
	pthread_mutex_lock(&mutex);
	CUresult is = ready(s, &m);
	pthread_mutex_unlock(&mutex);
	release(s);
	if (!status)
		return CUDA_ERROR_INVALID_VALUE;
	*status = is == CUDA_SUCCESS                 ? CU_STREAM_CAPTURE_STATUS_ACTIVE
		  : is == CUDA_ERROR_ILLEGAL_STATE ? CU_STREAM_CAPTURE_STATUS_NONE
						   : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
	return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph h, unsigned long long flags)
{
	CUresult r = enter("cuGraphInstantiate", NULL);
	struct context *c;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	if (!out || flags)
		return out ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
	struct graph *g = handle_get(GRAPH, h);
	if (!g)
		return CUDA_ERROR_INVALID_HANDLE;
	struct exec *e = calloc(1, sizeof *e);
	if (!e) {
		release(g);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	object_init(&e->object, exec_destroy);
	e->graph = g;
	*out = handle_new(EXEC, e);
	return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void exec_run(struct stream *s, struct exec *e)
{
	uint64_t since = now_ns();
	bool idle = false;
	while (!atomic_compare_exchange_weak(&e->running, &idle, true)) { // launches run one after another
		if (stream_over(s))
			return;
		idle = false;
		patience(since);
	}
	for (struct operation *op = e->graph->head; op && !stream_over(s); op = op->next)
		operation_do(s, op);
	atomic_store(&e->running, false);
}

CUresult cuGraphLaunch(CUgraphExec h, CUstream sh)
{
	struct fault fault;
	CUresult r = enter("cuGraphLaunch", &fault);
	struct stream *s;
	if (r != CUDA_SUCCESS || (r = stream_get(sh, &s)) != CUDA_SUCCESS)
		return r;
	struct exec *e = handle_get(EXEC, h);
	struct operation *op = e ? operation_new(LAUNCH, &fault) : NULL;
	if (op) {
		uint64_t number;
		op->exec = e;
		r = stream_submit(s, op, &number);
	} else {
		r = e ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_HANDLE;
		release(e);
	}
	release(s);
	return r;
}

static CUresult give_up(const char *call, enum kind kind, uint64_t h)
{
	CUresult r = enter(call, NULL);
	if (r != CUDA_SUCCESS)
		return r;
	void *object = handle_take(kind, h);
	release(object);
	return object ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuGraphExecDestroy(CUgraphExec e) { return give_up("cuGraphExecDestroy", EXEC, e); }
CUresult cuGraphDestroy(CUgraph g) { return give_up("cuGraphDestroy", GRAPH, g); }
