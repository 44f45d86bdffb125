package packet

import (
	"errors"
	"io"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

func conns(t *testing.T) (a, b Conn) {
	t.Helper()
	fdA, fdB, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	if a, err = FromFD(fdA, "a"); err != nil {
		t.Fatal(err)
	}
	if b, err = FromFD(fdB, "b"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

// looped is a loop that runs, and a pair of sockets: a descriptor for a port on the loop, and the
// remote descriptor.
func looped(t *testing.T) (loop *poll.Loop, fd int, other Conn) {
	t.Helper()
	loop, err := poll.New()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { loop.Run(); close(ended) }()
	t.Cleanup(func() { loop.Stop(); <-ended })
	fd, fdB, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	if other, err = FromFD(fdB, "reader"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { other.Close() })
	return loop, fd, other
}

func TestDescriptorsArriveWithTheirMessage(t *testing.T) {
	a, b := conns(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := a.Send(&wire.PeerRegion{Region: 5, Bytes: 77}, 9, int(w.Fd())); err != nil {
		t.Fatal(err)
	}
	w.Close()
	m, sequence, fds, err := b.Receive()
	if err != nil || sequence != 9 || len(fds) != 1 {
		t.Fatalf("%v, sequence %d, %d descriptors", err, sequence, len(fds))
	}
	if region, ok := m.(*wire.PeerRegion); !ok || region.Region != 5 || region.Bytes != 77 {
		t.Errorf("%+v", m)
	}
	flags, err := unix.FcntlInt(uintptr(fds[0]), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("the descriptor would be inherited: %v %#x", err, flags)
	}
	if _, err := unix.Write(fds[0], []byte("x")); err != nil {
		t.Error(err)
	}
	CloseAll(fds)
	if text, err := io.ReadAll(r); err != nil || string(text) != "x" {
		t.Errorf("%q %v", text, err)
	}
}

func TestTooManyDescriptorsAreRefused(t *testing.T) {
	a, b := conns(t)
	for _, n := range []int{wire.MaxDescriptors + 1, 50} {
		fds := make([]int, n)
		if err := a.Send(&wire.Done{}, 1, fds...); err != nil { // standard input, n times
			t.Fatal(err)
		}
		_, _, received, err := b.Receive()
		CloseAll(received)
		if !errors.Is(err, &wire.Error{Status: wire.StatusMalformed}) {
			t.Errorf("%d descriptors: %v", n, err)
		}
	}
}

func TestPortQueuesMessagesForSlowReader(t *testing.T) {
	loop, fdA, reader := looped(t)
	var err error
	var port *Port
	hungUp := make(chan error, 1)
	loop.Call(func() {
		port, err = NewPort(
			loop,
			fdA,
			func(_ wire.Message, _ uint32, fds []int) { CloseAll(fds) },
			func(err error) { hungUp <- err },
		)
	})
	if err != nil {
		t.Fatal(err)
	}
	const messages = 3000
	waiting := 0
	loop.Call(func() {
		for i := range uint64(messages) {
			port.Send(&wire.PeerWritten{Grant: i}, 0)
		}
		waiting = port.Waiting()
	})
	if waiting == 0 {
		t.Fatal("the socket took everything: the test does not test")
	}
	for i := range uint64(messages) {
		if err := reader.SetDeadline(testutil.Deadline()); err != nil {
			t.Fatal(err)
		}
		m, _, _, err := reader.Receive()
		if err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
		if got := m.(*wire.PeerWritten).Grant; got != i {
			t.Fatalf("message %d came as number %d", got, i)
		}
	}
	reader.Close()
	select {
	case err := <-hungUp:
		if !errors.Is(err, io.EOF) {
			t.Errorf("the end is reported as %v", err)
		}
	case <-testutil.After(20 * time.Second):
		t.Error("the end is not reported")
	}
}

func TestCallAfterLoopEndReturnsFalse(t *testing.T) {
	loop, err := poll.New()
	if err != nil {
		t.Fatal(err)
	}
	ran := false
	loop.Do(func() { ran = true })
	loop.Stop()
	loop.Run()
	if !ran {
		t.Error("a task that was queued before the end did not run")
	}
	if loop.Call(func() { t.Error("it ran") }) {
		t.Error("Call after the end reports that it ran")
	}
}

func TestLastMessagesOfClosedPeerAreRead(t *testing.T) {
	a, b := conns(t)
	for _, c := range []Conn{a, b} {
		if err := c.Send(&wire.PeerClose{Status: 7}, 0); err != nil {
			t.Fatal(err)
		}
	}
	a.Close()
	if m, _, _, err := b.Receive(); err != nil {
		t.Errorf("the reason of the end is lost: %v", err)
	} else if m.(*wire.PeerClose).Status != 7 {
		t.Errorf("%+v", m)
	}
	if _, _, _, err := b.Receive(); !errors.Is(err, io.EOF) {
		t.Errorf("the end is %v", err)
	}
}

func TestClosingPortSendsQueuedMessages(t *testing.T) {
	loop, fdA, reader := looped(t)
	var err error
	const messages = 3000
	loop.Call(func() {
		var port *Port
		if port, err = NewPort(loop, fdA, func(wire.Message, uint32, []int) {},
			func(error) { t.Error("it hears of the end") }); err != nil {
			return
		}
		for i := range uint64(messages) {
			port.Send(&wire.PeerWritten{Grant: i}, 0)
		}
		port.Leave()
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := reader.SetDeadline(testutil.Deadline()); err != nil {
		t.Fatal(err)
	}
	for i := range messages {
		if _, _, _, err := reader.Receive(); err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
	}
	if _, _, _, err := reader.Receive(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last message: %v", err)
	}
}

func TestPortRequiresMessageSocket(t *testing.T) {
	loop, fd, _ := looped(t)
	unix.Close(fd)
	null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(null)
	stream, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(stream)
	for _, fd := range []int{null, stream} {
		loop.Call(func() { _, err = NewPort(loop, fd, nil, nil) })
		if !errors.Is(err, &wire.Error{Status: wire.StatusBadDescriptor}) {
			t.Errorf("%v", err)
		}
	}
}

// Messages without descriptors are drained before the close of a socket.
func TestSocketDrainedBeforeClose(t *testing.T) {
	for _, c := range []struct {
		name    string
		send    []int // how many descriptors with each
		empty   bool
		drained bool
	}{
		{"nothing", nil, false, true},
		{"messages", []int{0, 0, 0}, false, true},
		{"empty messages", []int{0, 0, 0}, true, true},
		{"a descriptor", []int{1}, false, false},
		{"a descriptor behind empty messages", []int{0, 0, 1}, true, false},
	} {
		for _, closed := range []bool{false, true} {
			a, b, err := Pair()
			if err != nil {
				t.Fatal(err)
			}
			text := []byte("text")
			if c.empty {
				text = nil
			}
			for _, n := range c.send {
				var control []byte
				if n > 0 {
					control = unix.UnixRights(make([]int, n)...) // standard input
				}
				if err := unix.Sendmsg(a, text, control, nil, 0); err != nil {
					t.Fatal(err)
				}
			}
			if closed {
				unix.Close(a)
			} else {
				defer unix.Close(a)
			}
			if err := errors.Join(unix.Shutdown(b, unix.SHUT_RDWR), unix.SetsockoptInt(b, unix.SOL_SOCKET, unix.SO_PASSCRED,
				1)); err != nil {
				t.Fatal(err)
			}
			if is := drain(b); is != c.drained {
				t.Errorf("%s, the other side closed %v: drained %v", c.name, closed, is)
			}
			unix.Close(b)
		}
	}
}

func TestBlockingCallsAreBounded(t *testing.T) {
	s := newSource()
	var running, most atomic.Int64
	release := make(chan struct{})
	for i := range int64(maxBlocking) {
		if s.Crowded() {
			t.Errorf("crowded by %d", i)
		}
		s.block(func() {
			now := running.Add(1)
			for old := most.Load(); now > old && !most.CompareAndSwap(old, now); old = most.Load() {
			}
			<-release
			running.Add(-1)
		})
	}
	if !s.Crowded() {
		t.Errorf("not crowded by %d", maxBlocking)
	}
	until := func(what string, so func() bool) {
		t.Helper()
		for end := testutil.Begin(); !so(); time.Sleep(time.Millisecond) {
			if end.Over() {
				t.Fatal(what)
			}
		}
	}
	turns := int64(cap(s.turns))
	until("not all that have a turn run", func() bool { return running.Load() == turns })
	close(release)
	until("some never had their turn", func() bool { return s.behind.Load() == 0 })
	if s.Crowded() || most.Load() > turns {
		t.Errorf("%d ran at once, of %d; crowded %v", most.Load(), turns, s.Crowded())
	}
}
