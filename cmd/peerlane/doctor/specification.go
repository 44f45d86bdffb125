package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/topo"
)

var specificationChecks = []Check{
	{
		Name: "configuration", subject: "installation", source: "/etc/peerlane/config.toml, and the plan that it makes " +
			"of this host",
		why:    "with an unreadable or unfitting configuration the hook can refuse containers with a lane",
		remedy: "correct the key in the finding; docs/configuration.md describes the keys",
		run:    checkConfiguration,
	},
	{
		Name: "specification", subject: "installation", source: "the CDI specifications and the plan, compared with " +
			"those of the current host (peerlane cdi validate)",
		why:    "a stale specification gives another GPU's lane or none; engines ignore damaged specifications silently",
		remedy: "peerlane cdi refresh",
		run:    checkSpecification,
	},
	{
		Name: "hook", subject: "installation", source: "the hook that the specifications name: its file, its owner, " +
			"and its mount (/proc/self/mountinfo)",
		why:    "if runtimes cannot execute it, no container with a lane starts",
		remedy: "install it again, or peerlane cdi refresh --hook PATH",
		run:    checkHook,
	},
	{
		Name: "dev-char", subject: "installation", source: "/dev/char/MAJOR:MINOR of the nodes of GPUs and NICs",
		why:    "without the link a container loses the device at the next systemctl daemon-reload",
		remedy: "nvidia-ctk system create-dev-char-symlinks --create-all",
		run:    checkDevChar,
	},
}

func checkConfiguration(_ context.Context, h *Host) []Finding {
	if _, err := h.configuration(); err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return []Finding{unknown(h.Layout.ConfigFile(), "%s", denied(err))}
		}
		return []Finding{failure(h.Layout.ConfigFile(), "%v", err)}
	}
	if _, err := h.topology(); err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	if _, err := h.readPlan(); err != nil {
		return []Finding{failure(h.Layout.ConfigFile(), "%v", err)}
	}
	return []Finding{ok("host", "it can be read, and fits the host")}
}

// findDrift compares the installed specifications with the host.
func (h *Host) findDrift() (d drift, err error) {
	files, err := cdi.Load(h.SpecDirs)
	if err != nil {
		return d, err
	}
	d.files = len(files)
	plan, err := h.readPlan()
	if err != nil {
		return d, err
	}
	c, err := h.configuration()
	if err != nil {
		return d, err
	}
	dirs, err := cdi.InUse(h.SpecDirs)
	if err != nil {
		return d, err
	}
	v := cdi.Validator{
		Installation: cdi.Installation{Layout: h.Layout, Dirs: dirs},
		Files:        files, Live: plan,
		Options: cdi.Options{Layout: h.Layout, Tenancy: c.CDI.Tenancy, DevRoot: h.Root, Proc: h.Proc},
	}
	d.list, err = v.Validate()
	d.hook = v.Options.HookPath
	return d, err
}

func (h *Host) fit() (drift, error) { h.prepare(); return h.drift() }

func checkSpecification(_ context.Context, h *Host) []Finding {
	d, err := h.fit()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	var list []Finding
	for _, drift := range d.list {
		if drift.Kind != cdi.DriftHook {
			list = append(list, failure(drift.Subject, "%s", drift.Message).remedy("%s",
				drift.Remedy).touching(h.lanesNamed(drift.Subject)))
		}
	}
	if d.files == 0 && len(list) == 0 {
		return notApplicable("none is installed, and this host has no lane to offer")
	}
	return orFine(list, "%d specifications fit this host", d.files)
}

// lanesNamed returns the lanes of the subject of a drift: one lane, or the lanes of a NIC; nil for
// any other subject, which concerns the whole host.
func (h *Host) lanesNamed(subject string) []int {
	p, err := h.readPlan()
	if err != nil {
		return nil
	}
	if name, isLane := strings.CutPrefix(subject, cdi.KindLane+"="); isLane {
		if g, err := p.GPU(name); err == nil {
			return []int{g.Index}
		}
		return nil
	}
	if slices.ContainsFunc(p.NICs, func(n topo.NIC) bool { return n.Name == subject }) {
		return h.lanesOfNIC(subject)
	}
	return nil
}

func checkHook(_ context.Context, h *Host) []Finding {
	d, err := h.fit()
	switch {
	case err != nil:
		return []Finding{unknown("host", "%s", denied(err))}
	case d.files == 0:
		return notApplicable("no specification names one")
	}
	var list []Finding
	for _, drift := range d.list {
		if drift.Kind == cdi.DriftHook {
			list = append(list, failure(drift.Subject, "%s", drift.Message).remedy("%s", drift.Remedy))
		}
	}
	mounts, err := read(h.proc("self/mountinfo"))
	if err != nil {
		return append(list, unknown(d.hook, "%s", denied(err)))
	}
	if real, err := filepath.EvalSymlinks(d.hook); err == nil {
		if at, options := mountOf(mounts, real); slices.Contains(options, "noexec") {
			list = append(list, failure(d.hook, "it lies on %s, which is mounted noexec",
				at).remedy("mount -o remount,exec %s, and take noexec out of /etc/fstab", at))
		}
	}
	if len(list) == 0 {
		return []Finding{ok(d.hook, "it can be run")}
	}
	return list
}

// mountOf returns the mount point and the options of the mount that contains a path, from
// /proc/self/mountinfo (Documentation/filesystems/proc.rst, 3.5).
func mountOf(mountinfo, path string) (at string, options []string) {
	for line := range strings.Lines(mountinfo) {
		f := strings.Fields(line)
		if len(f) < 6 {
			continue
		}
		point := unescape(f[4])
		inside := point == "/" || path == point || strings.HasPrefix(path, point+"/")
		// A later mount on the same point hides the earlier one.
		if inside && len(point) >= len(at) {
			at, options = point, strings.Split(f[5], ",")
		}
	}
	return at, options
}

// unescape decodes the kernel's octal escapes, such as \040 for a blank.
func unescape(s string) string {
	return octal.ReplaceAllStringFunc(s, func(e string) string {
		var c byte
		fmt.Sscanf(e[1:], "%o", &c) // three octal digits
		return string([]byte{c})
	})
}

var octal = regexp.MustCompile(`\\[0-3][0-7]{2}`)

func checkDevChar(_ context.Context, h *Host) []Finding {
	t, err := h.topology()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	type node struct {
		path, number string
		lanes        []int
	}
	var nodes []node
	majors, err := read(h.proc("devices"))
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	if major := majorOf(majors, "nvidia", "nvidia-frontend"); major != "" {
		for _, g := range t.GPUs {
			if g.Vendor == "" && g.Minor >= 0 {
				nodes = append(nodes, node{fmt.Sprintf("nvidia%d", g.Minor), fmt.Sprintf("%s:%d", major, g.Minor),
					h.lanesOfGPU(g.BusID)})
			}
		}
		nodes = append(nodes, node{"nvidiactl", major + ":255", nil})
	}
	if major := majorOf(majors, "nvidia-uvm"); major != "" {
		nodes = append(nodes, node{"nvidia-uvm", major + ":0", nil}, node{"nvidia-uvm-tools", major + ":1", nil})
	}
	for _, n := range t.NICs {
		if n.Uverbs == "" {
			continue
		}
		if number, err := read(h.sys("class/infiniband_verbs", n.Uverbs, "dev")); err == nil &&
			deviceNumber.MatchString(number) {
			nodes = append(nodes, node{"infiniband/" + n.Uverbs, number, h.lanesOfNIC(n.Name)})
		}
	}
	var list []Finding
	seen := 0
	for _, n := range nodes {
		if _, err := os.Lstat(h.path("dev", n.path)); absent(err) {
			continue // the check of the specification reports a relevant error
		}
		seen++
		if _, err := os.Lstat(h.path("dev/char", n.number)); absent(err) {
			list = append(list, warning("/dev/"+n.path, "there is no /dev/char/%s", n.number).remedy("ln -s ../%s "+
				"/dev/char/%s",
				n.path, n.number).touching(n.lanes))
		} else if err != nil {
			list = append(list, unknown("/dev/"+n.path, "%s", denied(err)).touching(n.lanes))
		}
	}
	return orFine(list, "all %d device nodes of GPUs and NICs have their links", seen)
}

var deviceNumber = regexp.MustCompile(`^\d{1,9}:\d{1,9}$`)

// majorOf returns the major number of a driver in the text of /proc/devices, or "".
func majorOf(devices string, names ...string) string {
	for line := range strings.Lines(devices) {
		if f := strings.Fields(line); len(f) == 2 && slices.Contains(names, f[1]) && deviceNumber.MatchString(f[0]+":0") {
			return f[0]
		}
	}
	return ""
}
