package cdi

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// Kinds of device.
const (
	Vendor   = "peerlane.dev"
	KindLane = Vendor + "/lane"
	KindGPU  = Vendor + "/gpu"
	KindNIC  = Vendor + "/nic"
)

// Kinds lists every kind of device that a host may offer. Write removes the files of kinds that
// the host does not offer, so a kind stays in the list for good.
var Kinds = []string{KindLane, KindGPU, KindNIC}

// all is the name of the device for every GPU with a lane, and of the device for every NIC.
const all = "all"

// auto is the lane= device for the GPUs that the engine gives the container.
const auto = "auto"

// Options are the host paths and policies of a specification.
type Options struct {
	// Layout supplies the anchor to mount and the --root of the hook.
	Layout paths.Layout
	// HookPath is the absolute path of peerlane-hook. Engines keep the path for the life of a
	// container, so the path must survive an upgrade.
	HookPath string
	// Tenancy is config.TenancySingle (the default) or config.TenancyMulti. With TenancyMulti
	// there is lane= only: a container with gpu= can reach the server GPUs, and a container with
	// nic= can reach the network.
	Tenancy string
	// DevRoot is the directory that holds dev/; empty for "/".
	DevRoot string
	// Proc is the root of procfs, from which FindPeermem reads the versions of driver and kernel;
	// empty for "/proc".
	Proc string
	// LibraryDir is the directory of the files to mount into containers; empty for the layout's
	// directory.
	LibraryDir string
}

// hookEnv returns the environment of a hook, never empty: without an environment a runtime gives
// a hook the environment of the runtime or, in some versions, of the image, with LD_PRELOAD
// (CVE-2025-23266). The other variables shorten the start of a Go program, which is half of a
// hook's time: the Go runtime sets up a scheduler per processor and reads the time zone. One
// processor is enough for a hook with one task, four for a hook that overlaps several.
func hookEnv(processors int) []string {
	return []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "TZ=UTC", fmt.Sprintf("GOMAXPROCS=%d", processors)}
}

// Generate returns the specifications of a plan: KindLane, and if the tenancy permits, KindGPU
// when the nodes of a GPU are known, and KindNIC when a NIC exists.
func Generate(plan *planner.Plan, o Options) ([]*specs.Spec, error) {
	g, err := newGenerator(plan, o)
	if err != nil {
		return nil, err
	}
	lanes, _ := g.offered(KindLane)
	if len(lanes) == 0 {
		return nil, notGenerated("", g.nothing())
	}
	specOf := map[string]func() *specs.Spec{KindLane: func() *specs.Spec { return g.spec(KindLane, lanes) }}
	if gpus, _ := g.offered(KindGPU); len(gpus) > 0 {
		specOf[KindGPU] = func() *specs.Spec { return g.spec(KindGPU, gpus) }
	}
	if nics, _ := g.offeredNICs(); len(nics) > 0 {
		specOf[KindNIC] = func() *specs.Spec { return g.nicSpec(nics) }
	}
	var out []*specs.Spec
	for _, kind := range Kinds {
		if specOf[kind] == nil {
			continue
		}
		spec := specOf[kind]()
		if err := finish(spec); err != nil {
			return nil, notGenerated("of "+kind, err)
		}
		out = append(out, spec)
	}
	return out, nil
}

// Notes explains the specifications of a plan to an administrator: the access that gpu= and nic=
// grant, the method to register GPU memory and the reason why no better method is possible, and
// the devices and libraries that the host does not offer, with the reason.
func Notes(plan *planner.Plan, o Options) ([]string, error) {
	g, err := newGenerator(plan, o)
	if err != nil {
		return nil, err
	}
	gpus, gpuMissing := g.offered(KindGPU)
	lanes, missing := g.offered(KindLane)
	nics, nicMissing := g.offeredNICs()
	var notes []string
	if len(gpus) > 0 {
		notes = append(notes, fmt.Sprintf(
			`%s=N gives a container the device nodes of its server GPUs too (tenancy = "single"); set [cdi] tenancy = "multi" in %s where containers do not trust each other`,
			KindGPU,
			o.Layout.ConfigFile(),
		))
	}
	if method, reason := g.peermem.Registration(); len(gpus)+len(nics) > 0 && reason != "" {
		notes = append(notes, fmt.Sprintf("%s=%s: %s", RegistrationVariable, method, reason))
	}
	if g.tenancy == config.TenancySingle {
		missing = slices.Concat(missing, gpuMissing, nicMissing)
	}
	for _, group := range plan.Groups {
		if _, whole := membersOf(group, lanes); !whole {
			missing = append(missing, fmt.Sprintf("%s=%s is not offered: one of its GPUs is not offered", KindLane, group.Name))
		}
	}
	return slices.Concat(notes, missing, g.libraries.refused), nil
}

type generator struct {
	plan    *planner.Plan
	o       Options
	tenancy string
	gpus    map[string]topo.GPU // by PCI address
	// libraries are the files that containers with a lane load.
	libraries libraries
	peermem   Peermem
}

func newGenerator(plan *planner.Plan, o Options) (*generator, error) {
	if !filepath.IsAbs(o.HookPath) {
		return nil, notGenerated("", &optionError{"hook path", o.HookPath,
			"must be absolute: runtimes search a relative path in directories that an image may choose"})
	}
	g := &generator{plan: plan, o: o, tenancy: cmp.Or(o.Tenancy, config.TenancySingle), gpus: map[string]topo.GPU{}}
	if g.tenancy != config.TenancySingle && g.tenancy != config.TenancyMulti {
		return nil, notGenerated("", &optionError{"tenancy", o.Tenancy,
			"must be " + config.TenancySingle + " or " + config.TenancyMulti})
	}
	for _, gpu := range plan.GPUs {
		g.gpus[gpu.BusID] = gpu
	}
	var err error
	if g.libraries, err = findLibraries(cmp.Or(o.LibraryDir, o.Layout.Libraries())); err != nil {
		return nil, notGenerated("", err)
	}
	if g.peermem, err = FindPeermem(plan.Source.Sysfs, cmp.Or(o.Proc, "/proc")); err != nil {
		return nil, notGenerated("", err)
	}
	for _, lane := range plan.Lanes {
		for _, busID := range append([]string{lane.GPU}, lane.Servers...) {
			if _, known := g.gpus[busID]; !known {
				return nil, notGenerated("", &unlistedGPUError{lane: lane.GPU, gpu: busID})
			}
		}
	}
	return g, nil
}

// offered returns the lanes that become devices of a kind, ordered by GPU index, and a sentence
// for every other lane.
func (g *generator) offered(kind string) (lanes []planner.Lane, missing []string) {
	for _, lane := range g.plan.Lanes {
		if err := g.refusal(kind, lane); err != nil {
			missing = append(missing, fmt.Sprintf("%s=%d is not offered: %v", kind, g.gpus[lane.GPU].Index, err))
			continue
		}
		lanes = append(lanes, lane)
	}
	slices.SortFunc(lanes, func(a, b planner.Lane) int {
		return cmp.Compare(g.gpus[a.GPU].Index, g.gpus[b.GPU].Index)
	})
	return lanes, missing
}

// refusal returns the reason why a lane does not become a device of a kind.
func (g *generator) refusal(kind string, lane planner.Lane) error {
	if lane.Role == planner.RoleRefused {
		return errors.New(lane.Reason)
	}
	if kind == KindLane {
		return nil
	}
	if g.tenancy == config.TenancyMulti {
		return errors.New(`tenancy = "multi"`)
	}
	for _, busID := range append([]string{lane.GPU}, lane.Servers...) {
		if g.gpus[busID].Minor < 0 {
			return fmt.Errorf("the device node of GPU %s is unknown; it is known once the NVIDIA driver is loaded", busID)
		}
	}
	// Without a UUID, the server GPUs would appear to CUDA as devices to compute on.
	if g.gpus[lane.GPU].UUID == "" {
		return fmt.Errorf("the UUID of GPU %s is unknown; it is known once the NVIDIA driver is loaded", lane.GPU)
	}
	return nil
}

// nothing returns the error of a plan without a device.
func (g *generator) nothing() error {
	if len(g.plan.Lanes) == 0 {
		return errNoGPU
	}
	_, missing := g.offered(KindLane)
	return &noLaneError{missing}
}

// notGenerated returns the error of the object of: all specifications, or the specification of a
// kind.
func notGenerated(of string, cause error) error {
	return &fault.Error{Operation: "generate the CDI specification", Object: of, Cause: cause}
}

var errNoGPU = errors.New("the plan has no lane, because this host has no NVIDIA GPU; " +
	"`peerlane topo` shows the devices of this host")

// noLaneError is the cause of a plan that refuses each GPU.
type noLaneError struct{ missing []string } // a sentence per lane

func (e *noLaneError) Error() string {
	return "no GPU of the plan has a lane: " + strings.Join(e.missing, "; ")
}

// optionError is the cause of an invalid option.
type optionError struct{ option, value, must string }

func (e *optionError) Error() string { return fmt.Sprintf("%s %q: %s", e.option, e.value, e.must) }

// unlistedGPUError is the cause of a damaged plan.
type unlistedGPUError struct{ lane, gpu string } // PCI addresses

func (e *unlistedGPUError) Error() string {
	return fmt.Sprintf("the plan's lane of %s names GPU %s, which the plan does not list; make the plan anew", e.lane,
		e.gpu)
}

// deviceNameError is the cause of a device name that CDI does not permit.
type deviceNameError struct {
	name string
	// err is nil if two devices have the name.
	err error
}

func (e *deviceNameError) Error() string {
	if e.err != nil {
		return e.err.Error()
	}
	return "two devices of the plan are named " + e.name
}

func (e *deviceNameError) Unwrap() error { return e.err }

func (g *generator) spec(kind string, lanes []planner.Lane) *specs.Spec {
	spec := &specs.Spec{Kind: kind, ContainerEdits: g.commonEdits(kind)}
	for _, lane := range lanes {
		edits := g.deviceEdits(kind, lane)
		for _, name := range names(g.gpus[lane.GPU]) {
			spec.Devices = append(spec.Devices, specs.Device{Name: name, ContainerEdits: edits})
		}
	}
	for _, group := range g.plan.Groups {
		if members, whole := membersOf(group, lanes); whole {
			spec.Devices = append(
				spec.Devices,
				specs.Device{Name: group.Name, ContainerEdits: g.deviceEdits(kind, members...)},
			)
		}
	}
	spec.Devices = append(spec.Devices, specs.Device{Name: all, ContainerEdits: g.deviceEdits(kind, lanes...)})
	if kind == KindLane {
		spec.Devices = append(spec.Devices, specs.Device{Name: auto, ContainerEdits: specs.ContainerEdits{
			Hooks: []*specs.Hook{g.hook("createRuntime", "create", "--auto")},
		}})
	}
	return spec
}

// finish checks a specification and sets its version.
func finish(spec *specs.Spec) error {
	if err := checkNames(spec); err != nil {
		return err
	}
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return err
	}
	spec.Version = version
	return nil
}

// membersOf returns the offered lanes of a group. The second result reports whether every lane of the
// group is offered: a group that lacks a lane is not offered.
func membersOf(group planner.Group, offered []planner.Lane) (members []planner.Lane, whole bool) {
	for _, lane := range offered {
		if slices.Contains(group.GPUs, lane.GPU) {
			members = append(members, lane)
		}
	}
	return members, len(members) == len(group.GPUs)
}

// names returns the names of a GPU for users.
func names(gpu topo.GPU) []string {
	all := []string{strconv.Itoa(gpu.Index), gpu.UUID, gpu.BusID}
	return slices.DeleteFunc(all, func(name string) bool { return name == "" })
}

// checkNames refuses a plan whose specification no engine would load, and names the device.
// Engines report the defect only in a log.
func checkNames(spec *specs.Spec) error {
	seen := map[string]bool{}
	for _, d := range spec.Devices {
		if err := parser.ValidateDeviceName(d.Name); err != nil {
			return &deviceNameError{d.Name, err}
		}
		if seen[d.Name] {
			return &deviceNameError{name: d.Name}
		}
		seen[d.Name] = true
	}
	return nil
}

// commonEdits returns the edits for every container with a lane. An engine applies the edits once,
// for any number of devices of the kind.
func (g *generator) commonEdits(kind string) specs.ContainerEdits {
	edits := specs.ContainerEdits{
		Mounts: append([]*specs.Mount{{
			HostPath:      g.o.Layout.Anchor(),
			ContainerPath: paths.ContainerDir,
			Options:       []string{"bind", "ro", "nosuid", "nodev", "noexec", "rprivate"},
		}}, g.libraries.mounts...),
		Hooks: []*specs.Hook{g.hook("poststop", "remove")},
	}
	if kind == KindGPU {
		edits.Env = []string{g.registration()}
		edits.DeviceNodes = append(edits.DeviceNodes, g.node("nvidiactl"), g.node("nvidia-uvm"))
		edits.DeviceNodes = append(edits.DeviceNodes, g.nodeIfPresent("nvidia-uvm-tools")...)
	}
	return edits
}

// registration returns RegistrationVariable with its value.
func (g *generator) registration() string {
	method, _ := g.peermem.Registration()
	return RegistrationVariable + "=" + method
}

// deviceEdits returns the edits of a device with these lanes.
func (g *generator) deviceEdits(kind string, lanes ...planner.Lane) specs.ContainerEdits {
	option := "--lane"
	if kind == KindGPU {
		option = "--gpu"
	}
	var args []string
	for _, lane := range lanes {
		args = append(args, option, g.gpus[lane.GPU].UUID+"@"+lane.GPU)
	}
	edits := specs.ContainerEdits{Hooks: []*specs.Hook{g.hook("createRuntime", "create", args...)}}
	if kind == KindGPU {
		g.addNodes(&edits, lanes)
	}
	return edits
}

func (g *generator) hook(at, command string, args ...string) *specs.Hook {
	all := []string{filepath.Base(g.o.HookPath), command}
	if !g.o.Layout.IsDefault() {
		all = append(all, "--root", g.o.Layout.Root)
	}
	processors := 1
	if command == "create" {
		processors = 4
	}
	return &specs.Hook{HookName: at, Path: g.o.HookPath, Args: append(all, args...), Env: hookEnv(processors)}
}

// addNodes adds the nodes of the GPUs, server GPUs and NICs of the lanes, without duplicates.
// Containers import memory from server GPUs and do not compute on server GPUs, so
// CUDA_VISIBLE_DEVICES hides them; importing memory works under the variable.
func (g *generator) addNodes(edits *specs.ContainerEdits, lanes []planner.Lane) {
	var clients, gpus, uverbs []string
	for _, lane := range lanes {
		clients = append(clients, g.gpus[lane.GPU].UUID)
		for _, busID := range append([]string{lane.GPU}, lane.Servers...) {
			gpus = append(gpus, fmt.Sprintf("nvidia%d", g.gpus[busID].Minor))
		}
		for _, nic := range g.plan.NICs {
			if slices.Contains(lane.NICs, nic.Name) && nic.Uverbs != "" {
				uverbs = append(uverbs, "infiniband/"+nic.Uverbs)
			}
		}
	}
	edits.Env = []string{"CUDA_VISIBLE_DEVICES=" + strings.Join(clients, ",")}
	for _, name := range slices.Concat(unique(gpus), unique(uverbs)) {
		edits.DeviceNodes = append(edits.DeviceNodes, g.node(name))
	}
	if len(uverbs) > 0 {
		edits.DeviceNodes = append(edits.DeviceNodes, g.nodeIfPresent(rdmaCM)...)
	}
}

// unique removes duplicates, and keeps the order of the first occurrences.
func unique(names []string) []string {
	seen := map[string]bool{}
	return slices.DeleteFunc(names, func(name string) bool {
		again := seen[name]
		seen[name] = true
		return again
	})
}

// node returns a device node below /dev. The engine reads the numbers of the node when a
// container starts. "rw" leaves out mknod, which the default would grant.
func (g *generator) node(name string) *specs.DeviceNode {
	n := &specs.DeviceNode{Path: "/dev/" + name, Permissions: "rw"}
	if root := filepath.Clean(cmp.Or(g.o.DevRoot, "/")); root != "/" {
		n.HostPath = filepath.Join(root, n.Path)
	}
	return n
}

// nodeIfPresent is node for a device node that a host may lack: an engine refuses to start a
// container if a named node is missing.
func (g *generator) nodeIfPresent(name string) []*specs.DeviceNode {
	n := g.node(name)
	if _, err := os.Lstat(cmp.Or(n.HostPath, n.Path)); err != nil {
		return nil
	}
	return []*specs.DeviceNode{n}
}
