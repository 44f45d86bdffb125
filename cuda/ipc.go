package cuda

/*
#include "driver.h"

#cgo noescape call_cuIpcGetMemHandle
#cgo nocallback call_cuIpcGetMemHandle
#cgo noescape call_cuIpcOpenMemHandle
#cgo nocallback call_cuIpcOpenMemHandle
*/
import "C"

import "unsafe"

// IPCMemHandle identifies memory of [Driver.MemAlloc] in other processes. A handle is no secret:
// any process with the handle, even guessed, can try to open the memory.
type IPCMemHandle [64]byte

// IPCGetMemHandle returns a handle of the whole allocation that contains p.
func (d *Driver) IPCGetMemHandle(p Ptr) (IPCMemHandle, error) {
	var h C.CUipcMemHandle
	if r := C.call_cuIpcGetMemHandle(d.calls, &h, C.CUdeviceptr(p)); r != 0 {
		return IPCMemHandle{}, d.newCallError(r, "cuIpcGetMemHandle", p.String())
	}
	return *(*IPCMemHandle)(unsafe.Pointer(&h)), nil
}

// IPCOpenMemHandle maps the allocation of another process for the current context. The error is
// [ErrMapFailed] or similar if the driver lets the two processes share no memory. The process that
// made the handle cannot open it. Access after the other process frees the memory is undefined.
func (d *Driver) IPCOpenMemHandle(handle IPCMemHandle) (Ptr, error) {
	var p C.CUdeviceptr
	r := C.call_cuIpcOpenMemHandle(d.calls, &p, *(*C.CUipcMemHandle)(unsafe.Pointer(&handle)),
		C.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
	if r != 0 {
		return 0, d.newCallError(r, "cuIpcOpenMemHandle", "")
	}
	return Ptr(p), nil
}

// IPCCloseMemHandle reverts one [Driver.IPCOpenMemHandle], in the same context.
func (d *Driver) IPCCloseMemHandle(p Ptr) error {
	if r := C.call_cuIpcCloseMemHandle(d.calls, C.CUdeviceptr(p)); r != 0 {
		return d.newCallError(r, "cuIpcCloseMemHandle", p.String())
	}
	return nil
}
