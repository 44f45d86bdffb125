package relay

import (
	"math"
	"os"
	"sort"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/wire"
)

// List operations: a single operation of a client reads or writes many ranges of the remote side's
// regions. The client writes the entries into list memory and posts a single descriptor. The
// sender's relay copies the entries in parts, checks the copies, and runs a part as a one-sided
// operation (onesided.go) whose message is the concatenated bytes of the entries. Both sides divide
// the message into pieces, and merge adjacent pieces: on route direct a copy goes from piece to
// piece, on route staged several pieces share a slot.

// maxParts limits the parts of a session in flight: each has about 100 KiB.
const maxParts = 32

// entryBytes is the size of an entry in list memory.
const entryBytes = uint64(unsafe.Sizeof(wire.ListEntryLayout{}))

// list is a list operation in progress.
type list struct {
	op      *operation // the client's: its offset is that in list memory, its length the entries
	next    uint64     // the first entry that is in no part
	parts   int        // under way
	stopped wire.Status
	failed  uint64 // the first entry that failed, if stopped is an error
}

// listing has the list operations of a sender's client.
type listing struct {
	lists []*list
	parts int  // under way, of all lists
	waits bool // for a part of another connection of the session to end
	// Of route direct: ranges for the grant that will come, and grants whose memory is not
	// mapped yet.
	ranges  []grantedRange
	pending []*listGrant
}

// pieces are the parts of a client's memory that make up a message, in order and without gaps.
type pieces struct {
	list []piece
	held []*memory // once for each run of pieces of one memory

	// Of a part of a list of this client:
	of     *list
	at     *sender
	first  uint64   // the index of its first entry
	starts []uint64 // where in the message each entry begins
	failed uint64   // where in the message the first refused byte is

	// Of a region, which the relay reads or writes for the remote side:
	serves *servedPart
}

type piece struct {
	memory                *memory
	offset, length, start uint64 // start is the place in the message
}

// add appends bytes of a memory, to the last piece if adjacent.
func (p *pieces) add(m *memory, offset, length, start uint64) {
	if n := len(p.list); n > 0 {
		last := &p.list[n-1]
		if last.memory == m && last.offset+last.length == offset {
			last.length += length
			return
		}
	}
	p.list = append(p.list, piece{m, offset, length, start})
}

// hold keeps a memory until the operation ends.
func (p *pieces) hold(m *memory) {
	m.users++
	p.held = append(p.held, m)
}

// copies are those between [from, from+n) of the message and n bytes at a place: into the
// place, or out of it.
func (p *pieces) copies(from, n uint64, place device.Place, into bool) []device.Copy {
	i := sort.Search(len(p.list), func(i int) bool { return p.list[i].start > from }) - 1
	var all []device.Copy
	for done := uint64(0); done < n; i++ {
		e := &p.list[i]
		skip := from + done - e.start
		length := min(e.length-skip, n-done)
		c := device.Copy{To: place.Plus(done), From: e.memory.place(e.offset + skip), Bytes: length}
		if !into {
			c.To, c.From = c.From, c.To
		}
		all = append(all, c)
		done += length
	}
	return all
}

// copyOut copies n bytes of a message, from an offset on, to a slot.
func (op *operation) copyOut(by *device.Queue, slot device.Place, from, n uint64, done func(error)) {
	if op.pieces != nil {
		by.MoveList(op.pieces.copies(from, n, slot, true), done)
		return
	}
	by.Move(slot, op.memory.place(op.offset+from), n, done)
}

// copyIn copies n bytes of a slot into a message, from an offset on.
func (op *operation) copyIn(by *device.Queue, slot device.Place, from, n uint64, done func(error)) {
	if op.pieces != nil {
		by.MoveList(op.pieces.copies(from, n, slot, false), done)
		return
	}
	by.Move(op.memory.place(op.offset+from), slot, n, done)
}

// over handles the end of an operation with pieces.
func (p *pieces) over(op *operation, status wire.Status) {
	if p.serves != nil {
		p.serves.over()
	}
	for _, m := range p.held {
		m.release()
	}
	if p.of != nil {
		p.partOver(op, status)
	}
}

// --- the client's descriptor ---------------------------------------------------------

// expectLists has the GPUs of open lanes, and of lanes that open later, prepare for lists.
func (r *Relay) expectLists() {
	r.lists.Store(true)
	for _, l := range r.lanes {
		if l.device != nil {
			l.device.PrepareLists()
		}
	}
}

// listMemory makes the memory of the session's lists, once. The client allocates the pages; the
// relay only reads the pages, by pread, which allocates no page.
func (s *session) listMemory(sequence uint32) {
	bytes := wire.MaxListEntries * entryBytes
	s.relay.expectLists()
	if s.lists != nil { // the client gave the first request up
		s.reply(&wire.ListMemoryMade{Bytes: bytes}, sequence, int(s.lists.Fd()))
		return
	}
	if err := s.relay.reserve(ofPart); err != nil {
		s.answer(sequence, err)
		return
	}
	fd, err := unix.MemfdCreate("peerlane-lists", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	err = os.NewSyscallError("memfd_create", err)
	if err == nil {
		err = os.NewSyscallError("ftruncate", unix.Ftruncate(fd, int64(bytes)))
		if err == nil {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
			err = os.NewSyscallError("F_ADD_SEALS", err)
		}
		if err != nil {
			unix.Close(fd)
		}
	}
	if err != nil {
		s.relay.release(ofPart)
		s.answer(sequence, err)
		return
	}
	s.lists = os.NewFile(uintptr(fd), "peerlane-lists")
	s.reply(&wire.ListMemoryMade{Bytes: bytes}, sequence, fd)
}

// isList reports whether an operation is of a list.
func isList(kind uint32) bool { return kind == wire.OpReadList || kind == wire.OpWriteList }

// bindList checks the place of a list. The relay checks the entries of a part at the part's begin.
func (op *operation) bindList(c *connection) wire.Status {
	switch {
	case !c.sends():
		return wire.StatusMalformed
	case c.version < wire.ListVersion:
		return wire.StatusVersion
	case op.session.lists == nil:
		return wire.StatusUnknownMemory
	case op.length == 0 || op.length > wire.MaxListEntries || op.offset > (wire.MaxListEntries-op.length)*entryBytes:
		return wire.StatusOutOfRange
	}
	return wire.StatusOK
}

// --- parts ----------------------------------------------------------------------------

func (s *sender) startList(op *operation) {
	s.listing.lists = append(s.listing.lists, &list{op: op})
	s.moreParts()
}

// moreParts begins parts as far as connection and session may have more.
func (s *sender) moreParts() {
	for !s.isDown() && s.listing.parts < wire.PartsAtOnce {
		l := s.nextList()
		switch {
		case l == nil:
			return
		case s.session.listParts >= maxParts:
			if !s.listing.waits {
				s.listing.waits = true
				s.session.wantParts = append(s.session.wantParts, s)
			}
			return
		}
		s.beginPart(l)
	}
}

// nextList is the oldest list that has entries in no part.
func (s *sender) nextList() *list {
	for _, l := range s.listing.lists {
		if l.stopped == wire.StatusOK && l.next < l.op.length {
			return l
		}
	}
	return nil
}

// beginPart copies and checks the next entries of a list, and starts the transfer.
func (s *sender) beginPart(l *list) {
	n := min(wire.PartEntries, l.op.length-l.next)
	first := l.next
	l.next += n
	entries := make([]wire.ListEntryLayout, n)
	bytes := unsafe.Slice((*byte)(unsafe.Pointer(&entries[0])), n*entryBytes)
	if _, err := s.session.lists.ReadAt(bytes, int64(l.op.offset+first*entryBytes)); err != nil {
		s.session.relay.examine(err)
		s.stopList(l, first, wire.StatusInternal)
		return
	}
	p := &pieces{of: l, at: s, first: first}
	ranges, length, status := p.take(entries, l.op.kind, s.connection)
	if status != wire.StatusOK {
		l.stop(first+uint64(len(p.starts)), status)
		if len(p.starts) == 0 {
			s.settleList(l)
			return
		}
	}
	l.parts++
	s.listing.parts++
	s.session.listParts++
	op := &operation{
		session: s.session, kind: wire.OpWrite, began: s.session.relay.loop.Now(), pieces: p, length: length,
		state: operationStarted, wait: wire.NoTimeline, signal: wire.NoTimeline,
	}
	for _, m := range p.list {
		if k := len(p.held); k == 0 || p.held[k-1] != m.memory {
			p.hold(m.memory)
		}
	}
	if l.op.kind == wire.OpReadList {
		op.kind = wire.OpRead
		if s.ask(op) {
			s.sendRanges(ranges)
			s.port.Send(&wire.PeerReadList{Read: op.send, Length: length, Ranges: uint32(len(ranges))}, 0)
		}
		return
	}
	s.enlist(op)
	s.sendRanges(ranges)
	s.port.Send(&wire.PeerWriteList{Send: op.send, Length: length, Ranges: uint32(len(ranges))}, 0)
}

// keyedRange is a range under a key.
type keyedRange struct {
	key        wire.UUID
	at, length uint64
}

// take checks entries, up to the first invalid entry, and makes the pieces of this side and the
// ranges of the remote side.
func (p *pieces) take(entries []wire.ListEntryLayout, kind uint32,
	c *connection) (ranges []keyedRange, length uint64, status wire.Status) {
	need := uint32(wire.AccessSend)
	if kind == wire.OpReadList {
		need = wire.AccessReceive
	}
	p.list = make([]piece, 0, len(entries))
	p.starts = make([]uint64, 0, len(entries))
	ranges = make([]keyedRange, 0, len(entries))
	var m *memory
	for i := range entries {
		e := &entries[i]
		if m == nil || m.number != e.Memory {
			if m = c.session.memories[e.Memory]; m == nil || m.state != memoryExported {
				return ranges, length, wire.StatusUnknownMemory
			}
			switch {
			case m.lane != c.lane:
				return ranges, length, wire.StatusWrongGPU
			case m.access&need == 0, m.kind == wire.MemoryIPC && need == wire.AccessReceive && c.route == wire.RouteDirect:
				// as bind has it
				return ranges, length, wire.StatusNotPermitted
			}
		}
		if e.Length == 0 || e.Offset > m.length || e.Length > m.length-e.Offset || e.Length > math.MaxInt64-length ||
			e.At > math.MaxUint64-e.Length {
			return ranges, length, wire.StatusOutOfRange
		}
		p.add(m, e.Offset, e.Length, length)
		p.starts = append(p.starts, length)
		length += e.Length
		if k := len(ranges); k > 0 && ranges[k-1].key == e.Key && ranges[k-1].at+ranges[k-1].length == e.At {
			ranges[k-1].length += e.Length
		} else {
			ranges = append(ranges, keyedRange{e.Key, e.At, e.Length})
		}
	}
	return ranges, length, wire.StatusOK
}

// sendRanges announces the ranges of the next list message to the remote relay.
func (s *sender) sendRanges(ranges []keyedRange) {
	for len(ranges) > 0 {
		m := &wire.PeerRanges{Key: ranges[0].key}
		for len(ranges) > 0 && ranges[0].key == m.Key && m.Count < wire.MessageRanges {
			m.Range[m.Count] = wire.Range{At: ranges[0].at, Length: ranges[0].length}
			m.Count++
			ranges = ranges[1:]
		}
		s.port.Send(m, 0)
	}
}

// stop begins no further part, and keeps the first entry that failed.
func (l *list) stop(entry uint64, status wire.Status) {
	if l.stopped == wire.StatusOK || entry < l.failed {
		l.stopped, l.failed = status, entry
	}
}

func (s *sender) stopList(l *list, entry uint64, status wire.Status) {
	l.stop(entry, status)
	s.settleList(l)
}

// settleList ends a list without present and further parts.
func (s *sender) settleList(l *list) {
	if l.parts > 0 || l.stopped == wire.StatusOK && l.next < l.op.length {
		return
	}
	for i, other := range s.listing.lists {
		if other == l {
			s.listing.lists = append(s.listing.lists[:i:i], s.listing.lists[i+1:]...)
			if l.stopped != wire.StatusOK {
				l.op.entry = uint32(l.failed)
			}
			l.op.finish(l.stopped)
			return
		}
	}
}

// partOver is the end of a part.
func (p *pieces) partOver(op *operation, status wire.Status) {
	s, l := p.at, p.of
	l.parts--
	s.listing.parts--
	s.session.listParts--
	l.op.moved += op.moved
	if status != wire.StatusOK {
		i := sort.Search(len(p.starts), func(i int) bool { return p.starts[i] > p.failed }) - 1
		l.stop(p.first+uint64(max(i, 0)), status)
	}
	s.settleList(l)
	s.moreParts()
	s.session.giveParts()
}

// giveParts permits further connections of the session to start parts.
func (s *session) giveParts() {
	for len(s.wantParts) > 0 && s.listParts < maxParts {
		by := s.wantParts[0]
		s.wantParts = s.wantParts[1:]
		by.listing.waits = false
		by.moreParts()
	}
}

// cancelList begins no further part of a list.
func (s *sender) cancelList(cookie uint64) {
	for _, l := range s.listing.lists {
		if l.op.cookie == cookie {
			if l.next < l.op.length {
				s.stopList(l, l.next, wire.StatusCanceled)
			}
			return
		}
	}
}

// stopLists begins no further part of any list, because the connection is down.
func (s *sender) stopLists(why wire.Status) {
	for _, l := range append([]*list(nil), s.listing.lists...) {
		if l.next < l.op.length {
			s.stopList(l, l.next, why)
		}
	}
	s.listing.pending, s.listing.ranges = nil, nil
}

// listRefused handles the remote side's refusal of a part.
func (s *sender) listRefused(m *wire.PeerListRefused) error {
	from := s.active
	if m.Reads == 1 {
		from = s.reading.asked
	}
	op := from[m.Number]
	if op == nil || op.pieces == nil || op.pieces.of == nil || m.Reads > 1 || m.Status == uint32(wire.StatusOK) ||
		m.Position >= op.length || op.granted > 0 {
		return wire.Errorf(wire.StatusMalformed, "the relay of %s refused byte %d of list message %d with status %d",
			s.peer, m.Position, m.Number, m.Status)
	}
	delete(from, m.Number)
	op.pieces.failed = m.Position
	op.finish(wire.Status(m.Status))
	return nil
}
