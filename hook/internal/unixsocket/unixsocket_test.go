package unixsocket

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
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
