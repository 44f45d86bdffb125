package sandbox

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// A relay reads the PCI and InfiniBand devices, CPUs and memory, and the driver's modules, but not
// the control groups, interfaces and disks of the host.
func TestSysPathsListDevicesOnly(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{
		"devices/pci0000:00/0000:00:01.0/0000:01:00.0", "devices/platform/soc/pci10001:80/10001:80:00.0/infiniband/mlx5_0",
		"devices/virtual/infiniband/rxe0", "devices/virtual/infiniband_verbs/uverbs0", "devices/virtual/net/veth0",
		"devices/virtual/misc/rdma_cm", "devices/virtual/block/loop0",
		"devices/system/cpu/cpu0", "devices/system/node/node0", "devices/system/memory", "devices/system/container",
		"bus/pci/devices", "bus/virtio/devices", "class/infiniband", "class/infiniband_verbs", "class/net", "class/block",
		"class/misc",
		"module/nvidia", "module/nvidia_uvm", "module/nvidia_peermem", "module/overlay",
		"kernel/mm/transparent_hugepage", "kernel/slab", "kernel/security", "fs/cgroup/kubepods.slice", "fs/bpf",
		"firmware/acpi",
	} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{
		"bus/pci/devices/0000:01:00.0":   "../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0",
		"bus/pci/devices/0000:00:01.0":   "../../../devices/pci0000:00/0000:00:01.0",
		"bus/pci/devices/0000:09:00.0":   "../../../devices/pci0000:09/removed",
		"class/infiniband/mlx5_0":        "../../devices/platform/soc/pci10001:80/10001:80:00.0/infiniband/mlx5_0",
		"class/infiniband/rxe0":          "../../devices/virtual/infiniband/rxe0",
		"class/infiniband_verbs/uverbs0": "../../devices/virtual/infiniband_verbs/uverbs0",
		"class/misc/rdma_cm":             "../../devices/virtual/misc/rdma_cm",
		"class/net/veth0":                "../../devices/virtual/net/veth0",
	} {
		if err := os.Symlink(to, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	got := sysPaths(root)
	var want []string
	for _, path := range []string{
		"bus/pci", "class/infiniband", "class/infiniband_verbs", "class/misc/rdma_cm",
		"devices/pci0000:00", "devices/platform/soc/pci10001:80", "devices/virtual/infiniband/rxe0",
		"devices/virtual/infiniband_verbs/uverbs0",
		"devices/system/cpu", "devices/system/memory", "devices/system/node", "kernel/mm/transparent_hugepage",
		"module/nvidia", "module/nvidia_peermem", "module/nvidia_uvm",
	} {
		want = append(want, filepath.Join(root, path))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("the paths are\n%q, want\n%q", got, want)
	}
}
