package conformance

import (
	"bytes"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/verbs"
)

// patience limits the wait for any event, also in a guest under load.
const patience = 2 * time.Minute

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// closes closes an object at the end of the test, after later objects, and checks the error.
func closes(t testing.TB, what interface{ Close() error }) {
	t.Cleanup(func() {
		if err := what.Close(); err != nil {
			t.Error(err)
		}
	})
}

func readable(t testing.TB, what string, fd int) {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, int(patience.Milliseconds()))
		if err == unix.EINTR {
			continue
		}
		check(t, err)
		if n == 0 {
			t.Fatalf("%s: nothing came within %v", what, patience)
		}
		return
	}
}

func open(t testing.TB, f Fixture) *verbs.Context {
	t.Helper()
	c, err := f.Library.OpenDevice(f.Device)
	check(t, err)
	closes(t, c)
	return c
}

const (
	page = 4096
	// half of an end's memory is for sends, half for receives.
	half = 64 * page
)

// end is a side of a connection, with registered memory.
type end struct {
	t      testing.TB
	c      *verbs.Context
	domain *verbs.Domain
	queue  *verbs.Queue
	pair   *verbs.Pair
	region *verbs.Region
	bytes  []byte
}

const remote = verbs.LocalWrite | verbs.RemoteWrite | verbs.RemoteRead

// equip makes the objects of an end except the pair.
func equip(t testing.TB, c *verbs.Context) *end {
	t.Helper()
	e := &end{t: t, c: c}
	var err error
	e.domain, err = c.NewDomain()
	check(t, err)
	closes(t, e.domain)
	e.queue, err = c.NewQueue(64)
	check(t, err)
	closes(t, e.queue)
	e.bytes = anonymous(t, 2*half)
	e.region, err = e.domain.Register(address(e.bytes), uint64(len(e.bytes)), uint64(address(e.bytes)), remote)
	check(t, err)
	closes(t, e.region)
	return e
}

func (e *end) config() verbs.PairConfig {
	return verbs.PairConfig{Send: e.queue, Recv: e.queue, SendDepth: 16, RecvDepth: 16, Inline: 64}
}

// at is the address of a byte.
func (e *end) at(offset int) uint64 { return uint64(address(e.bytes)) + uint64(offset) }

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

func anonymous(t testing.TB, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	check(t, err)
	unmaps(t, b)
	return b
}

func unmaps(t testing.TB, b []byte) {
	t.Cleanup(func() {
		if err := unix.Munmap(b); err != nil {
			t.Error(err)
		}
	})
}

// quick are a pair's limits where the other side is not going to answer.
type limits struct{ timeout, retries uint8 }

var (
	usual = limits{18, 7} // eight times a second
	quick = limits{10, 1} // twice 4 ms
)

// connected are two connected ends on one device.
func connected(t testing.TB, f Fixture, of limits) (a, b *end) {
	t.Helper()
	if f.managed() {
		return managed(t, f)
	}
	c := open(t, f)
	a, b = equip(t, c), equip(t, c)
	for _, e := range []*end{a, b} {
		var err error
		e.pair, err = e.domain.NewPair(e.config())
		check(t, err)
		closes(t, e.pair)
		check(t, e.pair.Init(1, 0, remote))
	}
	port, err := c.Port(1)
	check(t, err)
	gids, err := c.GIDs(1)
	check(t, err)
	gid, err := verbs.ChooseGID(gids, verbs.Choice{Index: verbs.AnyIndex})
	check(t, err)
	for _, way := range [][2]*end{{a, b}, {b, a}} {
		check(t, way[0].pair.ReadyToReceive(verbs.Route{
			Pair: way[1].pair.Number(), PSN: 7, MTU: port.MTU, LID: port.LID, Port: 1,
			Global: port.LinkLayer == verbs.Ethernet, GID: gid.GID, SourceIndex: uint8(gid.Index), HopLimit: 64,
			Reads: 1, ReceiverTimer: 12,
		}))
	}
	for _, e := range []*end{a, b} {
		check(
			t,
			e.pair.ReadyToSend(verbs.Sending{PSN: 7, Timeout: of.timeout, Retries: of.retries, ReceiverRetries: 7, Reads: 1}),
		)
	}
	return a, b
}

// manager are the connection manager's events, closed when the test ends.
func manager(t testing.TB, f Fixture) *verbs.Events {
	t.Helper()
	m, err := f.Library.Manager()
	check(t, err)
	events, err := m.NewEvents()
	check(t, err)
	closes(t, events)
	return events
}

func next(t testing.TB, from *verbs.Events, want verbs.ConnectionKind) verbs.ConnectionEvent {
	t.Helper()
	for {
		event, ok, err := from.Next()
		check(t, err)
		if !ok {
			readable(t, want.String(), from.FD())
			continue
		}
		if event.Kind != want {
			t.Fatalf("%s (%v), want %s", event.Kind, event.Err(), want)
		}
		return event
	}
}

// asked is a connection that has been asked for: the IDs of both sides, with the private data of
// the connecting side. The accepting side has not answered.
func asked(t testing.TB, f Fixture, events *verbs.Events, private []byte) (a, b *end, asks, answers *verbs.ID) {
	t.Helper()
	listener, err := events.NewID()
	check(t, err)
	closes(t, listener)
	check(t, listener.Listen(netip.AddrPortFrom(f.Address, 0), 4))
	asks, err = events.NewID()
	check(t, err)
	closes(t, asks)
	check(t, asks.ResolveAddress(netip.AddrPort{}, netip.AddrPortFrom(f.Address, listener.Port()), patience))
	next(t, events, verbs.AddressResolved)
	check(t, asks.ResolveRoute(patience))
	next(t, events, verbs.RouteResolved)
	a = paired(t, asks)
	check(
		t,
		asks.Connect(verbs.Connection{Private: private, Retries: 7, ReceiverRetries: 7, AnswerReads: 1, InitiateReads: 1}),
	)
	request := next(t, events, verbs.ConnectRequest)
	if request.Listener != listener || !bytes.HasPrefix(request.Private, private) {
		t.Fatalf("a request to %p with %q; want %p, %q", request.Listener, request.Private, listener, private)
	}
	answers = request.ID
	closes(t, answers)
	b = paired(t, answers)
	return a, b, asks, answers
}

// paired is an end of a connection.
func paired(t testing.TB, id *verbs.ID) *end {
	t.Helper()
	c, err := id.Context()
	check(t, err)
	e := equip(t, c)
	e.pair, err = id.NewPair(e.domain, e.config())
	check(t, err)
	closes(t, e.pair)
	return e
}

func managed(t testing.TB, f Fixture) (a, b *end) {
	t.Helper()
	events := manager(t, f)
	a, b, asks, answers := asked(t, f, events, []byte("hello"))
	check(
		t,
		answers.Accept(verbs.Connection{Private: []byte("and you"), ReceiverRetries: 7, AnswerReads: 1, InitiateReads: 1}),
	)
	for range 2 {
		e := next(t, events, verbs.Established)
		if e.ID == asks && !bytes.HasPrefix(e.Private, []byte("and you")) {
			t.Errorf("the answer says %q", e.Private)
		}
	}
	return a, b
}

func (e *end) post(sends ...verbs.Send) {
	e.t.Helper()
	n, err := e.pair.PostSend(sends)
	check(e.t, err)
	if n != len(sends) {
		e.t.Fatalf("%d of %d requests posted", n, len(sends))
	}
}

func (e *end) receive(receives ...verbs.Recv) {
	e.t.Helper()
	_, err := e.pair.PostRecv(receives)
	check(e.t, err)
}

// completes waits for a completion as an event loop does.
func (e *end) completes() verbs.Completion {
	e.t.Helper()
	var one [1]verbs.Completion
	for {
		n, err := e.queue.Poll(one[:])
		check(e.t, err)
		if n == 1 {
			return one[0]
		}
		check(e.t, e.queue.Arm())
		if n, err = e.queue.Poll(one[:]); err != nil || n == 1 {
			check(e.t, err)
			return one[0]
		}
		readable(e.t, "a completion", e.queue.FD())
		check(e.t, e.queue.Acknowledge())
	}
}

// want compares a completion, pair and vendor apart.
func (e *end) want(want verbs.Completion) {
	e.t.Helper()
	got := e.completes()
	if got.Pair != e.pair.Number() {
		e.t.Errorf("a completion of pair %d, want %d", got.Pair, e.pair.Number())
	}
	want.Pair, want.Vendor = got.Pair, got.Vendor
	if got != want {
		e.t.Fatalf("completion %+v (%v), want %+v", got, got.Err(), want)
	}
}
