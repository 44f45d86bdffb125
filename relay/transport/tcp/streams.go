package tcp

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// write is one of ours that is under way.
type write struct {
	piece    // its number, grant and length; at is where its next piece begins
	from     []byte
	done     func(error)
	streamed bool // over data streams
	settled  bool // acknowledged, on the loop
	// pinned counts its zero-copy sends without a notification: the kernel may read from. It falls
	// under sendQueue's lock.
	pinned atomic.Int32

	// Of sendQueue's lock.
	left         uint64 // bytes that a stream has not sent yet
	acknowledged bool
}

// sendQueue is what the data streams' writers have to send. A writer takes a piece when it
// has sent the last, so that a slow stream gets fewer.
//
// To wake a goroutine takes long, and the event loop, which does not make room for it, has
// it woken by the others, one after the other. So no more are woken than there are pieces,
// and of those that have nothing to do some look for a while before they sleep.
type sendQueue struct {
	mu     sync.Mutex
	wake   sync.Cond
	queue  []*write
	pieces uint64 // in the queue
	ended  bool
	piece  uint64 // bytes, at most

	sleeping, wakeups, spinning int         // writers: those called have not noticed yet
	maxSpinners                 int32       // of all supplies, at most
	ready                       atomic.Bool // there are pieces, or it is the end
}

// spinTime is how long a writer looks before it sleeps: longer than the pauses between two
// messages of a busy connection.
const spinTime = 100 * time.Microsecond

// spinners is the number of spinning writers of this process.
var spinners atomic.Int32

// maxSpinners is how many may: a part of the processors that this process has, and none where
// they are few.
func maxSpinners() int32 { return int32(runtime.GOMAXPROCS(0) / 4) }

// put is the loop's.
func (s *sendQueue) put(w *write) {
	poll.Lock(&s.mu)
	s.queue = append(s.queue, w)
	s.pieces += (w.length + s.piece - 1) / s.piece
	s.ready.Store(true)
	calls := 0
	for ; s.sleeping > 0 && s.pieces > uint64(s.wakeups+s.spinning); calls++ {
		s.sleeping--
		s.wakeups++
	}
	s.mu.Unlock()
	for range calls { // not under the lock: it takes long
		s.wake.Signal()
	}
}

// end has all writers end.
func (s *sendQueue) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.ready.Store(true)
	s.wakeups += s.sleeping
	s.sleeping = 0
	s.wake.Broadcast()
}

// take waits for a piece, and gives none at the end.
func (s *sendQueue) take() (*write, piece, []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wait()
	if s.ended {
		return nil, piece{}, nil
	}
	w := s.queue[0]
	p := w.piece
	p.bytes = uint32(min(s.piece, w.length-w.at))
	if w.at += uint64(p.bytes); w.at == w.length {
		s.queue[0] = nil
		s.queue = s.queue[1:]
	}
	if s.pieces--; s.pieces == 0 {
		s.ready.Store(false)
	}
	return w, p, w.from[p.at:][:p.bytes]
}

// wait returns when there is a piece, or the end. The lock is held.
func (s *sendQueue) wait() {
	for looked := false; len(s.queue) == 0 && !s.ended; {
		if !looked && s.maySpin() {
			s.spinning++
			s.mu.Unlock()
			s.spin()
			spinners.Add(-1)
			s.mu.Lock()
			s.spinning--
			looked = true
			continue
		}
		s.sleeping++
		s.wake.Wait()
		s.wakeups--
		looked = false
	}
}

// maySpin reports whether a writer is counted among the spinners.
func (s *sendQueue) maySpin() bool {
	if s.maxSpinners == 0 {
		return false
	}
	if spinners.Add(1) <= s.maxSpinners {
		return true
	}
	spinners.Add(-1)
	return false
}

// spin returns when there is something, or after spinTime.
func (s *sendQueue) spin() {
	for begun := time.Now(); !s.ready.Load() && time.Since(begun) < spinTime; {
	}
}

// sent counts a piece, and reports whether nothing is left to wait for.
func (s *sendQueue) sent(w *write, n uint32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.left -= uint64(n)
	return w.complete()
}

// complete reports whether the source may be used again. The lock of sendQueue is held.
func (w *write) complete() bool { return w.left == 0 && w.acknowledged && w.pinned.Load() == 0 }

// released counts notifications of zero-copy sends, one for each write in the list, and returns the
// writes for which nothing is left to wait for.
func (s *sendQueue) released(list []*write) (complete []*write) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range list {
		if w.pinned.Add(-1); w.complete() {
			complete = append(complete, w)
		}
	}
	return complete
}

// acknowledged is the other side's word, on the loop; it reports what sent does.
func (s *sendQueue) acknowledged(w *write) bool {
	poll.Lock(&s.mu)
	defer s.mu.Unlock()
	again := w.acknowledged
	w.acknowledged = true
	return !again && w.complete()
}

// Link is a channel's way for writes. It implements transport.Link, for sources in host
// memory.
type Link struct{ channel *Channel }

// Link gives the sender's end.
func (c *Channel) Link() *Link { return &Link{c} }

// AddTarget has nothing to do: the receiver checks what it has granted.
func (l *Link) AddTarget(_, _ uint32, _ []device.Part, ready func(error)) { ready(nil) }

// RemoveTarget has nothing to do either, nor have those after it.
func (l *Link) RemoveTarget(uint32) {}

// Close does nothing: the channel is closed by itself.
func (l *Link) Close() {}

// Write posts a write. done is called when the other relay has said that all of it is
// in its memory, or when the Peer is dead and nothing reads the source any more.
func (l *Link) Write(to transport.Target, from transport.Source, n uint64, immediate uint64, done func(error)) {
	if from.Place.Host == nil {
		done(wire.Errorf(wire.StatusInternal, "a write over TCP out of memory that is not the host's"))
		return
	}
	l.channel.write(to, unsafe.Slice((*byte)(from.Place.Host), n), immediate, done)
}

func (c *Channel) write(to transport.Target, from []byte, immediate uint64, done func(error)) {
	p := c.peer
	switch {
	case p.dead != nil:
		done(p.dead)
		return
	case c.localClosed || c.closed:
		done(wire.Errorf(wire.StatusPeerClosed, "the relay at %s has closed the connection", p.config.Name))
		return
	}
	n := uint64(len(from))
	p.written++
	w := &write{
		piece: piece{channel: c.number, region: to.Region, number: p.written, immediate: immediate, offset: to.Offset,
			length: n},
		from: from, done: done, left: n,
	}
	p.writes[p.written] = w
	if p.underWay.Load() == 0 {
		p.moved() // before it counts: look has not to take the time without any for its own
	}
	p.underWay.Add(1)
	p.counters.writes.Add(1)
	if len(from) <= p.config.Eager {
		p.counters.eager.Add(1)
		w.bytes, w.left = uint32(n), 0
		p.sendFrame(c.number, frameEager, w.header(), from)
		return
	}
	w.streamed = true
	c.writes++
	p.queue.put(w)
}

// writeData sends pieces on one stream.
func (p *Peer) writeData(c net.Conn) {
	for {
		w, h, from := p.queue.take()
		if w == nil {
			return
		}
		ok := false
		if z, is := c.(*zerocopyConn); is && z.wants(len(from)) {
			_, ok = p.sendBy(c, z.sending(&outgoingPiece{write: w, header: h.header(), data: from}))
		} else {
			_, ok = p.send(c, net.Buffers{h.header(), from})
		}
		if !ok {
			return
		}
		p.counters.pieces.Add(1)
		p.moved()
		if p.queue.sent(w, h.bytes) {
			p.loop.Do(func() { p.finish(w) })
		}
	}
}

// readData receives pieces on one stream, each straight into the memory that is granted.
func (p *Peer) readData(c net.Conn) {
	header := make([]byte, pieceHeader)
	for {
		if _, err := io.ReadFull(c, header); err != nil {
			p.failed(c, "receiving", err)
			return
		}
		h, err := readPiece(header)
		if err == nil {
			err = p.land(h, func(to []byte) error { return p.fill(c, to) }, func(f func()) { p.loop.Do(f) }, p.acknowledge)
		}
		if err != nil {
			p.failed(c, "receiving", err)
			return
		}
		p.carried[c].Received.Add(pieceHeader + uint64(h.bytes))
	}
}

// land checks a piece and fills its memory. Of a write that is complete both sides are
// told, this one on the loop.
func (p *Peer) land(h *piece, fill func([]byte) error, onLoop func(func()), acknowledge func(uint32, uint64)) error {
	w, to, err := p.landings.begin(h)
	if err != nil {
		return err
	}
	if err := fill(to); err != nil {
		return err
	}
	if p.landings.end(w, h) {
		onLoop(func() {
			if c := p.channels[h.channel]; c != nil && c.arrivals != nil {
				c.arrivals.arrived(h.immediate, h.length)
			}
		})
		acknowledge(h.channel, h.number)
	}
	return nil
}

// fill reads as much, as long as something comes, by Config's silence.
func (p *Peer) fill(c net.Conn, to []byte) error {
	for len(to) > 0 {
		n, err := p.read(c, to, p.config.silence())
		if to = to[n:]; err == nil || len(to) == 0 {
			continue
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if n > 0 {
				continue
			}
			p.silent(c, p.config.silence(), errNoProgress)
		}
		return err
	}
	return c.SetReadDeadline(time.Time{})
}
