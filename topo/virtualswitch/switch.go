package virtualswitch

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
	"github.com/peerlane/peerlane/topo/ncclxml"
	"github.com/peerlane/peerlane/topo/planner"
)

// VirtualSwitch is the host as the virtual switch makes it look for NCCL: each
// GPU that has a lane is behind a synthetic bridge in its old place, and beside
// it behind that bridge is a virtual NIC, peerlane_N for GPU N. It has the GUID,
// the port and the speed of the first physical NIC of its lane, so that NCCL
// divides the bandwidth of one that several lanes share, and that one's PCIe
// link. The physical NICs are not there: NCCL reaches them through the lanes.
//
// The bridges and virtual NICs have PCI addresses that no device has, ffff:ff:01.0
// and ffff:fe:01.0, and so on; NCCL cannot have two devices at one address.
// Notes say which GPUs are without, and why.
func New(h *topo.Host, p *planner.Plan) (*topo.Host, error) { return newSwitch(h, p, false) }

// LocalSwitch is VirtualSwitch for lanes that reach only this host, without a NIC: each GPU
// that is not refused has a virtual NIC, which is as fast as the GPU's links to its peers.
// NCCL limits a NIC by the PCIe links on the way; so the two links below a GPU's bridge are
// as wide as they must be for that. The bridge's own link upwards is the GPU's real one.
func NewLocal(h *topo.Host, p *planner.Plan) (*topo.Host, error) { return newSwitch(h, p, true) }

func newSwitch(h *topo.Host, p *planner.Plan, local bool) (*topo.Host, error) {
	told := *ncclxml.AsNCCLReads(h)
	physical := told.NICs
	told.Source.Kind = topo.SourceNCCLXML
	told.GPUs, told.Switches, told.NICs = slices.Clone(told.GPUs), slices.Clone(told.Switches), nil
	told.Notes = []string{"The virtual switch of Peerlane: peerlane_N stands for the physical NIC of GPU N's lane."}
	if local {
		told.Notes = []string{"The virtual switch of Peerlane: peerlane_N is the lane of GPU N to the other containers of this host."}
	}
	for i := range told.Switches {
		// NCCL would ask the host for what is not there, each rank for other
		// switches, and then take one switch for two.
		completeWithZero(&told.Switches[i].Device)
	}
	free := freeAddresses(h)
	for _, l := range p.Lanes {
		g := slices.IndexFunc(told.GPUs, func(g topo.GPU) bool { return g.BusID == l.GPU })
		if g < 0 {
			return nil, fmt.Errorf("the plan has a lane for GPU %s, which the host does not have", l.GPU)
		}
		gpu := &told.GPUs[g]
		if len(l.NICs) == 0 && !local || l.Role == planner.RoleRefused {
			told.Note("GPU %d (%s) has no virtual NIC: %s", gpu.Index, gpu.BusID, l.Reason)
			continue
		}
		bridgeAt, nicAt, ok := free()
		if !ok {
			return nil, fmt.Errorf("a virtual NIC for GPU %s: all addresses of PCI domain ffff are taken", gpu.BusID)
		}
		bridge := topo.Switch{Host: gpu.Host, BusID: bridgeAt, NUMA: gpu.NUMA, Place: gpu.Place, Device: topo.PCIIdentity{Class: ncclxml.NcclClassBridge}}
		completeWithZero(&bridge.Device)
		told.Switches = append(told.Switches, bridge)
		gpu.Switch = bridgeAt
		nic := topo.NIC{
			Host: gpu.Host, Name: fmt.Sprintf("peerlane_%d", gpu.Index), BusID: nicAt, NUMA: gpu.NUMA, Place: gpu.Place,
			Device: topo.PCIIdentity{Class: ncclxml.NcclClassEthernet},
		}
		completeWithZero(&nic.Device)
		if local {
			if rate := float64(PeerMbps(*gpu)) / 8000; rate > gpu.Link {
				gpu.LinkSpeed, gpu.LinkWidth = widestSpeed, int(math.Ceil(rate*80/widestLane))
				gpu.Link = bandwidths.PCIe(gpu.LinkSpeed, gpu.LinkWidth)
			}
			nic.Link, nic.LinkSpeed, nic.LinkWidth = gpu.Link, gpu.LinkSpeed, gpu.LinkWidth
			told.NICs = append(told.NICs, nic)
			continue
		}
		at := slices.IndexFunc(physical, func(n topo.NIC) bool { return n.Name == l.NICs[0]+ncclxml.DataDirectSuffix })
		if at < 0 {
			at = slices.IndexFunc(physical, func(n topo.NIC) bool { return n.Name == l.NICs[0] })
		}
		if at >= 0 {
			real := physical[at]
			nic.GUID = real.GUID
			if len(real.Ports) > 0 {
				nic.Ports = []topo.Port{ncclxml.BestPort(real)}
			}
			if real.BusID != "" {
				nic.Link, nic.LinkSpeed, nic.LinkWidth = real.Link, real.LinkSpeed, real.LinkWidth
			}
		} else {
			told.Note("%s has neither speed nor guid: its NIC %s is not in the topology", nic.Name, l.NICs[0])
		}
		told.NICs = append(told.NICs, nic)
	}
	told.Notes = append(told.Notes, h.Notes...)
	return &told, nil
}

// The fastest PCIe link that all releases of NCCL know, and the rate of one of its lanes, as
// in pcieSpeeds.
const (
	widestSpeed = "32.0 GT/s PCIe"
	widestLane  = 240
)

// completeWithZero writes 0 for what is unknown.
func completeWithZero(d *topo.PCIIdentity) {
	for _, field := range []*string{&d.Vendor, &d.Device, &d.SubsystemVendor, &d.SubsystemDevice} {
		if *field == "" {
			*field = "0x0000"
		}
	}
}

// freeAddresses hands out pairs of PCI addresses that no device of the host has.
func freeAddresses(h *topo.Host) func() (bridge, nic string, ok bool) {
	taken := map[string]bool{}
	for _, s := range h.Switches {
		taken[s.BusID] = true
		for _, peer := range s.Peers {
			taken[peer] = true
		}
	}
	for _, g := range h.GPUs {
		taken[g.BusID] = true
		for _, l := range g.NVLinks {
			taken[l.Peer] = true
		}
	}
	for _, n := range h.NICs {
		taken[n.BusID] = true
	}
	next := 0
	return func() (bridge, nic string, ok bool) {
		for ; next < 128*31; next++ {
			bus, device := 0xff-2*(next/31), 1+next%31
			bridge, nic = fmt.Sprintf("ffff:%02x:%02x.0", bus, device), fmt.Sprintf("ffff:%02x:%02x.0", bus-1, device)
			if !taken[bridge] && !taken[nic] {
				next++
				return bridge, nic, true
			}
		}
		return "", "", false
	}
}

// NCCLNIC is a NIC in NCCL's numbers: as its transport for InfiniBand has them, and a
// virtual NIC that stands for it in the virtual switch.
type NIC struct {
	GUID uint64 // 0 where unknown
	Mbps uint32 // of the fastest active port, 10^6 bits a second; 0 where unknown
	Port uint32 // that port; 0 where unknown
}

// NCCLNIC is a NIC of the plan, by name; zero for one that is not in its topology, or that
// NCCL would not list.
func NICOf(p *planner.Plan, name string) (n NIC) {
	host := topo.Host{NICs: p.NICs, Source: p.Source}
	for _, nic := range ncclxml.AsNCCLReads(&host).NICs {
		if nic.Name != name {
			continue
		}
		n.GUID, _ = strconv.ParseUint(nic.GUID, 0, 64) // empty where unknown
		port := ncclxml.BestPort(nic)
		if mbps := math.Round(port.RateGbps * 1000); mbps > 0 && mbps < 1e9 {
			n.Mbps = uint32(mbps)
		}
		if port.Number > 0 {
			n.Port = uint32(port.Number)
		}
	}
	return n
}

// PeerMbps is the rate of a GPU's links to others of its host, 10^6 bits a second in each
// direction: its NVLinks, or without any its PCIe link; 0 where unknown.
func PeerMbps(g topo.GPU) uint32 {
	gbs := 0.0
	for _, l := range g.NVLinks {
		gbs += float64(l.Count) * bandwidths.NVLink(g.Capability)
	}
	if gbs == 0 {
		gbs = g.Link
	}
	return uint32(math.Round(min(gbs*8000, 1e9)))
}
