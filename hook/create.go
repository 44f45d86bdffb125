package hook

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/peerlane/peerlane/hook/layout"
)

// State is what a runtime tells a hook on standard input: the state of the OCI
// runtime specification, as far as it matters here.
type State struct {
	ID     string `json:"id"`
	Status string `json:"status"`
	PID    int    `json:"pid"`
	Bundle string `json:"bundle"`
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

// Devices are what one CDI device asks for by the arguments of its hook.
type Devices struct {
	// Lanes are GPUs whose lanes the container gets, "UUID@PCI address" each: a
	// device peerlane.dev/lane=.
	Lanes []string
	// GPUs are GPUs whose lanes the container gets, named likewise, and whose
	// device nodes the engine gives it: a device peerlane.dev/gpu=.
	GPUs []string
	// NICs are RDMA devices, by name, whose device nodes the engine gives the
	// container: a device peerlane.dev/nic=.
	NICs []string
}

// Create is the hook at createRuntime, or prestart: it gives a container the
// relay for its lanes and mounts its socket, and lets one that has a NIC lock the
// memory that it registers. What stops no container is the warning: a limit that
// could not be raised, and what could not be removed of ended containers'.
func Create(l layout.Layout, s State, runtimeRoot string, d Devices) (warning, err error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	if _, left := Collect(l); left != nil {
		warning = fmt.Errorf("removing what ended containers have left: %w", left)
	}
	plan, err := readPlan(l)
	if err != nil {
		return warning, err
	}
	config, err := ReadConfig(l)
	if err != nil {
		return warning, err
	}
	spec, err := readSpec(s.Bundle)
	if err != nil {
		return warning, fmt.Errorf("container %q: %w", s.ID, err)
	}
	if err := nothingHidden(plan, spec); err != nil {
		return warning, fmt.Errorf("container %q: %w", s.ID, err)
	}
	lanes, err := Lanes(plan, slices.Concat(d.Lanes, d.GPUs))
	if err != nil {
		return warning, fmt.Errorf("container %q: %w", s.ID, err)
	}
	if err := present(plan, lanes); err != nil {
		return warning, err
	}
	if err := presentNICs(plan, lanes[len(d.Lanes):], d.NICs); err != nil {
		return warning, fmt.Errorf("container %q: %w", s.ID, err)
	}
	c := Container{ID: s.ID, RuntimeRoot: runtimeRoot, Bundle: s.Bundle, PID: s.PID}
	// Looked at first, so that no relay is started for what is no container.
	if err := isolated(c); err != nil {
		return warning, err
	}
	if len(d.GPUs)+len(d.NICs) > 0 {
		if err := raiseMemlock(s.PID, spec); err != nil {
			warning = errors.Join(warning, fmt.Errorf("container %q: %w", s.ID, err))
		}
	}
	if len(lanes) == 0 {
		return warning, nil
	}
	g, err := Launch(l, Request{Container: c, Lanes: lanes, Config: config})
	if err != nil {
		return warning, err
	}
	// If this fails the runtime ends init, and with it goes the generation.
	return warning, Attach(l, g, spec.rootfs(s.Bundle))
}
