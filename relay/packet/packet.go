// Package packet carries wire messages, with file descriptors, over
// SOCK_SEQPACKET sockets: Conn for goroutines that may block, Port for the
// event loop, which must not.
package packet

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

// controlSpace has room for the maximum number of descriptors of a message (SCM_MAX_FD of
// net/scm.h), regardless of the permitted number: the kernel closes descriptors without room before
// the call returns, and such a close waits for the maker of the file.
var controlSpace = unix.CmsgSpace(253 * 4)

// Conn is a connected socket for goroutines. Send may be called concurrently.
type Conn struct{ *net.UnixConn }

// Dial connects to a listening socket.
func Dial(path string) (Conn, error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	return Conn{c}, err
}

// FromFD makes a Conn from a descriptor, and owns the descriptor.
func FromFD(fd int, name string) (Conn, error) {
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return Conn{}, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return Conn{}, fmt.Errorf("%s is no Unix socket", name)
	}
	return Conn{u}, nil
}

// Pair makes two connected sockets as plain descriptors.
func Pair() (a, b int, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	return fds[0], fds[1], os.NewSyscallError("socketpair", err)
}

// Send sends a message with descriptors.
func (c Conn) Send(m wire.Message, sequence uint32, fds ...int) error {
	var control []byte
	if len(fds) > 0 {
		control = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix(wire.Encode(m, sequence), control, nil)
	return err
}

// Receive reads a message of a relay, or of a trusted client. The descriptors are the caller's,
// also with an error. io.EOF: the remote side has closed.
func (c Conn) Receive() (wire.Message, uint32, []int, error) {
	for {
		full, hanging := Relays.state()
		if hanging {
			m, sequence, err := c.ReceiveBare()
			return m, sequence, nil, err
		}
		if !full {
			break
		}
		time.Sleep(time.Millisecond)
	}
	data := make([]byte, wire.MaxMessage+1)
	control := make([]byte, controlSpace)
	n, controls, flags, _, err := c.ReadMsgUnix(data, control)
	if errors.Is(err, unix.ECONNRESET) {
		// The kernel reports the reset once, before unread messages, if the remote side closes with
		// unread messages of this side.
		n, controls, flags, _, err = c.ReadMsgUnix(data, control)
	}
	if errors.Is(err, io.EOF) && controls == 0 {
		// Linux reports the end to a reader that came just before the last message and
		// the end did (unix_dgram_recvmsg looks for messages first, and then for the end).
		n, controls, flags, _, err = c.ReadMsgUnix(data, control)
	}
	if err != nil {
		fds, _ := rights(control[:controls]) // an empty message looks like an end, and can carry descriptors
		return nil, 0, fds, err
	}
	return decode(data[:n], control[:controls], flags)
}

// ReceiveBare reads a message without descriptors. A message with descriptors is refused, and stays
// in the socket: Source.HangUp closes the socket.
func (c Conn) ReceiveBare() (wire.Message, uint32, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, 0, err
	}
	data := make([]byte, wire.MaxMessage+1)
	var n, flags int
	var failed error
	for range 3 { // a reset precedes unread messages, an end comes once too early; see Receive
		err = raw.Read(func(fd uintptr) bool {
			if n, flags, failed = peek(int(fd), data); failed != nil || flags&unix.MSG_CTRUNC != 0 {
				return failed != unix.EAGAIN
			}
			n, flags, failed = receiveBare(int(fd), data)
			return failed != unix.EAGAIN
		})
		if err != nil {
			return nil, 0, err
		}
		if failed != unix.ECONNRESET && (failed != nil || n > 0 || flags&unix.MSG_CTRUNC != 0) {
			break
		}
	}
	switch {
	case failed != nil:
		return nil, 0, os.NewSyscallError("recvmsg", failed)
	case flags&unix.MSG_CTRUNC != 0:
		return nil, 0, wire.Errorf(wire.StatusMalformed, "a message with descriptors, where none are taken")
	case n == 0:
		return nil, 0, io.EOF
	}
	m, sequence, _, err := decode(data[:n], nil, flags)
	return m, sequence, err
}

// peek reads the next message without removing it from the socket. MSG_CTRUNC means that the
// message has descriptors.
func peek(fd int, data []byte) (n, flags int, err error) {
	return receive(fd, data, unix.MSG_PEEK)
}

// receiveBare reads a message and drops the descriptors, which can block as long as the sender
// likes.
func receiveBare(fd int, data []byte) (n, flags int, err error) {
	return receive(fd, data, 0)
}

func receive(fd int, data []byte, how int) (n, flags int, err error) {
	for {
		n, _, flags, _, err = unix.Recvmsg(fd, data, nil, how|unix.MSG_DONTWAIT)
		if err != unix.EINTR {
			return n, flags, err
		}
	}
}

// Exchange sends a request and reads the answer, both before the deadline.
// A Failure becomes an error.
func (c Conn) Exchange(m wire.Message, timeout time.Duration, fds ...int) (wire.Message, []int, error) {
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, nil, err
	}
	defer func() { _ = c.SetDeadline(time.Time{}) }() // fails only on a closed socket, which the next call reports
	sent := c.Send(m, 1, fds...)
	if sent != nil && !errors.Is(sent, unix.EPIPE) {
		return nil, nil, sent
	}
	// A closed remote side may have sent a reason before.
	answer, _, received, err := c.Receive()
	if err != nil && sent != nil {
		err = sent
	}
	if failure, ok := answer.(*wire.Failure); ok {
		err = failure.Err()
	}
	if err != nil {
		CloseAll(received)
		return nil, nil, err
	}
	return answer, received, nil
}

// Detach ends the Conn and returns the socket as a plain non-blocking descriptor. After an error
// the Conn is unchanged.
func (c Conn) Detach() (int, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd := -1
	var duplicate error
	err = raw.Control(func(socket uintptr) {
		fd, duplicate = unix.FcntlInt(socket, unix.F_DUPFD_CLOEXEC, 3)
	})
	if err = errors.Join(err, os.NewSyscallError("F_DUPFD_CLOEXEC", duplicate)); err != nil {
		return -1, err
	}
	c.Close()
	return fd, nil
}

// Refuse sends the reason of a refusal to the remote end of a socket, if possible.
func Refuse(fd int, why error, sequence uint32) {
	_ = unix.Sendmsg(fd, wire.Encode(wire.NewFailure(why), sequence), nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
}

func decode(data, control []byte, flags int) (wire.Message, uint32, []int, error) {
	fds, err := rights(control)
	if err != nil {
		return nil, 0, fds, err
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || len(fds) > wire.MaxDescriptors {
		return nil, 0, fds, wire.Errorf(wire.StatusMalformed,
			"a message of more than %d bytes or with more than %d descriptors", wire.MaxMessage, wire.MaxDescriptors)
	}
	m, sequence, err := wire.Decode(data)
	return m, sequence, fds, err
}

func rights(control []byte) ([]int, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, os.NewSyscallError("parse control message", err)
	}
	var fds []int
	for _, m := range messages {
		more, _ := unix.ParseUnixRights(&m) // none in other control data, such as credentials
		fds = append(fds, more...)
	}
	return fds, nil
}

// Source is where descriptors come from. A stranger can delay the close of a file, for instance of
// a FUSE file system or a lingering TCP socket, and every hanging close has a thread. So the number
// is limited, for the messages of a Source and of a Port: when the files of so many hang, no
// descriptor is taken over any more.
//
// An unread message keeps descriptors in the socket; a receive without descriptors, or the close of
// the socket, closes the descriptors. That is done apart as well, by some threads: further closes
// wait for a thread, and above a limit the Source accepts no connection (see Crowded).
type Source struct {
	closing
	turns  chan struct{} // of what may block
	behind atomic.Int64  // what blocks, and what waits for its turn
}

func newSource() *Source {
	return &Source{closing: closing{most: 64}, turns: make(chan struct{}, 64)}
}

// Where descriptors come from. Closes of clients do not delay closes of relays.
var (
	Clients = newSource()
	Relays  = newSource()
)

// maxBlocking is when a Source is crowded.
const maxBlocking = 256

// Crowded reports so many hanging sockets that the Source must not accept connections: a closed
// connection needs a descriptor until the close.
func (s *Source) Crowded() bool { return s.behind.Load() >= maxBlocking }

// block runs a function that may block.
func (s *Source) block(f func()) {
	s.behind.Add(1)
	go func() {
		s.turns <- struct{}{}
		f()
		<-s.turns
		s.behind.Add(-1)
	}()
}

// HangUp closes the socket of a Conn, without a wait for files in unread messages.
func (s *Source) HangUp(c Conn) {
	switch fd, err := c.Detach(); {
	case err == nil:
		s.hangUp(fd)
	case errors.Is(err, net.ErrClosed): // or detached
	default: // no descriptor left, say
		s.block(func() { c.Close() })
	}
}

// hangUp closes a socket. The close drops unread messages, so the caller reads them first.
func (s *Source) hangUp(fd int) {
	// No message arrives any more, and the remote side gets the end now. It can fail only where
	// that is so already.
	_ = unix.Shutdown(fd, unix.SHUT_RDWR)
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1) == nil && drain(fd) {
		unix.Close(fd)
		return
	}
	s.block(func() { unix.Close(fd) })
}

// drain reads messages without descriptors, and reports whether no message remains. The credentials
// of a message distinguish an empty message from the end.
func drain(fd int) bool {
	var data [1]byte
	control := make([]byte, unix.CmsgSpace(unix.SizeofUcred))
	for range maxWaiting { // more than a socket's buffer has room for
		_, controls, flags, _, err := unix.Recvmsg(fd, data[:], control, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		switch {
		case err == unix.EINTR, err == unix.ECONNRESET:
			continue
		case err != nil, flags&unix.MSG_CTRUNC != 0:
			return false
		case controls == 0:
			return true
		}
		if _, _, _, _, err = unix.Recvmsg(fd, data[:], control, unix.MSG_DONTWAIT); err != nil {
			return false
		}
	}
	return false
}

// maxBlockingOfPort limits the blocking closes of a Port.
const maxBlockingOfPort = 8

// hangTimeout is the time after which the maximum number of closes counts as hanging: a machine
// under load can start closes slowly.
const hangTimeout = time.Second

// closing counts messages whose files are being closed.
type closing struct {
	most int

	mu    sync.Mutex
	count int
	since time.Time // when it became the most
}

func (c *closing) add(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.count
	if c.count += n; was < c.most && c.count >= c.most {
		c.since = time.Now()
	}
}

// state is full where no more descriptors are to be taken over now, and hanging
// where that is so for long.
func (c *closing) state() (full, hanging bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	full = c.count >= c.most
	return full, full && time.Since(c.since) > hangTimeout
}

// close closes unwanted descriptors without a wait.
func (s *Source) close(fds []int) { s.closeAll(fds, nil) }

// CloseAll closes descriptors that came from a relay.
func CloseAll(fds []int) { Relays.close(fds) }

// weightOf returns how much the closes of a message with n descriptors count.
func weightOf(n int) int { return 1 + n/64 }

func (s *Source) closeAll(fds []int, port *closing) {
	if len(fds) == 0 {
		return
	}
	// A sender of too many descriptors gets no second message through on the Port, and a hanging
	// close keeps the message's descriptors open.
	weight := weightOf(len(fds))
	s.add(weight)
	if port != nil {
		port.add(1)
	}
	go func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
		s.add(-weight)
		if port != nil {
			port.add(-1)
		}
	}()
}

// Port is a connected socket on the event loop. Port implements poll.Poller for queued messages.
type Port struct {
	loop     *poll.Loop
	fd       int
	outbox   []outgoing
	received func(wire.Message, uint32, []int)
	ended    func(error)
	leaving  bool // Leave was called
	lingers  bool // Linger was called
	deaf     bool // it has failed, and lingers
	source   *Source
	closing  closing // files of messages that came here
	// dropped is closed when a message that was not received with its descriptors is
	// gone; nil when there is none.
	dropped chan struct{}

	shared      *shared // nil where all goes over the socket
	takesShared bool
	takesBytes  int64 // that it has then
}

// From is the kind of the remote side: a Port of whom nothing is said is a relay's.
func (p *Port) From(s *Source) { p.source = s }

// CloseAll closes received unwanted descriptors.
func (p *Port) CloseAll(fds []int) { p.source.closeAll(fds, &p.closing) }

// Hanging reports that descriptors are not taken over for now: too many of those
// that came before hang at their close.
func (p *Port) Hanging() bool { _, hanging := p.state(); return hanging }

func (p *Port) state() (full, hanging bool) {
	full, hanging = p.closing.state()
	all, allHanging := p.source.state()
	return full || all, hanging || allHanging
}

// maxWaiting limits the queue of messages without room at the remote side.
const maxWaiting = 16384

type outgoing struct {
	data []byte
	fds  []int // duplicates that belong to the outbox
	// plain: the message precedes messages in the order of shared memory.
	plain bool
}

// NewPort takes fd over. received is called with every message and owns its descriptors; ended
// once, with io.EOF when the remote side has closed. Neither is called after Close or Leave.
func NewPort(loop *poll.Loop, fd int, received func(wire.Message, uint32, []int), ended func(error)) (*Port, error) {
	// A stranger's descriptor may be anything.
	for option, want := range map[int]int{unix.SO_DOMAIN: unix.AF_UNIX, unix.SO_TYPE: unix.SOCK_SEQPACKET} {
		if is, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, option); is != want { // 0 or -1 after an error
			return nil, wire.Errorf(wire.StatusBadDescriptor, "descriptor %d is no socket for messages", fd)
		}
	}
	p := &Port{
		loop:     loop,
		fd:       fd,
		received: received,
		ended:    ended,
		source:   Relays,
		closing:  closing{most: maxBlockingOfPort},
	}
	if err := p.watch(); err != nil {
		return nil, err
	}
	loop.Add(p)
	return p, nil
}

func (p *Port) closed() bool { return p.fd < 0 }

func (p *Port) watch() error { return p.loop.Watch(p.fd, func(uint32) { p.read() }) }

// Send sends a message, now or as soon as the socket has room. The descriptors
// stay the caller's. Errors reach `ended`.
func (p *Port) Send(m wire.Message, sequence uint32, fds ...int) {
	if p.closed() {
		return
	}
	data := wire.Encode(m, sequence)
	if len(p.outbox) == 0 {
		err := p.write(data, fds)
		if err == nil {
			return
		}
		if err != unix.EAGAIN {
			p.broken(err)
			return
		}
	}
	if len(p.outbox) >= maxWaiting {
		p.loop.Do(func() { p.end(fmt.Errorf("the other side leaves %d messages unread", maxWaiting)) })
		return
	}
	kept := make([]int, 0, len(fds))
	for _, fd := range fds {
		duplicate, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			CloseAll(kept)
			p.loop.Do(func() { p.fail(os.NewSyscallError("F_DUPFD_CLOEXEC", err)) })
			return
		}
		kept = append(kept, duplicate)
	}
	p.outbox = append(p.outbox, outgoing{data: data, fds: kept})
}

// broken is a message that could not be sent. If the remote side has closed, the read returns the
// end and the reason. Anything else (no memory, too many descriptors on their way) would leave the
// other side waiting for the message for ever. Both come from the loop and not from within the
// caller.
func (p *Port) broken(err error) {
	switch err {
	case unix.EPIPE, unix.ECONNRESET, unix.ECONNREFUSED, unix.ENOTCONN:
		return
	}
	if err == unix.ETOOMANYREFS {
		err = &fault.Error{Code: fault.LimitMet, Operation: "send descriptors",
			Cause:  fmt.Errorf("more descriptors of this process's uid are in flight than its limit of open files: %w", err),
			Remedy: "end the process that has taken the uid; a container in a user namespace cannot take it"}
	} else if _, system := err.(unix.Errno); system {
		err = os.NewSyscallError("sendmsg", err)
	}
	p.loop.Do(func() { p.fail(err) })
}

// fail ends the connection after a failure at this side. The remote side gets the reason, if
// possible.
func (p *Port) fail(err error) {
	if p.deaf {
		return // it has been said
	}
	p.Send(wire.NewFailure(err), 0)
	p.end(err)
}

func (p *Port) write(data []byte, fds []int) error {
	if p.shared != nil {
		return p.writeShared(data, fds)
	}
	return p.sendmsg(data, fds)
}

func (p *Port) sendmsg(data []byte, fds []int) error {
	var control []byte
	if len(fds) > 0 {
		control = unix.UnixRights(fds...)
	}
	for {
		err := unix.Sendmsg(p.fd, data, control, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		if err != unix.EINTR {
			return err
		}
	}
}

func (p *Port) read() {
	data := make([]byte, wire.MaxMessage+1)
	control := make([]byte, controlSpace)
	// The number per call is limited, so that a busy socket starves no further socket.
	ended := false
	for range 64 {
		if p.closed() || p.dropped != nil {
			return
		}
		full, hanging := p.state()
		if full && !hanging {
			return // until some are closed: the socket stays readable
		}
		if hanging {
			if n, flags, err := peek(p.fd, data); err == nil && flags&unix.MSG_CTRUNC != 0 {
				p.drop()
				p.handle(data[:n], nil, flags&^unix.MSG_CTRUNC)
				return
			}
		}
		n, controls, flags, _, err := unix.Recvmsg(p.fd, data, control, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		switch {
		case err == unix.EAGAIN:
			return
		case err == unix.EINTR:
			continue
		case err == unix.ECONNRESET:
			// Said once, when the other side closes with messages of ours unread. Messages sent
			// before, for instance the reason of the end, remain readable.
			continue
		case err != nil:
			p.fail(os.NewSyscallError("recvmsg", err))
			return
		case n == 0 && controls == 0:
			if !ended { // there may be a last message; see ReceiveFrom
				ended = true
				continue
			}
			p.end(io.EOF)
			return
		}
		p.handle(data[:n], control[:controls], flags)
	}
}

// handle passes a message on.
func (p *Port) handle(data, control []byte, flags int) {
	m, sequence, fds, err := decode(data, control, flags)
	taken := false
	if err == nil && !p.deaf && (p.shared != nil || p.takesShared) {
		taken, err = p.ofSharing(m, fds)
	}
	switch {
	case err != nil:
		p.CloseAll(fds)
		p.fail(err)
	case taken, p.leaving, p.deaf, p.closed():
		p.CloseAll(fds)
	default:
		p.received(m, sequence, fds)
	}
}

// drop receives the next message without its descriptors, beside the loop. Later messages wait.
func (p *Port) drop() {
	p.loop.Unwatch(p.fd)
	fd, dropped := p.fd, make(chan struct{})
	p.dropped = dropped
	p.source.block(func() {
		_, _, _ = receiveBare(fd, make([]byte, 1)) // the next read returns the socket's error
		close(dropped)
		p.loop.Do(func() {
			p.dropped = nil
			if p.closed() {
				return
			}
			if err := p.watch(); err != nil {
				p.end(err)
			}
		})
	})
}

func (p *Port) end(err error) {
	// Messages written before the end precede the end.
	p.readShared(sharedSlots)
	switch {
	case p.closed(), p.deaf && err != io.EOF:
		return
	case p.lingers && err != io.EOF:
		p.deaf = true
		if p.shared != nil {
			p.shared.reading = false
		}
	default:
		p.Close()
	}
	if !p.leaving {
		p.ended(err)
	}
}

// Linger keeps a failed socket open until the remote side closes: Port calls `ended` with the
// failure, and again with io.EOF. Messages in between are dropped.
func (p *Port) Linger() { p.lingers = true }

// leaveTimeout limits the wait until the remote side has read the last messages.
const leaveTimeout = 10 * time.Second

// Leave closes the socket when the outbox has been sent, the remote side has closed, or
// leaveTimeout has expired. Nothing is received any more.
func (p *Port) Leave() {
	p.leaving = true
	if len(p.outbox) == 0 {
		p.Close()
		return
	}
	time.AfterFunc(leaveTimeout, func() { p.loop.Do(p.Close) })
}

// Close closes the socket; the outbox is dropped.
func (p *Port) Close() {
	if p.closed() {
		return
	}
	p.loop.Unwatch(p.fd)
	p.loop.Remove(p)
	if fd, dropped := p.fd, p.dropped; dropped != nil {
		// No second descriptor may get this number during the read.
		_ = unix.Shutdown(fd, unix.SHUT_RDWR) // see hangUp
		go func() { <-dropped; p.source.hangUp(fd) }()
	} else {
		p.source.hangUp(fd)
	}
	p.fd = -1
	if p.shared != nil {
		// The memory is mapped, so the call cannot fail.
		_ = unix.Munmap(p.shared.memory)
		p.shared = nil
	}
	for _, o := range p.outbox {
		CloseAll(o.fds)
	}
	p.outbox = nil
}

// Waiting is the number of messages without room at the remote side.
func (p *Port) Waiting() int { return len(p.outbox) }

// takeAtOnce limits the messages of a port from shared memory before the next port.
const takeAtOnce = 64

// quiet reports that there is nothing to do: most ports of an iteration have no message, and a
// message of a port waits for the remaining ports.
func (p *Port) quiet() bool {
	return len(p.outbox) == 0 && (p.shared == nil || atomic.LoadUint64(p.shared.in.tail) == p.shared.in.at)
}

// Poll sends queued messages, and reads messages from shared memory.
func (p *Port) Poll() bool {
	if p.quiet() {
		return false
	}
	progress := p.shared != nil && p.readShared(takeAtOnce)
	for len(p.outbox) > 0 { // empty on a closed port
		head := p.outbox[0]
		send := p.write
		if head.plain {
			send = p.sendmsg
		}
		err := send(head.data, head.fds)
		if err == unix.EAGAIN {
			break
		}
		if err != nil {
			p.broken(err)
		}
		CloseAll(head.fds)
		p.outbox = p.outbox[1:]
		progress = true
	}
	if p.leaving && len(p.outbox) == 0 {
		p.Close()
	}
	return progress
}

// Busy reports whether something waits to be sent.
func (p *Port) Busy() bool { return len(p.outbox) > 0 }

// Arm asks the remote side to wake this side after writes to shared memory. Messages of the socket
// make that ready.
func (p *Port) Arm() bool {
	if p.shared == nil || !p.shared.reading || p.shared.due {
		return false
	}
	in := &p.shared.in
	// Either this side reads the message, or the writer reads that this side sleeps. A store would
	// do, were it not for the race detector: its stores can come after loads that follow them.
	_ = atomic.SwapUint32(in.sleeps, 1)
	return atomic.LoadUint64(in.tail) != in.at
}

// Disarm ends Arm.
func (p *Port) Disarm() {
	if p.shared != nil {
		atomic.StoreUint32(p.shared.in.sleeps, 0)
	}
}
