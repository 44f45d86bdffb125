package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/doctor/meeting"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/wire"
)

// twoHosts returns a meeting of two hosts without a fault.
func twoHosts() (*Meetings, *meeting.Meeting) {
	facts := func(host, at string) meeting.Facts {
		return meeting.Facts{
			Host: host, Release: "v1", Oldest: 1, Newest: 2, Keys: []string{"k1"}, TLS: true, Ports: "20000-20999",
			Interfaces: []meeting.Interface{{Name: "eth0", Addresses: []string{at, "2001:db8::7"}, MTU: 9000, Mbps: 100_000}},
			Rails: []meeting.Rail{{Rail: 0, NIC: "mlx5_0", LinkLayer: "Ethernet", Gbps: 200},
				{Rail: 1, NIC: "mlx5_1", LinkLayer: "Ethernet", Gbps: 200}},
		}
	}
	met := &meeting.Meeting{
		At: netip.MustParseAddrPort("10.0.0.2:20999"), Peer: "host2 at 10.0.0.2:20999", Connected: true, Proven: true,
		Theirs: facts("host2", "10.0.0.2"), Offset: 3 * time.Millisecond, Uncertainty: time.Millisecond,
		Ours: netip.MustParseAddr("10.0.0.1"), PathMTU: 9000,
	}
	return &Meetings{
		Others: []Other{{Name: "host2", Addresses: []netip.AddrPort{met.At}}}, Ours: facts("host1", "10.0.0.1"),
		Meet: func(context.Context, meeting.Side, []netip.AddrPort) meeting.Meeting { return *met },
	}, met
}

// Only the check of a fault finds it. Without a connection, the checks that depend on it are
// unknown.
func TestFaultBetweenTwoHostsIsFoundByItsCheckAlone(t *testing.T) {
	all := func(but ...string) (list []string) {
		for _, c := range Others() {
			skip := false
			for _, b := range but {
				skip = skip || b == c.Name
			}
			if !skip {
				list = append(list, "could not tell "+c.Name)
			}
		}
		return list
	}
	for _, c := range []struct {
		name   string
		change func(*Meetings, *meeting.Meeting)
		finds  []string
		want   string
	}{
		{"nothing", func(*Meetings, *meeting.Meeting) {}, nil, ""},
		{"no such name", func(m *Meetings, _ *meeting.Meeting) { m.Others[0].Err = errors.New("no such host") },
			append([]string{"failure reached"}, all("reached")...), "no such host"},
		{"nobody listens", func(_ *Meetings, m *meeting.Meeting) {
			*m = meeting.Meeting{At: m.At, Err: errors.New("connection refused")}
		}, append([]string{"failure reached"}, all("reached")...), "connection refused"},
		{"another key", func(_ *Meetings, m *meeting.Meeting) {
			*m = meeting.Meeting{At: m.At, Connected: true, Err: fmt.Errorf("x: %w", network.ErrSilent)}
		}, append([]string{"failure cluster-keys"}, all("cluster-keys", "reached")...), "without a word"},
		{"a relay", func(_ *Meetings, m *meeting.Meeting) {
			*m = meeting.Meeting{At: m.At, Connected: true, Proven: true, Err: wire.Errorf(wire.StatusBadHandle, "another host")}
		}, all("cluster-keys"), "a relay answers"},
		{"it says nothing after the handshake", func(_ *Meetings, m *meeting.Meeting) {
			m.Err = errors.New("request the clock: i/o timeout")
		}, append([]string{"failure reached"}, all("cluster-keys", "reached")...), "i/o timeout"},
		{"rotation", func(ms *Meetings, m *meeting.Meeting) { m.Theirs.Keys = []string{"k2", "k1"} },
			[]string{"warning cluster-keys"}, "here k1 is in use, and there k2"},
		{"half a rotation", func(ms *Meetings, m *meeting.Meeting) { ms.Ours.Keys = []string{"k1", "k0"} },
			[]string{"warning cluster-keys"}, "still believes"},
		{"certificates on one side", func(_ *Meetings, m *meeting.Meeting) {
			*m = meeting.Meeting{At: m.At, Connected: true, Proven: true,
				Err: wire.Errorf(wire.StatusUnreachable, "host2 has no address")}
		}, append([]string{"failure certificates"}, all("cluster-keys", "certificates",
			"reached")...), "host2 has no address"},
		{"doctors of two ages", func(_ *Meetings, m *meeting.Meeting) {
			*m = meeting.Meeting{At: m.At, Connected: true, Proven: true,
				Err: wire.Errorf(wire.StatusVersion, "versions 2 to 3")}
		}, append([]string{"failure protocol"}, all("cluster-keys", "protocol", "reached")...), "versions 2 to 3"},
		{"protocol", func(_ *Meetings, m *meeting.Meeting) { m.Theirs.Oldest, m.Theirs.Newest = 3, 4 },
			[]string{"failure protocol"}, "versions 3 to 4"},
		{"clock ahead", func(_ *Meetings, m *meeting.Meeting) { m.Offset = 90 * time.Second },
			[]string{"warning clock-skew"}, "1m30s ahead of"},
		{"clock behind", func(_ *Meetings, m *meeting.Meeting) { m.Offset = -90 * time.Second },
			[]string{"warning clock-skew"}, "1m30s behind"},
		{"slow answers", func(_ *Meetings, m *meeting.Meeting) { m.Offset, m.Uncertainty = 2*time.Second, 2*time.Second },
			[]string{"could not tell clock-skew"}, "too long to tell"},
		{"ports", func(ms *Meetings, _ *meeting.Meeting) { ms.Ours.Ports = "7000-7009" }, []string{"failure ports"},
			"7000-7009 here"},
		{"no interface there", func(_ *Meetings, m *meeting.Meeting) {
			m.Theirs.Interfaces, m.Theirs.Why = nil,
				"eth0: down"
		}, []string{"failure interfaces", "could not tell mtu"}, "there use no interface: eth0: down"},
		{"families", func(ms *Meetings, m *meeting.Meeting) {
			ms.Ours.Interfaces[0].Addresses, m.Theirs.Interfaces[0].Addresses = []string{"10.0.0.1"}, []string{"2001:db8::7"}
			m.At = netip.MustParseAddrPort("[2001:db8::7]:20999")
		}, []string{"failure interfaces"}, "here have IPv4 addresses, and there IPv6"},
		{"another way", func(_ *Meetings, m *meeting.Meeting) { m.Ours = netip.MustParseAddr("192.0.2.1") },
			[]string{"warning interfaces", "could not tell mtu"}, "leaves by 192.0.2.1"},
		{"another address", func(_ *Meetings, m *meeting.Meeting) { m.At = netip.MustParseAddrPort("192.0.2.2:1") },
			[]string{"warning interfaces", "could not tell mtu"}, "192.0.2.2 is no address"},
		{"MTU of one end", func(_ *Meetings, m *meeting.Meeting) { m.Theirs.Interfaces[0].MTU, m.PathMTU = 1500, 1500 },
			[]string{"warning mtu"}, "eth0 has 1500 there"},
		{"MTU of the path", func(_ *Meetings, m *meeting.Meeting) { m.PathMTU = 1500 }, []string{"warning mtu"},
			"the path between them 1500"},
		{"a switch drops large packets", func(_ *Meetings, m *meeting.Meeting) {
			m.Stuck = os.ErrDeadlineExceeded
		}, []string{"failure mtu"}, "full size"},
		{"a reset with bytes under way", func(_ *Meetings, m *meeting.Meeting) { m.Stuck = syscall.ECONNRESET },
			[]string{"failure mtu"}, "connection reset"},
		{"a rail less", func(_ *Meetings, m *meeting.Meeting) { m.Theirs.Rails = m.Theirs.Rails[:1] },
			[]string{"warning rails"}, "2 rails, and there 1"},
		{"crossed rails", func(_ *Meetings, m *meeting.Meeting) {
			m.Theirs.Rails[0].NIC, m.Theirs.Rails[1].NIC = "mlx5_1", "mlx5_0"
		}, []string{"warning rails"}, "rail 0 is mlx5_0 here and mlx5_1 there; rail 1"},
		{"names of two kinds, numbered", func(_ *Meetings, m *meeting.Meeting) {
			m.Theirs.Rails[0].NIC, m.Theirs.Rails[1].NIC, m.Theirs.Numbered = "ibp1", "ibp2", true
		}, nil, ""},
		{"one rail of two names", func(ms *Meetings, m *meeting.Meeting) {
			ms.Ours.Rails, m.Theirs.Rails = ms.Ours.Rails[:1], m.Theirs.Rails[:1]
			m.Theirs.Rails[0].NIC = "ibp1"
		}, nil, ""},
		{"no rate of the same rail is told", func(ms *Meetings, m *meeting.Meeting) {
			ms.Ours.Interfaces[0].Mbps = 0
			for i := range m.Theirs.Rails {
				m.Theirs.Rails[i].Gbps = 0
			}
		}, []string{"could not tell link-rate"}, "of no rail"},
		{"two kinds of link", func(_ *Meetings, m *meeting.Meeting) { m.Theirs.Rails[1].LinkLayer = "InfiniBand" },
			[]string{"failure rails"}, "rail 1 is Ethernet here"},
		{"rate of a NIC", func(_ *Meetings, m *meeting.Meeting) { m.Theirs.Rails[1].Gbps = 100 },
			[]string{"warning link-rate"}, "rail 1 has 200 Gb/s here (mlx5_1) and 100 there"},
		{"rate of an interface", func(_ *Meetings, m *meeting.Meeting) { m.Theirs.Interfaces[0].Mbps = 1000 },
			[]string{"warning link-rate"}, "100000 Mb/s here and eth0 1000 there"},
		{"no rate is told", func(ms *Meetings, m *meeting.Meeting) {
			ms.Ours.Rails, m.Theirs.Rails, m.Theirs.Interfaces[0].Mbps = nil, nil, 0
		}, []string{"could not tell link-rate"}, "as of virtual ones"},
		{"no key here", func(ms *Meetings, _ *meeting.Meeting) { ms.NoSide = errors.New("no such file") }, all(),
			"no such file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			meetings, met := twoHosts()
			c.change(meetings, met)
			found := Examine(context.Background(), &Host{Meetings: meetings}, Others())
			want := map[string]bool{}
			for _, w := range c.finds {
				want[w] = true
			}
			got, remedy := map[string]bool{}, ""
			for _, f := range found {
				if f.Status <= OK {
					continue
				}
				got[f.Status.String()+" "+f.Check] = true
				remedy += f.Found + "\n"
				if f.Remedy == "" || f.Why == "" || f.LookedAt == "" || f.Found == "" || f.On == "" {
					t.Errorf("%+v is not whole", f)
				}
			}
			if !reflect.DeepEqual(got, want) || !strings.Contains(remedy, c.want) {
				t.Errorf("found %v, want %v, with %q in\n%s", got, want, c.want, remedy)
			}
			if len(found) != len(Others()) {
				t.Errorf("%d findings of %d checks", len(found), len(Others()))
			}
		})
	}
}

// A host that delays a meeting does not delay a check beyond its limit.
func TestDoctorEndlessMeetingIsLimited(t *testing.T) {
	meetings, _ := twoHosts()
	release := make(chan struct{})
	defer close(release)
	meetings.Meet = func(context.Context, meeting.Side, []netip.AddrPort) meeting.Meeting {
		<-release
		return meeting.Meeting{}
	}
	for _, f := range examine(context.Background(), &Host{Meetings: meetings}, Others(), 50*time.Millisecond) {
		if f.Status != Unknown {
			t.Errorf("%+v", f)
		}
	}
}

// Facts returns the values that relays would use.
func TestFactsEqualValuesOfRelays(t *testing.T) {
	m := newMade(t)
	m.write("sys/class/net/eth0/mtu", "9000")
	m.write("sys/class/net/eth0/speed", "100000")
	m.write("sys/class/net/eth1/speed", "-1")
	at := netip.MustParseAddr
	all := []address.Interface{
		{Name: "lo", Up: true, Loopback: true, Addresses: []netip.Addr{at("127.0.0.1")}},
		{Name: "eth0", Up: true, Addresses: []netip.Addr{at("10.0.0.1"), at("fe80::1%eth0")}},
		{Name: "eth1", Up: true, Addresses: []netip.Addr{at("10.1.0.1")}},
	}
	key := network.NewKey(time.Now())
	f, err := m.host().Facts("h", "v1", network.Keys{Current: key}, all)
	if err != nil {
		t.Fatal(err)
	}
	want := []meeting.Interface{
		{Name: "eth0", Addresses: []string{"10.0.0.1", "fe80::1"}, MTU: 9000, Mbps: 100_000}, {Name: "eth1",
			Addresses: []string{"10.1.0.1"}},
	}
	if !reflect.DeepEqual(f.Interfaces, want) || f.Keys[0] != key.ID.String() || f.Ports != "20000-20999" ||
		f.Newest != wire.NewestVersion {
		t.Errorf("%+v", f)
	}
	// Indistinguishable interfaces are a single rail, as for relays.
	if want := []meeting.Rail{{NIC: "eth0", LinkLayer: "Ethernet", Gbps: 100},
		{NIC: "eth1", LinkLayer: "Ethernet"}}; !reflect.DeepEqual(f.Rails, want) || f.Numbered {
		t.Errorf("rails %+v, want %+v", f.Rails, want)
	}
	m.write(ib0+"/device/net/eth0/mtu", "9000")
	m.write(ib1+"/device/net/eth1/mtu", "9000")
	for config, want := range map[string][2]int{
		"[network]\ninterfaces = \"eth\"\n":                         {0, 1},
		"[plan.rails]\nmlx5_0 = 1\nmlx5_1 = 0\n":                    {1, 0},
		"[network]\nrails = [\"eth1\", \"mlx5_0\"]\n":               {1, 0},
		"[network]\nrails = [\"eth1\"]\n[plan.rails]\nmlx5_1 = 3\n": {-1, 0},
	} {
		m.write("etc/peerlane/config.toml", config)
		f, err := m.host().Facts("h", "v1", network.Keys{Current: key}, all)
		got := [2]int{-1, -1}
		for _, r := range f.Rails {
			for i, name := range []string{"mlx5_0", "mlx5_1"} {
				if r.NIC == name {
					got[i] = r.Rail
				}
			}
			if r.Gbps == 0 || r.LinkLayer == "" {
				t.Errorf("%+v", r)
			}
		}
		if err != nil || got != want || f.Numbered != strings.Contains(config, "rails") {
			t.Errorf("with %q: %+v, %v; want %v", config, f, err, want)
		}
	}
	m.write("etc/peerlane/config.toml", "[network]\nrails = [\"eth7\"]\n")
	if f, err := m.host().Facts("h", "v1", network.Keys{Current: key}, all); err != nil || len(f.Interfaces) != 0 ||
		!strings.Contains(f.Why, "network.rails") {
		t.Errorf("%+v, %v", f, err)
	}
	m.write("etc/peerlane/config.toml", "[network]\nlisten = \"off\"\n")
	if f, err := m.host().Facts("h", "v1", network.Keys{Current: key}, all); err != nil || len(f.Interfaces) != 0 ||
		!strings.Contains(f.Why, "network.listen") {
		t.Errorf("%+v, %v", f, err)
	}
}
