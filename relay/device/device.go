// Package device is a relay's view of a GPU: a lean context, memory that is imported or created,
// and a queue of copies whose ends are seen by polling.
package device

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/fault"
)

// Device is a GPU with a context of this process on it.
type Device struct {
	Driver  *cuda.Driver
	Ordinal cuda.Device
	BusID   string
	UUID    string
	context cuda.Context
	writes  Writes

	// Stores: see store.go.
	aperture  *cuda.Aperture // nil without
	readsBack bool
	mapped    atomic.Uint64 // bytes

	lists listKernel
}

// Open makes a context on the GPU at a PCI address. The context's limits are
// at 0: about 265 MiB instead of 526 on an H200.
func Open(d *cuda.Driver, busID string) (*Device, error) {
	ordinal, err := d.DeviceByPCIBusID(busID)
	if err != nil {
		return nil, &fault.Error{
			Code:      fault.NoCUDA,
			Operation: "open GPU",
			Object:    busID,
			Cause: fmt.Errorf(
				"the driver does not show it to this process (its device node and CUDA_VISIBLE_DEVICES decide): %w",
				err,
			),
		}
	}
	uuid, err := d.DeviceUUID(ordinal)
	if err != nil {
		return nil, err
	}
	g := &Device{Driver: d, Ordinal: ordinal, BusID: busID, UUID: uuid, writes: Writes{MaxWords: defaultMaxWords}}
	err = onThread(func() error {
		var err error
		g.context, err = d.CtxCreate(ordinal, cuda.CtxOptions{Lean: true})
		if err != nil {
			return fmt.Errorf("a context on GPU %s (%s): %w", uuid, busID, err)
		}
		return d.CtxSetCurrent(0)
	})
	if err != nil {
		return nil, err
	}
	return g, nil
}

// Use makes the device's context current on the calling thread.
func (g *Device) Use() error { return g.Driver.CtxSetCurrent(g.context) }

// Context is the device's, for calls that name two.
func (g *Device) Context() cuda.Context { return g.context }

// Close destroys the context. Close memory and queues before.
func (g *Device) Close() error {
	unloaded := g.unloadLists()
	if g.aperture != nil {
		g.aperture.Close()
	}
	return errors.Join(unloaded, g.Driver.CtxDestroy(g.context))
}

// Lost is the error after which every call on the context fails (see [cuda.Result.Sticky]); nil
// while it works. The result distinguishes errors caused by received memory from errors of the
// device.
func (g *Device) Lost() error {
	err := g.On(func() error {
		e, err := g.Driver.EventCreate(cuda.EventOptions{})
		if err != nil {
			return err
		}
		return g.Driver.EventDestroy(e)
	})
	if cuda.Sticky(err) {
		return fmt.Errorf("the context on GPU %s is lost: %w", g.BusID, err)
	}
	return nil
}

// On runs f on an OS thread with the device's context current, and restores the thread's context.
// If that fails, the effects of f stay, and belong to the caller: no further goroutine gets the
// thread, which ends with this goroutine.
func (g *Device) On(f func() error) error {
	runtime.LockOSThread()
	before, err := g.Driver.CtxGetCurrent()
	if err == nil {
		err = g.Use()
	}
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	err = f()
	restored := g.Driver.CtxSetCurrent(before)
	if restored == nil {
		runtime.UnlockOSThread()
	} else if err != nil {
		err = errors.Join(err, restored)
	}
	return err
}

func onThread(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return f()
}

// Memory is memory mapped into this process: of a device, or of the host.
type Memory struct {
	// Ptr is the memory's address for devices, Bytes the size.
	Ptr   cuda.Ptr
	Bytes uint64
	// On is the device that the memory is on.
	On cuda.Device

	// Of a device: allocations side by side.
	driver *cuda.Driver
	parts  []allocation
	stores *stores // nil where the CPU cannot store into it

	// By an IPC handle.
	openedBy *Device

	// Of cuMemAlloc: see rdma.go.
	allocatedBy *Device
	base        cuda.Ptr
	// Lent by another process: see rdma.go.
	lent *lent

	// Of the host: see host.go.
	host     []byte
	fd       int
	made     bool    // here
	pages    string  // of CreateHuge
	pinnedBy *Device // nil: by none
}

// allocation is physical memory that is mapped as a part of a Memory.
type allocation struct {
	handle cuda.MemHandle
	bytes  uint64
}

// Part is an allocation of another process: the descriptor that it made, and the
// allocation's size.
type Part struct {
	FD    int
	Bytes uint64
}

// ErrSeveralDevices says that parts are on different devices.
var ErrSeveralDevices = errors.New("all have to be on one GPU")

// Import maps another process's allocation of exactly `bytes` for the given
// devices. The descriptor stays the caller's.
func Import(d *cuda.Driver, fd int, bytes uint64, access ...cuda.Access) (*Memory, error) {
	return ImportParts(d, []Part{{fd, bytes}}, access...)
}

// ImportParts maps adjacent allocations of a foreign process, on a single device. The descriptors
// stay the caller's.
func ImportParts(d *cuda.Driver, parts []Part, access ...cuda.Access) (*Memory, error) {
	m := &Memory{driver: d}
	for i, p := range parts {
		which := fmt.Sprintf("importing %d bytes of GPU memory", p.Bytes)
		if len(parts) > 1 {
			which += fmt.Sprintf(", allocation %d of %d", i+1, len(parts))
		}
		handle, err := d.MemImportFD(p.FD)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w", which, err), m.release())
		}
		m.parts = append(m.parts, allocation{handle, p.Bytes})
		m.Bytes += p.Bytes
		properties, err := d.MemProperties(handle)
		if err == nil && i > 0 && properties.Device != m.On {
			uuid, _ := d.DeviceUUID(properties.Device) // of a device that has told it before
			err = fmt.Errorf("it is on %s, and those before it are not: %w", uuid, ErrSeveralDevices)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w", which, err), m.release())
		}
		m.On = properties.Device
	}
	if err := m.mapParts(access); err != nil {
		return nil, err
	}
	return m, nil
}

// OpenIPC maps memory of another process's cudaMalloc, the whole allocation. The memory belongs to
// the device's context.
func (g *Device) OpenIPC(handle cuda.IPCMemHandle) (*Memory, error) {
	m := &Memory{driver: g.Driver, openedBy: g}
	err := g.On(func() error {
		ptr, err := g.Driver.IPCOpenMemHandle(handle)
		if err != nil {
			return err
		}
		base, size, err := g.Driver.MemAddressRange(ptr)
		if err == nil {
			m.On, err = g.Driver.PointerDevice(ptr)
		}
		if err != nil {
			return errors.Join(err, g.Driver.IPCCloseMemHandle(ptr))
		}
		m.Ptr, m.Bytes = ptr, size-uint64(ptr-base)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return m, nil
}

// Create makes and maps memory on a device, exportable and RDMA-capable if the device supports it.
// No context on that device is needed.
func Create(d *cuda.Driver, on cuda.Device, bytes uint64, access ...cuda.Access) (*Memory, error) {
	granularity, err := d.MemGranularity(on)
	if err != nil {
		return nil, err
	}
	bytes = (bytes + granularity - 1) / granularity * granularity
	handle, err := d.MemCreate(on, bytes, cuda.MemOptions{Exportable: true, RDMA: true})
	if errors.Is(err, cuda.ErrNotSupported) || errors.Is(err, cuda.ErrInvalidValue) {
		handle, err = d.MemCreate(on, bytes, cuda.MemOptions{Exportable: true})
	}
	if err != nil {
		return nil, fmt.Errorf("%d bytes of GPU memory: %w", bytes, err)
	}
	m := &Memory{driver: d, parts: []allocation{{handle, bytes}}, Bytes: bytes, On: on}
	if err := m.mapParts(access); err != nil {
		return nil, err
	}
	return m, nil
}

// mapParts maps the allocations. After an error nothing is left of the memory.
func (m *Memory) mapParts(access []cuda.Access) error {
	ptr, err := m.driver.MemAddressReserve(m.Bytes, 0)
	if err != nil {
		return errors.Join(fmt.Errorf("reserving %d bytes of addresses: %w", m.Bytes, err), m.release())
	}
	m.Ptr = ptr
	at := ptr
	for i, p := range m.parts {
		if err := m.driver.MemMap(at, p.bytes, 0, p.handle); err != nil {
			return errors.Join(fmt.Errorf("mapping %d bytes: %w", p.bytes, err), m.unmap(i), m.release())
		}
		at += cuda.Ptr(p.bytes)
	}
	if err := m.driver.MemSetAccess(ptr, m.Bytes, access...); err != nil {
		return errors.Join(
			fmt.Errorf("access to %d bytes (is there a peer-to-peer path between the GPUs?): %w", m.Bytes, err),
			m.Close(),
		)
	}
	return nil
}

// unmap ends the mappings of the first n allocations, and the range's.
func (m *Memory) unmap(n int) error {
	var err error
	at := m.Ptr
	for _, p := range m.parts[:n] {
		err = errors.Join(err, m.driver.MemUnmap(at, p.bytes))
		at += cuda.Ptr(p.bytes)
	}
	return errors.Join(err, m.driver.MemAddressFree(m.Ptr, m.Bytes))
}

func (m *Memory) release() error {
	var err error
	for _, p := range m.parts {
		err = errors.Join(err, m.driver.MemRelease(p.handle))
	}
	return err
}

// Allow adds access for a device.
func (m *Memory) Allow(access cuda.Access) error {
	if m.host != nil {
		return nil // every device can access pinned memory
	}
	return m.driver.MemSetAccess(m.Ptr, m.Bytes, access)
}

// Export makes a file descriptor of the memory, a single allocation, for a further process.
func (m *Memory) Export() (int, error) {
	if m.host != nil {
		fd, err := unix.FcntlInt(uintptr(m.fd), unix.F_DUPFD_CLOEXEC, 3)
		return fd, os.NewSyscallError("F_DUPFD_CLOEXEC", err)
	}
	return m.driver.MemExportFD(m.parts[0].handle)
}

// Close unmaps and releases. No copy may be under way.
func (m *Memory) Close() error {
	if m.host != nil {
		return m.closeHost()
	}
	if m.lent != nil {
		return os.NewSyscallError("close", unix.Close(m.lent.fd))
	}
	if g := m.openedBy; g != nil {
		return g.On(func() error { return g.Driver.IPCCloseMemHandle(m.Ptr) })
	}
	if g := m.allocatedBy; g != nil {
		return g.On(func() error { return g.Driver.MemFree(m.base) })
	}
	var err error
	if m.stores != nil {
		err = m.stores.close()
	}
	return errors.Join(err, m.unmap(len(m.parts)), m.release())
}
