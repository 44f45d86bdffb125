package relay

import (
	"slices"
	"testing"

	"github.com/peerlane/peerlane/relay/launch"
)

// A lane has staged on a server GPU whatever its slots there are made of, and on none that
// had no room: a verdict that comes late is about all of them.
func TestWhereALaneHasStaged(t *testing.T) {
	server := func(i int) launch.GPU { return launch.GPU{Index: i} }
	l := &lane{
		placed:     []placed{{gpu: server(1), bytes: 1}, {gpu: server(2)}, {gpu: server(3), bytes: 1, host: true}},
		registered: gpuSlots{placed: []placed{{gpu: server(4), bytes: 1}, {gpu: server(5)}}},
		served:     []*served{{gpu: server(6), bytes: 1}, {gpu: server(7)}},
	}
	if got, want := l.stagedOn(), []launch.GPU{server(1), server(4), server(6)}; !slices.Equal(got, want) {
		t.Errorf("%v, and not %v", got, want)
	}
}
