package reader

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
)

// item is an item of vital product data: a small item has the length in three bits of the tag.
func item(tag byte, data string) string {
	if tag&0x80 == 0 {
		return string(append([]byte{tag | byte(len(data))}, data...))
	}
	return string(append(binary.LittleEndian.AppendUint16([]byte{tag}, uint16(len(data))), data...))
}

func keyword(name, value string) string { return name + string([]byte{byte(len(value))}) + value }

func TestReadVPDKeepsItemsBeforeEnd(t *testing.T) {
	whole := item(0x82, "card") + item(0x10, "1234567") + item(0x90, keyword("V3", "x"))
	long := item(0x82, strings.Repeat("x", 60000))
	for name, tt := range map[string]struct{ data, want string }{
		"small end tag":              {whole + "\x78" + whole, whole},
		"large end tag":              {whole + "\x79" + whole, whole},
		"zero":                       {whole + "\x00" + whole, whole},
		"end of the file":            {whole, whole},
		"end in a large item":        {whole + "\x90\x05\x00ab", whole + "\x90\x05\x00ab"},
		"end in the head of an item": {whole + "\x90\x05", whole},
		"end in a small item":        {whole + "\x12a", whole + "\x12a"},
		"small item of three bytes":  {item(0x10, "ab") + "\x78", item(0x10, "ab")},
		"more than 32 KiB":           {long, long[:1<<15]},
		"items of more than 32 KiB":  {strings.Repeat(item(0x10, "123"), 1<<14), strings.Repeat(item(0x10, "123"), 1<<13)},
	} {
		got, err := readVPD(strings.NewReader(tt.data))
		if err != nil || string(got) != tt.want {
			t.Errorf("%s: %d bytes, %v; want %d", name, len(got), err, len(tt.want))
		}
	}
}

func TestParseVPDReadsKeywordsOfReadOnlyItem(t *testing.T) {
	const mark = "MLX:SMDL=SW_MNG"
	for name, tt := range map[string]struct {
		data string
		want product
	}{
		"card":                 {item(0x90, keyword("V3", "uuid")), product{card: "uuid"}},
		"card with padding":    {item(0x90, keyword("V3", "uuid \x00\x00")), product{card: "uuid"}},
		"card of another name": {item(0x90, keyword("V2", "uuid")), product{}},
		"mark":                 {item(0x90, keyword("VA", mark)), product{management: true}},
		"mark of any name":     {item(0x90, keyword("XY", mark)), product{management: true}},
		"later keyword": {item(0x90, keyword("PN", "a")+keyword("V3", "uuid")+keyword("VA", mark)),
			product{"uuid", true}},
		"another item":          {item(0x91, keyword("V3", "uuid")), product{}},
		"after a small item":    {item(0x10, "ab") + item(0x90, keyword("V3", "uuid")), product{card: "uuid"}},
		"after the small end":   {"\x78" + item(0x90, keyword("V3", "uuid")), product{}},
		"after the large end":   {"\x79" + item(0x90, keyword("V3", "uuid")), product{}},
		"an item that is cut":   {item(0x90, keyword("V3", "uuid"))[:7], product{}},
		"a keyword that is cut": {item(0x90, keyword("VA", mark)+"V3\x05uuid"), product{management: true}},
		"an empty keyword":      {item(0x90, keyword("V3", "")+keyword("VA", mark)), product{management: true}},
		"an empty last keyword": {item(0x90, keyword("VA", mark)+"V3\x00"), product{management: true}},
		"a head that is cut":    {item(0x10, "ab") + "\x90\x03", product{}},
	} {
		if got := parseVPD([]byte(tt.data)); got != tt.want {
			t.Errorf("%s: %+v, want %+v", name, got, tt.want)
		}
	}
}

func TestHasProductOnlyConnectXWithProperties(t *testing.T) {
	for id, want := range map[topo.PCIIdentity]bool{
		{Vendor: "0x15b3", Device: "0x1021"}: true, {Vendor: "0x15b3", Device: "0x1023"}: true,
		{Vendor: "0x15b3", Device: "0xa2dc"}: true, {Vendor: "0x15b3", Device: "0x2100"}: true,
		{Vendor: "0x15b3", Device: "0x101d"}: false, {Vendor: "0x10de", Device: "0x1021"}: false,
	} {
		if got := hasProduct(id); got != want {
			t.Errorf("%+v: %t, want %t", id, got, want)
		}
	}
}

// register writes little-endian values into a configuration space.
func register(config []byte, at int, value uint32) []byte {
	binary.LittleEndian.PutUint32(config[at:], value)
	return config
}

// capable is a configuration space with a list of capabilities: id and offset.
func capable(size int, list ...[2]int) []byte {
	config := make([]byte, max(size, 0x104))
	config[0x06] = 0x10
	config[0x34] = byte(list[0][1])
	for i, c := range list {
		config[c[1]] = byte(c[0])
		if i+1 < len(list) {
			config[c[1]+1] = byte(list[i+1][1])
		}
	}
	return config[:size]
}

func TestCapabilitiesFollowLists(t *testing.T) {
	extended := func(config []byte, list ...[2]int) []byte {
		for i, c := range list {
			next := 0
			if i+1 < len(list) {
				next = list[i+1][1]
			}
			register(config, c[1], uint32(c[0]|1<<16|next<<20))
		}
		return config
	}
	loop := capable(256, [2]int{5, 0x40}, [2]int{1, 0x50})
	loop[0x51] = 0x40
	without := capable(256, [2]int{5, 0x40})
	without[0x06] = 0xef
	for name, tt := range map[string]struct {
		config []byte
		want   []capability
	}{
		"one": {capable(256, [2]int{5, 0x40}), []capability{{5, false, 0x40, 2}}},
		"in order of offsets": {capable(256, [2]int{5, 0x60}, [2]int{1, 0x40}),
			[]capability{{1, false, 0x40, 2}, {5, false, 0x60, 2}}},
		"PCI Express": {capable(256, [2]int{0x10, 0x40}), []capability{{0x10, false, 0x40, 0x3c}}},
		"PCI Express before another": {capable(256, [2]int{0x10, 0x40}, [2]int{5, 0x60}),
			[]capability{{0x10, false, 0x40, 0x20}, {5, false, 0x60, 2}}},
		"PCI Express at the end": {capable(256, [2]int{0x10, 0xe0}), []capability{{0x10, false, 0xe0, 0x20}}},
		"subsystem":              {capable(256, [2]int{0x0d, 0x40}), []capability{{0x0d, false, 0x40, 8}}},
		"at the last place":      {capable(256, [2]int{5, 0xfc}), []capability{{5, false, 0xfc, 2}}},
		"in the header":          {capable(256, [2]int{5, 0x3c}), nil},
		"low bits do not count": {capable(256, [2]int{5, 0x40}, [2]int{1, 0x50}),
			[]capability{{5, false, 0x40, 2}, {1, false, 0x50, 2}}},
		"loop":    {loop, []capability{{5, false, 0x40, 2}, {1, false, 0x50, 2}}},
		"no list": {without, nil},
		"cut after the header": {capable(0x42, [2]int{5, 0x40}, [2]int{1, 0x50}),
			[]capability{{5, false, 0x40, 2}}},
		"cut in the capability": {capable(0x41, [2]int{5, 0x40}), nil},
		"header alone":          {capable(0x40, [2]int{5, 0x40}), nil},
		"extended": {extended(capable(4096, [2]int{5, 0x40}), [2]int{1, 0x100}),
			[]capability{{5, false, 0x40, 2}, {1, true, 0x100, 4}}},
		"ACS": {extended(capable(4096, [2]int{5, 0x40}), [2]int{0x0d, 0x100}),
			[]capability{{5, false, 0x40, 2}, {0x0d, true, 0x100, 8}}},
		"SR-IOV": {extended(capable(4096, [2]int{5, 0x40}), [2]int{1, 0x100}, [2]int{0x10, 0x140}),
			[]capability{{5, false, 0x40, 2}, {1, true, 0x100, 4}, {0x10, true, 0x140, 0x40}}},
		"extended list with a loop": {extended(capable(4096, [2]int{5, 0x40}), [2]int{1, 0x100}, [2]int{2, 0x140},
			[2]int{3, 0x100}), []capability{{5, false, 0x40, 2}, {3, true, 0x100, 4}}},
		"extended list into the others": {extended(capable(4096, [2]int{5, 0x40}), [2]int{1, 0x100}, [2]int{2, 0x80}),
			[]capability{{5, false, 0x40, 2}, {1, true, 0x100, 4}}},
		"extended list without an entry": {capable(4096, [2]int{5, 0x40}), []capability{{5, false, 0x40, 2}}},
	} {
		s, err := newSpace(bytes.NewReader(tt.config))
		if err != nil {
			t.Fatal(err)
		}
		got, err := s.capabilities()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(capability{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestConfigurationOfPartialSpace(t *testing.T) {
	acs := expressSpace(0x162, gen5x16, upToGen5, slotOfPort, 0x7f)
	all := []string{"SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans"}
	whole := configuration{kind: topo.PortDownstream, slot: 12, speed: "32.0 GT/s PCIe", width: 16, acs: all}
	unread, none := whole, whole
	unread.acs, none.acs = nil, []string{}
	for size, want := range map[int]configuration{4096: whole, 0x150: whole, 0x14f: none, 0x14c: none, 0x104: none,
		0x103: unread, 256: unread,
		0x41: {kind: topo.PortConventional}, 0x40: {}} {
		got, err := readConfiguration(bytes.NewReader(acs[:size]))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(configuration{})); diff != "" {
			t.Errorf("%d bytes (-want +got):\n%s", size, diff)
		}
	}
	for bit, name := range all {
		got, err := readConfiguration(bytes.NewReader(expressSpace(0x162, gen5x16, upToGen5, 0, 1<<bit)))
		if err != nil || len(got.acs) != 1 || got.acs[0] != name {
			t.Errorf("bit %d: %q, %v; want %s", bit, got.acs, err, name)
		}
	}
}

func TestExpressReadsLinkAndSlot(t *testing.T) {
	type values struct {
		Speed       string
		Width, Slot int
	}
	for _, tt := range []struct {
		name              string
		flags             uint16
		link, link2, slot uint32
		want              values
	}{
		{"highest bit of the vector", 0x162, 1 | 16<<4, 1<<1 | 1<<6, 0, values{"64.0 GT/s PCIe", 16, 0}},
		{"lowest bit of the vector", 0x162, 5 | 16<<4, 1 << 1, 0, values{"2.5 GT/s PCIe", 16, 0}},
		{"bits outside the vector", 0x162, 3 | 16<<4, 1 | 1<<7, 0, values{"8.0 GT/s PCIe", 16, 0}},
		{"version 1", 0x161, 3 | 8<<4, 1 << 5, 0, values{"8.0 GT/s PCIe", 8, 0}},
		{"largest known speed", 0x161, 6 | 1<<4, 0, 0, values{"64.0 GT/s PCIe", 1, 0}},
		{"unknown speed", 0x161, 7 | 1<<4, 0, 0, values{"", 1, 0}},
		{"no speed", 0x161, 0 | 1<<4, 0, 0, values{"", 1, 0}},
		{"no lanes", 0x161, 3, 0, 0, values{"", 0, 0}},
		{"32 lanes", 0x161, 3 | 32<<4, 0, 0, values{"8.0 GT/s PCIe", 32, 0}},
		{"reserved bits", 0x161, 3 | 1<<4 | 1<<10, 0, 0, values{"8.0 GT/s PCIe", 1, 0}},
		{"slot of a downstream port", 0x162, 0, 0, 7 << 19, values{"", 0, 7}},
		{"slot of a root port", 0x142, 0, 0, 7<<19 | 1<<18, values{"", 0, 7}},
		{"slot of an upstream port", 0x152, 0, 0, 7 << 19, values{}},
		{"port without a slot", 0x062, 0, 0, 7 << 19, values{}},
	} {
		data := make([]byte, 0x3c)
		register(register(register(data, 0x0c, tt.link), 0x14, tt.slot), 0x2c, tt.link2)
		binary.LittleEndian.PutUint16(data[2:], tt.flags)
		var c configuration
		c.express(data)
		if diff := cmp.Diff(tt.want, values{c.speed, c.width, c.slot}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestWithoutSerialsClearsOtherCapabilities(t *testing.T) {
	config := bytes.Repeat([]byte{0xaa}, 4096)
	list := capable(4096, [2]int{0x03, 0x40}, [2]int{0x10, 0x80})
	config[0x06], config[0x34], config[0x40], config[0x41], config[0x80], config[0x81] = list[0x06], list[0x34], 0x03,
		0x80, 0x10, 0
	register(config, 0x100, 0x0003|1<<16|0x140<<20)
	register(config, 0x140, 0x000d|1<<16)
	got := withoutSerials(config)
	for _, kept := range [][2]int{{0, 0x42}, {0x80, 0xbc}, {0x100, 0x104}, {0x140, 0x148}} {
		if !bytes.Equal(got[kept[0]:kept[1]], config[kept[0]:kept[1]]) {
			t.Errorf("bytes %#x to %#x change", kept[0], kept[1])
		}
		clear(got[kept[0]:kept[1]])
	}
	if i := bytes.IndexFunc(got, func(r rune) bool { return r != 0 }); i >= 0 || len(got) != 4096 {
		t.Errorf("byte %#x of %d stays", i, len(got))
	}
}

func TestInferredTypeFollowsPlace(t *testing.T) {
	for length, want := range map[int][]string{
		1: {topo.PortIntegratedEndpoint},
		2: {topo.PortRoot, topo.PortEndpoint},
		3: {topo.PortRoot, topo.PortUpstream, topo.PortEndpoint},
		4: {topo.PortRoot, topo.PortUpstream, topo.PortDownstream, topo.PortEndpoint},
		6: {topo.PortRoot, topo.PortUpstream, topo.PortDownstream, topo.PortUpstream, topo.PortDownstream, topo.PortEndpoint},
	} {
		var got []string
		for place := range length {
			got = append(got, inferredType(place, length))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%d functions (-want +got):\n%s", length, diff)
		}
	}
}

func TestNamedListsAtMostSixteen(t *testing.T) {
	names := func(n int) (list []string) {
		for i := range n {
			list = append(list, fmt.Sprint(i))
		}
		return list
	}
	const sixteen = "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15"
	for n, want := range map[int]string{1: "0", 16: sixteen, 17: sixteen + " and 1 more", 20: sixteen + " and 4 more"} {
		if got := named(names(n)); got != want {
			t.Errorf("%d names: %q", n, got)
		}
	}
}
