package hook

import (
	"bytes"
	"encoding/json"
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
)

// With systemd a hook does not fork its supervisor, which would be a child of
// the container runtime's and live under its limits. It connects to
// peerlane-relay.socket, for which systemd starts a peerlane-relay@.service, and
// the two say, a datagram of JSON each:
//
//	service → hook  answer, with a pidfd of the service
//	hook → service  handover, with the descriptors fdClients to fdAlive
//	service → hook  answer with an error, if it does not take the generation
//
// Nothing of the generation leaves the hook before a service is there to take
// it. A hook that has waited long enough hangs up, and a service that comes late
// finds that: it has no descriptor to work with, so that a generation never has
// two supervisors. With the handover the decision has been made; from then on it
// is as with a supervisor that was forked, down to the pipe of startedAnswer.
type (
	answer struct {
		Version int    `json:"version"`
		Error   string `json:"error,omitempty"`
	}
	handover struct {
		Version    int    `json:"version"`
		Root       string `json:"root"` // of the layout
		Generation string `json:"generation"`
	}
)

// launcherVersion changes with the meaning of the messages and the order of
// the descriptors. Units and hook are of one package, and differ in the moment
// of an upgrade only.
const launcherVersion = 1

// maxHandover bounds each of the messages, bytes. A root is a path (4,096 bytes
// at most), which JSON can make six times as long.
const maxHandover = 32 << 10

// handedOver is how many descriptors a handover has.
const handedOver = fdAlive - fdClients + 1

// greetTimeout is how long a hook waits for its service, which takes tens of
// milliseconds, before it forks. Process 1 can be busy for seconds (daemon-reload
// on a large host), so that a shorter wait would lose the unit on hosts that are
// well; and if it has stopped for good each container starts this much later. A
// hook that may not fork waits for startTimeout.
const greetTimeout = 10 * time.Second

// service is a peerlane-relay@.service that has greeted.
type service struct {
	conn  *net.UnixConn
	pidfd *os.File
}

func (s *service) close() {
	s.conn.Close()
	s.pidfd.Close()
}

// runBySystemd runs the supervisor as a service of systemd's, where
// configuration and host say so, and returns when that has executed the relay;
// nil where the hook is to run it.
func (g *Generation) runBySystemd(l paths.Layout, launcher string, files map[int]*os.File) (*starting, error) {
	if !bySystemd(l, launcher) {
		return nil, nil
	}
	wait := greetTimeout
	if launcher == config.LauncherSystemd {
		wait = startTimeout
	}
	s, err := greet(l.Launcher(), wait)
	switch {
	case err == nil:
		if err := g.handOver(l, s, files); err != nil {
			s.close()
			return nil, err
		}
		return &starting{stop: func() (string, error) { return "", s.kill() }, held: []io.Closer{s.conn, s.pidfd}}, nil
	case launcher == config.LauncherSystemd:
		return nil, fmt.Errorf("relay.launcher is %q, and %w; run `systemctl enable --now peerlane-relay.socket`, look at `journalctl -u peerlane-relay.socket -u 'peerlane-relay@*'`, or set relay.launcher to %q in config.toml",
			launcher, err, config.LauncherAuto)
	}
	// Better a relay that counts among the runtime's processes than no container.
	logrus.WithError(err).WithField("container", g.Container.ID).Warn("no relay by systemd; this hook starts it")
	return nil, g.noteInLog(l, fmt.Sprintf("no relay by systemd, so the hook started it: %v\n", err))
}

// bySystemd says whether systemd is asked first.
func bySystemd(l paths.Layout, launcher string) bool {
	return launcher == config.LauncherSystemd || launcher != config.LauncherFork && offersLauncher(l)
}

// offersLauncher says whether systemd is process 1 (sd_booted(3)), and has
// Peerlane's socket.
func offersLauncher(l paths.Layout) bool {
	for _, path := range []string{filepath.Join(l.Root, "run/systemd/system"), l.Launcher()} {
		if _, err := os.Lstat(path); err != nil {
			return false
		}
	}
	return true
}

// noteInLog adds a line to the generation's log.
func (g *Generation) noteInLog(l paths.Layout, line string) error {
	log, err := openLog(l, g.ID)
	if err != nil {
		return err
	}
	_, err = log.WriteString(line)
	return errors.Join(err, log.Close())
}

// openLog opens a generation's log, and makes it where there is none.
func openLog(l paths.Layout, id string) (*os.File, error) {
	return os.OpenFile(filepath.Join(l.GenerationDir(id), logName), os.O_RDWR|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW, 0o600)
}

// greet connects to the launcher's socket and waits for the service.
func greet(path string, wait time.Duration) (*service, error) {
	deadline := time.Now().Add(wait)
	socket, err := connect(path)
	if err != nil {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			err = errors.New("there is no such socket")
		case errors.Is(err, unix.ECONNREFUSED):
			err = errors.New("nobody listens there")
		}
		return nil, fmt.Errorf("systemd starts no relay by %s: %w", path, err)
	}
	defer socket.Close()
	conn, err := net.FileConn(socket)
	if err != nil {
		return nil, err
	}
	s := &service{conn: conn.(*net.UnixConn)} // of a Unix socket it is one
	if err = s.conn.SetDeadline(deadline); err == nil {
		err = s.hear()
	}
	if err != nil {
		s.conn.Close()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			err = fmt.Errorf("no service came within %v", wait)
		case errors.Is(err, io.EOF):
			err = errors.New("it hung up: the host is shutting down, or the service cannot be started")
		}
		return nil, fmt.Errorf("systemd starts no relay by %s: %w", path, err)
	}
	return s, nil
}

// hear waits for the service's greeting.
func (s *service) hear() error {
	var hello answer
	files, err := receive(s.conn, &hello)
	switch {
	case err != nil:
	case hello.Error != "":
		err = errors.New(hello.Error)
	case hello.Version != launcherVersion:
		err = fmt.Errorf("the service speaks version %d and this hook %d: another version of Peerlane is being installed, or has left its units", hello.Version, launcherVersion)
	case len(files) != 1:
		err = fmt.Errorf("the service greets with %d descriptors, and not with one", len(files))
	default:
		s.pidfd = files[0]
		return nil
	}
	closeAll(files)
	return err
}

// handOver gives the generation to the service, and waits until that has
// executed the relay.
func (g *Generation) handOver(l paths.Layout, s *service, files map[int]*os.File) error {
	started, tell, err := os.Pipe()
	if err != nil {
		return err
	}
	defer started.Close()
	files[fdStarted] = tell
	var handed []*os.File
	for fd := fdClients; fd <= fdAlive; fd++ {
		handed = append(handed, files[fd])
	}
	err = send(s.conn, handover{launcherVersion, l.Root, g.ID}, handed...)
	tell.Close()
	if err != nil {
		return fmt.Errorf("handing the relay over to systemd's service: %w", err)
	}
	if err := started.SetReadDeadline(time.Now().Add(startTimeout)); err != nil {
		return err
	}
	word, err := io.ReadAll(io.LimitReader(started, 64<<10))
	if err == nil && string(word) == startedAnswer {
		return nil
	}
	switch {
	case err != nil:
		err = fmt.Errorf("systemd's service has not started a relay within %v: %w; its log: %s", startTimeout, err, g.logTail(l))
	case len(word) > 0:
		err = errors.New(string(word))
	default:
		err = fmt.Errorf("systemd's service %s", s.lastWord(func() string { return "ended early; its log: " + g.logTail(l) }))
	}
	err = fmt.Errorf("%w; `journalctl -u 'peerlane-relay@*'` may say more", err)
	// As in run: it may be stuck and not ended, and shall not write while all is
	// removed.
	return errors.Join(err, s.kill())
}

// lastWord is why the service has not taken the generation.
func (s *service) lastWord(otherwise func() string) string {
	var last answer
	if s.conn.SetDeadline(time.Now().Add(time.Second)) == nil {
		if files, err := receive(s.conn, &last); err == nil && last.Error != "" {
			closeAll(files)
			return "refuses the relay: " + last.Error
		}
	}
	return otherwise()
}

func (s *service) kill() error {
	if err := unix.PidfdSendSignal(int(s.pidfd.Fd()), unix.SIGKILL, nil, 0); err != nil && err != unix.ESRCH {
		return os.NewSyscallError("pidfd_send_signal", err)
	}
	if !endsWithin(int(s.pidfd.Fd()), endTimeout) {
		return fmt.Errorf("systemd's service does not end within %v of SIGKILL", endTimeout)
	}
	return nil
}

func (g *Generation) logTail(l paths.Layout) string {
	log, err := openLog(l, g.ID)
	if err != nil {
		return err.Error()
	}
	defer log.Close()
	return tail(log)
}

// send sends one message with descriptors, which stay the caller's.
func send(conn *net.UnixConn, message any, files ...*os.File) error {
	text, err := json.Marshal(message)
	if err != nil {
		return err
	}
	var fds []int
	for _, f := range files {
		// Fd makes them blocking, as the other side, which has the same open file,
		// expects.
		fds = append(fds, int(f.Fd()))
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_, _, err = conn.WriteMsgUnix(text, rights, nil)
	return err
}

// maxDescriptors is more than any message has, so that what is too many can be
// counted, and closed. The kernel passes 253 (SCM_MAX_FD).
const maxDescriptors = 253

// receive receives one message and its descriptors, which are the caller's. Of
// a message that is refused none stays open. The end of the conversation is
// io.EOF.
func receive(conn *net.UnixConn, message any) (files []*os.File, err error) {
	text, rights := make([]byte, maxHandover+1), make([]byte, unix.CmsgSpace(4*maxDescriptors))
	n, oobn, flags, _, err := conn.ReadMsgUnix(text, rights)
	if err != nil {
		return nil, err
	}
	files, err = descriptorsOf(rights[:oobn])
	switch {
	case err != nil:
	case n == 0 && len(files) == 0:
		err = io.EOF
	case n > maxHandover || flags&unix.MSG_TRUNC != 0:
		err = fmt.Errorf("the message has more than %d bytes", maxHandover)
	case flags&unix.MSG_CTRUNC != 0:
		err = errors.New("the message's descriptors do not fit here: too many files are open")
	default:
		err = parseMessage(text[:n], message)
	}
	if err != nil {
		closeAll(files)
		return nil, err
	}
	return files, nil
}

// descriptorsOf takes the descriptors out of a message's control data. They are
// close-on-exec already, by package net.
func descriptorsOf(control []byte) (files []*os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, fmt.Errorf("the message's control data: %w", err)
	}
	for _, m := range messages {
		if m.Header.Level != unix.SOL_SOCKET || m.Header.Type != unix.SCM_RIGHTS {
			continue // credentials, if somebody wants to send them
		}
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			closeAll(files)
			return nil, fmt.Errorf("the message's descriptors: %w", err)
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "handed over"))
		}
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// parseMessage reads exactly one JSON value with no key that is not known.
func parseMessage(text []byte, message any) error {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	err := dec.Decode(message)
	if err == nil {
		if _, more := dec.Token(); more != io.EOF {
			err = errors.New("there is more after it")
		}
	}
	if err != nil {
		return fmt.Errorf("the message makes no sense: %w", err)
	}
	return nil
}
