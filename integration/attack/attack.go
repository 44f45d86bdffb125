// Package attack has the primitives of a hostile container. Tests of several packages run the
// primitives on the host and in containers of every engine.
package attack

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// OnThread calls f on a locked thread, which ends with the calling goroutine. The thread is never
// the first of the process: the kernel and the host of a relay identify a process by the uid of the
// first thread.
func OnThread(f func()) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		defer runtime.UnlockOSThread()
		done := make(chan struct{})
		go OnThread(func() { defer close(done); f() })
		<-done
		return
	}
	f()
}

// TakeUID gives the calling thread a uid and a gid.
func TakeUID(uid uint32) syscall.Errno {
	for _, call := range []uintptr{unix.SYS_SETRESGID, unix.SYS_SETRESUID} {
		if _, _, errno := unix.RawSyscall(call, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			return errno
		}
	}
	return 0
}

// For returns a function that reports whether a time has passed.
func For(within time.Duration) func() bool {
	end := time.Now().Add(within)
	return func() bool { return !time.Now().Before(end) }
}

// AfterStart returns a function that reports whether a sandboxed process has executed the relay, or
// has ended, and then a time has passed.
func AfterStart(pid int, within time.Duration) func() bool {
	var over func() bool
	tries := 0
	return func() bool {
		if over != nil {
			return over()
		}
		if tries++; tries%100 == 1 {
			command, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			if err != nil || !bytes.Contains(command, []byte("\x00--uid=")) {
				over = For(within)
			}
		}
		return false
	}
}

// Trace takes a uid, tries to trace a process until over, and returns the successful methods. The
// calling thread keeps the uid, so Trace runs in OnThread.
func Trace(pid int, uid uint32, over func() bool) (methods []string) {
	if errno := TakeUID(uid); errno != 0 {
		return []string{"setresuid: " + errno.Error()}
	}
	succeeded := func(method string) {
		if !slices.Contains(methods, method) {
			methods = append(methods, method)
		}
	}
	memory := fmt.Sprintf("/proc/%d/mem", pid)
	for !over() {
		if fd, err := unix.Open(memory, unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
			unix.Close(fd)
			succeeded("/proc/PID/mem")
		}
		const seize, interrupt = 0x4206, 0x4207 // linux/ptrace.h
		if _, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, seize, uintptr(pid), 0, 0, 0, 0); errno == 0 {
			succeeded("ptrace")
			// Detach: otherwise the process would remain as a zombie.
			_, _, _ = unix.RawSyscall6(unix.SYS_PTRACE, interrupt, uintptr(pid), 0, 0, 0, 0)
			var status unix.WaitStatus
			_, _ = unix.Wait4(pid, &status, unix.WALL, nil)
			_ = unix.PtraceDetach(pid)
		}
	}
	return methods
}

// DescriptorsInFlight takes a uid on a thread and puts descriptors in flight until the kernel
// refuses more, at the limit of open files. The result is the number of descriptors, which stay in
// flight until the end of the process.
func DescriptorsInFlight(uid uint32, limit uint64) (sent uint64, err error) {
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
		return 0, fmt.Errorf("a limit of %d files: %w", limit, err)
	}
	null, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	const maxDescriptors = 253 // SCM_MAX_FD
	fds := make([]int, maxDescriptors)
	for i := range fds {
		fds[i] = null
	}
	rights := unix.UnixRights(fds...)
	result := make(chan error)
	go OnThread(func() {
		result <- func() error {
			if errno := TakeUID(uid); errno != 0 {
				return fmt.Errorf("setresuid to %d: %w", uid, errno)
			}
			for {
				pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					return os.NewSyscallError("socketpair", err)
				}
				for err == nil {
					if err = unix.Sendmsg(pair[0], []byte{0}, rights, nil, 0); err == nil {
						sent += maxDescriptors
					}
				}
				if err == unix.ETOOMANYREFS { // the limit
					return nil
				}
				if err != unix.EAGAIN { // else this pair is full
					return os.NewSyscallError("sendmsg", err)
				}
			}
		}()
	})
	err = <-result
	return sent, err
}
