package bench

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/integration/measure"
	"github.com/peerlane/peerlane/topo"
)

func least(f float64) *Bound { return &Bound{Least: f} }
func most(f float64) *Bound  { return &Bound{Most: f} }

// gpusOf are the PCI addresses of the two clients and their servers, for a host
// that stage has configured.
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
	return a.BusID, lanes[0].Servers[0], lanes[1].Servers[0], b.BusID, err
}

// configured makes the host's own plan, without any process.
func (r *run) configured() (clientA, serverA, serverB, clientB string, err error) {
	s, err := r.stage(direct, r.lanes, 0)
	if err != nil {
		return
	}
	if err = s.close(); err != nil {
		return
	}
	return r.gpusOf()
}

// legJob is a leg with the slots of the configuration.
func (r *run) legJob(from, to, issuer string, size uint64, depth int) measure.Job {
	return measure.Job{
		Kind: measure.Leg, From: from, To: to, Issuer: issuer, Size: size, Depth: depth,
		Slots: r.host.Config.Relay.Slots, SlotBytes: uint64(r.host.Config.Relay.SlotSize),
	}
}

// askedOfCopies is what a relay's copy must reach of a raw one.
func askedOfCopies(size uint64) *Bound {
	switch {
	case size >= 4<<20:
		return least(0.98)
	case size >= 1<<20:
		return least(0.95)
	case size >= 64<<10:
		return least(0.90)
	}
	return nil
}

func (r *run) copies() error {
	client, server, _, _, err := r.configured()
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
				r.row(Row{Table: "copy", What: leg.what, Size: size, Depth: depth, Value: found.GBs, Unit: GBs, Baseline: name, Asked: askedOfCopies(size)})
			}
		}
	}
	return nil
}

// rounds of a hand-off that take about the time of a measurement.
func (r *run) rounds() int {
	if r.host.Simulated {
		return 100
	}
	return max(1000, int(r.Duration/(100*time.Microsecond)))
}

func (r *run) latency() error {
	client, server, _, other, err := r.configured()
	if err != nil {
		return err
	}
	const size = 8
	timed := func(what, route string, times *measure.Times, baseline string, asked *Bound, note string) {
		row := Row{Table: "latency", What: what, Route: route, Size: size, Depth: 1, Value: times.P50, Unit: Microseconds, Times: times, Baseline: baseline, Asked: asked, Note: note}
		if route != "" {
			row.Transport = transportOf(route)
		}
		r.row(row)
	}
	for _, way := range []struct{ what, from, to string }{
		{"a relay's copy, client to slot", client, server},
		{"a relay's copy, slot to client", server, client},
	} {
		name, err := r.baseline(measure.Job{Kind: BaselineLocal, From: way.from, To: way.to, Issuer: client, Size: size})
		if err != nil {
			return err
		}
		job := r.legJob(way.from, way.to, client, size, 1)
		job.Kind = measure.Queue
		found, err := r.do(job)
		if err != nil {
			return err
		}
		timed(way.what, "", found.Times, name, most(1.15), "asked for and completed by a relay's queue")
	}
	ring, err := r.do(measure.Job{Kind: measure.Ring})
	if err != nil {
		return err
	}
	timed("rings, to and fro, both sides busy", "", ring.Times, "", most(1), "post, take, complete, see; no copy")
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
				timed("message, from post to completion", route, found.Times, local, nil, "seen by the sender, when it is with the receiver")
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

// slowestLeg makes the slowest raw copy of the staged route's three legs a
// baseline.
func (r *run) slowestLeg(size uint64, clientA, serverA, serverB, clientB string) (string, error) {
	if !r.wants(BaselineRaw) {
		return "", nil
	}
	slowest := Baseline{Name: fmt.Sprintf("slowest raw leg of route staged, %s", sizeText(size)), Unit: GBs}
	if r.known[slowest.Name] {
		return slowest.Name, nil
	}
	for _, leg := range [][3]string{{clientA, serverA, clientA}, {serverA, serverB, serverB}, {serverB, clientB, clientB}} {
		if leg[0] == leg[1] {
			continue // both clients have one server
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

func (r *run) route(s *stage, a, b *worker, sizes []uint64) error {
	clientA, serverA, serverB, clientB, err := r.gpusOf()
	if err != nil {
		return err
	}
	for _, size := range sizes {
		var name string
		var asked *Bound
		if s.route == direct {
			name, err = r.baseline(measure.Job{Kind: BaselineRaw, From: clientA, To: clientB, Issuer: clientA, Size: size})
			if size >= 16<<20 {
				asked = least(0.95)
			}
		} else {
			name, err = r.slowestLeg(size, clientA, serverA, serverB, clientB)
			if size >= 16<<20 && clientA != serverB { // with two GPUs it is reported
				asked = least(0.90)
			}
		}
		if err != nil {
			return err
		}
		for _, depth := range r.depths(1, 16) {
			r.progress("route %s, %s, %d in flight", s.route, sizeText(size), depth)
			found, err := r.stream(a, b, size, depth)
			if err != nil {
				return err
			}
			row := Row{
				Table: "routes", What: "container A to container B", Route: s.route, Transport: transportOf(s.route), Size: size, Depth: depth,
				Value: found.GBs, Unit: GBs, Times: found.Times, Baseline: name,
			}
			if depth >= 16 {
				row.Asked = asked
			}
			r.row(row)
		}
	}
	return nil
}

// bounces are the pieces and buffers that the bounce is tried with.
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
			row := Row{Table: "bounce", What: "container A to container B", Route: route, Transport: transportOf(route), Size: size, Depth: 16, Value: found.GBs, Unit: GBs, Baseline: name}
			if size >= 16<<20 && (route == direct || a.lane.GPU != b.lane.Servers[0]) {
				row.Asked = least(6)
			}
			r.row(row)
		}
		if err := errors.Join(err, s.close()); err != nil {
			return err
		}
	}
	return nil
}

// bestBounce makes the fastest of the bounces a baseline.
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
		found, err := r.do(measure.Job{Kind: BaselineBounce, From: from, To: to, Size: size, Chunk: c.chunk, Buffers: c.buffers})
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

// jain is Jain's index of fairness: 1 where all are alike, 1/n where one has all.
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

func (r *run) uniformity() error {
	pace := r.Pace
	if len(pace) == 0 {
		pace = []float64{25, 50}
		if r.host.Simulated {
			pace = []float64{0.5}
		}
	}
	const nic, perNIC = "emulated0", 4
	gpus := r.host.Topology.GPUs[:min(len(r.host.Topology.GPUs), perNIC)]
	var lanes []topo.Assignment
	for i, g := range gpus {
		lanes = append(lanes, topo.Assignment{GPU: g.BusID, Servers: []string{gpus[(i+1)%len(gpus)].BusID}, NICs: []string{nic}})
	}
	size := uint64(16 << 20)
	if r.host.Simulated {
		size = 1 << 20
	}
	for _, rate := range pace {
		r.progress("%d streams through a NIC of %g GB/s", len(gpus), rate)
		rates, err := r.streams(lanes, rate, size)
		if err != nil {
			return err
		}
		slices.Sort(rates)
		paced := fmt.Sprintf("the emulated NIC's rate, as it is set: %g GB/s", rate)
		r.report.Baselines = append(r.report.Baselines, Baseline{Name: paced, Value: rate, Unit: GBs})
		row := Row{Table: "uniformity", Route: staged, Transport: transportOf(staged), Size: size, Depth: 16, Unit: Index, Note: fmt.Sprintf("%d GPUs, all staged, at %g GB/s", len(gpus), rate)}
		row.What, row.Value, row.Asked = "slowest over fastest", rates[0]/rates[len(rates)-1], least(0.95)
		r.row(row)
		row.What, row.Value = "Jain's index", jain(rates)
		r.row(row)
		row.What, row.Value, row.Unit, row.Baseline = "all streams", total(rates), GBs, paced
		r.row(row)
	}
	return nil
}

// streams runs one stream from each GPU to the next at once, for ten times the time
// of a measurement.
func (r *run) streams(lanes []topo.Assignment, pace float64, size uint64) (rates []float64, err error) {
	s, err := r.stage(staged, lanes, pace)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	for _, assigned := range lanes {
		for _, lane := range r.host.Plan.Lanes {
			g, err := r.host.Plan.GPU(lane.GPU)
			if err != nil {
				return nil, err
			}
			if g.BusID != assigned.GPU {
				continue
			}
			if _, err := s.attached(lane, nil, size); err != nil {
				return nil, err
			}
		}
	}
	all := s.workers
	for i, w := range all {
		if err := s.connect(w, all[(i+1)%len(all)]); err != nil {
			return nil, err
		}
	}
	orders := map[*worker]order{}
	for _, w := range all {
		orders[w] = order{Do: doBoth, Size: size, Depth: 16, Duration: 10 * r.Duration, Tag: 1}
	}
	replies, err := together(orders)
	for _, reply := range replies {
		rates = append(rates, reply.GBs)
	}
	return rates, err
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
		lane topo.Lane
		list *[]*worker
	}{{lanes[0], &senders}, {lanes[1], &receivers}} {
		for i := range clients {
			var beside *worker
			if one && i > 0 {
				beside = (*side.list)[0]
			}
			w, err := s.attached(side.lane, beside, size)
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
	name, err := r.baseline(measure.Job{Kind: BaselineRaw, From: senders[0].gpu.BusID, To: receivers[0].gpu.BusID, Issuer: senders[0].gpu.BusID, Size: size})
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
	row := Row{Table: "many-clients", What: what + ", together", Route: direct, Transport: transportOf(direct), Size: size, Depth: 16, Value: total(rates), Unit: GBs, Baseline: name, Asked: least(0.95)}
	r.row(row)
	row.What, row.Value, row.Unit, row.Baseline, row.Asked = what+", Jain's index", jain(rates), Index, "", least(0.99)
	r.row(row)
	return nil
}

func (r *run) cpu() error {
	const size = 16 << 20
	for _, route := range r.Routes {
		s, a, b, err := r.pair(route, size)
		if err == nil {
			err = r.cpuOf(a, b, route, size)
			err = errors.Join(err, s.close())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *run) cpuOf(a, b *worker, route string, size uint64) error {
	pid, err := r.relayOf(a)
	if err != nil {
		return err
	}
	// While it does nothing, and then at full rate.
	r.progress("processor time, route %s", route)
	settle, idle := 2*time.Second, 10*time.Second
	if r.host.Simulated {
		settle, idle = r.Duration, r.Duration
	}
	time.Sleep(settle) // its last spin, and what its runtime puts in order after work
	before, threads, err := processorTime(pid)
	if err != nil {
		return err
	}
	time.Sleep(idle)
	after, later, err := processorTime(pid)
	if err != nil {
		return err
	}
	row := Row{Table: "cpu", Route: route, Transport: transportOf(route), Unit: Milliseconds, Note: busiest(threads, later, time.Minute.Seconds()/idle.Seconds())}
	row.What, row.Value, row.Asked = "idle, with clients and connections, in 60 s", float64((after-before).Microseconds())/1e3*time.Minute.Seconds()/idle.Seconds(), most(10)
	r.row(row)
	started := time.Now()
	before = after
	found, err := r.stream(a, b, size, 16)
	if err != nil {
		return err
	}
	if after, _, err = processorTime(pid); err != nil {
		return err
	}
	row.What, row.Value, row.Unit, row.Asked = "the sender's relay at full rate", (after-before).Seconds()/time.Since(started).Seconds(), Cores, most(1)
	row.Size, row.Depth, row.Note = size, 16, fmt.Sprintf("at %.1f GB/s", found.GBs)
	r.row(row)
	return nil
}

func (r *run) relayOf(w *worker) (int, error) {
	info, err := hook.Inspect(r.host.Layout, w.generation.ID)
	if err != nil {
		return 0, err
	}
	for _, p := range info.Processes {
		if p.Role == "relay" {
			return p.PID, nil
		}
	}
	return 0, fmt.Errorf("client %s has no relay that runs", w.name)
}

// busiest says which threads of a process had the most time, times a factor.
func busiest(before, after map[string]time.Duration, factor float64) string {
	var names []string
	for name := range after {
		if after[name] > before[name] {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, func(a, b string) int { return int(after[b] - before[b] - after[a] + before[a]) })
	text := ""
	for _, name := range names[:min(len(names), 3)] {
		text += fmt.Sprintf(", %s %.2f ms", name, factor*float64((after[name]-before[name]).Microseconds())/1e3)
	}
	return strings.TrimPrefix(text, ", ")
}

// processorTime is what a process's threads have had, /proc/PID/task/*/schedstat,
// and how much those of each name.
func processorTime(pid int) (sum time.Duration, byName map[string]time.Duration, err error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(files) == 0 {
		return 0, nil, fmt.Errorf("process %d has no /proc/PID/task/*/schedstat: %w", pid, errors.Join(err, os.ErrNotExist))
	}
	byName = map[string]time.Duration{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue // a thread that has ended
		}
		f := strings.Fields(string(text))
		if err != nil || len(f) == 0 {
			return 0, nil, fmt.Errorf("%s: %q: %w", file, text, err)
		}
		n, err := strconv.ParseInt(f[0], 10, 64)
		if err != nil {
			return 0, nil, fmt.Errorf("%s: %w", file, err)
		}
		sum += time.Duration(n)
		name, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "comm")) // it may end now
		byName[strings.TrimSpace(string(name))] += time.Duration(n)
	}
	return sum, byName, nil
}

func (r *run) firstCopy() error {
	for _, route := range r.Routes {
		if err := r.first(route); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) first(route string) (err error) {
	r.progress("first message, route %s", route)
	s, err := r.stage(route, r.lanes, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	lanes, err := r.host.TwoClients()
	if err != nil {
		return err
	}
	if route == staged {
		// An emulated NIC makes its contexts for the first connection; a NIC has none.
		if err := r.wake(s, lanes); err != nil {
			return err
		}
	}
	var pair [2]*worker
	var attached [2]reply
	for i, lane := range lanes {
		w, err := s.client(lane, nil)
		if err != nil {
			return err
		}
		pair[i] = w
		if attached[i], err = w.do(order{Do: doAttach, Socket: r.host.Socket(w.generation), Bytes: 2 << 20}); err != nil {
			return err
		}
	}
	start := time.Now()
	for i, w := range pair {
		if err := s.connect(w, pair[1-i]); err != nil {
			return err
		}
	}
	if _, err := together(map[*worker]order{pair[0]: {Do: doFirst, Tag: 1}, pair[1]: {Do: doFirst, Tag: 1}}); err != nil {
		return err
	}
	ours := attached[0].Ours + time.Since(start)
	name := fmt.Sprintf("CUDA's own start in the client, for route %s", route)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }
	r.report.Baselines = append(r.report.Baselines, Baseline{Name: name, Value: ms(attached[0].CUDA), Unit: Milliseconds})
	row := Row{Table: "first-copy", Route: route, Transport: transportOf(route), Size: 8, Depth: 1, Unit: Milliseconds}
	row.What, row.Value, row.Baseline = "attach, connect and first message, relay's context included", ms(ours), name
	r.row(row)
	row.What, row.Value, row.Baseline, row.Asked = "the same less one start of CUDA", max(0, ms(ours-attached[0].CUDA)), "", most(60)
	r.row(row)
	return nil
}

// wake has clients that come and go use the emulated NICs.
func (r *run) wake(s *stage, lanes [2]topo.Lane) error {
	var pair [2]*worker
	for i, lane := range lanes {
		var err error
		if pair[i], err = s.attached(lane, nil, 2<<20); err != nil {
			return err
		}
	}
	for i, w := range pair {
		if err := s.connect(w, pair[1-i]); err != nil {
			return err
		}
	}
	return s.end()
}
