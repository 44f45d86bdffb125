package verbs

import (
	"errors"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// script makes calls fail or block until the end of the test.
func (w *two) script(t *testing.T, lines ...string) {
	t.Helper()
	if err := w.rdma.Script(lines...); err != nil {
		t.Error(err)
	}
}

// held waits for a blocked call.
func (w *two) held(t *testing.T) {
	t.Helper()
	for end := testutil.BeginFor(waitTime); ; time.Sleep(time.Millisecond) {
		calls, err := w.rdma.Calls("held")
		if err != nil {
			t.Fatal(err)
		}
		if len(calls) > 0 {
			return
		}
		if end.Over() {
			t.Fatalf("nothing blocks within %v", waitTime)
		}
	}
}

// holding returns two sides of iWARP. A call of the accepting side blocks from connect on.
func holding(t *testing.T, line string, f func(*connect)) (w *two, settled chan error) {
	t.Helper()
	ready := make(chan struct{})
	w, settled = joining(t, true, hearingConnect(func(m *connect) {
		<-ready
		w.script(t, line)
		f(m)
	}))
	t.Cleanup(func() { w.script(t) })
	close(ready)
	return w, settled
}

// TestBlockedConnectDelaysNoEnd demands that a blocked connect, as in a network that drops
// connection requests, delays neither the death of the Peer nor the end of the relay.
func TestBlockedConnectDelaysNoEnd(t *testing.T) {
	t.Parallel()
	w, _ := holding(t, "rdma_connect hold=1 device=b0", func(*connect) {})
	w.held(t)
	pulled := errors.New("a cable was pulled")
	w.b.peer.Fail(pulled)
	if err := receive(t, w.b.down, "the Peer's end"); !errors.Is(err, pulled) {
		t.Errorf("the Peer ended with %v", err)
	}
	w.b.fabric.ending = time.Millisecond
	ended := make(chan struct{})
	go func() { w.b.end(); close(ended) }()
	receive(t, ended, "the relay's end")
}

// TestBlockedDestroyKeepsLoopRunning demands that the slow release of an incomplete connection
// blocks no iteration of the loop and ends before the release of the NICs.
func TestBlockedDestroyKeepsLoopRunning(t *testing.T) {
	t.Parallel()
	w, settled := holding(t, "rdma_destroy_id hold=1 device=b0", func(m *connect) { m.Ports[0] = 9 })
	if err := receive(t, settled, "the end of the bringing up"); err == nil {
		t.Error("it came up")
	}
	w.held(t)
	turned := make(chan struct{})
	go func() { w.b.loop.Call(func() {}); close(turned) }()
	receive(t, turned, "a turn of the loop")
	w.script(t)
	w.b.fabric.ending = waitTime
	w.b.end()
	calls, err := w.rdma.Calls("ibv_dealloc_pd")
	if err != nil || len(calls) == 0 || calls[len(calls)-1].Arguments["="] != "0" {
		t.Errorf("the NIC was given back by %v, %v", calls, err)
	}
}

// TestIWARPMemoryHasNoRemoteRead demands that no registration permits remote reads: queue pairs of
// a connection manager would permit the peer to read.
func TestIWARPMemoryHasNoRemoteRead(t *testing.T) {
	w, settled := joining(t, true, nil, func(_ string, c *Config) {
		c.Flush = func(*device.Memory) bool { return true }
		c.Stages = func() bool { return true }
	})
	if err := receive(t, settled, "the queue pairs"); err != nil {
		t.Fatal(err)
	}
	calls, err := w.rdma.Calls("ibv_reg_mr", "ibv_reg_mr_iova2")
	if err != nil || len(calls) == 0 {
		t.Fatalf("%d registrations, %v", len(calls), err)
	}
	for _, c := range calls {
		access, err := strconv.ParseUint(c.Arguments["access"], 0, 32)
		if err != nil || verbs.Access(access)&verbs.RemoteRead != 0 {
			t.Errorf("%v, %v", c.Arguments, err)
		}
	}
}

// TestTicketOfTwoGrantsEndsPeer demands that a ticket for two grants ends the Peer and both writes:
// the first write could otherwise stay incomplete.
func TestTicketOfTwoGrantsEndsPeer(t *testing.T) {
	w := byIWARP(t)
	write := w.granted(t, 1)
	w.b.loop.Call(func() {
		for number, k := range w.b.set.tickets {
			k.tells = false
			w.arrivals.channel.SendExtension(encode(&ticketed{Kind: kindTicket, Ticket: number, Grant: 2}))
		}
	})
	w.a.until("the second ticket", func(*QPGroup) bool { _, there := w.link.tickets[2]; return there })
	from := w.a.memory(slot)
	done := make(chan error, 2)
	w.a.loop.Call(func() {
		write(func(err error) { done <- err })
		w.link.Write(transport.Target{Region: 7}, transport.Source{Place: from.At(0)}, slot, 2,
			func(err error) { done <- err })
	})
	for range 2 {
		if err := receive(t, done, "a write's end"); err == nil {
			t.Error("a write ended well")
		}
	}
	if err := receive(t, w.a.down, "the Peer's end"); wire.StatusOf(err) != wire.StatusMalformed {
		t.Errorf("the Peer ended with %v", err)
	}
}

// TestRefusingQueuePairWaitsForReason demands that a queue pair that refuses requests after the end
// of its connection posts nothing and waits for the peer's reason. Without a reason the write uses
// another queue pair.
func TestRefusingQueuePairWaitsForReason(t *testing.T) {
	w := byIWARP(t)
	write := w.granted(t, 1)
	before, err := w.rdma.Calls("ibv_post_send")
	if err != nil {
		t.Fatal(err)
	}
	w.script(t, "ibv_post_send errno=107 device=a0")
	pairs, done := 0, make(chan error, 1)
	w.a.loop.Call(func() {
		pairs = len(w.a.set.pairs)
		write(func(err error) { done <- err })
		for range 3 { // in one iteration, so that the clock of the loop stands
			w.a.set.poll()
		}
		if s := w.a.set; !s.parting || s.broken {
			t.Errorf("parting %v, broken %v", s.parting, s.broken)
		}
	})
	after, err := w.rdma.Calls("ibv_post_send")
	if err != nil {
		t.Fatal(err)
	}
	if n := len(after) - len(before); n == 0 || n > pairs {
		t.Errorf("%d requests were posted to %d queue pairs", n, pairs)
	}
	w.script(t)
	if err := receive(t, done, "the write's end"); err != nil {
		t.Error(err)
	}
	w.a.loop.Call(func() {
		if s := w.a.set; s.reconnects != 1 || !strings.Contains(s.lastFault, "not connected") {
			t.Errorf("connected anew %d times, after %s", s.reconnects, s.lastFault)
		}
	})
}

// TestMessageWithoutTicketEndsPeer demands that a message without a ticket ends the Peer once.
func TestMessageWithoutTicketEndsPeer(t *testing.T) {
	w := connected(t)
	w.granted(t, 1) // so that the receiver polls
	w.a.loop.Call(func() {
		p := w.a.set.pairs[0]
		if _, err := p.PostSend([]verbs.Send{{Op: verbs.SendMessage, ID: 1 << 62, Address: w.a.set.page0(),
			LKey: p.queue.first.LKey(), Flags: verbs.Signaled}}); err != nil {
			t.Error(err)
		}
	})
	if err := receive(t, w.b.down, "the Peer's end"); wire.StatusOf(err) != wire.StatusMalformed ||
		!errors.Is(err, errNoTicket) {
		t.Errorf("the Peer ended with %v", err)
	}
}

// TestLateNegotiationTimerIsIgnored demands that a late timer of the first negotiation changes
// nothing.
func TestLateNegotiationTimerIsIgnored(t *testing.T) {
	w := byIWARP(t)
	write := w.granted(t, 1)
	done := make(chan error, 1)
	w.a.loop.Call(func() {
		w.a.set.late()
		write(func(err error) { done <- err })
	})
	if err := receive(t, done, "the write's end"); err != nil {
		t.Fatal(err)
	}
	w.a.loop.Call(func() {
		if w.a.set.protocol.epoch > 0 || w.a.set.resetting() {
			t.Error("the queue pairs were given up")
		}
	})
}

// TestBlockedReconnectEndsInTime demands that a blocked connect during a reconnect ends the Peer
// and the writes at the limit.
func TestBlockedReconnectEndsInTime(t *testing.T) {
	t.Parallel()
	w := connectedBy(t, true, func(nic string, c *Config) {
		if c.Reconnect = waitTime; nic == "a0" {
			c.Reconnect = time.Second
		}
	})
	write := w.granted(t, 1)
	w.script(t, "rdma_connect hold=1 device=b0", "send status=12 device=a0")
	t.Cleanup(func() { w.script(t) })
	done := make(chan error, 1)
	w.a.loop.Call(func() { write(func(err error) { done <- err }) })
	w.held(t)
	for _, err := range []error{receive(t, done, "the write's end"), receive(t, w.a.down, "the Peer's end")} {
		var end *reconnectError
		if wire.StatusOf(err) != wire.StatusPeerRelayDied || !errors.As(err, &end) || end.Limit != time.Second {
			t.Errorf("it ended with %v", err)
		}
	}
	err := receive(t, w.b.down, "the other Peer's end")
	if wire.StatusOf(err) != wire.StatusPeerRelayDied || !strings.Contains(reason(err), "no reconnect within 1s") {
		t.Errorf("the other Peer ended with %v", err)
	}
}

// TestLateConfirmationDuringResetIsAccepted demands that a confirmation of a receiver on iWARP
// after the sender's reset counts as an arrival and is no error.
func TestLateConfirmationDuringResetIsAccepted(t *testing.T) {
	w := byIWARP(t)
	s := newStream(w)
	var before, after int
	stands, over := make(chan struct{}), make(chan struct{})
	goOn := sync.OnceFunc(func() { close(stands) })
	t.Cleanup(goOn)
	s.begin()
	go func() {
		defer close(over)
		w.b.loop.Call(func() { // the loop handles no event meanwhile
			before = len(w.arrived)
			<-stands
			w.b.set.drain()
			after = len(w.arrived)
		})
	}()
	w.a.until("writes that are sent", func(s *QPGroup) bool {
		return s.waitingParts == 0 && s.posted == 0 && s.unconfirmed > 0
	})
	w.a.loop.Call(func() { w.a.set.fault(w.a.set.nics[0], "a test's fault") })
	w.a.until("the queue pairs' end", func(s *QPGroup) bool { return s.protocol.release == releaseAwait })
	goOn()
	receive(t, over, "the receiver")
	if after == before {
		t.Error("nothing had arrived")
	}
	s.mustEnd(t)
	w.a.until("others in place of the queue pairs", func(s *QPGroup) bool { return s.reconnects == 1 })
}
