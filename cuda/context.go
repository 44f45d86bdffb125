package cuda

/*
#include "driver.h"

#cgo noescape call_cuCtxCreate
#cgo nocallback call_cuCtxCreate
#cgo noescape call_cuCtxGetCurrent
#cgo nocallback call_cuCtxGetCurrent
#cgo noescape call_cuMemGetInfo
#cgo nocallback call_cuMemGetInfo
*/
import "C"

import (
	"errors"
	"fmt"
)

// Context is a CUcontext. 0 means no context.
type Context uintptr

// CtxOptions are the options of [Driver.CtxCreate].
type CtxOptions struct {
	// Lean sets the limits of stack, malloc heap and printf buffer to 0, for a context that only
	// copies. On an H200 such a context takes 265 MiB of device memory instead of 526.
	Lean bool
}

// CtxCreate creates a context on dev and makes the context current on the calling thread
// (cuCtxCreate_v2).
func (d *Driver) CtxCreate(dev Device, o CtxOptions) (Context, error) {
	var ctx C.CUcontext
	if r := C.call_cuCtxCreate(d.calls, &ctx, 0, C.CUdevice(dev)); r != 0 {
		return 0, d.newCallError(r, "cuCtxCreate", on(dev))
	}
	if !o.Lean {
		return Context(ctx), nil
	}
	for _, limit := range []C.int{C.CU_LIMIT_STACK_SIZE, C.CU_LIMIT_MALLOC_HEAP_SIZE, C.CU_LIMIT_PRINTF_FIFO_SIZE} {
		if r := C.call_cuCtxSetLimit(d.calls, limit, 0); r != 0 {
			err := d.newCallError(r, "cuCtxSetLimit", fmt.Sprintf("limit %d to 0 on %s", limit, on(dev)))
			return 0, errors.Join(err, d.CtxDestroy(Context(ctx)))
		}
	}
	return Context(ctx), nil
}

// CtxDestroy destroys a context with its streams, events and memory of [Driver.MemAlloc]. The
// context must not be current on another thread.
func (d *Driver) CtxDestroy(ctx Context) error {
	return d.result(C.call_cuCtxDestroy(d.calls, C.CUcontext(ctx)), "cuCtxDestroy")
}

// CtxSetCurrent makes ctx current on the calling thread; 0 detaches the current context.
func (d *Driver) CtxSetCurrent(ctx Context) error {
	return d.result(C.call_cuCtxSetCurrent(d.calls, C.CUcontext(ctx)), "cuCtxSetCurrent")
}

// CtxGetCurrent returns the calling thread's context, or 0 without one.
func (d *Driver) CtxGetCurrent() (Context, error) {
	var ctx C.CUcontext
	if r := C.call_cuCtxGetCurrent(d.calls, &ctx); r != 0 {
		return 0, d.newCallError(r, "cuCtxGetCurrent", "")
	}
	return Context(ctx), nil
}

// CtxSynchronize waits until the current context is idle.
func (d *Driver) CtxSynchronize() error {
	return d.result(C.call_cuCtxSynchronize(d.calls), "cuCtxSynchronize")
}

// CtxEnablePeerAccess lets the current context address the memory that was
// [Driver.MemAlloc]ed in peer. Memory of [Driver.MemCreate] has
// [Driver.MemSetAccess] instead.
func (d *Driver) CtxEnablePeerAccess(peer Context) error {
	return d.result(C.call_cuCtxEnablePeerAccess(d.calls, C.CUcontext(peer), 0), "cuCtxEnablePeerAccess")
}

// MemGetInfo returns the free and total memory, in bytes, of the current context's device.
func (d *Driver) MemGetInfo() (free, total uint64, err error) {
	var f, t C.size_t
	if r := C.call_cuMemGetInfo(d.calls, &f, &t); r != 0 {
		return 0, 0, d.newCallError(r, "cuMemGetInfo", "")
	}
	return uint64(f), uint64(t), nil
}
