package tcp

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// spinning keeps a loop from sleep, as copies in progress do.
type spinning struct{}

func (spinning) Poll() bool { return true }
func (spinning) Busy() bool { return true }
func (spinning) Arm() bool  { return true }
func (spinning) Disarm()    {}

// TestSpinningLoopReadsControlStream demands that a spinning loop reads the control stream itself.
// When the loop sleeps, each message wakes the reader again, also an earlier message.
func TestSpinningLoopReadsControlStream(t *testing.T) {
	heard := make(chan struct{}, 1)
	var b *side
	// mark returns the number of available bytes at which the kernel wakes the reader.
	mark := func() (bytes int) {
		var err error
		if closed := b.peer.bare.Control(func(fd uintptr) {
			bytes, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT)
		}); closed != nil || err != nil {
			t.Error(closed, err)
		}
		return bytes
	}
	a, b := pair(t, loopback, 1, 4<<10, Config{}, func(c *Channel, _ wire.Message, _ uint32) {
		c.Handle(func(m wire.Message, n uint32, _ []int) {
			if want := b.peer.intake.wakes.Load(); int(want) != mark() {
				t.Errorf("the kernel wakes the reader for %d bytes, want %d", mark(), want)
			}
			c.Send(m, n)
		}, func(error) {})
	})
	var c *Channel
	left := 0
	c = a.open(&wire.PeerHello{}, func(wire.Message, uint32, []int) {
		if left--; left > 0 {
			c.Send(&wire.PeerBell{}, 0)
			return
		}
		heard <- struct{}{}
	}, func(error) {})
	say := func(times int) {
		t.Helper()
		a.loop.Call(func() {
			left = times
			c.Send(&wire.PeerBell{}, 0)
		})
		receive(t, heard, "the answer")
	}
	b.loop.Call(func() { b.loop.Add(spinning{}) })
	testutil.Until(t, "a message that the loop has read", func() bool {
		say(200) // in short succession: the loop reads for activeInterval
		return b.peer.intake.reads.Load() > 0
	})
	b.loop.Call(func() { b.loop.Remove(spinning{}) })
	for range 20 {
		say(1)
		testutil.Until(t, "a low mark once the loop sleeps", func() bool { return mark() <= idleBytes })
	}
}

// TestHeartbeatsOfIdlePeerWakeNoReader demands that the pulse takes the heartbeats of an idle Peer, that
// the kernel wakes the reader for more bytes than a heartbeat, and that a message and a close arrive.
func TestHeartbeatsOfIdlePeerWakeNoReader(t *testing.T) {
	message, closed := make(chan struct{}, 1), make(chan error, 1)
	a, b := pair(t, loopback, 1, 4<<10, Config{Heartbeat: 20 * time.Millisecond, Dead: waitTime},
		func(c *Channel, _ wire.Message, _ uint32) {
			c.Handle(func(wire.Message, uint32, []int) { message <- struct{}{} }, func(err error) { closed <- err })
		})
	idle := func() {
		t.Helper()
		testutil.Until(t, "an idle Peer", func() bool {
			low := 0
			err := b.peer.bare.Control(func(fd uintptr) {
				low, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT)
			})
			return err == nil && low == idleBytes
		})
		heard := b.peer.intake.heard.Load()
		testutil.Until(t, "heartbeats", func() bool { return b.peer.intake.heard.Load() > heard+3 })
	}
	c := a.open(&wire.PeerHello{}, func(wire.Message, uint32, []int) {}, func(error) {})
	idle()
	a.loop.Call(func() { c.Send(&wire.PeerBell{}, 0) })
	receive(t, message, "the message")
	idle()
	a.loop.Call(func() { c.Leave() })
	receive(t, closed, "the close")
}

// TestAcknowledgementGoesWithAnswer demands that the acknowledgement of a write with the messages
// shares a write with the answer, or follows alone after a moment.
func TestAcknowledgementGoesWithAnswer(t *testing.T) {
	memory, source := make([]byte, 4<<10), make([]byte, 64)
	ready := make(chan *Channel, 1)
	answers := true
	a, b := pair(t, loopback, 1, 4<<10, Config{}, func(c *Channel, _ wire.Message, _ uint32) {
		var in *Arrivals
		in = c.Receive(func(number, _ uint64) {
			if err := in.Renew(number, 1, 0, uint64(len(memory))); err != nil {
				t.Error(err)
			}
			if answers {
				c.Send(&wire.PeerBell{}, 0)
			}
		}, func() {})
		in.add(1, memory)
		if err := in.Grant(1, 1, 0, uint64(len(memory))); err != nil {
			t.Error(err)
		}
		ready <- c
	})
	c := a.open(&wire.Done{}, ignore, func(error) {})
	receive(t, ready, "the grant")
	write := func() Figures {
		t.Helper()
		before, done := b.peer.Figures(), make(chan error, 1)
		a.loop.Call(func() {
			c.Link().Write(transport.Target{Region: 1}, hostPlace(source, 0), uint64(len(source)), 1,
				func(err error) { done <- err })
		})
		if err := receive(t, done, "the write's end"); err != nil {
			t.Fatal(err)
		}
		after := b.peer.Figures()
		return Figures{Messages: after.Messages - before.Messages, Batches: after.Batches - before.Batches}
	}
	if f := write(); f != (Figures{Messages: 2, Batches: 1}) {
		t.Errorf("an acknowledgement and an answer are %d messages in %d writes, want 2 in 1", f.Messages, f.Batches)
	}
	b.loop.Call(func() { answers = false })
	if f := write(); f != (Figures{Messages: 1, Batches: 1}) {
		t.Errorf("an acknowledgement without an answer is %d messages in %d writes, want 1 in 1", f.Messages, f.Batches)
	}
}
