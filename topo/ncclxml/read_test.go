package ncclxml_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
	"github.com/peerlane/peerlane/topo/internal/textfile"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
	"github.com/peerlane/peerlane/topo/ncclxml"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
)

func TestPathsAgreeWithNCCL(t *testing.T) {
	compared := 0
	for _, table := range topotest.Files(t, "../graph/testdata/nccl/?gx-*.tsv", "expected/*.tsv") {
		name := strings.TrimSuffix(filepath.Base(table), ".tsv")
		dir := filepath.Dir(table)
		if filepath.Base(dir) == "expected" {
			dir = filepath.Dir(dir)
		}
		f, err := os.Open(filepath.Join(dir, name+".xml"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		h, err := ncclxml.Read(f, name)
		if strings.HasPrefix(name, "nixl-hwloc-") {
			if !errors.Is(err, ncclxml.ErrHwloc) {
				t.Errorf("%s: a file of hwloc gives %v", name, err)
			}
			continue
		}
		if err != nil {
			t.Error(err)
			continue
		}
		compared++
		t.Run(name, func(t *testing.T) { comparePaths(t, h, table) })
	}
	if compared == 0 {
		t.Error("nothing was compared")
	}
}

func comparePaths(t *testing.T, h *topo.Host, table string) {
	f, err := os.Open(table)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	seen := map[[2]string]bool{} // tables of the tree have both orders of two GPUs
	for lines.Scan() {
		cells := strings.Split(lines.Text(), "\t")
		if cells[0] == "from" {
			continue
		}
		if !seen[[2]string{cells[1], cells[0]}] {
			seen[[2]string{cells[0], cells[1]}] = true
		}
		wantType, err := topo.ParsePathType(cells[2])
		if err != nil {
			t.Fatal(err)
		}
		wantBandwidth, err := strconv.ParseFloat(cells[3], 64)
		if err != nil {
			t.Fatal(err)
		}
		for _, ends := range [][2]string{{cells[0], cells[1]}, {cells[1], cells[0]}} {
			got, err := graph.Between(h, ends[0], ends[1])
			if err != nil {
				t.Error(err)
			} else if got.Type != wantType || math.Abs(got.Bandwidth-wantBandwidth) > 0.001*max(1, wantBandwidth) {
				t.Errorf("%s to %s: %v %g, and NCCL has %v %g", ends[0], ends[1], got.Type, got.Bandwidth, wantType, wantBandwidth)
			}
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	g, n := len(h.GPUs), len(h.NICs)
	if want := g*n + g*(g-1)/2; len(seen) != want {
		t.Errorf("the table has %d pairs, and %d GPUs with %d NICs make %d", len(seen), g, n, want)
	}
}

func TestPathHasBandwidthOfSlowestLink(t *testing.T) {
	h := ncclfile.ReadXML(t, topotest.SmallHost)
	for _, tt := range []struct {
		from, to string
		want     topo.Path
		why      string
	}{
		{"0000:02:00.0", "0000:02:00.0", topo.Path{Type: topo.LOC, Bandwidth: bandwidths.Local}, "itself"},
		{"0000:02:00.0", "mlx5_0", topo.Path{Type: topo.PIX, Bandwidth: 25}, "one switch, and a port of 200 Gbit/s"},
		{"02:00.0", "0000:04:00.0", topo.Path{Type: topo.PIX, Bandwidth: 25}, "other spellings"},
		{"0000:03:00.0", "mlx5_0", topo.Path{Type: topo.PIX, Bandwidth: 12}, "a link of 16 GT/s and 8 lanes"},
		{"0000:06:00.0", "mlx5_0", topo.Path{Type: topo.PXB, Bandwidth: 25}, "two switches"},
		{"0000:07:00.0", "mlx5_0", topo.Path{Type: topo.PHB, Bandwidth: 12},
			"the CPU, and a link that tells nothing of itself"},
		{"0000:81:00.0", "mlx5_0", topo.Path{Type: topo.SYS, Bandwidth: 22}, "the socket link of Sapphire Rapids"},
		{"0000:02:00.0", "0000:03:00.0", topo.Path{Type: topo.PIX, Bandwidth: 12}, "one switch"},
		{"0000:03:00.0", "0000:07:00.0", topo.Path{Type: topo.NVL, Bandwidth: 41.2}, "two NVLinks"},
		{"0000:02:00.0", "0000:07:00.0", topo.Path{Type: topo.PHB, Bandwidth: 12},
			"PCIe does not go on by NVLink through a GPU"},
		{"0000:02:00.0", "eth0", topo.Path{Type: topo.PHB, Bandwidth: 12.5}, "a NIC that the file puts straight at the CPU"},
	} {
		for _, ends := range [][2]string{{tt.from, tt.to}, {tt.to, tt.from}} {
			got, err := graph.Between(h, ends[0], ends[1])
			if err != nil {
				t.Fatal(err)
			}
			if got != tt.want {
				t.Errorf("%s to %s: %v, want %v: %s", ends[0], ends[1], got, tt.want, tt.why)
			}
		}
	}
}

func TestPathUnknownDeviceErrorNamesDevice(t *testing.T) {
	for _, name := range []string{"mlx5_9", "0000:44:00.0", "0000:01:00.0", ""} {
		_, err := graph.Between(ncclfile.ReadXML(t, topotest.SmallHost), "0000:02:00.0", name)
		if !testutil.HasError(err, &graph.DeviceError{Name: name}) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestNVSwitchesJoinAllGPUs(t *testing.T) {
	h := ncclfile.ReadXML(t, `<system version="1"><cpu numaid="0" arch="x86_64" vendor="AuthenticAMD">
		<pci busid="1:0.0" class="0x030200"><gpu dev="0" sm="80"><nvlink target="c1:0.0" count="6" tclass="0x068000"/><nvlink target="c2:0.0" count="6" tclass="0x068000"/></gpu></pci>
		<pci busid="2:0.0" class="0x030200"><gpu dev="1" sm="80"><nvlink target="c1:0.0" count="12" tclass="0x068000"/></gpu></pci>
		<pci busid="3:0.0" class="0x030200"><gpu dev="2" sm="80"><nvlink target="3:0.0" count="12" tclass="0x030200"/></gpu></pci>
	</cpu></system>`)
	if got, err := graph.Between(h, "1:0.0", "2:0.0"); err != nil || got != (topo.Path{Type: topo.NVL, Bandwidth: 240}) {
		t.Errorf("%v, %v; want NVL at 12 links of 20 GB/s", got, err)
	}
	if got, err := graph.Between(h, "1:0.0", "3:0.0"); err != nil || got.Type != topo.PHB {
		t.Errorf("%v, %v; a GPU whose NVLinks end at itself is reached by PCIe", got, err)
	}
}

func TestReadSkeletonFindsDevicesByClass(t *testing.T) {
	h := ncclfile.ReadXML(t, `<system version="1"><cpu numaid="0" arch="x86_64" vendor="AuthenticAMD">
		<pci busid="ffff:ff:01.0" class="0x060400">
			<pci busid="0002:00:00.0" class="0x030200"/>
			<pci busid="0001:00:00.0" class="0x030200"/>
			<pci busid="0101:00:00.0" class="0x020700"/>
			<pci busid="0000:03:00.0" class="0x030000" vendor="0x1a03"/>
			<pci busid="0000:04:00.0" class="0x068000"/>
		</pci>
		<pci busid="0000:05:00.0"/>
	</cpu></system>`)
	want := &topo.Host{
		Source:   topo.Source{Kind: topo.SourceNCCLXML, File: "test.xml"},
		CPUs:     []topo.CPU{{NUMA: 0, Vendor: "AuthenticAMD", Socket: 16}},
		Switches: []topo.Switch{{BusID: "ffff:ff:01.0", Place: topo.Place{Link: 12}}},
		GPUs: []topo.GPU{
			{Index: 0, BusID: "0001:00:00.0", Order: 1, Minor: -1, Place: topo.Place{Switch: "ffff:ff:01.0", Link: 12}},
			{Index: 1, BusID: "0002:00:00.0", Minor: -1, Place: topo.Place{Switch: "ffff:ff:01.0", Link: 12}},
		},
		NICs: []topo.NIC{{Name: "nic@0101:00:00.0", BusID: "0101:00:00.0", Order: 2, Protocol: "InfiniBand",
			Place: topo.Place{Switch: "ffff:ff:01.0", Link: 12}}},
		Notes: []string{
			"graphics device 0000:03:00.0 of vendor 0x1a03 is ignored: its maker is not NVIDIA, AMD or Hygon",
			"1 PCI devices of unknown type, without a class, a <gpu> or a <nic>, are ignored",
		},
	}
	if diff := cmp.Diff(want, h, topotest.Plain); diff != "" {
		t.Error(diff)
	}
}

func TestReadNetsOfFunctionBecomeNICs(t *testing.T) {
	h := ncclfile.ReadXML(t, `<system version="2"><cpu numaid="0" arch="x86_64">
		<pci busid="0000:a1:00.0" class="0x020000"><nic>
			<net name="mlx5_10" speed="-1" port="2" guid="0x7893510003a1420c"/>
			<net name="mlx5_2" speed="100000" port="1" guid="0x7893510003a1420c"/>
			<net speed="100000" port="3"/>
		</nic></pci>
		<pci busid="0000:62:00.0" class="0x020000"><nic><net name="enp98s0f0" speed="1000" port="0" guid="0x0"/></nic></pci>
	</cpu></system>`)
	a1, a2 := topo.Place{Link: 12}, topo.Place{Link: 12}
	want := []topo.NIC{
		{Name: "enp98s0f0", BusID: "0000:62:00.0", GUID: "0x0", Order: 3, Place: a2, Ports: []topo.Port{{RateGbps: 1}},
			Ethernet: true, Reason: "it does not support RDMA"},
		{Name: "mlx5_2", BusID: "0000:a1:00.0", GUID: "0x7893510003a1420c", Order: 1, Place: a1,
			Ports: []topo.Port{{Number: 1, RateGbps: 100}}},
		{Name: "mlx5_10", BusID: "0000:a1:00.0", GUID: "0x7893510003a1420c", Place: a1, Ports: []topo.Port{{Number: 2}}},
		{Name: "nic@0000:a1:00.0#2", BusID: "0000:a1:00.0", Order: 2, Place: a1,
			Ports: []topo.Port{{Number: 3, RateGbps: 100}}},
	}
	if diff := cmp.Diff(want, h.NICs, topotest.Plain); diff != "" {
		t.Error(diff)
	}
}

func TestReadBondNameSetsBond(t *testing.T) {
	for _, n := range ncclfile.ReadXML(t, topotest.System(topotest.CPUXML(0,
		topotest.NetXML("0000:01:00.0", "mlx5_bond_0"), topotest.NetXML("0000:02:00.0", "mlx5_1")))).NICs {
		if n.Bond != (n.Name == "mlx5_bond_0") {
			t.Errorf("%s: bond %t", n.Name, n.Bond)
		}
	}
}

// NCCL reads a <net> with dev and without gdr as a NIC without GPUDirect RDMA. NCCL completes a
// <net> without dev from the host.
func TestReadNetWithoutGDRHasNoDirectRoute(t *testing.T) {
	pci := func(busID, net string) string {
		return fmt.Sprintf(`<pci busid="%s" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"><nic>%s</nic></pci>`,
			busID, net)
	}
	h := ncclfile.ReadXML(t, topotest.System(topotest.CPUXML(0,
		topotest.Bridge("0000:01:00.0", "0x10b5 0x9765 0x10b5 0x9765", topotest.GPUXML("0000:02:00.0", 0, "")+
			pci("0000:03:00.0", `<net name="a" dev="0" speed="400000" guid="0x1" gdr="1"/>`)+
			pci("0000:04:00.0", `<net name="b" dev="1" speed="400000" guid="0x2"/>`)+
			pci("0000:05:00.0", `<net name="c" speed="400000" guid="0x3"/>`)+
			`<pci busid="0000:06:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"/>`))))
	pairs := graph.All(h, topo.RulesNCCL)
	for nic, want := range map[string]bool{"a": true, "b": false, "c": true, "nic@0000:06:00.0": true} {
		if got := ncclfile.PairOf(t, pairs, "0000:02:00.0", nic); got.Type != topo.PIX || got.Policy.Direct != want {
			t.Errorf("%s: %v, direct %t; want PIX, %t", nic, got.Type, got.Policy.Direct, want)
		}
	}
}

func TestNICDownHasNoPolicyAndKeepsOtherNICs(t *testing.T) {
	h := ncclfile.ReadXML(t, topotest.System(topotest.CPUXML(0,
		topotest.Bridge("0000:01:00.0", "0x10b5 0x9765 0x10b5 0x9765",
			topotest.GPUXML("0000:02:00.0", 0, nvlinkTo("0000:12:00.0"))+topotest.NetXML("0000:03:00.0", "mlx5_0")),
		topotest.Bridge("0000:11:00.0", "0x10b5 0x9765 0x10b5 0x9765",
			topotest.GPUXML("0000:12:00.0", 1, nvlinkTo("0000:02:00.0"))+topotest.NetXML("0000:13:00.0", "mlx5_1")))))
	if got := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), "0000:12:00.0", "mlx5_0"); got.PXN == nil {
		t.Fatalf("%+v; want PXN", got)
	}
	h.NICs[1].Ports[0].State = "DOWN"
	pairs := graph.All(h, topo.RulesNCCL)
	if got := ncclfile.PairOf(t, pairs, "0000:12:00.0", "mlx5_1"); got.Type != topo.PIX || got.Policy != nil {
		t.Errorf("the NIC that is down: %+v", got)
	}
	if got := ncclfile.PairOf(t, pairs, "0000:12:00.0", "mlx5_0"); got.Policy == nil {
		t.Errorf("second NIC: %+v", got)
	}
}

func nvlinkTo(busID string) string {
	return fmt.Sprintf(`<nvlink target="%s" count="4" tclass="0x030200"/>`, busID)
}

// at is an error at a place of a file.
func at(line, column int) error { return &textfile.PlaceError{Line: line, Column: column} }

func TestReadMalformedTopologyFails(t *testing.T) {
	cpu := func(inner string) string {
		return `<system version="1"><cpu numaid="0">` + inner + `</cpu></system>`
	}
	for name, tt := range map[string]struct {
		text string
		want error
	}{
		"empty":               {"", io.EOF},
		"not closed":          {`<system version="1"><cpu`, at(1, 25)},
		"hwloc":               {`<topology version="2.0"/>`, ncclxml.ErrHwloc},
		"another root":        {`<graphs version="1"/>`, &ncclxml.RootError{Root: "graphs"}},
		"another version":     {`<system version="7"><cpu numaid="0"/></system>`, &ncclxml.VersionError{Version: "7"}},
		"no CPU":              {`<system version="1"/>`, ncclxml.ErrNoCPU},
		"a NUMA node of 2^62": {`<system version="1"><cpu numaid="4611686018427387904"/></system>`, &topo.RangeError{Number: "NUMA node", Value: 1 << 62, Max: 65535}},
		"a NUMA node of -2":   {`<system version="1"><cpu numaid="-2"/></system>`, &topo.RangeError{Number: "NUMA node", Value: -2, Max: 65535}},
		"a GPU of 2^62":       {cpu(`<pci busid="1:0.0"><gpu dev="4611686018427387904"/></pci>`), &topo.RangeError{Number: "GPU index", Value: 1 << 62, Max: 4095}},
		"a GPU of 2^64":       {cpu(`<pci busid="1:0.0"><gpu dev="18446744073709551616"/></pci>`), &topo.RangeError{Number: "GPU index", Value: math.MaxInt, Max: 4095}},
		"no NUMA node":        {`<system version="1"><cpu/></system>`, at(1, 27)},
		"two equal nodes":     {`<system version="1"><cpu numaid="0"/><cpu numaid="0"/></system>`, at(1, 55)},
		"a wrong address":     {cpu(`<pci busid="x"/>`), &topo.BusIDError{Text: "x"}},
		"no address":          {cpu(`<pci class="0x030200"/>`), &topo.BusIDError{}},
		"an address twice":    {cpu(`<pci busid="1:0.0" class="0x030200"/><pci busid="0000:01:00.0" class="0x020000"/>`), at(1, 118)},
		"a name twice":        {cpu(`<pci busid="1:0.0"><nic><net name="a"/><net name="a"/></nic></pci>`), &ncclxml.DuplicateNetError{Name: "a"}},
		"a nameless net":      {cpu(`<nic><net/></nic>`), at(1, 37)},
		"NVLinks uncounted":   {cpu(`<pci busid="1:0.0"><gpu dev="0"><nvlink target="2:0.0" tclass="0x030200"/></gpu></pci>`), at(1, 56)},
		"an NVLink nowhere":   {cpu(`<pci busid="1:0.0"><gpu dev="0"><nvlink count="1" tclass="0x030200"/></gpu></pci>`), &topo.BusIDError{}},
	} {
		_, err := ncclxml.Read(strings.NewReader(tt.text), "some.xml")
		var of *textfile.FileError
		if !testutil.HasError(err, tt.want) || !errors.As(err, &of) || of.Name != "some.xml" {
			t.Errorf("%s: %v; want an error with some.xml and %v", name, err, tt.want)
		}
	}
}

func TestReadMissingFileErrorNamesFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "topo.xml")
	var failed *fs.PathError
	if _, err := reader.Read(file, topo.Options{}); !errors.Is(err, fs.ErrNotExist) || !errors.As(err, &failed) ||
		failed.Path != file {
		t.Error(err)
	}
}

func FuzzReadNCCLXML(f *testing.F) {
	topotest.AddSeeds(f, "*.xml", topotest.SmallHost,
		`<system version="1"><cpu numaid="65535"><pci busid="1:0.0"><gpu dev="4095"/></pci></cpu></system>`,
		`<system version="1"><cpu numaid="4611686018427387904"><pci busid="1:0.0"><gpu dev="9223372036854775807"/></pci></cpu></system>`)
	f.Fuzz(func(t *testing.T, text []byte) {
		h, err := ncclxml.Read(strings.NewReader(string(text)), "fuzz.xml")
		if err != nil {
			if h != nil {
				t.Error("both a host and an error")
			}
			return
		}
		if pairs := graph.All(h, topo.RulesSMI); len(pairs) != (len(h.GPUs)+len(h.NICs))*max(0, len(h.GPUs)+len(h.NICs)-1) {
			t.Errorf("%d GPUs and %d NICs have %d pairs", len(h.GPUs), len(h.NICs), len(pairs))
		}
		topotest.CheckNumbers(t, h)
		if len(h.Hosts()) > 1 {
			return // several hosts: Plan refuses the topology
		}
		// A topology that Read accepts can be planned and formatted.
		plan, err := planner.Make(h, planner.Config{})
		if err != nil {
			t.Fatal(err)
		}
		if err := plan.Check(); err != nil {
			t.Error(err)
		}
		if len(plan.Lanes) != len(h.GPUs) {
			t.Errorf("%d GPUs, %d lanes", len(h.GPUs), len(plan.Lanes))
		}
		for _, g := range h.GPUs {
			for _, n := range h.NICs {
				path, err := graph.Between(h, g.BusID, n.Name)
				if err != nil {
					t.Fatal(err)
				}
				back, err := graph.Between(h, n.Name, g.BusID)
				if err != nil {
					t.Fatal(err)
				}
				bad := func(p topo.Path) bool { return p.Type < topo.PIX || p.Bandwidth < 0 || math.IsNaN(p.Bandwidth) }
				if bad(path) || bad(back) || (path.Type == topo.DIS) != (back.Type == topo.DIS) {
					t.Errorf("%s to %s: %v, and back %v", g.BusID, n.Name, path, back)
				}
			}
		}
	})
}

func TestReadNCCLXMLMergesNetsWithoutPCIDevice(t *testing.T) {
	const tunnel = `<nic><net name="tunl0" dev="0" speed="10000" port="0" guid="0x0"/></nic>`
	h := ncclfile.ReadXML(t, `<system version="1"><cpu numaid="0"><pci busid="1:0.0" class="0x030200"/>`+
		tunnel+`</cpu><cpu numaid="1">`+tunnel+`</cpu></system>`)
	if len(h.NICs) != 1 || h.NICs[0].Name != "tunl0" || h.NICs[0].NUMA != 0 {
		t.Errorf("%+v", h.NICs)
	}
	// A NIC with a PCI device and a NIC without differ.
	_, err := ncclxml.Read(strings.NewReader(`<system version="1"><cpu numaid="0"><pci busid="1:0.0"><nic><net name="tunl0"/></nic></pci>`+tunnel+`</cpu></system>`), "some.xml")
	if !testutil.HasError(err, &ncclxml.DuplicateNetError{Name: "tunl0"}) {
		t.Error(err)
	}
	// Hosts of a file do not share NICs.
	cpu := func(hash int) string { return fmt.Sprintf(`<cpu host_hash="0x%d" numaid="0">%s</cpu>`, hash, tunnel) }
	if h := ncclfile.ReadXML(t, `<system version="1">`+cpu(1)+cpu(2)+`</system>`); len(h.NICs) != 2 {
		t.Errorf("two hosts: %+v", h.NICs)
	}
}

func TestReadUnusableNumberAddsNote(t *testing.T) {
	h := ncclfile.ReadXML(t, `<system version="1"><cpu numaid="0">
		<pci busid="1:0.0" class="0x030200" link_speed="NaN GT/s" link_width="99999999999"><gpu dev="0" sm="90"/></pci>
		<pci busid="2:0.0" class="0x030200" link_speed="1e309 GT/s PCIe" link_width="-4"><gpu dev="1" sm="90"/></pci>
		<pci busid="3:0.0" class="0x020700" link_speed="Unknown speed" link_width=""><nic><net name="mlx5_0" speed="NaN"/></nic></pci>
		<pci busid="4:0.0" class="0x020700" link_speed="" link_width="0"><nic><net name="mlx5_1" speed="1e309"/></nic></pci>
		<pci busid="5:0.0" class="0x020700" link_speed="16 GT/s" link_width="255"><nic><net name="mlx5_2" speed="99999999999"/></nic></pci>
		<pci busid="6:0.0" class="0x020700"><nic><net name="mlx5_3" speed="-1"/></nic></pci>
	</cpu></system>`)
	want := []string{
		`link_speed "NaN GT/s" of 0000:01:00.0, and of 1 more is invalid: the link counts as PCIe 3.0`,
		`link_width "99999999999" of 0000:01:00.0, and of 1 more is invalid: the link counts as x16`,
		`speed "NaN" of mlx5_0, and of 2 more is invalid: the port counts as 10 Gbit/s`,
	}
	if diff := cmp.Diff(want, h.Notes); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
	for _, g := range h.GPUs {
		if g.Link != 12 || g.LinkSpeed != "" || g.LinkWidth != 0 {
			t.Errorf("%+v", g.Place)
		}
	}
	for _, n := range h.NICs {
		if n.RateGbps() != 0 {
			t.Errorf("%s has %v Gbit/s", n.Name, n.RateGbps())
		}
	}
}

func TestReadMalformedXMLErrorNamesLine(t *testing.T) {
	crlf := strings.ReplaceAll(topotest.SmallHost, "\n", "\r\n")
	if diff := cmp.Diff(ncclfile.ReadXML(t, topotest.SmallHost), ncclfile.ReadXML(t, crlf)); diff != "" {
		t.Errorf("CRLF changes the host:\n%s", diff)
	}
	for name, tt := range map[string]struct {
		text string
		want error
	}{
		"deep":    {strings.Repeat("<pci>", 100), at(1, 326)},
		"wide":    {"<system>" + strings.Repeat("<pci/>", ncclxml.MaxXMLElements+1), at(1, 393225)},
		"torn":    {"<system version=\"1\">\n<cpu numaid=\"0\"\n<", at(3, 1)},
		"a place": {"<system version=\"1\">\n<cpu numaid=\"0\">\n<pci busid=\"x\"/>\n</cpu></system>", at(3, 17)},
	} {
		_, err := ncclxml.Read(strings.NewReader(tt.text), "some.xml")
		if !testutil.HasError(err, tt.want) {
			t.Errorf("%s: %v; want %v", name, err, tt.want)
		}
	}
}

func TestEveryNCCLFileLoads(t *testing.T) {
	for _, file := range topotest.Files(t, "../graph/testdata/nccl/*.xml", "*.xml") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), "<system") {
			continue
		}
		if _, err := ncclxml.Read(strings.NewReader(string(text)), file); err != nil {
			t.Error(err)
		}
	}
}
