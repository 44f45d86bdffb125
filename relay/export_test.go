package relay

import (
	"net/netip"
	"time"

	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/transport/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// Patient sets the time after which the relay counts a remote relay as dead; for machines that are
// far slower than any host. It comes before Configure.
func (r *Relay) Patient(dead time.Duration) {
	r.timing = func(c *tcp.Config) { c.Dead = dead }
}

// Elsewhere assigns the relay to a separate host, with a libibverbs and addresses of NICs; it comes
// before Configure.
func (r *Relay) Elsewhere(host wire.UUID, libibverbs string, nics ...netip.Addr) {
	r.host = host
	r.Devices(libibverbs, nics...)
}

// Devices gives the relay a libibverbs and the addresses of NICs; it comes before Configure.
func (r *Relay) Devices(libibverbs string, nics ...netip.Addr) {
	r.libibverbs = libibverbs
	r.nicAddresses = func() ([]netip.Addr, error) { return nics, nil }
}

// SetReconnectLimit limits the reconnect of the relay's queue pairs; it comes before Configure.
func (r *Relay) SetReconnectLimit(limit time.Duration) { r.reconnectLimit = limit }

// Settling limits the first connection of the relay's queue pairs; it comes before Configure.
func (r *Relay) Settling(limit time.Duration) { r.settle = limit }

// RetryingPorts sets the time after which connections that were made without RDMA, because the other
// relay's port was down, are made anew.
func (r *Relay) RetryingPorts(after time.Duration) { r.loop.Call(func() { r.portRetry = after }) }

// LendingAtMost limits the memory in place of a relay's first lane, which must be open, and returns
// the previous limit, bytes.
func (r *Relay) LendingAtMost(bytes uint64) (before uint64) {
	r.loop.Call(func() { before, r.lanes[0].maxInPlace = r.lanes[0].maxInPlace, bytes })
	return before
}

// Foreign is the size of foreign containers' host memory mapped by the relay, bytes.
func (r *Relay) Foreign() (bytes uint64) {
	r.loop.Call(func() { bytes = r.used.foreign })
	return bytes
}

// Targets is the number of remote memories known to the relay.
func (r *Relay) Targets() (n int) {
	r.loop.Call(func() {
		for _, s := range r.sessions {
			for _, c := range s.connections {
				if sends, is := c.side.(*sender); is {
					n += len(sends.targets)
				}
			}
		}
	})
	return n
}

// Leaving is how long the relay waits for another host's to leave a connection; it comes
// before there is any with another host.
func (r *Relay) Leaving(limit time.Duration) {
	r.loop.Call(func() {
		timing := r.hosts.timing
		r.hosts.timing = func(c *tcp.Config) { timing(c); c.Leaving = limit }
	})
}

// Do queues f to run on the relay's loop, in the order of the calls.
func (r *Relay) Do(f func()) { r.loop.Do(f) }

// Halt has Run end without a word to anybody, as the relay's death would.
func (r *Relay) Halt() { r.loop.Stop() }

// HaltAtRest is Halt in a turn in which no session dials anybody: a way that was just
// dialed goes with a process, and stays with a goroutine of this one.
func (r *Relay) HaltAtRest() {
	for rest := false; !rest; time.Sleep(time.Millisecond) {
		rest = true // as it is when the loop has ended
		r.loop.Call(func() {
			for _, s := range r.sessions {
				rest = rest && s.blocking+s.opening == 0
			}
			if rest {
				r.loop.Stop()
			}
		})
	}
}

// CloseIdle closes the connections to remote hosts that no client has used since the last call.
func (r *Relay) CloseIdle() { r.loop.Call(r.hosts.closeIdle) }

// Forget frees the resources that the end of a halted relay's process would free, beside Free: its
// sessions' descriptors and rings.
func (r *Relay) Forget() {
	for _, s := range r.sessions {
		if s.blocking == 0 { // else a goroutine may still use them
			s.free()
		}
	}
}

// ToldConnections is how many connections a report shows.
const ToldConnections = maxReportedConnections

// Free gives back the memory that goes with a relay's process, after Run.
func (r *Relay) Free() {
	for _, l := range r.lanes {
		for _, s := range l.pools() {
			for _, g := range s.regions {
				_ = g.close() // the context may be lost
			}
		}
		for _, q := range l.remote.quotas {
			if q != nil {
				_ = q.memory.close()
			}
		}
		_ = l.closeContexts()
	}
	for _, s := range r.sessions {
		for _, m := range s.memories {
			_ = m.mapped.Close()
			if m.inPlace != nil {
				_ = m.inPlace.Close()
			}
		}
	}
}

// OpenByRDMA opens a channel with RDMA data to every remote relay, with a first message, and
// returns the answer.
func (r *Relay) OpenByRDMA(first wire.Message) error {
	o := &opening{answer: make(chan error, 1)}
	r.loop.Call(func() {
		r.hosts.peers.Each(func(p *tcp.Peer) {
			var err error
			if o.channel, _, err = verbs.Of(p).Open(first, o.received, o.lost, nil, 1); err != nil {
				o.finish(err)
			}
		})
	})
	return <-o.answer
}
