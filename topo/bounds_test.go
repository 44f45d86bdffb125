package topo

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"
)

// anyHost is a host of any shape, with as many GPUs and NICs: switches, nested ones too,
// root ports, several sockets, links of any speed, NVLink between all, some or no GPUs.
func anyHost(r *rand.Rand, gpus, nics int) *Host {
	pick := func(values ...float64) float64 { return values[r.IntN(len(values))] }
	b := build(1 + r.IntN(4))
	for i := range b.h.CPUs {
		b.h.CPUs[i].Socket = pick(10, 16, 22, 40)
	}
	type slot struct {
		numa       int
		bridge, sw string
	}
	var slots []slot
	for i := range 1 + r.IntN(max(2, gpus)) {
		numa, bridge := r.IntN(len(b.h.CPUs)), fmt.Sprintf("pci%04x:00", i)
		if r.IntN(4) == 0 {
			slots = append(slots, slot{numa, bridge, ""})
			continue
		}
		sw := fmt.Sprintf("%04x:aa:00.0", i)
		b.sw(sw, numa, bridge, "")
		b.h.Switches[len(b.h.Switches)-1].Link = pick(12, 24, 48)
		slots = append(slots, slot{numa, bridge, sw})
		if r.IntN(3) == 0 {
			below := fmt.Sprintf("%04x:bb:00.0", i)
			b.sw(below, numa, bridge, sw)
			b.h.Switches[len(b.h.Switches)-1].Link = pick(12, 24, 48)
			slots = append(slots, slot{numa, bridge, below})
		}
	}
	for i := range gpus {
		s := slots[r.IntN(len(slots))]
		b.gpu(s.numa, s.bridge, s.sw)
		b.h.GPUs[i].BusID, b.h.GPUs[i].Link = fmt.Sprintf("%04x:01:00.0", i), pick(6, 12, 24, 48)
	}
	fewer := r.IntN(2) == 0 // NICs gather in some places
	for i := range nics {
		s := slots[r.IntN(len(slots))]
		if fewer {
			s = slots[r.IntN(1+len(slots)/3)]
		}
		b.nic(fmt.Sprintf("mlx5_%d", i), s.numa, s.bridge, s.sw, up(pick(25, 100, 100, 200, 400)))
		b.h.NICs[i].BusID, b.h.NICs[i].Link = fmt.Sprintf("%04x:02:00.0", i), pick(12, 24, 48)
	}
	switch r.IntN(4) {
	case 0:
		b.nvswitches()
	case 1: // groups
		size := 2 + r.IntN(3)
		for i := range b.h.GPUs {
			for j := range b.h.GPUs {
				if i != j && i/size == j/size {
					b.h.GPUs[i].NVLinks = append(b.h.GPUs[i].NVLinks, NVLink{Peer: b.h.GPUs[j].BusID, Count: 4, Bandwidth: 80})
				}
			}
		}
	}
	return b.host()
}

// judged is a plan beside the best choice and NCCL's.
type judged struct {
	nccl, pxn, sent, planned, optimum float64 // of the slowest lane; pxn and sent of what it sends
}

func judge(t testing.TB, h *Host) (j judged, ok bool) {
	t.Helper()
	h = h.sorted()
	plan, err := MakePlan(h, PlanConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if err := plan.check(); err != nil {
		t.Fatal(err)
	}
	e, err := h.Estimate(plan)
	if err != nil || len(e.GPUs) == 0 {
		return j, false
	}
	p, err := newPlanner(h, PlanConfig{})
	if err != nil {
		t.Fatal(err)
	}
	a := p.newAllocation(true)
	if len(a.flows) == 0 {
		return j, false
	}
	a.solve()
	least := func(of func(GPUEstimate) float64) float64 {
		var all []float64
		for _, g := range e.GPUs {
			all = append(all, of(g))
		}
		return slices.Min(all)
	}
	return judged{
		least(func(g GPUEstimate) float64 { return g.NCCL }), least(func(g GPUEstimate) float64 { return g.Send.PXN }),
		least(func(g GPUEstimate) float64 { return g.Send.Relay }), least(func(g GPUEstimate) float64 { return g.Relay }), a.bound,
	}, true
}

func TestScratch(t *testing.T) {
	worst := 1.0
	var took, most time.Duration
	members, lanes := 0, 0
	below := 0
	for seed := range uint64(1000) {
		r := rand.New(rand.NewPCG(seed, 26))
		h := anyHost(r, 1+r.IntN(8), 1+r.IntN(8))
		start := time.Now()
		plan, err := MakePlan(h, PlanConfig{})
		if err != nil {
			t.Fatal(err)
		}
		d := time.Since(start)
		took += d
		most = max(most, d)
		for _, l := range plan.Lanes {
			lanes++
			members += len(l.Members)
		}
		j, ok := judge(t, h)
		if !ok {
			continue
		}
		if j.planned/j.optimum < 0.98 {
			below++
			if below < 5 {
				t.Errorf("seed %d: %+v %g", seed, j, j.planned/j.optimum)
			}
		}
		worst = min(worst, j.planned/j.optimum)
		if j.planned < j.nccl*(1-1e-9) || j.sent < j.pxn*(1-1e-9) {
			t.Errorf("seed %d: %+v", seed, j)
		}
	}
	fmt.Fprintln(os.Stderr, worst, took/1000, most, float64(members)/float64(lanes), below)
}
