// Package device is one GPU as a relay uses it: a lean context, memory that is
// imported or created, and a queue of copies whose ends are seen by polling.
package device

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/peerlane/peerlane/cuda"
)

// Device is a GPU with a context of this process on it.
type Device struct {
	Driver  *cuda.Driver
	Ordinal cuda.Device
	BusID   string
	UUID    string
	context cuda.Context
}

// Open makes a context on the GPU at a PCI address. The context's limits are
// at 0: about 265 MiB instead of 526 on an H200.
func Open(d *cuda.Driver, busID string) (*Device, error) {
	ordinal, err := d.DeviceByPCIBusID(busID)
	if err != nil {
		return nil, fmt.Errorf("GPU %s: the driver does not show it to this process (its device node and CUDA_VISIBLE_DEVICES decide): %w", busID, err)
	}
	uuid, err := d.DeviceUUID(ordinal)
	if err != nil {
		return nil, err
	}
	g := &Device{Driver: d, Ordinal: ordinal, BusID: busID, UUID: uuid}
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

// Close destroys the context. All memory and queues must be closed before.
func (g *Device) Close() error { return g.Driver.CtxDestroy(g.context) }

// On runs f on an OS thread that has the device's context current.
func (g *Device) On(f func() error) error {
	return onThread(func() error {
		if err := g.Use(); err != nil {
			return err
		}
		err := f()
		return errors.Join(err, g.Driver.CtxSetCurrent(0))
	})
}

func onThread(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return f()
}

// Memory is device memory mapped into this process.
type Memory struct {
	driver *cuda.Driver
	handle cuda.MemHandle
	// Ptr is the mapping's address, Bytes its size.
	Ptr   cuda.Ptr
	Bytes uint64
	// On is the device that the memory is on.
	On cuda.Device
}

// Import maps another process's allocation of exactly `bytes` for the given
// devices. The descriptor stays the caller's.
func Import(d *cuda.Driver, fd int, bytes uint64, access ...cuda.Access) (*Memory, error) {
	handle, err := d.MemImportFD(fd)
	if err != nil {
		return nil, fmt.Errorf("importing %d bytes of GPU memory: %w", bytes, err)
	}
	properties, err := d.MemProperties(handle)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("importing %d bytes of GPU memory: %w", bytes, err), d.MemRelease(handle))
	}
	return mapped(d, handle, properties.Device, bytes, access)
}

// Create makes memory on a device, exportable and RDMA-capable where the
// device can, and maps it. No context on that device is needed.
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
	return mapped(d, handle, on, bytes, access)
}

func mapped(d *cuda.Driver, handle cuda.MemHandle, on cuda.Device, bytes uint64, access []cuda.Access) (*Memory, error) {
	m := &Memory{driver: d, handle: handle, Bytes: bytes, On: on}
	ptr, err := d.MemAddressReserve(bytes, 0)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("reserving %d bytes of addresses: %w", bytes, err), d.MemRelease(handle))
	}
	m.Ptr = ptr
	if err := d.MemMap(ptr, bytes, 0, handle); err != nil {
		return nil, errors.Join(fmt.Errorf("mapping %d bytes: %w", bytes, err), d.MemAddressFree(ptr, bytes), d.MemRelease(handle))
	}
	if err := d.MemSetAccess(ptr, bytes, access...); err != nil {
		return nil, errors.Join(fmt.Errorf("access to %d bytes (is there a peer-to-peer path between the GPUs?): %w", bytes, err), m.Close())
	}
	return m, nil
}

// Allow adds access for a device.
func (m *Memory) Allow(access cuda.Access) error {
	return m.driver.MemSetAccess(m.Ptr, m.Bytes, access)
}

// Export makes a file descriptor of the memory for another process.
func (m *Memory) Export() (int, error) { return m.driver.MemExportFD(m.handle) }

// Close unmaps and releases. No copy may be under way.
func (m *Memory) Close() error {
	return errors.Join(
		m.driver.MemUnmap(m.Ptr, m.Bytes),
		m.driver.MemAddressFree(m.Ptr, m.Bytes),
		m.driver.MemRelease(m.handle))
}
