package testplan

import (
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// UUIDs of the plan's GPUs; no GPU has UUID9.
const (
	UUID0 = "GPU-00000000-0000-0000-0000-000000000000"
	UUID1 = "GPU-11111111-1111-1111-1111-111111111111"
	UUID9 = "GPU-99999999-9999-9999-9999-999999999999"
)

// New returns a plan of a host whose sysfs is at this path.
func New(sysfs string) *planner.Plan {
	return &planner.Plan{
		Version: planner.Version,
		Source:  topo.Source{Kind: topo.SourceSysfs, Sysfs: sysfs},
		GPUs: []topo.GPU{
			{Index: 0, UUID: UUID0, BusID: "0000:17:00.0"},
			{Index: 1, UUID: UUID1, BusID: "0000:2a:00.0", Capability: 90, NVLinks: []topo.NVLink{{Count: 18}}},
			{Index: 2, BusID: "0000:3b:00.0"},
		},
		NICs: []topo.NIC{
			{
				Name:  "mlx5_0",
				BusID: "0000:18:00.0",
				GUID:  "a088:c203:00a1:40e0",
				Ports: []topo.Port{{Number: 1, State: "ACTIVE", RateGbps: 400}},
			},
		},
		Lanes: []planner.Lane{
			{GPU: "0000:17:00.0", Role: planner.RoleNear, NICs: []string{"mlx5_0"}},
			{
				GPU:     "0000:2a:00.0",
				Role:    planner.RoleFar,
				Relay:   true,
				Servers: []string{"0000:17:00.0"},
				NICs:    []string{"mlx5_0"},
			},
			{GPU: "0000:3b:00.0", Role: planner.RoleRefused, Reason: "MIG is on"},
		},
	}
}
