package testutil

import (
	"net"
	"os"
	"path/filepath"
	"testing"
)

// ShortDir returns a directory with a path that is short enough for Unix sockets below it. The
// directory is removed at the end of the test.
func ShortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "pl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// ListenDatagrams listens at a Unix datagram socket until the end of the test, and makes the
// directories of its path.
func ListenDatagrams(t testing.TB, path string) *net.UnixConn {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// ReadDatagram returns the next datagram, of at most 1 MiB, or fails the test after a Deadline.
func ReadDatagram(t testing.TB, conn *net.UnixConn) string {
	t.Helper()
	if err := conn.SetReadDeadline(Deadline()); err != nil {
		t.Fatal(err)
	}
	text := make([]byte, 1<<20)
	n, err := conn.Read(text)
	if err != nil {
		t.Fatal(err)
	}
	return string(text[:n])
}
