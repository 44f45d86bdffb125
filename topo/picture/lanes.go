package picture

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// bins are the colours of lanes, from the slowest to the fastest.
const bins = 5

// lane is a lane of the plan, drawn as a line that visits devices.
type lane struct {
	planner.Lane
	index int // in the plan
	start *node
	stops []*port // start first
	// bin is the colour, from 0; -1 without an estimate.
	bin      int
	estimate *planner.GPUEstimate
	track    int
	path     string
	label    text
	detail   string
}

// port is where a lane meets a device.
type port struct {
	lane *lane
	node *node
	y    float64
}

// addLanes adds the lanes, and the ports of devices for the lanes.
func (p *Picture) addLanes() {
	if p.plan == nil {
		return
	}
	p.portRate = portRate(p.tree.host.NICs)
	for i, l := range p.plan.Lanes {
		drawn := &lane{Lane: l, index: i, start: p.tree.gpus[l.GPU], bin: bin(l.Bandwidth, p.portRate)}
		if l.Bandwidth == 0 && l.Kind != "" {
			drawn.bin = -1 // a NIC that the topology lacks
		}
		if p.estimate != nil {
			for k, e := range p.estimate.GPUs {
				if e.GPU == l.GPU {
					drawn.estimate = &p.estimate.GPUs[k]
				}
			}
		} else {
			drawn.bin = -1
		}
		if drawn.start == nil {
			continue // the plan is of another host
		}
		p.lanes = append(p.lanes, drawn)
		p.stop(drawn, drawn.start)
		switch l.Kind {
		case "":
			continue
		case planner.KindStaged:
			for _, s := range l.Servers {
				p.stop(drawn, p.tree.gpus[s])
			}
		}
		var visited []*node
		for _, name := range bounced(l) {
			if m := p.tree.nics[name].root().memory(); m != nil && !slices.Contains(visited, m) {
				visited = append(visited, m)
				p.stop(drawn, m)
			}
		}
		for _, name := range l.NICs {
			p.stop(drawn, p.tree.nics[name])
		}
		p.markLinks(drawn)
	}
	p.assignTracks()
	p.sortPorts()
}

// bounced returns the NICs that a lane reaches through host memory.
func bounced(l planner.Lane) (nics []string) {
	if l.Kind == planner.KindBounce {
		return l.NICs
	}
	for _, m := range l.Members {
		if l.KindOf(m) == planner.KindBounce && !slices.Contains(nics, m.NIC) {
			nics = append(nics, m.NIC)
		}
	}
	return nics
}

// defaultPortRate is the scale of a host whose NICs state no rate: 400 Gbit/s in GB/s.
const defaultPortRate = 50

// portRate returns the rate of the fastest port in GB/s, the scale of the colours. Pictures of
// a host with and without a failed NIC therefore have equal colours for equal bandwidths.
func portRate(nics []topo.NIC) float64 {
	fastest := 0.0
	for _, n := range nics {
		fastest = max(fastest, n.RateGbps()/8)
	}
	return cmp.Or(fastest, defaultPortRate)
}

// bin returns the colour of a bandwidth: the index of its part of the port rate. A lane of
// several NICs can exceed the port rate, and has the last colour.
func bin(bandwidth, port float64) int {
	return min(bins-1, max(0, int(float64(bins)*bandwidth/port-1e-9)))
}

func (p *Picture) stop(l *lane, at *node) {
	if at == nil {
		return
	}
	stop := &port{lane: l, node: at}
	l.stops = append(l.stops, stop)
	at.ports = append(at.ports, stop)
}

// drawn reports whether a lane is a line; a lane without a destination is only a word.
func (l *lane) drawn() bool { return len(l.stops) > 1 }

// assignTracks assigns lanes to columns, as near to the devices as possible. Lanes that do not
// meet share a column. Short lanes are innermost, so that few lanes cross.
func (p *Picture) assignTracks() {
	row := map[*node]int{}
	for i, n := range p.leaves() {
		row[n] = i
	}
	type span struct {
		l        *lane
		from, to int
	}
	var spans []span
	for _, l := range p.lanes {
		if !l.drawn() {
			continue
		}
		s := span{l, row[l.start], row[l.start]}
		for _, stop := range l.stops {
			s.from, s.to = min(s.from, row[stop.node]), max(s.to, row[stop.node])
		}
		spans = append(spans, s)
	}
	slices.SortStableFunc(spans, func(a, b span) int { return cmp.Compare(a.to-a.from, b.to-b.from) })
	var tracks [][]span
	for _, s := range spans {
		at := slices.IndexFunc(tracks, func(t []span) bool {
			return !slices.ContainsFunc(t, func(other span) bool { return s.from <= other.to && other.from <= s.to })
		})
		if at < 0 {
			at = len(tracks)
			tracks = append(tracks, nil)
		}
		tracks[at] = append(tracks[at], s)
		s.l.track = at
	}
}

// sortPorts orders the ends of lanes at a device so that few lines cross: first the device's
// lane, then lanes from above, innermost first, then lanes from below, innermost last.
func (p *Picture) sortPorts() {
	row := map[*node]int{}
	for i, n := range p.leaves() {
		row[n] = i
	}
	for n := range row {
		slices.SortStableFunc(n.ports, func(a, b *port) int {
			rank := func(p *port) int {
				switch {
				case p.lane.start == n:
					return 0
				case row[p.lane.start] < row[n]:
					return 1
				}
				return 2
			}
			byTrack := cmp.Compare(a.lane.track, b.lane.track)
			if rank(a) == 2 {
				byTrack = -byTrack
			}
			return cmp.Or(cmp.Compare(rank(a), rank(b)), byTrack)
		})
	}
}

// placePorts places the ends of lanes on a device, and returns the required height.
func (n *node) placePorts() float64 {
	if len(n.ports) == 0 {
		return leafHeight
	}
	if n.kind == kindGPU {
		// The word for the kind of the GPU's lane is above the lane.
		for i, p := range n.ports {
			p.y = n.y + ownPort + float64(i)*portPitch
			if i > 0 {
				p.y += 2
			}
		}
		return max(leafHeight, ownPort+float64(len(n.ports)-1)*portPitch+10)
	}
	height := max(leafHeight, float64(len(n.ports)-1)*portPitch+16)
	first := n.y + (height-float64(len(n.ports)-1)*portPitch)/2
	for i, p := range n.ports {
		p.y = first + float64(i)*portPitch
	}
	return height
}

// placeLanes draws the lanes on their tracks, and returns the right edge.
func (p *Picture) placeLanes(deck float64) (right float64) {
	if len(p.lanes) == 0 {
		return deck
	}
	tracks := 0
	for _, l := range p.lanes {
		tracks = max(tracks, l.track+1)
		p.describe(l)
		words := l.Kind
		switch {
		case words == "":
			words = "no lane"
		case p.shares(l) != "":
			words += p.parts(l)
		}
		l.label = text{deck + 8, l.stops[0].y - 5, "", styleLane, words}
		if l.Kind == "" {
			l.label.y += 9 // no line is below the word
		}
		if l.drawn() {
			l.path = l.draw(deck, deck+stub+float64(l.track)*track)
		}
	}
	p.columns = append(p.columns, text{deck + 8, top - 16, "", styleColumn, "lanes"})
	return deck + stub + float64(tracks)*track
}

// parts returns the weights of a lane's members, as text for unequal members.
func (p *Picture) parts(l *lane) string {
	const maxParts = 4 // the available space
	var parts []string
	for _, m := range l.Members {
		parts = append(parts, strconv.Itoa(m.Weight))
	}
	if len(parts) > maxParts {
		parts = append(parts[:maxParts], "…")
	}
	return " " + strings.Join(parts, ":")
}

// draw returns the SVG path of a lane: a line down the track, and a line from the track to each
// device of the lane.
func (l *lane) draw(left, x float64) string {
	stops := slices.Clone(l.stops)
	slices.SortFunc(stops, func(a, b *port) int { return cmp.Compare(a.y, b.y) })
	first, last := stops[0], stops[len(stops)-1]
	end := func(p *port) string {
		if p.node.kind == kindNIC {
			return coordinate(left + arrow)
		}
		return coordinate(left)
	}
	r := min(6, (last.y-first.y)/2)
	var path strings.Builder
	fmt.Fprintf(&path, "M%s %sH%sQ%s %s %s %sV%sQ%s %s %s %sH%s",
		end(first), coordinate(first.y), coordinate(x-r),
		coordinate(x), coordinate(first.y), coordinate(x), coordinate(first.y+r),
		coordinate(last.y-r),
		coordinate(x), coordinate(last.y), coordinate(x-r), coordinate(last.y), end(last))
	for _, s := range stops[1 : len(stops)-1] {
		fmt.Fprintf(&path, "M%s %sH%s", end(s), coordinate(s.y), coordinate(x))
	}
	return path.String()
}

// thickness returns the width of a lane's line: a faster lane is thicker, and readable without
// colours.
func (l *lane) thickness() float64 {
	if l.bin < 0 {
		return 3
	}
	return 1.8 + float64(l.bin)*0.6
}

// markLinks adds the lane to the links of the tree on the lane's route, as far as the tree
// shows the route: NVLink and joined switches are outside the tree.
func (p *Picture) markLinks(l *lane) {
	var links []*node
	add := func(a, b *node, by topo.PathType) {
		if a == nil || b == nil || by < topo.PIX || by == topo.DIS {
			return
		}
		var path []*node
		shared := a
		for ; shared != nil && !b.below(shared); shared = shared.parent {
			path = append(path, shared)
		}
		for n := b; n != shared; n = n.parent {
			path = append(path, n)
		}
		throughCPU := shared == nil || shared.kind == kindRoot
		if throughCPU && by <= topo.PXB {
			return
		}
		links = append(links, path...)
	}
	first := func(path *topo.Path) topo.PathType {
		if path == nil {
			return topo.DIS
		}
		return path.Type
	}
	for _, m := range membersOf(l.Lane) {
		nic := p.tree.nics[m.NIC]
		switch l.KindOf(m) {
		case planner.KindDirect:
			add(l.start, nic, l.Path)
		case planner.KindStaged:
			add(l.start, p.tree.gpus[m.Server], first(l.Copy))
			add(p.tree.gpus[m.Server], nic, first(l.Network))
		case planner.KindBounce:
			if l.Path != topo.DIS {
				add(l.start, l.start.root(), topo.SYS)
				add(nic, nic.root(), topo.SYS)
			}
		}
	}
	for _, n := range links {
		if n.kind != kindRoot && !slices.Contains(n.lanes, l.index) {
			n.lanes = append(n.lanes, l.index)
		}
	}
}

// membersOf returns the members of a lane; without members, every pair of the lane's servers
// and NICs.
func membersOf(l planner.Lane) []planner.Member {
	if len(l.Members) > 0 {
		return l.Members
	}
	return l.Even()
}

// placeBars draws the three rates of each GPU, and returns the right edge.
func (p *Picture) placeBars(left float64) (right float64) {
	if p.estimate == nil || len(p.estimate.GPUs) == 0 {
		return left
	}
	left += 24
	highest := 0.0
	for _, e := range p.estimate.GPUs {
		highest = max(highest, e.Relay, e.NCCL, e.HostMemory)
	}
	if highest == 0 {
		return left
	}
	for _, l := range p.lanes {
		if l.estimate == nil {
			continue
		}
		b := bar{x: left, y: l.start.y + 2, lane: l, detail: l.detail}
		for i, rate := range []float64{l.estimate.Relay, l.estimate.NCCL, l.estimate.HostMemory} {
			b.widths[i] = max(1, barWidth*rate/highest)
			words, style := figure(rate), styleSmall
			if i == 0 {
				words, style = gbs(rate), styleRate
				switch {
				case l.Kind == "":
					words, b.widths[0] = "no lane", 0
				case l.bin < 0:
					words = "not known"
				}
			}
			b.texts = append(b.texts, text{left + b.widths[i] + 6, b.y + float64(i)*barPitch + 9.5, "", style, words})
		}
		p.bars = append(p.bars, b)
	}
	p.columns = append(p.columns, text{left, top - 16, "", styleColumn, "GB/s while all GPUs are busy"})
	return left + barWidth + 70
}
