package planner

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

func TestRoundedMixHasWholeWeights(t *testing.T) {
	for _, tt := range []struct {
		name string
		m    mix
		want mix
	}{
		{"one", mix{{3, 0.4}}, mix{{3, 1}}},
		{"equal", mix{{0, 0.5}, {1, 0.5}}, mix{{0, 1}, {1, 1}}},
		{"two to one", mix{{0, 1}, {1, 2}}, mix{{1, 2}, {0, 1}}},
		{"three to two", mix{{0, 0.6}, {1, 0.4}}, mix{{0, 3}, {1, 2}}},
		{"a share below 1 of 1024", mix{{0, 1}, {1, 0.0005}}, mix{{0, 1}}},
		{"the order of equal weights", mix{{5, 1}, {2, 1}, {4, 1}}, mix{{2, 1}, {4, 1}, {5, 1}}},
	} {
		if diff := cmp.Diff(tt.want, rounded(tt.m), cmp.AllowUnexported(share1{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
	// Any mix: a sum of at most 1024. The largest share is off by 0.002; others grow by 1 % at most.
	for n := range 200 {
		m := mix{{0, 1}, {1, 0.01 + float64(n)/200}, {2, 0.02 + float64(n%17)/100}}
		out, sum := rounded(m), 0.0
		for _, s := range out {
			sum += s.weight
		}
		if sum > 1024 || sum != math.Trunc(sum) {
			t.Errorf("%v: the sum is %g", m, sum)
		}
		for i, s := range out {
			want := m[slices.IndexFunc(m, func(o share1) bool { return o.route == s.route })].weight / m.total()
			most := 1.01*want + 1e-8
			if i == 0 {
				most = want + 0.0021
			}
			if got := s.weight / sum; s.weight < 1 || got > most || got < want-0.0021 {
				t.Errorf("%v: route %d has %g of %g, want a share of %g", m, s.route, s.weight, sum, want)
			}
		}
	}
	if diff := cmp.Diff(mix{{0, 0.25}, {1, 0.75}}, mix{{0, 1}, {1, 3}}.scaled(),
		cmp.AllowUnexported(share1{})); diff != "" {
		t.Errorf("scaled (-want +got):\n%s", diff)
	}
	for _, tt := range [][3]int{{12, 18, 6}, {0, 5, 5}, {5, 0, 5}, {7, 3, 1}, {4, 4, 4}} {
		if got := gcd(tt[0], tt[1]); got != tt[2] {
			t.Errorf("gcd of %d and %d: %d", tt[0], tt[1], got)
		}
	}
}

func TestCompareRoughlyIgnoresRounding(t *testing.T) {
	for _, tt := range []struct {
		a, b float64
		want int
	}{{1, 1, 0}, {1, 1 + 1e-10, 0}, {1, 1 + 1e-8, -1}, {1 + 1e-8, 1, 1}, {0, 0, 0}, {0, 1e-30, -1}, {-1, 1, -1},
		{-1 - 1e-10, -1, 0},
		{-1, -2, 1}} {
		if got := compareRoughly(tt.a, tt.b); got != tt.want {
			t.Errorf("%g and %g: %d, want %d", tt.a, tt.b, got, tt.want)
		}
	}
	// NIC before path, path before server.
	for _, tt := range []struct {
		a, b busy
		want int
	}{
		{busy{1, topo.SYS, 9}, busy{2, topo.PIX, 1}, -1}, {busy{1, topo.PXB, 1}, busy{1, topo.PIX, 9}, 1},
		{busy{1, topo.PIX, 1}, busy{1, topo.PIX, 2}, -1}, {busy{1, topo.PIX, 1}, busy{1, topo.PIX, 1}, 0},
	} {
		if got := tt.a.compare(tt.b); got != tt.want {
			t.Errorf("%+v and %+v: %d, want %d", tt.a, tt.b, got, tt.want)
		}
	}
	for _, tt := range []struct {
		a, b merit
		want int
	}{
		{merit{over: true, alone: 9}, merit{alone: 1}, -1}, {merit{alone: 2}, merit{over: true, alone: 9}, 1},
		{merit{alone: 1}, merit{alone: 1.02}, -1}, {merit{alone: 1, crossings: 2}, merit{alone: 1.005, crossings: 1}, -1},
		{merit{crossings: 1, members: 9}, merit{crossings: 2, members: 1}, 1},
		{merit{members: 1, busiest: 9}, merit{members: 2}, 1},
		{merit{busiest: 1, cost: 9}, merit{busiest: 2}, 1}, {merit{cost: 1}, merit{cost: 2}, 1}, {merit{}, merit{}, 0},
	} {
		if got := tt.a.compare(tt.b); got != tt.want {
			t.Errorf("%+v and %+v: %d, want %d", tt.a, tt.b, got, tt.want)
		}
	}
}

func TestSmallestFindsFirstSuitingValue(t *testing.T) {
	for limit, want := range map[float64]float64{0: 1, 1: 1, 2.5: 3, 3: 3, 7: 8, 9: 8} {
		values := []float64{8, 3, 1, 3, 5}
		if got := smallest(values, func(v float64) bool { return v >= limit }); got != want {
			t.Errorf("at least %g: %g, want %g", limit, got, want)
		}
	}
}

// staged and direct are options; the servers of a direct option are the GPU itself.
func staged(servers ...int) *option {
	return &option{kind: KindStaged, worst: topo.SYS, servers: servers}
}
func direct(g int) *option { return &option{kind: KindDirect, worst: topo.PIX, servers: []int{g}} }

func TestGroupsJoinNICsWithCommonServers(t *testing.T) {
	bounce := &option{kind: KindBounce, worst: topo.SYS}
	for name, tt := range map[string]struct {
		options [][]*option // [lane][NIC]
		same    [][]int     // NICs of a group
		none    []int       // NICs without a group
		overlap bool
	}{
		"separate":          {[][]*option{{staged(0), staged(1)}}, [][]int{{0}, {1}}, nil, false},
		"common":            {[][]*option{{staged(0, 1), staged(0, 1)}}, [][]int{{0, 1}}, nil, false},
		"partly common":     {[][]*option{{staged(0, 1), staged(1, 2)}}, [][]int{{0, 1}}, nil, true},
		"joined by a third": {[][]*option{{staged(0), staged(1), staged(0, 1)}}, [][]int{{0, 1, 2}}, nil, true},
		"direct":            {[][]*option{{direct(0), direct(0)}}, nil, []int{0, 1}, false},
		"direct and staged": {[][]*option{{direct(0), nil}, {staged(0), staged(1)}}, [][]int{{0}, {1}}, nil, false},
		"direct in groups":  {[][]*option{{direct(0), direct(0)}, {staged(0), staged(1)}}, [][]int{{0}, {1}}, nil, true},
		"bounce":            {[][]*option{{bounce, bounce}}, nil, []int{0, 1}, false},
		"bounce and staged": {[][]*option{{bounce, nil}, {staged(0), nil}}, [][]int{{0}}, []int{1}, true},
		"bounce beside":     {[][]*option{{nil, bounce}, {staged(0), nil}}, [][]int{{0}}, []int{1}, false},
	} {
		s := &spreading{option: tt.options, rate: slices.Repeat([]float64{1}, len(tt.options[0])), onGPU: make([]float64, 3),
			link: []float64{1, 1, 1}}
		group, count := s.groups()
		seen := map[int]bool{}
		for _, nics := range tt.same {
			g := group[nics[0]]
			if g < 0 || g >= count || seen[g] {
				t.Errorf("%s: groups %v of %d", name, group, count)
			}
			seen[g] = true
			for _, n := range nics {
				if group[n] != g {
					t.Errorf("%s: groups %v, want %v together", name, group, nics)
				}
			}
		}
		for _, n := range tt.none {
			if group[n] != -1 {
				t.Errorf("%s: NIC %d has group %d", name, n, group[n])
			}
		}
		if got := s.overlap(group, s.groupServers(group, count)); got != tt.overlap {
			t.Errorf("%s: overlap %t, want %t", name, got, tt.overlap)
		}
	}
}

func TestGroupServersHaveOwnLoad(t *testing.T) {
	s := &spreading{option: [][]*option{{direct(0), direct(0)}, {staged(0, 1), nil}}, rate: []float64{1, 1},
		onGPU: []float64{0.5, 3},
		link:  []float64{2, 4}}
	group, count := s.groups()
	servers := s.groupServers(group, count)
	if diff := cmp.Diff(map[int]float64{0: 1.5, 1: 3}, servers[group[0]]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	// 4 lanes cross each of 2 servers 4 times: (1.5+4)/2 and (3+4)/4.
	for lanes, want := range map[int]float64{0: 0.75, 4: 2.75} {
		if got := s.groupBusy(servers[group[0]], lanes); got != want {
			t.Errorf("%d lanes: %g, want %g", lanes, got, want)
		}
	}
	if got := s.direct(group, group[0]); got != 1 {
		t.Errorf("%d direct lanes", got)
	}
}

// Two flows share a link of capacity 1; a third has a link of its own.
func TestMaxMinFairSolvesSmallPrograms(t *testing.T) {
	for name, tt := range map[string]struct {
		p       program
		amounts []float64
		slowest float64
	}{
		"one": {program{rows: 1, flows: 1, routes: []programRoute{{0, load{{0, 1}}, 1}}}, []float64{1}, 1},
		"shared": {program{rows: 2, flows: 3, routes: []programRoute{{0, load{{0, 1}}, 1}, {1, load{{0, 1}}, 1},
			{2, load{{1, 1}}, 1}}},
			[]float64{0.5, 0.5, 1}, 0.5},
		"weights": {program{rows: 1, flows: 2, routes: []programRoute{{0, load{{0, 1}}, 1}, {1, load{{0, 3}}, 1}}},
			[]float64{0.25, 0.25}, 0.25},
		"the cheaper route": {program{rows: 2, flows: 1, routes: []programRoute{{0, load{{0, 1}}, 2}, {0, load{{0, 1}}, 1}}},
			[]float64{0, 1}, 1},
		"two routes": {program{rows: 2, flows: 1, routes: []programRoute{{0, load{{0, 1}}, 2}, {0, load{{1, 2}}, 1}}},
			[]float64{1, 0.5}, 1.5},
		"a detour for the other": {program{rows: 2, flows: 2,
			routes: []programRoute{{0, load{{0, 1}}, 1}, {1, load{{0, 1}}, 1}, {1, load{{1, 1}}, 5}}},
			[]float64{1, 0, 1}, 1},
	} {
		amounts, slowest := tt.p.maxMinFair()
		if diff := cmp.Diff(tt.amounts, amounts, cmpopts.EquateApprox(0, 1e-4)); diff != "" ||
			math.Abs(slowest-tt.slowest) > 1e-4 {
			t.Errorf("%s: slowest %g, want %g (-want +got):\n%s", name, slowest, tt.slowest, diff)
		}
	}
}

func TestShareStopsFlowsAtFullPipes(t *testing.T) {
	rates, full := share([]load{{{0, 1}, {1, 1}}, {{0, 1}}, {{1, 2}}, nil}, []float64{10, 30})
	if diff := cmp.Diff([]float64{5, 5, 12.5, 0}, rates); diff != "" {
		t.Errorf("rates (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]int{0, 0, 1, -1}, full); diff != "" {
		t.Errorf("pipes (-want +got):\n%s", diff)
	}
	for _, tt := range []struct {
		l    load
		want float64
	}{{nil, 0}, {load{{0, 1}, {1, 1}}, 10}, {load{{0, 1}, {1, 6}}, 5}, {load{{0, 0.5}}, 20}} {
		if got := alone(tt.l, []float64{10, 30}); got != tt.want {
			t.Errorf("%v alone: %g, want %g", tt.l, got, tt.want)
		}
	}
	for _, tt := range []struct {
		rates []float64
		want  float64
	}{{nil, 0}, {[]float64{0, 0}, 0}, {[]float64{5, 10}, 0.5}, {[]float64{10}, 1}} {
		if got := uniformity(tt.rates); got != tt.want {
			t.Errorf("%v: uniformity %g, want %g", tt.rates, got, tt.want)
		}
	}
}

// limits are the names and rates of the pipes of a lane's load.
func limits(n *network, c carried, in directions) map[string]float64 {
	got := map[string]float64{}
	for _, on := range n.load(c, in) {
		got[n.pipes[on.pipe].name] = math.Round(1000*n.pipes[on.pipe].rate/on.weight) / 1000
	}
	return got
}

// The rate of a pipe is divided by its load: below is the largest rate that each pipe allows.
func TestLoadNamesPipesOfRoute(t *testing.T) {
	b := topotest.TwoSockets()
	b.H.NICs[0].Link = 24
	h := b.Host()
	const near, far, other = 0, 2, 4
	n := newNetwork(sortedHost(h))
	for name, tt := range map[string]struct {
		c    carried
		in   directions
		want map[string]float64
	}{
		"direct": {carried{near, []part{{near, 0, 1}}}, sending, map[string]float64{"the port of mlx5_0 (sending)": 50,
			"the PCIe link of GPU 0 (upwards)": 48, "the PCIe link of mlx5_0 (downwards)": 24}},
		"receiving": {carried{near, []part{{near, 0, 1}}}, receiving, map[string]float64{"the port of mlx5_0 (receiving)": 50,
			"the PCIe link of GPU 0 (downwards)": 48, "the PCIe link of mlx5_0 (upwards)": 24}},
		"bounce": {carried{far, []part{{throughMemory, 0, 1}}}, sending,
			map[string]float64{"the port of mlx5_0 (sending)": 50,
				"the PCIe link of GPU 2 (upwards)": 48, "the PCIe link of switch 00aa:00:00.0 (downwards)": 48,
				"the PCIe link of mlx5_0 (downwards)": 24, "the CPU of NUMA node 0 (through its memory)": 32}},
		"staged": {carried{far, []part{{near, 0, 1}}}, sending, map[string]float64{"the port of mlx5_0 (sending)": 50,
			"the PCIe link of GPU 2 (upwards)": 39.74, "the PCIe link of switch 00aa:00:00.0 (downwards)": 39.74,
			"the PCIe link of GPU 0 (downwards)": 48, "the PCIe link of GPU 0 (upwards)": 48,
			"the PCIe link of mlx5_0 (downwards)": 24}},
		"staged elsewhere": {carried{other, []part{{near, 0, 1}}}, sending,
			map[string]float64{"the port of mlx5_0 (sending)": 50,
				"the PCIe link of GPU 4 (upwards)": 48, "the PCIe link of switch 00aa:01:00.0 (upwards)": 39.74,
				"the link from NUMA node 1 to 0": 22, "the PCIe link of switch 00aa:00:00.0 (downwards)": 39.74,
				"the PCIe link of GPU 0 (downwards)": 48, "the PCIe link of GPU 0 (upwards)": 48,
				"the PCIe link of mlx5_0 (downwards)": 24}},
		"none": {carried{near, nil}, bothDirections, map[string]float64{}},
	} {
		if diff := cmp.Diff(tt.want, limits(n, tt.c, tt.in)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestLinkNamesEnds(t *testing.T) {
	b := topotest.Build(2).GPU(0, "", "").GPU(0, "", "").GPU(1, "", "").Nvswitches()
	h := b.Host()
	h.GPUs[0].NVLinks = append(h.GPUs[0].NVLinks, topo.NVLink{Peer: topotest.Bus(1), Count: 1, Bandwidth: 20})
	h.GPUs[1].NVLinks = append(h.GPUs[1].NVLinks, topo.NVLink{Peer: topotest.Bus(0), Count: 1, Bandwidth: 25})
	h.GPUs[2].C2C = 400
	n := newNetwork(sortedHost(h))
	gpu := func(i int) graph.NodeID { return graph.NodeID{Kind: graph.GPUNode, Name: topotest.Bus(i)} }
	nvswitches := graph.NodeID{Kind: graph.NVSwitchNode}
	for _, tt := range []struct {
		a, b graph.NodeID
		name string
		rate float64
		pcie bool
	}{
		{graph.CPUID("", 0), graph.CPUID("", 1), "the link from NUMA node 0 to 1", 22, false},
		{gpu(0), gpu(1), "the NVLinks from GPU 0 to GPU 1", 25, false},
		{gpu(0), nvswitches, "the NVLinks from GPU 0 to NVSwitches", 370.8, false},
		{nvswitches, gpu(2), "the NVLinks from NVSwitches to GPU 2", 370.8, false},
		{gpu(2), graph.CPUID("", 1), "the chip-to-chip link of GPU 2 (to the CPU)", 400, false},
		{graph.CPUID("", 1), gpu(2), "the chip-to-chip link of GPU 2 (from the CPU)", 400, false},
		{gpu(0), graph.CPUID("", 0), "the PCIe link of GPU 0 (upwards)", 48, true},
		{graph.CPUID("", 0), gpu(0), "the PCIe link of GPU 0 (downwards)", 48, true},
	} {
		if name, rate, pcie := n.link(tt.a, tt.b); name != tt.name || rate != tt.rate || pcie != tt.pcie {
			t.Errorf("%v to %v: %q, %g, %t; want %q, %g, %t", tt.a, tt.b, name, rate, pcie, tt.name, tt.rate, tt.pcie)
		}
	}
}

func TestWordsOfPlanAreListed(t *testing.T) {
	for want, indices := range map[string][]int{"no GPU": nil, "GPU 3": {3}, "GPUs 0 and 2": {0, 2},
		"GPUs 0, 1 and 4": {0, 1, 4}} {
		if got := gpuNames(indices); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	var names []string
	for i := range 10 {
		names = append(names, fmt.Sprint(i))
	}
	for n, want := range map[int]string{1: "0", 2: "0 and 1", 8: "0, 1, 2, 3, 4, 5, 6 and 7",
		9:  "0, 1, 2, 3, 4, 5, 6, 7 and 1 more",
		10: "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"} {
		if got := some(names[:n]); got != want {
			t.Errorf("%d names: %q, want %q", n, got, want)
		}
	}
	for want, p := range map[string]topo.Path{"PIX, 48 GB/s": {Type: topo.PIX, Bandwidth: 48}, "SYS": {Type: topo.SYS},
		"DIS": {Type: topo.DIS, Bandwidth: 9}, "PHB, 12.35 GB/s": {Type: topo.PHB, Bandwidth: 12.345}} {
		if got := describe(p); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for want, ports := range map[string][]topo.Port{"": nil, "port 1 DOWN": {{Number: 1, State: "DOWN"}},
		"port 1 DOWN, port 2 ACTIVE": {{Number: 1, State: "DOWN"}, {Number: 2, State: "ACTIVE"}}} {
		if got := states(topo.NIC{Ports: ports}); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	c := Comparison{Relay: 10, Without: 10.05, RelayAlone: 20, WithoutAlone: 12}
	if got := c.String(); got != "while all lanes are busy 10 GB/s with the relay and 10.05 GB/s through host memory; "+
		"alone 20 GB/s "+
		"with the relay, 12 GB/s through host memory" {
		t.Errorf("equal rates: %q", got)
	}
	c.Without = 8
	if got := c.String(); got != "10 GB/s with the relay, 8 GB/s through host memory, while all lanes are busy" {
		t.Errorf("different rates: %q", got)
	}
}

func TestLaneIsRegularWithEqualMembers(t *testing.T) {
	for name, tt := range map[string]struct {
		members []Member
		want    bool
	}{
		"one":           {[]Member{{"s", "a", 1}}, true},
		"two NICs":      {[]Member{{"s", "a", 2}, {"s", "b", 2}}, true},
		"unequal":       {[]Member{{"s", "a", 2}, {"s", "b", 1}}, false},
		"four pairs":    {[]Member{{"s", "a", 1}, {"s", "b", 1}, {"u", "a", 1}, {"u", "b", 1}}, true},
		"three of four": {[]Member{{"s", "a", 1}, {"s", "b", 1}, {"u", "a", 1}}, false},
		"no server":     {[]Member{{"", "a", 1}, {"", "b", 1}}, true},
	} {
		l := Lane{GPU: "g"}
		l.setMembers(tt.members)
		if got := l.regular(); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestNICRateIsPortOrLink(t *testing.T) {
	h := topotest.Build(1).NIC("a", 0, "", "", topotest.Up(400)).NIC("b", 0, "", "", topotest.Up(800)).NIC("c", 0, "", "").
		NIC("d", 0, "", "", topotest.Up(400)).Host()
	h.NICs[2].Link, h.NICs[3].Link = 12, 0
	n := newNetwork(sortedHost(h))
	for i, want := range []float64{48, 48, 12, 50} {
		if got := n.nicRate(i); got != want {
			t.Errorf("%s: %g, want %g", h.NICs[i].Name, got, want)
		}
	}
	h.NICs[2].Link = 0
	if got := newNetwork(sortedHost(h)).nicRate(2); got != 5000 {
		t.Errorf("no rate: %g", got)
	}
}
