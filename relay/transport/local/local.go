// Package local is the transport of route direct: the sender's relay maps the
// receiver's exported memory and copies into it, once, on the sender's GPU; between
// two memories of the host a processor copies.
package local

import (
	"errors"
	"fmt"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// Link implements transport.Link.
type Link struct {
	loop    *poll.Loop
	device  *device.Device
	queue   *device.Queue
	targets map[uint32]*device.Memory
	closed  bool
	wear    func(error)
}

var _ transport.Link = (*Link)(nil)

// New makes a link whose copies the device issues in the queue. wear is called on the
// loop for memory that cannot be unmapped.
func New(loop *poll.Loop, d *device.Device, queue *device.Queue, wear func(error)) *Link {
	return &Link{loop: loop, device: d, queue: queue, targets: map[uint32]*device.Memory{}, wear: wear}
}

// AddTarget maps the receiver's memory. That takes the driver some
// milliseconds, which the loop does not wait for; the descriptors have to stay open
// until ready is called.
func (l *Link) AddTarget(region, kind uint32, parts []device.Part, ready func(error)) {
	go func() {
		var m *device.Memory
		err := l.device.On(func() error {
			var err error
			if kind == wire.MemoryHost {
				if m, err = device.ImportHost(parts[0].FD, parts[0].Bytes); err == nil {
					if err = m.Pin(l.device); err != nil {
						err = errors.Join(err, m.Close())
					}
				}
				return err
			}
			m, err = device.ImportParts(l.device.Driver, parts, cuda.Access{Device: l.device.Ordinal, Write: true})
			return err
		})
		l.loop.Do(func() {
			if err == nil {
				if l.closed {
					l.release(m)
				} else {
					l.targets[region] = m
				}
			}
			ready(err)
		})
	}()
}

// RemoveTarget unmaps one region.
func (l *Link) RemoveTarget(region uint32) {
	if m := l.targets[region]; m != nil {
		delete(l.targets, region)
		l.release(m)
	}
}

// Write issues the copy.
func (l *Link) Write(to transport.Target, from transport.Source, n uint64, _ uint64, done func(error)) {
	l.queue.Move(l.targets[to.Region].At(to.Offset), from.Place, n, done)
}

// Close unmaps the receiver's memory.
func (l *Link) Close() {
	l.closed = true
	for _, m := range l.targets {
		l.release(m)
	}
	l.targets = nil
}

func (l *Link) release(m *device.Memory) {
	if err := m.Close(); err != nil {
		l.wear(fmt.Errorf("unmapping a receiver's memory: %w", err))
	}
}
