package verbs

import (
	"encoding/binary"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/verbs"
)

// A NIC without writes with immediate, such as iWARP, sends a message after the write on the same
// queue pair. The message has the ticket in four bytes and arrives after the bytes of the write.
// The completion of such a write means sent, not arrived. The receiver therefore confirms the
// arrival (message arrived), and the sender completes the write after that message.

const ackBytes = 4

// acks are the message buffers of a queue pair: one for each receive, then one for each request. A
// queue pair that writes with immediates has no acks.
type acks struct {
	bytes []byte
	key   uint32
}

func (n *acks) at(i int) []byte { return n.bytes[i*ackBytes : (i+1)*ackBytes] }

func (n *acks) address(i int) uint64 { return uint64(uintptr(unsafe.Pointer(&n.at(i)[0]))) }

// acksPerQP is the number of acks of a queue pair.
const acksPerQP = receives + sendDepth

// makeAcks creates acks for links that need them and registers them with the NICs, without remote
// access. It blocks.
func (s *QPGroup) makeAcks() (err error) {
	n := 0
	for _, p := range s.pairs {
		if s.links[p.link].sends {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	const each = acksPerQP * ackBytes
	if s.ackMemory, err = unix.Mmap(-1, 0, n*each, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return os.NewSyscallError("mmap", err)
	}
	all := s.ackMemory
	begin := uintptr(unsafe.Pointer(&all[0]))
	for _, p := range s.pairs {
		if !s.links[p.link].sends {
			continue
		}
		q := p.queue
		if q.acks == nil {
			if q.acks, err = q.nic.domain.Register(begin, uint64(len(s.ackMemory)), uint64(begin),
				verbs.LocalWrite); err != nil {
				return err
			}
		}
		p.acks = acks{all[:each:each], q.acks.LKey()}
		all = all[each:]
	}
	return nil
}

// push queues a write and its announcement to the peer: a message without immediates, or a second
// write of 0 bytes if the fabric routes the first write adaptively.
func (p *qp) push(write verbs.Send, w *write, adaptive bool) (requests int) {
	if p.acks.bytes == nil {
		if adaptive && write.Length > 0 {
			immediate := write
			immediate.Length = 0
			write.Op, write.Immediate = verbs.Write, 0
			p.waits, p.parts = append(p.waits, write, immediate), append(p.parts, noWrite, w)
			return 2
		}
		p.waits, p.parts = append(p.waits, write), append(p.parts, w)
		return 1
	}
	note := verbs.Send{Op: verbs.SendMessage, Immediate: write.Immediate, Length: ackBytes}
	write.Op, write.Immediate = verbs.Write, 0
	p.waits, p.parts = append(p.waits, write, note), append(p.parts, noWrite, w)
	return 2
}

// numbered sets the number of a request and writes the ack, which no other outstanding request
// uses.
func (p *qp) numbered(s *verbs.Send, number uint64) {
	s.ID = number
	if s.Op != verbs.SendMessage {
		return
	}
	i := receives + int(number%sendDepth)
	binary.LittleEndian.PutUint32(p.acks.at(i), s.Immediate)
	s.Address, s.LKey = p.acks.address(i), p.acks.key
}

// receive returns receive i of the queue pair. The ID contains the index of the ack.
func (p *qp) receive(i int) verbs.Recv {
	r := verbs.Recv{ID: ofReceive | uint64(i)}
	if p.acks.bytes != nil {
		r.Address, r.Length, r.LKey = p.acks.address(i), ackBytes, p.acks.key
	}
	return r
}

// fill queues every receive of a queue pair for posting.
func (p *qp) fill() {
	p.owed = make([]verbs.Recv, 0, receives)
	for i := range receives {
		p.owed = append(p.owed, p.receive(i))
	}
}

// receivedTicket returns the number of a completed receive and queues the receive for posting. ok is false
// for a completion without a number.
func (p *qp) receivedTicket(c *verbs.Completion) (number uint32, ok bool) {
	i := int(c.ID &^ ofReceive)
	if i >= receives {
		return 0, false
	}
	p.owed = append(p.owed, p.receive(i))
	switch {
	case c.Op == verbs.ReceivedImmediate && p.acks.bytes == nil:
		return c.Immediate, true
	case c.Op == verbs.Received && p.acks.bytes != nil && c.Bytes == ackBytes:
		return binary.LittleEndian.Uint32(p.acks.at(i)), true
	}
	return 0, false
}

// noWrite stands for the write of a request whose completion has no effect.
var noWrite = &write{}

// needsConfirmation reports whether the receiver confirms the arrival of writes by these queue pairs.
func (s *QPGroup) needsConfirmation(pairs []int) bool {
	for _, i := range pairs {
		if s.links[s.pairs[i].link].sends {
			return true
		}
	}
	return false
}

// expect delays the end of a write until the receiver confirms the arrival. Two writes with one
// ticket would be ambiguous.
func (l *Link) expect(ticket uint32, w *write) error {
	s := l.set
	switch {
	case !s.needsConfirmation(l.pairs):
		return nil
	case l.unconfirmed[ticket] != nil:
		return malformed("%w", &ticketError{ticket, errTwoGrants})
	}
	w.left++
	l.unconfirmed[ticket] = w
	if s.unconfirmed++; s.posted == 0 && s.unconfirmed == 1 {
		s.progress = s.fabric.loop.Now()
	}
	s.look()
	return nil
}

// arrived handles the confirmation of the receiver.
func (l *Link) arrived(m *arrived) error {
	w := l.unconfirmed[m.Ticket]
	if w == nil {
		if l.set.resetting() { // the write is in doubt, and resetAck counts it
			return nil
		}
		return malformed("%w", &ticketError{m.Ticket, errNotOutstanding})
	}
	delete(l.unconfirmed, m.Ticket)
	l.set.unconfirmed--
	l.set.progress = l.set.fabric.loop.Now()
	w.end()
	return nil
}

// stopConfirmations ends the wait for confirmations.
func (l *Link) stopConfirmations() {
	for ticket, w := range l.unconfirmed {
		delete(l.unconfirmed, ticket)
		l.set.unconfirmed--
		w.end()
	}
}
