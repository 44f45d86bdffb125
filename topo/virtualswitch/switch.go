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

// New returns the host with the virtual switch for NCCL: each GPU with a lane is behind a
// synthetic bridge at the GPU's place, beside a virtual NIC, peerlane_N for GPU N. The virtual
// NIC has the GUID, the port and the speed of the first physical NIC of the lane. NCCL
// therefore divides the bandwidth of a NIC, and of the NIC's PCIe link, between the lanes of
// the NIC. The result omits the physical NICs: NCCL reaches the NICs through the lanes.
//
// The bridges and virtual NICs have unused PCI addresses, ffff:ff:01.0 and ffff:fe:01.0, and so
// on: NCCL cannot have two devices at an address. Notes list the GPUs without a virtual NIC,
// and the reasons.
func New(h *topo.Host, p *planner.Plan) (*topo.Host, error) { return newSwitch(h, p, false) }

// newLocal is New for lanes that reach only this host, without a NIC: each GPU that is not
// refused has a virtual NIC at the rate of the GPU's links to peers. NCCL limits a NIC by the
// PCIe links on the path; the two links below the bridge are therefore wide enough for the
// rate. The upstream link of the bridge is the GPU's real link.
func newLocal(h *topo.Host, p *planner.Plan) (*topo.Host, error) { return newSwitch(h, p, true) }

func newSwitch(h *topo.Host, p *planner.Plan, local bool) (*topo.Host, error) {
	virtual := *ncclxml.AsNCCLReads(h)
	physical := virtual.NICs
	virtual.Source.Kind = topo.SourceNCCLXML
	virtual.GPUs, virtual.Switches, virtual.NICs = slices.Clone(virtual.GPUs), slices.Clone(virtual.Switches), nil
	virtual.Notes = []string{"The virtual switch of Peerlane: peerlane_N stands for the physical NIC of GPU N's lane."}
	if local {
		virtual.Notes = []string{"The virtual switch of Peerlane: peerlane_N is the lane of GPU N to the other " +
			"containers of this host."}
	}
	for i := range virtual.Switches {
		// For a missing value NCCL asks the host. The answers of ranks differ, and NCCL then
		// counts a switch twice.
		completeWithZero(&virtual.Switches[i].Device)
	}
	free := freeAddresses(h)
	for _, l := range p.Lanes {
		g := slices.IndexFunc(virtual.GPUs, func(g topo.GPU) bool { return g.BusID == l.GPU })
		if g < 0 {
			return nil, fmt.Errorf("the plan has a lane for GPU %s, which the host does not have", l.GPU)
		}
		gpu := &virtual.GPUs[g]
		if len(l.NICs) == 0 && !local || l.Role == planner.RoleRefused {
			virtual.Note("GPU %d (%s) has no virtual NIC: %s", gpu.Index, gpu.BusID, l.Reason)
			continue
		}
		bridgeAt, nicAt, ok := free()
		if !ok {
			return nil, fmt.Errorf("a virtual NIC for GPU %s: all addresses of PCI domain ffff are taken", gpu.BusID)
		}
		bridge := topo.Switch{Host: gpu.Host, BusID: bridgeAt, NUMA: gpu.NUMA, Place: gpu.Place,
			Device: topo.PCIIdentity{Class: ncclxml.ClassBridge}}
		completeWithZero(&bridge.Device)
		virtual.Switches = append(virtual.Switches, bridge)
		gpu.Switch = bridgeAt
		nic := topo.NIC{
			Host: gpu.Host, Name: fmt.Sprintf("peerlane_%d", gpu.Index), BusID: nicAt, NUMA: gpu.NUMA, Place: gpu.Place,
			Device: topo.PCIIdentity{Class: ncclxml.ClassEthernet},
		}
		completeWithZero(&nic.Device)
		if local {
			if rate := float64(PeerMbps(*gpu)) / 8000; rate > gpu.Link {
				gpu.LinkSpeed, gpu.LinkWidth = widestSpeed, int(math.Ceil(rate*80/widestLane))
				gpu.Link = bandwidths.PCIe(gpu.LinkSpeed, gpu.LinkWidth)
			}
			nic.Link, nic.LinkSpeed, nic.LinkWidth = gpu.Link, gpu.LinkSpeed, gpu.LinkWidth
			virtual.NICs = append(virtual.NICs, nic)
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
			virtual.Note("%s has neither speed nor guid: its NIC %s is not in the topology", nic.Name, l.NICs[0])
		}
		virtual.NICs = append(virtual.NICs, nic)
	}
	virtual.Notes = append(virtual.Notes, h.Notes...)
	return &virtual, nil
}

// The fastest PCIe link in every release of NCCL, and the rate of a lane, as in PCIeSpeeds.
const (
	widestSpeed = "32.0 GT/s PCIe"
	widestLane  = 240
)

// completeWithZero sets unknown fields to 0.
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

// NIC is a NIC in the numbers of NCCL's InfiniBand transport; the virtual NIC has the same
// numbers.
type NIC struct {
	GUID uint64 // 0 where unknown
	Mbps uint32 // of the fastest active port, 10^6 bits a second; 0 where unknown
	Port uint32 // that port; 0 where unknown
}

// NICOf returns a NIC of the plan, by name; zero for a NIC outside the plan's topology or
// outside NCCL's list.
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

// PeerMbps returns the rate of a GPU's links to peers on the host, 10^6 bits a second in each
// direction: the NVLinks, or without NVLinks the PCIe link; 0 where unknown.
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
