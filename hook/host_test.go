package hook_test

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// host is a root folder with the files that Launch needs.
type host struct {
	layout paths.Layout
	dir    string // TEST_DIR of the relays
}

// newHost makes a root folder, and checks at the end of the test that only the folders of
// Layout.Create remain.
func newHost(t *testing.T) host {
	t.Helper()
	h := host{paths.New(t.TempDir()), t.TempDir()}
	if err := os.Chmod(h.dir, 0o777); err != nil { // relays are not root, and write reports there
		t.Fatal(err)
	}
	mountAnchor(t, h.layout)
	t.Cleanup(func() {
		h.gone(t)
		if t.Failed() {
			out, _ := exec.Command("find", h.layout.Root).CombinedOutput()
			t.Logf("%s", out)
		}
	})
	return h
}

// mountAnchor mounts the anchor of a layout until the end of the test, as root.
func mountAnchor(t testing.TB, l paths.Layout) {
	t.Helper()
	if os.Geteuid() != 0 {
		return
	}
	t.Cleanup(func() {
		if _, err := l.UnmountAnchor(); err != nil {
			t.Error(err)
		}
	})
	if err := l.MountAnchor(); err != nil {
		t.Fatal(err)
	}
}

// gone waits until all generations are removed.
func (h host) gone(t *testing.T) {
	t.Helper()
	testutil.Succeeds(t, "what is left", func() error {
		for _, dir := range []string{h.layout.Generations(), h.layout.Sockets(), h.layout.Peers(), h.layout.UIDs()} {
			entries, err := os.ReadDir(dir)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			if len(entries) > 0 {
				return fmt.Errorf("%s holds %v", dir, entries)
			}
		}
		return nil
	})
}

func (h host) request(id string, pid int, faults string, lanes ...launch.Lane) hook.Request {
	c := config.Default()
	c.Relay.Environment = []string{"TEST_DIR=" + h.dir, "TEST_FAULT=" + faults}
	c.Relay.SandboxWrite = []string{h.dir}
	c.Relay.SelfTest = launch.SelfTestOff // tests of the self-test set another mode
	return hook.Request{
		Container: generation.Container{ID: id, PID: pid}, Lanes: lanes, Config: c,
		HookBinary: filepath.Join(bin, "peerlane-hook"),
	}
}

func (h host) launch(t *testing.T, id string, pid int, faults string, lanes ...launch.Lane) *generation.Generation {
	t.Helper()
	if len(lanes) == 0 {
		lanes = []launch.Lane{lane(3)}
	}
	g, err := hook.Launch(h.layout, h.request(id, pid, faults, lanes...))
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// container starts container c with these faults of the relay, and returns when the relay is ready.
func (h host) container(t *testing.T, faults string) (init *exec.Cmd, g *generation.Generation, relay int) {
	t.Helper()
	init = startProcess(t)
	g = h.launch(t, "c", init.Process.Pid, faults)
	return init, g, h.state(t, g.ID, generation.StateReady).Status.Relay.PID
}

func lane(index int) launch.Lane {
	gpu := func(i int) launch.GPU {
		return launch.GPU{
			UUID:  fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i),
			BusID: fmt.Sprintf("0000:%02x:00.0", 16+i),
			Index: i,
		}
	}
	return launch.Lane{
		GPU:     gpu(index),
		Role:    "far",
		Relay:   true,
		Servers: []launch.GPU{gpu(100)},
		NICs:    []string{"mlx5_0"},
	}
}

// ask connects as a client does and returns the pid of the relay that answers.
func (h host) ask(generation string) (int, error) {
	// The address of a Unix socket has at most 108 bytes, so use a short name.
	dir, err := os.Open(h.layout.SocketDir(generation))
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	return ask(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), paths.SocketName))
}

func ask(path string) (int, error) {
	conn, err := net.Dial("unixpacket", path)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(testutil.Deadline()); err != nil {
		return 0, err
	}
	answer := make([]byte, 100)
	n, err := conn.Read(answer)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimPrefix(string(answer[:n]), "relay "))
}

// info returns the generation with an id.
func (h host) info(t *testing.T, id string) generation.Info {
	t.Helper()
	all, err := generation.List(h.layout)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(all, func(i generation.Info) bool { return i.ID == id })
	if i < 0 {
		t.Fatalf("generation %s is not among %v", id, all)
	}
	return all[i]
}

func (h host) state(t *testing.T, id, state string) generation.Info {
	t.Helper()
	var info generation.Info
	testutil.Succeeds(t, "state "+state, func() error {
		info = h.info(t, id)
		if info.Status.State != state {
			return fmt.Errorf("status is %+v", info.Status)
		}
		return nil
	})
	return info
}

// supervisorPID finds the supervisor of a generation by the command line, and returns the pid.
func supervisorPID(t *testing.T, generation string) int {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err == nil && strings.Contains(string(text), "supervise\x00") && strings.Contains(string(text), generation) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	t.Fatalf("generation %s has no supervisor", generation)
	return 0
}

func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

func waitDead(t *testing.T, pid int) {
	t.Helper()
	testutil.Succeeds(t, "end of a process", func() error {
		if alive(pid) {
			return fmt.Errorf("process %d lives", pid)
		}
		return nil
	})
}

// planOf returns a plan of the lanes that function lane makes.
func planOf(sysfs string, indices ...int) *planner.Plan {
	p := &planner.Plan{Version: planner.Version, Source: topo.Source{Kind: topo.SourceSysfs, Sysfs: sysfs}}
	for _, i := range indices {
		l := lane(i)
		var servers []string
		for _, g := range append(l.Servers, l.GPU) {
			if !slices.ContainsFunc(p.GPUs, func(existing topo.GPU) bool { return existing.BusID == g.BusID }) {
				p.GPUs = append(p.GPUs, topo.GPU{Index: g.Index, UUID: g.UUID, BusID: g.BusID, Minor: g.Index})
			}
		}
		for _, s := range l.Servers {
			servers = append(servers, s.BusID)
		}
		p.Lanes = append(
			p.Lanes,
			planner.Lane{GPU: l.GPU.BusID, Role: l.Role, Relay: l.Relay, Servers: servers, NICs: l.NICs},
		)
	}
	return p
}
