package topo

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
)

// Measured is what copies on one host were measured to carry. The model takes it in
// place of constants of other machines.
type Measured struct {
	// Fingerprint is that of the host (Host.Fingerprint): another one's figures say
	// nothing.
	Fingerprint string `json:"fingerprint"`
	// At is when it was measured, in Unix seconds.
	At     int64          `json:"at"`
	Copies []MeasuredCopy `json:"copies,omitempty"`
	Memory []MeasuredHost `json:"memory,omitempty"`
}

// MeasuredCopy is the copies between two GPUs that the first one issues, GB/s.
type MeasuredCopy struct {
	GPU  string  `json:"gpu"`  // PCI address
	Peer string  `json:"peer"` // PCI address
	Out  float64 `json:"out"`  // from GPU to Peer
	In   float64 `json:"in"`
}

// MeasuredHost is the copies between a GPU and pinned memory of its host, GB/s.
type MeasuredHost struct {
	GPU string  `json:"gpu"` // PCI address
	Out float64 `json:"out"` // from the GPU
	In  float64 `json:"in"`
}

// mostMeasured is more than any link carries, GB/s.
const mostMeasured = 1e5

// ParseMeasured reads what Measured was written as.
func ParseMeasured(text []byte) (*Measured, error) {
	m := new(Measured)
	if err := json.Unmarshal(text, m); err != nil {
		return nil, err
	}
	check := func(gpu string, rates ...float64) error {
		for _, r := range rates {
			if !(r > 0) || r > mostMeasured {
				return fmt.Errorf("GPU %.40q has a rate of %g GB/s", gpu, r)
			}
		}
		return nil
	}
	for _, c := range m.Copies {
		if err := check(c.GPU, c.Out, c.In); err != nil {
			return nil, err
		}
	}
	for _, c := range m.Memory {
		if err := check(c.GPU, c.Out, c.In); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// Fingerprint tells hosts apart by their devices and by how these are joined: it
// changes when a device comes, goes or is plugged elsewhere, and not with the state of
// a port.
func (h *Host) Fingerprint() string {
	sum := sha256.New()
	add := func(words ...any) { fmt.Fprintln(sum, words...) }
	place := func(p Place) string { return fmt.Sprint(p.HostBridge, p.Switch, p.Link) }
	for _, c := range h.CPUs {
		add("cpu", c.NUMA, c.Vendor, c.Family, c.Model)
	}
	for _, s := range h.Switches {
		add("switch", s.BusID, s.NUMA, place(s.Place))
	}
	for _, g := range h.GPUs {
		add("gpu", g.BusID, g.UUID, g.Name, g.NUMA, place(g.Place), g.C2C, g.NVLinkCPU, len(g.NVLinks))
	}
	for _, n := range h.NICs {
		add("nic", n.Name, n.BusID, n.DataDirect, n.NUMA, place(n.Place))
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
}

// Measure has the model of this host take measured figures, if they are of this host.
func (h *Host) Measure(m *Measured) bool {
	if m == nil || m.Fingerprint != h.Fingerprint() {
		return false
	}
	h.Measured = m
	return true
}

// copied is what copies that a GPU issues to another and from it were measured to
// carry; 0 where nothing was.
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
// issues both, so that each direction has its own measured rate.
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

// memory is what passes the memory of a CPU from its GPUs and to them, as measured between
// it and the fastest of these; 0 where nothing was.
func (n *network) memory(cpu nodeID) (out, in float64) {
	if n.h.Measured == nil {
		return 0, 0
	}
	for _, m := range n.h.Measured.Memory {
		g := n.gpu(m.GPU)
		if g < 0 {
			continue
		}
		if gpu := &n.h.GPUs[g]; n.cpu(gpu.Host, gpu.Place, gpu.NUMA).id == cpu {
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

// ModelLink is what the model takes a link to carry that no PCIe link or NVLink tells.
type ModelLink struct {
	Name   string  `json:"name"`
	Rate   float64 `json:"rate"`   // GB/s in each direction
	Source string  `json:"source"` // SourceMeasured or SourceConstant
}

// ModelLinks are those that the estimate of a plan goes by: the memory of CPUs, and the
// copies of staged lanes through a CPU, or measured ones.
func (h *Host) ModelLinks(p *Plan) (links []ModelLink) {
	n := newNetwork(h.sorted())
	if !n.known {
		return nil
	}
	cpus := map[nodeID]bool{}
	for _, g := range n.h.GPUs {
		cpus[n.cpu(g.Host, g.Place, g.NUMA).id] = true
	}
	for _, cpu := range slices.SortedFunc(maps.Keys(cpus), func(a, b nodeID) int { return cmp.Or(cmp.Compare(a.host, b.host), compareNatural(a.name, b.name)) }) {
		pipes := n.forwarding(cpu)
		if pipes[0] < 0 {
			continue
		}
		source := SourceConstant
		if out, _ := n.memory(cpu); out > 0 {
			source = SourceMeasured
		}
		links = append(links, ModelLink{"host memory of " + cpu.String(), min(n.pipes[pipes[0]].rate, n.pipes[pipes[1]].rate), source})
	}
	for _, l := range p.Lanes {
		g := n.gpu(l.GPU)
		for _, server := range l.Servers {
			s := n.gpu(server)
			if g < 0 || s < 0 {
				continue
			}
			link := ModelLink{Name: fmt.Sprintf("copies between GPU %d and GPU %d", n.h.GPUs[g].Index, n.h.GPUs[s].Index), Source: SourceMeasured}
			if out, in := n.copied(g, s); out > 0 {
				link.Rate = min(out, in)
			} else if path := n.toGPU[g][s].Path; path.Type >= PHB {
				link.Rate, link.Source = path.Bandwidth*copyShare, SourceConstant
			} else {
				continue // what NVLinks and switches carry is no constant of other machines
			}
			links = append(links, link)
		}
	}
	return links
}

// closeCall is the share of the better rate within which another way's rate decides
// nothing, where constants of other machines are in both.
const closeCall = 0.75

// closeCalls are the lanes of which constants decide between the relay and host memory,
// though both are within a quarter: a measurement could turn the decision.
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
