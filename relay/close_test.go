package relay_test

import (
	"bytes"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// After the close of a session the program may reuse the memory at once: copies in flight have
// ended, and no copy starts.
func TestClosedSessionMemoryIsNotWritten(t *testing.T) {
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			p := connected(t, route)
			want := bytes.Repeat([]byte{0x5a}, pairBytes)
			const messages = 40
			var receives, sends []*client.Operation
			for range messages {
				receives = append(receives, must(p.receiving.Receive(p.target.Memory, 0, pairBytes)))
				sends = append(sends, must(p.sending.Send(p.source.Memory, 0, pairBytes)))
			}
			// Not the last: some are under way.
			if _, err := wait(t, receives[0], nil); err != nil {
				t.Fatal(err)
			}
			if err := p.b.Close(); err != nil {
				t.Fatal(err)
			}
			p.target.write(0, want)
			failed := 0
			for _, op := range receives {
				if _, err := op.Wait(within(t)); err != nil {
					demand(t, err, wire.StatusClosed)
					failed++
				}
			}
			if failed == 0 {
				t.Error("all was over before the session was closed, so that this test has seen nothing")
			}
			for _, op := range sends { // after the last end no process copies
				if _, err := op.Wait(within(t)); err != nil {
					demand(t, err, wire.StatusPeerClosed)
				}
			}
			time.Sleep(10 * time.Millisecond) // for a copy without a waiter
			if got := p.target.read(0, pairBytes); !bytes.Equal(got, want) {
				t.Errorf("byte %d was written after the session was closed", firstDifference(got, want))
			}
		})
	}
}

// A relay that is stopped, or that means ill, can write slots only, on route staged: no client of a
// further container waits for that relay in a close.
func TestCloseBesideStoppedPeerReturns(t *testing.T) {
	w := newSlowWorld(t)
	sends, receives, _ := join(t, w.clientA, 0, w.clientB, 3)
	sent, err := sends.Send(w.memoryA, 0, slowBytes, client.Tag(1))
	if err != nil {
		t.Fatal(err)
	}
	w.signal(unix.SIGSTOP)
	received, err := receives.Receive(w.memoryB, 0, slowBytes, client.Tag(1))
	if err != nil {
		t.Fatal(err)
	}
	if err := w.clientB.Close(); err != nil { // as it is after 30 seconds
		t.Error(err)
	}
	if _, err := received.Wait(within(t)); err != nil {
		demand(t, err, wire.StatusClosed)
	}
	w.signal(unix.SIGCONT)
	_, err = sent.Wait(within(t))
	demand(t, err, wire.StatusPeerClosed)
}

// A sender may have a connection before the listener's client gets the event. The close of the
// listener just before or just after is the reason for the connection's end.
func TestListenerClosedDuringConnectNamesTheReason(t *testing.T) {
	s := attach(t, newHost(t).relay("a", launch.RouteAuto, far(0, 1, "nic0")))
	for range 100 {
		l, err := s.Listen(within(t), uuid(t, 0))
		if err != nil {
			t.Fatal(err)
		}
		sending, err := s.Connect(within(t), uuid(t, 0), l.Handle())
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(within(t)); err != nil {
			t.Fatal(err)
		}
		<-sending.Down()
		demandOf(t, sending.Err(), wire.StatusPeerClosed, "container a")
		if err := sending.Close(within(t)); err != nil {
			t.Fatal(err)
		}
	}
}
