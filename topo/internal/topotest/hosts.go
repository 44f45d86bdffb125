package topotest

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
)

// Gen sets the bandwidth of every PCIe link.
func (b *Builder) Gen(link float64) *Builder {
	for i := range b.H.Switches {
		b.H.Switches[i].Link = link
	}
	for i := range b.H.GPUs {
		b.H.GPUs[i].Link = link
	}
	for i := range b.H.NICs {
		b.H.NICs[i].Link = link
	}
	return b
}

// EightA100 has two GPUs on each of four switches, and NVSwitches.
func EightA100() *Builder {
	b := Build(2)
	for i := range 4 {
		sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci0000:%d0", 1+i)
		b.Sw(sw, i/2, bridge, "").GPU(i/2, bridge, sw).GPU(i/2, bridge, sw)
	}
	return b.Nvswitches()
}

// Hgx is a server of eight GPUs with NVSwitches, two GPUs to a switch and two
// switches to a socket, with NICs at the given switches.
func Hgx(link, rate float64, switches ...int) *Builder {
	b := EightA100()
	for i, sw := range switches {
		b.NIC(fmt.Sprintf("mlx5_%d", i), sw/2, fmt.Sprintf("pci0000:%d0", 1+sw), fmt.Sprintf("00aa:%02x:00.0", sw), Up(rate))
	}
	return b.Gen(link)
}

// CubeMesh joins eight GPUs like a DGX-1: two quads, and a link between the GPUs of equal
// position in the quads.
func (b *Builder) CubeMesh() *Builder {
	for i := range 8 {
		for j := range 8 {
			if i != j && (i/4 == j/4 || i%4 == j%4) {
				b.H.GPUs[i].NVLinks = append(b.H.GPUs[i].NVLinks, topo.NVLink{Peer: b.H.GPUs[j].BusID, Count: 1, Bandwidth: 20})
			}
		}
	}
	return b
}

func Repeat(n int, lines ...string) []string { return slices.Repeat(lines, n) }

// at returns the NUMA node and the place of a device below a host bridge and a switch.
func at(numa int, hostBridge, sw string) (int, topo.Place) {
	return numa, topo.Place{HostBridge: hostBridge, Switch: sw, Link: 48}
}

type Builder struct{ H topo.Host }

func Build(nodes int) *Builder {
	b := &Builder{topo.Host{Source: topo.Source{Kind: topo.SourceSysfs, Sysfs: "/sys"}}}
	for n := range nodes {
		b.H.CPUs = append(b.H.CPUs, topo.CPU{NUMA: n, Socket: 22})
	}
	return b
}

func (b *Builder) Sw(busID string, numa int, hostBridge, above string) *Builder {
	n, p := at(numa, hostBridge, above)
	b.H.Switches = append(b.H.Switches, topo.Switch{BusID: busID, NUMA: n, Place: p})
	return b
}

// GPU adds the next GPU; the address begins with the index.
func (b *Builder) GPU(numa int, hostBridge, sw string) *Builder {
	i := len(b.H.GPUs)
	n, p := at(numa, hostBridge, sw)
	b.H.GPUs = append(b.H.GPUs, topo.GPU{
		Index: i, BusID: Bus(i), Minor: i, NUMA: n, Place: p,
		UUID: fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i),
	})
	return b
}

func (b *Builder) NIC(name string, numa int, hostBridge, sw string, ports ...topo.Port) *Builder {
	n, p := at(numa, hostBridge, sw)
	b.H.NICs = append(b.H.NICs, topo.NIC{Name: name, BusID: fmt.Sprintf("00ff:%02x:00.0", len(b.H.NICs)), NUMA: n,
		Place: p, Ports: ports})
	return b
}

// Nvswitches joins every GPU.
func (b *Builder) Nvswitches() *Builder {
	for i := range b.H.GPUs {
		b.H.GPUs[i].NVLinks = []topo.NVLink{{Count: 18, Bandwidth: 370.8}}
	}
	return b
}

func (b *Builder) Host() *topo.Host { return &b.H }

func Bus(gpu int) string { return fmt.Sprintf("0000:%02x:00.0", gpu+1) }

func Up(rate float64) topo.Port { return topo.Port{Number: 1, State: "ACTIVE", RateGbps: rate} }

func Down(rate float64) topo.Port { return topo.Port{Number: 1, State: "DOWN", RateGbps: rate} }

// TwoSockets has a NIC with two GPUs beside it and two GPUs elsewhere on each
// of two sockets.
func TwoSockets() *Builder {
	return Build(2).
		Sw("00aa:00:00.0", 0, "pci0000:10", "").Sw("00aa:01:00.0", 1, "pci0000:80", "").
		GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0, "pci0000:10", "00aa:00:00.0").
		GPU(0, "pci0000:20", "").GPU(0, "pci0000:20", "").
		GPU(1, "pci0000:80", "00aa:01:00.0").GPU(1, "pci0000:80", "00aa:01:00.0").
		GPU(1, "pci0000:90", "").GPU(1, "pci0000:90", "").
		NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", Up(400)).
		NIC("mlx5_1", 1, "pci0000:80", "00aa:01:00.0", Up(400))
}

// MachineOf draws a host of up to two machines.
func MachineOf(r *rand.Rand) *topo.Host {
	h := &topo.Host{Source: topo.Source{Kind: topo.SourceNCCLXML}}
	links := []float64{12, 24, 48}
	for m := range 1 + r.IntN(2) {
		host := ""
		if m > 0 {
			host = "other"
		}
		nodes := 1 + r.IntN(3)
		for n := range nodes {
			h.CPUs = append(h.CPUs, topo.CPU{Host: host, NUMA: n, Socket: []float64{16, 22, bandwidths.Local}[r.IntN(3)]})
		}
		var switches []topo.Switch
		place := func() (int, topo.Place) {
			numa, p := r.IntN(nodes), topo.Place{Link: links[r.IntN(3)], HostBridge: fmt.Sprintf("pci0000:%02x", r.IntN(3))}
			if len(switches) > 0 && r.IntN(4) > 0 {
				above := switches[r.IntN(len(switches))]
				numa, p.Switch, p.HostBridge = above.NUMA, above.BusID, above.HostBridge
			}
			return numa, p
		}
		for i := range r.IntN(6) {
			s := topo.Switch{Host: host, BusID: fmt.Sprintf("0000:%02x:00.0", 0x10+i)}
			s.NUMA, s.Place = place()
			if r.IntN(2) > 0 {
				s.Device = topo.PCIIdentity{Class: "0x060400", Vendor: "0x1000", Device: "0xc010", SubsystemVendor: "0x1000",
					SubsystemDevice: "0xa096"}
			}
			if r.IntN(4) == 0 {
				s.Peers = []string{fmt.Sprintf("0000:%02x:00.0", 0x10+r.IntN(6))}
			}
			switches = append(switches, s)
		}
		h.Switches = append(h.Switches, switches...)
		gpus := r.IntN(5)
		for i := range gpus {
			g := topo.GPU{Host: host, Index: i, BusID: fmt.Sprintf("0000:%02x:00.0", 0x40+i), Capability: 70 + 20*r.IntN(2),
				NoP2P: r.IntN(8) == 0}
			g.NUMA, g.Place = place()
			for range r.IntN(3) {
				peer := ""
				if r.IntN(3) > 0 {
					peer = fmt.Sprintf("0000:%02x:00.0", 0x40+r.IntN(gpus))
				}
				g.NVLinks = append(g.NVLinks, topo.NVLink{Peer: peer, Count: 1, Bandwidth: 20})
			}
			if r.IntN(6) == 0 {
				g.C2C = 440
			}
			h.GPUs = append(h.GPUs, g)
		}
		for i := range r.IntN(4) {
			n := topo.NIC{Host: host, Name: fmt.Sprintf("mlx5_%d", i), BusID: fmt.Sprintf("0000:%02x:00.0", 0x80+i/2)}
			n.NUMA, n.Place = place()
			if i%2 == 1 { // a second port of the previous NIC
				n.Place = h.NICs[len(h.NICs)-1].Place
				n.NUMA = h.NICs[len(h.NICs)-1].NUMA
			}
			n.Ports = []topo.Port{{Number: 1, RateGbps: []float64{0, 100, 400}[r.IntN(3)]}}
			h.NICs = append(h.NICs, n)
		}
	}
	return h
}
