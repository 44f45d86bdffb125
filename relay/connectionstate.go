package relay

import (
	"github.com/peerlane/peerlane/relay/internal/statemachine"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/wire"
)

// connectionState is the state of a connection. A connection that is down waits until nothing can access
// a memory of either side, and then closes: the peer frees its memory after the close.
type connectionState uint8

const (
	connectionOpening      connectionState = iota // handshake; not in the session
	connectionOpen                                // in the session
	connectionClosing                             // down; the port of the remote relay is open
	connectionRemoteClosed                        // down, and the remote relay has closed the port: it writes no more
	connectionClosed                              // no resource is left
)

// connectionEvent is an event of a connection.
type connectionEvent uint8

const (
	connectionAdd        connectionEvent = iota // the session has the connection
	connectionAbandon                           // the session has gone before
	connectionShutdown                          // one of the two sides ends the connection
	connectionPortClosed                        // the remote relay has closed the port, or its host is lost
	connectionIdle                              // an access has ended
	connectionDrained                           // no access is in flight, and none can begin
)

type connectionAction uint8

const (
	connectionNothing connectionAction = iota
	connectionStop                     // tell the peer, end the operations, and close if drained
	connectionFail                     // the same without the peer
	connectionSettle                   // close if drained
	connectionFree                     // remove from the session and free the resources
	connectionReject                   // tell the peer, and free the resources
)

// connectionTable has the cells of a connection.
var connectionTable = statemachine.New("connection", statemachine.Names{
	States:  []string{"opening", "open", "closing", "remote closed", "closed"},
	Events:  []string{"added", "abandoned", "shut down", "port closed", "idle", "drained"},
	Actions: []string{"none", "stop", "fail", "settle", "free", "reject"},
}, statemachine.Cells[connectionState, connectionEvent, connectionAction]{
	connectionOpening: {
		connectionAdd:     {Next: connectionOpen},
		connectionAbandon: {Next: connectionClosed, Action: connectionReject},
	},
	connectionOpen: {
		connectionShutdown:   {Next: connectionClosing, Action: connectionStop},
		connectionPortClosed: {Next: connectionRemoteClosed, Action: connectionFail},
		connectionIdle:       {Next: connectionOpen},
	},
	connectionClosing: {
		connectionShutdown:   {Next: connectionClosing},
		connectionPortClosed: {Next: connectionRemoteClosed, Action: connectionSettle},
		connectionIdle:       {Next: connectionClosing, Action: connectionSettle},
		connectionDrained:    {Next: connectionClosed, Action: connectionFree},
	},
	connectionRemoteClosed: {
		connectionShutdown: {Next: connectionRemoteClosed},
		connectionIdle:     {Next: connectionRemoteClosed, Action: connectionSettle},
		connectionDrained:  {Next: connectionClosed, Action: connectionFree},
	},
	connectionClosed: {
		connectionShutdown:   {Next: connectionClosed},
		connectionPortClosed: {Next: connectionClosed},
		connectionIdle:       {Next: connectionClosed},
	},
})

// isDown reports whether the connection is down. c.down has the reason.
func (c *connection) isDown() bool { return c.state >= connectionClosing }

// portOpen reports whether the remote relay can still send and write.
func (c *connection) portOpen() bool {
	return c.state == connectionOpen || c.state == connectionClosing
}

// apply applies an event and runs the action. why is the reason for the end.
func (c *connection) apply(e connectionEvent, why *wire.Error) {
	switch connectionTable.Must(&c.state, e) {
	case connectionStop:
		c.down = why
		c.tellPeer()
		c.fail()
	case connectionFail:
		c.down = why
		c.fail()
	case connectionSettle:
		if c.side.drained() {
			c.apply(connectionDrained, nil)
		}
	case connectionFree:
		delete(c.session.connections, c.number)
		c.leave()
		c.free()
		c.session.settle()
	case connectionReject:
		c.down = why
		c.tellPeer()
		c.fail()
		c.free()
	}
}

// tellPeer sends the reason of a shutdown to the remote relay.
func (c *connection) tellPeer() {
	closing := &wire.PeerClose{Status: uint32(c.down.Status)}
	wire.SetReason(closing.Reason[:], c.down)
	c.port.Send(closing, 0)
	if channel, ok := c.port.(*tcp.Channel); ok && !c.sends() {
		channel.Expect() // the sender may write until then
	}
}

// fail tells the client that the connection is down, and ends the operations: those with an access in
// flight after the access.
func (c *connection) fail() {
	why := c.down
	delete(c.session.waits, c)
	if !c.hidden {
		event := &wire.ConnectionDown{Connection: c.number, Status: uint32(why.Status)}
		wire.SetReason(event.Reason[:], why)
		c.session.reply(event, 0)
	}
	posted := c.posted
	c.posted = nil
	for _, op := range posted {
		op.finish(why.Status)
	}
	c.side.stop(why)
	c.settle()
	if c.twin != nil {
		c.twin.shutdown(why)
	}
}

// free releases the resources. The sender's close tells the receiver that nothing writes any more; the
// receiver has waited for it. Queued messages go first, the reason last.
func (c *connection) free() {
	c.session.relay.release(c.quota)
	c.port.Leave()
	c.side.free()
}
