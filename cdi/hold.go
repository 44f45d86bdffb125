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

// holdTimeout limits the wait for another command. A command takes a tenth of a second, and a few
// seconds when NVIDIA's driver wakes up first; udev ends a program after three minutes.
const holdTimeout = 60 * time.Second

// Hold locks the plan and the specifications of a layout against other commands until the caller
// closes the lock. Take the lock before reading the host: if the host changes between two commands,
// the command that read the host last must write last.
func Hold(l paths.Layout) (io.Closer, error) { return hold(l, holdTimeout) }

// errHeld is the error of a lock that another command holds.
var errHeld = errors.New("another peerlane cdi command is running; wait for it, or end it")

func hold(l paths.Layout, wait time.Duration) (io.Closer, error) {
	// Lock the directory itself, so that no lock file remains. Lock the state directory, because
	// any user can lock a directory that the user can open.
	if err := l.CreateState(); err != nil {
		return nil, fmt.Errorf("create the directory of the plan: %w", err)
	}
	f, err := os.Open(l.State())
	if err != nil {
		return nil, fmt.Errorf("open the directory of the plan: %w", err)
	}
	deadline := time.Now().Add(wait)
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return f, nil
		case err != unix.EWOULDBLOCK && err != unix.EINTR:
			return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
		case time.Now().After(deadline):
			return nil, errors.Join(
				fmt.Errorf("lock %s within %v: %w", f.Name(), wait, errHeld),
				f.Close(),
			)
		}
		time.Sleep(pause)
	}
}
