package relay

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/ring"
	"github.com/peerlane/peerlane/relay/wire"
)

// A receiver may get a message, and leave, before the sender's NIC has reported the completion: the
// message was delivered nevertheless.
func TestDeliveredMessageAfterDisconnectSucceeds(t *testing.T) {
	left := wire.Errorf(wire.StatusPeerClosed, "the receiver ended its session")
	for _, c := range []struct {
		name      string
		delivered bool
		nic       error // its word, after the connection's end
		want      wire.Status
	}{
		{"delivered", true, nil, wire.StatusOK},
		{"not delivered", false, nil, wire.StatusPeerClosed},
		{"delivered, says a liar", true, errors.New("broke off"), wire.StatusPeerClosed},
	} {
		t.Run(c.name, func(t *testing.T) {
			completions, err := ring.NewRelay()
			if err != nil {
				t.Fatal(err)
			}
			defer completions.Close()
			reader, err := ring.OpenClient(completions.FDs())
			if err != nil {
				t.Fatal(err)
			}
			defer reader.Close()
			// An ended session sends no answer, nor does its connection without a port: the rest is
			// the state under test.
			owner := &session{relay: &Relay{}, ring: completions, ended: left}
			s := newSender(&connection{session: owner, portDown: true}, nil)
			op := &operation{session: owner, cookie: 7, length: 8, signal: wire.NoTimeline, send: 1}
			s.active[op.send] = op
			s.hold(op)

			if c.delivered {
				if err := s.delivered(&wire.PeerDelivered{Send: 1}); err != nil {
					t.Fatal(err)
				}
			}
			s.shutdown(left)
			if _, ended := reader.Next(); ended {
				t.Fatal("the operation ended while the NIC could still read its bytes")
			}
			if c.nic != nil {
				s.broken(c.nic, "sending")
			} else {
				op.moved = op.length
			}
			s.unhold(op)
			got, ended := reader.Next()
			if !ended || got.Cookie != 7 || wire.Status(got.Status) != c.want {
				t.Errorf("ended %v with %+v, want status %v", ended, got, c.want)
			}
		})
	}
}

// A receiver without a common protocol ends when the sender has closed and can write no more.
func TestReceiverWithoutProtocolEndsWithItsSender(t *testing.T) {
	w := newWorld(t)
	loop, err := poll.New()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { loop.Run(); close(ended) }()
	w.relay.loop = loop
	ours, theirs, err := packet.Pair()
	if err != nil {
		t.Fatal(err)
	}
	left := func() (n int) {
		loop.Call(func() { n = len(w.session.connections) })
		return n
	}
	loop.Call(func() {
		r := newReceiver(w.connection(wire.RouteDirect))
		_, err = r.open(ours)
	})
	if err == nil {
		err = unix.Sendmsg(theirs, []byte("nothing"), nil, nil, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	for down := false; !down; {
		loop.Call(func() {
			for _, c := range w.session.connections {
				down = c.down != nil
			}
		})
	}
	if left() != 1 {
		t.Error("it is gone while its sender may write")
	}
	unix.Close(theirs)
	testutil.Until(t, "it is still there", func() bool { return left() <= 0 })
	loop.Stop()
	<-ended
}

// On route staged a sender's relay cannot say that a grant is filled: only its NIC can.
func TestSenderOnRouteStagedCannotReportGrantFilled(t *testing.T) {
	r := newReceiver(newWorld(t).connection(wire.RouteStaged))
	a := &arrival{send: 1, length: 1 << 20}
	r.matched[a.send], r.grants[1] = a, &grant{arrival: a, length: 4096}
	if err := r.written(1); wire.StatusOf(err) != wire.StatusMalformed || r.grants[1] == nil {
		t.Errorf("the relay says %v, and has the grants %v", err, r.grants)
	}
}
