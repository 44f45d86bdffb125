package unixsocket

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// fullSocket returns the path of a socket whose backlog is full.
func fullSocket(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	err = Through(path, func(short string) error { return unix.Bind(fd, &unix.SockaddrUnix{Name: short}) })
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	first, err := Connect(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { first.Close() })
	return path
}

func TestConnectContinuesAfterSignals(t *testing.T) {
	path := fullSocket(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	thread, stop, stopped := unix.Gettid(), make(chan struct{}), make(chan struct{})
	var sent error
	go func() {
		defer close(stopped)
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				sent = errors.Join(sent, unix.Tgkill(os.Getpid(), thread, unix.SIGURG))
			}
		}
	}()
	start := time.Now()
	_, err := ConnectWithin(path, 100*time.Millisecond)
	took := time.Since(start)
	close(stop)
	<-stopped
	if sent != nil {
		t.Errorf("sending a signal: %v", sent)
	}
	if !errors.Is(err, unix.EAGAIN) || took < 100*time.Millisecond {
		t.Errorf("%v after %v", err, took)
	}
}

func TestListenMakesSocketWithModeAtAnyPath(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 200))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	old := unix.Umask(0o077)
	defer unix.Umask(old)
	path := filepath.Join(dir, "socket")
	before := descriptors(t)
	listener, err := Listen(path, 0o666)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Lstat(path)
	if err != nil || info.Mode() != os.ModeSocket|0o666 {
		t.Errorf("%v, %v", info, err)
	}
	kind, err := unix.GetsockoptInt(int(listener.Fd()), unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil || kind != unix.SOCK_SEQPACKET {
		t.Errorf("type %d, %v", kind, err)
	}
	client, err := Connect(path)
	if err != nil {
		t.Fatal(err)
	}
	if n := descriptors(t); n != before+2 {
		t.Errorf("%d descriptors are open, want %d", n, before+2)
	}
	if _, err := Listen(path, 0o666); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("a second listener: %v", err)
	}
	listener.Close()
	if _, err := Connect(path); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("after the end of the listener: %v", err)
	}
	client.Close()
	missing := filepath.Join(dir, "none/socket")
	if _, err := Listen(missing, 0o666); !errors.Is(err, unix.ENOENT) {
		t.Errorf("without a directory: %v", err)
	}
	if _, err := Connect(missing); !errors.Is(err, unix.ENOENT) {
		t.Errorf("without a directory: %v", err)
	}
	if n := descriptors(t); n != before {
		t.Errorf("%d descriptors are open, want %d", n, before)
	}
}

// descriptors returns the number of this process's sockets and directories that are open.
func descriptors(t *testing.T) (n int) {
	t.Helper()
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && (strings.HasPrefix(to, "socket:") || strings.HasPrefix(to, "/")) {
			n++
		}
	}
	return n
}
