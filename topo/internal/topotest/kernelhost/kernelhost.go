package kernelhost

import (
	"path/filepath"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/reader"
)

// KernelsHost reads a host from sysfs: a dual-port card of two functions, a card of a second maker,
// software RDMA, a NIC without a link, a processor with an extended family, and a NUMA node without
// processors.
func KernelsHost(t *testing.T) *topo.Host {
	t.Helper()
	files := map[string]string{
		"sys/devices/system/node/node0/cpulist": "0-15,32-47",
		"sys/devices/system/node/node1/cpulist": "16-31",
		"sys/devices/system/node/node2/cpulist": "",
		"proc/cpuinfo": "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: " +
			"17\n",
	}
	const port, upper = "pci0000:10/0000:10:01.0", "pci0000:10/0000:10:01.0/0000:11:00.0"
	gen5 := []string{"max_link_speed=32.0 GT/s PCIe", "max_link_width=16", "numa_node=0"}
	for _, path := range []string{port, upper, upper + "/0000:12:00.0", upper + "/0000:12:01.0"} {
		topotest.Device(files, path, append(gen5, "class=0x060400", "vendor=0x104c", "device=0x8232",
			"subsystem_vendor=0x0000", "subsystem_device=0x0000")...)
	}
	topotest.Device(files, upper+"/0000:12:00.0/0000:13:00.0",
		append(gen5, topotest.GPUClass, topotest.GPUVendor, "device=0x2330")...)
	nics := map[string]string{
		"mlx5_0": upper + "/0000:12:01.0/0000:14:00.0",
		"mlx5_1": upper + "/0000:12:01.0/0000:14:00.1",
		"mlx5_2": "pci0000:80/0000:80:01.0",
	}
	states := map[string]string{"mlx5_0": "4: ACTIVE", "mlx5_1": "4: ACTIVE", "mlx5_2": "1: DOWN", "rxe0": "4: ACTIVE"}
	for name, path := range nics {
		topotest.Device(files, path, append(gen5, "class=0x020000", "vendor=0x15b3", "device=0x101d")...)
		files["sys/class/infiniband/"+name] = "-> ../../devices/" + path + "/infiniband/" + name
		files["sys/devices/"+path+"/infiniband/"+name+"/device"] = "-> ../../../" + filepath.Base(path)
	}
	nics["rxe0"] = "virtual"
	files["sys/class/infiniband/rxe0"] = "-> ../../devices/virtual/infiniband/rxe0"
	for name, path := range nics {
		at := "sys/devices/" + path + "/infiniband/" + name
		files[at+"/node_guid"] = "a088:c203:00a1:40e" + name[len(name)-1:]
		files[at+"/sys_image_guid"] = "a088:c203:00a1:40e0"
		files[at+"/ports/1/state"] = states[name]
		files[at+"/ports/1/rate"] = "100 Gb/sec (4X EDR)"
	}
	o := topotest.Tree(t, files)
	o.NVML = answer{{BusID: "0000:13:00.0", Minor: 0, Capability: 90, NVLinks: map[string]int{"": 18}}}
	h, err := reader.Sysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	h.Notes = []string{"a note -- with dashes ---"}
	return h
}

// answer is a fake NVML with the listed GPUs.
type answer []topo.NVMLGPU

func (a answer) GPUs() ([]topo.NVMLGPU, error) { return a, nil }
