/* A tuner. It forbids LL128 between nodes: LL128's kernels need 128 bytes to arrive as
 * one, and copies of host slots and of staging promise 8. LL needs no more. Between the
 * GPUs of one node NCCL's own transports carry the data. Where all lanes reach only this
 * host, it also limits LL and channels by size. NCCL chooses the rest.
 *
 * NCCL looks for a tuner in this library where no other is named. Before 2.22 it knows
 * none that could forbid anything: then NCCL_PROTO has to. */
#include "plugin.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define EXPORTED __attribute__((visibility("default")))

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

/* Of one communicator. */
struct tuner {
	size_t ranks;
	bool networked;    /* several nodes: there is a network between ranks */
	bool local;        /* which is lanes that reach only this host */
	bool set_channels; /* and the user has not chosen channels */
};

bool channels_are_set(void)
{
	static const char *const of_channels[] = {"NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NRINGS", "NCCL_MAX_NRINGS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"};

	for (size_t i = 0; i < sizeof of_channels / sizeof *of_channels; i++)
		if (getenv(of_channels[i]))
			return true;
	return false;
}

static int init_4(size_t ranks, size_t nodes, nccl_logger logger, void **context)
{
	struct tuner *t = calloc(1, sizeof *t);

	(void)logger;
	if (!t)
		return NCCL_SYSTEM_ERROR;
	t->ranks = ranks ? ranks : 1;
	t->networked = nodes > 1;
	t->local = t->networked && lanes_are_local();
	t->set_channels = t->local && !channels_are_set();
	*context = t;
	return NCCL_SUCCESS;
}

static int init_5(void **context, uint64_t id, size_t ranks, size_t nodes, nccl_logger logger, void *domains, void *constants)
{
	(void)id, (void)domains, (void)constants;
	return init_4(ranks, nodes, logger, context);
}

/* A relay's copy queue takes some 10 us for a message of any size, and NCCL expects a NIC
 * that takes messages of all channels at once. So small collectives are faster with few
 * channels, whose messages are larger. The limits are those at which more channels became
 * faster on two H200 (docs/nccl.md). Above the last limit NCCL takes all its channels. */
struct limit {
	size_t bytes;
	int channels;
};

/* In a ring a message is a rank's part: these are bytes of a part. */
static const struct limit ring[] = {{128 * KIB, 1}, {2 * MIB, 2}, {8 * MIB, 4}, {32 * MIB, 8}, {0}};
/* Broadcast and reduce pass all bytes on, in a chain of ranks. */
static const struct limit chain[] = {{256 * KIB, 1}, {1 * MIB, 2}, {4 * MIB, 4}, {16 * MIB, 8}, {0}};
/* NCCL divides large messages of a tree itself. */
static const struct limit tree[] = {{128 * KIB, 1}, {512 * KIB, 2}, {2 * MIB, 4}, {4 * MIB, 8}, {0}};

/* largest_ll returns the bytes of a message, as above, up to which LL was faster than
 * Simple. LL's data takes twice its bytes, and a step of its buffer holds little: more
 * bytes are more messages. */
static size_t largest_ll(int kind, int algorithm)
{
	if (algorithm == NCCL_ALGORITHM_RING)
		switch (kind) {
		case NCCL_ALL_GATHER:
		case NCCL_REDUCE_SCATTER:
		case NCCL_BROADCAST:
		case NCCL_REDUCE:
			return 32 * KIB;
		}
	return 16 * KIB;
}

static bool passes_all(int kind) { return kind == NCCL_BROADCAST || kind == NCCL_REDUCE; }

static size_t message(const struct tuner *t, int kind, int algorithm, size_t bytes)
{
	return algorithm != NCCL_ALGORITHM_RING || passes_all(kind) ? bytes : (bytes + t->ranks - 1) / t->ranks;
}

/* limit_ll forbids LL for large messages where another protocol remains: the user may have
 * chosen LL alone. */
static void limit_ll(const struct tuner *t, int kind, size_t bytes, float *cost, int algorithms, int protocols)
{
	for (int i = 0; i < algorithms; i++) {
		float *of = cost + i * protocols;

		if (of[NCCL_PROTOCOL_SIMPLE] >= 0 && message(t, kind, i, bytes) > largest_ll(kind, i))
			of[NCCL_PROTOCOL_LL] = NCCL_COST_NEVER;
	}
}

/* forbid_pat leaves rings to two ranks, whose rings have one step as PAT has. PAT exchanges the parts of
 * its data one after the other: where both ranks share a GPU each exchange takes a time slice. */
static void forbid_pat(const struct tuner *t, float *cost, int algorithms, int protocols)
{
	if (t->ranks != 2 || algorithms <= NCCL_ALGORITHM_PAT || cost[NCCL_ALGORITHM_RING * protocols + NCCL_PROTOCOL_SIMPLE] < 0)
		return;
	for (int i = 0; i < protocols; i++)
		cost[NCCL_ALGORITHM_PAT * protocols + i] = NCCL_COST_NEVER;
}

/* few_channels returns the channels for a collective, 0 for NCCL's choice. NCCL takes the
 * cheapest algorithm and protocol of the table. */
static int few_channels(const struct tuner *t, int kind, size_t bytes, const float *cost, int algorithms, int protocols)
{
	const struct limit *limits;
	int cheapest = -1;
	size_t of;

	for (int i = 0; i < algorithms * protocols; i++)
		if (cost[i] >= 0 && (cheapest < 0 || cost[i] < cost[cheapest]))
			cheapest = i;
	if (cheapest < 0)
		return 0;
	switch (cheapest / protocols) {
	case NCCL_ALGORITHM_RING:
		limits = passes_all(kind) ? chain : ring;
		break;
	case NCCL_ALGORITHM_TREE:
		limits = tree;
		break;
	default:
		return 0;
	}
	of = message(t, kind, cheapest / protocols, bytes);
	for (; limits->channels; limits++)
		if (of <= limits->bytes)
			return limits->channels;
	return 0;
}

static int collective(void *context, int kind, size_t bytes, int pipelined, float **costs, int algorithms, int protocols, int registered, int *channels)
{
	const struct tuner *t = context;
	/* It points to a matrix, whatever its type says. */
	float *cost = (float *)(void *)costs;
	int few;

	(void)pipelined, (void)registered;
	for (int i = 0; t->networked && protocols > NCCL_PROTOCOL_LL128 && i < algorithms; i++)
		cost[i * protocols + NCCL_PROTOCOL_LL128] = NCCL_COST_NEVER;
	if (!t->local || protocols <= NCCL_PROTOCOL_SIMPLE)
		return NCCL_SUCCESS;
	forbid_pat(t, cost, algorithms, protocols);
	limit_ll(t, kind, bytes, cost, algorithms, protocols);
	if (t->set_channels && (few = few_channels(t, kind, bytes, cost, algorithms, protocols)))
		*channels = few;
	return NCCL_SUCCESS;
}

static int collective_3(void *context, int kind, size_t bytes, int pipelined, float **costs, int algorithms, int protocols, int *channels)
{
	return collective(context, kind, bytes, pipelined, costs, algorithms, protocols, 0, channels);
}

static int end(void *context)
{
	free(context);
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
