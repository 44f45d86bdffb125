package relay_test

import (
	"encoding/binary"
	"errors"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/kernels"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/wire"
)

// worker is a context of a GPU with a stream, and a session's timelines there.
type worker struct {
	t         *testing.T
	device    cuda.Device
	context   cuda.Context
	stream    cuda.Stream
	timelines *client.StreamTimelines
}

// newWorker locks the test to a thread.
func newWorker(t *testing.T, i int, s *client.Session) *worker {
	t.Helper()
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	device, err := driver.DeviceByPCIBusID(devices[i].BusID)
	check(t, err)
	w := &worker{t: t, device: device}
	w.context, err = driver.CtxCreate(device, cuda.CtxOptions{Lean: true})
	check(t, err)
	t.Cleanup(func() { check(t, driver.CtxDestroy(w.context)) })
	w.stream, err = driver.StreamCreate()
	check(t, err)
	w.timelines, err = s.RegisterTimelines(driver)
	check(t, err)
	t.Cleanup(func() {
		w.use()
		check(t, w.timelines.Unregister())
	})
	return w
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *worker) use() {
	w.t.Helper()
	check(w.t, driver.CtxSetCurrent(w.context))
}

// graph captures the calls of work.
func (w *worker) graph(work ...func() error) cuda.GraphExec {
	w.t.Helper()
	w.use()
	// The relays' threads in this process make calls that a capture of the whole process would
	// refuse.
	check(w.t, driver.StreamBeginCapture(w.stream, cuda.CaptureThreadLocal))
	for _, f := range work {
		check(w.t, f())
	}
	g, err := driver.StreamEndCapture(w.stream)
	check(w.t, err)
	e, err := driver.GraphInstantiate(g)
	check(w.t, err)
	check(w.t, driver.GraphDestroy(g))
	w.t.Cleanup(func() {
		w.use()
		check(w.t, driver.GraphExecDestroy(e))
	})
	return e
}

func (w *worker) launch(e cuda.GraphExec, times int) {
	w.t.Helper()
	w.use()
	for range times {
		check(w.t, driver.GraphLaunch(e, w.stream))
	}
}

// ends waits for the stream's work, but not for ever.
func (w *worker) ends(what string) {
	w.t.Helper()
	w.use()
	for end := testutil.Begin(); ; time.Sleep(100 * time.Microsecond) {
		done, err := driver.StreamQuery(w.stream)
		check(w.t, err)
		if done {
			return
		}
		if end.Over() {
			w.t.Fatalf("%s: the stream waits for ever", what)
		}
	}
}

func (w *worker) take(h *client.HandOver) func() error {
	return func() error { return w.timelines.Take(w.stream, h) }
}

func (w *worker) give(h *client.HandOver) func() error {
	return func() error { return w.timelines.Give(w.stream, h) }
}

// theOther is a GPU of a second lane, with a server: on a machine of two GPUs both serve mutually.
func theOther() (gpu, server int) {
	if len(devices) < 4 {
		return 1, 0
	}
	return 3, 2
}

// apart is connected for machines of two GPUs as well.
func apart(t *testing.T, route string) (p *pair, stop func()) {
	t.Helper()
	other, server := theOther()
	h := newHost(t)
	h.nic("nic0")
	h.nic("nic1")
	socket, r := h.start("a", route, -1, far(0, 1, "nic0"))
	p = &pair{a: attach(t, socket), b: attach(t, h.relay("b", route, far(other, server, "nic1")))}
	p.source, p.target = exported(t, p.a, 0, 2<<20), exported(t, p.b, other, 2<<20)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, other)
	return p, func() { r.Stop("the test's kill") }
}

func handOver(t *testing.T, s *client.Session, number, first uint32) *client.HandOver {
	t.Helper()
	h, err := s.HandOver(number, first)
	check(t, err)
	return h
}

// A graph increments every word of a message and gives the turn to the relay; a second graph, at
// the remote side, takes the received message. The CPUs only launch graphs and post operations, far
// ahead of the transfers.
func TestGraphReplaysHandOverEachMessage(t *testing.T) {
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			const n, replays, ahead = 8 << 10, 250, 25
			p, _ := apart(t, route)
			a, b := newWorker(t, 0, p.a), newWorker(t, p.target.gpu, p.b)
			first := random(t, n)
			p.source.write(0, first)
			full, arrived := handOver(t, p.a, 3, wire.TurnStream), handOver(t, p.b, 255, wire.TurnRelay)

			a.use()
			k, err := kernels.Load(driver, a.device)
			check(t, err)
			page, err := k.NewPage()
			check(t, err)
			fill := a.graph(a.take(full),
				func() error { return k.Stream(a.stream, p.source.ptr, n, 0, page) }, // one pass
				a.give(full))
			b.use()
			host, err := driver.MemHostAlloc(n)
			check(t, err)
			got := unsafe.Slice((*byte)(host), n)
			empty := b.graph(b.take(arrived),
				func() error { return driver.MemcpyDtoHAsync(host, p.target.ptr, n, b.stream) },
				b.give(arrived))

			var operations []*client.Operation
			for replay := range uint64(replays) {
				if replay%ahead == 0 {
					a.launch(fill, ahead)
					for range ahead {
						send, err := p.sending.Send(p.source.Memory, 0, n, client.InTurn(full))
						check(t, err)
						receive, err := p.receiving.Receive(p.target.Memory, 0, n, client.InTurn(arrived))
						check(t, err)
						operations = append(operations, send, receive)
					}
				}
				b.launch(empty, 1)
				b.ends("a replay of what empties")
				for i := 0; i < n; i += 8 {
					want := binary.LittleEndian.Uint64(first[i:]) + replay + 1
					if v := binary.LittleEndian.Uint64(got[i:]); v != want {
						t.Fatalf("replay %d: the word at %d is %#x, want %#x", replay, i, v, want)
					}
				}
			}
			a.ends("the last replay of what fills")
			for i, op := range operations {
				if moved, err := wait(t, op, nil); err != nil || moved != n {
					t.Fatalf("operation %d moved %d bytes: %v", i, moved, err)
				}
			}
			check(t, errors.Join(full.Err(), arrived.Err()))
			check(t, driver.MemHostFree(host))
			a.use()
			check(t, page.Free())
			check(t, k.Unload())
		})
	}
}

func TestCapturedStreamWithGrowingValuesIsRefused(t *testing.T) {
	p, _ := apart(t, launch.RouteDirect)
	w := newWorker(t, 0, p.a)
	timeline, err := p.a.Timeline(0)
	check(t, err)
	h := handOver(t, p.a, 1, wire.TurnStream)
	refused := func(err error) {
		t.Helper()
		if !errors.Is(err, &wire.Error{Status: wire.StatusNotPermitted}) {
			t.Errorf("%v does not refuse the capture and name the hand-over", err)
		}
	}
	e := w.graph(func() error {
		refused(w.timelines.Wait(w.stream, timeline, 1))
		refused(w.timelines.Write(w.stream, timeline, 1))
		return nil
	}, w.take(h), w.give(h)) // the capture goes on
	w.launch(e, 1)
	w.ends("the graph")
	if v, err := p.a.Timeline(1); err != nil || v.Value() != wire.TurnRelay {
		t.Errorf("the turn is %d's, %v", v.Value(), err)
	}
	check(t, w.timelines.Write(w.stream, timeline, 1))
	check(t, w.timelines.Wait(w.stream, timeline, 1))
	w.ends("a value that grows")
}

// Whatever dies: waiting replays are released, and so are later replays, whose graph resets the
// turn.
func TestGraphReplaysAfterDeathAreReleased(t *testing.T) {
	for _, c := range []struct {
		name   string
		status wire.Status
		kill   func(t *testing.T, p *pair, stop func())
	}{
		{"the relay", wire.StatusPeerRelayDied, func(t *testing.T, _ *pair, stop func()) { stop() }},
		{"the other client", wire.StatusPeerClosed, func(t *testing.T, p *pair, _ func()) { check(t, p.b.Close()) }},
		{"the connection, by this side", wire.StatusPeerClosed, func(t *testing.T, p *pair, _ func()) {
			check(t, p.sending.Close(within(t)))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, stop := apart(t, launch.RouteDirect)
			w := newWorker(t, 0, p.a)
			full := handOver(t, p.a, 9, wire.TurnStream)
			e := w.graph(w.take(full), w.give(full))
			_, err := p.receiving.Receive(p.target.Memory, 0, 64)
			check(t, err)
			for range 2 { // the second send meets no receive
				_, err := p.sending.Send(p.source.Memory, 0, 64, client.InTurn(full))
				check(t, err)
			}
			w.launch(e, 5)
			time.Sleep(20 * time.Millisecond)
			if done, err := driver.StreamQuery(w.stream); err != nil || done {
				t.Fatalf("replays without an operation: %v, %v", done, err)
			}
			c.kill(t, p, stop)
			w.ends("replays that waited")
			w.launch(e, 5)
			w.ends("replays of later")
			for range 2 { // the error stays
				demandOneOf(t, full.Err(), c.status, wire.StatusPeerClientDied)
				demandOneOf(t, w.timelines.Take(w.stream, full), c.status, wire.StatusPeerClientDied)
				_, err := p.sending.Send(p.source.Memory, 0, 64, client.InTurn(full))
				if err == nil {
					t.Error("an operation was posted for a hand-over that has ended")
				}
			}
			if p.a.Err() != nil {
				return
			}
			// The session goes on, and the timeline serves a new connection.
			full = handOver(t, p.a, 9, wire.TurnRelay)
			if err := full.Err(); err != nil {
				t.Error(err)
			}
			if v, err := p.a.Timeline(9); err != nil || v.Value() != wire.TurnRelay {
				t.Errorf("the timeline begins anew at %d, %v", v.Value(), err)
			}
		})
	}
}

func demandOneOf(t *testing.T, err error, statuses ...wire.Status) {
	t.Helper()
	for _, s := range statuses {
		if wire.StatusOf(err) == s {
			return
		}
	}
	t.Errorf("the error is %v (status %d), not one of %v", err, wire.StatusOf(err), statuses)
}

func TestHandOverWithoutFirstTurnIsRefused(t *testing.T) {
	p, _ := apart(t, launch.RouteDirect)
	if _, err := p.a.HandOver(wire.Timelines, wire.TurnStream); err == nil {
		t.Error("a timeline beyond the last was taken")
	}
	if _, err := p.a.HandOver(0, 3); err == nil {
		t.Error("a turn of nobody's was taken")
	}
	timeline, err := p.a.Timeline(1)
	check(t, err)
	h := handOver(t, p.a, 0, wire.TurnStream)
	if _, err := p.sending.Send(p.source.Memory, 0, 8, client.InTurn(h), client.Signal(timeline, 1)); err == nil {
		t.Error("an operation in turn was posted with Signal")
	}
	// An operation would take a turn of the next hand-over as well.
	op, err := p.sending.Send(p.source.Memory, 0, 8, client.InTurn(h))
	check(t, err)
	if _, err := p.a.HandOver(0, wire.TurnRelay); !errors.Is(err, &wire.Error{Status: wire.StatusBusy}) {
		t.Errorf("begun anew under an operation: %v", err)
	}
	check(t, op.Cancel())
	if _, err := op.Wait(within(t)); wire.StatusOf(err) != wire.StatusCanceled {
		t.Errorf("%v, not canceled", err)
	}
	handOver(t, p.a, 0, wire.TurnRelay)
}

// A client's values in descriptors and timelines affect no foreign operation, and the relay refuses
// impossible values.
func TestHostileClientTurnsAffectOwnOperationsOnly(t *testing.T) {
	h := newHost(t)
	other, server := theOther()
	b := attach(t, h.relay("b", launch.RouteDirect, far(other, server, "nic1")))
	listener, err := b.Listen(within(t), uuid(t, other))
	check(t, err)
	c := attachRaw(t, h.relay("a", launch.RouteDirect, far(0, 1, "nic0")))
	m, target := allocate(t, 0, 2<<20), exported(t, b, other, 2<<20)
	ask := func(m wire.Message, fds ...int) wire.Message {
		t.Helper()
		answer, received, err := c.Exchange(m, 30*time.Second, fds...)
		packet.CloseAll(received)
		check(t, err)
		return answer
	}
	memory := ask(&wire.Export{Bytes: m.bytes, Length: m.bytes, GPU: uuid(t, 0), Access: wire.AccessSend},
		m.fd).(*wire.Exported)
	connection := ask(&wire.Connect{GPU: uuid(t, 0), Handle: listener.Handle()}).(*wire.Connected)
	receiving, err := listener.Accept(within(t))
	check(t, err)
	post := func(d wire.Descriptor) {
		t.Helper()
		d.Operation, d.Connection, d.Memory, d.Length = wire.OpSend, connection.Connection, memory.Memory, 8
		wake, err := c.Post(d)
		check(t, err)
		if wake {
			one := [8]byte{1}
			_, err := unix.Write(c.wakeRelay, one[:])
			check(t, err)
		}
		ask(&wire.Statistics{}) // the relay has it
	}
	next := func(cookie uint64, status wire.Status) {
		t.Helper()
		for end := testutil.Begin(); !end.Over(); time.Sleep(time.Millisecond) {
			if completion, ok := c.Next(); ok {
				if completion.Cookie != cookie || wire.Status(completion.Status) != status {
					t.Fatalf("%+v; want cookie %d and status %d", completion, cookie, status)
				}
				return
			}
		}
		t.Fatalf("operation %d does not end", cookie)
	}
	for cookie, d := range map[uint64]wire.Descriptor{
		1: {Flags: wire.InTurn, WaitTimeline: wire.NoTimeline, SignalTimeline: wire.NoTimeline},
		2: {Flags: wire.InTurn, WaitTimeline: wire.Timelines, SignalTimeline: wire.NoTimeline},
		3: {Flags: wire.InTurn, WaitTimeline: 5, SignalTimeline: 5},
		4: {Flags: wire.InTurn | 2, WaitTimeline: 5, SignalTimeline: wire.NoTimeline},
		5: {Flags: 1 << 31, WaitTimeline: wire.NoTimeline, SignalTimeline: wire.NoTimeline},
	} {
		d.Cookie = cookie
		post(d)
		next(cookie, wire.StatusMalformed)
	}

	// Two operations of one turn: the second operation waits for the next turn, regardless of the
	// client's writes.
	inTurn := func(cookie uint64) {
		post(wire.Descriptor{Cookie: cookie, Flags: wire.InTurn, WaitTimeline: 5, SignalTimeline: wire.NoTimeline})
	}
	c.Advance(5, wire.TurnRelay)
	inTurn(10)
	inTurn(11)
	for _, cookie := range []uint64{10, 11} {
		for v := range uint64(1000) { // while it is under way, for the most part
			c.Advance(5, v%3)
		}
		c.Advance(5, wire.TurnRelay)
		op, err := receiving.Receive(target.Memory, 0, 8)
		_, err = wait(t, op, err)
		check(t, err)
		next(cookie, wire.StatusOK)
		if cookie == 10 {
			if v := c.Timeline(5); v != wire.TurnStream {
				t.Fatalf("after the first operation the turn is %d's", v)
			}
			if completion, ok := c.Next(); ok {
				t.Fatalf("%+v in the turn of another", completion)
			}
		}
	}
}
