package tcp

import "github.com/peerlane/peerlane/relay/internal/statemachine"

// channelState is the state of a channel. This side closes a channel in two steps: first the channel
// accepts no more messages, and after the acknowledgement of its writes the peer gets the close.
type channelState uint8

const (
	channelOpen         channelState = iota
	channelClosing                   // closed by this side, with outstanding writes
	channelFinSent                   // closed by this side, and the peer has been sent the close
	channelRemoteClosed              // closed by the peer; this side has outstanding writes, or is about to send the close
	channelClosed                    // closed by both sides, or the Peer is dead
)

// remoteClosed reports whether the peer has closed the channel.
func (s channelState) remoteClosed() bool { return s == channelRemoteClosed || s == channelClosed }

// channelEvent is an event of a channel.
type channelEvent uint8

const (
	channelClose       channelEvent = iota // this side closes the channel
	channelDrained                         // no write of this side is outstanding
	channelRemoteClose                     // the peer has closed the channel
	channelDead                            // the Peer is dead
)

type channelAction uint8

const (
	channelNothing   channelAction = iota
	channelDrain                   // wait for the acknowledgement of this side's writes
	channelDrainEnd                // the same, and report the end to the owner
	channelFin                     // send the close to the peer
	channelFinForget               // the same, and remove the channel
	channelForget                  // remove the channel from the Peer
	channelForgetEnd               // the same, and report the end to the owner
)

// channelTable has the cells of a channel. Only an open channel reports its end: an owner that has closed
// the channel no longer waits. A channel closed by this side keeps its grants until the peer closes too.
var channelTable = statemachine.New("channel", statemachine.Names{
	States:  []string{"open", "closing", "fin sent", "remote closed", "closed"},
	Events:  []string{"close", "drained", "remote close", "dead"},
	Actions: []string{"none", "drain", "drain, end", "send fin", "send fin, forget", "forget", "forget, end"},
}, statemachine.Cells[channelState, channelEvent, channelAction]{
	channelOpen: {
		channelClose:       {Next: channelClosing, Action: channelDrain},
		channelDrained:     {Next: channelOpen},
		channelRemoteClose: {Next: channelRemoteClosed, Action: channelDrainEnd},
		channelDead:        {Next: channelClosed, Action: channelForgetEnd},
	},
	channelClosing: {
		channelClose:       {Next: channelClosing},
		channelDrained:     {Next: channelFinSent, Action: channelFin},
		channelRemoteClose: {Next: channelRemoteClosed},
		channelDead:        {Next: channelClosed, Action: channelForget},
	},
	channelFinSent: {
		channelClose:       {Next: channelFinSent},
		channelDrained:     {Next: channelFinSent},
		channelRemoteClose: {Next: channelClosed, Action: channelForget},
		channelDead:        {Next: channelClosed, Action: channelForget},
	},
	channelRemoteClosed: {
		channelClose:   {Next: channelRemoteClosed},
		channelDrained: {Next: channelClosed, Action: channelFinForget},
		channelDead:    {Next: channelClosed, Action: channelForget},
	},
	channelClosed: {
		channelClose: {Next: channelClosed},
	},
})

// transition applies an event and runs the action. why is the reason for the owner.
func (c *Channel) transition(e channelEvent, why error) {
	action := channelTable.Must(&c.state, e)
	switch action {
	case channelDrain, channelDrainEnd:
		c.drain()
	case channelFin, channelFinForget:
		c.peer.sendFrame(c.number, frameLeave)
	}
	switch action {
	case channelFinForget, channelForget, channelForgetEnd:
		c.forget()
	}
	switch action {
	case channelDrainEnd, channelForgetEnd:
		c.ended(why)
	}
}

// drain reports that no write of this side is outstanding, if so: writes use other connections than the
// close, and the close ends the peer's grants.
func (c *Channel) drain() {
	if c.writes == 0 {
		c.transition(channelDrained, nil)
	}
}
