package verbs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// byIWARP connects two sides over devices of iWARP.
func byIWARP(t *testing.T) *two {
	t.Helper()
	return connectedBy(t, true)
}

// atConnect passes a connect through f on the accepting side; the loop waits meanwhile.
type atConnect struct {
	*QPGroup
	f func(*connect)
}

func (a *atConnect) HandleMessage(c *tcp.Channel, payload []byte) error {
	if m, err := decode(payload); err == nil {
		if m, is := m.(*connect); is {
			a.f(m)
			payload = encode(m)
		}
	}
	return a.QPGroup.HandleMessage(c, payload)
}

func hearingConnect(f func(*connect)) hears {
	return func(nic string, s *QPGroup) tcp.Extension {
		if nic == "b0" {
			return &atConnect{s, f}
		}
		return s
	}
}

// stranger is a program at c0 with the connection manager, and without access to the control
// stream.
type stranger struct {
	t      *testing.T
	events *verbs.Events
	ends   []func() error
}

func newStranger(t *testing.T, library string) *stranger {
	t.Helper()
	l, err := verbs.OpenLibrary(library)
	s := &stranger{t: t}
	var m *verbs.Manager
	if err == nil {
		m, err = l.Manager()
	}
	if err == nil {
		s.events, err = m.NewEvents()
	}
	if err != nil {
		t.Fatal(err)
	}
	s.ends = append(s.ends, s.events.Close)
	return s
}

func (s *stranger) close() {
	for _, end := range slices.Backward(s.ends) {
		if err := end(); err != nil {
			s.t.Error(err)
		}
	}
}

func (s *stranger) id() *verbs.ID {
	id, err := s.events.NewID()
	if err != nil {
		s.t.Fatal(err)
	}
	s.ends = append(s.ends, id.Close)
	return id
}

func (s *stranger) next(want verbs.ConnectionKind) verbs.ConnectionEvent {
	e, err := next(s.t.Context(), s.events)
	if err != nil || e.Kind != want {
		s.t.Errorf("the stranger's connection: %v, %v; want %v", e.Kind, err, want)
	}
	return e
}

func (s *stranger) pair(id *verbs.ID) error {
	c, err := id.Context()
	if err != nil {
		return err
	}
	d, err := c.NewDomain()
	if err != nil {
		return err
	}
	s.ends = append(s.ends, d.Close)
	q, err := c.NewQueue(4)
	if err != nil {
		return err
	}
	s.ends = append(s.ends, q.Close)
	p, err := id.NewPair(d, verbs.PairConfig{Send: q, Recv: q, SendDepth: 1, RecvDepth: 1})
	if err == nil {
		s.ends = append(s.ends, p.Close)
	}
	return err
}

// answers accepts every connection request and returns the private data of the request, until ctx
// ends.
func (s *stranger) answers(ctx context.Context) {
	defer s.close()
	for {
		e, err := next(ctx, s.events)
		if err != nil {
			return
		}
		if e.Kind != verbs.ConnectRequest {
			continue
		}
		s.ends = append(s.ends, e.ID.Close)
		if err := s.pair(e.ID); err != nil {
			s.t.Error(err)
			continue
		}
		_ = e.ID.Accept(verbs.Connection{Private: e.Private}) // the requester may have closed after the first error
	}
}

// ask requests a connection and demands a rejection.
func (s *stranger) ask(port uint16, private []byte) verbs.ConnectionEvent {
	id := s.id()
	if err := id.ResolveAddress(netip.MustParseAddrPort("10.0.0.3:0"),
		netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), port), waitTime); err != nil {
		s.t.Fatal(err)
	}
	s.next(verbs.AddressResolved)
	if err := id.ResolveRoute(waitTime); err != nil {
		s.t.Fatal(err)
	}
	s.next(verbs.RouteResolved)
	if err := s.pair(id); err != nil {
		s.t.Fatal(err)
	}
	if err := id.Connect(verbs.Connection{Private: private}); err != nil {
		s.t.Fatal(err)
	}
	return s.next(verbs.Rejected)
}

// TestStrangerGetsNoQueuePair demands an immediate rejection without data for a connection request
// without the secret. The request blocks no queue pair, and no listener remains.
func TestStrangerGetsNoQueuePair(t *testing.T) {
	var w *two
	ready := make(chan struct{})
	w, settled := joining(t, true, hearingConnect(func(m *connect) {
		<-ready
		s := newStranger(t, w.rdma.Library())
		defer s.close()
		other := m.Secret
		other[secretBytes-1] ^= 1
		number := func(secret []byte, n uint32) []byte { return binary.LittleEndian.AppendUint32(slices.Clone(secret), n) }
		for name, private := range map[string][]byte{
			"nothing":                  nil,
			"another secret":           number(other[:], 0),
			"a part of the secret":     m.Secret[:secretBytes-1],
			"no queue pair":            m.Secret[:],
			"a queue pair that is not": number(m.Secret[:], 3),
			"a number that is none":    number(m.Secret[:], 1<<31),
		} {
			if e := s.ask(m.Ports[0], private); len(bytes.Trim(e.Private, "\x00")) > 0 {
				t.Errorf("%s: it was told %q", name, e.Private)
			}
		}
	}))
	close(ready)
	if err := receive(t, settled, "the queue pairs"); err != nil {
		t.Fatal(err)
	}
	refused, err := w.rdma.Calls("rdma_reject")
	if err != nil || len(refused) != 6 {
		t.Errorf("%d were refused, %v", len(refused), err)
	}
	listening := 0
	w.a.loop.Call(func() { listening = len(w.a.set.cm.listeners) })
	if listening > 0 {
		t.Errorf("%d still listen", listening)
	}
}

// TestWrongPeerIsRejected demands that a relay connects queue pairs only with its peer, and only to
// ports of relays.
func TestWrongPeerIsRejected(t *testing.T) {
	t.Run("who does not know the secret", func(t *testing.T) {
		var w *two
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ready, over := make(chan struct{}), make(chan struct{})
		w, settled := joining(t, true, hearingConnect(func(m *connect) {
			<-ready
			s := newStranger(t, w.rdma.Library())
			id := s.id()
			if err := id.Listen(netip.MustParseAddrPort("10.0.0.3:0"), 4); err != nil {
				t.Error(err)
			}
			w.b.set.theirs[0].GID = netip.MustParseAddr("10.0.0.3").As16()
			m.Ports[0] = id.Port()
			go func() { s.answers(ctx); close(over) }()
		}))
		close(ready)
		err := receive(t, settled, "the end of the negotiation")
		refusal := w.b.refusal()
		var failed *connectError
		if wire.StatusOf(err) != wire.StatusUnreachable || !strings.Contains(reason(err), reason(refusal)) ||
			!errors.Is(refusal, errWrongSecret) || !errors.As(refusal, &failed) || failed.NIC != "b0" ||
			failed.Address != "10.0.0.2" {
			t.Errorf("it ended with %v", err)
		}
		cancel()
		receive(t, over, "the stranger's end")
	})
	t.Run("a port of others", func(t *testing.T) {
		w, settled := joining(t, true, hearingConnect(func(m *connect) { m.Ports[0] = 22 }), func(_ string, c *Config) {
			c.Ports = address.Ports{First: 20000, Last: 20999}
		})
		err := receive(t, settled, "the end of the negotiation")
		refusal := w.b.refusal()
		var port *portError
		if !errors.As(refusal, &port) || port.Port != 22 || !strings.Contains(reason(err), reason(refusal)) {
			t.Errorf("it ended with %v", err)
		}
	})
	t.Run("the ports of relays", func(t *testing.T) {
		w, settled := joining(t, true, nil, func(_ string, c *Config) { c.Ports = address.Ports{First: 20000, Last: 20001} })
		if err := receive(t, settled, "the queue pairs"); err != nil {
			t.Fatal(err)
		}
		calls, err := w.rdma.Calls("rdma_listen")
		if err != nil || len(calls) != 1 || !slices.Contains([]string{"20000", "20001"}, calls[0].Arguments["port"]) {
			t.Errorf("%v, %v", calls, err)
		}
	})
}

// TestUnansweredIWARPFailsInTime demands that the negotiation ends in time with any connection
// manager on the other side.
func TestUnansweredIWARPFailsInTime(t *testing.T) {
	t.Parallel()
	w, settled := joining(t, true, hearingConnect(func(m *connect) { m.Ports[0] = 9 }))
	err := receive(t, settled, "the end of the negotiation")
	refusal := w.b.refusal()
	var failed *connectError
	var event *verbs.ConnectionError
	if !errors.As(refusal, &failed) || failed.NIC != "b0" || failed.Address != "10.0.0.2" || failed.PeerNIC != "a0" ||
		failed.PeerAddress != "10.0.0.1" || !errors.As(refusal, &event) || event.Kind != verbs.Rejected ||
		!strings.Contains(reason(err), reason(refusal)) {
		t.Errorf("the negotiation ended with %v, on the other side with %v", err, refusal)
	}
	// Without a request the waiting side gives up by itself.
	_, settled = joining(t, true, func(nic string, s *QPGroup) tcp.Extension {
		if nic == "b0" {
			return &deafTo{s}
		}
		return s
	}, func(nic string, c *Config) {
		if nic == "a0" {
			c.Time = time.Second
		}
	})
	var late *notConnectedError
	if err := receive(t, settled, "the end of the negotiation"); !errors.As(err, &late) || late.Limit != time.Second {
		t.Errorf("it ended with %v", err)
	}
}

// deafTo drops a connect.
type deafTo struct{ *QPGroup }

func (d *deafTo) HandleMessage(c *tcp.Channel, payload []byte) error {
	if binary.LittleEndian.Uint32(payload) == kindConnect {
		return nil
	}
	return d.QPGroup.HandleMessage(c, payload)
}

// granted returns the write of a grant, after the keys have arrived at the sender.
func (w *two) granted(t *testing.T, grant uint64) (write func(done func(error))) {
	t.Helper()
	from, to := w.a.memory(slot), w.b.memory(slot)
	w.b.loop.Call(func() {
		err := w.arrivals.AddMemory(7, to)
		if err == nil {
			err = w.arrivals.Grant(grant, 7, 0, slot)
		}
		if err != nil {
			t.Error(err)
		}
	})
	w.a.until("the ticket", func(*QPGroup) bool {
		_, there := w.link.tickets[grant]
		return there && w.link.regions[7] != nil
	})
	return func(done func(error)) {
		w.link.Write(transport.Target{Region: 7}, transport.Source{Place: from.At(0)}, slot, grant, done)
	}
}

// TestIWARPWriteEndsAtArrival demands that a write on iWARP ends for the sender when the receiver
// has confirmed the arrival: a closed channel has no outstanding writes.
func TestIWARPWriteEndsAtArrival(t *testing.T) {
	w := byIWARP(t)
	write := w.granted(t, 1)
	goOn, stands := make(chan struct{}), make(chan struct{})
	w.b.loop.Do(func() { close(stands); <-goOn })
	receive(t, stands, "the receiver's loop")
	done := make(chan error, 1)
	w.a.loop.Call(func() { write(func(err error) { done <- err }) })
	w.a.until("the end at the sender's NIC", func(*QPGroup) bool {
		return w.a.set.waitingParts == 0 && w.a.set.posted == 0 && w.a.set.unconfirmed == 1
	})
	select {
	case err := <-done:
		t.Errorf("it ended with %v before the receiver said so", err)
	default:
	}
	close(goOn)
	if err := receive(t, done, "the write's end"); err != nil {
		t.Error(err)
	}
	w.a.loop.Call(func() {
		if w.a.set.unconfirmed != 0 || len(w.link.unconfirmed) != 0 {
			t.Errorf("%d writes are left that nobody has heard of", w.a.set.unconfirmed)
		}
	})
}

// TestMissingConfirmationHarmsReceiverOnly demands that a receiver that closes without a
// confirmation, or sends a wrong confirmation, harms only its own Peer.
func TestMissingConfirmationHarmsReceiverOnly(t *testing.T) {
	t.Run("and leaves", func(t *testing.T) {
		w := byIWARP(t)
		write := w.granted(t, 1)
		w.b.loop.Call(func() {
			for _, k := range w.b.set.tickets {
				k.tells = false
			}
		})
		done := make(chan error, 1)
		w.a.loop.Call(func() { write(func(err error) { done <- err }) })
		receive(t, w.arrived, "the arrival")
		w.b.loop.Call(func() { w.arrivals.channel.Leave() })
		if err := receive(t, done, "the write's end"); err != nil {
			t.Error(err)
		}
	})
	t.Run("what is not so", func(t *testing.T) {
		w := byIWARP(t)
		w.b.loop.Call(func() { w.arrivals.channel.SendExtension(encode(&arrived{Kind: kindArrived, Ticket: 77})) })
		if err := receive(t, w.a.down, "the Peer's end"); wire.StatusOf(err) != wire.StatusMalformed {
			t.Errorf("the Peer ended with %v", err)
		}
	})
}

// TestEndedIWARPConnectionIsReplaced demands that a queue pair with other secrets replaces a queue
// pair whose connection has ended, and that the fault names the NIC.
func TestEndedIWARPConnectionIsReplaced(t *testing.T) {
	w := byIWARP(t)
	write := w.granted(t, 1)
	secrets := map[[secretBytes]byte]bool{}
	for _, e := range []*side{w.a, w.b} {
		e.loop.Call(func() { secrets[e.set.cm.own] = true })
	}
	w.b.loop.Call(func() {
		if err := w.b.set.pairs[1].id.Disconnect(); err != nil {
			t.Error(err)
		}
	})
	for _, e := range []*side{w.a, w.b} {
		e.until("others in place of the queue pairs", func(s *QPGroup) bool {
			return s.phase == running && s.reconnects == 1
		})
		e.loop.Call(func() {
			s := e.set
			secrets[s.cm.own] = true
			if len(s.cm.listeners) > 0 || s.parting {
				t.Errorf("%d listen still, and parting is %v", len(s.cm.listeners), s.parting)
			}
			if !strings.Contains(s.lastFault, "0 of host "+hostname()) || !strings.Contains(s.lastFault,
				"the connection of a queue pair has ended: disconnected") {
				t.Errorf("the fault is said to be %s", s.lastFault)
			}
		})
	}
	if len(secrets) != 4 {
		t.Errorf("%d secrets of two sides and two times", len(secrets))
	}
	done := make(chan error, 1)
	w.a.loop.Call(func() { write(func(err error) { done <- err }) })
	if err := receive(t, done, "the write's end"); err != nil {
		t.Error(err)
	}
}

// TestInvalidAcksGiveNoTicket demands that a message after a write that is not an ack gives no
// ticket.
func TestInvalidAcksGiveNoTicket(t *testing.T) {
	p := &qp{acks: acks{bytes: make([]byte, acksPerQP*ackBytes)}}
	binary.LittleEndian.PutUint32(p.acks.at(3), 9)
	for _, c := range []struct {
		is verbs.Completion
		ok bool
	}{
		{verbs.Completion{ID: ofReceive | 3, Op: verbs.Received, Bytes: ackBytes}, true},
		{verbs.Completion{ID: ofReceive | 3, Op: verbs.Received, Bytes: ackBytes - 1}, false},
		{verbs.Completion{ID: ofReceive | 3, Op: verbs.ReceivedImmediate, Immediate: 9}, false},
		{verbs.Completion{ID: ofReceive | receives, Op: verbs.Received, Bytes: ackBytes}, false},
	} {
		if n, ok := p.receivedTicket(&c.is); ok != c.ok || ok && n != 9 {
			t.Errorf("%+v tells %d, %v", c.is, n, ok)
		}
	}
}
