package client

import (
	"errors"
	"fmt"
	"time"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/wire"
)

// HandOver is a timeline that changes hands: its value names the side with the turn: a stream of
// the GPU, or the relay. Unlike a wait for a value that grows, taking a turn can be captured into a
// CUDA graph: a replay takes a turn.
//
//	sending, err := session.HandOver(0, wire.TurnStream)   // the stream fills first
//	receiving, err := session.HandOver(1, wire.TurnRelay)  // the relay fills first
//
//	timelines.Take(stream, receiving)  // waits for the stream's turn
//	... work with what was received ...
//	timelines.Give(stream, receiving)  // the next message may come
//
//	connection.Receive(memory, 0, n, client.InTurn(receiving)) // one for each turn
//
// Operations may be posted before it is their turn, any number of them. A replay without a posted
// operation waits for one.
type HandOver struct {
	session *Session
	number  uint32
	// Of the session's lock.
	ended      error
	connection *Connection // of the latest operation in turn
	operations int         // in turn that have not ended
}

// pollInterval is the interval at which ended timelines are set to the end value again: a later
// replay of a graph resets the value.
const pollInterval = time.Millisecond

// HandOver makes a timeline a hand-over, and sets the first turn: wire.TurnStream or
// wire.TurnRelay. A stream must not use the timeline during the call. The call restarts an ended
// hand-over, but not before the old operations have ended: old operations would use turns of the
// new hand-over.
func (s *Session) HandOver(number, first uint32) (*HandOver, error) {
	if _, err := s.Timeline(number); err != nil {
		return nil, err
	}
	if first != wire.TurnStream && first != wire.TurnRelay {
		return nil, fmt.Errorf("timeline %d: the first turn is wire.TurnStream's or wire.TurnRelay's, not %d", number, first)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken != nil {
		return nil, s.broken
	}
	if old := s.handOvers[number]; old != nil && old.operations > 0 {
		return nil, wire.Errorf(wire.StatusBusy, "timeline %d: %d %w", number, old.operations, errTurnsOpen)
	}
	h := &HandOver{session: s, number: number}
	s.handOvers[number] = h
	s.ring.Advance(number, uint64(first))
	return h, nil
}

// Err is nil while the hand-over works, and afterwards the cause of its end: the session's error,
// or the error of the connection of the latest operation. From then on streams do not wait for the
// hand-over, and the memory's content is undefined.
func (h *HandOver) Err() error {
	h.session.mu.Lock()
	defer h.session.mu.Unlock()
	return h.ended
}

// InTurn starts an operation in the relay's turn; at the end of the operation, also after an error,
// the stream gets the turn. InTurn excludes After and Signal.
func InTurn(h *HandOver) Option {
	return func(d *wire.Descriptor) { d.Flags, d.WaitTimeline = d.Flags|wire.InTurn, h.number }
}

// inTurn notes for whose end an operation's hand-over ends. The lock is held.
func (s *Session) inTurn(c *Connection, d wire.Descriptor) error {
	if d.Flags&wire.InTurn == 0 {
		return nil
	}
	h := s.handOvers[d.WaitTimeline]
	if h == nil || d.SignalTimeline != wire.NoTimeline {
		return errors.New("an operation in turn needs a hand-over, and goes with neither After nor Signal")
	}
	if h.ended == nil && c.Err() != nil {
		s.endHandOver(h, c.Err())
	}
	if h.ended != nil {
		return h.ended
	}
	h.connection = c
	return nil
}

// endHandOvers ends the hand-overs of a connection, nil for all. The lock is held.
func (s *Session) endHandOvers(of *Connection, why error) {
	for _, h := range s.handOvers {
		if of == nil || h.connection == of {
			s.endHandOver(h, why)
		}
	}
}

// endHandOver lets no stream wait for a hand-over any more. The lock is held.
func (s *Session) endHandOver(h *HandOver, why error) {
	if h.ended != nil || s.ring == nil {
		return
	}
	h.ended = why
	s.ring.Advance(h.number, wire.TimelineEnd)
	if !s.keeping {
		s.keeping = true
		go s.keepEnded()
	}
}

// keepEnded keeps hand-overs at their end until the session is closed.
func (s *Session) keepEnded() {
	for ; s.keepOnce(); time.Sleep(pollInterval) {
	}
}

// keepOnce reports false when nothing is left to be kept.
func (s *Session) keepOnce() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keeping = false
	if s.ring == nil {
		return false
	}
	for number, h := range s.handOvers {
		if h.ended == nil {
			continue
		}
		s.keeping = true
		if s.ring.Timeline(number) != wire.TimelineEnd {
			s.ring.Advance(number, wire.TimelineEnd)
		}
	}
	return s.keeping
}

// Take makes a stream wait for its turn (cuStreamWaitValue64). For an ended hand-over it returns
// the error that ended the hand-over.
func (t *StreamTimelines) Take(s cuda.Stream, h *HandOver) error {
	if err := h.Err(); err != nil {
		return err
	}
	return t.driver.StreamWaitBits64(s, t.address(h.number), wire.TurnStream|wire.TimelineEnd)
}

// Give makes a stream end its turn (cuStreamWriteValue64): of a send, the bytes are there; of a
// receive, they are not needed any more.
func (t *StreamTimelines) Give(s cuda.Stream, h *HandOver) error {
	return t.driver.StreamWriteValue64(s, t.address(h.number), wire.TurnRelay)
}

// uncaptured refuses a stream that is captured: the values that a graph waits for exist from the
// first replay on.
func (t *StreamTimelines) uncaptured(s cuda.Stream, number uint32, what string) error {
	status, err := t.driver.StreamCaptureStatus(s)
	if err != nil {
		return err
	}
	if status == cuda.CaptureNone {
		return nil
	}
	return wire.Errorf(wire.StatusNotPermitted, "timeline %d: %s %w", number, what, errCaptured)
}
