package graph

import (
	"cmp"

	"github.com/peerlane/peerlane/topo"
)

// Way is a path without the names of the devices at the ends.
type Way struct {
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

// WayTable has the paths of a host in four bytes per path: a large host has millions of paths,
// but few distinct paths.
type WayTable struct {
	// Ways are the distinct paths of a host.
	Ways    []Way
	devices int
	of      []int32 // [from*devices+to]: a place in Ways
}

// Devices is the number of devices: the GPUs and then the NICs of the host.
func (t *WayTable) Devices() int { return t.devices }

// At returns the index in Ways of the path between two devices; -1 for a device itself.
func (t *WayTable) At(from, to int) int32 { return t.of[from*t.devices+to] }

// wayKey distinguishes paths without their sentences.
type wayKey struct {
	path topo.Path
	hops int32
	reasonKey
	port   int32  // the device whose port is the limit, from 1
	text   string // the sentence, for kinds without nodes in x and y
	policy policyAnswer
}

// NewWayTable finds the paths between the devices of a host.
func NewWayTable(h *topo.Host, rules topo.Rules) *WayTable {
	ends := Devices(h)
	t := &WayTable{devices: len(ends), of: make([]int32, len(ends)*len(ends))}
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
	known := map[wayKey]int32{}
	for i := range ends {
		t.of[i*t.devices+i] = -1
	}
	all := make([]int, len(ends))
	for i := range all {
		all[i] = i
	}
	var last wayKey // consecutive devices often have the same path
	lastAt := int32(-1)
	finder.between(ends, all, func(_, _ int) bool { return true }, func(i, j int, w Nearest) {
		k := wayKey{path: w.Path, hops: int32(w.hops), reasonKey: w.reasonKey()}
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
			at, is := known[k]
			if !is {
				at = int32(len(t.Ways))
				known[k] = at
				way := Way{Path: w.Path, Hops: w.hops, Reason: cmp.Or(k.text, w.reason(ends[i], ends[j]))}
				way.Policy, way.PXN = k.policy.fields(after)
				t.Ways = append(t.Ways, way)
			}
			last, lastAt = k, at
		}
		t.of[i*t.devices+j] = lastAt
	})
	return t
}
