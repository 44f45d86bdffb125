package ncclxml_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
	"github.com/peerlane/peerlane/topo/ncclxml"
)

// The kind of a PCI function follows from the elements in it, else from class and vendor.
func TestReadPCIFunctionHasKind(t *testing.T) {
	const net, gpu = `<nic><net name="a"/></nic>`, `<gpu dev="0"/>`
	gpuOf := func(vendor string) topo.Host { return topo.Host{GPUs: []topo.GPU{{Vendor: vendor}}} }
	nicOf := func(name, protocol string, ethernet bool) topo.Host {
		return topo.Host{NICs: []topo.NIC{{Name: name, Protocol: protocol, Ethernet: ethernet}}}
	}
	const byClass = "nic@0000:01:00.0"
	bridge, none := topo.Host{Switches: []topo.Switch{{}}}, topo.Host{}
	note := func(text string) topo.Host { return topo.Host{Notes: []string{text}} }
	foreign := func(vendor string) topo.Host {
		return note("graphics device 0000:01:00.0 of vendor " + vendor + " is ignored: its maker is not NVIDIA, AMD or Hygon")
	}
	classless := note("1 PCI devices of unknown type, without a class, a <gpu> or a <nic>, are ignored")
	for _, tt := range []struct {
		name, attributes, inner string
		want                    topo.Host
	}{
		{"GPU by element", ``, gpu, gpuOf("")},
		{"GPU by element with a class of a bridge", `class="0x060400"`, gpu, gpuOf("")},
		{"GPU by element of another maker", `class="0x030200" vendor="0x8086"`, gpu, gpuOf("0x8086")},
		{"GPU by class", `class="0x030200"`, "", gpuOf("")},
		{"GPU of NVIDIA", `class="0x030000" vendor="0x10de"`, "", gpuOf("")},
		{"GPU of AMD", `class="0x120000" vendor="0x1002"`, "", gpuOf("AMD")},
		{"GPU of Hygon", `class="0x0b4000" vendor="0x1d94"`, "", gpuOf("Hygon")},
		{"graphics of another maker", `class="0x030000" vendor="0x1a03"`, "", foreign("0x1a03")},
		{"graphics class with a NIC", `class="0x030200"`, net, nicOf("a", "", false)},
		{"graphics class with a device below", `class="0x030200"`, `<pci busid="2:0.0" class="0x068000"/>`, bridge},
		{"NIC by element", ``, net, nicOf("a", "", false)},
		{"NIC by class", `class="0x020000"`, "", nicOf(byClass, "", false)},
		{"InfiniBand", `class="0x020700" vendor="0x15b3"`, net, nicOf("a", "InfiniBand", false)},
		{"InfiniBand by class", `class="0x020700"`, "", nicOf(byClass, "InfiniBand", false)},
		{"EFA", `class="0x020000" vendor="0x1d0f" device="0xefa1"`, "", nicOf(byClass, "EFA", false)},
		{"number of EFA of another maker", `class="0x020000" vendor="0x15b3" device="0xefa1"`, "", nicOf(byClass, "", false)},
		{"ENA", `class="0x020000" vendor="0x1d0f" device="0xec20"`, "", nicOf(byClass, "", true)},
		{"number of ENA of another maker", `class="0x020000" vendor="0x15b3" device="0xec20"`, "", nicOf(byClass, "", false)},
		{"another device of Amazon", `class="0x020000" vendor="0x1d0f" device="0x1234"`, "", nicOf(byClass, "", false)},
		{"virtio", `class="0x020000" vendor="0x1af4"`, "", nicOf(byClass, "", true)},
		{"eRDMA", `class="0x020000" vendor="0x1ded" device="0x107f"`, "", nicOf(byClass, "eRDMA", false)},
		{"number of eRDMA of another maker", `class="0x020000" vendor="0x15b3" device="0x107f"`, "",
			nicOf(byClass, "", false)},
		{"another device of Alibaba", `class="0x020000" vendor="0x1ded" device="0x1080"`, "", nicOf(byClass, "", false)},
		{"NVSwitch", `class="0x068000"`, "", none},
		{"bridge", `class="0x060400"`, "", bridge},
		{"bridge without a class", ``, `<pci busid="2:0.0" class="0x068000"/>`, bridge},
		{"no class", ``, "", classless},
		{"other class", `class="0x010802"`, "", bridge},
	} {
		h := ncclfile.ReadXML(t, inCPU(`<pci busid="1:0.0" `+tt.attributes+`>`+tt.inner+`</pci>`))
		got := topo.Host{Notes: h.Notes}
		for _, g := range h.GPUs {
			got.GPUs = append(got.GPUs, topo.GPU{Vendor: g.Vendor})
		}
		for _, n := range h.NICs {
			got.NICs = append(got.NICs, topo.NIC{Name: n.Name, Protocol: n.Protocol, Ethernet: n.Ethernet})
		}
		for range h.Switches {
			got.Switches = append(got.Switches, topo.Switch{})
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestReadGPUAttributesSetFields(t *testing.T) {
	yes, no := true, false
	const peer = `target="0000:02:00.0" tclass="0x030200"`
	for name, tt := range map[string]struct {
		attributes, inner string
		want              topo.GPU
	}{
		"no attribute": {``, ``, topo.GPU{}},
		"capability":   {`sm="90"`, ``, topo.GPU{Capability: 90}},
		"GDR on":       {`gdr="1"`, ``, topo.GPU{GDR: &yes}},
		"GDR off":      {`gdr="0"`, ``, topo.GPU{GDR: &no}},
		"RCCL's name":  {`sm="94" gcn="942"`, ``, topo.GPU{Vendor: "AMD", GCN: "942"}},
		"xGMI alone": {`sm="94"`, `<xgmi ` + peer + ` count="2"/>`,
			topo.GPU{Vendor: "AMD", NVLinks: []topo.NVLink{{Peer: "0000:02:00.0", Count: 2, Bandwidth: 48}}}},
		"xGMI of MI300": {`gcn="gfx942"`, `<xgmi ` + peer + ` count="1"/>`,
			topo.GPU{Vendor: "AMD", GCN: "gfx942", NVLinks: []topo.NVLink{{Peer: "0000:02:00.0", Count: 1, Bandwidth: 48}}}},
		"NVLinks of a Hopper": {`sm="90"`, `<nvlink ` + peer + ` count="2"/><nvlink ` + peer +
			` count="1"/><nvlink target="x" tclass="0x068000" count="1"/>`,
			topo.GPU{Capability: 90, NVLinks: []topo.NVLink{{Peer: "0000:02:00.0", Count: 3, Bandwidth: 61.8},
				{Count: 1, Bandwidth: 20.6}}}},
		"NVLinks of a Volta to the CPU": {`sm="70"`,
			`<nvlink tclass="0x068001" count="2"/><nvlink tclass="0x068001" count="1"/>`,
			topo.GPU{Capability: 70, NVLinkCPU: 60}},
		"C2C": {`sm="90"`, `<c2c count="10" bw="44712"/><c2c count="1" bw="1000"/>`, topo.GPU{Capability: 90, C2C: 448.12}},
	} {
		h := ncclfile.ReadXML(t,
			inCPU(`<pci busid="1:0.0" class="0x030200"><gpu dev="0" `+tt.attributes+`>`+tt.inner+`</gpu></pci>`))
		got := h.GPUs[0]
		ignored := cmpopts.IgnoreFields(topo.GPU{}, "BusID", "Place", "Device", "Minor", "Reason")
		if diff := cmp.Diff(tt.want, got, ignored, cmpopts.EquateApprox(1e-12, 0)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	// RCCL knows two makers.
	h := ncclfile.ReadXML(t, inCPU(`<pci busid="1:0.0" class="0x030200" vendor="0x1d94"><gpu dev="0" gcn="926"/></pci>`))
	if g := h.GPUs[0]; g.Vendor != "Hygon" || g.GCN != "926" {
		t.Errorf("Hygon's GPU: %+v", g)
	}
}

func TestReadInvalidFlagFails(t *testing.T) {
	for _, text := range []string{
		inCPU(`<pci busid="1:0.0"><gpu dev="0" gdr="yes"/></pci>`), inCPU(`<nic><net name="a" gdr="yes"/></nic>`),
		inCPU(`<pci busid="1:0.0"><pcilink target="x"/><pci busid="2:0.0" class="0x020000"/></pci>`),
	} {
		if _, err := ncclxml.Read(strings.NewReader(text), "some.xml"); err == nil {
			t.Errorf("no error for %s", text)
		}
	}
}

// Without a usable number for each GPU of a host, addresses give the numbers.
func TestReadGPUsHaveNumbers(t *testing.T) {
	for name, tt := range map[string]struct {
		attributes [3]string // of <gpu> at 3:0.0, 1:0.0 and 2:0.0
		want       [3]int    // of these GPUs
	}{
		"numbers":          {[3]string{`dev="0"`, `dev="2"`, `dev="1"`}, [3]int{0, 2, 1}},
		"gaps":             {[3]string{`dev="5"`, `dev="7"`, `dev="0"`}, [3]int{5, 7, 0}},
		"no number":        {[3]string{`dev="0"`, ``, `dev="1"`}, [3]int{2, 0, 1}},
		"no number at all": {[3]string{``, ``, ``}, [3]int{2, 0, 1}},
		"negative":         {[3]string{`dev="0"`, `dev="-1"`, `dev="1"`}, [3]int{2, 0, 1}},
		"not a number":     {[3]string{`dev="0"`, `dev="x"`, `dev="1"`}, [3]int{2, 0, 1}},
		"a number twice":   {[3]string{`dev="1"`, `dev="2"`, `dev="1"`}, [3]int{2, 0, 1}},
	} {
		gpu := func(i int) string {
			return fmt.Sprintf(`<pci busid="%d:0.0" class="0x030200"><gpu %s/></pci>`, []int{3, 1, 2}[i], tt.attributes[i])
		}
		h := ncclfile.ReadXML(t, inCPU(gpu(0), gpu(1), gpu(2)))
		want := map[string]int{"0000:03:00.0": tt.want[0], "0000:01:00.0": tt.want[1], "0000:02:00.0": tt.want[2]}
		got := map[string]int{}
		for i, g := range h.GPUs {
			got[g.BusID] = g.Index
			if i > 0 && h.GPUs[i-1].Index >= g.Index {
				t.Errorf("%s: GPU %d follows GPU %d", name, g.Index, h.GPUs[i-1].Index)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestReadPartitionsCountAsOneGPU(t *testing.T) {
	for partitions, want := range map[int][]string{1: nil,
		2: {"GPU 0000:01:00.0 has 2 partitions and counts as one GPU"}} {
		h := ncclfile.ReadXML(t, inCPU(`<pci busid="1:0.0">`+strings.Repeat(`<gpu dev="3" gcn="942"/>`, partitions)+`</pci>`))
		if diff := cmp.Diff(want, h.Notes); len(h.GPUs) != 1 || h.GPUs[0].Index != 3 || diff != "" {
			t.Errorf("%d partitions: %+v, notes (-want +got):\n%s", partitions, h.GPUs, diff)
		}
	}
}

func TestReadNetAttributesSetFields(t *testing.T) {
	yes, no := true, false
	const byFunction = "nic@0000:01:00.0"
	for name, tt := range map[string]struct {
		nets string
		want []topo.NIC
	}{
		"name":    {`<net name="a"/>`, []topo.NIC{{Name: "a"}}},
		"no name": {`<net/>`, []topo.NIC{{Name: byFunction}}},
		"several names": {`<net/><net/><net name="b"/>`,
			[]topo.NIC{{Name: "b"}, {Name: byFunction}, {Name: byFunction + "#1"}}},
		"GIN or RMA alone":   {`<net name="a" net="0"/><net name="b" net="1"/>`, []topo.NIC{{Name: "b"}}},
		"number without GDR": {`<net name="a" dev="0"/>`, []topo.NIC{{Name: "a", GDR: &no}}},
		"number with GDR":    {`<net name="a" dev="0" gdr="1"/>`, []topo.NIC{{Name: "a", GDR: &yes}}},
		"GDR off":            {`<net name="a" gdr="0"/>`, []topo.NIC{{Name: "a", GDR: &no}}},
		"GUID":               {`<net name="a" guid="0x1a"/>`, []topo.NIC{{Name: "a", GUID: "0x1a"}}},
		"GUID 0":             {`<net name="a" guid="0x0"/>`, []topo.NIC{{Name: "a", GUID: "0x0", Ethernet: true}}},
		"GUID of 16 digits": {`<net name="a" guid="0xffffffffffffffff"/>`,
			[]topo.NIC{{Name: "a", GUID: "0xffffffffffffffff"}}},
		"GUID not a number":   {`<net name="a" guid="x"/>`, []topo.NIC{{Name: "a", GUID: "x"}}},
		"GUID empty":          {`<net name="a" guid=""/>`, []topo.NIC{{Name: "a"}}},
		"bond":                {`<net name="mlx5_bond_0"/>`, []topo.NIC{{Name: "mlx5_bond_0", Bond: true}}},
		"numbers in the name": {`<net name="mlx5_10"/><net name="mlx5_9"/>`, []topo.NIC{{Name: "mlx5_9"}, {Name: "mlx5_10"}}},
	} {
		h := ncclfile.ReadXML(t, inCPU(`<pci busid="1:0.0"><nic>`+tt.nets+`</nic></pci>`))
		ignored := cmpopts.IgnoreFields(topo.NIC{}, "BusID", "Place", "Order", "Ports", "Reason")
		if diff := cmp.Diff(tt.want, h.NICs, ignored); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	// The protocol of the function holds for a <net> with a GUID too.
	h := ncclfile.ReadXML(t, inCPU(`<pci busid="1:0.0" vendor="0x1af4"><nic><net name="a" guid="0x1"/></nic></pci>`))
	if !h.NICs[0].Ethernet {
		t.Errorf("virtio: %+v", h.NICs[0])
	}
}

func TestReadSwitchKeepsPeers(t *testing.T) {
	h := ncclfile.ReadXML(t,
		inCPU(`<pci busid="1:0.0" class="0x060400"><pcilink target="2:0.0"/><pcilink target="3:0.0"/>`+
			`<pci busid="4:0.0" class="0x020000"/></pci>`))
	if diff := cmp.Diff([]string{"0000:02:00.0", "0000:03:00.0"}, h.Switches[0].Peers); diff != "" {
		t.Errorf("peers (-want +got):\n%s", diff)
	}
}

// Addresses, NUMA nodes, names and numbers belong to a host of the file.
func TestReadSeveralHostsAreSeparate(t *testing.T) {
	cpu := func(hash string, numa int, inner string) string {
		return fmt.Sprintf(`<cpu host_hash="%s" numaid="%d">%s</cpu>`, hash, numa, inner)
	}
	const nic = `<nic><net name="tunl0"/></nic>`
	gpu := func(busID, attributes string) string {
		return fmt.Sprintf(`<pci busid="%s" class="0x030200"><gpu %s/></pci>`, busID, attributes)
	}
	h := ncclfile.ReadXML(t, `<system version="1">`+
		cpu("0xb", 0, gpu("1:0.0", `dev="1"`)+gpu("2:0.0", `dev="0"`)+nic)+
		cpu("0xa", 0, gpu("2:0.0", ``)+gpu("1:0.0", `dev="0"`)+nic)+
		cpu("0xb", 1, gpu("3:0.0", `dev="2"`)+nic)+`</system>`)
	type device struct {
		Host, Name string
		Number     int // of a GPU, or the NUMA node of a NIC
	}
	want := []device{{"0xb", "0000:02:00.0", 0}, {"0xb", "0000:01:00.0", 1}, {"0xb", "0000:03:00.0", 2},
		{"0xa", "0000:01:00.0", 0}, {"0xa", "0000:02:00.0", 1}, {"0xb", "tunl0", 0}, {"0xa", "tunl0", 0}}
	var got []device
	for _, g := range h.GPUs {
		got = append(got, device{g.Host, g.BusID, g.Index})
	}
	for _, n := range h.NICs {
		got = append(got, device{n.Host, n.Name, n.NUMA})
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"the file describes 2 hosts; a plan is for one of them (peerlane plan --host)"},
		h.Notes); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
	// A single host has no name, whatever its number.
	if h := ncclfile.ReadXML(t, `<system version="1">`+cpu("0xb", 0,
		gpu("1:0.0", ``))+`</system>`); h.GPUs[0].Host != "" ||
		h.Notes != nil {
		t.Errorf("single host: %+v, notes %q", h.GPUs[0], h.Notes)
	}
}

func TestReadNetWithoutFunctionStaysAtFirstNode(t *testing.T) {
	h := ncclfile.ReadXML(t,
		`<system version="1"><cpu numaid="0"><pci busid="1:0.0"><nic><net name="a"/></nic></pci></cpu>`+
			`<cpu numaid="1"><nic><net name="eth0"/></nic></cpu><cpu numaid="2"><nic><net name="eth1"/></nic></cpu></system>`)
	got := map[string]int{}
	for _, n := range h.NICs {
		got[n.Name] = n.NUMA
	}
	if diff := cmp.Diff(map[string]int{"a": 0, "eth0": 1, "eth1": 1}, got); diff != "" {
		t.Errorf("NUMA nodes (-want +got):\n%s", diff)
	}
}

// A name is of one NIC: a file repeats only a NIC without a PCI device.
func TestReadNameOfTwoNICsFails(t *testing.T) {
	const at1, at2 = `<pci busid="1:0.0"><nic><net name="a"/></nic></pci>`,
		`<pci busid="2:0.0"><nic><net name="a"/></nic></pci>`
	const loose, other = `<nic><net name="a"/></nic>`, `<nic><net name="b"/></nic>`
	for name, inner := range map[string]string{"functions": at1 + at2, "a function, then none": at1 + other + loose} {
		_, err := ncclxml.Read(strings.NewReader(inCPU(inner)), "some.xml")
		if !testutil.HasError(err, &ncclxml.DuplicateNetError{Name: "a"}) {
			t.Errorf("%s: %v", name, err)
		}
	}
	text := `<system version="1"><cpu numaid="0">` + loose + `</cpu><cpu numaid="1">` + at1 + `</cpu></system>`
	if _, err := ncclxml.Read(strings.NewReader(text), "some.xml"); !testutil.HasError(err,
		&ncclxml.DuplicateNetError{Name: "a"}) {
		t.Errorf("none, then a function: %v", err)
	}
}

func TestReadControlCharacterFails(t *testing.T) {
	_, err := ncclxml.Read(strings.NewReader(inCPU(`<nic><net name="a&#10;b"/></nic>`)), "some.xml")
	if !testutil.HasError(err, &topo.TextError{Field: "NICs[0].Name", Text: "a\nb"}) {
		t.Error(err)
	}
}

func TestReadCommentOfDashesIsAccepted(t *testing.T) {
	h := ncclfile.ReadXML(t, `<!------ a -- comment ------>`+inCPU(`<pci busid="1:0.0" class="0x030200"/>`))
	if len(h.GPUs) != 1 {
		t.Errorf("%+v", h.GPUs)
	}
}

// NCCL lists a NIC with a Data Direct function as NAME and NAME_dma.
func TestReadDataDirectNetsBecomeOneNIC(t *testing.T) {
	yes, no := true, false
	function := func(busID string, nets string) string {
		return fmt.Sprintf(`<pci busid="%s" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="%s"><nic>%s</nic></pci>`,
			busID, busID[:1], nets)
	}
	net := func(name, guid, gdr string) string {
		return fmt.Sprintf(`<net name="%s" guid="%s" gdr="%s"/>`, name, guid, gdr)
	}
	at := func(width int) topo.Place {
		return topo.Place{Link: 3 * float64(width), LinkSpeed: "32.0 GT/s PCIe", LinkWidth: width}
	}
	const one, two = "0000:01:00.0", "0000:02:00.0"
	nic := func(name, busID, guid string, width int, gdr *bool) topo.NIC {
		return topo.NIC{Name: name, BusID: busID, GUID: guid, Place: at(width), GDR: gdr}
	}
	joined := nic("a", one, "0x1", 2, &yes)
	joined.DataDirect, joined.Own = two, &topo.Function{Place: at(1)}
	alone := nic("a", two, "0x1", 2, &yes)
	alone.DataDirect = two
	socket := topo.NIC{Name: "a_dma", BusID: two, GUID: "0x0", Place: at(2), GDR: &yes, Ethernet: true}
	for name, tt := range map[string]struct {
		first, second string // functions 1:0.0 and 2:0.0
		want          []topo.NIC
	}{
		"both functions": {net("a", "0x1", "0"), net("a_dma", "0x1", "1"), []topo.NIC{joined}},
		"Data Direct":    {"", net("a_dma", "0x1", "1"), []topo.NIC{alone}},
		"different GUIDs": {net("a", "0x1", "0"), net("a_dma", "0x2", "1"),
			[]topo.NIC{nic("a", one, "0x1", 1, &no), nic("a_dma", two, "0x2", 2, &yes)}},
		"no GUID": {net("a", "", "0"), net("a_dma", "", "1"),
			[]topo.NIC{nic("a", one, "", 1, &no), nic("a_dma", two, "", 2, &yes)}},
		"one function": {net("a", "0x1", "0") + net("a_dma", "0x1", "1"), "",
			[]topo.NIC{nic("a", one, "0x1", 1, &no), nic("a_dma", one, "0x1", 1, &yes)}},
		"the suffix": {"", net("_dma", "0x1", "1"), []topo.NIC{nic("_dma", two, "0x1", 2, &yes)}},
		"Ethernet":   {"", net("a_dma", "0x0", "1"), []topo.NIC{socket}},
		"a second Data Direct function": {net("a", "0x1", "0"), net("a_dma", "0x1", "1") + net("a_dma_dma", "0x1", "1"),
			[]topo.NIC{joined, nic("a_dma_dma", two, "0x1", 2, &yes)}},
	} {
		var inner string
		for i, nets := range []string{tt.first, tt.second} {
			if nets != "" {
				inner += function([]string{"1:0.0", "2:0.0"}[i], nets)
			}
		}
		h := ncclfile.ReadXML(t, inCPU(inner))
		ignored := cmp.Options{cmpopts.IgnoreFields(topo.NIC{}, "Device", "Order", "Ports", "Protocol", "Reason")}
		if diff := cmp.Diff(tt.want, h.NICs, ignored); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestReadDataDirectOfSocketTransportStays(t *testing.T) {
	// Without a PCI device a name with the suffix has no function.
	h := ncclfile.ReadXML(t, inCPU(`<nic><net name="eth0_dma" guid="0x1"/></nic>`))
	if n := h.NICs[0]; n.Name != "eth0_dma" || n.DataDirect != "" {
		t.Errorf("%+v", n)
	}
	h = ncclfile.ReadXML(t,
		inCPU(`<nic><net name="a" guid="0x1"/></nic><pci busid="1:0.0"><nic><net name="a_dma" guid="0x1"/></nic></pci>`))
	if len(h.NICs) != 2 {
		t.Errorf("%+v", h.NICs)
	}
}

// A link of one or two lanes marks the bridge to NVSwitches. A file without widths has the bandwidth of
// the link: two lanes of PCIe 5.0 carry 6 GB/s.
func TestSuspectBridgesNotesNarrowNICs(t *testing.T) {
	connectX7 := topo.PCIIdentity{Vendor: "0x15b3", Device: "0x1021"}
	nic := func(width int, link float64, d topo.PCIIdentity) topo.NIC {
		return topo.NIC{Name: "a", BusID: "0000:01:00.0", Place: topo.Place{LinkWidth: width, Link: link}, Device: d}
	}
	with := func(n topo.NIC, change func(n *topo.NIC)) topo.NIC {
		change(&n)
		return n
	}
	narrow := nic(2, 6, connectX7)
	for name, tt := range map[string]struct {
		nic  topo.NIC
		want bool
	}{
		"two lanes":                   {narrow, true},
		"one lane":                    {nic(1, 3, connectX7), true},
		"three lanes":                 {nic(3, 6, connectX7), false},
		"sixteen lanes":               {nic(16, 48, connectX7), false},
		"6 GB/s":                      {nic(0, 6, connectX7), true},
		"0.5 GB/s":                    {nic(0, 0.5, connectX7), true},
		"more than 6 GB/s":            {nic(0, 6.1, connectX7), false},
		"no link":                     {nic(0, 0, connectX7), false},
		"6 GB/s of an unknown device": {nic(0, 6, topo.PCIIdentity{}), false},
		"an unknown device":           {nic(2, 6, topo.PCIIdentity{}), true},
		"an unknown vendor":           {nic(2, 6, topo.PCIIdentity{Device: "0x1023"}), true},
		"an unknown model":            {nic(2, 6, topo.PCIIdentity{Vendor: "0x15b3"}), true},
		"another device":              {nic(2, 6, topo.PCIIdentity{Vendor: "0x15b3", Device: "0x1023"}), false},
		"another vendor":              {nic(2, 6, topo.PCIIdentity{Vendor: "0x14e4", Device: "0x1021"}), false},
		"Ethernet":                    {with(narrow, func(n *topo.NIC) { n.Ethernet = true }), false},
		"software":                    {with(narrow, func(n *topo.NIC) { n.Software = true }), false},
		"no PCI device":               {with(narrow, func(n *topo.NIC) { n.BusID = "" }), false},
	} {
		h := &topo.Host{NICs: []topo.NIC{tt.nic}}
		ncclxml.SuspectBridges(h)
		if got := len(h.Notes) == 1; got != tt.want {
			t.Errorf("%s: notes %q, want a note: %t", name, h.Notes, tt.want)
		}
	}
	h := ncclfile.ReadXML(t,
		inCPU(`<pci busid="1:0.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="2">`+
			`<nic><net name="mlx5_4"/></nic></pci>`))
	want := []string{"mlx5_4 may be a management bridge of NVSwitches, as on boards with B200, instead of a NIC: its " +
		"PCIe " +
		"link carries 6 GB/s, and the file has no vital product data (to exclude it: plan.exclude.nics)"}
	if diff := cmp.Diff(want, h.Notes); diff != "" {
		t.Errorf("notes of a file (-want +got):\n%s", diff)
	}
}
