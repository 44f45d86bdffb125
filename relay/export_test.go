package relay

// Do queues f to run on the relay's loop, in the order of the calls.
func (r *Relay) Do(f func()) { r.loop.Do(f) }

// ToldConnections is how many connections a report shows.
const ToldConnections = toldConnections
