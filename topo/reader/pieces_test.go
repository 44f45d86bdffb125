package reader

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

// A column is a character; control sequences count, and belong to no word.
func TestSplitLineNumbersColumnsAndTabs(t *testing.T) {
	for text, want := range map[string]smiLine{
		"":                      {number: 7, end: 1},
		"ab c":                  {7, []word{{"ab", 1, 0}, {"c", 4, 0}}, 5},
		"\tGPU0\t\tX ":          {7, []word{{"GPU0", 2, 1}, {"X", 8, 3}}, 9},
		"\x1b[4mGPU0\x1b[0m\tX": {7, []word{{"GPU0", 5, 0}, {"X", 14, 1}}, 15},
		"\x1bGPU0":              {7, []word{{"\x1bGPU0", 1, 0}}, 6},
		"é\tX":                  {7, []word{{"é", 1, 0}, {"X", 3, 1}}, 4},
		"a\rb":                  {7, []word{{"a", 1, 0}, {"b", 3, 0}}, 4},
	} {
		if diff := cmp.Diff(want, splitLine(7, text), cmp.AllowUnexported(smiLine{}, word{})); diff != "" {
			t.Errorf("%q (-want +got):\n%s", text, diff)
		}
	}
}

func TestSMILineIsHeaderOrRow(t *testing.T) {
	for text, want := range map[string][2]bool{
		"\tGPU0\tGPU1":             {true, false},
		"GPU0 GPU1":                {true, false},
		"GPU0":                     {true, false},
		"GPU0 mlx5_0":              {false, false},
		"GPU0 mlx5_0 CPU Affinity": {true, false},
		"GPU0 CPU Affinity":        {true, false},
		"GPU0 X PIX":               {false, true},
		"GPU0 NV4":                 {false, true},
		"NIC0 PIX":                 {false, true},
		"mlx5_0 PIX":               {false, false},
		"mlx5_0":                   {false, false},
		"GPU0 is fine":             {false, false},
		"X PIX":                    {false, false},
		"":                         {false, false},
		"GPU1234567 GPU1":          {false, false},
		"GPU0 NV0":                 {false, false},
		"GPU0 NV12345":             {false, false},
	} {
		l := splitLine(1, text)
		if got := [2]bool{smiHeader(l), smiRow(l)}; got != want {
			t.Errorf("%q: header, row %v, want %v", text, got, want)
		}
	}
}

// The sum of a GPU's links decides: up to 18 links lead to the peers.
func TestSMINVLinksAboveEighteenLeadToSwitches(t *testing.T) {
	row := func(label string, cells ...string) string { return label + "\t" + strings.Join(cells, "\t") + "\n" }
	matrix := func(first, second string) string {
		return row("", "GPU0", "GPU1", "GPU2") + row("GPU0", "X", first, second) + row("GPU1", first, "X", "SYS") +
			row("GPU2", second, "SYS", "X")
	}
	for _, tt := range []struct {
		first, second string
		want          []topo.NVLink
	}{
		{"NV9", "NV9", []topo.NVLink{{Peer: "GPU1", Count: 9}, {Peer: "GPU2", Count: 9}}},
		{"NV10", "NV10", []topo.NVLink{{Count: 10}}},
		{"NV10", "NV9", []topo.NVLink{{Peer: "GPU1", Count: 10}, {Peer: "GPU2", Count: 9}}},
		{"NV20", "SYS", []topo.NVLink{{Peer: "GPU1", Count: 20}}},
		{"SYS", "NV4", []topo.NVLink{{Peer: "GPU2", Count: 4}}},
	} {
		if diff := cmp.Diff(tt.want, readSMIText(t, matrix(tt.first, tt.second)).GPUs[0].NVLinks); diff != "" {
			t.Errorf("%s and %s (-want +got):\n%s", tt.first, tt.second, diff)
		}
	}
}

func TestSMIAffinityColumnsSetNUMANode(t *testing.T) {
	const cells = "GPU0\tX\tPHB"
	for name, tt := range map[string]struct {
		header, row string
		want        int
	}{
		"third column":          {"CPU Affinity\tNUMA Affinity\tGPU NUMA ID", "0-3\t1\tN/A", 1},
		"no NUMA column":        {"CPU Affinity", "0-3", -1},
		"an empty cell before":  {"CPU Affinity\tNUMA Affinity", "\t1", 1},
		"an empty cell":         {"CPU Affinity\tNUMA Affinity", "0-3\t", -1},
		"no cells":              {"CPU Affinity\tNUMA Affinity", "", -1},
		"several nodes":         {"CPU Affinity\tNUMA Affinity", "0-3\t0-1", -1},
		"a number out of range": {"CPU Affinity\tNUMA Affinity", "0-3\t65536", -1},
		"largest number":        {"CPU Affinity\tNUMA Affinity", "0-3\t65535", 65535},
		"first column":          {"NUMA Affinity", "2", 2},
	} {
		text := "\tGPU0\tGPU1\t" + tt.header + "\n" + strings.TrimRight(cells+"\t"+tt.row, "\t") + strings.Repeat("\t",
			strings.Count(tt.row, "\t")-strings.Count(strings.TrimRight(tt.row, "\t"), "\t")) + "\nGPU1\tPHB\tX\n"
		if got := readSMIText(t, text).GPUs[0].NUMA; got != tt.want {
			t.Errorf("%s: %d, want %d", name, got, tt.want)
		}
	}
	// With blanks, cells follow each other.
	if got := readSMIText(t,
		" GPU0 GPU1 CPU Affinity NUMA Affinity\nGPU0 X PHB 0-3 1\nGPU1 PHB X 0-3 1\n").GPUs[1].NUMA; got != 1 {
		t.Errorf("blanks: %d", got)
	}
}

func TestHwlocPiecesFollowFile(t *testing.T) {
	for name, tt := range map[string]struct {
		infos map[string]string
		want  []topo.Port
	}{
		"none": {map[string]string{"Port2State": "4"}, nil},
		"states": {map[string]string{"Port1State": "1", "Port2State": "4", "Port3State": "9", "Port5State": "4"},
			[]topo.Port{{Number: 1, State: "DOWN"}, {Number: 2, State: "ACTIVE"}, {Number: 3, State: "9"}}},
		"unknown": {map[string]string{"Port1State": ""}, []topo.Port{{Number: 1}}},
	} {
		if diff := cmp.Diff(tt.want, hwlocPorts(tt.infos)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	many := map[string]string{}
	for n := range 300 {
		many[fmt.Sprintf("Port%dState", n+1)] = "4"
	}
	if got := hwlocPorts(many); len(got) != 255 {
		t.Errorf("%d ports, want 255", len(got))
	}
	for f, want := range map[[2]string]string{{"1d0f", "efa1"}: "EFA", {"1d0f", "ec20"}: "", {"15b3", "efa1"}: "",
		{"1ded", "107f"}: "eRDMA",
		{"15b3", "1021"}: ""} {
		if got := hwlocProtocol(&hwlocPCI{vendor: f[0], device: f[1]}); got != want {
			t.Errorf("%v: %q, want %q", f, got, want)
		}
	}
	g := topo.GPU{}
	for _, l := range []topo.NVLink{{Peer: "a", Count: 1, Bandwidth: 20}, {Peer: "b", Count: 1},
		{Peer: "a", Count: 2, Bandwidth: 40}, {Count: 3}} {
		addNVLink(&g, l)
	}
	if diff := cmp.Diff([]topo.NVLink{{Peer: "a", Count: 3, Bandwidth: 60}, {Peer: "b", Count: 1}, {Count: 3}},
		g.NVLinks); diff != "" {
		t.Errorf("links (-want +got):\n%s", diff)
	}
}

func TestHwlocLinksOfMatrix(t *testing.T) {
	gpus := ""
	for i := range 2 {
		gpus += hwlocDevice(fmt.Sprintf("0000:0%d:00.0", i+1), "0302 [10de:1db5] [10de:1249] a1", "0.000000",
			hwlocOSDev("1", fmt.Sprintf("nvml%d", i), ""))
	}
	gpus += `<object type="PCIDev" gp_index="77" pci_busid="0000:09:00.0" pci_type="0680 [10de:1af1] a1"/>` +
		`<object type="PCIDev" gp_index="78" pci_busid="0000:0a:00.0" pci_type="0680 [1014:1af1] a1"/>` +
		`<object type="PCIDev" gp_index="79" pci_busid="0000:0b:00.0" pci_type="0604 [10de:1af1] a1"/>`
	for name, tt := range map[string]struct {
		to    string
		value int
		want  []topo.NVLink // of GPU 0
	}{
		"two links": {"OSDev:os-nvml1", 50000, []topo.NVLink{{Peer: "0000:02:00.0", Count: 2}}},
		"one link of the first kind": {"OSDev:os-nvml1", 20000,
			[]topo.NVLink{{Peer: "0000:02:00.0", Count: 1, Bandwidth: 18}}},
		"a common multiple":         {"OSDev:os-nvml1", 100000, []topo.NVLink{{Peer: "0000:02:00.0", Count: 4}}},
		"less than a link":          {"OSDev:os-nvml1", 19999, nil},
		"a part of a link":          {"OSDev:os-nvml1", 26000, []topo.NVLink{{Peer: "0000:02:00.0", Count: 1}}},
		"the limit":                 {"OSDev:os-nvml1", 1e9, []topo.NVLink{{Peer: "0000:02:00.0", Count: 40000}}},
		"above the limit":           {"OSDev:os-nvml1", 1e9 + 25000, nil},
		"an NVSwitch":               {"PCIDev:77", 150000, []topo.NVLink{{Count: 6}}},
		"a bridge of another maker": {"PCIDev:78", 150000, nil},
		"a bridge of another class": {"PCIDev:79", 150000, nil},
		"an unknown object":         {"PCIDev:99", 150000, nil},
	} {
		matrix := fmt.Sprintf(`<distances2hetero nbobjs="2" kind="9" name="NVLinkBandwidth" `+
			`indexing="gp"><indexes length="2">`+
			`OSDev:os-nvml0 %s</indexes><u64values length="4">1000000 %d 0 1000000</u64values></distances2hetero>`, tt.to,
			tt.value)
		h := readHwlocText(t, machineXML(gpus, "", "", matrix))
		if diff := cmp.Diff(tt.want, h.GPUs[0].NVLinks); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestHwlocNotesDescribeLinks(t *testing.T) {
	gpu := func(busID, speed string) string {
		return hwlocDevice(busID, "0302 [10de:1db5] [10de:1249] a1", speed, "")
	}
	nic := hwlocDevice("0000:05:00.0", "0207 [15b3:1017]", "0.000000", hwlocOSDev("3", "mlx5_0", ""))
	const noBridges, current = "the file has no bridges", "hwloc writes the current speed"
	for name, tt := range map[string]struct {
		inner string
		want  []string
	}{
		"unknown speeds": {gpu("0000:01:00.0", "0.000000") + nic,
			[]string{noBridges, "the file has no link speed for 2 of 2 GPUs and NICs"}},
		"known speeds": {gpu("0000:01:00.0", "15.753846"), []string{noBridges, current}},
		"both": {gpu("0000:01:00.0", "15.753846") + nic,
			[]string{noBridges, "the file has no link speed for 1 of 2 GPUs and NICs", current}},
		"bridges": {hwlocBridge("1-1", "0000:[01-02]", "0000:00:01.0", "15.753846", gpu("0000:01:00.0", "15.753846")),
			[]string{current}},
		"host bridge": {hwlocBridge("0-1", "0000:[00-02]", "", "", gpu("0000:01:00.0", "15.753846")), []string{current}},
	} {
		h := readHwlocText(t, machineXML(tt.inner, "", "", ""))
		ok := len(h.Notes) == len(tt.want)
		for i := range min(len(h.Notes), len(tt.want)) {
			ok = ok && strings.HasPrefix(h.Notes[i], tt.want[i])
		}
		if !ok {
			t.Errorf("%s: notes %q, want %q", name, h.Notes, tt.want)
		}
	}
}

// tree is held files: a directory is "", a link begins with "-> ".
func tree(files map[string]string) held {
	h := held{"/": {names: map[string]bool{}}}
	p := unpacking{held: h}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		e := heldFile{data: []byte(files[name])}
		if target, ok := strings.CutPrefix(files[name], "-> "); ok {
			e = heldFile{target: target}
		}
		if err := p.hold(name, e); err != nil {
			panic(err)
		}
	}
	return h
}

func TestHeldPathsFollowLinks(t *testing.T) {
	chain := map[string]string{"/sys/a/file": "x", "/sys/dir": "-> a", "/sys/b/up": "-> ../a/file", "/sys/loop": "-> loop",
		"/sys/gone": "-> nowhere", "/sys/deep": "-> b/up"}
	for n := range 41 {
		target := fmt.Sprintf("-> l%d", n-1)
		if n == 0 {
			target = "-> a/file"
		}
		chain[fmt.Sprintf("/sys/l%d", n)] = target
	}
	h := tree(chain)
	for name, tt := range map[string]struct {
		at  string
		err error
	}{
		"/":                 {"/", nil},
		"/sys/a/file":       {"/sys/a/file", nil},
		"/sys/dir":          {"/sys/a", nil},
		"/sys/dir/file":     {"/sys/a/file", nil},
		"/sys/b/up":         {"/sys/a/file", nil},
		"/sys/deep":         {"/sys/a/file", nil},
		"/sys/dir/../b":     {"/sys/b", nil},
		"/sys/./a//file":    {"/sys/a/file", nil},
		"/sys/l39":          {"/sys/a/file", nil}, // 40 links
		"/sys/l40":          {"", syscall.ELOOP},
		"/sys/loop":         {"", syscall.ELOOP},
		"/sys/gone":         {"", syscall.ENOENT},
		"/sys/none":         {"", syscall.ENOENT},
		"/sys/a/file/below": {"", syscall.ENOTDIR},
		"/proc":             {"", syscall.ENOENT},
	} {
		if at, err := h.Resolve(name); at != tt.at || !errors.Is(err, tt.err) {
			t.Errorf("%s: %q, %v; want %q, %v", name, at, err, tt.at, tt.err)
		}
	}
	if target, err := h.ReadLink("/sys/b/up"); target != "../a/file" || err != nil {
		t.Errorf("link: %q, %v", target, err)
	}
	for name, want := range map[string]error{"/sys/a/file": syscall.EINVAL, "/sys/a": syscall.EINVAL,
		"/sys/none": fs.ErrNotExist} {
		if _, err := h.ReadLink(name); !errors.Is(err, want) {
			t.Errorf("link %s: %v, want %v", name, err, want)
		}
	}
	for name, want := range map[string]error{"/sys/a": syscall.EISDIR, "/sys/none": fs.ErrNotExist} {
		if _, err := h.ReadFile(name); !errors.Is(err, want) {
			t.Errorf("file %s: %v, want %v", name, err, want)
		}
	}
	if data, err := h.ReadFile("/sys/deep"); string(data) != "x" || err != nil {
		t.Errorf("file: %q, %v", data, err)
	}
	if _, err := h.ReadDir("/sys/a/file"); !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("directory: %v", err)
	}
	entries, err := tree(map[string]string{"/sys/b": "xy", "/sys/a/f": "", "/sys/c": "-> b"}).ReadDir("/sys")
	var got []string
	for _, e := range entries {
		info, infoErr := e.Info()
		if infoErr != nil {
			t.Fatal(infoErr)
		}
		got = append(got, fmt.Sprintf("%s %v %t %d", e.Name(), e.Type(), e.IsDir(), info.Size()))
	}
	if diff := cmp.Diff([]string{"a d--------- true 0", "b ---------- false 2", "c L--------- false 0"},
		got); diff != "" || err != nil {
		t.Errorf("entries: %v (-want +got):\n%s", err, diff)
	}
}

func TestHoldRefusesContradictions(t *testing.T) {
	directory, file := heldFile{names: map[string]bool{}}, heldFile{data: []byte("x")}
	for name, tt := range map[string]struct {
		first, second string
		one, two      heldFile
		want          error
	}{
		"a directory twice":        {"/sys/a", "/sys/a", directory, directory, nil},
		"a directory after a file": {"/sys/a/f", "/sys/a", file, directory, nil},
		"a file twice":             {"/sys/a", "/sys/a", file, file, errTwice},
		"a file over a directory":  {"/sys/a", "/sys/a", directory, file, errTwice},
		"a directory over a file":  {"/sys/a", "/sys/a", file, directory, errTwice},
		"a file below a file":      {"/sys/a", "/sys/a/b", file, file, errNotDirectory},
		"a file below a link":      {"/sys/a", "/sys/a/b", heldFile{target: "c"}, file, errNotDirectory},
	} {
		p := unpacking{held: held{"/": {names: map[string]bool{}}}}
		if err := p.hold(tt.first, tt.one); err != nil {
			t.Fatal(err)
		}
		if err := p.hold(tt.second, tt.two); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	// Paths count as content.
	p := unpacking{held: held{"/": {names: map[string]bool{}}}, content: maxCaptureContent - len("/sys/a") - len("/sys")}
	if err := p.hold("/sys/a", file); err != nil || p.content != maxCaptureContent {
		t.Errorf("%d bytes, %v", p.content, err)
	}
	p = unpacking{held: held{"/": {names: map[string]bool{}}}, content: maxCaptureContent - len("/sys/a") - len("/sys") +
		1}
	if err := p.hold("/sys/a", file); !errors.Is(err, errTooMuch) {
		t.Errorf("%d bytes, %v", p.content, err)
	}
}

func TestChainFindsLastHostBridge(t *testing.T) {
	for path, want := range map[string]struct {
		bridge  string
		devices []string
	}{
		"../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0": {"pci0000:00",
			[]string{"0000:00:01.0", "0000:01:00.0"}},
		"../devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0/net/a": {"pci10000:e0",
			[]string{"10000:e0:06.0", "10000:e1:00.0"}},
		"../devices/virtual/net/a": {"", nil},
	} {
		bridge, devices := chain(path)
		if diff := cmp.Diff(want.devices, devices); bridge != want.bridge || diff != "" {
			t.Errorf("%s: %q (-want +got):\n%s", path, bridge, diff)
		}
	}
	for at, want := range map[string]string{"sys/devices/pci0000:00/0000:00:01.0": "sys/devices/pci0000:00",
		"sys/devices/pci0000:00":                              "sys/devices/pci0000:00",
		"sys/devices/a/pci0000:00/0000:00:0e.0/pci10000:e0/x": "sys/devices/a/pci0000:00", "sys/devices/virtual": "",
		"": ""} {
		if got := rootComplex(at); got != want {
			t.Errorf("%s: %q, want %q", at, got, want)
		}
	}
}

// The maximum of a link is the smaller value of both ends; an unknown width counts as sixteen lanes.
func TestSysfsLinkIsSmallerEnd(t *testing.T) {
	for name, tt := range map[string]struct {
		port, device []string
		speed        string
		width        int
	}{
		"slower port": {[]string{"max_link_speed=8.0 GT/s PCIe", "max_link_width=16"},
			[]string{"max_link_speed=16.0 GT/s PCIe", "max_link_width=16"}, "8.0 GT/s PCIe", 16},
		"slower device": {[]string{"max_link_speed=16.0 GT/s PCIe", "max_link_width=16"},
			[]string{"max_link_speed=8.0 GT/s PCIe", "max_link_width=8"}, "8.0 GT/s PCIe", 8},
		"narrow port": {[]string{"max_link_speed=16.0 GT/s PCIe", "max_link_width=4"},
			[]string{"max_link_speed=16.0 GT/s PCIe", "max_link_width=8"}, "16.0 GT/s PCIe", 4},
		"no width": {[]string{"max_link_speed=16.0 GT/s PCIe", "max_link_width=4"},
			[]string{"max_link_speed=16.0 GT/s PCIe"}, "16.0 GT/s PCIe", 0},
		"width 0": {[]string{"max_link_speed=16.0 GT/s PCIe", "max_link_width=4"},
			[]string{"max_link_speed=16.0 GT/s PCIe", "max_link_width=0"}, "16.0 GT/s PCIe", 0},
		"unknown widths": {[]string{"max_link_speed=16.0 GT/s PCIe", "max_link_width=255"},
			[]string{"max_link_speed=16.0 GT/s PCIe", "max_link_width=255"}, "16.0 GT/s PCIe", 0},
		"one unknown width": {[]string{"max_link_speed=16.0 GT/s PCIe", "max_link_width=255"},
			[]string{"max_link_speed=16.0 GT/s PCIe", "max_link_width=8"}, "16.0 GT/s PCIe", 8},
		"one speed": {[]string{"max_link_speed=Unknown", "max_link_width=16"},
			[]string{"max_link_speed=8.0 GT/s PCIe", "max_link_width=16"}, "8.0 GT/s PCIe", 16},
		"negative width": {[]string{"max_link_speed=8.0 GT/s PCIe", "max_link_width=-1"},
			[]string{"max_link_speed=8.0 GT/s PCIe", "max_link_width=16"}, "8.0 GT/s PCIe", 0},
	} {
		files := map[string]string{}
		const port = "pci0000:00/0000:00:01.0"
		topotest.Device(files, port, append([]string{"class=0x060400", "vendor=0x8086"}, tt.port...)...)
		topotest.Device(files, port+"/0000:01:00.0", append([]string{topotest.GPUClass, topotest.GPUVendor}, tt.device...)...)
		if g := readTree(t, files).GPUs[0]; g.LinkSpeed != tt.speed || g.LinkWidth != tt.width {
			t.Errorf("%s: %q, %d; want %q, %d", name, g.LinkSpeed, g.LinkWidth, tt.speed, tt.width)
		}
	}
	for _, tt := range []struct {
		speed, width string
		want         float64
	}{{"8.0 GT/s PCIe", "16", 12}, {"8.0 GT/s PCIe", "1", 0.75}, {"8.0 GT/s PCIe", "32", 24}, {"8.0 GT/s PCIe", "33", 0},
		{"8.0 GT/s PCIe", "0", 0},
		{"8.0 GT/s PCIe", "x", 0}, {"Unknown", "16", 0}, {"", "16", 0}} {
		files := map[string]string{}
		topotest.Device(files, "pci0000:00/0000:00:01.0", topotest.GPUClass, topotest.GPUVendor,
			"current_link_speed="+tt.speed, "current_link_width="+tt.width)
		if got := readTree(t, files).GPUs[0].LinkNow; got != tt.want {
			t.Errorf("%q, %q: %g, want %g", tt.speed, tt.width, got, tt.want)
		}
	}
}

func TestSysfsFindsGPUsByClassVendorAndDriver(t *testing.T) {
	for name, tt := range map[string]struct {
		class, vendor, driver string
		want                  string // the vendor, or "-" for no GPU
	}{
		"3D":                         {"0x030200", "0x10de", "", ""},
		"VGA":                        {"0x030000", "0x10de", "nvidia", ""},
		"a display":                  {"0x038000", "0x10de", "", "-"},
		"an accelerator":             {"0x120000", "0x10de", "", "-"},
		"a GPU of a virtual machine": {"0x030200", "0x10de", "vfio-pci", "-"},
		"audio":                      {"0x040300", "0x10de", "", "-"},
		"accelerator of AMD":         {"0x120000", "0x1002", "", "AMD"},
		"display of AMD":             {"0x038000", "0x1002", "", "AMD"},
		"VGA of AMD":                 {"0x030000", "0x1002", "amdgpu", "AMD"},
		"VGA of AMD without driver":  {"0x030000", "0x1002", "", "-"},
		"co-processor of Hygon":      {"0x0b4000", "0x1d94", "", "Hygon"},
		"co-processor of AMD":        {"0x0b4000", "0x1002", "", "-"},
		"VGA of another maker":       {"0x030000", "0x1a03", "amdgpu", "-"},
		"no vendor":                  {"0x030200", "", "", "-"},
	} {
		files := map[string]string{}
		attributes := []string{"class=" + tt.class, "vendor=" + tt.vendor}
		if tt.driver != "" {
			attributes = append(attributes, "driver=-> ../../../bus/pci/drivers/"+tt.driver)
		}
		topotest.Device(files, "pci0000:00/0000:00:01.0", attributes...)
		got := "-"
		if h := readTree(t, files); len(h.GPUs) > 0 {
			got = h.GPUs[0].Vendor
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

func TestSysfsNUMANodeOfDevice(t *testing.T) {
	for name, tt := range map[string]struct {
		nodes []string
		node  string
		want  int
		notes int
	}{
		"listed":                {[]string{"node0", "node1"}, "1", 1, 0},
		"unknown":               {[]string{"node0", "node1"}, "-1", -1, 1},
		"no attribute":          {[]string{"node0", "node1"}, "", -1, 1},
		"a single node":         {[]string{"node3"}, "-1", 3, 0},
		"not listed":            {[]string{"node0", "node1"}, "4", 4, 1},
		"a kernel without NUMA": {nil, "-1", 0, 0},
	} {
		files := map[string]string{"proc/driver/nvidia/gpus/0000:00:01.0/information": "Model: x"}
		for _, n := range tt.nodes {
			files["sys/devices/system/node/"+n+"/cpulist"] = "0-3"
		}
		attributes := []string{topotest.GPUClass, topotest.GPUVendor}
		if tt.node != "" {
			attributes = append(attributes, "numa_node="+tt.node)
		}
		topotest.Device(files, "pci0000:00/0000:00:01.0", attributes...)
		h := readTree(t, files)
		listed := slices.ContainsFunc(h.CPUs, func(c topo.CPU) bool { return c.NUMA == tt.want })
		if h.GPUs[0].NUMA != tt.want || !listed || len(h.Notes) != tt.notes {
			t.Errorf("%s: node %d of %+v, notes %q; want %d", name, h.GPUs[0].NUMA, h.CPUs, h.Notes, tt.want)
		}
	}
}

func TestPortAttributesAreParsed(t *testing.T) {
	for text, want := range map[string]float64{"400 Gb/sec (4X NDR)": 400, "2.5 Gb/sec": 2.5, "0 Gb/sec": 0, "-1": 0,
		"x": 0, "": 0, "1000000": 1e6,
		"1000001": 0, "NaN": 0} {
		if got := portRate(text); got != want {
			t.Errorf("rate %q: %g, want %g", text, got, want)
		}
	}
	for text, want := range map[string]int{"0x1f": 31, "65535": 65535, "65536": 0, "x": 0, "": 0} {
		if got := portLID(text); got != want {
			t.Errorf("LID %q: %d, want %d", text, got, want)
		}
	}
	for text, want := range map[string]string{"4: ACTIVE": "ACTIVE", "ACTIVE": "ACTIVE", "5: Link: Up": "Link: Up",
		"": ""} {
		if got := portState(text); got != want {
			t.Errorf("state %q: %q, want %q", text, got, want)
		}
	}
	for text, want := range map[string]string{"fe80:0000:0000:0000:0c42:a103:00aa:bbcc": "0c42:a103:00aa:bbcc",
		"0000:0000:0000:0000:0000:0000:0000:0000": "", "fe80:0000:0000:0000:0c42:a103:00aa:bbc": "",
		"fe80:0000:0000:0000:0c42:a103:00aa:bbccd": "", "": ""} {
		if got := portGUID(text); got != want {
			t.Errorf("GID %q: %q, want %q", text, got, want)
		}
	}
}

func TestHwlocProcessorFollowsMachineAndPackage(t *testing.T) {
	gpu := hwlocDevice("0000:01:00.0", "0302 [10de:1db5] [10de:1249] a1", "0.000000", "")
	info := func(name, value string) string { return `<info name="` + name + `" value="` + value + `"/>` }
	machine := func(infos, ofPackage string) string {
		return `<topology version="2.0"><object type="Machine" nodeset="0x1">` + infos +
			`<object type="Package">` + ofPackage + `<object type="NUMANode" os_index="0" cpuset="0xf"/></object>` + gpu +
			`</object></topology>`
	}
	x86 := info("Architecture", "x86_64")
	intel := info("CPUVendor", "GenuineIntel") + info("CPUFamilyNumber", "6") + info("CPUModelNumber", "143")
	for name, tt := range map[string]struct {
		text string
		want topo.CPU
	}{
		"of the package": {machine(x86, intel), topo.CPU{Arch: "x86_64", Vendor: "GenuineIntel", Family: 6, Model: 143,
			Socket: 22}},
		"of the machine": {machine(x86+intel, ""), topo.CPU{Arch: "x86_64", Vendor: "GenuineIntel", Family: 6, Model: 143,
			Socket: 22}},
		"the first counts": {machine(x86, intel+info("CPUModelNumber", "85")),
			topo.CPU{Arch: "x86_64", Vendor: "GenuineIntel", Family: 6, Model: 143, Socket: 22}},
		"other infos": {machine(x86, info("Vendor", "x")+info("Architecture", "arm64")),
			topo.CPU{Arch: "x86_64", Socket: 5000}},
		"ARM":     {machine(info("Architecture", "aarch64"), ""), topo.CPU{Arch: "arm64", Socket: 6}},
		"POWER":   {machine(info("Architecture", "ppc64le"), ""), topo.CPU{Arch: "ppc64", Socket: 32}},
		"nothing": {machine("", ""), topo.CPU{}},
	} {
		tt.want.CPUs = "0-3"
		if diff := cmp.Diff([]topo.CPU{tt.want}, readHwlocText(t, tt.text).CPUs); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
