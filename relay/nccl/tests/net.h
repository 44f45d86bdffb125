/* One way to call each version of the plugin's table. */
#ifndef NET_H
#define NET_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "abi.h"

static struct {
	int version;
	void *context;
	const struct nccl_net_v8 *v8;
	const struct nccl_net_v9 *v9;
	const struct nccl_net_v10 *v10;
	const struct nccl_net_v11 *v11;
	const struct nccl_net_v12 *v12;
} net;

#define EACH(call8, call9, call10, call11, call12) \
	(net.version == 8 ? call8 : net.version == 9 ? call9 : net.version == 10 ? call10 : net.version == 11 ? call11 : call12)
#define ALL(call) EACH(net.v8->call, net.v9->call, net.v10->call, net.v11->call, net.v12->call)

static inline int net_load(const char *path, int version)
{
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL), *table;
	char symbol[32];

	snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", version);
	if (!library || !(table = dlsym(library, symbol))) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
	net.version = version;
	net.v8 = table, net.v9 = table, net.v10 = table, net.v11 = table, net.v12 = table;
	return 0;
}

static inline int net_init(nccl_logger logger)
{
	return EACH(net.v8->init(logger), net.v9->init(logger), net.v10->init(logger, NULL), net.v11->init(&net.context, 1, NULL, logger, NULL),
		net.v12->init(&net.context, 1, NULL, logger, NULL));
}

static inline int net_finalize(void) { return EACH(0, 0, 0, net.v11->finalize(net.context), net.v12->finalize(net.context)); }

static inline int net_listen(int device, void *handle, void **listener)
{
	return EACH(net.v8->listen(device, handle, listener), net.v9->listen(device, handle, listener), net.v10->listen(device, handle, listener),
		net.v11->listen(net.context, device, handle, listener), net.v12->listen(net.context, device, handle, listener));
}

static inline int net_connect(int device, void *handle, void **communicator)
{
	void *on_device = NULL;

	return EACH(net.v8->connect(device, handle, communicator, &on_device), net.v9->connect(device, handle, communicator, &on_device),
		net.v10->connect(device, NULL, handle, communicator, &on_device), net.v11->connect(net.context, device, handle, communicator, &on_device),
		net.v12->connect(net.context, device, handle, communicator, &on_device));
}

static inline int net_send(void *communicator, void *data, size_t bytes, int tag, void *memory, void **request)
{
	return EACH(net.v8->send(communicator, data, (int)bytes, tag, memory, request), net.v9->send(communicator, data, bytes, tag, memory, request),
		net.v10->send(communicator, data, bytes, tag, memory, NULL, request), net.v11->send(communicator, data, bytes, tag, memory, NULL, request),
		net.v12->send(communicator, data, bytes, tag, memory, NULL, request));
}

static inline int net_receive(void *communicator, int n, void **data, size_t *sizes, int *tags, void **memories, void **request)
{
	int narrow[NCCL_MAX_RECEIVES + 1];

	for (int i = 0; i < n && i <= NCCL_MAX_RECEIVES; i++)
		narrow[i] = (int)sizes[i];
	return EACH(net.v8->receive(communicator, n, data, narrow, tags, memories, request), net.v9->receive(communicator, n, data, sizes, tags, memories, request),
		net.v10->receive(communicator, n, data, sizes, tags, memories, NULL, request),
		net.v11->receive(communicator, n, data, sizes, tags, memories, NULL, request),
		net.v12->receive(communicator, n, data, sizes, tags, memories, NULL, request));
}

#endif
