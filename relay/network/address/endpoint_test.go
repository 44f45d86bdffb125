package address

import (
	"net/netip"
	"reflect"
	"testing"
)

func TestParseEndpointReturnsAddresses(t *testing.T) {
	for _, text := range []string{"10.1.0.7:20123", "[2001:db8::7]:1", "[fe80::7]:65535", "127.0.0.1:80", "[::1]:80",
		"169.254.1.1:5"} {
		at := netip.MustParseAddrPort(text)
		e := Endpoint{at.Addr(), at.Port()}
		if got, err := DecodeEndpoint(e.Encode()); err != nil || got != e {
			t.Errorf("%s is %v after it was in a handle, %v", text, got, err)
		}
	}
	// The bytes are the format of every version.
	want := [EndpointBytes]byte{10: 0xff, 11: 0xff, 12: 10, 13: 1, 14: 0, 15: 7, 16: 0x9b, 17: 0x4e}
	if got := (Endpoint{netip.MustParseAddr("10.1.0.7"), 20123}).Encode(); got != want {
		t.Errorf("% x, want % x", got, want)
	}
	// A zone stays here: it says nothing elsewhere.
	got, err := DecodeEndpoint(Endpoint{netip.MustParseAddr("fe80::7%eth0"), 1}.Encode())
	if err != nil || got.Address.Zone() != "" {
		t.Errorf("%v, %v", got, err)
	}
}

func TestInvalidEndpointsAreRefused(t *testing.T) {
	good := Endpoint{netip.MustParseAddr("10.1.0.7"), 20123}.Encode()
	longer := good
	longer[EndpointBytes-1] = 1
	for name, b := range map[string][EndpointBytes]byte{
		"zeros": {}, "no port": Endpoint{netip.MustParseAddr("10.1.0.7"), 0}.Encode(),
		"0.0.0.0": Endpoint{netip.MustParseAddr("0.0.0.0"), 5}.Encode(), "::": Endpoint{netip.MustParseAddr("::"),
			5}.Encode(),
		"multicast": Endpoint{netip.MustParseAddr("224.0.0.1"), 5}.Encode(),
		"ff02::1":   Endpoint{netip.MustParseAddr("ff02::1"), 5}.Encode(), "more behind it": longer,
	} {
		if e, err := DecodeEndpoint(b); err == nil {
			t.Errorf("%s is %v", name, e)
		}
	}
}

func TestLinkLocalAddressesAreTriedAtOwnInterfaces(t *testing.T) {
	chosen := []Chosen{
		{
			Interface: "eth0",
			Address:   netip.MustParseAddr("10.0.0.1"),
		}, {Interface: "eth1", Address: netip.MustParseAddr("fe80::1%eth1")},
		{
			Interface: "eth1",
			Address:   netip.MustParseAddr("fe80::2%eth1"),
		}, {Interface: "eth2", Address: netip.MustParseAddr("fe80::3%eth2")},
	}
	for _, c := range []struct {
		e    Endpoint
		want []string
	}{
		{Endpoint{netip.MustParseAddr("10.0.0.9"), 5}, []string{"10.0.0.9:5"}},
		{Endpoint{netip.MustParseAddr("2001:db8::9"), 5}, []string{"[2001:db8::9]:5"}},
		{Endpoint{netip.MustParseAddr("169.254.0.9"), 5}, []string{"169.254.0.9:5"}},
		{Endpoint{netip.MustParseAddr("fe80::9"), 5}, []string{"[fe80::9%eth1]:5", "[fe80::9%eth2]:5"}},
	} {
		var got []string
		for _, at := range c.e.Dials(chosen) {
			got = append(got, at.String())
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%v is tried at %v, want %v", c.e, got, c.want)
		}
	}
}

// Any bytes of a handle are refused, or are an address to dial.
func FuzzEndpoint(f *testing.F) {
	good := Endpoint{netip.MustParseAddr("10.1.0.7"), 20123}.Encode()
	f.Add(good[:])
	f.Add(make([]byte, EndpointBytes))
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) != EndpointBytes {
			return
		}
		e, err := DecodeEndpoint([EndpointBytes]byte(text))
		if err != nil {
			return
		}
		if e.Encode() != [EndpointBytes]byte(text) || e.Port == 0 || !e.Address.IsValid() || e.Address.IsUnspecified() ||
			e.Address.IsMulticast() {
			t.Errorf("% x is %v", text, e)
		}
	})
}
