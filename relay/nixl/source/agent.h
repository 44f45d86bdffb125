// Declarations that the plugin's sources share.
//
// An agent has a session with the container's relay, a listener for each lane, and one progress
// thread. To move memory an agent connects to the listener of the peer's lane and posts a list:
// the relays move the bytes without the peer. Notifications and DRAM go as messages over the same
// connections, from and to host memory of the relays. A peer that must answer connects back, with
// the connection information of the first message.
//
// One lock guards all members. The progress thread and, in check(), the caller's thread take the
// results of the session; each result names its operation by the operation's address.
#ifndef NIXL_AGENT_H
#define NIXL_AGENT_H

#include "abi.h"
#include "peerlane.h"

// As glibc.h does, for the functions that only this plugin calls.
#ifdef PEERLANE_BIND
#if defined(__x86_64__)
#define NIXL_SETNAME "GLIBC_2.12"
#else
#define NIXL_SETNAME "GLIBC_2.17"
#endif
PEERLANE_BIND(pthread_mutex_trylock, PEERLANE_FIRST);
PEERLANE_BIND(pthread_rwlock_rdlock, PEERLANE_FIRST);
PEERLANE_BIND(pthread_rwlock_wrlock, PEERLANE_FIRST);
PEERLANE_BIND(pthread_rwlock_unlock, PEERLANE_FIRST);
PEERLANE_BIND(pthread_setname_np, NIXL_SETNAME);
#endif

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <pthread.h>
#include <set>

namespace nixl {

// Bytes of a message with its header, and the buffers for messages of a connection in each
// direction: peers that do not receive hold no buffer of another peer.
constexpr uint32_t MESSAGE_BYTES = 32 << 10;
constexpr unsigned RECEIVE_BUFFERS = 4;
constexpr unsigned SEND_BUFFERS = RECEIVE_BUFFERS;

// Entries of one list operation: a session's lists have PEERLANE_MAX_LIST_ENTRIES together.
constexpr size_t LIST_ENTRIES = PEERLANE_MAX_LIST_ENTRIES / 2;

// Limits of the state that a peer can have this agent keep.
constexpr uint64_t MAX_NOTIFICATION = 1 << 30;
constexpr size_t MAX_REPLIES = 1 << 16;

enum message_kind : uint32_t {
	HELLO = 1,    // agent's name, `length` bytes, and connection information; the first message
	NOTIFICATION, // part of a notification of `length` bytes
	PUT,          // bytes for DRAM at `address`
	GET,          // asks for `length` bytes of DRAM at `address`, as entry `entry`
	DATA,         // bytes for a GET, at offset `address` of entry `entry`
	FENCE,        // asks for DONE after the PUTs and GETs of transfer `id`
	DONE,         // the end of transfer `id`, with `failed`
};

constexpr uint32_t MESSAGE_MAGIC = 0x4e4c5031;

// The header of a message. Numbers are little-endian, as the processor has them.
struct header {
	uint32_t magic, kind;
	uint32_t bytes; // behind the header
	uint32_t failed;
	uint64_t id, address, length;
	uint64_t entry;
};

struct agent;
struct channel;
struct peer;
struct send;
struct transfer;

// An operation of the session. Results carry its address.
struct operation {
	enum kind { LIST, SEND, RECEIVE } is;

	explicit operation(kind k) : is(k) {}
};

struct local_region : metadata {
	segment type;
	uintptr_t base;
	size_t bytes;
	unsigned lane = 0;
	peerlane_memory memory = 0;
	peerlane_region region = 0;
	peerlane_remote_key key{};
	void *context = nullptr; // of CUDA, at the registration

	local_region(segment t, uintptr_t b, size_t n) : metadata(true), type(t), base(b), bytes(n) {}
};

// The key of a remote region. Transfers share it with the region's metadata.
struct remote_key {
	peerlane_remote_key key;
};

struct remote_region : metadata {
	segment type;
	uintptr_t base;
	size_t bytes;
	peerlane_gpu gpu;
	std::shared_ptr<remote_key> key;

	remote_region() : metadata(false) {}
};

// A list of a transfer: entries between one local and one remote lane.
struct part : operation {
	transfer *of;
	nixl::channel *channel; // that the list needs
	std::vector<peerlane_list_entry> entries;
	peerlane_operation number = 0;
	bool posted = false;

	part(transfer *t, nixl::channel *c) : operation(LIST), of(t), channel(c) {}
};

// A range of DRAM of a transfer.
struct range {
	uintptr_t local;
	uint64_t remote, length;
};

struct transfer : request {
	direction way;
	std::shared_ptr<peer> to;
	uint64_t generation = 0; // session of the entries
	std::vector<std::unique_ptr<part>> parts;
	std::vector<std::shared_ptr<remote_key>> keys;
	std::vector<range> ranges; // DRAM
	std::atomic<int> state{SUCCESS};
	size_t left = 0; // parts, and 1 for DRAM, that have not ended
	status first_error = SUCCESS;
	bool notifies = false, released = false, notifying = false;
	std::string message;
	uint64_t id = 0;       // of DRAM
	uint64_t received = 0; // bytes of DATA
	channel *waits = nullptr;
};

// What waits for a connection, in order.
struct item {
	header head{};
	std::string text;               // HELLO and NOTIFICATION: their bytes
	const uint8_t *data = nullptr;  // PUT and DATA: bytes of DRAM
	uint64_t left = 0;              // bytes that are not sent
	part *list = nullptr;           // or a list
	transfer *ends = nullptr;       // the transfer that ends with this message
};

// A message in a buffer of a connection.
struct send : operation {
	std::shared_ptr<peer> to; // of a message under way
	channel *over;
	transfer *ends = nullptr;
	unsigned buffer;

	send(channel *c, unsigned b) : operation(SEND), over(c), buffer(b) {}
};

// A connection to a lane of a peer.
struct channel {
	enum { IDLE, CONNECTING, UP } state = IDLE;
	peer *to;
	unsigned lane, far;
	peerlane_attempt attempt = 0;
	peerlane_connection connection = 0;
	std::deque<item> waiting;
	std::set<transfer *> answers; // that wait for DONE
	unsigned sending = 0;         // messages
	bool logged = false;
	peerlane_memory memory = 0; // of buffers, from the first message on
	uint8_t *data = nullptr;
	std::vector<std::unique_ptr<send>> sends;
	std::vector<send *> idle;

	channel(peer *p, unsigned l, unsigned f) : to(p), lane(l), far(f) {}
};

struct far_lane {
	peerlane_gpu gpu;
	peerlane_handle handle;
};

struct peer : std::enable_shared_from_this<peer> {
	std::string name, info;
	std::vector<far_lane> lanes;
	std::vector<std::unique_ptr<channel>> channels;
	bool closed = false;
};

struct lane {
	peerlane_gpu gpu{};
	peerlane_listener listener = 0;
	peerlane_handle handle{};
	bool used = false; // a region is there
};

struct inbound;

struct receive : operation {
	inbound *from;
	unsigned buffer;

	receive(inbound *i, unsigned b) : operation(RECEIVE), from(i), buffer(b) {}
};

// A connection that a peer made.
struct inbound {
	peerlane_connection connection;
	unsigned lane;
	peerlane_memory memory = 0;
	uint8_t *data = nullptr;
	unsigned posted = 0;
	bool closed = false;
	std::string name, note;
	uint64_t note_bytes = 0;
	bool in_note = false;
	std::shared_ptr<peer> back;
	std::set<uint64_t> refused; // transfers with a bad range
	std::vector<std::unique_ptr<receive>> receives;

	inbound(peerlane_connection c, unsigned l) : connection(c), lane(l) {}
};

struct agent {
	const std::string name, socket;
	pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	// Readers use the session without the lock, for calls that may take long; the thread that
	// replaces the session writes.
	pthread_rwlock_t sessions = PTHREAD_RWLOCK_INITIALIZER;
	peerlane_session *session = nullptr;
	uint64_t generation = 0;         // sessions so far
	std::atomic<bool> broken{false}; // the session has failed
	int event = -1, wake = -1;
	pthread_t thread{};
	bool running = false, stopping = false;
	std::atomic<bool> waits_for_lock{false}; // the progress thread

	std::vector<lane> lanes;
	std::set<local_region *> regions;
	std::map<std::string, std::shared_ptr<peer>> peers;
	std::set<std::shared_ptr<peer>> others; // peers of inbound connections, and disconnected ones with operations
	std::vector<std::unique_ptr<inbound>> inbounds;
	std::map<uint64_t, transfer *> dram; // by id
	std::set<transfer *> active;
	std::vector<peerlane_attempt> attempts; // of connections that nobody wants any more
	bool starved = false;                   // an item waits for an operation of another connection
	uint64_t ids = 0;
	notifications arrived;

	agent(std::string n, std::string s) : name(std::move(n)), socket(std::move(s)) {}
	~agent();

	// --- agent.cpp
	bool open();  // dials, listens, starts the progress thread
	bool dial(bool quiet);
	bool expose(local_region *r);
	void run();
	bool progress();
	bool take_results();
	void end_session();
	void revive();
	std::string info() const;
	status add(const blob_descriptor &d, segment type, metadata *&out);
	status remove(metadata *m);

	// --- channel.cpp
	status load(const std::string &peer_name, const std::string &text);
	bool parse(const std::string &text, peer &p) const;
	void forget(const std::string &peer_name);
	channel *between(peer &p, unsigned near, unsigned far);
	channel *any_channel(peer &p);
	void start(channel *c);
	void push(channel *c, item &&i);
	void advance(channel *c);
	bool advance_front(channel *c);
	bool finish(channel *c);
	void watch(channel *c);
	void down(channel *c, int status, const char *reason);
	void close(peer &p);
	status build(transfer *t, const list &local, const list &remote);
	void begin(transfer *t);
	void end(transfer *t, status s);
	void settle(transfer *t);
	void discard(transfer *t);
	void list_ended(part *p, const peerlane_result &r);
	void send_ended(send *s, const peerlane_result &r);
	int buffer_of(channel *c, send *&out);
	void free_buffers(channel *c);
	template <class F> void each_channel(F f);

	// --- message.cpp
	bool accept();
	void post_receive(receive *r);
	void receive_ended(receive *r, const peerlane_result &result);
	bool handle(inbound &i, const header &h, const uint8_t *bytes);
	bool hello(inbound &i, const header &h, const uint8_t *bytes);
	bool part_of_note(inbound &i, const header &h, const uint8_t *bytes);
	bool data(const header &h, const uint8_t *bytes);
	void reply(inbound &i, item &&answer);
	uint8_t *own_dram(uint64_t address, uint64_t length);
	void close(inbound &i);
	void settle(inbound &i);
	void queue_note(channel *c, const std::string &message, transfer *ends);
};

struct guard {
	pthread_mutex_t *lock;

	explicit guard(pthread_mutex_t *l) : lock(l) { pthread_mutex_lock(lock); }
	~guard() { pthread_mutex_unlock(lock); }
};

struct reader {
	pthread_rwlock_t *lock;

	explicit reader(pthread_rwlock_t *l) : lock(l) { pthread_rwlock_rdlock(lock); }
	~reader() { pthread_rwlock_unlock(lock); }
};

// A line on standard error; untrusted text is passed through printable() first.
void log(const char *format, ...) __attribute__((format(printf, 1, 2)));
std::string printable(const std::string &text);
std::string gpu_name(const peerlane_gpu &gpu);
status status_of(int peerlane_status);

// Serialised values: fixed sizes in the processor's byte order.
template <class T> void append(std::string &to, const T &value)
{
	to.append(reinterpret_cast<const char *>(&value), sizeof value);
}

template <class T> bool extract(const std::string &from, size_t &at, T &value)
{
	if (from.size() < at || from.size() - at < sizeof value)
		return false;
	__builtin_memcpy(&value, from.data() + at, sizeof value);
	at += sizeof value;
	return true;
}

template <class F> void agent::each_channel(F f)
{
	for (auto &named : peers)
		for (auto &c : named.second->channels)
			f(c.get());
	for (auto &p : others)
		for (auto &c : p->channels)
			f(c.get());
}

} // namespace nixl

#endif
