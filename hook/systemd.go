package hook

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/handover"
	"github.com/peerlane/peerlane/hook/internal/unixsocket"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/internal/fault"
)

// greetTimeout limits the wait for the service, which usually takes tens of milliseconds; after it
// the hook forks. Process 1 can be busy for seconds (daemon-reload on a large host), so a shorter
// wait would skip systemd on healthy hosts. A stopped process 1 delays every container start by
// this time. A hook that may not fork waits for handover.StartTimeout.
const greetTimeout = 10 * time.Second

// service is a connected peerlane-relay@.service after its greeting.
type service struct {
	conn  *net.UnixConn
	pidfd *os.File
}

func (s *service) close() {
	s.conn.Close()
	s.pidfd.Close()
}

// runBySystemd runs the supervisor as a service of systemd, if configuration and host permit it,
// and returns when the service has executed the relay. The result is nil if the hook must fork.
func runBySystemd(
	g *generation.Generation,
	l paths.Layout,
	launcher string,
	files map[int]*os.File,
) (*starting, error) {
	if !bySystemd(l, launcher) {
		return nil, nil
	}
	wait := greetTimeout
	if launcher == config.LauncherSystemd {
		wait = handover.StartTimeout
	}
	s, err := greet(l.Launcher(), wait)
	switch {
	case err == nil:
		if err := handOver(g, l, s, files); err != nil {
			s.close()
			return nil, err
		}
		return &starting{stop: func() (string, error) { return "", s.kill() }, held: []io.Closer{s.conn, s.pidfd}}, nil
	case launcher == config.LauncherSystemd:
		return nil, fmt.Errorf("relay.launcher is %q, and %w", launcher, err)
	}
	// A relay in the runtime's control group is better than a container that does not start.
	logrus.WithError(err).WithField("container", g.Container.ID).Warn("systemd starts no relay; the hook starts it")
	return nil, g.NoteInLog(l, fmt.Sprintf("systemd starts no relay, so the hook started it: %v\n", err))
}

// bySystemd reports whether to try systemd before a fork.
func bySystemd(l paths.Layout, launcher string) bool {
	return launcher == config.LauncherSystemd || launcher != config.LauncherFork && offersLauncher(l)
}

// offersLauncher reports whether systemd is process 1 (sd_booted(3)), and has Peerlane's socket.
func offersLauncher(l paths.Layout) bool {
	for _, path := range []string{filepath.Join(l.Root, "run/systemd/system"), l.Launcher()} {
		if _, err := os.Lstat(path); err != nil {
			return false
		}
	}
	return true
}

func noSystemd(path string, cause error) error {
	return &fault.Error{
		Code: fault.NoSystemd, Operation: "systemd starts no relay by", Object: path, Cause: cause,
		Remedy: "run `systemctl enable --now peerlane-relay.socket`, look at `journalctl -u peerlane-relay.socket -u " +
			"'peerlane-relay@*'`, or set relay.launcher to auto in config.toml",
	}
}

// Causes of fault.NoSystemd.
var (
	ErrNoLauncher           = errors.New("the socket does not exist")
	ErrNoListener           = errors.New("no process listens on it")
	ErrLauncherDisconnected = errors.New("it disconnected: the host is shutting down, or the service cannot be started")
)

// LauncherVersionError is the cause of a service of another release.
type LauncherVersionError struct{ Version int } // of the service's protocol

func (e *LauncherVersionError) Error() string {
	return fmt.Sprintf("the service has protocol version %d and this hook has version %d: another version of Peerlane "+
		"is being installed, or has left its units", e.Version, handover.Version)
}

// greet connects to the launcher's socket and waits for the service.
func greet(path string, wait time.Duration) (*service, error) {
	deadline := time.Now().Add(wait)
	socket, err := unixsocket.Connect(path)
	if err != nil {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			err = ErrNoLauncher
		case errors.Is(err, unix.ECONNREFUSED):
			err = ErrNoListener
		}
		return nil, noSystemd(path, err)
	}
	defer socket.Close()
	conn, err := net.FileConn(socket)
	if err != nil {
		return nil, err
	}
	s := &service{conn: conn.(*net.UnixConn)} // a Unix socket has this type
	if err = s.conn.SetDeadline(deadline); err == nil {
		err = s.awaitGreeting()
	}
	if err != nil {
		s.conn.Close()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			err = fmt.Errorf("no service started within %v", wait)
		case errors.Is(err, io.EOF):
			err = ErrLauncherDisconnected
		}
		return nil, noSystemd(path, err)
	}
	return s, nil
}

// awaitGreeting waits for the service's greeting.
func (s *service) awaitGreeting() error {
	var hello handover.Answer
	files, err := handover.Receive(s.conn, &hello)
	switch {
	case err != nil:
	case hello.Error != "":
		err = &ReportedError{hello.Error}
	case hello.Version != handover.Version:
		err = &LauncherVersionError{hello.Version}
	case len(files) != 1:
		err = fmt.Errorf("the service's greeting has %d descriptors instead of one", len(files))
	default:
		s.pidfd = files[0]
		return nil
	}
	handover.CloseAll(files)
	return err
}

// handOver passes the generation to the service, and waits until the service has executed the
// relay.
func handOver(g *generation.Generation, l paths.Layout, s *service, files map[int]*os.File) error {
	started, startedWrite, err := os.Pipe()
	if err != nil {
		return err
	}
	defer started.Close()
	files[handover.FDStarted] = startedWrite
	var handed []*os.File
	for fd := handover.FDClients; fd <= handover.FDAlive; fd++ {
		handed = append(handed, files[fd])
	}
	err = handover.Send(s.conn, handover.Message{Version: handover.Version, Root: l.Root, Generation: g.ID}, handed...)
	startedWrite.Close()
	if err != nil {
		return fmt.Errorf("hand the relay over to systemd's service: %w", err)
	}
	if err := started.SetReadDeadline(time.Now().Add(handover.StartTimeout)); err != nil {
		return err
	}
	word, err := io.ReadAll(io.LimitReader(started, 64<<10))
	if err == nil && string(word) == handover.Started {
		return nil
	}
	switch {
	case err != nil:
		err = fmt.Errorf(
			"systemd's service has not started a relay within %v: %w; its log: %s",
			handover.StartTimeout,
			err,
			g.LogTail(l),
		)
	case len(word) > 0:
		err = &ReportedError{string(word)}
	default:
		err = fmt.Errorf(
			"systemd's service %s",
			s.lastWord(func() string { return "ended early; its log: " + g.LogTail(l) }),
		)
	}
	err = &fault.Error{Operation: "start the relay by systemd", Cause: err,
		Remedy: "see `journalctl -u 'peerlane-relay@*'`"}
	// A stuck service must not write while the generation is removed.
	return errors.Join(err, s.kill())
}

// lastWord returns the reason why the service did not accept the generation.
func (s *service) lastWord(otherwise func() string) string {
	var last handover.Answer
	if s.conn.SetDeadline(time.Now().Add(time.Second)) == nil {
		if files, err := handover.Receive(s.conn, &last); err == nil && last.Error != "" {
			handover.CloseAll(files)
			return "refuses the relay: " + last.Error
		}
	}
	return otherwise()
}

func (s *service) kill() error {
	if err := unix.PidfdSendSignal(int(s.pidfd.Fd()), unix.SIGKILL, nil, 0); err != nil && err != unix.ESRCH {
		return os.NewSyscallError("pidfd_send_signal", err)
	}
	if !process.EndsWithin(int(s.pidfd.Fd()), process.EndTimeout) {
		return fmt.Errorf("systemd's service does not end within %v of SIGKILL", process.EndTimeout)
	}
	return nil
}
