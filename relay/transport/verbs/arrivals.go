package verbs

import (
	"math"
	"math/bits"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/wire"
)

// receiving is what a Set has under way as the receiver.
type receiving struct {
	last    uint32
	tickets map[uint32]*ticket // that are out
	queued  []*ticket          // that wait for one of those to come back
	// stale are how many immediates may still come of tickets whose channels have ended.
	stale    map[uint32]int
	forgiven []uint32 // those that are or were stale, the oldest first
}

// ticket is a grant's, for one write.
type ticket struct {
	number   uint32
	arrivals *Arrivals
	grant    uint64
	length   uint64
	parts    int
	seen     uint64 // a bit for each queue pair that has delivered its immediate
	region   *registration
	offset   uint64
	tells    bool // the sender is told when it has arrived
	// The NICs that flush it, and how many have not.
	flushing  []*queue
	unflushed int
	// doubtful: its queue pairs have failed before all of it was there.
	doubtful bool
}

// Arrivals is the receiver's end of a channel's writes. It implements transport.Arrivals.
type Arrivals struct {
	set     *Set
	channel *tcp.Channel
	arrived func(immediate, length uint64)
	regions map[uint32]*registration
	weights map[uint32]map[string]int // of this side's NICs, by region
	open    map[*ticket]bool
	// flushes are those of its tickets that are not flushed yet, also where they are not open
	// any more, and none is called when there are none, once it has ended.
	flushes int
	none    func()
}

// Coming reports whether a channel that the other side has opened just now has its data
// this way.
func (s *Set) Coming() bool {
	next := s.next
	s.next = false
	return next
}

// Receive makes the receiver's end of a channel that was Coming. arrived is
// called for each write once all of it is in the memory. What is granted ends with End.
func (s *Set) Receive(c *tcp.Channel, arrived func(immediate, length uint64)) *Arrivals {
	a := &Arrivals{set: s, channel: c, arrived: arrived, regions: map[uint32]*registration{},
		weights: map[uint32]map[string]int{}, open: map[*ticket]bool{}}
	s.endsOf(c).arrivals = a
	return a
}

// Most is the longest grant that the sender fills with one write, bytes; 0 while it has
// not said so, which it does before it announces anything.
func (a *Arrivals) Most() uint64 {
	if p := a.set.endsOf(a.channel).path; p != nil {
		return p.Most
	}
	return 0
}

// AddMemory tells the sender the keys of memory. The host's is registered where it is not;
// a GPU's has to be, because that may take long.
func (a *Arrivals) AddMemory(region uint32, m *device.Memory) error {
	r, err := a.set.fabric.taken(purpose{m, true}, a.set)
	if err != nil {
		return err
	}
	a.regions[region] = r
	a.channel.Tell(encode(a.keys(region, r)))
	return nil
}

// keys are what the other side has to know of a region.
func (a *Arrivals) keys(region uint32, r *registration) *regionKeys {
	m := &regionKeys{Kind: kindRegion, Region: region, Address: r.base, Bytes: r.bytes}
	for i, n := range a.set.nics {
		m.Keys[i] = r.region(n).RKey()
		m.Weights[i] = uint16(max(0, min(a.weights[region][n.name], math.MaxUint16)))
	}
	return m
}

// Weigh sets the shares of this side's NICs, by name, in writes to a region. Call Weigh before
// AddMemory. Nil stands for equal shares.
func (a *Arrivals) Weigh(region uint32, nics map[string]int) { a.weights[region] = nics }

// RemoveMemory ends AddMemory and Weigh.
func (a *Arrivals) RemoveMemory(region uint32) {
	delete(a.regions, region)
	delete(a.weights, region)
}

// Grant gives the sender a ticket for one write of all of it, now or when another comes
// back.
func (a *Arrivals) Grant(grant uint64, region uint32, offset, length uint64) error {
	s := a.set
	r, p := a.regions[region], s.endsOf(a.channel).path
	switch {
	case r == nil || length == 0 || offset > r.bytes || length > r.bytes-offset:
		return wire.Errorf(wire.StatusInternal, "%d bytes at %d of region %d cannot be granted", length, offset, region)
	case p == nil || length > p.Most || s.granting && !s.leads(p): // told before resume, it was not looked at
		return wire.Errorf(wire.StatusInternal, "%d bytes are granted, and the sender writes up to %d at a time", length,
			a.Most())
	}
	t := &ticket{arrivals: a, grant: grant, length: length, region: r, offset: offset}
	a.open[t] = true
	s.queued = append(s.queued, t)
	s.issue()
	return nil
}

// issue gives out tickets, as many as there are receives for.
func (s *Set) issue() {
	for len(s.queued) > 0 && len(s.tickets) < credits && s.granting && s.gone == nil && !s.over {
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
		pairs := s.pairsOf(s.endsOf(t.arrivals.channel).path)
		t.parts, t.tells = s.shape(pairs).parts(t.length), s.heard(pairs)
		s.tickets[t.number] = t
		t.arrivals.channel.Tell(encode(&ticketed{Kind: kindTicket, Ticket: t.number, Grant: t.grant}))
	}
}

// Close ends the calls.
func (a *Arrivals) Close() { a.arrived = func(uint64, uint64) {} }

// End takes back what is granted: the sender has left the channel, and writes nothing any
// more. What it has written is heard of first. none is called when no NIC reads or writes
// memory of the channel any more.
func (a *Arrivals) End(none func()) {
	s := a.set
	s.drain()
	for t := range a.open {
		if t.number != 0 && s.tickets[t.number] == t {
			delete(s.tickets, t.number)
			s.forgive(t)
		}
	}
	clear(a.open)
	s.issue()
	if a.flushes == 0 || s.over {
		none()
		return
	}
	a.none = none
	s.leaving[a] = true
}

// flushed is that one of its tickets is, or will not be.
func (a *Arrivals) flushed() {
	if a.flushes--; a.flushes == 0 && a.none != nil {
		a.quiet()
	}
}

// quiet tells who waits for that.
func (a *Arrivals) quiet() {
	delete(a.set.leaving, a)
	a.none()
}

// mostStale bounds the tickets that are remembered of which immediates may come.
const mostStale = 4096

// forgive remembers a ticket of which immediates may still come: the sender can know of
// the end of its write before this side's NIC tells.
func (s *Set) forgive(t *ticket) {
	if s.stale == nil {
		s.stale = map[uint32]int{}
	}
	if len(s.forgiven) >= mostStale {
		delete(s.stale, s.forgiven[0])
		s.forgiven = s.forgiven[1:]
	}
	s.forgiven = append(s.forgiven, t.number)
	s.stale[t.number] = t.parts - bits.OnesCount64(t.seen)
}

// immediate takes one that a queue pair has delivered.
func (s *Set) immediate(i int, number uint32) error {
	if p := s.pairs[i]; number == firstTicket && !p.tried {
		p.tried = true
		return nil
	}
	t := s.tickets[number]
	if t == nil {
		left, stale := s.stale[number]
		if !stale {
			return malformed("a write with ticket %d, which is not out", number)
		}
		if left--; left == 0 {
			delete(s.stale, number)
			s.arrived++
		} else {
			s.stale[number] = left
		}
		return nil
	}
	if t.seen&(1<<i) != 0 {
		return malformed("two writes with ticket %d on one queue pair", number)
	}
	if t.seen |= 1 << i; bits.OnesCount64(t.seen) < t.parts {
		return nil
	}
	delete(s.tickets, number)
	s.arrived++
	s.progressed()
	if t.region.flush {
		s.settleWrite(t)
	} else {
		t.arrive()
	}
	return nil
}

// arrive is that all of it is in the memory.
func (t *ticket) arrive() {
	delete(t.arrivals.open, t)
	if t.tells {
		t.arrivals.channel.Tell(encode(&arrived{Kind: kindArrived, Ticket: t.number}))
	}
	t.arrivals.arrived(t.grant, t.length)
}

// again posts a pair's receives that were taken.
func (s *Set) again(p *pair) error {
	if len(p.owed) == 0 {
		return nil
	}
	posted, err := p.PostRecv(p.owed)
	p.receiving += posted
	p.owed = p.owed[:0]
	return err
}

// ofReceive is set in the IDs of receives, and in those of no writes.
const ofReceive = 1 << 63

// heardOf takes what the other side says of a channel.
func (s *Set) heardOf(c *tcp.Channel, m any) error {
	e := s.ends[c]
	switch m := m.(type) {
	case *path:
		// Once, and again when the queue pairs are others.
		if s.used && (e == nil || e.link == nil && (e.path == nil || !s.granting)) {
			if s.phase == running && !s.leads(m) {
				return malformed("a path by a link beyond all %d", len(s.links))
			}
			s.endsOf(c).path = m
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
	return malformed("a %T that was not to come, of a channel", m)
}
