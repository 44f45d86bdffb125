package topo

import (
	"cmp"
	"errors"
	"slices"
	"strings"
)

// NVML is what topo asks of NVIDIA's management library; topo/nvml implements
// it on the real one.
type NVML interface {
	// GPUs lists the GPUs that the driver manages. An error that is
	// ErrNoNVML says that there is no library, and is no fault. GPUs beside an
	// error are right.
	GPUs() ([]NVMLGPU, error)
}

// ErrNoNVML is what an NVML answers on a host without the library.
var ErrNoNVML = errors.New("the NVML library is not installed")

// NVMLGPU is what NVML tells of a GPU.
type NVMLGPU struct {
	Index int // nvmlDeviceGetIndex
	// BusID is nvmlDeviceGetPciInfo's, in any form that ParseBusID reads.
	BusID string
	UUID  string // nvmlDeviceGetUUID
	Name  string // nvmlDeviceGetName
	Minor int    // nvmlDeviceGetMinorNumber, -1 where unknown
	MIG   bool   // nvmlDeviceGetMigMode, the current mode
	VGPU  bool   // nvmlDeviceGetVirtualizationMode: a share, in a guest
	// ComputeMode is nvmlDeviceGetComputeMode's, in the words of
	// GPU.ComputeMode; empty for the default.
	ComputeMode string
	// NoP2P says that nvmlDeviceGetP2PStatus is OK with no other GPU, of those
	// that there are.
	NoP2P bool
	// Capability is the compute capability times ten, 90 for 9.0.
	Capability int
	// NVLinks counts the active links by peer, a PCI address in any form; ""
	// for NVSwitches (nvmlDeviceGetNvLinkRemoteDeviceType, ..RemotePciInfo).
	NVLinks map[string]int
	// NVLinksCPU counts those to the CPU, as POWER9 has them.
	NVLinksCPU int `json:",omitempty"`
	// C2C counts the active chip-to-chip links to the CPU
	// (NVML_FI_DEV_C2C_LINK_COUNT, .._GET_STATUS), and C2CBandwidth is what each
	// carries at most, MB/s (.._GET_MAX_BW).
	C2C          int `json:",omitempty"`
	C2CBandwidth int `json:",omitempty"`
	// Lost says that the GPU does not answer any more (NVML_ERROR_GPU_IS_LOST).
	Lost bool `json:",omitempty"`
	// Failures are the calls that gave no answer, "nvmlDeviceGetUUID: Unknown
	// Error"; what they would have told is unknown.
	Failures []string `json:",omitempty"`
}

// GPUProcess is a process that uses a GPU
// (nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses).
type GPUProcess struct {
	GPU      int // nvmlDeviceGetIndex
	PID      int
	Graphics bool   // it draws; else it computes
	Memory   uint64 // bytes of the GPU's memory; 0 where unknown
}

// complete adds what NVML knows. It says more than sysfs and contradicts it in
// nothing, so a library that fails leaves a host that is right, and a note.
// classOf is the class of a PCI device, "" for one that sysfs does not show.
func (h *Host) complete(n NVML, classOf func(busID string) string) {
	known, err := n.GPUs()
	switch {
	case errors.Is(err, ErrNoNVML):
		h.note("NVLinks and MIG are unknown, GPUs are numbered by PCI address: %v", err)
		return
	case err != nil && len(known) == 0:
		h.note("NVML gives no answer, so NVLinks and MIG are unknown and GPUs are numbered by PCI address: %v", err)
		return
	case err != nil:
		h.note("NVML: %v", err)
	}
	numbered := 0
	for _, k := range known {
		busID, err := ParseBusID(k.BusID)
		if err != nil && len(k.Failures) > 0 {
			h.note("NVML tells nothing of GPU %d, which is left without what NVML knows: %s", k.Index, strings.Join(k.Failures, "; "))
			continue
		}
		if err != nil {
			h.note("NVML lists a GPU with an address that cannot be read, which is left out: %v", err)
			continue
		}
		i := slices.IndexFunc(h.GPUs, func(g GPU) bool { return g.BusID == busID })
		if i < 0 {
			h.note("NVML lists GPU %s, which %s does not show; it is left out", busID, h.Source.Sysfs)
			continue
		}
		numbered++
		h.GPUs[i].learn(k, classOf)
		if len(k.Failures) > 0 {
			h.note("GPU %s: NVML does not tell all of it, and the rest is unknown: %s", busID, strings.Join(k.Failures, "; "))
		}
	}
	if numbered < len(h.GPUs) {
		h.numberStrangers(known)
	}
	slices.SortFunc(h.GPUs, func(a, b GPU) int { return cmp.Compare(a.Index, b.Index) })
}

func (g *GPU) learn(k NVMLGPU, classOf func(busID string) string) {
	g.Index = k.Index
	g.UUID = cmp.Or(k.UUID, g.UUID)
	g.Name = cmp.Or(k.Name, g.Name)
	if k.Minor >= 0 {
		g.Minor = k.Minor
	}
	g.MIG, g.VGPU, g.ComputeMode, g.NoP2P, g.Capability = k.MIG, k.VGPU, k.ComputeMode, k.NoP2P, k.Capability
	if k.Lost {
		g.Reason = "the driver has lost it: it does not answer any more (the kernel's log says why, as an Xid); reset it (nvidia-smi -r) or restart this machine"
	}
	links, toCPU := map[string]int{}, k.NVLinksCPU
	for peer, count := range k.NVLinks {
		// What is at the far end, its class tells; what cannot be seen is an
		// NVSwitch (ncclTopoGetXmlFromGpu).
		address, err := ParseBusID(peer)
		if err != nil {
			address = ""
		}
		switch class := classOf(address); {
		case address == "":
			links[""] += count
		case strings.HasPrefix(class, classDisplay):
			links[address] += count
		case strings.HasPrefix(class, classNVLinkCPU):
			toCPU += count
		default:
			links[""] += count
		}
	}
	each := nvlinkBandwidth(k.Capability)
	g.NVLinks = nil
	for peer, count := range links {
		g.NVLinks = append(g.NVLinks, NVLink{Peer: peer, Count: count, Bandwidth: float64(count) * each})
	}
	slices.SortFunc(g.NVLinks, func(a, b NVLink) int { return cmp.Compare(a.Peer, b.Peer) })
	g.NVLinkCPU = float64(toCPU) * each
	g.C2C = float64(k.C2C*k.C2CBandwidth) / 1000
}

// numberStrangers gives GPUs that the driver does not manage the numbers after
// those that it does.
func (h *Host) numberStrangers(known []NVMLGPU) {
	next := 0
	for _, k := range known {
		next = max(next, k.Index+1)
	}
	for i := range h.GPUs {
		g := &h.GPUs[i]
		if slices.ContainsFunc(known, func(k NVMLGPU) bool {
			busID, err := ParseBusID(k.BusID)
			return err == nil && busID == g.BusID
		}) {
			continue
		}
		g.Index = next
		next++
		if g.Vendor != "" {
			continue
		}
		g.Reason = "NVML does not know it, so no program will find it"
		h.note("GPU %s is unknown to NVML; it is numbered %d, and no program will find it", g.BusID, g.Index)
	}
}
