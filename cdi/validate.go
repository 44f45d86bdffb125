package cdi

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// Drift is one difference between the installed files and the host.
type Drift struct {
	// Kind is one of the constants below, for programs.
	Kind string `json:"kind"`
	// Subject is the file or device of the difference.
	Subject string `json:"subject"`
	// Message describes the difference, and Remedy the correction.
	Message string `json:"message"`
	Remedy  string `json:"remedy"`
}

// Kinds of drift. Scripts match them: they are a public interface.
const (
	driftMissing     = "missing"      // a specification or the plan is missing
	driftDamaged     = "damaged"      // a file that engines cannot load
	driftMode        = "mode"         // mode or owner of a file
	driftVersion     = "version"      // a CDI version that is higher than needed
	driftConflict    = "conflict"     // two files define a device, so engines ignore the device
	driftLayout      = "layout"       // a specification of another layout
	DriftHook        = "hook"         // peerlane-hook is missing, or does not belong to root
	driftTenancy     = "tenancy"      // the offered devices do not fit the tenancy
	driftKind        = "kind"         // a kind of device appeared or disappeared
	driftGPUMoved    = "gpu-moved"    // a GPU has another PCI address
	driftGPUGone     = "gpu-gone"     // a GPU is gone
	driftGPUAdded    = "gpu-added"    // a GPU has no device yet
	driftGPUReplaced = "gpu-replaced" // a different GPU, with another UUID, has the address
	driftGPUIndex    = "gpu-index"    // a GPU has another index
	driftGPURefused  = "gpu-refused"  // a GPU can no longer have a lane
	driftMinor       = "minor"        // a GPU has another device node
	driftNICRenamed  = "nic-renamed"  // a NIC has another name
	driftNICGone     = "nic-gone"     // a NIC is gone
	driftNICAdded    = "nic-added"    // a NIC is new
	driftNICMoved    = "nic-moved"    // a NIC has another PCI address
	driftNICNode     = "nic-node"     // a NIC has another device node
	driftPortDown    = "port-down"    // a NIC no longer has an active port
	driftPortUp      = "port-up"      // a port of a NIC is active again
	driftPlan        = "plan"         // the plan is older, damaged or different
	driftLanes       = "lanes"        // the host would get other lanes
	driftNode        = "node"         // a device node is missing
	driftContent     = "content"      // anything else
)

// Remedies.
const (
	remedyRefresh = "run peerlane cdi refresh"
	remedyPort    = "check its link, or run peerlane cdi refresh for lanes without it"
)

// Validator compares the installed files with the host.
type Validator struct {
	Installation // Validate sets plan and specs
	// Files are the loaded files of the directories (Load).
	Files []File
	// Live is the current plan of the host. Options are the options of its specifications; an
	// empty HookPath means the hook of the installed specifications.
	Live    *planner.Plan
	Options Options

	drift []Drift
	// old is the installed plan; nil if unreadable.
	old *planner.Plan
}

// Validate returns the drift, empty if the installed files fit. Validate returns an error if the
// comparison is impossible: the user may not read a file, or the driver of the host is not ready.
func (v *Validator) Validate() ([]Drift, error) {
	if why := v.early(v.Live); why != "" {
		return nil, fmt.Errorf("%s; try again when it is", why)
	}
	if v.Options.HookPath == "" {
		v.Options.HookPath = v.hookInFiles()
	}
	var nothing error
	if v.specs, nothing = Generate(v.Live, v.Options); nothing != nil {
		if Offers(v.Live) {
			return nil, nothing
		}
		v.plan = nil
	} else {
		v.plan = v.Live
	}
	changes, err := v.changes()
	if err != nil {
		return nil, err
	}
	v.drift = []Drift{}
	if err := v.readPlan(); err != nil {
		return nil, err
	}
	v.checkFiles()
	v.checkConflicts()
	v.checkKinds(nothing)
	v.checkLayout()
	v.checkHooks()
	v.checkGPUs()
	v.checkNICs()
	v.checkLanes()
	v.checkNodes()
	v.checkRest(changes)
	return v.drift, nil
}

func (v *Validator) add(kind, subject, remedy, format string, args ...any) {
	d := Drift{Kind: kind, Subject: subject, Message: fmt.Sprintf(format, args...), Remedy: remedy}
	if !slices.Contains(v.drift, d) {
		v.drift = append(v.drift, d)
	}
}

// ours returns the loaded files with names of Peerlane. Validate does not compare files of other
// programs that define devices of Peerlane's kinds.
func (v *Validator) ours() (files []File) {
	for _, f := range v.Files {
		if f.spec != nil && isOurName(filepath.Base(f.Path)) {
			files = append(files, f)
		}
	}
	return files
}

// hookInFiles returns the hook that the installed specifications name, even if the program is
// missing, so that Validate does not report a different path of the hook as a difference.
func (v *Validator) hookInFiles() string {
	for _, f := range v.ours() {
		for _, h := range f.spec.ContainerEdits.Hooks {
			return h.Path
		}
	}
	return "/usr/libexec/peerlane/peerlane-hook"
}

// readPlan reads the installed plan and reports defects of the file.
func (v *Validator) readPlan() (err error) {
	path := v.Layout.PlanFile()
	v.old, err = planner.Read(path)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return err
	case errors.Is(err, fs.ErrNotExist):
		v.old = nil
		if len(v.ours()) > 0 {
			v.add(driftMissing, path, remedyRefresh, "there is no plan, so no container with a lane can start")
		}
	case err != nil:
		v.old = nil
		v.add(driftPlan, path, remedyRefresh, "%v", err)
	case v.old.Source.Kind != topo.SourceSysfs:
		v.add(driftPlan, path, remedyRefresh, "it was made from the file %s instead of this host", v.old.Source.File)
	}
	return nil
}

func (v *Validator) checkFiles() {
	if len(v.Files) == 0 && len(v.specs) > 0 {
		v.add(
			driftMissing,
			v.Dirs[0],
			"run peerlane cdi generate --spec-dir "+v.Dirs[0],
			"no specification of Peerlane is installed, but this host has %d lanes",
			len(v.Live.Lanes),
		)
	}
	var dirs []string
	for _, f := range v.Files {
		if dir := filepath.Dir(f.Path); !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
			v.checkOwner(dir, 0)
		}
		if f.Err != nil {
			v.add(
				driftDamaged,
				f.Path,
				remedyRefresh,
				"engines cannot load it, and ignore it: %s",
				strings.Join(strings.Fields(f.Err.Error()), " "),
			)
		}
		v.checkOwner(f.Path, 0o444)
		if f.spec == nil {
			continue
		}
		if needed, err := specs.MinimumRequiredVersion(f.spec); err == nil &&
			needed != strings.TrimPrefix(f.spec.Version, "v") {
			v.add(
				driftVersion,
				f.Path,
				remedyRefresh,
				"it states CDI version %s and needs %s; engines ignore versions newer than their own",
				f.spec.Version,
				needed,
			)
		}
	}
	if v.old != nil {
		v.checkOwner(v.Layout.PlanFile(), 0)
	}
}

// checkOwner reports a file that users other than root can write, or cannot read. Root's hook
// and the container engine act on such files.
func (v *Validator) checkOwner(path string, readable fs.FileMode) {
	info, err := os.Lstat(path)
	if err != nil {
		return // removed meanwhile; the next validation reports the missing file
	}
	stat := info.Sys().(*syscall.Stat_t) // as package os documents for Linux
	mode := info.Mode()
	switch {
	case mode.Type() == fs.ModeSymlink:
		v.add(driftMode, path, remedyRefresh, "it is a symbolic link instead of a regular file")
		return
	case stat.Uid != 0 && int(stat.Uid) != os.Geteuid():
		v.add(
			driftMode,
			path,
			"chown root "+path,
			"it belongs to uid %d, and that user could run any program as root",
			stat.Uid,
		)
	case mode.Perm()&0o022 != 0:
		v.add(
			driftMode,
			path,
			"chmod go-w "+path,
			"users other than its owner can write it (mode %04o), and could run any program as root",
			mode.Perm(),
		)
	case mode.Perm()&readable != readable:
		v.add(
			driftMode,
			path,
			"chmod 0644 "+path,
			"not every user can read it (mode %04o), so rootless engines do not see its devices",
			mode.Perm(),
		)
	}
}

// checkConflicts reports devices that engines ignore because two files of the same priority define
// the device.
func (v *Validator) checkConflicts() {
	for i, a := range v.Files {
		for _, b := range v.Files[i+1:] {
			if a.spec == nil || b.spec == nil || a.spec.Kind != b.spec.Kind || a.priority != b.priority {
				continue
			}
			var both []string
			for _, d := range a.spec.Devices {
				if sharesName(b.spec, []specs.Device{d}) {
					both = append(both, d.Name)
				}
			}
			if len(both) == 0 {
				continue
			}
			which := a.spec.Kind + "=" + both[0]
			if len(both) > 1 {
				which += fmt.Sprintf(" and %d more", len(both)-1)
			}
			remedy := remedyRefresh // one file has the other format
			for _, f := range []File{a, b} {
				if !isOurName(filepath.Base(f.Path)) {
					remedy = "remove " + f.Path
				}
			}
			v.add(driftConflict, a.Path, remedy, "%s also defines %s, so engines ignore both definitions", b.Path, which)
		}
	}
}

// checkKinds compares the installed kinds of device with the kinds that the host offers.
func (v *Validator) checkKinds(nothing error) {
	installed, want := map[string]string{}, map[string]bool{}
	for _, f := range v.ours() {
		installed[f.spec.Kind] = f.Path
	}
	for _, f := range v.Files { // checkFiles reports the error
		if f.Err != nil {
			for _, kind := range Kinds {
				if filepath.Base(f.Path) == JSON.FileName(kind) || filepath.Base(f.Path) == YAML.FileName(kind) {
					installed[kind] = f.Path
				}
			}
		}
	}
	for _, spec := range v.specs {
		want[spec.Kind] = true
		if _, ok := installed[spec.Kind]; ok || len(v.Files) == 0 {
			continue
		}
		if spec.Kind != KindLane {
			v.add(
				driftTenancy,
				spec.Kind,
				remedyRefresh,
				`it should be offered (tenancy = "%s"), but no specification of it is installed`,
				v.tenancy(),
			)
		} else {
			v.add(driftMissing, spec.Kind, remedyRefresh, "no specification of it is installed, but this host has %d lanes",
				len(v.Live.Lanes))
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(installed)) {
		switch path := installed[kind]; {
		case want[kind]:
		case nothing != nil:
			v.add(
				driftKind,
				path,
				remedyRefresh,
				"this host has no device for it: %s",
				strings.TrimPrefix(nothing.Error(), generating),
			)
		case v.tenancy() == config.TenancyMulti:
			v.add(
				driftTenancy,
				path,
				remedyRefresh,
				`it gives containers devices that several tenants must not share, but tenancy is now "multi"`,
			)
		default:
			v.add(driftKind, path, remedyRefresh, "this host no longer offers a device of it")
		}
	}
}

func (v *Validator) tenancy() string {
	return cmp.Or(v.Options.Tenancy, config.TenancySingle)
}

// checkLayout reports specifications of another root, and an anchor that is missing, not empty or
// not mounted.
func (v *Validator) checkLayout() {
	for _, f := range v.ours() {
		if root := otherRoot(f.spec, v.Layout); root != "" {
			v.add(driftLayout, f.Path, "run it with the intended --root, or peerlane cdi refresh",
				"it belongs to the layout below %s, and this is the layout below %s", root, v.Layout.Root)
		}
	}
	if len(v.specs) == 0 || len(v.ours()) == 0 {
		return
	}
	anchor := v.Layout.Anchor()
	entries, err := os.ReadDir(anchor)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		v.add(
			driftMissing,
			anchor,
			"run peerlane cdi generate --spec-dir "+v.Dirs[0],
			"the directory that containers get at %s is missing, so no container with a lane can start",
			paths.ContainerDir,
		)
	case err == nil && len(entries) > 0:
		v.add(
			driftContent,
			anchor,
			"empty it",
			"the directory that containers get at %s is not empty (%s)",
			paths.ContainerDir,
			entries[0].Name(),
		)
	case err == nil && paths.MountsAnchor():
		if err := v.Layout.CheckAnchor(); err != nil {
			v.add(
				driftContent,
				anchor,
				"run "+v.Layout.AnchorCommand(),
				"the hook refuses each container with a lane, because of the directory that containers get at %s: %v",
				paths.ContainerDir,
				err,
			)
		}
	}
}

// otherRoot returns the root of a specification; empty if the root is that of l.
func otherRoot(spec *specs.Spec, l paths.Layout) string {
	all := []specs.ContainerEdits{spec.ContainerEdits}
	for _, d := range spec.Devices {
		all = append(all, d.ContainerEdits)
	}
	for _, edits := range all {
		for _, h := range edits.Hooks {
			if root := arguments(h).root; root != l.Root {
				return root
			}
		}
	}
	return ""
}

// checkHooks checks that the programs of hooks exist and belong to root.
func (v *Validator) checkHooks() {
	var hostPaths []string
	for _, f := range v.ours() {
		for _, d := range append(slices.Clone(f.spec.Devices), specs.Device{ContainerEdits: f.spec.ContainerEdits}) {
			for _, h := range d.ContainerEdits.Hooks {
				if !slices.Contains(hostPaths, h.Path) {
					hostPaths = append(hostPaths, h.Path)
				}
			}
		}
	}
	for _, path := range hostPaths {
		info, err := os.Stat(path)
		const install = "install it again, or name another hook with peerlane cdi refresh --hook"
		switch {
		case errors.Is(err, fs.ErrNotExist):
			v.add(DriftHook, path, install, "the hook is missing, so no container with a device of Peerlane can start")
			continue
		case err != nil:
			v.add(DriftHook, path, install, "the hook cannot be examined: %v", err)
			continue
		case !info.Mode().IsRegular() || info.Mode()&0o111 == 0:
			v.add(DriftHook, path, install, "the hook is not an executable file (%v)", info.Mode())
			continue
		}
		for _, name := range []string{filepath.Dir(path), path} {
			info, err := os.Stat(name)
			if err != nil {
				continue
			}
			stat := info.Sys().(*syscall.Stat_t) // as package os documents for Linux
			switch {
			case stat.Uid != 0:
				v.add(DriftHook, path, "chown root "+name, "runtimes run it as root, but %s belongs to uid %d", name, stat.Uid)
			case info.Mode().Perm()&0o022 != 0 && info.Mode()&fs.ModeSticky == 0:
				v.add(
					DriftHook,
					path,
					"chmod go-w "+name,
					"runtimes run it as root, but users other than root can write %s (mode %04o)",
					name,
					info.Mode().Perm(),
				)
			}
		}
	}
}

// installedGPU is a GPU of the installed specifications.
type installedGPU struct {
	uuid, busID string
	// index is -1 if unknown.
	index int
}

// name returns the name of the GPU for messages.
func (g installedGPU) name() string {
	if g.index >= 0 {
		return fmt.Sprintf("GPU %d", g.index)
	}
	return "GPU " + g.busID
}

// installedGPUs returns the GPUs of the installed specifications, by address.
func (v *Validator) installedGPUs() []installedGPU {
	found := map[string]installedGPU{}
	for _, f := range v.ours() {
		if otherRoot(f.spec, v.Layout) != "" {
			continue // the specification may be of another host
		}
		for _, d := range f.spec.Devices {
			for _, h := range d.ContainerEdits.Hooks {
				lanes := arguments(h).lanes
				for _, lane := range lanes {
					uuid, busID, _ := strings.Cut(lane, "@")
					g, known := found[busID]
					if !known {
						g = installedGPU{uuid, busID, -1}
					}
					if index, err := strconv.Atoi(d.Name); err == nil && len(lanes) == 1 {
						g.index = index
					}
					found[busID] = g
				}
			}
		}
	}
	return slices.SortedFunc(
		maps.Values(found),
		func(a, b installedGPU) int { return strings.Compare(a.busID, b.busID) },
	)
}

// checkGPUs compares the GPUs of the installed devices with the GPUs of the host.
func (v *Validator) checkGPUs() {
	installed := v.installedGPUs()
	for _, old := range installed {
		v.checkGPU(old)
	}
	if len(installed) > 0 { // otherwise no specification could list a new GPU
		v.checkNewGPUs(installed)
	}
	v.checkMinors()
}

// checkGPU compares an installed GPU with the GPU of the host at the same address.
func (v *Validator) checkGPU(old installedGPU) {
	at := slices.IndexFunc(v.Live.GPUs, func(g topo.GPU) bool { return g.BusID == old.busID })
	moved := slices.IndexFunc(v.Live.GPUs, func(g topo.GPU) bool {
		return old.uuid != "" && strings.EqualFold(g.UUID, old.uuid) && g.BusID != old.busID
	})
	subject := KindLane + "=" + strings.TrimPrefix(old.name(), "GPU ")
	switch {
	case moved >= 0:
		v.add(
			driftGPUMoved,
			subject,
			remedyRefresh,
			"%s (%s) was at %s and is now at %s",
			old.name(),
			old.uuid,
			old.busID,
			v.Live.GPUs[moved].BusID,
		)
		return
	case at < 0:
		v.add(driftGPUGone, subject, remedyRefresh, "%s (%s) at %s is gone", old.name(), old.uuid, old.busID)
		return
	}
	live := v.Live.GPUs[at]
	if old.uuid != "" && live.UUID != "" && !strings.EqualFold(old.uuid, live.UUID) {
		v.add(
			driftGPUReplaced,
			subject,
			remedyRefresh,
			"a different GPU is now at %s: its UUID is %s, and was %s",
			old.busID,
			live.UUID,
			old.uuid,
		)
	}
	if old.index >= 0 && live.Index != old.index {
		v.add(
			driftGPUIndex,
			subject,
			remedyRefresh,
			"the GPU at %s now has index %d, and had %d",
			old.busID,
			live.Index,
			old.index,
		)
	}
	if lane, err := v.Live.Lane(old.busID); err == nil && lane.Role == planner.RoleRefused {
		v.add(driftGPURefused, subject, remedyRefresh, "%s can no longer have a lane: %s", old.name(), lane.Reason)
	}
}

// checkNewGPUs reports GPUs of the host without a device.
func (v *Validator) checkNewGPUs(installed []installedGPU) {
	known := map[string]bool{}
	for _, old := range installed {
		known[old.busID], known[old.uuid] = true, true
	}
	for _, lane := range v.Live.Lanes {
		gpu, err := v.Live.GPU(lane.GPU)
		if err != nil || lane.Role == planner.RoleRefused || known[gpu.BusID] || gpu.UUID != "" && known[gpu.UUID] {
			continue
		}
		v.add(
			driftGPUAdded,
			fmt.Sprintf("%s=%d", KindLane, gpu.Index),
			remedyRefresh,
			"GPU %d (%s) at %s has no device yet",
			gpu.Index,
			gpu.UUID,
			gpu.BusID,
		)
	}
}

// checkMinors compares the device nodes of the GPUs with the nodes of the old plan.
func (v *Validator) checkMinors() {
	if v.old == nil {
		return
	}
	for _, old := range v.old.GPUs {
		for _, live := range v.Live.GPUs {
			if old.BusID == live.BusID && old.Minor >= 0 && live.Minor >= 0 && old.Minor != live.Minor {
				v.add(
					driftMinor,
					fmt.Sprintf("/dev/nvidia%d", old.Minor),
					remedyRefresh,
					"the device node of GPU %d at %s is now /dev/nvidia%d",
					live.Index,
					live.BusID,
					live.Minor,
				)
			}
		}
	}
}

// checkNICs compares the NICs of the installed plan with the NICs of the host.
func (v *Validator) checkNICs() {
	if v.old == nil {
		return
	}
	installed, live := map[string]topo.NIC{}, map[string]topo.NIC{}
	for _, n := range v.old.NICs {
		installed[n.Name] = n
	}
	for _, n := range v.Live.NICs {
		live[n.Name] = n
	}
	renamed := map[string]bool{}
	for _, old := range v.old.NICs {
		now, found := live[old.Name]
		if !found {
			i := slices.IndexFunc(v.Live.NICs, func(n topo.NIC) bool {
				_, existed := installed[n.Name]
				return !existed && n.BusID != "" && n.BusID == old.BusID
			})
			if i < 0 {
				v.add(driftNICGone, old.Name, remedyRefresh, "NIC %s at %s is gone", old.Name, old.BusID)
				continue
			}
			now = v.Live.NICs[i]
			renamed[now.Name] = true
			v.add(
				driftNICRenamed,
				old.Name,
				remedyRefresh+" (docs/cdi.md describes how to keep names)",
				"NIC %s at %s is now called %s",
				old.Name,
				old.BusID,
				now.Name,
			)
		} else if now.BusID != old.BusID {
			v.add(driftNICMoved, old.Name, remedyRefresh, "NIC %s was at %s and is now at %s", old.Name, old.BusID, now.BusID)
		}
		if now.Uverbs != old.Uverbs {
			v.add(
				driftNICNode,
				old.Name,
				remedyRefresh,
				"the device node of NIC %s is now %s, and was %s",
				now.Name,
				verbsNode(now),
				verbsNode(old),
			)
		}
		switch {
		case old.Active() && !now.Active():
			v.add(driftPortDown, now.Name, remedyPort, "NIC %s no longer has an active port", now.Name)
		case !old.Active() && now.Active():
			v.add(driftPortUp, now.Name, remedyRefresh, "NIC %s now has an active port", now.Name)
		}
	}
	for _, now := range v.Live.NICs {
		if _, existed := installed[now.Name]; !existed && !renamed[now.Name] {
			v.add(driftNICAdded, now.Name, remedyRefresh, "NIC %s at %s is new", now.Name, now.BusID)
		}
	}
}

func verbsNode(n topo.NIC) string {
	if n.Uverbs == "" {
		return "missing"
	}
	return "/dev/infiniband/" + n.Uverbs
}

// checkLanes compares the lanes of the installed plan with the lanes of the live plan.
func (v *Validator) checkLanes() {
	if v.old == nil || v.plan == nil {
		return
	}
	var others []string
	for _, old := range v.old.Lanes {
		for _, live := range v.Live.Lanes {
			if old.GPU != live.GPU ||
				old.Kind == live.Kind && slices.Equal(old.Servers, live.Servers) && slices.Equal(old.NICs, live.NICs) &&
					slices.Equal(old.Members, live.Members) {
				continue
			}
			if gpu, err := v.Live.GPU(live.GPU); err == nil {
				others = append(others, strconv.Itoa(gpu.Index))
			}
		}
	}
	if len(others) > 0 {
		what := "lane of GPU "
		if len(others) > 1 {
			what = "lanes of GPUs "
		}
		v.add(
			driftLanes,
			v.Layout.PlanFile(),
			remedyRefresh,
			"the %s would now have other NICs or server GPUs",
			what+strings.Join(others, ", "),
		)
	}
	if !sameJSON(v.old.Groups, v.Live.Groups) {
		v.add(driftPlan, v.Layout.PlanFile(), remedyRefresh, "the groups of the configuration have changed")
	}
}

var gpuNode = regexp.MustCompile(`^/dev/nvidia[a-z0-9-]*$`)

// checkNodes reports missing device nodes: an engine refuses to start a container if a node is
// missing.
func (v *Validator) checkNodes() {
	var gpus, nics []string
	for _, f := range v.ours() {
		for _, d := range append(slices.Clone(f.spec.Devices), specs.Device{ContainerEdits: f.spec.ContainerEdits}) {
			for _, n := range d.ContainerEdits.DeviceNodes {
				path := cmp.Or(n.HostPath, n.Path)
				if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) ||
					slices.Contains(slices.Concat(gpus, nics), path) {
					continue
				}
				if gpuNode.MatchString(n.Path) {
					gpus = append(gpus, path)
				} else {
					nics = append(nics, path)
				}
			}
		}
	}
	for _, missing := range []struct {
		nodes  []string
		remedy string
	}{
		{gpus, "let NVIDIA's driver create it (nvidia-modprobe -u -c 0, or nvidia-smi), or " + remedyRefresh},
		{nics, "load the NIC's driver and ib_uverbs, or " + remedyRefresh},
	} {
		if n := len(missing.nodes); n == 1 {
			v.add(
				driftNode,
				missing.nodes[0],
				missing.remedy,
				"the device node is missing, so no container with a device that names it can start",
			)
		} else if n > 1 {
			v.add(driftNode, missing.nodes[0], missing.remedy,
				"the device node is missing, and so are %s: no container with a device that names one can start",
				strings.Join(missing.nodes[1:], ", "))
		}
	}
}

// checkRest reports changes that a refresh would make and that no other check explains.
func (v *Validator) checkRest(changes []Change) {
	for _, d := range v.drift {
		if !slices.Contains([]string{driftNode, DriftHook, driftMode}, d.Kind) &&
			(d.Kind != driftConflict || d.Remedy == remedyRefresh) {
			return // another drift explains the change
		}
	}
	for _, c := range changes {
		switch line := firstDifference(c.Diff()); {
		case c.Removed:
			v.add(driftContent, c.Path, remedyRefresh, "it would be removed")
		case line == "" && slices.ContainsFunc(v.drift, func(d Drift) bool {
			return d.Kind == driftMode &&
				d.Subject == c.Path
		}):
		case line == "":
			v.add(driftMode, c.Path, remedyRefresh, "its mode or owner differs from what Peerlane sets")
		case c.Kind == "":
			v.add(driftPlan, c.Path, remedyRefresh, "it differs from the present plan of this host: %s", line)
		default:
			v.add(driftContent, c.Path, remedyRefresh, "it differs from the file that this version writes on this host: "+
				"%s", line)
		}
	}
}

// firstDifference returns the first differing lines of a unified diff.
func firstDifference(diff string) string {
	var gone, came string
	for line := range strings.Lines(diff) {
		text := strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "--- "), strings.HasPrefix(line, "+++ "):
		case strings.HasPrefix(line, "-") && gone == "" && came == "":
			gone = strings.TrimSpace(text[1:])
		case strings.HasPrefix(line, "+") && came == "":
			came = strings.TrimSpace(text[1:])
		}
	}
	switch {
	case gone == "" && came == "":
		return ""
	case gone == "":
		return "it lacks " + came
	case came == "":
		return "it has " + gone
	}
	return fmt.Sprintf("it has %s instead of %s", gone, came)
}
