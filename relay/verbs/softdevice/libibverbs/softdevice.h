// The software device: what its files share. See the package's documentation
// for what it does, and host.c for the files that it reads and writes.
#ifndef SOFTDEVICE_H
#define SOFTDEVICE_H

#define _GNU_SOURCE
#include <stdbool.h>
#include <stdint.h>

#include "abi.h"

#define API __attribute__((visibility("default")))

enum { GIDS = 8, DEVICES = 16, INLINE = 220 };

// RINGS_BYTES is the size of the memory that this process and the engine share, and RING_READ how much
// of memory a report has.
enum { RINGS_BYTES = 4096 + 2 * 1024 * 64 + 4096 * 64, RING_READ = 32 };

// description is a line of the file devices.
struct description {
	char name[64];
	int transport, link_layer, state, node;
	uint64_t guid;
	uint16_t lid;
	uint32_t address; // IPv4, this machine's order
	unsigned entry;   // of the GID table, where its two begin
	bool dmabuf, holds, grh, resize, direct;
	uint64_t prefix;
	uint32_t ece;
	int entries;
	// fault is how a broken device treats memory of GPUs; see host.c.
	enum { FAULT_NONE, FAULT_NO_FLUSH, FAULT_REORDERED_FLUSH, FAULT_STALE_READ, FAULT_LOST_TAIL, FAULT_WRONG_GPU, FAULT_TORN } fault;
	uint64_t rate; // bytes a second of all its writes and reads, 0 for no limit
	uint64_t seed; // of the order of writes, 0 for that of the requests
	enum { PEERMEM_NO, PEERMEM_ALLOC, PEERMEM_YES } peermem;
};

// rule is what the file script says of a call.
struct rule {
	int error, status;
	unsigned delay_ms;
	bool corrupt, hold;
};

struct device {
	struct ibv_device ibv;
	struct description described;
};

struct context {
	struct ibv_context ibv;
	struct device *device;
	int events[2]; // a pipe; the reading end is async_fd
	int domains, queues, channels;
	struct context *next;
};

struct domain {
	struct ibv_pd ibv;
	int regions, pairs;
};

struct region {
	struct ibv_mr ibv;
	uint64_t iova;
	char *data; // where this process reaches the bytes
	unsigned access;
	bool gpu;
	bool engine; // registered with the engine; data is NULL
	void *mapped; // of a DMA-BUF
	size_t mapped_bytes;
	char *before; // of FAULT_STALE_READ: the content at the last read
	struct region *next;
};

struct channel {
	struct ibv_comp_channel ibv;
	int end; // the pipe's writing end
};

struct queue {
	struct ibv_cq ibv;
	struct ibv_wc *ring;
	unsigned capacity, first, count;
	bool armed, overrun;
	int pairs;
	unsigned unacknowledged;
};

// request is a posted work request with what it says of memory.
struct request {
	uint64_t id, address, remote;
	uint32_t length, lkey, rkey, immediate;
	int opcode;
	unsigned flags;
	struct move *move; // its copy by the engine, NULL for none so far
	uint32_t serial;   // of a request that the engine has, 0 of others
	char inlined[INLINE];
};

// work is a queue of requests.
struct work {
	struct request *ring;
	unsigned capacity, first, count;
	unsigned unsignalled; // of ended requests that still take up room
};

struct pair {
	struct ibv_qp ibv;
	struct context *context;
	struct ibv_qp_attr attributes;
	bool signal_all;
	struct ibv_ece ece; // what ibv_query_ece gives
	struct work sends, receives;
	pthread_cond_t changed; // state, sends or stopping
	bool stopping;
	int listener, outgoing, incoming; // sockets, -1 for none
	int wake[2];                      // a pipe that ends the responder's waits
	int connection;                   // the connection manager's socket, -1 for none
	pthread_t requester, responder;
	bool requesting, responding;
	// What the engine has of the pair: its slot, -1 for none, the last request's number, and how often
	// it has refused requests. by_threads are the requests in sends that the requester does.
	int slot;
	uint32_t serial, epoch;
	unsigned by_threads;
	// Relaxed writes of the other side that are not in the memory yet, and the state of the generator that
	// orders these.
	struct late *late;
	uint64_t random;
};

// One lock for all of it: this is not about speed.
extern pthread_mutex_t lock;

// host.c
int host_devices(struct description *into, int n); // how many, -1 with errno
bool host_device(const char *name, struct description *d);
int host_directory(void); // descriptor, -1 with errno
uint32_t host_number(void); // a new one, of all processes
// host_due is when the port of a device has moved all that processes have posted, nanoseconds of
// host_nanoseconds; NULL without a file of numbers.
_Atomic uint64_t *host_due(int node);
uint64_t host_nanoseconds(void);
struct rule host_script(const char *call, const char *device);
struct rule host_script_of(const char *call, const char *device, size_t bytes);
bool host_scripted(void); // there is a script
uint64_t host_now(void); // microseconds
// host_spin is until when a thread looks again and again before it sleeps: to wake a thread of an
// idle processor takes tens of microseconds. 0 on a machine with few processors.
uint64_t host_spin(void);
void host_log(const char *form, ...) __attribute__((format(printf, 1, 2)));
// host_watch has changes of the file devices told, until host_unwatch.
int host_watch(void (*changed)(void));
void host_unwatch(void);

// device.c
void device_event(struct context *c, struct ibv_async_event event);
void device_lost(void);

// memory.c
// memory_at is where this process reaches what a key gives access to, or NULL. The lock
// is held, and with it the memory stays.
char *memory_at(struct ibv_pd *pd, uint32_t key, bool remote, uint64_t address, uint64_t n, unsigned access);
// memory_copy is what this side's NIC reads of its own memory for a request, false where it may
// not. The lock is held.
bool memory_copy(struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t n, char *into);
// memory_write and memory_read are what the other side's NIC does to memory: a GPU's, of a
// device that holds, has what is written when that device next reads it. They report whether
// the key gives access. The lock is held.
bool memory_write(struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t n, const char *data);
bool memory_read(struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t n, char *data);
// memory_writable reports whether the key gives the other side's NIC access for writing. The lock is held.
bool memory_writable(struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t n);
// memory_relaxed reports the same of a region with relaxed ordering in this process.
bool memory_relaxed(struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t n);
// memory_engine reports whether the engine has the memory that a request of this side reads. The lock
// is held.
bool memory_engine(struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t n);

// engine.c
// engine_register has the engine know GPU memory by its lkey: an errno, ENOENT without an engine or
// for memory that is no exportable allocation.
int engine_register(struct ibv_pd *pd, uint32_t key, uintptr_t p, size_t n, unsigned access);
void engine_forget(uint32_t key);
// engine_start asks the engine for a copy from a region of this process to the region of a key.
// engine_end waits for the copy and returns an errno, ENOENT for an unknown key. engine_abandon frees a
// copy without a wait.
struct move *engine_start(uint32_t from, uint64_t source, uint32_t to, uint64_t target, uint64_t n);
int engine_end(struct move *m);
void engine_abandon(struct move *m);
// engine_read and engine_write copy between a region of this process and this process's memory.
bool engine_read(uint32_t key, uint64_t address, uint64_t n, char *into);
bool engine_write(uint32_t key, uint64_t address, uint64_t n, const char *data);

// engine_connect has the engine know a queue pair that receives, engine_disconnect ends that: the engine
// then moves no byte for it any more. The lock is not held.
int engine_connect(struct pair *p);
void engine_disconnect(struct pair *p);

// rings.c: the lock is held, but for rings_begin, rings_end and rings_waiting.
// rings_begin makes the shared memory and returns an errno. fds are the memory, the eventfds of this
// process and of the engine, and the file of numbers; -1 for those that are not there.
int rings_begin(int fds[4]);
void rings_end(void); // the engine has ended
int rings_reserve(struct pair *p); // a slot, -1 for none
void rings_use(struct pair *p, int slot);
void rings_release(struct pair *p, int slot);
// rings_ready allows or forbids the engine to write for a pair. After a ban it takes the completions
// that the engine wrote before.
void rings_ready(struct pair *p, bool ready);
void rings_ports(struct context *c);
void rings_posted(struct pair *p);
void rings_used(struct pair *p);
// rings_submit gives a request to the engine. It returns false if the requester has to do it.
bool rings_submit(struct pair *p, struct request *r);
// rings_waiting reports whether there are reports, and rings_take takes them.
bool rings_waiting(void);
void rings_take(void);
// rings_arm has the next report wake this process.
void rings_arm(void);

// queue.c
void queue_push(struct ibv_cq *cq, struct ibv_wc wc);
void queue_forget(struct ibv_cq *cq, uint32_t pair);

// pair.c
int pair_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int pair_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
void pair_fail(struct pair *p, bool event); // the lock is held
void pair_complete(struct pair *p, const struct request *r, int status, uint32_t bytes);
// pair_receive takes the first posted receive. The lock is held.
struct request pair_receive(struct pair *p);
// pair_arrived completes a receive for a write with an immediate, as the wire has it. The lock is held.
void pair_arrived(struct pair *p, uint32_t immediate, uint32_t bytes);
// pair_connect has it send and receive, by a connection that ends when the pair fails.
void pair_connect(struct pair *p, uint32_t to, int connection);

// wire.c
int wire_listen(struct pair *p);
void wire_close(struct pair *p); // no more listening
void *wire_request(void *pair);
void *wire_respond(void *pair);

// What the connection manager uses of the library itself.
struct ibv_device **ibv_get_device_list(int *n);
void ibv_free_device_list(struct ibv_device **list);
struct ibv_context *ibv_open_device(struct ibv_device *device);
int ibv_close_device(struct ibv_context *context);
struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a);
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask);
int ibv_destroy_qp(struct ibv_qp *qp);
int rdma_destroy_id(struct rdma_cm_id *id);

int queue_poll(struct ibv_cq *cq, int n, struct ibv_wc *wc);
int queue_arm(struct ibv_cq *cq, int solicited);
// queue_armed reports whether a completion queue is armed; the lock is held.
bool queue_armed(void);

#endif
