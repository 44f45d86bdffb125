package topo

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Path is the nearest way between two devices.
type Path struct {
	Type PathType `json:"type"`
	// Bandwidth is that of the narrowest link on the way, GB/s (1e9 bytes) in
	// one direction, as NCCL reckons it; 0 where the source tells none.
	Bandwidth float64 `json:"bandwidth"`
}

// Rules say by whose words paths are named, where two name a pair differently.
type Rules string

// The rules that there are.
const (
	// RulesNCCL names as NCCL 2.30 does (src/graph/paths.cc, ncclTopoSetPaths).
	RulesNCCL Rules = "nccl"
	// RulesSMI names as `nvidia-smi topo -m` does: two host bridges of one NUMA
	// node are NODE and not PHB, only direct NVLinks and NVSwitches are NVL, and
	// no two switches count as one.
	RulesSMI Rules = "smi"
	// rulesPlan are NCCL's, but for NODE, which gdr.max_path can tell from PHB, and
	// P2C, which NCCL finds only later.
	rulesPlan Rules = "plan"
)

// ParseRules reads the name of rules.
func ParseRules(s string) (Rules, error) {
	switch r := Rules(s); r {
	case RulesNCCL, RulesSMI:
		return r, nil
	}
	return "", fmt.Errorf("rules %q are none of nccl, smi", s)
}

// localBandwidth is NCCL's figure for a way that passes no link (LOC_BW).
const localBandwidth = 5000

// unknownNetBandwidth is NCCL's figure for a <net> that states no speed
// (ncclTopoAddNet), GB/s: 10 Gbit/s.
const unknownNetBandwidth = 1.25

// Path finds the nearest way between two devices, each named by its PCI address
// or, for a NIC, by its name; on one of several hosts by "HOST/NAME". The rules
// are NCCL's, before its policies on P2P, GPUDirect and PXN.
func (h *Host) Path(busA, busB string) (Path, error) {
	devices := h.devices()
	a, err := findDevice(devices, busA)
	if err != nil {
		return Path{}, err
	}
	b, err := findDevice(devices, busB)
	if err != nil {
		return Path{}, err
	}
	return newPathFinder(h, RulesNCCL).to(b)(a).Path, nil
}

// endpoint is what a path can begin and end at.
type endpoint struct {
	id         nodeID
	name       string // as Pair has it
	busID      string
	hostBridge string
	rate       float64 // GB/s of a NIC's port; 0 where unknown or no NIC
	isNIC, c2c bool
}

func gpuEndpoint(g GPU) endpoint {
	return endpoint{id: nodeID{gpuNode, g.Host, g.BusID}, name: g.BusID, busID: g.BusID, hostBridge: g.HostBridge, c2c: g.C2C > 0}
}

func nicEndpoint(n NIC, source Source) endpoint {
	rate := n.RateGbps() / 8
	if rate == 0 && source.Kind == SourceNCCLXML && len(n.Ports) > 0 {
		rate = unknownNetBandwidth
	}
	return endpoint{id: nicID(n), name: n.Name, busID: n.BusID, hostBridge: n.HostBridge, rate: rate, isNIC: true}
}

// devices are the GPUs and then the NICs of a host.
func (h *Host) devices() []endpoint {
	all := make([]endpoint, 0, len(h.GPUs)+len(h.NICs))
	for _, g := range h.GPUs {
		all = append(all, gpuEndpoint(g))
	}
	for _, n := range h.NICs {
		all = append(all, nicEndpoint(n, h.Source))
	}
	return all
}

func findDevice(devices []endpoint, name string) (endpoint, error) {
	host, local, qualified := strings.Cut(name, "/")
	named := func(d endpoint) bool { return d.name == name }
	if !qualified || slices.ContainsFunc(devices, named) { // a file's names can have any character
		host, local, qualified = "", name, false
	}
	busID, notBusID := ParseBusID(local)
	var found []endpoint
	for _, suits := range []func(endpoint) bool{
		func(d endpoint) bool { return d.name == local },
		func(d endpoint) bool { return notBusID == nil && d.busID == busID && !d.isNIC },
		func(d endpoint) bool { return notBusID == nil && d.busID == busID },
	} {
		for _, d := range devices {
			if suits(d) && local != "" && (!qualified || d.id.host == host) {
				found = append(found, d)
			}
		}
		if len(found) > 0 {
			break
		}
	}
	switch {
	case len(found) == 0:
		return endpoint{}, fmt.Errorf("no path to %q: it is neither the PCI address of a GPU or NIC nor the name of a NIC of this host", name)
	case len(found) > 1 && found[0].id.host != found[1].id.host:
		return endpoint{}, fmt.Errorf("no path to %q: hosts %s and %s both have it; name it as %s/%s",
			name, found[0].id.host, found[1].id.host, found[0].id.host, name)
	}
	return found[0], nil
}

type nodeKind int

const (
	cpuNode nodeKind = iota
	switchNode
	nvswitchNode
	gpuNode
	nicNode
)

// nodeID names a node. NVSwitches are one node for all hosts, as in NCCL: they
// can join the GPUs of several.
type nodeID struct {
	kind nodeKind
	host string
	name string
}

func (n nodeID) String() string {
	switch n.kind {
	case cpuNode:
		return "NUMA node " + n.name
	case switchNode:
		return "switch " + n.name
	case nvswitchNode:
		return "NVSwitches"
	case gpuNode:
		return "GPU " + n.name
	}
	return "NIC " + n.name
}

// nicID names a NIC's card; ports that a source lists as devices of their own
// share it, and so do functions.
func nicID(n NIC) nodeID {
	if card := n.card(); card != "" {
		return nodeID{nicNode, n.Host, card}
	}
	return nodeID{nicNode, n.Host, n.Name}
}

func cpuID(host string, numa int) nodeID { return nodeID{cpuNode, host, fmt.Sprint(numa)} }

// link is one direction of an edge.
type link struct {
	to        int      // or otherCPUs
	via       PathType // what it makes of a path, unless that is NVB
	bandwidth float64
	up        bool // to what a device or switch is plugged into
}

// otherCPUs is where a link leads that joins a CPU to all others of its host. A
// kernel can have 1024 NUMA nodes, which are a million pairs.
const otherCPUs = -1

type graph struct {
	nodes []nodeID
	links [][]link
	index map[nodeID]int
	cpus  map[string][]int // of each host, nodes
}

func (g *graph) node(id nodeID) int {
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
func (g *graph) connect(a, b nodeID, via PathType, bandwidth float64) {
	g.connectTo(a, b, via, bandwidth)
	g.connectTo(b, a, via, bandwidth)
}

// connectTo makes one direction of an edge.
func (g *graph) connectTo(a, b nodeID, via PathType, bandwidth float64) {
	switch {
	case a.kind == switchNode && b.kind == switchNode:
		via = PXB
	case via == PIX && (a.kind == cpuNode || b.kind == cpuNode):
		via = PHB
	}
	i, j := g.node(a), g.node(b)
	g.links[i] = append(g.links[i], link{to: j, via: via, bandwidth: bandwidth})
}

func newGraph(h *Host, rules Rules) *graph {
	g := &graph{index: map[nodeID]int{}, cpus: map[string][]int{}}
	var merged map[nodeID]nodeID
	if rules != RulesSMI {
		merged = mergedSwitches(h.Switches)
	}
	above := func(host string, p Place, numa int) nodeID {
		if p.Switch == "" {
			return cpuID(host, numa)
		}
		up := nodeID{switchNode, host, p.Switch}
		if into, is := merged[up]; is {
			return into
		}
		return up
	}
	plug := func(id nodeID, p Place, numa int) {
		g.connect(id, above(id.host, p, numa), PIX, p.Link)
		of := g.links[g.index[id]]
		of[len(of)-1].up = true
	}
	for _, c := range h.CPUs {
		at := g.node(cpuID(c.Host, c.NUMA))
		g.cpus[c.Host] = append(g.cpus[c.Host], at)
		g.links[at] = append(g.links[at], link{to: otherCPUs, via: SYS, bandwidth: c.Socket})
	}
	for _, s := range h.Switches {
		id := nodeID{switchNode, s.Host, s.BusID}
		if _, is := merged[id]; !is {
			plug(id, s.Place, s.NUMA)
		}
	}
	for _, gpu := range h.GPUs {
		id := nodeID{gpuNode, gpu.Host, gpu.BusID}
		plug(id, gpu.Place, gpu.NUMA)
		if rules == RulesSMI {
			continue
		}
		if gpu.C2C > 0 {
			g.connect(id, cpuID(gpu.Host, gpu.NUMA), C2C, gpu.C2C)
		}
		if gpu.NVLinkCPU > 0 { // POWER9
			g.connect(id, cpuID(gpu.Host, gpu.NUMA), NVL, gpu.NVLinkCPU)
		}
	}
	plugged := map[nodeID]bool{}
	for _, n := range h.NICs {
		for _, function := range []NIC{n, n.own()} {
			if id := nicID(function); !plugged[id] {
				plugged[id] = true
				plug(id, function.Place, function.NUMA)
			}
		}
	}
	for _, l := range nvlinks(h.GPUs) {
		g.connectTo(l.a, l.b, NVL, l.there)
		g.connectTo(l.b, l.a, NVL, l.back)
	}
	if rules != RulesSMI {
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
func (g *graph) joinPeers(switches []Switch, merged map[nodeID]nodeID) {
	joined := map[[2]nodeID]bool{}
	for _, s := range switches {
		for _, peer := range s.Peers {
			a, b := nodeID{switchNode, s.Host, s.BusID}, nodeID{switchNode, s.Host, peer}
			for _, end := range []*nodeID{&a, &b} {
				if into, is := merged[*end]; is {
					*end = into
				}
			}
			_, known := g.index[b]
			if a == b || !known || joined[[2]nodeID{a, b}] {
				continue
			}
			joined[[2]nodeID{a, b}], joined[[2]nodeID{b, a}] = true, true
			g.connect(a, b, LOC, localBandwidth)
		}
	}
}

// mergedSwitches tells which switch counts as part of the one above it. Some of
// Broadcom's present themselves as two levels and have the full bandwidth
// between all ports; NCCL counts them as one (ncclTopoFlattenBcmSwitches).
func mergedSwitches(switches []Switch) map[nodeID]nodeID {
	byID := make(map[nodeID]Switch, len(switches))
	anyOf := false
	for _, s := range switches {
		byID[nodeID{switchNode, s.Host, s.BusID}] = s
		anyOf = anyOf || broadcomGeneration(s.Device, 0) > 0
	}
	if !anyOf {
		return nil
	}
	merged := map[nodeID]nodeID{}
	// Top down, for what is merged merges nothing itself. A tree has no cycle,
	// and a chain is no longer than there are switches.
	settled := map[nodeID]bool{}
	var settle func(id nodeID)
	settle = func(id nodeID) {
		s, there := byID[id]
		if settled[id] || !there {
			return
		}
		settled[id] = true
		if s.Switch == "" {
			return
		}
		up := nodeID{switchNode, s.Host, s.Switch}
		settle(up)
		_, gone := merged[up]
		generation := broadcomGeneration(byID[up].Device, 0)
		if !gone && generation > 0 && broadcomGeneration(s.Device, 1) == generation {
			merged[id] = up
		}
	}
	for _, s := range switches {
		settle(nodeID{switchNode, s.Host, s.BusID})
	}
	return merged
}

// broadcomGeneration is the PCIe generation of a Broadcom switch in base mode, 0
// for any other device; level is 0 for its upper half and 1 for the lower
// (NCCL's getBcmGen).
func broadcomGeneration(d PCIIdentity, level uint64) int {
	const most = 0xfffffffffffff000
	switch id := d.number(); {
	case id&most == 0x1000c0101000a000:
		return 4
	case id&most == 0x1000c03010000000|level*0x1000:
		return 5
	}
	return 0
}

type nvlink struct {
	a, b        nodeID
	there, back float64 // bandwidths
}

// nvlinks gives each pair of nodes that NVLinks join, once: two GPUs list the
// same links from either end, each with the bandwidth that it can send at. Where
// only one does, it holds for both ways.
func nvlinks(gpus []GPU) []nvlink {
	exists := map[nodeID]bool{}
	for _, g := range gpus {
		exists[nodeID{gpuNode, g.Host, g.BusID}] = true
	}
	var links []nvlink
	index := map[[2]nodeID]int{}
	for _, g := range gpus {
		for _, l := range g.NVLinks {
			a, b := nodeID{gpuNode, g.Host, g.BusID}, nodeID{kind: nvswitchNode}
			if l.Peer != "" {
				b = nodeID{gpuNode, g.Host, l.Peer}
				if b == a || !exists[b] {
					continue // some virtual machines name the GPU itself as the far end
				}
			}
			if i, known := index[[2]nodeID{b, a}]; known {
				links[i].back = l.Bandwidth
				continue
			}
			index[[2]nodeID{a, b}] = len(links)
			links = append(links, nvlink{a, b, l.Bandwidth, l.Bandwidth})
		}
	}
	return links
}

// step is the best way known to a node.
type step struct {
	Path
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
	rules Rules
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
		best[i] = step{Path{DIS, 0}, 0, -1}
	}
	best[base] = step{Path{LOC, bandwidth}, 0, -1}
	s.now = append(s.now[:0], base)
	for s.level = 1; len(s.now) > 0; s.level++ {
		s.next = s.next[:0]
		for _, at := range s.now {
			so := best[at]
			through := at != base && g.nodes[at].kind == gpuNode
			for _, l := range g.links[at] {
				via := l.via
				if through {
					if !s.passes(so, l) {
						continue
					}
					if so.Type == NVL {
						via = NVB
					}
				}
				way := step{Path{max(so.Type, via), min(so.Bandwidth, l.bandwidth)}, so.hops + 1, at}
				switch {
				case l.to != otherCPUs:
					s.offer(l.to, way)
				case so.from < 0 || g.nodes[so.from].kind != cpuNode:
					for _, to := range g.cpus[g.nodes[at].host] {
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
	return s.rules != RulesSMI && l.via == NVL && s.graph.nodes[l.to].kind == gpuNode && so.hops <= 1
}

// way is a path, and how to learn what is on it.
type way struct {
	Path
	hops int // links that are passed
	// found has the steps from the node from, until the next search; nil where a
	// matrix states the path.
	found *found
	from  int
}

// ways are those that one search found, to keep while its finder searches again:
// after each node comes next, and -1 at the end.
type ways struct {
	graph *graph
	next  []int32
}

// ways are those of the last search; nil where a matrix states the paths.
func (f pathFinder) ways() *ways {
	if f.graph == nil {
		return nil
	}
	t := &ways{f.graph, make([]int32, len(f.graph.nodes))}
	for at := range t.next {
		t.next[at] = int32(f.search.found.best[at].from)
	}
	return t
}

// route is a way to keep.
type route struct {
	Path
	from int
	in   *ways
}

// route keeps a way, which is one of those.
func (w way) route(in *ways) route { return route{w.Path, w.from, in} }

// nodes are on the way, from the first device to the last; none for DIS, and where
// a matrix states the path.
func (r route) nodes() (nodes []nodeID) {
	if r.in == nil || r.Type == DIS {
		return nil
	}
	for at := int32(r.from); at >= 0; at = r.in.next[at] {
		nodes = append(nodes, r.in.graph.nodes[at])
	}
	return nodes
}

// pathFinder finds paths of one host by one set of rules.
type pathFinder struct {
	host   *Host
	rules  Rules
	graph  *graph // nil where a matrix states the paths
	search *search
}

func newPathFinder(h *Host, rules Rules) pathFinder {
	f := pathFinder{host: h, rules: rules}
	if h.Matrix == nil {
		f.graph = newGraph(h, rules)
		f.search = &search{graph: f.graph, rules: rules}
	}
	return f
}

// to finds the ways from any device to one, by a search that begins at the end, as
// NCCL's do. It tells them until it is asked for those to another device, or keep.
func (f pathFinder) to(b endpoint) func(a endpoint) way {
	if f.graph == nil {
		return func(a endpoint) way { return f.told(a, b) }
	}
	bandwidth := float64(localBandwidth)
	if b.rate > 0 {
		bandwidth = min(bandwidth, b.rate)
	}
	f.search.from(f.graph.index[b.id], bandwidth)
	found := f.search.found
	return func(a endpoint) way { return f.way(found, f.graph.index[a.id], &a, &b) }
}

// way is one that a search found from a node.
func (f pathFinder) way(found *found, from int, a, b *endpoint) way {
	s := &found.best[from]
	return way{finish(s.Path, a, b, f.rules), s.hops, found, from}
}

// between finds the ways from all of these devices to each, and tells of each pair.
// It is to without a search for the node of each device of each pair.
func (f pathFinder) between(ends []endpoint, tell func(from, to int, w way)) {
	nodes := make([]int, len(ends))
	if f.graph != nil {
		for i := range ends {
			nodes[i] = f.graph.index[ends[i].id]
		}
	}
	// finish leaves these paths as they are.
	plain := make([]bool, len(ends))
	for i := range ends {
		plain[i] = f.rules == RulesNCCL && ends[i].rate == 0
	}
	for j := range ends {
		to := f.to(ends[j])
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
				tell(i, j, way{s.Path, s.hops, found, node})
			default:
				tell(i, j, f.way(found, node, &ends[i], &ends[j]))
			}
		}
	}
}

// keep lets the ways to one device be told on when those to another are asked for.
func (f pathFinder) keep() {
	if f.search != nil {
		f.search.found = nil
	}
}

// told is a way that a matrix states.
func (f pathFinder) told(a, b endpoint) way {
	if a.id == b.id && a.name == b.name {
		return way{Path: Path{LOC, 0}}
	}
	t, there := f.host.Matrix[[2]string{a.name, b.name}]
	if !there {
		t = DIS
	}
	return way{Path: Path{Type: t}}
}

// finish applies what the graph does not know: NODE, P2C, and the speed of the
// network behind a NIC.
func finish(p Path, a, b *endpoint, rules Rules) Path {
	if p.Type == DIS {
		return p
	}
	if rules != RulesNCCL && p.Type == PHB && a.hostBridge != "" && b.hostBridge != "" && a.hostBridge != b.hostBridge {
		p.Type = NODE
	}
	if rules == rulesPlan && (p.Type == PHB || p.Type == NODE) && (a.c2c && b.isNIC || a.isNIC && b.c2c) {
		p.Type = P2C // as NCCL merges the two parts of the way (addInterStep)
	}
	if rules == RulesSMI && p.Type == LOC && a.name != b.name {
		p.Type = PIX // two NICs of one card
	}
	if a.rate > 0 {
		p.Bandwidth = min(p.Bandwidth, a.rate)
	}
	if b.rate > 0 {
		p.Bandwidth = min(p.Bandwidth, b.rate)
	}
	return p
}
