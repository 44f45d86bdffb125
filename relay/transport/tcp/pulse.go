package tcp

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// pulse sends the heartbeats of every Peer of a relay with one timer. The heartbeats of two sets of
// connections between two relays leave and arrive together: an idle relay wakes twice an interval,
// however many sets it has. The zero interval is invalid.
type pulse struct {
	interval time.Duration

	mu    sync.Mutex
	peers map[*Peer]bool
	ended chan struct{} // closed when the last Peer leaves; nil without Peers
}

func newPulse(interval time.Duration) *pulse {
	return &pulse{interval: interval, peers: map[*Peer]bool{}}
}

func (u *pulse) add(p *Peer) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.peers[p] = true
	if u.ended == nil {
		u.ended = make(chan struct{})
		go u.run(u.ended)
	}
}

func (u *pulse) remove(p *Peer) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.peers[p] {
		return
	}
	if delete(u.peers, p); len(u.peers) == 0 {
		close(u.ended)
		u.ended = nil
	}
}

func (u *pulse) run(ended chan struct{}) {
	ticks := time.NewTicker(u.interval)
	defer ticks.Stop()
	for {
		select {
		case <-ended:
			return
		case <-ticks.C:
			u.tick(ended)
		}
	}
}

// tick does nothing in a goroutine whose Peers have left: a new goroutine has the later Peers.
func (u *pulse) tick(ended chan struct{}) {
	u.mu.Lock()
	if u.ended != ended {
		u.mu.Unlock()
		return
	}
	peers := slices.Collect(maps.Keys(u.peers))
	u.mu.Unlock()
	for _, p := range peers {
		p.beat()
	}
}

// beat checks the peer, and sends a heartbeat if no frame waits. It does not block.
func (p *Peer) beat() {
	p.look()
	p.watchSilence()
	if p.turns() && !p.outbox.waits() {
		p.sendFrames(heartbeat, 0)
	}
}

var heartbeat = appendFrame(nil, 0, frameBeat)
