package tcp

import (
	"sync"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// landings are the places in this relay's memory that the other one may write now.
// The event loop grants them; the data streams' goroutines ask before a byte lands.
type landings struct {
	mu       sync.Mutex
	piece    uint64 // bytes of the other side's pieces
	channels map[uint32]*runway
}

// runway is what one channel's sender may write.
type runway struct {
	memories map[uint32][]byte
	windows  map[uint64]*window // by immediate
}

// window is a grant.
type window struct {
	memory         []byte // of the grant
	region         uint32
	offset, filled uint64
	// The write under way: each begins where the last one ended.
	number, length uint64
	begun          []uint64 // a bit for each of its pieces
	landed         uint64
}

func refused(format string, arguments ...any) error {
	return wire.Errorf(wire.StatusMalformed, format, arguments...)
}

// begin checks a piece's header and gives the memory that its bytes are for. Each
// piece of a write is given once.
func (l *landings) begin(p *piece) (*window, []byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.channels[p.channel]
	if r == nil {
		return nil, nil, refused("a write to channel %d, which grants nothing", p.channel)
	}
	w := r.windows[p.immediate]
	if w == nil || w.region != p.region {
		return nil, nil, refused("a write to region %d under grant %d, which is not granted", p.region, p.immediate)
	}
	if w.length == 0 {
		left := uint64(len(w.memory)) - w.filled
		if p.length == 0 || p.length > left || p.offset != w.offset+w.filled {
			return nil, nil, refused("a write of %d bytes at %d of region %d, where %d bytes at %d are granted", p.length,
				p.offset, p.region, left, w.offset+w.filled)
		}
		w.number, w.length, w.landed = p.number, p.length, 0
		w.begun = make([]uint64, (p.length+l.piece-1)/l.piece/64+1)
	}
	switch {
	case p.number != w.number || p.length != w.length || p.offset != w.offset+w.filled:
		return nil, nil, refused("a piece of write %d of %d bytes under grant %d, where write %d of %d bytes is under way",
			p.number, p.length, p.immediate, w.number, w.length)
	case p.at >= p.length || p.at%l.piece != 0 || uint64(p.bytes) != min(l.piece, p.length-p.at):
		return nil, nil, refused("a piece of %d bytes at %d of a write of %d, whose pieces have %d", p.bytes, p.at,
			p.length, l.piece)
	}
	number := p.at / l.piece
	if w.begun[number/64]&(1<<(number%64)) != 0 {
		return nil, nil, refused("a piece at %d of write %d that came before", p.at, p.number)
	}
	w.begun[number/64] |= 1 << (number % 64)
	return w, w.memory[w.filled+p.at:][:p.bytes], nil
}

// end counts a piece that has landed, and reports whether its write is complete.
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

// Arrivals is the receiver's end of a channel's writes. It belongs to the event loop.
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

// Receive makes the channel's receiving end: arrived is called for each write once all
// of it is in the memory, ended once, when none of this channel can come any more.
// Both are called on the loop.
func (c *Channel) Receive(arrived func(immediate, length uint64), ended func()) *Arrivals {
	a := &Arrivals{channel: c, arrived: arrived, ended: ended}
	if c.closed {
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

// AddMemory makes host memory known under a number. Nothing of it can be written yet.
// It has to stay mapped until RemoveMemory or `ended`.
func (a *Arrivals) AddMemory(region uint32, m *device.Memory) error {
	if !m.Host() {
		return wire.Errorf(wire.StatusInternal, "region %d cannot be received over TCP: it is not the host's memory", region)
	}
	a.add(region, m.HostBytes())
	return nil
}

func (a *Arrivals) add(region uint32, memory []byte) {
	a.with(func(r *runway) { r.memories[region] = memory })
}

// RemoveMemory ends AddMemory. No grant in the region may be open: bytes could still land,
// so that is the end of the Peer, and until `ended` the memory has to stay mapped.
func (a *Arrivals) RemoveMemory(region uint32) {
	open := false
	a.with(func(r *runway) {
		delete(r.memories, region)
		for immediate, w := range r.windows {
			if w.region == region {
				open = true
				delete(r.windows, immediate) // no piece begins any more
			}
		}
	})
	if open {
		a.channel.peer.fail(wire.Errorf(wire.StatusInternal, "region %d of channel %d %w", region, a.channel.number,
			errGranted), true)
	}
}

// Grant lets the sender write [offset, offset+length) of a region, each byte once, in
// one or more writes of that immediate. It comes before the sender is told.
func (a *Arrivals) Grant(immediate uint64, region uint32, offset, length uint64) error {
	var err error
	a.with(func(r *runway) {
		m, known := r.memories[region]
		switch {
		case !known || offset > uint64(len(m)) || length == 0 || length > uint64(len(m))-offset:
			err = wire.Errorf(wire.StatusInternal, "%d bytes at %d of region %d cannot be granted: it has %d", length, offset,
				region, len(m))
		case r.windows[immediate] != nil:
			err = wire.Errorf(wire.StatusInternal, "grant %d is given already", immediate)
		default:
			r.windows[immediate] = &window{memory: m[offset : offset+length], region: region, offset: offset}
		}
	})
	return err
}

// Renew is Grant for a number that was given before, and of whose writes none is under
// way: what is left of that grant is not to be written any more.
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
		return refused("grant %d is to be given again within a write", immediate)
	}
	return a.Grant(immediate, region, offset, length)
}

// Close ends the calls. What is granted stays so until the other side leaves the channel.
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

// endArrivals takes back all that is granted. While the data streams live it refuses to
// within a write: its bytes may still land.
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
