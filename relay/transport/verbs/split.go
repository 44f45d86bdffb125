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

// weigh is by how much each pair of a path carries of a write: the weight of its NIC at this
// side, which the NIC's pairs share.
func (s *Set) weigh(pairs []int, nics map[string]int) []float64 {
	weights, count := make([]float64, len(pairs)), map[string]int{}
	for _, at := range pairs {
		count[s.nics[s.links[s.pairs[at].link].ours].name]++
	}
	for i, at := range pairs {
		name := s.nics[s.links[s.pairs[at].link].ours].name
		weights[i] = float64(nics[name]) / float64(count[name])
	}
	return weights
}

// split spreads a write over the pairs of the path by the weights of NICs. The parts are as
// many as the receiver expects: one without bytes still tells it that it has come. Where no
// NIC of the path has a weight, because those that have have failed, all are alike.
func (l *Link) split(n uint64, ticket uint32, nics map[string]int) []piece {
	if nics == nil {
		return evenly(n, ticket, len(l.pairs))
	}
	return l.short.split(n, ticket, l.set.weigh(l.pairs, nics))
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
	whole := make([]int, len(weights))
	for i, weight := range weights {
		if weight > 0 {
			whole[i] = max(1, int(weight*64+0.5))
		}
	}
	w.dealer = stripe.New(whole)
}
