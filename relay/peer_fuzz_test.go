package relay

import (
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/ring"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// Of the worlds below, bytes. Memory behind the slots, and around the memory of operations, must
// stay unchanged.
const (
	fuzzSlot      = 4096
	fuzzSlots     = 3
	fuzzMemory    = 64 << 10
	fuzzTarget    = 32 << 10
	fuzzUntouched = 0xa5
)

// world is one connection's end, with everything real but the other relay, the NIC
// and the event loop: the fuzzer is these. There is no GPU in it, as all memory is
// the host's.
type world struct {
	t     *testing.T
	relay *Relay
	lane  *lane
	*session
	reader *ring.Client
	queue  *device.Queue
	slots  *device.Memory
	mine   *memory
	host   func(bytes uint64) *device.Memory
	tcp    bool // the other relay is on another host
	quotas [2]*eagerBuffers
	shared fuzzWindows
	ended  map[uint64]wire.Completion // by cookie
	posted map[uint64]*operation
}

// fuzzWindows are the windows mapped by both relays.
type fuzzWindows [packet.Windows][packet.WindowBytes]byte

func (f *fuzzWindows) Window(number uint64) []byte {
	if number >= packet.Windows {
		return nil
	}
	return f[number][:]
}

// deaf is a port that has closed: sent messages are dropped. And a loop that does not run.
var deaf = sync.OnceValues(func() (*packet.Port, *poll.Loop) {
	loop, err := poll.New()
	if err != nil {
		panic(err)
	}
	a, b, err := packet.Pair()
	if err != nil {
		panic(err)
	}
	unix.Close(b)
	port, err := packet.NewPort(loop, a, nil, nil)
	if err != nil {
		panic(err)
	}
	port.Close()
	return port, loop
})

func newWorld(t *testing.T) *world {
	_, loop := deaf()
	w := &world{t: t, queue: &device.Queue{}, ended: map[uint64]wire.Completion{}, posted: map[uint64]*operation{}}
	w.relay = &Relay{loop: loop, listeners: map[wire.UUID]*listener{}, regions: map[wire.UUID]*exposedRegion{},
		limits: launch.Limits{HostMemory: 1 << 20, Descriptors: 16, Memories: 16, Connections: 4}}
	w.relay.config.Generation = strings.Repeat("0", 32)
	completions, err := ring.NewRelay()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { completions.Close() })
	if w.reader, err = ring.OpenClient(completions.FDs()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.reader.Close() })
	host := func(bytes uint64) *device.Memory {
		m, err := device.CreateHost("peerlane-fuzz", bytes)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		})
		return m
	}
	w.slots = host(fuzzSlot * (fuzzSlots + 1))
	fill(w.slots, fuzzUntouched)
	staging := func() *staging {
		s := &staging{regions: []*region{{kind: wire.MemoryHost, memory: w.slots, slots: fuzzSlots, slotBytes: fuzzSlot}}}
		s.fill()
		return s
	}
	for i := range w.quotas {
		w.quotas[i] = &eagerBuffers{memory: &region{kind: wire.MemoryHost, memory: host(quotaBytes)}, free: []uint64{0}}
	}
	w.lane = &lane{relay: w.relay, push: turns{queues: []*device.Queue{w.queue}},
		pull: turns{queues: []*device.Queue{w.queue}}, out: staging(), in: staging(), ended: newDirections()}
	// A session that has ended answers nobody.
	w.session = &session{
		relay: w.relay, ring: completions, wakeClient: -1, ended: wire.Errorf(wire.StatusClosed, "the client is not there"),
		connections: map[uint32]*connection{}, waits: map[*connection]bool{}, turns: map[uint32]bool{},
		regions: map[uint32]*exposedRegion{},
		log:     logrus.NewEntry(&logrus.Logger{Out: io.Discard}),
	}
	w.session.memories = map[uint32]*memory{}
	w.host = host
	w.mine = w.memory(fuzzMemory)
	return w
}

// memory makes a further memory of the client.
func (w *world) memory(bytes uint64) *memory {
	m := &memory{
		state:   memoryExported,
		session: w.session, number: uint32(len(w.session.memories)) + 1, kind: wire.MemoryHost, lane: w.lane,
		mapped: w.host(bytes), length: bytes,
		access: wire.AccessSend | wire.AccessReceive, registrars: map[*receiver]bool{}, regions: map[*exposedRegion]bool{},
	}
	m.parts = []device.Part{{FD: -1, Bytes: bytes}}
	w.session.memories[m.number] = m
	return m
}

func bytesAt(m *device.Memory, offset, n uint64) []byte {
	return unsafe.Slice((*byte)(m.At(offset).Host), n)
}

func fill(m *device.Memory, with byte) {
	all := bytesAt(m, 0, m.Bytes)
	for i := range all {
		all[i] = with
	}
}

// route is the first byte's: staged or direct; or staged out of or into memory that the
// client copies to and from itself; or to another host, out of or into the client's host
// memory.
func (w *world) route(first int) uint32 {
	if first >= 240 && first < 250 {
		w.tcp = true
		return wire.RouteStaged
	}
	if first >= 250 {
		w.mine.staged = &clientStaging{on: &serverUsage{}}
		return wire.RouteStaged
	}
	return []uint32{wire.RouteStaged, wire.RouteDirect}[first%2]
}

// fuzzTransport carries data through slots, and in place in memory on server GPUs.
const fuzzTransport = "slots"

// connection adds a connection to the session.
func (w *world) connection(route uint32) *connection {
	c := w.opening(route)
	w.session.add(c)
	return c
}

// opening makes a connection after the handshake.
func (w *world) opening(route uint32) *connection {
	c := &connection{session: w.session, number: uint32(len(w.session.connections)) + 1, lane: w.lane, route: route,
		peer: "the fuzzer"}
	c.transport = launch.TransportLocal
	if route == wire.RouteStaged {
		c.transport, c.out, c.in = fuzzTransport, w.lane.out, w.lane.in
		if w.tcp {
			c.transport, c.quotas = launch.TransportTCP, w.quotas
		}
	}
	c.port, _ = deaf()
	c.shared = &w.shared
	return c
}

// leave ends a connection as the remote relay's death does.
func (w *world) leave(c *connection) {
	if w.tcp {
		c.lost(io.EOF)
		return
	}
	c.ended(io.EOF)
}

// region tells a sender of a receiver's memory.
func (w *world) region(number uint32, bytes uint64, fd func() int) (*wire.PeerRegion, []int) {
	m := &wire.PeerRegion{Region: number, Kind: wire.MemoryHost, Bytes: bytes}
	if w.tcp {
		m.Kind = wire.MemoryRemote
		return m, nil
	}
	return m, []int{fd()}
}

// post does a session's work for a valid descriptor.
func (w *world) post(c *connection, kind uint32, tag, offset, length uint64) *operation {
	cookie := uint64(len(w.posted) + 1)
	op := &operation{session: w.session, kind: kind, cookie: cookie, tag: tag, offset: offset, length: length,
		wait: wire.NoTimeline, signal: wire.NoTimeline}
	if status := op.bind(1, c); status != wire.StatusOK {
		w.t.Fatalf("the fuzzer posts what is not in order: %v", status)
	}
	w.posted[cookie] = op
	c.post(op)
	return op
}

// read takes the completions: one for each operation.
func (w *world) read() {
	for {
		done, ok := w.reader.Next()
		if !ok {
			return
		}
		op := w.posted[done.Cookie]
		if _, twice := w.ended[done.Cookie]; op == nil || twice {
			w.t.Fatalf("operation %d ended twice, or was never posted", done.Cookie)
		}
		if done.Length > op.length && !isList(op.kind) || op.underWay > 0 { // the length of a list is in entries
			w.t.Fatalf("operation %d of %d bytes ended with %d, and %d that touch its memory", done.Cookie, op.length,
				done.Length, op.underWay)
		}
		w.ended[done.Cookie] = done
	}
}

// copied lets the copies end that are under way.
func (w *world) copied() {
	for w.queue.Busy() {
		w.queue.Wait()
		w.queue.Poll()
	}
}

// over checks the state after the end of a connection.
func (w *world) over() {
	w.t.Helper()
	w.read()
	if len(w.session.connections) > 0 || w.mine.users > 0 || len(w.ended) != len(w.posted) {
		w.t.Fatalf("%d connections, %d users of the memory, %d of %d operations have ended", len(w.session.connections),
			w.mine.users, len(w.ended), len(w.posted))
	}
	for _, s := range []*staging{w.lane.out, w.lane.in} {
		if len(s.free) != fuzzSlots {
			w.t.Fatalf("%d of %d slots are free", len(s.free), fuzzSlots)
		}
	}
	for _, q := range w.quotas {
		if len(q.free) != 1 {
			w.t.Fatalf("%d quotas are free", len(q.free))
		}
	}
	if w.relay.used != (quota{}) {
		w.t.Fatalf("it still counts %+v", w.relay.used)
	}
	for i, b := range bytesAt(w.slots, fuzzSlots*fuzzSlot, fuzzSlot) {
		if b != fuzzUntouched {
			w.t.Fatalf("byte %d behind the last slot was written", i)
		}
	}
}

// fuzzLink is a NIC, or a copy engine, controlled by the fuzzer.
type fuzzLink struct {
	*world
	s       *sender
	memory  *memory                    // that is sent from
	said    map[uint64]*wire.PeerGrant // what the receiver has granted, by number
	sent    map[uint64]*operation      // by number
	targets map[uint32]uint64          // bytes
	remote  map[uint32]uint64          // the same, as the receiver has said, of another host
	opening []func(error)
	writes  []*fuzzWrite
	taken   map[uint64]bool // source offsets under way, of slots
	quota   uint64          // where the windows begin
	closed  bool
}

// link is that of a new sender.
func (w *world) link(route uint32, of *memory) *fuzzLink {
	l := &fuzzLink{world: w, memory: of, said: map[uint64]*wire.PeerGrant{}, sent: map[uint64]*operation{},
		targets: map[uint32]uint64{}, remote: map[uint32]uint64{}, taken: map[uint64]bool{}}
	l.s = newSender(w.connection(route), l)
	if route == wire.RouteDirect {
		l.s.windows = allWindows()
	}
	return l
}

type fuzzWrite struct {
	to   transport.Target
	op   *operation
	n    uint64
	from transport.Source
	done func(error)
}

func (l *fuzzLink) AddTarget(number, _ uint32, parts []device.Part, ready func(error)) {
	wanted := 1
	if l.tcp {
		wanted = 0
	}
	if _, there := l.targets[number]; there || l.closed || len(parts) != wanted {
		l.t.Fatalf("region %d is added twice, or to a closed link, or of %d parts", number, len(parts))
	}
	if l.tcp {
		l.targets[number] = l.remote[number]
	} else {
		l.targets[number] = parts[0].Bytes
	}
	l.opening = append(l.opening, ready)
}

func (l *fuzzLink) RemoveTarget(number uint32) {
	for _, write := range l.writes {
		if write.to.Region == number {
			l.t.Fatalf("region %d is taken back under a write", number)
		}
	}
	delete(l.targets, number)
}

func (l *fuzzLink) Write(to transport.Target, from transport.Source, n, immediate uint64, done func(error)) {
	if immediate&eagerGrant != 0 {
		l.writeEager(to, from, n, int(immediate&^eagerGrant), done)
		return
	}
	g, bytes := l.said[immediate], l.targets[to.Region]
	if g == nil || l.closed || n == 0 || g.Region != to.Region || to.Offset < g.Offset || n > g.Length ||
		to.Offset-g.Offset > g.Length-n || to.Offset > bytes || n > bytes-to.Offset {
		l.t.Fatalf("a write of %d bytes to %+v with immediate %d, whose grant is %+v, of a region of %d", n, to, immediate,
			g, bytes)
	}
	op := l.sent[g.Send]
	if op == nil || op.state == operationEnded || op.underWay == 0 {
		l.t.Fatalf("a write for message %d, which is over", g.Send)
	}
	switch {
	case (l.memory.staged != nil || l.tcp) && l.s.route == wire.RouteStaged:
		if from.Place.Host != l.memory.place(op.offset+g.Part).Host || n != g.Length {
			l.t.Fatalf("a write of %d bytes from %v, for byte %d of a message at %d", n, from.Place.Host, g.Part, op.offset)
		}
	case l.s.route == wire.RouteStaged:
		l.takeSlot(from, n)
	}
	start := op.offset + g.Part + to.Offset - g.Offset
	for i, b := range unsafe.Slice((*byte)(from.Place.Host), n) {
		if b != pattern(start+uint64(i)) {
			l.t.Fatalf("byte %d of the write for message %d is not the client's", i, g.Send)
		}
	}
	l.writes = append(l.writes, &fuzzWrite{to, op, n, from, done})
}

// writeEager writes into a free window.
func (l *fuzzLink) writeEager(to transport.Target, from transport.Source, n uint64, window int, done func(error)) {
	var of *operation
	for _, op := range l.s.active {
		if op.in == remoteWindow && op.window == window {
			if of != nil {
				l.t.Fatalf("window %d has two messages", window)
			}
			of = op
		}
	}
	if of == nil || l.closed || of.state == operationEnded || n != of.length || n > eagerBytes ||
		to.Region != eagerRegion || to.Offset != l.quota+uint64(window)*eagerBytes {
		l.t.Fatalf("a write of %d bytes to %+v in window %d of a quota at %d, for %+v", n, to, window, l.quota, of)
	}
	for i, b := range unsafe.Slice((*byte)(from.Place.Host), n) {
		if b != pattern(of.offset+uint64(i)) {
			l.t.Fatalf("byte %d of short message %d is not the client's", i, of.send)
		}
	}
	l.writes = append(l.writes, &fuzzWrite{to, of, n, from, done})
}

// inWindows checks that a window is free, or has the bytes of a single message.
func (l *fuzzLink) inWindows() {
	if l.s.route != wire.RouteDirect {
		return
	}
	used := map[uint64]bool{}
	for _, free := range l.s.windows {
		if used[free] {
			l.t.Fatalf("window %d is free twice", free)
		}
		used[free] = true
	}
	for _, op := range l.sent {
		if op.in != localWindow || l.s.isDown() { // then nobody gives windows back
			continue
		}
		if used[uint64(op.window)] || op.state == operationEnded {
			l.t.Fatalf("window %d is free, or has two messages, or one that is over: %v", op.window, op.state == operationEnded)
		}
		used[uint64(op.window)] = true
		for i, b := range l.shared[op.window][:op.length] {
			if b != pattern(op.offset+uint64(i)) {
				l.t.Fatalf("byte %d of short message %d is not the client's", i, op.send)
			}
		}
	}
	if !l.s.isDown() && len(used) != packet.Windows {
		l.t.Fatalf("%d windows are left", len(used))
	}
}

func (l *fuzzLink) Close() {
	if l.closed || len(l.writes)+len(l.opening) > 0 {
		l.t.Fatalf("the link is closed again, or under %d writes and %d mappings", len(l.writes), len(l.opening))
	}
	l.closed = true
}

// slotOffset returns where a write's source is, from the first slot on.
func (w *world) slotOffset(from transport.Source) uint64 {
	return uint64(uintptr(from.Place.Host) - uintptr(w.slots.At(0).Host))
}

// takeSlot demands that a write begins at a slot that no other write uses.
func (l *fuzzLink) takeSlot(from transport.Source, n uint64) {
	at := l.slotOffset(from)
	if at%fuzzSlot != 0 || at >= fuzzSlots*fuzzSlot || n > fuzzSlot || l.taken[at] {
		l.t.Fatalf("a write of %d bytes from slot offset %d, in use: %t", n, at, l.taken[at])
	}
	l.taken[at] = true
}

// wrote ends a write, and opened a mapping.
func (l *fuzzLink) wrote(which int, err error) {
	if len(l.writes) == 0 {
		return
	}
	which %= len(l.writes)
	write := l.writes[which]
	l.writes = append(l.writes[:which:which], l.writes[which+1:]...)
	delete(l.taken, l.slotOffset(write.from))
	if write.op.state == operationEnded {
		l.t.Fatal("an operation ended under a write of it")
	}
	write.done(err)
}

func (l *fuzzLink) opened(err error) {
	if len(l.opening) > 0 {
		ready := l.opening[0]
		l.opening = l.opening[1:]
		ready(err)
	}
}

func pattern(at uint64) byte { return byte(at*2654435761>>13) | 1 }

var errFuzz = errors.New("the fuzzer says so")

// script reads the fuzzer's next step.
type script []byte

func (s *script) next() int {
	if len(*s) == 0 {
		return 0
	}
	b := (*s)[0]
	*s = (*s)[1:]
	return int(b)
}

// near is a number that is mostly right.
func (s *script) near(right uint64) uint64 {
	switch b := s.next(); {
	case b < 200:
		return right
	case b < 240:
		return right + uint64(b-220)
	case b < 250:
		return uint64(b - 240)
	default:
		return ^uint64(0) - uint64(b-250)
	}
}

// length returns a length near the boundaries of slots.
func (s *script) length(most uint64) uint64 {
	n := uint64(s.next()) * fuzzSlot / 32
	if b := s.next(); b < 100 {
		n += uint64(b % 5)
	}
	return min(max(n, 1), most)
}

// FuzzPeerOfASender is a receiver's relay that says what it likes: messages that a
// sender knows, in any order and of any size. Nothing is written but where and
// what was granted, of slots that are the sender's, of operations that are not
// over; and when the connection is gone nothing is left, and another can send.
func FuzzPeerOfASender(f *testing.F) {
	// Two messages, a region, grants larger than a slot, and then their ends.
	f.Add([]byte{250, 0, 200, 0, 0, 100, 0, 2, 0, 0, 5, 3, 0, 0, 0, 200, 100, 0, 0, 6, 7, 0, 6, 7, 0, 6, 7, 0, 4, 0, 0})
	f.Add([]byte{240, 0, 200, 0, 0, 100, 0, 2, 0, 0, 5, 3, 0, 0, 0, 200, 100, 0, 0, 6, 7, 0, 6, 7, 0, 6, 7, 0, 4, 0, 0})
	f.Add([]byte{1, 0, 200, 0, 0, 100, 0, 2, 0, 0, 5, 3, 0, 0, 0, 200, 100, 0, 0, 6, 7, 0, 6, 7, 0, 6, 7, 0, 4, 0, 0})
	f.Add([]byte{0, 0, 100, 0, 2, 0, 0, 3, 0, 0, 0, 64, 0, 0, 0, 5, 6, 7, 0, 4, 0, 0})
	// Direct: ten short messages, of which eight find a window; the steps deliver, refuse, grant,
	// and send a message.
	ten := []byte{1}
	for range 10 {
		ten = append(ten, 0, 3, 0, 0)
	}
	f.Add(append(ten, 4, 218, 0, 4, 217, 255, 2, 0, 0, 0, 5, 0, 3, 216, 0, 0, 3, 0, 0, 0, 0, 7, 0, 4, 216, 0, 0, 3, 0, 0))
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) > 512 {
			return
		}
		do := script(text)
		w := newWorld(t)
		all := bytesAt(w.mine.mapped, 0, fuzzMemory)
		for i := range all {
			all[i] = pattern(uint64(i))
		}
		region, err := device.CreateHost("peerlane-fuzz", fuzzTarget)
		if err != nil {
			t.Fatal(err)
		}
		defer region.Close()
		fd, err := region.Export()
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		route := w.route(do.next())
		connect := func(route uint32) *fuzzLink { return w.link(route, w.mine) }
		l := connect(route)
		s := l.s
		hear := func(m wire.Message, fds ...int) {
			if !s.portOpen() {
				return
			}
			s.receive(m, 0, fds)
		}
		duplicate := func() int {
			again, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
			if err != nil {
				t.Fatal(err)
			}
			return again
		}
		for len(do) > 0 {
			switch do.next() % 13 {
			case 12:
				m := &wire.PeerQuota{Region: uint32(do.near(eagerRegion)), Windows: uint32(do.near(eagerWindows)),
					Bytes: do.near(eagerBytes), Offset: uint64(do.next()) * 64}
				if s.eager == nil {
					l.quota = m.Offset
				}
				hear(m)
			case 0, 1:
				if !s.isDown() && len(w.posted) < 64 {
					length := do.length(fuzzMemory)
					op := w.post(s.connection, wire.OpSend, 0, uint64(do.next())%(fuzzMemory-length+1), length)
					l.sent[op.send] = op
				}
			case 2:
				number, bytes := uint32(do.next()%3), do.near(fuzzTarget)
				m, fds := w.region(number, bytes, duplicate)
				if _, there := l.targets[number]; !there {
					l.remote[number] = bytes
				}
				switch b := do.next(); {
				case b < 240:
					hear(m, fds...)
				case b < 250: // a descriptor less, or a kind that is not its own
					packet.CloseAll(fds)
					m.Kind = wire.MemoryHost
					hear(m)
				default: // one too many
					hear(m, append(fds, duplicate())...)
				}
			case 3:
				send := do.near(max(1, s.last))
				op := s.active[send]
				m := &wire.PeerGrant{Send: send, Grant: do.near(s.granting + 1), Region: uint32(do.next() % 3)}
				if op != nil {
					m.Part, m.Length = do.near(op.granted), do.near(min(op.length-op.granted, do.length(fuzzMemory)))
				}
				m.Offset = do.near(uint64(do.next()) * 64)
				if l.said[m.Grant] == nil {
					l.said[m.Grant] = m
				}
				hear(m)
			case 4:
				m := &wire.PeerDelivered{Send: do.near(max(1, s.last))}
				if do.next() > 200 {
					m.Status = uint32(wire.StatusTruncated)
				}
				hear(m)
			case 5:
				if do.next() < 240 {
					l.opened(nil)
				} else {
					l.opened(errFuzz)
				}
			case 6:
				w.copied()
			case 7:
				which := do.next()
				if which < 250 {
					l.wrote(which, nil)
				} else {
					l.wrote(which, errFuzz)
				}
			case 8:
				hear(&wire.PeerForget{Region: uint32(do.next() % 3)})
			case 9:
				if cookie := uint64(do.next()); w.posted[cookie] != nil {
					s.cancel(cookie)
				}
			case 10:
				switch do.next() {
				case 1:
					hear(&wire.PeerClose{Status: uint32(do.next())})
				case 2:
					hear(&wire.PeerSend{Send: 1, Length: 8})
				case 3:
					hear(&wire.PeerWritten{Grant: 1})
				case 4:
					if s.portOpen() {
						w.leave(s.connection)
					}
				}
			case 11:
				w.read()
			}
			l.inWindows()
			if s.underWay < 0 || len(s.targets) > wire.MaxMemories {
				t.Fatalf("%d under way, %d targets", s.underWay, len(s.targets))
			}
		}
		finish := func(l *fuzzLink) {
			for len(l.opening)+len(l.writes) > 0 || w.queue.Busy() {
				w.copied()
				l.opened(nil)
				l.wrote(0, nil)
			}
		}
		finish(l)
		if s.portOpen() {
			w.leave(s.connection)
		}
		finish(l)
		if !l.closed {
			t.Fatal("the link is still open")
		}
		w.over()

		// Another connection of the lane sends through the same slots.
		next := connect(wire.RouteStaged)
		op := w.post(next.s.connection, wire.OpSend, 0, 7, 3*fuzzSlot+5)
		next.sent[op.send] = op
		m, fds := w.region(1, fuzzTarget, duplicate)
		next.remote[1] = fuzzTarget
		next.s.receive(m, 0, fds)
		next.said[1] = &wire.PeerGrant{Send: 1, Grant: 1, Length: op.length, Region: 1}
		next.s.receive(next.said[1], 0, nil)
		finish(next)
		next.s.receive(&wire.PeerDelivered{Send: 1}, 0, nil)
		w.read()
		if done := w.ended[op.cookie]; done.Length != op.length || done.Status != uint32(wire.StatusOK) {
			t.Fatalf("another connection's message of %d bytes ended with %+v", op.length, done)
		}
		w.leave(next.s.connection)
		w.over()
	})
}

// fuzzArrivals are of a transport that the fuzzer plays.
type fuzzArrivals struct{}

func (fuzzArrivals) AddMemory(uint32, *device.Memory) error     { return nil }
func (fuzzArrivals) RemoveMemory(uint32)                        {}
func (fuzzArrivals) Grant(uint64, uint32, uint64, uint64) error { return nil }
func (fuzzArrivals) Renew(uint64, uint32, uint64, uint64) error { return nil }
func (fuzzArrivals) Close()                                     {}

// FuzzPeerOfAReceiver sends arbitrary messages of a sender's relay and a NIC. The receiver grants
// nothing twice or beyond a slot or a posted receive, writes only received bytes, and the end of
// the connection leaves no resource.
func FuzzPeerOfAReceiver(f *testing.F) {
	f.Add([]byte{0, 0, 0, 100, 0, 1, 1, 0, 0, 0, 100, 0, 0, 3, 0, 200, 3, 0, 200, 4, 5, 5})
	f.Add([]byte{1, 1, 0, 0, 100, 0, 0, 0, 0, 0, 100, 0, 0, 6, 0, 5})
	f.Add([]byte{240, 0, 0, 100, 0, 1, 1, 0, 0, 0, 100, 0, 0, 3, 0, 200, 3, 0, 200, 6, 0, 4, 5, 5})
	f.Add([]byte{250, 0, 0, 100, 0, 1, 1, 0, 0, 0, 100, 0, 0, 3, 0, 200, 3, 0, 200, 6, 0, 4, 5, 5})
	// Direct: a short message, its receive; a receive, its short message; one that does not fit;
	// one into a window that there is not.
	f.Add([]byte{1, 8, 0, 0, 20, 200, 0, 0, 0, 1, 30, 0, 0, 1, 30, 200, 0, 8, 0, 0, 20, 200, 0, 3, 0, 8, 0, 2, 30, 200,
		0, 1, 0, 1, 2, 200, 2, 5, 8, 0, 0, 20, 200, 0, 8, 0})
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) > 512 {
			return
		}
		do := script(text)
		w := newWorld(t)
		fill(w.mine.mapped, fuzzUntouched)
		route := w.route(do.next())
		r := newReceiver(w.connection(route))
		if w.tcp {
			r.writes = fuzzArrivals{}
			if err := r.offerQuota(); err != nil {
				t.Fatal(err)
			}
		}
		inWindow := func(window int, send uint64) {
			to := bytesAt(w.quotas[1].memory.memory, uint64(window)*eagerBytes, eagerBytes)
			for i := range to {
				to[i] = pattern(send<<20 + uint64(i))
			}
		}
		hear := func(m wire.Message) {
			if r.portOpen() {
				r.receive(m, 0, nil)
			}
		}
		sent := map[uint64]uint64{} // lengths, by number
		of := map[*operation]uint64{}
		spoiled := map[uint64]bool{} // messages whose window another came into
		// meets notes which message and which receive meet.
		meets := func(step func() *operation) {
			arrivals, receives := slices.Clone(r.arrivals), slices.Clone(r.receives)
			posted := step()
			if r.isDown() {
				return
			}
			for _, a := range arrivals {
				if posted != nil && !slices.Contains(r.arrivals, a) {
					of[posted] = a.send
				}
			}
			for _, op := range receives {
				if !slices.Contains(r.receives, op) {
					of[op] = r.announced
				}
			}
		}
		var next uint64 // the place of the next receive, with a guard behind each
		for len(do) > 0 {
			switch do.next() % 10 {
			case 8:
				m := &wire.PeerEager{Send: do.near(r.announced + 1), Tag: uint64(do.next() % 3), Length: do.length(eagerBytes),
					Window: uint32(do.next() % (eagerWindows + 1))}
				if r.eager != nil && m.Window < eagerWindows {
					if before := r.eager.windows[m.Window]; before.arrived > 0 && before.arrival == nil {
						m.Length = do.near(before.arrived)
						inWindow(int(m.Window), m.Send)
					}
				}
				if route == wire.RouteDirect {
					if m.Window = uint32(do.next() % (packet.Windows + 1)); m.Window < packet.Windows {
						for _, a := range r.arrivals {
							spoiled[a.send] = spoiled[a.send] || a.short != nil && &a.short[0] == &w.shared[m.Window][0]
						}
						for i := range w.shared[m.Window] {
							w.shared[m.Window][i] = pattern(m.Send<<20 + uint64(i))
						}
					}
					m.Length = do.near(m.Length)
				}
				if m.Send == r.announced+1 {
					sent[m.Send] = m.Length
				}
				meets(func() *operation { hear(m); return nil })
			case 9:
				window, n := do.next()%(eagerWindows+1), do.length(eagerBytes)
				if r.eager != nil && window < eagerWindows && r.eager.windows[window].arrived == 0 {
					send := r.announced + 1
					if a := r.eager.windows[window].arrival; a != nil {
						send, n = a.send, do.near(a.length)
					}
					inWindow(window, send)
				}
				if !r.immediateEnd && w.tcp {
					r.immediate(eagerGrant|uint64(window), n)
				}
			case 0:
				m := &wire.PeerSend{Send: do.near(r.announced + 1), Tag: uint64(do.next() % 3), Length: do.length(fuzzMemory)}
				if do.next() > 250 {
					m.Length = do.near(0)
				}
				if m.Send == r.announced+1 {
					sent[m.Send] = m.Length
				}
				hear(m)
			case 1:
				length := do.length(3 * fuzzSlot)
				if !r.isDown() && next+length+64 <= fuzzMemory {
					meets(func() *operation { return w.post(r.connection, wire.OpReceive, uint64(do.next()%3), next, length) })
					next += length + 64
				}
			case 2:
				hear(&wire.PeerWithdraw{Send: do.near(max(1, r.announced))})
			case 3:
				number := do.near(uint64(do.next()) % (r.lastGrant + 1))
				n := uint64(do.next()) * 32
				if g := r.grants[number]; g != nil && route == wire.RouteStaged {
					n = do.near(min(n, g.length-g.filled))
					if n > 0 && n <= g.length-g.filled { // what a NIC writes, it writes where it was granted
						to := bytesAt(w.mine.mapped, g.arrival.op.offset+g.part+g.filled, n)
						if g.slot != nil {
							to = bytesAt(w.slots, g.slot.offset+g.filled, n)
						}
						for i := range to {
							to[i] = pattern(g.arrival.send<<20 + g.part + g.filled + uint64(i))
						}
					}
				}
				if !r.immediateEnd {
					r.immediate(number, n)
				}
			case 4:
				w.copied()
			case 5:
				w.read()
			case 6:
				number := do.near(uint64(do.next()) % (r.lastGrant + 1))
				if g := r.grants[number]; g != nil && route == wire.RouteDirect {
					to := bytesAt(w.mine.mapped, g.arrival.op.offset, g.length)
					for i := range to {
						to[i] = pattern(g.arrival.send<<20 + uint64(i))
					}
				}
				hear(&wire.PeerWritten{Grant: number})
			case 7:
				switch do.next() {
				case 1:
					hear(&wire.PeerClose{})
				case 2:
					hear(&wire.PeerGrant{Send: 1})
				case 3:
					if r.portOpen() {
						w.leave(r.connection)
					}
				case 4:
					if r.isDown() && !r.immediateEnd {
						r.landingsEnded()
					}
				case 5:
					if cookie := uint64(do.next()); w.posted[cookie] != nil {
						r.cancel(cookie)
					}
				}
			}
			taken := map[uint64]bool{}
			for _, g := range r.grants {
				a := g.arrival
				if g.length == 0 || a.op == nil || a.op.state == operationEnded && !r.isDown() || g.part > a.length ||
					g.length > a.length-g.part || a.length > a.op.length || g.filled > g.length {
					t.Fatalf("grant %+v of message %+v", g, a)
				}
				of[a.op] = a.send
				if g.slot != nil {
					if g.length > fuzzSlot || taken[g.slot.offset] {
						t.Fatalf("%d bytes are granted of slot %d, for another message as well: %t", g.length, g.slot.offset,
							taken[g.slot.offset])
					}
					taken[g.slot.offset] = true
				}
			}
			for _, free := range w.lane.in.free {
				if taken[free.offset] {
					t.Fatalf("slot %d is granted, and free", free.offset)
				}
			}
			if len(r.arrivals) > wire.RingEntries {
				t.Fatalf("%d messages wait", len(r.arrivals))
			}
		}
		w.copied()
		if r.portOpen() {
			w.leave(r.connection)
		}
		if !r.immediateEnd {
			r.landingsEnded()
		}
		w.copied()
		w.over()
		expect := make([]byte, fuzzMemory)
		for i := range expect {
			expect[i] = fuzzUntouched
		}
		for _, op := range w.posted {
			got := bytesAt(w.mine.mapped, op.offset, op.length)
			if w.ended[op.cookie].Status == uint32(wire.StatusOK) {
				if n := w.ended[op.cookie].Length; n != 0 && n != sent[of[op]] {
					t.Fatalf("a message of %d bytes was received as %d", sent[of[op]], n)
				}
				for i := range w.ended[op.cookie].Length {
					if got[i] != pattern(of[op]<<20+i) && !spoiled[of[op]] {
						t.Fatalf("byte %d of message %d is wrong", i, of[op])
					}
				}
			}
			copy(expect[op.offset:op.offset+op.length], got)
		}
		for i, b := range bytesAt(w.mine.mapped, 0, fuzzMemory) {
			if b != expect[i] {
				t.Fatalf("byte %d was written, which nobody receives", i)
			}
		}
	})
}
