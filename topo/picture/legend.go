package picture

import (
	"slices"

	"github.com/peerlane/peerlane/topo"
)

// legend says what lines, colours and bars mean: those that occur.
type legend struct {
	items []legendItem
	rule  float64 // y of the line above it
}

// legendItem is a sample and its words. What is drawn is one of these.
type legendItem struct {
	lane  string // a kind of lane
	bin   int    // a colour; -1 for none
	bar   int    // a kind of bar, from 1
	x, y  float64
	words text
}

const (
	sampleWidth = 34.0
	legendPitch = 20.0
)

func (g *legend) place(p *Picture) {
	kinds := map[string]bool{}
	fastest := 0.0
	for _, l := range p.lanes {
		kinds[l.Kind] = true
		if l.bin >= 0 && l.drawn() {
			fastest = max(fastest, l.Bandwidth)
		}
	}
	var rows [][]legendItem
	var row []legendItem
	for _, k := range []struct{ kind, words string }{
		{topo.KindDirect, "direct: the NIC reads and writes the GPU's memory"},
		{topo.KindStaged, "staged by a relay on the GPUs marked ■"},
		{topo.KindBounce, "bounce, through the host memory marked ◆"},
	} {
		if kinds[k.kind] {
			row = append(row, legendItem{lane: k.kind, bin: -1, words: text{words: k.words}})
		}
	}
	rows = append(rows, row)
	row = nil
	for b := range bins {
		if fastest > 0 {
			words := "to " + gbs(fastest*float64(b+1)/bins)
			row = append(row, legendItem{lane: topo.KindDirect, bin: b, words: text{words: words}})
		}
	}
	rows = append(rows, row)
	row = nil
	if len(p.bars) > 0 {
		for i, words := range []string{"as planned", "as NCCL does it today", "GPUDirect RDMA off"} {
			row = append(row, legendItem{bar: i + 1, bin: -1, words: text{words: words}})
		}
	}
	rows = append(rows, row)

	y := p.height + 26
	g.rule = y
	y += 8
	for _, row := range rows {
		if len(row) == 0 {
			continue
		}
		y += legendPitch
		x := margin
		for _, item := range row {
			wide := sampleWidth + 8 + styleText.width(item.words.words) + 26
			if x > margin && x+wide > p.width-margin {
				x = margin
				y += legendPitch
			}
			item.x, item.y = x, y
			item.words.x, item.words.y, item.words.style = x+sampleWidth+8, y, styleText
			g.items = append(g.items, item)
			x += wide
		}
	}
	y += legendPitch
	words := ""
	if slices.ContainsFunc(p.links, func(l line) bool { return len(l.texts) > 0 }) {
		words = "Links: usable bandwidth in each direction, as NCCL reckons it; the thicker the faster."
	}
	if len(p.bars) > 0 {
		words += " Lanes: an estimate, while all GPUs exchange with the network as fast as they can."
	}
	for _, l := range styleText.wrap(words, p.width-2*margin) {
		g.items = append(g.items, legendItem{bin: -1, words: text{margin, y, "", styleText, l}})
		y += 16
	}
	p.height = y - 10
}
