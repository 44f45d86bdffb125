// Messages: connections that peers made, notifications, and transfers of DRAM.
#include "agent.h"

#include <algorithm>
#include <cstring>

namespace nixl {

// queue_note sends a notification; ends: the transfer that ends when the peer has it.
void agent::queue_note(channel *c, const std::string &message, transfer *ends)
{
	item i;

	i.head.kind = NOTIFICATION;
	i.head.length = message.size();
	i.text = message;
	i.left = message.size();
	i.ends = ends;
	push(c, std::move(i));
}

void agent::post_receive(receive *r)
{
	struct peerlane_options options = {};
	peerlane_operation number; // else no result comes
	inbound &i = *r->from;

	options.context = reinterpret_cast<uintptr_t>(static_cast<operation *>(r));
	if (peerlane_receive(session, i.connection, i.memory, r->buffer * MESSAGE_BYTES, MESSAGE_BYTES, &options, &number))
		close(i);
	else
		i.posted++;
}

// accept accepts the connections of peers, and posts receives.
bool agent::accept()
{
	bool some = false;

	for (unsigned n = 0; n < lanes.size(); n++) {
		peerlane_connection connection;

		while (!peerlane_accept(session, lanes[n].listener, 0, &connection)) {
			std::unique_ptr<inbound> i(new inbound(connection, n));
			void *data;

			some = true;
			int status = peerlane_host_memory(session, RECEIVE_BUFFERS * MESSAGE_BYTES, &lanes[n].gpu, PEERLANE_ACCESS_RECEIVE, &data, &i->memory);
			if (status) {
				log("host memory for the messages of a peer: %s", peerlane_error());
				peerlane_disconnect(session, connection);
				continue;
			}
			i->data = static_cast<uint8_t *>(data);
			for (unsigned k = 0; k < RECEIVE_BUFFERS; k++) {
				i->receives.emplace_back(new receive(i.get(), k));
				post_receive(i->receives.back().get());
			}
			inbounds.push_back(std::move(i));
		}
	}
	return some;
}

// close ends a connection of a peer, which ends its receives.
void agent::close(inbound &i)
{
	if (i.closed)
		return;
	i.closed = true;
	peerlane_disconnect(session, i.connection);
}

// settle frees a connection of a peer when it is closed and its receives have ended.
void agent::settle(inbound &i)
{
	if (!i.closed || i.posted)
		return;
	peerlane_unexport(session, i.memory);
	if (i.back)
		close(*i.back);
	inbounds.erase(std::find_if(inbounds.begin(), inbounds.end(), [&](const std::unique_ptr<inbound> &other) { return other.get() == &i; }));
}

void agent::receive_ended(receive *r, const peerlane_result &result)
{
	inbound &i = *r->from;
	const uint8_t *bytes = i.data + r->buffer * MESSAGE_BYTES;
	header h;

	i.posted--;
	if (result.status)
		close(i);
	if (i.closed)
		return;
	memcpy(&h, bytes, std::min<size_t>(result.moved, sizeof h));
	if (result.moved < sizeof h || h.magic != MESSAGE_MAGIC || h.bytes != result.moved - sizeof h || !handle(i, h, bytes + sizeof h)) {
		log("agent %s sent a message that this release does not know: install the same release on both hosts", printable(i.name).c_str());
		close(i);
		return;
	}
	if (!i.closed)
		post_receive(r);
}

// handle takes a message of a peer. The buffer may change meanwhile only if the relay is broken.
bool agent::handle(inbound &i, const header &h, const uint8_t *bytes)
{
	if (h.kind == HELLO)
		return hello(i, h, bytes);
	if (!i.back)
		return false;
	item answer;
	answer.head.id = h.id;
	switch (h.kind) {
	case NOTIFICATION:
		return part_of_note(i, h, bytes);
	case PUT:
		if (uint8_t *to = h.failed ? nullptr : own_dram(h.address, h.bytes))
			memcpy(to, bytes, h.bytes);
		else if (i.refused.size() < MAX_REPLIES)
			i.refused.insert(h.id);
		return true;
	case GET:
		answer.data = own_dram(h.address, h.length);
		if (!answer.data) {
			if (i.refused.size() < MAX_REPLIES)
				i.refused.insert(h.id);
			return true;
		}
		answer.head.kind = DATA;
		answer.head.entry = h.entry;
		answer.left = h.length;
		reply(i, std::move(answer));
		return true;
	case FENCE:
		answer.head.kind = DONE;
		answer.head.failed = i.refused.erase(h.id) ? 1 : 0;
		reply(i, std::move(answer));
		return true;
	case DATA:
	case DONE:
		return data(h, bytes);
	}
	return false;
}

bool agent::hello(inbound &i, const header &h, const uint8_t *bytes)
{
	auto p = std::make_shared<peer>();

	if (i.back || h.length > h.bytes)
		return false;
	i.name.assign(reinterpret_cast<const char *>(bytes), h.length);
	p->name = i.name;
	if (!parse(std::string(reinterpret_cast<const char *>(bytes) + h.length, h.bytes - h.length), *p))
		return false;
	i.back = p;
	others.insert(p);
	return true;
}

bool agent::part_of_note(inbound &i, const header &h, const uint8_t *bytes)
{
	if (!i.in_note) {
		if (h.length > MAX_NOTIFICATION)
			return false;
		i.in_note = true;
		i.note_bytes = h.length;
		i.note.clear();
	}
	if (h.length != i.note_bytes || h.bytes > i.note_bytes - i.note.size() || (!h.bytes && h.length))
		return false;
	i.note.append(reinterpret_cast<const char *>(bytes), h.bytes);
	if (i.note.size() == i.note_bytes) {
		i.in_note = false;
		arrived.emplace_back(i.name, std::move(i.note));
		i.note.clear();
	}
	return true;
}

// data takes the bytes or the end of a transfer of DRAM that this agent began.
bool agent::data(const header &h, const uint8_t *bytes)
{
	auto found = dram.find(h.id);

	if (found == dram.end())
		return true; // it was released, or has failed
	transfer *t = found->second;
	if (h.kind == DATA) {
		if (t->way != READ || h.entry >= t->ranges.size() || h.bytes > t->ranges[h.entry].length || h.address > t->ranges[h.entry].length - h.bytes)
			return false;
		uint8_t *to = own_dram(t->ranges[h.entry].local + h.address, h.bytes);
		if (!h.failed && to) {
			memcpy(to, bytes, h.bytes);
			t->received += h.bytes;
		}
		return true;
	}
	uint64_t wanted = 0;
	for (const range &r : t->ranges)
		wanted += r.length;
	status s = h.failed || (t->way == READ && t->received != wanted) ? BACKEND_ERROR : SUCCESS;
	if (s != SUCCESS)
		log("agent %s refused a transfer of %llu bytes of DRAM: a range is not registered there", printable(t->to->name).c_str(), static_cast<unsigned long long>(wanted));
	t->waits->answers.erase(t);
	t->waits = nullptr;
	dram.erase(found);
	end(t, s);
	return true;
}

// reply sends an answer over a connection to the peer, which the first answer makes.
void agent::reply(inbound &i, item &&answer)
{
	channel *c = any_channel(*i.back);

	if (!c || c->waiting.size() >= MAX_REPLIES) {
		close(i);
		return;
	}
	push(c, std::move(answer));
	advance(c);
}

} // namespace nixl
