/*
 * libpeerlane connects a program in a container to the container's relay. The program
 * exports GPU memory once, or has the relay allocate host memory, connects, and then
 * sends and receives without a system call or a CUDA call per operation.
 *
 *	peerlane_dial(NULL, NULL, 0, -1, &session);
 *	peerlane_export(session, &allocation, 1, &gpu, 0, &memory);
 *	peerlane_listen(session, &gpu, &listener, &handle);      receiver: publish the handle
 *	peerlane_accept(session, listener, -1, &receiving);
 *	peerlane_connect(session, &gpu, &handle, &sending);      sender
 *	peerlane_send(session, sending, memory, 0, n, NULL, &operation);
 *	peerlane_wait(session, operation, -1, &moved);
 *
 * Errors. A function that returns int returns a status: PEERLANE_STATUS_OK, which is 0,
 * or an error of peerlane_values.h or of enum peerlane_library_status. peerlane_error()
 * returns the message of the calling thread's last failure. On failure a function writes
 * no result through a pointer, unless its comment says otherwise.
 *
 * A failed session stays failed: every call returns the same status and message. A session
 * fails when the relay dies (PEERLANE_STATUS_RELAY_DIED), when the relay breaks the
 * protocol, and in a child after fork(). The failure ends pending operations with the same
 * status and sets all timelines to PEERLANE_TIMELINE_END, so that no stream waits for
 * ever. Close the session and dial again: the supervisor starts a new relay within seconds.
 *
 * Threads. Any thread may call any function, also on a shared session, with one exception:
 * peerlane_close() must be the last call on a session. peerlane_close() ends the waits of
 * other threads and then frees the session. The library works in the calling threads.
 * peerlane_timelines() and peerlane_register_timelines() start one library thread per
 * session, because from then on the GPU can wait for a timeline while no thread calls the
 * library and notices the relay's death. The library thread sleeps in poll(), takes no
 * signal and ends with the session. While the session has ended hand-overs (see
 * peerlane_hand_over()), the thread wakes every millisecond.
 *
 * fork(). A session belongs to the process that dialed. In a child of fork() the session
 * has failed with PEERLANE_STATUS_FORKED: the child has neither its descriptors nor its
 * shared memory, and the parent's session continues. The child may close the session and
 * may dial. All descriptors are O_CLOEXEC.
 *
 * The library raises no signal (not even SIGPIPE), installs no signal handler, never
 * exits, writes to no standard stream and reads one environment variable,
 * PEERLANE_CUDA_LIBRARY (see peerlane_export_pointer()). The library is not linked with
 * libcuda. dlclose() does not unload the library.
 *
 * The hot path is peerlane_send(), peerlane_receive(), peerlane_read(), peerlane_write(),
 * peerlane_read_list() and peerlane_write_list() except for the first list of a session,
 * peerlane_flush(), peerlane_test(), peerlane_poll(), and peerlane_wait() for an operation
 * that ends within 50 microseconds. The hot path allocates nothing and makes no system
 * call, with three exceptions: one write() that wakes an idle relay, futex calls when
 * threads contend for a session, and one check of the relay every 10 milliseconds while a
 * caller polls a pending operation.
 *
 * Sizes, offsets and lengths are bytes.
 */
#ifndef PEERLANE_H
#define PEERLANE_H

#include <stddef.h>
#include <stdint.h>

#include "peerlane_values.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(PEERLANE_BUILD)
#define PEERLANE_API __attribute__((visibility("default")))
#else
#define PEERLANE_API
#endif

/* Statuses of the library, in addition to enum peerlane_status of the relay. */
enum peerlane_library_status {
	PEERLANE_STATUS_PENDING = 1000, /* the operation has not ended; no failure, so no message */
	PEERLANE_STATUS_TIMED_OUT,      /* the caller's timeout expired */
	PEERLANE_STATUS_INVALID,        /* invalid argument */
	PEERLANE_STATUS_FULL,           /* too many operations: wait until some end, or take their results */
	PEERLANE_STATUS_NO_RELAY,       /* no relay listens on the socket */
	PEERLANE_STATUS_FORKED,         /* the session belongs to the parent process */
	PEERLANE_STATUS_SYSTEM,         /* a system call failed; the message names the call */
};

/* The path of the relay's socket in a container. */
#define PEERLANE_DEFAULT_SOCKET "/run/peerlane/relay.sock"

/* A session with a relay. A process may have several. */
typedef struct peerlane_session peerlane_session;

/* Objects of a session, numbered by the relay; 0 means no object. A call with an unknown
 * number, or with the number of a closed object, returns an error and changes nothing. */
typedef uint32_t peerlane_memory;
typedef uint32_t peerlane_listener;
typedef uint32_t peerlane_connection;

/* A posted send, receive or other operation; 0 means no operation. A session never reuses
 * a number. */
typedef uint64_t peerlane_operation;

/* A range of memory that the remote side of a connection may read or write. */
typedef uint32_t peerlane_region;

/* The UUID of a GPU, as cuDeviceGetUuid() and (in hexadecimal) `nvidia-smi -L` show it. */
typedef struct peerlane_gpu {
	uint8_t bytes[16];
} peerlane_gpu;

/* The address and the secret of a listener. Any program with the handle can connect. */
typedef struct peerlane_handle {
	uint8_t bytes[128];
} peerlane_handle;

/* The key of a region. A program with the key has the access of the region, on the
 * connections of the region. */
typedef struct peerlane_remote_key {
	uint8_t bytes[64];
} peerlane_remote_key;

/* --- errors ---------------------------------------------------------------- */

/* Returns the message of the calling thread's last failed call: operation, cause and
 * remedy. Before the first failure the message is "". The pointer is valid until the
 * thread's next call. */
PEERLANE_API const char *peerlane_error(void);

/* Returns the status of the calling thread's last failed call. */
PEERLANE_API int peerlane_error_status(void);

/* Returns a short description of any status, also of an unknown number. */
PEERLANE_API const char *peerlane_status_text(int status);

/* --- sessions -------------------------------------------------------------- */

/* Connects to a relay.
 *
 * socket: path of the relay's socket; NULL means PEERLANE_DEFAULT_SOCKET.
 * gpus, count: the GPUs whose memory the program will export, if already known; may be
 * NULL and 0. If no relay listens, the error message names the lanes of these GPUs.
 * timeout_ms: limit of the whole call in milliseconds; negative means one minute.
 *
 * Errors: PEERLANE_STATUS_NO_RELAY, PEERLANE_STATUS_VERSION, PEERLANE_STATUS_TIMED_OUT,
 * PEERLANE_STATUS_BUSY if the relay's connection queue stayed full until the timeout, or
 * the status with which the relay refuses the session. */
PEERLANE_API int peerlane_dial(const char *socket, const peerlane_gpu *gpus, unsigned count, int timeout_ms, peerlane_session **session);

/* Names the program of all sessions that this process dials from here on, for the reports of
 * the host (peerlane relay inspect and top): PEERLANE_PROGRAM_NCCL, PEERLANE_PROGRAM_NIXL, or 0,
 * which is the default. The program has no other effect. */
PEERLANE_API void peerlane_set_program(uint32_t program);

/* Ends the session and frees it; NULL is allowed. Returns when the relay no longer reads or
 * writes the exported memory, so that the program may free the memory; or after 30 seconds
 * if the relay does not release the memory. Pending operations fail with
 * PEERLANE_STATUS_CLOSED in the waiting threads. No thread may start another call with this
 * session, and no stream may use its timelines. */
PEERLANE_API void peerlane_close(peerlane_session *session);

/* Returns PEERLANE_STATUS_OK while the session works, and afterwards the status of its
 * failure. Checks that the relay is alive. */
PEERLANE_API int peerlane_session_status(peerlane_session *session);

/* Returns the negotiated version of the protocol; 0 for NULL. */
PEERLANE_API unsigned peerlane_protocol(const peerlane_session *session);

/* A lane of the container. */
struct peerlane_lane {
	peerlane_gpu gpu; /* zero if only the driver knows the UUID: the relay does not query the driver */
	uint32_t index;   /* NVML index on the host, the N of nvidia.com/gpu=N */
	uint32_t reserved;
};

/* Returns the lanes of this container, at most PEERLANE_MAX_LANES. Writes the first `room`
 * lanes to lanes, and the number of all lanes to count. */
PEERLANE_API int peerlane_lanes(peerlane_session *session, struct peerlane_lane *lanes, unsigned room, unsigned *count);

/* The NIC of a lane; of a lane with several NICs, the first. */
struct peerlane_nic {
	uint64_t guid; /* the GUID that NCCL reads; 0: unknown */
	uint32_t mbps; /* full rate of the fastest active port, 10^6 bits per second; 0: unknown */
	uint32_t port; /* number of that port; 0: unknown */
	char name[64]; /* name in /sys/class/infiniband; empty: the lane has no NIC, or reaches only this host */
};

/* Writes the NIC of the lane of a GPU. For a lane that reaches only this host (relay.scope),
 * mbps is the rate of the links between the GPU and its peers, and name is empty.
 * PEERLANE_STATUS_VERSION: the relay is too old to answer; the session continues. */
PEERLANE_API int peerlane_lane_nic(peerlane_session *session, const peerlane_gpu *gpu, struct peerlane_nic *nic);

/* Counters of the relay since its start, in bytes. */
struct peerlane_counters {
	uint64_t sent, received;  /* complete messages of all clients of the container */
	uint64_t direct, staged;  /* sent bytes by route */
	uint32_t servers;         /* used entries of `server` */
	uint32_t contexts;        /* CUDA contexts of the relay */
	struct {
		peerlane_gpu gpu;     /* a server GPU with staging of this relay; zero: host memory, of lanes that bounce */
		uint64_t in, out;     /* bytes that the relay copied into this staging, and out of it */
	} server[PEERLANE_MAX_SERVERS];
};

/* Returns the counters. size is sizeof(struct peerlane_counters) of the caller: the library
 * writes no more bytes, and sets members that the library does not know to zero. */
PEERLANE_API int peerlane_statistics(peerlane_session *session, struct peerlane_counters *counters, size_t size);

/* --- memory ---------------------------------------------------------------- */

/* An allocation to export. Set unused members to 0. */
struct peerlane_allocation {
	int fd;            /* POSIX file descriptor of a CUDA VMM allocation; the caller keeps and closes the descriptor */
	uint32_t kind;     /* PEERLANE_ALLOCATION_VMM */
	uint64_t bytes;    /* size of the whole allocation */
	uint64_t offset;   /* begin of the exported range in the allocation */
	uint64_t length;   /* length of the exported range; 0: up to the end of the allocation */
	uint64_t reserved[4];
};

#define PEERLANE_ALLOCATION_VMM 0

/* Lets the relay map GPU memory of this process.
 *
 * list, count: the allocations of one range, in order, at most PEERLANE_MAX_PARTS; for
 * instance a range of PyTorch's expandable segments. In a list of several allocations only
 * the first may have an offset, and only the last may end before its allocation.
 * gpu: the GPU of the memory.
 * access: PEERLANE_ACCESS_SEND, PEERLANE_ACCESS_RECEIVE or both; 0 means both.
 *
 * The first export may take seconds, because the relay creates its CUDA context.
 * Errors: PEERLANE_STATUS_WRONG_GPU, PEERLANE_STATUS_BAD_DESCRIPTOR,
 * PEERLANE_STATUS_OUT_OF_RANGE, PEERLANE_STATUS_LIMIT, and statuses of the driver. */
PEERLANE_API int peerlane_export(peerlane_session *session, const struct peerlane_allocation *list, unsigned count,
	const peerlane_gpu *gpu, uint32_t access, peerlane_memory *memory);

/* Exports memory of cudaMalloc (cuMemAlloc), by the handle of cuIpcGetMemHandle, if the
 * administrator (relay.cuda_ipc) and the driver permit CUDA IPC. offset, length: the range
 * that cuMemGetAddressRange returns. On route direct the memory cannot be a receive buffer.
 * Free the memory only after peerlane_unexport() has returned and the operations on the
 * memory have ended. */
PEERLANE_API int peerlane_export_ipc(peerlane_session *session, const uint8_t handle[64], uint64_t offset, uint64_t length,
	const peerlane_gpu *gpu, uint32_t access, peerlane_memory *memory);

/* Has the relay allocate host memory for the lane of a GPU. The memory is zero at first.
 * Connections of that lane send from the memory and receive into it; the remote side may use
 * GPU memory or host memory. The library maps the memory at *data until peerlane_unexport()
 * or peerlane_close(), and calls no CUDA function. Children of fork() share the mapping. */
PEERLANE_API int peerlane_host_memory(peerlane_session *session, uint64_t bytes, const peerlane_gpu *gpu, uint32_t access,
	void **data, peerlane_memory *memory);

/* Staging memory, which this process copies to and from. */
struct peerlane_staged {
	peerlane_memory memory;
	uint32_t server_index; /* NVML index, on the host, of the server GPU with the memory */
	peerlane_gpu server;   /* that server GPU */
	uint64_t address;      /* address of the memory for streams of the requested lane's GPU */
	uint64_t bytes;        /* size, at least the requested size */
};

/* Has the relay allocate memory on a server GPU of the lane of a GPU, and maps the memory
 * for that GPU alone. To send, a stream copies into the memory (cuMemcpyAsync) and writes the
 * timeline that the send waits for (PEERLANE_AFTER). To receive, a stream waits for the
 * timeline that the receive advances (PEERLANE_SIGNAL) and copies out. On route staged the
 * relay makes no further copy: the NIC reads and writes the memory in place. A copy into the
 * memory before the end of a send may change the sent bytes.
 *
 * The container needs peerlane.dev/gpu= of the GPU, which adds the server GPU's device node;
 * CUDA_VISIBLE_DEVICES may hide the server GPU. The library creates no context on the server
 * GPU, and finds CUDA as peerlane_export_pointer() does. The memory is not zeroed.
 * peerlane_unexport() and peerlane_close() unmap the memory: no stream may use it at that
 * time. A child of fork() does not have the mapping.
 *
 * Errors: PEERLANE_STATUS_NOT_PERMITTED (no gpu=), PEERLANE_STATUS_NO_STAGING (the GPU is
 * near its NICs, no server GPU has room, or the host's account has none left),
 * PEERLANE_STATUS_LIMIT, PEERLANE_STATUS_NO_CUDA, PEERLANE_STATUS_CUDA. */
PEERLANE_API int peerlane_staging_memory(peerlane_session *session, uint64_t bytes, const peerlane_gpu *gpu, uint32_t access,
	struct peerlane_staged *staged);

/* Exports [pointer, pointer+length) of CUDA VMM memory (cuMemCreate with a POSIX file
 * descriptor handle, cuMemMap): of one allocation, or of several adjacent allocations.
 *
 * Calls the CUDA driver that the process has loaded as libcuda.so.1, or under the name in
 * PEERLANE_CUDA_LIBRARY. The library does not load a driver: PEERLANE_STATUS_NO_CUDA. A
 * context must be current. PEERLANE_STATUS_CUDA if a driver call fails, for instance because
 * the memory is not VMM memory.
 *
 * For a GPU near its NICs the library also passes the relay a DMA-BUF of the allocations, so
 * that NICs read and write the memory in place: allocate with gpuDirectRDMACapable. */
PEERLANE_API int peerlane_export_pointer(peerlane_session *session, const void *pointer, uint64_t length, uint32_t access, peerlane_memory *memory);

/* Exports [pointer, pointer+length) of one allocation of cudaMalloc as peerlane_export_ipc()
 * does, with the driver that peerlane_export_pointer() finds. PEERLANE_STATUS_CUDA also if
 * the memory has no IPC handle. */
PEERLANE_API int peerlane_export_pointer_ipc(peerlane_session *session, const void *pointer, uint64_t length, uint32_t access, peerlane_memory *memory);

/* Writes an id of the GPU memory at [pointer, pointer+length), in one allocation or several.
 * Memory that later has the same address has another id. The id is valid within this process
 * alone. Finds CUDA as peerlane_export_pointer() does. PEERLANE_STATUS_CUDA also if CUDA has
 * no id for the memory. */
PEERLANE_API int peerlane_pointer_id(const void *pointer, uint64_t length, uint64_t *id);

/* Ends the export of a memory. No new operation can use the memory. The relay's mapping,
 * which pins the memory, stays until pending operations on the memory have ended. Revokes the
 * memory's regions, and like peerlane_revoke() returns when no operation of a remote program
 * accesses the memory. Pending operations of this program may continue after the return.
 * Unmaps host memory and staging memory in this process, also in a failed session. */
PEERLANE_API int peerlane_unexport(peerlane_session *session, peerlane_memory memory);

/* --- connections ----------------------------------------------------------- */

/* Creates a listener. Its connections receive into memory of this GPU. */
PEERLANE_API int peerlane_listen(peerlane_session *session, const peerlane_gpu *gpu, peerlane_listener *listener, peerlane_handle *handle);

/* Waits for a sender. timeout_ms: milliseconds; negative: no limit; 0: no wait. After
 * PEERLANE_STATUS_TIMED_OUT the next accept gets the next sender. With timeout 0 also
 * PEERLANE_STATUS_FULL: the relay takes no requests at the moment. */
PEERLANE_API int peerlane_accept(peerlane_session *session, peerlane_listener listener, int timeout_ms, peerlane_connection *connection);

/* Closes a listener. Accepted connections stay open; waiting accepts fail. */
PEERLANE_API int peerlane_unlisten(peerlane_session *session, peerlane_listener listener);

/* Connects to the listener of a handle, to send from memory of this GPU.
 * Errors: PEERLANE_STATUS_BAD_HANDLE, PEERLANE_STATUS_UNREACHABLE, and errors of the lane. */
PEERLANE_API int peerlane_connect(peerlane_session *session, const peerlane_gpu *gpu, const peerlane_handle *handle, peerlane_connection *connection);

/* A connect in progress; 0 means none. */
typedef uint32_t peerlane_attempt;

/* Starts a connect and returns at once, for programs that poll. The program must call
 * peerlane_connect_finish(). PEERLANE_STATUS_FULL: the relay takes no requests at the moment,
 * or the session has 16 unanswered attempts. */
PEERLANE_API int peerlane_connect_begin(peerlane_session *session, const peerlane_gpu *gpu, const peerlane_handle *handle, peerlane_attempt *attempt);

/* Waits for the result of a connect, as peerlane_connect() returns it. timeout_ms:
 * milliseconds; negative: no limit; 0: no wait. After PEERLANE_STATUS_TIMED_OUT the attempt
 * continues; any other status ends the attempt. Only one thread may call the function for an
 * attempt. */
PEERLANE_API int peerlane_connect_finish(peerlane_session *session, peerlane_attempt attempt, int timeout_ms, peerlane_connection *connection);

/* Closes a connection for both sides. The number is invalid afterwards. Closing a connection
 * that is down is no error. */
PEERLANE_API int peerlane_disconnect(peerlane_session *session, peerlane_connection connection);

struct peerlane_connection_info {
	uint32_t route;  /* PEERLANE_ROUTE_STAGED or PEERLANE_ROUTE_DIRECT */
	int32_t status;  /* PEERLANE_STATUS_OK while the connection is up, then the cause of its end */
	char peer[112];  /* description of the remote side */
};

/* Writes the known state of a connection, without a request to the relay. Returns
 * PEERLANE_STATUS_OK also for a connection that is down; peerlane_connection_status() has the
 * message. */
PEERLANE_API int peerlane_connection_get(peerlane_session *session, peerlane_connection connection, struct peerlane_connection_info *info);

/* Returns PEERLANE_STATUS_OK while the connection is up, and afterwards the cause of its
 * end. */
PEERLANE_API int peerlane_connection_status(peerlane_session *session, peerlane_connection connection);

/* --- operations ------------------------------------------------------------ */

/* Options of an operation. All zero: no options. */
struct peerlane_options {
	uint64_t tag;             /* a message matches only receives with the same tag */
	uint64_t context;         /* a value of the caller; peerlane_poll() returns it */
	uint32_t flags;           /* PEERLANE_AFTER, PEERLANE_SIGNAL, PEERLANE_AFTER_EVENT, PEERLANE_BUFFERED; or PEERLANE_HAND_OVER */
	uint32_t after_event;     /* PEERLANE_AFTER_EVENT: start when this event has completed */
	uint32_t after_timeline;  /* PEERLANE_AFTER: start when this timeline has reached after_value */
	uint32_t signal_timeline; /* PEERLANE_SIGNAL: at the end, also after an error, the relay sets this timeline to signal_value */
	uint64_t after_value;     /* operations of a connection start in their order */
	uint64_t signal_value;    /* receives of a connection end in the order in which their messages were sent */
};

#define PEERLANE_AFTER 1u
#define PEERLANE_SIGNAL 2u
#define PEERLANE_HAND_OVER 4u /* start in the relay's turn of after_timeline, and end the turn: see peerlane_hand_over() */
#define PEERLANE_AFTER_EVENT 8u
#define PEERLANE_BUFFERED 16u  /* the send may end when the relay has copied the bytes: see peerlane_send() */

/* Posts a message of `length` bytes. options may be NULL.
 *
 * operation: the number of the operation. peerlane_test(), peerlane_wait() or peerlane_poll()
 * must take the result. NULL: the library drops the result at the end of the operation.
 *
 * PEERLANE_BUFFERED: where the receiver uses the same GPU, the send can end before its delivery,
 * when the relay has copied the bytes into host memory. peerlane_flush() waits for the delivery
 * and reports a failure. peerlane_disconnect() and peerlane_close() do not wait.
 *
 * PEERLANE_STATUS_FULL: the relay has not started the last PEERLANE_RING_ENTRIES operations,
 * or PEERLANE_MAX_OPERATIONS results are not taken. If the relay refuses the operation, for
 * instance because the range is outside the memory, the result has the error. */
PEERLANE_API int peerlane_send(peerlane_session *session, peerlane_connection connection, peerlane_memory memory,
	uint64_t offset, uint64_t length, const struct peerlane_options *options, peerlane_operation *operation);

/* Posts a receive of a message of at most `length` bytes. Options, operation and errors are
 * as for peerlane_send(). */
PEERLANE_API int peerlane_receive(peerlane_session *session, peerlane_connection connection, peerlane_memory memory,
	uint64_t offset, uint64_t length, const struct peerlane_options *options, peerlane_operation *operation);

/* Posts an operation that ends after all operations posted earlier on the connection: sent and
 * written bytes are in the remote memory then. If an operation has failed since the last
 * flush, the flush ends with the status of the first failure. */
PEERLANE_API int peerlane_flush(peerlane_session *session, peerlane_connection connection,
	const struct peerlane_options *options, peerlane_operation *operation);

/* Limit of a session's operations without a taken result. */
#define PEERLANE_MAX_OPERATIONS 4096

/* Takes the result of an operation: PEERLANE_STATUS_PENDING before its end,
 * PEERLANE_STATUS_OK if the bytes are in the receiver's memory (send) or in this memory
 * (receive), or the error.
 * moved: written at the end of the operation, the number of moved bytes; may be NULL. After
 * the result is taken, further calls return PEERLANE_STATUS_INVALID. */
PEERLANE_API int peerlane_test(peerlane_session *session, peerlane_operation operation, uint64_t *moved);

/* Waits for the end of an operation and takes the result as peerlane_test() does.
 * timeout_ms: milliseconds; negative: no limit. After PEERLANE_STATUS_TIMED_OUT the operation
 * continues. The function spins for 50 microseconds before it sleeps. */
PEERLANE_API int peerlane_wait(peerlane_session *session, peerlane_operation operation, int timeout_ms, uint64_t *moved);

/* Asks the relay to cancel an operation of which no byte has moved. The program still takes
 * the result: PEERLANE_STATUS_CANCELED, or the result of an operation that had begun. */
PEERLANE_API int peerlane_cancel(peerlane_session *session, peerlane_operation operation);

/* Drops the result of an operation, now or at the end of the operation. */
PEERLANE_API int peerlane_forget(peerlane_session *session, peerlane_operation operation);

struct peerlane_result {
	peerlane_operation operation;
	uint64_t moved;    /* bytes */
	uint64_t context;  /* context of the operation's options */
	int32_t status;    /* status as of peerlane_test(), without a message */
	peerlane_connection connection;
};

/* Takes the results of up to `room` ended operations, in the order of their ends, and writes
 * their number to count. Skips operations for which a thread waits in peerlane_wait(). Does
 * not wait. A failed session returns the results of all operations first, and then its
 * status. */
PEERLANE_API int peerlane_poll(peerlane_session *session, struct peerlane_result *results, unsigned room, unsigned *count);

/* Writes a descriptor for poll(), select() and epoll. The descriptor is readable when
 * peerlane_poll() or peerlane_test() may have a result, peerlane_accept() or
 * peerlane_connect_finish() may have the answer that an earlier call did not wait for, or the
 * session has failed. Call peerlane_poll() until it returns no result, and then the other two
 * with timeout 0, before you wait for the descriptor. The session
 * keeps and closes the descriptor. From this call on the relay makes a system call for each
 * ended operation; a program that only polls, or waits in peerlane_wait(), is faster without
 * the descriptor. */
PEERLANE_API int peerlane_event_descriptor(peerlane_session *session, int *fd);

/* --- one-sided operations -------------------------------------------------- */

/* The side that accepted a connection exposes memory; the side that connected reads and
 * writes the memory. The relays move the bytes without the process that exposes the
 * memory: the process may be stopped.
 *
 *	peerlane_expose(session, listener, 0, memory, 0, n, PEERLANE_REMOTE_READ, &region, &key);
 *	publish the key, for instance in a message
 *	peerlane_read(session, sending, local, 0, n, &key, 0, NULL, &operation);      remote side */

/* Exposes [offset, offset+length) of a memory to the present and later connections of a
 * listener, accepted or not, or to one connection that this process accepted; the other
 * argument is 0. The memory must be of the GPU of the listener's or connection's lane.
 *
 * access: PEERLANE_REMOTE_READ, which needs memory exported with PEERLANE_ACCESS_SEND,
 * PEERLANE_REMOTE_WRITE, which needs PEERLANE_ACCESS_RECEIVE, or both.
 *
 * Errors: PEERLANE_STATUS_NOT_PERMITTED, PEERLANE_STATUS_OUT_OF_RANGE,
 * PEERLANE_STATUS_WRONG_GPU, PEERLANE_STATUS_LIMIT (PEERLANE_MAX_REGIONS). */
PEERLANE_API int peerlane_expose(peerlane_session *session, peerlane_listener listener, peerlane_connection connection,
	peerlane_memory memory, uint64_t offset, uint64_t length, uint32_t access, peerlane_region *region, peerlane_remote_key *key);

/* Ends the access to a region, and returns when no operation on the region accesses the
 * memory. Started operations continue to their end; peerlane_disconnect() ends them.
 * PEERLANE_STATUS_TIMED_OUT after a minute: no new operation starts, and some have not ended.
 * peerlane_unexport() revokes the regions of a memory. */
PEERLANE_API int peerlane_revoke(peerlane_session *session, peerlane_region region);

/* Writes `length` bytes of a local memory to byte `at` of a region of the remote side. The
 * operation ends when the bytes are in the remote memory. An operation of 0 bytes checks the
 * access. Options, operation and PEERLANE_STATUS_FULL are as for peerlane_send().
 *
 * Sends, reads and writes start in the order in which the program posts them, and end in any
 * order. Wait for the end of an operation, or for peerlane_flush(), before you post an
 * operation that depends on it.
 *
 * After failed queue pairs the relays repeat a write from its first byte: a program at the
 * remote side that polls the memory can see bytes of a write a second time, also when it has
 * changed them.
 *
 * Results: PEERLANE_STATUS_BAD_KEY if the key names no region of this connection, or a
 * revoked region; PEERLANE_STATUS_OUT_OF_RANGE beyond the bounds of the region;
 * PEERLANE_STATUS_NOT_PERMITTED if the region is read-only. The call returns
 * PEERLANE_STATUS_BAD_KEY for bytes that are no key. */
PEERLANE_API int peerlane_write(peerlane_session *session, peerlane_connection connection, peerlane_memory memory,
	uint64_t offset, uint64_t length, const peerlane_remote_key *key, uint64_t at, const struct peerlane_options *options,
	peerlane_operation *operation);

/* Reads `length` bytes from byte `at` of a region of the remote side into a local memory;
 * options, operation, order and results are as for peerlane_write(). The first read of a
 * connection opens a reverse connection, which counts among the connections of both sides. If
 * the relays cannot open the reverse connection, reads end with
 * PEERLANE_STATUS_NO_REVERSE_CONNECTION, the connection stays up, and the relays' logs have
 * the cause. Reads fail the same way for one second; a later read tries again. */
PEERLANE_API int peerlane_read(peerlane_session *session, peerlane_connection connection, peerlane_memory memory,
	uint64_t offset, uint64_t length, const peerlane_remote_key *key, uint64_t at, const struct peerlane_options *options,
	peerlane_operation *operation);

/* --- lists ----------------------------------------------------------------- */

/* A list reads or writes many ranges in one operation: one entry of the ring, one result. The
 * relays merge the transfers of adjacent entries. */

/* `length` bytes, at least 1, at `offset` of a local memory, and from byte `at` of the region
 * of the key. */
struct peerlane_list_entry {
	peerlane_memory memory;
	uint32_t reserved;              /* 0 */
	uint64_t offset;
	uint64_t length;
	uint64_t at;
	const peerlane_remote_key *key; /* use one pointer for consecutive entries of a region: the library compares pointers */
};

/* Writes or reads the entries, each as peerlane_write() or peerlane_read() does. The library
 * copies the entries before the function returns. The operation ends when all bytes are in
 * the destination. Entries have no order: no two entries may have a destination byte in
 * common. The memories must stay exported until the operation ends.
 *
 * If an entry fails, no further entry starts, and the result is the status of the first failed
 * entry. The library writes the index of that entry to `failed`, which may be NULL, before the
 * program can take the result: the variable must exist until the operation ends or the session
 * is closed. Of the remaining entries each is either moved completely or not at all; `moved` is
 * the sum. If the connection or the session ends, an entry may be moved in part.
 * peerlane_cancel() ends a list with entries that have not started.
 *
 * The first list of a session makes a system call and waits until the relay has allocated the
 * memory of lists. The pending lists of a session have at most PEERLANE_MAX_LIST_ENTRIES
 * entries together: else PEERLANE_STATUS_FULL. PEERLANE_STATUS_VERSION: this relay is too old;
 * as a result, the remote relay is too old. */
PEERLANE_API int peerlane_write_list(peerlane_session *session, peerlane_connection connection,
	const struct peerlane_list_entry *entries, uint32_t count, const struct peerlane_options *options, uint32_t *failed,
	peerlane_operation *operation);
PEERLANE_API int peerlane_read_list(peerlane_session *session, peerlane_connection connection,
	const struct peerlane_list_entry *entries, uint32_t count, const struct peerlane_options *options, uint32_t *failed,
	peerlane_operation *operation);

/* --- timelines ------------------------------------------------------------- */

/* A session has PEERLANE_TIMELINES 64-bit counters, numbered from 0, in memory shared with the
 * relay. The counters start at 0. An operation can wait for one timeline and advance one; so
 * can a stream of the GPU and this process. Comparisons are cyclic, as in
 * cuStreamWaitValue64. */

/* Writes the value of a timeline. In a failed session: PEERLANE_TIMELINE_END. */
PEERLANE_API int peerlane_timeline_value(peerlane_session *session, uint32_t timeline, uint64_t *value);

/* Sets a timeline from the CPU. */
PEERLANE_API int peerlane_timeline_advance(peerlane_session *session, uint32_t timeline, uint64_t value);

/* Returns whether a timeline with the value `now` has reached `value`. */
static inline int peerlane_reached(uint64_t now, uint64_t value) { return (int64_t)(now - value) >= 0; }

/* Returns the memory of the timelines, whole pages, for registration with CUDA
 * (cuMemHostRegister with CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP). Timeline i is at
 * i * PEERLANE_TIMELINE_STRIDE. Unregister the memory before peerlane_close(). */
PEERLANE_API int peerlane_timelines(peerlane_session *session, void **memory, size_t *bytes);

/* Registers the timelines with CUDA, once per session, and writes their address for streams of
 * the current context, for cuStreamWriteValue64 and cuStreamWaitValue64. Timeline i is at
 * address + i * PEERLANE_TIMELINE_STRIDE. Finds CUDA as peerlane_export_pointer() does. */
PEERLANE_API int peerlane_register_timelines(peerlane_session *session, uint64_t *address);

/* Unregisters the timelines from CUDA. Call before peerlane_close(). */
PEERLANE_API int peerlane_unregister_timelines(peerlane_session *session);

/* peerlane_stream_wait() makes a stream wait until a timeline has reached a value
 * (cuStreamWaitValue64); peerlane_stream_advance() makes a stream set a timeline
 * (cuStreamWriteValue64). Both use the current context. stream: a CUstream or cudaStream_t.
 * The timelines must be registered with peerlane_register_timelines(). Both refuse a stream in
 * capture (PEERLANE_STATUS_INVALID), because each replay of the graph would use the same
 * value. For graphs use peerlane_hand_over(). */
PEERLANE_API int peerlane_stream_wait(peerlane_session *session, void *stream, uint32_t timeline, uint64_t value);
PEERLANE_API int peerlane_stream_advance(peerlane_session *session, void *stream, uint32_t timeline, uint64_t value);

/* A hand-over is a timeline that alternates between a stream and the relay: its value names
 * the side with the turn. Each replay of a graph takes one turn and gives it back.
 *
 *	peerlane_hand_over(session, 0, PEERLANE_TURN_STREAM);  to send: the stream fills first
 *	cuStreamBeginCapture(stream, ...);
 *	peerlane_stream_take(session, stream, 0);              waits for the stream's turn
 *	... work that fills the memory ...
 *	peerlane_stream_give(session, stream, 0);              gives the turn to the relay
 *	cuStreamEndCapture(stream, &graph);
 *	then, for each replay: peerlane_send() with PEERLANE_HAND_OVER and after_timeline 0
 *
 * To receive, the first turn is PEERLANE_TURN_RELAY; between take and give the stream
 * processes the received bytes. A program may post any number of operations before their
 * turns; each operation uses one turn. A replay without a posted operation waits for one.
 *
 * A hand-over ends when the session fails, or when the connection of its latest operation
 * goes down. From then on no stream waits for the hand-over, in later replays too, and the
 * memory's content is undefined: peerlane_hand_over_status() and the other functions of the
 * hand-over return the error until peerlane_hand_over() restarts it. peerlane_hand_over()
 * returns PEERLANE_STATUS_INVALID until all operations of the old turns have ended, which can
 * be later than the error. No stream may use the hand-over during the restart. */
PEERLANE_API int peerlane_hand_over(peerlane_session *session, uint32_t timeline, uint32_t first);
PEERLANE_API int peerlane_hand_over_status(peerlane_session *session, uint32_t timeline);
PEERLANE_API int peerlane_stream_take(peerlane_session *session, void *stream, uint32_t timeline);
PEERLANE_API int peerlane_stream_give(peerlane_session *session, void *stream, uint32_t timeline);

/* --- events ---------------------------------------------------------------- */

/* A CUDA event of this process that the relay has opened; 0 means none. */
typedef uint32_t peerlane_event;

/* Has the relay open a CUDA event of a GPU, by the handle of cuIpcGetEventHandle. Operations
 * with PEERLANE_AFTER_EVENT wait until the work before the latest record of the event has
 * completed. Record the event before you post the operation; if a stream records the event
 * again before the operation starts, the operation may wait for the later record.
 *
 * The administrator (relay.events) and the driver must permit events: relay and container
 * share /dev/shm and a uid. Timelines need neither.
 * Errors: PEERLANE_STATUS_NOT_PERMITTED, PEERLANE_STATUS_BAD_DESCRIPTOR,
 * PEERLANE_STATUS_LIMIT. */
PEERLANE_API int peerlane_open_event(peerlane_session *session, const uint8_t handle[64], const peerlane_gpu *gpu, peerlane_event *event);

/* Has the relay close the event, after the last operation that waits for the event. Destroy
 * the event only afterwards. */
PEERLANE_API int peerlane_close_event(peerlane_session *session, peerlane_event event);

/* --- names ----------------------------------------------------------------- */

/* Parses "GPU-8-4-4-4-12", hexadecimal digits, with or without "GPU-". */
PEERLANE_API int peerlane_gpu_parse(const char *text, peerlane_gpu *gpu);

/* Writes a GPU's UUID in that form: 40 characters and a terminating zero. */
PEERLANE_API void peerlane_gpu_format(const peerlane_gpu *gpu, char text[41]);

#ifdef __cplusplus
}
#endif

#endif
