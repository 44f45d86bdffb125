package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

// spinTime is the time that Wait polls the ring before the sleep.
const spinTime = 50 * time.Microsecond

// reasonTimeout limits the wait of a failed operation for the message on the socket; the status
// comes in the ring.
const reasonTimeout = time.Second

// Connection is a unidirectional stream between two containers: sends, and receives, start in the
// order of the posts.
type Connection struct {
	session *Session
	number  uint32
	// Route is wire.RouteStaged or wire.RouteDirect.
	Route uint32
	// Peer describes the remote side.
	Peer string

	once   sync.Once
	down   chan struct{}
	reason error // set before down is closed
}

// Connect connects to the listener that gave out the handle; the connection
// sends from memory of this GPU.
func (s *Session) Connect(ctx context.Context, gpu wire.UUID, handle wire.Handle) (*Connection, error) {
	m, err := ask[*wire.Connected](ctx, s, &wire.Connect{GPU: gpu, Handle: handle})
	if err != nil {
		return nil, err
	}
	return s.connection(m), nil
}

// connection registers a connection. The event of its end may have come before.
func (s *Session) connection(m *wire.Connected) *Connection {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.known(m.Connection)
	c.Route, c.Peer = m.Route, wire.Text(m.Peer[:])
	return c
}

func (s *Session) known(number uint32) *Connection {
	c := s.connections[number]
	if c == nil {
		c = &Connection{session: s, number: number, down: make(chan struct{})}
		s.connections[number] = c
		if s.broken != nil {
			c.takeDown(s.broken)
		}
	}
	return c
}

func (s *Session) connectionDown(m *wire.ConnectionDown) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known(m.Connection).takeDown(wire.Reason(wire.Status(m.Status), m.Reason[:]))
}

func (c *Connection) takeDown(why error) {
	c.once.Do(func() {
		c.reason = why
		close(c.down)
		c.session.endHandOvers(c, why)
	})
}

// Down is closed when the connection is down; Err says why.
func (c *Connection) Down() <-chan struct{} { return c.down }

// Err is nil while the connection is up.
func (c *Connection) Err() error {
	select {
	case <-c.down:
		return c.reason
	default:
		return nil
	}
}

// Close takes the connection down for both sides.
func (c *Connection) Close(ctx context.Context) error {
	_, err := ask[*wire.Done](ctx, c.session, &wire.Disconnect{Connection: c.number})
	if errors.Is(err, &wire.Error{Status: wire.StatusUnknownConnection}) {
		err = nil // it was down already
	}
	c.session.mu.Lock()
	defer c.session.mu.Unlock()
	delete(c.session.connections, c.number)
	return err
}

// Option changes a send or a receive.
type Option func(*wire.Descriptor)

// Tag lets a message meet receives of the same tag only.
func Tag(tag uint64) Option { return func(d *wire.Descriptor) { d.Tag = tag } }

// After lets the operation start when a timeline has reached a value.
func After(t *Timeline, value uint64) Option {
	return func(d *wire.Descriptor) { d.WaitTimeline, d.WaitValue = t.number, value }
}

// Signal lets the relay set a timeline to a value when the operation has ended, also with an error.
// Receives of a connection end in the order of the sent messages, so that a single timeline can
// serve them.
func Signal(t *Timeline, value uint64) Option {
	return func(d *wire.Descriptor) { d.SignalTimeline, d.SignalValue = t.number, value }
}

// Buffered lets a send end before its delivery, when the relay has copied the bytes: where the
// receiver uses the same GPU, the sender runs ahead of it. [Connection.Flush] waits for the delivery,
// and reports the first failure. Elsewhere, and with an older relay, the send ends at its delivery.
func Buffered() Option { return func(d *wire.Descriptor) { d.Flags |= wire.BufferedSend } }

// Send posts a message of n bytes.
func (c *Connection) Send(m *Memory, offset, n uint64, options ...Option) (*Operation, error) {
	return c.post(wire.OpSend, m, offset, n, options)
}

// Receive posts room for a message of at most n bytes.
func (c *Connection) Receive(m *Memory, offset, n uint64, options ...Option) (*Operation, error) {
	return c.post(wire.OpReceive, m, offset, n, options)
}

func (c *Connection) post(kind uint32, m *Memory, offset, n uint64, options []Option) (*Operation, error) {
	d := wire.Descriptor{
		Operation: kind, Connection: c.number, Memory: m.number, Offset: offset, Length: n,
		WaitTimeline: wire.NoTimeline, SignalTimeline: wire.NoTimeline,
	}
	for _, o := range options {
		o(&d)
	}
	return c.submit(d)
}

func (c *Connection) submit(d wire.Descriptor) (*Operation, error) {
	s := c.session
	s.mu.Lock()
	defer s.mu.Unlock()
	op, wake, err := c.postLocked(d)
	if wake {
		poll.Ring(s.wakeRelay)
	}
	return op, err
}

// postLocked puts an operation into the ring, and reports whether the relay has to be woken.
// The session's lock is held.
func (c *Connection) postLocked(d wire.Descriptor) (op *Operation, wake bool, err error) {
	s := c.session
	if s.broken != nil {
		return nil, false, s.broken
	}
	if err := s.inTurn(c, d); err != nil {
		return nil, false, err
	}
	if s.version < wire.BufferedVersion {
		d.Flags &^= wire.BufferedSend
	}
	s.cookie++
	d.Cookie = s.cookie
	if wake, err = s.ring.Post(d); err != nil {
		return nil, false, err
	}
	op = &Operation{connection: c, cookie: d.Cookie, done: make(chan struct{})}
	s.operations[op.cookie] = op
	if d.Flags&wire.InTurn != 0 {
		op.turn = s.handOvers[d.WaitTimeline]
		op.turn.operations++
	}
	return op, wake, nil
}

// Operation is a send or a receive that was posted.
type Operation struct {
	connection *Connection
	cookie     uint64
	done       chan struct{}
	status     wire.Status
	moved      uint64
	failure    error // set where the session broke
	turn       *HandOver
	span       *span  // of a list
	failed     uint32 // of a list: the first entry that did
}

func (op *Operation) end(moved uint64, failure error) {
	op.moved, op.failure = moved, failure
	if op.span != nil {
		op.connection.session.lists.release(op.span)
	}
	close(op.done)
}

// Done is closed when the operation has ended; Wait tells how.
func (op *Operation) Done() <-chan struct{} { return op.done }

// Wait waits for the end: of a send, when its bytes are in the receiver's memory; of a receive,
// when they are here. Wait returns the number of moved bytes.
func (op *Operation) Wait(ctx context.Context) (uint64, error) {
	s := op.connection.session
	s.spin(op)
	select {
	case <-op.done:
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	if op.failure != nil {
		return op.moved, op.failure
	}
	return op.moved, op.connection.explain(op.status)
}

// explain finds the sentence for a status.
func (c *Connection) explain(status wire.Status) error {
	switch status {
	case wire.StatusOK:
		return nil
	case wire.StatusBadKey,
		wire.StatusNoReverseConnection,
		wire.StatusVersion,
		wire.StatusTruncated,
		wire.StatusCanceled,
		wire.StatusMalformed,
		wire.StatusUnknownMemory,
		wire.StatusUnknownEvent,
		wire.StatusWrongGPU,
		wire.StatusNotPermitted,
		wire.StatusOutOfRange:
		// Of this operation alone: the connection stays up.
		return &wire.Error{
			Status: status,
			Reason: fmt.Sprintf("on the connection with %s: %v", c.Peer, status),
			Object: c.Peer,
		}
	}
	select {
	case <-c.down:
		if wire.StatusOf(c.reason) == status || status == wire.StatusUnknownConnection {
			return c.reason
		}
	case <-time.After(reasonTimeout):
	}
	return &wire.Error{Status: status}
}

// Cancel asks the relay to cancel an operation of which no byte has moved. The operation ends in
// any case by itself or so; Wait tells.
func (op *Operation) Cancel() error {
	_, err := op.connection.submit(wire.Descriptor{
		Operation: wire.OpCancel, Connection: op.connection.number, Tag: op.cookie,
		WaitTimeline: wire.NoTimeline, SignalTimeline: wire.NoTimeline,
	})
	return err
}

// spin polls the ring for a short time, so that short operations end without a sleep.
func (s *Session) spin(op *Operation) {
	if s.spinners.Add(1) == 1 {
		s.sleeps(false)
	}
	defer func() {
		if s.spinners.Add(-1) == 0 {
			s.sleeps(true)
		}
	}()
	for end := time.Now().Add(spinTime); time.Now().Before(end); {
		select {
		case <-op.done:
			return
		default:
		}
		if s.mu.TryLock() {
			s.drain()
			s.mu.Unlock()
		}
	}
}

// sleeps tells the relay whether to ring, and looks once more after that.
func (s *Session) sleeps(sleeps bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ring == nil {
		return
	}
	// Another Wait may have changed it meanwhile.
	s.ring.SetSleeps(sleeps || s.spinners.Load() == 0)
	s.drain()
}

// drain takes completions; the lock is held.
func (s *Session) drain() {
	if s.ring == nil {
		return
	}
	took := false
	for {
		c, ok := s.ring.Next()
		if !ok {
			break
		}
		took = true
		if op := s.operations[c.Cookie]; op != nil {
			delete(s.operations, c.Cookie)
			op.status, op.failed = wire.Status(c.Status), c.Entry
			if op.turn != nil {
				op.turn.operations--
			}
			var failure error
			if op.status == wire.StatusPeerClosed {
				failure = s.left() // this side closed
			}
			op.end(c.Length, failure)
		}
	}
	// The relay may have stopped for want of room for completions.
	if took && s.ring.RelaySleeps() {
		poll.Ring(s.wakeRelay)
	}
}

// left is the error after the session's Close, nil before.
func (s *Session) left() error {
	if wire.StatusOf(s.broken) == wire.StatusClosed {
		return s.broken
	}
	return nil
}

// readWakes drains the ring whenever the relay rings.
func (s *Session) readWakes() {
	defer s.readers.Done()
	var rings [512]byte // one byte each; the content does not matter
	for {
		_, err := s.wakeClient.Read(rings[:])
		s.mu.Lock()
		over := s.over()
		s.drain()
		s.mu.Unlock()
		switch {
		case over:
			return
		case errors.Is(err, io.EOF):
			return // the relay's end, which the socket tells as well
		case err != nil:
			s.fail(fmt.Errorf("the relay of this container cannot wake this program any more: %w", err))
			return
		}
	}
}
