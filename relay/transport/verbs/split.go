package verbs

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
