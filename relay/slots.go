package relay

import (
	"slices"
	"time"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/stripe"
)

// staging has a lane's slots of a direction, striped over server GPUs.
//
// A remote relay that fills a slot, or a NIC that writes the slot, determines the time of a use.
// So connections have equal shares of the slots and alternate, regardless of their numbers of
// messages, and the last free slot is for a connection without slots: a connection with a slow peer
// leaves slots to the rest.
type staging struct {
	regions []*region
	// dealer picks the region of the next slot, by weight; nil for one region.
	dealer  *stripe.Scheduler
	slots   int
	free    []*slot
	sharing int           // connections that hold or want slots
	turn    []*connection // that want slots, the next connection first
}

// share is a connection's part of the slots.
type share struct {
	held  int
	wants []wanted // of the connection's messages in turn
}

func (p *share) none() bool { return p.held == 0 && len(p.wants) == 0 }

// wanted is a message that waits for a slot.
type wanted struct {
	since time.Duration // of the loop's clock
	take  func(*slot) bool
}

type slot struct {
	region *region
	offset uint64
	holder *connection // nil for a free slot
}

func (s *slot) place() device.Place { return s.region.memory.At(s.offset) }

// fill makes the slots of the regions. Neighbours in the list lie on different
// servers.
func (s *staging) fill() {
	if len(s.regions) > 1 {
		weights := make([]int, len(s.regions))
		for i, g := range s.regions {
			weights[i] = max(1, g.weight)
		}
		s.dealer = stripe.New(weights)
	}
	for i, some := 0, true; some; i++ {
		some = false
		for _, g := range s.regions {
			if i < g.slots {
				s.free = append(s.free, &slot{region: g, offset: uint64(i) * g.slotBytes})
				some = true
			}
		}
	}
	s.slots = len(s.free)
}

// acquire gives a slot to f now or in the connection's turn. f reports false if the slot is not
// needed any more.
func (s *staging) acquire(by *connection, f func(*slot) bool) {
	p := &by.slots
	if p.none() {
		s.sharing++
	}
	if p.wants = append(p.wants, wanted{by.session.relay.loop.Now(), f}); len(p.wants) == 1 {
		s.turn = append(s.turn, by)
	}
	s.hand()
}

func (s *staging) release(free *slot) {
	s.handBack(free)
	s.hand()
}

func (s *staging) handBack(free *slot) {
	p := &free.holder.slots
	free.holder = nil
	if i := slices.Index(s.regions, free.region); s.dealer == nil || i < 0 || !s.dealer.Failed(i) {
		s.free = append(s.free, free)
	}
	if p.held--; p.none() {
		s.sharing--
	}
}

// may reports whether a connection may have a free slot. With the minimal number of slots of a region
// may keeps no slot back: a copy would not overlap with a write.
func (s *staging) may(p *share) bool {
	most := (s.slots + s.sharing - 1) / s.sharing
	return p.held == 0 || p.held < most && (len(s.free) > 1 || s.slots <= minSlots)
}

// next takes the connection out of the turn that is to have a slot.
func (s *staging) next() *connection {
	if len(s.free) == 0 {
		return nil
	}
	for i, c := range s.turn {
		if s.may(&c.slots) {
			s.turn = slices.Delete(s.turn, i, i+1)
			return c
		}
	}
	return nil
}

// pick takes a free slot of the region that has the turn. A region without free slots gets the missed
// turns later.
func (s *staging) pick() *slot {
	at := 0
	if s.dealer != nil {
		freeIn := func(i int) int {
			return slices.IndexFunc(s.free, func(slot *slot) bool { return slot.region == s.regions[i] })
		}
		if i := s.dealer.Next(func(i int) bool { return freeIn(i) >= 0 }); i >= 0 {
			at = freeIn(i)
		}
	}
	slot := s.free[at]
	s.free = slices.Delete(s.free, at, at+1)
	return slot
}

// fail stops the use of a region's slots, unless the region is the last: the server GPU of the region, or
// the path to the GPU, has failed. The remaining regions get the turns.
func (s *staging) fail(g *region) {
	i := slices.Index(s.regions, g)
	if s.dealer == nil || i < 0 || s.dealer.Failed(i) {
		return
	}
	working := 0
	for k := range s.regions {
		if !s.dealer.Failed(k) {
			working++
		}
	}
	if working > 1 {
		s.dealer.Fail(i)
		s.slots -= g.slots
		s.free = slices.DeleteFunc(s.free, func(slot *slot) bool { return slot.region == g })
	}
}

func (s *staging) hand() {
	for c := s.next(); c != nil; c = s.next() {
		p := &c.slots
		first := p.wants[0]
		if p.wants = p.wants[1:]; len(p.wants) > 0 {
			s.turn = append(s.turn, c)
		}
		slot := s.pick()
		slot.holder = c
		p.held++
		if c.session.relay.loop.Now() > first.since {
			c.stalled(noSlot, first.since)
		}
		if !first.take(slot) {
			s.handBack(slot)
		}
	}
}
