package cuda

/*
#include "driver.h"

#cgo noescape call_cuMemcpyHtoDAsync
#cgo nocallback call_cuMemcpyHtoDAsync
#cgo noescape call_cuMemcpyDtoHAsync
#cgo nocallback call_cuMemcpyDtoHAsync

// A trampoline of its own: Go could not put its pointer into a structure of its
// own memory. Rows are two, since the driver makes a linear copy of one, and are whole
// words where all is. What does not divide so takes two such copies that overlap.
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

// All copies have the same attributes. Those arrays are Go's; the call keeps none.
static CUresult batch(const peerlane_calls *t, CUdeviceptr *dst, CUdeviceptr *src, size_t *sizes, size_t n, CUstream s)
{
	CUmemcpyAttributes a = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, .flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE};
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

// MemcpyRowsHtoDAsync copies n bytes from host memory, which have to be there when it is
// called, as a rectangle of two rows (cuMemcpy2DAsync), which a copy engine moves
// whatever its size is; 8 bytes are a value that the stream writes. Less than 32 KiB in
// one row are moved with the device's SMs, and wait 2.4 ms there for the kernels of other
// processes, by whichever call (docs/benchmarks.md). A single byte is.
// Of whole words, 8 bytes, at an aligned address each is written at once.
func (d *Driver) MemcpyRowsHtoDAsync(dst Ptr, src unsafe.Pointer, n uint64, s Stream) error {
	switch {
	case n == 1:
		return d.MemcpyHtoDAsync(dst, src, n, s)
	case n == 8 && dst%8 == 0:
		return d.StreamWriteValue64(s, dst, binary.NativeEndian.Uint64(unsafe.Slice((*byte)(src), n)))
	}
	if r := C.rowsHtoD(d.calls, C.CUdeviceptr(dst), src, C.size_t(n), C.CUstream(s)); r != 0 {
		return d.failed(r, "cuMemcpy2DAsync", at(dst, n))
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

// MemsetAsync sets n bytes to v. It uses the device's SMs.
func (d *Driver) MemsetAsync(p Ptr, v byte, n uint64, s Stream) error {
	if r := C.call_cuMemsetD8Async(d.calls, C.CUdeviceptr(p), C.uchar(v), C.size_t(n), C.CUstream(s)); r != 0 {
		return d.failed(r, "cuMemsetD8Async", at(p, n))
	}
	return nil
}

// MemcpyBatchAsync makes several copies with one call, as MemcpyAsync makes each; among
// themselves they have no order. The three lists have the same length, 1 or more. A
// driver before 12.8 has ErrNotSupported.
func (d *Driver) MemcpyBatchAsync(dst, src []Ptr, sizes []uint64, s Stream) error {
	n := len(dst)
	if n == 0 || len(src) != n || len(sizes) != n {
		return fmt.Errorf("a batch of copies to %d addresses, from %d, of %d sizes", n, len(src), len(sizes))
	}
	r := C.batch(d.calls, (*C.CUdeviceptr)(unsafe.Pointer(&dst[0])), (*C.CUdeviceptr)(unsafe.Pointer(&src[0])),
		(*C.size_t)(unsafe.Pointer(&sizes[0])), C.size_t(n), C.CUstream(s))
	if r != 0 {
		return d.failed(r, "cuMemcpyBatchAsync", fmt.Sprintf("%d copies, the first %s", n, span(dst[0], src[0], sizes[0])))
	}
	return nil
}

func span(dst, src Ptr, n uint64) string {
	return fmt.Sprintf("%s from %s to %s", humanize.IBytes(n), src, dst)
}
