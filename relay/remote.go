package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/transport/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// Connections between relays of two hosts are channels of the Peer that both relays share.

const (
	// maxWelcoming limits concurrent answers to hellos on channels: an answer has a goroutine.
	maxWelcoming = 256
	// maxUnanswered limits the hellos that wait for an answer, for instance at the start of a large job.
	maxUnanswered = 4096
	// welcomeTimeout limits an answer, during which a driver can allocate staging.
	welcomeTimeout = 2*handshakeTimeout + selfTestTimeout
	// openTries is the number of attempts to open a channel if the Peer ends meanwhile.
	openTries = 2
	// maxKept limits the messages of a channel after the welcome and before the client has the
	// connection.
	maxKept = wire.RingEntries + wire.MaxMemories
)

// atHost is the relay's name for remote hosts.
func (r *Relay) atHost() string { return fmt.Sprintf("%s on host %s", r.name(), hostname()) }

// openRemoteFor prepares the lane for a connection with a remote host.
func (l *lane) openRemoteFor(c *connection, config launch.Config, asked uint32) error {
	if config.Network == nil {
		return wire.Errorf(wire.StatusUnreachable, "%w", &fault.Error{Code: fault.NoNetwork,
			Operation: "this relay is on no network", Cause: errors.New(config.NoNetwork)})
	}
	if route := routeNumber(config.Route); route == wire.RouteDirect || asked == wire.RouteDirect {
		return wire.Errorf(wire.StatusUnreachable,
			"route direct is between two containers of one host; with another one relay.route has to be \"auto\" or "+
				"\"staged\" in config.toml on both")
	}
	if err := l.open(); err != nil {
		return err
	}
	c.route = wire.RouteStaged
	return nil
}

// takeHost makes a connection use the lane's host memory for remote hosts, with the slots or
// without. takeHost may block.
func (c *connection) takeHost(n *launch.Network, slots bool) error {
	l := c.lane
	if err := l.openRemote(n, slots); err != nil {
		return err
	}
	if slots {
		c.out, c.in = l.remote.out, l.remote.in
	}
	c.quotas = l.remote.quotas
	return nil
}

// takeTCP makes the connection's data go over tcp.
func (c *connection) takeTCP(n *launch.Network) error {
	c.transport = launch.TransportTCP
	return c.takeHost(n, true)
}

// --- the sender's side ------------------------------------------------------------

// opening is a channel from the hello until the connection takes it over. The fields except answer
// belong to the loop.
type opening struct {
	channel  *tcp.Channel
	link     *verbs.Link // nil if the data uses TCP
	answer   chan error  // has one value
	finished bool
	welcome  *wire.PeerWelcome
	kept     []wire.Message
	ended    error
}

func (o *opening) finish(err error) {
	if !o.finished {
		o.finished = true
		o.answer <- err
	}
}

func (o *opening) received(m wire.Message, _ uint32, _ []int) {
	switch m := m.(type) {
	case *wire.PeerWelcome:
		if o.welcome == nil {
			o.welcome = m
			o.finish(nil)
			return
		}
	case *wire.Failure:
		if o.welcome == nil {
			o.finish(m.Err())
			return
		}
	}
	if o.welcome == nil {
		o.finish(wire.Errorf(wire.StatusMalformed, "the relay of the other container answered with a %T", m))
		return
	}
	if len(o.kept) >= maxKept {
		o.channel.Leave()
		o.ended = wire.Errorf(wire.StatusLimit,
			"the relay of the other container sent more than %d messages before the connection was open", maxKept)
		return
	}
	o.kept = append(o.kept, m)
}

func (o *opening) lost(err error) {
	o.ended = err
	if wire.StatusOf(err) == wire.StatusInternal {
		err = wire.Errorf(wire.StatusUnreachable, "the relay of the other container left during the handshake")
	}
	o.finish(err)
}

// attach binds the channel to the connection.
func (o *opening) attach(c *connection) error {
	if s := newSender(c, o.channel.Link()); o.link != nil {
		s.link = o.link
	}
	c.port = o.channel
	o.channel.Handle(c.receive, c.lost)
	return nil
}

// begin delivers the kept messages to the connection.
func (o *opening) begin(c *connection) {
	for _, m := range o.kept {
		c.receive(m, 0, nil)
	}
	o.kept = nil
	if o.ended != nil {
		c.lost(o.ended)
	}
}

// dialHost is dial for a listener of a remote host.
func (r *Relay) dialHost(c *connection, m *wire.Connect, handle wire.HandleLayout,
	config launch.Config) (attachment, error) {
	var h *peerManager
	var why string
	if !r.loop.Call(func() { h, why = r.hosts, r.noNetwork() }) {
		return nil, errEnding
	}
	switch {
	case h == nil:
		return nil, wire.Errorf(wire.StatusUnreachable, "%w", &fault.Error{Code: fault.NoNetwork,
			Operation: "the listener is on another host, or was there before this one was booted, or relay.transport or " +
				"the route between the containers asks for the network; and this relay is on no network", Cause: errors.New(why)})
	case handle.Contact == [len(handle.Contact)]byte{}:
		return nil, wire.Errorf(wire.StatusUnreachable, "%w", &fault.Error{Code: fault.NoNetwork,
			Operation: "the listener is reached over the network, and its relay is on no network",
			Cause:     errors.New("its host has no cluster key, or network.listen is off there")})
	}
	if err := c.lane.openRemoteFor(c, config, wire.RouteAuto); err != nil {
		return nil, err
	}
	r.prepare(c.lane, true)
	return r.openChannel(c, m, handle, config, func(ctx context.Context) (*tcp.Peer, error) {
		return h.reach(ctx, handle, c.lane)
	})
}

// openChannel does the sender's half of the handshake with the relay that reach returns; the lane
// is ready.
func (r *Relay) openChannel(c *connection, m *wire.Connect, handle wire.HandleLayout, config launch.Config,
	reach func(context.Context) (*tcp.Peer, error)) (attachment, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	hello := &wire.PeerHello{
		Magic: wire.Magic, Oldest: wire.OldestVersion, Newest: wire.NewestVersion,
		Token: handle.Token, GPU: m.GPU, Route: wire.RouteAuto,
	}
	wire.SetText(hello.Name[:], r.atHost())
	o := &opening{answer: make(chan error, 1)}
	var peer *tcp.Peer
	for try := 0; o.channel == nil; try++ {
		var err error
		if peer, err = reach(ctx); err != nil {
			return nil, err
		}
		var by *verbs.QPGroup
		if by, err = r.senderBy(peer, c, config); err != nil {
			return nil, err
		}
		if !r.loop.Call(func() {
			if by == nil {
				o.channel, err = peer.Open(hello, 0, o.received, o.lost)
			} else {
				o.channel, o.link, err = by.Open(hello, o.received, o.lost, c.lane.spec.NICs, c.out.least())
			}
		}) {
			return nil, errEnding
		}
		// The Peer may have ended at this moment, for instance because it was idle; then open a new
		// one.
		if err != nil && try == openTries {
			return nil, wire.Errorf(wire.StatusUnreachable, "%w", err)
		}
	}
	var err error
	select {
	case err = <-o.answer:
	case <-time.After(welcomeTimeout):
		err = wire.Errorf(wire.StatusUnreachable, "the relay at %s did not answer within %v", peer.Name(), welcomeTimeout)
	}
	if err == nil && o.welcome.Route != wire.RouteStaged {
		err = wire.Errorf(wire.StatusMalformed, "the relay at %s answered with route %d", peer.Name(), o.welcome.Route)
	}
	if err == nil {
		_, err = wire.Negotiate("listener's relay", o.welcome.Version, o.welcome.Version)
	}
	if err != nil {
		r.loop.Call(o.channel.Leave)
		return nil, err
	}
	c.peer, c.remotePeer, c.peerGPU, c.version = wire.Text(o.welcome.Name[:]), peer, o.welcome.GPU, o.welcome.Version
	return o, nil
}

// --- the receiver's side ------------------------------------------------------------

// arriving is a sender of a remote host before the answer to its hello. It belongs to the loop.
type arriving struct {
	channel *tcp.Channel
	hello   *wire.PeerHello
	by      *verbs.QPGroup // nil where the data comes over tcp
	left    bool
}

// refuseChannel sends the reason of a refusal to a sender of a remote host.
func (r *Relay) refuseChannel(ch *tcp.Channel, err error) {
	r.warnings.warn(logrus.WithField("from", ch.Peer().Name()), err, "a sender of another host was refused")
	ch.Send(wire.NewFailure(err), 0)
	ch.Leave()
}

// welcomeChannel answers the first message on a channel of a remote relay, or queues the answer.
// Call it on the loop.
func (r *Relay) welcomeChannel(ch *tcp.Channel, first wire.Message, _ uint32) {
	hello, ok := first.(*wire.PeerHello)
	by, err := r.receiverBy(ch.Peer()) // first: messages of this channel do not concern the next
	switch {
	case r.dying != nil:
		r.refuseChannel(ch, r.dying)
		return
	case !ok || hello.Magic != wire.Magic:
		r.refuseChannel(ch, wire.Errorf(wire.StatusMalformed, "the first message is not a relay's hello"))
		return
	case len(r.unanswered) >= maxUnanswered:
		r.refuseChannel(ch, wire.Errorf(wire.StatusLimit,
			"%d senders of other hosts wait for an answer of %s, which is the limit", maxUnanswered, r.name()))
		return
	case err != nil:
		r.refuseChannel(ch, err)
		return
	}
	a := &arriving{channel: ch, hello: hello, by: by}
	// The sender must not send a message before the answer.
	ch.Handle(func(wire.Message, uint32, []int) { a.left = true; ch.Leave() }, func(error) { a.left = true })
	r.unanswered = append(r.unanswered, a)
	r.welcomeNext()
}

// welcomeNext answers waiting channels, up to the limit. Call welcomeNext on the loop.
func (r *Relay) welcomeNext() {
	for len(r.unanswered) > 0 && r.welcoming < maxWelcoming {
		a := r.unanswered[0]
		r.unanswered[0] = nil
		if r.unanswered = r.unanswered[1:]; !a.left {
			r.welcome(a)
		}
	}
}

func (r *Relay) welcome(a *arriving) {
	r.welcoming++
	go func() {
		l, c, welcome, err := r.invite(a.hello, func(l *lane, c *connection, config launch.Config,
			hello *wire.PeerHello) error {
			if err := l.openRemoteFor(c, config, hello.Route); err != nil {
				return err
			}
			if a.by == nil {
				return c.takeTCP(config.Network)
			}
			return r.take(c, a.by, config.Network, false)
		})
		r.loop.Do(func() {
			r.welcoming--
			switch {
			case a.left:
				logrus.WithField("from", a.channel.Peer().Name()).Debug("a sender left during its handshake")
			case err != nil:
				r.refuseChannel(a.channel, err)
			default:
				wire.SetText(welcome.Name[:], r.atHost())
				c.remotePeer, c.peerGPU = a.channel.Peer(), a.hello.GPU
				l.connectChannel(c, a, welcome)
			}
			r.welcomeNext()
		})
		r.examine(err)
	}()
}

// connectChannel makes the receiver for a sender of a remote host.
func (l *listener) connectChannel(c *connection, a *arriving, welcome *wire.PeerWelcome) {
	receiver, ch := newReceiver(c), a.channel
	c.number, c.port = l.session.number(), ch
	if a.by == nil {
		receiver.writes = ch.Receive(receiver.immediate, receiver.landingsEnded)
	} else {
		arrivals := a.by.Receive(ch, receiver.immediate)
		receiver.writes = arrivals
		receiver.windows = ch.Receive(receiver.immediate, func() { arrivals.End(receiver.landingsEnded) })
	}
	ch.Handle(c.receive, c.lost)
	ch.Send(welcome, 0)
	l.take(receiver)
}
