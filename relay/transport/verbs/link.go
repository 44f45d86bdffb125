package verbs

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// sending is the state of a group as the sender.
type sending struct {
	waitingParts int // waiting to be posted
	posted       int // posted, without a known completion
	unconfirmed  int // writes whose arrival the receiver has not confirmed
	progress     time.Duration
	looking      bool
}

// write is a write of a Link after the arrival of the ticket.
type write struct {
	link   *Link
	grant  uint64
	region *regionKeys
	offset uint64
	source *registration
	from   uint64
	bytes  uint64
	nics   map[string]int // weights of NICs of this side; nil for equal weights
	left   int            // incomplete parts, plus one for a missing confirmation of the receiver
	done   func(error)
	// doubtful: the queue pairs have failed, and the write may have arrived.
	doubtful bool
}

// end counts the success of a part, or the confirmation of the receiver.
func (w *write) end() {
	if w == noWrite {
		return
	}
	if w.left--; w.left == 0 {
		w.ended(nil)
	}
}

func (w *write) ended(err error) {
	l := w.link
	if delete(l.writes, w.grant); len(l.writes) == 0 {
		delete(l.set.remoteClosed, l)
	}
	if err == nil {
		l.set.protocol.acknowledged++
	}
	w.done(err)
}

// Link writes the data of a channel. It implements transport.Link for sources in registered memory.
type Link struct {
	set          *QPGroup
	channel      *tcp.Channel
	nics         []string
	most         uint64
	pairs        []int
	regions      map[uint32]*regionKeys
	tickets      map[uint64]uint32 // unused tickets, by grant
	waiting      map[uint64]func(error)
	unconfirmed  map[uint32]*write // by ticket: writes without confirmation of the receiver
	writes       map[uint64]*write // by grant
	remoteClosed bool              // the channel is closed: no ticket follows
	splitter     splitter
}

var (
	_ transport.Link     = (*Link)(nil)
	_ transport.Arrivals = (*Arrivals)(nil)
)

// Open opens a channel as tcp.Peer does, and creates the writer for its data. The data uses the
// links of the named NICs of this side, or every link if no link has such a NIC. A write has at
// most most bytes. Call Open only while Using.
func (s *QPGroup) Open(first wire.Message, received func(wire.Message, uint32, []int), ended func(error), nics []string,
	most uint64) (*tcp.Channel, *Link, error) {
	s.peer.SendExtension(encode(&short{Kind: kindNext}))
	c, err := s.peer.Open(first, 0, received, ended)
	if err != nil {
		return nil, nil, err
	}
	l := &Link{
		set: s, channel: c, nics: nics, most: most, regions: map[uint32]*regionKeys{}, tickets: map[uint64]uint32{},
		waiting: map[uint64]func(error){}, unconfirmed: map[uint32]*write{}, writes: map[uint64]*write{},
	}
	c.SendExtension(encode(l.choose()))
	s.stateOf(c).link = l
	return c, l, nil
}

// choose selects the path over the current links. Without links choose returns the first link, and
// start sends the path again.
func (l *Link) choose() *path {
	s := l.set
	m := &path{Kind: kindPath, Most: l.most}
	if s.phase != running {
		m.Links = 1
		return m
	}
	for _, all := range []bool{false, true} {
		for i, one := range s.links {
			if m.Links < maxLinks && (all || slices.Contains(l.nics, s.nics[one.ours].name)) {
				m.Link[m.Links] = uint8(i)
				m.Links++
			}
		}
		if m.Links > 0 {
			break
		}
	}
	l.pairs = s.pairsOf(m)
	return m
}

func (s *QPGroup) stateOf(c *tcp.Channel) *channelState {
	e := s.channels[c]
	if e == nil {
		e = &channelState{}
		s.channels[c] = e
	}
	return e
}

// pairsOf returns the queue pairs of a path; both sides have the same number.
func (s *QPGroup) pairsOf(m *path) (list []int) {
	for _, l := range m.Link[:m.Links] {
		for i := range s.perLink {
			list = append(list, int(l)*s.perLink+i)
		}
	}
	return list
}

// ChannelClosed removes a channel that both sides have closed.
func (s *QPGroup) ChannelClosed(c *tcp.Channel) {
	if e := s.channels[c]; e != nil && e.link != nil {
		e.link.stopConfirmations() // the peer, which would confirm, has closed the channel
		e.link.remoteClosed = true
		clear(e.link.tickets)
		for grant, f := range e.link.waiting {
			delete(e.link.waiting, grant)
			f(errRemoteClosed)
		}
		if len(e.link.writes) > 0 {
			s.remoteClosed[e.link] = true
		}
	}
	delete(s.channels, c)
}

// AddTarget adds memory whose keys have arrived.
func (l *Link) AddTarget(region, _ uint32, _ []device.Part, ready func(error)) {
	if l.regions[region] == nil {
		ready(malformed("region %d without keys", region))
		return
	}
	ready(nil)
}

// RemoveTarget forgets the keys of a region.
func (l *Link) RemoveTarget(region uint32) { delete(l.regions, region) }

// Close does nothing: the caller closes the channel.
func (l *Link) Close() {}

// Ticketed calls f on the arrival of the ticket of a grant, which permits one Write, or at the end
// of the Peer. The waiting caller must hold nothing that another write needs: every channel of the
// group shares the tickets.
func (l *Link) Ticketed(grant uint64, f func(error)) {
	_, there := l.tickets[grant]
	switch s := l.set; {
	case s.gone != nil || s.closed:
		f(s.why)
	case l.remoteClosed:
		f(errRemoteClosed)
	case there:
		f(nil)
	case l.waiting[grant] != nil:
		f(malformed("grant %d is written twice", grant))
	default:
		l.waiting[grant] = f
	}
}

// Write posts a write at the end of the loop's iteration after the arrival of the ticket. Write
// calls done when the NIC of the peer has received the data, or when no NIC reads the source any
// more.
func (l *Link) Write(to transport.Target, from transport.Source, n uint64, immediate uint64, done func(error)) {
	s := l.set
	region, source := l.regions[to.Region], s.fabric.at(from.Place, n)
	switch {
	case s.gone != nil || s.closed:
		done(s.why)
	case region == nil || to.Offset > region.Bytes || n > region.Bytes-to.Offset || n == 0:
		done(malformed("write %d bytes at %d of region %d: outside the region", n, to.Offset, to.Region))
	case source == nil:
		done(errUnregistered)
	default:
		l.Ticketed(immediate, func(err error) {
			if err != nil {
				done(err)
				return
			}
			ticket := l.tickets[immediate]
			delete(l.tickets, immediate)
			w := &write{link: l, grant: immediate, region: region, offset: to.Offset, source: source,
				from: placeOf(from.Place), bytes: n, nics: from.NICs, done: done}
			l.writes[immediate] = w
			s.post(w, ticket)
		})
	}
}

var errRemoteClosed = wire.Errorf(wire.StatusPeerClosed,
	"the peer has closed a connection during a write, and the queue pairs have failed")

var errUnregistered = wire.Errorf(wire.StatusInternal, "RDMA write: the source is not registered")

// maxTickets limits the tickets that a receiver makes this relay store.
const maxTickets = 1 << 14

func (l *Link) ticketed(m *ticketed) error {
	if l.set.phase != running {
		return nil // the peer sent the ticket before the reset
	}
	if w := l.writes[m.Grant]; w != nil {
		if !w.doubtful {
			return malformed("second ticket for grant %d during the write", m.Grant)
		}
		w.doubtful = false
		l.set.post(w, m.Ticket)
		return nil
	}
	if _, again := l.tickets[m.Grant]; again || len(l.tickets) >= maxTickets {
		return malformed("second ticket for grant %d, or one beside %d unused tickets", m.Grant, len(l.tickets))
	}
	l.tickets[m.Grant] = m.Ticket
	if f := l.waiting[m.Grant]; f != nil {
		delete(l.waiting, m.Grant)
		f(nil)
	}
	return nil
}

// lost ends the writes and the waiting grants with an error. No request is outstanding.
func (l *Link) lost(why error) {
	l.set.unconfirmed -= len(l.unconfirmed)
	clear(l.unconfirmed)
	for _, w := range slices.Collect(maps.Values(l.writes)) {
		w.ended(why)
	}
	for grant, f := range l.waiting {
		delete(l.waiting, grant)
		f(why)
	}
}

// post queues the parts of a write for the end of the loop's iteration.
func (s *QPGroup) post(w *write, ticket uint32) {
	if s.phase != running {
		return // the write is in doubt and gets another ticket after the reconnect
	}
	pairs, region := w.link.pairs, w.link.regions[w.region.Region] // the keys may have changed
	if region == nil {
		region = w.region
	}
	if !w.source.known(s.nics) { // the reconnect has replaced the NICs during the registration
		s.learn(w, ticket)
		return
	}
	w.left = s.shape(pairs).parts(w.bytes)
	if err := w.link.expect(ticket, w); err != nil {
		w.ended(err)
		s.peer.Fail(err)
		return
	}
	s.touch()
	for _, part := range w.link.split(w.bytes, w.nics, region.Weights) {
		p := s.pairs[pairs[part.pair]]
		theirs := s.links[p.link].theirs
		s.waitingParts += p.push(verbs.Send{
			Op: verbs.WriteImmediate, Immediate: ticket, Length: uint32(part.length),
			Address: w.from + part.at, LKey: w.source.region(p.queue.nic).LKey(),
			Remote: region.Address + w.offset + part.at, RKey: region.Keys[theirs],
		}, w, s.adaptive(p) && w.bytes > uint64(s.fabric.config.ARThreshold))
	}
}

// adaptive reports whether the fabric of a queue pair routes adaptively: packets of one write use
// several paths, unless the write has an immediate.
func (s *QPGroup) adaptive(p *qp) bool {
	switch s.fabric.config.AdaptiveRouting {
	case launch.AdaptiveRoutingOn:
		return true
	case launch.AdaptiveRoutingOff:
		return false
	}
	return p.queue.nic.cm == nil && p.queue.nic.infiniband()
}

// learn registers the source of a write with the NICs and then posts the write.
func (s *QPGroup) learn(w *write, ticket uint32) {
	f, epoch := s.fabric, s.protocol.epoch
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return // the end of the Peer ends the write
	}
	f.building.Add(1)
	f.mu.Unlock()
	go func() {
		defer f.building.Done()
		f.beside <- struct{}{}
		err := s.registering(false, func(nics []*nic) error { return w.source.fill(f, nics) })
		<-f.beside
		f.loop.Do(func() {
			switch {
			case w.link.writes[w.grant] != w || s.protocol.epoch != epoch: // the write has ended, or has another ticket
			case err != nil:
				w.ended(fmt.Errorf("%w: %w", errUnregistered, err))
			default:
				s.post(w, ticket)
			}
		})
	}()
}

// signalEvery is the maximum number of requests without a completion, which frees room in the queue
// while others are on the way.
const signalEvery = sendDepth / 4

// flush posts waiting requests up to the free room. The completion of the last request implies the
// completion of every earlier request.
func (s *QPGroup) flush(p *qp) bool {
	n := min(len(p.waits), sendDepth-len(p.posts))
	if n == 0 {
		return false
	}
	batch := p.waits[:n]
	for i := range batch {
		number := p.done + uint64(len(p.posts)+i) + 1
		p.numbered(&batch[i], number)
		if i == n-1 || number%signalEvery == 0 {
			batch[i].Flags = verbs.Signaled
		}
	}
	if s.posted == 0 {
		s.progress = s.fabric.loop.Now()
		s.look()
	}
	posted, err := p.PostSend(batch)
	p.posts = append(p.posts, p.parts[:posted]...)
	p.parts = slices.Delete(p.parts, 0, posted)
	p.waits = slices.Delete(p.waits, 0, posted)
	s.posted += posted
	s.waitingParts -= posted
	if err != nil {
		s.unposted(p, err)
	}
	return posted > 0
}

// sent takes the completion of a request and of the earlier requests of the queue pair.
func (s *QPGroup) sent(p *qp, c *verbs.Completion) {
	n := c.ID - p.done
	if n == 0 || n > uint64(len(p.posts)) {
		return // not a request of this group
	}
	p.done, s.posted = c.ID, s.posted-int(n)
	if err := c.Err(); err != nil {
		// Earlier requests may have succeeded or failed. Their parts stay incomplete, so that the
		// writes are in doubt.
		switch {
		case s.phase != running:
		case c.Status == verbs.Flushed && s.links[p.link].managed: // the connection has ended
			s.lost(p.queue.nic, err.Error())
		default:
			s.fault(p.queue.nic, err.Error())
		}
	} else {
		s.progress = s.fabric.loop.Now()
		s.progressed()
		for _, w := range p.posts[:n] {
			w.end()
		}
	}
	p.posts = slices.Delete(p.posts, 0, int(n))
}

// stuckTime is the maximum time without a completion while writes are posted. A NIC reports a
// silent peer after its own timeouts, which is sooner unless the configuration extends them.
func (s *QPGroup) stuckTime() time.Duration {
	c := s.fabric.config
	sooner := time.Duration(4096) << min(c.Timeout, 31) * time.Duration(c.Retries+1)
	return max(10*time.Second, 4*sooner)
}

// look fails a group whose NICs report no completion.
func (s *QPGroup) look() {
	if s.looking {
		return
	}
	s.looking = true
	limit := s.stuckTime()
	time.AfterFunc(limit, func() {
		s.fabric.loop.Do(func() {
			s.looking = false
			switch {
			case s.posted+s.unconfirmed+s.flushes == 0 || s.phase != running:
			case s.fabric.loop.Now()-s.progress < limit:
				s.look()
			case s.since.IsZero():
				s.fault(s.pairs[0].queue.nic, "no write has ended for "+limit.String())
			default: // no completion since the reconnect either
				s.failed(s.pairs[0].queue.nic, "no write has ended for "+limit.String()+", twice")
			}
		})
	})
}
