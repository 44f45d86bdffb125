package planner

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
)

// carried holds the routes of the traffic of a GPU. gpu is an index into the GPUs of the host.
// Without parts, the GPU has no route.
type carried struct {
	gpu   int
	parts []part
}

// part is a route of the traffic of a GPU, and the share of the traffic on the route. server and
// nic are indexes into the lists of the host. server is the GPU whose memory the NIC reads and
// writes: the GPU of the traffic for a direct route, throughMemory for the memory of the CPU, and
// another GPU for a staged route.
type part struct {
	server, nic int
	weight      float64
}

// throughMemory is the value of part.server for the memory of the CPU.
const throughMemory = -1

// kind returns the kind of lane that has the part as its only part.
func (p part) kind(gpu int) string {
	switch p.server {
	case gpu:
		return KindDirect
	case throughMemory:
		return KindBounce
	}
	return KindStaged
}

// directions is a set of directions of traffic.
type directions int

const (
	sending directions = 1 << iota
	receiving
	bothDirections = sending | receiving
)

// network holds the links of a host, with a pipe per direction, and the routes over the links.
type network struct {
	h     *topo.Host
	toNIC [][]graph.Route // [GPU][NIC]
	toGPU [][]graph.Route // [GPU][GPU]
	// gpuCPU and nicCPU are the routes to GPUs and NICs from the CPU of the device.
	gpuCPU, nicCPU []graph.Route
	// known reports whether the source states the bandwidth of every link.
	known bool
	// gpus and switches by address, nics by name and cards by node are indexes into the lists of
	// the host. sockets is the bandwidth between CPUs, GB/s.
	gpus, nics, switches map[string]int
	cards                map[graph.NodeID]int
	sockets              map[graph.NodeID]float64
	// owners holds the index of the NIC that owns the port, by index of the NIC that sends over the
	// port.
	owners []int
	pipes  []pipe
	at     []int // [pipe]: index in the load that add extends
	// The maps cache results of earlier calls: hops by the two nodes, ports by NIC, and forwards by
	// CPU.
	hops     map[[2]graph.NodeID]hop
	ports    map[int][2]int
	forwards map[graph.NodeID][2]int
	measured map[[2]int][2]int // copies, by the two GPUs
	loops    map[loopKey][2]int
	// copyRates holds the measured rates of copies between two GPUs, out and in.
	copyRates map[[2]int][2]float64
	// loopRates holds the measured rates of loopbacks, by NIC and GPU, or throughMemory.
	loopRates map[[2]int]float64
}

// pipe is one direction of a link or of the port of a NIC, or the traffic that a CPU forwards
// through memory.
type pipe struct {
	name string
	rate float64 // GB/s
}

// hop is one direction of a link.
type hop struct {
	pipe int // -1 for a link without a limit
	// throughCPU reports whether the link is a PCIe link to or from the CPU.
	throughCPU bool
}

// load lists the pipes that a GPU uses, without duplicates. weight is the number of bytes on the
// pipe while the GPU sends a byte and receives a byte.
type load []onPipe

type onPipe struct {
	pipe   int
	weight float64
}

// add adds weight to a pipe of a load. Pipe -1 is no pipe.
func (n *network) add(l *load, pipe int, weight float64) {
	if pipe < 0 {
		return
	}
	if at := n.at[pipe]; at < len(*l) && (*l)[at].pipe == pipe {
		(*l)[at].weight += weight
		return
	}
	n.at[pipe] = len(*l)
	*l = append(*l, onPipe{pipe, weight})
}

func newNetwork(h *topo.Host) *network {
	n := &network{
		h: h, known: h.Matrix == nil,
		gpus: map[string]int{}, nics: map[string]int{}, switches: map[string]int{}, cards: map[graph.NodeID]int{},
		sockets: map[graph.NodeID]float64{},
		hops:    map[[2]graph.NodeID]hop{}, ports: map[int][2]int{}, forwards: map[graph.NodeID][2]int{},
		measured: map[[2]int][2]int{}, loops: map[loopKey][2]int{},
	}
	for _, c := range h.CPUs {
		n.sockets[graph.CPUID(c.Host, c.NUMA)] = c.Socket
	}
	for i, s := range h.Switches {
		n.switches[s.BusID] = i
		n.known = n.known && s.Link > 0
	}
	for i, g := range slices.Backward(h.GPUs) { // the first GPU with an address counts
		n.gpus[g.BusID] = i
		n.known = n.known && g.Link > 0
	}
	for i, nic := range slices.Backward(h.NICs) {
		n.nics[nic.Name], n.cards[graph.NICID(nic)], n.cards[graph.NICID(nic.OwnFunction())] = i, i, i
		n.known = n.known && (nic.Link > 0 || nic.Refusal() != "")
	}
	n.owners = topo.Owners(h.NICs)
	n.findRoutes()
	return n
}

// findRoutes finds the routes between devices, and between devices and CPUs.
func (n *network) findRoutes() {
	h := n.h
	finder := graph.NewPathFinder(h, topo.RulesPlan)
	n.toGPU, n.toNIC = graph.Matrix[graph.Route](len(h.GPUs), len(h.GPUs)),
		graph.Matrix[graph.Route](len(h.GPUs), len(h.NICs))
	ends := graph.Devices(h)
	gpus, nics := ends[:len(h.GPUs)], ends[len(h.GPUs):]
	var direct *graph.PathFinder
	for j, peer := range gpus {
		to := finder.To(peer)
		found := finder.PathTree()
		var toWithoutNVB func(graph.Endpoint) graph.Nearest
		var withoutNVB *graph.PathTree
		for i, g := range gpus {
			w, in := to(g), found
			if w.Type == topo.NVB {
				// A copy engine takes no NVLink through a third GPU.
				if direct == nil {
					f := graph.NewPathFinder(h, topo.RulesSMI)
					direct = &f
				}
				if withoutNVB == nil {
					toWithoutNVB = direct.To(peer)
					withoutNVB = direct.PathTree()
				}
				w, in = toWithoutNVB(g), withoutNVB
			}
			n.toGPU[i][j] = w.Route(in)
		}
		if n.known {
			g := &h.GPUs[j]
			n.gpuCPU = append(n.gpuCPU, to(n.cpu(g.Host, g.Place, g.NUMA)).Route(found))
		}
	}
	for j, nic := range nics {
		to := finder.To(nic)
		found := finder.PathTree()
		for i, g := range gpus {
			n.toNIC[i][j] = to(g).Route(found)
		}
		if n.known {
			device := h.NICs[j].OwnFunction()
			if device.CardFunction() != h.NICs[j].CardFunction() { // another function reaches host memory
				to = finder.To(graph.NICEndpoint(device, h.Source))
				found = finder.PathTree()
			}
			n.nicCPU = append(n.nicCPU, to(n.cpu(device.Host, device.Place, device.NUMA)).Route(found))
		}
	}
}

// gpu returns the index of a GPU, -1 for an unknown address.
func (n *network) gpu(busID string) int { return placeIn(n.gpus, busID) }

// nic returns the index of a NIC, -1 for an unknown name.
func (n *network) nic(name string) int { return placeIn(n.nics, name) }

func placeIn(places map[string]int, name string) int {
	if i, known := places[name]; known {
		return i
	}
	return -1
}

// carriedBy returns the routes of a lane. The result has no parts if a NIC is not in the topology,
// or if no path joins the GPU to the NIC of a member that is not staged: the planner cannot
// estimate the rate of the lane.
func (n *network) carriedBy(l Lane) carried {
	c := carried{gpu: n.gpu(l.GPU)}
	for _, m := range l.Members {
		i := n.nic(m.NIC)
		server := throughMemory
		if m.Server != "" {
			server = n.gpu(m.Server)
		}
		p := part{server, i, float64(m.Weight)}
		if i < 0 || n.toNIC[c.gpu][i].Type == topo.DIS && p.kind(c.gpu) != KindStaged {
			return carried{gpu: c.gpu}
		}
		c.parts = append(c.parts, p)
	}
	return c
}

// nearer reports whether NIC a is nearer to GPU g than NIC b.
func (n *network) nearer(g, a, b int) bool {
	x, y := n.toNIC[g][a].Path, n.toNIC[g][b].Path
	return cmp.Or(cmp.Compare(x.Type, y.Type), cmp.Compare(y.Bandwidth, x.Bandwidth)) < 0
}

// rated holds the rates of GPUs, GB/s; 0 without a route.
type rated struct {
	busy  []float64 // while every GPU is busy
	alone []float64
	limit []string // name of the full pipe while every GPU is busy
}

// rates shares the links of the host among the GPUs.
func (n *network) rates(all []carried) rated {
	loads := n.loads(all)
	capacity := n.capacity()
	busy, full := share(loads, capacity)
	r := rated{busy, make([]float64, len(all)), make([]string, len(all))}
	for i := range all {
		r.alone[i] = alone(loads[i], capacity)
		if full[i] >= 0 {
			r.limit[i] = n.pipes[full[i]].name
		}
	}
	return r
}

// separateRates shares the links of the host among flows of one direction: GPUs send over the
// routes of send and receive over the routes of receive, and the rates of the two directions are
// independent.
func (n *network) separateRates(send, receive []carried) (sent, received []float64) {
	var flows []load
	for _, c := range send {
		flows = append(flows, n.load(c, sending))
	}
	for _, c := range receive {
		flows = append(flows, n.load(c, receiving))
	}
	rates, _ := share(flows, n.capacity())
	return rates[:len(send)], rates[len(send):]
}

// loads returns the loads of GPUs on the links.
func (n *network) loads(all []carried) []load {
	loads := make([]load, len(all))
	for i, c := range all {
		loads[i] = n.load(c, bothDirections)
	}
	return loads
}

// capacity returns the capacities of pipes, GB/s.
func (n *network) capacity() []float64 {
	capacity := make([]float64, len(n.pipes))
	for i, p := range n.pipes {
		capacity[i] = p.rate
	}
	return capacity
}

// nicRate returns the rate of a NIC, GB/s: the minimum of port and PCIe link. A port without a rate
// is no limit.
func (n *network) nicRate(i int) float64 {
	nic := &n.h.NICs[i]
	rate := cmp.Or(nic.RateGbps()/8, bandwidths.Local)
	if nic.Link > 0 {
		rate = min(rate, nic.Link)
	}
	return rate
}

// load returns the load of a GPU on the links in the directions.
func (n *network) load(c carried, in directions) load {
	var l load
	total := 0.0
	for _, p := range c.parts {
		total += p.weight
	}
	for _, p := range c.parts {
		n.addPart(&l, c.gpu, p, p.weight/total, in)
	}
	return l
}

// addPart adds a route to the load. share is the share of the traffic on the route.
func (n *network) addPart(l *load, gpu int, p part, share float64, in directions) {
	port := n.port(p.nic)
	if in&sending != 0 {
		n.add(l, port[0], share)
	}
	if in&receiving != 0 {
		n.add(l, port[1], share)
	}
	switch p.kind(gpu) {
	case KindDirect:
		n.gdr(l, gpu, p.nic, share, in)
	case KindBounce:
		n.bounce(l, gpu, p.nic, share, in)
	case KindStaged:
		n.copies(l, gpu, p.server, share, in)
		n.gdr(l, p.server, p.nic, share, in)
	}
}

// gdr adds the route between the memory of a GPU and a NIC.
func (n *network) gdr(l *load, gpu, nic int, part float64, in directions) {
	w := n.toNIC[gpu][nic]
	if rate := n.looped(nic, gpu); rate > 0 {
		n.both(l, w, 1, part, in)
		n.looping(l, nic, gpuMemory, rate, part, in)
		return
	}
	n.both(l, w, n.gdrThrough(gpu, nic), part, in)
}

// gdrThrough returns the share of the PCIe link of a NIC that the CPU passes between the NIC and
// the memory of a GPU. gdrShare comes from measurements between two PCIe links. C2C is not a PCIe
// link.
func (n *network) gdrThrough(gpu, nic int) float64 {
	if n.toNIC[gpu][nic].Type == topo.P2C {
		return 1
	}
	return gdrShare
}

// both adds a route in the directions. through is the share of a PCIe link that the CPU passes.
func (n *network) both(l *load, w graph.Route, through, part float64, in directions) {
	n.thereAndBack(l, w.Nodes(), through, part, in)
}

func (n *network) thereAndBack(l *load, nodes []graph.NodeID, through, part float64, in directions) {
	for _, direction := range []directions{sending, receiving} {
		for i := range max(0, len(nodes)-1) {
			if in&direction == 0 {
				break
			}
			h := n.hop(nodes[i], nodes[i+1])
			if h.throughCPU {
				n.add(l, h.pipe, part/through)
			} else {
				n.add(l, h.pipe, part)
			}
		}
		slices.Reverse(nodes)
	}
}

// bounce adds the route through the memory of the CPU: from the GPU to the CPU, from the CPU to the
// NIC, and back.
func (n *network) bounce(l *load, g, i int, part float64, in directions) {
	nodes, down := n.gpuCPU[g].Nodes(), n.nicCPU[i].Nodes()
	slices.Reverse(nodes) // the route begins at the CPU
	cpu := down[0]
	if nodes[len(nodes)-1] == cpu {
		down = down[1:]
	}
	n.thereAndBack(l, append(nodes, down...), 1, part, in)
	if rate := n.looped(i, throughMemory); rate > 0 {
		n.looping(l, i, hostMemory, rate, part, in)
	}
	// A GPU with a C2C link or NVLink to the CPU accesses the memory of the CPU like GPU memory.
	if gpu := &n.h.GPUs[g]; gpu.C2C == 0 && gpu.NVLinkCPU == 0 {
		for i, direction := range []directions{sending, receiving} {
			if in&direction != 0 {
				n.add(l, n.forwarding(cpu)[i], part)
			}
		}
	}
}

// forwarding returns the pipes of the traffic that the CPU of a NUMA node forwards through memory,
// to NICs and from NICs; -1 without a known rate.
func (n *network) forwarding(cpu graph.NodeID) [2]int {
	if p, known := n.forwards[cpu]; known {
		return p
	}
	fastest := 0.0
	add := func(host string, numa int, p *topo.Place) {
		if p.Switch == "" && p.Link < bandwidths.Local && p.Link > fastest && graph.CPUID(host, numa) == cpu {
			fastest = p.Link
		}
	}
	for i := range n.h.Switches {
		s := &n.h.Switches[i]
		add(s.Host, s.NUMA, &s.Place)
	}
	for i := range n.h.GPUs {
		g := &n.h.GPUs[i]
		add(g.Host, g.NUMA, &g.Place)
	}
	for i := range n.h.NICs {
		nic := &n.h.NICs[i]
		add(nic.Host, nic.NUMA, &nic.Place)
	}
	p := [2]int{-1, -1}
	if out, back := n.memory(cpu); out > 0 {
		name := "the CPU of " + cpu.String() + " (through its memory, measured)"
		p = [2]int{n.pipe(name, out), n.pipe(name, back)}
	} else if fastest > 0 {
		for i := range p {
			p[i] = n.pipe("the CPU of "+cpu.String()+" (through its memory)", bounceShare*fastest)
		}
	}
	n.forwards[cpu] = p
	return p
}

// port returns the pipes of the port of a NIC, sending and receiving; -1 if no port states a rate.
// Functions of a port share the pipes.
func (n *network) port(i int) [2]int {
	i = n.owners[i]
	p, known := n.ports[i]
	if !known {
		p = [2]int{-1, -1}
		rate := n.h.NICs[i].RateGbps() / 8
		if rate == 0 { // the physical function is down or states no rate
			for j, owner := range n.owners {
				if owner == i {
					rate = max(rate, n.h.NICs[j].RateGbps()/8)
				}
			}
		}
		if rate > 0 {
			name := "the port of " + n.h.NICs[i].Name
			p = [2]int{n.pipe(name+" (sending)", rate), n.pipe(name+" (receiving)", rate)}
		}
		n.ports[i] = p
	}
	return p
}

// cpu returns the NUMA node at the root of the PCIe tree of a device.
func (n *network) cpu(host string, p topo.Place, numa int) graph.Endpoint {
	at := p.Switch
	for range n.switches {
		i := placeIn(n.switches, at)
		if i < 0 {
			break
		}
		at, numa = n.h.Switches[i].Switch, n.h.Switches[i].NUMA
	}
	return graph.Endpoint{ID: graph.CPUID(host, numa)}
}

// hop returns the link between two consecutive nodes of a route, a and b.
func (n *network) hop(a, b graph.NodeID) hop {
	key := [2]graph.NodeID{a, b}
	h, known := n.hops[key]
	if !known {
		name, rate, pcie := n.link(a, b)
		h = hop{-1, pcie && (a.Kind == graph.CPUNode || b.Kind == graph.CPUNode)}
		if rate > 0 {
			h.pipe = n.pipe(name, rate)
		}
		n.hops[key] = h
	}
	return h
}

func (n *network) pipe(name string, rate float64) int {
	n.pipes, n.at = append(n.pipes, pipe{name, rate}), append(n.at, 0)
	return len(n.pipes) - 1
}

// link returns the name and the bandwidth of the link from a to b, GB/s; 0 for no limit. pcie
// reports whether the link is a PCIe link.
func (n *network) link(a, b graph.NodeID) (name string, rate float64, pcie bool) {
	switch {
	case a.Kind == graph.CPUNode && b.Kind == graph.CPUNode:
		return fmt.Sprintf("the link from NUMA node %s to %s", a.Name, b.Name), min(n.sockets[a], n.sockets[b]), false
	case a.Kind == graph.GPUNode && (b.Kind == graph.GPUNode || b.Kind == graph.NVSwitchNode):
		return fmt.Sprintf("the NVLinks from %s to %s", n.words(a), n.words(b)), n.nvlink(a, b), false
	case a.Kind == graph.NVSwitchNode:
		return fmt.Sprintf("the NVLinks from %s to %s", n.words(a), n.words(b)), n.nvlink(b, a), false
	case a.Kind == graph.GPUNode && b.Kind == graph.CPUNode, a.Kind == graph.CPUNode && b.Kind == graph.GPUNode:
		gpu, direction := a, "to"
		if b.Kind == graph.GPUNode {
			gpu, direction = b, "from"
		}
		g := n.h.GPUs[n.gpu(gpu.Name)]
		if rate := max(g.C2C, g.NVLinkCPU); rate > 0 {
			return fmt.Sprintf("the chip-to-chip link of %s (%s the CPU)", n.words(gpu), direction), rate, false
		}
	}
	below, direction := a, "upwards"
	if !n.isBelow(a, b) {
		below, direction = b, "downwards"
		if !n.isBelow(b, a) {
			return "", 0, false // a link between two switches that bypasses the CPU
		}
	}
	return fmt.Sprintf("the PCIe link of %s (%s)", n.words(below), direction), n.place(below).Link, true
}

// isBelow reports whether a is plugged into b, directly or through switches that count as part of
// b.
func (n *network) isBelow(a, b graph.NodeID) bool {
	if a.Kind == graph.CPUNode {
		return false
	}
	if b.Kind == graph.CPUNode {
		return true
	}
	at := n.place(a).Switch
	for range n.switches {
		if at == b.Name {
			return true
		}
		at = n.above(at)
	}
	return false
}

func (n *network) place(id graph.NodeID) topo.Place {
	switch id.Kind {
	case graph.GPUNode:
		return n.h.GPUs[n.gpu(id.Name)].Place
	case graph.NICNode:
		nic := n.h.NICs[n.cards[id]]
		if nic.CardFunction() != id.Name && nic.Own != nil {
			return nic.Own.Place
		}
		return nic.Place
	}
	if i := placeIn(n.switches, id.Name); i >= 0 {
		return n.h.Switches[i].Place
	}
	return topo.Place{}
}

// above returns the switch above a switch; empty for a switch at a root port.
func (n *network) above(sw string) string {
	if i := placeIn(n.switches, sw); i >= 0 {
		return n.h.Switches[i].Switch
	}
	return ""
}

// words returns the name of a node for messages.
func (n *network) words(id graph.NodeID) string {
	switch id.Kind {
	case graph.GPUNode:
		return fmt.Sprintf("GPU %d", n.h.GPUs[n.gpu(id.Name)].Index)
	case graph.NICNode:
		return n.h.NICs[n.cards[id]].Name
	}
	return id.String()
}

// nvlink returns the bandwidth of the NVLinks from a GPU to another GPU or to NVSwitches, GB/s: the
// maximum of the values that the two ends state.
func (n *network) nvlink(a, b graph.NodeID) float64 {
	rate := 0.0
	for _, ends := range [][2]graph.NodeID{{a, b}, {b, a}} {
		if ends[0].Kind != graph.GPUNode {
			continue
		}
		for _, l := range n.h.GPUs[n.gpu(ends[0].Name)].NVLinks {
			if l.Peer == ends[1].Name && ends[1].Kind == graph.GPUNode || l.Peer == "" && ends[1].Kind == graph.NVSwitchNode {
				rate = max(rate, l.Bandwidth)
			}
		}
	}
	return rate
}
