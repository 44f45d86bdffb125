package tcp

import (
	"bytes"
	"io"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// zerocopyPair returns a channel over one data stream of loopback that grants and writes slots.
type zerocopyPair struct {
	t                *testing.T
	sender, receiver *side
	channel          *Channel
	arrivals         *Arrivals
	arrived          chan uint64
	last             uint64
	source           []byte
	memory           []byte
}

func newZerocopyPair(t *testing.T, config Config, bytes int, of network) *zerocopyPair {
	t.Helper()
	p := &zerocopyPair{t: t, source: make([]byte, bytes), memory: make([]byte, bytes), arrived: make(chan uint64, 1000)}
	ready := make(chan *Arrivals, 1)
	p.sender, p.receiver = pair(t, of, 1, 0, config, func(c *Channel, _ wire.Message, _ uint32) {
		in := c.Receive(func(immediate, _ uint64) { p.arrived <- immediate }, func() {})
		in.add(1, p.memory)
		ready <- in
	})
	p.channel = p.sender.open(&wire.Done{}, ignore, func(error) {})
	p.arrivals = receive(t, ready, "the channel")
	return p
}

// write writes source[at:][:n] to the same place, and returns the channel of the result.
func (p *zerocopyPair) write(at, n int) chan error {
	p.t.Helper()
	p.last++
	number, done := p.last, make(chan error, 1)
	p.receiver.loop.Call(func() {
		if err := p.arrivals.Grant(number, 1, uint64(at), uint64(n)); err != nil {
			p.t.Error(err)
		}
	})
	p.sender.loop.Do(func() {
		p.channel.Link().Write(transport.Target{Region: 1, Offset: uint64(at)}, hostPlace(p.source, at), uint64(n), number,
			func(err error) { done <- err })
	})
	return done
}

// acknowledged waits until the acknowledgements of the peer have arrived.
func (p *zerocopyPair) acknowledged() {
	p.t.Helper()
	testutil.Until(p.t, "the acknowledgement", func() bool {
		all := true
		p.sender.loop.Call(func() {
			p.sender.peer.queue.mu.Lock()
			defer p.sender.peer.queue.mu.Unlock()
			for _, w := range p.sender.peer.writes {
				all = all && w.state >= writeAcked && w.left == 0
			}
		})
		return all
	})
}

// TestZerocopyWriteWaitsForNotification demands that a write whose bytes have arrived ends only
// after the kernel has reported the end of its sends: until then the kernel may read the pages.
func TestZerocopyWriteWaitsForNotification(t *testing.T) {
	noGoroutines(t)
	var withheld atomic.Bool
	withheld.Store(true)
	defer withheld.Store(false) // the Peer's end waits for notifications, too
	p := newZerocopyPair(t, Config{zerocopy: zerocopyAlways, zerocopyFaults: zerocopyFaults{withheld: withheld.Load}},
		1<<20, loopback)
	done := p.write(0, 1<<20)
	receive(t, p.arrived, "the arrival")
	p.acknowledged()
	p.sender.loop.Call(func() {}) // the loop has handled the acknowledgement
	select {
	case err := <-done:
		t.Fatalf("the write ended before the notification (%v)", err)
	default:
	}
	if z := p.sender.peer.Figures().Zerocopy; z.pending == 0 || z.sends != z.pending {
		t.Errorf("%+v", z)
	}
	// No acknowledgement is missing: look does not end the Peer.
	if n := p.sender.peer.underWay.Load(); n != 0 {
		t.Errorf("%d writes wait for an acknowledgement", n)
	}
	withheld.Store(false)
	next := p.write(0, 1<<20) // the notification of this write wakes the reader
	for _, one := range []chan error{done, next} {
		if err := receive(t, one, "the write"); err != nil {
			t.Error(err)
		}
	}
	if z := p.sender.peer.Figures().Zerocopy; z.pending != 0 || z.sends < 2 || z.streams != 1 {
		t.Errorf("%+v", z)
	}
}

// TestZerocopyNotificationBeforeTheRecordCounts demands that a notification that precedes the
// record of the send ends the write as well.
func TestZerocopyNotificationBeforeTheRecordCounts(t *testing.T) {
	noGoroutines(t)
	p := newZerocopyPair(t, Config{zerocopy: zerocopyAlways,
		zerocopyFaults: zerocopyFaults{sent: func() { time.Sleep(30 * time.Millisecond) }}}, 256<<10, loopback)
	for range 5 {
		if err := receive(t, p.write(0, len(p.source)), "the write"); err != nil {
			t.Fatal(err)
		}
	}
}

// slow is a connection with slow reads of few bytes.
type slow struct{ net.Conn }

func (s slow) Read(b []byte) (int, error) {
	time.Sleep(100 * time.Microsecond)
	return s.Conn.Read(b[:min(len(b), 64<<10)])
}

func (s slow) NetConn() net.Conn { return s.Conn }

// TestZerocopySlotsKeepTheirContents demands that a slot that is filled again after the end of its
// write arrives with the contents of its own write, at a receiver so slow that the socket's buffers
// are full.
func TestZerocopySlotsKeepTheirContents(t *testing.T) {
	noGoroutines(t)
	const slot, slots, writes = 256 << 10, 4, 60
	p := newZerocopyPair(t, Config{zerocopy: zerocopyAlways}, slots*slot, func(tb testing.TB) (net.Conn, net.Conn) {
		dialed, accepted := loopback(tb)
		if err := dialed.(*net.TCPConn).SetWriteBuffer(slot / 2); err != nil {
			tb.Error(err)
		}
		return dialed, slow{accepted}
	})
	var under [slots]chan error
	for n := range writes {
		i := n % slots
		if under[i] != nil {
			if err := receive(t, under[i], "a write"); err != nil {
				t.Fatal(err)
			}
			receive(t, p.arrived, "the arrival")
			if want := byte(n - slots); p.memory[i*slot] != want || bytes.Count(p.memory[i*slot:][:slot], []byte{want}) != slot {
				t.Fatalf("write %d arrived with the contents of another", n-slots)
			}
		}
		for at := range p.source[i*slot:][:slot] {
			p.source[i*slot+at] = byte(n)
		}
		under[i] = p.write(i*slot, slot)
	}
	for _, one := range under {
		if err := receive(t, one, "a write"); err != nil {
			t.Error(err)
		}
	}
	if z := p.sender.peer.Figures().Zerocopy; z.sends == 0 || z.pending != 0 || z.refused != 0 {
		t.Errorf("%+v", z)
	}
}

// TestZerocopyPeerEndReleasesPagesFirst demands that a Peer that ends with sends in the socket's
// queue releases sources only after the kernel has released the pages: the peer gets nothing that
// was written there afterwards. The cases are a Peer that closes and a relay that has ended its
// loop.
func TestZerocopyPeerEndReleasesPagesFirst(t *testing.T) {
	noGoroutines(t)
	for _, withhold := range []bool{false, true} {
		var withheld atomic.Bool
		withheld.Store(withhold)
		defer withheld.Store(false)
		ours, theirs := loopback(t)
		control, controls := net.Pipe()
		r := (&raw{tb: t, control: control, data: []net.Conn{ours}, frames: make(chan frame, 100)}).listens()
		e := newSide(t, &Streams{control: controls, data: []net.Conn{theirs}, piece: defaultPiece, ours: defaultPiece},
			Config{
				zerocopy: zerocopyAlways, zerocopyFaults: zerocopyFaults{withheld: withheld.Load}, Dead: time.Hour,
				Heartbeat: 20 * time.Millisecond,
			})
		t.Cleanup(r.close)
		source := bytes.Repeat([]byte{'a'}, 16<<20)
		done := make(chan error, 1)
		c := e.open(&wire.Done{}, ignore, func(error) {})
		e.loop.Do(func() {
			c.Link().Write(transport.Target{}, hostPlace(source, 0), uint64(len(source)), 1, func(err error) {
				for i := range source {
					source[i] = 'b'
				}
				done <- err
			})
		})
		last, since := uint64(0), testutil.Begin()
		for ; !since.Over(); time.Sleep(20 * time.Millisecond) { // until the buffers are full
			sent := e.peer.carried[e.peer.data[0]].Sent.Load()
			if sent > 0 && sent == last {
				break
			}
			last = sent
		}
		if e.peer.Figures().Zerocopy.pending == 0 {
			t.Fatal("the kernel holds no pages: the test shows nothing")
		}
		e.loop.Do(e.peer.Close)
		if withhold {
			time.Sleep(50 * time.Millisecond)
			select {
			case err := <-done:
				t.Fatalf("the source was given back before the notification (%v)", err)
			default:
			}
			withheld.Store(false)
		}
		if err := receive(t, done, "the write"); err != errClosed {
			t.Errorf("the write ended with %v", err)
		}
		got, err := io.ReadAll(ours)
		if bytes.Contains(got, []byte{'b', 'b', 'b', 'b', 'b', 'b', 'b', 'b'}) {
			t.Errorf("the other side got what was written after the write's end, at %d of %d bytes (%v)",
				slices.Index(got, 'b'), len(got), err)
		}
		e.died()
	}
}

// TestZerocopyWithoutBuffersCopies demands that the kernel copies after ENOBUFS, without loss.
// After maxRefused successive errors the stream uses only copies.
func TestZerocopyWithoutBuffersCopies(t *testing.T) {
	noGoroutines(t)
	p := newZerocopyPair(t, Config{zerocopyFaults: zerocopyFaults{refused: func() error { return unix.ENOBUFS }}},
		128<<10, loopback)
	for n := range maxRefused + 5 {
		for i := range p.source {
			p.source[i] = byte(n + 1)
		}
		err := receive(t, p.write(0, len(p.source)), "the write")
		receive(t, p.arrived, "the arrival")
		if err != nil || !bytes.Equal(p.source, p.memory) {
			t.Fatalf("write %d: %v", n, err)
		}
	}
	if z := p.sender.peer.Figures().Zerocopy; z.sends != 0 || z.refused != maxRefused || z.streams != 0 ||
		!strings.Contains(z.reason, "net.core.optmem_max") {
		t.Errorf("%+v", z)
	}
}

// TestZerocopyOfUnpinnableMemoryCopies demands a copy of memory that the kernel cannot pin.
func TestZerocopyOfUnpinnableMemoryCopies(t *testing.T) {
	noGoroutines(t)
	p := newZerocopyPair(t, Config{zerocopyFaults: zerocopyFaults{refused: func() error { return unix.EFAULT }}},
		128<<10, loopback)
	for i := range p.source {
		p.source[i] = byte(i)
	}
	for range 2 {
		err := receive(t, p.write(0, len(p.source)), "the write")
		receive(t, p.arrived, "the arrival")
		if err != nil || !bytes.Equal(p.source, p.memory) {
			t.Fatal(err)
		}
	}
	if z := p.sender.peer.Figures().Zerocopy; z.sends != 0 || z.streams != 0 ||
		!strings.Contains(z.reason, "bad address") {
		t.Errorf("%+v", z)
	}
}

// TestZerocopyTurnsOffWhereTheKernelCopies demands that a stream turns zero-copy off if the kernel
// copies every send, as on loopback; short writes never use zero-copy.
func TestZerocopyTurnsOffWhereTheKernelCopies(t *testing.T) {
	noGoroutines(t)
	p := newZerocopyPair(t, Config{}, 128<<10, loopback)
	if err := receive(t, p.write(0, minZerocopy-1), "a short write"); err != nil {
		t.Fatal(err)
	}
	if z := p.sender.peer.Figures().Zerocopy; z.sends != 0 || z.streams != 1 {
		t.Errorf("after a short write: %+v", z)
	}
	for range 2 * maxCopied {
		if err := receive(t, p.write(0, len(p.source)), "the write"); err != nil {
			t.Fatal(err)
		}
	}
	z := p.sender.peer.Figures().Zerocopy
	if z.streams != 0 || z.sends != z.copied || z.sends >= 2*maxCopied || z.pending != 0 ||
		!strings.Contains(z.reason, "SO_EE_CODE_ZEROCOPY_COPIED") {
		t.Errorf("%+v", z)
	}
}

// TestZerocopyReleasesRanges demands the release of ranges of notifications in any order, with
// numbers that wrap.
func TestZerocopyReleasesRanges(t *testing.T) {
	w := func() *write { return &write{} }
	list := []*write{w(), w(), w(), w()}
	var released []*write
	z := &zerocopyConn{notified: func(l []*write) { released = append(released, l...) }, first: 1<<32 - 2,
		pending: slices.Clone(list)}
	z.open.Store(4)
	z.release(1, 1, false)
	z.release(1<<32-1, 0, true)
	if len(released) != 3 || released[0] != list[3] || released[1] != list[1] || released[2] != list[2] ||
		z.first != 1<<32-2 {
		t.Fatalf("%d released, the first pending is %d", len(released), z.first)
	}
	z.release(1<<32-2, 1<<32-2, false)
	z.release(1, 1, false) // again
	if len(released) != 4 || len(z.pending) != 0 || z.first != 2 || z.open.Load() != 0 {
		t.Errorf("%d released, %d pending from %d on", len(released), len(z.pending), z.first)
	}
}
