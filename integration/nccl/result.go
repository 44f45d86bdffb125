package main

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/dustin/go-humanize"
)

// result is the content of result.json.
type result struct {
	Row    string `json:"row,omitempty"` // of integration/gpus/run
	Time   string `json:"time"`
	Host   string `json:"host"`
	System string `json:"system"`
	Driver string `json:"driver"`
	Commit string `json:"commit"`
	// Variables of NCCL's and PyTorch's that this program had, and ranks have.
	Variables []string `json:"variables,omitempty"`
	Links     string   `json:"links"` // nvidia-smi topo -m
	Ranks     int      `json:"ranks"`
	Isolation string   `json:"isolation"`
	Network   string   `json:"network"`
	Quick     bool     `json:"quick"`
	Seconds   float64  `json:"seconds"`
	Phases    []*phase `json:"phases"`
	Goals     []goal   `json:"goals"`
}

// goal is a required ratio.
type goal struct {
	What  string  `json:"what"`
	Value float64 `json:"value"` // 0: not measured
	Min   float64 `json:"min,omitempty"`
	Max   float64 `json:"max,omitempty"`
	Of    string  `json:"of"` // the two figures
}

// maxLines limits the lines of the logs of a failed phase in the output; the archive has the rest.
const maxLines = 24

// line returns a phase's result as one line.
func (p *phase) line() string {
	text := fmt.Sprintf("%-24s %5.1f s", p.Name, p.Seconds)
	for _, r := range p.Rates {
		if r.Operation == "all_reduce" && (r.Bytes == 8 || r.Bytes == 256*mib) {
			text += fmt.Sprintf("  %s %s: %s", r.Operation, humanize.IBytes(uint64(r.Bytes)), r.figure())
		}
	}
	if p.Checked > 0 {
		text += fmt.Sprintf("  %d buffers compared", p.Checked)
	}
	if len(p.Noticed) > 0 {
		text += fmt.Sprintf("  noticed after %.1f s", p.Noticed)
	}
	for _, t := range p.Trained[:min(len(p.Trained), 1)] {
		text += fmt.Sprintf("  %d steps in %.1f s, the longest %.0f ms, last loss %.6f", t.Steps, t.Took, t.Longest,
			t.Losses[len(t.Losses)-1])
	}
	for _, problem := range p.Problems[:min(len(p.Problems), 5)] {
		text += "\n    " + problem
	}
	if len(p.Problems) > 0 {
		for rank, what := range p.Doing {
			text += fmt.Sprintf("\n    rank %d was at: %s", rank, what)
		}
		for _, l := range p.Log[max(0, len(p.Log)-maxLines):] {
			text += fmt.Sprintf("\n    | %.250s", l)
		}
	}
	return text
}

func (r RateFound) figure() string {
	if r.Bytes < 1<<20 {
		return fmt.Sprintf("%.1f µs", r.Microseconds)
	}
	return fmt.Sprintf("%.2f GB/s", r.Bus)
}

// Lines of NCCL's log that show the transport of ranks, or a problem. Differences between channels
// and ranks are removed.
var (
	telling = regexp.MustCompile(`NCCL WARN|Using network|NET/Peerlane|NET/Plugin|TUNER/Plugin|coll channels|via (NET|P2P|SHM)|[Pp]lugin|GPU Direct RDMA|Topology detection|NCCL version|Connected all`)
	varying = []struct {
		what *regexp.Regexp
		by   string
	}{
		{regexp.MustCompile(`^.*? NCCL `), ""},
		{regexp.MustCompile(`Channel \d+/\d+ : (\d+)\[\w+\] -> (\d+)\[\w+\]`), "Channel * : $1 -> $2"},
		{regexp.MustCompile(`0x[0-9a-f]+`), "*"},
	}
)

// readLogs collects the informative lines of NCCL's log of rank 0, the warnings of the other ranks'
// logs, and the ends of the ranks' standard error after problems.
func (p *phase) readLogs(dir string, ranks int) {
	for i := range ranks {
		text, _ := os.ReadFile(filepath.Join(dir, fmt.Sprintf("nccl-%d.log", i)))
		times := map[string]int{}
		var order []string
		for _, l := range strings.Split(string(text), "\n") {
			if !telling.MatchString(l) || i > 0 && !strings.Contains(l, "WARN") {
				continue
			}
			for _, v := range varying {
				l = v.what.ReplaceAllString(l, v.by)
			}
			if times[l]++; times[l] == 1 {
				order = append(order, l)
			}
		}
		for _, l := range order[:min(len(order), 40)] {
			p.Log = append(p.Log, fmt.Sprintf("%d: %d× %s", i, times[l], l))
		}
		if len(p.Problems) == 0 {
			continue
		}
		text, _ = os.ReadFile(filepath.Join(dir, fmt.Sprintf("rank-%d.stderr", i)))
		lines := strings.Split(strings.TrimSpace(string(text)), "\n")
		for _, l := range lines[max(0, len(lines)-6):] {
			p.Log = append(p.Log, fmt.Sprintf("%d: stderr: %.300s", i, l))
		}
	}
}

// row returns the key of the measurement, without the times.
func (r RateFound) row() rate { return rate{Operation: r.Operation, Bytes: r.Bytes, Queued: r.Queued} }

// find returns a phase's measurement.
func (p *phase) find(row rate) (RateFound, bool) {
	i := slices.IndexFunc(p.Rates, func(r RateFound) bool { return r.row() == row })
	if i < 0 {
		return RateFound{}, false
	}
	return p.Rates[i], true
}

// best returns the fastest of the phases with a name prefix.
func (r *result) best(prefix string, row rate) (found RateFound, where string) {
	for _, p := range r.Phases {
		if f, ok := p.find(row); ok && len(p.Problems) == 0 && strings.HasPrefix(p.Name, prefix) &&
			(where == "" || f.Microseconds < found.Microseconds) {
			found, where = f, p.Name
		}
	}
	return found, where
}

// judge sets the goals.
func (r *result) judge() {
	r.Goals = nil
	if r.Row = ""; slices.ContainsFunc(r.Phases, func(p *phase) bool { return strings.HasPrefix(p.Name, nixlPrefix) }) {
		r.Row = "nixl"
		r.judgeLists()
	}
	if slices.ContainsFunc(r.Phases, func(p *phase) bool {
		return strings.HasPrefix(p.Name,
			installedPrefix)
	}) {
		r.judgeInstalled()
		return
	}
	if r.Row != "" {
		return
	}
	ratio := r.ratio
	large := func(operation string) rate { return rate{Operation: operation, Bytes: 256 * mib} }
	ratio("all_reduce 256 MiB against default NET/Socket", large("all_reduce"), "peerlane-rates", "socket-default",
		goal{Min: 40})
	ratio("all_reduce 256 MiB against the best NET/Socket", large("all_reduce"), "peerlane-rates", "socket-",
		goal{Min: 20})
	for _, o := range []string{"all_reduce", "broadcast", "send_recv"} { // both ways, one way, both ways
		ratio(o+" 256 MiB over Peerlane's TCP against default NET/Socket", large(o), "peerlane-tcp", "socket-default", goal{})
		ratio(o+" 256 MiB over Peerlane's TCP against the best NET/Socket", large(o), "peerlane-tcp", "socket-",
			goal{Min: 2})
	}
	ratio("all_reduce 256 MiB against one node over NVLink", large("all_reduce"), "peerlane-rates", "nvlink",
		goal{Min: 0.5})
	ratio("all_to_all 256 MiB against default NET/Socket", large("all_to_all"), "peerlane-rates", "socket-default",
		goal{Min: 10})
	for _, name := range []string{"train", "graphs"} {
		r.Goals = append(r.Goals, r.sameLosses("peerlane-"+name, "nvlink-"+name))
	}
	r.Goals = append(r.Goals, r.sameLosses("peerlane-hosts-train", "nvlink-train"))
	ratio("all_reduce 8 bytes, time, against NET/Socket", rate{Operation: "all_reduce", Bytes: 8}, "peerlane-rates",
		"socket-default", goal{Max: 0.7})
	ratio("all_reduce 8 bytes queued on the GPU, time, against NET/Socket",
		rate{Operation: "all_reduce", Bytes: 8, Queued: true}, "peerlane-rates", "socket-default", goal{Max: 0.7})
	r.Goals = append(r.Goals, r.paced("peerlane-staged-paced", large("all_reduce")))
}

// ratio adds a goal: the ratio of the best rate of our phases to the best rate of their phases, or
// with Most the ratio of the times.
func (r *result) ratio(what string, row rate, ours, theirs string, g goal) {
	a, at := r.best(ours, row)
	b, beside := r.best(theirs, row)
	g.What = what
	if at != "" && beside != "" {
		g.Of = fmt.Sprintf("%s (%s) to %s (%s)", a.figure(), at, b.figure(), beside)
		if g.Value = b.Microseconds / a.Microseconds; g.Max > 0 {
			g.Value = 1 / g.Value
		}
	}
	r.Goals = append(r.Goals, g)
}

// paced returns the ratio between the rate that the ranks together send over a paced NIC and the
// NIC's rate: each rank sends at the bus bandwidth.
func (r *result) paced(name string, row rate) goal {
	g := goal{What: fmt.Sprintf("%s 256 MiB of all ranks over one paced NIC, of its rate", row.Operation), Min: 0.9}
	for _, p := range r.Phases {
		if f, ok := p.find(row); ok && p.Name == name && len(p.Problems) == 0 {
			total := f.Bus * float64(r.Ranks)
			g.Value, g.Of = total/p.Pace, fmt.Sprintf("%d ranks of %.2f GB/s to %.2f GB/s", r.Ranks, f.Bus, p.Pace)
		}
	}
	return g
}

// sameLosses returns the fraction of a training's losses that another network reproduced. With two
// ranks it must be 1: the sum of two numbers has one order.
func (r *result) sameLosses(ours, theirs string) goal {
	g := goal{What: fmt.Sprintf("losses of %s that are those of %s", ours, theirs), Min: 1}
	losses := map[string][]float64{}
	for _, p := range r.Phases {
		for _, t := range p.Trained {
			losses[p.Name] = append(losses[p.Name], t.Losses...)
		}
	}
	a, b := losses[ours], losses[theirs]
	if len(a) == 0 || len(a) != len(b) {
		return g
	}
	slices.Sort(a) // ranks are ordered by end
	slices.Sort(b)
	same := 0
	for i := range a {
		if a[i] == b[i] {
			same++
		}
	}
	g.Value, g.Of = float64(same)/float64(len(a)), fmt.Sprintf("%d of %d", same, len(a))
	return g
}

// table returns the measurements as a table.
func (r *result) table() string {
	r.judge()
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s, %s; %d ranks, %s; %s.\n\n", r.Time, r.Host, r.System, r.Ranks, r.Isolation, r.Network)
	for _, p := range r.Phases {
		if p.Torch != "" {
			fmt.Fprintf(&b, "PyTorch %s, NCCL %s, %s; %s.\n\n", p.Torch, p.NCCL, p.GPU, r.Driver)
			break
		}
	}
	var measured []*phase
	var rows []rate
	for _, p := range r.Phases {
		if len(p.Rates) > 0 {
			measured = append(measured, p)
		}
		for _, f := range p.Rates {
			if !slices.Contains(rows, f.row()) {
				rows = append(rows, f.row())
			}
		}
	}
	if r.Commit != "" {
		fmt.Fprintf(&b, "Peerlane of commit %s.\n\n", r.Commit)
	}
	if len(r.Variables) > 0 {
		fmt.Fprintf(&b, "Variables of this machine, which all ranks have: %s.\n\n", strings.Join(r.Variables, ", "))
	}
	if len(measured) > 0 {
		fmt.Fprint(&b, "Median time below 1 MiB, else bus bandwidth:\n\n| operation | size |")
		for _, p := range measured {
			fmt.Fprintf(&b, " %s |", p.Name)
		}
		fmt.Fprintf(&b, "\n|---|---|%s\n", strings.Repeat("---|", len(measured)))
	}
	for _, row := range rows {
		size := humanize.IBytes(uint64(row.Bytes))
		if row.Queued {
			size += ", queued"
		}
		fmt.Fprintf(&b, "| %s | %s |", row.Operation, size)
		for _, p := range measured {
			text := ""
			if f, ok := p.find(row); ok {
				text = f.figure()
			}
			fmt.Fprintf(&b, " %s |", text)
		}
		fmt.Fprintln(&b)
	}
	for _, p := range r.Phases {
		if p.Chosen != nil {
			fmt.Fprintf(&b, "\nNCCL chose in %s: %s\n", p.Name, p.Chosen)
		}
	}
	b.WriteString(r.tableOfLists())
	fmt.Fprint(&b, "\n| asked for | ratio | must be | |\n|---|---|---|---|\n")
	for _, g := range r.Goals {
		bound := "reported"
		switch {
		case g.Max > 0:
			bound = fmt.Sprintf("≤ %v", g.Max)
		case g.Min > 0:
			bound = fmt.Sprintf("≥ %v", g.Min)
		}
		value := "not measured"
		if g.Of != "" {
			value = fmt.Sprintf("%.2f", g.Value)
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", g.What, value, bound, g.Of)
	}
	fmt.Fprint(&b, "\n| phase | s | |\n|---|---|---|\n")
	for _, p := range r.Phases {
		state := "all right"
		if p.Skipped != "" {
			state = "skipped: " + p.Skipped
		} else if len(p.Problems) > 0 {
			state = "WRONG: " + strings.ReplaceAll(p.Problems[0], "|", "/")
		}
		fmt.Fprintf(&b, "| %s | %.1f | %s |\n", p.Name, p.Seconds, strings.ReplaceAll(state, "\n", " "))
	}
	return b.String()
}

// problems returns the problems of every phase.
func (r *result) problems() (list []string) {
	for _, p := range r.Phases {
		if p.Skipped != "" {
			list = append(list, p.Name+": skipped: "+p.Skipped)
		} else if len(p.Problems) > 0 {
			list = append(list, p.Name+": "+p.Problems[0])
		}
	}
	return list
}

// write writes result.json and table.md.
func (r *result) write(dir string) error {
	table := r.table()
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(filepath.Join(dir, "result.json"), append(text, '\n'), 0o644),
		os.WriteFile(filepath.Join(dir, "table.md"), []byte(table), 0o644))
}

// maxLog is the retained size of a log: of a longer file pack keeps the beginning and the end.
const maxLog = 4 << 20

// pack writes every log to an archive.
func (h *host) pack(path string) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	compressed := gzip.NewWriter(f)
	archive := tar.NewWriter(compressed)
	err = filepath.WalkDir(h.logs(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(h.work, path)
		if err != nil {
			return err
		}
		text, err := readLog(path)
		if err != nil {
			return err
		}
		if err := archive.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text))}); err != nil {
			return err
		}
		_, err = archive.Write(text)
		return err
	})
	return errors.Join(err, archive.Close(), compressed.Close(), f.Close())
}

func readLog(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() <= maxLog {
		return io.ReadAll(io.LimitReader(f, maxLog))
	}
	text := make([]byte, maxLog)
	if _, err := f.ReadAt(text[:maxLog/2], 0); err != nil {
		return nil, err
	}
	_, err = f.ReadAt(text[maxLog/2:], info.Size()-maxLog/2)
	return text, err
}
