package hook

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

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
	case e.held == StateDrained:
		return causeDrained, or(why, "by the administrator")
	case e.held == StateStopped:
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
	if kills, err := memoryKills(); err == nil {
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
	severity, level := SeverityInfo, logrus.InfoLevel
	if !expected(cause) {
		severity, level = SeverityWarning, logrus.ErrorLevel
	}
	line.Log(level, "the relay has ended")
	message := fmt.Sprintf("relay %d has ended: %s: %s", s.relay.process.PID, cause, why)
	if err := tell(s.layout, severity, s.generation.Container.ID, s.generation.ID, message, cause); err != nil {
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

// memoryKills counts how often the kernel has killed something for its memory in this
// process's control group, which a relay shares with its supervisor: memory.events of
// cgroup2, or memory.oom_control of the first version (cgroup-v2.rst, cgroup-v1/memory.rst).
func memoryKills() (uint64, error) {
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return 0, err
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return 0, err
	}
	var errs error
	for _, file := range memoryFiles(string(groups), string(mounts)) {
		text, err := os.ReadFile(file)
		if err == nil {
			return oomKills(string(text))
		}
		errs = err
	}
	return 0, errs
}

// memoryFiles are where that count can be, by the text of a /proc/PID/cgroup and of a
// mountinfo.
func memoryFiles(groups, mountinfo string) (files []string) {
	for line := range strings.Lines(groups) {
		part := strings.SplitN(strings.TrimRight(line, "\n"), ":", 3)
		if len(part) != 3 {
			continue
		}
		if part[0] == "0" && part[1] == "" {
			if root, ok := cgroupRoot(mountinfo); ok {
				files = append(files, filepath.Join(root, part[2], "memory.events"))
			}
			continue
		}
		for _, controller := range strings.Split(part[1], ",") {
			if root, ok := memoryRoot(mountinfo); ok && controller == "memory" {
				files = append(files, filepath.Join(root, part[2], "memory.oom_control"))
			}
		}
	}
	return files
}

// memoryRoot is the mount point of the first version's memory controller.
func memoryRoot(mountinfo string) (string, bool) {
	for line := range strings.Lines(mountinfo) {
		mount, filesystem, ok := strings.Cut(strings.TrimRight(line, "\n"), " - ")
		fields, of := strings.Fields(mount), strings.Fields(filesystem)
		if !ok || len(fields) < 5 || len(of) < 3 || of[0] != "cgroup" {
			continue
		}
		for _, option := range strings.Split(of[2], ",") {
			if option == "memory" {
				return fields[4], true
			}
		}
	}
	return "", false
}

// oomKills is what a memory.events or a memory.oom_control says of it.
func oomKills(text string) (uint64, error) {
	for line := range strings.Lines(text) {
		if count, is := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); is {
			return strconv.ParseUint(count, 10, 64)
		}
	}
	return 0, fmt.Errorf("no oom_kill in %.100q", text)
}
