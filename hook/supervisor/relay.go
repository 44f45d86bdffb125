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

// answerTimeout limits the wait for a relay's answer to a configuration. A busy host is slow.
const answerTimeout = 30 * time.Second

// relay is one run of peerlane-relay.
type relay struct {
	cmd     *exec.Cmd
	process process.Process
	control *net.UnixConn
	// stderr receives the standard error of the process, and word what it says of its end.
	stderr *stderrTee
	word   atomic.Pointer[launch.Ending]
	// kills is memoryKills before it began.
	kills uint64
	// answers has the relay's answers, in order; closed when there will be no
	// more.
	answers chan launch.Status
	// claims has what it asks for, and is closed with answers.
	claims chan launch.Claim
	// exited has one value, when the process has ended.
	exited chan error
	// overdue fires when the answer to a configuration is late.
	overdue *time.Timer
	// asked has what is not answered yet, a launch.Request's word or "" for a
	// configuration.
	asked []string
	// killReason says why it was killed; empty while it was not.
	killReason string
	// sandbox is what was done to it, and devices what it was left; nil without a
	// sandbox.
	sandbox *sandbox.Report
	report  *os.File // where that comes from
	devices []string
	// renew says that it was ended for the next one's sake.
	renew bool
	// told says that it has taken the secrets; those that it has refused it is sent again
	// after tellAgain.
	told      bool
	tellAgain time.Time
}

// lastWords is how long what a relay has said is waited for when it has ended: who
// has its standard error still can be anybody.
const lastWords = 500 * time.Millisecond

// startRelay executes a relay with the descriptors of package launch. What it says
// on its standard error goes to the log. Without a network its sandbox lets it to none.
// limited says that its control group limits its tasks.
func startRelay(g *generation.Generation, network *launch.Network, limited bool, clients, peers, init *os.File, log io.Writer) (*relay, error) {
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
		control: conn.(*net.UnixConn), // of a Unix socket it is one
		answers: make(chan launch.Status),
		claims:  make(chan launch.Claim),
		exited:  make(chan error, 1),
		stderr:  &stderrTee{to: log, wrap: g.LogFormat == config.LogJSON, own: map[string]string{"generation": g.ID, "container": g.Container.ID}},
		overdue: time.NewTimer(0),
	}
	r.overdue.Stop()
	if kills, err := cgroup.MemoryKills(); err == nil {
		r.kills = kills // of a host that counts none, none are told
	}
	files := map[int]*os.File{
		launch.FDClients: clients, launch.FDPeers: peers, launch.FDSupervisor: theirs, launch.FDInit: init,
	}
	arguments := []string{"serve"}
	if g.LogFormat == config.LogJSON { // not named otherwise: a relay of an earlier release knows no such option
		arguments = append(arguments, "--log-format", config.LogJSON)
	}
	r.cmd = exec.Command(g.Relay.Path, arguments...)
	if g.Sandbox.Mode == config.SandboxAuto {
		report, tell, err := os.Pipe()
		if err != nil {
			r.control.Close()
			return nil, err
		}
		defer tell.Close()
		r.report = report
		spec := confinement(g, network)
		r.devices = spec.Devices
		if limited {
			spec.Tasks = 0
		}
		const fdReport = launch.FDInit + 1
		files[fdReport] = tell
		// This program again, also when its file has been replaced.
		r.cmd = exec.Command("/proc/self/exe", append([]string{"confine"}, spec.Arguments(fdReport, g.Relay.Path, arguments...)...)...)
	}
	r.cmd.Dir = "/"
	r.cmd.Env = append([]string{programs.SearchPath}, g.Relay.Environment...)
	said, says, err := os.Pipe()
	if err != nil {
		r.report.Close() // of none it is an error, which does not matter
		r.control.Close()
		return nil, err
	}
	defer says.Close()
	r.cmd.Stderr = says
	for fd := 3; files[fd] != nil; fd++ {
		r.cmd.ExtraFiles = append(r.cmd.ExtraFiles, files[fd])
	}
	if err := startPunctual(r.cmd); err != nil {
		said.Close()
		r.report.Close()
		r.control.Close()
		return nil, err
	}
	// It cannot be reaped before Wait, so the number is its own.
	found, pidfd, err := process.Identify(r.cmd.Process.Pid)
	if err == nil {
		r.process = found
		pidfd.Close()
	} else if !errors.Is(err, process.ErrEnded) {
		err = errors.Join(err, r.cmd.Process.Kill())
		r.cmd.Wait() // killed by us: nothing to learn
		said.Close()
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
		defer said.Close()
		_, _ = io.Copy(r.stderr, said) // until nobody has the other end
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

// executed waits until the sandbox is made and the relay executed in it. The relay
// has ended where that fails.
func (r *relay) executed() error {
	if r.report == nil {
		return nil
	}
	defer r.report.Close()
	var err error
	if r.sandbox, err = sandbox.ReadReport(r.report); err != nil {
		err = errors.Join(err, r.kill("it was not executed"))
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
			return // the relay's end has a reason of its own, which Wait tells
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
			s = launch.Status{Error: fmt.Sprintf("its answer to the supervisor makes no sense: %v", err)}
		}
		r.answers <- s
	}
}

// configure sends a configuration; the answer comes by answers.
func (r *relay) configure(c launch.Config) error {
	if err := r.send(c); err != nil {
		return err
	}
	r.asked = append(r.asked, "")
	r.overdue.Reset(answerTimeout)
	return nil
}

// request sends a request; the answer comes by answers.
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
	// A relay that reads nothing shall not stop the supervisor.
	if err := r.control.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	_, err = r.control.Write(text)
	return err
}

// answered takes note of one answer, and says to what it is one. It is false where
// nobody asked.
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

// kill ends the relay for a reason; exited tells when it has ended.
func (r *relay) kill(reason string) error {
	r.killReason = reason
	r.overdue.Stop()
	if err := r.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// end asks the relay to end, insists after a while, and returns when it has
// ended, with what Wait told; with nil where it has not.
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
	if err := r.kill(fmt.Sprintf("it did not end within %v, and was killed", process.EndTimeout)); err != nil {
		return nil, err
	}
	select {
	case err := <-r.exited:
		return &err, fmt.Errorf("the relay did not end within %v and was killed", process.EndTimeout)
	case <-time.After(process.EndTimeout):
		return nil, process.Unkillable("the relay, process", r.process.PID)
	}
}

// close drops the conversation with a relay that has ended. It waits for nothing:
// with a message can come a descriptor, to be dropped, of a socket that lingers.
func (r *relay) close() {
	r.overdue.Stop()
	go r.control.Close()
	go func() {
		for range r.answers { // so that read can return
		}
	}()
}

// slack is how late the kernel may end a nap of a relay's threads, in place of the usual 50 µs.
const slack = time.Microsecond

// startPunctual starts a program whose threads all have so little slack. Go's scheduler naps
// for 3 µs before it takes a goroutine over that a thread has woken and does not run itself,
// as the relay's loop does with each message to another host.
func startPunctual(c *exec.Cmd) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // and it ends with its thread
		// Where it is refused naps are longer, and right all the same.
		_ = unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(slack.Nanoseconds()), 0, 0, 0)
		started <- c.Start()
	}()
	return <-started
}
