package relay

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// sentPort keeps the messages of a connection.
type sentPort struct {
	transport.Control
	sent []wire.Message
}

func (p *sentPort) Send(m wire.Message, _ uint32, _ ...int) { p.sent = append(p.sent, m) }

// take returns the messages since the last call, as text.
func (p *sentPort) take() string {
	var all []string
	for _, m := range p.sent {
		switch m := m.(type) {
		case *wire.PeerSend:
			all = append(all, fmt.Sprintf("send %d tag %d: %d", m.Send, m.Tag, m.Length))
		case *wire.PeerWithdraw:
			all = append(all, fmt.Sprintf("withdraw %d", m.Send))
		case *wire.PeerWritten:
			all = append(all, fmt.Sprintf("written %d", m.Grant))
		case *wire.PeerDelivered:
			all = append(all, fmt.Sprintf("delivered %d status %d", m.Send, m.Status))
		case *wire.PeerRegion:
			all = append(all, fmt.Sprintf("region %s kind %d: %d", regionName(m.Region), m.Kind, m.Bytes))
		case *wire.PeerForget:
			all = append(all, fmt.Sprintf("forget %s", regionName(m.Region)))
		case *wire.PeerGrant:
			all = append(all, fmt.Sprintf("grant %d of %d: %d+%d at %d of %s", m.Grant, m.Send, m.Part, m.Length, m.Offset,
				regionName(m.Region)))
		case *wire.PeerClose:
			all = append(all, fmt.Sprintf("close status %d", m.Status))
		default:
			all = append(all, fmt.Sprintf("%T", m))
		}
	}
	p.sent = nil
	return strings.Join(all, "; ")
}

// regionName returns the number of a region, mN for memory N of the client.
func regionName(region uint32) string {
	if n := region - (&memory{}).region(); n > 0 && n < 1<<16 {
		return fmt.Sprintf("m%d", n)
	}
	return fmt.Sprint(region)
}

// want fails the test if the connection has sent other messages.
func (p *sentPort) want(t *testing.T, name, messages string) {
	t.Helper()
	if got := p.take(); got != messages {
		t.Errorf("%s: sent %q, want %q", name, got, messages)
	}
}

// keptLink keeps the calls of a sender.
type keptLink struct {
	ready   map[uint32]func(error)
	removed []uint32
	writes  []keptWrite
	closed  bool
}

type keptWrite struct {
	to           transport.Target
	from         device.Place
	n, immediate uint64
	done         func(error)
}

func (l *keptLink) AddTarget(region, _ uint32, _ []device.Part, ready func(error)) {
	l.ready[region] = ready
}
func (l *keptLink) RemoveTarget(region uint32) { l.removed = append(l.removed, region) }
func (l *keptLink) Close()                     { l.closed = true }

func (l *keptLink) Write(to transport.Target, from transport.Source, n, immediate uint64, done func(error)) {
	l.writes = append(l.writes, keptWrite{to, from.Place, n, immediate, done})
}

// sending is a sender with a region of the receiver, number 1 of targetBytes.
type sending struct {
	*world
	s    *sender
	port *sentPort
	link *keptLink
}

const targetBytes = 5 * 4096

// shareable is host memory of a receiver.
type shareable struct {
	fd    int
	Bytes uint64
}

func newShareable(t *testing.T, bytes uint64) shareable {
	t.Helper()
	m, err := device.CreateHost("peerlane-test", bytes)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := m.Export()
	if err := errors.Join(err, m.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return shareable{fd, m.Bytes}
}

// descriptors returns the number of this process's descriptors of the memory.
func (m shareable) descriptors(t *testing.T) (n int) {
	t.Helper()
	var own unix.Stat_t
	if err := unix.Fstat(m.fd, &own); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		var is unix.Stat_t
		if err := unix.Stat("/proc/self/fd/"+e.Name(), &is); err == nil && is.Ino == own.Ino && is.Dev == own.Dev {
			n++ // otherwise another file, or closed meanwhile
		}
	}
	return n
}

func newSending(t *testing.T, route uint32) *sending {
	t.Helper()
	w := newWorld(t)
	c := w.connection(route)
	p := &sentPort{Control: c.port}
	c.port = p
	l := &keptLink{ready: map[uint32]func(error){}}
	s := newSender(c, l)
	s.targets[1] = &target{region: 1, bytes: targetBytes, state: targetReady}
	return &sending{w, s, p, l}
}

// completions returns the completions of a session since the last call, as text.
func (w *world) completions() string {
	var all []string
	for {
		done, ok := w.reader.Next()
		if !ok {
			return strings.Join(all, "; ")
		}
		all = append(all, fmt.Sprintf("%d: %d status %d", done.Cookie, done.Length, done.Status))
	}
}

// Every byte of a message is granted once, in order, and within the message and the region.
func TestSenderGrantInvalidFieldIsRefused(t *testing.T) {
	const length = 10_000
	whole := wire.PeerGrant{Send: 1, Grant: 1, Part: 0, Length: length, Offset: targetBytes - length, Region: 1}
	change := func(f func(g *wire.PeerGrant)) []wire.PeerGrant {
		g := whole
		f(&g)
		return []wire.PeerGrant{g}
	}
	after := func(first uint64, f func(g *wire.PeerGrant)) []wire.PeerGrant {
		g := whole
		g.Length = first
		next := wire.PeerGrant{Send: 1, Grant: 2, Part: first, Length: length - first, Region: 1}
		f(&next)
		return []wire.PeerGrant{g, next}
	}
	for _, c := range []struct {
		name   string
		grants []wire.PeerGrant // the last is refused
		open   int
		status wire.Status // StatusOK if the last is valid
	}{
		{"the whole message at the end of the region", []wire.PeerGrant{whole}, 0, wire.StatusOK},
		{"two parts", after(1, func(*wire.PeerGrant) {}), 0, wire.StatusOK},
		{"the last grant below the limit", []wire.PeerGrant{whole}, maxGrants - 1, wire.StatusOK},
		{"a grant above the limit", []wire.PeerGrant{whole}, maxGrants, wire.StatusLimit},
		{"another message", change(func(g *wire.PeerGrant) { g.Send = 2 }), 0, wire.StatusMalformed},
		{"message 0", change(func(g *wire.PeerGrant) { g.Send = 0 }), 0, wire.StatusMalformed},
		{"grant 0", change(func(g *wire.PeerGrant) { g.Grant = 0 }), 0, wire.StatusMalformed},
		{"a number left out", change(func(g *wire.PeerGrant) { g.Grant = 2 }), 0, wire.StatusMalformed},
		{"a number twice", after(1, func(g *wire.PeerGrant) { g.Grant = 1 }), 0, wire.StatusMalformed},
		{"a byte left out", change(func(g *wire.PeerGrant) { g.Part, g.Length = 1, 1 }), 0, wire.StatusMalformed},
		{"a byte twice", after(2, func(g *wire.PeerGrant) { g.Part = 1 }), 0, wire.StatusMalformed},
		{"no byte", change(func(g *wire.PeerGrant) { g.Length = 0 }), 0, wire.StatusMalformed},
		{"no byte at the end", after(length, func(g *wire.PeerGrant) { g.Length = 0 }), 0, wire.StatusMalformed},
		{"a byte behind the message", change(func(g *wire.PeerGrant) { g.Length = length + 1; g.Offset = 0 }), 0,
			wire.StatusMalformed},
		{"a byte behind the last part", after(1, func(g *wire.PeerGrant) { g.Length = length }), 0, wire.StatusMalformed},
		{"as many bytes as a number can have", change(func(g *wire.PeerGrant) { g.Length = ^uint64(0) }), 0,
			wire.StatusMalformed},
		{"a byte behind the region", change(func(g *wire.PeerGrant) { g.Offset++ }), 0, wire.StatusMalformed},
		{"an offset behind the region", change(func(g *wire.PeerGrant) { g.Offset = targetBytes + 1 }), 0,
			wire.StatusMalformed},
		{"the largest offset", change(func(g *wire.PeerGrant) { g.Offset = ^uint64(0) }), 0, wire.StatusMalformed},
		{"another region", change(func(g *wire.PeerGrant) { g.Region = 2 }), 0, wire.StatusMalformed},
		{"a region that was taken back", change(func(g *wire.PeerGrant) { g.Region = 3 }), 0, wire.StatusMalformed},
	} {
		w := newSending(t, wire.RouteDirect)
		w.s.targets[3] = &target{region: 3, bytes: targetBytes, state: targetRetired, granted: 1}
		w.post(w.s.connection, wire.OpSend, 5, 64, length)
		w.port.want(t, c.name, "send 1 tag 5: 10000")
		w.s.open = c.open
		last := len(c.grants) - 1
		for i, g := range c.grants {
			err := w.s.message(&g, nil)
			if i < last && err != nil || i == last && wire.StatusOf(err) != c.status {
				t.Errorf("%s: grant %d: %v", c.name, i, err)
			}
		}
		valid := len(c.grants)
		if c.status != wire.StatusOK {
			valid--
		}
		if len(w.link.writes) != valid || w.s.open != c.open+valid || w.s.targets[1].granted != valid {
			t.Errorf("%s: %d writes, %d grants are open, %d of the region", c.name, len(w.link.writes), w.s.open,
				w.s.targets[1].granted)
			continue
		}
		for i, write := range w.link.writes {
			g := c.grants[i]
			if write.to != (transport.Target{Region: 1, Offset: g.Offset}) || write.n != g.Length ||
				write.immediate != g.Grant ||
				write.from.Host != w.mine.place(64+g.Part).Host {
				t.Errorf("%s: grant %d is written as %+v", c.name, i, write)
			}
		}
	}
}

func TestSenderReportsWriteAndCompletesDeliveredMessage(t *testing.T) {
	w := newSending(t, wire.RouteDirect)
	w.post(w.s.connection, wire.OpSend, 0, 0, 10_000)
	w.port.take()
	for i, length := range []uint64{4_000, 6_000} {
		if err := w.s.message(&wire.PeerGrant{Send: 1, Grant: uint64(i) + 1, Part: uint64(i) * 4_000, Length: length,
			Region: 1}, nil); err != nil {
			t.Fatal(err)
		}
	}
	w.link.writes[0].done(nil)
	w.port.want(t, "the first write", "written 1")
	if w.s.open != 1 || w.s.targets[1].granted != 1 || w.s.underWay != 1 {
		t.Errorf("%d grants are open, %d of the region, %d under way", w.s.open, w.s.targets[1].granted, w.s.underWay)
	}
	// The receiver can have the last bytes before the end of the write is known.
	if err := w.s.message(&wire.PeerDelivered{Send: 1}, nil); err != nil {
		t.Fatal(err)
	}
	if got := w.completions(); got != "" {
		t.Errorf("completions before the last write: %q", got)
	}
	w.link.writes[1].done(nil)
	w.port.want(t, "the last write", "written 2")
	if got := w.completions(); got != "1: 10000 status 0" {
		t.Errorf("completions %q", got)
	}
	if c := w.relay.counters; c.sent != 10_000 || c.direct != 10_000 || c.staged != 0 || len(w.s.active) != 0 ||
		w.s.open != 0 {
		t.Errorf("counters %+v, %d messages, %d grants", c, len(w.s.active), w.s.open)
	}
}

func TestSenderDeliveredInvalidMessageEndsConnection(t *testing.T) {
	for _, c := range []struct {
		name        string
		message     wire.PeerDelivered
		status      wire.Status // of the refusal
		completions string
		down        wire.Status
	}{
		{"another message", wire.PeerDelivered{Send: 2}, wire.StatusMalformed, "", wire.StatusOK},
		{"bytes that were not sent", wire.PeerDelivered{Send: 1}, wire.StatusOK,
			fmt.Sprintf("1: 0 status %d", wire.StatusMalformed), wire.StatusMalformed},
		{"a refusal", wire.PeerDelivered{Send: 1, Status: uint32(wire.StatusTruncated)}, wire.StatusOK,
			fmt.Sprintf("1: 0 status %d", wire.StatusTruncated), wire.StatusOK},
	} {
		w := newSending(t, wire.RouteDirect)
		w.post(w.s.connection, wire.OpSend, 0, 0, 10_000)
		if err := w.s.message(&c.message, nil); wire.StatusOf(err) != c.status {
			t.Errorf("%s: %v", c.name, err)
		}
		if got := w.completions(); got != c.completions {
			t.Errorf("%s: completions %q", c.name, got)
		}
		if (w.s.down == nil) != (c.down == wire.StatusOK) || w.s.down != nil && w.s.down.Status != c.down {
			t.Errorf("%s: down %v", c.name, w.s.down)
		}
	}
	w := newSending(t, wire.RouteDirect)
	for crowded, posted := range map[bool][]*operation{true: {{}}, false: nil} { // a message less makes room
		w.s.posted = posted
		w.s.forget(&operation{})
		if w.session.waits[w.s.connection] != crowded {
			t.Errorf("with %d posted operations the connection waits: %t", len(posted), !crowded)
		}
		w.session.waits, w.s.posted = map[*connection]bool{}, nil
	}
	w.post(w.s.connection, wire.OpSend, 0, 0, 0)
	if err := w.s.message(&wire.PeerDelivered{Send: 1}, nil); err != nil {
		t.Error(err)
	}
	if got := w.completions(); got != "1: 0 status 0" {
		t.Errorf("an empty message: completions %q", got)
	}
	if err := w.s.message(&wire.PeerDelivered{Send: 1}, nil); wire.StatusOf(err) != wire.StatusMalformed {
		t.Errorf("a message twice: %v", err)
	}
}

func TestSenderFailedWriteEndsConnection(t *testing.T) {
	for _, c := range []struct {
		name string
		err  error
		want wire.Status
	}{
		{"an error of CUDA", errors.New("failed"), wire.StatusCUDA},
		{"an error with a status", wire.Errorf(wire.StatusPeerRelayDied, "died"), wire.StatusPeerRelayDied},
	} {
		w := newSending(t, wire.RouteDirect)
		w.post(w.s.connection, wire.OpSend, 0, 0, 10_000)
		if err := w.s.message(&wire.PeerGrant{Send: 1, Grant: 1, Length: 10_000, Region: 1}, nil); err != nil {
			t.Fatal(err)
		}
		w.link.writes[0].done(c.err)
		if w.s.down == nil || w.s.down.Status != c.want {
			t.Errorf("%s: down %v", c.name, w.s.down)
		}
		if got, want := w.completions(), fmt.Sprintf("1: 0 status %d", c.want); got != want {
			t.Errorf("%s: completions %q, want %q", c.name, got, want)
		}
		if !w.link.closed || w.s.open != 0 || w.relay.counters.sent != 0 {
			t.Errorf("%s: closed %t, %d grants, %d bytes sent", c.name, w.link.closed, w.s.open, w.relay.counters.sent)
		}
		if err := w.s.message(&wire.PeerGrant{}, nil); err != nil {
			t.Errorf("%s: a message after the end: %v", c.name, err)
		}
	}
}

// Slots of the sender can be smaller than a grant: one write at a time has the grant's number.
func TestSenderFillsGrantThroughSlots(t *testing.T) {
	w := newSending(t, wire.RouteStaged)
	for i := range uint64(fuzzMemory) {
		bytesAt(w.mine.mapped, i, 1)[0] = pattern(i)
	}
	const length, offset = 2*fuzzSlot + 100, 64
	w.post(w.s.connection, wire.OpSend, 0, offset, length)
	w.port.take()
	if err := w.s.message(&wire.PeerGrant{Send: 1, Grant: 1, Length: length, Offset: 300, Region: 1}, nil); err != nil {
		t.Fatal(err)
	}
	sent := uint64(0)
	for i, n := range []uint64{fuzzSlot, fuzzSlot, 100} {
		w.copied()
		if len(w.link.writes) != i+1 {
			t.Fatalf("%d writes, want %d", len(w.link.writes), i+1)
		}
		write := w.link.writes[i]
		at := w.slotOffset(transport.Source{Place: write.from})
		if write.to != (transport.Target{Region: 1, Offset: 300 + sent}) || write.n != n || write.immediate != 1 {
			t.Errorf("write %d is %+v", i, write)
		}
		for k, b := range bytesAt(w.slots, at, n) {
			if want := pattern(offset + sent + uint64(k)); b != want {
				t.Fatalf("byte %d of write %d is %#x, want %#x", k, i, b, want)
			}
		}
		if w.s.open != 1 || w.s.targets[1].granted != 1 {
			t.Errorf("%d grants are open before the end", w.s.open)
		}
		sent += n
		write.done(nil)
	}
	if w.s.open != 0 || w.s.underWay != 0 || len(w.s.out.free) != fuzzSlots {
		t.Errorf("%d grants are open, %d under way, %d slots are free", w.s.open, w.s.underWay, len(w.s.out.free))
	}
	g := w.s.out.regions[0]
	if c := w.relay.counters; c.sent != length || c.staged != length || c.direct != 0 || g.in != length ||
		g.out != length {
		t.Errorf("counters %+v; the region has %d in and %d out", c, g.in, g.out)
	}
	w.port.want(t, "route staged", "") // the NIC reports the writes
	if err := w.s.message(&wire.PeerDelivered{Send: 1}, nil); err != nil {
		t.Fatal(err)
	}
	if got, want := w.completions(), fmt.Sprintf("1: %d status 0", uint64(length)); got != want {
		t.Errorf("completions %q", got)
	}
}

func TestSenderFailedSlotWriteReturnsSlot(t *testing.T) {
	w := newSending(t, wire.RouteStaged)
	w.post(w.s.connection, wire.OpSend, 0, 0, 2*fuzzSlot)
	if err := w.s.message(&wire.PeerGrant{Send: 1, Grant: 1, Length: 2 * fuzzSlot, Region: 1}, nil); err != nil {
		t.Fatal(err)
	}
	w.copied()
	w.link.writes[0].done(wire.Errorf(wire.StatusPeerRelayDied, "died"))
	if w.s.down == nil || len(w.s.out.free) != fuzzSlots || w.s.open != 0 || len(w.link.writes) != 1 {
		t.Errorf("down %v, %d slots are free, %d grants are open, %d writes", w.s.down, len(w.s.out.free), w.s.open,
			len(w.link.writes))
	}
	if got, want := w.completions(), fmt.Sprintf("1: 0 status %d", wire.StatusPeerRelayDied); got != want {
		t.Errorf("completions %q", got)
	}
}

func TestSenderGrantWaitsUntilRegionIsReady(t *testing.T) {
	w := newSending(t, wire.RouteDirect)
	memory := newShareable(t, targetBytes)
	if err := w.s.message(&wire.PeerRegion{Region: 2, Kind: wire.MemoryHost, Bytes: memory.Bytes},
		[]int{memory.fd}); err != nil {
		t.Fatal(err)
	}
	w.post(w.s.connection, wire.OpSend, 0, 0, 10_000)
	if err := w.s.message(&wire.PeerGrant{Send: 1, Grant: 1, Length: 10_000, Region: 2}, nil); err != nil {
		t.Fatal(err)
	}
	if err := w.s.message(&wire.PeerForget{Region: 2}, nil); wire.StatusOf(err) != wire.StatusMalformed ||
		w.s.targets[2] == nil {
		t.Errorf("a region under a grant is taken back before it is ready: %v", err)
	}
	if len(w.link.writes) != 0 || w.s.underWay != 1 || w.relay.used.foreign != memory.Bytes {
		t.Errorf("%d writes, %d under way, %d bytes", len(w.link.writes), w.s.underWay, w.relay.used.foreign)
	}
	w.link.ready[2](nil)
	if len(w.link.writes) != 1 || w.link.writes[0].to.Region != 2 {
		t.Errorf("writes %+v", w.link.writes)
	}
	if err := w.s.message(&wire.PeerForget{Region: 2}, nil); wire.StatusOf(err) != wire.StatusMalformed {
		t.Errorf("a region under a write is taken back: %v", err)
	}
	w.link.writes[0].done(nil)
	if err := w.s.message(&wire.PeerForget{Region: 2}, nil); err != nil || !slices.Equal(w.link.removed, []uint32{2}) ||
		w.relay.used.foreign != 0 || w.s.targets[2] != nil {
		t.Errorf("%v; removed %v, %d bytes", err, w.link.removed, w.relay.used.foreign)
	}
	if err := w.s.message(&wire.PeerForget{Region: 9}, nil); err != nil {
		t.Errorf("an unknown region: %v", err)
	}
}

// The mapping of a region that the receiver takes back meanwhile goes at its end, and takes no grant.
func TestSenderRegionForgottenWhileMappedIsRemoved(t *testing.T) {
	w := newSending(t, wire.RouteDirect)
	memory := newShareable(t, targetBytes)
	if err := w.s.message(&wire.PeerRegion{Region: 2, Kind: wire.MemoryHost, Bytes: memory.Bytes},
		[]int{memory.fd}); err != nil {
		t.Fatal(err)
	}
	w.post(w.s.connection, wire.OpSend, 0, 0, 100)
	for range 2 { // also a peer that sends the message twice
		if err := w.s.message(&wire.PeerForget{Region: 2}, nil); err != nil || len(w.link.removed) > 0 {
			t.Errorf("%v, removed %v", err, w.link.removed)
		}
	}
	if err := w.s.message(&wire.PeerGrant{Send: 1, Grant: 1, Length: 100, Region: 2}, nil); wire.StatusOf(err) !=
		wire.StatusMalformed {
		t.Errorf("a grant in a forgotten region: %v", err)
	}
	w.link.ready[2](nil)
	if !slices.Equal(w.link.removed, []uint32{2}) || w.relay.used.foreign != 0 || w.s.targets[2] != nil {
		t.Errorf("removed %v, %d bytes", w.link.removed, w.relay.used.foreign)
	}
}

// On route staged, the receiver can know of the end of a write first.
func TestSenderForgetsRegionAfterItsWrites(t *testing.T) {
	w := newSending(t, wire.RouteStaged)
	w.post(w.s.connection, wire.OpSend, 0, 0, 100)
	if err := w.s.message(&wire.PeerGrant{Send: 1, Grant: 1, Length: 100, Region: 1}, nil); err != nil {
		t.Fatal(err)
	}
	w.copied()
	if err := w.s.message(&wire.PeerForget{Region: 1}, nil); err != nil || len(w.link.removed) != 0 {
		t.Errorf("%v, removed %v", err, w.link.removed)
	}
	w.link.writes[0].done(nil)
	if !slices.Equal(w.link.removed, []uint32{1}) {
		t.Errorf("removed %v", w.link.removed)
	}
}

func TestSenderRegionThatCannotBeMappedEndsConnection(t *testing.T) {
	w := newSending(t, wire.RouteStaged)
	memory := newShareable(t, targetBytes)
	if err := w.s.message(&wire.PeerRegion{Region: 2, Kind: wire.MemoryHost, Bytes: memory.Bytes},
		[]int{memory.fd}); err != nil {
		t.Fatal(err)
	}
	if w.relay.used.foreign != 0 {
		t.Errorf("%d bytes on route staged", w.relay.used.foreign)
	}
	w.s.shutdown(wire.Errorf(wire.StatusPeerClosed, "closed"))
	if w.link.closed {
		t.Error("the link is closed under the mapping")
	}
	w.link.ready[2](nil)
	if !w.link.closed || w.s.underWay != 0 {
		t.Errorf("closed %t, %d under way", w.link.closed, w.s.underWay)
	}
}

func TestSenderRefusesInvalidRegion(t *testing.T) {
	const bytes = targetBytes
	for _, c := range []struct {
		name   string
		region wire.PeerRegion
		files  int
		parts  []uint64 // bytes of allocations that came before, of region 2
		full   bool     // the connection has as many regions as possible
		status wire.Status
	}{
		{"host memory", wire.PeerRegion{Region: 2, Kind: wire.MemoryHost, Bytes: bytes}, 1, nil, false, wire.StatusOK},
		{"no descriptor", wire.PeerRegion{Region: 2, Kind: wire.MemoryHost, Bytes: bytes}, 0, nil, false,
			wire.StatusMalformed},
		{"two descriptors", wire.PeerRegion{Region: 2, Kind: wire.MemoryHost, Bytes: bytes}, 2, nil, false,
			wire.StatusMalformed},
		{"a region twice", wire.PeerRegion{Region: 1, Kind: wire.MemoryHost, Bytes: bytes}, 1, nil, false,
			wire.StatusMalformed},
		{"memory of another host", wire.PeerRegion{Region: 2, Kind: wire.MemoryRemote, Bytes: bytes}, 1, nil, false,
			wire.StatusMalformed},
		{"memory of another size", wire.PeerRegion{Region: 2, Kind: wire.MemoryHost, Bytes: bytes << 1}, 1, nil, false,
			wire.StatusBadDescriptor},
		{"memory of an unknown kind", wire.PeerRegion{Region: 2, Kind: 99, Bytes: bytes}, 1, nil, false,
			wire.StatusMalformed},
		{"a region above the limit", wire.PeerRegion{Region: 2, Kind: wire.MemoryHost, Bytes: bytes}, 1, nil, true,
			wire.StatusLimit},
		{"two allocations", wire.PeerRegion{Region: 2, Kind: wire.MemoryParts, Bytes: 300}, 0, []uint64{100, 200}, false,
			wire.StatusOK},
		{"no allocation", wire.PeerRegion{Region: 2, Kind: wire.MemoryParts, Bytes: 300}, 0, nil, false,
			wire.StatusMalformed},
		{"no allocation of no bytes", wire.PeerRegion{Region: 2, Kind: wire.MemoryParts}, 0, nil, false,
			wire.StatusMalformed},
		{"allocations of another region", wire.PeerRegion{Region: 3, Kind: wire.MemoryParts, Bytes: 300}, 0,
			[]uint64{100, 200}, false, wire.StatusMalformed},
		{"allocations of fewer bytes", wire.PeerRegion{Region: 2, Kind: wire.MemoryParts, Bytes: 301}, 0, []uint64{100, 200},
			false, wire.StatusMalformed},
		{"allocations of more bytes", wire.PeerRegion{Region: 2, Kind: wire.MemoryParts, Bytes: 299}, 0, []uint64{100, 200},
			false, wire.StatusMalformed},
		{"allocations beyond the largest number", wire.PeerRegion{Region: 2, Kind: wire.MemoryParts, Bytes: 10}, 0,
			[]uint64{11, ^uint64(0)}, false, wire.StatusMalformed},
		{"allocations with a descriptor", wire.PeerRegion{Region: 2, Kind: wire.MemoryParts, Bytes: 300}, 1,
			[]uint64{100, 200}, false, wire.StatusMalformed},
	} {
		w := newSending(t, wire.RouteDirect)
		memory := newShareable(t, bytes)
		for _, n := range c.parts {
			fd, err := unix.FcntlInt(uintptr(memory.fd), unix.F_DUPFD_CLOEXEC, 3)
			if err == nil {
				err = w.relay.reserve(ofPart)
			}
			if err != nil {
				t.Fatal(err)
			}
			w.s.parts, w.s.partsOf = append(w.s.parts, device.Part{FD: fd, Bytes: n}), 2
		}
		for i := range uint32(wire.MaxMemories - 1) {
			if c.full {
				w.s.targets[100+i] = &target{}
			}
		}
		before := len(w.s.targets)
		err := w.s.message(&c.region, slices.Repeat([]int{memory.fd}, c.files))
		if wire.StatusOf(err) != c.status {
			t.Errorf("%s: %v", c.name, err)
		}
		added := w.s.targets[c.region.Region] != nil && w.link.ready[c.region.Region] != nil
		if added != (c.status == wire.StatusOK) || !added && len(w.s.targets) != before {
			t.Errorf("%s: added %t", c.name, added)
		}
		if added {
			w.link.ready[c.region.Region](nil)
			if n := memory.descriptors(t); n != 1 {
				t.Errorf("%s: %d descriptors are open", c.name, n)
			}
			if w.s.targets[c.region.Region].state != targetReady || len(w.s.parts) != 0 || w.relay.used.descriptors != 0 {
				t.Errorf("%s: %d parts, %d descriptors", c.name, len(w.s.parts), w.relay.used.descriptors)
			}
		}
		w.s.targets = map[uint32]*target{}
		w.s.closeParts(w.s.parts)
		w.s.parts = nil
		if n := memory.descriptors(t); n != 1 || w.relay.used.descriptors != 0 {
			t.Errorf("%s: %d descriptors are open, %d are counted", c.name, n, w.relay.used.descriptors)
		}
	}
}

func TestSenderRefusesInvalidAllocation(t *testing.T) {
	for _, c := range []struct {
		name   string
		route  uint32
		files  int
		parts  int // allocations of region 2 that came before
		region uint32
		status wire.Status
	}{
		{"no descriptor", wire.RouteDirect, 0, 0, 2, wire.StatusMalformed},
		{"two descriptors", wire.RouteDirect, 2, 0, 2, wire.StatusMalformed},
		{"route staged", wire.RouteStaged, 1, 0, 2, wire.StatusMalformed},
		{"two regions at a time", wire.RouteDirect, 1, 1, 3, wire.StatusMalformed},
		{"an allocation above the limit", wire.RouteDirect, 1, wire.MaxParts, 2, wire.StatusLimit},
	} {
		w := newSending(t, c.route)
		w.s.parts, w.s.partsOf = make([]device.Part, c.parts), 2
		err := w.s.message(&wire.PeerRegionPart{Region: c.region, Bytes: 1}, make([]int, c.files))
		if wire.StatusOf(err) != c.status || len(w.s.parts) != c.parts {
			t.Errorf("%s: %v, %d parts", c.name, err, len(w.s.parts))
		}
	}
	for _, m := range []wire.Message{&wire.PeerSend{}, &wire.PeerWritten{}, &wire.Failure{}} {
		if err := newSending(t, wire.RouteDirect).s.message(m, nil); wire.StatusOf(err) != wire.StatusMalformed {
			t.Errorf("%T: %v", m, err)
		}
	}
}

func TestSenderWithdrawsCanceledMessageOnce(t *testing.T) {
	w := newSending(t, wire.RouteDirect)
	for range 3 {
		w.post(w.s.connection, wire.OpSend, 0, 0, 10_000)
	}
	w.port.want(t, "three messages", "send 1 tag 0: 10000; send 2 tag 0: 10000; send 3 tag 0: 10000")
	w.s.cancel(9)
	w.port.want(t, "an unknown cookie", "")
	w.s.cancel(2)
	w.s.cancel(2)
	w.port.want(t, "a cookie twice", "withdraw 2")
	w.posted[3].state = operationAnswered // as of a buffered message
	w.s.cancel(3)
	w.port.want(t, "a message that has ended for the client", "")
	if got := w.completions(); got != "" {
		t.Errorf("completions before the answer: %q", got)
	}
	if err := w.s.message(&wire.PeerDelivered{Send: 2, Status: uint32(wire.StatusCanceled)}, nil); err != nil {
		t.Fatal(err)
	}
	if got, want := w.completions(), fmt.Sprintf("2: 0 status %d", wire.StatusCanceled); got != want {
		t.Errorf("completions %q, want %q", got, want)
	}
}

// receiving is a receiver of a connection.
type receiving struct {
	*world
	r    *receiver
	port *sentPort
}

func newReceiving(t *testing.T, route uint32) *receiving {
	t.Helper()
	w := newWorld(t)
	c := w.connection(route)
	p := &sentPort{Control: c.port}
	c.port = p
	r := newReceiver(c)
	if route == wire.RouteStaged {
		r.writes = fuzzArrivals{}
	}
	return &receiving{w, r, p}
}

func (w *receiving) receive(tag, offset, length uint64) {
	w.post(w.r.connection, wire.OpReceive, tag, offset, length)
}

func (w *receiving) announce(t *testing.T, send, tag, length uint64) {
	t.Helper()
	if err := w.r.message(&wire.PeerSend{Send: send, Tag: tag, Length: length}, nil); err != nil {
		t.Fatal(err)
	}
}

// Messages and receives of a tag match in order, in either order of arrival.
func TestReceiverMatchesMessagesByTagInOrder(t *testing.T) {
	w := newReceiving(t, wire.RouteDirect)
	w.receive(1, 0, 100)
	w.receive(2, 1000, 200)
	w.receive(1, 2000, 300)
	w.announce(t, 1, 3, 10)
	w.port.want(t, "a tag without a receive", "")
	w.announce(t, 2, 1, 20)
	w.port.want(t, "the first of tag 1", "region m1 kind 1: 65536; grant 1 of 2: 0+20 at 0 of m1")
	w.announce(t, 3, 1, 30)
	w.port.want(t, "the second of tag 1", "grant 2 of 3: 0+30 at 2000 of m1")
	w.announce(t, 4, 1, 40)
	w.announce(t, 5, 3, 50)
	w.port.want(t, "no receive is left", "")
	w.receive(3, 3000, 400)
	w.port.want(t, "the first of tag 3", "grant 3 of 1: 0+10 at 3000 of m1")
	w.receive(3, 4000, 400)
	w.port.want(t, "the second of tag 3", "grant 4 of 5: 0+50 at 4000 of m1")
	if len(w.r.arrivals) != 1 || len(w.r.receives) != 1 || len(w.r.matched) != 4 {
		t.Errorf("%d messages and %d receives wait, %d are matched", len(w.r.arrivals), len(w.r.receives), len(w.r.matched))
	}
}

func TestReceiverRefusesInvalidAnnouncement(t *testing.T) {
	for _, c := range []struct {
		name    string
		waiting int
		send    uint64
		status  wire.Status
	}{
		{"the next number", 0, 1, wire.StatusOK},
		{"number 0", 0, 0, wire.StatusMalformed},
		{"a number left out", 0, 2, wire.StatusMalformed},
		{"the last message below the limit", wire.RingEntries - 1, 1, wire.StatusOK},
		{"a message above the limit", wire.RingEntries, 1, wire.StatusLimit},
	} {
		w := newReceiving(t, wire.RouteDirect)
		w.r.arrivals = make([]*arrival, c.waiting)
		if err := w.r.message(&wire.PeerSend{Send: c.send}, nil); wire.StatusOf(err) != c.status {
			t.Errorf("%s: %v", c.name, err)
		}
		if more := len(w.r.arrivals) - c.waiting; (more == 1) != (c.status == wire.StatusOK) {
			t.Errorf("%s: %d messages more wait", c.name, more)
		}
		w.r.arrivals = nil
	}
	for _, m := range []wire.Message{&wire.PeerGrant{}, &wire.PeerDelivered{}, &wire.Failure{}} {
		if err := newReceiving(t, wire.RouteDirect).r.message(m, nil); wire.StatusOf(err) != wire.StatusMalformed {
			t.Errorf("%T: %v", m, err)
		}
	}
}

func TestReceiverEndsMessageWithoutTransfer(t *testing.T) {
	for _, c := range []struct {
		name              string
		length, room      uint64
		sent, completions string
	}{
		{"an empty message", 0, 8, "delivered 1 status 0", "1: 0 status 0"},
		{"an empty message without room", 0, 0, "delivered 1 status 0", "1: 0 status 0"},
		{"a message above the room", 9, 8, fmt.Sprintf("delivered 1 status %d", wire.StatusTruncated),
			fmt.Sprintf("1: 0 status %d", wire.StatusTruncated)},
		{"a message of the room", 8, 8, "region m1 kind 1: 65536; grant 1 of 1: 0+8 at 0 of m1", ""},
	} {
		w := newReceiving(t, wire.RouteDirect)
		w.receive(0, 0, c.room)
		w.announce(t, 1, 0, c.length)
		w.port.want(t, c.name, c.sent)
		if got := w.completions(); got != c.completions {
			t.Errorf("%s: completions %q, want %q", c.name, got, c.completions)
		}
	}
}

// The client gets the ends of receives in the order of their matches.
func TestReceiverReportsEndsInOrderOfMatches(t *testing.T) {
	w := newReceiving(t, wire.RouteDirect)
	for i := range uint64(3) {
		w.receive(0, i*1000, 100)
		w.announce(t, i+1, 0, 10*(i+1))
	}
	w.port.take()
	written := func(grant uint64) {
		t.Helper()
		if err := w.r.message(&wire.PeerWritten{Grant: grant}, nil); err != nil {
			t.Fatal(err)
		}
	}
	written(2)
	w.port.want(t, "the second", "delivered 2 status 0")
	if got := w.completions(); got != "" {
		t.Errorf("completions %q", got)
	}
	written(1)
	w.port.want(t, "the first", "delivered 1 status 0")
	if got := w.completions(); got != "1: 10 status 0; 2: 20 status 0" {
		t.Errorf("completions %q", got)
	}
	if w.relay.counters.direct != 30 || w.relay.counters.received != 30 || len(w.r.matched) != 1 {
		t.Errorf("counters %+v, %d matched", w.relay.counters, len(w.r.matched))
	}
	for _, grant := range []uint64{0, 1, 4} {
		if err := w.r.message(&wire.PeerWritten{Grant: grant}, nil); wire.StatusOf(err) != wire.StatusMalformed {
			t.Errorf("grant %d is filled: %v", grant, err)
		}
	}
	w.leave(w.r.connection)
	if got, want := w.completions(), fmt.Sprintf("3: 0 status %d", wire.StatusPeerRelayDied); got != want {
		t.Errorf("completions after the end %q, want %q", got, want)
	}
	if len(w.connections) != 0 || len(w.mine.registrars) != 0 || w.mine.users != 0 {
		t.Errorf("%d connections, %d registrars, %d users", len(w.connections), len(w.mine.registrars), w.mine.users)
	}
}

func TestReceiverCancelsWaitingReceive(t *testing.T) {
	w := newReceiving(t, wire.RouteDirect)
	for i := range uint64(3) {
		w.receive(0, i*1000, 100)
	}
	w.announce(t, 1, 0, 10)
	w.port.take()
	w.r.cancel(1) // matched
	w.r.cancel(9)
	w.r.cancel(2)
	if got, want := w.completions(), fmt.Sprintf("2: 0 status %d", wire.StatusCanceled); got != want {
		t.Errorf("completions %q, want %q", got, want)
	}
	w.announce(t, 2, 0, 20)
	w.port.want(t, "the next message", "grant 2 of 2: 0+20 at 2000 of m1")
}

func TestReceiverAnswersWithdrawalOfWaitingMessage(t *testing.T) {
	w := newReceiving(t, wire.RouteDirect)
	w.receive(7, 0, 100)
	for i := range uint64(3) {
		w.announce(t, i+1, i, 10) // no receive
	}
	w.announce(t, 4, 7, 10)
	w.port.take()
	for send, want := range map[uint64]string{2: fmt.Sprintf("delivered 2 status %d", wire.StatusCanceled), 4: "", 9: ""} {
		if err := w.r.message(&wire.PeerWithdraw{Send: send}, nil); err != nil {
			t.Fatal(err)
		}
		w.port.want(t, fmt.Sprintf("message %d", send), want)
	}
	w.receive(1, 0, 100)
	w.port.want(t, "a receive for the withdrawn message", "")
	w.receive(2, 3000, 100)
	w.port.want(t, "a receive for the next", "grant 2 of 3: 0+10 at 3000 of m1")
}

// A receiver grants slots, and copies a filled slot into the client's memory.
func TestReceiverGrantsSlotsAndCopiesThem(t *testing.T) {
	w := newReceiving(t, wire.RouteStaged)
	const length = 4*fuzzSlot + 100
	w.r.in.regions[0].number = 8
	w.receive(0, 64, length)
	w.announce(t, 1, 0, length)
	w.port.want(t, "all slots but one", "grant 1 of 1: 0+4096 at 0 of 8; grant 2 of 1: 4096+4096 at 4096 of 8")
	offset := func(n int) uint64 { return w.r.grants[uint64(n)].slot.offset }
	for n, want := range []string{1: "grant 3 of 1: 8192+4096 at 8192 of 8", 2: "grant 4 of 1: 12288+4096 at 0 of 8",
		3: "grant 5 of 1: 16384+100 at 4096 of 8", 4: "", 5: "delivered 1 status 0"} {
		if n == 0 {
			continue
		}
		bytes := min(uint64(fuzzSlot), length-uint64(n-1)*fuzzSlot)
		slot := bytesAt(w.slots, offset(n), bytes)
		for i := range slot {
			slot[i] = pattern(uint64(n-1)*fuzzSlot + uint64(i))
		}
		w.r.immediate(uint64(n), 1)
		w.r.immediate(uint64(n), bytes-1)
		w.copied()
		w.port.want(t, fmt.Sprintf("slot %d", n), want)
	}
	if got, want := w.completions(), fmt.Sprintf("1: %d status 0", uint64(length)); got != want {
		t.Errorf("completions %q, want %q", got, want)
	}
	for i, b := range bytesAt(w.mine.mapped, 64, length) {
		if want := pattern(uint64(i)); b != want {
			t.Fatalf("byte %d is %#x, want %#x", i, b, want)
		}
	}
	g := w.r.in.regions[0]
	if c := w.relay.counters; c.received != length || c.staged != length || c.direct != 0 || g.in != length ||
		g.out != length ||
		len(w.r.in.free) != fuzzSlots || len(w.r.grants) != 0 {
		t.Errorf("counters %+v; in %d, out %d; %d slots are free, %d grants", c, g.in, g.out, len(w.r.in.free),
			len(w.r.grants))
	}
}

// A sender's NIC writes into memory in reach in pieces of a slot's size, as many at a time as there are
// slots, for the messages in turn.
func TestReceiverGrantsPiecesInPlace(t *testing.T) {
	w := newReceiving(t, wire.RouteStaged)
	w.mine.staged = &clientStaging{on: &serverUsage{}}
	const length = 4*fuzzSlot + 100
	w.receive(0, 64, length)
	w.receive(0, 40_000, 10)
	w.announce(t, 1, 0, length)
	w.announce(t, 2, 0, 10)
	w.port.want(t, "as many pieces as slots", "region m1 kind 1: 65536; grant 1 of 1: 0+4096 at 64 of m1; "+
		"grant 2 of 1: 4096+4096 at 4160 of m1; grant 3 of 1: 8192+4096 at 8256 of m1")
	for n, want := range []string{1: "grant 4 of 1: 12288+4096 at 12352 of m1",
		2: "grant 5 of 1: 16384+100 at 16448 of m1",
		3: "grant 6 of 2: 0+10 at 40000 of m1", 4: "", 5: "delivered 1 status 0", 6: "delivered 2 status 0"} {
		if n == 0 {
			continue
		}
		w.r.immediate(uint64(n), w.r.grants[uint64(n)].length)
		w.port.want(t, fmt.Sprintf("piece %d", n), want)
	}
	if got, want := w.completions(), fmt.Sprintf("1: %d status 0; 2: 10 status 0", uint64(length)); got != want {
		t.Errorf("completions %q, want %q", got, want)
	}
	if w.r.inPlaces != 0 || w.relay.counters.staged != length+10 || w.mine.staged.on.in != length+10 || w.mine.users != 0 {
		t.Errorf("%d pieces, %d bytes staged, %d on the server, %d users", w.r.inPlaces, w.relay.counters.staged,
			w.mine.staged.on.in, w.mine.users)
	}
	for _, op := range w.posted {
		if op.underWay != 0 {
			t.Errorf("%d copies are under way", op.underWay)
		}
	}
}

func TestReceiverInvalidWriteEndsConnection(t *testing.T) {
	for _, c := range []struct {
		name          string
		grant, length uint64
		first         uint64 // a valid write before
	}{
		{"no byte", 1, 0, 0},
		{"a byte more", 1, 101, 0},
		{"a byte more than the rest", 1, 100, 1},
		{"the largest number", 1, ^uint64(0), 1},
		{"another grant", 2, 1, 0},
		{"grant 0", 0, 1, 0},
		{"a filled grant", 1, 1, 100},
	} {
		w := newReceiving(t, wire.RouteStaged)
		w.receive(0, 0, 100)
		w.announce(t, 1, 0, 100)
		if c.first > 0 {
			w.r.immediate(1, c.first)
		}
		w.r.immediate(c.grant, c.length)
		w.copied()
		if w.r.down == nil || w.r.down.Status != wire.StatusMalformed {
			t.Errorf("%s: down %v", c.name, w.r.down)
		}
		w.leave(w.r.connection)
		if len(w.connections) != 1 {
			t.Errorf("%s: the connection ends while its sender's NIC may write", c.name)
		}
		w.r.landingsEnded()
		for _, op := range w.posted {
			if op.underWay != 0 || op.state != operationEnded {
				t.Errorf("%s: %d copies are under way, state %d", c.name, op.underWay, op.state)
			}
		}
		if len(w.connections) != 0 || len(w.r.in.free) != fuzzSlots || w.mine.users != 0 {
			t.Errorf("%s: %d connections, %d slots are free, %d users", c.name, len(w.connections), len(w.r.in.free),
				w.mine.users)
		}
	}
}

func TestReceiverEndWithWaitingReceivesFinishesThem(t *testing.T) {
	w := newReceiving(t, wire.RouteDirect)
	w.receive(0, 0, 100)
	w.receive(1, 0, 100)
	w.receive(2, 0, 100)
	w.announce(t, 1, 1, 10)
	w.announce(t, 2, 2, 0) // has ended, behind the first
	w.r.shutdown(wire.Errorf(wire.StatusPeerClosed, "closed"))
	closed := uint32(wire.StatusPeerClosed)
	if got, want := w.completions(), fmt.Sprintf("1: 0 status %d; 3: 0 status 0", closed); got != want {
		t.Errorf("completions %q, want %q", got, want)
	}
	w.leave(w.r.connection)
	if got, want := w.completions(), fmt.Sprintf("2: 0 status %d", closed); got != want {
		t.Errorf("completions after the sender's end %q, want %q", got, want)
	}
}

func TestStagingSlotsAlternateBetweenRegions(t *testing.T) {
	a, b := &region{slots: 3, slotBytes: 10}, &region{slots: 1, slotBytes: 20}
	three := &staging{regions: []*region{a, b, {slots: 1}}}
	three.fill()
	three.fail(b)
	three.fail(b)
	if three.slots != 4 || len(three.free) != 4 {
		t.Errorf("after two reports of a failure: %d slots, %d are free", three.slots, len(three.free))
	}
	s := &staging{regions: []*region{a, b}}
	s.fill()
	want := []slot{{region: a}, {region: b}, {region: a, offset: 10}, {region: a, offset: 20}}
	var got []slot
	for _, one := range s.free {
		got = append(got, *one)
	}
	if !slices.Equal(got, want) || s.slots != 4 {
		t.Errorf("%d slots, %+v", s.slots, got)
	}
	foreign := &region{}
	s.fail(foreign)
	s.fail(b)
	s.fail(b)
	if s.slots != 3 || len(s.free) != 3 || slices.ContainsFunc(s.free, func(one *slot) bool { return one.region == b }) {
		t.Errorf("after a failure: %d slots, %d are free", s.slots, len(s.free))
	}
	s.fail(a) // the last
	if s.slots != 3 || len(s.free) != 3 {
		t.Errorf("after the failure of the last: %d slots, %d are free", s.slots, len(s.free))
	}
	single := &staging{regions: []*region{a}}
	single.fill()
	single.fail(a)
	if single.slots != 3 || len(single.free) != 3 {
		t.Errorf("a single region: %d slots, %d are free", single.slots, len(single.free))
	}
}

func TestStagingSlotOfFailedRegionIsNotUsedAgain(t *testing.T) {
	w := newWorld(t)
	a, b := &region{slots: 2, slotBytes: 10}, &region{slots: 2, slotBytes: 10}
	s := &staging{regions: []*region{a, b}}
	s.fill()
	c := w.connection(wire.RouteStaged)
	var held []*slot
	for range 3 {
		s.acquire(c, func(one *slot) bool { held = append(held, one); return true })
	}
	if len(held) != 3 || c.slots.held != 3 || s.sharing != 1 {
		t.Fatalf("%d slots, %d held, %d connections share", len(held), c.slots.held, s.sharing)
	}
	failed := held[0].region
	s.fail(failed)
	for _, one := range held {
		if one.holder != c {
			t.Errorf("a slot is of %v", one.holder)
		}
		s.release(one)
	}
	if len(s.free) != 2 || s.slots != 2 || c.slots.held != 0 || s.sharing != 0 {
		t.Errorf("%d of %d slots are free, %d held, %d connections share", len(s.free), s.slots, c.slots.held, s.sharing)
	}
	for _, one := range s.free {
		if one.region == failed || one.holder != nil {
			t.Errorf("free is %+v", one)
		}
	}
}
