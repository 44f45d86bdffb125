// Package conformance tests the guarantees of package verbs on the software device, and on the
// kernel's RDMA devices of network cards in a guest (rxe, siw): so that the software device is not
// kinder than the kernel's devices.
package conformance

import (
	"net/netip"
	"testing"

	"github.com/peerlane/peerlane/relay/verbs"
)

// Fixture is the device of the tests.
type Fixture struct {
	Library *verbs.Library
	Device  string
	// Address is the device's, if the connection manager connects pairs;
	// otherwise the test connects pairs out of band.
	Address netip.Addr
	// dmabuf is the expected result of the probe.
	dmabuf verbs.Support
	// localProtection is the status of a request with unregistered local memory:
	// LocalProtectionError, if the device is exact.
	localProtection verbs.Status
	// Port pulls the port's cable, or plugs the cable in; nil if not supported.
	Port func(t testing.TB, plugged bool)
}

// Kind is a kind of device.
type Kind string

// Kinds of devices, in the order of the columns of docs/network/conformance.md.
const (
	SoftwareRoCE  Kind = "software device, RoCE"
	RXE           Kind = "rxe"
	SoftwareIWARP Kind = "software device, iWARP"
	SIW           Kind = "siw"
)

// Expect returns a fixture with the results in which the kinds differ. docs/network/conformance.md
// lists the differences.
func Expect(k Kind) Fixture {
	switch k {
	case RXE: // the kernel overwrites the status of the request that failed
		return Fixture{dmabuf: verbs.No, localProtection: verbs.Flushed}
	case SIW:
		return Fixture{dmabuf: verbs.No, localProtection: verbs.LocalOperationError}
	}
	return Fixture{dmabuf: verbs.Yes, localProtection: verbs.LocalProtectionError}
}

func (f Fixture) managed() bool { return f.Address.IsValid() }

// cases returns the tests, in order.
func cases() []testCase {
	return []testCase{
		{"device", device},
		{"memory", memory},
		{"order of release", release},
		{"transfers", transfers},
		{"hot calls allocate nothing", allocations},
		{"local protection error", localProtection},
		{"remote access error", remoteAccess},
		{"retry exceeded", retryExceeded},
		{"a failed pair is flushed", flushed},
		{"refused connection", refused},
		{"port events", portEvents},
	}
}

type testCase struct {
	name string
	test func(*testing.T, Fixture)
}

// Run runs every case.
func Run(t *testing.T, f Fixture) {
	for _, c := range cases() {
		t.Run(c.name, func(t *testing.T) { c.test(t, f) })
	}
}
