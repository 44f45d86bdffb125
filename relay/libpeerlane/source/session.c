/* A session: its socket, its threads, its end, and what fork() makes of it. */
#include "internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* How often hand-overs that have ended are set to their end again. */
#define KEEP_TIME 1 /* ms */

/* --- time --------------------------------------------------------------------- */

int64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t deadline_in(int timeout_ms) { return timeout_ms < 0 ? FOREVER : now_ns() + (int64_t)timeout_ms * 1000000; }

/* For poll(): never less than is left. */
static int milliseconds_to(int64_t deadline)
{
	int64_t left;

	if (deadline == FOREVER)
		return -1;
	left = (deadline - now_ns() + 999999) / 1000000;
	return left < 0 ? 0 : left > 1000000 ? 1000000 : (int)left;
}

/* --- fork() ------------------------------------------------------------------- */

/* All sessions. Whoever takes this lock has none of a session's. */
static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static struct peerlane_session *all;
static bool fork_handled;

static void new_condition(pthread_cond_t *c)
{
	pthread_condattr_t attributes;

	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(c, &attributes);
	pthread_condattr_destroy(&attributes);
}

static void close_one(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void close_descriptors(struct peerlane_session *s)
{
	close_one(&s->event);
	close_one(&s->notice);
	close_one(&s->nudge);
	close_one(&s->socket);
	close_one(&s->wake_relay);
	close_one(&s->wake_client);
}

/* With every lock held a child finds every session in one piece. */
static void before_fork(void)
{
	pthread_mutex_lock(&all_lock);
	for (struct peerlane_session *s = all; s; s = s->next)
		pthread_mutex_lock(&s->lock);
}

static void parent_after_fork(void)
{
	for (struct peerlane_session *s = all; s; s = s->next)
		pthread_mutex_unlock(&s->lock);
	pthread_mutex_unlock(&all_lock);
}

static void child_after_fork(void)
{
	for (struct peerlane_session *s = all; s; s = s->next) {
		close_descriptors(s);
		s->forked = true;
		s->submit = NULL; /* MADV_DONTFORK */
		s->complete = NULL;
		s->lists = NULL;
		s->registered = NULL;
		/* The threads that these speak of are the parent's. */
		s->watching = s->polling = s->listing = false;
		s->inside = s->asleep = 0;
		for (struct request **r = &s->requests; *r;) {
			if ((*r)->given_up)
				r = &(*r)->next;
			else
				*r = (*r)->next; /* on a stack that is gone */
		}
		for (unsigned i = 0; s->slots && i < PEERLANE_MAX_OPERATIONS; i++)
			s->slots[i].waiters = 0;
		new_condition(&s->changed);
		if (!s->failed.status)
			give_reason(&s->failed, PEERLANE_STATUS_FORKED,
				"this process was forked, and the session is its parent's; dial the relay in this process to have one");
		end_all(s, s->failed.status);
	}
	parent_after_fork();
}

static int handle_fork(void)
{
	int failure = 0;

	pthread_mutex_lock(&all_lock);
	if (!fork_handled) {
		failure = pthread_atfork(before_fork, parent_after_fork, child_after_fork);
		fork_handled = failure == 0;
	}
	pthread_mutex_unlock(&all_lock);
	return failure;
}

/* --- the lock ----------------------------------------------------------------- */

int enter(struct peerlane_session *s)
{
	if (!s)
		return fail_call(PEERLANE_STATUS_INVALID, "there is no session: NULL");
	pthread_mutex_lock(&s->lock);
	if (!s->failed.status)
		return 0;
	fail_for(&s->failed);
	pthread_mutex_unlock(&s->lock);
	return peerlane_error_status();
}

void leave(struct peerlane_session *s) { pthread_mutex_unlock(&s->lock); }

/* --- the end ------------------------------------------------------------------ */

static void fail_as(struct peerlane_session *s, const struct reason *why)
{
	struct reason ignored;

	if (s->failed.status)
		return;
	s->failed = *why;
	if (s->submit && s->slots) {
		drain(s, &ignored); /* what ended before */
		end_timelines(s);
		end_hand_overs(s, 0, why->status);
		end_all(s, why->status);
	}
	for (struct link *l = s->links; l; l = l->next)
		if (!l->down.status)
			l->down = *why;
	/* Whoever is in poll() wakes up. */
	if (s->socket >= 0)
		shutdown(s->socket, SHUT_RDWR);
	pthread_cond_broadcast(&s->changed);
}

void fail_session(struct peerlane_session *s, int status, const char *format, ...)
{
	struct reason why;
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(why.text, sizeof why.text, format, arguments);
	va_end(arguments);
	why.status = status;
	fail_as(s, &why);
}

void drain_or_fail(struct peerlane_session *s)
{
	struct reason why;

	if (!s->failed.status && s->slots && !drain(s, &why))
		fail_as(s, &why);
}

static const char was_closed[] = "the session was closed";

static void relay_died(struct peerlane_session *s, int error)
{
	char because[128] = "";

	if (s->parting) {
		fail_session(s, PEERLANE_STATUS_CLOSED, "%s", was_closed);
		return;
	}
	if (error) {
		errno = error;
		snprintf(because, sizeof because, " (%m)");
	}
	fail_session(s, PEERLANE_STATUS_RELAY_DIED,
		"the relay of this container died%s; connect to it again, its successor is there within seconds", because);
}

/* --- the socket ---------------------------------------------------------------- */

/* receive takes a message without waiting. Its length, 0 at the relay's end, -1 with
 * errno. Descriptors that come are the caller's; -1 with EBADMSG for a message that
 * is too long or brings too many. */
static ssize_t receive(int fd, uint8_t message[MAX_MESSAGE + 1], int fds[MAX_DESCRIPTORS + 1], unsigned *count)
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE((MAX_DESCRIPTORS + 1) * sizeof(int))];
	} control;
	bool reset = false, ended = false;

	for (;;) {
		struct iovec part = {message, MAX_MESSAGE + 1};
		struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
				   /* Not for the padding, in which the kernel would put one more. */
				   .msg_controllen = CMSG_LEN((MAX_DESCRIPTORS + 1) * sizeof(int))};
		ssize_t n = recvmsg(fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

		*count = 0;
		if (n < 0 && errno == EINTR)
			continue;
		/* Said once, and before what is still to be read, when the relay closes with
		 * messages of ours unread. */
		if (n < 0 && errno == ECONNRESET && !reset) {
			reset = true;
			continue;
		}
		if (n < 0)
			return n;
		for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
			if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
				continue;
			for (size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= c->cmsg_len && *count <= MAX_DESCRIPTORS; i++)
				memcpy(&fds[(*count)++], CMSG_DATA(c) + i * sizeof(int), sizeof(int));
		}
		/* Linux reports the end to a reader that came just before the last message and
		 * the end did. */
		if (n == 0 && m.msg_controllen == 0 && !ended) {
			ended = true;
			continue;
		}
		if (m.msg_flags & (MSG_TRUNC | MSG_CTRUNC) || n > MAX_MESSAGE || *count > MAX_DESCRIPTORS || (n == 0 && m.msg_controllen)) {
			errno = EBADMSG;
			return -1;
		}
		return n;
	}
}

/* transmit sends a message without waiting: 0, or an error's number. */
static int transmit(int fd, const void *message, size_t length, int descriptor)
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec part = {(void *)(uintptr_t)message, length};
	struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};

	if (descriptor >= 0) {
		memset(&control, 0, sizeof control);
		m.msg_control = &control;
		m.msg_controllen = CMSG_LEN(sizeof(int));
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(&control.header), &descriptor, sizeof(int));
	}
	for (;;) {
		if (sendmsg(fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
			return 0;
		if (errno != EINTR)
			return errno;
	}
}

struct link *find_link(struct peerlane_session *s, uint32_t number)
{
	struct link *l = s->links;

	while (l && l->number != number)
		l = l->next;
	return l;
}

static uint32_t next_sequence(struct peerlane_session *s)
{
	if (++s->sequence == 0)
		s->sequence = 1; /* 0 is for events */
	return s->sequence;
}

/* give_back releases what the answer to a request that was given up brought: nobody
 * else knows of it. */
void give_back(struct peerlane_session *s, uint32_t answer, uint32_t number)
{
	uint32_t type;

	switch (answer) {
	case PEERLANE_MESSAGE_EXPORTED:
	case PEERLANE_MESSAGE_HOST_MEMORY_MADE:
	case PEERLANE_MESSAGE_STAGING_MADE:
		type = PEERLANE_MESSAGE_UNEXPORT;
		break;
	case PEERLANE_MESSAGE_EVENT_OPENED:
		type = PEERLANE_MESSAGE_EVENT_CLOSE;
		break;
	case PEERLANE_MESSAGE_EXPOSED:
		type = PEERLANE_MESSAGE_REVOKE;
		break;
	case PEERLANE_MESSAGE_LISTENING:
		type = PEERLANE_MESSAGE_UNLISTEN;
		break;
	case PEERLANE_MESSAGE_CONNECTED:
		type = PEERLANE_MESSAGE_DISCONNECT;
		break;
	default:
		return;
	}
	if (s->orphan_count == sizeof s->orphans / sizeof *s->orphans) {
		fail_session(s, PEERLANE_STATUS_INTERNAL, "the relay answers late and takes nothing back");
		return;
	}
	s->orphans[s->orphan_count++] = (struct peerlane_unexport){.type = type, .memory = number};
}

/* These are one layout; give_back relies on it. */
_Static_assert(sizeof(struct peerlane_unexport) == sizeof(struct peerlane_unlisten) &&
		       sizeof(struct peerlane_unexport) == sizeof(struct peerlane_disconnect) &&
		       sizeof(struct peerlane_unexport) == sizeof(struct peerlane_event_close) &&
		       offsetof(struct peerlane_event_close, event) == offsetof(struct peerlane_unexport, memory) &&
		       offsetof(struct peerlane_event_opened, event) == 8 &&
		       sizeof(struct peerlane_unexport) == sizeof(struct peerlane_revoke) &&
		       offsetof(struct peerlane_revoke, region) == offsetof(struct peerlane_unexport, memory) &&
		       offsetof(struct peerlane_exposed, region) == 8 &&
		       offsetof(struct peerlane_unlisten, listener) == offsetof(struct peerlane_unexport, memory) &&
		       offsetof(struct peerlane_disconnect, connection) == offsetof(struct peerlane_unexport, memory) &&
		       offsetof(struct peerlane_exported, memory) == 8 && offsetof(struct peerlane_listening, listener) == 8 &&
		       offsetof(struct peerlane_connected, connection) == 8 &&
		       offsetof(struct peerlane_staging_made, memory) == offsetof(struct peerlane_host_memory_made, memory),
	"requests that release an object have one layout");

static void return_orphans(struct peerlane_session *s)
{
	unsigned sent = 0;

	while (sent < s->orphan_count) {
		struct peerlane_unexport *m = &s->orphans[sent];

		m->sequence = next_sequence(s); /* nobody waits for it */
		if (transmit(s->socket, m, sizeof *m, -1))
			break; /* the next look tries again, or finds the relay dead */
		sent++;
	}
	s->orphan_count -= sent;
	memmove(s->orphans, s->orphans + sent, s->orphan_count * sizeof *s->orphans);
}

static size_t size_of(uint32_t type)
{
	switch (type) {
	case PEERLANE_MESSAGE_FAILURE:
		return sizeof(struct peerlane_failure);
	case PEERLANE_MESSAGE_EXPORTED:
		return sizeof(struct peerlane_exported);
	case PEERLANE_MESSAGE_DONE:
		return sizeof(struct peerlane_done);
	case PEERLANE_MESSAGE_HOST_MEMORY_MADE:
		return sizeof(struct peerlane_host_memory_made);
	case PEERLANE_MESSAGE_STAGING_MADE:
		return sizeof(struct peerlane_staging_made);
	case PEERLANE_MESSAGE_LIST_MEMORY_MADE:
		return sizeof(struct peerlane_list_memory_made);
	case PEERLANE_MESSAGE_EVENT_OPENED:
		return sizeof(struct peerlane_event_opened);
	case PEERLANE_MESSAGE_EXPOSED:
		return sizeof(struct peerlane_exposed);
	case PEERLANE_MESSAGE_LISTENING:
		return sizeof(struct peerlane_listening);
	case PEERLANE_MESSAGE_CONNECTED:
		return sizeof(struct peerlane_connected);
	case PEERLANE_MESSAGE_CONNECTION_DOWN:
		return sizeof(struct peerlane_connection_down);
	case PEERLANE_MESSAGE_STATISTICS_REPLY:
		return sizeof(struct peerlane_statistics_reply);
	case PEERLANE_MESSAGE_LANES_REPLY:
		return sizeof(struct peerlane_lanes_reply);
	case PEERLANE_MESSAGE_LANE_NIC_REPLY:
		return sizeof(struct peerlane_lane_nic_reply);
	}
	return 0;
}

/* read_failure takes the reason out of a message. A relay's statuses are below the
 * library's own. */
static void read_reason(struct reason *r, uint32_t status, const char *text, size_t n)
{
	r->status = status > 0 && status < PEERLANE_STATUS_PENDING ? (int)status : PEERLANE_STATUS_INTERNAL;
	copy_text(r->text, sizeof r->text, text, n);
	if (!r->text[0])
		snprintf(r->text, sizeof r->text, "%s", peerlane_status_text(r->status));
}

/* handle takes a message. A descriptor that it keeps becomes -1. */
static void handle(struct peerlane_session *s, const uint8_t *data, size_t n, int *fds, unsigned count)
{
	struct peerlane_done header;
	struct request **at, *r;
	uint32_t number = 0;
	bool made; /* memory, which comes with its descriptor */

	if (n < sizeof header) {
		fail_session(s, PEERLANE_STATUS_MALFORMED, "the relay cannot be understood: a message of %zu bytes; a header alone has %zu", n, sizeof header);
		return;
	}
	memcpy(&header, data, sizeof header);
	if (size_of(header.type) != n) {
		fail_session(s, PEERLANE_STATUS_MALFORMED,
			"the relay cannot be understood: a message of type %u and %zu bytes, which version %u of Peerlane's protocol does not know", header.type, n, s->version);
		return;
	}
	if (header.type == PEERLANE_MESSAGE_CONNECTION_DOWN) {
		struct peerlane_connection_down m;
		struct link *l;

		memcpy(&m, data, sizeof m);
		l = find_link(s, m.connection);
		if (l && !l->down.status) /* one that was never accepted goes down unseen */
			read_reason(&l->down, m.status, m.reason, sizeof m.reason);
		if (l)
			end_hand_overs(s, m.connection, l->down.status);
		return;
	}
	if (header.type == PEERLANE_MESSAGE_FAILURE && header.sequence == 0) {
		struct peerlane_failure m;
		struct reason why;

		memcpy(&m, data, sizeof m);
		read_reason(&why, m.status, m.reason, sizeof m.reason);
		fail_as(s, &why);
		return;
	}
	made = header.type == PEERLANE_MESSAGE_HOST_MEMORY_MADE || header.type == PEERLANE_MESSAGE_STAGING_MADE ||
	       header.type == PEERLANE_MESSAGE_LIST_MEMORY_MADE;
	if (n >= 12 && header.type != PEERLANE_MESSAGE_LIST_MEMORY_MADE) /* which has none */
		memcpy(&number, data + (made ? offsetof(struct peerlane_host_memory_made, memory) : 8), sizeof number);
	for (at = &s->requests; *at && ((*at)->sequence != header.sequence || (*at)->answered); at = &(*at)->next)
		;
	r = *at;
	if (!r) { /* it was given up */
		give_back(s, header.type, number);
		return;
	}
	if (r->given_up && !r->listener && !r->attempt) { /* an accept of a listener that is closed */
		*at = r->next;
		free(r->link);
		free(r);
		give_back(s, header.type, number);
		return;
	}
	if (header.type == PEERLANE_MESSAGE_CONNECTED && r->wants == header.type) {
		struct peerlane_connected m;

		memcpy(&m, data, sizeof m);
		if (m.connection == 0 || find_link(s, m.connection)) {
			fail_session(s, PEERLANE_STATUS_MALFORMED, "the relay gave the number %u to a second connection", m.connection);
			return;
		}
		/* Here, and not where the answer is waited for: the next message may tell of
		 * its end. */
		r->link->number = m.connection;
		r->link->route = m.route;
		copy_text(r->link->peer, sizeof r->link->peer, m.peer, sizeof m.peer);
		r->link->next = s->links;
		s->links = r->link;
		r->link = NULL;
	}
	if (count == 1 && made && header.type == r->wants) {
		r->fd = fds[0];
		fds[0] = -1;
	}
	memcpy(r->answer, data, n);
	r->length = n;
	r->answered = true;
	if (r->given_up) /* an accept or an attempt: a later call has the answer, and nothing else tells of it */
		notice(s);
}

void look(struct peerlane_session *s)
{
	uint8_t message[MAX_MESSAGE + 1];
	int fds[MAX_DESCRIPTORS + 1];
	unsigned count;

	if (s->polling)
		return; /* that thread would sleep on, for what is read here */
	/* A bounded number at once: the lock is held. */
	for (int i = 0; i < 64 && !s->failed.status; i++) {
		ssize_t n = receive(s->socket, message, fds, &count);

		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
			break;
		if (n < 0 && errno == EBADMSG)
			fail_session(s, PEERLANE_STATUS_MALFORMED, "the relay cannot be understood: a message of more than %d bytes or with more than %d descriptors", MAX_MESSAGE, MAX_DESCRIPTORS);
		else if (n <= 0)
			relay_died(s, n < 0 && errno != ECONNRESET ? errno : 0);
		else
			handle(s, message, (size_t)n, fds, count);
		while (count > 0)
			close_one(&fds[--count]); /* nobody asked for them */
	}
	if (s->orphan_count && !s->failed.status)
		return_orphans(s);
	pthread_cond_broadcast(&s->changed);
}

/* --- waiting -------------------------------------------------------------------- */

static void empty_pipe(struct peerlane_session *s)
{
	char rings[512]; /* one byte each; what they say is all the same */

	/* Bounded, as everything of the relay's. */
	for (int i = 0; i < 256 && read(s->wake_client, rings, sizeof rings) == sizeof rings; i++)
		;
}

void look_at_wakes(struct peerlane_session *s)
{
	uint64_t rung;

	if (s->noticed && read(s->notice, &rung, sizeof rung) == sizeof rung)
		s->noticed = false;
	if (s->polling)
		return; /* that thread reads the rest */
	empty_pipe(s);
	look(s);
	drain_or_fail(s);
}

int await(struct peerlane_session *s, bool (*done)(void *), void *argument, int64_t deadline)
{
	int result = 0;

	s->inside++;
	while (!done(argument)) {
		look(s);
		drain_or_fail(s);
		if (done(argument))
			break;
		if (s->failed.status) {
			result = s->failed.status;
			break;
		}
		if (deadline != FOREVER && now_ns() >= deadline) {
			result = PEERLANE_STATUS_TIMED_OUT;
			break;
		}
		if (s->polling) {
			s->asleep++;
			set_sleeps(s);
			if (deadline == FOREVER) {
				pthread_cond_wait(&s->changed, &s->lock);
			} else {
				struct timespec t = {deadline / 1000000000, deadline % 1000000000};

				pthread_cond_timedwait(&s->changed, &s->lock, &t);
			}
			s->asleep--;
			continue;
		}
		s->polling = true;
		set_sleeps(s);
		/* What ended before the relay could know that somebody sleeps. */
		drain_or_fail(s);
		if (!s->failed.status && !done(argument)) {
			struct pollfd fds[2] = {{s->socket, POLLIN, 0}, {s->wake_client, POLLIN, 0}};

			pthread_mutex_unlock(&s->lock);
			poll(fds, 2, milliseconds_to(deadline));
			pthread_mutex_lock(&s->lock);
			if (fds[1].revents)
				empty_pipe(s);
		}
		s->polling = false;
		pthread_cond_broadcast(&s->changed);
	}
	s->inside--;
	set_sleeps(s);
	/* Somebody else has to go into poll(), or peerlane_close() on. */
	pthread_cond_broadcast(&s->changed);
	return result;
}

static bool answered(void *request) { return ((struct request *)request)->answered; }

static bool never(void *unused)
{
	(void)unused;
	return false;
}

static void forget_request(struct peerlane_session *s, struct request *r)
{
	for (struct request **at = &s->requests; *at; at = &(*at)->next)
		if (*at == r) {
			*at = r->next;
			return;
		}
}

/* push sends a message; the lock is held, and given up while the socket has no room, or
 * too many descriptors are on their way. */
static int push(struct peerlane_session *s, const void *message, size_t length, int fd, int64_t deadline)
{
	while (!s->failed.status) {
		int error = transmit(s->socket, message, length, fd);

		if (error == 0)
			return 0;
		if (error == EPIPE || error == ECONNRESET || error == ECONNREFUSED || error == ENOTCONN) {
			await(s, never, NULL, now_ns() + 1000000000); /* until it is known why */
			if (!s->failed.status)
				relay_died(s, error);
			break;
		}
		if (error != EAGAIN && error != EWOULDBLOCK && error != ETOOMANYREFS) {
			errno = error;
			return fail_call(error == EBADF ? PEERLANE_STATUS_INVALID : PEERLANE_STATUS_SYSTEM, "a request to the relay cannot be sent: %m");
		}
		if (now_ns() >= deadline)
			return fail_call(PEERLANE_STATUS_TIMED_OUT, "the relay takes no requests; it has %d s for each", REPLY_TIME / 1000);

		struct pollfd writable = {s->socket, POLLOUT, 0};

		pthread_mutex_unlock(&s->lock);
		poll(&writable, error != ETOOMANYREFS, error == ETOOMANYREFS ? 1 : 100);
		pthread_mutex_lock(&s->lock);
	}
	return fail_for(&s->failed);
}

/* post_request sends a request that is on the list. */
static int post_request(struct peerlane_session *s, struct request *r, void *message, size_t length, int fd, int64_t deadline)
{
	((struct peerlane_done *)message)->sequence = r->sequence;
	return push(s, message, length, fd, deadline);
}

/* read_answer checks what came. */
static int read_answer(const struct request *r, void *answer, size_t length)
{
	struct peerlane_done header;

	memcpy(&header, r->answer, sizeof header);
	if (header.type == PEERLANE_MESSAGE_FAILURE) {
		struct peerlane_failure m;
		struct reason why;

		memcpy(&m, r->answer, sizeof m);
		read_reason(&why, m.status, m.reason, sizeof m.reason);
		return fail_for(&why);
	}
	if (header.type != r->wants || r->length != length)
		return fail_call(PEERLANE_STATUS_MALFORMED, "the relay answered with a message of type %u where %u was due", header.type, r->wants);
	memcpy(answer, r->answer, length);
	return 0;
}

static int exchange(struct peerlane_session *s, struct request *r, void *message, size_t length, int fd, void *answer, size_t answer_length)
{
	int64_t deadline = deadline_in(REPLY_TIME);
	int status = enter(s);

	if (status)
		return status;
	s->inside++;
	r->sequence = next_sequence(s);
	r->next = s->requests;
	s->requests = r;
	status = post_request(s, r, message, length, fd, deadline);
	if (!status) {
		status = await(s, answered, r, deadline);
		if (status == PEERLANE_STATUS_TIMED_OUT)
			fail_call(status, "the relay did not answer within %d s", REPLY_TIME / 1000);
		else if (status)
			fail_for(&s->failed);
		else
			status = read_answer(r, answer, answer_length);
	}
	forget_request(s, r);
	s->inside--;
	pthread_cond_broadcast(&s->changed);
	leave(s);
	return status;
}

int ask(struct peerlane_session *s, void *message, size_t length, int fd, void *answer, uint32_t type, size_t answer_length, struct link *link)
{
	struct request r = {.wants = type, .link = link, .fd = -1};
	int status = exchange(s, &r, message, length, fd, answer, answer_length);

	if (status)
		free(r.link); /* none if an answer has come after all, and the session has it */
	return status;
}

int ask_for_fd(struct peerlane_session *s, void *message, size_t length, void *answer, uint32_t type, size_t answer_length, int *fd)
{
	struct request r = {.wants = type, .fd = -1};
	int status = exchange(s, &r, message, length, -1, answer, answer_length);

	*fd = r.fd;
	return status;
}

int send_alone(struct peerlane_session *s, const void *message, size_t length, int fd)
{
	int status = enter(s);

	if (status)
		return status;
	s->inside++;
	status = push(s, message, length, fd, deadline_in(REPLY_TIME));
	s->inside--;
	pthread_cond_broadcast(&s->changed);
	leave(s);
	return status;
}

/* --- lists of allocations ----------------------------------------------------------- */

int send_list(struct peerlane_session *s, const struct peerlane_allocation *list, unsigned count, bool *begun)
{
	struct peerlane_export_part m = {.type = PEERLANE_MESSAGE_EXPORT_PART};
	int status = enter(s);

	*begun = false;
	if (status)
		return status;
	s->inside++;
	while (s->listing && !s->failed.status)
		pthread_cond_wait(&s->changed, &s->lock);
	if (s->failed.status) {
		status = fail_for(&s->failed);
	} else {
		int64_t deadline = deadline_in(REPLY_TIME);

		*begun = s->listing = true;
		for (unsigned i = 0; i < count && !status; i++) {
			m.bytes = list[i].bytes;
			status = push(s, &m, sizeof m, list[i].fd, deadline);
			m.offset += list[i].bytes;
		}
	}
	s->inside--;
	pthread_cond_broadcast(&s->changed);
	leave(s);
	return status;
}

void end_list(struct peerlane_session *s)
{
	pthread_mutex_lock(&s->lock);
	s->listing = false;
	pthread_cond_broadcast(&s->changed);
	pthread_mutex_unlock(&s->lock);
}

/* --- accept --------------------------------------------------------------------- */

static void free_accept(struct peerlane_session *s, struct request *r)
{
	forget_request(s, r);
	free(r->link);
	free(r);
}

int peerlane_accept(peerlane_session *s, peerlane_listener listener, int timeout_ms, peerlane_connection *connection)
{
	int64_t deadline = deadline_in(timeout_ms);
	struct peerlane_connected m;
	struct request *r;
	int status;

	if (!connection)
		return fail_call(PEERLANE_STATUS_INVALID, "accepting: nowhere to write the connection: NULL");
	if (!listener)
		return fail_call(PEERLANE_STATUS_UNKNOWN_LISTENER, "listener 0 is not open");
	if ((status = enter(s)))
		return status;
	s->inside++;
	/* The one that was asked for first is answered first. The list is the last
	 * first. */
	r = NULL;
	for (struct request *other = s->requests; other; other = other->next)
		if (other->given_up && other->listener == listener)
			r = other;
	if (r) {
		r->given_up = false;
	} else if (!(r = calloc(1, sizeof *r)) || !(r->link = calloc(1, sizeof *r->link))) {
		free(r);
		r = NULL;
		status = fail_call(PEERLANE_STATUS_SYSTEM, "accepting: out of memory");
	} else {
		struct peerlane_accept request = {.type = PEERLANE_MESSAGE_ACCEPT, .listener = listener};

		r->wants = PEERLANE_MESSAGE_CONNECTED;
		r->fd = -1;
		r->listener = listener;
		r->sequence = next_sequence(s);
		r->next = s->requests;
		s->requests = r;
		status = post_request(s, r, &request, sizeof request, -1, timeout_ms ? deadline_in(REPLY_TIME) : now_ns());
		if (status == PEERLANE_STATUS_TIMED_OUT && !timeout_ms)
			status = fail_call(PEERLANE_STATUS_FULL, "accepting: the relay takes no requests at the moment");
	}
	if (r && !status) {
		status = await(s, answered, r, deadline);
		if (status == PEERLANE_STATUS_TIMED_OUT) {
			fail_call(status, "no sender came to listener %u within %d ms", listener, timeout_ms);
			r->given_up = true;
			r = NULL;
		} else if (status) {
			fail_for(&s->failed);
		} else if (!(status = read_answer(r, &m, sizeof m))) {
			*connection = m.connection;
		}
	}
	if (r)
		free_accept(s, r);
	s->inside--;
	pthread_cond_broadcast(&s->changed);
	leave(s);
	return status;
}

/* --- connecting without waiting ------------------------------------------------------ */

/* The relay refuses more than 32 slow requests of a session at once, an export among
 * them: attempts take half. */
#define MOST_ATTEMPTS 16

static bool may_attempt(const struct peerlane_session *s)
{
	unsigned n = 0;

	for (const struct request *r = s->requests; r; r = r->next)
		n += r->attempt && !r->answered;
	return n < MOST_ATTEMPTS;
}

int peerlane_connect_begin(peerlane_session *s, const peerlane_gpu *gpu, const peerlane_handle *handle, peerlane_attempt *attempt)
{
	struct peerlane_connect m = {.type = PEERLANE_MESSAGE_CONNECT};
	struct request *r;
	int status, error;

	if (!gpu || !handle || !attempt)
		return fail_call(PEERLANE_STATUS_INVALID, "connecting: no GPU, no handle, or nowhere to write the attempt: NULL");
	memcpy(m.gpu, gpu->bytes, sizeof m.gpu);
	memcpy(m.handle, handle->bytes, sizeof m.handle);
	if ((status = enter(s)))
		return status;
	if (!may_attempt(s))
		look(s); /* for answers */
	if (s->failed.status || !may_attempt(s)) {
		status = s->failed.status ? fail_for(&s->failed) : fail_call(PEERLANE_STATUS_FULL, "connecting: %d attempts are under way", MOST_ATTEMPTS);
		leave(s);
		return status;
	}
	if (!(r = calloc(1, sizeof *r)) || !(r->link = calloc(1, sizeof *r->link))) {
		free(r);
		leave(s);
		return fail_call(PEERLANE_STATUS_SYSTEM, "connecting: out of memory");
	}
	r->wants = PEERLANE_MESSAGE_CONNECTED;
	r->fd = -1;
	r->given_up = r->attempt = true;
	r->sequence = m.sequence = next_sequence(s);
	r->next = s->requests;
	s->requests = r;
	error = transmit(s->socket, &m, sizeof m, -1);
	if (!error) {
		*attempt = r->sequence;
	} else {
		free_accept(s, r);
		if (error == EAGAIN || error == EWOULDBLOCK) {
			status = fail_call(PEERLANE_STATUS_FULL, "connecting: the relay takes no requests at the moment");
		} else {
			look(s); /* for the reason, which a thread that is in poll() is about to read */
			if (!s->failed.status && !s->polling)
				relay_died(s, error);
			status = s->failed.status ? fail_for(&s->failed) : fail_call(PEERLANE_STATUS_FULL, "connecting: the relay takes no requests any more");
		}
	}
	leave(s);
	return status;
}

int peerlane_connect_finish(peerlane_session *s, peerlane_attempt attempt, int timeout_ms, peerlane_connection *connection)
{
	int64_t deadline = deadline_in(timeout_ms);
	struct peerlane_connected m;
	struct request *r;
	int status;

	if (!connection)
		return fail_call(PEERLANE_STATUS_INVALID, "connecting: nowhere to write the connection: NULL");
	if ((status = enter(s)))
		return status;
	for (r = s->requests; r && !(r->attempt && r->given_up && r->sequence == attempt); r = r->next)
		;
	if (!r) {
		leave(s);
		return fail_call(PEERLANE_STATUS_INVALID, "attempt %u to connect has not begun, is over, or another thread waits for it", attempt);
	}
	r->given_up = false;
	status = await(s, answered, r, deadline);
	if (status == PEERLANE_STATUS_TIMED_OUT) {
		fail_call(status, "attempt %u to connect is not over after %d ms", attempt, timeout_ms);
		r->given_up = true;
	} else {
		if (status)
			fail_for(&s->failed);
		else if (!(status = read_answer(r, &m, sizeof m)))
			*connection = m.connection;
		free_accept(s, r);
	}
	leave(s);
	return status;
}

int peerlane_unlisten(peerlane_session *s, peerlane_listener listener)
{
	struct peerlane_unlisten request = {.type = PEERLANE_MESSAGE_UNLISTEN, .listener = listener};
	struct peerlane_done done;
	int status = ask(s, &request, sizeof request, -1, &done, PEERLANE_MESSAGE_DONE, sizeof done, NULL);

	if (status || enter(s))
		return status;
	/* The relay has refused accepts that waited, or given them a connection that
	 * nobody has heard of. */
	for (struct request *r = s->requests, *next; r; r = next) {
		next = r->next;
		if (!r->given_up || r->listener != listener)
			continue;
		if (!r->answered) {
			r->listener = 0;
			continue;
		}
		struct peerlane_connected m;

		memcpy(&m, r->answer, sizeof m);
		if (m.type == PEERLANE_MESSAGE_CONNECTED) {
			for (struct link **l = &s->links; *l; l = &(*l)->next)
				if ((*l)->number == m.connection) {
					struct link *gone = *l;

					*l = gone->next;
					free(gone);
					break;
				}
			give_back(s, m.type, m.connection);
		}
		free_accept(s, r);
	}
	if (!s->failed.status && s->orphan_count)
		return_orphans(s);
	leave(s);
	return 0;
}

/* --- the library's own thread ------------------------------------------------------ */

void nudge(struct peerlane_session *s)
{
	if (s->nudge >= 0)
		eventfd_write(s->nudge, 1);
}

/* watch sees the relay die, and the end of connections whose hand-overs a stream waits
 * for, while no thread of the program is here. */
static void *watch(void *argument)
{
	struct peerlane_session *s = argument;

	pthread_mutex_lock(&s->lock);
	while (!s->closing && (!s->failed.status || s->keeping)) {
		struct pollfd what[] = {
			{s->nudge, POLLIN, 0},
			{s->failed.status ? -1 : s->socket, POLLRDHUP | (s->handing ? POLLIN : 0), 0},
		};
		int timeout = s->keeping ? KEEP_TIME : -1;
		eventfd_t nudges;

		keep_hand_overs(s);
		pthread_mutex_unlock(&s->lock);
		poll(what, 2, timeout);
		pthread_mutex_lock(&s->lock);
		if (what[0].revents)
			eventfd_read(s->nudge, &nudges);
		if (s->failed.status || !what[1].revents)
			continue;
		if (s->polling)
			pthread_cond_wait(&s->changed, &s->lock); /* that thread reads it */
		else
			look(s);
	}
	pthread_mutex_unlock(&s->lock);
	return NULL;
}

/* start_watcher; the lock is held. */
int start_watcher(struct peerlane_session *s)
{
	pthread_attr_t attributes;
	sigset_t none, before;
	int failure;

	if (s->watching)
		return 0;
	if (s->nudge < 0)
		s->nudge = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (s->nudge < 0)
		return fail_call(PEERLANE_STATUS_SYSTEM, "a descriptor to wake the thread that watches the relay: %m");
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, 256 << 10);
	sigfillset(&none);
	pthread_sigmask(SIG_SETMASK, &none, &before);
	failure = pthread_create(&s->watcher, &attributes, watch, s);
	if (failure) /* glibc takes the memory of all libraries' thread-local variables from the stack */
		failure = pthread_create(&s->watcher, NULL, watch, s);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attributes);
	if (failure) {
		errno = failure;
		return fail_call(PEERLANE_STATUS_SYSTEM, "the thread that watches the relay cannot be started: %m");
	}
	s->watching = true;
	return 0;
}

/* --- dial ------------------------------------------------------------------------- */

/* no_relay is the error of a container that was given no lane, or whose relay did not
 * start: then the anchor of its lane, an empty directory, is there. */
static int no_relay(const char *socket, int error, const peerlane_gpu *gpus, unsigned count)
{
	char directory[sizeof((struct sockaddr_un *)0)->sun_path + 1], devices[SENTENCE / 2];
	char *end;
	size_t used = 0;
	DIR *d;

	snprintf(directory, sizeof directory, "%s", socket);
	end = strrchr(directory, '/');
	if (end)
		*(end == directory ? end + 1 : end) = 0;
	d = opendir(end ? directory : ".");
	if (d) {
		const struct dirent *entry;
		bool empty = true;

		while (empty && (entry = readdir(d)))
			empty = !strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..");
		closedir(d);
		if (empty) {
			errno = error;
			return fail_call(PEERLANE_STATUS_NO_RELAY,
				"no relay at %s: %m; the container's relay did not start, and the host's configuration (hook.on_failure) starts containers without; the host's log says why (journalctl -t peerlane-hook, or its syslog) [PL1401]", socket);
		}
	}
	devices[0] = 0;
	for (unsigned i = 0; gpus && i < count; i++) {
		char text[41];
		int n;

		peerlane_gpu_format(&gpus[i], text);
		n = snprintf(devices + used, sizeof devices - used, "%s--device peerlane.dev/lane=%s", i ? " " : "", text);
		if (n < 0 || (size_t)n >= sizeof devices - used) {
			devices[used] = 0;
			break;
		}
		used += (size_t)n;
	}
	errno = error;
	if (!devices[0])
		return fail_call(PEERLANE_STATUS_NO_RELAY, "no relay at %s: %m; start the container with --device peerlane.dev/lane=N, where N is its GPU's number on the host [PL1401]", socket);
	return fail_call(PEERLANE_STATUS_NO_RELAY, "no relay at %s: %m; start the container with %s [PL1401]", socket, devices);
}

/* destroy frees a session that nobody uses. */
static void destroy(struct peerlane_session *s)
{
	pthread_mutex_lock(&all_lock);
	for (struct peerlane_session **at = &all; *at; at = &(*at)->next)
		if (*at == s) {
			*at = s->next;
			break;
		}
	pthread_mutex_lock(&s->lock); /* whoever was the last inside has left */
	close_descriptors(s);
	pthread_mutex_unlock(&s->lock);
	pthread_mutex_unlock(&all_lock);
	if (s->submit)
		munmap(s->submit, PEERLANE_SUBMIT_BYTES);
	if (s->complete)
		munmap((void *)(uintptr_t)s->complete, PEERLANE_COMPLETE_BYTES);
	if (s->lists)
		munmap(s->lists, PEERLANE_MAX_LIST_ENTRIES * sizeof(struct peerlane_list_entry_layout));
	while (s->requests) {
		struct request *r = s->requests;

		s->requests = r->next;
		free(r->link);
		free(r);
	}
	while (s->links) {
		struct link *l = s->links;

		s->links = l->next;
		free(l);
	}
	while (s->mapped) {
		struct mapped *m = s->mapped;

		s->mapped = m->next;
		unmap(m, s->forked);
	}
	free(s->slots);
	pthread_cond_destroy(&s->changed);
	pthread_mutex_destroy(&s->lock);
	free(s);
}

int map(const char *what, int fd, size_t bytes, int protection, bool shared_with_children, void **memory)
{
	struct statx file;
	int seals;

	if (statx(fd, "", AT_EMPTY_PATH, STATX_SIZE, &file))
		return fail_call(PEERLANE_STATUS_SYSTEM, "the relay's shared memory: %m");
	if (file.stx_size != bytes)
		return fail_call(PEERLANE_STATUS_MALFORMED, "the relay's shared memory has %llu bytes, not %zu", (unsigned long long)file.stx_size, bytes);
	/* Memory that is cut off below us would be a SIGBUS. */
	seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0 || !(seals & F_SEAL_SHRINK))
		return fail_call(PEERLANE_STATUS_MALFORMED, "the relay's shared memory is not sealed");
	*memory = mmap(NULL, bytes, protection, MAP_SHARED, fd, 0);
	if (*memory == MAP_FAILED) {
		*memory = NULL;
		return fail_call(PEERLANE_STATUS_SYSTEM, "mapping the %s memory: %m", what);
	}
	if (!shared_with_children && madvise(*memory, bytes, MADV_DONTFORK))
		return fail_call(PEERLANE_STATUS_SYSTEM, "keeping the %s memory from children: %m", what);
	return 0;
}

/* MADV_POPULATE_*, since Linux 5.14. */
#define POPULATE_READ 22
#define POPULATE_WRITE 23

int populate(const char *what, const void *memory, size_t bytes, bool writable)
{
	while (madvise((void *)(uintptr_t)memory, bytes, writable ? POPULATE_WRITE : POPULATE_READ)) {
		if (errno == EINTR || errno == EAGAIN) /* the kernel keeps the pages that are there */
			continue;
		if (errno != EINVAL)
			return fail_call(PEERLANE_STATUS_SYSTEM, "allocating %zu bytes of %s memory: %m; raise the container's memory limit", bytes, what);
		for (size_t at = 0; at < bytes; at += 4096) { /* before Linux 5.14 */
			if (writable)
				__atomic_fetch_add((uint32_t *)(uintptr_t)memory + at / sizeof(uint32_t), 0, __ATOMIC_RELAXED);
			else
				(void)*((const volatile uint32_t *)memory + at / sizeof(uint32_t));
		}
		break;
	}
	return 0;
}

/* bell checks a descriptor that is written to or read without waiting. */
static int bell(int fd, bool pipe)
{
	struct statx file;
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0 || statx(fd, "", AT_EMPTY_PATH, STATX_TYPE, &file) || fcntl(fd, F_SETFL, flags | O_NONBLOCK))
		return fail_call(PEERLANE_STATUS_SYSTEM, "the relay's descriptors: %m");
	/* An eventfd has no type. Writing to a pipe could raise SIGPIPE. */
	if ((file.stx_mode & S_IFMT) != (pipe ? S_IFIFO : 0))
		return fail_call(PEERLANE_STATUS_MALFORMED, "the relay's descriptors are not an eventfd and a pipe");
	return 0;
}

/* take_welcome opens what Welcome brought; the descriptors that it keeps become -1. */
static int take_welcome(struct peerlane_session *s, const char *path, const uint8_t *data, size_t n, int *fds, unsigned count)
{
	struct peerlane_welcome m;
	void *memory = NULL;
	int status;

	if (n != sizeof m || (memcpy(&m, data, sizeof m), m.type != PEERLANE_MESSAGE_WELCOME) || count != 4)
		return fail_call(PEERLANE_STATUS_MALFORMED, "the relay at %s answered hello with %zu bytes that are no welcome, and %u descriptors", path, n, count);
	if (m.version < PEERLANE_OLDEST_VERSION || m.version > PEERLANE_NEWEST_VERSION)
		return fail_call(PEERLANE_STATUS_VERSION,
			"the relay at %s speaks version %u of Peerlane's protocol, this client %d to %d; install the same release of Peerlane in the image and on the host",
			path, m.version, PEERLANE_OLDEST_VERSION, PEERLANE_NEWEST_VERSION);
	if ((status = map("submit", fds[0], PEERLANE_SUBMIT_BYTES, PROT_READ | PROT_WRITE, false, &memory)) && !memory)
		return status;
	s->submit = memory;
	memory = NULL;
	if (!status)
		status = map("complete", fds[1], PEERLANE_COMPLETE_BYTES, PROT_READ, false, &memory);
	s->complete = memory;
	if (!status && !(status = populate("submit", s->submit, PEERLANE_SUBMIT_BYTES, true)))
		status = populate("complete", s->complete, PEERLANE_COMPLETE_BYTES, false);
	if (status || (status = bell(fds[2], false)) || (status = bell(fds[3], true)))
		return status;
	s->version = m.version;
	s->wake_relay = fds[2];
	s->wake_client = fds[3];
	fds[2] = fds[3] = -1;
	s->slots = calloc(PEERLANE_MAX_OPERATIONS, sizeof *s->slots);
	if (!s->slots)
		return fail_call(PEERLANE_STATUS_SYSTEM, "dialing: out of memory");
	open_slots(s);
	return 0;
}

static _Atomic uint32_t program;

void peerlane_set_program(uint32_t value) { program = value; }

/* greet says hello and waits for the answer. */
static int greet(struct peerlane_session *s, const char *path, int64_t deadline)
{
	struct peerlane_hello hello = {
		.type = PEERLANE_MESSAGE_HELLO, .sequence = 1, .magic = PEERLANE_MAGIC,
		.oldest = PEERLANE_OLDEST_VERSION, .newest = PEERLANE_NEWEST_VERSION, .program = program,
	};
	uint8_t data[MAX_MESSAGE + 1];
	int fds[MAX_DESCRIPTORS + 1];
	unsigned count;
	ssize_t n;
	int status, error = transmit(s->socket, &hello, sizeof hello, -1);

	if (error && error != EPIPE && error != ECONNRESET) { /* which may have left a reason */
		errno = error;
		return fail_call(PEERLANE_STATUS_SYSTEM, "the relay at %s: %m", path);
	}
	for (;;) {
		struct pollfd readable = {s->socket, POLLIN, 0};

		pthread_mutex_lock(&s->lock); /* a child would have what comes */
		n = receive(s->socket, data, fds, &count);
		if (n >= 0 || errno != EAGAIN)
			break;
		pthread_mutex_unlock(&s->lock);
		if (now_ns() >= deadline)
			return fail_call(PEERLANE_STATUS_TIMED_OUT, "the relay at %s did not answer in time", path);
		poll(&readable, 1, milliseconds_to(deadline));
	}
	if (n < 0 && errno == EBADMSG)
		status = fail_call(PEERLANE_STATUS_MALFORMED, "the relay at %s answered hello with more than %d bytes or %d descriptors", path, MAX_MESSAGE, MAX_DESCRIPTORS);
	else if (n < 0)
		status = fail_call(PEERLANE_STATUS_RELAY_DIED, "the relay at %s: %m", path);
	else if (n == 0)
		status = fail_call(PEERLANE_STATUS_RELAY_DIED, "the relay at %s closed the connection without a word", path);
	else {
		struct peerlane_failure m;

		if ((size_t)n == sizeof m && (memcpy(&m, data, sizeof m), m.type == PEERLANE_MESSAGE_FAILURE)) {
			struct reason why;

			read_reason(&why, m.status, m.reason, sizeof m.reason);
			status = fail_call(why.status, "the relay at %s: %s", path, why.text);
		} else {
			status = take_welcome(s, path, data, (size_t)n, fds, count);
		}
	}
	for (unsigned i = 0; i < count; i++)
		close_one(&fds[i]);
	pthread_mutex_unlock(&s->lock);
	return status;
}

int peerlane_dial(const char *path, const peerlane_gpu *gpus, unsigned count, int timeout_ms, peerlane_session **out)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int64_t deadline = deadline_in(timeout_ms < 0 ? REPLY_TIME : timeout_ms);
	struct peerlane_session *s;
	bool full = false; /* the relay's queue of connections, at the last connect */
	int status = 0, error;

	if (!out)
		return fail_call(PEERLANE_STATUS_INVALID, "dialing: nowhere to write the session: NULL");
	*out = NULL;
	if (!path)
		path = PEERLANE_DEFAULT_SOCKET;
	if (strlen(path) >= sizeof address.sun_path)
		return fail_call(PEERLANE_STATUS_INVALID, "the path of a socket has at most %zu characters: %s", sizeof address.sun_path - 1, path);
	strcpy(address.sun_path, path);
	error = handle_fork();
	if (error) {
		errno = error;
		return fail_call(PEERLANE_STATUS_SYSTEM, "dialing: %m");
	}
	s = calloc(1, sizeof *s);
	if (!s)
		return fail_call(PEERLANE_STATUS_SYSTEM, "dialing: out of memory");
	/* It tries again for a moment before it sleeps. */
	s->lock = (pthread_mutex_t)PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
	new_condition(&s->changed);
	s->socket = s->wake_relay = s->wake_client = s->event = s->notice = s->nudge = -1;
	s->first_ended = s->last_ended = NO_SLOT;

	pthread_mutex_lock(&all_lock); /* from here on fork() knows of it */
	s->next = all;
	all = s;
	s->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	error = errno;
	pthread_mutex_unlock(&all_lock);
	if (s->socket < 0) {
		errno = error;
		status = fail_call(PEERLANE_STATUS_SYSTEM, "dialing: a socket: %m");
	}
	/* While the relay's queue of connections is full connect waits in the kernel. */
	while (!status) {
		int64_t left = (deadline - now_ns()) / 1000;
		struct timeval limit = {left / 1000000, left % 1000000};

		if (left <= 0 && full) {
			status = fail_call(PEERLANE_STATUS_BUSY,
				"the relay at %s accepts no connection: its queue was full for %d ms; peerlane relay list on the host shows its state",
				path, timeout_ms < 0 ? REPLY_TIME : timeout_ms);
			break;
		}
		if (left <= 0) {
			status = fail_call(PEERLANE_STATUS_TIMED_OUT, "the relay at %s did not answer in time", path);
			break;
		}
		if (setsockopt(s->socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit)) {
			status = fail_call(PEERLANE_STATUS_SYSTEM, "dialing: %m");
			break;
		}
		if (!connect(s->socket, (struct sockaddr *)&address, sizeof address)) {
			status = greet(s, path, deadline);
			break;
		}
		full = errno == EAGAIN;
		if (errno != EINTR && !full)
			status = no_relay(path, errno, gpus, count);
	}
	if (status) {
		destroy(s);
		return status;
	}
	*out = s;
	return 0;
}

/* part ends a session that works: what is under way comes to its end. The relay closes
 * the socket when that is so; one that is dead itself does not hear the goodbye. */
static void part(struct peerlane_session *s)
{
	struct peerlane_goodbye goodbye = {.type = PEERLANE_MESSAGE_GOODBYE};
	int64_t deadline = deadline_in(LET_GO_TIME);

	s->parting = true;
	for (struct link *l = s->links; l; l = l->next)
		if (!l->down.status)
			give_reason(&l->down, PEERLANE_STATUS_CLOSED, "%s", was_closed);
	if (!push(s, &goodbye, sizeof goodbye, -1, deadline))
		await(s, never, NULL, deadline);
}

void peerlane_close(peerlane_session *s)
{
	if (!s)
		return;
	if (s->registered)
		peerlane_unregister_timelines(s);
	pthread_mutex_lock(&s->lock);
	if (!s->failed.status)
		part(s);
	fail_session(s, PEERLANE_STATUS_CLOSED, "%s", was_closed);
	s->closing = true;
	nudge(s);
	while (s->inside)
		pthread_cond_wait(&s->changed, &s->lock);
	pthread_mutex_unlock(&s->lock);
	if (s->watching)
		pthread_join(s->watcher, NULL);
	destroy(s);
}

int peerlane_session_status(peerlane_session *s)
{
	int status = enter(s);

	if (status)
		return status;
	look(s);
	drain_or_fail(s);
	status = s->failed.status ? fail_for(&s->failed) : 0;
	leave(s);
	return status;
}

unsigned peerlane_protocol(const peerlane_session *s) { return s ? s->version : 0; }
