package planner

import (
	"cmp"
	"hash/maphash"
	"math"
	"slices"

	"github.com/peerlane/peerlane/topo"
)

// allocation chooses the members of the lanes of a host. The choice is max-min fair: the
// slowest lane is as fast as possible, then the second slowest. Of equally fast choices, the
// best loads server GPUs least, then has the fewest members, then the nearest.
type allocation struct {
	p *planner
	// flows are the GPUs with a route to the network. flows[open:] have pinned lanes, with a
	// single candidate per lane.
	flows  []int
	open   int
	routes [][]candidate // [flow]
	rows   int           // links that the candidates cross, with a capacity of 1
	full   []float64     // [row]: capacity, 1
	// optimum is the rate of a flow that no choice exceeds in the order of max-min fairness,
	// GB/s. bound is an upper bound of the rate of the slowest flow, GB/s.
	optimum []float64
	bound   float64
	// rough is true if routes holds a part of the possible routes: the revised simplex algorithm
	// adds routes later.
	rough bool
	parts *pieces // nil unless rough
	owner []int   // [row]: pipe
	// places is the smallest power of two that is at least two and greater than the highest
	// index of a GPU. places changes if the GPU of the highest index is missing and the index
	// is a power of two above one.
	places int
	// ordinal gives the GPU of the lowest address the lowest index of the host, and so on: other
	// indexes of the same GPUs change nothing.
	ordinal []int
	// steps counts the evaluations.
	steps int
}

// candidate is a possible route of a lane.
type candidate struct {
	parts []part // a single part, except for a pinned lane
	load  load   // on rows, for 1 GB/s
	// alone is the rate of the route with the host to itself.
	alone float64
	// crossings is how often a byte crosses the link of a server GPU.
	crossings float64
	cost      float64
}

// mix is the members of a lane: candidates of the flow, by index, with weights of any sum.
type mix []share1

type share1 struct {
	route  int
	weight float64
}

func (m mix) total() (sum float64) {
	for _, s := range m {
		sum += s.weight
	}
	return sum
}

// scaled returns the mix with a sum of weights of 1.
func (m mix) scaled() mix {
	sum := m.total()
	out := slices.Clone(m)
	for i := range out {
		out[i].weight /= sum
	}
	return out
}

// newAllocation finds the candidates of GPUs without a lane by configuration. staged allows
// staged lanes.
func (p *planner) newAllocation(staged bool) *allocation {
	a := &allocation{p: p, places: 2}
	for _, g := range p.host.GPUs {
		for a.places <= g.Index {
			a.places *= 2
		}
		a.ordinal = append(a.ordinal, g.Index)
	}
	slices.Sort(a.ordinal) // GPUs are sorted by address
	add := func(g int, parts ...[]part) {
		var found []candidate
		for _, q := range parts {
			found = append(found, candidate{parts: q})
		}
		if len(found) > 0 {
			a.flows, a.routes = append(a.flows, g), append(a.routes, found)
		}
	}
	var gpus []int
	routes := 0
	for g := range p.host.GPUs {
		if p.refused[g] == "" && p.pinned[g] == nil {
			gpus = append(gpus, g)
			routes += len(p.host.NICs)
			for _, beside := range p.beside {
				routes += len(beside)
			}
		}
	}
	if a.rough = routes > maxCandidates; a.rough {
		a.parts = a.pieces(gpus, staged)
		today, pxn := p.cachedDefaults(gpus, false), p.cachedDefaults(gpus, true)
		for i, found := range a.parts.find(gpus) {
			g := gpus[i]
			for _, q := range slices.Concat(today[i].parts, pxn[i].parts) {
				q.weight = 1
				if !slices.Contains(found, q) && p.allows(g, q, staged) {
					found = append(found, q)
				}
			}
			var parts [][]part
			for _, q := range found {
				parts = append(parts, []part{q})
			}
			add(g, parts...)
		}
	} else {
		for _, g := range gpus {
			var parts [][]part
			for _, q := range p.candidates(g, staged) {
				parts = append(parts, []part{q})
			}
			add(g, parts...)
		}
	}
	a.open = len(a.flows)
	for g, l := range p.pinned {
		if l != nil {
			if c := p.carriedBy(*l); len(c.parts) > 0 {
				add(g, c.parts)
			}
		}
	}
	if !a.rough {
		a.measure()
	}
	return a
}

// allows reports whether a route is among the candidates of a GPU.
func (p *planner) allows(g int, q part, staged bool) bool {
	switch q.kind(g) {
	case KindDirect:
		return p.near(g, q.nic)
	case KindStaged:
		return staged && p.usable(q.nic) && slices.Contains(p.stagers(g, q.nic), q.server) &&
			!p.exclude.toNIC[[2]int{g, q.nic}] &&
			!(p.config.Near == nearDirect && p.isNear(g))
	}
	return p.usable(q.nic) && !p.exclude.toNIC[[2]int{g, q.nic}] && p.toNIC[g][q.nic].Type < topo.DIS &&
		!(p.config.Near == nearDirect && p.isNear(g))
}

// candidates are the routes of a GPU: directly over near NICs, through the CPU's memory, and
// staged on GPUs near a NIC.
func (p *planner) candidates(g int, staged bool) (routes []part) {
	onlyDirect := p.config.Near == nearDirect && p.isNear(g)
	for n := range p.host.NICs {
		if !p.usable(n) || p.exclude.toNIC[[2]int{g, n}] {
			continue
		}
		if p.near(g, n) {
			routes = append(routes, part{g, n, 1})
		}
		if onlyDirect {
			continue
		}
		if p.toNIC[g][n].Type < topo.DIS {
			routes = append(routes, part{throughMemory, n, 1})
		}
		if !staged {
			continue
		}
		direct := p.near(g, n) && p.toNIC[g][n].Type <= topo.PXB
		for _, s := range p.stagers(g, n) {
			if !direct || copyKind(p.toGPU[g][s].Path) == topo.NVL { // otherwise a direct route is as good
				routes = append(routes, part{s, n, 1})
			}
		}
	}
	return routes
}

// measure finds the load of the candidates on links. Links with equal loads from all candidates
// become a single row, with the capacity of the slowest link.
func (a *allocation) measure() {
	n := a.p.network
	var loads []load
	traffic := 0.0
	for i, nic := range n.h.NICs {
		if nic.Refusal() == "" {
			traffic += n.nicRate(i)
		}
	}
	for f, g := range a.flows {
		for k := range a.routes[f] {
			c := &a.routes[f][k]
			loads = append(loads, n.load(carried{gpu: g, parts: c.parts}, bothDirections))
			a.rank(g, c)
		}
	}
	// A collision of a single 64-bit signature would merge two different links.
	sign, seeds := make([][2]uint64, len(n.pipes)), [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}
	busiest := make([]float64, len(n.pipes))
	for i, l := range loads {
		for _, on := range l {
			for k := range seeds {
				sign[on.pipe][k] = sign[on.pipe][k]*0x9e3779b97f4a7c15 + maphash.Comparable(seeds[k],
					[2]float64{float64(i), on.weight})
			}
			busiest[on.pipe] = max(busiest[on.pipe], on.weight)
		}
	}
	rowOf, row := map[[2]uint64]int{}, slices.Repeat([]int{-1}, len(n.pipes))
	var rate []float64
	for i, pipe := range n.pipes {
		if busiest[i] == 0 || busiest[i]*traffic < pipe.rate*(1-1e-9) {
			continue // no candidate crosses the link, or all NICs together do not fill the link
		}
		r, known := rowOf[sign[i]]
		if !known {
			r = len(rate)
			rowOf[sign[i]], rate = r, append(rate, pipe.rate)
		} else if pipe.rate >= rate[r] {
			continue
		}
		rate[r], row[i] = pipe.rate, r
	}
	// Of the pipes of a row, the last to set the rate is the owner.
	owner := slices.Repeat([]int{-1}, len(rate))
	for i, r := range row {
		if r >= 0 {
			owner[r] = i
		}
	}
	capacity := n.capacity()
	at := 0
	for f := range a.routes {
		for k := range a.routes[f] {
			c := &a.routes[f][k]
			c.load, c.alone = nil, alone(loads[at], capacity)
			for _, on := range loads[at] {
				if r := row[on.pipe]; r >= 0 && owner[r] == on.pipe {
					c.load = append(c.load, onPipe{r, on.weight / rate[r]})
				}
			}
			at++
		}
	}
	a.rows, a.full, a.owner = len(rate), slices.Repeat([]float64{1}, len(rate)), owner
}

// rank finds the cost of a candidate of a GPU.
func (a *allocation) rank(g int, c *candidate) {
	total := 0.0
	for _, q := range c.parts {
		total += q.weight
	}
	c.crossings = 0
	for _, q := range c.parts {
		if q.kind(g) != KindStaged {
			continue
		}
		crossings := 1.0
		if copyKind(a.p.toGPU[g][q.server].Path) > topo.NVL {
			crossings = relayedCrossings
		}
		c.crossings += float64(crossings * q.weight / total)
	}
	c.cost = a.costOf(g, c)
}

// costOf orders equally fast candidates: crossings of server GPUs cost most, then routes through
// the CPU's memory, then distance. Further terms prefer GPUs and NICs at equal places in the order
// of the host, then the first server. The order of GPUs is that of the addresses. The number of
// GPUs does not matter: a refused or missing GPU leaves the costs of other routes unchanged if the
// other GPUs keep Index and places stays. If a GPU is missing when the host boots, the driver
// renumbers the others: a GPU after the missing GPU can then change to another NIC at the same
// distance.
func (a *allocation) costOf(g int, c *candidate) float64 {
	n, q := a.p.network, c.parts[0]
	place := func(i, of int) float64 { return float64(i+1) / float64(of) }
	distance := place(a.ordinal[g], a.places) - place(q.nic, len(n.h.NICs))
	cost := c.crossings + float64(1e-2*float64(n.toNIC[g][q.nic].Type)) + float64(1e-4*distance*distance)
	switch q.kind(g) {
	case KindBounce:
		cost += 0.2
	case KindStaged:
		cost += float64(1e-3*float64(n.toGPU[g][q.server].Type)) + float64(1e-5*place(a.ordinal[q.server], a.places))
	}
	return cost
}

// rates returns the rates of the flows for a choice of members, GB/s.
func (a *allocation) rates(lanes []mix) []float64 {
	a.steps++
	loads := make([]load, len(lanes))
	for f, m := range lanes {
		loads[f] = a.loadOf(f, m)
	}
	rates, _ := share(loads, a.full)
	return rates
}

func (a *allocation) loadOf(f int, m mix) (l load) {
	if len(m) == 1 {
		return a.routes[f][m[0].route].load
	}
	sum := m.total()
	for _, s := range m {
		for _, on := range a.routes[f][s.route].load {
			weight := on.weight * s.weight / sum
			if i := slices.IndexFunc(l, func(o onPipe) bool { return o.pipe == on.pipe }); i >= 0 {
				l[i].weight += weight
			} else {
				l = append(l, onPipe{on.pipe, weight})
			}
		}
	}
	return l
}

// alone returns the rate of a lane with the host to itself.
func (a *allocation) alone(f int, m mix) float64 {
	n := a.p.network
	return alone(n.load(carried{gpu: a.flows[f], parts: a.partsOf(f, m)}, bothDirections), n.capacity())
}

func (a *allocation) partsOf(f int, m mix) (parts []part) {
	sum := m.total()
	for _, s := range m {
		c := &a.routes[f][s.route]
		total := 0.0
		for _, q := range c.parts {
			total += q.weight
		}
		for _, q := range c.parts {
			q.weight *= s.weight / sum / total
			parts = append(parts, q)
		}
	}
	return parts
}

// Bounds of the search.
const (
	maxSteps    = 4_000 // evaluations
	maxPolished = 64    // largest number of GPUs of a host for polish, which compares lane by lane
)

// solve finds the members of the lanes.
func (a *allocation) solve() (lanes []mix) {
	if a.rough {
		lanes = a.roughly()
	} else {
		lanes = a.exactly()
	}
	a.optimum = a.rates(lanes)
	return lanes
}

// exactly solves a small host by the simplex algorithm.
func (a *allocation) exactly() []mix {
	p := program{rows: a.rows, flows: len(a.flows)}
	unit := 0.0 // GB/s, for amounts near 1
	for i := range a.p.host.NICs {
		unit = max(unit, a.p.nicRate(i))
	}
	for f := range a.flows {
		for k := range a.routes[f] {
			c := &a.routes[f][k]
			w := programRoute{flow: f, cost: c.cost}
			for _, on := range c.load {
				w.load = append(w.load, onPipe{on.pipe, on.weight * unit})
			}
			p.routes = append(p.routes, w)
		}
	}
	amounts, slowest := p.maxMinFair()
	a.bound = slowest * unit
	lanes := make([]mix, len(a.flows))
	at := 0
	for f := range a.flows {
		sum := 0.0
		for k := range a.routes[f] {
			sum += amounts[at+k]
		}
		for k := range a.routes[f] {
			if amounts[at+k] > 1e-4*sum {
				lanes[f] = append(lanes[f], share1{k, amounts[at+k]})
			}
		}
		if len(lanes[f]) == 0 {
			lanes[f] = mix{{a.cheapest(f), 1}}
		}
		at += len(a.routes[f])
	}
	return lanes
}

// cheapest returns the fastest route of a flow with an idle host; of equally fast routes, the
// cheapest.
func (a *allocation) cheapest(f int) (best int) {
	for k := range a.routes[f] {
		c, b := &a.routes[f][k], &a.routes[f][best]
		if cmp.Or(-compareRoughly(c.alone, b.alone), cmp.Compare(c.cost, b.cost)) < 0 {
			best = k
		}
	}
	return best
}

// Largest losses of a lane's rate: by fewer members, and by rounding. Both losses together are
// the limit of a choice.
const (
	simplerCost = 0.01
	roundCost   = 0.005
)

// close reports whether rates, from the slowest upwards, are below the optimum by at most part.
func (a *allocation) close(rates []float64, part float64) bool {
	reached, best := slices.Sorted(slices.Values(rates)), slices.Sorted(slices.Values(a.optimum))
	for i := range reached {
		if reached[i] < best[i]*(1-part) {
			return false
		}
		if reached[i] > best[i]*(1+part) {
			break
		}
	}
	return true
}

// simplify removes members of lanes while the lanes together keep 99 % of the optimum.
func (a *allocation) simplify(lanes []mix) {
	on := make([]float64, a.rows)
	put := func(f int, m mix, sign float64) {
		for _, l := range a.loadOf(f, m) {
			on[l.pipe] += float64(sign * l.weight * a.optimum[f] * (1 - simplerCost))
		}
	}
	for f, m := range lanes {
		put(f, m, 1)
	}
	try := func(f int, m mix) bool {
		put(f, lanes[f], -1)
		put(f, m, 1)
		fits := true
		for _, l := range a.loadOf(f, m) {
			fits = fits && on[l.pipe] <= 1
		}
		if fits {
			lanes[f] = m
			return true
		}
		put(f, m, -1)
		put(f, lanes[f], 1)
		return false
	}
	for f := range a.open {
		if len(lanes[f]) == 1 {
			continue
		}
		m := slices.Clone(lanes[f])
		slices.SortStableFunc(m, func(x, y share1) int {
			return cmp.Or(cmp.Compare(y.weight, x.weight), cmp.Compare(a.routes[f][x.route].cost, a.routes[f][y.route].cost),
				cmp.Compare(x.route, y.route))
		})
		if slices.ContainsFunc(m, func(s share1) bool { return try(f, mix{{s.route, 1}}) }) {
			continue
		}
		for i := len(m) - 1; i >= 0 && len(lanes[f]) > 2; i-- {
			less := slices.DeleteFunc(slices.Clone(lanes[f]), func(s share1) bool { return s.route == m[i].route })
			try(f, less)
		}
	}
}

// round replaces the weights by whole numbers. A lane gets the smallest sum of weights that
// overloads no link. If the sum exceeds maxWeight, rounded chooses the weights.
func (a *allocation) round(lanes []mix, maxWeight int) {
	const little = 1e-5
	rates := a.rates(lanes)
	on := make([]float64, a.rows)
	put := func(f int, m mix, sign float64) {
		for _, l := range a.loadOf(f, m) {
			on[l.pipe] += float64(sign * l.weight * rates[f])
		}
	}
	for f, m := range lanes {
		put(f, m, 1)
	}
	fits := func(f int, m mix) bool {
		put(f, lanes[f], -1)
		put(f, m, 1)
		fit := true
		for _, l := range a.loadOf(f, m) {
			fit = fit && on[l.pipe] <= 1+little
		}
		if !fit {
			put(f, m, -1)
			put(f, lanes[f], 1)
		}
		return fit
	}
	for f := range a.open {
		m := lanes[f].scaled()
		if len(m) == 1 {
			lanes[f] = mix{{m[0].route, 1}}
			continue
		}
		found := false
		for sum := len(m); sum <= maxWeight && !found; sum++ {
			out, left := slices.Clone(m), sum
			for i := len(m) - 1; i > 0; i-- {
				out[i].weight = max(1, math.Round(m[i].weight*float64(sum)))
				left -= int(out[i].weight)
			}
			out[0].weight = float64(left)
			if left >= 1 && fits(f, out) {
				lanes[f], found = out, true
			}
		}
		if !found {
			out := rounded(m)
			put(f, lanes[f], -1)
			put(f, out, 1)
			lanes[f] = out
		}
	}
}

// rounded returns a mix with whole weights and a sum of at most MaxWeights. Only the largest
// share may grow by more than 1 %: otherwise rounding could fill a slow link with a small share
// of several lanes.
func rounded(m mix) mix {
	m = m.scaled()
	slices.SortStableFunc(m, func(x, y share1) int {
		return cmp.Or(cmp.Compare(y.weight, x.weight), cmp.Compare(x.route, y.route))
	})
	m = slices.DeleteFunc(m, func(s share1) bool { return s.weight < 1.0/maxWeights }).scaled()
	if len(m) == 1 {
		return mix{{m[0].route, 1}}
	}
	const exact = 0.002
	out := slices.Clone(m)
	for sum := len(m); sum <= maxWeights; sum++ {
		left, good := sum, true
		for i := len(m) - 1; i > 0; i-- {
			w := math.Round(m[i].weight * float64(sum))
			if sum == maxWeights || w > m[i].weight*float64(sum)*1.01 {
				w = math.Floor(float64(m[i].weight*float64(sum)) + 1e-9)
			}
			out[i].weight = max(1, w)
			left -= int(out[i].weight)
			off := out[i].weight/float64(sum) - m[i].weight
			good = good && off <= float64(0.01*m[i].weight)+1e-9 && off >= -exact
		}
		out[0].weight = float64(left)
		good = good && left >= 1 && left <= sum && math.Abs(float64(left)/float64(sum)-m[0].weight) <= exact
		if good || sum == maxWeights && left >= 1 {
			return out
		}
	}
	return mix{{m[0].route, 1}} // as many members as weights
}

// choose finds the lanes, as members with whole weights. If NCCL's choice of routes is faster,
// choose returns NCCL's choice, with a description in ahead.
func (a *allocation) choose() (lanes []mix, ahead string) {
	if len(a.flows) == 0 {
		return nil, ""
	}
	solved := a.solve()
	name, nccl := a.nccl()
	lowest := a.slowest(nccl)
	if best := max(lowest, a.slowest(solved)); a.bound < best {
		a.bound = best // an unproven bound can be below a known rate
	}
	for _, try := range []struct {
		simpler   bool
		maxWeight int // largest sum of the weights of a lane
	}{{true, 64}, {true, maxWeights}, {false, maxWeights}} {
		lanes = slices.Clone(solved)
		if try.simpler {
			a.simplify(lanes)
			a.polish(lanes)
		}
		a.round(lanes, try.maxWeight)
		rates := a.rates(lanes)
		if a.slowestOf(rates) >= lowest*(1-1e-9) && a.close(rates, simplerCost+roundCost) {
			return lanes, ""
		}
	}
	if a.slowest(lanes) >= lowest*(1-1e-9) {
		return lanes, ""
	}
	for f := range a.open {
		nccl[f] = rounded(nccl[f])
	}
	return nccl, name
}

func (a *allocation) slowest(lanes []mix) float64 {
	if lanes == nil {
		return 0
	}
	return a.slowestOf(a.rates(lanes))
}

// slowestOf returns the rate of the slowest lane that is not pinned.
func (a *allocation) slowestOf(rates []float64) float64 {
	if a.open == 0 {
		return 0
	}
	return slices.Min(rates[:a.open])
}

// nccl returns NCCL's default choice of routes, without PXN or with PXN, whichever is faster.
// lanes is nil if configuration forbids a route of the choice. On hosts with more than
// maxPolished GPUs the weights are not whole: NCCL assigns hundreds of NICs to a GPU, and
// rounding the weights takes as long as the plan.
func (a *allocation) nccl() (name string, lanes []mix) {
	for _, pxn := range []bool{false, true} {
		all := slices.Clone(a.pinnedMixes())
		for _, c := range a.p.cachedDefaults(a.flows[:a.open], pxn) {
			f := len(all) - (len(a.flows) - a.open)
			var m mix
			for _, q := range c.parts {
				if k := a.route(f, q.server, q.nic); k >= 0 {
					m = append(m, share1{k, q.weight})
				}
			}
			if len(m) == 0 || len(m) < len(c.parts) {
				all = nil
				break
			}
			if len(a.flows) <= maxPolished {
				m = rounded(m)
			}
			all = slices.Insert(all, f, m)
		}
		if all != nil && (lanes == nil || compareRoughly(a.slowest(all), a.slowest(lanes)) > 0) {
			lanes, name = all, "NCCL's default choice"
			if pxn {
				name = "NCCL's choice with PXN"
			}
		}
	}
	return name, lanes
}

// cachedDefaults caches ncclDefaults, which is slow and has several callers.
func (p *planner) cachedDefaults(gpus []int, pxn bool) []carried {
	same := func(c carried, g int) bool { return c.gpu == g }
	if known, ok := p.defaults[pxn]; ok && slices.EqualFunc(known, gpus, same) {
		return known
	}
	if p.defaults == nil {
		p.defaults = map[bool][]carried{}
	}
	p.defaults[pxn] = p.onPhysical(p.ncclDefaults(gpus, pxn))
	return p.defaults[pxn]
}

// onPhysical moves routes from excluded virtual functions to the NIC that owns the port. NCCL
// uses the NIC and the virtual functions; lanes use only the NIC.
func (p *planner) onPhysical(all []carried) []carried {
	for i, c := range all {
		var parts []part
		for _, q := range c.parts {
			if owner := p.owners[q.nic]; !p.usable(q.nic) && p.usable(owner) {
				q.nic = owner
			}
			if k := slices.IndexFunc(parts, func(o part) bool { return o.server == q.server && o.nic == q.nic }); k >= 0 {
				parts[k].weight += q.weight
			} else {
				parts = append(parts, q)
			}
		}
		all[i].parts = parts
	}
	return all
}

func (a *allocation) pinnedMixes() (all []mix) {
	for range a.flows[a.open:] {
		all = append(all, mix{{0, 1}})
	}
	return all
}

// route returns the index of a candidate, or -1.
func (a *allocation) route(f, server, nic int) int {
	return slices.IndexFunc(a.routes[f], func(c candidate) bool {
		return len(c.parts) == 1 && c.parts[0].server == server && c.parts[0].nic == nic
	})
}

// merit ranks choices of a lane's members with equal rates while the whole host is busy.
type merit struct {
	over      bool    // the limit of a server has no room for the lane's slots
	alone     float64 // the lane's rate alone
	crossings float64 // of links of server GPUs, per byte of the lane
	members   int
	busiest   float64 // crossings of the busiest of the host's server GPUs
	cost      float64
}

func (a merit) compare(b merit) int {
	if a.over != b.over {
		return map[bool]int{true: -1, false: 1}[a.over]
	}
	if math.Abs(a.alone-b.alone) > simplerCost*max(a.alone, b.alone) {
		return cmp.Compare(a.alone, b.alone)
	}
	return cmp.Or(-compareRoughly(a.crossings, b.crossings), -cmp.Compare(a.members, b.members),
		-compareRoughly(a.busiest, b.busiest), -compareRoughly(a.cost, b.cost))
}

func (a *allocation) merit(f int, lanes []mix) (m merit) {
	m.alone, m.members = a.alone(f, lanes[f]), len(lanes[f])
	sum := lanes[f].total()
	for _, s := range lanes[f] {
		m.crossings += float64(a.routes[f][s.route].crossings * s.weight / sum)
		m.cost += float64(a.routes[f][s.route].cost * s.weight / sum)
	}
	servers := map[int]bool{}
	for _, s := range lanes[f] {
		if q := a.routes[f][s.route].parts[0]; q.kind(a.flows[f]) == KindStaged {
			servers[q.server] = true
		}
	}
	for s := range servers {
		limit := a.p.stagingLimit[s]
		m.over = m.over || limit != nil && *limit < a.p.config.Staging.bytes(len(servers))
	}
	on := make([]float64, len(a.p.host.GPUs))
	for i, lane := range lanes {
		sum := lane.total()
		for _, s := range lane {
			c := &a.routes[i][s.route]
			for _, q := range c.parts {
				if q.server >= 0 && q.server != a.flows[i] {
					on[q.server] += float64(c.crossings * s.weight / sum / float64(len(c.parts)))
				}
			}
		}
	}
	m.busiest = slices.Max(on)
	return m
}

// polish changes the server GPUs of lanes without a loss of rate on a busy host. A change makes
// the lane faster on an idle host, loads server GPUs less, or removes members.
func (a *allocation) polish(lanes []mix) {
	if len(a.flows) > maxPolished {
		return
	}
	rates := a.rates(lanes)
	for range 2 {
		changed := false
		for f := range a.open {
			best := a.merit(f, lanes)
			for _, m := range a.alternatives(f, lanes[f]) {
				if a.steps > maxSteps {
					return
				}
				before := lanes[f]
				lanes[f] = m
				at := a.merit(f, lanes)
				if at.compare(best) > 0 {
					then := a.rates(lanes)
					slower := false
					for i := range then {
						slower = slower || then[i] < rates[i]*(1-1e-6)
					}
					if !slower {
						best, rates, changed = at, then, true
						continue
					}
				}
				lanes[f] = before
			}
		}
		if !changed {
			return
		}
	}
}

// alternatives are other routes of a lane to the same NICs. For a NIC the alternatives are:
// through the CPU's memory, staged on a single GPU, and evenly over the server GPUs.
func (a *allocation) alternatives(f int, m mix) (all []mix) {
	g := a.flows[f]
	var nics []int
	for _, s := range m {
		q := a.routes[f][s.route].parts[0]
		if q.server != g && !slices.Contains(nics, q.nic) {
			nics = append(nics, q.nic)
		}
	}
	for _, n := range nics {
		weight := 0.0
		var others mix
		for _, s := range m {
			if q := a.routes[f][s.route].parts[0]; q.nic == n && q.server != g {
				weight += s.weight
			} else {
				others = append(others, s)
			}
		}
		over := func(servers ...int) {
			m := slices.Clone(others)
			for _, s := range servers {
				k := a.route(f, s, n)
				if k < 0 {
					return
				}
				m = append(m, share1{k, weight / float64(len(servers))})
			}
			if len(servers) > 0 {
				all = append(all, m)
			}
		}
		over(throughMemory)
		for _, s := range a.p.stagers(g, n) {
			over(s)
		}
		over(a.p.servers(g, n)...)
	}
	return all
}

// allocate makes the lanes of a host whose links are known.
func (p *planner) allocate() []Lane {
	lanes := p.settled()
	a := p.newAllocation(true)
	chosen, ahead := a.choose()
	p.ahead, p.bound, p.reached = ahead, a.bound, make([]float64, len(lanes))
	for f, g := range a.flows {
		p.reached[g] = a.optimum[f]
		if f < a.open {
			lanes[g] = p.lane(g, a.members(f, chosen[f]))
		}
	}
	return lanes
}

// members returns the parts of a lane, the heaviest first; of equal weights, the nearest first.
// The weights have no common divisor.
func (a *allocation) members(f int, m mix) []part {
	g := a.flows[f]
	var parts []part
	divisor := 0
	for _, s := range m {
		q := a.routes[f][s.route].parts[0]
		q.weight = s.weight
		parts = append(parts, q)
		divisor = gcd(divisor, int(s.weight))
	}
	for i := range parts {
		parts[i].weight /= float64(divisor)
	}
	slices.SortStableFunc(parts, func(x, y part) int {
		return cmp.Or(cmp.Compare(y.weight, x.weight), cmp.Compare(a.p.toNIC[g][x.nic].Type, a.p.toNIC[g][y.nic].Type),
			cmp.Compare(x.nic, y.nic), cmp.Compare(x.server, y.server))
	})
	return parts
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
