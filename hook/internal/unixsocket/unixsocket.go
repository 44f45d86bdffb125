package unixsocket

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// backlog is the number of clients that can wait while the relay starts. The kernel limits it to
// /proc/sys/net/core/somaxconn.
const backlog = 4096

// Listen makes a listening SOCK_SEQPACKET socket with exactly this mode.
func Listen(path string, mode uint32) (*os.File, error) {
	fail := func(err error) (*os.File, error) {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fail(os.NewSyscallError("socket", err))
	}
	socket := os.NewFile(uintptr(fd), path)
	err = Through(path, func(short string) error {
		if err := unix.Bind(fd, &unix.SockaddrUnix{Name: short}); err != nil {
			return os.NewSyscallError("bind", err)
		}
		// No client can connect before listen(2), so the mode from the umask is never in effect.
		if err := unix.Chmod(short, mode); err != nil {
			return os.NewSyscallError("chmod", err)
		}
		return os.NewSyscallError("listen", unix.Listen(fd, backlog))
	})
	if err != nil {
		socket.Close()
		return fail(err)
	}
	return socket, nil
}

// ConnectTimeout limits the wait of Connect while the backlog of a socket is full.
const ConnectTimeout = 10 * time.Second

// Connect connects to a SOCK_SEQPACKET socket.
func Connect(path string) (*os.File, error) { return ConnectWithin(path, ConnectTimeout) }

// ConnectWithin is Connect with a limit above 0 for the wait while the backlog is full.
func ConnectWithin(path string, limit time.Duration) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	err = Through(path, func(short string) error {
		for deadline := time.Now().Add(limit); ; {
			// A timeout of 0 would mean no timeout.
			wait := unix.NsecToTimeval(max(time.Until(deadline), time.Millisecond).Nanoseconds())
			if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &wait); err != nil {
				return os.NewSyscallError("SO_SNDTIMEO", err)
			}
			err := unix.Connect(fd, &unix.SockaddrUnix{Name: short})
			// With SO_SNDTIMEO, the kernel does not restart connect(2) after a signal (signal(7)).
			if err != unix.EINTR {
				return os.NewSyscallError("connect", err)
			}
		}
	})
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Through calls f with a short name of the file at path: the address of a Unix socket has at most
// 108 bytes, and roots of tests are longer.
func Through(path string, f func(short string) error) error {
	dir, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: filepath.Dir(path), Err: err}
	}
	defer unix.Close(dir)
	return f(fmt.Sprintf("/proc/self/fd/%d/%s", dir, filepath.Base(path)))
}
