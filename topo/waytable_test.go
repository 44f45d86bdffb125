package topo

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// pairsOf writes a table out.
func pairsOf(h *Host, t *WayTable) (pairs []Pair) {
	ends := h.devices()
	for i, a := range ends {
		for j, b := range ends {
			if i == j {
				continue
			}
			w := t.Ways[t.At(i, j)]
			pairs = append(pairs, Pair{
				From: a.name, FromHost: a.id.host, To: b.name, ToHost: b.id.host,
				Path: w.Path, Hops: w.Hops, Reason: w.Reason, PXN: w.PXN, Policy: w.Policy,
			})
		}
	}
	return pairs
}

func TestWayTableTellsThePathsOfAllMachines(t *testing.T) {
	files, err := filepath.Glob("testdata/nccl/*.xml")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	hosts := map[string]*Host{"gb300": readTree(t, gb300("mlx5_ib")), "hgx": hgx(48, 400, 0, 1, 3).host()}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if hosts[file], err = ReadNCCLXML(bytes.NewReader(text), file); err != nil {
			t.Fatal(err)
		}
	}
	for name, h := range hosts {
		for _, rules := range []Rules{RulesNCCL, RulesSMI, rulesPlan} {
			table := h.WayTable(rules)
			if diff := cmp.Diff(h.Paths(rules), pairsOf(h, table)); diff != "" {
				t.Errorf("%s, rules %s (-paths +table):\n%s", name, rules, diff)
			}
		}
	}
}

func TestWayTableOfALargeHostIsSmall(t *testing.T) {
	h, err := ReadCapture(bytes.NewReader(grownCapture(t, 1792, 256)))
	if err != nil {
		t.Fatal(err)
	}
	var table *WayTable
	if used := allocated(func() { table = h.WayTable(RulesNCCL) }); used > 16<<20 {
		t.Errorf("it allocates %d KiB", used>>10)
	}
	if len(table.Ways) > 1500 || table.Devices() != 384 {
		t.Errorf("%d ways between %d devices", len(table.Ways), table.Devices())
	}
}
