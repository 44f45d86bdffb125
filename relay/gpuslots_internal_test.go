package relay

import (
	"slices"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/launch"
)

// A lane has staged on a server GPU for any kind of slots, and not on a GPU without room: a late
// verdict concerns every kind.
func TestLateVerdictConcernsEverySlotKind(t *testing.T) {
	server := func(i int) launch.GPU { return launch.GPU{Index: i} }
	l := &lane{
		placed:      []placed{{gpu: server(1), bytes: 1}, {gpu: server(2)}, {gpu: server(3), bytes: 1, host: true}},
		registered:  gpuSlots{placed: []placed{{gpu: server(4), bytes: 1}, {gpu: server(5)}}},
		serverUsage: []*serverUsage{{gpu: server(6), bytes: 1}, {gpu: server(7)}},
	}
	if got, want := l.stagedOn(), []launch.GPU{server(1), server(4), server(6)}; !slices.Equal(got, want) {
		t.Errorf("%v, and not %v", got, want)
	}
}

// Unregistered slots are tried again after a pause, and at once with different NICs.
func TestUnregisteredSlotsAreTriedAgain(t *testing.T) {
	now := time.Now()
	r := refusedSlots{now, "mlx5_0 (0)", "ENOMEM"}
	for _, c := range []struct {
		what, nics string
		after      time.Duration
		want       string
	}{
		{"at once", "mlx5_0 (0)", 0, "ENOMEM"},
		{"within the pause", "mlx5_0 (0)", fullPause - 1, "ENOMEM"},
		{"after it", "mlx5_0 (0)", fullPause, ""},
		{"of a NIC that was opened anew", "mlx5_0 (1)", 0, ""},
	} {
		if got := r.lately(c.nics, now.Add(c.after)); got != c.want {
			t.Errorf("%s: %q", c.what, got)
		}
	}
	if why := (&refusedSlots{}).lately("", now); why != "" {
		t.Errorf("what was never tried is refused: %q", why)
	}
}
