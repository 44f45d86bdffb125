package packettest

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/packet"
)

// FullQueue returns a listener for packet sockets whose queue has no room for a connection until the
// listener accepts, and the listener's path.
func FullQueue(t testing.TB) (path string, l net.Listener) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "s")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	if l, err = net.FileListener(file); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	first, err := packet.Dial(path)
	if err != nil {
		t.Fatal(err)
	}
	first.Close()
	return path, l
}
