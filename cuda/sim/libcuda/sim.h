// Declarations that the simulator's files share. Only the API is visible outside.
//
// Locks, in the order in which a thread may take them: ranges (memory.c) > a context's
// streams (context.c) > an event (event.c) > captures (graph.c) > a stream (stream.c) >
// handles (object.c). A thread takes the lock of handles also with that of a module
// (kernel.c), and no further lock with that of ipc.c. No mutex is shared between
// processes: processes share a file of atomic counters (host.c), the memory itself, and
// the state of interprocess events in files that their owners lock (ipc.c).
#ifndef PEERLANE_SIM_H
#define PEERLANE_SIM_H

#include "cuda_abi.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#define MAX_DEVICES 64
#define GRANULARITY ((size_t)2 << 20) // of device memory, as on current GPUs

// --- host.c: the simulated host, and what this process sees of it

struct device_log { // a record of the log; see host.go
	_Atomic uint64_t bytes_in, bytes_out, bytes_within, copies, contexts, allocated, slices, reserved;
};

struct device {
	int index, minor;
	unsigned domain, bus, slot;
	unsigned char uuid[16];
	uint64_t memory;
	char name[96];
	bool reachable; // the device node exists
	int ordinal;    // -1: unreachable, or hidden by CUDA_VISIBLE_DEVICES
	_Atomic uint64_t used; // by this process
	struct device_log *log;
};

CUresult host_load(void);
int host_visible(void);
struct device *host_device(CUdevice ordinal); // NULL: no such device
struct device *host_device_by_uuid(const unsigned char uuid[16]);
int host_place(const struct device *d); // index in tables of MAX_DEVICES
void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

// --- fault.c: errors to be injected, and the entry of every call

struct fault {
	unsigned delay_ms;
	bool corrupt, first; // a wrong byte in a copy: the first byte, or a byte in the middle
	CUresult strike; // a sticky error at the turn of the operation
};

void fault_load(void);

// enter begins every call: it checks that the library is initialized, that the device is
// not lost, and whether a fault is due. A call for an operation on a stream passes f, and
// the operation carries the fault; for other calls (f is NULL) enter applies the fault.
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

uint64_t handle_new(enum kind kind, void *object); // takes over a reference, also on failure; returns 0 on failure
void *handle_get(enum kind kind, uint64_t handle);  // with a reference; NULL: no such handle
void *handle_take(enum kind kind, uint64_t handle); // ends the handle and returns its reference

// --- context.c

struct context {
	struct object object;
	struct device *device;
	uint64_t handle;
	atomic_int sticky; // CUresult
	atomic_bool destroyed;
	_Atomic uint64_t peers; // indices of devices with enabled access
	pthread_mutex_t mutex;  // of the list
	struct stream *streams; // each with a reference
	struct stream *legacy;  // stream 0; in the list
};

CUresult context_current(struct context **c); // no reference: the current thread has one
CUresult context_state(struct context *c);    // destroyed or sticky
void context_fail(CUresult r);                // makes the current context sticky

// --- memory.c: memory, and the ranges of addresses that stand for it

// memory is bytes of a device, or of the host (device NULL).
struct memory {
	struct object object;
	struct device *device;
	int fd;     // -1: not a memfd
	char *data; // address of the data in this process
	size_t size;
	bool exportable, rdma;
	uint64_t nonce; // of its IPC handle; 0 without a handle
	uint64_t number; // CUDA's buffer ID, unique in this process
	bool counted;  // in device->used
	bool borrowed; // data belongs to the program, and is not unmapped
};

enum rights { NONE = 0, READ = 1, READ_WRITE = 3 };

struct range {
	uintptr_t base;
	size_t size;
	enum { MAPPED, ALLOCATED, OPENED, HOST_ALLOCATED, HOST_REGISTERED } kind;
	unsigned opens;        // of OPENED
	struct memory *memory; // the range begins at its first byte
	struct context *owner; // of ALLOCATED and host memory
	unsigned char rights[MAX_DEVICES]; // by device index; MAPPED only
};

// piece is a part of a copy's source or destination that lies in one memory.
struct piece {
	char *data;
	size_t size;
	struct memory *memory; // with a reference
};

CUresult memory_create(struct device *d, size_t size, bool exportable, bool rdma, struct memory **m);
CUresult memory_import(int fd, struct memory **m);
CUresult memory_name(struct memory *m, size_t size);                // gives the memory a nonce
CUresult memory_import_named(int fd, uint64_t nonce, struct memory **m, size_t *size);
struct memory *memory_host(size_t size);
struct memory *memory_borrow(void *p, size_t size);

extern pthread_mutex_t ranges_mutex;
struct range *range_add(uintptr_t base, size_t size); // NULL: overlaps another range
struct range *range_find(uintptr_t p);                // the range that contains p
struct range *range_next(uintptr_t p);                // the first range that ends after p
void range_remove(struct range *r);                   // with its references
uintptr_t reserve(size_t size, size_t alignment);     // inaccessible addresses; 0 on failure
bool reserved(uintptr_t p, size_t size);
CUresult unreserve(uintptr_t p, size_t size);

// locate finds the memory behind n bytes at p for an access of a device. It returns count
// pieces; 0 if CUDA does not know p: pageable memory.
CUresult locate(uintptr_t p, size_t n, struct device *d, enum rights need, struct piece **pieces, size_t *count);
void pieces_free(struct piece *pieces, size_t count);
void memory_forget(struct context *c); // frees the context's memory of cuMemAlloc

// --- stream.c: work in order

enum work { COPY, SET, WRITE_VALUE, WAIT_VALUE, WAIT_BITS, WAIT_STREAM, WAIT_IPC, RECORD, RECORD_IPC, KERNEL, LAUNCH };

struct segment { // n bytes of a copy, within one memory at each end
	char *dst, *src;
	size_t n;
	struct memory *to, *from;
};

void segment_count(const struct segment *g); // in the logs of the devices

struct operation {
	struct operation *next;
	enum work work;
	uint64_t number;      // in its stream
	uint64_t enqueued_ns; // by CLOCK_MONOTONIC
	struct fault fault;
	struct segment *segments; // COPY; SET: fill the destinations with the byte target
	size_t count;
	_Atomic uint64_t *value; // WRITE_VALUE, WAIT_VALUE, WAIT_BITS, in memory
	struct memory *memory;
	struct stream *other; // WAIT_STREAM: until operation number target of the stream is complete
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
	bool closing;          // end after the pending work
	atomic_bool abandoned; // end now
	bool ended;            // the thread accesses the stream no longer
	int waiting;           // threads in done
	atomic_bool copy_engine; // a copy engine did the last work: see stream_engine
	struct member *captured; // the stream's part in a capture; of graph.c
};

CUresult stream_new(struct context *c, struct stream **s);
CUresult stream_get(uint64_t handle, struct stream **s); // with a reference; 0: the current context's
uint64_t stream_enqueue(struct stream *s, struct operation *op); // takes over op, returns its number
bool stream_done(struct stream *s, uint64_t number);
CUresult stream_wait(struct stream *s, uint64_t number);
void stream_demand(struct stream *s, uint64_t number);
void stream_abandon(struct stream *s); // drops the work, and waits until the thread has dropped it
uint64_t stream_last(struct stream *s);
// stream_submit is stream_enqueue, or adds op to the capture of the stream; *number is
// then 0.
CUresult stream_submit(struct stream *s, struct operation *op, uint64_t *number);
// stream_engine records the engine of the work that a call is about to enqueue: a
// separate copy engine, or the engine that works in the time slices of kernels. The log
// counts the latter. With PEERLANE_SIM_BUSY another process has the time slices: f then
// gets a delay, or the result is CUDA_ERROR_NOT_PERMITTED.
CUresult stream_engine(struct stream *s, bool copy_engine, struct fault *f);
void operation_do(struct stream *s, struct operation *op);
void operation_free(struct operation *op);
struct operation *operation_new(enum work work, const struct fault *f);
bool stream_over(struct stream *s); // the stream must do no more work: it is destroyed, or its context is lost
void stream_load(void);
uint64_t now_ns(void);
void patience(uint64_t since); // a pause in a loop that polls shared memory

// --- kernel.c: modules, and the kernels that the simulator knows

struct launch;

void launch_run(struct stream *s, struct launch *l);

// --- graph.c: captures, and the graphs that come of them

#define MAX_MEMBERS 16 // streams of one capture

// mark is the place of an event's record in a capture: the operations captured before.
struct mark {
	struct capture *capture; // with a reference; NULL: not in a capture
	uint64_t seen[MAX_MEMBERS];
};

bool capturing(struct stream *s);
CUresult capture_add(struct stream *s, struct operation *op); // takes op over
CUresult capture_record(struct stream *s, struct mark *m);
CUresult capture_wait(struct stream *s, const struct mark *m); // which may begin the stream's capture
CUresult capture_refuse(struct stream *s, CUresult r); // ends the stream's capture with r, if any
CUresult capture_forbids(const char *call);            // the check of calls that are refused during a capture
void capture_leave(struct stream *s);                  // the stream is destroyed
void exec_run(struct stream *s, struct exec *e);

// --- ipc.c: the state of an interprocess event, in /dev/shm

struct ipc;

CUresult ipc_create(struct ipc **i);
CUresult ipc_open(const CUipcEventHandle *h, struct ipc **i);
void ipc_remove(struct ipc *i); // at the end of the event
void ipc_handle(const struct ipc *i, CUipcEventHandle *h);
uint64_t ipc_record(struct ipc *i);                  // number of a new record
void ipc_complete(struct ipc *i, uint64_t number);
uint64_t ipc_latest(struct ipc *i);
bool ipc_done(struct ipc *i, uint64_t number);
CUresult ipc_wait(struct ipc *i, uint64_t number, struct context *c); // until the record is complete

#endif
