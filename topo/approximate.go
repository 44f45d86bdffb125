package topo

import (
	"cmp"
	"maps"
	"math"
	"slices"
)

// Hosts whose ways are too many for the simplex algorithm are solved by prices: each link
// has one, which grows with what is sent over it, and each GPU in turn sends some more over
// the way that is cheapest then. What has been sent in the end is as good a choice as there
// is, nearly (Garg and Könemann's algorithm for the greatest concurrent flow). The prices
// prove it: no choice is better for the slowest GPU than what all links together are worth,
// over what the cheapest ways of all GPUs cost.
//
// First all ways are priced, by their parts, of which there are far fewer than ways; the
// ways that are taken then are the candidates of the GPUs, among which the choice is made.

const (
	// sharpness is how much dearer a link becomes that has carried as much more than others
	// as it carries in one round.
	sharpness  = 0.5
	findRounds = 24  // over all ways
	sendRounds = 400 // over the candidates
	mostFound  = 16  // candidates of a GPU that are found first
	mostTries  = 6   // at finding more
)

// mostWays is how many ways a host has whose ways are all looked at one by one. Tests change
// it.
var mostWays = 6_000

// prices are those of links.
type prices struct {
	load  []float64 // what has been sent, by what the link carries
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

// send puts a unit on a way, whose load is by what links carry.
func (p *prices) send(way load) {
	for _, on := range way {
		p.load[on.pipe] += on.weight
		if p.full > 0 {
			p.price[on.pipe] *= math.Exp(min(20, sharpness*p.round*on.weight/p.full))
		}
	}
}

func (p *prices) cost(way load) (sum float64) {
	for _, on := range way {
		sum += float64(p.price[on.pipe] * on.weight)
	}
	return sum
}

// pieces are the parts of ways: a way through the CPU's memory is a GPU's, one between
// CPUs and a NIC's, a staged one a copy and a server's.
type pieces struct {
	a        *allocation
	up, down []load   // [GPU], [NIC]
	sockets  [][]load // [CPU][CPU]
	gpuAt    []int    // [GPU]: its CPU
	nicAt    []int    // [NIC]
	memory   []load   // [NIC]: what the CPU forwards
	own      []bool   // [GPU]: it has a link of its own to the CPU's memory
	copies   [][]load
	direct   [][]piece // [GPU]: its ways that are direct
	served   [][]piece // [GPU]: from its memory to NICs near it, for others
	usable   []bool    // [NIC]
	rate     []float64 // [pipe]: what it carries; 0 for one that its twin stands for
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
	var cpus []nodeID
	cpu := func(id nodeID) int {
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
		nodes := n.nicCPU[i].nodes()
		b.nicAt[i] = cpu(nodes[0])
		n.thereAndBack(&b.down[i], nodes, 1, 1, bothWays)
		for _, pipe := range n.port(i) {
			n.add(&b.down[i], pipe, 1)
		}
		for _, pipe := range n.forwarding(nodes[0]) {
			n.add(&b.memory[i], pipe, 1)
		}
		for _, s := range p.beside[i] {
			var l load
			n.both(&l, n.toNIC[s][i], n.gdrThrough(s, i), 1, bothWays)
			for _, pipe := range n.port(i) {
				n.add(&l, pipe, 1)
			}
			if limit := p.stagingLimit[s]; staged && (limit == nil || *limit >= p.config.Staging.bytes(len(p.beside[i])) && *limit > 0) {
				b.served[s] = append(b.served[s], piece{i, l})
			}
			if !p.exclude.toNIC[[2]int{s, i}] {
				b.direct[s] = append(b.direct[s], piece{i, l})
			}
		}
	}
	for _, g := range gpus {
		nodes := n.gpuCPU[g].nodes()
		slices.Reverse(nodes)
		b.gpuAt[g] = cpu(nodes[len(nodes)-1])
		n.thereAndBack(&b.up[g], nodes, 1, 1, bothWays)
		b.own[g] = n.h.GPUs[g].C2C != 0 || n.h.GPUs[g].NVLinkCPU != 0
		b.copies[g] = make([]load, all)
		for s := range all {
			if s == g || len(b.served[s]) == 0 || n.toGPU[g][s].Type >= DIS || p.exclude.toGPU[[2]int{g, s}] {
				continue
			}
			n.copies(&b.copies[g][s], g, s, 1, bothWays)
		}
	}
	b.sockets = table[load](len(cpus), len(cpus))
	for i, from := range cpus {
		for j, to := range cpus {
			if i != j {
				n.thereAndBack(&b.sockets[i][j], []nodeID{from, to}, 1, 1, bothWays)
			}
		}
	}
	b.scale()
	return b
}

// scale has loads be by what links carry. What the two directions of a link have to carry is
// the same, so that one of them stands for both: the slower one, where measurements tell them
// apart.
func (b *pieces) scale() {
	n := b.a.p.network
	b.rate, b.twin = n.capacity(), map[int]int{}
	for key, h := range n.hops {
		if back, known := n.hops[[2]nodeID{key[1], key[0]}]; known && h.pipe >= 0 && back.pipe >= 0 && back.pipe < h.pipe {
			b.rate[h.pipe], b.twin[h.pipe] = 0, back.pipe
		}
	}
	for _, both := range slices.Concat(slices.Collect(maps.Values(n.ports)), slices.Collect(maps.Values(n.forwards)), slices.Collect(maps.Values(n.measured))) {
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

// scaled is a load by what links carry.
func (b *pieces) scaled(l load) load {
	var out load
	for _, on := range l {
		if rate := b.rate[on.pipe]; rate > 0 {
			out = append(out, onPipe{on.pipe, on.weight / rate})
		}
	}
	return out
}

// nicCosts is what the second halves of ways cost: from the CPU to a NIC, with and without
// what it forwards, and from each GPU to the NIC that is cheapest to it.
type nicCosts struct {
	down, through []float64
	served        []float64
	nic           []int
	sockets       [][]float64
}

func (b *pieces) nicCosts(p *prices) *nicCosts {
	c := &nicCosts{
		down: make([]float64, len(b.down)), through: make([]float64, len(b.down)),
		served: make([]float64, len(b.served)), nic: make([]int, len(b.served)), sockets: table[float64](len(b.sockets), len(b.sockets)),
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

// cheapest is the way of a GPU that costs least.
func (b *pieces) cheapest(g int, p *prices, c *nicCosts) (best part, least float64) {
	least = math.Inf(1)
	take := func(server, nic int, cost float64) {
		if cost < least {
			best, least = part{server, nic, 1}, cost
		}
	}
	planner := b.a.p
	for _, q := range b.direct[g] {
		take(g, q.nic, p.cost(q.load))
	}
	if planner.config.Near == NearDirect && len(b.direct[g]) > 0 {
		return best, least
	}
	up := p.cost(b.up[g])
	far := c.sockets[b.gpuAt[g]]
	for i, usable := range b.usable {
		if !usable || planner.toNIC[g][i].Type == DIS || planner.exclude.toNIC[[2]int{g, i}] {
			continue
		}
		half := c.through[i]
		if b.own[g] {
			half = c.down[i]
		}
		take(throughMemory, i, up+far[b.nicAt[i]]+half)
	}
	for s, l := range b.copies[g] {
		if l == nil || c.served[s] >= least {
			continue
		}
		if nic := c.nic[s]; nic >= 0 && !planner.exclude.toNIC[[2]int{g, nic}] {
			take(s, nic, p.cost(l)+c.served[s])
		}
	}
	return best, least
}

// whole is the load of a way of a GPU.
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

// find makes candidates of the ways that are taken while all are priced.
func (b *pieces) find(gpus []int) (found [][]part) {
	p := newPrices(len(b.rate))
	taken := make([]map[part]int, len(gpus))
	for i := range taken {
		taken[i] = map[part]int{}
	}
	const block = 16 // GPUs that see the same costs of NICs
	var way load
	for range findRounds {
		p.next()
		var costs *nicCosts
		for i, g := range gpus {
			if i%block == 0 {
				costs = b.nicCosts(p)
			}
			if q, cost := b.cheapest(g, p, costs); !math.IsInf(cost, 1) {
				taken[i][q]++
				way = b.whole(g, q, way)
				p.send(way)
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
		found = append(found, list[:min(len(list), mostFound)])
	}
	return found
}

// prove bounds the rate of the slowest GPU by the prices of rows, and finds the ways that
// are cheapest by them.
func (a *allocation) prove(rows []float64) (bound float64, cheapest []part) {
	b := a.parts
	p := &prices{price: make([]float64, len(b.rate))}
	worth, spent := 0.0, 0.0
	crossed := make([]bool, a.rows)
	for _, ways := range a.ways[:a.open] {
		for _, c := range ways {
			for _, on := range c.load {
				crossed[on.pipe] = true
			}
		}
	}
	for r, y := range rows {
		// The row is of either direction. Links that pinned lanes alone cross are no part of
		// any way that is priced.
		pipe := a.owner[r]
		if !crossed[r] || pipe >= len(b.rate) {
			continue
		}
		if b.rate[pipe] == 0 {
			pipe = b.twin[pipe]
		}
		p.price[pipe] += y
		worth += y
	}
	costs := b.nicCosts(p)
	for _, g := range a.flows[:a.open] {
		q, cost := b.cheapest(g, p, costs)
		spent += cost
		cheapest = append(cheapest, q)
	}
	return worth / spent, cheapest
}

// roughly solves a host by prices, and bounds the rate of its slowest GPU. Where that shows
// that candidates are missing, they are added. Candidates that carry little are left out, as
// long as that costs little.
func (a *allocation) roughly() []mix {
	var lanes []mix
	for i := range a.p.host.NICs { // the bound of all NICs together, where prices prove less
		if a.p.usable(i) {
			a.bound += a.p.nicRate(i) / float64(a.open)
		}
	}
	for try, rounds := 0, sendRounds/4; ; try++ {
		if try == mostTries-1 {
			rounds = sendRounds
		}
		sent, price := a.sendAll(nil, rounds)
		lanes = sent
		var cheapest []part
		for _, sharper := range []float64{4, 2, 1} {
			changed := slices.Clone(price)
			for r, y := range price {
				changed[r] = math.Pow(y, sharper)
			}
			var bound float64
			if bound, cheapest = a.prove(changed); bound < a.bound {
				a.bound = bound
			}
		}
		if try == mostTries-1 {
			break
		}
		more := false
		if a.slowest(lanes) < 0.97*a.bound {
			for f, q := range cheapest {
				if a.way(f, q.server, q.nic) < 0 {
					a.ways[f] = append(a.ways[f], candidate{parts: []part{q}})
					more = true
				}
			}
		}
		if more {
			a.measure()
		} else if rounds == sendRounds {
			break
		} else {
			rounds = sendRounds
		}
	}
	best, rate := lanes, a.slowest(lanes)
	for _, least := range []float64{0.04, 0.08, 0.15, 0.3} {
		kept := make([][]int, len(lanes))
		for f, m := range lanes {
			m = slices.Clone(m.scaled())
			slices.SortStableFunc(m, func(x, y share1) int { return cmp.Compare(y.weight, x.weight) })
			for i, s := range m {
				if i == 0 || s.weight >= least {
					kept[f] = append(kept[f], s.way)
				}
			}
		}
		lanes, _ = a.sendAll(kept, sendRounds)
		now := a.slowest(lanes)
		if now < 0.98*rate {
			break
		}
		best, rate = lanes, max(rate, now)
	}
	return best
}

// sendAll sends in rounds over these candidates, or over all. price is what rows have cost
// in the rounds that count.
func (a *allocation) sendAll(kept [][]int, rounds int) (lanes []mix, price []float64) {
	p := newPrices(a.rows)
	price = make([]float64, a.rows)
	sent := make([][]float64, len(a.flows))
	for f := range sent {
		sent[f] = make([]float64, len(a.ways[f]))
		if kept == nil {
			continue
		}
		for k := range sent[f] {
			if !slices.Contains(kept[f], k) {
				sent[f][k] = -1
			}
		}
	}
	for round := range rounds {
		p.next()
		if round >= rounds/2 {
			sum := 0.0
			for _, y := range p.price {
				sum += y
			}
			for r, y := range p.price { // each round counts alike
				price[r] += y / sum
			}
		}
		for f := range a.flows {
			best, least := -1, math.Inf(1)
			for k := range a.ways[f] {
				if sent[f][k] < 0 {
					continue
				}
				if cost := p.cost(a.ways[f][k].load) * (1 + float64(1e-4*a.ways[f][k].cost)); cost < least {
					best, least = k, cost
				}
			}
			if best < 0 {
				continue
			}
			p.send(a.ways[f][best].load)
			if round >= rounds/5 { // the first ones know little
				sent[f][best]++
			}
		}
	}
	lanes = make([]mix, len(a.flows))
	for f := range sent {
		for k, amount := range sent[f] {
			if amount > 0 {
				lanes[f] = append(lanes[f], share1{k, amount})
			}
		}
	}
	return lanes, price
}
