package verbs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// Depths of the queues of a pair.
const (
	// sendDepth is how many writes of a pair are under way; more wait for those.
	sendDepth = 256
	// credits is how many tickets of a Set are out. Each pair has a receive posted for each
	// of them, and some more for those that are not posted again yet.
	credits  = 256
	spare    = 64
	receives = credits + spare
)

// Set is what two relays have between them: the extension of their Peer. It belongs to the
// event loop.
type Set struct {
	fabric *Fabric
	peer   *tcp.Peer
	nics   []*nic
	// registers are the NICs for who is not on the loop.
	registers atomic.Pointer[[]*nic]

	theirs  []card
	links   []link
	perLink int
	*plumbing

	// Settled is that both sides know whether data goes this way, and err why it does not.
	settled   bool
	settledAt time.Time
	err       error
	// refusedThere: err is the other relay's reason.
	refusedThere bool
	waiting      []func(error)
	using        bool // the one who dialed has said so
	next         bool // the other side opens a channel whose data goes this way
	asking       bool // the dialing side is asked for queue pairs
	ready        bool // and the other side has said meanwhile that it can be written to
	begun        bool // bringing up
	joined       bool // the other side has said how it is connected
	working      bool // a goroutine has the plumbing
	timer        *time.Timer
	// bringing lasts until it is settled.
	bringing context.Context
	brought  context.CancelFunc
	page     page // the other side's

	why  error  // the Peer's death
	gone func() // to be called when nothing is under way
	fell time.Duration
	over bool // there are no queue pairs, and will be none
	left bool // the Peer goes on without it
	// broken: the Peer is ending because of this Set. parting: a connection of a queue pair has
	// ended, and maybe the Peer is about to; nothing is posted any more.
	broken, parting bool

	ends map[*tcp.Channel]*ends
	// deserted are the ends of channels that the other side has left while they were written.
	deserted map[*Link]bool

	sending
	receiving
	flushers
	redialing
	liveness
	touched bool // it is among the Fabric's due
}

// link is two NICs, one of each side, and what both need of it: bits of their Ways.
type link struct {
	ours, theirs   int
	managed, sends bool
}

// plumbing is what a Set has of its NICs. A goroutine makes it, before the loop has it.
type plumbing struct {
	queues []*queue // one a NIC that has a link
	pairs  []*pair  // those of the first link first
	number map[key]int
	first  []byte // what the first writes are from, and the other side's into
	noted  []byte // the notes of all pairs
	cm     manager
	// cannotFlush says why there are no flushers, once it is known.
	cannotFlush error
}

func newPlumbing() *plumbing { return &plumbing{number: map[key]int{}} }

// key is which queue pair a completion is of: numbers are a NIC's.
type key struct {
	queue  *queue
	number uint32
}

// queue is a group's part of the completion queue of a NIC.
type queue struct {
	*completionQueue
	set     *Set
	entries int                // reserved
	inbox   []verbs.Completion // of this group's queue pairs, under the completion queue's mu
	nic     *nic
	first   *verbs.Region // plumbing's
	flusher *flusher      // nil where nothing is flushed
	notes   *verbs.Region // plumbing's, nil where it has none
}

// pair is a queue pair. Of one that comes up by the connection manager there is none before
// it is connected.
type pair struct {
	*verbs.Pair
	id    *verbs.ID
	notes notes
	queue *queue
	link  int
	psn   uint32
	// ece is offered to the other side, or accepted by both; zero without ECE.
	ece verbs.ECE

	// What this side sends: what waits to be posted and its writes, those of what is posted,
	// the oldest first, and the number of the last that has ended.
	waits []verbs.Send
	parts []*write
	posts []*write
	done  uint64
	// Receives that are posted, and those to be posted again.
	receiving int
	owed      []verbs.Recv
	// The other side's first write has arrived.
	tried bool
}

// ends are a channel's link, or its path and arrivals.
type ends struct {
	link     *Link
	arrivals *Arrivals
	path     *path
}

// Extend makes the Set of a Peer. The one who made the connections begins.
func (f *Fabric) Extend(p *tcp.Peer) *Set {
	s := &Set{fabric: f, peer: p, plumbing: newPlumbing(), ends: map[*tcp.Channel]*ends{}, deserted: map[*Link]bool{}}
	s.receiving.tickets = map[uint32]*ticket{}
	s.leaving, s.suspects, s.had = map[*Arrivals]bool{}, map[*verbs.Context]bool{}, map[*verbs.Context]bool{}
	f.sets[s] = true
	switch {
	case p.Dialed() && f.dividesOtherwise(p):
		f.loop.Do(s.refuseParts) // the Peer is not made yet
	case p.Dialed():
		s.begin(s.offer)
	}
	return s
}

// dividesOtherwise reports whether the other relay expects other parts of a write.
func (f *Fabric) dividesOtherwise(p *tcp.Peer) bool {
	return f.config.earlier || p.Version() < tcp.PartsVersion
}

// refuseParts has the data go over TCP.
func (s *Set) refuseParts() {
	s.begun = true
	s.refuse(unreachable("the relay at %s is of an earlier release, which divides RDMA writes otherwise; "+
		"install the same release of Peerlane on both hosts and restart the containers", s.peer.Name()))
}

// Of is a Peer's Set, nil where it has none.
func Of(p *tcp.Peer) *Set {
	s, _ := p.Extension().(*Set)
	return s
}

// begin opens the NICs, and goes on.
func (s *Set) begin(next func()) {
	s.begun, s.joined = true, false
	s.bringing, s.brought = context.WithCancel(context.Background())
	again, before, unflushed, suspects := s.used, s.nics, s.unflushed(), maps.Clone(s.suspects)
	if !again {
		s.timer = time.AfterFunc(s.fabric.config.Time, func() {
			s.fabric.loop.Do(s.late)
		})
	}
	s.links = nil
	var nics []*nic
	var err error
	s.beside(func() {
		if nics, err = s.fabric.active(); err != nil || !again {
			return
		}
		if s.noFlush() == nil { // then GPUs' memory is received into
			nics = thatFlush(nics)
		}
		all := false
		if nics, all = trusted(nics, unflushed, suspects); all {
			suspects = nil
		}
		if err = withAll(nics, unflushed); err == nil {
			nics, err = s.fabric.renew(nics, before, unflushed, &s.registers)
		}
	}, func() {
		if suspects == nil { // then each is tried again
			clear(s.suspects)
		}
		if err == nil {
			s.have(nics)
			if s.ran {
				s.before = append(s.before, before...)
			} else if again { // nothing was written through them
				s.fabric.retire(before)
			}
			s.ran = false
		}
		s.failByDead()
		s.worked(err, next)
	})
}

// failByDead ends the Peer if flushes are kept for a NIC that is lost: no queue pair can make them.
func (s *Set) failByDead() {
	for _, n := range s.unflushed() {
		if n.dead.Load() {
			s.failed(n, "the device is lost before what it has written into a GPU's memory was flushed")
			return
		}
	}
}

// late ends the first bringing up. Its timer may have run out just before all was connected.
func (s *Set) late() {
	if !s.settled {
		s.refuse(unreachable("the queue pairs were not connected within %v", s.fabric.config.Time))
	}
}

// have has the Set go by NICs from now on.
func (s *Set) have(nics []*nic) {
	s.nics = nics
	s.registers.Store(&nics)
}

// work does what blocks beside the loop.
func (s *Set) work(what func() error, next func()) {
	var err error
	s.beside(func() { err = what() }, func() { s.worked(err, next) })
}

func (s *Set) worked(err error, next func()) {
	switch {
	case s.gone != nil || s.mustFail || s.settled && !s.used: // or too late
		s.tear()
	case err != nil:
		s.refuse(err)
	default:
		next()
	}
}

// Settle calls f when it is known whether data goes this way, with the reason where it
// does not. It belongs to the loop.
func (s *Set) Settle(f func(error)) {
	if s.settled {
		f(s.err)
		return
	}
	s.waiting = append(s.waiting, f)
}

// Using reports whether data can go this way.
func (s *Set) Using() bool { return s.used && s.gone == nil && !s.over }

// UnusedSince says since when data cannot go this way; the zero time of a Set by which it can, or whose
// way is not known yet.
func (s *Set) UnusedSince() time.Time {
	if s.err == nil {
		return time.Time{}
	}
	return s.settledAt
}

// WaitsForPort reports whether data cannot go this way because no port was active when the Peer was made,
// and whether at this side.
func (s *Set) WaitsForPort() (waits, here bool) {
	if s.err == nil || !strings.Contains(s.err.Error(), portInactive) {
		return false, false
	}
	return true, !s.refusedThere
}

// Way says by which NICs, or why not; empty while that is not known.
func (s *Set) Way() string {
	switch {
	case !s.settled:
		return ""
	case s.err != nil:
		return s.err.Error()
	case s.phase != running:
		return "RDMA is being connected anew: " + s.lastFault
	}
	var list []string
	for _, l := range s.links {
		n, t := s.nics[l.ours], &s.theirs[l.theirs]
		list = append(list, fmt.Sprintf("%s (%s) and %s (%s)", n.name, n.at(), t.name(), t.address()))
	}
	way := fmt.Sprintf("%s, queue pairs each: %d, MTU %d", strings.Join(list, "; "), s.perLink,
		s.mtu(0).Bytes()) + s.nics[s.links[0].ours].kind()
	if s.redials > 0 {
		way += fmt.Sprintf(", connected anew %d times, the last time after a fault %s", s.redials, s.lastFault)
	}
	return way
}

func (c *card) address() string {
	if c.Layer == layerInfiniBand {
		return fmt.Sprintf("LID %d", c.LID)
	}
	return verbs.GID{GID: c.GID}.Address().String()
}

func (s *Set) settle(err error) {
	if s.settled {
		return
	}
	s.settled, s.settledAt, s.err = true, time.Now(), err
	s.timerStop()
	waiting := s.waiting
	s.waiting = nil
	for _, f := range waiting {
		f(err)
	}
}

// refuse ends the bringing up, for both sides.
func (s *Set) refuse(why error) {
	if s.used {
		var failed *ofLink
		errors.As(why, &failed)
		s.giveUp(failed, fmt.Sprintf("on host %s: %v", hostname(), why))
		return
	}
	if s.settled || s.gone != nil {
		return
	}
	m := &refusal{Kind: kindRefuse}
	wire.SetText(m.Reason[:], why.Error())
	s.peer.Tell(encode(m))
	s.settle(why)
	if !s.working {
		s.tear()
	}
}

// rdmaFailed returns the error of a peer whose RDMA has failed.
func rdmaFailed(with, cause string) *wire.Error {
	return wire.Errorf(wire.StatusPeerRelayDied, "%w", &fault.Error{Code: fault.RDMAFailed,
		Operation: "RDMA with the relay at", Object: with, Cause: errors.New(cause)})
}

// failed ends the Peer: a NIC says that nothing goes on.
func (s *Set) failed(n *nic, what string) {
	if s.broken {
		return
	}
	s.broken = true
	s.peer.Fail(rdmaFailed(fmt.Sprintf("%s by %s of host %s has failed", s.peer.Name(), n.name, hostname()), what))
}

// uses reports whether an event of a NIC, and of a queue pair if it names one, is about
// this Set.
func (s *Set) uses(n *nic, number uint32) bool {
	if s.working || s.over || s.falling() {
		return false
	}
	for _, p := range s.pairs {
		if p.Pair != nil && p.queue.nic.context == n.context && (number == 0 || p.Number() == number) {
			return true
		}
	}
	return false
}

// --- bringing up ----------------------------------------------------------------------

func (s *Set) offer() {
	m := &offer{Kind: kindOffer, Cards: uint32(len(s.nics))}
	for i, n := range s.nics {
		m.Card[i] = n.card(s.fabric.config.Verbs)
		m.Pairs = max(m.Pairs, uint32(n.queuePairs(s.fabric.config.Verbs)))
	}
	s.peer.Tell(encode(m))
}

// Heard takes what the other side says.
func (s *Set) Heard(c *tcp.Channel, payload []byte) error {
	m, err := decode(payload)
	if err != nil {
		return err
	}
	if c != nil {
		return s.heardOf(c, m)
	}
	if s.gone != nil {
		return nil
	}
	switch m := m.(type) {
	case *fall, *fallen, *step:
		return s.heardFall(m)
	case *short:
		if m.Kind == kindNext && s.used && !s.next {
			s.next = true
			return nil
		}
	}
	if s.used && s.falling() && !s.fellThere {
		return nil // said before it knew
	}
	dialed := s.peer.Dialed()
	switch m := m.(type) {
	case *refusal:
		if s.used {
			return malformed("RDMA is refused after it was used")
		}
		s.refusedThere = !s.settled
		s.settle(unreachable("the relay at %s: %s", s.peer.Name(), wire.Text(m.Reason[:])))
		if !s.working {
			s.tear()
		}
		return nil
	case *offer:
		if !dialed && !s.begun {
			s.offered(m)
			return nil
		}
	case *answer:
		if dialed && s.begun && s.links == nil && s.nics != nil && (!s.used || !s.working) {
			if s.settled && !s.used { // given up here
				return nil
			}
			return s.answered(m)
		}
	case *connect:
		if !dialed && s.links != nil && int(m.Ends) == len(s.links)*s.perLink && !s.using && !s.joined {
			if s.settled && !s.used || s.working {
				return nil
			}
			s.joined = true // once: by the connection manager others would take the queue pairs' place
			s.page, s.cm.theirs = m.Page, m.Secret
			s.work(func() error {
				if err := s.connect(m.End[:m.Ends]); err != nil {
					return err
				}
				if err := s.ask(m.Ports); err != nil {
					return err
				}
				return s.try()
			}, func() {
				s.peer.Tell(encode(&short{Kind: kindReady}))
			})
			return nil
		}
	case *short:
		switch {
		case m.Kind == kindReady && dialed && s.links != nil && !s.using && s.settled && !s.used: // given up here
			return nil
		case m.Kind == kindReady && dialed && s.links != nil && !s.using && s.working && s.asking && !s.ready:
			s.ready = true // a turn before this side's connection manager tells
			return nil
		case m.Kind == kindReady && dialed && s.links != nil && !s.using && !s.working:
			s.confirm()
			return nil
		case m.Kind == kindUse && !dialed && s.links != nil && !s.using && (s.used || !s.settled) && !s.working:
			s.start()
			return nil
		}
	}
	return malformed("a %T that was not to come", m)
}

// offered brings queue pairs up with the cards of an offer.
func (s *Set) offered(m *offer) {
	if s.fabric.dividesOtherwise(s.peer) {
		s.refuseParts()
		return
	}
	s.theirs = m.Card[:m.Cards]
	s.begin(func() { s.answer(int(m.Pairs)) })
}

// confirm tries the way, and has the data go by it: the dialing side does, last.
func (s *Set) confirm() {
	s.work(s.try, func() {
		s.peer.Tell(encode(&short{Kind: kindUse}))
		s.start()
	})
}

// joined are the links between two relays' NICs: each has one, in the order of their rails.
func joined(dialer, acceptor []card) (links []pairing) {
	for i := range min(max(len(dialer), len(acceptor)), maxLinks) {
		l := pairing{uint8(i % len(dialer)), uint8(i % len(acceptor))}
		d, a := &dialer[l.Theirs], &acceptor[l.Ours]
		if d.Layer == a.Layer && d.is(wayManaged) == a.is(wayManaged) {
			links = append(links, l)
		}
	}
	return links
}

// answer is what the accepting side says to an offer.
func (s *Set) answer(perLink int) {
	cards := make([]card, len(s.nics))
	for i, n := range s.nics {
		cards[i] = n.card(s.fabric.config.Verbs)
	}
	links := joined(s.theirs, cards)
	if len(links) == 0 {
		s.refuse(unreachable("no two NICs are of one kind: here is %s (%s), there %s (%s)", s.nics[0], cards[0].kind(),
			s.theirs[0].name(), s.theirs[0].kind()))
		return
	}
	for _, l := range links {
		s.join(int(l.Ours), int(l.Theirs))
	}
	s.perLink = min(perLink, maxPairs/len(links))
	for _, l := range links {
		s.perLink = min(s.perLink, s.nics[l.Ours].queuePairs(s.fabric.config.Verbs))
	}
	s.work(s.build, func() {
		m := &answer{Kind: kindAnswer, Cards: uint32(len(cards)), Links: uint32(len(links)), Pairs: uint32(s.perLink),
			Page: s.ownPage(), Secret: s.cm.own}
		copy(m.Card[:], cards)
		copy(m.Link[:], links)
		copy(m.End[:], s.own())
		s.peer.Tell(encode(m))
	})
}

// answered is what the dialing side makes of it.
func (s *Set) answered(m *answer) error {
	s.theirs, s.perLink, s.page, s.cm.theirs = m.Card[:m.Cards], int(m.Pairs), m.Page, m.Secret
	for _, l := range m.Link[:m.Links] {
		if int(l.Theirs) >= len(s.nics) {
			return malformed("a link of NIC %d, of %d", l.Theirs, len(s.nics))
		}
		if n, t := s.nics[l.Theirs], &s.theirs[l.Ours]; (n.cm != nil) != t.is(wayManaged) {
			return malformed("a link of %s and %s (%s), which connect in two ways", n, t.name(), t.kind())
		}
		s.join(int(l.Theirs), int(l.Ours))
	}
	s.work(func() error {
		if err := s.build(); err != nil {
			return err
		}
		if err := s.connect(m.End[:m.Links*m.Pairs]); err != nil {
			return err
		}
		return s.listen()
	}, func() {
		c := &connect{Kind: kindConnect, Ends: uint32(len(s.pairs)), Page: s.ownPage(), Secret: s.cm.own, Ports: s.cm.ports}
		copy(c.End[:], s.own())
		s.peer.Tell(encode(c))
		if !s.managed() {
			return
		}
		s.asking = true
		s.work(s.beAsked, func() {
			if s.asking = false; s.ready {
				s.confirm()
			}
		})
	})
	return nil
}

// join makes a link of two NICs.
func (s *Set) join(ours, theirs int) {
	n, t := s.nics[ours], &s.theirs[theirs]
	s.links = append(s.links, link{ours: ours, theirs: theirs, managed: n.cm != nil, sends: n.sends || t.is(waySends)})
}

// own are the queue pairs, as the other side has to know them.
func (s *Set) own() (list []end) {
	for i, p := range s.pairs {
		if s.links[p.link].managed {
			list = append(list, end{Number: uint32(i) + 1})
			continue
		}
		list = append(list, end{p.Number(), p.psn, p.ece})
	}
	return list
}

// ownPage is this side's, as the other side has to know it.
func (s *Set) ownPage() (m page) {
	m.Address = s.page0()
	for _, p := range s.pairs {
		m.Keys[s.links[p.link].ours] = p.queue.first.RKey()
	}
	return m
}

// page0 is where the memory for first writes is.
func (s *Set) page0() uint64 { return uint64(uintptr(unsafe.Pointer(&s.first[0]))) }

// pageBytes is the longest packet's content.
const pageBytes = 4096

// build makes the queue pairs of the links. It blocks.
func (s *Set) build() (err error) {
	if err := s.prepare(); err != nil {
		return err
	}
	if s.first, err = unix.Mmap(-1, 0, pageBytes, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return os.NewSyscallError("mmap", err)
	}
	flushes := s.flushing()
	for i := range s.links {
		if err := s.buildLink(i, flushes); err != nil {
			return &ofLink{i, err}
		}
	}
	return s.makeNotes()
}

// buildLink makes the queue pairs of a link, and its NIC's queue where there is none yet.
func (s *Set) buildLink(i int, flushes bool) error {
	l := s.links[i]
	n := s.nics[l.ours]
	if most := n.limits.PairRequests; sendDepth > most || receives > most {
		return unreachable("%s has queues for %d requests, and %d are needed", n.name, most, max(sendDepth, receives))
	}
	var q *queue
	if had := slices.IndexFunc(s.queues, func(q *queue) bool { return q.nic == n }); had >= 0 {
		q = s.queues[had]
	} else {
		var err error
		if q, err = s.buildQueue(l, flushes); err != nil {
			return err
		}
	}
	for range s.perLink {
		if l.managed { // there is one when it is connected
			s.pairs = append(s.pairs, &pair{queue: q, link: i})
			continue
		}
		made, err := n.domain.NewPair(q.config(sendDepth, receives))
		if err != nil {
			return err
		}
		p := &pair{Pair: made, queue: q, link: i, psn: rand.Uint32N(1 << 24)}
		q.join(p.Number(), q)
		s.number[key{q, p.Number()}] = len(s.pairs)
		s.pairs = append(s.pairs, p)
		if !s.peer.Dialed() {
			p.ece, _ = made.ECE() // without support there is none
		}
		if err := p.Init(n.port, uint16(s.fabric.config.PKey), verbs.RemoteWrite); err != nil {
			return err
		}
	}
	return nil
}

// buildQueue makes the queue of a link's NIC, for all links that it is in.
func (s *Set) buildQueue(l link, flushes bool) (*queue, error) {
	n := s.nics[l.ours]
	entries := flushDepth
	for _, other := range s.links {
		if other.ours == l.ours {
			entries += s.perLink * (sendDepth + receives)
		}
	}
	shared, err := s.fabric.reserve(n, entries)
	if err != nil {
		return nil, err
	}
	q := &queue{completionQueue: shared, set: s, entries: entries, nic: n}
	s.queues = append(s.queues, q)
	may := s.fabric.access(true)
	if flushes && n.cm == nil {
		may |= verbs.RemoteRead // to try it
	}
	first := uintptr(unsafe.Pointer(&s.first[0]))
	if q.first, err = n.domain.Register(first, pageBytes, uint64(first), may); err != nil {
		return nil, err
	}
	if flushes {
		s.buildFlusher(q, l.managed)
	}
	return q, nil
}

func (q *queue) config(sends, receives int) verbs.PairConfig {
	return verbs.PairConfig{Send: q.Queue, Recv: q.Queue, SendDepth: sends, RecvDepth: receives}
}

// mtu is what both ports of a link, and both configurations, have.
func (s *Set) mtu(i int) verbs.MTU {
	l := s.links[i]
	return min(s.nics[l.ours].mtu(s.fabric.config.Verbs), verbs.MTU(s.theirs[l.theirs].MTU))
}

// connect has the queue pairs lead to the other side's, but those of the connection
// manager. It blocks.
func (s *Set) connect(to []end) error {
	c := &s.fabric.config
	for i, p := range s.pairs {
		if s.links[p.link].managed {
			continue
		}
		n, t := p.queue.nic, &s.theirs[s.links[p.link].theirs]
		route := n.route(t.LID, t.GID, c)
		route.Pair, route.PSN, route.MTU = to[i].Number, to[i].PSN, s.mtu(p.link)
		s.acceptECE(p, to[i].ECE)
		if err := p.ReadyToReceive(route); err != nil {
			return &ofLink{p.link, fmt.Errorf("%w; the way to %s (%s)", err, t.name(), t.address())}
		}
		s.acceptedECE(p)
		p.fill()
		if err := s.again(p); err != nil {
			return err
		}
		// A receiver that has none posted is waited for: 7 stands for ever.
		if err := p.ReadyToSend(verbs.Sending{PSN: p.psn, Timeout: uint8(c.Timeout), Retries: uint8(c.Retries),
			ReceiverRetries: 7, Reads: 1}); err != nil {
			return err
		}
	}
	s.connectFlushers()
	return nil
}

// firstTicket is the immediate of first writes; no grant has it.
const firstTicket = 0

// tryPause is how often it is looked for the ends of first writes.
const tryPause = 100 * time.Microsecond

// tryTime limits the first writes in each direction: a NIC without an answer tries again for
// Verbs.Timeout and Verbs.Retries, which may take minutes.
func (s *Set) tryTime() time.Duration { return s.fabric.config.Time / 2 }

// try writes a packet of the largest size by each queue pair, whose state says nothing of
// the network between them. The accepting side begins, when it says that it can be written
// to; the dialing one has heard from all of its queue pairs, too, when it returns. It blocks.
func (s *Set) try() error {
	from := s.page0()
	if s.peer.Dialed() { // before it has heard of one the called side of iWARP may send nothing
		if err := s.await(); err != nil {
			return err
		}
	}
	for _, p := range s.pairs {
		p.push(verbs.Send{
			Op: verbs.WriteImmediate, Immediate: firstTicket, Length: uint32(s.mtu(p.link).Bytes()),
			Address: from, LKey: p.queue.first.LKey(),
			Remote: s.page.Address, RKey: s.page.Keys[s.links[p.link].theirs],
		}, nobody, s.adaptive(p))
		sends := p.waits
		p.waits, p.parts = nil, nil
		for i := range sends {
			p.numbered(&sends[i], 0)
		}
		sends[len(sends)-1].Flags = verbs.Signaled
		if _, err := p.PostSend(sends); err != nil {
			return err
		}
	}
	if err := s.await(); err != nil {
		return err
	}
	return s.tryFlushers()
}

// await takes the end of a first write of each queue pair, of this or of the other side. It blocks.
func (s *Set) await() error {
	var batch [batchSize]verbs.Completion
	waits := map[int]bool{}
	for i := range s.pairs {
		waits[i] = true
	}
	limit := s.tryTime()
	for end := time.Now().Add(limit); len(waits) > 0; time.Sleep(tryPause) {
		if err := s.bringing.Err(); err != nil {
			return err
		}
		if time.Now().After(end) {
			return s.untried(slices.Min(slices.Collect(maps.Keys(waits))), fmt.Errorf("no answer within %v", limit))
		}
		for _, q := range s.queues {
			n, err := q.Poll(batch[:])
			if err != nil {
				return err
			}
			for i := range batch[:n] {
				tried, heard, err := s.triedOne(q, &batch[i])
				if err != nil {
					return err
				}
				if heard {
					delete(waits, tried)
				}
			}
		}
	}
	return nil
}

// untried returns the error of a first write of a queue pair.
func (s *Set) untried(i int, err error) error {
	p := s.pairs[i]
	t := &s.theirs[s.links[p.link].theirs]
	return &ofLink{p.link, unreachable("a first write of %d bytes does not go through: %w; the way from %s to %s (%s)",
		s.mtu(p.link).Bytes(), err, p.queue.nic.name, t.name(), t.address())}
}

// triedOne takes the end of a first write of one side, by queue pair i. It reports whether await
// waits for it.
func (s *Set) triedOne(q *queue, c *verbs.Completion) (i int, waited bool, err error) {
	i, known := s.number[key{q, c.Pair}]
	if !known {
		return 0, false, nil
	}
	p := s.pairs[i]
	if c.ID&ofReceive != 0 {
		p.receiving--
	}
	if err := c.Err(); err != nil {
		return i, false, s.untried(i, err)
	}
	if c.ID&ofReceive == 0 {
		return i, true, nil
	}
	number, ok := p.told(c)
	if !ok {
		return i, false, malformed("a first write comes with no number")
	}
	return i, s.peer.Dialed(), s.immediate(i, number)
}

// --- the end --------------------------------------------------------------------------

// Down ends it with the Peer: nothing reads or writes memory when gone is called. What is
// being brought up has none but its own, and may take minutes to end: a connection manager
// that is not answered cannot be interrupted. It is given back then, and nobody waits for it.
func (s *Set) Down(why error, gone func()) {
	s.why, s.gone = why, gone
	s.settle(why)
	s.timerStop()
	switch {
	case s.over:
		s.leave()
	case s.phase == meeting || !s.used:
		s.leave()
		if !s.working {
			s.tear()
		}
	case s.phase == apart:
		s.buried()
	case s.working || s.phase == draining: // goes on to buried
	default:
		s.tear()
	}
}

// buried is the end of a Set of a dead Peer, once it has nothing of the NICs any more.
func (s *Set) buried() {
	if !s.over {
		s.over = true
		delete(s.fabric.sets, s)
		s.fabric.retire(slices.Concat(s.before, s.nics))
	}
	s.leave()
}

// leave lets the Peer end, and what has not ended.
func (s *Set) leave() {
	if s.left {
		return
	}
	s.left = true
	for _, e := range s.ends {
		if e.link != nil {
			e.link.lost(s.why)
		}
	}
	for l := range s.deserted {
		l.lost(s.why)
	}
	for a := range s.leaving {
		a.quiet()
	}
	s.gone()
}
