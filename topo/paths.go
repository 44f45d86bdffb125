package topo

import (
	"iter"
	"slices"
	"strings"
)

// Pair is the way from one device to another.
type Pair struct {
	// From and To are the PCI addresses of GPUs and the names of NICs.
	From string `json:"from"`
	To   string `json:"to"`
	// FromHost and ToHost tell the hosts of a file apart that has several.
	FromHost string `json:"fromHost,omitempty"`
	ToHost   string `json:"toHost,omitempty"`
	// Path is the nearest way, before any policy.
	Path
	// Hops is the number of links on it; 0 where the source does not tell.
	Hops int `json:"hops"`
	// Reason is a sentence that says what lies on the way.
	Reason string `json:"reason"`
	// PXN is the way from a GPU to a NIC through another GPU, where NCCL takes
	// that one; nil elsewhere.
	PXN *PXNPath `json:"pxn,omitempty"`
	// Policy is what NCCL makes of the path by its defaults; nil where that is
	// not known: between two NICs, for a NIC that is down, and for a source
	// without a tree.
	Policy *PolicyPath `json:"policy,omitempty"`
}

// PXNPath is a way to a NIC over NVLink and the GPU Via, a PCI address, that is
// near it.
type PXNPath struct {
	Via       string  `json:"via"`
	Bandwidth float64 `json:"bandwidth"` // GB/s in one direction
}

// PolicyPath is a path after NCCL's policies (src/graph/paths.cc,
// ncclTopoComputePaths): GPUs that may not use P2P, and GPUs and NICs that may
// not use GPUDirect RDMA, meet in the CPU's memory.
type PolicyPath struct {
	Path
	// Direct says that the one device reads and writes the other's memory: P2P
	// between GPUs, GPUDirect RDMA between a GPU (for PXN the one on the way)
	// and a NIC.
	Direct bool `json:"direct"`
}

// Paths are the nearest ways from each GPU and NIC to each other one, in the
// order of GPUs and NICs, by the given rules.
func (h *Host) Paths(rules Rules) []Pair {
	n := len(h.GPUs) + len(h.NICs)
	return slices.AppendSeq(make([]Pair, 0, max(0, n*(n-1))), h.EachPath(rules))
}

// EachPath tells the pairs of Paths one at a time. Of hundreds of devices, all
// of them take tens of megabytes.
func (h *Host) EachPath(rules Rules) iter.Seq[Pair] {
	return func(yield func(Pair) bool) {
		var after *policy
		if h.Matrix == nil {
			after = newPolicy(h)
		}
		ends := h.devices()
		finder := newPathFinder(h, rules)
		var to []func(endpoint) way
		for _, b := range ends {
			to = append(to, finder.to(b))
			finder.keep()
		}
		for i, a := range ends {
			for j, b := range ends {
				if i == j {
					continue
				}
				w := to[j](a)
				pair := Pair{
					From: a.name, FromHost: a.id.host, To: b.name, ToHost: b.id.host,
					Path: w.Path, Hops: w.hops, Reason: w.reason(a, b),
				}
				if after != nil {
					pair.Policy, pair.PXN = after.answer(i, j).tell(after)
				}
				if !yield(pair) {
					return
				}
			}
		}
	}
}

// toNICs are the ways from a GPU to some NICs, by the rules of plans.
func (h *Host) toNICs(gpu GPU, nics []NIC) (pairs []Pair) {
	finder, from := newPathFinder(h, rulesPlan), gpuEndpoint(gpu)
	for _, nic := range nics {
		to := nicEndpoint(nic, h.Source)
		w := finder.to(to)(from)
		pairs = append(pairs, Pair{From: from.name, To: to.name, Path: w.Path, Hops: w.hops, Reason: w.reason(from, to)})
	}
	return pairs
}

// PathTable has the types and bandwidths of a host's paths, four bytes a pair.
type PathTable struct {
	// Paths are those that occur, each once.
	Paths   []Path
	devices int
	of      []int32 // [from*devices+to]: a place in Paths
}

// PathTable finds the paths of Paths, and not what is on them or becomes of
// them.
func (h *Host) PathTable(rules Rules) *PathTable {
	ends := h.devices()
	t := &PathTable{devices: len(ends), of: make([]int32, len(ends)*len(ends))}
	for i := range ends {
		t.of[i*t.devices+i] = -1
	}
	finder := newPathFinder(h, rules)
	known := map[Path]int32{}
	var last Path // neighbours have one path to a device
	lastAt := int32(-1)
	finder.between(ends, func(i, j int, w way) {
		if lastAt < 0 || w.Path != last {
			at, is := known[w.Path]
			if !is {
				at = int32(len(t.Paths))
				known[w.Path] = at
				t.Paths = append(t.Paths, w.Path)
			}
			last, lastAt = w.Path, at
		}
		t.of[j*t.devices+i] = lastAt // the paths to a device are found together
	})
	transpose(t.of, t.devices)
	return t
}

// transpose turns a square table over its diagonal: by blocks, so that the rows of two fit
// into the processor's cache.
func transpose(of []int32, n int) {
	const block = 32
	for top := 0; top < n; top += block {
		for left := 0; left <= top; left += block {
			for i := top; i < min(top+block, n); i++ {
				for j := left; j < min(left+block, i); j++ {
					of[i*n+j], of[j*n+i] = of[j*n+i], of[i*n+j]
				}
			}
		}
	}
}

// Row is the paths from one device, a place among the GPUs and then the NICs,
// to all of them: places in t.Paths, and -1 for the device itself.
func (t *PathTable) Row(from int) []int32 {
	return t.of[from*t.devices:][:t.devices]
}

// reason is a sentence on a way.
func (w way) reason(a, b endpoint) string {
	switch {
	case w.found == nil:
		return "so the matrix says"
	case w.Type == DIS:
		return "nothing joins them"
	case w.from == w.found.base && a.busID != b.busID:
		return "they are PCI functions of one card"
	case w.from == w.found.base:
		return "they are one PCI function"
	}
	sentence := w.passes(a, b)
	for _, e := range []*endpoint{&a, &b} {
		if e.isNIC && e.rate > 0 && e.rate == w.Bandwidth {
			return sentence + "; no faster than the port of " + e.name
		}
	}
	return sentence
}

// passes says what lies between the ends of a way.
func (w way) passes(a, b endpoint) string {
	var room [3][8]string // enough for most ways
	switches, nodes, gpus := room[0][:0], room[1][:0], room[2][:0]
	nvswitches := false
	for at := w.found.best[w.from].from; at != w.found.base; at = w.found.best[at].from {
		switch id := w.found.graph.nodes[at]; id.kind {
		case switchNode:
			switches = append(switches, id.name)
		case cpuNode:
			nodes = append(nodes, id.name)
		case gpuNode:
			gpus = append(gpus, id.name)
		case nvswitchNode:
			nvswitches = true
		}
	}
	switch {
	case len(gpus) > 0:
		return "NVLink through GPU " + gpus[0]
	case w.Type == NVL && nvswitches:
		return "NVLink through NVSwitches"
	case w.Type == NVL && len(nodes) > 0:
		return "NVLink through the CPU of NUMA node " + nodes[0]
	case w.Type == NVL:
		return "NVLink"
	case w.Type == C2C:
		return "the chip-to-chip link"
	case len(nodes) > 1:
		return "the link between NUMA nodes " + nodes[0] + " and " + nodes[len(nodes)-1]
	case w.Type == NODE:
		return "the host bridges " + a.hostBridge + " and " + b.hostBridge + " of NUMA node " + nodes[0]
	case len(nodes) == 1:
		return "the host bridge of NUMA node " + nodes[0]
	case len(switches) == 1:
		return "PCIe switch " + switches[0]
	}
	return "PCIe switches " + strings.Join(switches, ", ")
}
