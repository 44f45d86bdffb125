package planner

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

// anyHost is a random host with the given numbers of GPUs and NICs: nested switches, root
// ports, several sockets, links of any speed, and NVLink between no GPUs, groups of GPUs or the
// whole host.
func anyHost(r *rand.Rand, gpus, nics int) *topo.Host {
	pick := func(values ...float64) float64 { return values[r.IntN(len(values))] }
	b := topotest.Build(1 + r.IntN(4))
	for i := range b.H.CPUs {
		b.H.CPUs[i].Socket = pick(10, 16, 22, 40)
	}
	type slot struct {
		numa       int
		bridge, sw string
	}
	var slots []slot
	for i := range 1 + r.IntN(max(2, gpus)) {
		numa, bridge := r.IntN(len(b.H.CPUs)), fmt.Sprintf("pci%04x:00", i)
		if r.IntN(4) == 0 {
			slots = append(slots, slot{numa, bridge, ""})
			continue
		}
		sw := fmt.Sprintf("%04x:aa:00.0", i)
		b.Sw(sw, numa, bridge, "")
		b.H.Switches[len(b.H.Switches)-1].Link = pick(12, 24, 48)
		slots = append(slots, slot{numa, bridge, sw})
		if r.IntN(3) == 0 {
			below := fmt.Sprintf("%04x:bb:00.0", i)
			b.Sw(below, numa, bridge, sw)
			b.H.Switches[len(b.H.Switches)-1].Link = pick(12, 24, 48)
			slots = append(slots, slot{numa, bridge, below})
		}
	}
	for i := range gpus {
		s := slots[r.IntN(len(slots))]
		b.GPU(s.numa, s.bridge, s.sw)
		b.H.GPUs[i].BusID, b.H.GPUs[i].Link = fmt.Sprintf("%04x:01:00.0", i), pick(6, 12, 24, 48)
	}
	fewer := r.IntN(2) == 0 // few places for NICs
	for i := range nics {
		s := slots[r.IntN(len(slots))]
		if fewer {
			s = slots[r.IntN(1+len(slots)/3)]
		}
		b.NIC(fmt.Sprintf("mlx5_%d", i), s.numa, s.bridge, s.sw, topotest.Up(pick(25, 100, 100, 200, 400)))
		b.H.NICs[i].BusID, b.H.NICs[i].Link = fmt.Sprintf("%04x:02:00.0", i), pick(12, 24, 48)
	}
	switch r.IntN(4) {
	case 0:
		b.Nvswitches()
	case 1: // groups
		size := 2 + r.IntN(3)
		for i := range b.H.GPUs {
			for j := range b.H.GPUs {
				if i != j && i/size == j/size {
					b.H.GPUs[i].NVLinks = append(b.H.GPUs[i].NVLinks, topo.NVLink{Peer: b.H.GPUs[j].BusID, Count: 4, Bandwidth: 80})
				}
			}
		}
	}
	return b.Host()
}

// judged has the rates of a plan, of NCCL and of the optimum.
type judged struct {
	nccl, pxn, sent, planned, optimum float64 // of the slowest lane, GB/s; pxn and sent in the sending direction
}

func judge(t testing.TB, h *topo.Host) (j judged, ok bool) {
	t.Helper()
	return judgeWith(t, h, Config{})
}

func judgeWith(t testing.TB, h *topo.Host, c Config) (j judged, ok bool) {
	t.Helper()
	h = sortedHost(h)
	plan, err := Make(h, c)
	if err != nil {
		t.Fatal(err)
	}
	if err := plan.Check(); err != nil {
		t.Fatal(err)
	}
	e, err := plan.Estimate(h)
	if err != nil || len(e.GPUs) == 0 {
		return j, false
	}
	p, err := newPlanner(h, c)
	if err != nil {
		t.Fatal(err)
	}
	a := p.newAllocation(true)
	if len(a.flows) == 0 {
		return j, false
	}
	a.solve()
	lowest := func(of func(GPUEstimate) float64) float64 {
		var all []float64
		for _, g := range e.GPUs {
			all = append(all, of(g))
		}
		return slices.Min(all)
	}
	return judged{
		lowest(func(g GPUEstimate) float64 { return g.NCCL }), lowest(func(g GPUEstimate) float64 { return g.Send.PXN }),
		lowest(func(g GPUEstimate) float64 { return g.Send.Relay }), lowest(func(g GPUEstimate) float64 { return g.Relay }),
		a.bound,
	}, true
}

// bounded fails the test if a plan is below the bounds: the share least of the optimum, and the
// rates of NCCL.
func bounded(t testing.TB, name string, h *topo.Host, lowest float64) (j judged, ok bool) {
	t.Helper()
	if j, ok = judge(t, h); !ok {
		return j, false
	}
	if j.planned < lowest*j.optimum {
		t.Errorf("%s: the slowest lane has %.4g GB/s, %.3f of the %.4g that are possible, want %.2f", name, j.planned,
			j.planned/j.optimum, j.optimum, lowest)
	}
	if j.planned < j.nccl*(1-1e-9) {
		t.Errorf("%s: the slowest lane has %.6g GB/s, and with NCCL's defaults the slowest GPU has %.6g", name, j.planned,
			j.nccl)
	}
	if j.sent < j.pxn*(1-1e-9) {
		t.Errorf("%s: the slowest lane sends %.6g GB/s, and with PXN the slowest GPU sends %.6g", name, j.sent, j.pxn)
	}
	return j, true
}

// soakHosts returns the number of hosts of a test of the bounds: make soak-plan asks for
// thousands.
func soakHosts(t testing.TB, usual int) int {
	text := os.Getenv("PEERLANE_TEST_PLAN_HOSTS")
	if text == "" {
		return usual
	}
	count, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return count
}

func TestPlanOfAnySmallHostReachesTheOptimum(t *testing.T) {
	worst, gain, ahead, judgedHosts, members, lanes := 1.0, 0, 0, 0, 0, 0
	for seed := range uint64(soakHosts(t, 250)) {
		r := rand.New(rand.NewPCG(seed, 26))
		h := anyHost(r, 1+r.IntN(8), 1+r.IntN(8))
		j, ok := bounded(t, fmt.Sprintf("seed %d", seed), h, 0.98)
		if !ok {
			continue
		}
		judgedHosts++
		worst = min(worst, j.planned/j.optimum)
		if j.planned > j.nccl*1.01 {
			gain++
		}
		for _, l := range planOf(t, seed, h, Config{}).Lanes {
			lanes++
			members += len(l.Members)
			if strings.Contains(l.Reason, "NCCL does it") {
				ahead++
			}
		}
	}
	t.Logf("%d hosts: at least %.4f of the optimum, on %d faster than NCCL, %.2f members a lane, %d lanes as NCCL has "+
		"them", judgedHosts, worst, gain, float64(members)/float64(lanes), ahead)
	if gain < judgedHosts/10 {
		t.Errorf("of %d hosts the plan is faster than NCCL on %d: the hosts are too simple", judgedHosts, gain)
	}
}

// Hosts of up to 256 GPUs and NICs: a host per size, and a hundred per size with make
// soak-plan.
func TestPlanOfAnyLargeHostReachesItsBound(t *testing.T) {
	sizes := []int{40, 64, 128, 256}
	worst, slowest, judgedHosts := 1.0, time.Duration(0), map[int]int{}
	for seed := range uint64(max(len(sizes), soakHosts(t, 0)/100)) {
		r := rand.New(rand.NewPCG(seed, 27))
		size := sizes[int(seed)%len(sizes)]
		name := fmt.Sprintf("seed %d, %d GPUs and NICs", seed, size)
		h := anyHost(r, size, size)
		before := processorTime(t)
		if _, err := Make(h, Config{}); err != nil {
			t.Fatal(err)
		}
		took := processorTime(t) - before
		j, ok := bounded(t, name, h, 0.90)
		if !ok {
			continue
		}
		judgedHosts[size]++
		worst, slowest = min(worst, j.planned/j.optimum), max(slowest, took)
		t.Logf("%s: %.3f of the bound, %.2f of NCCL, %v of processor time", name, j.planned/j.optimum, j.planned/j.nccl,
			took.Round(time.Millisecond))
	}
	for _, size := range sizes {
		if judgedHosts[size] == 0 {
			t.Errorf("no host of %d GPUs and NICs has an estimate to compare with the bound", size)
		}
	}
	t.Logf("at least %.4f of the bound, at most %v of processor time", worst, slowest.Round(time.Millisecond))
}

// processorTime returns the processor time of the process.
func processorTime(t testing.TB) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// The revised simplex algorithm for large hosts reaches the optimum of the dense algorithm on
// small hosts, and proves no smaller bound.
func TestPlanByColumnsReachesTheOptimumOfTheDenseAlgorithm(t *testing.T) {
	defer func(before int) { maxCandidates = before }(maxCandidates)
	plain := func(r *rand.Rand, h *topo.Host) Config { return Config{} }
	for _, tt := range []struct {
		name   string
		build  func(r *rand.Rand, gpus, nics int) *topo.Host
		config func(r *rand.Rand, h *topo.Host) Config
	}{
		{"plain", anyHost, plain},
		{"measurements and virtual functions", measuredAndVirtual,
			func(r *rand.Rand, h *topo.Host) Config { return Config{VirtualFunctions: true} }},
		{"pinned lanes", anyHost, pinSome},
	} {
		t.Run(tt.name, func(t *testing.T) {
			worst := 1.0
			for seed := range uint64(max(24, soakHosts(t, 0)/10)) {
				r := rand.New(rand.NewPCG(seed, 28))
				gpus, nics := 2+r.IntN(7), 1+r.IntN(8)
				if seed%8 == 7 {
					gpus, nics = 16+r.IntN(17), 16+r.IntN(17)
				}
				h := sortedHost(tt.build(r, gpus, nics))
				c := tt.config(r, h)
				solved := func(limit int) (slowest, bound float64) {
					maxCandidates = limit
					p, err := newPlanner(h, c)
					if err != nil {
						t.Fatal(err)
					}
					a := p.newAllocation(true)
					if a.open == 0 {
						return 0, 0
					}
					slowest = a.slowest(a.solve())
					return slowest, a.bound
				}
				exact, _ := solved(1 << 20)
				rate, bound := solved(0)
				if exact == 0 {
					continue
				}
				worst = min(worst, rate/exact)
				if rate < 0.998*exact || rate > exact*1.002 || bound < exact*(1-1e-4) {
					t.Errorf("seed %d: the dense algorithm finds %.5g GB/s; the revised algorithm %.5g, and a bound of %.5g", seed,
						exact, rate, bound)
				}
			}
			t.Logf("at least %.4f of the dense algorithm", worst)
		})
	}
}

// Rounding can leave no full link with a positive price. The first link is not full.
func TestMasterWithoutAPositivePriceFixesAllFlows(t *testing.T) {
	for _, price := range []float64{0, 1e-12, -0.5, 0.5} {
		m := newMaster(2)
		m.add(0, part{}, load{{0, 1}, {1, 2}}, 0)
		m.add(1, part{}, load{{0, 1}, {1, 2}}, 0)
		if !m.enter(theLevel) || m.levelAt < 0 || !slices.Equal(m.full, []int{1}) {
			t.Fatalf("the level is at %d, and rows %v are full, want row 1", m.levelAt, m.full)
		}
		rate := m.now()
		m.inverse[1][m.levelAt] = price
		if m.fix() {
			t.Errorf("price %g: a flow is left", price)
		}
		m.settle()
		if !m.improve(10) {
			t.Errorf("price %g: the cost does not settle", price)
		}
		if diff := cmp.Diff([]float64{rate, rate}, m.rate); diff != "" || !m.fixed[0] || !m.fixed[1] {
			t.Errorf("price %g: fixed %v, rates %s", price, m.fixed, diff)
		}
	}
}

// pinSome assigns lanes to random GPUs: to any NIC, directly, through memory or by another GPU.
func pinSome(r *rand.Rand, h *topo.Host) (c Config) {
	for g := range h.GPUs {
		if r.IntN(3) > 0 || g == 0 {
			continue
		}
		a := Assignment{GPU: strconv.Itoa(h.GPUs[g].Index), NICs: []string{h.NICs[r.IntN(len(h.NICs))].Name}}
		if r.IntN(2) == 0 {
			a.Kind = KindBounce
		} else {
			a.Servers = []string{strconv.Itoa(h.GPUs[r.IntN(g)].Index)}
		}
		c.Lanes = append(c.Lanes, a)
	}
	return c
}

// measuredAndVirtual is anyHost with virtual functions of random NICs, and with a measurement
// whose directions differ.
func measuredAndVirtual(r *rand.Rand, gpus, nics int) *topo.Host {
	h := anyHost(r, gpus, nics)
	for i := range h.NICs {
		for f := range r.IntN(3) {
			v := h.NICs[i]
			v.Name, v.BusID = fmt.Sprintf("%s_v%d", v.Name, f), fmt.Sprintf("%04x:02:00.%d", i, 1+f)
			v.VirtualFunctionOf, v.Card = h.NICs[i].BusID, h.NICs[i].BusID
			h.NICs = append(h.NICs, v)
		}
	}
	if r.IntN(2) == 0 {
		h = sortedHost(h)
		m := &topo.Measured{Fingerprint: h.Fingerprint()}
		for i, g := range h.GPUs {
			for _, n := range h.NICs {
				if r.IntN(3) == 0 {
					m.Loops = append(m.Loops, topo.MeasuredLoop{NIC: n.Name, GPU: g.BusID, Out: 5 + 40*r.Float64(),
						In: 5 + 40*r.Float64()})
				}
			}
			m.Memory = append(m.Memory, topo.MeasuredHost{GPU: g.BusID, Out: 5 + 40*r.Float64(), In: 5 + 40*r.Float64()})
			for j, peer := range h.GPUs {
				if i != j {
					m.Copies = append(m.Copies, topo.MeasuredCopy{GPU: g.BusID, Peer: peer.BusID, Out: 5 + 100*r.Float64(),
						In: 5 + 100*r.Float64()})
				}
			}
		}
		for _, n := range h.NICs {
			if r.IntN(2) == 0 {
				m.Loops = append(m.Loops, topo.MeasuredLoop{NIC: n.Name, Out: 5 + 40*r.Float64(), In: 5 + 40*r.Float64()})
			}
		}
		if !h.Measure(m) {
			panic("the measurement is not of the host")
		}
	}
	return h
}

func TestPlanOfVirtualFunctionsAndMeasurementsReachesTheOptimum(t *testing.T) {
	judgedHosts, measured, with := 0, 0, 0
	for seed := range uint64(soakHosts(t, 150)) {
		r := rand.New(rand.NewPCG(seed, 31))
		h, c := measuredAndVirtual(r, 1+r.IntN(8), 1+r.IntN(6)), Config{VirtualFunctions: r.IntN(2) == 0}
		j, ok := judgeWith(t, h, c)
		if !ok {
			continue
		}
		judgedHosts++
		if h.Measured != nil {
			measured++
		}
		if c.VirtualFunctions {
			with++
		}
		if j.planned < 0.98*j.optimum {
			t.Errorf("seed %d: the slowest lane has %.4g GB/s, and %.4g are possible", seed, j.planned, j.optimum)
		}
		// The routes of a lane are equal in both directions. If the directions have different
		// measured rates, PXN's route for sending can be faster than the lane.
		if j.planned < j.nccl*(1-1e-9) || h.Measured == nil && j.sent < j.pxn*(1-1e-9) {
			t.Errorf("seed %d: the slowest lane has %.6g GB/s and sends %.6g; NCCL's defaults give the slowest GPU %.6g, and "+
				"with PXN NCCL sends %.6g", seed, j.planned, j.sent, j.nccl, j.pxn)
		}
	}
	if measured < judgedHosts/4 || with < judgedHosts/4 {
		t.Errorf("of %d hosts %d are measured, and %d plans use virtual functions", judgedHosts, measured, with)
	}
}

// The test enumerates choices with weights that sum up to at most four, on hosts of three GPUs.
// No choice is faster than the optimum, and the plan is not slower than the best choice.
func TestPlanBeatsEveryChoiceOfSmallWeights(t *testing.T) {
	tried := 0
	for seed := range uint64(max(30, soakHosts(t, 0)/10)) {
		r := rand.New(rand.NewPCG(seed, 29))
		h := sortedHost(anyHost(r, 1+r.IntN(3), 1+r.IntN(2)))
		p, err := newPlanner(h, Config{})
		if err != nil {
			t.Fatal(err)
		}
		a := p.newAllocation(true)
		if len(a.flows) == 0 {
			continue
		}
		a.solve()
		choices := make([][]mix, len(a.flows))
		for f := range a.flows {
			routes := len(a.routes[f])
			for x := range routes {
				choices[f] = append(choices[f], mix{{x, 1}})
				for y := x + 1; y < routes; y++ {
					choices[f] = append(choices[f], mix{{x, 1}, {y, 1}}, mix{{x, 3}, {y, 1}}, mix{{x, 1}, {y, 3}})
				}
			}
		}
		best, lanes := 0.0, make([]mix, len(a.flows))
		var try func(f int)
		try = func(f int) {
			if f == len(lanes) {
				tried++
				best = max(best, a.slowest(lanes))
				return
			}
			for _, m := range choices[f] {
				lanes[f] = m
				try(f + 1)
			}
		}
		product := 1
		for _, c := range choices {
			product *= len(c)
		}
		if product > 40_000 {
			continue
		}
		try(0)
		j, ok := judge(t, h)
		if !ok {
			continue
		}
		if best > a.bound*(1+1e-5) {
			t.Errorf("seed %d: a choice has %.6g GB/s, and the optimum is said to be %.6g", seed, best, a.bound)
		}
		if j.planned < 0.98*best {
			t.Errorf("seed %d: a choice has %.6g GB/s, the plan %.6g", seed, best, j.planned)
		}
	}
	if tried < 10_000 {
		t.Errorf("%d choices were tried: the hosts are too simple", tried)
	}
}

// Three GPUs share a NIC, and a fourth GPU has another NIC. A lane of the three GPUs uses the
// other NIC, unless configuration keeps near GPUs direct.
func TestPlanStagesNearGPUsToRaiseSlowestRate(t *testing.T) {
	host := func() *topo.Host {
		return topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").Sw("00aa:01:00.0", 0, "pci0000:20", "").
			GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0,
			"pci0000:20", "00aa:01:00.0").
			NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(200)).NIC("mlx5_1", 0, "pci0000:20", "00aa:01:00.0",
			topotest.Up(200)).Nvswitches().Host()
	}
	for _, tt := range []struct {
		near string
		want []float64
	}{{"", []float64{12.5, 12.5, 12.5, 12.5}}, {"auto", []float64{12.5, 12.5, 12.5, 12.5}},
		{nearDirect, []float64{25.0 / 3, 25.0 / 3, 25.0 / 3, 25}}} {
		plan := planOf(t, 0, host(), Config{Near: tt.near})
		var got []float64
		for _, l := range plan.Lanes {
			got = append(got, l.Bandwidth)
		}
		if diff := cmp.Diff(tt.want, got, roughly); diff != "" {
			t.Errorf("near %q: %s", tt.near, diff)
		}
	}
	_, err := Make(host(), Config{Near: "far"})
	if e, ok := errors.AsType[*keyError](err); !ok || e.Key != "plan.near" ||
		!testutil.HasError(e.Err, &valueError{"far", "must be auto or direct"}) {
		t.Errorf("near = far: %v", err)
	}
}

// Two GPUs share a NIC, and a third GPU has another NIC. A third of the traffic of the two GPUs
// uses the other NIC. Weights are small, and the lane has a direct part and a staged part.
func TestPlanSplitsLaneByWeight(t *testing.T) {
	h := topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").Sw("00aa:01:00.0", 0, "pci0000:20", "").
		GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0, "pci0000:20", "00aa:01:00.0").
		NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(200)).NIC("mlx5_1", 0, "pci0000:20", "00aa:01:00.0",
		topotest.Up(200)).Nvswitches().Host()
	plan := planOf(t, 0, h, Config{})
	mixed := 0
	for _, l := range plan.Lanes {
		if l.Bandwidth < 0.98*50/3 {
			t.Errorf("the lane of %s has %g GB/s, and 16.67 are possible", l.GPU, l.Bandwidth)
		}
		if sum := l.Weights(); sum > 64 {
			t.Errorf("the weights of %s come to %d", l.GPU, sum)
		}
		if len(l.Members) > 1 {
			mixed++
			if !strings.Contains(l.Reason, " parts ") {
				t.Errorf("the reason of %s names no parts: %s", l.GPU, l.Reason)
			}
		}
	}
	if mixed == 0 {
		t.Error("no lane has two members")
	}
}

func BenchmarkPlanOfAnyHost(b *testing.B) {
	for _, size := range []int{8, 64, 256} {
		b.Run(fmt.Sprintf("gpus=%d", size), func(b *testing.B) {
			seed := uint64(0)
			for b.Loop() {
				b.StopTimer()
				h := anyHost(rand.New(rand.NewPCG(seed, 27)), size, size)
				seed++
				b.StartTimer()
				if _, err := Make(h, Config{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// After an upgrade a host can have a plan of the previous release. Lanes of the plan have no
// members, and share traffic evenly.
func TestReadPlanOfPreviousVersionSharesEvenly(t *testing.T) {
	const file = `{"version": %d, "gpus": [{"busId": "0000:01:00.0"}, {"busId": "0000:02:00.0"}], "lanes": [
		{"gpu": "0000:01:00.0", "role": "near", "kind": "direct", "servers": [], "nics": ["mlx5_0", "mlx5_1"]},
		{"gpu": "0000:02:00.0", "role": "far", "kind": "staged", "relay": true, "servers": ["0000:01:00.0"], "nics": ["mlx5_0"]%s}]}`
	p, err := Parse(fmt.Appendf(nil, file, 2, ""))
	if err != nil {
		t.Fatal(err)
	}
	want := [][]Member{
		{{"0000:01:00.0", "mlx5_0", 1}, {"0000:01:00.0", "mlx5_1", 1}},
		{{"0000:01:00.0", "mlx5_0", 1}},
	}
	for i, l := range p.Lanes {
		if diff := cmp.Diff(want[i], l.Members); diff != "" {
			t.Errorf("lane %d: %s", i, diff)
		}
	}
	for name, members := range map[string]string{
		"weights of more than 1024": `, "members": [{"server": "0000:01:00.0", "nic": "mlx5_0", "weight": 1025}]`,
		"a weight of 0":             `, "members": [{"server": "0000:01:00.0", "nic": "mlx5_0", "weight": 0}]`,
		"another NIC":               `, "members": [{"server": "0000:01:00.0", "nic": "mlx5_1", "weight": 1}]`,
		"no server":                 `, "members": [{"nic": "mlx5_0", "weight": 1}]`,
	} {
		if _, err := Parse(fmt.Appendf(nil, file, 3, members)); err == nil {
			t.Errorf("a plan is read whose members have %s", name)
		}
	}
	if _, err := Parse(fmt.Appendf(nil, file, 4, "")); err == nil {
		t.Error("a plan of a later version is read")
	}
}

// The sentences of a plan about NICs and relays agree with the optimum on any host.
func TestPlanSentencesAgreeWithTheOptimum(t *testing.T) {
	nearest, idle, nothing := 0, 0, 0
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 30))
		h := sortedHost(anyHost(r, 1+r.IntN(8), 1+r.IntN(8)))
		plan := planOf(t, seed, h, Config{})
		j, ok := judge(t, h)
		if !ok {
			continue
		}
		n := newNetwork(h)
		for _, l := range plan.Lanes {
			g, chosen := n.gpu(l.GPU), n.nic(l.NICs[0])
			if strings.Contains(l.Reason, ", the nearest NIC, ") {
				nearest++
				for other := range h.NICs {
					if other != chosen && !n.nearer(g, chosen, other) {
						t.Errorf("seed %d: the lane of %s claims the nearest NIC, and %s is as near: %s", seed, l.GPU, h.NICs[other].Name,
							l.Reason)
					}
				}
			}
			if sentences, err := plan.Explain(h, l.GPU); err != nil || len(sentences) > 25 {
				t.Errorf("seed %d: %d sentences, %v", seed, len(sentences), err)
			}
		}
		used := map[string]bool{}
		for _, l := range plan.Lanes {
			for _, nic := range l.NICs {
				used[nic] = true
			}
		}
		for _, note := range plan.Notes {
			switch {
			case strings.Contains(note, "using it would not make the slowest GPU faster"):
				idle++
				if j.optimum > j.planned*1.0011 {
					t.Errorf("seed %d: %s; but %g GB/s are possible, and %g planned", seed, note, j.optimum, j.planned)
				}
			case strings.Contains(note, "the relay has no benefit on this host: by the estimate"):
				nothing++
				if j.optimum > j.planned*1.0011 {
					t.Errorf("seed %d: %s; but %g GB/s are possible, and %g planned", seed, note, j.optimum, j.planned)
				}
			}
		}
	}
	if nearest < 20 || idle < 20 || nothing == 0 {
		t.Errorf("%d lanes with the nearest NIC, %d idle NICs, %d hosts without use for a relay: the hosts are too simple",
			nearest, idle, nothing)
	}
}

// On a host with hundreds of NICs, the explanation of a lane has at most 25 lines, and no line
// has thousands of characters.
func TestExplainOfManyNICsStaysShort(t *testing.T) {
	h := crowded[1].make(40)
	for i := range 120 {
		h.NICs = append(h.NICs, topo.NIC{Name: fmt.Sprintf("mlx5_v%d", i), BusID: fmt.Sprintf("%04x:03:00.0", i), NUMA: 0,
			Place: topo.Place{Link: 24}, Ports: []topo.Port{topotest.Down(100)}})
	}
	plan := planOf(t, 0, h, Config{})
	for _, l := range plan.Lanes[:8] {
		sentences, err := plan.Explain(h, l.GPU)
		if err != nil {
			t.Fatal(err)
		}
		if len(sentences) > 25 {
			t.Errorf("%s: %d lines", l.GPU, len(sentences))
		}
		for _, s := range sentences {
			if len(s) > 1500 {
				t.Errorf("%s: a line of %d letters: %s", l.GPU, len(s), s[:200])
			}
		}
	}
}

// No price exists for the links of a pinned lane over a NIC without other lanes.
func TestPlanByColumnsTakesPinnedLanesOverExcludedNICs(t *testing.T) {
	defer func(before int) { maxCandidates = before }(maxCandidates)
	maxCandidates = 0
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 32))
		h := sortedHost(measuredAndVirtual(r, 2+r.IntN(7), 2+r.IntN(6)))
		c := Config{
			Lanes:   []Assignment{{GPU: "0", NICs: []string{h.NICs[0].Name}}},
			Exclude: Exclude{NICs: []string{h.NICs[0].Name}},
		}
		p, err := newPlanner(h, c)
		if err != nil {
			t.Fatal(err)
		}
		a := p.newAllocation(true)
		if a.open == 0 {
			continue
		}
		rate := a.slowest(a.solve())
		maxCandidates = 1 << 20
		b := p.newAllocation(true)
		exact := b.slowest(b.solve())
		maxCandidates = 0
		largest := 0.0
		for i := range h.NICs {
			largest += p.nicRate(i) / float64(a.open)
		}
		if a.bound < exact*(1-1e-4) || a.bound > largest*(1+1e-9) || rate > a.bound*(1+1e-4) || rate < 0.98*exact {
			t.Errorf("seed %d: the optimum is %.4g GB/s; columns reach %.4g, and a bound of %.4g", seed, exact, rate, a.bound)
		}
	}
}
