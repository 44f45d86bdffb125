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

// memory returns the largest measured rates from the GPUs of a CPU to the CPU's memory, and
// from the memory to the GPUs; 0 without a measurement.
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
	return out, in
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

// ModelLinks returns the model links in the estimate of a plan: the memory of CPUs, and copies
// of staged lanes that are measured or pass a CPU.
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
	for _, l := range p.Lanes {
		g := n.gpu(l.GPU)
		for _, server := range l.Servers {
			s := n.gpu(server)
			if g < 0 || s < 0 {
				continue
			}
			link := ModelLink{Name: fmt.Sprintf("copies between GPU %d and GPU %d", n.h.GPUs[g].Index, n.h.GPUs[s].Index),
				Source: SourceMeasured}
			if out, in := n.copied(g, s); out > 0 {
				link.Rate = min(out, in)
			} else if path := n.toGPU[g][s].Path; path.Type >= topo.PHB {
				link.Rate, link.Source = path.Bandwidth*copyShare, SourceConstant
			} else {
				continue // no constant replaces the rate of an NVLink or a switch
			}
			links = append(links, link)
		}
	}
	return links
}

// closeCall is the smallest ratio of two rates that is too close to decide between ways if both
// rates contain constants of other machines.
const closeCall = 0.75

// closeCalls returns the GPUs with lanes whose choice between the relay and host memory depends
// on constants, with rates within a quarter: a measurement could change the choice.
func (p *planner) closeCalls(lanes []Lane) (gpus []int) {
	if p.host.Measured != nil {
		return nil
	}
	for g, l := range lanes {
		if c := l.Compared; c != nil {
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
