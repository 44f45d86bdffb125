package verbs

import "testing"

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
