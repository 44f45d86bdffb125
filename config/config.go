// Package config reads the administrator's configuration, config.toml.
//
// Every key is optional; a missing file is the default configuration. An unknown key is an error,
// so that a misspelt key is not ignored silently.
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

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// Config is the content of the file. The comments of the fields are the text of
// docs/configuration.md.
type Config struct {
	Hook    Hook              `toml:"hook"`
	Relay   Relay             `toml:"relay"`
	GDR     planner.GDRPolicy `toml:"gdr"`
	Plan    Plan              `toml:"plan"`
	Staging Staging           `toml:"staging"`
	// GPUs that containers request together, by index, UUID or PCI address: `half0 = ["0", "1",
	// "2", "3"]` makes the device `peerlane.dev/gpu=half0`, and `peerlane.dev/lane=half0`.
	Groups  map[string][]string `toml:"groups,omitempty"`
	CDI     CDI                 `toml:"cdi"`
	Runtime Runtime             `toml:"runtime"`
	Network Network             `toml:"network"`
	Log     Log                 `toml:"log"`
	Verbs   Verbs               `toml:"verbs"`
	// The metrics of `peerlane exporter`.
	Exporter Exporter `toml:"exporter"`
}

// Exporter configures `peerlane exporter`.
type Exporter struct {
	// Let `peerlane exporter` serve metrics with cdi.tenancy = multi. Every user of the
	// host can read them on loopback, without container ids.
	MultiTenancy bool `toml:"multi_tenancy"`
}

// Log configures the log.
type Log struct {
	// Form of log lines of hook, supervisor and relay: text (words and name=value) or json
	// (one object), for containers that start later. Lines carry the generation. Errors to
	// the runtime stay text; `peerlane` has --log-format.
	Format string `toml:"format"`
}

// Values of Log.Format.
const (
	LogText = "text"
	LogJSON = "json"
)

// LogFormatter returns the formatter for a log.format; empty means LogText.
func LogFormatter(form string) logrus.Formatter {
	if form == LogJSON {
		return &logrus.JSONFormatter{}
	}
	return &logrus.TextFormatter{DisableColors: true, FullTimestamp: true}
}

// SetLogFormat sets the formatter of this process's log.
func SetLogFormat(form string) { logrus.SetFormatter(LogFormatter(form)) }

// Hook configures the steps before the start of a container.
type Hook struct {
	// The action if a container's relay does not start: fail refuses the start of the container; warn
	// starts the container without the lane, logs the reason on the host, and gives clients the
	// command that shows the reason. With an unreadable configuration, or gpu= devices that would hide a
	// GPU, the start always fails.
	OnFailure string `toml:"on_failure"`
	// Give lanes to containers with the annotation peerlane.dev/lanes, for engines with a directory
	// of hooks. An image can set annotations, too.
	Annotations bool `toml:"annotations"`
}

// Values of Hook.OnFailure.
const (
	OnFailureFail = "fail" // the container does not start
	OnFailureWarn = "warn" // the container starts without a lane
)

// Plan configures the plan of lanes.
type Plan struct {
	// Use of the network by GPUs near a NIC: auto also uses NICs near other GPUs, staged,
	// and the CPU's memory, if the estimate says that the slowest GPU gains; direct uses
	// near NICs only.
	Near string `toml:"near"`
	// Also use software RDMA (rxe, siw), which cannot reach GPU memory: for tests.
	Software bool `toml:"software"`
	// Also use virtual functions and subfunctions of NICs that lanes can use themselves.
	// Without the key plans use a virtual function only if its physical function is unusable, because
	// other tenants may have the others.
	VirtualFunctions bool `toml:"virtual_functions"`
	// The rail of single NICs, by name, so that all hosts of a cluster use the same numbers: `mlx5_0 = 0`. A NIC
	// without a key has its position among the host's NICs.
	Rails map[string]int `toml:"rails,omitempty"`
	// A lane in place of the planned lane.
	Lanes   []planner.Assignment `toml:"lane,omitempty"`
	Exclude planner.Exclude      `toml:"exclude"`
}

// Staging limits the memory of server GPUs that relays use.
type Staging struct {
	// Maximum memory of a server GPU for all relays of this host; by default a quarter of
	// the GPU's memory; with 0 relays do not use the GPU. If the limit is too small for a lane's
	// slots, the GPU does not serve the lane (`peerlane plan` shows the sums). When the limit is
	// reached, a further relay uses smaller slots or another GPU, or the error of its clients has
	// the containers that use the memory. A change has effect on new allocations.
	Limit *Size `toml:"limit,omitempty"`
	// The same for single GPUs, by index, UUID or PCI address: `"3" = "1GiB"`.
	GPUs map[string]Size `toml:"gpus,omitempty"`
	// The action if no server GPU has room: allow stages in host memory, many times slower,
	// with a warning in log and `peerlane relay inspect`; never refuses clients.
	Bounce string `toml:"bounce"`
	// Maximum host memory that a relay stages in, at most a quarter of relay.memory. If less
	// is free, a lane has smaller slots.
	BounceLimit Size `toml:"bounce_limit"`
	// Maximum host memory that all relays of this host allocate for containers, as slots
	// and clients' memory; by default a quarter of the host's. At the limit a further relay refuses
	// clients with an error that names this key. A quarter of the container's memory limit also limits a
	// relay.
	HostLimit *Size `toml:"host_limit,omitempty"`
}

// Values of Staging.Bounce.
const (
	BounceAllow = "allow" // stage in host memory
	BounceNever = "never" // refuse clients
)

// Bounce returns launch.Config.Bounce in bytes.
func (c Config) Bounce() uint64 {
	if c.Staging.Bounce == BounceNever {
		return 0
	}
	return uint64(min(c.Staging.BounceLimit, c.Relay.Memory/4))
}

// Relay configures relays and their start.
type Relay struct {
	// Absolute path of peerlane-relay; empty means the program beside peerlane-hook.
	Binary string `toml:"binary"`
	// The starter of relays: systemd (peerlane-relay@.service) or fork (the hook). auto is
	// systemd if systemd is process 1 and peerlane-relay.socket answers, else the hook.
	Launcher string `toml:"launcher"`
	// The route between two containers of this host: auto, staged or direct.
	Route string `toml:"route"`
	// The transport of messages: local within this host on route direct; tcp and verbs (RDMA)
	// between hosts and within this one; auto uses local on route direct, else verbs, or tcp
	// for a lane without a capable NIC.
	Transport string `toml:"transport"`
	// The peers of containers: host (this one), cluster (any), or auto (host without a
	// cluster key). With cluster the relay tells NCCL rate and guid of the lane's NIC,
	// which NCCL divides among the lanes of the NIC; with host the relay
	// tells the rate of the GPU's links, and a separate guid for every lane.
	Scope string `toml:"scope"`
	// Staging slots of a lane in each direction, striped over its server GPUs.
	Slots int `toml:"slots"`
	// The size of a slot: a multiple of 64KiB up to 1GiB.
	SlotSize Size `toml:"slot_size"`
	// The time at which a relay allocates staging: attach (a client first needs it) or
	// start (the container starts, before a job fills the server GPUs). With start a
	// container has a CUDA context of some 265 MiB on the container's GPU, even if no
	// client uses the lane.
	Reserve string `toml:"reserve"`
	// The test of a pair of GPUs before a lane stages on it: once tests after a boot or
	// driver change, while the first container starts, in about a second per pair; lanes use an
	// untested pair, and do not use a pair that fails or is slower than host memory. required
	// uses tested pairs only. off tests no pair, and no GPU with a NIC. See docs/relay.md.
	SelfTest string `toml:"self_test"`
	// The source of piece size, pieces in flight and streams: auto, the calibration in the pair's
	// self-test, within the memory of slots and slot_size; off, the values of slots and slot_size,
	// and one stream.
	Calibration string `toml:"calibration"`
	// Size of a piece of a message, a multiple of 64KiB; 0 for the result of the calibration.
	Chunk Size `toml:"chunk"`
	// Number of pieces in flight; 0 for the result of the calibration.
	Depth int `toml:"depth"`
	// Number of CUDA streams per direction; 0 for the result of the calibration.
	Streams int `toml:"streams"`
	// Use of memory of cudaMalloc by its IPC handle: allow or never. The handle is no secret: a
	// process that guesses the handle of another container can access the memory, and a client that
	// frees the memory can make its relay fail. Not with cdi.tenancy = "multi". Memory of
	// cuMemCreate does not need this key.
	CUDAIPC string `toml:"cuda_ipc"`
	// Objects that operations can wait for: timeline only timelines; ipc also events of CUDA's IPC
	// (cudaIpcGetEventHandle). Events need containers that share the host's IPC namespace (`--ipc
	// host`) as root, and relays with sandbox = "off". Not with cdi.tenancy = "multi".
	Events string `toml:"events"`
	// Additions to a relay's environment, as `"NAME=value"`; the only other variable is PATH.
	Environment []string `toml:"environment"`
	// The sandbox of relays: auto uses every protection that the host supports: a uid, no
	// capabilities, a root with its devices and libraries, Landlock, a filter of system calls,
	// limits (`peerlane relay inspect` shows the sandbox). off disables the sandbox, to test whether it causes
	// a fault.
	Sandbox string `toml:"sandbox"`
	// Uids of relays, first to last, and gids of the same numbers, reserved for relays.
	// The first is the group of all relays; every relay gets another number.
	UIDs string `toml:"uids"`
	// Files and directories that relays may also read in their sandbox, for example libraries of a
	// driver. relay.environment's PEERLANE_CUDA_LIBRARY and LD_LIBRARY_PATH are added.
	SandboxRead []string `toml:"sandbox_read,omitempty"`
	// Files and directories that relays may also write, such as traces, or a driver's files in
	// /dev/shm.
	SandboxWrite []string `toml:"sandbox_write,omitempty"`
	// Maximum host memory of a relay with its supervisor, including memory of simulated GPUs; the
	// kernel ends a relay above the limit.
	Memory Size `toml:"memory"`
	// Maximum number of processors that a relay may use.
	CPUs int `toml:"cpus"`
	// Maximum number of threads of a relay.
	Tasks int `toml:"tasks"`
	// The resources of a relay that the clients of a container may use.
	Limits Limits `toml:"limits"`
}

// Values of Relay.Calibration.
const (
	CalibrationAuto = "auto" // the self-test of the pair
	CalibrationOff  = "off"  // slots and slot_size
)

// Values of Relay.CUDAIPC.
const (
	CUDAIPCAllow = "allow"
	CUDAIPCNever = "never"
)

// Values of Relay.Events.
const (
	EventsTimeline = "timeline"
	EventsIPC      = "ipc" // also events of CUDA's IPC
)

// Limits limits the resources of a relay that all clients of one container use together, so that
// no client can make the relay grow without limit.
type Limits struct {
	// Maximum number of sessions: a process has one, with NCCL one for each 8 communicators. A
	// session has two rings in shared memory, 180 KiB together.
	Clients int `toml:"clients"`
	// Maximum number of exported memories.
	Memories int `toml:"memories"`
	// Maximum number of open connections, sending and receiving.
	Connections int `toml:"connections"`
	// Maximum number of open files of the relay for clients: six per process, one per event, one
	// per allocation of a memory, two per host memory, up to three per connection, and one per
	// mapped allocation of another container. If ulimit -n is lower, it applies.
	Descriptors int `toml:"descriptors"`
	// Maximum host memory that the relay allocates for clients, and separately maximum host memory of other
	// containers that it writes to; at most half of relay.memory.
	HostMemory Size `toml:"host_memory"`
	// The maximum share of a single process in host_memory.
	ClientHostMemory Size `toml:"client_host_memory"`
	// Server GPU memory for clients that copy themselves, in containers with `gpu=`,
	// besides the slots and within staging.limit.
	Staging Size `toml:"staging"`
	// The maximum share of a single process in staging.
	ClientStaging Size `toml:"client_staging"`
}

// Launch returns the limits in the form of the relay's configuration.
func (r Relay) Launch() launch.Limits {
	l := r.Limits
	return launch.Limits{
		Clients: l.Clients, Memories: l.Memories, Connections: l.Connections, Descriptors: l.Descriptors,
		HostMemory: uint64(min(l.HostMemory, r.Memory/2)), ClientHostMemory: uint64(min(l.ClientHostMemory, r.Memory/2)),
		Staging: uint64(l.Staging), ClientStaging: uint64(l.ClientStaging),
	}
}

// Values of Relay.Sandbox.
const (
	SandboxAuto = "auto" // every protection that the host supports
	SandboxOff  = "off"  // no protection
)

// CDI configures the devices that `cdi generate` offers to container engines.
type CDI struct {
	// The tenants of this host: with single, containers may get server GPUs and NICs; with multi,
	// only `lane=` exists.
	Tenancy string `toml:"tenancy"`
	// Let `peerlane cdi refresh` load nvidia-peermem, or nv_peer_mem, on a host with RDMA
	// devices. DMA-BUF needs no module.
	LoadPeermem bool `toml:"load_peermem"`
}

// Runtime configures peerlane-runtime, for engines without CDI.
type Runtime struct {
	// Absolute path of the OCI runtime below peerlane-runtime; empty for the first of runc
	// and crun in /usr/local/sbin, /usr/local/bin, /usr/sbin, /usr/bin, /sbin and /bin.
	Path string `toml:"path"`
	// CDI devices that a container may request by PEERLANE_DEVICES or the annotation
	// peerlane.dev/devices, which an image can set: `"peerlane.dev/lane=*"`, with * for
	// any name. None by default.
	Devices []string `toml:"devices,omitempty"`
}

// Network configures how relays of different hosts reach and authenticate each other.
type Network struct {
	// Whether relays listen for relays of other hosts, and connect to other hosts: with auto if a
	// cluster key exists when their container starts, with off never.
	Listen string `toml:"listen"`
	// Absolute path of the cluster key, which only root may read; empty means
	// /etc/peerlane/cluster.key. `peerlane key` makes the key, and docs/network.md describes its
	// rotation.
	Key string `toml:"key"`
	// The name of an annotation of config.json whose value is the container's tenant, such as
	// "io.kubernetes.cri.sandbox-namespace"; empty for none. Relays get a key derived from the
	// cluster key and the tenant: relays of two tenants on two hosts refuse each
	// other, and a container without the annotation uses no network. All hosts of a
	// cluster need the same value. Images and users must not be able to set the annotation
	// (docs/security.md).
	TenantAnnotation string `toml:"tenant_annotation"`
	// Interfaces of relays in the syntax of NCCL_SOCKET_IFNAME: name prefixes with commas,
	// "=" in front for whole names, "^" in front for exclusion. Empty for all except
	// loopback, docker* and virbr*; ib* first.
	Interfaces string `toml:"interfaces"`
	// Interfaces or RDMA devices in the order of the cluster's rails: the first devices of all
	// hosts share a network, the second devices another, and so on. Empty for the order of
	// docs/network.md. Relays use other devices only if no device of the list works.
	Rails []string `toml:"rails,omitempty"`
	// An address of this host that relays listen at, instead of the addresses of the interfaces.
	Address string `toml:"address"`
	// The family of the addresses: auto (both, IPv4 first), ipv4 or ipv6.
	Family string `toml:"family"`
	// The TCP ports that relays listen on, first to last; a relay uses one port per rail. All hosts of a
	// cluster need the same range: relays connect to no other ports.
	Ports string `toml:"ports"`
	// The number of TCP connections for data from one relay to another, 1 to 64, in addition to a
	// connection for control. The clients of the two relays share the connections.
	Streams int `toml:"streams"`
	// Absolute path of this host's certificate chain in PEM: control connections use TLS
	// 1.3, and all hosts need a certificate. Data is not encrypted.
	TLSCertificate string `toml:"tls_certificate"`
	// Absolute path of the private key of the certificate, which only root may read.
	TLSKey string `toml:"tls_key"`
	// Absolute path of the certificates of the authority that signs the certificates of all
	// hosts, and of no other hosts.
	TLSAuthority string `toml:"tls_authority"`
}

// Verbs configures RDMA to other hosts: verbs.tc corresponds to NCCL_IB_TC of NCCL, and so on.
type Verbs struct {
	// The traffic class of packets, 0 to 255: on RoCE its upper six bits are the DSCP, by which
	// switches recognise lossless traffic. NCCL_IB_TC.
	TC int `toml:"tc"`
	// The service level, 0 to 15; on RoCE without DSCP the priority. NCCL_IB_SL.
	SL int `toml:"sl"`
	// The index into a port's table of partition keys. NCCL_IB_PKEY.
	PKey int `toml:"pkey"`
	// The maximum size of a packet, in bytes: 256, 512, 1024, 2048 or 4096; 0 means the smaller MTU
	// of the two ports.
	MTU int `toml:"mtu"`
	// The time that a packet waits for its acknowledgement, 1 to 31: 4.096 µs times 2 to the
	// power of the value, 4.3 s for 20. NCCL_IB_TIMEOUT.
	Timeout int `toml:"timeout"`
	// The number of retransmissions of a packet before the connection fails, 0 to 7.
	// NCCL_IB_RETRY_CNT.
	RetryCount int `toml:"retry_cnt"`
	// The address of a port, as an index into the port's table of GIDs; -1 means the GID of RoCE
	// version 2 with an IPv4 address, or else IPv6. NCCL_IB_GID_INDEX.
	GIDIndex int `toml:"gid_index"`
	// Queue pairs of two NICs for each two relays, 1 to 8; the smaller number of two hosts
	// counts. 0 means 4 on RoCE, where switches hash them to paths, else 1.
	// NCCL_IB_QPS_PER_CONNECTION.
	QueuePairs int `toml:"qps_per_connection"`
	// Seconds for relays to replace failed queue pairs, 1 to 3600.
	ReconnectLimit int `toml:"reconnect_limit"`
	// Whether the fabric routes adaptively: auto (InfiniBand), on or off.
	// NCCL_IB_ADAPTIVE_ROUTING.
	AdaptiveRouting string `toml:"adaptive_routing"`
	// With adaptive routing the immediate of a longer write, in bytes, is a second write.
	// NCCL_IB_AR_THRESHOLD.
	ARThreshold int `toml:"ar_threshold"`
	// PCIe relaxed ordering of NICs' writes. NCCL_IB_PCI_RELAXED_ORDERING.
	RelaxedOrdering bool `toml:"relaxed_ordering"`
	// Slots on GPUs by a NIC's Data Direct function, if it has one. NCCL_IB_DATA_DIRECT.
	DataDirect bool `toml:"data_direct"`
}

// Launch returns the settings in the form of the relay's configuration.
func (v Verbs) Launch() *launch.Verbs {
	return &launch.Verbs{
		TrafficClass: v.TC, ServiceLevel: v.SL, PKey: v.PKey, MTU: v.MTU,
		Timeout: v.Timeout, Retries: v.RetryCount, GIDIndex: v.GIDIndex, QueuePairs: v.QueuePairs,
		ReconnectLimit: v.ReconnectLimit, AdaptiveRouting: v.AdaptiveRouting, ARThreshold: v.ARThreshold,
		RelaxedOrdering: v.RelaxedOrdering, DataDirect: v.DataDirect,
	}
}

func (v Verbs) check() error {
	for _, n := range []struct {
		key             string
		value, min, max int
	}{
		{"tc", v.TC, 0, 255}, {"sl", v.SL, 0, 15}, {"pkey", v.PKey, 0, 65535}, {"timeout", v.Timeout, 1, 31},
		{"retry_cnt", v.RetryCount, 0, 7}, {"gid_index", v.GIDIndex, -1, 255},
		{"qps_per_connection", v.QueuePairs, 0, launch.MaxQueuePairs},
		{"reconnect_limit", v.ReconnectLimit, 1, 3600}, {"ar_threshold", v.ARThreshold, 0, 1 << 30},
	} {
		if n.value < n.min || n.value > n.max {
			return &KeyError{"verbs." + n.key, fmt.Errorf("verbs.%s is %d; must be %d to %d", n.key, n.value, n.min,
				n.max)}
		}
	}
	if !slices.Contains([]int{0, 256, 512, 1024, 2048, 4096}, v.MTU) {
		return &KeyError{"verbs.mtu", fmt.Errorf("verbs.mtu is %d; must be 0, 256, 512, 1024, 2048 or 4096", v.MTU)}
	}
	return nil
}

// maxRails is the number of rails that a relay reports to other relays.
const maxRails = 16

// Values of Network.Listen.
const (
	ListenAuto = "auto" // if a cluster key exists
	ListenOff  = "off"
)

// maxAnnotation is the maximum length of the name of an annotation in bytes; Kubernetes permits
// 317.
const maxAnnotation = 317

// check checks only the values: the named files may be missing.
func (n Network) check() error {
	for _, file := range []struct{ key, path string }{
		{"key", n.Key}, {"tls_certificate", n.TLSCertificate}, {"tls_key", n.TLSKey}, {"tls_authority", n.TLSAuthority},
	} {
		if file.path != "" && !filepath.IsAbs(file.path) {
			return &KeyError{"network." + file.key, fmt.Errorf("network.%s is %q; must be an absolute path, because the "+
				"hook runs in many directories", file.key, file.path)}
		}
	}
	if given := [3]bool{n.TLSCertificate != "", n.TLSKey != "", n.TLSAuthority != ""}; given != [3]bool{} &&
		given != [3]bool{true, true, true} {
		return &KeyError{"network.tls_certificate", errors.New("set all of network.tls_certificate, network.tls_key and " +
			"network.tls_authority, or none")}
	}
	if len(n.TenantAnnotation) > maxAnnotation || strings.ContainsFunc(n.TenantAnnotation,
		func(r rune) bool { return r <= ' ' || r > '~' }) {
		return &KeyError{"network.tenant_annotation", fmt.Errorf("network.tenant_annotation is %.60q; must be the name of "+
			"an annotation of config.json, up to %d printable characters without blanks", n.TenantAnnotation,
			maxAnnotation)}
	}
	if _, err := address.ParseInterfaces(n.Interfaces); err != nil {
		return &KeyError{"network.interfaces", fmt.Errorf("network.interfaces: %w", err)}
	}
	if _, err := address.ParsePorts(n.Ports); err != nil {
		return &KeyError{"network.ports", fmt.Errorf("network.ports: %w", err)}
	}
	if n.Streams < 1 || n.Streams > launch.MaxNetworkStreams {
		return &KeyError{"network.streams", fmt.Errorf("network.streams is %d; must be 1 to %d", n.Streams,
			launch.MaxNetworkStreams)}
	}
	if err := n.checkRails(); err != nil {
		return err
	}
	return n.checkAddress()
}

func (n Network) checkRails() error {
	if len(n.Rails) > maxRails {
		return &KeyError{"network.rails", fmt.Errorf("network.rails has %d names; must be at most %d", len(n.Rails),
			maxRails)}
	}
	for i, name := range n.Rails {
		if name == "" || len(name) > 63 || strings.ContainsFunc(name,
			func(r rune) bool { return r <= ' ' || r > '~' || r == '/' }) || slices.Contains(n.Rails[:i], name) {
			return &KeyError{"network.rails", fmt.Errorf("network.rails: %q is not the name of an interface or RDMA device, or "+
				"occurs twice", name)}
		}
	}
	return nil
}

func (n Network) checkAddress() error {
	if n.Address == "" {
		return nil
	}
	at, err := netip.ParseAddr(n.Address)
	if err != nil || !address.Usable(at) || at.Is4In6() {
		return &KeyError{"network.address", fmt.Errorf(`network.address is %q; must be an address of this host that other hosts can reach, such as "10.1.0.7" or "fe80::7%%eth0"`, n.Address)}
	}
	if at.Is4() && n.Family == string(address.FamilyIPv6) || at.Is6() && n.Family == string(address.FamilyIPv4) {
		return &KeyError{"network.address", fmt.Errorf("network.address is %s, and network.family is %q", n.Address,
			n.Family)}
	}
	return nil
}

// Values of Relay.Launcher.
const (
	LauncherAuto    = "auto"    // systemd if the host offers the launcher, and the hook otherwise
	LauncherSystemd = "systemd" // a systemd service; without one the container does not start
	LauncherFork    = "fork"    // the hook
)

// Values of CDI.Tenancy.
const (
	TenancySingle = "single" // a single tenant: containers may get server GPUs and NICs
	TenancyMulti  = "multi"  // several tenants: only `lane=` is offered
)

// Default is the configuration of a host without config.toml.
func Default() Config {
	return Config{
		Hook: Hook{OnFailure: OnFailureFail},
		Relay: Relay{
			Launcher: LauncherAuto, Route: launch.RouteAuto, Transport: launch.TransportAuto, Scope: launch.ScopeAuto, Slots: 8,
			SlotSize: 32 << 20,
			// The range is between the uids of systemd's containers and those of systemd's foreign
			// images; https://systemd.io/UIDS-GIDS assigns no uid in it.
			Sandbox: SandboxAuto, UIDs: "2130706432-2147352575",
			SelfTest: launch.SelfTestOnce, Calibration: CalibrationAuto,
			Reserve: launch.ReserveAttach, CUDAIPC: CUDAIPCNever, Events: EventsTimeline, Limits: defaultLimits(),
			Memory: 64 << 30, CPUs: 16, Tasks: 4096,
		},
		GDR:     planner.GDRPolicy{MaxPath: topo.PXB},
		CDI:     CDI{Tenancy: TenancySingle},
		Log:     Log{Format: LogText},
		Plan:    Plan{Near: "auto"},
		Staging: Staging{Bounce: BounceAllow, BounceLimit: 1 << 30},
		// The range is below the ports that Linux assigns by itself
		// (net.ipv4.ip_local_port_range).
		Network: Network{Listen: ListenAuto, Family: string(address.FamilyAuto), Ports: "20000-20999", Streams: 4},
		Verbs:   defaultVerbs(),
	}
}

func defaultVerbs() Verbs {
	d := launch.DefaultVerbs
	return Verbs{
		Timeout: d.Timeout, RetryCount: d.Retries, GIDIndex: d.GIDIndex, QueuePairs: d.QueuePairs,
		ReconnectLimit: d.ReconnectLimit, AdaptiveRouting: d.AdaptiveRouting, ARThreshold: d.ARThreshold,
		RelaxedOrdering: d.RelaxedOrdering, DataDirect: d.DataDirect,
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

// PlannerConfig returns the configuration of planner.Make.
func (c Config) PlannerConfig() planner.Config {
	p := planner.Config{
		Near: c.Plan.Near, GDR: c.GDR, Software: c.Plan.Software, VirtualFunctions: c.Plan.VirtualFunctions,
		Lanes: c.Plan.Lanes, Exclude: c.Plan.Exclude, Rails: c.Plan.Rails, Groups: c.Groups,
		Staging: planner.StagingConfig{
			Slots: c.Relay.Slots, SlotBytes: uint64(c.Relay.SlotSize), Limit: (*uint64)(c.Staging.Limit),
			GPUs: map[string]uint64{},
		},
	}
	for gpu, limit := range c.Staging.GPUs {
		p.Staging.GPUs[gpu] = uint64(limit)
	}
	return p
}

// Load reads a configuration file. A missing key or a missing file means the defaults.
func Load(path string) (Config, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Default(), nil
	}
	if err != nil {
		return Config{}, fmt.Errorf("read the configuration: %w", err)
	}
	return Parse(path, text)
}

// Parse parses the text of a configuration file. path is its name in errors.
func Parse(path string, text []byte) (Config, error) {
	c := Default()
	found, err := toml.Decode(string(text), &c)
	if err != nil {
		return Config{}, faulty(path, err)
	}
	if unknown := found.Undecoded(); len(unknown) > 0 {
		return Config{}, faulty(path, &KeyError{unknown[0].String(), errors.New(unknownKey(unknown[0].String()))})
	}
	if err := c.check(); err != nil {
		return Config{}, faulty(path, err)
	}
	return c, nil
}

// KeyError is the error of one key. The text of Cause names the key.
type KeyError struct {
	// Key is a name such as "relay.slots".
	Key   string
	Cause error
}

// Error returns the text of the cause.
func (e *KeyError) Error() string { return e.Cause.Error() }

// Unwrap returns the cause.
func (e *KeyError) Unwrap() error { return e.Cause }

// faulty returns the error of a configuration file.
func faulty(path string, cause error) error {
	return &fault.Error{Code: fault.Configuration, Operation: "read configuration", Object: path, Cause: cause}
}

// UIDRange returns the range of UIDs.
func (r Relay) UIDRange() (first, last int, err error) {
	from, to, ok := strings.Cut(r.UIDs, "-")
	first, errFirst := strconv.Atoi(from)
	last, errLast := strconv.Atoi(to)
	// As a 32-bit number, 2^32-1 means no user.
	if !ok || errFirst != nil || errLast != nil || first < 1 || last <= first || last >= 1<<32-1 {
		return 0, 0, &KeyError{"relay.uids", fmt.Errorf(`relay.uids is %q; must be "FIRST-LAST", two numbers from 1 to 4294967294`, r.UIDs)}
	}
	return first, last, nil
}

// check checks the values. The named files may be missing.
func (c Config) check() error {
	for _, check := range []func() error{
		c.checkChoices, c.Network.check, c.Verbs.check, c.checkTenancy, c.Relay.checkCopies, c.checkLimits, c.Runtime.check,
		c.Relay.checkProcess,
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

// removedTransport was the transport of emulated NICs, which software devices replaced.
const removedTransport = "loop"

// checkChoices checks the keys with a list of permitted values.
func (c Config) checkChoices() error {
	r := c.Relay
	if r.Transport == removedTransport {
		return &KeyError{"relay.transport", fmt.Errorf(`relay.transport is %q, which was removed with the emulated NIC; `+
			`must be "verbs" for RDMA by NICs, or "auto"`, r.Transport)}
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
		{"relay.transport", r.Transport, []string{launch.TransportAuto, launch.TransportLocal,
			launch.TransportTCP, launch.TransportVerbs}},
		{"relay.sandbox", r.Sandbox, []string{SandboxAuto, SandboxOff}},
		{"staging.bounce", c.Staging.Bounce, []string{BounceAllow, BounceNever}},
		{"cdi.tenancy", c.CDI.Tenancy, []string{TenancySingle, TenancyMulti}},
		{"network.listen", c.Network.Listen, []string{ListenAuto, ListenOff}},
		{"verbs.adaptive_routing", c.Verbs.AdaptiveRouting,
			[]string{launch.AdaptiveRoutingAuto, launch.AdaptiveRoutingOn, launch.AdaptiveRoutingOff}},
		{"log.format", c.Log.Format, []string{LogText, LogJSON}},
		{"network.family", c.Network.Family, []string{string(address.FamilyAuto), string(address.FamilyIPv4),
			string(address.FamilyIPv6)}},
	} {
		if !slices.Contains(choice.known, choice.value) {
			return &KeyError{choice.key, fmt.Errorf("%s is %q; must be one of %s", choice.key, choice.value,
				strings.Join(choice.known, ", "))}
		}
	}
	return nil
}

// checkTenancy refuses keys that several tenants on a host exclude.
func (c Config) checkTenancy() error {
	r := c.Relay
	if r.CUDAIPC == CUDAIPCAllow && c.CDI.Tenancy == TenancyMulti {
		return &KeyError{"relay.cuda_ipc", errors.New(`relay.cuda_ipc is "allow" and cdi.tenancy is "multi": a tenant could guess the IPC handle of another's memory`)}
	}
	if r.Events == EventsIPC && c.CDI.Tenancy == TenancyMulti {
		return &KeyError{"relay.events", errors.New(`relay.events is "ipc" and cdi.tenancy is "multi": a tenant could guess the IPC handle of another's event`)}
	}
	return nil
}

// checkCopies checks the slots, chunks and streams of a relay.
func (r Relay) checkCopies() error {
	if r.Slots < 1 || r.Slots > 1024 {
		return &KeyError{"relay.slots", fmt.Errorf("relay.slots is %d; must be 1 to 1024", r.Slots)}
	}
	if r.SlotSize < 64<<10 || r.SlotSize > 1<<30 || r.SlotSize%(64<<10) != 0 {
		return &KeyError{"relay.slot_size", fmt.Errorf("relay.slot_size is %s; must be a multiple of 64 KiB up to 1 GiB",
			r.SlotSize)}
	}
	if r.Chunk > 1<<30 || r.Chunk%(64<<10) != 0 {
		return &KeyError{"relay.chunk", fmt.Errorf("relay.chunk is %s; must be 0 or a multiple of 64 KiB up to 1 GiB",
			r.Chunk)}
	}
	for _, n := range []struct {
		key        string
		value, max int
	}{{"relay.depth", r.Depth, launch.MaxDepth}, {"relay.streams", r.Streams, launch.MaxStreams}} {
		if n.value < 0 || n.value > n.max {
			return &KeyError{n.key, fmt.Errorf("%s is %d; must be 0 to %d", n.key, n.value, n.max)}
		}
	}
	return nil
}

// checkLimits checks the limits on memory and on numbers of objects.
func (c Config) checkLimits() error {
	r := c.Relay
	for _, limit := range []struct {
		key   string
		value int
	}{
		{"clients", r.Limits.Clients}, {"memories", r.Limits.Memories}, {"connections", r.Limits.Connections},
		{"descriptors", r.Limits.Descriptors},
	} {
		if limit.value < 1 || limit.value > 1<<20 {
			return &KeyError{"relay.limits." + limit.key, fmt.Errorf("relay.limits.%s is %d; must be 1 to 1048576",
				limit.key, limit.value)}
		}
	}
	// A relay treats 0 as the default.
	for _, size := range []struct {
		key   string
		value Size
	}{
		{"staging.bounce_limit", c.Staging.BounceLimit}, {"relay.limits.host_memory", r.Limits.HostMemory},
		{"relay.limits.client_host_memory", r.Limits.ClientHostMemory},
		{"relay.limits.staging", r.Limits.Staging}, {"relay.limits.client_staging", r.Limits.ClientStaging},
	} {
		if size.value < 1<<20 || size.value > 1<<50 {
			return &KeyError{size.key, fmt.Errorf("%s is %s; must be 1 MiB to 1 PiB", size.key, size.value)}
		}
	}
	if limit := c.Staging.HostLimit; limit != nil && *limit > 1<<50 {
		return &KeyError{"staging.host_limit", fmt.Errorf("staging.host_limit is %s; must be at most 1 PiB", *limit)}
	}
	return nil
}

func (r Runtime) check() error {
	if p := r.Path; p != "" && !filepath.IsAbs(p) {
		return &KeyError{"runtime.path", fmt.Errorf("runtime.path is %q; must be an absolute path, because engines run "+
			"peerlane-runtime in many directories", p)}
	}
	for _, pattern := range r.Devices {
		if err := checkPattern(pattern); err != nil {
			return &KeyError{"runtime.devices", fmt.Errorf("runtime.devices has %q: %w", pattern, err)}
		}
	}
	return nil
}

// checkProcess checks the program, the sandbox and the resources of a relay's process.
func (r Relay) checkProcess() error {
	if r.Binary != "" && !filepath.IsAbs(r.Binary) {
		return &KeyError{"relay.binary", fmt.Errorf("relay.binary is %q; must be an absolute path, because the hook "+
			"runs in many directories", r.Binary)}
	}
	if _, _, err := r.UIDRange(); err != nil {
		return err
	}
	for _, path := range slices.Concat(r.SandboxRead, r.SandboxWrite) {
		if !filepath.IsAbs(path) || filepath.Clean(path) == "/" {
			return &KeyError{"relay.sandbox_read", fmt.Errorf("relay.sandbox_read or relay.sandbox_write has %q; must be "+
				"absolute paths other than /", path)}
		}
	}
	if r.Memory < 256<<20 {
		return &KeyError{"relay.memory", fmt.Errorf("relay.memory is %s; must be at least 256 MiB",
			r.Memory)}
	}
	if r.CPUs < 1 || r.CPUs > 4096 {
		return &KeyError{"relay.cpus", fmt.Errorf("relay.cpus is %d; must be 1 to 4096", r.CPUs)}
	}
	if r.Tasks < 128 || r.Tasks > 1<<20 {
		return &KeyError{"relay.tasks", fmt.Errorf("relay.tasks is %d; must be 128 to 1048576", r.Tasks)}
	}
	for _, e := range r.Environment {
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" || strings.ContainsRune(e, 0) {
			return &KeyError{"relay.environment", fmt.Errorf(`relay.environment has %q; must be "NAME=value"`, e)}
		}
	}
	return nil
}
