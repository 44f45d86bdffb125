package picture

import (
	"encoding/xml"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

func near(a, b float64) bool { return math.Abs(a-b) < 1e-6 }

// The measures of layout.go: 250 × 40 for a device, 46 at least for a switch, 58 at least for a NUMA node;
// 6 between devices, 12 beside a switch, 30 between NUMA nodes.
func TestNodesHaveMeasures(t *testing.T) {
	for _, m := range machines(t) {
		p := m.picture
		leafX, column := 0.0, map[int][2]float64{}
		bottom := 0.0
		for i, r := range p.tree.roots {
			if want := bottom + 30; i > 0 && !near(r.y, want) || i == 0 && r.y != 112 {
				t.Errorf("%s: %s begins at %g, the node above ends at %g", m.name, r.name, r.y, bottom)
			}
			bottom = r.y + r.h
			if !r.hidden && (r.w < 128 || r.w > 190 || r.x != 28 && r.x != 46) {
				t.Errorf("%s: %s is at %g and %g wide", m.name, r.name, r.x, r.w)
			}
			checkChildren(t, m.name, r)
			r.eachBelow(1, func(n *node, d int) {
				if n.leaf() {
					if leafX = max(leafX, n.x); n.x != leafX || n.w != 250 {
						t.Errorf("%s: %s is at %g, other devices at %g; width %g", m.name, n.name, n.x, leafX, n.w)
					}
					return
				}
				if c, known := column[d]; known && c != [2]float64{n.x, n.w} {
					t.Errorf("%s: switches of level %d are at %v and at %v", m.name, d, c, [2]float64{n.x, n.w})
				}
				column[d] = [2]float64{n.x, n.w}
				if room := n.w - 20; room < styleName.width(n.name)-1e-9 || room < styleAddress.width(plain(n.address))-1e-9 {
					t.Errorf("%s: %s does not fit", m.name, n.address)
				}
			})
		}
	}
}

// checkChildren checks the places of nodes within a node.
func checkChildren(t *testing.T, machine string, n *node) {
	t.Helper()
	least := map[kind]float64{kindRoot: 58, kindSwitch: 46, kindGPU: 40, kindNIC: 40, kindMemory: 40}[n.kind]
	if n.hidden {
		least = 0
	}
	if n.h < least {
		t.Errorf("%s: %s %s is %g tall", machine, n.name, n.address, n.h)
	}
	if n.leaf() {
		checkPorts(t, machine, n)
		return
	}
	for i, c := range n.children {
		if i > 0 {
			above := n.children[i-1]
			want := 12.0
			if c.leaf() && above.leaf() {
				want = 6
			}
			if got := c.y - above.y - above.h; !near(got, want) {
				t.Errorf("%s: %g between %s and %s, want %g", machine, got, above.name, c.name, want)
			}
		}
		checkChildren(t, machine, c)
	}
	if len(n.children) == 0 {
		if n.h != least {
			t.Errorf("%s: %s without devices is %g tall", machine, n.name, n.h)
		}
		return
	}
	first, last := n.children[0], n.children[len(n.children)-1]
	upper, lower := first.y-n.y, n.y+n.h-last.y-last.h
	if !near(upper, lower) || upper < -1e-9 || upper > 1e-9 && n.h != least {
		t.Errorf("%s: %s has %g above and %g below its devices; height %g", machine, n.name, upper, lower, n.h)
	}
}

// Ends of lanes are 8 apart: from 18 below the top of a GPU, with 2 more after the GPU's lane, and in the
// middle of other devices.
func checkPorts(t *testing.T, machine string, n *node) {
	t.Helper()
	k := len(n.ports)
	want := 40.0
	if n.kind == kindGPU && k > 0 {
		want = max(40, 18+8*float64(k-1)+10)
	} else if k > 0 {
		want = max(40, 8*float64(k-1)+16)
	}
	if n.h != want {
		t.Errorf("%s: %s with %d ends of lanes is %g tall, want %g", machine, n.name, k, n.h, want)
	}
	for i, p := range n.ports {
		y := n.y + n.h/2 + 8*(float64(i)-float64(k-1)/2)
		if n.kind == kindGPU {
			if y = n.y + 18 + 8*float64(i); i > 0 {
				y += 2
			}
		}
		if !near(p.y, y) {
			t.Errorf("%s: end %d of %s is at %g, want %g", machine, i, n.name, p.y-n.y, y-n.y)
		}
		if n.kind == kindGPU && i > 0 && p.lane.start == n {
			t.Errorf("%s: the lane of %s is its end %d", machine, n.name, i)
		}
	}
}

// twoLanes is a picture of three GPUs and two NICs below a switch. GPU 0 and GPU 1 have direct lanes
// over mlx5_0; GPU 2 has none.
func twoLanes() *Picture {
	e := &planner.Estimate{}
	for i, rate := range []float64{50, 25, 0} {
		g := planner.GPUEstimate{GPU: []string{gpu0, gpu1, gpu2}[i]}
		g.Relay, g.NCCL, g.HostMemory = rate, 12.5, 10
		e.GPUs = append(e.GPUs, g)
	}
	lane := planner.Lane{Kind: planner.KindDirect, NICs: []string{"mlx5_0"}, Bandwidth: 50}
	slow := lane
	slow.Bandwidth = 25
	return lanePicture(e, lane, slow, planner.Lane{})
}

// The devices are 46 apart, from 112 down: GPUs at 112, 158 and 204, NICs at 250 and 296. GPU 1's lane is
// shorter, so it has the inner track.
func TestLanesHavePaths(t *testing.T) {
	p := twoLanes()
	gpu, nic := p.tree.gpus[gpu0], p.tree.nics["mlx5_0"]
	if gpu.y != 112 || nic.y != 250 || nic.h != 40 {
		t.Fatalf("GPU 0 is at %g, mlx5_0 at %g, %g tall", gpu.y, nic.y, nic.h)
	}
	deck := gpu.x + 250
	c := coordinate
	path := func(from, to, x float64) string {
		return fmt.Sprintf("M%s %sH%sQ%s %s %s %sV%sQ%s %s %s %sH%s", c(deck), c(from), c(x-6), c(x), c(from), c(x),
			c(from+6),
			c(to-6), c(x), c(to), c(x-6), c(to), c(deck+9))
	}
	want := []string{path(130, 274, deck+78), path(176, 266, deck+66), ""}
	words := []string{"direct", "direct", "no lane"}
	// A word is above the line; without a line it is lower.
	places := [][2]float64{{deck + 8, 125}, {deck + 8, 171}, {deck + 8, 226}}
	for i, l := range p.lanes {
		if l.path != want[i] || l.label.words != words[i] || l.label.x != places[i][0] || l.label.y != places[i][1] {
			t.Errorf("lane %d: %s, %q at %g, %g; want %s, %q at %v", i, l.path, l.label.words, l.label.x, l.label.y, want[i],
				words[i], places[i])
		}
	}
	// The fastest port has 50 GB/s: 50 is the fifth colour, 25 the third.
	if p.portRate != 50 || p.lanes[0].bin != 4 || p.lanes[1].bin != 2 {
		t.Errorf("the scale is %g, colours %d and %d", p.portRate, p.lanes[0].bin, p.lanes[1].bin)
	}
	for bin, want := range map[int]float64{-1: 3, 0: 1.8, 1: 2.4, 4: 4.2} {
		if got := (&lane{bin: bin}).thickness(); !near(got, want) {
			t.Errorf("colour %d is %g thick, want %g", bin, got, want)
		}
	}
}

// A lane over several devices has a line to each.
func TestLanePathMeetsEachDevice(t *testing.T) {
	p := lanePicture(nil, planner.Lane{Kind: planner.KindStaged, Servers: []string{gpu1},
		NICs: []string{"mlx5_0", "mlx5_1"}})
	l := p.lanes[0]
	deck := p.tree.gpus[gpu0].x + 250
	x, c := deck+66, coordinate
	want := fmt.Sprintf("M%s 130H%sQ%s 130 %s 136V310Q%s 316 %s 316H%sM%s 176H%sM%s 270H%s", c(deck), c(x-6), c(x), c(x),
		c(x),
		c(x-6), c(deck+9), c(deck), c(x), c(deck+9), c(x))
	if l.path != want || l.bin != -1 {
		t.Errorf("%s, colour %d; want %s", l.path, l.bin, want)
	}
	var got []string
	for _, s := range l.stops {
		got = append(got, s.node.name)
	}
	if diff := cmp.Diff([]string{"GPU 0", "GPU 1", "mlx5_0", "mlx5_1"}, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

func TestUnequalLaneShowsWeights(t *testing.T) {
	lane := func(weights ...int) planner.Lane {
		l := planner.Lane{Kind: planner.KindDirect, NICs: []string{"mlx5_0"}}
		for _, w := range weights {
			l.Members = append(l.Members, planner.Member{Server: gpu0, NIC: "mlx5_0", Weight: w})
		}
		return l
	}
	for want, l := range map[string]planner.Lane{"direct": lane(1, 1), "direct 2:1": lane(2, 1),
		"direct 4:3:2:1":   lane(4, 3, 2, 1),
		"direct 5:4:3:2:…": lane(5, 4, 3, 2, 1)} {
		if got := lanePicture(nil, l).lanes[0].label.words; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// The bars of a GPU begin 24 right of the tracks, 2 below the top of the GPU; the largest rate is 170 wide.
func TestBarsShowRates(t *testing.T) {
	p := twoLanes()
	left := p.tree.gpus[gpu0].x + 250 + 66 + 2*12 + 24
	type shown struct {
		Y      float64
		Widths [3]float64
		Texts  []string
	}
	want := []shown{
		{114, [3]float64{170, 42.5, 34}, []string{"50 GB/s", "12.5", "10"}},
		{160, [3]float64{85, 42.5, 34}, []string{"25 GB/s", "12.5", "10"}},
		{206, [3]float64{0, 42.5, 34}, []string{"no lane", "12.5", "10"}},
	}
	var got []shown
	for k, b := range p.bars {
		s := shown{Y: b.y, Widths: b.widths}
		for i, text := range b.texts {
			s.Texts = append(s.Texts, text.words)
			if text.x != left+b.widths[i]+6 || text.y != b.y+12*float64(i)+9.5 {
				t.Errorf("bar %d of lane %d: the text is at %g, %g", i, k, text.x-left, text.y-b.y)
			}
		}
		if b.x != left || b.detail != p.lanes[k].detail {
			t.Errorf("the bars of lane %d are at %g, want %g", k, b.x, left)
		}
		got = append(got, s)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if want := max(760, left+170+70+28, 56+min(1000, styleSubtitle.width(p.subtitle))); p.width < want-1 {
		t.Errorf("the picture is %g wide, want at least %g", p.width, want)
	}
	// Without a rate there are no bars.
	e := &planner.Estimate{GPUs: []planner.GPUEstimate{{GPU: gpu0}}}
	if p := lanePicture(e, planner.Lane{Kind: planner.KindDirect, NICs: []string{"mlx5_0"}}); len(p.bars) > 0 {
		t.Errorf("bars without a rate: %+v", p.bars)
	}
}

func TestColumnsHaveTitles(t *testing.T) {
	p := twoLanes()
	leafX := p.tree.gpus[gpu0].x
	sw := p.tree.gpus[gpu0].parent
	want := []text{{28, 96, "", styleColumn, "NUMA nodes"}, {sw.x, 96, "", styleColumn, "PCIe switches"},
		{leafX, 96, "", styleColumn, "GPUs and NICs"}, {leafX + 258, 96, "", styleColumn, "lanes"},
		{leafX + 250 + 66 + 24 + 24, 96, "", styleColumn, "GB/s while all GPUs are busy"}}
	if diff := cmp.Diff(want, p.columns, cmp.AllowUnexported(text{}, style{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	// A gap has room for the labels of links: 44 at least, or 22 more than the widest label.
	label := max(44, max(styleLink.width("PCIe 5.0 x16"), styleLink.width("48 GB/s"))+22)
	root := sw.parent
	if !near(sw.x, root.x+root.w+label) || !near(leafX, sw.x+sw.w+label) {
		t.Errorf("gaps of %g and %g, want %g", sw.x-root.x-root.w, leafX-sw.x-sw.w, label)
	}
	// Without a tree there is one column.
	matrix := &topo.Host{GPUs: []topo.GPU{{BusID: "GPU0"}}, Matrix: map[[2]string]topo.PathType{}}
	if p := New(matrix, nil, nil); len(p.columns) != 1 || p.columns[0].words != "GPUs and NICs" {
		t.Errorf("matrix: %+v", p.columns)
	}
}

func TestLinksHavePathsAndLabels(t *testing.T) {
	b := build(1).sw("00aa:00:00.0", "", 0, gen(4)).gpu("", "00aa:00:00.0", 0, gen(5)).gpu("", "", 0, topo.Place{}).
		gpu("", "", 0, gen(5))
	b.h.GPUs[2].C2C = 250
	p := New(&b.h, nil, nil)
	type shown struct {
		Class, Path string
		Width       float64
		Texts       []text
	}
	c := coordinate
	var want, got []shown
	for _, tt := range []struct {
		name, class, above, below string
		width                     float64
	}{
		{"GPU 1", "link unknown", "", "", 1.5},
		{"GPU 2", "link", "PCIe 5.0 x16, 48 GB/s", "C2C, 250 GB/s", 2},
		{"PCIe switch", "link", "PCIe 4.0 x16", "24 GB/s", 1.5 + math.Log2(5)},
		{"GPU 0", "link", "PCIe 5.0 x16", "48 GB/s", 1.5 + math.Log2(9)},
	} {
		i := slices.IndexFunc(p.links, func(l line) bool { return l.node.name == tt.name })
		n := p.links[i].node
		from, y := n.parent.x+n.parent.w, n.y+n.h/2
		s := shown{Class: tt.class, Width: tt.width, Path: fmt.Sprintf("M%s %sH%s", c(from), c(y), c(n.x))}
		if tt.name == "GPU 2" { // two links
			s.Path = fmt.Sprintf("M%s %sH%sM%s %sH%s", c(from), c(y-3), c(n.x), c(from), c(y+3), c(n.x))
		}
		if tt.above != "" {
			s.Texts = []text{{n.x - 11, y - 6, "end", styleLink, tt.above}, {n.x - 11, y + 15, "end", styleLink, tt.below}}
		}
		want = append(want, s)
		got = append(got, shown{p.links[i].class, p.links[i].path, p.links[i].width, p.links[i].texts})
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(text{}, style{})); diff != "" || len(p.links) != 4 {
		t.Errorf("%d links (-want +got):\n%s", len(p.links), diff)
	}
	for bandwidth, want := range map[float64]float64{-1: 1.5, 0: 1.5, 6: 2.5, 18: 3.5, 300: 7, 4999: 7, 5000: 1.5} {
		if got := thickness(bandwidth); !near(got, want) {
			t.Errorf("a link of %g GB/s is %g thick, want %g", bandwidth, got, want)
		}
	}
}

// NUMA nodes of a host are joined by a line 33 from the left, with the bandwidth below the first node.
func TestNUMANodesAreJoined(t *testing.T) {
	for name, tt := range map[string]struct {
		sockets       []float64
		hosts         []string
		words, detail string
	}{
		"one node": {[]float64{22}, nil, "", ""},
		"two": {[]float64{22, 22}, nil, "22 GB/s between nodes",
			"Links between NUMA nodes: 22 GB/s between nodes, by NCCL's figures for processors"},
		"three": {[]float64{22, 10, 16}, nil, "10 to 22 GB/s between nodes",
			"Links between NUMA nodes: 10 to 22 GB/s between nodes, by NCCL's figures for processors"},
		"unknown":      {[]float64{5000, 0}, nil, "", "Links between NUMA nodes: NCCL has no figure for these processors"},
		"two of hosts": {[]float64{22, 22}, []string{"a", "b"}, "", ""},
	} {
		b := build(len(tt.sockets))
		for i, s := range tt.sockets {
			if b.h.CPUs[i].Socket = s; tt.hosts != nil {
				b.h.CPUs[i].Host, b.h.CPUs[i].NUMA = tt.hosts[i], 0
			}
		}
		p := New(&b.h, nil, nil)
		if tt.detail == "" {
			if len(p.links) > 0 || p.tree.roots[0].x != 28 {
				t.Errorf("%s: %+v, the nodes are at %g", name, p.links, p.tree.roots[0].x)
			}
			continue
		}
		c := coordinate
		first, last := p.tree.roots[0], p.tree.roots[len(p.tree.roots)-1]
		path := fmt.Sprintf("M46 %sH33V%sH46", c(first.y+29), c(last.y+29))
		if len(p.tree.roots) == 3 {
			path += fmt.Sprintf("M33 %sH46", c(p.tree.roots[1].y+29))
		}
		l := p.links[0]
		if l.path != path || l.detail != tt.detail || l.class != "link between" || l.width != 2.5 {
			t.Errorf("%s: %+v; want %s, %q", name, l, path, tt.detail)
		}
		var texts []text
		if tt.words != "" {
			texts = []text{{41, 112 + 58 + 19, "", styleLink, tt.words}}
		}
		if diff := cmp.Diff(texts, l.texts, cmp.AllowUnexported(text{}, style{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// The legend is 26 below the picture. A row has items of 34 pixels for the sample, the words, and gaps.
func TestLegendExplainsLines(t *testing.T) {
	p := twoLanes()
	var rows []string
	y, x := 0.0, 0.0
	for _, item := range p.legend.items {
		switch {
		case item.lane == "" && item.bar == 0: // a sentence
			y = item.words.y
		case item.y != y:
			if y != 0 && item.y != y+20 {
				t.Errorf("%q is %g below the row above", item.words.words, item.y-y)
			}
			y, x = item.y, 28
			fallthrough
		default:
			if !near(item.x, x) || !near(item.words.x, x+42) || item.words.y != y || item.words.style != styleText {
				t.Errorf("%q is at %g, want %g: %+v", item.words.words, item.x, x, item.words)
			}
			x += 34 + 8 + styleText.width(item.words.words) + 26
		}
		rows = append(rows, fmt.Sprintf("%s %d %d %s", item.lane, item.bin, item.bar, item.words.words))
	}
	want := []string{"direct -1 0 direct: the NIC reads and writes the GPU's memory", "direct 0 0 0 to 10 GB/s",
		"direct 1 0 up to 20 GB/s", "direct 2 0 up to 30 GB/s", "direct 3 0 up to 40 GB/s",
		"direct 4 0 over 40 GB/s (a port has 50)", " -1 1 as planned", " -1 2 NCCL today", " -1 3 GPUDirect RDMA off"}
	if diff := cmp.Diff(want, rows[:len(want)]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	sentence := ""
	for _, r := range rows[len(want):] {
		sentence += strings.TrimPrefix(r, " -1 0")
	}
	if want := " Links: usable bandwidth in each direction, as NCCL computes it; the thicker the faster. Lanes: an " +
		"estimate, " +
		"while all GPUs exchange with the network as fast as they can."; sentence != want {
		t.Errorf("%q, want %q", sentence, want)
	}
	var narrow []string
	for _, item := range p.narrow.items {
		narrow = append(narrow, item.words.words)
		if item.words.style != styleNarrow {
			t.Errorf("%q: style %s", item.words.words, item.words.style.name)
		}
	}
	if diff := cmp.Diff([]string{"direct", "10", "20", "30", "40", "50 GB/s"}, narrow); diff != "" {
		t.Errorf("narrow (-want +got):\n%s", diff)
	}
	first := p.legend.items[0]
	if first.y != p.legend.rule+28 || p.narrow.items[0].y != p.narrow.rule+48 || p.legend.rule != p.narrow.rule {
		t.Errorf("the rule is at %g, the legend at %g, the narrow legend at %g", p.legend.rule, first.y, p.narrow.items[0].y)
	}
	if p.legend.rule != 112+5*40+4*6+26 {
		t.Errorf("the rule is at %g", p.legend.rule)
	}
	// Without an estimate lanes have no colours, and without lanes there is only the sentence about links.
	p = lanePicture(nil, planner.Lane{Kind: planner.KindBounce, NICs: []string{"mlx5_0"}})
	if p.legend.items[0].words.words != "bounce, through the host memory marked ◆" || p.legend.items[1].lane != "" {
		t.Errorf("without an estimate: %+v", p.legend.items)
	}
}

// Items that exceed the width begin a row.
func TestLegendBreaksRows(t *testing.T) {
	item := func(words string) legendItem { return legendItem{words: text{words: words}} }
	words := "0000000000"
	wide := 68 + styleText.width(words)
	p := &Picture{width: 28 + 2*wide + 28, height: 100}
	g := legend{}
	last := g.place(p, styleText, 20, []legendItem{item(words), item(words), item(words)}, nil, []legendItem{item(words)})
	var got [][2]float64
	for _, i := range g.items {
		got = append(got, [2]float64{i.x, i.y})
	}
	want := [][2]float64{{28, 154}, {28 + wide, 154}, {28, 174}, {28, 194}}
	if diff := cmp.Diff(want, got); diff != "" || last != 194 || g.rule != 126 {
		t.Errorf("the rule is at %g, the last row at %g (-want +got):\n%s", g.rule, last, diff)
	}
}

// element is an element of the SVG, with the text in it.
type element struct {
	xml.StartElement
	text string
}

// elements returns the elements of an SVG with a class.
func elements(t *testing.T, svg, name, class string) (found []element) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(svg))
	var open []int // indices in found, or -1
	for {
		token, err := d.Token()
		if err != nil {
			return found
		}
		switch e := token.(type) {
		case xml.StartElement:
			open = append(open, -1)
			if e.Name.Local == name && attribute(e, "class") == class {
				open[len(open)-1] = len(found)
				found = append(found, element{e.Copy(), ""})
			}
		case xml.EndElement:
			open = open[:len(open)-1]
		case xml.CharData:
			if k := len(open); k > 0 && open[k-1] >= 0 {
				found[open[k-1]].text += string(e)
			}
		}
	}
}

// values returns attributes of elements, one text an element.
func values(found []element, names ...string) (all []string) {
	for _, e := range found {
		var v []string
		for _, n := range names {
			v = append(v, attribute(e.StartElement, n))
		}
		if text := strings.TrimSpace(e.text); text != "" {
			v = append(v, text)
		}
		all = append(all, strings.Join(v, " "))
	}
	return all
}

func TestSVGDrawsEachPart(t *testing.T) {
	p := twoLanes()
	svg := string(p.SVG())
	c := coordinate
	gpu, nic := p.tree.gpus[gpu0], p.tree.nics["mlx5_0"]
	deck, left := gpu.x+250, p.bars[0].x
	middle := p.tree.gpus[gpu0].parent
	for _, tt := range []struct {
		name, class string
		attributes  []string
		want        []string
	}{
		{"svg", "picture", []string{"width", "height", "viewBox"},
			[]string{fmt.Sprintf("%s %s 0 0 %s %s", c(p.width), c(p.height), c(p.width), c(p.height))}},
		{"text", "title", []string{"x", "y"}, []string{"28 46 " + p.title}},
		{"text", "subtitle", []string{"x", "y"}, []string{"28 68 " + p.subtitle}},
		{"rect", "row", []string{"x", "y", "width", "height"}, []string{
			c(left-10) + " 112 " + c(p.width-28-left+10) + " 40", c(left-10) + " 158 " + c(p.width-28-left+10) + " 40",
			c(left-10) + " 204 " + c(p.width-28-left+10) + " 40"}},
		{"rect", "box", []string{"x", "y", "width", "height"}, []string{
			c(middle.parent.x) + " 112 " + c(middle.parent.w) + " 224", c(middle.x) + " 112 " + c(middle.w) + " 224",
			c(gpu.x) + " 112 250 40", c(gpu.x) + " 158 250 40", c(gpu.x) + " 204 250 40", c(gpu.x) + " 250 250 40", c(gpu.x) +
				" 296 250 40"}},
		{"rect", "mark", []string{"x", "y", "width", "height"},
			[]string{c(gpu.x) + " 112 5 40", c(gpu.x) + " 158 5 40", c(gpu.x) + " 204 5 40",
				c(gpu.x) + " 250 5 40", c(gpu.x) + " 296 5 40"}},
		{"rect", "planned", []string{"x", "y", "width", "height"},
			[]string{c(left) + " 115 170 10", c(left) + " 161 85 10", c(left) + " 207 0 10",
				"28 " + c(p.legend.items[6].y-9) + " 34 10"}},
		{"rect", "today", []string{"x", "y", "width", "height"},
			[]string{c(left) + " 129.5 42.5 6", c(left) + " 175.5 42.5 6", c(left) + " 221.5 42.5 6",
				c(p.legend.items[7].x) + " " + c(p.legend.items[7].y-7) + " 34 6"}},
		{"g", "lane direct q4", []string{"data-lane"}, []string{"0", "", ""}},
		{"g", "lane direct q2", []string{"data-lane"}, []string{"1", "", ""}},
		{"g", "lane q0", []string{"data-lane"}, []string{"2"}},
		{"path", "halo", []string{"d", "stroke-width"}, []string{p.lanes[0].path + " 8.2", p.lanes[1].path + " 7"}},
		{"circle", "stop", []string{"cx", "cy", "r"}, []string{c(deck) + " 130 4.5", c(deck) + " 176 4.5"}},
		{"path", "stop arrow", []string{"d"}, []string{fmt.Sprintf("M%s 274l9 -5v10z", c(deck+1)),
			fmt.Sprintf("M%s 266l9 -5v10z", c(deck+1))}},
		{"text", "kind", []string{"x", "y"}, []string{c(deck+8) + " 125 direct", c(deck+8) + " 171 direct", c(deck+8) +
			" 226 no lane"}},
		{"path", "rule", []string{"d", "stroke-width"}, []string{fmt.Sprintf("M28 %sH%s 1", c(p.legend.rule), c(p.width-28)),
			fmt.Sprintf("M28 %sH%s 1", c(p.narrow.rule), c(p.width-28))}},
	} {
		got := values(elements(t, svg, tt.name, tt.class), tt.attributes...)
		if tt.class == "halo" || tt.class == "kind" || tt.class == "stop" || tt.class == "stop arrow" {
			slices.Sort(got)
			slices.Sort(tt.want)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("<%s class=%q> (-want +got):\n%s", tt.name, tt.class, diff)
		}
	}
	// A card has two lines of text, 10 from its edges after the mark.
	var cards []string
	for _, class := range []string{"name", "text", "address"} {
		for _, v := range values(elements(t, svg, "text", class), "x", "y", "text-anchor") {
			if y, err := strconv.ParseFloat(strings.Fields(v)[1], 64); err == nil && strings.HasPrefix(v, c(gpu.x+14)+" ") &&
				y < 300 && (y < 155 || y > 249) {
				cards = append(cards, v)
			}
		}
	}
	want := []string{c(gpu.x+14) + " 129  GPU 0", c(gpu.x+14) + " 267  mlx5_0", c(gpu.x+14) + " 144  " + gpu0,
		c(gpu.x+14) + " 282  " + nic.address}
	if diff := cmp.Diff(want, cards); diff != "" {
		t.Errorf("cards (-want +got):\n%s", diff)
	}
	right := values(elements(t, svg, "text", "text"), "x", "y", "text-anchor")
	for _, want := range []string{c(gpu.x+240) + " 267 end InfiniBand", c(gpu.x+240) + " 282 end 400 Gb/s",
		c(gpu.x+14+styleName.width("GPU 0")+8) + " 129  H200"} {
		if !slices.Contains(right, want) {
			t.Errorf("no text %q among %q", want, right)
		}
	}
	// The outer lane is drawn first.
	if strings.Index(svg, "lane direct q4") > strings.Index(svg, "lane direct q2") {
		t.Error("the inner lane is below the outer lane")
	}
}
