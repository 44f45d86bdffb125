package packet

import (
	"context"
	"errors"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// ErrQueueFull says that a socket's accept queue was full until the end of the dial's
// context.
var ErrQueueFull = errors.New("the socket's queue of connections was full all the time")

// maxBlockedDials limits the dials that wait in the kernel at a time: a waiting dial blocks a
// thread.
const maxBlockedDials = 32

// blockedDials has an element per dial that waits in the kernel.
var blockedDials = make(chan struct{}, maxBlockedDials)

// dialSlice is the time of an uninterruptible connect in the kernel, after which DialContext checks
// the context.
const dialSlice = 200 * time.Millisecond

// DialContext connects to a listening socket. While the socket's accept queue is full, the dial
// waits in the kernel's queue, where an accept wakes the oldest dial. DialContext fails with
// ErrQueueFull when the context ends first. The context needs a deadline or has to be canceled at
// some time.
func DialContext(ctx context.Context, path string) (Conn, error) {
	c, err := Dial(path)
	if !errors.Is(err, unix.EAGAIN) {
		return c, err
	}
	select {
	case blockedDials <- struct{}{}:
		defer func() { <-blockedDials }()
	case <-ctx.Done():
		return Conn{}, ErrQueueFull
	}
	fd, failed := connectBlocking(ctx, path)
	if errors.Is(failed, unix.EAGAIN) {
		return Conn{}, ErrQueueFull
	}
	if failed != nil {
		return Conn{}, &net.OpError{
			Op:   "dial",
			Net:  "unixpacket",
			Addr: &net.UnixAddr{Name: path, Net: "unixpacket"},
			Err:  failed,
		}
	}
	return FromFD(fd, path)
}

// connectBlocking makes a connected, blocking socket. The error is EAGAIN where the
// context ended while the queue was full.
func connectBlocking(ctx context.Context, path string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	err = unix.EAGAIN
	for errors.Is(err, unix.EAGAIN) && ctx.Err() == nil {
		wait := dialSlice
		if deadline, ok := ctx.Deadline(); ok {
			wait = max(min(wait, time.Until(deadline)), time.Millisecond) // 0 would be no limit
		}
		limit := unix.NsecToTimeval(wait.Nanoseconds())
		if err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit); err != nil {
			err = os.NewSyscallError("setsockopt", err)
			break
		}
		for err = unix.EINTR; err == unix.EINTR && ctx.Err() == nil; {
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
		}
		if err == unix.EINTR { // the context has ended
			err = unix.EAGAIN
		}
		err = os.NewSyscallError("connect", err)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}
