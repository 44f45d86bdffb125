package launch

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestCheckInvalidConfigurationFails(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Config)
		want   string // in the error; empty for none
	}{
		{"as it should be", func(*Config) {}, ""},
		{"no generation", func(c *Config) { c.Generation = "" }, "generation"},
		{"a generation that leads elsewhere", func(c *Config) { c.Generation = strings.Repeat("../", 10) + "xx" }, "32 hexadecimal digits"},
		{"no lane", func(c *Config) { c.Lanes = nil }, "no lane"},
		{"a route of the future", func(c *Config) { c.Route = "teleport" }, `"teleport"`},
		{"a transport of the future", func(c *Config) { c.Transport = "aether" }, `"aether"`},
		{"RDMA as it comes", func(c *Config) { v := DefaultVerbs; c.Verbs, c.Transport = &v, TransportVerbs }, ""},
		{"RDMA with an odd MTU", func(c *Config) { v := DefaultVerbs; v.MTU = 1500; c.Verbs = &v }, "MTU 1500"},
		{"RDMA with negative queue pairs", func(c *Config) { v := DefaultVerbs; v.QueuePairs = -1; c.Verbs = &v }, "queue pairs"},
		{"RDMA with adaptive routing of the future", func(c *Config) { v := DefaultVerbs; v.AdaptiveRouting = "perhaps"; c.Verbs = &v }, "adaptive routing"},
		{"no slots", func(c *Config) { c.Slots = 0 }, "slots"},
		{"odd slots", func(c *Config) { c.SlotBytes = 64<<10 + 1 }, "64 KiB"},
		{"a NIC without a name", func(c *Config) { c.Lanes[0].NICs = []string{""} }, "RDMA device"},
		{"a NIC that is a directory", func(c *Config) { c.Lanes[0].NICs = []string{".."} }, "RDMA device"},
		{"a NIC that leads elsewhere", func(c *Config) { c.Lanes[0].NICs = []string{"mlx5_0", "../../tmp/x"} }, `"../../tmp/x"`},
	} {
		c := Config{
			Generation: strings.Repeat("0a", 16), Lanes: []Lane{{NICs: []string{"mlx5_0"}}},
			Route: RouteAuto, Transport: TransportAuto, Slots: 8, SlotBytes: 1 << 20,
		}
		tt.change(&c)
		err := c.Check()
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v", tt.name, err)
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
			t.Errorf("scope %q, route %q, network %v: local %v, want %v", c.config.Scope, c.config.Route, c.config.Network != nil, got, c.local)
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
