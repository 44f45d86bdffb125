package cuda

/*
#include <string.h>
#include "driver.h"

// Option values are pointers, or integers cast to pointers.
static CUresult load(const peerlane_calls *t, CUmodule *m, const void *image, char *log, size_t n)
{
	int options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
	void *values[] = {log, (void *)n};
	memset(log, 0, n);
	CUresult r = call_cuModuleLoadDataEx(t, m, image, 2, options, values);
	log[n - 1] = 0;
	return r;
}

#define MAX_PARAMETERS 16

// A trampoline, because Go cannot store pointers to Go memory in Go memory.
static CUresult launch(const peerlane_calls *t, CUfunction f, unsigned blocks, unsigned threads, CUstream s,
		       uint64_t *values, unsigned n)
{
	void *parameters[MAX_PARAMETERS];
	for (unsigned i = 0; i < n; i++)
		parameters[i] = &values[i];
	return call_cuLaunchKernel(t, f, blocks, 1, 1, threads, 1, 1, 0, s, parameters, NULL);
}

#cgo noescape load
#cgo nocallback load
#cgo noescape launch
#cgo nocallback launch
#cgo noescape call_cuModuleGetFunction
#cgo nocallback call_cuModuleGetFunction
*/
import "C"

import (
	"fmt"
	"strings"
	"unsafe"
)

// Module is a CUmodule: code that is loaded into a context.
type Module uintptr

// Function is a CUfunction: a kernel of a module.
type Function uintptr

// ModuleLoadPTX compiles PTX for the current context's device and loads the module
// (cuModuleLoadDataEx). An error of the compiler ([ErrInvalidPTX], [ErrInvalidImage]) includes the
// compiler's log.
func (d *Driver) ModuleLoadPTX(ptx string) (Module, error) {
	if strings.IndexByte(ptx, 0) >= 0 {
		return 0, fmt.Errorf("PTX of %d bytes contains a zero byte, where the driver would stop reading", len(ptx))
	}
	image := append([]byte(ptx), 0)
	var log [8192]C.char
	var m C.CUmodule
	r := C.load(d.calls, &m, unsafe.Pointer(&image[0]), &log[0], C.size_t(len(log)))
	if r == 0 {
		return Module(m), nil
	}
	err := d.newCallError(r, "cuModuleLoadDataEx", fmt.Sprintf("%d bytes of PTX", len(ptx)))
	if text := strings.TrimSpace(C.GoString(&log[0])); text != "" {
		return 0, &ModuleError{err, text}
	}
	return 0, err
}

// ModuleError reports a module that the driver does not compile or load.
type ModuleError struct {
	Err error
	Log string // of the driver's compiler
}

func (e *ModuleError) Error() string { return e.Err.Error() + ": " + e.Log }

// Unwrap returns the error of the call.
func (e *ModuleError) Unwrap() error { return e.Err }

// ModuleGetFunction returns the kernel with a name, or [ErrNotFound]. Under lazy loading this call
// loads the kernel.
func (d *Driver) ModuleGetFunction(m Module, name string) (Function, error) {
	symbol := append([]byte(name), 0)
	var f C.CUfunction
	if r := C.call_cuModuleGetFunction(d.calls, &f, C.CUmodule(m), (*C.char)(unsafe.Pointer(&symbol[0]))); r != 0 {
		return 0, d.newCallError(r, "cuModuleGetFunction", name)
	}
	return Function(f), nil
}

// ModuleUnload unloads a module with its functions. No function may be running.
func (d *Driver) ModuleUnload(m Module) error {
	return d.result(C.call_cuModuleUnload(d.calls, C.CUmodule(m)), "cuModuleUnload")
}

// Launch starts a kernel of blocks × threads on s (cuLaunchKernel), with at most 16 parameters of
// 64 bits. An error in the kernel appears as the error of a later call, and the context is lost
// ([Result.Sticky]).
func (d *Driver) Launch(f Function, blocks, threads uint32, s Stream, parameters ...uint64) error {
	if len(parameters) > C.MAX_PARAMETERS {
		return fmt.Errorf("kernel with %d parameters, more than %d", len(parameters), C.MAX_PARAMETERS)
	}
	r := C.launch(d.calls, C.CUfunction(f), C.uint(blocks), C.uint(threads), C.CUstream(s),
		(*C.uint64_t)(unsafe.SliceData(parameters)), C.uint(len(parameters)))
	if r != 0 {
		return d.newCallError(r, "cuLaunchKernel", fmt.Sprintf("%d blocks of %d threads", blocks, threads))
	}
	return nil
}
