// Code generated from protocol.def by relay/wire/generate. DO NOT EDIT.

package wire

import "unsafe"

// Constants of the protocol.
const (
	// The first words of Hello and PeerHello: "PEER" and "LANE".
	Magic = 0x454e414c52454550
	// The first word of a RemoteKeyLayout: "LANERKEY".
	RemoteKeyMagic = 0x59454b52454e414c
	// Versions of the protocol that this source speaks.
	OldestVersion = 1
	NewestVersion = 6
	// The first version with LaneNIC. A relay ends a session that sends an unknown message, so a
	// client does not send LaneNIC to an older relay.
	LaneNICVersion = 2
	// The first version in which two relays of a host share windows on route direct: the memory of
	// PeerShare ends with the windows.
	WindowsVersion = 3
	// The first version in which a client allocates the pages of its host memory: HostMemory has
	// populates, and HostMemoryPopulated exists.
	PopulateVersion = 4
	// The first version with lists: OpReadList and OpWriteList of a client, and PeerRanges and the
	// following messages of another relay.
	ListVersion = 5
	// The first version with the flag BufferedSend. An older relay refuses a Descriptor with the flag.
	BufferedVersion = 6
	// Entries of each of a session's two rings; a power of two.
	RingEntries = 1024
	// Timelines of a session, and the distance between two timelines in bytes.
	Timelines      = 256
	TimelineStride = 64
	// The value of every timeline of an ended session, so that each wait for a smaller value
	// returns. CUDA compares cyclically, so the value is not the largest.
	TimelineEnd = 0x4000000000000000
	// "No timeline" in a Descriptor.
	NoTimeline = 0xffffffff
	// The value of a hand-over's timeline names the side with the turn: the GPU's stream or
	// the relay. A stream waits for any bit of TurnStream and TimelineEnd.
	TurnStream = 1
	TurnRelay  = 2
	// Flags of a Descriptor. InTurn: the operation begins when wait_timeline is
	// TurnRelay, which no other operation takes for its turn until this one has ended;
	// then the relay sets the timeline to TurnStream. There is no wait_value and no
	// signal then.
	InTurn = 1
	// BufferedSend: the send may end when the relay has copied the bytes, before their delivery. An OpFlush
	// of the connection ends after the delivery, and has the status of the first failure.
	BufferedSend = 2
	// Programs of Hello, for reports alone; 0 is any other program. Older relays ignore the field.
	ProgramNCCL = 1
	ProgramNIXL = 2
	// Sizes and offsets, in bytes, in the memory of Welcome's descriptors.
	SubmitBytes     = 0x25000
	SubmitEntries   = 0x1000
	SubmitTimelines = 0x21000
	CompleteBytes   = 0x7000
	CompleteEntries = 0x1000
	// Bounds of one session.
	MaxMemories    = 4096
	MaxConnections = 1024
	MaxListeners   = 256
	MaxEvents      = 1024
	MaxRegions     = 4096
	// Entries of the pending lists of a session.
	MaxListEntries = 262144
	// Server GPUs in a Statistics message.
	MaxServers = 8
	// Lanes in a LanesReply message.
	MaxLanes = 32
	// Operations of a Descriptor.
	OpSend    = 1
	OpReceive = 2
	OpCancel  = 3
	// Ends when the earlier operations of the connection have ended.
	OpFlush = 4
	// One-sided, by the connecting side, on regions of the accepting side.
	OpRead  = 5
	OpWrite = 6
	// One read or write for each ListEntryLayout of a list, which begins at `offset` bytes of the
	// session's list memory and has `length` entries. memory, key and remote_offset are 0.
	OpReadList  = 7
	OpWriteList = 8
	// Two relays exchange a list in parts: entries of a part at most, and parts of a connection in
	// flight at most.
	PartEntries = 1024
	PartsAtOnce = 4
	// Ranges of one PeerRanges or PeerGrantRanges.
	MessageRanges = 60
	// The region of a PeerGrant whose ranges are in an earlier PeerGrantRanges.
	ListRegion = 0xffffffff
	// Access of the relay to exported memory.
	AccessSend    = 1
	AccessReceive = 2
	// The relay asks for a DMABuf of the exported memory.
	WantsDMABuf = 1
	// Access of remote programs to a region.
	RemoteRead  = 1
	RemoteWrite = 2
	// Kinds of memory: of a GPU a CUDA VMM allocation, of the host a memfd sealed against changes of
	// its size.
	MemoryGPU  = 0
	MemoryHost = 1
	// GPU memory of several allocations, which earlier messages brought.
	MemoryParts = 2
	// GPU memory of cudaMalloc, opened by an IPC handle: never of another relay.
	MemoryIPC = 3
	// Memory of another host, described only by the grants of that host's relay.
	MemoryRemote = 4
	// Allocations of one export.
	MaxParts = 2048
	// Routes: RouteAuto in requests between relays, the others of connections.
	RouteAuto = 0
	// Routes of a connection: staged over slots on server GPUs, or direct as one copy between two
	// containers of a host.
	RouteStaged = 1
	RouteDirect = 2
)

// Outcomes of requests and operations.
const (
	StatusOK                  Status = 0  // done
	StatusInternal            Status = 1  // the relay met an error of its own
	StatusMalformed           Status = 2  // malformed message
	StatusVersion             Status = 3  // no common version of the protocol
	StatusNoCUDA              Status = 4  // the CUDA driver cannot be used
	StatusCUDA                Status = 5  // the CUDA driver failed
	StatusWrongGPU            Status = 6  // memory of a GPU whose lane this container was not given
	StatusBadDescriptor       Status = 7  // the file descriptor is not memory that can be imported
	StatusLimit               Status = 8  // a limit of the session is reached
	StatusUnknownMemory       Status = 9  // no such memory
	StatusUnknownConnection   Status = 10 // no such connection
	StatusUnknownListener     Status = 11 // no such listener
	StatusOutOfRange          Status = 12 // outside the exported memory
	StatusNotPermitted        Status = 13 // the memory was not exported for this
	StatusBadHandle           Status = 14 // no listener answers to this handle
	StatusUnreachable         Status = 15 // the other relay cannot be reached
	StatusTruncated           Status = 16 // the message is longer than the receive
	StatusCanceled            Status = 17 // canceled
	StatusClosed              Status = 18 // the connection was closed here
	StatusPeerClosed          Status = 19 // the other side closed the connection
	StatusPeerClientDied      Status = 20 // the client at the other side died
	StatusPeerRelayDied       Status = 21 // the relay at the other side died
	StatusRelayDied           Status = 22 // the relay of this container died
	StatusPeerContainerDied   Status = 23 // the container at the other side ended
	StatusNoStaging           Status = 25 // no staging memory
	StatusBadRing             Status = 26 // the ring does not hold what the protocol allows
	StatusUnknownEvent        Status = 27 // no such event
	StatusBadKey              Status = 28 // no memory is exposed under this key to this connection
	StatusNoReverseConnection Status = 29 // the two relays could not open the reverse connection that a read needs
	StatusBusy                Status = 30 // the relay accepts no connection for now
)

var statusText = map[Status]string{
	StatusOK:                  "done",
	StatusInternal:            "the relay met an error of its own",
	StatusMalformed:           "malformed message",
	StatusVersion:             "no common version of the protocol",
	StatusNoCUDA:              "the CUDA driver cannot be used",
	StatusCUDA:                "the CUDA driver failed",
	StatusWrongGPU:            "memory of a GPU whose lane this container was not given",
	StatusBadDescriptor:       "the file descriptor is not memory that can be imported",
	StatusLimit:               "a limit of the session is reached",
	StatusUnknownMemory:       "no such memory",
	StatusUnknownConnection:   "no such connection",
	StatusUnknownListener:     "no such listener",
	StatusOutOfRange:          "outside the exported memory",
	StatusNotPermitted:        "the memory was not exported for this",
	StatusBadHandle:           "no listener answers to this handle",
	StatusUnreachable:         "the other relay cannot be reached",
	StatusTruncated:           "the message is longer than the receive",
	StatusCanceled:            "canceled",
	StatusClosed:              "the connection was closed here",
	StatusPeerClosed:          "the other side closed the connection",
	StatusPeerClientDied:      "the client at the other side died",
	StatusPeerRelayDied:       "the relay at the other side died",
	StatusRelayDied:           "the relay of this container died",
	StatusPeerContainerDied:   "the container at the other side ended",
	StatusNoStaging:           "no staging memory",
	StatusBadRing:             "the ring does not hold what the protocol allows",
	StatusUnknownEvent:        "no such event",
	StatusBadKey:              "no memory is exposed under this key to this connection",
	StatusNoReverseConnection: "the two relays could not open the reverse connection that a read needs",
	StatusBusy:                "the relay accepts no connection for now",
}

// Message types.
const (
	typeHello               uint32 = 1
	typeWelcome             uint32 = 2
	typeFailure             uint32 = 3
	typeExport              uint32 = 4
	typeExported            uint32 = 5
	typeUnexport            uint32 = 6
	typeDone                uint32 = 7
	typeListen              uint32 = 8
	typeListening           uint32 = 9
	typeUnlisten            uint32 = 10
	typeAccept              uint32 = 11
	typeConnect             uint32 = 12
	typeConnected           uint32 = 13
	typeDisconnect          uint32 = 14
	typeConnectionDown      uint32 = 15
	typeStatistics          uint32 = 16
	typeStatisticsReply     uint32 = 17
	typeLanes               uint32 = 19
	typeLanesReply          uint32 = 20
	typeLaneNIC             uint32 = 120
	typeLaneNICReply        uint32 = 121
	typeGoodbye             uint32 = 18
	typeExportPart          uint32 = 26
	typeExportIPC           uint32 = 27
	typeHostMemory          uint32 = 24
	typeHostMemoryMade      uint32 = 25
	typeHostMemoryPopulated uint32 = 30
	typeStaging             uint32 = 28
	typeStagingMade         uint32 = 29
	typeEvent               uint32 = 21
	typeEventOpened         uint32 = 22
	typeEventClose          uint32 = 23
	typeExpose              uint32 = 80
	typeExposed             uint32 = 81
	typeListMemory          uint32 = 31
	typeListMemoryMade      uint32 = 83
	typeRevoke              uint32 = 82
	typePeerHello           uint32 = 32
	typePeerWelcome         uint32 = 33
	typePeerRegion          uint32 = 34
	typePeerRegionPart      uint32 = 42
	typePeerQuota           uint32 = 47
	typePeerEager           uint32 = 48
	typePeerSend            uint32 = 35
	typePeerGrant           uint32 = 36
	typePeerWritten         uint32 = 37
	typePeerDelivered       uint32 = 38
	typePeerWithdraw        uint32 = 39
	typePeerClose           uint32 = 40
	typePeerForget          uint32 = 41
	typePeerShare           uint32 = 44
	typePeerShared          uint32 = 45
	typePeerBell            uint32 = 46
	typePeerWrite           uint32 = 88
	typePeerRead            uint32 = 89
	typePeerReadRefused     uint32 = 90
	typePeerReadData        uint32 = 91
	typePeerBack            uint32 = 92
	typePeerBackRefused     uint32 = 93
	typePeerRanges          uint32 = 94
	typePeerWriteList       uint32 = 95
	typePeerReadList        uint32 = 96
	typePeerListRefused     uint32 = 97
	typePeerGrantRanges     uint32 = 98
	typeDMABuf              uint32 = 122
)

// Hello is 32 bytes.
type Hello struct {
	Header
	Magic   uint64
	Oldest  uint32
	Newest  uint32
	Program uint64
}

func (m *Hello) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Hello) messageType() uint32 { return typeHello }

// Welcome is 24 bytes.
// With four descriptors: submit memory (to map for reading and writing),
// complete memory (for reading), the eventfd that wakes the relay, the pipe that
// becomes readable to wake the client.
type Welcome struct {
	Header
	Version  uint32
	Reserved uint32
	Session  uint64
}

func (m *Welcome) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Welcome) messageType() uint32 { return typeWelcome }

// Failure is 504 bytes.
// The answer to a refused request. The object of the error (a container, a GPU, a key of config.toml or
// a failed call) follows the zero byte that ends the reason; earlier releases do not read the object.
type Failure struct {
	Header
	Status   uint32
	Reserved uint32
	Reason   [488]byte
}

func (m *Failure) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Failure) messageType() uint32 { return typeFailure }

// Export is 56 bytes.
// With one descriptor: the POSIX file descriptor of a CUDA VMM allocation.
// The range [offset, offset+length) of its `bytes` is exported. Without one: of
// the `parts` allocations that ExportPart messages brought, which lie side by side.
type Export struct {
	Header
	Bytes  uint64
	Offset uint64
	Length uint64
	GPU    UUID
	Access uint32
	Parts  uint32
}

func (m *Export) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Export) messageType() uint32 { return typeExport }

// Exported is 16 bytes.
// wants: WantsDMABuf, or 0.
type Exported struct {
	Header
	Memory uint32
	Wants  uint32
}

func (m *Exported) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Exported) messageType() uint32 { return typeExported }

// Unexport is 16 bytes.
type Unexport struct {
	Header
	Memory   uint32
	Reserved uint32
}

func (m *Unexport) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Unexport) messageType() uint32 { return typeUnexport }

// Done is 8 bytes.
type Done struct {
	Header
}

func (m *Done) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Done) messageType() uint32 { return typeDone }

// Listen is 24 bytes.
type Listen struct {
	Header
	GPU UUID
}

func (m *Listen) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Listen) messageType() uint32 { return typeListen }

// Listening is 144 bytes.
type Listening struct {
	Header
	Listener uint32
	Reserved uint32
	Handle   Handle
}

func (m *Listening) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *Listening) messageType() uint32 { return typeListening }

// Unlisten is 16 bytes.
type Unlisten struct {
	Header
	Listener uint32
	Reserved uint32
}

func (m *Unlisten) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Unlisten) messageType() uint32 { return typeUnlisten }

// Accept is 16 bytes.
// Answered by Connected: this side will receive.
type Accept struct {
	Header
	Listener uint32
	Reserved uint32
}

func (m *Accept) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Accept) messageType() uint32 { return typeAccept }

// Connect is 152 bytes.
// Answered by Connected: this side will send.
type Connect struct {
	Header
	GPU    UUID
	Handle Handle
}

func (m *Connect) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Connect) messageType() uint32 { return typeConnect }

// Connected is 120 bytes.
type Connected struct {
	Header
	Connection uint32
	Route      uint32
	Peer       [104]byte
}

func (m *Connected) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *Connected) messageType() uint32 { return typeConnected }

// Disconnect is 16 bytes.
type Disconnect struct {
	Header
	Connection uint32
	Reserved   uint32
}

func (m *Disconnect) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *Disconnect) messageType() uint32 { return typeDisconnect }

// ConnectionDown is 504 bytes.
// Event (sequence 0): the connection is down, with the cause.
type ConnectionDown struct {
	Header
	Connection uint32
	Status     uint32
	Reason     [488]byte
}

func (m *ConnectionDown) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *ConnectionDown) messageType() uint32 { return typeConnectionDown }

// Statistics is 8 bytes.
type Statistics struct {
	Header
}

func (m *Statistics) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *Statistics) messageType() uint32 { return typeStatistics }

// StatisticsReply is 304 bytes.
// The relay's counters, in bytes. A server whose gpu is zero stands for the
// slots in the relay's own host memory: lanes that bounce.
type StatisticsReply struct {
	Header
	Sent     uint64
	Received uint64
	Direct   uint64
	Staged   uint64
	Servers  uint32
	Contexts uint32
	Server   [8]ServerBytes
}

func (m *StatisticsReply) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *StatisticsReply) messageType() uint32 { return typeStatisticsReply }

// Lanes is 8 bytes.
// Which lanes the container was given: MaxLanes of them at most. A gpu is zero
// where only the driver could tell, which is not asked; index is NVML's on the
// host, the N of nvidia.com/gpu=N there.
type Lanes struct {
	Header
}

func (m *Lanes) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Lanes) messageType() uint32 { return typeLanes }

// LanesReply is 784 bytes.
type LanesReply struct {
	Header
	Lanes    uint32
	Reserved uint32
	Lane     [32]LaneGPU
}

func (m *LanesReply) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *LanesReply) messageType() uint32 { return typeLanesReply }

// LaneNIC is 24 bytes.
// Asks for the NIC of the lane of a GPU; of several NICs the first.
type LaneNIC struct {
	Header
	GPU UUID
}

func (m *LaneNIC) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *LaneNIC) messageType() uint32 { return typeLaneNIC }

// LaneNICReply is 88 bytes.
// guid is the number that NCCL's transport for InfiniBand has for that NIC, mbps the full
// rate of its fastest active port, in 10^6 bits a second, which is port; each 0 where the
// plan does not tell. name is as in /sys/class/infiniband, empty for a lane without a NIC.
// Of a lane that reaches only this host, guid, port and name are not there, and mbps is the
// rate of the GPU's links to its peers: no name and mbps that is not 0 say so.
type LaneNICReply struct {
	Header
	Guid uint64
	Mbps uint32
	Port uint32
	Name [64]byte
}

func (m *LaneNICReply) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *LaneNICReply) messageType() uint32 { return typeLaneNICReply }

// Goodbye is 8 bytes.
// The client ends the session. A socket that closes without Goodbye means the client's death.
type Goodbye struct {
	Header
}

func (m *Goodbye) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Goodbye) messageType() uint32 { return typeGoodbye }

// ExportPart is 24 bytes.
// With one descriptor: the next of the allocations of an export that is still to
// come, and its place there. There is no answer: the answer of the export has errors.
type ExportPart struct {
	Header
	Bytes  uint64
	Offset uint64
}

func (m *ExportPart) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *ExportPart) messageType() uint32 { return typeExportPart }

// ExportIPC is 112 bytes.
// Memory of cudaMalloc, where the configuration allows it. Answered by Exported.
// The range [offset, offset+length) of the allocation is exported.
type ExportIPC struct {
	Header
	Offset   uint64
	Length   uint64
	GPU      UUID
	Access   uint32
	Reserved uint32
	Handle   [64]byte
}

func (m *ExportIPC) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *ExportIPC) messageType() uint32 { return typeExportIPC }

// HostMemory is 40 bytes.
// The relay makes host memory for the lane of a GPU, and pins it there. populates is 1, from
// PopulateVersion on, if the client allocates the pages: no operation can use the memory before
// the client has sent HostMemoryPopulated, and the relay pins it then.
type HostMemory struct {
	Header
	Bytes     uint64
	GPU       UUID
	Access    uint32
	Populates uint32
}

func (m *HostMemory) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *HostMemory) messageType() uint32 { return typeHostMemory }

// HostMemoryMade is 24 bytes.
// With one descriptor: the memory, to be mapped for reading and writing: as many
// bytes as were asked for, in whole pages. From here on it is like exported memory.
type HostMemoryMade struct {
	Header
	Bytes    uint64
	Memory   uint32
	Reserved uint32
}

func (m *HostMemoryMade) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *HostMemoryMade) messageType() uint32 { return typeHostMemoryMade }

// HostMemoryPopulated is 16 bytes.
// The client has allocated the pages of host memory, so that the kernel charges them to the
// client's control group. The relay allocates the pages that are missing. Answered by Done.
type HostMemoryPopulated struct {
	Header
	Memory   uint32
	Reserved uint32
}

func (m *HostMemoryPopulated) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *HostMemoryPopulated) messageType() uint32 { return typeHostMemoryPopulated }

// Staging is 40 bytes.
// The relay makes staging memory for the client itself to copy to and from: on a
// server GPU of the lane of a GPU. Only for a container that has the server GPUs'
// device nodes.
type Staging struct {
	Header
	Bytes    uint64
	GPU      UUID
	Access   uint32
	Reserved uint32
}

func (m *Staging) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Staging) messageType() uint32 { return typeStaging }

// StagingMade is 40 bytes.
// With one descriptor: the POSIX file descriptor of a CUDA VMM allocation of `bytes`,
// as many as were asked for or more; index is NVML's of the server GPU on the host.
// From here on the memory is like exported memory, but no relay copies the memory on route staged.
type StagingMade struct {
	Header
	Bytes  uint64
	Memory uint32
	Index  uint32
	Server UUID
}

func (m *StagingMade) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *StagingMade) messageType() uint32 { return typeStagingMade }

// Event is 88 bytes.
// The relay opens an event of a stream of a GPU, by cuIpcGetEventHandle's handle, where
// the configuration allows it and the driver can. Answered by EventOpened.
type Event struct {
	Header
	GPU    UUID
	Handle [64]byte
}

func (m *Event) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Event) messageType() uint32 { return typeEvent }

// EventOpened is 16 bytes.
type EventOpened struct {
	Header
	Event    uint32
	Reserved uint32
}

func (m *EventOpened) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *EventOpened) messageType() uint32 { return typeEventOpened }

// EventClose is 16 bytes.
// No later operation waits for the event. Answered by Done.
type EventClose struct {
	Header
	Event    uint32
	Reserved uint32
}

func (m *EventClose) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *EventClose) messageType() uint32 { return typeEventClose }

// Expose is 40 bytes.
// The client exposes a range of exported memory to the present and later connections of a
// listener, or to one accepted connection: the other field is 0.
type Expose struct {
	Header
	Offset     uint64
	Length     uint64
	Memory     uint32
	Access     uint32
	Listener   uint32
	Connection uint32
}

func (m *Expose) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Expose) messageType() uint32 { return typeExpose }

// Exposed is 32 bytes.
type Exposed struct {
	Header
	Region   uint32
	Reserved uint32
	Key      UUID
}

func (m *Exposed) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Exposed) messageType() uint32 { return typeExposed }

// ListMemory is 8 bytes.
// From ListVersion on. The relay makes the memory of lists, MaxListEntries of ListEntryLayout, and
// answers later requests of the session with the same memory.
type ListMemory struct {
	Header
}

func (m *ListMemory) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *ListMemory) messageType() uint32 { return typeListMemory }

// ListMemoryMade is 16 bytes.
// With one descriptor: the memory, to be mapped for reading and writing. The client allocates
// the pages. The relay copies entries by pread(), which needs no pages.
type ListMemoryMade struct {
	Header
	Bytes uint64
}

func (m *ListMemoryMade) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *ListMemoryMade) messageType() uint32 { return typeListMemoryMade }

// Revoke is 16 bytes.
// Answered by Done when no operation accesses the range.
type Revoke struct {
	Header
	Region   uint32
	Reserved uint32
}

func (m *Revoke) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *Revoke) messageType() uint32 { return typeRevoke }

// PeerHello is 184 bytes.
type PeerHello struct {
	Header
	Magic      uint64
	Oldest     uint32
	Newest     uint32
	Token      UUID
	Generation UUID
	GPU        UUID
	Route      uint32
	Shares     uint32
	Name       [104]byte
}

func (m *PeerHello) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerHello) messageType() uint32 { return typePeerHello }

// PeerWelcome is 152 bytes.
// With one descriptor on route staged: the end of a socket pair on which the
// sender's NIC delivers each write's immediate to the receiver.
type PeerWelcome struct {
	Header
	Version    uint32
	Route      uint32
	Generation UUID
	GPU        UUID
	Name       [104]byte
}

func (m *PeerWelcome) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerWelcome) messageType() uint32 { return typePeerWelcome }

// PeerRegion is 40 bytes.
// With one descriptor, but for MemoryRemote: memory that the sender may write once it
// holds a grant.
type PeerRegion struct {
	Header
	Region uint32
	Kind   uint32
	Bytes  uint64
	GPU    UUID
}

func (m *PeerRegion) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerRegion) messageType() uint32 { return typePeerRegion }

// PeerRegionPart is 24 bytes.
// With one descriptor: the next allocation of a region of MemoryParts that is still
// to come.
type PeerRegionPart struct {
	Header
	Region   uint32
	Reserved uint32
	Bytes    uint64
}

func (m *PeerRegionPart) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerRegionPart) messageType() uint32 { return typePeerRegionPart }

// PeerQuota is 32 bytes.
// Of two hosts: windows of `bytes` each, side by side from an offset of a region on. The
// sender may write a message into each without a grant.
type PeerQuota struct {
	Header
	Region  uint32
	Windows uint32
	Bytes   uint64
	Offset  uint64
}

func (m *PeerQuota) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerQuota) messageType() uint32 { return typePeerQuota }

// PeerEager is 40 bytes.
// The sender has a short message, and writes it into a window. The window is its own again
// when the message is delivered, or refused. Of one host the bytes are in the window when
// this comes, and the receiver can grant room for the message all the same.
type PeerEager struct {
	Header
	Send     uint64
	Tag      uint64
	Length   uint64
	Window   uint32
	Reserved uint32
}

func (m *PeerEager) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerEager) messageType() uint32 { return typePeerEager }

// PeerSend is 32 bytes.
// The sender has a message.
type PeerSend struct {
	Header
	Send   uint64
	Tag    uint64
	Length uint64
}

func (m *PeerSend) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *PeerSend) messageType() uint32 { return typePeerSend }

// PeerGrant is 56 bytes.
// The receiver has room for the part [part, part+length) of message `send`.
type PeerGrant struct {
	Header
	Send     uint64
	Grant    uint64
	Part     uint64
	Length   uint64
	Offset   uint64
	Region   uint32
	Reserved uint32
}

func (m *PeerGrant) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerGrant) messageType() uint32 { return typePeerGrant }

// PeerWritten is 16 bytes.
// Route direct: the bytes of a grant are in the receiver's memory.
type PeerWritten struct {
	Header
	Grant uint64
}

func (m *PeerWritten) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerWritten) messageType() uint32 { return typePeerWritten }

// PeerDelivered is 24 bytes.
// The whole message is in the receiver's memory, or is refused.
type PeerDelivered struct {
	Header
	Send     uint64
	Status   uint32
	Reserved uint32
}

func (m *PeerDelivered) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerDelivered) messageType() uint32 { return typePeerDelivered }

// PeerWithdraw is 16 bytes.
// The sender would like to take back a message that has no grant.
type PeerWithdraw struct {
	Header
	Send uint64
}

func (m *PeerWithdraw) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerWithdraw) messageType() uint32 { return typePeerWithdraw }

// PeerClose is 504 bytes.
type PeerClose struct {
	Header
	Status   uint32
	Reserved uint32
	Reason   [488]byte
}

func (m *PeerClose) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerClose) messageType() uint32 { return typePeerClose }

// PeerForget is 16 bytes.
// The receiver will grant nothing in this region any more.
type PeerForget struct {
	Header
	Region   uint32
	Reserved uint32
}

func (m *PeerForget) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerForget) messageType() uint32 { return typePeerForget }

// PeerShare is 8 bytes.
// With one descriptor: memory for later messages that fit.
type PeerShare struct {
	Header
}

func (m *PeerShare) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerShare) messageType() uint32 { return typePeerShare }

// PeerShared is 8 bytes.
// The memory is mapped; this is the last message outside the memory's order.
type PeerShared struct {
	Header
}

func (m *PeerShared) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerShared) messageType() uint32 { return typePeerShared }

// PeerBell is 8 bytes.
// Wakes a sleeping side: the memory has a message.
type PeerBell struct {
	Header
}

func (m *PeerBell) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *PeerBell) messageType() uint32 { return typePeerBell }

// PeerWrite is 48 bytes.
// The sender has a message for a region of the receiver's client, without a receive: from here
// on the message is like one of PeerSend, with a number of the same sequence.
type PeerWrite struct {
	Header
	Send   uint64
	Length uint64
	Offset uint64
	Key    UUID
}

func (m *PeerWrite) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerWrite) messageType() uint32 { return typePeerWrite }

// PeerRead is 48 bytes.
// The sender's client reads a region of the receiver's client: the bytes use the reverse connection.
type PeerRead struct {
	Header
	Read   uint64
	Length uint64
	Offset uint64
	Key    UUID
}

func (m *PeerRead) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *PeerRead) messageType() uint32 { return typePeerRead }

// PeerReadRefused is 24 bytes.
// The receiver refuses a read.
type PeerReadRefused struct {
	Header
	Read     uint64
	Status   uint32
	Reserved uint32
}

func (m *PeerReadRefused) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerReadRefused) messageType() uint32 { return typePeerReadRefused }

// PeerReadData is 32 bytes.
// On the reverse connection: a message of its sender, which matches read `read`.
type PeerReadData struct {
	Header
	Send   uint64
	Read   uint64
	Length uint64
}

func (m *PeerReadData) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerReadData) messageType() uint32 { return typePeerReadData }

// PeerBack is 40 bytes.
// Requests the reverse connection: the receiver connects to the sender, by this token, and over
// this host's sockets to this generation.
type PeerBack struct {
	Header
	Token      UUID
	Generation UUID
}

func (m *PeerBack) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *PeerBack) messageType() uint32 { return typePeerBack }

// PeerBackRefused is 504 bytes.
// The reverse connection could not be opened. Earlier requested reads get no answer.
type PeerBackRefused struct {
	Header
	Status   uint32
	Reserved uint32
	Reason   [488]byte
}

func (m *PeerBackRefused) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerBackRefused) messageType() uint32 { return typePeerBackRefused }

// PeerRanges is 992 bytes.
// Ranges of a region, of the next PeerWriteList or PeerReadList: `count` ranges under one key.
// The bytes of the ranges, in order, are one message.
type PeerRanges struct {
	Header
	Key      UUID
	Count    uint32
	Reserved uint32
	Range    [60]Range
}

func (m *PeerRanges) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerRanges) messageType() uint32 { return typePeerRanges }

// PeerWriteList is 32 bytes.
// As PeerWrite, of the ranges of PeerRanges.
type PeerWriteList struct {
	Header
	Send     uint64
	Length   uint64
	Ranges   uint32
	Reserved uint32
}

func (m *PeerWriteList) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerWriteList) messageType() uint32 { return typePeerWriteList }

// PeerReadList is 32 bytes.
// As PeerRead, of the ranges of PeerRanges.
type PeerReadList struct {
	Header
	Read     uint64
	Length   uint64
	Ranges   uint32
	Reserved uint32
}

func (m *PeerReadList) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerReadList) messageType() uint32 { return typePeerReadList }

// PeerListRefused is 32 bytes.
// The receiver refuses read or message `number` of a list, because of the range that has the
// byte at `position` of the message. reads is 1 for a read.
type PeerListRefused struct {
	Header
	Number   uint64
	Position uint64
	Status   uint32
	Reads    uint32
}

func (m *PeerListRefused) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerListRefused) messageType() uint32 { return typePeerListRefused }

// PeerGrantRanges is 976 bytes.
// Route direct: `count` ranges in a region, of the PeerGrant with ListRegion that will come.
type PeerGrantRanges struct {
	Header
	Region uint32
	Count  uint32
	Range  [60]Range
}

func (m *PeerGrantRanges) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

func (m *PeerGrantRanges) messageType() uint32 { return typePeerGrantRanges }

// LaneGPU is 24 bytes.
type LaneGPU struct {
	GPU      UUID
	Index    uint32
	Reserved uint32
}

func (m *LaneGPU) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

// ServerBytes is 32 bytes.
type ServerBytes struct {
	GPU UUID
	In  uint64
	Out uint64
}

func (m *ServerBytes) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

// Descriptor is 128 bytes.
// One operation in the submission ring.
type Descriptor struct {
	Operation      uint32
	Connection     uint32
	Memory         uint32
	Flags          uint32
	Offset         uint64
	Length         uint64
	Tag            uint64
	Cookie         uint64
	WaitTimeline   uint32
	SignalTimeline uint32
	WaitValue      uint64
	SignalValue    uint64
	WaitEvent      uint32
	Reserved0      uint32
	Key            UUID
	RemoteOffset   uint64
	Reserved4      uint64
	Reserved5      uint64
	Reserved6      uint64
}

func (m *Descriptor) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

// ListEntryLayout is 48 bytes.
// Of list memory: `length` bytes at `offset` of a memory of the client, and from byte `at` on
// of the region with the key.
type ListEntryLayout struct {
	Memory   uint32
	Reserved uint32
	Offset   uint64
	Length   uint64
	At       uint64
	Key      UUID
}

func (m *ListEntryLayout) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

// Range is 16 bytes.
// Bytes of a region.
type Range struct {
	At     uint64
	Length uint64
}

func (m *Range) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

// Completion is 24 bytes.
// One ended operation in the completion ring. entry is the index of the first entry that
// failed, of a list that did.
type Completion struct {
	Cookie uint64
	Length uint64
	Status uint32
	Entry  uint32
}

func (m *Completion) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

// SubmitPage is 40 bytes.
// The first page of the submit memory, written by the client.
type SubmitPage struct {
	Tail          uint64
	Reserved0     uint64
	CompletedHead uint64
	Reserved1     uint64
	ClientSleeps  uint32
	Reserved2     uint32
}

func (m *SubmitPage) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

// CompletePage is 40 bytes.
// The first page of the complete memory, written by the relay alone.
type CompletePage struct {
	TakenHead   uint64
	Reserved0   uint64
	Tail        uint64
	Reserved1   uint64
	RelaySleeps uint32
	Reserved2   uint32
}

func (m *CompletePage) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

// HandleLayout is 128 bytes.
// The address of a listener for senders: 128 bytes, which programs exchange.
type HandleLayout struct {
	Magic      uint64
	Token      UUID
	Generation UUID
	Host       UUID
	Contact    [56]byte
	Note       [16]byte
}

func (m *HandleLayout) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

// RemoteKeyLayout is 64 bytes.
// The key of a region: 64 bytes, which programs exchange. The relay enforces the bounds; the
// key has them for information.
type RemoteKeyLayout struct {
	Magic     uint64
	Key       UUID
	Length    uint64
	Access    uint32
	Reserved  uint32
	Reserved0 uint64
	Reserved1 uint64
	Reserved2 uint64
}

func (m *RemoteKeyLayout) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m))
}

// DMABuf is 256 bytes.
// Of exported memory whose Exported had WantsDMABuf. With one descriptor: a DMA-BUF
// (cuMemGetHandleForAddressRange) of the adjacent allocations, by which NICs read and write the
// memory in place. Without a descriptor: the reason. There is no answer: memory without a
// registration uses slots.
type DMABuf struct {
	Header
	Memory   uint32
	Reserved uint32
	Reason   [240]byte
}

func (m *DMABuf) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }

func (m *DMABuf) messageType() uint32 { return typeDMABuf }

func newMessage(messageType uint32) Message {
	switch messageType {
	case typeHello:
		return &Hello{}
	case typeWelcome:
		return &Welcome{}
	case typeFailure:
		return &Failure{}
	case typeExport:
		return &Export{}
	case typeExported:
		return &Exported{}
	case typeUnexport:
		return &Unexport{}
	case typeDone:
		return &Done{}
	case typeListen:
		return &Listen{}
	case typeListening:
		return &Listening{}
	case typeUnlisten:
		return &Unlisten{}
	case typeAccept:
		return &Accept{}
	case typeConnect:
		return &Connect{}
	case typeConnected:
		return &Connected{}
	case typeDisconnect:
		return &Disconnect{}
	case typeConnectionDown:
		return &ConnectionDown{}
	case typeStatistics:
		return &Statistics{}
	case typeStatisticsReply:
		return &StatisticsReply{}
	case typeLanes:
		return &Lanes{}
	case typeLanesReply:
		return &LanesReply{}
	case typeLaneNIC:
		return &LaneNIC{}
	case typeLaneNICReply:
		return &LaneNICReply{}
	case typeGoodbye:
		return &Goodbye{}
	case typeExportPart:
		return &ExportPart{}
	case typeExportIPC:
		return &ExportIPC{}
	case typeHostMemory:
		return &HostMemory{}
	case typeHostMemoryMade:
		return &HostMemoryMade{}
	case typeHostMemoryPopulated:
		return &HostMemoryPopulated{}
	case typeStaging:
		return &Staging{}
	case typeStagingMade:
		return &StagingMade{}
	case typeEvent:
		return &Event{}
	case typeEventOpened:
		return &EventOpened{}
	case typeEventClose:
		return &EventClose{}
	case typeExpose:
		return &Expose{}
	case typeExposed:
		return &Exposed{}
	case typeListMemory:
		return &ListMemory{}
	case typeListMemoryMade:
		return &ListMemoryMade{}
	case typeRevoke:
		return &Revoke{}
	case typePeerHello:
		return &PeerHello{}
	case typePeerWelcome:
		return &PeerWelcome{}
	case typePeerRegion:
		return &PeerRegion{}
	case typePeerRegionPart:
		return &PeerRegionPart{}
	case typePeerQuota:
		return &PeerQuota{}
	case typePeerEager:
		return &PeerEager{}
	case typePeerSend:
		return &PeerSend{}
	case typePeerGrant:
		return &PeerGrant{}
	case typePeerWritten:
		return &PeerWritten{}
	case typePeerDelivered:
		return &PeerDelivered{}
	case typePeerWithdraw:
		return &PeerWithdraw{}
	case typePeerClose:
		return &PeerClose{}
	case typePeerForget:
		return &PeerForget{}
	case typePeerShare:
		return &PeerShare{}
	case typePeerShared:
		return &PeerShared{}
	case typePeerBell:
		return &PeerBell{}
	case typePeerWrite:
		return &PeerWrite{}
	case typePeerRead:
		return &PeerRead{}
	case typePeerReadRefused:
		return &PeerReadRefused{}
	case typePeerReadData:
		return &PeerReadData{}
	case typePeerBack:
		return &PeerBack{}
	case typePeerBackRefused:
		return &PeerBackRefused{}
	case typePeerRanges:
		return &PeerRanges{}
	case typePeerWriteList:
		return &PeerWriteList{}
	case typePeerReadList:
		return &PeerReadList{}
	case typePeerListRefused:
		return &PeerListRefused{}
	case typePeerGrantRanges:
		return &PeerGrantRanges{}
	case typeDMABuf:
		return &DMABuf{}
	}
	return nil
}

// Layouts lists every field's place, for comparison with the C form.
var layouts = []struct {
	name    string
	size    uintptr
	offsets []uintptr
}{
	{"Hello", unsafe.Sizeof(Hello{}), []uintptr{unsafe.Offsetof(Hello{}.Header.Type), unsafe.Offsetof(Hello{}.Header.Sequence), unsafe.Offsetof(Hello{}.Magic), unsafe.Offsetof(Hello{}.Oldest), unsafe.Offsetof(Hello{}.Newest), unsafe.Offsetof(Hello{}.Program)}},
	{"Welcome", unsafe.Sizeof(Welcome{}), []uintptr{unsafe.Offsetof(Welcome{}.Header.Type), unsafe.Offsetof(Welcome{}.Header.Sequence), unsafe.Offsetof(Welcome{}.Version), unsafe.Offsetof(Welcome{}.Reserved), unsafe.Offsetof(Welcome{}.Session)}},
	{"Failure", unsafe.Sizeof(Failure{}), []uintptr{unsafe.Offsetof(Failure{}.Header.Type), unsafe.Offsetof(Failure{}.Header.Sequence), unsafe.Offsetof(Failure{}.Status), unsafe.Offsetof(Failure{}.Reserved), unsafe.Offsetof(Failure{}.Reason)}},
	{"Export", unsafe.Sizeof(Export{}), []uintptr{unsafe.Offsetof(Export{}.Header.Type), unsafe.Offsetof(Export{}.Header.Sequence), unsafe.Offsetof(Export{}.Bytes), unsafe.Offsetof(Export{}.Offset), unsafe.Offsetof(Export{}.Length), unsafe.Offsetof(Export{}.GPU), unsafe.Offsetof(Export{}.Access), unsafe.Offsetof(Export{}.Parts)}},
	{"Exported", unsafe.Sizeof(Exported{}), []uintptr{unsafe.Offsetof(Exported{}.Header.Type), unsafe.Offsetof(Exported{}.Header.Sequence), unsafe.Offsetof(Exported{}.Memory), unsafe.Offsetof(Exported{}.Wants)}},
	{"Unexport", unsafe.Sizeof(Unexport{}), []uintptr{unsafe.Offsetof(Unexport{}.Header.Type), unsafe.Offsetof(Unexport{}.Header.Sequence), unsafe.Offsetof(Unexport{}.Memory), unsafe.Offsetof(Unexport{}.Reserved)}},
	{"Done", unsafe.Sizeof(Done{}), []uintptr{unsafe.Offsetof(Done{}.Header.Type), unsafe.Offsetof(Done{}.Header.Sequence)}},
	{"Listen", unsafe.Sizeof(Listen{}), []uintptr{unsafe.Offsetof(Listen{}.Header.Type), unsafe.Offsetof(Listen{}.Header.Sequence), unsafe.Offsetof(Listen{}.GPU)}},
	{"Listening", unsafe.Sizeof(Listening{}), []uintptr{unsafe.Offsetof(Listening{}.Header.Type), unsafe.Offsetof(Listening{}.Header.Sequence), unsafe.Offsetof(Listening{}.Listener), unsafe.Offsetof(Listening{}.Reserved), unsafe.Offsetof(Listening{}.Handle)}},
	{"Unlisten", unsafe.Sizeof(Unlisten{}), []uintptr{unsafe.Offsetof(Unlisten{}.Header.Type), unsafe.Offsetof(Unlisten{}.Header.Sequence), unsafe.Offsetof(Unlisten{}.Listener), unsafe.Offsetof(Unlisten{}.Reserved)}},
	{"Accept", unsafe.Sizeof(Accept{}), []uintptr{unsafe.Offsetof(Accept{}.Header.Type), unsafe.Offsetof(Accept{}.Header.Sequence), unsafe.Offsetof(Accept{}.Listener), unsafe.Offsetof(Accept{}.Reserved)}},
	{"Connect", unsafe.Sizeof(Connect{}), []uintptr{unsafe.Offsetof(Connect{}.Header.Type), unsafe.Offsetof(Connect{}.Header.Sequence), unsafe.Offsetof(Connect{}.GPU), unsafe.Offsetof(Connect{}.Handle)}},
	{"Connected", unsafe.Sizeof(Connected{}), []uintptr{unsafe.Offsetof(Connected{}.Header.Type), unsafe.Offsetof(Connected{}.Header.Sequence), unsafe.Offsetof(Connected{}.Connection), unsafe.Offsetof(Connected{}.Route), unsafe.Offsetof(Connected{}.Peer)}},
	{"Disconnect", unsafe.Sizeof(Disconnect{}), []uintptr{unsafe.Offsetof(Disconnect{}.Header.Type), unsafe.Offsetof(Disconnect{}.Header.Sequence), unsafe.Offsetof(Disconnect{}.Connection), unsafe.Offsetof(Disconnect{}.Reserved)}},
	{"ConnectionDown", unsafe.Sizeof(ConnectionDown{}), []uintptr{unsafe.Offsetof(ConnectionDown{}.Header.Type), unsafe.Offsetof(ConnectionDown{}.Header.Sequence), unsafe.Offsetof(ConnectionDown{}.Connection), unsafe.Offsetof(ConnectionDown{}.Status), unsafe.Offsetof(ConnectionDown{}.Reason)}},
	{"Statistics", unsafe.Sizeof(Statistics{}), []uintptr{unsafe.Offsetof(Statistics{}.Header.Type), unsafe.Offsetof(Statistics{}.Header.Sequence)}},
	{"StatisticsReply", unsafe.Sizeof(StatisticsReply{}), []uintptr{unsafe.Offsetof(StatisticsReply{}.Header.Type), unsafe.Offsetof(StatisticsReply{}.Header.Sequence), unsafe.Offsetof(StatisticsReply{}.Sent), unsafe.Offsetof(StatisticsReply{}.Received), unsafe.Offsetof(StatisticsReply{}.Direct), unsafe.Offsetof(StatisticsReply{}.Staged), unsafe.Offsetof(StatisticsReply{}.Servers), unsafe.Offsetof(StatisticsReply{}.Contexts), unsafe.Offsetof(StatisticsReply{}.Server)}},
	{"Lanes", unsafe.Sizeof(Lanes{}), []uintptr{unsafe.Offsetof(Lanes{}.Header.Type), unsafe.Offsetof(Lanes{}.Header.Sequence)}},
	{"LanesReply", unsafe.Sizeof(LanesReply{}), []uintptr{unsafe.Offsetof(LanesReply{}.Header.Type), unsafe.Offsetof(LanesReply{}.Header.Sequence), unsafe.Offsetof(LanesReply{}.Lanes), unsafe.Offsetof(LanesReply{}.Reserved), unsafe.Offsetof(LanesReply{}.Lane)}},
	{"LaneNIC", unsafe.Sizeof(LaneNIC{}), []uintptr{unsafe.Offsetof(LaneNIC{}.Header.Type), unsafe.Offsetof(LaneNIC{}.Header.Sequence), unsafe.Offsetof(LaneNIC{}.GPU)}},
	{"LaneNICReply", unsafe.Sizeof(LaneNICReply{}), []uintptr{unsafe.Offsetof(LaneNICReply{}.Header.Type), unsafe.Offsetof(LaneNICReply{}.Header.Sequence), unsafe.Offsetof(LaneNICReply{}.Guid), unsafe.Offsetof(LaneNICReply{}.Mbps), unsafe.Offsetof(LaneNICReply{}.Port), unsafe.Offsetof(LaneNICReply{}.Name)}},
	{"Goodbye", unsafe.Sizeof(Goodbye{}), []uintptr{unsafe.Offsetof(Goodbye{}.Header.Type), unsafe.Offsetof(Goodbye{}.Header.Sequence)}},
	{"ExportPart", unsafe.Sizeof(ExportPart{}), []uintptr{unsafe.Offsetof(ExportPart{}.Header.Type), unsafe.Offsetof(ExportPart{}.Header.Sequence), unsafe.Offsetof(ExportPart{}.Bytes), unsafe.Offsetof(ExportPart{}.Offset)}},
	{"ExportIPC", unsafe.Sizeof(ExportIPC{}), []uintptr{unsafe.Offsetof(ExportIPC{}.Header.Type), unsafe.Offsetof(ExportIPC{}.Header.Sequence), unsafe.Offsetof(ExportIPC{}.Offset), unsafe.Offsetof(ExportIPC{}.Length), unsafe.Offsetof(ExportIPC{}.GPU), unsafe.Offsetof(ExportIPC{}.Access), unsafe.Offsetof(ExportIPC{}.Reserved), unsafe.Offsetof(ExportIPC{}.Handle)}},
	{"HostMemory", unsafe.Sizeof(HostMemory{}), []uintptr{unsafe.Offsetof(HostMemory{}.Header.Type), unsafe.Offsetof(HostMemory{}.Header.Sequence), unsafe.Offsetof(HostMemory{}.Bytes), unsafe.Offsetof(HostMemory{}.GPU), unsafe.Offsetof(HostMemory{}.Access), unsafe.Offsetof(HostMemory{}.Populates)}},
	{"HostMemoryMade", unsafe.Sizeof(HostMemoryMade{}), []uintptr{unsafe.Offsetof(HostMemoryMade{}.Header.Type), unsafe.Offsetof(HostMemoryMade{}.Header.Sequence), unsafe.Offsetof(HostMemoryMade{}.Bytes), unsafe.Offsetof(HostMemoryMade{}.Memory), unsafe.Offsetof(HostMemoryMade{}.Reserved)}},
	{"HostMemoryPopulated", unsafe.Sizeof(HostMemoryPopulated{}), []uintptr{unsafe.Offsetof(HostMemoryPopulated{}.Header.Type), unsafe.Offsetof(HostMemoryPopulated{}.Header.Sequence), unsafe.Offsetof(HostMemoryPopulated{}.Memory), unsafe.Offsetof(HostMemoryPopulated{}.Reserved)}},
	{"Staging", unsafe.Sizeof(Staging{}), []uintptr{unsafe.Offsetof(Staging{}.Header.Type), unsafe.Offsetof(Staging{}.Header.Sequence), unsafe.Offsetof(Staging{}.Bytes), unsafe.Offsetof(Staging{}.GPU), unsafe.Offsetof(Staging{}.Access), unsafe.Offsetof(Staging{}.Reserved)}},
	{"StagingMade", unsafe.Sizeof(StagingMade{}), []uintptr{unsafe.Offsetof(StagingMade{}.Header.Type), unsafe.Offsetof(StagingMade{}.Header.Sequence), unsafe.Offsetof(StagingMade{}.Bytes), unsafe.Offsetof(StagingMade{}.Memory), unsafe.Offsetof(StagingMade{}.Index), unsafe.Offsetof(StagingMade{}.Server)}},
	{"Event", unsafe.Sizeof(Event{}), []uintptr{unsafe.Offsetof(Event{}.Header.Type), unsafe.Offsetof(Event{}.Header.Sequence), unsafe.Offsetof(Event{}.GPU), unsafe.Offsetof(Event{}.Handle)}},
	{"EventOpened", unsafe.Sizeof(EventOpened{}), []uintptr{unsafe.Offsetof(EventOpened{}.Header.Type), unsafe.Offsetof(EventOpened{}.Header.Sequence), unsafe.Offsetof(EventOpened{}.Event), unsafe.Offsetof(EventOpened{}.Reserved)}},
	{"EventClose", unsafe.Sizeof(EventClose{}), []uintptr{unsafe.Offsetof(EventClose{}.Header.Type), unsafe.Offsetof(EventClose{}.Header.Sequence), unsafe.Offsetof(EventClose{}.Event), unsafe.Offsetof(EventClose{}.Reserved)}},
	{"Expose", unsafe.Sizeof(Expose{}), []uintptr{unsafe.Offsetof(Expose{}.Header.Type), unsafe.Offsetof(Expose{}.Header.Sequence), unsafe.Offsetof(Expose{}.Offset), unsafe.Offsetof(Expose{}.Length), unsafe.Offsetof(Expose{}.Memory), unsafe.Offsetof(Expose{}.Access), unsafe.Offsetof(Expose{}.Listener), unsafe.Offsetof(Expose{}.Connection)}},
	{"Exposed", unsafe.Sizeof(Exposed{}), []uintptr{unsafe.Offsetof(Exposed{}.Header.Type), unsafe.Offsetof(Exposed{}.Header.Sequence), unsafe.Offsetof(Exposed{}.Region), unsafe.Offsetof(Exposed{}.Reserved), unsafe.Offsetof(Exposed{}.Key)}},
	{"ListMemory", unsafe.Sizeof(ListMemory{}), []uintptr{unsafe.Offsetof(ListMemory{}.Header.Type), unsafe.Offsetof(ListMemory{}.Header.Sequence)}},
	{"ListMemoryMade", unsafe.Sizeof(ListMemoryMade{}), []uintptr{unsafe.Offsetof(ListMemoryMade{}.Header.Type), unsafe.Offsetof(ListMemoryMade{}.Header.Sequence), unsafe.Offsetof(ListMemoryMade{}.Bytes)}},
	{"Revoke", unsafe.Sizeof(Revoke{}), []uintptr{unsafe.Offsetof(Revoke{}.Header.Type), unsafe.Offsetof(Revoke{}.Header.Sequence), unsafe.Offsetof(Revoke{}.Region), unsafe.Offsetof(Revoke{}.Reserved)}},
	{"PeerHello", unsafe.Sizeof(PeerHello{}), []uintptr{unsafe.Offsetof(PeerHello{}.Header.Type), unsafe.Offsetof(PeerHello{}.Header.Sequence), unsafe.Offsetof(PeerHello{}.Magic), unsafe.Offsetof(PeerHello{}.Oldest), unsafe.Offsetof(PeerHello{}.Newest), unsafe.Offsetof(PeerHello{}.Token), unsafe.Offsetof(PeerHello{}.Generation), unsafe.Offsetof(PeerHello{}.GPU), unsafe.Offsetof(PeerHello{}.Route), unsafe.Offsetof(PeerHello{}.Shares), unsafe.Offsetof(PeerHello{}.Name)}},
	{"PeerWelcome", unsafe.Sizeof(PeerWelcome{}), []uintptr{unsafe.Offsetof(PeerWelcome{}.Header.Type), unsafe.Offsetof(PeerWelcome{}.Header.Sequence), unsafe.Offsetof(PeerWelcome{}.Version), unsafe.Offsetof(PeerWelcome{}.Route), unsafe.Offsetof(PeerWelcome{}.Generation), unsafe.Offsetof(PeerWelcome{}.GPU), unsafe.Offsetof(PeerWelcome{}.Name)}},
	{"PeerRegion", unsafe.Sizeof(PeerRegion{}), []uintptr{unsafe.Offsetof(PeerRegion{}.Header.Type), unsafe.Offsetof(PeerRegion{}.Header.Sequence), unsafe.Offsetof(PeerRegion{}.Region), unsafe.Offsetof(PeerRegion{}.Kind), unsafe.Offsetof(PeerRegion{}.Bytes), unsafe.Offsetof(PeerRegion{}.GPU)}},
	{"PeerRegionPart", unsafe.Sizeof(PeerRegionPart{}), []uintptr{unsafe.Offsetof(PeerRegionPart{}.Header.Type), unsafe.Offsetof(PeerRegionPart{}.Header.Sequence), unsafe.Offsetof(PeerRegionPart{}.Region), unsafe.Offsetof(PeerRegionPart{}.Reserved), unsafe.Offsetof(PeerRegionPart{}.Bytes)}},
	{"PeerQuota", unsafe.Sizeof(PeerQuota{}), []uintptr{unsafe.Offsetof(PeerQuota{}.Header.Type), unsafe.Offsetof(PeerQuota{}.Header.Sequence), unsafe.Offsetof(PeerQuota{}.Region), unsafe.Offsetof(PeerQuota{}.Windows), unsafe.Offsetof(PeerQuota{}.Bytes), unsafe.Offsetof(PeerQuota{}.Offset)}},
	{"PeerEager", unsafe.Sizeof(PeerEager{}), []uintptr{unsafe.Offsetof(PeerEager{}.Header.Type), unsafe.Offsetof(PeerEager{}.Header.Sequence), unsafe.Offsetof(PeerEager{}.Send), unsafe.Offsetof(PeerEager{}.Tag), unsafe.Offsetof(PeerEager{}.Length), unsafe.Offsetof(PeerEager{}.Window), unsafe.Offsetof(PeerEager{}.Reserved)}},
	{"PeerSend", unsafe.Sizeof(PeerSend{}), []uintptr{unsafe.Offsetof(PeerSend{}.Header.Type), unsafe.Offsetof(PeerSend{}.Header.Sequence), unsafe.Offsetof(PeerSend{}.Send), unsafe.Offsetof(PeerSend{}.Tag), unsafe.Offsetof(PeerSend{}.Length)}},
	{"PeerGrant", unsafe.Sizeof(PeerGrant{}), []uintptr{unsafe.Offsetof(PeerGrant{}.Header.Type), unsafe.Offsetof(PeerGrant{}.Header.Sequence), unsafe.Offsetof(PeerGrant{}.Send), unsafe.Offsetof(PeerGrant{}.Grant), unsafe.Offsetof(PeerGrant{}.Part), unsafe.Offsetof(PeerGrant{}.Length), unsafe.Offsetof(PeerGrant{}.Offset), unsafe.Offsetof(PeerGrant{}.Region), unsafe.Offsetof(PeerGrant{}.Reserved)}},
	{"PeerWritten", unsafe.Sizeof(PeerWritten{}), []uintptr{unsafe.Offsetof(PeerWritten{}.Header.Type), unsafe.Offsetof(PeerWritten{}.Header.Sequence), unsafe.Offsetof(PeerWritten{}.Grant)}},
	{"PeerDelivered", unsafe.Sizeof(PeerDelivered{}), []uintptr{unsafe.Offsetof(PeerDelivered{}.Header.Type), unsafe.Offsetof(PeerDelivered{}.Header.Sequence), unsafe.Offsetof(PeerDelivered{}.Send), unsafe.Offsetof(PeerDelivered{}.Status), unsafe.Offsetof(PeerDelivered{}.Reserved)}},
	{"PeerWithdraw", unsafe.Sizeof(PeerWithdraw{}), []uintptr{unsafe.Offsetof(PeerWithdraw{}.Header.Type), unsafe.Offsetof(PeerWithdraw{}.Header.Sequence), unsafe.Offsetof(PeerWithdraw{}.Send)}},
	{"PeerClose", unsafe.Sizeof(PeerClose{}), []uintptr{unsafe.Offsetof(PeerClose{}.Header.Type), unsafe.Offsetof(PeerClose{}.Header.Sequence), unsafe.Offsetof(PeerClose{}.Status), unsafe.Offsetof(PeerClose{}.Reserved), unsafe.Offsetof(PeerClose{}.Reason)}},
	{"PeerForget", unsafe.Sizeof(PeerForget{}), []uintptr{unsafe.Offsetof(PeerForget{}.Header.Type), unsafe.Offsetof(PeerForget{}.Header.Sequence), unsafe.Offsetof(PeerForget{}.Region), unsafe.Offsetof(PeerForget{}.Reserved)}},
	{"PeerShare", unsafe.Sizeof(PeerShare{}), []uintptr{unsafe.Offsetof(PeerShare{}.Header.Type), unsafe.Offsetof(PeerShare{}.Header.Sequence)}},
	{"PeerShared", unsafe.Sizeof(PeerShared{}), []uintptr{unsafe.Offsetof(PeerShared{}.Header.Type), unsafe.Offsetof(PeerShared{}.Header.Sequence)}},
	{"PeerBell", unsafe.Sizeof(PeerBell{}), []uintptr{unsafe.Offsetof(PeerBell{}.Header.Type), unsafe.Offsetof(PeerBell{}.Header.Sequence)}},
	{"PeerWrite", unsafe.Sizeof(PeerWrite{}), []uintptr{unsafe.Offsetof(PeerWrite{}.Header.Type), unsafe.Offsetof(PeerWrite{}.Header.Sequence), unsafe.Offsetof(PeerWrite{}.Send), unsafe.Offsetof(PeerWrite{}.Length), unsafe.Offsetof(PeerWrite{}.Offset), unsafe.Offsetof(PeerWrite{}.Key)}},
	{"PeerRead", unsafe.Sizeof(PeerRead{}), []uintptr{unsafe.Offsetof(PeerRead{}.Header.Type), unsafe.Offsetof(PeerRead{}.Header.Sequence), unsafe.Offsetof(PeerRead{}.Read), unsafe.Offsetof(PeerRead{}.Length), unsafe.Offsetof(PeerRead{}.Offset), unsafe.Offsetof(PeerRead{}.Key)}},
	{"PeerReadRefused", unsafe.Sizeof(PeerReadRefused{}), []uintptr{unsafe.Offsetof(PeerReadRefused{}.Header.Type), unsafe.Offsetof(PeerReadRefused{}.Header.Sequence), unsafe.Offsetof(PeerReadRefused{}.Read), unsafe.Offsetof(PeerReadRefused{}.Status), unsafe.Offsetof(PeerReadRefused{}.Reserved)}},
	{"PeerReadData", unsafe.Sizeof(PeerReadData{}), []uintptr{unsafe.Offsetof(PeerReadData{}.Header.Type), unsafe.Offsetof(PeerReadData{}.Header.Sequence), unsafe.Offsetof(PeerReadData{}.Send), unsafe.Offsetof(PeerReadData{}.Read), unsafe.Offsetof(PeerReadData{}.Length)}},
	{"PeerBack", unsafe.Sizeof(PeerBack{}), []uintptr{unsafe.Offsetof(PeerBack{}.Header.Type), unsafe.Offsetof(PeerBack{}.Header.Sequence), unsafe.Offsetof(PeerBack{}.Token), unsafe.Offsetof(PeerBack{}.Generation)}},
	{"PeerBackRefused", unsafe.Sizeof(PeerBackRefused{}), []uintptr{unsafe.Offsetof(PeerBackRefused{}.Header.Type), unsafe.Offsetof(PeerBackRefused{}.Header.Sequence), unsafe.Offsetof(PeerBackRefused{}.Status), unsafe.Offsetof(PeerBackRefused{}.Reserved), unsafe.Offsetof(PeerBackRefused{}.Reason)}},
	{"PeerRanges", unsafe.Sizeof(PeerRanges{}), []uintptr{unsafe.Offsetof(PeerRanges{}.Header.Type), unsafe.Offsetof(PeerRanges{}.Header.Sequence), unsafe.Offsetof(PeerRanges{}.Key), unsafe.Offsetof(PeerRanges{}.Count), unsafe.Offsetof(PeerRanges{}.Reserved), unsafe.Offsetof(PeerRanges{}.Range)}},
	{"PeerWriteList", unsafe.Sizeof(PeerWriteList{}), []uintptr{unsafe.Offsetof(PeerWriteList{}.Header.Type), unsafe.Offsetof(PeerWriteList{}.Header.Sequence), unsafe.Offsetof(PeerWriteList{}.Send), unsafe.Offsetof(PeerWriteList{}.Length), unsafe.Offsetof(PeerWriteList{}.Ranges), unsafe.Offsetof(PeerWriteList{}.Reserved)}},
	{"PeerReadList", unsafe.Sizeof(PeerReadList{}), []uintptr{unsafe.Offsetof(PeerReadList{}.Header.Type), unsafe.Offsetof(PeerReadList{}.Header.Sequence), unsafe.Offsetof(PeerReadList{}.Read), unsafe.Offsetof(PeerReadList{}.Length), unsafe.Offsetof(PeerReadList{}.Ranges), unsafe.Offsetof(PeerReadList{}.Reserved)}},
	{"PeerListRefused", unsafe.Sizeof(PeerListRefused{}), []uintptr{unsafe.Offsetof(PeerListRefused{}.Header.Type), unsafe.Offsetof(PeerListRefused{}.Header.Sequence), unsafe.Offsetof(PeerListRefused{}.Number), unsafe.Offsetof(PeerListRefused{}.Position), unsafe.Offsetof(PeerListRefused{}.Status), unsafe.Offsetof(PeerListRefused{}.Reads)}},
	{"PeerGrantRanges", unsafe.Sizeof(PeerGrantRanges{}), []uintptr{unsafe.Offsetof(PeerGrantRanges{}.Header.Type), unsafe.Offsetof(PeerGrantRanges{}.Header.Sequence), unsafe.Offsetof(PeerGrantRanges{}.Region), unsafe.Offsetof(PeerGrantRanges{}.Count), unsafe.Offsetof(PeerGrantRanges{}.Range)}},
	{"LaneGPU", unsafe.Sizeof(LaneGPU{}), []uintptr{unsafe.Offsetof(LaneGPU{}.GPU), unsafe.Offsetof(LaneGPU{}.Index), unsafe.Offsetof(LaneGPU{}.Reserved)}},
	{"ServerBytes", unsafe.Sizeof(ServerBytes{}), []uintptr{unsafe.Offsetof(ServerBytes{}.GPU), unsafe.Offsetof(ServerBytes{}.In), unsafe.Offsetof(ServerBytes{}.Out)}},
	{"Descriptor", unsafe.Sizeof(Descriptor{}), []uintptr{unsafe.Offsetof(Descriptor{}.Operation), unsafe.Offsetof(Descriptor{}.Connection), unsafe.Offsetof(Descriptor{}.Memory), unsafe.Offsetof(Descriptor{}.Flags), unsafe.Offsetof(Descriptor{}.Offset), unsafe.Offsetof(Descriptor{}.Length), unsafe.Offsetof(Descriptor{}.Tag), unsafe.Offsetof(Descriptor{}.Cookie), unsafe.Offsetof(Descriptor{}.WaitTimeline), unsafe.Offsetof(Descriptor{}.SignalTimeline), unsafe.Offsetof(Descriptor{}.WaitValue), unsafe.Offsetof(Descriptor{}.SignalValue), unsafe.Offsetof(Descriptor{}.WaitEvent), unsafe.Offsetof(Descriptor{}.Reserved0), unsafe.Offsetof(Descriptor{}.Key), unsafe.Offsetof(Descriptor{}.RemoteOffset), unsafe.Offsetof(Descriptor{}.Reserved4), unsafe.Offsetof(Descriptor{}.Reserved5), unsafe.Offsetof(Descriptor{}.Reserved6)}},
	{"ListEntryLayout", unsafe.Sizeof(ListEntryLayout{}), []uintptr{unsafe.Offsetof(ListEntryLayout{}.Memory), unsafe.Offsetof(ListEntryLayout{}.Reserved), unsafe.Offsetof(ListEntryLayout{}.Offset), unsafe.Offsetof(ListEntryLayout{}.Length), unsafe.Offsetof(ListEntryLayout{}.At), unsafe.Offsetof(ListEntryLayout{}.Key)}},
	{"Range", unsafe.Sizeof(Range{}), []uintptr{unsafe.Offsetof(Range{}.At), unsafe.Offsetof(Range{}.Length)}},
	{"Completion", unsafe.Sizeof(Completion{}), []uintptr{unsafe.Offsetof(Completion{}.Cookie), unsafe.Offsetof(Completion{}.Length), unsafe.Offsetof(Completion{}.Status), unsafe.Offsetof(Completion{}.Entry)}},
	{"SubmitPage", unsafe.Sizeof(SubmitPage{}), []uintptr{unsafe.Offsetof(SubmitPage{}.Tail), unsafe.Offsetof(SubmitPage{}.Reserved0), unsafe.Offsetof(SubmitPage{}.CompletedHead), unsafe.Offsetof(SubmitPage{}.Reserved1), unsafe.Offsetof(SubmitPage{}.ClientSleeps), unsafe.Offsetof(SubmitPage{}.Reserved2)}},
	{"CompletePage", unsafe.Sizeof(CompletePage{}), []uintptr{unsafe.Offsetof(CompletePage{}.TakenHead), unsafe.Offsetof(CompletePage{}.Reserved0), unsafe.Offsetof(CompletePage{}.Tail), unsafe.Offsetof(CompletePage{}.Reserved1), unsafe.Offsetof(CompletePage{}.RelaySleeps), unsafe.Offsetof(CompletePage{}.Reserved2)}},
	{"HandleLayout", unsafe.Sizeof(HandleLayout{}), []uintptr{unsafe.Offsetof(HandleLayout{}.Magic), unsafe.Offsetof(HandleLayout{}.Token), unsafe.Offsetof(HandleLayout{}.Generation), unsafe.Offsetof(HandleLayout{}.Host), unsafe.Offsetof(HandleLayout{}.Contact), unsafe.Offsetof(HandleLayout{}.Note)}},
	{"RemoteKeyLayout", unsafe.Sizeof(RemoteKeyLayout{}), []uintptr{unsafe.Offsetof(RemoteKeyLayout{}.Magic), unsafe.Offsetof(RemoteKeyLayout{}.Key), unsafe.Offsetof(RemoteKeyLayout{}.Length), unsafe.Offsetof(RemoteKeyLayout{}.Access), unsafe.Offsetof(RemoteKeyLayout{}.Reserved), unsafe.Offsetof(RemoteKeyLayout{}.Reserved0), unsafe.Offsetof(RemoteKeyLayout{}.Reserved1), unsafe.Offsetof(RemoteKeyLayout{}.Reserved2)}},
	{"DMABuf", unsafe.Sizeof(DMABuf{}), []uintptr{unsafe.Offsetof(DMABuf{}.Header.Type), unsafe.Offsetof(DMABuf{}.Header.Sequence), unsafe.Offsetof(DMABuf{}.Memory), unsafe.Offsetof(DMABuf{}.Reserved), unsafe.Offsetof(DMABuf{}.Reason)}},
}
