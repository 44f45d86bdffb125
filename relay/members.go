package relay

import (
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/stripe"
	"github.com/peerlane/peerlane/relay/transport/verbs"
)

// A lane's members say how much of its traffic goes out of which GPU's memory and over which NIC. A
// lane takes slots by the weights of server GPUs, divides writes among NICs by the NICs' weights
// for that GPU, at both sides, and a lane with direct and staged members divides grants between
// both, per direction. A failed member gets no turns, and the remaining members get the share.

// weight returns the weight of a GPU's memory, by PCI address, or of host memory (""): of all
// members there. It is 0 where the lane has no members.
func (l *lane) weight(server string) (sum int) {
	for _, m := range l.spec.Members {
		if m.Server == server {
			sum += m.Weight
		}
	}
	return sum
}

// staged returns the weight of the slots: of what is not in place.
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

// nicsOf returns the weights of NICs for a GPU's memory, or for host memory; nil where the lane has
// no member there, so that all are alike.
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

// mixture makes the scheduler of a direction of a lane of which a part is direct: place 0 is the
// direct part, place 1 the rest. It is nil for other lanes. It is of the loop.
func (l *lane) mixture(sends bool) *stripe.Scheduler {
	mixed := &l.mixed.in
	if sends {
		mixed = &l.mixed.out
	}
	direct, staged := l.weight(l.spec.GPU.BusID), l.staged()
	if *mixed == nil && direct > 0 && staged > 0 {
		*mixed = stripe.New([]int{direct, staged})
	}
	return *mixed
}

// throughSlots reports whether the next grant of a message uses slots although the memory is in
// place: a turn of the lane's staged members. A staged part none of whose NICs has data of this
// connection has no turn.
func (c *connection) throughSlots(m *memory) bool {
	if c.transport != launch.TransportVerbs || m.inPlace == nil || m.staged != nil || !c.onGPUs {
		return false
	}
	mixture := c.lane.mixture(c.sends())
	return mixture != nil && mixture.Next(func(i int) bool { return i == 0 || c.by(c.lane.stagedNICs()) }) == 1
}

// stagedNICs returns the weights of NICs for slots.
func (l *lane) stagedNICs() map[string]int {
	weights := map[string]int{}
	for _, m := range l.spec.Members {
		if m.Server != l.spec.GPU.BusID {
			weights[m.NIC] += m.Weight
		}
	}
	return weights
}

// nicsFor are the weights of NICs for a write out of or into a client's memory.
func (c *connection) nicsFor(m *memory) map[string]int {
	switch {
	case m.staged != nil:
		return c.lane.nicsOf(m.staged.on.gpu.BusID)
	case m.mapped.Host():
		return c.lane.nicsOf("")
	}
	return c.lane.nicsOf(c.lane.spec.GPU.BusID)
}

// nicPath is an end of a connection's data over verbs.
type nicPath interface {
	// By reports whether the data uses only these NICs of this side.
	By(nics []string) bool
	// Has reports whether some data uses a NIC of this side with a weight.
	Has(nics map[string]int) bool
}

// overNICs is nil for a connection whose data does not go over verbs.
func (c *connection) overNICs() nicPath {
	switch side := c.side.(type) {
	case *sender:
		if link, is := side.link.(*verbs.Link); is {
			return link
		}
	case *receiver:
		if arrivals, is := side.writes.(*verbs.Arrivals); is {
			return arrivals
		}
	}
	return nil
}

// by reports whether some data of a connection goes by a NIC that has a weight.
func (c *connection) by(nics map[string]int) bool {
	path := c.overNICs()
	return path != nil && path.Has(nics)
}

// beside reports whether a connection's data uses only NICs of the lane, including a NIC near the
// lane's GPU: the others have no share of writes there. Without weights every NIC has to be near.
func (c *connection) beside() bool {
	path, own := c.overNICs(), c.lane.nicsOf(c.lane.spec.GPU.BusID)
	return path != nil && path.By(c.lane.spec.NICs) && (own == nil || path.Has(own))
}
