package bench

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/topo/planner"
)

// gpusOf returns the PCI addresses of the two clients and their servers, for a host that stage has
// configured. With one GPU the servers are empty.
func (r *run) gpusOf() (clientA, serverA, serverB, clientB string, err error) {
	lanes, err := r.host.TwoClients()
	if err != nil {
		return
	}
	a, err := r.host.Plan.GPU(lanes[0].GPU)
	if err != nil {
		return
	}
	b, err := r.host.Plan.GPU(lanes[1].GPU)
	if !r.host.OneGPU() {
		serverA, serverB = lanes[0].Servers[0], lanes[1].Servers[0]
	}
	return a.BusID, serverA, serverB, b.BusID, err
}

// configurePlan configures the host's plan and starts no process. The results are as in gpusOf.
func (r *run) configurePlan() (clientA, serverA, serverB, clientB string, err error) {
	s, err := r.stage(direct, r.lanes, 0)
	if err != nil {
		return
	}
	if err = s.close(); err != nil {
		return
	}
	return r.gpusOf()
}

// legJob returns a leg with a relay's slots: the slots of the configuration or, in the same
// memory, pieces of the best size of the pair's self-test.
func (r *run) legJob(from, to, issuer string, size uint64, depth int) measure.Job {
	c := r.host.Config.Relay
	j := measure.Job{Kind: measure.Leg, From: from, To: to, Issuer: issuer, Size: size, Depth: depth, Slots: c.Slots,
		SlotBytes: uint64(c.SlotSize)}
	for _, p := range r.pairs {
		between := p.GPU.BusID == from && p.Server.BusID == to || p.GPU.BusID == to && p.Server.BusID == from
		if c.Calibration == config.CalibrationAuto && between && p.Chunk > 0 && p.Chunk < j.SlotBytes {
			j.Slots = min(int(uint64(j.Slots)*j.SlotBytes/p.Chunk), max(2*p.Depth, j.Slots))
			j.SlotBytes = p.Chunk
		}
	}
	return j
}

// askedOfCopies returns the goal for a relay's copy as a share of a raw copy.
func askedOfCopies(size uint64) *Bound {
	switch {
	case size >= 4<<20:
		return atLeast(0.98)
	case size >= 1<<20:
		return atLeast(0.95)
	case size >= 64<<10:
		return atLeast(0.90)
	}
	return nil
}

func (r *run) copies() error {
	client, server, _, _, err := r.configurePlan()
	if err != nil {
		return err
	}
	for _, size := range r.sizes(64<<10, 1<<20, 4<<20, 16<<20, 64<<20) {
		for _, depth := range r.depths(16) {
			for _, leg := range []struct{ what, from, to string }{
				{"client to slot", client, server},
				{"slot to client", server, client},
			} {
				name, err := r.baseline(measure.Job{Kind: BaselineRaw, From: leg.from, To: leg.to, Issuer: client, Size: size})
				if err != nil {
					return err
				}
				found, err := r.do(r.legJob(leg.from, leg.to, client, size, depth))
				if err != nil {
					return err
				}
				r.row(Row{Table: "copy", What: leg.what, Size: size, Depth: depth, Value: found.GBs, Unit: GBs, Baseline: name,
					Asked: askedOfCopies(size)})
			}
		}
		if size >= 1<<20 {
			continue
		}
		// Measure the gain of one call for several small copies.
		name, err := r.baseline(measure.Job{Kind: BaselineRaw, From: client, To: server, Issuer: client, Size: size})
		if err != nil {
			return err
		}
		found, err := r.do(measure.Job{Kind: measure.Batch, From: client, To: server, Issuer: client, Size: size})
		if err != nil {
			r.miss("copy", "raw copies, eight to a call, "+sizeText(size), err.Error()) // an older driver
			continue
		}
		r.row(Row{Table: "copy", What: "raw copies, eight to a call, client to slot", Size: size, Value: found.GBs, Unit: GBs,
			Baseline: name})
	}
	return nil
}

// rounds returns the number of hand-offs that take about the duration of a measurement.
func (r *run) rounds() int {
	if r.host.Simulated {
		return 100
	}
	return max(1000, int(r.Duration/(100*time.Microsecond)))
}

func (r *run) latency() error {
	client, server, _, other, err := r.configurePlan()
	if err != nil {
		return err
	}
	const size = 8
	timed := func(what, route string, times *measure.Times, baseline string, asked *Bound, note string) {
		row := Row{Table: "latency", What: what, Route: route, Size: size, Depth: 1, Value: times.P50, Unit: microseconds,
			Times: times, Baseline: baseline, Asked: asked, Note: note}
		if route != "" {
			row.Transport = transportOf(route)
		}
		r.row(row)
	}
	legs := []struct{ what, from, to string }{
		{"a relay's copy, client to slot", client, server},
		{"a relay's copy, slot to client", server, client},
	}
	if r.host.OneGPU() {
		for _, leg := range legs {
			r.miss("latency", leg.what, needsTwo)
		}
		legs = nil
	}
	for _, leg := range legs {
		name, err := r.baseline(measure.Job{Kind: BaselineLocal, From: leg.from, To: leg.to, Issuer: client, Size: size})
		if err != nil {
			return err
		}
		job := r.legJob(leg.from, leg.to, client, size, 1)
		job.Kind = measure.Queue
		found, err := r.do(job)
		if err != nil {
			return err
		}
		timed(leg.what, "", found.Times, name, atMost(1.15), "asked for and completed by a relay's queue")
	}
	ring, err := r.do(measure.Job{Kind: measure.Ring})
	if err != nil {
		return err
	}
	const rings = "rings, to and fro, both sides busy"
	timed(rings, "", ring.Times, "", atMost(1), "post, take, complete, see; no copy")
	r.row(Row{Table: "latency", What: rings + ", p99", Size: size, Depth: 1, Value: ring.Times.P99, Unit: microseconds,
		Asked: atMost(5)})
	local, err := r.baseline(measure.Job{Kind: BaselineLocal, From: client, To: other, Issuer: client, Size: size})
	if err != nil {
		return err
	}
	for _, route := range r.Routes {
		s, a, b, err := r.pair(route, 1<<20)
		if err != nil {
			return err
		}
		times, err := r.handOff(a, b)
		if err == nil {
			timed("hand-off by timelines, one way", route, times, "", nil, "stream to stream")
			var found reply
			if found, err = r.stream(a, b, size, 1); err == nil {
				timed("message, from post to completion", route, found.Times, local, nil,
					"seen by the sender, when it is with the receiver")
			}
		}
		if err := errors.Join(err, s.close()); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) handOff(a, b *worker) (*measure.Times, error) {
	r.progress("hand-off, 8 B")
	a.tags++
	o := order{Do: doHandOff, Rounds: r.rounds(), Base: a.values, Tag: a.tags << 32, Starts: true}
	other := o
	other.Starts = false
	a.values += uint64(o.Rounds)
	replies, err := together(map[*worker]order{a: o, b: other})
	return replies[a].Times, err
}

// slowestLeg adds the raw copy of the slowest of the staged route's three legs as a baseline.
func (r *run) slowestLeg(size uint64, clientA, serverA, serverB, clientB string) (string, error) {
	if !r.wants(BaselineRaw) {
		return "", nil
	}
	slowest := Baseline{Name: fmt.Sprintf("slowest raw leg of route staged, %s", sizeText(size)), Unit: GBs}
	if r.known[slowest.Name] {
		return slowest.Name, nil
	}
	for _, leg := range [][3]string{{clientA, serverA, clientA}, {serverA, serverB, serverB},
		{serverB, clientB, clientB}} {
		if leg[0] == leg[1] {
			continue // both clients have the same server
		}
		name, err := r.baseline(measure.Job{Kind: BaselineRaw, From: leg[0], To: leg[1], Issuer: leg[2], Size: size})
		if err != nil {
			return "", err
		}
		for _, b := range r.report.Baselines {
			if b.Name == name && (slowest.Value == 0 || b.Value < slowest.Value) {
				slowest.Value = b.Value
			}
		}
	}
	r.known[slowest.Name] = true
	r.report.Baselines = append(r.report.Baselines, slowest)
	return slowest.Name, nil
}

func (r *run) routes() error {
	sizes := r.sizes(8, 4<<10, 64<<10, 256<<10, 1<<20, 4<<20, 16<<20, 64<<20)
	for _, route := range r.Routes {
		s, a, b, err := r.pair(route, slices.Max(sizes))
		if err != nil {
			return err
		}
		err = r.route(s, a, b, sizes)
		if err := errors.Join(err, s.close()); err != nil {
			return err
		}
	}
	return nil
}

// rawOf adds the raw copy for a route as a baseline. comparable reports whether a goal applies to
// the ratio: with two GPUs the staged route uses one link twice.
func (r *run) rawOf(route string, size uint64) (name string, comparable bool, err error) {
	clientA, serverA, serverB, clientB, err := r.gpusOf()
	if err != nil {
		return "", false, err
	}
	if route == direct {
		name, err = r.baseline(measure.Job{Kind: BaselineRaw, From: clientA, To: clientB, Issuer: clientA, Size: size})
		return name, true, err
	}
	name, err = r.slowestLeg(size, clientA, serverA, serverB, clientB)
	return name, clientA != serverB, err
}

func (r *run) route(s *stage, a, b *worker, sizes []uint64) error {
	for _, size := range sizes {
		name, comparable, err := r.rawOf(s.route, size)
		if err != nil {
			return err
		}
		var asked *Bound
		if size >= 16<<20 && comparable {
			asked = atLeast(0.95)
		}
		for _, depth := range r.depths(1, 16) {
			r.progress("route %s, %s, %d in flight", s.route, sizeText(size), depth)
			found, err := r.stream(a, b, size, depth)
			if err != nil {
				return err
			}
			row := Row{
				Table: "routes", What: "container A to container B", Route: s.route, Transport: transportOf(s.route), Size: size,
				Depth: depth,
				Value: found.GBs, Unit: GBs, Times: found.Times, Baseline: name, Note: s.connection,
			}
			if depth >= 16 {
				row.Asked = asked
			}
			r.row(row)
		}
	}
	return nil
}

// askedOfClientCopies returns the goal for a client's own copy as a share of a raw copy.
func askedOfClientCopies(size uint64) *Bound {
	if size >= 4<<20 {
		return atLeast(0.95)
	}
	return nil
}

// clientCopy measures clients that copy to and from the slots themselves, on their own stream, and
// hand slots over by a timeline: the copies alone, of which only 8 bytes are sent, and whole
// routes.
func (r *run) clientCopy() (err error) {
	sizes := r.sizes(1<<20, 4<<20, 16<<20, 64<<20)
	r.host.ClientCopy = true
	defer func() { r.host.ClientCopy = false }()
	s, err := r.stage(staged, r.lanes, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	// Use the usual number of messages in flight if the slots fit.
	const depth = 16
	s.staging = depth / 2 * slices.Max(sizes)
	if r.host.Simulated {
		s.staging = 2 * slices.Max(sizes)
	}
	a, b, err := s.pair(slices.Max(sizes))
	if err != nil {
		return err
	}
	client, server := a.gpu.BusID, a.lane.Servers[0]
	for _, size := range sizes {
		r.progress("client copy, %s", sizeText(size))
		row := Row{Table: "client-copy", Route: staged, Transport: transportOf(staged), Size: size,
			Depth: int(min(depth, s.staging/size)), Unit: GBs}
		if row.Baseline, err = r.baseline(measure.Job{Kind: BaselineRaw, From: client, To: server, Issuer: client,
			Size: size}); err != nil {
			return err
		}
		o := order{Size: size, Handed: 8, Depth: depth, Duration: r.Duration}
		for _, by := range []struct {
			what     string
			followed bool
			asked    *Bound
		}{
			{"copied to a slot and handed over, of raw", true, askedOfClientCopies(size)},
			{"the same, the stream itself writes the value", false, nil},
		} {
			o.Followed = by.followed
			found, err := r.sendAs(a, b, o)
			if err != nil {
				return err
			}
			row.What, row.Value, row.Asked = by.what, found.GBs, by.asked
			r.row(row)
		}
		if row.Baseline, _, err = r.rawOf(staged, size); err != nil {
			return err
		}
		o.Handed, o.Followed = 0, true
		found, err := r.sendAs(a, b, o)
		if err != nil {
			return err
		}
		row.What, row.Value, row.Asked = "container A to container B, each with its own copies", found.GBs, nil
		r.row(row)
	}
	return nil
}

// bounces lists the piece sizes and numbers of buffers to try for the bounce.
var bounces = []struct {
	chunk   uint64
	buffers int
}{{512 << 10, 4}, {1 << 20, 4}, {4 << 20, 2}, {4 << 20, 4}}

func (r *run) bounce() error {
	sizes := r.sizes(64<<10, 1<<20, 4<<20, 16<<20, 64<<20)
	for _, route := range r.Routes {
		s, a, b, err := r.pair(route, slices.Max(sizes))
		if err != nil {
			return err
		}
		for _, size := range sizes {
			var name string
			if name, err = r.bestBounce(a.gpu.BusID, b.gpu.BusID, size); err != nil {
				break
			}
			r.progress("route %s, %s", route, sizeText(size))
			var found reply
			if found, err = r.stream(a, b, size, 16); err != nil {
				break
			}
			row := Row{Table: "bounce", What: "container A to container B", Route: route, Transport: transportOf(route),
				Size: size, Depth: 16, Value: found.GBs, Unit: GBs, Baseline: name}
			if size >= 16<<20 && (route == direct || !slices.Contains(b.lane.Servers, a.lane.GPU)) {
				row.Asked = atLeast(6)
			}
			r.row(row)
		}
		if err := errors.Join(err, s.close()); err != nil {
			return err
		}
	}
	return nil
}

// bestBounce adds the fastest of the bounces as a baseline.
func (r *run) bestBounce(from, to string, size uint64) (string, error) {
	if !r.wants(BaselineBounce) {
		return "", nil
	}
	name := fmt.Sprintf("best bounce %s, %s to %s", sizeText(size), from, to)
	if r.known[name] {
		return name, nil
	}
	var best measure.Result
	for _, c := range bounces {
		found, err := r.do(measure.Job{Kind: BaselineBounce, From: from, To: to, Size: size, Chunk: c.chunk,
			Buffers: c.buffers})
		if err != nil {
			return "", err
		}
		if found.GBs > best.GBs {
			best = found
		}
	}
	r.keep(name, best)
	return name, nil
}

// jain returns Jain's index of fairness: 1 for equal shares, 1/n if one share has everything.
func jain(list []float64) float64 {
	sum, squares := 0.0, 0.0
	for _, x := range list {
		sum += x
		squares += x * x
	}
	if squares == 0 {
		return 0
	}
	return sum * sum / (float64(len(list)) * squares)
}

func total(list []float64) (sum float64) {
	for _, x := range list {
		sum += x
	}
	return sum
}

func (r *run) manyClients() error {
	const clients, size = 4, 16 << 20
	for _, shape := range []struct {
		what string
		one  bool
	}{{"4 clients of one relay", true}, {"4 clients of as many relays", false}} {
		if err := r.many(shape.what, shape.one, clients, size); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) many(what string, one bool, clients int, size uint64) (err error) {
	s, err := r.stage(direct, r.lanes, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	lanes, err := r.host.TwoClients()
	if err != nil {
		return err
	}
	var senders, receivers []*worker
	for _, side := range []struct {
		lane planner.Lane
		list *[]*worker
	}{{lanes[0], &senders}, {lanes[1], &receivers}} {
		for i := range clients {
			var beside *worker
			if one && i > 0 {
				beside = (*side.list)[0]
			}
			w, err := s.startAttached(side.lane, beside, size)
			if err != nil {
				return err
			}
			*side.list = append(*side.list, w)
		}
	}
	orders := map[*worker]order{}
	for i := range clients {
		if err := s.connect(senders[i], receivers[i]); err != nil {
			return err
		}
		o := order{Do: doSend, Size: size, Depth: 16, Duration: 3 * r.Duration, Tag: 1}
		orders[senders[i]] = o
		o.Do = doReceive
		orders[receivers[i]] = o
	}
	name, err := r.baseline(measure.Job{Kind: BaselineRaw, From: senders[0].gpu.BusID, To: receivers[0].gpu.BusID,
		Issuer: senders[0].gpu.BusID, Size: size})
	if err != nil {
		return err
	}
	r.progress("%s", what)
	replies, err := together(orders)
	if err != nil {
		return err
	}
	var rates []float64
	for _, w := range senders {
		rates = append(rates, replies[w].GBs)
	}
	row := Row{Table: "many-clients", What: what + ", together", Route: direct, Transport: transportOf(direct), Size: size,
		Depth: 16, Value: total(rates), Unit: GBs, Baseline: name, Asked: atLeast(0.95)}
	r.row(row)
	row.What, row.Value, row.Unit, row.Baseline, row.Asked = what+", Jain's index", jain(rates), index, "", atLeast(0.99)
	r.row(row)
	return nil
}
