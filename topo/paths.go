package topo

import (
	"fmt"
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
	ends := h.devices()
	finder := newPathFinder(h, rules)
	pairs := make([]Pair, max(0, len(ends)*(len(ends)-1)))
	for j, b := range ends {
		from := finder.from(b)
		for i, a := range ends {
			if i == j {
				continue
			}
			w := from(a)
			slices.Reverse(w.nodes)
			at := i*(len(ends)-1) + j
			if j > i {
				at--
			}
			pairs[at] = Pair{
				From: a.name, FromHost: a.id.host, To: b.name, ToHost: b.id.host,
				Path: w.Path, Hops: w.hops, Reason: w.reason(a, b, h.Matrix != nil),
			}
		}
	}
	if h.Matrix == nil {
		newPolicy(h).apply(pairs)
	}
	return pairs
}

// reason is a sentence on a way.
func (w way) reason(a, b endpoint, told bool) string {
	switch {
	case told:
		return "so the matrix says"
	case w.Type == DIS:
		return "nothing joins them"
	case len(w.nodes) <= 1:
		return "they are one PCI function"
	}
	between := func(kind nodeKind) (names []string) {
		for _, n := range w.nodes[1 : len(w.nodes)-1] {
			if n.kind == kind {
				names = append(names, n.name)
			}
		}
		return names
	}
	switches, nodes, gpus := between(switchNode), between(cpuNode), between(gpuNode)
	sentence := ""
	switch {
	case len(gpus) > 0:
		sentence = "NVLink through GPU " + gpus[0]
	case w.Type == NVL && len(between(nvswitchNode)) > 0:
		sentence = "NVLink through NVSwitches"
	case w.Type == NVL && len(nodes) > 0:
		sentence = "NVLink through the CPU of NUMA node " + nodes[0]
	case w.Type == NVL:
		sentence = "NVLink"
	case w.Type == C2C:
		sentence = "the chip-to-chip link"
	case len(nodes) > 1:
		sentence = fmt.Sprintf("the link between NUMA nodes %s and %s", nodes[0], nodes[len(nodes)-1])
	case w.Type == NODE:
		sentence = fmt.Sprintf("the host bridges %s and %s of NUMA node %s", a.hostBridge, b.hostBridge, nodes[0])
	case len(nodes) == 1:
		sentence = "the host bridge of NUMA node " + nodes[0]
	case len(switches) == 1:
		sentence = "PCIe switch " + switches[0]
	default:
		sentence = "PCIe switches " + strings.Join(switches, ", ")
	}
	for _, e := range []endpoint{a, b} {
		if e.isNIC && e.rate > 0 && e.rate == w.Bandwidth {
			return sentence + "; no faster than the port of " + e.name
		}
	}
	return sentence
}
