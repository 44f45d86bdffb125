package picture

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// outline lists the nodes of a tree, a line a node.
func outline(t *tree) (lines []string) {
	for _, r := range t.roots {
		lines = append(lines, strings.TrimSpace(r.host+" "+r.name))
		r.eachBelow(1, func(n *node, d int) {
			lines = append(lines, strings.TrimRight(strings.Repeat("  ", d)+n.name+" "+n.address, " "))
		})
	}
	return lines
}

// GPUs come before switches, NICs and memory; numbers have the order of numbers.
func TestTreeOrdersNodes(t *testing.T) {
	b := build(2)
	slices.Reverse(b.h.CPUs)
	b.sw("00aa:02:00.0", "", 0, gen(5)).sw("00aa:01:00.0", "", 0, gen(5)).sw("00aa:03:00.0", "", 0, gen(5)).
		sw("00aa:04:00.0", "00aa:03:00.0", 0, gen(5)).sw("00aa:05:00.0", "00aa:05:00.0", 1, gen(5)).
		gpu("", "00aa:01:00.0", 0, gen(5)).gpu("", "00aa:02:00.0", 0, gen(5)).gpu("", "", 0, gen(5)).gpu("", "gone", -1,
		gen(5)).
		nic("", 0, 400, gen(5)).nic("00aa:03:00.0", 0, 400, gen(5)).nic("", 0, 400, gen(5)).nic("00aa:05:00.0", 1, 400,
		gen(5))
	b.h.NICs[0].Name = "mlx5_10"
	slices.Reverse(b.h.GPUs)
	plan := &planner.Plan{Lanes: []planner.Lane{{GPU: gpu0, Kind: planner.KindBounce, NICs: []string{"mlx5_2", "gone"}}}}
	got := newTree(&b.h, plan)
	want := []string{
		"NUMA node 0", "  GPU 2 " + gpu2, "  PCIe switch 00aa:01:00.0", "    GPU 0 " + gpu0, "  PCIe switch 00aa:02:00.0",
		"    GPU 1 " + gpu1, "  PCIe switch 00aa:03:00.0", "    mlx5_1 0000:91:00.0", "  mlx5_2 0000:92:00.0",
		"  mlx5_10 0000:90:00.0",
		"  memory of NUMA node 0", "NUMA node 1", "  PCIe switch 00aa:05:00.0", "    mlx5_3 0000:93:00.0",
		"NUMA node unknown", "  GPU 3 0000:13:00.0", "", "  gone", "  host memory",
	}
	if diff := cmp.Diff(want, outline(got)); diff != "" || got.skipped != 1 {
		t.Errorf("%d switches left out (-want +got):\n%s", got.skipped, diff)
	}
	// Hosts are in the order of their names, then nodes.
	b = build(2)
	b.h.CPUs = append([]topo.CPU{{Host: "b"}, {Host: "a", NUMA: 1}, {Host: "a"}}, b.h.CPUs...)
	if diff := cmp.Diff([]string{"NUMA node 0", "NUMA node 1", "a NUMA node 0", "a NUMA node 1", "b NUMA node 0"},
		outline(newTree(&b.h, nil))); diff != "" {
		t.Errorf("hosts (-want +got):\n%s", diff)
	}
}

func TestSVGShapesShowParts(t *testing.T) {
	staged := planner.Lane{Kind: planner.KindStaged, Servers: []string{gpu1}, NICs: []string{"mlx5_0"}, Reason: "far"}
	bounce := planner.Lane{Kind: planner.KindBounce, NICs: []string{"mlx5_0", "mlx5_1"}, Reason: "far"}
	p := lanePicture(nil, staged, bounce, planner.Lane{Role: planner.RoleRefused})
	svg, c := string(p.SVG()), coordinate
	deck := p.tree.gpus[gpu0].x + 250
	end := func(l *lane, name string) float64 {
		i := slices.IndexFunc(l.stops, func(s *port) bool { return s.node.name == name })
		return l.stops[i].y
	}
	server, memory := end(p.lanes[0], "GPU 1"), end(p.lanes[1], "memory of NUMA node 0")
	want := []string{fmt.Sprintf("M%s %sh9v9h-9z", c(deck-4.5), c(server-4.5)),
		fmt.Sprintf("M%s %sl5.5 5.5l-5.5 5.5l-5.5 -5.5z", c(deck), c(memory-5.5))}
	got := values(elements(t, svg, "path", "stop"), "d")
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("marks (-want +got):\n%s", diff)
	}
	var stops []string
	for _, s := range p.lanes[1].stops {
		stops = append(stops, s.node.name)
	}
	if diff := cmp.Diff([]string{"GPU 1", "memory of NUMA node 0", "mlx5_0", "mlx5_1"}, stops); diff != "" {
		t.Errorf("devices of the bounce lane (-want +got):\n%s", diff)
	}
	// A staged lane, also that of the legends, is a double line.
	sample := p.legend.items[0]
	narrow := p.narrow.items[0]
	path := func(i legendItem, up float64) string {
		return fmt.Sprintf("M%s %sH%s", c(i.x), c(i.y-up), c(i.x+34))
	}
	if diff := cmp.Diff([]string{p.lanes[0].path, path(sample, 4), path(narrow, 9)},
		values(elements(t, svg, "path", "core"), "d")); diff != "" {
		t.Errorf("double lines (-want +got):\n%s", diff)
	}
	titles := values(elements(t, svg, "title", ""))
	for _, text := range []string{p.title, p.lanes[0].detail, p.lanes[1].detail, p.tree.gpus[gpu0].detail(""),
		p.tree.nics["mlx5_0"].detail(""),
		p.links[0].detail} {
		if !slices.Contains(titles, text) {
			t.Errorf("no tooltip %q", text)
		}
	}
}

func TestSVGMarksUnusableDevices(t *testing.T) {
	lane := planner.Lane{Kind: planner.KindDirect, NICs: []string{"mlx5_0"}}
	host := func(change func(h *topo.Host)) *topo.Host {
		b := build(1).gpu("", "", 0, gen(5)).nic("", 0, 400, gen(5))
		change(&b.h)
		return &b.h
	}
	for name, tt := range map[string]struct {
		host     *topo.Host
		lanes    []planner.Lane
		gpu, nic bool
	}{
		"usable":             {host(func(*topo.Host) {}), nil, false, false},
		"GPU with a reason":  {host(func(h *topo.Host) { h.GPUs[0].Reason = "x" }), nil, true, false},
		"pinned lane":        {host(func(h *topo.Host) { h.GPUs[0].Reason = "x" }), []planner.Lane{lane}, false, false},
		"refused":            {host(func(*topo.Host) {}), []planner.Lane{{Role: planner.RoleRefused}}, true, false},
		"NIC with a reason":  {host(func(h *topo.Host) { h.NICs[0].Reason = "x" }), nil, false, true},
		"NIC without a port": {host(func(h *topo.Host) { h.NICs[0].Ports[0].State = "DOWN" }), nil, false, true},
	} {
		plan := &planner.Plan{Lanes: tt.lanes}
		for i := range plan.Lanes {
			plan.Lanes[i].GPU = gpu0
		}
		svg := string(New(tt.host, plan, nil).SVG())
		for class, want := range map[string]bool{"node gpu off": tt.gpu, "node nic off": tt.nic, "node gpu": !tt.gpu,
			"node nic": !tt.nic} {
			if got := len(elements(t, svg, "g", class)) == 1; got != want {
				t.Errorf("%s: class %q: %t, want %t", name, class, got, want)
			}
		}
	}
}

func TestPageRowDescribesLane(t *testing.T) {
	sys, pix := &topo.Path{Type: topo.SYS}, &topo.Path{Type: topo.PIX}
	e := &planner.Estimate{GPUs: []planner.GPUEstimate{{GPU: gpu0, Limit: "the port", Rates: planner.Rates{
		RouteRates: planner.RouteRates{Relay: 50, NCCL: 25, HostMemory: 12.5},
		Alone:      planner.RouteRates{Relay: 48, NCCL: 24, HostMemory: 11.5}}}}}
	figures := &rates{"50", "25", "12.5", "48", "24", "11.5", "the port"}
	for name, tt := range map[string]struct {
		lane     planner.Lane
		estimate *planner.Estimate
		want     row
	}{
		"direct": {planner.Lane{Kind: planner.KindDirect, NICs: []string{"mlx5_0", "mlx5_1"}, Role: planner.RoleNear,
			Path: topo.PIX, Reason: "r"}, e,
			row{GPU: "0", Role: "near", Kind: "direct", NICs: "mlx5_0 and mlx5_1", Rail: "0", Path: "PIX", Rates: figures,
				Reason: "r"}},
		"staged": {planner.Lane{Kind: planner.KindStaged, Servers: []string{gpu1}, NICs: []string{"mlx5_0"},
			Role: planner.RoleFar, Rail: 3, Path: topo.SYS, Copy: sys, Network: pix, Pinned: true}, nil,
			row{GPU: "0", Role: "far", Kind: "staged", NICs: "mlx5_0", Rail: "3", Path: "SYS", Through: "GPU 1",
				Legs: "SYS + PIX", Pinned: true}},
		"bounce": {planner.Lane{Kind: planner.KindBounce, NICs: []string{"mlx5_0"}, Role: planner.RoleFar, Rail: -1,
			Path: topo.DIS, Network: pix}, nil,
			row{GPU: "0", Role: "far", Kind: "bounce", NICs: "mlx5_0", Through: "host memory", Legs: "PIX"}},
	} {
		tt.want.Address = gpu0
		p := lanePicture(tt.estimate, tt.lane)
		if diff := cmp.Diff(tt.want, p.row(p.lanes[0])); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
