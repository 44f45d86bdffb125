package tcp

import (
	"cmp"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

// outbox is what waits for the control stream. Who has something to say writes it, with
// what others have meanwhile, as long as the stream takes it at once: to wake a goroutine for
// it takes longer. What it does not take is the writer's.
type outbox struct {
	mu     sync.Mutex
	data   []byte
	frames uint64
	wake   chan struct{} // for the writer

	// The pen is who writes the stream's, and what follows is its owner's. Who gives it
	// back looks again whether something waits.
	pen   sync.Mutex
	spare []byte // an empty buffer
	rest  []byte // of a write, for the writer
	torn  bool   // it begins in the midst of a frame

	// What the socket has said of its connection's end: it says so once.
	socket sync.Mutex
	said   error
}

// cause is what the socket has said, or else what was met.
func (o *outbox) cause(met error) error {
	o.socket.Lock()
	defer o.socket.Unlock()
	if o.said != nil {
		return o.said
	}
	return met
}

// put adds frames, where no more than so many bytes wait.
func (o *outbox) put(data []byte, frames uint64, most int) bool {
	poll.Lock(&o.mu)
	defer o.mu.Unlock()
	if len(o.data) > 0 && len(o.data)+len(data) > most {
		return false
	}
	o.data = append(o.data, data...)
	o.frames += frames
	return true
}

// take gives what waits, to the pen's owner.
func (o *outbox) take() ([]byte, uint64) {
	poll.Lock(&o.mu)
	defer o.mu.Unlock()
	data, frames := o.data, o.frames
	o.data, o.frames = o.spare[:0], 0
	o.spare = nil
	return data, frames
}

// keep has a buffer used again, by the pen's owner.
func (o *outbox) keep(buffer []byte) {
	if cap(buffer) <= keptBuffer {
		o.spare = buffer
	}
}

func (o *outbox) waits() bool {
	poll.Lock(&o.mu)
	defer o.mu.Unlock()
	return len(o.data) > 0
}

func (o *outbox) call() {
	select {
	case o.wake <- struct{}{}:
	default: // it is awake
	}
}

// most of a buffer that is kept for the next batch, bytes.
const keptBuffer = 1 << 20

// maxBatch is the longest write of what the control stream's writer takes, bytes. Each has
// Config's silence: over TLS it goes out whole in that time or is lost.
const maxBatch = 64 << 10

// maxTurns is how often in turn somebody writes also what others have to say.
const maxTurns = 2

// utter says frames, with what else waits. Any goroutine may; it does not block.
func (p *Peer) utter(data []byte, frames uint64) {
	o := &p.outbox
	if !o.put(data, frames, p.config.Waiting) {
		p.fail(wire.Errorf(wire.StatusPeerRelayDied, "%w", &PeerError{Peer: p.config.Name, Event: "is too slow",
			Route: p.config.Route(p.control), Cause: fmt.Errorf("%w, more than %d bytes", errUnread, p.config.Waiting)}), true)
		return
	}
	if p.bare == nil {
		o.call()
		return
	}
	for range maxTurns {
		if !o.pen.TryLock() {
			return
		}
		whole := p.scribble()
		o.pen.Unlock()
		if !whole {
			break
		}
		if !o.waits() {
			return
		}
	}
	o.call()
}

// scribble writes what the stream takes at once, and reports whether that was all. The pen
// is the caller's.
func (p *Peer) scribble() bool {
	o := &p.outbox
	if len(o.rest) > 0 {
		return false
	}
	data, frames := o.take()
	if len(data) == 0 {
		return true
	}
	if frames > 0 {
		p.counters.messages.Add(frames)
		p.counters.batches.Add(1)
	}
	n := 0
	o.socket.Lock()
	_ = p.bare.Control(func(fd uintptr) { // that it is closed the writer hears
		var err error
		n, err = unix.SendmsgN(int(fd), data, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		if err != nil && err != unix.EAGAIN && err != unix.EPIPE {
			o.said = os.NewSyscallError("sendmsg", err)
		}
	})
	o.socket.Unlock()
	p.carried[p.control].Sent.Add(uint64(n))
	if n < len(data) {
		o.rest, o.torn = data[n:], n > 0
		return false
	}
	o.keep(data)
	return true
}

// writeControl sends what nobody else could.
func (p *Peer) writeControl() {
	o := &p.outbox
	owned := false
	defer func() {
		if !owned {
			o.pen.Lock() // for ever
		}
		if !o.torn { // what follows would be taken for the rest of it
			p.sendFarewell()
		}
	}()
	for {
		select {
		case <-p.dying:
			return
		case <-o.wake:
		}
		for more := true; more; more = o.waits() {
			o.pen.Lock()
			if owned = !p.write(); owned { // nobody is to write behind half a frame
				return
			}
			o.pen.Unlock()
		}
	}
}

// write sends what is left of a write, and what waits: in one write what has come together. The pen is
// the caller's.
func (p *Peer) write() bool {
	o := &p.outbox
	if len(o.rest) > 0 {
		if sent, ok := p.send(p.control, net.Buffers{o.rest}); !ok {
			o.torn = o.torn || sent > 0
			return false
		}
		o.rest, o.torn = nil, false
	}
	data, frames := o.take()
	defer o.keep(data)
	most := maxBatch
	if p.config.Alone {
		most = 0
	}
	p.counters.messages.Add(frames)
	for len(data) > 0 {
		n := batch(data, most)
		if frames > 0 {
			p.counters.batches.Add(1)
		}
		if sent, ok := p.send(p.control, net.Buffers{data[:n]}); !ok {
			o.torn = sent > 0
			return false
		}
		data = data[n:]
	}
	return true
}

// batch is how many bytes of the frames in data go in one write: whole frames, at least
// one, and of more no more than most bytes.
func batch(data []byte, most int) int {
	n := 0
	for n < len(data) {
		_, one, err := nextFrame(data[n:])
		if err != nil || one == 0 {
			return len(data) // it was not appendFrame that made them: the other side says so
		}
		if n > 0 && n+one > most {
			break
		}
		n += one
	}
	return n
}

// patience is how many Deads writes may be under way of which none goes on or lands: a
// relay acknowledges small ones only when its loop has its turn.
const patience = 2

// look ends a Peer whose other side lives and does nothing with what it is sent. It is
// called at each heartbeat, and counts these: while this process is stopped there are none,
// and the other side's may be stopped as well.
func (p *Peer) look() {
	moves := p.moves.Load()
	if p.underWay.Load() <= 0 || moves != p.seen {
		p.seen, p.still = moves, 0
		return
	}
	p.still++
	if limit := patience * p.config.Dead; time.Duration(p.still)*p.config.Heartbeat > limit && p.excused() == 0 {
		p.silent(p.control, limit, errUnacknowledged)
	}
}

// standing is for how many Deads the loop may have no turn before the Peer says nothing
// more: the other side then finds it dead. A driver's calls may take some.
const standing = 6

// turns reports whether the loop goes on. It has it take a turn now and then: often enough
// to tell, and seldom enough that a thousand Peers do not keep it awake.
func (p *Peer) turns() bool {
	limit := standing * p.config.Dead
	since := time.Since(p.start) - time.Duration(p.turn.Load())
	if since > limit/3 && p.asking.CompareAndSwap(false, true) {
		p.loop.Do(func() {
			p.turn.Store(int64(time.Since(p.start)))
			p.asking.Store(false)
		})
	}
	return since <= limit
}

// moved says that a write went on.
func (p *Peer) moved() { p.moves.Add(1) }

// sendFarewell tells the other side why the Peer ends, where it is to hear that.
func (p *Peer) sendFarewell() {
	if p.parted == nil {
		return
	}
	// Nothing is to be done where it cannot be said.
	_ = p.control.SetWriteDeadline(time.Now().Add(p.farewell()))
	if _, err := p.control.Write(p.parted); err == nil {
		if c, ok := p.control.(interface{ CloseWrite() error }); ok {
			_ = c.CloseWrite()
		}
	}
}

// send writes all of it, as long as the other side takes something, by Config's silence. It
// gives how many bytes went out.
func (p *Peer) send(c net.Conn, data net.Buffers) (sent int64, all bool) {
	return p.sendBy(c, func() (int64, error) { return data.WriteTo(c) })
}

// sendBy is send, of the bytes that step moves from where it stopped before.
func (p *Peer) sendBy(c net.Conn, step func() (int64, error)) (sent int64, all bool) {
	deadline := p.unlessDying(c.SetWriteDeadline)
	move := func() (int64, error) {
		n, err := step()
		sent += n
		p.carried[c].Sent.Add(uint64(n))
		return n, err
	}
	for {
		var n int64
		var err error
		if _, whole := c.(*tls.Conn); whole { // no write goes on that met a deadline
			if err = deadline(time.Now().Add(p.config.silence())); err == nil {
				n, err = move()
			}
		} else {
			n, err = patiently(p.config.silence(), deadline, move)
		}
		switch {
		case err == nil:
			return sent, true
		case errors.Is(err, errDying):
			return sent, false
		case !errors.Is(err, os.ErrDeadlineExceeded):
			p.failed(c, "sending", err)
			return sent, false
		case n == 0 && p.excused() == 0:
			p.silent(c, p.config.silence(), errTookNothing)
			return sent, false
		}
	}
}

// read reads what has come, or comes within a silence.
func (p *Peer) read(c net.Conn, b []byte, silence time.Duration) (int, error) {
	n, err := patiently(silence, p.unlessDying(c.SetReadDeadline), func() (int64, error) {
		n, err := c.Read(b)
		return int64(n), err
	})
	return int(n), err
}

// errDying is what a Peer that ends does in place of waiting.
var errDying = errors.New("the relay ends its connections")

// unlessDying sets a deadline, and looks after that whether the Peer is dying: fail, which
// sets its own, says so before it does.
func (p *Peer) unlessDying(deadline func(time.Time) error) func(time.Time) error {
	return func(at time.Time) error {
		err := deadline(at)
		if p.isDying() {
			return errDying
		}
		return err
	}
}

// The buffers that frames are read into have minBuffer bytes, and as many as maxBuffer
// once so much has come at once: most Peers of a relay that has many say little. There has
// always to be room for one frame.
const (
	minBuffer = 2 << 10
	maxBuffer = minBuffer << 5
)

var _ [maxBuffer - 2*(frameHeader+maxFrame)]struct{}

// maxFrames is how many frames an inbox keeps room for.
const maxFrames = 1 << 10

// inbox is what was read, and the frames in it.
type inbox struct {
	buffer []byte
	frames []frame
	left   []byte // behind the frames
}

// parse finds the frames in what is there, heartbeats aside, and how many bytes these are.
func (i *inbox) parse(there []byte) (used int, err error) {
	if i.frames = i.frames[:0]; cap(i.frames) > maxFrames {
		i.frames = nil
	}
	for {
		f, n, err := nextFrame(there[used:])
		if n == 0 || err != nil {
			return used, err
		}
		if used += n; f.kind != frameBeat {
			i.frames = append(i.frames, f)
		}
	}
}

// intake reads the control stream. A goroutine reads while the event loop sleeps or works. A spinning
// loop reads too, because waking the goroutine takes longer than a message within one host. The reader
// holds the lock until it has handled or posted the frames.
type intake struct {
	mu         sync.Mutex
	now, next  *inbox
	have, size int
	handled    chan struct{} // empty while the loop has frames to handle
	reads      atomic.Uint64 // of the loop
	heard      atomic.Uint64 // reads that got bytes
	last       atomic.Int64  // when the last of them was, since Peer.start
	seen       uint64        // heard at the last heartbeat; of the pulse

	watch sync.Mutex
	timed bool // the reader's wait has deadlines

	// The loop owns the rest. ask reads the socket, and sets the results.
	ask    func(fd uintptr)
	got    int
	failed error
	active time.Duration // of the loop's clock, when something was said or heard
	looked time.Duration
	// quiet is whether the socket wakes nobody for few bytes; mark sets that.
	quiet bool
	mark  func(fd uintptr)
}

// A loop that spins reads the control stream of a Peer that was active a moment ago, every so often.
const (
	activeInterval = 200 * time.Microsecond
	askInterval    = time.Microsecond
	// quietBytes have to be there before the kernel wakes the reader of a stream that a loop reads: each
	// wake-up takes the time of the other side's call.
	quietBytes = 32 << 10
)

func newIntake() *intake {
	i := &intake{size: minBuffer, now: &inbox{buffer: make([]byte, minBuffer)}, next: &inbox{},
		handled: make(chan struct{}, 1), timed: true}
	i.handled <- struct{}{}
	i.mark = func(fd uintptr) {
		low := 1
		if i.quiet {
			low = quietBytes
		}
		// Without it the reader is woken as well, which takes time only.
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT, low)
	}
	i.ask = func(fd uintptr) { i.got, i.failed = readSocket(fd, i.now.buffer[i.have:]) }
	return i
}

// readSocket reads without blocking. The error is EAGAIN without data and io.EOF at the end of the
// stream. It replaces unix.Recvfrom, which allocates an address for each call.
func readSocket(fd uintptr, b []byte) (int, error) {
	for {
		n, _, err := unix.RawSyscall6(unix.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)),
			unix.MSG_DONTWAIT, 0, 0)
		switch {
		case err == unix.EINTR:
		case err != 0:
			return 0, err
		case n == 0:
			return 0, io.EOF
		default:
			return int(n), nil
		}
	}
}

// took counts bytes that were read, and finds the frames. The lock is held.
func (p *Peer) took(n int) error {
	i := p.intake
	p.carried[p.control].Received.Add(uint64(n))
	if n > 0 {
		i.heard.Add(1)
		i.last.Store(int64(time.Since(p.start)))
	}
	if i.have += n; i.have == i.size && i.size < maxBuffer { // of what has come at once, or of a frame
		i.size *= 2
	}
	used, err := i.now.parse(i.now.buffer[:i.have])
	i.now.left = i.now.buffer[used:i.have]
	return err
}

// goOn has the next bytes read into a buffer behind those that are left of this one. The lock is
// held.
func (i *intake) goOn(left []byte) {
	if len(i.now.buffer) < i.size {
		i.now.buffer = make([]byte, i.size)
	}
	i.have = copy(i.now.buffer, left)
}

// pollControl reads the control stream without blocking and handles the frames. Only the loop calls it.
func (p *Peer) pollControl() bool {
	i, now := p.intake, p.loop.Now()
	if p.bare == nil || now-i.looked < askInterval || p.isDying() {
		return false
	}
	p.hush(now-i.active <= activeInterval)
	if !i.quiet || !i.mu.TryLock() {
		return false
	}
	defer i.mu.Unlock()
	i.looked = now
	select {
	case <-i.handled:
	default:
		return false // they have been posted, and come first
	}
	defer func() { i.handled <- struct{}{} }()
	i.got, i.failed = 0, unix.EAGAIN
	_ = p.bare.Control(i.ask) // that it is closed the reader hears
	switch {
	case i.failed == unix.EAGAIN || i.failed == io.EOF:
		return false
	case i.failed != nil: // which the socket does not say again
		p.outbox.socket.Lock()
		p.outbox.said = os.NewSyscallError("recvfrom", i.failed)
		p.outbox.socket.Unlock()
		return false
	}
	i.active = now
	i.reads.Add(1)
	wrong := p.took(i.got)
	frames := i.now.frames
	p.handle(frames)
	clear(frames)
	i.goOn(i.now.left)
	if wrong != nil && !p.isDying() {
		p.failed(p.control, "receiving", wrong)
	}
	return len(frames) > 0
}

// hush sets the number of bytes (SO_RCVLOWAT) at which the kernel wakes the reading goroutine: many
// while the loop reads the stream, else one. With one, bytes that are already queued wake the goroutine
// at once. Only the loop calls hush.
func (p *Peer) hush(quiet bool) {
	if i := p.intake; i.quiet != quiet {
		i.quiet = quiet
		_ = p.bare.Control(i.mark) // that it is closed the reader hears
	}
}

// readMore waits for bytes of the control stream, as long as a silence. The lock is the caller's
// afterwards. Where the loop has read meanwhile there may be none.
func (p *Peer) readMore(silence time.Duration) (int, error) {
	i := p.intake
	if p.bare == nil {
		n, err := p.read(p.control, i.now.buffer[i.have:], silence)
		i.mu.Lock()
		return n, err
	}
	reads, locked := i.reads.Load(), false
	move := func() (int64, error) {
		n, err := 0, error(nil)
		waited := p.bare.Read(func(fd uintptr) bool {
			i.mu.Lock()
			n, err = readSocket(fd, i.now.buffer[i.have:])
			if locked = err != unix.EAGAIN; !locked {
				i.mu.Unlock()
			}
			return locked
		})
		if waited == nil && err != nil && err != io.EOF {
			err = os.NewSyscallError("recvfrom", err)
		}
		return int64(n), cmp.Or(waited, err)
	}
	n, err := p.readPatiently(silence, move)
	if !locked {
		i.mu.Lock()
	}
	if errors.Is(err, os.ErrDeadlineExceeded) && i.reads.Load() != reads {
		err = nil
	}
	return int(n), err
}

// watched reports whether the reader of the control stream waits without deadlines until the pulse finds
// an interval without bytes. A deadline that each heartbeat moves wakes the process at its old time.
func (p *Peer) watched() bool {
	return p.bare != nil && 2*p.config.Heartbeat < p.config.silence()
}

// readPatiently calls move as patiently does. A reader that the pulse watches counts the silence from
// the last bytes, but no more than two heartbeats of it: this process may have been stopped.
func (p *Peer) readPatiently(silence time.Duration, move func() (int64, error)) (n int64, err error) {
	i, deadline := p.intake, p.unlessDying(p.control.SetReadDeadline)
	timed := func(is bool) (err error) {
		i.watch.Lock()
		defer i.watch.Unlock()
		if i.timed && !is {
			err = deadline(time.Time{})
		}
		i.timed = is
		if p.isDying() { // which the wait without a deadline would not notice
			err = errDying
		}
		return err
	}
	if p.watched() && silence == p.config.silence() {
		if err = timed(false); err == nil {
			n, err = move()
		}
		if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		silence -= min(time.Since(p.start)-time.Duration(i.last.Load()), 2*p.config.Heartbeat)
	}
	if err = timed(true); err == nil {
		n, err = patiently(silence, deadline, move)
	}
	return n, err
}

// watchSilence has the reader wait with deadlines if nothing has come since the last call. The pulse
// calls it.
func (p *Peer) watchSilence() {
	i := p.intake
	heard := i.heard.Load()
	silent := heard == i.seen
	if i.seen = heard; !silent || !p.watched() {
		return
	}
	i.watch.Lock()
	defer i.watch.Unlock()
	if i.timed || p.isDying() {
		return
	}
	_ = p.control.SetReadDeadline(time.Unix(1, 0)) // that it is closed the reader hears
	if p.isDying() {
		_ = p.control.SetReadDeadline(time.Now().Add(p.farewell())) // as fail has set it
	}
}

// readControl reads frames and has the loop handle them, and reads on meanwhile, into
// another buffer. While the loop handles nothing, nothing more is read: the other side
// waits.
func (p *Peer) readControl() {
	i, limit := p.intake, p.config.silence()
	for {
		n, err := p.readMore(limit)
		if errors.Is(err, errDying) {
			i.mu.Unlock()
			p.listen()
			return
		}
		limit = p.config.silence()
		wrong := p.took(n)
		left := i.now.left
		if frames := i.now.frames; len(frames) > 0 {
			<-i.handled
			if !p.loop.Do(func() { p.handle(frames); clear(frames); i.active = p.loop.Now(); i.handled <- struct{}{} }) {
				p.fail(errClosed, false) // the loop has ended
				i.handled <- struct{}{}
			}
			i.now, i.next = i.next, i.now
		}
		i.goOn(left)
		if wrong != nil || err != nil { // which come after the frames
			<-i.handled
			i.handled <- struct{}{}
		}
		i.mu.Unlock()
		switch {
		case p.isDying():
		case wrong != nil:
			p.failed(p.control, "receiving", wrong)
		case errors.Is(err, os.ErrDeadlineExceeded):
			if limit = p.excused(); limit > 0 {
				continue
			}
			p.silent(p.control, p.config.silence(), errSaidNothing)
		case err != nil:
			p.failed(p.control, "receiving", err)
		}
	}
}

// listen reads what the other side still says, which nobody wants, until it has heard
// why this one ends: unread bytes would take the reason with them.
func (p *Peer) listen() {
	if p.parted != nil {
		_ = p.control.SetReadDeadline(time.Now().Add(p.farewell()))
		_, _ = io.Copy(io.Discard, p.control)
	}
}

func (p *Peer) handle(frames []frame) {
	for _, f := range frames {
		if p.isDying() {
			return
		}
		if err := p.frame(f); err != nil {
			p.failed(p.control, "receiving", err)
			return
		}
	}
}

// acked is the other side's word that a write is in its memory.
func (p *Peer) acked(number uint64) error {
	w := p.writes[number]
	if w == nil {
		return refused("write %d has landed, which is not under way", number)
	}
	// It can be known there before the writer here is told that its last byte is sent;
	// until then the writer may read the source.
	if p.queue.acknowledged(w) {
		p.finish(w)
		return nil
	}
	p.settle(w)
	return nil
}

// settle no longer counts a write as one that the other side owes an acknowledgement: look must not end
// a Peer because the kernel still has pages of a zero-copy send.
func (p *Peer) settle(w *write) {
	if !w.settled {
		w.settled = true
		p.underWay.Add(-1)
		p.moved()
	}
}

func (p *Peer) finish(w *write) {
	if p.writes[w.number] == w {
		p.settle(w)
		delete(p.writes, w.number)
		if !w.streamed {
			w.done(nil)
			return
		}
		c := p.channels[w.channel] // there until these have landed
		c.writes--
		w.done(nil)
		c.sendFin()
	}
}

// acknowledge tells the other side that its write has landed. Any goroutine may.
func (p *Peer) acknowledge(channel uint32, number uint64) {
	p.utter(appendFrame(nil, channel, frameLanded, landedPayload(number)), 1)
}

func landedPayload(number uint64) []byte { return binary.LittleEndian.AppendUint64(nil, number) }

// takeEager is a write that came with the messages.
func (p *Peer) takeEager(c *Channel, payload []byte) error {
	h, err := readPiece(payload)
	if err != nil {
		return err
	}
	data := payload[pieceHeader:]
	if h.channel != c.number || h.at != 0 || h.length != uint64(len(data)) {
		return refused("a write of %d bytes on channel %d with %d on channel %d", h.length, h.channel, len(data), c.number)
	}
	return p.land(h, func(to []byte) error {
		copy(to, data)
		return nil
	}, func(f func()) { f() }, func(channel uint32, number uint64) {
		p.sayLater(channel, frameLanded, landedPayload(number)) // with the answer to the message, if there is one soon
	})
}
