/* alone PLUGIN [GPU]: what the plugin says to one process, which is NCCL of the release
 * that ALONE_NCCL says, by its table 8, or else 12: at init, of its devices, and
 * of its tuner; and where it has a GPU and a relay, of memory of each kind. */
#include <stdarg.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "gpu.h"
#include "net.h"

static void logger(int level, unsigned long flags, const char *file, int at, const char *format, ...)
{
	va_list arguments;

	(void)flags, (void)file, (void)at;
	va_start(arguments, format);
	printf("%s: ", level == NCCL_LOG_WARN ? "warn" : "info");
	vprintf(format, arguments);
	puts("");
	va_end(arguments);
}

int ncclGetVersion(int *version)
{
	const char *text = getenv("ALONE_NCCL");

	*version = text ? atoi(text) : 0;
	return 0;
}

static void tune(const char *path)
{
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	const struct nccl_tuner_v3 *v3 = dlsym(library, "ncclTunerPlugin_v3");
	const struct nccl_tuner_v4 *v4 = dlsym(library, "ncclTunerPlugin_v4");
	const struct nccl_tuner_v5 *v5 = dlsym(library, "ncclTunerPlugin_v5");

	for (int version = 3; version <= 5; version++)
		for (size_t nodes = 1; nodes <= 2; nodes++) {
			float cost[7][3];
			void *context = NULL;
			int channels = 5, result = version == 3 ? v3->init(8, nodes, logger, &context) : version == 4 ? v4->init(8, nodes, logger, &context) : v5->init(&context, 1, 8, nodes, logger, NULL, NULL);

			for (int i = 0; i < 21; i++)
				cost[i / 3][i % 3] = (float)i;
			if (version == 3)
				result += v3->collective(context, 4, 1 << 20, 1, (float **)(void *)cost, 7, 3, &channels);
			else
				result += (version == 4 ? v4->collective : v5->collective)(context, 4, 1 << 20, 1, (float **)(void *)cost, 7, 3, 0, &channels);
			printf("tuner %d, %zu nodes: %d %d:", version, nodes, result, channels);
			for (int i = 0; i < 21; i++)
				printf(" %g", (double)cost[i / 3][i % 3]);
			puts("");
			(version == 3 ? v3->destroy : version == 4 ? v4->destroy : v5->finalize)(context);
		}
}

static const void *symbol(const char *path, const char *name) { return dlsym(dlopen(path, RTLD_NOW | RTLD_LOCAL), name); }

/* tune_by_size prints the algorithm and protocol that are cheapest after the tuner, as NCCL
 * takes them, and its channels (0: NCCL's own), for collectives of 2 and of 8 ranks. */
static void tune_by_size(const char *path)
{
	static const char *const collectives[] = {"broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce"};
	static const char *const algorithms[] = {"tree", "ring", "collnet", "chain", "nvls", "nvlstree", "pat"}, *const protocols[] = {"LL", "LL128", "Simple"};
	static const char *const tables[] = {"ring first", "tree first", "pat first", "LL alone"};
	const struct nccl_tuner_v3 *v3 = symbol(path, "ncclTunerPlugin_v3");
	const struct nccl_tuner_v4 *v4 = symbol(path, "ncclTunerPlugin_v4");
	const struct nccl_tuner_v5 *v5 = symbol(path, "ncclTunerPlugin_v5");

	for (int version = 3; version <= 5; version++)
		for (size_t ranks = 2; ranks <= 8; ranks *= 4)
			for (int table = 0; table < 4; table++)
				for (int kind = 0; kind < 5; kind++) {
					void *context = NULL;
					int result = version == 3 ? v3->init(ranks, 2, logger, &context) : version == 4 ? v4->init(ranks, 2, logger, &context) : v5->init(&context, 1, ranks, 2, logger, NULL, NULL);
					int before[3] = {-1, -1, -1};

					printf("tuned %d, %zu ranks, %s, %s: %d", version, ranks, tables[table], collectives[kind], result);
					/* Each change, with the bytes at which it comes. */
					for (size_t bytes = 1 << 10; bytes <= (size_t)1 << 30; bytes *= 2)
						for (size_t more = 0; more < 2; more++) {
							float cost[7][3];
							int channels = 0, best[2] = {-1, -1};

							for (int i = 0; i < 21; i++) /* LL, LL128, Simple, each of ring, tree, PAT */
								cost[i / 3][i % 3] = i / 3 == 0 ? (table == 1 ? 1.0f : 4.0f) + (float)(i % 3) * 0.1f : i / 3 == 1 ? 2.0f + (float)(i % 3) * 0.1f : -1.0f;
							cost[6][2] = table == 2 ? 1.0f : 9.0f;
							for (int i = 0; table == 3 && i < 7; i++)
								cost[i][1] = cost[i][2] = -1.0f;
							if (version == 3)
								result = v3->collective(context, kind, bytes + more, 1, (float **)(void *)cost, 7, 3, &channels);
							else
								result = (version == 4 ? v4->collective : v5->collective)(context, kind, bytes + more, 1, (float **)(void *)cost, 7, 3, 0, &channels);
							if (result)
								exit(1);
							for (int i = 0; i < 21; i++)
								if (cost[i / 3][i % 3] >= 0 && (best[0] < 0 || cost[i / 3][i % 3] < cost[best[0]][best[1]]))
									best[0] = i / 3, best[1] = i % 3;
							if (best[0] == before[0] && best[1] == before[1] && channels == before[2])
								continue;
							before[0] = best[0], before[1] = best[1], before[2] = channels;
							if (best[0] < 0)
								printf("; %zu none", bytes + more);
							else
								printf("; %zu %s %s %d", bytes + more, algorithms[best[0]], protocols[best[1]], channels);
						}
					puts("");
					(version == 3 ? v3->destroy : version == 4 ? v4->destroy : v5->finalize)(context);
				}
}

static void connect_myself(void **sends, void **receives)
{
	void *listener;
	char handle[NCCL_HANDLE_BYTES];
	time_t since = time(NULL);

	*sends = *receives = NULL;
	if (net_listen(0, handle, &listener))
		exit(1);
	while ((!*sends && !net_connect(0, handle, sends)) || (!*receives && !ALL(accept(listener, receives, NULL))))
		if ((*sends && *receives) || time(NULL) - since > 60)
			break;
	if (!*sends || !*receives)
		exit(1);
	ALL(close_listen(listener));
}

/* count begins as much as there is room for: groups of eight receives, and sends that
 * nobody receives. All end with their communicators. */
static void count(void *sends, void *receives, void *data, void *of_sends, void *of_receives)
{
	void *all[NCCL_MAX_RECEIVES], *memories[NCCL_MAX_RECEIVES], *request;
	size_t sizes[NCCL_MAX_RECEIVES];
	int tags[NCCL_MAX_RECEIVES], groups = 0, sent = 0;

	for (int i = 0; i < NCCL_MAX_RECEIVES; i++)
		all[i] = data, memories[i] = of_receives, sizes[i] = 8, tags[i] = 1000 + i;
	do {
		request = NULL;
		if (net_receive(receives, NCCL_MAX_RECEIVES, all, sizes, tags, memories, &request))
			break;
		groups += request != NULL;
	} while (request);
	do {
		request = NULL;
		if (net_send(sends, data, 8, 2000, of_sends, &request))
			break;
		sent += request != NULL;
	} while (request);
	printf("at once: %d groups, %d sends\n", groups, sent);
}

/* reuse frees memory that is registered, has other memory at its address, registers that,
 * and looks which of the two is sent. */
static void reuse(const struct gpu *gpu, void *sends, void *receives, void *library)
{
	int (*unmap)(uint64_t, size_t) = (int (*)(uint64_t, size_t))dlsym(library, "cuMemUnmap");
	struct gpu_allocation_properties properties = {.type = 1, .handle_types = 1, .location = {1, gpu->device}};
	struct gpu_access access = {{1, gpu->device}, 3};
	struct gpu_memory m = gpu_allocate(gpu, 2 << 20);
	uint64_t old = 1, fresh = 2, got = 0, handle;
	void *data = (void *)(uintptr_t)m.address, *here = &got, *before, *after, *host, *sent = NULL, *received = NULL;
	size_t size = sizeof got;
	int tag = 777, done = 0;
	time_t since = time(NULL);

	gpu_write(gpu, m.address, &old, sizeof old);
	printf("before: %d", ALL(register_memory(sends, data, 4096, NCCL_POINTER_CUDA, &before)));
	gpu_check(unmap(m.address, m.bytes), "cuMemUnmap");
	gpu_check(cuda.create(&handle, m.bytes, &properties, 0), "cuMemCreate");
	gpu_check(cuda.map(m.address, m.bytes, 0, handle, 0), "cuMemMap");
	gpu_check(cuda.access(m.address, m.bytes, &access, 1), "cuMemSetAccess");
	gpu_write(gpu, m.address, &fresh, sizeof fresh);
	printf(", other memory there: %d", ALL(register_memory(sends, data, 4096, NCCL_POINTER_CUDA, &after)));
	printf(" %s\n", after == before ? "once" : "anew");
	if (ALL(register_memory(receives, here, size, NCCL_POINTER_HOST, &host)) || net_receive(receives, 1, &here, &size, &tag, &host, &received) ||
		net_send(sends, data, size, tag, after, &sent))
		exit(1);
	for (int both = 0; both < 2 && time(NULL) - since < 60; both += done)
		if (ALL(test(both ? sent : received, &done, NULL)))
			exit(1);
	printf("sent from there: %s\n", got == fresh ? "the other memory" : got == old ? "the memory before" : "nothing");
	ALL(deregister(receives, host));
	ALL(deregister(sends, after));
	ALL(deregister(sends, before));
}

static void registers(const char *uuid)
{
	peerlane_gpu wanted = {{0}};
	uint64_t plain;
	void *sends, *receives, *vmm = NULL, *other = NULL, *library = dlopen(getenv("PEERLANE_CUDA_LIBRARY"), RTLD_NOW);
	int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(library, "cuMemAlloc_v2");
	void *request = NULL, *nine[9] = {NULL};
	int digits = 0;

	for (const char *p = uuid + 4; *p; p++)
		if (*p != '-') {
			const char pair[2] = {*p, 0};

			wanted.bytes[digits / 2] = (uint8_t)(wanted.bytes[digits / 2] << 4 | strtoul(pair, NULL, 16));
			digits++;
		}
	struct gpu gpu = gpu_use(&wanted);
	struct gpu_memory m = gpu_allocate(&gpu, 2 << 20);

	gpu_check(allocate(&plain, 2 << 20), "cuMemAlloc");
	connect_myself(&sends, &receives);
	printf("cudaMalloc's alone: %d\n", ALL(register_memory(sends, (void *)(uintptr_t)plain, 4096, NCCL_POINTER_CUDA, &other)));
	ALL(deregister(sends, other));
	printf("VMM: %d\n", ALL(register_memory(sends, (void *)(uintptr_t)m.address, 4096, NCCL_POINTER_CUDA, &vmm)));
	printf("the same again: %d", ALL(register_memory(sends, (void *)(uintptr_t)m.address, 4096, NCCL_POINTER_CUDA, &other)));
	printf(" %s\n", other == vmm ? "once" : "anew");
	ALL(deregister(sends, other));
	printf("a send out of it: %d\n", net_send(sends, (void *)(uintptr_t)m.address, 8, 1, vmm, &request));
	printf("to receive: %d", ALL(register_memory(receives, (void *)(uintptr_t)m.address, 4096, NCCL_POINTER_CUDA, &other)));
	printf(" %s\n", other == vmm ? "once" : "anew");
	ALL(deregister(receives, other));
	printf("cudaMalloc's beside it: %d\n", ALL(register_memory(sends, (void *)(uintptr_t)plain, 4096, NCCL_POINTER_CUDA, &other)));
	printf("another kind: %d\n", ALL(register_memory(sends, (void *)(uintptr_t)plain, 4096, 4, &other)));
	size_t sizes[9] = {0};
	int tags[9] = {0};
	request = &m;
	printf("beyond it: %d", net_send(sends, (void *)(uintptr_t)(m.address + 4000), 97, 1, vmm, &request));
	printf(" %s\n", request ? "a request" : "no request");
	printf("a group of nine: %d\n", net_receive(receives, 9, nine, sizes, tags, nine, &request));
	printf("too much host memory: %d\n", ALL(register_memory(sends, sizes, (size_t)1 << 50, NCCL_POINTER_HOST, &other)));
	printf("a send after it: %d\n", net_send(sends, (void *)(uintptr_t)m.address, 8, 1, vmm, &request));
	ALL(register_memory(receives, (void *)(uintptr_t)m.address, 4096, NCCL_POINTER_CUDA, &other));
	reuse(&gpu, sends, receives, library);
	count(sends, receives, (void *)(uintptr_t)m.address, vmm, other);
	ALL(deregister(receives, other));
	ALL(deregister(sends, vmm));
	ALL(close_send(sends));
	ALL(close_receive(receives));
}

int main(int argc, char **argv)
{
	struct nccl_net_properties_v12 p;
	void *listener = NULL;
	char handle[NCCL_HANDLE_BYTES];
	int result, n = 0;

	if (argc < 2)
		return 2;
	tune(argv[1]);
	gpu_open();
	net_load(argv[1], getenv("ALONE_NCCL") ? 8 : 12);
	printf("name %s\n", net.v12->name);
	result = net_init(logger);
	printf("init: %d\n", result);
	if (result || net.version == 8) {
		printf("finalize: %d\n", net_finalize()); /* as NCCL 2.28 does */
		return 0;
	}
	result = ALL(devices(&n));
	printf("devices: %d %d\n", result, n);
	result = net.v12->properties(0, &p);
	printf("properties: %d %s pointers %d speed %d receives %d of %d %d\n", result, p.name, p.pointers, p.speed, p.max_receives, p.of.count, p.of.device[0]);
	printf("topology: %s\n", getenv("NCCL_TOPO_FILE") ? getenv("NCCL_TOPO_FILE") : "none");
	for (int i = 0; i < 2; i++) {
		static const char *const variables[] = {"NCCL_BUFFSIZE", "NCCL_P2P_NET_CHUNKSIZE"};

		printf("%s: %s\n", variables[i], getenv(variables[i]) ? getenv(variables[i]) : "none");
	}
	if (getenv("ALONE_TUNER"))
		tune_by_size(argv[1]);
	printf("nic: guid %#llx port %d\n", (unsigned long long)p.guid, p.port);
	printf("properties of the next: %d\n", net.v12->properties(n, &p));
	result = net_listen(0, handle, &listener);
	printf("listen: %d %s\n", result, listener ? "a listener" : "no listener");
	if (listener)
		ALL(close_listen(listener));
	if (argc > 2)
		registers(argv[2]);
	printf("finalize: %d\n", net_finalize());
	return 0;
}
