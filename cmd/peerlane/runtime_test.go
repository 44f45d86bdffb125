package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/cdi/engine"
)

// An administrator looks, tries, changes, checks and reverts.
func TestRuntimeConfigureEngineCanBeReverted(t *testing.T) {
	root := t.TempDir()
	file := filepath.Join(root, "etc/docker/daemon.json")
	check(t, os.MkdirAll(filepath.Dir(file), 0o755))
	const before, after = "{\n  \"live-restore\": true\n}\n", "{\n  \"live-restore\": true,\n  \"features\": {\n    " +
		"\"cdi\": true\n  }\n}\n"
	check(t, os.WriteFile(file, []byte(before), 0o644))
	expect := func(want string) {
		t.Helper()
		text, err := os.ReadFile(file)
		if diff := cmp.Diff(want, string(text)); err != nil || diff != "" {
			t.Errorf("%v (-want +got):\n%s", err, diff)
		}
	}
	docker := func(command string, more ...string) []string {
		return append([]string{"runtime", command, "--root", root, "--runtime", "docker"}, more...)
	}
	version := []string{"--engine-version", "25.0.3"}

	states := decode[[]engine.State](t, docker("status", append(version, "-o", "json")...)...)
	if len(states) != 1 || states[0].CDI != engine.CDIOff || states[0].Configured || !states[0].Exists ||
		strings.Join(states[0].Change, " ") != "features.cdi = true" {
		t.Errorf("%+v", states)
	}
	if out := peerlane(t, docker("status", version...)...); !strings.Contains(out, "needs features.cdi = true") {
		t.Error(out)
	}
	out := peerlane(t, docker("configure", append(version, "--dry-run")...)...)
	if want := "--- " + file + "\n+++ " + file + "\n@@ -1,3 +1,6 @@\n {\n-  \"live-restore\": true\n+  " +
		"\"live-restore\": true,\n+  \"features\": {\n+    \"cdi\": true\n+  }\n }\n"; out != want {
		t.Errorf("the diff is\n%s", out)
	}
	expect(before)
	if left, err := filepath.Glob(filepath.Join(root, "*")); err != nil || len(left) != 1 {
		t.Errorf("a dry run has left %v, %v", left, err)
	}

	report := decode[changeReport](t, docker("configure", append(version, "-o", "json")...)...)
	if !report.Changed || report.File != file || !strings.Contains(report.Diff, "+    \"cdi\": true") ||
		!strings.Contains(report.Restart, "systemctl restart docker") {
		t.Errorf("%+v", report)
	}
	expect(after)
	if text, err := os.ReadFile(report.Backup); err != nil || string(text) != before {
		t.Errorf("kept is %q, %v", text, err)
	}
	if out := peerlane(t, docker("configure", version...)...); out != "docker: nothing has to be changed.\n" {
		t.Error(out)
	}
	if out := peerlane(t, docker("status", version...)...); !strings.Contains(out, "ready, configured by Peerlane") {
		t.Error(out)
	}
	peerlane(t, docker("remove", "--dry-run")...)
	expect(after)
	if out := peerlane(t, docker("remove")...); !strings.HasPrefix(out,
		"wrote "+file+"\nTo take effect: systemctl restart docker") {
		t.Error(out)
	}
	expect(before)
	if out := peerlane(t, docker("remove")...); out != "docker: nothing has to be changed.\n" {
		t.Error(out)
	}
}

// The status of an engine that does not answer is not "not installed".
func TestRuntimeStatusSeparatesFailureFromAbsence(t *testing.T) {
	root, bin := t.TempDir(), t.TempDir()
	t.Setenv("PATH", bin)
	check(t, os.MkdirAll(filepath.Join(root, "etc/containerd"), 0o755))
	check(t, os.MkdirAll(filepath.Join(root, "etc/docker"), 0o755))
	// Ask no daemon of the machine that runs the tests.
	check(t, os.WriteFile(filepath.Join(root, "etc/docker/daemon.json"),
		[]byte(`{"hosts": ["unix:///nowhere/docker.sock"]}`), 0o644))
	check(t, os.WriteFile(filepath.Join(root, "etc/containerd/config.toml"), []byte("version = 2\n[plugins\n"), 0o644))
	check(t, os.WriteFile(filepath.Join(bin, "crio"), []byte("#!/bin/sh\necho it is torn >&2\nexit 3\n"), 0o755))
	for _, form := range []string{"table", "json"} {
		var out, errOut bytes.Buffer
		code := run([]string{"runtime", "status", "--root", root, "-o", form}, &out, &errOut)
		if code != exitFailure || !strings.Contains(errOut.String(), "it is torn") ||
			!strings.Contains(errOut.String(), "config.toml:2: ") {
			t.Errorf("exit status %d, %q", code, errOut.String())
		}
		if form == "table" {
			if strings.Count(out.String(), "not installed") != 2 || strings.Count(out.String(), "could not tell") != 2 {
				t.Error(out.String())
			}
			continue
		}
		var states []engine.State
		check(t, json.Unmarshal(out.Bytes(), &states))
		for _, s := range states {
			if failed := s.Engine == engine.CRIO || s.Engine == engine.Containerd; (s.Error != "") != failed {
				t.Errorf("%+v", s)
			}
		}
	}
}

// The command refuses a damaged file, names it, and does not change it.
func TestRuntimeTornConfigurationIsKept(t *testing.T) {
	root := t.TempDir()
	file := filepath.Join(root, "etc/containerd/config.toml")
	check(t, os.MkdirAll(filepath.Dir(file), 0o755))
	const torn = "version = 2\n[plugins\n"
	check(t, os.WriteFile(file, []byte(torn), 0o644))
	for _, command := range []string{"configure", "status"} {
		var out, errOut bytes.Buffer
		code := run([]string{"runtime", command, "--root", root, "--runtime", "containerd", "--engine-version", "1.7.24"},
			&out, &errOut)
		if code != exitFailure || !strings.Contains(errOut.String(), file+":2: expected") {
			t.Errorf("%s: exit status %d, %q", command, code, errOut.String())
		}
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != torn {
		t.Errorf("%q, %v", text, err)
	}
	for _, args := range [][]string{
		{"configure"}, {"remove", "--runtime", "podmna"}, {"configure", "--runtime", "docker", "--spec-dir",
			"cdi"}, {"status", "--config", "x"},
	} {
		var out, errOut bytes.Buffer
		if code := run(append([]string{"runtime"}, args...), &out, &errOut); code != exitUsage {
			t.Errorf("peerlane runtime %s: exit status %d, %q", args, code, errOut.String())
		}
	}
}
