package packet

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
)

// fullQueue is a listener that accepts nothing, and whose queue has no room.
func fullQueue(t *testing.T) (path string, listener net.Listener) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "s")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 2)); err != nil {
		t.Fatal(err)
	}
	for {
		c, err := Dial(path)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	l, err := net.FileListener(file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return path, l
}

func TestDialContextQueueFullWaitsForAccept(t *testing.T) {
	path, listener := fullQueue(t)
	ctx, cancel := testutil.WithLimit(t.Context(), time.Minute)
	defer cancel()
	// More than can be blocked at a time.
	const n = 2 * maxBlockedDials
	done := make(chan error, n)
	for range n {
		go func() {
			c, err := DialContext(ctx, path)
			if err == nil {
				err = c.Close()
			}
			done <- err
		}()
	}
	for len(blockedDials) < maxBlockedDials {
		time.Sleep(time.Millisecond)
	}
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			defer c.Close()
		}
	}()
	for range n {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if len(blockedDials) != 0 {
		t.Errorf("%d dials are counted, and none is under way", len(blockedDials))
	}
}

func TestDialContextQueueFullEndsWithContext(t *testing.T) {
	path, _ := fullQueue(t)
	for name, end := range map[string]func() (context.Context, context.CancelFunc){
		"deadline": func() (context.Context, context.CancelFunc) {
			return context.WithTimeout(context.Background(), 50*time.Millisecond)
		},
		"canceled": func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(context.Background())
			time.AfterFunc(50*time.Millisecond, cancel)
			return ctx, cancel
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := end()
			defer cancel()
			if c, err := DialContext(ctx, path); !errors.Is(err, ErrQueueFull) {
				t.Errorf("%v, %v", c, err)
			}
		})
	}
}

// The listener that is waited for is closed.
func TestDialContextQueueFullListenerEnds(t *testing.T) {
	path, l := fullQueue(t)
	done := make(chan error, 1)
	go func() {
		_, err := DialContext(t.Context(), path)
		done <- err
	}()
	for len(blockedDials) == 0 {
		time.Sleep(time.Millisecond)
	}
	l.Close()
	if err := <-done; !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("%v", err)
	}
}
