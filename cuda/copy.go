package cuda

/*
#include "driver.h"

#cgo noescape call_cuMemcpyHtoDAsync
#cgo nocallback call_cuMemcpyHtoDAsync
#cgo noescape call_cuMemcpyDtoHAsync
#cgo nocallback call_cuMemcpyDtoHAsync

// A trampoline, because Go cannot store the Go pointer in a structure of Go memory. The driver
// turns a rectangle of one row into a linear copy, so the rectangle has two rows, of whole words if
// possible. A size that two rows do not divide takes two overlapping copies.
static CUresult rowsHtoD(const peerlane_calls *t, CUdeviceptr dst, const void *src, size_t n, CUstream s)
{
	const size_t word = 8, unit = n % word || dst % word ? 1 : word, half = n / 2 / unit * unit;
	const char *from = src;
	CUresult r = 0;

	for (size_t at = 0; at + 2 * half <= n && r == 0; at += unit) {
		CUDA_MEMCPY2D c = {
			.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = from + at, .srcPitch = half,
			.dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = dst + at, .dstPitch = half,
			.WidthInBytes = half, .Height = 2,
		};
		r = call_cuMemcpy2DAsync(t, &c, s);
	}
	return r;
}

#cgo noescape rowsHtoD
#cgo nocallback rowsHtoD

// Every copy has the same attributes. The arrays are Go memory, which the call does not retain.
static CUresult batch(const peerlane_calls *t, CUdeviceptr *dst, CUdeviceptr *src, size_t *sizes, size_t n, CUstream s)
{
	CUmemcpyAttributes a = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
		.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE};
	size_t from = 0, failed = 0;
	return call_cuMemcpyBatchAsync(t, dst, src, sizes, n, &a, &from, 1, &failed, s);
}

#cgo noescape batch
#cgo nocallback batch
*/
import "C"

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/dustin/go-humanize"
)

// MemcpyAsync copies n bytes between any two addresses, issued by the stream's
// device, which needs access to both.
func (d *Driver) MemcpyAsync(dst, src Ptr, n uint64, s Stream) error {
	if r := C.call_cuMemcpyAsync(d.calls, C.CUdeviceptr(dst), C.CUdeviceptr(src), C.size_t(n), C.CUstream(s)); r != 0 {
		return d.newCallError(r, "cuMemcpyAsync", span(dst, src, n))
	}
	return nil
}

// MemcpyHtoDAsync copies n bytes from host memory. For pageable memory the call returns when the
// caller may reuse src.
func (d *Driver) MemcpyHtoDAsync(dst Ptr, src unsafe.Pointer, n uint64, s Stream) error {
	if r := C.call_cuMemcpyHtoDAsync(d.calls, C.CUdeviceptr(dst), src, C.size_t(n), C.CUstream(s)); r != 0 {
		return d.newCallError(r, "cuMemcpyHtoDAsync", at(dst, n))
	}
	return nil
}

// MemcpyRowsHtoDAsync copies n bytes from host memory as a rectangle of two rows (cuMemcpy2DAsync),
// which a copy engine moves regardless of size; the stream writes 8 bytes as a value. src must hold
// the data at the call. Linear copies below 32 KiB run on the device's SMs, and wait 2.4 ms there
// behind kernels of other processes (docs/benchmarks.md); so does a copy of 1 byte. Copies of whole
// 8-byte words at aligned addresses write each word atomically.
func (d *Driver) MemcpyRowsHtoDAsync(dst Ptr, src unsafe.Pointer, n uint64, s Stream) error {
	switch {
	case n == 1:
		return d.MemcpyHtoDAsync(dst, src, n, s)
	case n == 8 && dst%8 == 0:
		return d.StreamWriteValue64(s, dst, binary.NativeEndian.Uint64(unsafe.Slice((*byte)(src), n)))
	}
	if r := C.rowsHtoD(d.calls, C.CUdeviceptr(dst), src, C.size_t(n), C.CUstream(s)); r != 0 {
		return d.newCallError(r, "cuMemcpy2DAsync", at(dst, n))
	}
	return nil
}

// MemcpyDtoHAsync copies n bytes to host memory. For pageable memory the call returns after the
// copy.
func (d *Driver) MemcpyDtoHAsync(dst unsafe.Pointer, src Ptr, n uint64, s Stream) error {
	if r := C.call_cuMemcpyDtoHAsync(d.calls, dst, C.CUdeviceptr(src), C.size_t(n), C.CUstream(s)); r != 0 {
		return d.newCallError(r, "cuMemcpyDtoHAsync", at(src, n))
	}
	return nil
}

// MemcpyPeerAsync copies n bytes from memory of srcCtx's device to memory of dstCtx's device. Each
// context needs access to its own memory only.
func (d *Driver) MemcpyPeerAsync(dst Ptr, dstCtx Context, src Ptr, srcCtx Context, n uint64, s Stream) error {
	r := C.call_cuMemcpyPeerAsync(d.calls, C.CUdeviceptr(dst), C.CUcontext(dstCtx), C.CUdeviceptr(src),
		C.CUcontext(srcCtx), C.size_t(n), C.CUstream(s))
	if r != 0 {
		return d.newCallError(r, "cuMemcpyPeerAsync", span(dst, src, n))
	}
	return nil
}

// MemsetAsync sets n bytes to v, on the device's SMs.
func (d *Driver) MemsetAsync(p Ptr, v byte, n uint64, s Stream) error {
	if r := C.call_cuMemsetD8Async(d.calls, C.CUdeviceptr(p), C.uchar(v), C.size_t(n), C.CUstream(s)); r != 0 {
		return d.newCallError(r, "cuMemsetD8Async", at(p, n))
	}
	return nil
}

// MemcpyBatchAsync makes several copies with one call, in no defined order among the copies; each
// has the semantics of MemcpyAsync. The three lists have the same length, at least 1. Drivers
// before 12.8 return ErrNotSupported.
func (d *Driver) MemcpyBatchAsync(dst, src []Ptr, sizes []uint64, s Stream) error {
	n := len(dst)
	if n == 0 || len(src) != n || len(sizes) != n {
		return fmt.Errorf("a batch of copies to %d addresses, from %d, of %d sizes", n, len(src), len(sizes))
	}
	r := C.batch(d.calls, (*C.CUdeviceptr)(unsafe.Pointer(&dst[0])), (*C.CUdeviceptr)(unsafe.Pointer(&src[0])),
		(*C.size_t)(unsafe.Pointer(&sizes[0])), C.size_t(n), C.CUstream(s))
	if r != 0 {
		return d.newCallError(r, "cuMemcpyBatchAsync",
			fmt.Sprintf("%d copies, the first %s", n, span(dst[0], src[0], sizes[0])))
	}
	return nil
}

func span(dst, src Ptr, n uint64) string {
	return fmt.Sprintf("%s from %s to %s", humanize.IBytes(n), src, dst)
}
