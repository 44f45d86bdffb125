package relay_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// ways are the routes of one-sided operations.
var ways = []string{launch.RouteStaged, launch.RouteDirect, launch.TransportTCP, launch.TransportVerbs}

// byWay is a connected pair.
func byWay(t *testing.T, way string) *pair {
	t.Helper()
	if way == launch.TransportTCP {
		return &newRemotePair(t).pair
	}
	if way == launch.TransportVerbs {
		return &hostsByRDMA(t, 1, 2).pair
	}
	return connected(t, way)
}

// offer exposes to the pair's sender [offset, offset+n) of the receiver's memory.
func (p *pair) offer(t *testing.T, m *client.Memory, offset, n uint64, access uint32) *client.Region {
	t.Helper()
	o, err := p.receiving.Expose(within(t), m, offset, n, access)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

const remoteBoth = wire.RemoteRead | wire.RemoteWrite

// sided checks one-sided operations of a size at unaligned places: exactly the bytes of the range
// move.
func (p *pair) sided(t *testing.T, key wire.RemoteKey, base, n uint64) {
	t.Helper()
	const guard = 64
	from, at, back := uint64(3), uint64(guard+5), uint64(7+guard)
	want, around := random(t, n), random(t, n+2*guard)
	p.source.write(from, want)
	p.target.write(base+at-guard, around)
	op, err := p.sending.Write(p.source.Memory, from, n, key, at)
	if moved, err := wait(t, op, err); err != nil || moved != n {
		t.Fatalf("a write of %d: %d, %v", n, moved, err)
	}
	got := p.target.read(base+at-guard, n+2*guard)
	if !bytes.Equal(got[guard:guard+n], want) || !bytes.Equal(got[:guard], around[:guard]) ||
		!bytes.Equal(got[guard+n:], around[guard+n:]) {
		t.Fatalf("a write of %d bytes left others", n)
	}
	want, around = random(t, n), random(t, n+2*guard)
	p.target.write(base+at, want)
	p.source.write(back-guard, around)
	op, err = p.sending.Read(p.source.Memory, back, n, key, at)
	if moved, err := wait(t, op, err); err != nil || moved != n {
		t.Fatalf("a read of %d: %d, %v", n, moved, err)
	}
	got = p.source.read(back-guard, n+2*guard)
	if !bytes.Equal(got[guard:guard+n], want) || !bytes.Equal(got[:guard], around[:guard]) ||
		!bytes.Equal(got[guard+n:], around[guard+n:]) {
		t.Fatalf("a read of %d bytes brought others", n)
	}
}

// One-sided operations over every route.
func TestOneSidedOperationsMoveAllBytes(t *testing.T) {
	for _, way := range ways {
		t.Run(way, func(t *testing.T) {
			p := byWay(t, way)
			t.Run("every byte", p.readsAndWrites)
			t.Run("other memory", p.otherMemory)
			t.Run("in flight", p.inFlight)
			t.Run("keys", p.whatAKeyDoesNotAllow)
			t.Run("withdrawal", func(t *testing.T) {
				o := p.offer(t, p.target.Memory, 0, pairBytes, remoteBoth)
				p.takenBackUnderTraffic(t, o, func() error { return o.Revoke(within(t)) })
			})
			t.Run("unexport", func(t *testing.T) {
				again, err := p.b.Export(within(t), client.Allocation{FD: p.target.fd, Bytes: pairBytes, GPU: uuid(t, 3)})
				if err != nil {
					t.Fatal(err)
				}
				o := p.offer(t, again, 0, pairBytes, remoteBoth)
				p.takenBackUnderTraffic(t, o, func() error { return again.Unexport(within(t)) })
			})
			t.Run("cancel", p.cancels)
			t.Run("full of reads", p.fullOfReads)
		})
	}
}

// Reads and writes of regions succeed, over every route and in every size.
func (p *pair) readsAndWrites(t *testing.T) {
	const base = 4096
	key := p.offer(t, p.target.Memory, base, pairBytes-base, remoteBoth).Key()
	for _, n := range []uint64{0, 1, 4096, 1<<20 + 3, 4<<20 + 5} {
		p.sided(t, key, base, n)
	}
	p.arrive(t, 0, 4096, 1<<20+3) // messages go on, between them
	p.sided(t, key, base, 5)
}

// A range of several allocations, and host memory at either side.
func (p *pair) otherMemory(t *testing.T) {
	const granule, n = 2 << 20, 3<<20 + 5
	several, parts := allocateParts(t, 3, 1, 1)
	var err error
	if several.Memory, err = p.b.Export(within(t), client.Allocation{Parts: parts, GPU: uuid(t, 3)}); err != nil {
		t.Fatal(err)
	}
	q := *p
	q.target = several
	q.sided(t, p.offer(t, several.Memory, 0, 2*granule, remoteBoth).Key(), 0, n)

	here, there := hostMemory(t, p.a, 0, n), hostMemory(t, p.b, 3, n)
	key := p.offer(t, there, 0, n, remoteBoth).Key()
	want := random(t, n)
	copy(here.Data, want)
	op, err := p.sending.Write(here, 0, n, key, 0)
	if _, err := wait(t, op, err); err != nil || !bytes.Equal(there.Data, want) {
		t.Fatalf("a write from host to host: %v", err)
	}
	clear(here.Data)
	op, err = p.sending.Read(here, 0, n, key, 0)
	if _, err := wait(t, op, err); err != nil || !bytes.Equal(here.Data, want) {
		t.Fatalf("a read from host to host: %v", err)
	}
}

// Many at once, over few slots, beside messages: the reads end, with the right bytes.
func (p *pair) inFlight(t *testing.T) {
	const each, many = 300<<10 + 1, 12
	key := p.offer(t, p.target.Memory, 0, pairBytes, remoteBoth).Key()
	want := random(t, each*many)
	p.source.write(0, want)
	var ops []*client.Operation
	post := func(op *client.Operation, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		ops = append(ops, op)
	}
	settle := func() {
		t.Helper()
		for i, op := range ops {
			if _, err := wait(t, op, nil); err != nil {
				t.Fatalf("operation %d: %v", i, err)
			}
		}
		ops = nil
	}
	for i := range uint64(many) {
		post(p.sending.Write(p.source.Memory, i*each, each, key, (many-1-i)*each))
		post(p.receiving.Receive(p.target.Memory, (many+i)*each, each))
		post(p.sending.Send(p.source.Memory, i*each, each))
	}
	post(p.sending.Flush())
	settle()
	for i := range uint64(many) {
		if !bytes.Equal(p.target.read((many-1-i)*each, each), want[i*each:(i+1)*each]) ||
			!bytes.Equal(p.target.read((many+i)*each, each), want[i*each:(i+1)*each]) {
			t.Fatalf("write or message %d is another", i)
		}
	}
	for i := range uint64(many) {
		post(p.sending.Read(p.source.Memory, (many+i)*each, each, key, (many-1-i)*each))
		post(p.sending.Write(p.source.Memory, i*each, each, key, (many+i)*each))
	}
	settle()
	if !bytes.Equal(p.source.read(many*each, many*each), want) {
		t.Fatal("reads brought others' bytes")
	}
}

// Operations that the key, or a missing key, forbids.
func (p *pair) whatAKeyDoesNotAllow(t *testing.T) {
	const n = 64 << 10
	both, toRead, toWrite := p.offer(t, p.target.Memory, n, n, remoteBoth), p.offer(t, p.target.Memory, 0, n,
		wire.RemoteRead), p.offer(t, p.target.Memory, 0, n, wire.RemoteWrite)
	wrong := wire.NewRemoteKey(wire.UUID{1}, n, remoteBoth)
	gone := p.offer(t, p.target.Memory, 0, n, remoteBoth)
	if err := gone.Revoke(within(t)); err != nil {
		t.Fatal(err)
	}
	demand(t, gone.Revoke(within(t)), wire.StatusUnknownMemory)
	// Of another connection of the same client, and of another client.
	other, others, _ := join(t, p.a, 0, p.b, 3)
	elsewhere, err := others.Expose(within(t), p.target.Memory, 0, n, remoteBoth)
	if err != nil {
		t.Fatal(err)
	}
	read := func(key wire.RemoteKey, at, n uint64) error {
		op, err := p.sending.Read(p.source.Memory, 0, n, key, at)
		_, err = wait(t, op, err)
		return err
	}
	write := func(key wire.RemoteKey, at, n uint64) error {
		op, err := p.sending.Write(p.source.Memory, 0, n, key, at)
		_, err = wait(t, op, err)
		return err
	}
	before := p.target.read(0, 3*n)
	for name, of := range map[string]func(wire.RemoteKey, uint64, uint64) error{"read": read, "write": write} {
		t.Run(name, func(t *testing.T) {
			demand(t, of(wrong, 0, 8), wire.StatusBadKey)
			demand(t, of(gone.Key(), 0, 8), wire.StatusBadKey)
			demand(t, of(elsewhere.Key(), 0, 8), wire.StatusBadKey)
			demand(t, of(wrong, 0, 0), wire.StatusBadKey)
			demand(t, of(both.Key(), n-7, 8), wire.StatusOutOfRange)
			demand(t, of(both.Key(), ^uint64(0)-3, 8), wire.StatusOutOfRange)
			demand(t, of(both.Key(), n+1, 0), wire.StatusOutOfRange)
		})
	}
	demand(t, read(toWrite.Key(), 0, 8), wire.StatusNotPermitted)
	demand(t, write(toRead.Key(), 0, 8), wire.StatusNotPermitted)
	if !bytes.Equal(p.target.read(0, 3*n), before) {
		t.Error("what was refused has written")
	}
	if _, err := p.sending.Read(p.source.Memory, 0, 8, wire.RemoteKey{}, 0); wire.StatusOf(err) != wire.StatusBadKey {
		t.Errorf("a key of zeros: %v", err)
	}
	op, err := p.receiving.Read(p.target.Memory, 0, 8, both.Key(), 0)
	_, err = wait(t, op, err)
	demand(t, err, wire.StatusMalformed) // the side that accepted
	// And the connection goes on.
	p.sided(t, both.Key(), n, 8)
	if err := other.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	again, err := p.b.Export(within(t), client.Allocation{FD: p.target.fd, Bytes: pairBytes, GPU: uuid(t, 3)})
	if err != nil {
		t.Fatal(err)
	}
	unexported := p.offer(t, again, 0, n, remoteBoth)
	if err := read(unexported.Key(), 0, 8); err != nil {
		t.Fatal(err)
	}
	if err := again.Unexport(within(t)); err != nil {
		t.Fatal(err)
	}
	demand(t, read(unexported.Key(), 0, 8), wire.StatusBadKey)
}

// Invalid regions.
func TestInvalidRegionsAreRefused(t *testing.T) {
	p := connected(t, launch.RouteDirect)
	h := p.receiving
	toSend, err := p.b.Export(within(t), client.Allocation{FD: p.target.fd, Bytes: pairBytes, GPU: uuid(t, 3),
		Access: wire.AccessSend})
	if err != nil {
		t.Fatal(err)
	}
	offer := func(c *client.Connection, m *client.Memory, offset, n uint64, access uint32) error {
		_, err := c.Expose(within(t), m, offset, n, access)
		return err
	}
	demand(t, offer(h, toSend, 0, 8, wire.RemoteWrite), wire.StatusNotPermitted)
	demand(t, offer(h, toSend, 0, 8, remoteBoth), wire.StatusNotPermitted)
	demand(t, offer(h, toSend, 0, 8, 0), wire.StatusMalformed)
	demand(t, offer(h, toSend, 0, 8, 4), wire.StatusMalformed)
	demand(t, offer(h, toSend, 0, 0, wire.RemoteRead), wire.StatusOutOfRange)
	demand(t, offer(h, toSend, 8, pairBytes, wire.RemoteRead), wire.StatusOutOfRange)
	demand(t, offer(h, toSend, ^uint64(0), 8, wire.RemoteRead), wire.StatusOutOfRange)
	demand(t, offer(p.sending, p.source.Memory, 0, 8, wire.RemoteRead), wire.StatusMalformed)
	if err := offer(h, toSend, 0, pairBytes, wire.RemoteRead); err != nil {
		t.Fatal(err)
	}
	if err := toSend.Unexport(within(t)); err != nil {
		t.Fatal(err)
	}
	demand(t, offer(h, toSend, 0, 8, wire.RemoteRead), wire.StatusUnknownMemory)
	if err := h.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	err = offer(h, p.target.Memory, 0, 8, wire.RemoteRead)
	if status := wire.StatusOf(err); status != wire.StatusUnknownConnection && status != wire.StatusPeerClosed {
		// until the other side knows
		t.Errorf("on a connection that is closed: %v", err)
	}
}

// A listener's region serves present and later connections.
func TestListenerRegionServesPresentAndLaterConnections(t *testing.T) {
	p := connected(t, launch.RouteDirect)
	listener, err := p.b.Listen(within(t), uuid(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	connect := func() *client.Connection {
		t.Helper()
		c, err := p.a.Connect(within(t), uuid(t, 0), listener.Handle())
		if err == nil {
			_, err = listener.Accept(within(t))
		}
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := connect()
	offer, err := listener.Expose(within(t), p.target.Memory, 0, 4096, remoteBoth)
	if err != nil {
		t.Fatal(err)
	}
	unaccepted, err := p.a.Connect(within(t), uuid(t, 0), listener.Handle())
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range []*client.Connection{first, unaccepted, connect()} {
		for _, op := range []func() (*client.Operation, error){
			func() (*client.Operation, error) { return c.Read(p.source.Memory, 0, 8, offer.Key(), 0) },
			func() (*client.Operation, error) { return c.Write(p.source.Memory, 0, 8, offer.Key(), 0) },
		} {
			op, err := op()
			if _, err := wait(t, op, err); err != nil {
				t.Errorf("connection %d: %v", i, err)
			}
		}
	}
	op, err := p.sending.Read(p.source.Memory, 0, 8, offer.Key(), 0) // of another listener
	_, err = wait(t, op, err)
	demand(t, err, wire.StatusBadKey)
	if err := listener.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	op, err = first.Read(p.source.Memory, 0, 8, offer.Key(), 0)
	if _, err := wait(t, op, err); err != nil {
		t.Errorf("after the listener's end: %v", err)
	}
}

// After the return of a revoke or unexport under traffic no operation accesses the memory, and
// started operations succeed or end with the key's error.
func (p *pair) takenBackUnderTraffic(t *testing.T, o *client.Region, end func() error) {
	const each = 1 << 20
	p.source.write(0, bytes.Repeat([]byte{0xaa}, each))
	var ops []*client.Operation
	for i := range uint64(8) {
		op, err := p.sending.Write(p.source.Memory, 0, each, o.Key(), i*each)
		if err != nil {
			t.Fatal(err)
		}
		ops = append(ops, op)
		if op, err = p.sending.Read(p.source.Memory, 8*each, each, o.Key(), i*each); err != nil {
			t.Fatal(err)
		}
		ops = append(ops, op)
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
	p.target.write(0, make([]byte, 8*each))
	for _, op := range ops {
		if _, err := wait(t, op, nil); err != nil {
			demand(t, err, wire.StatusBadKey)
		}
	}
	if !bytes.Equal(p.target.read(0, 8*each), make([]byte, 8*each)) {
		t.Error("an operation wrote what was withdrawn")
	}
}

// A client with a ring full of reads keeps the connection.
func (p *pair) fullOfReads(t *testing.T) {
	const n = 8 << 10
	key := p.offer(t, p.target.Memory, 0, n, wire.RemoteRead).Key()
	var ops []*client.Operation
	for i := range wire.RingEntries + wire.RingEntries/4 {
		if len(ops) == wire.RingEntries {
			if _, err := wait(t, ops[0], nil); err != nil {
				t.Fatalf("read %d: %v", i-len(ops), err)
			}
			ops = ops[1:]
		}
		op, err := p.sending.Read(p.source.Memory, 0, n, key, 0)
		if err != nil {
			t.Fatal(err)
		}
		ops = append(ops, op)
	}
	for _, op := range ops {
		if _, err := wait(t, op, nil); err != nil {
			t.Fatal(err)
		}
	}
	p.move(t, n)
}

// Operations that have not begun are canceled; others end by themselves.
func (p *pair) cancels(t *testing.T) {
	key := p.offer(t, p.target.Memory, 0, pairBytes, remoteBoth).Key()
	hold, err := p.a.Timeline(0)
	if err != nil {
		t.Fatal(err)
	}
	held, err := p.sending.Write(p.source.Memory, 0, 8, key, 0, client.After(hold, 1))
	if err != nil {
		t.Fatal(err)
	}
	reading, err := p.sending.Read(p.source.Memory, 0, 8, key, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, op := range []*client.Operation{reading, held} {
		if err := op.Cancel(); err != nil {
			t.Fatal(err)
		}
		_, err := wait(t, op, nil)
		demand(t, err, wire.StatusCanceled)
	}
	for range 20 { // at whatever moment
		op, err := p.sending.Read(p.source.Memory, 0, 100<<10, key, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := op.Cancel(); err != nil {
			t.Fatal(err)
		}
		if _, err := wait(t, op, nil); err != nil {
			demand(t, err, wire.StatusCanceled)
		}
	}
	p.sided(t, key, 0, 1<<20+3)
}

// When the owner ends, operations in flight end with the reason.
func TestOneSidedOwnerExitEndsOperations(t *testing.T) {
	for i, way := range ways {
		for name, end := range map[string]struct {
			how    func(t *testing.T, p *pair) error
			status wire.Status
		}{
			"its session":    {func(_ *testing.T, p *pair) error { return p.b.Close() }, wire.StatusPeerClosed},
			"its connection": {func(t *testing.T, p *pair) error { return p.receiving.Close(within(t)) }, wire.StatusPeerClosed},
		} {
			if i > 0 && name == "its connection" { // which one way tells of
				continue
			}
			t.Run(fmt.Sprint(way, "/", name), func(t *testing.T) {
				p := byWay(t, way)
				key := p.offer(t, p.target.Memory, 0, pairBytes, remoteBoth).Key()
				p.sided(t, key, 0, 8)
				var ops []*client.Operation
				for i := range uint64(16) {
					for _, post := range []func() (*client.Operation, error){
						func() (*client.Operation, error) { return p.sending.Write(p.source.Memory, 0, 1<<20, key, i<<10) },
						func() (*client.Operation, error) {
							return p.sending.Read(p.source.Memory, 1<<20, 1<<20, key, i<<10)
						},
					} {
						op, err := post()
						if err != nil {
							t.Fatal(err)
						}
						ops = append(ops, op)
					}
				}
				if err := end.how(t, p); err != nil {
					t.Fatal(err)
				}
				for _, op := range ops {
					if _, err := wait(t, op, nil); err != nil && wire.StatusOf(err) != wire.StatusBadKey {
						demand(t, err, end.status)
					}
				}
				select {
				case <-p.sending.Down():
				case <-within(t).Done():
					t.Fatal("the connection is up")
				}
				demand(t, p.sending.Err(), end.status)
			})
		}
	}
}

// A flush ends after the earlier operations, with the status of a failure.
func TestFlushEndsAfterEarlierOperations(t *testing.T) {
	p := connected(t, launch.RouteDirect)
	flush := func(c *client.Connection, options ...client.Option) *client.Operation {
		t.Helper()
		op, err := c.Flush(options...)
		if err != nil {
			t.Fatal(err)
		}
		return op
	}
	ended := func(op *client.Operation) bool {
		select {
		case <-op.Done():
			return true
		default:
			return false
		}
	}
	if _, err := wait(t, flush(p.sending), nil); err != nil {
		t.Fatalf("with nothing before it: %v", err)
	}
	send, err := p.sending.Send(p.source.Memory, 0, 64)
	if err != nil {
		t.Fatal(err)
	}
	signal, err := p.a.Timeline(7)
	if err != nil {
		t.Fatal(err)
	}
	first, second := flush(p.sending, client.Signal(signal, 5)), flush(p.sending)
	// A read is answered though the send is not: so the flush had time to end wrongly.
	key := p.offer(t, p.target.Memory, 0, 4096, remoteBoth).Key()
	op, err := p.sending.Read(p.source.Memory, 0, 8, key, 0)
	if _, err := wait(t, op, err); err != nil {
		t.Fatal(err)
	}
	if ended(first) || ended(second) || signal.Value() == 5 {
		t.Fatal("a flush ended before the send")
	}
	receive, err := p.receiving.Receive(p.target.Memory, 0, 64)
	if _, err := wait(t, receive, err); err != nil {
		t.Fatal(err)
	}
	for _, op := range []*client.Operation{first, second} {
		if _, err := wait(t, op, nil); err != nil {
			t.Fatal(err)
		}
	}
	if !ended(send) || signal.Value() != 5 {
		t.Errorf("the flush has ended, the send: %t; its timeline stands at %d", ended(send), signal.Value())
	}

	// A failure is reported once, by the pending flushes or by the next flush.
	bad := func() {
		t.Helper()
		op, err := p.sending.Read(p.source.Memory, 0, 8, key, 4096)
		_, err = wait(t, op, err)
		demand(t, err, wire.StatusOutOfRange)
	}
	bad()
	_, err = wait(t, flush(p.sending), nil)
	demand(t, err, wire.StatusOutOfRange)
	// Also of operations refused at the post.
	op, err = p.sending.Send(p.source.Memory, pairBytes, 1)
	_, err = wait(t, op, err)
	demand(t, err, wire.StatusOutOfRange)
	_, err = wait(t, flush(p.sending), nil)
	demand(t, err, wire.StatusOutOfRange)
	if _, err := wait(t, flush(p.sending), nil); err != nil {
		t.Fatal(err)
	}
	if send, err = p.sending.Send(p.source.Memory, 0, 64); err != nil {
		t.Fatal(err)
	}
	first = flush(p.sending)
	if err := send.Cancel(); err != nil {
		t.Fatal(err)
	}
	_, err = wait(t, first, nil)
	demand(t, err, wire.StatusCanceled)

	// A flush is canceled, and ends with the connection.
	if receive, err = p.receiving.Receive(p.target.Memory, 0, 64); err != nil {
		t.Fatal(err)
	}
	first, second = flush(p.receiving), flush(p.receiving)
	if err := first.Cancel(); err != nil {
		t.Fatal(err)
	}
	_, err = wait(t, first, nil)
	demand(t, err, wire.StatusCanceled)
	if err := p.sending.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	for _, op := range []*client.Operation{receive, second} {
		_, err = wait(t, op, nil)
		demand(t, err, wire.StatusPeerClosed)
	}
}

// An accept with timeout 0 returns TimedOut without a sender, and otherwise the sender.
func TestAcceptWithTimeoutZeroReturnsAtOnce(t *testing.T) {
	p := connected(t, launch.RouteDirect)
	listener, err := p.b.Listen(within(t), uuid(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	if c, err := listener.TryAccept(); c != nil || err != nil {
		t.Fatalf("nobody has connected: %v, %v", c, err)
	}
	if _, err := p.a.Connect(within(t), uuid(t, 0), listener.Handle()); err != nil {
		t.Fatal(err)
	}
	ctx := within(t)
	for {
		c, err := listener.TryAccept()
		if err != nil || ctx.Err() != nil {
			t.Fatal(err, ctx.Err())
		}
		if c != nil {
			break
		}
	}
	if c, err := listener.TryAccept(); c != nil || err != nil {
		t.Fatalf("one was accepted twice: %v, %v", c, err)
	}
}

// The reverse connection uses the connection's route, for which the memory was checked, regardless
// of later configurations.
func TestReverseConnectionKeepsRouteOfItsConnection(t *testing.T) {
	needGPUs(t, 4)
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			h := newHost(t)
			h.nic("nic0")
			h.nic("nic1")
			var c launch.Config
			h.change = func(of *launch.Config) { c = *of }
			p := &pair{a: attach(t, h.relay("a", launch.RouteAuto, far(0, 1, "nic0")))}
			socket, r := h.start("b", route, -1, far(3, 2, "nic1"))
			p.b = attach(t, socket)
			p.source, p.target = exported(t, p.a, 0, pairBytes), exported(t, p.b, 3, pairBytes)
			p.sending, p.receiving, _ = join(t, p.a, 0, p.b, 3)
			c.Route = map[string]string{launch.RouteDirect: launch.RouteStaged, launch.RouteStaged: launch.RouteDirect}[route]
			if err := r.Configure(c); err != nil {
				t.Fatal(err)
			}
			const n = 1<<20 + 3
			p.sided(t, p.offer(t, p.target.Memory, 0, pairBytes, remoteBoth).Key(), 0, n)
			all, err := p.b.Statistics(within(t))
			if err != nil {
				t.Fatal(err)
			}
			if by := map[string]uint64{launch.RouteDirect: all.Direct, launch.RouteStaged: all.Staged}[route]; by != 2*n {
				t.Errorf("%d of %d bytes went by route %s", by, 2*n, route)
			}
		})
	}
}

// Reverse connections opened for readers leave room for requests of the owner.
func TestManyReverseConnectionsLeaveRoomForOwner(t *testing.T) {
	p := connected(t, launch.RouteDirect)
	listener, err := p.b.Listen(within(t), uuid(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	offer, err := listener.Expose(within(t), p.target.Memory, 0, 8, wire.RemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	var from []*client.Connection
	for range 150 {
		c, err := p.a.Connect(within(t), uuid(t, 0), listener.Handle())
		if err == nil {
			_, err = listener.Accept(within(t))
		}
		if err != nil {
			t.Fatal(err)
		}
		from = append(from, c)
	}
	var ops []*client.Operation
	for _, c := range from {
		op, err := c.Read(p.source.Memory, 0, 8, offer.Key(), 0)
		if err != nil {
			t.Fatal(err)
		}
		ops = append(ops, op)
	}
	for i := range 100 {
		if _, err := p.b.Listen(within(t), uuid(t, 3)); err != nil {
			t.Fatalf("listener %d: %v", i, err)
		}
	}
	for i, op := range ops {
		if _, err := wait(t, op, nil); err != nil {
			t.Errorf("read %d: %v", i, err)
		}
	}
}
