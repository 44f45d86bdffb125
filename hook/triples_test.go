package hook_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
)

// tripleTesterMain is a test of triples with the result that TEST_FAULT demands. It reports the
// job.
func tripleTesterMain(fault func(string) bool) {
	var job launch.RDMAJob
	if err := json.NewDecoder(os.Stdin).Decode(&job); err != nil {
		fatal(err)
	}
	report("triples", job)
	if fault("no library") {
		fmt.Fprintln(os.Stderr, "libibverbs.so.1 cannot be loaded")
		os.Exit(1)
	}
	lines := json.NewEncoder(os.Stdout)
	for _, name := range job.Triples {
		t := launch.Triple{TripleName: name, Verdict: launch.VerdictGood, Rounds: 2048, Bytes: 1 << 20, Memory: launch.MemoryDMABuf}
		switch {
		case fault("wrong triple"):
			t.Verdict, t.Reason = launch.VerdictWrong, "1 of 64 bytes are wrong in round 3"
		case fault("port down") && len(job.Triples) > 0:
			if _, err := os.Stat(filepath.Join(os.Getenv("TEST_DIR"), "up")); err != nil {
				t.Verdict, t.Reason = launch.VerdictUntested, "port 1 of mlx5_0 is DOWN"
			}
		}
		if err := lines.Encode(launch.RDMAResult{NIC: name.NIC, Triple: &t}); err != nil {
			fatal(err)
		}
	}
	os.Exit(0)
}

// withSoftwareDevice returns a request whose relay loads another libibverbs.
func withSoftwareDevice(r hook.Request) hook.Request {
	r.Config.Relay.Environment = append(r.Config.Relay.Environment, "PEERLANE_VERBS_LIBRARY=libibverbs.so.none")
	return r
}

func threeOf(index int) launch.TripleName {
	return launch.TripleName{PairName: launch.PairName{GPU: lane(index).GPU, Server: lane(100).GPU}, NIC: "mlx5_0"}
}

func TestSupervisorTestsTriplesAndTellsRelay(t *testing.T) {
	for _, c := range []struct{ fault, verdict, reason, log string }{
		{"", launch.VerdictGood, "", "are verified: 2048 rounds"},
		{"wrong triple", launch.VerdictWrong, "1 of 64 bytes are wrong in round 3", "are not used together: 1 of 64 bytes are wrong in round 3; data bounces through the host's memory"},
		{"no library", launch.VerdictUntested, "the test of GPUs and NICs failed: exit status 1: libibverbs.so.1 cannot be loaded", "are not verified, and data bounces"},
	} {
		t.Run(c.verdict, func(t *testing.T) {
			h := newHost(t)
			g := h.start(t, withSoftwareDevice(h.tested("c", startProcess(t).Process.Pid, launch.SelfTestOnce, c.fault)))
			told := h.told(t, func(c launch.Config) bool { return len(c.Triples) == 1 })
			if r := told.Triples[0]; r.TripleName != threeOf(3) || r.Verdict != c.verdict || !strings.Contains(r.Reason, c.reason) {
				t.Errorf("the relay is told %+v", r)
			}
			if first := reports[launch.Config](t, h.dir, "config")[0]; len(first.Triples) != 0 {
				t.Errorf("at first the relay is told %+v", first.Triples)
			}
			if log := h.log(t, g.ID); !strings.Contains(log, c.log) {
				t.Errorf("the log says %s", log)
			}
			inspected, err := control.Inspect(h.layout, g.ID)
			if err != nil || len(inspected.Triples) != 1 || inspected.Triples[0].Verdict != c.verdict {
				t.Errorf("inspect shows %+v, %v", inspected.Triples, err)
			}
			// Another container of the boot knows the result at once.
			if c.verdict == launch.VerdictUntested {
				return
			}
			h.start(t, withSoftwareDevice(h.tested("d", startProcess(t).Process.Pid, launch.SelfTestOnce, c.fault)))
			testutil.Succeeds(t, "the second relay is told", func() error {
				for _, told := range reports[launch.Config](t, h.dir, "config") {
					if told.Container == "d" && len(told.Triples) == 1 {
						return nil
					}
				}
				return fmt.Errorf("no configuration of container d has the triple")
			})
			if jobs := reports[launch.RDMAJob](t, h.dir, "triples"); len(jobs) != 1 {
				t.Errorf("%d tests ran", len(jobs))
			}
		})
	}
}

func TestSupervisorTestsNoTripleWithoutRDMA(t *testing.T) {
	h := newHost(t)
	r := withSoftwareDevice(h.tested("c", startProcess(t).Process.Pid, launch.SelfTestOnce, ""))
	r.Config.Relay.Transport = launch.TransportTCP
	g := h.start(t, r)
	h.told(t, func(c launch.Config) bool { return len(c.Pairs) == 1 })
	if jobs := reports[launch.RDMAJob](t, h.dir, "triples"); len(jobs) != 0 {
		t.Errorf("tested %+v", jobs)
	}
	if inspected, err := control.Inspect(h.layout, g.ID); err != nil || len(inspected.Triples) != 0 {
		t.Errorf("inspect shows %+v, %v", inspected.Triples, err)
	}
}

// kernelWith makes a sysfs with a NIC for testers.
func kernelWith(t *testing.T) (write func(name, text string)) {
	t.Helper()
	root := t.TempDir()
	before := selftest.Sysfs
	selftest.Sysfs = root
	t.Cleanup(func() { selftest.Sysfs = before })
	write = func(name, text string) {
		t.Helper()
		path := filepath.Join(root, "class/infiniband/mlx5_0", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("fw_ver", "28.39.1002\n")
	return write
}

func TestTripleResultHoldsForOneFirmwareAndDriver(t *testing.T) {
	write := kernelWith(t)
	version := filepath.Join(t.TempDir(), "version")
	before := selftest.ModuleVersion
	selftest.ModuleVersion = version
	t.Cleanup(func() { selftest.ModuleVersion = before })
	h := newHost(t)
	tester := h.tester(t, "")
	test := func(want int) {
		t.Helper()
		var told []launch.Triple
		if err := tester.TestTriples(t.Context(), []launch.TripleName{threeOf(3)}, nil, false, func(r launch.Triple) { told = append(told, r) }); err != nil || len(told) != 1 || told[0].Verdict != launch.VerdictGood {
			t.Fatalf("%+v, %v", told, err)
		}
		if runs := len(reports[launch.RDMAJob](t, h.dir, "triples")); runs != want {
			t.Errorf("%d tests ran, want %d", runs, want)
		}
	}
	test(1)
	test(1)
	write("fw_ver", "28.40.1000\n")
	if known, err := tester.KnownTriples([]launch.TripleName{threeOf(3)}, nil); err != nil || len(known) != 0 {
		t.Errorf("with another firmware the result is known: %+v, %v", known, err)
	}
	test(2)
	test(2)
	ordered := launch.DefaultVerbs
	ordered.RelaxedOrdering = false
	if known, err := tester.KnownTriples([]launch.TripleName{threeOf(3)}, &ordered); err != nil || len(known) != 0 {
		t.Errorf("with another configuration the result is known: %+v, %v", known, err)
	}
	if err := os.WriteFile(version, []byte("580.159.04\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	test(3)
	if known, err := tester.KnownTriples([]launch.TripleName{threeOf(3), threeOf(4)}, nil); err != nil || len(known) != 1 || known[0].Setting == "" || known[0].At == 0 {
		t.Errorf("kept is %+v, %v", known, err)
	}
}

func TestTripleIsTestedWhenItsPortComesUp(t *testing.T) {
	write := kernelWith(t)
	write("ports/1/state", "1: DOWN\n")
	h := newHost(t)
	found, done := make(chan launch.Triple, 10), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		done <- selftest.TestUntilUp(ctx, h.tester(t, "port down"), []launch.TripleName{threeOf(3)}, nil, found)
	}()
	if r := testutil.Receive(t, "the first result", found); r.Verdict != launch.VerdictUntested {
		t.Fatalf("%+v", r)
	}
	if err := os.WriteFile(filepath.Join(h.dir, "up"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	write("ports/1/state", "4: ACTIVE\n")
	if r := testutil.Receive(t, "the second result", found); r.Verdict != launch.VerdictGood {
		t.Fatalf("%+v", r)
	}
	if err := testutil.Receive(t, "the end", done); err != nil {
		t.Error(err)
	}
}
