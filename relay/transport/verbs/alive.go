package verbs

import (
	"sync/atomic"
	"time"

	"github.com/peerlane/peerlane/relay/verbs"
)

// liveness is what RDMA tells of the other relay while the control connection, which may use the same
// cable, is silent. Times are of time.Now, in nanoseconds.
type liveness struct {
	signs   atomic.Int64 // a write has ended or arrived
	excused atomic.Int64 // until then a port of this side has no link, or is back for a short time
	// downs are the ports without a link, since when. The event loop owns it.
	downs map[*verbs.Context]time.Time
}

// Alive returns the time until no write has ended or arrived for the length of the silence. While a
// port of this side has no link it is the rest of Config.Redial, if that is longer.
func (s *Set) Alive(silence time.Duration) time.Duration {
	until := max(s.signs.Load()+int64(silence), s.excused.Load())
	return max(0, time.Duration(until-time.Now().UnixNano()))
}

// goesBy reports whether data goes by a NIC, or went by it before the queue pairs were given up.
func (s *Set) goesBy(n *nic) bool {
	return s.uses(n, 0) || s.used && !s.over && s.phase != running && s.had[n.context]
}

// portDown excuses silence from now on.
func (s *Set) portDown(n *nic) {
	if s.downs == nil {
		s.downs = map[*verbs.Context]time.Time{}
	}
	if _, down := s.downs[n.context]; down {
		return
	}
	now := time.Now()
	s.downs[n.context] = now
	s.excuse(now.Add(s.fabric.config.Redial))
}

// portUp excuses silence for a while more: TCP, which doubles its pauses, sends again no later than
// after another outage of the same length.
func (s *Set) portUp(n *nic) {
	since, down := s.downs[n.context]
	if !down {
		return
	}
	delete(s.downs, n.context)
	now := time.Now()
	until := now.Add(min(now.Sub(since), s.fabric.config.Redial) + s.fabric.config.PortWait)
	if excused := time.Unix(0, s.excused.Load()); len(s.downs) > 0 && excused.After(until) { // another port has no link
		return
	}
	s.excuse(until)
}

func (s *Set) excuse(until time.Time) { s.excused.Store(until.UnixNano()) }
