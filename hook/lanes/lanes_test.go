package lanes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/internal/testplan"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
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

// NICs reach a GPU's own memory if the plan permits it, except for a near GPU that the
// administrator has configured to bounce.
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

func TestAddSparesStopsAtLimit(t *testing.T) {
	plan := &planner.Plan{}
	for i := range 9 {
		plan.GPUs = append(plan.GPUs, topo.GPU{Index: i, BusID: fmt.Sprintf("0000:%02x:00.0", i)})
	}
	lane := func(i int, nics []string, servers ...int) {
		l := planner.Lane{GPU: plan.GPUs[i].BusID, Relay: true, NICs: nics}
		for _, s := range servers {
			l.Servers = append(l.Servers, plan.GPUs[s].BusID)
		}
		plan.Lanes = append(plan.Lanes, l)
	}
	lane(0, []string{"mlx5_0"}, 1)
	lane(2, []string{"mlx5_0"}, 3)
	lane(4, []string{"mlx5_1"}, 3, 5, 6) // 3 is a spare by the lane before
	lane(7, nil, 4)                      // without a NIC
	lane(8, []string{"mlx5_1"}, 7, 8)
	lanes := []launch.Lane{{GPU: launch.GPU{BusID: plan.GPUs[0].BusID}}, {GPU: launch.GPU{BusID: "0000:99:00.0"}}}
	AddSpares(plan, lanes, [][]string{{"mlx5_0"}, {"8", "5", "6"}})
	var got []int
	for _, s := range lanes[0].Spares {
		got = append(got, s.GPU.Index)
	}
	if want := []int{3, 5, 6, 7}; !cmp.Equal(got, want) || lanes[1].Spares != nil {
		t.Errorf("spares %v, want %v; of a GPU outside the plan %v", got, want, lanes[1].Spares)
	}
}

func TestExcludesPairInBothOrders(t *testing.T) {
	plan := &planner.Plan{GPUs: []topo.GPU{{Index: 0, BusID: "0000:01:00.0"}, {Index: 1, BusID: "0000:02:00.0"}}}
	const gpu, other = "0000:01:00.0", "0000:02:00.0"
	for _, c := range []struct {
		name  string
		pairs [][]string
		want  bool
	}{
		{"the pair", [][]string{{"0", "1"}}, true},
		{"the pair in the other order", [][]string{{"1", "0"}}, true},
		{"the GPU and a NIC", [][]string{{"0", "mlx5_0"}}, false},
		{"a NIC and the GPU", [][]string{{"mlx5_0", "0"}}, false},
		{"the other GPU and a NIC", [][]string{{"1", "mlx5_0"}}, false},
		{"a NIC and the other GPU", [][]string{{"mlx5_0", "1"}}, false},
		{"one name", [][]string{{"0"}}, false},
		{"three names", [][]string{{"0", "1", "2"}}, false},
		{"none", nil, false},
	} {
		if got := excludes(plan, c.pairs, gpu, other); got != c.want {
			t.Errorf("%s: %t", c.name, got)
		}
	}
}

func TestSetCopyMarksEachLane(t *testing.T) {
	lanes := []launch.Lane{{}, {}}
	MarkVisibleServers(lanes)
	if !lanes[0].Copy || !lanes[1].Copy {
		t.Errorf("%+v", lanes)
	}
}

// Find refuses a specification that no longer fits the plan, and names the difference.
func TestFindStaleLaneFails(t *testing.T) {
	for _, c := range []struct{ name, object, unknown, moved, replaced string }{
		{name: "@0000:99:00.0", object: "0000:99:00.0", unknown: "0000:99:00.0"},
		{name: testplan.UUID0 + "@0000:2a:00.0", object: testplan.UUID0, moved: "0000:17:00.0"},
		{name: testplan.UUID0 + "@0000:99:00.0", object: testplan.UUID0, moved: "0000:17:00.0"},
		{name: testplan.UUID9 + "@0000:2a:00.0", object: "0000:2a:00.0", replaced: testplan.UUID1},
	} {
		_, err := Find(testplan.New("/sys"), []string{c.name})
		f, ok := errors.AsType[*fault.Error](err)
		if !ok || f.Code != fault.StaleSpecification || f.Object != c.object {
			t.Errorf("lane %q: %v; want %s of %s", c.name, err, fault.StaleSpecification, c.object)
		}
		unknown, isUnknown := errors.AsType[*topo.UnknownGPUError](err)
		moved, isMoved := errors.AsType[*movedError](err)
		replaced, isReplaced := errors.AsType[*replacedError](err)
		if isUnknown != (c.unknown != "") || isUnknown && unknown.Name != c.unknown ||
			isMoved != (c.moved != "") || isMoved && moved.busID != c.moved ||
			isReplaced != (c.replaced != "") || isReplaced && replaced.uuid != c.replaced {
			t.Errorf("lane %q: cause %v, want %+v", c.name, f.Cause, c)
		}
	}
	if _, err := Find(testplan.New("/sys"), []string{"0"}); !errors.Is(err, errLaneName) {
		t.Errorf("lane 0: %v", err)
	}
	for _, name := range []string{"@0000:3b:00.0", testplan.UUID9 + "@0000:3b:00.0"} { // the plan has no UUID
		_, err := Find(testplan.New("/sys"), []string{name})
		if refused, ok := errors.AsType[*refusedError](err); !ok || refused.reason != "MIG is on" {
			t.Errorf("lane %q: %v; want the plan's reason", name, err)
		}
	}
	for _, address := range []string{"", "../../etc", "0000:2a:00.0\n"} {
		_, err := Find(testplan.New("/sys"), []string{testplan.UUID1 + "@" + address})
		if invalid, ok := errors.AsType[*topo.BusIDError](err); !ok || invalid.Text != address {
			t.Errorf("address %q: %v", address, err)
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
	refused := func(object string, value error) {
		t.Helper()
		err := Present(plan, lanes)
		f, ok := errors.AsType[*fault.Error](err)
		if !ok || f.Code != fault.StaleSpecification || f.Object != object || f.Remedy != Refresh ||
			!sameCause(f.Cause, value) {
			t.Errorf("%v; want %s of %s with the cause %v", err, fault.StaleSpecification, object, value)
		}
	}
	refused("1 (0000:2a:00.0)", fs.ErrNotExist)
	vendor("0000:2a:00.0", "0x10de\n")
	refused("0 (0000:17:00.0)", fs.ErrNotExist) // the server
	vendor("0000:17:00.0", "0x8086\n")
	refused("0 (0000:17:00.0)",
		&valueError{filepath.Join(sysfs, "bus/pci/devices/0000:17:00.0/vendor"), "0x8086", "0x10de"})
	vendor("0000:17:00.0", "0x10de\n")
	if err := Present(plan, lanes); err != nil {
		t.Error(err)
	}
}

// sameCause reports whether a cause is a sentinel, or a valueError with equal fields.
func sameCause(cause, want error) bool {
	if value, ok := want.(*valueError); ok {
		got, ok := errors.AsType[*valueError](cause)
		return ok && *got == *value
	}
	return errors.Is(cause, want)
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
	check := func(lanes []launch.Lane, names []string, object string, cause error) {
		t.Helper()
		err := PresentNICs(plan, lanes, names)
		var f *fault.Error
		switch {
		case object == "" && err == nil:
		case object == "" || !errors.As(err, &f) || f.Code != fault.StaleSpecification || f.Object != object ||
			f.Remedy != Refresh+", so that the CDI specification fits the host" || !sameCause(f.Cause, cause):
			t.Errorf("%v; want %s of %q with the cause %v", err, fault.StaleSpecification, object, cause)
		}
	}
	check(nil, []string{"mlx5_1"}, "mlx5_1", fs.ErrNotExist)
	ibdev("uverbs0", "mlx5_0")
	ibdev("uverbs1", "mlx5_1")
	check(lane, nil, "", nil)
	check(lane, []string{"mlx5_1"}, "", nil)
	check(nil, []string{"mlx5_9"}, "mlx5_9", errNoNIC)
	check(nil, []string{"eth0"}, "eth0", errNoNIC)
	check(nil, []string{"../../etc"}, "../../etc", errNoNIC)
	// The kernel numbers the devices in another order at the next boot.
	ibdev("uverbs0", "mlx5_1")
	ibdev("uverbs1", "mlx5_0")
	names := func(node string) string { return filepath.Join(sysfs, "class/infiniband_verbs", node, "ibdev") }
	check(lane, nil, "mlx5_0", &valueError{names("uverbs0"), "mlx5_1", "mlx5_0"})
	check(nil, []string{"mlx5_1"}, "mlx5_1", &valueError{names("uverbs1"), "mlx5_0", "mlx5_1"})
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
	refused := func(spoil, mend func() error) (f *fault.Error) {
		t.Helper()
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		_, err := ReadPlan(l)
		if !errors.As(err, &f) || f.Code != fault.UntrustedFile || f.Object != l.PlanFile() {
			t.Fatalf("%v; want %s of %s", err, fault.UntrustedFile, l.PlanFile())
		}
		if err := mend(); err != nil {
			t.Fatal(err)
		}
		return f
	}
	mode := func(path string, mode os.FileMode) func() error { return func() error { return os.Chmod(path, mode) } }
	for _, c := range []struct {
		path        string
		spoil, good os.FileMode
	}{{l.PlanFile(), 0o664, 0o644}, {l.PlanFile(), 0o646, 0o644}, {l.State(), 0o770, 0o700}} {
		f := refused(mode(c.path, c.spoil), mode(c.path, c.good))
		if m, ok := errors.AsType[*paths.ModeError](f); !ok || *m != (paths.ModeError{Path: c.path, Mode: c.spoil}) {
			t.Errorf("mode %04o of %s: %v", c.spoil, c.path, f)
		}
	}
	other := filepath.Join(t.TempDir(), "plan.json")
	if f := refused(
		func() error { return errors.Join(os.Rename(l.PlanFile(), other), os.Symlink(other, l.PlanFile())) },
		func() error { return os.Rename(other, l.PlanFile()) }); !errors.Is(f, paths.ErrNotRegular) {
		t.Errorf("a link: %v", f)
	}
	if os.Geteuid() == 0 {
		owner := func(path string, uid int) func() error { return func() error { return os.Chown(path, uid, -1) } }
		for _, path := range []string{l.PlanFile(), l.State()} {
			f := refused(owner(path, 1234), owner(path, 0))
			if o, ok := errors.AsType[*paths.OwnerError](f); !ok || *o != (paths.OwnerError{Path: path, UID: 1234}) {
				t.Errorf("owner 1234 of %s: %v", path, f)
			}
		}
	}
	file := testplan.New("")
	file.Source = topo.Source{Kind: topo.SourceNCCLXML, File: "dgx.xml"}
	write(file)
	_, err := ReadPlan(l)
	if f, ok := errors.AsType[*fileError](err); !errors.Is(err, fault.UnreadablePlan) || !ok || f.source != "dgx.xml" {
		t.Errorf("a plan from a file: %v", err)
	}
}

// Find returns the weights of the lane's members, and marks the direct part of the lane.
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
