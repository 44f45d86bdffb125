// The agent: its session with the relay, its memory, and the progress thread.
#include "agent.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace nixl {

void log(const char *format, ...)
{
	char text[1024];
	va_list arguments;
	int n = snprintf(text, sizeof text, "PEERLANE: ");

	va_start(arguments, format);
	n += vsnprintf(text + n, sizeof text - static_cast<size_t>(n) - 1, format, arguments);
	va_end(arguments);
	n = std::min(n, static_cast<int>(sizeof text) - 2);
	text[n++] = '\n';
	if (write(STDERR_FILENO, text, static_cast<size_t>(n)) < 0)
		return; // nobody reads it
}

std::string printable(const std::string &text)
{
	std::string out = text.substr(0, 64);

	for (char &c : out)
		if (c < ' ' || c > '~')
			c = '?';
	return out;
}

std::string gpu_name(const peerlane_gpu &gpu)
{
	char text[41];

	peerlane_gpu_format(&gpu, text);
	return text;
}

status status_of(int s)
{
	switch (s) {
	case PEERLANE_STATUS_OK:
		return SUCCESS;
	case PEERLANE_STATUS_CANCELED:
		return CANCELED;
	case PEERLANE_STATUS_INTERNAL:
	case PEERLANE_STATUS_MALFORMED:
	case PEERLANE_STATUS_VERSION:
	case PEERLANE_STATUS_NO_CUDA:
	case PEERLANE_STATUS_CUDA:
	case PEERLANE_STATUS_WRONG_GPU:
	case PEERLANE_STATUS_LIMIT:
	case PEERLANE_STATUS_UNKNOWN_MEMORY:
	case PEERLANE_STATUS_OUT_OF_RANGE:
	case PEERLANE_STATUS_NOT_PERMITTED:
	case PEERLANE_STATUS_NO_STAGING:
	case PEERLANE_STATUS_BAD_KEY:
	case PEERLANE_STATUS_NO_REVERSE_CONNECTION:
	case PEERLANE_STATUS_INVALID:
	case PEERLANE_STATUS_SYSTEM:
	case PEERLANE_STATUS_FORKED:
		return BACKEND_ERROR;
	}
	return REMOTE_DISCONNECT;
}

namespace {

// The calls of the CUDA driver that the process has loaded: nullptr without a driver.
struct driver {
	int (*count)(int *);
	int (*device)(int *, int);
	int (*uuid)(peerlane_gpu *, int);
	int (*current)(void **);
	int (*set)(void *);
	int (*retain)(void **, int);
	int (*release)(int);
	bool primary; // the driver has the calls for primary contexts

	bool find()
	{
		const char *named = getenv("PEERLANE_CUDA_LIBRARY");
		void *library = RTLD_DEFAULT;

		if (!dlsym(library, "cuDeviceGetCount")) {
			library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
			if (!library && named && *named)
				library = dlopen(named, RTLD_NOW | RTLD_NOLOAD);
			if (!library)
				return false;
		}
		auto take = [library](auto &call, const char *symbol) {
			call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(dlsym(library, symbol));
			return call != nullptr;
		};
		primary = take(retain, "cuDevicePrimaryCtxRetain") && take(release, "cuDevicePrimaryCtxRelease_v2");
		return take(count, "cuDeviceGetCount") && take(device, "cuDeviceGet") && take(uuid, "cuDeviceGetUuid_v2") && take(current, "cuCtxGetCurrent") &&
			take(set, "cuCtxSetCurrent");
	}
};

// Makes a context current for exports, if the thread has none: the GPU's primary context.
class with_context {
	driver &d;
	int gpu = -1;

public:
	void *context = nullptr;

	with_context(driver &driver, int ordinal) : d(driver)
	{
		int device;

		if ((!d.current(&context) && context) || !d.primary || d.device(&device, ordinal) || d.retain(&context, device))
			return;
		d.set(context);
		gpu = device;
	}
	~with_context()
	{
		if (gpu < 0)
			return;
		d.set(nullptr);
		d.release(gpu);
	}
};

bool same(const peerlane_gpu &a, const peerlane_gpu &b) { return !memcmp(&a, &b, sizeof a); }

void *run_thread(void *a)
{
	static_cast<agent *>(a)->run();
	return nullptr;
}

} // namespace

// --- the session ----------------------------------------------------------------------

bool agent::open()
{
	sigset_t all, before;
	int error;

	if ((wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0) {
		log("creating an eventfd: %s", strerror(errno));
		return false;
	}
	if (!dial(false))
		return false;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	error = pthread_create(&thread, nullptr, run_thread, this);
	pthread_sigmask(SIG_SETMASK, &before, nullptr);
	running = error == 0;
	if (!running)
		log("starting the progress thread: %s", strerror(error));
	return running;
}

// dial opens a session with listeners for the lanes of GPUs that this process sees. quiet: an
// error has been logged before.
bool agent::dial(bool quiet)
{
	struct peerlane_lane all[PEERLANE_MAX_LANES];
	std::vector<peerlane_gpu> visible;
	std::vector<lane> made;
	peerlane_session *s = nullptr;
	unsigned n = 0;
	driver d;
	int gpus = 0, device, descriptor;

	if (d.find() && !d.count(&gpus))
		for (int i = 0; i < gpus; i++) {
			peerlane_gpu gpu;

			if (!d.device(&device, i) && !d.uuid(&gpu, device))
				visible.push_back(gpu);
		}
	peerlane_set_program(PEERLANE_PROGRAM_NIXL);
	int status = peerlane_dial(socket.c_str(), visible.data(), static_cast<unsigned>(visible.size()), -1, &s);
	if (!status)
		status = peerlane_lanes(s, all, PEERLANE_MAX_LANES, &n);
	for (unsigned i = 0; !status && i < std::min(n, static_cast<unsigned>(PEERLANE_MAX_LANES)); i++) {
		lane l;

		if (!visible.empty() && std::none_of(visible.begin(), visible.end(), [&](const peerlane_gpu &gpu) { return same(gpu, all[i].gpu); }))
			continue;
		l.gpu = all[i].gpu;
		status = peerlane_listen(s, &l.gpu, &l.listener, &l.handle);
		made.push_back(std::move(l));
	}
	if (!status && made.empty()) {
		log("the container has %u lanes, none of them of a GPU that this process sees: request peerlane.dev/lane= of its GPU", n);
		status = PEERLANE_STATUS_WRONG_GPU;
	} else if (!status && !(status = peerlane_event_descriptor(s, &descriptor))) {
		guard g(&lock);
		for (lane &l : made)
			for (const lane &b : lanes)
				l.used = l.used || (b.used && same(b.gpu, l.gpu));
		if (generation && made.size() != lanes.size())
			log("the container's lanes have changed: create the agent anew");
		session = s;
		event = descriptor;
		generation++;
		lanes = std::move(made);
		return true;
	} else if (!quiet) {
		log("connecting to the relay at %s: %s", socket.c_str(), peerlane_error());
	}
	peerlane_close(s);
	return false;
}

std::string agent::info() const
{
	std::string text;

	append(text, MESSAGE_MAGIC);
	append(text, static_cast<uint32_t>(lanes.size()));
	for (const lane &l : lanes) {
		append(text, l.gpu);
		append(text, l.handle);
	}
	return text;
}

agent::~agent()
{
	if (running) {
		const uint64_t one = 1;

		pthread_mutex_lock(&lock);
		stopping = true;
		pthread_mutex_unlock(&lock);
		if (::write(wake, &one, sizeof one) < 0)
			log("waking the progress thread: %s", strerror(errno));
		pthread_join(thread, nullptr);
	}
	peerlane_close(session);
	for (transfer *t : active)
		if (t->released)
			delete t;
		else
			t->state = REMOTE_DISCONNECT;
	for (local_region *r : regions)
		delete r;
	if (wake >= 0)
		::close(wake);
}

// end_session ends everything of a session that has failed. The results of its operations are
// taken.
void agent::end_session()
{
	broken = true;
	each_channel([this](channel *c) {
		down(c, PEERLANE_STATUS_RELAY_DIED, peerlane_status_text(PEERLANE_STATUS_RELAY_DIED));
		free_buffers(c); // the memory ends with the session
	});
	inbounds.clear();
	others.clear();
	attempts.clear();
}

// revive dials again after the relay's death. Peers that have this agent's earlier connection
// information cannot use it: the relay's listeners are new.
void agent::revive()
{
	pthread_rwlock_wrlock(&sessions);
	pthread_mutex_lock(&lock);
	peerlane_session *before = session;
	session = nullptr;
	pthread_mutex_unlock(&lock);
	peerlane_close(before);
	bool made = dial(!before);
	if (made) {
		driver d;
		bool cuda = d.find();
		guard g(&lock);
		for (local_region *r : regions) {
			r->memory = 0;
			if (r->type != VRAM)
				continue;
			if (cuda)
				d.set(r->context);
			expose(r);
		}
		if (cuda)
			d.set(nullptr);
		broken = false;
		log("the session with the relay is back; peers need this agent's new metadata");
	}
	pthread_rwlock_unlock(&sessions);
}

// --- memory ---------------------------------------------------------------------------

// expose exports a region to the relay and exposes it to the listener of its lane.
bool agent::expose(local_region *r)
{
	const auto pointer = reinterpret_cast<const void *>(r->base);
	peerlane_memory memory = 0;
	uint32_t access = PEERLANE_REMOTE_READ | PEERLANE_REMOTE_WRITE;
	int status = peerlane_export_pointer(session, pointer, r->bytes, 0, &memory);
	std::string first = status ? peerlane_error() : "";

	if (status == PEERLANE_STATUS_CUDA) {
		status = peerlane_export_pointer_ipc(session, pointer, r->bytes, 0, &memory);
		if (status == PEERLANE_STATUS_NOT_PERMITTED)
			log("registering %zu bytes at %p: memory of cudaMalloc, which the relay does not accept: start vLLM with --enable-cumem-allocator, "
			    "or set relay.cuda_ipc = \"allow\" on a host of one tenant", r->bytes, pointer);
		else if (status)
			log("registering %zu bytes at %p: %s; as memory of cudaMalloc: %s", r->bytes, pointer, first.c_str(), peerlane_error());
	} else if (status) {
		log("registering %zu bytes at %p: %s", r->bytes, pointer, first.c_str());
	}
	if (status)
		return false;
	status = peerlane_expose(session, lanes[r->lane].listener, 0, memory, 0, r->bytes, access, &r->region, &r->key);
	if (status) {
		log("exposing %zu bytes at %p: %s", r->bytes, pointer, peerlane_error());
		peerlane_unexport(session, memory);
		return false;
	}
	r->memory = memory;
	return true;
}

status agent::add(const blob_descriptor &d, segment type, metadata *&out)
{
	if ((type != VRAM && type != DRAM) || !d.length || d.address + d.length < d.address)
		return type == VRAM || type == DRAM ? INVALID_PARAMETER : NOT_SUPPORTED;
	std::unique_ptr<local_region> r(new local_region(type, d.address, d.length));
	reader in_use(&sessions);
	if (type == VRAM) {
		peerlane_gpu gpu;
		driver driver;
		int device;

		if (!driver.find() || driver.device(&device, static_cast<int>(d.device)) || driver.uuid(&gpu, device)) {
			log("registering memory of GPU %llu: CUDA does not have this GPU in this process", static_cast<unsigned long long>(d.device));
			return INVALID_PARAMETER;
		}
		auto at = std::find_if(lanes.begin(), lanes.end(), [&](const lane &l) { return same(l.gpu, gpu); });
		if (at == lanes.end()) {
			log("registering memory of %s: the container has no lane of this GPU; start it with --device peerlane.dev/lane=%s", gpu_name(gpu).c_str(), gpu_name(gpu).c_str());
			return INVALID_PARAMETER;
		}
		r->lane = static_cast<unsigned>(at - lanes.begin());
		with_context current(driver, static_cast<int>(d.device));
		if (!session)
			return REMOTE_DISCONNECT;
		r->context = current.context;
		if (!expose(r.get()))
			return BACKEND_ERROR;
	}
	guard g(&lock);
	lanes[r->lane].used = lanes[r->lane].used || type == VRAM;
	regions.insert(r.get());
	out = r.release();
	return SUCCESS;
}

status agent::remove(metadata *m)
{
	std::unique_ptr<local_region> r(static_cast<local_region *>(m));
	reader in_use(&sessions);

	pthread_mutex_lock(&lock);
	regions.erase(r.get());
	pthread_mutex_unlock(&lock);
	/* Without the lock: the relay answers when no peer accesses the memory. */
	if (session && !broken && r->memory && peerlane_unexport(session, r->memory) && !broken)
		log("deregistering %zu bytes at %#zx: %s", r->bytes, static_cast<size_t>(r->base), peerlane_error());
	return SUCCESS;
}

uint8_t *agent::own_dram(uint64_t address, uint64_t length)
{
	for (local_region *r : regions)
		if (r->type == DRAM && address >= r->base && length <= r->bytes && address - r->base <= r->bytes - length)
			return reinterpret_cast<uint8_t *>(static_cast<uintptr_t>(address));
	return nullptr;
}

// --- progress -------------------------------------------------------------------------

// take_results takes all results of the session, and reports whether there were some.
bool agent::take_results()
{
	struct peerlane_result results[64];
	unsigned n = 0;
	bool some = false;

	do {
		if (peerlane_poll(session, results, 64, &n)) {
			if (!broken) {
				log("the session with the relay has failed: %s", peerlane_error());
				end_session();
			}
			return true;
		}
		some = some || n > 0;
		for (unsigned i = 0; i < n; i++) {
			auto o = reinterpret_cast<operation *>(static_cast<uintptr_t>(results[i].context));

			switch (o->is) {
			case operation::LIST:
				list_ended(static_cast<part *>(o), results[i]);
				break;
			case operation::SEND:
				send_ended(static_cast<send *>(o), results[i]);
				break;
			case operation::RECEIVE:
				receive_ended(static_cast<receive *>(o), results[i]);
				break;
			}
		}
	} while (n);
	if (some && starved) {
		std::vector<channel *> all;

		starved = false;
		each_channel([&](channel *c) { all.push_back(c); });
		for (channel *c : all)
			advance(c);
	}
	return some;
}

// progress does what is possible without a wait, and reports whether something was.
bool agent::progress()
{
	bool some = take_results();

	if (broken)
		return false;
	some = accept() || some;
	std::vector<channel *> all;
	each_channel([&](channel *c) { all.push_back(c); });
	for (channel *c : all) {
		if (c->state == channel::CONNECTING)
			some = finish(c) || some;
		if (!c->answers.empty())
			watch(c);
		if (!c->waiting.empty())
			advance(c);
		free_buffers(c);
	}
	for (size_t k = inbounds.size(); k-- > 0;)
		settle(*inbounds[k]);
	for (size_t k = attempts.size(); k-- > 0;) {
		peerlane_connection connection;
		int status = peerlane_connect_finish(session, attempts[k], 0, &connection);

		if (status == PEERLANE_STATUS_TIMED_OUT)
			continue;
		if (!status)
			peerlane_disconnect(session, connection);
		attempts.erase(attempts.begin() + static_cast<std::ptrdiff_t>(k));
	}
	for (auto p = others.begin(); p != others.end();) {
		if (!(*p)->closed || p->use_count() > 1) {
			++p;
			continue;
		}
		for (auto &c : (*p)->channels)
			free_buffers(c.get()); // settle has closed the peer since the loop above
		p = others.erase(p);
	}
	return some;
}

void agent::run()
{
	struct timespec begun = {0, 0};

	pthread_setname_np(pthread_self(), "peerlane-nixl");
	for (;;) {
		bool some = false, pending = false;
		uint64_t rung;

		waits_for_lock = true;
		pthread_mutex_lock(&lock);
		waits_for_lock = false;
		if (!broken)
			some = progress();
		if (stopping) {
			struct timespec now;

			/* Messages that were given to the agent arrive, if the peer takes them. */
			each_channel([&](channel *c) { pending = pending || c->sending || !c->waiting.empty(); });
			clock_gettime(CLOCK_MONOTONIC, &now);
			if (!begun.tv_sec)
				begun = now;
			if (broken || !pending || now.tv_sec - begun.tv_sec > 1) {
				pthread_mutex_unlock(&lock);
				return;
			}
		}
		bool dead = broken;
		pthread_mutex_unlock(&lock);
		if (some)
			continue;
		if (dead)
			revive();
		dead = broken;
		struct pollfd fds[2] = {{wake, POLLIN, 0}, {dead ? -1 : event, POLLIN, 0}};
		poll(fds, 2, dead ? 500 : begun.tv_sec ? 20 : -1);
		if (fds[0].revents && read(wake, &rung, sizeof rung) < 0 && errno != EAGAIN)
			log("reading an eventfd: %s", strerror(errno));
	}
}

} // namespace nixl
