package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/topo/planner"
)

// hookFile returns the path of a file that passes for the hook.
func hookFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "peerlane-hook")
	if err := os.WriteFile(path, []byte("#!/bin/false\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestGenerateInstallsSpecificationsAndPlan(t *testing.T) {
	_, host := recordedHost(t)
	root, specDir, hook := t.TempDir(), filepath.Join(t.TempDir(), "cdi"), hookFile(t)
	unmountsAnchor(t, root)
	args := append([]string{"cdi", "generate", "--root", root, "--spec-dir", specDir, "--hook", hook}, host...)
	var out, errOut bytes.Buffer
	if code := run(args, &out, &errOut); code != 0 {
		t.Fatalf("exit status %d: %s", code, errOut.String())
	}
	planFile := filepath.Join(root, "var/lib/peerlane/plan.json")
	for _, want := range []string{planFile, filepath.Join(specDir, "peerlane.dev-lane.json"),
		filepath.Join(specDir, "peerlane.dev-gpu.json")} {
		if !strings.Contains(out.String(), "wrote "+want) {
			t.Errorf("output does not name the written %s:\n%s", want, out.String())
		}
	}
	if !strings.Contains(errOut.String(), "server GPUs") {
		t.Errorf("help does not state the access that gpu= grants: %q", errOut.String())
	}

	plan, err := planner.Read(planFile)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Dir(planFile))
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o700 {
		t.Errorf("the plan is in a directory of mode %v", info.Mode())
	}

	cache, err := cdi.NewCache(cdi.WithSpecDirs(specDir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	for path, errs := range cache.GetErrors() {
		t.Errorf("the CDI library refuses %s: %v", path, errs)
	}
	container := &oci.Spec{}
	if _, err := cache.InjectDevices(container, "peerlane.dev/lane=3"); err != nil {
		t.Fatal(err)
	}
	gpu, err := plan.GPU("3")
	if err != nil {
		t.Fatal(err)
	}
	want := []oci.Hook{{
		Path: hook,
		Args: []string{"peerlane-hook", "create", "--root", root, "--lane", gpu.UUID + "@" + gpu.BusID},
		Env:  []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "TZ=UTC", "GOMAXPROCS=4"},
	}}
	if diff := cmp.Diff(want, container.Hooks.CreateRuntime); diff != "" {
		t.Errorf("hooks (-want +got):\n%s", diff)
	}
	if anchor := container.Mounts[0].Source; !isEmptyDir(t, anchor) {
		t.Errorf("the anchor %s is no empty directory", anchor)
	}
}

func isEmptyDir(t *testing.T, path string) bool {
	t.Helper()
	entries, err := os.ReadDir(path)
	if err != nil {
		t.Fatal(err)
	}
	return len(entries) == 0
}

func TestGenerateForSeveralTenantsOffersNoGPU(t *testing.T) {
	_, host := recordedHost(t)
	root, specDir := t.TempDir(), t.TempDir()
	unmountsAnchor(t, root)
	config := filepath.Join(root, "etc/peerlane/config.toml")
	if err := os.MkdirAll(filepath.Dir(config), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, []byte("[cdi]\ntenancy = \"multi\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	peerlane(t, append([]string{"cdi", "generate", "--root", root, "--spec-dir", specDir, "--hook", hookFile(t)},
		host...)...)
	_, err := os.Stat(filepath.Join(specDir, "peerlane.dev-gpu.json"))
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the specification of gpu= was written (%v)", err)
	}
	if _, err := os.Stat(filepath.Join(specDir, "peerlane.dev-lane.json")); err != nil {
		t.Error(err)
	}
}

func TestGeneratePrintsAndChangesNothing(t *testing.T) {
	_, host := recordedHost(t)
	root := t.TempDir()
	generate := append([]string{"cdi", "generate", "--root", root, "--hook", hookFile(t)}, host...)
	var kinds []string
	for documents := json.NewDecoder(strings.NewReader(peerlane(t, generate...))); ; {
		var spec specs.Spec
		err := documents.Decode(&spec)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		kinds = append(kinds, spec.Kind)
	}
	if diff := cmp.Diff([]string{"peerlane.dev/lane", "peerlane.dev/gpu", "peerlane.dev/nic"}, kinds); diff != "" {
		t.Errorf("kinds (-want +got):\n%s", diff)
	}
	if spec := decode[specs.Spec](t, append(generate, "--class", "gpu")...); spec.Kind != "peerlane.dev/gpu" {
		t.Errorf("--class gpu printed %s", spec.Kind)
	}
	if !isEmptyDir(t, root) {
		t.Error("something was written below the root")
	}
}
