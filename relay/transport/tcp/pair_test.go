package tcp

import (
	"bytes"
	"context"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// waitTime is much longer than any expected wait.
const waitTime = 2 * time.Minute

// side is a Peer on its own loop.
type side struct {
	tb   testing.TB
	loop *poll.Loop
	peer *Peer
	down chan error
}

func newSide(tb testing.TB, s *Streams, config Config) *side {
	tb.Helper()
	loop, err := poll.New()
	if err != nil {
		tb.Fatal(err)
	}
	ran := make(chan struct{})
	go func() { loop.Run(); close(ran) }()
	e := &side{tb: tb, loop: loop, down: make(chan error, 1)}
	config.Down = func(err error) { e.down <- err }
	if config.Name == "" {
		config.Name = "other host"
	}
	loop.Call(func() { e.peer = New(loop, s, config) })
	tb.Cleanup(func() {
		e.peer.Close()
		testutil.Until(tb, "the peer's goroutines", func() bool { e.peer.movers.Wait(); e.peer.users.Wait(); return true })
		loop.Stop()
		<-ran
	})
	return e
}

// died waits for the Peer's end.
func (e *side) died() error {
	e.tb.Helper()
	select {
	case err := <-e.down:
		e.down <- err
		return err
	case <-testutil.After(waitTime):
		e.tb.Fatal("the peer lives")
		return nil
	}
}

func (e *side) open(first wire.Message, received func(wire.Message, uint32, []int), ended func(error)) *Channel {
	e.tb.Helper()
	var c *Channel
	var err error
	e.loop.Call(func() { c, err = e.peer.Open(first, 0, received, ended) })
	if err != nil {
		e.tb.Fatal(err)
	}
	return c
}

func receive[T any](tb testing.TB, from <-chan T, what string) T {
	tb.Helper()
	select {
	case v := <-from:
		return v
	case <-testutil.After(waitTime):
		tb.Fatalf("%s: not within %v", what, waitTime)
		return *new(T)
	}
}

func ignore(wire.Message, uint32, []int) {}

// network opens a connection and returns both sides.
type network func(tb testing.TB) (dialed, accepted net.Conn)

func pipes(testing.TB) (net.Conn, net.Conn) { return net.Pipe() }

func loopback(tb testing.TB) (net.Conn, net.Conn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	defer l.Close()
	dialed, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		tb.Fatal(err)
	}
	accepted, err := l.Accept()
	if err != nil {
		tb.Fatal(err)
	}
	return dialed, accepted
}

var networks = map[string]network{"pipes": pipes, "TCP": loopback}

// greeted returns the connections of two Peers after the greetings.
func greeted(tb testing.TB, of network, streams, pieces int) (dialed, accepted *Streams) {
	tb.Helper()
	gathering := &Gathering{Pieces: pieces, Time: waitTime}
	both := make(chan *Streams, streams+1)
	var err error
	dialed, err = Dial(context.Background(), time.Now().Add(waitTime), func(context.Context) (net.Conn, error) {
		a, b := of(tb)
		go func() {
			s, err := gathering.Add(b, "dialer")
			if err != nil {
				tb.Errorf("gathering: %v", err)
			}
			if s != nil || err != nil {
				both <- s
			}
		}()
		return a, nil
	}, streams, pieces)
	if err != nil {
		tb.Fatal(err)
	}
	return dialed, receive(tb, both, "the accepted connections")
}

// pair returns two Peers; accept is the second Peer's Accept.
func pair(tb testing.TB, of network, streams, pieces int, config Config, accept func(*Channel, wire.Message,
	uint32)) (a, b *side) {
	tb.Helper()
	dialed, accepted := greeted(tb, of, streams, pieces)
	a = newSide(tb, dialed, config)
	config.Accept = accept
	return a, newSide(tb, accepted, config)
}

// noGoroutines fails a test that leaves goroutines of this package.
func noGoroutines(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		t.Helper()
		var left string
		for end := testutil.BeginFor(waitTime); !end.Over(); time.Sleep(time.Millisecond) {
			if left = ours(); left == "" {
				return
			}
		}
		t.Errorf("left running:\n%s", left)
	})
}

func ours() string {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	var list []string
	for _, one := range strings.Split(string(stacks), "\n\n") {
		if strings.Contains(one, "transport/tcp.(*Peer)") {
			list = append(list, one)
		}
	}
	return strings.Join(list, "\n\n")
}

// hostPlace returns a place in host memory as a source.
func hostPlace(memory []byte, at int) transport.Source {
	return transport.Source{Place: device.Place{Host: unsafe.Pointer(&memory[at])}}
}

// raw is the peer of a Peer, with each byte chosen by the test.
type raw struct {
	tb      testing.TB
	control net.Conn
	data    []net.Conn
	// frames receives the frames of the Peer; closed at the end.
	frames chan frame
}

const rawPiece = 4 << 10

// against returns a Peer that accepted, and its raw peer. wrap wraps the connections, control
// first.
func against(tb testing.TB, streams int, config Config, wrap ...func(net.Conn) net.Conn) (*side, *raw) {
	tb.Helper()
	s := &Streams{piece: rawPiece, ours: rawPiece}
	r := &raw{tb: tb, frames: make(chan frame, 1000)}
	var theirs net.Conn
	r.control, theirs = net.Pipe()
	s.control = wrapped(theirs, wrap)
	for range streams {
		ours, theirs := net.Pipe()
		r.data = append(r.data, ours)
		s.data = append(s.data, wrapped(theirs, wrap))
	}
	e := newSide(tb, s, config)
	tb.Cleanup(r.close)
	return e, r
}

func wrapped(c net.Conn, in []func(net.Conn) net.Conn) net.Conn {
	for _, w := range in {
		c = w(c)
	}
	return c
}

func (r *raw) close() {
	r.control.Close()
	for _, c := range r.data {
		c.Close()
	}
}

// listens reads every frame of the Peer.
func (r *raw) listens() *raw {
	go func() {
		defer close(r.frames)
		header := make([]byte, frameHeader)
		for {
			if _, err := io.ReadFull(r.control, header); err != nil {
				return
			}
			n := int(header[8]) | int(header[9])<<8 | int(header[10])<<16
			whole := append(bytes.Clone(header), make([]byte, n)...)
			if _, err := io.ReadFull(r.control, whole[frameHeader:]); err != nil {
				return
			}
			f, _, err := nextFrame(whole)
			if err != nil {
				r.tb.Errorf("the peer says: %v", err)
				return
			}
			if f.kind != frameBeat {
				r.frames <- f
			}
		}
	}()
	return r
}

func (r *raw) say(channel, kind uint32, payload ...[]byte) error {
	_, err := r.control.Write(appendFrame(nil, channel, kind, payload...))
	return err
}

// patient is a connection without deadlines, except the deadlines under test.
type patient struct {
	net.Conn
	reads, writes bool // with a deadline
}

func (c patient) SetReadDeadline(t time.Time) error {
	if !c.reads {
		return nil
	}
	return c.Conn.SetReadDeadline(t)
}

func (c patient) SetWriteDeadline(t time.Time) error {
	if !c.writes {
		return nil
	}
	return c.Conn.SetWriteDeadline(t)
}

// counted is a connection that counts, and can be stopped.
type counted struct {
	net.Conn
	mu        sync.Mutex
	writes    int
	read      int
	deadlines []time.Time
	// Each Write waits for hold, if not nil, and each Read for holdRead.
	hold, holdRead chan struct{}
	held           chan struct{} // receives a value for each waiting call
}

func (c *counted) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.writes++
	c.mu.Unlock()
	if c.hold != nil {
		c.held <- struct{}{}
		<-c.hold
	}
	return c.Conn.Write(b)
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.mu.Lock()
	c.read += n
	c.mu.Unlock()
	if c.holdRead != nil && len(b) > pieceHeader {
		c.held <- struct{}{}
		<-c.holdRead
		for i := range b[:n] { // the reader owns the memory until Read returns
			b[i] = 'x'
		}
	}
	return n, err
}

func (c *counted) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	c.deadlines = append(c.deadlines, t)
	c.mu.Unlock()
	return c.Conn.SetReadDeadline(t)
}
