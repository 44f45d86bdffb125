package verbs

/*
#include "calls.h"
*/
import "C"

import (
	"fmt"
	"syscall"
)

// EventKind is the kind of a device event (ibv_event_type).
type EventKind uint8

// Events that Peerlane tells apart.
const (
	QueueFailed      EventKind = C.IBV_EVENT_CQ_ERR
	PairFailed       EventKind = C.IBV_EVENT_QP_FATAL
	PairRequestError EventKind = C.IBV_EVENT_QP_REQ_ERR
	PairAccessError  EventKind = C.IBV_EVENT_QP_ACCESS_ERR
	DeviceFailed     EventKind = C.IBV_EVENT_DEVICE_FATAL
	PortUp           EventKind = C.IBV_EVENT_PORT_ACTIVE
	PortLost         EventKind = C.IBV_EVENT_PORT_ERR
	LIDChanged       EventKind = C.IBV_EVENT_LID_CHANGE
	GIDsChanged      EventKind = C.IBV_EVENT_GID_CHANGE
)

var eventNames = [...]string{
	"CQ error", "local work queue catastrophic error", "invalid request local work queue error",
	"local access violation work queue error", "communication established", "send queue drained",
	"path migrated", "path migration request error", "local catastrophic error", "port active",
	"port error", "LID change", "P_Key change", "SM change", "SRQ catastrophic error",
	"SRQ limit reached", "last WQE reached", "client reregistration", "GID table change", "WQ fatal error",
}

func (k EventKind) String() string {
	if int(k) < len(eventNames) {
		return eventNames[k]
	}
	return fmt.Sprintf("event %d", uint8(k))
}

// Fatal reports whether the object of the event is unusable.
func (k EventKind) Fatal() bool {
	switch k {
	case QueueFailed, PairFailed, PairRequestError, PairAccessError, DeviceFailed:
		return true
	}
	return false
}

// Event is something that happened to a device, and not to a request.
type Event struct {
	Kind EventKind
	Pair uint32 // the number of the queue pair that it is about, else 0
	Port uint8  // the port that it is about, else 0
	// queue is the completion queue that it is about.
	queue uintptr
}

func (e Event) String() string {
	switch {
	case e.Pair != 0:
		return fmt.Sprintf("%s (queue pair %d)", e.Kind, e.Pair)
	case e.Port != 0:
		return fmt.Sprintf("%s (port %d)", e.Kind, e.Port)
	}
	return e.Kind.String()
}

// AsyncFD is readable when there is an event. The descriptor does not block, and belongs to the
// context.
func (c *Context) AsyncFD() int { return int(c.c.async_fd) }

// NextAsync takes the next event; ok is false when there is none (ibv_get_async_event).
func (c *Context) NextAsync() (e Event, ok bool, err error) {
	var kind, port C.int
	var pair C.uint32_t
	var queue C.uintptr_t
	r := C.peerlane_async_event(c.l.calls, c.c, &kind, &pair, &port, &queue)
	switch syscall.Errno(r) {
	case 0:
		return Event{Kind: EventKind(kind), Pair: uint32(pair), Port: uint8(port), queue: uintptr(queue)}, true, nil
	case syscall.EAGAIN:
		return Event{}, false, nil
	}
	return Event{}, false, failed(int32(r), "ibv_get_async_event", c.name)
}
