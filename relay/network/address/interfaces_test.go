package address

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

func addresses(texts ...string) (all []netip.Addr) {
	for _, text := range texts {
		all = append(all, netip.MustParseAddr(text))
	}
	return all
}

// host has a bit of everything, in the kernel's order.
var host = []Interface{
	{Name: "lo", Up: true, Loopback: true, Addresses: addresses("127.0.0.1", "::1")},
	{Name: "eth0", Up: true, Addresses: addresses("fe80::1%eth0", "2001:db8::1", "10.0.0.1")},
	{Name: "eth1", Up: false, Addresses: addresses("10.0.1.1")},
	{Name: "docker0", Up: true, Addresses: addresses("172.17.0.1")},
	{Name: "virbr0", Up: true, Addresses: addresses("192.168.122.1")},
	{Name: "ens1f0", Up: true, Addresses: addresses("10.0.2.1", "169.254.7.7")},
	{Name: "ens1f0np0", Up: true, Addresses: addresses("10.0.3.1")},
	{Name: "ib0", Up: true, Addresses: addresses("10.9.0.1")},
	{Name: "bare", Up: true},
}

func TestInterfacesMatchConfiguration(t *testing.T) {
	for _, c := range []struct {
		list   string
		family Family
		want   string
	}{
		{"", "", "ib0 10.9.0.1, eth0 10.0.0.1, eth0 2001:db8::1, eth0 fe80::1%eth0, ens1f0 10.0.2.1, ens1f0 " +
			"169.254.7.7, ens1f0np0 10.0.3.1"},
		{"", FamilyAuto, "ib0 10.9.0.1, eth0 10.0.0.1, eth0 2001:db8::1, eth0 fe80::1%eth0, ens1f0 10.0.2.1, ens1f0 " +
			"169.254.7.7, ens1f0np0 10.0.3.1"},
		{"", FamilyIPv6, "eth0 2001:db8::1, eth0 fe80::1%eth0"},
		{"", FamilyIPv4, "ib0 10.9.0.1, eth0 10.0.0.1, ens1f0 10.0.2.1, ens1f0 169.254.7.7, ens1f0np0 10.0.3.1"},
		{"eth", FamilyIPv4, "eth0 10.0.0.1"},
		{"ens1f0", "", "ens1f0 10.0.2.1, ens1f0 169.254.7.7, ens1f0np0 10.0.3.1"},
		{"=ens1f0", "", "ens1f0 10.0.2.1, ens1f0 169.254.7.7"},
		{"=ens1f0np0,ib0", "", "ens1f0np0 10.0.3.1, ib0 10.9.0.1"},
		{"=ens1f0,=ib0", "", "ens1f0 10.0.2.1, ens1f0 169.254.7.7, ib0 10.9.0.1"},
		{"=ens", "", ""},
		{"^ens,ib", FamilyIPv4, "eth0 10.0.0.1"},
		{"^=ens1f0", FamilyIPv4, "ib0 10.9.0.1, eth0 10.0.0.1, ens1f0np0 10.0.3.1"},
		{"e,^ens", FamilyIPv4, "eth0 10.0.0.1"},
		{"e,^=ens1f0", FamilyIPv4, "eth0 10.0.0.1, ens1f0np0 10.0.3.1"},
		{"lo", FamilyIPv4, "lo 127.0.0.1"},
		{"docker", "", "docker0 172.17.0.1"},
		{"eth1", "", ""},
		{"bare", "", ""},
		{"ib,eth", FamilyIPv4, "ib0 10.9.0.1, eth0 10.0.0.1"},
		{"eth,ib", FamilyIPv4, "eth0 10.0.0.1, ib0 10.9.0.1"},
	} {
		list, err := ParseInterfaces(c.list)
		if err != nil {
			t.Errorf("%q: %v", c.list, err)
			continue
		}
		chosen, err := list.Choose(host, c.family)
		var got []string
		for _, one := range chosen {
			got = append(got, one.Interface+" "+one.Address.String())
		}
		if text := strings.Join(got, ", "); text != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%q, %s: %s, %v\nwant %s", c.list, c.family, text, err, c.want)
		}
	}
}

// Without a matching interface the error has a reason per interface.
func TestNoMatchingInterfaceNamesEachReason(t *testing.T) {
	list, err := ParseInterfaces("eth1,bare,docker,^docker")
	if err != nil {
		t.Fatal(err)
	}
	_, err = list.Choose(host, FamilyIPv6)
	passed, ok := errors.AsType[*passedError](err)
	if !ok || !errors.Is(err, fault.NoInterface) {
		t.Fatal(err)
	}
	for _, says := range []string{"eth1: down", "bare: no address of network.family ipv6",
		"docker0: excluded by network.interfaces", "lo: not in network.interfaces"} {
		if !slices.Contains(passed.interfaces, says) {
			t.Errorf("%q; want %q", passed.interfaces, says)
		}
	}
	_, err = (Interfaces{}).Choose(host[:1], "")
	if !testutil.HasError(err, &passedError{[]string{"lo: loopback, which has to be named"}}) {
		t.Errorf("%v", err)
	}
	if _, err := (Interfaces{}).Choose(nil, ""); !testutil.HasError(err, &passedError{}) {
		t.Errorf("%v", err)
	}
}

func TestInvalidInterfaceListsAreRefused(t *testing.T) {
	for _, text := range []string{",", "eth,,ib", "eth,", "^", "=", "^=", "eth 0", "eth/0", "mlx5_0:1", "=^eth", "e^th",
		"a-name-of-sixteen", "ü", strings.Repeat("a,", 64) + "a"} {
		if list, err := ParseInterfaces(text); err == nil {
			t.Errorf("%q is read as %+v", text, list)
		}
	}
}

func TestInterfacesOfThisHostAreFound(t *testing.T) {
	all, err := Host()
	if err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(all, func(i Interface) bool { return i.Loopback })
	if at < 0 || !all[at].Up || !slices.Contains(all[at].Addresses, netip.MustParseAddr("127.0.0.1")) {
		t.Errorf("no loopback in %+v", all)
	}
	for _, i := range all {
		for _, a := range i.Addresses {
			if a.Is6() && a.IsLinkLocalUnicast() && a.Zone() != i.Name || a.Is4In6() {
				t.Errorf("%s has %v", i.Name, a)
			}
		}
	}
}

// A list is refused, or decides on a name independently of further names.
func FuzzInterfaces(f *testing.F) {
	for _, seed := range []string{"", "eth,^eth9", "^docker,lo", "=ens1f0", "^=a,b", "a,b,c"} {
		f.Add(seed, "eth0")
	}
	f.Fuzz(func(t *testing.T, text, name string) {
		list, err := ParseInterfaces(text)
		if err != nil {
			return
		}
		if text != "" && len(list.named)+len(list.excluded) == 0 {
			t.Fatalf("%q is an empty list", text)
		}
		one := []Interface{{Name: name, Up: true, Addresses: addresses("10.0.0.1")}}
		chosen, err := list.Choose(one, FamilyAuto)
		if (len(chosen) == 1) == (err != nil) {
			t.Errorf("%q chooses %v, %v", text, chosen, err)
		}
		for _, p := range list.excluded {
			if p.matches(name) && err == nil {
				t.Errorf("%q chooses %q, which it excludes", text, name)
			}
		}
	})
}
