package picture

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
)

type kind int

const (
	kindRoot   kind = iota // a NUMA node, or a placeholder
	kindSwitch             // of PCIe
	kindGPU
	kindNIC
	kindMemory // of the CPU, where a lane bounces
)

// node is a part of a host, and its place in the picture.
type node struct {
	kind     kind
	host     string
	parent   *node
	children []*node
	place    topo.Place
	// hidden is a placeholder root: the nodes below have no link.
	hidden bool
	// listed is set for a root that the source lists. Devices of unknown place are below a root
	// that the source does not list.
	listed bool

	name    string // display name: "GPU 3"
	address string
	cpu     topo.CPU
	sw      topo.Switch
	gpu     topo.GPU
	nic     topo.NIC

	depth      int
	x, y, w, h float64
	ports      []*port
	lanes      []int // indices of lanes that use the link upwards
}

func (n *node) leaf() bool { return n.kind >= kindGPU }

func (n *node) middle() float64 { return n.y + n.h/2 }

// tree is a host in the form of the picture.
type tree struct {
	host  *topo.Host
	roots []*node
	gpus  map[string]*node
	nics  map[string]*node
	// skipped counts the removed switches without devices.
	skipped int
}

type key struct{ host, name string }

func newTree(h *topo.Host, p *planner.Plan) *tree {
	t := &tree{host: h, gpus: map[string]*node{}, nics: map[string]*node{}}
	roots := map[key]*node{}
	root := func(host string, numa int) *node {
		k := key{host, strconv.Itoa(numa)}
		if h.Matrix != nil {
			k = key{host, ""}
		}
		if roots[k] == nil {
			n := &node{kind: kindRoot, host: host, cpu: topo.CPU{Host: host, NUMA: numa}, hidden: h.Matrix != nil}
			n.name = fmt.Sprintf("NUMA node %d", numa)
			if numa < 0 {
				n.name = "NUMA node unknown"
			}
			roots[k] = n
			t.roots = append(t.roots, n)
		}
		return roots[k]
	}
	for _, c := range h.CPUs {
		if h.Matrix == nil {
			r := root(c.Host, c.NUMA)
			r.cpu, r.listed = c, true
		}
	}
	switches := map[key]*node{}
	for _, s := range h.Switches {
		switches[key{s.Host, s.BusID}] = &node{kind: kindSwitch, host: s.Host, place: s.Place, sw: s, name: "PCIe switch",
			address: s.BusID}
	}
	attach := func(n *node, host string, numa int) {
		up := switches[key{host, n.place.Switch}]
		if n.place.Switch == "" || up == nil || up.below(n) {
			up = root(host, numa)
		}
		n.parent = up
		up.children = append(up.children, n)
	}
	for _, s := range h.Switches {
		attach(switches[key{s.Host, s.BusID}], s.Host, s.NUMA)
	}
	for _, g := range h.GPUs {
		n := &node{kind: kindGPU, host: g.Host, place: g.Place, gpu: g, name: fmt.Sprintf("GPU %d", g.Index),
			address: g.BusID}
		t.gpus[g.BusID] = n
		attach(n, g.Host, g.NUMA)
	}
	for _, nic := range h.NICs {
		n := &node{kind: kindNIC, host: nic.Host, place: nic.Place, nic: nic, name: nic.Name, address: nic.BusID}
		t.nics[nic.Name] = n
		attach(n, nic.Host, nic.NUMA)
	}
	for _, r := range t.roots {
		t.skipped += r.prune()
	}
	if p != nil {
		t.addMissing(p)
		t.addMemory(p)
	}
	slices.SortStableFunc(t.roots, func(a, b *node) int {
		return cmp.Or(strings.Compare(a.host, b.host), cmp.Compare(order(a.cpu.NUMA), order(b.cpu.NUMA)))
	})
	for _, r := range t.roots {
		r.sort()
	}
	return t
}

// order sorts an unknown number last.
func order(numa int) int {
	if numa < 0 {
		return math.MaxInt
	}
	return numa
}

// below reports whether n is m or is below m.
func (n *node) below(m *node) bool {
	for ; n != nil; n = n.parent {
		if n == m {
			return true
		}
	}
	return false
}

// prune removes and counts switches without devices.
func (n *node) prune() (pruned int) {
	n.children = slices.DeleteFunc(n.children, func(c *node) bool {
		pruned += c.prune()
		empty := c.kind == kindSwitch && len(c.children) == 0
		if empty {
			pruned++
		}
		return empty
	})
	return pruned
}

const notThere = "it is not in the topology"

// addMissing adds the NICs that lanes use and the host lacks: the configuration can name such NICs.
func (t *tree) addMissing(p *planner.Plan) {
	var missing *node
	for _, l := range p.Lanes {
		for _, name := range l.NICs {
			if t.nics[name] != nil {
				continue
			}
			if missing == nil {
				missing = &node{kind: kindRoot, hidden: true, cpu: topo.CPU{NUMA: -1}}
				t.roots = append(t.roots, missing)
			}
			n := &node{kind: kindNIC, parent: missing, name: name, nic: topo.NIC{Name: name, NUMA: -1, Reason: notThere}}
			t.nics[name] = n
			missing.children = append(missing.children, n)
		}
	}
}

// addMemory adds the CPU's memory beside the NICs of lanes that bounce.
func (t *tree) addMemory(p *planner.Plan) {
	for _, l := range p.Lanes {
		for _, name := range bounced(l) {
			r := t.nics[name].root()
			if r.memory() == nil {
				n := &node{kind: kindMemory, host: r.host, parent: r, name: "host memory"}
				if !r.hidden {
					n.name = "memory of " + r.name
				}
				r.children = append(r.children, n)
			}
		}
	}
}

func (n *node) root() *node {
	for n.parent != nil {
		n = n.parent
	}
	return n
}

func (n *node) memory() *node {
	for _, c := range n.children {
		if c.kind == kindMemory {
			return c
		}
	}
	return nil
}

// sort orders the nodes below a node: GPUs by index, switches by the first GPU, NICs by name,
// memory.
func (n *node) sort() {
	for _, c := range n.children {
		c.sort()
	}
	rank := func(n *node) int {
		switch n.kind {
		case kindGPU:
			return 0
		case kindSwitch:
			return 1
		}
		return int(n.kind)
	}
	slices.SortStableFunc(n.children, func(a, b *node) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.firstGPU(), b.firstGPU()),
			compareNumbered(a.name, b.name), cmp.Compare(len(a.address), len(b.address)), strings.Compare(a.address, b.address))
	})
}

// compareNumbered puts mlx5_2 before mlx5_10.
func compareNumbered(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b))
}

func (n *node) firstGPU() int {
	if n.kind == kindGPU {
		return n.gpu.Index
	}
	first := math.MaxInt
	for _, c := range n.children {
		first = min(first, c.firstGPU())
	}
	return first
}

// leaves returns the devices below a node, from top to bottom.
func (n *node) leaves() (all []*node) {
	if n.leaf() {
		return []*node{n}
	}
	for _, c := range n.children {
		all = append(all, c.leaves()...)
	}
	return all
}

// generations of PCI Express, by the speed in the kernel's and in NCCL's notation.
var generations = []struct{ speed, name string }{
	{"2.5 GT/s", "1.0"}, {"5 GT/s", "2.0"}, {"5.0 GT/s", "2.0"}, {"8 GT/s", "3.0"}, {"8.0 GT/s", "3.0"},
	{"16 GT/s", "4.0"}, {"16.0 GT/s", "4.0"}, {"32 GT/s", "5.0"}, {"32.0 GT/s", "5.0"}, {"64 GT/s", "6.0"},
	{"64.0 GT/s", "6.0"},
}

// unlimited is topo's bandwidth of a link without a limit.
const unlimited = 5000

// linkLabel returns generation and width of the link upwards, and the bandwidth. assumed
// reports that the bandwidth is NCCL's figure for a link of unknown speed or width.
func linkLabel(p topo.Place, source topo.Source) (link, bandwidth string, assumed bool) {
	if p.Link <= 0 || p.Link >= unlimited {
		return "", "", false
	}
	generation := ""
	for _, g := range generations {
		if strings.HasPrefix(p.LinkSpeed, g.speed) {
			generation = g.name
		}
	}
	var words []string
	if generation != "" {
		words = append(words, generation)
	}
	if p.LinkWidth > 0 {
		words = append(words, "x"+strconv.Itoa(p.LinkWidth))
	}
	link = strings.Join(append([]string{"PCIe"}, words...), " ")
	bandwidth = gbs(p.Link)
	// hwloc reports the bandwidth directly.
	assumed = len(words) < 2 && source.Kind != reader.SourceHwlocXML
	switch {
	case assumed:
		bandwidth += " assumed"
	case p.LinkNow > 0 && p.LinkNow < p.Link:
		bandwidth += " (now " + figure(p.LinkNow) + ")"
	}
	return link, bandwidth, assumed
}

// chip returns the GPU's direct link to the CPU, beside PCI Express.
func (n *node) chip() (name string, bandwidth float64) {
	switch {
	case n.gpu.C2C > 0:
		return "C2C", n.gpu.C2C
	case n.gpu.NVLinkCPU > 0:
		return "NVLink", n.gpu.NVLinkCPU
	}
	return "", 0
}

// beside reports whether the picture shows the GPU's direct link to the CPU beside PCI Express:
// only where both links end at the CPU.
func (n *node) beside() bool {
	name, _ := n.chip()
	return name != "" && n.parent != nil && n.parent.kind == kindRoot
}

// linkLines returns the texts above and below the link upwards.
func (n *node) linkLines(source topo.Source) (above, below string) {
	above, below, _ = linkLabel(n.place, source)
	if n.beside() {
		name, bandwidth := n.chip()
		if above != "" {
			above += ", " + below
		}
		below = name + ", " + gbs(bandwidth)
	}
	return above, below
}
