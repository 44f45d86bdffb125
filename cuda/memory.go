package cuda

/*
#include "driver.h"

#cgo noescape call_cuMemGetAllocationGranularity
#cgo nocallback call_cuMemGetAllocationGranularity
#cgo noescape call_cuMemCreate
#cgo nocallback call_cuMemCreate
#cgo noescape call_cuMemExportToShareableHandle
#cgo nocallback call_cuMemExportToShareableHandle
#cgo noescape call_cuMemImportFromShareableHandle
#cgo nocallback call_cuMemImportFromShareableHandle
#cgo noescape call_cuMemGetAllocationPropertiesFromHandle
#cgo nocallback call_cuMemGetAllocationPropertiesFromHandle
#cgo noescape call_cuMemRetainAllocationHandle
#cgo nocallback call_cuMemRetainAllocationHandle
#cgo noescape call_cuMemAddressReserve
#cgo nocallback call_cuMemAddressReserve
#cgo noescape call_cuMemSetAccess
#cgo nocallback call_cuMemSetAccess
#cgo noescape call_cuMemGetHandleForAddressRange
#cgo nocallback call_cuMemGetHandleForAddressRange
#cgo noescape call_cuMemGetAddressRange
#cgo nocallback call_cuMemGetAddressRange
#cgo noescape call_cuPointerSetAttribute
#cgo nocallback call_cuPointerSetAttribute
#cgo noescape call_cuPointerGetAttribute
#cgo nocallback call_cuPointerGetAttribute
*/
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"
)

// MemHandle is a CUmemGenericAllocationHandle: physical memory of a device.
type MemHandle uint64

// Ptr is a CUdeviceptr, an address of the unified address space.
type Ptr uint64

func (p Ptr) String() string { return fmt.Sprintf("%#x", uint64(p)) }

// MemOptions are the options of [Driver.MemCreate].
type MemOptions struct {
	Exportable bool // MemExportFD
	RDMA       bool // GPUDirect RDMA, best effort: [Driver.PointerRDMACapable] reports the result
}

// MemProperties are the properties of an allocation.
type MemProperties struct {
	Device     Device // location
	Exportable bool
	RDMA       bool
}

// Access is the access of a device to a mapped range.
type Access struct {
	Device Device
	Write  bool // false: read only
}

func properties(dev Device, o MemOptions) C.CUmemAllocationProp {
	var p C.CUmemAllocationProp
	p._type = C.CU_MEM_ALLOCATION_TYPE_PINNED
	p.location._type = C.CU_MEM_LOCATION_TYPE_DEVICE
	p.location.id = C.int(dev)
	if o.Exportable {
		p.requestedHandleTypes = C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
	}
	if o.RDMA {
		p.allocFlags.gpuDirectRDMACapable = 1
	}
	return p
}

// MemGranularity returns the unit, in bytes, of sizes and addresses for [Driver.MemCreate] and
// [Driver.MemMap]: 2 MiB on current GPUs.
func (d *Driver) MemGranularity(dev Device) (uint64, error) {
	p := properties(dev, MemOptions{Exportable: true})
	var n C.size_t
	if r := C.call_cuMemGetAllocationGranularity(d.calls, &n, &p, C.CU_MEM_ALLOC_GRANULARITY_MINIMUM); r != 0 {
		return 0, d.newCallError(r, "cuMemGetAllocationGranularity", on(dev))
	}
	return uint64(n), nil
}

// MemCreate allocates physical memory on dev. The size is a multiple of the granularity. The call
// needs no context on dev.
func (d *Driver) MemCreate(dev Device, size uint64, o MemOptions) (MemHandle, error) {
	p := properties(dev, o)
	var h C.CUmemGenericAllocationHandle
	if r := C.call_cuMemCreate(d.calls, &h, C.size_t(size), &p, 0); r != 0 {
		return 0, d.newCallError(r, "cuMemCreate", humanize.IBytes(size)+" on "+on(dev))
	}
	return MemHandle(h), nil
}

// MemRelease releases a handle. The driver frees the memory after the last mapping in any process
// ends.
func (d *Driver) MemRelease(h MemHandle) error {
	return d.result(C.call_cuMemRelease(d.calls, C.CUmemGenericAllocationHandle(h)), "cuMemRelease")
}

// MemExportFD returns a close-on-exec file descriptor of the memory for transfer to another
// process. The caller closes it.
func (d *Driver) MemExportFD(h MemHandle) (int, error) {
	fd := C.int(-1)
	r := C.call_cuMemExportToShareableHandle(d.calls, &fd, C.CUmemGenericAllocationHandle(h),
		C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
	if r != 0 {
		return -1, d.newCallError(r, "cuMemExportToShareableHandle", "")
	}
	return closeOnExec(int(fd))
}

// MemImportFD returns a handle of the memory behind a descriptor. The caller keeps the descriptor.
// The error is [ErrInvalidDevice] if this process has no device node of the memory's device.
func (d *Driver) MemImportFD(fd int) (MemHandle, error) {
	var h C.CUmemGenericAllocationHandle
	r := C.call_cuMemImportFromShareableHandle(d.calls, &h, C.uintptr_t(fd), C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
	if r != 0 {
		return 0, d.newCallError(r, "cuMemImportFromShareableHandle", fmt.Sprintf("descriptor %d", fd))
	}
	return MemHandle(h), nil
}

// MemProperties returns the location and the options of the memory of h.
func (d *Driver) MemProperties(h MemHandle) (MemProperties, error) {
	var p C.CUmemAllocationProp
	if r := C.call_cuMemGetAllocationPropertiesFromHandle(d.calls, &p, C.CUmemGenericAllocationHandle(h)); r != 0 {
		return MemProperties{}, d.newCallError(r, "cuMemGetAllocationPropertiesFromHandle", "")
	}
	return MemProperties{
		Device:     Device(p.location.id),
		Exportable: p.requestedHandleTypes&C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0,
		RDMA:       p.allocFlags.gpuDirectRDMACapable != 0,
	}, nil
}

// MemRetain returns a handle of the memory mapped at p; the caller releases the handle. The error
// for memory of [Driver.MemAlloc] is [ErrInvalidValue].
func (d *Driver) MemRetain(p Ptr) (MemHandle, error) {
	var h C.CUmemGenericAllocationHandle
	if r := C.call_cuMemRetainAllocationHandle(d.calls, &h, C.uintptr_t(p)); r != 0 {
		return 0, d.newCallError(r, "cuMemRetainAllocationHandle", p.String())
	}
	return MemHandle(h), nil
}

// MemAddressReserve reserves a range of addresses. align is a power of two or
// 0 for the granularity.
func (d *Driver) MemAddressReserve(size, align uint64) (Ptr, error) {
	var p C.CUdeviceptr
	if r := C.call_cuMemAddressReserve(d.calls, &p, C.size_t(size), C.size_t(align), 0, 0); r != 0 {
		return 0, d.newCallError(r, "cuMemAddressReserve", humanize.IBytes(size))
	}
	return Ptr(p), nil
}

// MemAddressFree frees a whole reserved range without mappings.
func (d *Driver) MemAddressFree(p Ptr, size uint64) error {
	if r := C.call_cuMemAddressFree(d.calls, C.CUdeviceptr(p), C.size_t(size)); r != 0 {
		return d.newCallError(r, "cuMemAddressFree", at(p, size))
	}
	return nil
}

// MemMap maps memory at a reserved address. Current drivers require offset 0. No device may use the
// range before [Driver.MemSetAccess].
func (d *Driver) MemMap(p Ptr, size, offset uint64, h MemHandle) error {
	r := C.call_cuMemMap(d.calls, C.CUdeviceptr(p), C.size_t(size), C.size_t(offset), C.CUmemGenericAllocationHandle(h), 0)
	if r != 0 {
		return d.newCallError(r, "cuMemMap", at(p, size))
	}
	return nil
}

// MemUnmap removes one whole mapping. Work that uses the mapping must have completed.
func (d *Driver) MemUnmap(p Ptr, size uint64) error {
	if r := C.call_cuMemUnmap(d.calls, C.CUdeviceptr(p), C.size_t(size)); r != 0 {
		return d.newCallError(r, "cuMemUnmap", at(p, size))
	}
	return nil
}

// MemSetAccess sets the access of devices to a mapped range.
func (d *Driver) MemSetAccess(p Ptr, size uint64, access ...Access) error {
	descs := make([]C.CUmemAccessDesc, len(access))
	for i, a := range access {
		descs[i].location._type = C.CU_MEM_LOCATION_TYPE_DEVICE
		descs[i].location.id = C.int(a.Device)
		descs[i].flags = C.CU_MEM_ACCESS_FLAGS_PROT_READ
		if a.Write {
			descs[i].flags = C.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
		}
	}
	r := C.call_cuMemSetAccess(d.calls, C.CUdeviceptr(p), C.size_t(size), unsafe.SliceData(descs), C.size_t(len(descs)))
	if r != 0 {
		return d.newCallError(r, "cuMemSetAccess", fmt.Sprintf("%s for %+v", at(p, size), access))
	}
	return nil
}

// MemDMABufFD returns a close-on-exec DMA-BUF descriptor of a mapped range, whose address and size
// are multiples of the host's page size. The caller closes it.
func (d *Driver) MemDMABufFD(p Ptr, size uint64) (int, error) { return d.memDMABufFD(p, size, 0) }

// MemDMABufPCIeFD is MemDMABufFD of a mapping over PCIe, for a NIC's Data Direct function
// (CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE, CUDA 12.8). Older drivers return ErrInvalidValue.
func (d *Driver) MemDMABufPCIeFD(p Ptr, size uint64) (int, error) { return d.memDMABufFD(p, size, 1) }

func (d *Driver) memDMABufFD(p Ptr, size uint64, flags uint64) (int, error) {
	fd := C.int(-1)
	r := C.call_cuMemGetHandleForAddressRange(d.calls, &fd, C.CUdeviceptr(p), C.size_t(size),
		C.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, C.ulonglong(flags))
	if r != 0 {
		return -1, d.newCallError(r, "cuMemGetHandleForAddressRange", at(p, size))
	}
	return closeOnExec(int(fd))
}

// MemAddressRange returns address and size in bytes of the allocation that contains p: a mapping of
// VMM memory, or memory of cuMemAlloc. The error for any other address is the driver's.
func (d *Driver) MemAddressRange(p Ptr) (base Ptr, size uint64, err error) {
	var b C.CUdeviceptr
	var n C.size_t
	if r := C.call_cuMemGetAddressRange(d.calls, &b, &n, C.CUdeviceptr(p)); r != 0 {
		return 0, 0, d.newCallError(r, "cuMemGetAddressRange", p.String())
	}
	return Ptr(b), uint64(n), nil
}

// PointerRDMACapable reports whether a NIC can access the memory at p
// (CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE).
func (d *Driver) PointerRDMACapable(p Ptr) (bool, error) {
	// The driver writes a bool or an int, by version: zeroed and wide enough
	// for both.
	var v C.uint64_t
	r := C.call_cuPointerGetAttribute(d.calls, unsafe.Pointer(&v), C.CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE,
		C.CUdeviceptr(p))
	if r != 0 {
		return false, d.newCallError(r, "cuPointerGetAttribute", p.String())
	}
	return v != 0, nil
}

// PointerSyncMemops makes synchronous copies of memory of [Driver.MemAlloc] wait for completion, so
// that a NIC reads the copied data afterwards (CU_POINTER_ATTRIBUTE_SYNC_MEMOPS).
func (d *Driver) PointerSyncMemops(p Ptr) error {
	v := C.uint(1)
	r := C.call_cuPointerSetAttribute(d.calls, unsafe.Pointer(&v), C.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, C.CUdeviceptr(p))
	if r != 0 {
		return d.newCallError(r, "cuPointerSetAttribute", p.String())
	}
	return nil
}

// PointerDevice returns the device of the memory at p; for host memory, the device of the context
// that registered the memory. The error for an address unknown to CUDA is [ErrInvalidValue].
func (d *Driver) PointerDevice(p Ptr) (Device, error) {
	var v C.int
	r := C.call_cuPointerGetAttribute(d.calls, unsafe.Pointer(&v), C.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, C.CUdeviceptr(p))
	if r != 0 {
		return 0, d.newCallError(r, "cuPointerGetAttribute", p.String())
	}
	return Device(v), nil
}

// PointerID returns a number that identifies the memory at p within this process. A later
// allocation at the same address has another number (CU_POINTER_ATTRIBUTE_BUFFER_ID).
func (d *Driver) PointerID(p Ptr) (uint64, error) {
	var v C.ulonglong
	r := C.call_cuPointerGetAttribute(d.calls, unsafe.Pointer(&v), C.CU_POINTER_ATTRIBUTE_BUFFER_ID, C.CUdeviceptr(p))
	if r != 0 {
		return 0, d.newCallError(r, "cuPointerGetAttribute", p.String())
	}
	return uint64(v), nil
}

// closeOnExec sets the close-on-exec flag: the driver does not promise the flag.
func closeOnExec(fd int) (int, error) {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return -1, fmt.Errorf("descriptor %d from the CUDA driver: close-on-exec: %w", fd, err)
	}
	return fd, nil
}

func at(p Ptr, size uint64) string { return humanize.IBytes(size) + " at " + p.String() }
