package packet

import (
	"encoding/binary"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/wire"
)

// Two relays of a host can exchange short messages through shared memory instead of datagrams: a
// busy relay makes no system call for it. One side makes the memory and seals the size; for both it
// is hostile: a side keeps a private position, copies a message before parsing, and ends the
// connection if the remote position is impossible.
//
// A direction has a page of positions and then slots. A message too long for a slot, or with
// descriptors, goes over the socket, and an empty slot marks its place in the order. Behind both
// there can be windows, for bytes that go with messages: messages assign the windows.
const (
	sharedSlots = 128
	slotBytes   = 128
	slotHeader  = 4 // the message's length
	slotsAt     = 4096
	halfBytes   = slotsAt + sharedSlots*slotBytes
	sharedBytes = 2 * halfBytes

	// Windows is the number of windows, of WindowBytes bytes.
	Windows     = 8
	WindowBytes = 4 << 10
)

// shared is the view of one side.
type shared struct {
	memory  []byte
	out, in half
	windows []byte
	// reading says that the other side writes here.
	reading bool
	// due says that the next message comes over the socket; told that the other side
	// has been told so of ours.
	due, told bool
}

// half is one direction. Tail is the writer's, head and sleeps are the reader's.
type half struct {
	tail, head *uint64
	sleeps     *uint32
	slots      []byte
	at         uint64 // our own position
}

var errShared = wire.Errorf(wire.StatusMalformed, "the memory that is shared with the other relay makes no sense")

func newShared(memory []byte, maker bool) *shared {
	view := func(m []byte) half {
		return half{
			tail: (*uint64)(
				unsafe.Pointer(&m[0]),
			), head: (*uint64)(unsafe.Pointer(&m[64])), sleeps: (*uint32)(unsafe.Pointer(&m[128])),
			slots: m[slotsAt:],
		}
	}
	s := &shared{
		memory:  memory,
		out:     view(memory[:halfBytes]),
		in:      view(memory[halfBytes:sharedBytes]),
		windows: memory[sharedBytes:],
	}
	if !maker {
		s.out, s.in = s.in, s.out
	}
	return s
}

// SharedBytes is how much memory two sides share, with windows or without.
func SharedBytes(windows bool) int64 {
	if windows {
		return sharedBytes + Windows*WindowBytes
	}
	return sharedBytes
}

// makeShared makes the memory, and a descriptor for the remote side.
func makeShared(size int64) (*shared, int, error) {
	fd, err := unix.MemfdCreate("peerlane-peer", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, -1, os.NewSyscallError("memfd_create", err)
	}
	err = os.NewSyscallError("ftruncate", unix.Ftruncate(fd, size))
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
		err = os.NewSyscallError("F_ADD_SEALS", err)
	}
	var s *shared
	if err == nil {
		s, err = mapShared(fd, size, true)
	}
	if err != nil {
		unix.Close(fd)
		return nil, -1, err
	}
	return s, fd, nil
}

// openShared maps memory of the remote side.
func openShared(fd int, size int64) (*shared, error) {
	// A descriptor of a different kind gets no further call: that could hang.
	const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	if seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err != nil || seals&sealed != sealed {
		return nil, wire.Errorf(wire.StatusBadDescriptor, "the other relay's memory is not sealed")
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return nil, os.NewSyscallError("fstat", err)
	}
	if stat.Size != size {
		return nil, wire.Errorf(wire.StatusBadDescriptor, "the other relay's memory has %d bytes, not %d", stat.Size, size)
	}
	return mapShared(fd, size, false)
}

func mapShared(fd int, size int64, maker bool) (*shared, error) {
	m, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	return newShared(m, maker), nil
}

// put writes a message, none for an empty slot. It reports false where there is no
// room.
func (h *half) put(data []byte) (bool, error) {
	switch used := h.at - atomic.LoadUint64(h.head); {
	case used > sharedSlots:
		return false, errShared
	case used == sharedSlots:
		return false, nil
	}
	slot := h.slots[h.at%sharedSlots*slotBytes:][:slotBytes]
	binary.LittleEndian.PutUint32(slot, uint32(len(data)))
	copy(slot[slotHeader:], data)
	h.at++
	_ = atomic.SwapUint64(h.tail, h.at) // before it is looked whether the reader sleeps, see Port.Arm
	return true, nil
}

// take copies the next message out, if there is one.
func (h *half) take(to *[slotBytes]byte) (data []byte, ok bool, err error) {
	switch waiting := atomic.LoadUint64(h.tail) - h.at; {
	case waiting > sharedSlots:
		return nil, false, errShared
	case waiting == 0:
		return nil, false, nil
	}
	copy(to[:], h.slots[h.at%sharedSlots*slotBytes:])
	n := binary.LittleEndian.Uint32(to[:])
	if n > slotBytes-slotHeader {
		return nil, false, errShared
	}
	h.at++
	atomic.StoreUint64(h.head, h.at)
	return to[slotHeader : slotHeader+n], true, nil
}

// Share makes memory for messages to the remote side, which must call TakeShared with the same
// number of windows. Without the memory only the socket is used.
func (p *Port) Share(windows bool) error {
	s, fd, err := makeShared(SharedBytes(windows))
	if err != nil {
		return err
	}
	p.Send(&wire.PeerShare{}, 0, fd)
	unix.Close(fd)
	if p.closed() {
		return unix.Munmap(s.memory)
	}
	p.becomeShared(s)
	return nil
}

// TakeShared permits the remote side to Share.
func (p *Port) TakeShared(windows bool) { p.takesShared, p.takesBytes = true, SharedBytes(windows) }

// Window returns the memory of a shared window, or nil without shared memory. The remote side can
// write the memory at any time. It is gone when the Port is closed.
func (p *Port) Window(number uint64) []byte {
	if p.shared == nil || number >= uint64(len(p.shared.windows)/WindowBytes) {
		return nil
	}
	at := number * WindowBytes
	return p.shared.windows[at : at+WindowBytes : at+WindowBytes]
}

// takeShared maps the other side's memory.
func (p *Port) takeShared(fds []int) error {
	if len(fds) != 1 {
		return wire.Errorf(wire.StatusMalformed, "memory to share without its descriptor")
	}
	s, err := openShared(fds[0], p.takesBytes)
	if err != nil {
		return err
	}
	p.takesShared = false
	p.Send(&wire.PeerShared{}, 0) // the last that does not go by the memory's order
	if p.closed() {
		return unix.Munmap(s.memory)
	}
	s.reading = true
	p.becomeShared(s)
	return nil
}

// becomeShared sends later messages in the memory's order.
func (p *Port) becomeShared(s *shared) {
	for i := range p.outbox {
		p.outbox[i].plain = true
	}
	p.shared = s
}

// writeShared is write where memory is shared; EAGAIN says that there is no room.
func (p *Port) writeShared(data []byte, fds []int) error {
	s := p.shared
	if len(fds) == 0 && len(data) <= slotBytes-slotHeader {
		return p.put(data)
	}
	if !s.told {
		if err := p.put(nil); err != nil {
			return err
		}
	}
	err := p.sendmsg(data, fds)
	s.told = err == unix.EAGAIN
	return err
}

func (p *Port) put(data []byte) error {
	out := &p.shared.out
	ok, err := out.put(data)
	if err != nil {
		return err
	}
	if !ok {
		return unix.EAGAIN
	}
	if atomic.LoadUint32(out.sleeps) != 0 && atomic.SwapUint32(out.sleeps, 0) != 0 {
		switch err := p.sendmsg(bell, nil); err {
		case nil, unix.EAGAIN, unix.EPIPE, unix.ECONNRESET, unix.ECONNREFUSED, unix.ENOTCONN:
			// Full or closed: the reader wakes by itself.
		default:
			atomic.StoreUint32(out.sleeps, 1)
			return err
		}
	}
	return nil
}

// bell wakes a reader that sleeps.
var bell = wire.Encode(&wire.PeerBell{}, 0)

// readShared delivers messages from the memory, up to a limit and up to a message over the socket.
// It reports whether there was any.
func (p *Port) readShared(most int) bool {
	var buffer [slotBytes]byte
	any := false
	for ; most > 0 && !p.closed() && p.shared != nil && p.shared.reading && !p.shared.due; most-- {
		data, ok, err := p.shared.in.take(&buffer)
		if err == nil && !ok {
			break
		}
		any = true
		if err == nil && len(data) == 0 {
			p.shared.due = true
			break
		}
		var m wire.Message
		var sequence uint32
		if err == nil {
			m, sequence, err = wire.Decode(data)
		}
		switch {
		case err != nil:
			p.Send(wire.NewFailure(err), 0) // the other side hears why
			p.shared.reading = false
			p.end(err)
		case !p.leaving:
			p.received(m, sequence, nil)
		}
	}
	return any
}

// turn waits for the turn of a message that came over the socket: earlier messages of the memory
// are delivered first.
func (p *Port) turn() error {
	p.readShared(sharedSlots)
	if p.closed() {
		return nil
	}
	if !p.shared.due {
		return errShared
	}
	p.shared.due = false
	return nil
}

// ofSharing handles the messages of the socket about shared memory. It returns true if the message
// has no further content; else the message has its turn now.
func (p *Port) ofSharing(m wire.Message, fds []int) (bool, error) {
	switch m.(type) {
	case *wire.PeerShare:
		if p.takesShared {
			return true, p.takeShared(fds)
		}
	case *wire.PeerShared:
		if p.shared != nil && !p.shared.reading {
			p.shared.reading = true
			return true, nil
		}
	case *wire.PeerBell:
		return true, nil
	}
	if p.shared == nil || !p.shared.reading {
		return false, nil
	}
	return false, p.turn()
}
