package control

import (
	"fmt"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/internal/admin"
)

// Stop ends a generation's relay, with SIGKILL after process.EndTimeout, and prevents a new relay
// until Resume. Stop does not wait for the end.
func Stop(l paths.Layout, id string) error { return command(l, id, admin.Stop) }

// Drain makes a generation's relay release the GPUs: the relay starts no new work, and ends after
// the last copy. No relay starts until Resume. Drain does not wait for the end.
func Drain(l paths.Layout, id string) error { return command(l, id, admin.Drain) }

// Resume starts a relay again after Stop, Drain or too many failures.
func Resume(l paths.Layout, id string) error { return command(l, id, admin.Resume) }

func command(l paths.Layout, id, what string) error {
	if _, err := admin.Ask(l, id, what); err != nil {
		return fmt.Errorf("generation %s: %w", id, err)
	}
	return nil
}
