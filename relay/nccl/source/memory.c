/* Memory that NCCL registers. */
#include "plugin.h"

#include <stdlib.h>
#include <string.h>

/* What differs between NCCL's address and the twin's, so that what is aligned in one is
 * aligned in the other. */
#define ALIGNED 64

static int register_host(struct communicator *c, struct region *r)
{
	const peerlane_gpu *gpu = &c->relay->lane[c->device].gpu;
	char text[192];
	void *data;
	int status;

	r->first = r->base % ALIGNED;
	status = peerlane_host_memory(c->relay->session, r->bytes + r->first, gpu, c->sends ? PEERLANE_ACCESS_SEND : PEERLANE_ACCESS_RECEIVE, &data, &r->memory);
	if (status) {
		warn("registering %zu bytes of host memory: %s: %s", r->bytes, place(c->relay, c->device, text), peerlane_error());
		return nccl_error(status);
	}
	r->twin = (uint8_t *)data + r->first;
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
	int status = peerlane_export_pointer(c->relay->session, data, r->bytes, access, &r->memory);
	char why[1024] = "", text[192];

	if (status && !c->exported && status == PEERLANE_STATUS_CUDA) {
		strncpy(why, peerlane_error(), sizeof why - 1);
		status = peerlane_export_pointer_ipc(c->relay->session, data, r->bytes, access, &r->memory);
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

int register_memory(void *communicator, void *data, size_t bytes, int type, void **out)
{
	struct communicator *c = communicator;
	struct region *r;
	int error = unusable(c);

	*out = NULL;
	if (error)
		return error;
	if (!(r = calloc(1, sizeof *r)))
		return NCCL_SYSTEM_ERROR;
	r->base = (uintptr_t)data;
	r->bytes = bytes;
	if (type == NCCL_POINTER_HOST)
		error = register_host(c, r);
	else if (type == NCCL_POINTER_CUDA)
		error = register_gpu(c, r);
	else
		error = NCCL_INVALID_ARGUMENT;
	if (error)
		free(r);
	else
		*out = r;
	return error;
}

int deregister(void *communicator, void *memory)
{
	struct communicator *c = communicator;
	struct region *r = memory;

	if (!r)
		return NCCL_SUCCESS;
	if (!r->twin)
		c->exported--;
	/* In a session that has failed nothing is exported, and host memory is unmapped all
	 * the same. */
	peerlane_unexport(c->relay->session, r->memory);
	free(r);
	return NCCL_SUCCESS;
}

void copy_words(uint8_t *to, const uint8_t *from, size_t bytes)
{
	for (; bytes && (uintptr_t)to % 8; bytes--)
		*to++ = *from++;
	if ((uintptr_t)from % 8 == 0)
		for (; bytes >= 8; bytes -= 8, to += 8, from += 8)
			__atomic_store_n((uint64_t *)(void *)to, __atomic_load_n((const uint64_t *)(const void *)from, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
	memcpy(to, from, bytes);
}
