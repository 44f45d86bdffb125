package reader

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

func readTree(t *testing.T, files map[string]string) *topo.Host {
	t.Helper()
	h, err := Sysfs(topotest.Tree(t, files))
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestSysfsFindsGPUsByClassAndVendor(t *testing.T) {
	files := map[string]string{}
	const port = "pci0000:00/0000:00:01.0"
	topotest.Device(files, port, "class=0x060400", "vendor=0x8086")
	topotest.Device(files, port+"/0000:02:00.0", "class=0x030000", topotest.GPUVendor,
		"driver=-> ../../../../bus/pci/drivers/nvidia")
	topotest.Device(files, port+"/0000:02:00.1", "class=0x040300", topotest.GPUVendor) // the audio function of the GPU
	topotest.Device(files, "pci0000:00/0000:00:05.0", topotest.GPUClass, topotest.GPUVendor)
	topotest.Device(files, "pci0000:00/0000:00:06.0", "class=0x030000", "vendor=0x1a03")
	topotest.Device(files, "pci0000:00/0000:00:07.0", "class=0x068000", topotest.GPUVendor) // an NVSwitch
	topotest.Device(files, "pci0000:00/0000:00:08.0", topotest.GPUClass, topotest.GPUVendor,
		"driver=-> ../../../bus/pci/drivers/vfio-pci")
	topotest.Device(files, "pci10000:00/10000:00:01.0", topotest.GPUClass, topotest.GPUVendor)
	files["proc/driver/nvidia/gpus/0000:02:00.0/information"] = "Model: \t\t NVIDIA H200\nGPU UUID: \t " +
		"GPU-be79431d-799f-0a79-d1fe-60a2543bc9b7\nDevice Minor: \t 3"
	files["proc/driver/nvidia/gpus/0000:00:05.0/information"] = "Model: \t\t NVIDIA H200\nGPU UUID: \t " +
		"GPU-????????-????-????-????-????????????\nDevice Minor: \t 2"
	h := readTree(t, files)
	want := []topo.GPU{
		{Index: 0, BusID: "0000:00:05.0", Minor: 2, Name: "NVIDIA H200",
			Place: topo.Place{HostBridge: "pci0000:00", Link: 12}},
		{Index: 1, BusID: "0000:02:00.0", Minor: 3, Name: "NVIDIA H200", UUID: "GPU-be79431d-799f-0a79-d1fe-60a2543bc9b7",
			Place: topo.Place{HostBridge: "pci0000:00", Link: 12}},
		{Index: 2, BusID: "10000:00:01.0", Minor: -1, Place: topo.Place{HostBridge: "pci10000:00", Link: 12}},
	}
	if diff := cmp.Diff(want, h.GPUs, topotest.Plain); diff != "" {
		t.Error(diff)
	}
	notes := strings.Join(h.Notes, "\n")
	for _, part := range []string{"0000:00:08.0 is bound to driver vfio-pci", "GPU 10000:00:01.0: no "} {
		if !strings.Contains(notes, part) {
			t.Errorf("no note has %q: %q", part, h.Notes)
		}
	}
}

func TestSysfsEverySecondBridgeIsSwitch(t *testing.T) {
	const (
		port  = "pci0000:10/0000:10:01.0"
		upper = port + "/0000:11:00.0" // a switch, ..
		lower = upper + "/0000:12:00.0/0000:13:00.0"
		gpu   = lower + "/0000:14:00.0/0000:15:00.0"
		vmd   = "pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0"
	)
	files := map[string]string{
		"sys/devices/system/node/node0/cpulist":  "0-3",
		"sys/devices/system/node/node1/cpulist":  "4-7",
		"sys/devices/system/node/node10/cpulist": "8-11",
	}
	gen5, gen4 := "max_link_speed=32.0 GT/s PCIe", "max_link_speed=16.0 GT/s PCIe"
	bridge := []string{"class=0x060400", "numa_node=1", gen5, "max_link_width=16"}
	for _, path := range []string{port, upper, upper + "/0000:12:00.0", lower, lower + "/0000:14:00.0"} {
		topotest.Device(files, path, bridge...)
	}
	topotest.Device(files, gpu, topotest.GPUClass, topotest.GPUVendor, "numa_node=1", gen4, "max_link_width=8")
	topotest.Device(files, vmd, bridge...)
	topotest.Device(files, vmd+"/10000:e1:00.0", topotest.GPUClass, topotest.GPUVendor, "numa_node=0",
		"max_link_speed=Unknown", "max_link_width=255")
	h := readTree(t, files)
	wantSwitches := []topo.Switch{
		{BusID: "0000:11:00.0", NUMA: 1, Place: topo.Place{HostBridge: "pci0000:10", Link: 48}},
		{BusID: "0000:13:00.0", NUMA: 1, Place: topo.Place{HostBridge: "pci0000:10", Switch: "0000:11:00.0", Link: 48}},
	}
	if diff := cmp.Diff(wantSwitches, h.Switches, topotest.Plain); diff != "" {
		t.Error(diff)
	}
	wantCPUs := []topo.CPU{{NUMA: 0, CPUs: "0-3", Socket: 6}, {NUMA: 1, CPUs: "4-7", Socket: 6},
		{NUMA: 10, CPUs: "8-11", Socket: 6}}
	if diff := cmp.Diff(wantCPUs, h.CPUs, topotest.Plain); diff != "" {
		t.Error(diff)
	}
	if g := h.GPUs[0]; !cmp.Equal(g.Place, topo.Place{HostBridge: "pci0000:10", Switch: "0000:13:00.0", Link: 12},
		topotest.Plain) || g.NUMA != 1 {
		t.Errorf("under two switches, 16 GT/s and 8 lanes: %+v", g)
	}
	// The link of the device has no speed; the port above has a speed.
	if g := h.GPUs[1]; !cmp.Equal(g.Place, topo.Place{HostBridge: "pci10000:e0", Link: 48}, topotest.Plain) ||
		g.NUMA != 1 {
		t.Errorf("behind a VMD: %+v", g)
	}
}

func TestHostBridgeSeparatesPHBFromNODE(t *testing.T) {
	files := map[string]string{
		"sys/devices/system/node/node0/cpulist": "0-3",
		"sys/devices/system/node/node1/cpulist": "4-7",
		"proc/cpuinfo": "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: " +
			"207\n\nprocessor\t: 1\nmodel\t: 1",
	}
	fast := []string{topotest.GPUClass, topotest.GPUVendor, "max_link_speed=32.0 GT/s PCIe", "max_link_width=16"}
	topotest.Device(files, "pci0000:10/0000:10:01.0", append(fast, "numa_node=0")...)
	topotest.Device(files, "pci0000:10/0000:10:02.0", append(fast, "numa_node=0")...)
	topotest.Device(files, "pci0000:20/0000:20:01.0", append(fast, "numa_node=0")...)
	topotest.Device(files, "pci0000:80/0000:80:01.0", append(fast, "numa_node=1")...)
	topotest.Device(files, "pci0000:90/0000:90:01.0", append(fast, "numa_node=-1")...)
	h := readTree(t, files)
	for rules, second := range map[topo.Rules]topo.PathType{topo.RulesNCCL: topo.PHB, topo.RulesSMI: topo.NODE} {
		want := map[string]topo.Path{
			"0000:10:02.0": {Type: topo.PHB, Bandwidth: 48}, "0000:20:01.0": {Type: second, Bandwidth: 48},
			// 40: Emerald Rapids
			"0000:80:01.0": {Type: topo.SYS, Bandwidth: 40}, "0000:90:01.0": {Type: topo.SYS, Bandwidth: 40},
		}
		got := map[string]topo.Path{}
		for _, p := range graph.All(h, rules) {
			if p.From == "0000:10:01.0" {
				got[p.To] = p.Path
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("by the rules of %s (-want +got):\n%s", rules, diff)
		}
	}
	if notes := strings.Join(h.Notes, "\n"); !strings.Contains(notes, "GPU 0000:90:01.0 is at NUMA node -1") {
		t.Errorf("no note on the unknown node: %q", h.Notes)
	}
}

func TestUnknownNodeOnSingleNodeHostIsOnlyNode(t *testing.T) {
	files := map[string]string{"sys/devices/system/node/node0/cpulist": "0-31"}
	topotest.Device(files, "pci0000:00/0000:00:06.0", topotest.GPUClass, topotest.GPUVendor, "numa_node=-1")
	topotest.Device(files, "pci0000:00/0000:00:07.0", topotest.GPUClass, topotest.GPUVendor)
	h := readTree(t, files)
	if h.GPUs[0].NUMA != 0 || h.GPUs[1].NUMA != 0 || len(h.CPUs) != 1 {
		t.Errorf("%+v, nodes %+v", h.GPUs, h.CPUs)
	}
}

func TestSysfsRDMADevicesBecomeNICs(t *testing.T) {
	const (
		function = "pci0000:00/0000:00:04.0"
		ib       = "sys/devices/" + function + "/infiniband/"
		virtual  = "sys/devices/virtual/infiniband/"
	)
	files := map[string]string{
		"sys/class/infiniband/mlx5_10":             "-> ../../devices/" + function + "/infiniband/mlx5_10",
		ib + "mlx5_10/device":                      "-> ../../../0000:00:04.0",
		ib + "mlx5_10/node_guid":                   "a088:c203:00a1:40e0",
		ib + "mlx5_10/fw_ver":                      "28.39.1002",
		ib + "mlx5_10/ports/1/state":               "1: DOWN",
		ib + "mlx5_10/ports/1/phys_state":          "3: Disabled",
		ib + "mlx5_10/ports/1/lid":                 "0x0",
		ib + "mlx5_10/ports/1/sm_lid":              "0x0",
		ib + "mlx5_10/ports/1/gids/0":              "0000:0000:0000:0000:0000:0000:0000:0000",
		ib + "mlx5_10/ports/2/phys_state":          "5: LinkUp",
		ib + "mlx5_10/ports/2/lid":                 "0x1f",
		ib + "mlx5_10/ports/2/sm_lid":              "0x3",
		ib + "mlx5_10/ports/2/gids/0":              "fe80:0000:0000:0000:a088:c203:00a1:40e2",
		ib + "mlx5_10/ports/1/rate":                "10 Gb/sec (4X SDR)",
		ib + "mlx5_10/ports/1/link_layer":          "Ethernet",
		ib + "mlx5_10/ports/2/state":               "4: ACTIVE",
		ib + "mlx5_10/ports/2/rate":                "2.5 Gb/sec (1X SDR)",
		ib + "mlx5_10/ports/2/link_layer":          "InfiniBand",
		"sys/class/infiniband_verbs/uverbs7/ibdev": "mlx5_10",
		"sys/class/infiniband_verbs/abi_version":   "6",
		// A subfunction of a Mellanox NIC.
		"sys/class/infiniband/mlx5_9": "-> ../../devices/" +
			function + "/mlx5_core.sf.4/infiniband/mlx5_9",
		"sys/devices/" + function + "/mlx5_core.sf.4/infiniband/mlx5_9/device":        "-> ../../../mlx5_core.sf.4",
		"sys/devices/" + function + "/mlx5_core.sf.4/infiniband/mlx5_9/ports/1/state": "4: ACTIVE",
		// Software RDMA.
		"sys/class/infiniband/rxe0":    "-> ../../devices/virtual/infiniband/rxe0",
		virtual + "rxe0/parent":        "eth0",
		virtual + "rxe0/ports/1/state": "4: ACTIVE",
		"sys/class/infiniband/siw0":    "-> ../../devices/virtual/infiniband/siw0",
		virtual + "siw0/device/uevent": "",
		virtual + "siw0/ports/1/state": "4: ACTIVE",
	}
	topotest.Device(files, function, "class=0x020700", "vendor=0x15b3", "numa_node=0",
		"driver=-> ../../../bus/pci/drivers/mlx5_core")
	h := readTree(t, files)
	place := topo.Place{HostBridge: "pci0000:00", Link: 12}
	want := []topo.NIC{
		{Name: "mlx5_9", BusID: "0000:00:04.0", Driver: "mlx5_core", Place: place, Subfunction: "mlx5_core.sf.4",
			Ports: []topo.Port{{Number: 1, State: "ACTIVE"}}},
		{
			Name: "mlx5_10", BusID: "0000:00:04.0", Driver: "mlx5_core", Uverbs: "uverbs7", GUID: "a088:c203:00a1:40e0",
			Firmware: "28.39.1002", Place: place,
			Ports: []topo.Port{
				{Number: 1, State: "DOWN", PhysicalState: "Disabled", LinkLayer: "Ethernet", RateGbps: 10},
				{Number: 2, State: "ACTIVE", PhysicalState: "LinkUp", GUID: "a088:c203:00a1:40e2", LID: 31, SMLID: 3,
					LinkLayer: "InfiniBand", RateGbps: 2.5},
			}, Protocol: "InfiniBand",
		},
		{Name: "rxe0", Place: topo.Place{Link: bandwidths.Local}, Ports: []topo.Port{{Number: 1, State: "ACTIVE"}},
			Software: true},
		{Name: "siw0", Place: topo.Place{Link: bandwidths.Local}, Ports: []topo.Port{{Number: 1, State: "ACTIVE"}},
			Software: true},
	}
	if diff := cmp.Diff(want, h.NICs, topotest.Plain); diff != "" {
		t.Error(diff)
	}
	if len(h.Notes) != 2 || !strings.Contains(h.Notes[0], "rxe0") || !strings.Contains(h.Notes[1], "siw0") {
		t.Errorf("the notes do not say that rxe0 and siw0 are software: %q", h.Notes)
	}
	if got := h.NICs[1].RateGbps(); got != 2.5 {
		t.Errorf("a port that is down counts: %g Gbit/s", got)
	}
}

func TestSysfsEmptyTreeReadsAsHost(t *testing.T) {
	h := readTree(t, nil)
	if len(h.GPUs) != 0 || len(h.NICs) != 0 || len(h.CPUs) != 1 {
		t.Errorf("%+v", h)
	}
}

func TestSysfsBrokenTreeFails(t *testing.T) {
	for name, spoil := range map[string]func(files map[string]string){
		"a node number that is none": func(f map[string]string) { f["sys/devices/pci0000:00/0000:00:06.0/numa_node"] = "x" },
		"a directory for a file": func(f map[string]string) {
			f["proc/driver/nvidia/gpus/0000:00:06.0/information/x"] = ""
		},
		"a port that is no number": func(f map[string]string) {
			f["sys/devices/pci0000:00/0000:00:06.0/infiniband/a/ports/x/state"] = ""
		},
		"a link to no PCI device": func(f map[string]string) {
			f["sys/bus/pci/devices/0000:00:07.0"] = "-> ../../../devices/elsewhere"
			f["sys/devices/elsewhere/class"], f["sys/devices/elsewhere/vendor"] = "0x030200", "0x10de"
		},
	} {
		files := map[string]string{
			"sys/class/infiniband/a":                                  "-> ../../devices/pci0000:00/0000:00:06.0/infiniband/a",
			"sys/devices/pci0000:00/0000:00:06.0/infiniband/a/device": "-> ../../../0000:00:06.0",
		}
		topotest.Device(files, "pci0000:00/0000:00:06.0", topotest.GPUClass, topotest.GPUVendor)
		if _, err := Sysfs(topotest.Tree(t, files)); err != nil {
			t.Errorf("before %s: %v", name, err)
		}
		spoil(files)
		o := topotest.Tree(t, files)
		_, err := Sysfs(o)
		if f, ok := errors.AsType[*fault.Error](err); !ok || f.Object != o.Sysfs {
			t.Errorf("%s: %v; want an error that names %s", name, err, o.Sysfs)
		}
	}
}

func TestSysfsRelativeRootBecomesAbsolute(t *testing.T) {
	o := topotest.Tree(t, map[string]string{"sys/bus/pci/rescan": ""})
	t.Chdir(filepath.Dir(o.Sysfs))
	h, err := Sysfs(topo.Options{Sysfs: "sys", Proc: o.Proc})
	if err != nil {
		t.Fatal(err)
	}
	if h.Source.Sysfs != o.Sysfs {
		t.Errorf("%q, want %q", h.Source.Sysfs, o.Sysfs)
	}
}
