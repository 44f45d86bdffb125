package address

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

func TestPortRangesAreParsed(t *testing.T) {
	for text, want := range map[string]Ports{"20000-20999": {20000, 20999}, "7": {7, 7}, "1-65535": {1, 65535}} {
		if got, err := ParsePorts(text); err != nil || got != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "-", "0", "0-5", "5-4", "1-65536", "1-", "-1", "1-2-3", " 1-2", "a-b", "+1-2",
		"1.5"} {
		if got, err := ParsePorts(text); err == nil {
			t.Errorf("%q: %v", text, got)
		}
	}
}

// taken returns adjacent used ports, and the next port, which was free a moment ago.
func taken(t *testing.T, at string) (Ports, uint16) {
	t.Helper()
	for range 100 {
		last, err := net.Listen("tcp", net.JoinHostPort(at, "0"))
		if err != nil {
			t.Fatal(err)
		}
		free := uint16(last.Addr().(*net.TCPAddr).Port)
		last.Close()
		if free < 2000 {
			continue
		}
		var all []net.Listener
		for port := free - 3; port < free; port++ {
			one, err := net.Listen("tcp", netip.AddrPortFrom(netip.MustParseAddr(at), port).String())
			if err != nil {
				break
			}
			all = append(all, one)
		}
		if len(all) == 3 {
			t.Cleanup(func() {
				for _, l := range all {
					l.Close()
				}
			})
			return Ports{free - 3, free - 1}, free
		}
		for _, l := range all {
			l.Close()
		}
	}
	t.Fatal("no four ports beside each other are free")
	return Ports{}, 0
}

func TestListenSkipsUsedPorts(t *testing.T) {
	for _, at := range []string{"127.0.0.1", "::1"} {
		address := netip.MustParseAddr(at)
		busy, free := taken(t, at)
		_, err := Listen(t.Context(), address, busy)
		if busy.Count() != 3 || !testutil.HasError(err, &takenError{busy, address}) {
			t.Errorf("%v", err)
		}
		l, err := Listen(t.Context(), address, Ports{busy.First, free})
		for try := 0; err != nil && try < 10; try++ { // another process of this host took it in this moment
			busy, free = taken(t, at)
			l, err = Listen(t.Context(), address, Ports{busy.First, free})
		}
		if err != nil {
			t.Fatal(err)
		}
		if got := l.Addr().(*net.TCPAddr).AddrPort(); got != netip.AddrPortFrom(address, free) {
			t.Errorf("it listens on %v; %d is the only one that was free", got, free)
		}
		l.Close()
	}
}

// Relays that start at once try different ports first.
func TestPortsOfRelaysAreDrawnAtRandom(t *testing.T) {
	drawn := map[int]bool{}
	for range 8 {
		l, err := Listen(t.Context(), netip.MustParseAddr("127.0.0.1"), Ports{20000, 29999})
		if err != nil {
			t.Fatal(err)
		}
		drawn[l.Addr().(*net.TCPAddr).Port] = true
		l.Close()
	}
	if len(drawn) < 2 {
		t.Errorf("eight times of ten thousand it was %v", drawn)
	}
}

// An address that the host does not have is no matter of ports.
func TestListenOnForeignAddressFails(t *testing.T) {
	for _, at := range []string{"192.0.2.1", "2001:db8::1", "fe80::1%lo"} { // of documentation, RFC 5737 and 3849
		_, err := Listen(t.Context(), netip.MustParseAddr(at), Ports{20000, 20999})
		if err == nil || errors.Is(err, fault.NoPort) {
			t.Errorf("%s: %v", at, err)
		}
	}
}
