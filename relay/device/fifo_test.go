package device

import "testing"

func TestFifoGrowthKeepsOrder(t *testing.T) {
	var f fifo[int]
	next, expected := 0, 0
	for round := range 200 {
		for range round % 23 {
			f.push(next)
			next++
		}
		for range min(f.len(), round%19) {
			if got := f.pop(); got != expected {
				t.Fatalf("%d came out, want %d", got, expected)
			}
			expected++
		}
		if f.len() != next-expected {
			t.Fatalf("%d are in it, want %d", f.len(), next-expected)
		}
	}
	if grown := len(f.list); testing.AllocsPerRun(100, func() { f.push(1); f.pop() }) != 0 || len(f.list) != grown {
		t.Error("what has grown allocates again")
	}
}
