package graph

import (
	"strings"

	"github.com/peerlane/peerlane/topo"
)

// Kinds of sentences about a path.
const (
	reasonMatrix uint8 = iota
	reasonNothing
	reasonCard
	reasonGPU
	reasonNVSwitches
	reasonNVLinkCPU
	reasonNVLink
	reasonC2C
	reasonSockets
	reasonBridges
	reasonNode
	reasonSwitch
	reasonSwitches
)

// reasonKey is the kind of the sentence about a path, and the nodes in the sentence.
type reasonKey struct {
	kind uint8
	x, y int32
}

// reason returns a sentence about a path.
func (w Nearest) reason(a, b Endpoint) string {
	k := w.reasonKey()
	name := func(node int32) string { return w.found.graph.nodes[node].Name }
	sentence := ""
	switch k.kind {
	case reasonMatrix:
		return "according to the matrix"
	case reasonNothing:
		return "nothing joins them"
	case reasonCard:
		if a.busID != b.busID {
			return "they are PCI functions of one card"
		}
		return "they are one PCI function"
	case reasonGPU:
		sentence = "NVLink through GPU " + name(k.x)
	case reasonNVSwitches:
		sentence = "NVLink through NVSwitches"
	case reasonNVLinkCPU:
		sentence = "NVLink through the CPU of NUMA node " + name(k.x)
	case reasonNVLink:
		sentence = "NVLink"
	case reasonC2C:
		sentence = "the chip-to-chip link"
	case reasonSockets:
		sentence = "the link between NUMA nodes " + name(k.x) + " and " + name(k.y)
	case reasonBridges:
		sentence = "the host bridges " + a.hostBridge + " and " + b.hostBridge + " of NUMA node " + name(k.x)
	case reasonNode:
		sentence = "the host bridge of NUMA node " + name(k.x)
	case reasonSwitch:
		sentence = "PCIe switch " + name(k.x)
	case reasonSwitches:
		var switches []string
		for at := range w.between {
			switches = append(switches, name(int32(at)))
		}
		sentence = "PCIe switches " + strings.Join(switches, ", ")
	}
	for _, e := range []*Endpoint{&a, &b} {
		if e.isNIC && e.rate > 0 && e.rate == w.Bandwidth {
			return sentence + "; no faster than the port of " + e.Name
		}
	}
	return sentence
}

func (w Nearest) reasonKey() reasonKey {
	switch {
	case w.found == nil:
		return reasonKey{kind: reasonMatrix}
	case w.Type == topo.DIS:
		return reasonKey{kind: reasonNothing}
	case w.from == w.found.base:
		return reasonKey{kind: reasonCard}
	}
	var last [NICNode + 1]int32 // the last node of a kind
	var count [NICNode + 1]int
	first := int32(0) // CPU
	for at := range w.between {
		kind := w.found.graph.nodes[at].Kind
		if kind == CPUNode && count[kind] == 0 {
			first = int32(at)
		}
		last[kind] = int32(at)
		count[kind]++
	}
	switch {
	case count[GPUNode] > 0:
		return reasonKey{kind: reasonGPU, x: last[GPUNode]}
	case w.Type == topo.NVL && count[NVSwitchNode] > 0:
		return reasonKey{kind: reasonNVSwitches}
	case w.Type == topo.NVL && count[CPUNode] > 0:
		return reasonKey{kind: reasonNVLinkCPU, x: first}
	case w.Type == topo.NVL:
		return reasonKey{kind: reasonNVLink}
	case w.Type == topo.C2C:
		return reasonKey{kind: reasonC2C}
	case count[CPUNode] > 1:
		return reasonKey{reasonSockets, first, last[CPUNode]}
	case w.Type == topo.NODE:
		return reasonKey{kind: reasonBridges, x: first}
	case count[CPUNode] == 1:
		return reasonKey{kind: reasonNode, x: first}
	case count[SwitchNode] == 1:
		return reasonKey{kind: reasonSwitch, x: last[SwitchNode]}
	}
	return reasonKey{kind: reasonSwitches}
}

// between yields the nodes between the ends of a path.
func (w Nearest) between(yield func(node int) bool) {
	for at := w.found.best[w.from].from; at != w.found.base; at = w.found.best[at].from {
		if !yield(at) {
			return
		}
	}
}
