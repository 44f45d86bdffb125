package graph_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
)

// ncclTopoCheckP2p: without P2P a pair uses the memory of the CPU.
func TestPolicyP2PFollowsTypeAndDriver(t *testing.T) {
	intel := func() *topo.Host { return switches().Host() }
	vendor := func(vendors ...string) *topo.Host {
		h := switches().Host()
		for i, v := range vendors {
			h.CPUs[i].Vendor = v
		}
		return h
	}
	two := func(h *topo.Host, first, second int) *topo.Host {
		h.GPUs = []topo.GPU{h.GPUs[first], h.GPUs[second]}
		return h
	}
	without := func(h *topo.Host, gpu int) *topo.Host {
		h.GPUs[gpu].NoP2P = true
		return h
	}
	const amd, other = "AuthenticAMD", "GenuineIntel"
	phb, pxb := topo.Path{Type: topo.PHB, Bandwidth: 48}, topo.Path{Type: topo.PXB, Bandwidth: 48}
	for name, tt := range map[string]struct {
		host     *topo.Host
		from, to int
		want     topo.PolicyPath
	}{
		"switches":                    {intel(), 0, 1, topo.PolicyPath{Path: pxb, Direct: true}},
		"host bridges":                {intel(), 0, 2, topo.PolicyPath{Path: phb}},
		"two GPUs of a host with AMD": {two(vendor(amd, amd), 0, 2), 0, 2, topo.PolicyPath{Path: phb, Direct: true}},
		"two GPUs of nodes with AMD": {two(vendor(amd, amd), 0, 3), 0, 3,
			topo.PolicyPath{Path: topo.Path{Type: topo.SYS, Bandwidth: 22}, Direct: true}},
		"two GPUs, AMD first":        {two(vendor(amd, other), 0, 2), 0, 2, topo.PolicyPath{Path: phb, Direct: true}},
		"two GPUs, AMD second":       {two(vendor(other, amd), 0, 2), 0, 2, topo.PolicyPath{Path: phb}},
		"four GPUs with AMD":         {vendor(amd, amd), 0, 2, topo.PolicyPath{Path: phb}},
		"the source is without P2P":  {without(intel(), 0), 0, 1, topo.PolicyPath{Path: phb}},
		"the target is without P2P":  {without(intel(), 1), 0, 1, topo.PolicyPath{Path: phb}},
		"a third GPU is without P2P": {without(intel(), 2), 0, 1, topo.PolicyPath{Path: pxb, Direct: true}},
		"GPUs of two nodes without P2P": {without(intel(), 3), 0, 3,
			topo.PolicyPath{Path: topo.Path{Type: topo.SYS, Bandwidth: 22}}},
	} {
		got := ncclfile.PairOf(t, graph.All(tt.host, topo.RulesNCCL), topotest.Bus(tt.from), topotest.Bus(tt.to))
		if diff := cmp.Diff(&tt.want, got.Policy); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	one := two(vendor(amd), 0, 2)
	one.CPUs = one.CPUs[:1]
	if got := ncclfile.PairOf(t, graph.All(one, topo.RulesNCCL), topotest.Bus(0), topotest.Bus(2)); !got.Policy.Direct {
		t.Errorf("two GPUs of a NUMA node with AMD: %+v", got.Policy)
	}
	three := vendor(amd, amd)
	three.GPUs = three.GPUs[:3]
	if got := ncclfile.PairOf(t, graph.All(three, topo.RulesNCCL), topotest.Bus(0), topotest.Bus(2)); got.Policy.Direct {
		t.Errorf("three GPUs with AMD: %+v", got.Policy)
	}
	apart := intel()
	apart.GPUs[3].Host = "other"
	got := ncclfile.PairOf(t, graph.All(apart, topo.RulesNCCL), topotest.Bus(0), topotest.Bus(3))
	if diff := cmp.Diff(&topo.PolicyPath{Path: topo.Path{Type: topo.DIS}}, got.Policy); diff != "" {
		t.Errorf("GPUs of two hosts (-want +got):\n%s", diff)
	}
}

// ncclTopoCheckGdr: GPU, NIC and path allow GPUDirect RDMA.
func TestPolicyGPUDirectFollowsDevicesAndPath(t *testing.T) {
	yes, no := true, false
	pix, phb := topo.Path{Type: topo.PIX, Bandwidth: 48}, topo.Path{Type: topo.PHB, Bandwidth: 48}
	for name, tt := range map[string]struct {
		change func(g *topo.GPU, n *topo.NIC)
		want   topo.PolicyPath
	}{
		"unknown support": {func(*topo.GPU, *topo.NIC) {}, topo.PolicyPath{Path: pix, Direct: true}},
		"support": {func(g *topo.GPU, n *topo.NIC) { g.GDR, n.GDR = &yes, &yes },
			topo.PolicyPath{Path: pix, Direct: true}},
		"GPU without": {func(g *topo.GPU, n *topo.NIC) { g.GDR, n.GDR = &no, &yes }, topo.PolicyPath{Path: phb}},
		"NIC without": {func(g *topo.GPU, n *topo.NIC) { g.GDR, n.GDR = &yes, &no }, topo.PolicyPath{Path: phb}},
		"Ethernet":    {func(_ *topo.GPU, n *topo.NIC) { n.Ethernet = true }, topo.PolicyPath{Path: phb}},
		"software":    {func(_ *topo.GPU, n *topo.NIC) { n.Software = true }, topo.PolicyPath{Path: phb}},
		"Ethernet with support": {func(_ *topo.GPU, n *topo.NIC) { n.Ethernet, n.GDR = true, &yes },
			topo.PolicyPath{Path: pix, Direct: true}},
		"host bridge": {func(_ *topo.GPU, n *topo.NIC) { n.Switch = "" }, topo.PolicyPath{Path: phb}},
		"host bridge with chips": {func(g *topo.GPU, n *topo.NIC) { g.C2C, n.Switch = 400, "" },
			topo.PolicyPath{Path: topo.Path{Type: topo.P2C, Bandwidth: 48}, Direct: true}},
		"another node with chips": {func(g *topo.GPU, n *topo.NIC) { g.C2C, n.Switch, n.NUMA = 400, "", 1 },
			topo.PolicyPath{Path: topo.Path{Type: topo.SYS, Bandwidth: 22}}},
	} {
		h := topotest.Build(2).Sw("0000:10:00.0", 0, "", "").GPU(0, "", "0000:10:00.0").
			NIC("a", 0, "", "0000:10:00.0", topotest.Up(400)).Host()
		tt.change(&h.GPUs[0], &h.NICs[0])
		pairs := graph.All(h, topo.RulesNCCL)
		for _, ends := range [][2]string{{topotest.Bus(0), "a"}, {"a", topotest.Bus(0)}} {
			if diff := cmp.Diff(&tt.want, ncclfile.PairOf(t, pairs, ends[0], ends[1]).Policy); diff != "" {
				t.Errorf("%s, from %s (-want +got):\n%s", name, ends[0], diff)
			}
		}
	}
}

// ncclTopoGetLocalNet: a GPU begins at the nearest NIC with its number, bits reversed if the number of
// NICs is a power of two, and uses as many NICs as each GPU has.
func TestPolicyAssignsNearestNICs(t *testing.T) {
	for name, tt := range map[string]struct {
		gpus, nics int
		want       [][]int // by GPU: the NICs of channels 0 to 3
	}{
		"as many NICs":   {4, 4, [][]int{{0, 0, 0, 0}, {2, 2, 2, 2}, {1, 1, 1, 1}, {3, 3, 3, 3}}},
		"twice the NICs": {4, 8, [][]int{{0, 1, 0, 1}, {4, 5, 4, 5}, {2, 3, 2, 3}, {6, 7, 6, 7}}},
		"half the NICs":  {4, 2, [][]int{{0, 0, 0, 0}, {1, 1, 1, 1}, {0, 0, 0, 0}, {1, 1, 1, 1}}},
		"three NICs":     {2, 3, [][]int{{0, 1, 0, 1}, {1, 2, 1, 2}}},
		"one NIC":        {2, 1, [][]int{{0, 0, 0, 0}, {0, 0, 0, 0}}},
	} {
		b := topotest.Build(1).Sw("0000:10:00.0", 0, "", "")
		for range tt.gpus {
			b.GPU(0, "", "0000:10:00.0")
		}
		for i := range tt.nics {
			b.NIC(fmt.Sprint(i), 0, "", "0000:10:00.0", topotest.Up(400))
		}
		p := graph.MakePolicy(b.Host(), false)
		var got [][]int
		for g := range tt.gpus {
			d, ok := p.Assigned(g)
			if !ok {
				t.Fatalf("%s: GPU %d has no NIC", name, g)
			}
			var channels []int
			for c := range 4 {
				channels = append(channels, d.NIC(c))
			}
			got = append(got, channels)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	apart := topotest.Build(1).GPU(0, "", "").NIC("a", 0, "", "").Host()
	apart.NICs[0].Host = "other"
	if _, ok := graph.MakePolicy(apart, false).Assigned(0); ok {
		t.Error("a GPU has a NIC of another host")
	}
	if _, ok := graph.MakePolicy(topotest.Build(1).GPU(0, "", "").Host(), false).Assigned(0); ok {
		t.Error("a GPU has a NIC on a host without a NIC")
	}
}

// The nearest NICs have most bandwidth, then the nearest path.
func TestPolicyNearestNICIsFastest(t *testing.T) {
	b := topotest.Build(1).Sw("0000:10:00.0", 0, "", "").GPU(0, "", "0000:10:00.0").
		NIC("a", 0, "", "0000:10:00.0", topotest.Up(100)).NIC("b", 0, "", "", topotest.Up(400)).
		NIC("c", 0, "", "0000:10:00.0", topotest.Up(200)).NIC("d", 0, "", "", topotest.Up(200))
	for _, want := range []string{"b", "c", "d", "a"} {
		p := graph.MakePolicy(b.Host(), false)
		d, ok := p.Assigned(0)
		if !ok || p.NICs[d.NIC(0)].Name != want || d.PerGPU != 1 {
			t.Errorf("%+v; want %s", d, want)
		}
		b.H.NICs = slices.DeleteFunc(b.H.NICs, func(n topo.NIC) bool { return n.Name == want })
	}
}

// NCCL orders devices by the place in the file, then by NUMA node and address.
func TestPolicyOrdersDevicesAsNCCL(t *testing.T) {
	gpu := func(numa, order int, busID string) topo.GPU { return topo.GPU{NUMA: numa, Order: order, BusID: busID} }
	nic := func(numa, order int, busID, state string) topo.NIC {
		return topo.NIC{Name: busID, NUMA: numa, Order: order, BusID: busID, Ports: []topo.Port{{Number: 1, State: state}}}
	}
	h := topotest.Build(3).Host()
	h.CPUs[0], h.CPUs[2] = h.CPUs[2], h.CPUs[0] // NUMA nodes 2, 1, 0
	h.GPUs = []topo.GPU{gpu(0, 0, "0000:01:00.0"), gpu(2, 0, "0000:03:00.0"), gpu(2, 0, "0000:02:00.0"),
		gpu(2, -1, "0000:09:00.0")}
	h.NICs = []topo.NIC{nic(0, 0, "0000:11:00.0", "ACTIVE"), nic(2, 0, "0000:13:00.0", "ACTIVE"),
		nic(2, 0, "0000:14:00.0", "DOWN"),
		nic(2, 0, "0000:12:00.0", ""), nic(1, -1, "0000:19:00.0", "ACTIVE")}
	p := graph.MakePolicy(h, false)
	if diff := cmp.Diff([]int{3, 2, 1, 0}, p.AtGPU); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]int{3, 2, -1, 1, 0}, p.AtNIC); diff != "" {
		t.Errorf("NICs (-want +got):\n%s", diff)
	}
	for i, g := range h.GPUs {
		if p.GPUs[p.AtGPU[i]].BusID != g.BusID {
			t.Errorf("GPU %d is %s", i, p.GPUs[p.AtGPU[i]].BusID)
		}
	}
	for i, n := range h.NICs {
		if at := p.AtNIC[i]; at >= 0 && p.NICs[at].BusID != n.BusID {
			t.Errorf("NIC %d is %s", i, p.NICs[at].BusID)
		}
	}
}

// PXN needs NVLink to the GPU beside the NIC, GPUDirect RDMA there, and an advantage.
func TestPolicyPXNNeedsAdvantage(t *testing.T) {
	no := false
	host := func() *topotest.Builder {
		return topotest.Build(2).Sw("0000:10:00.0", 0, "", "").Sw("0000:11:00.0", 0, "", "").
			GPU(0, "", "0000:10:00.0").GPU(0, "", "0000:11:00.0").NIC("a", 0, "", "0000:10:00.0", topotest.Up(400)).Nvswitches()
	}
	for name, tt := range map[string]struct {
		change func(h *topo.Host)
		want   bool
	}{
		"NVSwitches":              {func(*topo.Host) {}, true},
		"no NVLink":               {func(h *topo.Host) { h.GPUs[0].NVLinks = nil }, false},
		"no GPUDirect RDMA":       {func(h *topo.Host) { h.GPUs[0].GDR = &no }, false},
		"no GPUDirect of the NIC": {func(h *topo.Host) { h.NICs[0].GDR = &no }, false},
		"NIC of the CPU":          {func(h *topo.Host) { h.NICs[0].Switch = "" }, false},
		"both GPUs at the NIC":    {func(h *topo.Host) { h.GPUs[1].Switch = "0000:10:00.0" }, false},
		"a slower GPU at the NIC": {func(h *topo.Host) { h.GPUs[1].Switch, h.GPUs[1].Link = "0000:10:00.0", 12 },
			true},
		"switches below a switch": {func(h *topo.Host) { h.Switches[1].Switch = "0000:10:00.0" }, false},
		"a slower switch below a switch": {func(h *topo.Host) {
			h.Switches[1].Switch, h.Switches[1].Link = "0000:10:00.0",
				12
		}, true},
	} {
		h := host().Host()
		tt.change(h)
		far := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), topotest.Bus(1), "a")
		if got := far.PXN != nil; got != tt.want || got && (far.PXN.Via != topotest.Bus(0) || far.PXN.Bandwidth != 48 ||
			far.Policy.Type != topo.PXN || !far.Policy.Direct) {
			t.Errorf("%s: PXN %+v, policy %+v; want PXN: %t", name, far.PXN, far.Policy, tt.want)
		}
		if near := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), topotest.Bus(0), "a"); near.PXN != nil {
			t.Errorf("%s: the GPU beside the NIC has PXN %+v", name, near.PXN)
		}
		p := graph.MakePolicy(h, true) // NCCL_PXN_DISABLE=1
		if p.Via[1][0] != -1 || p.NICDirect[1][0] && far.PXN != nil && far.Type >= topo.PHB {
			t.Errorf("%s: without PXN: through %d, direct %t", name, p.Via[1][0], p.NICDirect[1][0])
		}
	}
}

// Peers of switches exchange traffic without the CPU (NCCL's ncclTopoAddPciLinks).
func TestPeersOfSwitchesJoinThem(t *testing.T) {
	broadcom := topo.PCIIdentity{Vendor: "0x1000", Device: "0xc010", SubsystemVendor: "0x1000", SubsystemDevice: "0xafff"}
	host := func(peers map[int]string, merge bool) *topo.Host {
		h := topotest.Build(1).Sw("0000:10:00.0", 0, "", "").Sw("0000:20:00.0", 0, "", "").Sw("0000:11:00.0", 0, "",
			"0000:10:00.0").
			GPU(0, "", "0000:11:00.0").GPU(0, "", "0000:20:00.0").Host()
		for i, peer := range peers {
			h.Switches[i].Peers = []string{peer}
		}
		if merge {
			h.Switches[0].Device, h.Switches[2].Device = broadcom, broadcom
		}
		return h
	}
	for name, tt := range map[string]struct {
		host *topo.Host
		want topo.PathType
		hops int
	}{
		"none":                  {host(nil, false), topo.PHB, 5},
		"peers":                 {host(map[int]string{0: "0000:20:00.0"}, false), topo.PXB, 4},
		"peers of the other":    {host(map[int]string{1: "0000:11:00.0"}, false), topo.PXB, 3},
		"both directions":       {host(map[int]string{0: "0000:20:00.0", 1: "0000:10:00.0"}, false), topo.PXB, 4},
		"an unknown switch":     {host(map[int]string{0: "0000:99:00.0"}, false), topo.PHB, 5},
		"itself":                {host(map[int]string{0: "0000:10:00.0"}, false), topo.PHB, 5},
		"a merged switch":       {host(map[int]string{2: "0000:20:00.0"}, true), topo.PXB, 3},
		"peer of a merged one":  {host(map[int]string{1: "0000:11:00.0"}, true), topo.PXB, 3},
		"a pair that is merged": {host(map[int]string{2: "0000:10:00.0"}, true), topo.PHB, 4},
	} {
		p := ncclfile.PairOf(t, graph.All(tt.host, topo.RulesNCCL), topotest.Bus(0), topotest.Bus(1))
		if p.Type != tt.want || p.Hops != tt.hops {
			t.Errorf("%s: %v, %d links; want %v, %d", name, p.Type, p.Hops, tt.want, tt.hops)
		}
		if smi := ncclfile.PairOf(t, graph.All(tt.host, topo.RulesSMI), topotest.Bus(0),
			topotest.Bus(1)); smi.Type != topo.PHB {
			t.Errorf("%s: nvidia-smi has PHB, got %v", name, smi.Type)
		}
	}
}
