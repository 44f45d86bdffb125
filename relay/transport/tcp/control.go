package tcp

import (
	"bytes"
	"cmp"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

// outbox has the frames that wait for the control stream. The goroutine that adds frames also
// writes the waiting frames while the socket accepts bytes without blocking: a wakeup of another
// goroutine takes longer. The writer goroutine sends the rest.
type outbox struct {
	mu     sync.Mutex
	data   []byte
	frames uint64
	wake   chan struct{} // wakes the writer

	// The owner of pen writes the stream and owns the following fields. After the release of pen,
	// the goroutine checks again for waiting frames.
	pen   sync.Mutex
	spare []byte // an empty buffer
	rest  []byte // unsent bytes of a write, for the writer
	torn  bool   // rest begins within a frame

	// said is the socket's error at the end of the connection. The socket reports the error once.
	socket sync.Mutex
	said   error
}

// cause returns the socket's error, or met without one.
func (o *outbox) cause(met error) error {
	o.socket.Lock()
	defer o.socket.Unlock()
	if o.said != nil {
		return o.said
	}
	return met
}

// put adds frames if the outbox is empty or if no more than most bytes wait afterwards.
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

// take returns the waiting frames. The caller owns pen.
func (o *outbox) take() ([]byte, uint64) {
	poll.Lock(&o.mu)
	defer o.mu.Unlock()
	data, frames := o.data, o.frames
	o.data, o.frames = o.spare[:0], 0
	o.spare = nil
	return data, frames
}

// keep stores a buffer for reuse. The caller owns pen.
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
	default: // the writer is awake
	}
}

// keptBuffer is the maximum size of a buffer for reuse, bytes.
const keptBuffer = 1 << 20

// maxBatch is the longest write of the control stream's writer, bytes. Each write has Config's
// silence: over TLS the write completes in that time or fails.
const maxBatch = 64 << 10

// maxTurns is the maximum number of successive writes that a goroutine makes for the frames of
// other goroutines.
const maxTurns = 2

// sendFrames sends frames together with the waiting frames. Any goroutine may call sendFrames. It does not
// block.
func (p *Peer) sendFrames(data []byte, frames uint64) {
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
		whole := p.writeNow()
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

// writeNow writes the bytes that the socket accepts without blocking, and reports whether nothing
// remains. The caller owns pen.
func (p *Peer) writeNow() bool {
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
	_ = p.bare.Control(func(fd uintptr) { // the writer detects a closed socket
		var err error
		n, err = writeSocket(fd, data)
		if err != nil && err != unix.EAGAIN && err != unix.EPIPE {
			o.said = os.NewSyscallError("sendto", err)
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

// writeControl sends the frames that sendFrames could not send.
func (p *Peer) writeControl() {
	o := &p.outbox
	owned := false
	defer func() {
		if !owned {
			o.pen.Lock() // forever
		}
		if !o.torn { // the peer would read the farewell as the rest of a frame
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
			if owned = !p.write(); owned { // no goroutine may write after a partial frame
				return
			}
			o.pen.Unlock()
		}
	}
}

// write sends the rest of a write, and the waiting frames in as few writes as possible. The caller
// owns pen.
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

// batch returns the number of bytes of data for one write: whole frames, at least one frame, and
// further frames up to most bytes.
func batch(data []byte, most int) int {
	n := 0
	for n < len(data) {
		_, one, err := nextFrame(data[n:])
		if err != nil || one == 0 {
			return len(data) // invalid frames; the peer reports the error
		}
		if n > 0 && n+one > most {
			break
		}
		n += one
	}
	return n
}

// patience is the number of Dead intervals that a write may lack progress and acknowledgement: the
// loop of a relay acknowledges small writes only in its iterations.
const patience = 2

// look ends a Peer whose other side lives but acknowledges nothing. The pulse calls look at each
// heartbeat, and look counts heartbeats: a stopped process counts none, and the peer may be stopped
// too.
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

// standing is the number of Dead intervals without an iteration of the loop after which the Peer
// sends no heartbeats. The peer then ends the Peer. Calls of a driver may take several intervals.
const standing = 6

// turns reports whether the loop runs. turns schedules a function on the loop from time to time:
// often enough to detect a blocked loop, and seldom enough that a thousand Peers do not keep the
// loop awake.
func (p *Peer) turns() bool {
	limit := standing * p.config.Dead
	since := time.Since(p.start) - time.Duration(p.turn.Load())
	if since > limit/2 && p.asking.CompareAndSwap(false, true) {
		p.loop.Do(func() {
			p.turn.Store(int64(time.Since(p.start)))
			p.asking.Store(false)
		})
	}
	return since <= limit
}

// moved records progress of a write.
func (p *Peer) moved() { p.moves.Add(1) }

// sendFarewell sends the reason of the Peer's end to the peer, if there is a farewell.
func (p *Peer) sendFarewell() {
	if p.farewellFrame == nil {
		return
	}
	// An error has no consequence: the Peer ends anyway.
	_ = p.control.SetWriteDeadline(time.Now().Add(p.farewell()))
	if _, err := p.control.Write(p.farewellFrame); err == nil {
		if c, ok := p.control.(interface{ CloseWrite() error }); ok {
			_ = c.CloseWrite()
		}
	}
}

// send writes data. It waits for Config's silence without progress, and returns the number of sent
// bytes.
func (p *Peer) send(c net.Conn, data net.Buffers) (sent int64, all bool) {
	return p.sendBy(c, func() (int64, error) { return data.WriteTo(c) })
}

// sendBy is send with a function that continues the write at each call.
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
		if _, whole := c.(*tls.Conn); whole { // a TLS write cannot continue after a deadline
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

// read reads available bytes, or waits for bytes for silence.
func (p *Peer) read(c net.Conn, b []byte, silence time.Duration) (int, error) {
	n, err := patiently(silence, p.unlessDying(c.SetReadDeadline), func() (int64, error) {
		n, err := c.Read(b)
		return int64(n), err
	})
	return int(n), err
}

// errDying replaces a wait in an ending Peer.
var errDying = errors.New("the relay ends its connections")

// unlessDying sets a deadline and then checks whether the Peer is ending: fail marks the Peer
// before it sets its own deadline.
func (p *Peer) unlessDying(deadline func(time.Time) error) func(time.Time) error {
	return func(at time.Time) error {
		err := deadline(at)
		if p.isDying() {
			return errDying
		}
		return err
	}
}

// The buffers for frames have minBuffer bytes, and up to maxBuffer after as many bytes have come at
// once: most Peers of a relay with many Peers send little. A buffer always has room for one frame.
const (
	minBuffer = 2 << 10
	maxBuffer = minBuffer << 5
)

var _ [maxBuffer - 2*(frameHeader+maxFrame)]struct{}

// maxFrames is the capacity of an inbox for reuse, frames.
const maxFrames = 1 << 10

// inbox has received bytes and their frames.
type inbox struct {
	buffer []byte
	frames []frame
	left   []byte // behind the frames
}

// parse finds the frames in there, without heartbeats, and returns the length of the complete
// frames.
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

// intake reads the control stream. A goroutine reads while the event loop sleeps or works. A
// spinning loop reads too, because a wakeup of the goroutine takes longer than a message within one
// host. The reader holds the lock until the frames are handled or posted.
type intake struct {
	mu         sync.Mutex
	now, next  *inbox
	have, size int
	handled    chan struct{} // empty while the loop has frames to handle
	reads      atomic.Uint64 // reads by the loop
	heard      atomic.Uint64 // reads that got bytes
	last       atomic.Int64  // time of the last such read, since Peer.start
	others     atomic.Uint64 // received frames but heartbeats
	seen       uint64        // heard at the last heartbeat; owned by the pulse
	before     uint64        // others at the last heartbeat; owned by the pulse

	watch sync.Mutex
	timed bool // the reader waits with deadlines

	// The loop owns the following fields. ask reads the socket and sets the results.
	ask    func(fd uintptr)
	got    int
	failed error
	active time.Duration // time of the last message, on the loop's clock
	looked time.Duration

	// wakes has the number of bytes that wake the reader. marking is held during a change, and mark
	// applies the number to the socket.
	wakes   atomic.Int32
	marking sync.Mutex
	mark    func(fd uintptr)
}

// A spinning loop reads the control stream of a recently active Peer at intervals.
const (
	activeInterval = 200 * time.Microsecond
	askInterval    = time.Microsecond
	// quietBytes is the number of available bytes at which the kernel wakes the reader of a stream
	// that a loop reads: each wakeup costs time in the other side's call.
	quietBytes = 32 << 10
	// idleBytes is one more than a heartbeat: the pulse reads the heartbeats of an idle Peer. Every
	// other frame is longer, or has a heartbeat behind it.
	idleBytes = frameHeader + 1
)

func newIntake() *intake {
	i := &intake{size: minBuffer, now: &inbox{buffer: make([]byte, minBuffer)}, next: &inbox{},
		handled: make(chan struct{}, 1), timed: true}
	i.handled <- struct{}{}
	i.wakes.Store(1)
	i.mark = func(fd uintptr) {
		// Without the option the kernel wakes the reader for each byte, which only costs time.
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT, int(i.wakes.Load()))
	}
	i.ask = func(fd uintptr) { i.got, i.failed = readSocket(fd, i.now.buffer[i.have:]) }
	return i
}

// readSocket reads without blocking. The error is EAGAIN without data and io.EOF at the end of the
// stream. It replaces unix.Recvfrom, which allocates an address for each call.
func readSocket(fd uintptr, b []byte) (int, error) { return receiveFrom(fd, b, 0) }

func receiveFrom(fd uintptr, b []byte, flags uintptr) (int, error) {
	for {
		n, _, err := unix.RawSyscall6(unix.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)),
			unix.MSG_DONTWAIT|flags, 0, 0)
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

// writeSocket writes without blocking. Neither it nor readSocket tells the runtime of the system call,
// which would wake the runtime's monitor for each heartbeat of an idle relay.
func writeSocket(fd uintptr, b []byte) (int, error) {
	n, _, err := unix.RawSyscall6(unix.SYS_SENDTO, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)),
		unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	if err != 0 {
		return 0, err
	}
	return int(n), nil
}

// took counts n read bytes and finds the frames. The caller holds the lock.
func (p *Peer) took(n int) error {
	i := p.intake
	if n > 0 {
		p.heard(n)
	}
	if i.have += n; i.have == i.size && i.size < maxBuffer { // by bytes at once, or by a long frame
		i.size *= 2
	}
	used, err := i.now.parse(i.now.buffer[:i.have])
	i.now.left = i.now.buffer[used:i.have]
	if i.others.Add(uint64(len(i.now.frames))); p.bare != nil && used < i.have {
		p.wakeAt(1, idleBytes) // the rest of a frame may be short
	}
	return err
}

// goOn prepares the buffer for the next bytes, after the left bytes of the last buffer. The caller
// holds the lock.
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
	if i.wakes.Load() != quietBytes || !i.mu.TryLock() {
		return false
	}
	defer i.mu.Unlock()
	i.looked = now
	select {
	case <-i.handled:
	default:
		return false // posted frames come first
	}
	defer func() { i.handled <- struct{}{} }()
	i.got, i.failed = 0, unix.EAGAIN
	_ = p.bare.Control(i.ask) // the reader detects a closed socket
	switch {
	case i.failed == unix.EAGAIN || i.failed == io.EOF:
		return false
	case i.failed != nil: // the socket reports the error once
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
// while the loop reads the stream, then one. With one, bytes in the queue wake the goroutine at
// once. Only the loop calls hush.
func (p *Peer) hush(quiet bool) {
	if quiet {
		p.wakeAt(quietBytes, 1, idleBytes)
	} else {
		p.wakeAt(1, quietBytes)
	}
}

// wakeAt changes the number of bytes that wake the reader from one of some numbers.
func (p *Peer) wakeAt(bytes int32, from ...int32) {
	i := p.intake
	if !slices.Contains(from, i.wakes.Load()) {
		return
	}
	i.marking.Lock()
	defer i.marking.Unlock()
	if slices.Contains(from, i.wakes.Load()) {
		i.wakes.Store(bytes)
		_ = p.bare.Control(i.mark) // the reader detects a closed socket
	}
}

// hearBeats takes waiting heartbeats, so that they wake no goroutine, from the first call on before which
// nothing else arrived. Other bytes wake the reader, and so do two heartbeats between two calls. Only
// the pulse calls hearBeats.
func (p *Peer) hearBeats() {
	i := p.intake
	i.watch.Lock()
	timed := i.timed // the reader would not know of the heartbeats
	i.watch.Unlock()
	if timed || !p.watched() || !i.mu.TryLock() {
		return
	}
	defer i.mu.Unlock()
	if frames := i.others.Load(); frames != i.before {
		i.before = frames
	} else if i.have == 0 {
		p.wakeAt(idleBytes, 1)
	}
	if i.wakes.Load() != idleBytes {
		return
	}
	var beats [4 * frameHeader]byte
	n, other := 0, false
	_ = p.bare.Control(func(fd uintptr) { // the reader detects a closed socket
		n, _ = receiveFrom(fd, beats[:], unix.MSG_PEEK)
		for at := 0; at < n; at += frameHeader {
			other = other || !bytes.Equal(beats[at:min(at+frameHeader, n)], heartbeat)
		}
		if n > 0 && !other {
			n, _ = receiveFrom(fd, beats[:n], 0)
		}
	})
	switch {
	case other:
		p.wakeAt(1, idleBytes)
	case n > 0:
		p.heard(n)
	}
}

// heard records the arrival of bytes.
func (p *Peer) heard(n int) {
	p.carried[p.control].Received.Add(uint64(n))
	p.intake.heard.Add(1)
	p.intake.last.Store(int64(time.Since(p.start)))
}

// readMore waits for bytes of the control stream for silence, and returns with the lock held. n may
// be 0 if the loop has read meanwhile.
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

// readPatiently calls move as patiently does. A reader that the pulse watches counts the silence
// from the last bytes, up to two heartbeats: this process may have been stopped.
func (p *Peer) readPatiently(silence time.Duration, move func() (int64, error)) (n int64, err error) {
	i, deadline := p.intake, p.unlessDying(p.control.SetReadDeadline)
	timed := func(is bool) (err error) {
		i.watch.Lock()
		defer i.watch.Unlock()
		if i.timed && !is {
			err = deadline(time.Time{})
		}
		i.timed = is
		if p.isDying() { // a wait without a deadline would miss this
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

// watchSilence makes the reader wait with deadlines if no bytes have come since the last call. The
// pulse calls watchSilence.
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
	p.wakeAt(1, idleBytes)
	_ = p.control.SetReadDeadline(time.Unix(1, 0)) // the reader detects a closed socket
	if p.isDying() {
		_ = p.control.SetReadDeadline(time.Now().Add(p.farewell())) // the deadline of fail
	}
}

// readControl reads frames into two buffers in turn, and the loop handles the frames. While the
// loop handles nothing, readControl reads nothing, so that the peer waits.
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
		if wrong != nil || err != nil { // the errors follow the frames
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

// listen discards received bytes until the peer has read the reason of the Peer's end: unread bytes
// would make the kernel drop the reason.
func (p *Peer) listen() {
	if p.farewellFrame != nil {
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

// acked handles the acknowledgement of a write by the peer.
func (p *Peer) acked(number uint64) error {
	w := p.writes[number]
	if w == nil {
		return refused("acknowledgement of write %d: no such write is outstanding", number)
	}
	action := p.queue.acknowledged(w)
	switch action {
	case writeCount, writeCountFinish:
		// look must not end a Peer because the kernel still has pages of a zero-copy send.
		p.underWay.Add(-1)
		p.moved()
	}
	if action == writeCountFinish {
		p.finish(w)
	}
	return nil
}

// finish ends a complete write.
func (p *Peer) finish(w *write) {
	if p.writes[w.number] == w {
		delete(p.writes, w.number)
		if !w.streamed {
			w.done(nil)
			return
		}
		c := p.channels[w.channel] // open until its writes have been acknowledged
		c.writes--
		w.done(nil)
		c.drain()
	}
}

// acknowledge sends the acknowledgement of a write to the peer. Any goroutine may call acknowledge.
func (p *Peer) acknowledge(channel uint32, number uint64) {
	p.sendFrames(appendFrame(nil, channel, frameLanded, landedPayload(number)), 1)
}

func landedPayload(number uint64) []byte { return binary.LittleEndian.AppendUint64(nil, number) }

// takeEager handles a write in a frame.
func (p *Peer) takeEager(c *Channel, payload []byte) error {
	h, err := readPiece(payload)
	if err != nil {
		return err
	}
	data := payload[pieceHeader:]
	if h.channel != c.number || h.at != 0 || h.length != uint64(len(data)) {
		return refused("write of %d bytes on channel %d in a frame of %d bytes on channel %d", h.length, h.channel,
			len(data), c.number)
	}
	return p.land(h, func(to []byte) error {
		copy(to, data)
		return nil
	}, func(f func()) { f() }, func(channel uint32, number uint64) {
		p.sendLater(channel, frameLanded, landedPayload(number)) // together with a prompt answer to the message
	})
}
