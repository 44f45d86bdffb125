package planner

import (
	"math"
	"slices"

	"github.com/peerlane/peerlane/topo"
)

// flow is the flow network of a spreading. Edges lead from the source to the lanes, from a lane
// to the NICs of the lane's options, from a NIC to the NIC's group or to the sink, and from
// groups to the sink. The planner makes the network once, and sets bounds many times.
type flow struct {
	s     *spreading
	group []int
	// direct is the number of lanes per group with only direct options.
	direct []int
	// Lanes are the first nodes, then come NICs, groups, source and sink.
	nics, groups, source, sink int
	// wanted is the number of lanes with an option.
	wanted int
	edges  []edge
	worst  []topo.PathType // [edge]: worst leg of a lane's option; otherwise LOC
	out    [][]int32       // [node]: edges
	// atNIC and atGroup are the edges towards the sink, per NIC and per group.
	atNIC, atGroup []int32
	fastest        float64
	// State of a search.
	level, next []int32
	queue       []int32
}

// edge is a directed edge of a flow. The reverse edge is at index^1.
type edge struct {
	to, room int32
	cost     int64
}

func (s *spreading) flow(group []int, groups int) *flow {
	lanes, nics := len(s.option), len(s.rate)
	f := &flow{
		s: s, group: group, nics: lanes, groups: lanes + nics, source: lanes + nics + groups, sink: lanes + nics + groups + 1,
		fastest: slices.Max(s.rate),
	}
	f.out = make([][]int32, f.sink+1)
	add := func(a, b int, worst topo.PathType, cost int64) int32 {
		at := int32(len(f.edges))
		f.out[a], f.out[b] = append(f.out[a], at), append(f.out[b], at+1)
		f.edges = append(f.edges, edge{to: int32(b), cost: cost}, edge{to: int32(a), cost: -cost})
		f.worst = append(f.worst, worst, worst)
		return at
	}
	for i, options := range s.option {
		if !slices.ContainsFunc(options, func(o *option) bool { return o != nil }) {
			continue
		}
		f.wanted++
		add(f.source, i, topo.LOC, 0)
		for n, o := range options {
			if o != nil {
				add(i, f.nics+n, o.worst, int64(o.worst)<<40+int64(o.away)<<28)
			}
		}
	}
	for n := range nics {
		to := f.sink
		if group[n] >= 0 {
			to = f.groups + group[n]
		}
		f.atNIC = append(f.atNIC, add(f.nics+n, to, topo.LOC, 0))
	}
	for g := range groups {
		f.direct = append(f.direct, s.direct(group, g))
		f.atGroup = append(f.atGroup, add(f.groups+g, f.sink, topo.LOC, 0))
	}
	return f
}

// bound empties the flow and sets the bounds: caps limits the lanes of a NIC, worst limits the
// legs of a lane, and room limits the staged lanes of a group of NICs.
func (f *flow) bound(caps []int, worst topo.PathType, room []int) {
	for e := 0; e < len(f.edges); e += 2 {
		f.edges[e].room, f.edges[e+1].room = 0, 0
		if f.worst[e] <= worst {
			f.edges[e].room = 1
		}
	}
	for n, e := range f.atNIC {
		f.edges[e].room = int32(max(0, caps[n]))
		f.price(n)
	}
	for g, e := range f.atGroup {
		// Direct lanes of the group's GPUs pass, too.
		f.edges[e].room = int32(room[g] + f.direct[g])
	}
}

// price sets the cost of another lane on a NIC, and the saving of a lane less. The cost spreads
// lanes evenly if other costs are equal.
func (f *flow) price(n int) {
	cost := func(lanes int32) int64 {
		even := (float64(lanes) + f.s.onNIC[n]) / f.s.rate[n] * f.fastest
		return int64(min(even*64, 1<<19))
	}
	e := f.atNIC[n]
	lanes := f.edges[e^1].room
	f.edges[e].cost, f.edges[e^1].cost = cost(lanes+1), -cost(lanes)
}

// carriesAll reports whether every lane with an option has a NIC within the bounds. carriesAll
// finds a maximum flow by Dinic's algorithm.
func (f *flow) carriesAll() bool {
	carried := 0
	for f.layer() {
		f.next = append(f.next[:0], make([]int32, len(f.out))...)
		for f.push(int32(f.source)) {
			carried++
		}
	}
	return carried == f.wanted
}

// layer sets the distance of nodes from the source, and reports whether the source reaches the
// sink.
func (f *flow) layer() bool {
	f.level = f.level[:0]
	for range f.out {
		f.level = append(f.level, -1)
	}
	f.level[f.source] = 0
	f.queue = append(f.queue[:0], int32(f.source))
	for i := 0; i < len(f.queue); i++ {
		at := f.queue[i]
		for _, e := range f.out[at] {
			if to := f.edges[e].to; f.edges[e].room > 0 && f.level[to] < 0 {
				f.level[to] = f.level[at] + 1
				f.queue = append(f.queue, to)
			}
		}
	}
	return f.level[f.sink] >= 0
}

// push sends another lane from a node to the sink, along increasing distances from the source.
// push retries no edge that failed before.
func (f *flow) push(at int32) bool {
	if int(at) == f.sink {
		return true
	}
	for ; int(f.next[at]) < len(f.out[at]); f.next[at]++ {
		e := f.out[at][f.next[at]]
		if to := f.edges[e].to; f.edges[e].room > 0 && f.level[to] == f.level[at]+1 && f.push(to) {
			f.edges[e].room--
			f.edges[e^1].room++
			return true
		}
	}
	return false
}

// cheapest returns the NICs of lanes at the least cost within the bounds; -1 for a lane without
// an option. The bounds must have room for every lane.
func (f *flow) cheapest() []int {
	out := slices.Clone(f.out)
	for n, e := range f.atNIC {
		out[f.nics+n] = []int32{e} // the NIC has no lane yet that could move
	}
	for range f.wanted {
		f.augment(out)
	}
	choice := slices.Repeat([]int{-1}, len(f.s.option))
	for n := range f.atNIC {
		for _, e := range out[f.nics+n] {
			if to := int(f.edges[e].to); to < len(choice) {
				choice[to] = n
			}
		}
	}
	return choice
}

// augment sends another lane over the cheapest route with room. out has the edges of nodes; of
// the edges from a NIC to lanes, only edges with room.
func (f *flow) augment(out [][]int32) {
	cost := slices.Repeat([]int64{math.MaxInt64}, len(out))
	by := slices.Repeat([]int32{-1}, len(out))
	waiting := make([]bool, len(out))
	cost[f.source] = 0
	for queue := []int{f.source}; len(queue) > 0; queue = queue[1:] {
		at := queue[0]
		waiting[at] = false
		for _, e := range out[at] {
			edge := &f.edges[e]
			if edge.room == 0 || cost[at]+edge.cost >= cost[edge.to] {
				continue
			}
			cost[edge.to], by[edge.to] = cost[at]+edge.cost, e
			if !waiting[edge.to] {
				waiting[edge.to] = true
				queue = append(queue, int(edge.to))
			}
		}
	}
	if by[f.sink] < 0 {
		return
	}
	for at := f.sink; at != f.source; {
		e := by[at]
		f.edges[e].room--
		f.edges[e^1].room++
		from := int(f.edges[e^1].to)
		switch n := from - f.nics; {
		case from < f.nics: // the lane goes to this NIC
			i, _ := slices.BinarySearch(out[at], e^1)
			out[at] = slices.Insert(out[at], i, e^1)
		case n < len(f.atNIC) && at < f.nics: // the lane leaves this NIC
			i, _ := slices.BinarySearch(out[from], e)
			out[from] = slices.Delete(out[from], i, i+1)
		}
		at = from
	}
	for n := range f.atNIC {
		f.price(n)
	}
}
