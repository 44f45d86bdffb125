package planner

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/reader"
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

// realHosts lists the files of other projects' hosts that match pattern, where the directory is
// present, and the files of this repository. shared reports whether other projects' are listed.
func realHosts(t *testing.T, pattern string) (files []string, shared bool) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(topotest.Topologies, pattern))
	if err != nil {
		t.Fatal(err)
	}
	own, err := filepath.Glob("../../docs/hosts/*.xml")
	if err != nil {
		t.Fatal(err)
	}
	return slices.Concat(files, own, []string{"../../docs/hgx-4-nics.xml"}), len(files) > 0
}

// Real machines, and the same less each of their NICs in turn: what a failed NIC leaves. The
// table of docs/estimate.md has the results. PEERLANE_TEST_UPDATE=1 writes it anew.
func TestPlanOfRealHostsLessANICReachesTheOptimum(t *testing.T) {
	files, shared := realHosts(t, "*")
	var table strings.Builder
	hosts := 0
	for _, file := range files {
		if info, err := os.Stat(file); err != nil || info.IsDir() || strings.HasSuffix(file, ".md") {
			continue
		}
		h, err := reader.Read(file, topo.Options{})
		if err != nil {
			t.Logf("%s: %v", filepath.Base(file), err)
			continue
		}
		var all []results
		try := func(h *topo.Host, less string) {
			name := filepath.Base(file) + " less " + less
			config := Config{AnyVendor: true}
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
	const document, begin, end = "../../docs/estimate.md", "<!-- real hosts -->\n", "<!-- end of real hosts -->\n"
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

// A missing GPU changes the lane of another GPU only where a rate changes, because other lanes
// get the bandwidth of the missing one, or where the others lose their Index: ReadSysfs
// numbers the GPUs that it finds. A new Index can change the lane, and the rate of the
// slowest lane by no more than fewer members and whole weights may cost.
func TestPlanOfRealHostLessAGPUKeepsLanesWhereRatesAndIndexesStay(t *testing.T) {
	files, _ := realHosts(t, "*.xml")
	config, compared, renumbered := Config{AnyVendor: true}, 0, 0
	for _, file := range files {
		h, err := reader.Read(file, topo.Options{})
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
			less.GPUs = slices.Clone(less.GPUs)
			for k := range less.GPUs {
				less.GPUs[k].Index = k
			}
			renumbered++
			if with, kept := slowestLane(planOf(t, 0, &less, config).Lanes), slowestLane(after); max(with, kept)*(1-simplerCost-roundCost) > min(with, kept) {
				t.Errorf("%s less %s: with new indexes the slowest lane has %g GB/s, and with the old ones %g", filepath.Base(file), gpu.BusID, with, kept)
			}
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
	if compared < 100 || renumbered < 50 {
		t.Errorf("%d lanes and %d hosts with new indexes were compared", compared, renumbered)
	}
	t.Logf("%d lanes, %d hosts with new indexes", compared, renumbered)
}

// The index of the last of two GPUs is a power of two.
func TestPlanOfTwoGPUsLessTheLastKeepsTheLane(t *testing.T) {
	const sw, bridge = "00aa:00:00.0", "pci0000:10"
	h := topotest.Build(1).Sw(sw, 0, bridge, "").GPU(0, bridge, sw).GPU(0, bridge, sw).
		NIC("mlx5_0", 0, bridge, sw, topotest.Up(100)).NIC("mlx5_1", 0, bridge, sw, topotest.Up(100)).Host()
	for i := range h.GPUs {
		h.GPUs[i].Link = 12 // less than a NIC has
	}
	whole := planOf(t, 0, h, Config{})
	h.GPUs = h.GPUs[:1]
	less := planOf(t, 0, h, Config{})
	if before, after := whole.Lanes[0].Members, less.Lanes[0].Members; !slices.Equal(before, after) {
		t.Errorf("the lane of GPU 0 changes from %v to %v", before, after)
	}
}

// slowestLane is the rate of the slowest lane that has one; 0 for none.
func slowestLane(lanes []Lane) (rate float64) {
	for _, l := range lanes {
		if l.Bandwidth > 0 && (rate == 0 || l.Bandwidth < rate) {
			rate = l.Bandwidth
		}
	}
	return rate
}

func TestExplainOfRealHostsHasAtMost25Lines(t *testing.T) {
	files, _ := realHosts(t, "*")
	lanes, longest := 0, 0
	for _, file := range files {
		if info, err := os.Stat(file); err != nil || info.IsDir() || strings.HasSuffix(file, ".md") {
			continue
		}
		h, err := reader.Read(file, topo.Options{})
		if err != nil {
			t.Logf("%s: %v", filepath.Base(file), err)
			continue
		}
		plan := planOf(t, 0, h, Config{AnyVendor: true})
		for _, l := range plan.Lanes {
			sentences, err := plan.Explain(h, l.GPU)
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
