package transport

import "github.com/peerlane/peerlane/relay/device"

// Copy is an element of a list of writes.
type Copy struct {
	To    Target
	From  device.Place
	Bytes uint64
}

// ListLink is a Link that makes many writes with few calls of the driver.
type ListLink interface {
	Link
	// WriteList makes the writes, in any order. done is called once, after the last write, with the
	// first error.
	WriteList(list []Copy, immediate uint64, done func(error))
}
