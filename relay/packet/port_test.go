package packet

import (
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

// event is a call of a port: a message with its number of descriptors, or an end.
type event struct {
	m   wire.Message
	fds int
	end error
}

// ported is a port on a running loop, and its remote side.
type ported struct {
	t      *testing.T
	loop   *poll.Loop
	port   *Port
	remote Conn
	events chan event
}

func newPorted(t *testing.T) *ported {
	t.Helper()
	loop, fd, remote := looped(t)
	p := &ported{t: t, loop: loop, remote: remote, events: make(chan event, 1<<15)}
	var err error
	loop.Call(func() {
		p.port, err = NewPort(loop, fd, func(m wire.Message, _ uint32, fds []int) {
			p.port.CloseAll(fds)
			p.events <- event{m: m, fds: len(fds)}
		}, func(err error) { p.events <- event{end: err} })
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { loop.Call(p.port.Close) })
	if err := remote.SetDeadline(testutil.Deadline()); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *ported) next(name string) event {
	p.t.Helper()
	return testutil.Receive(p.t, name, p.events)
}

// message fails the test if the next call is not a message with this number of descriptors.
func (p *ported) message(name string, fds int) {
	p.t.Helper()
	if e := p.next(name); e.m == nil || e.fds != fds {
		p.t.Errorf("%s: %T with %d descriptors, %v", name, e.m, e.fds, e.end)
	}
}

// none fails the test if the port has called.
func (p *ported) none(name string) {
	p.t.Helper()
	p.loop.Call(func() {})
	select {
	case e := <-p.events:
		p.t.Errorf("%s: %T, %v", name, e.m, e.end)
	default:
	}
}

// reason returns the status of the failure that the remote side receives, after other messages.
func (p *ported) reason() wire.Status {
	p.t.Helper()
	for {
		m, sequence, fds, err := p.remote.Receive()
		if err != nil {
			p.t.Errorf("no reason: %v", err)
			return 0
		}
		CloseAll(fds)
		if failure, ok := m.(*wire.Failure); ok {
			if sequence != 0 {
				p.t.Errorf("the reason answers message %d", sequence)
			}
			return wire.Status(failure.Status)
		}
	}
}

func TestPortFailureReachesBothSides(t *testing.T) {
	for _, c := range []struct {
		name string
		act  func(p *ported)
		is   func(error) bool
	}{
		{"an invalid message", func(p *ported) { sendBytes(t, p.remote, 1) }, malformed},
		{"a descriptor that is not open", func(p *ported) {
			p.loop.Call(func() { p.port.Send(&wire.PeerWritten{}, 1, 1<<20) })
		}, func(err error) bool { return errors.Is(err, unix.EBADF) }},
		{"a descriptor that is not open, for a queued message", func(p *ported) {
			p.fill()
			p.loop.Call(func() { p.port.Send(&wire.PeerWritten{}, 1, int(newFile(t).Fd()), 1<<20) })
			go drainConn(p.remote)
		}, func(err error) bool { return errors.Is(err, unix.EBADF) }},
	} {
		p := newPorted(t)
		c.act(p)
		if e := p.next(c.name); e.m != nil || !c.is(e.end) {
			t.Errorf("%s: %T, %v", c.name, e.m, e.end)
		}
		p.none(c.name)
		p.loop.Call(func() {
			if p.port.fd >= 0 || p.port.Waiting() != 0 {
				t.Errorf("%s: the port is open", c.name)
			}
			p.port.Send(&wire.PeerWritten{}, 1) // to nobody
		})
	}
	p := newPorted(t)
	sendBytes(t, p.remote, 1)
	if status := p.reason(); status != wire.StatusMalformed {
		t.Errorf("the remote side gets %v", status)
	}
}

// fill sends messages until one waits.
func (p *ported) fill() {
	p.loop.Call(func() {
		for p.port.Waiting() == 0 {
			p.port.Send(&wire.PeerWritten{}, 1)
		}
	})
}

func drainConn(c Conn) {
	for {
		if _, _, fds, err := c.Receive(); err != nil {
			return
		} else {
			CloseAll(fds)
		}
	}
}

func TestPortQueueIsLimited(t *testing.T) {
	p := newPorted(t)
	p.fill()
	p.loop.Call(func() {
		for p.port.Waiting() < maxWaiting {
			p.port.Send(&wire.PeerWritten{}, 1)
		}
		if !p.port.Busy() {
			t.Error("a port with messages is not busy")
		}
	})
	p.none("as many messages as may wait")
	p.loop.Call(func() {
		p.port.Send(&wire.PeerWritten{}, 1)
		if n := p.port.Waiting(); n != maxWaiting {
			t.Errorf("%d messages wait", n)
		}
	})
	if e := p.next("a message more"); e.end == nil {
		t.Errorf("%T", e.m)
	}
}

func TestPortQueuedMessageThatFailsEndsPort(t *testing.T) {
	p := newPorted(t)
	p.fill()
	p.loop.Call(func() {
		p.port.outbox = append(p.port.outbox, outgoing{data: wire.Encode(&wire.PeerWritten{}, 1), fds: []int{1 << 20}})
	})
	go drainConn(p.remote)
	if e := p.next("a message that cannot be sent"); !errors.Is(e.end, unix.EBADF) {
		t.Errorf("%T, %v", e.m, e.end)
	}
}

// An empty message with descriptors looks like an end.
func TestPortEmptyMessageWithDescriptorsIsInvalid(t *testing.T) {
	p, f := newPorted(t), newFile(t)
	f.sendEmpty(p.remote)
	if e := p.next("an empty message"); !malformed(e.end) {
		t.Errorf("%T, %v", e.m, e.end)
	}
	f.wait("an empty message")
}

func TestPortPollReportsProgress(t *testing.T) {
	p := newPorted(t)
	p.fill()
	p.loop.Call(func() {
		if p.port.Poll() {
			t.Error("progress without room")
		}
		for range 3 {
			if _, _, _, err := p.remote.Receive(); err != nil {
				t.Error(err)
			}
		}
		if !p.port.Poll() || p.port.Waiting() != 0 {
			t.Errorf("%d messages wait with room", p.port.Waiting())
		}
		if p.port.Poll() {
			t.Error("progress without messages")
		}
	})
}

func TestPortClosesDescriptorsOfQueuedMessages(t *testing.T) {
	for name, end := range map[string]func(p *ported){
		"sent":    func(p *ported) { go drainConn(p.remote) },
		"dropped": func(p *ported) { p.loop.Call(p.port.Close) },
	} {
		p, f := newPorted(t), newFile(t)
		p.fill()
		p.loop.Call(func() { p.port.Send(&wire.PeerWritten{}, 1, int(f.Fd()), int(f.Fd())) })
		if n := f.descriptors(); n != 3 {
			t.Errorf("%s: %d descriptors are open", name, n)
		}
		end(p)
		f.wait(name)
	}
}

func TestPortLingersUntilRemoteSideCloses(t *testing.T) {
	p, f := newPorted(t), newFile(t)
	p.loop.Call(p.port.Linger)
	sendBytes(t, p.remote, 1)
	if e := p.next("the failure"); !malformed(e.end) {
		t.Errorf("%T, %v", e.m, e.end)
	}
	if status := p.reason(); status != wire.StatusMalformed {
		t.Errorf("the remote side gets %v", status)
	}
	send(t, p.remote, int(f.Fd()))
	sendBytes(t, p.remote, 1) // a second failure is not reported
	f.wait("a message after the failure")
	p.none("messages after the failure")
	if err := p.remote.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if e := p.next("the end"); !errors.Is(e.end, io.EOF) {
		t.Errorf("%T, %v", e.m, e.end)
	}
	if m, _, _, err := p.remote.Receive(); m != nil || !isEOF(err) {
		t.Errorf("the remote side gets %T, %v", m, err)
	}
}

func TestPortLeavesAtOnceWithoutQueue(t *testing.T) {
	p := newPorted(t)
	p.loop.Call(p.port.Leave)
	if _, _, _, err := p.remote.Receive(); !isEOF(err) {
		t.Errorf("%v", err)
	}
	p.none("an end that this side began")
}

func TestPortLeavingReceivesNothing(t *testing.T) {
	p, f := newPorted(t), newFile(t)
	p.fill()
	p.loop.Call(p.port.Leave)
	send(t, p.remote, int(f.Fd()))
	f.wait("a message to a port that leaves")
	p.none("a message to a port that leaves")
	p.loop.Call(func() {
		for p.port.Waiting() > 0 {
			if _, _, _, err := p.remote.Receive(); err != nil {
				t.Error(err)
				return
			}
			p.port.Poll()
		}
		if !p.port.closed() {
			t.Error("the port is open after its messages")
		}
	})
	p.none("the end")
}

func TestPortEndOfRemoteSideFollowsItsMessages(t *testing.T) {
	p := newPorted(t)
	p.fill() // the kernel reports a reset first
	for range 100 {
		send(t, p.remote)
	}
	p.remote.Close()
	for range 100 {
		p.message("a message before the end", 0)
	}
	if e := p.next("the end"); !errors.Is(e.end, io.EOF) {
		t.Errorf("%T, %v", e.m, e.end)
	}
}

// hang makes the port's closes appear to hang since a time.
func (p *ported) hang(since time.Time) {
	p.port.closing.add(maxBlockingOfPort)
	p.port.closing.mu.Lock()
	p.port.closing.since = since
	p.port.closing.mu.Unlock()
}

func TestPortWhileClosesHangReceivesNoDescriptors(t *testing.T) {
	p, f := newPorted(t), newFile(t)
	p.loop.Call(func() {
		p.hang(time.Now().Add(-time.Hour))
		if !p.port.Hanging() {
			t.Error("the port does not hang")
		}
	})
	for range 2 {
		send(t, p.remote, int(f.Fd()))
		send(t, p.remote)
	}
	for range 4 {
		p.message("a message while closes hang", 0)
	}
	f.wait("a dropped message")
	p.port.closing.add(-maxBlockingOfPort)
	send(t, p.remote, int(f.Fd()))
	p.message("a message afterwards", 1)
	f.wait("a message afterwards")
}

func TestPortWithTooManyClosesWaits(t *testing.T) {
	p, f := newPorted(t), newFile(t)
	p.loop.Call(func() {
		p.hang(time.Now().Add(time.Hour))
		if p.port.Hanging() {
			t.Error("the port hangs")
		}
	})
	send(t, p.remote, int(f.Fd()))
	p.none("a message while the maximum of closes is under way")
	p.port.closing.add(-maxBlockingOfPort)
	p.message("a message afterwards", 1)
	f.wait("a message afterwards")
}

func TestPortCountsClosesOfItsSource(t *testing.T) {
	p := newPorted(t)
	s := newSource()
	p.loop.Call(func() {
		p.port.From(s)
		s.add(s.most)
		s.since = time.Now().Add(-time.Hour)
		if !p.port.Hanging() {
			t.Error("the port does not hang with its source")
		}
		s.add(-s.most)
	})
}

func TestPortBrokenByLimitOfDescriptorsHasCode(t *testing.T) {
	for _, c := range []struct {
		name string
		err  error
		is   func(error) bool // nil for no end
	}{
		{"the remote side has closed", unix.EPIPE, nil},
		{"a reset", unix.ECONNRESET, nil},
		{"descriptors in flight", unix.ETOOMANYREFS, func(err error) bool {
			f, ok := errors.AsType[*fault.Error](err)
			return ok && f.Code == fault.LimitMet
		}},
		{"no memory", unix.ENOMEM, func(err error) bool {
			s, ok := errors.AsType[*os.SyscallError](err)
			return ok && s.Err == unix.ENOMEM
		}},
		{"shared memory", errShared, malformed},
	} {
		p := newPorted(t)
		p.loop.Call(func() { p.port.broken(c.err) })
		if c.is == nil {
			p.none(c.name)
			continue
		}
		if e := p.next(c.name); !c.is(e.end) {
			t.Errorf("%s: %T, %v", c.name, e.m, e.end)
		}
	}
}

func TestPortWithoutSharedMemoryHasNoWindow(t *testing.T) {
	p := newPorted(t)
	p.loop.Call(func() {
		if m := p.port.Window(0); m != nil {
			t.Errorf("a window of %d bytes", len(m))
		}
		if p.port.Arm() || p.port.Poll() || p.port.Busy() {
			t.Error("an idle port has something to do")
		}
		p.port.Disarm()
		p.port.Close()
		p.port.Close()
	})
	for name, m := range map[string]wire.Message{"memory": &wire.PeerShare{}, "an answer": &wire.PeerShared{}} {
		p := newPorted(t)
		if err := p.remote.Send(m, 1); err != nil {
			t.Fatal(err)
		}
		p.message(name+" that nobody asked for", 0) // the relay refuses it
	}
	p = newPorted(t)
	p.loop.Call(func() { p.port.TakeShared(false) })
	send(t, p.remote)
	p.message("a message before the memory", 0)
	if err := p.remote.Send(&wire.PeerShare{}, 1); err != nil {
		t.Fatal(err)
	}
	if e := p.next("memory without a descriptor"); !malformed(e.end) {
		t.Errorf("%T, %v", e.m, e.end)
	}
}
