/* The plugin with one of NCCL's rules broken, which BROKEN names: so that it is seen
 * that the harness looks. It is compiled with the plugin's sources, and with
 * -DncclNetPlugin_v11=sound_v11: the table of the sources has that name then, and this
 * one takes its place. */
#undef ncclNetPlugin_v11
#include "plugin.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

extern const struct nccl_net_v11 sound_v11;
__attribute__((visibility("default"))) struct nccl_net_v11 ncclNetPlugin_v11;

/* accept that waits for somebody. */
static int blocking_accept(void *listener, void **communicator, void **on_device)
{
	int error;

	*communicator = NULL;
	while (!(error = sound_v11.accept(listener, communicator, on_device)) && !*communicator)
		sched_yield();
	return error;
}

/* connect that waits until it is connected. */
static int blocking_connect(void *context, int device, void *handle, void **communicator, void **on_device)
{
	int error;

	*communicator = NULL;
	while (!(error = sound_v11.connect(context, device, handle, communicator, on_device)) && !*communicator)
		sched_yield();
	return error;
}

/* isend that gives out the last request again. */
static int same_request(void *communicator, void *data, size_t bytes, int tag, void *memory, void *profile, void **request)
{
	static void *last;
	static int calls;
	int error = sound_v11.send(communicator, data, bytes, tag, memory, profile, request);

	if (!error && *request && last && ++calls % 4 == 0)
		*request = last;
	else if (!error && *request)
		last = *request;
	return error;
}

/* isend that sends the bytes of the message of that tag before this one: what the
 * receiver gets where order is broken. */
static int held_back(void *communicator, void *data, size_t bytes, int tag, void *memory, void *profile, void **request)
{
	static struct {
		void *communicator, *data, *memory;
		size_t bytes;
	} before[NCCL_MAX_RECEIVES];
	void *from = data, *of = memory;
	int error;

	if (before[tag].communicator == communicator && before[tag].bytes >= 64 && bytes >= 64)
		from = before[tag].data, of = before[tag].memory;
	error = sound_v11.send(communicator, from, bytes, tag, of, profile, request);
	if (!error && *request) {
		before[tag].communicator = communicator, before[tag].data = data;
		before[tag].memory = memory, before[tag].bytes = bytes;
	}
	return error;
}

/* test that says one byte less. */
static int wrong_size(void *request, int *done, int *sizes)
{
	int error = sound_v11.test(request, done, sizes);

	if (!error && *done && sizes && sizes[0] > 0)
		sizes[0]--;
	return error;
}

/* test that says of a request that it is done before it is. */
static int early(void *request, int *done, int *sizes)
{
	struct request *r = request;
	int error;

	if (r->communicator->sends)
		return sound_v11.test(request, done, sizes);
	error = sound_v11.test(request, done, sizes);
	if (!error && !*done) {
		for (int i = 0; sizes && i < r->parts; i++)
			sizes[i] = (int)r->part[i].bytes;
		*done = 1;
	}
	return error;
}

__attribute__((constructor)) static void break_it(void)
{
	const char *what = getenv("BROKEN");

	ncclNetPlugin_v11 = sound_v11;
	if (!what)
		return;
	if (!strcmp(what, "accept"))
		ncclNetPlugin_v11.accept = blocking_accept;
	else if (!strcmp(what, "connect"))
		ncclNetPlugin_v11.connect = blocking_connect;
	else if (!strcmp(what, "twice"))
		ncclNetPlugin_v11.send = same_request;
	else if (!strcmp(what, "order"))
		ncclNetPlugin_v11.send = held_back;
	else if (!strcmp(what, "size"))
		ncclNetPlugin_v11.test = wrong_size;
	else if (!strcmp(what, "early"))
		ncclNetPlugin_v11.test = early;
	else
		abort();
}
