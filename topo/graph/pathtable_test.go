package graph_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/ncclxml"
	"github.com/peerlane/peerlane/topo/reader"
)

// pairsOf writes a table out.
func pairsOf(h *topo.Host, t *graph.PathTable) (pairs []graph.Pair) {
	ends := graph.Devices(h)
	for i, a := range ends {
		for j, b := range ends {
			if i == j {
				continue
			}
			w := t.Paths[t.At(i, j)]
			pairs = append(pairs, graph.Pair{
				From: a.Name, FromHost: a.ID.Host, To: b.Name, ToHost: b.ID.Host,
				Path: w.Path, Hops: w.Hops, Reason: w.Reason, PXN: w.PXN, Policy: w.Policy,
			})
		}
	}
	return pairs
}

func TestPathTableEqualsPathsOfAllMachines(t *testing.T) {
	files, err := filepath.Glob("testdata/nccl/*.xml")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	gb300, err := reader.Sysfs(topotest.Tree(t, topotest.GB300("mlx5_ib")))
	if err != nil {
		t.Fatal(err)
	}
	hosts := map[string]*topo.Host{"gb300": gb300, "hgx": topotest.Hgx(48, 400, 0, 1, 3).Host()}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if hosts[file], err = ncclxml.Read(bytes.NewReader(text), file); err != nil {
			t.Fatal(err)
		}
	}
	for name, h := range hosts {
		for _, rules := range []topo.Rules{topo.RulesNCCL, topo.RulesSMI, topo.RulesPlan} {
			table := graph.NewPathTable(h, rules)
			if diff := cmp.Diff(graph.All(h, rules), pairsOf(h, table)); diff != "" {
				t.Errorf("%s, rules %s (-paths +table):\n%s", name, rules, diff)
			}
			for i := range table.Devices() {
				if at := table.At(i, i); at != -1 {
					t.Errorf("%s: device %d has the path %d to itself", name, i, at)
				}
			}
			if len(h.Hosts()) > 1 {
				continue // nodes of two hosts can have one name
			}
			distinct := map[string]bool{}
			for _, w := range table.Paths {
				text, err := json.Marshal(w)
				if err != nil {
					t.Fatal(err)
				}
				if distinct[string(text)] {
					t.Errorf("%s, rules %s: the table has twice %s", name, rules, text)
				}
				distinct[string(text)] = true
			}
		}
	}
}
