package client

import (
	"context"

	"github.com/peerlane/peerlane/relay/wire"
)

// Event is an event of this process that the relay has opened.
type Event struct {
	session *Session
	number  uint32
}

// Event has the relay open a CUDA event of a GPU, by the handle of cuIpcGetEventHandle, so that
// operations can wait for the event (AfterEvent) as for a timeline. The administrator
// (relay.events) and the driver must permit events: relay and container share /dev/shm and a uid. A
// timeline needs neither.
func (s *Session) Event(ctx context.Context, gpu wire.UUID, handle [64]byte) (*Event, error) {
	m, err := ask[*wire.EventOpened](ctx, s, &wire.Event{GPU: gpu, Handle: handle})
	if err != nil {
		return nil, err
	}
	return &Event{s, m.Event}, nil
}

// Close has the relay close the event, after the last operation that waits for the event. Destroy
// the event only afterwards.
func (e *Event) Close(ctx context.Context) error {
	_, err := ask[*wire.Done](ctx, e.session, &wire.EventClose{Event: e.number})
	return err
}

// AfterEvent starts the operation when the work before the event's latest record has completed.
// Record the event before the post of the operation; recorded again before the operation has begun,
// that may wait for the later record.
func AfterEvent(e *Event) Option { return func(d *wire.Descriptor) { d.WaitEvent = e.number } }
