package topo

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// vpd is vital product data as a ConnectX has it: a name, and keywords.
func vpd(keywords ...string) string {
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

func TestVPDTellsCardAndManagement(t *testing.T) {
	const card = "5b8f2b1e-3d5e-11ef-8000-b83fd2d6d2a0"
	whole := vpd("V3="+card, "VA=MLX:MODL=CX7:SMDL=SW_MNG")
	read := func(data string) product {
		t.Helper()
		text, err := readVPD(strings.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		return parseVPD(text)
	}
	for _, c := range []struct {
		name, data string
		want       product
	}{
		{"whole", whole, product{card, true}},
		{"with bytes after its end", whole + "\x90\x05\x00VASW_MNG", product{card, true}},
		{"of a NIC", vpd("V3="+card, "VA=MLX:MODL=CX7"), product{card, false}},
		{"without a UUID", vpd("VA=SMDL=SW_MNG"), product{"", true}},
		{"torn", whole[:len(whole)-30], product{}},
		{"of zeros", string(make([]byte, 64)), product{}},
		{"empty", "", product{}},
		{"of one byte", "\x90", product{}},
		{"with a long item that is not there", "\x90\xff\xff", product{}},
	} {
		got := read(c.data)
		if got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
		kept := string(got.reduced())
		if strings.Contains(kept, card) || strings.Contains(kept, "12345") {
			t.Errorf("%s: a capture would have %q", c.name, kept)
		}
		again := read(kept)
		if again.management != got.management || (again.card == "") != (got.card == "") {
			t.Errorf("%s: %+v is kept as %+v", c.name, got, again)
		}
	}
	if a, b := (product{card: "a"}).reduced(), (product{card: "b"}).reduced(); bytes.Equal(a, b) {
		t.Error("two cards are kept as one")
	}
	failing := failingReader{errors.New("no answer")}
	if _, err := readVPD(failing); err == nil {
		t.Error("an error of the device is not reported")
	}
}

type failingReader struct{ err error }

func (r failingReader) ReadAt([]byte, int64) (int, error) { return 0, r.err }

func TestVPDReadEndsAtItsEndTag(t *testing.T) {
	data := vpd("V3=x")
	counted := &countingReader{from: strings.NewReader(data + strings.Repeat("x", 1<<20))}
	if _, err := readVPD(counted); err != nil {
		t.Fatal(err)
	}
	if counted.last > int64(len(data)+3) {
		t.Errorf("%d bytes are read of %d", counted.last, len(data))
	}
	endless := strings.NewReader(strings.Repeat("\x01x", 1<<20))
	if text, err := readVPD(endless); err != nil || len(text) > maxVPD {
		t.Errorf("%d bytes, %v", len(text), err)
	}
}

type countingReader struct {
	from io.ReaderAt
	last int64
}

func (r *countingReader) ReadAt(p []byte, at int64) (int, error) {
	n, err := r.from.ReadAt(p, at)
	r.last = max(r.last, at+int64(n))
	return n, err
}

const gb300Card = "0b8f2b1e-3d5e-11ef-8000-b83fd2d6d2a%d"

// gb300 is a board with two GPUs, each below the switch of a ConnectX-8 with the
// NIC's Data Direct function, as rdma_topo of rdma-core expects it; the NICs' own
// functions are below other root ports.
func gb300(driver string) map[string]string {
	files := map[string]string{"sys/devices/system/node/node0/cpulist": "0-71", "sys/devices/system/node/node1/cpulist": "72-143"}
	fast := []string{"max_link_speed=64.0 GT/s PCIe", "max_link_width=16"}
	for i := range 2 {
		numa := "numa_node=" + string(rune('0'+i))
		at := func(path string, attributes ...string) {
			device(files, strings.ReplaceAll(path, "DDDD", []string{"0008", "0018"}[i]), append(append(attributes, fast...), numa)...)
		}
		port := []string{"class=0x060400", "vendor=0x15b3", "device=0x197c"}
		const root = "pciDDDD:00/DDDD:00:00.0"
		const usp = root + "/DDDD:01:00.0"
		at(root, "class=0x060400", "vendor=0x10de", "device=0x22b1")
		at(usp, port...)
		at(usp+"/DDDD:02:00.0", port...)
		dma := []string{"class=0x080100", "vendor=0x15b3", "device=0x2100", "vpd=" + vpd("V3="+strings.ReplaceAll(gb300Card, "%d", string(rune('0'+i))))}
		if driver != "" {
			dma = append(dma, "driver=-> ../../../../../../bus/pci/drivers/"+driver)
		}
		at(usp+"/DDDD:02:00.0/DDDD:03:00.0", dma...)
		at(usp+"/DDDD:02:03.0", port...)
		at(usp+"/DDDD:02:03.0/DDDD:04:00.0", port...)
		at(usp+"/DDDD:02:03.0/DDDD:04:00.0/DDDD:05:00.0", port...)
		at(usp+"/DDDD:02:03.0/DDDD:04:00.0/DDDD:05:00.0/DDDD:06:00.0", gpuClass, gpuVendor)
		own := []string{"pci0000:00/0000:00:00.0", "pci0010:00/0010:00:00.0"}[i]
		device(files, own, append(fast, "class=0x060400", "vendor=0x10de", "device=0x22b1", numa)...)
		nic := own + "/" + strings.Replace(filepath.Base(own), ":00:", ":03:", 1)
		device(files, nic, append(fast[:1:1], "max_link_width=8", "class=0x020700", "vendor=0x15b3", "device=0x1023", numa, "vpd="+vpd("V3="+strings.ReplaceAll(gb300Card, "%d", string(rune('0'+i)))))...)
		rdmaDevice(files, nic, []string{"mlx5_0", "mlx5_1"}[i], "state=4: ACTIVE", "rate=800 Gb/sec (4X XDR)")
		files["sys/devices/"+nic+"/infiniband/"+[]string{"mlx5_0", "mlx5_1"}[i]+"/sys_image_guid"] = []string{"a088:c203:00a1:0001", "a088:c203:00a1:0002"}[i]
	}
	return files
}

func TestDataDirectFunctionDecidesNearness(t *testing.T) {
	o := tree(t, gb300("mlx5_ib"))
	h, err := ReadSysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	if len(h.NICs) != 2 || len(h.GPUs) != 2 {
		t.Fatalf("%+v", h)
	}
	for i, n := range h.NICs {
		want := []string{"0008:03:00.0", "0018:03:00.0"}[i]
		if n.DataDirect != want || n.Own == nil || n.Own.Link != 48 || n.Link != 96 || n.BusID != []string{"0000:03:00.0", "0010:03:00.0"}[i] {
			t.Errorf("%s: Data Direct function %q, own %+v, link %g; want %s", n.Name, n.DataDirect, n.Own, n.Link, want)
		}
	}
	if got := pairOf(t, h.Paths(RulesNCCL), "0008:06:00.0", "mlx5_0"); got.Type != PXB {
		t.Errorf("the GPU to its NIC is %v", got.Type)
	}
	if got := pairOf(t, h.Paths(RulesNCCL), "0008:06:00.0", "mlx5_1"); got.Type != SYS {
		t.Errorf("the GPU to the other NIC is %v", got.Type)
	}
	p, err := MakePlan(h, PlanConfig{})
	if err != nil {
		t.Fatal(err)
	}
	for i, l := range p.Lanes {
		if l.Role != RoleNear || l.Kind != KindDirect || len(l.NICs) != 1 || l.NICs[0] != h.NICs[i].Name {
			t.Errorf("lane %d is %+v", i, l)
		}
	}
	// Host memory is reached by the NIC's own function, whose link has half the lanes.
	net := newNetwork(h.sorted())
	bounced := net.rates([]carried{{gpu: 0, parts: []part{{throughMemory, 0, 1}}}})
	if bounced.busy[0] > 48 {
		t.Errorf("%g GB/s pass through host memory and a link of 48", bounced.busy[0])
	}
	direct := net.rates([]carried{{gpu: 0, parts: []part{{0, 0, 1}}}})
	if direct.busy[0] != 96 {
		t.Errorf("%g GB/s pass directly, want 96", direct.busy[0])
	}
	sameHost(t, o)

	text, err := h.NCCLXML()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{`"mlx5_0"`, `"mlx5_0_dma"`} {
		if !strings.Contains(string(text), name) {
			t.Errorf("the file for NCCL has no <net> %s", name)
		}
	}
	again, err := ReadNCCLXML(bytes.NewReader(text), "test.xml")
	if err != nil {
		t.Fatal(err)
	}
	if len(again.NICs) != 2 || again.NICs[0].DataDirect != "0008:03:00.0" || again.NICs[0].BusID != "0000:03:00.0" {
		t.Errorf("read again the NICs are %+v", again.NICs)
	}
	if got := pairOf(t, again.Paths(RulesNCCL), "0008:06:00.0", "mlx5_0"); got.Type != PXB {
		t.Errorf("read again, the GPU to its NIC is %v", got.Type)
	}
}

func TestDataDirectWithoutDriverCountsNotAndIsNoted(t *testing.T) {
	for driver, words := range map[string]string{"": "has no driver", "vfio-pci": "has driver vfio-pci"} {
		h := readTree(t, gb300(driver))
		if h.NICs[0].DataDirect != "" || h.NICs[0].Own != nil {
			t.Errorf("driver %q: %+v", driver, h.NICs[0])
		}
		if notes := strings.Join(h.Notes, "\n"); !strings.Contains(notes, "Data Direct function 0008:03:00.0 "+words) {
			t.Errorf("driver %q: the notes are %q", driver, notes)
		}
		if got := pairOf(t, h.Paths(RulesNCCL), "0008:06:00.0", "mlx5_0"); got.Type <= PXB {
			t.Errorf("driver %q: the GPU to its NIC is %v", driver, got.Type)
		}
	}
}

func TestManagementBridgeIsRefusedWithReason(t *testing.T) {
	files := map[string]string{}
	const port = "pci0000:00/0000:00:01.0"
	device(files, port, "class=0x060400", "vendor=0x8086")
	device(files, port+"/0000:01:00.0", gpuClass, gpuVendor)
	for i, words := range []string{"MODL=CX7", "MODL=CX7:SMDL=SW_MNG"} {
		at := []string{"pci0000:00/0000:00:02.0", "pci0000:00/0000:00:03.0"}[i]
		device(files, at, "class=0x020700", "vendor=0x15b3", "device=0x1021", "max_link_width=2", "vpd="+vpd("VA=MLX:"+words))
		rdmaDevice(files, at, []string{"mlx5_0", "mlx5_1"}[i], "state=4: ACTIVE", "rate=400 Gb/sec (4X NDR)")
	}
	o := tree(t, files)
	h, err := ReadSysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	if h.NICs[0].Management || h.NICs[0].Reason != "" {
		t.Errorf("a NIC is refused: %+v", h.NICs[0])
	}
	if n := h.NICs[1]; !n.Management || !strings.Contains(n.Reason, "management bridge of NVSwitches (SW_MNG") {
		t.Errorf("a bridge is %+v", n)
	}
	p, err := MakePlan(h, PlanConfig{})
	if err != nil || len(p.Lanes[0].NICs) != 1 || p.Lanes[0].NICs[0] != "mlx5_0" {
		t.Errorf("the lane is %+v, %v", p.Lanes, err)
	}
	if _, err := MakePlan(h, PlanConfig{Lanes: []Assignment{{GPU: "0", NICs: []string{"mlx5_1"}}}}); err == nil || !strings.Contains(err.Error(), "management bridge") {
		t.Errorf("a lane over a bridge, by configuration: %v", err)
	}
	sameHost(t, o)
}

func TestFileWithTinyLinkIsSuspectedToHaveABridge(t *testing.T) {
	file := func(width, device string) string {
		return `<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="100" rank="0" gdr="1"/></pci>` +
			`<pci busid="0000:02:00.0" class="0x020700" vendor="0x15b3" device="` + device + `" subsystem_vendor="0x15b3" subsystem_device="0x0041" link_speed="32.0 GT/s PCIe" link_width="` + width + `"><nic><net name="mlx5_4" dev="0" speed="400000" port="1" guid="0x1" gdr="1"/></nic></pci></cpu></system>`
	}
	for _, c := range []struct {
		width, device string
		want          bool
	}{{"2", "0x1021", true}, {"1", "0x1021", true}, {"16", "0x1021", false}, {"2", "0x1017", false}} {
		h, err := ReadNCCLXML(strings.NewReader(file(c.width, c.device)), "test.xml")
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(strings.Join(h.Notes, "\n"), "mlx5_4 may be a management bridge"); got != c.want || h.NICs[0].Reason != "" {
			t.Errorf("%s lanes, device %s: suspected %v, reason %q, notes %q", c.width, c.device, got, h.NICs[0].Reason, h.Notes)
		}
	}
}

func TestVPDOfOthersThanRootIsUnknownAndNoted(t *testing.T) {
	s := sysfs{files: forbidden{}, host: &Host{}, root: "/sys"}
	for range 2 {
		p, err := s.product("0000:01:00.0", PCIIdentity{Vendor: vendorMellanox, Device: deviceConnectX7})
		if err != nil || p != (product{}) {
			t.Errorf("%+v, %v", p, err)
		}
	}
	if len(s.host.Notes) != 1 || !strings.Contains(s.host.Notes[0], "only root can read vital product data") {
		t.Errorf("the notes are %q", s.host.Notes)
	}
}

// forbidden is files that may not be opened.
type forbidden struct{ machine }

func (forbidden) Open(path string) (openFile, error) {
	return nil, &os.PathError{Op: "open", Path: path, Err: os.ErrPermission}
}
