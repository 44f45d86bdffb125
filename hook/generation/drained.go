package generation

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/process"
)

// Drained is the mark that the relays of a host release the GPUs. A supervisor that finds the mark
// starts no relay: containers start, and their clients are refused until ResumeAll. The mark is
// valid for one boot.
type Drained struct {
	Since time.Time `json:"since"`
	Boot  string    `json:"boot"`
}

func drainedFile(l paths.Layout) string { return filepath.Join(l.State(), "drained.json") }

// AllDrained returns the mark, or nil without a mark.
func AllDrained(l paths.Layout) (*Drained, error) {
	var d Drained
	err := ReadJSON(drainedFile(l), &d)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	boot, err := process.BootID()
	if err != nil || d.Boot != boot {
		return nil, err
	}
	return &d, nil
}

// DrainAll sets the mark. The caller then drains the existing generations.
func DrainAll(l paths.Layout) error {
	if err := l.Create(); err != nil {
		return err
	}
	if d, _ := AllDrained(l); d != nil { // otherwise the new mark replaces an unreadable one
		return nil
	}
	boot, err := process.BootID()
	if err != nil {
		return err
	}
	return WriteJSON(drainedFile(l), Drained{time.Now().UTC(), boot})
}

// ResumeAll removes the mark. The caller then resumes the generations.
func ResumeAll(l paths.Layout) error {
	err := os.Remove(drainedFile(l))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
