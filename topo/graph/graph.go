package graph

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
)

// unknownNetBandwidth is NCCL's figure for a <net> that states no speed
// (ncclTopoAddNet), GB/s: 10 Gbit/s.
const unknownNetBandwidth = 1.25

// Endpoint is a GPU, a NIC or a CPU at an end of a path.
type Endpoint struct {
	ID         NodeID
	Name       string // the name in a Pair
	busID      string
	hostBridge string
	rate       float64 // GB/s of a NIC's port; 0 where unknown or no NIC
	isNIC, c2c bool
}

func gpuEndpoint(g topo.GPU) Endpoint {
	return Endpoint{ID: NodeID{GPUNode, g.Host, g.BusID}, Name: g.BusID, busID: g.BusID, hostBridge: g.HostBridge,
		c2c: g.C2C > 0}
}

// NICEndpoint returns the endpoint of a NIC. For a port without a rate in an XML file of NCCL, the
// rate is NCCL's default.
func NICEndpoint(n topo.NIC, source topo.Source) Endpoint {
	rate := n.RateGbps() / 8
	if rate == 0 && source.Kind == topo.SourceNCCLXML && len(n.Ports) > 0 {
		rate = unknownNetBandwidth
	}
	return Endpoint{ID: NICID(n), Name: n.Name, busID: n.BusID, hostBridge: n.HostBridge, rate: rate, isNIC: true}
}

// Devices are the GPUs and then the NICs of a host.
func Devices(h *topo.Host) []Endpoint {
	all := make([]Endpoint, 0, len(h.GPUs)+len(h.NICs))
	for _, g := range h.GPUs {
		all = append(all, gpuEndpoint(g))
	}
	for _, n := range h.NICs {
		all = append(all, NICEndpoint(n, h.Source))
	}
	return all
}

// NodeKind is the kind of a node of the graph.
type NodeKind int

const (
	CPUNode NodeKind = iota
	SwitchNode
	NVSwitchNode
	GPUNode
	NICNode
)

// NodeID names a node. As in NCCL, the NVSwitches of every host are a single node: NVSwitches
// can join the GPUs of several hosts.
type NodeID struct {
	Kind NodeKind
	Host string
	Name string
}

func (n NodeID) String() string {
	switch n.Kind {
	case CPUNode:
		return "NUMA node " + n.Name
	case SwitchNode:
		return "switch " + n.Name
	case NVSwitchNode:
		return "NVSwitches"
	case GPUNode:
		return "GPU " + n.Name
	}
	return "NIC " + n.Name
}

// NICID returns the node of a NIC's card. Functions of a card share the node, and so do ports
// that a source lists as separate devices.
func NICID(n topo.NIC) NodeID {
	if card := n.CardFunction(); card != "" {
		return NodeID{NICNode, n.Host, card}
	}
	return NodeID{NICNode, n.Host, n.Name}
}

// CPUID returns the node of the CPU at a NUMA node.
func CPUID(host string, numa int) NodeID { return NodeID{CPUNode, host, fmt.Sprint(numa)} }

// link is a single direction of an edge.
type link struct {
	to        int           // or otherCPUs
	via       topo.PathType // the type that the link adds to a path; NVB replaces the type behind a GPU
	bandwidth float64
	up        bool // to the parent in the PCI tree
}

// otherCPUs is the destination of the link between a CPU and the remaining CPUs of the host. A
// kernel can have 1024 NUMA nodes: a link for each pair would need a million links.
const otherCPUs = -1

type graph struct {
	nodes []NodeID
	links [][]link
	index map[NodeID]int
	cpus  map[string][]int // nodes, by host
}

func (g *graph) node(id NodeID) int {
	i, known := g.index[id]
	if !known {
		i = len(g.nodes)
		g.index[id] = i
		g.nodes = append(g.nodes, id)
		g.links = append(g.links, nil)
	}
	return i
}

// connect joins two nodes; via is PIX for any PCIe link.
func (g *graph) connect(a, b NodeID, via topo.PathType, bandwidth float64) {
	g.connectTo(a, b, via, bandwidth)
	g.connectTo(b, a, via, bandwidth)
}

// connectTo adds a single direction of an edge.
func (g *graph) connectTo(a, b NodeID, via topo.PathType, bandwidth float64) {
	switch {
	case a.Kind == SwitchNode && b.Kind == SwitchNode:
		via = topo.PXB
	case via == topo.PIX && (a.Kind == CPUNode || b.Kind == CPUNode):
		via = topo.PHB
	}
	i, j := g.node(a), g.node(b)
	g.links[i] = append(g.links[i], link{to: j, via: via, bandwidth: bandwidth})
}

func newGraph(h *topo.Host, rules topo.Rules) *graph {
	g := &graph{index: map[NodeID]int{}, cpus: map[string][]int{}}
	var merged map[NodeID]NodeID
	if rules != topo.RulesSMI {
		merged = mergedSwitches(h.Switches)
	}
	above := func(host string, p topo.Place, numa int) NodeID {
		if p.Switch == "" {
			return CPUID(host, numa)
		}
		up := NodeID{SwitchNode, host, p.Switch}
		if into, ok := merged[up]; ok {
			return into
		}
		return up
	}
	plug := func(id NodeID, p topo.Place, numa int) {
		g.connect(id, above(id.Host, p, numa), topo.PIX, p.Link)
		of := g.links[g.index[id]]
		of[len(of)-1].up = true
	}
	for _, c := range h.CPUs {
		at := g.node(CPUID(c.Host, c.NUMA))
		g.cpus[c.Host] = append(g.cpus[c.Host], at)
		g.links[at] = append(g.links[at], link{to: otherCPUs, via: topo.SYS, bandwidth: c.Socket})
	}
	for _, s := range h.Switches {
		id := NodeID{SwitchNode, s.Host, s.BusID}
		if _, ok := merged[id]; !ok {
			plug(id, s.Place, s.NUMA)
		}
	}
	for _, gpu := range h.GPUs {
		id := NodeID{GPUNode, gpu.Host, gpu.BusID}
		plug(id, gpu.Place, gpu.NUMA)
		if rules == topo.RulesSMI {
			continue
		}
		if gpu.C2C > 0 {
			g.connect(id, CPUID(gpu.Host, gpu.NUMA), topo.C2C, gpu.C2C)
		}
		if gpu.NVLinkCPU > 0 { // POWER9
			g.connect(id, CPUID(gpu.Host, gpu.NUMA), topo.NVL, gpu.NVLinkCPU)
		}
	}
	plugged := map[NodeID]bool{}
	for _, n := range h.NICs {
		for _, function := range []topo.NIC{n, n.OwnFunction()} {
			if id := NICID(function); !plugged[id] {
				plugged[id] = true
				plug(id, function.Place, function.NUMA)
			}
		}
	}
	for _, l := range nvlinks(h.GPUs) {
		g.connectTo(l.a, l.b, topo.NVL, l.forward)
		g.connectTo(l.b, l.a, topo.NVL, l.backward)
	}
	if rules != topo.RulesSMI {
		g.joinPeers(h.Switches, merged)
	}
	g.sort()
	return g
}

// sort orders the links of a node as NCCL follows links: the fastest first, the link upwards
// last (ncclTopoConnectNodes, ncclTopoSort). Of equally good paths the search keeps the first.
func (g *graph) sort() {
	for _, links := range g.links {
		slices.SortStableFunc(links, func(a, b link) int {
			switch {
			case a.up != b.up && a.up:
				return 1
			case a.up != b.up:
				return -1
			}
			return cmp.Compare(b.bandwidth, a.bandwidth)
		})
	}
}

// joinPeers joins switches that exchange traffic without the CPU (NCCL's ncclTopoAddPciLinks).
func (g *graph) joinPeers(switches []topo.Switch, merged map[NodeID]NodeID) {
	joined := map[[2]NodeID]bool{}
	for _, s := range switches {
		for _, peer := range s.Peers {
			a, b := NodeID{SwitchNode, s.Host, s.BusID}, NodeID{SwitchNode, s.Host, peer}
			for _, end := range []*NodeID{&a, &b} {
				if into, ok := merged[*end]; ok {
					*end = into
				}
			}
			_, known := g.index[b]
			if a == b || !known || joined[[2]NodeID{a, b}] {
				continue
			}
			joined[[2]NodeID{a, b}], joined[[2]NodeID{b, a}] = true, true
			g.connect(a, b, topo.LOC, bandwidths.Local)
		}
	}
}

// mergedSwitches maps a lower switch to the upper switch of a merged pair. Some Broadcom
// switches appear as two levels, but have the full bandwidth between any two ports; NCCL merges
// the levels (ncclTopoFlattenBcmSwitches).
func mergedSwitches(switches []topo.Switch) map[NodeID]NodeID {
	byID := make(map[NodeID]topo.Switch, len(switches))
	for _, s := range switches {
		byID[NodeID{SwitchNode, s.Host, s.BusID}] = s
	}
	merged := map[NodeID]NodeID{}
	// Settle the upper switch first: a merged switch merges no further switch. A tree has no
	// cycle, and the number of switches limits a chain.
	settled := map[NodeID]bool{}
	var settle func(id NodeID)
	settle = func(id NodeID) {
		s, ok := byID[id]
		if settled[id] || !ok {
			return
		}
		settled[id] = true
		if s.Switch == "" {
			return
		}
		up := NodeID{SwitchNode, s.Host, s.Switch}
		settle(up)
		_, gone := merged[up]
		generation := broadcomGeneration(byID[up].Device, 0)
		if !gone && generation > 0 && broadcomGeneration(s.Device, 1) == generation {
			merged[id] = up
		}
	}
	for _, s := range switches {
		settle(NodeID{SwitchNode, s.Host, s.BusID})
	}
	return merged
}

// broadcomGeneration returns the PCIe generation of a Broadcom switch in base mode, 0 for
// another device. level is 0 for the upper half and 1 for the lower half (NCCL's getBcmGen).
func broadcomGeneration(d topo.PCIIdentity, level uint64) int {
	const mask = 0xfffffffffffff000
	switch id := d.Number(); {
	case id&mask == 0x1000c0101000a000:
		return 4
	case id&mask == 0x1000c03010000000|level*0x1000:
		return 5
	}
	return 0
}

type nvlink struct {
	a, b              NodeID
	forward, backward float64 // bandwidths
}

// nvlinks returns each pair of nodes with NVLinks, once. Both GPUs of a pair list the links,
// with the bandwidth of their sending direction. If only a single GPU lists the links, nvlinks
// uses its bandwidth for both directions.
func nvlinks(gpus []topo.GPU) []nvlink {
	exists := map[NodeID]bool{}
	for _, g := range gpus {
		exists[NodeID{GPUNode, g.Host, g.BusID}] = true
	}
	var links []nvlink
	index := map[[2]NodeID]int{}
	for _, g := range gpus {
		for _, l := range g.NVLinks {
			a, b := NodeID{GPUNode, g.Host, g.BusID}, NodeID{Kind: NVSwitchNode}
			if l.Peer != "" {
				b = NodeID{GPUNode, g.Host, l.Peer}
				if b == a || !exists[b] {
					continue // some virtual machines name the GPU itself as the far end
				}
			}
			if i, known := index[[2]NodeID{b, a}]; known {
				links[i].backward = l.Bandwidth
				continue
			}
			index[[2]NodeID{a, b}] = len(links)
			links = append(links, nvlink{a, b, l.Bandwidth, l.Bandwidth})
		}
	}
	return links
}

// step is the best known path to a node.
type step struct {
	topo.Path
	hops int
	// from is the previous node on the path; -1 for the first.
	from int
}

// better is NCCL's order: type, then bandwidth, then length.
func (s step) better(t step) bool {
	switch {
	case s.Type != t.Type:
		return s.Type < t.Type
	case s.Bandwidth != t.Bandwidth:
		return s.Bandwidth > t.Bandwidth
	}
	return s.hops < t.hops
}

// found is the result of a search: the nearest paths between a node and every other node.
type found struct {
	graph *graph
	base  int
	best  []step // [node]: the path from the node
}

// search searches from several start nodes in sequence. search reuses its memory: a large host
// has hundreds of start nodes.
type search struct {
	graph *graph
	rules topo.Rules
	// found is the result of the last search. The next search overwrites found; a caller that
	// sets found to nil keeps the result.
	found *found
	// queued is the level for which a node is queued; now and next are the nodes of the current
	// level and of the next level.
	queued    []int
	now, next []int
	level     int
}

// from searches breadth first, level by level, and visits a node again after finding a better
// path. No path exceeds the given bandwidth.
func (s *search) from(base int, bandwidth float64) {
	g := s.graph
	if s.queued == nil {
		s.queued = make([]int, len(g.nodes))
	}
	if s.found == nil {
		s.found = &found{graph: g, best: make([]step, len(g.nodes))}
	}
	s.found.base = base
	best := s.found.best
	clear(s.queued)
	for i := range best {
		best[i] = step{topo.Path{Type: topo.DIS, Bandwidth: 0}, 0, -1}
	}
	best[base] = step{topo.Path{Type: topo.LOC, Bandwidth: bandwidth}, 0, -1}
	s.now = append(s.now[:0], base)
	for s.level = 1; len(s.now) > 0; s.level++ {
		s.next = s.next[:0]
		for _, at := range s.now {
			so := best[at]
			through := at != base && g.nodes[at].Kind == GPUNode
			for _, l := range g.links[at] {
				via := l.via
				if through {
					if !s.passes(so, l) {
						continue
					}
					if so.Type == topo.NVL {
						via = topo.NVB
					}
				}
				next := step{topo.Path{Type: max(so.Type, via), Bandwidth: min(so.Bandwidth, l.bandwidth)}, so.hops + 1, at}
				switch {
				case l.to != otherCPUs:
					s.offer(l.to, next)
				case so.from < 0 || g.nodes[so.from].Kind != CPUNode:
					for _, to := range g.cpus[g.nodes[at].Host] {
						s.offer(to, next)
					}
					// Otherwise the CPU before this node offered an equal path to the other
					// CPUs.
				}
			}
		}
		s.now, s.next = s.next, s.now
	}
}

// offer stores a better path to a node, and queues the node.
func (s *search) offer(to int, path step) {
	if !path.better(s.found.best[to]) {
		return
	}
	s.found.best[to] = path
	if s.queued[to] != s.level {
		s.queued[to] = s.level
		s.next = append(s.next, to)
	}
}

// passes reports whether a path can continue over l after the GPU of step at. NCCL continues only
// over NVLink between two peers of the GPU; nvidia-smi never continues. GPUs have no other links to GPUs.
func (s *search) passes(at step, l link) bool {
	return s.rules != topo.RulesSMI && s.graph.nodes[l.to].Kind == GPUNode && at.hops <= 1
}

// Nearest is the nearest path between two devices.
type Nearest struct {
	topo.Path
	hops int // links that are passed
	// found has the steps from the node from, until the next search; nil where a
	// matrix states the path.
	found *found
	from  int
}

// PathTree has the paths of a search, kept while the PathFinder searches again. next is the
// following node on the path; -1 at the end.
type PathTree struct {
	graph *graph
	next  []int32
}

// PathTree returns the paths of the last search; nil where a matrix states the paths.
func (f PathFinder) PathTree() *PathTree {
	if f.graph == nil {
		return nil
	}
	t := &PathTree{f.graph, make([]int32, len(f.graph.nodes))}
	for at := range t.next {
		t.next[at] = int32(f.search.found.best[at].from)
	}
	return t
}

// Route is a kept path.
type Route struct {
	topo.Path
	from int
	in   *PathTree
}

// Route keeps a path of in.
func (w Nearest) Route(in *PathTree) Route { return Route{w.Path, w.from, in} }

// Nodes returns the nodes of the path, from the first device to the last; nil for DIS, and
// where a matrix states the path.
func (r Route) Nodes() (nodes []NodeID) {
	if r.in == nil || r.Type == topo.DIS {
		return nil
	}
	for at := int32(r.from); at >= 0; at = r.in.next[at] {
		nodes = append(nodes, r.in.graph.nodes[at])
	}
	return nodes
}

// PathFinder finds paths of a host by a set of rules.
type PathFinder struct {
	host   *topo.Host
	rules  topo.Rules
	graph  *graph // nil where a matrix states the paths
	search *search
}

// NewPathFinder returns a PathFinder of a host. If the host has a matrix, the paths are those of the
// matrix.
func NewPathFinder(h *topo.Host, rules topo.Rules) PathFinder {
	f := PathFinder{host: h, rules: rules}
	if h.Matrix == nil {
		f.graph = newGraph(h, rules)
		f.search = &search{graph: f.graph, rules: rules}
	}
	return f
}

// To searches the paths to b, starting at b like NCCL, and returns a function for the path from
// a device. The function is valid until the next call of To; keep extends the validity.
func (f PathFinder) To(b Endpoint) func(a Endpoint) Nearest {
	if f.graph == nil {
		return func(a Endpoint) Nearest { return f.stated(a, b) }
	}
	bandwidth := float64(bandwidths.Local)
	if b.rate > 0 {
		bandwidth = min(bandwidth, b.rate)
	}
	f.search.from(f.graph.index[b.ID], bandwidth)
	found := f.search.found
	return func(a Endpoint) Nearest { return f.nearest(found, f.graph.index[a.ID], &a, &b) }
}

// nearest returns a path of a search.
func (f PathFinder) nearest(found *found, from int, a, b *Endpoint) Nearest {
	s := &found.best[from]
	return Nearest{finish(s.Path, a, b, f.rules), s.hops, found, from}
}

// between calls yield with the path from each end that wanted selects to each end in to, by index
// in ends. between looks up the node of a device only once; To looks up a node for each pair.
func (f PathFinder) between(ends []Endpoint, to []int, wanted func(from, to int) bool,
	yield func(from, to int, w Nearest)) {
	nodes := make([]int, len(ends))
	if f.graph != nil {
		for i := range ends {
			nodes[i] = f.graph.index[ends[i].ID]
		}
	}
	// The search has the limit of the end in to; finish changes no path from a plain end.
	plain := make([]bool, len(ends))
	for i := range ends {
		plain[i] = f.rules == topo.RulesNCCL && ends[i].rate == 0
	}
	for _, j := range to {
		nearest := f.To(ends[j])
		if f.graph == nil {
			for i := range ends {
				if i != j && wanted(i, j) {
					yield(i, j, nearest(ends[i]))
				}
			}
			continue
		}
		found := f.search.found
		for i, node := range nodes {
			switch {
			case i == j || !wanted(i, j):
			case plain[i]:
				s := &found.best[node]
				yield(i, j, Nearest{s.Path, s.hops, found, node})
			default:
				yield(i, j, f.nearest(found, node, &ends[i], &ends[j]))
			}
		}
	}
}

// alike returns for each end the first end with equal paths to every third end: both ends are
// leaves of one parent, with equal links.
func (f PathFinder) alike(ends []Endpoint) []int {
	type leaf struct {
		kind       NodeKind
		link       link // to the parent
		hostBridge string
		rate       float64
		c2c        bool
	}
	first := make([]int, len(ends))
	if f.graph == nil {
		for i := range ends {
			first[i] = i
		}
		return first
	}
	of := make([]int, len(f.graph.nodes)) // ends of a node
	for i := range ends {
		of[f.graph.index[ends[i].ID]]++
	}
	known := map[leaf]int{}
	for i := range ends {
		e := &ends[i]
		first[i] = i
		node := f.graph.index[e.ID]
		links := f.graph.links[node]
		if len(links) != 1 || of[node] > 1 {
			continue
		}
		l := leaf{f.graph.nodes[node].Kind, links[0], e.hostBridge, e.rate, e.c2c}
		if before, ok := known[l]; ok {
			first[i] = before
		} else {
			known[l] = i
		}
	}
	return first
}

// keep keeps the function of the last To valid after the next call of To.
func (f PathFinder) keep() {
	if f.search != nil {
		f.search.found = nil
	}
}

// stated returns a path that a matrix states.
func (f PathFinder) stated(a, b Endpoint) Nearest {
	if a.ID == b.ID && a.Name == b.Name {
		return Nearest{Path: topo.Path{Type: topo.LOC, Bandwidth: 0}}
	}
	t, ok := f.host.Matrix[[2]string{a.Name, b.Name}]
	if !ok {
		t = topo.DIS
	}
	return Nearest{Path: topo.Path{Type: t}}
}

// finish adds types and limits outside the graph: NODE, P2C, and the speed of a NIC's port.
func finish(p topo.Path, a, b *Endpoint, rules topo.Rules) topo.Path {
	if p.Type == topo.DIS {
		return p
	}
	if rules != topo.RulesNCCL && p.Type == topo.PHB && a.hostBridge != "" && b.hostBridge != "" &&
		a.hostBridge != b.hostBridge {
		p.Type = topo.NODE
	}
	if rules == topo.RulesPlan && (p.Type == topo.PHB || p.Type == topo.NODE) && (a.c2c && b.isNIC || a.isNIC && b.c2c) {
		p.Type = topo.P2C // as NCCL merges the two parts of the path (addInterStep)
	}
	if rules == topo.RulesSMI && p.Type == topo.LOC && a.Name != b.Name {
		p.Type = topo.PIX // two NICs of a card
	}
	if a.rate > 0 {
		p.Bandwidth = min(p.Bandwidth, a.rate)
	}
	if b.rate > 0 {
		p.Bandwidth = min(p.Bandwidth, b.rate)
	}
	return p
}
