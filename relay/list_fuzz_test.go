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

// postList is what a session does with the descriptor of a list.
func (w *world) postList(c *connection, kind uint32, list []wire.ListEntryLayout) *operation {
	memory := unsafe.Slice((*byte)(unsafe.Pointer(&list[0])), uint64(len(list))*entryBytes)
	if _, err := w.session.lists.WriteAt(memory, 0); err != nil {
		w.t.Fatal(err)
	}
	op := &operation{
		session: w.session, kind: kind, cookie: uint64(len(w.posted) + 1), length: uint64(len(list)), wait: wire.NoTimeline, signal: wire.NoTimeline,
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
		list[i] = wire.ListEntryLayout{Memory: 1, Offset: uint64(i) * step % (fuzzMemory - 256), Length: length, At: uint64(i) * length, Key: wire.UUID{1}}
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
	if op == nil || op.pieces == nil || op.over || op.underWay == 0 {
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
	if g == nil || l.closed || n == 0 || g.Region != to.Region || to.Offset < g.Offset || n > g.Length || to.Offset-g.Offset > g.Length-n || to.Offset > l.targets[to.Region] || n > l.targets[to.Region]-to.Offset {
		l.t.Fatalf("a write of %d bytes to %+v with immediate %d, whose grant is %+v", n, to, immediate, g)
	}
	op := l.of(g.Send)
	if from.Offset%fuzzSlot != 0 || from.Offset >= fuzzSlots*fuzzSlot || n > fuzzSlot || l.taken[from.Offset] {
		l.t.Fatalf("a write of %d bytes from slot offset %d, in use: %t", n, from.Offset, l.taken[from.Offset])
	}
	l.taken[from.Offset] = true
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
			if list = list[1:]; c.Bytes == 0 || c.Bytes > r.length-done || c.To.Region != r.target.region || c.To.Offset != r.at+done || c.To.Offset+c.Bytes > l.targets[c.To.Region] {
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

// grants has the sender hear of a grant for a part of a list, mostly as it should be.
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
	if !s.portDown {
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
	if !r.portDown && r.route == wire.RouteDirect {
		r.receive(&wire.PeerWritten{Grant: number}, 0, nil)
	}
}

// FuzzPeerOfAListReader is the relay of a client that has exposed memory, and a NIC, that say
// what they like to one whose client reads and writes lists. Each byte that is read lands at
// its entry, each byte that is written comes from there, each list ends once, and nothing is
// left.
func FuzzPeerOfAListReader(f *testing.F) {
	read, write := []byte{0, 1, 3, 0, 100, 50, 0, 4, 5, 1, 0, 0, 0}, []byte{0, 0, 3, 0, 100, 50, 0, 2, 0}
	fillSlot, fillDirect := []byte{6, 1, 0, 0, 8}, []byte{6, 1, 0, 8}
	grantSlot, grantDirect := []byte{3, 1, 0, 0, 0, 0, 0, 255, 200, 0, 8, 9, 0, 7, 0, 0}, []byte{3, 1, 0, 0, 0, 10, 0, 0, 0, 0, 9, 0, 7, 0, 0}
	for _, route := range []byte{0, 240} {
		f.Add(slices.Concat([]byte{route}, read, fillSlot, write, grantSlot))
	}
	f.Add(slices.Concat([]byte{1}, read, fillDirect, write, grantDirect))
	// Several parts; a list with an entry that is wrong; a cancellation; refusals.
	f.Add([]byte{1, 0, 0, 20, 255, 3, 7, 0, 11, 1, 0, 1, 20, 255, 3, 7, 255, 0, 250, 250, 0, 10, 0, 5, 0, 0, 4, 10, 0, 5, 0, 1, 0, 12, 6})
	f.Add([]byte{0, 0, 1, 20, 255, 3, 7, 0, 12, 1, 0, 0, 20, 255, 3, 7, 0, 12, 3})
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) > 512 {
			return
		}
		do := script(text)
		w := newWorld(t)
		w.listMemory()
		patterned(w.mine.mapped)
		duplicate := w.foreign()
		route := w.route(do.next())
		w.mine.staged = nil
		l := w.listLink(route, w.mine)
		s := l.s
		var back *receiver
		hear := func(m wire.Message) {
			if !s.portDown {
				s.receive(m, 0, nil)
			}
		}
		for len(do) > 0 {
			switch do.next() % 13 {
			case 0:
				kind := []uint32{wire.OpWriteList, wire.OpReadList}[do.next()%2]
				list := do.entries()
				if s.down == nil && len(w.posted) < 16 {
					w.postList(s.connection, kind, list)
				}
			case 1:
				hear(&wire.PeerReadRefused{Read: do.near(max(1, s.reading.last)), Status: uint32(do.near(uint64(wire.StatusBadKey)))})
			case 2:
				if s.portDown {
					break
				}
				m, fds := l.region(1, do.near(fuzzTarget), duplicate)
				if _, there := l.targets[1]; !there {
					l.remote[1] = m.Bytes
				}
				s.receive(m, 0, fds)
				l.opened(nil)
			case 3:
				if !s.portDown {
					l.grants(&do)
				}
			case 4:
				if b := s.reading.back; b != nil && b.listener.expects() {
					back = newReceiver(w.connection(route))
					back.hidden, back.version = true, wire.ListVersion
					if w.tcp {
						back.writes = fuzzArrivals{}
					}
					s.cameBack(back)
				}
			case 5:
				m := &wire.PeerReadData{Read: do.near(max(1, uint64(do.next())%(s.reading.last+1)))}
				if back == nil || back.portDown {
					break
				}
				m.Send = do.near(back.announced + 1)
				if op := s.reading.asked[m.Read]; op != nil {
					m.Length = do.near(op.length)
				}
				back.receive(m, 0, nil)
			case 6:
				if back != nil {
					w.fillsList(back, &do, wants)
				}
			case 7:
				m := &wire.PeerDelivered{Send: do.near(max(1, s.last))}
				if do.next() > 200 {
					m.Status = uint32(wire.StatusBadKey)
				}
				hear(m)
			case 8:
				w.copied()
			case 9:
				if which := do.next(); which > 250 {
					l.wrote(which, errFuzz)
				} else {
					l.wrote(which, nil)
				}
			case 10:
				m := &wire.PeerListRefused{Number: do.near(max(1, s.last)), Position: uint64(do.next()), Status: uint32(do.near(uint64(wire.StatusOutOfRange)))}
				if do.next()%2 == 1 {
					m.Number, m.Reads = do.near(max(1, s.reading.last)), 1
				}
				hear(m)
			case 11:
				if cookie := uint64(do.next()); w.posted[cookie] != nil {
					s.cancel(cookie)
				}
			case 12:
				switch do.next() {
				case 1:
					hear(&wire.PeerBackRefused{Status: uint32(do.near(uint64(wire.StatusLimit)))})
				case 2:
					hear(&wire.PeerClose{})
				case 3:
					if !s.portDown {
						w.leave(s.connection)
					}
				case 4:
					if back != nil && !back.portDown {
						w.leave(back.connection)
					}
				case 5:
					hear(&wire.PeerRanges{Count: 1})
				case 6:
					w.read()
				}
			}
			if s.listing.parts > wire.PartsAtOnce || w.session.listParts != s.listing.parts || len(s.listing.ranges) > wire.PartEntries {
				t.Fatalf("%d parts of the connection, %d of the session, %d ranges", s.listing.parts, w.session.listParts, len(s.listing.ranges))
			}
		}
		l.finish()
		if !s.portDown {
			w.leave(s.connection)
		}
		l.finish()
		if back != nil {
			w.ends(back)
		}
		w.over()
		if w.session.listParts > 0 || len(s.listing.lists) > 0 {
			t.Fatalf("%d parts and %d lists are left", w.session.listParts, len(s.listing.lists))
		}
		for i, b := range bytesAt(w.mine.mapped, 0, fuzzMemory) {
			if b != pattern(uint64(i)) {
				t.Fatalf("byte %d is another's", i)
			}
		}
	})
}

// FuzzPeerOfAListOwner is the relay of a client that reads and writes lists, which says what it
// likes to one whose client has exposed memory. Nothing is written or shown beside the
// regions, nor after they are revoked, and nothing is left.
func FuzzPeerOfAListOwner(f *testing.F) {
	write, read := []byte{0, 3, 0, 0, 40, 10, 0, 1, 0, 0, 0}, []byte{0, 3, 0, 1, 40, 10, 0, 3, 0, 0, 0, 5, 7, 0}
	fillSlot, fillDirect := []byte{2, 1, 0, 0, 4}, []byte{2, 1, 0, 4}
	grantSlot, grantDirect := []byte{6, 1, 0, 0, 0, 0, 0, 255, 200, 0, 4, 8, 0, 0}, []byte{6, 1, 0, 0, 0, 10, 0, 0, 8, 0, 0}
	for _, route := range []byte{0, 240} {
		f.Add(slices.Concat([]byte{route}, write, fillSlot, read, grantSlot, []byte{9, 0, 9, 1}))
	}
	f.Add(slices.Concat([]byte{1}, write, fillDirect, read, grantDirect, []byte{9, 0, 9, 1}))
	// A range beyond the region, the wrong access, and a revocation under a write.
	f.Add(slices.Concat([]byte{1, 0, 3, 0, 0, 40, 10, 221, 255, 0, 0, 1, 0, 0, 0, 0, 3, 0, 1, 40, 10, 0, 1, 0, 0, 0}, write, []byte{9, 0}, fillDirect))
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) > 512 {
			return
		}
		const first, length, whole = 4096, 8192, 16384
		do := script(text)
		w := newWorld(t)
		duplicate := w.foreign()
		route := w.route(do.next())
		w.mine.staged = nil
		r := newReceiver(w.connection(route))
		r.version = wire.ListVersion
		if w.tcp {
			r.writes = fuzzArrivals{}
		}
		shown, written := w.memory(whole), w.memory(whole)
		patterned(shown.mapped)
		fill(written.mapped, fuzzUntouched)
		offer := func(m *memory, key byte, access uint32) *offering {
			o := &offering{number: w.session.number(), key: wire.UUID{key}, memory: m, offset: first, length: length, access: access, connection: r.number}
			w.session.offers[o.number], w.relay.offers[o.key], m.offers[o] = o, o, true
			return o
		}
		offers := []*offering{offer(written, 1, wire.RemoteWrite), offer(shown, 2, wire.RemoteRead)}
		var left []byte // in what may be written, when that was over
		offers[0].gone = func() { left = bytes.Clone(bytesAt(written.mapped, 0, whole)) }
		var back *fuzzListLink
		hear := func(m wire.Message) {
			if !r.portDown {
				r.receive(m, 0, nil)
			}
		}
		var reads, sum uint64
		var count uint32
		r.back = &wayBack{}
		for len(do) > 0 {
			switch do.next() % 10 {
			case 0: // ranges, of one key
				m := &wire.PeerRanges{Count: uint32(do.near(uint64(do.next() % (wire.MessageRanges + 1)))), Key: wire.UUID{1 + byte(do.next())%2}}
				step, n := uint64(do.next()), 1+uint64(do.next())
				for i := range min(m.Count, wire.MessageRanges) {
					m.Range[i] = wire.Range{At: uint64(i) * step % (length - 256), Length: n}
					sum += n
				}
				if b := do.next(); b > 220 {
					at := &m.Range[b%wire.MessageRanges]
					sum -= at.Length
					at.At, at.Length, m.Key[0] = do.near(length-at.Length), do.near(at.Length), byte(do.near(1))
					sum += at.Length
				}
				count += m.Count
				hear(m)
			case 1:
				hear(&wire.PeerWriteList{Send: do.near(r.announced + 1), Length: do.near(sum), Ranges: uint32(do.near(uint64(count)))})
				sum, count = 0, 0
			case 2:
				w.fillsList(r, &do, func(*operation, uint64) byte { return 7 })
			case 3:
				reads++
				hear(&wire.PeerReadList{Read: do.near(reads), Length: do.near(sum), Ranges: uint32(do.near(uint64(count)))})
				sum, count = 0, 0
			case 4:
				w.copied()
			case 5:
				if back == nil && r.down == nil {
					back = w.listLink(route, shown)
					back.s.hidden = true
					r.pair(back.s.connection)
					r.opened(r.back, back.s)
				}
			case 6:
				if back != nil && !back.s.portDown {
					back.grants(&do)
				}
			case 7:
				if back == nil || back.s.portDown {
					break
				}
				m, fds := back.region(1, do.near(fuzzTarget), duplicate)
				if _, there := back.targets[1]; !there {
					back.remote[1] = m.Bytes
				}
				back.s.receive(m, 0, fds)
				back.opened(nil)
			case 8:
				if back == nil {
					break
				}
				back.wrote(do.next(), nil)
				if !back.s.portDown {
					back.s.receive(&wire.PeerDelivered{Send: do.near(max(1, back.s.last))}, 0, nil)
				}
			case 9:
				switch which := do.next(); which {
				case 0, 1:
					if o := offers[which]; !o.withdrawn {
						o.withdraw()
					}
				case 2:
					hear(&wire.PeerClose{})
				case 3:
					if back != nil && !back.s.portDown {
						w.leave(back.s.connection)
					}
				case 4:
					if !r.portDown {
						w.leave(r.connection)
					}
				}
			}
			if r.parts > maxServedParts || r.serving != r.parts || len(r.ranges) > wire.PartEntries {
				t.Fatalf("%d parts, %d operations are served, %d ranges", r.parts, r.serving, len(r.ranges))
			}
			for _, g := range r.grants {
				for _, p := range g.arrival.op.pieces.list {
					if p.memory != written || p.offset < first || p.offset+p.length > first+length {
						t.Fatalf("bytes %d+%d are granted", p.offset, p.length)
					}
				}
			}
		}
		w.copied()
		if back != nil {
			back.finish()
			if !back.s.portDown {
				w.leave(back.s.connection)
			}
			back.finish()
		}
		w.ends(r)
		w.over()
		for _, o := range offers {
			if o.users != 0 || o.memory.users != 0 || o.memory.served != 0 || r.serving != 0 || r.parts != 0 || w.relay.own.used != 0 {
				t.Fatalf("%d use a region, %d the memory, %d parts are served, with %d bytes", o.users, o.memory.users, r.parts, w.relay.own.used)
			}
			if !o.withdrawn {
				o.withdraw()
			}
		}
		got := bytesAt(written.mapped, 0, whole)
		for i, b := range got {
			if b != fuzzUntouched && (b != 7 || i < first || i >= first+length) {
				t.Fatalf("byte %d was written", i)
			}
		}
		if !bytes.Equal(got, left) {
			t.Fatal("what was revoked was written")
		}
	})
}
