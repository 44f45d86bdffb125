package planner

import (
	"cmp"
	"math"
	"slices"

	"github.com/peerlane/peerlane/topo"
)

// spreading is the problem of choosing a NIC for lanes. The best choice has, in the order of
// priority: the least load of the busiest NIC, the nearest worst path, the least load of the
// busiest link of a server GPU, and then the least distance between lanes and NICs.
type spreading struct {
	// option[i][n] is the route of lane i over NIC n; nil without a route.
	option [][]*option
	// rate is the rate of a NIC, and link the rate of the link of a GPU, in any unit.
	rate, link []float64
	// onNIC and onGPU are the loads by pinned lanes, in lanes.
	onNIC, onGPU []float64
}

// option is a route of a lane over a single NIC.
type option struct {
	kind string
	// worst is the type of the worst leg, and away the type of the path to the NIC.
	worst, away topo.PathType
	// servers are the GPUs whose memory the NIC accesses. The server of a direct lane is the GPU of
	// the lane.
	servers []int
}

// relayedCrossings is the number of times that a relayed byte crosses the link of the server GPU. A
// byte of a direct lane crosses the link of the GPU once.
const relayedCrossings = 2

// busy is the load of the host by a choice of NICs: nic and server are lanes divided by rate.
type busy struct {
	nic    float64
	path   topo.PathType
	server float64
}

func (a busy) compare(b busy) int {
	return cmp.Or(compareRoughly(a.nic, b.nic), cmp.Compare(a.path, b.path), compareRoughly(a.server, b.server))
}

// compareRoughly compares a and b. Values that differ by a rounding error are equal.
func compareRoughly(a, b float64) int {
	if math.Abs(a-b) <= 1e-9*max(math.Abs(a), math.Abs(b)) {
		return 0
	}
	return cmp.Compare(a, b)
}

// measure returns the load of the host by a choice; -1 is a lane without a NIC.
func (s *spreading) measure(choice []int) busy {
	nics, gpus := slices.Clone(s.onNIC), slices.Clone(s.onGPU)
	b := busy{}
	for i, n := range choice {
		if n < 0 {
			continue
		}
		o := s.option[i][n]
		nics[n]++
		b.path = max(b.path, o.worst)
		o.putOn(gpus)
	}
	for n, lanes := range nics {
		b.nic = max(b.nic, lanes/s.rate[n])
	}
	for g, lanes := range gpus {
		b.server = max(b.server, lanes/s.link[g])
	}
	return b
}

// putOn adds the lane to the loads of the links of GPUs.
func (o *option) putOn(gpus []float64) {
	switch o.kind {
	case KindDirect:
		gpus[o.servers[0]]++
	case KindStaged:
		for _, g := range o.servers {
			gpus[g] += relayedCrossings / float64(len(o.servers))
		}
	}
}

// choose returns the best choice: a NIC for every lane with an option, -1 for a lane without an
// option. choose lowers the bounds of the three aims in turn, as far as a flow from lanes to NICs
// allows; the choice is the cheapest flow within the bounds. NICs that share server GPUs share a
// bound. If the NICs of a group share only part of the servers, the choice can exceed the bound, so
// choose then searches for a better choice.
func (s *spreading) choose() []int {
	all := slices.Repeat([]float64{math.Inf(1)}, len(s.rate))
	worst := topo.DIS
	group, groups := s.groups()
	room := slices.Repeat([]int{len(s.option)}, groups)

	caps := func(bound float64) []int {
		c := make([]int, len(all))
		for n := range c {
			// A room above the number of lanes is no bound, and every place costs an edge. The
			// conversion of the product prevents a fused multiply-add: every architecture gets the
			// same result.
			c[n] = int(math.Floor(min((float64(bound*s.rate[n])-s.onNIC[n])*(1+1e-9), float64(len(s.option)))))
		}
		return c
	}
	f := s.flow(group, groups)
	fits := func(bound float64, worst topo.PathType, room []int) bool {
		f.bound(caps(bound), worst, room)
		return f.carriesAll()
	}

	var bounds []float64
	for n, rate := range s.rate {
		for k := range len(s.option) + 1 {
			bounds = append(bounds, (float64(k)+s.onNIC[n])/rate)
		}
	}
	nic := smallest(bounds, func(b float64) bool { return fits(b, worst, room) })
	var types []float64
	for t := topo.LOC; t <= topo.DIS; t++ {
		types = append(types, float64(t))
	}
	worst = topo.PathType(smallest(types, func(t float64) bool { return fits(nic, topo.PathType(t), room) }))

	bounds = nil
	servers := s.groupServers(group, groups)
	for g := range groups {
		for k := range len(s.option) + 1 {
			bounds = append(bounds, s.groupBusy(servers[g], k))
		}
	}
	if groups > 0 {
		rooms := func(bound float64) []int {
			r := make([]int, groups)
			for g := range r {
				for r[g] < len(s.option) && compareRoughly(s.groupBusy(servers[g], r[g]+1), bound) <= 0 {
					r[g]++
				}
			}
			return r
		}
		server := smallest(bounds, func(b float64) bool { return fits(nic, worst, rooms(b)) })
		room = rooms(server)
	}
	f.bound(caps(nic), worst, room)
	choice := f.cheapest()
	if s.overlap(group, servers) {
		return s.better(choice)
	}
	return choice
}

// smallest returns the smallest value that suits. The greatest value must suit.
func smallest(values []float64, suits func(float64) bool) float64 {
	slices.Sort(values)
	values = slices.Compact(values)
	i, _ := slices.BinarySearchFunc(values, true, func(v float64, _ bool) int {
		if suits(v) {
			return 1
		}
		return -1
	})
	return values[min(i, len(values)-1)]
}

// groups groups NICs that share server GPUs; -1 is a NIC without server GPUs.
func (s *spreading) groups() (group []int, count int) {
	group = slices.Repeat([]int{-1}, len(s.rate))
	of := map[int]int{} // GPU to group
	for n := range s.rate {
		var gpus []int
		for i := range s.option {
			if o := s.option[i][n]; o != nil && o.kind == KindStaged {
				gpus = append(gpus, o.servers...)
			}
		}
		for _, g := range gpus {
			into, known := of[g]
			switch {
			case group[n] < 0 && known:
				group[n] = into
			case group[n] < 0:
				group[n] = count
				count++
			}
			if known && into != group[n] { // two groups become one
				for other := range group {
					if group[other] == into {
						group[other] = group[n]
					}
				}
				for h, g := range of {
					if g == into {
						of[h] = group[n]
					}
				}
			}
			of[g] = group[n]
		}
	}
	return group, count
}

// groupServers returns the server GPUs of groups, with the load that does not depend on the choice:
// pinned lanes and the direct lane of the server GPU.
func (s *spreading) groupServers(group []int, groups int) []map[int]float64 {
	own := slices.Clone(s.onGPU)
	for _, options := range s.option {
		for _, o := range options {
			if o != nil && o.kind == KindDirect {
				own[o.servers[0]]++
				break
			}
		}
	}
	servers := make([]map[int]float64, groups)
	for g := range servers {
		servers[g] = map[int]float64{}
	}
	for _, options := range s.option {
		for n, o := range options {
			if o != nil && o.kind == KindStaged {
				for _, server := range o.servers {
					servers[group[n]][server] = own[server]
				}
			}
		}
	}
	return servers
}

// overlap reports whether the load of server GPUs can differ from the load that groupBusy returns:
// NICs of a group have different servers, or the number of lanes of a group that are not staged
// depends on the choice.
func (s *spreading) overlap(group []int, servers []map[int]float64) bool {
	for _, options := range s.option {
		at := -2 // the group of the direct option
		for n, o := range options {
			switch {
			case o == nil:
			case o.kind == KindStaged && len(o.servers) < len(servers[group[n]]):
				return true
			case o.kind == KindBounce && group[n] >= 0:
				return true
			case o.kind == KindDirect && at != -2 && group[n] != at:
				return true
			case o.kind == KindDirect:
				at = group[n]
			}
		}
	}
	return false
}

// groupBusy returns the load of the busiest server GPU of a group that stages the number of lanes.
func (s *spreading) groupBusy(servers map[int]float64, lanes int) float64 {
	busiest := 0.0
	for server, own := range servers {
		busiest = max(busiest, (own+relayedCrossings*float64(lanes)/float64(len(servers)))/s.link[server])
	}
	return busiest
}

// direct returns the number of lanes with a direct option to a NIC of group g.
func (s *spreading) direct(group []int, g int) int {
	count := 0
	for _, options := range s.option {
		for n, o := range options {
			if o != nil && o.kind == KindDirect && group[n] == g {
				count++
				break
			}
		}
	}
	return count
}

// searchSteps bounds the search of better, in calls of settle.
const searchSteps = 200_000

// better searches for a choice that is better than good. The search goes lane by lane, and
// backtracks if the load of the settled lanes is no better than the best choice.
func (s *spreading) better(good []int) []int {
	best, at := slices.Clone(good), s.measure(good)
	choice := slices.Repeat([]int{-1}, len(good))
	nics, gpus := slices.Clone(s.onNIC), slices.Clone(s.onGPU)
	steps := 0
	var settle func(i int, now busy)
	settle = func(i int, now busy) {
		steps++
		if steps > searchSteps || now.compare(at) >= 0 {
			return
		}
		for i < len(good) && good[i] < 0 { // a lane without an option
			i++
		}
		if i == len(good) {
			copy(best, choice)
			at = now
			return
		}
		var before []float64
		for n, o := range s.option[i] {
			if o == nil {
				continue
			}
			choice[i] = n
			nics[n]++
			before = before[:0]
			for _, g := range o.servers {
				before = append(before, gpus[g])
			}
			o.putOn(gpus)
			then := busy{max(now.nic, nics[n]/s.rate[n]), max(now.path, o.worst), now.server}
			for _, g := range o.servers {
				then.server = max(then.server, gpus[g]/s.link[g])
			}
			settle(i+1, then)
			nics[n]--
			for k, g := range o.servers {
				gpus[g] = before[k] // a subtraction would add a rounding error
			}
		}
		choice[i] = -1
	}
	settle(0, s.measure(choice))
	return best
}
