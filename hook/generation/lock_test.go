package generation

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// After a timeout, a caller does not get the lock later.
func TestLockAfterTimeoutIsReleased(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	open := func() *os.File {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	holder, waiter, other := open(), open(), open()
	if err := Lock(holder, unix.LOCK_EX, 0); err != nil {
		t.Fatal(err)
	}
	for _, wait := range []time.Duration{0, 20 * time.Millisecond} {
		if err := Lock(waiter, unix.LOCK_EX, wait); !errors.Is(err, ErrLocked) {
			t.Errorf("waiting for %v: %v", wait, err)
		}
	}
	waiter.Close()
	done := make(chan error, 1)
	go func() { done <- Lock(other, unix.LOCK_EX, time.Minute) }()
	holder.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
