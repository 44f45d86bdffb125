package health

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// node is a host with two NICs, and a clock.
type node struct {
	*Monitor
	layout paths.Layout
	sysfs  string
	now    time.Time
	t      *testing.T
}

func newNode(t *testing.T) *node {
	n := &node{layout: paths.Layout{Root: t.TempDir()}, now: time.Date(2026, 11, 26, 0, 0, 0, 0, time.UTC), t: t}
	n.sysfs = filepath.Join(n.layout.Root, "sys")
	plan := &planner.Plan{
		Version: planner.Version, Source: topo.Source{Sysfs: n.sysfs},
		GPUs: []topo.GPU{{Index: 0, BusID: "0000:01:00.0", NUMA: -1}, {Index: 1, BusID: "0000:02:00.0", NUMA: -1}},
		NICs: []topo.NIC{{Name: "mlx5_0", BusID: "0000:03:00.0"}, {Name: "mlx5_1", BusID: "0000:04:00.0"}},
		Lanes: []planner.Lane{
			{GPU: "0000:01:00.0", Role: planner.RoleNear, Kind: planner.KindDirect, Servers: []string{},
				NICs: []string{"mlx5_0"}, Path: topo.PIX},
			{GPU: "0000:02:00.0", Role: planner.RoleNear, Kind: planner.KindDirect, Servers: []string{},
				NICs: []string{"mlx5_0", "mlx5_1"}, Path: topo.PIX},
		},
	}
	if err := os.MkdirAll(n.layout.State(), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := plan.Write(n.layout.PlanFile()); err != nil {
		t.Fatal(err)
	}
	n.port("mlx5_0", "4: ACTIVE")
	n.port("mlx5_1", "4: ACTIVE")
	n.Monitor = NewMonitor(n.layout, func() time.Time { return n.now })
	return n
}

func (n *node) port(nic, state string) {
	n.t.Helper()
	dir := filepath.Join(n.sysfs, "class/infiniband", nic, "ports/1")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "state"), []byte(state+"\n"), 0o644); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) observe() *Observation {
	n.t.Helper()
	o, err := n.Observe()
	if err != nil {
		n.t.Fatal(err)
	}
	return o
}

func keys(taints []resourceapi.DeviceTaint) (all []string) {
	for _, t := range taints {
		all = append(all, t.Key+":"+string(t.Effect))
	}
	return all
}

func (n *node) expect(first, second, shared []string) {
	n.t.Helper()
	ofLanes, all := Policy{}.Taints(n.observe())
	for _, c := range []struct {
		of        string
		got, want []string
	}{{"the first lane", keys(ofLanes["0000:01:00.0"]), first}, {"the second lane", keys(ofLanes["0000:02:00.0"]), second},
		{"lanes", keys(all), shared}} {
		if !slices.Equal(c.got, c.want) {
			n.t.Errorf("%s has the taints %v, and %v were expected", c.of, c.got, c.want)
		}
	}
}

const (
	cut      = "peerlane.dev/no-network:NoSchedule"
	degraded = "peerlane.dev/degraded:None"
	drain    = "peerlane.dev/drain:NoSchedule"
)

func TestInactivePortTaintsLanesAfterDelay(t *testing.T) {
	n := newNode(t)
	n.expect(nil, nil, nil)
	n.port("mlx5_0", "1: DOWN")
	n.expect(nil, nil, nil)
	n.now = n.now.Add(Delay - time.Second)
	n.expect(nil, nil, nil)
	n.now = n.now.Add(time.Second)
	n.expect([]string{cut}, []string{degraded}, []string{degraded})
	n.port("mlx5_1", "1: DOWN")
	n.expect([]string{cut}, []string{degraded}, []string{degraded})
	n.now = n.now.Add(Delay)
	n.expect([]string{cut}, []string{cut}, []string{cut})
	if m := n.observe().Message("0000:02:00.0"); m != "no active port on mlx5_0, mlx5_1" {
		t.Errorf("the message is %q", m)
	}
	n.port("mlx5_0", "4: ACTIVE")
	n.expect(nil, []string{degraded}, []string{degraded})
	n.port("mlx5_1", "4: ACTIVE")
	n.expect(nil, nil, nil)
}

func TestFlapsShorterThanDelayAddNoTaint(t *testing.T) {
	n := newNode(t)
	for range 10 {
		n.port("mlx5_0", "1: DOWN")
		n.expect(nil, nil, nil)
		n.now = n.now.Add(Delay - time.Second)
		n.port("mlx5_0", "4: ACTIVE")
		n.expect(nil, nil, nil)
		n.now = n.now.Add(time.Second)
	}
}

func TestMissingNICCutsItsLane(t *testing.T) {
	n := newNode(t)
	if err := os.RemoveAll(filepath.Join(n.sysfs, "class/infiniband/mlx5_0")); err != nil {
		t.Fatal(err)
	}
	n.observe()
	n.now = n.now.Add(Delay)
	n.expect([]string{cut}, []string{degraded}, []string{degraded})
}

func TestUnreadablePortCutsItsLane(t *testing.T) {
	n := newNode(t)
	state := filepath.Join(n.sysfs, "class/infiniband/mlx5_0/ports/1/state")
	if err := os.Remove(state); err != nil {
		t.Fatal(err)
	}
	n.observe()
	n.now = n.now.Add(Delay)
	n.expect(nil, nil, nil) // a software device
	if err := os.Mkdir(state, 0o755); err != nil {
		t.Fatal(err)
	}
	n.observe()
	n.now = n.now.Add(Delay)
	n.expect([]string{cut}, []string{degraded}, []string{degraded})
}

func TestDrainTaintsEveryDevice(t *testing.T) {
	n := newNode(t)
	if err := generation.DrainAll(n.layout); err != nil {
		t.Fatal(err)
	}
	n.expect([]string{drain}, []string{drain}, []string{drain})
	if n.observe().Healthy("0000:01:00.0") {
		t.Error("a drained lane is healthy")
	}
	if err := generation.ResumeAll(n.layout); err != nil {
		t.Fatal(err)
	}
	n.expect(nil, nil, nil)
}

func TestEvictGivesLostNetworkNoExecute(t *testing.T) {
	n := newNode(t)
	n.port("mlx5_0", "1: DOWN")
	n.observe()
	n.now = n.now.Add(Delay)
	ofLanes, _ := Policy{Evict: true}.Taints(n.observe())
	if got := keys(ofLanes["0000:01:00.0"]); !slices.Equal(got, []string{"peerlane.dev/no-network:NoExecute"}) {
		t.Errorf("the taints are %v", got)
	}
}

func TestUnreadablePlanGivesNoObservation(t *testing.T) {
	n := newNode(t)
	if err := os.WriteFile(n.layout.PlanFile(), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if o, err := n.Observe(); o != nil || err == nil {
		t.Errorf("%v, %v", o, err)
	}
}

func TestUnreadableDrainGivesNoObservation(t *testing.T) {
	n := newNode(t)
	if err := generation.DrainAll(n.layout); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(n.layout.State(), "drained.json"), 1); err != nil {
		t.Fatal(err)
	}
	if o, err := n.Observe(); o != nil || err == nil {
		t.Errorf("%v, %v", o, err)
	}
}

func TestHostIsUsableWithALaneThatHasNetworkAndNoDrain(t *testing.T) {
	plan := func(roles ...string) *planner.Plan {
		p := &planner.Plan{}
		for i, role := range roles {
			p.Lanes = append(p.Lanes, planner.Lane{GPU: string(rune('a' + i)), Role: role})
		}
		return p
	}
	noNetwork, less := Conditions{NoNetwork: ""}, Conditions{Degraded: ""}
	for _, c := range []struct {
		o    Observation
		want bool
	}{
		{Observation{Plan: plan(planner.RoleNear, planner.RoleFar)}, true},
		{Observation{Plan: plan(planner.RoleNear, planner.RoleFar), Drained: true}, false},
		{Observation{Plan: plan(planner.RoleNear, planner.RoleFar), Lanes: map[string]Conditions{"a": noNetwork, "b": less}},
			true},
		{Observation{Plan: plan(planner.RoleNear, planner.RoleFar),
			Lanes: map[string]Conditions{"a": noNetwork, "b": noNetwork}}, false},
		{Observation{Plan: plan(planner.RoleNear, planner.RoleRefused), Lanes: map[string]Conditions{"a": noNetwork}}, false},
		{Observation{Plan: plan(planner.RoleRefused)}, false},
		{Observation{Plan: plan()}, false},
	} {
		if got := c.o.Usable(); got != c.want {
			t.Errorf("%+v with %d lanes: usable is %v", c.o, len(c.o.Plan.Lanes), got)
		}
	}
}
