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

// Endpoint is what a path can begin and end at.
type Endpoint struct {
	ID         NodeID
	Name       string // as Pair has it
	busID      string
	hostBridge string
	rate       float64 // GB/s of a NIC's port; 0 where unknown or no NIC
	isNIC, c2c bool
}

func GPUEndpoint(g topo.GPU) Endpoint {
	return Endpoint{ID: NodeID{GPUNode, g.Host, g.BusID}, Name: g.BusID, busID: g.BusID, hostBridge: g.HostBridge, c2c: g.C2C > 0}
}

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
		all = append(all, GPUEndpoint(g))
	}
	for _, n := range h.NICs {
		all = append(all, NICEndpoint(n, h.Source))
	}
	return all
}

type nodeKind int

const (
	CPUNode nodeKind = iota
	SwitchNode
	NvswitchNode
	GPUNode
	NICNode
)

// NodeID names a node. NVSwitches are one node for all hosts, as in NCCL: they
// can join the GPUs of several.
type NodeID struct {
	Kind nodeKind
	Host string
	Name string
}

func (n NodeID) String() string {
	switch n.Kind {
	case CPUNode:
		return "NUMA node " + n.Name
	case SwitchNode:
		return "switch " + n.Name
	case NvswitchNode:
		return "NVSwitches"
	case GPUNode:
		return "GPU " + n.Name
	}
	return "NIC " + n.Name
}

// NICID names a NIC's card; ports that a source lists as devices of their own
// share it, and so do functions.
func NICID(n topo.NIC) NodeID {
	if card := n.CardFunction(); card != "" {
		return NodeID{NICNode, n.Host, card}
	}
	return NodeID{NICNode, n.Host, n.Name}
}

func CPUID(host string, numa int) NodeID { return NodeID{CPUNode, host, fmt.Sprint(numa)} }

// link is one direction of an edge.
type link struct {
	to        int           // or otherCPUs
	via       topo.PathType // what it makes of a path, unless that is NVB
	bandwidth float64
	up        bool // to what a device or switch is plugged into
}

// otherCPUs is where a link leads that joins a CPU to all others of its host. A
// kernel can have 1024 NUMA nodes, which are a million pairs.
const otherCPUs = -1

type graph struct {
	nodes []NodeID
	links [][]link
	index map[NodeID]int
	cpus  map[string][]int // of each host, nodes
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

// connect joins two nodes; PIX stands for any PCIe link.
func (g *graph) connect(a, b NodeID, via topo.PathType, bandwidth float64) {
	g.connectTo(a, b, via, bandwidth)
	g.connectTo(b, a, via, bandwidth)
}

// connectTo makes one direction of an edge.
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
		if into, is := merged[up]; is {
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
		if _, is := merged[id]; !is {
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
		g.connectTo(l.a, l.b, topo.NVL, l.there)
		g.connectTo(l.b, l.a, topo.NVL, l.back)
	}
	if rules != topo.RulesSMI {
		g.joinPeers(h.Switches, merged)
	}
	g.sort()
	return g
}

// sort puts each node's links into the order in which NCCL follows them, for of
// two ways as good the first is taken: the fastest first, and the one upwards
// last (ncclTopoConnectNodes, ncclTopoSort).
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

// joinPeers joins switches that pass traffic to each other beside the CPU
// (NCCL's ncclTopoAddPciLinks).
func (g *graph) joinPeers(switches []topo.Switch, merged map[NodeID]NodeID) {
	joined := map[[2]NodeID]bool{}
	for _, s := range switches {
		for _, peer := range s.Peers {
			a, b := NodeID{SwitchNode, s.Host, s.BusID}, NodeID{SwitchNode, s.Host, peer}
			for _, end := range []*NodeID{&a, &b} {
				if into, is := merged[*end]; is {
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

// mergedSwitches tells which switch counts as part of the one above it. Some of
// Broadcom's present themselves as two levels and have the full bandwidth
// between all ports; NCCL counts them as one (ncclTopoFlattenBcmSwitches).
func mergedSwitches(switches []topo.Switch) map[NodeID]NodeID {
	byID := make(map[NodeID]topo.Switch, len(switches))
	anyOf := false
	for _, s := range switches {
		byID[NodeID{SwitchNode, s.Host, s.BusID}] = s
		anyOf = anyOf || broadcomGeneration(s.Device, 0) > 0
	}
	if !anyOf {
		return nil
	}
	merged := map[NodeID]NodeID{}
	// Top down, for what is merged merges nothing itself. A tree has no cycle,
	// and a chain is no longer than there are switches.
	settled := map[NodeID]bool{}
	var settle func(id NodeID)
	settle = func(id NodeID) {
		s, there := byID[id]
		if settled[id] || !there {
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

// broadcomGeneration is the PCIe generation of a Broadcom switch in base mode, 0
// for any other device; level is 0 for its upper half and 1 for the lower
// (NCCL's getBcmGen).
func broadcomGeneration(d topo.PCIIdentity, level uint64) int {
	const most = 0xfffffffffffff000
	switch id := d.Number(); {
	case id&most == 0x1000c0101000a000:
		return 4
	case id&most == 0x1000c03010000000|level*0x1000:
		return 5
	}
	return 0
}

type nvlink struct {
	a, b        NodeID
	there, back float64 // bandwidths
}

// nvlinks gives each pair of nodes that NVLinks join, once: two GPUs list the
// same links from either end, each with the bandwidth that it can send at. Where
// only one does, it holds for both ways.
func nvlinks(gpus []topo.GPU) []nvlink {
	exists := map[NodeID]bool{}
	for _, g := range gpus {
		exists[NodeID{GPUNode, g.Host, g.BusID}] = true
	}
	var links []nvlink
	index := map[[2]NodeID]int{}
	for _, g := range gpus {
		for _, l := range g.NVLinks {
			a, b := NodeID{GPUNode, g.Host, g.BusID}, NodeID{Kind: NvswitchNode}
			if l.Peer != "" {
				b = NodeID{GPUNode, g.Host, l.Peer}
				if b == a || !exists[b] {
					continue // some virtual machines name the GPU itself as the far end
				}
			}
			if i, known := index[[2]NodeID{b, a}]; known {
				links[i].back = l.Bandwidth
				continue
			}
			index[[2]NodeID{a, b}] = len(links)
			links = append(links, nvlink{a, b, l.Bandwidth, l.Bandwidth})
		}
	}
	return links
}

// step is the best way known to a node.
type step struct {
	topo.Path
	hops int
	// from is the node before this one; -1 for the first.
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

// found is what a search found: the nearest ways between one node and all others.
type found struct {
	graph *graph
	base  int
	best  []step // [node]: the way from there
}

// search searches from one node after the other. It keeps its memory, for a large
// host has hundreds to begin at.
type search struct {
	graph *graph
	rules topo.Rules
	// found is of the last search, and the next one overwrites it; set to nil it
	// stays for whoever has it.
	found *found
	// queued is the level that a node waits for, now and next are the nodes of
	// this level and of the one after it.
	queued    []int
	now, next []int
	level     int
}

// from searches breadth first, level by level; a node whose way gets better is
// visited again. No way has more than the given bandwidth.
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
				way := step{topo.Path{Type: max(so.Type, via), Bandwidth: min(so.Bandwidth, l.bandwidth)}, so.hops + 1, at}
				switch {
				case l.to != otherCPUs:
					s.offer(l.to, way)
				case so.from < 0 || g.nodes[so.from].Kind != CPUNode:
					for _, to := range g.cpus[g.nodes[at].Host] {
						s.offer(to, way)
					}
					// Else the CPU before this one has offered them all as good a way.
				}
			}
		}
		s.now, s.next = s.next, s.now
	}
}

// offer tells a node of a way to it.
func (s *search) offer(to int, way step) {
	if !way.better(s.found.best[to]) {
		return
	}
	s.found.best[to] = way
	if s.queued[to] != s.level {
		s.queued[to] = s.level
		s.next = append(s.next, to)
	}
}

// passes: nothing goes through a GPU, which so leads to, but NVLink between two
// neighbours of it, and for nvidia-smi not even that.
func (s *search) passes(so step, l link) bool {
	return s.rules != topo.RulesSMI && l.via == topo.NVL && s.graph.nodes[l.to].Kind == GPUNode && so.hops <= 1
}

// Nearest is a path, and how to learn what is on it.
type Nearest struct {
	topo.Path
	hops int // links that are passed
	// found has the steps from the node from, until the next search; nil where a
	// matrix states the path.
	found *found
	from  int
}

// Ways are those that one search found, to keep while its finder searches again:
// after each node comes next, and -1 at the end.
type Ways struct {
	graph *graph
	next  []int32
}

// Ways are those of the last search; nil where a matrix states the paths.
func (f PathFinder) Ways() *Ways {
	if f.graph == nil {
		return nil
	}
	t := &Ways{f.graph, make([]int32, len(f.graph.nodes))}
	for at := range t.next {
		t.next[at] = int32(f.search.found.best[at].from)
	}
	return t
}

// Route is a way to keep.
type Route struct {
	topo.Path
	from int
	in   *Ways
}

// Route keeps a way, which is one of those.
func (w Nearest) Route(in *Ways) Route { return Route{w.Path, w.from, in} }

// Nodes are on the way, from the first device to the last; none for DIS, and where
// a matrix states the path.
func (r Route) Nodes() (nodes []NodeID) {
	if r.in == nil || r.Type == topo.DIS {
		return nil
	}
	for at := int32(r.from); at >= 0; at = r.in.next[at] {
		nodes = append(nodes, r.in.graph.nodes[at])
	}
	return nodes
}

// PathFinder finds paths of one host by one set of rules.
type PathFinder struct {
	host   *topo.Host
	rules  topo.Rules
	graph  *graph // nil where a matrix states the paths
	search *search
}

func NewPathFinder(h *topo.Host, rules topo.Rules) PathFinder {
	f := PathFinder{host: h, rules: rules}
	if h.Matrix == nil {
		f.graph = newGraph(h, rules)
		f.search = &search{graph: f.graph, rules: rules}
	}
	return f
}

// To finds the ways from any device to one, by a search that begins at the end, as
// NCCL's do. It tells them until it is asked for those to another device, or keep.
func (f PathFinder) To(b Endpoint) func(a Endpoint) Nearest {
	if f.graph == nil {
		return func(a Endpoint) Nearest { return f.told(a, b) }
	}
	bandwidth := float64(bandwidths.Local)
	if b.rate > 0 {
		bandwidth = min(bandwidth, b.rate)
	}
	f.search.from(f.graph.index[b.ID], bandwidth)
	found := f.search.found
	return func(a Endpoint) Nearest { return f.way(found, f.graph.index[a.ID], &a, &b) }
}

// way is one that a search found from a node.
func (f PathFinder) way(found *found, from int, a, b *Endpoint) Nearest {
	s := &found.best[from]
	return Nearest{finish(s.Path, a, b, f.rules), s.hops, found, from}
}

// between finds the ways from all of these devices to each, and tells of each pair.
// It is to without a search for the node of each device of each pair.
func (f PathFinder) between(ends []Endpoint, tell func(from, to int, w Nearest)) {
	nodes := make([]int, len(ends))
	if f.graph != nil {
		for i := range ends {
			nodes[i] = f.graph.index[ends[i].ID]
		}
	}
	// finish leaves these paths as they are.
	plain := make([]bool, len(ends))
	for i := range ends {
		plain[i] = f.rules == topo.RulesNCCL && ends[i].rate == 0
	}
	for j := range ends {
		to := f.To(ends[j])
		if f.graph == nil {
			for i := range ends {
				if i != j {
					tell(i, j, to(ends[i]))
				}
			}
			continue
		}
		found := f.search.found
		for i, node := range nodes {
			switch {
			case i == j:
			case plain[i] && plain[j]:
				s := &found.best[node]
				tell(i, j, Nearest{s.Path, s.hops, found, node})
			default:
				tell(i, j, f.way(found, node, &ends[i], &ends[j]))
			}
		}
	}
}

// keep lets the ways to one device be told on when those to another are asked for.
func (f PathFinder) keep() {
	if f.search != nil {
		f.search.found = nil
	}
}

// told is a way that a matrix states.
func (f PathFinder) told(a, b Endpoint) Nearest {
	if a.ID == b.ID && a.Name == b.Name {
		return Nearest{Path: topo.Path{Type: topo.LOC, Bandwidth: 0}}
	}
	t, there := f.host.Matrix[[2]string{a.Name, b.Name}]
	if !there {
		t = topo.DIS
	}
	return Nearest{Path: topo.Path{Type: t}}
}

// finish applies what the graph does not know: NODE, P2C, and the speed of the
// network behind a NIC.
func finish(p topo.Path, a, b *Endpoint, rules topo.Rules) topo.Path {
	if p.Type == topo.DIS {
		return p
	}
	if rules != topo.RulesNCCL && p.Type == topo.PHB && a.hostBridge != "" && b.hostBridge != "" && a.hostBridge != b.hostBridge {
		p.Type = topo.NODE
	}
	if rules == topo.RulesPlan && (p.Type == topo.PHB || p.Type == topo.NODE) && (a.c2c && b.isNIC || a.isNIC && b.c2c) {
		p.Type = topo.P2C // as NCCL merges the two parts of the way (addInterStep)
	}
	if rules == topo.RulesSMI && p.Type == topo.LOC && a.Name != b.Name {
		p.Type = topo.PIX // two NICs of one card
	}
	if a.rate > 0 {
		p.Bandwidth = min(p.Bandwidth, a.rate)
	}
	if b.rate > 0 {
		p.Bandwidth = min(p.Bandwidth, b.rate)
	}
	return p
}
