package relay

import (
	"math/bits"
	"slices"
	"strings"
	"time"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/registration"
	"github.com/peerlane/peerlane/relay/transport/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// figures count the operations of a connection, or of a lane per direction. The loop counts, with
// the loop's clock: no system call, no allocation.
type figures struct {
	operations, bytes, failed uint64 // that have ended
	inPlace                   uint64 // of the bytes, read or written where clients have them on a GPU
	inFlight                  int
	stalls                    [causes]stall
	latency                   histogram
}

// stall counts the waits of operations for a cause.
type stall struct {
	count uint64
	time  time.Duration
	// Of now, and set for a report alone.
	waiting int
	longest time.Duration
}

func (s *stall) wait(since time.Duration, now time.Duration) {
	s.waiting++
	s.longest = max(s.longest, now-since)
}

// cause is why an operation does not move.
type cause int

const (
	noGrant  cause = iota // the receiver has no receive posted, or no slot
	noSlot                // no staging slot is free here
	ringFull              // the client does not read its completions
	causes
)

var causeNames = [causes]string{launch.StallNoGrant, launch.StallNoSlot, launch.StallRingFull}

// A histogram has four buckets per power of two of nanoseconds, and ends at about a minute. The
// first and the last bucket have shorter and longer durations.
type histogram [buckets]uint64

const (
	firstPower = 7 // 128 ns
	lastPower  = 36
	parts      = 4 // of each power
	buckets    = (lastPower - firstPower) * parts
)

func (h *histogram) add(d time.Duration) {
	n := uint64(max(d, 1<<firstPower))
	power := bits.Len64(n) - 1
	part := int(n>>(power-2)) & (parts - 1)
	h[min((power-firstPower)*parts+part, buckets-1)]++
}

// bound is the least that falls into a bucket.
func bound(bucket int) time.Duration {
	power := bucket/parts + firstPower
	return time.Duration(uint64(parts+bucket%parts) << (power - 2))
}

// begun counts an operation that the connection has taken.
func (c *connection) begun() { c.figures.inFlight++ }

// over counts an ended operation.
func (c *connection) over(op *operation, status wire.Status) {
	f := &c.figures
	f.inFlight--
	if op.kind == wire.OpFlush {
		return // it moves nothing
	}
	f.operations++
	f.bytes += op.moved
	f.inPlace += op.inPlace
	if status != wire.StatusOK {
		f.failed++
		return
	}
	f.latency.add(c.session.relay.loop.Now() - op.began)
}

// stalled counts a wait that is over.
func (c *connection) stalled(why cause, since time.Duration) {
	s := &c.figures.stalls[why]
	s.count++
	s.time += c.session.relay.loop.Now() - since
}

// withWaits are the figures with the waits that are not over: otherwise a permanent stall would
// never count.
func (c *connection) withWaits() figures {
	f, s := c.figures, c.session
	now := s.relay.loop.Now()
	if s.fullSince > 0 {
		f.stalls[ringFull].wait(s.fullSince, now)
	}
	for _, w := range c.slots.wants {
		f.stalls[noSlot].wait(w.since, now)
	}
	if sends, is := c.side.(*sender); is {
		for _, op := range sends.active {
			if op.granted == 0 && !op.state.delivered() {
				f.stalls[noGrant].wait(op.began, now)
			}
		}
	}
	return f
}

// add adds a connection's figures to the lane's figures.
func (f *figures) add(other *figures) {
	f.operations += other.operations
	f.bytes += other.bytes
	f.failed += other.failed
	f.inPlace += other.inPlace
	f.inFlight += other.inFlight
	for i, s := range other.stalls {
		f.stalls[i].count += s.count
		f.stalls[i].time += s.time
		f.stalls[i].waiting += s.waiting
		f.stalls[i].longest = max(f.stalls[i].longest, s.longest)
	}
	for i, n := range other.latency {
		f.latency[i] += n
	}
}

// leave adds a connection's figures to the lane.
func (c *connection) leave() { c.lane.ended[c.sends()].add(&c.figures) }

// directions are a lane's figures, of senders (true) and of receivers.
type directions map[bool]*figures

func newDirections() directions { return directions{true: {}, false: {}} }

// report returns the figures for reports.
func (f *figures) report() launch.Figures {
	t := launch.Figures{Operations: f.operations, Bytes: f.bytes, Failed: f.failed, InPlace: f.inPlace,
		InFlight: f.inFlight}
	for i, s := range f.stalls {
		if s.count > 0 || s.waiting > 0 {
			t.Stalls = append(t.Stalls, launch.Stall{Cause: causeNames[i], Count: s.count, Time: s.time, Waiting: s.waiting,
				Longest: s.longest})
		}
	}
	for i, n := range f.latency {
		if n > 0 {
			t.Latency = append(t.Latency, launch.Bucket{From: bound(i), To: bound(i + 1), Count: n})
		}
	}
	return t
}

// maxReportedConnections limits the connections in a report, the connections with the most bytes
// first: the list must fit into a datagram beside the rest of the report.
const maxReportedConnections = 24

// live adds the figures to a report.
func (r *Relay) live(report *launch.Report) {
	report.At = r.loop.Now()
	of := map[*lane]directions{}
	for _, l := range r.lanes {
		of[l] = newDirections()
		for sends, ended := range l.ended {
			of[l][sends].add(ended)
		}
	}
	var all []launch.ConnectionFigures
	for _, s := range r.sessions {
		for _, c := range s.connections {
			f := c.withWaits()
			of[c.lane][c.sends()].add(&f)
			if c.hidden {
				continue // what it brings counts for its twin
			}
			told := launch.ConnectionFigures{
				PID: s.pid, Program: programNames[s.program], Number: c.number, GPU: c.lane.spec.GPU.BusID,
				Peer: c.peer, Sends: c.sends(),
				Route: routeName(c.route), Transport: c.transport, Path: c.path(), Slots: c.slots.held, Figures: f.report(),
			}
			if c.transport == launch.TransportTCP {
				_, told.Rails = c.overTCP()
				told.Registration = registrationTCP
			}
			if c.transport == launch.TransportVerbs {
				told.Registration, told.GDR = c.registered.text, c.registered.way != registration.Bounce
			}
			all = append(all, told)
		}
	}
	for _, l := range r.lanes {
		if sent, received := of[l][true], of[l][false]; sent.operations+received.operations > 0 ||
			sent.inFlight+received.inFlight > 0 {
			report.Lanes = append(report.Lanes, launch.LaneFigures{GPU: l.spec.GPU.BusID, Sent: sent.report(),
				Received: received.report()})
		}
	}
	slices.SortFunc(all, func(a, b launch.ConnectionFigures) int {
		switch {
		case a.Bytes != b.Bytes && a.Bytes > b.Bytes:
			return -1
		case a.Bytes != b.Bytes:
			return 1
		case a.PID != b.PID:
			return a.PID - b.PID
		}
		return int(a.Number) - int(b.Number)
	})
	shown := min(len(all), maxReportedConnections)
	report.Connections, report.MoreConnections = all[:shown], len(all)-shown
}

func routeName(route uint32) string {
	return map[uint32]string{wire.RouteStaged: launch.RouteStaged, wire.RouteDirect: launch.RouteDirect}[route]
}

// path is the way of a connection's messages, for the administrator.
func (c *connection) path() string {
	own := "GPU " + c.lane.spec.GPU.BusID
	slots := func(s *staging) string {
		var list []string
		for _, g := range s.regions {
			at := "host memory"
			if g.kind != wire.MemoryHost {
				at = "GPU " + g.gpu.BusID
			}
			list = append(list, at)
		}
		return strings.Join(slices.Compact(list), ", ")
	}
	steps := []string{own}
	switch c.transport {
	case launch.TransportLocal:
		steps = append(steps, "one copy")
	case launch.TransportVerbs:
		if c.registered != clientDMABuf {
			steps = append(steps, slots(map[bool]*staging{true: c.out, false: c.in}[c.sends()]))
		}
		steps = append(steps, c.transport+" by "+verbs.Of(c.remotePeer).Way(), c.remotePeer.Name())
	case launch.TransportTCP:
		steps, _ = c.overTCP()
		steps = steps[:len(steps)-1]
	}
	steps = append(steps, c.peer)
	if !c.sends() {
		slices.Reverse(steps)
	}
	return strings.Join(steps, " -> ")
}
