package planner

import (
	"errors"
	"fmt"
	"slices"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
)

// Rates through the CPU, as a share of the rate of the same links below a switch.
// docs/estimate.md has the sources of the figures.
const (
	// bounceShare is the rate at which the CPU of a NUMA node forwards through memory to and
	// from the node's NICs, as a share of the fastest PCIe link.
	bounceShare = 16.0 / 24
	// gdrShare is the rate at which a NIC reads or writes a GPU's memory through the CPU.
	gdrShare = 11.0 / 24
	// copyShare is the rate of a copy between two GPUs through the CPU.
	copyShare = 19.87 / 24
)

// Estimate has the largest rates between the GPUs of a host and the network, for several routes.
// Rates are GB/s per direction.
type Estimate struct {
	GPUs []GPUEstimate `json:"gpus"`
	// Uniformity is the slowest GPU's share of the fastest's.
	Uniformity Rates `json:"uniformity"`
	// PXN is true if PXN changes the route of a GPU of this host.
	PXN bool `json:"pxn"`
}

// GPUEstimate has the rates of a GPU.
type GPUEstimate struct {
	GPU   string `json:"gpu"` // PCI address
	Index int    `json:"index"`
	Rates
	// Send and Receive are the rates of a single direction: with all GPUs of the host busy in
	// both directions, and with only this GPU busy.
	Send    Rates `json:"send"`
	Receive Rates `json:"receive"`
	// Limit names the full link on the planned route while all GPUs are busy: "the port of mlx5_0
	// (sending)".
	Limit string `json:"limit,omitempty"`
}

// Rates has the common rate of both directions: with all GPUs of the host busy, and with only
// one GPU busy.
type Rates struct {
	RouteRates
	Alone RouteRates `json:"alone"`
}

// RouteRates has the rates of the routes that an estimate compares.
type RouteRates struct {
	// NCCL is the rate with NCCL's defaults, without PXN: GPUDirect RDMA if the nearest NIC is
	// near, otherwise through the CPU's memory.
	NCCL float64 `json:"nccl"`
	// PXN is the rate with NCCL's defaults and PXN. With PXN, NCCL sends through a GPU near the
	// NIC if the ranks of both GPUs share a container. PXN does not change receiving.
	PXN float64 `json:"ncclPXN"`
	// HostMemory is with GPUDirect RDMA switched off everywhere.
	HostMemory float64 `json:"hostMemory"`
	// Relay is as planned.
	Relay float64 `json:"relay"`
}

// ErrNoBandwidths means that the source of a host lacks the bandwidth of a link.
var ErrNoBandwidths = errors.New("the source does not state the bandwidth of every link, so nothing can be estimated")

// Estimate estimates the rates of a plan of this host. Estimate returns ErrNoBandwidths if the
// bandwidth of a link is unknown. The result omits GPUs that the plan refuses.
func (p *Plan) Estimate(h *topo.Host) (*Estimate, error) {
	n := newNetwork(sortedHost(h))
	if !n.known {
		return nil, ErrNoBandwidths
	}
	var planned, off []carried
	var gpus []int
	for _, l := range p.Lanes {
		if l.Role == RoleRefused {
			continue
		}
		g := n.gpu(l.GPU)
		if g < 0 {
			return nil, fmt.Errorf("estimate: the plan has a lane of GPU %s, which this host lacks", l.GPU)
		}
		gpus = append(gpus, g)
		planned = append(planned, n.carriedBy(l))
	}
	today, pxn := n.ncclDefaults(gpus, false), n.ncclDefaults(gpus, true)
	for _, c := range today {
		c.parts = slices.Clone(c.parts)
		for i := range c.parts {
			c.parts[i].server = throughMemory
		}
		off = append(off, c)
	}
	e := &Estimate{GPUs: make([]GPUEstimate, len(gpus))}
	all := []struct {
		at            func(*RouteRates) *float64
		send, receive []carried
	}{
		{func(w *RouteRates) *float64 { return &w.NCCL }, today, today},
		{func(w *RouteRates) *float64 { return &w.PXN }, pxn, today},
		{func(w *RouteRates) *float64 { return &w.HostMemory }, off, off},
		{func(w *RouteRates) *float64 { return &w.Relay }, planned, planned},
	}
	for k, route := range all {
		loads := make([]load, len(gpus))
		for i := range gpus {
			loads[i] = n.load(route.send[i], sending)
			n.join(&loads[i], n.load(route.receive[i], receiving))
		}
		capacity := n.capacity()
		busy, full := share(loads, capacity)
		sent, received := n.separateRates(route.send, route.receive)
		single := make([]float64, len(gpus))
		for i, g := range gpus {
			at := &e.GPUs[i]
			at.GPU, at.Index = n.h.GPUs[g].BusID, n.h.GPUs[g].Index
			single[i] = alone(loads[i], capacity)
			*route.at(&at.RouteRates), *route.at(&at.Alone) = busy[i], single[i]
			*route.at(&at.Send.RouteRates), *route.at(&at.Receive.RouteRates) = sent[i], received[i]
			*route.at(&at.Send.Alone) = alone(n.load(route.send[i], sending), capacity)
			*route.at(&at.Receive.Alone) = alone(n.load(route.receive[i], receiving), capacity)
			if k == len(all)-1 && full[i] >= 0 {
				at.Limit = n.pipes[full[i]].name
			}
		}
		*route.at(&e.Uniformity.RouteRates), *route.at(&e.Uniformity.Alone) = uniformity(busy), uniformity(single)
	}
	for i := range gpus {
		e.PXN = e.PXN || !slices.Equal(today[i].parts, pxn[i].parts)
	}
	return e, nil
}

// join adds the load more to the load l.
func (n *network) join(l *load, more load) {
	for i, on := range *l {
		n.at[on.pipe] = i
	}
	for _, on := range more {
		n.add(l, on.pipe, on.weight)
	}
}

// uniformity returns the lowest rate as a share of the highest; 0 without rates.
func uniformity(rates []float64) float64 {
	if len(rates) == 0 || slices.Max(rates) == 0 {
		return 0
	}
	return slices.Min(rates) / slices.Max(rates)
}

// ncclDefaults returns the routes of NCCL's defaults, with PXN or without: the NICs of the GPUs,
// and the route to a NIC. With PXN the routes are for sending.
func (n *network) ncclDefaults(gpus []int, pxn bool) []carried {
	seen := *n.h // by NCCL's plugin for InfiniBand and RoCE
	seen.GPUs, seen.NICs = nil, nil
	for _, g := range gpus {
		seen.GPUs = append(seen.GPUs, n.h.GPUs[g])
	}
	var nics []int
	for i, nic := range n.h.NICs {
		if nic.Active() && !nic.Ethernet && !nic.Software {
			seen.NICs = append(seen.NICs, nic)
			nics = append(nics, i)
		}
	}
	p := graph.MakePolicy(&seen, !pxn)
	gpuAt, nicAt := make([]int, len(p.GPUs)), make([]int, len(p.NICs)) // the places among the host's
	for i, at := range p.AtGPU {
		gpuAt[at] = gpus[i]
	}
	for i, at := range p.AtNIC {
		nicAt[at] = nics[i]
	}
	var all []carried
	users := make([]float64, len(n.h.NICs)) // lanes per port, by the port's owner
	for i, g := range gpus {
		c := carried{gpu: g}
		if d, ok := p.Assigned(p.AtGPU[i]); ok {
			for channel := range d.PerGPU {
				nic := d.NIC(channel)
				server := throughMemory
				switch via := p.Via[p.AtGPU[i]][nic]; {
				case via >= 0 && p.NICDirect[p.AtGPU[i]][nic]:
					server = gpuAt[via]
				case p.NICDirect[p.AtGPU[i]][nic]:
					server = g
				}
				c.parts = append(c.parts, part{server: server, nic: nicAt[nic]})
				users[n.owners[nicAt[nic]]]++
			}
		}
		all = append(all, c)
	}
	for _, c := range all {
		for k := range c.parts { // lanes of a shared port have equal shares
			c.parts[k].weight = n.nicRate(c.parts[k].nic) / users[n.owners[c.parts[k].nic]]
		}
	}
	return all
}

// alone returns the rate of a load on an idle host.
func alone(l load, capacity []float64) float64 {
	rate := 0.0
	for i, on := range l {
		if r := capacity[on.pipe] / on.weight; i == 0 || r < rate {
			rate = r
		}
	}
	return rate
}

// share returns max-min fair rates. The rates of all flows rise together; a flow stops at a
// full pipe on its route, and the remaining flows rise further. full has the pipe that stops a
// flow. A flow without load has the rate 0 and -1 in full.
func share(flows []load, capacity []float64) (rates []float64, full []int) {
	rates, full = make([]float64, len(flows)), slices.Repeat([]int{-1}, len(flows))
	left := slices.Clone(capacity)
	open := make([]float64, len(capacity)) // load of the flows that still rise
	users := make([]int, len(capacity)+1)  // index in crossing of the first flow of a pipe
	growing := 0
	for _, l := range flows {
		for _, on := range l {
			open[on.pipe] += on.weight
			users[on.pipe+1]++
		}
		if len(l) > 0 {
			growing++
		}
	}
	total := slices.Clone(open)
	var busy []int // pipes
	for p := range capacity {
		users[p+1] += users[p]
		if open[p] > 0 {
			busy = append(busy, p)
		}
	}
	crossing, next := make([]int, users[len(capacity)]), slices.Clone(users)
	for f, l := range flows {
		for _, on := range l {
			crossing[next[on.pipe]] = f
			next[on.pipe]++
		}
	}
	level := 0.0
	for growing > 0 {
		first, step := -1, 0.0
		still := busy[:0]
		for _, p := range busy {
			if open[p] <= 1e-9*total[p] { // at most a rounding error
				continue
			}
			still = append(still, p)
			if first < 0 || left[p]/open[p] < step {
				first, step = p, left[p]/open[p]
			}
		}
		busy = still
		if first < 0 {
			break // the remaining flows load no pipe
		}
		level += step
		for _, p := range busy {
			// The conversion prevents a fused multiply-add: every architecture gets the same result.
			left[p] = max(0, left[p]-float64(open[p]*step))
		}
		for _, f := range crossing[users[first]:users[first+1]] {
			if full[f] >= 0 {
				continue
			}
			growing--
			rates[f], full[f] = level, first
			for _, on := range flows[f] {
				open[on.pipe] -= on.weight
			}
		}
		open[first] = 0
	}
	return rates, full
}
