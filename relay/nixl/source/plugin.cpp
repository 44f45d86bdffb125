// The table that NIXL loads, and the engine: the interface of NIXL before an agent.
#include "agent.h"

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <exception>
#include <link.h>

namespace nixl {

status engine::prepare_remote_view(const opaque &, void *&, const transfer_options *) const { return NOT_SUPPORTED; }
status engine::prepare_local_view(const list &, void *&, const transfer_options *) const { return NOT_SUPPORTED; }
void engine::release_view(void *) const {}
status engine::query_memory(const opaque &, opaque &) const { return NOT_SUPPORTED; }
status engine::estimate_cost(const direction &, const list &, const list &, const std::string &, request *const &, std::chrono::microseconds &,
	std::chrono::microseconds &, int &, const opaque *) const
{
	return NOT_SUPPORTED;
}

namespace {

class peerlane_engine final : public engine {
	const std::unique_ptr<agent> a;

	static std::string socket_of(const init_parameters *p)
	{
		const char *named = getenv("PEERLANE_SOCKET");
		auto custom = p->custom->find("socket");

		if (custom != p->custom->end() && !custom->second.empty())
			return custom->second;
		return named && *named ? named : PEERLANE_DEFAULT_SOCKET;
	}

public:
	explicit peerlane_engine(const init_parameters *p) : engine(p), a(new agent(p->agent, socket_of(p))) { failed = !a->open(); }

	bool supports_remote() const override { return true; }
	bool supports_local() const override { return false; }
	bool supports_notifications() const override { return true; }
	segments supported_segments() const override { return {DRAM, VRAM}; }

	status register_memory(const blob_descriptor &memory, const segment &type, metadata *&out) override { return a->add(memory, type, out); }
	status deregister_memory(metadata *m) override { return a->remove(m); }

	status connect(const std::string &name) override
	{
		guard g(&a->lock);
		auto found = a->peers.find(name);

		if (found == a->peers.end())
			return NOT_FOUND;
		a->any_channel(*found->second);
		return SUCCESS;
	}

	status disconnect(const std::string &name) override
	{
		a->forget(name);
		return SUCCESS;
	}

	status unload_metadata(metadata *m) override
	{
		delete static_cast<remote_region *>(m);
		return SUCCESS;
	}

	status prepare(const direction &d, const list &local, const list &remote, const std::string &name, request *&out,
		const transfer_options *) const override
	{
		std::unique_ptr<transfer> t(new transfer);
		guard g(&a->lock);
		auto found = a->peers.find(name);

		if (found == a->peers.end())
			return NOT_FOUND;
		t->way = d;
		t->to = found->second;
		status s = a->build(t.get(), local, remote);
		if (s == SUCCESS)
			out = t.release();
		return s;
	}

	status post(const direction &d, const list &local, const list &remote, const std::string &, request *&r, const transfer_options *options) const override
	{
		auto t = static_cast<transfer *>(r);
		guard g(&a->lock);

		if (t->state == IN_PROGRESS)
			return REPOST_ACTIVE;
		if (t->to->closed)
			return REMOTE_DISCONNECT;
		t->way = d;
		if (t->generation != a->generation) {
			status s = a->build(t, local, remote);
			if (s != SUCCESS)
				return s;
		}
		t->notifies = options && options->notify;
		if (t->notifies)
			t->message = options->message;
		a->begin(t);
		return static_cast<status>(t->state.load());
	}

	status check(request *r) const override
	{
		auto t = static_cast<transfer *>(r);

		/* A program that checks without a pause would keep the progress thread from the lock. */
		if (t->state == IN_PROGRESS && !a->waits_for_lock && pthread_mutex_trylock(&a->lock) == 0) {
			/* All of it: taking results also takes what wakes the progress thread. */
			if (!a->broken)
				a->progress();
			pthread_mutex_unlock(&a->lock);
		}
		return static_cast<status>(t->state.load());
	}

	status release(request *r) const override
	{
		auto t = static_cast<transfer *>(r);
		guard g(&a->lock);

		a->discard(t);
		return SUCCESS;
	}

	status public_data(const metadata *m, std::string &out) const override
	{
		auto r = static_cast<const local_region *>(m);
		guard g(&a->lock);

		out.clear(); // NIXL reuses one string for all regions of a list
		append(out, static_cast<uint32_t>(r->type));
		append(out, uint32_t{0});
		append(out, static_cast<uint64_t>(r->base));
		append(out, static_cast<uint64_t>(r->bytes));
		append(out, a->lanes[r->lane].gpu);
		append(out, r->key);
		return SUCCESS;
	}

	status connection_info(std::string &out) const override
	{
		guard g(&a->lock);

		out = a->info();
		return SUCCESS;
	}

	status load_connection_info(const std::string &name, const std::string &info) override { return a->load(name, info); }

	status load_remote_metadata(const blob_descriptor &memory, const segment &type, const std::string &name, metadata *&out) override
	{
		std::unique_ptr<remote_region> r(new remote_region);
		std::shared_ptr<remote_key> key(new remote_key);
		uint32_t kind, none;
		uint64_t base, bytes;
		size_t at = 0;

		if (!extract(memory.blob, at, kind) || !extract(memory.blob, at, none) || !extract(memory.blob, at, base) || !extract(memory.blob, at, bytes) ||
		    !extract(memory.blob, at, r->gpu) || !extract(memory.blob, at, key->key) || at != memory.blob.size() || kind != static_cast<uint32_t>(type)) {
			log("the metadata of a region of agent %s are of another version of Peerlane: install the same release on both hosts", printable(name).c_str());
			return MISMATCH;
		}
		r->type = type;
		r->base = base;
		r->bytes = bytes;
		r->key = std::move(key);
		guard g(&a->lock);
		auto found = a->peers.find(name);
		if (found == a->peers.end())
			return NOT_FOUND;
		/* Connections take longer than anything else of a first transfer. */
		for (unsigned far = 0; type == VRAM && far < found->second->lanes.size(); far++)
			for (unsigned near = 0; near < a->lanes.size(); near++)
				if (a->lanes[near].used && !memcmp(&found->second->lanes[far].gpu, &r->gpu, sizeof r->gpu))
					a->start(a->between(*found->second, near, far));
		out = r.release();
		return SUCCESS;
	}

	status load_local_metadata(metadata *, metadata *&) override { return NOT_SUPPORTED; }

	status take_notifications(notifications &out) override
	{
		guard g(&a->lock);

		for (auto &n : a->arrived)
			out.push_back(std::move(n));
		a->arrived.clear();
		return SUCCESS;
	}

	status notify(const std::string &name, const std::string &message) const override
	{
		guard g(&a->lock);
		auto found = a->peers.find(name);

		if (found == a->peers.end())
			return NOT_FOUND;
		if (a->broken)
			return REMOTE_DISCONNECT;
		channel *c = a->any_channel(*found->second);
		if (!c)
			return BACKEND_ERROR;
		a->queue_note(c, message, nullptr);
		a->advance(c);
		return SUCCESS;
	}
};

engine *create(const init_parameters *p)
{
	try {
		return new peerlane_engine(p);
	} catch (const std::exception &e) {
		log("creating the engine: %s", e.what());
		return nullptr;
	}
}

void destroy(engine *e) { delete e; }
const char *plugin_name() { return "PEERLANE"; }
const char *plugin_version() { return "1"; }
parameters options() { return {{"socket", PEERLANE_DEFAULT_SOCKET}}; }
segments memories() { return {DRAM, VRAM}; }

plugin table = {API_VERSION, create, destroy, plugin_name, plugin_version, options, memories};

// The function that NIXL 1.0.0 and later have, and no earlier release.
const char since_1[] = "_ZNK9nixlAgent14releaseMemViewEPv";

enum { NO_NIXL, OLD_NIXL, KNOWN_NIXL };

int look_at(struct dl_phdr_info *object, size_t, void *result)
{
	const char *base = strrchr(object->dlpi_name, '/');

	base = base ? base + 1 : object->dlpi_name;
	if (strncmp(base, "libnixl.so", 10) && strncmp(base, "libnixl-", 8))
		return 0;
	*static_cast<std::string *>(result) = object->dlpi_name;
	return 1;
}

int nixl_of_process()
{
	std::string path;

	dl_iterate_phdr(look_at, &path);
	void *library = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
	if (!library)
		return NO_NIXL;
	bool known = dlsym(library, since_1);
	dlclose(library);
	return known ? KNOWN_NIXL : OLD_NIXL;
}

} // namespace
} // namespace nixl

#define EXPORTED __attribute__((visibility("default")))

EXPORTED nixl::plugin *nixl_plugin_init()
{
	switch (nixl::nixl_of_process()) {
	case nixl::KNOWN_NIXL:
		return &nixl::table;
	case nixl::OLD_NIXL:
		nixl::log("this process has loaded a NIXL before 1.0.0, whose backend interface is another: install NIXL 1.0.0 or newer");
		return nullptr;
	}
	nixl::log("libnixl.so is not loaded in this process: only NIXL can load this plugin");
	return nullptr;
}

EXPORTED void nixl_plugin_fini() {}
