package engine

import (
	"slices"
	"testing"
)

// The parts of a write become a single copy, in any order, as long as no copy has begun.
func TestMoverMergesPartsInAnyOrder(t *testing.T) {
	const each = 4096
	for _, order := range [][]uint64{{0, 1, 2, 3}, {2, 3, 0, 1}, {3, 1, 2, 0}, {0, 2, 1, 3}} {
		m, from, target := &mover{}, &region{}, &region{}
		other := &work{from: from, target: target, fromAt: 1 << 20, targetAt: 2 << 20, submission: submission{length: each}}
		m.add(other)
		for _, i := range order {
			m.add(
				&work{from: from, target: target, fromAt: i * each, targetAt: 1<<30 + i*each, submission: submission{length: each}},
			)
		}
		if len(m.waiting) != 2 {
			t.Errorf("order %v: %d copies, want 2", order, len(m.waiting))
			continue
		}
		if j := m.waiting[1]; j.bytes != 4*each || j.fromAt != 0 || j.targetAt != 1<<30 || len(j.works) != 4 {
			t.Errorf(
				"order %v: a copy of %d bytes from %d to %d for %d works",
				order,
				j.bytes,
				j.fromAt,
				j.targetAt,
				len(j.works),
			)
		}
	}
}

// A write that continues a waiting copy does not pass an earlier write of the same bytes, nor a write
// that reads or changes what the other one needs.
func TestMoverKeepsOrderOfOverlappingWrites(t *testing.T) {
	const each = 4096
	memory, slots, other := &region{}, &region{}, &region{}
	type write struct {
		from     *region
		fromAt   uint64
		target   *region
		targetAt uint64
	}
	cases := map[string]struct {
		writes []write
		copies int
		last   int // the copy that has the last write
	}{
		"writes of the same bytes": {[]write{
			{memory, 0, slots, 0}, {other, 0, slots, each}, {memory, each, slots, each},
		}, 3, 2},
		"a write of what the earlier one reads": {[]write{
			{memory, 0, slots, 0}, {slots, each, other, 0}, {memory, each, slots, each},
		}, 3, 2},
		"a read of what the earlier one writes": {[]write{
			{memory, 0, slots, 0}, {other, 0, memory, each}, {memory, each, slots, each},
		}, 3, 2},
		"a chain within one region": {[]write{
			{memory, 0, memory, each}, {memory, each, memory, 2 * each},
		}, 2, 1},
		"a gap closed over a write of the same bytes": {[]write{
			{memory, 0, slots, 0}, {other, 0, slots, 2 * each},
			{memory, 2 * each, slots, 2 * each}, {memory, each, slots, each},
		}, 3, 2},
		"other bytes between": {[]write{
			{memory, 0, slots, 0}, {other, 0, slots, 4 * each}, {memory, each, slots, each},
		}, 2, 0},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			m := &mover{}
			var last *work
			for _, w := range c.writes {
				last = &work{
					from:       w.from,
					target:     w.target,
					fromAt:     w.fromAt,
					targetAt:   w.targetAt,
					submission: submission{length: each},
				}
				m.add(last)
			}
			if len(m.waiting) != c.copies {
				t.Fatalf("%d copies, want %d", len(m.waiting), c.copies)
			}
			if !slices.Contains(m.waiting[c.last].works, last) {
				t.Errorf("copy %d has not the last write", c.last)
			}
		})
	}
}
