package topo

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestKindsOfRDMADevices(t *testing.T) {
	files := map[string]string{}
	add := func(name, function, nodeType, layer string, attributes ...string) {
		device(files, "pci0000:00/"+function, append([]string{"numa_node=0"}, attributes...)...)
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
	// Software RDMA on a NIC, of a kernel that says which.
	add("rxe0", "0000:00:09.0", "1: CA", "Ethernet", "vendor=0x1af4")
	h := readTree(t, files)
	type kind struct {
		Name, Protocol, Of string
		Bond, Usable       bool
	}
	var got []kind
	for _, n := range h.NICs {
		got = append(got, kind{n.Name, n.Protocol, n.VirtualFunctionOf, n.Bond, n.Reason == "" && !n.Software && n.BusID != ""})
	}
	want := []kind{
		{"erdma_0", "eRDMA", "", false, true},
		{"irdma0", "iWARP", "", false, true},
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

func TestLinksCanDoMoreThanTheyDo(t *testing.T) {
	files := map[string]string{}
	full := []string{gpuClass, gpuVendor, "numa_node=0", "max_link_speed=32.0 GT/s PCIe", "max_link_width=16"}
	device(files, "pci0000:00/0000:00:01.0", append(full, "current_link_speed=2.5 GT/s PCIe", "current_link_width=16")...)
	device(files, "pci0000:00/0000:00:02.0", append(full, "current_link_speed=Unknown", "current_link_width=0")...)
	h := readTree(t, files)
	if p := h.GPUs[0].Place; p.Link != 48 || p.LinkNow != 3 {
		t.Errorf("an idle GPU: %+v; want 48 GB/s, and 3 now", p)
	}
	if p := h.GPUs[1].Place; p.Link != 48 || p.LinkNow != 0 {
		t.Errorf("a link that tells nothing: %+v", p)
	}
}

func TestWidthZeroStandsForSixteenLanes(t *testing.T) {
	files := map[string]string{}
	device(files, "pci0000:00/0000:00:01.0", "class=0x060400", "numa_node=0", "max_link_speed=16.0 GT/s PCIe", "max_link_width=4")
	device(files, "pci0000:00/0000:00:01.0/0000:01:00.0", gpuClass, gpuVendor, "numa_node=0", "max_link_speed=32.0 GT/s PCIe", "max_link_width=0")
	if got := readTree(t, files).GPUs[0].Link; got != 24 {
		t.Errorf("%g GB/s; NCCL takes the lower speed and 16 lanes: 24", got)
	}
}

func TestGPUsOfOtherMakersAreShownAfterNVIDIAs(t *testing.T) {
	files := map[string]string{}
	device(files, "pci0000:00/0000:00:01.0", "class=0x120000", "vendor=0x1002", "numa_node=0")
	device(files, "pci0000:00/0000:00:02.0", "class=0x030000", "vendor=0x1002", "numa_node=0") // a display without driver
	device(files, "pci0000:00/0000:00:03.0", "class=0x0b4000", "vendor=0x1d94", "numa_node=0")
	device(files, "pci0000:00/0000:00:04.0", gpuClass, gpuVendor, "numa_node=0")
	device(files, "pci0000:00/0000:00:05.0", "class=0x030000", "vendor=0x1a03", "numa_node=0") // of a BMC
	h := readTree(t, files)
	var got []string
	for i, g := range h.GPUs {
		if g.Index != i {
			t.Errorf("GPU %d has index %d", i, g.Index)
		}
		got = append(got, g.BusID+" "+g.Vendor)
	}
	if diff := cmp.Diff([]string{"0000:00:04.0 ", "0000:00:01.0 AMD", "0000:00:03.0 Hygon"}, got); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
}

func TestSysfsTellsSwitchPairsOfBroadcom(t *testing.T) {
	files := map[string]string{}
	half := []string{"class=0x060400", "numa_node=0", "vendor=0x1000", "device=0xc010", "subsystem_vendor=0x1000", "subsystem_device=0xa096"}
	const port = "pci0000:00/0000:00:01.0"
	const upper, lower = port + "/0000:01:00.0", port + "/0000:01:00.0/0000:02:00.0/0000:03:00.0"
	for _, p := range []string{port, upper, upper + "/0000:02:00.0", lower, lower + "/0000:04:00.0", upper + "/0000:02:01.0"} {
		device(files, p, half...)
	}
	device(files, lower+"/0000:04:00.0/0000:05:00.0", gpuClass, gpuVendor, "numa_node=0")
	device(files, upper+"/0000:02:01.0/0000:06:00.0", gpuClass, gpuVendor, "numa_node=0")
	h := readTree(t, files)
	if got := pairOf(t, h.Paths(RulesNCCL), "0000:05:00.0", "0000:06:00.0"); got.Type != PIX {
		t.Errorf("%+v; want PIX", got)
	}
	if got := pairOf(t, h.Paths(RulesSMI), "0000:05:00.0", "0000:06:00.0"); got.Type != PXB {
		t.Errorf("nvidia-smi: %+v; want PXB", got)
	}
}
