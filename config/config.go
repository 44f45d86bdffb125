// Package config reads the administrator's configuration, config.toml.
//
// Everything in it is optional; a missing file is the default configuration. A
// key that is not known is an error, so that a misspelt one is not silently
// without effect.
package config

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"
	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/topo"
)

// Config is the whole file. What a field's comment says, docs/configuration.md
// says to administrators.
type Config struct {
	Hook    Hook           `toml:"hook"`
	Relay   Relay          `toml:"relay"`
	GDR     topo.GDRPolicy `toml:"gdr"`
	Plan    Plan           `toml:"plan"`
	Staging Staging        `toml:"staging"`
	// GPUs that containers ask for together, by index, UUID or PCI address:
	// `half0 = ["0", "1", "2", "3"]` makes the device `peerlane.dev/gpu=half0`, and
	// `peerlane.dev/lane=half0`.
	Groups  map[string][]string `toml:"groups,omitempty"`
	CDI     CDI                 `toml:"cdi"`
	Runtime Runtime             `toml:"runtime"`
	Network Network             `toml:"network"`
	Log     Log                 `toml:"log"`
	Verbs   Verbs               `toml:"verbs"`
	// What `peerlane exporter` may show.
	Exporter Exporter `toml:"exporter"`
}

// Exporter is what `peerlane exporter` may show.
type Exporter struct {
	// Have `peerlane exporter` serve metrics also where cdi.tenancy is multi. Every user
	// of the host can read them on loopback, without containers' ids.
	MultiTenancy bool `toml:"multi_tenancy"`
}

// Log is how events are written.
type Log struct {
	// The form of a line, one for each event, of what the hook, a supervisor and its relay
	// log: text, words and name=value; or json, one object. Lines of one life of one
	// container have its generation. It holds for containers that start from then on. What
	// a hook tells its runtime, which shows it to users, stays a sentence; `peerlane` has
	// --log-format.
	Format string `toml:"format"`
}

// Forms of a line of a log.
const (
	LogText = "text"
	LogJSON = "json"
)

// LogFormatter writes lines of a form; empty stands for LogText.
func LogFormatter(form string) logrus.Formatter {
	if form == LogJSON {
		return &logrus.JSONFormatter{}
	}
	return &logrus.TextFormatter{DisableColors: true, FullTimestamp: true}
}

// SetLogFormat has this process log in a form.
func SetLogFormat(form string) { logrus.SetFormatter(LogFormatter(form)) }

// Hook is what happens in front of a container.
type Hook struct {
	// What becomes of a container whose relay does not start: with fail it does not
	// start either; with warn it starts without its lane, the host's log says why,
	// and its clients hear where to look. A configuration that cannot be read, and
	// devices that would hide one another, fail always.
	OnFailure string `toml:"on_failure"`
	// Give lanes to containers that ask by the annotation peerlane.dev/lanes, for
	// engines with a directory of hooks; an image can carry an annotation, too.
	Annotations bool `toml:"annotations"`
}

// What becomes of a container whose relay does not start.
const (
	OnFailureFail = "fail" // it does not start
	OnFailureWarn = "warn" // it starts without a lane
)

// Plan is what the plan of lanes is not left to decide by itself.
type Plan struct {
	// How GPUs that are near a NIC use the network. With auto their traffic also goes over
	// NICs near other GPUs, staged on these, and through the CPU's memory, where by the
	// estimate that makes the slowest GPU faster. With direct it goes over NICs near them
	// alone, which read and write their memory.
	Near string `toml:"near"`
	// Use software RDMA (rxe, siw), too, which cannot reach a GPU's memory: for
	// trying things out.
	Software bool `toml:"software"`
	// Use the virtual functions and subfunctions of NICs that lanes can use
	// themselves, too. Without it they are left to virtual machines and other tenants;
	// where the physical function is not usable, its functions are planned all the same.
	VirtualFunctions bool `toml:"virtual_functions"`
	// The rail of single NICs, by name, so that the hosts of a cluster agree:
	// `mlx5_0 = 0`. The others have their place among the host's NICs.
	Rails map[string]int `toml:"rails,omitempty"`
	// A lane as you want it, whatever the topology and the estimate say.
	Lanes   []topo.Assignment `toml:"lane,omitempty"`
	Exclude topo.Exclude      `toml:"exclude"`
}

// Staging bounds what relays take from server GPUs.
type Staging struct {
	// The most that the relays of this host together may take from a server GPU;
	// without it that is a quarter of the GPU's memory, and 0 keeps relays off it. A
	// GPU whose limit has no room for a lane's slots does not serve it; `peerlane
	// plan` shows what the lanes come to. A relay that comes when others have taken
	// the rest takes smaller slots, or another server GPU, or its clients hear who
	// has it. A limit that is changed holds for what is taken from then on.
	Limit *Size `toml:"limit,omitempty"`
	// The same for single GPUs, by index, UUID or PCI address: `"3" = "1GiB"`.
	GPUs map[string]Size `toml:"gpus,omitempty"`
	// What becomes of a lane when no server GPU has room: with allow its relay stages
	// in the host's memory, through which everything bounces, slower many times, and
	// says so in its log and in `peerlane relay inspect`; with never its clients are
	// refused.
	Bounce string `toml:"bounce"`
	// The most host memory that one relay stages in, and no more than a quarter of
	// relay.memory. A lane that finds less left takes smaller slots.
	BounceLimit Size `toml:"bounce_limit"`
	// The most host memory that the relays of this host together may allocate for
	// their containers, as slots and as memory of clients; without it that is a quarter
	// of the host's memory. A relay that comes when others have allocated the rest
	// refuses its clients with this key. Each relay by itself has a limit of a quarter
	// of its container's memory limit, if that has one.
	HostLimit *Size `toml:"host_limit,omitempty"`
}

// What becomes of a lane when no server GPU has room.
const (
	BounceAllow = "allow" // it stages in the host's memory
	BounceNever = "never" // its clients are refused
)

// Bounce is what launch.Config says of that, bytes.
func (c Config) Bounce() uint64 {
	if c.Staging.Bounce == BounceNever {
		return 0
	}
	return uint64(min(c.Staging.BounceLimit, c.Relay.Memory/4))
}

// Relay is how relays are started and what they are told.
type Relay struct {
	// Absolute path of peerlane-relay; empty stands for the one beside
	// peerlane-hook.
	Binary string `toml:"binary"`
	// Who starts relays: systemd, as peerlane-relay@.service, or the hook itself
	// (fork), as a process of its own. With auto it is systemd where that is
	// process 1 and peerlane-relay.socket is there, and the hook elsewhere, or when
	// systemd does not answer.
	Launcher string `toml:"launcher"`
	// The way of a message between two containers of this host: auto, staged or
	// direct.
	Route string `toml:"route"`
	// What carries messages: loop and local do within this host, tcp and verbs (RDMA)
	// between all hosts, and within this one as well; auto takes verbs or, where a lane has
	// no NIC that can, tcp, for other hosts alone.
	Transport string `toml:"transport"`
	// Where the peers of containers are: on this host (host), on any host (cluster), or
	// auto: on this host as long as it has no cluster key. With cluster the relay tells
	// NCCL the rate and the guid of the lane's NIC, which NCCL divides among the lanes that
	// share it; with host the rate of the GPU's links to its peers, and that each lane is by
	// itself.
	Scope string `toml:"scope"`
	// Staging slots of a lane in each direction, striped over its server GPUs.
	Slots int `toml:"slots"`
	// The size of a slot: a multiple of 64KiB up to 1GiB.
	SlotSize Size `toml:"slot_size"`
	// When a relay takes its staging: when a client first needs it (attach), or when
	// the container starts (start), so that a job that fills the server GPUs later
	// finds it taken. With start each container has its CUDA context, some 265 MiB on
	// its own GPU, from its start on, whether it uses its lane or not.
	Reserve string `toml:"reserve"`
	// Whether a pair of GPUs is tested before a lane stages one's bytes on the other:
	// with once the first container after a boot, or after another driver was loaded,
	// has it tested while it starts, a second or so a pair; one that fails, or is
	// slower than the bounce, is replaced by a spare or the bounce, and one that could
	// not be tested, because a GPU is full, say, is used. With required only a pair
	// that has passed is used. With off none is tested. `peerlane self-test` tests
	// them at any time, and docs/relay.md says how.
	SelfTest string `toml:"self_test"`
	// What decides how large the pieces are that a message is copied in, how many are
	// under way, and by how many streams: auto, the calibration that comes with the
	// self-test of a pair, within the memory of slots and slot_size; or off, slots,
	// slot_size and one stream.
	Calibration string `toml:"calibration"`
	// The size of these pieces whatever the calibration says, a multiple of 64KiB; 0
	// leaves it that.
	Chunk Size `toml:"chunk"`
	// The same for how many are under way; 0 leaves it the calibration.
	Depth int `toml:"depth"`
	// The same for the streams of each direction; 0 leaves it the calibration.
	Streams int `toml:"streams"`
	// Whether clients may hand over memory of cudaMalloc by its IPC handle: allow or
	// never. Such a handle is a number and no secret: who guesses another container's
	// has its memory, and a client that frees what is handed over can make its relay
	// fail. Hence not with cdi.tenancy = "multi". Memory of cuMemCreate needs none of
	// it.
	CUDAIPC string `toml:"cuda_ipc"`
	// What operations may wait for beside timelines, which always work: with ipc also
	// events of CUDA's IPC (cudaIpcGetEventHandle), with timeline nothing. The driver
	// keeps such events in /dev/shm for one uid, so they take containers that share the
	// host's (`--ipc host`) and are root there, and relays with sandbox = "off". Not with
	// cdi.tenancy = "multi".
	Events string `toml:"events"`
	// Added to a relay's environment, `"NAME=value"` each; beside it there is only
	// PATH.
	Environment []string `toml:"environment"`
	// What a relay is kept in: with auto all that the host offers, a uid of its own,
	// no capabilities, a root of its own with its devices and libraries, Landlock, a
	// filter of system calls, limits; `peerlane relay inspect` shows what it is.
	// With off, for finding a fault, nothing.
	Sandbox string `toml:"sandbox"`
	// The uids of relays, first to last, and gids of the same numbers: nobody else
	// on the host may have them. The first is the group of all relays, and each
	// relay gets one of the others to itself.
	UIDs string `toml:"uids"`
	// Files and directories that relays may read, in their sandbox as well, beside
	// what every driver needs: for libraries of a driver in an unusual place. What
	// environment names by PEERLANE_CUDA_LIBRARY and LD_LIBRARY_PATH is among them.
	SandboxRead []string `toml:"sandbox_read,omitempty"`
	// The same for what they may change: for traces, or a driver's files in /dev/shm.
	SandboxWrite []string `toml:"sandbox_write,omitempty"`
	// The most memory of the host that a relay may take, with its supervisor; a
	// GPU's does not count, unless it is a simulated one. It ends when it takes more.
	Memory Size `toml:"memory"`
	// The most processors that a relay may keep busy.
	CPUs int `toml:"cpus"`
	// The most threads that a relay may have.
	Tasks int `toml:"tasks"`
	// What the clients of one container may have of their relay.
	Limits Limits `toml:"limits"`
}

// What decides on the sizes of copies.
const (
	CalibrationAuto = "auto" // the self-test of the pair
	CalibrationOff  = "off"  // slots and slot_size
)

// Whether memory of cudaMalloc is taken by its IPC handle.
const (
	CUDAIPCAllow = "allow"
	CUDAIPCNever = "never"
)

// What operations may wait for.
const (
	EventsTimeline = "timeline"
	EventsIPC      = "ipc" // events of CUDA's IPC, too
)

// Limits bound what the clients of one container have of their relay, all of them
// together, so that no client can have it grow without end.
type Limits struct {
	// Processes that are attached at a time. Each has two rings in shared memory,
	// 180 KiB together.
	Clients int `toml:"clients"`
	// Memories that are exported at a time.
	Memories int `toml:"memories"`
	// Connections that are open at a time, sending and receiving.
	Connections int `toml:"connections"`
	// Files that the relay has open for them at a time: six for a process, one for
	// each event, one for each allocation of a memory, two for host memory, up to three for a connection
	// and, while another container's memory is mapped for it, one for each allocation
	// of that. Where the relay may not open as many
	// (ulimit -n) it is fewer.
	Descriptors int `toml:"descriptors"`
	// Host memory that the relay makes for them, and the host memory of other
	// containers that it writes into, each; no more than half of relay.memory.
	HostMemory Size `toml:"host_memory"`
	// Of that, what one process may have.
	ClientHostMemory Size `toml:"client_host_memory"`
	// Memory on server GPUs for clients that copy themselves, in containers that have
	// `gpu=`; beside the slots, and within what staging.limit leaves.
	Staging Size `toml:"staging"`
	// Of that, what one process may have.
	ClientStaging Size `toml:"client_staging"`
}

// Launch is what a relay is told of its limits.
func (r Relay) Launch() launch.Limits {
	l := r.Limits
	return launch.Limits{
		Clients: l.Clients, Memories: l.Memories, Connections: l.Connections, Descriptors: l.Descriptors,
		HostMemory: uint64(min(l.HostMemory, r.Memory/2)), ClientHostMemory: uint64(min(l.ClientHostMemory, r.Memory/2)),
		Staging: uint64(l.Staging), ClientStaging: uint64(l.ClientStaging),
	}
}

// What a relay is kept in.
const (
	SandboxAuto = "auto" // all that the host offers
	SandboxOff  = "off"  // nothing
)

// CDI is what `cdi generate` offers to container engines.
type CDI struct {
	// Who shares this host: with single, containers may get server GPUs and NICs;
	// with multi, only `lane=` is offered.
	Tenancy string `toml:"tenancy"`
	// Have `peerlane cdi refresh` load nvidia-peermem, or its predecessor
	// nv_peer_mem, on a host with RDMA devices where neither is loaded. DMA-BUF
	// needs no module.
	LoadPeermem bool `toml:"load_peermem"`
}

// Runtime is what peerlane-runtime does, for engines without CDI.
type Runtime struct {
	// Absolute path of the OCI runtime that peerlane-runtime runs; empty stands for
	// the first of runc and crun in /usr/local/sbin, /usr/local/bin, /usr/sbin,
	// /usr/bin, /sbin and /bin.
	Path string `toml:"path"`
	// The CDI devices that a container may ask peerlane-runtime for by the variable
	// PEERLANE_DEVICES or the annotation peerlane.dev/devices, which an image can set
	// as well as a user: `"peerlane.dev/lane=*"`, where * stands for any name. None
	// unless stated.
	Devices []string `toml:"devices,omitempty"`
}

// Network is how relays of different hosts reach and trust each other.
type Network struct {
	// Whether relays listen for those of other hosts, and connect to them: with auto where
	// there is a cluster key when their container starts, with off never.
	Listen string `toml:"listen"`
	// Absolute path of the cluster key, which only root may read; empty stands for
	// /etc/peerlane/cluster.key. `peerlane key` makes it, and docs/network.md says how
	// it is changed.
	Key string `toml:"key"`
	// The name of an annotation of config.json whose value is the container's tenant, such as
	// "io.kubernetes.cri.sandbox-namespace"; empty for none. The relay gets a key that is
	// derived of the cluster key and that name in place of the cluster key: relays of two
	// tenants on two hosts refuse each other. A container without the annotation is not on
	// the network. All hosts of a cluster need the same. Images and users must not be able to
	// set the annotation; docs/security.md has more.
	TenantAnnotation string `toml:"tenant_annotation"`
	// The network interfaces that relays use, as NCCL_SOCKET_IFNAME names them:
	// beginnings of names with commas between them, "=" in front for whole names, "^" in
	// front for all but those. Empty stands for all but loopback, docker* and virbr*, which
	// have to be named, ib* first.
	Interfaces string `toml:"interfaces"`
	// This host's interfaces, or RDMA devices, in the order of the cluster's rails: the
	// first names of all hosts are on one network, the second ones on another, and so on.
	// Empty stands for the order that docs/network.md says. What is not among them is used
	// only where there is no other way.
	Rails []string `toml:"rails,omitempty"`
	// One address of this host that relays listen at, instead of those of the interfaces.
	Address string `toml:"address"`
	// Which addresses are used: auto (both, IPv4 first), ipv4 or ipv6.
	Family string `toml:"family"`
	// The TCP ports that relays listen on, first to last; each relay takes one. All hosts
	// of a cluster need the same: relays connect to no others.
	Ports string `toml:"ports"`
	// How many TCP connections carry the data from one relay to another, 1 to 64, beside
	// one for control. All clients of the two share them.
	Streams int `toml:"streams"`
	// Absolute path of this host's certificate in PEM, with those between it and the
	// authority: the first connection of two relays is TLS 1.3 then, and all hosts of the
	// cluster need one. Streams of data are not encrypted.
	TLSCertificate string `toml:"tls_certificate"`
	// Absolute path of its key, which only root may read.
	TLSKey string `toml:"tls_key"`
	// Absolute path of the certificates of the authority that all hosts' are of, and
	// nobody else's.
	TLSAuthority string `toml:"tls_authority"`
}

// Verbs is RDMA to other hosts: verbs.tc is for relays what NCCL_IB_TC is for NCCL, and so
// on.
type Verbs struct {
	// The traffic class of packets, 0 to 255: on RoCE its upper six bits are the DSCP,
	// by which switches know what must not be dropped. NCCL_IB_TC.
	TC int `toml:"tc"`
	// The service level, 0 to 15; on RoCE without DSCP the priority. NCCL_IB_SL.
	SL int `toml:"sl"`
	// Which of a port's partition keys, an index. NCCL_IB_PKEY.
	PKey int `toml:"pkey"`
	// The most bytes of a packet: 256, 512, 1024, 2048 or 4096; 0 for what both ports
	// have.
	MTU int `toml:"mtu"`
	// How long a packet waits for its acknowledgement, 1 to 31: 4.096 µs times 2 to the
	// power of it, 67 ms for 14. NCCL_IB_TIMEOUT.
	Timeout int `toml:"timeout"`
	// How often a packet is sent again before the connection has failed, 0 to 7.
	// NCCL_IB_RETRY_CNT.
	RetryCount int `toml:"retry_cnt"`
	// Which of a port's addresses, an index into its table of GIDs; -1 for the one of
	// RoCE version 2 with an IPv4 address, or else IPv6. NCCL_IB_GID_INDEX.
	GIDIndex int `toml:"gid_index"`
	// How many queue pairs two NICs have between each two relays, 1 to 8; the data is
	// spread over them. More than one helps where switches hash connections to paths.
	// NCCL_IB_QPS_PER_CONNECTION.
	QueuePairs int `toml:"qps_per_connection"`
}

// Launch is what a relay is told of it.
func (v Verbs) Launch() *launch.Verbs {
	return &launch.Verbs{
		TrafficClass: v.TC, ServiceLevel: v.SL, PKey: v.PKey, MTU: v.MTU,
		Timeout: v.Timeout, Retries: v.RetryCount, GIDIndex: v.GIDIndex, QueuePairs: v.QueuePairs,
	}
}

func (v Verbs) check() error {
	for _, n := range []struct {
		key                string
		value, least, most int
	}{
		{"tc", v.TC, 0, 255}, {"sl", v.SL, 0, 15}, {"pkey", v.PKey, 0, 65535}, {"timeout", v.Timeout, 1, 31},
		{"retry_cnt", v.RetryCount, 0, 7}, {"gid_index", v.GIDIndex, -1, 255}, {"qps_per_connection", v.QueuePairs, 1, launch.MaxQueuePairs},
	} {
		if n.value < n.least || n.value > n.most {
			return fmt.Errorf("verbs.%s is %d; %d to %d are possible", n.key, n.value, n.least, n.most)
		}
	}
	if !slices.Contains([]int{0, 256, 512, 1024, 2048, 4096}, v.MTU) {
		return fmt.Errorf("verbs.mtu is %d; 0, 256, 512, 1024, 2048 and 4096 are possible", v.MTU)
	}
	return nil
}

// maxRails is how many a relay tells others of.
const maxRails = 16

// Whether relays listen for those of other hosts.
const (
	ListenAuto = "auto" // where there is a cluster key
	ListenOff  = "off"
)

// check is about one's own keys; what they name need not be there.
// mostAnnotation bounds the name of an annotation, bytes; Kubernetes has 317.
const mostAnnotation = 317

func (n Network) check() error {
	for _, file := range []struct{ key, path string }{
		{"key", n.Key}, {"tls_certificate", n.TLSCertificate}, {"tls_key", n.TLSKey}, {"tls_authority", n.TLSAuthority},
	} {
		if file.path != "" && !filepath.IsAbs(file.path) {
			return fmt.Errorf("network.%s is %q; an absolute path is needed, because the hook runs in many directories", file.key, file.path)
		}
	}
	if given := [3]bool{n.TLSCertificate != "", n.TLSKey != "", n.TLSAuthority != ""}; given != [3]bool{} && given != [3]bool{true, true, true} {
		return errors.New("of network.tls_certificate, network.tls_key and network.tls_authority all are needed, or none")
	}
	if len(n.TenantAnnotation) > mostAnnotation || strings.ContainsFunc(n.TenantAnnotation, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return fmt.Errorf("network.tenant_annotation is %.60q; the name of an annotation of config.json, up to %d printable characters without blanks, is possible", n.TenantAnnotation, mostAnnotation)
	}
	if _, err := address.ParseInterfaces(n.Interfaces); err != nil {
		return fmt.Errorf("network.interfaces: %w", err)
	}
	if len(n.Rails) > maxRails {
		return fmt.Errorf("network.rails has %d names; up to %d are possible", len(n.Rails), maxRails)
	}
	for i, name := range n.Rails {
		if name == "" || len(name) > 63 || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' || r == '/' }) || slices.Contains(n.Rails[:i], name) {
			return fmt.Errorf("network.rails: %q is no interface's name or RDMA device's, or is there before", name)
		}
	}
	if _, err := address.ParsePorts(n.Ports); err != nil {
		return fmt.Errorf("network.ports: %w", err)
	}
	if n.Streams < 1 || n.Streams > launch.MaxNetworkStreams {
		return fmt.Errorf("network.streams is %d; 1 to %d are possible", n.Streams, launch.MaxNetworkStreams)
	}
	if n.Address == "" {
		return nil
	}
	at, err := netip.ParseAddr(n.Address)
	if err != nil || !address.Usable(at) || at.Is4In6() {
		return fmt.Errorf(`network.address is %q; an address of this host such as "10.1.0.7" or "fe80::7%%eth0" is possible, because other hosts are told it`, n.Address)
	}
	if at.Is4() && n.Family == string(address.FamilyIPv6) || at.Is6() && n.Family == string(address.FamilyIPv4) {
		return fmt.Errorf("network.address is %s, and network.family is %q", n.Address, n.Family)
	}
	return nil
}

// Who starts relays.
const (
	LauncherAuto    = "auto"    // systemd where it offers that, else the hook
	LauncherSystemd = "systemd" // a service of systemd's, or the container does not start
	LauncherFork    = "fork"    // the hook
)

// Who shares a host.
const (
	TenancySingle = "single" // one tenant: containers may get server GPUs and NICs
	TenancyMulti  = "multi"  // several: only `lane=` is offered
)

// Default is the configuration of a host without config.toml.
func Default() Config {
	return Config{
		Hook: Hook{OnFailure: OnFailureFail},
		Relay: Relay{
			Launcher: LauncherAuto, Route: launch.RouteAuto, Transport: launch.TransportAuto, Scope: launch.ScopeAuto, Slots: 8, SlotSize: 32 << 20,
			// Between the uids of systemd's containers and those of its foreign images;
			// https://systemd.io/UIDS-GIDS has nobody there.
			Sandbox: SandboxAuto, UIDs: "2130706432-2147352575",
			SelfTest: launch.SelfTestOnce, Calibration: CalibrationAuto,
			Reserve: launch.ReserveAttach, CUDAIPC: CUDAIPCNever, Events: EventsTimeline, Limits: defaultLimits(),
			Memory: 64 << 30, CPUs: 16, Tasks: 4096,
		},
		GDR:     topo.GDRPolicy{MaxPath: topo.PXB},
		CDI:     CDI{Tenancy: TenancySingle},
		Log:     Log{Format: LogText},
		Plan:    Plan{Near: "auto"},
		Staging: Staging{Bounce: BounceAllow, BounceLimit: 1 << 30},
		// Below the ports that Linux gives out by itself (net.ipv4.ip_local_port_range).
		Network: Network{Listen: ListenAuto, Family: string(address.FamilyAuto), Ports: "20000-20999", Streams: 4},
		Verbs:   Verbs{Timeout: launch.DefaultVerbs.Timeout, RetryCount: launch.DefaultVerbs.Retries, GIDIndex: launch.DefaultVerbs.GIDIndex, QueuePairs: launch.DefaultVerbs.QueuePairs},
	}
}

func defaultLimits() Limits {
	d := launch.DefaultLimits
	return Limits{
		Clients: d.Clients, Memories: d.Memories, Connections: d.Connections, Descriptors: d.Descriptors,
		HostMemory: Size(d.HostMemory), ClientHostMemory: Size(d.ClientHostMemory),
		Staging: Size(d.Staging), ClientStaging: Size(d.ClientStaging),
	}
}

// Planning is what topo.MakePlan is to know.
func (c Config) Planning() topo.PlanConfig {
	p := topo.PlanConfig{
		Near: c.Plan.Near, GDR: c.GDR, Software: c.Plan.Software, VirtualFunctions: c.Plan.VirtualFunctions, Lanes: c.Plan.Lanes, Exclude: c.Plan.Exclude, Rails: c.Plan.Rails, Groups: c.Groups,
		Staging: topo.StagingConfig{
			Slots: c.Relay.Slots, SlotBytes: uint64(c.Relay.SlotSize), Limit: (*uint64)(c.Staging.Limit), GPUs: map[string]uint64{},
		},
	}
	for gpu, limit := range c.Staging.GPUs {
		p.Staging.GPUs[gpu] = uint64(limit)
	}
	return p
}

// Load reads a configuration file. Keys that it does not state keep their
// defaults, and so do all where there is no file.
func Load(path string) (Config, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Default(), nil
	}
	if err != nil {
		return Config{}, fmt.Errorf("reading the configuration: %w", err)
	}
	return Parse(path, text)
}

// Parse reads the text of a configuration file, which errors call path.
func Parse(path string, text []byte) (Config, error) {
	c := Default()
	found, err := toml.Decode(string(text), &c)
	if err != nil {
		return Config{}, fmt.Errorf("configuration %s: %w", path, err)
	}
	if unknown := found.Undecoded(); len(unknown) > 0 {
		return Config{}, fmt.Errorf("configuration %s: %s", path, unknownKey(unknown[0].String()))
	}
	if err := c.check(); err != nil {
		return Config{}, fmt.Errorf("configuration %s: %w", path, err)
	}
	return c, nil
}

// UIDRange is what UIDs says.
func (r Relay) UIDRange() (first, last int, err error) {
	from, to, ok := strings.Cut(r.UIDs, "-")
	first, errFirst := strconv.Atoi(from)
	last, errLast := strconv.Atoi(to)
	// 2^32-1 is nobody, as a 32-bit number.
	if !ok || errFirst != nil || errLast != nil || first < 1 || last <= first || last >= 1<<32-1 {
		return 0, 0, fmt.Errorf(`relay.uids is %q; "FIRST-LAST" is possible, two numbers from 1 to 4294967294`, r.UIDs)
	}
	return first, last, nil
}

func (c Config) check() error {
	r := c.Relay
	if r.Binary != "" && !filepath.IsAbs(r.Binary) {
		return fmt.Errorf("relay.binary is %q; an absolute path is needed, because the hook runs in many directories", r.Binary)
	}
	for _, choice := range []struct {
		key, value string
		known      []string
	}{
		{"hook.on_failure", c.Hook.OnFailure, []string{OnFailureFail, OnFailureWarn}},
		{"relay.launcher", r.Launcher, []string{LauncherAuto, LauncherSystemd, LauncherFork}},
		{"relay.route", r.Route, []string{launch.RouteAuto, launch.RouteStaged, launch.RouteDirect}},
		{"relay.reserve", r.Reserve, []string{launch.ReserveAttach, launch.ReserveStart}},
		{"relay.scope", r.Scope, []string{launch.ScopeAuto, launch.ScopeCluster, launch.ScopeHost}},
		{"relay.self_test", r.SelfTest, []string{launch.SelfTestOnce, launch.SelfTestRequired, launch.SelfTestOff}},
		{"relay.calibration", r.Calibration, []string{CalibrationAuto, CalibrationOff}},
		{"relay.cuda_ipc", r.CUDAIPC, []string{CUDAIPCAllow, CUDAIPCNever}},
		{"relay.events", r.Events, []string{EventsTimeline, EventsIPC}},
		{"relay.transport", r.Transport, []string{launch.TransportAuto, launch.TransportLoop, launch.TransportLocal, launch.TransportTCP, launch.TransportVerbs}},
		{"relay.sandbox", r.Sandbox, []string{SandboxAuto, SandboxOff}},
		{"staging.bounce", c.Staging.Bounce, []string{BounceAllow, BounceNever}},
		{"cdi.tenancy", c.CDI.Tenancy, []string{TenancySingle, TenancyMulti}},
		{"network.listen", c.Network.Listen, []string{ListenAuto, ListenOff}},
		{"log.format", c.Log.Format, []string{LogText, LogJSON}},
		{"network.family", c.Network.Family, []string{string(address.FamilyAuto), string(address.FamilyIPv4), string(address.FamilyIPv6)}},
	} {
		if !slices.Contains(choice.known, choice.value) {
			return fmt.Errorf("%s is %q; %s are possible", choice.key, choice.value, strings.Join(choice.known, ", "))
		}
	}
	if err := c.Network.check(); err != nil {
		return err
	}
	if err := c.Verbs.check(); err != nil {
		return err
	}
	if r.CUDAIPC == CUDAIPCAllow && c.CDI.Tenancy == TenancyMulti {
		return errors.New(`relay.cuda_ipc is "allow" and cdi.tenancy is "multi": a tenant could guess the IPC handle of another's memory`)
	}
	if r.Events == EventsIPC && c.CDI.Tenancy == TenancyMulti {
		return errors.New(`relay.events is "ipc" and cdi.tenancy is "multi": a tenant could guess the IPC handle of another's event`)
	}
	if r.Slots < 1 || r.Slots > 1024 {
		return fmt.Errorf("relay.slots is %d; 1 to 1024 are possible", r.Slots)
	}
	if r.SlotSize < 64<<10 || r.SlotSize > 1<<30 || r.SlotSize%(64<<10) != 0 {
		return fmt.Errorf("relay.slot_size is %s; a multiple of 64 KiB up to 1 GiB is possible", r.SlotSize)
	}
	if r.Chunk > 1<<30 || r.Chunk%(64<<10) != 0 {
		return fmt.Errorf("relay.chunk is %s; a multiple of 64 KiB up to 1 GiB is possible, or 0", r.Chunk)
	}
	if r.Depth < 0 || r.Depth > launch.MaxDepth || r.Streams < 0 || r.Streams > launch.MaxStreams {
		return fmt.Errorf("relay.depth is %d and relay.streams is %d; up to %d and %d are possible, or 0", r.Depth, r.Streams, launch.MaxDepth, launch.MaxStreams)
	}
	for _, limit := range []struct {
		key   string
		value int
	}{
		{"clients", r.Limits.Clients}, {"memories", r.Limits.Memories}, {"connections", r.Limits.Connections}, {"descriptors", r.Limits.Descriptors},
	} {
		if limit.value < 1 || limit.value > 1<<20 {
			return fmt.Errorf("relay.limits.%s is %d; 1 to 1048576 are possible", limit.key, limit.value)
		}
	}
	// A key that means none would mean the default to a relay.
	for _, size := range []struct {
		key   string
		value Size
	}{
		{"staging.bounce_limit", c.Staging.BounceLimit}, {"relay.limits.host_memory", r.Limits.HostMemory},
		{"relay.limits.client_host_memory", r.Limits.ClientHostMemory},
		{"relay.limits.staging", r.Limits.Staging}, {"relay.limits.client_staging", r.Limits.ClientStaging},
	} {
		if size.value < 1<<20 || size.value > 1<<50 {
			return fmt.Errorf("%s is %s; 1 MiB to 1 PiB are possible", size.key, size.value)
		}
	}
	if limit := c.Staging.HostLimit; limit != nil && *limit > 1<<50 {
		return fmt.Errorf("staging.host_limit is %s; up to 1 PiB are possible", *limit)
	}
	if p := c.Runtime.Path; p != "" && !filepath.IsAbs(p) {
		return fmt.Errorf("runtime.path is %q; an absolute path is needed, because engines run peerlane-runtime in many directories", p)
	}
	for _, pattern := range c.Runtime.Devices {
		if err := checkPattern(pattern); err != nil {
			return fmt.Errorf("runtime.devices has %q: %w", pattern, err)
		}
	}
	if _, _, err := r.UIDRange(); err != nil {
		return err
	}
	for _, path := range slices.Concat(r.SandboxRead, r.SandboxWrite) {
		if !filepath.IsAbs(path) || filepath.Clean(path) == "/" {
			return fmt.Errorf("relay.sandbox_read or relay.sandbox_write has %q; absolute paths other than / are possible", path)
		}
	}
	if r.Memory < 256<<20 {
		return fmt.Errorf("relay.memory is %s; 256 MiB is the least that a relay works with", r.Memory)
	}
	if r.CPUs < 1 || r.CPUs > 4096 {
		return fmt.Errorf("relay.cpus is %d; 1 to 4096 are possible", r.CPUs)
	}
	if r.Tasks < 128 || r.Tasks > 1<<20 {
		return fmt.Errorf("relay.tasks is %d; 128 to 1048576 are possible", r.Tasks)
	}
	for _, e := range r.Environment {
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" || strings.ContainsRune(e, 0) {
			return fmt.Errorf(`relay.environment has %q; "NAME=value" is possible`, e)
		}
	}
	return nil
}
