package hook_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/config"
)

// stray starts a process that lives on without this relay, and closes the files
// that it takes with it.
func stray(files ...*os.File) {
	c := exec.Command("/bin/sleep", "1000000")
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	c.ExtraFiles = files
	if err := c.Start(); err != nil {
		fatal(err)
	}
	for _, f := range files {
		f.Close()
	}
	report("stray", c.Process.Pid)
}

// strays are those that relays have started, which end with the test.
func (h host) strays(t *testing.T) []int {
	t.Helper()
	pids := reports[int](t, h.dir, "stray")
	t.Cleanup(func() {
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL) // most have ended
		}
	})
	return pids
}

// oneStray waits for one that has the uid of its relay.
func (h host) oneStray(t *testing.T, g *hook.Generation) int {
	t.Helper()
	h.state(t, g.ID, hook.StateReady)
	pids := h.strays(t)
	if len(pids) != 1 {
		t.Fatalf("strays %v", pids)
	}
	var is unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d", pids[0]), &is); err != nil || int(is.Uid) != g.Sandbox.UID || is.Uid == 0 {
		t.Fatalf("process %d has uid %d, and its relay %d: %v", pids[0], is.Uid, g.Sandbox.UID, err)
	}
	return pids[0]
}

// What a relay leaves behind is gone before another process has its uid.
func TestStraysEndBeforeTheNextRelay(t *testing.T) {
	t.Parallel()
	h := uidHost(t)
	other := h.launch(t, "other", process(t).Process.Pid, "")
	untouched := h.state(t, other.ID, hook.StateReady).Status.Relay.PID
	init := process(t)
	g := h.launch(t, "c", init.Process.Pid, "forks once")
	left := h.oneStray(t, g)
	if err := unix.Kill(h.info(t, g.ID).Status.Relay.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the next relay", func() error {
		if s := h.info(t, g.ID).Status; s.State != hook.StateReady || s.Starts != 2 {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	if alive(left) {
		t.Errorf("process %d lives", left)
	}
	if pid, err := h.ask(other.ID); err != nil || pid != untouched {
		t.Errorf("relay %d of another container answers, and it was %d: %v", pid, untouched, err)
	}
	if !alive(init.Process.Pid) {
		t.Error("the container has ended")
	}
}

// Who removes a generation ends what its relays have left, whoever has started
// them, and with or without a supervisor.
func TestStraysEndWithTheirGeneration(t *testing.T) {
	t.Parallel()
	for _, by := range []string{config.LauncherFork, config.LauncherSystemd} {
		for _, killed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, its supervisor killed: %v", by, killed), func(t *testing.T) {
				t.Parallel()
				h := uidHost(t)
				var systemd *launcher
				if by == config.LauncherSystemd {
					systemd = startLauncher(t, h, nil)
				}
				init := process(t)
				g := h.launchBy(t, by, "c", init.Process.Pid, "forks once")
				left := h.oneStray(t, g)
				relay := h.info(t, g.ID).Status.Relay.PID
				if killed {
					var pid int
					if systemd != nil {
						pid = systemd.started()[0].Process.Pid
					} else {
						pid = supervisor(t, g.ID)
					}
					if err := unix.Kill(pid, unix.SIGKILL); err != nil {
						t.Fatal(err)
					}
					eventually(t, "end of the supervisor", func() error {
						if h.info(t, g.ID).Supervised {
							return errors.New("it lives")
						}
						return nil
					})
				}
				end(init)
				waitDead(t, relay)
				if killed {
					h.collect(t, g.ID)
				}
				h.gone(t)
				if alive(left) {
					t.Errorf("process %d lives, and its uid is given back", left)
				}
			})
		}
	}
}

// A uid that a process has, which is none of this root's, is nobody else's.
func TestUIDOfAStranger(t *testing.T) {
	t.Parallel()
	h := uidHost(t)
	const uid = 2147340001
	c := exec.Command("sleep", "1000000")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer end(c)
	init := process(t)
	r := h.request("c", init.Process.Pid, "", lane(3))
	r.Config.Relay.UIDs = fmt.Sprintf("%d-%d", uid-1, uid+1) // the first is the group
	g, err := hook.Launch(h.layout, r)
	if err != nil {
		t.Fatal(err)
	}
	if g.Sandbox.UID != uid+1 {
		t.Errorf("its uid is %d, and %d is a stranger's", g.Sandbox.UID, uid)
	}
	end(init)
	h.gone(t)
	if !alive(c.Process.Pid) {
		t.Error("the stranger has ended")
	}
}
