// Package stripe assigns work to members by weight, in order: a weighted round robin. The package
// is independent of devices.
package stripe

// Scheduler deals out turns. Over any number of turns a member gets a share by weight, to within a
// turn, while every member is ready. A Scheduler is for a single goroutine.
type Scheduler struct {
	members []member
}

type member struct {
	weight int
	failed bool
	// credit is the member's outstanding share, in parts of a turn: the sum of the weights is one.
	credit int
}

// New makes a scheduler of members by weight. A member of weight 0 has no turn.
func New(weights []int) *Scheduler {
	s := &Scheduler{}
	for _, w := range weights {
		s.members = append(s.members, member{weight: max(0, w)})
	}
	return s
}

// working is whether a member takes part.
func (m *member) working() bool { return m.weight > 0 && !m.failed }

func (s *Scheduler) sum() (sum int) {
	for i := range s.members {
		if s.members[i].working() {
			sum += s.members[i].weight
		}
	}
	return sum
}

// owedMost limits the credit of a busy member, in turns. Without a limit a member would get every
// turn after a long busy time.
const owedMost = 2

// Next gives the next turn to a member that is ready, and returns its place; -1 where none is. A
// nil ready says that all are. A busy member keeps the credit, and gets the turn when ready.
func (s *Scheduler) Next(ready func(int) bool) int {
	sum, best := s.sum(), -1
	for i := range s.members {
		m := &s.members[i]
		if m.working() && (ready == nil || ready(i)) &&
			(best < 0 || m.credit+m.weight > s.members[best].credit+s.members[best].weight) {
			best = i
		}
	}
	if best < 0 {
		return -1
	}
	for i := range s.members {
		if m := &s.members[i]; m.working() {
			m.credit = max(-owedMost*sum, min(m.credit+m.weight, owedMost*sum))
		}
	}
	s.members[best].credit -= sum
	return best
}

// Fail takes a member out. The ready members share the turns by weight.
func (s *Scheduler) Fail(i int) { s.set(i, true) }

// restore takes a member in that Fail took out. It is owed no turn.
func (s *Scheduler) restore(i int) { s.set(i, false) }

func (s *Scheduler) set(i int, failed bool) {
	if s.members[i].failed == failed {
		return
	}
	s.members[i].failed = failed
	for i := range s.members { // the credit was for the old shares
		s.members[i].credit = 0
	}
}

// Failed reports whether a member is out.
func (s *Scheduler) Failed(i int) bool { return s.members[i].failed }

// Split shares so many units out by weight: the parts cover the whole, and a part is within a unit
// of the share. Of weight 0 is nothing.
func Split(units uint64, weights []float64) []uint64 {
	parts := make([]uint64, len(weights))
	sum := 0.0
	for _, w := range weights {
		sum += w
	}
	if sum <= 0 {
		return parts
	}
	before, at := 0.0, uint64(0)
	last := 0
	for i, w := range weights {
		if w <= 0 {
			continue
		}
		before += w
		end := min(units, uint64(before/sum*float64(units)+0.5))
		parts[i], at, last = end-at, end, i
	}
	parts[last] += units - at // rounding
	return parts
}
