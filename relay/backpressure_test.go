package relay_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/ring"
	"github.com/peerlane/peerlane/relay/wire"
)

// A slow or stopped client costs the relay a bounded amount, and further clients nothing; and the
// report shows the current waits with their causes. The table is in docs/relay.md.

// told waits until a report says something.
func told(t *testing.T, r *relay.Relay, what string, says func(*launch.Report) bool) *launch.Report {
	t.Helper()
	for end := testutil.Begin(); ; time.Sleep(time.Millisecond) {
		report := r.Report()
		if says(report) {
			return report
		}
		if end.Over() {
			t.Fatalf("no report says that %s: lanes %+v, connections %+v", what, report.Lanes, report.Connections)
		}
	}
}

// waiting returns the number of operations that wait for a cause, and whether a wait is long enough
// for the report.
func waiting(f launch.Figures, cause string) (n int) {
	for _, s := range f.Stalls {
		if s.Cause == cause && s.Longest > 0 {
			n = s.Waiting
		}
	}
	return n
}

// with finds the connection with a peer.
func with(r *launch.Report, peer string, sends bool) (f launch.ConnectionFigures) {
	for _, c := range r.Connections {
		if (c.Peer == peer || strings.HasPrefix(c.Peer, peer+" on host ")) && c.Sends == sends {
			f = c
		}
	}
	return f
}

const slowBytes = 1 << 20 // a message of 16 slots

// slowWorld is container b, a healthy container c beside it, and container a, whose relay
// is a process that can be stopped.
type slowWorld struct {
	*testing.T
	b                    *relay.Relay
	process              *subject
	clientA, clientB     *client.Session
	memoryA, memoryB     *client.Memory
	clientC, another     *client.Session // of c, and of b
	memoryC, memoryOther *client.Memory
}

func newSlowWorld(t *testing.T) *slowWorld {
	t.Helper()
	h := newHost(t)
	h.change = func(c *launch.Config) { c.Slots, c.SlotBytes = 4, 64<<10 }
	h.nic("nic0")
	h.nic("nic1")
	w := &slowWorld{T: t}
	id := hex.EncodeToString(random(t, 16))
	s := &stage{config: launch.Config{
		Generation: id, Container: "a", Lanes: []launch.Lane{far(0, 1, "nic0")}, Route: launch.RouteStaged,
		Transport: launch.TransportAuto,
		Slots:     4, SlotBytes: 64 << 10, Peers: h.dir,
	}}
	socketA := filepath.Join(h.dir, "a")
	s.files = relayListeners(t, socketA, filepath.Join(h.dir, id+".sock"))
	s.environment = h.withNICs(&s.config)
	var err error
	if w.process, err = s.begin(filepath.Join(t.TempDir(), "log")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.signal(unix.SIGCONT)
		if said, err := w.process.stop(); err != nil || t.Failed() {
			t.Errorf("%v: %s", err, said)
		}
		closeFiles(s.files)
	})
	var socketB string
	socketB, w.b = h.start("b", launch.RouteStaged, -1, far(3, 2, "nic1"))
	socketC := h.relay("c", launch.RouteStaged, far(0, 1, "nic0"))
	w.clientA, w.clientB, w.clientC, w.another = attach(t, socketA), attach(t, socketB), attach(t, socketC),
		attach(t, socketB)
	w.memoryA, w.memoryB = hostMemory(t, w.clientA, 0, slowBytes), hostMemory(t, w.clientB, 3, slowBytes)
	w.memoryC, w.memoryOther = hostMemory(t, w.clientC, 0, slowBytes), hostMemory(t, w.another, 3, slowBytes)
	return w
}

func (w *slowWorld) signal(s unix.Signal) {
	w.Helper()
	if err := unix.Kill(w.process.cmd.Process.Pid, s); err != nil {
		w.Error(err)
	}
}

// passes sends messages in sequence between two clients.
func (w *slowWorld) passes(messages int, from *client.Connection, source *client.Memory, to *client.Connection,
	target *client.Memory) {
	w.Helper()
	for range messages {
		received, err := to.Receive(target, 0, slowBytes)
		if err != nil {
			w.Fatal(err)
		}
		sent, err := from.Send(source, 0, slowBytes)
		for _, op := range []*client.Operation{sent, received} {
			if _, err := wait(w.T, op, err); err != nil {
				w.Fatal(err)
			}
		}
	}
}

// A stopped relay holds granted slots of a further container's lane, and does not fill them. The
// stopped relay does not hold every slot: further senders continue.
func TestStoppedPeerLeavesSlotsToOtherSenders(t *testing.T) {
	w := newSlowWorld(t)
	slowSends, slowReceives, _ := join(t, w.clientA, 0, w.clientB, 3)
	sends, receives, _ := join(t, w.clientC, 0, w.another, 3)
	want := random(t, slowBytes)
	copy(w.memoryA.Data, want)
	large, err := slowSends.Send(w.memoryA, 0, slowBytes, client.Tag(1))
	if err != nil {
		t.Fatal(err)
	}
	// Announced after arrival: so has the large one's word.
	small, err := slowSends.Send(w.memoryA, 0, 0, client.Tag(2))
	if err != nil {
		t.Fatal(err)
	}
	first, err := slowReceives.Receive(w.memoryB, 0, 0, client.Tag(2))
	for _, op := range []*client.Operation{first, small} {
		if _, err := wait(t, op, err); err != nil {
			t.Fatal(err)
		}
	}
	w.signal(unix.SIGSTOP)
	received, err := slowReceives.Receive(w.memoryB, 0, slowBytes, client.Tag(1))
	if err != nil {
		t.Fatal(err)
	}
	holds := func(r *launch.Report) bool {
		c := with(r, "container a", false)
		return c.Slots == 3 && waiting(c.Figures, launch.StallNoSlot) == 1 && waiting(r.Lanes[0].Received,
			launch.StallNoSlot) == 1
	}
	told(t, w.b, "the stopped relay holds 3 slots, and its message waits for the next", holds)
	w.passes(20, sends, w.memoryC, receives, w.memoryOther)
	if r := w.b.Report(); !holds(r) {
		t.Errorf("afterwards the stopped relay's connection is %+v", with(r, "container a", false))
	}
	w.signal(unix.SIGCONT)
	for _, op := range []*client.Operation{large, received} {
		if _, err := wait(t, op, nil); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(w.memoryB.Data[:slowBytes], want) {
		t.Error("the bytes are wrong")
	}
	told(t, w.b, "no slot is held", func(r *launch.Report) bool { return with(r, "container a", false).Slots == 0 })
}

// The ring of the peer's client bounds the messages that a stopped relay does not read; the full
// ring is reported; another client of the same container goes on.
func TestStoppedPeerBacklogIsBoundedByRing(t *testing.T) {
	w := newSlowWorld(t)
	slowSends, slowReceives, _ := join(t, w.clientB, 3, w.clientA, 0)
	sends, receives, _ := join(t, w.another, 3, w.clientC, 0)
	w.signal(unix.SIGSTOP)
	const length = 64 << 10 // shorter ones may need no grant
	var posted []*client.Operation
	for end := testutil.Begin(); ; {
		op, err := slowSends.Send(w.memoryB, 0, length)
		if errors.Is(err, ring.ErrFull) {
			// The capacity of the ring is in flight, and the same number waits in the ring; the
			// relay takes them later.
			if len(posted) == 2*wire.RingEntries {
				break
			}
			time.Sleep(time.Millisecond)
		} else if err != nil {
			t.Fatal(err)
		} else {
			posted = append(posted, op)
		}
		if len(posted) > 2*wire.RingEntries || end.Over() {
			t.Fatalf("%d operations were posted", len(posted))
		}
	}
	told(t, w.b, "1024 sends wait for a grant, and their ring is full", func(r *launch.Report) bool {
		c := with(r, "container a", true)
		return c.InFlight == wire.RingEntries && waiting(c.Figures, launch.StallNoGrant) == wire.RingEntries &&
			waiting(c.Figures, launch.StallRingFull) == 1 &&
			waiting(r.Lanes[0].Sent, launch.StallNoGrant) == wire.RingEntries
	})
	w.passes(20, sends, w.memoryOther, receives, w.memoryC)
	w.signal(unix.SIGCONT)
	// It is read again.
	received, err := slowReceives.Receive(w.memoryA, 0, length)
	if _, err := wait(t, received, err); err != nil {
		t.Fatal(err)
	}
	if err := slowSends.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	for _, op := range posted {
		_, _ = op.Wait(within(t))
	}
}

// Repeated cancels of a message send a single request to the remote relay: otherwise the unread
// requests of a stopped relay would end the connection.
func TestCancelRepeatedSendsOneRequest(t *testing.T) {
	w := newSlowWorld(t)
	sends, receives, _ := join(t, w.clientB, 3, w.clientA, 0)
	w.signal(unix.SIGSTOP)
	op, err := sends.Send(w.memoryB, 0, 8)
	if err != nil {
		t.Fatal(err)
	}
	for n, end := 0, testutil.Begin(); n < 20_000; {
		if err := op.Cancel(); err == nil {
			n++
		} else if !errors.Is(err, ring.ErrFull) || end.Over() {
			t.Fatalf("after %d: %v", n, err)
		}
	}
	w.signal(unix.SIGCONT)
	_, err = wait(t, op, nil)
	demand(t, err, wire.StatusCanceled)
	if err := errors.Join(sends.Err(), receives.Err()); err != nil {
		t.Error(err)
	}
}

// From a client that reads no completions the relay takes only as many operations as there is room
// for completions; further clients continue.
func TestClientWithFullCompletionRingBlocksOnlyItself(t *testing.T) {
	h := newHost(t)
	socket, r := h.start("a", launch.RouteDirect, -1, far(0, 1, "nic0"))
	b := attach(t, h.relay("b", launch.RouteDirect, far(3, 2, "nic1")))
	listener, err := b.Listen(within(t), uuid(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	bad, good := attachRaw(t, socket), attach(t, socket)
	answer, _, err := bad.Exchange(&wire.Connect{GPU: uuid(t, 0), Handle: listener.Handle()}, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	connection := answer.(*wire.Connected).Connection
	// Each ends at once: its memory is unknown.
	posted := 0
	post := func(most int) {
		t.Helper()
		for end := testutil.Begin(); posted < most; {
			wake, err := bad.Post(wire.Descriptor{Operation: wire.OpSend, Connection: connection, Memory: 99,
				Cookie: uint64(posted), WaitTimeline: wire.NoTimeline, SignalTimeline: wire.NoTimeline})
			if err == nil {
				posted++
			}
			if wake {
				one := [8]byte{1}
				_, _ = unix.Write(bad.wakeRelay, one[:])
			}
			if end.Over() {
				t.Fatalf("after %d operations: %v", posted, err)
			}
		}
	}
	post(2 * wire.RingEntries)
	full := func(r *launch.Report) bool {
		return waiting(with(r, "container b", true).Figures, launch.StallRingFull) == 1
	}
	told(t, r, "the ring is full", full)
	if _, err := bad.Post(wire.Descriptor{}); !errors.Is(err, ring.ErrFull) {
		t.Errorf("one operation more than the ring has room for: %v", err)
	}
	// The others' share.
	p := &pair{a: good, b: b, source: exported(t, good, 0, 4<<20), target: exported(t, b, 3, 4<<20)}
	p.sending, p.receiving, p.handle = join(t, good, 0, b, 3)
	for range 20 {
		p.move(t, 3<<20)
	}
	if !full(r.Report()) {
		t.Error("the ring is not full any more")
	}
	// The client continues after reading, and the wait is counted.
	for read, end := 0, testutil.Begin(); read < posted; {
		if _, ok := bad.Next(); ok {
			read++
			if bad.RelaySleeps() {
				one := [8]byte{1}
				_, _ = unix.Write(bad.wakeRelay, one[:])
			}
		} else if end.Over() {
			t.Fatalf("%d of %d operations have ended", read, posted)
		}
	}
	told(t, r, "it has stood still for once", func(r *launch.Report) bool {
		f := with(r, "container b", true).Figures
		for _, s := range f.Stalls {
			if s.Cause == launch.StallRingFull {
				return s.Count > 0 && s.Waiting == 0
			}
		}
		return false
	})
}
