package relay

import (
	"math"

	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// The side whose memory lists read and write, and the grants of lists on route direct.

// maxServedParts limits the parts of a connection in work at this side: the remote side's parts in
// flight, and the same number of parts that have ended there (maxServing has the reason).
const maxServedParts = 2 * wire.PartsAtOnce

// rangeBytes approximates the relay's memory per range of a part.
const rangeBytes = 128

// servedPart is a part of a list that the owner's relay serves, with the regions held until the
// part's end.
type servedPart struct {
	receiver *receiver
	offers   []*exposedRegion // once for each run of ranges of one key
	bytes    uint64           // of the relay's account
}

func (v *servedPart) over() {
	r := v.receiver
	r.serving--
	r.parts--
	r.session.relay.own.release(v.bytes)
	for _, o := range v.offers {
		o.users--
		o.memory.served--
	}
	for _, o := range v.offers {
		o.settle()
		o.memory.settle()
	}
}

// addRanges keeps ranges for the list message that will come.
func (r *receiver) addRanges(m *wire.PeerRanges) error {
	if r.isDown() {
		return nil
	}
	if m.Count == 0 || m.Count > wire.MessageRanges || len(r.ranges)+int(m.Count) > wire.PartEntries {
		return wire.Errorf(wire.StatusMalformed, "the relay of %s sent %d ranges after %d; a list message has at most %d",
			r.peer, m.Count, len(r.ranges), wire.PartEntries)
	}
	for _, at := range m.Range[:m.Count] {
		r.ranges = append(r.ranges, keyedRange{m.Key, at.At, at.Length})
	}
	return nil
}

// takeRanges returns the ranges of a list message, and checks the sum of the lengths.
func (r *receiver) takeRanges(count uint32, length uint64) ([]keyedRange, error) {
	ranges := r.ranges
	r.ranges = nil
	sum, fit := uint64(0), len(ranges) > 0 && uint32(len(ranges)) == count
	for _, at := range ranges {
		fit = fit && at.length > 0 && at.length <= math.MaxInt64-sum
		sum += at.length
	}
	if !fit || sum != length {
		return nil, wire.Errorf(wire.StatusMalformed,
			"the relay of %s sent a list message of %d bytes in %d ranges, and %d ranges before it", r.peer, length, count,
			len(ranges))
	}
	if r.parts >= maxServedParts {
		return nil, wire.Errorf(wire.StatusLimit, "%s has more than %d parts of lists under way, which is the limit",
			r.peer, maxServedParts)
	}
	return ranges, nil
}

// putList handles a part of a list that the remote client writes.
func (r *receiver) putList(m *wire.PeerWriteList) error {
	switch {
	case r.isDown():
		return nil
	case m.Send != r.announced+1:
		return wire.Errorf(wire.StatusMalformed, "the relay of %s announced message %d after message %d", r.peer, m.Send,
			r.announced)
	}
	ranges, err := r.takeRanges(m.Ranges, m.Length)
	if err != nil {
		return err
	}
	r.announced++
	op, position, status := r.serveList(wire.OpReceive, ranges, m.Length)
	if status != wire.StatusOK {
		r.port.Send(&wire.PeerListRefused{Number: m.Send, Position: position, Status: uint32(status)}, 0)
		return nil
	}
	r.begin(&arrival{send: m.Send, length: m.Length}, op)
	return nil
}

// getList handles a part of a list that the remote client reads.
func (r *receiver) getList(m *wire.PeerReadList) error {
	w := r.back
	if r.isDown() || w == nil {
		r.ranges = nil
		return nil // it has been told that there is no way back
	}
	ranges, err := r.takeRanges(m.Ranges, m.Length)
	if err != nil {
		return err
	}
	if w.sender != nil {
		r.bringList(m, ranges, w.sender)
		return nil
	}
	waiting := 0
	for _, other := range w.waiting {
		if other.list != nil {
			waiting++
		}
	}
	if r.parts+waiting >= maxServedParts {
		return wire.Errorf(wire.StatusLimit, "%s has more than %d parts of lists under way, which is the limit", r.peer,
			maxServedParts)
	}
	w.waiting = append(w.waiting, waitingRead{list: m, ranges: ranges})
	return nil
}

// bringList sends the bytes that a part of a list reads.
func (r *receiver) bringList(m *wire.PeerReadList, ranges []keyedRange, by *sender) {
	op, position, status := r.serveList(wire.OpSend, ranges, m.Length)
	if status != wire.StatusOK {
		r.port.Send(&wire.PeerListRefused{Number: m.Read, Position: position, Status: uint32(status), Reads: 1}, 0)
		return
	}
	by.enlist(op)
	by.port.Send(&wire.PeerReadData{Send: op.send, Read: m.Read, Length: op.length}, 0)
}

// serveList makes the operation that reads or writes ranges for the remote side: one check of the
// key per run of ranges. position is where the first refused byte is.
func (r *receiver) serveList(kind uint32, ranges []keyedRange,
	length uint64) (op *operation, position uint64, status wire.Status) {
	p := &pieces{list: make([]piece, 0, len(ranges))}
	v := &servedPart{receiver: r, bytes: uint64(len(ranges)) * rangeBytes}
	var o *exposedRegion
	for _, at := range ranges {
		if o == nil || o.key != at.key {
			if o, status = r.exposed(kind, at.key); status != wire.StatusOK {
				return nil, position, status
			}
			v.offers = append(v.offers, o)
		}
		if at.at > o.length || at.length > o.length-at.at {
			return nil, position + o.length - min(at.at, o.length), wire.StatusOutOfRange
		}
		p.add(o.memory, o.offset+at.at, at.length, position)
		position += at.length
	}
	if r.session.relay.own.take(v.bytes, r.session.relay.name()) != nil {
		return nil, 0, wire.StatusLimit
	}
	for _, o := range v.offers {
		p.hold(o.memory)
		o.memory.served++
		o.users++
	}
	r.serving++
	r.parts++
	p.serves = v
	return &operation{
		session: r.session, began: r.session.relay.loop.Now(), kind: kind, pieces: p, length: length,
		state: operationStarted, wait: wire.NoTimeline, signal: wire.NoTimeline,
	}, 0, wire.StatusOK
}

// --- grants on route direct ------------------------------------------------------------

// grantList lets the sender write straight into the pieces of a client's memory.
func (r *receiver) grantList(a *arrival) {
	all := a.op.pieces.list
	for i := range all {
		if i == 0 || all[i].memory != all[i-1].memory {
			if r.advertise(all[i].memory); r.isDown() {
				return
			}
		}
	}
	for len(all) > 0 {
		m := &wire.PeerGrantRanges{Region: all[0].memory.region()}
		for of := all[0].memory; len(all) > 0 && all[0].memory == of && m.Count < wire.MessageRanges; all = all[1:] {
			m.Range[m.Count] = wire.Range{At: of.offset + all[0].offset, Length: all[0].length}
			m.Count++
		}
		r.port.Send(m, 0)
	}
	a.op.underWay++
	r.grant(&grant{arrival: a, length: a.length}, wire.ListRegion, 0)
}

// grantedRange is a range of a region of the receiver.
type grantedRange struct {
	target            *target
	at, length, start uint64 // start is the place in the message
}

// listGrant is a grant of ranges.
type listGrant struct {
	grant  *wire.PeerGrant
	ranges []grantedRange
}

// targets calls f for the region of every run of ranges.
func (g *listGrant) targets(f func(*target)) {
	for i := range g.ranges {
		if i == 0 || g.ranges[i].target != g.ranges[i-1].target {
			f(g.ranges[i].target)
		}
	}
}

// ready reports whether the regions are mapped.
func (g *listGrant) ready() bool {
	ready := true
	g.targets(func(t *target) { ready = ready && t.state.ready() })
	return ready
}

// addGrantRanges keeps ranges for the grant that will come.
func (s *sender) addGrantRanges(m *wire.PeerGrantRanges) error {
	have, t := s.listing.ranges, s.targets[m.Region]
	if s.route != wire.RouteDirect || t == nil || t.state.revoked() || m.Count == 0 || m.Count > wire.MessageRanges ||
		len(have)+int(m.Count) > wire.PartEntries {
		return wire.Errorf(wire.StatusMalformed, "the relay of %s granted %d ranges of region %d after %d ranges", s.peer,
			m.Count, m.Region, len(have))
	}
	start := uint64(0)
	if n := len(have); n > 0 {
		start = have[n-1].start + have[n-1].length
	}
	for _, at := range m.Range[:m.Count] {
		if at.Length == 0 || at.At > t.bytes || at.Length > t.bytes-at.At || at.Length > math.MaxInt64-start {
			return wire.Errorf(wire.StatusMalformed,
				"the relay of %s granted %d bytes at %d of region %d, which has not as many", s.peer, at.Length, at.At, m.Region)
		}
		have = append(have, grantedRange{t, at.At, at.Length, start})
		start += at.Length
	}
	s.listing.ranges = have
	return nil
}

// grantedList is granted for the ranges that came before it.
func (s *sender) grantedList(m *wire.PeerGrant) error {
	g := &listGrant{grant: m, ranges: s.listing.ranges}
	s.listing.ranges = nil
	op := s.active[m.Send]
	n := len(g.ranges)
	retired := false
	g.targets(func(t *target) { retired = retired || t.state.revoked() })
	switch {
	case op == nil || op.pieces == nil:
		return wire.Errorf(wire.StatusMalformed,
			"the relay of %s granted ranges for message %d, which is not a list's that is sent", s.peer, m.Send)
	case m.Grant != s.granting+1 || m.Part != 0 || op.granted != 0 || m.Offset != 0:
		return wire.Errorf(wire.StatusMalformed, "the relay of %s gave grant %d of byte %d after grant %d up to byte %d",
			s.peer, m.Grant, m.Part, s.granting, op.granted)
	case s.open >= maxGrants:
		return wire.Errorf(wire.StatusLimit, "the relay of %s has %d grants open, which is the limit", s.peer, s.open)
	case n == 0 || retired || m.Length != op.length || g.ranges[n-1].start+g.ranges[n-1].length != op.length:
		return wire.Errorf(wire.StatusMalformed,
			"the relay of %s granted %d bytes in %d ranges of a list message of %d bytes", s.peer, m.Length, n, op.length)
	}
	s.granting++
	s.stalled(noGrant, op.began)
	op.granted = op.length
	g.targets(func(t *target) { t.granted++ })
	s.open++
	if !g.ready() {
		s.listing.pending = append(s.listing.pending, g)
		return nil
	}
	s.fillList(g)
	return nil
}

// fillLists fills the grants whose regions have become ready.
func (s *sender) fillLists() {
	pending := s.listing.pending
	s.listing.pending = nil
	for _, g := range pending {
		switch {
		case s.isDown():
		case g.ready():
			s.fillList(g)
		default:
			s.listing.pending = append(s.listing.pending, g)
		}
	}
}

// usedList ends a grant of ranges.
func (s *sender) usedList(g *listGrant) {
	s.open--
	g.targets(func(t *target) { t.granted-- })
	g.targets(s.settleTarget)
}

// fillList copies the pieces of a message into the ranges of its grant.
func (s *sender) fillList(g *listGrant) {
	op := s.active[g.grant.Send]
	if op == nil { // refused by the receiver meanwhile
		s.usedList(g)
		return
	}
	r := s.session.relay
	s.hold(op)
	s.link.(transport.ListLink).WriteList(between(op.pieces.list, g.ranges), g.grant.Grant, func(err error) {
		if err != nil {
			s.broken(err, "copying to "+s.peer)
		} else {
			r.counters.sent += op.length
			r.counters.direct += op.length
			op.moved = op.length
			if !s.isDown() {
				s.port.Send(&wire.PeerWritten{Grant: g.grant.Grant}, 0)
			}
		}
		s.usedList(g)
		s.unhold(op)
	})
}

// between returns the copies from the pieces of a message to the ranges: as few as both allow.
func between(from []piece, to []grantedRange) []transport.Copy {
	all := make([]transport.Copy, 0, max(len(from), len(to)))
	for i, k, at := 0, 0, uint64(0); i < len(from) && k < len(to); {
		p, t := &from[i], &to[k]
		end := min(p.start+p.length, t.start+t.length)
		all = append(all, transport.Copy{
			To:   transport.Target{Region: t.target.region, Offset: t.at + at - t.start},
			From: p.memory.place(p.offset + at - p.start), Bytes: end - at,
		})
		at = end
		if at == p.start+p.length {
			i++
		}
		if at == t.start+t.length {
			k++
		}
	}
	return all
}
