package engine

import (
	"fmt"
	"path/filepath"
	"slices"

	"github.com/peerlane/peerlane/cdi/engine/edit"
)

// findContainerd reads the configuration and its imports, in containerd's order: the importing
// file comes first.
func findContainerd(h Host) (d documents, err error) {
	d.main = h.ConfigFile
	if d.main == "" {
		d.main = filepath.Join(h.Root, "etc/containerd/config.toml")
	}
	seen := map[string]bool{}
	for pending := []string{d.main}; len(pending) > 0; pending = pending[1:] {
		path := pending[0]
		if seen[path] {
			continue
		}
		seen[path] = true
		if err := d.read(edit.TOML, path); err != nil {
			return d, err
		}
		one := d.of(path)
		if one == nil {
			continue
		}
		for _, pattern := range edit.Texts(edit.Get(one.tree, "imports")) {
			if !filepath.IsAbs(pattern) {
				pattern = filepath.Join(filepath.Dir(path), pattern)
			} else if h.Root != "/" {
				pattern = filepath.Join(h.Root, pattern)
			}
			pending = append(pending, dropIns(pattern)...)
		}
	}
	return d, nil
}

// containerdSocket returns the address of the daemon. From version 4 of the configuration on, a
// plugin holds the address.
func containerdSocket(d documents) string {
	for _, path := range [][]string{{"plugins", "io.containerd.server.v1.grpc", "address"}, {"grpc", "address"}} {
		value, _ := d.get(path...)
		if socket, ok := value.(string); ok && socket != "" {
			return socket
		}
	}
	return "/run/containerd/containerd.sock"
}

// planContainerd plans for the CRI, which has CDI with enable_cdi from 1.7 on, by default from 2.0
// on, and always from 2.4 on. The Go client and ctr apply CDI without configuration from 2.0 on.
func planContainerd(v version, d documents, w Wanted) (p decision, err error) {
	table, form, err := criTable(v, d)
	if err != nil {
		return p, err
	}
	at := func(names ...string) []string { return slices.Concat(table, names) }
	// 1.x takes the whole table of a plugin from the last file with the table, and 2.x takes the
	// keys of that file; so change that file.
	p.file = d.main
	for _, one := range d.all {
		if edit.Get(one.tree, table...) != nil {
			p.file = one.path
		}
	}
	cri := d
	if !v.atLeast(2, 0) {
		cri.all = nil // 1.x takes no key of the table from other files
		if one := d.of(p.file); one != nil {
			cri.all = []document{*one}
		}
	}
	p.restart = "systemctl restart containerd (containers go on)"
	p.cdi = CDIUnknown
	if v.atLeast(1, 7) {
		p.cdi = CDIOn
		if !v.atLeast(2, 4) {
			value, file := cri.get(at("enable_cdi")...)
			on, stated := value.(bool)
			if value != nil && !stated {
				return p, &typeError{file, "enable_cdi", "boolean"}
			}
			if !on && (stated || !v.atLeast(2, 0)) {
				p.cdi = CDIOff
				p.keys = append(p.keys, edit.Key{Path: at("enable_cdi"), Value: true})
			}
		}
		if err := p.addListed(cri, at("cdi_spec_dirs"), DefaultSpecDirs,
			slices.Concat(DefaultSpecDirs, w.SpecDirs)); err != nil {
			return p, err
		}
	}
	if p.cdi == CDIUnknown || w.Runtime {
		p.keys = append(p.keys, different(cri,
			edit.Key{Path: at("containerd", "runtimes", RuntimeName, "runtime_type"), Value: "io.containerd.runc.v2"},
			edit.Key{Path: at("containerd", "runtimes", RuntimeName, "options", "BinaryName"), Value: w.RuntimePath})...)
	}
	if d.of(p.file) == nil && len(p.keys) > 0 {
		p.keys = slices.Insert(p.keys, 0, edit.Key{Path: []string{"version"}, Value: form})
	}
	if p.cdi == CDIUnknown {
		p.notes = append(
			p.notes,
			byRuntime("by a RuntimeClass with the handler peerlane and the annotation peerlane.dev/devices"),
		)
	}
	if disabled, file := d.get("disabled_plugins"); slices.ContainsFunc(edit.Texts(disabled), func(name string) bool {
		return name == "cri" || name == table[len(table)-1] || name == "io.containerd.grpc.v1.cri"
	}) {
		p.notes = append(
			p.notes,
			fmt.Sprintf("%s switches the CRI off by disabled_plugins: a kubelet and crictl find nothing", file),
		)
	}
	if len(w.HooksDirs) > 0 {
		p.notes = append(p.notes, "it has no directory of hooks")
	}
	if len(w.RuntimeArgs) > 0 {
		p.notes = append(p.notes, "it passes no arguments to runtimes: --runtime-arg has no effect")
	}
	return p, nil
}

// criTable returns the table of the CRI's runtime for the version of the configuration, and that
// version.
func criTable(v version, d documents) (table []string, form int64, err error) {
	form = 2
	if v.atLeast(2, 0) {
		form = 3
	}
	if main := d.of(d.main); main != nil {
		form = 1 // the default of a file without a version
		value := edit.Get(main.tree, "version")
		if stated, ok := value.(int64); ok {
			form = stated
		} else if value != nil {
			return nil, 0, fmt.Errorf("%s: version is not a number", d.main)
		}
	}
	switch {
	case form <= 1: // 2.x migrates the file when it reads the file
		return []string{"plugins", "cri"}, form, nil
	case form == 2:
		return []string{"plugins", "io.containerd.grpc.v1.cri"}, form, nil
	case form > 4:
		// containerd migrates versions, and a migration may have moved the table.
		return nil, 0, &formError{d.main, form}
	}
	return []string{"plugins", "io.containerd.cri.v1.runtime"}, form, nil
}
