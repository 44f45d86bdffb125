package engine

import (
	"path/filepath"
	"slices"

	"github.com/peerlane/peerlane/cdi/engine/edit"
)

func findCRIO(h Host) (d documents, err error) {
	if h.ConfigFile != "" {
		d.main = h.ConfigFile
		return d, d.read(edit.TOML, d.main)
	}
	below := filepath.Join(h.Root, "etc/crio/crio.conf.d")
	d.main = filepath.Join(below, dropIn)
	for _, path := range append([]string{filepath.Join(h.Root, "etc/crio/crio.conf")},
		dropIns(filepath.Join(below, "*"))...) {
		if err := d.read(edit.TOML, path); err != nil {
			return d, err
		}
	}
	return d, nil
}

// planCRIO plans for CRI-O, which has CDI from 1.23 on.
func planCRIO(v version, d documents, w Wanted) (p decision, err error) {
	p.cdi = CDIUnknown
	if v.atLeast(1, 23) {
		p.cdi = CDIOn
		dirs, err := listed(
			d,
			[]string{"crio", "runtime", "cdi_spec_dirs"},
			DefaultSpecDirs,
			slices.Concat(DefaultSpecDirs, w.SpecDirs),
		)
		if err != nil {
			return p, err
		}
		if dirs != nil {
			p.keys = append(p.keys, *dirs)
		}
	}
	hooks, err := listed(
		d,
		[]string{"crio", "runtime", "hooks_dir"},
		[]string{"/usr/share/containers/oci/hooks.d"},
		w.HooksDirs,
	)
	if err != nil {
		return p, err
	}
	if hooks != nil {
		p.keys = append(p.keys, *hooks)
	}
	if p.cdi == CDIUnknown || w.Runtime {
		table := []string{"crio", "runtime", "runtimes", RuntimeName}
		p.keys = append(p.keys, different(d,
			edit.Key{Path: append(table[:4:4], "runtime_path"), Value: w.RuntimePath},
			edit.Key{Path: append(table[:4:4], "runtime_type"), Value: "oci"})...)
	}
	if p.cdi == CDIUnknown {
		p.notes = append(
			p.notes,
			byRuntime("by a RuntimeClass with the handler peerlane and the annotation peerlane.dev/devices"),
		)
	}
	if len(w.RuntimeArgs) > 0 {
		p.notes = append(p.notes, "it passes no arguments to runtimes: --runtime-arg has no effect")
	}
	p.restart = "systemctl restart crio (containers go on)"
	return p, nil
}
