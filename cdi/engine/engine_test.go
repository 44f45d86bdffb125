package engine

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// files describes the files below a directory, with modes and targets of links.
func files(t *testing.T, root string) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if d.Type()&fs.ModeSymlink != 0 {
			to, err := os.Readlink(path)
			found[name] = "-> " + to
			return err
		}
		text, err := os.ReadFile(path)
		if info, err := d.Info(); err == nil && info.Mode().Perm() != 0o644 {
			name += " " + info.Mode().String()
		}
		found[name] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func lay(t *testing.T, root string, all map[string]string) {
	t.Helper()
	for name, text := range all {
		put(t, filepath.Join(root, name), text)
	}
}

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

const (
	daemonJSON  = "etc/docker/daemon.json"
	configTOML  = "etc/containerd/config.toml"
	podmanFile  = "etc/containers/containers.conf.d/99-peerlane.conf"
	crioFile    = "etc/crio/crio.conf.d/99-peerlane.conf"
	runtimeFile = "/usr/bin/peerlane-runtime"
)

// debian12 is the file of Debian's containerd 1.6, debian13 the first lines of `containerd config
// default` of 2.x, and kind a file as tools of Kubernetes write.
const (
	debian12 = `version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.internal.v1.opt"]
    path = "/var/lib/containerd"
`
	version3 = `version = 3
root = '/var/lib/containerd'
imports = ['/etc/containerd/conf.d/*.toml']

# The CRI.
[plugins]
  [plugins.'io.containerd.cri.v1.runtime']
    enable_cdi = false # somebody's choice
    cdi_spec_dirs = ['/etc/cdi'] # of the image

    [plugins.'io.containerd.cri.v1.runtime'.containerd]
      default_runtime_name = 'runc'
`
)

var golden = []struct {
	name, engine, version string
	wanted                Wanted
	files                 map[string]string
	file, want            string // "" for no change
	cdi                   CDI
	restart               string // substring
	note                  string // substring of a note
}{
	{
		name:    "Docker 20.10 without a configuration",
		engine:  docker,
		version: "20.10.24",
		cdi:     CDIUnknown,
		restart: "reload",
		note:    "docker run --runtime peerlane",
		file:    daemonJSON,
		want:    "{\n  \"runtimes\": {\n    \"peerlane\": {\n      \"path\": \"/usr/bin/peerlane-runtime\"\n    }\n  }\n}\n",
	},
	{
		name:    "Docker 24, beside another runtime",
		engine:  docker,
		version: "24.0.7",
		cdi:     CDIUnknown,
		restart: "reload",
		note:    "--runtime peerlane",
		wanted:  Wanted{RuntimeArgs: []string{"--peerlane-device=peerlane.dev/lane=3"}},
		files: map[string]string{
			daemonJSON: "{\n    \"default-runtime\": \"nvidia\",\n    \"runtimes\": {\n        \"nvidia\": {\n            " +
				"\"args\": [],\n            \"path\": \"nvidia-container-runtime\"\n        }\n    }\n}\n",
		},
		file: daemonJSON,
		want: "{\n    \"default-runtime\": \"nvidia\",\n    \"runtimes\": {\n        \"nvidia\": {\n            \"args\": " +
			"[],\n            \"path\": \"nvidia-container-runtime\"\n        },\n        \"peerlane\": {\n            " +
			"\"path\": \"/usr/bin/peerlane-runtime\",\n            \"runtimeArgs\": [\n                " +
			"\"--peerlane-device=peerlane.dev/lane=3\"\n            ]\n        }\n    }\n}\n",
	},
	{name: "Docker 25", engine: docker, version: "25.0.3", cdi: CDIOff, restart: "systemctl restart docker",
		files: map[string]string{
			daemonJSON: `{"live-restore": true}`,
		}, file: daemonJSON, want: `{"live-restore": true,"features": {"cdi":true}}`},
	{name: "Docker 28.1", engine: docker, version: "28.1.1", cdi: CDIOff, restart: "systemctl restart docker",
		file: daemonJSON, want: "{\n  \"features\": {\n    \"cdi\": true\n  }\n}\n"},
	{
		name:    "Docker 26 that has it",
		engine:  docker,
		version: "26.1.5+dfsg1",
		cdi:     CDIOn,
		files:   map[string]string{daemonJSON: `{"features": {"cdi": true}}`},
	},
	{name: "Docker 28.2", engine: docker, version: "28.2.2", cdi: CDIOn},
	{name: "Docker 29", engine: docker, version: "29.0.1", cdi: CDIOn},
	{name: "Docker 29 by its module", engine: docker, version: "v2.0.0-beta.24", cdi: CDIOn},
	{
		name:    "Docker 29, switched off",
		engine:  docker,
		version: "29.0.1",
		cdi:     CDIOff,
		restart: "systemctl restart docker",
		files: map[string]string{
			daemonJSON: "{\"features\": {\"cdi\": false}, \"cdi-spec-dirs\": [\"/var/run/cdi/\"]}",
		},
		file: daemonJSON,
		want: "{\"features\": {\"cdi\": true}, \"cdi-spec-dirs\": [\"/var/run/cdi/\",\"/etc/cdi\"]}",
	},
	{
		name:    "Docker 29, another directory",
		engine:  docker,
		version: "29.0.1",
		cdi:     CDIOn,
		restart: "systemctl restart docker",
		wanted:  Wanted{SpecDirs: []string{"/opt/cdi"}},
		file:    daemonJSON,
		want:    "{\n  \"cdi-spec-dirs\": [\n    \"/etc/cdi\",\n    \"/var/run/cdi\",\n    \"/opt/cdi\"\n  ]\n}\n",
	},
	{
		name:    "Docker 29, the runtime as well",
		engine:  docker,
		version: "29.0.1",
		cdi:     CDIOn,
		restart: "reload",
		wanted:  Wanted{Runtime: true},
		files:   map[string]string{daemonJSON: "\n"},
		file:    daemonJSON,
		want:    "{\n  \"runtimes\": {\n    \"peerlane\": {\n      \"path\": \"/usr/bin/peerlane-runtime\"\n    }\n  }\n}\n",
	},

	{
		name:    "containerd 1.6 of Debian 12",
		engine:  Containerd,
		version: "1.6.20~ds1",
		cdi:     CDIUnknown,
		restart: "systemctl restart containerd",
		note:    "RuntimeClass",
		files:   map[string]string{configTOML: debian12},
		file:    configTOML,
		want: debian12 + `
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.peerlane]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.peerlane.options]
BinaryName = "/usr/bin/peerlane-runtime"
`,
	},
	{
		name:    "containerd 1.7 without a configuration",
		engine:  Containerd,
		version: "1.7.24",
		cdi:     CDIOff,
		restart: "systemctl restart containerd",
		file:    configTOML,
		want:    "version = 2\n\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n",
	},
	{
		name:    "containerd 1.7 of Debian 13",
		engine:  Containerd,
		version: "1.7.24",
		cdi:     CDIOff,
		restart: "systemctl restart containerd",
		files:   map[string]string{configTOML: debian12},
		file:    configTOML,
		want:    strings.Replace(debian12, "cri\"]\n", "cri\"]\n  enable_cdi = true\n", 1),
	},
	{
		name:    "containerd 1.7 with a configuration of version 1",
		engine:  Containerd,
		version: "1.7.24",
		cdi:     CDIOff,
		restart: "systemctl restart containerd",
		files:   map[string]string{configTOML: "oom_score = 0\n[plugins.cri]\n  sandbox_image = \"pause\"\n"},
		file:    configTOML,
		want:    "oom_score = 0\n[plugins.cri]\n  sandbox_image = \"pause\"\n  enable_cdi = true\n",
	},
	{
		name:    "containerd 1.7 with an import that has the CRI",
		engine:  Containerd,
		version: "1.7.24",
		cdi:     CDIOff,
		restart: "systemctl restart containerd",
		files: map[string]string{
			configTOML: "version = 2\nimports = " +
				"[\"conf.d/*.toml\"]\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n",
			"etc/containerd/conf.d/99-nvidia.toml": "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  enable_cdi = " +
				"false # nvidia\n",
			"etc/containerd/conf.d/x.conf": "[torn",
		},
		file: "etc/containerd/conf.d/99-nvidia.toml",
		want: "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  enable_cdi = true # nvidia\n",
	},
	{name: "containerd 2 without a configuration", engine: Containerd, version: "2.1.0", cdi: CDIOn},
	{
		name:    "containerd 2 with a configuration of version 2",
		engine:  Containerd,
		version: "2.0.0",
		cdi:     CDIOn,
		files:   map[string]string{configTOML: debian12},
	},
	{
		name:    "containerd 2 with a configuration of Docker's package",
		engine:  Containerd,
		version: "2.0.0",
		cdi:     CDIOn,
		note:    "switches the CRI off",
		files:   map[string]string{configTOML: "version = 2\ndisabled_plugins = [\"cri\"]\n"},
	},
	{
		name:    "containerd 1.7 with an import that has the CRI, and says nothing of CDI",
		engine:  Containerd,
		version: "1.7.24",
		cdi:     CDIOff,
		restart: "systemctl restart containerd",
		files: map[string]string{
			configTOML: "version = 2\nimports = " +
				"[\"conf.d/*.toml\"]\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n",
			"etc/containerd/conf.d/99-nvidia.toml": "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = " +
				"\"x\"\n",
		},
		file: "etc/containerd/conf.d/99-nvidia.toml",
		want: "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = \"x\"\n  enable_cdi = true\n",
	},
	{
		name:    "containerd 2 with an import that has the CRI, and says nothing of CDI",
		engine:  Containerd,
		version: "2.0.0",
		cdi:     CDIOn,
		files: map[string]string{
			configTOML: "version = 2\nimports = " +
				"[\"conf.d/*.toml\"]\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n",
			"etc/containerd/conf.d/99-nvidia.toml": "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = " +
				"\"x\"\n",
		},
	},
	{
		name:    "containerd 2 with a configuration of version 1",
		engine:  Containerd,
		version: "2.1.0",
		cdi:     CDIOff,
		restart: "systemctl restart containerd",
		files: map[string]string{
			configTOML: "[plugins.cri]\nenable_cdi = false\n",
		},
		file: configTOML,
		want: "[plugins.cri]\nenable_cdi = true\n",
	},
	{
		name:    "containerd 2 with a configuration of version 4",
		engine:  Containerd,
		version: "2.3.5",
		cdi:     CDIOff,
		restart: "systemctl restart containerd",
		files: map[string]string{
			configTOML: strings.Replace(version3, "version = 3", "version = 4", 1),
		},
		file: configTOML,
		want: strings.NewReplacer("version = 3", "version = 4", "enable_cdi = false", "enable_cdi = true", "['/etc/cdi'] #",
			"[\"/etc/cdi\", \"/var/run/cdi\"] #").
			Replace(version3),
	},
	{
		name:    "containerd 2.4, which cannot be switched off",
		engine:  Containerd,
		version: "2.4.2",
		cdi:     CDIOn,
		restart: "systemctl restart containerd",
		files: map[string]string{
			configTOML: version3,
		},
		file: configTOML,
		want: strings.Replace(version3, "['/etc/cdi'] #", "[\"/etc/cdi\", \"/var/run/cdi\"] #", 1),
	},
	{
		name:    "containerd 2, switched off",
		engine:  Containerd,
		version: "2.3.5",
		cdi:     CDIOff,
		restart: "systemctl restart containerd",
		files:   map[string]string{configTOML: version3},
		file:    configTOML,
		want: strings.NewReplacer("enable_cdi = false", "enable_cdi = true", "['/etc/cdi'] #",
			"[\"/etc/cdi\", \"/var/run/cdi\"] #").
			Replace(version3),
	},
	{
		name:    "containerd 2, another directory and the runtime",
		engine:  Containerd,
		version: "2.4.2",
		cdi:     CDIOn,
		restart: "systemctl restart containerd",
		wanted:  Wanted{Runtime: true, SpecDirs: []string{"/opt/cdi"}},
		file:    configTOML,
		want: `version = 3

[plugins."io.containerd.cri.v1.runtime"]
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi", "/opt/cdi"]

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.peerlane]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.peerlane.options]
BinaryName = "/usr/bin/peerlane-runtime"
`,
	},

	{name: "Podman 4.0", engine: Podman, version: "4.0.2", cdi: CDIUnknown, note: "podman --runtime peerlane",
		file: podmanFile, want: "[engine.runtimes]\npeerlane = [\"/usr/bin/peerlane-runtime\"]\n"},
	{name: "Podman 4.3", engine: Podman, version: "4.3.1", cdi: CDIOn},
	{
		name:    "Podman 5.4",
		engine:  Podman,
		version: "5.4.2",
		cdi:     CDIOn,
		files:   map[string]string{"etc/containers/containers.conf": "[engine]\nruntime = \"crun\"\n"},
	},
	{
		name:    "Podman 5.4 with a directory",
		engine:  Podman,
		version: "5.4.2",
		cdi:     CDIOn,
		note:    "ignores cdi_spec_dirs",
		wanted:  Wanted{SpecDirs: []string{"/opt/cdi"}},
		file:    podmanFile,
		want:    "[engine]\ncdi_spec_dirs = [\"/etc/cdi\", \"/var/run/cdi\", \"/opt/cdi\"]\n",
	},
	{
		name:    "Podman with a directory of hooks",
		engine:  Podman,
		version: "4.3.1",
		cdi:     CDIOn,
		wanted:  Wanted{HooksDirs: []string{"/opt/hooks"}, Runtime: true},
		files:   map[string]string{"etc/containers/containers.conf": "[engine]\nhooks_dir = [\"/mine\"]\n"},
		file:    podmanFile,
		want: "[engine]\nhooks_dir = [\"/mine\", \"/opt/hooks\"]\n\n[engine.runtimes]\npeerlane = " +
			"[\"/usr/bin/peerlane-runtime\"]\n",
	},

	{
		name:    "CRI-O 1.22",
		engine:  CRIO,
		version: "1.22.1",
		cdi:     CDIUnknown,
		restart: "systemctl restart crio",
		note:    "RuntimeClass",
		file:    crioFile,
		want:    "[crio.runtime.runtimes.peerlane]\nruntime_path = \"/usr/bin/peerlane-runtime\"\nruntime_type = \"oci\"\n",
	},
	{
		name:    "CRI-O 1.30",
		engine:  CRIO,
		version: "1.30.0",
		cdi:     CDIOn,
		files:   map[string]string{"etc/crio/crio.conf": "[crio.runtime]\n"},
	},
	{
		name:    "CRI-O with directories of its own",
		engine:  CRIO,
		version: "1.30.0",
		cdi:     CDIOn,
		restart: "systemctl restart crio",
		wanted:  Wanted{HooksDirs: []string{"/opt/hooks"}},
		files: map[string]string{
			"etc/crio/crio.conf":                "[crio.runtime]\ncdi_spec_dirs = [\"/opt/cdi\"]\n",
			"etc/crio/crio.conf.d/10-crun.conf": "[crio.runtime]\ndefault_runtime = \"crun\"\n",
		},
		file: crioFile,
		want: "[crio.runtime]\ncdi_spec_dirs = [\"/opt/cdi\", \"/etc/cdi\", \"/var/run/cdi\"]\nhooks_dir = " +
			"[\"/usr/share/containers/oci/hooks.d\", \"/opt/hooks\"]\n",
	},
}

// Every version of every engine: Configure changes the file once, and Remove restores every byte.
func TestConfigureAndRemoveRestoreBytes(t *testing.T) {
	for _, c := range golden {
		t.Run(c.name, func(t *testing.T) {
			root, store := t.TempDir(), filepath.Join(t.TempDir(), "engines")
			lay(t, root, c.files)
			before := files(t, root)
			h := Host{Root: root, Version: c.version}
			w := c.wanted
			w.RuntimePath = runtimeFile
			configure := func() (Change, CDI) {
				t.Helper()
				change, s, err := h.Configure(context.Background(), store, c.engine, w)
				if err != nil {
					t.Fatal(err)
				}
				if err := change.Apply(); err != nil {
					t.Fatal(err)
				}
				return change, s.CDI
			}
			first, firstCDI := configure()
			if firstCDI != c.cdi {
				t.Errorf("CDI was %s, not %s", firstCDI, c.cdi)
			}
			if c.want == "" {
				if diff := cmp.Diff(before, files(t, root)); diff != "" || !first.None() || first.Restart != "" {
					t.Errorf("unexpected change (-before +after), restart %q:\n%s", first.Restart, diff)
				}
			} else {
				want := map[string]string{}
				for name, text := range before {
					want[name] = text
				}
				want[c.file] = c.want
				if diff := cmp.Diff(want, files(t, root)); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
				if !strings.Contains(first.Diff(), "\n+") || c.restart == "" && first.Restart != "" ||
					!strings.Contains(first.Restart, c.restart) {
					t.Errorf("restart %q, diff\n%s", first.Restart, first.Diff())
				}
			}
			if found := slices.ContainsFunc(first.Notes, func(n string) bool {
				return strings.Contains(n, c.note)
			}); c.note != "" &&
				!found ||
				c.note == "" && len(first.Notes) > 0 {
				t.Errorf("notes %q", first.Notes)
			}
			after := files(t, root)
			second, secondCDI := configure()
			if !second.None() || second.Restart != "" {
				t.Errorf("the second time changes\n%s", second.Diff())
			}
			if c.cdi != CDIUnknown && secondCDI != CDIOn {
				t.Errorf("CDI is %s now", secondCDI)
			}
			if diff := cmp.Diff(after, files(t, root)); diff != "" {
				t.Errorf("the second time (-before +after):\n%s", diff)
			}
			back, err := Remove(store, c.engine)
			if err == nil {
				err = back.Apply()
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, files(t, root)); diff != "" {
				t.Errorf("after it was taken back (-before +after):\n%s", diff)
			}
			if _, err := os.Stat(store); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s is left: %v", store, err)
			}
		})
	}
}

// Remove keeps the changes of other programs, and restores the former values of Peerlane's keys.
func TestRemoveKeepsChangesOfOthers(t *testing.T) {
	for _, c := range []struct {
		name, engine, version, file string
		before                      string // "" for no file
		meanwhile                   func(string) string
		after                       string // "" for no file
		note                        string
	}{
		{"a comment", Containerd, "2.4.2", configTOML, version3, func(s string) string { return s + "# more\n" },
			strings.Replace(version3, "['/etc/cdi'] #", "[\"/etc/cdi\"] #", 1) + "# more\n", ""},
		{"another key of the table", docker, "25.0.0", daemonJSON, "",
			func(s string) string { return strings.Replace(s, "true", "true, \"x\": false", 1) },
			"{\n  \"features\": {\n    \"x\": false\n  }\n}\n", ""},
		{"the key itself", docker, "25.0.0", daemonJSON, "",
			func(s string) string { return strings.Replace(s, "true", "false", 1) },
			"{\n  \"features\": {\n    \"cdi\": false\n  }\n}\n", "another program or user has changed features.cdi"},
		{"blanks of a file of Peerlane's", Podman, "4.0.0", podmanFile, "", func(s string) string { return s + "\n" }, "",
			""},
		{"a comment in a file of Peerlane's", Podman, "4.0.0", podmanFile, "",
			func(s string) string { return "# mine\n" + s }, "# mine\n", ""},
		{"blanks of a file with a number", Containerd, "1.7.1", configTOML, "", func(s string) string { return s + "\n" }, "",
			""},
		{"a comment in a file with a number", Containerd, "1.7.1", configTOML, "",
			func(s string) string { return s + "# kept\n" }, "version = 2\n# kept\n", "version = 2 stays"},
		{"tables that the number is of", Containerd, "1.7.1", configTOML, "",
			func(s string) string {
				return s + "\n[plugins.\"io.containerd.grpc.v1.cri\".registry]\nconfig_path = \"/etc/certs.d\"\n"
			},
			"version = 2\n\n[plugins.\"io.containerd.grpc.v1.cri\"]\n\n" +
				"[plugins.\"io.containerd.grpc.v1.cri\".registry]\nconfig_path = \"/etc/certs.d\"\n", "version = 2 stays"},
		{"a comment beside the runtime", Containerd, "1.6.20", configTOML, debian12,
			func(s string) string { return "# more\n" + s }, "# more\n" + debian12, ""},
		{"the file is gone", docker, "25.0.0", daemonJSON, "", nil, "", "no longer exists"},
	} {
		t.Run(c.name, func(t *testing.T) {
			root, store := t.TempDir(), filepath.Join(t.TempDir(), "engines")
			path := filepath.Join(root, c.file)
			if c.before != "" {
				put(t, path, c.before)
			}
			change, _, err := configure(root, store, c.engine, c.version)
			if err == nil {
				err = change.Apply()
			}
			if err != nil {
				t.Fatal(err)
			}
			if c.meanwhile == nil {
				if err := os.Remove(path); err != nil {
					t.Fatal(err)
				}
			} else {
				text, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				put(t, path, c.meanwhile(string(text)))
			}
			back, err := Remove(store, c.engine)
			if err == nil {
				err = back.Apply()
			}
			if err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(path)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.after, string(text)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if c.note == "" && len(back.Notes) > 0 ||
				c.note != "" && !strings.Contains(strings.Join(back.Notes, "\n"), c.note) {
				t.Errorf("notes %q", back.Notes)
			}
		})
	}
}

// A refusal changes nothing.
func TestConfigureRefusedChangesNothing(t *testing.T) {
	at := func(file string, line int, reason string) func(error) bool { // reason is empty for a text of a parser
		return func(err error) bool {
			e, ok := errors.AsType[*fileError](err)
			return ok && strings.HasSuffix(e.file, "/"+file) && e.at.Line == line && (reason == "" || e.at.Reason == reason)
		}
	}
	not := func(key, want string) func(error) bool {
		return func(err error) bool {
			e, ok := errors.AsType[*typeError](err)
			return ok && strings.HasSuffix(e.file, "/"+daemonJSON) && e.key == key && e.want == want
		}
	}
	for _, c := range []struct {
		name, engine, version string
		files                 map[string]string
		errorIs               func(error) bool
	}{
		{"torn JSON", docker, "25.0.0", map[string]string{daemonJSON: "{\n  \"debug\": true,\n"},
			at(daemonJSON, 3, "the file ends in the middle of an object")},
		{"torn TOML", Containerd, "1.7.0", map[string]string{configTOML: "version = 2\n[plugins\n"},
			at(configTOML, 2, "")},
		{"a torn import", Containerd, "1.7.0", map[string]string{configTOML: "version = 2\nimports = " +
			"[\"/etc/containerd/a.toml\"]\n", "etc/containerd/a.toml": "x\n"},
			at("etc/containerd/a.toml", 1, "")},
		{"a torn drop-in", CRIO, "1.22.0", map[string]string{"etc/crio/crio.conf.d/10.conf": "[a]\nb\n"},
			at("etc/crio/crio.conf.d/10.conf", 2, "")},
		{"a switch that is none", docker, "29.0.0", map[string]string{daemonJSON: `{"features": {"cdi": "yes"}}`},
			not("features.cdi", "boolean")},
		{"a list that is none", docker, "29.0.0", map[string]string{daemonJSON: `{"cdi-spec-dirs": "/etc/cdi"}`},
			not("cdi-spec-dirs", "list of strings")},
		{"a table in a line", Containerd, "1.7.0", map[string]string{configTOML: "version = 2\nplugins = { " +
			"\"io.containerd.grpc.v1.cri\" = { sandbox_image = \"x\" } }\n"},
			at(configTOML, 2, "plugins is an inline table; change it to a table [plugins] by hand")},
		{"a version of tomorrow", Containerd, "3.0.0", map[string]string{configTOML: "version = 5\n"},
			func(err error) bool { e, ok := errors.AsType[*formError](err); return ok && e.version == 5 }},
		{"a drop-in that is read later", CRIO, "1.30.0",
			map[string]string{"etc/crio/crio.conf.d/zz.conf": "[crio.runtime]\ncdi_spec_dirs = []\n"},
			func(err error) bool {
				e, ok := errors.AsType[*overriddenError](err)
				return ok && e.key == "crio.runtime.cdi_spec_dirs" && filepath.Base(e.by) == "zz.conf"
			}},
		{"no version", docker, "latest", nil,
			func(err error) bool { e, ok := errors.AsType[*versionError](err); return ok && e.text == "latest" }},
		{"no engine", "lxc", "1.0", nil,
			func(err error) bool { e, ok := errors.AsType[*nameError](err); return ok && e.name == "lxc" }},
	} {
		t.Run(c.name, func(t *testing.T) {
			root, store := t.TempDir(), filepath.Join(t.TempDir(), "engines")
			lay(t, root, c.files)
			before := files(t, root)
			_, _, err := configure(root, store, c.engine, c.version)
			if !c.errorIs(err) {
				t.Errorf("unexpected error: %v", err)
			}
			if diff := cmp.Diff(before, files(t, root)); diff != "" {
				t.Errorf("(-before +after):\n%s", diff)
			}
		})
	}
}

// Configure does not add a directory under a second name, and resolves links below the root alone.
func TestConfigureOfLinkedDirectoryAddsNoSecondName(t *testing.T) {
	for _, link := range []string{"/run", "../run"} {
		root := t.TempDir()
		put(t, filepath.Join(root, daemonJSON), `{"cdi-spec-dirs": ["/etc/cdi", "/run/cdi/"]}`)
		h := Host{Root: root, Version: "29.0.1"}
		s, err := h.Look(context.Background(), docker, Wanted{})
		if err != nil || len(s.Change) != 1 {
			t.Errorf("without a link: %q, %v", s.Change, err)
		}
		for _, dir := range []string{"run", "var"} {
			if err := os.Mkdir(filepath.Join(root, dir), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Symlink(link, filepath.Join(root, "var/run")); err != nil {
			t.Fatal(err)
		}
		s, err = h.Look(context.Background(), docker, Wanted{})
		if err != nil || len(s.Change) > 0 {
			t.Errorf("/var/run leads to %s: %q, %v", link, s.Change, err)
		}
	}
}

// Look reads the address of a daemon from its configuration.
func TestSocketFollowsConfiguration(t *testing.T) {
	for _, c := range []struct{ engine, file, text, want string }{
		{docker, daemonJSON, `{}`, "/var/run/docker.sock"},
		{docker, daemonJSON, `{"hosts": ["tcp://0.0.0.0:2376", "unix:///srv/d.sock"]}`, "/srv/d.sock"},
		{docker, daemonJSON, `{"hosts": ["fd://"]}`, "/var/run/docker.sock"},
		{Containerd, configTOML, "", "/run/containerd/containerd.sock"},
		{Containerd, configTOML, "version = 3\n[grpc]\naddress = '/srv/c'\n", "/srv/c"},
		{Containerd, configTOML, "version = 4\n[plugins.'io.containerd.server.v1.grpc']\naddress = '/srv/c'\n", "/srv/c"},
		{Podman, podmanFile, "", ""},
	} {
		root := t.TempDir()
		put(t, filepath.Join(root, c.file), c.text)
		var got string
		h := Host{Root: root, ask: func(_ context.Context, _, socket string) (reply, error) {
			got = socket
			return reply{Version: "99.0"}, nil
		}}
		if _, err := h.Look(context.Background(), c.engine, Wanted{}); err != nil || got != c.want {
			t.Errorf("%s of %q: %q, %v", c.engine, c.text, got, err)
		}
	}
}

// Apply keeps a link as a link, keeps the mode of its target, and does not overwrite the change of
// another program.
func TestApplyKeepsLinksModesAndOtherChanges(t *testing.T) {
	root, store := t.TempDir(), filepath.Join(t.TempDir(), "engines")
	put(t, filepath.Join(root, "srv/docker.json"), "{}")
	if err := os.Chmod(filepath.Join(root, "srv/docker.json"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(root, "etc/docker"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../../srv/docker.json", filepath.Join(root, daemonJSON)); err != nil {
		t.Fatal(err)
	}
	before := files(t, root)
	h := Host{Root: root, Version: "25.0.0"}
	change, s, err := h.Configure(context.Background(), store, docker, Wanted{})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(s.File, daemonJSON) || !strings.HasSuffix(change.Path, "srv/docker.json") {
		t.Errorf("%s of %s", change.Path, s.File)
	}
	if err := change.Apply(); err != nil {
		t.Fatal(err)
	}
	after := files(t, root)
	if after[daemonJSON] != before[daemonJSON] || !strings.Contains(after["srv/docker.json -rw-------"], "cdi") {
		t.Errorf("%q", after)
	}
	back, err := Remove(store, docker)
	if err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(root, "srv/docker.json"), "{ }")
	if err := back.Apply(); !errors.Is(err, errConcurrent) {
		t.Errorf("error %v, want %v", err, errConcurrent)
	}
	if back, err = Remove(store, docker); err == nil {
		err = back.Apply()
	}
	if text, failed := os.ReadFile(filepath.Join(root, daemonJSON)); err != nil || failed != nil ||
		string(text) != "{ }" {
		t.Errorf("%q, %v, %v", text, err, failed)
	}
}

// After another program's change, a second Configure does not record the file as the original.
func TestConfigureAfterForeignChangeKeepsOriginal(t *testing.T) {
	root, store := t.TempDir(), filepath.Join(t.TempDir(), "engines")
	path := filepath.Join(root, daemonJSON)
	configure := func(w Wanted) {
		t.Helper()
		change, _, err := Host{Root: root, Version: "25.0.0"}.Configure(context.Background(), store, docker, w)
		if err == nil {
			err = change.Apply()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	configure(Wanted{})
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	put(t, path, strings.Replace(string(text), "{", "{\n  \"debug\": true,", 1))
	configure(Wanted{SpecDirs: []string{"/opt/cdi"}})
	back, err := Remove(store, docker)
	if err == nil {
		err = back.Apply()
	}
	if err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "{\n  \"debug\": true\n}\n" {
		t.Errorf("%q, %v", text, err)
	}
}

// Repeated configuration keeps the first original.
func TestConfigureRepeatedKeepsOriginal(t *testing.T) {
	root, store := t.TempDir(), filepath.Join(t.TempDir(), "engines")
	put(t, filepath.Join(root, daemonJSON), "{ }\n")
	for _, w := range []Wanted{{}, {RuntimePath: runtimeFile, Runtime: true}, {SpecDirs: []string{"/opt/cdi"}}} {
		change, _, err := Host{Root: root, Version: "25.0.0"}.Configure(context.Background(), store, docker, w)
		if err == nil && change.None() {
			err = errors.New("nothing changed")
		}
		if err == nil {
			err = change.Apply()
		}
		if err != nil {
			t.Fatal(err)
		}
		if text, err := os.ReadFile(change.Backup()); err != nil || string(text) != "{ }\n" {
			t.Errorf("kept is %q, %v", text, err)
		}
	}
	back, err := Remove(store, docker)
	if err == nil {
		err = back.Apply()
	}
	if text, failed := os.ReadFile(filepath.Join(root, daemonJSON)); err != nil || failed != nil ||
		string(text) != "{ }\n" {
		t.Errorf("%q, %v, %v", text, err, failed)
	}
}

// configure makes the change of an engine of a release below root that wants the runtime runtimeFile.
func configure(root, store, name, release string) (Change, State, error) {
	h := Host{Root: root, Version: release}
	return h.Configure(context.Background(), store, name, Wanted{RuntimePath: runtimeFile})
}
