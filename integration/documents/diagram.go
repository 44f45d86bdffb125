package documents

import (
	"fmt"
	"html"
	"strings"
)

// diagrams returns the SVG of each diagram by path below docs.
func diagrams() map[string]string {
	return map[string]string{"network.svg": networkDiagram(), "relay.svg": relayDiagram()}
}

// box is a labelled rectangle. Lengths are in user units of the SVG.
type box struct {
	x, y, width, height int
	lines               []string
	class               string // "" for a plain box, "group" for a frame with the title at the top
}

// arrow is a polyline with an arrowhead at the last point. label is centred at labelX, labelY.
type arrow struct {
	points         [][2]int
	label          string
	labelX, labelY int
	dashed         bool
}

// draw returns an SVG with the boxes and arrows. Colours follow the reader's colour scheme.
func draw(title string, width, height int, boxes []box, arrows []arrow) string {
	var b strings.Builder
	fmt.Fprintf(&b, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\">\n", width, height)
	b.WriteString("<!-- Written by `go test ./integration/documents -update`. -->\n")
	fmt.Fprintf(&b, "<title>%s</title>\n", html.EscapeString(title))
	b.WriteString(`<style>
text { font: 13px sans-serif; fill: #1f2328; text-anchor: middle; }
rect { fill: #f6f8fa; stroke: #59636e; }
.group { fill: none; stroke-dasharray: 5 4; }
.background { fill: #ffffff; stroke: none; }
polyline { fill: none; stroke: #0550ae; stroke-width: 1.5; marker-end: url(#head); }
.dashed { stroke-dasharray: 6 4; }
marker path { fill: #0550ae; }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc; }
rect { fill: #161b22; stroke: #9198a1; }
.background { fill: #0d1117; }
polyline { stroke: #79c0ff; }
marker path { fill: #79c0ff; }
}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>
`)
	fmt.Fprintf(&b, "<rect class=\"background\" width=\"%d\" height=\"%d\"/>\n", width, height)
	for _, x := range boxes {
		fmt.Fprintf(&b, "<rect class=\"%s\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"6\"/>\n", x.class, x.x, x.y,
			x.width, x.height)
		y := x.y + x.height/2 + 5 - 8*(len(x.lines)-1)
		if x.class == "group" {
			y = x.y + 18
		}
		for i, line := range x.lines {
			fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\">%s</text>\n", x.x+x.width/2, y+16*i, html.EscapeString(line))
		}
	}
	for _, a := range arrows {
		points := make([]string, len(a.points))
		for i, p := range a.points {
			points[i] = fmt.Sprintf("%d,%d", p[0], p[1])
		}
		class := ""
		if a.dashed {
			class = "dashed"
		}
		fmt.Fprintf(&b, "<polyline class=\"%s\" points=\"%s\"/>\n", class, strings.Join(points, " "))
		if a.label != "" {
			fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\">%s</text>\n", a.labelX, a.labelY, html.EscapeString(a.label))
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// networkDiagram shows the memory that a message between two hosts crosses, by RDMA and over TCP.
func networkDiagram() string {
	var boxes []box
	var arrows []arrow
	for i, host := range []string{"sending host", "receiving host"} {
		// left mirrors the second host, so that the NICs are adjacent.
		left := func(x, width int) int {
			if i == 0 {
				return 10 + x
			}
			return 870 - x - width
		}
		boxes = append(boxes,
			box{left(0, 340), 10, 340, 300, []string{host}, "group"},
			box{left(15, 95), 60, 95, 50, []string{"client's", "GPU memory"}, ""},
			box{left(135, 110), 60, 110, 50, []string{"slot on a", "server GPU"}, ""},
			box{left(270, 60), 60, 60, 50, []string{"RDMA", "NIC"}, ""},
			box{left(135, 110), 160, 110, 50, []string{"slot in pinned", "host memory"}, ""},
			box{left(270, 60), 160, 60, 50, []string{"TCP", "NIC"}, ""},
			box{left(15, 230), 250, 230, 40, []string{"relay"}, ""},
		)
		// steps lead from the client to the NIC, and backwards in the second host.
		steps := []arrow{
			{points: [][2]int{{110, 85}, {134, 85}}},
			{points: [][2]int{{245, 85}, {269, 85}}},
			{points: [][2]int{{62, 110}, {62, 185}, {134, 185}}},
			{points: [][2]int{{245, 185}, {269, 185}}},
		}
		for _, step := range steps {
			points := make([][2]int, len(step.points))
			for n, p := range step.points {
				if i == 0 {
					points[n] = [2]int{10 + p[0], p[1]}
				} else {
					points[len(points)-1-n] = [2]int{870 - p[0], p[1]}
				}
			}
			arrows = append(arrows, arrow{points: points})
		}
	}
	arrows = append(arrows,
		arrow{points: [][2]int{{340, 85}, {539, 85}}, label: "data by RDMA", labelX: 440, labelY: 77},
		arrow{points: [][2]int{{340, 185}, {539, 185}}, label: "or data over TCP", labelX: 440, labelY: 177},
		arrow{points: [][2]int{{255, 270}, {624, 270}}, label: "control and short messages over TCP", labelX: 440,
			labelY: 262, dashed: true},
	)
	return draw("Path of a message between two hosts", 880, 320, boxes, arrows)
}

// relayDiagram shows the states of a relay and the events between states.
func relayDiagram() string {
	state := func(x, y int, name string) box { return box{x, y, 120, 40, strings.Split(name, ", "), ""} }
	boxes := []box{
		state(20, 130, "starting"), state(240, 130, "ready"), state(240, 20, "waiting"), state(20, 20, "down"),
		state(500, 20, "draining, drained"), state(500, 130, "stopping, stopped"), state(240, 240, "ending"), state(500, 240,
			"left"),
	}
	arrows := []arrow{
		{points: [][2]int{{140, 150}, {239, 150}}, label: "answers", labelX: 190, labelY: 143},
		{points: [][2]int{{290, 130}, {290, 61}}, label: "dies", labelX: 270, labelY: 100},
		{points: [][2]int{{240, 55}, {110, 129}}, label: "delay is over", labelX: 205, labelY: 110},
		{points: [][2]int{{240, 35}, {141, 35}}, label: "5 failures", labelX: 190, labelY: 28},
		{points: [][2]int{{50, 60}, {50, 129}}, label: "resume", labelX: 78, labelY: 90},
		{points: [][2]int{{360, 140}, {430, 140}, {430, 40}, {499, 40}}, label: "drain", labelX: 460, labelY: 33},
		{points: [][2]int{{360, 150}, {499, 150}}, label: "stop", labelX: 460, labelY: 143},
		{points: [][2]int{{300, 170}, {300, 239}}, label: "container ends", labelX: 250, labelY: 210},
		{points: [][2]int{{345, 170}, {430, 260}, {499, 260}}, label: "supervisor is killed", labelX: 480, labelY: 225},
		{points: [][2]int{{620, 40}, {660, 40}, {660, 310}, {80, 310}, {80, 171}}, label: "resume", labelX: 370, labelY: 305},
		{points: [][2]int{{620, 150}, {660, 150}}},
	}
	return draw("States of a relay", 680, 325, boxes, arrows)
}
