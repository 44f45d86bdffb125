/* A tuner that forbids LL128 between nodes: its kernels need 128 bytes to arrive as
 * one, and copies of host slots and of staging promise 8. LL needs no more. Between the
 * GPUs of one node nothing of ours is in the way. Everything else is NCCL's to choose.
 *
 * NCCL looks for a tuner in this library where no other is named. */
#include "plugin.h"

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

static int end(void *context)
{
	(void)context;
	return NCCL_SUCCESS;
}

extern const struct nccl_tuner_v4 ncclTunerPlugin_v4;
extern const struct nccl_tuner_v5 ncclTunerPlugin_v5;

EXPORTED const struct nccl_tuner_v4 ncclTunerPlugin_v4 = {NAME, init_4, collective, end};
EXPORTED const struct nccl_tuner_v5 ncclTunerPlugin_v5 = {NAME, init_5, collective, end};
