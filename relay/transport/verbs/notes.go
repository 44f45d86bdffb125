package verbs

import (
	"encoding/binary"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/verbs"
)

// Where a NIC has no write with an immediate, as those of iWARP have none, a message follows
// the write on the same queue pair, with the ticket as its four bytes: it comes when the
// write's bytes are there. Such a write ends when it is sent, not when it has arrived, so the
// receiver says that as well (arrived), and the sender keeps to the same promise.

const noteBytes = 4

// notes are a pair's: one for each receive, then one for each request that may be under
// way. There are none where writes have immediates.
type notes struct {
	bytes []byte
	key   uint32
}

func (n *notes) at(i int) []byte { return n.bytes[i*noteBytes : (i+1)*noteBytes] }

func (n *notes) address(i int) uint64 { return uint64(uintptr(unsafe.Pointer(&n.at(i)[0]))) }

// ofPair is how many notes a pair has.
const ofPair = receives + sendDepth

// makeNotes makes those of the links that need them, and has the NICs know them: nobody
// else may write there. It blocks.
func (s *Set) makeNotes() (err error) {
	n := 0
	for _, p := range s.pairs {
		if s.links[p.link].sends {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	const each = ofPair * noteBytes
	if s.noted, err = unix.Mmap(-1, 0, n*each, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return os.NewSyscallError("mmap", err)
	}
	all := s.noted
	begin := uintptr(unsafe.Pointer(&all[0]))
	for _, p := range s.pairs {
		if !s.links[p.link].sends {
			continue
		}
		q := p.queue
		if q.notes == nil {
			if q.notes, err = q.nic.domain.Register(begin, uint64(len(s.noted)), uint64(begin), verbs.LocalWrite); err != nil {
				return err
			}
		}
		p.notes = notes{all[:each:each], q.notes.LKey()}
		all = all[each:]
	}
	return nil
}

// push has a write wait to be posted, with what tells the other side of it: a message without
// immediates, a second write of 0 bytes where the fabric is to route the first one adaptively.
func (p *pair) push(write verbs.Send, w *write, adaptive bool) (requests int) {
	if p.notes.bytes == nil {
		if adaptive && write.Length > 0 {
			immediate := write
			immediate.Length = 0
			write.Op, write.Immediate = verbs.Write, 0
			p.waits, p.parts = append(p.waits, write, immediate), append(p.parts, nobody, w)
			return 2
		}
		p.waits, p.parts = append(p.waits, write), append(p.parts, w)
		return 1
	}
	note := verbs.Send{Op: verbs.SendMessage, Immediate: write.Immediate, Length: noteBytes}
	write.Op, write.Immediate = verbs.Write, 0
	p.waits, p.parts = append(p.waits, write, note), append(p.parts, nobody, w)
	return 2
}

// number gives a request its own, and writes its note: no other that is under way has it.
func (p *pair) numbered(s *verbs.Send, number uint64) {
	s.ID = number
	if s.Op != verbs.SendMessage {
		return
	}
	i := receives + int(number%sendDepth)
	binary.LittleEndian.PutUint32(p.notes.at(i), s.Immediate)
	s.Address, s.LKey = p.notes.address(i), p.notes.key
}

// receive is one that the pair posts; its ID says which note it is for.
func (p *pair) receive(i int) verbs.Recv {
	r := verbs.Recv{ID: ofReceive | uint64(i)}
	if p.notes.bytes != nil {
		r.Address, r.Length, r.LKey = p.notes.address(i), noteBytes, p.notes.key
	}
	return r
}

// fill has all receives of a pair wait to be posted.
func (p *pair) fill() {
	p.owed = make([]verbs.Recv, 0, receives)
	for i := range receives {
		p.owed = append(p.owed, p.receive(i))
	}
}

// told is the number that a receive has come with, which waits to be posted again; ok is
// false of what is none.
func (p *pair) told(c *verbs.Completion) (number uint32, ok bool) {
	i := int(c.ID &^ ofReceive)
	if i >= receives {
		return 0, false
	}
	p.owed = append(p.owed, p.receive(i))
	switch {
	case c.Op == verbs.ReceivedImmediate && p.notes.bytes == nil:
		return c.Immediate, true
	case c.Op == verbs.Received && p.notes.bytes != nil && c.Bytes == noteBytes:
		return binary.LittleEndian.Uint32(p.notes.at(i)), true
	}
	return 0, false
}

// nobody is the write of a request whose end tells nothing.
var nobody = &write{}

// heard reports whether the receiver says what has arrived of writes by these pairs.
func (s *Set) heard(pairs []int) bool {
	for _, i := range pairs {
		if s.links[s.pairs[i].link].sends {
			return true
		}
	}
	return false
}

// expect has a write end no sooner than the receiver says that it has arrived. Of two with
// one ticket nobody could say which.
func (l *Link) expect(ticket uint32, w *write) error {
	s := l.set
	switch {
	case !s.heard(l.pairs):
		return nil
	case l.unheard[ticket] != nil:
		return malformed("ticket %d is of two grants", ticket)
	}
	w.left++
	l.unheard[ticket] = w
	if s.unheard++; s.posted == 0 && s.unheard == 1 {
		s.progress = s.fabric.loop.Now()
	}
	s.look()
	return nil
}

// arrived takes that.
func (l *Link) arrived(m *arrived) error {
	w := l.unheard[m.Ticket]
	if w == nil {
		if l.set.falling() { // it is in doubt by now, and said to have arrived with those that are
			return nil
		}
		return malformed("the write with ticket %d has arrived, which is not under way", m.Ticket)
	}
	delete(l.unheard, m.Ticket)
	l.set.unheard--
	l.set.progress = l.set.fabric.loop.Now()
	w.end()
	return nil
}

// unhear has nobody wait for that any more.
func (l *Link) unhear() {
	for ticket, w := range l.unheard {
		delete(l.unheard, ticket)
		l.set.unheard--
		w.end()
	}
}
