package topo

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// results are plans of one host, less each of some NICs, that come to the same.
type results struct {
	judged
	less []string // NICs; none for the whole host
}

func (r results) row(file string) string {
	less := "–"
	if len(r.less) > 0 {
		less = strings.Join(r.less, ", ")
		if len(r.less) > 3 {
			less = fmt.Sprintf("each of %d: %s to %s", len(r.less), r.less[0], r.less[len(r.less)-1])
		}
	}
	return fmt.Sprintf("| %s | %s | %.2f | %.2f | %.2f | %.2f |\n", file, less, r.nccl, r.pxn, r.planned, r.optimum)
}

// Real machines, and the same less each of their NICs in turn: what a failed NIC leaves. The
// table of docs/estimate.md has the results. PEERLANE_TEST_UPDATE=1 writes it anew.
func TestPlanOfRealHostsLessANICReachesTheOptimum(t *testing.T) {
	files, err := filepath.Glob(topologies + "/*")
	if err != nil {
		t.Fatal(err)
	}
	own, err := filepath.Glob("../docs/hosts/*.xml")
	if err != nil {
		t.Fatal(err)
	}
	shared := len(files) > 0 // the files of others are not in the repository
	var table strings.Builder
	hosts := 0
	for _, file := range slices.Concat(files, append(own, "../docs/hgx-4-nics.xml")) {
		if info, err := os.Stat(file); err != nil || info.IsDir() || strings.HasSuffix(file, ".md") {
			continue
		}
		h, err := readInputFile(file)
		if err != nil {
			t.Logf("%s: %v", filepath.Base(file), err)
			continue
		}
		var all []results
		try := func(h *Host, less string) {
			name := filepath.Base(file) + " less " + less
			config := PlanConfig{AnyVendor: true}
			j, ok := judgeWith(t, h, config)
			if !ok {
				return
			}
			hosts++
			if j.planned < 0.98*j.optimum || j.optimum > 0 && (j.planned < j.nccl*(1-1e-9) || j.sent < j.pxn*(1-1e-9)) {
				t.Errorf("%s: %+v", name, j)
			}
			i := slices.IndexFunc(all, func(r results) bool {
				return len(r.less) > 0 && fmt.Sprintf("%.2f %.2f %.2f", r.nccl, r.pxn, r.planned) == fmt.Sprintf("%.2f %.2f %.2f", j.nccl, j.pxn, j.planned)
			})
			switch {
			case less == "":
				all = append(all, results{judged: j})
			case i < 0:
				all = append(all, results{j, []string{less}})
			default:
				all[i].less = append(all[i].less, less)
			}
		}
		try(h, "")
		for i, nic := range h.NICs {
			less := *h
			less.NICs = slices.Delete(slices.Clone(h.NICs), i, i+1)
			try(&less, nic.Name)
		}
		for _, r := range all {
			table.WriteString(r.row(filepath.Base(file)))
		}
	}
	if hosts < 30 {
		t.Errorf("%d hosts were planned", hosts)
	}
	if !shared {
		return
	}
	const document, begin, end = "../docs/estimate.md", "<!-- real hosts -->\n", "<!-- end of real hosts -->\n"
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), begin)
	is, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		t.Fatalf("%s has no part for this table", document)
	}
	want := "| machine | less | NCCL today | PXN sends | planned | optimum |\n|---|---|---|---|---|---|\n" + table.String()
	if is == want {
		return
	}
	if os.Getenv("PEERLANE_TEST_UPDATE") == "" {
		t.Fatalf("the table of %s is\n%s\nand the results are\n%s\nPEERLANE_TEST_UPDATE=1 writes it anew", document, is, want)
	}
	if err := os.WriteFile(document, []byte(before+begin+want+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// A GPU that fails changes the lane of another only where rates change: that is where others
// get what it has left.
func TestPlanOfRealHostLessAGPUKeepsLanesWhereRatesStay(t *testing.T) {
	files, err := filepath.Glob(topologies + "/*.xml")
	if err != nil {
		t.Fatal(err)
	}
	own, err := filepath.Glob("../docs/hosts/*.xml")
	if err != nil {
		t.Fatal(err)
	}
	config, compared := PlanConfig{AnyVendor: true}, 0
	for _, file := range slices.Concat(files, own, []string{"../docs/hgx-4-nics.xml"}) {
		h, err := readInputFile(file)
		if err != nil {
			t.Logf("%s: %v", filepath.Base(file), err)
			continue
		}
		whole := planOf(t, 0, h, config)
		for i, gpu := range h.GPUs {
			less := *h
			less.GPUs = slices.Delete(slices.Clone(h.GPUs), i, i+1)
			var before []Lane
			for _, l := range whole.Lanes {
				if l.GPU != gpu.BusID {
					before = append(before, l)
				}
			}
			after := planOf(t, 0, &less, config).Lanes
			if !slices.EqualFunc(before, after, func(x, y Lane) bool {
				return x.Bandwidth > 0 && compareRoughly(x.Bandwidth, y.Bandwidth) == 0 && !slices.Contains(x.Servers, gpu.BusID)
			}) {
				continue
			}
			for k := range before {
				compared++
				if !slices.Equal(before[k].Members, after[k].Members) {
					t.Errorf("%s less %s: the lane of %s changes from %v to %v", filepath.Base(file), gpu.BusID, before[k].GPU, before[k].Members, after[k].Members)
				}
			}
		}
	}
	if compared < 100 {
		t.Errorf("%d lanes were compared", compared)
	}
	t.Logf("%d lanes", compared)
}

func TestExplainOfRealHostsHasAtMost25Lines(t *testing.T) {
	files, err := filepath.Glob(topologies + "/*")
	if err != nil {
		t.Fatal(err)
	}
	own, err := filepath.Glob("../docs/hosts/*.xml")
	if err != nil {
		t.Fatal(err)
	}
	lanes, longest := 0, 0
	for _, file := range slices.Concat(files, own, []string{"../docs/hgx-4-nics.xml"}) {
		if info, err := os.Stat(file); err != nil || info.IsDir() || strings.HasSuffix(file, ".md") {
			continue
		}
		h, err := readInputFile(file)
		if err != nil {
			t.Logf("%s: %v", filepath.Base(file), err)
			continue
		}
		plan := planOf(t, 0, h, PlanConfig{AnyVendor: true})
		for _, l := range plan.Lanes {
			sentences, err := h.Explain(plan, l.GPU)
			if err != nil {
				t.Errorf("%s, %s: %v", filepath.Base(file), l.GPU, err)
			}
			lanes, longest = lanes+1, max(longest, len(sentences))
			if len(sentences) == 0 || len(sentences) > 25 {
				t.Errorf("%s: the explanation of %s has %d lines", filepath.Base(file), l.GPU, len(sentences))
			}
		}
	}
	if lanes < 40 {
		t.Errorf("%d lanes were explained", lanes)
	}
	t.Logf("%d lanes, at most %d lines", lanes, longest)
}
