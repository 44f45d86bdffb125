package hostnetwork

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
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
	if fits := LimitAddresses(c); len(fits.Network.Addresses) != 1 {
		t.Errorf("%d addresses", len(fits.Network.Addresses))
	}
	if fits := LimitAddresses(launch.Config{Lanes: c.Lanes}); fits.Network != nil {
		t.Errorf("%+v without a network", fits.Network)
	}
}

func TestFittingKeepsConfigurationOfExactlyADatagram(t *testing.T) {
	c := launch.Config{Network: &launch.Network{Addresses: make([]addresses.Chosen, 2)}}
	c.Lanes = []launch.Lane{{NICs: []string{""}}}
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, c2 := range []struct{ bytes, want int }{{launch.MaxDatagram, 2}, {launch.MaxDatagram + 1, 1}} {
		c.Lanes[0].NICs[0] = strings.Repeat("n", c2.bytes-len(text))
		if fits := LimitAddresses(c); len(fits.Network.Addresses) != c2.want {
			t.Errorf("%d bytes: %d addresses, want %d", c2.bytes, len(fits.Network.Addresses), c2.want)
		}
	}
}

// hostWithKey returns a layout with a cluster key.
func hostWithKey(t *testing.T) paths.Layout {
	t.Helper()
	l := paths.New(t.TempDir())
	secret := bytes.Repeat([]byte{1}, clusterkey.Bytes)
	text := fmt.Appendf(nil, "head\nkey %x 2026-11-27 %s\n", clusterkey.ID(secret),
		base64.StdEncoding.EncodeToString(secret))
	writeFile(t, l.ClusterKey(), text, 0o600)
	return l
}

func writeFile(t *testing.T, path string, text []byte, mode os.FileMode) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, text, mode)); err != nil {
		t.Fatal(err)
	}
}

func TestNewSetsTenantOfNetwork(t *testing.T) {
	c := config.Default().Network
	c.Interfaces, c.TenantAnnotation = "=lo", "team"
	n, err := New(hostWithKey(t), c, "a", nil, 1<<20)
	if err != nil || n.Where == nil || n.Where.Tenant != "a" {
		t.Errorf("%+v, %v", n.Where, err)
	}
}

// An explicit address is a single rail, whatever network.rails names.
func TestNewExplicitAddressHasOneRail(t *testing.T) {
	c := config.Default().Network
	c.Address, c.Rails = "127.0.0.1", []string{"peerlane-none"}
	n, err := New(hostWithKey(t), c, "", nil, 1<<20)
	if err != nil || n.Where == nil || len(n.Where.Addresses) != 1 || n.Where.Addresses[0].Rail != 0 {
		t.Errorf("%+v, %v", n.Where, err)
	}
}

func TestNewReadsEachFileOfCertificates(t *testing.T) {
	const key, certificate, authority = "key", "certificate", "authority"
	for _, c := range []struct {
		name  string
		file  string
		text  string // of file; empty removes it
		mode  os.FileMode
		check func(error) bool // nil for success
	}{
		{"all files", key, key, 0o600, nil},
		{"no key", key, "", 0, isMissing},
		{"a key that others can read", key, key, 0o644, isUntrusted},
		{"no certificate", certificate, "", 0, isMissing},
		{"a certificate that others can write", certificate, certificate, 0o666, isUntrusted},
		{"no authority", authority, "", 0, isMissing},
		{"a certificate above the limit", certificate, strings.Repeat("c", launch.MaxSecret+1), 0o644,
			func(err error) bool { return err != nil }},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, dir := hostWithKey(t), t.TempDir()
			for _, name := range []string{key, certificate, authority} {
				writeFile(t, filepath.Join(dir, name), []byte(name), 0o600)
			}
			path := filepath.Join(dir, c.file)
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if c.text != "" {
				writeFile(t, path, []byte(c.text), 0o600)
				if err := os.Chmod(path, c.mode); err != nil {
					t.Fatal(err)
				}
			}
			settings := config.Default().Network
			settings.Interfaces, settings.TLSKey = "=lo", filepath.Join(dir, key)
			settings.TLSCertificate, settings.TLSAuthority = filepath.Join(dir, certificate), filepath.Join(dir, authority)
			n, err := New(l, settings, "", nil, 1<<20)
			if c.check != nil {
				if !c.check(err) || n.Where != nil {
					t.Errorf("%+v, %v", n.Where, err)
				}
				return
			}
			s := n.Secrets
			if got := [3]string{string(s.CertificateKey.Bytes()), string(s.Certificate.Bytes()),
				string(s.Authority.Bytes())}; err != nil || got != [3]string{key, certificate, authority} {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

func isMissing(err error) bool { return errors.Is(err, fs.ErrNotExist) }

func isUntrusted(err error) bool {
	f, ok := errors.AsType[*fault.Error](err)
	return ok && f.Code == fault.UntrustedFile
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
