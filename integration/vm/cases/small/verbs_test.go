//go:build vm

package small_test

import (
	"net"
	"net/netip"
	"testing"

	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/conformance"
)

// What relay/verbs promises, of rdma-core and the kernel's own devices: rxe, whose pairs
// are connected out of band, and siw by the connection manager.
func TestVerbsConform(t *testing.T) {
	for _, kind := range []string{inside.RoCE, inside.IWARP} {
		t.Run(kind, func(t *testing.T) {
			inside.RDMA(t, inside.Device{Name: "mlx5_0", Kind: kind, Card: "rail0"})
			library, err := verbs.Open()
			if err != nil {
				t.Fatal(err)
			}
			f := conformance.Fixture{
				Library: library, Device: "mlx5_0", DMABuf: verbs.No,
			}
			if kind == inside.IWARP {
				// It tells of its network interface, not of the cable.
				f.Address, f.LocalProtection = addressOf(t, "rail0"), verbs.LocalOperationError
			} else {
				// The kernel's rxe overwrites the status.
				f.LocalProtection = verbs.Flushed
				f.Port = func(t testing.TB, plugged bool) { inside.Plug(t, "rail0", plugged) }
			}
			conformance.Run(t, f)
		})
	}
}

// addressOf is a card's IPv4 address.
func addressOf(t *testing.T, card string) netip.Addr {
	t.Helper()
	i, err := net.InterfaceByName(card)
	if err != nil {
		t.Fatal(err)
	}
	addresses, err := i.Addrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() {
			return p.Addr()
		}
	}
	t.Fatalf("%s has no IPv4 address among %v", card, addresses)
	return netip.Addr{}
}
