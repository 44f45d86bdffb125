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
	"github.com/peerlane/peerlane/topo/planner"
)

// State is the part of the OCI runtime state that the hook uses. The runtime writes the state to
// the hook's standard input.
type State struct {
	ID     string
	Status string
	PID    int
	Bundle string
	// Root is the path of the root file system, which only crun sets.
	Root string
	// Annotations are the annotations of config.json, which an image can set.
	Annotations map[string]string
}

// maxState is the maximum size of the state in bytes: annotations can be long.
const maxState = 16 << 20

var errStateTooLong = fmt.Errorf("it has more than %d bytes", maxState)

// ReadState reads a State of at most maxState bytes.
func ReadState(r io.Reader) (State, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxState+1))
	if err == nil && len(text) > maxState {
		err = errStateTooLong
	}
	var d stateDocument
	if err == nil {
		err = json.Unmarshal(text, &d)
	}
	if err != nil {
		return State{}, &fault.Error{Operation: "read the container's state from", Object: "standard input", Cause: err,
			Remedy: "only a container runtime runs this program, as a hook"}
	}
	return State{d.ID.Value, d.Status.Value, d.PID.Value, d.Bundle.Value, d.Root.Value, d.Annotations.Value}, nil
}

// stateDocument is the JSON form of a State.
type stateDocument struct {
	ID          ocispec.NoDuplicateKeys[string]            `json:"id"`
	Status      ocispec.NoDuplicateKeys[string]            `json:"status"`
	PID         ocispec.NoDuplicateKeys[int]               `json:"pid"`
	Bundle      ocispec.NoDuplicateKeys[string]            `json:"bundle"`
	Root        ocispec.NoDuplicateKeys[string]            `json:"root"`
	Annotations ocispec.NoDuplicateKeys[map[string]string] `json:"annotations"`
}

// maxID is the maximum length of a container's id in bytes: messages to the relay contain the id.
// A runtime uses it in a file name, which has at most 255 bytes.
const maxID = 1024

var errNoBundle = errors.New("the state names no bundle")

// lengthError is the error of a field of the state above its limit.
type lengthError struct {
	field, value string
	// limit is in bytes.
	limit int
}

func (e *lengthError) Error() string {
	return fmt.Sprintf("check the container's state: %s %.60q... has %d bytes, more than %d", e.field, e.value,
		len(e.value), e.limit)
}

// stageError is the error of a state that does not come from a createRuntime or prestart hook.
type stageError struct {
	id, status string
	pid        int
}

func (e *stageError) Error() string {
	return fmt.Sprintf("container %q: status %.40q and pid %d are not those of a createRuntime or prestart hook, the "+
		"only places for peerlane-hook create", e.id, e.status, e.pid)
}

// check refuses a state unless pid is an init in this process's PID namespace that has not
// executed the container's program yet. In a createContainer hook the pid is 1 (runc) or 0 (crun),
// and process 1 belongs to the host.
func (s State) check() error {
	if len(s.ID) > maxID {
		return &lengthError{"id", s.ID, maxID}
	}
	if len(s.Bundle) > unix.PathMax {
		return &lengthError{"bundle", s.Bundle, unix.PathMax}
	}
	if len(s.Root) > unix.PathMax {
		return &lengthError{"root", s.Root, unix.PathMax}
	}
	if s.PID > 1 && s.Status == "stopped" {
		return &fault.Error{Code: fault.Checkpoint, Operation: "restore from a checkpoint container",
			Object: strconv.Quote(s.ID),
			Cause:  errors.New("its relay ended with the process that was checkpointed, and a lane cannot be restored"),
			Remedy: "start a new container"}
	}
	if s.PID <= 1 || s.Status != "creating" && s.Status != "created" {
		return &stageError{s.ID, s.Status, s.PID}
	}
	if s.Bundle == "" {
		return fmt.Errorf("container %q: %w", s.ID, errNoBundle)
	}
	return nil
}

// spec returns the container's configuration. crun loses its working directory when it makes
// device nodes in a user namespace, and reports "/" as the bundle. Then only the root file system
// is known, and the warning names the missing checks.
func (s State) spec() (spec *ocispec.Spec, warning, err error) {
	spec, err = ocispec.Read(s.Bundle)
	if !errors.Is(err, fs.ErrNotExist) || !filepath.IsAbs(s.Root) {
		return spec, nil, err
	}
	return ocispec.RootOnly(s.Root), fmt.Errorf("container %q: its environment and its limits are not looked at: the "+
		"runtime says that the bundle is %s, where no config.json is", s.ID, s.Bundle), nil
}

// errHidden reports devices of a container of which one hides the other.
var errHidden = errors.New("its devices hide one another")

// Devices are the devices in the arguments of a hook.
type Devices struct {
	// Lanes are the GPUs whose lanes the container gets, as "UUID@PCI address": a device
	// peerlane.dev/lane=.
	Lanes []string
	// Auto requests the lanes of the GPUs that the engine gives the container: the device
	// peerlane.dev/lane=auto.
	Auto bool
	// GPUs are GPUs, in the same form, whose lanes and device nodes the container gets: a device
	// peerlane.dev/gpu=.
	GPUs []string
	// NICs are the names of RDMA devices whose device nodes the engine adds to the container: a
	// device peerlane.dev/nic=.
	NICs []string
}

// Ahead reads the host's plan and configuration while the hook reads the state: the plan is the
// largest file that a hook reads.
type Ahead struct {
	layout paths.Layout
	plan   func() (*planner.Plan, error)
	config func() (hostconfig.Config, error)
}

// ReadAhead starts to read the host's plan and configuration.
func ReadAhead(l paths.Layout) Ahead {
	return Ahead{l, begun(func() (*planner.Plan, error) { return lanes.ReadPlan(l) }),
		begun(func() (hostconfig.Config, error) { return hostconfig.Load(l) })}
}

// begun starts f on a goroutine, and returns a function that waits for its result.
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

// Create runs at createRuntime or prestart. It starts the container's relay, mounts the relay's
// socket, and raises memlock for gpu= and nic= requests. warning is a failure that does not stop
// the container. Create delays every container start, so it leaves the state of ended containers
// to the supervisor.
func Create(a Ahead, s State, runtimeRoot string, d Devices) (warning, err error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	if err := d.withoutRoot(); err != nil {
		return nil, fmt.Errorf("container %q: %w", s.ID, err)
	}

	// Without a readable configuration, hook.on_failure has its default: fail.
	c, err := a.config()
	if err != nil {
		return nil, err
	}
	config.SetLogFormat(c.Log.Format)
	spec, unread, err := s.spec()
	if err != nil {
		err = fmt.Errorf("container %q: %w", s.ID, err)
	}
	// Report a missing plan before a missing config.json.
	plan, failed := a.plan()
	if failed != nil {
		err = failed
	}
	if err == nil {
		warning, err = attachLanes(a.layout, c.Config, plan, spec, s, runtimeRoot, d)
	}
	warning = errors.Join(c.Replaced, c.Keep(a.layout), warning)
	if len(d.GPUs)+len(d.NICs) > 0 { // a lane alone requires no config.json
		warning = errors.Join(unread, warning)
	}
	if err != nil && c.Hook.OnFailure == config.OnFailureWarn && !errors.Is(err, errHidden) {
		return errors.Join(warning, fmt.Errorf("container %q starts without its lane, as hook.on_failure says: %w", s.ID,
			err)), nil
	}
	return warning, err
}

// attachLanes starts the relay of the container and mounts the relay's socket directory.
func attachLanes(l paths.Layout, config config.Config, plan *planner.Plan, spec *ocispec.Spec, s State,
	runtimeRoot string, d Devices) (warning, err error) {
	// Empty the anchor even if this container does not start.
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
	lanes.MarkVisibleServers(given[len(d.Lanes):])
	if err := lanes.Present(plan, given); err != nil {
		return warning, err
	}
	lanes.AddSpares(plan, given, config.Plan.Exclude.Pairs)
	if err := lanes.PresentNICs(plan, given[len(d.Lanes):], d.NICs); err != nil {
		return warning, fmt.Errorf("container %q: %w", s.ID, err)
	}
	// Check the mount namespace first, so that the hook starts no relay for a process in the
	// hook's own namespace.
	if err := checkMountNamespace(c); err != nil {
		return warning, err
	}
	if len(d.GPUs)+len(d.NICs) > 0 {
		if err := raiseMemlock(s.PID, spec); err != nil {
			warning = errors.Join(warning, fmt.Errorf("container %q: %w", s.ID, err))
		}
	}
	if err := checkNICNetworks(plan, s.PID, d.NICs); err != nil {
		warning = errors.Join(warning, fmt.Errorf("container %q: %w", s.ID, err))
	}
	if len(given) == 0 {
		return warning, nil
	}
	r := Request{Container: c, Lanes: given, Config: config, ignored: hostnetwork.IgnoredVariables(spec.Process.Env),
		pod: generation.PodOf(s.Annotations)}
	if name := config.Network.TenantAnnotation; name != "" {
		r.tenant = s.Annotations[name]
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
		err = starting.poll(l, g)
	}
	if err != nil {
		return warning, startError(r, err)
	}
	return warning, nil
}
