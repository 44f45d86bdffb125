package supervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/cgroup"
	"github.com/peerlane/peerlane/hook/internal/programs"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/hook/sandbox"
	"github.com/peerlane/peerlane/relay/launch"
)

// answerTimeout limits the wait for a relay's answer to a configuration, even on a busy host.
const answerTimeout = 30 * time.Second

// relay is a process of peerlane-relay.
type relay struct {
	cmd     *exec.Cmd
	process process.Process
	control *net.UnixConn
	// stderr receives the standard error of the process, and word the report of its end.
	stderr *stderrTee
	word   atomic.Pointer[launch.Ending]
	// kills is the result of cgroup.MemoryKills before the start of the process.
	kills uint64
	// answers receives the relay's answers in order. It is closed when no more will come.
	answers chan launch.Status
	// claims receives the relay's claims. It is closed with answers.
	claims chan launch.Claim
	// exited gets one value after the end of the process.
	exited chan error
	// overdue fires when the answer to a configuration is late.
	overdue *time.Timer
	// asked are the requests without an answer: the word of a launch.Request, or "" for a
	// configuration.
	asked []string
	// killReason is the supervisor's reason for killing the process; empty if it has not.
	killReason string
	// sandbox describes the sandbox of the process, and devices are the devices in it; nil without
	// a sandbox.
	sandbox *sandbox.Report
	// report is the pipe with the report of the sandbox.
	report  *os.File
	devices []string
	// renew reports that the supervisor ended the process in order to start the next one.
	renew bool
	// secretsAccepted reports that the relay has accepted the secrets. The supervisor sends refused secrets
	// again after secretsRetry.
	secretsAccepted bool
	secretsRetry    time.Time
}

// lastWords limits the wait for the last output of an ended relay, because another process may
// hold standard error open.
const lastWords = 500 * time.Millisecond

// startRelay executes a relay with the descriptors of package launch. Its standard error goes to
// the log. Without a network the sandbox forbids TCP. limited describes the limits of the control
// group of supervisor and relay.
func startRelay(
	g *generation.Generation,
	network *launch.Network,
	limited cgroup.Limited,
	clients, peers, init *os.File,
	log io.Writer,
) (*relay, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "relay"), os.NewFile(uintptr(pair[1]), "supervisor")
	defer ours.Close()
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, err
	}
	r := &relay{
		control: conn.(*net.UnixConn), // a Unix socket has this type
		answers: make(chan launch.Status),
		claims:  make(chan launch.Claim),
		exited:  make(chan error, 1),
		stderr: &stderrTee{
			to:   log,
			wrap: g.LogFormat == config.LogJSON,
			own:  map[string]string{"generation": g.ID, "container": g.Container.ID},
		},
		overdue: time.NewTimer(0),
	}
	r.overdue.Stop()
	if kills, err := cgroup.MemoryKills(); err == nil {
		r.kills = kills // a host without the counter reports no kills
	}
	files := map[int]*os.File{
		launch.FDClients: clients, launch.FDPeers: peers, launch.FDSupervisor: theirs, launch.FDInit: init,
	}
	arguments := []string{"serve"}
	if g.LogFormat == config.LogJSON { // not by default, because a relay of an earlier release lacks the option
		arguments = append(arguments, "--log-format", config.LogJSON)
	}
	r.cmd = exec.Command(g.Relay.Path, arguments...)
	if g.Sandbox.Mode == config.SandboxAuto {
		reportRead, reportWrite, err := os.Pipe()
		if err != nil {
			r.control.Close()
			return nil, err
		}
		defer reportWrite.Close()
		r.report = reportRead
		spec := confinement(g, network, limited)
		r.devices = spec.Devices
		const fdReport = launch.FDInit + 1
		files[fdReport] = reportWrite
		// Execute the same program even if the file has been replaced.
		r.cmd = exec.Command(
			"/proc/self/exe",
			append([]string{"confine"}, spec.Arguments(fdReport, g.Relay.Path, arguments...)...)...)
	}
	r.cmd.Dir = "/"
	r.cmd.Env = append([]string{programs.SearchPath}, g.Relay.Environment...)
	stderrRead, stderrWrite, err := os.Pipe()
	if err != nil {
		r.report.Close() // nil without a sandbox
		r.control.Close()
		return nil, err
	}
	defer stderrWrite.Close()
	r.cmd.Stderr = stderrWrite
	for fd := 3; files[fd] != nil; fd++ {
		r.cmd.ExtraFiles = append(r.cmd.ExtraFiles, files[fd])
	}
	if err := startPunctual(r.cmd); err != nil {
		stderrRead.Close()
		r.report.Close()
		r.control.Close()
		return nil, err
	}
	// Only Wait reaps the process, so its id is unambiguous.
	found, pidfd, err := process.Identify(r.cmd.Process.Pid)
	if err == nil {
		r.process = found
		pidfd.Close()
	} else if !errors.Is(err, process.ErrEnded) {
		err = errors.Join(err, r.cmd.Process.Kill())
		r.cmd.Wait() // this process killed it, so the error has no information
		stderrRead.Close()
		r.report.Close()
		r.control.Close()
		return nil, err
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		r.read()
	}()
	heard := make(chan struct{})
	go func() {
		defer close(heard)
		defer stderrRead.Close()
		_, _ = io.Copy(r.stderr, stderrRead) // until every writer has closed the pipe
	}()
	go func() {
		err := r.cmd.Wait()
		late := time.After(lastWords)
		for _, all := range []chan struct{}{heard, read} {
			select {
			case <-all:
			case <-late:
				late = time.After(0)
			}
		}
		r.exited <- err
	}()
	return r, nil
}

// waitExecuted waits until the relay has been executed in its sandbox. After an error the relay has
// ended.
func (r *relay) waitExecuted() error {
	if r.report == nil {
		return nil
	}
	defer r.report.Close()
	var err error
	if r.sandbox, err = sandbox.ReadReport(r.report); err != nil {
		err = errors.Join(err, r.kill("the relay was not executed"))
		<-r.exited
	}
	return err
}

func (r *relay) read() {
	defer close(r.answers)
	defer close(r.claims)
	buffer := make([]byte, launch.MaxDatagram)
	for {
		n, err := r.control.Read(buffer)
		if err != nil || n == 0 {
			return // Wait returns the reason of the relay's end
		}
		if c, ok := claimIn(buffer[:n]); ok {
			r.claims <- c
			continue
		}
		if e, ok := endingIn(buffer[:n]); ok {
			r.word.CompareAndSwap(nil, e)
			continue
		}
		var s launch.Status
		if err := json.Unmarshal(buffer[:n], &s); err != nil {
			s = launch.Status{Error: fmt.Sprintf("malformed answer of the relay: %v", err)}
		}
		r.answers <- s
	}
}

// configure sends a configuration. The answer arrives on answers.
func (r *relay) configure(c launch.Config) error {
	c.Version = launch.Version
	if err := r.send(c); err != nil {
		return err
	}
	r.asked = append(r.asked, "")
	r.overdue.Reset(answerTimeout)
	return nil
}

// request sends a request. The answer arrives on answers.
func (r *relay) request(q launch.Request) error {
	if err := r.send(q); err != nil {
		return err
	}
	r.asked = append(r.asked, q.Request)
	return nil
}

func (r *relay) send(message any) error {
	text, err := json.Marshal(message)
	if err != nil {
		return err
	}
	// A relay that does not read must not block the supervisor.
	if err := r.control.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	_, err = r.control.Write(text)
	return err
}

// answered removes the oldest request and returns its word; false if no request is open.
func (r *relay) answered() (string, bool) {
	if len(r.asked) == 0 {
		return "", false
	}
	to := r.asked[0]
	r.asked = r.asked[1:]
	if !slices.Contains(r.asked, "") {
		r.overdue.Stop()
	}
	return to, true
}

// kill kills the relay for a reason. exited reports its end.
func (r *relay) kill(reason string) error {
	r.killReason = reason
	r.overdue.Stop()
	if err := r.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// end requests the end of the relay, kills it after process.EndTimeout, and returns the result of
// Wait; nil if the relay survives.
func (r *relay) end() (exit *error, err error) {
	defer r.close()
	if err := r.cmd.Process.Signal(unix.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return nil, err
	}
	select {
	case err := <-r.exited:
		return &err, nil
	case <-time.After(process.EndTimeout):
	}
	if err := r.kill(fmt.Sprintf("it did not end within %v and was killed", process.EndTimeout)); err != nil {
		return nil, err
	}
	select {
	case err := <-r.exited:
		return &err, fmt.Errorf("the relay did not end within %v and was killed", process.EndTimeout)
	case <-time.After(process.EndTimeout):
		return nil, process.Unkillable("the relay, process", r.process.PID)
	}
}

// close closes the connection to an ended relay. It does not wait, because a message can contain
// the descriptor of a socket that lingers.
func (r *relay) close() {
	r.overdue.Stop()
	go r.control.Close()
	go func() {
		for range r.answers { // drain, so that read can return
		}
	}()
}

// slack is the timer slack of a relay's threads; the default of the kernel is 50 µs.
const slack = time.Microsecond

// startPunctual starts a program whose threads have the timer slack slack. Go's scheduler sleeps
// for 3 µs before a thread takes over a goroutine that another thread has made runnable, which the
// relay's loop does for every message to another host.
func startPunctual(c *exec.Cmd) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // the slack ends with the thread
		// Without permission the sleeps are longer, but the relay works.
		_ = unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(slack.Nanoseconds()), 0, 0, 0)
		started <- c.Start()
	}()
	return <-started
}
