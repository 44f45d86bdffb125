// Package tcp is the transport between relays of two hosts over TCP. A Peer is the set
// of connections between two relays: one for control, on which the connections of all
// clients talk as channels, and several for data, over which a write is spread.
//
// Goroutines read and write the connections, so that those may be anything that is a
// net.Conn; but what a socket takes of the control stream at once is written by whoever
// says it. All else belongs to the relay's event loop. What the other relay says is
// taken for a stranger's: each piece's header is checked against what is granted just
// now before a byte lands, and it lands in the granted memory, not beside it.
package tcp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

// Config is how a Peer works. Zeros stand for what New documents.
type Config struct {
	// Name says in messages who is at the other side, on which host, and by which
	// interface and address.
	Name string
	// Heartbeat is how often something is said (1 s), Dead within what time the channels hear
	// that the other relay is dead (5 s): one from which nothing comes, or that takes nothing.
	Heartbeat, Dead time.Duration
	// Leaving is how long the other side may take to leave a channel that it has to (12
	// Dead): what it has begun to write may wait behind other channels' writes.
	Leaving time.Duration
	// Eager is up to how many bytes of a write go with the messages (4 KiB, at most 16
	// and one piece; less than 0 for none).
	Eager int
	// Waiting is how many bytes of messages may wait for the other side (32 MiB), and
	// Channels how many channels it may have open (65536).
	Waiting, Channels int
	// zerocopy selects the data streams' sends that use MSG_ZEROCOPY; both are for tests.
	zerocopy       zerocopyUse
	zerocopyFaults zerocopyFaults
	pulse          *pulse // of all Peers of Peers; nil for one of its own
	// Alone gives each message a write of its own, to measure what it is worth that they
	// go together.
	Alone bool
	// Route says in messages which way a connection goes (its addresses).
	Route func(net.Conn) string
	// Carried counts the bytes of a connection; nil counts none. It is asked once for each.
	Carried func(net.Conn) *Carried
	// Accept is called on the loop with each channel that the other side opens, and its
	// first message: it sets the channel's handlers by Handle, or leaves it.
	Accept func(c *Channel, first wire.Message, sequence uint32)
	// Extend, where there is one, gives what carries the data of a Peer's channels in place
	// of its data streams. It is called on the loop, of a Peer whose other side knows
	// extensions, before anything comes.
	Extend func(*Peer) Extension
	// Down is called on the loop when the Peer is dead, after all its channels.
	Down func(error)
}

func (c Config) filled() Config {
	set := func(v *int, to int) {
		if *v == 0 {
			*v = to
		}
	}
	set(&c.Eager, 4<<10)
	set(&c.Waiting, 32<<20)
	set(&c.Channels, 1<<16)
	c.Eager = min(c.Eager, maxEager)
	if c.Heartbeat == 0 {
		c.Heartbeat = time.Second
	}
	if c.Dead == 0 {
		c.Dead = 5 * time.Second
	}
	if c.Leaving == 0 {
		c.Leaving = 12 * c.Dead
	}
	if c.Route == nil {
		c.Route = route
	}
	if c.Carried == nil {
		c.Carried = func(net.Conn) *Carried { return &Carried{} }
	}
	if c.Accept == nil {
		c.Accept = func(ch *Channel, _ wire.Message, _ uint32) { ch.Leave() }
	}
	if c.Down == nil {
		c.Down = func(error) {}
	}
	return c
}

// silence is how long nothing may come, and nothing be taken. The rest of Dead is for the
// kernel, which counts from when it sends a packet again, and for what the channels' end
// takes. In the four heartbeats that it leaves a packet is sent five times.
func (c *Config) silence() time.Duration { return c.Dead - c.Dead/10 }

// Carried are the bytes that went over connections.
type Carried struct{ Sent, Received atomic.Uint64 }

// Figures are what a Peer has done so far.
type Figures struct {
	// Messages are frames of the control stream, heartbeats not among them, and Batches
	// the writes that they went out in.
	Messages, Batches uint64
	// Writes are those of slots, Pieces what of them went over data streams, and Eager
	// those that went with the messages.
	Writes, Pieces, Eager uint64
	// Zerocopy are the sends without a copy.
	Zerocopy Zerocopy
}

// Peer is the other relay, and the connections to it. Its methods belong to the event
// loop, but for Figures.
type Peer struct {
	config  Config
	loop    *poll.Loop
	control net.Conn
	bare    syscall.RawConn // the control stream, where it is nothing but a socket
	data    []net.Conn
	version uint32
	copies  string                // why a data stream is not among those that send without a copy
	carried map[net.Conn]*Carried // filled by newPeer alone

	channels map[uint32]*Channel
	last     uint32        // our last channel's number
	lastOpen uint32        // the other side's
	theirs   int           // channels of the other side that are open
	sent     []byte        // frames of this round of the loop
	frames   uint64        // how many
	urgent   bool          // some of sent are not to wait
	since    time.Duration // of the loop's clock, when the first of sent was said
	writes   map[uint64]*write
	written  uint64
	dead     error // set once the channels know

	extension Extension // nil where the data streams carry the data
	landings  landings
	outbox    outbox
	intake    *intake
	queue     sendQueue
	counters  struct{ messages, batches, writes, pieces, eager atomic.Uint64 }

	// Writes that are under way, and how often one of them went on; how often that was when
	// look looked last, and at how many heartbeats since it was the same.
	underWay atomic.Int64
	moves    atomic.Uint64
	seen     uint64
	still    int
	start    time.Time
	// When the loop had its turn last, since the start, and whether it is asked for one.
	turn   atomic.Int64
	asking atomic.Bool

	dying  chan struct{} // closed by fail
	once   sync.Once
	why    error          // set before dying is closed
	parted []byte         // the frame that tells the other side, or nothing
	movers sync.WaitGroup // what reads or writes the channels' memory: the data streams
	users  sync.WaitGroup // and of the control stream
	gone   func()         // called when there are none of both
}

// New makes a Peer of connections whose greeting is done. It takes them over.
func New(loop *poll.Loop, s *Streams, config Config) *Peer {
	return newPeer(loop, s, config, func() {})
}

// newPeer makes one that calls gone when nothing of it reads or writes any memory more.
func newPeer(loop *poll.Loop, s *Streams, config Config, gone func()) *Peer {
	p := &Peer{
		config: config.filled(), loop: loop, control: s.control, data: s.data, version: s.version,
		carried: map[net.Conn]*Carried{}, channels: map[uint32]*Channel{}, writes: map[uint64]*write{},
		dying: make(chan struct{}), start: time.Now(),
		gone: gone, landings: landings{piece: uint64(s.piece), channels: map[uint32]*runway{}},
		outbox: outbox{wake: make(chan struct{}, 1)}, intake: newIntake(),
	}
	p.queue.piece = uint64(s.ours)
	p.config.Eager = min(p.config.Eager, s.ours) // a write with the messages is one piece
	p.last, p.lastOpen = 0, 1                    // the other side's are 3, 5 …
	if s.dialed {
		p.last, p.lastOpen = 1, 0
	}
	if p.config.Extend != nil && s.version >= extensions {
		p.extension = p.config.Extend(p)
	}
	p.queue.wake.L, p.queue.maxSpinners = &p.queue.mu, maxSpinners()
	p.useZerocopy()
	for _, c := range append([]net.Conn{p.control}, p.data...) {
		tune(c, p.config.silence())
		p.carried[c] = p.config.Carried(c)
	}
	if c, is := p.control.(syscall.Conn); is && !p.config.Alone {
		p.bare, _ = c.SyscallConn() // of a closed one the writer hears
	}
	loop.Add(p)
	// All are counted before one begins, which may end the Peer at once and wait for them.
	p.users.Add(2)
	p.movers.Add(2 * len(p.data))
	begin := func(group *sync.WaitGroup, f func()) {
		go func() {
			defer group.Done()
			f()
		}()
	}
	if p.config.pulse == nil {
		p.config.pulse = newPulse(p.config.Heartbeat)
	}
	p.config.pulse.add(p)
	begin(&p.users, p.readControl)
	begin(&p.users, p.writeControl)
	for _, c := range p.data {
		begin(&p.movers, func() { p.readData(c) })
		begin(&p.movers, func() { p.writeData(c) })
	}
	return p
}

// Figures may be called from any goroutine.
func (p *Peer) Figures() Figures {
	c := &p.counters
	return Figures{c.messages.Load(), c.batches.Load(), c.writes.Load(), c.pieces.Load(), c.eager.Load(),
		p.zerocopyFigures()}
}

// Name is the other relay, as Config says.
func (p *Peer) Name() string { return p.config.Name }

// Connections are the one for control, and those for data.
func (p *Peer) Connections() (control net.Conn, data []net.Conn) { return p.control, p.data }

// Channels is how many are open. It belongs to the loop.
func (p *Peer) Channels() int { return len(p.channels) }

// Dialed reports whether this relay made the connections.
func (p *Peer) Dialed() bool { return p.last%2 == 1 }

// Version returns the version of this transport that both relays use.
func (p *Peer) Version() uint32 { return p.version }

// errClosed is a Peer's end by its own relay.
var errClosed = wire.Errorf(wire.StatusPeerClosed, "the relay closed its connections")

// Close ends the Peer. The channels hear of it when nothing reads or writes any memory
// of theirs any more.
func (p *Peer) Close() { p.fail(errClosed, true) }

// End is Close for a reason that the channels, and the other side, hear.
func (p *Peer) End(why error) { p.fail(why, true) }

// fail ends the Peer, from any goroutine: all connections are closed, and when nothing of
// them moves data any more so are the channels. The other side is told why where it is to
// hear more of it than that the connections end; the channels do not wait for that, which
// takes its time where the other side is dead.
func (p *Peer) fail(why error, tell bool) {
	p.once.Do(func() {
		p.why = why
		if tell {
			p.parted = appendFrame(nil, 0, frameGoodbye, wire.Encode(wire.NewFailure(why), 0))
		}
		close(p.dying)
		p.config.pulse.remove(p)
		// Whoever sets a deadline looks whether it is dying after that, so that none
		// outlasts these.
		_ = p.control.SetDeadline(time.Now().Add(p.farewell()))
		for _, c := range p.data {
			c.Close()
		}
		p.queue.end()
		go func() {
			p.movers.Wait()
			for _, c := range p.data {
				if z, is := c.(*zerocopyConn); is {
					z.drain() // until then the kernel reads the channels' memory
				}
			}
			p.loop.Do(p.perish)
			p.users.Wait()
			p.control.Close()
			p.gone()
		}()
	})
}

// farewell is how long the other side has to hear why.
func (p *Peer) farewell() time.Duration {
	if p.parted == nil {
		return 0
	}
	return min(p.config.Heartbeat, time.Second)
}

// failed is the end of a connection that could not be read or written. Where it was a data
// stream's, the other side hears which by the control stream.
func (p *Peer) failed(c net.Conn, doing string, err error) {
	var status *wire.Error
	said := errors.As(err, &status)
	broken := errors.Is(err, unix.EPIPE)
	ended := broken || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.ECONNRESET)
	if ended && (c != p.control || broken) {
		// Where the other side ends by itself it tells why, on another connection; and of a
		// broken one somebody else has met the cause.
		select {
		case <-p.dying:
		case <-time.After(p.config.Heartbeat):
		}
	}
	if ended && c == p.control {
		err = p.outbox.cause(err)
	}
	switch {
	case said:
		// What it sent makes no sense.
		p.fail(wire.Errorf(status.Status, "%w", &PeerError{Peer: p.config.Name, Cause: status}), true)
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		p.fail(wire.Errorf(wire.StatusPeerRelayDied, "%w", &PeerError{Peer: p.config.Name,
			Event: "closed its connection", Route: p.config.Route(c)}), c != p.control)
	default:
		p.fail(wire.Errorf(wire.StatusPeerRelayDied, "%w", &PeerError{Peer: p.config.Name,
			Event: "cannot be reached any more: " + doing, Route: p.config.Route(c), Cause: err}), c != p.control)
	}
}

// silent ends the Peer because of the other relay's inactivity on a connection.
func (p *Peer) silent(c net.Conn, limit time.Duration, cause error) {
	p.fail(p.deadFor(p.config.Route(c), cause, limit), true)
}

func route(c net.Conn) string { return fmt.Sprintf("%v to %v", c.LocalAddr(), c.RemoteAddr()) }

// perish ends the Peer on the loop, after all that came before: what carries its data
// first.
func (p *Peer) perish() {
	if p.extension != nil {
		p.extension.Down(p.why, p.bury)
		return
	}
	p.bury()
}

// bury tells the channels.
func (p *Peer) bury() {
	p.loop.Remove(p)
	p.dead = p.why
	p.sent = nil
	for number, w := range p.writes {
		delete(p.writes, number)
		w.done(p.dead)
	}
	for _, c := range p.channels {
		_ = c.endArrivals(true) // of a dead Peer it refuses nothing
	}
	for _, c := range p.channels {
		c.end(p.dead)
	}
	p.config.Down(p.dead)
}

func (p *Peer) isDying() bool {
	select {
	case <-p.dying:
		return true
	default:
		return false
	}
}

// Poll reads and handles frames of the peer, and sends the frames of this iteration in one call.
func (p *Peer) Poll() bool {
	progress := p.pollControl()
	return p.pollSent() || progress
}

func (p *Peer) pollSent() bool {
	if len(p.sent) == 0 || !p.urgent && p.loop.Now()-p.since < ackDelay {
		return false
	}
	p.urgent = false
	p.intake.active = p.loop.Now()
	data, frames := p.sent, p.frames
	p.sent, p.frames = p.sent[:0], 0
	p.utter(data, frames)
	return true
}

// Busy returns false, because the reading goroutine posts frames to a sleeping loop.
func (p *Peer) Busy() bool { return false }

// Arm lets the kernel wake the reading goroutine while the loop sleeps. It reports whether frames are
// still to be sent.
func (p *Peer) Arm() bool {
	p.hush(false)
	return len(p.sent) > 0
}

// Disarm has nothing to undo.
func (p *Peer) Disarm() {}

// ackDelay is how long a frame of sayLater waits for another one: to send takes longer than most copies
// of few bytes, whose end the loop would not see meanwhile.
const ackDelay = 20 * time.Microsecond

func (p *Peer) sendFrame(channel, kind uint32, payload ...[]byte) {
	p.urgent = true
	p.sayLater(channel, kind, payload...)
}

// sayLater sends a frame together with the next one, or after ackDelay.
func (p *Peer) sayLater(channel, kind uint32, payload ...[]byte) {
	if p.dead != nil {
		return
	}
	if len(p.sent) == 0 {
		p.since = p.loop.Now()
	}
	p.sent = appendFrame(p.sent, channel, kind, payload...)
	p.frames++
	if p.config.Alone || len(p.sent) >= p.config.Waiting {
		p.urgent = true
		p.pollSent()
	}
}
