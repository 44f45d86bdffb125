package kernels

import (
	_ "embed"
	"errors"
	"fmt"

	"github.com/peerlane/peerlane/cuda"
)

//go:embed list.ptx
var listPTX string

// Lists has the kernel that copies many ranges in one launch, in one context, which must be current
// for every method. A copy engine takes some microseconds for each range.
type Lists struct {
	driver *cuda.Driver
	module cuda.Module
	kernel cuda.Function
	blocks uint32
}

// ListCopy is a copy of a list: Bytes between two ranges of device memory, which do not overlap.
// Addresses and Bytes are multiples of ListUnit.
type ListCopy struct {
	To, From cuda.Ptr
	Bytes    uint64
}

// ListUnit divides the addresses and the sizes of a list, in bytes.
const ListUnit = 16

const (
	listPart    = 8 << 10 // bytes that a warp copies at a time
	listThreads = 512     // of a block
	listBlocks  = 64      // at most: 1,024 warps, each with 2 KiB in flight
)

// LoadLists compiles the kernel for the device of the current context, and loads it.
func LoadLists(d *cuda.Driver, device cuda.Device) (*Lists, error) {
	multiprocessors, err := d.DeviceAttribute(device, cuda.AttributeMultiprocessors)
	if err != nil {
		return nil, err
	}
	l := &Lists{driver: d, blocks: uint32(min(listBlocks, max(1, multiprocessors/2)))}
	if l.module, err = d.ModuleLoadPTX(listPTX); err != nil {
		return nil, fmt.Errorf("kernel of lists: %w", err)
	}
	if l.kernel, err = d.ModuleGetFunction(l.module, "peerlane_copy_list"); err != nil {
		return nil, errors.Join(err, l.Unload())
	}
	return l, nil
}

// Unload unloads the kernel, which may not be running.
func (l *Lists) Unload() error { return l.driver.ModuleUnload(l.module) }

// Copy makes n copies as work of s. table is the device's address of the copies, in pinned host
// memory that stays unchanged until the work is done; most is the largest Bytes among them.
func (l *Lists) Copy(s cuda.Stream, table cuda.Ptr, n int, most uint64) error {
	parts := (most + listPart - 1) / listPart
	return l.driver.Launch(l.kernel, l.blocks, listThreads, s, uint64(table), uint64(n), parts)
}
