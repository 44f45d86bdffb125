package verbs

import (
	"slices"

	"github.com/peerlane/peerlane/relay/device"
)

// Memory that a process has lent is read and written where it lies, by NICs that are near it.

// By reports whether all that is sent goes by NICs of this side that are among these.
func (l *Link) By(nics []string) bool { return l.set.by(l.pairs, nics) }

// By reports whether all that is received comes by NICs of this side that are among these.
func (a *Arrivals) By(nics []string) bool {
	p := a.set.endsOf(a.channel).path
	return p != nil && a.set.by(a.set.pairsOf(p), nics)
}

// Has reports whether some of what is sent goes by a NIC of this side that has a weight.
func (l *Link) Has(nics map[string]int) bool { return l.set.has(l.pairs, nics) }

// Has reports whether some of what is received comes by a NIC of this side that has a weight.
func (a *Arrivals) Has(nics map[string]int) bool {
	p := a.set.endsOf(a.channel).path
	return p != nil && a.set.has(a.set.pairsOf(p), nics)
}

func (s *Set) has(pairs []int, nics map[string]int) bool {
	return slices.ContainsFunc(pairs, func(i int) bool {
		link := i / s.perLink // those of the first come first
		return link < len(s.links) && nics[s.nics[s.links[link].ours].name] > 0
	})
}

func (s *Set) by(pairs []int, nics []string) bool {
	for _, i := range pairs {
		link := i / s.perLink // those of the first come first
		if link >= len(s.links) || !slices.Contains(nics, s.nics[s.links[link].ours].name) {
			return false
		}
	}
	return len(pairs) > 0
}

// Refused is why Known says no and goes on to; nil where it need not. It does not block.
func (s *Set) Refused(m *device.Memory, target bool) error {
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
