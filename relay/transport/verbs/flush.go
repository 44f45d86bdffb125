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

// What a NIC has written into a GPU's memory, and told of, may still be on its way for
// everybody but that GPU. A read by the same NIC comes behind it: when that has ended the
// bytes are there for all. Each NIC of a Set has a queue pair for this alone, which leads
// to itself and is the only one that may read. Those that a connection manager makes may as
// well, as it has them, so nothing is registered for reading with their NICs.
//
// When queue pairs fail, what has arrived is still flushed by those that there are, whatever has
// become of the way to the other host. A flush that cannot end is made again by their
// successor on the same NIC, behind whose writes its reads come, too; until then its ticket has not
// arrived here, though the sender is told that it needs not be written again. What had not
// arrived is flushed as well before it is granted again, by the NICs that there are then: a part of
// it may be on its way, and comes again by another NIC. One that is not there any more flushes
// nothing of that: what is late of it are the same bytes for the same place, and has had the time of
// a re-dial to get there; those that come again are flushed by whoever writes them. The keys that
// all this was written by are there until then.

// flushDepth is how many of a NIC's flushes are under way, and regionFlushes how many of a region; more
// wait for those. A flush is of all waiting tickets of its region: on PCIe a read pushes all earlier writes
// of the NIC to that device, so that one read of the last place is enough (NCCL, ncclIbIflush in
// net_ib.cc, reads the last buffer of up to 8 receives).
const (
	flushDepth    = 64
	regionFlushes = 2
)

// flushers is what a Set has of it.
type flushers struct {
	flushes int // posted and not ended
	// leaving are the ended channels of which something is being flushed.
	leaving map[*Arrivals]bool
	// unflushable says why there is none. Any goroutine reads it.
	unflushable atomic.Pointer[error]
	kept        []kept
	// catching are the flushes of what was written by queue pairs of before, and before are the
	// NICs as these knew them, to be retired when those have ended.
	catching int
	before   []*nic
}

// kept is a flush for a NIC's next queue pair.
type kept struct {
	ticket *ticket
	nic    *nic
}

// noFlush says why nothing is flushed. Any goroutine may call it once the Set is settled.
func (s *Set) noFlush() error {
	if why := s.unflushable.Load(); why != nil {
		return *why
	}
	return nil
}

// flusher is a NIC's queue pair for flushes.
type flusher struct {
	*verbs.Pair
	posted []reading // the oldest first
	waits  []reading
	failed bool
}

// reading is a flush of tickets of a region. The read is of the last one's place.
type reading struct {
	tickets []*ticket
	send    verbs.Send
	again   bool // of what queue pairs of before have written
}

func (r *reading) region() *registration { return r.tickets[0].region }

// errNothingStaged is of relays that have connected before there was anything to flush.
var errNothingStaged = errors.New("NICs wrote into no GPU of this relay's lanes when it connected to the other " +
	"one, so nothing can be flushed")

// thatFlush are those of some NICs that can have queue pairs for it, if there are any: with one
// that cannot nobody flushes.
func thatFlush(nics []*nic) []*nic {
	can := slices.DeleteFunc(slices.Clone(nics), func(n *nic) bool { return n.cm != nil })
	if len(can) == 0 {
		return nics
	}
	return can
}

// flushing reports whether NICs are to have queue pairs for it. It blocks.
func (s *Set) flushing() bool {
	c := &s.fabric.config
	if c.Flush == nil || c.Stages == nil || !c.Stages() {
		s.cannotFlush = errNothingStaged
		return false
	}
	return true
}

// withoutFlush keeps why there is none. GPUs' memory is not received into then, and all
// else goes on.
func (s *Set) withoutFlush(q *queue, err error) {
	s.cannotFlush = errors.Join(s.cannotFlush, fmt.Errorf("what %s writes into a GPU's memory cannot be flushed: %w",
		q.nic.name, err))
}

// buildFlusher makes a NIC's queue pair. It blocks.
func (s *Set) buildFlusher(q *queue, managed bool) {
	if managed {
		s.withoutFlush(q, errors.New("a connection manager leads no queue pair to itself"))
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

// connectFlushers has them lead to themselves. It blocks.
func (s *Set) connectFlushers() {
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

// tryFlushers reads the Set's page by each, behind the first writes. It blocks.
func (s *Set) tryFlushers() error {
	if s.cannotFlush != nil {
		return nil
	}
	left := 0
	for _, q := range s.queues {
		if _, err := q.flusher.PostSend([]verbs.Send{s.readOf(q, s.page0(), q.first.RKey())}); err != nil {
			s.withoutFlush(q, err)
			continue
		}
		left++
	}
	var batch [batchSize]verbs.Completion
	// Both sides try theirs, one after the other, and the Set comes up without them in time.
	limit := s.fabric.config.Time / 4
	for end := time.Now().Add(limit); left > 0; time.Sleep(tryPause) {
		if err := s.bringing.Err(); err != nil {
			return err
		}
		if time.Now().After(end) {
			s.withoutFlush(s.queues[0], fmt.Errorf("a first read by a queue pair that leads to itself has not ended within %v",
				limit))
			return nil
		}
		for _, q := range s.queues {
			n, err := q.Poll(batch[:])
			if err != nil {
				return err
			}
			for i := range batch[:n] {
				c := &batch[i]
				switch {
				case q.flusher.Number() != c.Pair:
					if _, _, err := s.triedOne(q, c); err != nil { // the other side goes on, too
						return err
					}
					continue
				case c.Err() != nil:
					s.withoutFlush(q, c.Err())
				}
				left--
			}
		}
	}
	return nil
}

// readOf is a flush: of one byte, which nobody looks at.
func (s *Set) readOf(q *queue, at uint64, key uint32) verbs.Send {
	return verbs.Send{Op: verbs.Read, Flags: verbs.Signaled, Length: 1, Address: s.page0(), LKey: q.first.LKey(),
		Remote: at, RKey: key}
}

// settleWrite has all NICs that have written a ticket's bytes flush them, when the completions at hand
// have been taken.
func (s *Set) settleWrite(t *ticket) {
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

// wait has a flush posted. It joins one of the same region that waits.
func (f *flusher) wait(r reading) {
	for i := range f.waits {
		if w := &f.waits[i]; !w.again && !r.again && w.region() == r.region() {
			w.tickets, w.send = append(w.tickets, r.tickets...), r.send
			return
		}
	}
	f.waits = append(f.waits, r)
}

// next takes the first waiting flush whose region has fewer than regionFlushes under way.
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

// reading is the flush of a ticket's bytes by a NIC that knows their memory.
func (s *Set) reading(t *ticket, q *queue) reading {
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

func (s *Set) postFlushes(q *queue) {
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

// flushed takes the end of a flush. It reports whether it is one.
func (s *Set) flushed(q *queue, c *verbs.Completion) bool {
	f := q.flusher
	if f == nil || f.Number() != c.Pair {
		return false
	}
	if len(f.posted) == 0 { // the first, which was given up
		return true
	}
	r := f.posted[0]
	f.posted[0] = reading{}
	f.posted = f.posted[1:]
	s.flushes--
	switch err := c.Err(); {
	case s.gone != nil: // and nobody waits for it
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

// flushed is that one NIC has.
func (t *ticket) flushed() {
	if t.unflushed--; t.unflushed > 0 {
		return
	}
	if t.arrivals.open[t] && !t.doubtful {
		t.arrive()
	}
	t.arrivals.flushed()
}

// cannot keeps a flush that has failed.
func (s *Set) cannot(q *queue, tickets []*ticket, err error) {
	q.flusher.failed = true
	for _, t := range tickets {
		s.keep(q, t)
	}
	if s.phase == running {
		s.fault(q.nic, "flushing what it has written: "+err.Error())
	}
}

// keep has a ticket flushed by the NIC's next queue pair. One that is in doubt is in any case.
func (s *Set) keep(q *queue, t *ticket) {
	if !t.doubtful {
		s.kept = append(s.kept, kept{t, q.nic})
	}
}

// keepFlushes keeps all that have not ended, when the queue pairs are given back.
func (s *Set) keepFlushes() {
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

// unflushed are the NICs of which flushes are kept.
func (s *Set) unflushed() (nics []*nic) {
	for _, k := range s.kept {
		if k.ticket.arrivals.open[k.ticket] {
			nics = append(nics, k.nic)
		}
	}
	return nics
}

// withAll reports, as an error, which NIC is not among those that queue pairs are connected
// anew by, though one has flushes kept: only itself can make them.
func withAll(nics, needed []*nic) error {
	for _, n := range needed {
		if !slices.ContainsFunc(nics, func(other *nic) bool { return other.context == n.context }) {
			return unreachable("what %s has written into a GPU's memory cannot be flushed: it is not active any more", n.name)
		}
	}
	return nil
}

// flushAgain has the successors flush what was kept, and what is in doubt. Where they cannot, others
// may, with the next try.
func (s *Set) flushAgain() {
	kept := s.kept
	s.kept = nil
	for done, k := range kept {
		if !k.ticket.arrivals.open[k.ticket] {
			k.ticket.flushed() // nobody waits for it, and what has written is no more
			continue
		}
		i := slices.IndexFunc(s.queues, func(q *queue) bool { return q.nic.context == k.nic.context })
		if i < 0 || s.cannotFlush != nil {
			why := s.cannotFlush
			if i < 0 {
				why = errors.New("it is in no link any more")
			}
			s.kept = kept[done:] // of those before it each queue pair that falls keeps its own
			s.giveUp(nil, fmt.Sprintf("by %s of host %s: what it had written into a GPU's memory cannot be flushed: %v",
				k.nic.name, hostname(), why))
			return
		}
		s.readAgain(k.ticket, s.queues[i])
	}
	for _, t := range s.queued {
		if !t.region.flush || !t.arrivals.open[t] {
			continue
		}
		if s.cannotFlush != nil { // nor what comes by it again
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

func (s *Set) readAgain(t *ticket, q *queue) {
	r := s.reading(t, q)
	r.again = true
	q.flusher.wait(r)
	s.catching++
}

// caughtUp goes on once nothing is to be flushed any more that queue pairs of before have
// written.
func (s *Set) caughtUp() {
	if s.catching > 0 || s.phase != running || s.broken {
		return
	}
	s.fabric.retire(s.before)
	s.before = nil
	if s.resuming {
		s.resuming = false
		if err := s.resume(); err != nil {
			s.peer.Fail(err)
		}
	}
}
