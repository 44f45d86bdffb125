/* Sends, receives and their ends: NCCL's hot path. No call here waits, allocates, or
 * calls CUDA, unless it writes to NCCL's log that something has failed. */
#include "plugin.h"

#include <time.h>

static struct request *free_request(struct communicator *c)
{
	for (unsigned i = 1; i <= c->most; i++) {
		unsigned k = (c->last + i) % c->most;

		if (!c->requests[k].used) {
			c->last = k;
			return &c->requests[k];
		}
	}
	return NULL;
}

/* set checks what NCCL asks for against the region. */
static bool set(struct part *p, const void *data, size_t bytes, int tag, const struct region *region)
{
	uintptr_t at = (uintptr_t)data;

	if (!region || at < region->base || at - region->base > region->bytes || bytes > region->bytes - (at - region->base))
		return false;
	*p = (struct part){.region = region, .data = (uint8_t *)(uintptr_t)data, .bytes = bytes, .tag = (uint32_t)tag};
	p->memory = region->memory;
	p->at = region->first + (at - region->base);
	return true;
}

static uint64_t offset(const struct part *p) { return (uintptr_t)p->data - p->region->base; }

/* --- sends that end before the receiver has them ------------------------------------ */

/* What is aligned alike is copied in words. */
#define ALIGNED 64

/* buffer copies a send of host memory, if there is room. */
static bool buffer(struct communicator *c, struct request *r)
{
	struct buffer *b = &c->buffer;
	struct part *p = &r->part[0];
	uint64_t skew = (uintptr_t)p->data % ALIGNED, begin = b->head;
	uint64_t room = (skew + p->bytes + ALIGNED - 1) / ALIGNED * ALIGNED;

	if (!b->data || !p->bytes || room > BUFFER_BYTES || b->count == MOST_SENDS)
		return false;
	if (begin % BUFFER_BYTES + room > BUFFER_BYTES) /* it does not go on at the beginning */
		begin += BUFFER_BYTES - begin % BUFFER_BYTES;
	if (begin + room - b->tail > BUFFER_BYTES)
		return false;
	p->memory = b->memory;
	p->at = begin % BUFFER_BYTES + skew;
	copy_words(b->data + p->at, p->data, p->bytes);
	r->buffered = true;
	r->end = begin + room;
	return true;
}

/* reap takes the results of buffered sends, in their order. False: the communicator has failed. */
static bool reap(struct communicator *c)
{
	struct buffer *b = &c->buffer;

	while (b->count) {
		struct request *r = b->queue[b->first];
		int status = peerlane_test(c->tie->session, r->part[0].operation, NULL);

		if (status == PEERLANE_STATUS_PENDING)
			return true;
		b->first = (b->first + 1) % MOST_SENDS;
		b->count--;
		b->tail = r->end;
		if (!b->count) /* the next send uses the same cache lines */
			b->head = b->tail = 0;
		r->part[0].ended = r->landed = true;
		r->used = !r->told;
		c->under_way--;
		if (status) {
			fail(c, "sending", status);
			return false;
		}
	}
	return true;
}

static time_t seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec;
}

void drain_sends(struct communicator *c)
{
	/* The communicators of an abort wait together no longer than one: after a wait that ran out, the others
	 * wait for a second. */
	static _Atomic time_t ran_out;
	time_t begun = seconds(), last = ran_out;
	time_t limit = last && begun - last < DRAIN_SECONDS ? begun + 1 : begun + DRAIN_SECONDS;

	peerlane_operation flush;
	bool flushing = false;

	/* An abort leaves sends of which NCCL has no result, and waits for no bytes. */
	c->flushes = c->flushes && c->under_way == c->buffer.count;

	while (!unusable(c) && reap(c) && (c->buffer.count || c->flushes)) {
		int status = flushing ? peerlane_test(c->tie->session, flush, NULL) : peerlane_flush(c->tie->session, c->number, NULL, &flush);

		if (flushing && status != PEERLANE_STATUS_PENDING) {
			flushing = c->flushes = false;
			if (status) {
				fail(c, "sending", status);
				break;
			}
			continue;
		}
		if (!flushing && status && status != PEERLANE_STATUS_FULL)
			break;
		flushing = flushing || !status;
		if (seconds() >= limit) {
			ran_out = seconds();
			break;
		}
		nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
	}
	if (flushing)
		peerlane_forget(c->tie->session, flush);
}

/* --- */

/* post posts what is left of a request. PEERLANE_STATUS_FULL: some has to wait. */
static int post(struct request *r)
{
	struct communicator *c = r->communicator;
	int status = 0;

	while (!status && r->posted < r->parts) {
		struct part *p = &r->part[r->posted];
		struct peerlane_options options = {.tag = p->tag};

		/* Where both ranks share a GPU, the sender's kernel does not wait for the receiver's time slice. */
		if (c->sends && !p->region->twin) {
			options.flags = PEERLANE_BUFFERED;
			c->flushes = true;
		}
		status = (c->sends ? peerlane_send : peerlane_receive)(c->tie->session, c->number, p->memory,
			p->at, p->bytes, &options, &p->operation);
		if (!status)
			r->posted++;
	}
	return status;
}

/* post_rest posts what waits for room; nothing may overtake it. False if it still
 * waits, or the communicator has ended. */
static bool post_rest(struct communicator *c)
{
	int status;

	if (!c->unposted)
		return true;
	if ((status = post(c->unposted)) == PEERLANE_STATUS_FULL)
		return false;
	if (status)
		fail(c, "receiving", status);
	else
		c->unposted = NULL;
	return !status;
}

int send_one(void *communicator, void *data, size_t bytes, int tag, void *memory, void **out)
{
	struct communicator *c = communicator;
	struct request *r;
	int error = unusable(c), status;

	*out = NULL;
	if (error)
		return error;
	if (!reap(c))
		return c->error;
	if (!(r = free_request(c)))
		return NCCL_SUCCESS;
	r->communicator = c;
	r->parts = 1;
	r->posted = r->ended = 0;
	r->buffered = r->told = r->landed = false;
	if (!set(&r->part[0], data, bytes, tag, memory)) {
		warn("a send of %zu bytes at %p is not in its registered memory", bytes, data);
		return NCCL_INVALID_ARGUMENT;
	}
	/* The GPU has written it; its word that it has, NCCL has read without order. */
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	if (r->part[0].region->twin && !buffer(c, r))
		copy_words(r->part[0].region->twin + offset(&r->part[0]), data, bytes);
	status = post(r);
	if (status == PEERLANE_STATUS_FULL)
		return NCCL_SUCCESS;
	if (status)
		return fail(c, "sending", status);
	if (r->buffered) {
		c->buffer.head = r->end;
		c->buffer.queue[(c->buffer.first + c->buffer.count++) % MOST_SENDS] = r;
	}
	r->used = true;
	c->under_way += (unsigned)r->parts;
	*out = r;
	return NCCL_SUCCESS;
}

int receive_group(void *communicator, int n, void **data, const size_t *sizes, const int *tags, void **memories, void **out)
{
	struct communicator *c = communicator;
	struct request *r;
	int error = unusable(c), status;

	/* It may have been NCCL_OPTIONAL_RECEIVE_COMPLETION: our receives end anyway. */
	*out = NULL;
	if (error)
		return error;
	if (n < 1 || n > NCCL_MAX_RECEIVES) {
		warn("a group of %d receives; %d are possible", n, NCCL_MAX_RECEIVES);
		return NCCL_INVALID_ARGUMENT;
	}
	if (!post_rest(c) || c->under_way + (unsigned)n > c->most || !(r = free_request(c)))
		return c->error;
	r->communicator = c;
	r->parts = n;
	r->posted = r->ended = 0;
	for (int i = 0; i < n; i++)
		if (!set(&r->part[i], data[i], sizes[i], tags[i], memories[i])) {
			warn("a receive of %zu bytes at %p is not in its registered memory", sizes[i], data[i]);
			return NCCL_INVALID_ARGUMENT;
		}
	status = post(r);
	if (status == PEERLANE_STATUS_FULL && r->posted)
		c->unposted = r; /* what is posted cannot be taken back */
	else if (status == PEERLANE_STATUS_FULL)
		return NCCL_SUCCESS;
	else if (status)
		return fail(c, "receiving", status);
	r->used = true;
	c->under_way += (unsigned)r->parts;
	*out = r;
	return NCCL_SUCCESS;
}

/* Whoever reads a received buffer can: the relay flushes before it says that it is
 * there. */
int flush(void *communicator, int n, void **data, int *sizes, void **memories, void **request)
{
	(void)n, (void)data, (void)sizes, (void)memories;
	*request = NULL;
	return unusable(communicator);
}

int test(void *request, int *done, int *sizes)
{
	struct request *r = request;
	struct communicator *c = r->communicator;
	int error = unusable(c);

	*done = 0;
	if (error)
		return error;
	if (!r->used || r->told) {
		warn("a request was tested that is done already");
		return NCCL_INVALID_ARGUMENT;
	}
	if (c->sends && !reap(c))
		return c->error;
	if (r->buffered) {
		if (sizes)
			sizes[0] = (int)r->part[0].bytes;
		r->told = true;
		r->used = !r->landed;
		*done = 1;
		return NCCL_SUCCESS;
	}
	/* While some waits for room results are taken all the same: that makes room. */
	if (!post_rest(c) && c->error)
		return c->error;
	for (int i = 0; i < r->posted; i++) {
		struct part *p = &r->part[i];
		int status;

		if (p->ended)
			continue;
		status = peerlane_test(c->tie->session, p->operation, &p->moved);
		if (status == PEERLANE_STATUS_PENDING)
			continue;
		p->ended = true;
		if (status)
			return fail(c, c->sends ? "sending" : "receiving", status);
		if (!c->sends && p->region->twin)
			copy_words(p->data, p->region->twin + offset(p), p->moved);
		r->ended++;
	}
	if (r->ended < r->parts)
		return NCCL_SUCCESS;
	for (int i = 0; sizes && i < r->parts; i++)
		sizes[i] = (int)r->part[i].moved;
	r->used = false;
	c->under_way -= (unsigned)r->parts;
	*done = 1;
	return NCCL_SUCCESS;
}
