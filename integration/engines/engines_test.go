//go:build engines

package engines

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	cdilibrary "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/config"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/integration/testbed"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

// Of Peerlane and of the engines, where TestMain found them.
var (
	binaries  string
	installed *Installed
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && (os.Args[1] == "client" || os.Args[1] == "server") {
		os.Exit(play(os.Args[1:]))
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, remove, err := programs.Directory(programs.Hook, programs.Relay)
	if err == nil {
		binaries = dir
		installed, err = Find()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	if err := remove(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// patience is ten times what is promised for one host: a second.
const patience = 10 * time.Second

// container is what an engine is asked for.
type container struct {
	name     string
	devices  []string
	readOnly bool
	user     bool // uid and gid 1000
	userNS   bool // a user namespace of its own
	role     string
}

// command is what runs in it.
func (c container) command() []string { return []string{"/usr/bin/test-peerlane", c.role, c.name} }

// engine is a container engine, or an OCI runtime. Its errors have its words.
type engine interface {
	// run runs a container to its end, and removes it.
	run(context.Context, container) error
	// start starts one that stays.
	start(context.Context, container) error
	// restart ends a container's process and starts it again, as the same
	// container.
	restart(context.Context, container) error
	// remove ends and removes it.
	remove(context.Context, container) error
}

// row is an engine of the table.
type row struct {
	name string
	// next says that it is of the newer Debian's root.
	next bool
	// cgroups are those that it is tried on, where a case does not say.
	cgroups cgroups
	open    func(b *bed) engine
}

var rows = []row{
	{name: "podman-4.3", cgroups: v1, open: podman(Podman43, "crun")},
}

// check is one case of the table: a container, and what has to be so.
type check struct {
	name    string
	ask     container
	cgroups cgroups
	// gpus are the indices of those that the container must see and use.
	gpus []int
	// also is what else must be so.
	also func(b *bed, r report)
	// refused are words of the error with which it must not start.
	refused []string
	// instead is what is done with it, instead of running it once.
	instead func(b *bed, c check)
}

var checks = []check{
	{name: "one-lane", ask: container{devices: gpusWithLanes(3)}, gpus: []int{3}},
}

// gpusWithLanes are the devices of the everyday line.
func gpusWithLanes(indices ...int) []string {
	var list []string
	for _, i := range indices {
		list = append(list, fmt.Sprintf("nvidia.com/gpu=%d", i))
	}
	for _, i := range indices {
		list = append(list, fmt.Sprintf("%s=%d", cdi.KindLane, i))
	}
	return list
}

// TestEngine is every case in every engine, as far as the matrix has them.
func TestEngine(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: container engines make namespaces and cgroups")
	}
	cells := readCells(t)
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			beds := map[cgroups]*bed{}
			for _, c := range checks {
				cell := r.name + "/" + c.name
				state, known := cells[cell]
				delete(cells, cell)
				if !known {
					t.Errorf("integration/matrix.txt has no cell engines %s", cell)
				}
				if state == "absent" {
					continue
				}
				which := c.cgroups
				if which == asTheHost {
					which = r.cgroups
				}
				if beds[which] == nil {
					// Set up below the engine's own test, for all of its cases.
					beds[which] = newBed(t, r, which)
				}
				b := beds[which]
				t.Run(c.name, func(t *testing.T) { b.try(t, c) })
			}
		})
	}
}

// readCells reads the states of the matrix's cells of this place.
func readCells(t *testing.T) map[string]string {
	t.Helper()
	f, err := os.Open("../matrix.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cells := map[string]string{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if words := strings.Fields(lines.Text()); len(words) > 2 && words[0] == "engines" {
			cells[words[1]] = words[2]
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return cells
}

// bed is an engine on a host of its own.
type bed struct {
	*testing.T // of the case
	*testbed.Host
	row     row
	ground  *ground
	image   *image
	reports string
	engine  engine
	cgroups cgroups
}

// newBed makes a host and opens an engine on it, until the end of the test.
func newBed(t *testing.T, r row, which cgroups) *bed {
	t.Helper()
	// Short, for the length of a socket's path.
	root, err := os.MkdirTemp("", "pl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	h, err := testbed.New(root, binaries, testbed.GPUsSimulated)
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{T: t, Host: h, row: r, reports: filepath.Join(root, "reports"), cgroups: which}
	if err := h.Configure(func(c *config.Config) {
		c.Relay.Route, c.Relay.Slots, c.Relay.SlotSize = launch.RouteStaged, 4, 1<<20
		c.Groups = map[string][]string{"pair": {"2", "3"}}
	}); err != nil {
		t.Fatal(err)
	}
	b.specify()
	if b.image, err = makeImage(filepath.Join(root, "image"), h.Libraries...); err != nil {
		t.Fatal(err)
	}
	stop, err := h.StartNICs(context.Background(), h.Plan.Lanes...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	next := ""
	if r.next {
		next = installed.Next
	}
	own := filepath.Join(root, "ground")
	if err := os.Mkdir(own, 0o755); err != nil {
		t.Fatal(err)
	}
	shared := []string{installed.Runc, installed.Containerd, installed.Docker}
	for _, library := range h.Libraries {
		shared = append(shared, filepath.Dir(library))
	}
	b.ground = lay(t, own, next, which, h.CDIDir(), shared...)
	b.engine = r.open(b)
	return b
}

// specify adds what the cases need beside Peerlane's devices: the directory of
// reports, what a GPU vendor gives beside device nodes, and a stranger's device.
func (b *bed) specify() {
	b.Helper()
	if err := os.Mkdir(b.reports, 0); err != nil {
		b.Fatal(err)
	}
	if err := os.Chmod(b.reports, 0o777); err != nil {
		b.Fatal(err)
	}
	cache, err := cdilibrary.NewCache(cdilibrary.WithSpecDirs(b.CDIDir()), cdilibrary.WithAutoRefresh(false))
	if err != nil {
		b.Fatal(err)
	}
	vendor := cache.GetVendorSpecs("nvidia.com")
	if len(vendor) != 1 {
		b.Fatalf("%d specifications of nvidia.com", len(vendor))
	}
	mount := func(from, to string) []*specs.Mount {
		return []*specs.Mount{{HostPath: from, ContainerPath: to, Options: []string{"rw", "bind"}}}
	}
	add := []*specs.Spec{
		{Version: "0.5.0", Kind: "test.peerlane.dev/reports", Devices: []specs.Device{{
			Name: "all", ContainerEdits: specs.ContainerEdits{Mounts: mount(b.reports, reportsDir)},
		}}},
		{Version: "0.5.0", Kind: "test.peerlane.dev/driver", Devices: []specs.Device{{
			Name: "libraries", ContainerEdits: vendor[0].ContainerEdits,
		}}},
		{Version: "0.5.0", Kind: "stranger.example/thing", Devices: []specs.Device{{
			Name: "a", ContainerEdits: specs.ContainerEdits{
				Env:         []string{"THING=a"},
				DeviceNodes: []*specs.DeviceNode{{Path: "/dev/thing-a", HostPath: "/dev/null", Permissions: "rw"}},
				Hooks:       []*specs.Hook{{HookName: "createRuntime", Path: "/bin/true", Env: []string{"PATH=/bin"}}},
			},
		}}},
	}
	for _, s := range add {
		text, err := json.Marshal(s)
		if err != nil {
			b.Fatal(err)
		}
		name := strings.ReplaceAll(s.Kind, "/", "-") + ".json"
		if err := os.WriteFile(filepath.Join(b.CDIDir(), name), text, 0o644); err != nil {
			b.Fatal(err)
		}
	}
}

// try does one case.
func (b *bed) try(t *testing.T, c check) {
	outer := b.T
	b.T = t
	defer func() { b.T = outer }()
	leftNothing := b.leavesNothing()
	c.ask = b.asked(c.name, c.ask)
	switch {
	case c.instead != nil:
		c.instead(b, c)
	default:
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		err := b.engine.run(ctx, c.ask)
		if len(c.refused) > 0 {
			b.mustRefuse(err, c)
			break
		}
		if err != nil {
			b.Error(err)
		}
		b.judge(c, b.lastReport(c.ask, 1))
	}
	leftNothing()
}

// asked completes a container of a case.
func (b *bed) asked(name string, c container) container {
	c.name = b.ContainerID(name)
	if c.role == "" {
		c.role = "client"
	}
	c.devices = append([]string{"test.peerlane.dev/reports=all"}, c.devices...)
	return c
}

func (b *bed) mustRefuse(err error, c check) {
	b.Helper()
	if err == nil {
		b.Error("the container ran")
		return
	}
	for _, words := range c.refused {
		if !strings.Contains(err.Error(), words) {
			b.Errorf("the engine does not say %q: %v", words, err)
		}
	}
	if _, err := os.Stat(filepath.Join(b.reports, c.ask.name)); !errors.Is(err, fs.ErrNotExist) {
		b.Errorf("the container's program ran: %v", err)
	}
}

// lastReport waits for a container's nth report.
func (b *bed) lastReport(c container, n int) report {
	b.Helper()
	for end := time.Now().Add(2 * patience); ; time.Sleep(20 * time.Millisecond) {
		text, err := os.ReadFile(filepath.Join(b.reports, c.name))
		lines := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
		if err == nil && strings.HasSuffix(string(text), "\n") && len(lines) >= n {
			var r report
			if err := json.Unmarshal([]byte(lines[n-1]), &r); err != nil {
				b.Fatalf("container %s said %q: %v", c.name, text, err)
			}
			return r
		}
		if time.Now().After(end) {
			b.Fatalf("container %s made %q of %d reports: %v", c.name, text, n, err)
		}
	}
}

// judge demands of a report what the case says.
func (b *bed) judge(c check, r report) {
	b.Helper()
	if r.Error != "" {
		b.Errorf("in the container: %s", r.Error)
	}
	var want []string
	for _, i := range c.gpus {
		want = append(want, b.gpuAt(i).UUID)
	}
	if !slices.Equal(r.GPUs, want) {
		b.Errorf("CUDA shows the GPUs %v instead of %v", r.GPUs, want)
	}
	if bytes := uint64(len(c.gpus)) * messageBytes; r.Moved != bytes || r.Staged == 0 {
		b.Errorf("%d of %d bytes moved, %d of them staged", r.Moved, bytes, r.Staged)
	}
	if r.ReadOnly != c.ask.readOnly {
		b.Errorf("the root file system is read-only: %v", r.ReadOnly)
	}
	if user := r.UID == 1000; user != c.ask.user {
		b.Errorf("the process has uid %d", r.UID)
	}
	if r.UserNamespace != c.ask.userNS {
		b.Errorf("a user namespace of its own: %v", r.UserNamespace)
	}
	if c.also != nil {
		c.also(b, r)
	}
}

func (b *bed) gpuAt(index int) topo.GPU {
	b.Helper()
	g, err := b.Plan.GPU(fmt.Sprint(index))
	if err != nil {
		b.Fatal(err)
	}
	return g
}

// generation is that of the only container there is.
func (b *bed) generation() hook.Info {
	b.Helper()
	list, err := hook.List(b.Layout)
	if err != nil {
		b.Fatal(err)
	}
	if len(list) != 1 {
		b.Fatalf("there are %d generations instead of one", len(list))
	}
	return list[0]
}

// containersOf are the cgroups that engines name by the container's id, which
// the tests do not choose.
var containersOf = regexp.MustCompile(`/(libpod-|docker/|k8s\.io/)[0-9a-f]{64}`)

// leavesNothing looks at the host, and returns what demands that it is as it was.
func (b *bed) leavesNothing() func() {
	b.Helper()
	look := func() map[string]bool {
		seen, err := b.Look()
		if err != nil {
			b.Fatal(err)
		}
		mounts, err := b.ground.mounts()
		if err != nil {
			b.Fatal(err)
		}
		for m := range mounts {
			seen["the engine's mount "+m] = true
		}
		err = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
			if err == nil && containersOf.MatchString(path) {
				seen["cgroup "+path] = true
			}
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		})
		if err != nil {
			b.Fatal(err)
		}
		return seen
	}
	before := look()
	return func() {
		b.Helper()
		var left []string
		for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
			left = nil
			for thing := range look() {
				if !before[thing] {
					left = append(left, thing)
				}
			}
			if len(left) == 0 {
				return
			}
			if time.Now().After(end) {
				break
			}
		}
		slices.Sort(left)
		for _, thing := range left {
			b.Errorf("left on the host: %s", thing)
		}
	}
}
