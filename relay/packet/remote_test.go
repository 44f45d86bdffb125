package packet

import (
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/wire"
)

func TestSharedSlotsHaveLimits(t *testing.T) {
	for _, c := range []struct {
		used uint64
		ok   bool
		err  error
	}{
		{0, true, nil}, {sharedSlots - 1, true, nil}, {sharedSlots, false, nil}, {sharedSlots + 1, false, errShared},
		{^uint64(0), false, errShared},
	} {
		s := newShared(make([]byte, sharedBytes), true)
		*s.out.head = -c.used
		ok, err := s.out.put([]byte("text"))
		if ok != c.ok || err != c.err || (s.out.at == 1) != c.ok {
			t.Errorf("put with %d used: %t, %v, position %d", c.used, ok, err, s.out.at)
		}
		s.in.at = 7
		*s.in.tail = 7 + c.used
		var buffer [slotBytes]byte
		_, ok, err = s.in.take(&buffer)
		taken, wantErr := c.used > 0 && c.used <= sharedSlots, c.err
		if ok != taken || err != wantErr || (s.in.at == 8) != taken || taken && *s.in.head != 8 {
			t.Errorf("take with %d waiting: %t, %v, position %d", c.used, ok, err, s.in.at)
		}
	}
	for n, want := range map[uint32]error{0: nil, slotBytes - slotHeader: nil, slotBytes - slotHeader + 1: errShared,
		^uint32(0): errShared} {
		s := newShared(make([]byte, sharedBytes), false)
		s.raw(n, 0)
		s.in, s.out = s.out, s.in
		s.in.at = 0
		var buffer [slotBytes]byte
		if data, ok, err := s.in.take(&buffer); err != want || ok != (want == nil) || ok && len(data) != int(n) {
			t.Errorf("a message of %d bytes: %d, %t, %v", n, len(data), ok, err)
		}
	}
}

// sharingPorted is a port that shares memory with its remote side, which the test plays.
func sharingPorted(t *testing.T) (*ported, *shared) {
	t.Helper()
	p := newPorted(t)
	var err error
	p.loop.Call(func() { err = p.port.Share(true) })
	if err != nil {
		t.Fatal(err)
	}
	m, sequence, fds, err := p.remote.Receive()
	if _, ok := m.(*wire.PeerShare); !ok || sequence != 0 || len(fds) != 1 || err != nil {
		t.Fatalf("%T %d with %d descriptors, %v", m, sequence, len(fds), err)
	}
	s, err := openShared(fds[0], SharedBytes(true))
	unix.Close(fds[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Munmap(s.memory); err != nil {
			t.Error(err)
		}
	})
	return p, s
}

// take returns the next message in the memory, nil without one.
func (s *shared) take(t *testing.T) wire.Message {
	t.Helper()
	var buffer [slotBytes]byte
	data, ok, err := s.in.take(&buffer)
	if err != nil {
		t.Fatal(err)
	}
	if !ok || len(data) == 0 {
		return nil
	}
	m, _, err := wire.Decode(data)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func (s *shared) waiting() uint64 { return atomic.LoadUint64(s.in.tail) - s.in.at }

func long() *wire.PeerClose { return &wire.PeerClose{Status: 7} }

func TestSharedMemoryAnnouncesMessageOfSocket(t *testing.T) {
	p, s := sharingPorted(t)
	f := newFile(t)
	p.loop.Call(func() {
		p.port.Send(&wire.PeerWritten{Grant: 1}, 0)
		p.port.Send(long(), 0)
		p.port.Send(&wire.PeerWritten{Grant: 2}, 0, int(f.Fd()))
		p.port.Send(&wire.PeerWritten{Grant: 3}, 0)
	})
	if n := s.waiting(); n != 4 {
		t.Errorf("%d messages wait in the memory", n)
	}
	for i, want := range []uint64{1, 0, 0, 3} { // 0: the next message of the socket
		m, _ := s.take(t).(*wire.PeerWritten)
		if want == 0 && m != nil || want > 0 && (m == nil || m.Grant != want) {
			t.Errorf("message %d is %+v", i, m)
		}
	}
	if m, _, _, err := p.remote.Receive(); err != nil || m.(*wire.PeerClose).Status != 7 {
		t.Errorf("%T, %v", m, err)
	}
	m, _, fds, err := p.remote.Receive()
	if written, ok := m.(*wire.PeerWritten); err != nil || !ok || written.Grant != 2 || len(fds) != 1 {
		t.Errorf("%T with %d descriptors, %v", m, len(fds), err)
	}
	CloseAll(fds)
}

// A message that waits for room in the socket is announced once.
func TestSharedMemoryAnnouncesWaitingMessageOnce(t *testing.T) {
	p, s := sharingPorted(t)
	sent := 0
	p.loop.Call(func() {
		for p.port.Waiting() == 0 {
			p.port.Send(long(), 0)
			sent++
			if s.waiting() == sharedSlots { // room for the announcements
				for s.waiting() > 0 {
					s.take(t)
				}
			}
		}
		for s.waiting() > 0 {
			s.take(t)
		}
		for range 3 {
			p.port.Poll()
		}
	})
	if n := s.waiting(); n != 0 {
		t.Errorf("%d announcements more", n)
	}
	for i := range sent {
		if m, _, _, err := p.remote.Receive(); err != nil {
			t.Fatalf("message %d of %d: %T, %v", i, sent, m, err)
		}
	}
}

func TestSharedMemoryWakesSleepingReaderOnce(t *testing.T) {
	p, s := sharingPorted(t)
	atomic.StoreUint32(s.in.sleeps, 1)
	p.loop.Call(func() {
		p.port.Send(&wire.PeerWritten{}, 0)
		p.port.Send(&wire.PeerWritten{}, 0)
		p.port.Send(long(), 0)
	})
	if m, sequence, _, err := p.remote.Receive(); err != nil || sequence != 0 {
		t.Errorf("%T %d, %v", m, sequence, err)
	} else if _, ok := m.(*wire.PeerBell); !ok {
		t.Errorf("%T wakes the reader", m)
	}
	if m, _, _, err := p.remote.Receive(); err != nil || m.(*wire.PeerClose).Status != 7 {
		t.Errorf("%T follows, %v", m, err)
	}
	if atomic.LoadUint32(s.in.sleeps) != 0 {
		t.Error("the reader sleeps")
	}
}

func TestSharedMemoryIsReadAfterAnswer(t *testing.T) {
	p, s := sharingPorted(t)
	arm := func() (armed bool) {
		p.loop.Call(func() { armed = p.port.Arm() })
		return armed
	}
	grant, err := s.out.put(wire.Encode(&wire.PeerWritten{Grant: 1}, 0))
	if !grant || err != nil {
		t.Fatal(err)
	}
	if arm() {
		t.Error("memory is read before the answer")
	}
	p.none("a message before the answer")
	// Until the answer, messages of the socket are in no order with the memory.
	send(t, p.remote)
	p.message("a message of the socket", 0)
	if err := p.remote.Send(&wire.PeerShared{}, 0); err != nil {
		t.Fatal(err)
	}
	p.message("the message in the memory", 0)
	if arm() || atomic.LoadUint32(s.out.sleeps) != 1 {
		t.Error("a port without messages does not sleep")
	}
	p.loop.Call(func() { // the loop arms the port again
		if p.port.Disarm(); atomic.LoadUint32(s.out.sleeps) != 0 {
			t.Error("Disarm leaves the port asleep")
		}
	})
	if err := p.remote.Send(&wire.PeerShared{}, 0); err != nil { // a second answer has no turn
		t.Fatal(err)
	}
	if e := p.next("a second answer"); !malformed(e.end) {
		t.Errorf("%T, %v", e.m, e.end)
	}
	if status := p.reason(); status != wire.StatusMalformed {
		t.Errorf("the remote side gets %v", status)
	}
}

func TestSharedMemoryInvalidMessageHasReason(t *testing.T) {
	p, s := sharingPorted(t)
	if err := p.remote.Send(&wire.PeerShared{}, 0); err != nil {
		t.Fatal(err)
	}
	s.raw(16, 999)
	if err := p.remote.Send(&wire.PeerBell{}, 0); err != nil {
		t.Fatal(err)
	}
	if e := p.next("an invalid message"); !malformed(e.end) {
		t.Errorf("%T, %v", e.m, e.end)
	}
	p.none("the end")
	for {
		m, _ := s.take(t).(*wire.Failure)
		if m != nil {
			if wire.Status(m.Status) != wire.StatusMalformed {
				t.Errorf("the reason has status %d", m.Status)
			}
			break
		}
		if s.waiting() == 0 {
			if status := p.reason(); status != wire.StatusMalformed {
				t.Errorf("the reason has status %d", status)
			}
			break
		}
	}
}

func TestTakeSharedAnswersOnce(t *testing.T) {
	p := newPorted(t)
	p.loop.Call(func() { p.port.TakeShared(true) })
	s, fd, err := makeShared(SharedBytes(true))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	t.Cleanup(func() {
		if err := unix.Munmap(s.memory); err != nil {
			t.Error(err)
		}
	})
	if err := p.remote.Send(&wire.PeerShare{}, 0, fd); err != nil {
		t.Fatal(err)
	}
	if m, sequence, _, err := p.remote.Receive(); err != nil || sequence != 0 {
		t.Errorf("%T %d, %v", m, sequence, err)
	} else if _, ok := m.(*wire.PeerShared); !ok {
		t.Errorf("the answer is %T", m)
	}
	p.loop.Call(func() { p.port.Send(&wire.PeerWritten{Grant: 9}, 0) })
	if m, ok := s.take(t).(*wire.PeerWritten); !ok || m.Grant != 9 {
		t.Errorf("in the memory is %+v", m)
	}
	if err := p.remote.Send(&wire.PeerShare{}, 0, fd); err != nil {
		t.Fatal(err)
	}
	if e := p.next("a second memory"); !malformed(e.end) {
		t.Errorf("%T, %v", e.m, e.end)
	}
}

// Releases share memory with each other.
func TestSharedMemoryHasFixedPositions(t *testing.T) {
	for maker, base := range map[bool]int{true: 0, false: halfBytes} {
		memory := make([]byte, SharedBytes(true))
		s := newShared(memory, maker)
		*s.out.tail, *s.out.head, *s.out.sleeps = 1, 2, 3
		for at, want := range map[int]byte{0: 1, 64: 2, 128: 3} {
			if got := memory[base+at]; got != want {
				t.Errorf("byte %d of the half at %d is %d, want %d", at, base, got, want)
			}
		}
		s.out.slots[0], s.windows[0] = 4, 5
		if memory[base+4096] != 4 || memory[2*(4096+128*128)] != 5 {
			t.Errorf("slots or windows are elsewhere: %d, %d", memory[base+4096], memory[2*(4096+128*128)])
		}
	}
}

func TestSharedMemoryFollowsQueuedMessages(t *testing.T) {
	p := newPorted(t)
	p.fill()
	p.loop.Call(func() {
		if err := p.port.Share(false); err != nil {
			t.Error(err)
			return
		}
		p.port.Send(&wire.PeerWritten{Grant: 9}, 0)
	})
	for {
		m, _, fds, err := p.remote.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := m.(*wire.PeerShare); !ok {
			continue
		}
		s, err := openShared(fds[0], SharedBytes(false))
		CloseAll(fds)
		if err != nil {
			t.Fatal(err)
		}
		testutil.Until(t, "the last message is in the memory", func() bool { return s.waiting() > 0 })
		if m, ok := s.take(t).(*wire.PeerWritten); !ok || m.Grant != 9 || s.waiting() > 0 {
			t.Errorf("in the memory is %+v, and %d messages", m, s.waiting())
		}
		if err := unix.Munmap(s.memory); err != nil {
			t.Error(err)
		}
		return
	}
}

// A port that waits for a message of the socket sleeps, whatever follows in the memory.
func TestSharedMemoryWaitsForAnnouncedMessage(t *testing.T) {
	p, s := sharingPorted(t)
	for _, data := range [][]byte{nil, wire.Encode(&wire.PeerWritten{Grant: 2}, 0)} {
		if ok, err := s.out.put(data); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	if err := p.remote.Send(&wire.PeerShared{}, 0); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "the port reads the announcement", func() bool { return atomic.LoadUint64(s.out.head) == 1 })
	p.loop.Call(func() {
		if p.port.Arm() {
			t.Error("the port reads past the announcement")
		}
	})
	p.none("a message behind the announcement")
	send(t, p.remote)
	for _, want := range []uint64{7, 2} {
		if m, ok := p.next("the messages in order").m.(*wire.PeerWritten); !ok || m.Grant != want {
			t.Errorf("%+v, want %d", m, want)
		}
	}
}
