package relay

import (
	"os"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/wire"
)

// memory is what a client has exported. It stays mapped, and so pins the
// client's GPU memory, until it is retired and nothing uses it.
type memory struct {
	session *session
	number  uint32
	lane    *lane
	mapped  *device.Memory
	fd      int    // for relays that write into it
	offset  uint64 // of the exported range in the allocation
	length  uint64
	access  uint32
	users   int
	retired bool
	// known are the receivers whose peers have been told of this memory.
	known map[*receiver]bool
}

func (m *memory) ptr(offset uint64) cuda.Ptr { return m.mapped.Ptr + cuda.Ptr(m.offset+offset) }

func (s *session) export(m *wire.Export, sequence uint32, fds []int) {
	refuse := func(err error) {
		s.port.CloseAll(fds)
		s.answer(sequence, err)
	}
	const access = wire.AccessSend | wire.AccessReceive
	switch {
	case len(fds) == 0 && s.port.Clogged():
		refuse(wire.Errorf(wire.StatusLimit, "no descriptor is taken for now: files that came before this one hang when they are closed, as those of a FUSE file system can"))
		return
	case len(fds) != 1:
		refuse(wire.Errorf(wire.StatusMalformed, "an export with %d descriptors; it takes one", len(fds)))
		return
	case len(s.memories) >= wire.MaxMemories:
		refuse(wire.Errorf(wire.StatusLimit, "%d memories are exported, which is the limit", len(s.memories)))
		return
	case m.Access == 0 || m.Access&^access != 0:
		refuse(wire.Errorf(wire.StatusMalformed, "an export for access %#x", m.Access))
		return
	case m.Length == 0 || m.Offset > m.Bytes || m.Length > m.Bytes-m.Offset:
		refuse(wire.Errorf(wire.StatusOutOfRange, "a range of %d bytes at offset %d of an allocation of %d", m.Length, m.Offset, m.Bytes))
		return
	}
	if err := s.relay.reserve(ofMemory); err != nil {
		refuse(err)
		return
	}
	memory := &memory{
		session: s, number: s.number(), fd: fds[0],
		offset: m.Offset, length: m.Length, access: m.Access, known: map[*receiver]bool{},
	}
	s.block(sequence, func() error { return memory.open(m.GPU, m.Bytes) }, func(err error) {
		if err == nil && s.ended != nil {
			memory.free()
			return
		}
		if err != nil {
			s.relay.giveBack(ofMemory)
			refuse(err)
			return
		}
		s.memories[memory.number] = memory
		s.reply(&wire.Exported{Memory: memory.number}, sequence)
	})
}

// open checks the descriptor and maps the memory.
func (m *memory) open(gpu wire.UUID, bytes uint64) error {
	r := m.session.relay
	lane, err := r.laneOf(gpu)
	if err != nil {
		return err
	}
	if err := lane.open(); err != nil {
		return err
	}
	d := lane.device.Driver
	if err := checkForeign(m.fd, d.Simulated()); err != nil {
		return err
	}
	err = lane.device.On(func() error {
		var err error
		m.mapped, err = device.Import(d, m.fd, bytes, cuda.Access{Device: lane.device.Ordinal, Write: true})
		return err
	})
	if err != nil {
		return wire.Errorf(wire.StatusBadDescriptor, "%v; export a CUDA VMM allocation (cuMemCreate with a POSIX file descriptor handle) of exactly this size", err)
	}
	if m.mapped.On != lane.device.Ordinal {
		actual, err := d.DeviceUUID(m.mapped.On)
		if err != nil {
			actual = "another GPU"
		}
		if closed := m.mapped.Close(); closed != nil {
			logrus.WithError(closed).Warn("unmapping refused memory")
		}
		return wire.Errorf(wire.StatusWrongGPU, "the memory is on %s, and was exported as memory of %s, whose lane this container has", actual, gpu.GPU())
	}
	m.lane = lane
	return nil
}

// nvidiaMajor is the character devices' of the NVIDIA driver (195, assigned in
// the kernel's Documentation/admin-guide/devices.txt); an exported VMM
// allocation is one of them.
const nvidiaMajor = 195

// checkForeign looks at a descriptor that a stranger sent before anything else
// is done with it: calls on a file of a FUSE file system, say, can hang for as
// long as the stranger likes.
func checkForeign(fd int, simulated bool) error {
	var s unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &s); err != nil {
		return wire.Errorf(wire.StatusBadDescriptor, "the exported descriptor: %v", os.NewSyscallError("statx", err))
	}
	if !simulated {
		if s.Mode&unix.S_IFMT != unix.S_IFCHR || s.Rdev_major != nvidiaMajor {
			return wire.Errorf(wire.StatusBadDescriptor, "the exported descriptor is not of the NVIDIA driver (file mode %#o, device %d:%d); export a CUDA VMM allocation with a POSIX file descriptor handle",
				s.Mode, s.Rdev_major, s.Rdev_minor)
		}
		return nil
	}
	const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals&sealed != sealed {
		return wire.Errorf(wire.StatusBadDescriptor, "the exported descriptor is not simulated GPU memory (a sealed memfd)")
	}
	return nil
}

func (s *session) unexport(number uint32) error {
	m := s.memories[number]
	if m == nil || m.retired {
		return wire.Errorf(wire.StatusUnknownMemory, "memory %d is not exported", number)
	}
	m.retire()
	return nil
}

// retire lets no new operation use the memory.
func (m *memory) retire() {
	m.retired = true
	m.settle()
}

func (m *memory) release() {
	m.users--
	m.settle()
}

func (m *memory) settle() {
	if !m.retired || m.users > 0 || m.session.memories[m.number] != m {
		return
	}
	delete(m.session.memories, m.number)
	for r := range m.known {
		r.port.Send(&wire.PeerForget{Region: m.number}, 0)
	}
	m.free()
	m.session.settle()
}

func (m *memory) free() {
	m.session.relay.giveBack(ofMemory)
	unix.Close(m.fd)
	if err := m.mapped.Close(); err != nil {
		logrus.WithError(err).Warn("unmapping a client's memory failed; it stays pinned until this relay ends")
	}
}
