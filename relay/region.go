package relay

import (
	"crypto/rand"

	"github.com/peerlane/peerlane/relay/wire"
)

// exposedRegion is a range of a client's memory that remote programs read or write: a program with
// the key, on a permitted connection, needs no action of the client. It belongs to the loop.
type exposedRegion struct {
	number uint32
	key    wire.UUID
	memory *memory
	// The range in the exported memory, bytes.
	offset, length uint64
	access         uint32
	// The permitted connections: those of a listener, or a single one. The other is 0.
	listener, connection uint32

	users int // operations that can touch it
	state lifeState
	// gone is called after the last operation; nil without a waiter.
	gone func()
}

// servedOperation links an operation to the region that it reads or writes for the remote side. No
// local client gets the end.
type servedOperation struct {
	region *exposedRegion
	at     *connection
}

func (v *servedOperation) finish() {
	v.at.serving--
	v.region.users--
	v.region.memory.served--
	v.region.settle()
	v.region.memory.settle()
}

func (s *session) expose(m *wire.Expose, sequence uint32) {
	o, err := s.newRegion(m)
	if err == nil {
		_, err = rand.Read(o.key[:])
	}
	if err != nil {
		s.answer(sequence, err)
		return
	}
	s.regions[o.number] = o
	s.relay.regions[o.key] = o
	o.memory.regions[o] = true
	s.reply(&wire.Exposed{Region: o.number, Key: o.key}, sequence)
}

// newRegion checks a request to expose memory.
func (s *session) newRegion(m *wire.Expose) (*exposedRegion, error) {
	memory := s.memories[m.Memory]
	if memory == nil || memory.state != memoryExported {
		return nil, wire.Errorf(wire.StatusUnknownMemory, "memory %d is not exported", m.Memory)
	}
	const all = wire.RemoteRead | wire.RemoteWrite
	var need uint32
	if m.Access&wire.RemoteRead != 0 {
		need |= wire.AccessSend
	}
	if m.Access&wire.RemoteWrite != 0 {
		need |= wire.AccessReceive
	}
	switch {
	case m.Access == 0 || m.Access&^all != 0:
		return nil, wire.Errorf(wire.StatusMalformed, "memory offered for access %#x", m.Access)
	case memory.access&need != need:
		return nil, wire.Errorf(wire.StatusNotPermitted,
			"memory %d is offered for more than it was exported for: to be read it has to be for sending, to be written "+
				"for receiving", m.Memory)
	case m.Length == 0 || m.Offset > memory.length || m.Length > memory.length-m.Offset:
		return nil, wire.Errorf(wire.StatusOutOfRange, "a range of %d bytes at offset %d is offered of memory of %d",
			m.Length, m.Offset, memory.length)
	case len(s.regions) >= wire.MaxRegions:
		return nil, wire.Errorf(wire.StatusLimit, "%d ranges of memory are offered, which is the limit", len(s.regions))
	case (m.Listener == 0) == (m.Connection == 0):
		return nil, wire.Errorf(wire.StatusMalformed,
			"memory is offered to the connections of one listener, or to one connection")
	}
	var lane *lane
	if m.Listener != 0 {
		l := s.listeners[m.Listener]
		if l == nil {
			return nil, wire.Errorf(wire.StatusUnknownListener, "listener %d is not open", m.Listener)
		}
		lane = l.lane
	} else {
		c := s.visible(m.Connection)
		switch {
		case c == nil:
			return nil, wire.Errorf(wire.StatusUnknownConnection, "connection %d is not open", m.Connection)
		case c.isDown():
			return nil, c.down
		case c.sends():
			return nil, wire.Errorf(wire.StatusMalformed,
				"memory is offered on connection %d, which was made here; the side that accepted offers, the side that "+
					"connected reads and writes", m.Connection)
		}
		lane = c.lane
	}
	if memory.lane != lane {
		return nil, wire.Errorf(wire.StatusWrongGPU,
			"memory %d is of GPU %s, and offered to connections of the lane of GPU %s", m.Memory, memory.lane.spec.GPU.BusID,
			lane.spec.GPU.BusID)
	}
	return &exposedRegion{
		number: s.number(), memory: memory, offset: m.Offset, length: m.Length, access: m.Access,
		listener: m.Listener, connection: m.Connection,
	}, nil
}

// visible returns a connection of the client, nil for hidden and unknown connections.
func (s *session) visible(number uint32) *connection {
	if c := s.connections[number]; c != nil && !c.hidden {
		return c
	}
	return nil
}

func (s *session) revoke(number, sequence uint32) {
	o := s.regions[number]
	if o == nil || o.state != lifeLive {
		s.answer(sequence, wire.Errorf(wire.StatusUnknownMemory,
			"offer %d was withdrawn, or its memory unexported, or it never was", number))
		return
	}
	o.gone = func() { s.answer(sequence, nil) }
	o.revoke()
}

// revoke lets no new operation begin.
func (o *exposedRegion) revoke() { o.apply(lifeRevoke) }

func (o *exposedRegion) settle() {
	if o.users == 0 {
		o.apply(lifeIdle)
	}
}

func (o *exposedRegion) apply(e lifeEvent) {
	s := o.memory.session
	switch lifeTable.Must(&o.state, e) {
	case lifeSettle:
		delete(s.relay.regions, o.key)
		delete(o.memory.regions, o)
		o.settle()
	case lifeFree:
		delete(s.regions, o.number)
		if o.gone != nil {
			o.gone()
		}
	}
}

// exposed returns the region of a key, if the remote side of the connection may read (wire.OpSend) or
// write (wire.OpReceive) it.
func (c *connection) exposed(kind uint32, key wire.UUID) (*exposedRegion, wire.Status) {
	o := c.session.relay.regions[key]
	if o == nil || o.memory.session != c.session || o.connection != c.number && (o.listener == 0 ||
		o.listener != c.listener) {
		return nil, wire.StatusBadKey
	}
	need := uint32(wire.RemoteRead)
	if kind == wire.OpReceive {
		need = wire.RemoteWrite
	}
	if o.access&need == 0 || kind == wire.OpReceive && o.memory.kind == wire.MemoryIPC && c.route == wire.RouteDirect {
		// The remote relay would have to write the memory, which no IPC handle permits.
		return nil, wire.StatusNotPermitted
	}
	return o, wire.StatusOK
}

// serve returns the operation that reads or writes a region for the remote side of a connection. The
// error is the same for a key of no region and for a key of another connection.
func (c *connection) serve(kind uint32, key wire.UUID, offset, length uint64) (*operation, wire.Status) {
	o, status := c.exposed(kind, key)
	switch {
	case status != wire.StatusOK:
		return nil, status
	case offset > o.length || length > o.length-offset:
		return nil, wire.StatusOutOfRange
	}
	m := o.memory
	m.users++
	m.served++
	o.users++
	c.serving++
	return &operation{
		session: c.session, serves: &servedOperation{o, c}, began: c.session.relay.loop.Now(), kind: kind, memory: m,
		state: operationStarted, offset: o.offset + offset, length: length, wait: wire.NoTimeline, signal: wire.NoTimeline,
	}, wire.StatusOK
}
