package supervisor

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"syscall"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/cgroup"
	"github.com/peerlane/peerlane/hook/journal"
	"github.com/peerlane/peerlane/relay/launch"
)

// Causes of a relay's end: the field "cause" of the log line, and PEERLANE_CAUSE in the journal. A
// relay that ends by itself reports a cause of package launch.
const (
	causeContainer  = launch.EndContainer
	causeDrained    = "drained"
	causeStopped    = "stopped"
	causeRenewed    = "another sandbox"    // an added lane needs devices outside the sandbox
	causeSupervisor = "supervisor stopped" // the supervisor was asked to end
	causeKilled     = "killed"             // by a signal, which the field "signal" names
	causeMemory     = "out of memory"      // by the kernel, for the memory of the relay's control group
	causePanic      = "panic"
	causeUseless    = "killed by its supervisor"
	causeFailed     = "failed" // exited by itself with a status other than 0
	causeItself     = "ended by itself"
)

// ending describes the end of a relay, as the supervisor sees it.
type ending struct {
	// err is the result of Wait; nil for exit status 0.
	err error
	// held is the state that the administrator requested. renew reports that another relay
	// follows, container that the container has ended, and asked that the supervisor received a
	// stop request.
	held                    string
	renew, container, asked bool
	// killReason is the supervisor's reason to kill the relay.
	killReason string
	// memory reports that the control group, or the host, reached the memory limit while the
	// relay ran.
	memory bool
	// panicked is the first line of Go's panic message, and last the last line of standard error.
	panicked, last string
	// word is the relay's own report, which is untrusted; zero without a report.
	word launch.Ending
}

// signal returns the signal that ended the relay; 0 for an exit.
func (e ending) signal() syscall.Signal {
	if failed, ok := e.err.(*exec.ExitError); ok {
		if status := failed.Sys().(syscall.WaitStatus); status.Signaled() { // as package os documents for Linux
			return status.Signal()
		}
	}
	return 0
}

// status returns the exit status; -1 for a signal.
func (e ending) status() int {
	if failed, ok := e.err.(*exec.ExitError); ok {
		return failed.ExitCode()
	}
	return 0
}

// cause returns the cause, which is a public interface, and a sentence. Facts of the kernel take
// precedence over the supervisor's knowledge, and that over the relay's own report.
func (e ending) cause() (cause, why string) {
	signal := e.signal()
	switch {
	case signal == unix.SIGKILL && e.killReason == "" && e.memory:
		return causeMemory, "the kernel killed the relay: the control group exceeded relay.memory, or the memory of the host"
	case e.panicked != "" && (e.status() == 2 || signal == unix.SIGABRT): // how Go's runtime ends after a panic
		return causePanic, e.panicked
	case signal == unix.SIGTERM && (e.container || e.asked || e.renew): // sent by the supervisor
	case signal != 0 && e.killReason == "":
		return causeKilled, fmt.Sprintf("signal %d (%v) of an unknown sender", int(signal), signal)
	case e.word.Cause == launch.EndGPU,
		e.word.Cause == launch.EndCUDA,
		e.word.Cause == launch.EndKept,
		e.word.Cause == launch.EndPair:
		return e.word.Cause, e.word.Reason
	}
	// The end was requested, and the supervisor may have used force.
	why = e.killReason
	switch {
	case e.container:
		return causeContainer, or(why, "the container has ended")
	case e.asked:
		return causeSupervisor, or(why, "the supervisor was stopped while the container was running")
	case e.held == generation.StateDrained:
		return causeDrained, or(why, "by the administrator")
	case e.held == generation.StateStopped:
		return causeStopped, or(why, "by the administrator")
	case e.renew:
		return causeRenewed, or(why, "an added lane needs devices that the relay's sandbox lacks")
	case e.killReason != "":
		return causeUseless, e.killReason
	case e.word.Cause == launch.EndSignal:
		return causeKilled, "the relay received a signal: " + e.word.Reason
	case e.err != nil:
		return causeFailed, strings.TrimSuffix(fmt.Sprintf("%v: %s", e.err, e.last), ": ")
	}
	return causeItself, or(e.word.Reason, "without an error, while the container was running")
}

func or(a, b string) string {
	if a == "" {
		return b
	}
	return a
}

// telling lists the causes that say more than the result of Wait.
var telling = []string{causeMemory, causePanic, launch.EndGPU, launch.EndCUDA, launch.EndKept, launch.EndPair}

// expected reports whether the end of the relay was requested.
func expected(cause string) bool {
	switch cause {
	case causeContainer, causeDrained, causeStopped, causeRenewed, causeSupervisor:
		return true
	}
	return false
}

// ended writes one line with the cause of a relay's end to the host's log and to the generation's
// log, which is removed with the container.
func (s *supervisor) ended(e ending) (cause, why string) {
	if kills, err := cgroup.MemoryKills(); err == nil {
		e.memory = kills > s.relay.kills
	}
	e.panicked, e.last = s.relay.stderr.words()
	if word := s.relay.word.Load(); word != nil {
		e.word = *word
	}
	cause, why = e.cause()
	line := s.log.WithFields(
		logrus.Fields{"event": "relay-ended", "cause": cause, "relay": s.relay.process.PID, "reason": why},
	)
	if signal := e.signal(); signal != 0 {
		line = line.WithField("signal", int(signal))
	}
	severity, level := journal.SeverityInfo, logrus.InfoLevel
	if !expected(cause) {
		severity, level = journal.SeverityWarning, logrus.ErrorLevel
	}
	line.Log(level, "the relay has ended")
	message := fmt.Sprintf("relay %d has ended: %s: %s", s.relay.process.PID, cause, why)
	if err := journal.WriteCause(s.layout, severity, s.generation.Container.ID, s.generation.ID, message,
		cause); err != nil {
		s.log.WithError(err).Warn("writing to the host's log failed")
	}
	return cause, why
}

// endingIn parses a datagram of a relay as the report of its end.
func endingIn(datagram []byte) (*launch.Ending, bool) {
	var m struct {
		Ending *launch.Ending `json:"ending"`
	}
	if err := json.Unmarshal(datagram, &m); err != nil || m.Ending == nil {
		return nil, false
	}
	tame := m.Ending.Tame()
	return &tame, true
}
