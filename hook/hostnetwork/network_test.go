package hostnetwork

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/launch"
	addresses "github.com/peerlane/peerlane/relay/network/address"
)

// The warning names the variables of NCCL without effect, and repeats no other variable.
func TestIgnoredVariablesListsVariablesOfNCCL(t *testing.T) {
	environment := []string{
		"NCCL_SOCKET_IFNAME=eth0",
		"NCCL_IB_\x1b[2J=1",
		"NCCL_IB_" + strings.Repeat("A", 100) + "=1",
	}
	if got := IgnoredVariables(environment); len(got) != 1 || !strings.Contains(got[0], "network.interfaces") {
		t.Errorf("said %q", got)
	}
	for i := range 100 {
		environment = append(environment, fmt.Sprintf("NCCL_IB_%d=1", i))
	}
	if got := IgnoredVariables(environment); len(got) != maxIgnored+1 {
		t.Errorf("%d sentences", len(got))
	}
}

// New follows the configuration and the secrets of the host.
func TestNetworkingFollowsConfigurationAndSecrets(t *testing.T) {
	loopback := func(c *config.Network) { c.Interfaces = "=lo" }
	for name, c := range map[string]struct {
		// mode is the mode of the key's file; 0 for no file.
		mode  os.FileMode
		set   func(*config.Network)
		on    bool
		error bool
		why   string
	}{
		"no key": {0, loopback, false, false, "peerlane key generate"},
		"a key":  {0o600, loopback, true, false, ""},
		"a key, and off": {0o600, func(c *config.Network) { c.Listen = config.ListenOff }, false, false,
			"network.listen"},
		"a key that others can read": {0o644, loopback, false, true, "users other than its owner"},
		"no interface": {0o600, func(c *config.Network) { c.Interfaces = "=peerlane-none" }, false, true,
			"network.interfaces"},
		"no certificate where one is": {0o600, func(c *config.Network) {
			c.TLSKey, c.TLSCertificate,
				c.TLSAuthority = "/none", "/none", "/none"
		}, false, true, "network.tls_key"},
		"what a relay refuses": {0o600, func(c *config.Network) { c.Interfaces, c.Streams = "=lo", 0 }, false, true,
			"streams"},
		"an address that is not there": {0o600, func(c *config.Network) { c.Address = "192.0.2.1" }, true, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			l := paths.New(t.TempDir())
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
			n, err := New(l, settings, "", nil, 1<<20)
			if (err != nil) != c.error || (n.Where != nil) != c.on || !strings.Contains(n.Why, c.why) {
				t.Fatalf("%+v, %v", n, err)
			}
			if !c.on {
				return
			}
			if n.Where.Streams != settings.Streams || n.Where.Ports.Count() != 1000 ||
				string(n.Secrets.ClusterKey.Bytes()) != "a secret" {
				t.Errorf("%+v", n.Where)
			}
		})
	}
}

// A relay gets the best addresses of a host, limited in number and by the datagram of the
// configuration.
func TestFittingKeepsBestAddresses(t *testing.T) {
	var all []addresses.Interface
	for i := range 10 {
		one := addresses.Interface{Name: fmt.Sprintf("interface%06d", i), Up: true}
		for k := range 100 {
			one.Addresses = append(
				one.Addresses,
				netip.MustParseAddr(fmt.Sprintf("2001:db8:1234:5678:9abc:def0:%x:%x", i+0x1000, k+0x1000)),
			)
		}
		all = append(all, one)
	}
	settings := config.Default().Network
	n, err := whereOf(all, settings, 1<<20)
	if err == nil {
		err = n.Check()
	}
	if err != nil || len(n.Addresses) != launch.MaxAddresses || n.Addresses[0].Address != all[0].Addresses[0] {
		t.Fatalf("%d addresses, %v", len(n.Addresses), err)
	}
	small := LimitAddresses(launch.Config{Network: n})
	if len(small.Network.Addresses) != launch.MaxAddresses {
		t.Errorf("%d addresses where there is room for all", len(small.Network.Addresses))
	}
	large := launch.Config{Network: n}
	for len(large.Lanes) < 30 {
		large.Lanes = append(large.Lanes, launch.Lane{NICs: []string{strings.Repeat("n", 1800)}})
	}
	fits := LimitAddresses(large)
	text, err := json.Marshal(fits)
	if err != nil || len(text) > launch.MaxDatagram || len(fits.Network.Addresses) < 16 ||
		fits.Network.Addresses[0] != n.Addresses[0] {
		t.Errorf("%d addresses and %d bytes, %v", len(fits.Network.Addresses), len(text), err)
	}
	if len(n.Addresses) != launch.MaxAddresses {
		t.Error("Fitting changed the addresses of its argument")
	}

	// The reason for a failure is limited too.
	settings.Interfaces = "=" + strings.Repeat("x", 15)
	for i := range 2000 {
		all = append(all, addresses.Interface{Name: fmt.Sprintf("veth%08x", i), Up: true})
	}
	_, err = whereOf(all, settings, 1<<20)
	if err == nil || len(err.Error()) <= launch.MaxDatagram {
		t.Fatalf("the reason is too short for this test: %v", err)
	}
	if why := short(err.Error()); len(why) > maxReason+64 || !strings.Contains(why, "no network interface") {
		t.Errorf("%d bytes: %s", len(why), why)
	}
}
