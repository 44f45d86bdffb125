/* Prints sizes and offsets of what the plugin shows to NCCL: a line for each structure,
 * its name, its size, and the offset of each member. */
#include <stdio.h>

#include "abi.h"

#define SIZE(type) printf("%s %zu", #type, sizeof(struct type))
#define AT(type, member) printf(" %zu", offsetof(struct type, member))
#define END() puts("")

#define HEAD(T) SIZE(T), AT(T, name), AT(T, init), AT(T, devices), AT(T, properties), AT(T, listen), AT(T, connect), AT(T, accept), \
	AT(T, register_memory), AT(T, register_dmabuf), AT(T, deregister), AT(T, send), AT(T, receive), AT(T, flush), AT(T, test), \
	AT(T, close_send), AT(T, close_receive), AT(T, close_listen), AT(T, device_memory), AT(T, receive_consumed)
#define FIRST(T) SIZE(T), AT(T, name), AT(T, pci_path), AT(T, guid), AT(T, pointers), AT(T, registration_is_global)
#define SECOND(T) AT(T, speed), AT(T, port), AT(T, latency), AT(T, max_communicators), AT(T, max_receives), AT(T, device_type), AT(T, device_version)
#define THIRD(T) AT(T, of), AT(T, max_p2p_bytes), AT(T, max_collective_bytes)
#define TUNER(T, last) SIZE(T), AT(T, name), AT(T, init), AT(T, collective), AT(T, last), END()

int main(void)
{
	HEAD(nccl_net_v8), END();
	HEAD(nccl_net_v9), AT(nccl_net_v9, make_device), END();
	HEAD(nccl_net_v10), AT(nccl_net_v10, make_device), END();
	HEAD(nccl_net_v11), AT(nccl_net_v11, make_device), AT(nccl_net_v11, finalize), AT(nccl_net_v11, set_attributes), END();
	HEAD(nccl_net_v12), AT(nccl_net_v12, make_device), AT(nccl_net_v12, finalize), AT(nccl_net_v12, set_attributes), END();
	FIRST(nccl_net_properties_v8), SECOND(nccl_net_properties_v8), END();
	FIRST(nccl_net_properties_v9), AT(nccl_net_properties_v9, force_flush), SECOND(nccl_net_properties_v9), THIRD(nccl_net_properties_v9), END();
	FIRST(nccl_net_properties_v11), AT(nccl_net_properties_v11, force_flush), SECOND(nccl_net_properties_v11), THIRD(nccl_net_properties_v11),
		AT(nccl_net_properties_v11, max_multi_request), END();
	FIRST(nccl_net_properties_v12), AT(nccl_net_properties_v12, force_flush), SECOND(nccl_net_properties_v12), THIRD(nccl_net_properties_v12),
		AT(nccl_net_properties_v12, max_multi_request), AT(nccl_net_properties_v12, rail), AT(nccl_net_properties_v12, plane), END();
	TUNER(nccl_tuner_v3, destroy);
	TUNER(nccl_tuner_v4, destroy);
	TUNER(nccl_tuner_v5, finalize);
	return 0;
}
