package hook

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/hook/config"
	"github.com/peerlane/peerlane/hook/layout"
)

// What a job sets for NCCL is said to have no effect, and what only looks so is not
// repeated.
func TestVariablesOfAJobThatHaveNoEffect(t *testing.T) {
	environment := []string{"NCCL_SOCKET_IFNAME=eth0", "NCCL_IB_\x1b[2J=1", "NCCL_IB_" + strings.Repeat("A", 100) + "=1"}
	if got := ignored(environment); len(got) != 1 || !strings.Contains(got[0], "network.interfaces") {
		t.Errorf("said %q", got)
	}
	for i := range 100 {
		environment = append(environment, fmt.Sprintf("NCCL_IB_%d=1", i))
	}
	if got := ignored(environment); len(got) != mostIgnored+1 {
		t.Errorf("%d sentences", len(got))
	}
}

// What becomes of a relay's network, by what its host has.
func TestWhatARelayHasOfTheNetwork(t *testing.T) {
	loopback := func(c *config.Network) { c.Interfaces = "=lo" }
	for name, c := range map[string]struct {
		mode  os.FileMode // of the key's file; 0 for none
		set   func(*config.Network)
		on    bool
		error bool
		why   string
	}{
		"no key":                       {0, loopback, false, false, "peerlane key generate"},
		"a key":                        {0o600, loopback, true, false, ""},
		"a key, and off":               {0o600, func(c *config.Network) { c.Listen = config.ListenOff }, false, false, "network.listen"},
		"a key that others can read":   {0o644, loopback, false, true, "open to others"},
		"no interface":                 {0o600, func(c *config.Network) { c.Interfaces = "=peerlane-none" }, false, true, "network.interfaces"},
		"no certificate where one is":  {0o600, func(c *config.Network) { c.TLSKey, c.TLSCertificate, c.TLSAuthority = "/none", "/none", "/none" }, false, true, "network.tls_key"},
		"an address that is not there": {0o600, func(c *config.Network) { c.Address = "192.0.2.1" }, true, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			l := layout.New(t.TempDir())
			if err := l.Create(); err != nil {
				t.Fatal(err)
			}
			if c.mode != 0 {
				if err := os.MkdirAll(filepath.Dir(l.ClusterKey()), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(l.ClusterKey(), []byte("a secret"), c.mode); err != nil {
					t.Fatal(err)
				}
			}
			settings := config.Default().Network
			c.set(&settings)
			n, err := newNetworking(l, settings, 1<<20)
			if (err != nil) != c.error || (n.where != nil) != c.on || !strings.Contains(n.why, c.why) {
				t.Fatalf("%+v, %v", n, err)
			}
			if !c.on {
				return
			}
			if n.where.Streams != settings.Streams || n.where.Ports.Count() != 1000 || string(n.secrets.ClusterKey.Bytes()) != "a secret" {
				t.Errorf("%+v", n.where)
			}
		})
	}
}
