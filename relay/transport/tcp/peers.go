package tcp

import (
	"context"
	"sync"
	"time"

	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

// Key identifies a Peer: the authenticated name of the other relay, and the addresses of the NICs
// on both sides.
type Key struct{ Relay, Local, Remote string }

// Peers has every Peer of a relay; the clients of the container share them. Any goroutine but the
// loop's may call the methods.
type Peers struct {
	loop   *poll.Loop
	config func(Key) Config

	mu     sync.Mutex
	known  map[Key]*reaching
	all    map[*Peer]bool           // live Peers
	pulses map[time.Duration]*pulse // by interval
	// superseded has Peers that live on for their channels.
	superseded map[Key]*Peer
	ended      bool
	users      sync.WaitGroup // counts Peers whose connections are in use
}

// reaching is a Peer, or a running dial.
type reaching struct {
	tried    chan struct{} // closed when peer or err is set
	peer     *Peer         // under the lock of Peers until then
	err      error
	gaveItUp bool // the dialer's context ended, so that another dial may succeed
}

// NewPeers returns an empty Peers. config returns the configuration of a Peer.
func NewPeers(loop *poll.Loop, config func(Key) Config) *Peers {
	return &Peers{loop: loop, config: config, known: map[Key]*reaching{}, all: map[*Peer]bool{},
		pulses: map[time.Duration]*pulse{}, superseded: map[Key]*Peer{}}
}

var errEnding = wire.Errorf(wire.StatusRelayDied, "the relay of this container is ending")

// Reach returns the live Peer of a key, or a new Peer whose connections dial opens. Concurrent
// calls wait for the same dial and share its error; a later call dials again. If the dialer's
// context ends, another waiting call dials.
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

// find returns the entry of a key. mine is true for a new entry, which the caller dials.
func (p *Peers) find(key Key) (r *reaching, mine bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return nil, false, errEnding
	}
	// A dying Peer stays until its connections are unused.
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

// Accepted creates a Peer of connections that the other side dialed. Channels of this side use the
// Peer too, unless the key has a Peer.
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
	// On the loop, so that the Peer is known before its end.
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

// Supersede makes the next Reach of a key dial although a Peer lives; the channels of that Peer
// keep it. The result is false if the key has another superseded Peer.
func (p *Peers) Supersede(key Key, peer *Peer) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.known[key]
	switch {
	case r == nil || r.peer != peer:
		return true // another call has superseded the Peer
	case p.superseded[key] != nil:
		return false
	}
	p.superseded[key] = peer
	delete(p.known, key)
	return true
}

// pulse returns the pulse of an interval. The caller holds the lock.
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

// Each calls f with every live Peer. The loop may call Each.
func (p *Peers) Each(f func(*Peer)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for peer := range p.all {
		f(peer)
	}
}

// Wait returns, after Close, when no Peer reads or writes memory, with or without a running loop.
func (p *Peers) Wait() { p.users.Wait() }

// Close ends every Peer and prevents new Peers.
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
