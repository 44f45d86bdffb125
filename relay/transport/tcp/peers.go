package tcp

import (
	"context"
	"sync"
	"time"

	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

// Key is what has one Peer: the other relay, by what it is authenticated as, and the
// addresses of the NICs at both ends.
type Key struct{ Relay, Local, Remote string }

// Peers are all that a relay has: the clients of its container share them. Its methods
// may be called from any goroutine but the loop's.
type Peers struct {
	loop   *poll.Loop
	config func(Key) Config

	mu     sync.Mutex
	known  map[Key]*reaching
	all    map[*Peer]bool           // that live
	pulses map[time.Duration]*pulse // by interval
	// superseded are Peers that are kept for their channels.
	superseded map[Key]*Peer
	ended      bool
	users      sync.WaitGroup // Peers that something uses the connections of
}

// reaching is a Peer, or that somebody dials it.
type reaching struct {
	tried    chan struct{} // closed when there is one, or the error
	peer     *Peer         // of Peers' lock until then
	err      error
	gaveItUp bool // who dialed, and might have come through
}

// NewPeers makes none yet. config gives what a Peer is made with.
func NewPeers(loop *poll.Loop, config func(Key) Config) *Peers {
	return &Peers{loop: loop, config: config, known: map[Key]*reaching{}, all: map[*Peer]bool{},
		pulses: map[time.Duration]*pulse{}, superseded: map[Key]*Peer{}}
}

var errEnding = wire.Errorf(wire.StatusRelayDied, "the relay of this container is ending")

// Reach gives the Peer of a key: the one that lives, or one that dial makes the
// connections of. Whoever comes meanwhile waits for the same; where it fails so does
// everybody who waits, and who comes next dials again. Where the dialer's ctx ended, another
// who waits dials.
func (p *Peers) Reach(ctx context.Context, key Key, dial func(context.Context) (*Streams, error)) (*Peer, error) {
	for {
		r, mine, err := p.find(key)
		if err != nil {
			return nil, err
		}
		if mine {
			return p.dial(ctx, key, r, dial)
		}
		select {
		case <-r.tried:
			if !r.gaveItUp || ctx.Err() != nil {
				return r.peer, r.err
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// find gives what there is of a key, or what is the caller's to dial.
func (p *Peers) find(key Key) (r *reaching, mine bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return nil, false, errEnding
	}
	// One that dies is there until nothing uses its connections any more.
	if r := p.known[key]; r != nil && (r.peer == nil || !r.peer.isDying()) {
		return r, false, nil
	}
	r = &reaching{tried: make(chan struct{})}
	p.known[key] = r
	return r, true, nil
}

func (p *Peers) dial(ctx context.Context, key Key, r *reaching,
	dial func(context.Context) (*Streams, error)) (*Peer, error) {
	s, err := dial(ctx)
	if err == nil {
		_, err = p.make(key, s, r)
	}
	if err != nil {
		r.err, r.gaveItUp = err, ctx.Err() != nil
		p.forget(key, r)
	}
	close(r.tried)
	return r.peer, r.err
}

// Accepted makes a Peer of connections that the other side dialed. Channels from here
// go over it as well, where none is known yet.
func (p *Peers) Accepted(key Key, s *Streams) (*Peer, error) {
	r := &reaching{tried: make(chan struct{})}
	peer, err := p.make(key, s, r)
	if err != nil {
		return nil, err
	}
	close(r.tried)
	p.mu.Lock()
	defer p.mu.Unlock()
	if known := p.known[key]; (known == nil || known.peer != nil && known.peer.isDying()) && !peer.isDying() {
		p.known[key] = r
	}
	return peer, nil
}

func (p *Peers) make(key Key, s *Streams, r *reaching) (*Peer, error) {
	config := p.config(key)
	down := config.Down
	config.Down = func(err error) {
		p.forget(key, r)
		p.mu.Lock()
		delete(p.all, r.peer)
		if p.superseded[key] == r.peer {
			delete(p.superseded, key)
		}
		p.mu.Unlock()
		if down != nil {
			down(err)
		}
	}
	// On the loop, so that its end comes after it is known.
	var ended bool
	if !p.loop.Call(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if ended = p.ended; !ended {
			p.users.Add(1)
			config.pulse = p.pulse(config.filled().Heartbeat)
			r.peer = newPeer(p.loop, s, config, p.users.Done)
			p.all[r.peer] = true
		}
	}) || ended {
		s.close()
		return nil, errEnding
	}
	return r.peer, nil
}

// Supersede has the next Reach of a key dial although a Peer lives, which its channels keep. It reports
// false if another Peer of the key is kept so already.
func (p *Peers) Supersede(key Key, peer *Peer) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.known[key]
	switch {
	case r == nil || r.peer != peer:
		return true // somebody else has
	case p.superseded[key] != nil:
		return false
	}
	p.superseded[key] = peer
	delete(p.known, key)
	return true
}

// pulse returns the pulse of an interval. The lock is held.
func (p *Peers) pulse(interval time.Duration) *pulse {
	if p.pulses[interval] == nil {
		p.pulses[interval] = newPulse(interval)
	}
	return p.pulses[interval]
}

func (p *Peers) forget(key Key, r *reaching) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.known[key] == r {
		delete(p.known, key)
	}
}

// Each calls f with every Peer that lives. It may be called on the loop.
func (p *Peers) Each(f func(*Peer)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for peer := range p.all {
		f(peer)
	}
}

// Wait returns, after Close, when nothing of any Peer reads or writes memory any more,
// whether the loop runs or not.
func (p *Peers) Wait() { p.users.Wait() }

// Close ends all Peers, and lets none be made any more.
func (p *Peers) Close() {
	p.mu.Lock()
	p.ended = true
	all := p.all
	p.all = map[*Peer]bool{}
	p.mu.Unlock()
	for peer := range all {
		peer.Close()
	}
}
