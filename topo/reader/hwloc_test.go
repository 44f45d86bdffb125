package reader

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/textfile"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
	"github.com/peerlane/peerlane/topo/ncclxml"
	"github.com/peerlane/peerlane/topo/planner"
)

// recordedHwloc is the output of lstopo 2.9 for a host with the PCI functions of two sockets. A
// socket has two host bridges, with a switch below each bridge, two GPUs below each switch, and a
// NIC below the first switch of the socket.
const recordedHwloc = "testdata/recorded-hwloc.xml"

func readHwlocFile(t testing.TB, file string) *topo.Host {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	h, err := Input(file, text)
	if err != nil {
		t.Fatal(err)
	}
	if h.Source != (topo.Source{Kind: SourceHwlocXML, File: file}) {
		t.Errorf("source %+v", h.Source)
	}
	return h
}

func TestHwlocFileReadsAsHost(t *testing.T) {
	h := readHwlocFile(t, recordedHwloc)
	at := func(bridge, sw string) topo.Place {
		return topo.Place{HostBridge: "pci0000:" + bridge, Switch: sw, Link: 48}
	}
	broadcom := topo.PCIIdentity{Vendor: "0x1000", Device: "0xc030", SubsystemVendor: "0x0000", SubsystemDevice: "0x0000"}
	want := &topo.Host{
		Source: h.Source,
		CPUs:   []topo.CPU{{NUMA: 0, CPUs: "0", Socket: 22}, {NUMA: 1, CPUs: "1", Socket: 22}},
		Switches: []topo.Switch{
			{BusID: "0000:16:00.0", NUMA: 0, Place: at("15", ""), Device: broadcom},
			{BusID: "0000:38:00.0", NUMA: 0, Place: at("37", ""), Device: broadcom},
			{BusID: "0000:98:00.0", NUMA: 1, Place: at("97", ""), Device: broadcom},
			{BusID: "0000:b8:00.0", NUMA: 1, Place: at("b7", ""), Device: broadcom},
		},
		NICs: []topo.NIC{
			{Name: "mlx5_0", BusID: "0000:1a:00.0", GUID: "5054:00ff:fe70:0001", NUMA: 0, Place: at("15", "0000:16:00.0"),
				Ports: []topo.Port{{Number: 1, State: "ACTIVE"}}},
			{Name: "mlx5_1", BusID: "0000:9c:00.0", GUID: "5054:00ff:fe70:0101", NUMA: 1, Place: at("97", "0000:98:00.0"),
				Ports: []topo.Port{{Number: 1, State: "ACTIVE"}}},
		},
		Notes: h.Notes,
	}
	for i, gpu := range []struct {
		busID, bridge, sw string
		numa              int
	}{
		{"0000:18:00.0", "15", "0000:16:00.0", 0}, {"0000:19:00.0", "15", "0000:16:00.0", 0},
		{"0000:3a:00.0", "37", "0000:38:00.0", 0}, {"0000:3b:00.0", "37", "0000:38:00.0", 0},
		{"0000:9a:00.0", "97", "0000:98:00.0", 1}, {"0000:9b:00.0", "97", "0000:98:00.0", 1},
		{"0000:ba:00.0", "b7", "0000:b8:00.0", 1}, {"0000:bb:00.0", "b7", "0000:b8:00.0", 1},
	} {
		want.GPUs = append(want.GPUs, topo.GPU{Index: i, BusID: gpu.busID, Minor: -1, NUMA: gpu.numa,
			Place: at(gpu.bridge, gpu.sw)})
	}
	if diff := cmp.Diff(want, h, topotest.Plain); diff != "" {
		t.Errorf("host (-want +got):\n%s", diff)
	}
	if len(h.Notes) != 1 || !strings.Contains(h.Notes[0], "the current speed") {
		t.Errorf("notes %q; want a note that link speeds are current speeds", h.Notes)
	}
	for _, tt := range []struct {
		from, to string
		want     topo.Path
	}{
		{"0000:18:00.0", "mlx5_0", topo.Path{Type: topo.PIX, Bandwidth: 48}},
		{"0000:3a:00.0", "mlx5_0", topo.Path{Type: topo.PHB, Bandwidth: 48}},
		{"0000:9a:00.0", "mlx5_0", topo.Path{Type: topo.SYS, Bandwidth: 22}},
		{"0000:18:00.0", "0000:19:00.0", topo.Path{Type: topo.PIX, Bandwidth: 48}},
	} {
		if got, err := graph.Between(h, tt.from, tt.to); err != nil || got != tt.want {
			t.Errorf("%s to %s: %v, %v; want %v", tt.from, tt.to, got, err, tt.want)
		}
	}
}

// TestTypesOfHwlocFilesAgreeWithNCCL compares with tables of NCCL's types. The table of the tree was
// written by hand: PIX below one switch, PHB at one NUMA node, SYS between two.
func TestTypesOfHwlocFilesAgreeWithNCCL(t *testing.T) {
	for _, table := range topotest.Files(t, "testdata/*-hwloc.tsv", "expected/nixl-hwloc-*.tsv") {
		dir := filepath.Dir(table)
		if filepath.Base(dir) == "expected" {
			dir = filepath.Dir(dir)
		}
		h := readHwlocFile(t, filepath.Join(dir, strings.TrimSuffix(filepath.Base(table), ".tsv")+".xml"))
		f, err := os.Open(table)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		pairs := 0
		for lines := bufio.NewScanner(f); lines.Scan(); {
			cells := strings.Split(lines.Text(), "\t")
			if cells[0] == "from" {
				continue
			}
			pairs++
			for _, ends := range [][2]string{{cells[0], cells[1]}, {cells[1], cells[0]}} {
				if got, err := graph.Between(h, ends[0], ends[1]); err != nil || got.Type.String() != cells[2] {
					t.Errorf("%s: %s to %s: %v, %v; NCCL has %s", filepath.Base(table), ends[0], ends[1], got, err, cells[2])
				}
			}
		}
		rdma := 0
		for _, n := range h.NICs {
			if !n.Ethernet {
				rdma++
			}
		}
		if g := len(h.GPUs); pairs != g*rdma+g*(g-1)/2 {
			t.Errorf("%s has %d pairs, and there are %d GPUs and %d RDMA NICs", table, pairs, g, rdma)
		}
	}
}

// machineXML puts objects into a machine with two sockets, the second of two NUMA
// nodes.
func machineXML(first, second, machine, behind string) string {
	return `<?xml version="1.0" encoding="UTF-8"?>
<!-- a comment -->
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
<object type="Machine" nodeset="0x00000007" gp_index="1"><info name="Architecture" value="x86_64"/>
<object type="Package" nodeset="0x1" gp_index="2"><info name="CPUVendor" value="AuthenticAMD"/><info name="CPUFamilyNumber" value="25"/>
<object type="NUMANode" os_index="0" cpuset="0x0000000f,,0xf0000001" nodeset="0x1" gp_index="3"/>` + first + `</object>
<object type="Package" nodeset="0x6" gp_index="4">
<object type="Group" nodeset="0x2"><object type="NUMANode" os_index="1" nodeset="0x2" gp_index="5"/></object>
<object type="Group" nodeset="0x4"><object type="NUMANode" os_index="2" nodeset="0x4" gp_index="6"/></object>` + second + `</object>
` + machine + `</object>` + behind + `</topology>`
}

func readHwlocText(t *testing.T, text string) *topo.Host {
	t.Helper()
	h, err := hwlocXML(strings.NewReader(text), "test.xml")
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return h
}

func hwlocDevice(busID, pciType, speed, inner string) string {
	return fmt.Sprintf(`<object type="PCIDev" gp_index="%s" pci_busid="%s" pci_type="%s" pci_link_speed="%s">%s</object>`,
		busID, busID, pciType, speed, inner)
}

func hwlocBridge(kind, buses, busID, speed, inner string) string {
	if kind == "0-1" {
		return fmt.Sprintf(`<object type="Bridge" bridge_type="0-1" depth="0" bridge_pci="%s">%s</object>`, buses, inner)
	}
	return fmt.Sprintf(`<object type="Bridge" bridge_type="1-1" depth="1" bridge_pci="%s" pci_busid="%s" pci_type="0604 [10b5:8764] [10b5:8764] ab" pci_link_speed="%s">%s</object>`, buses, busID, speed, inner)
}

func hwlocOSDev(kind, name, infos string) string {
	return fmt.Sprintf(`<object type="OSDev" gp_index="os-%s" name="%s" osdev_type="%s">%s</object>`, name, name, kind,
		infos)
}

func TestHwlocFindsDevicesByClassAndVendor(t *testing.T) {
	h := readHwlocText(t, machineXML(
		hwlocBridge("0-1", "0000:[00-1f]", "", "",
			hwlocDevice("0000:01:00.0", "0302 [10de:2330] [10de:16c1] a1", "63.015385",
				hwlocOSDev("1", "nvml1", `<info name="GPUModel" value="H100"/><info name="NVIDIAUUID" value="GPU-1"/>`)+
					hwlocOSDev("5", "cuda0", ""))+
				hwlocDevice("0000:02:00.0", "0300 [1a03:2000] [1a03:2000] 41", "0.000000", "")+
				hwlocDevice("0000:03:00.0", "0200 [15b3:1021] [15b3:0001] 00", "31.507692",
					hwlocOSDev("2", "eth0", "")+hwlocOSDev("3", "mlx5_10",
						`<info name="Port1State" value="1"/><info name="Port2State" value="4"/>`))+
				hwlocDevice("0000:04:00.0", "0200 [8086:1592] [8086:0001] 02", "15.753846", hwlocOSDev("2", "eth1", ""))+
				hwlocDevice("0000:05:00.0", "0207 [15b3:101b] [15b3:0007] 00", "0.000000", "")),
		hwlocBridge("0-1", "0000:[80-9f]", "", "",
			hwlocDevice("0000:81:00.0", "0302 [10de:2330] [10de:16c1] a1", "2.000000", hwlocOSDev("1", "nvml0", ""))+
				hwlocDevice("0000:82:00.0", "0200 [1d0f:efa1] [1d0f:efa1] 00", "0.000000", hwlocOSDev("3", "rdmap130s0", ""))+
				hwlocDevice("0000:83:00.0", "0200 [1ded:107f] [1ded:0001] 00", "0.000000", hwlocOSDev("3", "erdma_0", ""))+
				hwlocDevice("0000:84:00.0", "0380 [1002:74a1] [1002:74a1] 00", "63.015385", "")),
		"", ""))
	var got []string
	for _, g := range h.GPUs {
		got = append(got, fmt.Sprintf("GPU %d %s %q %q %q numa %d link %g", g.Index, g.BusID, g.Vendor, g.Name, g.UUID,
			g.NUMA, g.Link))
	}
	for _, n := range h.NICs {
		got = append(got, fmt.Sprintf("NIC %s %s %q ethernet %v numa %d link %g active %v", n.Name, n.BusID, n.Protocol,
			n.Ethernet, n.NUMA, n.Link, n.Active()))
	}
	want := []string{
		// AMD's GPU has no NVML number, so addresses number the GPUs.
		`GPU 0 0000:01:00.0 "" "H100" "GPU-1" numa 0 link 48`,
		`GPU 1 0000:81:00.0 "" "" "" numa 1 link 1.5`,
		`GPU 2 0000:84:00.0 "AMD" "" "" numa 1 link 48`,
		`NIC erdma_0 0000:83:00.0 "eRDMA" ethernet false numa 1 link 0 active true`,
		`NIC eth1 0000:04:00.0 "" ethernet true numa 0 link 12 active true`,
		`NIC mlx5_10 0000:03:00.0 "" ethernet false numa 0 link 24 active true`,
		`NIC nic@0000:05:00.0 0000:05:00.0 "" ethernet false numa 0 link 0 active true`,
		`NIC rdmap130s0 0000:82:00.0 "EFA" ethernet false numa 1 link 0 active true`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]topo.CPU{{NUMA: 0, CPUs: "0,28-31,64-67", Socket: 16}, {NUMA: 1, Socket: 16},
		{NUMA: 2, Socket: 16}}, h.CPUs, topotest.Plain); diff != "" {
		t.Errorf("NUMA nodes (-want +got):\n%s", diff)
	}
	notes := strings.Join(h.Notes, "\n")
	for _, want := range []string{"0000:02:00.0 of vendor 0x1a03", "no link speed for 3 of 8"} {
		if !strings.Contains(notes, want) {
			t.Errorf("notes %q; want a note with %q", h.Notes, want)
		}
	}
	if path, err := graph.Between(h, "0000:01:00.0", "nic@0000:05:00.0"); err != nil ||
		path != (topo.Path{Type: topo.PHB, Bandwidth: 0}) {
		t.Errorf("%v, %v; over a link of unknown speed a path has a type alone", path, err)
	}
	if h.NICs[4].Reason == "" {
		t.Error("EFA is not refused")
	}
}

func TestHwlocGPUsHaveNVMLNumbers(t *testing.T) {
	gpu := func(busID, name string) string {
		return hwlocDevice(busID, "0302 [10de:1db5] [10de:1249] a1", "0.000000", hwlocOSDev("1", name, ""))
	}
	numbers := func(h *topo.Host) string {
		var s []string
		for _, g := range h.GPUs {
			s = append(s, fmt.Sprint(g.Index, "=", g.BusID))
		}
		return strings.Join(s, " ")
	}
	if got := numbers(readHwlocText(t, machineXML(gpu("0000:01:00.0", "nvml1")+gpu("0000:02:00.0", "nvml0"), "", "",
		""))); got != "0=0000:02:00.0 1=0000:01:00.0" {
		t.Error(got)
	}
	if got := numbers(readHwlocText(t, machineXML(gpu("0000:02:00.0", "nvml1")+gpu("0000:01:00.0", "nvml1"), "", "",
		""))); got != "0=0000:01:00.0 1=0000:02:00.0" {
		t.Errorf("a number twice: %s", got)
	}
}

func TestHwlocEverySecondBridgeIsSwitch(t *testing.T) {
	gpu := func(busID string) string {
		return hwlocDevice(busID, "0302 [10de:1db5] [10de:1249] a1", "15.753846", "")
	}
	h := readHwlocText(t, machineXML(
		hwlocBridge("0-1", "0000:[00-ff]", "", "",
			gpu("0000:00:05.0")+ // at the CPU without a port
				hwlocBridge("1-1", "0000:[10-10]", "0000:00:01.0", "7.876923", gpu("0000:10:00.0"))+
				hwlocBridge("1-1", "0000:[01-09]", "0000:00:02.0", "31.507692",
					hwlocBridge("1-1", "0000:[02-09]", "0000:01:00.0", "31.507692",
						hwlocBridge("1-1", "0000:[03-03]", "0000:02:00.0", "15.753846", gpu("0000:03:00.0"))+
							hwlocBridge("1-1", "0000:[04-09]", "0000:02:01.0", "15.753846",
								hwlocBridge("1-1", "0000:[05-09]", "0000:04:00.0", "15.753846",
									hwlocBridge("1-1", "0000:[06-06]", "0000:05:00.0", "15.753846", gpu("0000:06:00.0"))))))),
		"", "", ""))
	for _, tt := range []struct {
		from, to string
		want     topo.Path
	}{
		{"0000:00:05.0", "0000:10:00.0", topo.Path{Type: topo.PHB, Bandwidth: 6}}, // the port is the slower end
		{"0000:03:00.0", "0000:06:00.0", topo.Path{Type: topo.PXB, Bandwidth: 12}},
		{"0000:03:00.0", "0000:10:00.0", topo.Path{Type: topo.PHB, Bandwidth: 6}},
	} {
		if got, err := graph.Between(h, tt.from, tt.to); err != nil || got != tt.want {
			t.Errorf("%s to %s: %v, %v; want %v", tt.from, tt.to, got, err, tt.want)
		}
	}
	if len(h.Switches) != 2 || h.Switches[0].BusID != "0000:01:00.0" || h.Switches[1].Switch != "0000:01:00.0" {
		t.Errorf("switches %+v", h.Switches)
	}
}

func TestHwlocNodesetBecomesNUMANode(t *testing.T) {
	gpu := func(busID string) string {
		return hwlocDevice(busID, "0302 [10de:1db5] [10de:1249] a1", "0.000000", "")
	}
	h := readHwlocText(t, machineXML(gpu("0000:01:00.0"), gpu("0000:02:00.0")+gpu("0000:03:00.0"), gpu("0000:04:00.0")+
		gpu("0000:05:00.0"), ""))
	var got []int
	for _, g := range h.GPUs {
		got = append(got, g.NUMA)
	}
	// A socket with two nodes counts as the first node; the whole machine counts as unknown.
	if diff := cmp.Diff([]int{0, 1, 1, -1, -1}, got); diff != "" {
		t.Error(diff)
	}
	if !strings.Contains(strings.Join(h.Notes, "\n"), "no NUMA node for 0000:04:00.0") ||
		!strings.Contains(strings.Join(h.Notes, "\n"), "no bridges") {
		t.Errorf("notes %q", h.Notes)
	}
	for pair, want := range map[[2]string]topo.PathType{
		{"0000:02:00.0", "0000:03:00.0"}: topo.PHB, {"0000:04:00.0", "0000:05:00.0"}: topo.PHB,
		{"0000:01:00.0", "0000:02:00.0"}: topo.SYS, {"0000:01:00.0", "0000:04:00.0"}: topo.SYS,
	} {
		if got, err := graph.Between(h, pair[0], pair[1]); err != nil || got.Type != want {
			t.Errorf("%v: %v, %v; want %v", pair, got, err, want)
		}
	}
	one := readHwlocText(t, `<topology version="2.0"><object type="Machine" nodeset="0x1"><object type="NUMANode" os_index="0"/>`+gpu("0000:01:00.0")+`</object></topology>`)
	if one.GPUs[0].NUMA != 0 || one.CPUs[0].Socket != 0 {
		t.Errorf("host with a single node: %+v, %+v", one.GPUs, one.CPUs)
	}
}

func TestHwlocMatrixBecomesNVLinks(t *testing.T) {
	gpus := ""
	for i := range 3 {
		gpus += hwlocDevice(fmt.Sprintf("0000:0%d:00.0", i+1), "0302 [10de:1db5] [10de:1249] a1", "0.000000",
			hwlocOSDev("1", fmt.Sprintf("nvml%d", i), ""))
	}
	gpus += `<object type="PCIDev" gp_index="77" pci_busid="0000:09:00.0" pci_type="0680 [10de:1af1] [10de:1af1] a1"/>`
	matrix := func(indexes, values string) string {
		return `<distances2hetero nbobjs="4" kind="9" name="NVLinkBandwidth" indexing="gp"><indexes length="1">` +
			indexes + `</indexes>` +
			`<u64values length="1">` + values[:len(values)/2] + `</u64values><u64values length="1">` +
			values[len(values)/2:] + `</u64values></distances2hetero>`
	}
	h := readHwlocText(t, machineXML(gpus, "", "", matrix("OSDev:os-nvml0 OSDev:os-nvml1 OSDev:os-nvml2 PCIDev:77 ",
		"1000000 50000 20000 0 "+"50000 1000000 0 0 "+"20000 0 1000000 0 "+"0 0 0 1000000 ")))
	for pair, want := range map[[2]string]topo.Path{
		// 2 links of 25 GB/s: the bandwidth in NCCL is unknown
		{"0000:01:00.0", "0000:02:00.0"}: {Type: topo.NVL, Bandwidth: 0},
		{"0000:01:00.0", "0000:03:00.0"}: {Type: topo.NVL, Bandwidth: 18}, // 1 link of the first version
		{"0000:02:00.0", "0000:03:00.0"}: {Type: topo.NVB, Bandwidth: 0},
	} {
		if got, err := graph.Between(h, pair[0], pair[1]); err != nil || got != want {
			t.Errorf("%v: %v, %v; want %v", pair, got, err, want)
		}
	}
	switched := readHwlocText(t, machineXML(gpus, "", "", matrix("OSDev:os-nvml0 OSDev:os-nvml1 OSDev:os-nvml2 PCIDev:77 ",
		"1000000 0 0 150000 "+"0 1000000 0 150000 "+"0 0 1000000 0 "+"150000 150000 0 1000000 ")))
	if got, err := graph.Between(switched, "0000:01:00.0", "0000:02:00.0"); err != nil || got.Type != topo.NVL {
		t.Errorf("through an NVSwitch: %v, %v", got, err)
	}
	if got, err := graph.Between(switched, "0000:01:00.0", "0000:03:00.0"); err != nil || got.Type != topo.PHB {
		t.Errorf("a GPU without NVLinks: %v, %v", got, err)
	}
	for _, bad := range []string{matrix("1 2 3", "1 1"), matrix("1 2 3 4", strings.Repeat("x ", 16)),
		strings.Replace(matrix("1", "1 1"), `nbobjs="4"`, `nbobjs="9999999"`, 1)} {
		var place *textfile.PlaceError
		if _, err := hwlocXML(strings.NewReader(machineXML(gpus, "", "", bad)), "x"); !errors.As(err, &place) {
			t.Errorf("%v; want an error with the matrix and the place", err)
		}
	}
}

func TestHwlocLinkSpeedBecomesNCCLBandwidth(t *testing.T) {
	for speed, want := range map[float64]float64{
		0: 0, 0.25: 0.1875, 2: 1.5, 4: 3, 8: 6, 0.984615: 0.75, 3.938462: 3, 15.753846: 12, 31.507692: 24, 63.015385: 48,
		126.030769: 96,
	} {
		if got := hwlocBandwidth(speed); got != want {
			t.Errorf("%g GB/s of hwloc: %g, and NCCL reckons with %g", speed, got, want)
		}
	}
}

// at is an error at a place of a file.
func at(line, column int) error { return &textfile.PlaceError{Line: line, Column: column} }

// ofFile reports whether an error has the name of the file.
func ofFile(err error, name string) bool {
	var of *textfile.FileError
	return errors.As(err, &of) && of.Name == name
}

func TestHwlocMalformedFileErrorNamesPlace(t *testing.T) {
	gpu := hwlocDevice("0000:01:00.0", "0302 [10de:1db5] [10de:1249] a1", "0.0", "")
	for name, tt := range map[string]struct {
		text string
		want error
	}{
		"torn":            {"<topology version=\"2.0\">\n<object type=\"Machine\">\n<object ty", at(3, 11)},
		"another version": {`<topology version="3.0"/>`, at(1, 1)},
		"no version":      {`<topology/>`, at(1, 1)},
		"another root":    {`<system version="1"/>`, at(1, 1)},
		"no PCI":          {machineXML("", "", "", ""), errNoPCI},
		"two roots":       {`<topology version="2.0">` + gpu + `</topology><topology version="2.0"/>`, at(1, 180)},
		"no address": {"<topology version=\"2.0\">\n <object type=\"PCIDev\" pci_type=\"0302 " +
			"[10de:1db5]\"/></topology>", at(2, 2)},
		"an address twice": {machineXML(gpu, gpu, "", ""), at(10, 110)},
		"a wrong type":     {machineXML(strings.Replace(gpu, "0302 [", "GPU [", 1), "", "", ""), at(7, 98)},
		"a wrong speed":    {machineXML(strings.Replace(gpu, `"0.0"`, `"NaN"`, 1), "", "", ""), at(7, 98)},
		"a node twice":     {machineXML(`<object type="NUMANode" os_index="0"/>`, "", "", ""), at(7, 98)},
		"a GPU's number": {machineXML(hwlocDevice("0000:01:00.0", "0302 [10de:1db5]", "0.0",
			hwlocOSDev("1", "nvml4096", "")), "", "", ""), &topo.RangeError{Number: "GPU index", Value: 4096, Max: 4095}},
		"a wrong node": {machineXML(`<object type="NUMANode" os_index="-1"/>`, "", "", ""), at(7, 98)},
		"a wrong set":  {machineXML(`<object type="Group" nodeset="0xf...f"/>`, "", "", ""), at(7, 98)},
		"a huge set":   {machineXML(`<object type="Group" nodeset="`+strings.Repeat("0x1,", 600)+`0x1"/>`, "", "", ""), at(7, 98)},
		"a name twice": {machineXML(hwlocDevice("1:0.0", "0207 [15b3:1021]", "0", hwlocOSDev("3", "a", "")+
			hwlocOSDev("3", "a", "")), "", "", ""), &nameError{"a", "0000:01:00.0", "0000:01:00.0"}},
		"a nameless device": {machineXML(hwlocDevice("1:0.0", "0207 [15b3:1021]", "0", hwlocOSDev("3", "", "")), "", "", ""),
			&nameError{first: "0000:01:00.0"}},
		"a tree without end": {`<topology version="2.0">` + strings.Repeat(`<object type="Group">`, maxHwlocDepth), at(1, 6304)},
		"an entity":          {`<!DOCTYPE topology [<!ENTITY a "aaaa">]><topology version="2.0"><info name="&a;"/></topology>`, at(1, 80)},
		"many devices":       {`<topology version="2.0">` + manyGPUs(maxHwlocDevices+1) + `</topology>`, &countError{items: "GPUs and NICs", max: maxHwlocDevices, countless: true}},
		"many NICs": {`<topology version="2.0">` +
			hwlocDevice("1:0.0", "0207 [15b3:1021]", "0", manyNICs(maxHwlocDevices+2)) + `</topology>`, &countError{items: "GPUs and NICs", max: maxHwlocDevices, countless: true}},
		"many GPUs and software NICs": {machineXML(manyGPUs(maxHwlocDevices-1), "", manyNICs(2), ""),
			&countError{items: "GPUs and NICs", max: maxHwlocDevices, countless: true}},
		"many NUMA nodes": {`<topology version="2.0">` + manyNodes(maxHwlocNodes+1) + `</topology>`, at(1, 10155)},
		"huge":            {`<topology version="2.0">` + strings.Repeat(" ", textfile.MaxInput), textfile.ErrTooLarge},
	} {
		h, err := hwlocXML(strings.NewReader(tt.text), "some.xml")
		if h != nil || !testutil.HasError(err, tt.want) || !ofFile(err, "some.xml") {
			t.Errorf("%s: %v; want an error with some.xml and %v", name, err, tt.want)
		}
	}
}

func manyGPUs(n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(hwlocDevice(fmt.Sprintf("%x:%02x:00.0", i/256, i%256), "0302 [10de:1db5]", "0", ""))
	}
	return b.String()
}

func manyNodes(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `<object type="NUMANode" os_index="%d"/>`, i)
	}
	return b.String()
}

func manyNICs(n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(hwlocOSDev("3", fmt.Sprint("mlx5_", i), ""))
	}
	return b.String()
}

func TestHwlocSoftwareRDMAHasNoAddress(t *testing.T) {
	gpu := hwlocDevice("0000:01:00.0", "0302 [10de:1db5] [10de:1249] a1", "0.0", "")
	h := readHwlocText(t, machineXML(gpu, "", hwlocOSDev("3", "rxe0", `<info name="Port1State" value="4"/>`)+
		hwlocOSDev("2", "eth0", ""), ""))
	if len(h.NICs) != 1 || h.NICs[0].Name != "rxe0" || !h.NICs[0].Software || h.NICs[0].BusID != "" {
		t.Fatalf("NICs %+v", h.NICs)
	}
	plan, err := planner.Make(h, planner.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if len(plan.Lanes[0].NICs) != 0 {
		t.Errorf("lane %+v; want software RDMA in a lane only on request", plan.Lanes[0])
	}
}

func FuzzReadHwlocXML(f *testing.F) {
	text, err := os.ReadFile(recordedHwloc)
	if err != nil {
		f.Fatal(err)
	}
	topotest.AddSeeds(f, "nixl-hwloc-*.xml", string(text),
		machineXML(hwlocDevice("0000:01:00.0", "0302 [10de:2330]", "0", hwlocOSDev("1", "nvml4096", "")), "", "", ""),
		machineXML(hwlocDevice("0000:01:00.0", "0302 [10de:2330] [10de:16c1] a1", "63.015385", hwlocOSDev("1", "nvml0", "")),
			"", "",
			`<distances2 type="OSDev" nbobjs="1" kind="9" name="NVLinkBandwidth" indexing="gp"><indexes length="1">os-nvml0</indexes><u64values length="1">1</u64values></distances2>`))
	f.Fuzz(func(t *testing.T, text []byte) {
		h, err := hwlocXML(strings.NewReader(string(text)), "fuzz.xml")
		if err != nil {
			if h != nil {
				t.Error("both a host and an error")
			}
			return
		}
		checkRead(t, h)
	})
}

func TestHwlocBecomesNCCLXML(t *testing.T) {
	h := readHwlocFile(t, recordedHwloc)
	text, err := ncclxml.Write(h)
	if err != nil {
		t.Fatal(err)
	}
	again := ncclfile.ReadXML(t, string(text))
	want, got := graph.All(h, topo.RulesNCCL), graph.All(again, topo.RulesNCCL)
	if len(want) != 90 || len(got) != len(want) {
		t.Fatalf("%d and %d paths", len(want), len(got))
	}
	for i := range want {
		// hwloc has no rate of a port, and NCCL assumes 10 Gbit/s.
		if want[i].Type != got[i].Type || want[i].Hops != got[i].Hops || got[i].Bandwidth != want[i].Bandwidth &&
			got[i].Bandwidth != 1.25 {
			t.Errorf("hwloc %+v, XML %+v", want[i], got[i])
		}
	}
}
