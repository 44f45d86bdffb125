/* Code generated from protocol.def by relay/wire/generate. DO NOT EDIT. */
#ifndef PEERLANE_VALUES_H
#define PEERLANE_VALUES_H

/* Entries of each of a session's two rings; a power of two. */
#define PEERLANE_RING_ENTRIES (1024)
/* Timelines of a session, and the distance between two timelines in bytes. */
#define PEERLANE_TIMELINES (256)
#define PEERLANE_TIMELINE_STRIDE (64)
/* The value of every timeline of an ended session, so that each wait for a smaller value */
/* returns. CUDA compares cyclically, so the value is not the largest. */
#define PEERLANE_TIMELINE_END (0x4000000000000000ull)
/* The value of a hand-over's timeline names the side with the turn: the GPU's stream or */
/* the relay. A stream waits for any bit of TurnStream and TimelineEnd. */
#define PEERLANE_TURN_STREAM (1)
#define PEERLANE_TURN_RELAY (2)
/* Programs of Hello, for reports alone; 0 is any other program. Older relays ignore the field. */
#define PEERLANE_PROGRAM_NCCL (1)
#define PEERLANE_PROGRAM_NIXL (2)
/* Bounds of one session. */
#define PEERLANE_MAX_MEMORIES (4096)
#define PEERLANE_MAX_CONNECTIONS (1024)
#define PEERLANE_MAX_LISTENERS (256)
#define PEERLANE_MAX_EVENTS (1024)
#define PEERLANE_MAX_REGIONS (4096)
/* Entries of the pending lists of a session. */
#define PEERLANE_MAX_LIST_ENTRIES (262144)
/* Server GPUs in a Statistics message. */
#define PEERLANE_MAX_SERVERS (8)
/* Lanes in a LanesReply message. */
#define PEERLANE_MAX_LANES (32)
/* Access of the relay to exported memory. */
#define PEERLANE_ACCESS_SEND (1)
#define PEERLANE_ACCESS_RECEIVE (2)
/* Access of remote programs to a region. */
#define PEERLANE_REMOTE_READ (1)
#define PEERLANE_REMOTE_WRITE (2)
/* Allocations of one export. */
#define PEERLANE_MAX_PARTS (2048)
/* Routes of a connection: staged over slots on server GPUs, or direct as one copy between two */
/* containers of a host. */
#define PEERLANE_ROUTE_STAGED (1)
#define PEERLANE_ROUTE_DIRECT (2)

/* Outcomes of requests and operations. */
enum peerlane_status {
	PEERLANE_STATUS_OK = 0, /* done */
	PEERLANE_STATUS_INTERNAL = 1, /* the relay met an error of its own */
	PEERLANE_STATUS_MALFORMED = 2, /* malformed message */
	PEERLANE_STATUS_VERSION = 3, /* no common version of the protocol */
	PEERLANE_STATUS_NO_CUDA = 4, /* the CUDA driver cannot be used */
	PEERLANE_STATUS_CUDA = 5, /* the CUDA driver failed */
	PEERLANE_STATUS_WRONG_GPU = 6, /* memory of a GPU whose lane this container was not given */
	PEERLANE_STATUS_BAD_DESCRIPTOR = 7, /* the file descriptor is not memory that can be imported */
	PEERLANE_STATUS_LIMIT = 8, /* a limit of the session is reached */
	PEERLANE_STATUS_UNKNOWN_MEMORY = 9, /* no such memory */
	PEERLANE_STATUS_UNKNOWN_CONNECTION = 10, /* no such connection */
	PEERLANE_STATUS_UNKNOWN_LISTENER = 11, /* no such listener */
	PEERLANE_STATUS_OUT_OF_RANGE = 12, /* outside the exported memory */
	PEERLANE_STATUS_NOT_PERMITTED = 13, /* the memory was not exported for this */
	PEERLANE_STATUS_BAD_HANDLE = 14, /* no listener answers to this handle */
	PEERLANE_STATUS_UNREACHABLE = 15, /* the other relay cannot be reached */
	PEERLANE_STATUS_TRUNCATED = 16, /* the message is longer than the receive */
	PEERLANE_STATUS_CANCELED = 17, /* canceled */
	PEERLANE_STATUS_CLOSED = 18, /* the connection was closed here */
	PEERLANE_STATUS_PEER_CLOSED = 19, /* the other side closed the connection */
	PEERLANE_STATUS_PEER_CLIENT_DIED = 20, /* the client at the other side died */
	PEERLANE_STATUS_PEER_RELAY_DIED = 21, /* the relay at the other side died */
	PEERLANE_STATUS_RELAY_DIED = 22, /* the relay of this container died */
	PEERLANE_STATUS_PEER_CONTAINER_DIED = 23, /* the container at the other side ended */
	PEERLANE_STATUS_NO_STAGING = 25, /* no staging memory */
	PEERLANE_STATUS_BAD_RING = 26, /* the ring does not hold what the protocol allows */
	PEERLANE_STATUS_UNKNOWN_EVENT = 27, /* no such event */
	PEERLANE_STATUS_BAD_KEY = 28, /* no memory is exposed under this key to this connection */
	PEERLANE_STATUS_NO_REVERSE_CONNECTION = 29, /* the two relays could not open the reverse connection that a read needs */
	PEERLANE_STATUS_BUSY = 30, /* the relay accepts no connection for now */
};

#endif
