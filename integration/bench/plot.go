package bench

import (
	_ "embed" // for the style sheet
	"fmt"
	"html/template"
	"math"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/integration/measure"
)

//go:embed plot.css
var sheet string

//go:embed plot.html
var page string

// point is one of a series: where, and how high. Both axes are logarithmic.
type point struct{ x, y float64 }

type series struct {
	name   string
	points []point
	dashed bool // a baseline
}

// panel is one diagram.
type panel struct {
	title, unit string
	series      []series
	ticks       map[float64]string // of x, where they are words
	asked       []float64          // lines across
}

// panels are bandwidth by size, its ratios, and percentiles of latency; those that
// the report has anything for.
func (r *Report) panels() []panel {
	bandwidth := panel{title: "Bandwidth by message", unit: "GB/s"}
	ratios := panel{title: "Ratio to a baseline of the same run", unit: "dotted: asked for"}
	latency := panel{title: "Latency", unit: "µs", ticks: map[float64]string{1: "p50", 2: "p90", 4: "p99", 8: "p99.9"}}
	add := func(p *panel, name string, dashed bool, at point) {
		if at.x <= 0 || at.y <= 0 { // no place on a logarithmic axis
			return
		}
		for i := range p.series {
			if p.series[i].name == name {
				if !slices.Contains(p.series[i].points, at) {
					p.series[i].points = append(p.series[i].points, at)
				}
				return
			}
		}
		p.series = append(p.series, series{name, []point{at}, dashed})
	}
	percentiles := func(name string, dashed bool, t *measure.Times) {
		for i, y := range []float64{t.P50, t.P90, t.P99, t.P999} {
			add(&latency, name, dashed, point{float64(uint(1) << i), y})
		}
	}
	for _, row := range r.Rows {
		name := row.Table + ": " + row.What
		if row.Route != "" {
			name += ", " + row.Route
		}
		if row.Depth > 1 {
			name += fmt.Sprintf(", %d in flight", row.Depth)
		}
		if row.State != "" {
			name += ", " + row.State
		}
		at := float64(row.Size)
		if b, ok := r.Of(row); ok && row.Unit == GBs {
			// A baseline's name is its kind, then the size; what it is between is the row's.
			kind, _, _ := strings.Cut(b.Name, " "+sizeText(row.Size))
			kind = strings.TrimSuffix(kind, ",")
			if strings.Contains(b.Name, "issued by") {
				kind += ", pulled"
			}
			add(&bandwidth, kind, true, point{at, b.Value})
			add(&ratios, name+" / "+kind, false, point{at, row.Value / b.Value})
			if row.Asked != nil && row.Asked.Least != nil && !slices.Contains(ratios.asked, *row.Asked.Least) {
				ratios.asked = append(ratios.asked, *row.Asked.Least)
			}
		}
		if row.Unit == GBs {
			add(&bandwidth, name, false, point{at, row.Value})
		}
		if row.Times != nil && row.Unit == Microseconds {
			percentiles(name, false, row.Times)
			if b, ok := r.Of(row); ok && b.Times != nil {
				percentiles(b.Name, true, b.Times)
			}
		}
	}
	var all []panel
	for _, p := range []panel{bandwidth, ratios, latency} {
		if len(p.series) > 0 {
			for i := range p.series {
				slices.SortFunc(p.series[i].points, func(a, b point) int { return int(math.Copysign(1, a.x-b.x)) })
			}
			all = append(all, p)
		}
	}
	return all
}

// Geometry, in pixels.
const (
	plotWidth, plotHeight   = 620.0, 300.0
	plotLeft, plotTop       = 70.0, 60.0
	legendWidth, legendLine = 640.0, 18.0
	panelGap                = 70.0
)

// height of a panel: of its diagram, or of its legend.
func (p panel) height() float64 { return max(plotHeight, float64(len(p.series))*legendLine) }

// SVG is the plot as a document that loads nothing.
func (r *Report) SVG() []byte {
	var b strings.Builder
	panels := r.panels()
	height := 96.0
	for _, p := range panels {
		height += p.height() + panelGap
	}
	text := template.HTMLEscapeString
	title := "Peerlane: " + r.title()
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" viewBox="0 0 %.0f %.0f" width="%.0f" height="%.0f">`+"\n",
		plotLeft+plotWidth+legendWidth, height, plotLeft+plotWidth+legendWidth, height)
	fmt.Fprintf(&b, "<title>%s</title>\n<style>\n%s</style>\n<rect class=\"paper\" width=\"100%%\" height=\"100%%\"/>\n", text(title), sheet)
	fmt.Fprintf(&b, "<text class=\"title\" x=\"24\" y=\"36\">%s</text>\n<text class=\"quiet\" x=\"24\" y=\"58\">%s</text>\n", text(title), text(r.Summary()))
	top := 36 + plotTop
	for _, p := range panels {
		p.draw(&b, top)
		top += p.height() + panelGap
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

// title says what was measured, and never hides that it was simulated.
func (r *Report) title() string {
	what := "simulated GPUs"
	if !r.Simulated && len(r.GPUs) > 0 {
		what = fmt.Sprintf("%d × %s", len(r.GPUs), r.GPUs[0])
	}
	if len(r.Hosts) > 0 {
		what = "two hosts, " + what
	}
	return fmt.Sprintf("%s, %s", what, r.Date.Format("2006-01-02"))
}

// draw draws a panel.
func (p panel) draw(b *strings.Builder, top float64) {
	text := template.HTMLEscapeString
	x, y := bounds(p)
	across := func(v float64) float64 { return plotLeft + plotWidth*x.at(v) }
	up := func(v float64) float64 { return top + plotHeight*(1-y.at(v)) }
	fmt.Fprintf(b, "<text class=\"heading\" x=\"24\" y=\"%.1f\">%s</text>\n", top-16, text(p.title+", "+p.unit))
	for v := y.from; v <= y.to*1.001; v *= y.step {
		fmt.Fprintf(b, "<path class=\"rule\" d=\"M%.1f %.1fh%.1f\"/><text class=\"quiet\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%.4g</text>\n",
			plotLeft, up(v), plotWidth, plotLeft-8, up(v)+4, v)
	}
	for v := x.from; v <= x.to*1.001; v *= x.step {
		label := p.ticks[v]
		if p.ticks == nil {
			label = sizeText(uint64(v))
		}
		fmt.Fprintf(b, "<path class=\"rule\" d=\"M%.1f %.1fv%.1f\"/><text class=\"quiet\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%s</text>\n",
			across(v), top, plotHeight, across(v), top+plotHeight+18, text(label))
	}
	for _, v := range p.asked {
		if v >= y.from && v <= y.to {
			fmt.Fprintf(b, "<path class=\"asked\" d=\"M%.1f %.1fh%.1f\"><title>asked for: %g</title></path>\n", plotLeft, up(v), plotWidth, v)
		}
	}
	for i, s := range p.series {
		class := fmt.Sprintf("s%d", i%6)
		if s.dashed {
			class += " dashed"
		}
		fmt.Fprintf(b, "<g class=\"series %s\"><path d=\"", class)
		for n, at := range s.points {
			letter := "L"
			if n == 0 {
				letter = "M"
			}
			fmt.Fprintf(b, "%s%.1f %.1f", letter, across(at.x), up(at.y))
		}
		b.WriteString("\"/>")
		for _, at := range s.points {
			where := p.ticks[at.x]
			if p.ticks == nil {
				where = sizeText(uint64(at.x))
			}
			fmt.Fprintf(b, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.2\"><title>%s, %s: %.4g</title></circle>", across(at.x), up(at.y), text(s.name), text(where), at.y)
		}
		line := top + 8 + float64(i)*legendLine
		fmt.Fprintf(b, "<path d=\"M%.1f %.1fh22\"/><text x=\"%.1f\" y=\"%.1f\">%s</text></g>\n", plotLeft+plotWidth+20, line, plotLeft+plotWidth+48, line+4, text(s.name))
	}
}

// axis is logarithmic, with a rule at each step.
type axis struct{ from, to, step float64 }

func (a axis) at(v float64) float64 {
	if a.to <= a.from {
		return 0
	}
	return math.Log(v/a.from) / math.Log(a.to/a.from)
}

// bounds are axes with room for all points of a panel.
func bounds(p panel) (x, y axis) {
	low, high := point{math.Inf(1), math.Inf(1)}, point{}
	for _, s := range p.series {
		for _, at := range s.points {
			low, high = point{min(low.x, at.x), min(low.y, at.y)}, point{max(high.x, at.x), max(high.y, at.y)}
		}
	}
	y = axis{step: 10, from: math.Pow(10, math.Floor(math.Log10(low.y))), to: math.Pow(10, math.Ceil(math.Log10(high.y)))}
	if high.y/low.y < 20 {
		y = axis{step: 2, from: math.Pow(2, math.Floor(math.Log2(low.y))), to: math.Pow(2, math.Ceil(math.Log2(high.y)))}
	}
	if y.from == y.to {
		y.from /= y.step
	}
	x = axis{step: 2, from: math.Pow(2, math.Floor(math.Log2(low.x))), to: math.Pow(2, math.Ceil(math.Log2(high.x)))}
	if x.to/x.from > 1<<10 {
		x.step = 8
	}
	if x.from == x.to {
		x.from, x.to = x.from/2, x.to*2
	}
	return x, y
}

// HTML is the plot and the rows as one page that loads nothing.
func (r *Report) HTML() ([]byte, error) {
	t, err := template.New("page").Parse(page)
	if err != nil {
		return nil, err
	}
	heading, cells := r.Table()
	var b strings.Builder
	err = t.Execute(&b, struct {
		*Report
		Title   string
		Plot    template.HTML
		Heading []string
		Cells   [][]string
		Asked   []Verdict
	}{r, "Peerlane: " + r.title(), template.HTML(r.SVG()), heading, cells, r.Verdicts()})
	return []byte(b.String()), err
}

// Table is the rows as text.
func (r *Report) Table() (heading []string, cells [][]string) {
	heading = []string{"TABLE", "WHAT", "ROUTE", "MESSAGE", "DEPTH", "VALUE", "p50 p90 p99 p99.9 µs", "RATIO", "OF", "ASKED", "REACHED", "NOTE"}
	for _, row := range r.Rows {
		route := row.Route
		if row.Transport != "" {
			route += " over " + row.Transport
		}
		var depth, times, ratio, of, reached string
		if row.Depth > 0 {
			depth = fmt.Sprint(row.Depth)
		}
		if t := row.Times; t != nil {
			times = fmt.Sprintf("%.1f %.1f %.1f %.1f", t.P50, t.P90, t.P99, t.P999)
		}
		if v, ok := r.Ratio(row); ok {
			ratio = fmt.Sprintf("%.3f", v)
			b, _ := r.Of(row)
			of = fmt.Sprintf("%.4g %s: %s", b.Value, b.Unit, b.Name)
		}
		if met, ok := r.Met(row); ok {
			reached = map[bool]string{true: "yes", false: "no"}[met]
		}
		what := row.What
		if row.State != "" {
			what += ", " + row.State
		}
		cells = append(cells, []string{row.Table, what, route, sizeText(row.Size), depth, fmt.Sprintf("%.4g %s", row.Value, row.Unit), times, ratio, of, row.Asked.String(), reached, row.Note})
	}
	return heading, cells
}
