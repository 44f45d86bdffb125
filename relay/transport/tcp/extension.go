package tcp

import (
	"net"
	"time"
)

// Extension carries the data of a Peer's channels by another transport, and exchanges messages with
// the peer's extension over the control stream. The messages keep their order among the messages of
// the Peer. The loop calls the methods.
type Extension interface {
	// HandleMessage handles a message of the peer's extension about a channel; c is nil for a message about
	// the Peer. The payload is valid during the call. An error ends the Peer.
	HandleMessage(c *Channel, payload []byte) error
	// ChannelClosed follows the close of a channel by both sides.
	ChannelClosed(c *Channel)
	// Down follows the death of the Peer. The extension calls gone when no transfer reads or writes
	// memory of the channels; then the channels end.
	Down(why error, gone func())
	// Alive returns for how long the peer counts as alive although the control stream is silent for
	// silence; 0 for no longer. Any goroutine calls Alive.
	Alive(silence time.Duration) time.Duration
}

// excused returns for how long a silent control stream is no sign of a dead peer.
func (p *Peer) excused() time.Duration {
	if p.extension == nil {
		return 0
	}
	return p.extension.Alive(p.config.silence())
}

// Outlast makes the kernel keep the connections for limit without an acknowledgement of the peer:
// the extension then decides about a silent peer.
func (p *Peer) Outlast(limit time.Duration) {
	for _, c := range append([]net.Conn{p.control}, p.data...) {
		tune(c, p.config.silence()+limit)
	}
}

// Extension returns the extension that carries the data; nil if the data streams do.
func (p *Peer) Extension() Extension { return p.extension }

// SendExtension sends a message of up to MaxExtension bytes to the peer's extension. Call SendExtension on the event
// loop.
func (p *Peer) SendExtension(payload []byte) { p.sendFrame(0, frameExtension, payload) }

// SendExtension is Peer.SendExtension for a message about a channel.
func (c *Channel) SendExtension(payload []byte) {
	if c.state == channelOpen {
		c.peer.sendFrame(c.number, frameExtension, payload)
	}
}

// Fail ends the Peer with an error for the clients of both sides. Any goroutine may call Fail.
func (p *Peer) Fail(why error) { p.fail(why, true) }

func (p *Peer) handleExtension(c *Channel, payload []byte) error {
	if p.extension == nil {
		return refused("message for an extension: the peer has none")
	}
	return p.extension.HandleMessage(c, payload)
}
