// Tables of function pointers that calls.c fills from the libraries opened at run
// time, and what Go calls: a function for each call, because Go cannot call a C
// pointer. Each returns 0 or an errno, whatever the call's own habit is.
#ifndef PEERLANE_VERBS_CALLS_H
#define PEERLANE_VERBS_CALLS_H

#include "abi.h"

// Each is X(name, result, parameters); the symbol is the name.
#define A(...) __VA_ARGS__
#define VERBS(X) \
X(ibv_get_device_list, struct ibv_device **, A(int *n)) \
X(ibv_free_device_list, void, A(struct ibv_device **list)) \
X(ibv_get_device_guid, uint64_t, A(struct ibv_device *device)) \
X(ibv_open_device, struct ibv_context *, A(struct ibv_device *device)) \
X(ibv_close_device, int, A(struct ibv_context *context)) \
X(ibv_query_device, int, A(struct ibv_context *context, struct ibv_device_attr *attributes)) \
X(ibv_query_port, int, A(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attributes)) \
X(_ibv_query_gid_ex, int, \
	A(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry, uint32_t flags, size_t size)) \
X(ibv_get_async_event, int, A(struct ibv_context *context, struct ibv_async_event *event)) \
X(ibv_ack_async_event, void, A(struct ibv_async_event *event)) \
X(ibv_alloc_pd, struct ibv_pd *, A(struct ibv_context *context)) \
X(ibv_dealloc_pd, int, A(struct ibv_pd *pd)) \
X(ibv_reg_mr, struct ibv_mr *, A(struct ibv_pd *pd, void *memory, size_t n, int access)) \
X(ibv_reg_mr_iova2, struct ibv_mr *, A(struct ibv_pd *pd, void *memory, size_t n, uint64_t iova, unsigned access)) \
X(ibv_dereg_mr, int, A(struct ibv_mr *mr)) \
X(ibv_create_comp_channel, struct ibv_comp_channel *, A(struct ibv_context *context)) \
X(ibv_destroy_comp_channel, int, A(struct ibv_comp_channel *channel)) \
X(ibv_create_cq, struct ibv_cq *, \
	A(struct ibv_context *context, int entries, void *user, struct ibv_comp_channel *channel, int vector)) \
X(ibv_destroy_cq, int, A(struct ibv_cq *cq)) \
X(ibv_get_cq_event, int, A(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **user)) \
X(ibv_ack_cq_events, void, A(struct ibv_cq *cq, unsigned n)) \
X(ibv_create_qp, struct ibv_qp *, A(struct ibv_pd *pd, struct ibv_qp_init_attr *attributes)) \
X(ibv_modify_qp, int, A(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask)) \
X(ibv_query_qp, int, A(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask, struct ibv_qp_init_attr *made)) \
X(ibv_destroy_qp, int, A(struct ibv_qp *qp))

// Answered with EOPNOTSUPP where the library is too old for it.
#define VERBS_OPTIONAL(X) \
X(ibv_query_ece, int, A(struct ibv_qp *qp, struct ibv_ece *ece)) \
X(ibv_set_ece, int, A(struct ibv_qp *qp, struct ibv_ece *ece)) \
X(ibv_resize_cq, int, A(struct ibv_cq *cq, int entries)) \
X(ibv_reg_dmabuf_mr, struct ibv_mr *, A(struct ibv_pd *pd, uint64_t offset, size_t n, uint64_t iova, int fd, int access))

// Of libmlx5.so.1, if a provider has loaded it.
#define MLX5(X) \
X(mlx5dv_get_data_direct_sysfs_path, int, A(struct ibv_context *context, char *path, size_t n)) \
X(mlx5dv_reg_dmabuf_mr, struct ibv_mr *, \
	A(struct ibv_pd *pd, uint64_t offset, size_t n, uint64_t iova, int fd, int access, int mlx5_access))

#define MANAGER(X) \
X(rdma_create_event_channel, struct rdma_event_channel *, A(void)) \
X(rdma_destroy_event_channel, void, A(struct rdma_event_channel *channel)) \
X(rdma_create_id, int, A(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *user, int space)) \
X(rdma_destroy_id, int, A(struct rdma_cm_id *id)) \
X(rdma_bind_addr, int, A(struct rdma_cm_id *id, struct sockaddr *address)) \
X(rdma_resolve_addr, int, A(struct rdma_cm_id *id, struct sockaddr *source, struct sockaddr *destination, int milliseconds)) \
X(rdma_resolve_route, int, A(struct rdma_cm_id *id, int milliseconds)) \
X(rdma_create_qp, int, A(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attributes)) \
X(rdma_destroy_qp, void, A(struct rdma_cm_id *id)) \
X(rdma_connect, int, A(struct rdma_cm_id *id, struct rdma_conn_param *parameters)) \
X(rdma_listen, int, A(struct rdma_cm_id *id, int backlog)) \
X(rdma_accept, int, A(struct rdma_cm_id *id, struct rdma_conn_param *parameters)) \
X(rdma_reject, int, A(struct rdma_cm_id *id, const void *data, uint8_t n)) \
X(rdma_disconnect, int, A(struct rdma_cm_id *id)) \
X(rdma_get_cm_event, int, A(struct rdma_event_channel *channel, struct rdma_cm_event **event)) \
X(rdma_ack_cm_event, int, A(struct rdma_cm_event *event)) \
X(rdma_get_src_port, uint16_t, A(struct rdma_cm_id *id))

#define X(name, result, parameters) result (*name)(parameters);
typedef struct {
	VERBS(X)
	VERBS_OPTIONAL(X)
	void *library;
	int software;
} peerlane_verbs;
typedef struct {
	MANAGER(X)
} peerlane_manager;
#undef X

// Open the library at path and fill the table. On failure they return NULL and write
// the loader's message, or the name of the first symbol that is missing, into the
// buffer of n bytes; missing says which.
peerlane_verbs *peerlane_verbs_open(const char *path, char *message, size_t n, int *missing);
peerlane_manager *peerlane_manager_open(const char *path, char *message, size_t n, int *missing);

// Devices.
int peerlane_devices(const peerlane_verbs *t, struct ibv_device ***list, int *n);
void peerlane_free_devices(const peerlane_verbs *t, struct ibv_device **list);
uint64_t peerlane_guid(const peerlane_verbs *t, struct ibv_device *device); // in this machine's order
int peerlane_open_device(const peerlane_verbs *t, struct ibv_device *device, struct ibv_context **context);
int peerlane_close_device(const peerlane_verbs *t, struct ibv_context *context);
int peerlane_unblock(int fd);
int peerlane_query_device(const peerlane_verbs *t, struct ibv_context *context, struct ibv_device_attr *attributes);
int peerlane_query_port(const peerlane_verbs *t, struct ibv_context *context, uint8_t port, struct ibv_port_attr *attributes);
int peerlane_query_gid(const peerlane_verbs *t, struct ibv_context *context, uint8_t port, uint32_t index, struct ibv_gid_entry *entry);
// event gives the number of the queue pair or port, or the completion queue, that it is
// about, and acknowledges it.
int peerlane_async_event(const peerlane_verbs *t, struct ibv_context *context, int *kind, uint32_t *pair, int *port, uintptr_t *queue);

// Memory.
int peerlane_alloc_pd(const peerlane_verbs *t, struct ibv_context *context, struct ibv_pd **pd);
int peerlane_dealloc_pd(const peerlane_verbs *t, struct ibv_pd *pd);
int peerlane_reg_mr(const peerlane_verbs *t, struct ibv_pd *pd, uintptr_t memory, size_t n, uint64_t iova, unsigned access, struct ibv_mr **mr);
int peerlane_reg_dmabuf_mr(const peerlane_verbs *t, struct ibv_pd *pd, uint64_t offset, size_t n, uint64_t iova, int fd, unsigned access, struct ibv_mr **mr);
// peerlane_data_direct reports whether the device has a second PCIe function for GPUs' memory.
int peerlane_data_direct(const peerlane_verbs *t, struct ibv_context *context);
int peerlane_reg_data_direct(const peerlane_verbs *t, struct ibv_pd *pd, uint64_t offset, size_t n, uint64_t iova, int fd, unsigned access, struct ibv_mr **mr);
int peerlane_dereg_mr(const peerlane_verbs *t, struct ibv_mr *mr);

// Completion queues. peerlane_completion is Go's Completion.
typedef struct {
	uint64_t id;
	uint32_t status, opcode, bytes, immediate, pair, vendor;
	_Bool has_immediate;
} peerlane_completion;
int peerlane_create_cq(const peerlane_verbs *t, struct ibv_context *context, int entries, struct ibv_cq **cq);
int peerlane_destroy_cq(const peerlane_verbs *t, struct ibv_cq *cq);
int peerlane_resize_cq(const peerlane_verbs *t, struct ibv_cq *cq, int entries);
int peerlane_arm(struct ibv_cq *cq);
int peerlane_acknowledge(const peerlane_verbs *t, struct ibv_cq *cq);
int peerlane_poll(struct ibv_cq *cq, peerlane_completion *into, int n, int *got);

// Queue pairs. peerlane_send and peerlane_recv are Go's Send and Recv.
typedef struct {
	uint64_t id, address, remote;
	uint32_t length, lkey, rkey, immediate, opcode, flags;
} peerlane_send;
typedef struct {
	uint64_t id, address;
	uint32_t length, lkey;
} peerlane_recv;
int peerlane_create_qp(const peerlane_verbs *t, struct ibv_pd *pd, struct ibv_qp_init_attr *attributes, struct ibv_qp **qp);
int peerlane_modify_qp(const peerlane_verbs *t, struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask);
int peerlane_query_qp(const peerlane_verbs *t, struct ibv_qp *qp, struct ibv_qp_attr *attributes);
int peerlane_destroy_qp(const peerlane_verbs *t, struct ibv_qp *qp);
int peerlane_query_ece(const peerlane_verbs *t, struct ibv_qp *qp, struct ibv_ece *ece);
int peerlane_set_ece(const peerlane_verbs *t, struct ibv_qp *qp, struct ibv_ece *ece);
int peerlane_post_send(struct ibv_qp *qp, const peerlane_send *sends, int n, int *posted);
int peerlane_post_recv(struct ibv_qp *qp, const peerlane_recv *receives, int n, int *posted);

// The connection manager.
int peerlane_cm_channel(const peerlane_manager *t, struct rdma_event_channel **channel);
void peerlane_cm_free_channel(const peerlane_manager *t, struct rdma_event_channel *channel);
int peerlane_cm_id(const peerlane_manager *t, struct rdma_event_channel *channel, struct rdma_cm_id **id);
int peerlane_cm_destroy_id(const peerlane_manager *t, struct rdma_cm_id *id);
int peerlane_cm_bind(const peerlane_manager *t, struct rdma_cm_id *id, struct sockaddr_storage *address);
int peerlane_cm_resolve_address(const peerlane_manager *t, struct rdma_cm_id *id, struct sockaddr_storage *source, struct sockaddr_storage *destination, int milliseconds);
int peerlane_cm_resolve_route(const peerlane_manager *t, struct rdma_cm_id *id, int milliseconds);
int peerlane_cm_create_qp(const peerlane_manager *t, struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attributes);
void peerlane_cm_destroy_qp(const peerlane_manager *t, struct rdma_cm_id *id);
int peerlane_cm_connect(const peerlane_manager *t, struct rdma_cm_id *id, const void *data, const struct rdma_conn_param *parameters);
int peerlane_cm_accept(const peerlane_manager *t, struct rdma_cm_id *id, const void *data, const struct rdma_conn_param *parameters);
int peerlane_cm_listen(const peerlane_manager *t, struct rdma_cm_id *id, int backlog);
int peerlane_cm_reject(const peerlane_manager *t, struct rdma_cm_id *id, const void *data, uint8_t n);
int peerlane_cm_disconnect(const peerlane_manager *t, struct rdma_cm_id *id);
uint16_t peerlane_cm_port(const peerlane_manager *t, struct rdma_cm_id *id); // in this machine's order
// What an event carries is copied out of it, and it is acknowledged.
typedef struct {
	struct rdma_cm_id *id, *listener;
	int kind, status;
	uint8_t bytes, responder_resources, initiator_depth;
	uint8_t data[255];
} peerlane_cm_event;
int peerlane_cm_next(const peerlane_manager *t, struct rdma_event_channel *channel, peerlane_cm_event *event);

#endif
