package relay

import (
	"testing"

	"github.com/peerlane/peerlane/cuda"
)

// Only a GPU that orders NICs' writes for all others needs no flush before another one reads.
func TestWhoseMemoryIsFlushed(t *testing.T) {
	for _, c := range []struct {
		what     string
		ordering int // CU_GPU_DIRECT_RDMA_WRITES_ORDERING_*
		err      error
		want     bool
	}{
		{"none", 0, nil, true},
		{"the owner", 100, nil, true},
		{"all devices", 200, nil, false},
		{"a driver that does not say", 0, cuda.ErrInvalidValue, true},
	} {
		if got := asksForFlush(c.ordering, c.err); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}
