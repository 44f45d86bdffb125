package hook

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/layout"
)

// lockTime is how long a lock is waited for. Locks are held for milliseconds,
// and for no longer than startTimeout while a supervisor is started; who holds
// one for longer is stopped or cannot make progress.
const lockTime = 45 * time.Second

var errLocked = errors.New("held by another process")

// lock takes an flock on an open file or directory: unix.LOCK_EX or LOCK_SH.
func lock(f *os.File, how int, wait time.Duration) error {
	deadline := time.Now().Add(wait)
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case err == unix.EINTR:
			continue
		case err != unix.EWOULDBLOCK:
			return fmt.Errorf("locking %s: %w", f.Name(), err)
		case time.Now().After(deadline):
			return fmt.Errorf("locking %s: %w for %v", f.Name(), errLocked, wait)
		}
		time.Sleep(pause)
	}
}

// lockHost takes the lock under which generations are found and made. Closing
// the file lets it go.
func lockHost(l layout.Layout) (*os.File, error) {
	// The directory itself, so that nothing is left for the lock's sake.
	f, err := os.Open(l.Generations())
	if err != nil {
		return nil, err
	}
	if err := lock(f, unix.LOCK_EX, lockTime); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// lockGeneration takes the lock of a generation. The error is fs.ErrNotExist
// where it is gone, also where it went while the lock was waited for. Closing
// the file lets the lock go.
func lockGeneration(l layout.Layout, id string, wait time.Duration) (*os.File, error) {
	dir := l.GenerationDir(id)
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := lock(f, unix.LOCK_EX, wait); err != nil {
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

// supervisorLock is the file that a supervisor keeps locked while it lives.
func supervisorLock(l layout.Layout, id string) string {
	return filepath.Join(l.GenerationDir(id), "supervisor")
}

// supervised reports whether a generation's supervisor lives.
func supervised(l layout.Layout, id string) (bool, error) {
	f, err := os.Open(supervisorLock(l, id))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	// A shared lock: two that look at once do not take each other for the
	// supervisor.
	err = lock(f, unix.LOCK_SH, 0)
	if errors.Is(err, errLocked) {
		return true, nil
	}
	return false, err
}
