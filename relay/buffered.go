package relay

import (
	"unsafe"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// A buffered send (wire.BufferedSend) between two clients of one GPU ends when its bytes are in host
// memory of the relay, before their delivery: the receiver's kernel, and so its receive, waits for a
// time slice of the GPU, and the sender's kernel would wait with it. The message is announced at
// once, as an unbuffered message; its grants wait for the copy. Between GPUs a buffered send is an
// ordinary send: a second copy would cost bandwidth.

// The sizes and numbers of a lane's buffers.
const (
	smallBuffer  = 64 << 10
	largeBuffer  = 1 << 20
	smallBuffers = 128
	largeBuffers = 16
	bufferBytes  = smallBuffer*smallBuffers + largeBuffer*largeBuffers
)

// buffers are a lane's host memory for buffered sends, for as long as a sender uses it. It belongs
// to the loop.
type buffers struct {
	lane         *lane
	senders      int
	memory       unsafe.Pointer // nil until it is allocated
	small, large []device.Place // free
}

// ofBuffers is the quota of a lane's buffers.
var ofBuffers = quota{own: bufferBytes}

// buffered is the buffer of a send.
type buffered struct {
	buffers *buffers
	place   device.Place
	large   bool
	filled  bool              // with the message
	grants  []*wire.PeerGrant // that came before it was filled
}

// release frees the buffer of an ended operation. b may be nil.
func (b *buffered) release() {
	if b == nil {
		return
	}
	if b.large {
		b.buffers.large = append(b.buffers.large, b.place)
	} else {
		b.buffers.small = append(b.buffers.small, b.place)
	}
}

// take returns a free buffer for n bytes, nil if there is none.
func (b *buffers) take(n uint64) *buffered {
	switch {
	case n <= smallBuffer && len(b.small) > 0:
		last := len(b.small) - 1
		place := b.small[last]
		b.small = b.small[:last]
		return &buffered{buffers: b, place: place}
	case n <= largeBuffer && len(b.large) > 0:
		last := len(b.large) - 1
		place := b.large[last]
		b.large = b.large[:last]
		return &buffered{buffers: b, place: place, large: true}
	}
	return nil
}

// divide divides allocated memory into buffers.
func (b *buffers) divide(memory unsafe.Pointer) {
	b.memory = memory
	at := func(offset int) device.Place {
		host := unsafe.Add(memory, offset)
		return device.Place{Ptr: cuda.Ptr(uintptr(host)), Host: host}
	}
	for i := range smallBuffers {
		b.small = append(b.small, at(i*smallBuffer))
	}
	for i := range largeBuffers {
		b.large = append(b.large, at(smallBuffers*smallBuffer+i*largeBuffer))
	}
}

// useBuffers returns the lane's buffers for one more sender. The allocation takes the driver
// milliseconds, which the loop does not wait for: until then the buffers are empty. Without room
// nothing is tried again before the last sender has left.
func (l *lane) useBuffers() *buffers {
	if l.buffers == nil {
		b := &buffers{lane: l}
		l.buffers = b
		if err := l.relay.reserve(ofBuffers); err != nil {
			logrus.WithError(err).Warnf(noBuffers, l.spec.GPU.BusID)
		} else {
			b.senders++ // until the allocation is over
			go b.allocate()
		}
	}
	l.buffers.senders++
	return l.buffers
}

const noBuffers = "sends of GPU %s to programs on the same GPU end at their delivery: no buffers"

func (b *buffers) allocate() {
	var memory unsafe.Pointer
	d := b.lane.device
	err := d.On(func() (err error) {
		memory, err = d.Driver.MemHostAlloc(bufferBytes)
		return err
	})
	b.lane.relay.loop.Do(func() {
		if err != nil {
			logrus.WithError(err).Warnf(noBuffers, d.BusID)
			b.lane.relay.release(ofBuffers)
		} else {
			b.divide(memory)
		}
		b.leave()
	})
}

// leave frees the memory after the last sender, whose operations have ended.
func (b *buffers) leave() {
	if b.senders--; b.senders > 0 {
		return
	}
	b.lane.buffers = nil
	if b.memory == nil {
		return
	}
	d, memory := b.lane.device, b.memory
	b.memory, b.small, b.large = nil, nil, nil
	r := b.lane.relay
	go func() {
		err := d.On(func() error { return d.Driver.MemHostFree(memory) })
		r.loop.Do(func() {
			if err != nil {
				r.wear(err)
			}
			r.release(ofBuffers)
		})
	}()
}

// buffer copies a send into a buffer, if the client asked for it, the receiver uses the same GPU, and
// a buffer is free. The send ends with the copy; its message stays active.
func (s *sender) buffer(op *operation) {
	if !op.mayBuffer || !s.shares || op.length == 0 || op.length > largeBuffer || op.memory.mapped.Host() {
		return
	}
	if s.buffers == nil {
		s.buffers = s.lane.useBuffers()
	}
	b := s.buffers.take(op.length)
	if b == nil {
		return
	}
	op.buffered = b
	s.hold(op)
	s.lane.push.take().Move(b.place, op.memory.place(op.offset), op.length, func(err error) {
		switch {
		case err != nil:
			s.broken(err, "copying into a buffer")
		case s.down == nil && op.failed == nil && !op.over:
			s.filledBuffer(op)
		}
		s.unhold(op)
	})
}

// filledBuffer ends a send for the client, and serves the grants of its message.
func (s *sender) filledBuffer(op *operation) {
	b := op.buffered
	b.filled = true
	if !op.withdrawn { // else the receiver's answer is the result
		op.complete(op.length, wire.StatusOK)
	}
	grants := b.grants
	b.grants = nil
	for _, m := range grants {
		s.fill(m, op)
	}
}

// fromBuffer moves the bytes of a grant from the buffer of a message.
func (s *sender) fromBuffer(m *wire.PeerGrant, op *operation, t *target) {
	r := s.session.relay
	s.hold(op)
	to, from := transport.Target{Region: m.Region, Offset: m.Offset}, op.buffered.place.Plus(m.Part)
	s.link.Write(to, transport.Source{Place: from}, m.Length, m.Grant, func(err error) {
		if err != nil {
			s.broken(err, "copying to "+s.peer)
		} else {
			r.counters.sent += m.Length
			r.counters.direct += m.Length
			op.moved += m.Length
			if s.down == nil {
				s.port.Send(&wire.PeerWritten{Grant: m.Grant}, 0)
			}
		}
		s.used(t)
		s.unhold(op)
	})
}

func (s *sender) leaveBuffers() {
	if s.buffers != nil {
		s.buffers.leave()
		s.buffers = nil
	}
}

// crowded reports whether as many messages are announced as a receiver accepts. Without buffers the
// client's ring bounds the messages.
func (c *connection) crowded() bool {
	s, is := c.side.(*sender)
	return is && len(s.active) >= wire.RingEntries
}
