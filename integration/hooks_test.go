package integration_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
)

// doesNothing is the baseline for Peerlane's hooks: a runtime runs it at the same stages.
const doesNothing = "/bin/true"

// stopwatch is a hook that runs another hook and writes the duration in microseconds, which
// excludes the time of runc between two hooks.
func stopwatch(arguments []string) error {
	c := exec.Command(arguments[1], arguments[2:]...)
	c.Stdin, c.Stderr = os.Stdin, os.Stderr
	begun := time.Now()
	if err := c.Run(); err != nil {
		return err
	}
	took := time.Since(begun)
	f, err := os.OpenFile(arguments[0], os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = fmt.Fprintln(f, took.Microseconds())
	return err
}

// BenchmarkHooks measures the time that both hooks add to a container, compared with two hooks that
// do nothing: -benchtime 200x makes 200 containers of each kind. A stopwatch measures each hook;
// pairs of `create` and `delete` run without a stopwatch. Kinds alternate, so that load on the
// machine affects each kind alike.
func BenchmarkHooks(b *testing.B) {
	for _, runtimeName := range runtimes {
		b.Run(runtimeName, func(b *testing.B) { benchmarkHooks(b, runtimeName) })
	}
}

func benchmarkHooks(b *testing.B, runtimeName string) {
	h, runtime := benchHost(b, runtimeName)
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	lanes, err := h.TwoClients()
	if err != nil {
		b.Fatal(err)
	}
	g, err := h.Plan.GPU(lanes[0].GPU)
	if err != nil {
		b.Fatal(err)
	}
	kinds := []struct {
		name         string
		ours, timed  bool
		bundle       *bundle.Bundle
		start, whole []time.Duration
		end          []time.Duration // of `delete` only
	}{{name: "null-timed", timed: true}, {name: "ours-timed", ours: true, timed: true}, {name: "null"}, {name: "ours",
		ours: true}}
	for i := range kinds {
		k := &kinds[i]
		if k.bundle, err = h.Bundle(k.name, bundle.File{Host: self, Container: "/usr/bin/test"}, testbed.Devices(g), "role",
			"sleep"); err != nil {
			b.Fatal(err)
		}
		hooks := k.bundle.Spec.Hooks
		for place, list := range map[string][]specs.Hook{"create": hooks.CreateRuntime, "remove": hooks.Poststop} {
			if len(list) != 1 {
				b.Fatalf("the specification has %d hooks at the place of %s", len(list), place)
			}
			hook := &list[0]
			if !k.ours {
				hook.Path, hook.Args = doesNothing, []string{doesNothing}
			}
			if k.timed {
				hook.Args = append([]string{self, "role", "stopwatch", h.times(k.name, place), hook.Path}, hook.Args[1:]...)
				hook.Path = self
			}
		}
		if err := k.bundle.Write(); err != nil {
			b.Fatal(err)
		}
	}
	log, err := os.Create(filepath.Join(h.Root, "log"))
	if err != nil {
		b.Fatal(err)
	}
	defer log.Close()
	for b.Loop() {
		for j := range kinds {
			k := &kinds[j]
			id := h.ContainerID(fmt.Sprintf("%s-%d", k.name, len(k.start)))
			begun := time.Now()
			// The container inherits the output and would keep a pipe open.
			c := runtime.Command(context.Background(), "create", "--bundle", k.bundle.Dir, id)
			c.Stderr = log
			if err := c.Run(); err != nil {
				text, _ := os.ReadFile(log.Name()) // the first error is more important
				b.Fatalf("%v: %s", err, text)
			}
			k.start = append(k.start, time.Since(begun))
			ending := time.Now()
			if err := runtime.Delete(context.Background(), id); err != nil {
				b.Fatal(err)
			}
			k.end = append(k.end, time.Since(ending))
			k.whole = append(k.whole, time.Since(begun))
		}
	}
	b.ReportMetric(0, "ns/op")
	null, ours := h.sums(b, kinds[0].name), h.sums(b, kinds[1].name)
	floor := quantile(null, 0.5)
	for name, q := range map[string]float64{"ms-added-median": 0.5, "ms-added-p99": 0.99} {
		b.ReportMetric(milliseconds(quantile(ours, q)-floor), name)
	}
	create := quantile(h.read(b, kinds[1].name, "create"), 0.5) - quantile(h.read(b, kinds[0].name, "create"), 0.5)
	b.ReportMetric(milliseconds(create), "ms-added-by-create")
	b.ReportMetric(ratio(kinds[3].start, kinds[2].start), "create-ratio")
	b.ReportMetric(ratio(kinds[3].end, kinds[2].end), "delete-ratio")
	b.ReportMetric(milliseconds(quantile(kinds[3].end, 0.99)-quantile(kinds[2].end, 0.99)), "ms-added-to-delete-p99")
	b.ReportMetric(ratio(kinds[3].whole, kinds[2].whole), "pair-ratio")
	b.ReportMetric(milliseconds(quantile(kinds[2].whole, 0.5)), "ms-null-pair")
}

// benchBed is a host for benchmarks.
type benchBed struct{ *testbed.Host }

func benchHost(b *testing.B, runtimeName string) (benchBed, *bundle.Runtime) {
	b.Helper()
	if os.Geteuid() != 0 {
		b.Skip("needs root: an OCI runtime makes namespaces and cgroups")
	}
	root, err := os.MkdirTemp("", "pl")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			b.Error(err)
		}
	})
	h, err := testbed.New(root, binaries, testbed.GPUsSimulated)
	if err != nil {
		b.Fatal(err)
	}
	testbed.MountAnchor(b, h.Layout)
	runtime, err := bundle.FindRuntime(runtimeName, h.RuntimeState())
	if err != nil {
		b.Skip(err)
	}
	if err := h.Configure(asItIs); err != nil {
		b.Fatal(err)
	}
	// Create the runtime's directory in advance: the runtime would leave it, and the wait for an
	// unchanged host would not end.
	if err := os.MkdirAll(h.RuntimeState(), 0o700); err != nil {
		b.Fatal(err)
	}
	before, err := h.Look()
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		left, err := h.Left(before, patience)
		if err != nil {
			b.Fatal(err)
		}
		for _, thing := range left {
			b.Errorf("left on the host: %s", thing)
		}
	})
	return benchBed{h}, runtime
}

// times returns the file of a stopwatch.
func (h benchBed) times(kind, place string) string {
	return filepath.Join(h.Root, "times-"+kind+"-"+place)
}

func (h benchBed) read(b *testing.B, kind, place string) []time.Duration {
	b.Helper()
	text, err := os.ReadFile(h.times(kind, place))
	if err != nil {
		b.Fatal(err)
	}
	var list []time.Duration
	for _, field := range strings.Fields(string(text)) {
		n, err := strconv.Atoi(field)
		if err != nil {
			b.Fatal(err)
		}
		list = append(list, time.Duration(n)*time.Microsecond)
	}
	return list
}

// sums returns the time of both hooks for each container.
func (h benchBed) sums(b *testing.B, kind string) []time.Duration {
	b.Helper()
	create, remove := h.read(b, kind, "create"), h.read(b, kind, "remove")
	if len(create) != len(remove) || len(create) == 0 {
		b.Fatalf("%d hooks ran at the start and %d at the end", len(create), len(remove))
	}
	for i := range create {
		create[i] += remove[i]
	}
	return create
}

func quantile(list []time.Duration, q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(list))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// ratio returns the ratio of the medians.
func ratio(a, b []time.Duration) float64 {
	return float64(quantile(a, 0.5)) / float64(quantile(b, 0.5))
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
