/* A tuner that forbids LL128 between nodes: its kernels need 128 bytes to arrive as
 * one, and copies of host slots and of staging promise 8. LL needs no more. Between the
 * GPUs of one node nothing of ours is in the way. Everything else is NCCL's to choose.
 *
 * NCCL looks for a tuner in this library where no other is named. Before 2.22 it knows
 * none that could forbid anything: then NCCL_PROTO has to. */
#include "plugin.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define EXPORTED __attribute__((visibility("default")))

static char one, several; /* the two contexts: how many nodes a communicator has */

static int init_4(size_t ranks, size_t nodes, nccl_logger logger, void **context)
{
	(void)ranks, (void)logger;
	*context = nodes > 1 ? &several : &one;
	return NCCL_SUCCESS;
}

static int init_5(void **context, uint64_t id, size_t ranks, size_t nodes, nccl_logger logger, void *domains, void *constants)
{
	(void)id, (void)domains, (void)constants;
	return init_4(ranks, nodes, logger, context);
}

static int collective(void *context, int kind, size_t bytes, int pipelined, float **costs, int algorithms, int protocols, int registered, int *channels)
{
	/* It points to a matrix, whatever its type says. */
	float *cost = (float *)(void *)costs;

	(void)kind, (void)bytes, (void)pipelined, (void)registered, (void)channels;
	for (int i = 0; context == &several && protocols > NCCL_PROTOCOL_LL128 && i < algorithms; i++)
		cost[i * protocols + NCCL_PROTOCOL_LL128] = NCCL_COST_NEVER;
	return NCCL_SUCCESS;
}

static int collective_3(void *context, int kind, size_t bytes, int pipelined, float **costs, int algorithms, int protocols, int *channels)
{
	return collective(context, kind, bytes, pipelined, costs, algorithms, protocols, 0, channels);
}

static int end(void *context)
{
	(void)context;
	return NCCL_SUCCESS;
}

extern const struct nccl_tuner_v3 ncclTunerPlugin_v3;
extern const struct nccl_tuner_v4 ncclTunerPlugin_v4;
extern const struct nccl_tuner_v5 ncclTunerPlugin_v5;

EXPORTED const struct nccl_tuner_v3 ncclTunerPlugin_v3 = {NAME, init_4, collective_3, end};
EXPORTED const struct nccl_tuner_v4 ncclTunerPlugin_v4 = {NAME, init_4, collective, end};
EXPORTED const struct nccl_tuner_v5 ncclTunerPlugin_v5 = {NAME, init_5, collective, end};

#define FIRST_WITH_TUNER 22200 /* as ncclGetVersion() has it */

/* version_of is the release of NCCL that a function of its is in, 0 if it does not say. */
static int version_of(nccl_logger logger)
{
	Dl_info in;
	void *library;
	int (*get)(int *), version = 0;

	if (!dladdr((void *)logger, &in) || !(library = dlopen(in.dli_fname, RTLD_NOW | RTLD_NOLOAD))) {
		/* A program that has NCCL in itself has another name for the loader. */
		library = RTLD_DEFAULT;
	}
	*(void **)&get = dlsym(library, "ncclGetVersion");
	if (!get || get(&version))
		version = 0;
	if (library)
		dlclose(library);
	return version;
}

/* excluded says whether NCCL_PROTO, a list of protocols or "^" and a list of others,
 * leaves LL128 out. */
static bool excluded(const char *protocols)
{
	bool inverted = protocols && *protocols == '^', named = false;
	char list[256] = "", *rest = NULL;

	if (!protocols || !*protocols)
		return false;
	strncpy(list, protocols + inverted, sizeof list - 1);
	for (char *word = strtok_r(list, ",", &rest); word; word = strtok_r(NULL, ",", &rest))
		named = named || !strcasecmp(word, "LL128");
	return named == inverted;
}

int check_ll128(nccl_logger logger)
{
	int version = version_of(logger);

	if (!version || version >= FIRST_WITH_TUNER || excluded(getenv("NCCL_PROTO")))
		return NCCL_SUCCESS;
	warn("NCCL %d.%d takes no tuner of this plugin's, which would keep LL128 from being used between nodes, where its data can be wrong: set NCCL_PROTO=^LL128, on all ranks",
		version / 10000, version / 100 % 100);
	return NCCL_INVALID_USAGE;
}
