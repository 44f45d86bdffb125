package virtualswitch

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
	"github.com/peerlane/peerlane/topo/internal/topotest/kernelhost"
	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
	"github.com/peerlane/peerlane/topo/ncclxml"
	"github.com/peerlane/peerlane/topo/planner"
)

// fourGPUs has a GPU near the NIC, an NVLink peer of the near GPU, a distant GPU, and a GPU
// with MIG. A synthetic bridge occupies the first address of virtual bridges.
func fourGPUs(t *testing.T) *topo.Host {
	t.Helper()
	h := ncclfile.ReadXML(t, `<system version="1"><cpu numaid="0" affinity="f" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
		<pci busid="ffff:ff:01.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
			<pci busid="0000:02:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="90" gdr="1"><nvlink target="0000:04:00.0" count="4" tclass="0x030200"/></gpu></pci>
			<pci busid="0000:03:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"><nic>
				<net name="mlx5_0" dev="0" speed="100000" port="2" guid="0x1234" gdr="1"/></nic></pci>
			<pci busid="0000:05:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16"><gpu dev="3" sm="90" gdr="1"/></pci>
		</pci>
		<pci busid="0000:04:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="4"><gpu dev="1" sm="90" gdr="1"><nvlink target="0000:02:00.0" count="4" tclass="0x030200"/></gpu></pci>
		</cpu><cpu numaid="1" affinity="f0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
		<pci busid="0000:81:00.0" class="0x060400" vendor="0x104c" device="0x8232" link_speed="32.0 GT/s PCIe" link_width="16">
			<pci busid="0000:82:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="2" sm="90" gdr="1"/></pci>
		</pci></cpu></system>`)
	h.GPUs[3].MIG = true
	h.Judge()
	return h
}

func virtual(t *testing.T, h *topo.Host, c planner.Config) (*topo.Host, string) {
	t.Helper()
	plan, err := planner.Make(h, c)
	if err != nil {
		t.Fatal(err)
	}
	v, err := New(h, plan)
	if err != nil {
		t.Fatal(err)
	}
	text, err := ncclxml.Write(v)
	if err != nil {
		t.Fatal(err)
	}
	ncclfile.ReadAsNCCLDoes(t, string(text))
	return ncclfile.ReadXML(t, string(text)), string(text)
}

func TestEveryGPUIsBesideItsVirtualNIC(t *testing.T) {
	h := fourGPUs(t)
	v, text := virtual(t, h, planner.Config{})
	var names []string
	for _, n := range v.NICs {
		names = append(names, n.Name)
		if n.Link != 48 || n.GUID != "0x1234" || len(n.Ports) != 1 || n.Ports[0] != (topo.Port{Number: 2, RateGbps: 100}) {
			t.Errorf("%s is %+v, want link, GUID, port and rate of mlx5_0", n.Name, n)
		}
	}
	if !slices.Equal(names, []string{"peerlane_0", "peerlane_1", "peerlane_2"}) {
		t.Fatalf("virtual NICs %q", names)
	}
	for g, bandwidth := range []float64{12.5, 6, 12.5} { // the port, or the GPU's link
		for n := range v.NICs {
			got, err := graph.Between(v, v.GPUs[g].BusID, v.NICs[n].Name)
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case g == n && got != topo.Path{Type: topo.PIX, Bandwidth: bandwidth}:
				t.Errorf("GPU %d and its NIC: %v, want PIX at %g", g, got, bandwidth)
			case g != n && got.Type <= topo.PIX:
				t.Errorf("GPU %d and %s of another: %v", g, v.NICs[n].Name, got)
			}
		}
	}
	if !strings.Contains(text, "<!-- GPU 3 (0000:05:00.0) has no virtual NIC: MIG is on") {
		t.Errorf("no note explains why GPU 3 has no NIC:\n%s", text)
	}
}

func TestVirtualNICsHaveAddressesOfTheirOwn(t *testing.T) {
	h := fourGPUs(t)
	_, text := virtual(t, h, planner.Config{})
	seen := map[string]bool{}
	for line := range strings.Lines(text) {
		_, rest, isPCI := strings.Cut(line, `<pci busid="`)
		if !isPCI {
			continue
		}
		address, _, _ := strings.Cut(rest, `"`)
		if seen[address] {
			t.Errorf("two devices at %s", address)
		}
		seen[address] = true
	}
	for _, address := range []string{"ffff:ff:01.0", "ffff:ff:02.0", "ffff:fe:02.0", "ffff:ff:04.0", "ffff:fe:04.0"} {
		if !seen[address] {
			t.Errorf("nothing at %s, of %v", address, seen)
		}
	}
	if seen["ffff:fe:01.0"] || seen["0000:03:00.0"] {
		t.Error("the address beside a bridge that was there before is used, or the physical NIC is there")
	}
}

// Lanes that reach only this host need no NIC. NCCL limits the virtual NIC by the PCIe links
// between NIC and GPU; other paths of the GPUs stay unchanged.
func TestLocalSwitchIsAsFastAsTheLinksOfTheGPU(t *testing.T) {
	h := fourGPUs(t)
	h.NICs = nil
	h.GPUs[2].NVLinks = []topo.NVLink{{Count: 18}} // to NVSwitches
	plan, err := planner.Make(h, planner.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if v, err := New(h, plan); err != nil || len(v.NICs) != 0 {
		t.Errorf("a lane to other hosts has a virtual NIC without a physical NIC: %+v, %v", v.NICs, err)
	}
	v, err := newLocal(h, plan)
	if err != nil {
		t.Fatal(err)
	}
	lanes := 0
	for i, l := range plan.Lanes {
		g := v.GPUs[i]
		n := slices.IndexFunc(v.NICs, func(n topo.NIC) bool { return n.Switch == g.Switch })
		if l.Role == planner.RoleRefused {
			if n >= 0 {
				t.Errorf("GPU %d, which is refused, has %s", i, v.NICs[n].Name)
			}
			continue
		}
		lanes++
		if n < 0 {
			t.Fatalf("GPU %d has no virtual NIC", i)
		}
		want := max(float64(PeerMbps(h.GPUs[i]))/8000, h.GPUs[i].Link)
		if got := bandwidths.PCIe(v.NICs[n].LinkSpeed, v.NICs[n].LinkWidth); got < want || got > want+3 {
			t.Errorf("%s: %v GB/s, want %v", v.NICs[n].Name, got, want)
		}
		if got := bandwidths.PCIe(g.LinkSpeed, g.LinkWidth); got < want || got > want+3 {
			t.Errorf("GPU %d: %v GB/s to its bridge, want %v", i, got, want)
		}
		bridge := v.Switches[slices.IndexFunc(v.Switches, func(s topo.Switch) bool { return s.BusID == g.Switch })]
		if bridge.Link != h.GPUs[i].Link || bridge.Switch != h.GPUs[i].Switch {
			t.Errorf("the bridge of GPU %d is %+v, want the GPU's place %+v", i, bridge.Place, h.GPUs[i].Place)
		}
	}
	if lanes < 3 {
		t.Errorf("%d lanes", lanes)
	}
	text, err := ContainerXML(plan, []string{h.GPUs[2].BusID}, true)
	if err != nil {
		t.Fatal(err)
	}
	ncclfile.ReadAsNCCLDoes(t, string(text))
	// 18 links of 20.6 GB/s.
	if c := ncclfile.ReadXML(t, string(text)); len(c.NICs) != 1 || c.NICs[0].Name != "peerlane_2" || c.NICs[0].Link < 370 {
		t.Errorf("a container has the NICs %+v of\n%s", c.NICs, text)
	}
}

func TestVirtualSwitchKeepsThePathsBetweenGPUs(t *testing.T) {
	h := fourGPUs(t)
	v, _ := virtual(t, h, planner.Config{})
	for a, from := range h.GPUs {
		for b, to := range h.GPUs {
			before, err := graph.Between(h, from.BusID, to.BusID)
			if err != nil {
				t.Fatal(err)
			}
			after, err := graph.Between(v, v.GPUs[a].BusID, v.GPUs[b].BusID)
			if err != nil {
				t.Fatal(err)
			}
			if before.Type == topo.PIX {
				before.Type = topo.PXB
			}
			if a != b && after != before {
				t.Errorf("GPU %d to %d: %v, and without virtual NICs %v", a, b, after, before)
			}
		}
	}
}

// NCCL asks the host for missing values of switches. The answers of ranks differ, and the
// merged topology then has a switch twice.
func TestVirtualSwitchStatesAllValuesOfSwitches(t *testing.T) {
	_, text := virtual(t, fourGPUs(t), planner.Config{})
	for line := range strings.Lines(text) {
		if !strings.Contains(line, `class="0x060400"`) {
			continue
		}
		for _, attribute := range []string{"vendor", "device", "subsystem_vendor", "subsystem_device", "link_speed",
			"link_width"} {
			if !strings.Contains(line, " "+attribute+`="`) {
				t.Errorf("no %s in %s", attribute, line)
			}
		}
	}
}

func TestVirtualNICOfUnknownNICHasLinkOfGPU(t *testing.T) {
	v, text := virtual(t, fourGPUs(t), planner.Config{Lanes: []planner.Assignment{{GPU: "2", Servers: []string{"0"},
		NICs: []string{"emulated0"}}}})
	if n := v.NICs[2]; n.Name != "peerlane_2" || n.GUID != "" || n.RateGbps() != 0 || n.Link != 48 {
		t.Errorf("%+v; want the GPU's link: the physical NIC is unknown", n)
	}
	if !strings.Contains(text, "emulated0 is not in the topology") {
		t.Errorf("no comment says so:\n%s", text)
	}
}

func TestVirtualSwitchOfManyGPUsHasDistinctAddresses(t *testing.T) {
	h := fourGPUs(t)
	for i := range 100 {
		h.GPUs = append(h.GPUs, topo.GPU{BusID: fmt.Sprintf("0001:%02x:00.0", i), Index: 4 + i, Place: topo.Place{Link: 48}})
	}
	plan, err := planner.Make(h, planner.Config{})
	if err != nil {
		t.Fatal(err)
	}
	v, err := New(h, plan)
	if err != nil {
		t.Fatal(err)
	}
	if len(v.NICs) != 103 {
		t.Errorf("%d virtual NICs for 104 GPUs, want 103: a GPU is refused", len(v.NICs))
	}
	seen := map[string]bool{}
	for _, n := range v.NICs {
		if seen[n.BusID] {
			t.Errorf("two virtual NICs are at %s", n.BusID)
		}
		seen[n.BusID] = true
	}
	_, err = ncclxml.Write(v)
	if e, ok := errors.AsType[*ncclxml.SizeError](err); !ok || e.Elements <= 255 {
		t.Errorf("%v; NCCL has no room for so many", err)
	}
}

// The conversion of a kernel's host to NCCL's values happens once.
func TestVirtualNICHasThePortThatNCCLCounts(t *testing.T) {
	h := kernelhost.KernelsHost(t)
	v, _ := virtual(t, h, planner.Config{Lanes: []planner.Assignment{{GPU: "0", NICs: []string{"mlx5_1"}}}})
	if n := v.NICs[0]; n.GUID != "0xe040a10003c288a0" || n.Ports[0] != (topo.Port{Number: 2, RateGbps: 100}) {
		t.Errorf("%+v; NCCL counts the second function of a card as its second port", n)
	}
	// NICOf returns the NIC that a relay reports to the plugin.
	p, err := planner.Make(h, planner.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]NIC{"mlx5_1": {GUID: 0xe040a10003c288a0, Mbps: 100000, Port: 2}, "none": {}} {
		if got := NICOf(p, name); got != want {
			t.Errorf("the plan has %s as %+v, want %+v", name, got, want)
		}
	}
	if c := v.CPUs[0]; c.Family != 175 {
		t.Errorf("family %d, want 175", c.Family)
	}
}

func TestVirtualSwitchNotesExplainNames(t *testing.T) {
	h := fourGPUs(t)
	h.Notes = []string{"a note of the host"}
	plan, err := planner.Make(h, planner.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		make  func(*topo.Host, *planner.Plan) (*topo.Host, error)
		begin string
	}{
		"lanes to other hosts":   {New, "The virtual switch of Peerlane: peerlane_N stands for the physical NIC"},
		"lanes within this host": {newLocal, "The virtual switch of Peerlane: peerlane_N is the lane of GPU N to the other"},
	} {
		v, err := c.make(h, plan)
		if err != nil {
			t.Fatal(err)
		}
		if len(v.Notes) != 3 || !strings.HasPrefix(v.Notes[0], c.begin) || v.Notes[2] != h.Notes[0] {
			t.Errorf("%s: notes %q", name, v.Notes)
		}
		for _, n := range v.NICs {
			if n.Device != (topo.PCIIdentity{Class: ncclxml.ClassEthernet, Vendor: "0x0000", Device: "0x0000",
				SubsystemVendor: "0x0000", SubsystemDevice: "0x0000"}) {
				t.Errorf("%s: %s is %+v", name, n.Name, n.Device)
			}
		}
	}
}

func TestFreeAddressesSkipDevicesAndPeers(t *testing.T) {
	h := &topo.Host{
		Switches: []topo.Switch{{Place: topo.Place{}, BusID: "ffff:ff:01.0", Peers: []string{"ffff:ff:02.0"}}},
		GPUs:     []topo.GPU{{BusID: "ffff:fe:03.0", NVLinks: []topo.NVLink{{Peer: "ffff:ff:04.0"}}}},
		NICs:     []topo.NIC{{BusID: "ffff:fe:05.0"}},
	}
	free := freeAddresses(h)
	var bridges, nics []string
	for {
		bridge, nic, ok := free()
		if !ok {
			break
		}
		bridges, nics = append(bridges, bridge), append(nics, nic)
	}
	if len(bridges) != 128*31-5 {
		t.Fatalf("%d addresses, want %d", len(bridges), 128*31-5)
	}
	for i, want := range map[int][2]string{
		0: {"ffff:ff:06.0", "ffff:fe:06.0"}, 25: {"ffff:ff:1f.0", "ffff:fe:1f.0"}, 26: {"ffff:fd:01.0", "ffff:fc:01.0"},
		len(bridges) - 1: {"ffff:01:1f.0", "ffff:00:1f.0"},
	} {
		if got := [2]string{bridges[i], nics[i]}; got != want {
			t.Errorf("address %d: %v, want %v", i, got, want)
		}
	}
}

func TestNICOfRateOutsideLimitsIsUnknown(t *testing.T) {
	for rate, want := range map[float64]uint32{-1: 0, 0: 0, 0.001: 1, 100: 100000, 999999.999: 999999999, 1e6: 0, 1e9: 0} {
		p := &planner.Plan{NICs: []topo.NIC{{Name: "mlx5_0", Ports: []topo.Port{{Number: 1, RateGbps: rate}}}}}
		p.Source.Kind = topo.SourceNCCLXML
		if got := NICOf(p, "mlx5_0"); got.Mbps != want || got.Port != 1 {
			t.Errorf("%g Gb/s: %+v, want %d Mb/s of port 1", rate, got, want)
		}
	}
}

func TestPeerMbpsFollowsNVLinks(t *testing.T) {
	for _, c := range []struct {
		g    topo.GPU
		want uint32
	}{
		{topo.GPU{Capability: 90, NVLinks: []topo.NVLink{{Count: 18}}}, 2966400}, // 18 of 20.6 GB/s
		{topo.GPU{Capability: 80, NVLinks: []topo.NVLink{{Count: 4}, {Count: 8}}}, 1920000},
		{topo.GPU{Place: topo.Place{Link: 24}}, 192000},
		{topo.GPU{}, 0},
	} {
		if got := PeerMbps(c.g); got != c.want {
			t.Errorf("%+v: %d Mbit/s, want %d", c.g, got, c.want)
		}
	}
}
