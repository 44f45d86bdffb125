package transport

import "github.com/peerlane/peerlane/relay/device"

// Copy is a write of so many bytes, one of several.
type Copy struct {
	To    Target
	From  device.Place
	Bytes uint64
}

// ListLink is a Link that makes many writes with few calls of the driver.
type ListLink interface {
	Link
	// WriteList makes all writes, in any order. done is called once, when all have ended, with
	// the first error.
	WriteList(list []Copy, immediate uint64, done func(error))
}
