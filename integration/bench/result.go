package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/peerlane/peerlane/integration/measure"
)

// Version of a Report as JSON.
const Version = 1

// Report is what one run measured. A ratio is never stored: it is made of a row
// and a baseline of the same run.
type Report struct {
	Version   int        `json:"version"`
	Date      time.Time  `json:"date"`
	Release   string     `json:"release"` // of Peerlane
	Command   []string   `json:"command"`
	Host      string     `json:"host"` // in words
	GPUs      []string   `json:"gpus"` // models, by index
	Driver    int        `json:"driver"`
	Simulated bool       `json:"simulated"`
	Rows      []Row      `json:"rows"`
	Baselines []Baseline `json:"baselines"`
	// Problems are the tables that could not be measured to their end, and why.
	Problems []string `json:"problems,omitempty"`
}

// Units of a Row and a Baseline.
const (
	GBs          = "GB/s" // 1e9 bytes a second
	Microseconds = "µs"   // the median, where there are Times
	Milliseconds = "ms"
	Cores        = "cores"
	Index        = "index" // Jain's, or the slowest over the fastest
)

// Row is one thing that was measured.
type Row struct {
	Table     string         `json:"table"`
	What      string         `json:"what"`
	Route     string         `json:"route,omitempty"`
	Transport string         `json:"transport,omitempty"`
	Size      uint64         `json:"size,omitempty"` // bytes of a message
	Depth     int            `json:"depth,omitempty"`
	State     string         `json:"state,omitempty"` // who is busy; empty for nobody
	Value     float64        `json:"value"`
	Unit      string         `json:"unit"`
	Times     *measure.Times `json:"times,omitempty"`
	// Baseline names what Value is compared with; empty where nothing was.
	Baseline string `json:"baseline,omitempty"`
	// Asked is what the ratio must reach, or without a baseline the value.
	Asked *Bound `json:"asked,omitempty"`
	Note  string `json:"note,omitempty"`
}

// Baseline is what rows are compared with.
type Baseline struct {
	Name  string         `json:"name"`
	Value float64        `json:"value"`
	Unit  string         `json:"unit"`
	Times *measure.Times `json:"times,omitempty"`
}

// Bound is what is asked for: at least or at most so much.
type Bound struct {
	Least float64 `json:"least,omitempty"`
	Most  float64 `json:"most,omitempty"`
}

func (b *Bound) String() string {
	switch {
	case b == nil:
		return ""
	case b.Most > 0:
		return fmt.Sprintf("≤ %g", b.Most)
	}
	return fmt.Sprintf("≥ %g", b.Least)
}

func (b *Bound) met(value float64) bool {
	if b.Most > 0 {
		return value <= b.Most
	}
	return value >= b.Least
}

// Of finds the baseline of a row.
func (r *Report) Of(row Row) (Baseline, bool) {
	for _, b := range r.Baselines {
		if row.Baseline != "" && b.Name == row.Baseline {
			return b, true
		}
	}
	return Baseline{}, false
}

// Ratio is a row's value over its baseline's. There is none without a baseline
// that was measured in the same run.
func (r *Report) Ratio(row Row) (float64, bool) {
	b, ok := r.Of(row)
	if !ok || b.Value == 0 {
		return 0, false
	}
	return row.Value / b.Value, true
}

// Met says whether a row reaches what is asked of it; ok is false where nothing
// is, or nothing can be said.
func (r *Report) Met(row Row) (met, ok bool) {
	if row.Asked == nil || r.Simulated {
		return false, false
	}
	value := row.Value
	if row.Baseline != "" {
		if value, ok = r.Ratio(row); !ok {
			return false, false
		}
	}
	return row.Asked.met(value), true
}

// Read reads a Report that was saved as JSON.
func Read(in io.Reader) (*Report, error) {
	var r Report
	d := json.NewDecoder(in)
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		return nil, fmt.Errorf("this is no result of peerlane bench -o json: %w", err)
	}
	return &r, r.check()
}

// check says what cannot be shown.
func (r *Report) check() error {
	if r.Version != Version {
		return fmt.Errorf("the result is of version %d, and this peerlane reads version %d", r.Version, Version)
	}
	if len(r.Rows) == 0 {
		return errors.Join(errors.New("the result has no rows"), errors.New(strings.Join(r.Problems, "; ")))
	}
	units := map[string]string{}
	for _, b := range r.Baselines {
		if _, twice := units[b.Name]; twice {
			return fmt.Errorf("the result has the baseline %q twice: which of them was measured beside the rows cannot be told", b.Name)
		}
		if !finite(b.Value) || b.Value <= 0 {
			return fmt.Errorf("the baseline %q is %v", b.Name, b.Value)
		}
		units[b.Name] = b.Unit
	}
	for _, row := range r.Rows {
		unit, measured := units[row.Baseline]
		switch {
		case !finite(row.Value) || row.Value < 0:
			return fmt.Errorf("%s is %v", row.name(), row.Value)
		case row.Baseline == "":
		case !measured:
			return fmt.Errorf("%s would be a ratio to %q, which this run did not measure; run peerlane bench with that baseline", row.name(), row.Baseline)
		case unit != row.Unit:
			return fmt.Errorf("%s is in %s, and its baseline %q in %s", row.name(), row.Unit, row.Baseline, unit)
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

// Summary is the run in one sentence.
func (r *Report) Summary() string {
	if r.Simulated {
		return fmt.Sprintf("%d rows, simulated: these figures are of host memory and say nothing about GPUs.", len(r.Rows))
	}
	asked, met := 0, 0
	worst, least := "", math.Inf(1)
	for _, row := range r.Rows {
		ok, known := r.Met(row)
		if !known {
			continue
		}
		asked++
		if ok {
			met++
			continue
		}
		value, compared := r.Ratio(row)
		if !compared {
			value = row.Value
		}
		margin := value / row.Asked.Least
		if row.Asked.Most > 0 {
			margin = row.Asked.Most / value
		}
		if margin < least {
			worst, least = fmt.Sprintf("%s (%.2f, asked for %s)", row.name(), value, row.Asked), margin
		}
	}
	text := fmt.Sprintf("%d rows; %d of %d that something is asked of reach it", len(r.Rows), met, asked)
	if worst != "" {
		text += "; farthest from it is " + worst
	}
	if len(r.Problems) > 0 {
		text += fmt.Sprintf("; %d tables are not whole", len(r.Problems))
	}
	return text + "."
}
