package cuda

/*
#include "aperture.h"
*/
import "C"

import (
	"fmt"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Aperture maps memory of one GPU into this process's address space, through the GPU's BAR1. The
// CPU's stores arrive in 1.6 µs beside any kernel (docs/benchmarks.md). The driver's library has
// no call for it: [Driver.OpenAperture] uses ioctls of NVIDIA's kernel driver. Its methods are
// safe for concurrent use.
type Aperture struct {
	simulated bool
	mu        sync.Mutex
	calls     C.peerlane_aperture
}

// Mapped is part of an allocation of GPU memory. The CPU writes it in naturally aligned words and
// ends a write by a fence; a read takes 1 µs. After a reset of the GPU an access raises SIGBUS.
type Mapped struct {
	Bytes  []byte
	memory C.uint32_t
}

// steps are the names of peerlane_failure's steps.
var steps = map[C.int]string{
	C.PEERLANE_APERTURE_CONTROL: "open /dev/nvidiactl",
	C.PEERLANE_APERTURE_CLIENT:  "NV_ESC_RM_ALLOC of a client",
	C.PEERLANE_APERTURE_CARDS:   "NV_ESC_CARD_INFO",
	C.PEERLANE_APERTURE_EXPORT:  "GET_EXPORT_OBJECT_INFO",
	C.PEERLANE_APERTURE_DEVICE:  "NV_ESC_RM_ALLOC of the device",
	C.PEERLANE_APERTURE_NODE:    "open the GPU's device node",
	C.PEERLANE_APERTURE_IMPORT:  "IMPORT_OBJECT_FROM_FD",
	C.PEERLANE_APERTURE_MAP:     "NV_ESC_RM_MAP_MEMORY",
	C.PEERLANE_APERTURE_MMAP:    "mmap",
}

func apertureError(f C.peerlane_failure) error {
	if f.error != 0 {
		return fmt.Errorf("%s: %w", steps[f.step], syscall.Errno(f.error))
	}
	return fmt.Errorf("%s: status %#x of the NVIDIA kernel driver", steps[f.step], uint32(f.status))
}

// simulatedAperture is the variable that makes the simulator refuse apertures, with the value
// "refuse".
const simulatedAperture = "PEERLANE_SIM_APERTURE"

// OpenAperture opens the aperture of the GPU at a PCI address. An Aperture holds one file
// descriptor.
func (d *Driver) OpenAperture(busID string) (*Aperture, error) {
	if d.Simulated() {
		if os.Getenv(simulatedAperture) == "refuse" {
			return nil, fmt.Errorf("aperture of GPU %s: %w", busID, ErrNotSupported)
		}
		return &Aperture{simulated: true}, nil
	}
	var domain, bus, slot C.uint32_t
	if _, err := fmt.Sscanf(busID, "%x:%x:%x", &domain, &bus, &slot); err != nil {
		return nil, fmt.Errorf("PCI address %q: %w", busID, err)
	}
	a := &Aperture{}
	var f C.peerlane_failure
	if C.peerlane_aperture_open(&a.calls, domain, bus, slot, &f) != 0 {
		return nil, fmt.Errorf("aperture of GPU %s: %w", busID, apertureError(f))
	}
	return a, nil
}

// Size returns the size of BAR1 in bytes. All processes of the host share BAR1.
func (a *Aperture) Size() uint64 {
	if a.simulated {
		return 1 << 30
	}
	return uint64(a.calls.bytes)
}

// Map maps part of an allocation, in whole pages of 4 KiB. fd is its descriptor by
// [Driver.MemExportFD] or of another process, and stays the caller's.
func (a *Aperture) Map(fd int, offset, bytes uint64) (*Mapped, error) {
	if a.simulated {
		data, err := unix.Mmap(fd, int64(offset), int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return nil, os.NewSyscallError("mmap", err)
		}
		return &Mapped{Bytes: data}, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var data unsafe.Pointer
	var memory C.uint32_t
	var f C.peerlane_failure
	if C.peerlane_aperture_map(&a.calls, C.int(fd), C.uint64_t(offset), C.uint64_t(bytes), &data, &memory, &f) != 0 {
		return nil, apertureError(f)
	}
	return &Mapped{Bytes: unsafe.Slice((*byte)(data), bytes), memory: memory}, nil
}

// Unmap removes a mapping. The caller must not access the mapping afterwards.
func (a *Aperture) Unmap(m *Mapped) error {
	if a.simulated {
		return os.NewSyscallError("munmap", unix.Munmap(m.Bytes))
	}
	err := os.NewSyscallError("munmap", unix.MunmapPtr(unsafe.Pointer(&m.Bytes[0]), uintptr(len(m.Bytes))))
	a.mu.Lock()
	defer a.mu.Unlock()
	C.peerlane_aperture_release(&a.calls, m.memory)
	return err
}

// Close closes the aperture. The caller must first remove all mappings.
func (a *Aperture) Close() {
	if !a.simulated {
		C.peerlane_aperture_close(&a.calls)
	}
}
