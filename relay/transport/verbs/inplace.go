package verbs

import (
	"slices"

	"github.com/peerlane/peerlane/relay/device"
)

// NICs near a client's memory read and write the memory in place.

// By reports whether every sent byte uses one of the named NICs of this side.
func (l *Link) By(nics []string) bool { return l.set.by(l.pairs, nics) }

// By reports whether every received byte uses one of the named NICs of this side.
func (a *Arrivals) By(nics []string) bool {
	p := a.set.stateOf(a.channel).path
	return p != nil && a.set.by(a.set.pairsOf(p), nics)
}

// Has reports whether a NIC of this side with a weight carries a part of the sent bytes.
func (l *Link) Has(nics map[string]int) bool { return l.set.has(l.pairs, nics) }

// Has reports whether a NIC of this side with a weight carries a part of the received bytes.
func (a *Arrivals) Has(nics map[string]int) bool {
	p := a.set.stateOf(a.channel).path
	return p != nil && a.set.has(a.set.pairsOf(p), nics)
}

func (s *QPGroup) has(pairs []int, nics map[string]int) bool {
	return slices.ContainsFunc(pairs, func(i int) bool {
		link := i / s.perLink // queue pairs are sorted by link
		return link < len(s.links) && nics[s.nics[s.links[link].ours].name] > 0
	})
}

func (s *QPGroup) by(pairs []int, nics []string) bool {
	for _, i := range pairs {
		link := i / s.perLink // queue pairs are sorted by link
		if link >= len(s.links) || !slices.Contains(nics, s.nics[s.links[link].ours].name) {
			return false
		}
	}
	return len(pairs) > 0
}

// Refused returns the permanent cause of a negative result of Known; nil without one. It does not
// block.
func (s *QPGroup) Refused(m *device.Memory, target bool) error {
	f, what := s.fabric, purpose{m, target}
	f.mu.Lock()
	r := f.memories[what]
	f.mu.Unlock()
	switch {
	case r == nil || r.known(s.nics):
		return nil
	case r.flush && s.noFlush() != nil:
		return s.noFlush()
	}
	if why := r.refused.Load(); why != nil {
		return why.err
	}
	return nil
}
