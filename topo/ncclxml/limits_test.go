package ncclxml_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo/internal/textfile"
	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
	"github.com/peerlane/peerlane/topo/ncclxml"
)

// many joins the texts of a function for 0 to n-1.
func many(n int, of func(i int) string) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(of(i))
	}
	return b.String()
}

// inCPU is a file with a single NUMA node.
func inCPU(inner ...string) string {
	return `<system version="1"><cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">` +
		strings.Join(inner, "") + `</cpu></system>`
}

// gpuWith is a file with a GPU that contains links.
func gpuWith(links string) string {
	return inCPU(`<pci busid="1:0.0" class="0x030200"><gpu dev="0" sm="90">` + links + `</gpu></pci>`)
}

// Each file reaches a limit, and the next larger file is refused.
func TestReadLimitAcceptsMaximum(t *testing.T) {
	const empty = `<system version="1"><cpu numaid="0"/></system>`
	nvlink := func(count int) string {
		return fmt.Sprintf(`<nvlink target="2:0.0" tclass="0x030200" count="%d"/>`, count)
	}
	for name, tt := range map[string]struct {
		max  int
		file func(n int) string
	}{
		"bytes": {16 << 20, func(n int) string { return empty + strings.Repeat(" ", n-len(empty)) }},
		"elements": {65536, func(n int) string {
			return strings.Replace(empty, "<cpu", many(n-2, func(int) string { return "<x/>" })+"<cpu", 1)
		}},
		"depth": {64, func(n int) string {
			bridge := func(i int) string { return fmt.Sprintf(`<pci busid="%x:0.0" class="0x060400">`, i+1) }
			return inCPU(many(n-2, bridge), strings.Repeat("</pci>", n-2))
		}},
		"NUMA nodes": {1024, func(n int) string {
			return `<system version="1">` + many(n, func(i int) string { return fmt.Sprintf(`<cpu numaid="%d"/>`, i) }) +
				`</system>`
		}},
		"GPUs": {512, func(n int) string {
			return inCPU(many(n, func(i int) string {
				return fmt.Sprintf(`<pci busid="%x:0:0.0" class="0x030200"><gpu dev="%d"/></pci>`, i, i)
			}))
		}},
		"GPUs without a number": {512, func(n int) string {
			return inCPU(many(n, func(i int) string { return fmt.Sprintf(`<pci busid="%x:0:0.0" class="0x030200"/>`, i) }))
		}},
		"GPUs and NICs": {512, func(n int) string {
			return inCPU(`<pci busid="1:0.0" class="0x030200"/><nic>`+
				many(n-2, func(i int) string { return fmt.Sprintf(`<net name="eth%d"/>`, i) })+`</nic>`,
				`<pci busid="2:0.0" class="0x030200"/>`)
		}},
		"NICs of a function": {512, func(n int) string {
			return inCPU(`<pci busid="1:0.0"><nic>` + strings.Repeat(`<net/>`, n) + `</nic></pci>`)
		}},
		"NUMA node": {65535, func(n int) string { return strings.Replace(empty, "0", fmt.Sprint(n), 1) }},
		"GPU index": {4095, func(n int) string {
			return inCPU(fmt.Sprintf(`<pci busid="1:0.0"><gpu dev="%d"/></pci>`,
				n))
		}},
		"NVLinks":           {1000, func(n int) string { return gpuWith(nvlink(n)) }},
		"NVLinks to a peer": {1000, func(n int) string { return gpuWith(nvlink(n-1) + nvlink(1)) }},
		"NVLinks to the CPU": {1000, func(n int) string {
			return gpuWith(fmt.Sprintf(`<nvlink tclass="0x068001" count="%d"/>`,
				n))
		}},
		"C2C links":     {1000, func(n int) string { return gpuWith(fmt.Sprintf(`<c2c count="%d" bw="1"/>`, n)) }},
		"C2C bandwidth": {1e9, func(n int) string { return gpuWith(fmt.Sprintf(`<c2c count="1" bw="%d"/>`, n)) }},
		"bandwidth of two C2C links": {1e9, func(n int) string {
			return gpuWith(fmt.Sprintf(`<c2c count="1" bw="%d"/><c2c count="2" bw="50"/>`, n-100))
		}},
	} {
		if _, err := ncclxml.Read(strings.NewReader(tt.file(tt.max)), "some.xml"); err != nil {
			t.Errorf("%s: %d: %v", name, tt.max, err)
		}
		var refused *textfile.FileError
		if h, err := ncclxml.Read(strings.NewReader(tt.file(tt.max+1)), "some.xml"); !errors.As(err, &refused) || h != nil {
			t.Errorf("%s: %d: %v; want an error", name, tt.max+1, err)
		}
	}
}

func TestReadLinkCountOutOfRangeFails(t *testing.T) {
	for _, links := range []string{
		`<nvlink target="2:0.0" tclass="0x030200" count="0"/>`, `<nvlink target="2:0.0" tclass="0x030200" count="-1"/>`,
		`<nvlink target="2:0.0" tclass="0x030200" count="many"/>`, `<nvlink tclass="0x068001" count="0"/>`,
		`<c2c count="0" bw="1"/>`, `<c2c count="-1" bw="1"/>`, `<c2c bw="1"/>`, `<c2c count="99999999999999999999" bw="1"/>`,
		`<c2c count="1"/>`, `<c2c count="1" bw="0"/>`, `<c2c count="1" bw="-1"/>`,
		`<c2c count="1" bw="99999999999999999999"/>`,
	} {
		var refused *textfile.PlaceError
		if _, err := ncclxml.Read(strings.NewReader(gpuWith(links)), "some.xml"); !errors.As(err, &refused) {
			t.Errorf("%s: %v; want an error with the place", links, err)
		}
	}
}

// Out of range, a number counts as unknown.
func TestReadNumberOutOfRangeIsIgnored(t *testing.T) {
	for _, tt := range []struct {
		width string
		want  int
		notes int
	}{{"0", 0, 0}, {"16", 16, 0}, {"1024", 1024, 0}, {"1025", 0, 1}, {"-1", 0, 1}, {"x", 0, 1}, {"", 0, 0}} {
		h := ncclfile.ReadXML(t, inCPU(fmt.Sprintf(`<pci busid="1:0.0" class="0x030200" link_width="%s"/>`, tt.width)))
		if h.GPUs[0].LinkWidth != tt.want || len(h.Notes) != tt.notes {
			t.Errorf("width %q: %d, notes %q", tt.width, h.GPUs[0].LinkWidth, h.Notes)
		}
	}
	for _, tt := range []struct {
		speed string
		want  float64
		notes int
	}{{"1", 0.001, 0}, {"999999999", 999999.999, 0}, {"1000000000", 0, 1}, {"0", 0, 0}, {"-1", 0, 0}, {"x", 0, 1},
		{"", 0, 0}} {
		h := ncclfile.ReadXML(t, inCPU(fmt.Sprintf(`<nic><net name="eth0" speed="%s"/></nic>`, tt.speed)))
		if got := h.NICs[0].Ports[0].RateGbps; got != tt.want || len(h.Notes) != tt.notes {
			t.Errorf("speed %q: %g Gbit/s, notes %q", tt.speed, got, h.Notes)
		}
	}
}
