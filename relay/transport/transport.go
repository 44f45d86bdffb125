// Package transport is how bytes get from a sender's relay to a receiver's.
// Each transport is a folder below.
package transport

import "github.com/peerlane/peerlane/relay/device"

// Source is where a write takes its bytes: a place in this process, and the
// same as an offset in a region that the link knows.
type Source struct {
	Place  device.Place
	Region uint32
	Offset uint64
}

// Target is a place in the receiver's memory.
type Target struct {
	Region uint32
	Offset uint64
}

// Link is one connection's way to its receiver. It belongs to the event loop,
// on which it also calls back.
type Link interface {
	// AddTarget makes the receiver's memory, of a kind of wire.Memory*, writable
	// under a number. The descriptors stay the caller's. Writes to the region may be
	// posted once ready has been called without an error.
	AddTarget(region, kind uint32, parts []device.Part, ready func(error))
	// RemoveTarget takes a region back. No write to it may be under way.
	RemoveTarget(region uint32)
	// AddSource makes memory of the sender's relay, of a kind of wire.Memory*, known
	// under a number, for writes out of it. The descriptor stays the caller's.
	AddSource(region, kind uint32, fd int, bytes uint64)
	// RemoveSource takes a source back. No write out of it may be under way.
	RemoveSource(region uint32)
	// Write moves n bytes. done is called when the source may be reused: the
	// bytes have arrived, or nothing writes them any more. The immediate reaches
	// a receiver that listens for it after the bytes.
	Write(to Target, from Source, n uint64, immediate uint64, done func(error))
	// Close lets everything go. No write may be under way.
	Close()
}
