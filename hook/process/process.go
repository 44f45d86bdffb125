package process

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
)

// Process identifies a process uniquely, even if the process id is reused.
type Process struct {
	PID int `json:"pid"`
	// Start is the start time in clock ticks since the boot: field 22 of /proc/PID/stat.
	Start uint64 `json:"start"`
	// Boot identifies the boot of the kernel: /proc/sys/kernel/random/boot_id.
	Boot string `json:"boot"`
}

// EndTimeout is the time that a process has to end before SIGKILL.
const EndTimeout = 5 * time.Second

// ErrEnded reports that a process has ended.
var ErrEnded = errors.New("the process has ended")

// Identify returns the process with a process id, and a pidfd of the process.
func Identify(pid int) (Process, *os.File, error) {
	fail := func(err error) (Process, *os.File, error) {
		return Process{}, nil, &fault.Error{Operation: "identify process", Object: strconv.Itoa(pid), Cause: err}
	}
	boot, err := BootID()
	if err != nil {
		return fail(err)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		// EINVAL and ENOENT: the number now belongs to a thread that is not the first of the
		// process.
		if err == unix.ESRCH || err == unix.EINVAL || err == unix.ENOENT {
			err = ErrEnded
		}
		return fail(os.NewSyscallError("pidfd_open", err))
	}
	file := os.NewFile(uintptr(fd), "pidfd")
	start, err := startTime(pid)
	// While the process of the pidfd runs, no second process has the id, so the values are of
	// this process.
	if Ended(fd) {
		err = ErrEnded
	}
	if err != nil {
		file.Close()
		return fail(err)
	}
	return Process{PID: pid, Start: start, Boot: boot}, file, nil
}

// BootID returns the id of the kernel's boot.
func BootID() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text)), err
}

// startTime reads field 22 of /proc/PID/stat.
func startTime(pid int) (uint64, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	start, err := parseStart(stat)
	if err != nil {
		return 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
	}
	return start, nil
}

// parseStart returns field 22 of the text of a /proc/PID/stat.
func parseStart(stat []byte) (uint64, error) {
	// Field 2 is the name of the program in parentheses, which may contain spaces and parentheses.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	const starttime = 22 - 3 // the first field here is the third
	if len(fields) <= starttime {
		return 0, fmt.Errorf("too few fields: %q", stat)
	}
	return strconv.ParseUint(string(fields[starttime]), 10, 64)
}

// Ended reports whether the process of a pidfd has ended; a zombie has ended.
func Ended(pidfd int) bool {
	return EndsWithin(pidfd, 0)
}

// WaitEnd waits until the process of a pidfd has ended.
func WaitEnd(pidfd int) error {
	for {
		fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
		_, err := unix.Poll(fds, -1)
		if err != unix.EINTR {
			return os.NewSyscallError("poll", err)
		}
	}
}

// EndsWithin waits for at most limit until the process of a pidfd has ended, and reports whether
// the process has ended.
func EndsWithin(pidfd int, limit time.Duration) bool {
	for deadline := time.Now().Add(limit); ; {
		left := max(0, time.Until(deadline))
		fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, int((left+time.Millisecond-1)/time.Millisecond))
		if err != unix.EINTR {
			return n > 0 // -1 after an error
		}
	}
}

// Open returns a pidfd of the process. The error is ErrEnded if the process has ended, even if
// another process has the id.
func (p Process) Open() (*os.File, error) {
	now, pidfd, err := Identify(p.PID)
	if err != nil {
		return nil, err
	}
	if now != p {
		pidfd.Close()
		return nil, fmt.Errorf("process %d: %w, and another process has the number", p.PID, ErrEnded)
	}
	return pidfd, nil
}

// Lives reports whether the process runs. After an error, assume that the process runs.
func (p Process) Lives() (bool, error) {
	pidfd, err := p.Open()
	if errors.Is(err, ErrEnded) {
		return false, nil
	}
	if err != nil {
		return true, err
	}
	pidfd.Close()
	return true, nil
}

// End waits for a process that is already ending, kills it after the limit, and waits again. After
// an error the process may still run.
func (p Process) End(limit time.Duration) error {
	pidfd, err := p.Open()
	if errors.Is(err, ErrEnded) {
		return nil
	}
	if err != nil {
		return err
	}
	defer pidfd.Close()
	if EndsWithin(int(pidfd.Fd()), limit) {
		return nil
	}
	if err := KillByPidfd(int(pidfd.Fd())); err != nil && err != unix.ESRCH {
		return os.NewSyscallError("pidfd_send_signal", err)
	}
	if !EndsWithin(int(pidfd.Fd()), limit) {
		return Unkillable("process", p.PID)
	}
	return nil
}

// KillByPidfd kills a process. A test replaces KillByPidfd to simulate a process that survives.
var KillByPidfd = func(pidfd int) error { return unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0) }

// Unkillable returns the error of a process that survives SIGKILL.
func Unkillable(what string, pid int) error {
	return &fault.Error{Code: fault.Unkillable, Operation: "end by SIGKILL " + what, Object: strconv.Itoa(pid),
		Cause: errors.New(
			"a system call of the process does not return, perhaps in a driver",
		), Remedy: fmt.Sprintf("see the call in /proc/%d/stack", pid)}
}
