package cuda

/*
#include <string.h>
#include "driver.h"

// The options' values are pointers, or numbers in the place of one.
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

// A trampoline of its own: Go could not put pointers to its memory into a list
// in its memory.
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

// Module is a CUmodule: code that was loaded into a context.
type Module uintptr

// Function is a CUfunction: a kernel of a module.
type Function uintptr

// ModuleLoadPTX compiles PTX for the current context's device and loads it
// (cuModuleLoadDataEx). The error of PTX that does not compile
// ([ErrInvalidPTX], [ErrInvalidImage]) has the compiler's log in its text.
func (d *Driver) ModuleLoadPTX(ptx string) (Module, error) {
	if strings.IndexByte(ptx, 0) >= 0 {
		return 0, fmt.Errorf("PTX of %d bytes has a zero byte in it, where the driver would end it", len(ptx))
	}
	image := append([]byte(ptx), 0)
	var log [8192]C.char
	var m C.CUmodule
	r := C.load(d.calls, &m, unsafe.Pointer(&image[0]), &log[0], C.size_t(len(log)))
	if r == 0 {
		return Module(m), nil
	}
	err := d.failed(r, "cuModuleLoadDataEx", fmt.Sprintf("%d bytes of PTX", len(ptx)))
	if text := strings.TrimSpace(C.GoString(&log[0])); text != "" {
		return 0, fmt.Errorf("%w: %s", err, text)
	}
	return 0, err
}

// ModuleGetFunction is the kernel of that name, [ErrNotFound] if the module has
// none. Under lazy loading this is the call that loads it.
func (d *Driver) ModuleGetFunction(m Module, name string) (Function, error) {
	symbol := append([]byte(name), 0)
	var f C.CUfunction
	if r := C.call_cuModuleGetFunction(d.calls, &f, C.CUmodule(m), (*C.char)(unsafe.Pointer(&symbol[0]))); r != 0 {
		return 0, d.failed(r, "cuModuleGetFunction", name)
	}
	return Function(f), nil
}

// ModuleUnload gives a module and its functions up; none may be running.
func (d *Driver) ModuleUnload(m Module) error {
	return d.result(C.call_cuModuleUnload(d.calls, C.CUmodule(m)), "cuModuleUnload")
}

// Launch gives a stream a kernel of blocks × threads (cuLaunchKernel), whose
// parameters, at most 16, are all 64 bits wide. What the kernel does wrong is
// the error of a later call, and loses the context ([Result.Sticky]).
func (d *Driver) Launch(f Function, blocks, threads uint32, s Stream, parameters ...uint64) error {
	if len(parameters) > C.MAX_PARAMETERS {
		return fmt.Errorf("kernel with %d parameters: at most %d are possible", len(parameters), C.MAX_PARAMETERS)
	}
	r := C.launch(d.calls, C.CUfunction(f), C.uint(blocks), C.uint(threads), C.CUstream(s),
		(*C.uint64_t)(unsafe.SliceData(parameters)), C.uint(len(parameters)))
	if r != 0 {
		return d.failed(r, "cuLaunchKernel", fmt.Sprintf("%d blocks of %d threads", blocks, threads))
	}
	return nil
}
