package tcp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// torn accepts half of a long write, and the rest within no deadline.
type torn struct {
	net.Conn
	took   chan int      // receives the length of the whole write
	enough chan struct{} // ends the wait
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

// TestGoodbyeWaitsForEndOfFrame demands no goodbye within a frame: the peer would read the goodbye
// as bytes of the frame's write.
func TestGoodbyeWaitsForEndOfFrame(t *testing.T) {
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
	if e.peer.outbox.pen.TryLock() {
		t.Error("somebody else could write behind half a frame")
	}
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
	// Other frames may precede the frame in the write.
	if n := frameHeader + pieceHeader + len(source); len(all) != n-(whole-whole/2) {
		t.Errorf("%d bytes of a frame of %d came, in half a write of %d", len(all), n, whole)
	}
}

// written records the bytes of each write and the number of deadlines.
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

// TestLongBatchesAreCut demands that each write has whole frames and at most maxBatch bytes,
// however many bytes wait.
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

// TestEagerWriteAfterChannelEndLands demands that a write with the messages arrives after the end
// of its channel.
func TestEagerWriteAfterChannelEndLands(t *testing.T) {
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

// TestStoppedLoopSendsNoHeartbeats demands that a relay with a stopped loop sends no heartbeats,
// although its connections work, and continues with the loop.
func TestStoppedLoopSendsNoHeartbeats(t *testing.T) {
	e, r := against(t, 0, Config{Heartbeat: time.Millisecond, Dead: 10 * time.Millisecond}, func(c net.Conn) net.Conn {
		return patient{Conn: c}
	})
	header := make([]byte, frameHeader)
	beat := func(within time.Duration) error {
		if err := r.control.SetReadDeadline(time.Now().Add(within)); err != nil {
			t.Fatal(err)
		}
		_, err := io.ReadFull(r.control, header)
		return err
	}
	for range 3 * 10 * standing { // far longer than the limit without the loop
		if err := beat(waitTime); err != nil {
			t.Fatal(err)
		}
	}
	release := make(chan struct{})
	e.loop.Do(func() { <-release })
	var quiet error
	for end := testutil.BeginFor(waitTime); quiet == nil && !end.Over(); {
		quiet = beat(time.Second)
	}
	close(release)
	if !errors.Is(quiet, os.ErrDeadlineExceeded) {
		t.Fatalf("it says something all the time (%v)", quiet)
	}
	if err := beat(waitTime); err != nil {
		t.Error(err)
	}
}

// TestChannelNotLeftInTimeEndsPeer demands the end of a Peer whose live peer does not close a
// channel in time, and not of a Peer whose peer does.
func TestChannelNotLeftInTimeEndsPeer(t *testing.T) {
	const leaving = 100 * time.Millisecond
	e, r := against(t, 0, Config{Heartbeat: time.Hour, Dead: time.Hour, Leaving: leaving})
	r.listens()
	ended := make(chan error, 1)
	left := e.open(&wire.Done{}, ignore, func(err error) { ended <- err })
	if err := r.say(left.number, frameLeave); err != nil {
		t.Fatal(err)
	}
	if err := receive(t, ended, "the channel's end"); err != io.EOF {
		t.Fatal(err)
	}
	e.loop.Call(left.Expect)
	time.Sleep(leaving / 2)
	stays := e.open(&wire.Done{}, ignore, func(err error) { ended <- err })
	began := time.Now()
	e.loop.Call(stays.Expect)
	err := receive(t, ended, "the end of who does not leave")
	if wire.StatusOf(err) != wire.StatusPeerRelayDied || !errors.Is(err, errNotLeft) {
		t.Error(err)
	}
	if took := time.Since(began); took < leaving {
		t.Errorf("it came after %v", took)
	}
}

// TestFullSocketKeepsFramesWhole demands that the writer sends the bytes that a full socket
// refuses: no byte is lost, repeated or reordered, and no frame is torn.
func TestFullSocketKeepsFramesWhole(t *testing.T) {
	ours, theirs := loopback(t)
	r := &raw{tb: t, control: ours, frames: make(chan frame, 1000)}
	t.Cleanup(r.close)
	e := newSide(t, &Streams{piece: rawPiece, ours: rawPiece, control: theirs},
		Config{Heartbeat: time.Hour, Dead: 2 * time.Hour})
	c := e.open(&wire.Done{}, ignore, func(error) {})
	// Until many bytes wait for room in the socket.
	sent, waits := uint64(0), 0
	for sent < 10_000_000 && waits < 100<<10 {
		e.loop.Call(func() {
			for range 100 {
				c.Send(&wire.PeerWritten{Grant: sent}, 0)
				sent++
			}
		})
		e.peer.outbox.mu.Lock()
		waits = len(e.peer.outbox.data)
		e.peer.outbox.mu.Unlock()
	}
	if waits == 0 || e.peer.bare == nil {
		t.Fatalf("the socket has taken all of %d messages", sent)
	}
	r.listens()
	for n := uint64(0); n < sent; {
		f := receive(t, r.frames, "a message")
		if f.kind != frameMessage {
			continue
		}
		m, _, err := wire.Decode(f.payload)
		if err != nil {
			t.Fatal(err)
		}
		if got := m.(*wire.PeerWritten).Grant; got != n {
			t.Fatalf("message %d came in the place of %d", got, n)
		}
		n++
	}
	if f := e.peer.Figures(); f.Messages != sent+1 || f.Batches > sent/100+10 {
		t.Errorf("%d messages in %d writes, want %d, those of a turn together", f.Messages, f.Batches, sent+1)
	}
}

// TestConcurrentSendersLoseNothing demands that the frames of concurrent senders arrive, whichever
// goroutine writes.
func TestConcurrentSendersLoseNothing(t *testing.T) {
	ours, theirs := loopback(t)
	r := &raw{tb: t, control: ours, frames: make(chan frame, 1000)}
	t.Cleanup(r.close)
	e := newSide(t, &Streams{piece: rawPiece, ours: rawPiece, control: theirs}, Config{Heartbeat: 10 * time.Millisecond,
		Dead: time.Hour})
	r.listens()
	const speakers, each = 8, 2000
	for i := range uint32(speakers) {
		go func() {
			for n := range uint64(each) {
				e.peer.acknowledge(1+i, n)
			}
		}()
	}
	var next [speakers]uint64
	for range speakers * each {
		f := receive(t, r.frames, "an acknowledgement")
		for f.kind != frameLanded {
			f = receive(t, r.frames, "an acknowledgement")
		}
		if n := binary.LittleEndian.Uint64(f.payload); n != next[f.channel-1] {
			t.Fatalf("speaker %d said %d in the place of %d", f.channel, n, next[f.channel-1])
		}
		next[f.channel-1]++
	}
}

// TestAcknowledgementsOfIterationAreBatched demands that acknowledgements of short writes in one
// iteration share a write.
func TestAcknowledgementsOfIterationAreBatched(t *testing.T) {
	const n, rounds = 64, 20
	memory, source := make([]byte, n*64), make([]byte, n*64)
	ready := make(chan *Arrivals, 1)
	a, b := pair(t, loopback, 1, 4<<10, Config{Heartbeat: time.Hour, Dead: 2 * time.Hour},
		func(c *Channel, _ wire.Message, _ uint32) {
			in := c.Receive(func(uint64, uint64) {}, func() {})
			in.add(1, memory)
			ready <- in
		})
	c := a.open(&wire.Done{}, ignore, func(error) {})
	in := receive(t, ready, "the channel")
	before, number := b.peer.Figures(), uint64(0)
	for range rounds {
		done := make(chan error, n)
		b.loop.Call(func() {
			for i := range uint64(n) {
				if err := in.Grant(number+i+1, 1, i*64, 64); err != nil {
					t.Error(err)
				}
			}
		})
		a.loop.Call(func() {
			for i := range uint64(n) {
				number++
				c.Link().Write(transport.Target{Region: 1, Offset: i * 64}, hostPlace(source, int(i*64)), 64, number,
					func(err error) { done <- err })
			}
		})
		for range n {
			if err := receive(t, done, "a write"); err != nil {
				t.Fatal(err)
			}
		}
	}
	// A peer may read one write in several parts.
	if f := b.peer.Figures(); f.Messages-before.Messages != n*rounds || f.Batches-before.Batches > n*rounds/8 {
		t.Errorf("%d acknowledgements in %d writes", f.Messages-before.Messages, f.Batches-before.Batches)
	}
}

// TestConnectionResetIsReported demands that the error names the reset, whichever goroutine detects
// the reset first.
func TestConnectionResetIsReported(t *testing.T) {
	for range 60 {
		ours, theirs := loopback(t)
		e := newSide(t, &Streams{piece: rawPiece, ours: rawPiece, control: theirs},
			Config{Heartbeat: time.Hour, Dead: 2 * time.Hour})
		c := e.open(&wire.Done{}, ignore, func(error) {})
		go func() { _, _ = io.Copy(io.Discard, ours) }()
		stop := make(chan struct{})
		go func() {
			for i := uint64(0); ; i++ {
				select {
				case <-stop:
					return
				default:
					e.loop.Call(func() { c.Send(&wire.PeerWritten{Grant: i}, 0) })
				}
			}
		}()
		time.Sleep(3 * time.Millisecond)
		reset(ours)
		if why := e.died(); !errors.Is(why, unix.ECONNRESET) {
			t.Error(why)
		}
		close(stop)
	}
}
