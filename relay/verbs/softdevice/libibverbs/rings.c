// The rings between this process and the engine. The engine is the NIC of queue pairs whose memory it
// has registered: this process submits a work request by one entry of shared memory, the engine copies
// the bytes, and reports to this process and to the process of the other queue pair by one entry
// each. Neither side makes a system call while the other one polls.
//
// The engine reports success only. A request that it does not finish for whatever reason (a key, a
// port that is down, no posted receive) it refuses, together with all later ones of that
// queue pair; the threads of wire.c do these again and find the status.
#include "softdevice.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ENTRIES = 1024, SLOTS = 4096 };

// The layout is package engine's as well (rings.go).
struct submission {
	uint32_t opcode, pair, serial, epoch, lkey, rkey;
	uint64_t address, remote;
	uint32_t length, immediate;
	uint64_t none[2];
};
_Static_assert(sizeof(struct submission) == 64, "as package engine has it");

enum { DONE = 1, REFUSED, ARRIVED };

struct report {
	uint32_t kind, pair, slot, serial, immediate, length;
	char data[RING_READ];
	uint64_t none;
};
_Static_assert(sizeof(struct report) == 64, "as package engine has it");

// slot is the state of a queue pair that the engine reads. The engine never writes it.
struct slot {
	_Atomic uint32_t ready;  // the queue pair receives, and its port is active
	_Atomic uint32_t posted; // receives
	_Atomic uint32_t used;   // receives that the threads of wire.c took
	_Atomic uint32_t taken;  // receives that reports of the engine took
	uint64_t none[6];
};
_Static_assert(sizeof(struct slot) == 64, "as package engine has it");

static struct shared {
	_Alignas(64) _Atomic uint64_t submitted;
	_Alignas(64) _Atomic uint64_t fetched;
	_Alignas(64) _Atomic uint32_t engine_sleeps;
	_Alignas(64) _Atomic uint64_t reported;
	_Alignas(64) _Atomic uint64_t read;
	_Alignas(64) _Atomic uint32_t waits; // this process wants its eventfd written
	_Alignas(4096) struct submission submissions[ENTRIES];
	struct report reports[ENTRIES];
	struct slot slots[SLOTS];
} *shared;
_Static_assert(offsetof(struct shared, submissions) == 4096 && offsetof(struct shared, waits) == 320, "as package engine has it");

static struct pair *pairs[SLOTS]; // under the lock
static int to_engine = -1, from_engine = -1;

// waiter takes reports when no thread polls and a completion queue is armed.
static void *waiter(void *eventfd)
{
	int fd = (int)(intptr_t)eventfd;
	eventfd_t n;
	while (eventfd_read(fd, &n) == 0 || errno == EINTR) {
		pthread_mutex_lock(&lock);
		bool ended = from_engine != fd;
		if (!ended) {
			rings_take();
			if (queue_armed()) // the report may be of an unsignaled request
				rings_arm();
		}
		pthread_mutex_unlock(&lock);
		if (ended)
			break;
	}
	close(fd);
	return NULL;
}

int rings_begin(int fds[4])
{
	static const int sealed = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
	pthread_t thread;
	fds[0] = memfd_create("softdevice-rings", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	fds[1] = eventfd(0, EFD_CLOEXEC);
	fds[2] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	fds[3] = openat(host_directory(), "number", O_RDWR | O_CLOEXEC);
	void *p = MAP_FAILED;
	if (fds[0] >= 0 && fds[1] >= 0 && fds[2] >= 0 && fds[3] >= 0 && ftruncate(fds[0], RINGS_BYTES) == 0 && fcntl(fds[0], F_ADD_SEALS, sealed) == 0)
		p = mmap(NULL, RINGS_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
	int error = p == MAP_FAILED ? errno : 0;
	if (!error) {
		from_engine = fds[1];
		to_engine = fds[2];
		error = pthread_create(&thread, NULL, waiter, (void *)(intptr_t)from_engine);
		if (error)
			from_engine = to_engine = -1; /* the caller closes them */
	}
	if (!error) {
		pthread_detach(thread);
		pthread_mutex_lock(&lock);
		shared = p;
		pthread_mutex_unlock(&lock);
	}
	return error;
}
_Static_assert(sizeof(struct shared) <= RINGS_BYTES, "rounded up to pages");

// rings_end fails the queue pairs that the engine served: a write whose report is lost arrives never.
void rings_end(void)
{
	pthread_mutex_lock(&lock);
	rings_take();
	for (unsigned i = 0; i < SLOTS; i++) {
		struct pair *p = pairs[i];
		if (!p)
			continue;
		pairs[i] = NULL;
		p->slot = -1;
		for (unsigned k = 0; k < p->sends.count; k++) {
			struct request *r = &p->sends.ring[(p->sends.first + k) % p->sends.capacity];
			p->by_threads += r->serial != 0;
			r->serial = 0;
		}
		pair_fail(p, false);
	}
	shared = NULL; // stays mapped: rings_waiting reads it without the lock
	if (from_engine >= 0)
		eventfd_write(from_engine, 1); // its thread ends
	if (to_engine >= 0)
		close(to_engine);
	from_engine = to_engine = -1;
	pthread_mutex_unlock(&lock);
}

int rings_reserve(struct pair *p)
{
	for (int i = 0; shared && i < SLOTS; i++)
		if (!pairs[i]) {
			pairs[i] = p;
			memset(&shared->slots[i], 0, sizeof shared->slots[i]);
			return i;
		}
	return -1;
}

void rings_release(struct pair *p, int slot)
{
	if (pairs[slot] == p)
		pairs[slot] = NULL;
}

static bool receives(struct pair *p)
{
	return !p->stopping && (p->ibv.state == IBV_QPS_RTR || p->ibv.state == IBV_QPS_RTS);
}

void rings_use(struct pair *p, int slot)
{
	if (!shared)
		return;
	p->slot = slot;
	atomic_store(&shared->slots[slot].posted, p->receives.count);
	rings_ready(p, receives(p) && p->context->device->described.state == IBV_PORT_ACTIVE);
}

void rings_ready(struct pair *p, bool ready)
{
	if (p->slot < 0 || !shared)
		return;
	atomic_store(&shared->slots[p->slot].ready, ready);
	// The engine looks at ready again after a report: a report that is there now counts.
	if (!ready)
		rings_take();
}

void rings_ports(struct context *c)
{
	for (int i = 0; shared && i < SLOTS; i++)
		if (pairs[i] && pairs[i]->slot == i && pairs[i]->context == c)
			rings_ready(pairs[i], receives(pairs[i]) && c->device->described.state == IBV_PORT_ACTIVE);
}

void rings_posted(struct pair *p)
{
	if (p->slot >= 0 && shared)
		atomic_fetch_add(&shared->slots[p->slot].posted, 1);
}

void rings_used(struct pair *p)
{
	if (p->slot >= 0 && shared)
		atomic_fetch_add(&shared->slots[p->slot].used, 1);
}

// suits reports whether the engine may be able to do a request.
static bool suits(struct pair *p, const struct request *r)
{
	bool reads = r->opcode == IBV_WR_RDMA_READ;
	if (r->opcode != IBV_WR_RDMA_WRITE && r->opcode != IBV_WR_RDMA_WRITE_WITH_IMM && !reads)
		return false;
	if (!r->length)
		return !reads;
	if (r->flags & IBV_SEND_INLINE || !(r->rkey & 1))
		return false;
	if (reads)
		return r->length <= RING_READ && memory_at(p->ibv.pd, r->lkey, false, r->address, r->length, IBV_ACCESS_LOCAL_WRITE);
	return memory_engine(p->ibv.pd, r->lkey, r->address, r->length);
}

bool rings_submit(struct pair *p, struct request *r)
{
	if (p->slot < 0 || !shared || p->by_threads || host_scripted() || p->ibv.state != IBV_QPS_RTS || p->context->device->described.state != IBV_PORT_ACTIVE || !suits(p, r))
		return false;
	uint64_t at = atomic_load_explicit(&shared->submitted, memory_order_relaxed);
	if (at - atomic_load_explicit(&shared->fetched, memory_order_acquire) >= ENTRIES)
		return false;
	if (!++p->serial)
		p->serial = 1;
	r->serial = p->serial;
	shared->submissions[at % ENTRIES] = (struct submission){
		.opcode = (uint32_t)r->opcode,
		.pair = p->ibv.qp_num,
		.serial = r->serial,
		.epoch = p->epoch,
		.lkey = r->lkey,
		.rkey = r->rkey,
		.address = r->address,
		.remote = r->remote,
		.length = r->length,
		.immediate = r->immediate,
	};
	atomic_store(&shared->submitted, at + 1); // before the load: the engine stores, and loads, in the other order
	if (atomic_load(&shared->engine_sleeps) && atomic_exchange(&shared->engine_sleeps, 0))
		eventfd_write(to_engine, 1);
	return true;
}

// finished takes a report about a request of this process.
static void finished(struct pair *p, const struct report *e)
{
	if (p->ibv.state != IBV_QPS_RTS)
		return; // flushed
	if (e->kind == REFUSED) {
		for (unsigned i = 0; i < p->sends.count; i++) {
			struct request *r = &p->sends.ring[(p->sends.first + i) % p->sends.capacity];
			if (r->serial != e->serial)
				continue;
			if (!p->by_threads)
				p->epoch++;
			r->serial = 0;
			p->by_threads++;
			pthread_cond_broadcast(&p->changed);
			return;
		}
		return;
	}
	struct request *r = &p->sends.ring[p->sends.first];
	if (!p->sends.count || r->serial != e->serial)
		return;
	char *to = r->opcode == IBV_WR_RDMA_READ ? memory_at(p->ibv.pd, r->lkey, false, r->address, r->length, IBV_ACCESS_LOCAL_WRITE) : NULL;
	bool lost = r->opcode == IBV_WR_RDMA_READ && !to;
	if (to)
		memcpy(to, e->data, r->length);
	struct request ended = *r;
	p->sends.first = (p->sends.first + 1) % p->sends.capacity;
	p->sends.count--;
	pair_complete(p, &ended, lost ? IBV_WC_LOC_PROT_ERR : IBV_WC_SUCCESS, ended.length);
	if (lost)
		pair_fail(p, false);
	else if (p->by_threads)
		pthread_cond_broadcast(&p->changed);
}

// arrived takes a report about a write of the other side.
static void arrived(struct pair *p, const struct report *e)
{
	if (!receives(p) || !p->receives.count)
		return; // the engine sees that it was not taken
	atomic_fetch_add(&shared->slots[p->slot].taken, 1);
	pair_arrived(p, e->immediate, e->length);
}

bool rings_waiting(void)
{
	struct shared *s = __atomic_load_n(&shared, __ATOMIC_RELAXED);
	return s && atomic_load_explicit(&s->reported, memory_order_relaxed) != atomic_load_explicit(&s->read, memory_order_relaxed);
}

void rings_take(void)
{
	static bool taking; // a report can fail a pair, which takes reports
	if (!shared || taking)
		return;
	taking = true;
	for (uint64_t at = atomic_load(&shared->read); at != atomic_load(&shared->reported); at++) {
		struct report e = shared->reports[at % ENTRIES];
		struct pair *p = e.slot < SLOTS ? pairs[e.slot] : NULL;
		if (p && p->ibv.qp_num == e.pair) {
			if (e.kind == ARRIVED)
				arrived(p, &e);
			else
				finished(p, &e);
		}
		atomic_store(&shared->read, at + 1); // after taken: the engine reads both
	}
	taking = false;
}

void rings_arm(void)
{
	if (!shared)
		return;
	atomic_store(&shared->waits, 1);
	rings_take();
}
