package tcp

import (
	"net"
	"time"
)

// Extension carries the data of a Peer's channels another way, and speaks with the other
// side's over the Peer's control stream: what it says keeps its place among the messages.
// Its methods are called on the loop.
type Extension interface {
	// Heard is called with what the other side's has said, of a channel or, with nil, of
	// all. The payload is the caller's again afterwards. An error ends the Peer.
	Heard(c *Channel, payload []byte) error
	// Left is called when both sides have left a channel.
	Left(c *Channel)
	// Down is called when the Peer has died. Its channels hear of it when gone is called:
	// when nothing can read or write their memory any more.
	Down(why error, gone func())
	// Alive returns for how long the other relay counts as alive although the control stream is
	// silent for that long, 0 for no longer. Any goroutine calls it.
	Alive(silence time.Duration) time.Duration
}

// excused returns for how long a silent control stream is no sign of a dead relay.
func (p *Peer) excused() time.Duration {
	if p.extension == nil {
		return 0
	}
	return p.extension.Alive(p.config.silence())
}

// Outlast has the kernel keep the connections although the other side acknowledges nothing for that
// long: the extension then decides about a silent relay.
func (p *Peer) Outlast(limit time.Duration) {
	for _, c := range append([]net.Conn{p.control}, p.data...) {
		tune(c, p.config.silence()+limit)
	}
}

// Extension is what carries the Peer's data, nil where its data streams do.
func (p *Peer) Extension() Extension { return p.extension }

// Tell says something to the other side's extension, of up to MaxExtension bytes. It
// belongs to the loop.
func (p *Peer) Tell(payload []byte) { p.sendFrame(0, frameExtension, payload) }

// Tell is Peer.Tell, of a channel.
func (c *Channel) Tell(payload []byte) {
	if !c.localClosed && !c.closed {
		c.peer.sendFrame(c.number, frameExtension, payload)
	}
}

// Fail ends the Peer: both sides' clients are told why. Any goroutine may.
func (p *Peer) Fail(why error) { p.fail(why, true) }

func (p *Peer) handleExtension(c *Channel, payload []byte) error {
	if p.extension == nil {
		return refused("a message for an extension, which there is none of")
	}
	return p.extension.Heard(c, payload)
}
