/* Code generated from protocol.def by relay/wire/generate. DO NOT EDIT. */
#ifndef PEERLANE_WIRE_H
#define PEERLANE_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "peerlane_values.h"

/* The first words of Hello and PeerHello: "PEER" and "LANE". */
#define PEERLANE_MAGIC (0x454e414c52454550ull)
/* The first word of a RemoteKeyLayout: "LANERKEY". */
#define PEERLANE_REMOTE_KEY_MAGIC (0x59454b52454e414cull)
/* Versions of the protocol that this source speaks. */
#define PEERLANE_OLDEST_VERSION (1)
#define PEERLANE_NEWEST_VERSION (6)
/* The first version with LaneNIC. A relay ends a session that sends an unknown message, so a */
/* client does not send LaneNIC to an older relay. */
#define PEERLANE_LANE_NIC_VERSION (2)
/* The first version in which two relays of a host share windows on route direct: the memory of */
/* PeerShare ends with the windows. */
#define PEERLANE_WINDOWS_VERSION (3)
/* The first version in which a client allocates the pages of its host memory: HostMemory has */
/* populates, and HostMemoryPopulated exists. */
#define PEERLANE_POPULATE_VERSION (4)
/* The first version with lists: OpReadList and OpWriteList of a client, and PeerRanges and the */
/* following messages of another relay. */
#define PEERLANE_LIST_VERSION (5)
/* The first version with the flag BufferedSend. An older relay refuses a Descriptor with the flag. */
#define PEERLANE_BUFFERED_VERSION (6)
/* "No timeline" in a Descriptor. */
#define PEERLANE_NO_TIMELINE (0xffffffff)
/* Flags of a Descriptor. InTurn: the operation begins when wait_timeline is */
/* TurnRelay, which no other operation takes for its turn until this one has ended; */
/* then the relay sets the timeline to TurnStream. There is no wait_value and no */
/* signal then. */
#define PEERLANE_IN_TURN (1)
/* BufferedSend: the send may end when the relay has copied the bytes, before their delivery. An OpFlush */
/* of the connection ends after the delivery, and has the status of the first failure. */
#define PEERLANE_BUFFERED_SEND (2)
/* Sizes and offsets, in bytes, in the memory of Welcome's descriptors. */
#define PEERLANE_SUBMIT_BYTES (0x25000)
#define PEERLANE_SUBMIT_ENTRIES (0x1000)
#define PEERLANE_SUBMIT_TIMELINES (0x21000)
#define PEERLANE_COMPLETE_BYTES (0x7000)
#define PEERLANE_COMPLETE_ENTRIES (0x1000)
/* Operations of a Descriptor. */
#define PEERLANE_OP_SEND (1)
#define PEERLANE_OP_RECEIVE (2)
#define PEERLANE_OP_CANCEL (3)
/* Ends when the earlier operations of the connection have ended. */
#define PEERLANE_OP_FLUSH (4)
/* One-sided, by the connecting side, on regions of the accepting side. */
#define PEERLANE_OP_READ (5)
#define PEERLANE_OP_WRITE (6)
/* One read or write for each ListEntryLayout of a list, which begins at `offset` bytes of the */
/* session's list memory and has `length` entries. memory, key and remote_offset are 0. */
#define PEERLANE_OP_READ_LIST (7)
#define PEERLANE_OP_WRITE_LIST (8)
/* Two relays exchange a list in parts: entries of a part at most, and parts of a connection in */
/* flight at most. */
#define PEERLANE_PART_ENTRIES (1024)
#define PEERLANE_PARTS_AT_ONCE (4)
/* Ranges of one PeerRanges or PeerGrantRanges. */
#define PEERLANE_MESSAGE_RANGES (60)
/* The region of a PeerGrant whose ranges are in an earlier PeerGrantRanges. */
#define PEERLANE_LIST_REGION (0xffffffff)
/* The relay asks for a DMABuf of the exported memory. */
#define PEERLANE_WANTS_DMA_BUF (1)
/* Kinds of memory: of a GPU a CUDA VMM allocation, of the host a memfd sealed against changes of */
/* its size. */
#define PEERLANE_MEMORY_GPU (0)
#define PEERLANE_MEMORY_HOST (1)
/* GPU memory of several allocations, which earlier messages brought. */
#define PEERLANE_MEMORY_PARTS (2)
/* GPU memory of cudaMalloc, opened by an IPC handle: never of another relay. */
#define PEERLANE_MEMORY_IPC (3)
/* Memory of another host, described only by the grants of that host's relay. */
#define PEERLANE_MEMORY_REMOTE (4)
/* Routes: RouteAuto in requests between relays, the others of connections. */
#define PEERLANE_ROUTE_AUTO (0)

/* X(number, text) for each status. */
#define PEERLANE_STATUSES(X) \
	X(0, "done") \
	X(1, "the relay met an error of its own") \
	X(2, "malformed message") \
	X(3, "no common version of the protocol") \
	X(4, "the CUDA driver cannot be used") \
	X(5, "the CUDA driver failed") \
	X(6, "memory of a GPU whose lane this container was not given") \
	X(7, "the file descriptor is not memory that can be imported") \
	X(8, "a limit of the session is reached") \
	X(9, "no such memory") \
	X(10, "no such connection") \
	X(11, "no such listener") \
	X(12, "outside the exported memory") \
	X(13, "the memory was not exported for this") \
	X(14, "no listener answers to this handle") \
	X(15, "the other relay cannot be reached") \
	X(16, "the message is longer than the receive") \
	X(17, "canceled") \
	X(18, "the connection was closed here") \
	X(19, "the other side closed the connection") \
	X(20, "the client at the other side died") \
	X(21, "the relay at the other side died") \
	X(22, "the relay of this container died") \
	X(23, "the container at the other side ended") \
	X(25, "no staging memory") \
	X(26, "the ring does not hold what the protocol allows") \
	X(27, "no such event") \
	X(28, "no memory is exposed under this key to this connection") \
	X(29, "the two relays could not open the reverse connection that a read needs") \
	X(30, "the relay accepts no connection for now")

enum peerlane_message {
	PEERLANE_MESSAGE_HELLO = 1,
	PEERLANE_MESSAGE_WELCOME = 2,
	PEERLANE_MESSAGE_FAILURE = 3,
	PEERLANE_MESSAGE_EXPORT = 4,
	PEERLANE_MESSAGE_EXPORTED = 5,
	PEERLANE_MESSAGE_UNEXPORT = 6,
	PEERLANE_MESSAGE_DONE = 7,
	PEERLANE_MESSAGE_LISTEN = 8,
	PEERLANE_MESSAGE_LISTENING = 9,
	PEERLANE_MESSAGE_UNLISTEN = 10,
	PEERLANE_MESSAGE_ACCEPT = 11,
	PEERLANE_MESSAGE_CONNECT = 12,
	PEERLANE_MESSAGE_CONNECTED = 13,
	PEERLANE_MESSAGE_DISCONNECT = 14,
	PEERLANE_MESSAGE_CONNECTION_DOWN = 15,
	PEERLANE_MESSAGE_STATISTICS = 16,
	PEERLANE_MESSAGE_STATISTICS_REPLY = 17,
	PEERLANE_MESSAGE_LANES = 19,
	PEERLANE_MESSAGE_LANES_REPLY = 20,
	PEERLANE_MESSAGE_LANE_NIC = 120,
	PEERLANE_MESSAGE_LANE_NIC_REPLY = 121,
	PEERLANE_MESSAGE_GOODBYE = 18,
	PEERLANE_MESSAGE_EXPORT_PART = 26,
	PEERLANE_MESSAGE_EXPORT_IPC = 27,
	PEERLANE_MESSAGE_HOST_MEMORY = 24,
	PEERLANE_MESSAGE_HOST_MEMORY_MADE = 25,
	PEERLANE_MESSAGE_HOST_MEMORY_POPULATED = 30,
	PEERLANE_MESSAGE_STAGING = 28,
	PEERLANE_MESSAGE_STAGING_MADE = 29,
	PEERLANE_MESSAGE_EVENT = 21,
	PEERLANE_MESSAGE_EVENT_OPENED = 22,
	PEERLANE_MESSAGE_EVENT_CLOSE = 23,
	PEERLANE_MESSAGE_EXPOSE = 80,
	PEERLANE_MESSAGE_EXPOSED = 81,
	PEERLANE_MESSAGE_LIST_MEMORY = 31,
	PEERLANE_MESSAGE_LIST_MEMORY_MADE = 83,
	PEERLANE_MESSAGE_REVOKE = 82,
	PEERLANE_MESSAGE_PEER_HELLO = 32,
	PEERLANE_MESSAGE_PEER_WELCOME = 33,
	PEERLANE_MESSAGE_PEER_REGION = 34,
	PEERLANE_MESSAGE_PEER_REGION_PART = 42,
	PEERLANE_MESSAGE_PEER_QUOTA = 47,
	PEERLANE_MESSAGE_PEER_EAGER = 48,
	PEERLANE_MESSAGE_PEER_SEND = 35,
	PEERLANE_MESSAGE_PEER_GRANT = 36,
	PEERLANE_MESSAGE_PEER_WRITTEN = 37,
	PEERLANE_MESSAGE_PEER_DELIVERED = 38,
	PEERLANE_MESSAGE_PEER_WITHDRAW = 39,
	PEERLANE_MESSAGE_PEER_CLOSE = 40,
	PEERLANE_MESSAGE_PEER_FORGET = 41,
	PEERLANE_MESSAGE_PEER_SHARE = 44,
	PEERLANE_MESSAGE_PEER_SHARED = 45,
	PEERLANE_MESSAGE_PEER_BELL = 46,
	PEERLANE_MESSAGE_PEER_WRITE = 88,
	PEERLANE_MESSAGE_PEER_READ = 89,
	PEERLANE_MESSAGE_PEER_READ_REFUSED = 90,
	PEERLANE_MESSAGE_PEER_READ_DATA = 91,
	PEERLANE_MESSAGE_PEER_BACK = 92,
	PEERLANE_MESSAGE_PEER_BACK_REFUSED = 93,
	PEERLANE_MESSAGE_PEER_RANGES = 94,
	PEERLANE_MESSAGE_PEER_WRITE_LIST = 95,
	PEERLANE_MESSAGE_PEER_READ_LIST = 96,
	PEERLANE_MESSAGE_PEER_LIST_REFUSED = 97,
	PEERLANE_MESSAGE_PEER_GRANT_RANGES = 98,
	PEERLANE_MESSAGE_DMA_BUF = 122,
};

struct peerlane_lane_gpu {
	uint8_t gpu[16];
	uint32_t index;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_lane_gpu) == 24, "peerlane_lane_gpu");
_Static_assert(offsetof(struct peerlane_lane_gpu, gpu) == 0, "peerlane_lane_gpu.gpu");
_Static_assert(offsetof(struct peerlane_lane_gpu, index) == 16, "peerlane_lane_gpu.index");
_Static_assert(offsetof(struct peerlane_lane_gpu, reserved) == 20, "peerlane_lane_gpu.reserved");

struct peerlane_server_bytes {
	uint8_t gpu[16];
	uint64_t in;
	uint64_t out;
};
_Static_assert(sizeof(struct peerlane_server_bytes) == 32, "peerlane_server_bytes");
_Static_assert(offsetof(struct peerlane_server_bytes, gpu) == 0, "peerlane_server_bytes.gpu");
_Static_assert(offsetof(struct peerlane_server_bytes, in) == 16, "peerlane_server_bytes.in");
_Static_assert(offsetof(struct peerlane_server_bytes, out) == 24, "peerlane_server_bytes.out");

/* One operation in the submission ring. */
struct peerlane_descriptor {
	uint32_t operation;
	uint32_t connection;
	uint32_t memory;
	uint32_t flags;
	uint64_t offset;
	uint64_t length;
	uint64_t tag;
	uint64_t cookie;
	uint32_t wait_timeline;
	uint32_t signal_timeline;
	uint64_t wait_value;
	uint64_t signal_value;
	uint32_t wait_event;
	uint32_t reserved0;
	uint8_t key[16];
	uint64_t remote_offset;
	uint64_t reserved4;
	uint64_t reserved5;
	uint64_t reserved6;
};
_Static_assert(sizeof(struct peerlane_descriptor) == 128, "peerlane_descriptor");
_Static_assert(offsetof(struct peerlane_descriptor, operation) == 0, "peerlane_descriptor.operation");
_Static_assert(offsetof(struct peerlane_descriptor, connection) == 4, "peerlane_descriptor.connection");
_Static_assert(offsetof(struct peerlane_descriptor, memory) == 8, "peerlane_descriptor.memory");
_Static_assert(offsetof(struct peerlane_descriptor, flags) == 12, "peerlane_descriptor.flags");
_Static_assert(offsetof(struct peerlane_descriptor, offset) == 16, "peerlane_descriptor.offset");
_Static_assert(offsetof(struct peerlane_descriptor, length) == 24, "peerlane_descriptor.length");
_Static_assert(offsetof(struct peerlane_descriptor, tag) == 32, "peerlane_descriptor.tag");
_Static_assert(offsetof(struct peerlane_descriptor, cookie) == 40, "peerlane_descriptor.cookie");
_Static_assert(offsetof(struct peerlane_descriptor, wait_timeline) == 48, "peerlane_descriptor.wait_timeline");
_Static_assert(offsetof(struct peerlane_descriptor, signal_timeline) == 52, "peerlane_descriptor.signal_timeline");
_Static_assert(offsetof(struct peerlane_descriptor, wait_value) == 56, "peerlane_descriptor.wait_value");
_Static_assert(offsetof(struct peerlane_descriptor, signal_value) == 64, "peerlane_descriptor.signal_value");
_Static_assert(offsetof(struct peerlane_descriptor, wait_event) == 72, "peerlane_descriptor.wait_event");
_Static_assert(offsetof(struct peerlane_descriptor, reserved0) == 76, "peerlane_descriptor.reserved0");
_Static_assert(offsetof(struct peerlane_descriptor, key) == 80, "peerlane_descriptor.key");
_Static_assert(offsetof(struct peerlane_descriptor, remote_offset) == 96, "peerlane_descriptor.remote_offset");
_Static_assert(offsetof(struct peerlane_descriptor, reserved4) == 104, "peerlane_descriptor.reserved4");
_Static_assert(offsetof(struct peerlane_descriptor, reserved5) == 112, "peerlane_descriptor.reserved5");
_Static_assert(offsetof(struct peerlane_descriptor, reserved6) == 120, "peerlane_descriptor.reserved6");

/* Of list memory: `length` bytes at `offset` of a memory of the client, and from byte `at` on */
/* of the region with the key. */
struct peerlane_list_entry_layout {
	uint32_t memory;
	uint32_t reserved;
	uint64_t offset;
	uint64_t length;
	uint64_t at;
	uint8_t key[16];
};
_Static_assert(sizeof(struct peerlane_list_entry_layout) == 48, "peerlane_list_entry_layout");
_Static_assert(offsetof(struct peerlane_list_entry_layout, memory) == 0, "peerlane_list_entry_layout.memory");
_Static_assert(offsetof(struct peerlane_list_entry_layout, reserved) == 4, "peerlane_list_entry_layout.reserved");
_Static_assert(offsetof(struct peerlane_list_entry_layout, offset) == 8, "peerlane_list_entry_layout.offset");
_Static_assert(offsetof(struct peerlane_list_entry_layout, length) == 16, "peerlane_list_entry_layout.length");
_Static_assert(offsetof(struct peerlane_list_entry_layout, at) == 24, "peerlane_list_entry_layout.at");
_Static_assert(offsetof(struct peerlane_list_entry_layout, key) == 32, "peerlane_list_entry_layout.key");

/* Bytes of a region. */
struct peerlane_range {
	uint64_t at;
	uint64_t length;
};
_Static_assert(sizeof(struct peerlane_range) == 16, "peerlane_range");
_Static_assert(offsetof(struct peerlane_range, at) == 0, "peerlane_range.at");
_Static_assert(offsetof(struct peerlane_range, length) == 8, "peerlane_range.length");

/* One ended operation in the completion ring. entry is the index of the first entry that */
/* failed, of a list that did. */
struct peerlane_completion {
	uint64_t cookie;
	uint64_t length;
	uint32_t status;
	uint32_t entry;
};
_Static_assert(sizeof(struct peerlane_completion) == 24, "peerlane_completion");
_Static_assert(offsetof(struct peerlane_completion, cookie) == 0, "peerlane_completion.cookie");
_Static_assert(offsetof(struct peerlane_completion, length) == 8, "peerlane_completion.length");
_Static_assert(offsetof(struct peerlane_completion, status) == 16, "peerlane_completion.status");
_Static_assert(offsetof(struct peerlane_completion, entry) == 20, "peerlane_completion.entry");

/* The first page of the submit memory, written by the client. */
struct peerlane_submit_page {
	uint64_t tail;
	uint64_t reserved0;
	uint64_t completed_head;
	uint64_t reserved1;
	uint32_t client_sleeps;
	uint32_t reserved2;
};
_Static_assert(sizeof(struct peerlane_submit_page) == 40, "peerlane_submit_page");
_Static_assert(offsetof(struct peerlane_submit_page, tail) == 0, "peerlane_submit_page.tail");
_Static_assert(offsetof(struct peerlane_submit_page, reserved0) == 8, "peerlane_submit_page.reserved0");
_Static_assert(offsetof(struct peerlane_submit_page, completed_head) == 16, "peerlane_submit_page.completed_head");
_Static_assert(offsetof(struct peerlane_submit_page, reserved1) == 24, "peerlane_submit_page.reserved1");
_Static_assert(offsetof(struct peerlane_submit_page, client_sleeps) == 32, "peerlane_submit_page.client_sleeps");
_Static_assert(offsetof(struct peerlane_submit_page, reserved2) == 36, "peerlane_submit_page.reserved2");

/* The first page of the complete memory, written by the relay alone. */
struct peerlane_complete_page {
	uint64_t taken_head;
	uint64_t reserved0;
	uint64_t tail;
	uint64_t reserved1;
	uint32_t relay_sleeps;
	uint32_t reserved2;
};
_Static_assert(sizeof(struct peerlane_complete_page) == 40, "peerlane_complete_page");
_Static_assert(offsetof(struct peerlane_complete_page, taken_head) == 0, "peerlane_complete_page.taken_head");
_Static_assert(offsetof(struct peerlane_complete_page, reserved0) == 8, "peerlane_complete_page.reserved0");
_Static_assert(offsetof(struct peerlane_complete_page, tail) == 16, "peerlane_complete_page.tail");
_Static_assert(offsetof(struct peerlane_complete_page, reserved1) == 24, "peerlane_complete_page.reserved1");
_Static_assert(offsetof(struct peerlane_complete_page, relay_sleeps) == 32, "peerlane_complete_page.relay_sleeps");
_Static_assert(offsetof(struct peerlane_complete_page, reserved2) == 36, "peerlane_complete_page.reserved2");

/* The address of a listener for senders: 128 bytes, which programs exchange. */
struct peerlane_handle_layout {
	uint64_t magic;
	uint8_t token[16];
	uint8_t generation[16];
	uint8_t host[16];
	char contact[56];
	char note[16];
};
_Static_assert(sizeof(struct peerlane_handle_layout) == 128, "peerlane_handle_layout");
_Static_assert(offsetof(struct peerlane_handle_layout, magic) == 0, "peerlane_handle_layout.magic");
_Static_assert(offsetof(struct peerlane_handle_layout, token) == 8, "peerlane_handle_layout.token");
_Static_assert(offsetof(struct peerlane_handle_layout, generation) == 24, "peerlane_handle_layout.generation");
_Static_assert(offsetof(struct peerlane_handle_layout, host) == 40, "peerlane_handle_layout.host");
_Static_assert(offsetof(struct peerlane_handle_layout, contact) == 56, "peerlane_handle_layout.contact");
_Static_assert(offsetof(struct peerlane_handle_layout, note) == 112, "peerlane_handle_layout.note");

/* The key of a region: 64 bytes, which programs exchange. The relay enforces the bounds; the */
/* key has them for information. */
struct peerlane_remote_key_layout {
	uint64_t magic;
	uint8_t key[16];
	uint64_t length;
	uint32_t access;
	uint32_t reserved;
	uint64_t reserved0;
	uint64_t reserved1;
	uint64_t reserved2;
};
_Static_assert(sizeof(struct peerlane_remote_key_layout) == 64, "peerlane_remote_key_layout");
_Static_assert(offsetof(struct peerlane_remote_key_layout, magic) == 0, "peerlane_remote_key_layout.magic");
_Static_assert(offsetof(struct peerlane_remote_key_layout, key) == 8, "peerlane_remote_key_layout.key");
_Static_assert(offsetof(struct peerlane_remote_key_layout, length) == 24, "peerlane_remote_key_layout.length");
_Static_assert(offsetof(struct peerlane_remote_key_layout, access) == 32, "peerlane_remote_key_layout.access");
_Static_assert(offsetof(struct peerlane_remote_key_layout, reserved) == 36, "peerlane_remote_key_layout.reserved");
_Static_assert(offsetof(struct peerlane_remote_key_layout, reserved0) == 40, "peerlane_remote_key_layout.reserved0");
_Static_assert(offsetof(struct peerlane_remote_key_layout, reserved1) == 48, "peerlane_remote_key_layout.reserved1");
_Static_assert(offsetof(struct peerlane_remote_key_layout, reserved2) == 56, "peerlane_remote_key_layout.reserved2");

struct peerlane_hello {
	uint32_t type;
	uint32_t sequence;
	uint64_t magic;
	uint32_t oldest;
	uint32_t newest;
	uint64_t program;
};
_Static_assert(sizeof(struct peerlane_hello) == 32, "peerlane_hello");
_Static_assert(offsetof(struct peerlane_hello, type) == 0, "peerlane_hello.type");
_Static_assert(offsetof(struct peerlane_hello, sequence) == 4, "peerlane_hello.sequence");
_Static_assert(offsetof(struct peerlane_hello, magic) == 8, "peerlane_hello.magic");
_Static_assert(offsetof(struct peerlane_hello, oldest) == 16, "peerlane_hello.oldest");
_Static_assert(offsetof(struct peerlane_hello, newest) == 20, "peerlane_hello.newest");
_Static_assert(offsetof(struct peerlane_hello, program) == 24, "peerlane_hello.program");

/* With four descriptors: submit memory (to map for reading and writing), */
/* complete memory (for reading), the eventfd that wakes the relay, the pipe that */
/* becomes readable to wake the client. */
struct peerlane_welcome {
	uint32_t type;
	uint32_t sequence;
	uint32_t version;
	uint32_t reserved;
	uint64_t session;
};
_Static_assert(sizeof(struct peerlane_welcome) == 24, "peerlane_welcome");
_Static_assert(offsetof(struct peerlane_welcome, type) == 0, "peerlane_welcome.type");
_Static_assert(offsetof(struct peerlane_welcome, sequence) == 4, "peerlane_welcome.sequence");
_Static_assert(offsetof(struct peerlane_welcome, version) == 8, "peerlane_welcome.version");
_Static_assert(offsetof(struct peerlane_welcome, reserved) == 12, "peerlane_welcome.reserved");
_Static_assert(offsetof(struct peerlane_welcome, session) == 16, "peerlane_welcome.session");

/* The answer to a refused request. The object of the error (a container, a GPU, a key of config.toml or */
/* a failed call) follows the zero byte that ends the reason; earlier releases do not read the object. */
struct peerlane_failure {
	uint32_t type;
	uint32_t sequence;
	uint32_t status;
	uint32_t reserved;
	char reason[488];
};
_Static_assert(sizeof(struct peerlane_failure) == 504, "peerlane_failure");
_Static_assert(offsetof(struct peerlane_failure, type) == 0, "peerlane_failure.type");
_Static_assert(offsetof(struct peerlane_failure, sequence) == 4, "peerlane_failure.sequence");
_Static_assert(offsetof(struct peerlane_failure, status) == 8, "peerlane_failure.status");
_Static_assert(offsetof(struct peerlane_failure, reserved) == 12, "peerlane_failure.reserved");
_Static_assert(offsetof(struct peerlane_failure, reason) == 16, "peerlane_failure.reason");

/* With one descriptor: the POSIX file descriptor of a CUDA VMM allocation. */
/* The range [offset, offset+length) of its `bytes` is exported. Without one: of */
/* the `parts` allocations that ExportPart messages brought, which lie side by side. */
struct peerlane_export {
	uint32_t type;
	uint32_t sequence;
	uint64_t bytes;
	uint64_t offset;
	uint64_t length;
	uint8_t gpu[16];
	uint32_t access;
	uint32_t parts;
};
_Static_assert(sizeof(struct peerlane_export) == 56, "peerlane_export");
_Static_assert(offsetof(struct peerlane_export, type) == 0, "peerlane_export.type");
_Static_assert(offsetof(struct peerlane_export, sequence) == 4, "peerlane_export.sequence");
_Static_assert(offsetof(struct peerlane_export, bytes) == 8, "peerlane_export.bytes");
_Static_assert(offsetof(struct peerlane_export, offset) == 16, "peerlane_export.offset");
_Static_assert(offsetof(struct peerlane_export, length) == 24, "peerlane_export.length");
_Static_assert(offsetof(struct peerlane_export, gpu) == 32, "peerlane_export.gpu");
_Static_assert(offsetof(struct peerlane_export, access) == 48, "peerlane_export.access");
_Static_assert(offsetof(struct peerlane_export, parts) == 52, "peerlane_export.parts");

/* wants: WantsDMABuf, or 0. */
struct peerlane_exported {
	uint32_t type;
	uint32_t sequence;
	uint32_t memory;
	uint32_t wants;
};
_Static_assert(sizeof(struct peerlane_exported) == 16, "peerlane_exported");
_Static_assert(offsetof(struct peerlane_exported, type) == 0, "peerlane_exported.type");
_Static_assert(offsetof(struct peerlane_exported, sequence) == 4, "peerlane_exported.sequence");
_Static_assert(offsetof(struct peerlane_exported, memory) == 8, "peerlane_exported.memory");
_Static_assert(offsetof(struct peerlane_exported, wants) == 12, "peerlane_exported.wants");

struct peerlane_unexport {
	uint32_t type;
	uint32_t sequence;
	uint32_t memory;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_unexport) == 16, "peerlane_unexport");
_Static_assert(offsetof(struct peerlane_unexport, type) == 0, "peerlane_unexport.type");
_Static_assert(offsetof(struct peerlane_unexport, sequence) == 4, "peerlane_unexport.sequence");
_Static_assert(offsetof(struct peerlane_unexport, memory) == 8, "peerlane_unexport.memory");
_Static_assert(offsetof(struct peerlane_unexport, reserved) == 12, "peerlane_unexport.reserved");

struct peerlane_done {
	uint32_t type;
	uint32_t sequence;
};
_Static_assert(sizeof(struct peerlane_done) == 8, "peerlane_done");
_Static_assert(offsetof(struct peerlane_done, type) == 0, "peerlane_done.type");
_Static_assert(offsetof(struct peerlane_done, sequence) == 4, "peerlane_done.sequence");

struct peerlane_listen {
	uint32_t type;
	uint32_t sequence;
	uint8_t gpu[16];
};
_Static_assert(sizeof(struct peerlane_listen) == 24, "peerlane_listen");
_Static_assert(offsetof(struct peerlane_listen, type) == 0, "peerlane_listen.type");
_Static_assert(offsetof(struct peerlane_listen, sequence) == 4, "peerlane_listen.sequence");
_Static_assert(offsetof(struct peerlane_listen, gpu) == 8, "peerlane_listen.gpu");

struct peerlane_listening {
	uint32_t type;
	uint32_t sequence;
	uint32_t listener;
	uint32_t reserved;
	uint8_t handle[128];
};
_Static_assert(sizeof(struct peerlane_listening) == 144, "peerlane_listening");
_Static_assert(offsetof(struct peerlane_listening, type) == 0, "peerlane_listening.type");
_Static_assert(offsetof(struct peerlane_listening, sequence) == 4, "peerlane_listening.sequence");
_Static_assert(offsetof(struct peerlane_listening, listener) == 8, "peerlane_listening.listener");
_Static_assert(offsetof(struct peerlane_listening, reserved) == 12, "peerlane_listening.reserved");
_Static_assert(offsetof(struct peerlane_listening, handle) == 16, "peerlane_listening.handle");

struct peerlane_unlisten {
	uint32_t type;
	uint32_t sequence;
	uint32_t listener;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_unlisten) == 16, "peerlane_unlisten");
_Static_assert(offsetof(struct peerlane_unlisten, type) == 0, "peerlane_unlisten.type");
_Static_assert(offsetof(struct peerlane_unlisten, sequence) == 4, "peerlane_unlisten.sequence");
_Static_assert(offsetof(struct peerlane_unlisten, listener) == 8, "peerlane_unlisten.listener");
_Static_assert(offsetof(struct peerlane_unlisten, reserved) == 12, "peerlane_unlisten.reserved");

/* Answered by Connected: this side will receive. */
struct peerlane_accept {
	uint32_t type;
	uint32_t sequence;
	uint32_t listener;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_accept) == 16, "peerlane_accept");
_Static_assert(offsetof(struct peerlane_accept, type) == 0, "peerlane_accept.type");
_Static_assert(offsetof(struct peerlane_accept, sequence) == 4, "peerlane_accept.sequence");
_Static_assert(offsetof(struct peerlane_accept, listener) == 8, "peerlane_accept.listener");
_Static_assert(offsetof(struct peerlane_accept, reserved) == 12, "peerlane_accept.reserved");

/* Answered by Connected: this side will send. */
struct peerlane_connect {
	uint32_t type;
	uint32_t sequence;
	uint8_t gpu[16];
	uint8_t handle[128];
};
_Static_assert(sizeof(struct peerlane_connect) == 152, "peerlane_connect");
_Static_assert(offsetof(struct peerlane_connect, type) == 0, "peerlane_connect.type");
_Static_assert(offsetof(struct peerlane_connect, sequence) == 4, "peerlane_connect.sequence");
_Static_assert(offsetof(struct peerlane_connect, gpu) == 8, "peerlane_connect.gpu");
_Static_assert(offsetof(struct peerlane_connect, handle) == 24, "peerlane_connect.handle");

struct peerlane_connected {
	uint32_t type;
	uint32_t sequence;
	uint32_t connection;
	uint32_t route;
	char peer[104];
};
_Static_assert(sizeof(struct peerlane_connected) == 120, "peerlane_connected");
_Static_assert(offsetof(struct peerlane_connected, type) == 0, "peerlane_connected.type");
_Static_assert(offsetof(struct peerlane_connected, sequence) == 4, "peerlane_connected.sequence");
_Static_assert(offsetof(struct peerlane_connected, connection) == 8, "peerlane_connected.connection");
_Static_assert(offsetof(struct peerlane_connected, route) == 12, "peerlane_connected.route");
_Static_assert(offsetof(struct peerlane_connected, peer) == 16, "peerlane_connected.peer");

struct peerlane_disconnect {
	uint32_t type;
	uint32_t sequence;
	uint32_t connection;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_disconnect) == 16, "peerlane_disconnect");
_Static_assert(offsetof(struct peerlane_disconnect, type) == 0, "peerlane_disconnect.type");
_Static_assert(offsetof(struct peerlane_disconnect, sequence) == 4, "peerlane_disconnect.sequence");
_Static_assert(offsetof(struct peerlane_disconnect, connection) == 8, "peerlane_disconnect.connection");
_Static_assert(offsetof(struct peerlane_disconnect, reserved) == 12, "peerlane_disconnect.reserved");

/* Event (sequence 0): the connection is down, with the cause. */
struct peerlane_connection_down {
	uint32_t type;
	uint32_t sequence;
	uint32_t connection;
	uint32_t status;
	char reason[488];
};
_Static_assert(sizeof(struct peerlane_connection_down) == 504, "peerlane_connection_down");
_Static_assert(offsetof(struct peerlane_connection_down, type) == 0, "peerlane_connection_down.type");
_Static_assert(offsetof(struct peerlane_connection_down, sequence) == 4, "peerlane_connection_down.sequence");
_Static_assert(offsetof(struct peerlane_connection_down, connection) == 8, "peerlane_connection_down.connection");
_Static_assert(offsetof(struct peerlane_connection_down, status) == 12, "peerlane_connection_down.status");
_Static_assert(offsetof(struct peerlane_connection_down, reason) == 16, "peerlane_connection_down.reason");

struct peerlane_statistics {
	uint32_t type;
	uint32_t sequence;
};
_Static_assert(sizeof(struct peerlane_statistics) == 8, "peerlane_statistics");
_Static_assert(offsetof(struct peerlane_statistics, type) == 0, "peerlane_statistics.type");
_Static_assert(offsetof(struct peerlane_statistics, sequence) == 4, "peerlane_statistics.sequence");

/* The relay's counters, in bytes. A server whose gpu is zero stands for the */
/* slots in the relay's own host memory: lanes that bounce. */
struct peerlane_statistics_reply {
	uint32_t type;
	uint32_t sequence;
	uint64_t sent;
	uint64_t received;
	uint64_t direct;
	uint64_t staged;
	uint32_t servers;
	uint32_t contexts;
	struct peerlane_server_bytes server[8];
};
_Static_assert(sizeof(struct peerlane_statistics_reply) == 304, "peerlane_statistics_reply");
_Static_assert(offsetof(struct peerlane_statistics_reply, type) == 0, "peerlane_statistics_reply.type");
_Static_assert(offsetof(struct peerlane_statistics_reply, sequence) == 4, "peerlane_statistics_reply.sequence");
_Static_assert(offsetof(struct peerlane_statistics_reply, sent) == 8, "peerlane_statistics_reply.sent");
_Static_assert(offsetof(struct peerlane_statistics_reply, received) == 16, "peerlane_statistics_reply.received");
_Static_assert(offsetof(struct peerlane_statistics_reply, direct) == 24, "peerlane_statistics_reply.direct");
_Static_assert(offsetof(struct peerlane_statistics_reply, staged) == 32, "peerlane_statistics_reply.staged");
_Static_assert(offsetof(struct peerlane_statistics_reply, servers) == 40, "peerlane_statistics_reply.servers");
_Static_assert(offsetof(struct peerlane_statistics_reply, contexts) == 44, "peerlane_statistics_reply.contexts");
_Static_assert(offsetof(struct peerlane_statistics_reply, server) == 48, "peerlane_statistics_reply.server");

/* Which lanes the container was given: MaxLanes of them at most. A gpu is zero */
/* where only the driver could tell, which is not asked; index is NVML's on the */
/* host, the N of nvidia.com/gpu=N there. */
struct peerlane_lanes {
	uint32_t type;
	uint32_t sequence;
};
_Static_assert(sizeof(struct peerlane_lanes) == 8, "peerlane_lanes");
_Static_assert(offsetof(struct peerlane_lanes, type) == 0, "peerlane_lanes.type");
_Static_assert(offsetof(struct peerlane_lanes, sequence) == 4, "peerlane_lanes.sequence");

struct peerlane_lanes_reply {
	uint32_t type;
	uint32_t sequence;
	uint32_t lanes;
	uint32_t reserved;
	struct peerlane_lane_gpu lane[32];
};
_Static_assert(sizeof(struct peerlane_lanes_reply) == 784, "peerlane_lanes_reply");
_Static_assert(offsetof(struct peerlane_lanes_reply, type) == 0, "peerlane_lanes_reply.type");
_Static_assert(offsetof(struct peerlane_lanes_reply, sequence) == 4, "peerlane_lanes_reply.sequence");
_Static_assert(offsetof(struct peerlane_lanes_reply, lanes) == 8, "peerlane_lanes_reply.lanes");
_Static_assert(offsetof(struct peerlane_lanes_reply, reserved) == 12, "peerlane_lanes_reply.reserved");
_Static_assert(offsetof(struct peerlane_lanes_reply, lane) == 16, "peerlane_lanes_reply.lane");

/* Asks for the NIC of the lane of a GPU; of several NICs the first. */
struct peerlane_lane_nic {
	uint32_t type;
	uint32_t sequence;
	uint8_t gpu[16];
};
_Static_assert(sizeof(struct peerlane_lane_nic) == 24, "peerlane_lane_nic");
_Static_assert(offsetof(struct peerlane_lane_nic, type) == 0, "peerlane_lane_nic.type");
_Static_assert(offsetof(struct peerlane_lane_nic, sequence) == 4, "peerlane_lane_nic.sequence");
_Static_assert(offsetof(struct peerlane_lane_nic, gpu) == 8, "peerlane_lane_nic.gpu");

/* guid is the number that NCCL's transport for InfiniBand has for that NIC, mbps the full */
/* rate of its fastest active port, in 10^6 bits a second, which is port; each 0 where the */
/* plan does not tell. name is as in /sys/class/infiniband, empty for a lane without a NIC. */
/* Of a lane that reaches only this host, guid, port and name are not there, and mbps is the */
/* rate of the GPU's links to its peers: no name and mbps that is not 0 say so. */
struct peerlane_lane_nic_reply {
	uint32_t type;
	uint32_t sequence;
	uint64_t guid;
	uint32_t mbps;
	uint32_t port;
	char name[64];
};
_Static_assert(sizeof(struct peerlane_lane_nic_reply) == 88, "peerlane_lane_nic_reply");
_Static_assert(offsetof(struct peerlane_lane_nic_reply, type) == 0, "peerlane_lane_nic_reply.type");
_Static_assert(offsetof(struct peerlane_lane_nic_reply, sequence) == 4, "peerlane_lane_nic_reply.sequence");
_Static_assert(offsetof(struct peerlane_lane_nic_reply, guid) == 8, "peerlane_lane_nic_reply.guid");
_Static_assert(offsetof(struct peerlane_lane_nic_reply, mbps) == 16, "peerlane_lane_nic_reply.mbps");
_Static_assert(offsetof(struct peerlane_lane_nic_reply, port) == 20, "peerlane_lane_nic_reply.port");
_Static_assert(offsetof(struct peerlane_lane_nic_reply, name) == 24, "peerlane_lane_nic_reply.name");

/* The client ends the session. A socket that closes without Goodbye means the client's death. */
struct peerlane_goodbye {
	uint32_t type;
	uint32_t sequence;
};
_Static_assert(sizeof(struct peerlane_goodbye) == 8, "peerlane_goodbye");
_Static_assert(offsetof(struct peerlane_goodbye, type) == 0, "peerlane_goodbye.type");
_Static_assert(offsetof(struct peerlane_goodbye, sequence) == 4, "peerlane_goodbye.sequence");

/* With one descriptor: the next of the allocations of an export that is still to */
/* come, and its place there. There is no answer: the answer of the export has errors. */
struct peerlane_export_part {
	uint32_t type;
	uint32_t sequence;
	uint64_t bytes;
	uint64_t offset;
};
_Static_assert(sizeof(struct peerlane_export_part) == 24, "peerlane_export_part");
_Static_assert(offsetof(struct peerlane_export_part, type) == 0, "peerlane_export_part.type");
_Static_assert(offsetof(struct peerlane_export_part, sequence) == 4, "peerlane_export_part.sequence");
_Static_assert(offsetof(struct peerlane_export_part, bytes) == 8, "peerlane_export_part.bytes");
_Static_assert(offsetof(struct peerlane_export_part, offset) == 16, "peerlane_export_part.offset");

/* Memory of cudaMalloc, where the configuration allows it. Answered by Exported. */
/* The range [offset, offset+length) of the allocation is exported. */
struct peerlane_export_ipc {
	uint32_t type;
	uint32_t sequence;
	uint64_t offset;
	uint64_t length;
	uint8_t gpu[16];
	uint32_t access;
	uint32_t reserved;
	char handle[64];
};
_Static_assert(sizeof(struct peerlane_export_ipc) == 112, "peerlane_export_ipc");
_Static_assert(offsetof(struct peerlane_export_ipc, type) == 0, "peerlane_export_ipc.type");
_Static_assert(offsetof(struct peerlane_export_ipc, sequence) == 4, "peerlane_export_ipc.sequence");
_Static_assert(offsetof(struct peerlane_export_ipc, offset) == 8, "peerlane_export_ipc.offset");
_Static_assert(offsetof(struct peerlane_export_ipc, length) == 16, "peerlane_export_ipc.length");
_Static_assert(offsetof(struct peerlane_export_ipc, gpu) == 24, "peerlane_export_ipc.gpu");
_Static_assert(offsetof(struct peerlane_export_ipc, access) == 40, "peerlane_export_ipc.access");
_Static_assert(offsetof(struct peerlane_export_ipc, reserved) == 44, "peerlane_export_ipc.reserved");
_Static_assert(offsetof(struct peerlane_export_ipc, handle) == 48, "peerlane_export_ipc.handle");

/* The relay makes host memory for the lane of a GPU, and pins it there. populates is 1, from */
/* PopulateVersion on, if the client allocates the pages: no operation can use the memory before */
/* the client has sent HostMemoryPopulated, and the relay pins it then. */
struct peerlane_host_memory {
	uint32_t type;
	uint32_t sequence;
	uint64_t bytes;
	uint8_t gpu[16];
	uint32_t access;
	uint32_t populates;
};
_Static_assert(sizeof(struct peerlane_host_memory) == 40, "peerlane_host_memory");
_Static_assert(offsetof(struct peerlane_host_memory, type) == 0, "peerlane_host_memory.type");
_Static_assert(offsetof(struct peerlane_host_memory, sequence) == 4, "peerlane_host_memory.sequence");
_Static_assert(offsetof(struct peerlane_host_memory, bytes) == 8, "peerlane_host_memory.bytes");
_Static_assert(offsetof(struct peerlane_host_memory, gpu) == 16, "peerlane_host_memory.gpu");
_Static_assert(offsetof(struct peerlane_host_memory, access) == 32, "peerlane_host_memory.access");
_Static_assert(offsetof(struct peerlane_host_memory, populates) == 36, "peerlane_host_memory.populates");

/* With one descriptor: the memory, to be mapped for reading and writing: as many */
/* bytes as were asked for, in whole pages. From here on it is like exported memory. */
struct peerlane_host_memory_made {
	uint32_t type;
	uint32_t sequence;
	uint64_t bytes;
	uint32_t memory;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_host_memory_made) == 24, "peerlane_host_memory_made");
_Static_assert(offsetof(struct peerlane_host_memory_made, type) == 0, "peerlane_host_memory_made.type");
_Static_assert(offsetof(struct peerlane_host_memory_made, sequence) == 4, "peerlane_host_memory_made.sequence");
_Static_assert(offsetof(struct peerlane_host_memory_made, bytes) == 8, "peerlane_host_memory_made.bytes");
_Static_assert(offsetof(struct peerlane_host_memory_made, memory) == 16, "peerlane_host_memory_made.memory");
_Static_assert(offsetof(struct peerlane_host_memory_made, reserved) == 20, "peerlane_host_memory_made.reserved");

/* The client has allocated the pages of host memory, so that the kernel charges them to the */
/* client's control group. The relay allocates the pages that are missing. Answered by Done. */
struct peerlane_host_memory_populated {
	uint32_t type;
	uint32_t sequence;
	uint32_t memory;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_host_memory_populated) == 16, "peerlane_host_memory_populated");
_Static_assert(offsetof(struct peerlane_host_memory_populated, type) == 0, "peerlane_host_memory_populated.type");
_Static_assert(offsetof(struct peerlane_host_memory_populated, sequence) == 4, "peerlane_host_memory_populated.sequence");
_Static_assert(offsetof(struct peerlane_host_memory_populated, memory) == 8, "peerlane_host_memory_populated.memory");
_Static_assert(offsetof(struct peerlane_host_memory_populated, reserved) == 12, "peerlane_host_memory_populated.reserved");

/* The relay makes staging memory for the client itself to copy to and from: on a */
/* server GPU of the lane of a GPU. Only for a container that has the server GPUs' */
/* device nodes. */
struct peerlane_staging {
	uint32_t type;
	uint32_t sequence;
	uint64_t bytes;
	uint8_t gpu[16];
	uint32_t access;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_staging) == 40, "peerlane_staging");
_Static_assert(offsetof(struct peerlane_staging, type) == 0, "peerlane_staging.type");
_Static_assert(offsetof(struct peerlane_staging, sequence) == 4, "peerlane_staging.sequence");
_Static_assert(offsetof(struct peerlane_staging, bytes) == 8, "peerlane_staging.bytes");
_Static_assert(offsetof(struct peerlane_staging, gpu) == 16, "peerlane_staging.gpu");
_Static_assert(offsetof(struct peerlane_staging, access) == 32, "peerlane_staging.access");
_Static_assert(offsetof(struct peerlane_staging, reserved) == 36, "peerlane_staging.reserved");

/* With one descriptor: the POSIX file descriptor of a CUDA VMM allocation of `bytes`, */
/* as many as were asked for or more; index is NVML's of the server GPU on the host. */
/* From here on the memory is like exported memory, but no relay copies the memory on route staged. */
struct peerlane_staging_made {
	uint32_t type;
	uint32_t sequence;
	uint64_t bytes;
	uint32_t memory;
	uint32_t index;
	uint8_t server[16];
};
_Static_assert(sizeof(struct peerlane_staging_made) == 40, "peerlane_staging_made");
_Static_assert(offsetof(struct peerlane_staging_made, type) == 0, "peerlane_staging_made.type");
_Static_assert(offsetof(struct peerlane_staging_made, sequence) == 4, "peerlane_staging_made.sequence");
_Static_assert(offsetof(struct peerlane_staging_made, bytes) == 8, "peerlane_staging_made.bytes");
_Static_assert(offsetof(struct peerlane_staging_made, memory) == 16, "peerlane_staging_made.memory");
_Static_assert(offsetof(struct peerlane_staging_made, index) == 20, "peerlane_staging_made.index");
_Static_assert(offsetof(struct peerlane_staging_made, server) == 24, "peerlane_staging_made.server");

/* The relay opens an event of a stream of a GPU, by cuIpcGetEventHandle's handle, where */
/* the configuration allows it and the driver can. Answered by EventOpened. */
struct peerlane_event {
	uint32_t type;
	uint32_t sequence;
	uint8_t gpu[16];
	char handle[64];
};
_Static_assert(sizeof(struct peerlane_event) == 88, "peerlane_event");
_Static_assert(offsetof(struct peerlane_event, type) == 0, "peerlane_event.type");
_Static_assert(offsetof(struct peerlane_event, sequence) == 4, "peerlane_event.sequence");
_Static_assert(offsetof(struct peerlane_event, gpu) == 8, "peerlane_event.gpu");
_Static_assert(offsetof(struct peerlane_event, handle) == 24, "peerlane_event.handle");

struct peerlane_event_opened {
	uint32_t type;
	uint32_t sequence;
	uint32_t event;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_event_opened) == 16, "peerlane_event_opened");
_Static_assert(offsetof(struct peerlane_event_opened, type) == 0, "peerlane_event_opened.type");
_Static_assert(offsetof(struct peerlane_event_opened, sequence) == 4, "peerlane_event_opened.sequence");
_Static_assert(offsetof(struct peerlane_event_opened, event) == 8, "peerlane_event_opened.event");
_Static_assert(offsetof(struct peerlane_event_opened, reserved) == 12, "peerlane_event_opened.reserved");

/* No later operation waits for the event. Answered by Done. */
struct peerlane_event_close {
	uint32_t type;
	uint32_t sequence;
	uint32_t event;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_event_close) == 16, "peerlane_event_close");
_Static_assert(offsetof(struct peerlane_event_close, type) == 0, "peerlane_event_close.type");
_Static_assert(offsetof(struct peerlane_event_close, sequence) == 4, "peerlane_event_close.sequence");
_Static_assert(offsetof(struct peerlane_event_close, event) == 8, "peerlane_event_close.event");
_Static_assert(offsetof(struct peerlane_event_close, reserved) == 12, "peerlane_event_close.reserved");

/* The client exposes a range of exported memory to the present and later connections of a */
/* listener, or to one accepted connection: the other field is 0. */
struct peerlane_expose {
	uint32_t type;
	uint32_t sequence;
	uint64_t offset;
	uint64_t length;
	uint32_t memory;
	uint32_t access;
	uint32_t listener;
	uint32_t connection;
};
_Static_assert(sizeof(struct peerlane_expose) == 40, "peerlane_expose");
_Static_assert(offsetof(struct peerlane_expose, type) == 0, "peerlane_expose.type");
_Static_assert(offsetof(struct peerlane_expose, sequence) == 4, "peerlane_expose.sequence");
_Static_assert(offsetof(struct peerlane_expose, offset) == 8, "peerlane_expose.offset");
_Static_assert(offsetof(struct peerlane_expose, length) == 16, "peerlane_expose.length");
_Static_assert(offsetof(struct peerlane_expose, memory) == 24, "peerlane_expose.memory");
_Static_assert(offsetof(struct peerlane_expose, access) == 28, "peerlane_expose.access");
_Static_assert(offsetof(struct peerlane_expose, listener) == 32, "peerlane_expose.listener");
_Static_assert(offsetof(struct peerlane_expose, connection) == 36, "peerlane_expose.connection");

struct peerlane_exposed {
	uint32_t type;
	uint32_t sequence;
	uint32_t region;
	uint32_t reserved;
	uint8_t key[16];
};
_Static_assert(sizeof(struct peerlane_exposed) == 32, "peerlane_exposed");
_Static_assert(offsetof(struct peerlane_exposed, type) == 0, "peerlane_exposed.type");
_Static_assert(offsetof(struct peerlane_exposed, sequence) == 4, "peerlane_exposed.sequence");
_Static_assert(offsetof(struct peerlane_exposed, region) == 8, "peerlane_exposed.region");
_Static_assert(offsetof(struct peerlane_exposed, reserved) == 12, "peerlane_exposed.reserved");
_Static_assert(offsetof(struct peerlane_exposed, key) == 16, "peerlane_exposed.key");

/* From ListVersion on. The relay makes the memory of lists, MaxListEntries of ListEntryLayout, and */
/* answers later requests of the session with the same memory. */
struct peerlane_list_memory {
	uint32_t type;
	uint32_t sequence;
};
_Static_assert(sizeof(struct peerlane_list_memory) == 8, "peerlane_list_memory");
_Static_assert(offsetof(struct peerlane_list_memory, type) == 0, "peerlane_list_memory.type");
_Static_assert(offsetof(struct peerlane_list_memory, sequence) == 4, "peerlane_list_memory.sequence");

/* With one descriptor: the memory, to be mapped for reading and writing. The client allocates */
/* the pages. The relay copies entries by pread(), which needs no pages. */
struct peerlane_list_memory_made {
	uint32_t type;
	uint32_t sequence;
	uint64_t bytes;
};
_Static_assert(sizeof(struct peerlane_list_memory_made) == 16, "peerlane_list_memory_made");
_Static_assert(offsetof(struct peerlane_list_memory_made, type) == 0, "peerlane_list_memory_made.type");
_Static_assert(offsetof(struct peerlane_list_memory_made, sequence) == 4, "peerlane_list_memory_made.sequence");
_Static_assert(offsetof(struct peerlane_list_memory_made, bytes) == 8, "peerlane_list_memory_made.bytes");

/* Answered by Done when no operation accesses the range. */
struct peerlane_revoke {
	uint32_t type;
	uint32_t sequence;
	uint32_t region;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_revoke) == 16, "peerlane_revoke");
_Static_assert(offsetof(struct peerlane_revoke, type) == 0, "peerlane_revoke.type");
_Static_assert(offsetof(struct peerlane_revoke, sequence) == 4, "peerlane_revoke.sequence");
_Static_assert(offsetof(struct peerlane_revoke, region) == 8, "peerlane_revoke.region");
_Static_assert(offsetof(struct peerlane_revoke, reserved) == 12, "peerlane_revoke.reserved");

struct peerlane_peer_hello {
	uint32_t type;
	uint32_t sequence;
	uint64_t magic;
	uint32_t oldest;
	uint32_t newest;
	uint8_t token[16];
	uint8_t generation[16];
	uint8_t gpu[16];
	uint32_t route;
	uint32_t shares;
	char name[104];
};
_Static_assert(sizeof(struct peerlane_peer_hello) == 184, "peerlane_peer_hello");
_Static_assert(offsetof(struct peerlane_peer_hello, type) == 0, "peerlane_peer_hello.type");
_Static_assert(offsetof(struct peerlane_peer_hello, sequence) == 4, "peerlane_peer_hello.sequence");
_Static_assert(offsetof(struct peerlane_peer_hello, magic) == 8, "peerlane_peer_hello.magic");
_Static_assert(offsetof(struct peerlane_peer_hello, oldest) == 16, "peerlane_peer_hello.oldest");
_Static_assert(offsetof(struct peerlane_peer_hello, newest) == 20, "peerlane_peer_hello.newest");
_Static_assert(offsetof(struct peerlane_peer_hello, token) == 24, "peerlane_peer_hello.token");
_Static_assert(offsetof(struct peerlane_peer_hello, generation) == 40, "peerlane_peer_hello.generation");
_Static_assert(offsetof(struct peerlane_peer_hello, gpu) == 56, "peerlane_peer_hello.gpu");
_Static_assert(offsetof(struct peerlane_peer_hello, route) == 72, "peerlane_peer_hello.route");
_Static_assert(offsetof(struct peerlane_peer_hello, shares) == 76, "peerlane_peer_hello.shares");
_Static_assert(offsetof(struct peerlane_peer_hello, name) == 80, "peerlane_peer_hello.name");

/* With one descriptor on route staged: the end of a socket pair on which the */
/* sender's NIC delivers each write's immediate to the receiver. */
struct peerlane_peer_welcome {
	uint32_t type;
	uint32_t sequence;
	uint32_t version;
	uint32_t route;
	uint8_t generation[16];
	uint8_t gpu[16];
	char name[104];
};
_Static_assert(sizeof(struct peerlane_peer_welcome) == 152, "peerlane_peer_welcome");
_Static_assert(offsetof(struct peerlane_peer_welcome, type) == 0, "peerlane_peer_welcome.type");
_Static_assert(offsetof(struct peerlane_peer_welcome, sequence) == 4, "peerlane_peer_welcome.sequence");
_Static_assert(offsetof(struct peerlane_peer_welcome, version) == 8, "peerlane_peer_welcome.version");
_Static_assert(offsetof(struct peerlane_peer_welcome, route) == 12, "peerlane_peer_welcome.route");
_Static_assert(offsetof(struct peerlane_peer_welcome, generation) == 16, "peerlane_peer_welcome.generation");
_Static_assert(offsetof(struct peerlane_peer_welcome, gpu) == 32, "peerlane_peer_welcome.gpu");
_Static_assert(offsetof(struct peerlane_peer_welcome, name) == 48, "peerlane_peer_welcome.name");

/* With one descriptor, but for MemoryRemote: memory that the sender may write once it */
/* holds a grant. */
struct peerlane_peer_region {
	uint32_t type;
	uint32_t sequence;
	uint32_t region;
	uint32_t kind;
	uint64_t bytes;
	uint8_t gpu[16];
};
_Static_assert(sizeof(struct peerlane_peer_region) == 40, "peerlane_peer_region");
_Static_assert(offsetof(struct peerlane_peer_region, type) == 0, "peerlane_peer_region.type");
_Static_assert(offsetof(struct peerlane_peer_region, sequence) == 4, "peerlane_peer_region.sequence");
_Static_assert(offsetof(struct peerlane_peer_region, region) == 8, "peerlane_peer_region.region");
_Static_assert(offsetof(struct peerlane_peer_region, kind) == 12, "peerlane_peer_region.kind");
_Static_assert(offsetof(struct peerlane_peer_region, bytes) == 16, "peerlane_peer_region.bytes");
_Static_assert(offsetof(struct peerlane_peer_region, gpu) == 24, "peerlane_peer_region.gpu");

/* With one descriptor: the next allocation of a region of MemoryParts that is still */
/* to come. */
struct peerlane_peer_region_part {
	uint32_t type;
	uint32_t sequence;
	uint32_t region;
	uint32_t reserved;
	uint64_t bytes;
};
_Static_assert(sizeof(struct peerlane_peer_region_part) == 24, "peerlane_peer_region_part");
_Static_assert(offsetof(struct peerlane_peer_region_part, type) == 0, "peerlane_peer_region_part.type");
_Static_assert(offsetof(struct peerlane_peer_region_part, sequence) == 4, "peerlane_peer_region_part.sequence");
_Static_assert(offsetof(struct peerlane_peer_region_part, region) == 8, "peerlane_peer_region_part.region");
_Static_assert(offsetof(struct peerlane_peer_region_part, reserved) == 12, "peerlane_peer_region_part.reserved");
_Static_assert(offsetof(struct peerlane_peer_region_part, bytes) == 16, "peerlane_peer_region_part.bytes");

/* Of two hosts: windows of `bytes` each, side by side from an offset of a region on. The */
/* sender may write a message into each without a grant. */
struct peerlane_peer_quota {
	uint32_t type;
	uint32_t sequence;
	uint32_t region;
	uint32_t windows;
	uint64_t bytes;
	uint64_t offset;
};
_Static_assert(sizeof(struct peerlane_peer_quota) == 32, "peerlane_peer_quota");
_Static_assert(offsetof(struct peerlane_peer_quota, type) == 0, "peerlane_peer_quota.type");
_Static_assert(offsetof(struct peerlane_peer_quota, sequence) == 4, "peerlane_peer_quota.sequence");
_Static_assert(offsetof(struct peerlane_peer_quota, region) == 8, "peerlane_peer_quota.region");
_Static_assert(offsetof(struct peerlane_peer_quota, windows) == 12, "peerlane_peer_quota.windows");
_Static_assert(offsetof(struct peerlane_peer_quota, bytes) == 16, "peerlane_peer_quota.bytes");
_Static_assert(offsetof(struct peerlane_peer_quota, offset) == 24, "peerlane_peer_quota.offset");

/* The sender has a short message, and writes it into a window. The window is its own again */
/* when the message is delivered, or refused. Of one host the bytes are in the window when */
/* this comes, and the receiver can grant room for the message all the same. */
struct peerlane_peer_eager {
	uint32_t type;
	uint32_t sequence;
	uint64_t send;
	uint64_t tag;
	uint64_t length;
	uint32_t window;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_peer_eager) == 40, "peerlane_peer_eager");
_Static_assert(offsetof(struct peerlane_peer_eager, type) == 0, "peerlane_peer_eager.type");
_Static_assert(offsetof(struct peerlane_peer_eager, sequence) == 4, "peerlane_peer_eager.sequence");
_Static_assert(offsetof(struct peerlane_peer_eager, send) == 8, "peerlane_peer_eager.send");
_Static_assert(offsetof(struct peerlane_peer_eager, tag) == 16, "peerlane_peer_eager.tag");
_Static_assert(offsetof(struct peerlane_peer_eager, length) == 24, "peerlane_peer_eager.length");
_Static_assert(offsetof(struct peerlane_peer_eager, window) == 32, "peerlane_peer_eager.window");
_Static_assert(offsetof(struct peerlane_peer_eager, reserved) == 36, "peerlane_peer_eager.reserved");

/* The sender has a message. */
struct peerlane_peer_send {
	uint32_t type;
	uint32_t sequence;
	uint64_t send;
	uint64_t tag;
	uint64_t length;
};
_Static_assert(sizeof(struct peerlane_peer_send) == 32, "peerlane_peer_send");
_Static_assert(offsetof(struct peerlane_peer_send, type) == 0, "peerlane_peer_send.type");
_Static_assert(offsetof(struct peerlane_peer_send, sequence) == 4, "peerlane_peer_send.sequence");
_Static_assert(offsetof(struct peerlane_peer_send, send) == 8, "peerlane_peer_send.send");
_Static_assert(offsetof(struct peerlane_peer_send, tag) == 16, "peerlane_peer_send.tag");
_Static_assert(offsetof(struct peerlane_peer_send, length) == 24, "peerlane_peer_send.length");

/* The receiver has room for the part [part, part+length) of message `send`. */
struct peerlane_peer_grant {
	uint32_t type;
	uint32_t sequence;
	uint64_t send;
	uint64_t grant;
	uint64_t part;
	uint64_t length;
	uint64_t offset;
	uint32_t region;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_peer_grant) == 56, "peerlane_peer_grant");
_Static_assert(offsetof(struct peerlane_peer_grant, type) == 0, "peerlane_peer_grant.type");
_Static_assert(offsetof(struct peerlane_peer_grant, sequence) == 4, "peerlane_peer_grant.sequence");
_Static_assert(offsetof(struct peerlane_peer_grant, send) == 8, "peerlane_peer_grant.send");
_Static_assert(offsetof(struct peerlane_peer_grant, grant) == 16, "peerlane_peer_grant.grant");
_Static_assert(offsetof(struct peerlane_peer_grant, part) == 24, "peerlane_peer_grant.part");
_Static_assert(offsetof(struct peerlane_peer_grant, length) == 32, "peerlane_peer_grant.length");
_Static_assert(offsetof(struct peerlane_peer_grant, offset) == 40, "peerlane_peer_grant.offset");
_Static_assert(offsetof(struct peerlane_peer_grant, region) == 48, "peerlane_peer_grant.region");
_Static_assert(offsetof(struct peerlane_peer_grant, reserved) == 52, "peerlane_peer_grant.reserved");

/* Route direct: the bytes of a grant are in the receiver's memory. */
struct peerlane_peer_written {
	uint32_t type;
	uint32_t sequence;
	uint64_t grant;
};
_Static_assert(sizeof(struct peerlane_peer_written) == 16, "peerlane_peer_written");
_Static_assert(offsetof(struct peerlane_peer_written, type) == 0, "peerlane_peer_written.type");
_Static_assert(offsetof(struct peerlane_peer_written, sequence) == 4, "peerlane_peer_written.sequence");
_Static_assert(offsetof(struct peerlane_peer_written, grant) == 8, "peerlane_peer_written.grant");

/* The whole message is in the receiver's memory, or is refused. */
struct peerlane_peer_delivered {
	uint32_t type;
	uint32_t sequence;
	uint64_t send;
	uint32_t status;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_peer_delivered) == 24, "peerlane_peer_delivered");
_Static_assert(offsetof(struct peerlane_peer_delivered, type) == 0, "peerlane_peer_delivered.type");
_Static_assert(offsetof(struct peerlane_peer_delivered, sequence) == 4, "peerlane_peer_delivered.sequence");
_Static_assert(offsetof(struct peerlane_peer_delivered, send) == 8, "peerlane_peer_delivered.send");
_Static_assert(offsetof(struct peerlane_peer_delivered, status) == 16, "peerlane_peer_delivered.status");
_Static_assert(offsetof(struct peerlane_peer_delivered, reserved) == 20, "peerlane_peer_delivered.reserved");

/* The sender would like to take back a message that has no grant. */
struct peerlane_peer_withdraw {
	uint32_t type;
	uint32_t sequence;
	uint64_t send;
};
_Static_assert(sizeof(struct peerlane_peer_withdraw) == 16, "peerlane_peer_withdraw");
_Static_assert(offsetof(struct peerlane_peer_withdraw, type) == 0, "peerlane_peer_withdraw.type");
_Static_assert(offsetof(struct peerlane_peer_withdraw, sequence) == 4, "peerlane_peer_withdraw.sequence");
_Static_assert(offsetof(struct peerlane_peer_withdraw, send) == 8, "peerlane_peer_withdraw.send");

struct peerlane_peer_close {
	uint32_t type;
	uint32_t sequence;
	uint32_t status;
	uint32_t reserved;
	char reason[488];
};
_Static_assert(sizeof(struct peerlane_peer_close) == 504, "peerlane_peer_close");
_Static_assert(offsetof(struct peerlane_peer_close, type) == 0, "peerlane_peer_close.type");
_Static_assert(offsetof(struct peerlane_peer_close, sequence) == 4, "peerlane_peer_close.sequence");
_Static_assert(offsetof(struct peerlane_peer_close, status) == 8, "peerlane_peer_close.status");
_Static_assert(offsetof(struct peerlane_peer_close, reserved) == 12, "peerlane_peer_close.reserved");
_Static_assert(offsetof(struct peerlane_peer_close, reason) == 16, "peerlane_peer_close.reason");

/* The receiver will grant nothing in this region any more. */
struct peerlane_peer_forget {
	uint32_t type;
	uint32_t sequence;
	uint32_t region;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_peer_forget) == 16, "peerlane_peer_forget");
_Static_assert(offsetof(struct peerlane_peer_forget, type) == 0, "peerlane_peer_forget.type");
_Static_assert(offsetof(struct peerlane_peer_forget, sequence) == 4, "peerlane_peer_forget.sequence");
_Static_assert(offsetof(struct peerlane_peer_forget, region) == 8, "peerlane_peer_forget.region");
_Static_assert(offsetof(struct peerlane_peer_forget, reserved) == 12, "peerlane_peer_forget.reserved");

/* With one descriptor: memory for later messages that fit. */
struct peerlane_peer_share {
	uint32_t type;
	uint32_t sequence;
};
_Static_assert(sizeof(struct peerlane_peer_share) == 8, "peerlane_peer_share");
_Static_assert(offsetof(struct peerlane_peer_share, type) == 0, "peerlane_peer_share.type");
_Static_assert(offsetof(struct peerlane_peer_share, sequence) == 4, "peerlane_peer_share.sequence");

/* The memory is mapped; this is the last message outside the memory's order. */
struct peerlane_peer_shared {
	uint32_t type;
	uint32_t sequence;
};
_Static_assert(sizeof(struct peerlane_peer_shared) == 8, "peerlane_peer_shared");
_Static_assert(offsetof(struct peerlane_peer_shared, type) == 0, "peerlane_peer_shared.type");
_Static_assert(offsetof(struct peerlane_peer_shared, sequence) == 4, "peerlane_peer_shared.sequence");

/* Wakes a sleeping side: the memory has a message. */
struct peerlane_peer_bell {
	uint32_t type;
	uint32_t sequence;
};
_Static_assert(sizeof(struct peerlane_peer_bell) == 8, "peerlane_peer_bell");
_Static_assert(offsetof(struct peerlane_peer_bell, type) == 0, "peerlane_peer_bell.type");
_Static_assert(offsetof(struct peerlane_peer_bell, sequence) == 4, "peerlane_peer_bell.sequence");

/* The sender has a message for a region of the receiver's client, without a receive: from here */
/* on the message is like one of PeerSend, with a number of the same sequence. */
struct peerlane_peer_write {
	uint32_t type;
	uint32_t sequence;
	uint64_t send;
	uint64_t length;
	uint64_t offset;
	uint8_t key[16];
};
_Static_assert(sizeof(struct peerlane_peer_write) == 48, "peerlane_peer_write");
_Static_assert(offsetof(struct peerlane_peer_write, type) == 0, "peerlane_peer_write.type");
_Static_assert(offsetof(struct peerlane_peer_write, sequence) == 4, "peerlane_peer_write.sequence");
_Static_assert(offsetof(struct peerlane_peer_write, send) == 8, "peerlane_peer_write.send");
_Static_assert(offsetof(struct peerlane_peer_write, length) == 16, "peerlane_peer_write.length");
_Static_assert(offsetof(struct peerlane_peer_write, offset) == 24, "peerlane_peer_write.offset");
_Static_assert(offsetof(struct peerlane_peer_write, key) == 32, "peerlane_peer_write.key");

/* The sender's client reads a region of the receiver's client: the bytes use the reverse connection. */
struct peerlane_peer_read {
	uint32_t type;
	uint32_t sequence;
	uint64_t read;
	uint64_t length;
	uint64_t offset;
	uint8_t key[16];
};
_Static_assert(sizeof(struct peerlane_peer_read) == 48, "peerlane_peer_read");
_Static_assert(offsetof(struct peerlane_peer_read, type) == 0, "peerlane_peer_read.type");
_Static_assert(offsetof(struct peerlane_peer_read, sequence) == 4, "peerlane_peer_read.sequence");
_Static_assert(offsetof(struct peerlane_peer_read, read) == 8, "peerlane_peer_read.read");
_Static_assert(offsetof(struct peerlane_peer_read, length) == 16, "peerlane_peer_read.length");
_Static_assert(offsetof(struct peerlane_peer_read, offset) == 24, "peerlane_peer_read.offset");
_Static_assert(offsetof(struct peerlane_peer_read, key) == 32, "peerlane_peer_read.key");

/* The receiver refuses a read. */
struct peerlane_peer_read_refused {
	uint32_t type;
	uint32_t sequence;
	uint64_t read;
	uint32_t status;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_peer_read_refused) == 24, "peerlane_peer_read_refused");
_Static_assert(offsetof(struct peerlane_peer_read_refused, type) == 0, "peerlane_peer_read_refused.type");
_Static_assert(offsetof(struct peerlane_peer_read_refused, sequence) == 4, "peerlane_peer_read_refused.sequence");
_Static_assert(offsetof(struct peerlane_peer_read_refused, read) == 8, "peerlane_peer_read_refused.read");
_Static_assert(offsetof(struct peerlane_peer_read_refused, status) == 16, "peerlane_peer_read_refused.status");
_Static_assert(offsetof(struct peerlane_peer_read_refused, reserved) == 20, "peerlane_peer_read_refused.reserved");

/* On the reverse connection: a message of its sender, which matches read `read`. */
struct peerlane_peer_read_data {
	uint32_t type;
	uint32_t sequence;
	uint64_t send;
	uint64_t read;
	uint64_t length;
};
_Static_assert(sizeof(struct peerlane_peer_read_data) == 32, "peerlane_peer_read_data");
_Static_assert(offsetof(struct peerlane_peer_read_data, type) == 0, "peerlane_peer_read_data.type");
_Static_assert(offsetof(struct peerlane_peer_read_data, sequence) == 4, "peerlane_peer_read_data.sequence");
_Static_assert(offsetof(struct peerlane_peer_read_data, send) == 8, "peerlane_peer_read_data.send");
_Static_assert(offsetof(struct peerlane_peer_read_data, read) == 16, "peerlane_peer_read_data.read");
_Static_assert(offsetof(struct peerlane_peer_read_data, length) == 24, "peerlane_peer_read_data.length");

/* Requests the reverse connection: the receiver connects to the sender, by this token, and over */
/* this host's sockets to this generation. */
struct peerlane_peer_back {
	uint32_t type;
	uint32_t sequence;
	uint8_t token[16];
	uint8_t generation[16];
};
_Static_assert(sizeof(struct peerlane_peer_back) == 40, "peerlane_peer_back");
_Static_assert(offsetof(struct peerlane_peer_back, type) == 0, "peerlane_peer_back.type");
_Static_assert(offsetof(struct peerlane_peer_back, sequence) == 4, "peerlane_peer_back.sequence");
_Static_assert(offsetof(struct peerlane_peer_back, token) == 8, "peerlane_peer_back.token");
_Static_assert(offsetof(struct peerlane_peer_back, generation) == 24, "peerlane_peer_back.generation");

/* The reverse connection could not be opened. Earlier requested reads get no answer. */
struct peerlane_peer_back_refused {
	uint32_t type;
	uint32_t sequence;
	uint32_t status;
	uint32_t reserved;
	char reason[488];
};
_Static_assert(sizeof(struct peerlane_peer_back_refused) == 504, "peerlane_peer_back_refused");
_Static_assert(offsetof(struct peerlane_peer_back_refused, type) == 0, "peerlane_peer_back_refused.type");
_Static_assert(offsetof(struct peerlane_peer_back_refused, sequence) == 4, "peerlane_peer_back_refused.sequence");
_Static_assert(offsetof(struct peerlane_peer_back_refused, status) == 8, "peerlane_peer_back_refused.status");
_Static_assert(offsetof(struct peerlane_peer_back_refused, reserved) == 12, "peerlane_peer_back_refused.reserved");
_Static_assert(offsetof(struct peerlane_peer_back_refused, reason) == 16, "peerlane_peer_back_refused.reason");

/* Ranges of a region, of the next PeerWriteList or PeerReadList: `count` ranges under one key. */
/* The bytes of the ranges, in order, are one message. */
struct peerlane_peer_ranges {
	uint32_t type;
	uint32_t sequence;
	uint8_t key[16];
	uint32_t count;
	uint32_t reserved;
	struct peerlane_range range[60];
};
_Static_assert(sizeof(struct peerlane_peer_ranges) == 992, "peerlane_peer_ranges");
_Static_assert(offsetof(struct peerlane_peer_ranges, type) == 0, "peerlane_peer_ranges.type");
_Static_assert(offsetof(struct peerlane_peer_ranges, sequence) == 4, "peerlane_peer_ranges.sequence");
_Static_assert(offsetof(struct peerlane_peer_ranges, key) == 8, "peerlane_peer_ranges.key");
_Static_assert(offsetof(struct peerlane_peer_ranges, count) == 24, "peerlane_peer_ranges.count");
_Static_assert(offsetof(struct peerlane_peer_ranges, reserved) == 28, "peerlane_peer_ranges.reserved");
_Static_assert(offsetof(struct peerlane_peer_ranges, range) == 32, "peerlane_peer_ranges.range");

/* As PeerWrite, of the ranges of PeerRanges. */
struct peerlane_peer_write_list {
	uint32_t type;
	uint32_t sequence;
	uint64_t send;
	uint64_t length;
	uint32_t ranges;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_peer_write_list) == 32, "peerlane_peer_write_list");
_Static_assert(offsetof(struct peerlane_peer_write_list, type) == 0, "peerlane_peer_write_list.type");
_Static_assert(offsetof(struct peerlane_peer_write_list, sequence) == 4, "peerlane_peer_write_list.sequence");
_Static_assert(offsetof(struct peerlane_peer_write_list, send) == 8, "peerlane_peer_write_list.send");
_Static_assert(offsetof(struct peerlane_peer_write_list, length) == 16, "peerlane_peer_write_list.length");
_Static_assert(offsetof(struct peerlane_peer_write_list, ranges) == 24, "peerlane_peer_write_list.ranges");
_Static_assert(offsetof(struct peerlane_peer_write_list, reserved) == 28, "peerlane_peer_write_list.reserved");

/* As PeerRead, of the ranges of PeerRanges. */
struct peerlane_peer_read_list {
	uint32_t type;
	uint32_t sequence;
	uint64_t read;
	uint64_t length;
	uint32_t ranges;
	uint32_t reserved;
};
_Static_assert(sizeof(struct peerlane_peer_read_list) == 32, "peerlane_peer_read_list");
_Static_assert(offsetof(struct peerlane_peer_read_list, type) == 0, "peerlane_peer_read_list.type");
_Static_assert(offsetof(struct peerlane_peer_read_list, sequence) == 4, "peerlane_peer_read_list.sequence");
_Static_assert(offsetof(struct peerlane_peer_read_list, read) == 8, "peerlane_peer_read_list.read");
_Static_assert(offsetof(struct peerlane_peer_read_list, length) == 16, "peerlane_peer_read_list.length");
_Static_assert(offsetof(struct peerlane_peer_read_list, ranges) == 24, "peerlane_peer_read_list.ranges");
_Static_assert(offsetof(struct peerlane_peer_read_list, reserved) == 28, "peerlane_peer_read_list.reserved");

/* The receiver refuses read or message `number` of a list, because of the range that has the */
/* byte at `position` of the message. reads is 1 for a read. */
struct peerlane_peer_list_refused {
	uint32_t type;
	uint32_t sequence;
	uint64_t number;
	uint64_t position;
	uint32_t status;
	uint32_t reads;
};
_Static_assert(sizeof(struct peerlane_peer_list_refused) == 32, "peerlane_peer_list_refused");
_Static_assert(offsetof(struct peerlane_peer_list_refused, type) == 0, "peerlane_peer_list_refused.type");
_Static_assert(offsetof(struct peerlane_peer_list_refused, sequence) == 4, "peerlane_peer_list_refused.sequence");
_Static_assert(offsetof(struct peerlane_peer_list_refused, number) == 8, "peerlane_peer_list_refused.number");
_Static_assert(offsetof(struct peerlane_peer_list_refused, position) == 16, "peerlane_peer_list_refused.position");
_Static_assert(offsetof(struct peerlane_peer_list_refused, status) == 24, "peerlane_peer_list_refused.status");
_Static_assert(offsetof(struct peerlane_peer_list_refused, reads) == 28, "peerlane_peer_list_refused.reads");

/* Route direct: `count` ranges in a region, of the PeerGrant with ListRegion that will come. */
struct peerlane_peer_grant_ranges {
	uint32_t type;
	uint32_t sequence;
	uint32_t region;
	uint32_t count;
	struct peerlane_range range[60];
};
_Static_assert(sizeof(struct peerlane_peer_grant_ranges) == 976, "peerlane_peer_grant_ranges");
_Static_assert(offsetof(struct peerlane_peer_grant_ranges, type) == 0, "peerlane_peer_grant_ranges.type");
_Static_assert(offsetof(struct peerlane_peer_grant_ranges, sequence) == 4, "peerlane_peer_grant_ranges.sequence");
_Static_assert(offsetof(struct peerlane_peer_grant_ranges, region) == 8, "peerlane_peer_grant_ranges.region");
_Static_assert(offsetof(struct peerlane_peer_grant_ranges, count) == 12, "peerlane_peer_grant_ranges.count");
_Static_assert(offsetof(struct peerlane_peer_grant_ranges, range) == 16, "peerlane_peer_grant_ranges.range");

/* Of exported memory whose Exported had WantsDMABuf. With one descriptor: a DMA-BUF */
/* (cuMemGetHandleForAddressRange) of the adjacent allocations, by which NICs read and write the */
/* memory in place. Without a descriptor: the reason. There is no answer: memory without a */
/* registration uses slots. */
struct peerlane_dma_buf {
	uint32_t type;
	uint32_t sequence;
	uint32_t memory;
	uint32_t reserved;
	char reason[240];
};
_Static_assert(sizeof(struct peerlane_dma_buf) == 256, "peerlane_dma_buf");
_Static_assert(offsetof(struct peerlane_dma_buf, type) == 0, "peerlane_dma_buf.type");
_Static_assert(offsetof(struct peerlane_dma_buf, sequence) == 4, "peerlane_dma_buf.sequence");
_Static_assert(offsetof(struct peerlane_dma_buf, memory) == 8, "peerlane_dma_buf.memory");
_Static_assert(offsetof(struct peerlane_dma_buf, reserved) == 12, "peerlane_dma_buf.reserved");
_Static_assert(offsetof(struct peerlane_dma_buf, reason) == 16, "peerlane_dma_buf.reason");

#endif
