package hook_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/admin"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
)

// peerMode returns the mode of the socket for peers. Relays that are not root connect as members
// of a group.
func peerMode() fs.FileMode {
	if os.Geteuid() == 0 {
		return 0o660
	}
	return 0o600
}

func TestContainerLifeRemovesItsGeneration(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init := startProcess(t)
	g := h.launch(t, "../an id/is data", init.Process.Pid, "")

	info := h.state(t, g.ID, generation.StateReady)
	if !info.Alive || !info.Supervised || info.Status.Starts != 1 || info.Container.ID != "../an id/is data" {
		t.Errorf("List says %+v", info)
	}
	pid, err := h.ask(g.ID)
	if err != nil || pid != info.Status.Relay.PID {
		t.Errorf("a client reaches relay %d (%v), and the status says %d", pid, err, info.Status.Relay.PID)
	}
	for path, want := range map[string]fs.FileMode{
		h.layout.Sockets():                                fs.ModeDir | 0o700,
		h.layout.SocketDir(g.ID):                          fs.ModeDir | 0o755,
		h.layout.SocketDir(g.ID) + "/relay.sock":          fs.ModeSocket | 0o666,
		h.layout.PeerSocket(g.ID):                         fs.ModeSocket | peerMode(),
		h.layout.GenerationDir(g.ID):                      fs.ModeDir | 0o700,
		h.layout.GenerationDir(g.ID) + "/admin.sock":      fs.ModeSocket | 0o600,
		h.layout.GenerationDir(g.ID) + "/status.json":     0o600,
		h.layout.GenerationDir(g.ID) + "/relay.log":       0o600,
		h.layout.GenerationDir(g.ID) + "/generation.json": 0o600,
	} {
		if i, err := os.Lstat(path); err != nil {
			t.Error(err)
		} else if i.Mode() != want {
			t.Errorf("%s: mode %v, want %v", path, i.Mode(), want)
		}
	}

	if groups := ownCgroup(t, pid); groups != "" && !strings.HasSuffix(groups, "/"+h.layout.Cgroup()+"/"+g.ID) {
		t.Errorf("the relay is in the control group %s", groups)
	}

	configs := reports[launch.Config](t, h.dir, "config")
	want := []launch.Config{{
		Version: launch.Version, Generation: g.ID, Container: "../an id/is data", Lanes: []launch.Lane{lane(3)},
		Route: "auto", Transport: "auto", Slots: 8, SlotBytes: 32 << 20, Peers: h.layout.Peers(),
		Admission: true, HostAdmission: true, OwnHostMemory: g.Config.OwnHostMemory, Endings: true, Reserve: "attach",
		Scope: launch.ScopeHost, SelfTest: launch.SelfTestOff, Calibrated: true, Bounce: 1 << 30,
		Limits:    launch.DefaultLimits,
		NoNetwork: "no cluster key, " + h.layout.ClusterKey() + "; run peerlane key generate",
		Verbs:     &launch.DefaultVerbs,
	}}
	if diff := cmp.Diff(want, configs); diff != "" {
		t.Errorf("configuration (-want +got)\n%s", diff)
	}
	starts := reports[relayStart](t, h.dir, "start")
	for i := range starts { // a control group may limit the number
		starts[i].Environment = slices.DeleteFunc(
			starts[i].Environment,
			func(e string) bool { return strings.HasPrefix(e, "GOMAXPROCS=") },
		)
	}
	wantStart := []relayStart{{
		PID: pid, Args: []string{"serve"}, Directory: "/", OwnSession: true,
		Descriptors: []string{
			"0 /dev/null", "1 /dev/null", "2 pipe:",
			"3 socket:", "4 socket:", "5 socket:", "6 anon_inode:[pidfd",
		},
		Environment: []string{
			"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
			"TEST_DIR=" + h.dir,
			"TEST_FAULT=",
		},
	}}
	if diff := cmp.Diff(wantStart, starts); diff != "" {
		t.Errorf("start of the relay (-want +got)\n%s", diff)
	}

	watcher := supervisorPID(t, g.ID)
	end(init)
	h.gone(t)
	waitDead(t, pid)
	waitDead(t, watcher)
	noCgroup(t, g.ID)
}

// ownCgroup returns the cgroup2 path of a process; empty on a machine where the process cannot
// have a separate group.
func ownCgroup(t *testing.T, pid int) string {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if unix.Access(root+"/cgroup.subtree_control", unix.W_OK) != nil {
			continue
		}
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
				return path
			}
		}
	}
	return ""
}

func noCgroup(t *testing.T, generation string) {
	t.Helper()
	left, err := filepath.Glob("/sys/fs/cgroup/*/peerlane*/" + generation)
	if err != nil {
		t.Fatal(err)
	}
	more, err := filepath.Glob("/sys/fs/cgroup/peerlane*/" + generation)
	if err != nil {
		t.Fatal(err)
	}
	if left = append(left, more...); len(left) > 0 {
		t.Errorf("control groups are left: %v", left)
	}
}

// A descriptor that the runtime did not close must not reach supervisor or relay. Not parallel:
// programs of parallel tests would inherit the descriptor.
func TestRelayInheritsNoDescriptor(t *testing.T) {
	h := newHost(t)
	init := startProcess(t)
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	if _, err := unix.FcntlInt(write.Fd(), unix.F_SETFD, 0); err != nil { // no close-on-exec
		t.Fatal(err)
	}
	g := h.launch(t, "c", init.Process.Pid, "")
	h.state(t, g.ID, generation.StateReady)
	write.Close()
	if err := read.SetReadDeadline(testutil.Deadline()); err != nil {
		t.Fatal(err)
	}
	if n, err := read.Read(make([]byte, 1)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a process still holds the pipe: %v", err)
	}
}

// A client that connects before the relay accepts waits in the backlog.
func TestEarlyClientsWait(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	g := h.launch(t, "c", startProcess(t).Process.Pid, "late")
	var clients sync.WaitGroup
	for range 200 {
		clients.Go(func() {
			if _, err := h.ask(g.ID); err != nil {
				t.Error(err)
			}
		})
	}
	clients.Wait()
}

func TestDeadRelayIsStartedAgain(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	g := h.launch(t, "c", startProcess(t).Process.Pid, "")
	first := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	if err := unix.Kill(first, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitDead(t, first)
	second, err := h.ask(g.ID) // on the same socket, also while there is no relay
	if err != nil || second == first {
		t.Fatalf("relay %d answers after %d died: %v", second, first, err)
	}
	info := h.state(t, g.ID, generation.StateReady)
	if info.Status.Starts != 2 || info.Status.Relay.PID != second {
		t.Errorf("status %+v", info.Status)
	}
	if n := len(reports[launch.Config](t, h.dir, "config")); n != 2 {
		t.Errorf("%d configurations were sent to two relays", n)
	}
}

// Some relays never work: clients receive the reason, the log has the reason, and the end of the
// container is clean.
func TestUselessRelayStaysDown(t *testing.T) {
	t.Parallel()
	for fault, want := range map[string]string{"dies": "exit status 3", "refuses all": "no such GPU"} {
		t.Run(fault, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			init := startProcess(t)
			g := h.launch(t, "c", init.Process.Pid, fault)
			info := h.state(t, g.ID, generation.StateDown)
			if info.Status.Starts != 5 || info.Status.Relay != nil || !strings.Contains(info.Status.Error, want) {
				t.Errorf("status %+v; the error should say %q", info.Status, want)
			}
			for _, socket := range []string{filepath.Join(h.layout.SocketDir(g.ID), "relay.sock"), h.layout.PeerSocket(g.ID)} {
				if why := refused(t, socket); !strings.Contains(why, want) ||
					!strings.Contains(why, "stays down after 5 failures") {
					t.Errorf("client at %s received %q, want %q", socket, why, want)
				}
			}
			_, err := hook.Launch(h.layout, h.request("c", init.Process.Pid, fault, lane(4)))
			if e, ok := errors.AsType[*admin.RefusedError](err); !ok || !strings.Contains(e.Reason, want) {
				t.Errorf("adding a lane to a relay that is down: %v; want the reason %q", err, want)
			}
			log, err := os.ReadFile(h.layout.GenerationDir(g.ID) + "/relay.log")
			if err != nil || !strings.Contains(string(log), "giving up") ||
				fault == "dies" && !strings.Contains(string(log), "no libcuda") {
				t.Errorf("log %q, %v", log, err)
			}
			end(init)
			h.gone(t)
		})
	}
}

func TestSilentRelayIsKilled(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init := startProcess(t)
	g := h.launch(t, "c", init.Process.Pid, "silent")
	first := h.info(t, g.ID).Status.Relay.PID
	waitDead(t, first)
	testutil.Succeeds(t, "the next relay", func() error {
		if s := h.info(t, g.ID).Status; s.Starts != 2 {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	log, err := os.ReadFile(h.layout.GenerationDir(g.ID) + "/relay.log")
	if err != nil || !strings.Contains(string(log), "did not answer its configuration") {
		t.Errorf("log %q, %v", log, err)
	}
	end(init)
	h.gone(t)
}

func TestStubbornRelayIsKilled(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init, g, pid := h.container(t, "stubborn")
	end(init)
	h.gone(t)
	waitDead(t, pid)
	noCgroup(t, g.ID)
}

func TestSupervisorStopsOnRequest(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	g := h.launch(t, "c", startProcess(t).Process.Pid, "")
	pid := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	if err := unix.Kill(supervisorPID(t, g.ID), unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	h.gone(t)
	waitDead(t, pid)
}

func TestLanesAddedInTurnShareRelay(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init := startProcess(t)
	first := h.launch(t, "c", init.Process.Pid, "", lane(2))
	second := h.launch(t, "c", init.Process.Pid, "", lane(3), lane(2))
	third := h.launch(t, "c", init.Process.Pid, "", lane(3))
	if first.ID != second.ID || first.ID != third.ID {
		t.Fatalf("generations %s, %s and %s", first.ID, second.ID, third.ID)
	}
	if diff := cmp.Diff([]launch.Lane{lane(2), lane(3)}, third.Config.Lanes); diff != "" {
		t.Errorf("lanes (-want +got)\n%s", diff)
	}
	testutil.Succeeds(t, "the relay's configuration", func() error {
		configs := reports[launch.Config](t, h.dir, "config")
		if len(configs) != 2 || len(configs[1].Lanes) != 2 {
			return fmt.Errorf("configurations %+v", configs)
		}
		return nil
	})
	if starts := reports[relayStart](t, h.dir, "start"); len(starts) != 1 {
		t.Errorf("%d relays were started", len(starts))
	}
}

// The relay that takes over gets the lanes that came later.
func TestChangedLanesSurviveTheRelay(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init := startProcess(t)
	g := h.launch(t, "c", init.Process.Pid, "refuses changes", lane(2))
	h.state(t, g.ID, generation.StateReady)
	h.launch(t, "c", init.Process.Pid, "", lane(3))
	testutil.Succeeds(t, "the refusal", func() error {
		if s := h.info(t, g.ID).Status; s.State != generation.StateReady || !strings.Contains(s.Error, "no such GPU") {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	if err := unix.Kill(h.info(t, g.ID).Status.Relay.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testutil.Succeeds(t, "the second relay", func() error {
		s := h.info(t, g.ID).Status
		if s.Starts != 2 || s.State != generation.StateReady || s.Error != "" {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	if configs := reports[launch.Config](t, h.dir, "config"); len(configs) != 3 {
		t.Errorf("configurations %+v", configs)
	}
}

func TestConcurrentHooksOfContainerShareGeneration(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init := startProcess(t)
	const n = 12
	generations := make([]*generation.Generation, n)
	var hooks sync.WaitGroup
	for i := range n {
		hooks.Go(func() {
			var err error
			generations[i], err = hook.Launch(h.layout, h.request("c", init.Process.Pid, "", lane(i)))
			if err != nil {
				t.Error(err)
			}
		})
	}
	hooks.Wait()
	all, err := generation.List(h.layout)
	if err != nil || len(all) != 1 || len(all[0].Config.Lanes) != n {
		t.Fatalf("generations %+v, %v", all, err)
	}
	h.state(t, all[0].ID, generation.StateReady)
	if starts := reports[relayStart](t, h.dir, "start"); len(starts) != 1 {
		t.Errorf("%d relays were started", len(starts))
	}
}

func TestConcurrentHooksOfContainersStartRelays(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	var hooks sync.WaitGroup
	var inits []*exec.Cmd
	for range 12 {
		init := startProcess(t)
		inits = append(inits, init)
		hooks.Go(func() {
			if _, err := collector.Collect(h.layout); err != nil {
				t.Error(err)
			}
			g, err := hook.Launch(h.layout, h.request("same id", init.Process.Pid, "", lane(3)))
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := h.ask(g.ID); err != nil {
				t.Error(err)
			}
		})
	}
	hooks.Wait()
	all, err := generation.List(h.layout)
	if err != nil || len(all) != len(inits) {
		t.Errorf("%d generations: %v", len(all), err)
	}
	for _, init := range inits {
		end(init)
	}
	h.gone(t)
}

func TestLaunchFailsClearlyAndLeavesNothing(t *testing.T) {
	t.Parallel()
	init := startProcess(t)
	dead := startProcess(t)
	end(dead)
	text := filepath.Join(t.TempDir(), "text")
	if err := programs.Write(text, []byte("no program")); err != nil {
		t.Fatal(err)
	}
	program := func(operation string, cause error) func(error) bool {
		return func(err error) bool {
			f, ok := errors.AsType[*fault.Error](err)
			return ok && f.Code == fault.NoRelayProgram && f.Operation == operation && f.Remedy != "" &&
				testutil.HasError(f.Cause, cause)
		}
	}
	for _, test := range []struct {
		name    string
		edit    func(*hook.Request)
		errorIs func(error) bool
	}{
		{"no relay binary", func(r *hook.Request) { r.Config.Relay.Binary = "/nowhere/peerlane-relay" },
			program("find the relay binary", &fs.PathError{Op: "stat", Path: "/nowhere/peerlane-relay", Err: unix.ENOENT})},
		{"relay that is no program", func(r *hook.Request) { r.Config.Relay.Binary = text },
			program("find the relay binary", &fs.PathError{Op: "exec", Path: text, Err: unix.ENOEXEC})},
		{"relay that cannot be executed", func(r *hook.Request) { r.Config.Relay.Binary = "/etc/passwd" },
			program("find the relay binary", &fs.PathError{Op: "exec", Path: "/etc/passwd", Err: unix.EACCES})},
		{"relay that is a directory", func(r *hook.Request) { r.Config.Relay.Binary = "/etc" },
			program("find the relay binary", &fs.PathError{Op: "exec", Path: "/etc", Err: unix.EISDIR})},
		{"no hook binary", func(r *hook.Request) { r.HookBinary = "/nowhere/peerlane-hook" },
			program("find the hook binary", &fs.PathError{Op: "stat", Path: "/nowhere/peerlane-hook", Err: unix.ENOENT})},
		{"hook binary that is no supervisor",
			func(r *hook.Request) { r.HookBinary, r.Config.Relay.Binary = "/bin/false", "/bin/true" },
			func(err error) bool {
				e, ok := errors.AsType[*hook.SupervisorError](err)
				return ok && e.Program == "/bin/false" && e.Exit == "exit status 1"
			}},
		{"process that has ended", func(r *hook.Request) { r.Container.PID = dead.Process.Pid },
			func(err error) bool {
				f, ok := errors.AsType[*fault.Error](err)
				return ok && f.Object == strconv.Itoa(dead.Process.Pid) && errors.Is(f, process.ErrEnded)
			}},
		{"no lane", func(r *hook.Request) { r.Lanes = nil },
			func(err error) bool { return errors.Is(err, hook.ErrNoLane) }},
		{"too many lanes", func(r *hook.Request) {
			for i := range 1000 {
				r.Lanes = append(r.Lanes, lane(4+i))
			}
		}, func(err error) bool {
			e, ok := errors.AsType[*hook.LanesError](err)
			return ok && e.Lanes == 1001 && e.Bytes > launch.MaxDatagram
		}},
		{"impossible configuration", func(r *hook.Request) { r.Config.Relay.Slots = 0 }, func(err error) bool {
			e, ok := errors.AsType[*launch.ValueError](err)
			return ok && e.Field == "slots" && e.Value == 0
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newHost(t)
			r := h.request("c", init.Process.Pid, "", lane(3))
			test.edit(&r)
			_, err := hook.Launch(h.layout, r)
			if err == nil {
				t.Fatal("Launch succeeded")
			}
			if e, ok := errors.AsType[*hook.StartError](err); !ok || e.Container != "c" || !test.errorIs(e.Err) {
				t.Errorf("error %v", err)
			}
			// At once, not eventually.
			for _, dir := range []string{h.layout.Generations(), h.layout.Sockets(), h.layout.Peers()} {
				if entries, err := os.ReadDir(dir); len(entries) > 0 {
					t.Errorf("%s holds %v, %v", dir, entries, err)
				}
			}
		})
	}
}

// Only Launch starts a supervisor: a manual start would start a second relay.
func TestSuperviseByHandIsRefused(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	g := h.launch(t, "c", startProcess(t).Process.Pid, "")
	for _, id := range []string{g.ID, "../" + g.ID, strings.Repeat("0", 32)} {
		out, err := exec.Command(filepath.Join(bin, "peerlane-hook"), "supervise", "--root", h.layout.Root, "--generation",
			id).
			CombinedOutput()
		if err == nil || !strings.Contains(string(out), "only peerlane-hook create") {
			t.Errorf("supervise %s: %v, %s", id, err, out)
		}
	}
	if info := h.info(t, g.ID); info.Status.Starts > 1 {
		t.Errorf("status %+v", info.Status)
	}
}
