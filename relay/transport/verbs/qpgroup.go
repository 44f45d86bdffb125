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

// Depths of the queues of a queue pair.
const (
	// sendDepth is the maximum number of posted requests of a queue pair. Further requests wait.
	sendDepth = 256
	// credits is the maximum number of outstanding tickets of a group. Each queue pair has a posted
	// receive for each ticket, and spare receives while used receives wait to be posted again.
	credits  = 256
	spare    = 64
	receives = credits + spare
)

// QPGroup holds the RDMA queue pairs between this relay and one peer. It extends a tcp.Peer. The
// event loop owns the group.
type QPGroup struct {
	fabric *Fabric
	peer   *tcp.Peer
	dialed bool // this side has dialed the peer
	nics   []*nic
	// registers is a snapshot of nics for goroutines other than the event loop.
	registers atomic.Pointer[[]*nic]

	theirs  []portInfo
	links   []qpLink
	perLink int
	*resources

	// settled: the negotiation with the peer has ended. err is nil if data uses RDMA.
	settled   bool
	settledAt time.Time
	err       error
	// refusedThere: err is the reason of the peer.
	refusedThere bool
	waiting      []func(error)
	using        bool // the dialing side has sent use
	next         bool // the data of the next channel that the peer opens uses RDMA
	asking       bool // the dialing side waits for connection requests, or for first writes
	ready        bool // while asking, the peer has sent ready
	begun        bool // the negotiation has begun
	joined       bool // the peer has sent its queue pairs: the answer, or connect
	presuming    bool // a goroutine builds queue pairs for the expected answer
	// held is the answer that arrived during the build.
	held *answer
	// presumed has the links of existing queue pairs before the answer.
	presumed []qpLink
	tried    bool // the first writes have passed in both directions
	working  bool // a goroutine owns the resources
	timer    *time.Timer
	// bringing is the context of the negotiation.
	bringing context.Context
	brought  context.CancelFunc
	page     page // page is the page of the peer

	why    error  // why is the cause of the Peer's end
	gone   func() // gone is called when no request is outstanding
	fell   time.Duration
	closed bool // closed: the group has no queue pairs and creates no more
	ended  bool // ended: the remaining operations have ended, and the Peer may end
	// broken: the group has failed the Peer. parting: the connection of a queue pair has ended, and
	// the Peer may end soon; the group posts no request.
	broken, parting bool

	channels map[*tcp.Channel]*channelState
	// remoteClosed has the writers whose channels the peer has closed during a write.
	remoteClosed map[*Link]bool

	sending
	receiving
	flushers
	reconnecting
	liveness
	touched bool // the group is in Fabric.due
}

// qpLink connects a NIC of this relay and a NIC of the peer. managed and sends are needs of either
// NIC (portInfo.Ways).
type qpLink struct {
	ours, theirs   int
	managed, sends bool
}

// resources are the objects that a group has created on its NICs. A goroutine creates the resources
// before the event loop uses them.
type resources struct {
	queues    []*queue // one for each NIC with a link
	pairs     []*qp    // sorted by link
	number    map[key]int
	first     []byte // source and target of the first writes
	ackMemory []byte // the acks of all queue pairs
	cm        manager
	// cannotFlush is the reason for missing flushers; nil before a failure.
	cannotFlush error
}

func newResources() *resources { return &resources{number: map[key]int{}} }

// key identifies the queue pair of a completion: numbers of queue pairs are unique only on a NIC.
type key struct {
	queue  *queue
	number uint32
}

// queue is the share of a group in the completion queue of a NIC.
type queue struct {
	*completionQueue
	set     *QPGroup
	entries int                // reserved
	inbox   []verbs.Completion // completions of queue pairs of the group, under completionQueue.mu
	nic     *nic
	first   *verbs.Region // first is the registration of resources.first
	flusher *flusher      // nil without flushes
	acks    *verbs.Region // the registration of resources.ackMemory; nil without acks
}

// qp is a queue pair. With the connection manager, Pair is nil until the connection exists.
type qp struct {
	*verbs.Pair
	id    *verbs.ID
	acks  acks
	queue *queue
	link  int
	psn   uint32
	// ece has the offered options, or the options that both sides accept; zero without ECE.
	ece verbs.ECE

	// State of sending: the waiting requests with the write of each, the writes of posted requests,
	// oldest first, and the number of the last completed request.
	waits []verbs.Send
	parts []*write
	posts []*write
	done  uint64
	// Posted receives, and receives to post again.
	receiving int
	owed      []verbs.Recv
	// tried: the first write of the peer has arrived.
	tried bool
}

// channelState has the writer of a channel, or path and arrivals.
type channelState struct {
	link     *Link
	arrivals *Arrivals
	path     *path
}

// Extend creates the queue pair group for a peer. The dialing side starts the negotiation.
func (f *Fabric) Extend(p *tcp.Peer) *QPGroup {
	s := &QPGroup{fabric: f, peer: p, dialed: p.Dialed(), resources: newResources(),
		channels: map[*tcp.Channel]*channelState{}, remoteClosed: map[*Link]bool{}}
	s.protocol.environment = s
	s.receiving.tickets = map[uint32]*ticket{}
	s.leaving, s.suspectNICs, s.workingNICs = map[*Arrivals]bool{}, map[*verbs.Context]bool{}, map[*verbs.Context]bool{}
	f.sets[s] = true
	switch {
	case p.Dialed() && f.dividesOtherwise(p):
		f.loop.Do(s.refuseParts)
	case p.Dialed():
		s.begin(s.offer)
	}
	return s
}

// dividesOtherwise reports whether the peer splits writes into other parts.
func (f *Fabric) dividesOtherwise(p *tcp.Peer) bool {
	return f.config.earlier || p.Version() < tcp.PartsVersion
}

// refuseParts selects TCP for the data.
func (s *QPGroup) refuseParts() {
	s.begun = true
	s.refuse(unreachable("the relay at %s is of an earlier release, which splits RDMA writes differently; "+
		"install the same release of Peerlane on both hosts and restart the containers", s.peer.Name()))
}

// Of returns the group of a Peer, or nil without a group.
func Of(p *tcp.Peer) *QPGroup {
	s, _ := p.Extension().(*QPGroup)
	return s
}

// begin opens the NICs and then calls next.
func (s *QPGroup) begin(next func()) {
	s.begun, s.joined, s.tried, s.held = true, false, false, nil
	s.presuming, s.presumed = false, nil
	s.bringing, s.brought = context.WithCancel(context.Background())
	again, before, unflushed, suspects := s.used, s.nics, s.unflushed(), maps.Clone(s.suspectNICs)
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
		if s.noFlush() == nil { // the peer writes into memory of GPUs
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
		if suspects == nil { // try each NIC again
			clear(s.suspectNICs)
		}
		if err == nil {
			s.setNICs(nics)
			if s.ran {
				s.before = append(s.before, before...)
			} else if again { // no write has used them
				s.fabric.retire(before)
			}
			s.ran = false
		}
		s.failByDead()
		s.worked(err, next)
	})
}

// failByDead fails the Peer if a lost NIC has pending flushes: no other NIC can flush its writes.
func (s *QPGroup) failByDead() {
	for _, n := range s.unflushed() {
		if n.dead.Load() {
			s.failed(n, "the device is lost before the flush of its writes into memory of a GPU")
			return
		}
	}
}

// late ends the first negotiation at its time limit. The timer may have expired just before the end
// of the negotiation.
func (s *QPGroup) late() {
	if !s.settled {
		s.refuse(unreachable("%w", &notConnectedError{s.fabric.config.Time}))
	}
}

// setNICs switches the group to nics.
func (s *QPGroup) setNICs(nics []*nic) {
	s.nics = nics
	s.registers.Store(&nics)
}

// work runs f on another goroutine. If f succeeds, the event loop calls next, unless the group has
// ended or begun a reset, or the negotiation has ended without RDMA: then it tears the queue pairs down.
func (s *QPGroup) work(f func() error, next func()) {
	var err error
	s.beside(func() { err = f() }, func() { s.worked(err, next) })
}

func (s *QPGroup) worked(err error, next func()) {
	switch {
	case s.gone != nil || s.resetPending || s.settled && !s.used:
		s.tear()
	case err != nil:
		s.refuse(err)
	default:
		next()
	}
}

// Settle calls f when the negotiation ends, or at once if it has ended. The error is nil if data
// uses RDMA. Call Settle on the event loop.
func (s *QPGroup) Settle(f func(error)) {
	if s.settled {
		f(s.err)
		return
	}
	s.waiting = append(s.waiting, f)
}

// Using reports whether new channels can use RDMA.
func (s *QPGroup) Using() bool { return s.used && s.gone == nil && !s.closed }

// UnusedSince returns the time at which the negotiation failed; zero before the end of the
// negotiation and after success.
func (s *QPGroup) UnusedSince() time.Time {
	if s.err == nil {
		return time.Time{}
	}
	return s.settledAt
}

// WaitsForPort reports whether the negotiation failed because no port was active, and whether that
// port belongs to this relay.
func (s *QPGroup) WaitsForPort() (waits, here bool) {
	if s.err == nil || !strings.Contains(s.err.Error(), portInactive) {
		return false, false
	}
	return true, !s.refusedThere
}

// Way describes the NICs in use, or the cause of a failed negotiation; empty during the
// negotiation.
func (s *QPGroup) Way() string {
	switch {
	case !s.settled:
		return ""
	case s.err != nil:
		return s.err.Error()
	case s.phase != running:
		return "RDMA reconnects: " + s.lastFault
	}
	var list []string
	for _, l := range s.links {
		n, t := s.nics[l.ours], &s.theirs[l.theirs]
		list = append(list, fmt.Sprintf("%s (%s) and %s (%s)", n.name, n.at(), t.name(), t.address()))
	}
	way := fmt.Sprintf("%s, queue pairs each: %d, MTU %d", strings.Join(list, "; "), s.perLink,
		s.mtu(0).Bytes()) + s.nics[s.links[0].ours].kind()
	if s.reconnects > 0 {
		way += fmt.Sprintf(", reconnected %d times, the last time after a fault: %s", s.reconnects, s.lastFault)
	}
	return way
}

func (c *portInfo) address() string {
	if c.Layer == layerInfiniBand {
		return fmt.Sprintf("LID %d", c.LID)
	}
	return verbs.GID{GID: c.GID}.Address().String()
}

func (s *QPGroup) settle(err error) {
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

// refuse ends the negotiation on both sides.
func (s *QPGroup) refuse(why error) {
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
	s.peer.SendExtension(encode(m))
	s.settle(why)
	if !s.working {
		s.tear()
	}
}

// rdmaFailed returns the error of a peer after a failure of RDMA.
func rdmaFailed(peer string, cause error) *wire.Error {
	return wire.Errorf(wire.StatusPeerRelayDied, "%w", &fault.Error{Code: fault.RDMAFailed,
		Operation: "RDMA with the relay at", Object: peer, Cause: cause})
}

// failed fails the Peer after a permanent error of a NIC.
func (s *QPGroup) failed(n *nic, what string) {
	if s.broken {
		return
	}
	s.broken = true
	s.peer.Fail(rdmaFailed(s.peer.Name(), &nicError{n.name, hostname(), what}))
}

// uses reports whether an event of a NIC, and of a queue pair if number is not 0, concerns the
// group.
func (s *QPGroup) uses(n *nic, number uint32) bool {
	if s.working || s.closed || s.resetting() {
		return false
	}
	for _, p := range s.pairs {
		if p.Pair != nil && p.queue.nic.context == n.context && (number == 0 || p.Number() == number) {
			return true
		}
	}
	return false
}

// --- negotiation ----------------------------------------------------------------------

func (s *QPGroup) offer() {
	m := &offer{Kind: kindOffer, Cards: uint32(len(s.nics))}
	for i, n := range s.nics {
		m.Card[i] = n.portInfo(s.fabric.config.Verbs)
		m.Pairs = max(m.Pairs, uint32(n.queuePairs(s.fabric.config.Verbs)))
	}
	s.peer.SendExtension(encode(m))
	s.presume(int(m.Pairs))
}

// presume builds the queue pairs of the answer that a peer with as many NICs sends, so that both sides
// build at the same time. A connection manager creates queue pairs later.
func (s *QPGroup) presume(perLink int) {
	if slices.ContainsFunc(s.nics, func(n *nic) bool { return n.cm != nil || n.sends }) {
		return
	}
	for i := range min(len(s.nics), maxLinks) {
		s.links = append(s.links, qpLink{ours: i, theirs: i})
	}
	s.perLink = min(perLink, maxPairs/len(s.links))
	s.presuming = true
	s.work(s.build, func() {
		s.presuming, s.presumed = false, s.links
		if m := s.held; m != nil {
			s.held = nil
			if err := s.answered(m); err != nil {
				s.peer.Fail(err)
			}
		}
	})
}

// HandleMessage handles a message of the peer. c is nil for a message about the whole group.
func (s *QPGroup) HandleMessage(c *tcp.Channel, payload []byte) error {
	m, err := decode(payload)
	if err != nil {
		return err
	}
	if c != nil {
		return s.handleChannelMessage(c, m)
	}
	if s.gone != nil {
		return nil
	}
	switch m := m.(type) {
	case *reset, *resetAck, *step:
		return s.handleReset(m)
	case *short:
		if m.Kind == kindNext && s.used && !s.next {
			s.next = true
			return nil
		}
	}
	if s.protocol.stale() {
		return nil // the peer sent the message before the reset
	}
	return s.negotiate(m)
}

// negotiate handles a message of the negotiation.
func (s *QPGroup) negotiate(m any) error {
	dialed := s.dialed
	switch m := m.(type) {
	case *refusal:
		return s.refused(m)
	case *offer:
		if !dialed && !s.begun {
			s.offered(m)
			return nil
		}
	case *answer:
		if dialed && s.expectsAnswer() {
			return s.takeAnswer(m)
		}
	case *connect:
		if !dialed && s.links != nil && int(m.Ends) == len(s.links)*s.perLink && !s.using && !s.joined {
			if !s.gaveUp() && !s.working {
				s.connected(m)
			}
			return nil
		}
	case *short:
		if s.linked() && !s.using && s.advance(m.Kind) {
			return nil
		}
	}
	return malformed("unexpected %T message", m)
}

// expectsAnswer reports whether the dialing side has sent an offer and no answer has arrived.
func (s *QPGroup) expectsAnswer() bool {
	return s.begun && !s.joined && s.held == nil && s.nics != nil && (s.presuming || !s.used || !s.working)
}

// takeAnswer handles an answer after the end of a build that is running.
func (s *QPGroup) takeAnswer(m *answer) error {
	switch {
	case s.gaveUp():
		return nil
	case s.presuming:
		s.held = m
		return nil
	}
	return s.answered(m)
}

// linked reports whether the relays have agreed on the links.
func (s *QPGroup) linked() bool { return s.links != nil && (s.joined || !s.dialed) }

// gaveUp reports whether this side has given up the first negotiation.
func (s *QPGroup) gaveUp() bool { return s.settled && !s.used }

// refused ends the negotiation with the cause of the peer.
func (s *QPGroup) refused(m *refusal) error {
	if s.used {
		return malformed("refusal after the use of RDMA")
	}
	s.refusedThere = !s.settled
	s.settle(unreachable("the relay at %s: %s", s.peer.Name(), wire.Text(m.Reason[:])))
	if !s.working {
		s.tear()
	}
	return nil
}

// connected connects the queue pairs of the accepting side to the queue pairs of the dialing side.
func (s *QPGroup) connected(m *connect) {
	s.joined = true // accept connect once: otherwise the connection manager would replace queue pairs
	s.page, s.cm.theirs = m.Page, m.Secret
	s.work(func() error {
		if err := s.connect(m.End[:m.Ends]); err != nil {
			return err
		}
		if err := s.requestConnections(m.Ports); err != nil {
			return err
		}
		return s.try()
	}, func() {
		s.peer.SendExtension(encode(&short{Kind: kindReady}))
	})
}

// advance handles ready and use after the queue pairs exist. The result is false for an unexpected
// message.
func (s *QPGroup) advance(kind uint32) bool {
	switch dialed := s.dialed; {
	case kind == kindReady && dialed && s.gaveUp():
	case kind == kindReady && dialed && s.working && s.asking && !s.ready:
		s.ready = true // ready comes before the last completion, or the event of the connection manager
	case kind == kindReady && dialed && !s.working:
		s.confirm()
	case kind == kindUse && !dialed && !s.gaveUp() && !s.working:
		s.start()
	default:
		return false
	}
	return true
}

// offered builds queue pairs for the ports of an offer.
func (s *QPGroup) offered(m *offer) {
	if s.fabric.dividesOtherwise(s.peer) {
		s.refuseParts()
		return
	}
	s.theirs = m.Card[:m.Cards]
	s.begin(func() { s.answer(int(m.Pairs)) })
}

// confirm starts the group on the dialing side, as the last step of the negotiation, after the first
// writes.
func (s *QPGroup) confirm() {
	use := func() {
		s.peer.SendExtension(encode(&short{Kind: kindUse}))
		s.start()
	}
	if s.tried {
		use()
		return
	}
	s.work(s.try, use)
}

// joined returns the links between the NICs of two relays, in the order of the rails. Each NIC has
// a link.
func joined(dialer, acceptor []portInfo) (links []pairing) {
	for i := range min(max(len(dialer), len(acceptor)), maxLinks) {
		l := pairing{uint8(i % len(dialer)), uint8(i % len(acceptor))}
		d, a := &dialer[l.Theirs], &acceptor[l.Ours]
		if d.Layer == a.Layer && d.is(wayManaged) == a.is(wayManaged) {
			links = append(links, l)
		}
	}
	return links
}

// answer replies to an offer on the accepting side.
func (s *QPGroup) answer(perLink int) {
	cards := make([]portInfo, len(s.nics))
	for i, n := range s.nics {
		cards[i] = n.portInfo(s.fabric.config.Verbs)
	}
	links := joined(s.theirs, cards)
	if len(links) == 0 {
		s.refuse(unreachable("no NIC has the kind of a NIC of the peer: %s (%s), and of the peer %s (%s)", s.nics[0],
			cards[0].kind(),
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
		s.peer.SendExtension(encode(m))
	})
}

// answered handles the answer on the dialing side.
func (s *QPGroup) answered(m *answer) error {
	presumed, perLink := s.presumed, s.perLink
	s.links, s.presumed, s.joined = nil, nil, true
	s.theirs, s.perLink, s.page, s.cm.theirs = m.Card[:m.Cards], int(m.Pairs), m.Page, m.Secret
	for _, l := range m.Link[:m.Links] {
		if int(l.Theirs) >= len(s.nics) {
			return malformed("link with NIC %d of %d NICs", l.Theirs, len(s.nics))
		}
		if n, t := s.nics[l.Theirs], &s.theirs[l.Ours]; (n.cm != nil) != t.is(wayManaged) {
			return malformed("link of %s and %s (%s), which connect differently", n, t.name(), t.kind())
		}
		s.join(int(l.Theirs), int(l.Ours))
	}
	built := presumed != nil && perLink == s.perLink && slices.Equal(presumed, s.links)
	s.work(func() error {
		if !built {
			s.resources.close() // of the presumed links
			clear(s.number)
			s.cannotFlush = nil
			if err := s.build(); err != nil {
				return err
			}
		}
		if err := s.connect(m.End[:m.Links*m.Pairs]); err != nil {
			return err
		}
		return s.listen()
	}, func() {
		c := &connect{Kind: kindConnect, Ends: uint32(len(s.pairs)), Page: s.ownPage(), Secret: s.cm.own, Ports: s.cm.ports}
		copy(c.End[:], s.own())
		s.peer.SendExtension(encode(c))
		then := s.acceptConnections
		if !s.managed() {
			then = s.try
		}
		s.asking = true
		s.work(then, func() {
			s.asking, s.tried = false, !s.managed()
			if s.ready {
				s.confirm()
			}
		})
	})
	return nil
}

// join creates a link between two NICs.
func (s *QPGroup) join(ours, theirs int) {
	n, t := s.nics[ours], &s.theirs[theirs]
	s.links = append(s.links, qpLink{ours: ours, theirs: theirs, managed: n.cm != nil, sends: n.sends || t.is(waySends)})
}

// own returns the queue pairs in the form of the message.
func (s *QPGroup) own() (list []end) {
	for i, p := range s.pairs {
		if s.links[p.link].managed {
			list = append(list, end{Number: uint32(i) + 1})
			continue
		}
		list = append(list, end{p.Number(), p.psn, p.ece})
	}
	return list
}

// ownPage returns the page of this side in the form of the message.
func (s *QPGroup) ownPage() (m page) {
	m.Address = s.page0()
	for _, p := range s.pairs {
		m.Keys[s.links[p.link].ours] = p.queue.first.RKey()
	}
	return m
}

// page0 returns the address of the memory for first writes.
func (s *QPGroup) page0() uint64 { return uint64(uintptr(unsafe.Pointer(&s.first[0]))) }

// pageBytes is the payload of the longest packet.
const pageBytes = 4096

// build creates the queue pairs of the links. It blocks.
func (s *QPGroup) build() (err error) {
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
	if err := s.makeAcks(); err != nil {
		return err
	}
	for _, p := range s.pairs {
		if p.Pair == nil { // a connection creates the queue pair and posts the receives
			continue
		}
		p.fill()
		if err := s.again(p); err != nil {
			return err
		}
	}
	s.connectFlushers()
	return nil
}

// buildLink creates the queue pairs of a link, and the queue of the NIC if the NIC has no queue.
func (s *QPGroup) buildLink(i int, flushes bool) error {
	l := s.links[i]
	n := s.nics[l.ours]
	if most := n.limits.PairRequests; sendDepth > most || receives > most {
		return unreachable("%s has queues of %d requests; RDMA needs %d", n.name, most, max(sendDepth, receives))
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
		if l.managed { // the connection creates the queue pair
			s.pairs = append(s.pairs, &qp{queue: q, link: i})
			continue
		}
		made, err := n.domain.NewPair(q.config(sendDepth, receives))
		if err != nil {
			return err
		}
		p := &qp{Pair: made, queue: q, link: i, psn: rand.Uint32N(1 << 24)}
		q.join(p.Number(), q)
		s.number[key{q, p.Number()}] = len(s.pairs)
		s.pairs = append(s.pairs, p)
		if !s.dialed {
			p.ece, _ = made.ECE() // a device without support returns an error and a zero ECE
		}
		if err := p.Init(n.port, uint16(s.fabric.config.PKey), verbs.RemoteWrite); err != nil {
			return err
		}
	}
	return nil
}

// buildQueue creates the queue of a NIC for every link of the NIC.
func (s *QPGroup) buildQueue(l qpLink, flushes bool) (*queue, error) {
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
		may |= verbs.RemoteRead // for the trial of the flusher
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

// mtu returns the smaller MTU of the ports and configurations of a link.
func (s *QPGroup) mtu(i int) verbs.MTU {
	l := s.links[i]
	return min(s.nics[l.ours].mtu(s.fabric.config.Verbs), verbs.MTU(s.theirs[l.theirs].MTU))
}

// connect connects the queue pairs of links without a connection manager to the queue pairs of the
// peer. It blocks.
func (s *QPGroup) connect(to []end) error {
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
			return &ofLink{p.link, fmt.Errorf("%w; the route to %s (%s)", err, t.name(), t.address())}
		}
		s.acceptedECE(p)
		// ReceiverRetries 7 retries without limit while the receiver has no posted receive.
		if err := p.ReadyToSend(verbs.Sending{PSN: p.psn, Timeout: uint8(c.Timeout), Retries: uint8(c.Retries),
			ReceiverRetries: 7, Reads: 1}); err != nil {
			return err
		}
	}
	return nil
}

// firstTicket is the immediate of first writes. No grant uses the value.
const firstTicket = 0

// tryPause is the interval of polls for completions of first writes.
const tryPause = 100 * time.Microsecond

// tryTime limits the first writes in each direction. Without an answer a NIC retries for
// Verbs.Timeout and Verbs.Retries, which may take minutes.
func (s *QPGroup) tryTime() time.Duration { return s.fabric.config.Time / 2 }

// try writes a packet of the largest size by each queue pair: the state of a queue pair does not
// show whether the network delivers. The accepting side begins and then sends ready. The dialing side
// writes after a write of each queue pair has arrived: then the peer receives, and with iWARP may
// send. Meanwhile each flusher reads the page of the group. It blocks.
func (s *QPGroup) try() error {
	from, begun := s.page0(), time.Now()
	s.tryFlushers()
	if s.dialed { // the peer, which reports its own failure sooner, may not be connected yet
		if err := s.await(s.fabric.config.Time); err != nil {
			return err
		}
	}
	for _, p := range s.pairs {
		p.push(verbs.Send{
			Op: verbs.WriteImmediate, Immediate: firstTicket, Length: uint32(s.mtu(p.link).Bytes()),
			Address: from, LKey: p.queue.first.LKey(),
			Remote: s.page.Address, RKey: s.page.Keys[s.links[p.link].theirs],
		}, noWrite, s.adaptive(p))
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
	if err := s.await(s.tryTime()); err != nil {
		return err
	}
	return s.awaitFlushers(begun)
}

// await takes the completion of a first write of each queue pair: sent on the accepting side,
// received on the dialing side. It blocks.
func (s *QPGroup) await(limit time.Duration) error {
	waits := map[int]bool{}
	for i := range s.pairs {
		waits[i] = true
	}
	for end := time.Now().Add(limit); len(waits) > 0; time.Sleep(tryPause) {
		if err := s.bringing.Err(); err != nil {
			return err
		}
		if time.Now().After(end) {
			return s.untried(slices.Min(slices.Collect(maps.Keys(waits))), fmt.Errorf("no answer within %v", limit))
		}
		if err := s.pollTrials(func(i int) { delete(waits, i) }); err != nil {
			return err
		}
	}
	return nil
}

// pollTrials takes the completions of first writes and of the flushers' first reads. heard is called for
// each first write that await waits for.
func (s *QPGroup) pollTrials(heard func(i int)) error {
	var batch [batchSize]verbs.Completion
	for _, q := range s.queues {
		n, err := q.Poll(batch[:])
		if err != nil {
			return err
		}
		for i := range batch[:n] {
			c := &batch[i]
			if f := q.flusher; f != nil && f.trying && f.Number() == c.Pair {
				if f.trying = false; c.Err() != nil {
					s.withoutFlush(q, c.Err())
				}
				continue
			}
			tried, waited, err := s.triedOne(q, c)
			if err != nil {
				return err
			}
			if waited {
				heard(tried)
			}
		}
	}
	return nil
}

// untried returns the error of the first write of a queue pair.
func (s *QPGroup) untried(i int, err error) error {
	p := s.pairs[i]
	t := &s.theirs[s.links[p.link].theirs]
	return &ofLink{p.link, unreachable("first write of %d bytes failed: %w; the route from %s to %s (%s)",
		s.mtu(p.link).Bytes(), err, p.queue.nic.name, t.name(), t.address())}
}

// triedOne takes the completion of a first write by queue pair i. waited reports whether await
// waits for the completion.
func (s *QPGroup) triedOne(q *queue, c *verbs.Completion) (i int, waited bool, err error) {
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
	number, ok := p.receivedTicket(c)
	if !ok {
		return i, false, malformed("first write without a ticket")
	}
	return i, s.dialed, s.immediate(i, number)
}

// --- the end --------------------------------------------------------------------------

// Down ends the group with the Peer and calls gone when no NIC accesses memory of channels. A
// negotiation accesses only its own memory and may take minutes to end, because a connection
// manager without an answer cannot be interrupted. Down does not wait for the negotiation.
func (s *QPGroup) Down(why error, gone func()) {
	s.why, s.gone = why, gone
	s.settle(why)
	s.timerStop()
	switch {
	case s.closed:
		s.leave()
	case s.phase == connecting || !s.used:
		s.leave()
		if !s.working {
			s.tear()
		}
	case s.phase == released:
		s.buried()
	case s.working || s.phase == draining: // continues to buried
	default:
		s.tear()
	}
}

// buried ends the group of a dead Peer after the release of all resources of the NICs.
func (s *QPGroup) buried() {
	if !s.closed {
		s.closed = true
		delete(s.fabric.sets, s)
		s.fabric.retire(slices.Concat(s.before, s.nics))
	}
	s.leave()
}

// leave ends the remaining operations and lets the Peer end.
func (s *QPGroup) leave() {
	if s.ended {
		return
	}
	s.ended = true
	for _, e := range s.channels {
		if e.link != nil {
			e.link.lost(s.why)
		}
	}
	for l := range s.remoteClosed {
		l.lost(s.why)
	}
	for a := range s.leaving {
		a.quiet()
	}
	s.gone()
}
