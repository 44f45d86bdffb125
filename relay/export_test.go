package relay

// Do queues f to run on the relay's loop, in the order of the calls.
func (r *Relay) Do(f func()) { r.loop.Do(f) }

// Halt has Run end without a word to anybody, as the relay's death would.
func (r *Relay) Halt() { r.loop.Stop() }

// ToldConnections is how many connections a report shows.
const ToldConnections = toldConnections

// Free gives back the memory that goes with a relay's process, after Run.
func (r *Relay) Free() {
	for _, l := range r.lanes {
		for _, s := range []*staging{l.out, l.in} {
			if s == nil {
				continue
			}
			for _, g := range s.regions {
				_ = g.close() // the context may be lost
			}
		}
	}
	for _, s := range r.sessions {
		for _, m := range s.memories {
			_ = m.mapped.Close()
		}
	}
}
