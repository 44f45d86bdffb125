package verbs

import (
	"sync/atomic"
	"time"

	"github.com/peerlane/peerlane/relay/verbs"
)

// liveness is the evidence of RDMA that the peer is alive while the control connection, which may
// use the same cable, is silent. Times are of time.Now, in nanoseconds.
type liveness struct {
	signs   atomic.Int64 // time of the last completed or arrived write
	excused atomic.Int64 // end of the grace period of a port without a link, or with a link that returned recently
	// downs maps a port without a link to the time of the loss. The event loop owns downs.
	downs map[*verbs.Context]time.Time
}

// Alive returns the time until the last completion or arrival is older than silence. While a port
// of this side has no link, Alive returns the rest of Config.Reconnect if that is longer.
func (s *QPGroup) Alive(silence time.Duration) time.Duration {
	until := max(s.signs.Load()+int64(silence), s.excused.Load())
	return max(0, time.Duration(until-time.Now().UnixNano()))
}

// goesBy reports whether the group uses a NIC, or used the NIC before the current reset.
func (s *QPGroup) goesBy(n *nic) bool {
	return s.uses(n, 0) || s.used && !s.closed && s.phase != running && s.workingNICs[n.context]
}

// portDown begins the grace period of a port without a link.
func (s *QPGroup) portDown(n *nic) {
	if s.downs == nil {
		s.downs = map[*verbs.Context]time.Time{}
	}
	if _, down := s.downs[n.context]; down {
		return
	}
	now := time.Now()
	s.downs[n.context] = now
	s.excuse(now.Add(s.fabric.config.Reconnect))
}

// portUp extends the grace period: TCP doubles its pauses, and sends again at the latest after
// another outage of the same length.
func (s *QPGroup) portUp(n *nic) {
	since, down := s.downs[n.context]
	if !down {
		return
	}
	delete(s.downs, n.context)
	now := time.Now()
	until := now.Add(min(now.Sub(since), s.fabric.config.Reconnect) + s.fabric.config.PortWait)
	if excused := time.Unix(0, s.excused.Load()); len(s.downs) > 0 && excused.After(until) {
		// another port has no link
		return
	}
	s.excuse(until)
}

func (s *QPGroup) excuse(until time.Time) { s.excused.Store(until.UnixNano()) }
