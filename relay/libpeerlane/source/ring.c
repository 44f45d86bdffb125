/* Operations and timelines: the memory that is shared with the relay.
 *
 * The client writes the submit memory, the relay alone the complete memory. What is
 * read from either is copied once and checked: a relay that is broken gets an error,
 * and nobody's memory. */
#include "internal.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* How long peerlane_wait() looks at the ring before it sleeps. */
#define SPIN_TIME 50000 /* ns */

/* How long a failed operation waits for the sentence that comes on the socket while
 * its status comes in the ring. */
#define REASON_TIME 1000000000 /* ns */

/* How often peerlane_test() and peerlane_poll() look whether the relay lives. */
#define LOOK_TIME 10000000 /* ns */

static struct peerlane_submit_page *submit_page(struct peerlane_session *s) { return (struct peerlane_submit_page *)s->submit; }

static const struct peerlane_complete_page *complete_page(struct peerlane_session *s) { return (const struct peerlane_complete_page *)s->complete; }

static uint64_t *timeline(struct peerlane_session *s, uint32_t i)
{
	return (uint64_t *)(s->submit + PEERLANE_SUBMIT_TIMELINES + i * PEERLANE_TIMELINE_STRIDE);
}

void end_timelines(struct peerlane_session *s)
{
	for (uint32_t i = 0; i < PEERLANE_TIMELINES; i++)
		__atomic_store_n(timeline(s, i), PEERLANE_TIMELINE_END, __ATOMIC_SEQ_CST);
}

/* --- slots ---------------------------------------------------------------------- */

void open_slots(struct peerlane_session *s)
{
	/* No cookie is 0. */
	for (uint32_t i = 0; i < PEERLANE_MAX_OPERATIONS; i++)
		s->slots[i] = (struct slot){.cookie = PEERLANE_MAX_OPERATIONS + i, .next = i + 1 < PEERLANE_MAX_OPERATIONS ? i + 1 : NO_SLOT};
	s->free_slot = 0;
	s->first_list = NO_SLOT;
}

/* posted_as is the slot of an operation, NULL if it is none or its result was taken. */
static struct slot *posted_as(struct peerlane_session *s, peerlane_operation operation)
{
	struct slot *o = &s->slots[operation % PEERLANE_MAX_OPERATIONS];

	return o->cookie == operation && o->state != SLOT_FREE ? o : NULL;
}

static uint32_t number_of(struct peerlane_session *s, const struct slot *o) { return (uint32_t)(o - s->slots); }

static void free_slot(struct peerlane_session *s, struct slot *o)
{
	o->cookie += PEERLANE_MAX_OPERATIONS;
	o->state = SLOT_FREE;
	o->waiters = 0;
	o->next = s->free_slot;
	s->free_slot = number_of(s, o);
}

/* end ends an operation. */
static void end(struct peerlane_session *s, struct slot *o, int status, uint64_t moved)
{
	if (o->in_turn)
		s->hand_overs[o->timeline].operations--;
	free_list(s, o);
	if (o->forget && !o->waiters) {
		free_slot(s, o);
		return;
	}
	o->state = SLOT_ENDED;
	o->status = status;
	o->moved = moved;
	o->next = NO_SLOT;
	o->previous = s->last_ended;
	if (s->last_ended != NO_SLOT)
		s->slots[s->last_ended].next = number_of(s, o);
	else
		s->first_ended = number_of(s, o);
	s->last_ended = number_of(s, o);
}

/* taken frees the slot of an operation that has ended. */
static void taken(struct peerlane_session *s, struct slot *o)
{
	if (o->previous != NO_SLOT)
		s->slots[o->previous].next = o->next;
	else
		s->first_ended = o->next;
	if (o->next != NO_SLOT)
		s->slots[o->next].previous = o->previous;
	else
		s->last_ended = o->previous;
	free_slot(s, o);
}

void end_all(struct peerlane_session *s, int status)
{
	for (uint32_t i = 0; s->slots && i < PEERLANE_MAX_OPERATIONS; i++)
		if (s->slots[i].state == SLOT_POSTED)
			end(s, &s->slots[i], status, 0);
}

/* --- the ring ------------------------------------------------------------------- */

static void ring_bell(int bell)
{
	const uint64_t one = 1;

	/* EAGAIN says that it was rung often enough. */
	while (write(bell, &one, sizeof one) < 0 && errno == EINTR)
		;
}

void notice(struct peerlane_session *s)
{
	if (s->event < 0 || s->noticed)
		return;
	s->noticed = true;
	ring_bell(s->notice);
}

static bool relay_sleeps(struct peerlane_session *s) { return __atomic_load_n(&complete_page(s)->relay_sleeps, __ATOMIC_SEQ_CST) != 0; }

void set_sleeps(struct peerlane_session *s)
{
	uint32_t sleeps = s->polling || s->asleep || s->event >= 0;

	if (s->submit && __atomic_load_n(&submit_page(s)->client_sleeps, __ATOMIC_RELAXED) != sleeps)
		__atomic_store_n(&submit_page(s)->client_sleeps, sleeps, __ATOMIC_SEQ_CST);
}

bool drain(struct peerlane_session *s, struct reason *why)
{
	/* Not before what set_sleeps has stored is there: the relay looks at that after it
	 * has moved the tail. */
	uint64_t tail = __atomic_load_n(&complete_page(s)->tail, __ATOMIC_SEQ_CST), before = s->finished, begun;

	if (tail == before)
		return true;
	if (tail - before > PEERLANE_RING_ENTRIES) {
		give_reason(why, PEERLANE_STATUS_BAD_RING, "the relay's ring is broken: it says that %llu operations have ended, after %llu; the ring has %d",
			(unsigned long long)tail, (unsigned long long)before, PEERLANE_RING_ENTRIES);
		return false;
	}
	while (s->finished != tail) {
		const struct peerlane_completion *shared =
			(const struct peerlane_completion *)(s->complete + PEERLANE_COMPLETE_ENTRIES) + s->finished % PEERLANE_RING_ENTRIES;
		uint64_t cookie = __atomic_load_n(&shared->cookie, __ATOMIC_RELAXED), moved = __atomic_load_n(&shared->length, __ATOMIC_RELAXED);
		uint32_t status = __atomic_load_n(&shared->status, __ATOMIC_RELAXED), entry = __atomic_load_n(&shared->entry, __ATOMIC_RELAXED);
		struct slot *o = posted_as(s, cookie);

		if (!o || o->state != SLOT_POSTED || moved > o->length || (o->entries && entry >= o->entries)) {
			give_reason(why, PEERLANE_STATUS_BAD_RING, "the relay's ring is broken: it ends operation %llu, with %llu bytes, which was not posted so",
				(unsigned long long)cookie, (unsigned long long)moved);
			return false;
		}
		s->finished++;
		if (o->failed && status != PEERLANE_STATUS_OK)
			*o->failed = entry;
		if (s->parting && status == PEERLANE_STATUS_PEER_CLOSED)
			status = PEERLANE_STATUS_CLOSED; /* we are the one who closed */
		end(s, o, status < PEERLANE_STATUS_PENDING ? (int)status : PEERLANE_STATUS_INTERNAL, moved);
	}
	__atomic_store_n(&submit_page(s)->completed_head, s->finished, __ATOMIC_SEQ_CST);
	if (s->asleep)
		pthread_cond_broadcast(&s->changed);
	if (!s->taking)
		notice(s);
	/* The relay may have gone to sleep for want of room for completions. */
	begun = __atomic_load_n(&complete_page(s)->taken_head, __ATOMIC_SEQ_CST);
	if (relay_sleeps(s) && begun - before >= PEERLANE_RING_ENTRIES)
		ring_bell(s->wake_relay);
	return true;
}

/* post writes a descriptor into the ring; the lock is held. */
static int post(struct peerlane_session *s, struct peerlane_descriptor *d, const struct list *l, bool forget, uint64_t context, peerlane_operation *operation)
{
	struct slot *o;
	uint64_t ahead;
	int status;

	for (bool again = false;; again = true) {
		ahead = s->posted - __atomic_load_n(&complete_page(s)->taken_head, __ATOMIC_ACQUIRE);
		if (ahead > PEERLANE_RING_ENTRIES) {
			fail_session(s, PEERLANE_STATUS_BAD_RING, "the relay's ring is broken: it says that it has taken operation %llu; %llu were posted",
				(unsigned long long)(s->posted - ahead), (unsigned long long)s->posted);
			return fail_for(&s->failed);
		}
		if (ahead < PEERLANE_RING_ENTRIES && s->free_slot != NO_SLOT)
			break;
		if (again && ahead == PEERLANE_RING_ENTRIES)
			return fail_call(PEERLANE_STATUS_FULL, "the ring is full: operations that were posted have to end first");
		if (again)
			return fail_call(PEERLANE_STATUS_FULL, "%d operations have not ended, or their results were not taken (peerlane_test, peerlane_wait, peerlane_poll)", PEERLANE_MAX_OPERATIONS);
		drain_or_fail(s); /* which may make room */
		if (s->failed.status)
			return fail_for(&s->failed);
	}
	o = &s->slots[s->free_slot];
	if (l && (status = place_list(s, o, l, d)))
		return status;
	s->free_slot = o->next;
	o->state = SLOT_POSTED;
	o->forget = forget;
	o->length = l ? l->bytes : d->length;
	o->context = context;
	o->connection = d->connection;
	o->timeline = d->wait_timeline;
	if ((o->in_turn = d->flags & PEERLANE_IN_TURN))
		s->hand_overs[o->timeline].operations++;
	d->cookie = o->cookie;
	memcpy(s->submit + PEERLANE_SUBMIT_ENTRIES + s->posted % PEERLANE_RING_ENTRIES * sizeof *d, d, sizeof *d);
	s->posted++;
	__atomic_store_n(&submit_page(s)->tail, s->posted, __ATOMIC_SEQ_CST);
	if (relay_sleeps(s))
		ring_bell(s->wake_relay);
	if (operation)
		*operation = o->cookie;
	return 0;
}

/* in_turn notes with whose end a hand-over ends. */
static int in_turn(struct peerlane_session *s, uint32_t connection, uint32_t timeline)
{
	const struct link *l = find_link(s, connection);
	int status = hand_over_status(s, timeline);

	if (status)
		return status;
	s->hand_overs[timeline].connection = connection;
	if (!l || !l->down.status)
		return 0;
	end_hand_overs(s, connection, l->down.status);
	return hand_over_status(s, timeline);
}

int submit(peerlane_session *s, struct peerlane_descriptor d, const struct peerlane_options *options, const struct list *l,
	peerlane_operation *operation)
{
	int status;

	d.wait_timeline = d.signal_timeline = PEERLANE_NO_TIMELINE;
	if (options) {
		if (options->flags & ~(PEERLANE_AFTER | PEERLANE_SIGNAL | PEERLANE_AFTER_EVENT | PEERLANE_HAND_OVER | PEERLANE_BUFFERED))
			return fail_call(PEERLANE_STATUS_INVALID, "an operation's options have flags that this version does not know: %#x", options->flags);
		d.tag = options->tag;
		if (options->flags & PEERLANE_AFTER) {
			d.wait_timeline = options->after_timeline;
			d.wait_value = options->after_value;
		}
		if (options->flags & PEERLANE_AFTER_EVENT)
			d.wait_event = options->after_event;
		if (options->flags & PEERLANE_BUFFERED) {
			if (d.operation != PEERLANE_OP_SEND)
				return fail_call(PEERLANE_STATUS_INVALID, "PEERLANE_BUFFERED is an option of peerlane_send()");
			d.flags = PEERLANE_BUFFERED_SEND;
		}
		if (options->flags & PEERLANE_HAND_OVER) {
			if (options->flags != PEERLANE_HAND_OVER)
				return fail_call(PEERLANE_STATUS_INVALID, "an operation that waits for its turn (PEERLANE_HAND_OVER) goes with none of PEERLANE_AFTER, PEERLANE_SIGNAL, PEERLANE_AFTER_EVENT and PEERLANE_BUFFERED");
			d.flags = PEERLANE_IN_TURN;
			d.wait_timeline = options->after_timeline;
		}
		if (options->flags & PEERLANE_SIGNAL) {
			d.signal_timeline = options->signal_timeline;
			d.signal_value = options->signal_value;
		}
		if ((options->flags & PEERLANE_AFTER && d.wait_timeline >= PEERLANE_TIMELINES) ||
		    (options->flags & PEERLANE_SIGNAL && d.signal_timeline >= PEERLANE_TIMELINES))
			return fail_call(PEERLANE_STATUS_INVALID, "a timeline beyond the last: a session has %d, numbered from 0", PEERLANE_TIMELINES);
	}
	if ((status = enter(s)))
		return status;
	if (s->version < PEERLANE_BUFFERED_VERSION) /* the send ends at its delivery */
		d.flags &= ~PEERLANE_BUFFERED_SEND;
	if (d.flags & PEERLANE_IN_TURN)
		status = in_turn(s, d.connection, d.wait_timeline);
	if (!status)
		status = post(s, &d, l, !operation, options ? options->context : 0, operation);
	leave(s);
	return status;
}

int peerlane_send(peerlane_session *s, peerlane_connection connection, peerlane_memory memory,
	uint64_t offset, uint64_t length, const struct peerlane_options *options, peerlane_operation *operation)
{
	struct peerlane_descriptor d = {.operation = PEERLANE_OP_SEND, .connection = connection, .memory = memory, .offset = offset, .length = length};

	return submit(s, d, options, NULL, operation);
}

int peerlane_receive(peerlane_session *s, peerlane_connection connection, peerlane_memory memory,
	uint64_t offset, uint64_t length, const struct peerlane_options *options, peerlane_operation *operation)
{
	struct peerlane_descriptor d = {.operation = PEERLANE_OP_RECEIVE, .connection = connection, .memory = memory, .offset = offset, .length = length};

	return submit(s, d, options, NULL, operation);
}

int peerlane_flush(peerlane_session *s, peerlane_connection connection, const struct peerlane_options *options, peerlane_operation *operation)
{
	struct peerlane_descriptor d = {.operation = PEERLANE_OP_FLUSH, .connection = connection};

	return submit(s, d, options, NULL, operation);
}

/* one_sided posts an operation on a region of the other side. */
static int one_sided(peerlane_session *s, struct peerlane_descriptor d, const peerlane_remote_key *key,
	const struct peerlane_options *options, peerlane_operation *operation)
{
	struct peerlane_remote_key_layout layout;

	if (!key)
		return fail_call(PEERLANE_STATUS_INVALID, "a one-sided operation without a key: NULL");
	memcpy(&layout, key->bytes, sizeof layout);
	if (layout.magic != PEERLANE_REMOTE_KEY_MAGIC)
		return fail_call(PEERLANE_STATUS_BAD_KEY, "these %zu bytes are not the key of a region", sizeof key->bytes);
	memcpy(d.key, layout.key, sizeof d.key);
	return submit(s, d, options, NULL, operation);
}

int peerlane_write(peerlane_session *s, peerlane_connection connection, peerlane_memory memory, uint64_t offset, uint64_t length,
	const peerlane_remote_key *key, uint64_t at, const struct peerlane_options *options, peerlane_operation *operation)
{
	struct peerlane_descriptor d = {
		.operation = PEERLANE_OP_WRITE, .connection = connection, .memory = memory, .offset = offset, .length = length, .remote_offset = at,
	};

	return one_sided(s, d, key, options, operation);
}

int peerlane_read(peerlane_session *s, peerlane_connection connection, peerlane_memory memory, uint64_t offset, uint64_t length,
	const peerlane_remote_key *key, uint64_t at, const struct peerlane_options *options, peerlane_operation *operation)
{
	struct peerlane_descriptor d = {
		.operation = PEERLANE_OP_READ, .connection = connection, .memory = memory, .offset = offset, .length = length, .remote_offset = at,
	};

	return one_sided(s, d, key, options, operation);
}

static int not_posted(peerlane_operation operation)
{
	return fail_call(PEERLANE_STATUS_INVALID, "operation %llu was not posted, or its result was taken", (unsigned long long)operation);
}

int peerlane_cancel(peerlane_session *s, peerlane_operation operation)
{
	struct peerlane_descriptor d = {
		.operation = PEERLANE_OP_CANCEL, .tag = operation,
		.wait_timeline = PEERLANE_NO_TIMELINE, .signal_timeline = PEERLANE_NO_TIMELINE,
	};
	struct slot *o;
	int status = enter(s);

	if (status)
		return status;
	o = posted_as(s, operation);
	if (!o) {
		status = not_posted(operation);
	} else if (o->state == SLOT_POSTED) {
		d.connection = o->connection;
		status = post(s, &d, NULL, true, 0, NULL);
	}
	leave(s);
	return status;
}

int peerlane_forget(peerlane_session *s, peerlane_operation operation)
{
	struct slot *o;
	int status = 0;

	if (!s)
		return enter(s);
	pthread_mutex_lock(&s->lock); /* a session that has failed has results */
	drain_or_fail(s);
	o = posted_as(s, operation);
	if (!o)
		status = not_posted(operation);
	else if (o->state == SLOT_ENDED)
		taken(s, o);
	else
		o->forget = true;
	leave(s);
	return status;
}

/* --- results -------------------------------------------------------------------- */

/* of_operation reports whether a status is one operation's alone: the connection stays
 * up. */
static bool of_operation(int status)
{
	switch (status) {
	case PEERLANE_STATUS_OK:
	case PEERLANE_STATUS_TRUNCATED:
	case PEERLANE_STATUS_BAD_KEY:
	case PEERLANE_STATUS_NO_REVERSE_CONNECTION:
	case PEERLANE_STATUS_CANCELED:
	case PEERLANE_STATUS_VERSION:
	case PEERLANE_STATUS_MALFORMED:
	case PEERLANE_STATUS_UNKNOWN_MEMORY:
	case PEERLANE_STATUS_UNKNOWN_EVENT:
	case PEERLANE_STATUS_WRONG_GPU:
	case PEERLANE_STATUS_NOT_PERMITTED:
	case PEERLANE_STATUS_OUT_OF_RANGE:
		return true;
	}
	return false;
}

/* explain finds the sentence for an operation's status. */
static int explain(struct peerlane_session *s, int status, uint32_t connection)
{
	struct link *l;

	if (!status)
		return 0;
	if (s->failed.status == status)
		return fail_for(&s->failed);
	l = find_link(s, connection);
	if (of_operation(status) && l)
		return fail_call(status, "on the connection with %s: %s", l->peer, peerlane_status_text(status));
	if (!of_operation(status) && l && l->down.status && (l->down.status == status || status == PEERLANE_STATUS_UNKNOWN_CONNECTION))
		return fail_for(&l->down);
	return fail_call(status, "%s", peerlane_status_text(status));
}

/* take_result takes the result of an operation that has ended. */
static int take_result(struct peerlane_session *s, struct slot *o, uint64_t *moved)
{
	int status = o->status;
	uint32_t connection = o->connection;

	if (moved)
		*moved = o->moved;
	taken(s, o);
	return explain(s, status, connection);
}

/* lives looks, from time to time, whether the relay lives: it cannot say in shared
 * memory that it has died. */
static void lives(struct peerlane_session *s)
{
	uint64_t now = (uint64_t)now_ns();

	if (now - s->looked < LOOK_TIME)
		return;
	s->looked = now;
	look(s);
}

int peerlane_test(peerlane_session *s, peerlane_operation operation, uint64_t *moved)
{
	struct slot *o;
	int status;

	if (!s)
		return enter(s);
	pthread_mutex_lock(&s->lock); /* a session that has failed has results */
	drain_or_fail(s);
	o = posted_as(s, operation);
	if (o && o->state == SLOT_POSTED)
		lives(s);
	if (!o) {
		status = not_posted(operation);
	} else if (o->state == SLOT_ENDED) {
		if (!of_operation(o->status) && !s->failed.status)
			look(s); /* for the reason */
		status = take_result(s, o, moved);
	} else {
		status = PEERLANE_STATUS_PENDING;
	}
	leave(s);
	return status;
}

struct awaited {
	struct peerlane_session *session;
	peerlane_operation operation;
};

static bool has_ended(void *argument)
{
	struct awaited *a = argument;
	struct slot *o = posted_as(a->session, a->operation);

	return !o || o->state == SLOT_ENDED;
}

/* has_reason: the connection of an operation that failed with it is known to be down. */
static bool has_reason(void *argument)
{
	struct awaited *a = argument;
	struct slot *o = posted_as(a->session, a->operation);
	struct link *l = o ? find_link(a->session, o->connection) : NULL;

	return !l || l->down.status;
}

/* spin looks at the ring for a short time, so that what ends soon is seen without a
 * sleep. */
static void spin(struct peerlane_session *s, struct awaited *a, int64_t deadline)
{
	int64_t until = now_ns() + SPIN_TIME;

	if (deadline < until)
		until = deadline;
	while (drain_or_fail(s), !has_ended(a) && !s->failed.status && now_ns() < until) {
		pthread_mutex_unlock(&s->lock);
		for (int i = 0; i < 16; i++) {
#if defined(__x86_64__)
			__builtin_ia32_pause();
#elif defined(__aarch64__)
			__asm__ volatile("yield");
#endif
		}
		pthread_mutex_lock(&s->lock);
	}
}

int peerlane_wait(peerlane_session *s, peerlane_operation operation, int timeout_ms, uint64_t *moved)
{
	struct awaited a = {s, operation};
	int64_t deadline = deadline_in(timeout_ms);
	struct slot *o;
	int status = 0;

	if (!s)
		return enter(s);
	pthread_mutex_lock(&s->lock);
	o = posted_as(s, operation);
	if (!o) {
		status = not_posted(operation);
		leave(s);
		return status;
	}
	o->waiters++;
	s->inside++;
	spin(s, &a, deadline);
	if (!has_ended(&a))
		status = await(s, has_ended, &a, deadline);
	o = posted_as(s, operation);
	if (!o) { /* another thread waited for it as well */
		status = not_posted(operation);
	} else if (o->state == SLOT_ENDED) {
		if (!of_operation(o->status) && !s->failed.status)
			await(s, has_reason, &a, now_ns() + REASON_TIME);
		o = posted_as(s, operation); /* the lock was given up */
		status = o ? take_result(s, o, moved) : not_posted(operation);
	} else {
		o->waiters--;
		status = fail_call(status, "operation %llu has not ended within %d ms", (unsigned long long)operation, timeout_ms);
	}
	s->inside--;
	pthread_cond_broadcast(&s->changed);
	leave(s);
	return status;
}

/* final_status: of an operation that came to a connection after that had gone, the
 * reason why it had. */
static int final_status(struct peerlane_session *s, const struct slot *o)
{
	struct link *l;

	if (o->status != PEERLANE_STATUS_UNKNOWN_CONNECTION)
		return o->status;
	if (!s->failed.status)
		look(s);
	l = find_link(s, o->connection);
	return l && l->down.status ? l->down.status : o->status;
}

int peerlane_poll(peerlane_session *s, struct peerlane_result *results, unsigned room, unsigned *count)
{
	unsigned n = 0;
	int status = 0;

	if (!count || (!results && room))
		return fail_call(PEERLANE_STATUS_INVALID, "polling: nowhere to write results: NULL");
	*count = 0;
	if (!s)
		return enter(s);
	pthread_mutex_lock(&s->lock);
	s->taking = true;
	drain_or_fail(s);
	for (bool again = false;; again = true) {
		for (uint32_t i = s->first_ended, next; i != NO_SLOT && n < room; i = next) {
			struct slot *o = &s->slots[i];

			next = o->next;
			if (o->waiters)
				continue;
			results[n++] = (struct peerlane_result){o->cookie, o->moved, o->context, final_status(s, o), o->connection};
			taken(s, o);
		}
		if (n || again || s->failed.status || !room)
			break;
		/* Before somebody waits for the event descriptor it must be quiet. */
		if (s->event >= 0)
			look_at_wakes(s);
		else
			lives(s);
	}
	s->taking = false;
	*count = n;
	if (!n && s->failed.status)
		status = fail_for(&s->failed);
	leave(s);
	return status;
}

int peerlane_event_descriptor(peerlane_session *s, int *fd)
{
	int status;

	if (!fd)
		return fail_call(PEERLANE_STATUS_INVALID, "nowhere to write the event descriptor: NULL");
	if ((status = enter(s)))
		return status;
	if (s->event < 0) {
		int event = epoll_create1(EPOLL_CLOEXEC), notice = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
		struct epoll_event readable = {.events = EPOLLIN};

		if (event < 0 || notice < 0 || epoll_ctl(event, EPOLL_CTL_ADD, s->socket, &readable) ||
		    epoll_ctl(event, EPOLL_CTL_ADD, s->wake_client, &readable) || epoll_ctl(event, EPOLL_CTL_ADD, notice, &readable)) {
			status = fail_call(PEERLANE_STATUS_SYSTEM, "making the event descriptor: %m");
			if (event >= 0)
				close(event);
			if (notice >= 0)
				close(notice);
		} else {
			s->event = event;
			s->notice = notice;
			set_sleeps(s);
			s->noticed = true;
			ring_bell(notice); /* for what has ended before the relay knew */
		}
	}
	*fd = s->event;
	leave(s);
	return status;
}

/* --- timelines ------------------------------------------------------------------ */

static int is_timeline(uint32_t i)
{
	if (i < PEERLANE_TIMELINES)
		return 0;
	return fail_call(PEERLANE_STATUS_INVALID, "timeline %u: a session has %d, numbered from 0", i, PEERLANE_TIMELINES);
}

int peerlane_timeline_value(peerlane_session *s, uint32_t i, uint64_t *value)
{
	int status;

	if ((status = is_timeline(i)))
		return status;
	if (!value)
		return fail_call(PEERLANE_STATUS_INVALID, "nowhere to write the value of a timeline: NULL");
	*value = PEERLANE_TIMELINE_END;
	if ((status = enter(s)))
		return status;
	*value = __atomic_load_n(timeline(s, i), __ATOMIC_SEQ_CST);
	leave(s);
	return 0;
}

int peerlane_timeline_advance(peerlane_session *s, uint32_t i, uint64_t value)
{
	int status;

	if ((status = is_timeline(i)) || (status = enter(s)))
		return status;
	__atomic_store_n(timeline(s, i), value, __ATOMIC_SEQ_CST);
	leave(s);
	return 0;
}

/* --- timelines that change hands ------------------------------------------------- */

int peerlane_hand_over(peerlane_session *s, uint32_t i, uint32_t first)
{
	int status;

	if ((status = is_timeline(i)))
		return status;
	if (first != PEERLANE_TURN_STREAM && first != PEERLANE_TURN_RELAY)
		return fail_call(PEERLANE_STATUS_INVALID, "timeline %u: the first turn is PEERLANE_TURN_STREAM or PEERLANE_TURN_RELAY, not %u", i, first);
	if ((status = enter(s)))
		return status;
	drain_or_fail(s);
	if (s->failed.status) {
		status = fail_for(&s->failed);
	} else if (s->hand_overs[i].operations) {
		status = fail_call(PEERLANE_STATUS_INVALID, "timeline %u: %u operations in turn have not ended; cancel them or wait before the hand-over begins anew",
			i, s->hand_overs[i].operations);
	} else {
		s->hand_overs[i] = (struct hand_over){.state = HAND_OVER};
		s->handing = true;
		__atomic_store_n(timeline(s, i), first, __ATOMIC_SEQ_CST);
		nudge(s);
	}
	leave(s);
	return status;
}

int hand_over_status(struct peerlane_session *s, uint32_t i)
{
	const struct hand_over *h = &s->hand_overs[i < PEERLANE_TIMELINES ? i : 0];

	if (i >= PEERLANE_TIMELINES || h->state == NO_HAND_OVER)
		return fail_call(PEERLANE_STATUS_INVALID, "timeline %u does not change hands; peerlane_hand_over() makes it", i);
	return explain(s, h->state == HAND_OVER_ENDED ? h->status : 0, h->connection);
}

int peerlane_hand_over_status(peerlane_session *s, uint32_t i)
{
	int status = enter(s);

	if (status)
		return status;
	look(s);
	status = hand_over_status(s, i);
	leave(s);
	return status;
}

void end_hand_overs(struct peerlane_session *s, uint32_t connection, int status)
{
	for (uint32_t i = 0; i < PEERLANE_TIMELINES; i++) {
		struct hand_over *h = &s->hand_overs[i];

		if (h->state != HAND_OVER || (connection && h->connection != connection))
			continue;
		h->state = HAND_OVER_ENDED;
		h->status = status;
		s->keeping = true;
	}
	keep_hand_overs(s);
	nudge(s);
}

void keep_hand_overs(struct peerlane_session *s)
{
	bool some = false;

	if (!s->submit || !s->keeping)
		return;
	for (uint32_t i = 0; i < PEERLANE_TIMELINES; i++)
		if (s->hand_overs[i].state == HAND_OVER_ENDED) {
			__atomic_store_n(timeline(s, i), PEERLANE_TIMELINE_END, __ATOMIC_SEQ_CST);
			some = true;
		}
	s->keeping = some;
}

int peerlane_timelines(peerlane_session *s, void **memory, size_t *bytes)
{
	int status;

	if (!memory || !bytes)
		return fail_call(PEERLANE_STATUS_INVALID, "nowhere to write the memory of the timelines: NULL");
	if ((status = enter(s)))
		return status;
	/* What waits for them will not look whether the relay lives. */
	status = start_watcher(s);
	if (!status) {
		*memory = timeline(s, 0);
		*bytes = PEERLANE_TIMELINES * PEERLANE_TIMELINE_STRIDE;
	}
	leave(s);
	return status;
}
