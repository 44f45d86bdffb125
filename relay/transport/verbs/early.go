package verbs

import (
	"errors"
	"slices"

	"github.com/peerlane/peerlane/relay/device"
	gdr "github.com/peerlane/peerlane/relay/registration"
	"github.com/peerlane/peerlane/relay/verbs"
)

// Opened has the open NICs of a Fabric with an active port. It registers memory with them before a group exists. Any
// goroutine may call its methods.
type Opened struct {
	fabric *Fabric
	nics   []*nic
}

// OpenEarly opens the NICs and creates a completion queue for each NIC, before the first peer needs
// both. NICs that do not open, and NICs of later lanes, open with the first peer. It blocks.
func (f *Fabric) OpenEarly() (*Opened, error) {
	if err := f.begin(); err != nil {
		return nil, err
	}
	defer f.building.Done()
	nics, err := f.open(true)
	if err != nil {
		return nil, err
	}
	for _, n := range nics {
		if _, err := f.reserve(n, 0); err != nil {
			return nil, err
		}
	}
	// A group has active NICs only, and a lane decides again about its slots for other NICs.
	nics = slices.DeleteFunc(nics, func(n *nic) bool {
		port, err := n.context.Port(n.port)
		return err != nil || port.State != verbs.PortActive
	})
	if len(nics) == 0 {
		return nil, unreachable("no NIC has an active port")
	}
	return &Opened{f, nics}, nil
}

// begin counts a registration outside the loop, unless the Fabric has ended.
func (f *Fabric) begin() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return errFabricEnding
	}
	f.building.Add(1)
	return nil
}

var errFabricEnding = unreachable("the relay is ending")

// NICs is QPGroup.NICs for the open NICs.
func (o *Opened) NICs() string { return numbered(o.nics) }

// NICNames is QPGroup.NICNames for the open NICs.
func (o *Opened) NICNames() []string { return namesOf(o.nics) }

// Try is QPGroup.Try for the open NICs.
func (o *Opened) Try(from gdr.Allocator, bytes uint64) (*gdr.Registered, error) {
	if err := o.fabric.begin(); err != nil {
		return nil, err
	}
	defer o.fabric.building.Done()
	return o.fabric.try(from, bytes, o.nics)
}

// Register is QPGroup.Register for the open NICs.
func (o *Opened) Register(m *device.Memory, target bool) error {
	_, err := o.fabric.register(purpose{m, target}, o.nics)
	if errors.Is(err, errForgotten) {
		return nil // the memory is released, and no operation uses it
	}
	return err
}

// Steps is QPGroup.Steps.
func (o *Opened) Steps(m *device.Memory, target bool) []gdr.Step { return o.fabric.steps(m, target) }
