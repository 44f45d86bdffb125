package cdi

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
)

func makeFIFO(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
}

func generate(t *testing.T, o Options) []*specs.Spec {
	t.Helper()
	list, err := Generate(testPlan(), o)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func entries(t *testing.T, dir string) []string {
	t.Helper()
	found, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, e := range found {
		all = append(all, e.Name())
	}
	return all
}

func TestWriteUnderStrictUmaskStaysReadable(t *testing.T) {
	// An administrator's shell may have a strict umask. The umask belongs to the process, so this
	// test is not parallel.
	old := unix.Umask(0o077)
	defer unix.Umask(old)
	dir := filepath.Join(t.TempDir(), "cdi")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time over the files of the first
		if err := Write(dir, generate(t, testOptions(t, allNodes...))); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]string{"peerlane.dev-gpu.json", "peerlane.dev-lane.json", "peerlane.dev-nic.json"},
		entries(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	for _, name := range entries(t, dir) {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != 0o644 {
			t.Errorf("%s has mode %v", name, info.Mode())
		}
	}
}

func TestWriteRemovesFormerSpecifications(t *testing.T) {
	dir := t.TempDir()
	foreign := filepath.Join(dir, "nvidia.yaml")
	if err := os.WriteFile(foreign, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	o := testOptions(t)
	if err := Write(dir, generate(t, o)); err != nil {
		t.Fatal(err)
	}
	o.Tenancy = config.TenancyMulti
	if err := Write(dir, generate(t, o)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"nvidia.yaml", "peerlane.dev-lane.json"}, entries(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

func TestWriteKeepsTheOldFileWhenTheNewOneIsRefused(t *testing.T) {
	dir := t.TempDir()
	list := generate(t, testOptions(t))
	if err := Write(dir, list); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(filepath.Join(dir, FileName(KindLane)))
	if err != nil {
		t.Fatal(err)
	}
	list[0].ContainerEdits.Hooks[0].HookName = "whenever"
	if err := Write(dir, list); err == nil {
		t.Fatal("a specification with an unknown hook was installed")
	}
	after, err := os.ReadFile(filepath.Join(dir, FileName(KindLane)))
	if err != nil {
		t.Fatal(err)
	}
	if string(before) != string(after) {
		t.Error("the refused specification replaced the old one")
	}
	if got := len(entries(t, dir)); got != 3 {
		t.Errorf("%d files, want the three old ones: %v", got, entries(t, dir))
	}
}

// inject applies devices to a container with the CDI library, as engines do.
func inject(t *testing.T, o Options, devices ...string) *oci.Spec {
	t.Helper()
	dir := t.TempDir()
	if err := Write(dir, generate(t, o)); err != nil {
		t.Fatal(err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	for path, errs := range cache.GetErrors() {
		t.Fatalf("the CDI library refuses %s: %v", path, errs)
	}
	container := &oci.Spec{
		Process: &oci.Process{Env: []string{"PATH=/bin", "LD_LIBRARY_PATH=/opt/lib"}},
		Mounts: []oci.Mount{
			{Destination: "/run", Type: "tmpfs", Source: "tmpfs"},
			{Destination: "/proc", Type: "proc", Source: "proc"},
		},
	}
	unresolved, err := cache.InjectDevices(container, devices...)
	if err != nil {
		t.Fatalf("injecting %v: %v (unresolved: %v)", devices, err, unresolved)
	}
	return container
}

func TestContainerWithTwoLanesGetsBothHooks(t *testing.T) {
	o := testOptions(t)
	c := inject(t, o, "peerlane.dev/lane=1", "peerlane.dev/lane=0000:17:00.0")

	var lanes []string
	for _, h := range c.Hooks.CreateRuntime {
		if h.Path != o.HookPath || len(h.Env) == 0 {
			t.Errorf("hook %s has environment %v", h.Path, h.Env)
		}
		lanes = append(lanes, h.Args[len(h.Args)-1])
	}
	want := []string{
		"GPU-11111111-1111-1111-1111-111111111111@0000:2a:00.0",
		"GPU-00000000-0000-0000-0000-000000000000@0000:17:00.0",
	}
	if diff := cmp.Diff(want, lanes); diff != "" {
		t.Errorf("lanes (-want +got):\n%s", diff)
	}
	if len(c.Hooks.Poststop) != 1 {
		t.Errorf("%d poststop hooks, want one for all lanes", len(c.Hooks.Poststop))
	}

	at := func(m oci.Mount) bool { return m.Destination == "/run/peerlane" }
	i := slices.IndexFunc(c.Mounts, at)
	if i < 0 {
		t.Fatalf("no mount at /run/peerlane: %+v", c.Mounts)
	}
	for _, option := range []string{"bind", "ro", "nosuid", "nodev", "noexec", "rprivate"} {
		if !slices.Contains(c.Mounts[i].Options, option) {
			t.Errorf("the anchor is mounted without %s: %v", option, c.Mounts[i].Options)
		}
	}
	if slices.ContainsFunc(c.Mounts[i+1:], at) {
		t.Error("the anchor is mounted twice")
	}
	if run := slices.IndexFunc(c.Mounts, func(m oci.Mount) bool { return m.Destination == "/run" }); run > i {
		t.Error("the image's /run is mounted over the anchor")
	}

	// A lane= device adds no device node and no variable.
	if c.Linux != nil && len(c.Linux.Devices) > 0 {
		t.Errorf("lane= brought devices: %+v", c.Linux.Devices)
	}
	if diff := cmp.Diff([]string{"PATH=/bin", "LD_LIBRARY_PATH=/opt/lib"}, c.Process.Env); diff != "" {
		t.Errorf("environment (-want +got):\n%s", diff)
	}
}

func TestGPUDeviceHasServersAndNIC(t *testing.T) {
	o := testOptions(t, allNodes...)
	for _, test := range []struct {
		device  string
		nodes   []string
		visible string
	}{
		{
			device: "peerlane.dev/gpu=1",
			nodes: []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia5", "/dev/nvidia0",
				"/dev/infiniband/uverbs3", "/dev/infiniband/rdma_cm"},
			visible: "GPU-11111111-1111-1111-1111-111111111111",
		},
		{
			device: "peerlane.dev/gpu=0",
			nodes: []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia0",
				"/dev/infiniband/uverbs3", "/dev/infiniband/rdma_cm"},
			visible: "GPU-00000000-0000-0000-0000-000000000000",
		},
		{
			device: "peerlane.dev/gpu=all",
			nodes: []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia0", "/dev/nvidia5",
				"/dev/infiniband/uverbs3", "/dev/infiniband/rdma_cm"},
			visible: "GPU-00000000-0000-0000-0000-000000000000,GPU-11111111-1111-1111-1111-111111111111",
		},
	} {
		t.Run(test.device, func(t *testing.T) {
			c := inject(t, o, test.device)
			var nodes []string
			for _, d := range c.Linux.Devices {
				nodes = append(nodes, d.Path)
			}
			if diff := cmp.Diff(test.nodes, nodes); diff != "" {
				t.Errorf("nodes (-want +got):\n%s", diff)
			}
			if !slices.Contains(c.Process.Env, "CUDA_VISIBLE_DEVICES="+test.visible) {
				t.Errorf("environment %v, want CUDA_VISIBLE_DEVICES=%s", c.Process.Env, test.visible)
			}
			if len(c.Hooks.CreateRuntime) != 1 {
				t.Errorf("%d createRuntime hooks, want one", len(c.Hooks.CreateRuntime))
			}
		})
	}
}

func TestUnknownDeviceIsNamedByTheLibrary(t *testing.T) {
	dir := t.TempDir()
	if err := Write(dir, generate(t, testOptions(t))); err != nil {
		t.Fatal(err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	unresolved, err := cache.InjectDevices(&oci.Spec{}, "peerlane.dev/lane=9")
	if err == nil || !slices.Equal(unresolved, []string{"peerlane.dev/lane=9"}) {
		t.Errorf("unresolved = %v, err = %v", unresolved, err)
	}
}

// A killed writer leaves a temporary file, which the next writer removes.
func TestApplyRemovesLeftovers(t *testing.T) {
	l := paths.New(t.TempDir())
	dir := filepath.Join(l.Root, "etc/cdi")
	left := filepath.Join(dir, strings.Replace(temporary, "*", "12345", 1))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(dir, ".nvidia.tmp")
	recent := left + "2.tmp"
	for _, path := range []string{left, foreign, recent} {
		if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chtimes(left, time.Time{}, time.Now().Add(-2*holdTimeout)); err != nil {
		t.Fatal(err)
	}
	i := Installation{Layout: l, Dirs: []string{dir}, plan: testPlan(), specs: generate(t, testOptions(t))}
	if _, err := i.apply(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{".nvidia.tmp", filepath.Base(recent), "peerlane.dev-gpu.json", "peerlane.dev-lane.json",
		"peerlane.dev-nic.json"}, entries(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	if changes, err := i.apply(); err != nil || len(changes) > 0 {
		t.Errorf("the second time: %v, %v", changes, err)
	}
}

// Engines read both formats alike.
func TestFormatsReadAlike(t *testing.T) {
	o := testOptions(t, allNodes...)
	for _, spec := range generate(t, o) {
		var texts [2]bytes.Buffer
		var read [2]*specs.Spec
		for n, format := range []Format{JSON, YAML} {
			if err := format.Encode(&texts[n], spec); err != nil {
				t.Fatal(err)
			}
			var err error
			if read[n], err = cdi.ParseSpec(texts[n].Bytes()); err != nil {
				t.Fatal(err)
			}
		}
		if diff := cmp.Diff(read[0], read[1]); diff != "" {
			t.Errorf("%s (-JSON +YAML):\n%s", spec.Kind, diff)
		}
		if diff := cmp.Diff(spec, read[1]); diff != "" {
			t.Errorf("%s (-was +read):\n%s", spec.Kind, diff)
		}
	}
}

// Apply replaces a link and does not write through the link.
func TestWriteFollowsNoLink(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(t.TempDir(), "target")
	if err := os.WriteFile(target, []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, FileName(KindLane))
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
	if err := Write(dir, generate(t, testOptions(t))); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(target); err != nil || string(text) != "precious" {
		t.Errorf("the link's target has %q, %v", text, err)
	}
	if info, err := os.Lstat(path); err != nil || !info.Mode().IsRegular() {
		t.Errorf("the link is still there: %v, %v", info, err)
	}
}
