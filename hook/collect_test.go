package hook_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/admin"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

// collect runs the collector, and demands that it removes the generations in want.
func (h host) collect(t *testing.T, want ...string) {
	t.Helper()
	removed, err := collector.Collect(h.layout)
	if err != nil {
		t.Error(err)
	}
	slices.Sort(removed)
	slices.Sort(want)
	if !slices.Equal(removed, want) {
		t.Errorf("Collect removed %v, want %v", removed, want)
	}
}

// killSupervisor kills the supervisor of a generation, and returns when the lock is free.
func (h host) killSupervisor(t *testing.T, id string) {
	t.Helper()
	if err := unix.Kill(supervisorPID(t, id), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testutil.Succeeds(t, "end of the supervisor", func() error {
		if h.info(t, id).Supervised {
			return errors.New("the supervisor runs")
		}
		return nil
	})
}

func TestCollectOnEmptyHostSucceeds(t *testing.T) {
	t.Parallel()
	host{layout: paths.New(filepath.Join(t.TempDir(), "nothing"))}.collect(t)
}

func TestCollectTouchesNothingThatLives(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	g := h.launch(t, "c", startProcess(t).Process.Pid, "")
	h.state(t, g.ID, generation.StateReady)
	h.collect(t)
	if _, err := h.ask(g.ID); err != nil {
		t.Error(err)
	}
}

// The poststop hook of a container can run after the start of the next container with the same
// id.
func TestLatePoststopLeavesTheNextOfTheSameID(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	old := startProcess(t)
	first := h.launch(t, "same id", old.Process.Pid, "")
	h.state(t, first.ID, generation.StateReady)
	h.killSupervisor(t, first.ID)
	second := h.launch(t, "same id", startProcess(t).Process.Pid, "")
	h.state(t, second.ID, generation.StateReady)

	end(old)
	h.collect(t, first.ID)
	if pid, err := h.ask(second.ID); err != nil || pid != h.info(t, second.ID).Status.Relay.PID {
		t.Errorf("the living container's relay: %d, %v", pid, err)
	}
}

// A relay survives the supervisor. Collect leaves the relay alone until the container ends, and
// then kills a relay that does not exit.
func TestKilledSupervisorLeavesRelay(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init, g, pid := h.container(t, "stubborn")
	h.killSupervisor(t, g.ID)

	h.collect(t)
	if answered, err := h.ask(g.ID); err != nil || answered != pid {
		t.Errorf("relay %d answers, want %d (%v)", answered, pid, err)
	}
	_, err := hook.Launch(h.layout, h.request("c", init.Process.Pid, "", lane(4)))
	if !errors.Is(err, admin.ErrSupervisorKilled) {
		t.Errorf("adding a lane: %v", err)
	}
	if lanes := h.info(t, g.ID).Config.Lanes; len(lanes) != 1 {
		t.Errorf("lanes after the refused launch: %v", lanes)
	}

	end(init)
	h.collect(t, g.ID)
	waitDead(t, pid)
	noCgroup(t, g.ID)
}

// A relay tells the peers that the container has ended. Collect waits for the relay where the
// supervisor was killed.
func TestCollectLetsTheRelayEndByItself(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init, g, _ := h.container(t, "slow end")
	h.killSupervisor(t, g.ID)
	end(init)
	h.collect(t, g.ID)
	if ends := reports[string](t, h.dir, "end"); len(ends) != 1 {
		t.Errorf("the relay was killed: reports %q", ends)
	}
	noCgroup(t, g.ID)
}

// An ending supervisor removes the generation of a killed supervisor.
func TestSupervisorsCollectForEachOther(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	a, b := startProcess(t), startProcess(t)
	killed := h.launch(t, "a", a.Process.Pid, "")
	other := h.launch(t, "b", b.Process.Pid, "")
	h.state(t, killed.ID, generation.StateReady)
	h.state(t, other.ID, generation.StateReady)
	h.killSupervisor(t, killed.ID)
	end(a)
	end(b)
	h.gone(t)
}

// spoil changes the record of a generation on disk.
func (h host) spoil(t *testing.T, id string, change func(*generation.Generation)) {
	t.Helper()
	path := filepath.Join(h.layout.GenerationDir(id), "generation.json")
	text, err := os.ReadFile(path)
	var g generation.Generation
	if err == nil {
		err = json.Unmarshal(text, &g)
	}
	change(&g)
	if err == nil {
		text, err = json.Marshal(g)
	}
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// After the end of the init of a container, another process can have the same pid.
func TestReusedPIDIsNotTheContainer(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(*generation.Generation)
		ended  bool
	}{
		"the same process":   {func(g *generation.Generation) {}, false},
		"another start time": {func(g *generation.Generation) { g.Init.Start-- }, true},
		"another boot": {func(g *generation.Generation) { g.Init.Boot = "01234567-89ab-cdef-0123-456789abcdef" },
			true},
		"a thread's number": {func(g *generation.Generation) { g.Init.PID = thread(t) }, true},
		// beyond the kernel's PID_MAX_LIMIT
		"a number of nothing": {func(g *generation.Generation) { g.Init.PID = 1 << 22 }, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			init := startProcess(t)
			g := h.launch(t, "c", init.Process.Pid, "")
			h.state(t, g.ID, generation.StateReady)
			h.killSupervisor(t, g.ID)
			h.spoil(t, g.ID, test.change)
			if !test.ended {
				h.collect(t)
				end(init)
			} else if h.info(t, g.ID).Alive {
				t.Error("List reports a live container")
			}
			h.collect(t, g.ID)
		})
	}
}

// thread returns the number of a thread that is not the first thread of the process.
func thread(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		var pid int
		if err := json.Unmarshal([]byte(e.Name()), &pid); err == nil && pid != os.Getpid() {
			return pid
		}
	}
	t.Fatal("this process has a single thread")
	return 0
}

// A crash of the host, or a kill of a hook during the first steps, leaves a damaged generation.
func TestCollectRemovesDamagedGenerations(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	if err := h.layout.Create(); err != nil {
		t.Fatal(err)
	}
	torn, empty := strings.Repeat("a", 32), strings.Repeat("b", 32)
	for _, dir := range []string{h.layout.GenerationDir(torn), h.layout.GenerationDir(empty), h.layout.SocketDir(torn)} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(h.layout.GenerationDir(torn)+"/generation.json", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// The folder is not a generation, so Collect keeps the folder.
	if err := os.Mkdir(h.layout.Generations()+"/lost+found", 0o700); err != nil {
		t.Fatal(err)
	}
	h.collect(t, torn, empty)
	if err := os.Remove(h.layout.Generations() + "/lost+found"); err != nil {
		t.Error(err)
	}
}

// A user deletes the state of a running container.
func TestDeletedStateStillEndsRelay(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init, g, pid := h.container(t, "")
	watcher := supervisorPID(t, g.ID)
	if err := os.RemoveAll(h.layout.GenerationDir(g.ID)); err != nil {
		t.Fatal(err)
	}
	end(init)
	waitDead(t, pid)
	waitDead(t, watcher)
	noCgroup(t, g.ID)
}

// A process makes or removes the locked generation.
func TestCollectWaitsForNoLock(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init, g, _ := h.container(t, "")
	h.killSupervisor(t, g.ID)
	end(init)
	dir, err := os.Open(h.layout.GenerationDir(g.ID))
	if err == nil {
		err = unix.Flock(int(dir.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		t.Fatal(err)
	}
	h.collect(t)
	dir.Close()
	h.collect(t, g.ID)
}

// A hook killed during the launch leaves no lock. After the end of the container no generation is
// left either.
func TestKilledHookLeavesNothing(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	if err := h.layout.Create(); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		init := startProcess(t)
		g := h.launch(t, "c", init.Process.Pid, "late")
		h.killSupervisor(t, g.ID) // before the relay has answered
		end(init)
		h.launch(t, "c", startProcess(t).Process.Pid, "")
	}
	// A supervisor may be removing a generation at the same time.
	testutil.Succeeds(t, "collection", func() error {
		if _, err := collector.Collect(h.layout); err != nil {
			t.Fatal(err)
		}
		all, err := generation.List(h.layout)
		if err != nil || len(all) != 5 {
			return fmt.Errorf("%d generations, want 5: %v", len(all), err)
		}
		return nil
	})
	all, err := generation.List(h.layout)
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range all {
		if !g.Alive {
			t.Errorf("generation %s lives no more", g.ID)
		}
	}
}

// After a boot the state is on disk, and the sockets are gone with the tmpfs. The pid of the old
// init can belong to another process.
func TestBootRemovesOldGenerations(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	stranger := startProcess(t)
	g := h.launch(t, "c", stranger.Process.Pid, "stubborn")
	relay := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	h.killSupervisor(t, g.ID)
	if err := unix.Kill(relay, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitDead(t, relay)
	const boot = "01234567-89ab-cdef-0123-456789abcdef"
	h.spoil(t, g.ID, func(g *generation.Generation) { g.Init.Boot = boot })
	path := filepath.Join(h.layout.GenerationDir(g.ID), "status.json")
	text, err := json.Marshal(generation.Status{State: generation.StateReady, Starts: 1,
		Relay: &process.Process{PID: stranger.Process.Pid, Start: 1, Boot: boot}})
	if err == nil {
		err = errors.Join(os.WriteFile(path, text, 0o600), os.RemoveAll(h.layout.Run()))
	}
	if err != nil {
		t.Fatal(err)
	}
	// Any later command collects. The test starts a container.
	next := h.launch(t, "c", startProcess(t).Process.Pid, "")
	h.state(t, next.ID, generation.StateReady)
	testutil.Succeeds(t, "collection", func() error {
		if _, err := os.Stat(h.layout.GenerationDir(g.ID)); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("the generation of the last boot: %w", err)
		}
		return nil
	})
	if err := stranger.Process.Signal(unix.Signal(0)); err != nil {
		t.Errorf("a process that has the number of the last boot's: %v", err)
	}
	if _, err := h.ask(next.ID); err != nil {
		t.Error(err)
	}
}

// left returns a generation whose container and supervisor have ended.
func (h host) left(t *testing.T) (id string) {
	t.Helper()
	init := startProcess(t)
	g := h.launch(t, "c", init.Process.Pid, "")
	relay := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	h.killSupervisor(t, g.ID)
	end(init)
	waitDead(t, relay)
	return g.ID
}

func TestCollectNamesOnlyGenerationsThatAreRemoved(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it mounts")
	}
	t.Parallel()
	h := newHost(t)
	id := h.left(t)
	busy := filepath.Join(h.layout.SocketDir(id), "mount")
	if err := errors.Join(os.Mkdir(busy, 0o700), unix.Mount("tmpfs", busy, "tmpfs", 0, "")); err != nil {
		t.Fatal(err)
	}
	removed, err := collector.Collect(h.layout)
	if unmounted := unix.Unmount(busy, unix.MNT_DETACH); unmounted != nil {
		t.Fatal(unmounted)
	}
	failed, ok := errors.AsType[*fault.Error](err)
	if len(removed) > 0 || !ok || failed.Operation != "remove generation" || failed.Object != id ||
		!errors.Is(err, unix.EBUSY) {
		t.Errorf("removed %v, %v", removed, err)
	}
	h.collect(t, id)
}

// removeWithoutCgroup2 runs peerlane-hook remove in a mount namespace without cgroup2, with a change
// of the bounding set of capabilities.
func removeWithoutCgroup2(t *testing.T, h host, bounding string) (out string, err error) {
	t.Helper()
	text, err := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-euc",
		`for dir in $(sed -n 's/^[^ ]* [^ ]* [^ ]* [^ ]* \([^ ]*\) .* - cgroup2 .*/\1/p' /proc/self/mountinfo | sort -r); do umount -l "$dir"; done
		! grep -q ' - cgroup2 ' /proc/self/mountinfo
		exec setpriv --bounding-set "$2" -- "$0" remove --root "$1"`,
		filepath.Join(bin, "peerlane-hook"), h.layout.Root, bounding).CombinedOutput()
	return string(text), err
}

// The hook of an engine can have a mount namespace without cgroup2. A collector there that may not
// mount cgroup2 names the control group, and keeps the generation for the next collector.
func TestCollectWithoutCgroup2RemovesOrReportsControlGroups(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mount namespaces")
	}
	t.Parallel()
	h := newHost(t)
	id := h.left(t)
	out, err := removeWithoutCgroup2(t, h, "-sys_admin")
	if group := filepath.Join(h.layout.Cgroup(), id); err == nil || !strings.Contains(out, group) ||
		!strings.Contains(out, "CAP_SYS_ADMIN") {
		t.Errorf("the collector without CAP_SYS_ADMIN: %v: %s", err, out)
	}
	if h.info(t, id).ID != id {
		t.Error("the generation is gone")
	}
	unreported := h.left(t)
	if out, err := removeWithoutCgroup2(t, h, "+all"); err != nil {
		t.Errorf("the collector with CAP_SYS_ADMIN: %v: %s", err, out)
	}
	noCgroup(t, id)
	noCgroup(t, unreported)
	h.collect(t)
}

// A user deletes the state of a container, and kills the supervisor. Collect keeps the sockets of
// the running relay, and removes the sockets after the end of the relay.
func TestCollectRemovesSocketsWithoutGeneration(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init := startProcess(t)
	g := h.launch(t, "c", init.Process.Pid, "")
	relay := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	h.killSupervisor(t, g.ID)
	if err := os.RemoveAll(h.layout.GenerationDir(g.ID)); err != nil {
		t.Fatal(err)
	}
	h.collect(t)
	if pid, err := h.ask(g.ID); err != nil || pid != relay {
		t.Errorf("relay %d answers as %d, %v", relay, pid, err)
	}
	end(init)
	testutil.Succeeds(t, "the removal", func() error { // threads of the relay can outlive the first thread
		removed, err := collector.Collect(h.layout)
		if err == nil && !slices.Equal(removed, []string{g.ID}) {
			err = fmt.Errorf("Collect removed %v", removed)
		}
		return err
	})
	noCgroup(t, g.ID)
	h.gone(t)
}

// Two hosts share the disk of /var/lib/peerlane. A host keeps the generation of another host,
// although the boot id differs as in a generation of an earlier boot.
func TestCollectOnASharedDiskLeavesTheOtherHostsGeneration(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	machine := filepath.Join(h.layout.Root, "etc/machine-id")
	name := func(digit string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(machine), 0o755),
			os.WriteFile(machine, []byte(strings.Repeat(digit, 32)+"\n"), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	name("1")
	init, g, _ := h.container(t, "")
	h.killSupervisor(t, g.ID)
	end(init) // another host does not know the process either
	name("2")
	h.collect(t)
	if i := h.info(t, g.ID); i.Machine != strings.Repeat("1", 32) || !i.Foreign(h.layout) {
		t.Errorf("the generation is %+v", i)
	}
	name("1")
	testutil.Succeeds(t, "its own host's collection", func() error {
		removed, err := collector.Collect(h.layout)
		if err == nil && !slices.Equal(removed, []string{g.ID}) {
			err = fmt.Errorf("Collect removed %v", removed)
		}
		return err
	})
	h.gone(t)
}

// On a full disk the supervisor cannot write that a relay has ended.
func TestListOnAFullDiskShowsNoDeadRelay(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	g := h.launch(t, "c", startProcess(t).Process.Pid, "")
	relay := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	// The supervisor cannot create the next status file.
	full := filepath.Join(h.layout.GenerationDir(g.ID), "status.json.new")
	if err := os.Mkdir(full, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(relay, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitDead(t, relay)
	// Threads of the relay can outlive the first thread.
	testutil.Succeeds(t, "the list", func() error {
		if s := h.info(t, g.ID).Status; s.Relay != nil || s.State != generation.StateWaiting ||
			!strings.Contains(s.Error, strconv.Itoa(relay)) {
			return fmt.Errorf("the status is %+v", s)
		}
		return nil
	})
	if err := os.Remove(full); err != nil {
		t.Fatal(err)
	}
}
