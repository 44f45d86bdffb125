/* What programs ask the relay for. */
#include "internal.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EVERYTHING (PEERLANE_ACCESS_SEND | PEERLANE_ACCESS_RECEIVE)

int peerlane_gpu_parse(const char *text, peerlane_gpu *gpu)
{
	const char *p = text;
	unsigned digits = 0;
	peerlane_gpu parsed;

	if (!text || !gpu)
		return fail_call(PEERLANE_STATUS_INVALID, "a GPU's UUID: NULL");
	if (!strncmp(p, "GPU-", 4))
		p += 4;
	for (; *p; p++) {
		unsigned value;

		if (*p == '-')
			continue;
		if (!isxdigit((unsigned char)*p) || digits == 32)
			break;
		value = (unsigned)(*p <= '9' ? *p - '0' : (*p | 32) - 'a' + 10);
		if (digits % 2)
			parsed.bytes[digits / 2] = (uint8_t)(parsed.bytes[digits / 2] | value);
		else
			parsed.bytes[digits / 2] = (uint8_t)(value << 4);
		digits++;
	}
	if (*p || digits != 32)
		return fail_call(PEERLANE_STATUS_INVALID, "\"%.64s\" is not a GPU's UUID (GPU-8-4-4-4-12 hexadecimal digits)", text);
	*gpu = parsed;
	return 0;
}

void peerlane_gpu_format(const peerlane_gpu *gpu, char text[41])
{
	size_t used = 4;

	memcpy(text, "GPU-", 4);
	for (unsigned i = 0; i < 16; i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			text[used++] = '-';
		text[used++] = "0123456789abcdef"[gpu->bytes[i] >> 4];
		text[used++] = "0123456789abcdef"[gpu->bytes[i] & 15];
	}
	text[used] = 0;
}

/* --- memory --------------------------------------------------------------------- */

/* in_list checks an allocation of a list, and adds what is exported of it. */
static int in_list(const struct peerlane_allocation *a, bool first, bool last, uint64_t *bytes, uint64_t *length)
{
	uint64_t of_it = a->length;

	if (a->kind != PEERLANE_ALLOCATION_VMM || a->reserved[0] || a->reserved[1] || a->reserved[2] || a->reserved[3])
		return fail_call(PEERLANE_STATUS_INVALID, "exporting an allocation of kind %u, or with members that this version does not know", a->kind);
	if (a->fd < 0)
		return fail_call(PEERLANE_STATUS_INVALID, "exporting: descriptor %d", a->fd);
	if (a->offset > a->bytes || of_it > a->bytes - a->offset || *bytes + a->bytes < *bytes)
		return fail_call(PEERLANE_STATUS_OUT_OF_RANGE, "a range of %llu bytes at offset %llu of an allocation of %llu",
			(unsigned long long)of_it, (unsigned long long)a->offset, (unsigned long long)a->bytes);
	if (!of_it)
		of_it = a->bytes - a->offset;
	if ((!first && a->offset) || (!last && a->offset + of_it != a->bytes))
		return fail_call(PEERLANE_STATUS_INVALID, "exporting several allocations as one memory: only the first may begin later, and only the last end earlier");
	*bytes += a->bytes;
	*length += of_it;
	return 0;
}

int export_list(peerlane_session *s, const struct peerlane_allocation *list, unsigned count,
	const peerlane_gpu *gpu, uint32_t access, peerlane_memory *memory, uint32_t *wants)
{
	struct peerlane_export m = {.type = PEERLANE_MESSAGE_EXPORT, .access = access ? access : EVERYTHING};
	struct peerlane_exported answer;
	int status;

	if (!list || !gpu || !memory || count == 0)
		return fail_call(PEERLANE_STATUS_INVALID, "exporting: no allocation, no GPU, or nowhere to write the memory");
	if (count > PEERLANE_MAX_PARTS)
		return fail_call(PEERLANE_STATUS_LIMIT, "a range of %u allocations; %d are possible: export it in several ranges", count, PEERLANE_MAX_PARTS);
	for (unsigned i = 0; i < count; i++)
		if ((status = in_list(&list[i], i == 0, i + 1 == count, &m.bytes, &m.length)))
			return status;
	m.offset = list->offset;
	memcpy(m.gpu, gpu->bytes, sizeof m.gpu);
	if (count == 1) {
		status = ask(s, &m, sizeof m, list->fd, &answer, PEERLANE_MESSAGE_EXPORTED, sizeof answer, NULL);
	} else {
		bool begun;

		m.parts = count;
		if ((status = send_list(s, list, count, &begun)) && begun) {
			struct peerlane_export nothing = {.type = PEERLANE_MESSAGE_EXPORT, .parts = PEERLANE_MAX_PARTS + 1};
			struct reason why = {.status = status};

			/* What was sent belongs to no other range: the relay refuses this one. */
			memcpy(why.text, peerlane_error(), strlen(peerlane_error()));
			if (!ask(s, &nothing, sizeof nothing, -1, &answer, PEERLANE_MESSAGE_EXPORTED, sizeof answer, NULL))
				peerlane_unexport(s, answer.memory);
			fail_for(&why);
		} else if (!status) {
			status = ask(s, &m, sizeof m, -1, &answer, PEERLANE_MESSAGE_EXPORTED, sizeof answer, NULL);
		}
		if (begun)
			end_list(s);
	}
	if (!status && !answer.memory)
		status = fail_call(PEERLANE_STATUS_MALFORMED, "the relay gave the number 0 to a memory");
	if (!status) {
		*memory = answer.memory;
		*wants = answer.wants;
	}
	return status;
}

int peerlane_export(peerlane_session *s, const struct peerlane_allocation *list, unsigned count,
	const peerlane_gpu *gpu, uint32_t access, peerlane_memory *memory)
{
	struct peerlane_dma_buf none = {.type = PEERLANE_MESSAGE_DMA_BUF, .reason = "the program exported it by its descriptor, and not by its address"};
	uint32_t wants = 0;
	int status = export_list(s, list, count, gpu, access, memory, &wants);

	if (!status && wants == PEERLANE_WANTS_DMA_BUF) {
		none.memory = *memory;
		send_alone(s, &none, sizeof none, -1); /* a session that has failed says so at the next call */
	}
	return status;
}

int peerlane_export_ipc(peerlane_session *s, const uint8_t handle[64], uint64_t offset, uint64_t length,
	const peerlane_gpu *gpu, uint32_t access, peerlane_memory *memory)
{
	struct peerlane_dma_buf none = {.type = PEERLANE_MESSAGE_DMA_BUF, .reason = "the program exported it by its handle, and not by its address"};
	uint32_t wants = 0;
	int status = export_ipc(s, handle, offset, length, gpu, access, memory, &wants);

	if (!status && wants == PEERLANE_WANTS_DMA_BUF) {
		none.memory = *memory;
		send_alone(s, &none, sizeof none, -1); /* a session that has failed says so at the next call */
	}
	return status;
}

int export_ipc(peerlane_session *s, const uint8_t handle[64], uint64_t offset, uint64_t length,
	const peerlane_gpu *gpu, uint32_t access, peerlane_memory *memory, uint32_t *wants)
{
	struct peerlane_export_ipc m = {.type = PEERLANE_MESSAGE_EXPORT_IPC, .offset = offset, .length = length, .access = access ? access : EVERYTHING};
	struct peerlane_exported answer;
	int status;

	if (!handle || !gpu || !memory)
		return fail_call(PEERLANE_STATUS_INVALID, "exporting: no handle, no GPU, or nowhere to write the memory: NULL");
	memcpy(m.gpu, gpu->bytes, sizeof m.gpu);
	memcpy(m.handle, handle, sizeof m.handle);
	status = ask(s, &m, sizeof m, -1, &answer, PEERLANE_MESSAGE_EXPORTED, sizeof answer, NULL);
	if (!status && !answer.memory)
		status = fail_call(PEERLANE_STATUS_MALFORMED, "the relay gave the number 0 to a memory");
	if (!status) {
		*memory = answer.memory;
		*wants = answer.wants;
	}
	return status;
}

/* tell asks for something whose answer says nothing. */
static int tell(peerlane_session *s, void *message, size_t length)
{
	struct peerlane_done done;

	return ask(s, message, length, -1, &done, PEERLANE_MESSAGE_DONE, sizeof done, NULL);
}

/* keep adds memory of an answer to the session and ends the caller's ownership of m. After a failure
   keep gives the memory back to the relay, and the error stays that of the failure. */
static int keep(peerlane_session *s, struct mapped **m, uint32_t type, peerlane_memory number, int status)
{
	if (!status && !(status = enter(s))) {
		(*m)->next = s->mapped;
		s->mapped = *m;
		leave(s);
		*m = NULL;
	} else if (number) {
		struct reason why = {.status = status};

		memcpy(why.text, peerlane_error(), strlen(peerlane_error()));
		if (!enter(s)) {
			give_back(s, type, number);
			leave(s);
		}
		fail_for(&why);
	}
	return status;
}

int peerlane_host_memory(peerlane_session *s, uint64_t bytes, const peerlane_gpu *gpu, uint32_t access, void **data, peerlane_memory *memory)
{
	struct peerlane_host_memory m = {.type = PEERLANE_MESSAGE_HOST_MEMORY, .bytes = bytes, .access = access ? access : EVERYTHING};
	struct peerlane_host_memory_made made = {0};
	struct mapped *host;
	void *at = NULL;
	int status, fd;

	if (!gpu || !data || !memory)
		return fail_call(PEERLANE_STATUS_INVALID, "host memory: no GPU, or nowhere to write it: NULL");
	host = calloc(1, sizeof *host);
	if (!host)
		return fail_call(PEERLANE_STATUS_SYSTEM, "host memory: out of memory");
	memcpy(m.gpu, gpu->bytes, sizeof m.gpu);
	m.populates = s && s->version >= PEERLANE_POPULATE_VERSION;
	status = ask_for_fd(s, &m, sizeof m, &made, PEERLANE_MESSAGE_HOST_MEMORY_MADE, sizeof made, &fd);
	if (!status) {
		if (fd < 0 || !made.memory || made.bytes < bytes || made.bytes > SIZE_MAX)
			status = fail_call(PEERLANE_STATUS_MALFORMED, "the relay answered for host memory with %llu bytes and %s descriptor",
				(unsigned long long)made.bytes, fd < 0 ? "no" : "a");
		else
			status = map("host", fd, (size_t)made.bytes, PROT_READ | PROT_WRITE, true, &at);
		host->number = made.memory;
		host->bytes = (size_t)made.bytes;
		host->data = at;
		if (!status && m.populates && !(status = populate("host", at, host->bytes, true))) {
			struct peerlane_host_memory_populated populated = {.type = PEERLANE_MESSAGE_HOST_MEMORY_POPULATED, .memory = made.memory};

			status = tell(s, &populated, sizeof populated);
		}
		status = keep(s, &host, made.type, made.memory, status);
		if (!status) {
			*data = at;
			*memory = made.memory;
		}
	}
	if (fd >= 0)
		close(fd);
	if (host)
		unmap(host, s && s->forked);
	return status;
}

int peerlane_staging_memory(peerlane_session *s, uint64_t bytes, const peerlane_gpu *gpu, uint32_t access, struct peerlane_staged *staged)
{
	struct peerlane_staging m = {.type = PEERLANE_MESSAGE_STAGING, .bytes = bytes, .access = access ? access : EVERYTHING};
	struct peerlane_staging_made made = {0};
	struct peerlane_staged where = {0};
	struct mapped *mapped;
	int status, fd;

	if (!gpu || !staged)
		return fail_call(PEERLANE_STATUS_INVALID, "staging memory: no GPU, or nowhere to write it: NULL");
	mapped = calloc(1, sizeof *mapped);
	if (!mapped)
		return fail_call(PEERLANE_STATUS_SYSTEM, "staging memory: out of memory");
	memcpy(m.gpu, gpu->bytes, sizeof m.gpu);
	status = ask_for_fd(s, &m, sizeof m, &made, PEERLANE_MESSAGE_STAGING_MADE, sizeof made, &fd);
	if (!status) {
		where = (struct peerlane_staged){.memory = made.memory, .server_index = made.index, .bytes = made.bytes};
		memcpy(where.server.bytes, made.server, sizeof where.server.bytes);
		if (fd < 0 || !made.memory || made.bytes < bytes || made.bytes > SIZE_MAX)
			status = fail_call(PEERLANE_STATUS_MALFORMED, "the relay answered for staging memory with %llu bytes and %s descriptor",
				(unsigned long long)made.bytes, fd < 0 ? "no" : "a");
		else
			status = map_staging(fd, made.bytes, gpu, &where, &where.address);
	}
	mapped->number = made.memory;
	mapped->bytes = (size_t)made.bytes;
	mapped->address = where.address;
	status = keep(s, &mapped, made.type, made.memory, status);
	if (!status)
		*staged = where;
	if (fd >= 0)
		close(fd);
	if (mapped)
		unmap(mapped, s && s->forked);
	return status;
}

void unmap(struct mapped *m, bool forked)
{
	if (m->data)
		munmap(m->data, m->bytes);
	if (m->address && !forked)
		unmap_staging(m);
	free(m);
}

int peerlane_unexport(peerlane_session *s, peerlane_memory memory)
{
	struct peerlane_unexport m = {.type = PEERLANE_MESSAGE_UNEXPORT, .memory = memory};
	struct mapped *gone = NULL;
	bool forked = false;

	if (s) {
		pthread_mutex_lock(&s->lock); /* also of a session that has failed */
		forked = s->forked;
		for (struct mapped **at = &s->mapped; *at; at = &(*at)->next)
			if ((*at)->number == memory) {
				gone = *at;
				*at = gone->next;
				break;
			}
		pthread_mutex_unlock(&s->lock);
	}
	if (gone)
		unmap(gone, forked); /* first, so that nothing here keeps what the relay frees */
	return tell(s, &m, sizeof m);
}

/* --- events --------------------------------------------------------------------- */

int peerlane_open_event(peerlane_session *s, const uint8_t handle[64], const peerlane_gpu *gpu, peerlane_event *event)
{
	struct peerlane_event m = {.type = PEERLANE_MESSAGE_EVENT};
	struct peerlane_event_opened answer;
	int status;

	if (!handle || !gpu || !event)
		return fail_call(PEERLANE_STATUS_INVALID, "opening an event: no handle, no GPU, or nowhere to write the event: NULL");
	memcpy(m.gpu, gpu->bytes, sizeof m.gpu);
	memcpy(m.handle, handle, sizeof m.handle);
	status = ask(s, &m, sizeof m, -1, &answer, PEERLANE_MESSAGE_EVENT_OPENED, sizeof answer, NULL);
	if (!status && !answer.event)
		status = fail_call(PEERLANE_STATUS_MALFORMED, "the relay gave the number 0 to an event");
	if (!status)
		*event = answer.event;
	return status;
}

int peerlane_close_event(peerlane_session *s, peerlane_event event)
{
	struct peerlane_event_close m = {.type = PEERLANE_MESSAGE_EVENT_CLOSE, .event = event};

	return tell(s, &m, sizeof m);
}

/* --- connections ---------------------------------------------------------------- */

int peerlane_listen(peerlane_session *s, const peerlane_gpu *gpu, peerlane_listener *listener, peerlane_handle *handle)
{
	struct peerlane_listen m = {.type = PEERLANE_MESSAGE_LISTEN};
	struct peerlane_listening answer;
	int status;

	if (!gpu || !listener || !handle)
		return fail_call(PEERLANE_STATUS_INVALID, "listening: no GPU, or nowhere to write the listener: NULL");
	memcpy(m.gpu, gpu->bytes, sizeof m.gpu);
	status = ask(s, &m, sizeof m, -1, &answer, PEERLANE_MESSAGE_LISTENING, sizeof answer, NULL);
	if (!status && !answer.listener)
		status = fail_call(PEERLANE_STATUS_MALFORMED, "the relay gave the number 0 to a listener");
	if (!status) {
		*listener = answer.listener;
		memcpy(handle->bytes, answer.handle, sizeof handle->bytes);
	}
	return status;
}

_Static_assert(sizeof(peerlane_handle) == sizeof(((struct peerlane_listening *)0)->handle), "a handle is as the protocol has it");

int peerlane_connect(peerlane_session *s, const peerlane_gpu *gpu, const peerlane_handle *handle, peerlane_connection *connection)
{
	struct peerlane_connect m = {.type = PEERLANE_MESSAGE_CONNECT};
	struct peerlane_connected answer;
	struct link *link;
	int status;

	if (!gpu || !handle || !connection)
		return fail_call(PEERLANE_STATUS_INVALID, "connecting: no GPU, no handle, or nowhere to write the connection: NULL");
	link = calloc(1, sizeof *link);
	if (!link)
		return fail_call(PEERLANE_STATUS_SYSTEM, "connecting: out of memory");
	memcpy(m.gpu, gpu->bytes, sizeof m.gpu);
	memcpy(m.handle, handle->bytes, sizeof m.handle);
	status = ask(s, &m, sizeof m, -1, &answer, PEERLANE_MESSAGE_CONNECTED, sizeof answer, link);
	if (!status)
		*connection = answer.connection;
	return status;
}

int peerlane_disconnect(peerlane_session *s, peerlane_connection connection)
{
	struct peerlane_disconnect m = {.type = PEERLANE_MESSAGE_DISCONNECT, .connection = connection};
	int status = tell(s, &m, sizeof m);

	if (status == PEERLANE_STATUS_UNKNOWN_CONNECTION)
		status = 0; /* it was down already */
	if (status || enter(s))
		return status;
	for (struct link **at = &s->links; *at; at = &(*at)->next)
		if ((*at)->number == connection) {
			struct link *gone = *at;

			*at = gone->next;
			free(gone);
			break;
		}
	leave(s);
	return 0;
}

static int no_connection(peerlane_connection connection)
{
	return fail_call(PEERLANE_STATUS_UNKNOWN_CONNECTION, "connection %u is not this session's, or was disconnected", connection);
}

int peerlane_connection_get(peerlane_session *s, peerlane_connection connection, struct peerlane_connection_info *info)
{
	struct link *l;
	int status;

	if (!info)
		return fail_call(PEERLANE_STATUS_INVALID, "nowhere to write what is known of a connection: NULL");
	if ((status = enter(s)))
		return status;
	look(s);
	l = find_link(s, connection);
	if (l) {
		*info = (struct peerlane_connection_info){.route = l->route, .status = l->down.status};
		snprintf(info->peer, sizeof info->peer, "%s", l->peer);
	} else {
		status = no_connection(connection);
	}
	leave(s);
	return status;
}

int peerlane_connection_status(peerlane_session *s, peerlane_connection connection)
{
	struct link *l;
	int status = enter(s);

	if (status)
		return status;
	look(s);
	l = find_link(s, connection);
	status = !l ? no_connection(connection) : l->down.status ? fail_for(&l->down) : 0;
	leave(s);
	return status;
}

/* --- one-sided operations -------------------------------------------------------- */

_Static_assert(sizeof(peerlane_remote_key) == sizeof(struct peerlane_remote_key_layout), "a key is as the protocol has it");

int peerlane_expose(peerlane_session *s, peerlane_listener listener, peerlane_connection connection, peerlane_memory memory,
	uint64_t offset, uint64_t length, uint32_t access, peerlane_region *region, peerlane_remote_key *key)
{
	struct peerlane_expose m = {
		.type = PEERLANE_MESSAGE_EXPOSE, .listener = listener, .connection = connection, .memory = memory,
		.offset = offset, .length = length, .access = access,
	};
	struct peerlane_remote_key_layout layout = {.magic = PEERLANE_REMOTE_KEY_MAGIC, .length = length, .access = access};
	struct peerlane_exposed answer;
	int status;

	if (!region || !key)
		return fail_call(PEERLANE_STATUS_INVALID, "exposing memory: nowhere to write the region or its key: NULL");
	status = ask(s, &m, sizeof m, -1, &answer, PEERLANE_MESSAGE_EXPOSED, sizeof answer, NULL);
	if (!status && !answer.region)
		status = fail_call(PEERLANE_STATUS_MALFORMED, "the relay gave the number 0 to a region");
	if (!status) {
		memcpy(layout.key, answer.key, sizeof layout.key);
		memcpy(key->bytes, &layout, sizeof key->bytes);
		*region = answer.region;
	}
	return status;
}

int peerlane_revoke(peerlane_session *s, peerlane_region region)
{
	struct peerlane_revoke m = {.type = PEERLANE_MESSAGE_REVOKE, .region = region};

	return tell(s, &m, sizeof m);
}

/* Earlier packages of libpeerlane.so.0 have these two functions under other names. Programs
 * that were linked then still start; no header declares the names. */
PEERLANE_API int peerlane_offer(peerlane_session *s, peerlane_listener listener, peerlane_connection connection, peerlane_memory memory,
	uint64_t offset, uint64_t length, uint32_t access, peerlane_region *region, peerlane_remote_key *key)
	__attribute__((alias("peerlane_expose")));
PEERLANE_API int peerlane_withdraw(peerlane_session *s, peerlane_region region) __attribute__((alias("peerlane_revoke")));

/* --- what the relay tells ---------------------------------------------------------- */

int peerlane_lanes(peerlane_session *s, struct peerlane_lane *lanes, unsigned room, unsigned *count)
{
	struct peerlane_lanes m = {.type = PEERLANE_MESSAGE_LANES};
	struct peerlane_lanes_reply answer;
	int status;

	if (!count || (!lanes && room))
		return fail_call(PEERLANE_STATUS_INVALID, "nowhere to write lanes: NULL");
	status = ask(s, &m, sizeof m, -1, &answer, PEERLANE_MESSAGE_LANES_REPLY, sizeof answer, NULL);
	if (status)
		return status;
	if (answer.lanes > PEERLANE_MAX_LANES)
		return fail_call(PEERLANE_STATUS_MALFORMED, "the relay names %u lanes, and %d are possible", answer.lanes, PEERLANE_MAX_LANES);
	for (unsigned i = 0; i < answer.lanes && i < room; i++) {
		memcpy(lanes[i].gpu.bytes, answer.lane[i].gpu, sizeof lanes[i].gpu.bytes);
		lanes[i].index = answer.lane[i].index;
		lanes[i].reserved = 0;
	}
	*count = answer.lanes;
	return 0;
}

int peerlane_lane_nic(peerlane_session *s, const peerlane_gpu *gpu, struct peerlane_nic *nic)
{
	struct peerlane_lane_nic m = {.type = PEERLANE_MESSAGE_LANE_NIC};
	struct peerlane_lane_nic_reply answer;
	int status;

	if (!gpu || !nic)
		return fail_call(PEERLANE_STATUS_INVALID, "no GPU, or nowhere to write its lane's NIC: NULL");
	if (s && s->version < PEERLANE_LANE_NIC_VERSION)
		return fail_call(PEERLANE_STATUS_VERSION,
			"the relay does not tell of the NIC of a lane: it speaks version %u of Peerlane's protocol, and that came with version %d; install the same release of Peerlane in the image and on the host",
			s->version, PEERLANE_LANE_NIC_VERSION);
	memcpy(m.gpu, gpu->bytes, sizeof m.gpu);
	status = ask(s, &m, sizeof m, -1, &answer, PEERLANE_MESSAGE_LANE_NIC_REPLY, sizeof answer, NULL);
	if (status)
		return status;
	*nic = (struct peerlane_nic){.guid = answer.guid, .mbps = answer.mbps, .port = answer.port};
	memcpy(nic->name, answer.name, sizeof nic->name - 1); /* the last byte ends it, whatever the relay says */
	return 0;
}

int peerlane_statistics(peerlane_session *s, struct peerlane_counters *counters, size_t size)
{
	struct peerlane_statistics m = {.type = PEERLANE_MESSAGE_STATISTICS};
	struct peerlane_statistics_reply answer;
	struct peerlane_counters known = {0};
	int status;

	if (!counters)
		return fail_call(PEERLANE_STATUS_INVALID, "nowhere to write counters: NULL");
	status = ask(s, &m, sizeof m, -1, &answer, PEERLANE_MESSAGE_STATISTICS_REPLY, sizeof answer, NULL);
	if (status)
		return status;
	if (answer.servers > PEERLANE_MAX_SERVERS)
		return fail_call(PEERLANE_STATUS_MALFORMED, "the relay names %u server GPUs, and %d are possible", answer.servers, PEERLANE_MAX_SERVERS);
	known.sent = answer.sent;
	known.received = answer.received;
	known.direct = answer.direct;
	known.staged = answer.staged;
	known.servers = answer.servers;
	known.contexts = answer.contexts;
	for (unsigned i = 0; i < answer.servers; i++) {
		memcpy(known.server[i].gpu.bytes, answer.server[i].gpu, sizeof known.server[i].gpu.bytes);
		known.server[i].in = answer.server[i].in;
		known.server[i].out = answer.server[i].out;
	}
	memset(counters, 0, size);
	memcpy(counters, &known, size < sizeof known ? size : sizeof known);
	return 0;
}
