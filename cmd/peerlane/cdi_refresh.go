//go:build !front

package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
)

// refreshed is the JSON document of "peerlane cdi refresh -o json".
type refreshed struct {
	Changed bool `json:"changed"`
	cdi.Refreshed
	Peermem *cdi.Peermem `json:"peermem,omitempty"`
	// Took maps the parts of the refresh to their duration in milliseconds.
	Took map[string]float64 `json:"took"`

	nics int
}

func newCDIRefreshCommand(a *app) *cobra.Command {
	var quiet, dry bool
	cmd := &cobra.Command{
		Use:   "refresh",
		Short: "Update installed specifications after a change of this host",
		Long: `Plan this host again, and update outdated specifications and the plan: after a GPU,
a NIC or a driver was added or removed. A udev rule and a unit run it at boot
(docs/cdi.md). Concurrent runs are safe.

It prints one line after a change. Without --spec-dir it refreshes /etc/cdi and
/var/run/cdi, as far as they have specifications of Peerlane, or else /etc/cdi. The
specifications keep the installed hook while it exists.

If no GPU can have a lane it removes the installed files, which name absent devices,
prints a line and succeeds. Before NVIDIA's driver is loaded it keeps files for the
same GPUs.

As root it also mounts the empty directory for containers (peerlane cdi anchor).

With cdi.load_peermem = true in the configuration it loads nvidia-peermem, or the
predecessor nv_peer_mem; a failure is a warning.

Exit status:
  0  installed specifications match this host, or there is no device to offer
  1  failed: nothing or a part was written; the error has the cause`,
		Example: `  peerlane cdi refresh
  peerlane cdi refresh --dry-run
  peerlane cdi refresh --quiet --spec-dir /var/run/cdi
  peerlane cdi refresh -o json | jq .took`,
		Args: noArgs,
	}
	host, f, form := addLiveHost(cmd), &specFlags{cmd: cmd}, addForm(cmd)
	host.addSoftware()
	addSpecDirs(cmd, f, "refresh the specifications in `DIR`; may be given more than once (default: the directories "+
		"that have them)")
	addContents(cmd, f, "the installed one, or "+defaultHook)
	addFormat(cmd, f, "that of the installed ones, or json")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print only errors and warnings")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "print the changes as a unified diff, and change nothing")
	cmd.RunE = func(*cobra.Command, []string) error {
		if err := f.checkFormat(); err != nil {
			return err
		}
		r := refreshed{Took: map[string]float64{}}
		began := time.Now()
		i := cdi.Installation{Layout: a.layout, Dirs: f.dirs, Format: cdi.Format(f.format)}
		var err error
		r.Refreshed, err = i.Refresh(dry, a.specDirs(f), func() (*planner.Plan, cdi.Options, error) {
			r.lap("waiting", &began)
			return a.refreshPlan(&r, host, f, dry, &began)
		})
		r.lap("install", &began)
		for _, part := range []string{"waiting", "peermem", "nvml", "sysfs", "plan", "install"} {
			a.log.Debugf("%s took %.1f ms", part, r.Took[part])
		}
		if err != nil {
			return asRoot(err)
		}
		if _, err := os.Stat(a.layout.PlanFile()); err == nil && !dry {
			if err := a.installAnchor(); err != nil {
				return err
			}
		}
		r.Changed = len(r.Changes) > 0
		switch {
		case quiet:
		case form.value == formJSON:
			return a.printJSON(r)
		case dry:
			a.printDiffs(r.Changes)
		default:
			a.printRefreshed(r)
		}
		return nil
	}
	return cmd
}

// lap records the duration of a part and restarts the clock.
func (r *refreshed) lap(part string, began *time.Time) {
	now := time.Now()
	r.Took[part] += float64(now.Sub(*began).Microseconds()) / 1000
	*began = now
}

// refreshPlan detects GPUDirect RDMA, reads the host and plans.
func (a *app) refreshPlan(r *refreshed, host *hostFlags, f *specFlags, dry bool, began *time.Time) (*planner.Plan,
	cdi.Options, error) {
	c, err := config.Load(a.layout.ConfigFile())
	if err != nil {
		return nil, cdi.Options{}, err
	}
	found, err := cdi.FindPeermem(host.sysfs, host.proc)
	if err != nil {
		return nil, cdi.Options{}, err
	}
	o := host.options()
	if c.CDI.LoadPeermem && !dry && o.NVML != nil { // a recorded host cannot load modules
		if found, err = cdi.LoadPeermem(host.sysfs, host.proc, cdi.Modprobe); err != nil {
			a.log.Warn(err)
		}
	}
	r.Peermem = &found
	r.lap("peermem", began)

	if o.NVML != nil {
		o.NVML = timedNVML{o.NVML, r.Took}
	}
	h, err := reader.Sysfs(o)
	if err != nil {
		return nil, cdi.Options{}, err
	}
	r.lap("sysfs", began)
	r.Took["sysfs"] -= r.Took["nvml"]
	p, err := a.planFor(h, host.software, false)
	if err != nil {
		return nil, cdi.Options{}, err
	}
	if !dry {
		a.keepKnownPairs(p)
	}
	r.nics = len(p.plan.NICs)
	hook := f.hook
	if hook == "" {
		hook = cdi.InstalledHook(a.specDirs(f))
	}
	if hook, err = hookPath(hook); err != nil && cdi.Offers(p.plan) {
		return nil, cdi.Options{}, err
	}
	r.lap("plan", began)
	return p.plan, a.specOptions(p, host, hook, f.devRoot), nil
}

// timedNVML measures the time of NVML apart from sysfs: loading NVIDIA's library can take longer
// than the other parts together.
type timedNVML struct {
	topo.NVML
	took map[string]float64
}

func (n timedNVML) GPUs() ([]topo.NVMLGPU, error) {
	began := time.Now()
	defer func() { n.took["nvml"] += float64(time.Since(began).Microseconds()) / 1000 }()
	return n.NVML.GPUs()
}

// printRefreshed prints one line, or nothing without a change.
func (a *app) printRefreshed(r refreshed) {
	var wrote, removed []string
	for _, c := range r.Changes {
		switch {
		case c.Removed:
			removed = append(removed, c.Path)
		case c.Kind == "":
			wrote = append(wrote, c.Path)
		default:
			wrote = append(wrote, fmt.Sprintf("%s (%d devices)", c.Path, c.Devices))
		}
	}
	var parts []string
	if len(wrote) > 0 {
		parts = append(parts, "wrote "+strings.Join(wrote, ", "))
	}
	if len(removed) > 0 {
		parts = append(parts, "removed "+strings.Join(removed, ", "))
	}
	if r.Peermem != nil && r.Peermem.Loaded {
		parts = append(parts, "loaded "+r.Peermem.Module)
	}
	if len(parts) > 0 && r.nics > 0 && r.Nothing == "" {
		parts = append(parts, "NICs reach GPU memory by "+r.Peermem.String())
	}
	switch done := strings.Join(parts, "; "); {
	case r.Nothing != "":
		a.out.Println(strings.Join(append([]string{"No device to offer: " + r.Nothing}, parts...), "; "))
	case r.Kept != "":
		a.out.Printf("Nothing was changed: %s\n", r.Kept)
	case done != "":
		a.out.Printf("Refreshed: %s\n", done)
	}
}
