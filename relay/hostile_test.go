package relay_test

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	codes "github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/ring"
	"github.com/peerlane/peerlane/relay/wire"
)

// stranger is a receiver's relay that the test plays; a's relay connects to it.
type stranger struct {
	t *testing.T
	packet.Conn
	a       *client.Session
	socket  string // of a's relay
	relay   *relay.Relay
	sending *client.Connection
}

// meet lets a's relay connect to a stranger that answers with a route.
func meet(t *testing.T, answer uint32) (*stranger, error) {
	t.Helper()
	return meetOf(t, answer, wire.NewestVersion)
}

// meetOf is meet with a stranger that speaks a version.
func meetOf(t *testing.T, answer, version uint32) (*stranger, error) {
	t.Helper()
	h := newHost(t)
	s := &stranger{t: t}
	s.socket, s.relay = h.start("a", launch.RouteAuto, -1, far(0, 1, "nic0"))
	s.a = attach(t, s.socket)
	own, err := s.a.Listen(within(t), uuid(t, 0))
	if err != nil {
		t.Fatal(err)
	}
	opaque := own.Handle()
	handle := opaque.Layout()
	if _, err := rand.Read(handle.Generation[:]); err != nil {
		t.Fatal(err)
	}
	peers := listen(t, filepath.Join(h.dir, hex.EncodeToString(handle.Generation[:])+".sock"))
	defer peers.Close()
	met := make(chan error, 1)
	go func() {
		conn, err := peers.AcceptUnix()
		if err == nil {
			s.Conn = packet.Conn{UnixConn: conn}
			if _, _, _, err = s.Receive(); err == nil {
				err = s.Send(&wire.PeerWelcome{Version: version, Route: answer}, 1)
			}
		}
		met <- err
	}()
	s.sending, err = s.a.Connect(within(t), uuid(t, 0), handle.Handle())
	if failed := <-met; failed != nil {
		t.Fatal(failed)
	}
	t.Cleanup(func() { s.Close() })
	if err := s.SetDeadline(testutil.Deadline()); err != nil {
		t.Fatal(err)
	}
	return s, err
}

func (s *stranger) say(m wire.Message, fds ...int) {
	s.t.Helper()
	if err := s.Send(m, 0, fds...); err != nil {
		s.t.Fatal(err)
	}
}

// hear reads until a message of a kind arrives.
func hear[M wire.Message](s *stranger) M {
	s.t.Helper()
	for {
		m, _, fds, err := s.Receive()
		packet.CloseAll(fds)
		if err != nil {
			s.t.Fatal(err)
		}
		if wanted, ok := m.(M); ok {
			return wanted
		}
	}
}

func TestGrantAfterEndMovesNothing(t *testing.T) {
	s, err := meet(t, wire.RouteDirect)
	if err != nil {
		t.Fatal(err)
	}
	const n, secret = 256 << 20, 4096
	source, target := exported(t, s.a, 0, n), allocate(t, 3, n+2<<20)
	source.write(n-secret, random(t, secret))
	// The long copy keeps the ended connection for a while.
	long, err := s.sending.Send(source.Memory, 0, n-secret)
	if err != nil {
		t.Fatal(err)
	}
	late, err := s.sending.Send(source.Memory, n-secret, secret)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		hear[*wire.PeerSend](s) // before that nothing can be granted
	}
	s.say(&wire.PeerRegion{Region: 9, Bytes: target.bytes}, target.fd)
	s.say(&wire.PeerGrant{Send: 1, Grant: 1, Length: n - secret, Region: 9})
	time.Sleep(20 * time.Millisecond) // for the mapping
	if err := s.sending.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	_, err = wait(t, late, nil)
	demand(t, err, wire.StatusPeerClosed)
	s.say(&wire.PeerGrant{Send: 2, Grant: 2, Length: secret, Offset: n, Region: 9})
	for {
		_, _, fds, err := s.Receive()
		packet.CloseAll(fds)
		if err != nil {
			break // nothing writes any more
		}
	}
	if _, err := wait(t, long, nil); err == nil {
		t.Log("the long copy was too fast: the test did not test")
	}
	for _, b := range target.read(n, secret) {
		if b != 0 {
			t.Fatal("an operation that had ended was copied from its memory")
		}
	}
}

func TestInvalidMessagesOfReceivingRelayEndConnection(t *testing.T) {
	for _, route := range []uint32{wire.RouteAuto, 7} {
		s, err := meet(t, route)
		demand(t, err, wire.StatusMalformed)
		attach(t, s.socket)
	}
	s, err := meet(t, wire.RouteStaged) // data goes by NICs then, which this host has not
	demandCode(t, err, wire.StatusUnreachable, codes.NoNetwork, "")
	attach(t, s.socket)
	for _, c := range []struct {
		name   string
		grants []wire.PeerGrant
	}{
		{"a grant twice", []wire.PeerGrant{{Send: 1, Grant: 1, Length: 8, Region: 9},
			{Send: 1, Grant: 1, Part: 8, Length: 8, Region: 9}}},
		{"a byte twice", []wire.PeerGrant{{Send: 1, Grant: 1, Length: 8, Region: 9}, {Send: 1, Grant: 2, Length: 8,
			Region: 9}}},
		{"beyond the message", []wire.PeerGrant{{Send: 1, Grant: 1, Length: 4097, Region: 9}}},
		{"beyond the region", []wire.PeerGrant{{Send: 1, Grant: 1, Length: 8, Offset: 2<<20 - 7, Region: 9}}},
		{"an unknown region", []wire.PeerGrant{{Send: 1, Grant: 1, Length: 8, Region: 8}}},
		{"an unknown message", []wire.PeerGrant{{Send: 2, Grant: 1, Length: 8, Region: 9}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := meet(t, wire.RouteDirect)
			if err != nil {
				t.Fatal(err)
			}
			source, target := exported(t, s.a, 0, 2<<20), allocate(t, 3, 2<<20)
			op, err := s.sending.Send(source.Memory, 0, 4096)
			if err != nil {
				t.Fatal(err)
			}
			hear[*wire.PeerSend](s)
			s.say(&wire.PeerRegion{Region: 9, Bytes: target.bytes}, target.fd)
			for _, g := range c.grants {
				s.say(&g)
			}
			_, err = wait(t, op, nil)
			demand(t, err, wire.StatusMalformed)
			attach(t, s.socket)
		})
	}
}

// A receiver's relay that calls something host memory which is not.
func TestInvalidHostMemoryOfReceivingRelayIsRefused(t *testing.T) {
	const bytes = 2 << 20
	memfd := func(n int64, seals int) int {
		fd, err := unix.MemfdCreate("stranger", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		if err := errors.Join(unix.Ftruncate(fd, n), err); err != nil {
			t.Fatal(err)
		}
		return fd
	}
	sealed := func(n int64) int {
		fd := memfd(n, 0)
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW); err != nil {
			t.Fatal(err)
		}
		return fd
	}
	const bad = wire.StatusBadDescriptor
	for _, c := range []struct {
		name   string
		region wire.PeerRegion
		fd     int
		status wire.Status
		object string
		words  string
	}{
		{"unsealed", wire.PeerRegion{Kind: wire.MemoryHost, Bytes: bytes}, memfd(bytes, 0), bad, "", "sealed"},
		{"of another size", wire.PeerRegion{Kind: wire.MemoryHost, Bytes: bytes}, sealed(bytes / 2), bad, "",
			"1048576 bytes"},
		{"a GPU's", wire.PeerRegion{Kind: wire.MemoryHost, Bytes: bytes}, allocate(t, 3, bytes).fd, bad, "", "bytes"},
		{"without pages", wire.PeerRegion{Kind: wire.MemoryHost, Bytes: 1 << 40}, sealed(1 << 40), wire.StatusLimit,
			"relay.limits.host_memory", ""},
		{"of no kind", wire.PeerRegion{Kind: 7, Bytes: bytes}, sealed(bytes), wire.StatusMalformed, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := meet(t, wire.RouteDirect)
			if err != nil {
				t.Fatal(err)
			}
			source := exported(t, s.a, 0, bytes)
			op, err := s.sending.Send(source.Memory, 0, 4096)
			if err != nil {
				t.Fatal(err)
			}
			hear[*wire.PeerSend](s)
			c.region.Region = 9
			s.say(&c.region, c.fd)
			_, err = wait(t, op, nil)
			demandOf(t, err, c.status, c.object)
			demandText(t, err, c.words)
			attach(t, s.socket)
		})
	}
}

func TestInvalidMessagesOfSendingRelayEndConnection(t *testing.T) {
	h := newHost(t)
	socket := h.relay("b", launch.RouteDirect, far(3, 2, "nic1"))
	b := attach(t, socket)
	listener, err := b.Listen(within(t), uuid(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	opaque := listener.Handle()
	handle := opaque.Layout()
	greet := func(route uint32) (packet.Conn, error) {
		conn, err := packet.Dial(filepath.Join(h.dir, handle.Generation.String()+".sock"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		_, fds, err := conn.Exchange(&wire.PeerHello{
			Magic: wire.Magic, Oldest: 1, Newest: wire.NewestVersion, Token: handle.Token, Route: route,
		}, 30*time.Second)
		packet.CloseAll(fds)
		return conn, err
	}
	_, err = greet(7)
	demand(t, err, wire.StatusMalformed)

	conn, err := greet(wire.RouteDirect)
	if err != nil {
		t.Fatal(err)
	}
	receiving, err := listener.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // one number for two messages
		if err := conn.Send(&wire.PeerSend{Send: 1, Length: 8}, 0); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-receiving.Down():
		demand(t, receiving.Err(), wire.StatusMalformed)
	case <-testutil.After(20 * time.Second):
		t.Error("the connection is still up")
	}
	attach(t, socket)
}

// raw is a client without the library.
type raw struct {
	packet.Conn
	*ring.Client
	wakeRelay, wakeClient int
}

func (r raw) Close() error { return errors.Join(r.Client.Close(), r.Conn.Close()) }

func attachRaw(t *testing.T, socket string) raw {
	t.Helper()
	conn, err := packet.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	_, fds, err := conn.Exchange(&wire.Hello{Magic: wire.Magic, Oldest: 1, Newest: wire.NewestVersion}, 20*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	shared, err := ring.OpenClient(fds[0], fds[1])
	if err != nil {
		t.Fatal(err)
	}
	r := raw{conn, shared, fds[2], fds[3]}
	t.Cleanup(func() {
		packet.CloseAll(fds)
		r.Close()
	})
	return r
}

func TestHostileClientCannotStopTheLoop(t *testing.T) {
	socket := newHost(t).relay("a", launch.RouteAuto, far(0, 1, "nic0"))
	good, bad := attach(t, socket), attachRaw(t, socket)
	// The shared eventfd blocks from now on, and is full.
	for _, fd := range []int{bad.wakeRelay, bad.wakeClient} {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, 0); err != nil {
			t.Fatal(err)
		}
		full := [8]byte{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
		_, _ = unix.Write(fd, full[:]) // refused where it cannot be written
	}
	bad.SetSleeps(true)
	for range 10 {
		if _, err := bad.Post(wire.Descriptor{Operation: 99}); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		if _, err := good.Statistics(within(t)); err != nil {
			t.Fatal(err)
		}
	}
}

// aside is a raw client of a container, and a listener of a second container.
func aside(t *testing.T) (raw, *client.Listener) {
	t.Helper()
	h := newHost(t)
	b := attach(t, h.relay("b", launch.RouteDirect, far(3, 2, "nic1")))
	listener, err := b.Listen(within(t), uuid(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	return attachRaw(t, h.relay("a", launch.RouteDirect, far(0, 1, "nic0"))), listener
}

func TestGoodbyeOnDuplicatedSocketEndsSession(t *testing.T) {
	c, listener := aside(t)
	child, err := c.File() // a fork's copy
	if err != nil {
		t.Fatal(err)
	}
	defer child.Close()
	if _, _, err := c.Exchange(&wire.Connect{GPU: uuid(t, 0), Handle: listener.Handle()}, 30*time.Second); err != nil {
		t.Fatal(err)
	}
	s, err := listener.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Send(&wire.Goodbye{}, 0); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.Down():
		demandOf(t, s.Err(), wire.StatusPeerClosed, "container a")
	case <-testutil.After(20 * time.Second):
		t.Error("the session goes on")
	}
}

func TestEndedSessionTimelinesStayAtTheirEnd(t *testing.T) {
	c, listener := aside(t)
	m := allocate(t, 0, 2<<20)
	ask := func(m wire.Message, fds ...int) wire.Message {
		answer, received, err := c.Exchange(m, 30*time.Second, fds...)
		packet.CloseAll(received)
		if err != nil {
			t.Fatal(err)
		}
		return answer
	}
	memory := ask(&wire.Export{Bytes: m.bytes, Length: m.bytes, GPU: uuid(t, 0), Access: wire.AccessSend},
		m.fd).(*wire.Exported)
	connection := ask(&wire.Connect{GPU: uuid(t, 0), Handle: listener.Handle()}).(*wire.Connected)
	if wake, err := c.Post(wire.Descriptor{
		Operation: wire.OpSend, Connection: connection.Connection, Memory: memory.Memory, Length: 8,
		WaitTimeline: wire.NoTimeline, SignalTimeline: 3, SignalValue: 1,
	}); err != nil {
		t.Fatal(err)
	} else if wake {
		one := [8]byte{1}
		if _, err := unix.Write(c.wakeRelay, one[:]); err != nil {
			t.Fatal(err)
		}
	}
	ask(&wire.Statistics{})                 // the relay has the send
	for i := range uint32(wire.Timelines) { // as the library does, before it says goodbye
		c.Advance(i, wire.TimelineEnd)
	}
	if err := c.Send(&wire.Goodbye{}, 0); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := c.Receive(); err == nil {
		t.Error("the session goes on")
	}
	if now := c.Timeline(3); now != wire.TimelineEnd {
		t.Errorf("the timeline went back to %#x", now)
	}
}

func TestAcceptAfterCanceledAcceptGetsTheSender(t *testing.T) {
	h := newHost(t)
	a := attach(t, h.relay("a", launch.RouteDirect, far(0, 1, "nic0")))
	b := attach(t, h.relay("b", launch.RouteDirect, far(3, 2, "nic1")))
	listener, err := b.Listen(within(t), uuid(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	brief, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if _, err := listener.Accept(brief); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("nobody came, and Accept says %v", err)
	}
	sending, err := a.Connect(within(t), uuid(t, 0), listener.Handle())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := listener.Accept(within(t)); err != nil {
		t.Fatalf("the sender was lost: %v", err)
	}
	if err := sending.Err(); err != nil {
		t.Error(err)
	}
}

func TestStatisticsDuringLaneOpenReturn(t *testing.T) {
	s := attach(t, newHost(t).relay("a", launch.RouteAuto, far(0, 1, "nic0")))
	m := allocate(t, 0, 2<<20)
	var done atomic.Bool
	go func() {
		defer done.Store(true)
		if _, err := s.Export(within(t), client.Allocation{FD: m.fd, Bytes: m.bytes, GPU: uuid(t, 0)}); err != nil {
			t.Error(err)
		}
	}()
	for !done.Load() {
		if _, err := s.Statistics(within(t)); err != nil {
			t.Fatal(err)
		}
	}
}
