package integration_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// The processes of `peerlane doctor --rdma`, with simulated GPUs and a software device as NIC.
func TestRDMATestOfThisHostSucceeds(t *testing.T) {
	root := t.TempDir()
	h, err := testbed.New(root, binaries, testbed.GPUsSimulated)
	if err == nil {
		err = h.Configure(asItIs)
	}
	if err != nil {
		t.Fatal(err)
	}
	nic, err := softdevice.New(t.TempDir(), softdevice.Device{Name: "mlx5_0", GUID: 1, Address: "192.0.2.1"})
	if err != nil {
		t.Fatal(err)
	}
	g := h.Plan.GPUs[0]
	gpu := launch.GPU{UUID: g.UUID, BusID: g.BusID, Index: g.Index}
	job := launch.RDMAJob{NICs: []launch.RDMANIC{{Name: "mlx5_0", GPUs: []launch.GPU{gpu}}}}
	test := func(environment ...string) (results []launch.RDMAResult, err error) {
		if err := h.Configure(func(c *config.Config) {
			c.Relay.Environment = append(c.Relay.Environment,
				environment...)
		}); err != nil {
			t.Fatal(err)
		}
		tester, err := selftest.NewTester(h.Layout, h.Config, h.HookBinary())
		if err != nil {
			t.Fatal(err)
		}
		err = tester.RDMA(t.Context(), job, func(r launch.RDMAResult) { results = append(results, r) })
		return results, err
	}
	results, err := test(nic.Environment()...)
	if err != nil || len(results) != 3 {
		t.Fatalf("%+v, %v", results, err)
	}
	for i, want := range []string{launch.MemoryHost, launch.MemoryDMABuf, launch.MemoryPeermem} {
		r := results[i]
		if r.Memory != want || r.Wrong > 0 || r.Untested != "" {
			t.Errorf("%+v, want that of %s", r, want)
		}
		// The software device has no nvidia-peermem.
		if none := want == launch.MemoryPeermem; none != strings.Contains(r.Failed, "EFAULT") || none != (r.Bytes == 0) {
			t.Errorf("%+v", r)
		}
	}
	if results, err := test(verbs.LibraryVariable + "=/nowhere/libibverbs.so.1"); err == nil ||
		!strings.Contains(err.Error(), "/nowhere/libibverbs.so.1 cannot be loaded") || results != nil {
		t.Errorf("without a library: %+v, %v", results, err)
	}
}

// The loopbacks of peerlane plan --measure, with simulated GPUs and software devices as NICs: the
// estimate then has measured links.
func TestMeasuredLoopbacksEnterTheEstimate(t *testing.T) {
	h, err := testbed.New(t.TempDir(), binaries, testbed.GPUsSimulated)
	if err == nil {
		err = h.Configure(asItIs)
	}
	if err != nil {
		t.Fatal(err)
	}
	loopbacks := h.Plan.Loopbacks(h.Topology)
	var devices []softdevice.Device
	want := 0
	for i, l := range loopbacks {
		devices = append(devices, softdevice.Device{Name: l.NIC, GUID: uint64(i + 1),
			Address: fmt.Sprintf("192.0.2.%d", i+1)})
		want += 1 + len(l.GPUs)
	}
	if len(loopbacks) == 0 || want == len(loopbacks) {
		t.Fatalf("nothing to measure through a CPU: %+v", loopbacks)
	}
	nics, err := softdevice.New(t.TempDir(), devices...)
	if err == nil {
		err = h.Configure(func(c *config.Config) { c.Relay.Environment = append(c.Relay.Environment, nics.Environment()...) })
	}
	if err != nil {
		t.Fatal(err)
	}
	tester, err := selftest.NewTester(h.Layout, h.Config, h.HookBinary())
	if err != nil {
		t.Fatal(err)
	}
	loops, failed, err := tester.MeasureLoops(t.Context(), h.Plan, loopbacks, nil)
	if err != nil || len(failed) > 0 || len(loops) != want {
		t.Fatalf("%d of %d loopbacks: %+v, %q, %v", len(loops), want, loops, failed, err)
	}
	m := &topo.Measured{Fingerprint: h.Topology.Fingerprint(), Loops: loops}
	if text, err := json.Marshal(m); err != nil {
		t.Fatal(err)
	} else if m, err = topo.ParseMeasured(text); err != nil || !h.Topology.Measure(m) {
		t.Fatalf("the rates are refused: %v, %s", err, text)
	}
	measured := map[string]float64{}
	for _, l := range h.Plan.ModelLinks(h.Topology) {
		if l.Source == planner.SourceMeasured {
			measured[l.Name] = l.Rate
		}
	}
	for _, l := range loops {
		name := l.NIC + " and host memory"
		if l.GPU != "" {
			g, err := h.Plan.GPU(l.GPU)
			if err != nil {
				t.Fatal(err)
			}
			name = fmt.Sprintf("%s and memory of GPU %d", l.NIC, g.Index)
		}
		if measured[name] != l.Rate() {
			t.Errorf("the estimate has %v for %s, want %g", measured[name], name, l.Rate())
		}
	}
}

// The test that supervisors run finds each fault of a NIC, in the relays' sandbox, and keeps
// the results of the boot.
func TestTriplesInSandboxFindNICFaults(t *testing.T) {
	h, err := testbed.New(t.TempDir(), binaries, testbed.GPUsSimulated)
	if err == nil {
		err = h.Configure(asItIs)
	}
	if err != nil {
		t.Fatal(err)
	}
	gpu := func(i int) launch.GPU {
		g := h.Plan.GPUs[i]
		return launch.GPU{UUID: g.UUID, BusID: g.BusID, Index: g.Index}
	}
	name := launch.TripleName{PairName: launch.PairName{GPU: gpu(0), Server: gpu(1)}, NIC: "mlx5_0"}
	for _, fault := range append(softdevice.Faults(), "") {
		nic, err := softdevice.New(t.TempDir(), softdevice.Device{Name: "mlx5_0", GUID: 1, Address: "192.0.2.1", Holds: true,
			Fault: fault})
		if err != nil {
			t.Fatal(err)
		}
		library, err := os.MkdirTemp(h.Root, "library-*")
		if err != nil {
			t.Fatal(err)
		}
		environment, err := nic.Apart(library)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.Chmod(library, 0o755), os.Chmod(nic.Dir, 0o777)); err != nil {
			t.Fatal(err)
		}
		if err := h.Configure(func(c *config.Config) {
			c.Relay.Environment = append(c.Relay.Environment, environment...)
			c.Relay.SandboxWrite = append(c.Relay.SandboxWrite, nic.Dir)
		}); err != nil {
			t.Fatal(err)
		}
		tester, err := selftest.NewTester(h.Layout, h.Config, h.HookBinary())
		if err != nil {
			t.Fatal(err)
		}
		want := launch.VerdictWrong
		if fault == "" {
			want = launch.VerdictGood
		}
		var got []launch.Triple
		if err := tester.TestTriples(t.Context(), []launch.TripleName{name}, nil, true,
			func(r launch.Triple) { got = append(got, r) }); err != nil || len(got) != 1 || got[0].Verdict != want {
			t.Errorf("fault %q: results %+v, %v", fault, got, err)
		}
		if known, err := tester.KnownTriples([]launch.TripleName{name}, nil); err != nil || len(known) != 1 ||
			known[0].Verdict != want {
			t.Errorf("fault %q: kept results %+v, %v", fault, known, err)
		}
	}
}
