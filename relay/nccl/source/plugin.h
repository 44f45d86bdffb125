/* What the plugin's sources share. */
#ifndef PLUGIN_H
#define PLUGIN_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "glibc.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "peerlane.h"

#define NAME "Peerlane" /* what NCCL_NET names */

/* Room for a GPU, its lane, its NIC and the host. */
#define PLACE 256

/* A ring has PEERLANE_RING_ENTRIES places, and as many operations wait for one, sends
 * behind receives. So that each communicator can always have those that it may, a session
 * has at most so many communicators. */
#define TIE_USES (2 * PEERLANE_RING_ENTRIES / MOST_SENDS)

/* Sends that a communicator has at once. NCCL expects NCCL_MAX_REQUESTS at least, and with PXN has
 * 16 steps of each of eight ranks. Of two ranks on one GPU, the sender runs for a time slice of some
 * 2 ms while the receiver waits: this number bounds the sends of a slice, as a socket's buffer does. */
#define MOST_SENDS 256

/* Receives, each of a group counted: eight steps of a full one. */
#define MOST_RECEIVES 64

_Static_assert(MOST_SENDS >= NCCL_MAX_REQUESTS && MOST_RECEIVES >= NCCL_MAX_REQUESTS && MOST_RECEIVES <= MOST_SENDS, "what NCCL counts on");

/* What all ranks of a job must have alike: where two differ, NCCL's sends or collectives
 * between them hang. It travels in the last bytes of a handle, all of which relays leave
 * zero. Numbers are the machine's, little-endian. */
struct settings {
	uint8_t form;      /* SETTINGS_FORM; 0: of a plugin that tells none, which is not compared */
	uint8_t tuner;     /* of enum choice */
	uint8_t lanes;     /* of the container: for the log, not compared */
	uint8_t local;     /* whether all reach only this host: likewise */
	uint32_t channels; /* NCCL_NCHANNELS_PER_NET_PEER; 0: NCCL's own number */
	uint32_t buffer;   /* NCCL_BUFFSIZE, bytes */
	uint32_t chunk;    /* NCCL_P2P_NET_CHUNKSIZE, bytes, as NCCL limits it */
};

#define SETTINGS_FORM 1

/* The source of protocols and channels of a collective. */
enum choice { CHOICE_OF_NCCL, CHOICE_OF_LL, CHOICE_OF_LL_AND_CHANNELS };

/* A session. Its uses are listeners, attempts to connect, and communicators. */
struct tie {
	peerlane_session *session;
	unsigned uses;
	struct region *regions;
	struct tie *next;
};

/* The relay of this container, and the sessions with it. Contexts, listeners and
 * communicators use one; its sessions are closed when nobody does. */
struct relay {
	struct tie *ties; /* NULL: there is no relay, and nothing works */
	unsigned uses;
	unsigned lanes;
	struct peerlane_lane lane[PEERLANE_MAX_LANES];
	struct peerlane_nic nic[PEERLANE_MAX_LANES];
};

struct listener {
	struct relay *relay;
	struct tie *tie;
	int device;
	peerlane_listener number;
};

/* Memory that NCCL has registered, once for all communicators of a session: they share
 * pools. Host memory has a twin that the relay made. */
struct region {
	struct region *next;
	unsigned uses;
	bool sends;
	int lane;
	uintptr_t base;
	size_t bytes;
	/* Which GPU memory was there when it was registered; 0: unknown, and never the same. Of
	 * host memory the twin is ours, and what lies at base is copied when it is sent. */
	uint64_t id;
	uint8_t *twin; /* of base; NULL: GPU memory */
	uint64_t first; /* offset of base in memory */
	peerlane_memory memory;
};

struct part {
	const struct region *region;
	uint8_t *data;
	uint64_t bytes, tag, moved;
	peerlane_memory memory; /* and the offset of data there, or of its copy */
	uint64_t at;
	peerlane_operation operation;
	bool ended;
};

/* A send, or receives that were posted as one. */
struct request {
	struct communicator *communicator;
	bool used;
	int parts, posted, ended;
	/* A send from the buffer: NCCL has its result, the receiver has its bytes, and the count of the
	 * buffer's bytes up to its end. */
	bool buffered, told, landed;
	uint64_t end;
	struct part part[NCCL_MAX_RECEIVES];
};

/* Bytes for sends of host memory that wait for their receives: NCCL's kernel runs ahead of the
 * receiver's, as with sockets. */
#define BUFFER_BYTES (1u << 20)

struct buffer {
	uint8_t *data; /* NULL: there is none */
	peerlane_memory memory;
	uint64_t head, tail; /* counts of bytes; what is between them is in use */
	struct request *queue[MOST_SENDS];
	unsigned first, count; /* of queue */
};

/* One direction of one connection. NCCL's service thread registers memory with it while
 * its progress thread sends or receives: they share the error alone. */
struct communicator {
	struct relay *relay;
	struct tie *tie;
	bool sends;
	int device;
	_Atomic int error;        /* of NCCL's, sticky; 0: none */
	unsigned forks;           /* of this process when it was made */
	unsigned exported;        /* regions of GPU memory */
	peerlane_connection number;
	struct request *unposted; /* receives of which a part waits for room */
	unsigned under_way;       /* parts that have not ended */
	unsigned most;            /* of them */
	unsigned last;            /* request that was given out */
	struct buffer buffer;     /* of sends */
	bool flushes;             /* the end waits for a flush: sends of GPU memory may have ended before their delivery */
	struct request requests[]; /* of each part one, at least */
};

/* --- plugin.c */
extern const char no_relay[];

void set_logger(nccl_logger logger);

/* Writes a line to NCCL's log. */
#define warn(...) write_log(NCCL_LOG_WARN, __FILE__, __LINE__, __VA_ARGS__)
#define inform(...) write_log(NCCL_LOG_INFO, __FILE__, __LINE__, __VA_ARGS__)
void write_log(int level, const char *file, int line, const char *format, ...) __attribute__((format(printf, 4, 5)));

/* How often this process is a child of fork() since the plugin was loaded. */
unsigned forks(void);

/* Takes a use of the relay, which is dialed where there is none or it has died. An
 * error of NCCL's. */
int use_relay(struct relay **relay);
/* The relay that is there, with one more use. */
struct relay *same_relay(struct relay *relay);
void leave_relay(struct relay *relay);

/* Takes a use of a session that has room for one more, which is dialed where none has.
 * A status of libpeerlane's. */
int use_tie(struct relay *relay, struct tie **tie);
void same_tie(struct tie *tie);
void leave_tie(struct tie *tie);

/* NCCL's error for a status of libpeerlane's. */
int nccl_error(int status);

/* "GPU-... (peerlane.dev/lane=3, NIC mlx5_0), host x": where a device's data comes from and
 * goes to. */
const char *place(const struct relay *relay, int device, char text[PLACE]);

/* Reports whether all lanes of this container reach only this host, and NCCL has not been
 * told to take another network. */
bool lanes_are_local(void);
/* The same of a relay's lanes. */
bool reaches_only_host(const struct relay *relay);

int count_devices(int *n);
int describe(int device, struct nccl_net_properties_v12 *properties);
int finalize(void *context);

/* --- connections.c; relay NULL is the one there is, or the successor of one that died */
int listen_on(struct relay *relay, int device, void *handle, void **listener);
int connect_to(struct relay *relay, int device, void *handle, void **communicator);
int accept_from(void *listener, void **communicator, void **on_device);
int close_listener(void *listener);
int close_communicator(void *communicator);
/* In a child of fork(): attempts are the parent's. */
void forget_attempts(void);

/* Ends a communicator, with a sentence in the log. Its error. */
int fail(struct communicator *c, const char *doing, int status);
/* Why a communicator cannot be used, 0 if it can. */
int unusable(struct communicator *c);

/* --- memory.c */
/* Frees the regions of a session that has been closed, which nobody deregistered. */
void forget_regions(struct region *regions);
/* In a child of fork(): the lock may be the parent's. */
void forget_registering(void);
int register_memory(void *communicator, void *data, size_t bytes, int type, void **memory);
int deregister(void *communicator, void *memory);
/* Copies in units of 8 bytes, aligned where both are aligned alike: a kernel that
 * looks at the flags of LL never sees half of one. */
void copy_words(uint8_t *to, const uint8_t *from, size_t bytes);

/* --- transfer.c */
int send_one(void *communicator, void *data, size_t bytes, int tag, void *memory, void **request);
int receive_group(void *communicator, int n, void **data, const size_t *sizes, const int *tags, void **memories, void **request);
int flush(void *communicator, int n, void **data, int *sizes, void **memories, void **request);
int test(void *request, int *done, int *sizes);
/* Waits until the receiver has all buffered sends, the connection fails, or DRAIN_SECONDS. */
#define DRAIN_SECONDS 30
void drain_sends(struct communicator *c);

/* --- settings.c */
/* Writes the settings of this process into a handle that it gives out. */
void put_settings(const struct relay *relay, void *handle);
/* Compares them with those in a handle. Text says how they differ, "" if they do not. */
#define DIFFERENCE 1024
void compare_settings(const struct relay *relay, const void *handle, char text[DIFFERENCE]);

/* --- tuner.c */
/* Reports whether the user has chosen channels, which the tuner then leaves. */
bool channels_are_set(void);
/* Refuses an NCCL that would use LL128 between nodes. */
int check_ll128(nccl_logger logger);

#endif
