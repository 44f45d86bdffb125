// Peers, the connections to their lanes, and transfers.
#include "agent.h"

#include <algorithm>
#include <cstring>

namespace nixl {

// --- peers ----------------------------------------------------------------------------

// parse reads the connection information of a peer.
bool agent::parse(const std::string &text, peer &p) const
{
	uint32_t magic, count;
	size_t at = 0;

	if (!extract(text, at, magic) || !extract(text, at, count) || magic != MESSAGE_MAGIC || count == 0 || count > PEERLANE_MAX_LANES)
		return false;
	for (uint32_t i = 0; i < count; i++) {
		far_lane l;

		if (!extract(text, at, l.gpu) || !extract(text, at, l.handle))
			return false;
		p.lanes.push_back(l);
	}
	p.info = text;
	return at == text.size();
}

status agent::load(const std::string &peer_name, const std::string &text)
{
	auto p = std::make_shared<peer>();

	p->name = peer_name;
	if (!parse(text, *p)) {
		log("the connection information of agent %s is of another version of Peerlane: install the same release on both hosts", printable(peer_name).c_str());
		return MISMATCH;
	}
	guard g(&lock);
	auto found = peers.find(peer_name);
	if (found != peers.end() && found->second->info == text)
		return SUCCESS;
	if (found != peers.end())
		close(*found->second);
	peers[peer_name] = p;
	return SUCCESS;
}

void agent::forget(const std::string &peer_name)
{
	guard g(&lock);
	auto found = peers.find(peer_name);

	if (found == peers.end())
		return;
	close(*found->second);
	peers.erase(found);
}

// close ends the connections to a peer, and its transfers.
void agent::close(peer &p)
{
	p.closed = true;
	others.insert(p.shared_from_this());
	for (auto &c : p.channels)
		down(c.get(), PEERLANE_STATUS_CLOSED, nullptr);
}

channel *agent::between(peer &p, unsigned near, unsigned far)
{
	for (auto &c : p.channels)
		if (c->lane == near && c->far == far)
			return c.get();
	p.channels.emplace_back(new channel(&p, near, far));
	return p.channels.back().get();
}

// any_channel is a connection for messages: one that is up, or one that it starts.
channel *agent::any_channel(peer &p)
{
	if (p.closed || lanes.empty())
		return nullptr;
	for (auto state : {channel::UP, channel::CONNECTING})
		for (auto &c : p.channels)
			if (c->state == state)
				return c.get();
	unsigned near = 0;
	for (unsigned i = 0; i < lanes.size(); i++)
		if (lanes[i].used) {
			near = i;
			break;
		}
	channel *c = between(p, near, 0);
	start(c);
	return c;
}

// --- connections ----------------------------------------------------------------------

void agent::start(channel *c)
{
	if (c->state != channel::IDLE || broken || c->to->closed)
		return;
	int status = peerlane_connect_begin(session, &lanes[c->lane].gpu, &c->to->lanes[c->far].handle, &c->attempt);
	if (!status) {
		c->state = channel::CONNECTING;
		return;
	}
	if (status != PEERLANE_STATUS_FULL) // else the next progress tries again
		down(c, status, peerlane_error());
}

// finish takes the result of a connect, and reports whether there was one.
bool agent::finish(channel *c)
{
	static const char *const routes[] = {"unknown", "staged", "direct"};
	struct peerlane_connection_info i;
	int status = peerlane_connect_finish(session, c->attempt, 0, &c->connection);

	if (status == PEERLANE_STATUS_TIMED_OUT)
		return false;
	if (status) {
		c->state = channel::IDLE;
		log("connecting to agent %s: %s", printable(c->to->name).c_str(), peerlane_error());
		down(c, status, nullptr);
		return true;
	}
	c->state = channel::UP;
	item first;
	first.head.kind = HELLO;
	first.head.length = name.size();
	first.text = name + info();
	first.left = first.text.size();
	c->waiting.push_front(std::move(first));
	if (!c->logged && !peerlane_connection_get(session, c->connection, &i)) {
		c->logged = true;
		log("agent %s: route %s, lane %s to %s, list operations, with %s", printable(c->to->name).c_str(), routes[i.route <= PEERLANE_ROUTE_DIRECT ? i.route : 0],
			gpu_name(lanes[c->lane].gpu).c_str(), gpu_name(c->to->lanes[c->far].gpu).c_str(), printable(i.peer).c_str());
	}
	return true;
}

// watch ends a connection that is down. Without an operation no result tells of it.
void agent::watch(channel *c)
{
	struct peerlane_connection_info i;

	if (c->state == channel::UP && !peerlane_connection_get(session, c->connection, &i) && i.status)
		down(c, i.status, peerlane_status_text(i.status));
}

// down ends a connection, and the transfers that need it. A later transfer connects again. A peer
// whose answers are lost has its own connection closed, which ends the peer's transfers.
// reason: nullptr if this agent closes the connection.
void agent::down(channel *c, int s, const char *reason)
{
	std::deque<item> waiting = std::move(c->waiting);
	std::set<transfer *> answers = std::move(c->answers);
	bool was = c->state == channel::UP || !waiting.empty();

	c->waiting.clear();
	c->answers.clear();
	if (was && reason) // before further calls, whose errors replace the reason
		log("agent %s: the connection is down: %s", printable(c->to->name).c_str(), reason);
	if (!broken && c->state == channel::UP)
		peerlane_disconnect(session, c->connection);
	if (!broken && c->state == channel::CONNECTING)
		attempts.push_back(c->attempt); // cannot be taken back
	c->state = channel::IDLE;
	c->connection = 0;
	for (auto &i : inbounds)
		if (!broken && i->back.get() == c->to)
			close(*i);
	status error = status_of(s) == SUCCESS ? REMOTE_DISCONNECT : status_of(s);
	if (error == CANCELED)
		error = REMOTE_DISCONNECT;
	for (item &i : waiting) {
		if (i.list) {
			end(i.list->of, error);
		} else if (i.ends) {
			end(i.ends, error);
		}
	}
	for (transfer *t : answers) {
		t->waits = nullptr;
		dram.erase(t->id);
		end(t, error);
	}
}

void agent::push(channel *c, item &&i)
{
	c->waiting.push_back(std::move(i));
	if (c->state == channel::IDLE)
		start(c);
}

// buffer_of takes a buffer for a message: nullptr if none is idle. The status is that of the
// buffers' memory.
int agent::buffer_of(channel *c, send *&out)
{
	out = nullptr;
	if (!c->memory) {
		void *data;

		if (int status = peerlane_host_memory(session, SEND_BUFFERS * MESSAGE_BYTES, &lanes[c->lane].gpu, PEERLANE_ACCESS_SEND, &data, &c->memory))
			return status;
		c->data = static_cast<uint8_t *>(data);
		for (unsigned i = 0; i < SEND_BUFFERS; i++) {
			c->sends.emplace_back(new send(c, i));
			c->idle.push_back(c->sends.back().get());
		}
	}
	if (c->idle.empty()) // send_ended goes on
		return PEERLANE_STATUS_OK;
	out = c->idle.back();
	c->idle.pop_back();
	return PEERLANE_STATUS_OK;
}

// free_buffers frees the buffers of a connection that is down, when no message uses them.
void agent::free_buffers(channel *c)
{
	if (!c->memory || c->sending || c->state != channel::IDLE)
		return;
	if (!broken)
		peerlane_unexport(session, c->memory);
	c->memory = 0;
	c->idle.clear();
	c->sends.clear();
}

void agent::advance(channel *c)
{
	if (c->state == channel::IDLE && !c->waiting.empty())
		start(c);
	while (c->state == channel::UP && !c->waiting.empty() && advance_front(c))
		;
}

// advance_front posts the first waiting item, or a message of it, and reports whether more can
// be posted.
bool agent::advance_front(channel *c)
{
	item &i = c->waiting.front();
	struct peerlane_options options = {};

	if (i.list) {
		part *p = i.list;
		auto post = p->of->way == READ ? peerlane_read_list : peerlane_write_list;

		options.context = reinterpret_cast<uintptr_t>(static_cast<operation *>(p));
		int s = post(session, c->connection, p->entries.data(), static_cast<uint32_t>(p->entries.size()), &options, nullptr, &p->number);
		if (s == PEERLANE_STATUS_FULL) {
			starved = true;
			return false;
		}
		c->waiting.pop_front();
		if (s) {
			log("posting a list: %s", peerlane_error());
			end(p->of, status_of(s));
			return true;
		}
		p->posted = true;
		return true;
	}
	send *s;
	if (int status = buffer_of(c, s)) {
		std::string reason = std::string("host memory for messages: ") + peerlane_error();

		down(c, status, reason.c_str());
		return false;
	}
	if (!s)
		return false;
	uint8_t *to = c->data + s->buffer * MESSAGE_BYTES;
	header h = i.head;
	h.magic = MESSAGE_MAGIC;
	h.bytes = static_cast<uint32_t>(std::min<uint64_t>(i.left, MESSAGE_BYTES - sizeof h));
	const uint8_t *from = i.data ? i.data : reinterpret_cast<const uint8_t *>(i.text.data()) + (i.text.size() - i.left);
	/* DRAM that the program has deregistered since. */
	if (i.data && h.bytes && !own_dram(reinterpret_cast<uintptr_t>(from), h.bytes))
		h.bytes = 0, h.failed = 1, i.left = 0;
	memcpy(to, &h, sizeof h);
	if (h.bytes)
		memcpy(to + sizeof h, from, h.bytes);
	options.context = reinterpret_cast<uintptr_t>(static_cast<operation *>(s));
	s->to = c->to->shared_from_this();
	s->ends = i.left == h.bytes ? i.ends : nullptr;
	peerlane_operation number; // else no result comes
	int status = peerlane_send(session, c->connection, c->memory, s->buffer * MESSAGE_BYTES, sizeof h + h.bytes, &options, &number);
	if (status) {
		c->idle.push_back(s);
		s->to.reset();
		if (status != PEERLANE_STATUS_FULL)
			down(c, status, peerlane_error());
		else
			starved = true;
		return false;
	}
	c->sending++;
	if (i.data) {
		i.data += h.bytes;
		i.head.address += h.bytes;
	}
	i.left -= h.bytes;
	if (!i.left)
		c->waiting.pop_front();
	return true;
}

void agent::send_ended(send *s, const peerlane_result &r)
{
	std::shared_ptr<peer> p = std::move(s->to);
	channel *c = s->over;
	transfer *t = s->ends;

	s->to.reset();
	s->ends = nullptr;
	c->idle.push_back(s);
	c->sending--;
	if (t)
		end(t, status_of(r.status));
	if (r.status && c->state == channel::UP && c->connection == r.connection)
		down(c, r.status, peerlane_status_text(r.status));
	else if (!c->waiting.empty())
		advance(c);
}

void agent::list_ended(part *p, const peerlane_result &r)
{
	channel *c = p->channel;
	std::shared_ptr<peer> keep = p->of->to;
	status s = status_of(r.status);

	p->posted = false;
	if (s == BACKEND_ERROR)
		log("agent %s: a list of %zu entries failed: %s", printable(c->to->name).c_str(), p->entries.size(), peerlane_status_text(r.status));
	end(p->of, s);
	if (s == REMOTE_DISCONNECT && c->state == channel::UP && c->connection == r.connection)
		down(c, r.status, peerlane_status_text(r.status));
	else if (!c->waiting.empty())
		advance(c);
}

// --- transfers ------------------------------------------------------------------------

// build makes the lists of a transfer.
status agent::build(transfer *t, const list &local, const list &remote)
{
	const size_t n = local.entries.size();
	const local_region *l = nullptr;
	const remote_region *r = nullptr;
	unsigned far = 0;
	channel *c = nullptr;
	part *p = nullptr;

	if (n != remote.entries.size() || n == 0)
		return INVALID_PARAMETER;
	if (local.type != remote.type) {
		log("a transfer between DRAM and VRAM: copy within the process instead");
		return NOT_SUPPORTED;
	}
	if (broken)
		return REMOTE_DISCONNECT;
	t->parts.clear();
	t->keys.clear();
	t->ranges.clear();
	for (size_t i = 0; i < n; i++) {
		const meta_descriptor &a = local.entries[i], &b = remote.entries[i];
		auto near = static_cast<const local_region *>(a.meta);
		auto there = static_cast<const remote_region *>(b.meta);

		if (a.length != b.length || !near || !there || near->type != local.type || there->type != local.type || a.address < near->base ||
		    a.length > near->bytes || a.address - near->base > near->bytes - a.length || b.address < there->base || b.length > there->bytes ||
		    b.address - there->base > there->bytes - b.length)
			return INVALID_PARAMETER;
		if (!a.length)
			continue;
		if (local.type == DRAM) {
			t->ranges.push_back({a.address, b.address, a.length});
			continue;
		}
		if (near != l || there != r) {
			if (!near->memory) // it could not be exported to the new relay
				return BACKEND_ERROR;
			if (there != r) {
				for (far = 0; far < t->to->lanes.size() && memcmp(&t->to->lanes[far].gpu, &there->gpu, sizeof there->gpu); far++)
					;
				if (far == t->to->lanes.size())
					return MISMATCH;
				t->keys.push_back(there->key);
			}
			channel *other = between(*t->to, near->lane, far);
			if (other != c) {
				c = other;
				p = nullptr;
				for (auto &q : t->parts)
					if (q->channel == c && q->entries.size() < LIST_ENTRIES)
						p = q.get();
			}
			l = near;
			r = there;
		}
		if (!p || p->entries.size() == LIST_ENTRIES) {
			t->parts.emplace_back(new part(t, c));
			p = t->parts.back().get();
			p->entries.reserve(std::min(n - i, LIST_ENTRIES));
		}
		uint64_t offset = a.address - near->base, at = b.address - there->base;
		if (!p->entries.empty()) {
			peerlane_list_entry &e = p->entries.back();

			if (e.memory == near->memory && e.key == &there->key->key && e.offset + e.length == offset && e.at + e.length == at) {
				e.length += a.length;
				continue;
			}
		}
		p->entries.push_back({near->memory, 0, offset, a.length, at, &there->key->key});
	}
	t->generation = generation;
	return SUCCESS;
}

// begin posts a transfer: lists at once if their connections are up.
void agent::begin(transfer *t)
{
	t->first_error = SUCCESS;
	t->notifying = false;
	t->received = 0;
	t->left = t->parts.size() + !t->ranges.empty() + 1;
	t->state = IN_PROGRESS;
	active.insert(t);
	if (broken) {
		for (size_t n = t->left - 1; n > 0; n--)
			end(t, REMOTE_DISCONNECT);
		end(t, REMOTE_DISCONNECT);
		return;
	}
	for (auto &p : t->parts) {
		item i;

		i.list = p.get();
		push(p->channel, std::move(i));
		advance(p->channel);
	}
	if (!t->ranges.empty()) {
		channel *c = any_channel(*t->to);

		if (!c) {
			end(t, REMOTE_DISCONNECT);
		} else {
			t->id = ++ids;
			dram[t->id] = t;
			t->waits = c;
			c->answers.insert(t);
			for (size_t k = 0; k < t->ranges.size(); k++) {
				const range &r = t->ranges[k];
				item i;

				i.head.kind = t->way == WRITE ? PUT : GET;
				i.head.id = t->id;
				i.head.address = r.remote;
				i.head.length = r.length;
				i.head.entry = k;
				if (t->way == WRITE) {
					i.data = reinterpret_cast<const uint8_t *>(r.local);
					i.left = r.length;
				}
				push(c, std::move(i));
			}
			item fence;
			fence.head.kind = FENCE;
			fence.head.id = t->id;
			push(c, std::move(fence));
			advance(c);
		}
	}
	end(t, SUCCESS); // of the posting itself
}

// end counts a part of a transfer that has ended.
void agent::end(transfer *t, status s)
{
	if (s != SUCCESS && t->first_error == SUCCESS)
		t->first_error = s;
	if (--t->left)
		return;
	settle(t);
}

// settle ends a transfer, after its notification.
void agent::settle(transfer *t)
{
	if (t->first_error == SUCCESS && t->notifies && !t->notifying && !t->released) {
		channel *c = t->parts.empty() ? nullptr : t->parts[0]->channel;

		t->notifying = true;
		t->left = 1;
		if (!c || c->state != channel::UP)
			c = any_channel(*t->to);
		if (c) {
			queue_note(c, t->message, t);
			advance(c);
			return;
		}
		t->left = 0;
		t->first_error = REMOTE_DISCONNECT;
	}
	active.erase(t);
	t->state = t->first_error;
	if (t->released)
		delete t;
}

// discard frees a transfer, or cancels it: then its last part frees it.
void agent::discard(transfer *t)
{
	if (t->state != IN_PROGRESS) {
		delete t;
		return;
	}
	t->released = true;
	t->left++; // until all is withdrawn
	std::vector<channel *> all;
	for (auto &c : t->to->channels)
		all.push_back(c.get());
	for (channel *c : all)
		for (size_t k = c->waiting.size(); k-- > 0;) {
			item &i = c->waiting[k];

			if (!i.list || i.list->of != t)
				continue;
			c->waiting.erase(c->waiting.begin() + static_cast<std::ptrdiff_t>(k));
			end(t, CANCELED);
		}
	for (auto &p : t->parts)
		if (p->posted && !broken)
			peerlane_cancel(session, p->number);
	if (t->waits) {
		t->waits->answers.erase(t);
		t->waits = nullptr;
		dram.erase(t->id);
		end(t, CANCELED);
	}
	end(t, CANCELED);
}

} // namespace nixl
