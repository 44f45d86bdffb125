package registration

import "github.com/peerlane/peerlane/relay/verbs"

// Relays and the self-test of triples decide by these functions how NICs write memory, so that the
// test holds for relays.

// A GPU with at least this CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING reads a NIC's writes
// into the GPU's memory in order; every GPU does with the larger value.
const (
	orderedForOwner = 100
	orderedForAll   = 200
)

// NeedsFlush reports whether a NIC's writes into a GPU's memory need a flush before a GPU reads the
// memory, by the attribute or the error of the query: a driver without the attribute orders
// nothing. ownerReads is whether the GPU that has the memory reads it.
func NeedsFlush(ordering int, err error, ownerReads bool) bool {
	needs := orderedForAll
	if ownerReads {
		needs = orderedForOwner
	}
	return err != nil || ordering < needs
}

// Access returns the rights to memory that NICs write for the remote side (the target), or read.
// The order of writes is free where relaxed is set.
func Access(target, relaxed bool) (a verbs.Access) {
	if target {
		a = verbs.LocalWrite | verbs.RemoteWrite
	}
	if relaxed {
		a |= verbs.RelaxedOrdering
	}
	return a
}
