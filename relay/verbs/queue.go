package verbs

/*
#include "calls.h"

#cgo noescape peerlane_poll
#cgo nocallback peerlane_poll
#cgo noescape peerlane_arm
#cgo nocallback peerlane_arm
#cgo noescape peerlane_acknowledge
#cgo nocallback peerlane_acknowledge
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// Queue is a completion queue with a separate channel, whose descriptor an event loop waits on.
type Queue struct {
	c  *Context
	cq *C.struct_ibv_cq
}

// NewQueue makes a queue for at least so many completions that nobody has polled
// (ibv_create_comp_channel, ibv_create_cq). A further completion is lost, and the queue fails.
func (c *Context) NewQueue(entries int) (*Queue, error) {
	q := &Queue{c: c}
	if r := C.peerlane_create_cq(c.l.calls, c.c, C.int(entries), &q.cq); r != 0 {
		return nil, failed(int32(r), "ibv_create_cq", fmt.Sprintf("%s, %d entries", c.name, entries))
	}
	return q, nil
}

// Entries is for how many completions it has room.
func (q *Queue) Entries() int { return int(q.cq.cqe) }

// Resize changes the room to at least so many completions (ibv_resize_cq). Providers without it
// return EOPNOTSUPP or ENOSYS.
func (q *Queue) Resize(entries int) error {
	return failed(
		int32(C.peerlane_resize_cq(q.c.l.calls, q.cq, C.int(entries))),
		"ibv_resize_cq",
		fmt.Sprintf("%s, %d entries", q.c.name, entries),
	)
}

// Is reports whether an event is about the queue.
func (q *Queue) Is(e Event) bool { return e.queue != 0 && e.queue == uintptr(unsafe.Pointer(q.cq)) }

// Failure is the event of the queue's error, for tests of the receivers.
func (q *Queue) Failure() Event {
	return Event{Kind: QueueFailed, queue: uintptr(unsafe.Pointer(q.cq))}
}

// FD is readable when a completion has come since [Queue.Arm]. The descriptor does not block, and
// belongs to the queue.
func (q *Queue) FD() int { return int(q.cq.channel.fd) }

// Arm requests an event at FD with the next completion. An earlier completion has no event: so arm,
// then poll again, then wait (ibv_req_notify_cq).
func (q *Queue) Arm() error {
	return failed(int32(C.peerlane_arm(q.cq)), "ibv_req_notify_cq", q.c.name)
}

// Acknowledge removes the events of FD, so that FD is no longer readable (ibv_get_cq_event,
// ibv_ack_cq_events).
func (q *Queue) Acknowledge() error {
	return failed(int32(C.peerlane_acknowledge(q.c.l.calls, q.cq)), "ibv_get_cq_event", q.c.name)
}

// Poll takes completions, oldest first, and says how many (ibv_poll_cq).
func (q *Queue) Poll(into []Completion) (int, error) {
	if len(into) == 0 {
		return 0, nil
	}
	var got C.int
	r := C.peerlane_poll(q.cq, (*C.peerlane_completion)(unsafe.Pointer(unsafe.SliceData(into))), C.int(len(into)), &got)
	return int(got), failed(int32(r), "ibv_poll_cq", q.c.name)
}

// Close destroys the queue and the channel (ibv_destroy_cq): EBUSY while a pair uses the queue.
func (q *Queue) Close() error {
	return failed(int32(C.peerlane_destroy_cq(q.c.l.calls, q.cq)), "ibv_destroy_cq", q.c.name)
}
