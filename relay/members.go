package relay

import (
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/stripe"
	"github.com/peerlane/peerlane/relay/transport/verbs"
)

// A lane's members say how much of its traffic goes out of which GPU's memory and over which
// NIC. Slots are taken by the weights of their server GPUs, each write is shared by NICs by
// the weights that these have for that GPU, and a lane with direct members and others deals
// its grants out to both. What fails has no turns any more, and its share is the others'.

// weight is that of a GPU's memory, by its PCI address, or of the host's (""): of all members
// there. It is 0 where the lane has no members.
func (l *lane) weight(server string) (sum int) {
	for _, m := range l.spec.Members {
		if m.Server == server {
			sum += m.Weight
		}
	}
	return sum
}

// staged is the weight of all slots: of what is not in place.
func (l *lane) staged() (sum int) {
	for _, m := range l.spec.Members {
		if m.Server != l.spec.GPU.BusID {
			sum += m.Weight
		}
	}
	return sum
}

// slotsOn is how many of a lane's slots are on a server GPU, or in the host's memory.
func (l *lane) slotsOn(server string, slots int) int {
	own, all := l.weight(server), l.staged()
	if own == 0 || all == 0 {
		own, all = 1, len(l.spec.Servers)
	}
	return max(1, (slots*own+all-1)/all)
}

// nicsOf are the weights of NICs for what is in a GPU's memory, or in the host's; nil where
// the lane has no member there, so that all are alike.
func (l *lane) nicsOf(server string) map[string]int {
	var weights map[string]int
	for _, m := range l.spec.Members {
		if m.Server == server {
			if weights == nil {
				weights = map[string]int{}
			}
			weights[m.NIC] += m.Weight
		}
	}
	return weights
}

// deal sets the weights of regions. One on a GPU that stands in for a server has an equal
// part.
func (l *lane) deal(s *staging) {
	for _, g := range s.regions {
		server := g.gpu.BusID // empty in the host's memory
		g.weight, g.nics = l.weight(server), l.nicsOf(server)
		if g.weight == 0 {
			g.weight = max(1, l.staged()/max(1, len(s.regions)))
		}
	}
}

// mixture makes the scheduler of a lane of which a part is direct; nil for others. It is of
// the loop.
func (l *lane) mixture() *stripe.Scheduler {
	direct, staged := l.weight(l.spec.GPU.BusID), l.staged()
	if l.mixed == nil && direct > 0 && staged > 0 {
		l.mixed = stripe.New([]int{direct, staged})
	}
	return l.mixed
}

// throughSlots reports whether the next grant of a message goes through slots although NICs
// reach its memory: it is the turn of the lane's staged members.
func (s *sender) throughSlots(op *operation) bool {
	m := op.memory
	if s.transport != launch.TransportVerbs || m.lent == nil || m.staged != nil || !s.onGPUs {
		return false
	}
	mixture := s.lane.mixture()
	return mixture != nil && mixture.Next(nil) == 1
}

// nicsFor are the weights of NICs for a write out of a client's memory.
func (s *sender) nicsFor(m *memory) map[string]int {
	switch {
	case m.staged != nil:
		return s.lane.nicsOf(m.staged.on.gpu.BusID)
	case m.mapped.Host():
		return s.lane.nicsOf("")
	}
	return s.lane.nicsOf(s.lane.spec.GPU.BusID)
}

// besideNICs reports whether the data of a sender goes by NICs of its lane, and some of it by
// one that reads the lane's own GPU.
func (c *connection) besideNICs(link *verbs.Link) bool {
	own := c.lane.nicsOf(c.lane.spec.GPU.BusID)
	if !link.By(c.lane.spec.NICs) {
		return false
	}
	return own == nil || link.Has(own)
}

// ownNICs are the NICs that read and write the lane's own GPU.
func (l *lane) ownNICs() (names []string) {
	for _, m := range l.spec.Members {
		if m.Server == l.spec.GPU.BusID {
			names = append(names, m.NIC)
		}
	}
	if names == nil {
		return l.spec.NICs
	}
	return names
}
