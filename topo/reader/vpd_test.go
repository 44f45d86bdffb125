package reader

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/pci"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
	"github.com/peerlane/peerlane/topo/ncclxml"
	"github.com/peerlane/peerlane/topo/planner"
)

func TestVPDNamesCardAndManagement(t *testing.T) {
	const card = "5b8f2b1e-3d5e-11ef-8000-b83fd2d6d2a0"
	whole := topotest.VPD("V3="+card, "VA=MLX:MODL=CX7:SMDL=SW_MNG")
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
		{"of a NIC", topotest.VPD("V3="+card, "VA=MLX:MODL=CX7"), product{card, false}},
		{"without a UUID", topotest.VPD("VA=SMDL=SW_MNG"), product{"", true}},
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

func TestVPDReadStopsAtEndTag(t *testing.T) {
	data := topotest.VPD("V3=x")
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

func TestDataDirectWithoutDriverAddsNote(t *testing.T) {
	for driver, words := range map[string]string{"": "has no driver", "vfio-pci": "has driver vfio-pci"} {
		h := readTree(t, topotest.GB300(driver))
		if h.NICs[0].DataDirect != "" || h.NICs[0].Own != nil {
			t.Errorf("driver %q: %+v", driver, h.NICs[0])
		}
		if notes := strings.Join(h.Notes, "\n"); !strings.Contains(notes, "Data Direct function 0008:03:00.0 "+words) {
			t.Errorf("driver %q: the notes are %q", driver, notes)
		}
		if got := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), "0008:06:00.0", "mlx5_0"); got.Type <= topo.PXB {
			t.Errorf("driver %q: the GPU to the NIC is %v", driver, got.Type)
		}
	}
}

func TestManagementBridgeHasReason(t *testing.T) {
	files := map[string]string{}
	const port = "pci0000:00/0000:00:01.0"
	topotest.Device(files, port, "class=0x060400", "vendor=0x8086")
	topotest.Device(files, port+"/0000:01:00.0", topotest.GPUClass, topotest.GPUVendor)
	for i, words := range []string{"MODL=CX7", "MODL=CX7:SMDL=SW_MNG"} {
		at := []string{"pci0000:00/0000:00:02.0", "pci0000:00/0000:00:03.0"}[i]
		topotest.Device(files, at, "class=0x020700", "vendor=0x15b3", "device=0x1021", "max_link_width=2", "vpd="+
			topotest.VPD("VA=MLX:"+words))
		topotest.RDMADevice(files, at, []string{"mlx5_0", "mlx5_1"}[i], "state=4: ACTIVE", "rate=400 Gb/sec (4X NDR)")
	}
	o := topotest.Tree(t, files)
	h, err := Sysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	if h.NICs[0].Management || h.NICs[0].Reason != "" {
		t.Errorf("a NIC is refused: %+v", h.NICs[0])
	}
	if n := h.NICs[1]; !n.Management || !strings.Contains(n.Reason, "management bridge of NVSwitches (SW_MNG") {
		t.Errorf("a bridge is %+v", n)
	}
	p, err := planner.Make(h, planner.Config{})
	if err != nil || len(p.Lanes[0].NICs) != 1 || p.Lanes[0].NICs[0] != "mlx5_0" {
		t.Errorf("the lane is %+v, %v", p.Lanes, err)
	}
	_, err = planner.Make(h, planner.Config{Lanes: []planner.Assignment{{GPU: "0", NICs: []string{"mlx5_1"}}}})
	if e, ok := errors.AsType[*planner.RefusedError](err); !ok || e.Device != "mlx5_1" || e.Reason != h.NICs[1].Refusal() {
		t.Errorf("a lane over a bridge, by configuration: %v", err)
	}
	sameHost(t, o)
}

func TestNCCLXMLNarrowLinkAddsBridgeNote(t *testing.T) {
	file := func(width, device string) string {
		return `<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="100" rank="0" gdr="1"/></pci>` +
			`<pci busid="0000:02:00.0" class="0x020700" vendor="0x15b3" device="` +
			device + `" subsystem_vendor="0x15b3" subsystem_device="0x0041" link_speed="32.0 GT/s PCIe" link_width="` +
			width + `"><nic><net name="mlx5_4" dev="0" speed="400000" port="1" guid="0x1" gdr="1"/></nic></pci></cpu></system>`
	}
	for _, c := range []struct {
		width, device string
		want          bool
	}{{"2", "0x1021", true}, {"1", "0x1021", true}, {"16", "0x1021", false}, {"2", "0x1017", false}} {
		h, err := ncclxml.Read(strings.NewReader(file(c.width, c.device)), "test.xml")
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(strings.Join(h.Notes, "\n"), "mlx5_4 may be a management bridge"); got != c.want ||
			h.NICs[0].Reason != "" {
			t.Errorf("%s lanes, device %s: suspected %v, reason %q, notes %q", c.width, c.device, got, h.NICs[0].Reason, h.Notes)
		}
	}
}

func TestVPDWithoutRootIsUnknownAndNoted(t *testing.T) {
	s := sysfs{files: forbidden{}, host: &topo.Host{}, root: "/sys"}
	for range 2 {
		p, err := s.product("0000:01:00.0", topo.PCIIdentity{Vendor: pci.VendorMellanox, Device: pci.DeviceConnectX7})
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

func TestCaptureKeepsDataDirectFunctions(t *testing.T) {
	sameHost(t, topotest.Tree(t, topotest.GB300("mlx5_ib")))
}
