package hook_test

import (
	"os"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/sandbox"
)

// claimUID makes an empty generation and claims a uid for it.
func claimUID(l paths.Layout, c config.Relay) (int, error) {
	s, err := generation.NewSandbox(c)
	if err != nil {
		return 0, err
	}
	g := &generation.Generation{ID: generation.NewID(), Sandbox: s}
	host, err := generation.LockHost(l)
	if err != nil {
		return 0, err
	}
	defer host.Close()
	if err := os.Mkdir(l.GenerationDir(g.ID), 0o700); err != nil {
		return 0, err
	}
	if err := generation.MakeSupervisorLock(l, g.ID); err != nil {
		return 0, err
	}
	err = g.ClaimUID(l, c)
	return g.Sandbox.UID, err
}

// readable returns the paths that the environment of a relay adds to the read list of the
// sandbox.
func readable(environment ...string) []string {
	var s sandbox.Spec
	generation.Sandbox{}.AddFiles(&s, environment)
	return s.Read
}

// makeSupervisorLock makes the directory of a generation with the lock file that the mark of a
// uid links to.
func makeSupervisorLock(l paths.Layout, id string) error {
	if err := os.Mkdir(l.GenerationDir(id), 0o700); err != nil {
		return err
	}
	return generation.MakeSupervisorLock(l, id)
}
