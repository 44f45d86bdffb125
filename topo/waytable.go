package topo

import "cmp"

// Way is what a path between two devices is, whichever devices these are.
type Way struct {
	// Path is the nearest way, before any policy.
	Path
	// Hops is the number of links on it; 0 where the source does not tell.
	Hops int `json:"hops"`
	// Reason is a sentence that says what lies on the way.
	Reason string `json:"reason"`
	// PXN and Policy are as a Pair's.
	PXN    *PXNPath    `json:"pxn,omitempty"`
	Policy *PolicyPath `json:"policy,omitempty"`
}

// WayTable has the paths of Host.Paths in four bytes each: large hosts have millions,
// and few ways that differ.
type WayTable struct {
	// Ways are those that occur, on each host once.
	Ways    []Way
	devices int
	of      []int32 // [from*devices+to]: a place in Ways
}

// Devices is the number of devices: the GPUs and then the NICs of the host.
func (t *WayTable) Devices() int { return t.devices }

// At is the place in Ways of the way from one device to another.
func (t *WayTable) At(from, to int) int32 { return t.of[from*t.devices+to] }

// wayKey tells ways apart without making their sentences.
type wayKey struct {
	path   Path
	hops   int32
	kind   uint8
	x, y   int32  // what the sentence names, by kind
	port   int32  // the device whose port is the limit, from 1
	text   string // the sentence, where nothing shorter tells it
	policy policyAnswer
}

// Kinds of sentences that two numbers tell apart.
const (
	saysText uint8 = iota
	saysGPU
	saysNVSwitches
	saysNVLinkCPU
	saysNVLink
	saysC2C
	saysSockets
	saysBridges
	saysNode
	saysSwitch
)

// WayTable finds the paths of Paths.
func (h *Host) WayTable(rules Rules) *WayTable {
	ends := h.devices()
	t := &WayTable{devices: len(ends), of: make([]int32, len(ends)*len(ends))}
	var after *policy
	if h.Matrix == nil {
		after = newPolicy(h)
	}
	finder := newPathFinder(h, rules)
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
	var last wayKey // neighbours have one way to a device
	lastAt := int32(-1)
	finder.between(ends, func(i, j int, w way) {
		k := wayKey{path: w.Path, hops: int32(w.hops)}
		if k.kind, k.x, k.y = w.says(); k.kind == saysText {
			k.text = w.reason(ends[i], ends[j])
		} else {
			if k.kind == saysBridges {
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
				way.Policy, way.PXN = k.policy.tell(after)
				t.Ways = append(t.Ways, way)
			}
			last, lastAt = k, at
		}
		t.of[i*t.devices+j] = lastAt
	})
	return t
}

// says tells by what a way's sentence is known: its kind and two numbers. saysText is
// that only the sentence itself tells.
func (w way) says() (kind uint8, x, y int32) {
	if w.found == nil || w.Type == DIS || w.from == w.found.base {
		return saysText, 0, 0
	}
	gpu, first, last, sw := -1, -1, -1, -1
	nodes, switches, nvswitches := 0, 0, false
	for at := w.found.best[w.from].from; at != w.found.base; at = w.found.best[at].from {
		switch w.found.graph.nodes[at].kind {
		case switchNode:
			sw = at
			switches++
		case cpuNode:
			if nodes == 0 {
				first = at
			}
			last = at
			nodes++
		case gpuNode:
			if gpu < 0 {
				gpu = at
			}
		case nvswitchNode:
			nvswitches = true
		}
	}
	switch { // in the order of passes
	case gpu >= 0:
		return saysGPU, int32(gpu), 0
	case w.Type == NVL && nvswitches:
		return saysNVSwitches, 0, 0
	case w.Type == NVL && nodes > 0:
		return saysNVLinkCPU, int32(first), 0
	case w.Type == NVL:
		return saysNVLink, 0, 0
	case w.Type == C2C:
		return saysC2C, 0, 0
	case nodes > 1:
		return saysSockets, int32(first), int32(last)
	case w.Type == NODE:
		return saysBridges, 0, 0 // and the node is that of the bridges
	case nodes == 1:
		return saysNode, int32(first), 0
	case switches == 1:
		return saysSwitch, int32(sw), 0
	}
	return saysText, 0, 0
}
