package relay

import (
	"bytes"
	"os"
	"slices"
	"sort"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// listMemory makes list memory, as for a client.
func (w *world) listMemory() {
	fd, err := unix.MemfdCreate("peerlane-fuzz-lists", unix.MFD_CLOEXEC)
	if err != nil {
		w.t.Fatal(err)
	}
	w.session.lists = os.NewFile(uintptr(fd), "peerlane-fuzz-lists")
	w.t.Cleanup(func() { w.session.lists.Close() })
	if err := w.session.lists.Truncate(int64(wire.MaxListEntries * entryBytes)); err != nil {
		w.t.Fatal(err)
	}
}

// postList writes a list into the session's list memory and posts the operation, as a session does for
// a client's descriptor.
func (w *world) postList(c *connection, kind uint32, list []wire.ListEntryLayout) *operation {
	memory := unsafe.Slice((*byte)(unsafe.Pointer(&list[0])), uint64(len(list))*entryBytes)
	if _, err := w.session.lists.WriteAt(memory, 0); err != nil {
		w.t.Fatal(err)
	}
	op := &operation{
		session: w.session, kind: kind, cookie: uint64(len(w.posted) + 1), length: uint64(len(list)), wait: wire.NoTimeline,
		signal: wire.NoTimeline,
	}
	if status := op.bindList(c); status != wire.StatusOK {
		w.t.Fatalf("the fuzzer posts a list that is not in order: %v", status)
	}
	w.posted[op.cookie] = op
	c.post(op)
	return op
}

// entries are a list of the fuzzer's, mostly in order.
func (s *script) entries() []wire.ListEntryLayout {
	list := make([]wire.ListEntryLayout, 1+s.next()%40)
	if s.next() > 240 { // several parts
		list = make([]wire.ListEntryLayout, wire.PartEntries+len(list))
	}
	step, length := uint64(s.next()), 1+uint64(s.next())
	for i := range list {
		list[i] = wire.ListEntryLayout{Memory: 1, Offset: uint64(i) * step % (fuzzMemory - 256), Length: length,
			At: uint64(i) * length, Key: wire.UUID{1}}
	}
	if b := s.next(); b > 200 {
		e := &list[b%len(list)]
		e.Memory, e.Offset, e.Length, e.Key[0] = uint32(s.near(1)), s.near(e.Offset), s.near(e.Length), byte(s.near(1))
	}
	return list
}

// fuzzListLink is fuzzLink for messages of several pieces.
type fuzzListLink struct {
	*fuzzLink
	open map[uint64][]grantedRange // on route direct, by grant
}

// listLink is that of a new sender.
func (w *world) listLink(route uint32, of *memory) *fuzzListLink {
	l := &fuzzListLink{fuzzLink: w.link(route, of), open: map[uint64][]grantedRange{}}
	delete(w.session.connections, l.s.number)
	l.s = newSender(w.connection(route), l)
	l.s.version = wire.ListVersion
	if route == wire.RouteDirect {
		l.s.windows = allWindows()
	}
	return l
}

// of is the part of a list under a number.
func (l *fuzzListLink) of(number uint64) *operation {
	op := l.s.active[number]
	if op == nil { // refused since it was granted
		op = l.sent[number]
	}
	if op == nil || op.pieces == nil || op.state == operationEnded || op.underWay == 0 {
		l.t.Fatalf("a write for message %d, which is over, or no list's", number)
	}
	return op
}

// wants is the byte of the client's memory that a message has at a place.
func wants(op *operation, at uint64) byte {
	list := op.pieces.list
	p := list[sort.Search(len(list), func(i int) bool { return list[i].start > at })-1]
	return pattern(p.offset + at - p.start)
}

func (l *fuzzListLink) Write(to transport.Target, from transport.Source, n, immediate uint64, done func(error)) {
	g := l.said[immediate]
	if g == nil || l.closed || n == 0 || g.Region != to.Region || to.Offset < g.Offset || n > g.Length ||
		to.Offset-g.Offset > g.Length-n || to.Offset > l.targets[to.Region] || n > l.targets[to.Region]-to.Offset {
		l.t.Fatalf("a write of %d bytes to %+v with immediate %d, whose grant is %+v", n, to, immediate, g)
	}
	op := l.of(g.Send)
	l.takeSlot(from, n)
	for i, b := range unsafe.Slice((*byte)(from.Place.Host), n) {
		if at := g.Part + to.Offset - g.Offset + uint64(i); b != wants(op, at) {
			l.t.Fatalf("byte %d of list message %d is not the client's", at, g.Send)
		}
	}
	l.writes = append(l.writes, &fuzzWrite{to, op, n, from, done})
}

func (l *fuzzListLink) WriteList(list []transport.Copy, immediate uint64, done func(error)) {
	g := l.said[immediate]
	if g == nil || l.closed {
		l.t.Fatalf("a list of %d copies for grant %d, which nobody gave", len(list), immediate)
	}
	op := l.of(g.Send)
	at := uint64(0)
	for _, r := range l.open[immediate] { // range by range, without gaps
		for done := uint64(0); done < r.length; {
			if len(list) == 0 {
				l.t.Fatalf("copies of message %d end at byte %d of %d", g.Send, at, op.length)
			}
			c := list[0]
			if list = list[1:]; c.Bytes == 0 || c.Bytes > r.length-done || c.To.Region != r.target.region ||
				c.To.Offset != r.at+done || c.To.Offset+c.Bytes > l.targets[c.To.Region] {
				l.t.Fatalf("a copy of %d bytes to %+v, for byte %d of %+v", c.Bytes, c.To, done, r)
			}
			for i, b := range unsafe.Slice((*byte)(c.From.Host), c.Bytes) {
				if b != wants(op, at+uint64(i)) {
					l.t.Fatalf("byte %d of list message %d is not the client's", at+uint64(i), g.Send)
				}
			}
			at, done = at+c.Bytes, done+c.Bytes
		}
	}
	if len(list) > 0 || at != op.length {
		l.t.Fatalf("%d copies of message %d lie beside its ranges", len(list), g.Send)
	}
	l.writes = append(l.writes, &fuzzWrite{to: transport.Target{Region: 1}, op: op, done: done})
}

// learn has the sender hear of a region, which is mapped at once.
func (l *fuzzListLink) learn(do *script, duplicate func() int) {
	if !l.s.portOpen() {
		return
	}
	m, fds := l.region(1, do.near(fuzzTarget), duplicate)
	if _, there := l.targets[1]; !there {
		l.remote[1] = m.Bytes
	}
	l.s.receive(m, 0, fds)
	l.opened(nil)
}

// grants gives the sender a mostly valid grant for a part of a list.
func (l *fuzzListLink) grants(do *script) {
	s := l.s
	send := do.near(max(1, uint64(do.next())%(s.last+1)))
	op := s.active[send]
	if op != nil {
		l.sent[send] = op
	}
	m := &wire.PeerGrant{Send: send, Grant: do.near(s.granting + 1), Region: 1}
	if s.route == wire.RouteStaged {
		m.Offset = do.near(uint64(do.next()) * 64)
		if op != nil {
			m.Part, m.Length = do.near(op.granted), do.near(min(op.length-op.granted, do.length(fuzzMemory)))
		}
		if l.said[m.Grant] == nil {
			l.said[m.Grant] = m
		}
		s.receive(m, 0, nil)
		return
	}
	m.Region = wire.ListRegion
	if op != nil {
		m.Length = do.near(op.length)
		left, piece := op.length, 1+uint64(do.next())*8
		for at := uint64(0); left > 0 && at < 16; at++ {
			ranges := &wire.PeerGrantRanges{Region: uint32(do.near(1))}
			for ; left > 0 && ranges.Count < wire.MessageRanges; ranges.Count++ {
				n := min(left, piece)
				ranges.Range[ranges.Count] = wire.Range{At: do.near(uint64(ranges.Count) * 32), Length: n}
				left -= n
			}
			s.receive(ranges, 0, nil)
		}
	}
	if l.said[m.Grant] == nil {
		l.said[m.Grant], l.open[m.Grant] = m, s.listing.ranges
	}
	if s.portOpen() {
		s.receive(m, 0, nil)
	}
}

// fillsList is fills for a message of several pieces.
func (w *world) fillsList(r *receiver, do *script, what func(op *operation, at uint64) byte) {
	number := do.near(uint64(do.next()) % (r.lastGrant + 1))
	if g := r.grants[number]; g != nil {
		op := g.arrival.op
		if r.route == wire.RouteStaged {
			if n := min(g.length-g.filled, do.near(g.length)); n > 0 && !r.immediateEnd {
				to := bytesAt(w.slots, g.slot.offset+g.filled, n)
				for i := range to {
					to[i] = what(op, g.part+g.filled+uint64(i))
				}
				r.immediate(number, n)
			}
			return
		}
		for _, p := range op.pieces.list {
			for i := range p.length {
				bytesAt(p.memory.mapped, p.memory.offset+p.offset+i, 1)[0] = what(op, p.start+i)
			}
		}
	}
	if r.portOpen() && r.route == wire.RouteDirect {
		r.receive(&wire.PeerWritten{Grant: number}, 0, nil)
	}
}

// FuzzPeerOfAListReader sends arbitrary messages and completions, as a hostile owner's relay and
// NIC, to a relay whose client reads and writes lists. Read bytes must land at their entries,
// written bytes must come from their entries, a list must complete once, and no resource may
// remain.
func FuzzPeerOfAListReader(f *testing.F) {
	read, write := []byte{0, 1, 3, 0, 100, 50, 0, 4, 5, 1, 0, 0, 0}, []byte{0, 0, 3, 0, 100, 50, 0, 2, 0}
	fillSlot, fillDirect := []byte{6, 1, 0, 0, 8}, []byte{6, 1, 0, 8}
	grantSlot, grantDirect := []byte{3, 1, 0, 0, 0, 0, 0, 255, 200, 0, 8, 9, 0, 7, 0, 0}, []byte{3, 1, 0, 0, 0, 10, 0, 0,
		0, 0, 9, 0, 7, 0, 0}
	for _, route := range []byte{0, 240} {
		f.Add(slices.Concat([]byte{route}, read, fillSlot, write, grantSlot))
	}
	f.Add(slices.Concat([]byte{1}, read, fillDirect, write, grantDirect))
	// Several parts; a list with an entry that is wrong; a cancellation; refusals.
	f.Add([]byte{1, 0, 0, 20, 255, 3, 7, 0, 11, 1, 0, 1, 20, 255, 3, 7, 255, 0, 250, 250, 0, 10, 0, 5, 0, 0, 4, 10, 0, 5,
		0, 1, 0, 12, 6})
	f.Add([]byte{0, 0, 1, 20, 255, 3, 7, 0, 12, 1, 0, 0, 20, 255, 3, 7, 0, 12, 3})
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) > 512 {
			return
		}
		r := newListReader(t, script(text))
		acts := []func(){
			r.posts, r.isRefused, r.learnsRegion, r.isGranted, r.hasReverseConnection, r.hearsOfData, r.isFilled, r.isDelivered,
			r.copied, r.wrote, r.listIsRefused, r.cancels, r.hearsOther,
		}
		for len(r.do) > 0 {
			acts[r.do.next()%len(acts)]()
			s := r.s
			if s.listing.parts > wire.PartsAtOnce || r.session.listParts != s.listing.parts ||
				len(s.listing.ranges) > wire.PartEntries {
				t.Fatalf("%d parts of the connection, %d of the session, %d ranges", s.listing.parts, r.session.listParts,
					len(s.listing.ranges))
			}
		}
		r.end()
	})
}

// listReader is the world of FuzzPeerOfAListReader.
type listReader struct {
	*fuzzListLink
	do        script
	duplicate func() int
	route     uint32
	back      *receiver
}

func newListReader(t *testing.T, do script) *listReader {
	w := newWorld(t)
	w.listMemory()
	patterned(w.mine.mapped)
	duplicate := w.foreign()
	route := w.route(do.next())
	w.mine.staged = nil
	return &listReader{fuzzListLink: w.listLink(route, w.mine), do: do, duplicate: duplicate, route: route}
}

// hear has the sender hear a message.
func (r *listReader) hear(m wire.Message) {
	if r.s.portOpen() {
		r.s.receive(m, 0, nil)
	}
}

func (r *listReader) posts() {
	kind := []uint32{wire.OpWriteList, wire.OpReadList}[r.do.next()%2]
	list := r.do.entries()
	if !r.s.isDown() && len(r.posted) < 16 {
		r.postList(r.s.connection, kind, list)
	}
}

func (r *listReader) isRefused() {
	r.hear(&wire.PeerReadRefused{Read: r.do.near(max(1, r.s.reading.last)),
		Status: uint32(r.do.near(uint64(wire.StatusBadKey)))})
}

func (r *listReader) learnsRegion() { r.learn(&r.do, r.duplicate) }

func (r *listReader) isGranted() {
	if r.s.portOpen() {
		r.grants(&r.do)
	}
}

func (r *listReader) hasReverseConnection() {
	if b := r.s.reading.back; b == nil || !b.listener.expects() {
		return
	}
	r.back = newReceiver(r.connection(r.route))
	r.back.hidden, r.back.version = true, wire.ListVersion
	if r.tcp {
		r.back.writes = fuzzArrivals{}
	}
	r.s.reverseOpened(r.back)
}

func (r *listReader) hearsOfData() {
	m := &wire.PeerReadData{Read: r.do.near(max(1, uint64(r.do.next())%(r.s.reading.last+1)))}
	if r.back == nil || !r.back.portOpen() {
		return
	}
	m.Send = r.do.near(r.back.announced + 1)
	if op := r.s.reading.asked[m.Read]; op != nil {
		m.Length = r.do.near(op.length)
	}
	r.back.receive(m, 0, nil)
}

func (r *listReader) isFilled() {
	if r.back != nil {
		r.fillsList(r.back, &r.do, wants)
	}
}

func (r *listReader) isDelivered() {
	m := &wire.PeerDelivered{Send: r.do.near(max(1, r.s.last))}
	if r.do.next() > 200 {
		m.Status = uint32(wire.StatusBadKey)
	}
	r.hear(m)
}

func (r *listReader) wrote() {
	if which := r.do.next(); which > 250 {
		r.fuzzLink.wrote(which, errFuzz)
	} else {
		r.fuzzLink.wrote(which, nil)
	}
}

func (r *listReader) listIsRefused() {
	m := &wire.PeerListRefused{Number: r.do.near(max(1, r.s.last)), Position: uint64(r.do.next()),
		Status: uint32(r.do.near(uint64(wire.StatusOutOfRange)))}
	if r.do.next()%2 == 1 {
		m.Number, m.Reads = r.do.near(max(1, r.s.reading.last)), 1
	}
	r.hear(m)
}

func (r *listReader) cancels() {
	if cookie := uint64(r.do.next()); r.posted[cookie] != nil {
		r.s.cancel(cookie)
	}
}

func (r *listReader) hearsOther() {
	switch r.do.next() {
	case 1:
		r.hear(&wire.PeerBackRefused{Status: uint32(r.do.near(uint64(wire.StatusLimit)))})
	case 2:
		r.hear(&wire.PeerClose{})
	case 3:
		if r.s.portOpen() {
			r.leave(r.s.connection)
		}
	case 4:
		if r.back != nil && r.back.portOpen() {
			r.leave(r.back.connection)
		}
	case 5:
		r.hear(&wire.PeerRanges{Count: 1})
	case 6:
		r.read()
	}
}

// end ends the connection, and demands that nothing is left.
func (r *listReader) end() {
	r.finish()
	if r.s.portOpen() {
		r.leave(r.s.connection)
	}
	r.finish()
	if r.back != nil {
		r.ends(r.back)
	}
	r.over()
	if r.session.listParts > 0 || len(r.s.listing.lists) > 0 {
		r.t.Fatalf("%d parts and %d lists are left", r.session.listParts, len(r.s.listing.lists))
	}
	for i, b := range bytesAt(r.mine.mapped, 0, fuzzMemory) {
		if b != pattern(uint64(i)) {
			r.t.Fatalf("byte %d is another's", i)
		}
	}
}

// FuzzPeerOfAListOwner sends arbitrary messages, as a hostile relay whose client reads and writes
// lists, to the relay of a client that exposed memory. No byte outside the regions, or after their
// revocation, may be written or read, and no resource may remain.
func FuzzPeerOfAListOwner(f *testing.F) {
	write, read := []byte{0, 3, 0, 0, 40, 10, 0, 1, 0, 0, 0}, []byte{0, 3, 0, 1, 40, 10, 0, 3, 0, 0, 0, 5, 7, 0}
	fillSlot, fillDirect := []byte{2, 1, 0, 0, 4}, []byte{2, 1, 0, 4}
	grantSlot, grantDirect := []byte{6, 1, 0, 0, 0, 0, 0, 255, 200, 0, 4, 8, 0, 0}, []byte{6, 1, 0, 0, 0, 10, 0, 0, 8, 0,
		0}
	for _, route := range []byte{0, 240} {
		f.Add(slices.Concat([]byte{route}, write, fillSlot, read, grantSlot, []byte{9, 0, 9, 1}))
	}
	f.Add(slices.Concat([]byte{1}, write, fillDirect, read, grantDirect, []byte{9, 0, 9, 1}))
	// A range beyond the region, the wrong access, and a revocation under a write.
	f.Add(slices.Concat([]byte{1, 0, 3, 0, 0, 40, 10, 221, 255, 0, 0, 1, 0, 0, 0, 0, 3, 0, 1, 40, 10, 0, 1, 0, 0, 0},
		write, []byte{9, 0}, fillDirect))
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) > 512 {
			return
		}
		o := newListOwner(t, script(text))
		acts := []func(){
			o.hearsRanges, o.hearsOfWrite, o.isFilled, o.hearsOfRead, o.copied, o.hasReverseConnection, o.isGranted,
			o.learnsRegion,
			o.wrote, o.other,
		}
		for len(o.do) > 0 {
			acts[o.do.next()%len(acts)]()
			o.look()
		}
		o.end()
	})
}

// Regions of a list owner: length bytes at first, of memories of whole bytes.
const ownerFirst, ownerLength, ownerWhole = 4096, 8192, 16384

// listOwner is the world of FuzzPeerOfAListOwner.
type listOwner struct {
	*world
	do             script
	duplicate      func() int
	route          uint32
	r              *receiver
	shown, written *memory
	regions        [2]*exposedRegion // of written and shown
	left           []byte            // in written, when its region was revoked
	back           *fuzzListLink
	reads, sum     uint64 // of list messages; bytes of ranges that were sent
	count          uint32 // of those ranges
}

func newListOwner(t *testing.T, do script) *listOwner {
	w := newWorld(t)
	o := &listOwner{world: w, duplicate: w.foreign()}
	o.route = w.route(do.next())
	o.do = do
	w.mine.staged = nil
	o.r = newReceiver(w.connection(o.route))
	o.r.version, o.r.back = wire.ListVersion, &reverseConnection{}
	if w.tcp {
		o.r.writes = fuzzArrivals{}
	}
	o.shown, o.written = w.memory(ownerWhole), w.memory(ownerWhole)
	patterned(o.shown.mapped)
	fill(o.written.mapped, fuzzUntouched)
	o.regions = [2]*exposedRegion{o.region(o.written, 1, wire.RemoteWrite), o.region(o.shown, 2, wire.RemoteRead)}
	o.regions[0].gone = func() { o.left = bytes.Clone(bytesAt(o.written.mapped, 0, ownerWhole)) }
	return o
}

func (o *listOwner) region(m *memory, key byte, access uint32) *exposedRegion {
	of := &exposedRegion{
		number: o.session.number(), key: wire.UUID{key}, memory: m, offset: ownerFirst, length: ownerLength, access: access,
		connection: o.r.number,
	}
	o.session.regions[of.number], o.relay.regions[of.key], m.regions[of] = of, of, true
	return of
}

// hear has the receiver hear a message.
func (o *listOwner) hear(m wire.Message) {
	if o.r.portOpen() {
		o.r.receive(m, 0, nil)
	}
}

func (o *listOwner) hearsRanges() {
	do := &o.do
	m := &wire.PeerRanges{Count: uint32(do.near(uint64(do.next() % (wire.MessageRanges + 1)))),
		Key: wire.UUID{1 + byte(do.next())%2}}
	step, n := uint64(do.next()), 1+uint64(do.next())
	for i := range min(m.Count, wire.MessageRanges) {
		m.Range[i] = wire.Range{At: uint64(i) * step % (ownerLength - 256), Length: n}
		o.sum += n
	}
	if b := do.next(); b > 220 {
		at := &m.Range[b%wire.MessageRanges]
		o.sum -= at.Length
		at.At, at.Length, m.Key[0] = do.near(ownerLength-at.Length), do.near(at.Length), byte(do.near(1))
		o.sum += at.Length
	}
	o.count += m.Count
	o.hear(m)
}

func (o *listOwner) hearsOfWrite() {
	o.hear(&wire.PeerWriteList{Send: o.do.near(o.r.announced + 1), Length: o.do.near(o.sum),
		Ranges: uint32(o.do.near(uint64(o.count)))})
	o.sum, o.count = 0, 0
}

func (o *listOwner) isFilled() { o.fillsList(o.r, &o.do, func(*operation, uint64) byte { return 7 }) }

func (o *listOwner) hearsOfRead() {
	o.reads++
	o.hear(&wire.PeerReadList{Read: o.do.near(o.reads), Length: o.do.near(o.sum),
		Ranges: uint32(o.do.near(uint64(o.count)))})
	o.sum, o.count = 0, 0
}

func (o *listOwner) hasReverseConnection() {
	if o.back == nil && !o.r.isDown() {
		o.back = o.listLink(o.route, o.shown)
		o.back.s.hidden = true
		o.r.pair(o.back.s.connection)
		o.r.opened(o.r.back, o.back.s)
	}
}

func (o *listOwner) isGranted() {
	if o.back != nil && o.back.s.portOpen() {
		o.back.grants(&o.do)
	}
}

func (o *listOwner) learnsRegion() {
	if o.back != nil {
		o.back.learn(&o.do, o.duplicate)
	}
}

func (o *listOwner) wrote() {
	if o.back == nil {
		return
	}
	o.back.wrote(o.do.next(), nil)
	if o.back.s.portOpen() {
		o.back.s.receive(&wire.PeerDelivered{Send: o.do.near(max(1, o.back.s.last))}, 0, nil)
	}
}

func (o *listOwner) other() {
	switch which := o.do.next(); which {
	case 0, 1:
		if of := o.regions[which]; of.state == lifeLive {
			of.revoke()
		}
	case 2:
		o.hear(&wire.PeerClose{})
	case 3:
		if o.back != nil && o.back.s.portOpen() {
			o.leave(o.back.s.connection)
		}
	case 4:
		if o.r.portOpen() {
			o.leave(o.r.connection)
		}
	}
}

// look demands that limits hold, and that grants lie within the region.
func (o *listOwner) look() {
	r := o.r
	if r.parts > maxServedParts || r.serving != r.parts || len(r.ranges) > wire.PartEntries {
		o.t.Fatalf("%d parts, %d operations are served, %d ranges", r.parts, r.serving, len(r.ranges))
	}
	for _, g := range r.grants {
		for _, p := range g.arrival.op.pieces.list {
			if p.memory != o.written || p.offset < ownerFirst || p.offset+p.length > ownerFirst+ownerLength {
				o.t.Fatalf("bytes %d+%d are granted", p.offset, p.length)
			}
		}
	}
}

// end ends the connection, and demands that nothing is left and nothing else is written.
func (o *listOwner) end() {
	o.copied()
	if o.back != nil {
		o.back.finish()
		if o.back.s.portOpen() {
			o.leave(o.back.s.connection)
		}
		o.back.finish()
	}
	o.ends(o.r)
	o.over()
	for _, of := range o.regions {
		if m := of.memory; of.users != 0 || m.users != 0 || m.served != 0 || o.r.serving != 0 || o.r.parts != 0 ||
			o.relay.own.used != 0 {
			o.t.Fatalf("%d use a region, %d the memory, %d parts are served, with %d bytes", of.users, m.users, o.r.parts,
				o.relay.own.used)
		}
		if of.state == lifeLive {
			of.revoke()
		}
	}
	got := bytesAt(o.written.mapped, 0, ownerWhole)
	for i, b := range got {
		if b != fuzzUntouched && (b != 7 || i < ownerFirst || i >= ownerFirst+ownerLength) {
			o.t.Fatalf("byte %d was written", i)
		}
	}
	if !bytes.Equal(got, o.left) {
		o.t.Fatal("a revoked region was written")
	}
}
