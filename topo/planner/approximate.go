package planner

import (
	"cmp"
	"maps"
	"math"
	"slices"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
)

// The revised simplex algorithm solves hosts with too many routes for the dense algorithm
// (columns.go). The first routes come from rounds with prices of links: the price of a link grows
// with the traffic of the link, and every GPU in turn sends a unit of traffic over the cheapest
// route (Garg and Könemann's algorithm for the maximum concurrent flow). Later routes come from the
// prices of the simplex algorithm. The prices also prove a bound: the rate of the slowest GPU
// is at most the sum of the prices of links, divided by the sum of the costs of the cheapest
// routes of the GPUs. The algorithm ends when no GPU has a cheaper route; the choice then reaches
// the bound.
//
// The search for the cheapest route of a GPU compares parts of routes: a host has far fewer parts
// than routes.

const (
	// sharpness is the logarithm of the price ratio of two links with loads that differ by the
	// load of one round.
	sharpness  = 0.5
	findRounds = 10 // rounds over the GPUs
	maxFound   = 16 // largest number of candidates of a GPU from find
	maxTries   = 2  // attempts at finding more routes, per level after the first
	// maxPivots limits the search for the fastest lanes, maxCheaper the search for the
	// cheapest of the fastest. Hosts of 256 GPUs take about 2,000 pivots for the fastest lanes.
	maxPivots, maxCheaper = 10_000, 2_000
	minAmount             = 1e-4 // smallest share of a lane that becomes a member
)

// maxCandidates is the largest number of routes of a host for the dense algorithm. Tests change
// maxCandidates.
var maxCandidates = 4_000

// prices are the prices of links.
type prices struct {
	load  []float64 // traffic, divided by the capacity of the link
	price []float64
	full  float64 // the greatest load
	round float64
}

func newPrices(links int) *prices {
	p := &prices{load: make([]float64, links), price: make([]float64, links)}
	for i := range p.price {
		p.price[i] = 1
	}
	return p
}

// next begins a round. Prices are of the order of 1, at most.
func (p *prices) next() {
	p.round++
	p.full = slices.Max(p.load)
	if p.full == 0 {
		return
	}
	for i, l := range p.load {
		p.price[i] = math.Exp(sharpness * p.round * (l/p.full - 1))
	}
}

// send puts a unit of traffic on a route. route is divided by the capacities of links.
func (p *prices) send(route load) {
	for _, on := range route {
		p.load[on.pipe] += on.weight
		if p.full > 0 {
			p.price[on.pipe] *= math.Exp(min(20, sharpness*p.round*on.weight/p.full))
		}
	}
}

func (p *prices) cost(route load) (sum float64) {
	for _, on := range route {
		sum += float64(p.price[on.pipe] * on.weight)
	}
	return sum
}

// pieces are the parts of routes. A route through the CPU's memory has a part of the GPU, a part
// between CPUs and a part of the NIC. A staged route has a copy and a part of the server.
type pieces struct {
	a        *allocation
	up, down []load   // [GPU], [NIC]
	sockets  [][]load // [CPU][CPU]
	gpuAt    []int    // [GPU]: CPU
	nicAt    []int    // [NIC]
	memory   []load   // [NIC]: load of the CPU's forwarding
	own      []bool   // [GPU]: has C2C or NVLink to the CPU
	copies   [][]load
	direct   [][]piece // [GPU]: direct routes
	served   [][]piece // [server GPU]: from the memory of the server to near NICs
	usable   []bool    // [NIC]
	rate     []float64 // [pipe]: capacity; 0 if the twin represents the pipe
	twin     map[int]int
}

type piece struct {
	nic  int
	load load
}

func (a *allocation) pieces(gpus []int, staged bool) *pieces {
	n, p := a.p.network, a.p
	all := len(n.h.GPUs)
	b := &pieces{
		a: a, up: make([]load, all), down: make([]load, len(n.h.NICs)),
		gpuAt: make([]int, all), nicAt: make([]int, len(n.h.NICs)), memory: make([]load, len(n.h.NICs)),
		own: make([]bool, all), copies: make([][]load, all), direct: make([][]piece, all), served: make([][]piece, all),
		usable: make([]bool, len(n.h.NICs)),
	}
	var cpus []graph.NodeID
	cpu := func(id graph.NodeID) int {
		i := slices.Index(cpus, id)
		if i < 0 {
			i, cpus = len(cpus), append(cpus, id)
		}
		return i
	}
	for i := range n.h.NICs {
		if b.usable[i] = p.usable(i); !b.usable[i] {
			continue
		}
		nodes := n.nicCPU[i].Nodes()
		b.nicAt[i] = cpu(nodes[0])
		n.thereAndBack(&b.down[i], nodes, 1, 1, bothDirections)
		for _, pipe := range n.port(i) {
			n.add(&b.down[i], pipe, 1)
		}
		if rate := n.looped(i, throughMemory); rate > 0 {
			n.looping(&b.down[i], i, hostMemory, rate, 1, bothDirections)
		}
		for _, pipe := range n.forwarding(nodes[0]) {
			n.add(&b.memory[i], pipe, 1)
		}
		for _, s := range p.beside[i] {
			var l load
			n.gdr(&l, s, i, 1, bothDirections)
			for _, pipe := range n.port(i) {
				n.add(&l, pipe, 1)
			}
			if limit := p.stagingLimit[s]; staged && (limit == nil || *limit >= p.config.Staging.bytes(len(p.beside[i])) &&
				*limit > 0) {
				b.served[s] = append(b.served[s], piece{i, l})
			}
			if !p.exclude.toNIC[[2]int{s, i}] {
				b.direct[s] = append(b.direct[s], piece{i, l})
			}
		}
	}
	for _, g := range gpus {
		nodes := n.gpuCPU[g].Nodes()
		slices.Reverse(nodes)
		b.gpuAt[g] = cpu(nodes[len(nodes)-1])
		n.thereAndBack(&b.up[g], nodes, 1, 1, bothDirections)
		b.own[g] = n.h.GPUs[g].C2C != 0 || n.h.GPUs[g].NVLinkCPU != 0
		b.copies[g] = make([]load, all)
		for s := range all {
			if s == g || len(b.served[s]) == 0 || n.toGPU[g][s].Type >= topo.DIS || p.exclude.toGPU[[2]int{g, s}] {
				continue
			}
			n.copies(&b.copies[g][s], g, s, 1, bothDirections)
		}
	}
	b.sockets = graph.Matrix[load](len(cpus), len(cpus))
	for i, from := range cpus {
		for j, to := range cpus {
			if i != j {
				n.thereAndBack(&b.sockets[i][j], []graph.NodeID{from, to}, 1, 1, bothDirections)
			}
		}
	}
	b.scale()
	return b
}

// scale divides loads by the capacities of links. The two directions of a link have equal
// loads, so a single direction represents both: the slower direction if measurements differ.
func (b *pieces) scale() {
	n := b.a.p.network
	b.rate, b.twin = n.capacity(), map[int]int{}
	for key, h := range n.hops {
		if back, known := n.hops[[2]graph.NodeID{key[1], key[0]}]; known && h.pipe >= 0 && back.pipe >= 0 &&
			back.pipe < h.pipe {
			b.rate[h.pipe], b.twin[h.pipe] = 0, back.pipe
		}
	}
	for _, both := range slices.Concat(slices.Collect(maps.Values(n.ports)), slices.Collect(maps.Values(n.forwards)),
		slices.Collect(maps.Values(n.measured)), slices.Collect(maps.Values(n.loops))) {
		stands, other := both[0], both[1]
		if other < 0 {
			continue
		}
		if b.rate[other] < b.rate[stands] {
			stands, other = other, stands
		}
		b.rate[other], b.twin[other] = 0, stands
	}
	for g := range b.up {
		b.up[g] = b.scaled(b.up[g])
		for s, l := range b.copies[g] {
			b.copies[g][s] = b.scaled(l)
		}
		for i := range b.direct[g] {
			b.direct[g][i].load = b.scaled(b.direct[g][i].load)
		}
		for i := range b.served[g] {
			b.served[g][i].load = b.scaled(b.served[g][i].load)
		}
	}
	for i := range b.down {
		b.down[i], b.memory[i] = b.scaled(b.down[i]), b.scaled(b.memory[i])
	}
	for i := range b.sockets {
		for j, l := range b.sockets[i] {
			b.sockets[i][j] = b.scaled(l)
		}
	}
}

// scaled returns a load divided by the capacities of links.
func (b *pieces) scaled(l load) load {
	var out load
	for _, on := range l {
		if rate := b.rate[on.pipe]; rate > 0 {
			out = append(out, onPipe{on.pipe, on.weight / rate})
		}
	}
	return out
}

// nicCosts are the costs of the second halves of routes: from the CPU to a NIC, with and without
// the CPU's forwarding, and from a server GPU to the cheapest NIC.
type nicCosts struct {
	down, through []float64
	served        []float64
	nic           []int
	sockets       [][]float64
}

func (b *pieces) nicCosts(p *prices) *nicCosts {
	c := &nicCosts{
		down: make([]float64, len(b.down)), through: make([]float64, len(b.down)),
		served: make([]float64, len(b.served)), nic: make([]int, len(b.served)),
		sockets: graph.Matrix[float64](len(b.sockets), len(b.sockets)),
	}
	for i := range b.down {
		c.down[i] = p.cost(b.down[i])
		c.through[i] = c.down[i] + p.cost(b.memory[i])
	}
	for s, list := range b.served {
		c.served[s], c.nic[s] = math.Inf(1), -1
		for _, q := range list {
			if cost := p.cost(q.load); cost < c.served[s] {
				c.served[s], c.nic[s] = cost, q.nic
			}
		}
	}
	for i := range b.sockets {
		for j, l := range b.sockets[i] {
			c.sockets[i][j] = p.cost(l)
		}
	}
	return c
}

// cheapest returns the cheapest route of a GPU.
func (b *pieces) cheapest(g int, p *prices, c *nicCosts) (best part, lowest float64) {
	lowest = math.Inf(1)
	take := func(server, nic int, cost float64) {
		if cost < lowest {
			best, lowest = part{server, nic, 1}, cost
		}
	}
	planner := b.a.p
	for _, q := range b.direct[g] {
		take(g, q.nic, p.cost(q.load))
	}
	if planner.config.Near == nearDirect && len(b.direct[g]) > 0 {
		return best, lowest
	}
	up := p.cost(b.up[g])
	far := c.sockets[b.gpuAt[g]]
	for i, usable := range b.usable {
		if !usable || planner.toNIC[g][i].Type == topo.DIS || planner.exclude.toNIC[[2]int{g, i}] {
			continue
		}
		half := c.through[i]
		if b.own[g] {
			half = c.down[i]
		}
		take(throughMemory, i, up+far[b.nicAt[i]]+half)
	}
	for s, l := range b.copies[g] {
		if l == nil || c.served[s] >= lowest {
			continue
		}
		copies := p.cost(l)
		if nic := c.nic[s]; nic >= 0 && !planner.exclude.toNIC[[2]int{g, nic}] {
			take(s, nic, copies+c.served[s])
			continue
		}
		for _, q := range b.served[s] {
			if !planner.exclude.toNIC[[2]int{g, q.nic}] {
				take(s, q.nic, copies+p.cost(q.load))
			}
		}
	}
	return best, lowest
}

// whole is the load of a route of a GPU.
func (b *pieces) whole(g int, q part, into load) load {
	from := func(list []piece) load {
		return list[slices.IndexFunc(list, func(p piece) bool { return p.nic == q.nic })].load
	}
	into = into[:0]
	switch q.server {
	case g:
		return append(into, from(b.direct[g])...)
	case throughMemory:
		into = append(append(append(into, b.up[g]...), b.sockets[b.gpuAt[g]][b.nicAt[q.nic]]...), b.down[q.nic]...)
		if !b.own[g] {
			into = append(into, b.memory[q.nic]...)
		}
		return into
	}
	return append(append(into, b.copies[g][q.server]...), from(b.served[q.server])...)
}

// find returns the routes of the rounds with prices as candidates, the most frequent first.
func (b *pieces) find(gpus []int) (found [][]part) {
	p := newPrices(len(b.rate))
	taken := make([]map[part]int, len(gpus))
	for i := range taken {
		taken[i] = map[part]int{}
	}
	const block = 16 // GPUs per update of the costs of NICs
	var route load
	for range findRounds {
		p.next()
		var costs *nicCosts
		for i, g := range gpus {
			if i%block == 0 {
				costs = b.nicCosts(p)
			}
			if q, cost := b.cheapest(g, p, costs); !math.IsInf(cost, 1) {
				taken[i][q]++
				route = b.whole(g, q, route)
				p.send(route)
			}
		}
	}
	for i := range gpus {
		var list []part
		for q := range taken[i] {
			list = append(list, q)
		}
		slices.SortFunc(list, func(x, y part) int {
			return cmp.Or(cmp.Compare(taken[i][y], taken[i][x]), cmp.Compare(x.server, y.server), cmp.Compare(x.nic, y.nic))
		})
		found = append(found, list[:min(len(list), maxFound)])
	}
	return found
}

// prove bounds the rate of the slowest GPU by the prices of links. prove also returns the
// cheapest routes at the prices, and the costs of the routes.
func (a *allocation) prove(m *master) (bound float64, cheapest []part, costs []float64) {
	b := a.parts
	p := &prices{price: make([]float64, len(b.rate))}
	worth, spent := 0.0, 0.0
	for r, y := range m.price {
		if pipe := m.pipes[r]; y > 0 && pipe < len(b.rate) { // only pinned lanes cross the later pipes
			p.price[pipe] = y
			worth += y
		}
	}
	halves := b.nicCosts(p)
	for _, g := range a.flows[:a.open] {
		q, cost := b.cheapest(g, p, halves)
		spent += cost
		cheapest, costs = append(cheapest, q), append(costs, cost)
	}
	return worth / spent, cheapest, costs
}

// roughly solves a host by the revised simplex algorithm, and bounds the rate of the slowest
// GPU.
func (a *allocation) roughly() []mix {
	m := newMaster(len(a.flows))
	for i := range a.p.host.NICs { // the bound of all NICs together, if the bound of the prices is higher
		if a.p.usable(i) {
			a.bound += a.p.nicRate(i) / float64(a.open)
		}
	}
	var route load
	add := func(f int, q part) bool {
		c := candidate{parts: []part{q}}
		a.rank(a.flows[f], &c)
		route = a.parts.whole(a.flows[f], q, route)
		return m.add(f, q, route, c.cost)
	}
	for f := range a.flows {
		for k := range a.routes[f] {
			if f < a.open {
				add(f, a.routes[f][k].parts[0])
			} else {
				m.add(f, part{}, a.parts.pinned(a.p.network.load(carried{a.flows[f], a.routes[f][k].parts}, bothDirections)), 0)
			}
		}
	}
	proven := false
	for left := true; left && m.enter(theLevel); {
		for try := 0; !proven || try < maxTries; try++ {
			ended := m.improve(maxPivots - m.pivots)
			m.priceLevel()
			bound, cheapest, costs := a.prove(m)
			if !proven && bound < a.bound {
				a.bound = bound
			}
			more := false
			for f, q := range cheapest {
				if costs[f] < m.spent(m.key[f])-masterCost && add(f, q) {
					more = true
				}
			}
			if !more || !ended {
				break
			}
		}
		for f := range a.open {
			proven = proven || m.spent(m.key[f]) > stuckCost
		}
		left = m.fix() && m.pivots < maxPivots
	}
	m.settle()
	m.improve(maxCheaper)
	lanes := a.mixesOf(m)
	a.measure()
	return lanes
}

// mixesOf returns the shares of the flows, and replaces the routes of each open flow by routes with
// a share, and the earlier routes after them.
func (a *allocation) mixesOf(m *master) []mix {
	lanes := make([]mix, len(a.flows))
	for f := range lanes {
		if f >= a.open {
			lanes[f] = mix{{0, 1}}
			continue
		}
		var routes []candidate
		for i, x := range m.amounts(f) {
			if i == 0 || x.rate > minAmount*m.rate[f] {
				lanes[f] = append(lanes[f], share1{len(routes), max(x.rate, math.SmallestNonzeroFloat32)})
				routes = append(routes, candidate{parts: []part{m.columns[x.column].route}})
			}
		}
		for _, c := range a.routes[f] {
			if !slices.ContainsFunc(routes, func(o candidate) bool { return o.parts[0] == c.parts[0] }) {
				routes = append(routes, c)
			}
		}
		a.routes[f] = routes
	}
	return lanes
}

// pinned returns the load of a pinned lane, divided by the capacities of links.
func (b *pieces) pinned(l load) load {
	var out load
	for _, on := range l {
		rate := b.a.p.network.pipes[on.pipe].rate
		if on.pipe < len(b.rate) {
			rate = b.rate[on.pipe]
		}
		if rate > 0 {
			out = append(out, onPipe{on.pipe, on.weight / rate})
		}
	}
	return out
}
