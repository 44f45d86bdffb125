/* Memory that NCCL registers. */
#include "plugin.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of sessions' regions; held in no call of libpeerlane's */

/* What differs between NCCL's address and the twin's, so that what is aligned in one is
 * aligned in the other. */
#define ALIGNED 64

static int register_host(struct communicator *c, struct region *r)
{
	const peerlane_gpu *gpu = &c->relay->lane[c->device].gpu;
	char text[PLACE];
	void *data;
	int status;

	r->first = r->base % ALIGNED;
	status = peerlane_host_memory(c->tie->session, r->bytes + r->first, gpu, c->sends ? PEERLANE_ACCESS_SEND : PEERLANE_ACCESS_RECEIVE, &data, &r->memory);
	if (status) {
		warn("registering %zu bytes of host memory: %s: %s", r->bytes, place(c->relay, c->device, text), peerlane_error());
		return nccl_error(status);
	}
	r->twin = (uint8_t *)data + r->first;
	if (c->sends && !c->buffer.data) {
		/* Without it sends end when the receiver has their bytes. */
		status = peerlane_host_memory(c->tie->session, BUFFER_BYTES, gpu, PEERLANE_ACCESS_SEND, &data, &c->buffer.memory);
		if (!status)
			c->buffer.data = data;
		else
			inform("%s: no buffer for sends: %s", place(c->relay, c->device, text), peerlane_error());
	}
	return NCCL_SUCCESS;
}

/* register_gpu exports memory. What cannot be exported is refused where the communicator
 * holds memory that could: that is a program's own, and NCCL goes through its buffers
 * then. Where NCCL's own cannot be, there is only the legacy way. */
static int register_gpu(struct communicator *c, struct region *r)
{
	static bool announced;
	const void *data = (const void *)r->base;
	uint32_t access = c->sends ? PEERLANE_ACCESS_SEND : PEERLANE_ACCESS_RECEIVE;
	int status = peerlane_export_pointer(c->tie->session, data, r->bytes, access, &r->memory);
	char why[1024] = "", text[PLACE];

	if (status && !c->exported && status == PEERLANE_STATUS_CUDA) {
		strncpy(why, peerlane_error(), sizeof why - 1);
		status = peerlane_export_pointer_ipc(c->tie->session, data, r->bytes, access, &r->memory);
		if (!status && !__atomic_exchange_n(&announced, true, __ATOMIC_RELAXED))
			warn("%s: NCCL's buffers are shared with the relay by legacy CUDA IPC (%s)", place(c->relay, c->device, text), why);
	}
	if (!status) {
		c->exported++;
		return NCCL_SUCCESS;
	}
	if (c->exported) {
		inform("%s: %zu bytes at %p are not registered, and go through NCCL's buffers: %s", place(c->relay, c->device, text), r->bytes, data, peerlane_error());
		return nccl_error(status);
	}
	warn("registering %zu bytes of GPU memory: %s: %s%s%s. PEERLANE_NCCL_POINTERS=host has all data go through host memory",
		r->bytes, place(c->relay, c->device, text), why, *why ? "; " : "", peerlane_error());
	return nccl_error(status);
}

/* same finds what was registered in the session before, and counts one use more. NCCL
 * deregisters memory before it frees it; programs that register their own may not, and then
 * other memory can lie at the address: that is told apart by its id. */
static struct region *same(struct communicator *c, uintptr_t base, size_t bytes, bool host, uint64_t id)
{
	struct region *r;

	pthread_mutex_lock(&lock);
	for (r = c->tie->regions; r; r = r->next)
		if (r->base == base && r->bytes == bytes && r->sends == c->sends && r->lane == c->device && (r->twin != NULL) == host && (host || (id && r->id == id))) {
			r->uses++;
			break;
		}
	pthread_mutex_unlock(&lock);
	return r;
}

int register_memory(void *communicator, void *data, size_t bytes, int type, void **out)
{
	struct communicator *c = communicator;
	struct region *r;
	int error = unusable(c);
	uint64_t id = 0;

	*out = NULL;
	if (error)
		return error;
	if (type == NCCL_POINTER_CUDA && peerlane_pointer_id(data, bytes, &id))
		id = 0; /* what is wrong with it the export says */
	if ((r = same(c, (uintptr_t)data, bytes, type == NCCL_POINTER_HOST, id))) {
		c->exported += !r->twin;
		*out = r;
		return NCCL_SUCCESS;
	}
	if (!(r = calloc(1, sizeof *r)))
		return NCCL_SYSTEM_ERROR;
	*r = (struct region){.uses = 1, .sends = c->sends, .lane = c->device, .base = (uintptr_t)data, .bytes = bytes, .id = id};
	if (type == NCCL_POINTER_HOST)
		error = register_host(c, r);
	else if (type == NCCL_POINTER_CUDA)
		error = register_gpu(c, r);
	else
		error = NCCL_INVALID_ARGUMENT;
	if (error) {
		free(r);
		return error;
	}
	pthread_mutex_lock(&lock);
	r->next = c->tie->regions;
	c->tie->regions = r;
	pthread_mutex_unlock(&lock);
	*out = r;
	return NCCL_SUCCESS;
}

int deregister(void *communicator, void *memory)
{
	struct communicator *c = communicator;
	struct region *r = memory;
	bool last;

	if (!r)
		return NCCL_SUCCESS;
	if (!r->twin)
		c->exported--;
	pthread_mutex_lock(&lock);
	if ((last = --r->uses == 0))
		for (struct region **at = &c->tie->regions; *at; at = &(*at)->next)
			if (*at == r) {
				*at = r->next;
				break;
			}
	pthread_mutex_unlock(&lock);
	if (!last)
		return NCCL_SUCCESS;
	/* In a session that has failed nothing is exported, and host memory is unmapped all
	 * the same. */
	peerlane_unexport(c->tie->session, r->memory);
	free(r);
	return NCCL_SUCCESS;
}

void forget_regions(struct region *r)
{
	for (struct region *next; r; r = next) {
		next = r->next;
		free(r);
	}
}

void forget_registering(void) { pthread_mutex_init(&lock, NULL); }

void copy_words(uint8_t *to, const uint8_t *from, size_t bytes)
{
	for (; bytes && (uintptr_t)to % 8; bytes--)
		*to++ = *from++;
	if ((uintptr_t)from % 8 == 0)
		for (; bytes >= 8; bytes -= 8, to += 8, from += 8)
			__atomic_store_n((uint64_t *)(void *)to, __atomic_load_n((const uint64_t *)(const void *)from, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
	memcpy(to, from, bytes);
}
