package bench

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

func result() *Report {
	return &Report{
		Version: version, Date: time.Date(2026, 11, 22, 0, 0, 0, 0, time.UTC), Host: "a host",
		GPUs: []string{"GPU <1>", "GPU <1>"},
		Rows: []Row{
			{Table: "copy", What: "client to slot", Size: 64 << 10, Depth: 16, Value: 20, Unit: GBs, Baseline: "raw 64 KiB",
				Asked: atLeast(0.9)},
			{Table: "copy", What: "client to slot", Size: 1 << 20, Depth: 16, Value: 190, Unit: GBs, Baseline: "raw 1.0 MiB",
				Asked: atLeast(0.95)},
			{Table: "latency", What: "a relay's copy", Size: 8, Value: 8, Unit: microseconds,
				Times: &measure.Times{Count: 9, P50: 8, P90: 9, P99: 10, P999: 11, Max: 12}, Baseline: "local 8 B",
				Asked: atMost(1.15)},
			{Table: "uniformity", What: "slowest over fastest", Value: 0.97, Unit: index, Asked: atLeast(0.95)},
		},
		Baselines: []Baseline{
			{Name: "raw 64 KiB", Value: 25, Unit: GBs}, {Name: "raw 1.0 MiB", Value: 200, Unit: GBs},
			{Name: "local 8 B", Value: 7, Unit: microseconds,
				Times: &measure.Times{Count: 9, P50: 7, P90: 7, P99: 8, P999: 9, Max: 9}},
		},
	}
}

func TestResultWithoutBaselineIsRefused(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Report)
		// want is nil for success.
		want error
	}{
		{"as measured", func(*Report) {}, nil},
		{"the baseline was not measured", func(r *Report) { r.Baselines = r.Baselines[1:] },
			&ratioError{result().Rows[0].name(), "raw 64 KiB", GBs, ""}},
		{"two of one name", func(r *Report) {
			r.Baselines = append(r.Baselines, Baseline{Name: "raw 64 KiB", Value: 30, Unit: GBs})
		}, &baselineError{"raw 64 KiB", 30, true}},
		{"of another unit", func(r *Report) { r.Baselines[0].Unit = microseconds },
			&ratioError{result().Rows[0].name(), "raw 64 KiB", GBs, microseconds}},
		{"a baseline of nothing", func(r *Report) { r.Baselines[0].Value = 0 }, &baselineError{"raw 64 KiB", 0, false}},
		{"no rows", func(r *Report) { r.Rows = nil }, errNoRows},
		{"another version", func(r *Report) { r.Version = 9 }, &versionError{9}},
		{"a value below 0", func(r *Report) { r.Rows[0].Value = -1 }, &rowError{result().Rows[0].name(), -1}},
	} {
		r := result()
		c.change(r)
		text, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		_, err = Read(bytes.NewReader(text))
		_, joined := err.(interface{ Unwrap() []error }) // with a text of several lines
		if !testutil.HasError(err, c.want) || joined {
			t.Errorf("%s: %v, want %v in one line", c.name, err, c.want)
		}
	}
	if _, err := Read(strings.NewReader(`{"version": 1, "ratios": [2]}`)); err == nil {
		t.Error("a document with a ratio of its own is taken")
	}
}

func TestRatioOfRowReachesBound(t *testing.T) {
	r := result()
	for i, want := range []struct {
		ratio   float64
		ok, met bool
	}{{0.8, true, false}, {0.95, true, true}, {8.0 / 7, true, true}, {0, false, true}} {
		ratio, ok := r.Ratio(r.Rows[i])
		met, known := r.met(r.Rows[i])
		if math.Abs(ratio-want.ratio) > 1e-9 || ok != want.ok || met != want.met || !known {
			t.Errorf("row %d: ratio %v (%v), reached %v (%v), want %+v", i, ratio, ok, met, known, want)
		}
	}
	if got, want := r.Summary(), "4 rows; 3 of 4 bounds met; farthest from its bound is copy, client "+
		"to slot 64 KiB (0.80, asked for ≥ 0.9)."; got != want {
		t.Errorf("the summary is %q, want %q", got, want)
	}
	r.Simulated = true
	if _, known := r.met(r.Rows[0]); known {
		t.Error("a simulated figure reaches something, or does not")
	}
	if got := r.Summary(); !strings.Contains(got, "simulated") {
		t.Errorf("the summary is %q", got)
	}
	// A row without its baseline has no ratio, and the output shows none.
	r.Rows[0].Baseline = ""
	if _, ok := r.Ratio(r.Rows[0]); ok {
		t.Error("a row without a baseline has a ratio")
	}
}

func TestVerdictsNameWorstRow(t *testing.T) {
	of := func(r *Report, what string) Verdict {
		for _, v := range r.Verdicts() {
			if strings.HasPrefix(v.What, what) {
				return v
			}
		}
		t.Fatalf("no verdict on %q", what)
		return Verdict{}
	}
	const copies, local, even, cpu, memory = "relay's copy", "8 bytes", "uniformity", "processor time", "GPU memory"
	r := result()
	r.Rows = append(r.Rows,
		Row{Table: "memory", What: "of a server GPU", State: "GPU 1", Value: 0, Unit: miB, Asked: atMost(0)},
		Row{Table: "memory", What: "of a GPU that is not the container's", State: "GPU 2", Value: 2, Unit: miB,
			Asked: atMost(0)},
		Row{Table: "routes", What: "container A to container B", Route: staged, Size: 16 << 20, Value: 160, Unit: GBs})
	r.Missing = []Missing{{"cpu", "at full rate", "no relay"}}
	for what, want := range map[string]Verdict{
		copies: {Reached: "0.8: client to slot, 64 KiB", Verdict: "no, 1 of 2 rows fall short"},
		local:  {Reached: "1.143: a relay's copy, 8 B", Verdict: "yes"},
		even:   {Reached: "0.97: slowest over fastest", Verdict: "yes"},
		cpu:    {Verdict: "not measured: at full rate: no relay"},
		memory: {Reached: "2 MiB: of a GPU that is not the container's, GPU 2",
			Verdict: "no, 1 of 2 rows fall short"},
		"route staged": {Verdict: "reported"},
		"client copy":  {Verdict: "not measured"},
	} {
		got := of(r, what)
		if got.Reached != want.Reached || got.Verdict != want.Verdict {
			t.Errorf("%s: %q, %q; want %q, %q", what, got.Reached, got.Verdict, want.Reached, want.Verdict)
		}
	}
	r.Simulated = true
	if got := of(r, copies); got.Verdict != "simulated" {
		t.Errorf("a simulated figure has the verdict %q", got.Verdict)
	}
	page, err := r.HTML()
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(page, []byte("rows fall short")) || !bytes.Contains(page, []byte("MUST REACH")) {
		t.Error("the page has not the verdicts, or those of real GPUs")
	}
}

// Read returns a saved result unchanged, including bounds of 0.
func TestResultSavedIsReadBack(t *testing.T) {
	r := result()
	r.Rows[3].Asked = atMost(0)
	r.Missing = []Missing{{"memory", "all of it", "why"}}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Read(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := json.Marshal(again); err != nil || !bytes.Equal(got, text) {
		t.Errorf("%s was read as %s (%v)", text, got, err)
	}
	if met, known := again.met(again.Rows[3]); met || !known {
		t.Errorf("0.97 reaches %s: %v (%v)", again.Rows[3].Asked, met, known)
	}
	// Results of earlier versions lack verdicts.
	files, err := filepath.Glob("../../../docs/benchmarks/*.json")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	results := 0
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var other struct{ Row string } // a row of integration/gpus, not a result of bench
		if err := json.Unmarshal(text, &other); err == nil && other.Row != "" {
			continue
		}
		results++
		if _, err := Read(bytes.NewReader(text)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if results == 0 {
		t.Error("no file has a result of bench")
	}
}

// Every NIC has the requested number of GPUs if the host has enough, half of them near, and every
// GPU has a stream.
func TestSharingGivesEachNICItsGPUs(t *testing.T) {
	for _, c := range []struct {
		gpus, perNIC, nics, used, near, lanes int
	}{
		{2, PerNIC, 1, 2, 1, 2}, {3, PerNIC, 1, 2, 1, 2}, {4, PerNIC, 1, 4, 2, 2}, {6, PerNIC, 1, 4, 2, 2},
		{8, PerNIC, 2, 8, 4, 4}, {4, 2, 2, 4, 2, 4}, {5, 2, 2, 4, 2, 4}, {8, 8, 1, 8, 4, 4},
	} {
		var gpus []topo.GPU
		for i := range c.gpus {
			gpus = append(gpus, topo.GPU{BusID: string(rune('a' + i))})
		}
		s := mixed(gpus, c.perNIC)
		if s.nics != c.nics || s.gpus != c.used || len(s.near) != c.near || len(s.lanes) != c.lanes {
			t.Errorf("%d GPUs share as %+v, want %+v", c.gpus, s, c)
		}
		for _, n := range s.near {
			far := slices.ContainsFunc(s.lanes, func(l planner.Assignment) bool { return l.GPU == n.from })
			if n.from == n.to || far != (c.used == 2*c.nics) {
				t.Errorf("%d GPUs: the near stream %+v, far are %+v", c.gpus, n, s.lanes)
			}
		}
		all := s.staging()
		if len(all.lanes) != c.used || len(all.near) != 0 {
			t.Errorf("%d GPUs, all far: %+v", c.gpus, all)
		}
		for _, l := range slices.Concat(s.lanes, all.lanes) {
			if slices.Contains(l.Servers, l.GPU) {
				t.Errorf("%d GPUs: a GPU stages on itself: %+v", c.gpus, l)
			}
		}
	}
}

func TestPlotOfResultIsWellFormed(t *testing.T) {
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
	for _, want := range []string{"Bandwidth by message", "Ratio to a baseline", "Latency", "p99.9", "64 KiB: 20",
		"64 KiB: 0.8", "asked for: 0.95", "2 × GPU &lt;1&gt;", "dashed"} {
		if !bytes.Contains(svg, []byte(want)) {
			t.Errorf("the plot has no %q", want)
		}
	}
	for _, no := range []string{"NaN", "Inf", "<script", "href"} {
		if bytes.Contains(page, []byte(no)) {
			t.Errorf("the page has %q", no)
		}
	}
	// A series has one style in every panel of every figure.
	styles := map[string]string{}
	for _, m := range regexp.MustCompile(`<g class="series ([^"]+)"><path d="[^"]*"/>(?:<text[^>]*>([^<]+)<|<circle[^>]*><title>([^<]+), [^,<]+: )`).FindAllSubmatch(svg, -1) {
		name := string(m[2]) + string(m[3])
		if styles[name] == "" {
			styles[name] = string(m[1])
		}
		if styles[name] != string(m[1]) {
			t.Errorf("series %q has the styles %q and %q", name, styles[name], m[1])
		}
	}
	if len(styles) < 3 {
		t.Errorf("the plot has the series %q only", styles)
	}
	r.Simulated = true
	if svg := r.SVG(); !bytes.Contains(svg, []byte("simulated GPUs")) || bytes.Contains(svg, []byte("GPU &lt;1&gt;")) {
		t.Error("a simulated plot names real GPUs, or does not say that it is simulated")
	}
}

func TestJainOfRatesIsExact(t *testing.T) {
	for _, c := range []struct {
		rates []float64
		want  float64
	}{{[]float64{5, 5, 5, 5}, 1}, {[]float64{1, 0, 0, 0}, 0.25}, {[]float64{1, 2}, 0.9}, {[]float64{0, 0}, 0}} {
		if got := jain(c.rates); math.Abs(got-c.want) > 1e-12 {
			t.Errorf("Jain's index of %v is %v, want %v", c.rates, got, c.want)
		}
	}
}

func TestBenchInvalidOptionIsRefused(t *testing.T) {
	good := Options{Tables: []string{"copy"}, Routes: []string{direct}, GPUs: "auto"}
	if err := good.Check(); err != nil {
		t.Error(err)
	}
	for _, c := range []struct {
		flag   string
		value  any
		change func(*Options)
	}{
		{"table", "copies", func(o *Options) { o.Tables = []string{"copies"} }},
		{"routes", "auto", func(o *Options) { o.Routes = []string{"auto"} }},
		{"baselines", "slow", func(o *Options) { o.Baselines = []string{"slow"} }},
		{"sizes", uint64(0), func(o *Options) { o.Sizes = []uint64{0} }},
		{"depths", 1000, func(o *Options) { o.Depths = []int{1000} }},
		{"pace", -1.0, func(o *Options) { o.Pace = []float64{-1} }},
		{"gpus-per-nic", 3, func(o *Options) { o.GPUsPerNIC = 3 }},
		{"duration", time.Hour, func(o *Options) { o.Duration = time.Hour }},
		{"pace", nil, func(o *Options) { o.Pace = []float64{25, 50, 25} }}, // a duplicate
		{"busy", "nobody", func(o *Options) { o.Busy = []string{"nobody"} }},
		{"gpus", "some", func(o *Options) { o.GPUs = "some" }},
	} {
		o := good
		c.change(&o)
		err := o.Check()
		if e, ok := errors.AsType[*flagError](err); !ok || e.flag != c.flag || e.value != c.value {
			t.Errorf("--%s %v: %v", c.flag, c.value, err)
		}
	}
}
