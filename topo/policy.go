package topo

import (
	"cmp"
	"slices"
)

// policy is NCCL's choice of ways on one host: the paths of ncclTopoSetPaths,
// and what ncclTopoComputePaths makes of them with no variable set.
type policy struct {
	gpus   []GPU
	nics   []int // places in Host.NICs of those that NCCL would list
	ends   []endpoint
	cpus   []nodeID
	toGPU  [][]Path // [GPU][GPU]
	toNIC  [][]Path // [GPU][NIC]
	gpuCPU [][]step // [GPU][CPU]
	cpuOf  []int    // [GPU]: its CPU (ncclGetLocalCpu), or -1
	nicCPU [][]Path // [NIC][CPU], bounded by the NIC's port
	// direct and via are of the results.
	gpuDirect [][]bool
	nicDirect [][]bool
	via       [][]int // [GPU][NIC]: the GPU on the way, or -1
	// amd: NCCL trusts P2P through the CPU of AMD, if there are but two GPUs.
	amd bool
}

func newPolicy(h *Host) *policy {
	p := &policy{gpus: h.GPUs, ends: h.devices()}
	finder := newPathFinder(h, RulesNCCL)
	for _, c := range h.CPUs {
		p.cpus = append(p.cpus, cpuID(c.Host, c.NUMA))
	}
	p.amd = len(h.CPUs) > 0 && h.CPUs[0].Vendor == "AuthenticAMD" && len(h.GPUs) <= 2
	for n := range h.NICs {
		p.nics = append(p.nics, n)
	}
	for g := range p.gpus {
		from := p.ends[g]
		to := finder.from(from)
		var gpus, nics []Path
		for q := range p.gpus {
			gpus = append(gpus, to(p.ends[q]).Path)
		}
		for n := range p.nics {
			nics = append(nics, to(p.nic(n)).Path)
		}
		p.toGPU, p.toNIC = append(p.toGPU, gpus), append(p.toNIC, nics)
		p.gpuCPU = append(p.gpuCPU, p.cpuSteps(finder, from))
		p.cpuOf = append(p.cpuOf, p.localCPU(g))
		p.gpuDirect = append(p.gpuDirect, make([]bool, len(gpus)))
		p.nicDirect = append(p.nicDirect, make([]bool, len(nics)))
		p.via = append(p.via, slices.Repeat([]int{-1}, len(nics)))
	}
	for n := range p.nics {
		e := p.nic(n)
		var paths []Path
		for _, s := range p.cpuSteps(finder, e) {
			if e.rate > 0 {
				s.Bandwidth = min(s.Bandwidth, e.rate)
			}
			paths = append(paths, s.Path)
		}
		p.nicCPU = append(p.nicCPU, paths)
	}
	p.peerToPeer()
	p.chipToChip()
	p.network(h)
	return p
}

func (p *policy) nic(n int) endpoint { return p.ends[len(p.gpus)+n] }

func (p *policy) cpuSteps(finder pathFinder, from endpoint) []step {
	finder.from(from)
	var found []step
	for _, c := range p.cpus {
		found = append(found, finder.search.best[finder.graph.index[c]])
	}
	return found
}

// locals are the places of the best paths: most bandwidth, then nearest
// (ncclTopoGetLocal).
func locals(paths []Path) (best []int) {
	at := Path{Type: DIS}
	for i, path := range paths {
		if path.Bandwidth > at.Bandwidth || path.Bandwidth == at.Bandwidth && path.Type < at.Type {
			at, best = path, nil
		}
		if path == at && path.Type < DIS {
			best = append(best, i)
		}
	}
	return best
}

// localCPU finds what cpuOf has.
func (p *policy) localCPU(g int) int {
	var paths []Path
	for _, s := range p.gpuCPU[g] {
		paths = append(paths, s.Path)
	}
	best := locals(paths)
	if len(best) == 0 {
		return -1
	}
	return slices.MinFunc(best, func(a, b int) int { return cmp.Compare(p.gpuCPU[g][a].hops, p.gpuCPU[g][b].hops) })
}

// joined is a way of two parts (addInterStep).
func joined(a, b Path) Path {
	return Path{mergedType(a.Type, b.Type), min(a.Bandwidth, b.Bandwidth)}
}

func mergedType(a, b PathType) PathType {
	if max(a, b) == PHB && min(a, b) == C2C {
		return P2C
	}
	return max(a, b)
}

// peerToPeer sends through the CPU's memory what may not use P2P
// (ncclTopoCheckP2p).
func (p *policy) peerToPeer() {
	limit := PXB
	if p.amd {
		limit = SYS
	}
	found := make([][]Path, len(p.gpus))
	for a := range p.gpus {
		found[a] = slices.Clone(p.toGPU[a])
		for b := range p.gpus {
			p.gpuDirect[a][b] = p.toGPU[a][b].Type <= limit && (a == b || !p.gpus[a].NoP2P && !p.gpus[b].NoP2P)
			c := p.cpuOf[b]
			if p.gpuDirect[a][b] || c < 0 || p.toGPU[a][b].Type == DIS {
				continue
			}
			found[a][b] = joined(p.gpuCPU[a][c].Path, p.gpuCPU[b][c].Path)
		}
	}
	p.toGPU = found
}

// chipToChip names the way over C2C and then PCIe, for the NICs that are
// nearest to a GPU.
func (p *policy) chipToChip() {
	for g := range p.gpus {
		c := p.cpuOf[g]
		if c < 0 {
			continue
		}
		for _, n := range locals(p.toNIC[g]) {
			if mergedType(p.gpuCPU[g][c].Type, p.nicCPU[n][c].Type) == P2C {
				p.toNIC[g][n].Type = min(P2C, p.toNIC[g][n].Type)
			}
		}
	}
}

// gdr says whether a GPU and a NIC can use GPUDirect RDMA (ncclTopoCheckGdr);
// read is the NIC's reading, which costs older GPUs without NVLink too much.
func (p *policy) gdr(h *Host, g, n int, read bool) bool {
	nic := h.NICs[p.nics[n]]
	if nic.GDR != nil && !*nic.GDR || p.gpus[g].GDR != nil && !*p.gpus[g].GDR || nic.Ethernet || nic.Software {
		return false
	}
	if c := p.gpus[g].Capability; read && c > 0 && c < 80 && len(p.gpus) > 1 {
		nvlink := false
		for q := range p.gpus {
			nvlink = nvlink || q != g && p.toGPU[g][q].Type == NVL
		}
		if !nvlink {
			return false
		}
	}
	if via := p.via[g][n]; via >= 0 {
		g = via
	}
	return p.toNIC[g][n].Type <= P2C
}

// localGPU is the GPU that NCCL gives a NIC to (ncclTopoGetLocalGpu); -1 for
// none.
func (p *policy) localGPU(n int, toNIC [][]Path) int {
	fromNIC := func(n int) (paths []Path) {
		for g := range p.gpus {
			paths = append(paths, toNIC[g][n])
		}
		return paths
	}
	const channels = 64 // MAXCHANNELS
	type share struct{ gpu, first, perGPU int }
	var shares []share
	nets := map[int][]int{}
	for _, g := range locals(fromNIC(n)) {
		near := locals(p.toNIC[g])
		if len(near) == 0 {
			continue
		}
		sharing := len(locals(fromNIC(near[0])))
		if sharing == 0 {
			continue
		}
		first := p.gpus[g].Index % sharing
		if len(near)&(len(near)-1) == 0 {
			first = mirrorBits(first, len(near))
		}
		nets[g] = near
		shares = append(shares, share{g, first, (len(near) + sharing - 1) / sharing})
	}
	for c := range channels {
		for _, s := range shares {
			if near := nets[s.gpu]; near[(s.first+c%s.perGPU)%len(near)] == n {
				return s.gpu
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
// GPUDirect RDMA.
func (p *policy) network(h *Host) {
	// The ways to a GPU stay as they are; PXN changes those from one.
	back := make([][]Path, len(p.gpus))
	for g := range p.gpus {
		back[g] = slices.Clone(p.toNIC[g])
	}
	for n := range p.nics {
		peer := p.localGPU(n, back)
		for g := range p.gpus {
			if peer >= 0 && peer != g && p.gpus[peer].Host == p.gpus[g].Host &&
				p.toNIC[peer][n].Type <= P2C && p.gdr(h, peer, n, true) && p.toGPU[peer][g].Type <= NVL &&
				(p.toNIC[peer][n].Bandwidth > p.toNIC[g][n].Bandwidth || p.toNIC[g][n].Type > PXN) {
				p.toNIC[g][n] = Path{PXN, min(p.toGPU[g][peer].Bandwidth, p.toNIC[peer][n].Bandwidth)}
				p.via[g][n] = peer
			}
			p.nicDirect[g][n] = p.gdr(h, g, n, false)
			if p.toNIC[g][n].Type >= PHB || p.nicDirect[g][n] {
				continue
			}
			if c := p.cpuOf[g]; c >= 0 {
				p.toNIC[g][n] = joined(p.gpuCPU[g][c].Path, p.nicCPU[n][c])
				back[g][n] = p.toNIC[g][n]
				p.via[g][n] = -1
			}
		}
	}
}

// apply adds the results to the pair of two devices, which are places in p.ends.
func (p *policy) apply(pair *Pair, i, j int) {
	switch g, h := len(p.gpus), len(p.gpus); {
	case i < g && j < g:
		pair.Policy = &PolicyPath{p.toGPU[i][j], p.gpuDirect[i][j]}
	case i < g:
		n := j - h
		pair.Policy = &PolicyPath{p.toNIC[i][n], p.nicDirect[i][n]}
		if via := p.via[i][n]; via >= 0 {
			pair.PXN = &PXNPath{p.gpus[via].BusID, p.toNIC[i][n].Bandwidth}
		}
	case j < g: // receiving takes no PXN
		n := i - h
		way := p.toNIC[j][n]
		if p.via[j][n] >= 0 {
			way = pair.Path
		}
		pair.Policy = &PolicyPath{way, p.nicDirect[j][n] && way.Type <= P2C}
	}
}
