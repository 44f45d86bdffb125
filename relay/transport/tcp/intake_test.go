package tcp

import (
	"testing"

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
			if quiet := b.peer.intake.quiet; quiet != (mark() == quietBytes) {
				t.Errorf("the loop reads: %v, and the kernel wakes the reader for %d bytes", quiet, mark())
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
		testutil.Until(t, "a mark of one byte once the loop sleeps", func() bool { return mark() == 1 })
	}
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
