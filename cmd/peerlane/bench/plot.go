package bench

import (
	"cmp"
	_ "embed" // for the style sheet
	"fmt"
	"html/template"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
)

//go:embed plot.css
var sheet string

//go:embed plot.html
var page string

// point is a point of a series; both axes are logarithmic.
type point struct{ x, y float64 }

// series is a line in a panel. A series has one name and one style in the panels of a figure.
type series struct {
	name     string
	points   []point
	baseline bool
}

// panel is a diagram of one measured quantity in a figure.
type panel struct {
	title  string
	series []series
	// asked are the horizontal lines of goals.
	asked []float64
}

// figure is a grid of panels with the same axes.
type figure struct {
	title, unit string
	panels      []panel
	// ticks are the labels of an axis of words.
	ticks map[float64]string
}

func (f *figure) add(title, name string, baseline bool, at point) *panel {
	i := slices.IndexFunc(f.panels, func(p panel) bool { return p.title == title })
	if i < 0 {
		i = len(f.panels)
		f.panels = append(f.panels, panel{title: title})
	}
	p := &f.panels[i]
	if at.x <= 0 || at.y <= 0 { // not on a logarithmic axis
		return p
	}
	for k := range p.series {
		if p.series[k].name == name {
			if !slices.Contains(p.series[k].points, at) {
				p.series[k].points = append(p.series[k].points, at)
			}
			return p
		}
	}
	p.series = append(p.series, series{name, []point{at}, baseline})
	return p
}

// classes returns the style of every series by its name.
func classes(figures []figure) map[string]string {
	class := map[string]string{}
	measured, baselines := 0, 0
	for _, f := range figures {
		for _, p := range f.panels {
			for _, s := range p.series {
				switch {
				case class[s.name] != "":
				case s.baseline: // grey, with one of three dashes
					class[s.name] = fmt.Sprintf("dashed b%d", baselines%3)
					baselines++
				default:
					class[s.name] = fmt.Sprintf("s%d", measured%styles)
					if measured >= styles {
						class[s.name] += " dotted"
					}
					measured++
				}
			}
		}
	}
	return class
}

// names returns the names of the series of the panels: measured series first, then baselines.
func (f *figure) names() []string {
	var measured, baselines []string
	for _, p := range f.panels {
		for _, s := range p.series {
			switch {
			case s.baseline && !slices.Contains(baselines, s.name):
				baselines = append(baselines, s.name)
			case !s.baseline && !slices.Contains(measured, s.name):
				measured = append(measured, s.name)
			}
		}
	}
	return slices.Concat(measured, baselines)
}

// figures returns figures of bandwidth by size, of its ratios, and of percentiles of latency, if
// the report has such rows.
func (r *Report) figures() []figure {
	bandwidth := figure{title: "Bandwidth by message", unit: "GB/s"}
	ratios := figure{title: "Ratio to a baseline of the same run", unit: "dotted: asked for"}
	latency := figure{title: "Latency", unit: "µs", ticks: map[float64]string{1: "p50", 2: "p90", 4: "p99", 8: "p99.9"}}
	percentiles := func(title, name string, baseline bool, t *measure.Times) {
		for i, y := range []float64{t.P50, t.P90, t.P99, t.P999} {
			latency.add(title, name, baseline, point{float64(uint(1) << i), y})
		}
	}
	for _, row := range r.Rows {
		title, name := row.Table+": "+row.What, cmp.Or(row.Route, "measured")
		if row.Depth > 1 {
			name += fmt.Sprintf(", %d in flight", row.Depth)
		}
		if row.State != "" {
			name += ", " + row.State
		}
		at := float64(row.Size)
		if b, ok := r.of(row); ok && row.Unit == GBs {
			// The name of a baseline is its kind, followed by the size.
			kind, _, _ := strings.Cut(b.Name, " "+sizeText(row.Size))
			kind = strings.TrimSuffix(kind, ",")
			if strings.Contains(b.Name, "issued by") {
				kind += ", pulled"
			}
			bandwidth.add(title, kind, true, point{at, b.Value})
			p := ratios.add(title, name, false, point{at, row.Value / b.Value})
			if row.Asked != nil && row.Asked.Min != nil && !slices.Contains(p.asked, *row.Asked.Min) {
				p.asked = append(p.asked, *row.Asked.Min)
			}
		}
		if row.Unit == GBs {
			bandwidth.add(title, name, false, point{at, row.Value})
		}
		if row.Times != nil && row.Unit == microseconds {
			percentiles(title, name, false, row.Times)
			if b, ok := r.of(row); ok && b.Times != nil {
				percentiles(title, b.Name, true, b.Times)
			}
		}
	}
	var all []figure
	for _, f := range []figure{bandwidth, ratios, latency} {
		f.panels = slices.DeleteFunc(f.panels, func(p panel) bool { return len(p.series) == 0 })
		if len(f.panels) == 0 {
			continue
		}
		for _, p := range f.panels {
			for i := range p.series {
				slices.SortFunc(p.series[i].points, func(a, b point) int { return cmp.Compare(a.x, b.x) })
			}
		}
		all = append(all, f)
	}
	return all
}

// Geometry in pixels.
const (
	plotMargin              = 24.0
	columns                 = 3
	panelWidth, panelHeight = 300.0, 150.0
	panelLeft               = 52.0 // room for the labels of y
	panelTop, panelBottom   = 44.0, 34.0
	plotWidth               = 2*plotMargin + columns*(panelLeft+panelWidth+20)
	legendLine              = 19.0
	figureGap               = 40.0
	// characterWidth is the widest mean advance of the font, for text of 12 pixels.
	characterWidth = 7.0
	maxTitle       = 46 // characters above a panel
)

// SVG returns the plot as an SVG document without external references.
func (r *Report) SVG() []byte {
	var figures strings.Builder
	top := 96.0
	all := r.figures()
	class := classes(all)
	for _, f := range all {
		top = f.draw(&figures, class, top) + figureGap
	}
	text := template.HTMLEscapeString
	title := "Peerlane: " + r.title()
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" viewBox="0 0 %.0f %.0f" width="%.0f" height="%.0f">`+"\n", plotWidth, top, plotWidth, top)
	fmt.Fprintf(&b, "<title>%s</title>\n<style>\n%s</style>\n<rect class=\"paper\" width=\"100%%\" height=\"100%%\"/>\n",
		text(title), sheet)
	fmt.Fprintf(&b, "<text class=\"title\" x=\"%.0f\" y=\"36\">%s</text>\n<text class=\"quiet\" x=\"%.0f\" "+
		"y=\"58\">%s</text>\n", plotMargin, text(title), plotMargin, text(r.Summary()))
	b.WriteString(figures.String())
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

// title describes the measurement, and always states a simulation.
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

// draw draws the heading, a common legend and the panels, and returns y at the lower end of the
// figure.
func (f figure) draw(b *strings.Builder, class map[string]string, top float64) float64 {
	text := template.HTMLEscapeString
	fmt.Fprintf(b, "<text class=\"heading\" x=\"%.0f\" y=\"%.1f\">%s</text>\n", plotMargin, top, text(f.title+", "+f.unit))
	x, y := plotMargin, top+legendLine+4
	for _, name := range f.names() {
		wide := 30 + characterWidth*float64(utf8.RuneCountInString(name)) + 24
		if x > plotMargin && x+wide > plotWidth-plotMargin {
			x, y = plotMargin, y+legendLine
		}
		fmt.Fprintf(b, "<g class=\"series %s\"><path d=\"M%.1f %.1fh22\"/><text x=\"%.1f\" y=\"%.1f\">%s</text></g>\n",
			class[name], x, y-4, x+30, y, text(name))
		x += wide
	}
	across, up := bounds(f)
	for i, p := range f.panels {
		left := plotMargin + panelLeft + float64(i%columns)*(panelLeft+panelWidth+20)
		if i%columns == 0 {
			y += panelTop
			if i > 0 {
				y += panelHeight + panelBottom
			}
		}
		p.draw(b, f, class, left, y, across, up)
	}
	return y + panelHeight + panelBottom
}

// styles is the number of colours of measured series.
const styles = 6

// draw draws a panel at a position, with the axes of its figure.
func (p panel) draw(b *strings.Builder, f figure, class map[string]string, left, top float64, x, y axis) {
	text := template.HTMLEscapeString
	across := func(v float64) float64 { return left + panelWidth*x.at(v) }
	up := func(v float64) float64 { return top + panelHeight*(1-y.at(v)) }
	title := []rune(p.title)
	if len(title) > maxTitle {
		title = append(title[:maxTitle-1], '…')
	}
	fmt.Fprintf(b, "<g class=\"panel\"><title>%s</title><text class=\"name\" x=\"%.1f\" y=\"%.1f\">%s</text>\n",
		text(p.title), left, top-8, text(string(title)))
	for v := y.from; v <= y.to*1.001; v *= y.step {
		fmt.Fprintf(b, "<path class=\"rule\" d=\"M%.1f %.1fh%.1f\"/><text class=\"quiet\" x=\"%.1f\" y=\"%.1f\" "+
			"text-anchor=\"end\">%.4g</text>\n",
			left, up(v), panelWidth, left-8, up(v)+4, v)
	}
	for v := x.from; v <= x.to*1.001; v *= x.step {
		label := f.ticks[v]
		if f.ticks == nil {
			label = sizeText(uint64(v))
		}
		fmt.Fprintf(b, "<path class=\"rule\" d=\"M%.1f %.1fv%.1f\"/><text class=\"quiet\" x=\"%.1f\" y=\"%.1f\" "+
			"text-anchor=\"middle\">%s</text>\n",
			across(v), top, panelHeight, across(v), top+panelHeight+16, text(label))
	}
	for _, v := range p.asked {
		if v >= y.from && v <= y.to {
			fmt.Fprintf(b, "<path class=\"asked\" d=\"M%.1f %.1fh%.1f\"><title>asked for: %g</title></path>\n", left, up(v),
				panelWidth, v)
		}
	}
	for _, s := range p.series {
		fmt.Fprintf(b, "<g class=\"series %s\"><path d=\"", class[s.name])
		for n, at := range s.points {
			letter := "L"
			if n == 0 {
				letter = "M"
			}
			fmt.Fprintf(b, "%s%.1f %.1f", letter, across(at.x), up(at.y))
		}
		b.WriteString("\"/>")
		for _, at := range s.points {
			where := f.ticks[at.x]
			if f.ticks == nil {
				where = sizeText(uint64(at.x))
			}
			fmt.Fprintf(b, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\"><title>%s, %s: %.4g</title></circle>", across(at.x),
				up(at.y), text(s.name), text(where), at.y)
		}
		b.WriteString("</g>\n")
	}
	b.WriteString("</g>\n")
}

// axis is a logarithmic axis with a rule at every step.
type axis struct{ from, to, step float64 }

func (a axis) at(v float64) float64 {
	if a.to <= a.from {
		return 0
	}
	return math.Log(v/a.from) / math.Log(a.to/a.from)
}

// bounds returns axes with room for the points of a figure.
func bounds(f figure) (x, y axis) {
	low, high := point{math.Inf(1), math.Inf(1)}, point{}
	for _, p := range f.panels {
		for _, s := range p.series {
			for _, at := range s.points {
				low, high = point{min(low.x, at.x), min(low.y, at.y)}, point{max(high.x, at.x), max(high.y, at.y)}
			}
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
	// At most five labels fit below a panel.
	for math.Log(x.to/x.from)/math.Log(x.step) > 4 {
		x.step *= 2
	}
	if x.from == x.to {
		x.from, x.to = x.from/2, x.to*2
	}
	return x, y
}

// HTML returns the plot and the rows as a page without external references.
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

// Table returns the rows as text.
func (r *Report) Table() (heading []string, cells [][]string) {
	heading = []string{"TABLE", "WHAT", "ROUTE", "MESSAGE", "DEPTH", "VALUE", "p50 p90 p99 p99.9 µs", "RATIO", "OF",
		"ASKED", "REACHED", "NOTE"}
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
			b, _ := r.of(row)
			of = fmt.Sprintf("%.4g %s: %s", b.Value, b.Unit, b.Name)
		}
		if met, ok := r.met(row); ok {
			reached = map[bool]string{true: "yes", false: "no"}[met]
		}
		what := row.What
		if row.State != "" {
			what += ", " + row.State
		}
		cells = append(cells, []string{row.Table, what, route, sizeText(row.Size), depth,
			fmt.Sprintf("%.4g %s", row.Value, row.Unit), times, ratio, of, row.Asked.String(), reached, row.Note})
	}
	return heading, cells
}
