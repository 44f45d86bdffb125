package relay

import (
	"slices"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/transport/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// receiver is a connection's receiving end. A receiver grants room only for an announced message
// with a posted receive, so that every granted slot will be filled and drained without a further
// action of a client.
type receiver struct {
	*connection
	announced uint64 // the last message's number. Messages and receives of a tag match in order; of those that wait no two
	// have the same tag.
	arrivals []*arrival   // announced
	receives []*operation // started
	matched  map[uint64]*arrival
	// unended are the matched receives, in the order of their matches.
	unended   []*unended
	grants    map[uint64]*grant
	lastGrant uint64

	// Route staged: the sender's writes. The end means that no further bytes arrive in a slot of
	// this connection.
	writes       transport.Arrivals
	immediateEnd bool
	// windows are the windows of short messages between relays of a host.
	windows transport.Arrivals

	eager *eagerIn // nil where the sender has no quota

	// back is the reverse connection for reads of regions, nil before the request; reader is whose
	// way back this connection is, nil for none.
	back   *reverseConnection
	reader *sender

	// ranges are the ranges of the next list message, parts the list parts in flight.
	ranges []keyedRange
	parts  int

	// Of grants in place: how many there are, and the messages that get more when there
	// are fewer.
	inPlaces uint64
	piecing  []*arrival
}

// arrival is a message of the sender.
type arrival struct {
	send, tag, length uint64
	op                *operation // nil until matched
	unended           *unended
	granted, moved    uint64
	// Of a short one that comes into a window: which, and what it is to be answered when
	// its bytes are there, if it is refused.
	eager  *eagerWindow
	window int
	answer wire.Status
	// short are the bytes of a local message without a grant.
	short []byte
}

// unended is a receive whose end is reported after the ends of those before it: over RDMA the bytes of
// a later message can be there first, and a client may have one timeline for all receives.
type unended struct {
	op     *operation
	ended  bool
	status wire.Status
}

// grant is room for a part of a message.
type grant struct {
	arrival      *arrival
	part, length uint64
	slot         *slot  // route staged
	filled       uint64 // of the slot, as the NIC says
}

func newReceiver(c *connection) *receiver {
	r := &receiver{connection: c, matched: map[uint64]*arrival{}, grants: map[uint64]*grant{}}
	c.side = r
	return r
}

func (r *receiver) start(op *operation) {
	for i, a := range r.arrivals {
		if a.tag == op.tag {
			r.arrivals = append(r.arrivals[:i:i], r.arrivals[i+1:]...)
			r.begin(a, op)
			return
		}
	}
	r.receives = append(r.receives, op)
}

func (r *receiver) cancel(cookie uint64) {
	for i, op := range r.receives {
		if op.cookie == cookie {
			r.receives = append(r.receives[:i:i], r.receives[i+1:]...)
			op.finish(wire.StatusCanceled)
			return
		}
	}
}

func (r *receiver) message(m wire.Message, _ []int) error {
	switch m := m.(type) {
	case *wire.PeerEager:
		return r.announcedEager(m)
	case *wire.PeerSend:
		return r.announce(&arrival{send: m.Send, tag: m.Tag, length: m.Length})
	case *wire.PeerWithdraw:
		for i, a := range r.arrivals {
			if a.send == m.Send {
				r.arrivals = append(r.arrivals[:i:i], r.arrivals[i+1:]...)
				r.refuse(a, wire.StatusCanceled)
				break
			}
		}
		return nil
	case *wire.PeerWritten:
		return r.written(m.Grant)
	case *wire.PeerWrite:
		return r.put(m)
	case *wire.PeerRead:
		return r.get(m)
	case *wire.PeerReadData:
		return r.readData(m)
	case *wire.PeerBack:
		return r.openReverseFor(m)
	case *wire.PeerRanges:
		return r.addRanges(m)
	case *wire.PeerWriteList:
		return r.putList(m)
	case *wire.PeerReadList:
		return r.getList(m)
	}
	return wire.Errorf(wire.StatusMalformed, "the relay of %s sent a %T to a receiver", r.peer, m)
}

// announce takes a message that the sender has.
func (r *receiver) announce(a *arrival) error {
	if len(r.arrivals) >= wire.RingEntries {
		return wire.Errorf(wire.StatusLimit, "%s announced more than %d messages that nobody receives", r.peer,
			wire.RingEntries)
	}
	if a.send != r.announced+1 {
		return wire.Errorf(wire.StatusMalformed, "the relay of %s announced message %d after message %d", r.peer, a.send,
			r.announced)
	}
	r.announced++
	if a.eager != nil {
		a.eager.arrival = a
	}
	if op := r.takeReceive(a.tag); op != nil {
		r.begin(a, op)
	} else {
		r.arrivals = append(r.arrivals, a)
	}
	return nil
}

func (r *receiver) takeReceive(tag uint64) *operation {
	for i, op := range r.receives {
		if op.tag == tag {
			r.receives = append(r.receives[:i:i], r.receives[i+1:]...)
			return op
		}
	}
	return nil
}

func (r *receiver) begin(a *arrival, op *operation) {
	a.unended = &unended{op: op}
	r.unended = append(r.unended, a.unended)
	switch {
	case a.length > op.length:
		r.end(a, wire.StatusTruncated)
		r.refuse(a, wire.StatusTruncated)
		return
	case a.length == 0:
		r.end(a, wire.StatusOK)
		r.port.Send(&wire.PeerDelivered{Send: a.send}, 0)
		return
	}
	a.op = op
	r.matched[a.send] = a
	switch {
	case a.eager != nil:
		r.settleEager(a)
	case a.short != nil && r.takeEagerLocal(a):
	case r.route == wire.RouteDirect && op.pieces != nil:
		r.grantList(a)
	case r.route == wire.RouteDirect:
		r.grantMemory(a)
	case op.pieces == nil && r.inReach(op.memory):
		r.advertise(a.op.memory)
		r.piecing = append(r.piecing, a)
		r.grantPieces()
	default:
		r.grantSlots(a)
	}
}

// grantMemory lets the sender write straight into the client's memory.
func (r *receiver) grantMemory(a *arrival) {
	m := a.op.memory
	r.advertise(m)
	// The sender may write until it reports the end, or is gone.
	a.op.underWay++
	r.grant(&grant{arrival: a, length: a.length}, m.region(), m.offset+a.op.offset)
}

// advertise announces a memory to the sender, once.
func (r *receiver) advertise(m *memory) {
	if m.registrars[r] {
		return
	}
	m.registrars[r] = true
	at := m.mapped
	if r.transport == launch.TransportVerbs {
		at = r.near(m)
	}
	region := &wire.PeerRegion{Region: m.region(), Kind: m.kind, Bytes: at.Bytes}
	if m.staged != nil {
		region.GPU = m.staged.on.id
	}
	if r.writes != nil {
		r.weigh(m.region(), r.nicsFor(m))
		if err := r.writes.AddMemory(m.region(), at); err != nil {
			r.shutdown(wire.Errorf(wire.StatusInternal, "%s: %v", r.session.relay.name(), err))
			return
		}
	}
	if r.remote() {
		region.Kind = wire.MemoryRemote
		r.port.Send(region, 0)
		return
	}
	if m.kind == wire.MemoryParts {
		for _, p := range m.parts {
			r.port.Send(&wire.PeerRegionPart{Region: m.region(), Bytes: p.Bytes}, 0, p.FD)
		}
		r.port.Send(region, 0)
		return
	}
	r.port.Send(region, 0, m.parts[0].FD)
}

// weigh tells the sender the shares of this side's NICs in writes to a region.
func (r *receiver) weigh(region uint32, nics map[string]int) {
	if arrivals, is := r.writes.(*verbs.Arrivals); is {
		arrivals.Weigh(region, nics)
	}
}

// forget takes a memory back: no further grant uses the memory.
func (r *receiver) forget(m *memory) {
	if r.writes != nil {
		r.writes.RemoveMemory(m.region())
	}
	r.port.Send(&wire.PeerForget{Region: m.region()}, 0)
}

// grantPieces lets the sender's NIC, or over TCP this relay, write directly into the client's
// memory, on a server GPU, a near GPU or the host: at most the size of the slots at a time, for the
// messages of the connection in turn, in pieces of a slot's size, so that a sender with slots can
// fill a piece. Pieces of a lane's staged members go through slots.
func (r *receiver) grantPieces() {
	most, piece := uint64(0), r.atOnce(r.in.regions[0].slotBytes)
	for _, g := range r.in.regions {
		most += uint64(g.slots)
	}
	for len(r.piecing) > 0 && r.inPlaces < most && !r.isDown() {
		a := r.piecing[0]
		if r.throughSlots(a.op.memory) {
			r.piecing = r.piecing[1:]
			r.grantSlot(a, func() { r.piecing = slices.Insert(r.piecing, 0, a); r.grantPieces() })
			continue
		}
		g := &grant{arrival: a, part: a.granted, length: min(piece, a.length-a.granted)}
		if a.granted += g.length; a.granted == a.length {
			r.piecing = r.piecing[1:]
		}
		r.inPlaces++
		a.op.underWay++
		r.grant(g, a.op.memory.region(), a.op.offset+g.part)
	}
}

// grantSlots grants slots in sequence, alternating with further messages.
func (r *receiver) grantSlots(a *arrival) { r.grantSlot(a, func() { r.grantSlots(a) }) }

// grantSlot grants a slot, and calls more if bytes of the message remain.
func (r *receiver) grantSlot(a *arrival, more func()) {
	r.in.acquire(r.connection, func(slot *slot) bool {
		if r.isDown() {
			return false
		}
		length := r.atOnce(min(slot.region.slotBytes, a.length-a.granted))
		r.grant(&grant{arrival: a, part: a.granted, length: length, slot: slot}, slot.region.number, slot.offset)
		a.granted += length
		if a.granted < a.length {
			more()
		}
		return true
	})
}

// atOnce is the part of a grant that the sender fills with a single write.
func (r *receiver) atOnce(n uint64) uint64 {
	if a, is := r.writes.(*verbs.Arrivals); is {
		return min(n, a.Most())
	}
	return n
}

func (r *receiver) grant(g *grant, region uint32, offset uint64) {
	r.lastGrant++
	r.grants[r.lastGrant] = g
	if r.writes != nil {
		if err := r.writes.Grant(r.lastGrant, region, offset, g.length); err != nil {
			r.shutdown(wire.Errorf(wire.StatusInternal, "%s: %v", r.session.relay.name(), err))
			return
		}
	}
	r.port.Send(&wire.PeerGrant{
		Send: g.arrival.send, Grant: r.lastGrant, Part: g.part, Length: g.length, Offset: offset, Region: region,
	}, 0)
}

// written is the end of a direct copy.
func (r *receiver) written(number uint64) error {
	g := r.grants[number]
	if g == nil || r.route != wire.RouteDirect {
		return wire.Errorf(wire.StatusMalformed, "the relay of %s filled grant %d, which it does not have", r.peer, number)
	}
	delete(r.grants, number)
	r.session.relay.counters.direct += g.length
	r.inPlace(g)
	return nil
}

// inPlace is the end of a write straight into the client's memory.
func (r *receiver) inPlace(g *grant) {
	op := g.arrival.op
	op.underWay--
	if op.pieces == nil {
		if r.countInPlace(op, g.length); op.memory.staged != nil {
			op.memory.staged.on.in += g.length
		}
	}
	r.arrived(g.arrival, g.length)
	op.settle()
}

// immediate says that the NIC has written so much of a grant: all of it, unless
// the sender's slots are smaller than ours.
func (r *receiver) immediate(number, length uint64) {
	if number&eagerGrant != 0 && r.remote() {
		r.arrivedEager(number&^eagerGrant, length)
		return
	}
	g := r.grants[number]
	if g == nil || r.route != wire.RouteStaged || length == 0 || length > g.length-g.filled {
		r.shutdown(wire.Errorf(wire.StatusMalformed, "the NIC of %s filled grant %d with %d bytes, which was not granted",
			r.peer, number, length))
		return
	}
	if g.filled += length; g.filled < g.length {
		return
	}
	length = g.length
	delete(r.grants, number)
	if g.slot == nil {
		r.session.relay.counters.staged += length
		r.inPlaces--
		r.inPlace(g)
		r.grantPieces()
		r.settle()
		return
	}
	if r.isDown() {
		r.in.release(g.slot)
		r.settle()
		return
	}
	g.slot.region.in += length
	op := g.arrival.op
	op.underWay++
	op.copyIn(r.lane.pull.take(), g.slot.place(), g.part, length, func(err error) {
		if err == nil {
			g.slot.region.out += length
			r.session.relay.counters.staged += length
		}
		r.in.release(g.slot)
		op.underWay--
		if err != nil {
			r.session.relay.failed(err)
			r.shutdown(wire.Errorf(wire.StatusCUDA, "%s: copying out of a staging slot failed: %v", r.session.relay.name(), err))
		} else {
			r.arrived(g.arrival, g.length)
		}
		op.settle()
		r.settle()
	})
}

// arrived counts bytes that are in the client's memory.
func (r *receiver) arrived(a *arrival, n uint64) {
	a.moved += n
	a.op.moved += n
	r.session.relay.counters.received += n
	if a.moved < a.length || r.isDown() {
		return
	}
	delete(r.matched, a.send)
	r.end(a, wire.StatusOK)
	delivered := &wire.PeerDelivered{Send: a.send}
	if port, can := r.port.(laterSender); can && len(r.matched) >= manyMatched {
		port.SendLater(delivered, 0)
	} else {
		r.port.Send(delivered, 0)
	}
}

// manyMatched is how many other messages are on their way at least when a sender is told of the end of
// one together with the next grant: a write to the control connection takes as long as a copy of 64 KiB,
// and a sender with so many messages under way does not wait for the end of the first.
const manyMatched = 4

// laterSender is a port that can send a message with the next one. transport/tcp's channels are.
type laterSender interface {
	SendLater(m wire.Message, sequence uint32)
}

// end ends the receive of a message after the earlier receives.
func (r *receiver) end(a *arrival, status wire.Status) {
	a.unended.ended, a.unended.status = true, status
	for len(r.unended) > 0 && (r.unended[0].ended || r.unended[0].op.state == operationEnded) {
		first := r.unended[0]
		r.unended[0] = nil
		r.unended = r.unended[1:]
		first.op.finish(first.status)
	}
}

func (r *receiver) stop(why *wire.Error) {
	for _, op := range r.receives {
		op.finish(why.Status)
	}
	r.receives, r.arrivals = nil, nil
	for _, a := range r.matched {
		a.op.apply(operationDown, why.Status)
	}
	for _, u := range r.unended {
		if u.ended { // its bytes are there
			u.op.finish(u.status)
		}
	}
	r.unended = nil
}

// landingsEnded is the transport's word that no byte comes from another host any more.
func (r *receiver) landingsEnded() {
	r.immediateEnd = true
	r.settle()
}

// drained: the sender and its NIC have closed their ends, which they do after the last write.
func (r *receiver) drained() bool {
	if r.portOpen() || r.route == wire.RouteStaged && !r.immediateEnd {
		return false
	}
	for number, g := range r.grants {
		delete(r.grants, number)
		if g.slot != nil {
			r.in.release(g.slot)
			continue
		}
		g.arrival.op.underWay--
		g.arrival.op.settle()
	}
	for _, a := range r.matched {
		if a.op.underWay > 0 {
			return false
		}
	}
	return true
}

func (r *receiver) free() {
	if r.writes != nil {
		r.writes.Close()
	}
	if r.eager != nil {
		r.eager.quotas.release(r.eager.at)
	}
	for _, m := range r.session.memories {
		delete(m.registrars, r)
	}
}
