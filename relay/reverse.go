package relay

import (
	"context"
	"crypto/rand"
	"time"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/wire"
)

// A connection is unidirectional; the bytes of a one-sided read travel in the reverse direction.
// With the first read of a connection the receiver's relay connects to the sender's, as a sender
// does to a listener: the listener is one of this connection, whose token only that relay is told,
// and which serves once. The two connections are twins: they end together.

// reverseTimeout limits the remote relay's connect: that relay may have many connects to make.
const reverseTimeout = 4 * welcomeTimeout

// reverseConnection is the second connection, at either end, from the request on.
type reverseConnection struct {
	// At the reader: the listener, and the timer for the remote relay.
	listener *listener
	late     *time.Timer
	quota    quota // of the relay's use, until it is the connection's
	// Of whose memory it is: the sender once it is open, and what waits for it.
	sender  *sender
	waiting []waitingRead
}

// waitingRead is a read, or a part of a list, until the way back is open.
type waitingRead struct {
	read   *wire.PeerRead
	list   *wire.PeerReadList // nil of a read
	ranges []keyedRange
}

// --- the side that reads ------------------------------------------------------------

// openReverse asks for the way back.
func (s *sender) openReverse() error {
	r := s.session.relay
	generation, err := wire.ParseGPU(r.config.Generation)
	if err != nil {
		return err
	}
	l := &listener{session: s.session, lane: s.lane, forward: s}
	if _, err := rand.Read(l.token[:]); err != nil {
		return err
	}
	// Before it is asked for: a reverse connection that cannot be accepted takes its twin down.
	if n := len(s.session.connections); n >= wire.MaxConnections {
		return wire.Errorf(wire.StatusLimit, "%d connections are open, which is the limit", n)
	}
	if err := r.reserve(ofConnection); err != nil {
		return err
	}
	r.listeners[l.token] = l
	w := &reverseConnection{listener: l, quota: ofConnection}
	w.late = time.AfterFunc(reverseTimeout, func() {
		r.loop.Do(func() {
			if s.reading.back == w && r.listeners[l.token] == l {
				s.shutdown(wire.Errorf(wire.StatusUnreachable, "the relay of %s did not open the way back for a read within %v",
					s.peer, reverseTimeout))
			}
		})
	})
	s.reading.back = w
	s.port.Send(&wire.PeerBack{Token: l.token, Generation: generation}, 0)
	return nil
}

// close refuses further reverse connections.
func (w *reverseConnection) close() {
	if l := w.listener; l != nil && l.session.relay.listeners[l.token] == l {
		delete(l.session.relay.listeners, l.token)
	}
	if w.late != nil {
		w.late.Stop()
	}
	if w.listener != nil {
		w.listener.session.relay.release(w.quota)
		w.quota = quota{}
	}
}

// claim counts a connection that comes by a listener.
func (l *listener) claim() error {
	if l.forward == nil || !l.expects() {
		return l.session.relay.reserve(ofConnection)
	}
	l.forward.reading.back.quota = quota{}
	return nil
}

// expects reports whether a reverse connection may arrive at this listener.
func (l *listener) expects() bool {
	return !l.forward.isDown() && l.session.relay.listeners[l.token] == l
}

// reverseOpened makes a receiver the way back of a sender's reads.
func (s *sender) reverseOpened(r *receiver) {
	s.reading.back.close() // it serves once
	r.reader = s
	s.pair(r.connection)
	if r.route != s.route || r.remote() != s.remote() {
		s.shutdown(wire.Errorf(wire.StatusMalformed,
			"the relay of %s opened the way back for reads by route %d, of a connection by route %d", s.peer, r.route, s.route))
	}
}

// pair links a connection and its reverse connection.
func (c *connection) pair(back *connection) { c.twin, back.twin = back, c }

// reverseRefused handles the remote side's refusal of a reverse connection.
func (s *sender) reverseRefused(m *wire.PeerBackRefused) error {
	w := s.reading.back
	if w == nil || !w.listener.expects() || m.Status == uint32(wire.StatusOK) {
		return wire.Errorf(wire.StatusMalformed, "the relay of %s refused a way back that is not asked for", s.peer)
	}
	w.close()
	s.reading.back = nil
	s.failReads(wire.Reason(wire.Status(m.Status), m.Reason[:]))
	return nil
}

// readRetryInterval is the time after a refused reverse connection before reads request one again.
const readRetryInterval = time.Second

// failReads ends the reads that wait for a way back. The reason does not concern the connection,
// which stays up.
func (s *sender) failReads(why error) {
	r := s.session.relay
	r.warnings.warn(s.session.log, why, "no way back for reads")
	s.reading.again = r.loop.Now() + readRetryInterval
	s.stopReads(wire.StatusNoReverseConnection)
}

// stopReads fails the reads whose data has not begun to come.
func (s *sender) stopReads(status wire.Status) {
	for number, op := range s.reading.asked {
		delete(s.reading.asked, number)
		op.finish(status)
	}
}

// --- the side whose memory it is ----------------------------------------------------

// openReverseFor connects to the reader's relay.
func (r *receiver) openReverseFor(m *wire.PeerBack) error {
	switch {
	case r.isDown():
		return nil
	case r.back != nil || r.hidden:
		return wire.Errorf(wire.StatusMalformed, "the relay of %s asks for a second way back", r.peer)
	}
	w := &reverseConnection{}
	r.back = w
	s := r.session
	err := s.relay.reserve(ofConnection)
	if err == nil && len(s.connections) >= wire.MaxConnections {
		s.relay.release(ofConnection)
		err = wire.Errorf(wire.StatusLimit, "%d connections of a client of %s are open, which is the limit",
			len(s.connections), s.relay.name())
	}
	if err != nil {
		r.refuseReverse(err)
		return nil
	}
	c := &connection{session: s, number: s.number(), quota: ofConnection, hidden: true, lane: r.lane}
	s.later(func() {
		if r.isDown() {
			s.relay.release(ofConnection)
			return
		}
		var way attachment
		s.beside(&s.opening, func() (err error) {
			way, err = s.relay.dialReverse(c, r.connection, m)
			return err
		}, func(err error) {
			defer s.next()
			if err == nil {
				err = way.attach(c)
			}
			if err != nil {
				s.relay.release(ofConnection)
				if !r.isDown() {
					r.refuseReverse(err)
				}
				return
			}
			s.add(c)
			r.pair(c)
			switch {
			case r.isDown():
				c.shutdown(r.down)
			case s.ended != nil:
				c.shutdown(s.ended)
			}
			way.begin(c)
			r.opened(w, c.side.(*sender))
		})
	})
	return nil
}

// opened serves the reads that have waited for the way back.
func (r *receiver) opened(w *reverseConnection, by *sender) {
	waiting := w.waiting
	w.sender, w.waiting = by, nil
	for _, m := range waiting {
		switch {
		case r.isDown():
		case m.list != nil:
			r.bringList(m.list, m.ranges, by)
		default:
			r.bring(m.read, by)
		}
	}
}

// refuseReverse says that there is no way back, and for now no read.
func (r *receiver) refuseReverse(err error) {
	r.back = nil
	r.session.relay.warnings.warn(r.session.log, err, "no way back for reads")
	m := &wire.PeerBackRefused{Status: uint32(wire.StatusOf(err))}
	wire.SetReason(m.Reason[:], err)
	r.port.Send(m, 0)
}

// maxOpening limits the concurrent opens of reverse connections of a session: each has a goroutine.
const maxOpening = 8

// later opens a reverse connection, as soon as the session's limit permits.
func (s *session) later(f func()) {
	if s.opening >= maxOpening {
		s.waiting = append(s.waiting, f)
		return
	}
	f()
}

// next opens waiting reverse connections. Call it after the open of a reverse connection has ended.
func (s *session) next() {
	for len(s.waiting) > 0 && s.opening < maxOpening {
		f := s.waiting[0]
		s.waiting = s.waiting[1:]
		f()
	}
}

// dialReverse does the handshake of a way back, to the relay that a connection came from.
func (r *Relay) dialReverse(c, forward *connection, m *wire.PeerBack) (attachment, error) {
	var config launch.Config
	if !r.loop.Call(func() { config = r.config }) {
		return nil, errEnding
	}
	handle := wire.HandleLayout{Token: m.Token, Generation: m.Generation}
	connect := &wire.Connect{GPU: c.lane.uuid}
	if forward.remotePeer == nil {
		// Reads were posted with memory that is fit for the connection's route, which another
		// configuration, or a pair's verdict, may have been the reason for.
		return r.dialLocal(c, connect, handle, config, forward.route)
	}
	config.Route = launch.RouteStaged // its connection's
	if err := c.lane.openRemoteFor(c, config, wire.RouteAuto); err != nil {
		return nil, err
	}
	return r.openChannel(c, connect, handle, config,
		func(context.Context) (*tcp.Peer, error) { return forward.remotePeer, nil })
}
