package virtualswitch

import (
	"errors"
	"fmt"
	"slices"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/ncclxml"
	"github.com/peerlane/peerlane/topo/planner"
)

var errNoTree = errors.New("the plan lacks the tree of its host; peerlane cdi refresh writes it")

// ContainerXML returns the virtual switch of a container as a topology file of NCCL. gpus are
// the PCI addresses of the container's GPUs. The file has each GPU beside the virtual NIC of
// the GPU's lane, and the switches above. NCCL reads GPUs and NVLinks from NVML, and the
// physical NIC of a virtual NIC from the plugin: the file cannot contradict the container. With
// local the lanes reach only this host: see newLocal.
func ContainerXML(p *planner.Plan, gpus []string, local bool) ([]byte, error) {
	if len(p.CPUs) == 0 {
		return nil, errNoTree
	}
	host := topo.Host{Source: p.Source, CPUs: p.CPUs, Switches: p.Switches, GPUs: p.GPUs, NICs: p.NICs}
	v, err := newSwitch(&host, p, local)
	if err != nil {
		return nil, err
	}
	v.Notes = []string{"The virtual switch of Peerlane, for one container: peerlane_N is the lane of the host's GPU N."}
	names := map[string]bool{}
	var own []topo.GPU
	for _, g := range v.GPUs {
		if !slices.Contains(gpus, g.BusID) {
			continue
		}
		names[fmt.Sprintf("peerlane_%d", g.Index)] = true
		// Omit the host's index: NVML numbers the GPUs of the container.
		own = append(own, topo.GPU{Host: g.Host, Vendor: g.Vendor, BusID: g.BusID, NUMA: g.NUMA, Place: g.Place,
			Device: g.Device})
	}
	if len(own) == 0 {
		return nil, fmt.Errorf("the plan has none of the GPUs %v", gpus)
	}
	slices.SortFunc(own, func(a, b topo.GPU) int { return topo.CompareBusID(a.BusID, b.BusID) })
	for i := range own {
		own[i].Index, own[i].Order = i, i
	}
	v.GPUs = own
	v.NICs = slices.DeleteFunc(v.NICs, func(n topo.NIC) bool { return !names[n.Name] })
	for i := range v.NICs {
		v.NICs[i].GUID, v.NICs[i].Ports = "", nil
	}
	v.Switches = switchesAbove(v)
	return ncclxml.Write(v)
}

// switchesAbove returns the switches above the GPUs and NICs.
func switchesAbove(h *topo.Host) []topo.Switch {
	over := map[string]bool{}
	var climb func(at string)
	climb = func(at string) {
		if at == "" || over[at] {
			return
		}
		over[at] = true
		for _, s := range h.Switches {
			if s.BusID == at {
				climb(s.Switch)
			}
		}
	}
	for _, g := range h.GPUs {
		climb(g.Switch)
	}
	for _, n := range h.NICs {
		climb(n.Switch)
	}
	return slices.DeleteFunc(slices.Clone(h.Switches), func(s topo.Switch) bool { return !over[s.BusID] })
}
