// Closes connections of peers for each cause, over a session that this file imitates: the agent
// disconnects once, and frees the connection after the results of its receives.
#include "channel.cpp"
#include "message.cpp"

#include <cstdio>
#include <unistd.h>

using namespace nixl;

static int connects, receives; // results of these calls
static unsigned posted, disconnects, unexports;

int peerlane_connect_begin(peerlane_session *, const peerlane_gpu *, const peerlane_handle *, peerlane_attempt *attempt)
{
	*attempt = 1;
	return connects;
}

int peerlane_receive(peerlane_session *, peerlane_connection, peerlane_memory, uint64_t, uint64_t, const struct peerlane_options *, peerlane_operation *)
{
	posted += !receives;
	return receives;
}

int peerlane_disconnect(peerlane_session *, peerlane_connection connection)
{
	disconnects += connection == 7;
	return PEERLANE_STATUS_OK;
}

int peerlane_unexport(peerlane_session *, peerlane_memory)
{
	unexports++;
	return PEERLANE_STATUS_OK;
}

const char *peerlane_error() { return "imitated"; }
const char *peerlane_status_text(int) { return "imitated"; }

/* Not called. */
#define NEVER(name, ...) \
	int name(__VA_ARGS__) { abort(); }
using S = peerlane_session *;
using C = peerlane_connection;
using N = uint64_t;
NEVER(peerlane_accept, S, peerlane_listener, int, C *)
NEVER(peerlane_cancel, S, peerlane_operation)
NEVER(peerlane_connect_finish, S, peerlane_attempt, int, C *)
NEVER(peerlane_connection_get, S, C, struct peerlane_connection_info *)
NEVER(peerlane_host_memory, S, N, const peerlane_gpu *, uint32_t, void **, peerlane_memory *)
NEVER(peerlane_send, S, C, peerlane_memory, N, N, const struct peerlane_options *, peerlane_operation *)
NEVER(peerlane_read_list, S, C, const peerlane_list_entry *, uint32_t, const struct peerlane_options *, uint32_t *, peerlane_operation *)
NEVER(peerlane_write_list, S, C, const peerlane_list_entry *, uint32_t, const struct peerlane_options *, uint32_t *, peerlane_operation *)

// The agent's, without a session.
agent::~agent() = default;
std::string agent::info() const { return ""; }
uint8_t *agent::own_dram(uint64_t, uint64_t) { return nullptr; }
void nixl::log(const char *, ...) {}
std::string nixl::printable(const std::string &text) { return text; }
std::string nixl::gpu_name(const peerlane_gpu &) { return ""; }
status nixl::status_of(int s) { return s ? BACKEND_ERROR : SUCCESS; }

#define must(condition) ((condition) ? (void)0 : (fprintf(stderr, "%s, line %d: not so: %s\n", cause, __LINE__, #condition), _exit(1)))

enum { REPLIES, CONNECT, RECEIVE, MESSAGE };

static void check(int which, const char *cause)
{
	static std::vector<uint8_t> buffers(RECEIVE_BUFFERS * MESSAGE_BYTES);
	agent a("a", "-");
	auto i = new inbound(7, 0);
	header h{};

	connects = receives = 0;
	posted = disconnects = unexports = 0;
	a.lanes.emplace_back();
	i->data = buffers.data();
	i->back = std::make_shared<peer>();
	i->back->lanes.emplace_back();
	a.others.insert(i->back);
	a.inbounds.emplace_back(i);
	for (unsigned k = 0; k < RECEIVE_BUFFERS; k++) {
		i->receives.emplace_back(new receive(i, k));
		a.post_receive(i->receives.back().get());
	}
	must(posted == RECEIVE_BUFFERS && i->posted == RECEIVE_BUFFERS);

	/* FENCEs, whose answers wait for a connection that does not come. */
	peerlane_result result{};
	h.magic = which == MESSAGE ? 0 : MESSAGE_MAGIC;
	h.kind = FENCE;
	result.moved = sizeof h;
	connects = which == CONNECT ? PEERLANE_STATUS_LIMIT : PEERLANE_STATUS_OK;
	receives = PEERLANE_STATUS_OK;
	if (which == RECEIVE)
		receives = PEERLANE_STATUS_FULL;
	memcpy(buffers.data(), &h, sizeof h);
	size_t taken = 0;
	while (!i->closed && taken <= MAX_REPLIES) {
		a.receive_ended(i->receives[0].get(), result);
		taken++;
	}
	must(i->closed && taken == (which == REPLIES ? MAX_REPLIES + 1 : 1));
	must(disconnects == 1);

	/* The results that come after that. */
	must(i->posted == RECEIVE_BUFFERS - 1);
	result.status = PEERLANE_STATUS_CLOSED;
	result.moved = 0;
	for (unsigned k = 1; k < RECEIVE_BUFFERS; k++) {
		a.settle(*i);
		must(!unexports && a.inbounds.size() == 1);
		a.receive_ended(i->receives[k].get(), result);
	}
	a.settle(*i);
	must(disconnects == 1 && unexports == 1 && a.inbounds.empty());
}

int main()
{
	check(REPLIES, "65,537 answers");
	check(CONNECT, "no connection for the answer");
	check(RECEIVE, "no receive");
	check(MESSAGE, "an unknown message");
}
