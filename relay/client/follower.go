package client

import (
	"errors"

	"github.com/peerlane/peerlane/cuda"
)

// Follower sets timelines when a stream of work gets to a point, without holding that stream up. A
// stream that writes a value drains the copy before the write and only then starts the next copy,
// which costs copies of 4 MiB a quarter of the rate (docs/benchmarks.md); a follower has a second
// stream that waits for an event of the first stream, and writes. A Follower belongs to the thread
// with the stream's context.
//
//	follower, err := timelines.Follow(stream)
//
//	copy to a slot, by the stream
//	follower.Write(filled, 1)
//	connection.Send(slot, 0, n, client.After(filled, 1))
type Follower struct {
	timelines *StreamTimelines
	leader    cuda.Stream
	stream    cuda.Stream
	event     cuda.Event
}

// Follow makes a follower of a stream.
func (t *StreamTimelines) Follow(s cuda.Stream) (*Follower, error) {
	f := &Follower{timelines: t, leader: s}
	var err error
	if f.stream, err = t.driver.StreamCreate(); err != nil {
		return nil, err
	}
	if f.event, err = t.driver.EventCreate(cuda.EventOptions{}); err != nil {
		return nil, errors.Join(err, t.driver.StreamDestroy(f.stream))
	}
	return f, nil
}

// Write sets a timeline when the present work of the leading stream has completed. Values come in
// the order of the calls. A stream that is captured is refused: see [HandOver].
func (f *Follower) Write(to *Timeline, value uint64) error {
	t := f.timelines
	if err := t.uncaptured(f.leader, to.number, "the write of a value"); err != nil {
		return err
	}
	// A wait is for the work before the event's record at the time of the wait, so that a single
	// event suffices.
	if err := t.driver.EventRecord(f.event, f.leader); err != nil {
		return err
	}
	if err := t.driver.StreamWaitEvent(f.stream, f.event); err != nil {
		return err
	}
	return t.Write(f.stream, to, value)
}

// Close destroys the follower's stream and event after the last write.
func (f *Follower) Close() error {
	d := f.timelines.driver
	return errors.Join(d.StreamSynchronize(f.stream), d.StreamDestroy(f.stream), d.EventDestroy(f.event))
}
