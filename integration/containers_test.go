// Package integration_test runs containers with real runtimes on the CUDA simulator, and kills
// every participating process.
package integration_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// binaries is the directory of Peerlane's programs, which TestMain sets.
var binaries string

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "role" {
		os.Exit(play(os.Args[2:]))
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, remove, err := programs.Directory(programs.Hook, programs.Relay, programs.Peerlane, programs.Runtime,
		programs.Traffic)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	binaries = dir
	code := m.Run()
	if err := remove(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// runtimes are the container runtimes of `make test`.
var runtimes = []string{"runc", "crun"}

// patience is ten times the promise for one host, a second, times six for emulated machines that
// share processors.
const patience = time.Minute

// bed is the host of a test.
type bed struct {
	*testing.T
	*testbed.Host
	runtime *bundle.Runtime
	lanes   [2]planner.Lane
	count   int
	edit    func(*bundle.Bundle) // changes each bundle of a test; nil for no change
}

func newBed(t *testing.T, runtimeName string, change func(*config.Config)) *bed {
	t.Helper()
	return newBedIn(t, newRoot(t), runtimeName, change)
}

// beside runs a test in parallel with other such tests. The test has a separate bed and changes
// nothing in this process; such tests wait more than they compute. Guests have too few processors
// and run tests in sequence.
func beside(t *testing.T) {
	t.Helper()
	if os.Getenv(programs.Variable) == "" {
		t.Parallel()
	}
}

// ownPrograms returns Peerlane's programs under names unique to this bed, so that the bed finds
// remaining processes.
func ownPrograms(t *testing.T) string {
	t.Helper()
	if os.Getenv(programs.Variable) != "" { // guests run tests in sequence
		return binaries
	}
	entries, err := os.ReadDir(binaries)
	if err != nil {
		t.Fatal(err)
	}
	// The directory is outside the bed's root, which a test may give to another user, and outside
	// TMPDIR: hard links need the same file system.
	dir, err := os.MkdirTemp(filepath.Dir(binaries), "plbin")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	for _, e := range entries {
		if err := os.Link(filepath.Join(binaries, e.Name()), filepath.Join(dir, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// newRoot makes the directory of a bed.
func newRoot(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: an OCI runtime makes namespaces and cgroups")
	}
	// A short name for socket paths. No name is a prefix of another bed's name.
	root, err := os.MkdirTemp("", "pl*-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	return root
}

func newBedIn(t *testing.T, root, runtimeName string, change func(*config.Config)) *bed {
	t.Helper()
	h, err := testbed.New(root, ownPrograms(t), testbed.GPUsSimulated)
	if err != nil {
		t.Fatal(err)
	}
	testbed.MountAnchor(t, h.Layout)
	b := &bed{T: t, Host: h}
	if b.runtime, err = bundle.FindRuntime(runtimeName, h.RuntimeState()); err != nil {
		t.Skip(err)
	}
	if err := h.Configure(func(c *config.Config) {
		c.Relay.Route, c.Relay.Slots, c.Relay.SlotSize = launch.RouteStaged, 4, 1<<20
		change(c)
	}); err != nil {
		t.Fatal(err)
	}
	if b.lanes, err = h.TwoClients(); err != nil {
		t.Fatal(err)
	}
	return b
}

func asItIs(*config.Config) {}

// nics starts the software devices, and requires that the test leaves no object.
func (b *bed) nics() {
	b.Helper()
	stop, err := b.StartNICs(context.Background(), b.lanes[:]...)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := stop(); err != nil {
			b.Error(err)
		}
	})
	b.leavesNothing()
}

func (b *bed) leavesNothing() {
	b.Helper()
	if err := os.MkdirAll(b.RuntimeState(), 0o700); err != nil {
		b.Fatal(err)
	}
	before, err := b.Look()
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		left, err := b.Left(before, patience)
		if err != nil {
			b.Fatal(err)
		}
		for _, thing := range left {
			b.Errorf("left on the host: %s", thing)
		}
	})
}

// container is a running container.
type container struct {
	bed    *bed
	id     string
	cmd    *exec.Cmd
	remove func(context.Context) error
	in     io.WriteCloser
	lines  chan event
	stderr bytes.Buffer
	ended  chan error
	once   sync.Once
}

func (b *bed) bundle(gpu topo.GPU, devices []string, role ...string) *bundle.Bundle {
	b.Helper()
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	b.count++
	built, err := b.Bundle(fmt.Sprintf("%d-%d", gpu.Index, b.count), bundle.File{Host: self, Container: "/usr/bin/test"},
		devices, append([]string{"role"}, role...)...)
	if err != nil {
		b.Fatal(err)
	}
	// By default the race detector delays the exit of a process by a second.
	built.Spec.Process.Env = append(built.Spec.Process.Env, "GORACE=atexit_sleep_ms=0")
	if b.edit != nil {
		b.edit(built)
	}
	if err := built.Write(); err != nil {
		b.Fatal(err)
	}
	return built
}

func (b *bed) gpu(lane planner.Lane) topo.GPU {
	b.Helper()
	g, err := b.Plan.GPU(lane.GPU)
	if err != nil {
		b.Fatal(err)
	}
	return g
}

// start runs a role in a container with a GPU and the GPU's lane.
func (b *bed) start(lane planner.Lane, role ...string) *container {
	b.Helper()
	g := b.gpu(lane)
	return b.run(b.bundle(g, testbed.Devices(g), role...))
}

func (b *bed) run(built *bundle.Bundle) *container {
	b.Helper()
	id := b.ContainerID(filepath.Base(built.Dir))
	return b.follow(id, b.runtime.Run(context.Background(), built, id),
		func(ctx context.Context) error { return b.runtime.Delete(ctx, id) })
}

// follow starts the command of a container, and registers remove for cleanup.
func (b *bed) follow(id string, cmd *exec.Cmd, remove func(context.Context) error) *container {
	b.Helper()
	c := &container{
		bed: b, id: id, cmd: cmd, remove: remove,
		lines: make(chan event, 100), ended: make(chan error, 1),
	}
	c.cmd.Stderr = &c.stderr
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		b.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		b.Fatal(err)
	}
	go func() {
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			var s event
			if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
				s = event{Kind: "error", Error: fmt.Sprintf("it said %q", lines.Text())}
			}
			c.lines <- s
		}
		close(c.lines)
		c.ended <- c.cmd.Wait()
	}()
	b.Cleanup(func() { c.end() })
	return c
}

// end closes the container's input, waits for the end, and removes the container.
func (c *container) end() {
	c.once.Do(func() {
		c.in.Close()
		ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
		defer cancel()
		if err := c.remove(ctx); err != nil {
			c.bed.Error(err)
		}
		for range c.lines {
		}
		<-c.ended
	})
}

// next waits for a line of a kind and discards earlier lines of other kinds.
func (c *container) next(kind string) event {
	c.bed.Helper()
	deadline := testutil.After(2 * patience)
	for {
		select {
		case s, ok := <-c.lines:
			if !ok {
				c.end()
				c.bed.Fatalf("container %s ended before %q: %s", c.id, kind, c.stderr.String())
			}
			if s.Kind == kind {
				return s
			}
			if s.Kind == "error" {
				c.bed.Fatalf("container %s: %s", c.id, s.Error)
			}
		case <-deadline:
			c.bed.Fatalf("container %s does not come to %q", c.id, kind)
		}
	}
}

func (c *container) send(s event) {
	c.bed.Helper()
	if err := json.NewEncoder(c.in).Encode(s); err != nil {
		c.bed.Fatal(err)
	}
}

// init returns the pid of the container's init on the host.
func (c *container) init() int {
	c.bed.Helper()
	out, err := c.bed.runtime.Command(context.Background(), "state", c.id).Output()
	if err != nil {
		c.bed.Fatal(err)
	}
	var state struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal(out, &state); err != nil || state.PID < 2 {
		c.bed.Fatalf("the runtime's state %s: %v", out, err)
	}
	return state.PID
}

// child returns the pid of the only child of a process.
func child(t *testing.T, of int) int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // the process has ended
		}
		if strings.Contains(string(text), fmt.Sprintf("\nPPid:\t%d\n", of)) {
			pid, err := strconv.Atoi(strings.Split(file, "/")[2])
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	t.Fatalf("process %d has no child", of)
	return 0
}

// generation returns the container's generation.
func (c *container) generation() generation.Info {
	c.bed.Helper()
	list, err := generation.List(c.bed.Layout)
	if err != nil {
		c.bed.Fatal(err)
	}
	for _, g := range list {
		if g.Container.ID == c.id {
			return g
		}
	}
	c.bed.Fatalf("no generation of container %s among %d", c.id, len(list))
	return generation.Info{}
}

// streaming starts two containers that exchange messages; the first has this
// role.
func (b *bed) streaming(roleA ...string) (a, z *container) {
	b.Helper()
	return b.introduce(b.start(b.lanes[0], roleA...), b.start(b.lanes[1], "stream"))
}

// waiting starts two containers that attach again on command.
func (b *bed) waiting() (a, z *container) {
	b.Helper()
	return b.introduce(b.start(b.lanes[0], "stream", "wait"), b.start(b.lanes[1], "stream", "wait"))
}

func (b *bed) introduce(a, z *container) (*container, *container) {
	b.Helper()
	handleA, handleZ := a.next("listening").Handle, z.next("listening").Handle
	a.send(event{Handle: handleZ})
	z.send(event{Handle: handleA})
	a.next("moving")
	z.next("moving")
	return a, z
}

func kill(t *testing.T, pid int) time.Time {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	return time.Now()
}

// mustLearn requires an error in this container that names the dead process.
func (c *container) mustLearn(since time.Time, words ...string) (s event) {
	c.bed.Helper()
	select {
	case s = <-c.lines:
		if s.Kind != "error" {
			c.bed.Fatalf("the other container says %+v", s)
		}
		// The promise is a second; docs/benchmarks.md has the measured time.
		c.bed.Logf("learnt after %v: %s", time.Since(since).Round(100*time.Microsecond), s.Error)
		for _, w := range words {
			if !strings.Contains(s.Error, w) {
				c.bed.Errorf("the error does not say %q: %s", w, s.Error)
			}
		}
	case <-testutil.After(patience):
		c.bed.Fatalf("the other container has not learnt of it after %v", patience)
	}
	return s
}

// mustLearnOfRelay requires the error of the death of another container's relay.
func (c *container) mustLearnOfRelay(since time.Time, id string) {
	c.bed.Helper()
	if s := c.mustLearn(since, "the relay ", id); s.Status != wire.StatusPeerRelayDied {
		c.bed.Errorf("the error has status %v in place of %v: %s", s.Status, wire.StatusPeerRelayDied, s.Error)
	}
}

func TestClientDeathReachesPeer(t *testing.T) {
	beside(t)
	for _, route := range []string{launch.RouteStaged, launch.RouteDirect} {
		for _, c := range []struct {
			name string
			role []string
		}{{"alone", []string{"parent", "stream"}}, {"with a forked child that lives on",
			[]string{"parent", "stream", "fork"}}} {
			t.Run(route+"/"+c.name, func(t *testing.T) {
				b := newBed(t, "runc", func(o *config.Config) { o.Relay.Route = route })
				b.nics()
				a, z := b.streaming(c.role...)
				client := child(t, a.init())
				z.mustLearn(kill(t, client), fmt.Sprintf("client process %d", client), a.id, "died")
				if e := a.next("child-ended"); e.Error != "signal: killed" {
					t.Errorf("the client ended by %q", e.Error)
				}
				// The relay of a container with a dead client goes on.
				if g := a.generation(); g.Status.State != generation.StateReady || g.Status.Starts != 1 {
					t.Errorf("the relay is %s after %d starts", g.Status.State, g.Status.Starts)
				}
				z.next("again")
			})
		}
	}
}

func TestRelayDeathReachesBothClients(t *testing.T) {
	beside(t)
	for _, route := range []string{launch.RouteStaged, launch.RouteDirect} {
		t.Run(route, func(t *testing.T) {
			b := newBed(t, "runc", func(o *config.Config) { o.Relay.Route = route })
			b.nics()
			a, z := b.streaming("stream")
			g := a.generation()
			if g.Status.Relay == nil {
				t.Fatalf("the supervisor knows no relay: %+v", g.Status)
			}
			died := kill(t, g.Status.Relay.PID)
			z.mustLearnOfRelay(died, a.id)
			a.mustLearn(died, "the relay of this container died")
			// The successor serves on the same socket.
			a.next("again")
			t.Logf("attached again after %v", time.Since(died).Round(time.Millisecond))
			z.next("again")
		})
	}
}

func TestContainerDeathReachesPeer(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		for _, route := range []string{launch.RouteStaged, launch.RouteDirect} {
			t.Run(runtimeName+"/"+route, func(t *testing.T) {
				b := newBed(t, runtimeName, func(o *config.Config) { o.Relay.Route = route })
				b.nics()
				a, z := b.streaming("stream")
				g := a.generation()
				died := kill(t, a.init())
				z.mustLearn(died, "container "+a.id, "ended")
				z.next("again")
				// The next container works, with the same GPU and lane.
				a.end()
				next := b.start(b.lanes[0], "hello")
				next.next("hello")
				if n := next.generation(); n.ID == g.ID {
					t.Error("two containers had one generation")
				}
			})
		}
	}
}

func TestSupervisorDeathLeavesRelayRunning(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", asItIs)
	b.nics()
	a, z := b.streaming("stream")
	// A relay survives the death of its supervisor, and ends with the container.
	relay := a.generation().Status.Relay.PID
	kill(t, supervisor(t, relay))
	select {
	case s := <-z.lines:
		t.Fatalf("the death of a supervisor was noticed: %+v", s)
	case <-time.After(200 * time.Millisecond):
	}
	died := kill(t, a.init())
	z.mustLearn(died, "container "+a.id, "ended")
	a.end()
	// The next hook or supervisor collects the remains of the killed supervisor.
	b.start(b.lanes[0], "hello").next("hello")
}

func supervisor(t *testing.T, relay int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", relay))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(text), "\n") {
		if value, found := strings.CutPrefix(line, "PPid:\t"); found {
			pid, err := strconv.Atoi(value)
			if err != nil || pid < 2 {
				t.Fatalf("the relay's parent is %q", value)
			}
			return pid
		}
	}
	t.Fatal("the relay has no parent")
	return 0
}

func TestLaneWithoutGPUNamesTheDevice(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", asItIs)
	b.leavesNothing()
	g := b.gpu(b.lanes[0])
	// The relay answers; the container lacks CUDA.
	b.run(b.bundle(g, testbed.Devices(g)[1:], "hello")).next("hello")
	c := b.run(b.bundle(g, testbed.Devices(g)[1:], "export"))
	b.mustFail(c, "libcuda.so.1: cannot open shared object file", fmt.Sprintf("the lane of GPU %d ", g.Index),
		fmt.Sprintf("--device nvidia.com/gpu=%d as well", g.Index))
}

// A container with two lanes and no GPU.
func TestTwoLanesWithoutGPUsNameBothDevices(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", asItIs)
	b.leavesNothing()
	g, other := b.gpu(b.lanes[0]), b.gpu(b.lanes[1])
	c := b.run(b.bundle(g, []string{device(cdi.KindLane, g), device(cdi.KindLane, other)}, "export"))
	b.mustFail(c, fmt.Sprintf("the lanes of GPUs %d, %d ", g.Index, other.Index),
		fmt.Sprintf("--device nvidia.com/gpu=%d --device nvidia.com/gpu=%d as well", g.Index, other.Index))
}

// A device gpu= adds the device nodes; the image or the vendor's device adds libcuda.
func TestGPUWithoutLibcudaNamesTheLibrary(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", asItIs)
	b.leavesNothing()
	g := b.gpu(b.lanes[0])
	c := b.run(b.bundle(g, []string{device(cdi.KindGPU, g)}, "export"))
	b.mustFail(c, "libcuda.so.1: cannot open shared object file",
		fmt.Sprintf("--device nvidia.com/gpu=%d as well", g.Index))
}

// A container with neither lane nor GPU: the program first misses libcuda.
func TestContainerWithoutDeviceNamesTheLibrary(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", asItIs)
	g := b.gpu(b.lanes[0])
	b.mustFail(b.run(b.bundle(g, nil, "export")), "libcuda.so.1", "--device nvidia.com/gpu=N")
	b.mustFail(b.run(b.bundle(g, nil, "hello")), "no relay at /run/peerlane/relay.sock", "--device peerlane.dev/lane=N")
}

func TestGPUWithoutLaneIsRefused(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", asItIs)
	b.leavesNothing()
	g := b.gpu(b.lanes[0])
	c := b.run(b.bundle(g, testbed.Devices(g)[:1], "export"))
	b.mustFail(c, "no relay at /run/peerlane/relay.sock", "start the container with --device peerlane.dev/lane="+g.UUID)
}

func TestLaneOfAnotherGPUIsRefused(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", asItIs)
	b.leavesNothing()
	g, other := b.gpu(b.lanes[0]), b.gpu(b.lanes[1])
	c := b.run(b.bundle(g, []string{testbed.Devices(g)[0], testbed.Devices(other)[1]}, "export"))
	b.mustFail(c, g.UUID, other.UUID, "start it with --device peerlane.dev/lane="+g.UUID)
}

func TestRelayWithoutCUDAReportsCause(t *testing.T) {
	beside(t)
	b := newBed(t, "runc",
		func(c *config.Config) { c.Relay.Environment = []string{"PEERLANE_CUDA_LIBRARY=/nowhere/libcuda.so.1"} })
	b.leavesNothing()
	b.mustFail(b.start(b.lanes[0], "export"), "the relay cannot use the CUDA driver", "/nowhere/libcuda.so.1")
	b.start(b.lanes[0], "hello").next("hello") // hello needs no GPU
}

func TestHostWithoutRelayBinaryRefusesContainer(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", func(c *config.Config) { c.Relay.Binary = "/nowhere/peerlane-relay" })
	journal := b.hostLog()
	b.leavesNothing()
	c := b.start(b.lanes[0], "hello")
	for s := range c.lines {
		t.Errorf("the container ran and said %+v", s)
	}
	c.end()
	if !strings.Contains(c.stderr.String(), "/nowhere/peerlane-relay") {
		t.Errorf("the runtime does not name the missing program: %s", c.stderr.String())
	}
	b.mustLog(journal, "/nowhere/peerlane-relay", c.id, "PRIORITY=3")
}

// hostLog replaces the host's journal, and returns the socket that receives entries.
func (b *bed) hostLog() *net.UnixConn {
	b.Helper()
	path := filepath.Join(b.Root, "run/systemd/journal/socket")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		b.Fatal(err)
	}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { conn.Close() })
	return conn
}

// mustLog requires an entry with all the words.
func (b *bed) mustLog(journal *net.UnixConn, words ...string) {
	b.Helper()
	if err := journal.SetReadDeadline(testutil.Deadline()); err != nil {
		b.Fatal(err)
	}
	entry := make([]byte, 64<<10)
	for {
		n, err := journal.Read(entry)
		if err != nil {
			b.Errorf("no entry of the host's log has %q: %v", words, err)
			return
		}
		ok := true
		for _, w := range words {
			ok = ok && strings.Contains(string(entry[:n]), w)
		}
		if ok {
			return
		}
	}
}

// With on_failure = "warn" a relay that does not start stops no container; the client's error names
// the log.
func TestHostThatWarnsStartsContainer(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, func(c *config.Config) {
				c.Relay.Binary = "/nowhere/peerlane-relay"
				c.Hook.OnFailure = config.OnFailureWarn
			})
			journal := b.hostLog()
			b.leavesNothing()
			c := b.start(b.lanes[0], "hello")
			b.mustFail(c, "relay did not start", "journalctl -t peerlane-hook")
			b.mustLog(journal, "/nowhere/peerlane-relay", c.id, "starts without its lane", "PRIORITY=4")
		})
	}
}

func TestUnknownDeviceIsRefused(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", asItIs)
	err := bundle.New(t.TempDir(), "/x").Inject(b.CDIDir(), "peerlane.dev/lane=99")
	if err == nil || !strings.Contains(err.Error(), "peerlane.dev/lane=99") {
		t.Errorf("an unknown device: %v", err)
	}
}

// mustFail requires that a role ends with an error that contains the words.
func (b *bed) mustFail(c *container, words ...string) {
	b.Helper()
	for s := range c.lines {
		if s.Kind != "error" {
			continue
		}
		for _, w := range words {
			if !strings.Contains(s.Error, w) {
				b.Errorf("the error does not say %q: %s", w, s.Error)
			}
		}
		if strings.Contains(s.Error, "\n") {
			b.Errorf("error has several lines: %q", s.Error)
		}
		b.Logf("it says: %s", s.Error)
		return
	}
	c.end()
	b.Errorf("the container ended without an error: %s", c.stderr.String())
}

// starts is the number of containers that TestContainerConnectsAsFirstAction starts; `make
// soak-containers` starts more.
const starts = 24

func TestContainerConnectsAsFirstAction(t *testing.T) {
	beside(t)
	starts := int(fromEnvironment(t, "PEERLANE_SOAK_CONTAINERS", starts))
	b := newBed(t, "runc", asItIs)
	b.leavesNothing()
	g := b.gpu(b.lanes[0])
	built := b.bundle(g, testbed.Devices(g), "hello")
	var wait sync.WaitGroup
	var mu sync.Mutex
	failed := 0
	work := make(chan int)
	for range 4 {
		wait.Add(1)
		go func() {
			defer wait.Done()
			for i := range work {
				c := b.runtime.Run(context.Background(), built, b.ContainerID(fmt.Sprintf("first-%d", i)))
				out, err := c.CombinedOutput()
				if err != nil || !bytes.Contains(out, []byte(`"hello"`)) {
					mu.Lock()
					if failed++; failed <= 3 {
						t.Errorf("container %d: %v: %s", i, err, out)
					}
					mu.Unlock()
				}
			}
		}()
	}
	begun := time.Now()
	for i := range starts {
		work <- i
	}
	close(work)
	wait.Wait()
	t.Logf("%d of %d succeeded, %v each, four at once", starts-failed, starts,
		(time.Since(begun) / time.Duration(starts)).Round(time.Millisecond))
}

// peerlane runs the administrator's command on this host.
func (b *bed) peerlane(arguments ...string) (string, error) {
	b.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, filepath.Join(binaries, "peerlane"),
		append(arguments, "--root", b.Root)...).CombinedOutput()
	return string(out), err
}

func (b *bed) mustPeerlane(arguments ...string) string {
	b.Helper()
	out, err := b.peerlane(arguments...)
	if err != nil {
		b.Fatalf("peerlane %v: %v: %s", arguments, err, out)
	}
	return out
}

// A relay that dies repeatedly stays down. The list, the log and the client report this, and the
// administrator restarts the relay.
func TestRelayDyingTooOftenStaysDown(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", asItIs)
	journal := b.hostLog()
	b.nics()
	a, z := b.waiting()
	g := a.generation()
	deaths := 0
	for end := testutil.BeginFor(2 * patience); ; {
		g = a.generation()
		if g.Status.State == generation.StateDown {
			break
		}
		// Check StateReady: an earlier relay is still setting up the sandbox.
		if g.Status.State == generation.StateReady && g.Status.Starts > deaths {
			kill(t, g.Status.Relay.PID)
			deaths = g.Status.Starts
		}
		if end.Over() {
			t.Fatalf("after %d deaths its status is %+v", deaths, g.Status)
		}
		if deaths > 5 {
			t.Fatalf("it was started for the %d. time", deaths)
		}
		time.Sleep(10 * time.Millisecond)
	}
	const want = "the relay died: signal: killed"
	if list := b.mustPeerlane("relay", "list", "-o", "wide"); !strings.Contains(list, generation.StateDown) ||
		!strings.Contains(list, "signal: killed") {
		t.Errorf("peerlane relay list does not say so: %s", list)
	}
	if text := b.mustPeerlane("relay", "inspect", a.id); !strings.Contains(text, "giving up") ||
		!strings.Contains(text, want) {
		t.Errorf("peerlane relay inspect does not say so: %s", text)
	}
	_, err := client.Dial(context.Background(), filepath.Join(b.Layout.SocketDir(g.ID), paths.SocketName))
	if err == nil || !errors.Is(err, fault.RelayDown) || !strings.Contains(err.Error(), want) {
		t.Errorf("a client hears %v", err)
	}
	b.mustLog(journal, want, "starting it again", a.id, g.ID)
	b.mustLog(journal, want, "stays down after 5 failures", a.id, g.ID, "PRIORITY=3")
	z.mustLearnOfRelay(time.Now(), a.id)
	a.mustLearn(time.Now(), "the relay of this container died")
	b.mustPeerlane("relay", "resume", a.id)
	for _, c := range []*container{a, z} {
		c.send(event{})
		c.next("again")
	}
}

// Draining releases the GPUs during a transfer. Clients receive the reason, and so do clients of a
// container that starts meanwhile.
func TestDrainReleasesGPUs(t *testing.T) {
	beside(t)
	for _, route := range []string{launch.RouteStaged, launch.RouteDirect} {
		t.Run(route, func(t *testing.T) {
			b := newBed(t, "runc", func(o *config.Config) { o.Relay.Route = route })
			b.nics()
			a, z := b.waiting()
			var inspected []control.Inspection
			if err := json.Unmarshal([]byte(b.mustPeerlane("relay", "inspect", a.id, "-o", "json")), &inspected); err != nil {
				t.Fatal(err)
			}
			if r := inspected[0].Report; r == nil || len(r.Contexts) != 1 || r.Contexts[0] != b.gpu(b.lanes[0]).BusID ||
				len(r.Clients) != 1 || r.Clients[0].Memories != 2 || r.Clients[0].Connections != 2 || r.Sent == 0 {
				t.Errorf("the relay reports %+v (%s)", r, inspected[0].NoReport)
			}
			relays := []int{a.generation().Status.Relay.PID, z.generation().Status.Relay.PID}
			begun := time.Now()
			out := b.mustPeerlane("relay", "drain", "--all")
			t.Logf("drained after %v: %s", time.Since(begun).Round(time.Millisecond), out)
			for _, c := range []*container{a, z} {
				c.mustLearn(begun, "drained by the administrator; attach again later")
				if g := c.generation(); g.Status.State != generation.StateDrained || g.Status.Relay != nil {
					t.Errorf("the relay of %s: %+v", c.id, g.Status)
				}
			}
			for _, pid := range relays {
				if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil {
					t.Errorf("relay %d runs", pid)
				}
			}
			if list := b.mustPeerlane("relay", "list"); !strings.Contains(list, "All relays of this host are drained") {
				t.Errorf("peerlane relay list does not say so: %s", list)
			}
			b.mustFail(b.start(b.lanes[0], "hello"), "drained by the administrator; attach again later")
			b.mustPeerlane("relay", "resume", "--all")
			// Commands of a script: one relay, with its states as JSON.
			for _, step := range []struct{ command, state string }{{"stop", generation.StateStopped},
				{"resume", generation.StateReady}, {"drain", generation.StateDrained}, {"resume", generation.StateReady}} {
				var list struct {
					Relays []struct{ ID, Container, State string }
				}
				text := b.mustPeerlane("relay", step.command, a.id, "-o", "json")
				if err := json.Unmarshal([]byte(text), &list); err != nil {
					t.Fatalf("relay %s: %v: %s", step.command, err, text)
				}
				if r := list.Relays; len(r) != 1 || r[0].ID != a.generation().ID || r[0].Container != a.id ||
					r[0].State != step.state {
					t.Errorf("relay %s says %s", step.command, text)
				}
			}
			for _, c := range []*container{a, z} {
				c.send(event{})
				c.next("again")
			}
		})
	}
}
