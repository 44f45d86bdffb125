package engine

import (
	"slices"

	"github.com/peerlane/peerlane/cdi/engine/edit"
)

// DropIn is the name of Peerlane's own file where engines read directories.
const dropIn = "99-peerlane.conf"

func findPodman(h Host) (documents, error) {
	files := []string{"usr/share/containers/containers.conf", "etc/containers/containers.conf"}
	return readWithDropIns(h, files, "etc/containers/containers.conf.d", "*.conf")
}

// planPodman plans for Podman, which has CDI from 4.1 on. Only directories are configurable.
func planPodman(v version, d documents, w Wanted) (p decision, err error) {
	p.cdi = CDIUnknown
	if v.atLeast(4, 1) {
		p.cdi = CDIOn
		if err := p.addListed(d, []string{"engine", "cdi_spec_dirs"}, DefaultSpecDirs,
			slices.Concat(DefaultSpecDirs, w.SpecDirs)); err != nil {
			return p, err
		}
		if len(p.keys) > 0 && !v.atLeast(5, 5) {
			p.notes = append(
				p.notes,
				"Podman up to 5.4 ignores cdi_spec_dirs: install the specifications in /etc/cdi",
			)
		}
	}
	if err := p.addListed(d, []string{"engine", "hooks_dir"},
		[]string{"/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"}, w.HooksDirs); err != nil {
		return p, err
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
