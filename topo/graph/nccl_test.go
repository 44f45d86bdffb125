package graph_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/reader"
)

// The test compares with results of NCCL's own code for each machine; see
// testdata/nccl/README.md.
func TestPathsAndPolicyAreThoseOfNCCLsCode(t *testing.T) {
	tables, err := filepath.Glob("testdata/nccl/*.tsv")
	if err != nil {
		t.Fatal(err)
	}
	if len(tables) == 0 {
		t.Fatal("no tables")
	}
	for _, table := range tables {
		machine := strings.TrimSuffix(table, ".tsv")
		t.Run(filepath.Base(machine), func(t *testing.T) {
			h, err := reader.Read(machine+".xml", topo.Options{})
			if err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(table)
			if err != nil {
				t.Fatal(err)
			}
			compareWithNCCL(t, graph.All(h, topo.RulesNCCL), string(text), len(h.GPUs)*(len(h.GPUs)+2*len(h.NICs)-1))
		})
	}
}

func compareWithNCCL(t *testing.T, pairs []graph.Pair, table string, want int) {
	t.Helper()
	byEnds := map[string]graph.Pair{}
	onHost := func(host, name string) string {
		if host == "" {
			return name
		}
		return host + "/" + name
	}
	for _, p := range pairs {
		byEnds[onHost(p.FromHost, p.From)+"\t"+onHost(p.ToHost, p.To)] = p
	}
	rows := strings.Split(strings.TrimSpace(table), "\n")[1:]
	if len(rows) != want {
		t.Errorf("the table has %d pairs, and the machine %d", len(rows), want)
	}
	for _, row := range rows {
		var from, to, pathType, policy, direct, via string
		var bandwidth, policyBandwidth float64
		var hops int
		if _, err := fmt.Sscan(row, &from, &to, &pathType, &bandwidth, &hops, &policy, &policyBandwidth, &direct,
			&via); err != nil {
			t.Fatalf("%q: %v", row, err)
		}
		p, ok := byEnds[from+"\t"+to]
		if !ok || p.Policy == nil {
			t.Errorf("%s to %s: no path, or no policy: %+v", from, to, p)
			continue
		}
		// NCCL computes with 32-bit floats.
		equal := func(a, b float64) bool { return math.Abs(a-b) <= 1e-5*b }
		if p.Type.String() != pathType || !equal(p.Bandwidth, bandwidth) || p.Hops != hops {
			t.Errorf("%s to %s: %v, %g GB/s, %d hops; NCCL has %s, %g, %d", from, to, p.Type, p.Bandwidth, p.Hops, pathType,
				bandwidth, hops)
		}
		if got := *p.Policy; got.Type.String() != policy || !equal(got.Bandwidth, policyBandwidth) ||
			got.Direct != (direct == "yes") {
			t.Errorf("%s to %s: the policy is %v, %g GB/s, direct %t; NCCL has %s, %g, %s", from, to, got.Type, got.Bandwidth,
				got.Direct, policy, policyBandwidth, direct)
		}
		gotVia := "-"
		if p.PXN != nil {
			gotVia = onHost(p.FromHost, p.PXN.Via)
			if !equal(p.PXN.Bandwidth, policyBandwidth) {
				t.Errorf("%s to %s: PXN has %g GB/s, and NCCL %g", from, to, p.PXN.Bandwidth, policyBandwidth)
			}
		}
		if gotVia != via {
			t.Errorf("%s to %s: PXN over %s; NCCL uses %s", from, to, gotVia, via)
		}
	}
}
