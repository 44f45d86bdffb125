package relay

import (
	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/wire"
)

// event is a client's event that the relay has opened: an operation can wait until the work before
// the event's latest record has completed. The relay asks the driver; the relay never makes a
// stream wait for a foreign event.
type event struct {
	relay  *Relay
	lane   *lane
	handle cuda.Event
	users  int // operations that wait
	state  lifeState
}

// ofEvent is the quota of an event: the driver has an open file of the event.
var ofEvent = quota{descriptors: 1}

// openEvent opens an event for the client. The driver decides on an event that the client destroys,
// and on a guessed handle of a foreign event: hence only where the configuration says so.
func (s *session) openEvent(m *wire.Event, sequence uint32) {
	const instead = "hand over by a timeline, which needs nothing of this"
	switch {
	case !s.relay.config.IPCEvents:
		s.answer(sequence, wire.Errorf(wire.StatusNotPermitted,
			"events of CUDA's IPC are not taken, because relay.events in config.toml does not say \"ipc\"; %s",
			instead).On("relay.events"))
		return
	case len(s.events)+s.blocking >= wire.MaxEvents:
		s.answer(sequence, wire.Errorf(wire.StatusLimit, "%d events are open, which is the limit", len(s.events)))
		return
	}
	if err := s.relay.reserve(ofEvent); err != nil {
		s.answer(sequence, err)
		return
	}
	e := &event{relay: s.relay}
	s.block(sequence, func() error {
		lane, err := s.relay.laneOf(m.GPU)
		if err == nil {
			err = lane.open()
		}
		if err != nil {
			return err
		}
		e.lane = lane
		err = lane.device.On(func() error {
			var err error
			e.handle, err = lane.device.Driver.IPCOpenEventHandle(m.Handle)
			return err
		})
		if err != nil {
			return wire.Errorf(wire.StatusBadDescriptor,
				"the driver does not open this event for the relay (%v): CUDA keeps the events of its IPC in /dev/shm, for "+
					"one uid; the container has to share the host's (--ipc host) and to be of the relay's uid (relay.sandbox = "+
					"\"off\" makes that root), or %s", err, instead)
		}
		return nil
	}, func(err error) {
		switch {
		case err != nil:
			s.relay.release(ofEvent)
			s.answer(sequence, err)
		case s.ended != nil:
			e.close()
		default:
			number := s.number()
			s.events[number] = e
			s.reply(&wire.EventOpened{Event: number}, sequence)
		}
	})
}

func (s *session) closeEvent(number uint32) error {
	e := s.events[number]
	if e == nil {
		return wire.Errorf(wire.StatusUnknownEvent, "event %d is not open", number)
	}
	delete(s.events, number)
	e.retire()
	return nil
}

// retire closes the event when no operation waits for it any more.
func (e *event) retire() { e.apply(lifeRevoke) }

func (e *event) settle() {
	if e.users == 0 {
		e.apply(lifeIdle)
	}
}

func (e *event) apply(event lifeEvent) {
	switch lifeTable.Must(&e.state, event) {
	case lifeSettle:
		e.settle()
	case lifeFree:
		e.close()
	}
}

func (e *event) close() {
	e.relay.release(ofEvent)
	err := e.lane.device.On(func() error { return e.lane.device.Driver.EventDestroy(e.handle) })
	if err != nil {
		logrus.WithError(err).Warn("closing a client's event")
	}
}

// reached reports whether the event has. An event with a failing query counts as reached, and ends
// the operation.
func (op *operation) reached() bool {
	e := op.event
	if e == nil {
		return true
	}
	err := e.lane.device.Use()
	ready := false
	if err == nil {
		ready, err = e.lane.device.Driver.EventQuery(e.handle)
	}
	if err == nil && !ready {
		return false
	}
	if err != nil {
		op.session.relay.failed(err)
		op.apply(operationEventFailed, wire.StatusOK)
	}
	op.leaveEvent()
	return true
}

// leaveEvent ends the operation's wait.
func (op *operation) leaveEvent() {
	if e := op.event; e != nil {
		op.event = nil
		e.users--
		e.settle()
	}
}

// waitFor makes the operation wait for an event of the session.
func (op *operation) waitFor(number uint32, c *connection) wire.Status {
	if number == 0 {
		return wire.StatusOK
	}
	e := op.session.events[number]
	switch {
	case e == nil:
		return wire.StatusUnknownEvent
	case e.lane != c.lane:
		return wire.StatusWrongGPU
	}
	e.users++
	op.event = e
	return wire.StatusOK
}
