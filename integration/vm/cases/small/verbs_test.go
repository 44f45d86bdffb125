//go:build vm

package small_test

import (
	"bytes"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/conformance"
)

// The suite of relay/verbs, with rdma-core and the kernel's devices: rxe, whose queue pairs are
// connected out of band, and siw by the connection manager. Each device has a separate process,
// because librdmacm keeps a siw device open during the life of a process.
func TestVerbsConformOnKernelDevices(t *testing.T) {
	const variable = "PEERLANE_VERBS_DEVICE"
	fixtures := map[string]conformance.Fixture{
		// The kernel's rxe overwrites the status of the request that failed.
		inside.RoCE: {
			LocalProtection: verbs.Flushed,
			Port:            func(t testing.TB, plugged bool) { inside.Plug(t, "rail0", plugged) },
		},
		// siw reports the state of its network interface, not of the cable.
		inside.IWARP: {LocalProtection: verbs.LocalOperationError},
	}
	for _, kind := range []string{inside.RoCE, inside.IWARP} {
		t.Run(kind, func(t *testing.T) {
			if os.Getenv(variable) == "" {
				inside.RDMA(t, inside.Device{Name: "mlx5_0", Kind: kind, Card: "rail0"})
				c := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.timeout=10m",
					"-test.run=^TestVerbsConformOnKernelDevices$/^"+kind+"$")
				c.Env = append(os.Environ(), variable+"=mlx5_0")
				if out, err := c.CombinedOutput(); err != nil || !bytes.Contains(out,
					[]byte("--- PASS: TestVerbsConformOnKernelDevices/"+kind)) {
					t.Fatalf("%v\n%s", err, out)
				}
				return
			}
			f := fixtures[kind]
			f.Device, f.DMABuf = os.Getenv(variable), verbs.No
			if kind == inside.IWARP {
				f.Address = addressOf(t, "rail0")
			}
			var err error
			if f.Library, err = verbs.Open(); err != nil {
				t.Fatal(err)
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

// As on a host with software NICs: host memory is correct at any rate; without CUDA no GPU memory
// is tested.
func TestDoctorOverRDMA(t *testing.T) {
	twoNICs(t, inside.RoCE)
	by := found(t, t.TempDir(), "--rdma")
	host := 0
	for _, f := range by["rdma"] {
		if !strings.HasSuffix(f.On, "host memory") {
			continue
		}
		host++
		if !strings.HasPrefix(f.Found, "4194304 bytes written and read by port 1, GID 1 (") ||
			!strings.Contains(f.Found, "RoCE v2), pkey index 0 are right;") {
			t.Errorf("%+v", f)
		}
	}
	if host != 2 {
		t.Errorf("%d NICs are tested: %+v", host, by["rdma"])
	}
}
