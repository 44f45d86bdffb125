package graph

import (
	"cmp"

	"github.com/peerlane/peerlane/topo"
)

// DistinctPath is a path without the names of the devices at the ends.
type DistinctPath struct {
	// Path is the nearest path, before any policy.
	topo.Path
	// Hops is the number of links on the path; 0 where unknown.
	Hops int `json:"hops"`
	// Reason is a sentence that names the links on the path.
	Reason string `json:"reason"`
	// PXN and Policy are as a Pair's.
	PXN    *topo.PXNPath    `json:"pxn,omitempty"`
	Policy *topo.PolicyPath `json:"policy,omitempty"`
}

// PathTable has the paths of a host in four bytes per path: a large host has millions of paths,
// but few distinct paths.
type PathTable struct {
	// Paths are the distinct paths of a host.
	Paths   []DistinctPath
	devices int
	of      []int32 // [from*devices+to]: an index in Paths
}

// Devices is the number of devices: the GPUs and then the NICs of the host.
func (t *PathTable) Devices() int { return t.devices }

// At returns the index in Paths of the path between two devices; -1 for a device itself.
func (t *PathTable) At(from, to int) int32 { return t.of[from*t.devices+to] }

// pathKey distinguishes paths without their sentences.
type pathKey struct {
	path topo.Path
	hops int32
	reasonKey
	port   int32  // the device whose port is the limit, from 1
	text   string // the sentence, for kinds without nodes in x and y
	policy policyAnswer
}

// NewPathTable finds the paths between the devices of a host.
func NewPathTable(h *topo.Host, rules topo.Rules) *PathTable {
	ends := Devices(h)
	t := &PathTable{devices: len(ends), of: make([]int32, len(ends)*len(ends))}
	var after *policy
	if h.Matrix == nil {
		after = newPolicy(h)
	}
	finder := NewPathFinder(h, rules)
	bridges := map[string]int32{}
	bridge := make([]int32, len(ends))
	for i, e := range ends {
		at, known := bridges[e.hostBridge]
		if !known {
			at = int32(len(bridges))
			bridges[e.hostBridge] = at
		}
		bridge[i] = at
	}
	known := map[pathKey]int32{}
	for i := range ends {
		t.of[i*t.devices+i] = -1
	}
	all := make([]int, len(ends))
	for i := range all {
		all[i] = i
	}
	var last pathKey // consecutive devices often have the same path
	lastAt := int32(-1)
	finder.between(ends, all, func(_, _ int) bool { return true }, func(i, j int, w Nearest) {
		k := pathKey{path: w.Path, hops: int32(w.hops), reasonKey: w.reasonKey()}
		switch k.kind {
		case reasonCard, reasonSwitches: // the nodes in the sentence are not in the key
			k.text = w.reason(ends[i], ends[j])
		default:
			if k.kind == reasonBridges { // the bridges imply the NUMA node
				k.x, k.y = bridge[i], bridge[j]
			}
			for _, end := range [...]int{i, j} {
				if e := &ends[end]; k.port == 0 && e.isNIC && e.rate > 0 && e.rate == w.Bandwidth {
					k.port = int32(end + 1)
				}
			}
		}
		if after != nil {
			k.policy = after.answer(i, j)
		}
		if lastAt < 0 || k != last {
			at, ok := known[k]
			if !ok {
				at = int32(len(t.Paths))
				known[k] = at
				path := DistinctPath{Path: w.Path, Hops: w.hops, Reason: cmp.Or(k.text, w.reason(ends[i], ends[j]))}
				path.Policy, path.PXN = k.policy.fields(after)
				t.Paths = append(t.Paths, path)
			}
			last, lastAt = k, at
		}
		t.of[i*t.devices+j] = lastAt
	})
	return t
}
