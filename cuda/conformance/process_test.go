package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/testutil"
)

// A second process is this binary again, with the name of a function in
// children and a socket as descriptor 3.
const childVariable = "PEERLANE_CONFORMANCE_CHILD"

// patient is the limit for an event that is due immediately.
const patient = time.Minute

var children = map[string]func(*peer) error{}

// message is a message between the processes, sent with descriptors.
type message struct {
	Numbers []uint64
	Bytes   []byte
	Error   string // the text of a CallError, and
	Result  cuda.Result
}

func (m *message) fail(err error) {
	m.Error = err.Error()
	errors.As(err, &m.Result)
}

// peer is an end of the connection between two processes.
type peer struct {
	conn *net.UnixConn
	d    *cuda.Driver // in a child
	cmd  *exec.Cmd    // in the parent
}

// child starts a process that runs the function named name.
func child(t testing.TB, name string, attr *syscall.SysProcAttr, env ...string) *peer {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	ours, theirs := os.NewFile(uintptr(fds[0]), "parent"), os.NewFile(uintptr(fds[1]), "child")
	defer func() { check(t, errors.Join(ours.Close(), theirs.Close())) }()
	conn, err := net.FileConn(ours)
	check(t, err)
	exe, err := os.Executable()
	check(t, err)
	cmd := exec.Command(exe)
	// By default the race detector delays the exit of a process by a second.
	cmd.Env = append(append(os.Environ(), childVariable+"="+name, "GORACE=atexit_sleep_ms=0"), env...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = attr
	check(t, cmd.Start())
	p := &peer{conn: conn.(*net.UnixConn), cmd: cmd}
	t.Cleanup(func() {
		// A child ends when its socket closes; kill a child that hangs.
		check(t, p.conn.Close())
		kill := time.AfterFunc(patient, func() { _ = cmd.Process.Kill() })
		defer kill.Stop()
		if err := cmd.Wait(); err != nil && !t.Failed() &&
			cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Errorf("child %s: %v", name, err)
		}
	})
	return p
}

func runChild(name string) int {
	runtime.LockOSThread() // contexts are per thread
	f := os.NewFile(3, "parent")
	conn, err := net.FileConn(f)
	if err == nil {
		err = errors.Join(f.Close(), children[name](&peer{conn: conn.(*net.UnixConn)}))
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "child %s: %v\n", name, err)
		return 1
	}
	return 0
}

// open opens the driver in a child, with a context on a device.
func (p *peer) open(dev cuda.Device) (err error) {
	if p.d, err = cuda.Open(); err != nil {
		return err
	}
	_, err = p.d.CtxCreate(dev, cuda.CtxOptions{Lean: true})
	return err
}

func (p *peer) send(m message, fds ...int) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	_, _, err = p.conn.WriteMsgUnix(b, syscall.UnixRights(fds...), nil)
	return err
}

// receive waits for a message. An error in the message is not an error of receive.
func (p *peer) receive() (m message, fds []int, err error) {
	b, oob := make([]byte, 64<<10), make([]byte, 256)
	if err := p.conn.SetReadDeadline(testutil.Deadline()); err != nil {
		return m, nil, err
	}
	n, oobn, _, _, err := p.conn.ReadMsgUnix(b, oob)
	if err != nil {
		return m, nil, err
	}
	if n == 0 {
		return m, nil, errors.New("the other process closed the socket")
	}
	parts, err := syscall.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return m, nil, err
	}
	for i := range parts {
		got, err := syscall.ParseUnixRights(&parts[i])
		if err != nil {
			return m, nil, err
		}
		fds = append(fds, got...)
	}
	return m, fds, json.Unmarshal(b[:n], &m)
}

// mustReceive receives a message and fails the test if the message is an error.
func (p *peer) mustReceive(t testing.TB) message {
	t.Helper()
	m, _, err := p.receive()
	check(t, err)
	if m.Error != "" {
		t.Fatalf("in the child: %s", m.Error)
	}
	return m
}

// mustSend sends a message and fails the test on an error.
func (p *peer) mustSend(t testing.TB, m message, fds ...int) {
	t.Helper()
	check(t, p.send(m, fds...))
}

// until waits until the parent closes the socket.
func (p *peer) until() {
	_ = p.conn.SetReadDeadline(time.Time{})
	var b [1]byte
	_, _ = p.conn.Read(b[:])
}
