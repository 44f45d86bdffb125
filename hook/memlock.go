package hook

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/internal/ocispec"
	"github.com/peerlane/peerlane/internal/fault"
)

// raiseMemlock lifts the limit of locked memory of a container's init; registering memory with a
// NIC counts against that limit. Child processes inherit the limit, and a process of `exec` has
// the limit of its engine. raiseMemlock keeps a limit in the container's configuration. init waits
// for this hook, so its process id is unambiguous.
func raiseMemlock(pid int, s *ocispec.Spec) error {
	for _, limit := range s.Process.Rlimits {
		if limit.Type == "RLIMIT_MEMLOCK" {
			return nil
		}
	}
	err := unix.Prlimit(pid, unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}, nil)
	if err == nil {
		return nil
	}
	// This process may not exceed the hard limit: raise the soft limit to the hard limit.
	var limit unix.Rlimit
	cause := &memlockError{err: err}
	if unix.Prlimit(pid, unix.RLIMIT_MEMLOCK, nil, &limit) == nil {
		limit.Cur = limit.Max
		if unix.Prlimit(pid, unix.RLIMIT_MEMLOCK, &limit, nil) == nil {
			cause.limit, cause.known = limit.Max, true
		}
	}
	return &fault.Error{
		Code:      fault.LockedMemory,
		Operation: "lift the limit of locked memory, against which registering memory with a NIC counts",
		Cause:     cause,
		Remedy:    "start the container with --ulimit memlock=-1, or give the engine's unit LimitMEMLOCK=infinity",
	}
}

// memlockError is the cause of an unchanged limit of locked memory.
type memlockError struct {
	// err is the error of prlimit.
	err error
	// limit is the limit from now on, in bytes, if known.
	limit uint64
	known bool
}

func (e *memlockError) Error() string {
	limit := "an unknown limit"
	if e.known {
		limit = fmt.Sprintf("%d KiB", e.limit>>10)
	}
	return fmt.Sprintf("prlimit: %v; it is %s", e.err, limit)
}

func (e *memlockError) Unwrap() error { return e.err }
