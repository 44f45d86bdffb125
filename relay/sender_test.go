package relay

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/transport"
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
			w := newWorld(t)
			s := w.link(wire.RouteStaged, w.mine).s
			op := w.post(s.connection, wire.OpSend, 0, 0, 8)
			s.hold(op)

			if c.delivered {
				if err := s.delivered(&wire.PeerDelivered{Send: 1}); err != nil {
					t.Fatal(err)
				}
			}
			s.shutdown(left)
			if _, ended := w.reader.Next(); ended {
				t.Fatal("the operation ended while the NIC could still read its bytes")
			}
			if c.nic != nil {
				s.broken(c.nic, "sending")
			} else {
				op.moved = op.length
			}
			s.unhold(op)
			got, ended := w.reader.Next()
			if !ended || got.Cookie != op.cookie || wire.Status(got.Status) != c.want {
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
				down = c.isDown()
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

// laterPort counts the messages that are sent at once and later.
type laterPort struct {
	transport.Control
	now, later int
}

func (p *laterPort) Send(wire.Message, uint32, ...int)       { p.now++ }
func (p *laterPort) SendLater(m wire.Message, number uint32) { p.later++ }

// With many messages on their way their ends are told together with the next grants; the last ones, for
// which a sender may wait, at once.
func TestEndsOfManyMessagesAreReportedLater(t *testing.T) {
	w := newWorld(t)
	c := w.connection(wire.RouteStaged)
	deafPort := c.port
	port := &laterPort{Control: deafPort}
	c.port = port
	r := newReceiver(c)
	var all []*arrival
	for i := range uint64(manyMatched + 3) {
		op := w.post(c, wire.OpReceive, 0, 0, 8)
		r.takeReceive(0) // as announce does
		a := &arrival{send: i + 1, length: 8, op: op, unended: &unended{op: op}}
		r.unended = append(r.unended, a.unended)
		r.matched[a.send] = a
		all = append(all, a)
	}
	for _, a := range all {
		r.arrived(a, 8)
	}
	if port.later != 3 || port.now != manyMatched {
		t.Errorf("%d ends are told later and %d at once, want 3 and %d", port.later, port.now, manyMatched)
	}
	c.port = deafPort
	w.leave(c)
	r.landingsEnded()
	w.over()
}
