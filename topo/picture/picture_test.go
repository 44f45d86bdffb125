package picture

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
)

// wellFormed parses an XML document and calls f for the start of each element.
func wellFormed(t *testing.T, name, text string, f func(xml.StartElement)) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(text))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if start, ok := token.(xml.StartElement); ok {
			f(start)
		}
	}
}

func attribute(e xml.StartElement, name string) string {
	for _, a := range e.Attr {
		if a.Name.Local == name {
			return a.Value
		}
	}
	return ""
}

func TestEveryDeviceLinkAndLaneIsDrawn(t *testing.T) {
	for _, m := range machines(t) {
		t.Run(m.name, func(t *testing.T) {
			p := m.picture
			classes := map[string]int{}
			for _, nowhere := range []string{"NaN", "+Inf", "-Inf"} {
				if strings.Contains(m.svg, nowhere) {
					t.Errorf("the SVG contains the coordinate %s", nowhere)
				}
			}
			wellFormed(t, m.name, m.svg, func(e xml.StartElement) {
				if strings.EqualFold(e.Name.Local, "script") {
					t.Error("a <script> is in the SVG")
				}
				class := strings.Fields(attribute(e, "class"))
				if e.Name.Local == "g" && len(class) > 0 {
					classes[class[0]]++
					if class[0] == "node" {
						classes[class[1]]++
					}
					if class[0] == "lane" && attribute(e, "data-lane") != "" {
						classes["lane of the plan"]++
					}
				}
			})
			want := map[string]int{"gpu": len(m.host.GPUs), "nic": len(m.host.NICs)}
			if m.config.Lanes != nil {
				want["nic"]++ // a NIC of the configuration that the host lacks
			}
			if p.plan != nil {
				want["lane of the plan"] = len(p.plan.Lanes)
			}
			got := map[string]int{}
			for k := range want {
				got[k] = classes[k]
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("drawn (-want +got):\n%s", diff)
			}
			for _, l := range p.lanes {
				ends := 1 + len(l.NICs)
				if l.Kind == planner.KindStaged {
					ends += len(l.Servers)
				}
				if len(l.stops) < ends {
					t.Errorf("the lane of %s meets %d devices, want %d at least", l.GPU, len(l.stops), ends)
				}
			}
		})
	}
}

func TestLinkLabelsShowTopologyValues(t *testing.T) {
	for _, test := range []struct {
		name         string
		place        topo.Place
		source       string
		above, below string
	}{
		{"the file states each value", gen(5), topo.SourceSysfs, "PCIe 5.0 x16", "48 GB/s"},
		{"old words", topo.Place{Link: 6, LinkSpeed: "8 GT/s", LinkWidth: 8}, topo.SourceNCCLXML, "PCIe 3.0 x8", "6 GB/s"},
		{"slower now", topo.Place{Link: 48, LinkSpeed: "32.0 GT/s PCIe", LinkWidth: 16, LinkNow: 3}, topo.SourceSysfs,
			"PCIe 5.0 x16", "48 GB/s (now 3)"},
		{"no speed", topo.Place{Link: 12, LinkSpeed: "Unknown", LinkWidth: 16}, topo.SourceNCCLXML, "PCIe x16",
			"12 GB/s assumed"},
		{"no width", topo.Place{Link: 48, LinkSpeed: "32.0 GT/s PCIe"}, topo.SourceNCCLXML, "PCIe 5.0", "48 GB/s assumed"},
		{"nothing but hwloc's bandwidth", topo.Place{Link: 15.75}, reader.SourceHwlocXML, "PCIe", "15.8 GB/s"},
		{"nothing", topo.Place{}, reader.SourceHwlocXML, "", ""},
		{"no link at all", topo.Place{Link: 5000}, topo.SourceSysfs, "", ""},
	} {
		n := &node{kind: kindSwitch, place: test.place}
		if above, below := n.linkLines(topo.Source{Kind: test.source}); above != test.above || below != test.below {
			t.Errorf("%s: %q and %q, want %q and %q", test.name, above, below, test.above, test.below)
		}
	}
	cpu, sw := &node{kind: kindRoot}, &node{kind: kindSwitch}
	for _, test := range []struct {
		name         string
		parent       *node
		above, below string
	}{
		{"C2C beside PCIe", cpu, "PCIe 5.0 x16, 48 GB/s", "C2C, 250 GB/s"},
		// C2C bypasses the switch.
		{"C2C past a switch", sw, "PCIe 5.0 x16", "48 GB/s"},
	} {
		n := &node{kind: kindGPU, parent: test.parent, place: gen(5), gpu: topo.GPU{C2C: 250}}
		if above, below := n.linkLines(topo.Source{Kind: topo.SourceSysfs}); above != test.above || below != test.below {
			t.Errorf("%s: %q and %q, want %q and %q", test.name, above, below, test.above, test.below)
		}
	}
	for _, m := range machines(t) {
		if m.host.Matrix == nil {
			continue
		}
		if strings.Contains(m.svg, "GB/s") || strings.Contains(m.svg, "NUMA node") {
			t.Errorf("%s: the picture has bandwidths or nodes; the source has no such values", m.name)
		}
	}
}

// Names come from devices, and files from untrusted sources.
func TestHostileNamesAreText(t *testing.T) {
	for _, m := range machines(t) {
		for _, text := range []string{m.svg, m.page} {
			if m.name == "an odd tree" && !strings.Contains(text, "&lt;script&gt;alert(") {
				t.Errorf("%s: the name is not there as text", m.name)
			}
			if strings.Contains(text, "<script>alert") || strings.ContainsAny(text, "\u202e\u0007") {
				t.Errorf("%s: a name is not escaped", m.name)
			}
		}
	}
}

func TestPictureLoadsNoOtherFile(t *testing.T) {
	for _, m := range machines(t) {
		for _, text := range []string{m.svg, m.page} {
			text = strings.ToLower(strings.ReplaceAll(text, `xmlns="http://www.w3.org/2000/svg"`, ""))
			for _, loads := range []string{"url(", "@import", "src=", "href=", "http:", "https:", "fetch("} {
				if strings.Contains(text, loads) {
					t.Errorf("%s: the picture contains %q", m.name, loads)
				}
			}
		}
	}
}

func TestPictureIgnoresOrderOfDevices(t *testing.T) {
	for _, m := range machines(t) {
		if len(m.host.GPUs) > 32 {
			continue // planning large machines is slow, and finds no further faults
		}
		for seed := range uint64(2) {
			r := rand.New(rand.NewPCG(seed, 1))
			h := *m.host
			h.CPUs, h.Switches, h.GPUs, h.NICs = slices.Clone(h.CPUs), slices.Clone(h.Switches), slices.Clone(h.GPUs),
				slices.Clone(h.NICs)
			r.Shuffle(len(h.CPUs), func(i, j int) { h.CPUs[i], h.CPUs[j] = h.CPUs[j], h.CPUs[i] })
			r.Shuffle(len(h.Switches), func(i, j int) { h.Switches[i], h.Switches[j] = h.Switches[j], h.Switches[i] })
			r.Shuffle(len(h.GPUs), func(i, j int) { h.GPUs[i], h.GPUs[j] = h.GPUs[j], h.GPUs[i] })
			r.Shuffle(len(h.NICs), func(i, j int) { h.NICs[i], h.NICs[j] = h.NICs[j], h.NICs[i] })
			shuffled := m
			shuffled.host = &h
			if diff := cmp.Diff(m.svg, string(shuffled.draw(t).SVG())); diff != "" {
				t.Fatalf("%s: another order gives another picture (-want +got):\n%s", m.name, diff)
			}
		}
	}
}

// A black-and-white print is legible if the lightness alone orders the rates, and every colour
// contrasts with the paper.
func TestColoursAreLegibleInBlackAndWhite(t *testing.T) {
	sheets := strings.SplitN(sheet, "@media", 2)
	for i, mode := range []string{"light", "dark"} {
		paper := luminance(t, sheets[i], "--paper")
		last := math.NaN()
		for b := range bins {
			l := luminance(t, sheets[i], "--q"+strconv.Itoa(b))
			if ratio := (max(l, paper) + 0.05) / (min(l, paper) + 0.05); ratio < 3 {
				t.Errorf("%s: colour %d has a contrast of %.1f to the paper, want 3 (WCAG 1.4.11)", mode, b, ratio)
			}
			if b > 0 && math.Abs(l-paper) <= math.Abs(last-paper) {
				t.Errorf("%s: colour %d contrasts less than the colour before", mode, b)
			}
			last = l
		}
	}
	thin, thick := (&lane{bin: 0}).thickness(), (&lane{bin: bins - 1}).thickness()
	if thick < 2*thin {
		t.Errorf("the fastest lane is %v thick and the slowest %v: that is no difference to see", thick, thin)
	}
}

// luminance is WCAG's relative luminance of a colour of the style sheet.
func luminance(t *testing.T, sheet, name string) float64 {
	t.Helper()
	found := regexp.MustCompile(regexp.QuoteMeta(name) + `: #([0-9a-f]{6})`).FindStringSubmatch(sheet)
	if found == nil {
		t.Fatalf("no colour %s", name)
	}
	n, err := strconv.ParseUint(found[1], 16, 32)
	if err != nil {
		t.Fatal(err)
	}
	linear := func(shift int) float64 {
		c := float64(n>>shift&0xff) / 255
		if c <= 0.03928 {
			return c / 12.92
		}
		return math.Pow((c+0.055)/1.055, 2.4)
	}
	return 0.2126*linear(16) + 0.7152*linear(8) + 0.0722*linear(0)
}

// Lanes on a track have no row in common, and therefore never overlap.
func TestLanesOnATrackDoNotMeet(t *testing.T) {
	for _, m := range machines(t) {
		p := m.picture
		for i, a := range p.lanes {
			for _, b := range p.lanes[i+1:] {
				if !a.drawn() || !b.drawn() || a.track != b.track {
					continue
				}
				if from, to := a.extent(); !disjoint(from, to, b) {
					t.Errorf("%s: the lanes of %s and %s overlap", m.name, a.GPU, b.GPU)
				}
			}
		}
	}
}

func (l *lane) extent() (from, to float64) {
	from, to = l.stops[0].y, l.stops[0].y
	for _, s := range l.stops {
		from, to = min(from, s.y), max(to, s.y)
	}
	return from, to
}

func disjoint(from, to float64, other *lane) bool {
	a, b := other.extent()
	return to < a || b < from
}

func TestLaneMarksLinksOnRoute(t *testing.T) {
	b := build(2).sw("00aa:00:00.0", "", 0, gen(5)).sw("00aa:01:00.0", "", 1, gen(5)).
		gpu("", "00aa:00:00.0", 0, gen(5)).gpu("", "00aa:01:00.0", 1, gen(5)).nic("00aa:00:00.0", 0, 400, gen(5))
	far := planner.Lane{GPU: b.h.GPUs[1].BusID, Role: planner.RoleFar, Kind: planner.KindStaged, Relay: true,
		Servers: []string{b.h.GPUs[0].BusID},
		NICs:    []string{"mlx5_0"}, Path: topo.SYS, Copy: &topo.Path{Type: topo.SYS}, Network: &topo.Path{Type: topo.PIX}}
	near := planner.Lane{GPU: b.h.GPUs[0].BusID, Role: planner.RoleNear, Kind: planner.KindDirect,
		NICs: []string{"mlx5_0"}, Path: topo.PIX}
	nvlink := far
	nvlink.Copy = &topo.Path{Type: topo.NVL}
	bounce := far
	bounce.Kind, bounce.Servers = planner.KindBounce, nil
	for _, test := range []struct {
		name string
		lane planner.Lane
		want []string
	}{
		{"direct", near, []string{"GPU 0", "mlx5_0"}},
		{"staged over PCIe", far, []string{"00aa:00:00.0", "00aa:01:00.0", "GPU 0", "GPU 1", "mlx5_0"}},
		{"staged over NVLink", nvlink, []string{"GPU 0", "mlx5_0"}},
		{"bounce", bounce, []string{"00aa:00:00.0", "00aa:01:00.0", "GPU 1", "mlx5_0"}},
	} {
		p := New(&b.h, &planner.Plan{GPUs: b.h.GPUs, NICs: b.h.NICs, Lanes: []planner.Lane{test.lane}}, nil)
		var got []string
		for _, l := range p.links {
			if l.node != nil && len(l.node.lanes) > 0 {
				name := l.node.name
				if l.node.kind == kindSwitch {
					name = l.node.address
				}
				got = append(got, name)
			}
		}
		slices.Sort(got)
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
	}
}

func TestTextsAreCutToTheirRoom(t *testing.T) {
	for _, text := range []string{"", "GPU 3", strings.Repeat("W", 200), "一二三四五六七八九十", hostile} {
		for _, s := range styles {
			for _, room := range []float64{0, 10, 55.5, 300} {
				if cut := s.fit(text, room); s.width(cut) > room+0.02 {
					t.Errorf("%s: %q is %v wide, and there is room for %v", s.name, cut, s.width(cut), room)
				}
				for _, line := range s.wrap(text, room) {
					if s.width(line) > room+0.02 {
						t.Errorf("%s: the line %q is %v wide, and there is room for %v", s.name, line, s.width(line), room)
					}
				}
			}
		}
	}
}

func TestPageTableHasLanesAndRates(t *testing.T) {
	for _, m := range machines(t) {
		if m.name != "eight GPUs and two NICs" {
			continue
		}
		p := m.picture
		for i, l := range p.plan.Lanes {
			e := p.estimate.GPUs[i]
			_, line, found := strings.Cut(m.page, fmt.Sprintf("<tr data-lane=\"%d\"", i))
			line, _, _ = strings.Cut(line, fmt.Sprintf("<tr data-lane=\"%d\"", i+1))
			if !found {
				t.Fatalf("no row for the lane of %s", l.GPU)
			}
			for _, want := range []string{l.GPU, l.Kind, l.Reason, "<b>" + figure(e.Relay) + "</b>", figure(e.NCCL),
				figure(e.HostMemory), "<b>" + figure(e.Alone.Relay) + "</b>", e.Limit} {
				if !strings.Contains(line, want) {
					t.Errorf("the row of %s lacks %q:\n%s", l.GPU, want, line)
				}
			}
		}
	}
}

// A picture of a host that has lost a NIC has the colours and the legend of the whole
// host: the scale is the port's rate, not the fastest lane.
func TestColourScaleIsThePortRate(t *testing.T) {
	legendOf := func(nics int) string {
		b := build(1)
		for s := range 2 {
			id := fmt.Sprintf("00aa:%02x:00.0", s)
			b.sw(id, "", 0, gen(5)).gpu("", id, 0, gen(5)).gpu("", id, 0, gen(5))
			if s < nics {
				b.nic(id, 0, 400, gen(5))
			}
		}
		m := machine{host: &b.h}
		var words []string
		for _, item := range m.draw(t).legend.items {
			if strings.Contains(item.words.words, " GB/s") {
				words = append(words, item.words.words)
			}
		}
		return strings.Join(words, ", ")
	}
	const want = "0 to 10 GB/s, up to 20 GB/s, up to 30 GB/s, up to 40 GB/s, over 40 GB/s (a port has 50)"
	for nics := 1; nics <= 2; nics++ {
		if got := legendOf(nics); got != want {
			t.Errorf("%d NICs: the legend is %q, want %q", nics, got, want)
		}
	}
	for _, test := range []struct {
		bandwidth, port float64
		want            int
	}{{0, 50, 0}, {10, 50, 0}, {10.1, 50, 1}, {50, 50, 4}, {100, 50, 4}} {
		if got := bin(test.bandwidth, test.port); got != test.want {
			t.Errorf("%v of %v GB/s: colour %d, want %d", test.bandwidth, test.port, got, test.want)
		}
	}
	if got := portRate(nil); got != defaultPortRate {
		t.Errorf("the scale of a host without NICs is %v", got)
	}
}

// A GPU without a lane differs from a GPU with an idle lane.
func TestGPUWithoutLaneHasNoBar(t *testing.T) {
	b := build(1).sw("00aa:00:00.0", "", 0, gen(5)).gpu("", "00aa:00:00.0", 0, gen(5)).gpu("", "00aa:00:00.0", 0,
		gen(5)).nic("00aa:00:00.0", 0, 400, gen(5))
	lane := planner.Lane{GPU: b.h.GPUs[0].BusID, Role: planner.RoleNear, Kind: planner.KindDirect,
		NICs: []string{"mlx5_0"}, Path: topo.PIX}
	none := planner.Lane{GPU: b.h.GPUs[1].BusID}
	e := &planner.Estimate{GPUs: []planner.GPUEstimate{{GPU: lane.GPU}, {GPU: none.GPU}}}
	e.GPUs[0].NCCL, e.GPUs[1].NCCL = 20, 20
	p := New(&b.h, &planner.Plan{GPUs: b.h.GPUs, NICs: b.h.NICs, Lanes: []planner.Lane{lane, none}}, e)
	var got []string
	for _, bar := range p.bars {
		got = append(got, fmt.Sprintf("%s %v", bar.texts[0].words, bar.widths[0]))
	}
	if diff := cmp.Diff([]string{"not known 1", "no lane 0"}, got); diff != "" {
		t.Errorf("bars (-want +got):\n%s", diff)
	}
}

// Port names of a NIC differ only in the last characters.
func TestLongNICNamesStayDistinct(t *testing.T) {
	b := build(1).sw("00aa:00:00.0", "", 0, gen(5)).nic("00aa:00:00.0", 0, 400, gen(5)).nic("00aa:00:00.0", 0, 400, gen(5))
	b.h.NICs[0].Name, b.h.NICs[1].Name = "rocep139s0f0-of-the-first-card-np0", "rocep139s0f0-of-the-first-card-np1"
	svg := string(New(&b.h, nil, nil).SVG())
	for _, end := range []string{"np0</text>", "np1</text>"} {
		if !strings.Contains(svg, end) {
			t.Errorf("no name ends with %q", end)
		}
	}
}
