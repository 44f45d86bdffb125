/* What the library's sources share. Names that begin with peerlane_ are programs'. */
#ifndef PEERLANE_INTERNAL_H
#define PEERLANE_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "glibc.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "peerlane.h"
#include "peerlane_wire.h"

/* A sentence, with its end: what a message carries, and some words of ours. */
#define SENTENCE 1024

/* The most that a message has, and the descriptors that come with one. */
#define MAX_MESSAGE 1024
#define MAX_DESCRIPTORS 4

/* A control reply that no client can delay takes no longer; the creation of a CUDA
 * context and of staging memory is among them. Milliseconds. */
#define REPLY_TIME 60000
/* How long peerlane_close() waits until nothing touches its memory: for copies that are
 * under way, and for what other relays were allowed to write. */
#define LET_GO_TIME 30000

struct reason {
	int status; /* 0: none */
	char text[SENTENCE];
};

/* What is known of a connection. */
struct link {
	uint32_t number;
	uint32_t route;
	char peer[112];
	struct reason down;
	struct link *next;
};

/* A request that waits for its answer. It lies on the stack of whoever asks, but those
 * that may outlive their caller: an accept, and an attempt to connect. */
struct request {
	uint32_t sequence;
	uint32_t wants;     /* the type of the answer */
	uint32_t listener;  /* of an accept that was given up */
	bool answered;
	bool given_up;      /* an accept, or an attempt to connect, that waits for its next caller */
	bool attempt;
	uint8_t answer[MAX_MESSAGE];
	size_t length;      /* of the answer */
	struct link *link;  /* to fill with the connection that comes */
	int fd;             /* that came with the answer; -1: none */
	struct request *next;
};

/* Host memory, or staging memory, that is mapped here. */
struct mapped {
	uint32_t number;
	void *data;       /* host memory */
	uint64_t address; /* staging memory; 0: none */
	size_t bytes;
	struct mapped *next;
};

/* A timeline that changes hands. */
struct hand_over {
	enum { NO_HAND_OVER, HAND_OVER, HAND_OVER_ENDED } state;
	int32_t status;      /* why it has ended */
	uint32_t connection; /* of the latest operation in turn */
	uint32_t operations; /* in turn that have not ended */
};

enum slot_state { SLOT_FREE, SLOT_POSTED, SLOT_ENDED };

#define NO_SLOT UINT32_MAX

/* An operation. Its cookie, which is the number that programs know, is
 * generation * PEERLANE_MAX_OPERATIONS + index. */
struct slot {
	uint64_t cookie;
	uint64_t length;
	uint64_t moved;
	uint64_t context;
	uint32_t connection;
	int32_t status;
	uint32_t state;
	uint32_t waiters;
	bool forget;             /* nobody takes the result */
	uint32_t entries;        /* of a list, 0 of others: */
	uint32_t first_entry;    /* in list memory; */
	uint32_t next_list;      /* the next in its order; */
	uint32_t *failed;        /* where programs read the entry that failed, or NULL */
	bool in_turn;            /* of the hand-over at this timeline: */
	uint32_t timeline;
	uint32_t next, previous; /* in the list of free ones, or of those that ended */
};

struct peerlane_session {
	struct peerlane_session *next; /* of all, for fork() */

	/* Everything below is the lock's. */
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct reason failed;      /* sticky */
	bool forked;               /* in a child: nothing is mapped */
	unsigned inside;           /* threads in a call that gives up the lock */
	unsigned asleep;           /* of these, threads that wait for others' poll() */
	bool polling;              /* a thread is in poll(): it alone reads the socket and the pipe */
	bool watching;             /* the thread of the library's own is there */
	pthread_t watcher;
	int socket, wake_relay, wake_client; /* -1: none */
	int event;                 /* what programs wait for: an epoll of the socket, the pipe, */
	int notice;                /* and of this eventfd, for results that another thread read */
	bool noticed;              /* it is readable */
	bool taking;               /* peerlane_poll() reads them itself */
	uint32_t version;

	/* The shared memory. */
	uint8_t *submit;
	const uint8_t *complete;
	uint8_t *lists;            /* list memory; NULL before the first list */
	uint32_t first_list;       /* the slot of the first list in it, or NO_SLOT */
	uint32_t populated;        /* entries whose pages are there */
	uint64_t posted;           /* descriptors written */
	uint64_t finished;         /* completions read */
	uint64_t looked;           /* when test() last looked whether the relay lives, ns */

	uint32_t sequence;
	struct request *requests;
	struct link *links;
	struct mapped *mapped;
	bool listing;              /* a thread sends the allocations of one range */
	/* What came for requests that were given up, to give back: messages. */
	struct peerlane_unexport orphans[64];
	unsigned orphan_count;

	struct slot *slots;        /* PEERLANE_MAX_OPERATIONS */
	uint32_t free_slot;
	uint32_t first_ended, last_ended;

	const void *registered;    /* timelines that are registered with CUDA, */
	uint64_t address;          /* there */
	struct hand_over hand_overs[PEERLANE_TIMELINES];
	bool handing;              /* there are some: the watcher reads the socket */
	bool keeping;              /* some have ended: the watcher keeps them there */
	bool parting;              /* it was closed, and waits for what is under way */
	bool closing;
	int nudge;                 /* an eventfd that the watcher looks up for */
};

/* --- errors.c: the calling thread's error. Each returns the status. */
int fail_call(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
int fail_for(const struct reason *why);
void give_reason(struct reason *r, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));
void copy_text(char *to, size_t room, const char *from, size_t n);

/* --- session.c */

/* Milliseconds from now, for deadlines; FOREVER has none. */
#define FOREVER INT64_MAX
int64_t now_ns(void);
int64_t deadline_in(int timeout_ms);

/* Locks the session. A status, without the lock, if it has failed or there is none. */
int enter(struct peerlane_session *s);
void leave(struct peerlane_session *s);

/* Fails the session, once. The lock is held. */
void fail_session(struct peerlane_session *s, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Waits until done(argument) holds, the session fails, or the deadline. The lock is
 * held before and after, not meanwhile. 0, the session's status, or
 * PEERLANE_STATUS_TIMED_OUT, without a sentence. */
int await(struct peerlane_session *s, bool (*done)(void *), void *argument, int64_t deadline);

/* Takes what has come on the socket, if no other thread is about to. The lock is
 * held. */
void look(struct peerlane_session *s);

/* As look(), and takes what the event descriptor tells of. */
void look_at_wakes(struct peerlane_session *s);

/* Takes completions; the session fails if the relay broke the protocol. */
void drain_or_fail(struct peerlane_session *s);

/* Sends a message, with a descriptor or -1, and waits for an answer of that type and
 * length. The lock is not held. */
int ask(struct peerlane_session *s, void *message, size_t length, int fd, void *answer, uint32_t type, size_t answer_length, struct link *link);

/* ask, for an answer that brings a descriptor, the caller's then. */
int ask_for_fd(struct peerlane_session *s, void *message, size_t length, void *answer, uint32_t type, size_t answer_length, int *fd);

/* Sends a message that has no answer, with a descriptor or -1. The lock is not held. */
int send_alone(struct peerlane_session *s, const void *message, size_t length, int fd);

/* Sends the allocations of one range, and keeps others from it until end_list(), if it
 * has begun. The lock is not held. */
int send_list(struct peerlane_session *s, const struct peerlane_allocation *list, unsigned count, bool *begun);
void end_list(struct peerlane_session *s);

/* peerlane_export(), and what the relay would have beside it; 0 or PEERLANE_WANTS_DMA_BUF.
 * Without the lock. */
int export_list(struct peerlane_session *s, const struct peerlane_allocation *list, unsigned count,
	const peerlane_gpu *gpu, uint32_t access, peerlane_memory *memory, uint32_t *wants);

/* The same for peerlane_export_ipc(). */
int export_ipc(struct peerlane_session *s, const uint8_t handle[64], uint64_t offset, uint64_t length,
	const peerlane_gpu *gpu, uint32_t access, peerlane_memory *memory, uint32_t *wants);

/* Gives back what nobody knows of, as soon as the socket has room. The lock is held. */
void give_back(struct peerlane_session *s, uint32_t answer, uint32_t number);

/* Maps staging memory for one GPU: 0 and its address, or a status. Without the lock. */
int map_staging(int fd, uint64_t bytes, const peerlane_gpu *gpu, const struct peerlane_staged *where, uint64_t *address);
/* Unmaps what is not in a session's list any more, and frees it. Without the lock: a
 * call of CUDA's can wait for a kernel. In a child of fork() CUDA is not called. */
void unmap(struct mapped *m, bool forked);
void unmap_staging(const struct mapped *m);

/* Maps memory that the relay made and has sealed; of the lock. A failed map() may leave
 * *memory mapped. */
int map(const char *what, int fd, size_t bytes, int protection, bool shared_with_children, void **memory);

/* Allocates the pages of shared memory that are missing, so that the kernel charges them to
 * this process's control group. It keeps the bytes, and only reads memory that is not writable. */
int populate(const char *what, const void *memory, size_t bytes, bool writable);

struct link *find_link(struct peerlane_session *s, uint32_t number);
int start_watcher(struct peerlane_session *s);

/* --- list.c */

/* A list that is to be posted, whose entries have been checked. */
struct list {
	const struct peerlane_list_entry *entries;
	uint32_t count;
	uint64_t bytes; /* of all entries */
	uint32_t *failed;
};

/* Writes a list into list memory, for a slot; the lock is held. */
int place_list(struct peerlane_session *s, struct slot *o, const struct list *l, struct peerlane_descriptor *d);
/* Frees the list memory of a slot; the lock is held. */
void free_list(struct peerlane_session *s, struct slot *o);

/* --- ring.c; the lock is held */
/* Posts an operation of which all but its options is said. l is NULL, or the list of a list
 * operation. The lock is not held. */
int submit(peerlane_session *s, struct peerlane_descriptor d, const struct peerlane_options *options, const struct list *l,
	peerlane_operation *operation);
void open_slots(struct peerlane_session *s);
/* Takes completions. False if the relay broke the protocol: then why says how. */
bool drain(struct peerlane_session *s, struct reason *why);
void end_all(struct peerlane_session *s, int status);
/* Makes the event descriptor readable, if there is one. */
void notice(struct peerlane_session *s);
void set_sleeps(struct peerlane_session *s);
void end_timelines(struct peerlane_session *s);

/* A hand-over's status, with its sentence; an error also of a timeline that is none. */
int hand_over_status(struct peerlane_session *s, uint32_t i);
/* Ends the hand-overs of a connection, of all with 0. */
void end_hand_overs(struct peerlane_session *s, uint32_t connection, int status);
/* Sets those that have ended to their end again, which a graph set back. */
void keep_hand_overs(struct peerlane_session *s);
/* Wakes the watcher, so that it sees what the session says now. */
void nudge(struct peerlane_session *s);

#endif
