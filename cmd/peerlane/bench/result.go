package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
)

// version is the version of a Report in JSON.
const version = 1

// Report is the result of a run. The report contains no ratio: Ratio computes the ratio from a row
// and a baseline of the same run.
type Report struct {
	Version int       `json:"version"`
	Date    time.Time `json:"date"`
	// Release is the version of Peerlane.
	Release string   `json:"release"`
	Command []string `json:"command"`
	// Host describes the host in words.
	Host string `json:"host"`
	// GPUs are the models by index.
	GPUs      []string   `json:"gpus"`
	Driver    int        `json:"driver"`
	Simulated bool       `json:"simulated"`
	Rows      []Row      `json:"rows"`
	Baselines []Baseline `json:"baselines"`
	// Problems are the incomplete tables, with the reason.
	Problems []string `json:"problems,omitempty"`
	// Seconds are the durations of the tables in seconds.
	Seconds map[string]float64 `json:"seconds,omitempty"`
	// Missing are the goals that this run could not measure.
	Missing []Missing `json:"missing,omitempty"`
	// Hosts are the two hosts of a run between hosts: A, which connected, and B; empty for a
	// run on one host. Host, GPUs and Driver describe A.
	Hosts []Side `json:"hosts,omitempty"`
}

// Missing is a part of a table that was not measured, with the reason.
type Missing struct {
	Table string `json:"table"`
	What  string `json:"what"`
	Why   string `json:"why"`
}

// Units of rows and baselines.
const (
	GBs          = "GB/s" // 1e9 bytes a second
	microseconds = "µs"   // the median, if the row has Times
	milliseconds = "ms"
	miB          = "MiB"
	perSecond    = "/s" // iterations of kernels
	cores        = "cores"

	entriesPerSecond = "entries/s" // entries of a list
	index            = "index"     // Jain's index, or the slowest over the fastest
)

// Row is a measured value.
type Row struct {
	Table     string `json:"table"`
	What      string `json:"what"`
	Route     string `json:"route,omitempty"`
	Transport string `json:"transport,omitempty"`
	// Size is the size of a message in bytes.
	Size  uint64 `json:"size,omitempty"`
	Depth int    `json:"depth,omitempty"`
	// State lists the busy GPUs; empty if every GPU is idle.
	State string         `json:"state,omitempty"`
	Value float64        `json:"value"`
	Unit  string         `json:"unit"`
	Times *measure.Times `json:"times,omitempty"`
	// Baseline is the name of the baseline of Value; empty without a baseline.
	Baseline string `json:"baseline,omitempty"`
	// Asked is the bound of the ratio or, without a baseline, of the value.
	Asked *Bound `json:"asked,omitempty"`
	Note  string `json:"note,omitempty"`
}

// Baseline is a value to compare rows with.
type Baseline struct {
	Name  string         `json:"name"`
	Value float64        `json:"value"`
	Unit  string         `json:"unit"`
	Times *measure.Times `json:"times,omitempty"`
}

// Bound is a minimum or a maximum, never both.
type Bound struct {
	Min *float64 `json:"min,omitempty"`
	Max *float64 `json:"max,omitempty"`
}

func atLeast(f float64) *Bound { return &Bound{Min: &f} }
func atMost(f float64) *Bound  { return &Bound{Max: &f} }

func (b *Bound) String() string {
	switch {
	case b == nil:
		return ""
	case b.Max != nil:
		return fmt.Sprintf("≤ %g", *b.Max)
	}
	return fmt.Sprintf("≥ %g", *b.Min)
}

func (b *Bound) met(value float64) bool {
	if b.Max != nil {
		return value <= *b.Max
	}
	return value >= *b.Min
}

// margin returns 1 for a value at the bound, and less for a value that misses the bound.
func (b *Bound) margin(value float64) float64 {
	switch {
	case b.Max == nil:
		return value / *b.Min
	case value <= 0:
		return math.Inf(1)
	}
	return *b.Max / value
}

// of returns the baseline of a row.
func (r *Report) of(row Row) (Baseline, bool) {
	for _, b := range r.Baselines {
		if row.Baseline != "" && b.Name == row.Baseline {
			return b, true
		}
	}
	return Baseline{}, false
}

// Ratio returns the quotient of the row's value and its baseline; false without a baseline of the
// same run.
func (r *Report) Ratio(row Row) (float64, bool) {
	b, ok := r.of(row)
	if !ok || b.Value == 0 {
		return 0, false
	}
	return row.Value / b.Value, true
}

// met reports whether a row meets its bound; ok is false without a bound or a value.
func (r *Report) met(row Row) (met, ok bool) {
	if row.Asked == nil || r.Simulated {
		return false, false
	}
	value, ok := r.judged(row)
	return ok && row.Asked.met(value), ok
}

// judged returns the value that a bound applies to: the row's ratio or, without a baseline, its
// value.
func (r *Report) judged(row Row) (value float64, ok bool) {
	if row.Baseline == "" {
		return row.Value, true
	}
	return r.Ratio(row)
}

// Read reads a Report from JSON.
func Read(in io.Reader) (*Report, error) {
	var r Report
	d := json.NewDecoder(in)
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		return nil, fmt.Errorf("not a result of peerlane bench -o json: %w", err)
	}
	return &r, r.check()
}

// check returns an error for a report that cannot be shown.
func (r *Report) check() error {
	if r.Version != version {
		return &versionError{r.Version}
	}
	if n := len(r.Hosts); n != 0 && n != 2 {
		return fmt.Errorf("the result has %d hosts; a result between hosts has two", n)
	}
	for _, s := range r.Hosts {
		if s.Simulated != r.Simulated {
			return errMixed
		}
	}
	if len(r.Rows)+len(r.Missing) == 0 {
		if len(r.Problems) == 0 {
			return errNoRows
		}
		return fmt.Errorf("%w: %s", errNoRows, strings.Join(r.Problems, "; "))
	}
	units := map[string]string{}
	for _, b := range r.Baselines {
		if _, twice := units[b.Name]; twice {
			return &baselineError{b.Name, b.Value, true}
		}
		if !finite(b.Value) || b.Value <= 0 {
			return &baselineError{b.Name, b.Value, false}
		}
		units[b.Name] = b.Unit
	}
	for _, row := range r.Rows {
		unit, measured := units[row.Baseline]
		switch {
		case row.Asked != nil && (row.Asked.Min == nil) == (row.Asked.Max == nil):
			return fmt.Errorf("%s needs either a minimum or a maximum", row.name())
		case !finite(row.Value) || row.Value < 0:
			return &rowError{row.name(), row.Value}
		case row.Baseline == "":
		case !measured:
			return &ratioError{row.name(), row.Baseline, row.Unit, ""}
		case unit != row.Unit:
			return &ratioError{row.name(), row.Baseline, row.Unit, unit}
		}
	}
	return nil
}

func finite(f float64) bool { return !math.IsNaN(f) && !math.IsInf(f, 0) }

func (row Row) name() string {
	return strings.TrimSpace(fmt.Sprintf("%s, %s %s", row.Table, row.What, sizeText(row.Size)))
}

func sizeText(n uint64) string {
	if n == 0 {
		return ""
	}
	return humanize.IBytes(n)
}

// worst returns the row with the smallest margin, and its judged value. Without bounds, the
// returned row has no bound.
func (r *Report) worst(rows []Row) (worst Row, value float64) {
	lowest := math.Inf(1)
	for _, row := range rows {
		if row.Asked == nil {
			continue
		}
		v, ok := r.judged(row)
		if !ok {
			continue
		}
		if margin := row.Asked.margin(v); worst.Asked == nil || margin < lowest {
			worst, value, lowest = row, v, margin
		}
	}
	return worst, value
}

// Summary describes the run in a sentence.
func (r *Report) Summary() string {
	if len(r.Hosts) == 2 {
		return r.summaryOfHosts()
	}
	if r.Simulated {
		return fmt.Sprintf("%d rows, simulated: these figures are of host memory and say nothing about GPUs.", len(r.Rows))
	}
	asked, met := 0, 0
	for _, row := range r.Rows {
		if ok, known := r.met(row); known {
			asked++
			if ok {
				met++
			}
		}
	}
	text := fmt.Sprintf("%d rows; %d of %d bounds met", len(r.Rows), met, asked)
	if met < asked {
		row, value := r.worst(r.Rows)
		text += fmt.Sprintf("; farthest from its bound is %s (%.2f, asked for %s)", row.name(), value, row.Asked)
	}
	if len(r.Problems) > 0 {
		text += fmt.Sprintf("; %d tables are incomplete", len(r.Problems))
	}
	return text + "."
}

// summaryOfHosts returns the best rate of the lanes between two hosts in each direction.
func (r *Report) summaryOfHosts() string {
	var directions []string
	short := ""
	for _, direction := range []string{"A to B", "B to A"} {
		var best Row
		for _, row := range r.Rows {
			if row.What == direction && row.Unit == GBs && row.Value >= best.Value {
				best = row
			}
			if strings.HasPrefix(row.What, direction+",") && row.Times != nil && short == "" {
				short = fmt.Sprintf("; %s in %.1f µs, p99 %.1f", sizeText(row.Size), row.Times.P50, row.Times.P99)
				if ratio, ok := r.Ratio(row); ok {
					short += fmt.Sprintf(" (%.2f of plain TCP's time)", ratio)
				}
			}
		}
		if best.Unit == "" {
			continue
		}
		text := fmt.Sprintf("%s %.3g GB/s over %s", direction, best.Value, best.Transport)
		if ratio, ok := r.Ratio(best); ok {
			text += fmt.Sprintf(", %.2f of plain TCP", ratio)
		}
		directions = append(directions, text)
	}
	text := strings.Join(directions, "; ") + short
	if r.Simulated {
		text += "; the GPUs are simulated: the figures are of host memory and say nothing about GPUs"
	}
	return text + "."
}
