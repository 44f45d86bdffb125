package cdi

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/peerlane/peerlane/config/paths"
)

func TestHoldKeepsOthersWaiting(t *testing.T) {
	l := paths.New(t.TempDir())
	held, err := Hold(l)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := hold(l, 0); !errors.Is(err, errHeld) {
		t.Errorf("held twice: %v", err)
	}
	waited := make(chan error, 1)
	go func() {
		second, err := Hold(l)
		if err == nil {
			err = second.Close()
		}
		waited <- err
	}()
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-waited:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(holdTimeout):
		t.Fatal("the waiting command does not get the released lock")
	}
	// Any user can lock a directory that the user can open.
	info, err := os.Stat(l.State())
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o700 {
		t.Errorf("mode of the state directory: %v", info.Mode())
	}
	// The parent directory may hold files that every user reads.
	if info, err = os.Stat(filepath.Dir(l.State())); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("mode of the parent directory: %v, %v", info.Mode(), err)
	}
}
