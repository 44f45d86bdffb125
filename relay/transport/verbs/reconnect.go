package verbs

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// After a failure, a group replaces all of its queue pairs; no write is lost and no write arrives
// twice. The receiver knows the tickets whose writes have arrived. The sender keeps the source of a
// write until the NIC of the peer has acknowledged the write, so that only outstanding writes are
// in doubt. Both sides let their queue pairs fail, take every completion, and release the queue
// pairs. Afterwards no NIC moves bytes of earlier writes, and the set of arrived writes is final.
// After the reconnect the receiver sends another ticket for each grant whose write has not arrived,
// and the sender repeats those writes from the first byte. The remaining doubtful writes have
// arrived; their number must equal the receiver's count of arrived writes less the acknowledged
// writes. If NICs complete a write before its arrival, as iWARP does, the confirmation of the
// receiver acknowledges the write, and the confirmation may also be outstanding.
//
// A late packet of an earlier queue pair does no harm. Its queue pair is gone. If the NIC has given
// the number to another queue pair, that queue pair expects packet numbers from a new random number
// on, and belongs to a new protection domain, in which the earlier keys are invalid. The group
// registers memory again in the new domain.
//
// Config.Reconnect limits the time from the first fault to the end of the reconnect, including failed
// tries, and the time of successive faults without a completed write between. At the limit the Peer
// and its operations end with the cause.

// phase is the state of a group's queue pairs.
type phase uint8

const (
	connecting phase = iota // connecting, or not begun
	running                 // queue pairs carry data
	failing                 // a goroutine moves the queue pairs to the error state
	draining                // posted requests complete
	ending                  // a goroutine releases the queue pairs
	released                // no queue pairs
)

// Pauses before a reconnect. The first try has no pause, and each pause doubles the previous pause.
const (
	firstReconnectPause = 20 * time.Millisecond
	lastReconnectPause  = time.Second
)

// drainTime limits the wait for completions of posted requests.
const drainTime = 5 * time.Second

// reconnecting is the state of faults and reconnects.
type reconnecting struct {
	phase        phase
	used         bool // the group has been running
	ran          bool // the current NICs have been running
	carries      bool // a write has completed since the reconnect
	reconnects   int  // number of reconnects
	resetPending bool // the goroutine that uses the queue pairs ends with a reset
	protocol     reconnectProtocol

	// first fault since the last completed write and agreement
	since                 time.Time
	resumed               time.Time               // time of the last reconnect
	faults                int                     // number of faults since since
	suspectNICs           map[*verbs.Context]bool // NICs whose links have failed to connect since since
	workingNICs           map[*verbs.Context]bool // NICs of links that have carried data
	firstFault, lastFault string
	deadline              *time.Timer
}

// resetting reports whether a reset is in progress and the next negotiation has not begun.
func (s *QPGroup) resetting() bool { return s.protocol.release != releaseIdle || s.phase >= failing }

// fault resets the queue pairs on both sides after a fault of a queue pair or a port.
func (s *QPGroup) fault(n *nic, what string) {
	if !s.used {
		s.failed(n, what)
		return
	}
	s.giveUp(nil, fmt.Sprintf("by %s of host %s: %s", n.name, hostname(), what))
}

// ofLink is an error of the connection of a link.
type ofLink struct {
	link int
	error
}

func (e *ofLink) Unwrap() error { return e.error }

// giveUp resets the queue pairs on both sides. failed is the link that did not connect; nil for
// none.
func (s *QPGroup) giveUp(failed *ofLink, why string) {
	if s.broken || s.gone != nil || s.resetting() {
		return
	}
	m := &reset{Kind: kindReset}
	wire.SetText(m.Reason[:], why)
	if failed != nil {
		m.Link = uint32(failed.link) + 1
	}
	s.protocol.faulted(m)
	s.suspect(m.Link)
}

// suspect excludes the NIC of a link that did not connect from the next tries. link is the index
// plus one; 0 for none.
func (s *QPGroup) suspect(link uint32) {
	if link > 0 && link <= uint32(len(s.links)) {
		s.suspectNICs[s.nics[s.links[link-1].ours].context] = true
	}
}

// trusted returns the NICs without suspects. trusted keeps needed NICs. If every NIC is a suspect,
// trusted returns nics and true.
func trusted(nics, needed []*nic, suspects map[*verbs.Context]bool) (list []*nic, all bool) {
	var without []string
	for _, n := range nics {
		if !suspects[n.context] || slices.ContainsFunc(needed, func(other *nic) bool { return other.context == n.context }) {
			list = append(list, n)
		} else {
			without = append(without, n.name)
		}
	}
	if len(list) == 0 {
		return nics, true
	}
	if len(without) > 0 {
		logrus.Warnf("RDMA reconnects without %s: links of these NICs did not connect", strings.Join(without, ", "))
	}
	return list, false
}

func (s *QPGroup) send(m any) { s.peer.SendExtension(encode(m)) }

// resetLocal resets the queue pairs of this side.
func (s *QPGroup) resetLocal(why string) {
	// A group without writes for a long time has not failed for a long time.
	if s.since.IsZero() || s.phase == running && time.Since(s.resumed) > s.fabric.config.Reconnect {
		s.since, s.faults, s.firstFault = time.Now(), 0, why
		clear(s.suspectNICs)
		logrus.WithField("relay", s.peer.Name()).Warnf("RDMA has failed and reconnects: %s", why)
	}
	s.faults++
	s.lastFault = why
	s.carries = false
	left := s.fabric.config.Reconnect - time.Since(s.since)
	if left <= 0 {
		s.failReconnect()
		return
	}
	s.limit(left)
	if s.working {
		s.resetPending = true
		s.brought()
		return
	}
	s.tear()
}

// limit fails the Peer unless both directions carry data in time. New queue pairs alone are not
// sufficient: until the peer has sent the tickets again, no side knows the arrived writes, and the
// writes hold their sources.
func (s *QPGroup) limit(left time.Duration) {
	s.limitStop()
	var mine *time.Timer
	mine = time.AfterFunc(left, func() {
		s.fabric.loop.Do(func() {
			if s.deadline != mine { // limitStop has run
				return
			}
			if s.phase == running {
				s.lastFault = "the queue pairs reconnected, but the relays did not agree in time on the arrived writes"
			}
			s.failReconnect()
		})
	})
	s.deadline = mine
}

func (s *QPGroup) limitStop() {
	if s.deadline != nil {
		s.deadline.Stop()
		s.deadline = nil
	}
}

// agreed stops the limit after both directions have settled the doubtful writes.
func (s *QPGroup) agreed() {
	s.limitStop()
	if s.carries {
		s.since = time.Time{}
	}
}

// failReconnect fails the Peer after the limit.
func (s *QPGroup) failReconnect() {
	if s.broken || s.gone != nil {
		return
	}
	s.broken = true
	s.peer.Fail(rdmaFailed(s.peer.Name(), &reconnectError{s.firstFault, s.lastFault, s.fabric.config.Reconnect}))
}

// progressed records that the queue pairs carry data. After the agreement of both relays, the next
// fault is a new fault.
func (s *QPGroup) progressed() {
	if s.phase != running {
		return
	}
	s.carries = true
	if s.protocol.agreement == agreementComplete {
		s.since = time.Time{}
	}
}

// beside runs what on another goroutine, which owns the resources until the event loop calls then.
func (s *QPGroup) beside(what, then func()) {
	s.working = true
	s.fabric.raising.Add(1)
	go func() {
		what()
		s.fabric.raising.Done()
		s.fabric.loop.Do(func() {
			s.working = false
			then()
			s.touch()
		})
	}()
}

// tear takes the queue pairs down. Then tornDown follows.
func (s *QPGroup) tear() {
	s.phase, s.resetPending, s.using = failing, false, false
	s.asking, s.ready, s.parting = false, false, false
	pairs, queues := s.pairs, s.queues
	if s.used && s.gone == nil { // flushers still flush the arrived writes
		queues = nil
	}
	s.beside(func() {
		for _, p := range pairs {
			if p.Pair == nil {
				continue
			}
			if err := p.Fail(); err != nil {
				logrus.WithError(err).Warn("a queue pair does not enter the error state; the relay releases the queue pair")
			}
		}
		for _, q := range queues {
			if q.flusher != nil {
				logged(q.flusher.Fail())
			}
		}
	}, func() {
		s.phase, s.fell = draining, s.fabric.loop.Now()
		s.drain()
		s.drainEnds()
	})
}

// drainedAll reports whether every arrived write has been processed, if a ticket depends on that:
// every receive has completed.
func (s *QPGroup) drainedAll() bool {
	return s.gone != nil || len(s.tickets)+len(s.stale) == 0 ||
		!slices.ContainsFunc(s.pairs, func(p *qp) bool { return p.receiving > 0 })
}

// drainEnds releases the queue pairs after the completion of every posted request, or after
// drainTime: incomplete writes are in doubt, and incomplete flushes are repeated. The result is
// true after the release has begun.
func (s *QPGroup) drainEnds() bool {
	drained := s.drainedAll()
	if (!drained || s.posted+s.flushes > 0) && s.fabric.loop.Now()-s.fell < drainTime {
		return false
	}
	if s.cm.watched {
		s.fabric.loop.Unwatch(s.cm.events.FD())
	}
	s.keepFlushes()
	s.phase = ending
	plumbing := s.resources
	s.beside(plumbing.close, func() {
		s.resources = newResources()
		s.phase = released
		s.tornDown(drained)
	})
	return true
}

// close releases the resources once. It blocks.
func (p *resources) close() {
	for _, pair := range p.pairs {
		if pair.Pair != nil {
			pair.queue.leave(pair.Number())
			logged(pair.Close())
		}
	}
	p.closeManaged()
	for _, q := range p.queues {
		if q.flusher != nil {
			q.leave(q.flusher.Number())
			logged(q.flusher.Close())
		}
		q.release(q.entries)
		for _, region := range []*verbs.Region{q.first, q.acks} {
			if region != nil {
				logged(region.Close())
			}
		}
	}
	for _, memory := range [][]byte{p.first, p.ackMemory} {
		if memory != nil {
			logged(os.NewSyscallError("munmap", unix.Munmap(memory)))
		}
	}
	p.pairs, p.queues, p.first, p.ackMemory = nil, nil, nil, nil
}

func logged(err error) {
	if err != nil {
		logrus.WithError(err).Warn("release RDMA resources")
	}
}

// tornDown continues after the release of the queue pairs. drained reports whether every arrival has been
// processed.
func (s *QPGroup) tornDown(drained bool) {
	switch {
	case s.gone != nil:
		s.buried()
		return
	case !s.used:
		s.closed = true
		delete(s.fabric.sets, s)
		return
	case !drained:
		s.broken = true
		s.peer.Fail(rdmaFailed(s.peer.Name(), &drainError{s.firstFault, drainTime}))
		return
	}
	s.protocol.released()
}

// recall prepares a repetition: open tickets wait for another grant, and writes are in doubt.
func (s *QPGroup) recall() {
	var again []*ticket
	for _, t := range s.tickets {
		again = append(again, t)
	}
	slices.SortFunc(again, func(a, b *ticket) int { return int(int32(a.number - b.number)) })
	for _, t := range again {
		t.number, t.seen, t.doubtful = 0, 0, true
	}
	clear(s.tickets)
	// The recalled tickets come first: receives suffice for them, and a sender may have filled a
	// slot for each.
	s.queued = slices.Concat(again, s.queued)
	s.stale, s.forgiven = nil, nil
	s.waitingParts, s.posted, s.unconfirmed = 0, 0, 0
	for _, e := range s.channels {
		if e.link != nil {
			clear(e.link.tickets)
			clear(e.link.unconfirmed)
			for _, w := range e.link.writes {
				w.doubtful = true
			}
		}
	}
	for l := range s.remoteClosed { // no grant repeats these writes
		l.lost(errRemoteClosed)
	}
}

// renegotiate begins the next negotiation after both sides have released their queue pairs. The dialing
// side begins.
func (s *QPGroup) renegotiate() {
	s.phase, s.begun = connecting, false
	if !s.dialed {
		return
	}
	epoch := s.protocol.epoch
	again := func() {
		if s.gone == nil && !s.broken && s.protocol.epoch == epoch && s.phase == connecting && !s.begun {
			s.begin(s.offer)
		}
	}
	if s.faults < 2 {
		again()
		return
	}
	pause := min(firstReconnectPause<<min(s.faults-2, 10), lastReconnectPause)
	time.AfterFunc(pause, func() { s.fabric.loop.Do(again) })
}

// start starts the data, after the first negotiation and after a reconnect.
func (s *QPGroup) start() {
	again := s.used
	s.phase, s.used, s.ran, s.using = running, true, true, true
	s.unflushable.Store(&s.cannotFlush)
	s.watch()
	for _, q := range s.queues { // an event about a changed address during the negotiation concerned no group
		s.workingNICs[q.nic.context] = true
		if q.nic.changes.Load() != q.nic.seen {
			s.fabric.readdressed(q.nic, verbs.Event{Kind: verbs.GIDsChanged, Port: q.nic.port})
		}
	}
	if !again {
		s.peer.Outlast(s.fabric.config.Reconnect)
		s.protocol.first()
		s.settle(nil)
		return
	}
	s.bringingStop()
	s.reconnects++
	s.resumed = time.Now()
	logrus.WithField("relay", s.peer.Name()).Infof("RDMA has reconnected, try %d: %s", s.faults, s.Way())
	for c, e := range s.channels {
		if e.link != nil {
			c.SendExtension(encode(e.link.choose()))
		}
	}
	s.peer.SendExtension(encode(&step{Kind: kindResume, Epoch: s.protocol.epoch}))
	s.flushAgain()
}

// handleReset handles a message about a reset.
func (s *QPGroup) handleReset(m any) error {
	if !s.used {
		return malformed("%T message before the use of RDMA", m)
	}
	switch m := m.(type) {
	case *reset:
		if !s.broken {
			if err := s.protocol.asked(m); err != nil {
				return err
			}
		}
		if s.linked() {
			s.suspect(m.Link)
		}
	case *resetAck:
		return s.protocol.acked(m)
	case *step:
		if !s.resetting() { // otherwise the peer sent the message before the reset
			return s.protocol.stepped(m, s.phase == running)
		}
	}
	return nil
}

// catchingUp reports whether flushes of writes of earlier queue pairs are pending.
func (s *QPGroup) catchingUp() bool { return s.catching > 0 }

// grantAgain sends the current keys and tickets to the peer. The result is false after a failed
// registration, which begins a reset.
func (s *QPGroup) grantAgain() (bool, error) {
	for c, e := range s.channels {
		a := e.arrivals
		if a == nil {
			continue
		}
		if len(a.open) > 0 && (e.path == nil || !s.hasLinks(e.path)) {
			return false, malformed("a channel has no path over the new links")
		}
		for number, r := range a.regions {
			if _, err := s.fabric.taken(r.what, s); err != nil {
				s.giveUp(nil, fmt.Sprintf("on host %s: %v", hostname(), err))
				return false, nil
			}
			c.SendExtension(encode(a.keys(number, r)))
		}
	}
	s.issue()
	return true, nil
}

// hasLinks reports whether every link of a path exists.
func (s *QPGroup) hasLinks(m *path) bool {
	return !slices.ContainsFunc(m.Link[:m.Links], func(l uint8) bool { return int(l) >= len(s.links) })
}

// doubtful returns the number of the doubtful writes without another ticket, which had arrived. end
// completes the writes.
func (s *QPGroup) doubtful() (n int, end func()) {
	var there []*write
	for _, e := range s.channels {
		if e.link == nil {
			continue
		}
		for _, w := range e.link.writes {
			if w.doubtful {
				there = append(there, w)
			}
		}
	}
	return len(there), func() {
		for _, w := range there {
			w.doubtful = false
			w.ended(nil)
		}
	}
}

func (s *QPGroup) timerStop() {
	s.bringingStop()
	s.limitStop()
}

func (s *QPGroup) bringingStop() {
	if s.timer != nil {
		s.timer.Stop()
	}
	if s.brought != nil {
		s.brought()
	}
}
