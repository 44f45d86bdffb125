// What the simulator's files share. Everything but the API is hidden.
//
// Locks, each held for a moment, in the order in which they may be taken:
// ranges (memory.c) > a context's streams (context.c) > one event (event.c) >
// captures (graph.c) > one stream (stream.c) > handles (object.c). None is ever shared between
// processes: what processes share is a file of atomic counters (host.c), the
// memory itself, and the state of interprocess events (ipc.c).
#ifndef PEERLANE_SIM_H
#define PEERLANE_SIM_H

#include "cuda_abi.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#define MAX_DEVICES 64
#define GRANULARITY ((size_t)2 << 20) // of device memory, as on GPUs of today

// --- host.c: the simulated host, and what this process sees of it

struct device_log { // one of the log's records; see log.go
	_Atomic uint64_t bytes_in, bytes_out, bytes_within, copies, contexts, allocated, slices, reserved;
};

struct device {
	int index, minor;
	unsigned domain, bus, slot;
	unsigned char uuid[16];
	uint64_t memory;
	char name[96];
	bool reachable; // its node is there
	int ordinal;    // -1: not reachable, or hidden by CUDA_VISIBLE_DEVICES
	_Atomic uint64_t used; // by this process
	struct device_log *log;
};

CUresult host_load(void);
int host_visible(void);
struct device *host_device(CUdevice ordinal); // NULL: there is none
struct device *host_device_by_uuid(const unsigned char uuid[16]);
int host_place(const struct device *d); // its place in tables of MAX_DEVICES
void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

// --- fault.c: errors to be injected, and the entry of every call

struct fault {
	unsigned delay_ms;
	bool corrupt, first; // a byte of a copy: its first one, or one in the middle
	CUresult strike; // a sticky error, struck when the operation's turn comes
};

void fault_load(void);

// enter begins every call: is the library initialized, is the device lost, is a
// fault due. An operation on a stream passes f and carries it along; for other
// calls (NULL) enter does what is due itself.
CUresult enter(const char *call, struct fault *f);
CUresult fault_due(const char *call, struct fault *f);
bool sticky(CUresult r);

// --- object.c: reference counts and handles

enum kind { CONTEXT = 1, STREAM, EVENT, MEMORY, MODULE, FUNCTION, GRAPH, EXEC };

struct object {
	atomic_int references;
	void (*destroy)(struct object *);
};

void object_init(struct object *o, void (*destroy)(struct object *)); // one reference
void *retain(void *object);
void release(void *object); // NULL does nothing

uint64_t handle_new(enum kind kind, void *object); // takes over a reference, also on failure: 0
void *handle_get(enum kind kind, uint64_t handle);  // with a reference; NULL: no such handle
void *handle_take(enum kind kind, uint64_t handle); // ends the handle, gives its reference

// --- context.c

struct context {
	struct object object;
	struct device *device;
	uint64_t handle;
	atomic_int sticky; // CUresult
	atomic_bool destroyed;
	_Atomic uint64_t peers; // places of devices that access was enabled to
	pthread_mutex_t mutex;  // of the list
	struct stream *streams; // each with a reference
	struct stream *legacy;  // stream 0; in the list
};

CUresult context_current(struct context **c); // no reference: the thread has one
CUresult context_state(struct context *c);    // destroyed or sticky
void context_fail(CUresult r);                // makes the current context sticky

// --- memory.c: memory, and the ranges of addresses that stand for it

// memory is bytes of a device, or of the host (device NULL).
struct memory {
	struct object object;
	struct device *device;
	int fd;     // -1: not a memfd
	char *data; // where this process reaches the bytes
	size_t size;
	bool exportable, rdma;
	uint64_t nonce; // of its IPC handle, 0: it has none
	uint64_t number; // CUDA's buffer ID: no other memory of this process has had it
	bool counted;  // in device->used
	bool borrowed; // data is the program's own, and not unmapped
};

enum rights { NONE = 0, READ = 1, READ_WRITE = 3 };

struct range {
	uintptr_t base;
	size_t size;
	enum { MAPPED, ALLOCATED, OPENED, HOST_ALLOCATED, HOST_REGISTERED } kind;
	unsigned opens;        // of OPENED
	struct memory *memory; // its first byte is the range's
	struct context *owner; // of ALLOCATED and host memory
	unsigned char rights[MAX_DEVICES]; // of devices, by place; MAPPED only
};

// piece is a part of a copy's source or destination that lies in one memory.
struct piece {
	char *data;
	size_t size;
	struct memory *memory; // with a reference
};

CUresult memory_create(struct device *d, size_t size, bool exportable, bool rdma, struct memory **m);
CUresult memory_import(int fd, struct memory **m);
CUresult memory_name(struct memory *m, size_t size);                // gives it a nonce
CUresult memory_import_named(int fd, uint64_t nonce, struct memory **m, size_t *size);
struct memory *memory_host(size_t size);
struct memory *memory_borrow(void *p, size_t size);

extern pthread_mutex_t ranges_mutex;
struct range *range_add(uintptr_t base, size_t size); // NULL: overlaps another
struct range *range_find(uintptr_t p);                // the range that holds p
struct range *range_next(uintptr_t p);                // the first range that ends behind p
void range_remove(struct range *r);                   // with its references
uintptr_t reserve(size_t size, size_t alignment);     // addresses that nobody can use; 0: none
bool reserved(uintptr_t p, size_t size);
CUresult unreserve(uintptr_t p, size_t size);

// locate finds the memory behind n bytes at p for a device that needs rights.
// *count pieces are returned, 0 if CUDA knows nothing of p: pageable memory.
CUresult locate(uintptr_t p, size_t n, struct device *d, enum rights need, struct piece **pieces, size_t *count);
void pieces_free(struct piece *pieces, size_t count);
void memory_forget(struct context *c); // frees what cuMemAlloc gave in a context

// --- stream.c: work in order

enum work { COPY, SET, WRITE_VALUE, WAIT_VALUE, WAIT_BITS, WAIT_STREAM, WAIT_IPC, RECORD, RECORD_IPC, KERNEL, LAUNCH };

struct segment { // n bytes of a copy, within one memory at each end
	char *dst, *src;
	size_t n;
	struct memory *to, *from;
};

struct operation {
	struct operation *next;
	enum work work;
	uint64_t number;      // in its stream
	uint64_t enqueued_ns; // by CLOCK_MONOTONIC
	struct fault fault;
	struct segment *segments; // COPY; SET: their destinations are set to the byte target
	size_t count;
	_Atomic uint64_t *value; // WRITE_VALUE, WAIT_VALUE, WAIT_BITS, in memory
	struct memory *memory;
	struct stream *other; // WAIT_STREAM: until its operation number target is done
	struct ipc *ipc;      // WAIT_IPC, RECORD_IPC: record number target
	struct launch *launch; // KERNEL
	struct exec *exec;     // LAUNCH
	uint64_t target;
};

struct stream {
	struct object object;
	struct context *context; // with a reference
	struct stream *next;     // in the context's list
	uint64_t handle;
	pthread_mutex_t mutex;
	pthread_cond_t work, done;
	struct operation *head, *tail;
	uint64_t enqueued, demanded; // numbers of operations
	_Atomic uint64_t completed;
	bool closing;          // ends when its work is done
	atomic_bool abandoned; // ends now
	bool ended;            // its thread touches nothing any more
	int waiting;           // threads in done
	atomic_bool copy_engine; // did its last work: see stream_engine
	struct member *captured; // its part in a capture; of graph.c
};

CUresult stream_new(struct context *c, struct stream **s);
CUresult stream_get(uint64_t handle, struct stream **s); // with a reference; 0: the current context's
uint64_t stream_enqueue(struct stream *s, struct operation *op); // takes op over, gives its number
bool stream_done(struct stream *s, uint64_t number);
CUresult stream_wait(struct stream *s, uint64_t number);
void stream_demand(struct stream *s, uint64_t number);
void stream_abandon(struct stream *s); // drops its work, and waits until its thread has
uint64_t stream_last(struct stream *s);
// stream_submit is stream_enqueue, or adds op to the capture that the stream is
// in; *number is 0 then.
CUresult stream_submit(struct stream *s, struct operation *op, uint64_t *number);
// stream_engine notes the engine of the work that a call is about to enqueue: a copy engine
// of its own, or the one that works in the time slices of kernels. The log counts the latter.
// With PEERLANE_SIM_BUSY another process has the slices: the latter is delayed, by f, or
// CUDA_ERROR_NOT_PERMITTED.
CUresult stream_engine(struct stream *s, bool copy_engine, struct fault *f);
void operation_do(struct stream *s, struct operation *op);
void operation_free(struct operation *op);
struct operation *operation_new(enum work work, const struct fault *f);
bool stream_over(struct stream *s); // no more work is to be done: it is gone, or its context is lost
void stream_load(void);
uint64_t now_ns(void);
void patience(uint64_t since); // a pause in a loop that looks at shared memory

// --- kernel.c: modules, and the kernels that the simulator knows

struct launch;

void launch_run(struct stream *s, struct launch *l);

// --- graph.c: captures, and the graphs that come of them

#define MAX_MEMBERS 16 // streams of one capture

// mark is where an event was recorded in a capture: what had been captured then.
struct mark {
	struct capture *capture; // with a reference; NULL: it was not
	uint64_t seen[MAX_MEMBERS];
};

bool capturing(struct stream *s);
CUresult capture_add(struct stream *s, struct operation *op); // takes op over
CUresult capture_record(struct stream *s, struct mark *m);
CUresult capture_wait(struct stream *s, const struct mark *m); // which may begin the stream's capture
CUresult capture_refuse(struct stream *s, CUresult r); // ends a capture that the stream is in with r, else does nothing
CUresult capture_forbids(const char *call);            // what is refused while others capture
void capture_leave(struct stream *s);                  // it is destroyed
void exec_run(struct stream *s, struct exec *e);

// --- ipc.c: the state of an interprocess event, in /dev/shm

struct ipc;

CUresult ipc_create(struct ipc **i);
CUresult ipc_open(const CUipcEventHandle *h, struct ipc **i);
void ipc_remove(struct ipc *i); // when its event is destroyed
void ipc_handle(const struct ipc *i, CUipcEventHandle *h);
uint64_t ipc_record(struct ipc *i);                  // a new record's number
void ipc_complete(struct ipc *i, uint64_t number);
uint64_t ipc_latest(struct ipc *i);
bool ipc_done(struct ipc *i, uint64_t number);
CUresult ipc_wait(struct ipc *i, uint64_t number, struct context *c); // until it is done

#endif
