package ncclxml_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
	"github.com/peerlane/peerlane/topo/ncclxml"
)

// lines returns the elements of a written host that begin with a text, without indentation.
func lines(t *testing.T, h *topo.Host, begin string) (found []string) {
	t.Helper()
	text, err := ncclxml.Write(h)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.SplitSeq(string(text), "\n") {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, begin) {
			found = append(found, line)
		}
	}
	return found
}

func oneNode(gpus []topo.GPU, nics ...topo.NIC) *topo.Host {
	return &topo.Host{Source: topo.Source{Kind: topo.SourceNCCLXML}, CPUs: []topo.CPU{{NUMA: 0}}, GPUs: gpus, NICs: nics}
}

var (
	on, off = true, false
	display = topo.PCIIdentity{Class: "0x030200"}
)

func TestWriteGPUFieldsBecomeAttributes(t *testing.T) {
	for name, tt := range map[string]struct {
		gpu  topo.GPU
		want []string // the elements in <pci>
	}{
		"number":           {topo.GPU{Index: 3}, []string{`<gpu dev="3" rank="0"/>`}},
		"capability":       {topo.GPU{Capability: 90}, []string{`<gpu dev="0" sm="90" rank="0"/>`}},
		"GDR":              {topo.GPU{GDR: &on}, []string{`<gpu dev="0" rank="0" gdr="1"/>`}},
		"GDR off":          {topo.GPU{GDR: &off}, []string{`<gpu dev="0" rank="0" gdr="0"/>`}},
		"GCN":              {topo.GPU{Vendor: "AMD", GCN: "942"}, []string{`<gpu dev="0" gcn="942" rank="0"/>`}},
		"GCN of no vendor": {topo.GPU{GCN: "942"}, []string{`<gpu dev="0" gcn="942" rank="0"/>`}},
		"NVLinks": {topo.GPU{NVLinks: []topo.NVLink{{Peer: "0000:02:00.0", Count: 2, Bandwidth: 40},
			{Count: 1, Bandwidth: 20}}}, []string{
			`<gpu dev="0" rank="0">`, `<nvlink target="0000:02:00.0" count="2" tclass="0x030200"/>`,
			`<nvlink target="fffffff:ffff:ff" count="1" tclass="0x068000"/>`, `</gpu>`}},
		"NVLinks to the CPU": {topo.GPU{NVLinkCPU: 60}, []string{
			`<gpu dev="0" rank="0">`, `<nvlink target="fffffff:ffff:ff" count="3" tclass="0x068001"/>`, `</gpu>`}},
		"C2C": {topo.GPU{C2C: 447.12}, []string{`<gpu dev="0" rank="0">`, `<c2c bw="447120" count="1"/>`, `</gpu>`}},
		"xGMI": {topo.GPU{Vendor: "Hygon", NVLinks: []topo.NVLink{{Peer: "0000:02:00.0", Count: 2, Bandwidth: 48}}}, []string{
			`<gpu dev="0" rank="0">`, `<xgmi target="0000:02:00.0" count="2" tclass="0x030200"/>`, `</gpu>`}},
		// NCCL reads the values of such a GPU from the host.
		"only an address": {topo.GPU{Device: display}, nil},
		"only an address, and AMD": {topo.GPU{Vendor: "AMD", Device: topo.PCIIdentity{Class: "0x038000", Vendor: "0x1002"}},
			nil},
		"a class of no GPU": {topo.GPU{Device: topo.PCIIdentity{Class: "0x060400"}},
			[]string{`<gpu dev="0" rank="0"/>`}},
		"a vendor of another maker": {topo.GPU{Vendor: "0x1002",
			Device: topo.PCIIdentity{Class: "0x030200", Vendor: "0x1002"}},
			[]string{`<gpu dev="0" rank="0"/>`}},
		"a maker outside NCCL and RCCL": {topo.GPU{Vendor: "0x8086",
			Device: topo.PCIIdentity{Class: "0x030200", Vendor: "0x8086"}},
			[]string{`<gpu dev="0" rank="0"/>`}},
	} {
		gpu := tt.gpu
		gpu.BusID = "0000:01:00.0"
		if gpu.Device.Class == "" {
			gpu.Device.Class = "0x030200"
		}
		h := oneNode([]topo.GPU{gpu})
		var got []string
		for _, tag := range lines(t, h, "<") {
			if !strings.HasPrefix(tag, "<system") && !strings.HasPrefix(tag, "</system") && !strings.Contains(tag, "cpu") &&
				!strings.Contains(tag, "pci") {
				got = append(got, tag)
			}
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		version := `<system version="1">`
		if gpu.Vendor == "AMD" || gpu.Vendor == "Hygon" {
			version = `<system version="2">`
		}
		if diff := cmp.Diff([]string{version}, lines(t, h, "<system")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// Write omits <gpu> if every GPU of the host has only an address, and the addresses give the numbers.
func TestWriteGPUsKnownByAddressHaveNoElement(t *testing.T) {
	gpu := func(host string, index int, busID string) topo.GPU {
		return topo.GPU{Host: host, Index: index, BusID: busID, Device: display}
	}
	const a, b, c = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"
	known := gpu("", 1, b)
	known.Capability = 90
	for name, tt := range map[string]struct {
		gpus []topo.GPU
		want int // elements
	}{
		"in order":       {[]topo.GPU{gpu("", 0, a), gpu("", 1, b), gpu("", 2, c)}, 0},
		"another order":  {[]topo.GPU{gpu("", 0, b), gpu("", 1, a), gpu("", 2, c)}, 3},
		"not from 0":     {[]topo.GPU{gpu("", 1, a), gpu("", 2, b)}, 2},
		"a gap":          {[]topo.GPU{gpu("", 0, a), gpu("", 2, b)}, 2},
		"one is known":   {[]topo.GPU{gpu("", 0, a), known, gpu("", 2, c)}, 3},
		"host by host":   {[]topo.GPU{gpu("", 0, a), gpu("0x2", 0, a), gpu("0x2", 1, b)}, 0},
		"one of 2 hosts": {[]topo.GPU{gpu("", 0, a), gpu("0x2", 1, a)}, 1},
	} {
		h := oneNode(tt.gpus)
		h.CPUs = append(h.CPUs, topo.CPU{Host: "0x2"})
		if got := len(lines(t, h, "<gpu")); got != tt.want {
			t.Errorf("%s: %d elements, want %d", name, got, tt.want)
		}
	}
}

func TestWriteRanksCountGPUs(t *testing.T) {
	h := oneNode([]topo.GPU{{Index: 4, BusID: "0000:01:00.0"}, {Index: 7, BusID: "0000:02:00.0"}})
	want := []string{`<gpu dev="4" rank="0"/>`, `<gpu dev="7" rank="1"/>`}
	if diff := cmp.Diff(want, lines(t, h, "<gpu")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestWriteNICFieldsBecomeAttributes(t *testing.T) {
	const busID = "0000:01:00.0"
	port := func(number int, rate float64) []topo.Port { return []topo.Port{{Number: number, RateGbps: rate}} }
	for name, tt := range map[string]struct {
		nic  topo.NIC
		want []string
	}{
		"name":                {topo.NIC{Name: "a"}, []string{`<net name="a"/>`}},
		"number with GDR":     {topo.NIC{Name: "a", GDR: &on}, []string{`<net name="a" dev="0" gdr="1"/>`}},
		"number with GDR off": {topo.NIC{Name: "a", GDR: &off}, []string{`<net name="a" dev="0" gdr="0"/>`}},
		"port":                {topo.NIC{Name: "a", Ports: port(2, 0)}, []string{`<net name="a" port="2"/>`}},
		"rate": {topo.NIC{Name: "a", Ports: port(1, 400)},
			[]string{`<net name="a" speed="400000" port="1"/>`}},
		"rate of 1 Mbit/s": {topo.NIC{Name: "a", Ports: port(1, 0.001)},
			[]string{`<net name="a" speed="1" port="1"/>`}},
		"rate below 1 Mbit/s": {topo.NIC{Name: "a", Ports: port(1, 0.0001)}, []string{`<net name="a" port="1"/>`}},
		"largest rate": {topo.NIC{Name: "a", Ports: port(1, 999999.999)},
			[]string{`<net name="a" speed="999999999" port="1"/>`}},
		"rate that Read refuses": {topo.NIC{Name: "a", Ports: port(1, 1e6)}, []string{`<net name="a" port="1"/>`}},
		"GUID":                   {topo.NIC{Name: "a", GUID: "0x1a"}, []string{`<net name="a" guid="0x1a"/>`}},
		"Ethernet":               {topo.NIC{Name: "a", Ethernet: true}, []string{`<net name="a" guid="0x0"/>`}},
		"Ethernet with a GUID": {topo.NIC{Name: "a", Ethernet: true, GUID: "0x00"},
			[]string{`<net name="a" guid="0x00"/>`}},
		"only an address": {topo.NIC{Name: "nic@" + busID}, nil},
		"an address and GDR": {topo.NIC{Name: "nic@" + busID, GDR: &on},
			[]string{`<net name="nic@0000:01:00.0" dev="0" gdr="1"/>`}},
		"an address and a GUID": {topo.NIC{Name: "nic@" + busID, GUID: "0x1"},
			[]string{`<net name="nic@0000:01:00.0" guid="0x1"/>`}},
		"an address and a port": {topo.NIC{Name: "nic@" + busID, Ports: port(1, 0)},
			[]string{`<net name="nic@0000:01:00.0" port="1"/>`}},
		"an address and Ethernet": {topo.NIC{Name: "nic@" + busID, Ethernet: true},
			[]string{`<net name="nic@0000:01:00.0" guid="0x0"/>`}},
	} {
		nic := tt.nic
		nic.BusID, nic.Device = busID, topo.PCIIdentity{Class: "0x020700"}
		if diff := cmp.Diff(tt.want, lines(t, oneNode(nil, nic), "<net")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// dev is the number of a <net> of its host, and functions with several NICs are one <pci>.
func TestWriteNetsHaveNumbersByHost(t *testing.T) {
	nic := func(host, name, busID string, gdr *bool) topo.NIC {
		return topo.NIC{Host: host, Name: name, BusID: busID, GDR: gdr, Order: len(name)}
	}
	const a = "0000:01:00.0"
	h := oneNode(nil, nic("0x1", "x", a, &on), nic("0x1", "xx", a, nil), nic("0x1", "xxx", a, &on),
		nic("0x2", "y", a, &on),
		nic("0x2", "eth0", "", nil), nic("0x2", "eth1", "", &off))
	h.CPUs = []topo.CPU{{Host: "0x1"}, {Host: "0x2"}}
	want := []string{`<net name="x" dev="0" gdr="1"/>`, `<net name="xx"/>`, `<net name="xxx" dev="2" gdr="1"/>`,
		`<net name="y" dev="0" gdr="1"/>`, `<net name="eth0"/>`, `<net name="eth1" dev="2" gdr="0"/>`}
	if diff := cmp.Diff(want, lines(t, h, "<net")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := lines(t, h, "<nic"); len(got) != 3 {
		t.Errorf("%d <nic>, want 3", len(got))
	}
}

func TestBestPortIsFastestActivePort(t *testing.T) {
	port := func(number int, state string, rate float64) topo.Port {
		return topo.Port{Number: number, State: state, RateGbps: rate}
	}
	for name, tt := range map[string]struct {
		ports []topo.Port
		want  int
	}{
		"no port":       {nil, 0},
		"the faster":    {[]topo.Port{port(1, "ACTIVE", 100), port(2, "ACTIVE", 200), port(3, "ACTIVE", 100)}, 2},
		"the first":     {[]topo.Port{port(1, "ACTIVE", 100), port(2, "ACTIVE", 100)}, 1},
		"the active":    {[]topo.Port{port(1, "DOWN", 400), port(2, "ACTIVE", 100), port(3, "DOWN", 400)}, 2},
		"none active":   {[]topo.Port{port(1, "DOWN", 400)}, 0},
		"unknown state": {[]topo.Port{port(1, "", 100)}, 1},
	} {
		if got := ncclxml.BestPort(topo.NIC{Ports: tt.ports}); got.Number != tt.want {
			t.Errorf("%s: port %d, want %d", name, got.Number, tt.want)
		}
	}
}

// A switch has no class of a GPU, NIC or NVSwitch: NCCL would read such a device.
func TestWriteSwitchHasClassOfBridge(t *testing.T) {
	for class, want := range map[string]string{"": "0x060400", "0x030200": "0x060400", "0x020700": "0x060400",
		"0x068000": "0x060400",
		"0x060400": "0x060400", "0x058000": "0x058000"} {
		h := oneNode(nil)
		h.Switches = []topo.Switch{{BusID: "0000:01:00.0", Device: topo.PCIIdentity{Class: class}}}
		prefix := fmt.Sprintf(`<pci busid="0000:01:00.0" class="%s"`, want)
		if got := lines(t, h, "<pci"); len(got) != 1 || !strings.HasPrefix(got[0], prefix) {
			t.Errorf("class %q: %q, want %s", class, got, prefix)
		}
	}
}

func TestWriteDeviceHasClassThatNCCLReads(t *testing.T) {
	gpu := topo.GPU{BusID: "0000:01:00.0", Capability: 90,
		Device: topo.PCIIdentity{Class: "0x058000", Vendor: "0x10de", Device: "0x1", SubsystemVendor: "0x2",
			SubsystemDevice: "0x3"}}
	nic := topo.NIC{Name: "a", BusID: "0000:02:00.0", Device: topo.PCIIdentity{Class: "0x080100"}}
	amd := topo.GPU{BusID: "0000:03:00.0", Index: 1, Vendor: "AMD",
		Device: topo.PCIIdentity{Class: "0x120000", Vendor: "0x1002"}}
	want := []string{
		`<pci busid="0000:01:00.0" class="0x030200" vendor="0x10de" device="0x1" ` +
			`subsystem_vendor="0x2" subsystem_device="0x3" link_speed="" link_width="">`,
		`<pci busid="0000:02:00.0" class="0x020000" link_speed="" link_width="">`,
		`<pci busid="0000:03:00.0" class="0x120000" vendor="0x1002" link_speed="" link_width="">`,
	}
	got := lines(t, oneNode([]topo.GPU{gpu, amd}, nic), "<pci")
	if diff := cmp.Diff([]string{want[0], want[2], want[1]}, got); diff != "" && !cmp.Equal(want, got) {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// The first NUMA node of a host stays, and each node with a device.
func TestWriteNodesWithoutDeviceAreOmitted(t *testing.T) {
	h := oneNode([]topo.GPU{{BusID: "0000:01:00.0", NUMA: 2}}, topo.NIC{Name: "a", BusID: "0000:02:00.0", NUMA: 3})
	h.Switches = []topo.Switch{{BusID: "0000:03:00.0", NUMA: 5}}
	h.CPUs = nil
	for numa := range 7 {
		h.CPUs = append(h.CPUs, topo.CPU{NUMA: numa})
	}
	h.CPUs[2] = topo.CPU{NUMA: 2, CPUs: "0-7", Arch: "x86_64", Vendor: "GenuineIntel", Family: 6, Model: 0}
	h.CPUs[3] = topo.CPU{NUMA: 3, Model: 1}
	h.CPUs = append(h.CPUs, topo.CPU{Host: "0xb", NUMA: 9}, topo.CPU{Host: "0xb", NUMA: 10})
	want := []string{`<cpu numaid="0"/>`,
		`<cpu numaid="2" affinity="000000ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="0">`,
		`<cpu numaid="3" familyid="0" modelid="1">`, `<cpu numaid="5">`, `<cpu host_hash="0xb" numaid="9"/>`}
	if diff := cmp.Diff(want, lines(t, h, "<cpu")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// The limits are NCCL's: 255 elements and values of 253 bytes.
func TestWriteLimitAcceptsMaximum(t *testing.T) {
	gpus := func(elements int) *topo.Host { // <system>, <cpu>, and a <pci> a GPU
		h := oneNode(nil)
		for i := range elements - 2 {
			h.GPUs = append(h.GPUs, topo.GPU{Index: i, BusID: fmt.Sprintf("%04x:00:00.0", i), Device: display})
		}
		return h
	}
	if _, err := ncclxml.Write(gpus(255)); err != nil {
		t.Error(err)
	}
	if _, err := ncclxml.Write(gpus(256)); !testutil.HasError(err, &ncclxml.SizeError{Elements: 256}) {
		t.Errorf("%v; want an error with 256 elements", err)
	}
	named := func(bytes int) *topo.Host { return oneNode(nil, topo.NIC{Name: strings.Repeat("n", bytes)}) }
	if _, err := ncclxml.Write(named(253)); err != nil {
		t.Error(err)
	}
	if _, err := ncclxml.Write(named(254)); !testutil.HasError(err, &ncclxml.UnwritableError{
		What: "attribute name of a <net>", Text: strings.Repeat("n", 254)}) {
		t.Errorf("%v; want an error with 254 bytes", err)
	}
}

func TestWriteNoteBecomesComment(t *testing.T) {
	h := oneNode(nil)
	h.Notes = []string{"a -- b --- c", "line\nand\ttab", "\xff"}
	want := []string{"<!-- a - - b - - - c -->", "<!-- line and tab -->", "<!-- ? -->"}
	if diff := cmp.Diff(want, lines(t, h, "<!--")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Elements of a file of NCCL keep the order of devices; other hosts have NCCL's order: by name of the
// element, then by address.
func TestWriteElementsHaveOrder(t *testing.T) {
	gpu := func(index int, busID string, order int) topo.GPU {
		return topo.GPU{Index: index, BusID: busID, Order: order, Capability: 90, Place: topo.Place{Switch: "0000:10:00.0"}}
	}
	h := oneNode([]topo.GPU{gpu(0, "0000:13:00.0", 2), gpu(1, "0000:11:00.0", 0)},
		topo.NIC{Name: "a", BusID: "0000:12:00.0", Order: 1, Place: topo.Place{Switch: "0000:10:00.0"}},
		topo.NIC{Name: "z", Order: 4}, topo.NIC{Name: "y", Order: 3})
	h.Switches = []topo.Switch{{BusID: "0000:10:00.0", Peers: []string{"0000:20:00.0"}}, {BusID: "0000:20:00.0"},
		{BusID: "0000:05:00.0"}}
	order := func() (all []string) {
		for _, line := range lines(t, h, "<") {
			for _, begin := range []string{`<pci busid="0000:`, `<net name="`, `<pcilink target="0000:`} {
				if rest, ok := strings.CutPrefix(line, begin); ok {
					name, _, _ := strings.Cut(rest, `"`)
					all = append(all, strings.TrimSuffix(name, ":00.0"))
				}
			}
		}
		return all
	}
	if diff := cmp.Diff([]string{"10", "20", "11", "12", "a", "13", "y", "z", "05", "20"}, order()); diff != "" {
		t.Errorf("file of NCCL (-want +got):\n%s", diff)
	}
	h.Source.Kind = topo.SourceSysfs
	if diff := cmp.Diff([]string{"05", "10", "20", "11", "12", "a", "13", "20", "y", "z"}, order()); diff != "" {
		t.Errorf("sysfs (-want +got):\n%s", diff)
	}
}

// AsNCCLReads changes values of sysfs to the values that NCCL reads on the host.
func TestAsNCCLReadsConvertsValues(t *testing.T) {
	sysfs := topo.Source{Kind: topo.SourceSysfs}
	for kernel, nccl := range map[int]int{6: 6, 15: 15, 16: 31, 25: 175, 26: 191} {
		h := &topo.Host{Source: sysfs, CPUs: []topo.CPU{{Family: kernel}}}
		if got := ncclxml.AsNCCLReads(h).CPUs[0].Family; got != nccl || h.CPUs[0].Family != kernel {
			t.Errorf("family %d: %d, want %d; the input has %d", kernel, got, nccl, h.CPUs[0].Family)
		}
	}
	for kernel, nccl := range map[string]string{"5054:00ff:fe70:0001": "0x10070feff005450", "0000:0000:0000:0000": "",
		"":  "",
		"x": "", "0000:0000:0000:0100": "0x1000000000000"} {
		h := &topo.Host{Source: sysfs, NICs: []topo.NIC{{Name: "a", GUID: kernel}}}
		if got := ncclxml.AsNCCLReads(h).NICs[0].GUID; got != nccl {
			t.Errorf("GUID %q: %q, want %q", kernel, got, nccl)
		}
	}
	file := &topo.Host{Source: topo.Source{Kind: topo.SourceNCCLXML}, NICs: []topo.NIC{{Name: "a", Software: true}}}
	if ncclxml.AsNCCLReads(file) != file {
		t.Error("a file of NCCL changes")
	}
}

// NCCL numbers the active ports of a device across functions.
func TestAsNCCLReadsNumbersPortsOfDevice(t *testing.T) {
	nic := func(name, busID string, ports ...topo.Port) topo.NIC {
		return topo.NIC{Name: name, BusID: busID, Ports: ports}
	}
	one, down := topo.Port{Number: 1, State: "ACTIVE"}, topo.Port{Number: 2, State: "DOWN"}
	h := &topo.Host{Source: topo.Source{Kind: topo.SourceSysfs}, NICs: []topo.NIC{
		nic("mlx5_10", "0000:01:00.1", one, down), nic("mlx5_2", "0000:01:00.0", one), nic("mlx5_3", "0000:01:10.0", one),
		nic("mlx5_4", "0000:02:00.0", one), nic("siw0", "", one)}}
	got := map[string][]int{}
	var names []string
	for _, n := range ncclxml.AsNCCLReads(h).NICs {
		names = append(names, n.Name)
		for _, p := range n.Ports {
			got[n.Name] = append(got[n.Name], p.Number)
		}
	}
	want := map[string][]int{"mlx5_2": {1}, "mlx5_10": {2, 2}, "mlx5_3": {3}, "mlx5_4": {1}, "siw0": {1}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("ports (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"mlx5_2", "mlx5_3", "mlx5_4", "mlx5_10", "siw0"}, names); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
	if p := h.NICs[0].Ports[0]; p.Number != 1 {
		t.Errorf("the input has port %d", p.Number)
	}
}

func TestAsNCCLReadsListsBothFunctionsOfDataDirect(t *testing.T) {
	own := &topo.Function{NUMA: 0, Place: topo.Place{Switch: "0000:10:00.0"}}
	h := &topo.Host{Source: topo.Source{Kind: topo.SourceSysfs}, Notes: make([]string, 0, 4), NICs: []topo.NIC{
		{Name: "mlx5_0", BusID: "0000:11:00.1", Card: "0000:11:00.0", DataDirect: "0000:21:00.0", NUMA: 1, Own: own,
			Place: topo.Place{Switch: "0000:20:00.0"}},
		{Name: "rxe0", Software: true}}}
	want := []topo.NIC{
		{Name: "mlx5_0", BusID: "0000:11:00.0", Place: own.Place},
		{Name: "mlx5_0_dma", BusID: "0000:21:00.0", NUMA: 1, Place: topo.Place{Switch: "0000:20:00.0"}},
	}
	got := ncclxml.AsNCCLReads(h)
	if diff := cmp.Diff(want, got.NICs); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if len(got.Notes) != 1 || h.Notes[:1][0] != "" {
		t.Errorf("notes %q, and in the array of the input %q", got.Notes, h.Notes[:1])
	}
}

func TestLinkWordsUnknownPartsAreEmpty(t *testing.T) {
	for _, tt := range []struct {
		place        topo.Place
		speed, width string
	}{
		{topo.Place{}, "", ""},
		{topo.Place{LinkWidth: 1}, "", "1"},
		{topo.Place{LinkSpeed: "16.0 GT/s PCIe"}, "16.0 GT/s PCIe", ""},
		{topo.Place{LinkSpeed: "16 GT/s", LinkWidth: 8}, "16 GT/s", "8"},
		{topo.Place{LinkSpeed: "fast", LinkWidth: 8}, "", "8"},
		{topo.Place{Link: 12, LinkSpeed: "16.0 GT/s PCIe", LinkWidth: 8}, "16.0 GT/s PCIe", "8"},
		{topo.Place{Link: 48}, "16.0 GT/s PCIe", "32"}, // the widest link
		{topo.Place{Link: 96}, "32.0 GT/s PCIe", "32"},
		{topo.Place{Link: 3}, "2.5 GT/s PCIe", "16"},
		{topo.Place{Link: 1.5}, "2.5 GT/s PCIe", "8"},
		{topo.Place{Link: 0.75}, "2.5 GT/s PCIe", "4"},
		{topo.Place{Link: 0.375}, "2.5 GT/s PCIe", "2"},
		{topo.Place{Link: 36}, "32.0 GT/s PCIe", "12"},
		{topo.Place{Link: 192}, "64.0 GT/s PCIe", "32"},
		{topo.Place{Link: 0.1875}, "2.5 GT/s PCIe", "1"},
		{topo.Place{Link: 24, LinkSpeed: "2.5 GT/s PCIe", LinkWidth: 1}, "8.0 GT/s PCIe", "32"},
	} {
		if speed, width := ncclxml.LinkWords(tt.place); speed != tt.speed || width != tt.width {
			t.Errorf("%+v: %q, %q; want %q, %q", tt.place, speed, width, tt.speed, tt.width)
		}
	}
}

func TestAffinityOfInvalidListIsEmpty(t *testing.T) {
	for list, want := range map[string]string{"0-": "00000001", "-1": "", "1-x": "", "3-2": "", "2-2": "00000004",
		"x-3":  "",
		"1023": "80000000" + strings.Repeat(",0", 31), "1023-1024": "80000000" + strings.Repeat(",0", 31), "1024": ""} {
		if got := ncclxml.Affinity(list); got != want {
			t.Errorf("%q: %q, want %q", list, got, want)
		}
	}
}

func TestReadAndWriteKeepPeersOfSwitches(t *testing.T) {
	h := ncclfile.ReadXML(t,
		inCPU(`<pci busid="1:0.0" class="0x060400"><pcilink target="2:0.0"/><pci busid="3:0.0" class="0x020000"/></pci>`))
	if diff := cmp.Diff([]string{`<pcilink target="0000:02:00.0"/>`}, lines(t, h, "<pcilink")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
