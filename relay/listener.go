package relay

import (
	"context"
	"crypto/rand"
	"errors"
	mathrand "math/rand/v2"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/transport/local"
	"github.com/peerlane/peerlane/relay/wire"
)

// maxUnaccepted bounds the senders that wait for a listener's Accept.
const maxUnaccepted = 64

// handleMagic begins a handle: "LANEHNDL".
const handleMagic = 0x4c444e48454e414c

// listener waits for senders with its handle.
type listener struct {
	session *session
	number  uint32
	token   wire.UUID
	lane    *lane
	ready   []*receiver // connected, not accepted
	accepts []uint32    // requests that wait for one
	missed  []error     // of senders that believe to be connected
	// forward is the sender whose way back it awaits (reverse.go), nil of a client's.
	forward *sender
}

func (s *session) listen(m *wire.Listen, sequence uint32) {
	if len(s.listeners) >= wire.MaxListeners {
		s.answer(sequence, wire.Errorf(wire.StatusLimit, "%d listeners are open, which is the limit", len(s.listeners)))
		return
	}
	l := &listener{session: s, number: s.number()}
	var generation wire.UUID
	s.block(sequence, func() (err error) {
		if l.lane, err = s.relay.laneOf(m.GPU); err != nil {
			return err
		}
		if generation, err = s.relay.generation(); err != nil {
			return err
		}
		s.relay.lookAtRails()
		_, err = rand.Read(l.token[:])
		return err
	}, func(err error) {
		if err != nil {
			s.answer(sequence, err)
			return
		}
		if s.ended != nil {
			return // its client hears why
		}
		s.listeners[l.number] = l
		s.relay.listeners[l.token] = l
		handle := wire.HandleLayout{
			Magic: handleMagic, Token: l.token, Generation: generation, Host: s.relay.host,
			Contact: s.relay.contact(l.token, generation, l.lane),
		}
		s.reply(&wire.Listening{Listener: l.number, Handle: handle.Handle()}, sequence)
	})
}

// generation is this relay's generation, as in the handle.
func (r *Relay) generation() (wire.UUID, error) {
	var text string
	if !r.loop.Call(func() { text = r.config.Generation }) {
		return wire.UUID{}, errEnding
	}
	return wire.ParseGPU(text)
}

func (s *session) unlisten(number uint32) error {
	l := s.listeners[number]
	if l == nil {
		return wire.Errorf(wire.StatusUnknownListener, "listener %d is not open", number)
	}
	l.close()
	return nil
}

func (l *listener) close() {
	delete(l.session.listeners, l.number)
	delete(l.session.relay.listeners, l.token)
	why := l.closed()
	for _, sequence := range l.accepts {
		l.session.answer(sequence, wire.Errorf(wire.StatusClosed, "the listener was closed"))
	}
	for _, r := range l.ready {
		r.shutdown(why)
	}
	l.ready, l.accepts = nil, nil
}

// closed is the reason for the end of an unaccepted connection.
func (l *listener) closed() *wire.Error {
	return wire.Errorf(wire.StatusPeerClosed, "%s closed the listener", l.session.relay.name()).On(l.session.relay.name())
}

func (s *session) accept(m *wire.Accept, sequence uint32) {
	l := s.listeners[m.Listener]
	switch {
	case l == nil:
		s.answer(sequence, wire.Errorf(wire.StatusUnknownListener, "listener %d is not open", m.Listener))
	case len(l.accepts) >= maxUnaccepted:
		s.answer(sequence, wire.Errorf(wire.StatusLimit, "%d accepts wait already", maxUnaccepted))
	default:
		l.accepts = append(l.accepts, sequence)
		l.hand()
	}
}

// left reports whether the sender left before the accept. Another may come. After a failure the
// sender may count as connected, and an accept would wait for ever.
func (r *receiver) left() bool {
	if !r.isDown() {
		return false
	}
	switch r.down.Status {
	case wire.StatusPeerClosed, wire.StatusPeerClientDied, wire.StatusPeerContainerDied:
		return true
	}
	return false
}

// miss fails a waiting accept, or the next accept: a sender may believe that it is connected.
func (l *listener) miss(err error) {
	if l.forward != nil {
		l.forward.shutdown(wire.Errorf(wire.StatusInternal, "%s could not take the way back: %v", l.session.relay.name(),
			err))
		return
	}
	if len(l.missed) < maxUnaccepted {
		l.missed = append(l.missed, err)
	}
	l.hand()
}

// hand gives connected senders to waiting accepts.
func (l *listener) hand() {
	for len(l.accepts) > 0 && len(l.missed) > 0 {
		sequence, err := l.accepts[0], l.missed[0]
		l.accepts, l.missed = l.accepts[1:], l.missed[1:]
		l.session.answer(sequence, wire.Errorf(wire.StatusInternal, "a sender connected, and %s could not take it: %v",
			l.session.relay.name(), err))
	}
	for len(l.accepts) > 0 && len(l.ready) > 0 {
		r := l.ready[0]
		l.ready = l.ready[1:]
		if r.left() {
			continue
		}
		sequence := l.accepts[0]
		l.accepts = l.accepts[1:]
		if r.isDown() {
			l.session.answer(sequence, wire.Errorf(r.down.Status,
				"a sender connected, and the connection failed before it was accepted: %s", r.down.Reason))
			continue
		}
		l.session.reply(r.connected(), sequence) // which may end the session, and so the listener
	}
}

func (c *connection) connected() *wire.Connected {
	m := &wire.Connected{Connection: c.number, Route: c.route}
	wire.SetText(m.Peer[:], c.peer)
	return m
}

func routeNumber(name string) uint32 {
	return map[string]uint32{launch.RouteStaged: wire.RouteStaged, launch.RouteDirect: wire.RouteDirect}[name]
}

// agree picks the route of a connection from the configurations of both hosts.
func agree(ours, theirs uint32) (uint32, error) {
	switch {
	case theirs > wire.RouteDirect:
		return 0, wire.Errorf(wire.StatusMalformed,
			"the sender's relay asks for route %d, which this version does not know", theirs)
	case ours == wire.RouteAuto && theirs == wire.RouteAuto:
		return wire.RouteDirect, nil
	case ours == wire.RouteAuto, ours == theirs:
		return theirs, nil
	case theirs == wire.RouteAuto:
		return ours, nil
	}
	return 0, wire.Errorf(wire.StatusUnreachable,
		"one relay is configured for route staged and the other for route direct; set relay.route alike in config.toml")
}

// greetPeer answers another relay that wants to send to a listener here.
func (r *Relay) greetPeer(conn packet.Conn, silent *pendingHandshakes) {
	defer silent.from.HangUp(conn)
	if err := r.welcomePeer(conn, silent); err != nil {
		r.warnings.warn(logrus.NewEntry(logrus.StandardLogger()), err, "a sender was refused")
		if sent := conn.Send(wire.NewFailure(err), 1); sent != nil {
			logrus.WithError(sent).Debug("the refusal could not be sent")
		}
		r.examine(err)
	}
}

func (r *Relay) welcomePeer(conn packet.Conn, silent *pendingHandshakes) error {
	m, err := silent.receive(conn)
	if err != nil {
		return err
	}
	// The following time is the driver's, not the remote relay's.
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return err
	}
	hello, ok := m.(*wire.PeerHello)
	if !ok || hello.Magic != wire.Magic {
		return wire.Errorf(wire.StatusMalformed, "the first message is not a relay's hello")
	}
	l, c, welcome, err := r.invite(hello, (*lane).openLocal)
	if err != nil {
		return err
	}
	err = conn.Send(welcome, 1)
	fd := -1
	if err == nil && c.route == wire.RouteStaged { // the sender connects again, over the network
		return nil
	}
	if err == nil {
		fd, err = conn.Detach()
	}
	if err != nil {
		if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
			logrus.WithError(err).Debug("a sender left during its handshake")
			return nil
		}
		r.loop.Do(func() { l.miss(err) })
		return wire.Errorf(wire.StatusInternal, "%s answers a sender: %v", r.name(), err)
	}
	windows := hasWindows(c, welcome.Version)
	r.loop.Do(func() { l.connect(c, fd, hello.Shares == 1, windows) })
	return nil
}

// noListener is the answer to a handle that no listener here gave out.
func (r *Relay) noListener() error {
	return wire.Errorf(wire.StatusBadHandle,
		"no listener of %s answers to this handle; it was closed, or the handle is not one that a listener gave out",
		r.name()).On(r.name())
}

// invite decides on another relay's hello: the receiver, the connection, and the answer. open sets
// the connection's way up: its route, transport and slots. invite may block.
func (r *Relay) invite(hello *wire.PeerHello, open func(*lane, *connection, launch.Config,
	*wire.PeerHello) error) (*listener, *connection, *wire.PeerWelcome, error) {
	version, err := wire.Negotiate("sender's relay", hello.Oldest, hello.Newest)
	if err != nil {
		return nil, nil, nil, err
	}
	var l *listener
	var config launch.Config
	if !r.loop.Call(func() {
		if l = r.listeners[hello.Token]; l == nil {
			r.counters.badHandles++
		}
		config = r.config
	}) {
		return nil, nil, nil, errEnding
	}
	if l == nil {
		return nil, nil, nil, r.noListener()
	}
	c := &connection{session: l.session, lane: l.lane, peer: wire.Text(hello.Name[:]), version: version}
	if err := open(l.lane, c, config, hello); err != nil {
		return nil, nil, nil, err
	}
	welcome := &wire.PeerWelcome{Version: version, Route: c.route, GPU: l.lane.uuid}
	wire.SetText(welcome.Name[:], r.name())
	return l, c, welcome, nil
}

// openLocal makes the lane ready for a sender of this host. Staged data of two relays of a host goes
// by NICs, or tcp, as between two hosts.
func (l *lane) openLocal(c *connection, config launch.Config, hello *wire.PeerHello) error {
	var err error
	if c.route, err = l.route(config, hello); err != nil {
		return err
	}
	if c.route == wire.RouteStaged {
		return nil
	}
	c.transport = launch.TransportLocal
	return l.open()
}

// connect makes the receiver of a sender of this host whose handshake is done.
func (l *listener) connect(c *connection, fd int, shares, windows bool) {
	s := l.session
	receiver := newReceiver(c)
	c.number = s.number()
	port, err := c.open(fd)
	if err != nil {
		packet.Refuse(fd, err, 0)
		unix.Close(fd)
	} else if shares {
		if missing := port.Share(windows); missing != nil {
			s.log.WithError(missing).Warn("no memory is shared with the other relay; the socket does alone")
		}
	}
	if err != nil {
		s.log.WithError(err).Error("a sender could not be watched")
		l.miss(err)
		return
	}
	l.take(receiver)
}

// take gives the listener's client a receiver with an open link to the sender, or takes the
// receiver down.
func (l *listener) take(r *receiver) {
	s, c := l.session, r.connection
	c.hidden, c.listener = l.forward != nil, l.number
	crowded := len(l.ready) >= maxUnaccepted
	l.ready = slices.DeleteFunc(l.ready, func(r *receiver) bool { return r.left() || crowded && r.isDown() })
	over := l.claim()
	if over == nil {
		c.quota = ofConnection
	}
	if s.ended != nil && s.relay.sessions[s.id] != s {
		c.apply(connectionAbandon, s.ended)
		return
	}
	s.add(c)
	var limit *wire.Error
	switch {
	case s.ended != nil:
		c.shutdown(s.ended)
	case errors.As(over, &limit):
		c.shutdown(limit)
	case l.forward == nil && !l.open(): // it was closed while the sender came
		c.shutdown(l.closed())
	case !l.open(), l.forward == nil && (len(s.connections) > wire.MaxConnections || len(l.ready) >= maxUnaccepted):
		// Not so of a way back: openReverse has reserved the room, and the end would take down the
		// twin.
		c.shutdown(wire.Errorf(wire.StatusLimit, "%s takes no more connections on this listener", s.relay.name()))
	default:
		if err := r.introduce(); err != nil {
			c.shutdown(wire.Errorf(wire.StatusInternal, "%s: %v", s.relay.name(), err))
			return
		}
		if l.forward != nil {
			l.forward.reverseOpened(r)
			return
		}
		l.ready = append(l.ready, r)
		l.hand()
	}
}

// open reports whether a sender may come.
func (l *listener) open() bool {
	if l.forward != nil {
		return l.expects()
	}
	return l.session.listeners[l.number] == l
}

// introduce announces the slots for grants, and the windows, to the sender.
func (r *receiver) introduce() error {
	if r.in == nil {
		return nil
	}
	for _, g := range r.in.regions {
		r.weigh(g.number, g.nics)
		if err := r.writes.AddMemory(g.number, g.memory); err != nil {
			return err
		}
		r.port.Send(&wire.PeerRegion{Region: g.number, Kind: wire.MemoryRemote, Bytes: g.memory.Bytes, GPU: g.server}, 0)
	}
	if r.hidden {
		return nil // no short messages come by it
	}
	return r.offerQuota()
}

// connect is a client's request to send to a listener elsewhere.
func (s *session) connect(m *wire.Connect, sequence uint32) {
	if len(s.connections) >= wire.MaxConnections {
		s.answer(sequence, wire.Errorf(wire.StatusLimit, "%d connections are open, which is the limit", len(s.connections)))
		return
	}
	if err := s.relay.reserve(ofConnection); err != nil {
		s.answer(sequence, err)
		return
	}
	c := &connection{session: s, number: s.number(), quota: ofConnection}
	var way attachment
	s.block(sequence, func() (err error) {
		way, err = s.relay.dial(c, m)
		return err
	}, func(err error) {
		if err == nil {
			err = way.attach(c)
		}
		if err != nil {
			s.relay.release(ofConnection)
			s.answer(sequence, err)
			return
		}
		s.add(c)
		if s.ended != nil {
			c.shutdown(s.ended) // so that the remote side gets the cause
		} else {
			s.reply(c.connected(), sequence)
		}
		way.begin(c)
	})
}

// attachment is the result of a handshake with the listener's relay. The methods belong to the
// loop.
type attachment interface {
	// attach binds the link to the connection's sender; after an error no resource remains.
	attach(c *connection) error
	// begin is called when the client knows of the connection.
	begin(c *connection)
}

// localPeer is the attachment to a relay of this host.
type localPeer struct {
	link    *local.Link
	fd      int
	windows bool
}

func (n *localPeer) attach(c *connection) error {
	s := newSender(c, n.link)
	s.shares = c.peerGPU == c.lane.uuid
	if n.windows {
		s.windows = allWindows()
	}
	port, err := c.open(n.fd)
	if err != nil {
		n.link.Close()
		unix.Close(n.fd)
		return err
	}
	port.TakeShared(n.windows)
	return nil
}

func (n *localPeer) begin(*connection) {}

// dial does the sender's half of the handshake.
func (r *Relay) dial(c *connection, m *wire.Connect) (attachment, error) {
	handle := m.Handle.Layout()
	if handle.Magic != handleMagic {
		return nil, wire.Errorf(wire.StatusBadHandle, "these 128 bytes are not a listener's handle")
	}
	var config launch.Config
	if !r.loop.Call(func() { config = r.config }) {
		return nil, errEnding
	}
	lane, err := r.laneOf(m.GPU)
	if err != nil {
		return nil, err
	}
	c.lane = lane
	switch own := handle.Host == r.host; {
	case config.Transport == launch.TransportTCP, config.Transport == launch.TransportVerbs,
		config.Transport == launch.TransportAuto && !own:
		return r.dialHost(c, m, handle, config)
	case !own:
		return nil, wire.Errorf(wire.StatusUnreachable,
			"the listener is on another host, or was there before this one was booted, and relay.transport in "+
				"config.toml says %s, which reaches this host alone", config.Transport).On("relay.transport")
	}
	way, err := r.dialLocal(c, m, handle, config, routeNumber(config.Route))
	if errors.Is(err, errStagedByNICs) {
		return r.dialHost(c, m, handle, config)
	}
	return way, err
}

// errStagedByNICs says that a connection to a relay of this host is staged: NICs carry the data,
// and relays connect as relays of two hosts do.
var errStagedByNICs = errors.New("the route between the containers is staged: NICs carry the data")

// localDialTimeout is how long a relay waits for room in the queue of another relay of the host.
const localDialTimeout = 15 * time.Second

// greetLocal connects to the relay of another container, says hello and returns the answer.
// While that relay is busy, dial tries again, until localDialTimeout.
func greetLocal(socket string, hello *wire.PeerHello) (packet.Conn, wire.Message, []int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), localDialTimeout)
	defer cancel()
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		conn, err := packet.DialContext(ctx, socket)
		switch {
		case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ECONNREFUSED):
			return conn, nil, nil, wire.Errorf(wire.StatusUnreachable,
				"the container that gave out this handle has ended: its relay is gone").On(filepath.Base(socket))
		case errors.Is(err, packet.ErrQueueFull):
			return conn, nil, nil, wire.Errorf(wire.StatusBusy,
				"the relay of the other container accepts no connection: its queue was full for %v; peerlane relay list on "+
					"the host shows its state", localDialTimeout).On(filepath.Base(socket))
		case err != nil:
			return conn, nil, nil, wire.Errorf(wire.StatusUnreachable, "the relay of the other container: %v", err)
		}
		answer, fds, err := conn.Exchange(hello, 2*handshakeTimeout+selfTestTimeout)
		if err == nil {
			return conn, answer, fds, nil
		}
		packet.Relays.HangUp(conn)
		if wire.StatusOf(err) == wire.StatusInternal {
			err = wire.Errorf(wire.StatusUnreachable, "the relay of the other container did not answer: %v", err)
		}
		if wire.StatusOf(err) != wire.StatusBusy {
			return packet.Conn{}, nil, nil, err
		}
		select {
		case <-time.After(pause/2 + mathrand.N(pause)):
		case <-ctx.Done():
			return packet.Conn{}, nil, nil, err
		}
	}
}

// dialLocal is dial for a listener on this host. route is the requested route.
func (r *Relay) dialLocal(c *connection, m *wire.Connect, handle wire.HandleLayout, config launch.Config,
	route uint32) (attachment, error) {
	if err := c.lane.open(); err != nil {
		return nil, err
	}
	hello := &wire.PeerHello{
		Magic: wire.Magic, Oldest: wire.OldestVersion, Newest: wire.NewestVersion,
		Token: handle.Token, GPU: m.GPU, Route: route, Shares: 1,
	}
	wire.SetText(hello.Name[:], r.name())
	conn, answer, fds, err := greetLocal(filepath.Join(config.Peers, handle.Generation.String()+".sock"), hello)
	if err != nil {
		return nil, err
	}
	defer packet.Relays.HangUp(conn)
	defer packet.CloseAll(fds)
	welcome, ok := answer.(*wire.PeerWelcome)
	if !ok {
		return nil, wire.Errorf(wire.StatusMalformed, "the relay of the other container answered with a %T", answer)
	}
	if route, err := agree(hello.Route, welcome.Route); err != nil || route != welcome.Route || len(fds) > 0 {
		return nil, wire.Errorf(wire.StatusMalformed,
			"the relay of the other container answered with route %d and %d descriptors", welcome.Route, len(fds))
	}
	if welcome.Route == wire.RouteStaged {
		if config.Transport == launch.TransportLocal {
			return nil, wire.Errorf(wire.StatusUnreachable,
				"route staged uses transport verbs or tcp, and relay.transport in config.toml says %s", config.Transport)
		}
		return nil, errStagedByNICs
	}
	c.route, c.peer, c.version = welcome.Route, wire.Text(welcome.Name[:]), welcome.Version
	c.transport = launch.TransportLocal
	link := local.New(r.loop, c.lane.device, c.lane.push.queues[0], r.wear)
	fd, err := conn.Detach()
	if err != nil {
		r.loop.Call(link.Close)
		return nil, err
	}
	c.peerGPU = welcome.GPU
	return &localPeer{link, fd, hasWindows(c, welcome.Version)}, nil
}
