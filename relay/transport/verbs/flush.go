package verbs

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync/atomic"
	"time"

	"github.com/peerlane/peerlane/relay/verbs"
)

// Bytes that a NIC has written and reported may still be on the way to memory of a GPU, for every
// reader but that GPU. A read by the same NIC follows the write: when the read completes, the bytes
// are visible to every reader. Each NIC of a group has a queue pair for flushes, which connects to
// itself and is the only queue pair with remote read access. Queue pairs of a connection manager
// would have the same access, so the group registers no memory for reading with their NICs.
//
// After a failure of queue pairs, the existing flushers still flush the arrived writes, independent
// of the connection to the peer. A successor on the same NIC repeats a flush that cannot complete:
// the reads of the successor follow the earlier writes too. Until then the ticket has not arrived
// on this side, although the sender learns not to write again.
//
// Before a ticket gets another grant, the current NICs flush the doubtful write too: a part may be
// on the way, and another NIC may repeat that part. A NIC that is gone flushes nothing. Late bytes
// of that NIC equal the repeated bytes for the same place, and had the time of a reconnect to
// arrive; the NIC that repeats a write flushes the repetition. The keys of the earlier writes stay
// valid until then.

// flushDepth limits the outstanding flushes of a NIC, and regionFlushes the outstanding flushes of
// a region; further flushes wait. A flush covers every waiting ticket of the region: on PCIe a read
// pushes earlier writes of the NIC to the device, so that one read of the last place is enough
// (NCCL, ncclIbIflush in net_ib.cc, reads the last buffer of up to 8 receives).
const (
	flushDepth    = 64
	regionFlushes = 2
)

// flushers is the state of a group's flushes.
type flushers struct {
	flushes int // posted, without a completion
	// leaving has the ended channels with pending flushes.
	leaving map[*Arrivals]bool
	// unflushable is the reason for missing flushers. Any goroutine may read it.
	unflushable atomic.Pointer[error]
	kept        []kept
	// catching counts the flushes for writes of earlier queue pairs. before has the NICs with the
	// domains of these queue pairs; the group retires before when catching is 0.
	catching int
	before   []*nic
}

// kept is a flush for the next queue pair of a NIC.
type kept struct {
	ticket *ticket
	nic    *nic
}

// noFlush returns the reason for missing flushers, or nil. Any goroutine may call noFlush after the
// negotiation.
func (s *QPGroup) noFlush() error {
	if why := s.unflushable.Load(); why != nil {
		return *why
	}
	return nil
}

// flusher is the queue pair of a NIC for flushes.
type flusher struct {
	*verbs.Pair
	posted []reading // oldest first
	waits  []reading
	failed bool
	trying bool // the first read is posted
}

// reading is a flush of tickets of a region. The read is at the place of the last ticket.
type reading struct {
	tickets []*ticket
	send    verbs.Send
	again   bool // for writes of earlier queue pairs
}

func (r *reading) region() *registration { return r.tickets[0].region }

// errNothingStaged is the error of a relay that connected before a GPU needed flushes.
var errNothingStaged = errors.New("NICs wrote into no GPU of this relay's lanes when it connected to the other " +
	"one, so nothing can be flushed")

// thatFlush returns the NICs that can have flushers, or nics if no NIC can: one NIC without a
// flusher disables flushes.
func thatFlush(nics []*nic) []*nic {
	can := slices.DeleteFunc(slices.Clone(nics), func(n *nic) bool { return n.cm != nil })
	if len(can) == 0 {
		return nics
	}
	return can
}

// flushing reports whether the NICs need flushers, and records the reason otherwise. It blocks.
func (s *QPGroup) flushing() bool {
	c := &s.fabric.config
	if c.Flush == nil || c.Stages == nil || !c.Stages() {
		s.cannotFlush = errNothingStaged
		return false
	}
	return true
}

// withoutFlush records the failure of a flusher. The group then receives no writes into memory of
// GPUs; other data continues.
func (s *QPGroup) withoutFlush(q *queue, err error) {
	s.cannotFlush = errors.Join(s.cannotFlush, &flushError{q.nic.name, err})
}

// buildFlusher creates the flusher of a NIC. It blocks.
func (s *QPGroup) buildFlusher(q *queue, managed bool) {
	if managed {
		s.withoutFlush(q, errors.New("a connection manager connects no queue pair to itself"))
		return
	}
	made, err := q.nic.domain.NewPair(verbs.PairConfig{Send: q.Queue, Recv: q.Queue, SendDepth: flushDepth, RecvDepth: 1})
	if err == nil {
		q.flusher = &flusher{Pair: made}
		q.join(made.Number(), q)
		err = made.Init(q.nic.port, uint16(s.fabric.config.PKey), verbs.RemoteRead)
	}
	if err != nil {
		s.withoutFlush(q, err)
	}
}

// connectFlushers connects each flusher to itself. It blocks.
func (s *QPGroup) connectFlushers() {
	c := &s.fabric.config
	for _, q := range s.queues {
		f, n := q.flusher, q.nic
		if s.cannotFlush != nil || f == nil {
			return
		}
		route := n.route(n.is.LID, n.gid.GID, c)
		route.Pair, route.MTU = f.Number(), n.mtu(c.Verbs)
		err := f.ReadyToReceive(route)
		if err == nil {
			err = f.ReadyToSend(verbs.Sending{Timeout: uint8(c.Timeout), Retries: uint8(c.Retries), ReceiverRetries: 7,
				Reads: 1})
		}
		if err != nil {
			s.withoutFlush(q, err)
		}
	}
}

// tryFlushers begins a read of the group's page by each flusher. It blocks.
func (s *QPGroup) tryFlushers() {
	if s.cannotFlush != nil {
		return
	}
	for _, q := range s.queues {
		if q.flusher == nil {
			continue
		}
		if _, err := q.flusher.PostSend([]verbs.Send{s.readOf(q, s.page0(), q.first.RKey())}); err != nil {
			s.withoutFlush(q, err)
			continue
		}
		q.flusher.trying = true
	}
}

// awaitFlushers waits for the reads of tryFlushers. Both sides try their flushers, and the group still
// comes up in time without flushers. It blocks.
func (s *QPGroup) awaitFlushers(begun time.Time) error {
	limit := s.fabric.config.Time / 4
	for {
		i := slices.IndexFunc(s.queues, func(q *queue) bool { return q.flusher != nil && q.flusher.trying })
		if i < 0 {
			return nil
		}
		if err := s.bringing.Err(); err != nil {
			return err
		}
		if time.Since(begun) > limit {
			s.withoutFlush(s.queues[i],
				fmt.Errorf("the first read by a queue pair that is connected to itself has not completed within %v", limit))
			return nil
		}
		if err := s.pollTrials(func(int) {}); err != nil { // the peer tries its queue pairs meanwhile
			return err
		}
		time.Sleep(tryPause)
	}
}

// readOf returns the request of a flush: a read of one byte, which is discarded.
func (s *QPGroup) readOf(q *queue, at uint64, key uint32) verbs.Send {
	return verbs.Send{Op: verbs.Read, Flags: verbs.Signaled, Length: 1, Address: s.page0(), LKey: q.first.LKey(),
		Remote: at, RKey: key}
}

// settleWrite queues a flush of a ticket's bytes with each NIC that has written some. The loop
// posts the flushes after the current completions.
func (s *QPGroup) settleWrite(t *ticket) {
	t.arrivals.flushes++
	for seen := t.seen; seen != 0; seen &= seen - 1 {
		q := s.pairs[bits.TrailingZeros64(seen)].queue
		if t.flushedBy(q) {
			continue
		}
		t.flushing = append(t.flushing, q)
		t.unflushed++
		q.flusher.wait(s.reading(t, q))
	}
}

// wait queues a flush, or adds the tickets to a waiting flush of the same region.
func (f *flusher) wait(r reading) {
	for i := range f.waits {
		if w := &f.waits[i]; !w.again && !r.again && w.region() == r.region() {
			w.tickets, w.send = append(w.tickets, r.tickets...), r.send
			return
		}
	}
	f.waits = append(f.waits, r)
}

// next takes the first waiting flush whose region has fewer than regionFlushes outstanding.
func (f *flusher) next() (r reading, ok bool) {
	for i := range f.waits {
		flying := 0
		for k := range f.posted {
			if f.posted[k].region() == f.waits[i].region() {
				flying++
			}
		}
		if flying < regionFlushes {
			r = f.waits[i]
			f.waits = slices.Delete(f.waits, i, i+1)
			return r, true
		}
	}
	return reading{}, false
}

// reading returns the flush of a ticket's bytes by a NIC with a registration of the memory.
func (s *QPGroup) reading(t *ticket, q *queue) reading {
	return reading{tickets: []*ticket{t}, send: s.readOf(q, t.region.base+t.offset, t.region.region(q.nic).RKey())}
}

func (t *ticket) flushedBy(q *queue) bool {
	for _, other := range t.flushing {
		if other == q {
			return true
		}
	}
	return false
}

func (s *QPGroup) postFlushes(q *queue) {
	f := q.flusher
	for len(f.waits) > 0 && len(f.posted) < flushDepth && s.gone == nil && !s.broken && !f.failed {
		w, ok := f.next()
		if !ok {
			return
		}
		if _, err := f.PostSend([]verbs.Send{w.send}); err != nil {
			s.cannot(q, w.tickets, err)
			return
		}
		if f.posted = append(f.posted, w); s.posted == 0 && s.flushes == 0 {
			s.progress = s.fabric.loop.Now()
		}
		s.flushes++
		s.look()
	}
}

// flushed handles the completion of a flush. The result is false for another queue pair.
func (s *QPGroup) flushed(q *queue, c *verbs.Completion) bool {
	f := q.flusher
	if f == nil || f.Number() != c.Pair {
		return false
	}
	if len(f.posted) == 0 { // the first read, which was abandoned
		return true
	}
	r := f.posted[0]
	f.posted[0] = reading{}
	f.posted = f.posted[1:]
	s.flushes--
	switch err := c.Err(); {
	case s.gone != nil: // the waiting operation has ended
	case err != nil:
		s.cannot(q, r.tickets, err)
	default:
		s.progress = s.fabric.loop.Now()
		for _, t := range r.tickets {
			t.flushed()
		}
		if r.again {
			s.catching--
			s.caughtUp()
		}
		s.postFlushes(q)
	}
	return true
}

// flushed counts the flush of one NIC.
func (t *ticket) flushed() {
	if t.unflushed--; t.unflushed > 0 {
		return
	}
	if t.arrivals.open[t] && !t.doubtful {
		t.arrive()
	}
	t.arrivals.flushed()
}

// cannot handles the failure of a flush, and keeps the tickets.
func (s *QPGroup) cannot(q *queue, tickets []*ticket, err error) {
	q.flusher.failed = true
	for _, t := range tickets {
		s.keep(q, t)
	}
	if s.phase == running {
		s.fault(q.nic, "flush of its writes: "+err.Error())
	}
}

// keep schedules a ticket for the next flusher of the NIC. A reconnect flushes doubtful tickets in
// any case.
func (s *QPGroup) keep(q *queue, t *ticket) {
	if !t.doubtful {
		s.kept = append(s.kept, kept{t, q.nic})
	}
}

// keepFlushes keeps the incomplete flushes before the release of the queue pairs.
func (s *QPGroup) keepFlushes() {
	for _, q := range s.queues {
		if q.flusher == nil {
			continue
		}
		for _, r := range slices.Concat(q.flusher.posted, q.flusher.waits) {
			for _, t := range r.tickets {
				s.keep(q, t)
			}
		}
		q.flusher.posted, q.flusher.waits = nil, nil
	}
	s.flushes, s.catching = 0, 0
	for _, t := range s.queued {
		if t.doubtful && t.unflushed > 0 {
			t.unflushed = 0
			t.arrivals.flushed()
		}
	}
}

// unflushed returns the NICs with kept flushes.
func (s *QPGroup) unflushed() (nics []*nic) {
	for _, k := range s.kept {
		if k.ticket.arrivals.open[k.ticket] {
			nics = append(nics, k.nic)
		}
	}
	return nics
}

// withAll returns an error if nics, the NICs for a reconnect, omit a needed NIC: only that NIC can
// repeat its kept flushes.
func withAll(nics, needed []*nic) error {
	for _, n := range needed {
		if !slices.ContainsFunc(nics, func(other *nic) bool { return other.context == n.context }) {
			return unreachable("%w", &flushError{n.name, errInactive})
		}
	}
	return nil
}

// flushAgain flushes kept and doubtful tickets with the new queue pairs. If a flush cannot start,
// flushAgain resets the group, and the next try may succeed.
func (s *QPGroup) flushAgain() {
	kept := s.kept
	s.kept = nil
	for done, k := range kept {
		if !k.ticket.arrivals.open[k.ticket] {
			k.ticket.flushed() // the operation has ended, and the writing queue pair is gone
			continue
		}
		i := slices.IndexFunc(s.queues, func(q *queue) bool { return q.nic.context == k.nic.context })
		if i < 0 || s.cannotFlush != nil {
			why := s.cannotFlush
			if i < 0 {
				why = errors.New("no link uses the NIC")
			}
			s.kept = kept[done:] // keepFlushes keeps the earlier flushes
			s.giveUp(nil, fmt.Sprintf("by %s of host %s: %v", k.nic.name, hostname(), &flushError{k.nic.name, why}))
			return
		}
		s.readAgain(k.ticket, s.queues[i])
	}
	for _, t := range s.queued {
		if !t.region.flush || !t.arrivals.open[t] {
			continue
		}
		if s.cannotFlush != nil { // the new queue pairs could not flush repeated writes either
			s.giveUp(nil, fmt.Sprintf("on host %s: %v", hostname(), s.cannotFlush))
			return
		}
		if !t.doubtful {
			continue
		}
		t.unflushed = len(s.queues)
		t.arrivals.flushes++
		for _, q := range s.queues {
			s.readAgain(t, q)
		}
	}
	for _, q := range s.queues {
		if q.flusher != nil {
			s.postFlushes(q)
		}
	}
	s.caughtUp()
}

func (s *QPGroup) readAgain(t *ticket, q *queue) {
	r := s.reading(t, q)
	r.again = true
	q.flusher.wait(r)
	s.catching++
}

// caughtUp continues the reconnect after the last flush of writes of earlier queue pairs.
func (s *QPGroup) caughtUp() {
	if s.catching > 0 || s.phase != running || s.broken {
		return
	}
	s.fabric.retire(s.before)
	s.before = nil
	if err := s.protocol.flushed(); err != nil {
		s.peer.Fail(err)
	}
}
