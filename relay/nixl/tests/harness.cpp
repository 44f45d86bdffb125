// harness PLUGIN NIXL MODE SEED SOCKET GPU SOCKET GPU [REGIONS BLOCKS BYTES ROUNDS [RANK PATH]]
//
// With RANK the process is one of the agents, and meets the other at the socket PATH.
//
// Two agents, each a process with a relay of its own, load the plugin as NIXL does, with the
// library NIXL in its place, exchange their metadata over a socket, and move memory. MODE:
//
//	vllm    a decode process reads blocks of REGIONS layers and notifies; heartbeats go beside it
//	sglang  a prefill process writes layers and small DRAM; the decode process only takes notifications
//	random  random lists of VRAM and DRAM in both directions, compared with a model
//	shape   REGIONS times BLOCKS blocks of BYTES, ROUNDS times: prints the times
//	kill    reads until there is an error: prints "moving", then the status; compares what ended well
//	anew    as kill; then reads until it works again, over the relay that takes the place of the dead one
//	limit   moves VRAM and DRAM beside limits of host memory: prints the statuses
//	rejoin  reads DRAM over twelve connections in turn
//	stop    notifies six agents of a stopped process and then a further agent, which must have the
//	        notification
//	load    loads and unloads the plugin: prints whether it gave a table
//
// What breaks NIXL's contract is a line "violation: ...", and exit status 3.
#include "abi.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <memory>
#include <random>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "peerlane.h"

using namespace nixl;

static int rank_ = -1;

static void line(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void line(const char *format, ...)
{
	char text[4096];
	va_list arguments;
	int n = snprintf(text, sizeof text, "rank %d: ", rank_);

	va_start(arguments, format);
	n += vsnprintf(text + n, sizeof text - static_cast<size_t>(n) - 1, format, arguments);
	va_end(arguments);
	n = std::min(n, static_cast<int>(sizeof text) - 2);
	text[n++] = '\n';
	if (write(1, text, static_cast<size_t>(n)) != n)
		_exit(1);
}

#define violation(...) (line("violation: " __VA_ARGS__), _exit(3))
#define must(condition) ((condition) ? (void)0 : (line("line %d: not so: %s", __LINE__, #condition), _exit(1)))

static double now()
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) / 1e9;
}

static double limit_ms = 1000, patience = 60; // seconds

static void pause_for(double seconds)
{
	struct timespec t = {static_cast<time_t>(seconds), static_cast<long>((seconds - static_cast<double>(static_cast<time_t>(seconds))) * 1e9)};

	nanosleep(&t, nullptr);
}

// --- CUDA -----------------------------------------------------------------------------

struct gpu_properties {
	int type, handle_types, location[2];
	void *windows;
	unsigned char flags[8];
};

static struct {
	int (*init)(unsigned);
	int (*count)(int *);
	int (*device)(int *, int);
	int (*uuid)(peerlane_gpu *, int);
	int (*context)(void **, unsigned, int);
	int (*create)(uint64_t *, size_t, const gpu_properties *, uint64_t);
	int (*reserve)(uint64_t *, size_t, size_t, uint64_t, uint64_t);
	int (*map)(uint64_t, size_t, size_t, uint64_t, uint64_t);
	int (*access)(uint64_t, size_t, const int *, size_t);
	int (*stream)(void **, unsigned);
	int (*synchronize)(void *);
	int (*to)(uint64_t, const void *, size_t, void *);
	int (*from)(void *, uint64_t, size_t, void *);
} cuda;

static void *stream;

static int ordinal;

static void open_gpu(const char *text)
{
	const char *path = getenv("PEERLANE_CUDA_LIBRARY");
	void *library = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW);
	void *context;
	int n, device;

	must(library);
	const std::pair<void *, const char *> calls[] = {{&cuda.init, "cuInit"}, {&cuda.count, "cuDeviceGetCount"}, {&cuda.device, "cuDeviceGet"},
		{&cuda.uuid, "cuDeviceGetUuid_v2"}, {&cuda.context, "cuCtxCreate_v2"}, {&cuda.create, "cuMemCreate"}, {&cuda.reserve, "cuMemAddressReserve"},
		{&cuda.map, "cuMemMap"}, {&cuda.access, "cuMemSetAccess"}, {&cuda.to, "cuMemcpyHtoDAsync_v2"}, {&cuda.from, "cuMemcpyDtoHAsync_v2"},
		{&cuda.stream, "cuStreamCreate"}, {&cuda.synchronize, "cuStreamSynchronize"}};
	for (auto &c : calls) {
		*static_cast<void **>(c.first) = dlsym(library, c.second);
		if (!*static_cast<void **>(c.first)) {
			line("no %s", c.second);
			_exit(1);
		}
	}
	must(!cuda.init(0) && !cuda.count(&n));
	for (ordinal = 0; ordinal < n; ordinal++) {
		static const char digits[] = "0123456789abcdef";
		peerlane_gpu gpu;
		std::string name = "GPU-";

		must(!cuda.device(&device, ordinal) && !cuda.uuid(&gpu, device));
		for (unsigned i = 0; i < 16; i++) {
			if (i == 4 || i == 6 || i == 8 || i == 10)
				name += '-';
			name += digits[gpu.bytes[i] >> 4];
			name += digits[gpu.bytes[i] & 15];
		}
		if (name == text)
			break;
	}
	must(ordinal < n && !cuda.context(&context, 0, device) && !cuda.stream(&stream, 1));
}

static uint64_t gpu_allocate(uint64_t bytes)
{
	gpu_properties properties = {1, 1, {1, ordinal}, nullptr, {}};
	const int access[3] = {1, ordinal, 3};
	uint64_t handle, at;

	bytes = (bytes + (2 << 20) - 1) / (2 << 20) * (2 << 20);
	must(!cuda.create(&handle, bytes, &properties, 0) && !cuda.reserve(&at, bytes, 0, 0, 0) && !cuda.map(at, bytes, 0, handle, 0));
	must(!cuda.access(at, bytes, access, 1));
	return at;
}

// --- the other process ------------------------------------------------------------------

static int other;

static void say(const std::string &text)
{
	uint64_t n = text.size();
	std::string all(reinterpret_cast<const char *>(&n), sizeof n);

	all += text;
	for (size_t at = 0; at < all.size();) {
		ssize_t some = send(other, all.data() + at, all.size() - at, MSG_NOSIGNAL);

		if (some <= 0)
			_exit(4); // the other process was killed
		at += static_cast<size_t>(some);
	}
}

static std::string hear()
{
	auto read_all = [](void *to, size_t n) {
		for (size_t at = 0; at < n;) {
			ssize_t some = read(other, static_cast<char *>(to) + at, n - at);

			if (some <= 0)
				_exit(4);
			at += static_cast<size_t>(some);
		}
	};
	uint64_t n;

	read_all(&n, sizeof n);
	std::string text(n, 0);
	if (n)
		read_all(&text[0], n);
	return text;
}

// --- an agent, as NIXL has one ------------------------------------------------------------

struct region {
	segment type;
	uint64_t base, bytes;
	metadata *meta;
	std::string data;
};

struct side {
	plugin *table;
	engine *e;
	std::string name, socket, data;
	parameters custom;
	std::vector<region> own, remote;
	notifications heard;

	void create(bool progress_thread)
	{
		init_parameters p = {name, "PEERLANE", &custom, progress_thread, 0, 0, false};

		custom = table->options();
		if (custom["socket"] != PEERLANE_DEFAULT_SOCKET)
			violation("options name the socket %s", custom["socket"].c_str());
		if (!socket.empty())
			custom["socket"] = socket;
		e = table->create(&p);
		must(e);
		if (!e->supports_remote() || !e->supports_notifications() || e->supported_segments().size() != 2)
			violation("the engine does not support what NIXL needs");
	}

	void add(segment type, uint64_t base, uint64_t bytes)
	{
		blob_descriptor d;
		region r = {type, base, bytes, nullptr, ""};

		d.address = base;
		d.length = bytes;
		d.device = type == VRAM ? static_cast<uint64_t>(ordinal) : 0;
		status s = e->register_memory(d, type, r.meta);
		// NIXL passes one string for all regions: it has the data of the region before.
		if (s != SUCCESS || !r.meta || e->public_data(r.meta, data) != SUCCESS || data.empty())
			violation("registerMem: %d", s);
		r.data = data;
		own.push_back(r);
	}

	// say_metadata sends what NIXL has in an agent's metadata.
	void say_metadata()
	{
		std::string info;

		must(e->connection_info(info) == SUCCESS && !info.empty());
		say(name);
		say(info);
		say(std::to_string(own.size()));
		for (auto &r : own) {
			say(std::to_string(r.type));
			say(std::to_string(r.base));
			say(std::to_string(r.bytes));
			say(r.data);
		}
	}

	std::string hear_metadata()
	{
		std::string who = hear(), info = hear();
		size_t n = std::stoul(hear());

		must(e->load_connection_info(who, info) == SUCCESS);
		for (size_t i = 0; i < n; i++) {
			region r;
			blob_descriptor d;

			r.type = static_cast<segment>(std::stoi(hear()));
			d.address = r.base = std::stoull(hear());
			d.length = r.bytes = std::stoull(hear());
			d.device = 0;
			d.blob = r.data = hear();
			r.meta = nullptr;
			status s = e->load_remote_metadata(d, r.type, who, r.meta);
			if (s != SUCCESS || !r.meta)
				violation("loadRemoteMD: %d", s);
			remote.push_back(r);
		}
		return who;
	}

	void forget(const std::string &who)
	{
		must(e->disconnect(who) == SUCCESS);
		for (auto &r : remote)
			must(e->unload_metadata(r.meta) == SUCCESS);
		remote.clear();
	}

	void leave()
	{
		for (auto &r : own)
			must(e->deregister_memory(r.meta) == SUCCESS);
		own.clear();
		table->destroy(e);
	}

	void listen() { must(e->take_notifications(heard) == SUCCESS); }

	// await waits for a number of notifications.
	void await(size_t n)
	{
		for (double begun = now(); heard.size() < n; pause_for(0.0002)) {
			listen();
			if (now() - begun > patience)
				violation("%zu notifications of %zu came", heard.size(), n);
		}
	}
};

struct piece {
	size_t near, far; // regions
	uint64_t at, there, length;
};

// lists makes NIXL's two lists.
static void lists(const side &s, const std::vector<piece> &pieces, list &local, list &remote)
{
	local.functions = remote.functions = nullptr;
	local.type = s.own[pieces[0].near].type;
	remote.type = s.remote[pieces[0].far].type;
	local.entries.clear();
	remote.entries.clear();
	local.entries.reserve(pieces.size());
	remote.entries.reserve(pieces.size());
	for (auto &p : pieces) {
		meta_descriptor d;

		d.address = s.own[p.near].base + p.at;
		d.length = p.length;
		d.device = static_cast<uint64_t>(ordinal);
		d.meta = s.own[p.near].meta;
		local.entries.push_back(d);
		d.address = s.remote[p.far].base + p.there;
		d.device = 0;
		d.meta = s.remote[p.far].meta;
		remote.entries.push_back(d);
	}
}


struct moved {
	status end;
	double post, all; // seconds
};

// move prepares, posts, checks and releases a transfer. interval: seconds between two checks.
static moved move(side &s, direction d, const std::vector<piece> &pieces, const std::string &who, const std::string *note, double interval, unsigned times = 1)
{
	request *r = nullptr;
	transfer_options options;
	list local, remote;
	moved result = {SUCCESS, 0, 0};

	lists(s, pieces, local, remote);
	status prepared = s.e->prepare(d, local, remote, who, r, &options);
	if (prepared != SUCCESS || !r)
		return {prepared, 0, 0};
	options.notify = note != nullptr;
	if (note)
		options.message = *note;
	for (unsigned i = 0; i < times && result.end == SUCCESS; i++) {
		double begun = now();
		status got = s.e->post(d, local, remote, who, r, &options);

		result.post = now() - begun;
		if (result.post * 1000 > limit_ms)
			violation("postXfer blocks: %.1f ms", result.post * 1000);
		while (got == IN_PROGRESS) {
			got = s.e->check(r);
			if (now() - begun > patience)
				violation("a transfer does not end: %s of %zu pieces, segment %d, notification of %zu bytes", d == READ ? "READ" : "WRITE", pieces.size(),
					local.type, note ? note->size() : 0);
			if (got == IN_PROGRESS && interval > 0)
				pause_for(interval);
		}
		result.all = now() - begun;
		result.end = got;
	}
	must(s.e->release(r) == SUCCESS);
	return result;
}

static void pattern(uint8_t *to, uint64_t n, uint64_t seed)
{
	for (uint64_t i = 0; i < n; i++)
		to[i] = static_cast<uint8_t>((seed + (i >> 3) * 0xbf58476d1ce4e5b9u) >> (i & 7) * 8);
}

static std::vector<uint8_t> bytes_of(const region &r)
{
	std::vector<uint8_t> b(r.bytes);

	if (r.type == DRAM)
		memcpy(b.data(), reinterpret_cast<const void *>(r.base), r.bytes);
	else
		must(!cuda.from(b.data(), r.base, r.bytes, stream) && !cuda.synchronize(stream));
	return b;
}

static void fill(const region &r, const std::vector<uint8_t> &b)
{
	if (r.type == DRAM)
		memcpy(reinterpret_cast<void *>(r.base), b.data(), r.bytes);
	else
		must(!cuda.to(r.base, b.data(), r.bytes, stream) && !cuda.synchronize(stream));
}

static std::vector<uint8_t> pattern_of(uint64_t n, uint64_t seed)
{
	std::vector<uint8_t> b(n);

	pattern(b.data(), n, seed);
	return b;
}

static size_t regions = 4, blocks = 64, block = 4096, rounds = 2;
static uint64_t seed;

// layers registers a region per layer, some in one allocation, with a pattern.
static void layers(side &s, uint64_t of)
{
	uint64_t each = (blocks * block + 511) / 512 * 512, all = gpu_allocate(each * regions);

	for (size_t i = 0; i < regions; i++) {
		s.add(VRAM, all + i * each, blocks * block);
		fill(s.own.back(), pattern_of(blocks * block, of + i));
	}
}

static std::vector<piece> all_blocks(bool shuffled)
{
	std::vector<piece> pieces;
	std::vector<uint64_t> numbers(blocks);
	std::mt19937_64 random(seed);

	for (size_t i = 0; i < blocks; i++)
		numbers[i] = i;
	if (shuffled)
		std::shuffle(numbers.begin(), numbers.end(), random);
	for (size_t l = 0; l < regions; l++)
		for (size_t i = 0; i < blocks; i++)
			pieces.push_back({l, l, i * block, numbers[i] * block, block});
	return pieces;
}

static void compare_blocks(const side &s, const std::vector<piece> &pieces, uint64_t theirs)
{
	for (size_t l = 0; l < regions; l++) {
		auto got = bytes_of(s.own[l]), want = pattern_of(blocks * block, theirs + l);

		for (auto &p : pieces)
			if (p.near == l && memcmp(got.data() + p.at, want.data() + p.there, p.length))
				violation("wrong bytes in layer %zu at %llu", l, static_cast<unsigned long long>(p.at));
	}
}

static void vllm(side &s)
{
	std::string note = "req-1:0:1", beat(300000, 'h');

	s.create(true);
	layers(s, seed + static_cast<uint64_t>(rank_) * 1000);
	if (rank_ == 0) { // prefill
		s.say_metadata();
		s.await(rounds + 2);
		size_t notes = 0;
		for (auto &n : s.heard) {
			if (n.first != "agent 1")
				violation("a notification of agent %s", n.first.c_str());
			notes += n.second == note;
			if (n.second != note && n.second != beat)
				violation("a notification of %zu bytes", n.second.size());
		}
		if (notes != rounds)
			violation("%zu notifications of transfers", notes);
		say("taken");
		hear();
	} else {
		std::string who = s.hear_metadata();
		auto pieces = all_blocks(true);

		must(s.e->notify(who, beat) == SUCCESS);
		moved m = move(s, READ, pieces, who, &note, 0.001, static_cast<unsigned>(rounds));
		if (m.end != SUCCESS)
			violation("READ: %d", m.end);
		compare_blocks(s, pieces, seed);
		must(s.e->notify(who, beat) == SUCCESS);
		must(s.e->notify("nobody", beat) == NOT_FOUND);
		hear();
		say("left");
		s.forget(who);
	}
	s.leave();
}

static void sglang(side &s)
{
	static uint8_t small[10000];
	auto pieces = all_blocks(false);

	s.create(rank_ == 0);
	layers(s, seed + static_cast<uint64_t>(rank_) * 1000);
	s.add(DRAM, reinterpret_cast<uintptr_t>(small), sizeof small);
	if (rank_ == 1) { // decode: it takes notifications, and makes no other call
		s.say_metadata();
		s.await(rounds * regions + 1);
		compare_blocks(s, pieces, seed);
		auto want = pattern_of(sizeof small, seed + 77);
		if (s.heard.back().second != "aux" || memcmp(small, want.data(), sizeof small))
			violation("the notification \"%s\" came before its DRAM", s.heard.back().second.c_str());
		say("taken");
	} else {
		std::string who = s.hear_metadata();
		size_t aux = regions;

		for (size_t round = 0; round < rounds; round++)
			for (size_t l = 0; l < regions; l++) {
				std::vector<piece> layer;
				std::string note = "kv " + std::to_string(l);

				for (auto &p : pieces)
					if (p.near == l)
						layer.push_back(p);
				if (moved m = move(s, WRITE, layer, who, &note, 0.0002); m.end != SUCCESS)
					violation("WRITE: %d", m.end);
			}
		pattern(small, sizeof small, seed + 77);
		std::string note = "aux";
		if (moved m = move(s, WRITE, {{aux, aux, 0, 0, 5000}, {aux, aux, 5000, 5000, 5000}}, who, &note, 0.0002); m.end != SUCCESS)
			violation("WRITE of DRAM: %d", m.end);
		hear();
		s.forget(who);
	}
	s.leave();
}

static void random_lists(side &s)
{
	const uint64_t room = 1 << 20, host = 200000;
	std::mt19937_64 random(seed + 1);
	auto dice = [&random](uint64_t n) { return random() % n; };
	std::vector<uint8_t> dram(host);
	uint64_t a = gpu_allocate(2 * room);

	s.create(true);
	s.add(VRAM, a, room);
	s.add(VRAM, a + room + 4096, room / 2 + 123);
	s.add(DRAM, reinterpret_cast<uintptr_t>(dram.data()), host / 2);
	s.add(DRAM, reinterpret_cast<uintptr_t>(dram.data()) + host / 2, host / 2);
	std::vector<std::vector<uint8_t>> model[2];
	for (size_t i = 0; i < s.own.size(); i++) {
		for (uint64_t r = 0; r < 2; r++)
			model[r].push_back(pattern_of(s.own[i].bytes, seed + 10 * r + i));
		fill(s.own[i], model[rank_][i]);
	}
	if (rank_ == 0) {
		s.say_metadata();
		std::vector<std::string> want;
		for (std::string n = hear(); n != "end"; n = hear())
			want.push_back(n);
		s.await(want.size());
		for (size_t i = 0; i < want.size(); i++)
			if (s.heard[i].second != want[i])
				violation("notification %zu has %zu bytes, wants %zu", i, s.heard[i].second.size(), want[i].size());
		for (auto &r : s.own) {
			auto b = bytes_of(r);
			say(std::string(b.begin(), b.end()));
		}
		hear();
		s.leave();
		return;
	}
	std::string who = s.hear_metadata();
	for (size_t round = 0; round < rounds; round++) {
		size_t first = dice(4) ? 0 : 2; // VRAM, mostly
		direction d = dice(2) ? READ : WRITE;
		std::vector<piece> pieces;

		for (size_t to = first; to < first + 2; to++)
			for (uint64_t at = dice(3000); at < s.own[to].bytes && pieces.size() < 400;) {
				size_t from = first + dice(2);
				uint64_t n = std::min<uint64_t>(dice(4) ? 1 + dice(5000) : 1 + dice(60000), s.own[to].bytes - at);

				n = std::min(n, s.own[from].bytes);
				uint64_t source = dice(s.own[from].bytes - n + 1);
				if (dice(3) == 0 && !pieces.empty()) { // adjacent pieces
					piece &last = pieces.back();
					uint64_t behind = (d == READ ? last.there : last.at) + last.length;
					size_t there = d == READ ? last.far : last.near;

					if (behind + n <= s.own[there].bytes)
						from = there, source = behind;
				}
				pieces.push_back(d == READ ? piece{to, from, at, source, n} : piece{from, to, source, at, n});
				at += n + (dice(2) ? 0 : dice(8000));
			}
		if (dice(2))
			std::shuffle(pieces.begin(), pieces.end(), random);
		std::string note(dice(8) ? dice(100) : dice(200000), static_cast<char>('a' + dice(26)));
		bool notes = dice(2);
		if (pieces.empty())
			continue;
		if (notes)
			say(note);
		moved m = move(s, d, pieces, who, notes ? &note : nullptr, 0, 1 + static_cast<unsigned>(notes ? 0 : dice(2)));
		if (m.end != SUCCESS)
			violation("round %zu: %d", round, m.end);
		for (auto &p : pieces)
			if (d == READ)
				memcpy(&model[1][p.near][p.at], &model[0][p.far][p.there], p.length);
			else
				memcpy(&model[0][p.far][p.there], &model[1][p.near][p.at], p.length);
		for (size_t i = first; d == READ && i < first + 2; i++)
			if (bytes_of(s.own[i]) != model[1][i])
				violation("round %zu: wrong bytes in region %zu", round, i);
	}
	say("end");
	for (size_t i = 0; i < s.own.size(); i++) {
		std::string b = hear();
		if (b.size() != model[0][i].size() || memcmp(b.data(), model[0][i].data(), b.size()))
			violation("wrong bytes in region %zu of the other agent", i);
	}
	/* Refused: another length, beyond the region, VRAM from DRAM, an unknown agent. */
	list local, remote;
	request *r = nullptr;
	lists(s, {{0, 0, 0, 0, 100}}, local, remote);
	remote.entries[0].length = 99;
	must(s.e->prepare(READ, local, remote, who, r, nullptr) == INVALID_PARAMETER);
	lists(s, {{0, 0, 0, s.remote[0].bytes - 10, 100}}, local, remote);
	must(s.e->prepare(READ, local, remote, who, r, nullptr) == INVALID_PARAMETER);
	lists(s, {{0, 2, 0, 0, 100}}, local, remote);
	must(s.e->prepare(READ, local, remote, who, r, nullptr) == NOT_SUPPORTED);
	lists(s, {{0, 0, 0, 0, 100}}, local, remote);
	must(s.e->prepare(READ, local, remote, "nobody", r, nullptr) == NOT_FOUND);
	/* Released while it runs: the call does not wait, and nothing breaks. */
	for (int i = 0; i < 20; i++) {
		auto all = i % 2 ? std::vector<piece>{{2, 2, 0, 0, host / 2}} : std::vector<piece>{{0, 0, 0, 0, room}, {1, 1, 0, 0, room / 2}};
		std::string note = "released";
		transfer_options options = {note, true, ""};

		lists(s, all, local, remote);
		must(s.e->prepare(READ, local, remote, who, r, &options) == SUCCESS);
		status posted = s.e->post(READ, local, remote, who, r, &options);
		must(posted == IN_PROGRESS || posted == SUCCESS);
		double begun = now();
		must(s.e->release(r) == SUCCESS);
		if (now() - begun > 0.5)
			violation("releaseReqH blocks");
	}
	say("left");
	s.forget(who);
	s.leave();
}

static double processor()
{
	struct rusage u;

	getrusage(RUSAGE_SELF, &u);
	return static_cast<double>(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + static_cast<double>(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static void shape(side &s)
{
	limit_ms = 60000;
	s.create(true);
	layers(s, seed + static_cast<uint64_t>(rank_) * 1000);
	if (rank_ == 0) {
		s.say_metadata();
		hear();
	} else {
		std::string who = s.hear_metadata();
		auto pieces = all_blocks(true);

		for (direction d : {READ, WRITE})
			for (double interval : {0.0, 0.01})
				for (size_t i = 0; i < rounds; i++) {
					double before = processor();
					moved m = move(s, d, pieces, who, nullptr, interval);

					must(m.end == SUCCESS);
					line("%s %zu descriptors of %zu bytes, checked every %.0f ms: post %.3f ms, all %.3f ms, processor %.3f us per descriptor",
						d == READ ? "READ" : "WRITE", pieces.size(), block, interval * 1000, m.post * 1000, m.all * 1000,
						(processor() - before) / static_cast<double>(pieces.size()) * 1e6);
				}
		compare_blocks(s, pieces, seed);
		say("left");
		s.forget(who);
	}
	s.leave();
}

static void killed(side &s, bool anew)
{
	s.create(true);
	layers(s, seed + static_cast<uint64_t>(rank_) * 1000);
	if (rank_ == 0) {
		s.say_metadata();
		line("pid %d", getpid());
		hear();
		_exit(0);
	}
	std::string who = s.hear_metadata(), note = "n";
	auto pieces = all_blocks(true);
	double last = now();
	for (size_t i = 0;; i++) {
		moved m = move(s, READ, pieces, who, &note, 0.0002);

		if (m.end != SUCCESS) {
			if (m.end != REMOTE_DISCONNECT)
				violation("a death is status %d", m.end);
			line("status %d after %.3f s", m.end, now() - last);
			if (now() - last > 30)
				violation("a death is noticed after %.1f s", now() - last);
			break;
		}
		compare_blocks(s, pieces, seed);
		last = now();
		if (i == 0)
			line("moving");
	}
	for (bool again = anew; again; pause_for(0.05)) {
		again = move(s, READ, pieces, who, &note, 0.0002).end != SUCCESS;
		if (now() - last > 120)
			violation("no transfer works again");
	}
	compare_blocks(s, pieces, seed);
	s.forget(who);
	s.leave();
	send(other, "\0\0\0\0\0\0\0", 8, MSG_NOSIGNAL);
}

static void limited(side &s)
{
	static uint8_t small[10000];

	patience = 30;
	s.create(true);
	layers(s, seed + static_cast<uint64_t>(rank_) * 1000);
	s.add(DRAM, reinterpret_cast<uintptr_t>(small), sizeof small);
	if (rank_ == 0) {
		s.say_metadata();
		hear();
	} else {
		std::string who = s.hear_metadata(), note = "n";
		auto pieces = all_blocks(true);
		status vram = move(s, READ, pieces, who, nullptr, 0.001).end;
		status dram = move(s, READ, {{regions, regions, 0, 0, sizeof small}}, who, nullptr, 0.001).end;

		line("VRAM %d, DRAM %d", vram, dram);
		if (vram == SUCCESS)
			compare_blocks(s, pieces, seed);
		say("left");
		s.forget(who);
	}
	s.leave();
}

// rejoined connects, reads DRAM and disconnects several times. The other side frees the memory of an
// earlier connection some time after the disconnect, so a read may fail before that.
static void rejoined(side &s)
{
	static uint8_t small[10000];
	const int times = 12;

	patience = 30;
	s.create(true);
	s.add(DRAM, reinterpret_cast<uintptr_t>(small), sizeof small);
	for (int i = 0; i < times; i++) {
		if (rank_ == 0) {
			memset(small, i + 1, sizeof small);
			s.say_metadata();
			hear();
			continue;
		}
		std::string who = s.hear_metadata();
		for (double begun = now(); move(s, READ, {{0, 0, 0, 0, sizeof small}}, who, nullptr, 0.001).end != SUCCESS; pause_for(0.01))
			if (now() - begun > patience)
				violation("no read works after %d earlier connections", i);
		if (std::count(small, small + sizeof small, i + 1) != sizeof small)
			violation("wrong bytes after %d earlier connections", i);
		s.forget(who);
		say("left");
	}
	s.leave();
}

// Agents of the process that is stopped: together they take more messages than 16 buffers hold.
static const size_t stopped_agents = 6;

static void stopped(side &s, const std::string &third)
{
	const std::string first = "first", big(512 << 10, 'b'), last = "last";

	if (rank_ == 0) {
		std::vector<side> all(stopped_agents);

		for (size_t i = 0; i < all.size(); i++) {
			all[i].table = s.table;
			all[i].name = "stopped " + std::to_string(i);
			all[i].socket = s.socket;
			all[i].create(true);
			all[i].say_metadata();
		}
		say(std::to_string(getpid()));
		for (auto &a : all)
			a.await(1);
		say("up");
		for (auto &a : all) {
			a.await(3);
			if (a.heard[1].second != big || a.heard[2].second != last)
				violation("notifications of %zu and %zu bytes", a.heard[1].second.size(), a.heard[2].second.size());
		}
		say("taken");
		hear();
		for (auto &a : all)
			a.leave();
		return;
	}
	s.create(true);
	side near;
	std::vector<std::string> names;
	std::string info;
	for (size_t i = 0; i < stopped_agents; i++)
		names.push_back(s.hear_metadata());
	pid_t pid = std::stoi(hear());
	near.table = s.table;
	near.name = "near";
	near.socket = third;
	near.create(true);
	must(near.e->connection_info(info) == SUCCESS && s.e->load_connection_info(near.name, info) == SUCCESS);
	for (auto &who : names)
		must(s.e->notify(who, first) == SUCCESS);
	hear();
	must(!kill(pid, SIGSTOP));
	for (auto &who : names)
		must(s.e->notify(who, big) == SUCCESS); // more messages than a connection has buffers
	pause_for(0.1);
	must(s.e->notify(near.name, last) == SUCCESS);
	for (double begun = now(); near.heard.empty() && now() - begun < 20; pause_for(0.0002))
		near.listen();
	must(!kill(pid, SIGCONT));
	if (near.heard.empty())
		violation("stopped agents hold the messages to another");
	for (auto &who : names)
		must(s.e->notify(who, last) == SUCCESS);
	hear(); // a disconnect takes messages back
	say("left");
	near.leave();
	for (auto &who : names)
		must(s.e->disconnect(who) == SUCCESS);
	s.forget(near.name);
	s.leave();
}

// be_rank runs a rank, whose process it ends.
[[noreturn]] static void be_rank(char **argv, const std::string &mode, int r, int pair)
{
	rank_ = r;
	other = pair;
	alarm(300);
	void *nixl = strcmp(argv[2], "-") ? dlopen(argv[2], RTLD_NOW) : nullptr;
	must(nixl || !strcmp(argv[2], "-"));
	void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
	if (!library) {
		line("%s", dlerror());
		_exit(1);
	}
	auto init = reinterpret_cast<plugin *(*)()>(dlsym(library, "nixl_plugin_init"));
	must(init);
	side s;
	s.table = init();
	if (mode == "load") {
		line(s.table ? "a table" : "no table");
		_exit(0);
	}
	must(s.table && s.table->api_version == 1 && !strcmp(s.table->name(), "PEERLANE") && s.table->version() && s.table->memories().size() == 2);
	s.name = "agent " + std::to_string(r);
	s.socket = argv[5 + 2 * r];
	open_gpu(argv[6 + 2 * r]);
	mode == "vllm" ? vllm(s) : mode == "sglang" ? sglang(s) : mode == "random" ? random_lists(s) : mode == "shape" ? shape(s) :
		mode == "limit" ? limited(s) : mode == "rejoin" ? rejoined(s) : mode == "stop" ? stopped(s, argv[5]) : killed(s, mode == "anew");
	line("done");
	_exit(0);
}

// meet connects the two processes by a socket at path, which the first one makes.
static int meet(int r, const char *path)
{
	struct sockaddr_un name = {};
	int s = socket(AF_UNIX, SOCK_STREAM, 0);
	auto address = reinterpret_cast<const struct sockaddr *>(&name);

	name.sun_family = AF_UNIX;
	must(s >= 0 && strlen(path) < sizeof name.sun_path);
	memcpy(name.sun_path, path, strlen(path));
	if (r == 0) {
		must(!bind(s, address, sizeof name) && !listen(s, 1));
		int accepted = accept(s, nullptr, nullptr);
		must(accepted >= 0);
		return accepted;
	}
	for (double begun = now(); connect(s, address, sizeof name); pause_for(0.01))
		must(now() - begun < patience);
	return s;
}

int main(int argc, char **argv)
{
	if (argc < 9)
		return 2;
	const std::string mode = argv[3];
	seed = strtoull(argv[4], nullptr, 0);
	size_t *sizes[] = {&regions, &blocks, &block, &rounds};
	for (int i = 9; i < argc && i < 13; i++)
		*sizes[i - 9] = strtoull(argv[i], nullptr, 0);
	if (argc == 15)
		be_rank(argv, mode, atoi(argv[13]), meet(atoi(argv[13]), argv[14]));
	for (int r = 0; r < 2; r++)
		// A rank without a GPU is in another container, behind descriptor 3.
		if (!*argv[6 + 2 * (1 - r)])
			be_rank(argv, mode, r, 3);
	int pair[2];
	pid_t child[2];
	must(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	for (int r = 0; r < 2; r++) {
		child[r] = fork();
		must(child[r] >= 0);
		if (child[r])
			continue;
		close(pair[1 - r]);
		be_rank(argv, mode, r, pair[r]);
	}
	close(pair[0]);
	close(pair[1]);
	int worst = 0;
	for (int r = 0; r < 2; r++) {
		int status;

		must(waitpid(child[r], &status, 0) == child[r]);
		if (WIFSIGNALED(status)) {
			line("rank %d: signal %d", r, WTERMSIG(status));
			worst = std::max(worst, (mode == "kill" || mode == "anew") && r == 0 ? 0 : 128 + WTERMSIG(status));
		} else if (!((mode == "kill" || mode == "anew") && r == 0)) {
			worst = std::max(worst, WEXITSTATUS(status));
		}
	}
	return worst;
}
