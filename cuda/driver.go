package cuda

/*
#cgo CFLAGS: -Wall -Wextra
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "driver.h"

#cgo noescape call_cuDriverGetVersion
#cgo nocallback call_cuDriverGetVersion
*/
import "C"

import (
	"fmt"
	"os"
	"unsafe"
)

// LibraryVariable is the environment variable with the library to open in place of libcuda.so.1.
const LibraryVariable = "PEERLANE_CUDA_LIBRARY"

// DefaultLibrary is the file name of the NVIDIA driver's library.
const DefaultLibrary = "libcuda.so.1"

// Driver is an opened and initialized driver API, safe for concurrent use. A Driver is never
// closed, because the library keeps running threads.
type Driver struct {
	calls   *C.peerlane_calls
	library string
}

// LibraryError reports that no CUDA library is usable.
type LibraryError struct {
	Library string // path, or name for the loader's search
	Missing string // the absent symbol; empty if the library did not load
	Reason  string // the loader's message if the library did not load
}

func (e *LibraryError) Error() string {
	if e.Missing != "" {
		return fmt.Sprintf("CUDA library %s lacks %s: Peerlane needs an NVIDIA driver of release 515 (CUDA 11.7) or newer",
			e.Library, e.Missing)
	}
	return fmt.Sprintf("CUDA library %s cannot be loaded: %s; %s", e.Library, e.Reason, e.remedy())
}

// remedy returns the remedy for a library that did not load.
func (e *LibraryError) remedy() string {
	if e.Library != DefaultLibrary {
		return "check " + LibraryVariable
	}
	return "install the NVIDIA driver, or in a container ask for the GPU (--device nvidia.com/gpu=N)"
}

// Open loads the library that PEERLANE_CUDA_LIBRARY names, by default libcuda.so.1, and calls
// cuInit. The error is a [*LibraryError], or the result of cuInit: [ErrNoDevice] without a GPU.
func Open() (*Driver, error) {
	path := os.Getenv(LibraryVariable)
	if path == "" {
		path = DefaultLibrary
	}
	return openLibrary(path)
}

// openLibrary is [Open] for a library given by path, or by a name that the
// loader searches for.
func openLibrary(path string) (*Driver, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var message [512]C.char
	var missing C.int
	calls := C.peerlane_cuda_open(name, &message[0], C.size_t(len(message)), &missing)
	if calls == nil {
		e := &LibraryError{Library: path, Reason: C.GoString(&message[0])}
		if missing != 0 {
			e.Missing, e.Reason = e.Reason, ""
		}
		return nil, e
	}
	d := &Driver{calls: calls, library: path}
	if r := C.call_cuInit(calls, 0); r != 0 {
		return nil, d.newCallError(r, "cuInit", path)
	}
	return d, nil
}

// Library returns the path or name that was opened.
func (d *Driver) Library() string { return d.library }

// Simulated reports whether the library is the simulator of package cuda/sim.
func (d *Driver) Simulated() bool { return d.calls.simulated != 0 }

// DriverVersion returns the newest CUDA version that the driver supports, 1000 × major + 10 ×
// minor: 13000 for CUDA 13.0 (cuDriverGetVersion).
func (d *Driver) DriverVersion() (int, error) {
	var v C.int
	if r := C.call_cuDriverGetVersion(d.calls, &v); r != 0 {
		return 0, d.newCallError(r, "cuDriverGetVersion", "")
	}
	return int(v), nil
}
