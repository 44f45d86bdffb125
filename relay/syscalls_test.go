package relay_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// The kernel notifies the tests of system calls of a child process, and follows the answers
// (seccomp_unotify(2)): the call, or an error in place of the call. The process runs the code that
// ships, on every thread.

// argument is where a filter finds the lower half of an argument: both architectures
// are little-endian.
func argument(n int) uint32 { return uint32(16 + 8*n) }

// asked is the filter: the kernel notifies of the listed calls. The list has no calls of the Go
// runtime for memory and timers, and no call that a loop repeats and that cannot fail.
func asked() []bpf.Instruction {
	ask := bpf.RetConstant{Val: unix.SECCOMP_RET_USER_NOTIF}
	allow := bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW}
	f := []bpf.Instruction{bpf.LoadAbsolute{Off: 0, Size: 4}}
	for _, call := range []uint32{
		unix.SYS_MEMFD_CREATE, unix.SYS_FTRUNCATE, unix.SYS_FALLOCATE, unix.SYS_MUNMAP, unix.SYS_EVENTFD2, unix.SYS_PIPE2,
		unix.SYS_EPOLL_CREATE1, unix.SYS_SENDMSG, unix.SYS_RECVMSG, unix.SYS_SOCKETPAIR, unix.SYS_SOCKET, unix.SYS_CONNECT,
		unix.SYS_ACCEPT4, unix.SYS_SETSOCKOPT, unix.SYS_SHUTDOWN, unix.SYS_PIDFD_OPEN, unix.SYS_OPENAT, unix.SYS_STATX,
		unix.SYS_FSTAT, unix.SYS_FSTATFS, unix.SYS_PRCTL, unix.SYS_CLONE, unix.SYS_CLONE3,
	} {
		f = append(f, bpf.JumpIf{Cond: bpf.JumpEqual, Val: call, SkipFalse: 1}, ask)
	}
	// Calls with an argument of interest.
	for _, c := range []struct {
		call uint32
		arg  int
		test bpf.JumpTest
		is   uint32
	}{
		{unix.SYS_MMAP, 3, bpf.JumpBitsSet, unix.MAP_SHARED},
		{unix.SYS_FCNTL, 1, bpf.JumpGreaterOrEqual, unix.F_DUPFD_CLOEXEC}, // and the commands of seals
		{unix.SYS_EPOLL_CTL, 1, bpf.JumpEqual, unix.EPOLL_CTL_ADD},
		{unix.SYS_GETSOCKOPT, 2, bpf.JumpEqual, soPeerPIDFD},
		{unix.SYS_WRITE, 0, bpf.JumpEqual, 2},
	} {
		f = append(f, bpf.JumpIf{Cond: bpf.JumpEqual, Val: c.call, SkipFalse: 4},
			bpf.LoadAbsolute{Off: argument(c.arg), Size: 4},
			bpf.JumpIf{Cond: c.test, Val: c.is, SkipFalse: 1}, ask, allow)
	}
	return append(f, allow)
}

const soPeerPIDFD = 77 // of Linux 6.5, on amd64 and arm64

// beWatched makes the kernel notify the process at the remote end of a socket of this process's
// calls, in every thread, from now on. Afterwards beWatched answers the remote end's requests for the
// number of goroutines, or sends the reason of a failure.
func beWatched(control int) error {
	listener, err := filterCalls()
	if err != nil {
		_, err = unix.Write(control, []byte(err.Error()))
		return err
	}
	// The call that hands the listener over cannot be asked about: nobody has it yet.
	// So the other end takes it (pidfd_getfd).
	var number [4]byte
	binary.LittleEndian.PutUint32(number[:], uint32(listener))
	if _, err := unix.Write(control, number[:]); err != nil {
		return err
	}
	if _, err := unix.Read(control, number[:1]); err != nil {
		return err
	}
	if err := unix.Close(listener); err != nil {
		return err
	}
	go func() {
		for {
			if n, err := unix.Read(control, number[:1]); n != 1 || err != nil {
				return
			}
			var count [4]byte
			binary.LittleEndian.PutUint32(count[:], uint32(runtime.NumGoroutine()))
			_, _ = unix.Write(control, count[:])
		}
	}()
	return nil
}

func filterCalls() (listener int, err error) {
	raw, err := bpf.Assemble(asked())
	if err != nil {
		return -1, err
	}
	program := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		program[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	fprog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return -1, os.NewSyscallError("PR_SET_NO_NEW_PRIVS", err)
	}
	const all = unix.SECCOMP_FILTER_FLAG_TSYNC | unix.SECCOMP_FILTER_FLAG_TSYNC_ESRCH
	fd, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		// The runtime's signals do not make a call that is asked about begin anew.
		all|unix.SECCOMP_FILTER_FLAG_NEW_LISTENER|unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV,
		uintptr(unsafe.Pointer(&fprog)))
	runtime.KeepAlive(program)
	if errno != 0 {
		return -1, os.NewSyscallError("seccomp", errno)
	}
	return int(fd), nil
}

// question is struct seccomp_notif, linux/seccomp.h, and reply struct seccomp_notif_resp.
type question struct {
	id        uint64
	thread    uint32
	flags     uint32
	call      int32
	arch      uint32
	at        uint64
	arguments [6]uint64
}

type reply struct {
	id    uint64
	value int64
	err   int32
	flags uint32
}

// watcher answers the kernel for a process.
type watcher struct {
	pid      int
	listener int
	memory   *os.File
	from, to uint64 // of the program's text; further callers are libraries
	over     sync.WaitGroup

	mu     sync.Mutex
	calls  map[string]int // by name
	faults []*callFault
}

// callFault is an error, or a delay, of a system call.
type callFault struct {
	call  string // the beginning of the name
	after int    // skipped calls
	times int    // 0: for ever
	errno unix.Errno
	delay time.Duration

	seen, struck int
}

func (f *callFault) String() string {
	effect := unix.ErrnoName(f.errno)
	if f.delay > 0 {
		effect = f.delay.String()
	}
	return fmt.Sprintf("%s:after=%d:times=%d:%s", f.call, f.after, f.times, effect)
}

// errNotAsked says that this kernel does not ask about system calls.
var errNotAsked = errors.New("this kernel does not ask about system calls")

// watch answers notifications of the process at the remote end of a socket, with faults from the
// first call on.
func watch(pid int, control *os.File, faults ...*callFault) (*watcher, error) {
	message := make([]byte, 256)
	n, err := control.Read(message)
	if err != nil {
		return nil, err
	}
	if n != 4 {
		return nil, fmt.Errorf("%w: %s", errNotAsked, message[:n])
	}
	w := &watcher{pid: pid, calls: map[string]int{}, faults: faults}
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	defer unix.Close(process)
	if w.listener, err = unix.PidfdGetfd(process, int(binary.LittleEndian.Uint32(message)), 0); err != nil {
		return nil, fmt.Errorf("%w: %w", errNotAsked, os.NewSyscallError("pidfd_getfd", err))
	}
	if w.memory, err = os.Open(fmt.Sprintf("/proc/%d/mem", pid)); err != nil {
		unix.Close(w.listener)
		return nil, err
	}
	program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err == nil {
		err = w.locate(program)
	}
	if err != nil {
		w.memory.Close()
		unix.Close(w.listener)
		return nil, err
	}
	w.over.Go(w.answer)
	_, err = control.Write([]byte{1})
	return w, err
}

// answer answers until the process has ended.
func (w *watcher) answer() {
	defer w.memory.Close()
	defer unix.Close(w.listener)
	var delayed sync.WaitGroup
	defer delayed.Wait()
	for {
		fds := []unix.PollFd{{Fd: int32(w.listener), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, -1); err != nil {
			continue // EINTR
		}
		if fds[0].Revents&unix.POLLIN == 0 {
			return // no process has the filter any more
		}
		var q question
		if w.ioctl(unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&q)) != nil {
			continue // the calling process was killed
		}
		f := w.due(w.name(&q))
		switch {
		case f == nil:
			w.reply(q.id, 0)
		case f.delay > 0:
			delayed.Go(func() { time.Sleep(f.delay); w.reply(q.id, 0) })
		default:
			w.reply(q.id, f.errno)
		}
	}
}

func (w *watcher) ioctl(request uint, p unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(w.listener), uintptr(request), uintptr(p)); errno != 0 {
		return errno
	}
	return nil
}

// reply permits a call, or fails the call. A killed process needs no reply.
func (w *watcher) reply(id uint64, errno unix.Errno) {
	r := reply{id: id, err: -int32(errno)}
	if errno == 0 {
		r.flags = unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE
	}
	_ = w.ioctl(unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&r))
}

// due counts a call, and returns the fault of the call.
func (w *watcher) due(name string) *callFault {
	if name == "" {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls[name]++
	for _, f := range w.faults {
		if !strings.HasPrefix(name, f.call) {
			continue
		}
		if f.seen++; f.seen > f.after && (f.times == 0 || f.struck < f.times) {
			f.struck++
			return f
		}
	}
	return nil
}

// arm replaces the faults of the process.
func (w *watcher) arm(faults ...*callFault) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults = faults
}

// seen are the calls since the last time.
func (w *watcher) seen() map[string]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	calls := w.calls
	w.calls = map[string]int{}
	return calls
}

// hasStruck reports whether every fault has struck.
func (w *watcher) hasStruck() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.faults {
		if f.struck == 0 {
			return false
		}
	}
	return true
}

var plainCalls = map[int32]string{
	unix.SYS_EVENTFD2: "eventfd2", unix.SYS_PIPE2: "pipe2", unix.SYS_EPOLL_CREATE1: "epoll_create1",
	unix.SYS_EPOLL_CTL: "epoll_ctl",
	unix.SYS_SENDMSG:   "sendmsg", unix.SYS_RECVMSG: "recvmsg", unix.SYS_SOCKETPAIR: "socketpair",
	unix.SYS_SOCKET:  "socket",
	unix.SYS_CONNECT: "connect", unix.SYS_ACCEPT4: "accept4", unix.SYS_SETSOCKOPT: "setsockopt",
	unix.SYS_SHUTDOWN:   "shutdown",
	unix.SYS_PIDFD_OPEN: "pidfd_open", unix.SYS_PRCTL: "prctl", unix.SYS_CLONE: "clone", unix.SYS_CLONE3: "clone",
	unix.SYS_GETSOCKOPT: "SO_PEERPIDFD", unix.SYS_WRITE: "write",
}

var callsOfFiles = map[int32]string{
	unix.SYS_FTRUNCATE: "ftruncate", unix.SYS_FALLOCATE: "fallocate", unix.SYS_STATX: "statx", unix.SYS_FSTAT: "fstat",
	unix.SYS_FSTATFS: "fstatfs",
}

var commands = map[uint64]string{unix.F_DUPFD_CLOEXEC: "F_DUPFD_CLOEXEC", unix.F_ADD_SEALS: "F_ADD_SEALS",
	unix.F_GET_SEALS: "F_GET_SEALS"}

// name returns the name of a call, with the memory; empty for calls of the runtime and of libraries:
// the simulator has CUDA's faults.
func (w *watcher) name(q *question) string {
	switch q.call {
	case unix.SYS_CLONE, unix.SYS_CLONE3, unix.SYS_OPENAT: // cgo's threads, and the loader
	default:
		if q.at < w.from || q.at >= w.to {
			return ""
		}
	}
	a, about := q.arguments, ""
	if q.call == unix.SYS_SENDMSG && w.number(a[1]+40) > 0 { // msg_controllen of struct msghdr
		return "sendmsg of descriptors"
	}
	if name := plainCalls[q.call]; name != "" {
		return name
	}
	name := callsOfFiles[q.call]
	switch q.call {
	case unix.SYS_MEMFD_CREATE:
		name, about = "memfd_create", w.text(a[0])
	case unix.SYS_OPENAT:
		name, about = "openat", filepath.Base(w.text(a[1]))
		if about != "boot_id" && !strings.HasSuffix(about, ".so") {
			return ""
		}
		return name + " " + about
	case unix.SYS_MMAP:
		name, about = "mmap", w.file(a[4])
	case unix.SYS_MUNMAP:
		name, about = "munmap", w.mapped(a[0])
	case unix.SYS_FCNTL:
		name, about = commands[a[1]], w.file(a[0])
		if name == "" {
			return ""
		}
	default:
		about = w.file(a[0])
	}
	switch {
	case strings.Contains(about, "peerlane-"):
		_, about, _ = strings.Cut(about, "peerlane-")
		return name + " " + strings.TrimSuffix(about, " (deleted)")
	case name == "mmap", name == "munmap", name == "fstat":
		return ""
	}
	return name
}

// number reads a number in the process's memory.
func (w *watcher) number(at uint64) uint64 {
	var buffer [8]byte
	_, _ = w.memory.ReadAt(buffer[:], int64(at))
	return binary.LittleEndian.Uint64(buffer[:])
}

// text is a string in the process's memory.
func (w *watcher) text(at uint64) string {
	buffer := make([]byte, 256)
	n, _ := w.memory.ReadAt(buffer, int64(at))
	text, _, _ := bytes.Cut(buffer[:n], []byte{0})
	return string(text)
}

// file describes a descriptor of the process.
func (w *watcher) file(fd uint64) string {
	to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", w.pid, int32(fd)))
	return to
}

// mapped returns the mapping at an address.
func (w *watcher) mapped(at uint64) string {
	maps, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", w.pid))
	_, line, _ := bytes.Cut(maps, fmt.Appendf(nil, "\n%x-", at))
	line, _, _ = bytes.Cut(line, []byte{'\n'})
	return string(line)
}

// locate finds where the program is.
func (w *watcher) locate(program string) error {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", w.pid))
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(maps)) {
		if fields := strings.Fields(line); len(fields) == 6 && fields[5] == program && strings.Contains(fields[1], "x") {
			_, err = fmt.Sscanf(fields[0], "%x-%x", &w.from, &w.to)
			return err
		}
	}
	return fmt.Errorf("process %d has no %s", w.pid, program)
}
