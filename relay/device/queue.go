package device

import "github.com/peerlane/peerlane/cuda"

// Queue issues copies in order on a stream of its own and reports each one's
// end. It implements poll.Poller and belongs to one thread.
type Queue struct {
	device  *Device
	stream  cuda.Stream
	idle    []cuda.Event
	pending []issued // oldest first: a stream ends its copies in order
}

type issued struct {
	event cuda.Event
	done  func(error)
}

// NewQueue makes a queue of copies issued by the device.
func (g *Device) NewQueue() (*Queue, error) {
	q := &Queue{device: g}
	err := g.On(func() error {
		var err error
		q.stream, err = g.Driver.StreamCreate()
		return err
	})
	if err != nil {
		return nil, err
	}
	return q, nil
}

// Copy issues a copy of n bytes; done is called from Poll when the bytes have
// arrived, or with the error. An error that is met at once is reported the
// same way, before Copy returns.
func (q *Queue) Copy(to, from cuda.Ptr, n uint64, done func(error)) {
	d := q.device.Driver
	if err := q.device.Use(); err != nil {
		done(err)
		return
	}
	event, err := q.event()
	if err != nil {
		done(err)
		return
	}
	if err := d.MemcpyAsync(to, from, n, q.stream); err != nil {
		q.idle = append(q.idle, event)
		done(err)
		return
	}
	if err := d.EventRecord(event, q.stream); err != nil {
		// The copy runs and its end cannot be seen by an event: wait for it here,
		// so that nobody reuses the memory under it.
		q.idle = append(q.idle, event)
		if waited := d.StreamSynchronize(q.stream); waited != nil {
			err = waited
		}
		done(err)
		return
	}
	q.pending = append(q.pending, issued{event, done})
}

func (q *Queue) event() (cuda.Event, error) {
	if n := len(q.idle); n > 0 {
		e := q.idle[n-1]
		q.idle = q.idle[:n-1]
		return e, nil
	}
	return q.device.Driver.EventCreate(cuda.EventOptions{})
}

// Poll reports the copies that have ended.
func (q *Queue) Poll() bool {
	progress := false
	for len(q.pending) > 0 {
		head := q.pending[0]
		ready, err := q.device.Driver.EventQuery(head.event)
		if err == nil && !ready {
			break
		}
		q.pending = q.pending[1:]
		q.idle = append(q.idle, head.event)
		progress = true
		head.done(err)
	}
	if len(q.pending) == 0 {
		q.pending = nil // let the backing array go
	}
	return progress
}

// Busy reports whether a copy is under way.
func (q *Queue) Busy() bool { return len(q.pending) > 0 }

// Arm has nothing to arm: a queue without copies under way makes no work.
func (q *Queue) Arm() bool { return false }

// Disarm has nothing to undo.
func (q *Queue) Disarm() {}

// Close destroys the stream and events. No copy may be under way.
func (q *Queue) Close() error {
	d := q.device.Driver
	err := q.device.Use()
	if err == nil {
		err = d.StreamDestroy(q.stream)
	}
	for _, e := range q.idle {
		if destroyed := d.EventDestroy(e); err == nil {
			err = destroyed
		}
	}
	return err
}
