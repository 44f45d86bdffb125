package reader

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

// expressSpace is the configuration space of a function with the PCI Express capability: flags,
// Link Capabilities and, if acs is not empty, the extended capability for ACS.
func expressSpace(flags uint16, link, link2, slot uint32, acs ...uint16) []byte {
	config := make([]byte, 4096)
	config[configStatus], config[configCapabilities] = statusCapabilities, 0x60
	config[0x60], config[0x61] = 0x05, 0x80 // MSI comes first
	config[0x80] = capabilityPCIExpress
	binary.LittleEndian.PutUint16(config[0x82:], flags)
	binary.LittleEndian.PutUint32(config[0x8c:], link)
	binary.LittleEndian.PutUint32(config[0x94:], slot)
	binary.LittleEndian.PutUint32(config[0xac:], link2)
	binary.LittleEndian.PutUint32(config[0x100:], 0x0001|1<<16|0x148<<20) // AER
	if len(acs) > 0 {
		binary.LittleEndian.PutUint32(config[0x148:], extendedACS|1<<16)
		binary.LittleEndian.PutUint16(config[0x14c:], 0x5f)
		binary.LittleEndian.PutUint16(config[0x14e:], acs[0])
	}
	return config
}

const (
	gen5x16     = 5 | 16<<4
	upToGen5    = 0x3e
	slotOfPort  = 12 << 19
	redirecting = 0x1d // the controls that a kernel with an IOMMU enables
)

func TestReadConfigurationReturnsTypeLinkSlotAndACS(t *testing.T) {
	whole := configuration{kind: topo.PortDownstream, slot: 12, speed: "32.0 GT/s PCIe", width: 16,
		acs: []string{"SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"}}
	port := expressSpace(0x162, gen5x16, upToGen5, slotOfPort, redirecting)
	gone := bytes.Repeat([]byte{0xff}, 4096)
	loop := slices.Clone(port)
	loop[0x81] = 0x60 // back to the first
	for name, c := range map[string]struct {
		config []byte
		want   configuration
	}{
		"a switch's downstream port": {port, whole},
		"its upstream port": {expressSpace(0x152, gen5x16, upToGen5, slotOfPort, 0),
			configuration{kind: topo.PortUpstream, speed: "32.0 GT/s PCIe", width: 16, acs: []string{}}},
		"a root port without a slot": {expressSpace(0x42, 4|8<<4, 0x1e, slotOfPort, 1),
			configuration{kind: topo.PortRoot, speed: "16.0 GT/s PCIe", width: 8, acs: []string{"SrcValid"}}},
		"an endpoint without ACS": {expressSpace(0x02, 6|16<<4, 0x7e, 0),
			configuration{kind: topo.PortEndpoint, speed: "64.0 GT/s PCIe", width: 16, acs: []string{}}},
		"a legacy endpoint": {expressSpace(0x11, 1|1<<4, 0, 0),
			configuration{kind: topo.PortLegacyEndpoint, speed: "2.5 GT/s PCIe", width: 1, acs: []string{}}},
		"version 1, which has no second word": {
			expressSpace(0x01, 2|8<<4, upToGen5, 0), configuration{kind: topo.PortEndpoint, speed: "5.0 GT/s PCIe", width: 8,
				acs: []string{}},
		},
		"of the root complex, with no link": {expressSpace(0x92, 0, 0, 0),
			configuration{kind: topo.PortIntegratedEndpoint, acs: []string{}}},
		"an event collector": {expressSpace(0xa2, 0, 0, 0),
			configuration{kind: topo.PortEventCollector, acs: []string{}}},
		"a bridge to PCI": {expressSpace(0x71, 1|4<<4, 0, 0),
			configuration{kind: topo.PortToPCI, speed: "2.5 GT/s PCIe", width: 4, acs: []string{}}},
		"a bridge from PCI": {expressSpace(0x81, 1|4<<4, 0, 0),
			configuration{kind: topo.PortFromPCI, speed: "2.5 GT/s PCIe", width: 4, acs: []string{}}},
		"a type that is not known": {expressSpace(0xf1, 0, 0, 0), configuration{acs: []string{}}},
		"no PCI Express":           {make([]byte, 256), configuration{kind: topo.PortConventional}},
		"without its extended space": {port[:256],
			configuration{kind: topo.PortDownstream, slot: 12, speed: "32.0 GT/s PCIe", width: 16}},
		"what others than root see":       {port[:64], configuration{}},
		"nothing":                         {nil, configuration{}},
		"a function that does not answer": {gone, configuration{}},
		"a list that leads into itself":   {loop, whole},
	} {
		got, err := readConfiguration(bytes.NewReader(c.config))
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(configuration{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if _, err := readConfiguration(failing{}); err == nil {
		t.Error("a failure to read is dropped")
	}
}

type failing struct{}

func (failing) ReadAt([]byte, int64) (int, error) { return 0, errors.New("not now") }

func FuzzReadConfiguration(f *testing.F) {
	f.Add(expressSpace(0x162, gen5x16, upToGen5, slotOfPort, redirecting))
	f.Add(expressSpace(0x01, 2|8<<4, 0, 0)[:256])
	f.Add(bytes.Repeat([]byte{0x40}, 4096))
	f.Add(make([]byte, 64))
	f.Fuzz(func(t *testing.T, config []byte) {
		if len(config) > 4096 {
			return
		}
		got, err := readConfiguration(bytes.NewReader(config))
		if err != nil {
			t.Fatal(err)
		}
		if got.width < 0 || got.width > 63 || got.slot < 0 || got.slot >= 1<<13 || len(got.acs) > len(acsControls) {
			t.Fatalf("%+v", got)
		}
		// The reduced space of a capture has the same configuration.
		kept, err := readConfiguration(bytes.NewReader(withoutSerials(config)))
		if diff := cmp.Diff(got, kept, cmp.AllowUnexported(configuration{})); err != nil || diff != "" {
			t.Errorf("space (-) and reduced space of a capture (+), %v:\n%s", err, diff)
		}
	})
}

// switched is a host with a switch and a GPU outside the switch. Below the switch are a GPU, a NIC
// of two functions and an empty port. configs holds the configuration spaces of the ports.
func switched(t *testing.T, configs map[string][]byte) topo.Options {
	t.Helper()
	const (
		root = "pci0000:10/0000:10:01.0"
		up   = root + "/0000:11:00.0"
	)
	files := map[string]string{}
	for _, p := range []string{root, up, up + "/0000:12:00.0", up + "/0000:12:01.0", up + "/0000:12:02.0",
		"pci0000:10/0000:10:02.0"} {
		topotest.Device(files, p, "class=0x060400", "numa_node=0", "max_link_speed=32.0 GT/s PCIe", "max_link_width=16")
	}
	topotest.Device(files, up+"/0000:12:00.0/0000:13:00.0", topotest.GPUClass, topotest.GPUVendor, "numa_node=0")
	topotest.Device(files, up+"/0000:12:01.0/0000:14:00.0", "class=0x020700", "vendor=0x15b3", "numa_node=0")
	topotest.Device(files, up+"/0000:12:01.0/0000:14:00.1", "class=0x020700", "vendor=0x15b3", "numa_node=0")
	topotest.Device(files, "pci0000:10/0000:10:02.0/0000:15:00.0", topotest.GPUClass, topotest.GPUVendor, "numa_node=0")
	for i := range 2 {
		dir := fmt.Sprintf("sys/devices/%s/0000:12:01.0/0000:14:00.%d/infiniband/mlx5_%d", up, i, i)
		files[dir+"/device"] = fmt.Sprintf("-> ../../../0000:14:00.%d", i)
		files[dir+"/ports/1/rate"] = "400 Gb/sec (4X NDR)"
		files[fmt.Sprintf("sys/class/infiniband/mlx5_%d", i)] = "-> ../.." + strings.TrimPrefix(dir, "sys")
	}
	o := topotest.Tree(t, files)
	for busID, config := range configs {
		if err := os.WriteFile(filepath.Join(o.Sysfs, "bus/pci/devices", busID, "config"), config, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return o
}

// spaces returns the configuration spaces of the functions of switched, with an ACS control
// register for the ports in acs.
func spaces(acs map[string]uint16) map[string][]byte {
	all := map[string][]byte{}
	for busID, flags := range map[string]uint16{
		"0000:10:01.0": 0x142, "0000:10:02.0": 0x142, "0000:11:00.0": 0x52, "0000:12:00.0": 0x62, "0000:12:01.0": 0x62,
		"0000:12:02.0": 0x62,
		"0000:13:00.0": 0x02, "0000:14:00.0": 0x02, "0000:14:00.1": 0x02, "0000:15:00.0": 0x02,
	} {
		all[busID] = expressSpace(flags, gen5x16, upToGen5, slotOfPort, acs[busID])
	}
	return all
}

func notesWith(h *topo.Host, part string) []string {
	return slices.DeleteFunc(slices.Clone(h.Notes), func(n string) bool { return !strings.Contains(n, part) })
}

func TestSysfsListsPCIePortsOfPath(t *testing.T) {
	h, err := Sysfs(switched(t, spaces(map[string]uint16{"0000:12:01.0": redirecting})))
	if err != nil {
		t.Fatal(err)
	}
	none := []string{}
	want := []topo.PCIePort{
		{BusID: "0000:10:01.0", Type: topo.PortRoot, Slot: 12, ACS: none},
		{BusID: "0000:10:02.0", Type: topo.PortRoot, Slot: 12, ACS: none},
		{BusID: "0000:11:00.0", Above: "0000:10:01.0", Type: topo.PortUpstream, ACS: none},
		{BusID: "0000:12:00.0", Above: "0000:11:00.0", Type: topo.PortDownstream, ACS: none},
		{BusID: "0000:12:01.0", Above: "0000:11:00.0", Type: topo.PortDownstream,
			ACS: []string{"SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"}},
		{BusID: "0000:13:00.0", Above: "0000:12:00.0", Type: topo.PortEndpoint, ACS: none},
		{BusID: "0000:14:00.0", Above: "0000:12:01.0", Type: topo.PortEndpoint, ACS: none},
		{BusID: "0000:14:00.1", Above: "0000:12:01.0", Type: topo.PortEndpoint, ACS: none},
		{BusID: "0000:15:00.0", Above: "0000:10:02.0", Type: topo.PortEndpoint, ACS: none},
	}
	if diff := cmp.Diff(want, h.PCIePorts); diff != "" {
		t.Errorf("read (-want +got):\n%s", diff)
	}
	cut := spaces(nil)
	for busID := range cut {
		cut[busID] = cut[busID][:64]
	}
	for i := range want {
		want[i].Inferred, want[i].Slot, want[i].ACS = true, 0, nil
	}
	for name, configs := range map[string]map[string][]byte{"cut": cut, "absent": nil} {
		if h, err = Sysfs(switched(t, configs)); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, h.PCIePorts); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if count := len(notesWith(h, "only root can read configuration space")); count != map[string]int{"cut": 1}[name] {
			t.Errorf("%s: %q", name, h.Notes)
		}
	}
}

func TestACSRedirectNoteNamesPorts(t *testing.T) {
	for name, c := range map[string]struct {
		acs  map[string]uint16
		want string // the ports that the note names; empty for no note
	}{
		"nothing enabled":            {nil, ""},
		"only source validation":     {map[string]uint16{"0000:12:00.0": 1, "0000:12:01.0": 0x13}, ""},
		"the NIC's port":             {map[string]uint16{"0000:12:01.0": redirecting}, "switch ports are 0000:12:01.0; "},
		"requests of the GPU's port": {map[string]uint16{"0000:12:00.0": 1 << 2}, "switch ports are 0000:12:00.0; "},
		"answers of both": {map[string]uint16{"0000:12:00.0": 1 << 3, "0000:12:01.0": 1 << 3},
			"switch ports are 0000:12:00.0, 0000:12:01.0; "},
		"a port with nothing below it": {map[string]uint16{"0000:12:02.0": redirecting}, ""},
		"root ports":                   {map[string]uint16{"0000:10:01.0": redirecting, "0000:10:02.0": redirecting}, ""},
	} {
		h, err := Sysfs(switched(t, spaces(c.acs)))
		if err != nil {
			t.Fatal(err)
		}
		notes := notesWith(h, "root complex")
		if len(notes) != map[bool]int{true: 1}[c.want != ""] || c.want != "" && !strings.Contains(notes[0], c.want) {
			t.Errorf("%s: %q; want %q", name, notes, c.want)
		}
	}
	// A bridge to PCI is not a port of a switch, so the redirection does not count.
	bridge := spaces(nil)
	bridge["0000:12:01.0"] = expressSpace(0x72, gen5x16, upToGen5, 0, redirecting)
	h, err := Sysfs(switched(t, bridge))
	if err != nil || len(notesWith(h, "root complex")) > 0 {
		t.Errorf("a bridge to PCI: %q, %v", h.Notes, err)
	}
}

func TestACSOfSwitchWithSingleDeviceAddsNoNote(t *testing.T) {
	files := map[string]string{}
	const port = "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0"
	for p := port; p != "pci0000:10"; p = filepath.Dir(p) {
		topotest.Device(files, p, "class=0x060400", "numa_node=0")
	}
	topotest.Device(files, port+"/0000:13:00.0", topotest.GPUClass, topotest.GPUVendor, "numa_node=0")
	o := topotest.Tree(t, files)
	if err := os.WriteFile(filepath.Join(o.Sysfs, "devices", port, "config"),
		expressSpace(0x62, gen5x16, upToGen5, 0, redirecting), 0o644); err != nil {
		t.Fatal(err)
	}
	h, err := Sysfs(o)
	if err != nil || len(h.PCIePorts) != 4 || len(notesWith(h, "root complex")) > 0 {
		t.Errorf("%+v, %q, %v", h.PCIePorts, h.Notes, err)
	}
}

// Kernels before 4.13 have no attributes for the link.
func TestLinkOnOldKernelComesFromConfigurationSpace(t *testing.T) {
	files := map[string]string{}
	topotest.Device(files, "pci0000:00/0000:00:01.0", "class=0x060400", "numa_node=0")
	topotest.Device(files, "pci0000:00/0000:00:01.0/0000:01:00.0", topotest.GPUClass, topotest.GPUVendor, "numa_node=0")
	o := topotest.Tree(t, files)
	for busID, config := range map[string][]byte{
		"0000:00:01.0": expressSpace(0x42, 5|4<<4, 0x3e, 0), "0000:01:00.0": expressSpace(0x02, 4|16<<4, 0x1e, 0),
	} {
		if err := os.WriteFile(filepath.Join(o.Sysfs, "bus/pci/devices", busID, "config"), config, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	h, err := Sysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	if got := h.GPUs[0].Link; got != 6 {
		t.Errorf("%g GB/s; want 6: 16 GT/s of the GPU, 4 lanes of the port", got)
	}
	// NCCL uses an attribute with "Unknown", not the configuration space.
	for _, busID := range []string{"0000:00:01.0", "0000:01:00.0"} {
		if err := os.WriteFile(filepath.Join(o.Sysfs, "bus/pci/devices", busID, "max_link_speed"), []byte("Unknown\n"),
			0o644); err != nil {
			t.Fatal(err)
		}
	}
	if h, err = Sysfs(o); err != nil || h.GPUs[0].Link != 12 {
		t.Errorf("%+v, %v; want 12 GB/s: 8 GT/s and 16 lanes", h.GPUs, err)
	}
}
