package packet

import (
	"encoding/binary"
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

// side is a port with a loop of its own, as a relay has.
type side struct {
	t    *testing.T
	loop *poll.Loop
	port *Port
	got  chan wire.Message
	end  chan error
}

func newSide(t *testing.T, fd int) *side {
	t.Helper()
	s := &side{t: t, got: make(chan wire.Message, 1<<16), end: make(chan error, 1)}
	var err error
	if s.loop, err = poll.New(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { s.loop.Run(); close(ended) }()
	t.Cleanup(func() {
		s.loop.Call(func() { s.port.Close() })
		s.loop.Stop()
		<-ended
	})
	s.loop.Call(func() {
		s.port, err = NewPort(s.loop, fd, func(m wire.Message, _ uint32, fds []int) {
			if _, region := m.(*wire.PeerRegion); region != (len(fds) == 1) {
				t.Errorf("a %T came with %d descriptors", m, len(fds))
			}
			CloseAll(fds)
			s.got <- m
		}, func(err error) { s.end <- err })
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// sharing are two sides of which a has shared memory with b, if it was told to.
func sharing(t *testing.T, windows bool) (a, b *side) {
	t.Helper()
	x, y, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range []int{x, y} {
		if err := unix.SetNonblock(fd, true); err != nil {
			t.Fatal(err)
		}
	}
	a, b = newSide(t, x), newSide(t, y)
	b.loop.Call(func() { b.port.TakeShared(windows) })
	a.loop.Call(func() { err = a.port.Share(windows) })
	if err != nil {
		t.Fatal(err)
	}
	return a, b
}

func (s *side) next() wire.Message {
	s.t.Helper()
	select {
	case m := <-s.got:
		return m
	case err := <-s.end:
		select {
		case m := <-s.got: // it came before
			s.end <- err
			return m
		default:
			s.t.Fatalf("it ended: %v", err)
		}
	case <-testutil.After(time.Minute):
		s.t.Fatal("nothing came")
	}
	return nil
}

// send sends numbered messages: small messages, messages longer than a slot, and messages with a
// descriptor. The memory never has room for the whole set.
func (s *side) send(count int) {
	file, err := os.Open(os.DevNull)
	if err != nil {
		s.t.Error(err)
		return
	}
	defer file.Close()
	for i := range count {
		s.loop.Call(func() {
			switch {
			case i%17 == 5:
				m := &wire.PeerClose{Status: uint32(i)}
				wire.SetText(m.Reason[:], "larger than a slot")
				s.port.Send(m, 0)
			case i%29 == 7:
				s.port.Send(&wire.PeerRegion{Region: uint32(i)}, 0, int(file.Fd()))
			default:
				s.port.Send(&wire.PeerGrant{Grant: uint64(i), Length: 7}, 0)
			}
		})
	}
}

// BenchmarkQuietPorts measures an iteration of a loop over as many idle ports as NCCL has to a
// remote container.
func BenchmarkQuietPorts(b *testing.B) {
	loop, err := poll.New()
	if err != nil {
		b.Fatal(err)
	}
	defer func() { loop.Stop(); loop.Run() }() // which closes its descriptors
	var ports []poll.Poller
	for range 96 {
		ours, theirs, err := Pair()
		if err != nil {
			b.Fatal(err)
		}
		defer unix.Close(theirs)
		port, err := NewPort(loop, ours, nil, nil)
		if err != nil {
			b.Fatal(err)
		}
		defer port.Close()
		if err := port.Share(true); err != nil {
			b.Fatal(err)
		}
		port.shared.reading = true
		ports = append(ports, port)
	}
	for b.Loop() {
		for _, p := range ports {
			p.Poll()
		}
	}
}

func number(m wire.Message) int {
	switch m := m.(type) {
	case *wire.PeerClose:
		return int(m.Status)
	case *wire.PeerRegion:
		return int(m.Region)
	case *wire.PeerGrant:
		return int(m.Grant)
	}
	return -1
}

func TestSharedMemoryKeepsTheOrder(t *testing.T) {
	a, b := sharing(t, false)
	const count = 3000
	go a.send(count)
	go b.send(count)
	for _, s := range []*side{b, a} {
		for i := range count {
			if m := s.next(); number(m) != i {
				t.Fatalf("message %d is %T %d", i, m, number(m))
			}
		}
	}
	// Both sleep now; a message wakes the remote side.
	for range 20 {
		time.Sleep(time.Millisecond)
		a.send(1)
		b.next()
		b.send(1)
		a.next()
	}
	a.loop.Call(func() {
		if a.port.shared == nil || !a.port.shared.reading {
			t.Error("all went over the socket")
		}
	})
}

// Messages written before the end precede the end.
func TestSharedMemoryMessagesPrecedeEnd(t *testing.T) {
	a, b := sharing(t, false)
	a.send(1)
	b.next()
	const count = 100
	a.loop.Call(func() {
		for i := range count {
			a.port.Send(&wire.PeerDelivered{Send: uint64(i)}, 0)
		}
		a.port.Leave()
	})
	for i := range count {
		if m, ok := b.next().(*wire.PeerDelivered); !ok || m.Send != uint64(i) {
			t.Fatalf("message %d is %+v", i, m)
		}
	}
	if err := <-b.end; err == nil {
		t.Error("the end is no error")
	}
}

func TestHostileSharedMemoryEndsPort(t *testing.T) {
	for name, attack := range map[string]func(*shared){
		"a tail that is too far":     func(s *shared) { atomic.StoreUint64(s.out.tail, s.out.at+sharedSlots+1) },
		"a tail that goes back":      func(s *shared) { atomic.StoreUint64(s.out.tail, s.out.at-1) },
		"a head that was not":        func(s *shared) { atomic.StoreUint64(s.in.head, 1<<40) },
		"a length beyond the slot":   func(s *shared) { s.raw(slotBytes, 0) },
		"a message of no type":       func(s *shared) { s.raw(16, 999) },
		"a message of another size":  func(s *shared) { s.raw(16, 36) },
		"a message without a header": func(s *shared) { s.raw(4, 36) },
	} {
		t.Run(name, func(t *testing.T) {
			a, b := sharing(t, false)
			a.send(1)
			b.next()
			a.loop.Call(func() {
				attack(a.port.shared)
				_ = a.port.sendmsg(bell, nil)
			})
			b.send(1)
			select {
			case err := <-b.end:
				if !errors.Is(err, &wire.Error{Status: wire.StatusMalformed}) {
					t.Errorf("it ends with %v", err)
				}
			case <-testutil.After(time.Minute):
				t.Error("nothing is noticed")
			}
		})
	}
}

// raw writes a slot as only a stranger would.
func (s *shared) raw(length, kind uint32) {
	slot := s.out.slots[s.out.at%sharedSlots*slotBytes:]
	binary.LittleEndian.PutUint32(slot, length)
	binary.LittleEndian.PutUint32(slot[slotHeader:], kind)
	s.out.at++
	atomic.StoreUint64(s.out.tail, s.out.at)
}

// A message over the socket that nothing in the memory announced.
func TestUnannouncedSocketMessageEndsPort(t *testing.T) {
	a, b := sharing(t, false)
	a.send(1)
	b.next()
	a.loop.Call(func() { _ = a.port.sendmsg(wire.Encode(&wire.PeerDelivered{}, 0), nil) })
	if err := <-b.end; !errors.Is(err, &wire.Error{Status: wire.StatusMalformed}) {
		t.Errorf("it ends with %v", err)
	}
}

func TestForeignMemoryIsCheckedFirst(t *testing.T) {
	make := func(size int64, seals int) int {
		fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err == nil {
			err = unix.Ftruncate(fd, size)
		}
		if err == nil {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	file, err := os.Create(t.TempDir() + "/file")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for name, fd := range map[string]int{
		"a file":          int(file.Fd()),
		"it can shrink":   make(sharedBytes, unix.F_SEAL_GROW),
		"it can grow":     make(sharedBytes, unix.F_SEAL_SHRINK),
		"it is too small": make(4096, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW),
		"it has windows":  make(SharedBytes(true), unix.F_SEAL_SHRINK|unix.F_SEAL_GROW),
	} {
		if _, err := openShared(fd, SharedBytes(false)); !errors.Is(err, &wire.Error{Status: wire.StatusBadDescriptor}) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Both sides have the same windows, beside messages, from the time on that they are there
// until the port is closed.
func TestWindowsAreSharedUntilPortCloses(t *testing.T) {
	for _, windows := range []bool{true, false} {
		a, b := sharing(t, windows)
		a.send(3 * sharedSlots) // with all slots used, and the memory mapped at both sides when the last is there
		for range 3 * sharedSlots {
			b.next()
		}
		window := func(s *side, number uint64) (m []byte) {
			s.loop.Call(func() { m = s.port.Window(number) })
			return m
		}
		for number := range uint64(Windows) {
			at, there := window(a, number), window(b, number)
			if !windows {
				if at != nil || there != nil {
					t.Fatalf("window %d is there, of %d and %d bytes", number, len(at), len(there))
				}
				continue
			}
			if len(at) != WindowBytes || cap(at) != WindowBytes || len(there) != WindowBytes {
				t.Fatalf("window %d has %d bytes at one side and %d at the other", number, len(at), len(there))
			}
			for i := range at { // nothing of another window, or of messages
				if there[i] != 0 {
					t.Fatalf("byte %d of window %d is %d", i, number, there[i])
				}
				at[i] = byte(number + 1)
			}
			if there[0] != byte(number+1) || there[WindowBytes-1] != byte(number+1) {
				t.Fatalf("window %d of one side is not the other's", number)
			}
		}
		for _, beyond := range []uint64{Windows, 1 << 32, ^uint64(0)} {
			if m := window(a, beyond); m != nil {
				t.Errorf("window %d has %d bytes", beyond, len(m))
			}
		}
		a.send(3 * sharedSlots)
		for range 3 * sharedSlots {
			b.next()
		}
		a.loop.Call(func() { a.port.Close() })
		if m := window(a, 0); m != nil {
			t.Errorf("a port that is closed has a window of %d bytes", len(m))
		}
	}
}
