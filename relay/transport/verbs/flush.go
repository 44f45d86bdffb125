package verbs

import (
	"errors"
	"fmt"
	"math/bits"
	"time"

	"github.com/peerlane/peerlane/relay/verbs"
)

// What a NIC has written into a GPU's memory, and told of, may still be on its way for
// everybody but that GPU. A read by the same NIC comes behind it: when that has ended the
// bytes are there for all. Each NIC of a Set has a queue pair for this alone, which leads
// to itself and is the only one that may read. Those that a connection manager makes may as
// well, as it has them, so nothing is registered for reading with their NICs.

// flushDepth is how many of a NIC's flushes are under way; more wait for those.
const flushDepth = 64

// flushers is what a Set has of it.
type flushers struct {
	flushes int // posted and not ended
	// leaving are the ended channels of which something is being flushed.
	leaving map[*Arrivals]bool
	// noFlush says why there is none. It is set before the Set is settled.
	noFlush error
}

// flusher is a NIC's queue pair for flushes.
type flusher struct {
	*verbs.Pair
	posted []*ticket // that are read for, the oldest first
	waits  []reading
}

// reading is a flush that waits.
type reading struct {
	ticket *ticket
	send   verbs.Send
}

// errNothingStaged is of relays that have connected before there was anything to flush.
var errNothingStaged = errors.New("NICs wrote into no GPU of this relay's lanes when it connected to the other one, so nothing can be flushed")

// flushing reports whether NICs are to have queue pairs for it. It blocks.
func (s *Set) flushing() bool {
	c := s.fabric.config
	if c.Flush == nil || c.Stages == nil || !c.Stages() {
		s.noFlush = errNothingStaged
		return false
	}
	return true
}

// withoutFlush keeps why there is none. GPUs' memory is not received into then, and all
// else goes on.
func (s *Set) withoutFlush(q *queue, err error) {
	s.noFlush = errors.Join(s.noFlush, fmt.Errorf("what %s writes into a GPU's memory cannot be flushed: %w", q.nic.name, err))
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
		err = made.Init(q.nic.port, uint16(s.fabric.config.PKey), verbs.RemoteRead)
	}
	if err != nil {
		s.withoutFlush(q, err)
	}
}

// connectFlushers has them lead to themselves. It blocks.
func (s *Set) connectFlushers() {
	c := s.fabric.config
	for _, q := range s.queues {
		f, n := q.flusher, q.nic
		if s.noFlush != nil || f == nil {
			return
		}
		err := f.ReadyToReceive(verbs.Route{
			Pair: f.Number(), MTU: n.mtu(c.Verbs), LID: n.is.LID, Global: !n.infiniband(), GID: n.gid.GID,
			SourceIndex: uint8(n.gid.Index), HopLimit: hops, TrafficClass: uint8(c.TrafficClass), ServiceLevel: uint8(c.ServiceLevel),
			Port: n.port, Reads: 1, ReceiverTimer: 12,
		})
		if err == nil {
			err = f.ReadyToSend(verbs.Sending{Timeout: uint8(c.Timeout), Retries: uint8(c.Retries), ReceiverRetries: 7, Reads: 1})
		}
		if err != nil {
			s.withoutFlush(q, err)
		}
	}
}

// tryFlushers reads the Set's page by each, behind the first writes. It blocks.
func (s *Set) tryFlushers() error {
	if s.noFlush != nil {
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
			s.withoutFlush(s.queues[0], fmt.Errorf("a first read by a queue pair that leads to itself has not ended within %v", limit))
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
					if _, err := s.triedOne(q, c); err != nil { // the other side goes on, too
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
	return verbs.Send{Op: verbs.Read, Flags: verbs.Signaled, Length: 1, Address: s.page0(), LKey: q.first.LKey(), Remote: at, RKey: key}
}

// settleWrite has all NICs that have written a ticket's bytes flush them.
func (s *Set) settleWrite(t *ticket) {
	t.arrivals.flushes++
	for seen := t.seen; seen != 0; seen &= seen - 1 {
		q := s.pairs[bits.TrailingZeros64(seen)].queue
		if t.flushedBy(q) {
			continue
		}
		t.flushing = append(t.flushing, q)
		t.unflushed++
		q.flusher.waits = append(q.flusher.waits, reading{t, s.readOf(q, t.region.base+t.offset, t.region.region(q.nic).RKey())})
	}
	for _, q := range t.flushing {
		s.postFlushes(q)
	}
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
	for len(f.waits) > 0 && len(f.posted) < flushDepth && s.gone == nil && !s.broken {
		w := f.waits[0]
		f.waits[0] = reading{}
		f.waits = f.waits[1:]
		if _, err := f.PostSend([]verbs.Send{w.send}); err != nil {
			s.failed(q.nic, err.Error())
			return
		}
		if f.posted = append(f.posted, w.ticket); s.posted == 0 && s.flushes == 0 {
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
	t := f.posted[0]
	f.posted[0] = nil
	f.posted = f.posted[1:]
	s.flushes--
	switch err := c.Err(); {
	case s.gone != nil: // and nobody waits for it
	case err != nil:
		s.failed(q.nic, "flushing what it has written: "+err.Error())
	default:
		s.progress = s.fabric.loop.Now()
		if t.unflushed--; t.unflushed == 0 {
			if t.arrivals.open[t] {
				t.arrive()
			}
			t.arrivals.flushed()
		}
		s.postFlushes(q)
	}
	return true
}
