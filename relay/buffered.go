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

// bufferSizes are the sizes and numbers of a lane's buffers, smallest first. A program sends for as
// long as its time slice lasts, some 2 ms, and the receiver's program runs in the next one: the
// number of buffers bounds the sends of a slice.
var bufferSizes = [...]struct{ bytes, count int }{{4 << 10, 512}, {64 << 10, 128}, {1 << 20, 16}}

// largestBuffer is the size of the largest buffers, in bytes: a longer message is not buffered.
var largestBuffer = uint64(bufferSizes[len(bufferSizes)-1].bytes)

func bufferBytes() (sum uint64) {
	for _, size := range bufferSizes {
		sum += uint64(size.bytes * size.count)
	}
	return sum
}

// buffers are a lane's host memory for buffered sends while a sender uses the memory. The event
// loop owns buffers.
type buffers struct {
	lane    *lane
	senders int
	memory  unsafe.Pointer                   // nil before the allocation
	free    [len(bufferSizes)][]device.Place // of each size
}

// ofBuffers is the quota of a lane's buffers.
var ofBuffers = quota{own: bufferBytes()}

// buffered is the buffer of a send.
type buffered struct {
	buffers *buffers
	place   device.Place
	size    int               // index of bufferSizes
	filled  bool              // with the message
	grants  []*wire.PeerGrant // that preceded the fill
}

// release frees the buffer of an ended operation. b may be nil.
func (b *buffered) release() {
	if b != nil {
		b.buffers.free[b.size] = append(b.buffers.free[b.size], b.place)
	}
}

// take returns the smallest free buffer for n bytes, nil if there is none.
func (b *buffers) take(n uint64) *buffered {
	for i, size := range bufferSizes {
		last := len(b.free[i]) - 1
		if n > uint64(size.bytes) || last < 0 {
			continue
		}
		place := b.free[i][last]
		b.free[i] = b.free[i][:last]
		return &buffered{buffers: b, place: place, size: i}
	}
	return nil
}

// divide divides allocated memory into buffers.
func (b *buffers) divide(memory unsafe.Pointer) {
	b.memory = memory
	offset := 0
	for i, size := range bufferSizes {
		for range size.count {
			host := unsafe.Add(memory, offset)
			b.free[i] = append(b.free[i], device.Place{Ptr: cuda.Ptr(uintptr(host)), Host: host})
			offset += size.bytes
		}
	}
}

// useBuffers returns the lane's buffers for one more sender. The allocation takes the driver
// milliseconds, and the loop does not wait: until then the buffers are empty. Without room the next
// try follows after the last sender has left.
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
		memory, err = d.Driver.MemHostAlloc(bufferBytes())
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
	b.memory, b.free = nil, [len(bufferSizes)][]device.Place{}
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
	if !op.mayBuffer || !s.shares || op.length == 0 || op.length > largestBuffer || op.memory.mapped.Host() {
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
		case !s.isDown():
			s.filledBuffer(op)
		}
		s.unhold(op)
	})
}

// filledBuffer ends a send for the client, and serves the grants of its message. The receiver's answer is
// the result of a withdrawn send.
func (s *sender) filledBuffer(op *operation) {
	op.apply(operationBuffered, wire.StatusOK)
	if op.state == operationFailing { // refused meanwhile
		return
	}
	b := op.buffered
	b.filled = true
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
			if !s.isDown() {
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
