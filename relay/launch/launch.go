// Package launch has the messages between a supervisor and its relay. The package is a leaf: the
// hook imports the package, which imports no part of the data path.
//
// The supervisor starts the relay as `peerlane-relay serve` with only these open descriptors above
// 2:
//
//	3  listening SOCK_SEQPACKET socket of the clients
//	4  listening SOCK_SEQPACKET socket of the peer relays
//	5  SOCK_SEQPACKET socket to the supervisor
//	6  pidfd of the container's init
//
// Standard error is a pipe to the supervisor, which the relay can outlive: the relay continues
// without a log then, and ignores SIGPIPE.
//
// Over descriptor 5 the supervisor sends a Config, a JSON document per datagram, at the start and
// after changes of the container's lanes, or a Request. The relay answers with a Status, in order.
// The relay may send a Claim, which the supervisor answers with an Admission. The relay ends by
// itself when descriptor 6 says that init has ended.
package launch

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Descriptors of a relay at its start.
const (
	FDClients    = 3
	FDPeers      = 4
	FDSupervisor = 5
	FDInit       = 6
)

// MaxDatagram bounds a Config, a Request or a Status, bytes of JSON.
const MaxDatagram = 64 << 10

// GPU is a device's identity.
type GPU struct {
	// UUID is NVML's, "GPU-8-4-4-4-12"; empty where it could not be read.
	UUID string `json:"uuid,omitempty"`
	// BusID is the PCI address, "0000:17:00.0", lower case.
	BusID string `json:"busid"`
	// Index is NVML's, the N of nvidia-smi.
	Index int `json:"index"`
}

// Lane is a GPU's connection to the network.
type Lane struct {
	GPU     GPU      `json:"gpu"`
	Role    string   `json:"role"`    // topo's: near or RoleFar
	Relay   bool     `json:"relay"`   // whether its traffic is staged on Servers
	Servers []GPU    `json:"servers"` // GPUs that hold its staging memory
	NICs    []string `json:"nics"`    // RDMA device names, as in /sys/class/infiniband
	// Direct says that NICs read and write the GPU's own memory, where they can.
	Direct bool `json:"direct,omitempty"`
	// Members say how much of the lane's traffic goes which way. A supervisor of an earlier release
	// sends no members: then servers and NICs are equal.
	Members []Member `json:"members,omitempty"`
	// Copy says that the container sees the device nodes of Servers too: its clients
	// may have staging memory there, and copy themselves.
	Copy bool `json:"copy,omitempty"`
	// NIC describes the first of NICs; nil where there is none.
	NIC *NIC `json:"nic,omitempty"`
	// PeerMbps is the rate of the links to further GPUs of the host, 10^6 bits per second and
	// direction; 0 where unknown.
	PeerMbps uint32 `json:"peerMbps,omitempty"`
	// Spares replace Servers without room; the first spare with room is used.
	Spares []Spare `json:"spares,omitempty"`
}

// Member is a route of a lane's traffic, with a weight: over a NIC, from the memory of the GPU at a
// PCI address, which for a direct member is the lane's GPU; or of the host, where Server is empty.
type Member struct {
	Server string `json:"server,omitempty"`
	NIC    string `json:"nic"`
	Weight int    `json:"weight"`
}

// NIC is the description of a NIC for clients, with NCCL's values (virtualswitch.NIC).
type NIC struct {
	Name string `json:"name"`
	GUID uint64 `json:"guid,omitempty"`
	Mbps uint32 `json:"mbps,omitempty"` // 10^6 bits a second
	Port uint32 `json:"port,omitempty"`
}

// maxWeight is planner.MaxWeights, which relays do not import.
const maxWeight = 1024

// RoleFar is topo's, which relays do not import.
const RoleFar = "far"

// Spare is a server GPU of further lanes, with its near NICs.
type Spare struct {
	GPU
	NICs []string `json:"nics"`
}

// Routes of a message between two containers of a host.
const (
	RouteAuto   = "auto"   // direct
	RouteStaged = "staged" // client GPU -> slot on a server GPU -> NIC -> slot -> client GPU
	RouteDirect = "direct" // one copy
)

// Transports.
const (
	// TransportAuto is local for route direct; for route staged, and between two hosts, verbs where
	// the lanes' NICs can, else tcp.
	TransportAuto  = "auto"
	TransportLocal = "local" // no NIC
	TransportTCP   = "tcp"   // also between two containers of a host
	TransportVerbs = "verbs" // RDMA; the same
)

// Scopes: where the peers of a container are.
const (
	ScopeAuto    = "auto"    // on this one where the relay is on no network, else on any
	ScopeCluster = "cluster" // on any host
	ScopeHost    = "host"    // on this one
)

// Config is the configuration of a relay.
type Config struct {
	// Version is the Version of the supervisor; 0 of an earlier release.
	Version    int    `json:"version,omitempty"`
	Generation string `json:"generation"` // 32 hexadecimal digits
	Container  string `json:"container"`  // the runtime's id, for messages only
	Lanes      []Lane `json:"lanes"`
	// Scope is where the peers of the lanes are; empty means ScopeCluster. Local resolves the
	// scope.
	Scope     string `json:"scope,omitempty"`
	Route     string `json:"route"`
	Transport string `json:"transport"`
	Slots     int    `json:"slots"`     // staging slots in each direction
	SlotBytes uint64 `json:"slotBytes"` // size of each
	Peers     string `json:"peers"`     // directory of peer sockets, layout.Peers
	// Admission says that the supervisor answers Claims, and that the relay takes
	// no staging without one. A supervisor of an earlier release does not say so.
	Admission bool `json:"admission,omitempty"`
	// Endings says that the supervisor hears an Ending.
	Endings bool `json:"endings,omitempty"`
	// Reserve is when staging is taken: ReserveAttach, also where it is empty, or
	// ReserveStart.
	Reserve string `json:"reserve,omitempty"`
	// Bounce is the most host memory, bytes, that the lanes stage in when no server
	// GPU has room; with 0 they do not.
	Bounce uint64 `json:"bounce,omitempty"`
	// OwnHostMemory limits the relay's total host memory for the container, bytes: memory of
	// clients, slots, rings, and memory shared with remote relays; 0 for a container without a
	// memory limit.
	OwnHostMemory uint64 `json:"ownHostMemory,omitempty"`
	// HostAdmission says that the supervisor admits host memory, too: a Claim whose GPU
	// is HostMemory.
	HostAdmission bool `json:"hostAdmission,omitempty"`
	// CUDAIPC permits clients' memory of cudaMalloc by IPC handle.
	CUDAIPC bool `json:"cudaIPC,omitempty"`
	// IPCEvents permits operations that wait for events of clients by IPC handle.
	IPCEvents bool   `json:"ipcEvents,omitempty"`
	Limits    Limits `json:"limits,omitzero"`
	// SelfTest decides on untested pairs of GPUs: SelfTestOff, which is the default, SelfTestOnce
	// or SelfTestRequired.
	SelfTest string `json:"selfTest,omitempty"`
	// Testing reports a self-test in progress, whose results come with a further configuration:
	// staging waits for it.
	Testing bool `json:"testing,omitempty"`
	// Pairs are the results of pairs that lanes can stage on.
	Pairs []Pair `json:"pairs"`
	// Triples are the results of the lanes' GPUs with NICs. A lane bounces by NICs without a
	// good one, unless SelfTest is off.
	Triples []Triple `json:"triples,omitempty"`
	// Calibrated: the result of a pair decides on slot sizes and streams; Chunk, Depth and Streams
	// that are not 0 take its place.
	Calibrated bool   `json:"calibrated,omitempty"`
	Chunk      uint64 `json:"chunk,omitempty"` // bytes
	Depth      int    `json:"depth,omitempty"`
	Streams    int    `json:"streams,omitempty"`
	// Network is nil for a relay without connections to remote hosts; NoNetwork is the reason, for
	// errors.
	Network   *Network `json:"network,omitempty"`
	NoNetwork string   `json:"noNetwork,omitempty"`
	// Verbs is nil for a relay that uses no RDMA.
	Verbs *Verbs `json:"verbs,omitempty"`
}

// Times at which a relay allocates staging.
const (
	ReserveAttach = "attach" // when a client first needs it
	ReserveStart  = "start"  // when the container starts
)

// Limits bound the total resources of a container's clients in the relay. 0 stands for the value of
// DefaultLimits.
type Limits struct {
	Clients     int `json:"clients,omitempty"`     // processes that are attached; each has two rings
	Memories    int `json:"memories,omitempty"`    // exported
	Connections int `json:"connections,omitempty"` // in both directions
	Descriptors int `json:"descriptors,omitempty"` // files that the relay has open for them
	// Host memory that the relay makes for them, and as much of other containers' that it writes
	// into; bytes. ClientHostMemory is the limit of a process.
	HostMemory       uint64 `json:"hostMemory,omitempty"`
	ClientHostMemory uint64 `json:"clientHostMemory,omitempty"`
	// Memory on server GPUs that clients have who copy themselves, beside the slots; bytes.
	// ClientStaging is the limit of a process.
	Staging       uint64 `json:"staging,omitempty"`
	ClientStaging uint64 `json:"clientStaging,omitempty"`
}

// DefaultLimits are the limits of a configuration without limits.
var DefaultLimits = Limits{
	Clients: 512, Memories: 16384, Connections: 4096, Descriptors: 32768, HostMemory: 4 << 30, ClientHostMemory: 1 << 30,
	Staging: 4 << 30, ClientStaging: 2 << 30,
}

// WithDefaults are the limits with nothing left open.
func (l Limits) WithDefaults() Limits {
	d := DefaultLimits
	for _, f := range []struct{ own, standard *int }{
		{&l.Clients, &d.Clients}, {&l.Memories, &d.Memories}, {&l.Connections, &d.Connections},
		{&l.Descriptors, &d.Descriptors},
	} {
		if *f.own == 0 {
			*f.own = *f.standard
		}
	}
	for _, f := range []struct{ own, standard *uint64 }{
		{&l.HostMemory, &d.HostMemory}, {&l.ClientHostMemory, &d.ClientHostMemory}, {&l.Staging, &d.Staging},
		{&l.ClientStaging, &d.ClientStaging},
	} {
		if *f.own == 0 {
			*f.own = *f.standard
		}
	}
	return l
}

// Requests of a supervisor.
const (
	RequestReport = "report" // answered with a Report
	RequestEnd    = "end"    // let go of everything, once the last copy has ended, and end
	// RequestSecrets comes before the first Config, and again when the key has changed.
	RequestSecrets = "secrets"
)

// Request is a further message of a supervisor; a document with "request" is one.
type Request struct {
	Request string `json:"request"`
	// Reason is the reason for clients and peers at RequestEnd.
	Reason string `json:"reason,omitempty"`
	// Secrets are of RequestSecrets.
	Secrets *Secrets `json:"secrets,omitempty"`
}

// Status is the relay's answer to a Config or a Request.
type Status struct {
	OK     bool    `json:"ok"`
	Error  string  `json:"error,omitempty"`
	Report *Report `json:"report,omitempty"`
}

// Report is a relay's report.
type Report struct {
	Clients []Client `json:"clients"`
	// MoreClients have no room beside those; Used counts all.
	MoreClients int `json:"moreClients,omitempty"`
	// Contexts are the GPUs with a CUDA context of the relay, as PCI addresses.
	Contexts []string `json:"contexts"`
	// Writes are the methods of short copies out of host memory into these GPUs.
	Writes  []Writes  `json:"writes,omitempty"`
	Staging []Staging `json:"staging"`
	// Bytes since it was started; what was staged is of those sent or received.
	Sent     uint64 `json:"sent"`
	Received uint64 `json:"received"`
	Staged   uint64 `json:"staged"`
	Direct   uint64 `json:"direct"`
	// Used is the current use of Limits by clients.
	Used   Limits `json:"used"`
	Limits Limits `json:"limits"`
	// BadHandles counts the senders whose handle no listener here gave out, since
	// the relay was started: somebody guesses, or comes too late.
	BadHandles uint64 `json:"badHandles"`
	// At is the relay's own clock, nanoseconds: between two reports of one process
	// so much time has gone by.
	At    time.Duration `json:"at"`
	Lanes []LaneFigures `json:"laneFigures,omitempty"`
	// Connections are the connections with the most bytes; MoreConnections are not shown.
	Connections     []ConnectionFigures `json:"connectionFigures,omitempty"`
	MoreConnections int                 `json:"moreConnections,omitempty"`
	// Network is nil without a network.
	Network *NetworkReport `json:"network,omitempty"`
}

// Writes are the methods of short copies out of host memory into a GPU, by size. Copies of up to
// Stores bytes are CPU stores through BAR1, into memory mapped there. Further copies of up to Words
// bytes are words written by a stream; larger copies, of less than 32 KiB, are two rows of a
// rectangle.
type Writes struct {
	GPU    string `json:"gpu"` // PCI address
	Words  uint64 `json:"words"`
	Stores uint64 `json:"stores"`
	// NoStores is the reason why Stores is 0.
	NoStores string `json:"noStores,omitempty"`
	// Measured is empty where nothing was measured.
	Measured []WriteTime `json:"measured,omitempty"`
}

// WriteTime is the duration of a copy of so many bytes per method, microseconds: the median at the
// relay's start. 0 is a method that was not measured.
type WriteTime struct {
	Bytes  uint64  `json:"bytes"`
	Words  float64 `json:"wordsMicroseconds"`
	Rows   float64 `json:"rowsMicroseconds"`
	Stores float64 `json:"storesMicroseconds,omitempty"`
}

// Programs of clients, as they name themselves.
const (
	ProgramNCCL = "NCCL"
	ProgramNIXL = "NIXL"
)

// Client is a session of a process of the container.
type Client struct {
	PID int `json:"pid"` // the host's
	// Program is one of Program*; empty of other programs.
	Program     string `json:"program,omitempty"`
	Memories    int    `json:"memories"`
	Bytes       uint64 `json:"bytes"`                 // exported
	HostMemory  uint64 `json:"hostMemory,omitempty"`  // bytes, of these, that the relay made
	Staging     uint64 `json:"staging,omitempty"`     // the same on server GPUs, for copies by the client
	IPCMemories int    `json:"ipcMemories,omitempty"` // of these memories, by a handle of CUDA's IPC
	Connections int    `json:"connections"`
}

// Staging is a relay's memory on a server GPU, or of the host.
type Staging struct {
	GPU string `json:"gpu"` // PCI address; empty where Host
	// Host says that it is the host's memory: the lane of the GPU at the PCI address
	// Lane bounces.
	Host bool   `json:"host,omitempty"`
	Lane string `json:"lane,omitempty"`
	// Transport is TransportTCP for staging to remote hosts; empty of all else.
	Transport string `json:"transport,omitempty"`
	Bytes     uint64 `json:"bytes"`
	// Clients is the additional staging memory of clients that copy.
	Clients uint64 `json:"clients,omitempty"`
	// Wanted is the configured size; Note says why Bytes is less, or why a GPU serves that is not
	// among the lane's servers.
	Wanted uint64 `json:"wanted"`
	Note   string `json:"note,omitempty"`
	// Slots of SlotBytes in each direction, and the streams that copy to and from
	// them; of the first lane where several have staging there.
	Slots     int    `json:"slots,omitempty"`
	SlotBytes uint64 `json:"slotBytes,omitempty"`
	Streams   int    `json:"streams,omitempty"`
	// Pages describes the pages, huge or small, of slots in host memory for remote hosts.
	Pages string `json:"pages,omitempty"`
}

// Local reports whether the lanes reach only this host, over the links between GPUs: then clients
// get the rate of the links, otherwise the rate of the lane's NIC. With ScopeAuto the lanes of a
// relay without a network are local, except staged lanes.
func (c Config) Local() bool {
	return c.Scope == ScopeHost || c.Scope == ScopeAuto && c.Network == nil && c.Route != RouteStaged
}

// Check returns an error if a relay cannot work with the configuration.
func (c Config) Check() error {
	if len(c.Generation) != 32 || strings.Trim(c.Generation, "0123456789abcdef") != "" {
		return fmt.Errorf("relay configuration: %w", &ValueError{"generation", c.Generation, "32 hexadecimal digits"})
	}
	for _, check := range []func() error{c.checkLanes, c.checkChoices, c.Verbs.Check, c.Network.Check, c.checkNumbers} {
		if err := check(); err != nil {
			return fmt.Errorf("relay configuration: %w", err)
		}
	}
	for _, p := range c.Pairs {
		if err := p.Check(); err != nil {
			return fmt.Errorf("relay configuration: a tested pair: %w", err)
		}
	}
	return nil
}

func (c Config) checkLanes() error {
	if len(c.Lanes) == 0 {
		return &ValueError{"lanes", 0, "at least 1"}
	}
	for _, l := range c.Lanes {
		nics := slices.Clone(l.NICs)
		for _, m := range l.Members {
			if m.Weight < 1 || m.Weight > maxWeight {
				return &ValueError{"weight of " + m.NIC, m.Weight, fmt.Sprintf("1 to %d", maxWeight)}
			}
			nics = append(nics, m.NIC)
		}
		for _, spare := range l.Spares {
			nics = append(nics, spare.NICs...)
		}
		for _, nic := range nics {
			// The name becomes a part of paths.
			if nic == "" || nic == "." || nic == ".." || strings.ContainsAny(nic, "/\x00") {
				return &ValueError{"RDMA device", nic, ""}
			}
		}
	}
	return nil
}

// checkChoices checks keys that have a list of possible values.
func (c Config) checkChoices() error {
	for _, choice := range []struct {
		key, value string
		known      []string
	}{
		{"route", c.Route, []string{RouteAuto, RouteStaged, RouteDirect}},
		{"scope", c.Scope, []string{"", ScopeAuto, ScopeCluster, ScopeHost}},
		{"reserve", c.Reserve, []string{"", ReserveAttach, ReserveStart}},
		{"transport", c.Transport, []string{TransportAuto, TransportLocal, TransportTCP, TransportVerbs}},
		{"self-test", c.SelfTest, []string{"", SelfTestOff, SelfTestOnce, SelfTestRequired}},
	} {
		if !slices.Contains(choice.known, choice.value) {
			return &ValueError{choice.key, choice.value, strings.TrimPrefix(strings.Join(choice.known, ", "), ", ")}
		}
	}
	return nil
}

func (c Config) checkNumbers() error {
	for _, n := range []int{c.Limits.Clients, c.Limits.Memories, c.Limits.Connections, c.Limits.Descriptors} {
		if n < 0 {
			return &ValueError{"limit", n, "0 and more"}
		}
	}
	switch {
	case c.Chunk > 1<<30 || c.Chunk%(64<<10) != 0:
		return &ValueError{"chunk", c.Chunk, "a multiple of 64 KiB up to 1 GiB"}
	case c.Depth < 0 || c.Depth > MaxDepth:
		return &ValueError{"depth", c.Depth, fmt.Sprintf("0 to %d", MaxDepth)}
	case c.Streams < 0 || c.Streams > MaxStreams:
		return &ValueError{"streams", c.Streams, fmt.Sprintf("0 to %d", MaxStreams)}
	}
	if c.Slots < 1 || c.Slots > 1024 {
		return &ValueError{"slots", c.Slots, "1 to 1024"}
	}
	if c.SlotBytes < 64<<10 || c.SlotBytes > 1<<30 || c.SlotBytes%(64<<10) != 0 {
		return &ValueError{"slot size", c.SlotBytes, "a multiple of 64 KiB up to 1 GiB"}
	}
	return nil
}
