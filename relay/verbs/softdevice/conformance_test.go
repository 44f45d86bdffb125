package softdevice_test

import (
	"net/netip"
	"testing"

	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/conformance"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// host makes a host and opens the library.
func host(t testing.TB, devices ...softdevice.Device) (softdevice.Host, *verbs.Library) {
	t.Helper()
	h, err := softdevice.New(t.TempDir(), devices...)
	check(t, err)
	l, err := verbs.OpenLibrary(h.Library())
	check(t, err)
	if !l.Software() {
		t.Fatal("the library is not the software device")
	}
	return h, l
}

func TestConformanceRoCEDevicePasses(t *testing.T) {
	nic := softdevice.Device{Name: "mlx5_0", GUID: 0x0c42a10300aabbcc, Address: "192.0.2.7"}
	h, l := host(t, nic)
	f := conformance.Expect(conformance.SoftwareRoCE)
	f.Library, f.Device = l, "mlx5_0"
	f.Port = func(t testing.TB, plugged bool) {
		now := nic
		now.Down = !plugged
		check(t, h.Set(now))
	}
	conformance.Run(t, f)
}

func TestConformanceIWARPDevicePasses(t *testing.T) {
	_, l := host(t, softdevice.Device{Name: "siw0", GUID: 0x0c42a10300aabbcd, IWARP: true, Address: "192.0.2.8"})
	f := conformance.Expect(conformance.SoftwareIWARP)
	f.Library, f.Device, f.Address = l, "siw0", netip.MustParseAddr("192.0.2.8")
	conformance.Run(t, f)
}
