package engine

import (
	"path/filepath"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/cdi/engine/edit"
)

func findDocker(h Host) (d documents, err error) {
	d.main = h.ConfigFile
	if d.main == "" {
		d.main = filepath.Join(h.Root, "etc/docker/daemon.json")
	}
	return d, d.read(edit.JSON, d.main)
}

// dockerSocket returns the first socket in the daemon's configuration.
func dockerSocket(d documents) string {
	hosts, _ := d.get("hosts")
	for _, host := range edit.Texts(hosts) {
		if socket, ok := strings.CutPrefix(host, "unix://"); ok && socket != "" {
			return socket
		}
	}
	return "/var/run/docker.sock"
}

// planDocker plans for Docker, which has CDI with features.cdi from 25.0 on, and by default from
// 28.2 on.
func planDocker(v version, d documents, w Wanted) (p decision, err error) {
	// Moby's module has version numbers of its own: its version 2 is Docker 29. Docker itself went
	// from 1 to 17.
	if v.major == 2 {
		v = version{29, 0}
	}
	p.cdi = CDIUnknown
	if v.atLeast(25, 0) {
		value, file := d.get("features", "cdi")
		on, stated := value.(bool)
		if value != nil && !stated {
			return p, &typeError{file, "features.cdi", "boolean"}
		}
		p.cdi = CDIOn
		if !on && (stated || !v.atLeast(28, 2)) {
			p.cdi = CDIOff
			p.keys = append(p.keys, edit.Key{Path: []string{"features", "cdi"}, Value: true})
		}
		if err := p.addListed(d, []string{"cdi-spec-dirs"}, DefaultSpecDirs,
			slices.Concat(DefaultSpecDirs, w.SpecDirs)); err != nil {
			return p, err
		}
		if len(p.keys) > 0 {
			p.restart = "systemctl restart docker (which ends its containers, unless live-restore is on)"
		}
	}
	if p.cdi == CDIUnknown || w.Runtime {
		table := []string{"runtimes", RuntimeName}
		p.keys = append(p.keys, different(d, edit.Key{Path: append(table[:2:2], "path"), Value: w.RuntimePath})...)
		if len(w.RuntimeArgs) > 0 {
			p.keys = append(
				p.keys,
				different(d, edit.Key{Path: append(table[:2:2], "runtimeArgs"), Value: w.RuntimeArgs})...)
		}
		if p.restart == "" {
			p.restart = "systemctl reload docker"
		}
	}
	if p.cdi == CDIUnknown {
		p.notes = append(p.notes, byRuntime("docker run --runtime peerlane -e PEERLANE_DEVICES=… IMAGE"))
	}
	if len(w.HooksDirs) > 0 {
		p.notes = append(p.notes, "it has no directory of hooks")
	}
	return p, nil
}

// different returns the keys whose value in the configuration differs.
func different(d documents, keys ...edit.Key) (list []edit.Key) {
	for _, k := range keys {
		if value, _ := d.get(k.Path...); !edit.Same(value, k.Value) {
			list = append(list, k)
		}
	}
	return list
}

func byRuntime(line string) string {
	return "this version does not support CDI: its containers get devices from peerlane-runtime, " +
		line + ", as far as [runtime] devices of config.toml permits"
}
