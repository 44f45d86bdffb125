package engine

import "testing"

// The parts of a write become a single copy, in any order, as long as no copy has begun.
func TestMoverMergesPartsInAnyOrder(t *testing.T) {
	const each = 4096
	for _, order := range [][]uint64{{0, 1, 2, 3}, {2, 3, 0, 1}, {3, 1, 2, 0}, {0, 2, 1, 3}} {
		m, from, target := &mover{}, &region{}, &region{}
		other := &work{from: from, target: target, fromAt: 1 << 20, targetAt: 2 << 20, submission: submission{length: each}}
		m.add(other)
		for _, i := range order {
			m.add(&work{from: from, target: target, fromAt: i * each, targetAt: 1<<30 + i*each, submission: submission{length: each}})
		}
		if len(m.waiting) != 2 {
			t.Errorf("order %v: %d copies, want 2", order, len(m.waiting))
			continue
		}
		if j := m.waiting[1]; j.bytes != 4*each || j.fromAt != 0 || j.targetAt != 1<<30 || len(j.works) != 4 {
			t.Errorf("order %v: a copy of %d bytes from %d to %d for %d works", order, j.bytes, j.fromAt, j.targetAt, len(j.works))
		}
	}
}
