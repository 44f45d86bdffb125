package cuda

/*
#include "driver.h"

#include <string.h>

#cgo noescape call_cuStreamCreate
#cgo nocallback call_cuStreamCreate
#cgo noescape call_cuEventCreate
#cgo nocallback call_cuEventCreate
#cgo noescape call_cuIpcGetEventHandle
#cgo nocallback call_cuIpcGetEventHandle
#cgo noescape call_cuIpcOpenEventHandle
#cgo nocallback call_cuIpcOpenEventHandle

// The list is built here: Go could not pass it without an allocation.
static CUresult writeWords(const peerlane_calls *t, CUstream s, CUdeviceptr p, const void *words, unsigned n, CUdeviceptr mark, uint64_t value)
{
	CUstreamBatchMemOpParams list[9] = {{0}};
	uint64_t word;

	if (n > 8)
		return CUDA_ERROR_NOT_SUPPORTED;
	for (unsigned i = 0; i < n; i++) {
		memcpy(&word, (const char *)words + 8 * i, 8);
		list[i] = (CUstreamBatchMemOpParams){.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64, .address = p + 8 * i, .value64 = word};
	}
	list[n] = (CUstreamBatchMemOpParams){.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64, .address = mark, .value64 = value};
	return call_cuStreamBatchMemOp(t, s, n + 1, list, 0);
}

#cgo noescape writeWords
#cgo nocallback writeWords
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// Stream is a CUstream: work in order. 0 is the context's legacy default
// stream.
type Stream uintptr

// Event is a CUevent: a point in a stream's work.
type Event uintptr

// StreamCreate creates a stream of the current context that does not wait for
// the default stream (CU_STREAM_NON_BLOCKING).
func (d *Driver) StreamCreate() (Stream, error) {
	var s C.CUstream
	if r := C.call_cuStreamCreate(d.calls, &s, C.CU_STREAM_NON_BLOCKING); r != 0 {
		return 0, d.newCallError(r, "cuStreamCreate", "")
	}
	return Stream(s), nil
}

// StreamDestroy destroys a stream after its work completes. The call does not wait.
func (d *Driver) StreamDestroy(s Stream) error {
	return d.result(C.call_cuStreamDestroy(d.calls, C.CUstream(s)), "cuStreamDestroy")
}

// StreamSynchronize waits for the work of the stream.
func (d *Driver) StreamSynchronize(s Stream) error {
	return d.result(C.call_cuStreamSynchronize(d.calls, C.CUstream(s)), "cuStreamSynchronize")
}

// StreamQuery reports whether the stream is idle.
func (d *Driver) StreamQuery(s Stream) (bool, error) {
	return d.ready(C.call_cuStreamQuery(d.calls, C.CUstream(s)), "cuStreamQuery")
}

// StreamWaitEvent makes later work of the stream wait for the event's latest
// record.
func (d *Driver) StreamWaitEvent(s Stream, e Event) error {
	return d.result(C.call_cuStreamWaitEvent(d.calls, C.CUstream(s), C.CUevent(e), 0), "cuStreamWaitEvent")
}

// StreamWriteValue64 writes v to addr, a multiple of 8, after earlier work of the stream is
// complete and visible.
func (d *Driver) StreamWriteValue64(s Stream, addr Ptr, v uint64) error {
	r := C.call_cuStreamWriteValue64(d.calls, C.CUstream(s), C.CUdeviceptr(addr), C.uint64_t(v),
		C.CU_STREAM_WRITE_VALUE_DEFAULT)
	if r != 0 {
		return d.newCallError(r, "cuStreamWriteValue64", fmt.Sprintf("%d to %s", v, addr))
	}
	return nil
}

// MaxWords is the maximum number of words of StreamWriteWords.
const MaxWords = 8

// StreamWriteWords writes n words of 8 bytes, at most MaxWords, from host memory to addr, and then
// value to mark; addr and mark are multiples of 8. The writes run after all earlier work of the
// stream, in this order, and each word is written whole. The caller may change the host memory
// after the call. Drivers before 11.7 return ErrNotSupported.
func (d *Driver) StreamWriteWords(s Stream, addr Ptr, words unsafe.Pointer, n int, mark Ptr, value uint64) error {
	r := C.writeWords(d.calls, C.CUstream(s), C.CUdeviceptr(addr), words, C.uint(n), C.CUdeviceptr(mark),
		C.uint64_t(value))
	if r != 0 {
		return d.newCallError(r, "cuStreamBatchMemOp", at(addr, uint64(8*n)))
	}
	return nil
}

// StreamWaitValue64 makes later work of the stream wait until the value at addr, a multiple of 8,
// is at least v: until int64(value-v) >= 0, so that values may wrap around.
func (d *Driver) StreamWaitValue64(s Stream, addr Ptr, v uint64) error {
	r := C.call_cuStreamWaitValue64(d.calls, C.CUstream(s), C.CUdeviceptr(addr), C.uint64_t(v), C.CU_STREAM_WAIT_VALUE_GEQ)
	if r != 0 {
		return d.newCallError(r, "cuStreamWaitValue64", fmt.Sprintf("%d at %s", v, addr))
	}
	return nil
}

// StreamWaitBits64 makes later work of the stream wait until at least one bit of mask is set in the
// value at addr, a multiple of 8.
func (d *Driver) StreamWaitBits64(s Stream, addr Ptr, mask uint64) error {
	r := C.call_cuStreamWaitValue64(d.calls, C.CUstream(s), C.CUdeviceptr(addr), C.uint64_t(mask),
		C.CU_STREAM_WAIT_VALUE_AND)
	if r != 0 {
		return d.newCallError(r, "cuStreamWaitValue64", fmt.Sprintf("bits %#x at %s", mask, addr))
	}
	return nil
}

// EventOptions are the options of [Driver.EventCreate].
type EventOptions struct {
	Interprocess bool // supports IPCGetEventHandle
}

// EventCreate creates an event of the current context, without timing.
func (d *Driver) EventCreate(o EventOptions) (Event, error) {
	flags := C.uint(C.CU_EVENT_DISABLE_TIMING)
	if o.Interprocess {
		flags |= C.CU_EVENT_INTERPROCESS
	}
	var e C.CUevent
	if r := C.call_cuEventCreate(d.calls, &e, flags); r != 0 {
		return 0, d.newCallError(r, "cuEventCreate", "")
	}
	return Event(e), nil
}

// EventDestroy destroys an event; a pending record completes.
func (d *Driver) EventDestroy(e Event) error {
	return d.result(C.call_cuEventDestroy(d.calls, C.CUevent(e)), "cuEventDestroy")
}

// EventRecord marks the end of the present work of the stream.
func (d *Driver) EventRecord(e Event, s Stream) error {
	return d.result(C.call_cuEventRecord(d.calls, C.CUevent(e), C.CUstream(s)), "cuEventRecord")
}

// EventQuery reports whether the work before the latest record is done. An
// event that was never recorded is done.
func (d *Driver) EventQuery(e Event) (bool, error) {
	return d.ready(C.call_cuEventQuery(d.calls, C.CUevent(e)), "cuEventQuery")
}

// EventSynchronize waits for the work before the latest record.
func (d *Driver) EventSynchronize(e Event) error {
	return d.result(C.call_cuEventSynchronize(d.calls, C.CUevent(e)), "cuEventSynchronize")
}

// IPCGetEventHandle returns a handle of an interprocess event, for another process of the same user
// that shares /dev/shm.
func (d *Driver) IPCGetEventHandle(e Event) ([64]byte, error) {
	var h C.CUipcEventHandle
	if r := C.call_cuIpcGetEventHandle(d.calls, &h, C.CUevent(e)); r != 0 {
		return [64]byte{}, d.newCallError(r, "cuIpcGetEventHandle", "")
	}
	return *(*[64]byte)(unsafe.Pointer(&h)), nil
}

// IPCOpenEventHandle opens another process's event. The error is [ErrMapFailed] if the processes do
// not share /dev/shm or belong to different users.
func (d *Driver) IPCOpenEventHandle(handle [64]byte) (Event, error) {
	var e C.CUevent
	if r := C.call_cuIpcOpenEventHandle(d.calls, &e, *(*C.CUipcEventHandle)(unsafe.Pointer(&handle))); r != 0 {
		return 0, d.newCallError(r, "cuIpcOpenEventHandle", "")
	}
	return Event(e), nil
}

// ready distinguishes CUDA_SUCCESS from CUDA_ERROR_NOT_READY, which is no failure.
func (d *Driver) ready(r C.CUresult, call string) (bool, error) {
	switch Result(r) {
	case 0:
		return true, nil
	case ErrNotReady:
		return false, nil
	}
	return false, d.newCallError(r, call, "")
}
