package supervisor

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/handover"
)

// TakeOver runs the supervisor of a generation as a systemd service. peerlane-relay@.service runs
// `peerlane-hook accept` with a connection of peerlane-relay.socket as standard input, and the
// journal as standard error. TakeOver returns when the container's init has ended and the
// generation is removed.
//
// Until then, standard error is the generation's log, and the journal gets a copy.
func TakeOver(connection *os.File) error {
	l, g, d, err := takeOver(connection)
	if errors.Is(err, io.EOF) {
		logrus.Info("the hook disconnected without handing over a relay")
		return nil
	}
	if err != nil {
		return fmt.Errorf("take over a relay from a hook: %w", err)
	}
	restore, err := logToBoth(l, g.ID)
	if err != nil {
		_, writeErr := fmt.Fprint(d.Started, err)
		return errors.Join(err, writeErr)
	}
	// The journal then names the unit's container even without an error.
	logrus.WithFields(logrus.Fields{"generation": g.ID, "container": g.Container.ID}).
		Info("taking over the relay of a container")
	err = supervise(l, g.ID, true, d)
	return errors.Join(err, restore())
}

// takeOver exchanges the handover messages with the hook.
func takeOver(connection *os.File) (l paths.Layout, g *generation.Generation, d handover.Descriptors, err error) {
	conn, err := asConnection(connection)
	if err != nil {
		return l, nil, d, fmt.Errorf("standard input: %w; only systemd runs this command, for peerlane-relay.socket", err)
	}
	defer conn.Close()
	// The deadline also ends the wait for a silent peer.
	if err := conn.SetDeadline(time.Now().Add(handover.StartTimeout)); err != nil {
		return l, nil, d, err
	}
	h, files, err := converse(conn)
	if err == nil {
		l = paths.New(h.Root)
		if g, err = checkHandover(h, l, files); err == nil {
			return l, g, handover.NewDescriptors(files), nil
		}
		handover.CloseAll(files)
	}
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) {
		return l, nil, d, io.EOF // the hook disconnected, before or after it read the greeting
	}
	if sent := handover.Send(conn, handover.Answer{Version: handover.Version, Error: err.Error()}); !errors.Is(
		sent,
		unix.EPIPE,
	) {
		err = errors.Join(err, sent)
	}
	return l, nil, d, err
}

func converse(conn *net.UnixConn) (h handover.Message, files []*os.File, err error) {
	if err := checkPeer(conn); err != nil {
		return h, nil, err
	}
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return h, nil, os.NewSyscallError("pidfd_open", err)
	}
	self := os.NewFile(uintptr(fd), "pidfd")
	defer self.Close()
	if err := handover.Send(conn, handover.Answer{Version: handover.Version}, self); err != nil {
		return h, nil, err
	}
	files, err = handover.Receive(conn, &h)
	return h, files, err
}

// asConnection takes the connection from a descriptor and replaces the descriptor by /dev/null,
// because relays inherit standard input.
func asConnection(f *os.File) (*net.UnixConn, error) {
	fd := int(f.Fd()) // before FileConn, because Fd makes the connection blocking
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, fmt.Errorf("not a Unix socket but a %s connection", c.LocalAddr().Network())
	}
	null, err := os.Open(os.DevNull)
	if err == nil {
		defer null.Close()
		err = os.NewSyscallError("dup3", unix.Dup3(int(null.Fd()), fd, 0))
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// checkPeer refuses a peer process of another user.
func checkPeer(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) {
		peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if failed != nil {
		return os.NewSyscallError("SO_PEERCRED", failed)
	}
	if int(peer.Uid) != os.Geteuid() {
		return fmt.Errorf("process %d of user %d requests a relay; only user %d may", peer.Pid, peer.Uid, os.Geteuid())
	}
	return nil
}

// checkHandover refuses a message that is not the handover of a generation whose hook is waiting.
func checkHandover(h handover.Message, l paths.Layout, files []*os.File) (*generation.Generation, error) {
	if h.Version != handover.Version {
		return nil, fmt.Errorf("the hook has protocol version %d and this service has version "+
			"%d", h.Version, handover.Version)
	}
	if !filepath.IsAbs(h.Root) || filepath.Clean(h.Root) != h.Root {
		return nil, fmt.Errorf("the root %q is not a clean absolute path", h.Root)
	}
	if len(files) != handover.Count {
		return nil, fmt.Errorf("received %d descriptors instead of %d", len(files), handover.Count)
	}
	d := handover.NewDescriptors(files)
	if err := checkLock(l, h.Generation, d.Alive); err != nil {
		return nil, err
	}
	g, err := generation.Read(l, h.Generation)
	if err != nil {
		return nil, err
	}
	for _, socket := range []*os.File{d.Clients, d.Peers, d.Admin} {
		if err := checkListening(socket); err != nil {
			return nil, err
		}
	}
	if err := checkPipe(d.Started); err != nil {
		return nil, err
	}
	return g, checkPidfd(d.Init, g.Init.PID)
}

func checkListening(f *os.File) error {
	for option, want := range map[int]int{unix.SO_DOMAIN: unix.AF_UNIX, unix.SO_TYPE: unix.SOCK_SEQPACKET,
		unix.SO_ACCEPTCONN: 1} {
		value, err := unix.GetsockoptInt(int(f.Fd()), unix.SOL_SOCKET, option)
		if err != nil || value != want {
			return fmt.Errorf(
				"descriptor %d is not a listening SOCK_SEQPACKET socket (option %d is %d, %v)",
				f.Fd(),
				option,
				value,
				err,
			)
		}
	}
	return nil
}

func checkPipe(f *os.File) error {
	var stat unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &stat); err != nil || stat.Mode&unix.S_IFMT != unix.S_IFIFO {
		return fmt.Errorf("descriptor %d is not a pipe (%v)", f.Fd(), err)
	}
	return nil
}

// checkPidfd checks that a pidfd refers to the process with this id.
func checkPidfd(f *os.File, pid int) error {
	// proc_pid_fdinfo(5): the entry of a pidfd has a line "Pid:", which is -1 after the process
	// was reaped.
	text, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", f.Fd()))
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "Pid:"); ok {
			if value = strings.TrimSpace(value); value == fmt.Sprint(pid) || value == "-1" {
				return nil
			}
			return fmt.Errorf("descriptor %d is a pidfd of process %s instead of the container's init %d", f.Fd(), value, pid)
		}
	}
	return fmt.Errorf("descriptor %d is not a pidfd", f.Fd())
}

// checkLock checks that a file is the generation's lock, and that its open file holds the lock.
// Otherwise another supervisor has the generation, or the hook has ended.
func checkLock(l paths.Layout, id string, f *os.File) error {
	if err := checkLockDescriptor(l, id, int(f.Fd())); err != nil {
		return fmt.Errorf("generation %q: %w", id, err)
	}
	if held, err := generation.Supervised(l, id); err != nil || !held {
		return fmt.Errorf("generation %s: its lock is not held (%v)", id, err)
	}
	// This has no effect if the open file already holds the lock.
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("generation %s has a supervisor: %w", id, os.NewSyscallError("flock", err))
	}
	return nil
}

// logToBoth makes the generation's log standard error, and copies the log to the journal, which
// was standard error, until restore.
//
// Writers do not wait for the journal.
func logToBoth(l paths.Layout, id string) (restore func() error, err error) {
	log, err := generation.OpenLog(l, id)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	// Use a separate open file, because an append moves the offset.
	copied, err := os.Open(log.Name())
	if err != nil {
		return nil, err
	}
	fd, err := unix.FcntlInt(2, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("dup", err), copied.Close())
	}
	journal := os.NewFile(uintptr(fd), "journal")
	if err := unix.Dup3(int(log.Fd()), 2, 0); err != nil {
		return nil, errors.Join(os.NewSyscallError("dup3", err), copied.Close(), journal.Close())
	}
	stop := follow(copied, journal)
	return func() error {
		err := os.NewSyscallError("dup3", unix.Dup3(int(journal.Fd()), 2, 0))
		stop()
		return err
	}, nil
}

// follow copies new text of a log to the journal. stop copies the rest and closes both files. It
// does not wait for a blocked journal.
func follow(log, journal *os.File) (stop func()) {
	changes, err := watch(log.Name())
	if err != nil {
		logrus.WithError(err).
			Warn("the journal gets this log only after the container has ended; raise fs.inotify.max_user_instances")
	}
	done := make(chan struct{})
	rest := make(chan struct{})
	go func() {
		defer close(done)
		events := make([]byte, 4<<10)
		for err == nil {
			copyLog(journal, log)
			_, err = changes.Read(events)
		}
		<-rest
		copyLog(journal, log)
		log.Close()
		journal.Close()
	}()
	return func() {
		if changes != nil {
			changes.Close()
		}
		close(rest)
		select {
		case <-done:
		case <-time.After(time.Second):
		}
	}
}

// copyLog copies the new text of a log. It ignores an error of the journal, which does not affect
// the relay and cannot be reported elsewhere.
func copyLog(journal, log *os.File) {
	at, err := log.Seek(0, io.SeekCurrent)
	if info, statErr := log.Stat(); err == nil && statErr == nil && info.Size() < at {
		_, _ = log.Seek(0, io.SeekStart) // the log was truncated at its limit
	}
	_, _ = io.Copy(journal, log)
}

// watch returns a file that becomes readable when another file is written.
func watch(path string) (*os.File, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	changes := os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, path, unix.IN_MODIFY); err != nil {
		changes.Close()
		return nil, os.NewSyscallError("inotify_add_watch", err)
	}
	return changes, nil
}
