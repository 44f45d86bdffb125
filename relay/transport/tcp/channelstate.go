package tcp

// channelState is the state of a channel. This side closes a channel in two steps: first the channel
// accepts no more messages, and after the acknowledgement of its writes the peer gets the close.
type channelState uint8

const (
	channelOpen         channelState = iota
	channelClosing                   // closed by this side, with outstanding writes
	channelFinSent                   // closed by this side, and the peer has been sent the close
	channelRemoteClosed              // closed by the peer; this side has outstanding writes, or is about to send the close
	channelClosed                    // closed by both sides, or the Peer is dead
	channelStates

	channelImpossible = channelStates // marks the cells of impossible events
)

// channelEvent is an event of a channel.
type channelEvent uint8

const (
	channelLeft       channelEvent = iota // this side closes the channel
	channelSentFin                        // the close is sent
	channelRemoteLeft                     // the peer has closed the channel
	channelDead                           // the Peer is dead
	channelEvents
)

// channelTable has the next state for each state and event.
var channelTable = [channelStates][channelEvents]channelState{
	channelOpen: {
		channelLeft: channelClosing, channelSentFin: channelImpossible,
		channelRemoteLeft: channelRemoteClosed, channelDead: channelClosed,
	},
	channelClosing: {
		channelLeft: channelImpossible, channelSentFin: channelFinSent,
		channelRemoteLeft: channelRemoteClosed, channelDead: channelClosed,
	},
	channelFinSent: {
		channelLeft: channelImpossible, channelSentFin: channelImpossible,
		channelRemoteLeft: channelClosed, channelDead: channelClosed,
	},
	channelRemoteClosed: {
		channelLeft: channelImpossible, channelSentFin: channelClosed,
		channelRemoteLeft: channelImpossible, channelDead: channelClosed,
	},
	channelClosed: {
		channelLeft: channelImpossible, channelSentFin: channelImpossible,
		channelRemoteLeft: channelImpossible, channelDead: channelImpossible,
	},
}

// remoteClosed reports whether the peer has closed the channel.
func (s channelState) remoteClosed() bool { return s == channelRemoteClosed || s == channelClosed }

// transition applies an event, and removes the channel from the Peer when both sides have closed it. An
// impossible event has no effect.
func (c *Channel) transition(e channelEvent) {
	next := channelTable[c.state][e]
	if next == channelImpossible {
		return
	}
	c.state = next
	if next == channelClosed {
		c.forget()
	}
}
