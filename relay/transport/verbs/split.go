package verbs

import (
	"cmp"

	"github.com/peerlane/peerlane/relay/stripe"
)

// A write is split over the links of its path, so that every NIC carries a part, and a long write
// also over the queue pairs of each link, which switches may route differently. Each part costs a
// work request, a completion on both sides and a receive. A write of a MiB therefore has one part
// for each link, and writes take turns at the queue pairs. Parts begin at multiples of granule,
// which is a cache line of both hosts. The receiver computes the number of parts from the length
// and the path, and waits for as many immediates.
const (
	granule = 128 // bytes
	// minLinkPart is the shortest part of a link, bytes.
	minLinkPart = 8 << 10
	minPairPart = 1 << 20
)

// pathShape is the number of links of a path, the number of queue pairs of each link, and the
// shortest part of a queue pair if the part of a link is split.
type pathShape struct {
	links, perLink int
	minPairPart    uint64
}

// linksFor returns the number of links for a write of n bytes.
func (p pathShape) linksFor(n uint64) int { return max(1, min(int(n/minLinkPart), p.links)) }

// pairsFor returns the number of queue pairs of each link for a write of n bytes.
func (p pathShape) pairsFor(n uint64) int {
	return max(1, min(int(n/uint64(p.linksFor(n))/p.minPairPart), p.perLink))
}

// parts returns the number of parts.
func (p pathShape) parts(n uint64) int { return p.linksFor(n) * p.pairsFor(n) }

// piece is a part of a write, and the index of its queue pair in the path.
type piece struct {
	pair       int
	at, length uint64
}

// splitter splits the writes of a sender.
type splitter struct {
	turn  int   // next link, for writes with fewer parts than links
	turns []int // next queue pair of each link
	// perLink is the number of queue pairs of each link in the last path.
	perLink int
	// dealer selects links by weight for writes with fewer parts than links.
	weights []float64
	dealer  *stripe.Scheduler
}

// weigh returns the share of each link of a path in a write. own has the weights of this side's
// NICs by name, theirs the weights of the peer's NICs; without weights, the NICs of a side have
// equal shares. If both sides have weights, two NICs have the lesser of their shares: neither NIC
// exceeds its share.
func (s *QPGroup) weigh(links []int, own map[string]int, theirs [maxCards]uint16) []float64 {
	var ends [][2]int
	for _, at := range links {
		l := s.links[at]
		ends = append(ends, [2]int{l.ours, l.theirs})
	}
	return weighEnds(ends, func(i int) float64 { return float64(own[s.nics[i].name]) }, own != nil,
		func(i int) float64 { return float64(theirs[i]) }, theirs != [maxCards]uint16{})
}

// weighEnds is weigh for links between a NIC of each side.
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

// sharesOf divides 1 among the NICs of a side by weight, and the share of each NIC among its links
// by the weights of the NICs on the opposite side.
func sharesOf(ends [][2]int, side int, weight, other func(int) float64) []float64 {
	sum, at := 0.0, map[int]float64{} // of the NICs of the side, and of the opposite NICs of each
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

// split spreads a write over the path by the weights of NICs. The number of parts is the number
// that the receiver expects; a part of 0 bytes still delivers its immediate. If every NIC of the
// path has weight 0, because the NICs with weights have failed, the shares are equal.
func (l *Link) split(n uint64, own map[string]int, theirs [maxCards]uint16) []piece {
	shape := l.set.shape(l.pairs)
	if own == nil && theirs == [maxCards]uint16{} {
		return l.splitter.split(n, shape, nil)
	}
	var links []int
	for i := 0; i < len(l.pairs); i += shape.perLink {
		links = append(links, l.set.pairs[l.pairs[i]].link)
	}
	return l.splitter.split(n, shape, l.set.weigh(links, own, theirs))
}

// shape returns the shape of a path with these queue pairs.
func (s *QPGroup) shape(pairs []int) pathShape {
	return pathShape{len(pairs) / s.perLink, s.perLink, cmp.Or(s.fabric.config.minPairPart, minPairPart)}
}

// split splits a write of n bytes. weights are the weights of the links; nil for equal weights.
func (w *splitter) split(n uint64, shape pathShape, weights []float64) []piece {
	if len(w.turns) != shape.links || w.perLink != shape.perLink { // a reconnect has changed the path
		w.turns, w.perLink = make([]int, shape.links), shape.perLink
	}
	k, perLink := shape.linksFor(n), shape.pairsFor(n)
	chosen, carries := w.choose(k, shape.links, weights)
	lengths := stripe.Split((n+granule-1)/granule, carries)
	pieces := make([]piece, 0, k*perLink)
	at := uint64(0)
	for i, link := range chosen {
		end := at + min(lengths[i]*granule, n-at)
		each := ((end-at+uint64(perLink)-1)/uint64(perLink) + granule - 1) / granule * granule
		if perLink == shape.perLink {
			w.turns[link] = 0 // the NIC gets the parts in the order of the bytes
		}
		for range perLink {
			length := min(each, end-at)
			pieces = append(pieces, piece{link*shape.perLink + w.turns[link], at, length})
			w.turns[link] = (w.turns[link] + 1) % shape.perLink
			at += length
		}
	}
	return pieces
}

// choose returns k of the links, and the weight of each.
func (w *splitter) choose(k, links int, weights []float64) (chosen []int, carries []float64) {
	alike := true
	for _, weight := range weights {
		alike = alike && weight == weights[0]
	}
	if alike || total(weights) == 0 {
		for range k {
			if k < links {
				chosen = append(chosen, w.turn%links)
				w.turn++
			} else {
				chosen = append(chosen, len(chosen))
			}
			carries = append(carries, 1)
		}
		return chosen, carries
	}
	if k == links {
		for i := range links {
			chosen = append(chosen, i)
		}
		return chosen, weights
	}
	w.deal(weights)
	taken := make([]bool, links)
	for range k {
		i := w.dealer.Next(func(i int) bool { return !taken[i] })
		for at := 0; i < 0; at++ { // fewer links have a weight than the write has parts
			if !taken[at] {
				i = at
			}
		}
		taken[i] = true
		chosen, carries = append(chosen, i), append(carries, weights[i])
	}
	if total(carries) == 0 {
		for i := range carries {
			carries[i] = 1
		}
	}
	return chosen, carries
}

func total(weights []float64) (sum float64) {
	for _, w := range weights {
		sum += w
	}
	return sum
}

// turnsOfAll is the number of turns that deal divides by weight.
const turnsOfAll = 1 << 12

// deal creates another scheduler after a change of weights.
func (w *splitter) deal(weights []float64) {
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
