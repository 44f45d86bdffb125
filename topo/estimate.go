package topo

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// What the CPU does to data that passes it, as a share of what the same links
// carry below a switch. docs/estimate.md says where the figures come from.
const (
	// bounceShare is what the CPU of a NUMA node forwards through memory to and
	// from the NICs there, of its fastest PCIe link.
	bounceShare = 16.0 / 24
	// gdrShare is what a NIC reads or writes in a GPU's memory through the CPU.
	gdrShare = 11.0 / 24
	// copyShare is what one GPU copies to another through the CPU.
	copyShare = 19.87 / 24
)

// Estimate is what each GPU of a host exchanges with the network as fast as it
// can, three ways. Rates are GB/s in each direction, both at once.
type Estimate struct {
	GPUs []GPUEstimate `json:"gpus"`
	// Uniformity is the slowest GPU's share of the fastest's.
	Uniformity Rates `json:"uniformity"`
}

// GPUEstimate is one GPU's rates.
type GPUEstimate struct {
	GPU   string `json:"gpu"` // PCI address
	Index int    `json:"index"`
	Rates
	// Limit names what is full on its planned way while all GPUs are busy.
	Limit string `json:"limit,omitempty"`
}

// Rates are of the three ways, while all GPUs are busy and with one GPU alone.
type Rates struct {
	Ways
	Alone Ways `json:"alone"`
}

// Ways are the three ways that an estimate compares.
type Ways struct {
	// NCCL is as NCCL does it by its defaults: GPUDirect RDMA with the nearest
	// NIC where that is near, and through the CPU's memory elsewhere.
	NCCL float64 `json:"nccl"`
	// HostMemory is with GPUDirect RDMA switched off everywhere.
	HostMemory float64 `json:"hostMemory"`
	// Relay is as planned.
	Relay float64 `json:"relay"`
}

// ErrNoBandwidths says that a host's source does not tell what an estimate
// needs.
var ErrNoBandwidths = errors.New("the source does not tell the bandwidth of every link, so nothing can be estimated")

// Estimate estimates a plan of this host. It is ErrNoBandwidths where links are
// not known. GPUs that the plan refuses are not in it.
func (h *Host) Estimate(p *Plan) (*Estimate, error) {
	n := newNetwork(h.sorted())
	if !n.known {
		return nil, ErrNoBandwidths
	}
	var planned, today, off []carried
	var gpus []int
	for _, l := range p.Lanes {
		if l.Role == RoleRefused {
			continue
		}
		g := n.gpu(l.GPU)
		if g < 0 {
			return nil, fmt.Errorf("estimating: the plan has a lane of GPU %s, which this host lacks", l.GPU)
		}
		gpus = append(gpus, g)
		planned = append(planned, n.carriedBy(l))
	}
	today = n.today(gpus)
	for _, c := range today {
		if c.kind == KindDirect {
			c.kind = KindBounce
		}
		off = append(off, c)
	}
	e := &Estimate{GPUs: []GPUEstimate{}}
	relay, nccl, memory := n.rates(planned), n.rates(today), n.rates(off)
	for i, g := range gpus {
		e.GPUs = append(e.GPUs, GPUEstimate{
			GPU: n.h.GPUs[g].BusID, Index: n.h.GPUs[g].Index, Limit: relay.limit[i],
			Rates: Rates{
				Ways:  Ways{NCCL: nccl.busy[i], HostMemory: memory.busy[i], Relay: relay.busy[i]},
				Alone: Ways{NCCL: nccl.alone[i], HostMemory: memory.alone[i], Relay: relay.alone[i]},
			},
		})
	}
	e.Uniformity = Rates{
		Ways:  Ways{uniformity(nccl.busy), uniformity(memory.busy), uniformity(relay.busy)},
		Alone: Ways{uniformity(nccl.alone), uniformity(memory.alone), uniformity(relay.alone)},
	}
	return e, nil
}

// uniformity is the least rate's share of the greatest; 0 without any.
func uniformity(rates []float64) float64 {
	if len(rates) == 0 || slices.Max(rates) == 0 {
		return 0
	}
	return slices.Min(rates) / slices.Max(rates)
}

// carried says which way a GPU's traffic goes. GPUs and NICs are places in the
// host's lists.
type carried struct {
	gpu     int
	kind    string // one of Kind…, or "" for no way
	servers []int
	nics    []int
}

// network is a host's links, each direction apart, and the ways over them.
type network struct {
	h     *Host
	toNIC [][]route // [GPU][NIC]
	toGPU [][]route // [GPU][GPU]
	// gpuCPU and nicCPU are the nodes from each device to its CPU.
	gpuCPU, nicCPU [][]nodeID
	// known says that every link has a bandwidth.
	known    bool
	switches map[string]Switch
	pipes    []pipe
	index    map[string]int
}

// pipe is one direction of a link or of a NIC's port, or what a CPU forwards.
type pipe struct {
	name string
	rate float64 // GB/s
}

// load is what a GPU puts on pipes, for each byte that it exchanges in each
// direction.
type load map[int]float64

func newNetwork(h *Host) *network {
	n := &network{h: h, known: h.Matrix == nil, switches: map[string]Switch{}, index: map[string]int{}}
	for _, s := range h.Switches {
		n.switches[s.BusID] = s
		n.known = n.known && s.Link > 0
	}
	for _, g := range h.GPUs {
		n.known = n.known && g.Link > 0
	}
	for _, nic := range h.NICs {
		n.known = n.known && (nic.Link > 0 || nic.refusal() != "")
	}
	finder := newPathFinder(h, rulesPlan)
	n.toGPU, n.toNIC = table[route](len(h.GPUs), len(h.GPUs)), table[route](len(h.GPUs), len(h.NICs))
	for j, peer := range h.GPUs {
		to := finder.to(gpuEndpoint(peer))
		var withoutNVB func(endpoint) way
		for i, g := range h.GPUs {
			w := to(gpuEndpoint(g))
			if w.Type == NVB {
				// A copy engine takes no NVLink through a third GPU.
				if withoutNVB == nil {
					withoutNVB = newPathFinder(h, RulesSMI).to(gpuEndpoint(peer))
				}
				w = withoutNVB(gpuEndpoint(g))
			}
			n.toGPU[i][j] = w.route()
		}
		if n.known {
			n.gpuCPU = append(n.gpuCPU, backwards(to(n.cpu(peer.Host, peer.Place, peer.NUMA))))
		}
	}
	for j, nic := range h.NICs {
		to := finder.to(nicEndpoint(nic, h.Source))
		for i, g := range h.GPUs {
			w := to(gpuEndpoint(g)).route()
			// As NCCL merges the two parts of the way (addInterStep).
			if (w.Type == PHB || w.Type == NODE) && g.C2C > 0 && !w.passesLinkOfNodes() {
				w.Type = P2C
			}
			n.toNIC[i][j] = w
		}
		if n.known {
			n.nicCPU = append(n.nicCPU, backwards(to(n.cpu(nic.Host, nic.Place, nic.NUMA))))
		}
	}
	return n
}

// backwards is what is on a way, from its end.
func backwards(w way) []nodeID {
	nodes := w.route().nodes
	slices.Reverse(nodes)
	return nodes
}

func (w route) passesLinkOfNodes() bool {
	for i := range max(0, len(w.nodes)-1) {
		if w.nodes[i].kind == cpuNode && w.nodes[i+1].kind == cpuNode {
			return true
		}
	}
	return false
}

func (n *network) gpu(busID string) int {
	return slices.IndexFunc(n.h.GPUs, func(g GPU) bool { return g.BusID == busID })
}

func (n *network) nic(name string) int {
	return slices.IndexFunc(n.h.NICs, func(nic NIC) bool { return nic.Name == name })
}

// carriedBy is the way of a lane. One over a NIC that is not in the topology
// carries nothing that could be estimated.
func (n *network) carriedBy(l Lane) carried {
	c := carried{gpu: n.gpu(l.GPU), kind: l.Kind}
	for _, s := range l.Servers {
		c.servers = append(c.servers, n.gpu(s))
	}
	for _, name := range l.NICs {
		i := n.nic(name)
		if i < 0 || n.toNIC[c.gpu][i].Type == DIS && l.Kind != KindStaged {
			return carried{gpu: c.gpu}
		}
		c.nics = append(c.nics, i)
	}
	return c
}

// nearer says whether NIC a is nearer to a GPU than NIC b.
func (n *network) nearer(g, a, b int) bool {
	x, y := n.toNIC[g][a], n.toNIC[g][b]
	return cmp.Or(cmp.Compare(x.Type, y.Type), cmp.Compare(y.Bandwidth, x.Bandwidth)) < 0
}

// today is what NCCL does by its defaults: each GPU takes the NICs that are
// nearest; GPUs with the same nearest NICs deal them out (ncclTopoGetLocalNet).
func (n *network) today(gpus []int) []carried {
	nearest := make([][]int, len(gpus))
	sharing := map[string]int{} // GPUs, by their nearest NICs
	for i, g := range gpus {
		var best []int
		for k, nic := range n.h.NICs {
			if !nic.Active() || nic.Ethernet || nic.Software || n.toNIC[g][k].Type == DIS || len(best) > 0 && n.nearer(g, best[0], k) {
				continue
			}
			if len(best) > 0 && n.nearer(g, k, best[0]) {
				best = nil
			}
			best = append(best, k)
		}
		nearest[i] = best
		sharing[fmt.Sprint(best)]++
	}
	turn := map[string]int{}
	var all []carried
	for i, g := range gpus {
		c := carried{gpu: g}
		best, key := nearest[i], fmt.Sprint(nearest[i])
		for k, nic := range best {
			if k%sharing[key] == turn[key]%len(best) {
				c.nics = append(c.nics, nic)
			}
		}
		turn[key]++
		if len(c.nics) > 0 {
			c.kind = n.todaysKind(g, c.nics[0])
		}
		all = append(all, c)
	}
	return all
}

// todaysKind is direct where NCCL uses GPUDirect RDMA (ncclTopoCheckGdr).
func (n *network) todaysKind(g, nic int) string {
	off := func(gdr *bool) bool { return gdr != nil && !*gdr }
	if n.toNIC[g][nic].Type <= P2C && !off(n.h.NICs[nic].GDR) && !off(n.h.GPUs[g].GDR) {
		return KindDirect
	}
	return KindBounce
}

// rated is what some GPUs get, GB/s; 0 without a way.
type rated struct {
	busy  []float64 // while all of them are busy
	alone []float64
	limit []string // what is full while all are busy
}

// rates shares the host's links out.
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

// alone is the rate of a load that has the host to itself.
func alone(l load, capacity []float64) float64 {
	rates, _ := share([]load{l}, capacity)
	return rates[0]
}

// loads are what ways put on the links.
func (n *network) loads(all []carried) []load {
	lanes := make([]float64, len(n.h.NICs)) // that use a NIC
	for _, c := range all {
		for _, i := range c.nics {
			lanes[i]++
		}
	}
	loads := make([]load, len(all))
	for i, c := range all {
		if c.kind == "" || len(c.nics) == 0 {
			continue
		}
		// A NIC that is shared takes less of each.
		total := 0.0
		shares := make([]float64, len(c.nics))
		for k, nic := range c.nics {
			shares[k] = n.nicRate(nic) / lanes[nic]
			total += shares[k]
		}
		for k := range shares {
			shares[k] /= total
		}
		loads[i] = n.load(c, shares)
	}
	return loads
}

// capacity is what each pipe carries.
func (n *network) capacity() []float64 {
	capacity := make([]float64, len(n.pipes))
	for i, p := range n.pipes {
		capacity[i] = p.rate
	}
	return capacity
}

// nicRate is what a NIC can carry, GB/s: its port or its link. A rate that no
// port states is no limit.
func (n *network) nicRate(i int) float64 {
	nic := n.h.NICs[i]
	rate := cmp.Or(nic.RateGbps()/8, localBandwidth)
	if nic.Link > 0 {
		rate = min(rate, nic.Link)
	}
	return rate
}

// load is what a way puts on the links. shares are those of its NICs, together 1.
func (n *network) load(c carried, shares []float64) load {
	l := load{}
	for k, i := range c.nics {
		part := shares[k]
		if rate := n.h.NICs[i].RateGbps() / 8; rate > 0 {
			l[n.pipe("the port of "+n.h.NICs[i].Name+", sending", rate)] += part
			l[n.pipe("the port of "+n.h.NICs[i].Name+", receiving", rate)] += part
		}
		switch c.kind {
		case KindDirect:
			n.both(l, n.toNIC[c.gpu][i], n.gdrThrough(c.gpu, i), part)
		case KindBounce:
			n.bounce(l, c.gpu, i, part)
		case KindStaged:
			for _, s := range c.servers {
				n.both(l, n.toGPU[c.gpu][s], copyShare, part/float64(len(c.servers)))
				n.both(l, n.toNIC[s][i], n.gdrThrough(s, i), part/float64(len(c.servers)))
			}
		}
	}
	return l
}

// gdrThrough is the share of a NIC's PCIe link that the CPU lets pass between the
// NIC and a GPU's memory. What was measured was from link to link of PCIe, and
// C2C is none.
func (n *network) gdrThrough(gpu, nic int) float64 {
	if n.toNIC[gpu][nic].Type == P2C {
		return 1
	}
	return gdrShare
}

// both adds a way there and back. through is the share of a PCIe link that the
// CPU lets pass.
func (n *network) both(l load, w route, through, part float64) {
	n.thereAndBack(l, slices.Clone(w.nodes), through, part)
}

func (n *network) thereAndBack(l load, nodes []nodeID, through, part float64) {
	for range 2 {
		for i := range max(0, len(nodes)-1) {
			n.hop(l, nodes[i], nodes[i+1], through, part)
		}
		slices.Reverse(nodes)
	}
}

// bounce adds the way through the CPU's memory: from the GPU to its CPU, from
// there to the NIC, and back.
func (n *network) bounce(l load, g, i int, part float64) {
	nodes := slices.Clone(n.gpuCPU[g])
	down := slices.Clone(n.nicCPU[i])
	slices.Reverse(down)
	cpu := down[0]
	if nodes[len(nodes)-1] == cpu {
		down = down[1:]
	}
	n.thereAndBack(l, append(nodes, down...), 1, part)
	// A GPU with a link of its own to the CPU uses that memory as its own.
	if gpu := n.h.GPUs[g]; gpu.C2C == 0 && gpu.NVLinkCPU == 0 {
		if rate := n.forwards(cpu); rate > 0 {
			l[n.pipe("the CPU of "+cpu.String()+", through its memory", rate)] += part
		}
	}
}

// forwards is what the CPU of a NUMA node passes on through memory to and from
// its NICs, in each direction at once.
func (n *network) forwards(cpu nodeID) float64 {
	fastest := 0.0
	add := func(host string, numa int, p Place) {
		if p.Switch == "" && cpuID(host, numa) == cpu && p.Link < localBandwidth {
			fastest = max(fastest, p.Link)
		}
	}
	for _, s := range n.h.Switches {
		add(s.Host, s.NUMA, s.Place)
	}
	for _, g := range n.h.GPUs {
		add(g.Host, g.NUMA, g.Place)
	}
	for _, nic := range n.h.NICs {
		add(nic.Host, nic.NUMA, nic.Place)
	}
	return bounceShare * fastest
}

// cpu is the NUMA node that a device's tree hangs on.
func (n *network) cpu(host string, p Place, numa int) endpoint {
	at := p.Switch
	for range n.switches {
		s, there := n.switches[at]
		if !there {
			break
		}
		at, numa = s.Switch, s.NUMA
	}
	return endpoint{id: cpuID(host, numa)}
}

// hop adds one link in one direction. A PCIe link to or from the CPU carries
// only the given share.
func (n *network) hop(l load, a, b nodeID, through, part float64) {
	name, rate, pcie := n.link(a, b)
	if rate == 0 {
		return // it is no limit
	}
	if pcie && (a.kind == cpuNode || b.kind == cpuNode) {
		part /= through
	}
	l[n.pipe(name, rate)] += part
}

func (n *network) pipe(name string, rate float64) int {
	i, known := n.index[name]
	if !known {
		i = len(n.pipes)
		n.index[name] = i
		n.pipes = append(n.pipes, pipe{name, rate})
	}
	return i
}

// link names the link from one node to the next, and says what it carries; 0
// for one that is no limit.
func (n *network) link(a, b nodeID) (name string, rate float64, pcie bool) {
	switch {
	case a.kind == cpuNode && b.kind == cpuNode:
		return fmt.Sprintf("the link from NUMA node %s to %s", a.name, b.name), min(n.socket(a), n.socket(b)), false
	case a.kind == gpuNode && (b.kind == gpuNode || b.kind == nvswitchNode):
		return fmt.Sprintf("the NVLinks from %s to %s", n.words(a), n.words(b)), n.nvlink(a, b), false
	case a.kind == nvswitchNode:
		return fmt.Sprintf("the NVLinks from %s to %s", n.words(a), n.words(b)), n.nvlink(b, a), false
	case a.kind == gpuNode && b.kind == cpuNode, a.kind == cpuNode && b.kind == gpuNode:
		gpu, direction := a, "to"
		if b.kind == gpuNode {
			gpu, direction = b, "from"
		}
		g := n.h.GPUs[n.gpu(gpu.name)]
		if rate := max(g.C2C, g.NVLinkCPU); rate > 0 {
			return fmt.Sprintf("the chip-to-chip link of %s %s the CPU", n.words(gpu), direction), rate, false
		}
	}
	below, direction := a, "upwards"
	if !n.isBelow(a, b) {
		below, direction = b, "downwards"
		if !n.isBelow(b, a) {
			return "", 0, false // two switches that are joined beside the CPU
		}
	}
	return fmt.Sprintf("the PCIe link of %s %s", n.words(below), direction), n.place(below).Link, true
}

// isBelow says whether a is plugged into b, directly or through switches that
// count as one with it.
func (n *network) isBelow(a, b nodeID) bool {
	if a.kind == cpuNode {
		return false
	}
	if b.kind == cpuNode {
		return true
	}
	at := n.place(a).Switch
	for range n.switches {
		if at == b.name {
			return true
		}
		at = n.switches[at].Switch
	}
	return false
}

func (n *network) place(id nodeID) Place {
	switch id.kind {
	case gpuNode:
		return n.h.GPUs[n.gpu(id.name)].Place
	case nicNode:
		for _, nic := range n.h.NICs {
			if nicID(nic) == id {
				return nic.Place
			}
		}
	}
	return n.switches[id.name].Place
}

// words names a node as people do.
func (n *network) words(id nodeID) string {
	switch id.kind {
	case gpuNode:
		return fmt.Sprintf("GPU %d", n.h.GPUs[n.gpu(id.name)].Index)
	case nicNode:
		for _, nic := range n.h.NICs {
			if nicID(nic) == id {
				return nic.Name
			}
		}
	}
	return id.String()
}

func (n *network) socket(cpu nodeID) float64 {
	for _, c := range n.h.CPUs {
		if cpuID(c.Host, c.NUMA) == cpu {
			return c.Socket
		}
	}
	return 0
}

// nvlink is the bandwidth of a GPU's links to another or to NVSwitches, as
// either end tells it.
func (n *network) nvlink(a, b nodeID) float64 {
	rate := 0.0
	for _, ends := range [][2]nodeID{{a, b}, {b, a}} {
		if ends[0].kind != gpuNode {
			continue
		}
		for _, l := range n.h.GPUs[n.gpu(ends[0].name)].NVLinks {
			if l.Peer == ends[1].name && ends[1].kind == gpuNode || l.Peer == "" && ends[1].kind == nvswitchNode {
				rate = max(rate, l.Bandwidth)
			}
		}
	}
	return rate
}

// share gives every flow the same rate, until something on its way is full; the
// others go on (max-min fairness). full is what stops each flow; -1 for one
// that puts load on nothing, whose rate is 0.
func share(flows []load, capacity []float64) (rates []float64, full []int) {
	rates, full = make([]float64, len(flows)), slices.Repeat([]int{-1}, len(flows))
	left := slices.Clone(capacity)
	open := make([]float64, len(capacity)) // load of the flows that still grow
	growing := map[int]bool{}
	for f, l := range flows {
		for p, weight := range l {
			open[p] += weight
		}
		if len(l) > 0 {
			growing[f] = true
		}
	}
	level := 0.0
	for len(growing) > 0 {
		first, step := -1, 0.0
		for p, weight := range open {
			if weight > 1e-9 && (first < 0 || left[p]/weight < step) {
				first, step = p, left[p]/weight
			}
		}
		level += step
		for p, weight := range open {
			left[p] = max(0, left[p]-weight*step)
		}
		for f := range flows {
			if !growing[f] || flows[f][first] == 0 {
				continue
			}
			delete(growing, f)
			rates[f], full[f] = level, first
			for p, weight := range flows[f] {
				open[p] -= weight
			}
		}
		open[first] = 0
	}
	return rates, full
}
