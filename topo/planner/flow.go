package planner

import (
	"math"
	"slices"

	"github.com/peerlane/peerlane/topo"
)

// flow is the network of a spreading: from a source to the lanes, from each lane
// to the NICs that it has an option for, from each NIC to its group or else to
// the sink, and from groups to the sink. It is made once and bounded many times.
type flow struct {
	s     *spreading
	group []int
	// direct is the number of lanes of each group that cannot but be direct.
	direct []int
	// Lanes are the first nodes, then come NICs, groups, source and sink.
	nics, groups, source, sink int
	// wanted is the number of lanes that have an option.
	wanted int
	edges  []edge
	worst  []topo.PathType // [edge]: that of a lane's option, LOC for others
	out    [][]int32       // [node]: edges
	// atNIC and atGroup are the edges from each NIC and group towards the sink.
	atNIC, atGroup []int32
	fastest        float64
	// What a search keeps.
	level, next []int32
	queue       []int32
}

// edge is a directed edge of a flow; its reverse edge is at index^1.
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

// bound empties the flow and sets its bounds: no NIC has more lanes than its
// cap, no lane a leg worse than worst, and no group of NICs more staged lanes
// than its room.
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

// price sets what one lane more and one less on a NIC cost: evenly, where nothing
// else decides.
func (f *flow) price(n int) {
	cost := func(lanes int32) int64 {
		even := (float64(lanes) + f.s.onNIC[n]) / f.s.rate[n] * f.fastest
		return int64(min(even*64, 1<<19))
	}
	e := f.atNIC[n]
	lanes := f.edges[e^1].room
	f.edges[e].cost, f.edges[e^1].cost = cost(lanes+1), -cost(lanes)
}

// carriesAll says whether every lane that has an option finds a NIC within the
// bounds. It is the search for the greatest flow by Dinic.
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

// layer finds how far each node is from the source, and whether the sink can be
// reached.
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

// push sends one lane more from a node to the sink, each step one farther from the
// source. Edges that have been in vain are not tried again.
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

// cheapest is a NIC for every lane that has an option, -1 for the others, at the
// least cost within the bounds, which must allow it.
func (f *flow) cheapest() []int {
	out := slices.Clone(f.out)
	for n, e := range f.atNIC {
		out[f.nics+n] = []int32{e} // no lane is there yet that could go elsewhere
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

// augment sends one lane more over the cheapest way that has room. out has the
// edges of each node, of those from a NIC to its lanes only the ones with room.
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
		case n < len(f.atNIC) && at < f.nics: // and no longer to this one
			i, _ := slices.BinarySearch(out[from], e)
			out[from] = slices.Delete(out[from], i, i+1)
		}
		at = from
	}
	for n := range f.atNIC {
		f.price(n)
	}
}
