package tcp

import (
	"errors"
	"slices"
	"testing"

	"github.com/peerlane/peerlane/relay/internal/statemachine/statetest"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

func TestStatesFollowReviewedCells(t *testing.T) {
	for _, m := range []statetest.Machine{statetest.Of(channelTable), statetest.Of(writeTable)} {
		t.Run(m.Title(), func(t *testing.T) {
			statetest.Check(t, m, "testdata/"+m.Title()+".txt", "../../../docs/states")
		})
	}
}

// TestChannelActionsActOnPeerAndOwner applies each possible event to a channel with and without an
// outstanding write, and compares the effect on the Peer, the extension and the owner.
func TestChannelActionsActOnPeerAndOwner(t *testing.T) {
	loop, err := poll.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { loop.Stop(); loop.Run() }) // Run closes the descriptors
	why := errors.New("the Peer is dead")
	for _, c := range []struct {
		state  channelState
		event  channelEvent
		writes int
		want   channelState
		fins   int
		gone   bool
		ended  []error
	}{
		{state: channelOpen, event: channelClose, want: channelFinSent, fins: 1},
		{state: channelOpen, event: channelClose, writes: 1, want: channelClosing},
		{state: channelOpen, event: channelDrained, want: channelOpen},
		{state: channelOpen, event: channelRemoteClose, want: channelClosed, fins: 1, gone: true, ended: []error{why}},
		{state: channelOpen, event: channelRemoteClose, writes: 1, want: channelRemoteClosed, ended: []error{why}},
		{state: channelOpen, event: channelDead, writes: 1, want: channelClosed, gone: true, ended: []error{why}},
		{state: channelClosing, event: channelDrained, want: channelFinSent, fins: 1},
		{state: channelClosing, event: channelClose, want: channelClosing},
		{state: channelClosing, event: channelRemoteClose, writes: 1, want: channelRemoteClosed},
		{state: channelClosing, event: channelDead, writes: 1, want: channelClosed, gone: true},
		{state: channelFinSent, event: channelClose, want: channelFinSent},
		{state: channelFinSent, event: channelDrained, want: channelFinSent},
		{state: channelFinSent, event: channelRemoteClose, want: channelClosed, gone: true},
		{state: channelFinSent, event: channelDead, want: channelClosed, gone: true},
		{state: channelRemoteClosed, event: channelClose, writes: 1, want: channelRemoteClosed},
		{state: channelRemoteClosed, event: channelDrained, want: channelClosed, fins: 1, gone: true},
		{state: channelRemoteClosed, event: channelDead, writes: 1, want: channelClosed, gone: true},
		{state: channelClosed, event: channelClose, want: channelClosed},
	} {
		e := newCarrier()
		p := &Peer{extension: e, channels: map[uint32]*Channel{}, config: Config{Waiting: 1 << 20}, loop: loop}
		var ended []error
		at := &Channel{peer: p, number: 2, state: c.state, writes: c.writes,
			ended: func(err error) { ended = append(ended, err) }, received: func(wire.Message, uint32, []int) {}}
		if c.state != channelClosed {
			p.channels[2] = at
		}
		at.transition(c.event, why)
		_, kept := p.channels[2]
		gone := c.state != channelClosed && !kept
		if at.state != c.want || int(p.frames) != c.fins || gone != c.gone || len(e.left) == 1 != c.gone ||
			!slices.Equal(ended, c.ended) {
			t.Errorf("%+v: state %d, %d frames, removed %v, %d reports to the extension, ended %v", c, at.state, p.frames, gone,
				len(e.left), ended)
		}
	}
}

// TestChannelClosedInReportOfItsLastWriteSendsOneFin closes a channel in the report of the last write,
// as a connection does that waited for the write.
func TestChannelClosedInReportOfItsLastWriteSendsOneFin(t *testing.T) {
	loop, err := poll.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { loop.Stop(); loop.Run() }) // Run closes the descriptors
	p := &Peer{channels: map[uint32]*Channel{}, writes: map[uint64]*write{}, config: Config{Waiting: 1 << 20}, loop: loop}
	c := &Channel{peer: p, number: 2, writes: 1}
	p.channels[2] = c
	w := &write{piece: piece{number: 1, channel: 2}, streamed: true, done: func(error) { c.Leave() }}
	p.writes[1] = w
	p.finish(w)
	if c.state != channelFinSent || p.frames != 1 {
		t.Errorf("state %d, %d frames, want %d and 1", c.state, p.frames, channelFinSent)
	}
}
