package graph

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

// drawn is a graph as a list of edges. PIX is any PCIe link.
type drawn struct {
	kinds []NodeKind
	edges []drawnEdge
}

type drawnEdge struct {
	a, b      int
	via       topo.PathType
	bandwidth float64
}

// draw makes a random graph, not necessarily of a real machine: cycles, unconnected parts,
// several edges between two nodes, and frequent equal bandwidths. Equal bandwidths make the
// result depend on the order of the search.
func draw(r *rand.Rand) drawn {
	var d drawn
	for range 2 + r.IntN(18) {
		d.kinds = append(d.kinds, NodeKind(r.IntN(int(NICNode)+1)))
	}
	bandwidths := []float64{6, 12, 12, 24, 24, 48, bandwidths.Local}[:1+r.IntN(7)]
	vias := map[[2]NodeKind][]topo.PathType{ // by kinds, the lesser first
		{CPUNode, CPUNode}:       {topo.SYS},
		{CPUNode, SwitchNode}:    {topo.PIX},
		{CPUNode, GPUNode}:       {topo.PIX, topo.C2C, topo.NVL},
		{CPUNode, NICNode}:       {topo.PIX},
		{SwitchNode, SwitchNode}: {topo.PIX, topo.LOC},
		{SwitchNode, GPUNode}:    {topo.PIX},
		{SwitchNode, NICNode}:    {topo.PIX},
		{NVSwitchNode, GPUNode}:  {topo.NVL},
		{GPUNode, GPUNode}:       {topo.NVL},
	}
	for range len(d.kinds) * (1 + r.IntN(3)) {
		a, b := r.IntN(len(d.kinds)), r.IntN(len(d.kinds))
		via := vias[[2]NodeKind{min(d.kinds[a], d.kinds[b]), max(d.kinds[a], d.kinds[b])}]
		if a != b && via != nil {
			d.edges = append(d.edges, drawnEdge{a, b, via[r.IntN(len(via))], bandwidths[r.IntN(len(bandwidths))]})
		}
	}
	return d
}

func (d drawn) graph() *graph {
	g := &graph{index: map[NodeID]int{}}
	for i, kind := range d.kinds {
		g.node(NodeID{kind, "", fmt.Sprint(i)})
	}
	for _, e := range d.edges {
		g.connect(g.nodes[e.a], g.nodes[e.b], e.via, e.bandwidth)
	}
	return g
}

// plain is a direct copy of NCCL's ncclTopoSetPaths: rounds over a list of nodes; a node
// updates the nodes at the other end of its edges.
func (d drawn) plain(base int, rules topo.Rules) []step {
	paths := map[int]step{base: {topo.Path{Type: topo.LOC, Bandwidth: bandwidths.Local}, 0, -1}}
	update := func(node, remote int, e drawnEdge) bool {
		path := paths[node]
		fromKind, toKind := d.kinds[node], d.kinds[remote]
		if node != base && fromKind == GPUNode {
			adjacent := path.hops <= 1 && e.via == topo.NVL && toKind == GPUNode
			if !adjacent || rules == topo.RulesSMI {
				return false
			}
		}
		kind := e.via
		switch {
		case fromKind == SwitchNode && toKind == SwitchNode:
			kind = topo.PXB
		case e.via == topo.PIX && (fromKind == CPUNode || toKind == CPUNode):
			kind = topo.PHB
		case e.via == topo.NVL && node != base && fromKind == GPUNode && path.Type == topo.NVL:
			kind = topo.NVB
		}
		offer := step{topo.Path{Type: max(path.Type, kind), Bandwidth: min(path.Bandwidth, e.bandwidth)}, path.hops + 1, node}
		known, ok := paths[remote]
		worse := ok && (offer.Type > known.Type ||
			offer.Type == known.Type && offer.Bandwidth < known.Bandwidth ||
			offer.Type == known.Type && offer.Bandwidth == known.Bandwidth && offer.hops >= known.hops)
		if !worse {
			paths[remote] = offer
		}
		return !worse
	}
	for list := []int{base}; len(list) > 0; {
		var next []int
		for _, node := range list {
			for _, e := range d.edges {
				remote := -1
				switch node {
				case e.a:
					remote = e.b
				case e.b:
					remote = e.a
				}
				if remote >= 0 && update(node, remote, e) && !slices.Contains(next, remote) {
					next = append(next, remote)
				}
			}
		}
		list = next
	}
	all := make([]step, len(d.kinds))
	for i := range all {
		var found bool
		if all[i], found = paths[i]; !found {
			all[i] = step{topo.Path{Type: topo.DIS, Bandwidth: 0}, 0, -1}
		}
	}
	return all
}

// The test reuses a search for the nodes of a graph, as PathFinder does.
func TestSearchFindsPathsOfNCCLRounds(t *testing.T) {
	counts := map[topo.PathType]int{}
	for seed := range uint64(500) {
		d := draw(rand.New(rand.NewPCG(seed, 0)))
		g := d.graph()
		for _, rules := range []topo.Rules{topo.RulesNCCL, topo.RulesSMI} {
			s := search{graph: g, rules: rules}
			for base := range d.kinds {
				s.from(base, bandwidths.Local)
				want := d.plain(base, rules)
				if diff := cmp.Diff(want, s.found.best, cmp.AllowUnexported(step{})); diff != "" {
					t.Fatalf("seed %d, rules %s, from node %d (-rounds +search):\n%s", seed, rules, base, diff)
				}
				for _, w := range want {
					counts[w.Type]++
				}
			}
		}
	}
	for _, kind := range []topo.PathType{topo.LOC, topo.NVL, topo.NVB, topo.C2C, topo.PIX, topo.PXB, topo.PHB, topo.SYS,
		topo.DIS} {
		if counts[kind] < 100 {
			t.Errorf("only %d paths are %v", counts[kind], kind)
		}
	}
}

// The type of a path is the type of the worst edge on the best path. Without paths through
// GPUs, the type does not depend on the order of steps.
func TestPathTypeIsBestOfWorstEdges(t *testing.T) {
	for seed := range uint64(500) {
		d := draw(rand.New(rand.NewPCG(seed, 1)))
		n := len(d.kinds)
		worst := make([][]topo.PathType, n)
		for i := range worst {
			worst[i] = slices.Repeat([]topo.PathType{topo.DIS}, n)
			worst[i][i] = topo.LOC
		}
		for _, e := range d.edges {
			kind := e.via
			a, b := d.kinds[e.a], d.kinds[e.b]
			if a == SwitchNode && b == SwitchNode {
				kind = topo.PXB
			} else if kind == topo.PIX && (a == CPUNode || b == CPUNode) {
				kind = topo.PHB
			}
			worst[e.a][e.b] = min(worst[e.a][e.b], kind)
			worst[e.b][e.a] = worst[e.a][e.b]
		}
		for k := range n { // Floyd and Warshall's, with min and max
			if d.kinds[k] == GPUNode {
				continue
			}
			for i := range n {
				for j := range n {
					worst[i][j] = min(worst[i][j], max(worst[i][k], worst[k][j]))
				}
			}
		}
		s := search{graph: d.graph(), rules: topo.RulesSMI}
		for base := range n {
			s.from(base, bandwidths.Local)
			for to, want := range worst[base] {
				if got := s.found.best[to].Type; got != want {
					t.Fatalf("seed %d, from node %d to %d: %v, want %v", seed, base, to, got, want)
				}
			}
		}
	}
}

// A CPU has a single link to the remaining CPUs in place of a link for each CPU.
func TestLinkToOtherCPUsEqualsLinkPerCPU(t *testing.T) {
	several := 0
	for seed := range uint64(300) {
		h := topotest.MachineOf(rand.New(rand.NewPCG(seed, 5)))
		for _, rules := range []topo.Rules{topo.RulesNCCL, topo.RulesSMI} {
			g := newGraph(h, rules)
			each := *g
			each.links = nil
			for at, links := range g.links {
				each.links = append(each.links, nil)
				for _, l := range links {
					if l.to != otherCPUs {
						each.links[at] = append(each.links[at], l)
						continue
					}
					for _, to := range g.cpus[g.nodes[at].Host] {
						if to != at {
							several++
							each.links[at] = append(each.links[at], link{to: to, via: topo.SYS, bandwidth: l.bandwidth})
						}
					}
				}
			}
			all, one := search{graph: g, rules: rules}, search{graph: &each, rules: rules}
			for base := range g.nodes {
				all.from(base, bandwidths.Local)
				one.from(base, bandwidths.Local)
				if diff := cmp.Diff(one.found.best, all.found.best, cmp.AllowUnexported(step{})); diff != "" {
					t.Fatalf("seed %d, rules %s, from %v (-each +all):\n%s", seed, rules, g.nodes[base], diff)
				}
			}
		}
	}
	if several < 1000 {
		t.Errorf("only %d links between CPUs", several)
	}
}
