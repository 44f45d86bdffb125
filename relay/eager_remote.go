package relay

import (
	"errors"
	"unsafe"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// Short messages to another host do not wait for a grant: a connection has a quota of windows
// there; the sender writes a message with the announcement into a window. The sender owns the
// window again when the receiver has delivered the message. A message without a free window waits
// for a grant, as a long message does.

const (
	// eagerBytes is how much a window holds: the payload that tcp.Peer sends with messages.
	eagerBytes = 4 << 10
	// eagerWindows is how many a connection has.
	eagerWindows = 8
	// eagerQuotas is the number of connections of a lane with a quota, per direction.
	eagerQuotas = 64
	quotaBytes  = eagerBytes * eagerWindows

	// eagerRegion is the number of a receiver's windows, beside those of slots and of
	// clients' memories.
	eagerRegion = 1 << 29
	// eagerGrant is set in the number of a window's grant, beside the window's.
	eagerGrant = 1 << 63
)

// eagerBuffers are a lane's buffers of a direction, in host memory. They belong to the loop.
type eagerBuffers struct {
	memory *region
	free   []uint64 // where each begins
}

func newEagerBuffers(g *region) *eagerBuffers {
	q := &eagerBuffers{memory: g}
	for i := range uint64(eagerQuotas) {
		q.free = append(q.free, i*quotaBytes)
	}
	return q
}

// take returns a quota for a connection, if one is left.
func (q *eagerBuffers) take() (at uint64, ok bool) {
	if q == nil || len(q.free) == 0 {
		return 0, false
	}
	at = q.free[len(q.free)-1]
	q.free = q.free[:len(q.free)-1]
	return at, true
}

func (q *eagerBuffers) release(at uint64) { q.free = append(q.free, at) }

// --- the sender's side ------------------------------------------------------------

// eagerOut has a sender's windows at the receiver, with a local buffer per window.
type eagerOut struct {
	quotas  *eagerBuffers
	at      uint64 // of the buffers
	target  transport.Target
	free    []int
	windows [eagerWindows]struct{ writing, answered bool } // of those in use
}

func (e *eagerOut) buffer(window int) device.Place {
	return e.quotas.memory.memory.At(e.at + uint64(window)*eagerBytes)
}

// takeQuota takes the receiver's quota.
func (s *sender) takeQuota(m *wire.PeerQuota) error {
	if s.eager != nil || !s.remote() || m.Windows != eagerWindows || m.Bytes != eagerBytes || m.Region != eagerRegion {
		return wire.Errorf(wire.StatusMalformed, "the relay of %s gave a quota of %d windows of %d bytes in region %d",
			s.peer, m.Windows, m.Bytes, m.Region)
	}
	at, ok := s.quotas[0].take()
	if !ok {
		return nil // others have all buffers
	}
	s.eager = &eagerOut{quotas: s.quotas[0], at: at, target: transport.Target{Region: m.Region, Offset: m.Offset}}
	for window := range eagerWindows {
		s.eager.free = append(s.eager.free, window)
	}
	return nil
}

// sendEager sends a short message at once, if there is a window.
func (s *sender) sendEager(op *operation) bool {
	e := s.eager
	if e == nil || op.length == 0 || op.length > eagerBytes || len(e.free) == 0 {
		return false
	}
	window := e.free[len(e.free)-1]
	e.free = e.free[:len(e.free)-1]
	w := &e.windows[window]
	w.writing, w.answered = true, false
	op.in, op.window, op.granted = remoteWindow, window, op.length
	s.port.Send(&wire.PeerEager{Send: op.send, Tag: op.tag, Length: op.length, Window: uint32(window)}, 0)
	s.hold(op)
	if op.memory.mapped.Host() { // short messages go over TCP, whatever NICs reach
		s.writeEager(op, window, op.memory.place(op.offset))
		return true
	}
	buffer := e.buffer(window)
	s.lane.push.take().Move(buffer, op.memory.place(op.offset), op.length, func(err error) {
		if err == nil && !s.isDown() {
			s.writeEager(op, window, buffer)
			return
		}
		if err != nil {
			s.broken(err, "copying a short message")
		}
		w.writing = false
		s.freeEager(window)
		s.unhold(op)
	})
	return true
}

// writeEager posts the write, whose operation is held.
func (s *sender) writeEager(op *operation, window int, from device.Place) {
	to := s.eager.target
	to.Offset += uint64(window) * eagerBytes
	r := s.session.relay
	s.eagerLink.Write(to, transport.Source{Place: from}, op.length, eagerGrant|uint64(window), func(err error) {
		if err != nil {
			s.broken(err, "sending a short message")
		} else {
			r.counters.sent += op.length
			r.counters.staged += op.length
			op.moved += op.length
		}
		s.eager.windows[window].writing = false
		s.freeEager(window)
		s.unhold(op)
	})
}

// answered frees a window after the receiver's answer.
func (s *sender) answered(window int) {
	s.eager.windows[window].answered = true
	s.freeEager(window)
}

// freeEager frees a window after both sides have finished.
func (s *sender) freeEager(window int) {
	if w := &s.eager.windows[window]; w.answered && !w.writing {
		w.answered = false
		s.eager.free = append(s.eager.free, window)
	}
}

// --- the receiver's side ------------------------------------------------------------

// eagerIn has the windows that a receiver gave its sender.
type eagerIn struct {
	quotas  *eagerBuffers
	at      uint64
	windows [eagerWindows]eagerWindow
}

// eagerWindow is the window of a message: announcement and bytes arrive in any order.
type eagerWindow struct {
	arrival *arrival // nil until it is announced
	arrived uint64   // bytes; 0 until they are there
}

// renewer is implemented by transports that can write into windows.
type renewer interface {
	// Renew grants a range again under the number of the earlier grant.
	Renew(immediate uint64, region uint32, offset, length uint64) error
}

// windowed returns the arrivals of short messages.
func (r *receiver) windowed() transport.Arrivals {
	if r.windows != nil {
		return r.windows
	}
	return r.writes
}

// offerQuota gives the sender a quota, if the lane has one left.
func (r *receiver) offerQuota() error {
	at, ok := r.quotas[1].take()
	if !ok {
		return nil
	}
	r.eager = &eagerIn{quotas: r.quotas[1], at: at}
	if err := r.windowed().AddMemory(eagerRegion, r.eager.quotas.memory.memory); err != nil {
		return err
	}
	for window := range uint64(eagerWindows) {
		if err := r.windowed().Grant(eagerGrant|window, eagerRegion, at+window*eagerBytes, eagerBytes); err != nil {
			return err
		}
	}
	r.port.Send(&wire.PeerQuota{Region: eagerRegion, Windows: eagerWindows, Bytes: eagerBytes, Offset: at}, 0)
	return nil
}

// announcedEager is a message whose bytes come, or have come, without a grant.
func (r *receiver) announcedEager(m *wire.PeerEager) error {
	if r.route == wire.RouteDirect {
		return r.announcedEagerLocal(m)
	}
	switch {
	case r.eager == nil || m.Window >= eagerWindows || m.Length == 0 || m.Length > eagerBytes:
		return wire.Errorf(wire.StatusMalformed, "the relay of %s sent %d bytes into window %d, which it was not given",
			r.peer, m.Length, m.Window)
	case r.eager.windows[m.Window].arrival != nil:
		return wire.Errorf(wire.StatusMalformed, "the relay of %s sent message %d into window %d, which has another",
			r.peer, m.Send, m.Window)
	}
	w := &r.eager.windows[m.Window]
	if w.arrived > 0 && w.arrived != m.Length {
		return wire.Errorf(wire.StatusMalformed, "the relay of %s wrote %d bytes of a message of %d", r.peer, w.arrived,
			m.Length)
	}
	a := &arrival{send: m.Send, tag: m.Tag, length: m.Length, eager: w, window: int(m.Window)}
	return r.announce(a)
}

// arrivedEager is a write into a window.
func (r *receiver) arrivedEager(window, length uint64) {
	if r.isDown() {
		return // and the window is not given again
	}
	if r.eager == nil || window >= eagerWindows || r.eager.windows[window].arrived > 0 || length == 0 ||
		r.eager.windows[window].arrival != nil && r.eager.windows[window].arrival.length != length {
		r.shutdown(wire.Errorf(wire.StatusMalformed,
			"the relay of %s wrote %d bytes into window %d, which is not what it had announced, or twice", r.peer, length,
			window))
		return
	}
	w := &r.eager.windows[window]
	w.arrived = length
	if a := w.arrival; a != nil {
		r.settleEager(a)
	}
}

// settleEager continues a message after its bytes have arrived: into the client's memory, or
// nowhere for a refused message.
func (r *receiver) settleEager(a *arrival) {
	switch {
	case a.eager.arrived == 0:
	case a.answer != wire.StatusOK:
		r.answerEager(a, a.answer)
	case a.op != nil:
		r.copyEager(a)
	}
}

func (r *receiver) copyEager(a *arrival) {
	op := a.op
	op.underWay++
	from := r.eager.quotas.memory.memory.At(r.eager.at + uint64(a.window)*eagerBytes)
	done := func(err error) {
		op.underWay--
		switch {
		case err != nil:
			r.session.relay.failed(err)
			r.shutdown(wire.Errorf(wire.StatusCUDA, "%s: copying a short message failed: %w", r.session.relay.name(), err))
		default:
			op.moved += a.length
			r.session.relay.counters.received += a.length
			r.session.relay.counters.staged += a.length
			if !r.isDown() {
				delete(r.matched, a.send)
				r.end(a, wire.StatusOK)
				r.answerEager(a, wire.StatusOK)
			}
		}
		op.settle()
		r.settle()
	}
	to := op.memory.place(op.offset)
	if op.memory.lane != nil && op.memory.lane.device != nil {
		if stored, err := op.memory.lane.device.Store(to, unsafe.Slice((*byte)(from.Host), a.length)); stored {
			done(err)
			return
		}
	}
	r.lane.pull.take().Move(to, from, a.length, done)
}

// answerEager returns the window, and then reports the message's status.
func (r *receiver) answerEager(a *arrival, status wire.Status) {
	err := errors.New("the transport has no windows")
	if writes, is := r.windowed().(renewer); is {
		err = writes.Renew(eagerGrant|uint64(a.window), eagerRegion, r.eager.at+uint64(a.window)*eagerBytes, eagerBytes)
	}
	if err != nil {
		r.shutdown(wire.Errorf(wire.StatusInternal, "%s: %v", r.session.relay.name(), err))
		return
	}
	*a.eager = eagerWindow{}
	r.port.Send(&wire.PeerDelivered{Send: a.send, Status: uint32(status)}, 0)
}

// refuse answers a message that is not received.
func (r *receiver) refuse(a *arrival, status wire.Status) {
	if a.eager == nil {
		r.port.Send(&wire.PeerDelivered{Send: a.send, Status: uint32(status)}, 0)
		return
	}
	a.answer = status
	r.settleEager(a)
}
