package relay_test

import (
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
)

func TestFiguresOfLanesAndConnectionsAreReported(t *testing.T) {
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			h := newHost(t)
			h.nic("nic0")
			h.nic("nic1")
			socketA, a := h.start("a", route, -1, far(0, 1, "nic0"))
			socketB, b := h.start("b", route, -1, far(3, 2, "nic1"))
			p := &pair{a: attach(t, socketA), b: attach(t, socketB)}
			p.source, p.target = exported(t, p.a, 0, pairBytes), exported(t, p.b, 3, pairBytes)
			p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
			for range 5 {
				p.move(t, 3<<20)
			}
			// A message that waits for a receive, longer than messages without grants, and a
			// failing message.
			const short = 64 << 10
			send, err := p.sending.Send(p.source.Memory, 0, short, client.Tag(1))
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(20 * time.Millisecond)
			report := a.Report()
			if f := report.Lanes[0].Sent; f.InFlight != 1 {
				t.Errorf("%d operations are in flight, want 1", f.InFlight)
			}
			receive, err := p.receiving.Receive(p.target.Memory, 0, short, client.Tag(1))
			if err != nil {
				t.Fatal(err)
			}
			for _, op := range []*client.Operation{send, receive} {
				if _, err := wait(t, op, nil); err != nil {
					t.Fatal(err)
				}
			}
			cancelled, err := p.receiving.Receive(p.target.Memory, 0, 8, client.Tag(2))
			if err != nil {
				t.Fatal(err)
			}
			if err := cancelled.Cancel(); err != nil {
				t.Fatal(err)
			}
			_, _ = cancelled.Wait(within(t))

			later := a.Report()
			if len(later.Lanes) != 1 || len(later.Connections) != 1 || later.MoreConnections != 0 || later.At <= report.At {
				t.Fatalf("the sender's relay reports %+v", later)
			}
			const bytes = 5*3<<20 + short
			for what, f := range map[string]launch.Figures{"lane": later.Lanes[0].Sent,
				"connection": later.Connections[0].Figures} {
				if f.Operations != 6 || f.Bytes != bytes || f.Failed != 0 || f.InFlight != 0 {
					t.Errorf("the %s has %+v, want 6 operations and %d bytes", what, f, bytes)
				}
				total := uint64(0)
				for _, n := range f.Latency {
					total += n.Count
				}
				if total != 6 || f.Percentile(999) < 15*time.Millisecond || f.Percentile(500) > f.Percentile(999) {
					t.Errorf("the %s's operations took %+v; one waited for 20 ms", what, f.Latency)
				}
				waited := time.Duration(0)
				for _, s := range f.Stalls {
					if s.Cause == launch.StallNoGrant && s.Count == 6 {
						waited = s.Time
					}
				}
				if waited < 15*time.Millisecond {
					t.Errorf("the %s's stalls are %+v; 6 operations waited for grants, one of them 20 ms", what, f.Stalls)
				}
			}
			if c := later.Connections[0]; !c.Sends || c.Route != route || c.GPU != devices[0].BusID ||
				!strings.HasPrefix(c.Peer, "container b") {
				t.Errorf("the connection is %+v", c)
			}
			received := b.Report().Lanes[0].Received
			if received.Operations != 7 || received.Failed != 1 || received.Bytes != bytes {
				t.Errorf("the receiver's lane has %+v, want 7 operations, one of which failed", received)
			}
			if d := later.Lanes[0].Sent.Since(report.Lanes[0].Sent); d.Operations != 1 || d.Bytes != short ||
				len(d.Latency) != 1 {
				t.Errorf("between the reports was %+v", d)
			}
		})
	}
}

// Messages that find no slot are counted, and for how long.
func TestSlotStallsAreCountedAndTimed(t *testing.T) {
	h := newHost(t)
	h.nic("nic0")
	h.nic("nic1")
	h.change = func(c *launch.Config) { c.Slots, c.SlotBytes = 1, 64<<10 }
	socketA, a := h.start("a", launch.RouteStaged, -1, far(0, 1, "nic0"))
	p := &pair{a: attach(t, socketA), b: attach(t, h.relay("b", launch.RouteStaged, far(3, 2, "nic1")))}
	p.source, p.target = exported(t, p.a, 0, pairBytes), exported(t, p.b, 3, pairBytes)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.move(t, 4<<20)
	stalls := map[string]launch.Stall{}
	for _, s := range a.Report().Lanes[0].Sent.Stalls {
		stalls[s.Cause] = s
	}
	if s := stalls[launch.StallNoGrant]; s.Count != 1 {
		t.Errorf("the stalls are %+v", stalls)
	}
	if stalls[launch.StallRingFull].Count > 0 {
		t.Errorf("a ring that is empty and a NIC that is not paced stall: %+v", stalls)
	}
}

// A report fits into a datagram, with the maximum number of connections.
func TestFiguresOfManyConnectionsFitDatagram(t *testing.T) {
	h := newHost(t)
	socketA, a := h.start("a", launch.RouteDirect, -1, far(0, 1, "nic0"))
	s, other := attach(t, socketA), attach(t, h.relay("b", launch.RouteDirect, far(3, 2, "nic1")))
	source, target := exported(t, s, 0, 2<<20), exported(t, other, 3, 2<<20)
	const connections = 40
	for range connections {
		p := &pair{source: source, target: target}
		p.sending, p.receiving, _ = join(t, s, 0, other, 3)
		p.move(t, 8)
	}
	r := a.Report()
	if shown := len(r.Connections); shown+r.MoreConnections != connections || shown > relay.ToldConnections || shown == 0 {
		t.Errorf("of %d connections %d are shown and %d are not", connections, shown, r.MoreConnections)
	}
}
