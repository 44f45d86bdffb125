package hostnetwork

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/launch"
	addresses "github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/network/clusterkey"
)

func TestShortCutsAtWholeCharacter(t *testing.T) {
	const note = "… (the log has the whole)"
	for _, c := range []struct{ name, why, want string }{
		{"at the limit", strings.Repeat("a", maxReason), strings.Repeat("a", maxReason)},
		{"above the limit", strings.Repeat("a", maxReason+1), strings.Repeat("a", maxReason) + note},
		{"within a character", strings.Repeat("a", maxReason-1) + "é", strings.Repeat("a", maxReason-1) + note},
	} {
		if got := short(c.why); got != c.want {
			t.Errorf("%s: %d bytes, want %d", c.name, len(got), len(c.want))
		}
	}
}

func TestInterfaceOfAddressIgnoresZone(t *testing.T) {
	all := []addresses.Interface{
		{Name: "eth0", Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fe80::1")}},
		{Name: "eth1", Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.2")}},
	}
	for at, want := range map[string]string{
		"10.0.0.1": "eth0", "10.0.0.2": "eth1", "fe80::1%eth0": "eth0", "10.0.0.3": "",
	} {
		if got := interfaceOf(all, netip.MustParseAddr(at)); got != want {
			t.Errorf("%s: %q, want %q", at, got, want)
		}
	}
	n, err := whereOf(all, config.Network{Address: "10.0.0.2", Ports: "20000-20009", Streams: 3}, 5)
	if err != nil || len(n.Addresses) != 1 || n.Addresses[0].Interface != "eth1" || n.Streams != 3 || n.Memory != 5 {
		t.Errorf("%+v, %v", n, err)
	}
}

func TestKeyOfTenantDiffersFromClusterKey(t *testing.T) {
	secret := bytes.Repeat([]byte{1}, clusterkey.Bytes)
	text := fmt.Appendf(nil, "head\nkey %x 2026-11-27 %s\n", clusterkey.ID(secret),
		base64.StdEncoding.EncodeToString(secret))
	for _, c := range []struct {
		name, annotation, tenant string
		key, fails               bool // key: the cluster key itself
	}{
		{"no tenants", "", "a", true, false},
		{"a tenant", "team", "a", false, false},
		{"no annotation", "team", "", false, true},
		{"a name that no tenant has", "team", "a b", false, true},
	} {
		var n Networking
		err := n.Key(text, config.Network{TenantAnnotation: c.annotation}, c.tenant)
		if (err != nil) != c.fails || string(n.File) != string(text) {
			t.Errorf("%s: %v", c.name, err)
		}
		if key := n.Secrets.ClusterKey.Bytes(); (string(key) == string(text)) != c.key || (len(key) == 0) != c.fails {
			t.Errorf("%s: a key of %d bytes", c.name, len(key))
		}
	}
}

func TestIgnoredVariablesLongNameIsSkipped(t *testing.T) {
	long := "NCCL_IB_" + strings.Repeat("A", 64-len("NCCL_IB_"))
	for name, want := range map[string]int{long: 1, long + "A": 0, "NCCL_IB_a": 0} {
		if got := IgnoredVariables([]string{name + "=1"}); len(got) != want {
			t.Errorf("%s: %q", name, got)
		}
	}
}

func TestFittingLargeAddressKeepsOne(t *testing.T) {
	c := launch.Config{Network: &launch.Network{Addresses: make([]addresses.Chosen, 2)}}
	c.Lanes = []launch.Lane{{NICs: []string{strings.Repeat("n", launch.MaxDatagram)}}}
	if fits := Fitting(c); len(fits.Network.Addresses) != 1 {
		t.Errorf("%d addresses", len(fits.Network.Addresses))
	}
	if fits := Fitting(launch.Config{Lanes: c.Lanes}); fits.Network != nil {
		t.Errorf("%+v without a network", fits.Network)
	}
}

func TestKeyFileOfConfigurationReplacesDefault(t *testing.T) {
	l := paths.New("/r")
	if got := KeyFile(l, config.Network{}); got != l.ClusterKey() {
		t.Errorf("%s", got)
	}
	if got := KeyFile(l, config.Network{Key: "/k"}); got != "/k" {
		t.Errorf("%s", got)
	}
}
