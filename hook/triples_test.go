package hook_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo/recorded"
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
	for fault("triple hangs") {
		if _, err := os.Stat(filepath.Join(os.Getenv("TEST_DIR"), "up")); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	lines := json.NewEncoder(os.Stdout)
	for _, name := range job.Triples {
		t := launch.Triple{TripleName: name, Verdict: launch.VerdictGood, Rounds: 2048, Bytes: 1 << 20,
			Memory: launch.MemoryDMABuf}
		switch {
		case fault("wrong triple"):
			t.Verdict, t.Reason = launch.VerdictWrong, "1 of 64 bytes are wrong in round 3"
		case fault("port down") && len(job.Triples) > 0:
			if _, err := os.Stat(filepath.Join(os.Getenv("TEST_DIR"), "up")); err != nil {
				t.Verdict, t.Reason = launch.VerdictUntested, "port 1 of mlx5_0 is DOWN"
			}
		case fault("port comes up"):
			state := filepath.Join(os.Getenv("TEST_DIR"), "state")
			if text, err := os.ReadFile(state); err != nil || strings.Contains(string(text), "DOWN") {
				t.Verdict, t.Reason = launch.VerdictUntested, "port 1 of mlx5_0 is DOWN"
			}
			if err := os.WriteFile(state, []byte("4: ACTIVE\n"), 0o644); err != nil {
				fatal(err)
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

func TestSupervisorTestsTriplesForRelay(t *testing.T) {
	for _, c := range []struct{ fault, verdict, reason, log string }{
		{"", launch.VerdictGood, "", "are verified: 2048 rounds"},
		{"wrong triple", launch.VerdictWrong, "1 of 64 bytes are wrong in round 3",
			"failed the test: 1 of 64 bytes are wrong in round 3; data bounces through host memory"},
		{"no library", launch.VerdictUntested, "the test of GPUs and NICs failed: exit status 1: libibverbs.so.1 cannot " +
			"be loaded", "could not be verified; data bounces"},
	} {
		t.Run(c.verdict, func(t *testing.T) {
			h := newHost(t)
			g := h.start(t, withSoftwareDevice(h.tested("c", startProcess(t).Process.Pid, launch.SelfTestOnce, c.fault)))
			got := h.configured(t, func(c launch.Config) bool { return len(c.Triples) == 1 })
			if r := got.Triples[0]; r.TripleName != threeOf(3) || r.Verdict != c.verdict ||
				!strings.Contains(r.Reason, c.reason) {
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
				for _, got := range reports[launch.Config](t, h.dir, "config") {
					if got.Container == "d" && len(got.Triples) == 1 {
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

// A lane that is added during a test of triples is verified.
func TestLaneAddedDuringTripleTestIsVerified(t *testing.T) {
	h := newHost(t)
	withPairs := withSoftwareDevice(h.tested("c", startProcess(t).Process.Pid, launch.SelfTestOnce, "", lane(3), lane(4)))
	withPairs.Config.Relay.Transport = launch.TransportTCP
	h.start(t, withPairs)
	h.configured(t, func(c launch.Config) bool { return len(c.Pairs) == 2 })
	p := startProcess(t).Process.Pid
	jobs := func(want int) {
		t.Helper()
		testutil.Succeeds(t, "a test of triples runs", func() error {
			if list := reports[launch.RDMAJob](t, h.dir, "triples"); len(list) != want {
				return fmt.Errorf("the jobs are %+v", list)
			}
			return nil
		})
	}
	request := func(l launch.Lane) hook.Request {
		return withSoftwareDevice(h.tested("d", p, launch.SelfTestOnce, "triple hangs", l))
	}
	h.start(t, request(lane(3)))
	jobs(1)
	g := h.start(t, request(lane(4)))
	jobs(2)
	if err := os.WriteFile(filepath.Join(h.dir, "up"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	h.configured(t, func(c launch.Config) bool {
		return c.Generation == g.ID && len(c.Triples) == 2 && launch.FindTriple(c.Triples, threeOf(4)) != nil
	})
}

func TestSupervisorTestsNoTripleWithoutRDMA(t *testing.T) {
	h := newHost(t)
	r := withSoftwareDevice(h.tested("c", startProcess(t).Process.Pid, launch.SelfTestOnce, ""))
	r.Config.Relay.Transport = launch.TransportTCP
	g := h.start(t, r)
	h.configured(t, func(c launch.Config) bool { return len(c.Pairs) == 1 })
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
		var got []launch.Triple
		if err := tester.TestTriples(t.Context(), []launch.TripleName{threeOf(3)}, nil, false,
			func(r launch.Triple) { got = append(got, r) }); err != nil || len(got) != 1 ||
			got[0].Verdict != launch.VerdictGood {
			t.Fatalf("%+v, %v", got, err)
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
	if known, err := tester.KnownTriples([]launch.TripleName{threeOf(3), threeOf(4)}, nil); err != nil ||
		len(known) != 1 || known[0].Setting == "" || known[0].At == 0 {
		t.Errorf("kept is %+v, %v", known, err)
	}
}

// enableACS turns on an ACS control, Request Redirect, of the first PCIe port of a sysfs that has the
// capability.
func enableACS(t *testing.T, sysfs string) {
	t.Helper()
	const extended, capabilityACS, controls, requestRedirect = 0x100, 0x000d, 6, 1 << 2
	files, err := filepath.Glob(filepath.Join(sysfs, "bus/pci/devices/*/config"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for at := extended; at >= extended && at+8 <= len(data); {
			header := binary.LittleEndian.Uint32(data[at:])
			if uint16(header) == capabilityACS && data[at+controls]&requestRedirect == 0 {
				data[at+controls] |= requestRedirect
				if err := os.WriteFile(file, data, 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			at = int(header >> 20 &^ 3)
		}
	}
	t.Fatal("the recorded host has no port with ACS and without Request Redirect")
}

func TestTripleResultHoldsForOneACSSetting(t *testing.T) {
	sysfs, _, err := recorded.Unpack(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	before := selftest.Sysfs
	selftest.Sysfs = sysfs
	t.Cleanup(func() { selftest.Sysfs = before })
	tester, names := newHost(t).tester(t, ""), []launch.TripleName{threeOf(3)}
	test := func() {
		t.Helper()
		if err := tester.TestTriples(t.Context(), names, nil, false, func(launch.Triple) {}); err != nil {
			t.Fatal(err)
		}
	}
	known := func(want int) {
		t.Helper()
		if known, err := tester.KnownTriples(names, nil); err != nil || len(known) != want {
			t.Errorf("%d results are known: %+v, %v; want %d", len(known), known, err, want)
		}
	}
	test()
	known(1)
	enableACS(t, sysfs)
	known(0)
	test()
	known(1)
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

func TestTripleIsTestedAgainWhenItsPortComesUpDuringTheTest(t *testing.T) {
	write := kernelWith(t)
	write("ports/1/lid", "")
	h := newHost(t)
	state := filepath.Join(h.dir, "state")
	if err := os.WriteFile(state, []byte("1: DOWN\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(state, 0o666); err != nil { // for the tester's uid
		t.Fatal(err)
	}
	if err := os.Symlink(state, filepath.Join(selftest.Sysfs, "class/infiniband/mlx5_0/ports/1/state")); err != nil {
		t.Fatal(err)
	}
	found := make(chan launch.Triple, 10)
	if err := selftest.TestUntilUp(t.Context(), h.tester(t, "port comes up"), []launch.TripleName{threeOf(3)}, nil,
		found); err != nil {
		t.Fatal(err)
	}
	close(found)
	var verdicts []string
	for r := range found {
		verdicts = append(verdicts, r.Verdict)
	}
	if want := []string{launch.VerdictUntested, launch.VerdictGood}; !slices.Equal(verdicts, want) {
		t.Errorf("the verdicts are %v, want %v", verdicts, want)
	}
}

// The lock of the host's self-tests is free between tests of a few triples.
func TestTriplesAreTestedInParts(t *testing.T) {
	kernelWith(t)
	h := newHost(t)
	var names []launch.TripleName
	for i := range 10 {
		names = append(names, threeOf(i))
	}
	found := make(chan launch.Triple, len(names))
	if err := selftest.TestUntilUp(t.Context(), h.tester(t, ""), names, nil, found); err != nil ||
		len(found) != len(names) {
		t.Errorf("%d results, %v", len(found), err)
	}
	jobs := reports[launch.RDMAJob](t, h.dir, "triples")
	if len(jobs) != 3 {
		t.Errorf("the jobs are %+v", jobs)
	}
	for _, j := range jobs {
		if len(j.Triples) > 4 {
			t.Errorf("a job has %d triples", len(j.Triples))
		}
	}
}
