// Package tcp is the transport between relays of two hosts over TCP. A Peer is a set of connections
// between two relays: one control connection, on which the connections of every client are
// channels, and several data connections, over which a write is spread.
//
// Goroutines read and write the connections, so that any net.Conn is a connection; the goroutine
// that adds a frame to the control stream also writes the bytes that the socket accepts without
// blocking. The relay's event loop owns the rest. Data of the peer is untrusted: the receiver
// checks the header of each piece against the current grants before a byte is stored, and stores
// the bytes only in the granted memory.
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

// Config configures a Peer. Zero values select the defaults in the comments.
type Config struct {
	// Name describes the peer in messages: host, interface and address.
	Name string
	// Heartbeat is the interval of heartbeats (1.4 s). Dead is the time in which the channels learn
	// that the peer is dead (5 s): a peer that sends nothing or accepts nothing.
	Heartbeat, Dead time.Duration
	// Leaving is the time for the peer to close a channel after this side (12 Dead): a begun write
	// may wait behind writes of other channels.
	Leaving time.Duration
	// Eager is the maximum length of a write that travels with the messages (4 KiB, at most 16 KiB
	// and one piece; negative for none).
	Eager int
	// Waiting is the maximum number of bytes of messages that wait for the peer (32 MiB). Channels
	// is the maximum number of open channels of the peer (65536).
	Waiting, Channels int
	// zerocopy selects the data streams' sends that use MSG_ZEROCOPY, for tests. zerocopyFaults
	// injects faults, for tests.
	zerocopy       zerocopyUse
	zerocopyFaults zerocopyFaults
	pulse          *pulse // shared by the Peers of Peers; nil for an own pulse
	// Alone sends each message by its own write, to measure the benefit of common writes.
	Alone bool
	// Route describes a connection in messages (its addresses).
	Route func(net.Conn) string
	// Carried returns the counter of a connection's bytes; nil for no counters. The Peer calls
	// Carried once for each connection.
	Carried func(net.Conn) *Carried
	// Accept is called on the loop with each channel that the peer opens, and its first message.
	// Accept sets the handlers by Handle, or closes the channel.
	Accept func(c *Channel, first wire.Message, sequence uint32)
	// Extend returns the extension that carries the data of the channels in place of the data
	// streams; nil for none. The loop calls Extend before the first frame, if the peer supports
	// extensions.
	Extend func(*Peer) Extension
	// Down is called on the loop when the Peer is dead, after the end of its channels.
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
		c.Heartbeat = 1400 * time.Millisecond
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

// silence is the maximum time without received bytes, or without accepted bytes. The rest of Dead
// is for the kernel, which counts from a retransmission, and for the end of the channels. In the
// four heartbeats of the silence a packet is sent five times.
func (c *Config) silence() time.Duration { return c.Dead - c.Dead/10 }

// Carried counts the bytes of connections.
type Carried struct{ Sent, Received atomic.Uint64 }

// Figures are the counters of a Peer.
type Figures struct {
	// Messages counts frames of the control stream without heartbeats, and Batches the writes that
	// sent them.
	Messages, Batches uint64
	// Writes counts writes of slots, Pieces the pieces of writes over data streams, and Eager the
	// writes with the messages.
	Writes, Pieces, Eager uint64
	// Zerocopy counts the sends without a copy.
	Zerocopy Zerocopy
}

// Peer is a peer relay with its connections. The event loop owns the methods, except Figures.
type Peer struct {
	config  Config
	loop    *poll.Loop
	control net.Conn
	bare    syscall.RawConn // the control stream, if it is a plain socket
	data    []net.Conn
	version uint32
	copies  string                // why a data stream does not send without copies
	carried map[net.Conn]*Carried // constant after newPeer

	channels map[uint32]*Channel
	last     uint32        // number of the last channel of this side
	lastOpen uint32        // number of the last channel of the peer
	theirs   int           // open channels of the peer
	sent     []byte        // frames of this iteration of the loop
	frames   uint64        // number of frames in sent
	urgent   bool          // a frame of sent must not wait
	since    time.Duration // time of the first frame of sent, on the loop's clock
	writes   map[uint64]*write
	written  uint64
	dead     error // set when the channels have ended

	extension Extension // nil if the data streams carry the data
	landings  landings
	outbox    outbox
	intake    *intake
	queue     sendQueue
	counters  struct{ messages, batches, writes, pieces, eager atomic.Uint64 }

	// Outstanding writes, and the count of their progress; the count at the last look, and the
	// number of heartbeats without progress.
	underWay atomic.Int64
	moves    atomic.Uint64
	seen     uint64
	still    int
	start    time.Time
	// Time of the last iteration of the loop, since start, and whether one is requested.
	turn   atomic.Int64
	asking atomic.Bool

	dying         chan struct{} // closed by fail
	once          sync.Once
	why           error          // set before dying is closed
	farewellFrame []byte         // the farewell frame, or nil
	movers        sync.WaitGroup // goroutines that access the channels' memory: the data streams
	users         sync.WaitGroup // goroutines of the control stream
	gone          func()         // called when both groups have ended
}

// New creates a Peer of connections after the greeting, and takes ownership of the connections.
func New(loop *poll.Loop, s *Streams, config Config) *Peer {
	return newPeer(loop, s, config, func() {})
}

// newPeer creates a Peer that calls gone when it no longer reads or writes memory.
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
	p.last, p.lastOpen = 0, 1                    // the channels of the peer are 3, 5 …
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
		p.bare, _ = c.SyscallConn() // the writer detects a closed socket
	}
	loop.Add(p)
	// Count every goroutine before one begins, which may end the Peer at once and wait for the
	// groups.
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

// Figures returns the counters. Any goroutine may call Figures.
func (p *Peer) Figures() Figures {
	c := &p.counters
	return Figures{c.messages.Load(), c.batches.Load(), c.writes.Load(), c.pieces.Load(), c.eager.Load(),
		p.zerocopyFigures()}
}

// Name returns Config.Name.
func (p *Peer) Name() string { return p.config.Name }

// Connections returns the control connection and the data connections.
func (p *Peer) Connections() (control net.Conn, data []net.Conn) { return p.control, p.data }

// Channels returns the number of open channels. Call Channels on the event loop.
func (p *Peer) Channels() int { return len(p.channels) }

// Dialed reports whether this relay made the connections.
func (p *Peer) Dialed() bool { return p.last%2 == 1 }

// Version returns the version of this transport that both relays use.
func (p *Peer) Version() uint32 { return p.version }

// errClosed is the cause of a Peer's end by this relay.
var errClosed = wire.Errorf(wire.StatusPeerClosed, "the relay closed its connections")

// Close ends the Peer. The channels end when no transfer reads or writes their memory.
func (p *Peer) Close() { p.fail(errClosed, true) }

// End is Close with a cause for the channels and the peer.
func (p *Peer) End(why error) { p.fail(why, true) }

// fail ends the Peer, from any goroutine. fail closes the connections; when they move no more data,
// the channels end. With tell, the peer gets the cause. The channels do not wait for that message,
// which takes long if the peer is dead.
func (p *Peer) fail(why error, tell bool) {
	p.once.Do(func() {
		p.why = why
		if tell {
			p.farewellFrame = appendFrame(nil, 0, frameGoodbye, wire.Encode(wire.NewFailure(why), 0))
		}
		close(p.dying)
		p.config.pulse.remove(p)
		// Every goroutine that sets a deadline checks for the end afterwards, so that these
		// deadlines are the last.
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

// farewell is the time in which the peer may read the cause.
func (p *Peer) farewell() time.Duration {
	if p.farewellFrame == nil {
		return 0
	}
	return min(p.config.Heartbeat, time.Second)
}

// failed handles a failed read or write of a connection. For a data stream, the control stream
// carries the cause to the peer.
func (p *Peer) failed(c net.Conn, doing string, err error) {
	var status *wire.Error
	said := errors.As(err, &status)
	broken := errors.Is(err, unix.EPIPE)
	ended := broken || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.ECONNRESET)
	if ended && (c != p.control || broken) {
		// A peer that ends sends the cause on another connection; for a broken connection another
		// goroutine has the cause.
		select {
		case <-p.dying:
		case <-time.After(min(p.config.Heartbeat, time.Second)):
		}
	}
	if ended && c == p.control {
		err = p.outbox.cause(err)
	}
	switch {
	case said:
		// The peer has sent an invalid message.
		p.fail(wire.Errorf(status.Status, "%w", &PeerError{Peer: p.config.Name, Cause: status}), true)
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		p.fail(wire.Errorf(wire.StatusPeerRelayDied, "%w", &PeerError{Peer: p.config.Name,
			Event: "closed its connection", Route: p.config.Route(c)}), c != p.control)
	default:
		p.fail(wire.Errorf(wire.StatusPeerRelayDied, "%w", &PeerError{Peer: p.config.Name,
			Event: "is unreachable: " + doing, Route: p.config.Route(c), Cause: err}), c != p.control)
	}
}

// silent ends the Peer because of the other relay's inactivity on a connection.
func (p *Peer) silent(c net.Conn, limit time.Duration, cause error) {
	p.fail(p.deadFor(p.config.Route(c), cause, limit), true)
}

func route(c net.Conn) string { return fmt.Sprintf("%v to %v", c.LocalAddr(), c.RemoteAddr()) }

// perish ends the Peer on the loop, after earlier frames: first the extension.
func (p *Peer) perish() {
	if p.extension != nil {
		p.extension.Down(p.why, p.bury)
		return
	}
	p.bury()
}

// bury ends the channels.
func (p *Peer) bury() {
	p.loop.Remove(p)
	p.dead = p.why
	p.sent = nil
	for number, w := range p.writes {
		delete(p.writes, number)
		w.done(p.dead)
	}
	for _, c := range p.channels {
		_ = c.endArrivals(true) // without an error for a dead Peer
	}
	for _, c := range p.channels {
		c.transition(channelDead, p.dead)
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
	p.sendFrames(data, frames)
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

// Disarm has nothing to reverse.
func (p *Peer) Disarm() {}

// ackDelay is how long a frame of sendLater waits for another frame: a send takes longer than most
// copies of few bytes, and the loop would not see the end of a copy meanwhile.
const ackDelay = 20 * time.Microsecond

func (p *Peer) sendFrame(channel, kind uint32, payload ...[]byte) {
	p.urgent = true
	p.sendLater(channel, kind, payload...)
}

// sendLater sends a frame together with the next frame, or after ackDelay.
func (p *Peer) sendLater(channel, kind uint32, payload ...[]byte) {
	if p.dead != nil {
		return
	}
	if len(p.sent) == 0 {
		p.since = p.loop.Now()
	}
	p.sent = appendFrame(p.sent, channel, kind, payload...)
	if kind == frameLeave { // which alone is too short to wake the reader of an idle Peer (idleBytes)
		p.sent = append(p.sent, heartbeat...)
	}
	p.frames++
	if p.config.Alone || len(p.sent) >= p.config.Waiting {
		p.urgent = true
		p.pollSent()
	}
}
