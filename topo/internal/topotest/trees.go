package topotest

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo"
)

// RDMADevice adds an RDMA device with a port to a PCI function of files, a path below
// /sys/devices; attributes are of the port, "name=text".
func RDMADevice(files map[string]string, function, name string, attributes ...string) {
	dir := "sys/devices/" + function + "/infiniband/" + name
	files["sys/class/infiniband/"+name] = "-> ../../devices/" + function + "/infiniband/" + name
	files[dir+"/device"] = "-> ../../../" + filepath.Base(function)
	files[dir+"/node_type"] = "1: CA"
	files[dir+"/ports/1/link_layer"] = "Ethernet"
	for _, a := range attributes {
		attribute, text, _ := strings.Cut(a, "=")
		files[dir+"/ports/1/"+attribute] = text
	}
}

// Tree writes a fake system: files by path, a text that begins with "-> " being
// a symbolic link. Tree returns options for reader.Sysfs.
func Tree(t *testing.T, files map[string]string) topo.Options {
	t.Helper()
	root := t.TempDir()
	for path, text := range files {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if target, ok := strings.CutPrefix(text, "-> "); ok {
			err = os.Symlink(target, path)
		} else {
			err = os.WriteFile(path, []byte(text+"\n"), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return topo.Options{Sysfs: filepath.Join(root, "sys"), Proc: filepath.Join(root, "proc")}
}

// Device adds a PCI device to files: its path below /sys/devices, then
// attributes as "name=text".
func Device(files map[string]string, path string, attributes ...string) {
	for _, a := range attributes {
		name, text, _ := strings.Cut(a, "=")
		files[filepath.Join("sys/devices", path, name)] = text
	}
	files["sys/bus/pci/devices/"+filepath.Base(path)] = "-> ../../../devices/" + path
}

const GPUClass, GPUVendor = "class=0x030200", "vendor=0x10de"

// VPD returns the vital product data of a ConnectX: a name and keywords.
func VPD(keywords ...string) string {
	large := func(tag byte, data []byte) []byte {
		return append(binary.LittleEndian.AppendUint16([]byte{tag}, uint16(len(data))), data...)
	}
	var ro []byte
	for _, k := range append([]string{"PN=MCX", "SN=MT2445X12345"}, keywords...) {
		name, value, _ := strings.Cut(k, "=")
		ro = append(append(append(ro, name...), byte(len(value))), value...)
	}
	data := append(large(0x82, []byte("ConnectX adapter")), large(0x90, ro)...)
	return string(append(append(data, large(0x91, []byte("V1\x00"))...), 0x78))
}

const gb300Card = "0b8f2b1e-3d5e-11ef-8000-b83fd2d6d2a%d"

// GB300 is a board with two GPUs, each below the switch of a ConnectX-8 with the
// NIC's Data Direct function, as rdma_topo of rdma-core expects it; the NICs' own
// functions are below other root ports.
func GB300(driver string) map[string]string {
	files := map[string]string{"sys/devices/system/node/node0/cpulist": "0-71",
		"sys/devices/system/node/node1/cpulist": "72-143"}
	fast := []string{"max_link_speed=64.0 GT/s PCIe", "max_link_width=16"}
	for i := range 2 {
		numa := "numa_node=" + string(rune('0'+i))
		at := func(path string, attributes ...string) {
			Device(files, strings.ReplaceAll(path, "DDDD", []string{"0008", "0018"}[i]),
				append(append(attributes, fast...), numa)...)
		}
		port := []string{"class=0x060400", "vendor=0x15b3", "device=0x197c"}
		const root = "pciDDDD:00/DDDD:00:00.0"
		const usp = root + "/DDDD:01:00.0"
		at(root, "class=0x060400", "vendor=0x10de", "device=0x22b1")
		at(usp, port...)
		at(usp+"/DDDD:02:00.0", port...)
		dma := []string{"class=0x080100", "vendor=0x15b3", "device=0x2100", "vpd=" +
			VPD("V3="+strings.ReplaceAll(gb300Card, "%d", string(rune('0'+i))))}
		if driver != "" {
			dma = append(dma, "driver=-> ../../../../../../bus/pci/drivers/"+driver)
		}
		at(usp+"/DDDD:02:00.0/DDDD:03:00.0", dma...)
		at(usp+"/DDDD:02:03.0", port...)
		at(usp+"/DDDD:02:03.0/DDDD:04:00.0", port...)
		at(usp+"/DDDD:02:03.0/DDDD:04:00.0/DDDD:05:00.0", port...)
		at(usp+"/DDDD:02:03.0/DDDD:04:00.0/DDDD:05:00.0/DDDD:06:00.0", GPUClass, GPUVendor)
		own := []string{"pci0000:00/0000:00:00.0", "pci0010:00/0010:00:00.0"}[i]
		Device(files, own, append(fast, "class=0x060400", "vendor=0x10de", "device=0x22b1", numa)...)
		nic := own + "/" + strings.Replace(filepath.Base(own), ":00:", ":03:", 1)
		Device(files, nic, append(fast[:1:1], "max_link_width=8", "class=0x020700", "vendor=0x15b3", "device=0x1023", numa,
			"vpd="+VPD("V3="+strings.ReplaceAll(gb300Card, "%d", string(rune('0'+i)))))...)
		RDMADevice(files, nic, []string{"mlx5_0", "mlx5_1"}[i], "state=4: ACTIVE", "rate=800 Gb/sec (4X XDR)")
		files["sys/devices/"+nic+"/infiniband/"+[]string{"mlx5_0",
			"mlx5_1"}[i]+"/sys_image_guid"] = []string{"a088:c203:00a1:0001", "a088:c203:00a1:0002"}[i]
	}
	return files
}
