package graph

import (
	"cmp"
	"slices"

	"github.com/peerlane/peerlane/topo"
)

// policy is NCCL's choice of paths on a host: the paths of ncclTopoSetPaths after
// ncclTopoComputePaths without environment variables. NCCL's choices depend on the order of
// GPUs and NICs in its file; policy uses the order of the file.
type policy struct {
	GPUs  []topo.GPU
	NICs  []topo.NIC
	AtGPU []int         // index in GPUs, by index in Host.GPUs
	AtNIC []int         // index in NICs, by index in Host.NICs; -1 for a NIC that NCCL does not list
	toGPU [][]topo.Path // [GPU][GPU]
	toNIC [][]topo.Path // [GPU][NIC]
	back  [][]topo.Path // [GPU][NIC]: the path from the NIC, never PXN
	// Paths to and from CPUs differ: a path from a CPU can continue over NVLink behind a
	// neighbouring GPU, a path from a GPU cannot.
	gpuCPU [][]step      // [GPU][CPU]
	cpuGPU [][]topo.Path // [GPU][CPU]: from the CPU
	nicCPU [][]topo.Path // [NIC][CPU], bounded by the NIC's port
	local  []int         // [GPU]: the CPU of the GPU (ncclGetLocalCpu), or -1
	// gpuDirect and NICDirect have PolicyPath.Direct of the pairs: [GPU][GPU] and [GPU][NIC].
	gpuDirect [][]bool
	NICDirect [][]bool
	Via       [][]int // [GPU][NIC]: the GPU on the path, or -1
	// amd reports an AMD CPU on a host with at most two GPUs: NCCL then uses P2P through the CPU.
	amd bool
	// withoutPXN is set for NCCL_PXN_DISABLE=1.
	withoutPXN bool
}

func newPolicy(h *topo.Host) *policy { return MakePolicy(h, false) }

// MakePolicy finds the paths of a host, and changes the paths by NCCL's rules for P2P, C2C, PXN and
// GPUDirect RDMA. withoutPXN has the effect of NCCL_PXN_DISABLE=1.
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
	p.gpuCPU, p.cpuGPU, p.nicCPU = Matrix[step](gpus, len(cpus)), Matrix[topo.Path](gpus, len(cpus)),
		Matrix[topo.Path](nics, len(cpus))
	p.gpuDirect, p.NICDirect, p.Via = Matrix[bool](gpus, gpus), Matrix[bool](gpus, nics), Matrix[int](gpus, nics)
	// NCCL searches a path backwards, from the destination.
	for g := range p.GPUs {
		pathFrom := finder.To(ends[g])
		for q := range p.GPUs {
			p.toGPU[q][g] = pathFrom(ends[q]).Path
		}
		for n := range p.NICs {
			p.back[g][n], p.Via[g][n] = pathFrom(ends[gpus+n]).Path, -1
		}
		for c := range cpus {
			p.cpuGPU[g][c] = pathFrom(cpus[c]).Path
		}
	}
	for n := range p.NICs {
		pathFrom := finder.To(ends[gpus+n])
		for g := range p.GPUs {
			p.toNIC[g][n] = pathFrom(ends[g]).Path
		}
	}
	for c := range cpus {
		pathFrom := finder.To(cpus[c])
		for g := range p.GPUs {
			w := pathFrom(ends[g])
			p.gpuCPU[g][c] = step{Path: w.Path, hops: w.hops}
		}
		for n := range p.NICs {
			p.nicCPU[n][c] = pathFrom(ends[gpus+n]).Path
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

// Matrix returns a matrix of zero values; its rows share an array.
func Matrix[T any](rows, columns int) [][]T {
	t, all := make([][]T, rows), make([]T, rows*columns)
	for i := range t {
		t[i] = all[i*columns : (i+1)*columns : (i+1)*columns]
	}
	return t
}

// order sorts the devices as in a file of NCCL, and returns their endpoints. order skips NICs
// that are down: NCCL finds no use for the NIC. For a host from another source, order sorts by
// NUMA node and address, as NCCL writes a file.
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

// localCPU returns the CPU of a GPU (ncclGetLocalCpu); -1 without a CPU.
func (p *policy) localCPU(g int) int {
	best := locals(len(p.gpuCPU[g]), func(c int) topo.Path { return p.gpuCPU[g][c].Path })
	if len(best) == 0 {
		return -1
	}
	return slices.MinFunc(best, func(a, b int) int { return cmp.Compare(p.gpuCPU[g][a].hops, p.gpuCPU[g][b].hops) })
}

// joined returns a path of two parts (addInterStep).
func joined(a, b topo.Path) topo.Path {
	return topo.Path{Type: mergedType(a.Type, b.Type), Bandwidth: min(a.Bandwidth, b.Bandwidth)}
}

func mergedType(a, b topo.PathType) topo.PathType {
	if max(a, b) == topo.PHB && min(a, b) == topo.C2C {
		return topo.P2C
	}
	return max(a, b)
}

// peerToPeer routes GPU pairs without P2P through the CPU's memory (ncclTopoCheckP2p).
func (p *policy) peerToPeer() {
	limit := topo.PXB
	if p.amd {
		limit = topo.SYS
	}
	for a := range p.GPUs {
		for b := range p.GPUs {
			path := &p.toGPU[a][b]
			p.gpuDirect[a][b] = path.Type <= limit && (a == b || !p.GPUs[a].NoP2P && !p.GPUs[b].NoP2P)
			if c := p.local[b]; !p.gpuDirect[a][b] && c >= 0 {
				*path = joined(p.gpuCPU[a][c].Path, p.cpuGPU[b][c])
			}
		}
	}
}

// chipToChip sets the type P2C of paths over C2C and then PCIe, for the nearest NICs of a GPU.
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

// gdr reports whether a GPU and a NIC can use GPUDirect RDMA (ncclTopoCheckGdr). NCCL lets a
// NIC read from GPUs before Ampere only with NVLink; NCCL checks NVLink only for PXN, and PXN
// implies NVLink.
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

// assignment is NCCL's distribution of NICs to a GPU (ncclTopoGetLocalNet): channel c uses the
// nearest NIC at index (first + c mod perGPU), modulo the number of nearest NICs.
type assignment struct {
	nearest       []int // NICs
	first, PerGPU int
}

// Assigned returns the NICs that NCCL assigns to a GPU; false for a GPU without a NIC.
func (p *policy) Assigned(g int) (assignment, bool) {
	near := p.localNICs(g)
	if len(near) == 0 {
		return assignment{}, false
	}
	sharing := len(p.localGPUs(near[0]))
	if sharing == 0 {
		return assignment{}, false
	}
	first := p.GPUs[g].Index % sharing
	if len(near)&(len(near)-1) == 0 {
		first = mirrorBits(first, len(near))
	}
	return assignment{near, first, (len(near) + sharing - 1) / sharing}, true
}

func (d assignment) NIC(channel int) int {
	return d.nearest[(d.first+channel%d.PerGPU)%len(d.nearest)]
}

// localGPU returns the GPU to which NCCL assigns a NIC (ncclTopoGetLocalGpu), from local, the
// nearest GPUs; -1 without a GPU.
func (p *policy) localGPU(n int, local []int) int {
	const channels = 64 // MAXCHANNELS
	shares := map[int]assignment{}
	for _, g := range local {
		if d, ok := p.Assigned(g); ok {
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

// network finds PXN, and routes pairs without GPUDirect RDMA through the CPU's memory. A change
// for a GPU affects the following GPUs.
func (p *policy) network() {
	for n := range p.NICs {
		local := p.localGPUs(n)
		peer := p.proxy(n, local)
		for g := range p.GPUs {
			before, backBefore := p.toNIC[g][n], p.back[g][n]
			if peer >= 0 && p.GPUs[peer].Host == p.GPUs[g].Host &&
				p.toNIC[peer][n].Type <= topo.P2C && p.gdr(peer, n) && p.toGPU[peer][g].Type <= topo.NVL &&
				(p.toNIC[peer][n].Bandwidth > p.toNIC[g][n].Bandwidth || p.toNIC[g][n].Type > topo.PXN) {
				p.toNIC[g][n] = topo.Path{Type: topo.PXN, Bandwidth: min(p.toGPU[g][peer].Bandwidth, p.toNIC[peer][n].Bandwidth)}
				p.Via[g][n] = peer
			}
			p.NICDirect[g][n] = p.gdr(g, n)
			if c := p.local[g]; p.toNIC[g][n].Type < topo.PHB && !p.NICDirect[g][n] && c >= 0 {
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

// proxy returns the GPU between PXN's source and a NIC; -1 without PXN.
func (p *policy) proxy(n int, local []int) int {
	if p.withoutPXN {
		return -1
	}
	return p.localGPU(n, local)
}

// policyAnswer is the policy for the path between two devices.
type policyAnswer struct {
	known bool // false: the policy is unknown
	topo.PolicyPath
	via int32 // the GPU on the path, an index in GPUs plus 1; 0 without a GPU
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
			return policyAnswer{true, topo.PolicyPath{Path: p.toNIC[g][n], Direct: p.NICDirect[g][n]}, int32(p.Via[g][n] + 1)}
		}
	case j < gpus:
		g, n := p.AtGPU[j], p.AtNIC[i-gpus]
		if n >= 0 {
			return policyAnswer{true, topo.PolicyPath{Path: p.back[g][n], Direct: p.NICDirect[g][n] &&
				p.back[g][n].Type <= topo.P2C}, 0}
		}
	}
	return policyAnswer{}
}

// fields converts the answer to the fields of a Pair.
func (a policyAnswer) fields(p *policy) (*topo.PolicyPath, *topo.PXNPath) {
	switch {
	case !a.known:
		return nil, nil
	case a.via == 0:
		return &a.PolicyPath, nil
	}
	return &a.PolicyPath, &topo.PXNPath{Via: p.GPUs[a.via-1].BusID, Bandwidth: a.Bandwidth}
}
