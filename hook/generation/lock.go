package generation

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
)

// LockTimeout limits the wait for a lock. Locks are held for milliseconds, and for at most twice
// StartTimeout of package handover: while the hook waits for systemd, and during the start of a
// supervisor. A process that holds a lock longer is stopped or makes no progress.
const LockTimeout = 75 * time.Second

// ErrLocked is the error of a lock that another process held for the whole wait.
var ErrLocked = errors.New("held by another process")

// Lock takes an flock (unix.LOCK_EX or LOCK_SH) on an open file or directory.
//
// The kernel serves waiting processes in order. Polling has no order: on an overloaded host with
// many containers, a process could poll in vain for ever.
func Lock(f *os.File, how int, wait time.Duration) error {
	return LockUnless(context.Background(), f, how, wait)
}

// LockUnless is Lock with a context. When the context is done, the error is its cause.
func LockUnless(ctx context.Context, f *os.File, how int, wait time.Duration) error {
	fd := int(f.Fd())
	err := flock(fd, how|unix.LOCK_NB)
	if err == unix.EWOULDBLOCK {
		if wait == 0 {
			return fmt.Errorf("lock %s: %w", f.Name(), ErrLocked)
		}
		// After the timeout the thread still waits for the lock, and releases the lock when the
		// wait succeeds. The thread uses a separate descriptor, because the number of f may be
		// reused for another file.
		again, failed := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if failed != nil {
			return fmt.Errorf("lock %s: %w", f.Name(), os.NewSyscallError("dup", failed))
		}
		done := make(chan error, 1)
		go func() {
			defer unix.Close(again)
			done <- flock(again, how)
		}()
		select {
		case err = <-done:
		case <-ctx.Done():
			return fmt.Errorf("lock %s: %w", f.Name(), context.Cause(ctx))
		case <-time.After(wait):
			return fmt.Errorf("lock %s: %w for %v", f.Name(), ErrLocked, wait)
		}
	}
	if err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return nil
}

func flock(fd, how int) error {
	for {
		if err := unix.Flock(fd, how); err != unix.EINTR {
			return err
		}
	}
}

// LockHost takes the lock for finding and making generations. Closing the file releases the lock.
func LockHost(l paths.Layout) (*os.File, error) { return LockDirectory(l.Generations(), LockTimeout) }

// LockDirectory takes an exclusive lock on a directory itself, so that no lock file remains. Closing
// the file releases the lock.
func LockDirectory(dir string, wait time.Duration) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := Lock(f, unix.LOCK_EX, wait); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// LockGeneration takes the lock of a generation. The error is fs.ErrNotExist if the generation is
// removed before LockGeneration gets the lock. Closing the file releases the lock.
func LockGeneration(l paths.Layout, id string, wait time.Duration) (*os.File, error) {
	dir := l.GenerationDir(id)
	f, err := LockDirectory(dir, wait)
	if err != nil {
		return nil, err
	}
	// A process can lock a removed directory that it opened before the removal.
	opened, err := f.Stat()
	if err == nil {
		var current os.FileInfo
		if current, err = os.Stat(dir); err == nil && !os.SameFile(opened, current) {
			err = &os.PathError{Op: "lock", Path: dir, Err: os.ErrNotExist}
		}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// SupervisorLock returns the path of the file that a supervisor keeps locked while running.
func SupervisorLock(l paths.Layout, id string) string {
	return filepath.Join(l.GenerationDir(id), "supervisor")
}

// MakeSupervisorLock makes the file of SupervisorLock, mode 0600.
func MakeSupervisorLock(l paths.Layout, id string) error {
	path := SupervisorLock(l, id)
	if err := unix.Mknod(path, unix.S_IFREG|0o600, 0); err != nil {
		return &os.PathError{Op: "mknod", Path: path, Err: err}
	}
	return nil
}

// Supervised reports whether the supervisor of a generation runs.
func Supervised(l paths.Layout, id string) (bool, error) {
	f, err := os.Open(SupervisorLock(l, id))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	// A shared lock, so that two callers do not mistake each other for the supervisor.
	err = Lock(f, unix.LOCK_SH, 0)
	if errors.Is(err, ErrLocked) {
		return true, nil
	}
	return false, err
}
