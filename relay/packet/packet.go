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
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

// controlSpace has room for one descriptor more than a message may carry, so
// that too many are noticed instead of being cut off silently.
var controlSpace = unix.CmsgSpace((wire.MaxDescriptors + 1) * 4)

// Conn is a connected socket for goroutines. Send may be called concurrently.
type Conn struct{ *net.UnixConn }

// Dial connects to a listening socket.
func Dial(path string) (Conn, error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	return Conn{c}, err
}

// FromFD makes a Conn of a descriptor, which it takes over.
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

// Send sends one message and descriptors.
func (c Conn) Send(m wire.Message, sequence uint32, fds ...int) error {
	var control []byte
	if len(fds) > 0 {
		control = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix(wire.Encode(m, sequence), control, nil)
	return err
}

// Receive reads one message of a relay, or of a client's own. The descriptors are
// the caller's, also with an error. io.EOF says that the other side has closed.
func (c Conn) Receive() (wire.Message, uint32, []int, error) { return c.ReceiveFrom(Relays) }

// ReceiveFrom is Receive for messages from anywhere.
func (c Conn) ReceiveFrom(from *Source) (wire.Message, uint32, []int, error) {
	data := make([]byte, wire.MaxMessage+1)
	control := make([]byte, controlSpace)
	for {
		full, hanging := from.state()
		if hanging {
			control = nil
		}
		if !full || hanging {
			break
		}
		time.Sleep(time.Millisecond)
	}
	n, controls, flags, _, err := c.ReadMsgUnix(data, control)
	if errors.Is(err, unix.ECONNRESET) {
		// Said once, and before what is still to be read, when the other side closes
		// with messages of ours unread.
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
	if control == nil {
		flags &^= unix.MSG_CTRUNC
	}
	return decode(data[:n], control[:controls], flags)
}

// Exchange sends a request and reads the answer, both before the deadline.
// A Failure becomes an error.
func (c Conn) Exchange(m wire.Message, timeout time.Duration, fds ...int) (wire.Message, []int, error) {
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, nil, err
	}
	defer func() { _ = c.SetDeadline(time.Time{}) }() // fails only on a closed socket, which the next call reports
	if err := c.Send(m, 1, fds...); err != nil {
		return nil, nil, err
	}
	answer, _, received, err := c.Receive()
	if failure, ok := answer.(*wire.Failure); ok {
		err = failure.Err()
	}
	if err != nil {
		CloseAll(received)
		return nil, nil, err
	}
	return answer, received, nil
}

// Detach gives up the Conn and returns its socket as a plain non-blocking
// descriptor.
func (c Conn) Detach() (int, error) {
	defer c.Close()
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd := -1
	var duplicate error
	err = raw.Control(func(socket uintptr) {
		fd, duplicate = unix.FcntlInt(socket, unix.F_DUPFD_CLOEXEC, 3)
	})
	return fd, errors.Join(err, duplicate)
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
	if len(control) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, os.NewSyscallError("parse control message", err)
	}
	var fds []int
	for _, m := range messages {
		if m.Header.Level != unix.SOL_SOCKET || m.Header.Type != unix.SCM_RIGHTS {
			continue // credentials, say: nobody asked for them
		}
		more, err := unix.ParseUnixRights(&m)
		if err != nil {
			return fds, os.NewSyscallError("parse descriptors", err)
		}
		fds = append(fds, more...)
	}
	return fds, nil
}

// Source is where descriptors come from. To close a stranger's file, of a FUSE file
// system, say, can take as long as the stranger likes, and each close that hangs has
// a thread. So there is a bound, for all messages of a Source and for those of each
// of its Ports: when the files of so many hang, no descriptor is taken over any more.
// The kernel then drops those that a message brings, which waits for nobody.
type Source struct{ closing }

// Where descriptors come from. What clients do does not keep those of relays out.
var (
	Clients = &Source{closing{most: 64}}
	Relays  = &Source{closing{most: 64}}
)

// mostOfPort bounds those of a Port.
const mostOfPort = 8

// hangTime is how long as many closes as may be are waited for before they are
// taken to hang: a machine under load can be slow in starting them.
const hangTime = time.Second

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
	if c.count += n; n > 0 && c.count == c.most {
		c.since = time.Now()
	}
}

// state is full where no more descriptors are to be taken over now, and hanging
// where that is so for long.
func (c *closing) state() (full, hanging bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	full = c.count >= c.most
	return full, full && time.Since(c.since) > hangTime
}

// CloseAll closes descriptors that nobody wants, and does not wait for that.
func (s *Source) CloseAll(fds []int) { s.closeAll(fds, nil) }

// CloseAll closes descriptors that came from a relay.
func CloseAll(fds []int) { Relays.CloseAll(fds) }

func (s *Source) closeAll(fds []int, port *closing) {
	if len(fds) == 0 {
		return
	}
	s.add(1)
	if port != nil {
		port.add(1)
	}
	go func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
		s.add(-1)
		if port != nil {
			port.add(-1)
		}
	}()
}

// Port is a connected socket on the event loop. It implements poll.Poller for
// what could not be sent at once.
type Port struct {
	loop     *poll.Loop
	fd       int
	outbox   []outgoing
	received func(wire.Message, uint32, []int)
	ended    func(error)
	leaving  bool // Leave was called
	source   *Source
	closing  closing // files of messages that came here
}

// From says where the other side is: a Port of whom nothing is said is a relay's.
func (p *Port) From(s *Source) { p.source = s }

// CloseAll closes descriptors that came here and that nobody wants.
func (p *Port) CloseAll(fds []int) { p.source.closeAll(fds, &p.closing) }

// Hanging reports that descriptors are not taken over for now: too many of those
// that came before hang at their close.
func (p *Port) Hanging() bool { _, hanging := p.state(); return hanging }

func (p *Port) state() (full, hanging bool) {
	full, hanging = p.closing.state()
	all, allHanging := p.source.state()
	return full || all, hanging || allHanging
}

// maxWaiting bounds what the other side has not made room for.
const maxWaiting = 16384

type outgoing struct {
	data []byte
	fds  []int // duplicates that belong to the outbox
}

// NewPort takes fd over. received is called with every message and owns its
// descriptors; ended once, with io.EOF when the other side has closed.
// Neither is called after Close or Leave.
func NewPort(loop *poll.Loop, fd int, received func(wire.Message, uint32, []int), ended func(error)) (*Port, error) {
	p := &Port{loop: loop, fd: fd, received: received, ended: ended, source: Relays, closing: closing{most: mostOfPort}}
	if err := loop.Watch(fd, func(uint32) { p.read() }); err != nil {
		return nil, err
	}
	loop.Add(p)
	return p, nil
}

// Send sends a message, now or as soon as the socket has room. The descriptors
// stay the caller's. Errors reach `ended`.
func (p *Port) Send(m wire.Message, sequence uint32, fds ...int) {
	if p.fd < 0 {
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
			p.loop.Do(func() { p.end(os.NewSyscallError("duplicate descriptor", err)) })
			return
		}
		kept = append(kept, duplicate)
	}
	p.outbox = append(p.outbox, outgoing{data, kept})
}

// broken is a message that could not be sent. Where the other side has closed,
// reading tells so, and why. Anything else (no memory, too many descriptors on
// their way) would leave the other side waiting for the message for ever. Both
// come from the loop and not from within the caller.
func (p *Port) broken(err error) {
	switch err {
	case unix.EPIPE, unix.ECONNRESET, unix.ECONNREFUSED, unix.ENOTCONN:
		return
	}
	p.loop.Do(func() { p.end(os.NewSyscallError("sendmsg", err)) })
}

func (p *Port) write(data []byte, fds []int) error {
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
	space := make([]byte, controlSpace)
	// A bounded number at once, so that one busy socket starves no other.
	ended := false
	for range 64 {
		if p.fd < 0 {
			return
		}
		control := space
		switch full, hanging := p.state(); {
		case hanging:
			control = nil
		case full:
			return // until some are closed: the socket stays readable
		}
		n, controls, flags, _, err := unix.Recvmsg(p.fd, data, control, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		switch {
		case err == unix.EAGAIN:
			return
		case err == unix.EINTR:
			continue
		case err == unix.ECONNRESET:
			// Said once, when the other side closes with messages of ours unread. What
			// it sent before, the reason of its end, say, is still to be read.
			continue
		case err != nil:
			p.end(os.NewSyscallError("recvmsg", err))
			return
		case n == 0 && controls == 0:
			if !ended { // there may be a last message; see ReceiveFrom
				ended = true
				continue
			}
			p.end(io.EOF)
			return
		}
		if control == nil {
			flags &^= unix.MSG_CTRUNC
		}
		m, sequence, fds, err := decode(data[:n], control[:controls], flags)
		if err != nil {
			p.CloseAll(fds)
			p.Send(wire.NewFailure(err), 0) // the other side hears why
			p.end(err)
			return
		}
		if p.leaving {
			p.CloseAll(fds)
			continue
		}
		p.received(m, sequence, fds)
	}
}

func (p *Port) end(err error) {
	if p.fd < 0 {
		return
	}
	p.Close()
	if !p.leaving {
		p.ended(err)
	}
}

// Leave closes the socket once what is in the outbox has been sent, or the other
// side has closed. Nothing is received any more.
func (p *Port) Leave() {
	p.leaving = true
	if len(p.outbox) == 0 {
		p.Close()
	}
}

// Close closes the socket; what is in the outbox is dropped.
func (p *Port) Close() {
	if p.fd < 0 {
		return
	}
	p.loop.Unwatch(p.fd)
	p.loop.Remove(p)
	unix.Close(p.fd)
	p.fd = -1
	for _, o := range p.outbox {
		CloseAll(o.fds)
	}
	p.outbox = nil
}

// Waiting is how many messages the other side has not made room for.
func (p *Port) Waiting() int { return len(p.outbox) }

// Poll sends what waits.
func (p *Port) Poll() bool {
	progress := false
	for len(p.outbox) > 0 && p.fd >= 0 {
		head := p.outbox[0]
		err := p.write(head.data, head.fds)
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

// Arm has nothing to arm: arriving messages make the socket ready.
func (p *Port) Arm() bool { return false }

// Disarm has nothing to undo.
func (p *Port) Disarm() {}
