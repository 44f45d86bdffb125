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

/* isend that sends a message of a tag after the next one of that tag. */
static int held_back(void *communicator, void *data, size_t bytes, int tag, void *memory, void *profile, void **request)
{
	static struct {
		void *communicator, *data, *memory;
		size_t bytes;
	} held[NCCL_MAX_RECEIVES];
	static int calls;
	void *other = NULL;
	int error;

	if (!held[tag].data && ++calls % 5 == 0 && bytes) {
		/* Its place is taken by an empty one, which is a lie of its own; the bytes come
		 * where the next of its tag should. */
		held[tag].communicator = communicator, held[tag].data = data, held[tag].memory = memory, held[tag].bytes = bytes;
		return sound_v11.send(communicator, data, 0, (tag + 1) << 8, memory, profile, request);
	}
	if (held[tag].data && held[tag].communicator == communicator) {
		if ((error = sound_v11.send(communicator, data, bytes, tag, memory, profile, request)) || !*request)
			return error;
		error = sound_v11.send(communicator, held[tag].data, held[tag].bytes, tag, held[tag].memory, profile, &other);
		held[tag].data = NULL;
		return error;
	}
	return sound_v11.send(communicator, data, bytes, tag, memory, profile, request);
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
