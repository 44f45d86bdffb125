package planner

import (
	"cmp"
	"math"
	"slices"
)

// The revised simplex algorithm solves hosts with too many routes for the dense algorithm. The
// known routes are columns; the prices of links find missing routes (column generation). Flows have
// no rows in the basis: the amount of the flow's key column is the rate of the flow minus the
// amounts of the other columns of the flow (generalised upper bounds, by Dantzig and Van
// Slyke). The inverse of the basis is stored only for the rows of full links and for the places
// of columns and of the level. In other rows the slack is basic, and the entries follow from
// the stored rows.

// master maximises the level: the common rate of the flows that are not fixed.
//
// Rows have a capacity of 1 plus a small value against cycling (perturbation). The price of a row
// is the gain of the objective per unit of capacity.
type master struct {
	flows   int
	rowOf   map[int]int // pipe: row
	pipes   []int       // [row]
	columns []column
	known   []map[part]bool // [flow]

	key     []int     // [flow]: column
	others  [][]int   // [flow]: basic columns other than the key
	at      []int     // [column]: place in the basis, or -1
	fixed   []bool    // [flow]
	rate    []float64 // [flow]: rate of a fixed flow
	level   float64   // while the level is not basic
	levelAt int       // place of the level in the basis, or -1

	basis   []int       // [place]: column, theLevel, or slackOf(row)
	value   []float64   // [place]
	slackAt []int       // [row]: place of the slack, or -1 if the slack is not basic
	full    []int       // rows whose slack is not in the basis
	taken   []int       // places of columns and of the level
	inverse [][]float64 // [row][place]: inverse of the basis, for rows in full and places in taken
	price   []float64   // [row]
	pivots  int
	entered int // place that the last pivot changed; -1 if the last pivot changed a key

	direction, alpha []float64 // scratch
	touched          []int
	next             int // flow whose columns are priced next
}

// column is a route of a flow, by rows.
type column struct {
	flow  int
	route part // zero for a pinned lane
	load  load // by rows
	cost  float64
}

const theLevel = -1

// slackOf is the slack of a row, and the row of a slack.
func slackOf(row int) int { return -2 - row }

const (
	masterPivot   = 1e-7 // the smallest pivot element
	masterCost    = 1e-7 // the smallest gain of the level by an amount of 1
	masterCheaper = 1e-2 // the smallest gain of cost, which counts little
	stuckCost     = 1e-6 // smallest cost of a unit of a stuck flow, which rises only if another flow falls
	freshPrices   = 64   // pivots after which prices are recomputed
	blockOfFlow   = 4    // flows to price before the best column enters
)

func newMaster(flows int) *master {
	return &master{
		flows: flows, rowOf: map[int]int{}, known: make([]map[part]bool, flows), key: slices.Repeat([]int{-1}, flows),
		others: make([][]int, flows), fixed: make([]bool, flows), rate: make([]float64, flows), levelAt: -1,
	}
}

// add adds a route, with a load on pipes, and reports whether the route is new. The first route of
// a flow is the key.
func (m *master) add(flow int, route part, l load, cost float64) bool {
	if m.known[flow][route] {
		return false
	}
	c := column{flow: flow, route: route, cost: cost}
	for _, on := range l {
		r, ok := m.rowOf[on.pipe]
		if !ok {
			r = len(m.pipes)
			m.rowOf[on.pipe], m.pipes = r, append(m.pipes, on.pipe)
			_, golden := math.Modf(float64(float64(r+1) * math.Phi))
			m.basis, m.value = append(m.basis, slackOf(r)), append(m.value, 1+float64(perturbation*(0.1+golden)))
			for _, f := range m.full {
				m.inverse[f] = append(m.inverse[f], 0)
			}
			m.inverse, m.slackAt = append(m.inverse, nil), append(m.slackAt, r)
			m.direction, m.alpha, m.price = append(m.direction, 0), append(m.alpha, 0), append(m.price, 0)
		}
		if i := slices.IndexFunc(c.load, func(o onPipe) bool { return o.pipe == r }); i >= 0 {
			c.load[i].weight += on.weight
		} else {
			c.load = append(c.load, onPipe{r, on.weight})
		}
	}
	k := len(m.columns)
	if m.known[flow] == nil {
		m.known[flow] = map[part]bool{}
	}
	m.known[flow][route] = true
	m.columns, m.at = append(m.columns, c), append(m.at, -1)
	if m.key[flow] < 0 {
		m.key[flow] = k
	}
	return true
}

// now is the level.
func (m *master) now() float64 {
	if m.levelAt >= 0 {
		return m.value[m.levelAt]
	}
	return m.level
}

// amountOfKey is the amount of a flow's key.
func (m *master) amountOfKey(f int) float64 {
	sum := m.rate[f]
	if !m.fixed[f] {
		sum = m.now()
	}
	for _, k := range m.others[f] {
		sum -= m.value[m.at[k]]
	}
	return sum
}

// enter brings a column, the level or a slack into the basis, until an amount or a slack
// becomes zero. enter returns false if the step is unbounded.
func (m *master) enter(enter int) bool {
	clear(m.direction)
	put := func(l load, sign float64) {
		for _, on := range l {
			m.direction[on.pipe] += float64(sign * on.weight)
		}
	}
	flow := -1
	switch {
	case enter >= 0:
		flow = m.columns[enter].flow
		put(m.columns[enter].load, 1)
		put(m.columns[m.key[flow]].load, -1)
	case enter == theLevel:
		for f, k := range m.key {
			if !m.fixed[f] {
				put(m.columns[k].load, 1)
			}
		}
	default:
		m.direction[slackOf(enter)] = 1
	}
	clear(m.alpha)
	for r, d := range m.direction {
		if d == 0 {
			continue
		}
		if place := m.slackAt[r]; place >= 0 {
			m.alpha[place] += d
			continue
		}
		cells := m.inverse[r]
		for _, i := range m.taken {
			m.alpha[i] += float64(d * cells[i])
		}
	}
	m.touch()
	for _, i := range m.touched {
		m.eachLoad(i, func(r int, weight float64) {
			if place := m.slackAt[r]; place >= 0 {
				m.alpha[place] -= float64(m.alpha[i] * weight)
			}
		})
	}
	return m.leave(enter, flow)
}

// touch lists the taken places with a nonzero alpha.
func (m *master) touch() {
	m.touched = m.touched[:0]
	for _, i := range m.taken {
		if m.alpha[i] != 0 {
			m.touched = append(m.touched, i)
		}
	}
}

// eachLoad calls f for the load on rows of the column or the level at a place.
func (m *master) eachLoad(place int, f func(row int, weight float64)) {
	k := m.basis[place]
	if k >= 0 {
		for _, on := range m.columns[k].load {
			f(on.pipe, on.weight)
		}
		for _, on := range m.columns[m.key[m.columns[k].flow]].load {
			f(on.pipe, -on.weight)
		}
		return
	}
	for flow, k := range m.key {
		if !m.fixed[flow] {
			for _, on := range m.columns[k].load {
				f(on.pipe, on.weight)
			}
		}
	}
}

// leave finds the amount or slack that becomes zero first, and removes the amount or slack from
// the basis.
func (m *master) leave(enter, flow int) bool {
	alpha := m.alpha
	rising := 0.0 // of the level
	if enter == theLevel {
		rising = 1
	} else if m.levelAt >= 0 {
		rising = -alpha[m.levelAt]
	}
	place, key, step, pivot := -1, -1, math.Inf(1), 0.0
	consider := func(p, f int, value, falls float64) {
		if falls <= masterPivot {
			return
		}
		s := max(0, value) / falls
		if s < step-1e-12 || s <= step+1e-12 && falls > pivot {
			place, key, step, pivot = p, f, min(s, step), falls
		}
	}
	for i, a := range alpha {
		if i != m.levelAt {
			consider(i, -1, m.value[i], a)
		}
	}
	for f, others := range m.others {
		if len(others) == 0 && f != flow {
			continue // the key has the flow's rate, which does not fall
		}
		rate := rising
		if m.fixed[f] {
			rate = 0
		}
		for _, k := range others {
			rate += alpha[m.at[k]]
		}
		if f == flow {
			rate--
		}
		if rate < -masterPivot {
			consider(-1, f, m.amountOfKey(f), -rate)
		}
	}
	if math.IsInf(step, 1) {
		return false
	}
	m.pivots++
	for i, a := range alpha {
		m.value[i] -= float64(step * a)
	}
	m.entered = -1
	if key >= 0 && len(m.others[key]) == 0 {
		m.changeKey(flow, enter)
		return true
	}
	if key >= 0 {
		place = m.swap(key, pivot)
	}
	if enter == theLevel {
		step += m.level
	}
	m.replace(place, enter, step)
	return true
}

// changeKey replaces the key of a flow without other basic columns.
func (m *master) changeKey(flow, enter int) {
	m.key[flow] = enter
	if m.fixed[flow] || m.levelAt < 0 {
		return
	}
	scale := 1 / (1 + m.alpha[m.levelAt])
	for _, r := range m.full {
		cells := m.inverse[r]
		if c := cells[m.levelAt] * scale; c != 0 {
			for _, i := range m.touched {
				cells[i] -= float64(c * m.alpha[i])
			}
		}
	}
}

// swap makes the largest other column of a flow the key. The old key, with an amount of zero,
// takes the place of the column in the basis. swap returns the place.
func (m *master) swap(f int, pivot float64) int {
	others := m.others[f]
	best := 0
	for i, k := range others {
		if m.value[m.at[k]] > m.value[m.at[others[best]]] {
			best = i
		}
	}
	k := others[best]
	place := m.at[k]
	level := m.levelAt
	if m.fixed[f] {
		level = -1
	}
	for _, r := range m.full {
		cells, sum := m.inverse[r], 0.0
		for _, o := range others {
			sum -= cells[m.at[o]]
		}
		if level >= 0 {
			sum += cells[level]
		}
		cells[place] = sum
	}
	old := m.key[f]
	m.key[f], others[best] = k, old
	m.at[k], m.at[old], m.basis[place], m.value[place] = -1, place, old, 0
	if m.alpha[place] == 0 {
		m.touched = append(m.touched, place)
	}
	m.alpha[place] = pivot
	return place
}

// replace puts a column, the level or a slack in a place of the basis.
func (m *master) replace(place, enter int, value float64) {
	switch k := m.basis[place]; {
	case k >= 0:
		f := m.columns[k].flow
		m.at[k] = -1
		m.others[f] = slices.DeleteFunc(m.others[f], func(o int) bool { return o == k })
	case k == theLevel:
		m.level, m.levelAt = m.value[place], -1
	default:
		r := slackOf(k)
		for _, f := range m.full {
			m.inverse[f][place] = 0
		}
		for _, i := range m.taken {
			crosses := 0.0
			m.eachLoad(i, func(row int, weight float64) {
				if row == r {
					crosses += weight
				}
			})
			if crosses != 0 {
				for _, f := range m.full {
					m.inverse[f][place] -= float64(crosses * m.inverse[f][i])
				}
			}
		}
		m.taken, m.touched = append(m.taken, place), append(m.touched, place)
		m.slackAt[r], m.full = -1, append(m.full, r)
		if cap(m.inverse[r]) >= len(m.basis) {
			m.inverse[r] = m.inverse[r][:len(m.basis)]
			clear(m.inverse[r])
		} else {
			m.inverse[r] = make([]float64, len(m.basis), len(m.basis)+len(m.basis)/4)
		}
		m.inverse[r][place] = 1
	}
	switch {
	case enter >= 0:
		f := m.columns[enter].flow
		m.at[enter], m.others[f] = place, append(m.others[f], enter)
	case enter == theLevel:
		m.levelAt = place
	default:
		r := slackOf(enter)
		m.slackAt[r] = place
		m.full = slices.DeleteFunc(m.full, func(f int) bool { return f == r })
		m.taken = slices.DeleteFunc(m.taken, func(i int) bool { return i == place })
	}
	m.basis[place], m.value[place], m.entered = enter, value, place
	scale := 1 / m.alpha[place]
	for _, r := range m.full {
		cells := m.inverse[r]
		if cells[place] == 0 {
			continue
		}
		c := cells[place] * scale
		for _, i := range m.touched {
			cells[i] -= float64(c * m.alpha[i])
		}
		cells[place] = c
	}
}

// priceLevel sets the price of a row to the gain of the level per unit of capacity.
func (m *master) priceLevel() {
	clear(m.price)
	for _, r := range m.full {
		m.price[r] = m.inverse[r][m.levelAt]
	}
}

// priceCost sets the price of a row to the saving of cost per unit of capacity.
func (m *master) priceCost() {
	clear(m.price)
	type gain struct {
		place int
		cost  float64
	}
	var gains []gain
	for f, others := range m.others {
		for _, k := range others {
			gains = append(gains, gain{m.at[k], m.columns[m.key[f]].cost - m.columns[k].cost})
		}
	}
	for _, r := range m.full {
		sum := 0.0
		for _, g := range gains {
			sum += float64(g.cost * m.inverse[r][g.place])
		}
		m.price[r] = sum
	}
}

func (m *master) spent(k int) (sum float64) {
	for _, on := range m.columns[k].load {
		sum += float64(m.price[on.pipe] * on.weight)
	}
	return sum
}

// improve brings columns and slacks into the basis while the level rises, or while the cost
// falls if the level is not basic. improve reports whether the search ended within the limit of
// pivots.
func (m *master) improve(maxColumns int) bool {
	byCost := m.levelAt < 0
	own := make([][]int, m.flows)
	for k, c := range m.columns {
		own[c.flow] = append(own[c.flow], k)
	}
	fresh := 0 // pivots for which prices were updated, and not computed
	for maxColumns += m.pivots; m.pivots < maxColumns; {
		if byCost && fresh == 0 {
			m.priceCost()
		} else if !byCost {
			m.priceLevel()
		}
		minCost := masterCost
		if byCost {
			minCost = masterCheaper
		}
		best, gain := m.entering(own, byCost, minCost)
		if best == theLevel {
			return true
		}
		if !m.enter(best) {
			return true
		}
		if fresh = (fresh + 1) % freshPrices; byCost && m.entered >= 0 {
			if best < theLevel {
				m.price[slackOf(best)] = 0
			}
			for _, r := range m.full {
				m.price[r] += float64(gain * m.inverse[r][m.entered])
			}
		}
	}
	return false
}

// entering returns the column or slack that gains the most above a least gain, and the gain;
// theLevel if there is none. own lists the columns of each flow.
func (m *master) entering(own [][]int, byCost bool, gain float64) (int, float64) {
	best := theLevel
	for _, r := range m.full {
		if -m.price[r] > gain {
			best, gain = slackOf(r), -m.price[r]
		}
	}
	for n := range m.flows {
		if n%blockOfFlow == 0 && best != theLevel {
			break
		}
		f := m.next
		m.next = (f + 1) % m.flows
		if len(own[f]) == 1 {
			continue
		}
		key := m.key[f]
		base := m.spent(key)
		if byCost {
			base += m.columns[key].cost
		}
		for _, k := range own[f] {
			cost := 0.0
			if byCost {
				cost = m.columns[k].cost
			}
			if k != key && m.at[k] < 0 && base-cost > gain {
				if g := base - cost - m.spent(k); g > gain {
					best, gain = k, g
				}
			}
		}
	}
	return best, gain
}

// fix ends a level: flows stuck at full links keep the rate of the level. fix reports whether
// an unfixed flow remains.
func (m *master) fix() bool {
	m.priceLevel()
	rate := m.now()
	fullest := -1 // a full link: the inverse has no row for another
	for r, y := range m.price {
		if m.slackAt[r] < 0 && (fullest < 0 || y > m.price[fullest]) {
			fullest = r
		}
	}
	if fullest >= 0 && m.price[fullest] <= masterPivot { // rounding, or too few pivots
		for _, r := range m.full {
			if math.Abs(m.price[r]) > math.Abs(m.price[fullest]) {
				fullest = r
			}
		}
	}
	if fullest < 0 || math.Abs(m.price[fullest]) <= masterPivot {
		// No link can take the place of the level, which stays in the basis.
		for f := range m.flows {
			if !m.fixed[f] {
				m.fixed[f], m.rate[f] = true, rate
			}
		}
		return false
	}
	// The slack of the dearest link takes the place of the level, and stays zero.
	for _, i := range m.taken {
		m.alpha[i] = m.inverse[fullest][i]
	}
	m.touch()
	stuck, some := make([]bool, m.flows), false
	for f := range m.flows {
		stuck[f] = !m.fixed[f] && m.spent(m.key[f]) > stuckCost
		some = some || stuck[f]
	}
	m.replace(m.levelAt, slackOf(fullest), 0)
	left := false
	for f := range m.flows {
		if stuck[f] || !some && !m.fixed[f] {
			m.fixed[f], m.rate[f] = true, rate
		}
		left = left || !m.fixed[f]
	}
	m.level = rate
	return left
}

// settle fixes the remaining flows.
func (m *master) settle() {
	if m.levelAt >= 0 {
		m.fix()
	}
	for f := range m.flows {
		if !m.fixed[f] {
			m.fixed[f], m.rate[f] = true, m.level
		}
	}
}

// amounts returns the columns of a flow with the amounts, the greatest first.
func (m *master) amounts(f int) (all []amount) {
	all = append(all, amount{m.key[f], m.amountOfKey(f)})
	for _, k := range m.others[f] {
		all = append(all, amount{k, m.value[m.at[k]]})
	}
	slices.SortFunc(all, func(x, y amount) int {
		return cmp.Or(cmp.Compare(y.rate, x.rate), cmp.Compare(x.column, y.column))
	})
	return all
}

type amount struct {
	column int
	rate   float64 // GB/s
}
