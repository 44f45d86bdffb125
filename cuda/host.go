package cuda

/*
#include "driver.h"

#cgo noescape call_cuMemAlloc
#cgo nocallback call_cuMemAlloc
#cgo noescape call_cuMemHostAlloc
#cgo nocallback call_cuMemHostAlloc
#cgo noescape call_cuMemHostGetDevicePointer
#cgo nocallback call_cuMemHostGetDevicePointer
*/
import "C"

import (
	"unsafe"

	"github.com/dustin/go-humanize"
)

// MemAlloc allocates memory of the current context's device, which cannot be
// exported as a descriptor.
func (d *Driver) MemAlloc(size uint64) (Ptr, error) {
	var p C.CUdeviceptr
	if r := C.call_cuMemAlloc(d.calls, &p, C.size_t(size)); r != 0 {
		return 0, d.newCallError(r, "cuMemAlloc", humanize.IBytes(size))
	}
	return Ptr(p), nil
}

// MemFree frees memory of [Driver.MemAlloc]. The call waits for work that uses the memory.
func (d *Driver) MemFree(p Ptr) error {
	return d.result(C.call_cuMemFree(d.calls, C.CUdeviceptr(p)), "cuMemFree")
}

// MemHostAlloc allocates pinned host memory that every context can address.
func (d *Driver) MemHostAlloc(size uint64) (unsafe.Pointer, error) {
	var p unsafe.Pointer
	r := C.call_cuMemHostAlloc(d.calls, &p, C.size_t(size), C.CU_MEMHOSTALLOC_PORTABLE|C.CU_MEMHOSTALLOC_DEVICEMAP)
	if r != 0 {
		return nil, d.newCallError(r, "cuMemHostAlloc", humanize.IBytes(size))
	}
	return p, nil
}

// MemHostFree frees memory of [Driver.MemHostAlloc].
func (d *Driver) MemHostFree(p unsafe.Pointer) error {
	return d.result(C.call_cuMemFreeHost(d.calls, p), "cuMemFreeHost")
}

// MemHostRegister pins host memory, such as a page shared with another process, and makes the
// memory addressable in every context. p must not point to Go memory.
func (d *Driver) MemHostRegister(p unsafe.Pointer, size uint64) error {
	r := C.call_cuMemHostRegister(d.calls, p, C.size_t(size), C.CU_MEMHOSTREGISTER_PORTABLE|C.CU_MEMHOSTREGISTER_DEVICEMAP)
	if r != 0 {
		return d.newCallError(r, "cuMemHostRegister", humanize.IBytes(size))
	}
	return nil
}

// MemHostUnregister reverts [Driver.MemHostRegister].
func (d *Driver) MemHostUnregister(p unsafe.Pointer) error {
	return d.result(C.call_cuMemHostUnregister(d.calls, p), "cuMemHostUnregister")
}

// MemHostDevicePtr returns the address by which devices reach p, an address of memory that was
// allocated or registered with CUDA.
func (d *Driver) MemHostDevicePtr(p unsafe.Pointer) (Ptr, error) {
	var q C.CUdeviceptr
	if r := C.call_cuMemHostGetDevicePointer(d.calls, &q, p, 0); r != 0 {
		return 0, d.newCallError(r, "cuMemHostGetDevicePointer", "")
	}
	return Ptr(q), nil
}
