/* The tables that NCCL looks for: one implementation, with the parameters of each
 * version. CollNet's are not there: it is not offered. */
#include "plugin.h"

#define EXPORTED __attribute__((visibility("default")))

/* --- init ------------------------------------------------------------------------- */

/* Up to version 10 there is no end, and one use of the relay stays. */
static int init_8(nccl_logger logger)
{
	struct relay *r;
	int error;

	set_logger(logger);
	if ((error = check_ll128(logger)))
		return error;
	error = use_relay(&r);
	if (!error)
		leave_relay(r);
	return error;
}

static int init_10(nccl_logger logger, nccl_profiler profiler)
{
	(void)profiler;
	return init_8(logger);
}

static int init_11(void **context, uint64_t id, void *configuration, nccl_logger logger, nccl_profiler profiler)
{
	struct relay *r = NULL;
	int error;

	(void)id, (void)configuration, (void)profiler;
	set_logger(logger);
	error = use_relay(&r);
	*context = r;
	return error;
}

/* --- properties --------------------------------------------------------------------- */

static int properties_8(int device, struct nccl_net_properties_v8 *to)
{
	struct nccl_net_properties_v12 p;
	int error = describe(device, &p);

	if (!error)
		*to = (struct nccl_net_properties_v8){p.name, p.pci_path, p.guid, p.pointers, p.registration_is_global, p.speed, p.port, p.latency,
			p.max_communicators, p.max_receives, p.device_type, p.device_version};
	return error;
}

#define COMMON(p) \
	p.name, p.pci_path, p.guid, p.pointers, p.registration_is_global, p.force_flush, p.speed, p.port, p.latency, p.max_communicators, p.max_receives, \
		p.device_type, p.device_version, {p.of.count, {p.of.device[0]}}, p.max_p2p_bytes, p.max_collective_bytes

static int properties_9(int device, struct nccl_net_properties_v9 *to)
{
	struct nccl_net_properties_v12 p;
	int error = describe(device, &p);

	if (!error)
		*to = (struct nccl_net_properties_v9){COMMON(p)};
	return error;
}

static int properties_11(int device, struct nccl_net_properties_v11 *to)
{
	struct nccl_net_properties_v12 p;
	int error = describe(device, &p);

	if (!error)
		*to = (struct nccl_net_properties_v11){COMMON(p), p.max_multi_request};
	return error;
}

/* --- connections --------------------------------------------------------------------- */

static int listen_8(int device, void *handle, void **listener) { return listen_on(NULL, device, handle, listener); }

static int listen_11(void *context, int device, void *handle, void **listener) { return listen_on(context, device, handle, listener); }

static int connect_11(void *context, int device, void *handle, void **communicator, void **on_gpu)
{
	if (on_gpu)
		*on_gpu = NULL;
	return connect_to(context, device, handle, communicator);
}

static int connect_8(int device, void *handle, void **communicator, void **on_gpu) { return connect_11(NULL, device, handle, communicator, on_gpu); }

static int connect_10(int device, void *configuration, void *handle, void **communicator, void **on_gpu)
{
	(void)configuration;
	return connect_11(NULL, device, handle, communicator, on_gpu);
}

static int set_attributes(void *context, void *attributes)
{
	(void)context, (void)attributes; /* hints, which we have no use for */
	return NCCL_SUCCESS;
}

/* --- transfers ----------------------------------------------------------------------- */

static int send_8(void *communicator, void *data, int bytes, int tag, void *memory, void **request)
{
	return bytes < 0 ? NCCL_INVALID_ARGUMENT : send_one(communicator, data, (size_t)bytes, tag, memory, request);
}

static int send_9(void *communicator, void *data, size_t bytes, int tag, void *memory, void **request)
{
	return send_one(communicator, data, bytes, tag, memory, request);
}

static int send_10(void *communicator, void *data, size_t bytes, int tag, void *memory, void *profile, void **request)
{
	(void)profile;
	return send_one(communicator, data, bytes, tag, memory, request);
}

static int receive_8(void *communicator, int n, void **data, int *sizes, int *tags, void **memories, void **request)
{
	size_t bytes[NCCL_MAX_RECEIVES];

	for (int i = 0; i < n && i < NCCL_MAX_RECEIVES; i++) {
		if (sizes[i] < 0)
			return NCCL_INVALID_ARGUMENT;
		bytes[i] = (size_t)sizes[i];
	}
	return receive_group(communicator, n, data, bytes, tags, memories, request);
}

static int receive_9(void *communicator, int n, void **data, size_t *sizes, int *tags, void **memories, void **request)
{
	return receive_group(communicator, n, data, sizes, tags, memories, request);
}

static int receive_10(void *communicator, int n, void **data, size_t *sizes, int *tags, void **memories, void **profiles, void **request)
{
	(void)profiles;
	return receive_group(communicator, n, data, sizes, tags, memories, request);
}

/* --- the tables ------------------------------------------------------------------------ */

#define TABLE(init_of, properties_of, listen_of, connect_of, send_of, receive_of) \
	.name = NAME, .init = init_of, .devices = count_devices, .properties = properties_of, .listen = listen_of, .connect = connect_of, \
	.accept = accept_from, .register_memory = register_memory, .deregister = deregister, .send = send_of, .receive = receive_of, \
	.flush = flush, .test = test, .close_send = close_communicator, .close_receive = close_communicator, .close_listen = close_listener

extern const struct nccl_net_v8 ncclNetPlugin_v8;
extern const struct nccl_net_v9 ncclNetPlugin_v9;
extern const struct nccl_net_v10 ncclNetPlugin_v10;
extern const struct nccl_net_v11 ncclNetPlugin_v11;
extern const struct nccl_net_v12 ncclNetPlugin_v12;

EXPORTED const struct nccl_net_v8 ncclNetPlugin_v8 = {TABLE(init_8, properties_8, listen_8, connect_8, send_8, receive_8)};
EXPORTED const struct nccl_net_v9 ncclNetPlugin_v9 = {TABLE(init_8, properties_9, listen_8, connect_8, send_9, receive_9)};
EXPORTED const struct nccl_net_v10 ncclNetPlugin_v10 = {TABLE(init_10, properties_9, listen_8, connect_10, send_10, receive_10)};
EXPORTED const struct nccl_net_v11 ncclNetPlugin_v11 = {TABLE(init_11, properties_11, listen_11, connect_11, send_10, receive_10),
	.finalize = finalize, .set_attributes = set_attributes};
EXPORTED const struct nccl_net_v12 ncclNetPlugin_v12 = {TABLE(init_11, describe, listen_11, connect_11, send_10, receive_10),
	.finalize = finalize, .set_attributes = set_attributes};
