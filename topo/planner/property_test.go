package planner

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
)

// randomHosts calls try with random hosts and configurations.
func randomHosts(t *testing.T, count int, try func(seed uint64, h *topo.Host, c Config)) {
	t.Helper()
	for seed := range uint64(count) {
		r := rand.New(rand.NewPCG(seed, 3))
		h := randomHost(r, 8)
		c := Config{}
		if seed%3 == 0 {
			c = randomConfig(r, h)
		}
		try(seed, h, c)
	}
}

func planOf(t *testing.T, seed uint64, h *topo.Host, c Config) *Plan {
	t.Helper()
	plan, err := Make(h, c)
	if err != nil {
		t.Fatalf("seed %d: %v", seed, err)
	}
	if err := plan.Check(); err != nil {
		t.Fatalf("seed %d: %v", seed, err)
	}
	return plan
}

func TestPlanOfRandomHostsUsesNoRefusedDevice(t *testing.T) {
	lanes, refused := 0, 0
	randomHosts(t, 500, func(seed uint64, h *topo.Host, c Config) {
		plan := planOf(t, seed, h, c)
		bad := map[string]bool{}
		for _, g := range h.GPUs {
			bad[g.BusID] = g.Refusal() != ""
		}
		for _, n := range h.NICs {
			bad[n.Name] = n.Refusal() != "" || !n.Active() || n.Software
		}
		for _, name := range c.Exclude.GPUs {
			gpu, err := plan.GPU(name)
			if err != nil {
				t.Fatal(err)
			}
			bad[gpu.BusID] = true
		}
		for _, name := range c.Exclude.NICs {
			bad[name] = true
		}
		for _, pair := range c.Exclude.Pairs {
			for _, l := range plan.Lanes {
				gpu, err := plan.GPU(pair[0])
				if err != nil {
					t.Fatal(err)
				}
				if l.GPU == gpu.BusID && slices.Contains(l.NICs, pair[1]) {
					t.Errorf("seed %d: %v is excluded, and the lane is %+v", seed, pair, l)
				}
				if peer, err := plan.GPU(pair[1]); err == nil &&
					(l.GPU == gpu.BusID && slices.Contains(l.Servers, peer.BusID) || l.GPU == peer.BusID &&
						slices.Contains(l.Servers, gpu.BusID)) {
					t.Errorf("seed %d: %v is excluded, and the lane is %+v", seed, pair, l)
				}
			}
		}
		for _, l := range plan.Lanes {
			lanes++
			if bad[l.GPU] {
				refused++
				if l.Role != RoleRefused || len(l.NICs)+len(l.Servers) > 0 {
					t.Errorf("seed %d: a refused GPU has the lane %+v", seed, l)
				}
			}
			for _, name := range slices.Concat(l.Servers, l.NICs) {
				if bad[name] {
					t.Errorf("seed %d: the lane %+v uses %s", seed, l, name)
				}
			}
		}
	})
	if lanes < 1200 || refused < 100 {
		t.Errorf("%d lanes, %d refused: hosts too simple", lanes, refused)
	}
}

// A near GPU with a lane can stage for a far GPU, unless the configuration keeps the far GPU from
// the near GPU or from the NIC of the near GPU.
func TestFarGPUWithP2PToNearGPUHasLane(t *testing.T) {
	found, relayed, bounced, configured := 0, 0, 0, 0
	randomHosts(t, 500, func(seed uint64, h *topo.Host, c Config) {
		plan := planOf(t, seed, h, c)
		excluded := map[[2]string]bool{} // addresses of GPUs, names of NICs
		for _, pair := range c.Exclude.Pairs {
			gpu, err := plan.GPU(pair[0])
			if err != nil {
				t.Fatal(err)
			}
			other := pair[1]
			if peer, err := plan.GPU(pair[1]); err == nil {
				other = peer.BusID
			}
			excluded[[2]string{gpu.BusID, other}], excluded[[2]string{other, gpu.BusID}] = true, true
		}
		for _, l := range plan.Lanes {
			if l.Role != RoleFar {
				continue
			}
			if !slices.ContainsFunc(plan.Lanes, func(near Lane) bool {
				return near.Role == RoleNear && len(near.NICs) > 0 && !excluded[[2]string{l.GPU, near.GPU}] &&
					!excluded[[2]string{l.GPU, near.NICs[0]}]
			}) {
				continue
			}
			found++
			if len(c.Exclude.Pairs) > 0 {
				configured++
			}
			if len(l.NICs) == 0 || l.Kind != KindStaged && l.Kind != KindBounce {
				t.Errorf("seed %d: the lane of %s is %+v", seed, l.GPU, l)
			}
			switch l.Kind {
			case KindStaged:
				relayed++
			case KindBounce:
				bounced++
			}
		}
	})
	if found < 200 || relayed < 40 || bounced < 60 || configured < 20 {
		t.Errorf("%d far GPUs, %d relayed, %d bounced, %d of hosts with pairs: the hosts are too simple", found, relayed,
			bounced, configured)
	}
}

func TestPlanOfShuffledDevicesIsEqual(t *testing.T) {
	randomHosts(t, 200, func(seed uint64, h *topo.Host, c Config) {
		want := planOf(t, seed, h, c)
		r := rand.New(rand.NewPCG(seed, 4))
		other := *h
		other.CPUs, other.Switches, other.GPUs, other.NICs = slices.Clone(h.CPUs), slices.Clone(h.Switches),
			slices.Clone(h.GPUs), slices.Clone(h.NICs)
		r.Shuffle(len(other.CPUs), func(i, j int) { other.CPUs[i], other.CPUs[j] = other.CPUs[j], other.CPUs[i] })
		r.Shuffle(len(other.Switches), func(i, j int) {
			other.Switches[i], other.Switches[j] = other.Switches[j],
				other.Switches[i]
		})
		r.Shuffle(len(other.GPUs), func(i, j int) { other.GPUs[i], other.GPUs[j] = other.GPUs[j], other.GPUs[i] })
		r.Shuffle(len(other.NICs), func(i, j int) { other.NICs[i], other.NICs[j] = other.NICs[j], other.NICs[i] })
		for i := range other.GPUs {
			links := slices.Clone(other.GPUs[i].NVLinks)
			r.Shuffle(len(links), func(i, j int) { links[i], links[j] = links[j], links[i] })
			other.GPUs[i].NVLinks = links
		}
		pairs := slices.Clone(c.Exclude.Pairs)
		r.Shuffle(len(pairs), func(i, j int) { pairs[i], pairs[j] = pairs[j], pairs[i] })
		c.Exclude.Pairs = pairs
		got := planOf(t, seed, &other, c)
		if diff := cmp.Diff(want, got, cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".NVLinks" },
			cmp.Ignore())); diff != "" {
			t.Fatalf("seed %d: %s", seed, diff)
		}
		estimated, err := want.Estimate(h)
		again, errAgain := got.Estimate(&other)
		if diff := cmp.Diff(estimated, again); diff != "" || !errors.Is(errAgain, err) {
			t.Fatalf("seed %d: %v, %v: %s", seed, err, errAgain, diff)
		}
	})
}

// slowest returns the rate of the slowest GPU of the plan, GB/s.
func slowest(t *testing.T, seed uint64, h *topo.Host, c Config) (float64, bool) {
	t.Helper()
	plan := planOf(t, seed, h, c)
	e, err := plan.Estimate(h)
	if err != nil || len(e.GPUs) == 0 {
		return 0, false
	}
	rate := e.GPUs[0].Relay
	for _, g := range e.GPUs {
		rate = min(rate, g.Relay)
	}
	return rate, true
}

// solvedOptimum returns the rate of the slowest lane that the solver finds, GB/s, before the
// planner removes members and rounds weights. solvedOptimum sets perturbation to 0, so that links
// have the capacity 1 exactly.
func solvedOptimum(t *testing.T, seed uint64, h *topo.Host, c Config) float64 {
	t.Helper()
	p, err := newPlanner(sortedHost(h), c)
	if err != nil {
		t.Fatalf("seed %d: %v", seed, err)
	}
	a := p.newAllocation(true)
	if a.open == 0 {
		return 0
	}
	defer func(before float64) { perturbation = before }(perturbation)
	perturbation = 0
	a.solve()
	return a.bound
}

func TestEstimateWithoutNICDoesNotRise(t *testing.T) {
	removed, worse := 0, 0
	randomHosts(t, 300, func(seed uint64, h *topo.Host, configured Config) {
		// A limit of a NIC and an excluded pair can make a lane worse, and the removal of the NIC
		// can make the lane better again. So c has neither.
		c := Config{GDR: GDRPolicy{MaxPath: configured.GDR.MaxPath}}
		with, known := slowest(t, seed, h, c)
		if !known {
			return
		}
		optimum := solvedOptimum(t, seed, h, c)
		for i, nic := range h.NICs {
			less := *h
			less.NICs = slices.Delete(slices.Clone(h.NICs), i, i+1)
			if without := solvedOptimum(t, seed, &less, c); without > optimum*(1+1e-9) {
				t.Errorf("seed %d: the solver finds %.12g GB/s, and %.12g without %s", seed, optimum, without, nic.Name)
			}
			without, _ := slowest(t, seed, &less, c)
			removed++
			if compareRoughly(without, with) < 0 {
				worse++
			}
			// The removal of members costs at most simplerCost, and the rounding of weights at most
			// roundCost.
			if without > with*(1+simplerCost+roundCost) {
				t.Errorf("seed %d: %g GB/s, and %g without %s", seed, with, without, nic.Name)
			}
		}
	})
	t.Log(fmt.Sprint(removed, " removed, ", worse, " with a worse estimate"))
	if worse < 150 {
		t.Error("the hosts are too simple")
	}
}

// Other indexes of the same GPUs change no lane.
func TestPlanOfRenumberedGPUsKeepsLanes(t *testing.T) {
	moved := 0
	randomHosts(t, 300, func(seed uint64, h *topo.Host, configured Config) {
		c := Config{GDR: GDRPolicy{MaxPath: configured.GDR.MaxPath}} // the rest names GPUs by index
		want := planOf(t, seed, h, c)
		r := rand.New(rand.NewPCG(seed, 5))
		other := *h
		other.GPUs = slices.Clone(h.GPUs)
		var indexes []int
		for _, g := range h.GPUs {
			indexes = append(indexes, g.Index)
		}
		r.Shuffle(len(indexes), func(i, j int) { indexes[i], indexes[j] = indexes[j], indexes[i] })
		for i := range other.GPUs {
			if other.GPUs[i].Index != indexes[i] {
				moved++
			}
			other.GPUs[i].Index = indexes[i]
		}
		got := planOf(t, seed, &other, c)
		if !slices.IsSortedFunc(got.GPUs, func(a, b topo.GPU) int { return a.Index - b.Index }) {
			t.Errorf("seed %d: the GPUs of the plan are not in the order of indexes", seed)
		}
		for i, g := range got.GPUs {
			if got.Lanes[i].GPU != g.BusID {
				t.Fatalf("seed %d: lane %d is not of GPU %d", seed, i, g.Index)
			}
		}
		for _, l := range want.Lanes {
			again, err := got.Lane(l.GPU)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(l.Members, again.Members) || !slices.Equal(l.NICs, again.NICs) ||
				!slices.Equal(l.Servers, again.Servers) {
				t.Errorf("seed %d: with other indexes the lane of %s changes from %v to %v", seed, l.GPU, l.Members, again.Members)
			}
		}
	})
	if moved < 500 {
		t.Errorf("%d GPUs have another index: hosts too simple", moved)
	}
}

// A GPU that is no member of a lane, because it is refused or its own lane bounces, changes no
// other lane when it is removed, unless the rates of other lanes change.
func TestPlanWithoutAGPUThatNoLaneUsesKeepsLanes(t *testing.T) {
	refused, others, kept := 0, 0, 0
	randomHosts(t, 500, func(seed uint64, h *topo.Host, configured Config) {
		c := Config{GDR: GDRPolicy{MaxPath: configured.GDR.MaxPath}}
		whole := planOf(t, seed, h, c)
		last := 0
		for _, g := range h.GPUs {
			last = max(last, g.Index)
		}
		for i, gpu := range h.GPUs {
			lane, err := whole.Lane(gpu.BusID)
			if err != nil {
				t.Fatal(err)
			}
			used := slices.ContainsFunc(whole.Lanes, func(l Lane) bool {
				return slices.Contains(l.Servers, gpu.BusID) ||
					slices.ContainsFunc(l.Members, func(m Member) bool { return m.Server == gpu.BusID })
			})
			if used || gpu.Index == last { // without the last, the width of the numbers can change
				continue
			}
			less := *h
			less.GPUs = slices.Delete(slices.Clone(h.GPUs), i, i+1)
			after := planOf(t, seed, &less, c)
			var before []Lane
			same := true
			for _, l := range whole.Lanes {
				if l.GPU == gpu.BusID {
					continue
				}
				before = append(before, l)
				again, err := after.Lane(l.GPU)
				if err != nil {
					t.Fatal(err)
				}
				same = same && compareRoughly(l.Bandwidth, again.Bandwidth) == 0
			}
			if lane.Role == RoleRefused {
				refused++
				if !same {
					t.Errorf("seed %d: without the refused %s rates of lanes change", seed, gpu.BusID)
				}
			} else {
				others++
			}
			if !same {
				continue
			}
			for k, l := range before {
				kept++
				if !slices.Equal(l.Members, after.Lanes[k].Members) {
					t.Errorf("seed %d: without %s, which no lane uses, the lane of %s changes from %v to %v", seed, gpu.BusID, l.GPU,
						l.Members, after.Lanes[k].Members)
				}
			}
		}
	})
	if refused < 100 || others < 100 || kept < 500 {
		t.Errorf("%d refused GPUs, %d others, %d lanes compared: hosts too simple", refused, others, kept)
	}
}
