package hook_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

// marks returns the uids in use.
func (h host) marks(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(h.layout.UIDs())
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// uidHost returns a host with a separate uid per relay.
func uidHost(t *testing.T) host {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: only that can take another uid")
	}
	return newHost(t)
}

// stays demands that the collector keeps the mark of the uid, and that a hook does not take the
// uid, while a process of the generation lives.
func (h host) stays(t *testing.T, uid int, what string) {
	t.Helper()
	for range 20 {
		if _, err := collector.Collect(h.layout); err != nil {
			t.Error(err)
		}
		if marks := h.marks(t); len(marks) != 1 || marks[0] != fmt.Sprint(uid) {
			t.Fatalf("%s, and the uids in use are %v", what, marks)
		}
	}
	r := h.request("another", startProcess(t).Process.Pid, "", lane(4))
	r.Config.Relay.UIDs = fmt.Sprintf("%d-%d", uid-1, uid) // the first is the group
	if _, err := hook.Launch(h.layout, r); !errors.Is(err, fault.NoRelayUID) {
		t.Errorf("%s, and another relay with the uid: %v", what, err)
	}
}

// A hook claims the uid before it writes the generation. The collector frees the uid of a hook
// killed in between.
func TestUIDOfKilledHookIsFreed(t *testing.T) {
	t.Parallel()
	h := uidHost(t)
	if err := h.layout.Create(); err != nil {
		t.Fatal(err)
	}
	c := config.Default().Relay
	for range 3 {
		if _, err := claimUID(h.layout, c); err != nil {
			t.Fatal(err)
		}
	}
	all, err := os.ReadDir(h.layout.Generations())
	if err != nil || len(all) != 3 || len(h.marks(t)) != 3 {
		t.Fatalf("%d generations, uids %v, %v", len(all), h.marks(t), err)
	}
	h.collect(t, all[0].Name(), all[1].Name(), all[2].Name())
	if marks := h.marks(t); len(marks) > 0 {
		t.Errorf("uids %v are in use still", marks)
	}
}

// The relay keeps the uid across restarts, even if a user deletes the state, until the supervisor
// ends.
func TestRestartedRelayKeepsUID(t *testing.T) {
	t.Parallel()
	h := uidHost(t)
	init := startProcess(t)
	g := h.launch(t, "c", init.Process.Pid, "")
	relay := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	if err := os.RemoveAll(h.layout.GenerationDir(g.ID)); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := unix.Kill(relay, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		waitDead(t, relay)
		h.stays(t, g.Sandbox.UID, "the supervisor is about to start its relay again")
		testutil.Succeeds(t, "the next relay", func() error {
			next, err := h.ask(g.ID)
			if err == nil && next == relay {
				err = errors.New("the killed relay answers")
			}
			relay = next
			return err
		})
		var stat syscall.Stat_t
		if err := syscall.Stat(fmt.Sprintf("/proc/%d", relay), &stat); err != nil || int(stat.Uid) != g.Sandbox.UID {
			t.Errorf("relay %d has uid %d, %v", relay, stat.Uid, err)
		}
	}
	end(init)
}

// A relay without a supervisor keeps running, and keeps the uid.
func TestRelayWithoutSupervisorKeepsUID(t *testing.T) {
	t.Parallel()
	h := uidHost(t)
	init := startProcess(t)
	g := h.launch(t, "c", init.Process.Pid, "")
	relay := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	h.killSupervisor(t, g.ID)
	h.stays(t, g.Sandbox.UID, "the supervisor is dead and the relay lives")
	if err := os.RemoveAll(h.layout.GenerationDir(g.ID)); err != nil {
		t.Fatal(err)
	}
	h.stays(t, g.Sandbox.UID, "the state is deleted and the relay lives")
	// The collector finds the relay by the process: a process with only the same uid is not a
	// relay.
	foreign := withUID(t, g.Sandbox.UID)
	if !alive(relay) {
		t.Error("the relay has ended")
	}
	end(init)
	waitDead(t, relay)
	testutil.Succeeds(t, "the uid of the relay that has ended", func() error {
		// The collector removes the sockets and the control group, too, once the relay has ended.
		if removed, err := collector.Collect(h.layout); err != nil ||
			len(removed) > 0 && !slices.Equal(removed, []string{g.ID}) {
			return fmt.Errorf("Collect removed %v, %v", removed, err)
		}
		if marks := h.marks(t); len(marks) > 0 {
			return fmt.Errorf("uids %v are in use", marks)
		}
		// Collect keeps sockets while a process listens there: another process of the relay can
		// outlive the first for a moment.
		for _, path := range []string{h.layout.SocketDir(g.ID), h.layout.PeerSocket(g.ID)} {
			if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("the collector has left %s: %v", path, err)
			}
		}
		return nil
	})
	if !alive(foreign) {
		t.Error("a process that is none of Peerlane's has ended")
	}
}
