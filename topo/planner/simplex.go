package planner

import "math"

// program is the choice of how much each of some flows sends over each of its ways:
// what a host's links carry bounds all ways together.
type program struct {
	ways  []programWay
	rows  int // links; each carries 1
	flows int
}

// programWay is a way of a flow. load is what a unit of it puts on links, each of which
// carries 1, and cost what it costs where nothing else decides.
type programWay struct {
	flow int
	load load
	cost float64
}

// tableau is the state of the simplex algorithm, dense: a row for each link, and one for
// each flow that says that it is at least as fast as the level. Columns are the ways, the
// slack of each row, and the level.
type tableau struct {
	rows, columns int
	cells         []float64 // [row][column]
	right         []float64
	basis         []int // [row]: column; -1 for one that stays
	banned        []bool
	objective     []float64 // reduced, to be maximised
	pivots        int
}

// Values below these are what rounding left: of cells and of reduced costs.
const (
	tinyCell = 1e-9
	tinyCost = 1e-8
)

// What links carry and flows have is larger by up to apart, each by something else: where
// many choices meet in one, the algorithm would else go from one to the next without getting
// on. Only tests change it.
var apart = 1e-6

func (t *tableau) row(i int) []float64 { return t.cells[i*t.columns : (i+1)*t.columns] }

// maxMinFair finds the amounts of the ways that make the slowest flow as fast as possible,
// then the next one (max-min fairness), and are the cheapest of these. It also returns the
// rate that the slowest flow has. All flows need a way. The amounts of a vertex are few:
// as many as there are links and flows at most.
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
			break // rounding: it cannot rise
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
	amounts = make([]float64, len(p.ways))
	for i, column := range t.basis {
		if column >= 0 && column < len(p.ways) {
			amounts[column] = max(0, t.right[i])
		}
	}
	return amounts, slowest
}

// slack is the column of a row's slack.
func (p *program) slack(row int) int { return len(p.ways) + row }

// tableau is the one in which nothing is sent.
func (p *program) tableau() *tableau {
	t := &tableau{rows: p.rows + p.flows, columns: len(p.ways) + p.rows + p.flows + 1}
	t.cells, t.right, t.basis = make([]float64, t.rows*t.columns), make([]float64, t.rows), make([]int, t.rows)
	t.banned, t.objective = make([]bool, t.columns), make([]float64, t.columns)
	for i, w := range p.ways {
		for _, on := range w.load {
			t.row(on.pipe)[i] = on.weight
		}
		t.row(p.rows + w.flow)[i] = -1
	}
	for i := range t.rows {
		t.row(i)[p.slack(i)], t.basis[i] = 1, p.slack(i)
		_, golden := math.Modf(float64(float64(i+1) * math.Phi))
		t.right[i] = apart * (0.1 + golden)
		if i < p.rows {
			t.right[i]++
		}
	}
	return t
}

// cheapen lowers the cost of what is as fast.
func (p *program) cheapen(t *tableau) {
	clear(t.objective)
	for i, w := range p.ways {
		t.objective[i] = -w.cost
	}
	for i, column := range t.basis {
		if column < 0 || column >= len(p.ways) {
			continue
		}
		cost := p.ways[column].cost
		for j, cell := range t.row(i) {
			// Here and below float64 keeps compilers from fusing the product with the sum, as
			// on arm64: the plan of a host is the same on every processor.
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

// at is the row whose basic column is this; -1 for none.
func (t *tableau) at(column int) int {
	for i, c := range t.basis {
		if c == column {
			return i
		}
	}
	return -1
}

// stalled is the number of pivots in a row that change nothing after which columns are
// taken in order, by which the algorithm ends (Bland).
const stalled = 40

// maximize raises the objective as far as it goes.
func (t *tableau) maximize() {
	still := 0
	for range 50*(t.rows+10) + 2000 { // it ends far sooner
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
		leave, least := -1, math.Inf(1)
		for i := range t.rows {
			cell := t.cells[i*t.columns+enter]
			if cell <= tinyCell || t.basis[i] < 0 {
				continue
			}
			ratio := t.right[i] / cell
			switch {
			case ratio < least-1e-12:
				leave, least = i, ratio
			case ratio <= least+1e-12 && leave >= 0 && t.basis[i] < t.basis[leave] && (still > stalled || cell > t.cells[leave*t.columns+enter]/2):
				leave, least = i, min(least, ratio)
			}
		}
		if leave < 0 {
			return // unbounded: nothing bounds a flow
		}
		if least > 1e-12 {
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

// settle has the objective stay as it is: each column that would lower it is out from now
// on.
func (t *tableau) settle() {
	for j, gain := range t.objective {
		if gain < -tinyCost {
			t.banned[j] = true
		}
	}
}
