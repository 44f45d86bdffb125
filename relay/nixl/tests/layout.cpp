// Prints sizes and offsets of what the plugin shares with NIXL, values, and the places of the
// engine's virtual functions (Itanium C++ ABI). Compiled without access control.
#include <cstdio>
#include <cstring>

#include "abi.h"

using namespace nixl;

#define SIZE(type) printf("%s %zu", #type, sizeof(type))
#define AT(type, member) printf(" %zu", __builtin_offsetof(type, member))
#define END() puts("")
#define SLOT(name) slot(#name, &engine::name)

template <class P> static void slot(const char *name, P pointer)
{
	size_t word;

	memcpy(&word, &pointer, sizeof word);
	printf("%s %zu\n", name, (word & ~size_t{1}) / sizeof(void *));
}

int main()
{
	SIZE(plugin), AT(plugin, api_version), AT(plugin, create), AT(plugin, destroy), AT(plugin, name), AT(plugin, version), AT(plugin, options), AT(plugin, memories), END();
	SIZE(init_parameters), AT(init_parameters, agent), AT(init_parameters, type), AT(init_parameters, custom), AT(init_parameters, progress_thread),
		AT(init_parameters, progress_delay), AT(init_parameters, sync_mode), AT(init_parameters, telemetry), END();
	SIZE(transfer_options), AT(transfer_options, message), AT(transfer_options, notify), AT(transfer_options, custom), END();
	SIZE(metadata), AT(metadata, is_private), END();
	SIZE(request), END();
	SIZE(blob_descriptor), AT(blob_descriptor, address), AT(blob_descriptor, length), AT(blob_descriptor, device), AT(blob_descriptor, blob), END();
	SIZE(meta_descriptor), AT(meta_descriptor, address), AT(meta_descriptor, length), AT(meta_descriptor, device), AT(meta_descriptor, meta), END();
	SIZE(list), AT(list, type), AT(list, entries), END();
	SIZE(engine), AT(engine, failed), AT(engine, agent_name), AT(engine, telemetry), END();
	printf("values %d %d %d %d %d %d %d %d %d %d %d %d %d\n", API_VERSION, DRAM, VRAM, READ, WRITE, IN_PROGRESS, SUCCESS, INVALID_PARAMETER, BACKEND_ERROR,
		NOT_FOUND, MISMATCH, REPOST_ACTIVE, NOT_SUPPORTED);
	printf("more_values %d %d\n", REMOTE_DISCONNECT, CANCELED);
	SLOT(supports_remote), SLOT(supports_local), SLOT(supports_notifications), SLOT(supported_segments), SLOT(register_memory), SLOT(deregister_memory);
	SLOT(connect), SLOT(disconnect), SLOT(unload_metadata), SLOT(prepare), SLOT(post), SLOT(check), SLOT(release), SLOT(prepare_remote_view);
	SLOT(prepare_local_view), SLOT(release_view), SLOT(public_data), SLOT(connection_info), SLOT(load_connection_info), SLOT(load_remote_metadata);
	SLOT(load_local_metadata), SLOT(take_notifications), SLOT(notify), SLOT(query_memory), SLOT(estimate_cost);
	return 0;
}
