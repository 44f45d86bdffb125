//go:build vm

// Package small_test runs in the small image: Peerlane on a PCIe tree and RDMA
// devices that a real kernel shows.
package small_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/cmd/peerlane/demo"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/integration/vm/pcitree"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
	"github.com/peerlane/peerlane/topo/recorded"
)

// twoNICs loads the tree of eight GPUs and two NICs, with an RDMA device in each NIC.
func twoNICs(t *testing.T, kind string) {
	t.Helper()
	inside.NamedTree(t, "two-nics")
	inside.RDMA(t,
		inside.Device{Name: "mlx5_0", Kind: kind, Card: "rail0", Parent: "0000:1a:00.0"},
		inside.Device{Name: "mlx5_1", Kind: kind, Card: "rail1", Parent: "0000:9c:00.0"})
}

func attribute(t *testing.T, address, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("/sys/bus/pci/devices", address, name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

// The kernel shows each function of every table with the table's attributes.
func TestKernelShowsTables(t *testing.T) {
	for _, name := range pcitree.Names() {
		t.Run(name, func(t *testing.T) {
			tree := inside.NamedTree(t, name)
			listed := inside.Command(t, "lspci", "-D")
			drawn := inside.Command(t, "lstopo-no-graphics", "--of", "xml", "--no-caches", "--whole-io")
			for _, f := range tree.Functions() {
				got := fmt.Sprintf("%s %s:%s, node %s", attribute(t, f.Address, "class"), attribute(t, f.Address, "vendor"),
					attribute(t, f.Address, "device"), attribute(t, f.Address, "numa_node"))
				if want := fmt.Sprintf("0x%06x 0x%04x:0x%04x, node %d", f.Class, f.Vendor, f.Device, f.NUMA); got != want {
					t.Errorf("%s is %s, and %s in the table", f.Address, got, want)
				}
				driver, err := os.Readlink(filepath.Join("/sys/bus/pci/devices", f.Address, "driver"))
				if f.Driver == "" && !errors.Is(err, fs.ErrNotExist) || f.Driver != "" && filepath.Base(driver) != f.Driver {
					t.Errorf("%s has the driver %s (%v), and %q in the table", f.Address, driver, err, f.Driver)
				}
				// lspci and lstopo agree that this is a PCIe tree.
				if !strings.Contains(listed, f.Address+" ") {
					t.Errorf("lspci does not list %s", f.Address)
				}
				if !strings.Contains(drawn, f.Address) && !strings.Contains(drawn, strings.TrimPrefix(f.Address, "0000:")) {
					t.Errorf("lstopo does not show %s", f.Address)
				}
			}
		})
	}
}

// Generations and widths of links, in tables with several.
func TestKernelShowsLinks(t *testing.T) {
	for name, want := range map[string][]string{
		"two-nics": {"32.0 GT/s PCIe x16"}, "dgx": {"16.0 GT/s PCIe x4", "32.0 GT/s PCIe x16"},
		"no-switch": {"16.0 GT/s PCIe x16"},
	} {
		t.Run(name, func(t *testing.T) {
			seen := map[string]bool{}
			for _, f := range inside.NamedTree(t, name).Functions() {
				seen[attribute(t, f.Address, "max_link_speed")+" x"+attribute(t, f.Address, "max_link_width")] = true
			}
			for _, link := range want {
				if !seen[link] {
					t.Errorf("no link is %s, but %q", link, slices.Sorted(maps.Keys(seen)))
				}
			}
		})
	}
}

func TestTableReplacesFormerTree(t *testing.T) {
	text, err := pcitree.ReadTable("no-switch")
	if err != nil {
		t.Fatal(err)
	}
	before := inside.Tree(t, text)
	changed, err := pcitree.Parse(text +
		"host-bridge 0000:e0 numa=1\n    root-port 8086:352a gen5 x16 acs\n        gpu 10de:2330 gen5 x16\n")
	if err != nil {
		t.Fatal(err)
	}
	if err := changed.Load(); err != nil {
		t.Fatal(err)
	}
	h, err := reader.Sysfs(topo.Options{})
	if err != nil {
		t.Fatal(err)
	}
	gpus := func(tree *pcitree.Tree) int {
		return len(slices.DeleteFunc(tree.Functions(), func(f pcitree.Function) bool { return f.Vendor != 0x10de }))
	}
	if len(h.GPUs) != gpus(before)+1 || len(h.GPUs) != gpus(changed) {
		t.Errorf("%d GPUs after adding one to %d", len(h.GPUs), gpus(before))
	}
}

// ACS is in the configuration space of ports with the capability, and can be switched.
func TestPortsHaveACS(t *testing.T) {
	inside.NamedTree(t, "two-nics")
	const port, gpu = "0000:17:00.0", "0000:18:00.0"
	control := func() string { return strings.TrimSpace(inside.Command(t, "setpci", "-s", port, "ECAP_ACS+6.W")) }
	if got := control(); got != "0000" {
		t.Errorf("ACS is on at %s: %s", port, got)
	}
	inside.Command(t, "setpci", "-s", port, "ECAP_ACS+6.W=001d")
	if got := control(); got != "001d" {
		t.Errorf("ACS at %s is %s after 001d was written", port, got)
	}
	if listed := inside.Command(t, "lspci", "-vvv", "-s", gpu); strings.Contains(listed, "Access Control Services") {
		t.Errorf("a GPU has ACS:\n%s", listed)
	}
}

func peerlane(t *testing.T, into any, arguments ...string) {
	t.Helper()
	out := inside.Command(t, filepath.Join(inside.Binaries, "peerlane"), append(arguments, "-o", "json")...)
	if err := json.Unmarshal([]byte(out), into); err != nil {
		t.Fatalf("peerlane %q: %v", arguments, err)
	}
}

// sameAsItsCapture requires that `peerlane topo` gives the same output for this kernel's /sys and
// for its capture, including paths, except the source.
func sameAsItsCapture(t *testing.T, file string) {
	t.Helper()
	capture := inside.Command(t, filepath.Join(inside.Binaries, "peerlane"), "topo", "capture")
	if err := os.WriteFile(file, []byte(capture), 0o600); err != nil {
		t.Fatal(err)
	}
	var live, replayed map[string]any
	peerlane(t, &live, "topo")
	peerlane(t, &replayed, "topo", "--input", file)
	if pairs, ok := live["pairs"].([]any); !ok || len(pairs) != 10*9/2 {
		t.Errorf("%d paths between 10 devices", len(pairs))
	}
	if diff := cmp.Diff(live["source"], replayed["source"]); diff == "" {
		t.Error("the capture was not read")
	}
	delete(live, "source")
	delete(replayed, "source")
	for _, nic := range live["nics"].([]any) { // a capture has no GIDs, on which these fields depend
		for _, port := range nic.(map[string]any)["ports"].([]any) {
			delete(port.(map[string]any), "guid")
		}
	}
	if diff := cmp.Diff(live, replayed); diff != "" {
		t.Errorf("topo (-live +capture):\n%s", diff)
	}
}

func TestPeerlaneNamesServersAndClients(t *testing.T) {
	twoNICs(t, inside.RoCE)
	var host topo.Host
	peerlane(t, &host, "topo")
	if len(host.GPUs) != 8 || len(host.NICs) != 2 {
		t.Fatalf("%d GPUs and %d NICs", len(host.GPUs), len(host.NICs))
	}
	for i, n := range host.NICs {
		want := topo.Port{
			Number: 1, State: "ACTIVE", PhysicalState: "LinkUp", LinkLayer: "Ethernet", RateGbps: 400,
			GUID: fmt.Sprintf("5054:00ff:fe70:0%d01", i),
		}
		if n.Name != fmt.Sprintf("mlx5_%d", i) || len(n.Ports) != 1 || n.Ports[0] != want {
			t.Errorf("NIC %d reads %+v", i, n)
		}
	}
	root := t.TempDir()
	testbed.UnmountAnchor(t, paths.New(root))
	sameAsItsCapture(t, filepath.Join(root, "host.tar.gz"))
	var plan planner.Plan
	peerlane(t, &plan, "plan", "--root", root)
	got := map[string]string{}
	for _, l := range plan.Lanes {
		got[l.GPU] = strings.Join(append([]string{l.Role, strings.Join(l.NICs, " ")}, l.Servers...), " ")
	}
	want := map[string]string{}
	for nic, gpus := range [][4]string{
		{"0000:18:00.0", "0000:19:00.0", "0000:3a:00.0", "0000:3b:00.0"},
		{"0000:9a:00.0", "0000:9b:00.0", "0000:ba:00.0", "0000:bb:00.0"},
	} {
		for i, gpu := range gpus {
			want[gpu] = fmt.Sprintf("%s mlx5_%d", planner.RoleNear, nic)
			if i >= 2 {
				want[gpu] = fmt.Sprintf("%s mlx5_%d %s %s", planner.RoleFar, nic, gpus[0], gpus[1])
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("lanes (-want +got):\n%s", diff)
	}
	specifications := filepath.Join(root, "cdi")
	inside.Command(t, filepath.Join(inside.Binaries, "peerlane"), "cdi", "generate", "--root", root, "--spec-dir",
		specifications)
	files, err := filepath.Glob(filepath.Join(specifications, "*lane*"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no specification of lanes in %s (%v)", specifications, err)
	}
	hooks := map[string]bool{}
	for _, file := range files {
		var s specs.Spec
		text, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(text, &s)
		}
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, d := range s.Devices {
			for _, h := range d.ContainerEdits.Hooks {
				hooks[h.Args[len(h.Args)-1]] = true
			}
		}
	}
	for _, g := range host.GPUs {
		if !hooks[g.UUID+"@"+g.BusID] {
			t.Errorf("no device calls the hook with %s@%s, but with %q", g.UUID, g.BusID, slices.Collect(maps.Keys(hooks)))
		}
	}
}

func TestTreesDecideRoleOfGPUs(t *testing.T) {
	for _, c := range []struct {
		tree string
		role string // the role of every GPU
	}{{"dgx", planner.RoleNear}, {"one-switch", planner.RoleNear}, {"no-switch", planner.RoleFar}} {
		t.Run(c.tree, func(t *testing.T) {
			tree := inside.NamedTree(t, c.tree)
			var devices []inside.Device
			for _, f := range tree.Functions() {
				if f.Vendor != 0x15b3 {
					continue
				}
				d := inside.Device{Name: fmt.Sprintf("mlx5_%d", len(devices)), Kind: inside.RoCE,
					Card: fmt.Sprintf("nic%d", len(devices)), Parent: f.Address}
				inside.Card(t, d.Card)
				devices = append(devices, d)
			}
			inside.RDMA(t, devices...)
			var plan planner.Plan
			peerlane(t, &plan, "plan", "--root", t.TempDir())
			if len(plan.Lanes) == 0 {
				t.Fatal("no lanes")
			}
			for _, l := range plan.Lanes {
				if l.Role != c.role {
					t.Errorf("%s is %s: %s", l.GPU, l.Role, l.Reason)
				}
			}
		})
	}
}

func TestRDMADevicesAreInTheTree(t *testing.T) {
	for _, kind := range []string{inside.RoCE, inside.IWARP} {
		t.Run(kind, func(t *testing.T) {
			twoNICs(t, kind)
			for device, function := range map[string]string{"mlx5_0": "0000:1a:00.0", "mlx5_1": "0000:9c:00.0"} {
				target, err := filepath.EvalSymlinks(filepath.Join("/sys/class/infiniband", device, "device"))
				if err != nil || filepath.Base(target) != function {
					t.Errorf("%s sits under %s (%v), not %s", device, target, err, function)
				}
				if got := inside.Port(t, device, "state"); !strings.HasSuffix(got, "ACTIVE") {
					t.Errorf("%s is %s", device, got)
				}
			}
			if out := inside.Command(t, "ibv_devinfo"); strings.Count(out, "PORT_ACTIVE") != 2 {
				t.Errorf("ibv_devinfo:\n%s", out)
			}
		})
	}
}

func TestPortShowsItsRate(t *testing.T) {
	twoNICs(t, inside.RoCE)
	for _, gbps := range []int{100, 200, 400} {
		inside.Command(t, "ethtool", "-s", "rail0", "speed", fmt.Sprint(gbps*1000), "duplex", "full")
		if got := inside.Port(t, "mlx5_0", "rate"); !strings.HasPrefix(got, fmt.Sprint(gbps)+" Gb/sec") {
			t.Errorf("%d Gb/s: the rate is %s", gbps, got)
		}
	}
}

func TestPortGoesDownAndUp(t *testing.T) {
	for _, kind := range []string{inside.RoCE, inside.IWARP} {
		t.Run(kind, func(t *testing.T) {
			twoNICs(t, kind)
			for _, plugged := range []bool{false, true} {
				inside.Plug(t, "rail1", plugged)
				want := map[bool]string{false: "DOWN", true: "ACTIVE"}[plugged]
				inside.Eventually(t, "mlx5_1 is "+want, func() (bool, string) {
					got := inside.Port(t, "mlx5_1", "state")
					return strings.HasSuffix(got, want), got
				})
				// The plan reports this too.
				var host topo.Host
				peerlane(t, &host, "topo")
				if got := host.NICs[1].Ports[0].State; got != want {
					t.Errorf("peerlane topo says %s, the kernel %s", got, want)
				}
			}
		})
	}
}

// The recorded host of `make test` equals this kernel's tree.
func TestRecordedHostMatchesKernel(t *testing.T) {
	twoNICs(t, inside.RoCE)
	got, err := recorded.Capture("/sys", "/proc")
	if err != nil {
		t.Fatal(err)
	}
	// make vm-capture copies this file.
	if err := os.WriteFile("/share/out/host.txt", []byte(got), 0o644); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("/source/topo/recorded/host.txt")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, []byte(got)) {
		t.Errorf("topo/recorded/host.txt differs from this kernel; rewrite the file with `make vm-capture` (-repository "+
			"+kernel):\n%s",
			cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")))
	}
}

func TestDemoVerifiesMessages(t *testing.T) {
	for _, name := range []string{demo.RuntimeRunc, demo.RuntimeCrun} {
		t.Run(name, func(t *testing.T) {
			var report demo.Report
			peerlane(t, &report, "demo", "--runtime", name, "--bytes", "32MiB")
			if !report.OK() || report.Runtime != name || !report.Simulated {
				t.Errorf("%s: %q %q", report.Runtime, report.Problems, report.Left)
			}
			for _, c := range report.Containers {
				if !c.Client.Verified || c.Client.VerifiedBytes < 32<<20 || c.Injected.PIDs == 0 {
					t.Errorf("container %s verified %d bytes and sees %d processes", c.Name, c.Client.VerifiedBytes, c.Injected.PIDs)
				}
			}
		})
	}
}
