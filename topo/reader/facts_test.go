package reader

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
)

// facts holds the values that topotest.Plain ignores.
type facts struct {
	CPU           topo.CPU
	Switch        topo.PCIIdentity
	GPU           topo.PCIIdentity
	GPUSpeed      string
	GPUWidth      int
	NIC           topo.PCIIdentity
	NICSystemGUID string
}

func factsOf(t *testing.T, h *topo.Host) facts {
	t.Helper()
	if len(h.CPUs) == 0 || len(h.Switches) == 0 || len(h.GPUs) == 0 || len(h.NICs) == 0 {
		t.Fatalf("something is missing in %+v", h)
	}
	g, n := h.GPUs[0], h.NICs[0]
	return facts{h.CPUs[0], h.Switches[0].Device, g.Device, g.LinkSpeed, g.LinkWidth, n.Device, n.SystemGUID}
}

func TestSysfsReadsIdentityOfDevices(t *testing.T) {
	const (
		port   = "pci0000:10/0000:10:01.0"
		upper  = port + "/0000:11:00.0"
		lower  = upper + "/0000:12:00.0"
		gpu    = lower + "/0000:13:00.0"
		nic    = lower + "/0000:14:00.0"
		ibPath = "sys/devices/" + nic + "/infiniband/mlx5_0/"
	)
	files := map[string]string{
		"sys/devices/system/node/node0/cpulist": "0-3",
		"proc/cpuinfo": "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: " +
			"17\n",
		"sys/class/infiniband/mlx5_0": "-> ../../devices/" + nic + "/infiniband/mlx5_0",
		ibPath + "device":             "-> ../../../0000:14:00.0",
		ibPath + "node_guid":          "a088:c203:00a1:40e1",
		ibPath + "sys_image_guid":     "a088:c203:00a1:40e0",
	}
	link := []string{"max_link_speed=32.0 GT/s PCIe", "max_link_width=16"}
	for _, path := range []string{port, upper, lower} {
		topotest.Device(files, path, append(link, "class=0x060400", "vendor=0x104c", "device=0x8232",
			"subsystem_vendor=0x1028", "subsystem_device=0x0001")...)
	}
	topotest.Device(files, gpu, topotest.GPUClass, topotest.GPUVendor, "device=0x2330", "subsystem_vendor=0x10de",
		"subsystem_device=0x16c1", "max_link_speed=16.0 GT/s PCIe", "max_link_width=8")
	topotest.Device(files, nic, append(link, "class=0x020000", "vendor=0x15b3", "device=0x1021", "subsystem_vendor=0x15b3",
		"subsystem_device=0x0041")...)
	want := facts{
		CPU: topo.CPU{CPUs: "0-3", Arch: "x86_64", Vendor: "AuthenticAMD", Family: 25, Model: 17, Socket: 16},
		Switch: topo.PCIIdentity{Class: "0x060400", Vendor: "0x104c", Device: "0x8232", SubsystemVendor: "0x1028",
			SubsystemDevice: "0x0001"},
		GPU: topo.PCIIdentity{Class: "0x030200", Vendor: "0x10de", Device: "0x2330", SubsystemVendor: "0x10de",
			SubsystemDevice: "0x16c1"},
		GPUSpeed: "16.0 GT/s PCIe",
		GPUWidth: 8,
		NIC: topo.PCIIdentity{Class: "0x020000", Vendor: "0x15b3", Device: "0x1021", SubsystemVendor: "0x15b3",
			SubsystemDevice: "0x0041"},
		NICSystemGUID: "a088:c203:00a1:40e0",
	}
	if diff := cmp.Diff(want, factsOf(t, readTree(t, files))); diff != "" {
		t.Errorf("facts (-want +got):\n%s", diff)
	}
}

func TestNCCLXMLReadsIdentityOfDevices(t *testing.T) {
	h := ncclfile.ReadXML(t, `<system version="1"><cpu numaid="0" affinity="00000003,0000ff00" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
		<pci busid="0000:01:00.0" class="0x060400" vendor="0x1000" device="0xc030" subsystem_vendor="0x1000" subsystem_device="0x0001">
			<pci busid="0000:02:00.0" class="0x030200" vendor="0x10de" device="0x2330" subsystem_vendor="0x10de" subsystem_device="0x16c1" link_speed="32.0 GT/s PCIe" link_width="8"/>
			<pci busid="0000:03:00.0" class="0x020700" vendor="0x15b3" device="0x1021" subsystem_vendor="0x15b3" subsystem_device="0x0041"/>
		</pci></cpu></system>`)
	want := facts{
		CPU: topo.CPU{CPUs: "8-15,32-33", Arch: "x86_64", Vendor: "GenuineIntel", Family: 6, Model: 143, Socket: 22},
		Switch: topo.PCIIdentity{Class: "0x060400", Vendor: "0x1000", Device: "0xc030", SubsystemVendor: "0x1000",
			SubsystemDevice: "0x0001"},
		GPU: topo.PCIIdentity{Class: "0x030200", Vendor: "0x10de", Device: "0x2330", SubsystemVendor: "0x10de",
			SubsystemDevice: "0x16c1"},
		GPUSpeed: "32.0 GT/s PCIe",
		GPUWidth: 8,
		NIC: topo.PCIIdentity{Class: "0x020700", Vendor: "0x15b3", Device: "0x1021", SubsystemVendor: "0x15b3",
			SubsystemDevice: "0x0041"},
	}
	if diff := cmp.Diff(want, factsOf(t, h)); diff != "" {
		t.Errorf("facts (-want +got):\n%s", diff)
	}
}

func TestHwlocReadsIdentityOfDevices(t *testing.T) {
	want := facts{
		CPU: topo.CPU{CPUs: "0", Arch: "x86_64", Vendor: "GenuineIntel", Family: 6, Model: 143, Socket: 22},
		Switch: topo.PCIIdentity{Class: "0x060400", Vendor: "0x1000", Device: "0xc030", SubsystemVendor: "0x0000",
			SubsystemDevice: "0x0000"},
		GPU: topo.PCIIdentity{Class: "0x030200", Vendor: "0x10de", Device: "0x2330", SubsystemVendor: "0x10de",
			SubsystemDevice: "0x16c1"},
		NIC: topo.PCIIdentity{Class: "0x020000", Vendor: "0x15b3", Device: "0x1021", SubsystemVendor: "0x15b3",
			SubsystemDevice: "0x0041"},
	}
	if diff := cmp.Diff(want, factsOf(t, readHwlocFile(t, recordedHwloc))); diff != "" {
		t.Errorf("facts (-want +got):\n%s", diff)
	}
}
