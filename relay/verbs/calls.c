#include "calls.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *load(const char *path, char *message, size_t n)
{
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!library) {
		const char *why = dlerror();
		snprintf(message, n, "%s", why ? why : "the loader gives no reason");
	}
	return library;
}

// dlsym gives the newest version of a symbol. The libraries stay open when one is
// missing: their providers cannot be unloaded.
#define FIND(name, result, parameters) \
	if (!(*(void **)&t->name = dlsym(library, #name))) { \
		snprintf(message, n, "%s", #name); \
		*missing = 1; \
		free(t); \
		return NULL; \
	}

peerlane_verbs *peerlane_verbs_open(const char *path, char *message, size_t n, int *missing)
{
	*missing = 0;
	void *library = load(path, message, n);
	if (!library)
		return NULL;
	peerlane_verbs *t = calloc(1, sizeof *t);
	if (!t) {
		snprintf(message, n, "out of memory");
		return NULL;
	}
	VERBS(FIND)
	t->library = library;
#define X(name, result, parameters) *(void **)&t->name = dlsym(library, #name);
	VERBS_OPTIONAL(X)
#undef X
	t->software = dlsym(library, "peerlane_software_device") != NULL;
	return t;
}

peerlane_manager *peerlane_manager_open(const char *path, char *message, size_t n, int *missing)
{
	*missing = 0;
	void *library = load(path, message, n);
	if (!library)
		return NULL;
	peerlane_manager *t = calloc(1, sizeof *t);
	if (!t) {
		snprintf(message, n, "out of memory");
		return NULL;
	}
	MANAGER(FIND)
	return t;
}

// Calls that return an errno, those that return -1 and set it, and those of some
// providers (siw) that return its negative, alike. One that sets none has failed all the
// same.
static int failed(int r)
{
	if (r >= 0)
		return r;
	if (r < -1)
		return -r;
	return errno ? errno : EIO;
}

// Calls that return a pointer.
#define MADE(to, call) \
	do { \
		errno = 0; \
		*(to) = (call); \
		return *(to) ? 0 : failed(-1); \
	} while (0)

int peerlane_devices(const peerlane_verbs *t, struct ibv_device ***list, int *n)
{
	MADE(list, t->ibv_get_device_list(n));
}

void peerlane_free_devices(const peerlane_verbs *t, struct ibv_device **list)
{
	t->ibv_free_device_list(list);
}

uint64_t peerlane_guid(const peerlane_verbs *t, struct ibv_device *device)
{
	return be64toh(t->ibv_get_device_guid(device));
}

int peerlane_open_device(const peerlane_verbs *t, struct ibv_device *device, struct ibv_context **context)
{
	MADE(context, t->ibv_open_device(device));
}

int peerlane_close_device(const peerlane_verbs *t, struct ibv_context *context)
{
	return failed(t->ibv_close_device(context));
}

int peerlane_unblock(int fd)
{
	int flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return errno;
	return 0;
}

int peerlane_query_device(const peerlane_verbs *t, struct ibv_context *context, struct ibv_device_attr *attributes)
{
	memset(attributes, 0, sizeof *attributes);
	int r = failed(t->ibv_query_device(context, attributes));
	attributes->node_guid = be64toh(attributes->node_guid);
	attributes->sys_image_guid = be64toh(attributes->sys_image_guid);
	return r;
}

int peerlane_query_port(const peerlane_verbs *t, struct ibv_context *context, uint8_t port, struct ibv_port_attr *attributes)
{
	memset(attributes, 0, sizeof *attributes);
	return failed(t->ibv_query_port(context, port, attributes));
}

int peerlane_query_gid(const peerlane_verbs *t, struct ibv_context *context, uint8_t port, uint32_t index, struct ibv_gid_entry *entry)
{
	return failed(t->_ibv_query_gid_ex(context, port, index, entry, 0, sizeof *entry));
}

int peerlane_async_event(const peerlane_verbs *t, struct ibv_context *context, int *kind, uint32_t *pair, int *port, uintptr_t *queue)
{
	struct ibv_async_event event;
	errno = 0;
	int r = failed(t->ibv_get_async_event(context, &event));
	if (r)
		return r;
	*kind = event.event_type;
	switch (event.event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		*pair = event.element.qp->qp_num;
		break;
	case IBV_EVENT_CQ_ERR:
		*queue = (uintptr_t)event.element.cq;
		break;
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
	case IBV_EVENT_GID_CHANGE:
		*port = event.element.port_num;
		break;
	}
	// Whoever destroys what it is about waits for this.
	t->ibv_ack_async_event(&event);
	return 0;
}

int peerlane_alloc_pd(const peerlane_verbs *t, struct ibv_context *context, struct ibv_pd **pd)
{
	MADE(pd, t->ibv_alloc_pd(context));
}

int peerlane_dealloc_pd(const peerlane_verbs *t, struct ibv_pd *pd)
{
	return failed(t->ibv_dealloc_pd(pd));
}

int peerlane_reg_mr(const peerlane_verbs *t, struct ibv_pd *pd, uintptr_t memory, size_t n, uint64_t iova, unsigned access, struct ibv_mr **mr)
{
	// As the header does: the newer call only for what it alone can do, so that
	// kernels and providers without optional access flags are not asked for them.
	if (iova == memory && !(access & ~0xfffffu))
		MADE(mr, t->ibv_reg_mr(pd, (void *)memory, n, (int)access));
	MADE(mr, t->ibv_reg_mr_iova2(pd, (void *)memory, n, iova, access));
}

int peerlane_reg_dmabuf_mr(const peerlane_verbs *t, struct ibv_pd *pd, uint64_t offset, size_t n, uint64_t iova, int fd, unsigned access, struct ibv_mr **mr)
{
	if (!t->ibv_reg_dmabuf_mr)
		return EOPNOTSUPP;
	MADE(mr, t->ibv_reg_dmabuf_mr(pd, offset, n, iova, fd, (int)access));
}

#define X(name, result, parameters) result (*name)(parameters);
typedef struct {
	MLX5(X)
} mlx5;
#undef X

// find_mlx5 fills the table from the library itself, or from the provider that libibverbs has loaded.
static int find_mlx5(const peerlane_verbs *t, mlx5 *m)
{
	void *provider = NULL;
#define X(name, result, parameters) \
	if (!(*(void **)&m->name = dlsym(t->library, #name))) { \
		if (!provider) \
			provider = dlopen("libmlx5.so.1", RTLD_LAZY | RTLD_NOLOAD); \
		if (!provider || !(*(void **)&m->name = dlsym(provider, #name))) \
			return EOPNOTSUPP; \
	}
	MLX5(X)
#undef X
	return 0;
}

int peerlane_data_direct(const peerlane_verbs *t, struct ibv_context *context)
{
	mlx5 m;
	char path[4096];
	return !find_mlx5(t, &m) && !m.mlx5dv_get_data_direct_sysfs_path(context, path, sizeof path);
}

int peerlane_reg_data_direct(const peerlane_verbs *t, struct ibv_pd *pd, uint64_t offset, size_t n, uint64_t iova, int fd, unsigned access, struct ibv_mr **mr)
{
	mlx5 m;
	int r = find_mlx5(t, &m);
	if (r)
		return r;
	MADE(mr, m.mlx5dv_reg_dmabuf_mr(pd, offset, n, iova, fd, (int)access, MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT));
}

int peerlane_dereg_mr(const peerlane_verbs *t, struct ibv_mr *mr)
{
	return failed(t->ibv_dereg_mr(mr));
}

int peerlane_create_cq(const peerlane_verbs *t, struct ibv_context *context, int entries, struct ibv_cq **cq)
{
	errno = 0;
	struct ibv_comp_channel *channel = t->ibv_create_comp_channel(context);
	if (!channel)
		return failed(-1);
	int r = peerlane_unblock(channel->fd);
	if (!r) {
		errno = 0;
		*cq = t->ibv_create_cq(context, entries, NULL, channel, 0);
		if (*cq)
			return 0;
		r = failed(-1);
	}
	t->ibv_destroy_comp_channel(channel);
	return r;
}

int peerlane_destroy_cq(const peerlane_verbs *t, struct ibv_cq *cq)
{
	struct ibv_comp_channel *channel = cq->channel;
	int r = failed(t->ibv_destroy_cq(cq));
	if (r)
		return r;
	return failed(t->ibv_destroy_comp_channel(channel));
}

int peerlane_resize_cq(const peerlane_verbs *t, struct ibv_cq *cq, int entries)
{
	errno = 0;
	return t->ibv_resize_cq ? failed(t->ibv_resize_cq(cq, entries)) : EOPNOTSUPP;
}

int peerlane_arm(struct ibv_cq *cq)
{
	errno = 0;
	return failed(cq->context->ops.req_notify_cq(cq, 0));
}

int peerlane_acknowledge(const peerlane_verbs *t, struct ibv_cq *cq)
{
	unsigned n = 0;
	int r;
	for (;;) {
		struct ibv_cq *which;
		void *user;
		errno = 0;
		r = failed(t->ibv_get_cq_event(cq->channel, &which, &user));
		if (r)
			break;
		n++;
	}
	if (n)
		t->ibv_ack_cq_events(cq, n);
	return r == EAGAIN || r == EWOULDBLOCK ? 0 : r;
}

enum { batch = 32 }; // of what goes through the stack at a time

int peerlane_poll(struct ibv_cq *cq, peerlane_completion *into, int n, int *got)
{
	struct ibv_wc wc[batch];
	*got = 0;
	errno = 0;
	while (*got < n) {
		int want = n - *got < batch ? n - *got : batch;
		int r = cq->context->ops.poll_cq(cq, want, wc);
		if (r < 0)
			return failed(r);
		for (int i = 0; i < r; i++) {
			peerlane_completion *c = &into[(*got)++];
			*c = (peerlane_completion){
				.id = wc[i].wr_id,
				.status = (uint32_t)wc[i].status,
				.pair = wc[i].qp_num,
				.vendor = wc[i].vendor_err,
			};
			if (wc[i].status != IBV_WC_SUCCESS)
				continue; // the others are undefined
			c->opcode = (uint32_t)wc[i].opcode;
			if (!(wc[i].opcode & IBV_WC_RECV))
				continue; // of sends devices say what they like: rxe has an immediate
			c->bytes = wc[i].byte_len;
			if (wc[i].wc_flags & IBV_WC_WITH_IMM) {
				c->has_immediate = 1;
				c->immediate = ntohl(wc[i].imm_data);
			}
		}
		if (r < want)
			break;
	}
	return 0;
}

int peerlane_create_qp(const peerlane_verbs *t, struct ibv_pd *pd, struct ibv_qp_init_attr *attributes, struct ibv_qp **qp)
{
	MADE(qp, t->ibv_create_qp(pd, attributes));
}

int peerlane_modify_qp(const peerlane_verbs *t, struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask)
{
	return failed(t->ibv_modify_qp(qp, attributes, mask));
}

int peerlane_query_qp(const peerlane_verbs *t, struct ibv_qp *qp, struct ibv_qp_attr *attributes)
{
	struct ibv_qp_init_attr made;
	return failed(t->ibv_query_qp(qp, attributes, IBV_QP_STATE, &made));
}

int peerlane_query_ece(const peerlane_verbs *t, struct ibv_qp *qp, struct ibv_ece *ece)
{
	memset(ece, 0, sizeof *ece);
	errno = 0;
	return t->ibv_query_ece ? failed(t->ibv_query_ece(qp, ece)) : EOPNOTSUPP;
}

int peerlane_set_ece(const peerlane_verbs *t, struct ibv_qp *qp, struct ibv_ece *ece)
{
	errno = 0;
	return t->ibv_set_ece ? failed(t->ibv_set_ece(qp, ece)) : EOPNOTSUPP;
}

int peerlane_destroy_qp(const peerlane_verbs *t, struct ibv_qp *qp)
{
	return failed(t->ibv_destroy_qp(qp));
}

int peerlane_post_send(struct ibv_qp *qp, const peerlane_send *sends, int n, int *posted)
{
	struct ibv_send_wr wr[batch];
	struct ibv_sge sge[batch];
	for (*posted = 0; *posted < n;) {
		int some = n - *posted < batch ? n - *posted : batch;
		for (int i = 0; i < some; i++) {
			const peerlane_send *s = &sends[*posted + i];
			sge[i] = (struct ibv_sge){.addr = s->address, .length = s->length, .lkey = s->lkey};
			wr[i] = (struct ibv_send_wr){
				.wr_id = s->id,
				.next = i + 1 < some ? &wr[i + 1] : NULL,
				.sg_list = &sge[i],
				.num_sge = s->length > 0,
				.opcode = (int)s->opcode,
				.send_flags = s->flags,
				.imm_data = htonl(s->immediate),
				.rdma = {.remote_addr = s->remote, .rkey = s->rkey},
			};
		}
		struct ibv_send_wr *bad = NULL;
		errno = 0;
		int r = failed(qp->context->ops.post_send(qp, wr, &bad));
		if (r) {
			*posted += bad ? (int)(bad - wr) : 0;
			return r;
		}
		*posted += some;
	}
	return 0;
}

int peerlane_post_recv(struct ibv_qp *qp, const peerlane_recv *receives, int n, int *posted)
{
	struct ibv_recv_wr wr[batch];
	struct ibv_sge sge[batch];
	for (*posted = 0; *posted < n;) {
		int some = n - *posted < batch ? n - *posted : batch;
		for (int i = 0; i < some; i++) {
			const peerlane_recv *v = &receives[*posted + i];
			sge[i] = (struct ibv_sge){.addr = v->address, .length = v->length, .lkey = v->lkey};
			wr[i] = (struct ibv_recv_wr){
				.wr_id = v->id,
				.next = i + 1 < some ? &wr[i + 1] : NULL,
				.sg_list = &sge[i],
				.num_sge = v->length > 0,
			};
		}
		struct ibv_recv_wr *bad = NULL;
		errno = 0;
		int r = failed(qp->context->ops.post_recv(qp, wr, &bad));
		if (r) {
			*posted += bad ? (int)(bad - wr) : 0;
			return r;
		}
		*posted += some;
	}
	return 0;
}

int peerlane_cm_channel(const peerlane_manager *t, struct rdma_event_channel **channel)
{
	errno = 0;
	*channel = t->rdma_create_event_channel();
	if (!*channel)
		return failed(-1);
	int r = peerlane_unblock((*channel)->fd);
	if (r)
		t->rdma_destroy_event_channel(*channel);
	return r;
}

void peerlane_cm_free_channel(const peerlane_manager *t, struct rdma_event_channel *channel)
{
	t->rdma_destroy_event_channel(channel);
}

#define CM(call) \
	do { \
		errno = 0; \
		return failed(call); \
	} while (0)

int peerlane_cm_id(const peerlane_manager *t, struct rdma_event_channel *channel, struct rdma_cm_id **id)
{
	CM(t->rdma_create_id(channel, id, NULL, RDMA_PS_TCP));
}

int peerlane_cm_destroy_id(const peerlane_manager *t, struct rdma_cm_id *id)
{
	CM(t->rdma_destroy_id(id));
}

int peerlane_cm_bind(const peerlane_manager *t, struct rdma_cm_id *id, struct sockaddr_storage *address)
{
	CM(t->rdma_bind_addr(id, (struct sockaddr *)address));
}

int peerlane_cm_resolve_address(const peerlane_manager *t, struct rdma_cm_id *id, struct sockaddr_storage *source, struct sockaddr_storage *destination, int milliseconds)
{
	CM(t->rdma_resolve_addr(id, source->ss_family ? (struct sockaddr *)source : NULL, (struct sockaddr *)destination, milliseconds));
}

int peerlane_cm_resolve_route(const peerlane_manager *t, struct rdma_cm_id *id, int milliseconds)
{
	CM(t->rdma_resolve_route(id, milliseconds));
}

int peerlane_cm_create_qp(const peerlane_manager *t, struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attributes)
{
	CM(t->rdma_create_qp(id, pd, attributes));
}

void peerlane_cm_destroy_qp(const peerlane_manager *t, struct rdma_cm_id *id)
{
	t->rdma_destroy_qp(id);
}

int peerlane_cm_connect(const peerlane_manager *t, struct rdma_cm_id *id, const void *data, const struct rdma_conn_param *parameters)
{
	struct rdma_conn_param p = *parameters;
	p.private_data = data;
	CM(t->rdma_connect(id, &p));
}

int peerlane_cm_accept(const peerlane_manager *t, struct rdma_cm_id *id, const void *data, const struct rdma_conn_param *parameters)
{
	struct rdma_conn_param p = *parameters;
	p.private_data = data;
	CM(t->rdma_accept(id, &p));
}

int peerlane_cm_listen(const peerlane_manager *t, struct rdma_cm_id *id, int backlog)
{
	CM(t->rdma_listen(id, backlog));
}

int peerlane_cm_reject(const peerlane_manager *t, struct rdma_cm_id *id, const void *data, uint8_t n)
{
	CM(t->rdma_reject(id, data, n));
}

int peerlane_cm_disconnect(const peerlane_manager *t, struct rdma_cm_id *id)
{
	CM(t->rdma_disconnect(id));
}

uint16_t peerlane_cm_port(const peerlane_manager *t, struct rdma_cm_id *id)
{
	return ntohs(t->rdma_get_src_port(id));
}

int peerlane_cm_next(const peerlane_manager *t, struct rdma_event_channel *channel, peerlane_cm_event *event)
{
	struct rdma_cm_event *e;
	errno = 0;
	int r = failed(t->rdma_get_cm_event(channel, &e));
	if (r)
		return r;
	*event = (peerlane_cm_event){
		.id = e->id,
		.listener = e->listen_id,
		.kind = e->event,
		.status = e->status,
		.bytes = e->param.conn.private_data ? e->param.conn.private_data_len : 0,
		.responder_resources = e->param.conn.responder_resources,
		.initiator_depth = e->param.conn.initiator_depth,
	};
	memcpy(event->data, e->param.conn.private_data, event->bytes);
	errno = 0;
	return failed(t->rdma_ack_cm_event(e));
}
