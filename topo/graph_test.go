package topo

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// drawn is a graph as a list of edges. PIX stands for any PCIe link.
type drawn struct {
	kinds []nodeKind
	edges []drawnEdge
}

type drawnEdge struct {
	a, b      int
	via       PathType
	bandwidth float64
}

// draw makes a graph that may well be no machine: with cycles, parts that
// nothing joins, several edges between two nodes, and bandwidths that often
// are equal, so that much hangs on which way is found first.
func draw(r *rand.Rand) drawn {
	var d drawn
	for range 2 + r.IntN(18) {
		d.kinds = append(d.kinds, nodeKind(r.IntN(int(nicNode)+1)))
	}
	bandwidths := []float64{6, 12, 12, 24, 24, 48, localBandwidth}[:1+r.IntN(7)]
	vias := map[[2]nodeKind][]PathType{ // by kinds, the lesser first
		{cpuNode, cpuNode}:       {SYS},
		{cpuNode, switchNode}:    {PIX},
		{cpuNode, gpuNode}:       {PIX, C2C, NVL},
		{cpuNode, nicNode}:       {PIX},
		{switchNode, switchNode}: {PIX, LOC},
		{switchNode, gpuNode}:    {PIX},
		{switchNode, nicNode}:    {PIX},
		{nvswitchNode, gpuNode}:  {NVL},
		{gpuNode, gpuNode}:       {NVL},
	}
	for range len(d.kinds) * (1 + r.IntN(3)) {
		a, b := r.IntN(len(d.kinds)), r.IntN(len(d.kinds))
		via := vias[[2]nodeKind{min(d.kinds[a], d.kinds[b]), max(d.kinds[a], d.kinds[b])}]
		if a != b && via != nil {
			d.edges = append(d.edges, drawnEdge{a, b, via[r.IntN(len(via))], bandwidths[r.IntN(len(bandwidths))]})
		}
	}
	return d
}

func (d drawn) graph() *graph {
	g := &graph{index: map[nodeID]int{}}
	for i, kind := range d.kinds {
		g.node(nodeID{kind, "", fmt.Sprint(i)})
	}
	for _, e := range d.edges {
		g.connect(g.nodes[e.a], g.nodes[e.b], e.via, e.bandwidth)
	}
	return g
}

// plain is NCCL's ncclTopoSetPaths in so many words: rounds over a list of
// nodes, of which each tells all that it has an edge with.
func (d drawn) plain(base int, rules Rules) []step {
	paths := map[int]step{base: {Path{LOC, localBandwidth}, 0, -1}}
	tell := func(node, remote int, e drawnEdge) bool {
		path := paths[node]
		fromKind, toKind := d.kinds[node], d.kinds[remote]
		if node != base && fromKind == gpuNode {
			neighbours := path.hops <= 1 && e.via == NVL && toKind == gpuNode
			if !neighbours || rules == RulesSMI {
				return false
			}
		}
		kind := e.via
		switch {
		case fromKind == switchNode && toKind == switchNode:
			kind = PXB
		case e.via == PIX && (fromKind == cpuNode || toKind == cpuNode):
			kind = PHB
		case e.via == NVL && node != base && fromKind == gpuNode && path.Type == NVL:
			kind = NVB
		}
		offer := step{Path{max(path.Type, kind), min(path.Bandwidth, e.bandwidth)}, path.hops + 1, node}
		known, is := paths[remote]
		worse := is && (offer.Type > known.Type ||
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
				if remote >= 0 && tell(node, remote, e) && !slices.Contains(next, remote) {
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
			all[i] = step{Path{DIS, 0}, 0, -1}
		}
	}
	return all
}

// One search is used for all nodes of a graph, as pathFinder uses it.
func TestASearchFindsWhatRoundsOverAllEdgesFind(t *testing.T) {
	counts := map[PathType]int{}
	for seed := range uint64(500) {
		d := draw(rand.New(rand.NewPCG(seed, 0)))
		g := d.graph()
		for _, rules := range []Rules{RulesNCCL, RulesSMI} {
			s := search{graph: g, rules: rules}
			for base := range d.kinds {
				s.from(base, localBandwidth)
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
	for _, kind := range []PathType{LOC, NVL, NVB, C2C, PIX, PXB, PHB, SYS, DIS} {
		if counts[kind] < 100 {
			t.Errorf("only %d paths are %v", counts[kind], kind)
		}
	}
}

// The type of a path is that of the worst edge on the best way, which can be
// reckoned without any order of steps where no way leads through a GPU.
func TestThePathTypeIsTheBestOfTheWorstEdges(t *testing.T) {
	for seed := range uint64(500) {
		d := draw(rand.New(rand.NewPCG(seed, 1)))
		n := len(d.kinds)
		worst := make([][]PathType, n)
		for i := range worst {
			worst[i] = slices.Repeat([]PathType{DIS}, n)
			worst[i][i] = LOC
		}
		for _, e := range d.edges {
			kind := e.via
			a, b := d.kinds[e.a], d.kinds[e.b]
			if a == switchNode && b == switchNode {
				kind = PXB
			} else if kind == PIX && (a == cpuNode || b == cpuNode) {
				kind = PHB
			}
			worst[e.a][e.b] = min(worst[e.a][e.b], kind)
			worst[e.b][e.a] = worst[e.a][e.b]
		}
		for k := range n { // Floyd and Warshall's, with min and max
			if d.kinds[k] == gpuNode {
				continue
			}
			for i := range n {
				for j := range n {
					worst[i][j] = min(worst[i][j], max(worst[i][k], worst[k][j]))
				}
			}
		}
		s := search{graph: d.graph(), rules: RulesSMI}
		for base := range n {
			s.from(base, localBandwidth)
			for to, want := range worst[base] {
				if got := s.found.best[to].Type; got != want {
					t.Fatalf("seed %d, from node %d to %d: %v, want %v", seed, base, to, got, want)
				}
			}
		}
	}
}

// machineOf draws a host of one or two machines.
func machineOf(r *rand.Rand) *Host {
	h := &Host{Source: Source{Kind: SourceNCCLXML}}
	links := []float64{12, 24, 48}
	for m := range 1 + r.IntN(2) {
		host := ""
		if m > 0 {
			host = "other"
		}
		nodes := 1 + r.IntN(3)
		for n := range nodes {
			h.CPUs = append(h.CPUs, CPU{Host: host, NUMA: n, Socket: []float64{16, 22, localBandwidth}[r.IntN(3)]})
		}
		var switches []Switch
		place := func() (int, Place) {
			numa, p := r.IntN(nodes), Place{Link: links[r.IntN(3)], HostBridge: fmt.Sprintf("pci0000:%02x", r.IntN(3))}
			if len(switches) > 0 && r.IntN(4) > 0 {
				above := switches[r.IntN(len(switches))]
				numa, p.Switch, p.HostBridge = above.NUMA, above.BusID, above.HostBridge
			}
			return numa, p
		}
		for i := range r.IntN(6) {
			s := Switch{Host: host, BusID: fmt.Sprintf("0000:%02x:00.0", 0x10+i)}
			s.NUMA, s.Place = place()
			if r.IntN(2) > 0 {
				s.Device = PCIIdentity{"0x060400", "0x1000", "0xc010", "0x1000", "0xa096"}
			}
			if r.IntN(4) == 0 {
				s.Peers = []string{fmt.Sprintf("0000:%02x:00.0", 0x10+r.IntN(6))}
			}
			switches = append(switches, s)
		}
		h.Switches = append(h.Switches, switches...)
		gpus := r.IntN(5)
		for i := range gpus {
			g := GPU{Host: host, Index: i, BusID: fmt.Sprintf("0000:%02x:00.0", 0x40+i), Capability: 70 + 20*r.IntN(2), NoP2P: r.IntN(8) == 0}
			g.NUMA, g.Place = place()
			for range r.IntN(3) {
				peer := ""
				if r.IntN(3) > 0 {
					peer = fmt.Sprintf("0000:%02x:00.0", 0x40+r.IntN(gpus))
				}
				g.NVLinks = append(g.NVLinks, NVLink{Peer: peer, Count: 1, Bandwidth: 20})
			}
			if r.IntN(6) == 0 {
				g.C2C = 440
			}
			h.GPUs = append(h.GPUs, g)
		}
		for i := range r.IntN(4) {
			n := NIC{Host: host, Name: fmt.Sprintf("mlx5_%d", i), BusID: fmt.Sprintf("0000:%02x:00.0", 0x80+i/2)}
			n.NUMA, n.Place = place()
			if i%2 == 1 { // a second port of the one before
				n.Place = h.NICs[len(h.NICs)-1].Place
				n.NUMA = h.NICs[len(h.NICs)-1].NUMA
			}
			n.Ports = []Port{{Number: 1, RateGbps: []float64{0, 100, 400}[r.IntN(3)]}}
			h.NICs = append(h.NICs, n)
		}
	}
	return h
}

// A path is the same whoever asks: alone, in a table, or among all pairs.
func TestAPathIsTheSameAloneAndAmongAll(t *testing.T) {
	pairsSeen := 0
	for seed := range uint64(300) {
		h := machineOf(rand.New(rand.NewPCG(seed, 2)))
		if seed%10 == 0 {
			h.Matrix = map[[2]string]PathType{}
			for i, a := range h.devices() {
				for j, b := range h.devices() {
					h.Matrix[[2]string{a.name, b.name}] = PathType(1 + (i+j)%int(DIS))
				}
			}
		}
		ends := h.devices()
		for _, rules := range []Rules{RulesNCCL, RulesSMI} {
			table, pairs := h.PathTable(rules), h.Paths(rules)
			pairsSeen += len(pairs)
			next := 0
			for i, a := range ends {
				row := table.Row(i)
				for j, b := range ends {
					if i == j {
						if row[j] != -1 {
							t.Fatalf("seed %d: device %d has the path %d to itself", seed, i, row[j])
						}
						continue
					}
					pair := pairs[next]
					next++
					if pair.From != a.name || pair.To != b.name || table.Paths[row[j]] != pair.Path {
						t.Fatalf("seed %d, rules %s, from %s to %s: %+v in the table, %+v as a pair", seed, rules, a.name, b.name, table.Paths[row[j]], pair)
					}
					if rules != RulesNCCL || h.Matrix != nil {
						continue
					}
					alone := newPathFinder(h, rules).to(b)(a).Path
					if alone != pair.Path {
						t.Fatalf("seed %d, from %s to %s: %+v alone, %+v among all", seed, a.name, b.name, alone, pair.Path)
					}
				}
			}
			for i, p := range table.Paths {
				if slices.Contains(table.Paths[:i], p) {
					t.Errorf("seed %d: the table has %+v twice", seed, p)
				}
			}
		}
	}
	if pairsSeen < 5000 {
		t.Errorf("only %d pairs were compared", pairsSeen)
	}
}

// A consumer may have enough at any pair.
func TestEachPathCanBeLeft(t *testing.T) {
	h := machineOf(rand.New(rand.NewPCG(3, 2)))
	all := h.Paths(RulesNCCL)
	if len(all) < 4 {
		t.Fatalf("%d pairs are too few", len(all))
	}
	var first []Pair
	for p := range h.EachPath(RulesNCCL) {
		if first = append(first, p); len(first) == 3 {
			break
		}
	}
	if diff := cmp.Diff(all[:3], first); diff != "" {
		t.Errorf("the first three (-all +left):\n%s", diff)
	}
}

// A CPU has one link to all others in place of one to each.
func TestALinkToAllCPUsIsAsGoodAsOneToEach(t *testing.T) {
	several := 0
	for seed := range uint64(300) {
		h := machineOf(rand.New(rand.NewPCG(seed, 5)))
		for _, rules := range []Rules{RulesNCCL, RulesSMI} {
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
					for _, to := range g.cpus[g.nodes[at].host] {
						if to != at {
							several++
							each.links[at] = append(each.links[at], link{to: to, via: SYS, bandwidth: l.bandwidth})
						}
					}
				}
			}
			all, one := search{graph: g, rules: rules}, search{graph: &each, rules: rules}
			for base := range g.nodes {
				all.from(base, localBandwidth)
				one.from(base, localBandwidth)
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
