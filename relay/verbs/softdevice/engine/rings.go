package engine

import (
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/poll"
)

// A process shares memory with the engine: a ring of work requests to the engine, a ring of reports
// to the process, and a slot per queue pair. libibverbs/rings.c has the same layout, and the memory
// is the process's: the engine copies an entry before it looks at the entry.
const (
	ringEntries = 1024
	ringSlots   = 4096
	entryBytes  = 64
	ringsAt     = 4096
	sharedBytes = ringsAt + 2*ringEntries*entryBytes + ringSlots*entryBytes
	reportRead  = 32 // bytes of memory in a report
	dueBytes    = 4096
	dueLine     = 64
	devices     = 16
)

// submission is a work request of a process.
type submission struct {
	opcode, pair, serial, epoch, lkey, rkey uint32
	address, remote                         uint64
	length, immediate                       uint32
	_                                       [2]uint64
}

// Opcodes of work requests, as ibv_wr_opcode.
const (
	opWrite          = 0
	opWriteImmediate = 1
	opRead           = 4
)

// report is news for a process. For reportDone of a read, data has the bytes.
type report struct {
	kind, pair, slot, serial, immediate, length uint32
	data                                        [reportRead]byte
	_                                           uint64
}

const (
	reportDone    = 1 // a request of the process has succeeded
	reportRefused = 2 // the process has to do the request
	reportArrived = 3 // a write of another process, with an immediate
)

// slot is the state of a queue pair in shared memory. The process of the queue pair writes it.
type slot struct{ ready, posted, used, taken uint32 }

// Go's layout is C's.
const (
	_ = -(unsafe.Sizeof(submission{}) ^ entryBytes)
	_ = -(unsafe.Sizeof(report{}) ^ entryBytes)
)

// rings is the memory that a process shares.
type rings struct {
	memory                             []byte
	submitted, fetched, reported, read *uint64
	engineSleeps, waits                *uint32
	taken, told                        uint64 // the engine's own positions
	wakesProcess, wakesEngine          int
	// due are the times of the devices' ports, nanoseconds of CLOCK_MONOTONIC.
	due     []byte
	backlog []report // for which the ring had no room
}

// openRings maps the memory of a process. The descriptors are the caller's.
func openRings(fds []int, bytes uint64) (_ *rings, err error) {
	if len(fds) != 4 || bytes != sharedBytes {
		return nil, unix.EINVAL
	}
	if err := device.CheckHost(fds[0], bytes); err != nil {
		return nil, err
	}
	r := &rings{wakesProcess: -1, wakesEngine: -1}
	if r.memory, err = unix.Mmap(fds[0], 0, sharedBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	word := func(at int) *uint64 { return (*uint64)(unsafe.Pointer(&r.memory[at])) }
	half := func(at int) *uint32 { return (*uint32)(unsafe.Pointer(&r.memory[at])) }
	r.submitted, r.fetched, r.engineSleeps = word(0), word(64), half(128)
	r.reported, r.read, r.waits = word(192), word(256), half(320)
	var s unix.Stat_t
	if err = unix.Fstat(fds[3], &s); err == nil && s.Size < dueBytes {
		err = unix.EINVAL
	}
	if err == nil {
		r.due, err = unix.Mmap(fds[3], 0, dueBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err == nil {
		r.wakesProcess, err = unix.FcntlInt(uintptr(fds[1]), unix.F_DUPFD_CLOEXEC, 3)
	}
	if err == nil {
		r.wakesEngine, err = unix.FcntlInt(uintptr(fds[2]), unix.F_DUPFD_CLOEXEC, 3)
	}
	if err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

func (r *rings) close() {
	for _, m := range [][]byte{r.memory, r.due} {
		if m != nil {
			_ = unix.Munmap(m) // it is a mapping of this process
		}
	}
	for _, fd := range []int{r.wakesProcess, r.wakesEngine} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// fetch takes the next work request of the process.
func (r *rings) fetch(to *submission) bool {
	if atomic.LoadUint64(r.submitted) == r.taken {
		return false
	}
	*to = *(*submission)(unsafe.Pointer(&r.memory[ringsAt+r.taken%ringEntries*entryBytes]))
	r.taken++
	atomic.StoreUint64(r.fetched, r.taken)
	return true
}

// report tells the process, in order, as soon as the ring has room.
func (r *rings) report(one report) {
	r.backlog = append(r.backlog, one)
	r.flush()
}

// flush moves the backlog into the ring. It reports whether an entry went.
func (r *rings) flush() bool {
	n := 0
	for n < len(r.backlog) && r.told-atomic.LoadUint64(r.read) < ringEntries {
		*(*report)(unsafe.Pointer(&r.memory[ringsAt+ringEntries*entryBytes+r.told%ringEntries*entryBytes])) = r.backlog[n]
		r.told++
		n++
	}
	if n == 0 {
		return false
	}
	r.backlog = append(r.backlog[:0], r.backlog[n:]...)
	// Before the load: the process stores, and loads, in the other order.
	atomic.StoreUint64(r.reported, r.told)
	if atomic.LoadUint32(r.waits) != 0 && atomic.SwapUint32(r.waits, 0) != 0 {
		poll.Ring(r.wakesProcess)
	}
	return true
}

// slot returns the place of a queue pair.
func (r *rings) slot(i uint32) *slot {
	return (*slot)(unsafe.Pointer(&r.memory[ringsAt+2*ringEntries*entryBytes+uint64(i)*entryBytes]))
}

// dueOf returns when the port of a device is due.
func (r *rings) dueOf(node uint32) *uint64 {
	return (*uint64)(unsafe.Pointer(&r.due[dueLine*(node+1)]))
}

// pollRings executes the posted work requests of all processes, and retries completions for which a ring
// was full.
func (e *Engine) pollRings() bool {
	progress := false
	for c := range e.clients {
		r := c.rings
		if r == nil || c.gone {
			continue
		}
		if len(r.backlog) > 0 && r.flush() {
			progress = true
		}
		var one submission
		for n := 0; n < ringEntries && !c.gone && r.fetch(&one); n++ {
			progress = true
			c.work(&one)
		}
	}
	return progress
}

// nic is the part of the loop that does work requests. It implements poll.Poller.
type nic struct{ *Engine }

func (n nic) Poll() bool {
	progress := n.pollRings()
	progress = n.pollPaces() || progress
	progress = n.pollDoubtful() || progress
	if progress {
		n.awake.extend()
	}
	for _, m := range n.movers {
		m.pump()
	}
	return progress
}

// Busy reports whether something waits that no descriptor tells of.
func (n nic) Busy() bool {
	for c := range n.clients {
		if c.rings != nil && len(c.rings.backlog) > 0 {
			return true
		}
	}
	return n.waiting > 0 || len(n.doubtful) > 0
}

// Arm has the next work request of each process wake the loop.
func (n nic) Arm() bool {
	more := false
	for c := range n.clients {
		if r := c.rings; r != nil {
			atomic.StoreUint32(r.engineSleeps, 1)
			more = more || atomic.LoadUint64(r.submitted) != r.taken
		}
	}
	return more
}

// Disarm ends that.
func (n nic) Disarm() {
	for c := range n.clients {
		if c.rings != nil {
			atomic.StoreUint32(c.rings.engineSleeps, 0)
		}
	}
}

// position is the number of reports up to the last one that was told.
func (r *rings) position() uint64 { return r.told + uint64(len(r.backlog)) }
