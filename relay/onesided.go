package relay

import (
	"time"

	"github.com/peerlane/peerlane/relay/wire"
)

// One-sided operations: the client of a sender reads and writes regions of the receiver's client
// (exposedRegion), and the relays need no help of that client: the remote client may be stopped.
//
// A write is a message like a send's, PeerWrite, for which the receiver's relay posts the receive
// itself. A read travels in the reverse direction: the two relays open a second connection, from
// the receiver to the sender, which no client knows of (reverse.go), the receiver's relay posts the
// send there, and the reading client's operation is the receive. So the rules of sends apply: the
// granting side has room and drains the slots, and no operation ends before the last access to its
// memory.

// reading has a sender's state of its client's reads.
type reading struct {
	last uint64
	// asked are the reads before the first byte, by number.
	asked map[uint64]*operation
	back  *reverseConnection // nil until a read needs it
	// again is when the next may try to open it, of the loop's clock.
	again time.Duration
}

// --- the side that reads and writes -------------------------------------------------

// write announces a one-sided write, numbered as a message.
func (s *sender) write(op *operation) {
	key := op.remote
	s.port.Send(&wire.PeerWrite{Send: op.send, Length: op.length, Offset: key.offset, Key: key.key}, 0)
}

// read requests the bytes of a one-sided read.
func (s *sender) read(op *operation) {
	if s.ask(op) {
		s.port.Send(&wire.PeerRead{Read: op.send, Length: op.length, Offset: op.remote.offset, Key: op.remote.key}, 0)
	}
}

// ask numbers a read, and requests the reverse connection. It reports false if there is none: then
// the read has ended.
func (s *sender) ask(op *operation) bool {
	if s.reading.back == nil && s.session.relay.loop.Now() < s.reading.again {
		op.finish(wire.StatusNoReverseConnection)
		return false
	}
	s.reading.last++
	op.send = s.reading.last
	if s.reading.asked == nil {
		s.reading.asked = map[uint64]*operation{}
	}
	s.reading.asked[op.send] = op
	if s.reading.back == nil {
		if err := s.openReverse(); err != nil {
			s.failReads(err)
			return false
		}
	}
	return true
}

// cancelRead ends a read before the first byte. The remote side's answer ends the read, so that the
// number of waiting reads stays within a client's limit.
func (s *sender) cancelRead(cookie uint64) {
	for _, op := range s.reading.asked {
		if op.cookie == cookie {
			op.apply(operationCancel, wire.StatusOK)
		}
	}
}

// readRefused handles the remote side's refusal of a read.
func (s *sender) readRefused(m *wire.PeerReadRefused) error {
	op := s.reading.asked[m.Read]
	if op == nil || m.Status == uint32(wire.StatusOK) {
		return wire.Errorf(wire.StatusMalformed, "the relay of %s refused read %d with status %d", s.peer, m.Read, m.Status)
	}
	delete(s.reading.asked, m.Read)
	op.finish(wire.Status(m.Status))
	return nil
}

// readData is the first that comes of a read, on the way back: a message that meets the
// read's operation and no other.
func (r *receiver) readData(m *wire.PeerReadData) error {
	var op *operation
	if r.reader != nil {
		op = r.reader.reading.asked[m.Read]
	}
	switch {
	case r.isDown():
		return nil // its reads have ended
	case op == nil || m.Length != op.length:
		return wire.Errorf(wire.StatusMalformed, "the relay of %s brings %d bytes of read %d, which were not asked for",
			r.peer, m.Length, m.Read)
	case m.Send != r.announced+1:
		return wire.Errorf(wire.StatusMalformed, "the relay of %s announced message %d after message %d", r.peer, m.Send,
			r.announced)
	}
	r.announced++
	delete(r.reader.reading.asked, m.Read)
	a := &arrival{send: m.Send, length: m.Length}
	if op.state == operationWithdrawn {
		op.finish(wire.StatusCanceled)
		r.refuse(a, wire.StatusCanceled)
		return nil
	}
	if op.pieces == nil && op.memory.kind == wire.MemoryIPC && r.route == wire.RouteDirect { // as with receives
		op.finish(wire.StatusNotPermitted)
		r.refuse(a, wire.StatusNotPermitted)
		return nil
	}
	r.begin(a, op)
	return nil
}

// --- the side whose memory it is ----------------------------------------------------

// maxServing limits the operations of a connection's remote side here: the capacity of the client's
// ring, and as many reads that have ended there, because the messages about these ends follow later
// posts of the client.
const maxServing = 2 * wire.RingEntries

// crowded returns the error of a remote relay with more concurrent requests than a client can post.
func (r *receiver) crowded(waiting int) error {
	if r.serving+waiting < maxServing {
		return nil
	}
	return wire.Errorf(wire.StatusLimit, "%s has more than %d reads and writes under way, which is the limit", r.peer,
		maxServing)
}

// put handles a write of the remote client: the message matches no posted receive.
func (r *receiver) put(m *wire.PeerWrite) error {
	switch {
	case r.isDown():
		return nil
	case m.Send != r.announced+1:
		return wire.Errorf(wire.StatusMalformed, "the relay of %s announced message %d after message %d", r.peer, m.Send,
			r.announced)
	}
	if err := r.crowded(0); err != nil {
		return err
	}
	r.announced++
	a := &arrival{send: m.Send, length: m.Length}
	op, status := r.serve(wire.OpReceive, m.Key, m.Offset, m.Length)
	if status != wire.StatusOK {
		r.refuse(a, status)
		return nil
	}
	r.begin(a, op)
	return nil
}

// get handles a read of the remote client.
func (r *receiver) get(m *wire.PeerRead) error {
	w := r.back
	switch {
	case r.isDown(), w == nil:
		return nil // it has been told that there is no way back
	case w.sender == nil:
		if err := r.crowded(len(w.waiting)); err != nil {
			return err
		}
		w.waiting = append(w.waiting, waitingRead{read: m})
		return nil
	}
	if err := r.crowded(0); err != nil {
		return err
	}
	r.bring(m, w.sender)
	return nil
}

// bring sends the bytes of a read.
func (r *receiver) bring(m *wire.PeerRead, by *sender) {
	op, status := r.serve(wire.OpSend, m.Key, m.Offset, m.Length)
	if status != wire.StatusOK {
		r.port.Send(&wire.PeerReadRefused{Read: m.Read, Status: uint32(status)}, 0)
		return
	}
	by.enlist(op)
	by.port.Send(&wire.PeerReadData{Send: op.send, Read: m.Read, Length: op.length}, 0)
}
