package hook_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

// exe returns a program whose name is exe, as the name of a relay process before the execve.
var exe = sync.OnceValues(func() (string, error) {
	path, err := exec.LookPath("sleep")
	if err != nil {
		return "", err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	copied := filepath.Join(bin, "exe")
	return copied, os.WriteFile(copied, text, 0o755)
})

// withUID starts a process outside Peerlane with a uid. The test ends the process.
func withUID(t *testing.T, uid int) (pid int) {
	t.Helper()
	path, err := exe()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(path)
	c.Args = []string{"sleep", "1000000"} // a multi-call binary selects the program by this name
	c.Dir = "/"
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(c) })
	return c.Process.Pid
}

// A process of a container can take any uid. A foreign process with the uid of a relay keeps
// running. The process delays neither a restart of the relay, nor the end of the generation, nor
// the reuse of the uid.
func TestForeignProcessWithRelayUIDBlocksNothing(t *testing.T) {
	t.Parallel()
	h := uidHost(t)
	init := startProcess(t)
	g := h.launch(t, "c", init.Process.Pid, "")
	relay := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	foreign := withUID(t, g.Sandbox.UID)
	if err := unix.Kill(relay, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testutil.Succeeds(t, "the next relay", func() error {
		if s := h.info(t, g.ID).Status; s.State != generation.StateReady || s.Starts != 2 {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	end(init)
	h.gone(t)
	next := startProcess(t)
	r := h.request("next", next.Process.Pid, "", lane(3))
	r.Config.Relay.UIDs = fmt.Sprintf("%d-%d", g.Sandbox.UID-1, g.Sandbox.UID) // the first is the group
	another, err := hook.Launch(h.layout, r)
	if err != nil {
		t.Fatal(err)
	}
	if another.Sandbox.UID != g.Sandbox.UID {
		t.Errorf("the next relay has uid %d, not %d", another.Sandbox.UID, g.Sandbox.UID)
	}
	h.state(t, another.ID, generation.StateReady)
	end(next)
	h.gone(t)
	if !alive(foreign) {
		t.Error("a process that is none of Peerlane's has ended")
	}
}

// makeProcesses tries the ways to make a process, and returns the errors by name; "" is a
// success.
func makeProcesses() map[string]string {
	went := map[string]string{}
	for name, flags := range map[string]uintptr{"clone": 0, "clone of its memory": unix.CLONE_VM | unix.CLONE_VFORK} {
		went[name] = errorText(childless(unix.SYS_CLONE, flags|uintptr(unix.SIGCHLD)))
	}
	went["clone3"] = errorText(childless(unix.SYS_CLONE3, 0, 0))
	for name, call := range forkCalls {
		went[name] = errorText(childless(call))
	}
	for name, c := range map[string]*exec.Cmd{
		"exec": exec.Command("/bin/true"), "exec in a session": {Path: "/bin/true",
			SysProcAttr: &syscall.SysProcAttr{Setsid: true}},
	} {
		went[name] = errorText(c.Run())
	}
	return went
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// childless makes a raw system call that may make a child, which ends at once.
func childless(call uintptr, arguments ...uintptr) error {
	a := append(arguments, 0, 0, 0)
	pid, _, errno := unix.RawSyscall(call, a[0], a[1], a[2])
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	}
	return nil
}

// A relay leaves no process behind, because seccomp denies new processes. Threads are allowed.
func TestRelayCannotMakeProcesses(t *testing.T) {
	t.Parallel()
	h := uidHost(t)
	init, _, _ := h.container(t, "forks") // a ready relay has threads
	went := reports[map[string]string](t, h.dir, "forks")
	if len(went) != 1 || len(went[0]) != 5+len(forkCalls) {
		t.Fatalf("tried: %q", went)
	}
	for what, err := range went[0] {
		want := unix.EPERM.Error()
		if what == "clone3" { // libc then falls back to clone
			want = unix.ENOSYS.Error()
		}
		if !strings.HasSuffix(err, want) {
			t.Errorf("%s: %q, want %q", what, err, want)
		}
	}
	end(init)
	h.gone(t)
}

// Where SIGKILL does not end a relay, generation and uid remain, and a later collection tries
// again. Not parallel: the test replaces process.KillByPidfd.
func TestRelayThatSurvivesSIGKILLKeepsItsGeneration(t *testing.T) {
	h := uidHost(t)
	init := startProcess(t)
	g := h.launch(t, "c", init.Process.Pid, "stubborn")
	relay := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	h.killSupervisor(t, g.ID)
	end(init)
	original := process.KillByPidfd
	process.KillByPidfd = func(int) error { return nil }
	_, err := collector.Collect(h.layout)
	process.KillByPidfd = original
	var f *fault.Error
	if !errors.As(err, &f) || f.Object != g.ID || !errors.As(f.Cause, &f) || f.Code != fault.Unkillable ||
		f.Object != strconv.Itoa(relay) {
		t.Errorf("collecting a relay that does not end: %v; want %s of process %d", err, fault.Unkillable, relay)
	}
	if marks := h.marks(t); len(marks) != 1 ||
		h.info(t, g.ID).ID != g.ID { // killing the control group may have ended the relay
		t.Errorf("uids %v", marks)
	}
	testutil.Succeeds(t, "its end", func() error {
		h.collect(t, g.ID)
		if alive(relay) {
			return errors.New("the relay lives")
		}
		return nil
	})
	h.gone(t)
}

// The uid of a relay does not follow from the generation, whose name is readable in
// /proc/net/unix.
func TestUIDIsIndependentOfTheGeneration(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	if err := h.layout.Create(); err != nil {
		t.Fatal(err)
	}
	const id, first, last, count = "0123456789abcdef0123456789abcdef", 100_001, 165_000, 64
	if err := makeSupervisorLock(h.layout, id); err != nil {
		t.Fatal(err)
	}
	different := map[int]bool{}
	for range count {
		uid, err := generation.LinkUID(h.layout, id, first, last)
		if err != nil || uid < first || uid > last {
			t.Fatalf("uid %d, %v", uid, err)
		}
		different[uid] = true
		if err := os.Remove(filepath.Join(h.layout.UIDs(), fmt.Sprint(uid))); err != nil {
			t.Fatal(err)
		}
	}
	if len(different) < count/2 {
		t.Errorf("%d uids of %d are different", len(different), count)
	}
	if err := os.RemoveAll(h.layout.GenerationDir(id)); err != nil {
		t.Fatal(err)
	}
}
