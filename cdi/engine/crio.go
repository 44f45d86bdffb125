package engine

import (
	"slices"

	"github.com/peerlane/peerlane/cdi/engine/edit"
)

func findCRIO(h Host) (documents, error) {
	return readWithDropIns(h, []string{"etc/crio/crio.conf"}, "etc/crio/crio.conf.d", "*")
}

// planCRIO plans for CRI-O, which has CDI from 1.23 on.
func planCRIO(v version, d documents, w Wanted) (p decision, err error) {
	p.cdi = CDIUnknown
	if v.atLeast(1, 23) {
		p.cdi = CDIOn
		if err := p.addListed(d, []string{"crio", "runtime", "cdi_spec_dirs"}, DefaultSpecDirs,
			slices.Concat(DefaultSpecDirs, w.SpecDirs)); err != nil {
			return p, err
		}
	}
	if err := p.addListed(d, []string{"crio", "runtime", "hooks_dir"}, []string{"/usr/share/containers/oci/hooks.d"},
		w.HooksDirs); err != nil {
		return p, err
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
