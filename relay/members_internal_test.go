package relay

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/relay/launch"
)

// memberLane is a lane of which half is direct, a third staged on a GPU and a sixth in host memory.
func memberLane() *lane {
	return &lane{spec: launch.Lane{
		GPU: launch.GPU{BusID: "0000:01:00.0"}, Servers: []launch.GPU{{BusID: "0000:02:00.0"}},
		NICs: []string{"mlx5_0", "mlx5_1"}, Direct: true, Relay: true,
		Members: []launch.Member{
			{Server: "0000:01:00.0", NIC: "mlx5_0", Weight: 3},
			{Server: "0000:02:00.0", NIC: "mlx5_0", Weight: 1}, {Server: "0000:02:00.0", NIC: "mlx5_1", Weight: 1},
			{NIC: "mlx5_1", Weight: 1},
		},
	}}
}

func TestLaneWithMembersSharesSlotsAndNICs(t *testing.T) {
	l := memberLane()
	if on, host := l.slotsOn("0000:02:00.0", 8), l.slotsOn("", 8); on != 6 || host != 3 {
		t.Errorf("of 8 slots %d are on the server and %d in the host's memory, want 6 and 3", on, host)
	}
	for server, want := range map[string]map[string]int{
		"0000:01:00.0": {"mlx5_0": 3}, "0000:02:00.0": {"mlx5_0": 1, "mlx5_1": 1}, "": {"mlx5_1": 1}, "0000:09:00.0": nil,
	} {
		if diff := cmp.Diff(want, l.nicsOf(server)); diff != "" {
			t.Errorf("the NICs for what is on %q: %s", server, diff)
		}
	}
	if diff := cmp.Diff(map[string]int{"mlx5_0": 1, "mlx5_1": 2}, l.stagedNICs()); diff != "" {
		t.Errorf("the NICs for what goes through slots: %s", diff)
	}
	s := &staging{regions: []*region{{gpu: launch.GPU{BusID: "0000:02:00.0"}}, {},
		{gpu: launch.GPU{BusID: "0000:07:00.0"}}}}
	l.deal(s)
	if s.regions[0].weight != 2 || s.regions[1].weight != 1 || s.regions[2].weight != 1 {
		t.Errorf("regions weigh %d, %d and, on a GPU that stands in, %d", s.regions[0].weight, s.regions[1].weight,
			s.regions[2].weight)
	}
}

func TestLaneWithDirectAndStagedMembersMixesGrants(t *testing.T) {
	m, had := memberLane().mixture(true), map[int]int{}
	for range 600 {
		had[m.Next(nil)]++
	}
	if had[0] != 300 || had[1] != 300 {
		t.Errorf("of 600 grants %d are in place and %d go through slots, want half of each", had[0], had[1])
	}
	l := memberLane()
	l.spec.Members = l.spec.Members[1:]
	if l.mixture(true) != nil {
		t.Error("a lane without a direct member mixes grants")
	}
	l.spec.Members = nil
	if l.mixture(false) != nil || l.slotsOn("0000:02:00.0", 8) != 8 || l.nicsOf("") != nil {
		t.Error("a lane of a supervisor of an earlier release has weights")
	}
}
