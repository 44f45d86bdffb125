package relay

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// Client copy: a client has memory on a server GPU of its lane, copies to and from the memory on
// its own stream, and hands the memory over by a timeline. On route staged no relay copies such
// memory: NICs read and write it as they do slots.

// serverUsage counts the memory of a lane's server GPU for copying clients. The event loop owns
// serverUsage.
type serverUsage struct {
	gpu     launch.GPU
	id      wire.UUID
	bytes   uint64 // in use by clients
	in, out uint64 // received and sent, without the clients' own copies
}

// clientStaging is memory on a server GPU for copies of a client.
type clientStaging struct {
	on      *serverUsage
	release func() // releases the claim on the host's account
}

// memoryRegion distinguishes memories from slots in the numbers of regions.
const memoryRegion = 1 << 30

// region returns the number of the memory for NICs.
func (m *memory) region() uint32 { return m.number | memoryRegion }

// stagingGranule is the unit of staging memory: drivers make no smaller allocations.
const stagingGranule = 2 << 20

// stagingMemory allocates memory on a server GPU for the client.
func (s *session) stagingMemory(m *wire.Staging, sequence uint32) {
	if m.Bytes == 0 {
		s.answer(sequence, wire.Errorf(wire.StatusOutOfRange, "staging memory of no bytes"))
		return
	}
	if limit := s.relay.limits.ClientStaging; m.Bytes > limit || s.staging > limit-m.Bytes {
		s.answer(sequence, limitMet("relay.limits.client_staging",
			"%s of staging memory are asked for, and this process has %s, whose limit is %s",
			humanize.IBytes(m.Bytes), humanize.IBytes(s.staging), humanize.IBytes(limit)))
		return
	}
	takes := quota{memories: 1, descriptors: 1, staging: (m.Bytes + stagingGranule - 1) / stagingGranule * stagingGranule}
	if err := s.another(m.Access, takes); err != nil {
		s.answer(sequence, err)
		return
	}
	memory := &memory{session: s, number: s.number(), state: memoryExported, access: m.Access, takes: takes,
		registrars: map[*receiver]bool{}, regions: map[*exposedRegion]bool{}}
	s.provide(memory, sequence, func() error { return memory.stage(m.GPU) }, func() wire.Message {
		on := memory.staged.on
		on.bytes += memory.mapped.Bytes
		s.relay.endIfWrong() // of later changes
		return &wire.StagingMade{Memory: memory.number, Bytes: memory.mapped.Bytes, Server: on.id,
			Index: uint32(on.gpu.Index)}
	})
}

// stage allocates the memory on the server GPU of a lane with the least memory for clients, or on
// the next GPU if that GPU has no room.
func (m *memory) stage(gpu wire.UUID) error {
	r := m.session.relay
	l, err := r.laneOf(gpu)
	if err != nil {
		return err
	}
	var servers []*serverUsage
	var copies bool
	if !r.loop.Call(func() {
		copies, servers = l.copies, l.forClients()
		slices.SortStableFunc(servers, func(a, b *serverUsage) int { return cmp.Compare(a.bytes, b.bytes) })
	}) {
		return errEnding
	}
	switch {
	case !l.spec.Relay || len(servers) == 0:
		return wire.Errorf(wire.StatusNoStaging,
			"the lane of GPU %s has no server GPU to stage on (role %s): what is sent is read where it lies, and "+
				"needs no copy", l.spec.GPU.BusID, l.spec.Role).On(l.spec.GPU.BusID)
	case !copies:
		return wire.Errorf(wire.StatusNotPermitted,
			"%s was given the lane of GPU %d and not its server GPUs, which a client has to see that copies itself; start "+
				"it with --device peerlane.dev/gpu=%[2]d, or let the relay copy",
			r.name(), l.spec.GPU.Index).On(fmt.Sprintf("peerlane.dev/gpu=%d", l.spec.GPU.Index))
	}
	if err := l.open(); err != nil {
		return err
	}
	config, err := l.selfTestResult()
	if err != nil {
		return err
	}
	var refused []string
	for _, on := range servers {
		why := l.unfit(on.gpu, config)
		if why == "" {
			err := m.makeOn(l, on, config.Admission)
			if err == nil {
				return nil
			}
			if !errors.Is(err, cuda.ErrOutOfMemory) && !errors.Is(err, errNotAdmitted) {
				return err
			}
			why = err.Error()
		}
		refused = append(refused, fmt.Sprintf("GPU %d (%s): %s", on.gpu.Index, on.gpu.BusID, why))
	}
	return wire.Errorf(wire.StatusNoStaging, "%w", &fault.Error{Code: fault.NoStaging,
		Operation: fmt.Sprintf("no server GPU of the lane of GPU %s can have %s of staging memory", l.spec.GPU.BusID,
			humanize.IBytes(m.takes.staging)),
		Cause: errors.New(strings.Join(refused, "; "))}).On(l.spec.GPU.BusID)
}

// forClients returns the usage counters of the lane's server GPUs.
func (l *lane) forClients() []*serverUsage {
	if l.serverUsage == nil {
		for _, g := range l.spec.Servers {
			l.serverUsage = append(l.serverUsage, &serverUsage{gpu: g})
		}
	}
	return slices.Clone(l.serverUsage)
}

func (m *memory) makeOn(l *lane, on *serverUsage, admission bool) (err error) {
	ordinal, id, err := l.server(on.gpu)
	if err != nil {
		return err
	}
	release := func() {}
	if admission {
		if release, err = l.claim(on.gpu, ordinal, 1, m.takes.staging); err != nil {
			return err
		}
	}
	defer func() {
		if err != nil {
			release()
		}
	}()
	mapped, err := l.create(ordinal, m.takes.staging)
	if err != nil {
		return err
	}
	fd, err := mapped.Export()
	if err != nil {
		return errors.Join(err, mapped.Close())
	}
	// The server's identity is unambiguous.
	if !l.relay.loop.Call(func() { on.id = id }) {
		return errors.Join(errEnding, mapped.Close(), unix.Close(fd))
	}
	m.lane, m.mapped, m.length = l, mapped, mapped.Bytes
	m.parts = []device.Part{{FD: fd, Bytes: mapped.Bytes}}
	m.staged = &clientStaging{on, release}
	return nil
}
