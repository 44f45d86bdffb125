package hook_test

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/admin"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// refused returns the reason that a client receives from a socket.
func refused(t *testing.T, socket string) string {
	t.Helper()
	// The address of a Unix socket has at most 108 bytes.
	dir, err := os.Open(filepath.Dir(socket))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	conn, err := net.Dial("unixpacket", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(socket)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(testutil.Deadline()); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write(wire.Encode(&wire.Hello{Magic: wire.Magic, Oldest: wire.OldestVersion,
		Newest: wire.NewestVersion}, 1)); err != nil {
		t.Fatal(err)
	}
	datagram := make([]byte, wire.MaxMessage)
	n, err := conn.Read(datagram)
	if err != nil {
		t.Fatal(err)
	}
	m, _, err := wire.Decode(datagram[:n])
	failure, ok := m.(*wire.Failure)
	if err != nil || !ok {
		t.Fatalf("the answer is %T, %v", m, err)
	}
	return failure.Err().Error()
}

func (h host) clients(id string) string { return filepath.Join(h.layout.SocketDir(id), "relay.sock") }

func TestStoppedRelayStartsAfterResume(t *testing.T) {
	t.Parallel()
	for _, fault := range []string{"", "stubborn"} {
		h := newHost(t)
		init := startProcess(t)
		g := h.launch(t, "c", init.Process.Pid, fault)
		pid := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
		for range 2 { // a second stop is not an error
			if err := control.Stop(h.layout, g.ID); err != nil {
				t.Fatal(err)
			}
		}
		h.state(t, g.ID, generation.StateStopped)
		waitDead(t, pid)
		if why := refused(t, h.clients(g.ID)); !strings.Contains(why, "stopped by the administrator") {
			t.Errorf("a client hears %q", why)
		}
		if err := control.Resume(h.layout, g.ID); err != nil {
			t.Fatal(err)
		}
		info := h.state(t, g.ID, generation.StateReady)
		if answered, err := h.ask(g.ID); err != nil || answered != info.Status.Relay.PID {
			t.Errorf("relay %d answers, want %d (%v)", answered, info.Status.Relay.PID, err)
		}
		if info.Status.Starts != 2 {
			t.Errorf("status %+v", info.Status)
		}
		end(init)
		h.gone(t)
	}
}

// The administrator starts a relay that is down. The relay then may fail as often as before.
func TestResumeStartsRelayThatIsDown(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init := startProcess(t)
	g := h.launch(t, "c", init.Process.Pid, "dies")
	h.state(t, g.ID, generation.StateDown)
	if err := control.Resume(h.layout, g.ID); err != nil {
		t.Fatal(err)
	}
	testutil.Succeeds(t, "the second time", func() error {
		if s := h.info(t, g.ID).Status; s.Starts != 10 || s.State != generation.StateDown {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	end(init)
	h.gone(t)
}

// Drain does not kill a relay that needs time for the last copies.
func TestDrainWaitsForTheRelay(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init, g, pid := h.container(t, "slow drain")
	if err := control.Drain(h.layout, g.ID); err != nil {
		t.Fatal(err)
	}
	if s := h.info(t, g.ID).Status; s.State != generation.StateDraining || s.Relay == nil {
		t.Errorf("status %+v", s)
	}
	err := control.Resume(h.layout, g.ID)
	if e, ok := errors.AsType[*admin.RefusedError](err); !ok || e.Request != admin.Resume ||
		e.Reason != "the relay is still draining; resume it afterwards" {
		t.Errorf("resuming a relay that is being drained: %v", err)
	}
	h.state(t, g.ID, generation.StateDrained)
	waitDead(t, pid)
	if ends := reports[string](t, h.dir, "end"); len(ends) != 1 || ends[0] != "drained" {
		t.Errorf("the relay says %q", ends)
	}
	if why := refused(t, h.clients(g.ID)); !strings.Contains(why, "drained by the administrator; attach again later") {
		t.Errorf("a client hears %q", why)
	}
	end(init)
	h.gone(t)
}

// A copy that never ends keeps a GPU in use until the administrator stops the relay.
func TestStopEndsRelayThatCannotBeDrained(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	g := h.launch(t, "c", startProcess(t).Process.Pid, "never drained")
	pid := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	if err := control.Drain(h.layout, g.ID); err != nil {
		t.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond)
	if s := h.info(t, g.ID).Status; s.State != generation.StateDraining || s.Relay == nil || s.Relay.PID != pid {
		t.Errorf("status %+v", s)
	}
	if err := control.Stop(h.layout, g.ID); err != nil {
		t.Fatal(err)
	}
	h.state(t, g.ID, generation.StateStopped)
	waitDead(t, pid)
}

// While the host is drained, neither a new container nor a restart gets a relay.
func TestDrainedHostStartsNoRelay(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	before := h.launch(t, "before", startProcess(t).Process.Pid, "")
	h.state(t, before.ID, generation.StateReady)
	if err := generation.DrainAll(h.layout); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(h.info(t, before.ID).Status.Relay.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	h.state(t, before.ID, generation.StateDrained)
	after := h.launch(t, "after", startProcess(t).Process.Pid, "")
	if s := h.state(t, after.ID, generation.StateDrained).Status; s.Starts != 0 {
		t.Errorf("status %+v", s)
	}
	for _, id := range []string{before.ID, after.ID} {
		if why := refused(t, h.clients(id)); !strings.Contains(why, "drained by the administrator") {
			t.Errorf("a client hears %q", why)
		}
	}
	if err := control.Resume(h.layout, after.ID); err == nil || !fault.Drained.In(err.Error()) {
		t.Errorf("resuming a relay of a drained host: %v", err)
	}
	if err := generation.ResumeAll(h.layout); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{before.ID, after.ID} {
		if err := control.Resume(h.layout, id); err != nil {
			t.Error(err)
		}
		h.state(t, id, generation.StateReady)
	}
}

// After a boot no relay holds a GPU, so the drain ends.
func TestDrainedHostIsNotAfterABoot(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	if err := generation.DrainAll(h.layout); err != nil {
		t.Fatal(err)
	}
	path := h.layout.State() + "/drained.json"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	other := strings.ReplaceAll(string(text), strings.TrimSpace(string(boot)), "01234567-89ab-cdef-0123-456789abcdef")
	if err := os.WriteFile(path, []byte(other), 0o600); err != nil {
		t.Fatal(err)
	}
	h.state(t, h.launch(t, "c", startProcess(t).Process.Pid, "").ID, generation.StateReady)
}

func TestInspectShowsRelayAndProcesses(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init := startProcess(t)
	g := h.launch(t, "c", init.Process.Pid, "")
	info := h.state(t, g.ID, generation.StateReady)
	found, err := control.Find(h.layout, g.ID[:5])
	if err != nil || len(found) != 1 || found[0].ID != g.ID {
		t.Errorf("Find by the beginning: %v, %v", found, err)
	}
	if found, err := control.Find(h.layout, "c"); err != nil || len(found) != 1 || found[0].ID != g.ID {
		t.Errorf("Find by the container: %v, %v", found, err)
	}
	if _, err := control.Find(h.layout, "another"); !errors.Is(err, control.ErrNoRelay) {
		t.Errorf("Find of an unknown name: %v", err)
	}
	i, err := control.Inspect(h.layout, g.ID)
	if err != nil {
		t.Fatal(err)
	}
	if i.Report == nil || len(i.Report.Contexts) != 1 || i.Report.Contexts[0] != "0000:17:00.0" {
		t.Errorf("the relay's report is %+v (%s)", i.Report, i.NoReport)
	}
	if len(i.Processes) != 2 || i.Processes[0].PID != supervisorPID(t, g.ID) ||
		i.Processes[1].PID != info.Status.Relay.PID {
		t.Errorf("processes %+v", i.Processes)
	}
	for _, p := range i.Processes {
		if p.Resident < 1<<20 {
			t.Errorf("process %d has %d bytes", p.PID, p.Resident)
		}
	}
	if !strings.Contains(strings.Join(i.LogTail, "\n"), "is ready") {
		t.Errorf("the log ends with %q", i.LogTail)
	}
	if os.Geteuid() == 0 { // only root may read timerslack_ns of another process
		punctual(t, info.Status.Relay.PID)
	}
	h.killSupervisor(t, g.ID)
	if i, err = control.Inspect(h.layout, g.ID); err != nil ||
		!strings.Contains(i.NoReport, "supervisor has been killed") {
		t.Errorf("after the end of the supervisor: %+v, %v", i, err)
	}
	if err := control.Stop(h.layout, g.ID); !errors.Is(err, admin.ErrSupervisorKilled) {
		t.Errorf("stopping after the end of the supervisor: %v", err)
	}
	end(init)
	h.collect(t, g.ID)
}

// punctual demands a timer slack of 1 µs for the threads of a process.
func punctual(t *testing.T, pid int) {
	t.Helper()
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil || len(threads) < 2 {
		t.Fatal(threads, err)
	}
	for _, thread := range threads {
		slack, err := os.ReadFile("/proc/" + thread.Name() + "/timerslack_ns")
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // the thread has ended
		}
		if err != nil || string(slack) != "1000\n" {
			t.Errorf("thread %s of process %d may sleep %q ns too long: %v", thread.Name(), pid, slack, err)
		}
	}
}

// A relay that never reports costs no resources of the supervisor. Only the caller waits.
func TestInspectOfSilentRelayBlocksCallerOnly(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	g := h.launch(t, "c", startProcess(t).Process.Pid, "no report")
	h.state(t, g.ID, generation.StateReady)
	open := func() int {
		t.Helper()
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", supervisorPID(t, g.ID)))
		if err != nil {
			t.Fatal(err)
		}
		return len(files)
	}
	before := open()
	var wait sync.WaitGroup
	for range 20 {
		wait.Go(func() {
			if i, err := control.Inspect(h.layout, g.ID); err != nil ||
				!strings.Contains(i.NoReport, `no answer to "inspect"`) {
				t.Errorf("inspected: %q, %v", i.NoReport, err)
			}
		})
	}
	wait.Wait()
	testutil.Succeeds(t, "the supervisor's descriptors", func() error {
		if now := open(); now > before {
			return fmt.Errorf("%d are open, and %d were", now, before)
		}
		return nil
	})
	if asked := reports[launch.Request](t, h.dir, "asked"); len(asked) != 1 {
		t.Errorf("the relay was asked %d times", len(asked))
	}
	if err := control.Stop(h.layout, g.ID); err != nil {
		t.Error(err)
	}
}

// A supervisor refuses a request of another release, and names both versions.
func TestSupervisorOfAnotherReleaseNamesBothVersions(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	g := h.launch(t, "c", startProcess(t).Process.Pid, "")
	h.state(t, g.ID, generation.StateReady)
	socket := filepath.Join(h.layout.GenerationDir(g.ID), "admin.sock")
	for request, answer := range map[string]string{
		`lanes changed`:                     "invalid request",
		`{"version":2,"command":"inspect"}`: "speaks version 1, and was asked in version 2",
		`{"version":1,"command":"dance"}`:   `unknown request \"dance\": the supervisor is of an earlier release and speaks version 1`,
	} {
		if got := send(t, socket, request); !strings.Contains(got, answer) {
			t.Errorf("%s is answered %q", request, got)
		}
	}
}

func send(t *testing.T, socket, text string) string {
	t.Helper()
	dir, err := os.Open(filepath.Dir(socket))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	conn, err := net.Dial("unixpacket", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(socket)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	answer := make([]byte, 64<<10)
	n := 0
	if _, err = conn.Write([]byte(text)); err == nil {
		n, err = conn.Read(answer)
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(answer[:n])
}
