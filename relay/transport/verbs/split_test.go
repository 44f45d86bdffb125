package verbs

import (
	"math"
	"testing"
)

// TestSplitKeepsPartsAndShares demands adjacent parts of whole granules, except the last part, on
// different queue pairs, in the number that the receiver expects. Each link has the share of its
// weight in the writes of a length.
func TestSplitKeepsPartsAndShares(t *testing.T) {
	for _, perLink := range []int{1, 3, 4} {
		for _, weights := range [][]float64{{1}, {1, 1}, {1, 1, 1}, {3, 1}, {2, 1, 0}, {0, 0, 5, 1}, {0.5, 0.5, 3}, {0, 0},
			{7}} {
			for _, n := range []uint64{1, 129, minLinkPart, minLinkPart + 1, 2*minLinkPart + 1, 64 << 10, 1<<20 + 5, 4<<20 - 1,
				32 << 20} {
				shape := pathShape{len(weights), perLink, minPairPart}
				checkSplit(t, n, shape, weights)
			}
		}
	}
}

func checkSplit(t *testing.T, n uint64, shape pathShape, weights []float64) {
	t.Helper()
	var w splitter
	byLink, byPair, all := make([]uint64, shape.links), make([]uint64, shape.links*shape.perLink), uint64(0)
	for range 400 {
		pieces, used, end := w.split(n, shape, weights), map[int]bool{}, uint64(0)
		if len(pieces) != shape.parts(n) {
			t.Fatalf("%d bytes by %v over %+v have %d parts, and the receiver waits for %d", n, weights, shape, len(pieces),
				shape.parts(n))
		}
		for _, p := range pieces {
			if p.at != end || p.at%granule != 0 && p.length > 0 || used[p.pair] {
				t.Fatalf("%d bytes by %v over %+v: parts %v", n, weights, shape, pieces)
			}
			used[p.pair] = true
			end += p.length
			byLink[p.pair/shape.perLink] += p.length
			byPair[p.pair] += p.length
			all += p.length
		}
		if end != n {
			t.Fatalf("%d bytes by %v over %+v: the parts have %d", n, weights, shape, end)
		}
	}
	k, sum := shape.linksFor(n), total(weights)
	if k > 1 && (k < shape.links || n < uint64(shape.links)*64*granule) {
		return // parts of different lengths, or of few granules
	}
	for i, weight := range weights {
		want := 1 / float64(shape.links)
		if sum > 0 {
			want = weight / sum
		}
		if off := float64(byLink[i])/float64(all) - want; off > 0.02 || off < -0.02 {
			t.Errorf("%d bytes by %v over %+v: link %d has carried %.3f of all, want %.3f", n, weights, shape, i,
				float64(byLink[i])/float64(all), want)
		}
		for _, got := range byPair[i*shape.perLink : (i+1)*shape.perLink] {
			share := float64(byLink[i]) / float64(shape.perLink)
			if off := float64(got) - share; off > 0.05*share+2*float64(n) || off < -0.05*share-2*float64(n) {
				t.Errorf("%d bytes by %v over %+v: the pairs of link %d have carried %v", n, weights, shape, i, byPair)
			}
		}
	}
}

// TestWriteOfAMiBHasOnePartForEachLink demands one part for each link in a write of a MiB, and the
// next queue pair for the next write: each part costs a work request, a completion and a receive.
func TestWriteOfAMiBHasOnePartForEachLink(t *testing.T) {
	var w splitter
	for i := range 8 {
		if pieces := w.split(1<<20, pathShape{1, 4, minPairPart}, nil); len(pieces) != 1 ||
			pieces[0] != (piece{i % 4, 0, 1 << 20}) {
			t.Fatalf("write %d: parts %v", i, pieces)
		}
	}
	if pieces := w.split(1<<20, pathShape{2, 4, minPairPart}, nil); len(pieces) != 2 || pieces[0].length != 512<<10 {
		t.Errorf("over two links: parts %v", pieces)
	}
	if n := (pathShape{1, 4, minPairPart}).parts(16 << 20); n != 4 {
		t.Errorf("a write of 16 MiB has %d parts, want one for each queue pair", n)
	}
}

// TestSplitAfterReconnectUsesExistingQueuePairs demands that no part uses a missing queue pair
// after a reconnect with fewer queue pairs.
func TestSplitAfterReconnectUsesExistingQueuePairs(t *testing.T) {
	var w splitter
	for range 3 {
		w.split(1<<20, pathShape{1, 4, minPairPart}, nil)
	}
	for i := range 4 {
		if pieces := w.split(1<<20, pathShape{1, 2, minPairPart}, nil); pieces[0].pair != i%2 {
			t.Errorf("write %d goes to queue pair %d of 2", i, pieces[0].pair)
		}
	}
}

// TestWeightsOfBothSidesShareQueuePairs demands that the weights of both sides' NICs divide a
// write, also if some links have no weight and if the sides conflict.
func TestWeightsOfBothSidesShareQueuePairs(t *testing.T) {
	by := func(w []float64) func(int) float64 { return func(i int) float64 { return w[i] } }
	for _, c := range []struct {
		name        string
		ends        [][2]int // NIC of this side, NIC of the peer
		own, theirs []float64
		want        []float64 // ratios
	}{
		{"no weights", [][2]int{{0, 0}, {1, 1}}, nil, nil, []float64{1, 1}},
		{"own ones, two queue pairs a link", [][2]int{{0, 0}, {0, 0}, {1, 1}, {1, 1}}, []float64{3, 1}, nil,
			[]float64{3, 3, 1, 1}},
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
