package hook

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/launch"
	addresses "github.com/peerlane/peerlane/relay/network/address"
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
	if got := ignored(environment); len(got) != maxIgnored+1 {
		t.Errorf("%d sentences", len(got))
	}
}

// A relay that is on the network is told of a key that has changed, and of no other.
func TestARelayIsToldOfAChangedKey(t *testing.T) {
	l := paths.New(t.TempDir())
	if err := l.Create(); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(l.ClusterKey()), 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(key string) {
		t.Helper()
		if err := os.WriteFile(l.ClusterKey(), []byte(key), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("old")
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[1])
	file := os.NewFile(uintptr(fds[0]), "relay")
	conn, err := net.FileConn(file)
	if err != nil {
		t.Fatal(err)
	}
	file.Close()
	defer conn.Close()
	settings := config.Default().Network
	settings.Interfaces = "=lo"
	s := &supervisor{layout: l, log: logrus.NewEntry(logrus.New()), generation: &Generation{Network: settings}, relay: &relay{control: conn.(*net.UnixConn), overdue: time.NewTimer(time.Hour)}}
	defer s.relay.overdue.Stop()
	s.log.Logger.SetOutput(io.Discard)
	s.goOnNetwork()
	told := func() string {
		t.Helper()
		text := make([]byte, launch.MaxDatagram)
		n, err := unix.Read(fds[1], text)
		if err == unix.EAGAIN {
			return ""
		}
		var r launch.Request
		if err == nil {
			err = json.Unmarshal(text[:n], &r)
		}
		if err != nil || r.Request != launch.RequestSecrets || r.Secrets == nil {
			t.Fatalf("told %s, %v", text[:n], err)
		}
		return string(r.Secrets.ClusterKey.Bytes())
	}
	refuses := launch.Status{Error: "it makes no sense"}
	takes := launch.Status{OK: true}
	remove := func() {
		t.Helper()
		if err := os.Remove(l.ClusterKey()); err != nil {
			t.Fatal(err)
		}
	}
	lost := func() {
		heard := s.relay.control
		s.relay.control = &net.UnixConn{} // which sends nothing
		s.lookAtKey()
		s.relay.control = heard
	}
	s.tellSecrets()
	if got := told(); got != "old" {
		t.Fatalf("at its start it is told %q", got)
	}
	for _, step := range []struct {
		what string
		do   func()
		want string // that it is told then; empty for nothing
	}{
		{"before it has answered", func() { write("new") }, ""},
		{"a new key", func() { s.answered(takes) }, "new"},
		{"the key that it has", func() { s.answered(takes) }, ""},
		{"another key", func() { write("newer") }, "newer"},
		{"a key that it has just refused", func() { s.answered(refuses) }, ""},
		{"one that it refused a while ago", func() { s.relay.tellAgain = time.Now() }, "newer"},
		{"one that was changed since it refused", func() { s.answered(refuses); write("newest") }, "newest"},
		{"the one before again", func() { s.answered(refuses); write("new") }, "new"},
		{"a key that is gone", func() { s.answered(takes); remove() }, ""},
		{"and is there again", func() { write("new") }, ""},
		{"a key that could not be sent", func() { write("late"); lost() }, "late"},
	} {
		step.do()
		s.lookAtKey()
		if got := told(); got != step.want {
			t.Errorf("%s: it is told %q, want %q", step.what, got, step.want)
		}
	}
}

// What is wrong with the key is said once, and again when it was right in between.
func TestComplaintsOfAKey(t *testing.T) {
	var log bytes.Buffer
	s := &supervisor{log: logrus.NewEntry(logrus.New()), relay: &relay{}}
	s.log.Logger.SetOutput(&log)
	for range 3 {
		s.toldSecrets(launch.Status{Error: "peerlane-test"})
	}
	s.toldSecrets(launch.Status{OK: true})
	s.toldSecrets(launch.Status{Error: "peerlane-test"})
	if n := strings.Count(log.String(), "peerlane-test"); n != 2 {
		t.Errorf("said %d times: %s", n, &log)
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
		"what a relay refuses":         {0o600, func(c *config.Network) { c.Interfaces, c.Streams = "=lo", 0 }, false, true, "streams"},
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
			n, err := newNetworking(l, settings, "", nil, 1<<20)
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

// On a host with more addresses than a relay takes it has the best of them, and as many
// as its configuration has room for.
func TestAHostWithManyAddresses(t *testing.T) {
	var all []addresses.Interface
	for i := range 10 {
		one := addresses.Interface{Name: fmt.Sprintf("interface%06d", i), Up: true}
		for k := range 100 {
			one.Addresses = append(one.Addresses, netip.MustParseAddr(fmt.Sprintf("2001:db8:1234:5678:9abc:def0:%x:%x", i+0x1000, k+0x1000)))
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
	small := fitting(launch.Config{Network: n})
	if len(small.Network.Addresses) != launch.MaxAddresses {
		t.Errorf("%d addresses where there is room for all", len(small.Network.Addresses))
	}
	large := launch.Config{Network: n}
	for len(large.Lanes) < 30 {
		large.Lanes = append(large.Lanes, launch.Lane{NICs: []string{strings.Repeat("n", 1800)}})
	}
	fits := fitting(large)
	text, err := json.Marshal(fits)
	if err != nil || len(text) > launch.MaxDatagram || len(fits.Network.Addresses) < 16 || fits.Network.Addresses[0] != n.Addresses[0] {
		t.Errorf("%d addresses and %d bytes, %v", len(fits.Network.Addresses), len(text), err)
	}
	if len(n.Addresses) != launch.MaxAddresses {
		t.Error("what the next configuration begins with has become less")
	}

	// And where none of many can be had, the reason has bounds, too.
	settings.Interfaces = "=" + strings.Repeat("x", 15)
	for i := range 2000 {
		all = append(all, addresses.Interface{Name: fmt.Sprintf("veth%08x", i), Up: true})
	}
	_, err = whereOf(all, settings, 1<<20)
	if err == nil || len(err.Error()) <= launch.MaxDatagram {
		t.Fatalf("this shows nothing: %v", err)
	}
	if why := short(err.Error()); len(why) > maxReason+64 || !strings.Contains(why, "no network interface") {
		t.Errorf("%d bytes: %s", len(why), why)
	}
}
