package relay

import (
	"cmp"
	"errors"
	"io"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/wire"
)

// connection is one end of a unidirectional stream of messages. Operations start in the order of
// the posts; an operation may wait for a timeline first.
type connection struct {
	session *session
	number  uint32
	lane    *lane
	route   uint32
	// transport is one of launch.Transport*, and out and in are the slots of the connection; nil on
	// route direct.
	transport string
	out, in   *staging
	// registered is the registration of the slots with NICs, over verbs, or of a near GPU's memory.
	// inPlace and notInPlace describe the latest used memory of a near GPU.
	registered slotsWay
	onGPUs     bool // the slots are on server GPUs, and NICs reach them
	inPlace    inPlace
	notInPlace string // the reason of bounced
	verdict    verdict
	// eagerBuffers are the lane's for short messages to and from other hosts; nil elsewhere.
	quotas     [2]*eagerBuffers
	remotePeer *tcp.Peer // the other relay's host's
	version    uint32    // that both relays speak
	peerGPU    wire.UUID // the same one's client's
	peer       string    // who is at the other side, for messages
	port       transport.Control
	shared     windows // of the port, between two relays of a host; nil elsewhere
	side       side
	// listener is the number of the accepting listener, 0 for a connection made here.
	listener uint32
	// hidden: the client does not have the connection. twin pairs a connection with its reverse
	// connection (reverse.go); nil without one.
	hidden bool
	twin   *connection
	// serving is the number of local operations for the remote side.
	serving int
	flushes flushes

	posted  []*operation // not started
	state   connectionState
	down    *wire.Error // the reason of a connection that is down
	quota   quota       // of the relay's use, until the close
	figures figures
	slots   share // of its lane's
}

// side has the methods that differ between sender and receiver.
type side interface {
	// start begins an operation whose timeline has come.
	start(op *operation)
	// cancel ends an operation of which no byte has moved.
	cancel(cookie uint64)
	// message handles a message of the remote relay; an error takes the connection down.
	message(m wire.Message, fds []int) error
	// stop fails started operations; it is called once.
	stop(why *wire.Error)
	// drained reports whether nothing is under way any more that could touch a
	// memory of either side.
	drained() bool
	// free releases the connection's resources.
	free()
}

// inReach reports whether the transport accesses a memory in place.
func (c *connection) inReach(m *memory) bool {
	switch c.transport {
	case launch.TransportLocal:
		return true
	case launch.TransportTCP:
		return m.mapped.Host()
	case launch.TransportVerbs:
		return c.known(m)
	}
	return m.staged != nil // on a server GPU
}

// sends reports whether this side is the sender.
func (c *connection) sends() bool { _, is := c.side.(*sender); return is }

// remote reports whether the remote side is on a different host.
func (c *connection) remote() bool {
	return c.transport == launch.TransportTCP || c.transport == launch.TransportVerbs
}

// open starts to read from another relay of this host.
func (c *connection) open(fd int) (*packet.Port, error) {
	port, err := packet.NewPort(c.session.relay.loop, fd, c.receive, c.ended)
	if err != nil {
		return nil, err
	}
	port.Linger() // its end means that the remote side writes no more
	c.port, c.shared = port, port
	return port, nil
}

func (c *connection) post(op *operation) {
	op.connection = c
	c.flushes.number(op, c.figures.inFlight)
	c.begun()
	c.posted = append(c.posted, op)
	c.advance()
}

// refuse ends an operation that cannot be posted: on no connection too, where c is nil.
func (c *connection) refuse(op *operation, status wire.Status) {
	if c != nil && op.kind != wire.OpFlush && op.kind != wire.OpCancel {
		c.flushes.missed(status)
	}
	op.finish(status)
}

// advance starts operations that are due.
func (c *connection) advance() bool {
	progress := false
	for !c.isDown() && len(c.posted) > 0 && c.posted[0].due() && !c.crowded() {
		op := c.posted[0]
		c.posted = c.posted[1:]
		op.begin()
		progress = true
	}
	// A crowded connection goes on at the end of one of its messages.
	if !c.isDown() && len(c.posted) > 0 && !c.crowded() {
		c.session.waits[c] = true
	} else {
		delete(c.session.waits, c)
	}
	return progress
}

// start starts an operation whose timeline has come.
func (c *connection) start(op *operation) {
	if op.kind == wire.OpFlush {
		c.flushes.start(op)
		return
	}
	c.side.start(op)
}

// cancel answers an OpCancel, whose tag names the operation's cookie.
func (c *connection) cancel(request *operation) {
	for i, op := range c.posted {
		if op.cookie == request.tag {
			c.posted = append(c.posted[:i:i], c.posted[i+1:]...)
			op.finish(wire.StatusCanceled)
			request.finish(wire.StatusOK)
			c.advance()
			return
		}
	}
	c.flushes.cancel(request.tag)
	c.side.cancel(request.tag)
	request.finish(wire.StatusOK)
}

func (c *connection) receive(m wire.Message, _ uint32, fds []int) {
	defer packet.CloseAll(fds)
	switch m := m.(type) {
	case *wire.PeerClose:
		c.shutdown(wire.Reason(ofPeer(m.Status), m.Reason[:]))
		return
	case *wire.Failure: // something that it needs for the connection failed there
		c.shutdown(wire.Errorf(ofPeer(m.Status), "the relay of %s: %w", c.peer, m.Err()))
		return
	}
	if err := c.side.message(m, fds); err != nil {
		var why *wire.Error
		if !errors.As(err, &why) {
			why = wire.Errorf(wire.StatusInternal, "%v", err)
		}
		c.shutdown(why)
	}
}

// ofPeer is the status with which the remote relay ends a connection.
func ofPeer(status uint32) wire.Status {
	if wire.Status(status) == wire.StatusOK {
		return wire.StatusPeerClosed
	}
	return wire.Status(status)
}

// ended handles the remote relay's end of the connection. After another error the port stays open until
// the remote relay closes it.
func (c *connection) ended(err error) {
	if !errors.Is(err, io.EOF) {
		c.shutdown(wire.Errorf(wire.StatusPeerRelayDied, "the relay of %s cannot be understood: %w", c.peer, err))
		return
	}
	c.apply(connectionPortClosed, wire.Errorf(wire.StatusPeerRelayDied, "the relay of %s died", c.peer).On(c.peer))
}

// lost handles the end of the connection's channel to a remote host, by the remote relay or with
// the whole Peer.
func (c *connection) lost(err error) {
	var why *wire.Error
	if !errors.As(err, &why) {
		why = wire.Errorf(wire.StatusPeerRelayDied, "the relay of %s left the connection without a word", c.peer).On(c.peer)
	}
	c.apply(connectionPortClosed, why)
}

// add makes a connection one of the session.
func (s *session) add(c *connection) {
	s.connections[c.number] = c
	c.apply(connectionAdd, nil)
}

// shutdown takes the connection down for a reason, reports the reason to both sides, and waits for
// operations in flight. It goes when that is so.
func (c *connection) shutdown(why *wire.Error) { c.apply(connectionShutdown, why) }

// settle closes a connection that is down, after operations in flight.
func (c *connection) settle() { c.apply(connectionIdle, nil) }

func (s *session) disconnect(number uint32) error {
	c := s.visible(number)
	if c == nil {
		return wire.Errorf(wire.StatusUnknownConnection, "connection %d is not open", number)
	}
	c.shutdown(wire.Errorf(wire.StatusPeerClosed, "%s closed the connection", s.relay.name()).On(s.relay.name()))
	return nil
}

// statistics returns the counters of the relay and of the staging.
func (r *Relay) statistics() *wire.StatisticsReply {
	m := &wire.StatisticsReply{
		Sent: r.counters.sent, Received: r.counters.received, Direct: r.counters.direct, Staged: r.counters.staged,
	}
	at := map[wire.UUID]int{}
	count := func(server wire.UUID, in, out uint64) {
		i, known := at[server]
		if !known {
			if len(at) == wire.MaxServers {
				return
			}
			i = len(at)
			at[server] = i
			m.Server[i].GPU = server
		}
		m.Server[i].In += in
		m.Server[i].Out += out
	}
	for _, l := range r.lanes {
		if l.device != nil {
			m.Contexts++
		}
		for _, s := range l.pools() {
			for _, g := range s.regions {
				count(g.server, g.in, g.out)
			}
		}
		for _, on := range l.serverUsage {
			if on.in+on.out > 0 {
				count(on.id, on.in, on.out)
			}
		}
	}
	m.Servers = uint32(len(at))
	return m
}

// given are the lanes that the container was given.
func (r *Relay) given() *wire.LanesReply {
	m := &wire.LanesReply{}
	for _, l := range r.lanes[:min(len(r.lanes), wire.MaxLanes)] {
		lane := &m.Lane[m.Lanes]
		lane.Index = uint32(l.spec.GPU.Index)
		if id, err := wire.ParseGPU(l.spec.GPU.UUID); err == nil { // a plan may lack it
			lane.GPU = id
		}
		m.Lanes++
	}
	return m
}

// unknownPeerMbps is the rate of a local lane whose GPU has no link of a known rate. The rate is
// not 0, by which a client recognises local lanes.
const unknownPeerMbps = 100000

// nicOf describes the NIC of the lane of a GPU.
func (r *Relay) nicOf(gpu wire.UUID) (*wire.LaneNICReply, error) {
	for _, l := range r.lanes {
		if id, err := wire.ParseGPU(l.spec.GPU.UUID); err != nil || id != gpu {
			continue
		}
		m := &wire.LaneNICReply{}
		switch n := l.spec.NIC; {
		case r.config.Local():
			m.Mbps = cmp.Or(l.spec.PeerMbps, unknownPeerMbps)
		case n != nil:
			m.Guid, m.Mbps, m.Port = n.GUID, n.Mbps, n.Port
			wire.SetText(m.Name[:], n.Name)
		}
		return m, nil
	}
	return nil, wire.Errorf(wire.StatusWrongGPU, "%s has no lane in %s", gpu.GPU(), r.name()).On(gpu.GPU())
}
