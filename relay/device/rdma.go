package device

import (
	"errors"

	"github.com/peerlane/peerlane/cuda"
)

// peermemPage is the page size of nvidia-peermem.
const peermemPage = 64 << 10

// Allocate makes memory of the device by cuMemAlloc, for an nvidia-peermem that accepts no memory
// of cuMemCreate: it begins at 64 KiB, and synchronous copies of it are over when they return. It
// cannot be exported.
func (g *Device) Allocate(bytes uint64) (*Memory, error) {
	bytes = (bytes + peermemPage - 1) / peermemPage * peermemPage
	m := &Memory{driver: g.Driver, allocatedBy: g, On: g.Ordinal, Bytes: bytes}
	err := g.On(func() error {
		var err error
		// As large allocations do begin; one that does not has room to.
		if m.base, err = g.Driver.MemAlloc(bytes); err == nil && m.base%peermemPage != 0 {
			if err = g.Driver.MemFree(m.base); err == nil {
				m.base, err = g.Driver.MemAlloc(bytes + peermemPage)
			}
		}
		if err != nil {
			return err
		}
		m.Ptr = (m.base + peermemPage - 1) / peermemPage * peermemPage
		if err := g.Driver.PointerSyncMemops(m.Ptr); err != nil {
			return errors.Join(err, g.Driver.MemFree(m.base))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return m, nil
}

// DMABuf makes a DMA-BUF descriptor of the whole memory, for a NIC. The caller closes it.
func (m *Memory) DMABuf() (int, error) { return m.driver.MemDMABufFD(m.Ptr, m.Bytes) }

// DMABufPCIe is DMABuf of a mapping over PCIe, for a NIC's Data Direct function.
func (m *Memory) DMABufPCIe() (int, error) { return m.driver.MemDMABufPCIeFD(m.Ptr, m.Bytes) }

// lent is how NICs know a range of another process's memory.
type lent struct {
	fd     int // a DMA-BUF of the whole memory
	offset uint64
}

// Lent is the range [offset, offset+length) of a foreign process's memory for registration with
// NICs: only by the owner's DMA-BUF descriptor of the whole memory. The addresses are those of the
// memory, which must outlive the result. The result owns the descriptor from then on, and Close
// closes only the descriptor.
func (m *Memory) Lent(fd int, offset, length uint64) *Memory {
	return &Memory{Ptr: m.Ptr + cuda.Ptr(offset), Bytes: length, On: m.On, lent: &lent{fd, offset}}
}

// Lease is the descriptor of the foreign process's memory, and the offset of the range, bytes;
// false for memory that is not lent.
func (m *Memory) Lease() (fd int, offset uint64, is bool) {
	if m.lent == nil {
		return -1, 0, false
	}
	return m.lent.fd, m.lent.offset, true
}

// RDMACapable reports whether the driver lets NICs have memory of any device, which a
// device with a context asks.
func (g *Device) RDMACapable(m *Memory) (capable bool, err error) {
	err = g.On(func() error {
		capable, err = g.Driver.PointerRDMACapable(m.Ptr)
		return err
	})
	return capable, err
}

// Address is where devices reach the memory, and NICs by nvidia-peermem.
func (m *Memory) Address() uintptr { return uintptr(m.Ptr) }

// Allocated reports whether the memory is of cuMemAlloc.
func (m *Memory) Allocated() bool { return m.allocatedBy != nil }

// Size is the size in bytes.
func (m *Memory) Size() uint64 { return m.Bytes }
