// How bytes get from one queue pair to another, on one host: each pair listens on a
// socket in the host's directory, named by its number, and has a thread that asks and
// one that answers, one request at a time. Who moves the bytes is the process that the
// memory belongs to, so keys, bounds and rights are checked where they are known.
#include "softdevice.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

struct question {
	uint64_t remote;
	uint32_t opcode, length, rkey, immediate; // immediate as the wire has it
	uint32_t moved, none;                     // moved: the engine has copied the bytes already
};

// What an answer says beside the statuses of completions.
enum { NOT_READY = 100, PORT_DOWN = 101 };

static socklen_t name(struct sockaddr_un *a, uint32_t pair)
{
	*a = (struct sockaddr_un){.sun_family = AF_UNIX};
	// By the directory's descriptor, for its path may be longer than an address.
	snprintf(a->sun_path, sizeof a->sun_path, "/proc/self/fd/%d/qp-%u", host_directory(), pair);
	return sizeof *a;
}

int wire_listen(struct pair *p)
{
	struct sockaddr_un a;
	socklen_t n = name(&a, p->ibv.qp_num);
	p->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (p->listener < 0 || bind(p->listener, (struct sockaddr *)&a, n) != 0 || chmod(a.sun_path, 0666) != 0 || listen(p->listener, 8) != 0)
		return errno;
	return 0;
}

void wire_close(struct pair *p)
{
	if (p->listener < 0)
		return;
	struct sockaddr_un a;
	name(&a, p->ibv.qp_num);
	unlink(a.sun_path);
	// Those who wait to be accepted find nobody.
	shutdown(p->listener, SHUT_RDWR);
	close(p->listener);
	p->listener = -1;
}

static bool put(int fd, const void *data, size_t n)
{
	for (const char *at = data; n;) {
		ssize_t r = send(fd, at, n, MSG_NOSIGNAL);
		if (r < 0 && errno == EINTR)
			continue;
		if (r <= 0)
			return false;
		at += r;
		n -= (size_t)r;
	}
	return true;
}

static bool get(int fd, void *data, size_t n)
{
	uint64_t spin = host_spin();
	for (char *at = data; n;) {
		ssize_t r = recv(fd, at, n, spin ? MSG_DONTWAIT : 0);
		if (r < 0 && errno == EINTR)
			continue;
		if (r < 0 && spin && errno == EAGAIN) {
			if (host_now() >= spin)
				spin = 0;
			continue;
		}
		if (r <= 0)
			return false;
		at += r;
		n -= (size_t)r;
	}
	return true;
}

// patience is how long a NIC tries, in microseconds.
static uint64_t patience(const struct pair *p)
{
	if (!p->attributes.timeout)
		return UINT64_MAX / 2;
	return (4096ULL << p->attributes.timeout) / 1000 * (p->attributes.retry_cnt + 1u);
}

static bool port_is_down(struct pair *p)
{
	pthread_mutex_lock(&lock);
	bool down = p->context->device->described.state != IBV_PORT_ACTIVE;
	pthread_mutex_unlock(&lock);
	return down;
}

static bool lives(struct pair *p)
{
	pthread_mutex_lock(&lock);
	bool lives = !p->stopping && p->ibv.state == IBV_QPS_RTS;
	pthread_mutex_unlock(&lock);
	return lives;
}

static bool reach(struct pair *p)
{
	if (p->outgoing >= 0)
		return true;
	struct sockaddr_un a;
	socklen_t n = name(&a, p->attributes.dest_qp_num);
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	uint32_t me = p->ibv.qp_num;
	if (fd < 0 || connect(fd, (struct sockaddr *)&a, n) != 0 || !put(fd, &me, sizeof me)) {
		if (fd >= 0)
			close(fd);
		return false;
	}
	pthread_mutex_lock(&lock);
	p->outgoing = fd;
	bool alive = !p->stopping && p->ibv.state == IBV_QPS_RTS;
	pthread_mutex_unlock(&lock);
	return alive;
}

// writes reports whether a request writes registered memory to the other side.
static bool writes(const struct request *r)
{
	return r->length && !(r->flags & IBV_SEND_INLINE) && (r->opcode == IBV_WR_RDMA_WRITE || r->opcode == IBV_WR_RDMA_WRITE_WITH_IMM);
}

// AHEAD is for how many requests of a pair the engine copies at a time.
enum { AHEAD = 16 };

// start has the engine copy for the first requests of a pair, of one with a rate only for the first,
// whose turn it is. A read comes after the writes before it. The lock is held.
static void start(struct pair *p)
{
	const struct description *d = &p->context->device->described;
	unsigned ahead = d->rate ? 1 : AHEAD;
	for (unsigned i = 0; i < p->sends.count && i < ahead && d->state == IBV_PORT_ACTIVE; i++) {
		struct request *r = &p->sends.ring[(p->sends.first + i) % p->sends.capacity];
		if (r->opcode == IBV_WR_RDMA_READ || r->serial)
			return;
		if (!r->move && writes(r) && r->rkey & 1 && memory_engine(p->ibv.pd, r->lkey, r->address, r->length))
			r->move = engine_start(r->lkey, r->address, r->rkey, r->remote, r->length);
	}
}

// ask does a request, and gives its status.
static int ask(struct pair *p, const struct request *r, bool corrupt)
{
	bool reads = r->opcode == IBV_WR_RDMA_READ;
	int status = IBV_WC_SUCCESS;
	// A write that the engine refuses goes through the sockets, and the responder finds the reason.
	bool moved = r->move && engine_end(r->move) == 0 && !corrupt;
	char *buffer = malloc(moved ? 1 : r->length + 1);
	if (!buffer)
		return IBV_WC_LOC_QP_OP_ERR;
	pthread_mutex_lock(&lock);
	if (moved)
		;
	else if (r->flags & IBV_SEND_INLINE)
		memcpy(buffer, r->inlined, r->length);
	else if (r->length && reads ? !memory_at(p->ibv.pd, r->lkey, false, r->address, r->length, IBV_ACCESS_LOCAL_WRITE)
				    : r->length && !memory_copy(p->ibv.pd, r->lkey, r->address, r->length, buffer))
		status = IBV_WC_LOC_PROT_ERR;
	pthread_mutex_unlock(&lock);
	if (corrupt && !reads)
		buffer[r->length / 2] ^= 1;

	struct question q = {.remote = r->remote, .opcode = (uint32_t)r->opcode, .length = r->length, .rkey = r->rkey, .immediate = r->immediate, .moved = moved};
	unsigned refused = 0;
	for (uint64_t begun = host_now(); !status;) {
		int answer = PORT_DOWN;
		if (!port_is_down(p)) {
			if (!reach(p) || !put(p->outgoing, &q, sizeof q) || (!reads && !moved && !put(p->outgoing, buffer, r->length)) ||
			    !get(p->outgoing, &answer, sizeof answer)) {
				status = IBV_WC_RETRY_EXC_ERR;
				break;
			}
		}
		if (answer == PORT_DOWN) {
			if (host_now() - begun > patience(p))
				status = IBV_WC_RETRY_EXC_ERR;
		} else if (answer == NOT_READY) {
			host_log("receiver not ready device=%s qp=%u", p->context->device->ibv.name, p->ibv.qp_num);
			if (p->attributes.rnr_retry < 7 && refused++ >= p->attributes.rnr_retry)
				status = IBV_WC_RNR_RETRY_EXC_ERR;
		} else {
			status = answer;
			break;
		}
		if (!status && !lives(p))
			status = IBV_WC_WR_FLUSH_ERR;
		if (!status)
			usleep(1000);
	}
	if (!status && reads) {
		if (!get(p->outgoing, buffer, r->length))
			status = IBV_WC_RETRY_EXC_ERR;
		pthread_mutex_lock(&lock);
		// A request that has been flushed in the meantime writes nothing.
		char *data = p->ibv.state == IBV_QPS_RTS && !p->stopping && r->length ? memory_at(p->ibv.pd, r->lkey, false, r->address, r->length, IBV_ACCESS_LOCAL_WRITE) : NULL;
		if (corrupt)
			buffer[r->length / 2] ^= 1;
		if (!status && data)
			memcpy(data, buffer, r->length);
		else if (!status && r->length)
			status = IBV_WC_LOC_PROT_ERR;
		pthread_mutex_unlock(&lock);
	}
	free(buffer);
	return status;
}

// BURST is the time of which an idle port keeps the bytes, nanoseconds.
enum { BURST = 1000000 };

// pace waits for a request's turn at a port with a rate: a token bucket of all its pairs in all
// processes.
static void pace(struct pair *p, uint64_t bytes)
{
	const struct description *d = &p->context->device->described;
	_Atomic uint64_t *due = host_due(d->node);
	if (!d->rate || !due)
		return;
	uint64_t now = host_nanoseconds(), turn, seen = atomic_load(due);
	do
		turn = seen + BURST < now ? now - BURST : seen;
	while (!atomic_compare_exchange_weak(due, &seen, turn + (uint64_t)((double)bytes * 1e9 / (double)d->rate)));
	while (turn > now && lives(p)) {
		uint64_t left = (turn - now) / 1000;
		usleep(left > 10000 ? 10000 : (useconds_t)left);
		now = host_nanoseconds();
	}
}

void *wire_request(void *pair)
{
	struct pair *p = pair;
	pthread_mutex_lock(&lock);
	for (;;) {
		for (uint64_t spin = host_spin(); !p->stopping && p->ibv.state != IBV_QPS_ERR && (!p->by_threads || p->sends.ring[p->sends.first].serial);) {
			if (!spin) {
				pthread_cond_wait(&p->changed, &lock);
				continue;
			}
			pthread_mutex_unlock(&lock);
			while (!__atomic_load_n(&p->by_threads, __ATOMIC_RELAXED) && host_now() < spin)
				;
			spin = 0;
			pthread_mutex_lock(&lock);
		}
		if (p->stopping || p->ibv.state == IBV_QPS_ERR)
			break;
		struct request *next = &p->sends.ring[p->sends.first];
		uint32_t length = next->length;
		if (p->context->device->described.rate) {
			pthread_mutex_unlock(&lock);
			pace(p, length);
			pthread_mutex_lock(&lock);
			if (p->stopping || p->ibv.state == IBV_QPS_ERR)
				break; // flushed
		}
		start(p);
		struct request r = *next;
		next->move = NULL; // ask waits for it
		pthread_mutex_unlock(&lock);
		struct rule rule = host_script("send", p->context->device->ibv.name);
		int status = rule.status;
		if (!status)
			status = ask(p, &r, rule.corrupt);
		else if (r.move)
			engine_end(r.move);
		pthread_mutex_lock(&lock);
		if (p->stopping || p->ibv.state == IBV_QPS_ERR)
			break; // flushed
		p->sends.first = (p->sends.first + 1) % p->sends.capacity;
		p->sends.count--;
		p->by_threads--;
		pair_complete(p, &r, status, r.length);
		if (status) {
			host_log("send failed device=%s qp=%u id=%llu status=%d", p->context->device->ibv.name, p->ibv.qp_num, (unsigned long long)r.id, status);
			pair_fail(p, false);
		}
	}
	pthread_mutex_unlock(&lock);
	return NULL;
}

// late is a write that is not in the memory yet. A device with a seed completes writes to regions with
// relaxed ordering before the bytes are there, and writes in another order. All bytes are there
// before a receive completes or a read is answered, and in any case after LATE.
struct late {
	struct late *next;
	uint64_t remote;
	uint32_t rkey, length;
	char data[];
};

enum { LATE = 1 }; // milliseconds

static uint64_t next_random(struct pair *p)
{
	uint64_t x = p->random ? p->random : p->context->device->described.seed;
	x ^= x << 13;
	x ^= x >> 7;
	x ^= x << 17;
	return p->random = x;
}

// write_late writes one of the late writes, in a random order. The lock is held.
static void write_late(struct pair *p)
{
	unsigned n = 0;
	for (struct late *l = p->late; l; l = l->next)
		n++;
	struct late **at = &p->late;
	for (uint64_t skip = next_random(p) % n; skip; skip--)
		at = &(*at)->next;
	struct late *l = *at;
	*at = l->next;
	memory_write(p->ibv.pd, l->rkey, l->remote, l->length, l->data); // of a region that is gone: not at all
	free(l);
}

static void write_all_late(struct pair *p)
{
	while (p->late)
		write_late(p);
}

// postpone keeps a write for later, and writes some of those that were kept. The lock is held.
static bool postpone(struct pair *p, const struct question *q, const char *data)
{
	struct late *l = malloc(sizeof *l + q->length);
	if (!l)
		return false;
	*l = (struct late){.next = p->late, .remote = q->remote, .rkey = q->rkey, .length = q->length};
	memcpy(l->data, data, q->length);
	p->late = l;
	while (p->late && next_random(p) & 4)
		write_late(p);
	return true;
}

// answer does what is asked, and gives what the other side's request ends with; of one
// that fails this pair, too, denied says whether it is for an access that it may not
// have. The lock is held.
static int answer(struct pair *p, const struct question *q, char *data, bool *denied)
{
	bool immediate = q->opcode == IBV_WR_RDMA_WRITE_WITH_IMM || q->opcode == IBV_WR_SEND_WITH_IMM;
	bool message = q->opcode == IBV_WR_SEND || q->opcode == IBV_WR_SEND_WITH_IMM;
	if ((immediate || message) && !p->receives.count)
		return NOT_READY;
	if (p->context->device->described.seed && q->opcode == IBV_WR_RDMA_WRITE && !q->moved && q->length && p->attributes.qp_access_flags & IBV_ACCESS_REMOTE_WRITE &&
	    memory_relaxed(p->ibv.pd, q->rkey, q->remote, q->length) && postpone(p, q, data))
		return IBV_WC_SUCCESS;
	if (immediate || message || q->opcode == IBV_WR_RDMA_READ)
		write_all_late(p);
	unsigned access = q->opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
	if (!message && q->length) {
		bool reads = q->opcode == IBV_WR_RDMA_READ, may = p->attributes.qp_access_flags & access;
		if (!may || !(q->moved ? memory_writable(p->ibv.pd, q->rkey, q->remote, q->length) : reads ? memory_read(p->ibv.pd, q->rkey, q->remote, q->length, data) : memory_write(p->ibv.pd, q->rkey, q->remote, q->length, data))) {
			*denied = true;
			return IBV_WC_REM_ACCESS_ERR;
		}
	}
	if (!immediate && !message)
		return IBV_WC_SUCCESS;
	struct request r = pair_receive(p);
	rings_used(p);
	int own = IBV_WC_SUCCESS, theirs = IBV_WC_SUCCESS;
	if (message && q->length) {
		char *at = NULL;
		if (r.length < q->length)
			own = IBV_WC_LOC_LEN_ERR, theirs = IBV_WC_REM_INV_REQ_ERR;
		else if (!(at = memory_at(p->ibv.pd, r.lkey, false, r.address, q->length, IBV_ACCESS_LOCAL_WRITE)))
			own = IBV_WC_LOC_PROT_ERR, theirs = IBV_WC_REM_OP_ERR;
		else
			memcpy(at, data, q->length);
	}
	queue_push(p->ibv.recv_cq, (struct ibv_wc){
		.wr_id = r.id,
		.status = own,
		.opcode = message ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM,
		.byte_len = q->length,
		.imm_data = immediate ? q->immediate : 0,
		.wc_flags = immediate ? IBV_WC_WITH_IMM : 0,
		.qp_num = p->ibv.qp_num,
		.vendor_err = own ? 0x50 + (uint32_t)own : 0,
	});
	return theirs;
}

// serve answers the other pair until it is gone.
static void serve(struct pair *p, int fd)
{
	uint32_t who;
	if (!get(fd, &who, sizeof who) || who != p->attributes.dest_qp_num)
		return;
	struct question q;
	for (;;) {
		struct pollfd ready = {.fd = fd, .events = POLLIN};
		if (p->late && poll(&ready, 1, LATE) == 0) {
			pthread_mutex_lock(&lock);
			write_all_late(p);
			pthread_mutex_unlock(&lock);
		}
		if (!get(fd, &q, sizeof q))
			return;
		bool reads = q.opcode == IBV_WR_RDMA_READ;
		char *data = malloc(q.moved ? 1 : q.length + 1);
		if (!data || (!reads && !q.moved && !get(fd, data, q.length))) {
			free(data);
			return;
		}
		int status = PORT_DOWN;
		if (!port_is_down(p)) {
			pthread_mutex_lock(&lock);
			bool ready = !p->stopping && (p->ibv.state == IBV_QPS_RTR || p->ibv.state == IBV_QPS_RTS);
			bool denied = false;
			if (ready)
				status = answer(p, &q, data, &denied);
			bool fails = status != IBV_WC_SUCCESS && status < NOT_READY;
			if (ready && fails) {
				// Before the socket is shut down, for the asker to know why.
				put(fd, &status, sizeof status);
				pair_fail(p, denied);
			}
			pthread_mutex_unlock(&lock);
			if (!ready || fails) {
				free(data);
				return;
			}
		}
		bool sent = put(fd, &status, sizeof status) && (!reads || status != IBV_WC_SUCCESS || put(fd, data, q.length));
		free(data);
		if (!sent)
			return;
	}
}

void *wire_respond(void *pair)
{
	struct pair *p = pair;
	for (;;) {
		pthread_mutex_lock(&lock);
		int listener = p->listener;
		pthread_mutex_unlock(&lock);
		if (listener < 0)
			return NULL;
		struct pollfd ready[] = {{.fd = listener, .events = POLLIN}, {.fd = p->wake[0], .events = POLLIN}};
		if (poll(ready, 2, -1) < 0 && errno == EINTR)
			continue;
		if (ready[1].revents)
			return NULL;
		int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		if (fd < 0)
			continue;
		pthread_mutex_lock(&lock);
		bool alive = p->listener >= 0;
		p->incoming = alive ? fd : -1;
		pthread_mutex_unlock(&lock);
		if (alive)
			serve(p, fd);
		pthread_mutex_lock(&lock);
		write_all_late(p);
		p->incoming = -1;
		close(fd);
		pthread_mutex_unlock(&lock);
	}
}
