package picture

import (
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// Measures, pixels.
const (
	margin     = 28.0
	top        = 112.0 // where the tree begins
	busWidth   = 18.0  // left of the NUMA nodes, for the link between the nodes
	rootMin    = 128.0
	rootMax    = 190.0
	leafWidth  = 250.0
	leafHeight = 40.0
	leafGap    = 6.0
	treeGap    = 12.0 // between switches of a node
	rootGap    = 30.0 // between NUMA nodes
	rootHeight = 58.0 // at least
	swHeight   = 46.0 // at least
	padding    = 10.0
	stub       = 66.0 // from a device to the first track: space for the kind of the lane
	track      = 12.0 // between tracks
	portPitch  = 8.0  // between the ends of lanes at a device
	arrow      = 9.0  // at a NIC
	ownPort    = 18.0 // the GPU's lane, below the top of the GPU's box
	barWidth   = 170.0
	barPitch   = 12.0
)

// Picture is the layout of a host and its lanes.
type Picture struct {
	width, height float64
	title         string
	subtitle      string
	columns       []text
	tree          *tree
	links         []line
	lanes         []*lane
	bars          []bar
	legend        legend
	narrow        legend // in place of legend where the picture is shown small
	notes         []text
	portRate      float64 // GB/s; the scale of the colours
	// Sources of the picture.
	plan     *planner.Plan
	estimate *planner.Estimate
}

// text is a positioned text. anchor is SVG's: "", "middle" or "end".
type text struct {
	x, y   float64
	anchor string
	style  style
	words  string
}

// line is a link of the tree, or between NUMA nodes.
type line struct {
	class  string
	path   string
	width  float64
	texts  []text
	detail string
	node   *node // the node below the link; nil between NUMA nodes
}

// bar shows three rates of a GPU.
type bar struct {
	x, y   float64
	lane   *lane
	widths [3]float64 // as planned, NCCL today, GPUDirect off
	texts  []text
	detail string
}

// New lays out a host and, for a non-nil p, the lanes of the plan, coloured by the estimate e.
// e is nil where an estimate is impossible ([planner.ErrNoBandwidths]).
func New(h *topo.Host, p *planner.Plan, e *planner.Estimate) *Picture {
	pic := &Picture{tree: newTree(h, p), plan: p, estimate: e}
	pic.addLanes()
	deck := pic.placeTree()
	right := pic.placeLanes(deck)
	right = pic.placeBars(right)
	pic.width = right + margin
	pic.head()
	pic.width = max(pic.width, 760)
	pic.placeLegends()
	pic.placeNotes()
	return pic
}

// placeTree places the nodes, and returns the left edge of the lanes.
func (p *Picture) placeTree() (deck float64) {
	leaves := p.leaves()
	hidden, between := true, false
	hosts := map[string]int{}
	for _, r := range p.tree.roots {
		hidden = hidden && r.hidden
		if r.listed {
			hosts[r.host]++
			between = between || hosts[r.host] > 1
		}
	}
	// Columns: the roots, the switches, the devices.
	depth := 0
	for _, l := range leaves {
		for up := l.parent; up != nil; up = up.parent {
			l.depth++
		}
		depth = max(depth, l.depth)
	}
	gaps, switches := make([]float64, depth+1), make([]float64, depth+1)
	rooms := 0.0
	for _, r := range p.tree.roots {
		if !r.hidden {
			rooms = max(rooms, styleName.width(r.name), styleText.width(r.processor()), styleText.width(r.processors()))
		}
		r.eachBelow(1, func(n *node, d int) {
			column := d
			if n.leaf() {
				column = depth
			} else {
				switches[d] = max(switches[d], styleName.width(n.name), styleAddress.width(plain(n.address)),
					styleSmall.width(n.passes()))
			}
			if r.hidden {
				return
			}
			above, below := n.linkLines(p.tree.host.Source)
			gaps[column] = max(gaps[column], 44, max(styleLink.width(above), styleLink.width(below))+22)
		})
	}
	x := margin
	rootX, rootW := x, 0.0
	if !hidden {
		if between {
			x += busWidth
		}
		rootX, rootW = x, min(rootMax, max(rootMin, rooms+2*padding))
		x += rootW
		p.columns = append(p.columns, text{rootX, top - 16, "", styleColumn, "NUMA nodes"})
	}
	at := make([]float64, depth+1)
	for d := 1; d < depth; d++ {
		x += gaps[d]
		at[d] = x
		if switches[d] > 0 {
			switches[d] += 2 * padding
			if d == 1 || switches[d-1] == 0 {
				p.columns = append(p.columns, text{x, top - 16, "", styleColumn, "PCIe switches"})
			}
		}
		x += switches[d]
	}
	if depth > 0 {
		x += gaps[depth]
	}
	leafX := x
	p.columns = append(p.columns, text{leafX, top - 16, "", styleColumn, "GPUs and NICs"})

	y := top
	for i, r := range p.tree.roots {
		if i > 0 {
			y += rootGap
		}
		r.x, r.w = rootX, rootW
		y = r.stack(y)
		r.eachBelow(1, func(n *node, d int) {
			n.x, n.w = at[min(d, depth)], switches[min(d, depth)]
			if n.leaf() {
				n.x, n.w = leafX, leafWidth
			}
		})
		if !r.hidden {
			r.eachBelow(1, func(n *node, _ int) { p.link(n) })
		}
	}
	p.joinRoots()
	p.height = y
	return leafX + leafWidth
}

// eachBelow calls f for the nodes below n, from top to bottom.
func (n *node) eachBelow(depth int, f func(n *node, depth int)) {
	for _, c := range n.children {
		f(c, depth)
		c.eachBelow(depth+1, f)
	}
}

// stack sets the heights of a node and of the nodes below, from y down, and returns the lower
// edge.
func (n *node) stack(y float64) float64 {
	n.y = y
	if n.leaf() {
		n.h = n.placePorts()
		return n.y + n.h
	}
	for i, c := range n.children {
		if i > 0 {
			y += leafGap
			if !c.leaf() || !n.children[i-1].leaf() {
				y += treeGap - leafGap
			}
		}
		y = c.stack(y)
	}
	minWidth := swHeight
	if n.kind == kindRoot {
		minWidth = rootHeight
		if n.hidden {
			minWidth = 0
		}
	}
	n.h = max(minWidth, y-n.y)
	if short := n.y + n.h - y; short > 0 {
		// Centre the nodes below n.
		n.eachBelow(1, func(c *node, _ int) { c.shift(short / 2) })
	}
	return n.y + n.h
}

func (n *node) shift(by float64) {
	n.y += by
	for _, p := range n.ports {
		p.y += by
	}
}

// link draws the link of a node upwards, with the label beside the node.
func (p *Picture) link(n *node) {
	if n.kind == kindMemory {
		return // memory is part of the CPU
	}
	y := n.middle()
	above, below := n.linkLines(p.tree.host.Source)
	from := n.parent.x + n.parent.w
	l := line{class: "link", width: thickness(n.place.Link), node: n, detail: n.linkDetail(p.tree.host.Source)}
	l.path = fmt.Sprintf("M%s %sH%s", coordinate(from), coordinate(y), coordinate(n.x))
	if n.beside() {
		// Two parallel links.
		l.path = fmt.Sprintf("M%s %sH%sM%s %sH%s", coordinate(from), coordinate(y-3), coordinate(n.x), coordinate(from),
			coordinate(y+3), coordinate(n.x))
		l.width = 2
	}
	if n.place.Link <= 0 || n.place.Link >= unlimited {
		l.class += " unknown"
	}
	// The label is in the last gap, which is as wide as the widest.
	label := n.x - 11
	if above != "" {
		l.texts = append(l.texts, text{label, y - 6, "end", styleLink, above})
	}
	if below != "" {
		l.texts = append(l.texts, text{label, y + 15, "end", styleLink, below})
	}
	p.links = append(p.links, l)
}

// thickness returns the width of a link's line; the width grows with the logarithm of the
// bandwidth.
func thickness(bandwidth float64) float64 {
	if bandwidth <= 0 || bandwidth >= unlimited {
		return 1.5
	}
	return min(7, max(1.5, 1.5+math.Log2(1+bandwidth/6)))
}

// joinRoots draws the links between the NUMA nodes of a host.
func (p *Picture) joinRoots() {
	for i := 0; i < len(p.tree.roots); {
		j := i
		var nodes []*node
		for ; j < len(p.tree.roots) && p.tree.roots[j].host == p.tree.roots[i].host; j++ {
			if p.tree.roots[j].listed {
				nodes = append(nodes, p.tree.roots[j])
			}
		}
		i = j
		if len(nodes) < 2 {
			continue
		}
		x, first, last := margin+5, nodes[0], nodes[len(nodes)-1]
		left, right := math.Inf(1), 0.0
		path := fmt.Sprintf("M%s %sH%sV%sH%s", coordinate(first.x), coordinate(first.middle()), coordinate(x),
			coordinate(last.middle()), coordinate(last.x))
		for k, n := range nodes {
			if k > 0 && k < len(nodes)-1 {
				path += fmt.Sprintf("M%s %sH%s", coordinate(x), coordinate(n.middle()), coordinate(n.x))
			}
			if n.cpu.Socket > 0 && n.cpu.Socket < unlimited {
				left, right = min(left, n.cpu.Socket), max(right, n.cpu.Socket)
			}
		}
		l := line{class: "link between", path: path, width: 2.5, detail: "Links between NUMA nodes"}
		words := ""
		switch {
		case right == 0:
			l.detail += ": NCCL has no figure for these processors"
		case left == right:
			words = gbs(right) + " between nodes"
		default:
			words = figure(left) + " to " + gbs(right) + " between nodes"
		}
		if words != "" {
			l.detail += ": " + words + ", by NCCL's figures for processors"
			l.texts = []text{{x + 8, nodes[0].y + nodes[0].h + 19, "", styleLink, words}}
		}
		p.links = append(p.links, l)
	}
}

// head writes title and subtitle.
func (p *Picture) head() {
	h := p.tree.host
	p.title = "Topology"
	if p.plan != nil {
		p.title = "Lanes to the network"
	}
	switch {
	case h.Source.File != "":
		p.title += " of " + plain(filepath.Base(h.Source.File))
	case h.Source.Sysfs != "" && h.Source.Sysfs != "/sys":
		p.title += " of " + plain(h.Source.Sysfs)
	}
	words := []string{count(len(h.GPUs), "GPU") + " and " + count(len(h.NICs), "NIC")}
	if p.plan != nil {
		words = append(words, p.lanesInWords())
	}
	if h.Matrix != nil {
		words = append(words, "the source tells path types and no tree")
	}
	if p.estimate != nil && len(p.estimate.GPUs) > 0 {
		var relay, today float64 = math.Inf(1), math.Inf(1)
		for _, g := range p.estimate.GPUs {
			relay, today = min(relay, g.Relay), min(today, g.NCCL)
		}
		u := p.estimate.Uniformity
		words = append(words, fmt.Sprintf("the slowest GPU gets %s, %s of the fastest (NCCL today: %s, %s)",
			gbs(relay), percent(u.Relay), gbs(today), percent(u.NCCL)))
	}
	p.subtitle = strings.Join(words, " · ")
	p.width = max(p.width, 2*margin+min(1000, max(styleTitle.width(p.title), styleSubtitle.width(p.subtitle))))
	p.title = styleTitle.fit(p.title, p.width-2*margin)
	p.subtitle = styleSubtitle.fit(p.subtitle, p.width-2*margin)
}

func percent(part float64) string { return strconv.FormatFloat(100*part, 'f', 0, 64) + " %" }

func (p *Picture) lanesInWords() string {
	kinds := map[string]int{}
	refused := 0
	for _, l := range p.plan.Lanes {
		if l.Role == planner.RoleRefused {
			refused++
			continue
		}
		kinds[l.Kind]++
	}
	var words []string
	for _, k := range []string{planner.KindDirect, planner.KindStaged, planner.KindBounce} {
		if kinds[k] > 0 {
			words = append(words, count(kinds[k], k+" lane"))
		}
	}
	if kinds[""] > 0 {
		words = append(words, count(kinds[""], "GPU")+" without a lane")
	}
	if refused > 0 {
		words = append(words, count(refused, "GPU")+" refused")
	}
	return list(words)
}

// placeNotes places the notes below the rest of the picture.
func (p *Picture) placeNotes() {
	var notes []string
	if p.plan != nil {
		notes = slices.Clone(p.plan.Notes)
	} else {
		notes = slices.Clone(p.tree.host.Notes)
	}
	if p.tree.skipped > 0 {
		notes = append(notes, count(p.tree.skipped, "PCIe switch")+" without a GPU or NIC left out")
	}
	const maxNotes = 5
	more := 0
	if len(notes) > maxNotes {
		more = len(notes) - maxNotes + 1
		notes = notes[:maxNotes-1]
	}
	room := p.width - 2*margin
	y := p.height + 8
	write := func(words string) {
		y += 16
		p.notes = append(p.notes, text{margin, y, "", styleText, words})
	}
	for _, n := range notes {
		for _, l := range styleText.wrap("Note: "+plain(n), room) {
			write(l)
		}
	}
	if more > 0 {
		write("and " + count(more, "more note"))
	}
	p.height = y + margin
}

func (p *Picture) leaves() (all []*node) {
	for _, r := range p.tree.roots {
		all = append(all, r.leaves()...)
	}
	// Keep only devices.
	return slices.DeleteFunc(all, func(n *node) bool { return !n.leaf() })
}

// processor returns maker and architecture of a NUMA node's processors.
func (n *node) processor() string {
	vendor := map[string]string{"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}[n.cpu.Vendor]
	if vendor == "" {
		vendor = plain(strings.TrimSpace(n.cpu.Vendor))
	}
	words := strings.TrimSpace(vendor + " " + plain(n.cpu.Arch))
	if n.host != "" {
		words = strings.TrimSpace("host " + plain(n.host) + " " + words)
	}
	return words
}

func (n *node) processors() string {
	if n.cpu.CPUs == "" {
		return ""
	}
	return "processors " + plain(n.cpu.CPUs)
}

// passes lists the switches that a switch reaches without the CPU.
func (n *node) passes() string {
	if len(n.sw.Peers) == 0 {
		return ""
	}
	return "to " + plain(strings.Join(n.sw.Peers, ", "))
}
