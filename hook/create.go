package hook

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/hostconfig"
	"github.com/peerlane/peerlane/hook/hostnetwork"
	"github.com/peerlane/peerlane/hook/internal/ocispec"
	"github.com/peerlane/peerlane/hook/lanes"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo"
)

// State is what a runtime tells a hook on standard input: the state of the OCI
// runtime specification, as far as it matters here.
type State struct {
	ID     string
	Status string
	PID    int
	Bundle string
	// Root is the root file system's path, which crun alone tells.
	Root string
	// Annotations are those of config.json. An image may have put them there.
	Annotations map[string]string
}

// maxState bounds what a runtime says, bytes: annotations can be long.
const maxState = 16 << 20

// ReadState reads a State. It reads no more than it can use, whatever comes.
func ReadState(r io.Reader) (State, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxState+1))
	if err == nil && len(text) > maxState {
		err = fmt.Errorf("it has more than %d bytes", maxState)
	}
	var d stateDocument
	if err == nil {
		err = json.Unmarshal(text, &d)
	}
	if err != nil {
		return State{}, fmt.Errorf("reading the container's state from standard input: %w; a runtime runs this program as a hook", err)
	}
	return State{d.ID.Value, d.Status.Value, d.PID.Value, d.Bundle.Value, d.Root.Value, d.Annotations.Value}, nil
}

// stateDocument is a State as it is written.
type stateDocument struct {
	ID          ocispec.NoDuplicateKeys[string]            `json:"id"`
	Status      ocispec.NoDuplicateKeys[string]            `json:"status"`
	PID         ocispec.NoDuplicateKeys[int]               `json:"pid"`
	Bundle      ocispec.NoDuplicateKeys[string]            `json:"bundle"`
	Root        ocispec.NoDuplicateKeys[string]            `json:"root"`
	Annotations ocispec.NoDuplicateKeys[map[string]string] `json:"annotations"`
}

// maxID bounds a container's id, bytes: it is in messages to the relay. Runtimes
// make it a part of a file's name, which has 255.
const maxID = 1024

// check refuses a state in which the pid is not that of an init in this
// process's namespace, or init runs the container's program already. In a
// createContainer hook the pid is 1 (runc) or 0 (crun), and process 1 is the
// host's.
func (s State) check() error {
	if len(s.ID) > maxID {
		return fmt.Errorf("container %.60q...: its id has %d bytes, and %d are possible", s.ID, len(s.ID), maxID)
	}
	if len(s.Bundle) > unix.PathMax || len(s.Root) > unix.PathMax {
		return fmt.Errorf("container %q: its bundle's name, or its root's, has more than the %d bytes that are possible", s.ID, unix.PathMax)
	}
	if s.PID > 1 && s.Status == "stopped" {
		return &fault.Error{Code: fault.Checkpoint, Operation: "restore from a checkpoint container", Object: strconv.Quote(s.ID),
			Cause: errors.New("its relay ended with the process that was checkpointed, and a lane cannot be restored"), Remedy: "start the container anew"}
	}
	if s.PID <= 1 || s.Status != "creating" && s.Status != "created" {
		return fmt.Errorf("container %q: status %.40q and pid %d are not those of a createRuntime or prestart hook, the only places for peerlane-hook create", s.ID, s.Status, s.PID)
	}
	if s.Bundle == "" {
		return fmt.Errorf("container %q: the state names no bundle", s.ID)
	}
	return nil
}

// spec is the container's configuration. A crun that makes device nodes in a user
// namespace loses its working directory on the way, and takes the "/" that is left
// for the bundle: then the root file system is all that is known, and the warning
// says what is not looked at.
func (s State) spec() (spec *ocispec.Spec, warning, err error) {
	spec, err = ocispec.Read(s.Bundle)
	if !errors.Is(err, fs.ErrNotExist) || !filepath.IsAbs(s.Root) {
		return spec, nil, err
	}
	return ocispec.RootOnly(s.Root), fmt.Errorf("container %q: its environment and its limits are not looked at: the runtime says that the bundle is %s, where no config.json is", s.ID, s.Bundle), nil
}

// errHidden says that devices of a container would hide one another.
var errHidden = errors.New("its devices hide one another")

// Devices are what one CDI device asks for by the arguments of its hook.
type Devices struct {
	// Lanes are GPUs whose lanes the container gets, "UUID@PCI address" each: a
	// device peerlane.dev/lane=.
	Lanes []string
	// Auto asks for the lanes of all GPUs that the engine gives the container: the
	// device peerlane.dev/lane=auto.
	Auto bool
	// GPUs are GPUs whose lanes the container gets, named likewise, and whose
	// device nodes the engine gives it: a device peerlane.dev/gpu=.
	GPUs []string
	// NICs are RDMA devices, by name, whose device nodes the engine gives the
	// container: a device peerlane.dev/nic=.
	NICs []string
}

// Ahead is what every start of a container needs of the host. It is being read
// while the runtime is asked which container it is: the plan is the longest of
// what a hook reads.
type Ahead struct {
	layout paths.Layout
	plan   func() (*topo.Plan, error)
	config func() (hostconfig.Config, error)
}

// ReadAhead begins to read the host's plan and configuration.
func ReadAhead(l paths.Layout) Ahead {
	return Ahead{l, begun(func() (*topo.Plan, error) { return lanes.ReadPlan(l) }), begun(func() (hostconfig.Config, error) { return hostconfig.Load(l) })}
}

// begun calls a function at once, and returns one that waits for its result.
func begun[T any](f func() (T, error)) func() (T, error) {
	var value T
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		value, err = f()
	}()
	return func() (T, error) {
		<-done
		return value, err
	}
}

// Create is the hook at createRuntime, or prestart: it gives a container the
// relay for its lanes and mounts its socket, and lets one that has a NIC lock the
// memory that it registers. What stops no container is the warning: a limit that
// could not be raised, say. Create is in front of every container: it waits for
// nothing that it need not know, and what ended containers have left is for the
// supervisor to collect that it starts.
func Create(a Ahead, s State, runtimeRoot string, d Devices) (warning, err error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	if err := d.withoutRoot(); err != nil {
		return nil, fmt.Errorf("container %q: %w", s.ID, err)
	}

	// Nobody has said "warn" in a file that cannot be read.
	c, err := a.config()
	if err != nil {
		return nil, err
	}
	config.SetLogFormat(c.Log.Format)
	spec, unread, err := s.spec()
	if err != nil {
		err = fmt.Errorf("container %q: %w", s.ID, err)
	}
	// A host without a plan lacks more than a container without its config.json.
	plan, failed := a.plan()
	if failed != nil {
		err = failed
	}
	if err == nil {
		warning, err = attachLanes(a.layout, c.Config, plan, spec, s, runtimeRoot, d)
	}
	warning = errors.Join(c.Replaced, c.Keep(a.layout), warning)
	if len(d.GPUs)+len(d.NICs) > 0 { // a lane alone asks nothing of it
		warning = errors.Join(unread, warning)
	}
	if err != nil && c.Hook.OnFailure == config.OnFailureWarn && !errors.Is(err, errHidden) {
		return errors.Join(warning, fmt.Errorf("container %q starts without its lane, as hook.on_failure says: %w", s.ID, err)), nil
	}
	return warning, err
}

// attachLanes starts the relay of the container and mounts its socket directory.
func attachLanes(l paths.Layout, config config.Config, plan *topo.Plan, spec *ocispec.Spec, s State, runtimeRoot string, d Devices) (warning, err error) {
	// Whether this container starts or not.
	warning = l.EmptyAnchor()
	if err := spec.NothingBelow(); err != nil {
		return warning, fmt.Errorf("container %q: %w", s.ID, err)
	}
	if err := checkVisibleDevices(plan, spec); err != nil {
		return warning, fmt.Errorf("container %q: %w: %w", s.ID, errHidden, err)
	}
	c := generation.Container{ID: s.ID, RuntimeRoot: runtimeRoot, Bundle: s.Bundle, PID: s.PID}
	if d.Auto {
		names, err := autoLanes(plan, spec, c, spec.Rootfs(s.Bundle))
		if err != nil {
			return warning, fmt.Errorf("container %q: %w", s.ID, err)
		}
		d.Lanes = slices.Concat(d.Lanes, names)
	}
	given, err := lanes.Find(plan, slices.Concat(d.Lanes, d.GPUs))
	if err != nil {
		return warning, fmt.Errorf("container %q: %w", s.ID, err)
	}
	lanes.Seeing(given[len(d.Lanes):])
	if err := lanes.Present(plan, given); err != nil {
		return warning, err
	}
	lanes.AddSpares(plan, given, config.Plan.Exclude.Pairs)
	if err := lanes.PresentNICs(plan, given[len(d.Lanes):], d.NICs); err != nil {
		return warning, fmt.Errorf("container %q: %w", s.ID, err)
	}
	// Looked at first, so that no relay is started for what is no container.
	if err := isolated(c); err != nil {
		return warning, err
	}
	if len(d.GPUs)+len(d.NICs) > 0 {
		if err := raiseMemlock(s.PID, spec); err != nil {
			warning = errors.Join(warning, fmt.Errorf("container %q: %w", s.ID, err))
		}
	}
	if len(given) == 0 {
		return warning, nil
	}
	r := Request{Container: c, Lanes: given, Config: config, Ignored: hostnetwork.IgnoredVariables(spec.Process.Env)}
	if name := config.Network.TenantAnnotation; name != "" {
		r.Tenant = s.Annotations[name]
	}
	var defaults error
	g, starting, err := start(l, r, func(g *generation.Generation) error {
		if err := Attach(l, g, spec.Rootfs(s.Bundle)); err != nil {
			return err
		}
		if err := giveNCCLConf(l, g, spec.Rootfs(s.Bundle)); err != nil {
			defaults = fmt.Errorf("container %q starts without NCCL's defaults: %w", s.ID, err)
		}
		return nil
	})
	warning = errors.Join(warning, defaults)
	if err == nil {
		err = starting.failed(l, g)
	}
	if err != nil {
		return warning, startError(r, err)
	}
	return warning, nil
}
