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

// Causes of a relay's end, as the one line has them that it leaves ("cause", and in the
// journal PEERLANE_CAUSE). A relay that ends by itself brings its own; see package launch.
const (
	causeContainer  = launch.EndContainer
	causeDrained    = "drained"
	causeStopped    = "stopped"
	causeRenewed    = "another sandbox"    // an added lane needs devices that it has not
	causeSupervisor = "supervisor stopped" // somebody asked it to end
	causeKilled     = "killed"             // by a signal: field signal
	causeMemory     = "out of memory"      // the kernel's killer, in its control group
	causePanic      = "panic"
	causeUseless    = "killed by its supervisor"
	causeFailed     = "failed" // by itself, with a status
	causeItself     = "ended by itself"
)

// ending is what a supervisor knows of a relay that has ended.
type ending struct {
	// err is what Wait told; nil for the status 0.
	err error
	// held is what the administrator asked for, renew that another one was to follow;
	// container that its container has ended, and asked that the supervisor was to end.
	held                    string
	renew, container, asked bool
	// killReason is why the supervisor killed it.
	killReason string
	// memory says that its control group has met its limit, or the host's, meanwhile.
	memory bool
	// panicked is the first line of what Go says of a panic, and last the last line that
	// the relay said at all.
	panicked, last string
	// word is its own, which may be a lie; zero where there is none.
	word launch.Ending
}

// signal is the one that ended it; 0 where none did.
func (e ending) signal() syscall.Signal {
	if failed, ok := e.err.(*exec.ExitError); ok {
		if status := failed.Sys().(syscall.WaitStatus); status.Signaled() { // as package os documents for Linux
			return status.Signal()
		}
	}
	return 0
}

// status is the one that it ended with; -1 for a signal.
func (e ending) status() int {
	if failed, ok := e.err.(*exec.ExitError); ok {
		return failed.ExitCode()
	}
	return 0
}

// cause is the cause, a public interface, and a sentence on it. What the kernel says goes
// before what the supervisor knows, and that before the relay's own word.
func (e ending) cause() (cause, why string) {
	signal := e.signal()
	switch {
	case signal == unix.SIGKILL && e.killReason == "" && e.memory:
		return causeMemory, "the kernel killed it, because it, or what is in its control group, took more memory than relay.memory, or the host, has"
	case e.panicked != "" && (e.status() == 2 || signal == unix.SIGABRT): // as Go's runtime ends
		return causePanic, e.panicked
	case signal == unix.SIGTERM && (e.container || e.asked || e.renew): // its supervisor's
	case signal != 0 && e.killReason == "":
		return causeKilled, fmt.Sprintf("signal %d, %v, of which the kernel does not say who has sent it", int(signal), signal)
	case e.word.Cause == launch.EndGPU, e.word.Cause == launch.EndCUDA, e.word.Cause == launch.EndKept, e.word.Cause == launch.EndPair:
		return e.word.Cause, e.word.Reason
	}
	// What was meant to end has ended, if need be by force.
	why = e.killReason
	switch {
	case e.container:
		return causeContainer, or(why, "its container has ended")
	case e.asked:
		return causeSupervisor, or(why, "its supervisor was asked to end, although the container lives")
	case e.held == generation.StateDrained:
		return causeDrained, or(why, "by the administrator")
	case e.held == generation.StateStopped:
		return causeStopped, or(why, "by the administrator")
	case e.renew:
		return causeRenewed, or(why, "an added lane has devices that its sandbox has not")
	case e.killReason != "":
		return causeUseless, e.killReason
	case e.word.Cause == launch.EndSignal:
		return causeKilled, "it was asked to end by a signal: " + e.word.Reason
	case e.err != nil:
		return causeFailed, strings.TrimSuffix(fmt.Sprintf("%v: %s", e.err, e.last), ": ")
	}
	return causeItself, or(e.word.Reason, "without a word, although the container lives")
}

func or(a, b string) string {
	if a == "" {
		return b
	}
	return a
}

// telling are the causes that say more than what Wait told.
var telling = []string{causeMemory, causePanic, launch.EndGPU, launch.EndCUDA, launch.EndKept, launch.EndPair}

// expected reports whether somebody wanted the relay to end.
func expected(cause string) bool {
	switch cause {
	case causeContainer, causeDrained, causeStopped, causeRenewed, causeSupervisor:
		return true
	}
	return false
}

// ended writes the one line that a relay's end leaves, with its cause: in the
// generation's log, which goes with its container, and in the host's.
func (s *supervisor) ended(e ending) (cause, why string) {
	if kills, err := cgroup.MemoryKills(); err == nil {
		e.memory = kills > s.relay.kills
	}
	e.panicked, e.last = s.relay.stderr.words()
	if word := s.relay.word.Load(); word != nil {
		e.word = *word
	}
	cause, why = e.cause()
	line := s.log.WithFields(logrus.Fields{"event": "relay-ended", "cause": cause, "relay": s.relay.process.PID, "reason": why})
	if signal := e.signal(); signal != 0 {
		line = line.WithField("signal", int(signal))
	}
	severity, level := journal.SeverityInfo, logrus.InfoLevel
	if !expected(cause) {
		severity, level = journal.SeverityWarning, logrus.ErrorLevel
	}
	line.Log(level, "the relay has ended")
	message := fmt.Sprintf("relay %d has ended: %s: %s", s.relay.process.PID, cause, why)
	if err := journal.TellCause(s.layout, severity, s.generation.Container.ID, s.generation.ID, message, cause); err != nil {
		s.log.WithError(err).Warn("the host's log has not taken it")
	}
	return cause, why
}

// endingIn is the ending that a datagram of a relay holds, if it is one.
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
