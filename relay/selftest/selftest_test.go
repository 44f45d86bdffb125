package selftest

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/sim"
	"github.com/peerlane/peerlane/relay/launch"
)

// child has a test binary do the job that its standard input says: the environment has the faults
// of the simulator.
const child = "PEERLANE_TEST_SELFTEST"

// patience has the nanoseconds of a child's limits, of a copy and of a pair.
const patience = "PEERLANE_TEST_SELFTEST_PATIENCE"

func TestMain(m *testing.M) {
	if os.Getenv(child) == "" {
		os.Exit(m.Run())
	}
	var job launch.PairJob
	err := json.NewDecoder(os.Stdin).Decode(&job)
	var d *cuda.Driver
	if err == nil {
		d, err = cuda.Open()
	}
	lines := json.NewEncoder(os.Stdout)
	if err == nil {
		err = lines.Encode(launch.PairHost{Simulated: d.Simulated()})
	}
	tell := func(p launch.Pair) { _ = lines.Encode(p) } // the parent sees what is missing
	if text := os.Getenv(patience); text != "" {
		_, scan := fmt.Sscan(text, &simulatedLimits.copy, &simulatedLimits.pair)
		err = errors.Join(err, scan)
	}
	if err == nil {
		err = Run(d, job, tell, func(p launch.Pair) { tell(p); os.Exit(1) })
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func gpu(i int, uuid string) launch.GPU {
	return launch.GPU{BusID: fmt.Sprintf("0000:%02x:00.0", 16+i), UUID: uuid, Index: i}
}

// run tests pairs of simulated GPUs with faults, as `self-test` does.
func run(
	t *testing.T,
	fault string,
	memory uint64,
	pairs ...launch.PairName,
) ([]launch.Pair, map[string]sim.DeviceLog) {
	t.Helper()
	return do(t, fault, memory, launch.PairJob{Pairs: pairs, SlotBytes: 32 << 20})
}

// realGPUs has the tests of pairs that are good find the machine's GPUs.
var realGPUs = os.Getenv("PEERLANE_TEST_CUDA") == "driver"

func do(t *testing.T, fault string, memory uint64, job launch.PairJob) ([]launch.Pair, map[string]sim.DeviceLog) {
	t.Helper()
	dir := t.TempDir()
	var devices []sim.Device
	for i := range 3 {
		devices = append(devices, sim.Device{
			Index: i, Minor: i, BusID: gpu(i, "").BusID, UUID: fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i),
			Memory: memory, Name: "Simulated",
		})
	}
	if err := sim.Write(dir, devices); err != nil {
		t.Fatal(err)
	}
	environment, err := sim.Environment(dir)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(job)
	if err != nil {
		t.Fatal(err)
	}
	found := ask(t, job.Pairs, string(text), append(environment, "PEERLANE_SIM_FAULT="+fault), true)
	log, err := sim.ReadLog(dir)
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]sim.DeviceLog{}
	for _, d := range log {
		by[d.BusID] = d
	}
	return found, by
}

// ask has a process of its own do a job.
func ask(
	t *testing.T,
	pairs []launch.PairName,
	job string,
	environment []string,
	simulated bool,
) (found []launch.Pair) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), environment...), child+"=1")
	cmd.Stdin, cmd.Stderr = strings.NewReader(job), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Logf("the tester ended: %v", err)
	}
	if err := launch.ReadPairs(strings.NewReader(string(out)), pairs, func(h launch.PairHost, p launch.Pair) {
		if h.Simulated != simulated {
			t.Errorf("it says that simulated is %v", h.Simulated)
		}
		found = append(found, p)
	}); err != nil {
		t.Fatal(err)
	}
	return found
}

// Each pair of the machine's GPUs passes, with PEERLANE_TEST_CUDA=driver, else each pair of simulated GPUs.
func TestEachPairOfTheMachinePassesSelfTest(t *testing.T) {
	if !realGPUs {
		pairs := []launch.PairName{
			{GPU: gpu(0, ""), Server: gpu(1, "")}, {GPU: gpu(0, ""), Server: gpu(2, "")}, {GPU: gpu(1, ""), Server: gpu(2, "")},
		}
		found, _ := run(t, "", 8<<30, pairs...)
		if len(found) != len(pairs) {
			t.Errorf("%d of %d pairs have a result", len(found), len(pairs))
		}
		for _, p := range found {
			if p.Verdict != launch.VerdictGood {
				t.Errorf("%v: %+v", p.PairName, p)
			}
		}
		return
	}
	d, err := cuda.Open()
	if err != nil {
		t.Fatal(err)
	}
	n, err := d.DeviceCount()
	if err != nil {
		t.Fatal(err)
	}
	var gpus []launch.GPU
	for i := range n {
		g := launch.GPU{Index: i}
		ordinal, err := d.DeviceGet(i)
		if err == nil {
			g.BusID, err = d.DevicePCIBusID(ordinal)
		}
		if err != nil {
			t.Fatal(err)
		}
		gpus = append(gpus, g)
	}
	job := launch.PairJob{SlotBytes: 32 << 20}
	for i, client := range gpus {
		for _, server := range gpus[i+1:] {
			job.Pairs = append(job.Pairs, launch.PairName{GPU: client, Server: server})
		}
	}
	text, err := json.Marshal(job)
	if err != nil {
		t.Fatal(err)
	}
	found := ask(t, job.Pairs, string(text), nil, false)
	if len(found) != len(job.Pairs) {
		t.Errorf("of %d pairs %d are told of", len(job.Pairs), len(found))
	}
	for _, p := range found {
		text, _ := json.Marshal(p) // of what was JSON
		t.Logf("%s", text)
		if p.Verdict != launch.VerdictGood || p.Reader != readerPassed || p.Chunk == 0 {
			t.Errorf("%v: %s %s, kernel %s, chunk %d", p.PairName, p.Verdict, p.Reason, p.Reader, p.Chunk)
		}
	}
}

const plenty = 1 << 30

var pair01, pair02 = launch.PairName{
	GPU:    gpu(0, ""),
	Server: gpu(1, ""),
}, launch.PairName{
	GPU:    gpu(0, ""),
	Server: gpu(2, ""),
}

func TestGoodPairPassesSelfTest(t *testing.T) {
	found, log := run(t, "", plenty, pair01, pair02)
	if len(found) != 2 {
		t.Fatalf("found %+v", found)
	}
	for _, p := range found {
		t.Logf(
			"%d bytes, %d ms, %+v, %+v, chunk %d, depth %d, streams %d",
			p.Bytes,
			p.Milliseconds,
			p.Push,
			p.Pull,
			p.Chunk,
			p.Depth,
			p.Streams,
		)
		if p.Verdict != launch.VerdictGood || p.Reader != readerPassed || p.Bytes < 16<<20 || p.GPU.UUID == "" ||
			p.Server.UUID == "" {
			t.Errorf("%+v", p)
		}
		for _, r := range []launch.PairRate{p.Push, p.Pull} {
			if r.Client <= 0 || r.Server <= 0 || r.Bounce <= 0 {
				t.Errorf("rates %+v", r)
			}
		}
		if (p.Chunk == 0) != (p.Streams == 0) || (p.Chunk == 0) != (p.Depth == 0) {
			t.Errorf("half a calibration: %+v", p)
		}
	}
	for _, d := range log {
		if d.Contexts == 0 || d.Allocated > 256<<20 {
			t.Errorf("on %s there were %d contexts and %d bytes", d.BusID, d.Contexts, d.Allocated)
		}
	}
}

func TestFaultyPairFailsWithReason(t *testing.T) {
	for _, c := range []struct {
		name, fault, verdict, reason string
		other                        bool // a second pair is tested
	}{
		{"one wrong byte", "cuMemcpyAsync:after=9:times=1:corrupt", launch.VerdictWrong,
			"1 arrived wrong, and 0 beside them", true},
		{"one wrong byte of two copies in a call", "cuMemcpyBatchAsync:after=9:times=1:corrupt", launch.VerdictWrong,
			"of 2 bytes from", false},
		{"a wrong byte of a large copy", "cuMemcpyAsync:after=11:times=1:corrupt", launch.VerdictWrong,
			"of 8388608 bytes from", false},
		{"a copy that fails", "cuMemcpyAsync:after=3:times=1:error=1", launch.VerdictWrong,
			"failed: GPU 0000:10:00.0: cuMemcpyAsync", true},
		{"a copy that loses the context", "cuMemcpyAsync:after=3:times=1:error=700", launch.VerdictWrong,
			"CUDA_ERROR_ILLEGAL_ADDRESS", true},
		{"no room", "cuMemCreate:times=1:oom", launch.VerdictUntested, "CUDA_ERROR_OUT_OF_MEMORY", true},
		{"a GPU that is taken", "cuCtxCreate*:times=1:error=46", launch.VerdictUntested, "CUDA_ERROR_DEVICE_UNAVAILABLE",
			true},
		{"a wrong byte that a running kernel reads", "cuMemcpyAsync:after=14:times=1:corrupt", launch.VerdictWrong,
			"a kernel that runs on 0000:11:00.0 read 1 wrong words of 8 bytes", false},
		{"the same in the other direction", "cuMemcpyAsync:after=25:times=1:corrupt", launch.VerdictWrong,
			"a kernel that runs on 0000:10:00.0 read 1 wrong words of 8 bytes", false},
		// After the compared copies every copy between the GPUs is late, and no copy between GPU
		// and host: a round of 4 per direction, 2 and 2 by the server, and a round per direction of
		// the second measurement, which exceeds the limit.
		{"slower than the bounce", "cuMemcpyAsync:after=28:times=20:delay=1000", launch.VerdictSlow,
			"and the bounce through the host's memory", false},
		{"slow for a moment", "cuMemcpyAsync:after=28:times=4:delay=800", launch.VerdictGood, "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			pairs := []launch.PairName{pair01}
			if c.other {
				pairs = append(pairs, pair02)
			}
			found, _ := run(t, c.fault, plenty, pairs...)
			for _, p := range found {
				t.Logf("%s %s %+v %+v", p.Verdict, p.Reason, p.Push, p.Pull)
			}
			if len(found) == 0 || found[0].Verdict != c.verdict || !strings.Contains(found[0].Reason, c.reason) {
				t.Fatalf("found %+v", found)
			}
			if lost := strings.Contains(c.name, "loses"); lost != (len(found) < len(pairs)) {
				t.Errorf("%d pairs are told of", len(found))
			}
			if len(found) == 2 && found[1].Verdict != launch.VerdictGood {
				t.Errorf("the fault of one pair is the other's: %s", found[1].Reason)
			}
		})
	}
}

// Only a copy that does not end speaks against a pair. A further delay, as on a busy host, makes
// the pair untested.
func TestHangingCopyFailsItsPair(t *testing.T) {
	for _, c := range []struct {
		name, fault     string
		copy, pair      time.Duration
		verdict, reason string
	}{
		{"a copy", "cuMemcpyAsync:after=9:times=1:delay=60000", 3 * time.Second, time.Hour, launch.VerdictWrong,
			"a copy does not end within 3s"},
		{"a copy of the rates", "cuMemcpyAsync:after=53:times=1:delay=60000", 3 * time.Second, time.Hour,
			launch.VerdictWrong, "a copy does not end within 3s"},
		{"a context", "cuCtxCreate*:times=1:delay=60000", time.Second, 3 * time.Second, launch.VerdictUntested,
			"the test has not ended within 3s"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv(patience, fmt.Sprint(int64(c.copy), " ", int64(c.pair)))
			found, _ := run(t, c.fault, plenty, pair01, pair02)
			if len(found) != 1 || found[0].Verdict != c.verdict || !strings.Contains(found[0].Reason, c.reason) {
				t.Errorf("found %+v", found)
			}
		})
	}
}

// Nothing larger than a slot is chosen, and nothing by halves. On a busy machine the calibration
// may not end in time, and chooses nothing: TestChooseTakesSmallestChunkNearBest is for the choice.
func TestCalibrationChoosesWithinSlot(t *testing.T) {
	for range 5 {
		found, _ := do(t, "", plenty, launch.PairJob{Pairs: []launch.PairName{pair01}, SlotBytes: 1 << 20})
		if len(found) != 1 {
			t.Fatalf("found %+v", found)
		}
		p := found[0]
		if p.Chunk == 0 && p.Depth == 0 && p.Streams == 0 {
			continue
		}
		if p.Chunk != 1<<20 || !slices.Contains(depths, p.Depth) || p.Streams < 1 || p.Streams > maxStreams {
			t.Errorf("chosen are pieces of %d, %d under way, by %d streams", p.Chunk, p.Depth, p.Streams)
		}
		return
	}
	t.Log("the machine was too busy for a calibration, five times")
}

// Where no kernel runs the rest of the test counts.
func TestGPUWithoutKernelsPassesOtherSteps(t *testing.T) {
	found, _ := run(t, "cuModuleLoad*:error=209", plenty, pair01)
	if len(found) != 1 || found[0].Verdict != launch.VerdictGood ||
		!strings.HasPrefix(found[0].Reader, "not tried: kernels of Peerlane: cuModuleLoad") {
		t.Errorf("found %s: %s, %s", found[0].Verdict, found[0].Reason, found[0].Reader)
	}
}

func TestNearlyFullGPUIsSkipped(t *testing.T) {
	found, log := run(t, "", minFreeBytes+memory/2, pair01)
	if len(found) != 1 || found[0].Verdict != launch.VerdictUntested ||
		!strings.Contains(found[0].Reason, "has 272 MiB free, and a test leaves those be that have less than 288") {
		t.Errorf("found %s: %s", found[0].Verdict, found[0].Reason)
	}
	for _, d := range log {
		if d.Allocated > 0 {
			t.Errorf("on %s %d bytes were allocated", d.BusID, d.Allocated)
		}
	}
}

func TestMissingPairFailsWithReason(t *testing.T) {
	other := launch.PairName{GPU: gpu(0, "GPU-11111111-0000-0000-0000-000000000000"), Server: gpu(1, "")}
	found, _ := run(t, "", plenty, launch.PairName{GPU: gpu(0, ""), Server: gpu(9, "")}, other)
	// The answer of a different GPU does not count for the requested GPU.
	if len(found) != 2 || found[0].Verdict != launch.VerdictUntested || found[1].Verdict != launch.VerdictUntested ||
		!strings.Contains(found[1].Reason, "the plan says") {
		t.Errorf("found %+v", found)
	}
}

// The smallest chunk that comes near the best, and a second stream only where it
// brings something.
func TestChooseTakesSmallestChunkNearBest(t *testing.T) {
	list := func(rates ...float64) (p []plan, r []float64) {
		for i := range rates {
			p = append(p, plan{chunks[i/2], fullDepth, 1 + i%2})
		}
		return p, rates
	}
	for _, c := range []struct {
		rates []float64
		want  plan
	}{
		{[]float64{0.2, 0.2, 0.5, 0.5, 1, 1}, plan{4 << 20, fullDepth, 1}},
		{[]float64{0.2, 0.4, 0.5, 0.99, 1, 1}, plan{2 << 20, fullDepth, 2}},
		{[]float64{0.98, 1.02, 0.5, 0.99, 1, 1}, plan{1 << 20, fullDepth, 2}},
		{[]float64{0.98, 1, 0.5, 0.99, 1, 1}, plan{1 << 20, fullDepth, 1}},
		{[]float64{1, 0.5}, plan{1 << 20, fullDepth, 1}},
	} {
		plans, rates := list(c.rates...)
		if got, ok := choose(plans, rates); !ok || got != c.want {
			t.Errorf("of %v it is %+v, want %+v", c.rates, got, c.want)
		}
	}
	if _, ok := choose(nil, nil); ok {
		t.Error("of nothing something is chosen")
	}
}

func TestReasonsAreBounded(t *testing.T) {
	p := launch.Pair{
		PairName: pair01,
		Verdict:  launch.VerdictUntested,
		Reason:   bounded(strings.Repeat("ä\n\x00\xff", 1000)),
	}
	if err := p.Check(); err != nil {
		t.Errorf("%q: %v", p.Reason, err)
	}
}
