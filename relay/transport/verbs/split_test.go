package verbs

import (
	"math"
	"testing"
)

// Whatever the length, the parts lie side by side, are of whole granules but for the last,
// are each on a pair of its own, and are as many as the receiver expects.
func TestAWriteIsSplit(t *testing.T) {
	for _, pairs := range []int{1, 2, 3, 7, 8, 64} {
		for _, n := range []uint64{0, 1, 127, 128, 129, leastPart - 1, leastPart, leastPart + 1, 2*leastPart + 1, 256<<10 - 1, 4 << 20, 4<<20 + 5, 1 << 30, 1<<30 + 77} {
			count := parts(n, pairs)
			if count < 1 || count > pairs {
				t.Fatalf("%d bytes over %d pairs have %d parts", n, pairs, count)
			}
			if n >= uint64(pairs)*leastPart && n >= uint64(pairs*pairs)*granule && count != pairs {
				t.Errorf("%d bytes over %d pairs have %d parts: some carry nothing", n, pairs, count)
			}
			end, used := uint64(0), map[int]bool{}
			for i := range count {
				at, length := part(n, pairs, i)
				if at != end || at%granule != 0 || length == 0 && n > 0 || i < count-1 && (length%granule != 0 || length < leastPart) {
					t.Fatalf("%d bytes over %d pairs: part %d has %d bytes at %d, after %d", n, pairs, i, length, at, end)
				}
				end = at + length
				used[pairOf(4294967290, i, pairs)] = true
			}
			if end != n || len(used) != count {
				t.Errorf("%d bytes over %d pairs: %d parts on %d pairs have %d bytes", n, pairs, count, len(used), end)
			}
		}
	}
	if pairOf(7, 0, 4) == pairOf(8, 0, 4) {
		t.Error("two short writes one after the other are on one pair")
	}
}

// By weights, too, the parts lie side by side and are as many as the receiver expects, each on
// a pair of its own; and each pair has its weight's share of the bytes, of long writes and of
// short ones.
func TestSplitByWeightsKeepsPartsAndShares(t *testing.T) {
	for _, weights := range [][]float64{{1, 1}, {3, 1}, {2, 1, 0}, {0, 0, 5, 1}, {0.5, 0.5, 3}, {0, 0}, {7}} {
		for _, n := range []uint64{1, 129, leastPart, leastPart + 1, 2*leastPart + 1, 64 << 10, 1<<20 + 5, 32 << 20} {
			var w shortWrites
			sent, all := make([]uint64, len(weights)), uint64(0)
			const writes = 400
			for ticket := range uint32(writes) {
				pieces, used, end := w.split(n, ticket, weights), map[int]bool{}, uint64(0)
				if len(pieces) != parts(n, len(weights)) {
					t.Fatalf("%d bytes by %v have %d parts, and the receiver waits for %d", n, weights, len(pieces), parts(n, len(weights)))
				}
				for _, p := range pieces {
					if p.at != end || p.at%granule != 0 && p.length > 0 || used[p.pair] {
						t.Fatalf("%d bytes by %v: parts %v", n, weights, pieces)
					}
					used[p.pair] = true
					end += p.length
					sent[p.pair] += p.length
					all += p.length
				}
				if end != n {
					t.Fatalf("%d bytes by %v: the parts have %d", n, weights, end)
				}
			}
			sum := total(weights)
			if sum == 0 || parts(n, len(weights)) > 1 && parts(n, len(weights)) < len(weights) || n < uint64(len(weights))*64*granule && parts(n, len(weights)) > 1 {
				continue // parts of different lengths, or of few granules
			}
			for i, weight := range weights {
				if off := float64(sent[i])/float64(all) - weight/sum; off > 0.02 || off < -0.02 {
					t.Errorf("%d bytes by %v: pair %d has carried %.3f of all, want %.3f", n, weights, i, float64(sent[i])/float64(all), weight/sum)
				}
			}
		}
	}
}

// The weights of both sides' NICs share a write: of links that have one, and of links in conflict.
func TestWeightsOfBothSidesShareQueuePairs(t *testing.T) {
	by := func(w []float64) func(int) float64 { return func(i int) float64 { return w[i] } }
	for _, c := range []struct {
		name        string
		ends        [][2]int // NIC of this side, NIC of the other side
		own, theirs []float64
		want        []float64 // ratios
	}{
		{"no weights", [][2]int{{0, 0}, {1, 1}}, nil, nil, []float64{1, 1}},
		{"own ones, two queue pairs a link", [][2]int{{0, 0}, {0, 0}, {1, 1}, {1, 1}}, []float64{3, 1}, nil, []float64{3, 3, 1, 1}},
		{"the other side's", [][2]int{{0, 0}, {1, 1}}, nil, []float64{1, 4}, []float64{1, 4}},
		{"equal ones of both", [][2]int{{0, 0}, {1, 1}}, []float64{3, 1}, []float64{3, 1}, []float64{3, 1}},
		{"one NIC here, two there", [][2]int{{0, 0}, {0, 1}}, []float64{5}, []float64{3, 1}, []float64{3, 1}},
		{"two NICs here, one there", [][2]int{{0, 0}, {1, 0}}, []float64{1, 2}, []float64{7}, []float64{1, 2}},
		{"a NIC without a share there", [][2]int{{0, 0}, {1, 1}}, []float64{1, 1}, []float64{0, 2}, []float64{0, 1}},
		{"different ones: the lesser", [][2]int{{0, 0}, {1, 1}}, []float64{3, 1}, []float64{1, 1}, []float64{2, 1}},
		{"none in common", [][2]int{{0, 0}, {1, 1}}, []float64{1, 0}, []float64{0, 1}, []float64{0, 0}},
	} {
		got := weighEnds(c.ends, by(c.own), c.own != nil, by(c.theirs), c.theirs != nil)
		sum, want := total(got), total(c.want)
		for i := range c.want {
			if sum == 0 && want > 0 || sum > 0 && math.Abs(got[i]/sum-c.want[i]/want) > 1e-9 || want == 0 && got[i] != 0 {
				t.Errorf("%s: shares %v, want %v", c.name, got, c.want)
				break
			}
		}
	}
}
