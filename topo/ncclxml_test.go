package topo

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// topologies is a collection of topology files of real machines that some
// checkouts have beside them, with what NCCL makes of each.
const topologies = "../../shared/topologies"

func TestPathsAgreeWithNCCL(t *testing.T) {
	tables, err := filepath.Glob(filepath.Join(topologies, "expected", "*.tsv"))
	if err != nil {
		t.Fatal(err)
	}
	if len(tables) == 0 {
		t.Skipf("no tables in %s", topologies)
	}
	compared := 0
	for _, table := range tables {
		name := strings.TrimSuffix(filepath.Base(table), ".tsv")
		f, err := os.Open(filepath.Join(topologies, name+".xml"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		h, err := ReadNCCLXML(f, name)
		if strings.HasPrefix(name, "nixl-hwloc-") {
			if err == nil || !strings.Contains(err.Error(), "hwloc") {
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

func comparePaths(t *testing.T, h *Host, table string) {
	f, err := os.Open(table)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	pairs := 0
	for lines.Scan() {
		cells := strings.Split(lines.Text(), "\t")
		if cells[0] == "from" {
			continue
		}
		pairs++
		wantType, err := ParsePathType(cells[2])
		if err != nil {
			t.Fatal(err)
		}
		wantBandwidth, err := strconv.ParseFloat(cells[3], 64)
		if err != nil {
			t.Fatal(err)
		}
		for _, ends := range [][2]string{{cells[0], cells[1]}, {cells[1], cells[0]}} {
			got, err := h.Path(ends[0], ends[1])
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
	if want := g*n + g*(g-1)/2; pairs != want {
		t.Errorf("the table has %d pairs, and %d GPUs with %d NICs make %d", pairs, g, n, want)
	}
}

// smallHost: two GPUs and a NIC under one switch, a GPU under a switch below
// it, one at the same CPU, one at the other.
const smallHost = `<?xml version="1.0"?>
<!-- a comment -->
<system version="1">
  <cpu numaid="0" affinity="ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:01:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:02:00.0" class="0x030200" vendor="0x10de" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="90"/></pci>
      <pci busid="0000:03:00.0" class="0x030200" vendor="0x10de" link_speed="16.0 GT/s PCIe" link_width="8"><gpu dev="1" sm="90"><nvlink target="0000:07:00.0" count="2" tclass="0x030200"/></gpu></pci>
      <pci busid="0000:04:00.0" class="0x020700" vendor="0x15b3" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="200000" port="1" guid="0x1234"/></nic>
      </pci>
      <pci busid="0000:05:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
        <pci busid="0000:06:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="2" sm="90"/></pci>
      </pci>
    </pci>
    <pci busid="0000:07:00.0" class="0x030200" link_speed="" link_width="0"><gpu dev="3" sm="90"><nvlink target="0000:03:00.0" count="2" tclass="0x030200"/></gpu></pci>
    <nic><net name="eth0" dev="1" speed="100000" port="0" guid="0x0"/></nic>
  </cpu>
  <cpu numaid="1" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:81:00.0" class="0x030200" link_speed="32 GT/s" link_width="16"><gpu dev="4" sm="90"/></pci>
  </cpu>
</system>`

func readXML(t *testing.T, text string) *Host {
	t.Helper()
	h, err := ReadNCCLXML(strings.NewReader(text), "test.xml")
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestPathIsTheWorstLinkOnTheWay(t *testing.T) {
	h := readXML(t, smallHost)
	for _, tt := range []struct {
		from, to string
		want     Path
		why      string
	}{
		{"0000:02:00.0", "0000:02:00.0", Path{LOC, localBandwidth}, "itself"},
		{"0000:02:00.0", "mlx5_0", Path{PIX, 25}, "one switch, and a port of 200 Gbit/s"},
		{"02:00.0", "0000:04:00.0", Path{PIX, 25}, "other spellings"},
		{"0000:03:00.0", "mlx5_0", Path{PIX, 12}, "a link of 16 GT/s and 8 lanes"},
		{"0000:06:00.0", "mlx5_0", Path{PXB, 25}, "two switches"},
		{"0000:07:00.0", "mlx5_0", Path{PHB, 12}, "the CPU, and a link that tells nothing of itself"},
		{"0000:81:00.0", "mlx5_0", Path{SYS, 22}, "the socket link of Sapphire Rapids"},
		{"0000:02:00.0", "0000:03:00.0", Path{PIX, 12}, "one switch"},
		{"0000:03:00.0", "0000:07:00.0", Path{NVL, 41.2}, "two NVLinks"},
		{"0000:02:00.0", "0000:07:00.0", Path{PHB, 12}, "PCIe does not go on by NVLink through a GPU"},
		{"0000:02:00.0", "eth0", Path{PHB, 12.5}, "a NIC that the file puts straight at the CPU"},
	} {
		for _, ends := range [][2]string{{tt.from, tt.to}, {tt.to, tt.from}} {
			got, err := h.Path(ends[0], ends[1])
			if err != nil {
				t.Fatal(err)
			}
			if got != tt.want {
				t.Errorf("%s to %s: %v, want %v: %s", ends[0], ends[1], got, tt.want, tt.why)
			}
		}
	}
}

func TestPathNamesAnUnknownDevice(t *testing.T) {
	for _, name := range []string{"mlx5_9", "0000:44:00.0", "0000:01:00.0", ""} {
		if _, err := readXML(t, smallHost).Path("0000:02:00.0", name); err == nil || !strings.Contains(err.Error(), strconv.Quote(name)) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestNVSwitchesJoinAllGPUs(t *testing.T) {
	h := readXML(t, `<system version="1"><cpu numaid="0" arch="x86_64" vendor="AuthenticAMD">
		<pci busid="1:0.0" class="0x030200"><gpu dev="0" sm="80"><nvlink target="c1:0.0" count="6" tclass="0x068000"/><nvlink target="c2:0.0" count="6" tclass="0x068000"/></gpu></pci>
		<pci busid="2:0.0" class="0x030200"><gpu dev="1" sm="80"><nvlink target="c1:0.0" count="12" tclass="0x068000"/></gpu></pci>
		<pci busid="3:0.0" class="0x030200"><gpu dev="2" sm="80"><nvlink target="3:0.0" count="12" tclass="0x030200"/></gpu></pci>
	</cpu></system>`)
	if got, err := h.Path("1:0.0", "2:0.0"); err != nil || got != (Path{NVL, 240}) {
		t.Errorf("%v, %v; want NVL at 12 links of 20 GB/s", got, err)
	}
	if got, err := h.Path("1:0.0", "3:0.0"); err != nil || got.Type != PHB {
		t.Errorf("%v, %v; a GPU whose NVLinks end at itself is reached by PCIe", got, err)
	}
}

func TestSkeletonIsReadByClass(t *testing.T) {
	h := readXML(t, `<system version="1"><cpu numaid="0" arch="x86_64" vendor="AuthenticAMD">
		<pci busid="ffff:ff:01.0" class="0x060400">
			<pci busid="0002:00:00.0" class="0x030200"/>
			<pci busid="0001:00:00.0" class="0x030200"/>
			<pci busid="0101:00:00.0" class="0x020700"/>
			<pci busid="0000:03:00.0" class="0x030000" vendor="0x1a03"/>
			<pci busid="0000:04:00.0" class="0x068000"/>
		</pci>
		<pci busid="0000:05:00.0"/>
	</cpu></system>`)
	want := &Host{
		Source:   Source{Kind: SourceNCCLXML, File: "test.xml"},
		CPUs:     []CPU{{NUMA: 0, Vendor: "AuthenticAMD", Socket: 16}},
		Switches: []Switch{{BusID: "ffff:ff:01.0", Place: Place{Link: 12}}},
		GPUs: []GPU{
			{Index: 0, BusID: "0001:00:00.0", Order: 1, Minor: -1, Place: Place{Switch: "ffff:ff:01.0", Link: 12}},
			{Index: 1, BusID: "0002:00:00.0", Minor: -1, Place: Place{Switch: "ffff:ff:01.0", Link: 12}},
		},
		NICs: []NIC{{Name: "nic@0101:00:00.0", BusID: "0101:00:00.0", Order: 2, Protocol: "InfiniBand", Place: Place{Switch: "ffff:ff:01.0", Link: 12}}},
		Notes: []string{
			"graphics device 0000:03:00.0 of vendor 0x1a03 is left out: it is neither NVIDIA's, AMD's nor Hygon's",
			"1 PCI devices have neither a class nor a <gpu> or <nic>, so nothing tells what they are; they are left out",
		},
	}
	if diff := cmp.Diff(want, h, plain); diff != "" {
		t.Error(diff)
	}
}

func TestNetsOfAFile(t *testing.T) {
	h := readXML(t, `<system version="2"><cpu numaid="0" arch="x86_64">
		<pci busid="0000:a1:00.0" class="0x020000"><nic>
			<net name="mlx5_10" speed="-1" port="2" guid="0x7893510003a1420c"/>
			<net name="mlx5_2" speed="100000" port="1" guid="0x7893510003a1420c"/>
			<net speed="100000" port="3"/>
		</nic></pci>
		<pci busid="0000:62:00.0" class="0x020000"><nic><net name="enp98s0f0" speed="1000" port="0" guid="0x0"/></nic></pci>
	</cpu></system>`)
	a1, a2 := Place{Link: 12}, Place{Link: 12}
	want := []NIC{
		{Name: "enp98s0f0", BusID: "0000:62:00.0", GUID: "0x0", Order: 3, Place: a2, Ports: []Port{{RateGbps: 1}}, Ethernet: true, Reason: "it has no RDMA"},
		{Name: "mlx5_2", BusID: "0000:a1:00.0", GUID: "0x7893510003a1420c", Order: 1, Place: a1, Ports: []Port{{Number: 1, RateGbps: 100}}},
		{Name: "mlx5_10", BusID: "0000:a1:00.0", GUID: "0x7893510003a1420c", Place: a1, Ports: []Port{{Number: 2}}},
		{Name: "nic@0000:a1:00.0#2", BusID: "0000:a1:00.0", Order: 2, Place: a1, Ports: []Port{{Number: 3, RateGbps: 100}}},
	}
	if diff := cmp.Diff(want, h.NICs, plain); diff != "" {
		t.Error(diff)
	}
}

func TestBondOfAFileIsKnownByItsName(t *testing.T) {
	for _, n := range readXML(t, system(cpuXML(0, netXML("0000:01:00.0", "mlx5_bond_0"), netXML("0000:02:00.0", "mlx5_1")))).NICs {
		if n.Bond != (n.Name == "mlx5_bond_0") {
			t.Errorf("%s: bond %t", n.Name, n.Bond)
		}
	}
}

// NCCL takes a <net> without gdr for one that has none; one without dev it has
// yet to fill in.
func TestUnstatedGDROfANetIsNone(t *testing.T) {
	pci := func(busID, net string) string {
		return fmt.Sprintf(`<pci busid="%s" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"><nic>%s</nic></pci>`, busID, net)
	}
	h := readXML(t, system(cpuXML(0, bridge("0000:01:00.0", "0x10b5 0x9765 0x10b5 0x9765", gpuXML("0000:02:00.0", 0, "")+
		pci("0000:03:00.0", `<net name="a" dev="0" speed="400000" guid="0x1" gdr="1"/>`)+
		pci("0000:04:00.0", `<net name="b" dev="1" speed="400000" guid="0x2"/>`)+
		pci("0000:05:00.0", `<net name="c" speed="400000" guid="0x3"/>`)+
		`<pci busid="0000:06:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"/>`))))
	pairs := h.Paths(RulesNCCL)
	for nic, want := range map[string]bool{"a": true, "b": false, "c": true, "nic@0000:06:00.0": true} {
		if got := pairOf(t, pairs, "0000:02:00.0", nic); got.Type != PIX || got.Policy.Direct != want {
			t.Errorf("%s: %v, direct %t; want PIX, %t", nic, got.Type, got.Policy.Direct, want)
		}
	}
}

func TestANICThatIsDownHasNoPolicyAndTakesNobodysPlace(t *testing.T) {
	h := readXML(t, system(cpuXML(0,
		bridge("0000:01:00.0", "0x10b5 0x9765 0x10b5 0x9765", gpuXML("0000:02:00.0", 0, nvlinkTo("0000:12:00.0"))+netXML("0000:03:00.0", "mlx5_0")),
		bridge("0000:11:00.0", "0x10b5 0x9765 0x10b5 0x9765", gpuXML("0000:12:00.0", 1, nvlinkTo("0000:02:00.0"))+netXML("0000:13:00.0", "mlx5_1")))))
	if got := pairOf(t, h.Paths(RulesNCCL), "0000:12:00.0", "mlx5_0"); got.PXN == nil {
		t.Fatalf("%+v; want PXN", got)
	}
	h.NICs[1].Ports[0].State = "DOWN"
	pairs := h.Paths(RulesNCCL)
	if got := pairOf(t, pairs, "0000:12:00.0", "mlx5_1"); got.Type != PIX || got.Policy != nil {
		t.Errorf("the NIC that is down: %+v", got)
	}
	if got := pairOf(t, pairs, "0000:12:00.0", "mlx5_0"); got.Policy == nil {
		t.Errorf("the other NIC: %+v", got)
	}
}

func nvlinkTo(busID string) string {
	return fmt.Sprintf(`<nvlink target="%s" count="4" tclass="0x030200"/>`, busID)
}

func TestFileThatIsNoTopologyIsRefusedWithAReason(t *testing.T) {
	cpu := func(inner string) string {
		return `<system version="1"><cpu numaid="0">` + inner + `</cpu></system>`
	}
	for name, tt := range map[string]struct{ text, want string }{
		"empty":               {"", "EOF"},
		"not closed":          {`<system version="1"><cpu`, "XML syntax error"},
		"hwloc":               {`<topology version="2.0"/>`, "NCCL_TOPO_DUMP_FILE"},
		"another root":        {`<graphs version="1"/>`, "<graphs>"},
		"another version":     {`<system version="7"><cpu numaid="0"/></system>`, `"7"`},
		"no CPU":              {`<system version="1"/>`, "no <cpu>"},
		"a NUMA node of 2^62": {`<system version="1"><cpu numaid="4611686018427387904"/></system>`, "numaid of a <cpu>: 4611686018427387904 is no NUMA node; they are numbered from 0 to 65535"},
		"a NUMA node of -2":   {`<system version="1"><cpu numaid="-2"/></system>`, "-2 is no NUMA node"},
		"a GPU of 2^62":       {cpu(`<pci busid="1:0.0"><gpu dev="4611686018427387904"/></pci>`), "dev of GPU 0000:01:00.0: 4611686018427387904 is no number of a GPU; they are numbered from 0 to 4095"},
		"a GPU of 2^64":       {cpu(`<pci busid="1:0.0"><gpu dev="18446744073709551616"/></pci>`), "is no number of a GPU"},
		"no NUMA node":        {`<system version="1"><cpu/></system>`, "numaid"},
		"two equal nodes":     {`<system version="1"><cpu numaid="0"/><cpu numaid="0"/></system>`, "two <cpu>"},
		"a wrong address":     {cpu(`<pci busid="x"/>`), `"x"`},
		"no address":          {cpu(`<pci class="0x030200"/>`), "busid"},
		"an address twice":    {cpu(`<pci busid="1:0.0" class="0x030200"/><pci busid="0000:01:00.0" class="0x020000"/>`), "0000:01:00.0"},
		"a name twice":        {cpu(`<pci busid="1:0.0"><nic><net name="a"/><net name="a"/></nic></pci>`), `"a"`},
		"a nameless net":      {cpu(`<nic><net/></nic>`), "no name"},
		"NVLinks uncounted":   {cpu(`<pci busid="1:0.0"><gpu dev="0"><nvlink target="2:0.0" tclass="0x030200"/></gpu></pci>`), "count"},
		"an NVLink nowhere":   {cpu(`<pci busid="1:0.0"><gpu dev="0"><nvlink count="1" tclass="0x030200"/></gpu></pci>`), "target"},
	} {
		_, err := ReadNCCLXML(strings.NewReader(tt.text), "some.xml")
		if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "some.xml") {
			t.Errorf("%s: %v; want one that names some.xml and has %q", name, err, tt.want)
		}
	}
}

func TestReadNamesAFileThatIsNotThere(t *testing.T) {
	file := filepath.Join(t.TempDir(), "topo.xml")
	if _, err := Read(file, Options{}); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), file) {
		t.Error(err)
	}
}

func FuzzReadNCCLXML(f *testing.F) {
	addSeeds(f, "*.xml", smallHost, `<system version="1"><cpu numaid="65535"><pci busid="1:0.0"><gpu dev="4095"/></pci></cpu></system>`,
		`<system version="1"><cpu numaid="4611686018427387904"><pci busid="1:0.0"><gpu dev="9223372036854775807"/></pci></cpu></system>`)
	f.Fuzz(func(t *testing.T, text []byte) {
		h, err := ReadNCCLXML(strings.NewReader(string(text)), "fuzz.xml")
		if err != nil {
			if h != nil {
				t.Error("both a host and an error")
			}
			return
		}
		if pairs := h.Paths(RulesSMI); len(pairs) != (len(h.GPUs)+len(h.NICs))*max(0, len(h.GPUs)+len(h.NICs)-1) {
			t.Errorf("%d GPUs and %d NICs have %d pairs", len(h.GPUs), len(h.NICs), len(pairs))
		}
		checkNumbers(t, h)
		if len(h.Hosts()) > 1 {
			return // a plan is for one
		}
		// Whatever was read can be planned and looked at.
		plan, err := MakePlan(h, PlanConfig{})
		if err != nil {
			t.Fatal(err)
		}
		if err := plan.check(); err != nil {
			t.Error(err)
		}
		if len(plan.Lanes) != len(h.GPUs) {
			t.Errorf("%d GPUs, %d lanes", len(h.GPUs), len(plan.Lanes))
		}
		for _, g := range h.GPUs {
			for _, n := range h.NICs {
				there, err := h.Path(g.BusID, n.Name)
				if err != nil {
					t.Fatal(err)
				}
				back, err := h.Path(n.Name, g.BusID)
				if err != nil {
					t.Fatal(err)
				}
				bad := func(p Path) bool { return p.Type < PIX || p.Bandwidth < 0 || math.IsNaN(p.Bandwidth) }
				if bad(there) || bad(back) || (there.Type == DIS) != (back.Type == DIS) {
					t.Errorf("%s to %s: %v, and back %v", g.BusID, n.Name, there, back)
				}
			}
		}
	})
}

func TestReadNCCLXMLMergesNetsWithoutPCIDevice(t *testing.T) {
	const tunnel = `<nic><net name="tunl0" dev="0" speed="10000" port="0" guid="0x0"/></nic>`
	h := readXML(t, `<system version="1"><cpu numaid="0"><pci busid="1:0.0" class="0x030200"/>`+tunnel+`</cpu><cpu numaid="1">`+tunnel+`</cpu></system>`)
	if len(h.NICs) != 1 || h.NICs[0].Name != "tunl0" || h.NICs[0].NUMA != 0 {
		t.Errorf("%+v", h.NICs)
	}
	// A NIC with a PCI device and one without are not the same.
	_, err := ReadNCCLXML(strings.NewReader(`<system version="1"><cpu numaid="0"><pci busid="1:0.0"><nic><net name="tunl0"/></nic></pci>`+tunnel+`</cpu></system>`), "some.xml")
	if err == nil || !strings.Contains(err.Error(), `two <net> named "tunl0"`) {
		t.Error(err)
	}
	// Each host of a file has its own.
	cpu := func(hash int) string { return fmt.Sprintf(`<cpu host_hash="0x%d" numaid="0">%s</cpu>`, hash, tunnel) }
	if h := readXML(t, `<system version="1">`+cpu(1)+cpu(2)+`</system>`); len(h.NICs) != 2 {
		t.Errorf("two hosts: %+v", h.NICs)
	}
}

func TestReadNCCLXMLNotesValuesThatAreNoNumbers(t *testing.T) {
	h := readXML(t, `<system version="1"><cpu numaid="0">
		<pci busid="1:0.0" class="0x030200" link_speed="NaN GT/s" link_width="99999999999"><gpu dev="0" sm="90"/></pci>
		<pci busid="2:0.0" class="0x030200" link_speed="1e309 GT/s PCIe" link_width="-4"><gpu dev="1" sm="90"/></pci>
		<pci busid="3:0.0" class="0x020700" link_speed="Unknown speed" link_width=""><nic><net name="mlx5_0" speed="NaN"/></nic></pci>
		<pci busid="4:0.0" class="0x020700" link_speed="" link_width="0"><nic><net name="mlx5_1" speed="1e309"/></nic></pci>
		<pci busid="5:0.0" class="0x020700" link_speed="16 GT/s" link_width="255"><nic><net name="mlx5_2" speed="99999999999"/></nic></pci>
		<pci busid="6:0.0" class="0x020700"><nic><net name="mlx5_3" speed="-1"/></nic></pci>
	</cpu></system>`)
	want := []string{
		`link_speed "NaN GT/s" of 0000:01:00.0, and of 1 more is not usable: the link counts as PCIe 3.0`,
		`link_width "99999999999" of 0000:01:00.0, and of 1 more is not usable: the link counts as x16`,
		`speed "NaN" of mlx5_0, and of 2 more is not usable: the port counts as 10 Gbit/s`,
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
