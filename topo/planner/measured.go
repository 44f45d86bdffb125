package planner

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
)

// copied returns the measured rates of copies that GPU g issues, to a peer and from the peer; 0
// without a measurement.
func (n *network) copied(g, peer int) (out, in float64) {
	if n.h.Measured == nil {
		return 0, 0
	}
	if n.copyRates == nil {
		n.copyRates = map[[2]int][2]float64{}
		for _, c := range slices.Backward(n.h.Measured.Copies) { // the first of a pair counts
			n.copyRates[[2]int{n.gpu(c.GPU), n.gpu(c.Peer)}] = [2]float64{c.Out, c.In}
		}
	}
	rates := n.copyRates[[2]int{g, peer}]
	return rates[0], rates[1]
}

// copies adds the copies of a staged lane from a GPU to a server, and back. The lane's GPU
// issues both copies, so the directions have separate measured rates.
func (n *network) copies(l *load, g, server int, part float64, in directions) {
	out, back := n.copied(g, server)
	if out == 0 {
		n.both(l, n.toGPU[g][server], copyShare, part, in)
		return
	}
	pipes, known := n.measured[[2]int{g, server}]
	if !known {
		from, to := n.h.GPUs[g].Index, n.h.GPUs[server].Index
		pipes = [2]int{
			n.pipe(fmt.Sprintf("copies from GPU %d to GPU %d (measured)", from, to), out),
			n.pipe(fmt.Sprintf("copies from GPU %d to GPU %d (measured)", to, from), back),
		}
		n.measured[[2]int{g, server}] = pipes
	}
	for i, direction := range []directions{sending, receiving} {
		if in&direction != 0 {
			n.add(l, pipes[i], part)
		}
	}
	n.both(l, n.toGPU[g][server], 1, part, in)
}

// memory returns the largest measured rates from the GPUs and NICs of a CPU to the CPU's memory,
// and from the memory to these; 0 without a measurement.
func (n *network) memory(cpu graph.NodeID) (out, in float64) {
	if n.h.Measured == nil {
		return 0, 0
	}
	for _, m := range n.h.Measured.Memory {
		g := n.gpu(m.GPU)
		if g < 0 {
			continue
		}
		if gpu := &n.h.GPUs[g]; n.cpu(gpu.Host, gpu.Place, gpu.NUMA).ID == cpu {
			out, in = max(out, m.Out), max(in, m.In)
		}
	}
	for i := range n.nicCPU {
		if nodes := n.nicCPU[i].Nodes(); len(nodes) > 0 && nodes[0] == cpu {
			rate := n.looped(i, throughMemory)
			out, in = max(out, rate), max(in, rate)
		}
	}
	return out, in
}

// loopKey names the pipes of a measured loopback: the NIC that owns a port, and the memory at the
// other end.
type loopKey struct {
	nic    int
	memory loopMemory
}

type loopMemory int

const (
	hostMemory loopMemory = iota
	gpuMemory             // of GPUs whose path to the NIC passes a CPU
)

func (m loopMemory) String() string {
	return [...]string{"host memory", "memory of GPUs through the CPU"}[m]
}

// looped returns the measured rate of both directions between a NIC and the memory of a GPU, or
// host memory for throughMemory; 0 without a measurement, or if the path passes no CPU: PCIe links
// have no constant. Functions of a port have the best rate of the port. Both ends of a loopback
// share the link of the NIC, so that between hosts the NIC is at least as fast.
func (n *network) looped(nic, gpu int) float64 {
	if n.h.Measured == nil || len(n.h.Measured.Loops) == 0 {
		return 0
	}
	if n.loopRates == nil {
		n.loopRates = map[[2]int]float64{}
		for _, l := range n.h.Measured.Loops {
			i, g := n.nic(l.NIC), throughMemory
			if l.GPU != "" {
				g = n.gpu(l.GPU)
			}
			if i >= 0 && (l.GPU == "" || g >= 0 && n.toNIC[g][i].Type >= topo.PHB && n.toNIC[g][i].Type < topo.DIS) {
				at := [2]int{n.owners[i], g}
				n.loopRates[at] = max(n.loopRates[at], l.Rate())
			}
		}
	}
	return n.loopRates[[2]int{n.owners[nic], gpu}]
}

// looping adds the traffic of a NIC with a measured rate. GPUs, and functions of a port, share the
// pipe, whose rate is the best of the port's loopbacks.
func (n *network) looping(l *load, nic int, memory loopMemory, rate, part float64, in directions) {
	key := loopKey{n.owners[nic], memory}
	pipes, known := n.loops[key]
	if !known {
		best := rate
		for ends, r := range n.loopRates {
			if ends[0] == key.nic && (ends[1] == throughMemory) == (memory == hostMemory) {
				best = max(best, r)
			}
		}
		name := fmt.Sprintf("%s and %s", n.h.NICs[key.nic].Name, memory)
		pipes = [2]int{n.pipe(name+" (sending, measured)", best), n.pipe(name+" (receiving, measured)", best)}
		n.loops[key] = pipes
	}
	for i, direction := range []directions{sending, receiving} {
		if in&direction != 0 {
			n.add(l, pipes[i], float64(part*n.pipes[pipes[i]].rate/rate))
		}
	}
}

// Sources of a ModelLink.
const (
	SourceMeasured = "measured"
	SourceConstant = "constant"
)

// ModelLink is a link whose rate comes from a measurement or a constant instead of the rate of
// a PCIe link or NVLink.
type ModelLink struct {
	Name   string  `json:"name"`
	Rate   float64 `json:"rate"`   // GB/s per direction
	Source string  `json:"source"` // SourceMeasured or SourceConstant
}

// ModelLinks returns the model links in the estimate of a plan: the memory of CPUs; copies of
// staged lanes, and NICs of direct and staged lanes, that pass a CPU; and all measured copies and
// NICs.
func (p *Plan) ModelLinks(h *topo.Host) (links []ModelLink) {
	n := newNetwork(sortedHost(h))
	if !n.known {
		return nil
	}
	cpus := map[graph.NodeID]bool{}
	for _, g := range n.h.GPUs {
		cpus[n.cpu(g.Host, g.Place, g.NUMA).ID] = true
	}
	for _, cpu := range slices.SortedFunc(maps.Keys(cpus), func(a, b graph.NodeID) int {
		return cmp.Or(cmp.Compare(a.Host, b.Host), topo.CompareNatural(a.Name, b.Name))
	}) {
		pipes := n.forwarding(cpu)
		if pipes[0] < 0 {
			continue
		}
		source := SourceConstant
		if out, _ := n.memory(cpu); out > 0 {
			source = SourceMeasured
		}
		links = append(links, ModelLink{"host memory of " + cpu.String(), min(n.pipes[pipes[0]].rate, n.pipes[pipes[1]].rate),
			source})
	}
	copies, loops := map[[2]int]bool{}, map[[2]int]bool{} // in the lanes; [GPU, server], [NIC, GPU]
	for _, l := range p.Lanes {
		c := n.carriedBy(l)
		for _, q := range c.parts {
			switch q.kind(c.gpu) {
			case KindStaged:
				copies[[2]int{c.gpu, q.server}], loops[[2]int{q.nic, q.server}] = true, true
			case KindDirect:
				loops[[2]int{q.nic, q.server}] = true
			}
		}
	}
	if m := n.h.Measured; m != nil {
		n.copied(0, 0)
		n.looped(0, 0)
		for pair := range n.copyRates {
			if pair[0] >= 0 && pair[1] >= 0 {
				copies[pair] = true
			}
		}
		for pair := range n.loopRates {
			loops[pair] = true
		}
	}
	inOrder := func(pairs map[[2]int]bool) [][2]int {
		return slices.SortedFunc(maps.Keys(pairs), func(a, b [2]int) int { return cmp.Or(a[0]-b[0], a[1]-b[1]) })
	}
	for _, pair := range inOrder(copies) {
		g, s := pair[0], pair[1]
		link := ModelLink{Name: fmt.Sprintf("copies between GPU %d and GPU %d", n.h.GPUs[g].Index, n.h.GPUs[s].Index),
			Source: SourceMeasured}
		if out, in := n.copied(g, s); out > 0 {
			link.Rate = min(out, in)
		} else if path := n.toGPU[g][s].Path; path.Type >= topo.PHB && path.Type < topo.DIS {
			link.Rate, link.Source = path.Bandwidth*copyShare, SourceConstant
		} else {
			continue // no constant replaces the rate of an NVLink or a switch
		}
		links = append(links, link)
	}
	for _, pair := range inOrder(loops) {
		i, g := pair[0], pair[1]
		link := ModelLink{Name: n.h.NICs[i].Name + " and host memory", Rate: n.looped(i, g), Source: SourceMeasured}
		if g != throughMemory {
			link.Name = fmt.Sprintf("%s and memory of GPU %d", n.h.NICs[i].Name, n.h.GPUs[g].Index)
		}
		if link.Rate == 0 {
			path := n.toNIC[g][i].Path
			if path.Type < topo.PHB || path.Type >= topo.DIS {
				continue
			}
			link.Rate, link.Source = path.Bandwidth*n.gdrThrough(g, i), SourceConstant
		}
		links = append(links, link)
	}
	return links
}

// closeCall is the smallest ratio of two rates that is too close to decide between routes if both
// rates contain constants of other machines.
const closeCall = 0.75

// closeCalls returns the GPUs with lanes whose choice between the relay and host memory depends
// on constants, with rates within a quarter: a measurement could change the choice.
func (p *planner) closeCalls(lanes []Lane) (gpus []int) {
	for g, l := range lanes {
		if c := l.Compared; c != nil && !p.measuredLane(g, l) {
			a, b := c.Relay, c.Without
			if compareRoughly(a, b) == 0 {
				a, b = c.RelayAlone, c.WithoutAlone
			}
			if min(a, b) > closeCall*max(a, b) {
				gpus = append(gpus, g)
			}
		}
	}
	return gpus
}

// measuredLane reports whether the rates of a lane's copies through the CPU and of the host memory
// at its NICs are measured.
func (p *planner) measuredLane(g int, l Lane) bool {
	if p.host.Measured == nil {
		return false
	}
	for _, m := range l.Members {
		i := p.nic(m.NIC)
		if i < 0 {
			continue
		}
		if nodes := p.nicCPU[i].Nodes(); len(nodes) > 0 {
			if out, _ := p.memory(nodes[0]); out == 0 {
				return false
			}
		}
		if s := p.gpu(m.Server); s >= 0 && s != g && p.toGPU[g][s].Type >= topo.PHB {
			if out, _ := p.copied(g, s); out == 0 {
				return false
			}
		}
	}
	return true
}

// Loopback is a NIC whose loopback is worth a measurement: with host memory, and with the memory
// of GPUs, by PCI address.
type Loopback struct {
	NIC  string
	GPUs []string
}

// maxLoopbacks bounds the pairs of a NIC and a GPU in Loopbacks.
const maxLoopbacks = 64

// Loopbacks returns the NICs that lanes of a plan of this host can use, each with the GPUs to
// which data passes a CPU, the nearest first: for other GPUs no constant is to be replaced.
// Software RDMA is included if a lane uses it.
func (p *Plan) Loopbacks(h *topo.Host) (list []Loopback) {
	n := newNetwork(sortedHost(h))
	var nics []int
	for i := range n.h.NICs {
		nic := &n.h.NICs[i]
		inLane := slices.ContainsFunc(p.Lanes, func(l Lane) bool { return slices.Contains(l.NICs, nic.Name) })
		if inLane || nic.Refusal() == "" && nic.Active() && nic.Parent() == "" && !nic.Software {
			nics = append(nics, i)
		}
	}
	for _, i := range nics {
		var gpus []int
		for g := range n.h.GPUs {
			lane, err := p.Lane(n.h.GPUs[g].BusID)
			path := n.toNIC[g][i].Path
			if err == nil && lane.Role != RoleRefused && path.Type >= topo.PHB && path.Type < topo.DIS {
				gpus = append(gpus, g)
			}
		}
		slices.SortStableFunc(gpus, func(a, b int) int {
			x, y := n.toNIC[a][i].Path, n.toNIC[b][i].Path
			return cmp.Or(cmp.Compare(x.Type, y.Type), cmp.Compare(y.Bandwidth, x.Bandwidth))
		})
		l := Loopback{NIC: n.h.NICs[i].Name}
		for _, g := range gpus[:min(len(gpus), max(1, maxLoopbacks/len(nics)))] {
			l.GPUs = append(l.GPUs, n.h.GPUs[g].BusID)
		}
		list = append(list, l)
	}
	return list
}
