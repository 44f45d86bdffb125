package tcp

import (
	"encoding/binary"
	"io"
	"time"

	"github.com/peerlane/peerlane/relay/wire"
)

// Channel is one connection's way for messages, and for the writes under its grants. It
// belongs to the event loop.
type Channel struct {
	peer        *Peer
	number      uint32
	received    func(wire.Message, uint32, []int)
	ended       func(error)
	arrivals    *Arrivals
	writes      int  // of this side, over data streams, that have not landed yet
	closed      bool // it is not the Peer's any more
	localClosed bool // by this side
	finSent     bool // and the other side is told
	deserted    bool // by the other side
}

// Open makes a channel, whose first message the other side's Accept gets. received is
// called with every message, ended once, with io.EOF when the other side has left.
// Neither is called after Leave or Close. Of messages none brings a descriptor.
func (p *Peer) Open(first wire.Message, sequence uint32, received func(wire.Message, uint32, []int),
	ended func(error)) (*Channel, error) {
	switch {
	case p.dead != nil:
		return nil, p.dead
	case p.isDying():
		return nil, p.why
	case p.last > 1<<32-3:
		return nil, wire.Errorf(wire.StatusLimit, "the relay at %s has had all channels that there are", p.config.Name)
	}
	p.last += 2
	c := &Channel{peer: p, number: p.last, received: received, ended: ended}
	p.channels[c.number] = c
	p.sendFrame(c.number, frameOpen, wire.Encode(first, sequence))
	return c, nil
}

// Handle says who is told what comes on a channel that was accepted.
func (c *Channel) Handle(received func(wire.Message, uint32, []int), ended func(error)) {
	c.received, c.ended = received, ended
}

// Peer is whose channel it is.
func (c *Channel) Peer() *Peer { return c.peer }

// Send sends a message with all that is sent in this round of the loop. A descriptor
// does not reach another host: a message with one ends the Peer.
func (c *Channel) Send(m wire.Message, sequence uint32, fds ...int) {
	if c.localClosed || c.closed {
		return
	}
	if len(fds) > 0 {
		c.peer.fail(wire.Errorf(wire.StatusInternal, "a %T with a descriptor cannot be sent to another host", m), true)
		return
	}
	c.peer.sendFrame(c.number, frameMessage, wire.Encode(m, sequence))
}

// SendLater is Send for a message that the other relay does not wait for: it goes with the next one, or
// after 20 µs.
func (c *Channel) SendLater(m wire.Message, sequence uint32) {
	if !c.localClosed && !c.closed {
		c.peer.sayLater(c.number, frameMessage, wire.Encode(m, sequence))
	}
}

// Leave ends the channel after what was sent, and written. Nothing is received any more;
// what is granted can be written until the other side leaves as well.
func (c *Channel) Leave() {
	if c.localClosed || c.closed {
		return
	}
	c.localClosed = true
	c.sendFin()
}

// sendFin tells the other side that this one has left, once its writes have landed: they go
// another way than the frame, which ends the other side's grants.
func (c *Channel) sendFin() {
	if !c.localClosed || c.finSent || c.writes > 0 {
		return
	}
	c.finSent = true
	c.peer.sendFrame(c.number, frameLeave)
	c.forget()
}

// Close is Leave: what was sent before is under way.
func (c *Channel) Close() { c.Leave() }

// Expect ends the Peer where the other side has not left the channel within Leaving: one
// that is told to, lives and does not leave would keep what it was granted for good.
func (c *Channel) Expect() {
	p := c.peer
	time.AfterFunc(p.config.Leaving, func() {
		p.loop.Do(func() {
			if !c.deserted {
				p.silent(p.control, p.config.Leaving, errNotLeft)
			}
		})
	})
}

// forget lets a channel go that both sides have left.
func (c *Channel) forget() {
	if !c.finSent || !c.deserted || c.closed {
		return
	}
	c.closed = true
	delete(c.peer.channels, c.number)
	if c.peer.extension != nil {
		c.peer.extension.Left(c)
	}
	if c.theirs() {
		c.peer.theirs--
	}
}

func (c *Channel) theirs() bool { return c.number%2 != c.peer.last%2 }

// end is the end of a channel whose Peer is dead.
func (c *Channel) end(why error) {
	told := c.localClosed
	c.localClosed, c.finSent, c.deserted = true, true, true
	c.forget()
	if !told {
		c.ended(why)
	}
}

// frame handles what came on the control stream; an error ends the Peer.
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
	if c == nil || c.deserted {
		return refused("a frame on channel %d, which is not open", f.channel)
	}
	switch f.kind {
	case frameMessage:
		m, sequence, err := wire.Decode(f.payload)
		if err == nil && !c.localClosed {
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
		c.deserted = true
		if c.localClosed {
			c.forget()
			return nil
		}
		c.Leave()
		c.ended(io.EOF)
	}
	return nil
}

// accept takes a channel of the other side.
func (p *Peer) accept(f frame) error {
	m, sequence, err := wire.Decode(f.payload)
	switch {
	case err != nil:
		return err
	case f.channel%2 == p.last%2 || f.channel <= p.lastOpen:
		return refused("channel %d is opened after channel %d", f.channel, p.lastOpen)
	case p.theirs >= p.config.Channels:
		return wire.Errorf(wire.StatusLimit, "%d channels are open, which is the limit", p.theirs)
	}
	c := &Channel{peer: p, number: f.channel}
	c.Handle(func(wire.Message, uint32, []int) {}, func(error) {})
	p.channels[c.number], p.lastOpen = c, f.channel
	p.theirs++
	p.config.Accept(c, m, sequence)
	return nil
}

// goodbye is the other side's end, with the reason.
func (p *Peer) goodbye(payload []byte) error {
	m, _, err := wire.Decode(payload)
	if err != nil {
		return err
	}
	failure, ok := m.(*wire.Failure)
	if !ok {
		return refused("a goodbye with a %T", m)
	}
	why := failure.Err()
	p.fail(wire.Errorf(wire.StatusPeerRelayDied, "%w", &PeerError{Peer: p.config.Name, Event: "ended its connections",
		Route: p.config.Route(p.control), Cause: why}), false)
	return nil
}
