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

// LockTimeout is how long a lock is waited for. Locks are held for milliseconds,
// and for no longer than startTimeout while systemd is waited for and again while
// a supervisor is started; who holds one for longer is stopped or cannot make
// progress.
const LockTimeout = 75 * time.Second

var ErrLocked = errors.New("held by another process")

// Lock takes an flock on an open file or directory: unix.LOCK_EX or LOCK_SH.
//
// The kernel lets who waits have it in turn. Asking again and again would be
// without order, and on a starved host with many containers somebody would ask
// in vain for ever.
func Lock(f *os.File, how int, wait time.Duration) error {
	return LockUnless(context.Background(), f, how, wait)
}

// LockUnless is lock, as long as the context is not done: then its cause is the error.
func LockUnless(ctx context.Context, f *os.File, how int, wait time.Duration) error {
	fd := int(f.Fd())
	err := flock(fd, how|unix.LOCK_NB)
	if err == unix.EWOULDBLOCK {
		if wait == 0 {
			return fmt.Errorf("locking %s: %w", f.Name(), ErrLocked)
		}
		// The thread of who has waited long enough stays behind, so it has a
		// descriptor of its own: f's number may be another file's by then. What it
		// gets in the end it gives back.
		again, failed := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if failed != nil {
			return fmt.Errorf("locking %s: %w", f.Name(), os.NewSyscallError("dup", failed))
		}
		done := make(chan error, 1)
		go func() {
			defer unix.Close(again)
			done <- flock(again, how)
		}()
		select {
		case err = <-done:
		case <-ctx.Done():
			return fmt.Errorf("locking %s: %w", f.Name(), context.Cause(ctx))
		case <-time.After(wait):
			return fmt.Errorf("locking %s: %w for %v", f.Name(), ErrLocked, wait)
		}
	}
	if err != nil {
		return fmt.Errorf("locking %s: %w", f.Name(), err)
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

// LockHost takes the lock under which generations are found and made. Closing
// the file lets it go.
func LockHost(l paths.Layout) (*os.File, error) {
	// The directory itself, so that nothing is left for the lock's sake.
	f, err := os.Open(l.Generations())
	if err != nil {
		return nil, err
	}
	if err := Lock(f, unix.LOCK_EX, LockTimeout); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// LockGeneration takes the lock of a generation. The error is fs.ErrNotExist
// where it is gone, also where it went while the lock was waited for. Closing
// the file lets the lock go.
func LockGeneration(l paths.Layout, id string, wait time.Duration) (*os.File, error) {
	dir := l.GenerationDir(id)
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := Lock(f, unix.LOCK_EX, wait); err != nil {
		f.Close()
		return nil, err
	}
	// A removed directory can still be locked by who had opened it before.
	was, err := f.Stat()
	if err == nil {
		var is os.FileInfo
		if is, err = os.Stat(dir); err == nil && !os.SameFile(was, is) {
			err = &os.PathError{Op: "lock", Path: dir, Err: os.ErrNotExist}
		}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// SupervisorLock is the file that a supervisor keeps locked while it lives.
func SupervisorLock(l paths.Layout, id string) string {
	return filepath.Join(l.GenerationDir(id), "supervisor")
}

func MakeSupervisorLock(l paths.Layout, id string) error {
	path := SupervisorLock(l, id)
	if err := unix.Mknod(path, unix.S_IFREG|0o600, 0); err != nil {
		return &os.PathError{Op: "mknod", Path: path, Err: err}
	}
	return nil
}

// Supervised reports whether a generation's supervisor lives.
func Supervised(l paths.Layout, id string) (bool, error) {
	f, err := os.Open(SupervisorLock(l, id))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	// A shared lock: two that look at once do not take each other for the
	// supervisor.
	err = Lock(f, unix.LOCK_SH, 0)
	if errors.Is(err, ErrLocked) {
		return true, nil
	}
	return false, err
}
