package hook

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

const (
	uuid0 = "GPU-00000000-0000-0000-0000-000000000000"
	uuid1 = "GPU-11111111-1111-1111-1111-111111111111"
	uuid9 = "GPU-99999999-9999-9999-9999-999999999999"
)

func testPlan(sysfs string) *planner.Plan {
	return &planner.Plan{
		Version: planner.Version,
		Source:  topo.Source{Kind: topo.SourceSysfs, Sysfs: sysfs},
		GPUs: []topo.GPU{
			{Index: 0, UUID: uuid0, BusID: "0000:17:00.0"},
			{Index: 1, UUID: uuid1, BusID: "0000:2a:00.0", Capability: 90, NVLinks: []topo.NVLink{{Count: 18}}},
			{Index: 2, BusID: "0000:3b:00.0"},
		},
		NICs: []topo.NIC{{Name: "mlx5_0", BusID: "0000:18:00.0", GUID: "a088:c203:00a1:40e0", Ports: []topo.Port{{Number: 1, State: "ACTIVE", RateGbps: 400}}}},
		Lanes: []planner.Lane{
			{GPU: "0000:17:00.0", Role: planner.RoleNear, NICs: []string{"mlx5_0"}},
			{GPU: "0000:2a:00.0", Role: planner.RoleFar, Relay: true, Servers: []string{"0000:17:00.0"}, NICs: []string{"mlx5_0"}},
			{GPU: "0000:3b:00.0", Role: planner.RoleRefused, Reason: "MIG is on"},
		},
	}
}

func TestLanes(t *testing.T) {
	got, err := Lanes(testPlan("/sys"), []string{uuid1 + "@0000:2A:00.0", "@0000:17:00.0"})
	if err != nil {
		t.Fatal(err)
	}
	near := launch.GPU{UUID: uuid0, BusID: "0000:17:00.0", Index: 0}
	nic := &launch.NIC{Name: "mlx5_0", GUID: 0xe040a10003c288a0, Mbps: 400000, Port: 1}
	want := []launch.Lane{
		{GPU: launch.GPU{UUID: uuid1, BusID: "0000:2a:00.0", Index: 1}, Role: "far", Relay: true, Servers: []launch.GPU{near}, NICs: []string{"mlx5_0"}, NIC: nic, PeerMbps: 2966400},
		{GPU: near, Role: "near", Servers: []launch.GPU{}, NICs: []string{"mlx5_0"}, NIC: nic},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// NICs reach a GPU's own memory where the plan says so, and not where the GPU is near them and
// the administrator has it bounce.
func TestLanesWhoseOwnMemoryNICsReach(t *testing.T) {
	for kind, want := range map[string]bool{planner.KindDirect: true, planner.KindBounce: false, planner.KindStaged: false, "": false} {
		plan := testPlan("/sys")
		plan.Lanes[0].Kind = kind
		lanes, err := Lanes(plan, []string{"@0000:17:00.0"})
		if err != nil || lanes[0].Direct != want {
			t.Errorf("kind %q: %+v, %v", kind, lanes, err)
		}
	}
}

// Each two GPUs, but for those whose pair is named already, and for one that can have
// no lane.
func TestPairsOfAPlan(t *testing.T) {
	plan := testPlan("/sys")
	plan.GPUs = append(plan.GPUs, topo.GPU{Index: 3, BusID: "0000:4c:00.0"})
	planned, err := PlannedPairs(plan, config.Default())
	if err != nil {
		t.Fatal(err)
	}
	words := func(list []launch.PairName) string {
		var all []string
		for _, n := range list {
			all = append(all, fmt.Sprintf("%d-%d", n.GPU.Index, n.Server.Index))
		}
		return strings.Join(all, " ")
	}
	if got := words(planned); got != "1-0" {
		t.Errorf("planned are %s", got)
	}
	if got := words(AllPairs(plan, planned)); got != "1-0 0-3 1-3" {
		t.Errorf("all are %s", got)
	}
}

func TestSpares(t *testing.T) {
	gpu := func(i int) topo.GPU { return topo.GPU{Index: i, BusID: fmt.Sprintf("0000:%02x:00.0", 16+i)} }
	id := func(i int) string { return gpu(i).BusID }
	plan := &planner.Plan{Version: planner.Version, Source: topo.Source{Kind: topo.SourceSysfs, Sysfs: "/sys"}}
	for i := range 8 {
		plan.GPUs = append(plan.GPUs, gpu(i))
	}
	staged := func(i int, nic string, servers ...int) planner.Lane {
		l := planner.Lane{GPU: id(i), Role: planner.RoleFar, Relay: true, NICs: []string{nic}}
		for _, s := range servers {
			l.Servers = append(l.Servers, id(s))
		}
		return l
	}
	plan.Lanes = []planner.Lane{
		{GPU: id(0), Role: planner.RoleNear, NICs: []string{"mlx5_0"}},
		staged(2, "mlx5_0", 0), staged(3, "mlx5_1", 4, 5), staged(6, "mlx5_0", 1), staged(7, "mlx5_0", 0),
	}
	plan.Lanes[4].Pinned = true
	spare := func(i int, nic string) launch.Spare { return launch.Spare{GPU: identity(gpu(i)), NICs: []string{nic}} }
	for _, c := range []struct {
		name     string
		lane     int
		excluded [][]string
		want     []launch.Spare
	}{
		{"beside its own NIC first", 2, nil, []launch.Spare{spare(1, "mlx5_0"), spare(4, "mlx5_1"), spare(5, "mlx5_1")}},
		{"not in an excluded pair", 2, [][]string{{"2", "1"}, {"mlx5_1", "5"}}, []launch.Spare{spare(4, "mlx5_1")}},
		{"none by configuration", 7, nil, nil},
		{"none of a near GPU", 0, nil, nil},
	} {
		lanes, err := Lanes(plan, []string{"@" + id(c.lane)})
		if err != nil {
			t.Fatal(err)
		}
		addSpares(plan, lanes, c.excluded)
		if diff := cmp.Diff(c.want, lanes[0].Spares); diff != "" {
			t.Errorf("%s (-want +got)\n%s", c.name, diff)
		}
	}
}

// A specification that no longer fits the plan is refused by what changed.
func TestLanesThatDoNotFitThePlan(t *testing.T) {
	for name, stale := range map[string][2]string{ // object and cause
		"@0000:99:00.0":         {"0000:99:00.0", "0000:99:00.0"},
		uuid0 + "@0000:2a:00.0": {uuid0, "0000:17:00.0"},
		uuid0 + "@0000:99:00.0": {uuid0, "0000:17:00.0"},
		uuid9 + "@0000:2a:00.0": {"0000:2a:00.0", uuid1},
	} {
		_, err := Lanes(testPlan("/sys"), []string{name})
		var f *fault.Error
		if !errors.As(err, &f) || f.Code != fault.StaleSpecification || f.Object != stale[0] || !strings.Contains(f.Cause.Error(), stale[1]) {
			t.Errorf("lane %q: %v; want %s of %s with the cause %q", name, err, fault.StaleSpecification, stale[0], stale[1])
		}
	}
	for name, says := range map[string]string{
		"0":                       "a lane is named as",
		"@":                       "no PCI address",
		"@0000:3b:00.0":           "MIG is on",
		uuid9 + "@0000:3b:00.0":   "MIG is on", // the plan does not know its UUID
		uuid1 + "@../../etc":      "no PCI address",
		uuid1 + "@0000:2a:00.0\n": "no PCI address",
	} {
		_, err := Lanes(testPlan("/sys"), []string{name})
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("lane %q: %v; it should say %q", name, err, says)
		}
	}
}

func TestPresent(t *testing.T) {
	sysfs := t.TempDir()
	plan := testPlan(sysfs)
	lanes, err := Lanes(plan, []string{"@0000:2a:00.0"})
	if err != nil {
		t.Fatal(err)
	}
	vendor := func(busID, text string) {
		dir := filepath.Join(sysfs, "bus/pci/devices", busID)
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "vendor"), []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(says ...string) {
		t.Helper()
		err := present(plan, lanes)
		for _, s := range append(says, again) {
			if err == nil || !strings.Contains(err.Error(), s) {
				t.Errorf("%v; it should say %q", err, s)
			}
		}
	}
	refused("GPU 1 (0000:2a:00.0)", "no such file")
	vendor("0000:2a:00.0", "0x10de\n")
	refused("GPU 0 (0000:17:00.0)") // its server
	vendor("0000:17:00.0", "0x8086\n")
	refused("GPU 0 (0000:17:00.0)", "0x8086")
	vendor("0000:17:00.0", "0x10de\n")
	if err := present(plan, lanes); err != nil {
		t.Error(err)
	}
}

func TestPresentNICs(t *testing.T) {
	sysfs := t.TempDir()
	plan := testPlan(sysfs)
	plan.NICs = []topo.NIC{{Name: "mlx5_0", Uverbs: "uverbs0"}, {Name: "mlx5_1", Uverbs: "uverbs1"}, {Name: "eth0", Ethernet: true}}
	ibdev := func(uverbs, name string) {
		dir := filepath.Join(sysfs, "class/infiniband_verbs", uverbs)
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "ibdev"), []byte(name+"\n"), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	lane := []launch.Lane{{NICs: []string{"mlx5_0", "eth0", "emulated0"}}}
	check := func(lanes []launch.Lane, names []string, says string) {
		t.Helper()
		err := presentNICs(plan, lanes, names)
		if says == "" && err != nil || says != "" && (err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), again)) {
			t.Errorf("%v; it should say %q", err, says)
		}
	}
	check(nil, []string{"mlx5_1"}, "no such file")
	ibdev("uverbs0", "mlx5_0")
	ibdev("uverbs1", "mlx5_1")
	check(lane, nil, "")
	check(lane, []string{"mlx5_1"}, "")
	check(nil, []string{"mlx5_9"}, "the plan has no NIC mlx5_9")
	check(nil, []string{"eth0"}, "the plan has no NIC eth0")
	check(nil, []string{"../../etc"}, "the plan has no NIC ../../etc")
	// Another order at another boot.
	ibdev("uverbs0", "mlx5_1")
	ibdev("uverbs1", "mlx5_0")
	check(lane, nil, "NIC mlx5_0 of the plan is not uverbs0: "+sysfs)
	check(nil, []string{"mlx5_1"}, "says mlx5_0")
}

func TestReadPlanTrustsNobodyElse(t *testing.T) {
	l := paths.New(t.TempDir())
	if _, err := readPlan(l); !errors.Is(err, fs.ErrNotExist) || !errors.Is(err, fault.UnreadablePlan) {
		t.Errorf("no plan: %v", err)
	}
	write := func(p *planner.Plan) {
		if err := errors.Join(l.Create(), p.Write(l.PlanFile())); err != nil {
			t.Fatal(err)
		}
	}
	write(testPlan("/sys"))
	if _, err := readPlan(l); err != nil {
		t.Error(err)
	}
	refused := func(says string, spoil, mend func() error) {
		t.Helper()
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		if _, err := readPlan(l); !errors.Is(err, fault.UntrustedFile) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v; it should say %q", err, says)
		}
		if err := mend(); err != nil {
			t.Fatal(err)
		}
	}
	mode := func(path string, mode os.FileMode) func() error { return func() error { return os.Chmod(path, mode) } }
	refused("mode 0664", mode(l.PlanFile(), 0o664), mode(l.PlanFile(), 0o644))
	refused("mode 0646", mode(l.PlanFile(), 0o646), mode(l.PlanFile(), 0o644))
	refused("mode 0770", mode(l.State(), 0o770), mode(l.State(), 0o700))
	other := filepath.Join(t.TempDir(), "plan.json")
	refused("no regular file",
		func() error { return errors.Join(os.Rename(l.PlanFile(), other), os.Symlink(other, l.PlanFile())) },
		func() error { return os.Rename(other, l.PlanFile()) })
	if os.Geteuid() == 0 {
		owner := func(path string, uid int) func() error { return func() error { return os.Chown(path, uid, -1) } }
		refused("belongs to uid 1234", owner(l.PlanFile(), 1234), owner(l.PlanFile(), 0))
		refused("belongs to uid 1234", owner(l.State(), 1234), owner(l.State(), 0))
	}
	file := testPlan("")
	file.Source = topo.Source{Kind: topo.SourceNCCLXML, File: "dgx.xml"}
	write(file)
	if _, err := readPlan(l); !errors.Is(err, fault.UnreadablePlan) || !strings.Contains(err.Error(), "dgx.xml") {
		t.Errorf("a plan from a file: %v", err)
	}
}

func TestReadState(t *testing.T) {
	s, err := ReadState(strings.NewReader(`{"ociVersion":"1.0.2-dev","id":"c","status":"creating","pid":42,"bundle":"/b","annotations":{"a":"b"}}`))
	if diff := cmp.Diff(State{ID: "c", Status: "creating", PID: 42, Bundle: "/b", Annotations: map[string]string{"a": "b"}}, s); diff != "" || err != nil {
		t.Errorf("%v (-want +got)\n%s", err, diff)
	}
	for _, text := range []string{"", "{", "[]", `{"pid":"1"}`} {
		if _, err := ReadState(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), "standard input") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// What runtimes say at other hooks means the host's process 1, or nobody.
func TestStateOfAnotherHookIsRefused(t *testing.T) {
	for _, test := range []struct {
		s  State
		ok bool
	}{
		{State{ID: "c", Status: "creating", PID: 42, Bundle: "/b"}, true}, // runc
		{State{ID: "c", Status: "created", PID: 42, Bundle: "/b"}, true},  // crun
		{State{ID: "c", Status: "creating", PID: 1, Bundle: "/b"}, false}, // runc at createContainer
		{State{ID: "c", Status: "created", PID: 0, Bundle: "/b"}, false},  // crun at createContainer
		{State{ID: "c", Status: "running", PID: 42, Bundle: "/b"}, false}, // crun at poststart
		{State{ID: "c", Status: "stopped", Bundle: "/b"}, false},
		{State{ID: "c", Status: "creating", PID: -1, Bundle: "/b"}, false},
		{State{ID: "c", Status: "creating", PID: 42}, false},
	} {
		if err := test.s.check(); (err == nil) != test.ok {
			t.Errorf("%+v: %v", test.s, err)
		}
	}
}

func TestCgroupRoot(t *testing.T) {
	for _, test := range []struct {
		mountinfo, root string
	}{
		{"25 19 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n", "/sys/fs/cgroup"},
		{"19 1 0:18 / /sys rw - sysfs sysfs rw\n34 25 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n", "/sys/fs/cgroup/unified"},
		{"34 25 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", ""},
		{"", ""},
	} {
		if root, ok := cgroupRoot(test.mountinfo); root != test.root || ok != (test.root != "") {
			t.Errorf("%q, %t for %q", root, ok, test.mountinfo)
		}
	}
}

func TestMergeKeepsTheFirstLaneOfAGPU(t *testing.T) {
	a, b := launch.Lane{GPU: launch.GPU{BusID: "a"}}, launch.Lane{GPU: launch.GPU{BusID: "b"}}
	changed := launch.Lane{GPU: launch.GPU{BusID: "a"}, Role: "near"}
	have := []launch.Lane{a}
	merged, more := merge(have, []launch.Lane{changed, b, b})
	if diff := cmp.Diff([]launch.Lane{a, b}, merged); diff != "" || !more {
		t.Errorf("changed: %v (-want +got)\n%s", more, diff)
	}
	// But that the container sees the server GPUs is news, once.
	seen := a
	seen.Copy = true
	for _, want := range []bool{true, false} {
		if merged, more = merge(merged, []launch.Lane{seen, b}); more != want {
			t.Errorf("changed: %v, want %v", more, want)
		}
		if diff := cmp.Diff([]launch.Lane{seen, b}, merged); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
	}
	if !slices.EqualFunc(have, []launch.Lane{a}, func(x, y launch.Lane) bool { return x.GPU == y.GPU }) {
		t.Errorf("merge changed its argument to %v", have)
	}
}

// A relay learns the weights of its lane's members, and that a part of it is direct.
func TestLanesWithMembersCarryWeights(t *testing.T) {
	plan := testPlan("/sys")
	far := &plan.Lanes[1]
	far.Kind = planner.KindStaged
	far.Members = []planner.Member{{Server: far.GPU, NIC: "mlx5_0", Weight: 3}, {Server: far.Servers[0], NIC: "mlx5_0", Weight: 2}, {NIC: "mlx5_0", Weight: 1}}
	lanes, err := Lanes(plan, []string{"@" + far.GPU})
	if err != nil {
		t.Fatal(err)
	}
	want := []launch.Member{{Server: far.GPU, NIC: "mlx5_0", Weight: 3}, {Server: far.Servers[0], NIC: "mlx5_0", Weight: 2}, {NIC: "mlx5_0", Weight: 1}}
	if diff := cmp.Diff(want, lanes[0].Members); diff != "" || !lanes[0].Direct || !lanes[0].Relay {
		t.Errorf("direct %t, relay %t, members %s", lanes[0].Direct, lanes[0].Relay, diff)
	}
}
