package reader

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
	"github.com/peerlane/peerlane/topo/planner"
)

func TestRDMADeviceTypeSetsProtocol(t *testing.T) {
	files := map[string]string{}
	add := func(name, function, nodeType, layer string, attributes ...string) {
		topotest.Device(files, "pci0000:00/"+function, append([]string{"numa_node=0"}, attributes...)...)
		ib := "sys/devices/pci0000:00/" + function + "/infiniband/" + name
		files["sys/class/infiniband/"+name] = "-> ../../devices/pci0000:00/" + function + "/infiniband/" + name
		files[ib+"/device"] = "-> ../../../" + function
		files[ib+"/node_type"] = nodeType
		files[ib+"/ports/1/state"] = "4: ACTIVE"
		files[ib+"/ports/1/link_layer"] = layer
	}
	add("mlx5_0", "0000:00:04.0", "1: CA", "InfiniBand", "vendor=0x15b3")
	add("mlx5_1", "0000:00:04.1", "1: CA", "Ethernet", "vendor=0x15b3", "physfn=-> ../0000:00:04.0")
	add("mlx5_bond_0", "0000:00:05.0", "1: CA", "Ethernet", "vendor=0x15b3")
	add("irdma0", "0000:00:06.0", "4: RNIC", "Ethernet", "vendor=0x8086")
	add("erdma_0", "0000:00:07.0", "4: RNIC", "Ethernet", "vendor=0x1ded")
	add("rdmap0s8", "0000:00:08.0", "7: unspecified", "Unspecified", "vendor=0x1d0f")
	add("erdma_1", "0000:00:0a.0", "4: RNIC", "Ethernet", "driver=-> ../../../bus/pci/drivers/erdma")
	add("efa_0", "0000:00:0b.0", "7: unspecified", "Unspecified", "driver=-> ../../../bus/pci/drivers/efa")
	add("irdma1", "0000:00:0c.0", "1: CA", "Ethernet", "vendor=0x8086") // in RoCE mode
	// Software RDMA on a NIC, on a kernel that shows the NIC.
	add("rxe0", "0000:00:09.0", "1: CA", "Ethernet", "vendor=0x1af4")
	h := readTree(t, files)
	type kind struct {
		Name, Protocol, Of string
		Bond, Usable       bool
	}
	var got []kind
	for _, n := range h.NICs {
		got = append(got, kind{n.Name, n.Protocol, n.VirtualFunctionOf, n.Bond, n.Reason == "" && !n.Software &&
			n.BusID != ""})
	}
	want := []kind{
		{"efa_0", "EFA", "", false, false},
		{"erdma_0", "eRDMA", "", false, true},
		{"erdma_1", "eRDMA", "", false, true},
		{"irdma0", "iWARP", "", false, true},
		{"irdma1", "RoCE", "", false, true},
		{"mlx5_0", "InfiniBand", "", false, true},
		{"mlx5_1", "RoCE", "0000:00:04.0", false, true},
		{"mlx5_bond_0", "RoCE", "", true, true},
		{"rdmap0s8", "EFA", "", false, false},
		{"rxe0", "RoCE", "", false, true},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("kinds (-want +got):\n%s", diff)
	}
}

func TestIdleLinkKeepsMaximumBandwidth(t *testing.T) {
	files := map[string]string{}
	full := []string{topotest.GPUClass, topotest.GPUVendor, "numa_node=0", "max_link_speed=32.0 GT/s PCIe",
		"max_link_width=16"}
	topotest.Device(files, "pci0000:00/0000:00:01.0",
		append(full, "current_link_speed=2.5 GT/s PCIe", "current_link_width=16")...)
	topotest.Device(files, "pci0000:00/0000:00:02.0",
		append(full, "current_link_speed=Unknown", "current_link_width=0")...)
	h := readTree(t, files)
	if p := h.GPUs[0].Place; p.Link != 48 || p.LinkNow != 3 {
		t.Errorf("an idle GPU: %+v; want 48 GB/s, and 3 now", p)
	}
	if p := h.GPUs[1].Place; p.Link != 48 || p.LinkNow != 0 {
		t.Errorf("a link that tells nothing: %+v", p)
	}
}

func TestLinkWidthZeroMeansSixteenLanes(t *testing.T) {
	files := map[string]string{}
	topotest.Device(files, "pci0000:00/0000:00:01.0", "class=0x060400", "numa_node=0", "max_link_speed=16.0 GT/s PCIe",
		"max_link_width=4")
	topotest.Device(files, "pci0000:00/0000:00:01.0/0000:01:00.0", topotest.GPUClass, topotest.GPUVendor, "numa_node=0",
		"max_link_speed=32.0 GT/s PCIe", "max_link_width=0")
	if got := readTree(t, files).GPUs[0].Link; got != 24 {
		t.Errorf("%g GB/s; NCCL takes the lower speed and 16 lanes: 24", got)
	}
}

func TestGPUsOfOtherMakersFollowNVIDIA(t *testing.T) {
	files := map[string]string{}
	topotest.Device(files, "pci0000:00/0000:00:01.0", "class=0x120000", "vendor=0x1002", "numa_node=0")
	// a display without driver
	topotest.Device(files, "pci0000:00/0000:00:02.0", "class=0x030000", "vendor=0x1002", "numa_node=0")
	topotest.Device(files, "pci0000:00/0000:00:06.0", "class=0x030000", "vendor=0x1002", "numa_node=0",
		"driver=-> ../../../bus/pci/drivers/amdgpu")
	topotest.Device(files, "pci0000:00/0000:00:07.0", "class=0x038000", "vendor=0x1002", "numa_node=0")
	// an unknown accelerator
	topotest.Device(files, "pci0000:00/0000:00:08.0", "class=0x120000", "vendor=0x1234", "numa_node=0")
	topotest.Device(files, "pci0000:00/0000:00:03.0", "class=0x0b4000", "vendor=0x1d94", "numa_node=0")
	topotest.Device(files, "pci0000:00/0000:00:04.0", topotest.GPUClass, topotest.GPUVendor, "numa_node=0")
	topotest.Device(files, "pci0000:00/0000:00:05.0", "class=0x030000", "vendor=0x1a03", "numa_node=0") // of a BMC
	h := readTree(t, files)
	var got []string
	for i, g := range h.GPUs {
		if g.Index != i {
			t.Errorf("GPU %d has index %d", i, g.Index)
		}
		if (g.Reason == "") != (g.Vendor == "") {
			t.Errorf("GPU %d of %q: reason %q", i, g.Vendor, g.Reason)
		}
		got = append(got, g.BusID+" "+g.Vendor)
	}
	if diff := cmp.Diff([]string{"0000:00:04.0 ", "0000:00:01.0 AMD", "0000:00:03.0 Hygon", "0000:00:06.0 AMD",
		"0000:00:07.0 AMD"}, got); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
}

func TestSysfsBroadcomHalvesFormSwitch(t *testing.T) {
	files := map[string]string{}
	half := []string{"class=0x060400", "numa_node=0", "vendor=0x1000", "device=0xc010", "subsystem_vendor=0x1000",
		"subsystem_device=0xa096"}
	const port = "pci0000:00/0000:00:01.0"
	const upper, lower = port + "/0000:01:00.0", port + "/0000:01:00.0/0000:02:00.0/0000:03:00.0"
	for _, p := range []string{port, upper, upper + "/0000:02:00.0", lower, lower + "/0000:04:00.0",
		upper + "/0000:02:01.0"} {
		topotest.Device(files, p, half...)
	}
	topotest.Device(files, lower+"/0000:04:00.0/0000:05:00.0", topotest.GPUClass, topotest.GPUVendor, "numa_node=0")
	topotest.Device(files, upper+"/0000:02:01.0/0000:06:00.0", topotest.GPUClass, topotest.GPUVendor, "numa_node=0")
	h := readTree(t, files)
	if got := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), "0000:05:00.0", "0000:06:00.0"); got.Type != topo.PIX {
		t.Errorf("%+v; want PIX", got)
	}
	if got := ncclfile.PairOf(t, graph.All(h, topo.RulesSMI), "0000:05:00.0", "0000:06:00.0"); got.Type != topo.PXB {
		t.Errorf("nvidia-smi: %+v; want PXB", got)
	}
}

func TestFunctionsOfACardAreOneNIC(t *testing.T) {
	const up, port = "pci0000:10/0000:10:01.0/0000:11:00.0", "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0"
	files := map[string]string{}
	fast := []string{"numa_node=0", "max_link_speed=32.0 GT/s PCIe", "max_link_width=16"}
	for _, p := range []string{filepath.Dir(up), up, port, up + "/0000:12:01.0"} {
		topotest.Device(files, p, append(fast, "class=0x060400")...)
	}
	topotest.Device(files, up+"/0000:12:01.0/0000:14:00.0", append(fast, topotest.GPUClass, topotest.GPUVendor)...)
	nic := func(at, name string, attributes ...string) {
		topotest.Device(files, at, append([]string{"class=0x020700", "vendor=0x15b3", "numa_node=0"}, attributes...)...)
		topotest.RDMADevice(files, at, name, "state=4: ACTIVE", "rate=400 Gb/sec (4X NDR)")
	}
	narrow := []string{"max_link_speed=32.0 GT/s PCIe", "max_link_width=8"}
	nic(port+"/0000:13:00.0", "mlx5_0", narrow...)
	nic(port+"/0000:13:00.1", "mlx5_1", narrow...)
	nic(port+"/0000:13:08.2", "mlx5_2", "physfn=-> ../0000:13:00.1", "max_link_speed=Unknown", "max_link_width=0")
	// Virtual functions that a virtual machine was given, side by side.
	topotest.Device(files, "pci0000:10/0000:10:00.0", "class=0x060000", "numa_node=0")
	nic("pci0000:10/0000:10:05.0", "mlx5_3")
	nic("pci0000:10/0000:10:06.0", "mlx5_4")
	nic("pci0000:10/0000:10:07.1", "mlx5_5") // without a first function
	o := topotest.Tree(t, files)
	h, err := Sysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	cards := map[string]string{}
	for _, n := range h.NICs {
		if n.Card != "" {
			cards[n.Name] = n.Card
		}
	}
	if diff := cmp.Diff(map[string]string{"mlx5_1": "0000:13:00.0", "mlx5_2": "0000:13:00.0"}, cards); diff != "" {
		t.Errorf("cards (-want +got):\n%s", diff)
	}
	if len(h.NICs) != 6 {
		t.Fatalf("%d NICs, %q", len(h.NICs), h.Notes)
	}
	if n := h.NICs[2]; n.BusID != "0000:13:08.2" || n.Link != 24 {
		t.Errorf("a virtual function has the card's link: %+v", n)
	}
	for _, c := range []struct {
		rules topo.Rules
		other string
		want  topo.Path
	}{
		{topo.RulesNCCL, "mlx5_1", topo.Path{Type: topo.LOC, Bandwidth: 50}},
		{topo.RulesNCCL, "mlx5_2", topo.Path{Type: topo.LOC, Bandwidth: 50}},
		{topo.RulesNCCL, "mlx5_3", topo.Path{Type: topo.PHB, Bandwidth: 12}},
		{topo.RulesSMI, "mlx5_1", topo.Path{Type: topo.PIX, Bandwidth: 50}},
		{topo.RulesSMI, "mlx5_2", topo.Path{Type: topo.PIX, Bandwidth: 50}},
	} {
		got := ncclfile.PairOf(t, graph.All(h, c.rules), "mlx5_0", c.other)
		if got.Path != c.want || c.want.Type == topo.LOC && got.Reason != "they are PCI functions of one card" {
			t.Errorf("%s: mlx5_0 to %s is %+v, want %+v", c.rules, c.other, got, c.want)
		}
	}
	if got := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), "mlx5_3", "mlx5_4"); got.Type != topo.PHB {
		t.Errorf("two cards of a virtual machine: %+v", got)
	}
	for _, name := range []string{"mlx5_0", "mlx5_1", "mlx5_2"} {
		if got := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), "0000:14:00.0",
			name); got.Path != (topo.Path{Type: topo.PIX, Bandwidth: 24}) {
			t.Errorf("the GPU to %s: %+v", name, got)
		}
	}
	sameHost(t, o)
}

func TestBondFollowsInterfaceOfFirstGID(t *testing.T) {
	files := map[string]string{
		"sys/devices/virtual/net/bond0/bonding/slaves": "eth0 eth1",
		"sys/class/net/bond0":                          "-> ../../devices/virtual/net/bond0",
		"sys/class/net/bond1/bonding/slaves":           "eth2 eth3", // a kernel without sysfs links
		"sys/class/net/enxa088c2a140e0/address":        "a0:88:c2:a1:40:e0",
		"sys/elsewhere/bonding/slaves":                 "",
	}
	for i, c := range []struct{ name, gid string }{
		{"rocep1", "bond0"},
		{"member0", "bond1"}, {"member1", "bond1"}, // members are separate devices
		{"plain", "enxa088c2a140e0"}, {"none", ""}, {"hostile", "../../elsewhere"}, {"dots", ".."}, {"mlx5_bond_0", "bond9"},
	} {
		at := fmt.Sprintf("pci0000:00/0000:00:%02x.0", i+1)
		topotest.Device(files, at, "class=0x020000", "vendor=0x15b3", "numa_node=0")
		topotest.RDMADevice(files, at, c.name, "gid_attrs/ndevs/0="+c.gid)
	}
	o := topotest.Tree(t, files)
	h, err := Sysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	var bonds []string
	for _, n := range h.NICs {
		if n.Bond {
			bonds = append(bonds, n.Name)
		}
	}
	if diff := cmp.Diff([]string{"mlx5_bond_0", "rocep1"}, bonds); diff != "" {
		t.Errorf("bonds (-want +got):\n%s", diff)
	}
	sameHost(t, o)
	for name, text := range members(t, capture(t, o)) {
		for _, secret := range []string{"enx", "a0:88", "eth0", "elsewhere", "bond9"} {
			if strings.Contains(name+text, secret) {
				t.Errorf("%s of a capture has %q: %s", name, secret, text)
			}
		}
	}
}

func TestPortThatIsDownIsInactive(t *testing.T) {
	files := map[string]string{}
	for i, state := range []string{"1: DOWN", "2: INIT", "3: ARMED", "4: ACTIVE", "5: ACTIVE_DEFER"} {
		at := fmt.Sprintf("pci0000:00/0000:00:%02x.0", i+1)
		topotest.Device(files, at, "class=0x020000", "vendor=0x15b3", "numa_node=0")
		topotest.RDMADevice(files, at, fmt.Sprint("mlx5_", i), "state="+state, "rate=100 Gb/sec (4X EDR)")
	}
	topotest.Device(files, "pci0000:00/0000:00:10.0", topotest.GPUClass, topotest.GPUVendor, "numa_node=0")
	h := readTree(t, files)
	var active []bool
	for _, n := range h.NICs {
		active = append(active, n.Active())
		if n.Protocol != "RoCE" {
			t.Errorf("a device with a port that is down has no protocol: %+v", n)
		}
	}
	if diff := cmp.Diff([]bool{false, false, false, true, false}, active); diff != "" {
		t.Errorf("active (-want +got):\n%s", diff)
	}
	plan, err := planner.Make(h, planner.Config{})
	if err != nil || len(plan.Lanes) != 1 || !slices.Equal(plan.Lanes[0].NICs, []string{"mlx5_3"}) {
		t.Errorf("%+v, %v; want one lane, on mlx5_3", plan, err)
	}
}

func TestSysfsBroadcomLinksBecomePeers(t *testing.T) {
	files := map[string]string{
		"sys/devices/system/node/node0/cpulist": "0", "sys/devices/system/node/node1/cpulist": "1",
		"sys/" + switchLinks + "/0000:11:00.0/0000:21:00.0":   "",
		"sys/" + switchLinks + "/0000:11:00.0/0000:99:00.0":   "", // which is not there
		"sys/" + switchLinks + "/0000:11:00.0/number_of_x":    "",
		"sys/" + switchLinks + "/0000:21:00.0/0000:11:00.0/a": "",
		"sys/" + switchLinks + "/0000:31:00.0/0000:11:00.0":   "",
		"sys/" + switchRefresh:                                "1",
	}
	for i, vendor := range []string{"0x1000", "0x1000", "0x10b5"} {
		root := fmt.Sprintf("pci0000:%d0/0000:%d0:01.0", i+1, i+1)
		up := fmt.Sprintf("%s/0000:%d1:00.0", root, i+1)
		port := fmt.Sprintf("%s/0000:%d2:00.0", up, i+1)
		numa := fmt.Sprint("numa_node=", i%2)
		for _, p := range []string{root, up, port} {
			topotest.Device(files, p, "class=0x060400", "vendor="+vendor, numa)
		}
		topotest.Device(files, fmt.Sprintf("%s/0000:%d3:00.0", port, i+1), topotest.GPUClass, topotest.GPUVendor, numa)
	}
	o := topotest.Tree(t, files)
	h, err := Sysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	peers := map[string][]string{}
	for _, s := range h.Switches {
		peers[s.BusID] = s.Peers
	}
	if diff := cmp.Diff(map[string][]string{"0000:11:00.0": {"0000:21:00.0"}, "0000:21:00.0": {"0000:11:00.0"},
		"0000:31:00.0": nil}, peers); diff != "" {
		t.Errorf("peers (-want +got):\n%s", diff)
	}
	if got := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), "0000:13:00.0", "0000:23:00.0"); got.Type != topo.PXB {
		t.Errorf("%+v; want PXB and not SYS", got)
	}
	sameHost(t, o)
}
