package topo

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/topo/internal/lazyregexp"
)

// Kinds of Source.
const (
	SourceSysfs   = "sysfs"
	SourceNCCLXML = "nccl-xml"
)

// Source is where a Host was read.
type Source struct {
	// Kind is SourceSysfs or SourceNCCLXML.
	Kind string `json:"kind"`
	// Sysfs is the root of the sysfs that the reader read, usually "/sys": a caller checks
	// there whether a device still exists. Empty for a file.
	Sysfs string `json:"sysfs,omitempty"`
	// File is the name of the file that was read.
	File string `json:"file,omitempty"`
}

// Host is a machine: its devices and the tree that joins the devices.
type Host struct {
	Source   Source   `json:"source"`
	CPUs     []CPU    `json:"cpus"`
	Switches []Switch `json:"switches"`
	GPUs     []GPU    `json:"gpus"` // in the order of Index
	NICs     []NIC    `json:"nics"` // ordered by name, 2 before 10
	// PCIePorts are the PCI functions between GPUs or NICs and their host bridges, ordered by
	// address. Of files, only captures have PCIePorts.
	PCIePorts []PCIePort `json:"pciePorts,omitempty"`
	// Notes are sentences about devices and values that the reader left out or could not read.
	Notes []string `json:"notes,omitempty"`
	// Measured has measured rates of copies on the host; nil without a measurement.
	Measured *Measured `json:"measured,omitempty"`
	// Matrix has the path type of each ordered pair of devices, for a source without a tree
	// (nvidia-smi topo -m); nil for another source. A device is a GPU's BusID or a NIC's name.
	Matrix map[[2]string]PathType `json:"-"`
}

// CPU is a NUMA node.
type CPU struct {
	// Host distinguishes the hosts of a file (host_hash in a file of NCCL); empty for a single
	// host, here and in the types below.
	Host string `json:"host,omitempty"`
	NUMA int    `json:"numa"`
	// CPUs is the node's list of processors, as in
	// /sys/devices/system/node/nodeN/cpulist; empty where unknown.
	CPUs string `json:"cpus,omitempty"`
	// Arch is "x86_64", "arm64" or "ppc64"; empty where unknown, as the next
	// three are zero where unknown.
	Arch string `json:"arch,omitempty"`
	// Vendor is the maker in CPUID's notation, "GenuineIntel".
	Vendor string `json:"vendor,omitempty"`
	// Family and Model are the kernel's "cpu family" and "model", and NCCL's familyid and
	// modelid.
	Family int `json:"family,omitempty"`
	Model  int `json:"model,omitempty"`
	// Socket is the bandwidth of the link to other NUMA nodes, GB/s, from NCCL's table of
	// processors. 5000 for a processor outside the table: no limit.
	Socket float64 `json:"socket"`
}

// Place is where a device is plugged in.
type Place struct {
	// HostBridge is the root of the PCI tree, "pci0000:00" as in /sys/devices; empty where
	// unknown.
	HostBridge string `json:"hostBridge,omitempty"`
	// Switch is the address of the nearest switch above the device; empty for a device at a
	// root port.
	Switch string `json:"switch,omitempty"`
	// Link is the bandwidth of the link upwards, GB/s in each direction, from NCCL's table:
	// usable, not nominal (48 for PCIe 5.0 x16). Link is the maximum of the link, and the path
	// search uses Link.
	Link float64 `json:"link"`
	// LinkSpeed and LinkWidth are the sources of Link: the kernel's text for the speed ("32.0
	// GT/s PCIe") and the number of lanes. Empty and 0 where unknown.
	LinkSpeed string `json:"linkSpeed,omitempty"`
	LinkWidth int    `json:"linkWidth,omitempty"`
	// LinkNow is the current bandwidth of the link (current_link_speed and current_link_width
	// in sysfs), GB/s: an idle GPU lowers the speed of its link. 0 where unknown.
	LinkNow float64 `json:"linkNow,omitempty"`
}

// PCIIdentity identifies a PCI function by the kernel's attributes class, vendor, device,
// subsystem_vendor and subsystem_device ("0x1000"). An unknown field is empty.
type PCIIdentity struct {
	Class           string `json:"class,omitempty"`
	Vendor          string `json:"vendor,omitempty"`
	Device          string `json:"device,omitempty"`
	SubsystemVendor string `json:"subsystemVendor,omitempty"`
	SubsystemDevice string `json:"subsystemDevice,omitempty"`
}

// Number joins Vendor, Device, SubsystemVendor and SubsystemDevice, 16 bits for each field.
func (d PCIIdentity) Number() uint64 {
	var all uint64
	for _, text := range []string{d.Vendor, d.Device, d.SubsystemVendor, d.SubsystemDevice} {
		n, _ := strconv.ParseUint(strings.TrimPrefix(text, "0x"), 16, 16) // absent: 0, as in NCCL
		all = all<<16 | n
	}
	return all
}

// Switch is a PCIe switch, named by its upstream port.
type Switch struct {
	Host  string `json:"host,omitempty"`
	BusID string `json:"busid"`
	NUMA  int    `json:"numa"`
	Place
	// Device also identifies the two halves of a switch, which count as a single switch.
	Device PCIIdentity `json:"device,omitzero"`
	// Peers are the addresses of switches that this switch reaches without the CPU (<pcilink>
	// in a file of NCCL).
	Peers []string `json:"peers,omitempty"`
}

// GPU is a graphics processor.
type GPU struct {
	Host string `json:"host,omitempty"`
	// Vendor is "AMD", "Hygon" or the maker's PCI number ("0x8086"); empty for NVIDIA. Only
	// GPUs of NVIDIA can be relayed.
	Vendor string `json:"vendor,omitempty"`
	// Index is NVML's, the N of nvidia-smi and of nvidia.com/gpu=N.
	Index int `json:"index"`
	// UUID is "GPU-8-4-4-4-12"; empty where neither the driver nor NVML reports a UUID.
	UUID string `json:"uuid"`
	// BusID is the PCI address, "0000:17:00.0", lower case. A source without addresses (Matrix)
	// has a name, "GPU0".
	BusID string `json:"busid"`
	// Minor is the N of /dev/nvidiaN; -1 where unknown.
	Minor int    `json:"minor"`
	Name  string `json:"name"`
	NUMA  int    `json:"numa"` // -1 where unknown
	Place
	Device PCIIdentity `json:"device,omitzero"`
	// GCN is the architecture of an AMD GPU, in RCCL's notation ("906"); empty for other makers
	// and where unknown.
	GCN string `json:"gcn,omitempty"`
	// Capability is the compute capability times ten, 90 for 9.0; 0 where
	// unknown.
	Capability int      `json:"capability,omitempty"`
	NVLinks    []NVLink `json:"nvlinks,omitempty"`
	// NVLinkCPU is the bandwidth of the GPU's NVLinks to the CPU (POWER9), and C2C of the
	// chip-to-chip link, GB/s in each direction; 0 without the link.
	NVLinkCPU float64 `json:"nvlinkCPU,omitempty"`
	C2C       float64 `json:"c2c,omitempty"`
	// GDR reports whether a NIC can read and write the GPU's memory; nil where unknown.
	GDR *bool `json:"gdr,omitempty"`
	// Order is the position among GPUs and NICs in a file of NCCL: NCCL prefers the first of
	// equal devices. 0 for another source.
	Order int `json:"-"`
	// MIG reports that the GPU is divided into instances. An instance cannot map the memory of
	// another instance.
	MIG bool `json:"mig,omitempty"`
	// VGPU reports that the GPU is a share of a physical GPU, assigned to this virtual machine.
	VGPU bool `json:"vgpu,omitempty"`
	// ComputeMode is "exclusive-process" or "prohibited"; empty for the default.
	ComputeMode string `json:"computeMode,omitempty"`
	// NoP2P reports that the driver denies the GPU access to the memory of other GPUs.
	NoP2P bool `json:"noP2P,omitempty"`
	// Reason is a sentence: the cause for which the GPU cannot be relayed. Empty where the GPU
	// itself allows relaying.
	Reason string `json:"reason,omitempty"`
}

// Refusal returns Reason, or a reason derived from the other fields.
func (g GPU) Refusal() string {
	switch {
	case g.Reason != "":
		return g.Reason
	case g.Vendor != "":
		return "it is a GPU of " + g.Vendor + ", and Peerlane requires NVIDIA's CUDA"
	case g.MIG:
		return "MIG is on: instances of a GPU cannot map another GPU's memory; disable MIG (nvidia-smi -mig 0) or use " +
			"another GPU"
	case g.VGPU:
		return "it is a vGPU, which cannot map another GPU's memory; pass a whole GPU through to this machine"
	case g.ComputeMode == "prohibited":
		return "its compute mode is prohibited, so no CUDA program can use it; set it to default (nvidia-smi -c 0)"
	case g.ComputeMode == "exclusive-process":
		return "its compute mode is exclusive: the relay and the program cannot both use it; set it to default " +
			"(nvidia-smi -c 0)"
	case g.NoP2P:
		return "the driver denies it peer-to-peer access to every other GPU (nvidia-smi topo -p2p w), so nothing can be " +
			"staged there"
	}
	return ""
}

// NVLink is the group of NVLinks between a GPU and a peer.
type NVLink struct {
	// Peer is the other GPU's PCI address; empty for NVSwitches.
	Peer  string `json:"peer,omitempty"`
	Count int    `json:"count"`
	// Bandwidth is the sum of the Count links, GB/s in each direction.
	Bandwidth float64 `json:"bandwidth"`
}

// NIC is a network interface: an RDMA device of /sys/class/infiniband, or a
// <net> of a topology file.
type NIC struct {
	Host string `json:"host,omitempty"`
	Name string `json:"name"`
	// BusID is the PCI address; empty for a NIC that a file places nowhere.
	BusID  string `json:"busid"`
	Driver string `json:"driver,omitempty"`
	// Uverbs is the name of the NIC's character device in /dev/infiniband, "uverbs0"; empty
	// without a device.
	Uverbs string `json:"uverbs,omitempty"`
	// Card is the address of the function that represents the card in NCCL: the first of
	// several functions, or the physical function of virtual functions. Empty where Card equals
	// BusID, or is unknown.
	Card string `json:"card,omitempty"`
	// GUID is the node GUID, in the notation of the source.
	GUID string `json:"guid,omitempty"`
	// Firmware is the version that the device reports (fw_ver); empty without a report.
	Firmware string `json:"firmware,omitempty"`
	// SystemGUID is the GUID that the functions of a card share (sys_image_guid); empty where
	// unknown.
	SystemGUID string `json:"systemGUID,omitempty"`
	NUMA       int    `json:"numa"` // -1 where unknown
	Place
	Device PCIIdentity `json:"device,omitzero"`
	Ports  []Port      `json:"ports"`
	// Protocol is "InfiniBand", "RoCE", "iWARP", "eRDMA" or "EFA"; empty where unknown.
	Protocol string `json:"protocol,omitempty"`
	// Ethernet is set for an interface without RDMA: topology files list the interface, but no
	// lane uses the interface.
	Ethernet bool `json:"ethernet,omitempty"`
	// Software is set for RDMA that the kernel emulates without a PCI device (rxe, siw). Software
	// RDMA cannot reach GPU memory; lanes use it only on request.
	Software bool `json:"software,omitempty"`
	// VirtualFunctionOf is the PCI address of the physical function of a virtual function;
	// empty for a physical function.
	VirtualFunctionOf string `json:"virtualFunctionOf,omitempty"`
	// Subfunction is the auxiliary device of a subfunction, "mlx5_core.sf.4"; empty for other
	// NICs.
	Subfunction string `json:"subfunction,omitempty"`
	// DataDirect is the PCI address of a separate function that reads and writes the memory of
	// GPUs (ConnectX-8); empty without such a function. With DataDirect, NUMA and Place
	// describe the Data Direct function, and Own describes the NIC's function for host memory.
	DataDirect string    `json:"dataDirect,omitempty"`
	Own        *Function `json:"own,omitempty"`
	// Management is set for a bridge to NVSwitches: the bridge resembles a ConnectX-7, but
	// leads to no network.
	Management bool `json:"management,omitempty"`
	// Bond is set for a device that represents the ports of several functions (RoCE LAG,
	// mlx5_bond_0); BusID is the first function.
	Bond bool `json:"bond,omitempty"`
	// GDR reports whether the NIC can read and write a GPU's memory; nil where unknown.
	GDR *bool `json:"gdr,omitempty"`
	// Order is the position in a file of NCCL, as for a GPU.
	Order int `json:"-"`
	// Reason is a sentence: the cause for which no lane can use the NIC. Empty for a usable
	// NIC.
	Reason string `json:"reason,omitempty"`
}

// Function is the place of a PCI function.
type Function struct {
	NUMA int `json:"numa"` // -1 where unknown
	Place
}

// CardFunction returns the PCI function that represents the NIC's card on paths to GPUs; empty
// where unknown.
func (n NIC) CardFunction() string { return cmp.Or(n.DataDirect, n.Card, n.BusID) }

// OwnFunction returns the NIC at the place of the NIC's function for host memory.
func (n NIC) OwnFunction() NIC {
	if n.Own != nil {
		n.DataDirect, n.NUMA, n.Place, n.Own = "", n.Own.NUMA, n.Own.Place, nil
	}
	return n
}

// Refusal returns Reason, or a reason derived from other fields. Refusal ignores the ports.
func (n NIC) Refusal() string {
	switch {
	case n.Reason != "":
		return n.Reason
	case n.Management:
		return "it is a management bridge of NVSwitches (SW_MNG in its vital product data) without a network"
	case n.Ethernet:
		return "it does not support RDMA"
	case n.Protocol == "EFA":
		return "EFA has no reliable connections, which relays need"
	}
	return ""
}

// Port is a port of a NIC, /sys/class/infiniband/NIC/ports/Number.
type Port struct {
	Number int `json:"number"`
	// State is the kernel's text, "ACTIVE" or "DOWN"; empty where unknown.
	State string `json:"state,omitempty"`
	// PhysicalState is the kernel's text, "LinkUp", "Polling" or "Disabled"; empty where
	// unknown.
	PhysicalState string `json:"physicalState,omitempty"`
	// GUID is the interface part of the first GID, in the kernel's notation; empty where
	// unknown.
	GUID string `json:"guid,omitempty"`
	// LID is the address in an InfiniBand subnet, SMLID the address of the subnet manager; 0 on
	// Ethernet.
	LID   int `json:"lid,omitempty"`
	SMLID int `json:"smLID,omitempty"`
	// LinkLayer is "InfiniBand" or "Ethernet".
	LinkLayer string `json:"linkLayer,omitempty"`
	// RateGbps is the signalling rate, 10^9 bits a second; 0 where unknown.
	RateGbps float64 `json:"rateGbps,omitempty"`
}

// Active reports whether the port can carry data. A port of unknown state counts as active.
func (p Port) Active() bool { return p.State == "" || p.State == "ACTIVE" }

// Active reports whether at least one port of the NIC can carry data.
func (n NIC) Active() bool {
	return len(n.Ports) == 0 || slices.ContainsFunc(n.Ports, Port.Active)
}

// RateGbps returns the rate of the NIC's fastest active port, 10^9 bits a second; 0 where
// unknown.
func (n NIC) RateGbps() float64 {
	var rate float64
	for _, p := range n.Ports {
		if p.Active() {
			rate = max(rate, p.RateGbps)
		}
	}
	return rate
}

// FindGPU returns the GPU with a name: an index, a UUID or a PCI address.
func (h *Host) FindGPU(name string) (GPU, error) { return FindGPU(h.GPUs, name) }

func FindGPU(gpus []GPU, name string) (GPU, error) {
	if index, err := strconv.Atoi(name); err == nil {
		for _, g := range gpus {
			if g.Index == index {
				return g, nil
			}
		}
	}
	busID, notBusID := ParseBusID(name)
	for _, g := range gpus {
		if g.UUID != "" && strings.EqualFold(g.UUID, name) || notBusID == nil && g.BusID == busID || g.BusID == name {
			return g, nil
		}
	}
	return GPU{}, &UnknownGPUError{Name: name, Known: slices.Clone(gpus)}
}

// UnknownGPUError reports a name without a GPU on the host or in the plan, and lists the known
// names.
type UnknownGPUError struct {
	Name  string
	Known []GPU
}

func (e *UnknownGPUError) Error() string {
	if len(e.Known) == 0 {
		return fmt.Sprintf("no GPU %q: this host has no GPU", e.Name)
	}
	var known []string
	for _, g := range e.Known {
		s := fmt.Sprintf("%d = %s", g.Index, g.BusID)
		if g.UUID != "" {
			s += " = " + g.UUID
		}
		known = append(known, s)
	}
	return fmt.Sprintf("no GPU %q: use an index, a PCI address or a UUID; known are %s",
		e.Name, strings.Join(known, ", "))
}

var busIDPattern = lazyregexp.New(`^(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])$`)

// BusIDError reports a text that is not a PCI address.
type BusIDError struct{ Text string }

func (e *BusIDError) Error() string {
	return fmt.Sprintf("%q is not a PCI address such as 0000:17:00.0", e.Text)
}

// ParseBusID converts a PCI address to the kernel's form, "0000:17:00.0": lower case, at least
// four digits of the domain. ParseBusID accepts nvidia-smi's eight digits, and an address
// without a domain. The error is a [BusIDError].
func ParseBusID(s string) (string, error) {
	if len(s) == len("0000:00:00.0") && lazyregexp.IsDevice(s) {
		return s, nil
	}
	m := busIDPattern.FindStringSubmatch(strings.ToLower(s))
	if m == nil {
		return "", &BusIDError{s}
	}
	return fmt.Sprintf("%04s:%02s:%02s.%s", strings.TrimLeft(m[1], "0"), m[2], m[3], m[4]), nil
}

// CompareBusID orders PCI addresses as the kernel and NVML do. The arguments
// come from ParseBusID, so their digits after the domain align.
func CompareBusID(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b))
}

// CompareNatural compares numbers within names by value: mlx5_2 before mlx5_10.
func CompareNatural(a, b string) int {
	split := func(s string) (prefix string, n int) {
		digits := len(s) - len(strings.TrimRight(s, "0123456789"))
		n, err := strconv.Atoi(s[len(s)-digits:])
		if err != nil { // no digits, or more than fit: compared as text
			return s, -1
		}
		return s[:len(s)-digits], n
	}
	pa, na := split(a)
	pb, nb := split(b)
	return cmp.Or(strings.Compare(pa, pb), cmp.Compare(na, nb), strings.Compare(a, b))
}

// Limits of the numbers of devices. Drivers number GPUs from 0, and no kernel has more than
// 1024 NUMA nodes.
const (
	MaxIndex = MaxDevices - 1
	maxNUMA  = 1<<16 - 1
)

// RangeError reports a number out of range.
type RangeError struct {
	Number string // such as "GPU index"
	Value  int
	Max    int // the least number is 0
}

func (e *RangeError) Error() string {
	return fmt.Sprintf("%s %d is out of range; must be 0 to %d", e.Number, e.Value, e.Max)
}

// CheckNUMA refuses an impossible number of a NUMA node; -1 is an unknown node.
func CheckNUMA(numa int) error {
	if numa < -1 || numa > maxNUMA {
		return &RangeError{"NUMA node", numa, maxNUMA}
	}
	return nil
}

// CheckIndex refuses a number that no GPU has.
func CheckIndex(index int) error {
	if index < 0 || index > MaxIndex {
		return &RangeError{"GPU index", index, MaxIndex}
	}
	return nil
}

// Judge sets Reason of each GPU and NIC.
func (h *Host) Judge() {
	for i := range h.GPUs {
		h.GPUs[i].Reason = h.GPUs[i].Refusal()
	}
	for i := range h.NICs {
		h.NICs[i].Reason = h.NICs[i].Refusal()
	}
}

// Hosts returns the names of the hosts of the devices, in order; a single empty name for a
// single host.
func (h *Host) Hosts() []string {
	var names []string
	add := func(name string) {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, c := range h.CPUs {
		add(c.Host)
	}
	for _, g := range h.GPUs {
		add(g.Host)
	}
	for _, n := range h.NICs {
		add(n.Host)
	}
	return names
}

// UnknownHostError reports a name without a host in a file.
type UnknownHostError struct {
	Name  string
	Hosts []string // the host_hashes; nil for a file with one host
}

func (e *UnknownHostError) Error() string {
	if e.Hosts == nil {
		return fmt.Sprintf("host %q: the file describes one host, number 0", e.Name)
	}
	return fmt.Sprintf("host %q: the file describes %d hosts, numbers 0 to %d: %s", e.Name, len(e.Hosts), len(e.Hosts)-1,
		strings.Join(e.Hosts, ", "))
}

// Only returns a host of a file with several hosts. The name is a number from 0, in the order
// of the file, or the host_hash. The devices of the result have no Host.
func (h *Host) Only(name string) (*Host, error) {
	hosts := h.Hosts()
	at := slices.Index(hosts, strings.ToLower(name))
	if n, err := strconv.Atoi(name); err == nil && at < 0 && n >= 0 && n < len(hosts) {
		at = n
	}
	switch {
	case at < 0 && len(hosts) == 1:
		return nil, &UnknownHostError{name, nil}
	case at < 0:
		return nil, &UnknownHostError{name, hosts}
	case len(hosts) == 1:
		return h, nil
	}
	one := *h
	one.CPUs = onHost(h.CPUs, func(c *CPU) *string { return &c.Host }, hosts[at])
	one.Switches = onHost(h.Switches, func(s *Switch) *string { return &s.Host }, hosts[at])
	one.GPUs = onHost(h.GPUs, func(g *GPU) *string { return &g.Host }, hosts[at])
	one.NICs = onHost(h.NICs, func(n *NIC) *string { return &n.Host }, hosts[at])
	one.Notes = append(slices.Clone(h.Notes), fmt.Sprintf("this is host %d of the file, %s", at, hosts[at]))
	return &one, nil
}

// onHost returns copies of the devices on a host, without the name of the host.
func onHost[D any](all []D, host func(*D) *string, name string) (some []D) {
	for _, d := range all {
		if of := host(&d); *of == name {
			*of = ""
			some = append(some, d)
		}
	}
	return some
}

func (h *Host) Note(format string, args ...any) {
	h.Notes = append(h.Notes, fmt.Sprintf(format, args...))
}

// MaxDevices limits the GPUs, and the RDMA devices, of a host: the paths grow with the square
// of the number of devices.
const MaxDevices = 4096

// CannotFlush is the consequence of a NIC that cannot flush.
const CannotFlush = "relays receive into host memory, except in place on a GPU that orders such writes for itself " +
	"(compute capability 9.0 and later)"

// CannotFlush reports whether a NIC lacks loopback queue pairs, which a flush reads through:
// iWARP, and eRDMA unless the driver is in compatible mode. A connection manager connects queue
// pairs of iWARP and eRDMA.
func (n NIC) CannotFlush() bool { return n.Protocol == "iWARP" || n.Protocol == "eRDMA" }
