package stripe

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// turns are the members that so many turns go to.
func turns(s *Scheduler, n int, ready func(int) bool) (order []int) {
	for range n {
		order = append(order, s.Next(ready))
	}
	return order
}

func TestSchedulerWithWeightsDealsInOrder(t *testing.T) {
	for _, tt := range []struct {
		weights []int
		want    []int
	}{
		{[]int{1}, []int{0, 0, 0}},
		{[]int{1, 1}, []int{0, 1, 0, 1}},
		{[]int{2, 1}, []int{0, 1, 0, 0, 1, 0}},
		{[]int{3, 1}, []int{0, 0, 1, 0, 0, 0, 1, 0}},
		{[]int{0, 5}, []int{1, 1}},
		{[]int{5, 3, 2}, []int{0, 1, 2, 0, 0, 1, 0, 2, 1, 0}},
		{nil, []int{-1}},
		{[]int{0}, []int{-1}},
	} {
		if got := turns(New(tt.weights), len(tt.want), nil); !slices.Equal(got, tt.want) {
			t.Errorf("weights %d: turns %d, want %d", tt.weights, got, tt.want)
		}
	}
}

// However many turns there were, no member is more than two turns from its share.
func TestSchedulerWithAnyWeightsStaysNearTheShares(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		weights, sum := make([]int, 1+r.IntN(16)), 0
		for i := range weights {
			weights[i] = 1 + r.IntN(1024/len(weights))
			sum += weights[i]
		}
		s, had := New(weights), make([]int, len(weights))
		for n := 1; n <= 3*sum; n++ {
			had[s.Next(nil)]++
			for i, w := range weights {
				if off := float64(had[i]) - float64(n)*float64(w)/float64(sum); math.Abs(off) >= 2 {
					t.Fatalf("seed %d, weights %d: after %d turns member %d is %.2f off", seed, weights, n, i, off)
				}
			}
		}
		for i, w := range weights {
			if had[i] != 3*w {
				t.Errorf("seed %d, weights %d: in three rounds member %d had %d turns", seed, weights, i, had[i])
			}
		}
	}
}

func TestSchedulerAfterFailureMovesTheShareToTheOthers(t *testing.T) {
	count := func(s *Scheduler, n int) map[int]int {
		had := map[int]int{}
		for _, i := range turns(s, n, nil) {
			had[i]++
		}
		return had
	}
	s := New([]int{2, 1, 1})
	if had := count(s, 400); had[0] != 200 || had[1] != 100 || had[2] != 100 {
		t.Fatalf("before: %v", had)
	}
	s.Fail(0)
	if had := count(s, 400); had[0] != 0 || had[1] != 200 || had[2] != 200 {
		t.Errorf("after the first has failed: %v", had)
	}
	s.Fail(1)
	if had := count(s, 400); had[2] != 400 {
		t.Errorf("after the second has failed: %v", had)
	}
	s.Fail(2)
	if i := s.Next(nil); i != -1 || !s.Failed(2) {
		t.Errorf("with none left member %d has a turn", i)
	}
	s.restore(0)
	s.restore(2)
	if had := count(s, 300); had[0] != 200 || had[1] != 0 || had[2] != 100 {
		t.Errorf("with the first and the last back: %v", had)
	}
}

// A busy member does not stop the remaining members, and gets the outstanding turns when ready: but
// no more than a few of them.
func TestSchedulerWithBusyMemberOwesItsTurns(t *testing.T) {
	s := New([]int{1, 1})
	busy := func(i int) bool { return i == 1 }
	if got := turns(s, 3, busy); !slices.Equal(got, []int{1, 1, 1}) {
		t.Fatalf("while the first is busy: %d", got)
	}
	if got := turns(s, 6, nil); !slices.Equal(got[:2], []int{0, 0}) {
		t.Errorf("the first has waited, and the turns then are %d", got)
	}
	turns(s, 10_000, busy)
	first := 0
	for _, i := range turns(s, 100, nil) {
		if i == 0 {
			first++
		}
	}
	if first > 50+2*owedMost {
		t.Errorf("after a long wait the first has %d turns of 100", first)
	}
	if i := s.Next(func(int) bool { return false }); i != -1 {
		t.Errorf("no member is ready, and %d has a turn", i)
	}
}

func TestSplitByWeightsCoversAllUnits(t *testing.T) {
	for _, tt := range []struct {
		units   uint64
		weights []float64
		want    string
	}{
		{10, []float64{1, 1}, "[5 5]"}, {10, []float64{2, 1}, "[7 3]"}, {10, []float64{0, 1, 0}, "[0 10 0]"},
		{1, []float64{1, 1}, "[1 0]"}, {0, []float64{1}, "[0]"}, {5, []float64{0, 0}, "[0 0]"}, {7, nil, "[]"},
	} {
		if got := fmt.Sprint(Split(tt.units, tt.weights)); got != tt.want {
			t.Errorf("%d units by %v: %s, want %s", tt.units, tt.weights, got, tt.want)
		}
	}
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 2))
		units, weights, sum := r.Uint64N(1<<24), make([]float64, 1+r.IntN(64)), 0.0
		for i := range weights {
			weights[i] = float64(r.IntN(5)) / 3
			sum += weights[i]
		}
		var all uint64
		for i, part := range Split(units, weights) {
			all += part
			if sum > 0 && math.Abs(float64(part)-weights[i]/sum*float64(units)) > 1.01 {
				t.Errorf("seed %d: part %d of %d by %v is %d", seed, i, units, weights, part)
			}
		}
		if sum > 0 && all != units {
			t.Errorf("seed %d: the parts of %d come to %d", seed, units, all)
		}
	}
}
