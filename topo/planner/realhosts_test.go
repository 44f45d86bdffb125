package planner

import (
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/reader"
)

// results holds the rates of plans of a host. Plans without different NICs share an entry if the
// rates are equal.
type results struct {
	judged
	less []string // NICs; empty for the complete host
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

// realHosts returns the topology files that match pattern in the directory of files from foreign
// projects, if the directory is present, and the files of this repository. shared reports whether
// the directory has matching files.
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

// readable yields the hosts of the files that have a topology.
func readable(t *testing.T, files []string) iter.Seq2[string, *topo.Host] {
	return func(yield func(string, *topo.Host) bool) {
		for _, file := range files {
			if info, err := os.Stat(file); err != nil || info.IsDir() || strings.HasSuffix(file, ".md") {
				continue
			}
			h, err := reader.Read(file, topo.Options{})
			if err != nil {
				t.Logf("%s: %v", filepath.Base(file), err)
			} else if !yield(file, h) {
				return
			}
		}
	}
}

// The test plans real machines, complete and without a NIC, like after the failure of a NIC. The
// table of docs/estimate.md has the results. PEERLANE_TEST_UPDATE=1 writes the table.
func TestPlanOfRealHostsLessANICReachesTheOptimum(t *testing.T) {
	files, shared := realHosts(t, "*")
	var table strings.Builder
	hosts := 0
	for file, h := range readable(t, files) {
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
				return len(r.less) > 0 && fmt.Sprintf("%.2f %.2f %.2f", r.nccl, r.pxn, r.planned) == fmt.Sprintf("%.2f %.2f %.2f",
					j.nccl, j.pxn, j.planned)
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
			if fmt.Sprintf("%.2f", r.nccl) == fmt.Sprintf("%.2f", r.planned) {
				continue // nothing to gain
			}
			table.WriteString(r.row(filepath.Base(file)))
		}
	}
	if hosts < 30 {
		t.Errorf("%d hosts planned, want at least 30", hosts)
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
	body, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		t.Fatalf("%s has no part for this table", document)
	}
	want := "| machine | less | NCCL today | PXN sends | planned | optimum |\n|---|---|---|---|---|---|\n" + table.String()
	if body == want {
		return
	}
	if os.Getenv("PEERLANE_TEST_UPDATE") == "" {
		t.Fatalf("the table of %s is\n%s\nand the results are\n%s\nPEERLANE_TEST_UPDATE=1 writes the table", document, body,
			want)
	}
	if err := os.WriteFile(document, []byte(before+begin+want+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// A missing GPU changes the lane of another GPU in two cases only. The first case is a changed
// rate, because the remaining lanes get the bandwidth of the missing GPU. The second case is a new
// Index of a GPU, because ReadSysfs numbers the GPUs of the machine. A new Index changes the rate
// of the slowest lane by at most simplerCost and roundCost.
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
			if with, kept := slowestLane(planOf(t, 0, &less, config).Lanes),
				slowestLane(after); max(with, kept)*(1-simplerCost-roundCost) > min(with, kept) {
				t.Errorf("%s less %s: slowest lane with new indexes %g GB/s, with old indexes %g GB/s", filepath.Base(file),
					gpu.BusID, with, kept)
			}
			if !slices.EqualFunc(before, after, func(x, y Lane) bool {
				return x.Bandwidth > 0 && compareRoughly(x.Bandwidth, y.Bandwidth) == 0 && !slices.Contains(x.Servers, gpu.BusID)
			}) {
				continue
			}
			for k := range before {
				compared++
				if !slices.Equal(before[k].Members, after[k].Members) {
					t.Errorf("%s less %s: the lane of %s changes from %v to %v", filepath.Base(file), gpu.BusID, before[k].GPU,
						before[k].Members, after[k].Members)
				}
			}
		}
	}
	if compared < 100 || renumbered < 50 {
		t.Errorf("%d lanes and %d hosts with new indexes compared: hosts too few", compared, renumbered)
	}
	t.Logf("%d lanes, %d hosts with new indexes", compared, renumbered)
}

// The index of the last of two GPUs is 1, a power of two. allocation.places stays 2.
func TestPlanOfTwoGPUsLessTheLastKeepsTheLane(t *testing.T) {
	const sw, bridge = "00aa:00:00.0", "pci0000:10"
	h := topotest.Build(1).Sw(sw, 0, bridge, "").GPU(0, bridge, sw).GPU(0, bridge, sw).
		NIC("mlx5_0", 0, bridge, sw, topotest.Up(100)).NIC("mlx5_1", 0, bridge, sw, topotest.Up(100)).Host()
	for i := range h.GPUs {
		h.GPUs[i].Link = 12 // below the rate of a NIC
	}
	whole := planOf(t, 0, h, Config{})
	h.GPUs = h.GPUs[:1]
	less := planOf(t, 0, h, Config{})
	if before, after := whole.Lanes[0].Members, less.Lanes[0].Members; !slices.Equal(before, after) {
		t.Errorf("the lane of GPU 0 changes from %v to %v", before, after)
	}
}

// slowestLane returns the smallest rate of lanes, GB/s. Lanes without a rate do not count.
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
	for file, h := range readable(t, files) {
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
		t.Errorf("%d lanes explained, want at least 40", lanes)
	}
	t.Logf("%d lanes, at most %d lines", lanes, longest)
}
