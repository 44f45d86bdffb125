package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/integration/programs"
)

// BenchmarkStart measures the cost of a start, from `runc run` to the end of an empty container:
// with runc alone, with peerlane-runtime and no device, and with a device that adds a variable.
// The three cases alternate. CPU time excludes other processes of the host; the wall-clock time is
// printed beside it.
func BenchmarkStart(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("needs root: an OCI runtime makes namespaces and cgroups")
	}
	dir, remove, err := programs.Directory(programs.Runtime)
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := remove(); err != nil {
			b.Error(err)
		}
	}()
	runc, err := findRuntime("", searchPath)
	if err != nil {
		b.Fatal(err)
	}
	root := b.TempDir()
	const spec = `{"cdiVersion":"0.5.0","kind":"probe.dev/thing","devices":[{"name":"0","containerEdits":{"env":["GIVEN=1"]}}]}`
	if err := os.WriteFile(filepath.Join(root, "probe.json"), []byte(spec), 0o644); err != nil {
		b.Fatal(err)
	}
	bundleDir := filepath.Join(root, "bundle")
	if err := bundle.RootFS(filepath.Join(bundleDir, "rootfs"), []bundle.File{{Host: "/bin/busybox"}}); err != nil {
		b.Fatal(err)
	}
	container := bundle.New(bundleDir, "/bin/busybox", "true")
	wrapper := []string{filepath.Join(dir, programs.Runtime), "--peerlane-root=" + root, "--peerlane-spec-dir=" + root}
	starters := []struct {
		name    string
		command []string
		wall    []time.Duration
		cpu     []time.Duration
	}{
		{name: "runc", command: []string{runc}},
		{name: "no-device", command: wrapper},
		{name: "device", command: append(slices.Clone(wrapper), "--peerlane-device=probe.dev/thing=0")},
	}
	n := 0
	for b.Loop() {
		for i := range starters {
			starter := &starters[i]
			if err := container.Write(); err != nil { // an engine writes the bundle for every start
				b.Fatal(err)
			}
			n++
			c := exec.Command(starter.command[0], append(slices.Clone(starter.command[1:]),
				"--root", filepath.Join(root, "state"), "run", "--bundle", bundleDir, fmt.Sprintf("peerlane-benchmark-%d-%d",
					os.Getpid(), n))...)
			begun := time.Now()
			if out, err := c.CombinedOutput(); err != nil {
				b.Fatalf("%s: %v: %s", starter.name, err, out)
			}
			starter.wall = append(starter.wall, time.Since(begun))
			starter.cpu = append(starter.cpu, c.ProcessState.UserTime()+c.ProcessState.SystemTime())
		}
	}
	median := func(times []time.Duration) float64 {
		slices.Sort(times)
		return times[len(times)/2].Seconds() * 1e3
	}
	plain, plainCPU := median(starters[0].wall), median(starters[0].cpu)
	b.ReportMetric(0, "ns/op") // the sum of three starts, which has no meaning
	b.ReportMetric(plain, "runc-ms")
	for _, starter := range starters[1:] {
		took := median(starter.wall)
		b.ReportMetric(took-plain, starter.name+"-more-ms")
		b.ReportMetric(median(starter.cpu)-plainCPU, starter.name+"-more-cpu-ms")
		b.ReportMetric(took/plain, starter.name+"/runc")
	}
}
