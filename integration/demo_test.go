package integration_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/bench"
	"github.com/peerlane/peerlane/cmd/peerlane/demo"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/relay/launch"
)

func demoOptions(t *testing.T, runtimeName, route string) demo.Options {
	t.Helper()
	if runtimeName != demo.RuntimeNone {
		if os.Geteuid() != 0 {
			t.Skip("needs root: an OCI runtime makes namespaces and cgroups")
		}
		if _, err := exec.LookPath(runtimeName); err != nil {
			t.Skip(err)
		}
	}
	return demo.Options{
		Runtime: runtimeName, Route: route, GPUs: testbed.GPUsSimulated, Bytes: 4 << 20, Seed: 7, Binaries: binaries,
		Quick: true,
	}
}

func TestDemoVerifiesMessages(t *testing.T) {
	for _, runtimeName := range []string{demo.RuntimeNone, "runc", "crun"} {
		for _, route := range []string{launch.RouteStaged, launch.RouteDirect} {
			t.Run(runtimeName+"/"+route, func(t *testing.T) {
				r := runDemo(t, demoOptions(t, runtimeName, route))
				for _, s := range r.Servers {
					if staged := route == launch.RouteStaged; (s.DeviceIn > 0) != staged || (s.DeviceOut > 0) != staged {
						t.Errorf("server GPU %d: %d bytes in and %d out on route %s", s.GPU.Index, s.DeviceIn, s.DeviceOut, route)
					}
				}
			})
		}
	}
}

// Messages of the demo use queue pairs of software devices through the server GPUs, after tests of
// GPUs and NICs.
func TestDemoShowsQueuePairsAndTriples(t *testing.T) {
	o := demoOptions(t, "runc", launch.RouteStaged)
	o.Quick = false
	r := runDemo(t, o)
	if len(r.Connections) == 0 {
		t.Error("the demo reports no RDMA connection")
	}
	for _, connection := range r.Connections {
		if !strings.Contains(connection, "queue pairs each: ") || !strings.HasSuffix(connection, "software device") {
			t.Errorf("RDMA connection %q", connection)
		}
	}
	if len(r.Triples) == 0 {
		t.Error("no GPU and NIC were tested")
	}
	for _, n := range r.Triples {
		if n.Verdict != launch.VerdictGood || n.Rounds == 0 {
			t.Errorf("%v: %s after %d rounds: %s", n.TripleName, n.Verdict, n.Rounds, n.Reason)
		}
	}
	for _, s := range r.Servers {
		if s.RelayIn == 0 || s.DeviceIn < int64(s.RelayIn) {
			t.Errorf("server GPU %d: the relays say %d bytes in, the device's log %d", s.GPU.Index, s.RelayIn, s.DeviceIn)
		}
	}
}

// runDemo runs the demo, and requires success.
func runDemo(t *testing.T, o demo.Options) *demo.Report {
	t.Helper()
	r, err := demo.Run(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range append(r.Problems, r.Left...) {
		t.Error(p)
	}
	for _, c := range r.Containers {
		if !c.Client.Verified || c.Client.VerifiedBytes < o.Bytes {
			t.Errorf("container %s verified %d bytes", c.Name, c.Client.VerifiedBytes)
		}
		if o.Runtime != demo.RuntimeNone && len(c.Injected.GPUs) != 1 {
			t.Errorf("container %s sees the GPUs %v", c.Name, c.Injected.GPUs)
		}
	}
	return r
}

// With one GPU both containers use the lane of the GPU, and route auto is direct. The demo refuses
// options that need a second GPU, with the reason.
func TestDemoOnOneGPUVerifiesDirectMessages(t *testing.T) {
	for _, runtimeName := range []string{demo.RuntimeNone, "runc"} {
		t.Run(runtimeName, func(t *testing.T) {
			o := demoOptions(t, runtimeName, launch.RouteAuto)
			o.GPUs = testbed.GPUsOne
			r := runDemo(t, o)
			if r.Route != launch.RouteDirect || len(r.Topology.GPUs) != 1 {
				t.Errorf("%d GPUs, route %s", len(r.Topology.GPUs), r.Route)
			}
			if !strings.Contains(r.Host, "1 GPU and") {
				t.Errorf("the host is called %q", r.Host)
			}
			for _, c := range r.Containers {
				if c.Client.Relay.Direct == 0 || c.Client.Relay.Staged > 0 {
					t.Errorf("container %s: %d bytes direct, %d staged", c.Name, c.Client.Relay.Direct, c.Client.Relay.Staged)
				}
			}
		})
	}
	for _, c := range []struct {
		name   string
		change func(*demo.Options)
		want   error
	}{
		{"staged", func(o *demo.Options) { o.Route = launch.RouteStaged }, demo.ErrOneGPUForStaging},
		{"client copy", func(o *demo.Options) { o.Copy = demo.CopyClient }, demo.ErrOneGPUForCopies},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := demoOptions(t, demo.RuntimeNone, launch.RouteAuto)
			o.GPUs = testbed.GPUsOne
			c.change(&o)
			if _, err := demo.Run(context.Background(), o); !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
		})
	}
}

// A host with one GPU measures route direct, and lists each table that needs another GPU with the
// reason.
func TestBenchOnOneGPUMeasuresDirectRoutes(t *testing.T) {
	names, _ := bench.Tables()
	o := bench.Options{
		Tables: names, Sizes: []uint64{8, 1 << 20}, Depths: []int{1, 4}, Routes: []string{launch.RouteDirect,
			launch.RouteStaged},
		Baselines: []string{bench.BaselineRaw, bench.BaselineBounce, bench.BaselineLocal}, Duration: 10 * time.Millisecond,
		GPUs: testbed.GPUsOne, Binaries: binaries,
	}
	r, err := bench.Run(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range r.Problems {
		t.Error(p)
	}
	rows, missing := map[string]int{}, map[string]bool{}
	for _, row := range r.Rows {
		rows[row.Table]++
		if row.Route == launch.RouteStaged && row.Table != "network" {
			t.Errorf("%s, %s: measured by route staged", row.Table, row.What)
		}
	}
	for _, m := range r.Missing {
		missing[m.Table] = true
	}
	for _, name := range names {
		if rows[name] == 0 && !missing[name] {
			t.Errorf("table %s has neither rows nor a reason", name)
		}
	}
	for _, name := range []string{"latency", "routes", "bounce", "many-clients", "cpu", "first-copy", "network"} {
		if rows[name] == 0 {
			t.Errorf("table %s has no rows", name)
		}
	}
	o.Routes = []string{launch.RouteStaged}
	if _, err := bench.Run(context.Background(), o); !errors.Is(err, bench.ErrOneGPU) {
		t.Errorf("route staged alone: %v", err)
	}
}

// On a host without a GPU, bench and demo fail with an error that names the remedy.
func TestBenchAndDemoWithoutGPUNameIt(t *testing.T) {
	if list, err := filepath.Glob("/dev/nvidia[0-9]*"); err != nil || len(list) > 0 {
		t.Logf("nothing to test: this host has GPUs: %v %v", list, err)
		return
	}
	_, err := bench.Run(context.Background(), bench.Options{Tables: []string{"routes"},
		Routes: []string{launch.RouteDirect}, GPUs: testbed.GPUsReal, Binaries: binaries})
	if !errors.Is(err, testbed.ErrNoGPU) {
		t.Errorf("bench: %v", err)
	}
	o := demoOptions(t, demo.RuntimeNone, launch.RouteDirect)
	o.GPUs = testbed.GPUsReal
	if _, err := demo.Run(context.Background(), o); !errors.Is(err, testbed.ErrNoGPU) {
		t.Errorf("demo: %v", err)
	}
}

// Clients make the copies themselves, in containers with gpu=: CUDA shows only the client's GPU,
// the device nodes of the server GPUs exist, and relays make no copies on route staged.
func TestDemoOfClientCopyMakesNoRelayCopies(t *testing.T) {
	for _, runtimeName := range []string{demo.RuntimeNone, "runc", "crun"} {
		for _, route := range []string{launch.RouteStaged, launch.RouteDirect} {
			t.Run(runtimeName+"/"+route, func(t *testing.T) {
				o := demoOptions(t, runtimeName, route)
				o.Copy = demo.CopyClient
				r := runDemo(t, o)
				for _, c := range r.Containers {
					for _, bus := range c.Servers {
						server, err := r.Plan.GPU(bus)
						if err != nil {
							t.Fatal(err)
						}
						node := fmt.Sprintf("/dev/nvidia%d", server.Minor)
						if runtimeName != demo.RuntimeNone && !slices.Contains(c.Injected.Devices, node) {
							t.Errorf("container %s has no %s: %v", c.Name, node, c.Injected.Devices)
						}
					}
				}
				if len(r.Servers) == 0 {
					t.Error("no server GPU is reported")
				}
			})
		}
	}
}

// Every table of the bench runs with real processes and relays. The test ignores the figures.
func TestBenchMeasuresEveryTable(t *testing.T) {
	names, _ := bench.Tables()
	r, err := bench.Run(context.Background(), bench.Options{
		Tables: names, Sizes: []uint64{8, 64 << 10, 1 << 20}, Depths: []int{1, 4},
		Routes:    []string{launch.RouteDirect, launch.RouteStaged},
		Baselines: []string{bench.BaselineRaw, bench.BaselineBounce, bench.BaselineLocal},
		Duration:  5 * time.Millisecond, Busy: []string{bench.BusyServer},
		GPUs: testbed.GPUsSimulated, Binaries: binaries,
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range r.Problems {
		t.Error(p)
	}
	rows := map[string]int{}
	for _, row := range r.Rows {
		rows[row.Table]++
		if _, ok := r.Ratio(row); ok != (row.Baseline != "") {
			t.Errorf("%s, %s: compared with %q, ratio %v", row.Table, row.What, row.Baseline, ok)
		}
	}
	for table, want := range map[string]int{
		"copy": 14, "latency": 8, "routes": 12, "bounce": 6, "client-copy": 9, "busy": 26, "bystander": 6,
		"uniformity": 9, "many-clients": 4, "cpu": 12, "first-copy": 5, "network": 15,
	} {
		if rows[table] != want {
			t.Errorf("table %s has %d rows, want %d", table, rows[table], want)
		}
	}
	if !r.Simulated {
		t.Error("a simulated result does not say so")
	}
	// Tables that this host cannot measure state the reason; no other table is missing.
	for _, v := range r.Verdicts() {
		want := "simulated"
		if strings.Contains(v.What, "GPU memory") {
			want = "not measured: of the client's own GPU: the simulator"
		}
		if !strings.HasPrefix(v.Verdict, want) {
			t.Errorf("%s: the verdict is %q, want %q", v.What, v.Verdict, want)
		}
	}
}

// Control: the demo fails after one corrupt byte, and after one failed copy.
func TestDemoDetectsCorruptData(t *testing.T) {
	for _, c := range []struct{ name, fault, words string }{
		{"a wrong byte", "cuMemcpyAsync:after=40:times=1:corrupt=1", "WRONG"},
		{"a failed copy", "cuMemcpyAsync:after=40:error=700", "CUDA_ERROR_ILLEGAL_ADDRESS"},
		{"no memory for staging", "cuMemCreate:oom", "no server GPU has room to stage"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := demoOptions(t, demo.RuntimeNone, launch.RouteStaged)
			o.Bytes = 256 << 20 // more than 40 copies
			o.RelayEnvironment = []string{"PEERLANE_SIM_FAULT=" + c.fault}
			r, err := demo.Run(context.Background(), o)
			if err == nil {
				t.Fatalf("the demo is content: %+v", r.Problems)
			}
			if !strings.Contains(err.Error(), c.words) {
				t.Errorf("the error does not say %q: %v", c.words, err)
			}
		})
	}
}
