package cdi

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
)

// holdTimeout is how long another command is waited for. One takes a tenth of a
// second, and a few where NVIDIA's driver wakes up first; udev ends what it runs
// after three minutes.
const holdTimeout = 60 * time.Second

// Hold keeps all others that change a layout's plan and specifications waiting
// until it is closed. It is taken before the host is read: of two that see a
// host change, the one that read it last writes last.
func Hold(l paths.Layout) (io.Closer, error) { return hold(l, holdTimeout) }

func hold(l paths.Layout, wait time.Duration) (io.Closer, error) {
	// The directory itself, so that nothing is left for the lock's sake; that of
	// the state, because what others can open they can lock.
	if err := l.CreateState(); err != nil {
		return nil, fmt.Errorf("making the directory of the plan: %w", err)
	}
	f, err := os.Open(l.State())
	if err != nil {
		return nil, fmt.Errorf("opening the directory of the plan: %w", err)
	}
	deadline := time.Now().Add(wait)
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return f, nil
		case err != unix.EWOULDBLOCK && err != unix.EINTR:
			return nil, errors.Join(fmt.Errorf("locking %s: %w", f.Name(), err), f.Close())
		case time.Now().After(deadline):
			return nil, errors.Join(fmt.Errorf("another peerlane cdi command has been at work on %s for %v; see what it waits for, or end it", f.Name(), wait), f.Close())
		}
		time.Sleep(pause)
	}
}
