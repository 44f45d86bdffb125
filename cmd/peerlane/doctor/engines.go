package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/peerlane/peerlane/cdi/engine"
)

var engineChecks = []Check{{
	Name: "engine-cdi", subject: "engines",
	source: "the versions of dockerd, containerd, crio and podman, and their configuration: /etc/docker/daemon.json, " +
		"/etc/containerd/config.toml with its imports, /etc/crio/crio.conf and crio.conf.d",
	why: "an engine without CDI refuses --device peerlane.dev/lane=N",
	remedy: "peerlane runtime configure enables CDI in the engine's configuration, and reports the effects of a " +
		"restart; an engine without CDI needs peerlane-runtime (docs/containers.md)",
	run: checkEngines,
}}

// known is a container engine and the probe of its CDI support.
type known struct {
	name, program string
	look          func(ctx context.Context, h *Host, version [3]int) (Finding, bool)
}

var engines = []known{
	{"Docker", "dockerd", lookDocker},
	{"containerd", "containerd", lookContainerd},
	{"CRI-O", "crio", lookCRIO},
	{"Podman", "podman", lookPodman},
}

func checkEngines(ctx context.Context, h *Host) []Finding {
	var list []Finding
	for _, e := range engines {
		path := h.program(e.program)
		if path == "" {
			continue
		}
		number, err := h.version(ctx, path)
		if err != nil {
			list = append(list, unknown(e.name, "%v", err))
			continue
		}
		f, relevant := e.look(ctx, h, number)
		if !relevant {
			continue
		}
		f.On = fmt.Sprintf("%s %s", e.name, dotted(number))
		list = append(list, f)
	}
	if len(list) == 0 {
		return notApplicable("no engine is installed that is known here")
	}
	return list
}

// restarts says how the unit of an engine loads a new configuration, and which containers that
// ends. Users paste remedies, so a remedy that ends containers begins with a warning.
var restarts = map[string]string{
	"docker":     "systemctl restart docker ends all of its containers, unless live-restore is on: choose the time",
	"containerd": "systemctl restart containerd (containers go on)",
	"crio":       "systemctl restart crio (containers go on)",
}

// reads checks that an engine reads a directory with Peerlane's specifications.
func (h *Host) reads(dirs []string, key, unit string) (Finding, bool) {
	for _, dir := range h.SpecDirs {
		files, err := filepath.Glob(filepath.Join(dir, "peerlane.dev-*"))
		if err != nil || len(files) == 0 {
			continue
		}
		if !slices.ContainsFunc(dirs, func(d string) bool { return resolved(h.path(d)) == resolved(dir) }) {
			return failure("", "it reads %s alone, and the specifications are in %s", strings.Join(dirs, ", "),
				dir).remedy("add %s to %s; it is read with the next start: %s", dir, key, restarts[unit]), true
		}
	}
	return Finding{}, false
}

// resolved returns path without symbolic links: /var/run is a link to /run.
func resolved(path string) string {
	if to, err := filepath.EvalSymlinks(path); err == nil {
		return to
	}
	return filepath.Clean(path)
}

func lookDocker(_ context.Context, h *Host, version [3]int) (Finding, bool) {
	var c struct {
		Features map[string]bool `json:"features"`
		Dirs     []string        `json:"cdi-spec-dirs"`
		Runtimes map[string]struct {
			Path string `json:"path"`
		} `json:"runtimes"`
	}
	path := h.path("etc/docker/daemon.json")
	text, err := read(path)
	if err == nil && text != "" {
		err = json.Unmarshal([]byte(text), &c)
	}
	if err != nil && !absent(err) {
		return unknown("", "%s: %s", path, denied(err)), true
	}
	on, set := c.Features["cdi"]
	off := below(version, 25) || set && !on || !set && below(version, 28, 2)
	for name, r := range c.Runtimes {
		if off && filepath.Base(r.Path) == "peerlane-runtime" {
			return ok("", "CDI is off, and the runtime %s is peerlane-runtime, which does its work", cut(name)), true
		}
	}
	merge := "peerlane runtime configure --runtime docker; Docker reads it with its next start: " + restarts["docker"]
	switch {
	case below(version, 25):
		return failure("", "this version has no CDI; 25 is the first that has").remedy(
			"update Docker, or use peerlane-runtime (docs/containers.md)"), true
	case set && !on:
		return failure("", "CDI is switched off in %s", path).remedy("%s", merge), true
	case !set && below(version, 28, 2):
		return failure("", "CDI is off unless features.cdi is set, and %s does not set "+
			"it", path).remedy("%s", merge), true
	}
	if len(c.Dirs) > 0 {
		if f, wrong := h.reads(c.Dirs, "cdi-spec-dirs in /etc/docker/daemon.json", "docker"); wrong {
			return f, true
		}
	}
	return ok("", "CDI is on"), true
}

// criPlugins are the names of containerd's CRI plugin, newest first.
var criPlugins = []string{"io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri"}

// lookContainerd uses package engine, which follows imports.
func lookContainerd(ctx context.Context, h *Host, version [3]int) (Finding, bool) {
	s, err := engine.Host{Root: h.Root, Version: dotted(version)}.Look(ctx, engine.Containerd, engine.Wanted{})
	if err != nil {
		return unknown("", "%s", denied(err)), true
	}
	if slices.ContainsFunc(s.Notes, func(note string) bool { return strings.Contains(note, "disabled_plugins") }) {
		return Finding{}, false // containerd serves Docker, which has CDI support of its own
	}
	switch {
	case s.CDI == engine.CDIUnknown:
		return warning("", "this version has no CDI for pods; 1.7 is the first that has").remedy(
			"update containerd, or use peerlane-runtime (docs/containers.md)"), true
	case s.CDI != engine.CDIOn:
		return warning("",
			"CDI is off for pods").remedy(
			"peerlane runtime configure --runtime containerd sets %s in %s; then %s", strings.Join(s.Change,
				", "), s.File, restarts["containerd"]), true
	}
	var c struct {
		Plugins map[string]struct {
			Dirs []string `toml:"cdi_spec_dirs"`
		} `toml:"plugins"`
	}
	text, err := read(s.File)
	if err == nil {
		_, err = toml.Decode(text, &c)
	}
	if err != nil && !absent(err) {
		return unknown("", "%s: %s", s.File, denied(err)), true
	}
	stated := false
	for _, name := range criPlugins {
		if dirs := c.Plugins[name].Dirs; len(dirs) > 0 {
			stated = true
			if f, wrong := h.reads(dirs, fmt.Sprintf(`cdi_spec_dirs of [plugins."%s"] in %s`, name, s.File),
				"containerd"); wrong {
				return f, true
			}
		}
	}
	// The last file that sets cdi_spec_dirs differs from the file with the plugin's table.
	if !stated && slices.ContainsFunc(s.Change, func(key string) bool { return strings.Contains(key, "cdi_spec_dirs") }) {
		return unknown("", "CDI is on, and a file that %s imports names other directories of specifications "+
			"(cdi_spec_dirs)",
			h.path("etc/containerd/config.toml")).
			remedy("containerd config dump | grep cdi_spec_dirs, and see that %s are there",
				strings.Join(engine.DefaultSpecDirs, " and ")), true
	}
	return ok("", "CDI is on"), true
}

func lookCRIO(_ context.Context, h *Host, version [3]int) (Finding, bool) {
	if below(version, 1, 23) {
		return failure("", "this version has no CDI; 1.23 is the first that has").remedy("update CRI-O"), true
	}
	files, _ := filepath.Glob(h.path("etc/crio/crio.conf.d/*")) // the pattern is valid
	for _, path := range append([]string{h.path("etc/crio/crio.conf")}, files...) {
		var c struct {
			CRIO struct {
				Runtime struct {
					Dirs []string `toml:"cdi_spec_dirs"`
				} `toml:"runtime"`
			} `toml:"crio"`
		}
		text, err := read(path)
		if err == nil {
			_, err = toml.Decode(text, &c)
		}
		if err != nil && !absent(err) {
			return unknown("", "%s: %s", path, denied(err)), true
		}
		if dirs := c.CRIO.Runtime.Dirs; len(dirs) > 0 {
			if f, wrong := h.reads(dirs, "cdi_spec_dirs in "+path, "crio"); wrong {
				return f, true
			}
		}
	}
	return ok("", "CDI is on"), true
}

func lookPodman(_ context.Context, _ *Host, version [3]int) (Finding, bool) {
	if below(version, 4, 1) {
		return failure("", "this version has no CDI; 4.1 is the first that has").remedy(
			"update Podman, or use a directory of hooks (docs/containers.md)"), true
	}
	return ok("", "CDI is on"), true
}
