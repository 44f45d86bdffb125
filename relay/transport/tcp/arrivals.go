package tcp

import (
	"sync"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// landings are the parts of this relay's memory that the peer may write now. The event loop grants
// parts; the goroutines of the data streams check each piece before a byte is stored.
type landings struct {
	mu       sync.Mutex
	piece    uint64 // size of the peer's pieces, bytes
	channels map[uint32]*runway
}

// runway is the memory that the sender of a channel may write.
type runway struct {
	memories map[uint32][]byte
	windows  map[uint64]*window // by immediate
}

// window is a grant.
type window struct {
	memory         []byte // of the grant
	region         uint32
	offset, filled uint64
	// The current write. Each write begins at the end of the previous write.
	number, length uint64
	begun          []uint64 // a bit for each piece that has begun
	landed         uint64
}

func refused(format string, arguments ...any) error {
	return wire.Errorf(wire.StatusMalformed, format, arguments...)
}

// begin checks the header of a piece and returns the memory for its bytes. begin accepts each piece
// of a write once.
func (l *landings) begin(p *piece) (*window, []byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.channels[p.channel]
	if r == nil {
		return nil, nil, refused("write to channel %d: the channel has no grants", p.channel)
	}
	w := r.windows[p.immediate]
	if w == nil || w.region != p.region {
		return nil, nil, refused("write to region %d under grant %d: no such grant", p.region, p.immediate)
	}
	if w.length == 0 {
		left := uint64(len(w.memory)) - w.filled
		if p.length == 0 || p.length > left || p.offset != w.offset+w.filled {
			return nil, nil, refused("write of %d bytes at %d of region %d: the grant has %d bytes at %d", p.length,
				p.offset, p.region, left, w.offset+w.filled)
		}
		w.number, w.length, w.landed = p.number, p.length, 0
		w.begun = make([]uint64, (p.length+l.piece-1)/l.piece/64+1)
	}
	switch {
	case p.number != w.number || p.length != w.length || p.offset != w.offset+w.filled:
		return nil, nil, refused("piece of write %d of %d bytes under grant %d: expected write %d of %d bytes",
			p.number, p.length, p.immediate, w.number, w.length)
	case p.at >= p.length || p.at%l.piece != 0 || uint64(p.bytes) != min(l.piece, p.length-p.at):
		return nil, nil, refused("piece of %d bytes at %d of a write of %d: pieces have %d", p.bytes, p.at,
			p.length, l.piece)
	}
	number := p.at / l.piece
	if w.begun[number/64]&(1<<(number%64)) != 0 {
		return nil, nil, refused("second piece at %d of write %d", p.at, p.number)
	}
	w.begun[number/64] |= 1 << (number % 64)
	return w, w.memory[w.filled+p.at:][:p.bytes], nil
}

// end counts a stored piece and reports whether the write is complete.
func (l *landings) end(w *window, p *piece) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.landed += uint64(p.bytes); w.landed < w.length {
		return false
	}
	w.filled += w.length
	w.length, w.begun = 0, nil
	if w.filled == uint64(len(w.memory)) {
		delete(l.channels[p.channel].windows, p.immediate)
	}
	return true
}

// Arrivals is the receiver's side of the writes of a channel. The event loop owns Arrivals.
type Arrivals struct {
	channel *Channel
	arrived func(immediate, length uint64)
	ended   func()
}

var (
	_ transport.Control  = (*Channel)(nil)
	_ transport.Link     = (*Link)(nil)
	_ transport.Arrivals = (*Arrivals)(nil)
)

// Receive creates the receiver's side of the channel. It calls arrived for each write when the
// memory has all bytes, and ended once, when no write of the channel can arrive. The loop calls
// both.
func (c *Channel) Receive(arrived func(immediate, length uint64), ended func()) *Arrivals {
	a := &Arrivals{channel: c, arrived: arrived, ended: ended}
	if c.state == channelClosed {
		c.peer.loop.Do(ended)
		return a
	}
	c.arrivals = a
	l := &c.peer.landings
	poll.Lock(&l.mu)
	defer l.mu.Unlock()
	l.channels[c.number] = &runway{memories: map[uint32][]byte{}, windows: map[uint64]*window{}}
	return a
}

// AddMemory registers host memory under a number, without a grant. The memory must stay mapped
// until RemoveMemory or ended.
func (a *Arrivals) AddMemory(region uint32, m *device.Memory) error {
	if !m.Host() {
		return wire.Errorf(wire.StatusInternal, "receive region %d over TCP: the region is not host memory", region)
	}
	a.add(region, m.HostBytes())
	return nil
}

func (a *Arrivals) add(region uint32, memory []byte) {
	a.with(func(r *runway) { r.memories[region] = memory })
}

// RemoveMemory reverses AddMemory. An open grant in the region ends the Peer, because bytes could
// still arrive; the memory must then stay mapped until ended.
func (a *Arrivals) RemoveMemory(region uint32) {
	open := false
	a.with(func(r *runway) {
		delete(r.memories, region)
		for immediate, w := range r.windows {
			if w.region == region {
				open = true
				delete(r.windows, immediate) // no further piece begins
			}
		}
	})
	if open {
		a.channel.peer.fail(wire.Errorf(wire.StatusInternal, "region %d of channel %d %w", region, a.channel.number,
			errGranted), true)
	}
}

// Grant permits the sender to write [offset, offset+length) of a region, each byte once, in one or
// more writes with the immediate. Call Grant before the message to the sender.
func (a *Arrivals) Grant(immediate uint64, region uint32, offset, length uint64) error {
	var err error
	a.with(func(r *runway) {
		m, known := r.memories[region]
		switch {
		case !known || offset > uint64(len(m)) || length == 0 || length > uint64(len(m))-offset:
			err = wire.Errorf(wire.StatusInternal, "grant %d bytes at %d of region %d: the region has %d", length, offset,
				region, len(m))
		case r.windows[immediate] != nil:
			err = wire.Errorf(wire.StatusInternal, "second grant %d", immediate)
		default:
			r.windows[immediate] = &window{memory: m[offset : offset+length], region: region, offset: offset}
		}
	})
	return err
}

// Renew replaces a grant without a current write: the sender must not write the rest of the earlier
// grant.
func (a *Arrivals) Renew(immediate uint64, region uint32, offset, length uint64) error {
	open := false
	a.with(func(r *runway) {
		if w := r.windows[immediate]; w != nil {
			open = w.length > 0
			if !open {
				delete(r.windows, immediate)
			}
		}
	})
	if open {
		return refused("renew grant %d within a write", immediate)
	}
	return a.Grant(immediate, region, offset, length)
}

// Close stops the calls. Grants stay valid until the peer closes the channel.
func (a *Arrivals) Close() {
	a.arrived, a.ended = func(uint64, uint64) {}, func() {}
}

func (a *Arrivals) with(f func(*runway)) {
	l := &a.channel.peer.landings
	poll.Lock(&l.mu)
	defer l.mu.Unlock()
	if r := l.channels[a.channel.number]; r != nil {
		f(r)
	}
}

// endArrivals revokes the grants. While the data streams live, endArrivals refuses to end within a
// write, whose bytes may still arrive.
func (c *Channel) endArrivals(dead bool) error {
	a := c.arrivals
	if a == nil {
		return nil
	}
	l := &c.peer.landings
	poll.Lock(&l.mu)
	for immediate, w := range l.channels[c.number].windows {
		if w.length > 0 && !dead {
			l.mu.Unlock()
			return refused("channel %d ends %w under grant %d", c.number, errWithinWrite, immediate)
		}
	}
	delete(l.channels, c.number)
	l.mu.Unlock()
	c.arrivals = nil
	a.ended()
	return nil
}
