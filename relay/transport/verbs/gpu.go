package verbs

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/relay/device"
	gdr "github.com/peerlane/peerlane/relay/registration"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// Registration of GPU memory with the NICs of a Fabric: by DMA-BUF, or by nvidia-peermem.

// placeOf returns the address of a place for NICs and for this process; the GPU's address for
// memory of a GPU.
func placeOf(p device.Place) uint64 {
	if p.Host != nil {
		return uint64(uintptr(p.Host))
	}
	return uint64(p.Ptr)
}

// NICs returns the names of the NICs after the negotiation. A NIC that was lost and returned has
// another number. Any goroutine may call NICs.
func (s *QPGroup) NICs() string { return numbered(*s.registers.Load()) }

// numbered returns the names of NICs, each with the number of NICs that were opened before.
func numbered(nics []*nic) string {
	var names []string
	for _, n := range nics {
		names = append(names, fmt.Sprintf("%s (%d)", n.name, n.opened))
	}
	slices.Sort(names)
	return strings.Join(slices.Compact(names), ", ")
}

// NICNames returns the names of the group's NICs, without repetitions. Any goroutine may call
// NICNames after the negotiation.
func (s *QPGroup) NICNames() []string { return namesOf(*s.registers.Load()) }

func namesOf(nics []*nic) (names []string) {
	for _, n := range nics {
		names = append(names, n.name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// NICsVersion identifies the NICs of a group. Each change of the NICs creates another version.
type NICsVersion *[]*nic

// NICsVersion returns the version of the group's NICs. Any goroutine may call NICsVersion after the
// negotiation.
func (s *QPGroup) NICsVersion() NICsVersion { return s.registers.Load() }

// Try returns how the group's NICs register memory of an allocator, and the necessary kind of
// memory. Try releases the test memory. Any goroutine may call Try after the negotiation. It
// blocks.
func (s *QPGroup) Try(from gdr.Allocator, bytes uint64) (*gdr.Registered, error) {
	f := s.fabric
	if err := f.begin(); err != nil {
		return nil, err
	}
	defer f.building.Done()
	for {
		nics := s.registers.Load()
		tried, err := f.try(from, bytes, *nics)
		if !errors.Is(err, errRetired) || s.registers.Load() == nics {
			return tried, err
		}
	}
}

// ErrKept reports that Try could not release its test memory.
var ErrKept = errors.New("release of test memory failed")

func (f *Fabric) try(from gdr.Allocator, bytes uint64, all []*nic) (tried *gdr.Registered, err error) {
	var nics []gdr.NIC
	for _, n := range all {
		nics = append(nics, n.registrar())
	}
	return tried, useAll(all, func() error {
		var r *gdr.Registered
		err := f.current(func() (err error) {
			r, err = gdr.Make(from, bytes, nics, f.access(true))
			return err
		})
		if err != nil {
			return err
		}
		copied := *r
		tried = &copied
		if err := r.Close(); err != nil {
			return fmt.Errorf("%w: %w", ErrKept, err)
		}
		return nil
	})
}

func (f *Fabric) current(what func() error) error {
	if f.config.Current == nil {
		return what()
	}
	return f.config.Current(what)
}

// with registers memory with a NIC. The caller holds the lock of the registration.
func (r *registration) with(f *Fabric, n *nic) (region *verbs.Region, err error) {
	m, access := r.what.memory, f.access(r.what.target)
	// Remote read access is for the NIC's own flusher. Queue pairs of a connection manager would
	// have the access too, but their NICs flush nothing.
	if r.flush && n.cm == nil {
		access |= verbs.RemoteRead
	}
	if fd, offset, lent := m.Lease(); lent {
		region, err = gdr.Client(fd, offset, r.bytes, r.base, n.registrar(), access)
		return region, err
	}
	if m.Host() {
		return n.domain.Register(uintptr(r.base), r.bytes, r.base, access)
	}
	kind := gdr.VMM
	if m.Allocated() {
		kind = gdr.Allocated
	}
	err = f.current(func() error {
		var steps []gdr.Step
		region, steps, err = gdr.With(m, kind, n.registrar(), access)
		r.steps[n.name] = steps
		return err
	})
	return region, err
}

// registrar is the NIC for package registration.
func (n *nic) registrar() gdr.NIC {
	return gdr.NIC{Name: n.name, Domain: n.domain, DataDirect: n.direct}
}

// flushes reports whether writes into memory need a flush. With Data Direct a completion takes
// another path than the bytes, so that no ordering of the GPU is sufficient.
func (f *Fabric) flushes(what purpose) bool {
	return what.target && !what.memory.Host() && f.config.Flush != nil && (f.direct.Load() || f.config.Flush(what.memory))
}

// taken returns the registration of memory that the group's NICs receive into.
func (f *Fabric) taken(what purpose, s *QPGroup) (*registration, error) {
	if what.memory.Host() {
		return f.register(what, s.nics)
	}
	f.mu.Lock()
	r := f.memories[what]
	f.mu.Unlock()
	switch {
	case r == nil || !r.known(s.nics):
		return nil, wire.Errorf(wire.StatusInternal, "receive into memory of a GPU: the memory is not registered")
	case r.flush && s.noFlush() != nil:
		return nil, s.noFlush()
	}
	return r, nil
}

// Steps returns the attempts to register memory of a GPU. Any goroutine may call Steps. It blocks
// during a registration.
func (s *QPGroup) Steps(m *device.Memory, target bool) []gdr.Step { return s.fabric.steps(m, target) }

func (f *Fabric) steps(m *device.Memory, target bool) []gdr.Step {
	f.mu.Lock()
	r := f.memories[purpose{m, target}]
	f.mu.Unlock()
	if r == nil {
		return nil
	}
	r.making.Lock()
	defer r.making.Unlock()
	var steps []gdr.Step
	for _, name := range slices.Sorted(maps.Keys(r.steps)) {
		steps = append(steps, r.steps[name]...)
	}
	return steps
}
