package hook

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A supervisor and its relay are children of the container runtime, and inherit the attributes of
// an engine or of an administrator's shell. With a limit of file sizes, a relay could not make a
// ring; with the out-of-memory score of an engine, the kernel would never kill it. docs/relay.md
// lists the attributes that the hook resets, and the others.

// stackLimit is the default of the kernel (_STK_LIM). An unlimited stack changes the memory layout
// of a process.
const stackLimit = 8 << 20

// unlimitedResources are unlimited for a supervisor and its relay. The sandbox limits
// descriptors, tasks, locked memory and core dumps.
var unlimitedResources = map[string]int{
	"file size": unix.RLIMIT_FSIZE, "address space": unix.RLIMIT_AS, "data": unix.RLIMIT_DATA,
	"resident set": unix.RLIMIT_RSS,
	"CPU time":     unix.RLIMIT_CPU, "file locks": unix.RLIMIT_LOCKS, "real-time CPU": unix.RLIMIT_RTTIME,
}

// resetInherited resets the attributes that a program started by the calling thread would inherit.
// Attributes of the process are the resource limits, the out-of-memory score and the setting of
// transparent huge pages; attributes of the thread are nice value, scheduling policy, CPU affinity,
// I/O priority, memory policy and personality. The error names the attributes that this process may not reset.
func resetInherited() error {
	var errs []error
	failed := func(what string, err error) {
		if err != nil && err != unix.ENOSYS { // a kernel without the call has no such attribute
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	failed(
		"scheduling policy and nice value",
		unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}, 0),
	)
	failed("CPU affinity", allProcessors())
	const ioprioWhoProcess, ioprioNone = 1, 0 // linux/ioprio.h
	failed("I/O priority", rawCall(unix.SYS_IOPRIO_SET, ioprioWhoProcess, 0, ioprioNone))
	const mpolDefault = 0 // linux/mempolicy.h
	failed("memory policy", rawCall(unix.SYS_SET_MEMPOLICY, mpolDefault, 0, 0))
	const perLinux = 0 // linux/personality.h
	failed("personality", rawCall(unix.SYS_PERSONALITY, perLinux, 0, 0))
	failed("transparent huge pages", unix.Prctl(unix.PR_SET_THP_DISABLE, 0, 0, 0, 0))
	failed("out-of-memory score", os.WriteFile("/proc/self/oom_score_adj", []byte("0"), 0))
	for what, resource := range unlimitedResources {
		failed("limit of "+what, raise(resource, unix.RLIM_INFINITY))
	}
	failed("limit of stack", raise(unix.RLIMIT_STACK, stackLimit))
	for what, resource := range map[string]int{"nice value": unix.RLIMIT_NICE, "real-time priority": unix.RLIMIT_RTPRIO} {
		failed("limit of "+what, unix.Prlimit(0, resource, &unix.Rlimit{}, nil))
	}
	return errors.Join(errs...)
}

// raise sets the soft limit of a resource to a value, and the hard limit to infinity. Without
// permission, it raises the soft limit to the hard limit.
func raise(resource int, value uint64) error {
	var limit unix.Rlimit
	if err := unix.Prlimit(0, resource, nil, &limit); err != nil {
		return os.NewSyscallError("prlimit", err)
	}
	want := unix.Rlimit{Cur: value, Max: unix.RLIM_INFINITY}
	if limit == want {
		return nil
	}
	err := unix.Prlimit(0, resource, &want, nil)
	if err == unix.EPERM {
		want = unix.Rlimit{Cur: min(value, limit.Max), Max: limit.Max}
		if raised := unix.Prlimit(0, resource, &want, nil); raised != nil || want.Cur == value {
			err = raised
		}
	}
	return os.NewSyscallError("prlimit", err)
}

// allProcessors lets the calling thread run on all processors of its cpuset.
func allProcessors() error {
	var set [1024]byte // 8,192 processors, the maximum of Linux
	for i := range set {
		set[i] = 0xff
	}
	return rawCall(unix.SYS_SCHED_SETAFFINITY, 0, unsafe.Sizeof(set), uintptr(unsafe.Pointer(&set)))
}

// rawCall makes a system call that does not block.
func rawCall(number, a, b, c uintptr) error {
	if _, _, errno := unix.RawSyscall(number, a, b, c); errno != 0 {
		return errno
	}
	return nil
}
