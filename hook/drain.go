package hook

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/peerlane/peerlane/config/paths"
)

// Drained is the mark that all relays of a host are to let go of the GPUs. A
// supervisor that finds it starts no relay: containers start, and their clients
// are refused until ResumeAll. It ends with the boot that it was made in.
type Drained struct {
	Since time.Time `json:"since"`
	Boot  string    `json:"boot"`
}

func drainedFile(l paths.Layout) string { return filepath.Join(l.State(), "drained.json") }

// AllDrained is the mark, or nil where there is none.
func AllDrained(l paths.Layout) (*Drained, error) {
	var d Drained
	err := readJSON(drainedFile(l), &d)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	boot, err := bootID()
	if err != nil || d.Boot != boot {
		return nil, err
	}
	return &d, nil
}

// DrainAll sets the mark. The generations that are there already are to be
// drained one by one, after it.
func DrainAll(l paths.Layout) error {
	if err := l.Create(); err != nil {
		return err
	}
	if d, err := AllDrained(l); err == nil && d != nil {
		return nil
	}
	boot, err := bootID()
	if err != nil {
		return err
	}
	return writeJSON(drainedFile(l), Drained{time.Now().UTC(), boot})
}

// ResumeAll takes the mark away; the generations are to be resumed one by one,
// after it.
func ResumeAll(l paths.Layout) error {
	err := os.Remove(drainedFile(l))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Stop ends a generation's relay, which is killed if that takes longer than
// endTimeout, and has none started until Resume. It does not wait for the end.
func Stop(l paths.Layout, id string) error { return command(l, id, commandStop) }

// Drain has a generation's relay let go of its GPUs: no new work starts, and it
// ends when the last copy has; none is started until Resume. It does not wait
// for the end.
func Drain(l paths.Layout, id string) error { return command(l, id, commandDrain) }

// Resume has a relay started again after Stop, Drain, or too many failures.
func Resume(l paths.Layout, id string) error { return command(l, id, commandResume) }

func command(l paths.Layout, id, what string) error {
	if _, err := ask(l, id, what); err != nil {
		return fmt.Errorf("generation %s: %w", id, err)
	}
	return nil
}
