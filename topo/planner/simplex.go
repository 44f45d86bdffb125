package planner

import "math"

// program is the problem of assigning an amount to the routes of flows. The capacity of a link
// bounds the sum of the routes over the link.
type program struct {
	routes []programRoute
	rows   int // links, of capacity 1
	flows  int
}

// programRoute is a route of a flow. load is the load per unit on links of capacity 1. cost decides
// between routes with equal rates.
type programRoute struct {
	flow int
	load load
	cost float64
}

// tableau is the dense state of the simplex algorithm. A link has a row. A flow has a row with the
// condition that the rate of the flow is at least the level. Columns are the routes, the slacks of
// rows, and the level.
type tableau struct {
	rows, columns int
	cells         []float64 // [row][column]
	right         []float64
	basis         []int // [row]: column; -1 for a settled row
	banned        []bool
	objective     []float64 // reduced, to be maximised
	pivots        int
}

// Cells and reduced costs below the constants are rounding errors.
const (
	tinyCell = 1e-9
	tinyCost = 1e-8
)

// perturbation bounds the increase of the right sides of rows, which differs from row to row.
// Without the increase, the algorithm would cycle between degenerate vertices. Only tests change
// perturbation.
var perturbation = 1e-6

func (t *tableau) row(i int) []float64 { return t.cells[i*t.columns : (i+1)*t.columns] }

// maxMinFair returns the cheapest max-min fair amounts of routes: the slowest flow is as fast as
// possible, then the second slowest flow, and so on. slowest is the rate of the slowest flow. Every
// flow needs a route. A vertex has at most as many amounts above 0 as the sum of links and flows.
func (p *program) maxMinFair() (amounts []float64, slowest float64) {
	t := p.tableau()
	level := t.columns - 1
	fixed := make([]bool, p.flows)
	first := true
	for open := p.flows; open > 0; {
		for i := range t.rows {
			row := t.row(i)
			row[level] = 0
			for f := range p.flows {
				if !fixed[f] {
					row[level] += row[p.slack(p.rows+f)]
				}
			}
		}
		clear(t.objective)
		t.objective[level], t.banned[level] = 1, false
		t.maximize()
		at := t.at(level)
		if at < 0 {
			break // rounding: the level cannot rise
		}
		if first {
			slowest, first = t.right[at], false
		}
		t.settle()
		t.basis[at] = -1
		before := open
		for f := range p.flows {
			if !fixed[f] && t.banned[p.slack(p.rows+f)] {
				fixed[f] = true
				open--
			}
		}
		if open == before {
			break
		}
	}
	t.banned[level] = true
	p.cheapen(t)
	amounts = make([]float64, len(p.routes))
	for i, column := range t.basis {
		if column >= 0 && column < len(p.routes) {
			amounts[column] = max(0, t.right[i])
		}
	}
	return amounts, slowest
}

// slack returns the column of the slack of a row.
func (p *program) slack(row int) int { return len(p.routes) + row }

// tableau returns the start of the algorithm, with amounts of 0.
func (p *program) tableau() *tableau {
	t := &tableau{rows: p.rows + p.flows, columns: len(p.routes) + p.rows + p.flows + 1}
	t.cells, t.right, t.basis = make([]float64, t.rows*t.columns), make([]float64, t.rows), make([]int, t.rows)
	t.banned, t.objective = make([]bool, t.columns), make([]float64, t.columns)
	for i, w := range p.routes {
		for _, on := range w.load {
			t.row(on.pipe)[i] = on.weight
		}
		t.row(p.rows + w.flow)[i] = -1
	}
	for i := range t.rows {
		t.row(i)[p.slack(i)], t.basis[i] = 1, p.slack(i)
		_, golden := math.Modf(float64(float64(i+1) * math.Phi))
		t.right[i] = perturbation * (0.1 + golden)
		if i < p.rows {
			t.right[i]++
		}
	}
	return t
}

// cheapen minimises the cost at constant rates.
func (p *program) cheapen(t *tableau) {
	clear(t.objective)
	for i, w := range p.routes {
		t.objective[i] = -w.cost
	}
	for i, column := range t.basis {
		if column < 0 || column >= len(p.routes) {
			continue
		}
		cost := p.routes[column].cost
		for j, cell := range t.row(i) {
			// float64 keeps compilers from fusing the product with the sum, as on arm64: the plan
			// of a host must not depend on the processor. The conversions below have the same
			// reason.
			t.objective[j] += float64(cost * cell)
		}
	}
	for _, column := range t.basis {
		if column >= 0 {
			t.objective[column] = 0
		}
	}
	t.maximize()
}

// at returns the row with the basic column; -1 for a column outside the basis.
func (t *tableau) at(column int) int {
	for i, c := range t.basis {
		if c == column {
			return i
		}
	}
	return -1
}

// stalled is the number of consecutive pivots without progress after which maximize takes columns
// in order. The rule of Bland guarantees the end of the algorithm.
const stalled = 40

// maximize pivots until no column raises the objective, or the objective is unbounded.
func (t *tableau) maximize() {
	still := 0
	for range 50*(t.rows+10) + 2000 { // the algorithm ends far sooner
		enter := -1
		for j, gain := range t.objective {
			if t.banned[j] || gain <= tinyCost {
				continue
			}
			if enter < 0 || gain > t.objective[enter] {
				enter = j
			}
			if still > stalled {
				break
			}
		}
		if enter < 0 {
			return
		}
		leave, lowest := -1, math.Inf(1)
		for i := range t.rows {
			cell := t.cells[i*t.columns+enter]
			if cell <= tinyCell || t.basis[i] < 0 {
				continue
			}
			ratio := t.right[i] / cell
			switch {
			case ratio < lowest-1e-12:
				leave, lowest = i, ratio
			case ratio <= lowest+1e-12 && leave >= 0 && t.basis[i] < t.basis[leave] &&
				(still > stalled || cell > t.cells[leave*t.columns+enter]/2):
				leave, lowest = i, min(lowest, ratio)
			}
		}
		if leave < 0 {
			return // unbounded: no link bounds a flow
		}
		if lowest > 1e-12 {
			still = 0
		} else {
			still++
		}
		t.pivot(leave, enter)
	}
}

func (t *tableau) pivot(leave, enter int) {
	t.pivots++
	from := t.row(leave)
	scale := 1 / from[enter]
	var used []int
	for j, cell := range from {
		if cell != 0 {
			from[j] = cell * scale
			used = append(used, j)
		}
	}
	t.right[leave] *= scale
	from[enter] = 1
	take := func(row []float64, factor float64) {
		for _, j := range used {
			row[j] -= float64(factor * from[j])
		}
		row[enter] = 0
	}
	for i := range t.rows {
		if i == leave {
			continue
		}
		row := t.row(i)
		if factor := row[enter]; factor != 0 {
			take(row, factor)
			t.right[i] = max(0, t.right[i]-float64(factor*t.right[leave]))
		}
	}
	if factor := t.objective[enter]; factor != 0 {
		take(t.objective, factor)
	}
	t.basis[leave] = enter
}

// settle fixes the value of the objective: settle bans the columns that would lower the objective.
func (t *tableau) settle() {
	for j, gain := range t.objective {
		if gain < -tinyCost {
			t.banned[j] = true
		}
	}
}
