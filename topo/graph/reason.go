package graph

import (
	"strings"

	"github.com/peerlane/peerlane/topo"
)

// reason returns a sentence about a path.
func (w Nearest) reason(a, b Endpoint) string {
	switch {
	case w.found == nil:
		return "according to the matrix"
	case w.Type == topo.DIS:
		return "nothing joins them"
	case w.from == w.found.base && a.busID != b.busID:
		return "they are PCI functions of one card"
	case w.from == w.found.base:
		return "they are one PCI function"
	}
	sentence := w.passes(a, b)
	for _, e := range []*Endpoint{&a, &b} {
		if e.isNIC && e.rate > 0 && e.rate == w.Bandwidth {
			return sentence + "; no faster than the port of " + e.Name
		}
	}
	return sentence
}

// passes names the links between the ends of a path.
func (w Nearest) passes(a, b Endpoint) string {
	var room [3][8]string // enough for most paths
	switches, nodes, gpus := room[0][:0], room[1][:0], room[2][:0]
	nvswitches := false
	for at := w.found.best[w.from].from; at != w.found.base; at = w.found.best[at].from {
		switch id := w.found.graph.nodes[at]; id.Kind {
		case SwitchNode:
			switches = append(switches, id.Name)
		case CPUNode:
			nodes = append(nodes, id.Name)
		case GPUNode:
			gpus = append(gpus, id.Name)
		case NVSwitchNode:
			nvswitches = true
		}
	}
	switch {
	case len(gpus) > 0:
		return "NVLink through GPU " + gpus[0]
	case w.Type == topo.NVL && nvswitches:
		return "NVLink through NVSwitches"
	case w.Type == topo.NVL && len(nodes) > 0:
		return "NVLink through the CPU of NUMA node " + nodes[0]
	case w.Type == topo.NVL:
		return "NVLink"
	case w.Type == topo.C2C:
		return "the chip-to-chip link"
	case len(nodes) > 1:
		return "the link between NUMA nodes " + nodes[0] + " and " + nodes[len(nodes)-1]
	case w.Type == topo.NODE:
		return "the host bridges " + a.hostBridge + " and " + b.hostBridge + " of NUMA node " + nodes[0]
	case len(nodes) == 1:
		return "the host bridge of NUMA node " + nodes[0]
	case len(switches) == 1:
		return "PCIe switch " + switches[0]
	}
	return "PCIe switches " + strings.Join(switches, ", ")
}

// Kinds of sentences that two numbers distinguish.
const (
	reasonText uint8 = iota
	reasonGPU
	reasonNVSwitches
	reasonNVLinkCPU
	reasonNVLink
	reasonC2C
	reasonSockets
	reasonBridges
	reasonNode
	reasonSwitch
)

// reasonKey returns a key for the sentence of a path: a kind and two numbers. For reasonText only
// the sentence is the key.
func (w Nearest) reasonKey() (kind uint8, x, y int32) {
	if w.found == nil || w.Type == topo.DIS || w.from == w.found.base {
		return reasonText, 0, 0
	}
	gpu, first, last, sw := -1, -1, -1, -1
	nodes, switches, nvswitches := 0, 0, false
	for at := w.found.best[w.from].from; at != w.found.base; at = w.found.best[at].from {
		switch w.found.graph.nodes[at].Kind {
		case SwitchNode:
			sw = at
			switches++
		case CPUNode:
			if nodes == 0 {
				first = at
			}
			last = at
			nodes++
		case GPUNode:
			if gpu < 0 {
				gpu = at
			}
		case NVSwitchNode:
			nvswitches = true
		}
	}
	switch { // in the order of passes
	case gpu >= 0:
		return reasonGPU, int32(gpu), 0
	case w.Type == topo.NVL && nvswitches:
		return reasonNVSwitches, 0, 0
	case w.Type == topo.NVL && nodes > 0:
		return reasonNVLinkCPU, int32(first), 0
	case w.Type == topo.NVL:
		return reasonNVLink, 0, 0
	case w.Type == topo.C2C:
		return reasonC2C, 0, 0
	case nodes > 1:
		return reasonSockets, int32(first), int32(last)
	case w.Type == topo.NODE:
		return reasonBridges, 0, 0 // the bridges imply the node
	case nodes == 1:
		return reasonNode, int32(first), 0
	case switches == 1:
		return reasonSwitch, int32(sw), 0
	}
	return reasonText, 0, 0
}
