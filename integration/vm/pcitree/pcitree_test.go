package pcitree

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo/recorded"
)

func mustParse(t *testing.T, text string) *Tree {
	t.Helper()
	tree, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

func mustNamed(t *testing.T, name string) *Tree {
	t.Helper()
	text, err := ReadTable(name)
	if err != nil {
		t.Fatal(err)
	}
	return mustParse(t, text)
}

func addresses(tree *Tree) []string {
	var all []string
	for _, f := range tree.Functions() {
		all = append(all, f.Address)
	}
	return all
}

// find returns the function at an address.
func find(t *testing.T, tree *Tree, address string) *function {
	t.Helper()
	for _, f := range tree.functions {
		if f.String() == address {
			return f
		}
	}
	t.Fatalf("the tree has nothing at %s; it has %v", address, addresses(tree))
	return nil
}

func TestBusNumbersFollowDepthFirst(t *testing.T) {
	tree := mustParse(t, `
host-bridge 0001:20
    root-port 8086:352a gen5 x16     # a switch below a switch
        switch 1000:c030 gen5 x16
            switch 1000:c010 gen4 x16
                gpu 10de:2330 gen5 x16
                nic 15b3:1021 gen5 x16
            nvme 144d:a824 gen4 x4
    root-port 8086:352a gen5 x16     # an empty slot
    root-port 8086:352a gen5 x16
        function 0c0330 1b21:2142 gen3 x2
host-bridge 0000:00
`)
	want := []string{
		"0001:20:01.0", "0001:21:00.0", // root port, upstream port
		"0001:22:00.0", "0001:23:00.0", // downstream port, upstream port of the second switch
		"0001:24:00.0", "0001:25:00.0",
		"0001:24:01.0", "0001:26:00.0",
		"0001:22:01.0", "0001:27:00.0",
		"0001:20:02.0", // bus 28 belongs to the empty slot
		"0001:20:03.0", "0001:29:00.0",
	}
	if diff := cmp.Diff(want, addresses(tree)); diff != "" {
		t.Error(diff)
	}
	for address, want := range map[string][3]int{ // primary, secondary, subordinate
		"0001:20:01.0": {0x20, 0x21, 0x27},
		"0001:21:00.0": {0x21, 0x22, 0x27},
		"0001:22:00.0": {0x22, 0x23, 0x26},
		"0001:22:01.0": {0x22, 0x27, 0x27},
		"0001:20:02.0": {0x20, 0x28, 0x28},
	} {
		f := find(t, tree, address)
		c := f.config()
		if got := [3]int{int(c.value[0x18]), int(c.value[0x19]), int(c.value[0x1a])}; got != want {
			t.Errorf("bridge %s has buses %x, want %x", address, got, want)
		}
	}
}

// The archive was captured from this table: after a change of the table, capture it again.
func TestTableTwoNICsEqualsRecordedHost(t *testing.T) {
	sysfs, proc, err := recorded.Unpack(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	tree := mustNamed(t, "two-nics")
	devices := filepath.Join(sysfs, "bus/pci/devices")
	entries, err := os.ReadDir(devices)
	if err != nil {
		t.Fatal(err)
	}
	var present []string
	for _, e := range entries {
		present = append(present, e.Name())
	}
	ours := addresses(tree)
	slices.Sort(ours)
	if diff := cmp.Diff(present, ours); diff != "" {
		t.Fatalf("addresses (- recorded, + ours):\n%s", diff)
	}
	attribute := func(address, name string) string {
		text, err := os.ReadFile(filepath.Join(devices, address, name))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(text))
	}
	for _, f := range tree.Functions() {
		driver, err := os.Readlink(filepath.Join(devices, f.Address, "driver"))
		if err != nil {
			t.Fatal(err)
		}
		recorded := []string{attribute(f.Address, "class"), attribute(f.Address, "vendor"),
			attribute(f.Address, "device"), attribute(f.Address, "numa_node"), filepath.Base(driver)}
		ours := []string{fmt.Sprintf("0x%06x", f.Class), fmt.Sprintf("0x%04x", f.Vendor),
			fmt.Sprintf("0x%04x", f.Device), fmt.Sprint(f.NUMA), f.Driver}
		if diff := cmp.Diff(recorded, ours); diff != "" {
			t.Errorf("%s (- recorded, + ours):\n%s", f.Address, diff)
		}
		if f.UUID == "" {
			continue
		}
		text, err := os.ReadFile(filepath.Join(proc, "driver/nvidia/gpus", f.Address, "information"))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(text), find(t, tree, f.Address).information()); diff != "" {
			t.Errorf("information of %s (- recorded, + ours):\n%s", f.Address, diff)
		}
	}
}

func TestNamedTablesHaveTheirMachines(t *testing.T) {
	type machine struct{ GPUs, NICs, NVMe, Switches int }
	want := map[string]machine{
		"two-nics":   {8, 2, 0, 4},
		"dgx":        {8, 8, 4, 4},
		"one-switch": {8, 2, 0, 1},
		"no-switch":  {8, 2, 0, 0},
	}
	got := map[string]machine{}
	for _, name := range Names() {
		var m machine
		for _, f := range mustNamed(t, name).functions {
			switch {
			case f.portType == upstreamPort:
				m.Switches++
			case f.portType != endpoint:
			case f.line.kind == kindGPU:
				m.GPUs++
			case f.line.kind == kindNIC:
				m.NICs++
			case f.line.kind == kindNVMe:
				m.NVMe++
			}
		}
		got[name] = m
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestUnknownNameListsKnownNames(t *testing.T) {
	_, err := ReadTable("three-nics")
	if !testutil.HasError(err, &unknownTableError{"three-nics", []string{"dgx", "no-switch", "one-switch", "two-nics"}}) {
		t.Errorf("got %v", err)
	}
}

func TestLinksHaveSpeedOfSlowerEnd(t *testing.T) {
	tree := mustParse(t, `
host-bridge 0000:15
    root-port 8086:352a gen5 x16
        switch 1000:c030 gen5 x16
            gpu 10de:2330 gen5 x16 link=gen1x8
            nvme 144d:a824 gen4 x4
            nic 15b3:1021 gen6 x32
    root-port 8086:352a gen5 x16
`)
	const active = 1 << 13
	for address, want := range map[string]struct {
		max, status uint16 // of LNKCAP and LNKSTA
	}{
		"0000:15:01.0": {5 | 16<<4, 5 | 16<<4 | active},
		"0000:16:00.0": {5 | 16<<4, 5 | 16<<4},
		"0000:17:00.0": {5 | 16<<4, 1 | 8<<4 | active},
		"0000:18:00.0": {5 | 16<<4, 1 | 8<<4},
		"0000:17:01.0": {5 | 16<<4, 4 | 4<<4 | active},
		"0000:19:00.0": {4 | 4<<4, 4 | 4<<4},
		"0000:1a:00.0": {6 | 32<<4, 5 | 16<<4},
		"0000:15:02.0": {5 | 16<<4, 1}, // no link
	} {
		c := find(t, tree, address).config()
		if got := binary.LittleEndian.Uint16(c.value[express+0x0c:]) & 0x3ff; got != want.max {
			t.Errorf("%s can do %#x, want %#x", address, got, want.max)
		}
		if got := binary.LittleEndian.Uint16(c.value[express+0x12:]); got != want.status {
			t.Errorf("%s is at %#x, want %#x", address, got, want.status)
		}
	}
}

func TestACSFollowsEachPort(t *testing.T) {
	tree := mustParse(t, `
host-bridge 0000:15
    root-port 8086:352a gen5 x16
        switch 1000:c030 gen5 x16 acs
            gpu 10de:2330 gen5 x16
            gpu 10de:2330 gen5 x16 port-acs=on
            gpu 10de:2330 gen5 x16 port-acs=none
    root-port 8086:352a gen5 x16 acs=on
`)
	for address, want := range map[string]string{
		"0000:15:01.0": "none",
		"0000:16:00.0": "none", // upstream ports have no ACS
		"0000:17:00.0": "5f 0, writable 5f",
		"0000:17:01.0": "5f 1d, writable 5f",
		"0000:17:02.0": "none",
		"0000:18:00.0": "none",
		"0000:15:02.0": "5f 1d, writable 5f",
	} {
		c := find(t, tree, address).config()
		got := "none"
		if binary.LittleEndian.Uint32(c.value[acsExtension:]) == 0x0001000d {
			got = fmt.Sprintf("%x %x, writable %x", c.value[acsExtension+4], c.value[acsExtension+6], c.writable[acsExtension+6])
		}
		if got != want {
			t.Errorf("ACS of %s is %s, want %s", address, got, want)
		}
	}
}

func TestOptionsReachTheRecords(t *testing.T) {
	tree := mustParse(t, `
host-bridge 0000:15 numa=1
    root-port 8086:352a gen5 x16
        gpu 10de:20b2 gen4 x16 driver=none subsystem=10de:1463 class=030000
    root-port 8086:352a gen5 x16
        gpu 10de:2335 gen5 x16 uuid=GPU-00000000-1111-2222-3333-444444444444
    root-port 8086:352a gen5 x16
        nic 15b3:101b gen4 x16 class=020000
`)
	want := []Function{
		{Address: "0000:15:01.0", Class: 0x060400, Vendor: 0x8086, Device: 0x352a, NUMA: 1, Driver: "pcieport"},
		{Address: "0000:16:00.0", Class: 0x030000, Vendor: 0x10de, Device: 0x20b2, NUMA: 1,
			UUID: find(t, tree, "0000:16:00.0").uuid},
		{Address: "0000:15:02.0", Class: 0x060400, Vendor: 0x8086, Device: 0x352a, NUMA: 1, Driver: "pcieport"},
		{Address: "0000:17:00.0", Class: 0x030200, Vendor: 0x10de, Device: 0x2335, NUMA: 1, Driver: "nvidia",
			UUID: "GPU-00000000-1111-2222-3333-444444444444"},
		{Address: "0000:15:03.0", Class: 0x060400, Vendor: 0x8086, Device: 0x352a, NUMA: 1, Driver: "pcieport"},
		{Address: "0000:18:00.0", Class: 0x020000, Vendor: 0x15b3, Device: 0x101b, NUMA: 1, Driver: "mlx5_core"},
	}
	if diff := cmp.Diff(want, tree.Functions()); diff != "" {
		t.Error(diff)
	}
	if !uuidPattern.MatchString(want[1].UUID) {
		t.Errorf("invalid UUID derived from an address: %q", want[1].UUID)
	}
	// A GPU that the driver does not manage is not in /proc and has no minor.
	if text := find(t, tree, "0000:16:00.0").information(); text != "" {
		t.Errorf("a GPU without a driver has information:\n%s", text)
	}
	if text := find(t, tree, "0000:17:00.0").information(); !strings.Contains(text, "Device Minor: \t 0\n") ||
		!strings.Contains(text, "NVIDIA H200\n") {
		t.Errorf("information of the first GPU:\n%s", text)
	}
	c := find(t, tree, "0000:16:00.0").config()
	if got := binary.LittleEndian.Uint32(c.value[0x2c:]); got != 0x146310de {
		t.Errorf("the subsystem is %#x", got)
	}
}

func TestBARsReportTheirSizes(t *testing.T) {
	tree := mustNamed(t, "two-nics")
	c := find(t, tree, "0000:18:00.0").config()
	var got []uint64
	for at := 0x10; at < 0x28; at += 8 {
		if low := c.value[at]; low != 0xc {
			t.Errorf("the BAR at %#x is of kind %#x, and not of 64 bits and prefetchable", at, low)
		}
		got = append(got, ^binary.LittleEndian.Uint64(c.writable[at:])+1)
	}
	if diff := cmp.Diff([]uint64{16 << 20, 128 << 30, 32 << 20}, got); diff != "" {
		t.Error(diff)
	}
}

func TestRecordsHaveTheModulesLayout(t *testing.T) {
	tree := mustNamed(t, "two-nics")
	b := tree.records()
	// sizeof(struct header) and sizeof(struct record) in the module's pcitree.c.
	if want := 256 + 28*9216; len(b) != want {
		t.Fatalf("%d bytes, want %d", len(b), want)
	}
	window := binary.LittleEndian.Uint64(b[8:])
	if string(b[:8]) != "pcitree1" || binary.LittleEndian.Uint32(b[16:]) != 28 || window&(window-1) != 0 ||
		window < 1<<40 {
		t.Errorf("the header is %x", b[:20])
	}
	r := b[256+5*9216:] // 0000:19:00.0 is the sixth function
	if got := fmt.Sprintf("%x", r[:12]); got != "00000000000000001519"+"0000" {
		t.Errorf("the record begins with %s", got)
	}
	if got := strings.TrimRight(string(r[12:32]), "\x00"); got != "nvidia" {
		t.Errorf("the driver is %q", got)
	}
	if got := binary.LittleEndian.Uint32(r[1024:]); got != 0x233010de {
		t.Errorf("the configuration space begins with %#x", got)
	}
	if empty := (&Tree{}).records(); len(empty) != 256 {
		t.Errorf("an empty tree has %d bytes, want 256", len(empty))
	}
}

func TestParseRefusesInvalidTables(t *testing.T) {
	const head = "host-bridge 0000:15 numa=0\n root-port 8086:352a gen5 x16\n"
	const sw = head + "  switch 1000:c030 gen5 x16\n"
	many := func(n int, line string) string { return strings.Repeat(line, n) }
	for name, c := range map[string]struct {
		text string
		line int // 0 if the test accepts each line
		want string
	}{
		"nothing":            {"# empty\n\n", 0, "no host bridge"},
		"an unknown kind":    {"host-brigde 0000:15\n", 1, ""},
		"no root":            {"root-port 8086:352a gen5 x16\n", 1, "root-port without a host bridge"},
		"an indented bridge": {head + "  host-bridge 0000:37\n", 3, "host bridge below"},
		"a GPU at a bridge":  {"host-bridge 0000:15\n gpu 10de:2330 gen5 x16\n", 2, ""},
		"below a GPU": {head + "  gpu 10de:2330 gen5 x16\n   nic 15b3:1021 gen5 x16\n",
			4, "a nic is below a gpu"},
		"two below a port":      {head + "  gpu 10de:2330 gen5 x16\n  nic 15b3:1021 gen5 x16\n", 4, "second device"},
		"a port below a port":   {head + "  root-port 8086:352a gen5 x16\n", 3, ""},
		"a port below a switch": {sw + "   root-port 8086:352a gen5 x16\n", 4, ""},
		"33 below a switch":     {sw + many(33, "   nic 15b3:1021 gen5 x16\n"), 36, "a switch has more than 32"},
		"32 root ports": {"host-bridge 0000:15\n" + many(32, " root-port 8086:352a gen5 x16\n"),
			33, "a host bridge has more than 31"},
		"a bridge's class":  {head + "  function 060400 8086:352a gen5 x16\n", 3, ""},
		"words missing":     {head + "  gpu 10de:2330 gen5\n", 3, ""},
		"a bus":             {"host-bridge 0000:115\n", 0, "root bus"},
		"a signed bus":      {"host-bridge 0000:+5\n", 0, "root bus"},
		"an identity":       {head + "  gpu 10de:233 gen5 x16\n", 0, "vendor and device"},
		"an empty slot":     {head + "  gpu ffff:ffff gen5 x16\n", 0, "vendor and device"},
		"a speed":           {head + "  gpu 10de:2330 gen7 x16\n", 0, "gen7"},
		"a width":           {head + "  gpu 10de:2330 gen5 x3\n", 0, "x3"},
		"numa":              {"host-bridge 0000:15 numa=-1\n", 0, "numa=-1"},
		"an unknown option": {head + "  gpu 10de:2330 gen5 x16 speed=1\n", 0, "speed=1"},
		"an option elsewhere": {head + "  nic 15b3:1021 gen5 x16 uuid=GPU-00000000-1111-2222-3333-444444444444\n",
			0, "a nic has no option"},
		"an option twice":    {head + "  gpu 10de:2330 gen5 x16 link=gen4x8 link=gen4x8\n", 0, "duplicate link"},
		"too fast a link":    {head + "  gpu 10de:2330 gen4 x16 link=gen5x16\n", 3, "link=gen5x16 exceeds"},
		"half a link":        {head + "  gpu 10de:2330 gen4 x16 link=gen4\n", 0, "link=gen4"},
		"acs":                {"host-bridge 0000:15\n root-port 8086:352a gen5 x16 acs=off\n", 0, "acs=off"},
		"port-acs at a root": {head + "  gpu 10de:2330 gen5 x16 port-acs=on\n", 0, "port-acs"},
		"a driver":           {head + "  gpu 10de:2330 gen5 x16 driver=vfio-pci\n", 0, "vfio-pci"},
		"a UUID":             {head + "  gpu 10de:2330 gen5 x16 uuid=GPU-1\n", 0, "UUID"},
		"a UUID twice": {head + "  gpu 10de:2330 gen5 x16 uuid=GPU-00000000-1111-2222-3333-444444444444\n" +
			" root-port 8086:352a gen5 x16\n  gpu 10de:2330 gen5 x16 " +
			"uuid=GPU-00000000-1111-2222-3333-444444444444\n", 5, "UUID"},
		"a bus twice": {"host-bridge 0000:16\n" + head, 3, "bus 0000:16 is in use by line 1"},
		"a bus above ff": {"host-bridge 0000:fe\n root-port 8086:352a gen5 x16\n root-port 8086:352a gen5 x16\n",
			3, "out of bus numbers"},
		"513 functions":    {many(1, manyRoots(513)), 0, "more than 512 functions"},
		"too many BARs":    {manyGPUs(), 0, "spread the GPUs"},
		"a switch in none": {"switch 1000:c030 gen5 x16\n", 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			tree, err := Parse(c.text)
			if err == nil {
				t.Fatalf("it was taken: %v", addresses(tree))
			}
			e, ok := errors.AsType[*tableError](err)
			if !ok || c.line != 0 && e.line != c.line || !strings.Contains(fmt.Sprint(e.cause), c.want) {
				t.Errorf("got %q, want line %d and %q", err, c.line, c.want)
			}
		})
	}
}

// manyRoots returns a table of n empty root ports, 31 per host bridge.
func manyRoots(n int) string {
	var b strings.Builder
	for i := range n {
		if i%31 == 0 {
			fmt.Fprintf(&b, "host-bridge %04x:00\n", i/31)
		}
		b.WriteString(" root-port 8086:352a gen5 x16\n")
	}
	return b.String()
}

// manyGPUs returns a table of 180 GPUs below one host bridge.
func manyGPUs() string {
	var b strings.Builder
	b.WriteString("host-bridge 0000:00\n")
	for range 6 {
		b.WriteString(" root-port 8086:352a gen5 x16\n  switch 1000:c030 gen5 x16\n")
		b.WriteString(strings.Repeat("   gpu 10de:2330 gen5 x16\n", 30))
	}
	return b.String()
}

func FuzzParse(f *testing.F) {
	for _, name := range Names() {
		text, err := ReadTable(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add("host-bridge 0000:fe\n\troot-port 8086:352a gen5 x16 acs=on\n\t\tfunction 0c0330 1b21:2142 gen3 x2 driver=none")
	f.Fuzz(func(t *testing.T, text string) {
		tree, err := Parse(text)
		if err != nil {
			if _, ok := errors.AsType[*tableError](err); !ok {
				t.Errorf("the error does not name its source: %v", err)
			}
			return
		}
		all := addresses(tree)
		if want := headerSize + len(all)*recordSize; len(tree.records()) != want {
			t.Errorf("%d functions in %d bytes, want %d", len(all), len(tree.records()), want)
		}
		slices.Sort(all)
		if len(all) > maxFunctions || len(slices.Compact(all)) != len(tree.functions) {
			t.Errorf("duplicate or excess addresses: %v", all)
		}
		for _, f := range tree.functions {
			if f.portType != endpoint && (f.secondary <= f.bus || f.subordinate < f.secondary || f.subordinate > 0xff) {
				t.Errorf("bridge %s leads from bus %x to buses %x to %x", f, f.bus, f.secondary, f.subordinate)
			}
			if f.device > 31 {
				t.Errorf("%s is no address", f)
			}
		}
	})
}
