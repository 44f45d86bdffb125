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
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	cdilibrary "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/integration/image"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

// Paths of Peerlane's programs and of the engines, which TestMain sets.
var (
	binaries  string
	installed *installation
)

func TestMain(m *testing.M) {
	if len(os.Args) == 4 && slices.Contains([]string{"nothing", "look", "client", "server", "attached", "another", "hog",
		"attack"}, os.Args[1]) {
		os.Exit(play(os.Args[1:]))
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, remove, err := programs.Directory(programs.Peerlane, programs.Hook, programs.Relay, programs.Runtime)
	if err == nil {
		binaries = dir
		installed, err = find()
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

// patience is ten times the promise for one host, which is a second.
const patience = 10 * time.Second

// container describes the container that an engine runs.
type container struct {
	name     string
	devices  []string
	readOnly bool
	user     bool   // uid and gid 1000
	userNS   bool   // separate user namespace
	memory   int64  // memory limit in bytes; 0 for no limit
	image    string // empty for the tests' image
	// hostPID and hostNetwork use the host's namespaces.
	hostPID, hostNetwork bool
	// profile requests the engine's seccomp profile, for engines without a default profile.
	profile bool
	role    string
	// exchange lists the GPUs whose lanes are used, by CUDA ordinal; empty for every GPU.
	exchange string
}

// from returns the name of the image.
func (c container) from() string {
	if c.image != "" {
		return c.image
	}
	return imageName
}

// command returns the command line in the container.
func (c container) command() []string {
	return []string{image.Program, c.role, c.name, c.exchange}
}

// engine is a container engine, or an OCI runtime. Errors contain the engine's output.
type engine interface {
	// run runs a container to its end, and removes it.
	run(context.Context, container) error
	// start starts a container that keeps running.
	start(context.Context, container) error
	// restart ends a container's process and starts the same container again.
	restart(context.Context, container) error
	// remove ends and removes a container.
	remove(context.Context, container) error
}

// Optional operations of an engine on a running container.
type (
	executer interface {
		exec(ctx context.Context, c container, command ...string) error
	}
	pauser interface {
		pause(context.Context, container) error
		unpause(context.Context, container) error
	}
	// update changes a limit; runtimes then rewrite the list of permitted devices.
	updater interface {
		update(context.Context, container) error
	}
	// checkpoint writes the container to dir, or to the engine's own directory.
	checkpointer interface {
		checkpoint(ctx context.Context, c container, dir string) error
	}
)

// row is an engine of the table.
type row struct {
	name string
	// next marks an engine in the root of the newer Debian.
	next bool
	// old marks an engine in a separate root of this Debian, in which packages are installed.
	old bool
	// cgroups is the default cgroup hierarchy for the engine's cases.
	cgroups cgroups
	// mute reports that the engine drops the output of hooks, as crun does.
	mute bool
	// remaps reports that a daemon runs all containers in a user namespace, or none.
	remaps bool
	// rootless reports that an unprivileged user runs the engine.
	rootless bool
	// filters reports that every container gets a seccomp profile.
	filters bool
	// below is the runtime for peerlane-runtime; empty for peerlane-runtime's default.
	below string
	// containers is the engine's part of the path of its containers' cgroups, if the engine, and
	// not the test, chooses the rest. Rows with an equal value do not run in parallel: a case could
	// not distinguish its cgroups from those of another row.
	containers string
	// recipe is the heading of docs/containers.md with the instructions for users.
	recipe string
	open   func(b *bed) engine
}

// Values of row.containers.
const (
	podmans = "libpod-"
	dockers = "docker/"
	ofCRI   = "k8s.io/"
)

var rows = []row{
	{name: "runc-1.1", open: ociRuntime(runc11, func() string { return "runc" })},
	{name: "runc-1.5", open: ociRuntime(runc15, func() string { return filepath.Join(installed.Runc, "runc") })},
	{name: "crun-1.8", cgroups: v1, mute: true, open: ociRuntime(crun18, func() string { return "crun" })},
	{name: "crun-1.21", next: true, cgroups: v1, mute: true, open: ociRuntime(crun121, func() string { return "crun" })},
	{name: "podman-4.3", containers: podmans, filters: true, recipe: "Podman", cgroups: v1, mute: true,
		open: podman(podman43, "crun")},
	{name: "podman-5.4", containers: podmans, filters: true, recipe: "Podman", next: true, cgroups: v1, mute: true,
		open: podman(podman54, "crun")},
	{name: "containerd-2-client", open: containerd2(goClient)},
	{name: "containerd-2-ctr", recipe: "containerd: ctr", open: containerd2(ctr)},
	{name: "containerd-2-cri", containers: ofCRI, recipe: "CRI: the field", open: containerd2(criField)},
	{name: "containerd-2-cri-annotation", containers: ofCRI, recipe: "CRI: the annotation",
		open: containerd2(criAnnotation)},
	{name: "containerd-1.7-cri", containers: ofCRI, recipe: "CRI: the field", next: true, open: containerd17},
	{name: "docker-29", containers: dockers, filters: true, recipe: "Docker", next: true, remaps: true, open: docker29},
	{name: "docker-20.10", containers: dockers, filters: true, recipe: "Docker 20.10", remaps: true, open: docker20},
}

// check is a case of the table: a container and the expected result.
type check struct {
	name    string
	ask     container
	cgroups cgroups
	// gpus are the indices of the GPUs that the container must see and use.
	gpus []int
	// also is a further requirement.
	also func(b *bed, r report)
	// refused has words of the expected error at start.
	refused []string
	// byHook reports that the hook must cause the error.
	byHook bool
	// instead replaces the single run of the container.
	instead func(b *bed, c check)
}

var checks = []check{
	{name: "one-lane", ask: container{devices: gpusWithLanes(3)}, gpus: []int{3}},
	{name: "two-lanes", ask: container{devices: gpusWithLanes(3, 6)}, gpus: []int{3, 6}},
	{name: "lane-auto", ask: container{devices: []string{"nvidia.com/gpu=3", "nvidia.com/gpu=6",
		"peerlane.dev/lane=auto"}}, gpus: []int{3, 6}},
	{
		name: "lane-auto-no-gpu", ask: container{devices: []string{"peerlane.dev/lane=auto"}},
		refused: []string{"gives the container no GPU", "--device nvidia.com/gpu=N"}, byHook: true,
	},
	{
		// GPUs beside a NIC have lanes without staging.
		name: "all", gpus: everyGPU,
		ask: container{devices: append(gpusWithLanes(everyGPU...)[:len(everyGPU)], "peerlane.dev/lane=all"),
			exchange: "2,3,6,7"},
	},
	{name: "group", ask: container{devices: []string{driver, "peerlane.dev/gpu=pair"}}, gpus: []int{2, 3}},
	{name: "gpu", ask: container{devices: []string{driver, "peerlane.dev/gpu=3"}}, gpus: []int{3},
		also: hasItsServersNodes},
	{
		name: "two-gpu", ask: container{devices: []string{driver, "peerlane.dev/gpu=3", "peerlane.dev/gpu=6"}},
		refused: []string{"it would hide GPU 3 from CUDA", "peerlane.dev/gpu=all"}, byHook: true,
	},
	{name: "nic", ask: container{devices: []string{"peerlane.dev/nic=mlx5_0"}, role: "look"}, also: hasTheNICsNodes},
	{
		name: "another-vendor", gpus: []int{3}, also: hasTheStrangersThing,
		ask: container{devices: append(gpusWithLanes(3), "stranger.example/thing=a")},
	},
	{name: "read-only-root", ask: container{devices: gpusWithLanes(3), readOnly: true}, gpus: []int{3}},
	{name: "user-namespace", ask: container{devices: gpusWithLanes(3), userNS: true}, gpus: []int{3}},
	{name: "non-root-user", ask: container{devices: gpusWithLanes(3), user: true}, gpus: []int{3}},
	{name: "unknown-device", ask: container{devices: []string{"peerlane.dev/lane=99"}},
		refused: []string{"peerlane.dev/lane=99"}},
	// The test host has cgroup v1, and beside it a v2 hierarchy with almost no controllers unless a
	// row says otherwise.
	{name: "cgroup-v1", ask: container{devices: gpusWithLanes(3)}, gpus: []int{3}},
	{name: "cgroup-v2", cgroups: v2, ask: container{devices: gpusWithLanes(3)}, gpus: []int{3}},
	{name: "recipe", instead: recipe},
	{name: "configure", ask: container{devices: gpusWithLanes(3)}, gpus: []int{3}, instead: configured},
	{name: "restart", ask: container{devices: gpusWithLanes(3), role: "server"}, gpus: []int{3}, instead: restart},
	{name: "exec-and-pause", ask: container{devices: gpusWithLanes(3), role: "server"}, gpus: []int{3},
		instead: execAndPause},
	{name: "update", ask: container{devices: gpusWithLanes(3), role: "server"}, gpus: []int{3}, instead: update},
	{name: "out-of-memory", ask: container{devices: gpusWithLanes(3), role: "server", memory: 256 << 20}, gpus: []int{3},
		instead: outOfMemory},
	{name: "checkpoint", ask: container{devices: gpusWithLanes(3), role: "attached"}, gpus: []int{3}, instead: checkpoint},
	{name: "live-restore", ask: container{devices: gpusWithLanes(3), role: "server"}, gpus: []int{3},
		instead: liveRestore},
	{name: "attacks", ask: container{devices: gpusWithLanes(3), role: "server"}, gpus: []int{3}, instead: attacks},
	{name: "twenty-at-once", ask: container{devices: gpusWithLanes(3), role: "server"}, gpus: []int{3}, instead: twenty},
}

// driver is a device of the GPU vendor with edits other than device nodes.
const driver = "test.peerlane.dev/driver=libraries"

// everyGPU of the recorded host.
var everyGPU = []int{0, 1, 2, 3, 4, 5, 6, 7}

// hasItsServersNodes requires the device nodes that a client needs for its own copies.
func hasItsServersNodes(b *bed, r report) {
	b.Helper()
	lane, err := b.Plan.Lane(b.gpuAt(3).BusID)
	if err != nil {
		b.Fatal(err)
	}
	for _, bus := range append([]string{lane.GPU}, lane.Servers...) {
		g, err := b.Plan.GPU(bus)
		if err != nil {
			b.Fatal(err)
		}
		if node := fmt.Sprintf("/dev/nvidia%d", g.Minor); !slices.Contains(r.Nodes, node) {
			b.Errorf("%s is not among the nodes %v", node, r.Nodes)
		}
	}
}

func hasTheNICsNodes(b *bed, r report) {
	b.Helper()
	want := []string{"/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"}
	if !slices.Equal(r.Nodes, want) || r.Environment[cdi.RegistrationVariable] == "" {
		b.Errorf("the nodes are %v instead of %v, and %s=%q", r.Nodes, want, cdi.RegistrationVariable,
			r.Environment[cdi.RegistrationVariable])
	}
}

func hasTheStrangersThing(b *bed, r report) {
	b.Helper()
	if r.Environment["THING"] != "a" || !slices.Contains(r.Nodes, "/dev/thing-a") {
		b.Errorf("the other vendor's device is missing: THING=%q, nodes %v", r.Environment["THING"], r.Nodes)
	}
}

// restart requires that a restarted container gets a new relay, and that no object of the former
// relay remains.
func restart(b *bed, c check) {
	b.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	first := b.running(ctx, c)
	if err := b.engine.restart(ctx, c.ask); err != nil {
		b.Fatal(err)
	}
	b.judge(c, b.lastReport(c.ask, 2))
	for end := testutil.Begin(); ; time.Sleep(20 * time.Millisecond) {
		list, err := generation.List(b.Layout)
		if err != nil {
			b.Fatal(err)
		}
		if len(list) == 1 && list[0].ID != first && list[0].Alive {
			break
		}
		if end.Over() {
			b.Fatalf("after a restart of generation %s there are %+v", first, list)
		}
	}
	b.mustRemove(c.ask)
}

// running starts a container and returns its generation.
func (b *bed) running(ctx context.Context, c check) (generation string) {
	b.Helper()
	b.Cleanup(func() { b.mustRemove(c.ask) })
	if err := b.engine.start(ctx, c.ask); err != nil {
		b.Fatal(err)
	}
	b.judge(c, b.lastReport(c.ask, 1))
	g := b.generation()
	if b.row.rootless {
		b.mustBeTrainers(g)
	}
	return g.ID
}

// mustGoOn requires that another process of the container uses the relay of the first process.
func (b *bed) mustGoOn(ctx context.Context, c check, generation string) {
	b.Helper()
	another := c.ask
	another.name += "-another"
	if err := os.RemoveAll(filepath.Join(b.reports, another.name)); err != nil {
		b.Fatal(err)
	}
	if err := b.engine.(executer).exec(ctx, c.ask, "/usr/bin/test-peerlane", "another", another.name, ""); err != nil {
		b.Error(err)
	}
	b.judge(c, b.lastReport(another, 1))
	if g := b.generation(); g.ID != generation || g.Status.Starts != 1 {
		b.Errorf("the relay of generation %s is that of %s, started %d times", generation, g.ID, g.Status.Starts)
	}
}

// execAndPause requires that a container's relay serves processes started by exec, and survives a
// pause.
func execAndPause(b *bed, c check) {
	b.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	generation := b.running(ctx, c)
	b.mustGoOn(ctx, c, generation)
	e := b.engine.(pauser)
	if err := errors.Join(e.pause(ctx, c.ask), e.unpause(ctx, c.ask)); err != nil {
		b.Error(err)
	}
	b.mustGoOn(ctx, c, generation)
	b.mustRemove(c.ask)
}

// update requires that a container keeps relay and devices when its limits change.
func update(b *bed, c check) {
	b.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	generation := b.running(ctx, c)
	if err := b.engine.(updater).update(ctx, c.ask); err != nil {
		b.Error(err)
	}
	b.mustGoOn(ctx, c, generation)
	b.mustRemove(c.ask)
}

// outOfMemory requires that the kernel kills a process that exceeds the container's memory limit,
// but neither the relay nor the container's other processes.
func outOfMemory(b *bed, c check) {
	b.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), 2*time.Minute)
	defer cancel()
	generation := b.running(ctx, c)
	err := b.engine.(executer).exec(ctx, c.ask, "/usr/bin/test-peerlane", "hog", "", "")
	if err == nil || !regexp.MustCompile(`\b137\b|signal: killed`).MatchString(err.Error()) {
		b.Errorf("a process exceeded the container's memory limit without being killed: %v", err)
	}
	b.mustGoOn(ctx, c, generation)
	b.mustRemove(c.ask)
}

// checkpoint requires that an engine refuses to checkpoint a container with an attached client,
// which could not be restored, and that the container continues. If engine and machine lack criu,
// this is the reason of the refusal.
func checkpoint(b *bed, c check) {
	b.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), 2*time.Minute)
	defer cancel()
	generation := b.running(ctx, c)
	if err := b.engine.(checkpointer).checkpoint(ctx, c.ask, b.TempDir()); err == nil {
		b.Error("a container with an attached client was written to disk")
	} else {
		b.Logf("refused: %v", err)
	}
	b.mustGoOn(ctx, c, generation)
	b.mustRemove(c.ask)
}

// liveRestore requires that a restart of the daemon does not affect a container.
func liveRestore(b *bed, c check) {
	b.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), 2*time.Minute)
	defer cancel()
	generation := b.running(ctx, c)
	b.daemon.again(b.T)
	b.mustGoOn(ctx, c, generation)
	b.mustRemove(c.ask)
}

// twenty requires that twenty concurrently started containers work at the same time.
func twenty(b *bed, c check) {
	b.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), 3*time.Minute)
	defer cancel()
	const count = 20
	asked := make([]container, count)
	failed := make([]error, count)
	var wait sync.WaitGroup
	for i := range count {
		asked[i] = c.ask
		asked[i].name = fmt.Sprintf("%s-%d", c.ask.name, i)
		b.Cleanup(func() { b.mustRemove(asked[i]) })
		wait.Go(func() { failed[i] = b.engine.start(ctx, asked[i]) })
	}
	wait.Wait()
	if err := errors.Join(failed...); err != nil {
		b.Fatal(err)
	}
	for _, one := range asked {
		b.judge(c, b.lastReport(one, 1))
	}
	list, err := generation.List(b.Layout)
	if err != nil {
		b.Fatal(err)
	}
	if len(list) != count {
		b.Errorf("%d containers have %d generations", count, len(list))
	}
	for _, one := range asked {
		wait.Go(func() { b.mustRemove(one) })
	}
	wait.Wait()
}

// mustRemove removes a container, which may not exist any more.
func (b *bed) mustRemove(c container) {
	b.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	if err := b.engine.remove(ctx, c); err != nil {
		b.Error(err)
	}
}

// gpusWithLanes returns the devices of the everyday command.
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

// TestEngineRunsEachCase runs the cases of the matrix in every engine.
func TestEngineRunsEachCase(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: container engines make namespaces and cgroups")
	}
	t.Parallel()
	cells := readCells(t)
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			r.takeTurn(t)
			type kind struct {
				cgroups cgroups
				userNS  bool
			}
			beds := map[kind]*bed{}
			for _, c := range checks {
				cell := r.name + "/" + c.name
				state, known := cells[cell]
				if !known {
					t.Errorf("integration/matrix.txt has no cell engines %s", cell)
				}
				if state == "absent" {
					continue
				}
				which := kind{c.cgroups, c.ask.userNS && r.remaps}
				if which.cgroups == asTheHost {
					which.cgroups = r.cgroups
				}
				if beds[which] == nil {
					// A bed belongs to the engine's test and serves several cases.
					beds[which] = newBed(t, r, which.cgroups, which.userNS)
				}
				b := beds[which]
				t.Run(c.name, func(t *testing.T) { b.try(t, c) })
			}
		})
	}
}

// maxRows is the number of rows that run in parallel: a row has a daemon, software devices and up
// to twenty containers with their relays.
const maxRows = 6

var (
	// turns has a lock for each value of row.containers.
	turns   = map[string]*sync.Mutex{podmans: {}, dockers: {}, ofCRI: {}}
	running = make(chan struct{}, maxRows)
)

// takeTurn lets a row run in parallel with others, and waits until the row may begin. Rows wait
// more than they compute.
func (r row) takeTurn(t *testing.T) {
	t.Helper()
	t.Parallel()
	r.waitForTurn(t)
}

// waitForTurn is the second part of takeTurn, for a parallel test that prepares a host before.
func (r row) waitForTurn(t *testing.T) {
	t.Helper()
	if turn := turns[r.containers]; turn != nil {
		turn.Lock()
		t.Cleanup(turn.Unlock)
	}
	running <- struct{}{}
	t.Cleanup(func() { <-running })
}

// readCells reads the states of this place's cells in the matrix.
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

// bed is an engine on a separate host.
type bed struct {
	*testing.T // of the case
	*testbed.Host
	row     row
	ground  *ground
	image   *image.Image
	reports string
	engine  engine
	cgroups cgroups
	userNS  bool    // for an engine that remaps
	daemon  *daemon // nil for engines without a daemon
	// configured records the change from a configuration without CDI.
	configured configuration
}

// linkPrograms creates the directory to with hard links to the files of the directory from. Rows
// run in parallel, and a snapshot of testbed.Host.Look recognises the processes of a row by the
// directory of their program.
func linkPrograms(to, from string) error {
	if err := os.Mkdir(to, 0o755); err != nil {
		return err
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		source, target := filepath.Join(from, e.Name()), filepath.Join(to, e.Name())
		err := os.Link(source, target)
		if errors.Is(err, unix.EXDEV) {
			err = copyProgram(target, source)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// copyProgram copies a program with its mode, where a hard link cannot cross file systems.
func copyProgram(to, from string) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := os.WriteFile(to, text, 0o700); err != nil {
		return err
	}
	return os.Chmod(to, info.Mode().Perm())
}

// newBed creates a host and opens an engine on the host until the end of the test.
func newBed(t *testing.T, r row, which cgroups, userNS bool) *bed {
	t.Helper()
	// Short, because paths of sockets have a limit.
	root, err := os.MkdirTemp("", "pl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	// Root of a user namespace must reach the container's mounts.
	if err := os.Chmod(root, 0o711); err != nil {
		t.Fatal(err)
	}
	programs := filepath.Join(root, "bin")
	if err := linkPrograms(programs, binaries); err != nil {
		t.Fatal(err)
	}
	h, err := testbed.New(root, programs, testbed.GPUsSimulated)
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{T: t, Host: h, row: r, reports: filepath.Join(root, "reports"), cgroups: which, userNS: userNS}
	specifications := h.CDIDir()
	if r.rootless {
		specifications = b.ofTrainer()
	} else {
		testbed.MountAnchor(t, h.Layout)
	}
	if err := h.Configure(func(c *config.Config) {
		c.Relay.Route, c.Relay.Slots, c.Relay.SlotSize = launch.RouteStaged, 4, 1<<20
		c.Groups = map[string][]string{"pair": {"2", "3"}}
		c.Runtime.Path = r.below
		// For the engines without CDI.
		c.Runtime.Devices = []string{"peerlane.dev/lane=*", "peerlane.dev/gpu=*", "peerlane.dev/nic=*", "nvidia.com/gpu=*",
			"stranger.example/thing=*", "test.peerlane.dev/reports=*", "test.peerlane.dev/driver=*"}
	}); err != nil {
		t.Fatal(err)
	}
	b.specify()
	if b.image, err = image.Make(filepath.Join(root, "image"), imageName, h.Libraries...); err != nil {
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
	if r.old {
		next = installed.Old
	}
	own := filepath.Join(root, "ground")
	if err := os.Mkdir(own, 0o755); err != nil {
		t.Fatal(err)
	}
	shared := []string{installed.Runc, installed.Containerd, installed.Docker}
	for _, library := range h.Libraries {
		shared = append(shared, filepath.Dir(library))
	}
	b.ground = lay(t, own, next, which, specifications, filepath.Join(root, "nodes/dev"), shared...)
	if r.rootless {
		b.giveTrainer()
		b.ground.user = trainer
	}
	b.engine = r.open(b)
	// The first container of an engine creates objects that later containers share.
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	for {
		err := b.engine.run(ctx, container{name: b.ContainerID("first"), role: "nothing"})
		if err == nil {
			return b
		}
		if !imageUnknown(err) || ctx.Err() != nil {
			t.Fatal(err)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// imageUnknown reports the error of a CRI whose list of images does not contain an imported image
// yet.
func imageUnknown(err error) bool {
	return strings.Contains(err.Error(), "failed to resolve image")
}

// specify adds the specifications that cases need in addition to Peerlane's specifications: the
// directory of reports, a GPU vendor's edits, and a device of another vendor.
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
				// The hook reads its input: crun 1.8 fails if a hook ends before crun has written
				// the state.
				Hooks: []*specs.Hook{{HookName: "createRuntime", Path: "/bin/sh", Args: []string{"sh", "-c", "cat >/dev/null"},
					Env: []string{"PATH=/bin"}}},
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

// try runs a case.
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
		ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
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

// asked completes the container of a case.
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
	words := c.refused
	if c.byHook && b.row.mute {
		words = []string{"error executing hook"}
	}
	for _, words := range words {
		if !strings.Contains(err.Error(), words) {
			b.Errorf("the engine does not say %q: %v", words, err)
		}
	}
	if _, err := os.Stat(filepath.Join(b.reports, c.ask.name)); !errors.Is(err, fs.ErrNotExist) {
		b.Errorf("the container's program ran: %v", err)
	}
}

// lastReport waits for the report number n of a container.
func (b *bed) lastReport(c container, n int) (r report) {
	b.Helper()
	b.line(c, n, &r)
	return r
}

// line waits for line number n of a container.
func (b *bed) line(c container, n int, into any) {
	b.Helper()
	for end := testutil.BeginFor(2 * patience); ; time.Sleep(20 * time.Millisecond) {
		text, err := os.ReadFile(filepath.Join(b.reports, c.name))
		lines := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
		if err == nil && strings.HasSuffix(string(text), "\n") && len(lines) >= n {
			if err := json.Unmarshal([]byte(lines[n-1]), into); err != nil {
				b.Fatalf("container %s said %q: %v", c.name, text, err)
			}
			return
		}
		if end.Over() {
			b.Fatalf("container %s made %q of %d reports: %v", c.name, text, n, err)
		}
	}
}

// judge compares a report with the case.
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
	messages := len(c.gpus)
	if c.ask.exchange != "" {
		messages = len(strings.Split(c.ask.exchange, ","))
	}
	if bytes := uint64(messages) * messageBytes; r.Moved != bytes || messages > 0 && r.Staged == 0 {
		b.Errorf("%d of %d bytes moved, %d of these staged", r.Moved, bytes, r.Staged)
	}
	if r.ReadOnly != c.ask.readOnly {
		b.Errorf("the root file system is read-only: %v", r.ReadOnly)
	}
	if user := r.UID == 1000; user != c.ask.user {
		b.Errorf("the process has uid %d", r.UID)
	}
	if b.row.filters && !r.Filtered {
		b.Error("the engine's seccomp profile is not in effect")
	}
	if r.UserNamespace != (c.ask.userNS || b.row.rootless) {
		b.Errorf("separate user namespace: %v", r.UserNamespace)
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

// generation returns the generation of the only container.
func (b *bed) generation() generation.Info {
	b.Helper()
	list, err := generation.List(b.Layout)
	if err != nil {
		b.Fatal(err)
	}
	if len(list) != 1 {
		b.Fatalf("there are %d generations instead of one", len(list))
	}
	return list[0]
}

// containerID matches the id of a container in the name of its cgroup, if the engine chooses the
// name.
var containerID = regexp.MustCompile(`^[0-9a-f]{64}`)

// isContainer reports whether a cgroup is that of a container of this row.
func (r row) isContainer(cgroup string) bool {
	_, id, found := strings.Cut(cgroup, "/"+r.containers)
	return found && r.containers != "" && containerID.MatchString(id)
}

// daemonsOwn matches processes of a daemon, which may be restarted.
var daemonsOwn = regexp.MustCompile(`dockerd --|containerd(\.toml)? --config |/exec/libnetwork/`)

// leavesNothing records the state of the host, and returns a function that requires the same state.
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
		for thing := range seen {
			if daemonsOwn.MatchString(thing) {
				delete(seen, thing)
			}
		}
		for m := range mounts {
			if strings.Contains(m, "/podman/graph/overlay /") || strings.Contains(m, "/docker/exec/netns/default ") {
				continue // the engine creates these on demand: podman's storage, and docker's handle of the host's network
			}
			seen["the engine's mount "+m] = true
		}
		err = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
			if err == nil && b.row.isContainer(path) {
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
		for end := testutil.Begin(); ; time.Sleep(50 * time.Millisecond) {
			left = nil
			for thing := range look() {
				if !before[thing] {
					left = append(left, thing)
				}
			}
			if len(left) == 0 {
				return
			}
			if end.Over() {
				break
			}
		}
		slices.Sort(left)
		for _, thing := range left {
			b.Errorf("left on the host: %s", thing)
		}
	}
}
