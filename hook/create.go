package hook

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/peerlane/peerlane/hook/layout"
)

// State is what a runtime tells a hook on standard input: the state of the OCI
// runtime specification, as far as it matters here.
type State struct {
	ID     string `json:"id"`
	Status string `json:"status"`
	PID    int    `json:"pid"`
	Bundle string `json:"bundle"`
	// Annotations are those of config.json. An image may have put them there.
	Annotations map[string]string `json:"annotations"`
}

// ReadState reads a State.
func ReadState(r io.Reader) (State, error) {
	var s State
	text, err := io.ReadAll(io.LimitReader(r, 16<<20)) // annotations can be long
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		return State{}, fmt.Errorf("reading the container's state from standard input: %w; a runtime runs this program as a hook", err)
	}
	return s, nil
}

// check refuses a state in which the pid is not that of an init in this
// process's namespace, or init runs the container's program already. In a
// createContainer hook the pid is 1 (runc) or 0 (crun), and process 1 is the
// host's.
func (s State) check() error {
	if s.PID > 1 && s.Status == "stopped" {
		return fmt.Errorf("container %q is being restored from a checkpoint, and its relay ended with the process that was checkpointed: a lane cannot be restored; start the container anew", s.ID)
	}
	if s.PID <= 1 || s.Status != "creating" && s.Status != "created" {
		return fmt.Errorf("container %q: status %q and pid %d are not those of a createRuntime or prestart hook, the only places for peerlane-hook create", s.ID, s.Status, s.PID)
	}
	if s.Bundle == "" {
		return fmt.Errorf("container %q: the state names no bundle", s.ID)
	}
	return nil
}

// Create is the hook at createRuntime, or prestart: it gives a container the
// relay for these lanes (as Lanes names them) and mounts its socket. What the
// generations of ended containers have left is removed on the way; a failure of
// that stops no container, and is the warning.
func Create(l layout.Layout, s State, runtimeRoot string, names []string) (warning, err error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	_, warning = Collect(l)
	plan, err := readPlan(l)
	if err != nil {
		return warning, err
	}
	config, err := ReadConfig(l)
	if err != nil {
		return warning, err
	}
	lanes, err := Lanes(plan, names)
	if err != nil {
		return warning, fmt.Errorf("container %q: %w", s.ID, err)
	}
	if err := present(plan, lanes); err != nil {
		return warning, err
	}
	c := Container{ID: s.ID, RuntimeRoot: runtimeRoot, Bundle: s.Bundle, PID: s.PID}
	// Looked at first, so that no relay is started for what is no container.
	if err := isolated(c); err != nil {
		return warning, err
	}
	g, err := Launch(l, Request{Container: c, Lanes: lanes, Config: config})
	if err != nil {
		return warning, err
	}
	// If this fails the runtime ends init, and with it goes the generation.
	return warning, Attach(l, g)
}
