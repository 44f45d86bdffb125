package verbs

import "github.com/peerlane/peerlane/relay/stripe"

// A write is spread over the queue pairs of its path in parts of whole granules, so that
// each begins where a cache line of both hosts does, and is as long but for the last. Both
// sides reckon it from the length and the number of pairs alone: the receiver knows how
// many immediates tell that all of it is there.
const (
	granule = 128 // bytes
	// leastPart is the shortest part of a write that has several, bytes: a work request of
	// its own costs more than a shorter one would save.
	leastPart = 8 << 10
)

// partBytes is the length of each part but the last of n bytes over so many pairs.
func partBytes(n uint64, pairs int) uint64 {
	each := (n + uint64(pairs) - 1) / uint64(pairs)
	each = (each + granule - 1) / granule * granule
	return min(max(each, leastPart), n)
}

// parts is how many parts there are, at least one.
func parts(n uint64, pairs int) int {
	if n == 0 {
		return 1
	}
	each := partBytes(n, pairs)
	return int((n + each - 1) / each)
}

// part is where part i begins, and its length.
func part(n uint64, pairs, i int) (at, length uint64) {
	each := partBytes(n, pairs)
	at = uint64(i) * each
	return at, min(each, n-at)
}

// pairOf is which pair of a path carries part i of a ticket's write: writes of one part
// take turns.
func pairOf(ticket uint32, i, pairs int) int {
	return int((uint64(ticket) + uint64(i)) % uint64(pairs))
}

// piece is a part of a write, and the pair of the path that carries it.
type piece struct {
	pair       int
	at, length uint64
}

// shortWrites deals writes that have fewer parts than the path has pairs out to its pairs, by
// weight.
type shortWrites struct {
	weights []float64
	dealer  *stripe.Scheduler
}

// weigh returns the share of each queue pair of a path in a write. own has the weights of this
// side's NICs by name, theirs those of the other side's NICs; without weights, the NICs of a side
// have equal ones. The queue pairs between two NICs have equal shares. If both sides have
// weights, two NICs have the lesser of their shares: neither NIC carries more than it is to.
func (s *Set) weigh(pairs []int, own map[string]int, theirs [maxCards]uint16) []float64 {
	var ends [][2]int
	for _, at := range pairs {
		l := s.links[s.pairs[at].link]
		ends = append(ends, [2]int{l.ours, l.theirs})
	}
	return weighEnds(ends, func(i int) float64 { return float64(own[s.nics[i].name]) }, own != nil,
		func(i int) float64 { return float64(theirs[i]) }, theirs != [maxCards]uint16{})
}

// weighEnds is weigh for queue pairs between a NIC of each side.
func weighEnds(ends [][2]int, own func(int) float64, byOwn bool, theirs func(int) float64, byTheirs bool) []float64 {
	weights := make([]float64, len(ends))
	one := func(int) float64 { return 1 }
	switch {
	case !byOwn && !byTheirs:
		for i := range weights {
			weights[i] = 1
		}
		return weights
	case !byOwn:
		return sharesOf(ends, 1, theirs, one)
	case !byTheirs:
		return sharesOf(ends, 0, own, one)
	}
	for i, share := range sharesOf(ends, 0, own, theirs) {
		weights[i] = share
	}
	for i, share := range sharesOf(ends, 1, theirs, own) {
		weights[i] = min(weights[i], share)
	}
	return weights
}

// sharesOf shares one out to the NICs of a side by weight, and the share of each NIC to its queue
// pairs by the weights of the NICs at the other side.
func sharesOf(ends [][2]int, side int, weight, other func(int) float64) []float64 {
	sum, at := 0.0, map[int]float64{} // of the NICs of the side, and of the other side of each
	for _, e := range ends {
		if _, counted := at[e[side]]; !counted {
			sum += weight(e[side])
		}
		at[e[side]] += other(e[1-side])
	}
	shares := make([]float64, len(ends))
	for i, e := range ends {
		if sum > 0 && at[e[side]] > 0 {
			shares[i] = weight(e[side]) / sum * other(e[1-side]) / at[e[side]]
		}
	}
	return shares
}

// split spreads a write over the queue pairs of the path by the weights of NICs. The parts are as
// many as the receiver expects: one without bytes still tells it that it has come. Where no
// NIC of the path has a weight, because those that have have failed, all are alike.
func (l *Link) split(n uint64, ticket uint32, own map[string]int, theirs [maxCards]uint16) []piece {
	if own == nil && theirs == [maxCards]uint16{} {
		return evenly(n, ticket, len(l.pairs))
	}
	return l.short.split(n, ticket, l.set.weigh(l.pairs, own, theirs))
}

func evenly(n uint64, ticket uint32, pairs int) (pieces []piece) {
	for i := range parts(n, pairs) {
		at, length := part(n, pairs, i)
		pieces = append(pieces, piece{pairOf(ticket, i, pairs), at, length})
	}
	return pieces
}

func (w *shortWrites) split(n uint64, ticket uint32, weights []float64) []piece {
	alike, sum := true, 0.0
	for _, weight := range weights {
		alike = alike && weight == weights[0]
		sum += weight
	}
	if alike || sum == 0 {
		return evenly(n, ticket, len(weights))
	}
	count := parts(n, len(weights))
	carries := weights
	chosen := make([]bool, len(weights))
	if count < len(weights) {
		w.deal(weights)
		carries = make([]float64, len(weights))
		for left := count; left > 0; left-- {
			i := w.dealer.Next(func(i int) bool { return !chosen[i] })
			for k := 0; i < 0; k++ { // fewer have a weight than there are parts
				if !chosen[k] {
					i = k
				}
			}
			chosen[i], carries[i] = true, weights[i]
		}
		if total(carries) == 0 {
			return evenly(n, ticket, len(weights))
		}
	} else {
		for i := range chosen {
			chosen[i] = true
		}
	}
	granules := stripe.Split((n+granule-1)/granule, carries)
	var pieces []piece
	at := uint64(0)
	for i := range chosen {
		if !chosen[i] {
			continue
		}
		length := min(granules[i]*granule, n-at)
		pieces = append(pieces, piece{i, at, length})
		at += length
	}
	return pieces
}

func total(weights []float64) (sum float64) {
	for _, w := range weights {
		sum += w
	}
	return sum
}

// turnsOfAll is the number of turns that deal divides by weight.
const turnsOfAll = 1 << 12

// deal makes the scheduler anew where weights are others than before.
func (w *shortWrites) deal(weights []float64) {
	same := len(w.weights) == len(weights)
	for i := 0; same && i < len(weights); i++ {
		same = w.weights[i] == weights[i]
	}
	if same {
		return
	}
	w.weights = weights
	whole, sum := make([]int, len(weights)), total(weights)
	for i, weight := range weights {
		if weight > 0 {
			whole[i] = max(1, int(weight/sum*turnsOfAll+0.5))
		}
	}
	w.dealer = stripe.New(whole)
}
