package tcp

import (
	"encoding/binary"
	"io"
	"time"

	"github.com/peerlane/peerlane/relay/wire"
)

// Channel carries the messages of one connection, and the writes under its grants. The event loop
// owns Channel.
type Channel struct {
	peer     *Peer
	number   uint32
	state    channelState
	received func(wire.Message, uint32, []int)
	ended    func(error)
	arrivals *Arrivals
	writes   int // writes of this side over data streams that have not been acknowledged
}

// Open opens a channel. The peer's Accept gets the first message. Open calls received for each
// message, and ended once, with io.EOF after the peer has closed the channel. After Leave or Close
// it calls neither. Messages have no descriptors.
func (p *Peer) Open(first wire.Message, sequence uint32, received func(wire.Message, uint32, []int),
	ended func(error)) (*Channel, error) {
	switch {
	case p.dead != nil:
		return nil, p.dead
	case p.isDying():
		return nil, p.why
	case p.last > 1<<32-3:
		return nil, wire.Errorf(wire.StatusLimit, "open a channel to the relay at %s: every channel number is used",
			p.config.Name)
	}
	p.last += 2
	c := &Channel{peer: p, number: p.last, received: received, ended: ended}
	p.channels[c.number] = c
	p.sendFrame(c.number, frameOpen, wire.Encode(first, sequence))
	return c, nil
}

// Handle sets the handlers of an accepted channel.
func (c *Channel) Handle(received func(wire.Message, uint32, []int), ended func(error)) {
	c.received, c.ended = received, ended
}

// Peer returns the Peer of the channel.
func (c *Channel) Peer() *Peer { return c.peer }

// Send sends a message at the end of the loop's iteration, with the other messages of the
// iteration. A message with a descriptor ends the Peer, because a descriptor cannot reach another
// host.
func (c *Channel) Send(m wire.Message, sequence uint32, fds ...int) {
	if c.state != channelOpen {
		return
	}
	if len(fds) > 0 {
		c.peer.fail(wire.Errorf(wire.StatusInternal, "send a %T to another host: the message has a descriptor", m), true)
		return
	}
	c.peer.sendFrame(c.number, frameMessage, wire.Encode(m, sequence))
}

// SendLater is Send for a message without a waiting receiver: the message goes with the next
// message, or after 20 µs.
func (c *Channel) SendLater(m wire.Message, sequence uint32) {
	if c.state == channelOpen {
		c.peer.sendLater(c.number, frameMessage, wire.Encode(m, sequence))
	}
}

// Leave closes the channel after the earlier messages and writes. The channel receives no more
// messages; grants stay valid until the peer closes the channel too.
func (c *Channel) Leave() { c.transition(channelClose, nil) }

// Close is Leave: earlier messages are still sent.
func (c *Channel) Close() { c.Leave() }

// Expect ends the Peer unless the peer closes the channel within Leaving: a live peer that does not
// close would keep its grants forever.
func (c *Channel) Expect() {
	p := c.peer
	time.AfterFunc(p.config.Leaving, func() {
		p.loop.Do(func() {
			if !c.state.remoteClosed() {
				p.silent(p.control, p.config.Leaving, errNotLeft)
			}
		})
	})
}

// forget removes the channel from the Peer. transition calls forget once.
func (c *Channel) forget() {
	delete(c.peer.channels, c.number)
	if c.peer.extension != nil {
		c.peer.extension.ChannelClosed(c)
	}
	if c.theirs() {
		c.peer.theirs--
	}
}

func (c *Channel) theirs() bool { return c.number%2 != c.peer.last%2 }

// frame handles a frame of the control stream. An error ends the Peer.
func (p *Peer) frame(f frame) error {
	switch f.kind {
	case frameGoodbye:
		return p.goodbye(f.payload)
	case frameLanded:
		return p.acked(binary.LittleEndian.Uint64(f.payload))
	case frameOpen:
		return p.accept(f)
	}
	if f.kind == frameExtension && f.channel == 0 {
		return p.handleExtension(nil, f.payload)
	}
	c := p.channels[f.channel]
	if c == nil || c.state.remoteClosed() {
		return refused("frame on channel %d: the channel is not open", f.channel)
	}
	switch f.kind {
	case frameMessage:
		m, sequence, err := wire.Decode(f.payload)
		if err == nil && c.state == channelOpen {
			c.received(m, sequence, nil)
		}
		return err
	case frameEager:
		return p.takeEager(c, f.payload)
	case frameExtension:
		return p.handleExtension(c, f.payload)
	case frameLeave:
		if err := c.endArrivals(false); err != nil {
			return err
		}
		c.transition(channelRemoteClose, io.EOF)
	}
	return nil
}

// accept opens a channel for the peer.
func (p *Peer) accept(f frame) error {
	m, sequence, err := wire.Decode(f.payload)
	switch {
	case err != nil:
		return err
	case f.channel%2 == p.last%2 || f.channel <= p.lastOpen:
		return refused("channel %d opened after channel %d", f.channel, p.lastOpen)
	case p.theirs >= p.config.Channels:
		return wire.Errorf(wire.StatusLimit, "channel limit (%d) reached", p.theirs)
	}
	c := &Channel{peer: p, number: f.channel}
	c.Handle(func(wire.Message, uint32, []int) {}, func(error) {})
	p.channels[c.number], p.lastOpen = c, f.channel
	p.theirs++
	p.config.Accept(c, m, sequence)
	return nil
}

// goodbye ends the Peer with the reason of the other side.
func (p *Peer) goodbye(payload []byte) error {
	m, _, err := wire.Decode(payload)
	if err != nil {
		return err
	}
	failure, ok := m.(*wire.Failure)
	if !ok {
		return refused("goodbye with a %T", m)
	}
	why := failure.Err()
	p.fail(wire.Errorf(wire.StatusPeerRelayDied, "%w", &PeerError{Peer: p.config.Name, Event: "ended its connections",
		Route: p.config.Route(p.control), Cause: why}), false)
	return nil
}
