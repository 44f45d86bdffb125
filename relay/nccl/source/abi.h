/* What NCCL's network and tuner plugins look like to NCCL: the versions 8 to 12 of its
 * network interface, 4 and 5 of its tuner's, declared anew. A test has the sizes and
 * offsets that a compiler finds in NCCL's own headers. Sizes are bytes. */
#ifndef NCCL_ABI_H
#define NCCL_ABI_H

#include <stddef.h>
#include <stdint.h>

/* ncclResult_t */
enum {
	NCCL_SUCCESS = 0,
	NCCL_SYSTEM_ERROR = 2,
	NCCL_INTERNAL_ERROR = 3,
	NCCL_INVALID_ARGUMENT = 4,
	NCCL_INVALID_USAGE = 5,
	NCCL_REMOTE_ERROR = 6,
};

/* Levels and subsystems of ncclDebugLogger_t. */
enum { NCCL_LOG_WARN = 2, NCCL_LOG_INFO = 3 };
enum { NCCL_LOG_OF_INIT = 0x1, NCCL_LOG_OF_NET = 0x10 };

typedef void (*nccl_logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);
typedef int (*nccl_profiler)(void **event, int type, void *parent, int64_t plugin, void *data);

#define NCCL_HANDLE_BYTES 128
#define NCCL_MAX_REQUESTS 32 /* that a communicator has at once */
#define NCCL_MAX_RECEIVES 8  /* that we take as one */
#define NCCL_POINTER_HOST 1
#define NCCL_POINTER_CUDA 2
#define NCCL_DEVICE_HOST 0
#define NCCL_NO_ID (-1)

/* A receive whose completion NCCL does not need begins with this as its request. It
 * is a hint: a request of ours in its place, which ends when the bytes are there, is
 * as right. */
#define NCCL_OPTIONAL_RECEIVE_COMPLETION ((void *)0x1)

struct nccl_net_devices_of_4 {
	int count;
	int device[4];
};

struct nccl_net_devices_of_8 {
	int count;
	int device[8];
};

struct nccl_net_properties_v8 {
	const char *name;
	const char *pci_path;
	uint64_t guid;
	int pointers;
	int registration_is_global;
	int speed; /* Mbit/s */
	int port;
	float latency; /* µs */
	int max_communicators;
	int max_receives;
	int device_type;
	int device_version;
};

/* Version 10 is the same. */
struct nccl_net_properties_v9 {
	const char *name;
	const char *pci_path;
	uint64_t guid;
	int pointers;
	int registration_is_global;
	int force_flush;
	int speed;
	int port;
	float latency;
	int max_communicators;
	int max_receives;
	int device_type;
	int device_version;
	struct nccl_net_devices_of_4 of;
	size_t max_p2p_bytes;
	size_t max_collective_bytes;
};

struct nccl_net_properties_v11 {
	const char *name;
	const char *pci_path;
	uint64_t guid;
	int pointers;
	int registration_is_global;
	int force_flush;
	int speed;
	int port;
	float latency;
	int max_communicators;
	int max_receives;
	int device_type;
	int device_version;
	struct nccl_net_devices_of_4 of;
	size_t max_p2p_bytes;
	size_t max_collective_bytes;
	int max_multi_request;
};

struct nccl_net_properties_v12 {
	const char *name;
	const char *pci_path;
	uint64_t guid;
	int pointers;
	int registration_is_global;
	int force_flush;
	int speed;
	int port;
	float latency;
	int max_communicators;
	int max_receives;
	int device_type;
	int device_version;
	struct nccl_net_devices_of_8 of;
	size_t max_p2p_bytes;
	size_t max_collective_bytes;
	int max_multi_request;
	int16_t rail;
	int16_t plane;
};

/* What all versions have in the same places behind `receive`. */
#define NCCL_NET_REST \
	int (*flush)(void *communicator, int n, void **data, int *sizes, void **memories, void **request); \
	int (*test)(void *request, int *done, int *sizes); \
	int (*close_send)(void *communicator); \
	int (*close_receive)(void *communicator); \
	int (*close_listen)(void *listener); \
	int (*device_memory)(void *communicator, void *memory, void **device); \
	int (*receive_consumed)(void *communicator, int n, void *request)

#define NCCL_NET_MEMORY \
	int (*register_memory)(void *communicator, void *data, size_t bytes, int type, void **memory); \
	int (*register_dmabuf)(void *communicator, void *data, size_t bytes, int type, uint64_t offset, int fd, void **memory); \
	int (*deregister)(void *communicator, void *memory)

struct nccl_net_v8 {
	const char *name;
	int (*init)(nccl_logger);
	int (*devices)(int *n);
	int (*properties)(int device, struct nccl_net_properties_v8 *);
	int (*listen)(int device, void *handle, void **listener);
	int (*connect)(int device, void *handle, void **communicator, void **on_device);
	int (*accept)(void *listener, void **communicator, void **on_device);
	NCCL_NET_MEMORY;
	int (*send)(void *communicator, void *data, int bytes, int tag, void *memory, void **request);
	int (*receive)(void *communicator, int n, void **data, int *sizes, int *tags, void **memories, void **request);
	NCCL_NET_REST;
};

struct nccl_net_v9 {
	const char *name;
	int (*init)(nccl_logger);
	int (*devices)(int *n);
	int (*properties)(int device, struct nccl_net_properties_v9 *);
	int (*listen)(int device, void *handle, void **listener);
	int (*connect)(int device, void *handle, void **communicator, void **on_device);
	int (*accept)(void *listener, void **communicator, void **on_device);
	NCCL_NET_MEMORY;
	int (*send)(void *communicator, void *data, size_t bytes, int tag, void *memory, void **request);
	int (*receive)(void *communicator, int n, void **data, size_t *sizes, int *tags, void **memories, void **request);
	NCCL_NET_REST;
	int (*make_device)(int *device, struct nccl_net_devices_of_4 *);
};

struct nccl_net_v10 {
	const char *name;
	int (*init)(nccl_logger, nccl_profiler);
	int (*devices)(int *n);
	int (*properties)(int device, struct nccl_net_properties_v9 *);
	int (*listen)(int device, void *handle, void **listener);
	int (*connect)(int device, void *configuration, void *handle, void **communicator, void **on_device);
	int (*accept)(void *listener, void **communicator, void **on_device);
	NCCL_NET_MEMORY;
	int (*send)(void *communicator, void *data, size_t bytes, int tag, void *memory, void *profile, void **request);
	int (*receive)(void *communicator, int n, void **data, size_t *sizes, int *tags, void **memories, void **profiles, void **request);
	NCCL_NET_REST;
	int (*make_device)(int *device, struct nccl_net_devices_of_4 *);
};

#define NCCL_NET_V11(properties_of, devices_of) \
	const char *name; \
	int (*init)(void **context, uint64_t id, void *configuration, nccl_logger, nccl_profiler); \
	int (*devices)(int *n); \
	int (*properties)(int device, struct properties_of *); \
	int (*listen)(void *context, int device, void *handle, void **listener); \
	int (*connect)(void *context, int device, void *handle, void **communicator, void **on_device); \
	int (*accept)(void *listener, void **communicator, void **on_device); \
	NCCL_NET_MEMORY; \
	int (*send)(void *communicator, void *data, size_t bytes, int tag, void *memory, void *profile, void **request); \
	int (*receive)(void *communicator, int n, void **data, size_t *sizes, int *tags, void **memories, void **profiles, void **request); \
	NCCL_NET_REST; \
	int (*make_device)(int *device, struct devices_of *); \
	int (*finalize)(void *context); \
	int (*set_attributes)(void *context, void *attributes)

struct nccl_net_v11 {
	NCCL_NET_V11(nccl_net_properties_v11, nccl_net_devices_of_4);
};

struct nccl_net_v12 {
	NCCL_NET_V11(nccl_net_properties_v12, nccl_net_devices_of_8);
};

/* The tuner. A table of costs has a row for each algorithm and a column for each
 * protocol; a negative cost is never chosen. */
#define NCCL_PROTOCOL_LL 0
#define NCCL_PROTOCOL_LL128 1
#define NCCL_PROTOCOL_SIMPLE 2
#define NCCL_ALGORITHM_TREE 0
#define NCCL_ALGORITHM_RING 1
#define NCCL_ALGORITHM_PAT 6
#define NCCL_COST_NEVER (-1.0f)

/* The kinds of collectives (ncclFunc_t). */
enum {
	NCCL_BROADCAST = 0,
	NCCL_REDUCE = 1,
	NCCL_ALL_GATHER = 2,
	NCCL_REDUCE_SCATTER = 3,
	NCCL_ALL_REDUCE = 4,
};

struct nccl_tuner_v3 {
	const char *name;
	int (*init)(size_t ranks, size_t nodes, nccl_logger, void **context);
	int (*collective)(void *context, int kind, size_t bytes, int pipelined, float **costs, int algorithms, int protocols, int *channels);
	int (*destroy)(void *context);
};

struct nccl_tuner_v4 {
	const char *name;
	int (*init)(size_t ranks, size_t nodes, nccl_logger, void **context);
	int (*collective)(void *context, int kind, size_t bytes, int pipelined, float **costs, int algorithms, int protocols, int registered, int *channels);
	int (*destroy)(void *context);
};

struct nccl_tuner_v5 {
	const char *name;
	int (*init)(void **context, uint64_t id, size_t ranks, size_t nodes, nccl_logger, void *domains, void *constants);
	int (*collective)(void *context, int kind, size_t bytes, int pipelined, float **costs, int algorithms, int protocols, int registered, int *channels);
	int (*finalize)(void *context);
};

#endif
