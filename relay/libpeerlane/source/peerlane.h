/*
 * libpeerlane: what a program in a container uses to reach its relay. It exports
 * GPU memory once, or has host memory made, connects, and then sends and receives
 * without a system call or a CUDA call for each operation.
 *
 *	peerlane_dial(NULL, NULL, 0, -1, &session);
 *	peerlane_export(session, &allocation, 1, &gpu, 0, &memory);
 *	peerlane_listen(session, &gpu, &listener, &handle);      here: give the handle away
 *	peerlane_accept(session, listener, -1, &receiving);
 *	peerlane_connect(session, &gpu, &handle, &sending);      there
 *	peerlane_send(session, sending, memory, 0, n, NULL, &operation);
 *	peerlane_wait(session, operation, -1, &moved);
 *
 * Errors. A function that returns int returns a status: PEERLANE_STATUS_OK, which
 * is 0, or what went wrong, one of peerlane_values.h or of enum
 * peerlane_library_status. peerlane_error() is the sentence that goes with the
 * calling thread's last failure. What a function gives back through a pointer is
 * written only where it says so.
 *
 * A session that has failed stays so: every call returns that status, with that
 * sentence. It fails when the relay dies (PEERLANE_STATUS_RELAY_DIED), when the
 * relay breaks the protocol, and in a child after fork(). All operations that had
 * not ended have ended then, with that status, and all timelines stand at
 * PEERLANE_TIMELINE_END, so that no stream waits for ever. Close the session and
 * dial again: a relay's successor is there within seconds.
 *
 * Threads. All functions may be called from any thread, for the same session too,
 * except that peerlane_close() must be a session's last call: it ends the waits of
 * other threads, and then frees the session. The library works in the threads that
 * call it. It has one of its own, for each session, only from
 * peerlane_timelines() or peerlane_register_timelines() on: the GPU may wait for a
 * timeline then while no thread is here to see the relay die. That thread sleeps in
 * poll(), takes no signal, and ends with the session. It looks around every
 * millisecond while there are hand-overs that have ended, see peerlane_hand_over().
 *
 * fork(). A session belongs to the process that dialed. In a child of fork() it has
 * failed (PEERLANE_STATUS_FORKED): its descriptors are closed there, its shared
 * memory is not mapped, the parent's session goes on. The child may close it, and
 * may dial itself. All descriptors are O_CLOEXEC.
 *
 * The library raises no signal (no SIGPIPE either), installs no handler, never
 * exits, writes to no standard stream and reads no environment variable but
 * PEERLANE_CUDA_LIBRARY, see peerlane_export_pointer(). It is not linked with
 * libcuda. Once loaded it stays loaded: dlclose() does not unload it.
 *
 * The hot path is peerlane_send(), peerlane_receive(), peerlane_read(),
 * peerlane_write(), peerlane_read_list() and peerlane_write_list() except for the first
 * list of a session, peerlane_flush(), peerlane_test(), peerlane_poll(), and
 * peerlane_wait() for an operation that ends within 50 microseconds. The hot path
 * allocates nothing and makes no system call, except one write() that wakes a relay
 * that has gone to sleep for want of work, futex calls where threads contend for a
 * session, and, where a caller asks again and again for what does not end, one look
 * every 10 milliseconds whether the relay lives.
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

/* Outcomes that the library finds itself, beside enum peerlane_status. */
enum peerlane_library_status {
	PEERLANE_STATUS_PENDING = 1000, /* the operation has not ended: no failure, and without a sentence */
	PEERLANE_STATUS_TIMED_OUT,      /* the time that the caller gave is over */
	PEERLANE_STATUS_INVALID,        /* an argument that cannot be */
	PEERLANE_STATUS_FULL,           /* operations that were posted have to end, or be taken, first */
	PEERLANE_STATUS_NO_RELAY,       /* no relay at the socket */
	PEERLANE_STATUS_FORKED,         /* the session is that of the process before fork() */
	PEERLANE_STATUS_SYSTEM,         /* the system refused something; the sentence says what */
};

/* Where a container finds its relay. */
#define PEERLANE_DEFAULT_SOCKET "/run/peerlane/relay.sock"

/* A tie to a relay. A process may have several. */
typedef struct peerlane_session peerlane_session;

/* Things of a session, numbered by its relay; 0 is none. A number that is none, or
 * of something that has gone, is an error and nothing worse. */
typedef uint32_t peerlane_memory;
typedef uint32_t peerlane_listener;
typedef uint32_t peerlane_connection;

/* A send, a receive or another operation that was posted; 0 is none. A number is never used twice. */
typedef uint64_t peerlane_operation;

/* A range of memory that the other sides of connections may read or write. */
typedef uint32_t peerlane_region;

/* A GPU's UUID, as cuDeviceGetUuid() and `nvidia-smi -L` (in hexadecimal) have it. */
typedef struct peerlane_gpu {
	uint8_t bytes[16];
} peerlane_gpu;

/* What a sender needs to connect to a listener. Whoever has it can. */
typedef struct peerlane_handle {
	uint8_t bytes[128];
} peerlane_handle;

/* The key of a region. A program with the key has the access of the region, on the
 * connections of the region. */
typedef struct peerlane_remote_key {
	uint8_t bytes[64];
} peerlane_remote_key;

/* --- errors ---------------------------------------------------------------- */

/* The sentence of the calling thread's last call that failed: what was tried, what
 * happened, what to do. "" before the first. Valid until the thread's next call. */
PEERLANE_API const char *peerlane_error(void);

/* The status of the calling thread's last call that failed. */
PEERLANE_API int peerlane_error_status(void);

/* What a status means, in a few words, for any number. */
PEERLANE_API const char *peerlane_status_text(int status);

/* --- sessions -------------------------------------------------------------- */

/* Connects to a relay.
 *
 * socket: its path; NULL is PEERLANE_DEFAULT_SOCKET.
 * gpus, count: GPUs whose memory will be exported, as far as they are known by now;
 * may be NULL and 0. Where there is no relay the sentence names their lanes.
 * timeout_ms: milliseconds for all of it; negative: a minute.
 *
 * PEERLANE_STATUS_NO_RELAY, PEERLANE_STATUS_VERSION, PEERLANE_STATUS_TIMED_OUT,
 * PEERLANE_STATUS_BUSY where the relay's queue of connections was full all the time, or
 * the relay's reason to refuse. */
PEERLANE_API int peerlane_dial(const char *socket, const peerlane_gpu *gpus, unsigned count, int timeout_ms, peerlane_session **session);

/* Ends the session and frees it; NULL is allowed. It returns when nothing writes its
 * memory any more, nor reads it, so that what was exported may be freed; or after 30
 * seconds, where the relay does not let go. Operations that had not ended fail with
 * PEERLANE_STATUS_CLOSED for whoever waits. No thread may begin a call with this session
 * any more. Streams must not use its timelines any more. */
PEERLANE_API void peerlane_close(peerlane_session *session);

/* PEERLANE_STATUS_OK while the session works, then why it does not. It looks whether
 * the relay lives. */
PEERLANE_API int peerlane_session_status(peerlane_session *session);

/* The version of the protocol that both sides agreed on; 0 for NULL. */
PEERLANE_API unsigned peerlane_protocol(const peerlane_session *session);

/* A lane of the container. */
struct peerlane_lane {
	peerlane_gpu gpu; /* zero where only the driver could tell, which is not asked */
	uint32_t index;   /* NVML's on the host, the N of nvidia.com/gpu=N there */
	uint32_t reserved;
};

/* The lanes that this container was given: PEERLANE_MAX_LANES at most. Writes the
 * first `room` of them to lanes, and to count how many there are. */
PEERLANE_API int peerlane_lanes(peerlane_session *session, struct peerlane_lane *lanes, unsigned room, unsigned *count);

/* What is known of the NIC of a lane: of the first where it has several. */
struct peerlane_nic {
	uint64_t guid; /* the number that NCCL has for it; 0: unknown */
	uint32_t mbps; /* full rate of its fastest active port, 10^6 bits a second; 0: unknown */
	uint32_t port; /* that port; 0: unknown */
	char name[64]; /* as in /sys/class/infiniband; empty: the lane has none, or reaches only this host */
};

/* Writes what is known of the NIC of the lane of a GPU. Of a lane that reaches only this
 * host (relay.scope) that is the rate of the GPU's links to its peers alone: a name that is
 * empty and an mbps that is not 0 mean such a lane. PEERLANE_STATUS_VERSION: this relay is
 * older, and does not tell; the session goes on. */
PEERLANE_API int peerlane_lane_nic(peerlane_session *session, const peerlane_gpu *gpu, struct peerlane_nic *nic);

/* What the relay has moved since it began, in bytes. */
struct peerlane_counters {
	uint64_t sent, received;  /* whole messages, by all of the container's clients */
	uint64_t direct, staged;  /* of what it sent, by route */
	uint32_t servers;         /* entries of `server` */
	uint32_t contexts;        /* CUDA contexts that the relay has */
	struct {
		peerlane_gpu gpu;     /* a server GPU with staging of this relay's; zero: host memory, of lanes that bounce */
		uint64_t in, out;     /* bytes into that staging, and out of it, but by programs' own copies */
	} server[PEERLANE_MAX_SERVERS];
};

/* The counters. size is sizeof(struct peerlane_counters) as the caller was compiled:
 * no more is written, and what this library does not know is zero. */
PEERLANE_API int peerlane_statistics(peerlane_session *session, struct peerlane_counters *counters, size_t size);

/* --- memory ---------------------------------------------------------------- */

/* An allocation to export. Members that are 0 mean what earlier releases did. */
struct peerlane_allocation {
	int fd;            /* the POSIX file descriptor of a CUDA VMM allocation; stays the caller's */
	uint32_t kind;     /* PEERLANE_ALLOCATION_VMM */
	uint64_t bytes;    /* the size of the whole allocation */
	uint64_t offset;   /* the range of it that is exported; */
	uint64_t length;   /* 0: up to the end */
	uint64_t reserved[4];
};

#define PEERLANE_ALLOCATION_VMM 0

/* Lets the relay map GPU memory of this process.
 *
 * list, count: the allocations that make up one range, in order, PEERLANE_MAX_PARTS at
 * most: a range of PyTorch's expandable segments, say. In a list of several only the
 * first may begin later, by its offset, and only the last may end earlier.
 * gpu: the GPU that the memory is on.
 * access: PEERLANE_ACCESS_SEND, PEERLANE_ACCESS_RECEIVE or both; 0 is both.
 *
 * The first export may take long: the relay creates its CUDA context then.
 * PEERLANE_STATUS_WRONG_GPU, PEERLANE_STATUS_BAD_DESCRIPTOR,
 * PEERLANE_STATUS_OUT_OF_RANGE, PEERLANE_STATUS_LIMIT, and others with a sentence. */
PEERLANE_API int peerlane_export(peerlane_session *session, const struct peerlane_allocation *list, unsigned count,
	const peerlane_gpu *gpu, uint32_t access, peerlane_memory *memory);

/* Exports memory of cudaMalloc (cuMemAlloc), by the handle of cuIpcGetMemHandle, where
 * the administrator allows it (relay.cuda_ipc) and the driver does. offset, length: the
 * range of the allocation that cuMemGetAddressRange tells. On route direct nothing is
 * received into it. It must not be freed before peerlane_unexport() has returned and
 * the operations on it have ended. */
PEERLANE_API int peerlane_export_ipc(peerlane_session *session, const uint8_t handle[64], uint64_t offset, uint64_t length,
	const peerlane_gpu *gpu, uint32_t access, peerlane_memory *memory);

/* Has the relay make host memory for the lane of a GPU: zeros, which connections of that
 * lane send out of and receive into as posted; at their other side can be memory of
 * either kind. It is ordinary memory, mapped at *data until peerlane_unexport() or
 * peerlane_close(), and needs no CUDA here. Children of fork() share it. */
PEERLANE_API int peerlane_host_memory(peerlane_session *session, uint64_t bytes, const peerlane_gpu *gpu, uint32_t access,
	void **data, peerlane_memory *memory);

/* Staging memory, which this process copies to and from by itself. */
struct peerlane_staged {
	peerlane_memory memory;
	uint32_t server_index; /* of the GPU that it is on, NVML's on the host */
	peerlane_gpu server;   /* that GPU */
	uint64_t address;      /* as streams of the GPU see it that it was asked for */
	uint64_t bytes;        /* what was asked for, or more */
};

/* Has the relay make memory on a server GPU of the lane of a GPU, and maps it for that
 * GPU alone: streams copy into it (cuMemcpyAsync), and write a timeline that a send out
 * of it waits for (PEERLANE_AFTER); or wait for the timeline that a receive into it
 * advances (PEERLANE_SIGNAL), and copy out. On route staged nobody copies it again: the
 * NIC reads and writes it in place. What is copied into it before a send that uses it
 * has ended may be what is sent.
 *
 * The container needs peerlane.dev/gpu= of that GPU, with which it sees the server
 * GPU's device node; CUDA_VISIBLE_DEVICES may hide that GPU. No context is made on it.
 * CUDA is found as peerlane_export_pointer() finds it. The memory is not zeros, and is
 * unmapped by peerlane_unexport() and peerlane_close(): no stream may use it then. A
 * child of fork() does not have it.
 *
 * PEERLANE_STATUS_NOT_PERMITTED (no gpu=), PEERLANE_STATUS_NO_STAGING (the GPU is near,
 * or no server GPU has room, or the host's account none), PEERLANE_STATUS_LIMIT,
 * PEERLANE_STATUS_NO_CUDA, PEERLANE_STATUS_CUDA, and others with a sentence. */
PEERLANE_API int peerlane_staging_memory(peerlane_session *session, uint64_t bytes, const peerlane_gpu *gpu, uint32_t access,
	struct peerlane_staged *staged);

/* Exports [pointer, pointer+length) of CUDA VMM memory (cuMemCreate with a POSIX
 * file descriptor handle, cuMemMap), of one allocation or several side by side.
 *
 * It calls the CUDA driver that this process has loaded already, as libcuda.so.1 or
 * under the name in PEERLANE_CUDA_LIBRARY, and loads none: PEERLANE_STATUS_NO_CUDA.
 * A context has to be current. PEERLANE_STATUS_CUDA where a call of the driver's
 * fails, as with memory that is not VMM memory.
 *
 * On a GPU that is near its NICs the relay is given a DMA-BUF of the allocations, too, by
 * which NICs read and write the memory in place: allocate it with gpuDirectRDMACapable. */
PEERLANE_API int peerlane_export_pointer(peerlane_session *session, const void *pointer, uint64_t length, uint32_t access, peerlane_memory *memory);

/* peerlane_export_ipc() of [pointer, pointer+length) of one allocation of cudaMalloc, by
 * the driver that peerlane_export_pointer() finds. PEERLANE_STATUS_CUDA also for memory
 * that has no such handle. */
PEERLANE_API int peerlane_export_pointer_ipc(peerlane_session *session, const void *pointer, uint64_t length, uint32_t access, peerlane_memory *memory);

/* Writes a number of the GPU memory at [pointer, pointer+length), in one allocation or
 * several: other memory that comes to lie there later, when this is freed, has another
 * one. It says something within this process alone. Finds CUDA as
 * peerlane_export_pointer() does. PEERLANE_STATUS_CUDA also where CUDA has no number. */
PEERLANE_API int peerlane_pointer_id(const void *pointer, uint64_t length, uint64_t *id);

/* Takes memory back: no new operation can use it, and the relay's mapping, which pins
 * the memory, goes when those under way have ended. Its regions are revoked, and as with
 * peerlane_revoke() it returns when nobody else's operation touches the memory any more;
 * of its own the program knows. Host memory and staging memory are
 * unmapped here, also where the session has failed. */
PEERLANE_API int peerlane_unexport(peerlane_session *session, peerlane_memory memory);

/* --- connections ----------------------------------------------------------- */

/* Makes a listener whose connections receive into memory of this GPU. */
PEERLANE_API int peerlane_listen(peerlane_session *session, const peerlane_gpu *gpu, peerlane_listener *listener, peerlane_handle *handle);

/* Waits for a sender. timeout_ms: milliseconds; negative: no end; 0: only looks.
 * After PEERLANE_STATUS_TIMED_OUT the next sender is the next accept's. With timeout 0
 * also PEERLANE_STATUS_FULL: the relay takes no requests at the moment. */
PEERLANE_API int peerlane_accept(peerlane_session *session, peerlane_listener listener, int timeout_ms, peerlane_connection *connection);

/* Closes a listener; accepted connections stay. Accepts that wait fail. */
PEERLANE_API int peerlane_unlisten(peerlane_session *session, peerlane_listener listener);

/* Connects to the listener that gave out the handle, to send from memory of this
 * GPU. PEERLANE_STATUS_BAD_HANDLE, PEERLANE_STATUS_UNREACHABLE, and others. */
PEERLANE_API int peerlane_connect(peerlane_session *session, const peerlane_gpu *gpu, const peerlane_handle *handle, peerlane_connection *connection);

/* A connect that has begun; 0 is none. */
typedef uint32_t peerlane_attempt;

/* Begins to connect, and does not wait: for programs that ask again and again. Ends with
 * peerlane_connect_finish(). PEERLANE_STATUS_FULL: the relay takes no requests at the
 * moment, or 16 attempts of this session are not answered yet. */
PEERLANE_API int peerlane_connect_begin(peerlane_session *session, const peerlane_gpu *gpu, const peerlane_handle *handle, peerlane_attempt *attempt);

/* Waits for what peerlane_connect() would have returned. timeout_ms: milliseconds;
 * negative: no end; 0: only looks. After PEERLANE_STATUS_TIMED_OUT the attempt goes on;
 * with any other status it is over. One thread at a time for each attempt. */
PEERLANE_API int peerlane_connect_finish(peerlane_session *session, peerlane_attempt attempt, int timeout_ms, peerlane_connection *connection);

/* Takes a connection down for both sides. Its number is of no use afterwards. One
 * that was down already is no error. */
PEERLANE_API int peerlane_disconnect(peerlane_session *session, peerlane_connection connection);

struct peerlane_connection_info {
	uint32_t route;  /* PEERLANE_ROUTE_STAGED or PEERLANE_ROUTE_DIRECT */
	int32_t status;  /* PEERLANE_STATUS_OK while it is up, then why it is down */
	char peer[112];  /* who is at the other side */
};

/* What is known of a connection, without asking the relay. Returns OK also where the
 * connection is down; peerlane_connection_status() has the sentence. */
PEERLANE_API int peerlane_connection_get(peerlane_session *session, peerlane_connection connection, struct peerlane_connection_info *info);

/* PEERLANE_STATUS_OK while the connection is up, then why it is down. */
PEERLANE_API int peerlane_connection_status(peerlane_session *session, peerlane_connection connection);

/* --- operations ------------------------------------------------------------ */

/* What a send or a receive may have beside its memory. All zero: nothing. */
struct peerlane_options {
	uint64_t tag;             /* a message meets receives of the same tag only */
	uint64_t context;         /* the caller's own; peerlane_poll() gives it back */
	uint32_t flags;           /* PEERLANE_AFTER, PEERLANE_SIGNAL, PEERLANE_AFTER_EVENT; or PEERLANE_HAND_OVER */
	uint32_t after_event;     /* PEERLANE_AFTER_EVENT: begin when this event has been reached */
	uint32_t after_timeline;  /* PEERLANE_AFTER: begin when this timeline has reached */
	uint32_t signal_timeline; /* PEERLANE_SIGNAL: when it has ended, also with an error, */
	uint64_t after_value;     /* this value; operations of a connection begin in their order */
	uint64_t signal_value;    /* the relay sets that timeline to this value; receives of a connection */
	                          /* end in the order in which their messages were sent */
};

#define PEERLANE_AFTER 1u
#define PEERLANE_SIGNAL 2u
#define PEERLANE_HAND_OVER 4u /* begin when it is the relay's turn at after_timeline, which is the stream's at the end: see peerlane_hand_over() */
#define PEERLANE_AFTER_EVENT 8u

/* Posts a message of `length` bytes. options may be NULL.
 *
 * operation: its number, for peerlane_test() or peerlane_wait(), one of which, or
 * peerlane_poll(), has to take the result. NULL: nobody wants it, and it is
 * forgotten at its end.
 *
 * PEERLANE_STATUS_FULL: PEERLANE_RING_ENTRIES operations were posted and the relay
 * has not begun them, or PEERLANE_MAX_OPERATIONS have no taken result. What the
 * relay refuses (a range outside the memory, say) is the operation's result. */
PEERLANE_API int peerlane_send(peerlane_session *session, peerlane_connection connection, peerlane_memory memory,
	uint64_t offset, uint64_t length, const struct peerlane_options *options, peerlane_operation *operation);

/* Posts room for a message of at most `length` bytes; the rest as peerlane_send(). */
PEERLANE_API int peerlane_receive(peerlane_session *session, peerlane_connection connection, peerlane_memory memory,
	uint64_t offset, uint64_t length, const struct peerlane_options *options, peerlane_operation *operation);

/* Posts an operation that ends when all that were posted on the connection before it
 * have ended: what was sent and written is in the other side's memory then. Where one of
 * them failed since the last flush, it ends with the status of the first that did. */
PEERLANE_API int peerlane_flush(peerlane_session *session, peerlane_connection connection,
	const struct peerlane_options *options, peerlane_operation *operation);

/* Operations of a session whose results nobody has taken. */
#define PEERLANE_MAX_OPERATIONS 4096

/* PEERLANE_STATUS_PENDING, or takes the operation's result: PEERLANE_STATUS_OK when a
 * send's bytes are in the receiver's memory, or a receive's are here; else why not.
 * moved: the bytes that were moved, written whenever the operation has ended; may be
 * NULL. A result can be taken once: then PEERLANE_STATUS_INVALID. */
PEERLANE_API int peerlane_test(peerlane_session *session, peerlane_operation operation, uint64_t *moved);

/* Waits for the end, and takes the result as peerlane_test() does. timeout_ms:
 * milliseconds; negative: no end. After PEERLANE_STATUS_TIMED_OUT the operation goes
 * on. It looks for 50 microseconds before it sleeps. */
PEERLANE_API int peerlane_wait(peerlane_session *session, peerlane_operation operation, int timeout_ms, uint64_t *moved);

/* Asks the relay to end the operation if nothing of it has moved. It ends by itself
 * or so, and its result tells: PEERLANE_STATUS_CANCELED. */
PEERLANE_API int peerlane_cancel(peerlane_session *session, peerlane_operation operation);

/* Says that nobody will take the operation's result: it is dropped, now or when the
 * operation ends. */
PEERLANE_API int peerlane_forget(peerlane_session *session, peerlane_operation operation);

struct peerlane_result {
	peerlane_operation operation;
	uint64_t moved;    /* bytes */
	uint64_t context;  /* of the operation's options */
	int32_t status;    /* peerlane_test()'s, without its sentence */
	peerlane_connection connection;
};

/* Takes the results of up to `room` operations that have ended, in the order in which
 * they ended, and writes how many to count. Operations for which a peerlane_wait()
 * waits are left to that. Does not wait. A session that has failed gives the results
 * of all operations first, and then its status. */
PEERLANE_API int peerlane_poll(peerlane_session *session, struct peerlane_result *results, unsigned room, unsigned *count);

/* A descriptor for poll(), select() and epoll: readable when there may be something
 * for peerlane_poll() or peerlane_test(), or the session has failed. Call
 * peerlane_poll() until it gives nothing before you wait for it. It stays the
 * session's. From this call on the relay makes a system call for each operation that
 * ends; a program that only ever tests, or waits in peerlane_wait(), is better off
 * without. */
PEERLANE_API int peerlane_event_descriptor(peerlane_session *session, int *fd);

/* --- one-sided operations -------------------------------------------------- */

/* The side that accepted a connection exposes memory; the side that connected reads and
 * writes the memory. The relays move the bytes without the process that exposes the
 * memory: the process may be stopped.
 *
 *	peerlane_expose(session, listener, 0, memory, 0, n, PEERLANE_REMOTE_READ, &region, &key);
 *	give the key away, by a message, say
 *	peerlane_read(session, sending, mine, 0, n, &key, 0, NULL, &operation);      there */

/* Exposes [offset, offset+length) of a memory to the present and later connections of a
 * listener, accepted or not, or to one connection that this process accepted; the other
 * argument is 0. The memory is of the GPU of that lane.
 *
 * access: PEERLANE_REMOTE_READ, which needs memory exported with PEERLANE_ACCESS_SEND,
 * PEERLANE_REMOTE_WRITE, which needs PEERLANE_ACCESS_RECEIVE, or both.
 *
 * PEERLANE_STATUS_NOT_PERMITTED, PEERLANE_STATUS_OUT_OF_RANGE,
 * PEERLANE_STATUS_WRONG_GPU, PEERLANE_STATUS_LIMIT (PEERLANE_MAX_REGIONS). */
PEERLANE_API int peerlane_expose(peerlane_session *session, peerlane_listener listener, peerlane_connection connection,
	peerlane_memory memory, uint64_t offset, uint64_t length, uint32_t access, peerlane_region *region, peerlane_remote_key *key);

/* Ends the access to a region, and returns when no operation on the region touches the
 * memory. Operations that have begun go on to their end; peerlane_disconnect() ends them.
 * After PEERLANE_STATUS_TIMED_OUT, a minute later, no new operation begins, and some have
 * not ended. peerlane_unexport() revokes the regions of a memory. */
PEERLANE_API int peerlane_revoke(peerlane_session *session, peerlane_region region);

/* Writes `length` bytes of a memory here to byte `at` of what the other side of a
 * connection has exposed; the operation ends when the bytes are there. An operation of 0
 * bytes checks the access. The rest as peerlane_send().
 *
 * Sends, reads and writes begin in the order in which they are posted, and end in any:
 * what is to come after one waits for its end, or peerlane_flush().
 *
 * As results: PEERLANE_STATUS_BAD_KEY where the key names no region of this connection,
 * or a revoked region; PEERLANE_STATUS_OUT_OF_RANGE beyond the bounds of the region;
 * PEERLANE_STATUS_NOT_PERMITTED where it is for reading alone. The call itself gives
 * PEERLANE_STATUS_BAD_KEY for bytes that are no key. */
PEERLANE_API int peerlane_write(peerlane_session *session, peerlane_connection connection, peerlane_memory memory,
	uint64_t offset, uint64_t length, const peerlane_remote_key *key, uint64_t at, const struct peerlane_options *options,
	peerlane_operation *operation);

/* Reads `length` bytes from byte `at` of a region of the other side into a memory
 * here; the rest as peerlane_write(). The first read of a connection opens another one,
 * the other way, which counts among both sides' connections. Where the relays cannot open
 * it, reads end with PEERLANE_STATUS_NO_REVERSE_CONNECTION, the connection stays up, and the relays'
 * logs have the reason; reads of the next second end so too, a later one tries again. */
PEERLANE_API int peerlane_read(peerlane_session *session, peerlane_connection connection, peerlane_memory memory,
	uint64_t offset, uint64_t length, const peerlane_remote_key *key, uint64_t at, const struct peerlane_options *options,
	peerlane_operation *operation);

/* --- lists ----------------------------------------------------------------- */

/* A list reads or writes many ranges as one operation: one entry of the ring, one result. The
 * relays move neighbouring entries together. */

/* `length` bytes, at least 1, at `offset` of a memory here, and from byte `at` on of what the
 * other side of the connection has exposed under the key. */
struct peerlane_list_entry {
	peerlane_memory memory;
	uint32_t reserved;              /* 0 */
	uint64_t offset;
	uint64_t length;
	uint64_t at;
	const peerlane_remote_key *key; /* consecutive entries of one region had better have one pointer */
};

/* Writes the entries, or reads them, as peerlane_write() and peerlane_read() do each; the
 * library copies them before it returns. The operation ends when all bytes are there. Entries
 * have no order: no byte of a destination may be in two of them. The memories stay exported
 * until the operation ends.
 *
 * If an entry fails, no further entries begin, and the result is the status of the first entry
 * that failed. Its index is written to `failed`, which may be NULL, before the result can be
 * taken: the variable has to stay until the operation ends, or the session is closed. Of the
 * other entries each has then been moved, or none of its bytes; `moved` is the sum. If the
 * connection or the session ends, an entry may be moved in part. peerlane_cancel() ends a list
 * whose entries have not all begun.
 *
 * The first list of a session asks the relay for memory, which takes a system call and waits
 * for the answer. The lists of a session that have not ended have PEERLANE_MAX_LIST_ENTRIES
 * entries together: PEERLANE_STATUS_FULL for more. PEERLANE_STATUS_VERSION where the relay, or
 * as a result the relay of the other side, is of an older release. */
PEERLANE_API int peerlane_write_list(peerlane_session *session, peerlane_connection connection,
	const struct peerlane_list_entry *entries, uint32_t count, const struct peerlane_options *options, uint32_t *failed,
	peerlane_operation *operation);
PEERLANE_API int peerlane_read_list(peerlane_session *session, peerlane_connection connection,
	const struct peerlane_list_entry *entries, uint32_t count, const struct peerlane_options *options, uint32_t *failed,
	peerlane_operation *operation);

/* --- timelines ------------------------------------------------------------- */

/* A session has PEERLANE_TIMELINES counters of 64 bits, numbered from 0, all 0 at
 * first, in memory shared with the relay. An operation can wait for one and advance
 * one; so can a stream of the GPU and this process. Reaching is cyclic, as
 * cuStreamWaitValue64's is. */

/* Where a timeline stands. In a session that has failed: PEERLANE_TIMELINE_END. */
PEERLANE_API int peerlane_timeline_value(peerlane_session *session, uint32_t timeline, uint64_t *value);

/* Sets a timeline from the CPU. */
PEERLANE_API int peerlane_timeline_advance(peerlane_session *session, uint32_t timeline, uint64_t value);

/* Whether a timeline that stands at `now` has reached `value`. */
static inline int peerlane_reached(uint64_t now, uint64_t value) { return (int64_t)(now - value) >= 0; }

/* The memory of the timelines, whole pages, to register with CUDA
 * (cuMemHostRegister with CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP): timeline i is
 * at i * PEERLANE_TIMELINE_STRIDE. Unregister it before the session is closed. */
PEERLANE_API int peerlane_timelines(peerlane_session *session, void **memory, size_t *bytes);

/* Registers the timelines with CUDA and gives the address that streams of the current
 * context see, for cuStreamWriteValue64 and cuStreamWaitValue64: timeline i is at
 * address + i * PEERLANE_TIMELINE_STRIDE. Finds CUDA as peerlane_export_pointer()
 * does. Once for each session. */
PEERLANE_API int peerlane_register_timelines(peerlane_session *session, uint64_t *address);

/* Takes the timelines away from CUDA, before peerlane_close(). */
PEERLANE_API int peerlane_unregister_timelines(peerlane_session *session);

/* Lets a stream wait until a timeline has reached a value, and lets it set a timeline
 * when it gets there (cuStreamWaitValue64, cuStreamWriteValue64), in the current
 * context. stream: a CUstream or cudaStream_t. The timelines must be registered with
 * peerlane_register_timelines(). A stream that is captured into a graph is refused
 * (PEERLANE_STATUS_INVALID): its replays would all have the same value. For them: */
PEERLANE_API int peerlane_stream_wait(peerlane_session *session, void *stream, uint32_t timeline, uint64_t value);
PEERLANE_API int peerlane_stream_advance(peerlane_session *session, void *stream, uint32_t timeline, uint64_t value);

/* A hand-over is a timeline that changes hands: it says whose turn it is, a stream's or
 * the relay's. Each replay of a graph that takes a turn and gives it back is one turn.
 *
 *	peerlane_hand_over(session, 0, PEERLANE_TURN_STREAM);  to send: the stream fills first
 *	cuStreamBeginCapture(stream, ...);
 *	peerlane_stream_take(session, stream, 0);              waits for the stream's turn
 *	... work that fills the memory ...
 *	peerlane_stream_give(session, stream, 0);              it is the relay's turn
 *	cuStreamEndCapture(stream, &graph);
 *	then, for each replay: peerlane_send() with PEERLANE_HAND_OVER and after_timeline 0
 *
 * To receive the first turn is PEERLANE_TURN_RELAY; between taking and giving the
 * stream works with what came. Operations may be posted before it is their turn, any
 * number of them; each has one. A replay whose operation nobody posts waits for it.
 *
 * A hand-over ends when the session fails, or the connection of its latest operation
 * goes down. No stream waits for it any more then, in replays of later either, and
 * what their work finds in the memory says nothing: peerlane_hand_over_status() and
 * all that is asked for with it give the error, until peerlane_hand_over() begins it
 * anew. It does not (PEERLANE_STATUS_INVALID) before all operations of its turns have
 * ended, which can be later than the error; and no stream may use it at that moment. */
PEERLANE_API int peerlane_hand_over(peerlane_session *session, uint32_t timeline, uint32_t first);
PEERLANE_API int peerlane_hand_over_status(peerlane_session *session, uint32_t timeline);
PEERLANE_API int peerlane_stream_take(peerlane_session *session, void *stream, uint32_t timeline);
PEERLANE_API int peerlane_stream_give(peerlane_session *session, void *stream, uint32_t timeline);

/* --- events ---------------------------------------------------------------- */

/* An event of this process that the relay has opened; 0 is none. */
typedef uint32_t peerlane_event;

/* Has the relay open an event of a stream of a GPU, by the handle of
 * cuIpcGetEventHandle, so that operations wait for it (PEERLANE_AFTER_EVENT) as they wait
 * for a timeline: until what is before its latest record has been done. It has to be
 * recorded before the operation is posted; recorded again before that has begun, the
 * operation may wait for the later record.
 *
 * It works where the administrator allows it (relay.events) and the driver can: relay and
 * container have to share /dev/shm and a uid. A timeline needs neither.
 * PEERLANE_STATUS_NOT_PERMITTED, PEERLANE_STATUS_BAD_DESCRIPTOR, PEERLANE_STATUS_LIMIT. */
PEERLANE_API int peerlane_open_event(peerlane_session *session, const uint8_t handle[64], const peerlane_gpu *gpu, peerlane_event *event);

/* Lets the relay forget the event, once no operation waits for it any more. It must not
 * be destroyed before. */
PEERLANE_API int peerlane_close_event(peerlane_session *session, peerlane_event event);

/* --- names ----------------------------------------------------------------- */

/* Reads "GPU-8-4-4-4-12", hexadecimal digits, with or without "GPU-". */
PEERLANE_API int peerlane_gpu_parse(const char *text, peerlane_gpu *gpu);

/* Writes that form: 40 characters and a zero. */
PEERLANE_API void peerlane_gpu_format(const peerlane_gpu *gpu, char text[41]);

#ifdef __cplusplus
}
#endif

#endif
