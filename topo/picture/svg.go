package picture

import (
	"bytes"
	_ "embed" // for the style sheet
	"encoding/xml"
	"fmt"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/topo/planner"
)

//go:embed picture.css
var sheet string

// SVG writes the picture as an SVG document that loads no other file.
func (p *Picture) SVG() []byte {
	w := &writer{}
	w.text(xml.Header)
	p.svg(w, true)
	return w.Bytes()
}

// css returns the complete style sheet, with the text sizes of the layout.
func css() string {
	var b strings.Builder
	b.WriteString(sheet)
	for _, s := range styles {
		weight := 400
		if s.bold {
			weight = 700
		}
		fmt.Fprintf(&b, ".picture .%s { font-size: %spx; font-weight: %d; }\n", s.name, coordinate(s.size), weight)
	}
	return b.String()
}

// svg writes the SVG element; a standalone element includes the style sheet.
func (p *Picture) svg(w *writer, alone bool) {
	w.open("svg", "xmlns", "http://www.w3.org/2000/svg", "class", "picture", "role", "img",
		"viewBox", fmt.Sprintf("0 0 %s %s", coordinate(p.width), coordinate(p.height)),
		"width", coordinate(p.width), "height", coordinate(p.height))
	w.leaf("title", p.title)
	if alone {
		w.open("style")
		w.text(css()) // the style sheet contains no special characters of XML
		w.close("style")
	}
	w.open("rect", "class", "paper", "width", "100%", "height", "100%")
	w.close("rect")
	w.words(text{margin, 46, "", styleTitle, p.title})
	w.words(text{margin, 68, "", styleSubtitle, p.subtitle})
	for _, c := range p.columns {
		w.words(c)
	}
	p.bands(w)
	for _, l := range p.links {
		w.link(l)
	}
	for _, r := range p.tree.roots {
		p.node(w, r)
		r.eachBelow(1, func(n *node, _ int) { p.node(w, n) })
	}
	// Draw the innermost lanes last, above the outer lanes.
	lanes := slices.Clone(p.lanes)
	slices.SortStableFunc(lanes, func(a, b *lane) int { return b.track - a.track })
	for _, l := range lanes {
		w.lane(l)
	}
	for _, b := range p.bars {
		w.bar(b)
	}
	p.legend.write(w, p.width)
	p.narrow.write(w, p.width)
	for _, n := range p.notes {
		w.words(n)
	}
	w.close("svg")
	w.text("\n")
}

// bands draws a background behind the lane and the bars of a GPU, to guide the eye along the
// row.
func (p *Picture) bands(w *writer) {
	for _, b := range p.bars {
		w.open("rect", "class", "row", "x", coordinate(b.x-10), "y", coordinate(b.y-2),
			"width", coordinate(p.width-margin-b.x+10), "height", coordinate(leafHeight), "rx", "4")
		w.close("rect")
	}
}

func (p *Picture) node(w *writer, n *node) {
	if n.hidden {
		return
	}
	class, role := [...]string{"root", "switch", "gpu", "nic", "memory"}[n.kind], ""
	var own *lane
	for _, l := range p.lanes {
		if l.start == n {
			own, role = l, l.Role
		}
	}
	if role == planner.RoleRefused || n.kind == kindGPU && own == nil && n.gpu.Reason != "" || n.kind == kindNIC &&
		(n.nic.Reason != "" || !n.nic.Active()) {
		class += " off"
	}
	w.open("g", "class", "node "+class)
	w.leaf("title", n.detail(role))
	w.open("rect", "class", "box", "x", coordinate(n.x), "y", coordinate(n.y), "width", coordinate(n.w), "height",
		coordinate(n.h), "rx", "5")
	w.close("rect")
	left, right := n.x+padding, n.x+n.w-padding
	line := func(y float64, s style, words string, end string, endStyle style) {
		room := right - left
		if end != "" {
			end = endStyle.fit(end, room*0.65)
			w.words(text{right, y, "end", endStyle, end})
			room -= endStyle.width(end) + 8
		}
		w.words(text{left, y, "", s, s.fit(words, room)})
	}
	switch n.kind {
	case kindRoot, kindSwitch:
		lines := []text{{style: styleName, words: n.name}, {style: styleText, words: n.processor()},
			{style: styleText, words: n.processors()}}
		if n.kind == kindSwitch {
			lines = []text{{style: styleName, words: n.name}, {style: styleAddress, words: plain(n.address)},
				{style: styleSmall, words: n.passes()}}
		}
		lines = slices.DeleteFunc(lines, func(t text) bool { return t.words == "" })
		y := n.middle() - float64(len(lines))*15/2 + 11
		for _, l := range lines {
			w.words(text{left, y, "", l.style, l.style.fit(l.words, right-left)})
			y += 15
		}
	default:
		w.open("rect", "class", "mark", "x", coordinate(n.x), "y", coordinate(n.y), "width", "5", "height", coordinate(n.h),
			"rx", "2.5")
		w.close("rect")
		left += 4
		// Two lines, in the middle of a card that many lanes make tall.
		y := n.y + 17
		if n.kind != kindGPU {
			y = n.middle() - 3
		}
		switch n.kind {
		case kindGPU:
			w.words(text{left, y, "", styleName, n.name})
			name := left + styleName.width(n.name) + 8
			tag := role
			if tag != "" {
				w.words(text{right, y, "end", styleText, tag})
			}
			model := plain(strings.TrimSpace(n.gpu.Vendor + " " + strings.TrimPrefix(n.gpu.Name, "NVIDIA ")))
			if chip, at := n.chip(); chip != "" && !n.beside() {
				model = strings.TrimPrefix(model+", ", ", ") + chip + " to CPU, " + gbs(at)
			}
			w.words(text{name, y, "", styleText, styleText.fit(model, right-name-styleText.width(tag)-8)})
			line(y+15, styleAddress, plain(n.address), n.nvlinks(), styleText)
		case kindNIC:
			fabric, rate := n.state()
			if n.address+rate == "" {
				y = n.middle() + 4
			}
			name, room := plain(n.name), right-left
			if styleName.width(name)+styleText.width(fabric)+8 > room {
				name, fabric, rate = styleName.fitMiddle(name, room), "", strings.TrimSpace(fabric+" "+rate)
			}
			line(y, styleName, name, fabric, styleText)
			line(y+15, styleAddress, plain(n.address), rate, styleText)
		case kindMemory:
			line(n.middle()+4, styleText, n.name, "", styleText)
		}
	}
	w.close("g")
}

// writer writes XML, and escapes attribute values and the text of elements.
type writer struct{ bytes.Buffer }

func (w *writer) text(s string) { _, _ = w.WriteString(s) } // a buffer takes everything

func (w *writer) escaped(s string) {
	// Writes to a buffer cannot fail.
	_ = xml.EscapeText(&w.Buffer, []byte(s))
}

// open begins an element; attributes alternate names and values. open omits an attribute with
// an empty value.
func (w *writer) open(name string, attributes ...string) {
	w.text("\n<" + name)
	for i := 0; i < len(attributes); i += 2 {
		if attributes[i+1] == "" {
			continue
		}
		w.text(" " + attributes[i] + `="`)
		w.escaped(attributes[i+1])
		w.text(`"`)
	}
	w.text(">")
}

func (w *writer) close(name string) { w.text("</" + name + ">") }

func (w *writer) leaf(name, content string, attributes ...string) {
	w.open(name, attributes...)
	w.escaped(content)
	w.close(name)
}

func (w *writer) words(t text) {
	if t.words == "" {
		return
	}
	w.leaf("text", t.words, "class", t.style.name, "x", coordinate(t.x), "y", coordinate(t.y), "text-anchor", t.anchor)
}

func (w *writer) path(class, d string, width float64) {
	size := ""
	if width > 0 {
		size = coordinate(width)
	}
	w.open("path", "class", class, "d", d, "stroke-width", size)
	w.close("path")
}

func (w *writer) link(l line) {
	var lanes []string
	if l.node != nil {
		for _, i := range l.node.lanes {
			lanes = append(lanes, fmt.Sprint(i))
		}
	}
	w.open("g", "class", l.class, "data-lanes", strings.Join(lanes, " "))
	w.leaf("title", l.detail)
	w.path("", l.path, l.width)
	for _, t := range l.texts {
		w.words(t)
	}
	w.close("g")
}

func binClass(bin int) string {
	if bin < 0 {
		return ""
	}
	return fmt.Sprintf(" q%d", bin)
}

func (w *writer) lane(l *lane) {
	w.open("g", "class", strings.TrimSpace("lane "+l.Kind)+binClass(l.bin), "data-lane", fmt.Sprint(l.index))
	w.leaf("title", l.detail)
	if l.path != "" {
		thick := l.thickness()
		w.path("halo", l.path, thick+4)
		w.path("line", l.path, thick)
		if l.Kind == planner.KindStaged {
			w.path("core", l.path, 0)
		}
		for _, s := range l.stops {
			w.stop(s, l)
		}
	}
	w.words(l.label)
	w.close("g")
}

// stop draws the end of a lane at a device; the shape shows the device's part in the lane.
func (w *writer) stop(s *port, l *lane) {
	x, y := s.node.x+s.node.w, s.y
	shape := ""
	switch {
	case s.node == l.start:
		w.open("circle", "class", "stop", "cx", coordinate(x), "cy", coordinate(y), "r", "4.5")
		w.close("circle")
		return
	case s.node.kind == kindGPU:
		shape = fmt.Sprintf("M%s %sh9v9h-9z", coordinate(x-4.5), coordinate(y-4.5))
	case s.node.kind == kindMemory:
		shape = fmt.Sprintf("M%s %sl5.5 5.5l-5.5 5.5l-5.5 -5.5z", coordinate(x), coordinate(y-5.5))
	default: // an arrow into the NIC
		w.path("stop arrow", fmt.Sprintf("M%s %sl%s -5v10z", coordinate(x+1), coordinate(y), coordinate(arrow)), 0)
		return
	}
	w.path("stop", shape, 0)
}

func (w *writer) bar(b bar) {
	w.open("g", "class", "bar"+binClass(b.lane.bin), "data-lane", fmt.Sprint(b.lane.index))
	w.leaf("title", b.detail)
	for i, class := range []string{"planned", "today", "without"} {
		height := 10.0
		y := b.y + float64(i)*barPitch + 1
		if i > 0 {
			height, y = 6, y+2.5
		}
		w.open("rect", "class", class, "x", coordinate(b.x), "y", coordinate(y), "width", coordinate(b.widths[i]), "height",
			coordinate(height), "rx", "1.5")
		w.close("rect")
	}
	for _, t := range b.texts {
		w.words(t)
	}
	w.close("g")
}

func (g legend) write(w *writer, width float64) {
	w.open("g", "class", g.class)
	w.path("rule", fmt.Sprintf("M%s %sH%s", coordinate(margin), coordinate(g.rule), coordinate(width-margin)), 1)
	for _, item := range g.items {
		middle := item.y - 4
		switch {
		case item.lane != "":
			l := &lane{Lane: planner.Lane{Kind: item.lane}, bin: item.bin}
			if item.words.style == styleNarrow {
				middle -= 5
			}
			path := fmt.Sprintf("M%s %sH%s", coordinate(item.x), coordinate(middle), coordinate(item.x+sampleWidth))
			w.open("g", "class", "lane "+item.lane+binClass(item.bin))
			w.path("line", path, l.thickness())
			if item.lane == planner.KindStaged {
				w.path("core", path, 0)
			}
			w.close("g")
		case item.bar > 0:
			class, height := [...]string{"planned", "today", "without"}[item.bar-1], 6.0
			if item.bar == 1 {
				height = 10
			}
			w.open("g", "class", "bar")
			w.open("rect", "class", class, "x", coordinate(item.x), "y", coordinate(middle-height/2), "width",
				coordinate(sampleWidth), "height", coordinate(height), "rx", "1.5")
			w.close("rect")
			w.close("g")
		}
		w.words(item.words)
	}
	w.close("g")
}
