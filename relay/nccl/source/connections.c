/* Listeners and communicators. Nothing here waits for another container. */
#include "plugin.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(peerlane_handle) <= NCCL_HANDLE_BYTES, "NCCL hands our handle on");

/* A connect that has begun and was not ready when NCCL asked. NCCL comes again with the
 * same handle, in which we have no room for a note: so it is found by it. */
struct attempt {
	struct relay *relay;
	struct tie *tie;
	int device;
	peerlane_handle handle;
	peerlane_attempt number;
	struct attempt *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* held in no call of libpeerlane's */
static struct attempt *attempts;

void forget_attempts(void)
{
	pthread_mutex_init(&lock, NULL);
	attempts = NULL;
}

/* --- errors ---------------------------------------------------------------------- */

int fail(struct communicator *c, const char *doing, int status)
{
	struct peerlane_connection_info info = {0};
	char text[PLACE], why[1024];
	int error = 0;

	strncpy(why, peerlane_error(), sizeof why - 1); /* before another call */
	why[sizeof why - 1] = 0;
	if (!atomic_compare_exchange_strong(&c->error, &error, nccl_error(status)))
		return error; /* which was there already */
	peerlane_connection_get(c->tie->session, c->number, &info);
	warn("%s: %s, %s, %s %s: %s", doing, place(c->relay, c->device, text), "through its relay", c->sends ? "to" : "from",
		*info.peer ? info.peer : "another container", *why ? why : peerlane_status_text(status));
	return c->error;
}

int unusable(struct communicator *c)
{
	if (c->forks == forks())
		return c->error;
	if (!c->error)
		warn("a communicator of the process before fork() cannot be used in its child");
	return c->error = NCCL_INVALID_USAGE;
}

static int on_device(const struct relay *r, int device, const char *what)
{
	char text[PLACE];

	if (!r->ties) {
		warn("%s: %s; the line at init says why. To let NCCL take another network instead: PEERLANE_NCCL_FALLBACK=1", what, no_relay);
		return NCCL_SYSTEM_ERROR;
	}
	if (device >= 0 && (unsigned)device < r->lanes)
		return 0;
	warn("%s: %s: device %d of %u", what, place(r, 0, text), device, r->lanes);
	return NCCL_INVALID_ARGUMENT;
}

static int refused(const struct relay *r, int device, const char *what, int status)
{
	char text[PLACE], why[1024];

	strncpy(why, peerlane_error(), sizeof why - 1);
	why[sizeof why - 1] = 0;
	warn("%s: %s: %s", what, place(r, device, text), why);
	return nccl_error(status);
}

/* --- listening --------------------------------------------------------------------- */

/* relay_for is the relay to listen or connect with, and a use of it. Up to version 10
 * NCCL gives none, and calls init() once: nobody but this finds a dead one's successor. */
static int relay_for(struct relay *given, struct relay **r)
{
	if (!given)
		return use_relay(r);
	*r = same_relay(given);
	return 0;
}

int listen_on(struct relay *given, int device, void *handle, void **out)
{
	struct relay *r = NULL;
	struct listener *l = calloc(1, sizeof *l);
	int error = relay_for(given, &r), status;

	*out = NULL;
	if (!error && !l) {
		error = NCCL_SYSTEM_ERROR;
	} else if (!error && !(error = on_device(r, device, "listening"))) {
		*l = (struct listener){.relay = r, .device = device};
		if (!(status = use_tie(r, &l->tie)) && !(status = peerlane_listen(l->tie->session, &r->lane[device].gpu, &l->number, handle))) {
			put_settings(r, handle);
			*out = l;
			return NCCL_SUCCESS;
		}
		if (l->tie)
			leave_tie(l->tie);
		error = refused(r, device, "listening", status);
	}
	free(l);
	if (r)
		leave_relay(r);
	return error;
}

int close_listener(void *listener)
{
	struct listener *l = listener;

	peerlane_unlisten(l->tie->session, l->number); /* of a session that has failed there is none */
	leave_tie(l->tie);
	leave_relay(l->relay);
	free(l);
	return NCCL_SUCCESS;
}

static struct communicator *new_communicator(struct relay *r, struct tie *t, int device, bool sends)
{
	unsigned most = sends ? MOST_SENDS : MOST_RECEIVES;
	struct communicator *c = calloc(1, sizeof *c + most * sizeof *c->requests);

	if (c) {
		*c = (struct communicator){.relay = same_relay(r), .tie = t, .device = device, .sends = sends, .forks = forks(), .most = most};
		same_tie(t);
	}
	return c;
}

static void free_communicator(struct communicator *c)
{
	leave_tie(c->tie);
	leave_relay(c->relay);
	free(c);
}

int accept_from(void *listener, void **out, void **of_gpu)
{
	struct listener *l = listener;
	struct communicator *c = new_communicator(l->relay, l->tie, l->device, false);
	int status;

	*out = NULL;
	if (of_gpu)
		*of_gpu = NULL;
	if (!c)
		return NCCL_SYSTEM_ERROR;
	status = peerlane_accept(l->tie->session, l->number, 0, &c->number);
	if (!status) {
		*out = c;
		return NCCL_SUCCESS;
	}
	free_communicator(c);
	return status == PEERLANE_STATUS_TIMED_OUT || status == PEERLANE_STATUS_FULL ? NCCL_SUCCESS : refused(l->relay, l->device, "accepting", status);
}

/* --- connecting -------------------------------------------------------------------- */

/* begun takes the attempt with this handle out of the list, NULL if there is none. */
static struct attempt *begun(const struct relay *r, int device, const void *handle)
{
	struct attempt *a = NULL;

	pthread_mutex_lock(&lock);
	for (struct attempt **at = &attempts; *at; at = &(*at)->next)
		if ((*at)->relay == r && (*at)->device == device && !memcmp(&(*at)->handle, handle, sizeof(*at)->handle)) {
			a = *at;
			*at = a->next;
			break;
		}
	pthread_mutex_unlock(&lock);
	return a;
}

static void keep(struct attempt *a)
{
	pthread_mutex_lock(&lock);
	a->next = attempts;
	attempts = a;
	pthread_mutex_unlock(&lock);
}

static void free_attempt(struct attempt *a)
{
	if (a->tie)
		leave_tie(a->tie);
	leave_relay(a->relay);
	free(a);
}

static int begin(struct relay *r, int device, const void *handle, struct attempt **out)
{
	struct attempt *a = calloc(1, sizeof *a);
	int status;

	if (!a)
		return PEERLANE_STATUS_FULL;
	a->relay = same_relay(r);
	a->device = device;
	memcpy(&a->handle, handle, sizeof a->handle);
	if (!(status = use_tie(r, &a->tie)))
		status = peerlane_connect_begin(a->tie->session, &r->lane[device].gpu, &a->handle, &a->number);
	if (status)
		free_attempt(a);
	else
		*out = a;
	return status;
}

/* alike refuses a listener whose NCCL has other settings: NCCL would hang. */
static int alike(const struct relay *r, int device, const void *handle)
{
	char text[PLACE], difference[DIFFERENCE];

	compare_settings(r, handle, difference);
	if (!*difference)
		return 0;
	warn("connecting: %s: %s", place(r, device, text), difference);
	return NCCL_INVALID_USAGE;
}

int connect_to(struct relay *given, int device, void *handle, void **out)
{
	struct relay *r;
	struct communicator *c = NULL;
	struct attempt *a = NULL;
	int error = relay_for(given, &r), status = 0;

	*out = NULL;
	if (error)
		return error;
	if ((error = on_device(r, device, "connecting")) || (error = alike(r, device, handle))) {
		leave_relay(r);
		return error;
	}
	if (!(a = begun(r, device, handle)))
		status = begin(r, device, handle, &a);
	if (!status && !(c = new_communicator(r, a->tie, device, true)))
		status = PEERLANE_STATUS_FULL;
	if (!status)
		status = peerlane_connect_finish(a->tie->session, a->number, 0, &c->number);
	if (status && c)
		free_communicator(c);
	if (a && (status == PEERLANE_STATUS_TIMED_OUT || status == PEERLANE_STATUS_FULL)) {
		keep(a);
	} else if (a) {
		free_attempt(a);
	}
	if (!status)
		*out = c;
	else if (status != PEERLANE_STATUS_TIMED_OUT && status != PEERLANE_STATUS_FULL)
		error = refused(r, device, "connecting", status);
	leave_relay(r);
	return error;
}

/* --- the end ------------------------------------------------------------------------ */

int close_communicator(void *communicator)
{
	struct communicator *c = communicator;

	drain_sends(c);
	peerlane_disconnect(c->tie->session, c->number);
	/* Of one that is aborted; they end as the connection does. */
	for (unsigned i = 0; i < c->most; i++)
		for (int k = 0; c->requests[i].used && k < c->requests[i].posted; k++)
			if (!c->requests[i].part[k].ended)
				peerlane_forget(c->tie->session, c->requests[i].part[k].operation);
	if (c->buffer.data)
		peerlane_unexport(c->tie->session, c->buffer.memory);
	free_communicator(c);
	return NCCL_SUCCESS;
}
