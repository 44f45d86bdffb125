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

// write is an outstanding write of this side.
type write struct {
	piece    // number, grant and length of the write; at is the offset of the next piece
	from     []byte
	done     func(error)
	streamed bool // over data streams
	// pinned counts the zero-copy sends without a notification: the kernel may read from. pinned
	// decreases under sendQueue's lock.
	pinned atomic.Int32

	// Under sendQueue's lock.
	left  uint64 // bytes that no stream has sent yet
	state writeState
}

// sendQueue has the pieces for the writers of the data streams. A writer takes a piece after
// sending the previous piece, so that a slow stream sends fewer pieces.
//
// Waking a goroutine is slow, so the loop wakes only as many writers as there are pieces, and idle
// writers spin for a while before they sleep.
type sendQueue struct {
	mu     sync.Mutex
	wake   sync.Cond
	queue  []*write
	pieces uint64 // in the queue
	ended  bool
	piece  uint64 // maximum length of a piece, bytes

	sleeping, wakeups, spinning int         // numbers of writers; a woken writer counts in wakeups until it runs
	maxSpinners                 int32       // maximum for every queue of the process
	ready                       atomic.Bool // pieces are available, or the queue has ended
}

// spinTime is how long a writer spins before it sleeps: longer than the pauses between two messages
// of a busy connection.
const spinTime = 100 * time.Microsecond

// spinners is the number of spinning writers of this process.
var spinners atomic.Int32

// maxSpinners returns the maximum number of spinning writers: a part of the processors of this
// process, and 0 with few processors.
func maxSpinners() int32 { return int32(runtime.GOMAXPROCS(0) / 4) }

// put queues a write. Only the loop calls put.
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
	for range calls { // without the lock: Signal is slow
		s.wake.Signal()
	}
}

// end ends the writers.
func (s *sendQueue) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.ready.Store(true)
	s.wakeups += s.sleeping
	s.sleeping = 0
	s.wake.Broadcast()
}

// take waits for a piece; nil at the end of the queue.
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

// wait returns when there is a piece, or at the end. The caller holds the lock.
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

// maySpin counts the writer among the spinners, and reports false at the limit.
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

// spin returns when a piece is available, or after spinTime.
func (s *sendQueue) spin() {
	for begun := time.Now(); !s.ready.Load() && time.Since(begun) < spinTime; {
	}
}

// sent counts a sent piece and reports whether the write is complete.
func (s *sendQueue) sent(w *write, n uint32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.left -= uint64(n)
	return w.freed()
}

// freed reports whether the write is complete, after a writer or the kernel has read bytes of the source. The
// caller holds sendQueue's lock.
func (w *write) freed() bool {
	return w.left == 0 && w.pinned.Load() == 0 && writeTable.Must(&w.state, writeFreed) == writeFinish
}

// released counts notifications of zero-copy sends, one for each write in the list, and returns the
// complete writes.
func (s *sendQueue) released(list []*write) (complete []*write) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range list {
		if w.pinned.Add(-1); w.freed() {
			complete = append(complete, w)
		}
	}
	return complete
}

// acknowledged records the peer's acknowledgement, on the loop.
func (s *sendQueue) acknowledged(w *write) writeAction {
	poll.Lock(&s.mu)
	defer s.mu.Unlock()
	return writeTable.Must(&w.state, writeAck)
}

// Link writes the data of a channel. It implements transport.Link for sources in host memory.
type Link struct{ channel *Channel }

// Link returns the sender's side of the channel.
func (c *Channel) Link() *Link { return &Link{c} }

// AddTarget does nothing: the receiver checks its grants.
func (l *Link) AddTarget(_, _ uint32, _ []device.Part, ready func(error)) { ready(nil) }

// RemoveTarget does nothing.
func (l *Link) RemoveTarget(uint32) {}

// Close does nothing: the caller closes the channel.
func (l *Link) Close() {}

// Write posts a write. It calls done when the peer has acknowledged the write, or when the Peer is
// dead and no goroutine reads the source.
func (l *Link) Write(to transport.Target, from transport.Source, n uint64, immediate uint64, done func(error)) {
	if from.Place.Host == nil {
		done(wire.Errorf(wire.StatusInternal, "write over TCP: the source is not host memory"))
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
	case c.state != channelOpen:
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
		p.moved() // before the write counts: look must not count the earlier time without writes
	}
	p.underWay.Add(1)
	p.counters.writes.Add(1)
	if len(from) <= p.config.Eager {
		p.counters.eager.Add(1)
		w.bytes, w.left, w.state = uint32(n), 0, writeSent // the frame has a copy
		p.sendFrame(c.number, frameEager, w.header(), from)
		return
	}
	w.streamed = true
	c.writes++
	p.queue.put(w)
}

// writeData sends pieces on a stream.
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

// readData receives pieces on a stream directly into granted memory.
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

// land checks a piece and fills its memory. After the last piece of a write, land acknowledges the
// write and calls arrived on the loop.
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

// fill reads the bytes of a piece. It waits for Config's silence without progress.
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
