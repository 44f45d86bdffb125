package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/hook/config"
	"github.com/peerlane/peerlane/topo"
)

func load(t *testing.T, text string) (config.Config, string, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	c, err := config.Load(path)
	return c, path, err
}

func TestMissingFileIsTheDefault(t *testing.T) {
	got, err := config.Load(filepath.Join(t.TempDir(), "config.toml"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(config.Default(), got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestDefaultsAreValid(t *testing.T) {
	got, _, err := load(t, "")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(config.Default(), got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestEveryKey(t *testing.T) {
	got, _, err := load(t, `
[relay]
binary = "/opt/peerlane-relay"
route = "staged"
transport = "loop"
slots = 4
slot_size = "1MiB"
environment = ["PEERLANE_CUDA_LIBRARY=/lib/sim.so", "EMPTY="]
[plan]
gdr_max_path = "PHB"
[[plan.lane]]
gpu = "0"
servers = ["1", "GPU-x"]
nics = ["emulated0"]
[cdi]
tenancy = "multi"
`)
	if err != nil {
		t.Fatal(err)
	}
	want := config.Config{
		Relay: config.Relay{
			Binary: "/opt/peerlane-relay", Route: "staged", Transport: "loop", Slots: 4, SlotSize: 1 << 20,
			Environment: []string{"PEERLANE_CUDA_LIBRARY=/lib/sim.so", "EMPTY="},
		},
		Plan: topo.PlanConfig{
			GDRMaxPath: topo.PHB,
			Lanes:      []topo.Assignment{{GPU: "0", Servers: []string{"1", "GPU-x"}, NICs: []string{"emulated0"}}},
		},
		CDI: config.CDI{Tenancy: "multi"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// An error names the file and the key.
func TestRefused(t *testing.T) {
	for _, test := range []struct{ name, text, says string }{
		{"unknown key", "[relay]\nslotsize = \"1MiB\"", "unknown key relay.slotsize"},
		{"unknown table", "[nic]\nx = 1", "unknown key nic"},
		{"unknown key of a lane", "[[plan.lane]]\ngpu=\"0\"\nserver=[\"1\"]", "unknown key plan.lane.server"},
		{"no TOML", "relay", "line 1"},
		{"wrong type", "[relay]\nslots = \"many\"", "relay.slots"},
		{"relative binary", "[relay]\nbinary = \"relay\"", "relay.binary"},
		{"route", "[relay]\nroute = \"lane\"", `relay.route is "lane"; auto, staged, direct`},
		{"transport", "[relay]\ntransport = \"verbs\"", "relay.transport"},
		{"no slots", "[relay]\nslots = 0", "relay.slots"},
		{"slot size", "[relay]\nslot_size = \"100kB\"", "relay.slot_size"},
		{"no size", "[relay]\nslot_size = \"big\"", `"8MiB"`},
		{"environment", "[relay]\nenvironment = [\"NAME\"]", "relay.environment"},
		{"path type", "[plan]\ngdr_max_path = \"PXX\"", "PXX"},
		{"tenancy", "[cdi]\ntenancy = \"many\"", "cdi.tenancy"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, path, err := load(t, test.text)
			if err == nil || !strings.Contains(err.Error(), test.says) || !strings.Contains(err.Error(), path) {
				t.Errorf("error %v; it should name %s and say %q", err, path, test.says)
			}
		})
	}
}

func TestUnreadableFile(t *testing.T) {
	if _, err := config.Load(t.TempDir()); err == nil {
		t.Error("a directory was read as configuration")
	}
}
