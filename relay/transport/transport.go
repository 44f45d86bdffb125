// Package transport is how bytes get from a sender's relay to a receiver's. Every transport is a
// folder below.
//
// A connection exchanges messages with the remote relay over a Control. The receiver grants a range
// of memory, announces the grant, and the sender's Link writes there, under the grant's number;
// Arrivals report a complete write to the receiver. Nothing is kept back: messages posted in an
// iteration of the event loop are sent at the end of the iteration.
package transport

import (
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/wire"
)

// Control carries a connection's messages to and from the remote relay: a packet.Port between two
// relays of one host. The constructor's callbacks get every message, and the remote side's end
// once, unless this side has left before. Control belongs to the event loop.
type Control interface {
	// Send sends a message after earlier messages. The caller keeps the descriptors, which reach no
	// remote host.
	Send(m wire.Message, sequence uint32, fds ...int)
	// Leave ends the channel after the sent messages.
	Leave()
	// Close ends the channel at once.
	Close()
}

// Arrivals are the receiver's end of a connection's writes. The constructor's callbacks get every
// complete write (immediate and bytes), and once the end, after which no byte of this connection
// can arrive. Arrivals belong to the event loop.
type Arrivals interface {
	// AddMemory registers memory under the number used by grants. The memory must stay until
	// RemoveMemory, or until no byte can arrive.
	AddMemory(region uint32, m *device.Memory) error
	// RemoveMemory ends AddMemory. No grant in the memory may be open.
	RemoveMemory(region uint32)
	// Grant permits the sender to write [offset, offset+length) of a region, in bytes, once, in
	// writes with that immediate. Call Grant before the announcement to the sender.
	Grant(immediate uint64, region uint32, offset, length uint64) error
	// Close ends the calls.
	Close()
}

// Source is the source of a write: a place in this process.
type Source struct {
	Place device.Place
	// NICs are the weights of this side's NICs for writes from the source, by name; nil for equal
	// weights. A NIC without a weight reads no byte as long as a NIC with a weight exists.
	NICs map[string]int
}

// Target is a place in the receiver's memory.
type Target struct {
	Region uint32
	Offset uint64
}

// Link sends a connection's data to the receiver. Link belongs to the event loop, and calls back on
// the loop.
type Link interface {
	// AddTarget makes the receiver's memory, of a kind of wire.Memory*, writable
	// under a number. The descriptors stay the caller's. Writes to the region may be
	// posted once ready has been called without an error.
	AddTarget(region, kind uint32, parts []device.Part, ready func(error))
	// RemoveTarget takes a region back. No write to the memory may be in flight.
	RemoveTarget(region uint32)
	// Write moves n bytes. done is called when the source may be reused: the bytes have arrived, or
	// no write is in flight. The immediate reaches a receiver that listens for it after the bytes.
	Write(to Target, from Source, n uint64, immediate uint64, done func(error))
	// Close lets everything go. No write may be under way.
	Close()
}
