// Queue pairs: their states, and what is posted to them.
#include "softdevice.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { ECE_VENDOR = 0x02c9 };

static const char *of(struct pair *p) { return p->context->device->ibv.name; }

API struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
	struct context *c = (struct context *)pd->context;
	struct rule rule = host_script("ibv_create_qp", pd->context->device->name);
	int error = rule.error;
	if (!error && (a->qp_type != IBV_QPT_RC || a->cap.max_send_sge > 1 || a->cap.max_recv_sge > 1 || a->cap.max_inline_data > INLINE ||
		       !a->cap.max_send_wr || a->cap.max_send_wr > 4096 || a->cap.max_recv_wr > 4096))
		error = EINVAL;
	struct pair *p = error ? NULL : calloc(1, sizeof *p);
	if (p) {
		p->sends.capacity = a->cap.max_send_wr;
		p->receives.capacity = a->cap.max_recv_wr;
		p->sends.ring = calloc(p->sends.capacity, sizeof *p->sends.ring);
		p->receives.ring = calloc(p->receives.capacity + 1, sizeof *p->receives.ring);
		p->outgoing = p->incoming = p->listener = p->connection = p->slot = -1;
		p->signal_all = a->sq_sig_all;
		p->context = c;
		p->ibv = (struct ibv_qp){
			.context = pd->context,
			.pd = pd,
			.send_cq = a->send_cq,
			.recv_cq = a->recv_cq,
			.qp_num = host_number() & 0xffffff,
			.qp_type = a->qp_type,
		};
		pthread_cond_init(&p->changed, NULL);
		p->ece = c->device->described.ece ? (struct ibv_ece){.vendor_id = ECE_VENDOR, .options = c->device->described.ece} : (struct ibv_ece){0};
		error = !p->sends.ring || !p->receives.ring || pipe2(p->wake, O_CLOEXEC) != 0 ? ENOMEM : wire_listen(p);
	} else if (!error) {
		error = ENOMEM;
	}
	host_log("ibv_create_qp device=%s qp=%u sends=%u receives=%u inline=%u = %d", pd->context->device->name, p ? p->ibv.qp_num : 0,
		a->cap.max_send_wr, a->cap.max_recv_wr, a->cap.max_inline_data, error);
	if (error) {
		free(p); // tests that get here end soon
		errno = error;
		return NULL;
	}
	a->cap.max_inline_data = INLINE;
	pthread_mutex_lock(&lock);
	((struct domain *)pd)->pairs++;
	((struct queue *)a->send_cq)->pairs++;
	((struct queue *)a->recv_cq)->pairs++;
	pthread_mutex_unlock(&lock);
	return &p->ibv;
}

static const int needed[] = {
	[IBV_QPS_INIT] = IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS,
	[IBV_QPS_RTR] = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
	[IBV_QPS_RTS] = IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
};

// changes takes the attributes of a step over, and says what is wrong with it.
static int changes(struct pair *p, const struct ibv_qp_attr *a, int mask)
{
	const struct description *d = &p->context->device->described;
	int to = a->qp_state;
	if (!(mask & IBV_QP_STATE))
		return EINVAL;
	if (to == IBV_QPS_ERR) {
		pair_fail(p, false);
		return 0;
	}
	if (to < IBV_QPS_INIT || to > IBV_QPS_RTS || p->ibv.state != to - 1 || (mask & needed[to]) != needed[to])
		return EINVAL;
	struct ibv_gid_entry own;
	if (to == IBV_QPS_INIT) {
		if (a->port_num != 1 || a->pkey_index != 0)
			return EINVAL;
		p->attributes.qp_access_flags = a->qp_access_flags;
	} else if (to == IBV_QPS_RTR) {
		if (d->transport == IBV_TRANSPORT_IWARP) // its connections are made by the connection manager
			return EINVAL;
		if (a->path_mtu < IBV_MTU_256 || a->path_mtu > IBV_MTU_4096 || a->ah_attr.port_num != 1)
			return EINVAL;
		if (a->ah_attr.is_global) {
			extern int _ibv_query_gid_ex(struct ibv_context *, uint32_t, uint32_t, struct ibv_gid_entry *, uint32_t, size_t);
			if (_ibv_query_gid_ex(&p->context->ibv, 1, a->ah_attr.grh.sgid_index, &own, 0, sizeof own) != 0)
				return EINVAL;
		} else if (d->link_layer == IBV_LINK_LAYER_ETHERNET || d->grh) {
			return EINVAL;
		}
		p->attributes.dest_qp_num = a->dest_qp_num;
		p->attributes.min_rnr_timer = a->min_rnr_timer;
		p->ibv.state = to;
		p->responding = pthread_create(&p->responder, NULL, wire_respond, p) == 0;
	} else {
		p->attributes.timeout = a->timeout;
		p->attributes.retry_cnt = a->retry_cnt;
		p->attributes.rnr_retry = a->rnr_retry;
		p->ibv.state = to;
		p->requesting = pthread_create(&p->requester, NULL, wire_request, p) == 0;
	}
	p->ibv.state = to;
	return 0;
}

void pair_connect(struct pair *p, uint32_t to, int connection)
{
	pthread_mutex_lock(&lock);
	if (p->ibv.state == IBV_QPS_INIT) {
		p->connection = connection;
		p->attributes.dest_qp_num = to;
		p->attributes.timeout = 14;
		p->attributes.rnr_retry = 7;
		p->ibv.state = IBV_QPS_RTS;
		p->responding = pthread_create(&p->responder, NULL, wire_respond, p) == 0;
		p->requesting = pthread_create(&p->requester, NULL, wire_request, p) == 0;
	}
	pthread_mutex_unlock(&lock);
}

API int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask)
{
	struct pair *p = (struct pair *)qp;
	struct rule rule = host_script("ibv_modify_qp", of(p));
	pthread_mutex_lock(&lock);
	int error = rule.error ? rule.error : changes(p, a, mask);
	pthread_mutex_unlock(&lock);
	if (!error && a->qp_state == IBV_QPS_RTR)
		engine_connect(p);
	if (a->qp_state == IBV_QPS_RTR)
		host_log("ibv_modify_qp device=%s qp=%u state=2 to=%u mtu=%d psn=%u lid=%u global=%u gid=%u class=%u level=%u hops=%u reads=%u timer=%u = %d", of(p),
			qp->qp_num, a->dest_qp_num, a->path_mtu, a->rq_psn, a->ah_attr.dlid, a->ah_attr.is_global, a->ah_attr.grh.sgid_index,
			a->ah_attr.grh.traffic_class, a->ah_attr.sl, a->ah_attr.grh.hop_limit, a->max_dest_rd_atomic, a->min_rnr_timer, error);
	else
		host_log("ibv_modify_qp device=%s qp=%u state=%d pkey=%u access=%#x psn=%u timeout=%u retries=%u rnr=%u reads=%u = %d", of(p), qp->qp_num, a->qp_state,
			a->pkey_index, a->qp_access_flags, a->sq_psn, a->timeout, a->retry_cnt, a->rnr_retry, a->max_rd_atomic, error);
	return error;
}

API int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask, struct ibv_qp_init_attr *made)
{
	(void)mask;
	(void)made;
	pthread_mutex_lock(&lock);
	a->qp_state = qp->state;
	pthread_mutex_unlock(&lock);
	return 0;
}

API int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	struct pair *p = (struct pair *)qp;
	*ece = p->ece;
	return p->context->device->described.ece ? 0 : EOPNOTSUPP;
}

API int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	struct pair *p = (struct pair *)qp;
	uint32_t own = p->context->device->described.ece;
	int error = !own || !ece->vendor_id ? EOPNOTSUPP : ece->vendor_id != ECE_VENDOR || ece->comp_mask || p->ibv.state != IBV_QPS_INIT ? EINVAL : 0;
	host_log("ibv_set_ece device=%s qp=%u options=%#x = %d", of(p), qp->qp_num, ece->options, error);
	if (!error)
		p->ece.options = own & ece->options;
	return error;
}

// end lets the threads of a pair come to their end; the lock is held.
static void end(struct pair *p)
{
	wire_close(p);
	if (p->outgoing >= 0)
		shutdown(p->outgoing, SHUT_RDWR);
	if (p->incoming >= 0)
		shutdown(p->incoming, SHUT_RDWR);
	if (p->connection >= 0)
		shutdown(p->connection, SHUT_RDWR);
	if (write(p->wake[1], "", 1) != 1)
		host_log("qp=%u: a wake lost", p->ibv.qp_num);
	pthread_cond_broadcast(&p->changed);
}

API int ibv_destroy_qp(struct ibv_qp *qp)
{
	struct pair *p = (struct pair *)qp;
	pthread_mutex_lock(&lock);
	host_log("ibv_destroy_qp device=%s qp=%u state=%d sends=%u receives=%u = 0", of(p), qp->qp_num, qp->state, p->sends.count, p->receives.count);
	rings_ready(p, false);
	p->stopping = true;
	end(p);
	pthread_mutex_unlock(&lock);
	engine_disconnect(p);
	if (p->requesting)
		pthread_join(p->requester, NULL);
	if (p->responding)
		pthread_join(p->responder, NULL);
	pthread_mutex_lock(&lock);
	queue_forget(qp->send_cq, qp->qp_num);
	queue_forget(qp->recv_cq, qp->qp_num);
	((struct domain *)qp->pd)->pairs--;
	((struct queue *)qp->send_cq)->pairs--;
	((struct queue *)qp->recv_cq)->pairs--;
	pthread_mutex_unlock(&lock);
	if (p->outgoing >= 0)
		close(p->outgoing);
	if (p->incoming >= 0)
		close(p->incoming);
	close(p->wake[0]);
	close(p->wake[1]);
	for (unsigned i = 0; i < p->sends.count; i++) {
		struct request *r = &p->sends.ring[(p->sends.first + i) % p->sends.capacity];
		if (r->move)
			engine_abandon(r->move);
	}
	free(p->sends.ring);
	free(p->receives.ring);
	free(p);
	return 0;
}

static const int ended[] = {
	[IBV_WR_RDMA_WRITE] = IBV_WC_RDMA_WRITE,
	[IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE,
	[IBV_WR_SEND] = IBV_WC_SEND,
	[IBV_WR_SEND_WITH_IMM] = IBV_WC_SEND,
	[IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ,
};

// pair_complete ends a send request; the lock is held.
void pair_complete(struct pair *p, const struct request *r, int status, uint32_t bytes)
{
	if (status == IBV_WC_SUCCESS && !(r->flags & IBV_SEND_SIGNALED) && !p->signal_all) {
		p->sends.unsignalled++;
		return;
	}
	p->sends.unsignalled = 0;
	queue_push(p->ibv.send_cq, (struct ibv_wc){
		.wr_id = r->id,
		.status = status,
		.opcode = ended[r->opcode],
		.vendor_err = status ? 0x50 + (uint32_t)status : 0,
		.byte_len = bytes,
		.qp_num = p->ibv.qp_num,
		// As rxe has it, though it says nothing about what was received.
		.imm_data = r->immediate,
		.wc_flags = r->opcode == IBV_WR_RDMA_WRITE_WITH_IMM || r->opcode == IBV_WR_SEND_WITH_IMM ? IBV_WC_WITH_IMM : 0,
	});
}

struct request pair_receive(struct pair *p)
{
	struct request r = p->receives.ring[p->receives.first];
	p->receives.first = (p->receives.first + 1) % p->receives.capacity;
	p->receives.count--;
	return r;
}

void pair_arrived(struct pair *p, uint32_t immediate, uint32_t bytes)
{
	queue_push(p->ibv.recv_cq, (struct ibv_wc){
		.wr_id = pair_receive(p).id,
		.opcode = IBV_WC_RECV_RDMA_WITH_IMM,
		.byte_len = bytes,
		.imm_data = immediate,
		.wc_flags = IBV_WC_WITH_IMM,
		.qp_num = p->ibv.qp_num,
	});
}

static void flush(struct pair *p, struct work *w, struct ibv_cq *cq)
{
	for (; w->count; w->count--, w->first = (w->first + 1) % w->capacity) {
		if (w->ring[w->first].move)
			engine_abandon(w->ring[w->first].move);
		queue_push(cq, (struct ibv_wc){
			.wr_id = w->ring[w->first].id,
			.status = IBV_WC_WR_FLUSH_ERR,
			.vendor_err = 0x50 + IBV_WC_WR_FLUSH_ERR,
			.qp_num = p->ibv.qp_num,
		});
	}
	w->unsignalled = 0;
	if (w == &p->sends)
		p->by_threads = 0;
}

void pair_fail(struct pair *p, bool event)
{
	if (p->ibv.state == IBV_QPS_ERR)
		return;
	rings_ready(p, false);
	if (p->ibv.state == IBV_QPS_ERR) // by a report
		return;
	p->ibv.state = IBV_QPS_ERR;
	flush(p, &p->sends, p->ibv.send_cq);
	flush(p, &p->receives, p->ibv.recv_cq);
	end(p);
	if (event)
		device_event(p->context, (struct ibv_async_event){.element.qp = &p->ibv, .event_type = IBV_EVENT_QP_ACCESS_ERR});
}

static struct request *place(struct work *w)
{
	if (w->count + w->unsignalled >= w->capacity)
		return NULL;
	return &w->ring[(w->first + w->count++) % w->capacity];
}

// post_send is one request; the lock is held.
static int post_send(struct pair *p, const struct ibv_send_wr *wr)
{
	const struct ibv_sge *s = wr->num_sge ? wr->sg_list : &(struct ibv_sge){0};
	if ((p->ibv.state != IBV_QPS_RTS && p->ibv.state != IBV_QPS_ERR) || wr->num_sge > 1 || wr->opcode < 0 || wr->opcode > IBV_WR_RDMA_READ)
		return EINVAL;
	bool inlined = wr->send_flags & IBV_SEND_INLINE;
	if (inlined && (s->length > INLINE || wr->opcode == IBV_WR_RDMA_READ))
		return EINVAL;
	if (wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM && p->context->device->described.transport == IBV_TRANSPORT_IWARP)
		return EINVAL;
	struct request *r = place(&p->sends);
	if (!r)
		return ENOMEM;
	*r = (struct request){
		.id = wr->wr_id,
		.address = s->addr,
		.remote = wr->rdma.remote_addr,
		.length = s->length,
		.lkey = s->lkey,
		.rkey = wr->rdma.rkey,
		.immediate = wr->imm_data,
		.opcode = wr->opcode,
		.flags = wr->send_flags,
	};
	if (inlined)
		memcpy(r->inlined, (void *)(uintptr_t)s->addr, s->length);
	if (p->ibv.state == IBV_QPS_ERR) {
		flush(p, &p->sends, p->ibv.send_cq);
	} else if (!rings_submit(p, r)) {
		p->by_threads++;
		pthread_cond_broadcast(&p->changed);
	}
	return 0;
}

int pair_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct pair *p = (struct pair *)qp;
	for (; wr; wr = wr->next) {
		struct rule rule = host_script("ibv_post_send", of(p));
		pthread_mutex_lock(&lock);
		int error = rule.error ? rule.error : post_send(p, wr);
		host_log("ibv_post_send device=%s qp=%u id=%llu op=%d flags=%#x length=%u lkey=%#x remote=%#llx rkey=%#x imm=%#x = %d", of(p), qp->qp_num,
			(unsigned long long)wr->wr_id, wr->opcode, wr->send_flags, wr->num_sge ? wr->sg_list->length : 0, wr->num_sge ? wr->sg_list->lkey : 0,
			(unsigned long long)wr->rdma.remote_addr, wr->rdma.rkey, ntohl(wr->imm_data), error);
		pthread_mutex_unlock(&lock);
		if (error) {
			*bad = wr;
			return error;
		}
	}
	return 0;
}

static int post_recv(struct pair *p, const struct ibv_recv_wr *wr)
{
	const struct ibv_sge *s = wr->num_sge ? wr->sg_list : &(struct ibv_sge){0};
	if (p->ibv.state == IBV_QPS_RESET || wr->num_sge > 1)
		return EINVAL;
	struct request *r = place(&p->receives);
	if (!r)
		return ENOMEM;
	*r = (struct request){.id = wr->wr_id, .address = s->addr, .length = s->length, .lkey = s->lkey};
	rings_posted(p);
	if (p->ibv.state == IBV_QPS_ERR)
		flush(p, &p->receives, p->ibv.recv_cq);
	return 0;
}

int pair_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct pair *p = (struct pair *)qp;
	for (; wr; wr = wr->next) {
		struct rule rule = host_script("ibv_post_recv", of(p));
		pthread_mutex_lock(&lock);
		int error = rule.error ? rule.error : post_recv(p, wr);
		host_log("ibv_post_recv device=%s qp=%u id=%llu length=%u lkey=%#x = %d", of(p), qp->qp_num, (unsigned long long)wr->wr_id,
			wr->num_sge ? wr->sg_list->length : 0, wr->num_sge ? wr->sg_list->lkey : 0, error);
		pthread_mutex_unlock(&lock);
		if (error) {
			*bad = wr;
			return error;
		}
	}
	return 0;
}
