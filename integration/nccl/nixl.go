package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
)

// Phases of NIXL have two agents of integration/gpus/kv.py in place of PyTorch's ranks: blocks of a
// KV cache over Peerlane's backend, and over NIXL's own UCX. They run only on request.

// nixlPrefix begins the names of the phases with agents of NIXL.
const nixlPrefix = "nixl-"

// list is a transfer of kv.py: Blocks of Bytes in each of Layers.
type list struct {
	Name       string    `json:"name"`
	Layers     int       `json:"layers"`
	Blocks     int       `json:"blocks"`
	Bytes      int       `json:"bytes"`
	Rounds     int       `json:"rounds"`  // at most, after a first transfer that connects
	Seconds    float64   `json:"seconds"` // no transfer begins later
	Intervals  []float64 `json:"intervals,omitempty"`
	Operations []string  `json:"operations,omitempty"`
}

// ListFound is the result of a list that rank 1 read or wrote. Times are medians from the post.
type ListFound struct {
	Name       string  `json:"name,omitempty"`
	Entries    int     `json:"entries,omitempty"`
	EntryBytes int     `json:"entry_bytes,omitempty"`
	IntervalMS float64 `json:"interval_ms,omitempty"` // between two checks
	Transfers  int     `json:"transfers,omitempty"`
	FirstMS    float64 `json:"first_ms,omitempty"`
	MinMS      float64 `json:"min_ms,omitempty"`
	MedianMS   float64 `json:"median_ms,omitempty"`
	PostMS     float64 `json:"post_ms,omitempty"`
	MakeMS     float64 `json:"make_ms,omitempty"`      // NIXL's own preparation of the request, before the post
	Processor  float64 `json:"processor_us,omitempty"` // of the agent's process for an entry
	Rate       float64 `json:"rate,omitempty"`         // GB/s
}

// listRow is a result with its operation.
type listRow struct {
	Operation string `json:"operation"`
	ListFound
}

// planNIXL returns the phases of NIXL: over Peerlane and over UCX between two isolated containers,
// and over UCX between two processes of one container with all GPUs.
func planNIXL(o options) (phases []settings) {
	lists := []list{
		{Name: "64 KiB", Layers: 1, Blocks: 1, Bytes: 64 << 10, Rounds: 200, Seconds: 1, Intervals: []float64{0}},
		{Name: "1 GiB", Layers: 1, Blocks: 1, Bytes: 1024 * mib, Rounds: 5, Seconds: 1, Intervals: []float64{0}},
		{Name: "A", Layers: 64, Blocks: 626, Bytes: 8 << 10, Rounds: 9, Seconds: 1.5},
		{Name: "B", Layers: 64, Blocks: 1750, Bytes: 44 << 10, Rounds: 5, Seconds: 2},
	}
	if o.gpus != testbed.GPUsReal {
		for i := range lists {
			l := &lists[i]
			l.Blocks, l.Bytes, l.Rounds = (l.Blocks+127)/128, min(l.Bytes, mib), 2
		}
	}
	for _, p := range []struct{ name, by, backend, memory string }{
		{"peerlane", byPeerlane, "PEERLANE", "cuMemCreate"},
		{"ucx-isolated", bySocket, "UCX", "cudaMalloc"},
		{"ucx-shared", byNVLink, "UCX", "cudaMalloc"},
	} {
		lists := slices.Clone(lists)
		for i := range lists {
			if p.by == bySocket { // a list takes up to 15 s, beside which a pause of 10 ms is nothing
				lists[i].Intervals = []float64{0}
			}
		}
		j := job{Backend: p.backend, Memory: p.memory, Lists: lists}
		s := settings{Name: nixlPrefix + p.name, By: p.by, Job: j}
		if p.by == byPeerlane {
			s.Variables = []string{"NIXL_PLUGIN_DIR=/usr/lib/peerlane/nixl"}
		} else {
			s.Variables = []string{"UCX_LOG_LEVEL=info", "UCX_LOG_FILE=stderr"}
		}
		phases = append(phases, s)
	}
	return phases
}

// route matches the line of a backend that names the way of the data.
var route = regexp.MustCompile(`PEERLANE: .*|(?:rma|rma_am|tag|am)\([^ ]*/[^)]*\).*`)

// readRoutes collects the lines in which a backend reports its route.
func (p *phase) readRoutes(dir string, ranks int) {
	for i := range ranks {
		text, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("rank-%d.stderr", i)))
		if err != nil {
			p.problem("%v", err)
		}
		for _, line := range route.FindAllString(string(text), -1) {
			if !slices.Contains(p.Routes, line) && len(p.Routes) < maxRoutes {
				p.Routes = append(p.Routes, line)
			}
		}
	}
}

// maxRoutes bounds the lines of routes in a report: UCX prints one for each lane.
const maxRoutes = 12

// tableOfLists returns the measurements of NIXL as a table.
func (r *result) tableOfLists() string {
	var b strings.Builder
	for _, p := range r.Phases {
		if len(p.Lists) == 0 {
			continue
		}
		if b.Len() == 0 {
			fmt.Fprintf(&b, "NIXL %s, %s; %s.\n", p.NIXL, p.GPU, r.Driver)
			fmt.Fprint(&b, "\n| phase | list | operation | checked every | median ms | least | first | post ms | "+
				"make ms | GB/s | processor µs for an entry |\n|---|---|---|---|---|---|---|---|---|---|---|\n")
		}
		for _, l := range p.Lists {
			fmt.Fprintf(&b, "| %s | %s: %d × %d | %s | %.0f ms | %.3f | %.3f | %.3f | %.3f | %.3f | %.2f | %.3f |\n",
				p.Name, l.Name, l.Entries, l.EntryBytes, l.Operation, l.IntervalMS, l.MedianMS, l.MinMS, l.FirstMS,
				l.PostMS, l.MakeMS, l.Rate, l.Processor)
		}
	}
	for _, p := range r.Phases {
		for _, text := range p.Routes {
			fmt.Fprintf(&b, "\n%s: %s\n", p.Name, text)
		}
	}
	return b.String()
}

// judgeLists compares Peerlane's lists with UCX's and with limits in milliseconds.
func (r *result) judgeLists() {
	find := func(phase, name, operation string) (listRow, bool) {
		for _, p := range r.Phases {
			if p.Name != nixlPrefix+phase || len(p.Problems) > 0 {
				continue
			}
			for _, l := range p.Lists {
				if l.Name == name && l.Operation == operation && l.IntervalMS == 0 {
					return l, true
				}
			}
		}
		return listRow{}, false
	}
	for _, c := range []struct {
		name             string
		maxMS            float64 // ms
		isolated, shared float64
	}{{"A", 30, 5, 1}, {"B", 80, 0, 1}, {"1 GiB", 3.1, 50, 0.95}} {
		for _, operation := range []string{"READ", "WRITE"} {
			g := goal{What: fmt.Sprintf("%s, %s, ms", c.name, operation), Max: c.maxMS}
			ours, ok := find("peerlane", c.name, operation)
			if ok {
				g.Value, g.Of = ours.MedianMS, fmt.Sprintf("median of %d", ours.Transfers)
			}
			r.Goals = append(r.Goals, g)
			for _, beside := range []struct {
				phase string
				ratio float64
			}{{"ucx-isolated", c.isolated}, {"ucx-shared", c.shared}} {
				g := goal{What: fmt.Sprintf("%s, %s, against %s", c.name, operation, beside.phase), Min: beside.ratio}
				if theirs, named := find(beside.phase, c.name, operation); ok && named {
					g.Value = theirs.MedianMS / ours.MedianMS
					g.Of = fmt.Sprintf("%.3f ms to %.3f ms", ours.MedianMS, theirs.MedianMS)
				}
				r.Goals = append(r.Goals, g)
			}
		}
	}
	for _, c := range []struct {
		what, name string
		maxMS      float64
		value      func(listRow) float64
	}{
		{"A, READ, post in ms", "A", 2, func(l listRow) float64 { return l.PostMS }},
		{"64 KiB, READ, post to end in µs", "64 KiB", 25, func(l listRow) float64 { return l.MedianMS * 1e3 }},
	} {
		g := goal{What: c.what, Max: c.maxMS}
		if l, ok := find("peerlane", c.name, "READ"); ok {
			g.Value, g.Of = c.value(l), fmt.Sprintf("median of %d", l.Transfers)
		}
		r.Goals = append(r.Goals, g)
	}
}
