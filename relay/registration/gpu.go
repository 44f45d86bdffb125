package registration

import (
	"fmt"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
)

// GPU is an Allocator of memory on a GPU.
type GPU struct {
	// Asks is the device with the relay's context. Memory of cuMemCreate needs no context on the
	// GPU.
	Asks *device.Device
	On   cuda.Device
	// Own makes a context on that GPU, for memory of cuMemAlloc, if Asks is a different GPU; nil
	// where none may be made.
	Own func() (*device.Device, error)
}

// Make is of [Allocator].
func (g GPU) Make(kind Kind, bytes uint64) (Memory, error) {
	if kind == VMM {
		return made(device.Create(g.Asks.Driver, g.On, bytes, g.access()...))
	}
	own := g.Asks
	if own.Ordinal != g.On {
		if g.Own == nil {
			return nil, fmt.Errorf(
				"memory of cuMemAlloc on GPU %d needs a context there, and this process has its own on GPU %s",
				g.On,
				g.Asks.BusID,
			)
		}
		var err error
		if own, err = g.Own(); err != nil {
			return nil, err
		}
	}
	return made(own.Allocate(bytes))
}

// made keeps a nil pointer from becoming a Memory.
func made(m *device.Memory, err error) (Memory, error) {
	if err != nil {
		return nil, err
	}
	return m, nil
}

func (g GPU) access() []cuda.Access {
	access := []cuda.Access{{Device: g.On, Write: true}}
	if g.Asks.Ordinal != g.On {
		access = append(access, cuda.Access{Device: g.Asks.Ordinal, Write: true})
	}
	return access
}

// Capable is of [Allocator].
func (g GPU) Capable(m Memory) (bool, error) {
	return g.Asks.RDMACapable(m.(*device.Memory))
}
