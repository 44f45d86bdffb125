package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

func TestCheckInvalidConfigurationFails(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Config)
		want   *ValueError // nil for success
	}{
		{"as it should be", func(*Config) {}, nil},
		{"no generation", func(c *Config) { c.Generation = "" }, &ValueError{"generation", "", "32 hexadecimal digits"}},
		{"a generation that leads elsewhere", func(c *Config) { c.Generation = strings.Repeat("../", 10) + "xx" },
			&ValueError{"generation", strings.Repeat("../", 10) + "xx", "32 hexadecimal digits"}},
		{"no lane", func(c *Config) { c.Lanes = nil }, &ValueError{"lanes", 0, "at least 1"}},
		{"a route of the future", func(c *Config) { c.Route = "teleport" }, &ValueError{"route", "teleport",
			"auto, staged, direct"}},
		{"a transport of the future", func(c *Config) { c.Transport = "aether" },
			&ValueError{"transport", "aether", "auto, local, tcp, verbs"}},
		{"RDMA as it comes", func(c *Config) { v := DefaultVerbs; c.Verbs, c.Transport = &v, TransportVerbs }, nil},
		{"RDMA with an odd MTU", func(c *Config) { v := DefaultVerbs; v.MTU = 1500; c.Verbs = &v },
			&ValueError{"MTU of RDMA", 1500, "0, 256, 512, 1024, 2048, 4096"}},
		{"RDMA with negative queue pairs", func(c *Config) { v := DefaultVerbs; v.QueuePairs = -1; c.Verbs = &v },
			&ValueError{"number of queue pairs of RDMA", -1, fmt.Sprintf("0 to %d", MaxQueuePairs)}},
		{"RDMA with adaptive routing of the future", func(c *Config) {
			v := DefaultVerbs
			v.AdaptiveRouting = "perhaps"
			c.Verbs = &v
		},
			&ValueError{"adaptive routing of RDMA", "perhaps", "auto, on, off"}},
		{"no slots", func(c *Config) { c.Slots = 0 }, &ValueError{"slots", 0, "1 to 1024"}},
		{"odd slots", func(c *Config) { c.SlotBytes = 64<<10 + 1 },
			&ValueError{"slot size", uint64(64<<10 + 1), "a multiple of 64 KiB up to 1 GiB"}},
		{"a NIC without a name", func(c *Config) { c.Lanes[0].NICs = []string{""} }, &ValueError{"RDMA device", "", ""}},
		{"a NIC that is a directory", func(c *Config) { c.Lanes[0].NICs = []string{".."} }, &ValueError{"RDMA device", "..",
			""}},
		{"a NIC that leads elsewhere", func(c *Config) { c.Lanes[0].NICs = []string{"mlx5_0", "../../tmp/x"} },
			&ValueError{"RDMA device", "../../tmp/x", ""}},
	} {
		c := Config{
			Generation: strings.Repeat("0a", 16), Lanes: []Lane{{NICs: []string{"mlx5_0"}}},
			Route: RouteAuto, Transport: TransportAuto, Slots: 8, SlotBytes: 1 << 20,
		}
		tt.change(&c)
		err := c.Check()
		if got, _ := errors.AsType[*ValueError](err); (err == nil) != (tt.want == nil) || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
	}
}

// Clients are told the rate of the GPU's links only where no message can leave the host.
func TestScopeAutoWithoutNetworkIsLocal(t *testing.T) {
	network := &Network{}
	for _, c := range []struct {
		config Config
		local  bool
	}{
		{Config{}, false}, // of a supervisor of an earlier release
		{Config{Scope: ScopeCluster}, false},
		{Config{Scope: ScopeHost, Network: network}, true},
		{Config{Scope: ScopeAuto}, true},
		{Config{Scope: ScopeAuto, Route: RouteDirect}, true},
		{Config{Scope: ScopeAuto, Route: RouteStaged}, false},
		{Config{Scope: ScopeAuto, Network: network}, false},
	} {
		if got := c.config.Local(); got != c.local {
			t.Errorf(
				"scope %q, route %q, network %v: local %v, want %v",
				c.config.Scope,
				c.config.Route,
				c.config.Network != nil,
				got,
				c.local,
			)
		}
	}
}

func TestVerbsOfEarlierSupervisorHasDefaults(t *testing.T) {
	var c Config
	if err := json.Unmarshal([]byte(`{"verbs":{"timeout":18,"retries":0}}`), &c); err != nil {
		t.Fatal(err)
	}
	want := DefaultVerbs
	want.Timeout, want.Retries = 18, 0
	if *c.Verbs != want {
		t.Errorf("%+v, want %+v", *c.Verbs, want)
	}
	if err := c.Verbs.Check(); err != nil {
		t.Error(err)
	}
}
