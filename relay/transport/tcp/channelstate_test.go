package tcp

import "testing"

// TestChannelStatesFollowTable compares every cell of the table with a list of the permitted
// transitions. An impossible event changes nothing, and the Peer forgets a channel on the transition
// to closed.
func TestChannelStatesFollowTable(t *testing.T) {
	type cell struct {
		state channelState
		event channelEvent
	}
	want := map[cell]channelState{
		{channelOpen, channelLeft}:            channelClosing,
		{channelOpen, channelRemoteLeft}:      channelRemoteClosed,
		{channelOpen, channelDead}:            channelClosed,
		{channelClosing, channelSentFin}:      channelFinSent,
		{channelClosing, channelRemoteLeft}:   channelRemoteClosed,
		{channelClosing, channelDead}:         channelClosed,
		{channelFinSent, channelRemoteLeft}:   channelClosed,
		{channelFinSent, channelDead}:         channelClosed,
		{channelRemoteClosed, channelSentFin}: channelClosed,
		{channelRemoteClosed, channelDead}:    channelClosed,
	}
	for state := range channelStates {
		for event := range channelEvents {
			e := newCarrier()
			p := &Peer{extension: e, channels: map[uint32]*Channel{}}
			c := &Channel{peer: p, number: 2, state: state}
			p.channels[2] = c
			c.transition(event)
			next, possible := want[cell{state, event}]
			if !possible {
				next = state
			}
			if c.state != next {
				t.Errorf("state %d, event %d: state %d, want %d", state, event, c.state, next)
			}
			ends := possible && next == channelClosed
			if _, kept := p.channels[2]; kept == ends || len(e.left) == 1 != ends {
				t.Errorf("state %d, event %d: the Peer has the channel: %v, the extension was told %d times", state, event, kept,
					len(e.left))
			}
		}
	}
}
