package lanes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo/planner"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/internal/testplan"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

func TestFindReturnsLanesByIdentity(t *testing.T) {
	got, err := Find(testplan.New("/sys"), []string{testplan.UUID1 + "@0000:2A:00.0", "@0000:17:00.0"})
	if err != nil {
		t.Fatal(err)
	}
	near := launch.GPU{UUID: testplan.UUID0, BusID: "0000:17:00.0", Index: 0}
	nic := &launch.NIC{Name: "mlx5_0", GUID: 0xe040a10003c288a0, Mbps: 400000, Port: 1}
	want := []launch.Lane{
		{
			GPU:      launch.GPU{UUID: testplan.UUID1, BusID: "0000:2a:00.0", Index: 1},
			Role:     "far",
			Relay:    true,
			Servers:  []launch.GPU{near},
			NICs:     []string{"mlx5_0"},
			NIC:      nic,
			PeerMbps: 2966400,
		},
		{GPU: near, Role: "near", Servers: []launch.GPU{}, NICs: []string{"mlx5_0"}, NIC: nic},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// NICs reach a GPU's own memory if the plan permits, and not for a near GPU that the
// administrator has bounce.
func TestFindLaneOfNearGPUIsDirect(t *testing.T) {
	for kind, want := range map[string]bool{planner.KindDirect: true, planner.KindBounce: false, planner.KindStaged: false,
		"": false} {
		plan := testplan.New("/sys")
		plan.Lanes[0].Kind = kind
		lanes, err := Find(plan, []string{"@0000:17:00.0"})
		if err != nil || lanes[0].Direct != want {
			t.Errorf("kind %q: %+v, %v", kind, lanes, err)
		}
	}
}

func TestAddSparesPrefersOwnNICs(t *testing.T) {
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
	spare := func(i int, nic string) launch.Spare { return launch.Spare{GPU: Identity(gpu(i)), NICs: []string{nic}} }
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
		lanes, err := Find(plan, []string{"@" + id(c.lane)})
		if err != nil {
			t.Fatal(err)
		}
		AddSpares(plan, lanes, c.excluded)
		if diff := cmp.Diff(c.want, lanes[0].Spares); diff != "" {
			t.Errorf("%s (-want +got)\n%s", c.name, diff)
		}
	}
}

// A specification that no longer fits the plan is refused with the difference.
func TestFindStaleLaneFails(t *testing.T) {
	for name, stale := range map[string][2]string{ // object and cause
		"@0000:99:00.0":                  {"0000:99:00.0", "0000:99:00.0"},
		testplan.UUID0 + "@0000:2a:00.0": {testplan.UUID0, "0000:17:00.0"},
		testplan.UUID0 + "@0000:99:00.0": {testplan.UUID0, "0000:17:00.0"},
		testplan.UUID9 + "@0000:2a:00.0": {"0000:2a:00.0", testplan.UUID1},
	} {
		_, err := Find(testplan.New("/sys"), []string{name})
		var f *fault.Error
		if !errors.As(err, &f) || f.Code != fault.StaleSpecification || f.Object != stale[0] ||
			!strings.Contains(f.Cause.Error(), stale[1]) {
			t.Errorf("lane %q: %v; want %s of %s with the cause %q", name, err, fault.StaleSpecification, stale[0], stale[1])
		}
	}
	for name, says := range map[string]string{
		"0":                                "a lane name looks like",
		"@":                                "not a PCI address",
		"@0000:3b:00.0":                    "MIG is on",
		testplan.UUID9 + "@0000:3b:00.0":   "MIG is on", // the plan has no UUID
		testplan.UUID1 + "@../../etc":      "not a PCI address",
		testplan.UUID1 + "@0000:2a:00.0\n": "not a PCI address",
	} {
		_, err := Find(testplan.New("/sys"), []string{name})
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("lane %q: %v; want %q", name, err, says)
		}
	}
}

func TestPresentFindsMissingGPU(t *testing.T) {
	sysfs := t.TempDir()
	plan := testplan.New(sysfs)
	lanes, err := Find(plan, []string{"@0000:2a:00.0"})
	if err != nil {
		t.Fatal(err)
	}
	vendor := func(busID, text string) {
		dir := filepath.Join(sysfs, "bus/pci/devices", busID)
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "vendor"), []byte(text),
			0o644)); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(object, cause string) {
		t.Helper()
		err := Present(plan, lanes)
		var f *fault.Error
		if !errors.As(err, &f) || f.Code != fault.StaleSpecification || f.Object != object || f.Remedy != Refresh ||
			!strings.Contains(f.Cause.Error(), cause) {
			t.Errorf("%v; want %s of %s with the cause %q", err, fault.StaleSpecification, object, cause)
		}
	}
	refused("1 (0000:2a:00.0)", "no such file")
	vendor("0000:2a:00.0", "0x10de\n")
	refused("0 (0000:17:00.0)", "no such file") // the server
	vendor("0000:17:00.0", "0x8086\n")
	refused("0 (0000:17:00.0)", "0x8086")
	vendor("0000:17:00.0", "0x10de\n")
	if err := Present(plan, lanes); err != nil {
		t.Error(err)
	}
}

func TestPresentNICsFindsRenumberedNode(t *testing.T) {
	sysfs := t.TempDir()
	plan := testplan.New(sysfs)
	plan.NICs = []topo.NIC{
		{Name: "mlx5_0", Uverbs: "uverbs0"},
		{Name: "mlx5_1", Uverbs: "uverbs1"},
		{Name: "eth0", Ethernet: true},
	}
	ibdev := func(uverbs, name string) {
		dir := filepath.Join(sysfs, "class/infiniband_verbs", uverbs)
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "ibdev"), []byte(name+"\n"),
			0o644)); err != nil {
			t.Fatal(err)
		}
	}
	lane := []launch.Lane{{NICs: []string{"mlx5_0", "eth0", "emulated0"}}}
	check := func(lanes []launch.Lane, names []string, object, cause string) {
		t.Helper()
		err := PresentNICs(plan, lanes, names)
		var f *fault.Error
		switch {
		case object == "" && err == nil:
		case object == "" || !errors.As(err, &f) || f.Code != fault.StaleSpecification || f.Object != object ||
			!strings.HasPrefix(f.Remedy, Refresh) || !strings.Contains(f.Cause.Error(), cause):
			t.Errorf("%v; want %s of %q with the cause %q", err, fault.StaleSpecification, object, cause)
		}
	}
	check(nil, []string{"mlx5_1"}, "mlx5_1", "no such file")
	ibdev("uverbs0", "mlx5_0")
	ibdev("uverbs1", "mlx5_1")
	check(lane, nil, "", "")
	check(lane, []string{"mlx5_1"}, "", "")
	check(nil, []string{"mlx5_9"}, "mlx5_9", "no NIC of this name")
	check(nil, []string{"eth0"}, "eth0", "no NIC of this name")
	check(nil, []string{"../../etc"}, "../../etc", "no NIC of this name")
	// Another order at another boot.
	ibdev("uverbs0", "mlx5_1")
	ibdev("uverbs1", "mlx5_0")
	check(lane, nil, "mlx5_0", "check node uverbs0: "+sysfs)
	check(nil, []string{"mlx5_1"}, "mlx5_1", "says mlx5_0")
}

func TestReadPlanOfAnotherOwnerFails(t *testing.T) {
	l := paths.New(t.TempDir())
	if _, err := ReadPlan(l); !errors.Is(err, fs.ErrNotExist) || !errors.Is(err, fault.UnreadablePlan) {
		t.Errorf("no plan: %v", err)
	}
	write := func(p *planner.Plan) {
		if err := errors.Join(l.Create(), p.Write(l.PlanFile())); err != nil {
			t.Fatal(err)
		}
	}
	write(testplan.New("/sys"))
	if _, err := ReadPlan(l); err != nil {
		t.Error(err)
	}
	refused := func(says string, spoil, mend func() error) {
		t.Helper()
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadPlan(l); !errors.Is(err, fault.UntrustedFile) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v; want %q", err, says)
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
	refused("not a regular file",
		func() error { return errors.Join(os.Rename(l.PlanFile(), other), os.Symlink(other, l.PlanFile())) },
		func() error { return os.Rename(other, l.PlanFile()) })
	if os.Geteuid() == 0 {
		owner := func(path string, uid int) func() error { return func() error { return os.Chown(path, uid, -1) } }
		refused("belongs to uid 1234", owner(l.PlanFile(), 1234), owner(l.PlanFile(), 0))
		refused("belongs to uid 1234", owner(l.State(), 1234), owner(l.State(), 0))
	}
	file := testplan.New("")
	file.Source = topo.Source{Kind: topo.SourceNCCLXML, File: "dgx.xml"}
	write(file)
	if _, err := ReadPlan(l); !errors.Is(err, fault.UnreadablePlan) || !strings.Contains(err.Error(), "dgx.xml") {
		t.Errorf("a plan from a file: %v", err)
	}
}

// A relay learns the weights of its lane's members, and that a part of the lane is direct.
func TestFindLaneReturnsWeightsOfMembers(t *testing.T) {
	plan := testplan.New("/sys")
	far := &plan.Lanes[1]
	far.Kind = planner.KindStaged
	far.Members = []planner.Member{
		{Server: far.GPU, NIC: "mlx5_0", Weight: 3},
		{Server: far.Servers[0], NIC: "mlx5_0", Weight: 2},
		{NIC: "mlx5_0", Weight: 1},
	}
	lanes, err := Find(plan, []string{"@" + far.GPU})
	if err != nil {
		t.Fatal(err)
	}
	want := []launch.Member{
		{Server: far.GPU, NIC: "mlx5_0", Weight: 3},
		{Server: far.Servers[0], NIC: "mlx5_0", Weight: 2},
		{NIC: "mlx5_0", Weight: 1},
	}
	if diff := cmp.Diff(want, lanes[0].Members); diff != "" || !lanes[0].Direct || !lanes[0].Relay {
		t.Errorf("direct %t, relay %t, members %s", lanes[0].Direct, lanes[0].Relay, diff)
	}
}
