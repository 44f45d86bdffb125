package graph_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

// switches is a host with GPUs 0 and 1 at two levels of switches of NUMA node 0, GPU 2 at another host
// bridge of the node, and GPU 3 at node 1. NICs a and b are functions of a card, c and d one function.
func switches() *topotest.Builder {
	b := topotest.Build(2).
		Sw("0000:10:00.0", 0, "pci0000:10", "").Sw("0000:11:00.0", 0, "pci0000:10", "0000:10:00.0").
		GPU(0, "pci0000:10", "0000:10:00.0").GPU(0, "pci0000:10", "0000:11:00.0").GPU(0, "pci0000:20", "").
		GPU(1, "pci0000:80", "").
		NIC("a", 0, "pci0000:10", "0000:10:00.0", topotest.Up(400)).NIC("b", 0, "pci0000:10", "0000:10:00.0",
		topotest.Up(100)).
		NIC("c", 1, "pci0000:90", "", topotest.Up(800)).NIC("d", 1, "pci0000:90", "", topotest.Up(0))
	b.H.NICs[1].Card = b.H.NICs[0].BusID
	b.H.NICs[3].BusID = b.H.NICs[2].BusID
	return b
}

// linked is four GPUs of one NUMA node with links of the given kind, and a NIC.
func linked(change func(gpus []topo.GPU)) *topo.Host {
	b := topotest.Build(1)
	for range 4 {
		b.GPU(0, "pci0000:10", "")
	}
	b.NIC("a", 0, "pci0000:10", "", topotest.Up(0))
	change(b.H.GPUs)
	return b.Host()
}

// chain joins GPUs 0 to 1, 1 to 2 and 2 to 3.
func chain(gpus []topo.GPU) {
	for i := range 3 {
		gpus[i].NVLinks = append(gpus[i].NVLinks, topo.NVLink{Peer: gpus[i+1].BusID, Count: 1, Bandwidth: 80})
	}
}

func TestPathReasonNamesLinks(t *testing.T) {
	gpu := topotest.Bus
	nvlinkCPU := linked(func(gpus []topo.GPU) { gpus[0].NVLinkCPU, gpus[1].NVLinkCPU = 60, 70 })
	c2c := linked(func(gpus []topo.GPU) { gpus[0].C2C, gpus[1].C2C = 440, 450 })
	apart := switches().Host()
	apart.GPUs[3].Host = "other"
	bridges, unknown := switches().Host(), switches().Host()
	bridges.GPUs[2].C2C, unknown.GPUs[2].HostBridge = 440, ""
	matrix := switches().Host()
	matrix.Matrix = map[[2]string]topo.PathType{{gpu(0), gpu(1)}: topo.PXB}
	for name, tt := range map[string]struct {
		host     *topo.Host
		rules    topo.Rules
		from, to string
		path     topo.Path
		hops     int
		want     string
	}{
		"a switch": {switches().Host(), topo.RulesNCCL, gpu(0), "a", topo.Path{Type: topo.PIX, Bandwidth: 48}, 2,
			"PCIe switch 0000:10:00.0"},
		"switches": {switches().Host(), topo.RulesNCCL, gpu(0), gpu(1), topo.Path{Type: topo.PXB, Bandwidth: 48}, 3,
			"PCIe switches 0000:10:00.0, 0000:11:00.0"},
		"switches, back": {switches().Host(), topo.RulesNCCL, gpu(1), gpu(0), topo.Path{Type: topo.PXB, Bandwidth: 48}, 3,
			"PCIe switches 0000:11:00.0, 0000:10:00.0"},
		"a node": {switches().Host(), topo.RulesNCCL, gpu(0), gpu(2), topo.Path{Type: topo.PHB, Bandwidth: 48}, 3,
			"the host bridge of NUMA node 0"},
		"host bridges": {switches().Host(), topo.RulesSMI, gpu(0), gpu(2), topo.Path{Type: topo.NODE, Bandwidth: 48}, 3,
			"the host bridges pci0000:10 and pci0000:20 of NUMA node 0"},
		"plan": {switches().Host(), topo.RulesPlan, gpu(2), gpu(0), topo.Path{Type: topo.NODE, Bandwidth: 48}, 3,
			"the host bridges pci0000:20 and pci0000:10 of NUMA node 0"},
		"nodes": {switches().Host(), topo.RulesNCCL, gpu(0), gpu(3), topo.Path{Type: topo.SYS, Bandwidth: 22}, 4,
			"the link between NUMA nodes 0 and 1"},
		"nodes, back": {switches().Host(), topo.RulesNCCL, gpu(3), gpu(0), topo.Path{Type: topo.SYS, Bandwidth: 22}, 4,
			"the link between NUMA nodes 1 and 0"},
		"a port": {switches().Host(), topo.RulesNCCL, gpu(0), "b", topo.Path{Type: topo.PIX, Bandwidth: 12.5}, 2,
			"PCIe switch 0000:10:00.0; no faster than the port of b"},
		"a port, back": {switches().Host(), topo.RulesNCCL, "b", gpu(0), topo.Path{Type: topo.PIX, Bandwidth: 12.5}, 2,
			"PCIe switch 0000:10:00.0; no faster than the port of b"},
		"a fast port": {switches().Host(), topo.RulesNCCL, gpu(3), "c", topo.Path{Type: topo.PHB, Bandwidth: 48}, 2,
			"the host bridge of NUMA node 1"},
		"a card": {switches().Host(), topo.RulesNCCL, "a", "b", topo.Path{Type: topo.LOC, Bandwidth: 12.5}, 0,
			"they are PCI functions of one card"},
		"a card, SMI": {switches().Host(), topo.RulesSMI, "a", "b", topo.Path{Type: topo.PIX, Bandwidth: 12.5}, 0,
			"they are PCI functions of one card"},
		"a function": {switches().Host(), topo.RulesNCCL, "c", "d", topo.Path{Type: topo.LOC, Bandwidth: 100}, 0,
			"they are one PCI function"},
		"nothing":  {apart, topo.RulesNCCL, gpu(0), gpu(3), topo.Path{Type: topo.DIS}, 0, "nothing joins them"},
		"a matrix": {matrix, topo.RulesNCCL, gpu(0), gpu(1), topo.Path{Type: topo.PXB}, 0, "according to the matrix"},
		"no cell":  {matrix, topo.RulesNCCL, gpu(1), gpu(0), topo.Path{Type: topo.DIS}, 0, "according to the matrix"},
		"NVSwitches": {topotest.Build(1).GPU(0, "p", "").GPU(0, "p", "").Nvswitches().Host(), topo.RulesNCCL, gpu(0),
			gpu(1), topo.Path{Type: topo.NVL, Bandwidth: 370.8}, 2, "NVLink through NVSwitches"},
		"NVLink": {linked(chain), topo.RulesNCCL, gpu(0), gpu(1), topo.Path{Type: topo.NVL, Bandwidth: 80}, 1,
			"NVLink"},
		"NVLink, back": {linked(chain), topo.RulesNCCL, gpu(1), gpu(0), topo.Path{Type: topo.NVL, Bandwidth: 80}, 1,
			"NVLink"},
		"a GPU": {linked(chain), topo.RulesNCCL, gpu(0), gpu(2), topo.Path{Type: topo.NVB, Bandwidth: 80}, 2,
			"NVLink through GPU " + gpu(1)},
		"two GPUs": {linked(chain), topo.RulesNCCL, gpu(0), gpu(3), topo.Path{Type: topo.PHB, Bandwidth: 48}, 2,
			"the host bridge of NUMA node 0"},
		"NVLinks to a CPU": {nvlinkCPU, topo.RulesNCCL, gpu(0), gpu(1), topo.Path{Type: topo.NVL, Bandwidth: 60}, 2,
			"NVLink through the CPU of NUMA node 0"},
		"NVLinks, SMI": {nvlinkCPU, topo.RulesSMI, gpu(0), gpu(1), topo.Path{Type: topo.PHB, Bandwidth: 48}, 2,
			"the host bridge of NUMA node 0"},
		"C2C": {c2c, topo.RulesNCCL, gpu(0), gpu(1), topo.Path{Type: topo.C2C, Bandwidth: 440}, 2,
			"the chip-to-chip link"},
		"C2C, SMI": {c2c, topo.RulesSMI, gpu(0), gpu(1), topo.Path{Type: topo.PHB, Bandwidth: 48}, 2,
			"the host bridge of NUMA node 0"},
		"C2C and PCIe": {c2c, topo.RulesPlan, gpu(0), "a", topo.Path{Type: topo.P2C, Bandwidth: 48}, 2,
			"the host bridge of NUMA node 0"},
		"C2C, from a NIC": {c2c, topo.RulesPlan, "a", gpu(0), topo.Path{Type: topo.P2C, Bandwidth: 48}, 2,
			"the host bridge of NUMA node 0"},
		"C2C to a GPU": {c2c, topo.RulesPlan, gpu(0), gpu(2), topo.Path{Type: topo.PHB, Bandwidth: 48}, 2,
			"the host bridge of NUMA node 0"},
		"C2C from a GPU": {c2c, topo.RulesPlan, gpu(2), gpu(0), topo.Path{Type: topo.PHB, Bandwidth: 48}, 2,
			"the host bridge of NUMA node 0"},
		"C2C and bridges": {bridges, topo.RulesPlan, gpu(2), "a", topo.Path{Type: topo.P2C, Bandwidth: 48}, 3,
			"the host bridge of NUMA node 0"},
		"nodes, SMI": {switches().Host(), topo.RulesSMI, gpu(0), gpu(3), topo.Path{Type: topo.SYS, Bandwidth: 22}, 4,
			"the link between NUMA nodes 0 and 1"},
		"no bridge": {unknown, topo.RulesSMI, gpu(0), gpu(2), topo.Path{Type: topo.PHB, Bandwidth: 48}, 3,
			"the host bridge of NUMA node 0"},
		"no bridge, back": {unknown, topo.RulesSMI, gpu(2), gpu(0), topo.Path{Type: topo.PHB, Bandwidth: 48}, 3,
			"the host bridge of NUMA node 0"},
		"no C2C": {c2c, topo.RulesPlan, gpu(2), "a", topo.Path{Type: topo.PHB, Bandwidth: 48}, 2,
			"the host bridge of NUMA node 0"},
	} {
		want := graph.Pair{From: tt.from, To: tt.to, Path: tt.path, Hops: tt.hops, Reason: tt.want}
		for form, pairs := range map[string][]graph.Pair{"pairs": graph.All(tt.host, tt.rules),
			"table": pairsOf(tt.host, graph.NewPathTable(tt.host, tt.rules))} {
			found := false
			for _, p := range pairs {
				if p.From != tt.from || p.To != tt.to {
					continue
				}
				found = true
				p.PXN, p.Policy, p.FromHost, p.ToHost = nil, nil, "", ""
				if diff := cmp.Diff(want, p); diff != "" {
					t.Errorf("%s, %s (-want +got):\n%s", name, form, diff)
				}
			}
			if !found {
				t.Errorf("%s, %s: no pair", name, form)
			}
		}
	}
}

func TestNodeNamesKind(t *testing.T) {
	for want, id := range map[string]graph.NodeID{
		"NUMA node 3":         graph.CPUID("", 3),
		"switch 0000:10:00.0": {Kind: graph.SwitchNode, Name: "0000:10:00.0"},
		"NVSwitches":          {Kind: graph.NVSwitchNode},
		"GPU 0000:01:00.0":    {Kind: graph.GPUNode, Name: "0000:01:00.0"},
		"NIC 0000:02:00.0":    graph.NICID(topo.NIC{Name: "a", BusID: "0000:02:00.0"}),
		"NIC a":               graph.NICID(topo.NIC{Name: "a"}),
		"NIC 0000:03:00.0":    graph.NICID(topo.NIC{Name: "a", BusID: "0000:02:00.0", Card: "0000:03:00.0"}),
	} {
		if got := id.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestPathToItselfIsLOC(t *testing.T) {
	for _, rules := range []topo.Rules{topo.RulesNCCL, topo.RulesSMI, topo.RulesPlan} {
		h := switches().Host()
		finder := graph.NewPathFinder(h, rules)
		for _, e := range graph.Devices(h) {
			if p := finder.To(e)(e); p.Type != topo.LOC {
				t.Errorf("%s, %s: %v", rules, e.Name, p.Type)
			}
		}
	}
	for _, n := range []topo.NIC{{Name: "a"}, {Name: "a", BusID: "0000:02:00.0"}} {
		if id := graph.NICID(n); id.Kind != graph.NICNode {
			t.Errorf("%+v", id)
		}
	}
}

func TestToNICsAgreesWithAll(t *testing.T) {
	h := switches().Host()
	for _, g := range h.GPUs {
		var want []graph.Pair
		for _, p := range graph.All(h, topo.RulesPlan) {
			if p.From == g.BusID && len(p.To) == 1 { // a NIC
				p.Policy, p.PXN = nil, nil
				want = append(want, p)
			}
		}
		if diff := cmp.Diff(want, graph.ToNICs(h, g, h.NICs)); diff != "" || len(want) != 4 {
			t.Errorf("GPU %d, %d pairs (-all +got):\n%s", g.Index, len(want), diff)
		}
	}
}

func TestRouteHasNodesOfPath(t *testing.T) {
	h := switches().Host()
	ends := graph.Devices(h)
	finder := graph.NewPathFinder(h, topo.RulesNCCL)
	pathTo := finder.To(ends[3])
	kept, near := finder.PathTree(), pathTo(ends[1])
	route := near.Route(kept)
	finder.To(ends[0]) // another search
	var got []string
	for _, n := range route.Nodes() {
		got = append(got, n.String())
	}
	want := []string{"GPU " + topotest.Bus(1), "switch 0000:11:00.0", "switch 0000:10:00.0", "NUMA node 0", "NUMA node 1",
		"GPU " + topotest.Bus(3)}
	if diff := cmp.Diff(want, got); diff != "" || route.Type != topo.SYS {
		t.Errorf("%v (-want +got):\n%s", route.Type, diff)
	}
	h.GPUs[3].Host = "other"
	ends = graph.Devices(h)
	finder = graph.NewPathFinder(h, topo.RulesNCCL)
	pathTo = finder.To(ends[3])
	if nodes := pathTo(ends[1]).Route(finder.PathTree()).Nodes(); nodes != nil {
		t.Errorf("without a path: %v", nodes)
	}
	h.Matrix = map[[2]string]topo.PathType{{topotest.Bus(1), topotest.Bus(3)}: topo.PHB}
	finder = graph.NewPathFinder(h, topo.RulesNCCL)
	pathTo = finder.To(ends[3])
	if route := pathTo(ends[1]).Route(finder.PathTree()); route.Nodes() != nil || route.Type != topo.PHB {
		t.Errorf("of a matrix: %v", route)
	}
}

// Devices of one parent with equal links share a row of the table.
func TestTableTwinsShareRow(t *testing.T) {
	b := topotest.Build(1).Sw("0000:10:00.0", 0, "pci0000:10", "").
		GPU(0, "pci0000:10", "0000:10:00.0").GPU(0, "pci0000:10", "0000:10:00.0").GPU(0, "pci0000:10", "0000:10:00.0").
		GPU(0, "pci0000:10", "").
		NIC("a", 0, "pci0000:10", "0000:10:00.0", topotest.Up(400)).NIC("b", 0, "pci0000:10", "0000:10:00.0",
		topotest.Up(400)).
		NIC("c", 0, "pci0000:10", "0000:10:00.0", topotest.Up(200)).
		NIC("d", 0, "pci0000:10", "0000:10:00.0", topotest.Up(400)).NIC("e", 0, "pci0000:10", "0000:10:00.0",
		topotest.Up(400))
	h := b.Host()
	h.GPUs[2].Link = 24
	h.NICs[4].BusID = h.NICs[3].BusID // one function
	table := graph.NewTable(h, topo.RulesNCCL)
	var got []int
	for i := range len(h.GPUs) + len(h.NICs) {
		got = append(got, table.First(i))
	}
	if diff := cmp.Diff([]int{0, 0, 2, 3, 4, 4, 6, 7, 8}, got); diff != "" {
		t.Errorf("first devices of a row (-want +got):\n%s", diff)
	}
}

func TestBetweenNameOfSeveralHostsNeedsHost(t *testing.T) {
	b := topotest.Build(1).GPU(0, "", "").GPU(0, "", "").NIC("a", 0, "", "").NIC("a", 0, "", "").NIC("b", 0, "", "")
	h := b.Host()
	h.CPUs = append(h.CPUs, topo.CPU{Host: "0x2", Socket: 22})
	for i := range h.CPUs[:1] {
		h.CPUs[i].Host = "0x1"
	}
	h.GPUs[0].Host, h.GPUs[1].Host, h.GPUs[1].BusID = "0x1", "0x2", h.GPUs[0].BusID
	h.NICs[0].Host, h.NICs[1].Host, h.NICs[2].Host = "0x1", "0x2", "0x2"
	for _, tt := range []struct {
		from, to string
		want     topo.PathType
		err      *graph.DeviceError
	}{
		{"0x1/a", "0x1/0000:01:00.0", topo.PHB, nil},
		{"0x2/a", "b", topo.PHB, nil},
		{"0x1/a", "0x2/a", topo.DIS, nil},
		{"0x2/a", "0x2/01:00.0", topo.PHB, nil},
		{"a", "b", 0, &graph.DeviceError{Name: "a", Hosts: []string{"0x1", "0x2"}}},
		{"b", "0000:01:00.0", 0, &graph.DeviceError{Name: "0000:01:00.0", Hosts: []string{"0x1", "0x2"}}},
		{"b", "0x3/a", 0, &graph.DeviceError{Name: "0x3/a"}},
		{"b", "0x1/b", 0, &graph.DeviceError{Name: "0x1/b"}},
		{"b", "0x1/", 0, &graph.DeviceError{Name: "0x1/"}},
	} {
		p, err := graph.Between(h, tt.from, tt.to)
		if tt.err != nil {
			if diff := cmp.Diff(error(tt.err), err); diff != "" {
				t.Errorf("%s to %s (-want +got):\n%s", tt.from, tt.to, diff)
			}
			continue
		}
		if err != nil || p.Type != tt.want {
			t.Errorf("%s to %s: %v, %v; want %v", tt.from, tt.to, p, err, tt.want)
		}
	}
	loose := topotest.Build(1).GPU(0, "", "").NIC("a", 0, "", "").NIC("b", 0, "", "").NIC("c", 0, "", "").Host()
	loose.NICs[0].BusID, loose.NICs[2].BusID = "", loose.NICs[1].BusID
	if p, err := graph.Between(loose, loose.NICs[1].BusID, "01:00.0"); err != nil || p.Type != topo.PHB {
		t.Errorf("an address of two NICs: %v, %v", p, err)
	}
	for _, name := range []string{"x", ""} {
		if diff := cmp.Diff(error(&graph.DeviceError{Name: name}), second(graph.Between(loose, name, "b"))); diff != "" {
			t.Errorf("%q beside a NIC without an address (-want +got):\n%s", name, diff)
		}
	}
	loose.Matrix = map[[2]string]topo.PathType{}
	if p, err := graph.Between(loose, "a", "a"); err != nil || p.Type != topo.LOC {
		t.Errorf("a device of a matrix to itself: %v, %v", p, err)
	}
	// The address of a GPU precedes the address of a NIC.
	one := topotest.Build(1).GPU(0, "", "").NIC("a", 0, "", "", topotest.Up(8)).Host()
	one.NICs[0].BusID = one.GPUs[0].BusID
	if p, err := graph.Between(one, "01:00.0", "a"); err != nil || p.Type != topo.PHB {
		t.Errorf("a GPU and a NIC with one address: %v, %v", p, err)
	}
	if p, err := graph.Between(switches().Host(), "00ff:00:00.0", topotest.Bus(0)); err != nil || p.Type != topo.PIX {
		t.Errorf("the address of a NIC: %v, %v", p, err)
	}
}

func second(_ topo.Path, err error) error { return err }

// Links to a GPU that the host lacks join no GPUs.
func TestNVLinksToAbsentGPUAreIgnored(t *testing.T) {
	h := topotest.Build(1).GPU(0, "", "").GPU(0, "", "").Host()
	for i := range h.GPUs {
		h.GPUs[i].NVLinks = []topo.NVLink{{Peer: "0000:99:00.0", Bandwidth: 80}}
	}
	if p, err := graph.Between(h, topotest.Bus(0), topotest.Bus(1)); err != nil || p.Type != topo.PHB {
		t.Errorf("%v, %v; want PHB", p, err)
	}
}

// The paths of a host without a NUMA node end at its devices.
func TestPathsWithoutNUMANodes(t *testing.T) {
	h := topotest.Build(0).GPU(0, "", "").GPU(0, "", "").NIC("a", 0, "", "").Host()
	if pairs := graph.All(h, topo.RulesNCCL); len(pairs) != 6 || pairs[0].Type != topo.PHB || pairs[0].Policy == nil {
		t.Errorf("%+v", pairs)
	}
}

func TestNVLinksOfOneDirectionCountForBoth(t *testing.T) {
	one, two := topotest.Bus(0), topotest.Bus(1)
	for name, tt := range map[string]struct {
		links             [2][]topo.NVLink
		forward, backward topo.Path
	}{
		"both": {[2][]topo.NVLink{{{Peer: two, Bandwidth: 40}}, {{Peer: one, Bandwidth: 60}}},
			topo.Path{Type: topo.NVL, Bandwidth: 60}, topo.Path{Type: topo.NVL, Bandwidth: 40}},
		"the first": {[2][]topo.NVLink{{{Peer: two, Bandwidth: 40}}, nil},
			topo.Path{Type: topo.NVL, Bandwidth: 40}, topo.Path{Type: topo.NVL, Bandwidth: 40}},
		"the second": {[2][]topo.NVLink{nil, {{Peer: one, Bandwidth: 60}}},
			topo.Path{Type: topo.NVL, Bandwidth: 60}, topo.Path{Type: topo.NVL, Bandwidth: 60}},
		"to the GPU itself": {[2][]topo.NVLink{{{Peer: one, Bandwidth: 40}}, nil},
			topo.Path{Type: topo.PHB, Bandwidth: 48}, topo.Path{Type: topo.PHB, Bandwidth: 48}},
		"to no GPU": {[2][]topo.NVLink{{{Peer: "0000:99:00.0", Bandwidth: 40}}, nil},
			topo.Path{Type: topo.PHB, Bandwidth: 48}, topo.Path{Type: topo.PHB, Bandwidth: 48}},
		"to NVSwitches": {[2][]topo.NVLink{{{Bandwidth: 40}}, {{Bandwidth: 60}}},
			topo.Path{Type: topo.NVL, Bandwidth: 40}, topo.Path{Type: topo.NVL, Bandwidth: 40}},
	} {
		h := topotest.Build(1).GPU(0, "", "").GPU(0, "", "").Host()
		h.GPUs[0].NVLinks, h.GPUs[1].NVLinks = tt.links[0], tt.links[1]
		for _, direction := range []struct {
			from, to string
			want     topo.Path
		}{{one, two, tt.forward}, {two, one, tt.backward}} {
			if got, err := graph.Between(h, direction.from, direction.to); err != nil || got != direction.want {
				t.Errorf("%s, from %s: %v, %v; want %v", name, direction.from, got, err, direction.want)
			}
		}
	}
}
