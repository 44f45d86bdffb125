package device

import (
	"errors"
	"fmt"
	"math"
	"os"
	"unsafe"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
)

// Host memory is a memfd: processes share the descriptor, and a process that copies between the
// memory and a GPU registers a mapping with CUDA. The memory is sealed against changes of the size,
// so that no process can make an access of a second process fault.

// hostSeals are those without which memory of another process is not mapped.
const hostSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW

// takeAtOnce bounds one call that allocates pages: a signal makes it begin anew.
const takeAtOnce = 16 << 20

// CreateHost makes host memory of zeros, in whole pages, and allocates all pages: the kernel
// charges them to this process's control group.
func CreateHost(name string, bytes uint64) (*Memory, error) {
	m, err := CreateEmptyHost(name, bytes)
	if err != nil {
		return nil, err
	}
	if err := m.Populate(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// CreateEmptyHost makes host memory without pages. The kernel charges a page to the control
// group of the process that touches it first. Nothing else may use the memory before Populate:
// without pages an access could end the process for want of memory.
func CreateEmptyHost(name string, bytes uint64) (*Memory, error) {
	page := uint64(os.Getpagesize())
	if bytes == 0 || bytes > math.MaxInt64-page {
		return nil, fmt.Errorf("host memory of %d bytes", bytes)
	}
	bytes = (bytes + page - 1) / page * page
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	m := &Memory{Bytes: bytes, fd: fd, made: true}
	if err = os.NewSyscallError("ftruncate", unix.Ftruncate(fd, int64(bytes))); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, hostSeals|unix.F_SEAL_SEAL)
		err = os.NewSyscallError("F_ADD_SEALS", err)
	}
	if err == nil {
		err = m.mapHost()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s of host memory: %w", humanize.IBytes(bytes), err), unix.Close(fd))
	}
	return m, nil
}

// Populate allocates the pages of host memory that are missing: the kernel charges these to
// this process's control group.
func (m *Memory) Populate() error {
	for at := uint64(0); at < m.Bytes; {
		n := min(takeAtOnce, m.Bytes-at)
		if err := fallocate(m.fd, 0, at, n); err != nil {
			return fmt.Errorf("%s of host memory: %w", humanize.IBytes(m.Bytes), err)
		}
		at += n
	}
	return nil
}

func fallocate(fd int, how uint32, at, n uint64) error {
	for {
		if err := unix.Fallocate(fd, how, int64(at), int64(n)); err != unix.EINTR {
			return os.NewSyscallError("fallocate", err)
		}
	}
}

// Causes of refused host memory.
var (
	ErrNotHostMemory = errors.New(
		"the descriptor is not host memory (a memfd that is sealed against a change of its size)",
	)
	ErrHugePages = errors.New("the host memory is of huge pages")
)

// HostSizeError is the cause of host memory that was announced with another size.
type HostSizeError struct {
	Has       int64  // bytes
	Announced uint64 // bytes
}

func (e *HostSizeError) Error() string {
	return fmt.Sprintf("the host memory has %d bytes, and %d in whole pages were announced", e.Has, e.Announced)
}

// CheckHost says why a descriptor that somebody else made is not host memory of so
// many bytes. It calls nothing that a stranger's file system would answer.
func CheckHost(fd int, bytes uint64) error {
	// This call distinguishes the kernel's memory files from further files.
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals&hostSeals != hostSeals {
		return ErrNotHostMemory
	}
	var s unix.Stat_t
	if err := unix.Fstat(fd, &s); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	var f unix.Statfs_t
	if err := unix.Fstatfs(fd, &f); err != nil {
		return os.NewSyscallError("fstatfs", err)
	}
	if f.Type != unix.TMPFS_MAGIC { // an access to huge pages can fail
		return ErrHugePages
	}
	if bytes == 0 || uint64(s.Size) != bytes || bytes%uint64(os.Getpagesize()) != 0 {
		return &HostSizeError{s.Size, bytes}
	}
	return nil
}

// ImportHost maps host memory of another process, of exactly that many bytes. The
// descriptor, of which nothing is believed, stays the caller's.
func ImportHost(fd int, bytes uint64) (*Memory, error) {
	if err := CheckHost(fd, bytes); err != nil {
		return nil, err
	}
	m := &Memory{Bytes: bytes}
	var err error
	if m.fd, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3); err != nil {
		return nil, os.NewSyscallError("F_DUPFD_CLOEXEC", err)
	}
	if err := m.mapHost(); err != nil {
		return nil, errors.Join(err, unix.Close(m.fd))
	}
	return m, nil
}

func (m *Memory) mapHost() error {
	at, err := unix.MmapPtr(m.fd, 0, nil, uintptr(m.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	m.host = unsafe.Slice((*byte)(at), m.Bytes)
	return nil
}

// Pin registers host memory with CUDA, once, so that the device can copy to and
// from it. Other devices of the process can as well.
func (m *Memory) Pin(g *Device) error {
	if m.host == nil || m.pinnedBy != nil {
		return nil
	}
	return g.On(func() error {
		p := unsafe.Pointer(&m.host[0])
		if err := g.Driver.MemHostRegister(p, m.Bytes); err != nil {
			return fmt.Errorf("registering host memory: %w", err)
		}
		ptr, err := g.Driver.MemHostDevicePtr(p)
		if err != nil {
			return errors.Join(err, g.Driver.MemHostUnregister(p))
		}
		m.Ptr, m.pinnedBy = ptr, g
		return nil
	})
}

// After Leave, Close leaves the pages of host memory to further processes with a mapping: the
// kernel frees the pages after the last unmap.
func (m *Memory) Leave() { m.made = false }

// closeHost unmaps host memory. Close also frees the pages of memory made here, although further
// processes may keep the descriptor: later accesses of such a process allocate pages of that
// process.
func (m *Memory) closeHost() error {
	var err error
	if g := m.pinnedBy; g != nil {
		err = g.On(func() error { return g.Driver.MemHostUnregister(unsafe.Pointer(&m.host[0])) })
	}
	err = errors.Join(err, os.NewSyscallError("munmap", unix.MunmapPtr(unsafe.Pointer(&m.host[0]), uintptr(m.Bytes))))
	if m.made {
		err = errors.Join(err, fallocate(m.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, m.Bytes))
	}
	m.host = nil
	return errors.Join(err, unix.Close(m.fd))
}

// HostBytes is host memory as this process has it mapped, nil of a device's.
func (m *Memory) HostBytes() []byte { return m.host }

// Host reports whether it is host memory.
func (m *Memory) Host() bool { return m.host != nil }

// Place is where a copy begins or ends.
type Place struct {
	// Ptr is the address by which devices reach it; 0 of host memory that is not
	// pinned.
	Ptr cuda.Ptr
	// Host is the address in this process of host memory, nil of a device's.
	Host unsafe.Pointer
	// on is the ordinal of the device that has the memory, plus 1; 0 where it is not known.
	on cuda.Device
	// stores are the bytes from here on as the CPU has them mapped; nil where it has not.
	stores []byte
}

// At is a place in the memory. It is not looked whether the memory has as much.
func (m *Memory) At(offset uint64) Place {
	p := Place{Ptr: m.Ptr + cuda.Ptr(offset)}
	if m.host != nil {
		p.Host = unsafe.Add(unsafe.Pointer(&m.host[0]), offset)
	} else {
		p.on, p.stores = m.On+1, m.stores.from(offset)
	}
	return p
}

// sameDevice reports whether both are known to be memory of one device.
func sameDevice(a, b Place) bool { return a.on != 0 && a.on == b.on }

// Plus is n bytes further.
func (p Place) Plus(n uint64) Place {
	p.Ptr += cuda.Ptr(n)
	if p.Host != nil {
		p.Host = unsafe.Add(p.Host, n)
	}
	p.stores = p.stores[min(n, uint64(len(p.stores))):]
	return p
}
