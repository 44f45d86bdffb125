package relay

import (
	"errors"
	"fmt"
	"os"

	"github.com/dustin/go-humanize"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/wire"
)

// memory is exported memory of a client, or memory that the relay made for the client: host memory,
// and memory on a server GPU. The mapping, which pins the client's GPU memory, stays until the
// memory is retired and unused.
type memory struct {
	session *session
	number  uint32
	kind    uint32 // wire.Memory*
	lane    *lane
	mapped  *device.Memory
	parts   []device.Part // for relays that write into it
	offset  uint64        // of the exported range in the mapping
	length  uint64
	access  uint32
	users   int
	served  int   // of these, operations of remote programs on regions
	takes   quota // of the relay's limits
	state   memoryState
	// gone is called when the memory has been freed, or is used only by operations of its client;
	// nil without a waiter.
	gone func()
	// registrars are the receivers that announced this memory.
	registrars map[*receiver]bool
	// regions are the exposed parts of the memory.
	regions map[*exposedRegion]bool
	// staged: the memory is on a server GPU, and the client copies to and from it.
	staged *clientStaging
	// inPlace is the exported range for registration with NICs, nil without a DMA-BUF; notInPlace
	// is the reason for its absence.
	inPlace    *device.Memory
	notInPlace string
	// kept is the reason that freed memory is not given back: NICs still have it registered.
	kept error
}

func (m *memory) place(offset uint64) device.Place { return m.mapped.At(m.offset + offset) }

// part is an allocation of a later export.
type part struct {
	device.Part
	offset uint64
}

// ofPart is the quota of an allocation after the first of a memory.
var ofPart = quota{descriptors: 1}

// exportPart keeps an allocation for the export that will come. The export returns errors.
func (s *session) exportPart(m *wire.ExportPart, fds []int) {
	err := s.refusedParts
	switch {
	case err != nil:
	case len(fds) == 0 && s.port.Hanging():
		err = errHanging
	case len(fds) != 1:
		err = wire.Errorf(wire.StatusMalformed, "an allocation with %d descriptors; it takes one", len(fds))
	case len(s.parts) >= wire.MaxParts:
		err = wire.Errorf(wire.StatusLimit,
			"an export of more than %d allocations, which is the limit; export a shorter range, or several", wire.MaxParts)
	default:
		err = s.relay.reserve(ofPart)
	}
	if err != nil {
		s.port.CloseAll(fds)
		s.dropParts()
		s.refusedParts = err
		return
	}
	s.parts = append(s.parts, part{device.Part{FD: fds[0], Bytes: m.Bytes}, m.Offset})
}

// dropParts forgets the allocations of an export that does not come.
func (s *session) dropParts() {
	s.closeParts(s.parts)
	s.parts, s.refusedParts = nil, nil
}

func (s *session) closeParts(parts []part) {
	var fds []int
	for _, p := range parts {
		fds = append(fds, p.FD)
		s.relay.release(ofPart)
	}
	s.port.CloseAll(fds)
}

// allocation names the allocation at place i of a range, as the object of an error.
func allocation(i, n int) string { return fmt.Sprintf("allocation %d of %d", i+1, n) }

// sideBySide returns an error unless the allocations are a single range of so many bytes.
func sideBySide(parts []part, bytes uint64) error {
	var sum uint64
	for i, p := range parts {
		switch {
		case p.offset < sum:
			return wire.Errorf(wire.StatusOutOfRange,
				"allocation %d of %d begins at byte %d of the range, and overlaps what is before it, which ends at %d", i+1,
				len(parts), p.offset, sum).On(allocation(i, len(parts)))
		case p.offset > sum:
			return wire.Errorf(wire.StatusOutOfRange,
				"allocation %d of %d begins at byte %d of the range, which leaves a hole behind byte %d", i+1, len(parts),
				p.offset, sum).On(allocation(i, len(parts)))
		case p.Bytes == 0 || p.Bytes > bytes-sum:
			return wire.Errorf(wire.StatusOutOfRange,
				"allocation %d of %d has %d bytes, in a range of %d of which %d are taken", i+1, len(parts), p.Bytes, bytes,
				sum).On(allocation(i, len(parts)))
		}
		sum += p.Bytes
	}
	if sum != bytes {
		return wire.Errorf(wire.StatusOutOfRange, "%d allocations have %d bytes together, in a range of %d", len(parts),
			sum, bytes)
	}
	return nil
}

var errHanging = wire.Errorf(wire.StatusLimit,
	"no descriptor is taken for now: files that came before this one hang when they are closed, as those of a FUSE "+
		"file system can")

func (s *session) export(m *wire.Export, sequence uint32, fds []int) {
	var err error
	var parts []part
	switch {
	case m.Parts > 0:
		parts, err = s.parts, s.refusedParts
		s.parts, s.refusedParts = nil, nil
		if err == nil && (len(fds) != 0 || uint32(len(parts)) != m.Parts) {
			err = wire.Errorf(wire.StatusMalformed,
				"an export of %d allocations, of which %d came before it, with %d descriptors of its own", m.Parts, len(parts),
				len(fds))
		}
	case len(fds) == 0 && s.port.Hanging():
		err = errHanging
	case len(fds) != 1:
		err = wire.Errorf(wire.StatusMalformed, "an export with %d descriptors; it takes one", len(fds))
	default:
		if err = s.relay.reserve(ofPart); err == nil {
			parts, fds = []part{{device.Part{FD: fds[0], Bytes: m.Bytes}, 0}}, nil
		}
	}
	s.port.CloseAll(fds)
	refuse := func(err error) {
		s.closeParts(parts)
		s.answer(sequence, err)
	}
	if err == nil {
		err = sideBySide(parts, m.Bytes)
	}
	if err == nil && (m.Length == 0 || m.Offset > m.Bytes || m.Length > m.Bytes-m.Offset) {
		err = wire.Errorf(wire.StatusOutOfRange, "a range of %d bytes at offset %d of an allocation of %d", m.Length,
			m.Offset, m.Bytes)
	}
	one := quota{memories: 1}
	if err == nil {
		err = s.another(m.Access, one)
	}
	if err != nil {
		refuse(err)
		return
	}
	memory := &memory{
		session: s, number: s.number(), state: memoryExported, offset: m.Offset, length: m.Length, access: m.Access,
		takes: quota{memories: 1, descriptors: len(parts)}, registrars: map[*receiver]bool{},
		regions: map[*exposedRegion]bool{},
	}
	if len(parts) > 1 {
		memory.kind = wire.MemoryParts
	}
	for _, p := range parts {
		memory.parts = append(memory.parts, p.Part)
	}
	s.bring(sequence, func() error { return memory.open(m.GPU) }, func(err error) {
		if err == nil && s.ended != nil {
			memory.free()
			return
		}
		if err != nil {
			s.relay.release(one)
			refuse(err)
			return
		}
		s.memories[memory.number] = memory
		answer := &wire.Exported{Memory: memory.number}
		if memory.wanted() {
			answer.Wants = wire.WantsDMABuf
		}
		s.reply(answer, sequence)
	})
}

// open checks the descriptors and maps the memory.
func (m *memory) open(gpu wire.UUID) error {
	r := m.session.relay
	lane, err := r.laneOf(gpu)
	if err != nil {
		return err
	}
	if err := lane.open(); err != nil {
		return err
	}
	d := lane.device.Driver
	for _, p := range m.parts {
		if err := checkForeign(p.FD, d.Simulated()); err != nil {
			return err
		}
	}
	if len(m.parts) > 1 {
		granule, err := d.MemGranularity(lane.device.Ordinal)
		if err != nil {
			return err
		}
		for i, p := range m.parts {
			if p.Bytes%granule != 0 {
				return wire.Errorf(wire.StatusOutOfRange, "allocation %d of %d has %d bytes; on %s it has to be a multiple of %d",
					i+1, len(m.parts), p.Bytes, gpu.GPU(), granule).On(allocation(i, len(m.parts)))
			}
		}
	}
	err = lane.device.On(func() error {
		var err error
		m.mapped, err = device.ImportParts(d, m.parts, cuda.Access{Device: lane.device.Ordinal, Write: true})
		return err
	})
	if errors.Is(err, device.ErrSeveralDevices) {
		return wire.Errorf(wire.StatusWrongGPU, "%w", err)
	}
	if err != nil {
		return wire.Errorf(wire.StatusBadDescriptor,
			"%w; export a CUDA VMM allocation (cuMemCreate with a POSIX file descriptor handle) of exactly this size", err)
	}
	if m.mapped.On != lane.device.Ordinal {
		actual, err := d.DeviceUUID(m.mapped.On)
		if err != nil {
			actual = "another GPU"
		}
		if closed := m.mapped.Close(); closed != nil {
			logrus.WithError(closed).Warn("unmapping refused memory")
		}
		return wire.Errorf(wire.StatusWrongGPU,
			"the memory is on %s, and was exported as memory of %s, whose lane this container has", actual, gpu.GPU()).On(actual)
	}
	m.lane = lane
	if len(m.parts) == 1 && m.access&wire.AccessReceive != 0 {
		if err := m.mapped.MapStores(lane.device, m.parts[0].FD, m.offset, m.length); err != nil {
			logrus.WithError(err).Debugf("no stores into %d bytes of memory on %s", m.length, gpu.GPU())
		}
	}
	return nil
}

// nvidiaMajor is the character devices' of the NVIDIA driver (195, assigned in the kernel's
// Documentation/admin-guide/devices.txt); an exported VMM allocation is such a file.
const nvidiaMajor = 195

// notExported returns the error of a descriptor that is no GPU memory.
func notExported(cause error, remedy string) error {
	return wire.Errorf(wire.StatusBadDescriptor, "%w", &fault.Error{Code: fault.NotExported,
		Operation: "import the exported descriptor", Cause: cause, Remedy: remedy})
}

// checkForeign checks a client's descriptor before any other call: a client can make calls on a
// file hang, for instance in a FUSE file system.
func checkForeign(fd int, simulated bool) error {
	var s unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &s); err != nil {
		return notExported(os.NewSyscallError("statx", err), "")
	}
	if !simulated {
		if s.Mode&unix.S_IFMT != unix.S_IFCHR || s.Rdev_major != nvidiaMajor {
			return notExported(fmt.Errorf("it is not of the NVIDIA driver (file mode %#o, device %d:%d)", s.Mode, s.Rdev_major,
				s.Rdev_minor),
				"export a CUDA VMM allocation with a POSIX file descriptor handle")
		}
		return nil
	}
	const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals&sealed != sealed {
		return notExported(errors.New("it is not simulated GPU memory (a sealed memfd)"), "")
	}
	return nil
}

// exportIPC takes memory of cudaMalloc. The handle does not prove that the memory is the client's,
// and copies after the client's free are undefined: so the configuration must permit it, and a
// remote relay never gets the memory.
func (s *session) exportIPC(m *wire.ExportIPC, sequence uint32) {
	const instead = "allocate it by cuMemCreate (in PyTorch: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True), or " +
		"use host memory"
	if !s.relay.config.CUDAIPC {
		s.answer(sequence, wire.Errorf(wire.StatusNotPermitted,
			"memory of cudaMalloc is not taken by its IPC handle, because relay.cuda_ipc in config.toml does not "+
				"say \"allow\"; %s", instead).On("relay.cuda_ipc"))
		return
	}
	takes := quota{memories: 1}
	if err := s.another(m.Access, takes); err != nil {
		s.answer(sequence, err)
		return
	}
	memory := &memory{
		session: s, number: s.number(), kind: wire.MemoryIPC, state: memoryExported, offset: m.Offset, length: m.Length,
		access: m.Access,
		takes:  takes, registrars: map[*receiver]bool{}, regions: map[*exposedRegion]bool{},
	}
	s.bring(sequence, func() error {
		lane, err := s.relay.laneOf(m.GPU)
		if err == nil {
			err = lane.open()
		}
		if err != nil {
			return err
		}
		if memory.mapped, err = lane.device.OpenIPC(m.Handle); err != nil {
			return wire.Errorf(wire.StatusBadDescriptor,
				"the driver does not open this memory of cudaMalloc for the relay (%w); %s", err, instead)
		}
		switch mapped := memory.mapped; {
		case mapped.On != lane.device.Ordinal:
			err = wire.Errorf(wire.StatusWrongGPU, "the memory is not on %s, whose lane it was exported for",
				m.GPU.GPU()).On(m.GPU.GPU())
		case m.Length == 0 || m.Offset > mapped.Bytes || m.Length > mapped.Bytes-m.Offset:
			err = wire.Errorf(wire.StatusOutOfRange, "a range of %d bytes at offset %d of an allocation of %d", m.Length,
				m.Offset, mapped.Bytes)
		default:
			memory.lane = lane
			return nil
		}
		if closed := memory.mapped.Close(); closed != nil {
			logrus.WithError(closed).Warn("unmapping refused memory")
		}
		return err
	}, func(err error) {
		if err == nil && s.ended != nil {
			memory.free()
			return
		}
		if err != nil {
			s.relay.release(takes)
			s.answer(sequence, err)
			return
		}
		s.memories[memory.number] = memory
		answer := &wire.Exported{Memory: memory.number}
		if memory.wanted() { // a DMA-BUF is of any range that a client owns
			answer.Wants = wire.WantsDMABuf
		}
		s.reply(answer, sequence)
	})
}

// another counts a further memory, or returns an error at the limit.
func (s *session) another(access uint32, takes quota) error {
	const all = wire.AccessSend | wire.AccessReceive
	switch {
	case len(s.memories) >= wire.MaxMemories:
		return wire.Errorf(wire.StatusLimit, "%d memories are exported, which is the limit", len(s.memories))
	case access == 0 || access&^all != 0:
		return wire.Errorf(wire.StatusMalformed, "memory for access %#x", access)
	}
	return s.relay.reserve(takes)
}

// hostMemory makes host memory for the client. The relay makes the memory, because a client can
// remove pages of its file, or make accesses hang.
func (s *session) hostMemory(m *wire.HostMemory, sequence uint32) {
	if limit := s.relay.limits.ClientHostMemory; m.Bytes > limit || s.host > limit-m.Bytes {
		s.answer(sequence, limitMet("relay.limits.client_host_memory",
			"%s of host memory are asked for, and this process has %s, whose limit is %s",
			humanize.IBytes(m.Bytes), humanize.IBytes(s.host), humanize.IBytes(limit)))
		return
	}
	if m.Bytes == 0 {
		s.answer(sequence, wire.Errorf(wire.StatusOutOfRange, "host memory of no bytes"))
		return
	}
	page := uint64(os.Getpagesize())
	pages := (m.Bytes + page - 1) / page * page
	takes := quota{memories: 1, descriptors: 2, host: pages, own: pages}
	if err := s.another(m.Access, takes); err != nil {
		s.answer(sequence, err)
		return
	}
	memory := &memory{
		session: s, number: s.number(), kind: wire.MemoryHost, state: memoryExported, length: m.Bytes, access: m.Access,
		takes: takes, registrars: map[*receiver]bool{}, regions: map[*exposedRegion]bool{},
	}
	if m.Populates == 1 { // the client allocates the pages
		memory.state = memoryEmpty
	}
	s.provide(memory, sequence, func() error { return memory.make(m.GPU) }, func() wire.Message {
		return &wire.HostMemoryMade{Memory: memory.number, Bytes: memory.mapped.Bytes}
	})
}

// provide makes the counted memory for the client, and answers with the descriptor.
func (s *session) provide(m *memory, sequence uint32, work func() error, made func() wire.Message) {
	s.host += m.takes.host
	s.staging += m.takes.staging
	s.bring(sequence, work, func(err error) {
		if err != nil {
			s.host -= m.takes.host
			s.staging -= m.takes.staging
			s.relay.release(m.takes)
			s.answer(sequence, err)
			return
		}
		answer := made()
		if s.ended != nil {
			m.free()
			return
		}
		s.memories[m.number] = m
		s.reply(answer, sequence, m.parts[0].FD)
	})
}

// make allocates host memory, with a context on the lane's GPU.
func (m *memory) make(gpu wire.UUID) error {
	lane, err := m.session.relay.laneOf(gpu)
	if err != nil {
		return err
	}
	if err := lane.open(); err != nil {
		return err
	}
	if err := m.session.relay.claims.takeHost(m.takes.host); err != nil {
		return err
	}
	if m.mapped, err = device.CreateEmptyHost("peerlane-host", m.length); err != nil {
		m.session.relay.claims.releaseHost(m.takes.host)
		return err
	}
	m.lane = lane
	if m.state == memoryExported {
		err = m.pin()
	}
	var fd int
	if err == nil {
		fd, err = m.mapped.Export()
	}
	if err != nil {
		err = errors.Join(err, m.mapped.Close())
		m.session.relay.claims.releaseHost(m.takes.host)
		return err
	}
	m.parts = []device.Part{{FD: fd, Bytes: m.mapped.Bytes}}
	return nil
}

// pin allocates missing pages of host memory, and registers the memory with CUDA.
func (m *memory) pin() error {
	if err := m.mapped.Populate(); err != nil {
		return err
	}
	if err := m.mapped.Pin(m.lane.device); err != nil {
		return wire.Errorf(wire.StatusCUDA, "%w", err)
	}
	return nil
}

// populated pins host memory after the client has allocated the pages. If pinning fails, the memory
// stays unchanged until the client unexports it.
func (s *session) populated(number, sequence uint32) {
	m := s.memories[number]
	switch {
	case m == nil || m.state.ended():
		s.answer(sequence, wire.Errorf(wire.StatusUnknownMemory, "memory %d is not exported", number))
		return
	case m.state != memoryEmpty:
		s.answer(sequence, wire.Errorf(wire.StatusMalformed, "memory %d does not wait for the pages of its client", number))
		return
	}
	m.apply(memoryPopulate, func() {
		m.users++
		s.block(sequence, m.pin, func(err error) {
			event := memoryPinned
			if err != nil {
				event = memoryPinFailed
			}
			m.apply(event, nil)
			m.release()
			s.answer(sequence, err)
		})
	})
}

// unexport answers when the memory is gone, or, if the client's operations are in flight, when no
// operation of a remote program remains.
func (s *session) unexport(number, sequence uint32) {
	m := s.memories[number]
	if m == nil || m.state.ended() {
		s.answer(sequence, wire.Errorf(wire.StatusUnknownMemory, "memory %d is not exported", number))
		return
	}
	m.gone = func() { s.answer(sequence, m.kept) }
	m.retire()
}

// retire prevents new operations on the memory.
func (m *memory) retire() { m.apply(memoryRetire, nil) }

func (m *memory) release() {
	m.users--
	m.settle()
}

// settle reports the users of the memory.
func (m *memory) settle() {
	switch {
	case m.users == 0:
		m.apply(memoryIdle, nil)
	case m.served == 0:
		m.apply(memoryLocal, nil)
	}
}

// apply applies an event and runs the action. pin begins the pinning of the pages.
func (m *memory) apply(e memoryEvent, pin func()) {
	switch memoryTable.Must(&m.state, e) {
	case memoryPin:
		pin()
	case memoryRevoke:
		for o := range m.regions {
			o.revoke()
		}
		m.settle()
	case memoryAnswer:
		m.answer()
	case memoryFree:
		delete(m.session.memories, m.number)
		for k := range m.registrars {
			k.forget(m)
		}
		m.free()
		m.session.settle()
	}
}

// answer replies to the request that waits for the memory's end.
func (m *memory) answer() {
	if gone := m.gone; gone != nil {
		m.gone = nil
		gone()
	}
}

// takingBackAtOnce limits the threads that wait for the deregistration of memory from NICs: clients
// control the number of memories.
const takingBackAtOnce = 16

func (m *memory) free() {
	if m.session.relay.dying != nil {
		// This relay ends, and the client may be reading received bytes, as after a relay's kill.
		m.mapped.Leave()
	}
	fabric := m.session.relay.fabric
	var known error // to NICs still
	free := func() error {
		if fabric != nil && (m.kind == wire.MemoryHost || m.staged != nil) {
			known = fabric.Forget(m.mapped)
		}
		var err error
		if m.inPlace != nil { // before the unmap of its memory
			known = fabric.Forget(m.inPlace)
			err = m.inPlace.Close()
		}
		for _, p := range m.parts {
			unix.Close(p.FD)
		}
		return errors.Join(err, m.mapped.Close())
	}
	s := m.session
	after := func(err error) {
		if known != nil { // only the end of this process deregisters the memory
			m.kept = wire.Errorf(wire.StatusInternal, "memory of client process %d: %w", s.pid, known)
			s.relay.wear(m.kept)
		}
		if err != nil {
			s.relay.wear(fmt.Errorf("unmapping memory of client process %d: %w", s.pid, err))
		}
		s.relay.release(m.takes)
		s.host -= m.takes.host
		s.staging -= m.takes.staging
		if m.inPlace != nil {
			m.lane.inPlaceBytes -= m.length
		}
		if m.staged != nil {
			m.staged.on.bytes -= m.mapped.Bytes
		}
		m.answer()
	}
	if m.kind != wire.MemoryHost && m.staged == nil && m.inPlace == nil {
		after(free())
		return
	}
	// Freeing a GiB of pages takes a tenth of a second, and the pages count until then;
	// deregistration from NICs is slow, too. The supervisor gets the end of staging memory.
	if m.inPlace != nil { // the client owns the memory, and waits until no NIC can write it
		s.bringing++
	}
	go func() {
		if m.inPlace != nil {
			s.relay.takingBack <- struct{}{}
		}
		err := free()
		if m.inPlace != nil {
			<-s.relay.takingBack
		}
		if m.staged != nil {
			m.staged.release()
		}
		if m.kind == wire.MemoryHost {
			s.relay.claims.releaseHost(m.takes.host)
		}
		s.relay.loop.Do(func() {
			after(err)
			if m.inPlace != nil {
				s.bringing--
				s.settle()
			}
		})
	}()
}
