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

// Queue pairs that fail are replaced, all of a Set at a time, and no write is lost or comes
// twice. A receiver knows which tickets' writes have arrived; the sender keeps the source of
// a write until the other NIC has acknowledged it. So what is in doubt is only what was under
// way: both sides have their queue pairs fail, take all completions that there are and give
// the pairs back. From then on nothing of before moves, and what has arrived is final. When
// new ones are connected the receiver gives each grant whose write has not arrived another
// ticket, and the sender writes those again, from their first byte. Of the other writes
// under way it knows by that that they have arrived; their number has to be what the
// receiver has counted, less what was acknowledged. Where NICs end a write before it has arrived,
// as those of iWARP do, it is the receiver's word that acknowledges it, and that may be under way, too.
//
// A packet of before that the network delivers late does no harm. Its queue pair is no more; should
// the NIC have given that number to another one, that expects packet numbers from a new random
// one on, and is in a protection domain of its own, in which the keys of before are none.
// Memory is registered anew there.
//
// All of it, with the tries that fail, has Config.Redial from the first fault on, and
// so have faults between which no write ends well: then the Peer ends, and with it all
// operations, with the reason.

// phase is what becomes of a Set's queue pairs.
type phase uint8

const (
	meeting  phase = iota // they are made and connected, or nobody has begun to
	running               // they carry data
	failing               // a goroutine has them fail
	draining              // what was posted ends
	ending                // a goroutine gives them back
	apart                 // there are none
)

// Pauses before the queue pairs are connected again, each twice the one before; none before
// the first time.
const (
	firstRedialPause = 20 * time.Millisecond
	lastRedialPause  = time.Second
)

// drainTime is how long the ends of what was posted are waited for.
const drainTime = 5 * time.Second

// redialing is what a Set knows of its faults.
type redialing struct {
	phase    phase
	used     bool   // it has been running
	ran      bool   // and its NICs, as they are now, have
	granting bool   // the other side's paths are known: tickets can go out
	resuming bool   // the paths have come, and what was written before is still being flushed
	resolved bool   // the other side has granted again what had not arrived there
	carries  bool   // a write has ended well since they were connected
	epoch    uint32 // how often the queue pairs were given up
	redials  int    // how often others came in their place
	mustFail bool   // when the goroutine that uses the queue pairs ends

	fellHere, fellThere bool
	drained             bool // all that has arrived was heard of

	// Sequence numbers: writes of this side that have been acknowledged, and by the queue pairs
	// of before, writes that have arrived here, and what the other side says has arrived there
	// by those of before.
	acknowledged, acknowledgedBefore, arrived, arrivedThere uint64

	// of the first fault after which no write has ended well and all was agreed
	since                 time.Time
	resumed               time.Time               // when they carried data again
	faults                int                     // since then
	suspects              map[*verbs.Context]bool // the NICs whose links did not come up since then
	had                   map[*verbs.Context]bool // those that were in a link that carried data
	firstFault, lastFault string
	deadline              *time.Timer
}

// falling reports whether the queue pairs are given up, and no others begun.
func (s *Set) falling() bool { return s.mustFail || s.phase >= failing }

// fault gives the queue pairs up, after what happened to one of them or to a port, for both
// sides to make others.
func (s *Set) fault(n *nic, what string) {
	if !s.used {
		s.failed(n, what)
		return
	}
	s.giveUp(nil, fmt.Sprintf("by %s of host %s: %s", n.name, hostname(), what))
}

// ofLink is an error in connecting the queue pairs of a link.
type ofLink struct {
	link int
	error
}

func (e *ofLink) Unwrap() error { return e.error }

// giveUp ends the queue pairs, for both sides; failed is the link that does not come up, nil for
// none.
func (s *Set) giveUp(failed *ofLink, why string) {
	if s.broken || s.gone != nil || s.falling() {
		return
	}
	m := &fall{Kind: kindFall, Epoch: s.epoch}
	wire.SetText(m.Reason[:], why)
	if failed != nil {
		m.Link = uint32(failed.link) + 1
	}
	s.peer.Tell(encode(m))
	s.fallFor(why)
	s.suspect(m.Link)
}

// suspect has the next tries go without the NIC of a link that did not come up, plus one.
func (s *Set) suspect(link uint32) {
	if link > 0 && link <= uint32(len(s.links)) {
		s.suspects[s.nics[s.links[link-1].ours].context] = true
	}
}

// trusted are NICs without those that links did not come up by. Of these are kept that are
// needed, and all where there are no others.
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
		logrus.Warnf("RDMA is connected anew without %s: links of these NICs have not come up", strings.Join(without, ", "))
	}
	return list, false
}

// fallFor is a side's half of the fall.
func (s *Set) fallFor(why string) {
	// Who had nothing to write for long has not failed for as long.
	if s.since.IsZero() || s.phase == running && time.Since(s.resumed) > s.fabric.config.Redial {
		s.since, s.faults, s.firstFault = time.Now(), 0, why
		clear(s.suspects)
		logrus.WithField("relay", s.peer.Name()).Warnf("RDMA has failed, and is connected anew: %s", why)
	}
	s.faults++
	s.lastFault = why
	s.granting, s.resuming, s.resolved, s.carries = false, false, false, false
	left := s.fabric.config.Redial - time.Since(s.since)
	if left <= 0 {
		s.hopeless()
		return
	}
	s.limit(left)
	if s.working {
		s.mustFail = true
		s.brought()
		return
	}
	s.tear()
}

// limit ends the Peer where both directions do not go again in time. Queue pairs alone are not
// enough: until the other side has granted again what had not arrived, nobody knows what of the
// writes has, and they keep their sources.
func (s *Set) limit(left time.Duration) {
	s.limitStop()
	var mine *time.Timer
	mine = time.AfterFunc(left, func() {
		s.fabric.loop.Do(func() {
			if s.deadline != mine { // stopped meanwhile
				return
			}
			if s.phase == running {
				s.lastFault = "the queue pairs were connected, and the two relays did not agree in time on what had arrived"
			}
			s.hopeless()
		})
	})
	s.deadline = mine
}

func (s *Set) limitStop() {
	if s.deadline != nil {
		s.deadline.Stop()
		s.deadline = nil
	}
}

// agreed ends the limit once what was under way is settled in both directions.
func (s *Set) agreed() {
	if !s.granting || !s.resolved {
		return
	}
	s.limitStop()
	if s.carries {
		s.since = time.Time{}
	}
}

// hopeless ends the Peer.
func (s *Set) hopeless() {
	if s.broken || s.gone != nil {
		return
	}
	s.broken = true
	s.peer.Fail(rdmaFailed(fmt.Sprintf("%s has failed, %s; it could not be connected anew within %v", s.peer.Name(),
		s.firstFault, s.fabric.config.Redial), s.lastFault))
}

// progressed says that the queue pairs carry data: once both relays have agreed, too, what comes
// is another fault.
func (s *Set) progressed() {
	if s.phase != running {
		return
	}
	s.carries = true
	if s.granting && s.resolved {
		s.since = time.Time{}
	}
}

// beside does what blocks beside the loop. The goroutine has the plumbing until then is
// called.
func (s *Set) beside(what, then func()) {
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

// tear takes the queue pairs down: fallen or, at the Set's end, buried follows.
func (s *Set) tear() {
	s.phase, s.mustFail, s.using = failing, false, false
	s.asking, s.ready, s.parting = false, false, false
	pairs, queues := s.pairs, s.queues
	if s.used && s.gone == nil { // what has arrived is still flushed
		queues = nil
	}
	s.beside(func() {
		for _, p := range pairs {
			if p.Pair == nil {
				continue
			}
			if err := p.Fail(); err != nil {
				logrus.WithError(err).Warn("a queue pair does not fail; it is given back")
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

// heardAll reports whether all that has arrived was heard of, where that matters to somebody: all
// receives have ended.
func (s *Set) heardAll() bool {
	return s.gone != nil || len(s.tickets)+len(s.stale) == 0 ||
		!slices.ContainsFunc(s.pairs, func(p *pair) bool { return p.receiving > 0 })
}

// drainEnds gives the queue pairs back once all that was posted has ended, or time is over. Of
// writes, which are in doubt then, and of flushes that is no harm. It reports whether that was so.
func (s *Set) drainEnds() bool {
	s.drained = s.heardAll()
	if (!s.drained || s.posted+s.flushes > 0) && s.fabric.loop.Now()-s.fell < drainTime {
		return false
	}
	if s.cm.watched {
		s.fabric.loop.Unwatch(s.cm.events.FD())
	}
	s.keepFlushes()
	s.phase = ending
	plumbing := s.plumbing
	s.beside(plumbing.close, func() {
		s.plumbing = newPlumbing()
		s.phase = apart
		s.torn()
	})
	return true
}

// close gives it all back, once. It blocks.
func (p *plumbing) close() {
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
		for _, region := range []*verbs.Region{q.first, q.notes} {
			if region != nil {
				logged(region.Close())
			}
		}
	}
	for _, memory := range [][]byte{p.first, p.noted} {
		if memory != nil {
			logged(os.NewSyscallError("munmap", unix.Munmap(memory)))
		}
	}
	p.pairs, p.queues, p.first, p.noted = nil, nil, nil, nil
}

func logged(err error) {
	if err != nil {
		logrus.WithError(err).Warn("giving back what RDMA had")
	}
}

// torn is called when the queue pairs are gone.
func (s *Set) torn() {
	switch {
	case s.gone != nil:
		s.buried()
		return
	case !s.used:
		s.over = true
		delete(s.fabric.sets, s)
		return
	case !s.drained:
		s.broken = true
		s.peer.Fail(rdmaFailed(fmt.Sprintf("%s has failed, %s", s.peer.Name(), s.firstFault),
			fmt.Sprintf("what has arrived was not told of within %v", drainTime)))
		return
	}
	s.recall()
	s.fellHere = true
	s.peer.Tell(encode(&fallen{Kind: kindFallen, Epoch: s.epoch, Arrived: s.arrived}))
	s.apart()
}

// recall makes of what was under way what is to be granted again, and written.
func (s *Set) recall() {
	var again []*ticket
	for _, t := range s.tickets {
		again = append(again, t)
	}
	slices.SortFunc(again, func(a, b *ticket) int { return int(int32(a.number - b.number)) })
	for _, t := range again {
		t.number, t.seen, t.doubtful = 0, 0, true
	}
	clear(s.tickets)
	// They have receives for all of them: no grant that waits comes before. A sender may have
	// filled a slot for each already.
	s.queued = slices.Concat(again, s.queued)
	s.stale, s.forgiven = nil, nil
	s.waitingParts, s.posted, s.unheard = 0, 0, 0
	s.acknowledgedBefore = s.acknowledged
	for _, e := range s.ends {
		if e.link != nil {
			clear(e.link.tickets)
			clear(e.link.unheard)
			for _, w := range e.link.writes {
				w.doubtful = true
			}
		}
	}
	for l := range s.deserted { // nobody grants them again
		l.lost(errDeserted)
	}
}

// apart goes on when both sides' queue pairs are gone: the one who dialed begins.
func (s *Set) apart() {
	if !s.fellHere || !s.fellThere {
		return
	}
	s.fellHere, s.fellThere = false, false
	s.epoch++
	s.phase, s.begun = meeting, false
	if !s.peer.Dialed() {
		return
	}
	epoch := s.epoch
	again := func() {
		if s.gone == nil && !s.broken && s.epoch == epoch && s.phase == meeting && !s.begun {
			s.begin(s.offer)
		}
	}
	if s.faults < 2 {
		again()
		return
	}
	pause := min(firstRedialPause<<min(s.faults-2, 10), lastRedialPause)
	time.AfterFunc(pause, func() { s.fabric.loop.Do(again) })
}

// start is when data can go: the first time, or again.
func (s *Set) start() {
	again := s.used
	s.phase, s.used, s.ran, s.using = running, true, true, true
	s.unflushable.Store(&s.cannotFlush)
	s.watch()
	for _, q := range s.queues { // of what changed meanwhile the event was for nobody
		s.had[q.nic.context] = true
		if q.nic.changes.Load() != q.nic.seen {
			s.fabric.readdressed(q.nic, verbs.Event{Kind: verbs.GIDsChanged, Port: q.nic.port})
		}
	}
	if !again {
		s.peer.Outlast(s.fabric.config.Redial)
		s.granting, s.resolved = true, true
		s.settle(nil)
		return
	}
	s.bringingStop()
	s.redials++
	s.resumed = time.Now()
	logrus.WithField("relay", s.peer.Name()).Infof("RDMA is connected anew, try %d: %s", s.faults, s.Way())
	for c, e := range s.ends {
		if e.link != nil {
			c.Tell(encode(e.link.choose()))
		}
	}
	s.peer.Tell(encode(&step{Kind: kindResume, Epoch: s.epoch}))
	s.flushAgain()
}

// heardFall takes what the other side says of faults.
func (s *Set) heardFall(m any) error {
	if !s.used {
		return malformed("a %T of queue pairs that are not in use", m)
	}
	switch m := m.(type) {
	case *fall:
		if m.Epoch != s.epoch || s.fellThere {
			return malformed("queue pairs %d have failed, of %d", m.Epoch, s.epoch)
		}
		if !s.broken && !s.falling() {
			s.peer.Tell(encode(m)) // as if they had failed here
			s.fallFor(wire.Text(m.Reason[:]))
		}
		s.suspect(m.Link)
	case *fallen:
		if m.Epoch != s.epoch || s.fellThere || !s.falling() {
			return malformed("queue pairs %d are gone, of %d", m.Epoch, s.epoch)
		}
		s.fellThere, s.arrivedThere = true, m.Arrived
		s.apart()
	case *step:
		if s.falling() {
			return nil // said before it knew
		}
		if m.Epoch != s.epoch || s.phase != running || s.epoch == 0 {
			return malformed("step %d of queue pairs %d, of %d", m.Kind, m.Epoch, s.epoch)
		}
		if m.Kind == kindResume {
			return s.resume()
		}
		return s.resolve()
	}
	return nil
}

// resume gives the other side the keys and tickets that hold now.
func (s *Set) resume() error {
	if s.granting || s.resuming {
		return malformed("paths are told twice")
	}
	if s.catching > 0 {
		s.resuming = true
		return nil
	}
	for c, e := range s.ends {
		a := e.arrivals
		if a == nil {
			continue
		}
		if len(a.open) > 0 && (e.path == nil || !s.leads(e.path)) {
			return malformed("a channel has no path over the new links")
		}
		for number, r := range a.regions {
			if _, err := s.fabric.taken(r.what, s); err != nil {
				s.giveUp(nil, fmt.Sprintf("on host %s: %v", hostname(), err))
				return nil
			}
			c.Tell(encode(a.keys(number, r)))
		}
	}
	s.granting = true
	s.issue()
	s.peer.Tell(encode(&step{Kind: kindGranted, Epoch: s.epoch}))
	s.agreed()
	return nil
}

// leads reports whether a path has only links that there are.
func (s *Set) leads(m *path) bool {
	return !slices.ContainsFunc(m.Link[:m.Links], func(l uint8) bool { return int(l) >= len(s.links) })
}

// resolve ends what was under way and is granted no more: it had arrived.
func (s *Set) resolve() error {
	if s.resolved {
		return malformed("tickets are granted again twice")
	}
	var there []*write
	for _, e := range s.ends {
		if e.link == nil {
			continue
		}
		for _, w := range e.link.writes {
			if w.doubtful {
				there = append(there, w)
			}
		}
	}
	if s.acknowledgedBefore+uint64(len(there)) != s.arrivedThere {
		return malformed("%d writes have arrived at the relay at %s, which has acknowledged %d and does not grant %d "+
			"others again", s.arrivedThere, s.peer.Name(), s.acknowledgedBefore, len(there))
	}
	for _, w := range there {
		w.doubtful = false
		w.ended(nil)
	}
	s.resolved = true
	s.agreed()
	return nil
}

func (s *Set) timerStop() {
	s.bringingStop()
	s.limitStop()
}

func (s *Set) bringingStop() {
	if s.timer != nil {
		s.timer.Stop()
	}
	if s.brought != nil {
		s.brought()
	}
}
