package testbed

import (
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
	"github.com/peerlane/peerlane/topo/recorded"
)

// twoNICs reads the recorded host, and returns a function that copies it. GPUs 0, 1, 4 and 5 are
// beside a NIC, and the others are far.
func twoNICs(t *testing.T) func() *topo.Host {
	t.Helper()
	sysfs, proc, err := recorded.Unpack(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	h, err := reader.Sysfs(topo.Options{Sysfs: sysfs, Proc: proc})
	if err != nil {
		t.Fatal(err)
	}
	return func() *topo.Host {
		one := *h
		one.NICs = nil
		for _, n := range h.NICs {
			n.Ports = slices.Clone(n.Ports)
			one.NICs = append(one.NICs, n)
		}
		return &one
	}
}

// excluding returns a [plan] that excludes GPUs by index.
func excluding(gpus string) config.Plan {
	return config.Plan{Exclude: planner.Exclude{GPUs: strings.Fields(gpus)}}
}

// A host with real GPUs reaches other hosts through a planned lane with a NIC of the host or,
// without such a lane, through a lane that Outward makes.
func TestOutwardRealGPUsUsePlannedNIC(t *testing.T) {
	host := twoNICs(t)
	software := []planner.Assignment{{GPU: "1", Servers: []string{"0"}, NICs: []string{"software0"}},
		{GPU: "5", Servers: []string{"4"}, NICs: []string{"software1"}}}
	for name, c := range map[string]struct {
		own     config.Plan
		change  func(*topo.Host)
		made    []planner.Assignment
		gpu     int
		nics    string
		relayed bool
	}{
		"far GPUs":                   {gpu: 2, nics: "mlx5_0", relayed: true},
		"far GPUs, some excluded":    {own: excluding("2 3"), gpu: 7, nics: "mlx5_1", relayed: true},
		"one far GPU, which bounces": {own: excluding("2 3 6"), made: software, gpu: 0, nics: "mlx5_0"},
		"no far GPU":                 {own: excluding("2 3 6 7"), made: software, gpu: 0, nics: "mlx5_0"},
		"no NIC with an active port": {change: func(h *topo.Host) {
			h.NICs[0].Ports[0].State,
				h.NICs[1].Ports[0].State = "DOWN", "DOWN"
		}, made: software, gpu: 1, nics: "software0", relayed: true},
		"no NIC": {change: func(h *topo.Host) { h.NICs = nil }, made: software, gpu: 1,
			nics: "software0", relayed: true},
		"a lane as configuration says": {own: config.Plan{Lanes: []planner.Assignment{{GPU: "2", NICs: []string{"software0"}},
			{GPU: "3", Servers: []string{"4"}, NICs: []string{"mlx5_1"}}}}, gpu: 3, nics: "mlx5_1", relayed: true},
	} {
		t.Run(name, func(t *testing.T) {
			h := &Host{Topology: host(), Lanes: c.made}
			if c.change != nil {
				c.change(h.Topology)
			}
			gpu, plan, nic, err := h.Outward(c.own)
			if err != nil || nic != "" {
				t.Fatalf("NIC %q of the plan, %v", nic, err)
			}
			h.mustHave(t, gpu, plan, c.gpu, c.nics, c.relayed)
		})
	}
	h := &Host{Topology: host()}
	h.Topology.NICs = nil
	if gpu, _, _, err := h.Outward(config.Plan{}); err == nil {
		t.Errorf("a host without lanes reaches others by GPU %s", gpu)
	}
}

// Simulated GPUs use a NIC of the host, for any NICs of the recorded host.
func TestOutwardSimulatedGPUsUseHostNIC(t *testing.T) {
	host := twoNICs(t)
	active, down := []topo.Port{{Number: 1, State: "ACTIVE"}}, []topo.Port{{Number: 1, State: "DOWN"}}
	for name, c := range map[string]struct {
		nics     []topo.NIC
		excluded []string
		want     string
	}{
		"none": {want: "mlx5_0"}, // without a NIC, the host uses TCP
		"one":  {nics: []topo.NIC{{Name: "rocep0", Uverbs: "uverbs3", Ports: active}}, want: "rocep0"},
		"of software": {nics: []topo.NIC{{Name: "rxe0", Uverbs: "uverbs0", Software: true, Ports: active}},
			want: "rxe0"},
		"hardware first": {nics: []topo.NIC{{Name: "a", Uverbs: "uverbs0", Software: true, Ports: active},
			{Name: "b", Uverbs: "uverbs1", Ports: active}}, want: "b"},
		"no cable": {nics: []topo.NIC{{Name: "a", Uverbs: "uverbs0", Ports: down},
			{Name: "b", Uverbs: "uverbs1", Ports: active}}, want: "b"},
		"no character node": {nics: []topo.NIC{{Name: "a", Ports: active}}, want: "mlx5_0"},
		"EFA": {nics: []topo.NIC{{Name: "a", Uverbs: "uverbs0", Protocol: "EFA", Ports: active}},
			want: "mlx5_0"},
		"refused": {nics: []topo.NIC{{Name: "a", Uverbs: "uverbs0", Reason: "it is broken", Ports: active}},
			want: "mlx5_0"},
		"excluded": {nics: []topo.NIC{{Name: "a", Uverbs: "uverbs0", Ports: active},
			{Name: "b", Uverbs: "uverbs1", Ports: active}}, excluded: []string{"a"}, want: "b"},
	} {
		t.Run(name, func(t *testing.T) {
			h := &Host{Topology: host()}
			gpu, plan, nic, err := h.outwardNIC(&topo.Host{NICs: c.nics}, c.excluded)
			if err != nil {
				t.Fatal(err)
			}
			if ofHost := c.want != "mlx5_0"; ofHost != (nic == c.want) {
				t.Errorf("outwardNIC chose %q", nic)
			}
			h.mustHave(t, gpu, plan, 2, c.want, true)
		})
	}
}

// mustHave checks the lane of a plan.
func (h *Host) mustHave(t *testing.T, gpu string, plan config.Plan, index int, nics string, relayed bool) {
	t.Helper()
	p, err := planner.Make(h.Topology, config.Config{Plan: plan}.PlannerConfig())
	if err != nil {
		t.Fatal(err)
	}
	lane, err := p.Lane(gpu)
	if err != nil {
		t.Fatal(err)
	}
	if g, err := p.GPU(gpu); err != nil || g.Index != index || !slices.Equal(lane.NICs, strings.Fields(nics)) ||
		lane.Relay != relayed {
		t.Errorf("GPU %d (%v), whose lane is %+v; want GPU %d, %s, relayed: %t", g.Index, err, lane, index, nics, relayed)
	}
}
