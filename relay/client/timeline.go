package client

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/ring"
	"github.com/peerlane/peerlane/relay/wire"
)

// Timeline is a 64-bit counter that this process, a stream of its GPU and the
// relay can advance and wait for.
type Timeline struct {
	session *Session
	number  uint32
}

// Timeline numbers a counter of the session's wire.Timelines counters, which start at 0.
func (s *Session) Timeline(number uint32) (*Timeline, error) {
	if number >= wire.Timelines {
		return nil, fmt.Errorf("timeline %d: a session has %d, numbered from 0", number, wire.Timelines)
	}
	return &Timeline{s, number}, nil
}

// Value is where the timeline stands. After the session's end that is
// wire.TimelineEnd.
func (t *Timeline) Value() uint64 {
	t.session.mu.Lock()
	defer t.session.mu.Unlock()
	if t.session.ring == nil {
		return wire.TimelineEnd
	}
	return t.session.ring.Timeline(t.number)
}

// Reached reports whether the timeline has come to a value.
func (t *Timeline) Reached(value uint64) bool { return ring.Reached(t.Value(), value) }

// Advance sets the timeline from the CPU.
func (t *Timeline) Advance(value uint64) {
	t.session.mu.Lock()
	defer t.session.mu.Unlock()
	if t.session.broken == nil {
		t.session.ring.Advance(t.number, value)
	}
}

// StreamTimelines are the timelines as a GPU's streams see them.
type StreamTimelines struct {
	driver *cuda.Driver
	memory unsafe.Pointer
	base   cuda.Ptr
}

// RegisterTimelines makes the session's timelines accessible to the streams of
// the current context. Unregister before the session is closed.
func (s *Session) RegisterTimelines(d *cuda.Driver) (*StreamTimelines, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ring == nil {
		return nil, s.broken
	}
	memory := s.ring.Timelines()
	p := unsafe.Pointer(&memory[0])
	if err := d.MemHostRegister(p, uint64(len(memory))); err != nil {
		return nil, fmt.Errorf("registering the session's timelines with CUDA: %w", err)
	}
	base, err := d.MemHostDevicePtr(p)
	if err != nil {
		return nil, errors.Join(err, d.MemHostUnregister(p))
	}
	return &StreamTimelines{driver: d, memory: p, base: base}, nil
}

// Unregister takes the timelines away from CUDA.
func (t *StreamTimelines) Unregister() error { return t.driver.MemHostUnregister(t.memory) }

func (t *StreamTimelines) address(number uint32) cuda.Ptr {
	return t.base + cuda.Ptr(number*wire.TimelineStride)
}

// Write makes a stream set a timeline (cuStreamWriteValue64). A stream that is captured is refused:
// see [HandOver].
func (t *StreamTimelines) Write(s cuda.Stream, to *Timeline, value uint64) error {
	if err := t.uncaptured(s, to.number, "the write of a value"); err != nil {
		return err
	}
	return t.driver.StreamWriteValue64(s, t.address(to.number), value)
}

// Wait lets a stream wait until a timeline has reached a value
// (cuStreamWaitValue64). A stream that is captured is refused: see [HandOver].
func (t *StreamTimelines) Wait(s cuda.Stream, on *Timeline, value uint64) error {
	if err := t.uncaptured(s, on.number, "a wait for a value"); err != nil {
		return err
	}
	return t.driver.StreamWaitValue64(s, t.address(on.number), value)
}
