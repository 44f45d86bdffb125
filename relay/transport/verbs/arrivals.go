package verbs

import (
	"math"
	"math/bits"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/wire"
)

// receiving is the state of a group as the receiver.
type receiving struct {
	last    uint32
	tickets map[uint32]*ticket // outstanding tickets
	queued  []*ticket          // grants that wait for a free ticket
	// stale counts the missing immediates of tickets whose channels have ended.
	stale    map[uint32]int
	forgiven []uint32 // keys of stale, present or removed, oldest first
}

// ticket permits one write for a grant.
type ticket struct {
	number   uint32
	arrivals *Arrivals
	grant    uint64
	length   uint64
	parts    int
	seen     uint64 // a bit for each queue pair that has delivered the immediate
	region   *registration
	offset   uint64
	tells    bool // the receiver confirms the arrival to the sender
	// The NICs that flush the write, and the number of missing flushes.
	flushing  []*queue
	unflushed int
	// doubtful: the queue pairs have failed before all bytes had arrived.
	doubtful bool
}

// Arrivals is the receiver's side of the writes of a channel. It implements transport.Arrivals.
type Arrivals struct {
	set     *QPGroup
	channel *tcp.Channel
	arrived func(immediate, length uint64)
	regions map[uint32]*registration
	weights map[uint32]map[string]int // by region: weights of NICs of this side
	open    map[*ticket]bool
	// flushes counts pending flushes, including tickets that are no longer open. After End, none is
	// called when the count is 0.
	flushes int
	none    func()
}

// Coming reports whether the data of the channel that the peer has just opened uses RDMA.
func (s *QPGroup) Coming() bool {
	next := s.next
	s.next = false
	return next
}

// Receive creates the receiver's side of a channel after Coming returned true. Receive calls
// arrived for each write when the memory has all bytes. End revokes the grants.
func (s *QPGroup) Receive(c *tcp.Channel, arrived func(immediate, length uint64)) *Arrivals {
	a := &Arrivals{set: s, channel: c, arrived: arrived, regions: map[uint32]*registration{},
		weights: map[uint32]map[string]int{}, open: map[*ticket]bool{}}
	s.stateOf(c).arrivals = a
	return a
}

// Most returns the length of the longest write of the sender, bytes; 0 before the path has arrived.
// The sender sends the path before any announcement.
func (a *Arrivals) Most() uint64 {
	if p := a.set.stateOf(a.channel).path; p != nil {
		return p.Most
	}
	return 0
}

// AddMemory sends the keys of memory to the sender. It registers host memory. The caller must
// register memory of a GPU before, because that may be slow.
func (a *Arrivals) AddMemory(region uint32, m *device.Memory) error {
	r, err := a.set.fabric.taken(purpose{m, true}, a.set)
	if err != nil {
		return err
	}
	a.regions[region] = r
	a.channel.SendExtension(encode(a.keys(region, r)))
	return nil
}

// keys returns the message with the keys of a region.
func (a *Arrivals) keys(region uint32, r *registration) *regionKeys {
	m := &regionKeys{Kind: kindRegion, Region: region, Address: r.base, Bytes: r.bytes}
	for i, n := range a.set.nics {
		m.Keys[i] = r.region(n).RKey()
		m.Weights[i] = uint16(max(0, min(a.weights[region][n.name], math.MaxUint16)))
	}
	return m
}

// Weigh sets the shares of this side's NICs, by name, in writes to a region. Call Weigh before
// AddMemory. Nil means equal shares.
func (a *Arrivals) Weigh(region uint32, nics map[string]int) { a.weights[region] = nics }

// RemoveMemory reverses AddMemory and Weigh.
func (a *Arrivals) RemoveMemory(region uint32) {
	delete(a.regions, region)
	delete(a.weights, region)
}

// Grant permits the sender one write of length bytes: at once, or after another ticket returns.
func (a *Arrivals) Grant(grant uint64, region uint32, offset, length uint64) error {
	s := a.set
	r, p := a.regions[region], s.stateOf(a.channel).path
	switch {
	case r == nil || length == 0 || offset > r.bytes || length > r.bytes-offset:
		return wire.Errorf(wire.StatusInternal, "grant %d bytes at %d of region %d: outside the region", length, offset,
			region)
	case p == nil || length > p.Most || s.protocol.agreement.grants() && !s.hasLinks(p):
		// a path from before resume is not validated yet
		return wire.Errorf(wire.StatusInternal, "grant %d bytes: the sender writes at most %d at a time", length,
			a.Most())
	}
	t := &ticket{arrivals: a, grant: grant, length: length, region: r, offset: offset}
	a.open[t] = true
	s.queued = append(s.queued, t)
	s.issue()
	return nil
}

// issue sends tickets up to the number of receives.
func (s *QPGroup) issue() {
	for len(s.queued) > 0 && len(s.tickets) < credits && s.protocol.agreement.grants() && s.gone == nil && !s.closed {
		t := s.queued[0]
		s.queued[0] = nil
		if s.queued = s.queued[1:]; !t.arrivals.open[t] {
			continue
		}
		t.doubtful = false
		for taken := true; taken; {
			s.last++
			_, out := s.tickets[s.last]
			_, stale := s.stale[s.last]
			taken = out || stale || s.last == firstTicket
		}
		t.number = s.last
		pairs := s.pairsOf(s.stateOf(t.arrivals.channel).path)
		t.parts, t.tells = s.shape(pairs).parts(t.length), s.needsConfirmation(pairs)
		s.tickets[t.number] = t
		t.arrivals.channel.SendExtension(encode(&ticketed{Kind: kindTicket, Ticket: t.number, Grant: t.grant}))
	}
}

// Close stops calls of arrived.
func (a *Arrivals) Close() { a.arrived = func(uint64, uint64) {} }

// End revokes the grants after the sender has closed the channel, and processes earlier writes
// first. End calls none when no NIC reads or writes memory of the channel.
func (a *Arrivals) End(none func()) {
	s := a.set
	s.drain()
	for t := range a.open {
		if t.number != 0 && s.tickets[t.number] == t {
			delete(s.tickets, t.number)
			s.markStale(t)
		}
	}
	clear(a.open)
	s.issue()
	if a.flushes == 0 || s.closed {
		none()
		return
	}
	a.none = none
	s.leaving[a] = true
}

// flushed counts a finished or cancelled flush.
func (a *Arrivals) flushed() {
	if a.flushes--; a.flushes == 0 && a.none != nil {
		a.quiet()
	}
}

// quiet calls none.
func (a *Arrivals) quiet() {
	delete(a.set.leaving, a)
	a.none()
}

// maxStale limits the number of remembered stale tickets.
const maxStale = 4096

// markStale remembers a ticket with missing immediates: the sender may see the end of its write
// before this side's NIC reports the arrival.
func (s *QPGroup) markStale(t *ticket) {
	if s.stale == nil {
		s.stale = map[uint32]int{}
	}
	if len(s.forgiven) >= maxStale {
		delete(s.stale, s.forgiven[0])
		s.forgiven = s.forgiven[1:]
	}
	s.forgiven = append(s.forgiven, t.number)
	s.stale[t.number] = t.parts - bits.OnesCount64(t.seen)
}

// immediate handles an immediate from queue pair i.
func (s *QPGroup) immediate(i int, number uint32) error {
	if p := s.pairs[i]; number == firstTicket && !p.tried {
		p.tried = true
		return nil
	}
	t := s.tickets[number]
	if t == nil {
		left, stale := s.stale[number]
		if !stale {
			return malformed("%w", &ticketError{number, errNotOutstanding})
		}
		if left--; left == 0 {
			delete(s.stale, number)
			s.protocol.arrived++
		} else {
			s.stale[number] = left
		}
		return nil
	}
	if t.seen&(1<<i) != 0 {
		return malformed("%w", &ticketError{number, errTicketTwice})
	}
	if t.seen |= 1 << i; bits.OnesCount64(t.seen) < t.parts {
		return nil
	}
	delete(s.tickets, number)
	s.protocol.arrived++
	s.progressed()
	if t.region.flush {
		s.settleWrite(t)
	} else {
		t.arrive()
	}
	return nil
}

// arrive handles the arrival of all bytes of a write.
func (t *ticket) arrive() {
	delete(t.arrivals.open, t)
	if t.tells {
		t.arrivals.channel.SendExtension(encode(&arrived{Kind: kindArrived, Ticket: t.number}))
	}
	t.arrivals.arrived(t.grant, t.length)
}

// again posts the used receives of a queue pair again.
func (s *QPGroup) again(p *qp) error {
	if len(p.owed) == 0 {
		return nil
	}
	posted, err := p.PostRecv(p.owed)
	p.receiving += posted
	p.owed = p.owed[:0]
	return err
}

// ofReceive is set in the IDs of receives and clear in the IDs of writes.
const ofReceive = 1 << 63

// handleChannelMessage handles a message about a channel.
func (s *QPGroup) handleChannelMessage(c *tcp.Channel, m any) error {
	e := s.channels[c]
	switch m := m.(type) {
	case *path:
		// Once, and again after a reconnect.
		if s.used && (e == nil || e.link == nil && (e.path == nil || !s.protocol.agreement.grants())) {
			if s.phase == running && !s.hasLinks(m) {
				return malformed("a path with a link outside the %d links", len(s.links))
			}
			s.stateOf(c).path = m
			return nil
		}
	case *regionKeys:
		if e != nil && e.link != nil {
			if len(e.link.regions) >= wire.MaxMemories && e.link.regions[m.Region] == nil {
				return malformed("keys of %d regions", len(e.link.regions))
			}
			e.link.regions[m.Region] = m
			return nil
		}
	case *ticketed:
		if e != nil && e.link != nil {
			return e.link.ticketed(m)
		}
	case *arrived:
		if e != nil && e.link != nil {
			return e.link.arrived(m)
		}
	}
	return malformed("unexpected %T message about a channel", m)
}
