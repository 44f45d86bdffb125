package relay

import "github.com/peerlane/peerlane/relay/wire"

// EndWhileAsked ends the relay for a reason as soon as it does what a client has asked for
// beside its loop, before the loop hears of that.
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
