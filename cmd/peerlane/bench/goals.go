package bench

import (
	"fmt"
	"strings"
)

// goal is a goal for Peerlane's speed, with a selection of rows.
type goal struct {
	what, asked string
	table       string
	// of selects rows of the table; nil selects every row.
	of func(Row) bool
}

// goals returns the goals for Peerlane's speed, in the order of the tables.
func goals() []goal {
	containing := func(text string) func(Row) bool {
		return func(row Row) bool { return strings.Contains(row.What, text) }
	}
	by := func(route string) func(Row) bool {
		return func(row Row) bool { return row.Route == route }
	}
	return []goal{
		{"relay's copy, to and from a slot, depth 16, of a raw copy by the same GPU",
			"≥ 0.98 from 4 MiB, 0.95 at 1 MiB, 0.90 at 64 KiB", "copy", nil},
		{"client copy with gpu=, event handed over, of a raw copy", "≥ 0.95 from 4 MiB", "client-copy", nil},
		{"8 bytes asked for and completed, of copy and synchronise in one process", "≤ 1.15", "latency",
			containing("a relay's copy")},
		{"added by ring, wake-up and completion, while busy", "p50 ≤ 1 µs, p99 ≤ 5 µs", "latency", containing("rings")},
		{"route direct, of a raw copy", "≥ 0.95 from 16 MiB", "routes", by(direct)},
		{"route staged over verbs, of the slowest raw leg", "≥ 0.95 from 16 MiB, four GPUs", "routes", by(staged)},
		{"whole routes, of the best bounce", "≥ 6 from 16 MiB", "bounce", nil},
		{"uniformity: one stream per GPU, paced NICs", "slowest over fastest ≥ 0.95, total ≥ 0.95", "uniformity", nil},
		{"many clients, of one raw copy", "≥ 0.95, Jain's index ≥ 0.99", "many-clients", nil},
		{"GPUs kept busy by another process: small copies, p99 of idle", "SMs held ≤ 2, memory-bound ≤ 3", "busy",
			containing("p99")},
		{"the same: large copies, of raw in the same state", "≥ 0.9", "busy", containing("rate")},
		{"bystander: the server GPU's owner computes, less the relay's share of memory", "≥ 0.97", "bystander", nil},
		{"GPU memory: of others besides staging; of the client's own GPU", "0; ≤ 270 MiB", "memory", nil},
		{"processor time: idle in 60 s; at ≥ 0.9 of the bandwidth", "≤ 10 ms; ≤ 1 core", "cpu", nil},
		{"lists of 40,064 × 8 KiB and 112,000 × 44 KiB; post; a relay's processor time for an entry",
			"≤ 30 and 80 ms; ≤ 2 ms; ≤ 0.7 µs", "kv", nil},
		{"first copy after start, above CUDA's own start", "≤ 60 ms", "first-copy", containing("above")},
		{"two relays of one host over TCP, of the best plain sockets", "reported", tableNetwork, nil},
		{"lanes between two hosts, of the best plain sockets between them", "reported", tableHosts, nil},
	}
}

// Verdict is a goal with the result of a run.
type Verdict struct {
	What, Asked string
	// Reached is the ratio or value of the worst row, with the row; empty without a measurement.
	Reached string
	// Verdict is yes, no with the number of rows that fall short, reported, simulated, or not
	// measured with the reason.
	Verdict string
}

// Verdicts returns the verdicts on the goals of a run on one host, or of a run between two hosts.
func (r *Report) Verdicts() []Verdict {
	var list []Verdict
	for _, g := range goals() {
		if (g.table == tableHosts) == (len(r.Hosts) > 0) {
			list = append(list, r.verdict(g))
		}
	}
	return list
}

func (r *Report) verdict(g goal) Verdict {
	v := Verdict{What: g.what, Asked: g.asked, Verdict: "not measured"}
	var rows []Row
	for _, row := range r.Rows {
		if row.Table == g.table && (g.of == nil || g.of(row)) {
			rows = append(rows, row)
		}
	}
	var why []string
	for _, m := range r.Missing {
		if m.Table == g.table && (g.of == nil || g.of(Row{What: m.What})) {
			why = append(why, m.What+": "+m.Why)
		}
	}
	asked, short := 0, 0
	for _, row := range rows {
		if met, known := r.met(row); known {
			asked++
			if !met {
				short++
			}
		}
	}
	if worst, value := r.worst(rows); worst.Asked != nil {
		v.Reached = fmt.Sprintf("%.4g", value)
		if worst.Baseline == "" && worst.Unit != index {
			v.Reached += " " + worst.Unit
		}
		v.Reached += ": " + worst.description()
	}
	switch {
	case len(rows) == 0:
	case r.Simulated:
		v.Verdict = "simulated"
	case asked == 0:
		v.Verdict = "reported"
	case short == 0:
		v.Verdict = "yes"
	default:
		v.Verdict = fmt.Sprintf("no, %d of %d rows fall short", short, asked)
	}
	if len(why) > 0 {
		text := strings.Join(why, "; ")
		if len(rows) > 0 {
			text = "; not measured: " + text
		} else {
			text = ": " + text
		}
		v.Verdict += text
	}
	return v
}

// description returns the fields that distinguish the row from other rows of its table.
func (row Row) description() string {
	text := row.What
	for _, more := range []string{row.State, row.Route, sizeText(row.Size)} {
		if more != "" {
			text += ", " + more
		}
	}
	return text
}
