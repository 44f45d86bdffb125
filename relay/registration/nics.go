package registration

import "github.com/peerlane/peerlane/relay/verbs"

// Relays and the self-test of triples decide by these functions how NICs write memory, so that the
// test holds for relays.

// A GPU whose CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING is at least so much sees a NIC's
// writes into its memory in their order; all GPUs do with the larger value.
const (
	orderedForOwner = 100
	orderedForAll   = 200
)

// NeedsFlush reports whether a NIC's writes into a GPU's memory need a flush before a GPU reads them,
// by the attribute or the error of its query: a driver without it orders nothing. ownerReads is
// whether the GPU that has the memory reads it.
func NeedsFlush(ordering int, err error, ownerReads bool) bool {
	needs := orderedForAll
	if ownerReads {
		needs = orderedForOwner
	}
	return err != nil || ordering < needs
}

// Access returns the rights to memory that NICs write for the other side, the target, or read. The
// order of writes is free where relaxed is set.
func Access(target, relaxed bool) (a verbs.Access) {
	if target {
		a = verbs.LocalWrite | verbs.RemoteWrite
	}
	if relaxed {
		a |= verbs.RelaxedOrdering
	}
	return a
}
