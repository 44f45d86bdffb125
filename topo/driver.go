package topo

import (
	"cmp"
	"errors"
	"slices"
)

// NVML is what topo asks of NVIDIA's management library; topo/nvml implements
// it on the real one.
type NVML interface {
	// GPUs lists the GPUs that the driver manages. An error that is
	// ErrNoNVML says that there is no library, and is no fault.
	GPUs() ([]NVMLGPU, error)
}

// ErrNoNVML is what an NVML answers on a host without the library.
var ErrNoNVML = errors.New("no NVML library")

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
}

// complete adds what NVML knows. It says more than sysfs and contradicts it in
// nothing, so a library that fails leaves a host that is right, and a note.
func (h *Host) complete(n NVML) {
	known, err := n.GPUs()
	if errors.Is(err, ErrNoNVML) {
		h.note("%v: NVLinks and MIG are unknown, GPUs are numbered by PCI address", err)
		return
	}
	if err != nil {
		h.note("NVML gives no answer, so NVLinks and MIG are unknown and GPUs are numbered by PCI address: %v", err)
		return
	}
	numbered := 0
	for _, k := range known {
		busID, err := ParseBusID(k.BusID)
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
		h.GPUs[i].learn(k)
	}
	if numbered < len(h.GPUs) {
		h.numberStrangers(known)
	}
	slices.SortFunc(h.GPUs, func(a, b GPU) int { return cmp.Compare(a.Index, b.Index) })
}

func (g *GPU) learn(k NVMLGPU) {
	g.Index = k.Index
	g.UUID = cmp.Or(k.UUID, g.UUID)
	g.Name = cmp.Or(k.Name, g.Name)
	if k.Minor >= 0 {
		g.Minor = k.Minor
	}
	g.MIG, g.VGPU, g.ComputeMode, g.NoP2P, g.Capability = k.MIG, k.VGPU, k.ComputeMode, k.NoP2P, k.Capability
	g.NVLinks = nil
	for peer, count := range k.NVLinks {
		if address, err := ParseBusID(peer); err == nil {
			peer = address
		}
		g.NVLinks = append(g.NVLinks, NVLink{Peer: peer, Count: count, Bandwidth: float64(count) * nvlinkBandwidth(k.Capability)})
	}
	slices.SortFunc(g.NVLinks, func(a, b NVLink) int { return cmp.Compare(a.Peer, b.Peer) })
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
		h.note("GPU %s is unknown to NVML; it is numbered %d, and no program will find it", g.BusID, g.Index)
	}
}
