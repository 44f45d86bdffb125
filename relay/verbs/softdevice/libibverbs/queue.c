// Completion queues and their channels.
#include "softdevice.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

static int armed; // queues; the lock is held

static void disarm(struct queue *q)
{
	armed -= q->armed;
	q->armed = false;
}

bool queue_armed(void) { return armed > 0; }

API struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct rule rule = host_script("ibv_create_comp_channel", context->device->name);
	struct channel *c = rule.error ? NULL : calloc(1, sizeof *c);
	int ends[2];
	if (!c || pipe2(ends, O_CLOEXEC) != 0) {
		errno = rule.error ? rule.error : errno;
		free(c);
		return NULL;
	}
	c->ibv.context = context;
	c->ibv.fd = ends[0];
	c->end = ends[1];
	pthread_mutex_lock(&lock);
	((struct context *)context)->channels++;
	pthread_mutex_unlock(&lock);
	host_log("ibv_create_comp_channel device=%s = 0", context->device->name);
	return &c->ibv;
}

API int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
	struct channel *c = (struct channel *)channel;
	pthread_mutex_lock(&lock);
	bool busy = channel->refcnt > 0;
	if (!busy)
		((struct context *)channel->context)->channels--;
	pthread_mutex_unlock(&lock);
	host_log("ibv_destroy_comp_channel device=%s queues=%d = %d", channel->context->device->name, channel->refcnt, busy ? EBUSY : 0);
	if (busy)
		return EBUSY;
	close(c->ibv.fd);
	close(c->end);
	free(c);
	return 0;
}

API struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *user, struct ibv_comp_channel *channel, int vector)
{
	struct rule rule = host_script("ibv_create_cq", context->device->name);
	if (rule.error || entries < 1 || entries > ((struct context *)context)->device->described.entries || vector != 0) {
		host_log("ibv_create_cq device=%s entries=%d = %d", context->device->name, entries, rule.error ? rule.error : EINVAL);
		errno = rule.error ? rule.error : EINVAL;
		return NULL;
	}
	struct queue *q = calloc(1, sizeof *q);
	if (q && !(q->ring = calloc((size_t)entries, sizeof *q->ring))) {
		free(q);
		q = NULL;
	}
	if (!q)
		return NULL;
	q->capacity = (unsigned)entries;
	q->ibv.context = context;
	q->ibv.channel = channel;
	q->ibv.cq_context = user;
	q->ibv.cqe = entries;
	pthread_mutex_lock(&lock);
	((struct context *)context)->queues++;
	if (channel)
		channel->refcnt++;
	pthread_mutex_unlock(&lock);
	host_log("ibv_create_cq device=%s entries=%d = 0", context->device->name, entries);
	return &q->ibv;
}

API int ibv_resize_cq(struct ibv_cq *cq, int entries)
{
	struct queue *q = (struct queue *)cq;
	const struct description *d = &((struct context *)cq->context)->device->described;
	int error = !d->resize ? EOPNOTSUPP : entries < 1 || entries > d->entries ? EINVAL : 0;
	struct ibv_wc *ring = error ? NULL : calloc((size_t)entries, sizeof *ring);
	if (!error && !ring)
		error = ENOMEM;
	pthread_mutex_lock(&lock);
	if (!error && q->count > (unsigned)entries)
		error = EINVAL;
	for (unsigned i = 0; !error && i < q->count; i++)
		ring[i] = q->ring[(q->first + i) % q->capacity];
	if (!error) {
		free(q->ring);
		q->ring = ring;
		q->first = 0;
		q->capacity = (unsigned)entries;
		q->ibv.cqe = entries;
	} else {
		free(ring);
	}
	pthread_mutex_unlock(&lock);
	host_log("ibv_resize_cq device=%s entries=%d = %d", cq->context->device->name, entries, error);
	return error;
}

API int ibv_destroy_cq(struct ibv_cq *cq)
{
	struct queue *q = (struct queue *)cq;
	pthread_mutex_lock(&lock);
	// The real one waits for acknowledgements, for ever.
	int error = q->pairs || q->unacknowledged ? EBUSY : 0;
	if (!error) {
		disarm(q);
		((struct context *)cq->context)->queues--;
		if (cq->channel)
			cq->channel->refcnt--;
	}
	pthread_mutex_unlock(&lock);
	host_log("ibv_destroy_cq device=%s pairs=%d unacknowledged=%u = %d", cq->context->device->name, q->pairs, q->unacknowledged, error);
	if (error)
		return error;
	free(q->ring);
	free(q);
	return 0;
}

API int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **user)
{
	ssize_t n = read(channel->fd, cq, sizeof *cq);
	if (n != sizeof *cq) {
		if (n >= 0)
			errno = EIO;
		return -1;
	}
	*user = (*cq)->cq_context;
	pthread_mutex_lock(&lock);
	((struct queue *)*cq)->unacknowledged++;
	pthread_mutex_unlock(&lock);
	return 0;
}

API void ibv_ack_cq_events(struct ibv_cq *cq, unsigned n)
{
	pthread_mutex_lock(&lock);
	((struct queue *)cq)->unacknowledged -= n;
	pthread_mutex_unlock(&lock);
}

// queue_push adds a completion; the lock is held.
void queue_push(struct ibv_cq *cq, struct ibv_wc wc)
{
	struct queue *q = (struct queue *)cq;
	if (q->count == q->capacity) {
		if (!q->overrun)
			device_event((struct context *)cq->context, (struct ibv_async_event){.element.cq = cq, .event_type = IBV_EVENT_CQ_ERR});
		q->overrun = true;
		return;
	}
	q->ring[(q->first + q->count++) % q->capacity] = wc;
	if (q->armed) {
		disarm(q);
		if (write(((struct channel *)cq->channel)->end, &cq, sizeof cq) != sizeof cq)
			host_log("event of a queue lost");
	}
}

// queue_forget takes a pair's completions out; the lock is held.
void queue_forget(struct ibv_cq *cq, uint32_t pair)
{
	struct queue *q = (struct queue *)cq;
	unsigned kept = 0;
	for (unsigned i = 0; i < q->count; i++) {
		struct ibv_wc wc = q->ring[(q->first + i) % q->capacity];
		if (wc.qp_num != pair)
			q->ring[(q->first + kept++) % q->capacity] = wc;
	}
	q->count = kept;
}

int queue_poll(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	struct queue *q = (struct queue *)cq;
	int got = 0;
	// A caller that looks again and again would keep the others from the lock.
	if (!__atomic_load_n(&q->count, __ATOMIC_ACQUIRE) && !rings_waiting())
		return 0;
	pthread_mutex_lock(&lock);
	rings_take();
	for (; got < n && q->count; got++, q->count--, q->first = (q->first + 1) % q->capacity)
		wc[got] = q->ring[q->first];
	pthread_mutex_unlock(&lock);
	return got;
}

int queue_arm(struct ibv_cq *cq, int solicited)
{
	(void)solicited;
	pthread_mutex_lock(&lock);
	rings_take(); // these came before
	if (cq->channel && !((struct queue *)cq)->armed) {
		((struct queue *)cq)->armed = true;
		armed++;
	}
	rings_arm();
	pthread_mutex_unlock(&lock);
	return 0;
}
