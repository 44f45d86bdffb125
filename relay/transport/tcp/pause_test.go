package tcp

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// stopped is a connection whose process stops, for longer than the deadline, when it is to read or
// write more than the header of a piece. A process that continues as late as its stopped peer also
// misses a further short deadline.
type stopped struct {
	net.Conn
	times  atomic.Int32  // number of stops
	paused chan struct{} // closed after a stop
	limit  atomic.Int64  // duration of the last deadline
}

const soon = time.Minute

func (c *stopped) SetReadDeadline(at time.Time) error {
	c.limit.Store(int64(time.Until(at)))
	return c.Conn.SetReadDeadline(at)
}

func (c *stopped) SetWriteDeadline(at time.Time) error {
	c.limit.Store(int64(time.Until(at)))
	return c.Conn.SetWriteDeadline(at)
}

// over reports whether a deadline passes while the process is stopped, or soon after.
func (c *stopped) over(b []byte) bool {
	if len(b) <= pieceHeader {
		return false
	}
	switch left := c.times.Add(-1); {
	case left == 0:
		close(c.paused)
		return true
	case left > 0:
		return true
	}
	return c.limit.Load() < int64(soon)
}

func (c *stopped) Read(b []byte) (int, error) {
	if c.over(b) {
		return 0, os.ErrDeadlineExceeded
	}
	return c.Conn.Read(b)
}

func (c *stopped) Write(b []byte) (int, error) {
	if c.over(b) {
		return 0, os.ErrDeadlineExceeded
	}
	return c.Conn.Write(b)
}

// pausing wraps the connections of a Peer, control first: the connection of a number stops, the
// rest wait without limit.
func pausing(stops int, times int32) (*stopped, func(net.Conn) net.Conn) {
	s := &stopped{paused: make(chan struct{})}
	s.times.Store(times)
	return s, func(c net.Conn) net.Conn {
		if stops--; stops == -1 {
			s.Conn = c
			return s
		}
		return patient{Conn: c}
	}
}

// silenceOf100Minutes has parts that are far from their end.
var silenceOf100Minutes = Config{Heartbeat: 20 * time.Millisecond, Dead: 100 * time.Minute, Eager: -1}

// TestPausedPeerDoesNotBlameOtherSide demands that a stopped process does not treat a peer as dead
// that sends after the pause.
func TestPausedPeerDoesNotBlameOtherSide(t *testing.T) {
	t.Parallel()
	conn, wrap := pausing(0, 1)
	e, r := against(t, 0, silenceOf100Minutes, wrap)
	r.listens()
	receive(t, conn.paused, "the pause")
	if err := r.say(0, frameBeat); err != nil {
		t.Fatalf("what came after the pause was not read: %v; the peer's end: %v", err, e.died())
	}
	if err := r.say(7, frameLeave); err != nil { // for a missing channel
		t.Fatal(err)
	}
	if err := e.died(); wire.StatusOf(err) != wire.StatusMalformed {
		t.Errorf("what came then was not read: %v", err)
	}
}

// TestPauseWithinPieceEndsNoPeer demands the same of a pause within a piece.
func TestPauseWithinPieceEndsNoPeer(t *testing.T) {
	t.Parallel()
	conn, wrap := pausing(1, 1)
	e, r := against(t, 1, silenceOf100Minutes, wrap)
	r.listens()
	memory, want := make([]byte, rawPiece), bytes.Repeat([]byte("lane"), rawPiece/4)
	arrived, _ := e.granting(r, 3, memory)
	p := piece{channel: 3, region: 1, number: 1, immediate: 1, length: rawPiece, bytes: rawPiece}
	if _, err := r.data[0].Write(p.header()); err != nil {
		t.Fatal(err)
	}
	receive(t, conn.paused, "the pause")
	if _, err := r.data[0].Write(want); err != nil {
		t.Fatalf("what came after the pause was not read: %v; the peer's end: %v", err, e.died())
	}
	if receive(t, arrived, "the write"); !bytes.Equal(memory, want) {
		t.Error("other bytes have landed")
	}
}

// TestPauseWhileSendingEndsNoPeer demands the same of a pause during a send: the process of the
// peer was stopped too, and did not read.
func TestPauseWhileSendingEndsNoPeer(t *testing.T) {
	t.Parallel()
	conn, wrap := pausing(1, 2) // the first with the header before, which was accepted
	e, r := against(t, 1, silenceOf100Minutes, wrap)
	r.listens()
	source := bytes.Repeat([]byte("lane"), rawPiece/4)
	c := e.open(&wire.Done{}, ignore, func(error) {})
	done := make(chan error, 1)
	e.loop.Call(func() {
		c.Link().Write(transport.Target{}, hostPlace(source, 0), rawPiece, 1, func(err error) { done <- err })
	})
	if _, err := io.ReadFull(r.data[0], make([]byte, pieceHeader)); err != nil {
		t.Fatal(err)
	}
	receive(t, conn.paused, "the pause")
	got := make([]byte, rawPiece)
	if n, err := io.ReadFull(r.data[0], got); err != nil || !bytes.Equal(got, source) {
		t.Fatalf("%d bytes came after the pause: %v; the peer's end: %v", n, err, e.died())
	}
	if err := r.say(c.number, frameLanded, number(1)); err != nil {
		t.Fatal(err)
	}
	if err := receive(t, done, "the write's end"); err != nil {
		t.Error(err)
	}
}

// TestPauseOfWriteCountsOneHeartbeat demands that the time of a write without progress is counted
// in heartbeats: a pause of any length has one at most.
func TestPauseOfWriteCountsOneHeartbeat(t *testing.T) {
	const beats = 3
	e, r := against(t, 1, Config{Heartbeat: time.Hour, Dead: beats * time.Hour})
	r.listens()
	look := func(n int) {
		for range n {
			e.peer.look() // in place of the writer, which has no heartbeat
		}
	}
	e.peer.underWay.Store(1)
	for range 3 { // with progress
		look(patience * beats)
		e.peer.moved()
		look(1)
	}
	if e.peer.isDying() {
		t.Fatal(e.died())
	}
	look(patience*beats + 1)
	r.close()
	if err := e.died(); !errors.Is(err, errUnacknowledged) {
		t.Error(err)
	}
}
