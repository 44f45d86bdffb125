package generation

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
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

func TestLockGenerationGoneFails(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // the collector closes files too
	l := layout(t)
	if f, err := LockGeneration(l, firstID, 0); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("%v, %v", f, err)
	}
	made(t, l, firstID, time.Now())
	held, err := LockGeneration(l, firstID, 0)
	if err != nil {
		t.Fatal(err)
	}
	if f, err := LockGeneration(l, firstID, 0); !errors.Is(err, ErrLocked) || testutil.Descriptors(t,
		l.GenerationDir(firstID)) != 1 {
		t.Fatalf("%v, %v, and %d descriptors", f, err, testutil.Descriptors(t, l.GenerationDir(firstID)))
	}
	// Another directory takes the name during the wait.
	done := make(chan error, 1)
	go func() {
		_, err := LockGeneration(l, firstID, time.Minute)
		done <- err
	}()
	// The goroutine has opened the directory, and duplicates the descriptor for its wait.
	for end := testutil.BeginFor(10 * time.Second); testutil.Descriptors(t, l.GenerationDir(firstID)) < 3; {
		if end.Over() {
			t.Fatal("LockGeneration does not wait for the lock")
		}
		time.Sleep(time.Millisecond)
	}
	if err := os.Rename(l.GenerationDir(firstID), filepath.Join(l.Generations(), "gone")); err != nil {
		t.Fatal(err)
	}
	made(t, l, firstID, time.Now())
	held.Close()
	if err := <-done; !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the lock of a generation that went: %v", err)
	}
	testutil.Until(t, "LockGeneration closes the directory", func() bool {
		return testutil.Descriptors(t, filepath.Join(l.Generations(), "gone")) == 0
	})
}

func TestSupervisedFollowsLockOfSupervisor(t *testing.T) {
	t.Parallel()
	l := layout(t)
	made(t, l, firstID, time.Now())
	check := func(name string, want bool) {
		t.Helper()
		if got, err := Supervised(l, firstID); got != want || err != nil {
			t.Errorf("%s: %t, %v", name, got, err)
		}
	}
	check("no lock", false)
	if err := MakeSupervisorLock(l, firstID); err != nil {
		t.Fatal(err)
	}
	if err := MakeSupervisorLock(l, firstID); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a second supervisor's lock: %v", err)
	}
	check("a free lock", false)
	f, err := os.Open(SupervisorLock(l, firstID))
	if err != nil {
		t.Fatal(err)
	}
	if err := Lock(f, unix.LOCK_SH, 0); err != nil {
		t.Fatal(err)
	}
	check("a lock of another caller", false)
	if err := Lock(f, unix.LOCK_EX, 0); err != nil {
		t.Fatal(err)
	}
	check("a lock of a supervisor", true)
	if used, err := markInUse(SupervisorLock(l, firstID)); !used || err != nil {
		t.Errorf("the mark of a supervisor is in use: %t, %v", used, err)
	}
	f.Close()
	check("a released lock", false)
}
