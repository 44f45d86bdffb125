package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/recorded"
)

// cdiHost is a recorded host with specifications.
type cdiHost struct {
	t *testing.T
	// tree is the directory of the recorded sysfs and procfs.
	tree          string
	root, specDir string
	hook          string
	// flags select this host.
	flags []string
}

func newCDIHost(t *testing.T) *cdiHost {
	t.Helper()
	return onTree(t, cdiTree(t))
}

// cdiTree creates a recorded host with the libraries and tools that specifications mount.
func cdiTree(t *testing.T) string {
	t.Helper()
	tree, _ := recordedHost(t)
	release := filepath.Join(tree, "proc/sys/kernel/osrelease")
	if err := os.MkdirAll(filepath.Dir(release), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(release, []byte("6.8.0-45-generic\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return tree
}

// onTree creates a host on a recorded tree, which several hosts may share.
func onTree(t *testing.T, tree string) *cdiHost {
	t.Helper()
	h := &cdiHost{t: t, tree: tree, root: t.TempDir(), hook: hookFile(t)}
	unmountsAnchor(t, h.root)
	h.specDir = filepath.Join(h.root, "etc/cdi")
	h.flags = []string{"--root", h.root, "--sysfs", filepath.Join(tree, "sys"), "--proc", filepath.Join(tree, "proc")}
	return h
}

// unmountsAnchor unmounts the anchor of a root at the end of the test.
func unmountsAnchor(t testing.TB, root string) {
	t.Helper()
	t.Cleanup(func() {
		if _, err := paths.New(root).UnmountAnchor(); err != nil {
			t.Error(err)
		}
	})
}

// run runs `peerlane cdi` on the host and requires success.
func (h *cdiHost) run(args ...string) string {
	h.t.Helper()
	return peerlane(h.t, h.args(args...)...)
}

func (h *cdiHost) args(args ...string) []string {
	flags := h.flags
	if args[0] == "remove" {
		flags = flags[:2]
	}
	return append(append([]string{"cdi"}, args...), flags...)
}

// fails runs `peerlane cdi` on the host, requires the exit status, and returns both outputs.
func (h *cdiHost) fails(code int, args ...string) (out, errOut string) {
	h.t.Helper()
	var o, e bytes.Buffer
	if got := run(h.args(args...), &o, &e); got != code {
		h.t.Fatalf("peerlane cdi %s: exit status %d, want %d: %s%s", strings.Join(args, " "), got, code, o.String(),
			e.String())
	}
	return o.String(), e.String()
}

func (h *cdiHost) generate() string {
	h.t.Helper()
	return h.run("generate", "--spec-dir", h.specDir, "--hook", h.hook)
}

func (h *cdiHost) planFile() string { return filepath.Join(h.root, "var/lib/peerlane/plan.json") }

func (h *cdiHost) specFile(class string) string {
	return filepath.Join(h.specDir, "peerlane.dev-"+class+".json")
}

// gpu returns the GPU with an index in the plan.
func (h *cdiHost) gpu(index int) topo.GPU {
	h.t.Helper()
	return planOf(h.t, h).GPUs[index]
}

func planOf(t *testing.T, h *cdiHost) *planner.Plan {
	t.Helper()
	plan, err := planner.Read(h.planFile())
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

// edit rewrites a file of the recorded tree.
func (h *cdiHost) edit(name string, change func(string) string) {
	h.t.Helper()
	path := filepath.Join(h.tree, name)
	text, err := os.ReadFile(path)
	if err != nil {
		h.t.Fatal(err)
	}
	after := change(string(text))
	if after == string(text) {
		h.t.Fatalf("%s is not changed: %q", path, text)
	}
	if err := os.WriteFile(path, []byte(after), 0o644); err != nil {
		h.t.Fatal(err)
	}
}

// glob returns the single path of the recorded tree that matches a pattern.
func (h *cdiHost) glob(pattern string) string {
	h.t.Helper()
	found, err := filepath.Glob(filepath.Join(h.tree, pattern))
	if err != nil || len(found) != 1 {
		h.t.Fatalf("%s: %v, %v", pattern, found, err)
	}
	relative, err := filepath.Rel(h.tree, found[0])
	if err != nil {
		h.t.Fatal(err)
	}
	return relative
}

// portDown takes down the port of a NIC.
func (h *cdiHost) portDown(nic string) {
	h.t.Helper()
	h.edit(h.glob("sys/class/infiniband/"+nic+"/ports/1/state"), func(string) string { return "1: DOWN\n" })
}

// noGPU removes all GPUs from the tree.
func (h *cdiHost) noGPU() {
	h.t.Helper()
	for _, gpu := range planOf(h.t, h).GPUs {
		h.noDevice(gpu.BusID)
	}
}

// noDevice unplugs a PCI function.
func (h *cdiHost) noDevice(address string) {
	h.t.Helper()
	if err := os.Remove(filepath.Join(h.tree, "sys/bus/pci/devices", address)); err != nil {
		h.t.Fatal(err)
	}
}

// state returns the stat of every specification: inode and times reveal a write.
func (h *cdiHost) state() map[string]syscall.Stat_t {
	h.t.Helper()
	all := map[string]syscall.Stat_t{}
	for _, path := range []string{h.planFile(), h.specFile("lane"), h.specFile("gpu"), h.specFile("nic"), h.specDir} {
		info, err := os.Stat(path)
		if err != nil {
			h.t.Fatal(err)
		}
		stat := *info.Sys().(*syscall.Stat_t)
		stat.Atim = syscall.Timespec{}
		all[path] = stat
	}
	return all
}

func TestRefreshWritesOnChangeOnly(t *testing.T) {
	h := newCDIHost(t)
	h.generate()
	before := h.state()
	for _, args := range [][]string{{"refresh"}, {"refresh"}, {"refresh", "--quiet"}} {
		if out := h.run(args...); out != "" {
			t.Errorf("%v printed %q", args, out)
		}
	}
	if out := h.generate(); out != "Plan and specifications are up to date.\n" {
		t.Errorf("generate printed %q", out)
	}
	if diff := cmp.Diff(before, h.state()); diff != "" {
		t.Errorf("files were touched (-before +after):\n%s", diff)
	}

	// An idle GPU lowers its link speed.
	h.edit(h.glob("sys/bus/pci/devices/"+h.gpu(0).BusID+"/current_link_speed"),
		func(string) string { return "2.5 GT/s PCIe\n" })
	if out := h.run("refresh"); out != "" {
		t.Errorf("an idle GPU is a change: %q", out)
	}
	if diff := cmp.Diff(before, h.state()); diff != "" {
		t.Errorf("files were touched (-before +after):\n%s", diff)
	}

	h.portDown("mlx5_1")
	out := h.run("refresh")
	if strings.Count(out, "\n") != 1 || !strings.Contains(out, ", "+h.specFile("gpu")+" (25 devices)") ||
		!strings.Contains(out, "DMA-BUF") {
		t.Errorf("output %q", out)
	}
	if out := h.run("refresh"); out != "" {
		t.Errorf("second output %q", out)
	}
}

func TestRefreshRepairsModes(t *testing.T) {
	h := newCDIHost(t)
	h.generate()
	for _, path := range []string{h.planFile(), h.specFile("lane")} {
		if err := os.Chmod(path, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out := h.run("refresh", "--dry-run"); strings.Count(out, "its mode or owner would change") != 2 {
		t.Errorf("--dry-run printed %q", out)
	}
	if out := h.run("refresh"); !strings.Contains(out, h.specFile("lane")) || strings.Contains(out, h.specFile("gpu")) {
		t.Errorf("output %q", out)
	}
	for path, stat := range h.state() {
		if path != h.specDir && stat.Mode&0o777 != 0o644 {
			t.Errorf("%s has mode %o", path, stat.Mode&0o777)
		}
	}
}

func TestRefreshOfHostWithoutGPUsRemovesFiles(t *testing.T) {
	h := newCDIHost(t)
	h.generate()
	foreign := filepath.Join(h.specDir, "nvidia.yaml")
	if err := os.WriteFile(foreign, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	h.noGPU()
	out := h.run("refresh")
	for _, want := range []string{"No device to offer", "no NVIDIA GPU", "removed " + h.specFile("lane"),
		", " + h.specFile("gpu"), ", " + h.specFile("nic"), ", " + h.planFile()} {
		if !strings.Contains(out, want) {
			t.Errorf("%q lacks %q", out, want)
		}
	}
	if strings.Count(out, "\n") != 1 {
		t.Errorf("want one line, got %q", out)
	}
	if names := namesIn(t, h.specDir); !cmp.Equal(names, []string{"nvidia.yaml"}) {
		t.Errorf("left: %v", names)
	}
	if out := h.run("refresh"); strings.Count(out, "\n") != 1 || !strings.Contains(out, "No device to offer") {
		t.Errorf("second output %q", out)
	}
	if out := h.run("refresh", "--quiet"); out != "" {
		t.Errorf("--quiet printed %q", out)
	}
}

func namesIn(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// At boot, a refresh can run before the driver is loaded.
func TestRefreshBeforeDriverChangesNothing(t *testing.T) {
	h := newCDIHost(t)
	h.generate()
	before := h.state()
	if err := os.RemoveAll(filepath.Join(h.tree, "proc/driver")); err != nil {
		t.Fatal(err)
	}
	if out := h.run("refresh"); !strings.Contains(out, "Nothing was changed: NVIDIA's driver is not loaded") {
		t.Errorf("output %q", out)
	}
	if diff := cmp.Diff(before, h.state()); diff != "" {
		t.Errorf("files were touched (-before +after):\n%s", diff)
	}
	// A missing GPU changes the specifications.
	h.noDevice(h.gpu(7).BusID)
	if out := h.run("refresh"); !strings.Contains(out, "Refreshed:") {
		t.Errorf("output %q", out)
	}
}

func TestDryRunsPrintADiffAndWriteNothing(t *testing.T) {
	h := newCDIHost(t)
	if out := h.run("generate", "--spec-dir", h.specDir, "--hook", h.hook, "--dry-run"); !strings.Contains(out,
		"--- /dev/null\n+++ "+h.specFile("lane")+"\n") {
		t.Errorf("generate --dry-run printed\n%s", out)
	}
	if entries := namesIn(t, h.root); len(entries) > 0 {
		t.Errorf("wrote %v", entries)
	}
	h.generate()
	before := h.state()
	if out := h.run("refresh", "--dry-run"); out != "" {
		t.Errorf("refresh without a change printed %q", out)
	}
	h.edit("proc/driver/nvidia/gpus/"+h.gpu(3).BusID+"/information", func(text string) string {
		return strings.ReplaceAll(text, h.gpu(3).UUID, "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff")
	})
	out := h.run("refresh", "--dry-run")
	for _, want := range []string{"--- " + h.planFile(), "+++ " + h.specFile("lane"),
		"-      \"name\": \"" + h.gpu(3).UUID, "+      \"name\": \"GPU-ffffffff"} {
		if !strings.Contains(out, want) {
			t.Errorf("the diff lacks %q:\n%s", want, out)
		}
	}
	if out := h.run("remove", "--dry-run"); strings.Count(out, "would have removed") != 4 {
		t.Errorf("remove --dry-run printed %q", out)
	}
	if diff := cmp.Diff(before, h.state()); diff != "" {
		t.Errorf("files were touched (-before +after):\n%s", diff)
	}
}

// Engines ignore a device that two files define, so generate removes the file of the other format.
func TestGenerateFormatReplacesOtherFormat(t *testing.T) {
	h := newCDIHost(t)
	h.generate()
	for _, test := range []struct{ args, names []string }{
		{[]string{"generate", "--format", "yaml", "--hook", h.hook, "--spec-dir", h.specDir},
			[]string{"peerlane.dev-gpu.yaml", "peerlane.dev-lane.yaml", "peerlane.dev-nic.yaml"}},
		{[]string{"refresh"}, []string{"peerlane.dev-gpu.yaml", "peerlane.dev-lane.yaml", "peerlane.dev-nic.yaml"}},
		{[]string{"refresh", "--format", "json"}, []string{"peerlane.dev-gpu.json", "peerlane.dev-lane.json",
			"peerlane.dev-nic.json"}},
		{[]string{"refresh", "--format", "yaml"}, []string{"peerlane.dev-gpu.yaml", "peerlane.dev-lane.yaml",
			"peerlane.dev-nic.yaml"}},
	} {
		h.run(test.args...)
		if diff := cmp.Diff(test.names, namesIn(t, h.specDir)); diff != "" {
			t.Errorf("%v: files (-want +got):\n%s", test.args, diff)
		}
		h.loads(t)
	}
	text, err := os.ReadFile(filepath.Join(h.specDir, "peerlane.dev-lane.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(text, []byte("---\ncdiVersion: ")) {
		t.Errorf("that is no YAML: %.80s", text)
	}
	// An older version or a user may leave both formats.
	if err := os.WriteFile(h.specFile("lane"), []byte(h.run("generate", "--class", "lane", "--hook", h.hook)),
		0o644); err != nil {
		t.Fatal(err)
	}
	if out := h.run("refresh"); !strings.Contains(out, "removed "+h.specFile("lane")) {
		t.Errorf("output %q", out)
	}
	h.loads(t)
	if out := h.run("generate", "--class", "lane", "--format", "yaml", "--hook", h.hook); !strings.HasPrefix(out,
		"---\ncdiVersion: ") {
		t.Errorf("generate --format yaml printed %.80s", out)
	}
}

// loads loads the directory with the CDI library.
func (h *cdiHost) loads(t *testing.T) {
	t.Helper()
	cache, err := cdi.NewCache(cdi.WithSpecDirs(h.specDir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Error(err)
		return
	}
	for path, errs := range cache.GetErrors() {
		t.Errorf("the CDI library refuses %s: %v", path, errs)
	}
	for _, name := range []string{"peerlane.dev/lane=3", "peerlane.dev/gpu=3", "peerlane.dev/nic=mlx5_0"} {
		if cache.GetDevice(name) == nil {
			t.Errorf("missing device %s", name)
		}
	}
}

func TestRefreshKeepsTheInstalledHook(t *testing.T) {
	h := newCDIHost(t)
	h.generate()
	if err := os.Remove(h.hook); err != nil {
		t.Fatal(err)
	}
	// The directory of the test binary has no hook.
	if _, errOut := h.fails(1, "refresh"); !strings.Contains(errOut, "find the hook") {
		t.Errorf("standard error: %q", errOut)
	}
	h.run("refresh", "--hook", hookFile(t))
}

// An engine that reads while Peerlane writes finds the old or the new files, never a missing file.
func TestConcurrentRefreshesNeverHideFiles(t *testing.T) {
	h := newCDIHost(t)
	h.generate()
	// The same host with a port down requires other files.
	down := newCDIHost(t)
	down.portDown("mlx5_1")
	down.root, down.specDir, down.flags[1] = h.root, h.specDir, h.root

	stop, reader := make(chan struct{}), make(chan int)
	go func() {
		reads := 0
		defer func() { reader <- reads }()
		for ; ; reads++ {
			select {
			case <-stop:
				return
			default:
				h.loads(t)
			}
		}
	}()
	var wait sync.WaitGroup
	for n := range 20 {
		on := h
		if n%2 == 0 {
			on = down
		}
		args := on.args("refresh", "--hook", h.hook)
		if n%4 < 2 {
			args = on.args("generate", "--hook", h.hook, "--spec-dir", h.specDir)
		}
		wait.Go(func() {
			var out, errOut bytes.Buffer
			if code := run(args, &out, &errOut); code != 0 {
				t.Errorf("%v: exit status %d: %s", args, code, errOut.String())
			}
		})
	}
	wait.Wait()
	close(stop)
	select {
	case reads := <-reader:
		t.Logf("read %d times meanwhile", reads)
		if reads == 0 {
			t.Error("the reader has read no file during the writes")
		}
	case <-testutil.After(time.Minute):
		t.Fatal("the reader hangs")
	}
	if diff := cmp.Diff([]string{"peerlane.dev-gpu.json", "peerlane.dev-lane.json", "peerlane.dev-nic.json"},
		namesIn(t, h.specDir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	// Two commands ran at the same time: every file must describe one host, that of the last
	// writer.
	one := h.run("refresh", "--dry-run") == "" || down.run("refresh", "--dry-run") == ""
	if !one {
		t.Error("plan and specifications are a mixture")
	}
}

func TestRemoveDeletesInstalledFiles(t *testing.T) {
	h := newCDIHost(t)
	if out := h.run("remove"); out != "Nothing is left to remove.\n" {
		t.Errorf("no device in the host, output %q", out)
	}
	if names := namesIn(t, h.root); len(names) > 0 {
		t.Errorf("created %v", names)
	}
	h.generate()
	// Files of other programs, one of them with a name of Peerlane.
	text, err := os.ReadFile(h.specFile("lane"))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"nvidia.json":           "{}",
		"peerlane.dev-nic.yaml": strings.Replace(string(text), "peerlane.dev/lane", "example.com/nic", 1),
	} {
		if err := os.WriteFile(filepath.Join(h.specDir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// A damaged file with a name of Peerlane.
	damaged := filepath.Join(h.specDir, "peerlane.dev-gpu.yaml")
	if err := os.WriteFile(damaged, []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	got := decode[struct{ Removed []string }](t, h.args("remove", "-o", "json")...)
	want := []string{h.specFile("lane"), h.specFile("gpu"), damaged, h.specFile("nic"), h.planFile()}
	if diff := cmp.Diff(want, got.Removed); diff != "" {
		t.Errorf("removed (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"nvidia.json", "peerlane.dev-nic.yaml"}, namesIn(t, h.specDir)); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
}

// aliveContainer adds a container whose init is this process.
func (h *cdiHost) aliveContainer(name string) {
	h.t.Helper()
	stat, err := os.ReadFile("/proc/self/stat")
	check(h.t, err)
	_, fields, _ := strings.Cut(string(stat), ") ")
	start, err := strconv.ParseUint(strings.Fields(fields)[19], 10, 64)
	check(h.t, err)
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	check(h.t, err)
	g := generation.Generation{
		ID: strings.Repeat("1", 32), Container: generation.Container{ID: name},
		Init: process.Process{PID: os.Getpid(), Start: start, Boot: strings.TrimSpace(string(boot))},
	}
	text, err := json.Marshal(g)
	check(h.t, err)
	dir := filepath.Join(h.root, "var/lib/peerlane/generations", g.ID)
	check(h.t, os.MkdirAll(dir, 0o700))
	check(h.t, os.WriteFile(filepath.Join(dir, "generation.json"), text, 0o600))
}

func TestRemoveWithRunningContainersIsRefused(t *testing.T) {
	h := newCDIHost(t)
	h.generate()
	h.aliveContainer("trainer")
	before := h.state()
	if _, errOut := h.fails(1, "remove"); !strings.Contains(errOut,
		"containers with a lane are running (trainer) and could not be restarted; stop these containers first, or use "+
			"--force") {
		t.Errorf("standard error: %q", errOut)
	}
	h.run("remove", "--dry-run")
	if diff := cmp.Diff(before, h.state()); diff != "" {
		t.Errorf("files were touched (-before +after):\n%s", diff)
	}
	h.run("remove", "--force")
	if names := namesIn(t, h.specDir); len(names) > 0 {
		t.Errorf("left: %v", names)
	}
}

func TestRefreshReportsItsDurations(t *testing.T) {
	h := newCDIHost(t)
	h.generate()
	got := decode[refreshed](t, h.args("refresh", "-o", "json")...)
	if got.Changed || got.Changes == nil || got.Peermem == nil || !got.Peermem.DMABUF {
		t.Errorf("report %+v", got)
	}
	for _, part := range []string{"waiting", "peermem", "sysfs", "plan", "install"} {
		if _, known := got.Took[part]; !known {
			t.Errorf("no duration of %s: %v", part, got.Took)
		}
	}
}

// BenchmarkRefresh measures a udev event without a change, except for NVML. The recorded host has
// eight GPUs and two NICs.
func BenchmarkRefresh(b *testing.B) {
	tree, root := b.TempDir(), b.TempDir()
	unmountsAnchor(b, root)
	sysfs, proc, err := recorded.Unpack(tree)
	if err != nil {
		b.Fatal(err)
	}
	hook := filepath.Join(root, "peerlane-hook")
	if err := os.WriteFile(hook, nil, 0o755); err != nil {
		b.Fatal(err)
	}
	args := []string{"cdi", "refresh", "--quiet", "--root", root, "--sysfs", sysfs, "--proc", proc, "--hook", hook}
	for b.Loop() {
		var errOut bytes.Buffer
		if code := run(args, &errOut, &errOut); code != 0 {
			b.Fatal(errOut.String())
		}
	}
}
