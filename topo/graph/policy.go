package graph

import (
	"cmp"
	"slices"

	"github.com/peerlane/peerlane/topo"
)

// policy is NCCL's choice of ways on one host: the paths of ncclTopoSetPaths,
// and what ncclTopoComputePaths makes of them with no variable set. NCCL's
// choices go by the order of GPUs and NICs in its file, so here they are in
// that order.
type policy struct {
	GPUs  []topo.GPU
	NICs  []topo.NIC
	AtGPU []int         // the place in gpus of each of Host.GPUs
	AtNIC []int         // the place in nics of each of Host.NICs; -1 for one that NCCL does not list
	toGPU [][]topo.Path // [GPU][GPU]
	toNIC [][]topo.Path // [GPU][NIC]
	back  [][]topo.Path // [GPU][NIC]: the way from the NIC, which takes no PXN
	// The ways to CPUs and from them differ: those of a CPU go on over the
	// NVLink of a GPU next to it, those of a GPU do not.
	gpuCPU [][]step      // [GPU][CPU]
	cpuGPU [][]topo.Path // [GPU][CPU]: from the CPU
	nicCPU [][]topo.Path // [NIC][CPU], bounded by the NIC's port
	local  []int         // [GPU]: its CPU (ncclGetLocalCpu), or -1
	// direct and via are of the results.
	gpuDirect [][]bool
	NicDirect [][]bool
	Via       [][]int // [GPU][NIC]: the GPU on the way, or -1
	// amd: NCCL trusts P2P through the CPU of AMD, if there are but two GPUs.
	amd bool
	// withoutPXN: NCCL_PXN_DISABLE is 1.
	withoutPXN bool
}

func newPolicy(h *topo.Host) *policy { return MakePolicy(h, false) }

func MakePolicy(h *topo.Host, withoutPXN bool) *policy {
	p := &policy{amd: len(h.CPUs) > 0 && h.CPUs[0].Vendor == "AuthenticAMD" && len(h.GPUs) <= 2, withoutPXN: withoutPXN}
	ends := p.order(h)
	finder := NewPathFinder(h, topo.RulesNCCL)
	var cpus []Endpoint
	for _, c := range h.CPUs {
		cpus = append(cpus, Endpoint{ID: CPUID(c.Host, c.NUMA)})
	}
	gpus, nics := len(p.GPUs), len(p.NICs)
	p.toGPU, p.toNIC, p.back = Matrix[topo.Path](gpus, gpus), Matrix[topo.Path](gpus, nics), Matrix[topo.Path](gpus, nics)
	p.gpuCPU, p.cpuGPU, p.nicCPU = Matrix[step](gpus, len(cpus)), Matrix[topo.Path](gpus, len(cpus)), Matrix[topo.Path](nics, len(cpus))
	p.gpuDirect, p.NicDirect, p.Via = Matrix[bool](gpus, gpus), Matrix[bool](gpus, nics), Matrix[int](gpus, nics)
	// NCCL finds the way from one device to another by a search that begins at
	// the other.
	for g := range p.GPUs {
		way := finder.To(ends[g])
		for q := range p.GPUs {
			p.toGPU[q][g] = way(ends[q]).Path
		}
		for n := range p.NICs {
			p.back[g][n], p.Via[g][n] = way(ends[gpus+n]).Path, -1
		}
		for c := range cpus {
			p.cpuGPU[g][c] = way(cpus[c]).Path
		}
	}
	for n := range p.NICs {
		way := finder.To(ends[gpus+n])
		for g := range p.GPUs {
			p.toNIC[g][n] = way(ends[g]).Path
		}
	}
	for c := range cpus {
		way := finder.To(cpus[c])
		for g := range p.GPUs {
			w := way(ends[g])
			p.gpuCPU[g][c] = step{Path: w.Path, hops: w.hops}
		}
		for n := range p.NICs {
			p.nicCPU[n][c] = way(ends[gpus+n]).Path
		}
	}
	for g := range p.GPUs {
		p.local = append(p.local, p.localCPU(g))
	}
	p.peerToPeer()
	p.chipToChip()
	p.network()
	return p
}

func Matrix[T any](rows, columns int) [][]T {
	t, all := make([][]T, rows), make([]T, rows*columns)
	for i := range t {
		t[i] = all[i*columns : (i+1)*columns : (i+1)*columns]
	}
	return t
}

// order brings the devices into the order of a file of NCCL, and gives their
// ends of paths. It leaves out what NCCL finds no way to use: NICs that are
// down. A host that was not read from such a file is taken as if NCCL had
// written one, by NUMA node and address.
func (p *policy) order(h *topo.Host) (ends []Endpoint) {
	node := map[NodeID]int{}
	for i, c := range h.CPUs {
		node[CPUID(c.Host, c.NUMA)] = i
	}
	devices := Devices(h)
	gpus := make([]int, len(h.GPUs))
	for i := range gpus {
		gpus[i] = i
	}
	slices.SortStableFunc(gpus, func(i, j int) int {
		a, b := &h.GPUs[i], &h.GPUs[j]
		return cmp.Or(cmp.Compare(a.Order, b.Order),
			cmp.Compare(node[CPUID(a.Host, a.NUMA)], node[CPUID(b.Host, b.NUMA)]), topo.CompareBusID(a.BusID, b.BusID))
	})
	p.AtGPU = make([]int, len(h.GPUs))
	for at, i := range gpus {
		p.AtGPU[i] = at
		p.GPUs = append(p.GPUs, h.GPUs[i])
		ends = append(ends, devices[i])
	}
	p.AtNIC = slices.Repeat([]int{-1}, len(h.NICs))
	var nics []int
	for i, n := range h.NICs {
		if n.Active() {
			nics = append(nics, i)
		}
	}
	slices.SortStableFunc(nics, func(i, j int) int {
		a, b := &h.NICs[i], &h.NICs[j]
		return cmp.Or(cmp.Compare(a.Order, b.Order),
			cmp.Compare(node[CPUID(a.Host, a.NUMA)], node[CPUID(b.Host, b.NUMA)]), topo.CompareBusID(a.BusID, b.BusID))
	})
	for at, i := range nics {
		p.AtNIC[i] = at
		p.NICs = append(p.NICs, h.NICs[i])
		ends = append(ends, devices[len(h.GPUs)+i])
	}
	return ends
}

// locals are the places of the best paths: most bandwidth, then nearest
// (ncclTopoGetLocal).
func locals(count int, path func(i int) topo.Path) (best []int) {
	at := topo.Path{Type: topo.DIS}
	for i := range count {
		path := path(i)
		if path.Bandwidth > at.Bandwidth || path.Bandwidth == at.Bandwidth && path.Type < at.Type {
			at, best = path, best[:0]
		}
		if path == at && path.Type < topo.DIS {
			best = append(best, i)
		}
	}
	return best
}

// localCPU is the CPU of a GPU (ncclGetLocalCpu); -1 for none.
func (p *policy) localCPU(g int) int {
	best := locals(len(p.gpuCPU[g]), func(c int) topo.Path { return p.gpuCPU[g][c].Path })
	if len(best) == 0 {
		return -1
	}
	return slices.MinFunc(best, func(a, b int) int { return cmp.Compare(p.gpuCPU[g][a].hops, p.gpuCPU[g][b].hops) })
}

// joined is a way of two parts (addInterStep).
func joined(a, b topo.Path) topo.Path {
	return topo.Path{Type: mergedType(a.Type, b.Type), Bandwidth: min(a.Bandwidth, b.Bandwidth)}
}

func mergedType(a, b topo.PathType) topo.PathType {
	if max(a, b) == topo.PHB && min(a, b) == topo.C2C {
		return topo.P2C
	}
	return max(a, b)
}

// peerToPeer sends through the CPU's memory what may not use P2P
// (ncclTopoCheckP2p).
func (p *policy) peerToPeer() {
	limit := topo.PXB
	if p.amd {
		limit = topo.SYS
	}
	for a := range p.GPUs {
		for b := range p.GPUs {
			way := &p.toGPU[a][b]
			p.gpuDirect[a][b] = way.Type <= limit && (a == b || !p.GPUs[a].NoP2P && !p.GPUs[b].NoP2P)
			if c := p.local[b]; !p.gpuDirect[a][b] && c >= 0 && way.Type != topo.DIS {
				*way = joined(p.gpuCPU[a][c].Path, p.cpuGPU[b][c])
			}
		}
	}
}

// chipToChip names the way over C2C and then PCIe, for the NICs that are
// nearest to a GPU.
func (p *policy) chipToChip() {
	for g := range p.GPUs {
		c := p.local[g]
		if c < 0 {
			continue
		}
		for _, n := range p.localNICs(g) {
			if mergedType(p.gpuCPU[g][c].Type, p.nicCPU[n][c].Type) == topo.P2C {
				p.toNIC[g][n].Type = min(topo.P2C, p.toNIC[g][n].Type)
				p.back[g][n].Type = min(topo.P2C, p.back[g][n].Type)
			}
		}
	}
}

func (p *policy) localNICs(g int) []int {
	return locals(len(p.NICs), func(n int) topo.Path { return p.toNIC[g][n] })
}

func (p *policy) localGPUs(n int) []int {
	return locals(len(p.GPUs), func(g int) topo.Path { return p.back[g][n] })
}

// gdr says whether a GPU and a NIC can use GPUDirect RDMA (ncclTopoCheckGdr).
// NCCL lets the NIC read from GPUs before Ampere only where they have NVLink;
// it asks for that only for PXN, which is over NVLink.
func (p *policy) gdr(g, n int) bool {
	gpu, nic := &p.GPUs[g], &p.NICs[n]
	if gpu.GDR != nil && !*gpu.GDR || nic.GDR != nil && !*nic.GDR || nic.GDR == nil && (nic.Ethernet || nic.Software) {
		return false
	}
	if via := p.Via[g][n]; via >= 0 {
		g = via
	}
	return p.toNIC[g][n].Type <= topo.P2C
}

// dealing is how NCCL gives a GPU its NICs (ncclTopoGetLocalNet): channel c takes
// that of the nearest at (first + c mod perGPU), modulo their number.
type dealing struct {
	nearest       []int // NICs
	first, PerGPU int
}

// Dealt is a GPU's part; false for one that has no NIC.
func (p *policy) Dealt(g int) (dealing, bool) {
	near := p.localNICs(g)
	if len(near) == 0 {
		return dealing{}, false
	}
	sharing := len(p.localGPUs(near[0]))
	if sharing == 0 {
		return dealing{}, false
	}
	first := p.GPUs[g].Index % sharing
	if len(near)&(len(near)-1) == 0 {
		first = mirrorBits(first, len(near))
	}
	return dealing{near, first, (len(near) + sharing - 1) / sharing}, true
}

func (d dealing) NIC(channel int) int {
	return d.nearest[(d.first+channel%d.PerGPU)%len(d.nearest)]
}

// localGPU is the GPU that NCCL gives a NIC to (ncclTopoGetLocalGpu), one of
// local, the GPUs nearest to it; -1 for none.
func (p *policy) localGPU(n int, local []int) int {
	const channels = 64 // MAXCHANNELS
	shares := map[int]dealing{}
	for _, g := range local {
		if d, ok := p.Dealt(g); ok {
			shares[g] = d
		}
	}
	for c := range channels {
		for _, g := range local {
			if d, ok := shares[g]; ok && d.NIC(c) == n {
				return g
			}
		}
	}
	return -1
}

// mirrorBits reverses the bits of a number below a power of two (topo.h).
func mirrorBits(n, power int) int {
	mirror := 0
	for b, m := 1, power>>1; b < power; b, m = b<<1, m>>1 {
		if n&b != 0 {
			mirror |= m
		}
	}
	return mirror
}

// network finds PXN, and sends through the CPU's memory what may not use
// GPUDirect RDMA. What it changes for one GPU counts for the next.
func (p *policy) network() {
	for n := range p.NICs {
		local := p.localGPUs(n)
		peer := p.proxy(n, local)
		for g := range p.GPUs {
			before, backBefore := p.toNIC[g][n], p.back[g][n]
			if peer >= 0 && peer != g && p.GPUs[peer].Host == p.GPUs[g].Host &&
				p.toNIC[peer][n].Type <= topo.P2C && p.gdr(peer, n) && p.toGPU[peer][g].Type <= topo.NVL &&
				(p.toNIC[peer][n].Bandwidth > p.toNIC[g][n].Bandwidth || p.toNIC[g][n].Type > topo.PXN) {
				p.toNIC[g][n] = topo.Path{Type: topo.PXN, Bandwidth: min(p.toGPU[g][peer].Bandwidth, p.toNIC[peer][n].Bandwidth)}
				p.Via[g][n] = peer
			}
			p.NicDirect[g][n] = p.gdr(g, n)
			if c := p.local[g]; p.toNIC[g][n].Type < topo.PHB && !p.NicDirect[g][n] && c >= 0 {
				p.toNIC[g][n] = joined(p.gpuCPU[g][c].Path, p.nicCPU[n][c])
				p.back[g][n] = joined(p.nicCPU[n][c], p.cpuGPU[g][c])
				p.Via[g][n] = -1
			}
			if p.back[g][n] != backBefore {
				local = p.localGPUs(n)
				peer = p.proxy(n, local)
			} else if p.toNIC[g][n] != before && slices.Contains(local, g) {
				peer = p.proxy(n, local)
			}
		}
	}
}

// proxy is the GPU by which PXN goes to a NIC; -1 for none.
func (p *policy) proxy(n int, local []int) int {
	if p.withoutPXN {
		return -1
	}
	return p.localGPU(n, local)
}

// policyAnswer is what the policy makes of the path between two devices.
type policyAnswer struct {
	known bool // else nothing of it is known
	topo.PolicyPath
	via int32 // the GPU on the way, a place in gpus, from 1; 0 for none
}

// answer is the result for two devices, places among GPUs and then NICs.
func (p *policy) answer(i, j int) policyAnswer {
	switch gpus := len(p.AtGPU); {
	case i < gpus && j < gpus:
		a, b := p.AtGPU[i], p.AtGPU[j]
		return policyAnswer{true, topo.PolicyPath{Path: p.toGPU[a][b], Direct: p.gpuDirect[a][b]}, 0}
	case i < gpus:
		g, n := p.AtGPU[i], p.AtNIC[j-gpus]
		if n >= 0 {
			return policyAnswer{true, topo.PolicyPath{Path: p.toNIC[g][n], Direct: p.NicDirect[g][n]}, int32(p.Via[g][n] + 1)}
		}
	case j < gpus:
		g, n := p.AtGPU[j], p.AtNIC[i-gpus]
		if n >= 0 {
			return policyAnswer{true, topo.PolicyPath{Path: p.back[g][n], Direct: p.NicDirect[g][n] && p.back[g][n].Type <= topo.P2C}, 0}
		}
	}
	return policyAnswer{}
}

// tell is the answer as a Pair has it.
func (a policyAnswer) tell(p *policy) (*topo.PolicyPath, *topo.PXNPath) {
	switch {
	case !a.known:
		return nil, nil
	case a.via == 0:
		return &a.PolicyPath, nil
	}
	return &a.PolicyPath, &topo.PXNPath{Via: p.GPUs[a.via-1].BusID, Bandwidth: a.Bandwidth}
}
