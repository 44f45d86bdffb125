package standin_test

import (
	"net/netip"
	"testing"

	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/conformance"
	"github.com/peerlane/peerlane/relay/verbs/standin"
)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// host makes a host and opens its library.
func host(t testing.TB, devices ...standin.Device) (standin.Host, *verbs.Library) {
	t.Helper()
	h, err := standin.New(t.TempDir(), devices...)
	check(t, err)
	l, err := verbs.OpenLibrary(h.Library())
	check(t, err)
	if !l.StandIn() {
		t.Fatal("the library is not the stand-in")
	}
	return h, l
}

func TestTheStandInIsAsADeviceIs(t *testing.T) {
	nic := standin.Device{Name: "mlx5_0", GUID: 0x0c42a10300aabbcc, Address: "192.0.2.7"}
	h, l := host(t, nic)
	conformance.Run(t, conformance.Fixture{
		Library: l, Device: "mlx5_0", DMABuf: verbs.Yes, LocalProtection: verbs.LocalProtectionError,
		Port: func(t testing.TB, plugged bool) {
			now := nic
			now.Down = !plugged
			check(t, h.Set(now))
		},
	})
}

func TestTheStandInIsAsADeviceOfIWARPIs(t *testing.T) {
	_, l := host(t, standin.Device{Name: "siw0", GUID: 0x0c42a10300aabbcd, IWARP: true, Address: "192.0.2.8"})
	conformance.Run(t, conformance.Fixture{
		Library: l, Device: "siw0", Address: netip.MustParseAddr("192.0.2.8"), DMABuf: verbs.Yes, LocalProtection: verbs.LocalProtectionError,
	})
}
