package tcp

import (
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
)

// With MSG_ZEROCOPY the kernel sends a payload from its pages and copies nothing
// (Documentation/networking/msg_zerocopy.rst). Until the kernel reports the end of a send on the
// socket's error queue, the kernel may read the pages, for retransmission too, so the write is
// outstanding until then.

// zerocopyUse selects the sends that use MSG_ZEROCOPY.
type zerocopyUse int

const (
	zerocopyByRule zerocopyUse = iota // on, until maxCopied or maxRefused turns a stream off
	zerocopyNever
	zerocopyAlways // also if the kernel copies, for tests and benchmarks
)

// zerocopyFaults injects faults in tests; the functions are nil otherwise.
type zerocopyFaults struct {
	withheld func() bool  // notifications stay in the error queue
	refused  func() error // the error of a zero-copy send
	sent     func()       // called between a send and its record
}

const (
	// minZerocopy is the least payload of a zero-copy send, bytes. Below it the pages' pinning and
	// the notification cost more than a copy (docs/benchmarks.md).
	minZerocopy = 128 << 10
	// maxCopied is the number of successive sends that the kernel may copy before a stream uses
	// only copies: then zero-copy costs more than a copy. Loopback, veth and tap copy every send.
	maxCopied = 32
	// maxRefused is the number of successive sends that may fail with ENOBUFS, the limit of
	// net.core.optmem_max or of locked memory, before a stream uses only copies.
	maxRefused = 32
)

// Zerocopy reports the zero-copy sends of a Peer.
type Zerocopy struct {
	// streams is the number of data streams that use MSG_ZEROCOPY, all the number of data streams.
	// reason is why a stream does not.
	streams, all int
	reason       string
	// sends counts sends with MSG_ZEROCOPY, copied the sends that the kernel copied, and refused
	// the sends that failed with ENOBUFS and were repeated with a copy. pending counts sends
	// without a notification.
	sends, copied, refused, pending uint64
}

// zerocopyConn is the socket of a data stream. Read also takes the notifications of the error
// queue.
//
// The poller of Go reports an error queue as a separate event: while the last event of a socket was
// EPOLLERR alone, a read fails with "not pollable". Read then waits by poll(2).
type zerocopyConn struct {
	*net.TCPConn
	raw      syscall.RawConn
	use      zerocopyUse
	notified func([]*write) // takes writes, one for each send whose pages the kernel has released

	faults zerocopyFaults

	// Owned by the reading goroutine: the memory for the next bytes, and the result.
	into    []byte
	got     int
	failed  error
	reading func(fd uintptr) bool
	oob     [128]byte

	mu      sync.Mutex
	closed  bool
	pending []*write // by the kernel's number of the send, from first on; nil after the notification
	first   uint32
	copied  int // sends in a row
	refused int // sends in a row

	open    atomic.Int64 // sends in pending without a notification
	off     atomic.Pointer[string]
	figures struct{ sends, copied, refused atomic.Uint64 }
}

// newZerocopyConn enables SO_ZEROCOPY. It returns an error if c is no plain TCP socket or the
// kernel is older than 4.14.
func newZerocopyConn(c net.Conn, use zerocopyUse, notified func([]*write)) (*zerocopyConn, error) {
	t, is := c.(*net.TCPConn)
	if !is {
		return nil, fmt.Errorf("a stream is no plain TCP socket (%T)", c)
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return nil, err
	}
	var set error
	if err := raw.Control(func(fd uintptr) {
		set = os.NewSyscallError("setsockopt SO_ZEROCOPY", unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ZEROCOPY, 1))
	}); err != nil {
		return nil, err
	}
	if set != nil {
		return nil, set
	}
	z := &zerocopyConn{TCPConn: t, raw: raw, use: use, notified: notified}
	z.reading = func(fd uintptr) bool {
		z.got, z.failed = z.readOnce(int(fd), z.into)
		return z.failed != unix.EAGAIN
	}
	return z, nil
}

// NetConn returns the socket.
func (z *zerocopyConn) NetConn() net.Conn { return z.TCPConn }

// wants reports whether a payload of n bytes is to be sent without a copy.
func (z *zerocopyConn) wants(n int) bool { return n >= minZerocopy && z.off.Load() == nil }

// turnOff disables MSG_ZEROCOPY for further sends.
func (z *zerocopyConn) turnOff(format string, arguments ...any) {
	if z.use == zerocopyAlways {
		return
	}
	reason := fmt.Sprintf(format, arguments...)
	z.off.CompareAndSwap(nil, &reason)
}

// outgoingPiece is a piece during its send: the header is copied.
type outgoingPiece struct {
	write        *write
	header, data []byte
	copy         bool // the rest of data
}

// sending returns the steps that send a piece.
func (z *zerocopyConn) sending(p *outgoingPiece) func() (int64, error) {
	return func() (int64, error) { return z.send(p) }
}

// send sends the rest of a piece, and returns how many bytes the socket took before the error.
func (z *zerocopyConn) send(p *outgoingPiece) (sent int64, err error) {
	waited := z.raw.Write(func(fd uintptr) bool {
		for err == nil && len(p.header)+len(p.data) > 0 {
			var n int
			switch n, err = z.sendOnce(int(fd), p); err {
			case unix.EAGAIN:
				err = nil
				return false
			case unix.EINTR:
				err = nil
			}
			sent += int64(n)
		}
		return true
	})
	if err == nil {
		err = waited
	}
	return sent, err
}

// sendOnce makes one sendmsg. The lock orders the call with the notification, which another
// goroutine can read before this call has recorded the send.
func (z *zerocopyConn) sendOnce(fd int, p *outgoingPiece) (int, error) {
	const flags = unix.MSG_DONTWAIT | unix.MSG_NOSIGNAL
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.closed {
		return 0, net.ErrClosed
	}
	if len(p.header) > 0 {
		n, err := unix.SendmsgN(fd, p.header, nil, nil, flags|unix.MSG_MORE)
		if err == nil {
			p.header = p.header[n:]
		}
		return max(n, 0), sendError(err)
	}
	if p.copy {
		n, err := unix.SendmsgN(fd, p.data, nil, nil, flags)
		if err == nil {
			p.data = p.data[n:]
		}
		return max(n, 0), sendError(err)
	}
	if z.figures.sends.Load() == 0 {
		// If this process ends, the kernel resets the connection: otherwise the kernel would
		// continue to send pages that clients have mapped, too.
		_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	}
	n, err := 0, error(nil)
	if z.faults.refused != nil {
		err = z.faults.refused()
	}
	// Count before the send: the reader takes no notification while open is 0, and gets each
	// notification once.
	z.open.Add(1)
	if err == nil {
		n, err = unix.SendmsgN(fd, p.data, nil, nil, flags|unix.MSG_ZEROCOPY)
	}
	if err != nil {
		z.open.Add(-1)
	}
	if z.faults.sent != nil {
		z.faults.sent()
	}
	switch err {
	case nil:
		z.refused = 0
		z.figures.sends.Add(1)
		p.write.pinned.Add(1)
		z.pending = append(z.pending, p.write)
		p.data = p.data[n:]
		return n, nil
	case unix.ENOBUFS:
		p.copy = true
		z.figures.refused.Add(1)
		if z.refused++; z.refused >= maxRefused {
			z.turnOff("%d sends in a row met ENOBUFS: raise net.core.optmem_max, or the limit of locked memory of the relay",
				maxRefused)
		}
		return 0, nil
	case unix.EFAULT, unix.EOPNOTSUPP:
		p.copy = true // memory that the kernel cannot pin, such as a device's
		z.turnOff("the kernel does not send from this memory: %v", err)
		return 0, nil
	}
	return 0, sendError(err)
}

// sendError keeps the errors that send and its caller compare.
func sendError(err error) error {
	if err == nil || err == unix.EAGAIN || err == unix.EINTR {
		return err
	}
	return os.NewSyscallError("sendmsg", err)
}

// notPollable is the text of ErrNotPollable in Go's internal/poll, which has no public name.
const notPollable = "not pollable"

// Read reads available bytes and takes notifications.
func (z *zerocopyConn) Read(b []byte) (int, error) {
	z.into = b
	defer func() { z.into = nil }()
	for {
		z.got, z.failed = 0, nil
		err := z.raw.Read(z.reading)
		if err != nil && strings.HasSuffix(err.Error(), notPollable) {
			err = z.raw.Control(func(fd uintptr) {
				if !z.reading(fd) {
					z.waitReadable(int(fd))
				}
			})
			if err == nil && z.failed == unix.EAGAIN {
				continue
			}
		}
		switch {
		case err != nil:
			return 0, err
		case z.failed != nil:
			return 0, z.failed
		case z.got == 0 && len(b) > 0:
			return 0, io.EOF
		}
		return z.got, nil
	}
}

// readOnce takes notifications and reads once. The error is EAGAIN without bytes.
func (z *zerocopyConn) readOnce(fd int, b []byte) (int, error) {
	z.takeNotifications(fd)
	for {
		n, err := unix.Read(fd, b)
		switch err {
		case nil, unix.EAGAIN:
			return n, err
		case unix.EINTR:
		default:
			return 0, &net.OpError{Op: "read", Net: "tcp", Source: z.LocalAddr(), Addr: z.RemoteAddr(),
				Err: os.NewSyscallError("read", err)}
		}
	}
}

// pollTime limits the wait in poll(2), which neither a deadline nor Close ends.
const pollTime = 10 * time.Millisecond

// waitReadable waits for bytes or a notification.
func (z *zerocopyConn) waitReadable(fd int) {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, int(pollTime.Milliseconds()))
	if err == nil && n > 0 && fds[0].Revents == unix.POLLERR && !z.takeNotifications(fd) {
		time.Sleep(time.Millisecond) // an error that neither queue explains
	}
}

// takeNotifications empties the error queue, and reports whether the queue had a notification.
func (z *zerocopyConn) takeNotifications(fd int) (some bool) {
	if z.open.Load() == 0 || z.faults.withheld != nil && z.faults.withheld() {
		return false
	}
	for z.open.Load() > 0 {
		_, n, _, _, err := unix.Recvmsg(fd, nil, z.oob[:], unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			break
		}
		messages, err := unix.ParseSocketControlMessage(z.oob[:n])
		if err != nil {
			break
		}
		for _, m := range messages {
			if len(m.Data) < int(unsafe.Sizeof(unix.SockExtendedErr{})) {
				continue
			}
			e := (*unix.SockExtendedErr)(unsafe.Pointer(&m.Data[0]))
			if e.Origin == unix.SO_EE_ORIGIN_ZEROCOPY && e.Errno == 0 {
				some = true
				z.release(e.Info, e.Data, e.Code == unix.SO_EE_CODE_ZEROCOPY_COPIED)
			}
		}
	}
	return some
}

// release ends the sends from low to high, which the kernel numbers modulo 2^32.
func (z *zerocopyConn) release(low, high uint32, copied bool) {
	var released []*write
	z.mu.Lock()
	for number := low; ; number++ {
		if i := number - z.first; i < uint32(len(z.pending)) && z.pending[i] != nil {
			released = append(released, z.pending[i])
			z.pending[i] = nil
		}
		if number == high {
			break
		}
	}
	for len(z.pending) > 0 && z.pending[0] == nil {
		z.pending = z.pending[1:]
		z.first++
	}
	if z.copied += len(released); !copied {
		z.copied = 0
	} else if z.figures.copied.Add(uint64(len(released))); z.copied >= maxCopied {
		z.turnOff("the kernel copied %d sends in a row (SO_EE_CODE_ZEROCOPY_COPIED), as on loopback and veth", maxCopied)
	}
	z.mu.Unlock()
	z.open.Add(-int64(len(released)))
	z.notified(released)
}

// Close ends reads and sends. If the kernel still has pages, Close resets the connection, so that
// the kernel sends no more of the pages, and the socket stays open until drain.
func (z *zerocopyConn) Close() error {
	z.mu.Lock()
	z.closed = true
	z.mu.Unlock()
	if z.open.Load() == 0 {
		_ = z.SetLinger(-1) // an orderly end
		return z.TCPConn.Close()
	}
	_ = z.raw.Control(func(fd uintptr) { disconnect(int(fd)) })
	return z.SetDeadline(time.Unix(1, 0))
}

// disconnect resets a connection: connect(2) with AF_UNSPEC. The kernel frees the socket's queue of
// bytes to send, and keeps the error queue.
func disconnect(fd int) {
	address := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	// An error means that the connection has ended, or drain repeats the call.
	_, _, _ = unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&address)), unsafe.Sizeof(address))
}

// drainTime is the longest pause between two reads of the error queue.
const drainTime = 20 * time.Millisecond

// drainPatience is the wait from which drain logs.
const drainPatience = time.Second

// drain returns after Close and the last send, when the kernel has released the pages. A packet
// that a NIC has already taken delays drain. It has no limit, because the kernel would send the
// data of the pages' next user; drain logs a long wait.
func (z *zerocopyConn) drain() {
	begun, logged := time.Now(), false
	for pause := time.Millisecond; z.open.Load() > 0; pause = min(2*pause, drainTime) {
		if !logged && time.Since(begun) > drainPatience {
			logged = true
			logrus.Warnf("the kernel still has pages of %d sends of the ended connection %s to %s; their memory stays in "+
				"use until it returns them",
				z.open.Load(), z.LocalAddr(), z.RemoteAddr())
		}
		if err := z.raw.Control(func(fd uintptr) {
			z.takeNotifications(int(fd))
			disconnect(int(fd))
			z.takeNotifications(int(fd))
		}); err != nil {
			return // closed by Close, with nothing open
		}
		if z.open.Load() > 0 {
			time.Sleep(pause)
		}
	}
	_ = z.TCPConn.Close()
}

// String describes the state for an administrator.
func (f Zerocopy) String() string {
	text := fmt.Sprintf("on for %d of %d data streams; %d sends, of which the kernel copied %d, %d wait for their "+
		"notification, %d more met ENOBUFS",
		f.streams, f.all, f.sends, f.copied, f.pending, f.refused)
	if f.reason != "" {
		text += "; off: " + f.reason
	}
	return text
}

// add adds the figures of one stream.
func (f *Zerocopy) add(z *zerocopyConn) {
	if reason := z.off.Load(); reason != nil {
		f.reason = *reason
	} else {
		f.streams++
	}
	f.sends += z.figures.sends.Load()
	f.copied += z.figures.copied.Load()
	f.refused += z.figures.refused.Load()
	f.pending += uint64(max(z.open.Load(), 0))
}

// useZerocopy enables sends without a copy on the data streams if the kernel supports them.
func (p *Peer) useZerocopy() {
	if p.config.zerocopy == zerocopyNever {
		p.copies = "turned off"
		return
	}
	data := make([]net.Conn, len(p.data))
	for i, c := range p.data {
		data[i] = c
		z, err := newZerocopyConn(c, p.config.zerocopy, p.released)
		if err != nil {
			p.copies = err.Error()
			continue
		}
		z.faults = p.config.zerocopyFaults
		data[i] = z
	}
	p.data = data
}

// released ends the writes whose last pages the kernel has released.
func (p *Peer) released(list []*write) {
	if complete := p.queue.released(list); len(complete) > 0 {
		p.loop.Do(func() {
			for _, w := range complete {
				p.finish(w)
			}
		})
	}
}

// zerocopyFigures returns the figures of the data streams. Any goroutine may call it.
func (p *Peer) zerocopyFigures() Zerocopy {
	f := Zerocopy{all: len(p.data), reason: p.copies}
	for _, c := range p.data {
		if z, is := c.(*zerocopyConn); is {
			f.add(z)
		}
	}
	return f
}
