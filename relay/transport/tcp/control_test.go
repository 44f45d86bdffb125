package tcp

import (
	"bytes"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// torn takes half of a long write, and the rest not within any deadline.
type torn struct {
	net.Conn
	took   chan int      // gets the whole's length when it has
	enough chan struct{} // ends the waiting
}

func (c *torn) Write(b []byte) (int, error) {
	if len(b) < 1<<10 {
		return c.Conn.Write(b)
	}
	n, err := c.Conn.Write(b[:len(b)/2])
	if err != nil {
		return n, err
	}
	c.took <- len(b)
	<-c.enough
	return n, os.ErrDeadlineExceeded
}

// A goodbye within a frame would be taken for the rest of it: for bytes of a write.
func TestNoGoodbyeWithinAFrame(t *testing.T) {
	t.Parallel()
	conn := &torn{took: make(chan int, 1), enough: make(chan struct{})}
	e, r := against(t, 0, Config{Heartbeat: 20 * time.Millisecond, Dead: time.Hour}, func(c net.Conn) net.Conn {
		conn.Conn = c
		return conn
	})
	said := make(chan []byte, 1)
	go func() {
		all, _ := io.ReadAll(r.control)
		said <- all
	}()
	source := bytes.Repeat([]byte{7}, 4<<10)
	c := e.open(&wire.Done{}, ignore, func(error) {})
	e.loop.Call(func() {
		c.Link().Write(transport.Target{}, hostPlace(source, 0), uint64(len(source)), 1, func(error) {})
	})
	whole := receive(t, conn.took, "half a write")
	e.peer.Close()
	close(conn.enough)
	all := receive(t, said, "the end of the connection")
	for len(all) > 0 {
		f, n, err := nextFrame(all)
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 { // half a frame
			break
		}
		if f.kind == frameEager || f.kind == frameGoodbye {
			t.Errorf("a frame of kind %d came, of %d bytes; half of a write was sent", f.kind, n)
		}
		all = all[n:]
	}
	// The frame may have had others before it in its write.
	if n := frameHeader + pieceHeader + len(source); len(all) != n-(whole-whole/2) {
		t.Errorf("%d bytes of a frame of %d came, in half a write of %d", len(all), n, whole)
	}
}

// written notes what each write has, and how many deadlines were set for them.
type written struct {
	net.Conn
	mu        sync.Mutex
	writes    [][]byte
	deadlines int
}

func (c *written) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.writes = append(c.writes, bytes.Clone(b))
	c.mu.Unlock()
	return c.Conn.Write(b)
}

func (c *written) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	c.deadlines++
	c.mu.Unlock()
	return c.Conn.SetWriteDeadline(t)
}

// However much waits, a write has no more than its deadline lets through, and whole frames.
func TestLongBatchesAreCut(t *testing.T) {
	conn := &written{}
	e, r := against(t, 0, Config{Heartbeat: time.Hour, Dead: 2 * time.Hour}, func(c net.Conn) net.Conn {
		conn.Conn = c
		return conn
	})
	c := e.open(&wire.Done{}, ignore, func(error) {})
	r.listens()
	const messages = 1000
	e.loop.Call(func() {
		for range messages {
			c.Send(&wire.Failure{}, 0)
		}
	})
	for range messages + 1 {
		receive(t, r.frames, "a message")
	}
	conn.mu.Lock()
	defer conn.mu.Unlock()
	if len(conn.writes) > 20 || conn.deadlines < len(conn.writes) {
		t.Errorf("%d writes, and %d deadlines", len(conn.writes), conn.deadlines)
	}
	for i, b := range conn.writes {
		if len(b) > 64<<10 {
			t.Errorf("write %d has %d bytes", i, len(b))
		}
		for len(b) > 0 {
			_, n, err := nextFrame(b)
			if n == 0 || err != nil {
				t.Fatalf("write %d ends within a frame: %v", i, err)
			}
			b = b[n:]
		}
	}
}

// A write that went with the messages can land when its channel is gone.
func TestAWriteLandsAfterItsChannel(t *testing.T) {
	e, r := against(t, 0, Config{Heartbeat: 20 * time.Millisecond, Dead: time.Hour})
	r.listens()
	ended, done := make(chan error, 1), make(chan error, 1)
	c := e.open(&wire.Done{}, ignore, func(err error) { ended <- err })
	e.loop.Call(func() {
		c.Link().Write(transport.Target{}, hostPlace([]byte("x"), 0), 1, 1, func(err error) { done <- err })
	})
	if err := r.say(c.number, frameLeave); err != nil {
		t.Fatal(err)
	}
	receive(t, ended, "the channel's end")
	if err := r.say(c.number, frameLanded, number(1)); err != nil {
		t.Fatal(err)
	}
	if err := receive(t, done, "the write's end"); err != nil {
		t.Error(err)
	}
}
