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

/* irecv that gives out the last request again. */
static int same_request(void *communicator, int n, void **data, size_t *sizes, int *tags, void **memories, void **profiles, void **request)
{
	static void *last;
	static int calls;
	int error = sound_v11.receive(communicator, n, data, sizes, tags, memories, profiles, request);

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

/* isend that has no room yet, at any time: no byte can have come when early says so. */
static int no_room(void *communicator, void *data, size_t bytes, int tag, void *memory, void *profile, void **request)
{
	(void)communicator, (void)data, (void)bytes, (void)tag, (void)memory, (void)profile;
	*request = NULL;
	return 0;
}

/* test that waits until the operation has ended. */
static int waiting_test(void *request, int *done, int *sizes)
{
	int error;

	while (!(error = sound_v11.test(request, done, sizes)) && !*done)
		sched_yield();
	return error;
}

/* Operations that a call has waited for, and what test is to say of them. */
static struct {
	void *request;
	int sizes[NCCL_MAX_RECEIVES];
} ended[2 * MOST_SENDS];

static int wait_for(void *request)
{
	int done = 0, error = 0;
	unsigned k = 0;

	while (request && ended[k].request)
		k++;
	while (request && !done && !(error = sound_v11.test(request, &done, ended[k].sizes)))
		sched_yield();
	ended[k].request = error ? NULL : request;
	return error;
}

static int test_waited_for(void *request, int *done, int *sizes)
{
	for (unsigned k = 0; k < 2 * MOST_SENDS; k++)
		if (ended[k].request == request) {
			memcpy(sizes, ended[k].sizes, sizeof ended[k].sizes);
			ended[k].request = NULL;
			*done = 1;
			return NCCL_SUCCESS;
		}
	return sound_v11.test(request, done, sizes);
}

/* isend and irecv that wait for the other side. */
static int waiting_send(void *communicator, void *data, size_t bytes, int tag, void *memory, void *profile, void **request)
{
	int error = sound_v11.send(communicator, data, bytes, tag, memory, profile, request);

	return error ? error : wait_for(*request);
}

static int waiting_receive(void *communicator, int n, void **data, size_t *sizes, int *tags, void **memories, void **profiles, void **request)
{
	int error = sound_v11.receive(communicator, n, data, sizes, tags, memories, profiles, request);

	return error ? error : wait_for(*request);
}

/* test that never says of one receive that it is done. */
static int losing(void *request, int *done, int *sizes)
{
	static void *lost;

	if (!lost && !((struct request *)request)->communicator->sends)
		lost = request;
	if (request != lost)
		return sound_v11.test(request, done, sizes);
	*done = 0;
	return NCCL_SUCCESS;
}

/* A receive into host memory that writes a byte more than came. */
static int one_more(void *request, int *done, int *sizes)
{
	struct request *r = request;
	int error = sound_v11.test(request, done, sizes);

	if (!error && *done && !r->communicator->sends && r->part[0].region->twin)
		r->part[0].data[r->part[0].moved] ^= 1;
	return error;
}

/* test that says sizes in another order than that of the receives. */
static int swapped(void *request, int *done, int *sizes)
{
	struct request *r = request;
	int error = sound_v11.test(request, done, sizes), first = sizes ? sizes[0] : 0;

	if (!error && *done && sizes && r->parts > 1)
		sizes[0] = sizes[1], sizes[1] = first;
	return error;
}

/* irecv that gives out no request where NCCL does not need the completion. */
static int optional(void *communicator, int n, void **data, size_t *sizes, int *tags, void **memories, void **profiles, void **request)
{
	void *was = *request;
	int error = sound_v11.receive(communicator, n, data, sizes, tags, memories, profiles, request);

	if (!error && *request && was == NCCL_OPTIONAL_RECEIVE_COMPLETION)
		*request = was;
	return error;
}

/* isend that writes no request where it has none to give. */
static int untouched(void *communicator, void *data, size_t bytes, int tag, void *memory, void *profile, void **request)
{
	static int calls;

	if (++calls % 8 == 0)
		return NCCL_SUCCESS;
	return sound_v11.send(communicator, data, bytes, tag, memory, profile, request);
}

/* accept that has somebody before anybody has come. */
static int hasty_accept(void *listener, void **communicator, void **on_device)
{
	int error = sound_v11.accept(listener, communicator, on_device);

	if (!error && !*communicator)
		*communicator = listener;
	return error;
}

/* listen that gives out nothing, for NCCL to come again. */
static int no_listener(void *context, int device, void *handle, void **listener)
{
	(void)context, (void)device, (void)handle;
	*listener = NULL;
	return NCCL_SUCCESS;
}

static void wait_in_test(void) { ncclNetPlugin_v11.test = waiting_test; }
static void wait_in_send(void) { ncclNetPlugin_v11.send = waiting_send, ncclNetPlugin_v11.test = test_waited_for; }
static void wait_in_receive(void) { ncclNetPlugin_v11.receive = waiting_receive, ncclNetPlugin_v11.test = test_waited_for; }
static void wait_in_accept(void) { ncclNetPlugin_v11.accept = blocking_accept; }
static void wait_in_connect(void) { ncclNetPlugin_v11.connect = blocking_connect; }
static void give_out_twice(void) { ncclNetPlugin_v11.receive = same_request; }
static void break_order(void) { ncclNetPlugin_v11.send = held_back; }
static void say_less(void) { ncclNetPlugin_v11.test = wrong_size; }
static void say_early(void) { ncclNetPlugin_v11.test = early, ncclNetPlugin_v11.send = no_room; }
static void lose(void) { ncclNetPlugin_v11.test = losing; }
static void write_behind(void) { ncclNetPlugin_v11.test = one_more; }
static void swap(void) { ncclNetPlugin_v11.test = swapped; }
static void leave_optional(void) { ncclNetPlugin_v11.receive = optional; }
static void leave_untouched(void) { ncclNetPlugin_v11.send = untouched; }
static void accept_early(void) { ncclNetPlugin_v11.accept = hasty_accept; }
static void listen_to_nothing(void) { ncclNetPlugin_v11.listen = no_listener; }

static const struct {
	const char *name;
	void (*do_so)(void);
} ways[] = {
	{"accept", wait_in_accept}, {"connect", wait_in_connect}, {"isend", wait_in_send}, {"irecv", wait_in_receive}, {"test", wait_in_test},
	{"twice", give_out_twice}, {"order", break_order}, {"size", say_less}, {"early", say_early}, {"lost", lose}, {"behind", write_behind},
	{"swapped", swap}, {"optional", leave_optional}, {"untouched", leave_untouched}, {"hasty", accept_early}, {"listen", listen_to_nothing},
};

__attribute__((constructor)) static void break_it(void)
{
	const char *what = getenv("BROKEN");

	ncclNetPlugin_v11 = sound_v11;
	if (!what)
		return;
	for (unsigned i = 0; i < sizeof ways / sizeof *ways; i++)
		if (!strcmp(what, ways[i].name)) {
			ways[i].do_so();
			return;
		}
	abort();
}
