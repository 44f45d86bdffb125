package planner

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

// randomHost returns a host with at most the given number of GPUs, with nested switches, root
// ports, NICs of several speeds, NVLinks, and refused devices.
func randomHost(r *rand.Rand, gpus int) *topo.Host {
	b := topotest.Build(1 + r.IntN(2))
	pick := func(values ...float64) float64 { return values[r.IntN(len(values))] }
	link := pick(12, 24, 48)
	nics := 0
	fill := func(numa int, bridge, sw string) {
		for range r.IntN(3) {
			if len(b.H.GPUs) < gpus {
				b.GPU(numa, bridge, sw)
				b.H.GPUs[len(b.H.GPUs)-1].Link = link
			}
		}
		for range r.IntN(3) {
			if nics > 3 || r.IntN(3) > 0 {
				continue
			}
			ports := []topo.Port{{Number: 1, State: "ACTIVE", RateGbps: pick(100, 200, 400)}}
			if r.IntN(8) == 0 {
				ports[0].State = "DOWN"
			}
			b.NIC(fmt.Sprintf("mlx5_%d", nics), numa, bridge, sw, ports...)
			b.H.NICs[len(b.H.NICs)-1].Link = link
			nics++
		}
	}
	for i := range 2 + r.IntN(4) {
		numa, bridge := r.IntN(len(b.H.CPUs)), fmt.Sprintf("pci%04d:00", i)
		if r.IntN(4) == 0 {
			fill(numa, bridge, "")
			continue
		}
		sw := fmt.Sprintf("00aa:%02x:00.0", i)
		b.Sw(sw, numa, bridge, "")
		b.H.Switches[len(b.H.Switches)-1].Link = link
		fill(numa, bridge, sw)
		if r.IntN(3) == 0 {
			below := fmt.Sprintf("00bb:%02x:00.0", i)
			b.Sw(below, numa, bridge, sw)
			b.H.Switches[len(b.H.Switches)-1].Link = link
			fill(numa, bridge, below)
		}
	}
	switch r.IntN(3) {
	case 0:
		b.Nvswitches()
	case 1: // pairs
		for i := 0; i+1 < len(b.H.GPUs); i += 2 {
			b.H.GPUs[i].NVLinks = []topo.NVLink{{Peer: b.H.GPUs[i+1].BusID, Count: 4, Bandwidth: 80}}
			b.H.GPUs[i+1].NVLinks = []topo.NVLink{{Peer: b.H.GPUs[i].BusID, Count: 4, Bandwidth: 80}}
		}
	}
	for i := range b.H.GPUs {
		b.H.GPUs[i].MIG = r.IntN(10) == 0
		b.H.GPUs[i].NoP2P = r.IntN(15) == 0
	}
	for i := range b.H.NICs {
		switch r.IntN(20) {
		case 0:
			b.H.NICs[i].Ethernet = true
		case 1:
			b.H.NICs[i].Protocol = "EFA"
		case 2:
			b.H.NICs[i].Software = true
		}
	}
	return b.Host()
}

// randomConfig returns a configuration with limits for single NICs and excluded pairs, so that NICs
// share only part of the servers.
func randomConfig(r *rand.Rand, h *topo.Host) Config {
	c := Config{GDR: GDRPolicy{MaxPath: []topo.PathType{topo.PIX, topo.PXB, topo.PXB, topo.PHB}[r.IntN(4)],
		NICs: map[string]topo.PathType{}}}
	for _, n := range h.NICs {
		if r.IntN(4) == 0 {
			c.GDR.NICs[n.Name] = []topo.PathType{topo.PIX, topo.PXB, topo.PHB, topo.SYS}[r.IntN(4)]
		}
	}
	if len(h.GPUs) > 0 && r.IntN(4) == 0 {
		c.Exclude.GPUs = append(c.Exclude.GPUs, fmt.Sprint(r.IntN(len(h.GPUs))))
	}
	if len(h.NICs) > 0 && r.IntN(4) == 0 {
		c.Exclude.NICs = append(c.Exclude.NICs, h.NICs[r.IntN(len(h.NICs))].Name)
	}
	for _, g := range h.GPUs {
		if len(h.NICs) > 0 && r.IntN(6) == 0 {
			c.Exclude.Pairs = append(c.Exclude.Pairs, []string{fmt.Sprint(g.Index), h.NICs[r.IntN(len(h.NICs))].Name})
		}
		if g.Index > 0 && r.IntN(6) == 0 {
			c.Exclude.Pairs = append(c.Exclude.Pairs, []string{fmt.Sprint(g.Index), fmt.Sprint(r.IntN(g.Index))})
		}
	}
	return c
}

// exhaustive returns the load of the best choice, after a trial of every choice.
func exhaustive(s *spreading) (best busy) {
	first := true
	choice := slices.Repeat([]int{-1}, len(s.option))
	var try func(i int)
	try = func(i int) {
		if i == len(choice) {
			if b := s.measure(choice); first || b.compare(best) < 0 {
				best, first = b, false
			}
			return
		}
		none := true
		for n, o := range s.option[i] {
			if o != nil {
				none = false
				choice[i] = n
				try(i + 1)
			}
		}
		if none {
			choice[i] = -1
			try(i + 1)
		}
	}
	try(0)
	return best
}

func TestChooseOnRandomHostsMatchesExhaustiveSearch(t *testing.T) {
	tried, several, shared := 0, 0, 0
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 1))
		h := randomHost(r, 6)
		c := Config{}
		if seed%2 == 0 {
			c = randomConfig(r, h)
		}
		p, err := newPlanner(sortedHost(h), c)
		if err != nil {
			t.Fatal(err)
		}
		s, _, _ := p.problem()
		if len(s.option) == 0 || len(s.rate) == 0 {
			continue
		}
		tried++
		got, want := s.measure(s.choose()), exhaustive(s)
		if got.compare(want) != 0 {
			t.Errorf("seed %d: load %+v, want %+v", seed, got, want)
		}
		if want.server > 0 && want.path >= topo.PHB {
			several++
		}
		if group, groups := s.groups(); groups > 0 {
			for _, servers := range s.groupServers(group, groups) {
				for _, options := range s.option {
					for n, o := range options {
						if o != nil && o.kind == KindStaged && len(o.servers) < len(servers) && group[n] >= 0 {
							shared++
						}
					}
				}
			}
		}
	}
	t.Logf("%d hosts, %d with lanes of several kinds, %d options with part of the servers of a group", tried, several,
		shared)
	if tried < 1500 || several < 500 || shared < 150 {
		t.Error("the hosts are too simple")
	}
}

// Hosts are too large for an exhaustive search. The busiest NIC has the least number of lanes that
// counting allows, and neither a move of a lane nor a swap of two lanes makes the choice better.
func TestChooseOnLargeHostsHasNoBetterMove(t *testing.T) {
	const lanes = 48
	largest := 0
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 2))
		h := largeHost(r, lanes)
		p, err := newPlanner(sortedHost(h), Config{})
		if err != nil {
			t.Fatal(err)
		}
		s, _, _ := p.problem()
		choice := s.choose()
		got := s.measure(choice)
		largest = max(largest, len(choice))

		// The rates of NICs are equal, and far GPUs reach every NIC.
		up := func(a, b int) int { return (a + b - 1) / b }
		near := map[string]int{}
		nics := map[string]int{}
		usable := 0
		for n := range h.NICs {
			if p.usable(n) {
				nics[h.NICs[n].Switch]++
				usable++
			}
		}
		for _, g := range h.GPUs {
			if nics[g.Switch] > 0 {
				near[g.Switch]++
			}
		}
		want := up(len(h.GPUs), usable)
		for sw, gpus := range near {
			want = max(want, up(gpus, nics[sw]))
		}
		if lanes := got.nic * s.rate[0]; compareRoughly(lanes, float64(want)) != 0 {
			t.Errorf("seed %d: the busiest NIC has %g lanes, want %d", seed, lanes, want)
		}
		for i := range choice {
			for n, o := range s.option[i] {
				before := choice[i]
				if choice[i] = n; o != nil && s.measure(choice).compare(got) < 0 {
					t.Errorf("seed %d: lane %d over NIC %d is better", seed, i, n)
				}
				choice[i] = before
			}
			for j := range i {
				a, b := choice[i], choice[j]
				if s.option[i][b] == nil || s.option[j][a] == nil {
					continue
				}
				if choice[i], choice[j] = b, a; s.measure(choice).compare(got) < 0 {
					t.Errorf("seed %d: a swap of lanes %d and %d is better", seed, i, j)
				}
				choice[i], choice[j] = a, b
			}
		}
	}
	if largest < lanes {
		t.Errorf("the largest host has %d lanes: hosts too small", largest)
	}
}

// largeHost returns a host with two sockets of switches with GPUs. Part of the switches have NICs.
func largeHost(r *rand.Rand, gpus int) *topo.Host {
	b := topotest.Build(2)
	for i := 0; len(b.H.GPUs) < gpus || len(b.H.NICs) < 2; i++ {
		sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci%04d:00", i)
		b.Sw(sw, i%2, bridge, "")
		for range r.IntN(5) {
			if len(b.H.GPUs) < gpus {
				b.GPU(i%2, bridge, sw)
			}
		}
		for range max(0, r.IntN(4)-1) {
			b.NIC(fmt.Sprintf("mlx5_%d", len(b.H.NICs)), i%2, bridge, sw, topotest.Up(400))
		}
	}
	return b.Host()
}

func TestChooseWithUnequalRatesIsFast(t *testing.T) {
	// A file can state 1 Mbit/s beside 1 Tbit/s. If a lane needs the slow NIC, the bound gives the
	// fast NIC room for far more lanes than the host has.
	s := &spreading{rate: []float64{1e-4, 1e8}, onNIC: make([]float64, 2), onGPU: make([]float64, 2),
		link: []float64{24, 24}}
	o := &option{kind: KindBounce, worst: topo.PHB, away: topo.PHB}
	s.option = [][]*option{{o, nil}, {o, o}}
	if choice, want := s.choose(), []int{0, 1}; !slices.Equal(choice, want) {
		t.Errorf("choose() = %v, want %v", choice, want)
	}
}

// In a conflict of two aims, the choice that is better in the first aim wins, however bad in the
// second aim.
func TestChooseWithConflictingAimsKeepsOrder(t *testing.T) {
	staged := func(worst topo.PathType, servers ...int) *option { return &option{KindStaged, worst, worst, servers} }
	for _, tt := range []struct {
		name string
		s    spreading
		want []int
	}{
		{
			"an idle NIC far away is better than a busy one beside", spreading{
				option: [][]*option{{staged(topo.PIX, 0), staged(topo.SYS, 1)}, {staged(topo.PIX, 0), staged(topo.SYS, 1)}},
				rate:   []float64{50, 49},
			}, []int{0, 1},
		},
		{
			"a near NIC is better than an idle server GPU", spreading{
				option: [][]*option{{staged(topo.NODE, 0), staged(topo.SYS, 1)}},
				rate:   []float64{50, 50}, onGPU: []float64{7, 0, 0, 0},
			}, []int{0},
		},
		{
			"of two equally near the one whose server GPU is idle", spreading{
				option: [][]*option{{staged(topo.NODE, 0), staged(topo.NODE, 1)}},
				rate:   []float64{50, 50}, onGPU: []float64{7, 0, 0, 0},
			}, []int{1},
		},
		{
			"a NIC busier by its pinned lanes is not taken for a nearer path", spreading{
				option: [][]*option{{staged(topo.PIX, 0), staged(topo.SYS, 1)}},
				rate:   []float64{50, 50}, onNIC: []float64{2, 0},
			}, []int{1},
		},
	} {
		s := tt.s
		s.link = []float64{24, 24, 24, 24}
		if s.onNIC == nil {
			s.onNIC = make([]float64, len(s.rate))
		}
		if s.onGPU == nil {
			s.onGPU = make([]float64, len(s.link))
		}
		got := s.choose()
		slices.Sort(got) // the lanes are equal, so the order does not matter
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestMeasureOfSmallChoiceMatchesHandCalculation(t *testing.T) {
	s := &spreading{
		option: [][]*option{
			{{KindDirect, topo.PIX, topo.PIX, []int{0}}, nil},
			{{KindStaged, topo.NODE, topo.NODE, []int{0, 1}}, {KindBounce, topo.SYS, topo.SYS, nil}},
			{nil, nil},
		},
		rate: []float64{50, 25}, link: []float64{24, 48, 24},
		onNIC: []float64{0, 0.5}, onGPU: []float64{0, 6, 0},
	}
	for _, tt := range []struct {
		choice []int
		want   busy
	}{
		{[]int{0, 0, -1}, busy{2.0 / 50, topo.NODE, 7.0 / 48}},
		{[]int{0, 1, -1}, busy{1.5 / 25, topo.SYS, 6.0 / 48}},
	} {
		if got := s.measure(tt.choice); got.compare(tt.want) != 0 {
			t.Errorf("%v: %+v, want %+v", tt.choice, got, tt.want)
		}
	}
	s.onGPU[1] = 0
	if got := s.measure([]int{0, 0, -1}); got.compare(busy{2.0 / 50, topo.NODE, 2.0 / 24}) != 0 {
		t.Errorf("%+v", got)
	}
	if got := s.choose(); got[0] != 0 || got[1] != 0 || got[2] != -1 {
		t.Errorf("chosen %v", got)
	}
}
