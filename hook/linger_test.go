package hook_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// lingering makes a TCP connection with ends fd and peer. The last close of fd blocks for an
// hour, or until the peer end is closed.
func lingering() (fd, other int, err error) {
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, 0, err
	}
	defer unix.Close(l)
	if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return 0, 0, err
	}
	const small = 4096
	err = errors.Join(
		unix.SetsockoptInt(l, unix.SOL_SOCKET, unix.SO_RCVBUF, small),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, small),
		unix.Bind(l, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}),
		unix.Listen(l, 1),
	)
	if err != nil {
		return 0, 0, err
	}
	at, err := unix.Getsockname(l)
	if err != nil {
		return 0, 0, err
	}
	if err := unix.Connect(fd, at); err != nil {
		return 0, 0, err
	}
	if other, _, err = unix.Accept4(l, unix.SOCK_CLOEXEC); err != nil {
		return 0, 0, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return 0, 0, err
	}
	for err == nil { // until the send buffer is full, so that a close lingers
		_, err = unix.Write(fd, make([]byte, 1<<16))
	}
	if err != unix.EAGAIN {
		return 0, 0, err
	}
	return fd, other, unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 3600})
}

// stray starts a process that outlives the relay, which has no sandbox, and closes the files that
// the process inherits.
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

// orphans returns the processes that relays without a sandbox started. The test ends the orphans.
func (h host) orphans(t *testing.T) []int {
	t.Helper()
	pids := reports[int](t, h.dir, "stray")
	t.Cleanup(func() {
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL) // most orphans have ended
		}
	})
	return pids
}

// linger passes an end of a lingering connection to the supervisor. A process that outlives the
// relay holds the peer end.
func linger() {
	fd, other, err := lingering()
	if err != nil {
		fatal(err)
	}
	stray(os.NewFile(uintptr(other), "other"))
	if err := unix.Sendmsg(launch.FDSupervisor, []byte("{}"), unix.UnixRights(fd), nil, 0); err != nil {
		fatal(err)
	}
	if err := unix.Close(fd); err != nil {
		fatal(err)
	}
}

// The supervisor does not block when it closes a lingering descriptor that the relay sent.
func TestLingeringMessageDelaysNoSupervisor(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init := startProcess(t)
	// A client can pass a lingering connection to a relay. A sandboxed relay cannot make such a
	// connection.
	r := h.request("c", init.Process.Pid, "lingers", lane(3))
	r.Config.Relay.Sandbox = config.SandboxOff
	g, err := hook.Launch(h.layout, r)
	if err != nil {
		t.Fatal(err)
	}
	testutil.Succeeds(t, "the relay's message", func() error {
		if len(h.orphans(t)) == 0 {
			return errors.New("not sent")
		}
		return nil
	})
	h.state(t, g.ID, generation.StateStarting)
	end(init)
	h.gone(t)
}

// The supervisor does not block when it closes lingering descriptors of refused clients.
func TestRefusedLingeringClientsBlockNoSupervisor(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init, g, _ := h.container(t, "")
	if err := control.Stop(h.layout, g.ID); err != nil {
		t.Fatal(err)
	}
	h.state(t, g.ID, generation.StateStopped)
	dir, err := os.Open(filepath.Dir(h.clients(g.ID))) // for a short name
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	hello := wire.Encode(&wire.Hello{Magic: wire.Magic, Oldest: wire.OldestVersion, Newest: wire.NewestVersion}, 1)
	// The supervisor is stopped while the test closes the descriptors, so that the last close,
	// which lingers, is in the supervisor.
	pid := supervisorPID(t, g.ID)
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	testutil.Succeeds(t, "a stopped supervisor", func() error {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err == nil && !strings.Contains(string(stat), ") T ") {
			err = errors.New("the supervisor runs")
		}
		return err
	})
	for range 80 {
		conn, err := net.Dial("unixpacket", fmt.Sprintf("/proc/self/fd/%d/relay.sock", dir.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		other, err := sendLingering(conn.(*net.UnixConn), hello)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(other)
	}
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	testutil.Succeeds(t, "threads of its supervisor that wait", func() error {
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", supervisorPID(t, g.ID)))
		if err == nil && len(threads) <= 64 {
			err = fmt.Errorf("%d threads", len(threads))
		}
		return err
	})
	if err := control.Resume(h.layout, g.ID); err != nil {
		t.Fatal(err)
	}
	h.state(t, g.ID, generation.StateReady)
	end(init)
	h.gone(t)
}

// sendLingering sends a message with an end of a lingering connection, and returns the peer end.
func sendLingering(conn *net.UnixConn, message []byte) (other int, err error) {
	syscall.ForkLock.RLock() // a process that a parallel test starts would inherit the descriptor, and linger
	defer syscall.ForkLock.RUnlock()
	fd, other, err := lingering()
	if err != nil {
		return 0, err
	}
	_, _, err = conn.WriteMsgUnix(message, unix.UnixRights(fd), nil)
	return other, errors.Join(err, unix.Close(fd))
}
