/* List operations: their entries, in memory that is shared with the relay. */
#include "internal.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LIST_BYTES (PEERLANE_MAX_LIST_ENTRIES * sizeof(struct peerlane_list_entry_layout))

/* open_lists asks the relay for list memory, once for each session. Without the lock. */
static int open_lists(peerlane_session *s)
{
	struct peerlane_list_memory m = {.type = PEERLANE_MESSAGE_LIST_MEMORY};
	struct peerlane_list_memory_made made = {0};
	void *memory = NULL;
	bool have;
	int status = enter(s), fd;

	if (status)
		return status;
	have = s->lists;
	leave(s);
	if (have)
		return 0;
	if (s->version < PEERLANE_LIST_VERSION)
		return fail_call(PEERLANE_STATUS_VERSION,
			"the relay has no list operations: it speaks version %u of Peerlane's protocol, and they came with version %d; install the same release of Peerlane in the image and on the host",
			s->version, PEERLANE_LIST_VERSION);
	if ((status = ask_for_fd(s, &m, sizeof m, &made, PEERLANE_MESSAGE_LIST_MEMORY_MADE, sizeof made, &fd)))
		return status;
	if (fd < 0 || made.bytes != LIST_BYTES)
		status = fail_call(PEERLANE_STATUS_MALFORMED, "the relay answered for list memory with %llu bytes and %s descriptor",
			(unsigned long long)made.bytes, fd < 0 ? "no" : "a");
	else
		status = map("list", fd, LIST_BYTES, PROT_READ | PROT_WRITE, false, &memory);
	if (fd >= 0)
		close(fd);
	if (!status && !(status = enter(s))) {
		if (!s->lists) { /* or another thread has asked */
			s->lists = memory;
			memory = NULL;
		}
		leave(s);
	}
	if (memory)
		munmap(memory, LIST_BYTES);
	return status;
}

/* first_gap finds room for entries, and the slot of the list before it. */
static int first_gap(struct peerlane_session *s, uint32_t count, uint32_t *at, uint32_t *before)
{
	uint32_t next = s->first_list;

	*at = 0;
	*before = NO_SLOT;
	while (next != NO_SLOT && s->slots[next].first_entry - *at < count) {
		*at = s->slots[next].first_entry + s->slots[next].entries;
		*before = next;
		next = s->slots[next].next_list;
	}
	if (count > PEERLANE_MAX_LIST_ENTRIES - *at)
		return fail_call(PEERLANE_STATUS_FULL, "the session's lists are full: they have %d entries, and lists that were posted have to end first", PEERLANE_MAX_LIST_ENTRIES);
	return 0;
}

int place_list(struct peerlane_session *s, struct slot *o, const struct list *l, struct peerlane_descriptor *d)
{
	struct peerlane_list_entry_layout *to = (struct peerlane_list_entry_layout *)s->lists;
	uint32_t at, before, *link, number = (uint32_t)(o - s->slots);
	int status = first_gap(s, l->count, &at, &before);

	if (status)
		return status;
	if (at + l->count > s->populated) {
		/* Of the control group of this process. */
		size_t from = s->populated * sizeof *to / 4096 * 4096;

		if ((status = populate("list", s->lists + from, (at + l->count) * sizeof *to - from, true)))
			return status;
		s->populated = at + l->count;
	}
	to += at;
	for (uint32_t i = 0; i < l->count; i++) {
		const struct peerlane_list_entry *e = &l->entries[i];

		to[i] = (struct peerlane_list_entry_layout){.memory = e->memory, .offset = e->offset, .length = e->length, .at = e->at};
		memcpy(to[i].key, e->key->bytes + offsetof(struct peerlane_remote_key_layout, key), sizeof to[i].key);
	}
	d->offset = at * sizeof *to;
	d->length = l->count;
	link = before == NO_SLOT ? &s->first_list : &s->slots[before].next_list;
	o->next_list = *link;
	*link = number;
	o->first_entry = at;
	o->entries = l->count;
	o->failed = l->failed;
	return 0;
}

void free_list(struct peerlane_session *s, struct slot *o)
{
	uint32_t *link = &s->first_list, number = (uint32_t)(o - s->slots);

	if (!o->entries)
		return;
	while (*link != number)
		link = &s->slots[*link].next_list;
	*link = o->next_list;
	o->entries = 0;
	o->failed = NULL;
}

static int list(peerlane_session *s, uint32_t kind, peerlane_connection connection, const struct peerlane_list_entry *entries, uint32_t count,
	const struct peerlane_options *options, uint32_t *failed, peerlane_operation *operation)
{
	struct peerlane_descriptor d = {.operation = kind, .connection = connection};
	struct list l = {.entries = entries, .count = count, .failed = failed};
	const peerlane_remote_key *checked = NULL;
	int status;

	if (!entries)
		return fail_call(PEERLANE_STATUS_INVALID, "a list without entries: NULL");
	if (count == 0 || count > PEERLANE_MAX_LIST_ENTRIES)
		return fail_call(PEERLANE_STATUS_INVALID, "a list of %u entries: it has 1 to %d", count, PEERLANE_MAX_LIST_ENTRIES);
	for (uint32_t i = 0; i < count; i++) {
		const struct peerlane_list_entry *e = &entries[i];
		uint64_t magic;

		if (!e->key)
			return fail_call(PEERLANE_STATUS_INVALID, "entry %u of a list has no key: NULL", i);
		if (e->key != checked) {
			memcpy(&magic, e->key->bytes, sizeof magic);
			if (magic != PEERLANE_REMOTE_KEY_MAGIC)
				return fail_call(PEERLANE_STATUS_BAD_KEY, "entry %u of a list: these %zu bytes are not the key of a region", i, sizeof e->key->bytes);
			checked = e->key;
		}
		if (e->reserved)
			return fail_call(PEERLANE_STATUS_INVALID, "entry %u of a list has a reserved member that is not 0", i);
		if (!e->length || l.bytes + e->length < l.bytes)
			return fail_call(PEERLANE_STATUS_OUT_OF_RANGE, "entry %u of a list has %llu bytes", i, (unsigned long long)e->length);
		l.bytes += e->length;
	}
	if ((status = open_lists(s)))
		return status;
	return submit(s, d, options, &l, operation);
}

int peerlane_read_list(peerlane_session *s, peerlane_connection connection, const struct peerlane_list_entry *entries, uint32_t count,
	const struct peerlane_options *options, uint32_t *failed, peerlane_operation *operation)
{
	return list(s, PEERLANE_OP_READ_LIST, connection, entries, count, options, failed, operation);
}

int peerlane_write_list(peerlane_session *s, peerlane_connection connection, const struct peerlane_list_entry *entries, uint32_t count,
	const struct peerlane_options *options, uint32_t *failed, peerlane_operation *operation)
{
	return list(s, PEERLANE_OP_WRITE_LIST, connection, entries, count, options, failed, operation);
}
