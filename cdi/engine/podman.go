package engine

import (
	"path/filepath"
	"slices"

	"github.com/peerlane/peerlane/cdi/engine/edit"
)

// DropIn is the name of Peerlane's own file where engines read directories.
const dropIn = "99-peerlane.conf"

func findPodman(h Host) (d documents, err error) {
	if h.ConfigFile != "" {
		d.main = h.ConfigFile
		return d, d.read(edit.TOML, d.main)
	}
	below := filepath.Join(h.Root, "etc/containers/containers.conf.d")
	d.main = filepath.Join(below, dropIn)
	files := []string{
		filepath.Join(h.Root, "usr/share/containers/containers.conf"),
		filepath.Join(h.Root, "etc/containers/containers.conf"),
	}
	for _, path := range append(files, dropIns(filepath.Join(below, "*.conf"))...) {
		if err := d.read(edit.TOML, path); err != nil {
			return d, err
		}
	}
	return d, nil
}

// planPodman plans for Podman, which has CDI from 4.1 on. Only directories are configurable.
func planPodman(v version, d documents, w Wanted) (p decision, err error) {
	p.cdi = CDIUnknown
	if v.atLeast(4, 1) {
		p.cdi = CDIOn
		dirs, err := listed(
			d,
			[]string{"engine", "cdi_spec_dirs"},
			DefaultSpecDirs,
			slices.Concat(DefaultSpecDirs, w.SpecDirs),
		)
		if err != nil {
			return p, err
		}
		if dirs != nil {
			p.keys = append(p.keys, *dirs)
			if !v.atLeast(5, 5) {
				p.notes = append(
					p.notes,
					"Podman up to 5.4 ignores cdi_spec_dirs: install the specifications in /etc/cdi",
				)
			}
		}
	}
	hooks, err := listed(
		d,
		[]string{"engine", "hooks_dir"},
		[]string{"/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"},
		w.HooksDirs,
	)
	if err != nil {
		return p, err
	}
	if hooks != nil {
		p.keys = append(p.keys, *hooks)
	}
	if p.cdi == CDIUnknown || w.Runtime {
		p.keys = append(
			p.keys,
			different(d, edit.Key{Path: []string{"engine", "runtimes", RuntimeName}, Value: []string{w.RuntimePath}})...)
	}
	if p.cdi == CDIUnknown {
		p.notes = append(p.notes, byRuntime("podman --runtime peerlane run -e PEERLANE_DEVICES=… IMAGE"))
	}
	if len(w.RuntimeArgs) > 0 {
		p.notes = append(
			p.notes,
			"its configuration has no arguments for runtimes (use --runtime-flag): --runtime-arg has no effect",
		)
	}
	return p, nil
}
