// The backend interface of NIXL 1.0.0 to 1.4.0, declared anew for this plugin: the order of the
// virtual functions and the layout of the parameters. A test compares sizes, offsets and the order
// with those that compilers find in NIXL's own headers (testdata/interface.txt). Sizes are bytes.
#ifndef NIXL_ABI_H
#define NIXL_ABI_H

#include "glibc.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace nixl {

// The version in the table of every release, also of those with another interface.
constexpr int API_VERSION = 1;

// nixl_mem_t
enum segment : int { DRAM = 0, VRAM = 1 };

// nixl_xfer_op_t
enum direction : int { READ = 0, WRITE = 1 };

// nixl_status_t
enum status : int {
	IN_PROGRESS = 1,
	SUCCESS = 0,
	INVALID_PARAMETER = -2,
	BACKEND_ERROR = -3,
	NOT_FOUND = -4,
	MISMATCH = -5,
	REPOST_ACTIVE = -7,
	NOT_SUPPORTED = -9,
	REMOTE_DISCONNECT = -10,
	CANCELED = -11,
};

using parameters = std::unordered_map<std::string, std::string>;
using segments = std::vector<segment>;
using notifications = std::vector<std::pair<std::string, std::string>>; // agent, message

// nixlBackendInitParams
struct init_parameters {
	std::string agent;
	std::string type;
	parameters *custom;
	bool progress_thread;
	uint64_t progress_delay; // µs
	int sync_mode;
	bool telemetry;
};

// nixlBackendOptionalArgs
struct transfer_options {
	std::string message;
	bool notify = false;
	std::string custom;
};

// nixlBackendMD
struct metadata {
	bool is_private;

	explicit metadata(bool of_this_agent) : is_private(of_this_agent) {}
	virtual ~metadata() = default;
};

// nixlBackendReqH
struct request {
	virtual ~request() = default;
};

// nixlBasicDesc
struct descriptor {
	uintptr_t address;
	size_t length;
	uint64_t device;
};

// nixlBlobDesc
struct blob_descriptor : descriptor {
	std::string blob;
};

// nixlMetaDesc
struct meta_descriptor : descriptor {
	metadata *meta;
};

// nixlDescList: the plugin only reads lists that NIXL made.
struct list {
	const void *functions;
	segment type;
	std::vector<meta_descriptor> entries;
};

struct event; // of telemetry: the plugin records none
struct opaque;

// nixlBackendEngine. NIXL calls the virtual functions by their place.
class engine {
	std::string type_;
	parameters custom_;
	std::vector<event *> events_;
	std::mutex events_lock_;

protected:
	bool failed = false; // NIXL refuses the engine
	const std::string agent_name;
	const bool telemetry;

public:
	explicit engine(const init_parameters *p) : type_(p->type), custom_(*p->custom), agent_name(p->agent), telemetry(p->telemetry) {}
	engine(const engine &) = delete;
	engine &operator=(const engine &) = delete;

	virtual ~engine() = default;
	virtual bool supports_remote() const = 0;
	virtual bool supports_local() const = 0;
	virtual bool supports_notifications() const = 0;
	virtual segments supported_segments() const = 0;
	virtual status register_memory(const blob_descriptor &memory, const segment &type, metadata *&out) = 0;
	virtual status deregister_memory(metadata *m) = 0;
	virtual status connect(const std::string &agent) = 0;
	virtual status disconnect(const std::string &agent) = 0;
	virtual status unload_metadata(metadata *m) = 0;
	virtual status prepare(const direction &d, const list &local, const list &remote, const std::string &agent, request *&out,
		const transfer_options *options) const = 0;
	virtual status post(const direction &d, const list &local, const list &remote, const std::string &agent, request *&r,
		const transfer_options *options) const = 0;
	virtual status check(request *r) const = 0;
	virtual status release(request *r) const = 0;
	virtual status prepare_remote_view(const opaque &list, void *&view, const transfer_options *options) const;
	virtual status prepare_local_view(const list &entries, void *&view, const transfer_options *options) const;
	virtual void release_view(void *view) const;
	virtual status public_data(const metadata *m, std::string &out) const = 0;
	virtual status connection_info(std::string &out) const = 0;
	virtual status load_connection_info(const std::string &agent, const std::string &info) = 0;
	virtual status load_remote_metadata(const blob_descriptor &memory, const segment &type, const std::string &agent, metadata *&out) = 0;
	virtual status load_local_metadata(metadata *in, metadata *&out) = 0;
	virtual status take_notifications(notifications &out) = 0;
	virtual status notify(const std::string &agent, const std::string &message) const = 0;
	virtual status query_memory(const opaque &list, opaque &out) const;
	virtual status estimate_cost(const direction &d, const list &local, const list &remote, const std::string &agent, request *const &r,
		std::chrono::microseconds &duration, std::chrono::microseconds &margin, int &method, const opaque *options) const;
};

// nixlBackendPlugin
struct plugin {
	int api_version;
	engine *(*create)(const init_parameters *p);
	void (*destroy)(engine *e);
	const char *(*name)();
	const char *(*version)();
	parameters (*options)();
	segments (*memories)();
};

} // namespace nixl

extern "C" {
nixl::plugin *nixl_plugin_init();
void nixl_plugin_fini();
}

#endif
