package registration

import (
	"testing"

	"github.com/peerlane/peerlane/cuda"
)

// TestFlushDependsOnGPUOrdering demands no flush where the GPU orders NICs' writes for the GPU that reads.
func TestFlushDependsOnGPUOrdering(t *testing.T) {
	for _, c := range []struct {
		what          string
		ordering      int // CU_GPU_DIRECT_RDMA_WRITES_ORDERING_*
		err           error
		slots, client bool // flushes of slots, and of a client's memory in place
	}{
		{"none", 0, nil, true, true},
		{"the owner", 100, nil, true, false},
		{"all devices", 200, nil, false, false},
		{"a driver without the attribute", 0, cuda.ErrInvalidValue, true, true},
	} {
		if got := NeedsFlush(c.ordering, c.err, false); got != c.slots {
			t.Errorf("%s: slots are flushed: %v", c.what, got)
		}
		if got := NeedsFlush(c.ordering, c.err, true); got != c.client {
			t.Errorf("%s: a client's memory is flushed: %v", c.what, got)
		}
	}
}
