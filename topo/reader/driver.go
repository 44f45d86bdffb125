package reader

import (
	"cmp"
	"errors"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
	"github.com/peerlane/peerlane/topo/internal/pci"
)

// complete adds the answer of NVML to h. The answer extends sysfs and does not contradict sysfs,
// so h stays correct without NVML, and has a note. classOf returns the class of a PCI device, ""
// if sysfs does not show the device.
func complete(h *topo.Host, n topo.NVML, classOf func(busID string) string) {
	known, err := n.GPUs()
	switch {
	case errors.Is(err, topo.ErrNoNVML):
		h.Note("NVLinks and MIG are unknown, GPUs are numbered by PCI address: %v", err)
		return
	case err != nil && len(known) == 0:
		h.Note("NVML does not answer, so NVLinks and MIG are unknown and GPUs are numbered by PCI address: %v", err)
		return
	case err != nil:
		h.Note("NVML: %v", err)
	}
	numbered := 0
	for _, k := range known {
		busID, err := topo.ParseBusID(k.BusID)
		if err != nil && len(k.Failures) > 0 {
			h.Note("NVML returned no data for GPU %d: %s", k.Index,
				strings.Join(k.Failures, "; "))
			continue
		}
		if err != nil {
			h.Note("ignoring a GPU of NVML with an invalid address: %v", err)
			continue
		}
		i := slices.IndexFunc(h.GPUs, func(g topo.GPU) bool { return g.BusID == busID })
		if i < 0 {
			h.Note("ignoring GPU %s, which NVML lists but %s does not", busID, h.Source.Sysfs)
			continue
		}
		numbered++
		learn(&h.GPUs[i], k, classOf)
		if len(k.Failures) > 0 {
			h.Note("GPU %s: NVML returned only a part of the data: %s", busID, strings.Join(k.Failures, "; "))
		}
	}
	if numbered < len(h.GPUs) {
		numberStrangers(h, known)
	}
	slices.SortFunc(h.GPUs, func(a, b topo.GPU) int { return cmp.Compare(a.Index, b.Index) })
}

func learn(g *topo.GPU, k topo.NVMLGPU, classOf func(busID string) string) {
	g.Index = k.Index
	g.UUID = cmp.Or(k.UUID, g.UUID)
	g.Name = cmp.Or(k.Name, g.Name)
	if k.Minor >= 0 {
		g.Minor = k.Minor
	}
	g.MIG, g.VGPU, g.ComputeMode, g.NoP2P, g.Capability = k.MIG, k.VGPU, k.ComputeMode, k.NoP2P, k.Capability
	if k.Lost {
		g.Reason = "the driver has lost it: it no longer responds (the kernel's log has the cause, an Xid); reset it " +
			"(nvidia-smi -r) or restart this machine"
	}
	links, toCPU := map[string]int{}, k.NVLinksCPU
	for peer, count := range k.NVLinks {
		// The class of the far end tells GPU, CPU or NVSwitch. An invisible far end is an NVSwitch
		// (ncclTopoGetXmlFromGpu).
		address, err := topo.ParseBusID(peer)
		if err != nil {
			address = ""
		}
		switch class := classOf(address); {
		case address == "":
			links[""] += count
		case strings.HasPrefix(class, pci.ClassDisplay):
			links[address] += count
		case strings.HasPrefix(class, pci.ClassNVLinkCPU):
			toCPU += count
		default:
			links[""] += count
		}
	}
	each := bandwidths.NVLink(k.Capability)
	g.NVLinks = nil
	for peer, count := range links {
		g.NVLinks = append(g.NVLinks, topo.NVLink{Peer: peer, Count: count, Bandwidth: float64(count) * each})
	}
	slices.SortFunc(g.NVLinks, func(a, b topo.NVLink) int { return cmp.Compare(a.Peer, b.Peer) })
	g.NVLinkCPU = float64(toCPU) * each
	g.C2C = float64(k.C2C*k.C2CBandwidth) / 1000
}

// numberStrangers numbers GPUs that the driver does not manage, after the GPUs of the driver.
func numberStrangers(h *topo.Host, known []topo.NVMLGPU) {
	next := 0
	for _, k := range known {
		next = max(next, k.Index+1)
	}
	for i := range h.GPUs {
		g := &h.GPUs[i]
		if slices.ContainsFunc(known, func(k topo.NVMLGPU) bool {
			busID, err := topo.ParseBusID(k.BusID)
			return err == nil && busID == g.BusID
		}) {
			continue
		}
		g.Index = next
		next++
		if g.Vendor != "" {
			continue
		}
		g.Reason = "NVML does not list it, so programs cannot use it"
		h.Note("NVML does not list GPU %s; it is numbered %d, and programs cannot use it", g.BusID, g.Index)
	}
}
