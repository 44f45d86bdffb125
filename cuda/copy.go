package cuda

/*
#include "driver.h"

#cgo noescape call_cuMemcpyHtoDAsync
#cgo nocallback call_cuMemcpyHtoDAsync
#cgo noescape call_cuMemcpyDtoHAsync
#cgo nocallback call_cuMemcpyDtoHAsync
*/
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/dustin/go-humanize"
)

// MemcpyAsync copies n bytes between any two addresses, issued by the stream's
// device, which needs access to both.
func (d *Driver) MemcpyAsync(dst, src Ptr, n uint64, s Stream) error {
	if r := C.call_cuMemcpyAsync(d.calls, C.CUdeviceptr(dst), C.CUdeviceptr(src), C.size_t(n), C.CUstream(s)); r != 0 {
		return d.failed(r, "cuMemcpyAsync", span(dst, src, n))
	}
	return nil
}

// MemcpyHtoDAsync copies n bytes from host memory. From pageable memory it
// returns when that may be reused.
func (d *Driver) MemcpyHtoDAsync(dst Ptr, src unsafe.Pointer, n uint64, s Stream) error {
	if r := C.call_cuMemcpyHtoDAsync(d.calls, C.CUdeviceptr(dst), src, C.size_t(n), C.CUstream(s)); r != 0 {
		return d.failed(r, "cuMemcpyHtoDAsync", at(dst, n))
	}
	return nil
}

// MemcpyDtoHAsync copies n bytes to host memory. To pageable memory it returns
// when they are there.
func (d *Driver) MemcpyDtoHAsync(dst unsafe.Pointer, src Ptr, n uint64, s Stream) error {
	if r := C.call_cuMemcpyDtoHAsync(d.calls, dst, C.CUdeviceptr(src), C.size_t(n), C.CUstream(s)); r != 0 {
		return d.failed(r, "cuMemcpyDtoHAsync", at(src, n))
	}
	return nil
}

// MemcpyPeerAsync copies n bytes from memory of srcCtx's device to memory of
// dstCtx's, each of which needs access to its own end only.
func (d *Driver) MemcpyPeerAsync(dst Ptr, dstCtx Context, src Ptr, srcCtx Context, n uint64, s Stream) error {
	r := C.call_cuMemcpyPeerAsync(d.calls, C.CUdeviceptr(dst), C.CUcontext(dstCtx), C.CUdeviceptr(src), C.CUcontext(srcCtx), C.size_t(n), C.CUstream(s))
	if r != 0 {
		return d.failed(r, "cuMemcpyPeerAsync", span(dst, src, n))
	}
	return nil
}

func span(dst, src Ptr, n uint64) string {
	return fmt.Sprintf("%s from %s to %s", humanize.IBytes(n), src, dst)
}
