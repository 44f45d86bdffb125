package bench

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/integration/measure"
)

func result() *Report {
	return &Report{
		Version: Version, Date: time.Date(2026, 11, 22, 0, 0, 0, 0, time.UTC), Host: "a host", GPUs: []string{"GPU <1>", "GPU <1>"},
		Rows: []Row{
			{Table: "copy", What: "client to slot", Size: 64 << 10, Depth: 16, Value: 20, Unit: GBs, Baseline: "raw 64 KiB", Asked: least(0.9)},
			{Table: "copy", What: "client to slot", Size: 1 << 20, Depth: 16, Value: 190, Unit: GBs, Baseline: "raw 1.0 MiB", Asked: least(0.95)},
			{Table: "latency", What: "a relay's copy", Size: 8, Value: 8, Unit: Microseconds, Times: &measure.Times{Count: 9, P50: 8, P90: 9, P99: 10, P999: 11, Max: 12}, Baseline: "local 8 B", Asked: most(1.15)},
			{Table: "uniformity", What: "slowest over fastest", Value: 0.97, Unit: Index, Asked: least(0.95)},
		},
		Baselines: []Baseline{
			{Name: "raw 64 KiB", Value: 25, Unit: GBs}, {Name: "raw 1.0 MiB", Value: 200, Unit: GBs},
			{Name: "local 8 B", Value: 7, Unit: Microseconds, Times: &measure.Times{Count: 9, P50: 7, P90: 7, P99: 8, P999: 9, Max: 9}},
		},
	}
}

func TestARatioNeedsItsBaseline(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Report)
		want   string // of the refusal; empty for none
	}{
		{"as measured", func(*Report) {}, ""},
		{"the baseline was not measured", func(r *Report) { r.Baselines = r.Baselines[1:] }, `a ratio to "raw 64 KiB", which this run did not measure`},
		{"two of one name", func(r *Report) { r.Baselines = append(r.Baselines, Baseline{Name: "raw 64 KiB", Value: 30, Unit: GBs}) }, "twice"},
		{"of another unit", func(r *Report) { r.Baselines[0].Unit = Microseconds }, "in µs"},
		{"a baseline of nothing", func(r *Report) { r.Baselines[0].Value = 0 }, `"raw 64 KiB" is 0`},
		{"no rows", func(r *Report) { r.Rows = nil }, "no rows"},
		{"another version", func(r *Report) { r.Version = 9 }, "version 9"},
		{"a value below 0", func(r *Report) { r.Rows[0].Value = -1 }, "is -1"},
	} {
		r := result()
		c.change(r)
		text, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		_, err = Read(bytes.NewReader(text))
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
	if _, err := Read(strings.NewReader(`{"version": 1, "ratios": [2]}`)); err == nil {
		t.Error("a document with a ratio of its own is taken")
	}
}

func TestWhatIsReached(t *testing.T) {
	r := result()
	for i, want := range []struct {
		ratio    float64
		has, met bool
	}{{0.8, true, false}, {0.95, true, true}, {8.0 / 7, true, true}, {0, false, true}} {
		ratio, has := r.Ratio(r.Rows[i])
		met, known := r.Met(r.Rows[i])
		if math.Abs(ratio-want.ratio) > 1e-9 || has != want.has || met != want.met || !known {
			t.Errorf("row %d: ratio %v (%v), reached %v (%v), want %+v", i, ratio, has, met, known, want)
		}
	}
	if got, want := r.Summary(), "4 rows; 3 of 4 that something is asked of reach it; farthest from it is copy, client to slot 64 KiB (0.80, asked for ≥ 0.9)."; got != want {
		t.Errorf("the summary is %q, want %q", got, want)
	}
	r.Simulated = true
	if _, known := r.Met(r.Rows[0]); known {
		t.Error("a simulated figure reaches something, or does not")
	}
	if got := r.Summary(); !strings.Contains(got, "simulated") {
		t.Errorf("the summary is %q", got)
	}
	// Without its baseline a row has no ratio, and none is shown.
	r.Rows[0].Baseline = ""
	if _, has := r.Ratio(r.Rows[0]); has {
		t.Error("a row without a baseline has a ratio")
	}
}

func TestThePlotIsWellFormed(t *testing.T) {
	r := result()
	page, err := r.HTML()
	if err != nil {
		t.Fatal(err)
	}
	svg := r.SVG()
	for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []string{"Bandwidth by message", "Ratio to a baseline", "Latency", "p99.9", "64 KiB: 20", "64 KiB: 0.8", "asked for: 0.95", "2 × GPU &lt;1&gt;", "dashed"} {
		if !bytes.Contains(svg, []byte(want)) {
			t.Errorf("the plot has no %q", want)
		}
	}
	for _, no := range []string{"NaN", "Inf", "<script", "href"} {
		if bytes.Contains(page, []byte(no)) {
			t.Errorf("the page has %q", no)
		}
	}
	r.Simulated = true
	if svg := r.SVG(); !bytes.Contains(svg, []byte("simulated GPUs")) || bytes.Contains(svg, []byte("GPU &lt;1&gt;")) {
		t.Error("a simulated plot names real GPUs, or does not say that it is simulated")
	}
}

func TestJain(t *testing.T) {
	for _, c := range []struct {
		rates []float64
		want  float64
	}{{[]float64{5, 5, 5, 5}, 1}, {[]float64{1, 0, 0, 0}, 0.25}, {[]float64{1, 2}, 0.9}, {[]float64{0, 0}, 0}} {
		if got := jain(c.rates); math.Abs(got-c.want) > 1e-12 {
			t.Errorf("Jain's index of %v is %v, want %v", c.rates, got, c.want)
		}
	}
}

func TestOptionsThatMakeNoSense(t *testing.T) {
	good := Options{Tables: []string{"copy"}, Routes: []string{direct}, GPUs: "auto"}
	if err := good.Check(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*Options){
		"--table":                      func(o *Options) { o.Tables = []string{"copies"} },
		"--routes":                     func(o *Options) { o.Routes = []string{"auto"} },
		"--baselines":                  func(o *Options) { o.Baselines = []string{"slow"} },
		"--sizes":                      func(o *Options) { o.Sizes = []uint64{0} },
		"--depths":                     func(o *Options) { o.Depths = []int{1000} },
		"--pace":                       func(o *Options) { o.Pace = []float64{-1} },
		"--duration":                   func(o *Options) { o.Duration = time.Hour },
		"--pace names something twice": func(o *Options) { o.Pace = []float64{25, 50, 25} },
		"--gpus":                       func(o *Options) { o.GPUs = "some" },
	} {
		o := good
		change(&o)
		if err := o.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
