package cdi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/topo/planner"
)

// Install locks the layout, calls read to read the host, and installs the plan and specifications
// that read returns, or neither. With dry, Install locks and writes nothing, and returns the
// changes that it would make.
func (i Installation) Install(
	dry bool,
	read func() (*planner.Plan, []*specs.Spec, error),
) (changes []Change, err error) {
	if !dry {
		held, err := Hold(i.Layout)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, held.Close()) }()
	}
	if i.plan, i.specs, err = read(); err != nil {
		return nil, err
	}
	if dry {
		return i.changes()
	}
	return i.apply()
}

// Remove removes the specifications and the plan. Without a state directory, Remove takes no
// lock.
func (i Installation) Remove(dry bool) ([]Change, error) {
	if _, err := os.Stat(i.Layout.State()); errors.Is(err, fs.ErrNotExist) {
		i.plan, i.specs = nil, nil
		if dry {
			return i.changes()
		}
		return i.apply()
	}
	return i.Install(dry, func() (*planner.Plan, []*specs.Spec, error) { return nil, nil, nil })
}

// Refreshed is the result of a refresh.
type Refreshed struct {
	Changes []Change `json:"changes"`
	// Nothing is the reason why the host offers no device; empty if it offers devices. The
	// refresh then removes the installed files, because the files name devices that are gone.
	Nothing string `json:"nothing,omitempty"`
	// Kept is the reason why the refresh kept the installed files; empty if the refresh compared
	// the files with the host.
	Kept string `json:"kept,omitempty"`
}

// Refresh is Install without an administrator, for udev and the boot: a host without a GPU is no
// error, and a host whose driver is not ready keeps its files. Without Dirs, Refresh writes to the
// directories of all with specifications of Peerlane, or else to the first directory of all.
func (i Installation) Refresh(
	dry bool,
	all []string,
	read func() (*planner.Plan, Options, error),
) (r Refreshed, err error) {
	if len(i.Dirs) == 0 {
		if i.Dirs, err = InUse(all); err != nil {
			return r, err
		}
	}
	r.Changes, err = i.Install(dry, func() (*planner.Plan, []*specs.Spec, error) {
		plan, o, err := read()
		if err != nil {
			return nil, nil, err
		}
		if r.Kept = i.early(plan); r.Kept != "" {
			return nil, nil, errKept
		}
		list, err := Generate(plan, o)
		if err != nil && !Offers(plan) {
			r.Nothing = strings.TrimPrefix(err.Error(), generating)
			return nil, nil, nil
		}
		return plan, list, err
	})
	if errors.Is(err, errKept) {
		err = nil
	}
	if r.Changes == nil {
		r.Changes = []Change{}
	}
	return r, err
}

// errKept ends an Install without a change.
var errKept = errors.New("kept")

// generating is the prefix of errors of Generate.
const generating = "generating a CDI specification: "

// Offers reports whether a plan has a lane.
func Offers(plan *planner.Plan) bool {
	return slices.ContainsFunc(plan.Lanes, func(l planner.Lane) bool { return l.Role != planner.RoleRefused })
}

// early returns the reason why the host cannot be read yet: early in a boot the GPUs exist
// without NVIDIA's driver, so that their names and nodes are unknown. The files that an earlier
// refresh installed for the same GPUs are still right.
func (i Installation) early(live *planner.Plan) string {
	installed, err := planner.Read(i.Layout.PlanFile())
	if err != nil || len(live.GPUs) == 0 {
		return ""
	}
	for _, dir := range i.Dirs {
		if !inUse(dir) {
			return ""
		}
	}
	knew := false
	for _, g := range installed.GPUs {
		knew = knew || g.UUID != ""
	}
	for _, g := range live.GPUs {
		if g.UUID != "" {
			return ""
		}
	}
	addresses := func(p *planner.Plan) []string {
		var all []string
		for _, g := range p.GPUs {
			all = append(all, g.BusID)
		}
		slices.Sort(all)
		return all
	}
	if !knew || !slices.Equal(addresses(installed), addresses(live)) {
		return ""
	}
	return fmt.Sprintf(
		"NVIDIA's driver is not loaded, so less is known about the %d GPUs than the installed files contain",
		len(live.GPUs),
	)
}

// InUse returns the directories with a file of Peerlane, or else the first directory.
func InUse(dirs []string) ([]string, error) {
	if len(dirs) == 0 {
		return nil, errors.New("no directory of CDI specifications is named")
	}
	used := slices.DeleteFunc(slices.Clone(dirs), func(dir string) bool { return !inUse(dir) })
	if len(used) == 0 {
		return dirs[:1], nil
	}
	return used, nil
}

func inUse(dir string) bool {
	return slices.ContainsFunc(Kinds, func(kind string) bool {
		return slices.ContainsFunc([]Format{JSON, YAML}, func(f Format) bool {
			_, err := os.Lstat(filepath.Join(dir, f.FileName(kind)))
			return err == nil
		})
	})
}
