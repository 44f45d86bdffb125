package verbs

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// closeRemote closes the channel on the receiver and waits until the sender has processed the close.
func (w *two) closeRemote() {
	w.b.loop.Call(func() { w.arrivals.channel.Leave() })
	w.a.until("the channel's end", func(s *QPGroup) bool { return len(s.channels) == 0 })
}

// endsRemoteClosed demands that a write ends with errDeserted.
func endsRemoteClosed(t *testing.T, done <-chan error) {
	t.Helper()
	if err := receive(t, done, "the write's end"); !errors.Is(err, errRemoteClosed) {
		t.Errorf("it ends with %v", err)
	}
}

// TestWriteWithoutTicketOnClosedChannelFails demands that a write without a ticket ends when the
// receiver closes the channel.
func TestWriteWithoutTicketOnClosedChannelFails(t *testing.T) {
	w := connectedBy(t, false)
	w.granted(t, 1)
	from := w.a.memory(slot)
	done := make(chan error, 1)
	w.a.loop.Call(func() {
		w.link.Write(transport.Target{Region: 7}, transport.Source{Place: from.At(0)}, slot, 2,
			func(err error) { done <- err })
	})
	w.closeRemote()
	endsRemoteClosed(t, done)
}

// TestWriteAfterChannelClosedFails demands that a write with a ticket from before the close, and from
// before a reset with fewer links after it, ends.
func TestWriteAfterChannelClosedFails(t *testing.T) {
	t.Run("the queue pairs fall", func(t *testing.T) {
		w := connectedBy(t, false)
		write := w.granted(t, 1)
		w.closeRemote()
		done := make(chan error, 1)
		w.a.loop.Call(func() {
			w.a.set.fault(w.a.set.nics[0], "a test's fault")
			write(func(err error) { done <- err })
		})
		endsRemoteClosed(t, done)
	})
	t.Run("fewer links", func(t *testing.T) {
		w := connectedBy(t, false, twoNICs)
		write := w.granted(t, 1)
		w.closeRemote()
		c, d := deviceC, deviceD
		c.Down, d.Down = true, true
		if err := w.rdma.Set(ofKind(false, deviceA, deviceB, c, d)...); err != nil {
			t.Fatal(err)
		}
		w.a.until("one NIC", func(s *QPGroup) bool {
			return s.phase == running && s.reconnects > 0 && len(s.links) == 1 && s.protocol.agreement == agreementComplete
		})
		done := make(chan error, 1)
		w.a.loop.Call(func() { write(func(err error) { done <- err }) })
		endsRemoteClosed(t, done)
	})
}

// TestEventsOfOtherPortAreIgnored demands that an event of another port of a device resets no queue
// pairs.
func TestEventsOfOtherPortAreIgnored(t *testing.T) {
	w := connectedBy(t, false, twoNICs)
	w.a.loop.Call(func() { w.a.fabric.back = 10 * time.Millisecond })
	c := deviceC
	c.Down = true
	if err := w.rdma.Set(ofKind(false, deviceA, deviceB, c, deviceD)...); err != nil {
		t.Fatal(err)
	}
	w.a.until("one NIC", goBy("a0", "a0"))
	w.a.until("agreed", func(s *QPGroup) bool { return s.protocol.agreement == agreementComplete })
	before := 0
	w.a.loop.Call(func() {
		before = w.a.set.reconnects
		f := w.a.fabric
		f.event(f.nics[1], verbs.Event{Kind: verbs.PortUp, Port: f.nics[1].port + 1})
	})
	time.Sleep(500 * time.Millisecond)
	w.a.loop.Call(func() {
		if s := w.a.set; s.reconnects != before || s.phase != running {
			t.Errorf("given up for another port: %s", s.lastFault)
		}
	})
}

// TestReturningPortKeepsPeer demands that a reconnect for a returning port has the full time limit.
// Both NICs fail; one returns at once, and the other just before the limit of the fault, without
// writes between.
func TestReturningPortKeepsPeer(t *testing.T) {
	w := connectedBy(t, false, twoNICs, func(_ string, c *Config) { c.Reconnect = 2 * time.Second })
	w.a.loop.Call(func() { w.a.fabric.back = time.Second })
	set := func(a, c bool) {
		da, dc := deviceA, deviceC
		da.Down, dc.Down = a, c
		if err := w.rdma.Set(ofKind(false, da, deviceB, dc, deviceD)...); err != nil {
			t.Fatal(err)
		}
	}
	set(true, true)
	time.Sleep(time.Second)
	set(false, true)
	w.a.until("one NIC", goBy("a0", "a0"))
	w.a.until("agreed", func(s *QPGroup) bool { return s.protocol.agreement == agreementComplete })
	set(false, false)
	select {
	case err := <-w.a.down:
		t.Errorf("the Peer ends: %v", err)
	case err := <-w.b.down:
		t.Errorf("the Peer ends at b: %v", err)
	case <-time.After(4 * time.Second):
		w.a.until("both", goBy("a0", "c0"))
	}
}

// again handles connect a second time in place of use.
type again struct {
	*QPGroup
	last  []byte
	heard chan error
}

func (a *again) HandleMessage(c *tcp.Channel, payload []byte) error {
	switch m, err := decode(payload); {
	case err != nil:
	case a.last == nil:
		if _, is := m.(*connect); is {
			a.last = bytes.Clone(payload)
		}
	default:
		if m, is := m.(*short); is && m.Kind == kindUse {
			err := a.QPGroup.HandleMessage(c, a.last)
			a.heard <- err
			return err
		}
	}
	return a.QPGroup.HandleMessage(c, payload)
}

// TestSecondConnectIsRejected demands an error for a second connect: the connection would replace
// live queue pairs, and the group would lose track of them.
func TestSecondConnectIsRejected(t *testing.T) {
	for _, iwarp := range []bool{false, true} {
		heard := make(chan error, 1)
		joining(t, iwarp, func(nic string, s *QPGroup) tcp.Extension {
			if nic != "b0" {
				return s
			}
			return &again{QPGroup: s, heard: heard}
		})
		if err := receive(t, heard, "the second time"); wire.StatusOf(err) != wire.StatusMalformed {
			t.Errorf("iWARP %v: it is told %v", iwarp, err)
		}
	}
}
