package picture

import (
	"slices"

	"github.com/peerlane/peerlane/topo/planner"
)

// legend explains the lines, colours and bars that occur.
type legend struct {
	class string // class of the SVG group
	items []legendItem
	rule  float64 // y of the line above the legend
}

// legendItem is a sample and a text. At most a single field of lane and bar is set.
type legendItem struct {
	lane  string // a kind of lane
	bin   int    // a colour; -1 without a colour
	bar   int    // a kind of bar, from 1
	x, y  float64
	words text
}

const (
	sampleWidth = 34.0
	legendPitch = 20.0
	narrowPitch = 40.0
)

// placeLegends adds both legends below the picture, at an equal place. The style sheet shows
// the narrow legend where the picture is shown at less than two thirds of its width.
func (p *Picture) placeLegends() {
	kinds := map[string]bool{}
	coloured := false
	for _, l := range p.lanes {
		kinds[l.Kind] = true
		coloured = coloured || l.bin >= 0 && l.drawn()
	}
	var lines, narrowLines, colours, narrowColours, bars []legendItem
	for _, k := range []struct{ kind, words string }{
		{planner.KindDirect, "direct: the NIC reads and writes the GPU's memory"},
		{planner.KindStaged, "staged by a relay on the GPUs marked ■"},
		{planner.KindBounce, "bounce, through the host memory marked ◆"},
	} {
		if kinds[k.kind] {
			lines = append(lines, legendItem{lane: k.kind, bin: -1, words: text{words: k.words}})
			narrowLines = append(narrowLines, legendItem{lane: k.kind, bin: -1, words: text{words: k.kind}})
		}
	}
	for b := range bins {
		if !coloured {
			break
		}
		// The last colour is also that of a lane with several ports.
		upTo := figure(p.portRate * float64(b+1) / bins)
		words := "up to " + upTo + " GB/s"
		switch b {
		case 0:
			words = "0 to " + upTo + " GB/s"
		case bins - 1:
			upTo += " GB/s"
			words = "over " + figure(p.portRate*float64(b)/bins) + " GB/s (a port has " + figure(p.portRate) + ")"
		}
		colours = append(colours, legendItem{lane: planner.KindDirect, bin: b, words: text{words: words}})
		narrowColours = append(narrowColours, legendItem{lane: planner.KindDirect, bin: b, words: text{words: upTo}})
	}
	if len(p.bars) > 0 {
		for i, words := range []string{"as planned", "NCCL today", "GPUDirect RDMA off"} {
			bars = append(bars, legendItem{bar: i + 1, bin: -1, words: text{words: words}})
		}
	}
	words := ""
	if slices.ContainsFunc(p.links, func(l line) bool { return len(l.texts) > 0 }) {
		words = "Links: usable bandwidth in each direction, as NCCL computes it; the thicker the faster."
	}
	if len(p.bars) > 0 {
		words += " Lanes: an estimate, while all GPUs exchange with the network as fast as they can."
	}
	p.legend.class, p.narrow.class = "legend", "legend narrow"
	y := p.legend.place(p, styleText, legendPitch, lines, colours, bars)
	y += legendPitch
	for _, l := range styleText.wrap(words, p.width-2*margin) {
		p.legend.items = append(p.legend.items, legendItem{bin: -1, words: text{margin, y, "", styleText, l}})
		y += 16
	}
	end := p.narrow.place(p, styleNarrow, narrowPitch, narrowLines, narrowColours)
	p.height = max(y-10, end+10)
}

// place places the items of the rows, breaks rows that are wider than the picture, and returns
// the y of the last row.
func (g *legend) place(p *Picture, s style, pitch float64, rows ...[]legendItem) float64 {
	y := p.height + 26
	g.rule = y
	y += 8
	for _, row := range rows {
		if len(row) == 0 {
			continue
		}
		y += pitch
		x := margin
		for _, item := range row {
			wide := sampleWidth + 8 + s.width(item.words.words) + 26
			if x > margin && x+wide > p.width-margin {
				x = margin
				y += pitch
			}
			item.x, item.y = x, y
			item.words.x, item.words.y, item.words.style = x+sampleWidth+8, y, s
			g.items = append(g.items, item)
			x += wide
		}
	}
	return y
}
