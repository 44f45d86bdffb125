package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/launch"
)

func newServe() *cobra.Command {
	return &cobra.Command{
		Use:   "serve",
		Short: "Serve the container of the supervisor that started this process",
		Long: `Serve the container of the supervisor that started this process.

Descriptors: 3 the listening socket for clients, 4 the listening socket for other
relays, 5 a socket to the supervisor, 6 a pidfd of the container's init. The supervisor
sends the configuration over descriptor 5.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return serve() },
	}
}

func serve() error {
	// The relay maps memory of containers: forbid other relays to read it, and the kernel to write
	// a core file.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return os.NewSyscallError("PR_SET_DUMPABLE", err)
	}
	clients, err := listener(launch.FDClients, "the clients' socket")
	if err != nil {
		return err
	}
	peers, err := listener(launch.FDPeers, "the peer relays' socket")
	if err != nil {
		return err
	}
	conn, err := supervisorSocket()
	if err != nil {
		return err
	}
	supervisor := &supervisor{conn: conn, claims: map[uint64]chan launch.Admission{}, gone: make(chan struct{})}
	if _, err := unix.FcntlInt(launch.FDInit, unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return fmt.Errorf(
			"descriptor %d should be a pidfd of the container's init: %w; peerlane-relay serve is started by peerlane-hook, "+
				"not by hand", launch.FDInit, err)
	}
	r, err := relay.New(clients, peers, launch.FDInit)
	if err != nil {
		return err
	}
	r.AskBy(supervisor.ask)
	// Accept no client before the first configuration: the relay would report that the container
	// has no lane. Clients wait in the queue of the listener.
	for configured := false; !configured; {
		if configured, err = configure(r, supervisor); err != nil {
			return fmt.Errorf("the supervisor exited before it configured this relay: %w", err)
		}
	}
	go reconfigure(r, supervisor)
	// The supervisor reads standard error, and may be killed while this relay runs.
	signal.Ignore(syscall.SIGPIPE)
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	go func() { r.Stop((<-stop).String()) }()
	err = r.Run()
	supervisor.reportEnding(r.Ending())
	return err
}

// supervisor is the supervisor at the other end of descriptor 5.
type supervisor struct {
	conn *net.UnixConn
	// version is the version of the last configuration.
	version int

	mu sync.Mutex
	// claims are the requests without an answer, by number.
	claims map[uint64]chan launch.Admission
	// gone is closed when the supervisor has ended, so that no answer will come.
	gone chan struct{}
	// acceptsEndings reports that the supervisor reads the reason for an end.
	acceptsEndings atomic.Bool
}

// reportEnding reports to the supervisor the reason why this relay ends. A supervisor that is gone,
// or does not read, does not delay the relay.
func (s *supervisor) reportEnding(e launch.Ending) {
	text, err := json.Marshal(struct {
		Ending launch.Ending `json:"ending"`
	}{e})
	if err == nil && s.acceptsEndings.Load() && s.conn.SetWriteDeadline(time.Now().Add(time.Second)) == nil {
		_, _ = s.conn.Write(text)
	}
}

// ask sends a claim to the supervisor and waits for the admission. It is a relay.Asker.
func (s *supervisor) ask(c launch.Claim) (launch.Admission, error) {
	text, err := json.Marshal(c)
	if err != nil {
		return launch.Admission{}, err
	}
	answer := make(chan launch.Admission, 1)
	s.mu.Lock()
	s.claims[c.Claim] = answer
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.claims, c.Claim)
	}()
	if _, err := s.conn.Write(text); err != nil {
		return launch.Admission{}, fmt.Errorf("request staging from the supervisor: %w; restart the container", err)
	}
	select {
	case a := <-answer:
		return a, nil
	case <-s.gone:
		return launch.Admission{}, errors.New("the supervisor that admits staging has ended; restart the container")
	}
}

// deliver passes an admission to the waiting request.
func (s *supervisor) deliver(a launch.Admission) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if waiting := s.claims[a.Claim]; waiting != nil {
		waiting <- a
		delete(s.claims, a.Claim)
	}
}

// reconfigure handles the later messages of the supervisor. If the supervisor ends, the relay
// continues to serve the container.
func reconfigure(r *relay.Relay, s *supervisor) {
	for {
		if _, err := configure(r, s); err != nil {
			logrus.WithError(err).Info("the supervisor is gone; serving on until the container ends")
			r.Orphaned()
			close(s.gone)
			return
		}
	}
}

// configure reads a configuration, a request or an answer, applies it, replies, and reports
// whether it was a valid configuration. An error means that the supervisor has ended.
func configure(r *relay.Relay, s *supervisor) (bool, error) {
	buffer := make([]byte, launch.MaxDatagram)
	n, err := s.conn.Read(buffer)
	if err != nil {
		return false, err
	}
	var message struct {
		launch.Request
		launch.Config
		Claim uint64 `json:"claim"`
	}
	var status launch.Status
	err = json.Unmarshal(buffer[:n], &message)
	asked := message.Request.Request
	switch {
	case err != nil:
	case message.Claim != 0:
		var a launch.Admission
		if err = json.Unmarshal(buffer[:n], &a); err == nil {
			s.deliver(a)
			return false, nil
		}
	case asked == "":
		s.version = message.Version
		if err = launch.CheckVersion(s.version); err != nil {
			break
		}
		sign(message.Config)
		s.acceptsEndings.Store(message.Endings)
		err = r.Configure(message.Config)
	case asked == launch.RequestReport:
		status.Report = r.Report()
	case asked == launch.RequestSecrets && message.Secrets != nil:
		err = r.Secrets(*message.Secrets)
	case asked == launch.RequestEnd:
		r.End(message.Reason)
	default:
		err = &launch.VersionError{Supervisor: s.version, Oldest: launch.OldestVersion, Newest: launch.Version,
			Request: asked}
	}
	status.OK = err == nil
	if err != nil {
		status.Error = err.Error()
		logrus.WithError(err).Error("refused the supervisor's message")
	}
	answer, err := json.Marshal(status)
	if err == nil {
		_, err = s.conn.Write(answer)
	}
	if err != nil {
		logrus.WithError(err).Warn("answering the supervisor")
	}
	return status.OK && asked == "", nil
}

func inheritedFile(fd int, what string) (*os.File, error) {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
		return nil, fmt.Errorf(
			"descriptor %d should be %s: %w; peerlane-relay serve is started by peerlane-hook, not by hand", fd, what, err)
	}
	return os.NewFile(uintptr(fd), what), nil
}

func listener(fd int, what string) (*net.UnixListener, error) {
	f, err := inheritedFile(fd, what)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("descriptor %d should be %s: %w", fd, what, err)
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("descriptor %d should be %s, a Unix socket", fd, what), l.Close())
	}
	// The hook owns the socket file: the next relay process serves on the same socket.
	u.SetUnlinkOnClose(false)
	return u, nil
}

func supervisorSocket() (*net.UnixConn, error) {
	f, err := inheritedFile(launch.FDSupervisor, "the supervisor's socket")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("descriptor %d should be the supervisor's socket: %w", launch.FDSupervisor, err)
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("descriptor %d should be a Unix socket", launch.FDSupervisor), c.Close())
	}
	return u, nil
}
