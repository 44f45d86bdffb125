package relay

import "github.com/peerlane/peerlane/relay/wire"

// EndWhileAsked ends the relay for a reason as soon as a goroutine has done a client's request,
// before the loop gets the result.
func (r *Relay) EndWhileAsked(cause string, why *wire.Error) {
	var look func()
	look = func() {
		for _, s := range r.sessions {
			if s.blocking > 0 {
				r.end(cause, why)
				return
			}
		}
		r.loop.Do(look)
	}
	r.loop.Do(look)
}
