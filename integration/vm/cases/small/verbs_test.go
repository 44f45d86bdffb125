//go:build vm

package small_test

import (
	"bytes"
	"encoding/json"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/conformance"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// The suite of relay/verbs, with rdma-core and the kernel's devices: rxe, whose queue pairs are
// connected out of band, and siw with the connection manager. Each device has a separate process,
// because librdmacm keeps a siw device open during the life of a process.
func TestVerbsConformOnKernelDevices(t *testing.T) {
	const variable = "PEERLANE_VERBS_DEVICE"
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
			f := conformance.Expect(conformance.RXE)
			if kind == inside.IWARP { // siw reports the state of its network interface, not of the cable
				f = conformance.Expect(conformance.SIW)
				f.Address = addressOf(t, "rail0")
			} else {
				f.Port = func(t testing.TB, plugged bool) { inside.Plug(t, "rail0", plugged) }
			}
			f.Device = os.Getenv(variable)
			var err error
			if f.Library, err = verbs.Open(); err != nil {
				t.Fatal(err)
			}
			conformance.Run(t, f)
		})
	}
}

// addressOf returns the IPv4 address of a card.
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

// As on a host with software NICs: tests of host memory succeed; without CUDA the doctor tests no
// GPU memory.
func TestDoctorOverRDMATestsHostMemory(t *testing.T) {
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

// peerlane plan --measure on software NICs: without CUDA it measures their loopback in host memory,
// and the estimate shows the rates.
func TestMeasureOverRDMAFillsTheEstimate(t *testing.T) {
	twoNICs(t, inside.RoCE)
	root := t.TempDir()
	out := inside.Command(t, filepath.Join(inside.Binaries, "peerlane"), "plan", "--measure", "--estimate", "-o", "json",
		"--root", root)
	var estimate struct{ Links []planner.ModelLink }
	if err := json.Unmarshal([]byte(out), &estimate); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	measured := map[string]float64{}
	for _, l := range estimate.Links {
		if l.Source == planner.SourceMeasured {
			measured[l.Name] = l.Rate
		}
	}
	for _, nic := range []string{"mlx5_0", "mlx5_1"} {
		if rate := measured[nic+" and host memory"]; rate <= 0 {
			t.Errorf("the estimate has no measured rate of %s: %s", nic, out)
		}
	}
	text, err := os.ReadFile(filepath.Join(root, "var/lib/peerlane/measured.json"))
	if err != nil {
		t.Fatal(err)
	}
	if m, err := topo.ParseMeasured(text); err != nil || len(m.Loops) != 2 || m.Fingerprint == "" {
		t.Errorf("stored are %s, %v", text, err)
	}
	// Later plans use the stored rates.
	if later := inside.Command(t, filepath.Join(inside.Binaries, "peerlane"), "plan", "--estimate", "--root",
		root); !strings.Contains(later, "mlx5_0 and host memory") {
		t.Errorf("without --measure the estimate is\n%s", later)
	}
}
