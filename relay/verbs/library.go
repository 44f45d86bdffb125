package verbs

/*
#cgo CFLAGS: -Wall -Wextra
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "calls.h"
*/
import "C"

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/peerlane/peerlane/internal/fault"
)

// LibraryVariable names the environment variable that says which library to open in
// place of libibverbs.so.1. It is for tests.
const LibraryVariable = "PEERLANE_VERBS_LIBRARY"

// ErrSoftwareDevice is the cause of a refused software device.
var ErrSoftwareDevice = errors.New(
	"it is the software device of `peerlane demo` and `peerlane bench`, and other relays " +
		"do not use it",
)

// SoftwareVariable names the environment variable without which Open refuses the software device
// (package softdevice); its value is SoftwareAllowed. `peerlane demo`, `peerlane bench` and tests
// set the variable for relays: no relay of a tenant's container moves data by software by mistake.
const (
	SoftwareVariable = "PEERLANE_SOFTWARE_DEVICE"
	SoftwareAllowed  = "allow"
)

// Files of rdma-core.
const (
	defaultLibrary = "libibverbs.so.1"
	managerLibrary = "librdmacm.so.1"
)

// Library is an opened libibverbs. It is safe for use from many goroutines, and is
// never closed.
type Library struct {
	calls *C.peerlane_verbs
	path  string
}

// loadError says that a library cannot be used.
type loadError struct {
	Library string // what was opened: a path, or a name for the loader's search
	Missing string // the symbol that it lacks; empty if it could not be loaded
	Reason  string // the loader's message, if it could not be loaded
}

func (e *loadError) Error() string {
	if e.Missing != "" {
		return fmt.Sprintf("%s lacks %s: Peerlane needs rdma-core 32 or newer", e.Library, e.Missing)
	}
	remedy := "check " + LibraryVariable
	switch e.Library {
	case defaultLibrary:
		remedy = "install rdma-core's libibverbs and the providers of the host's NICs (Debian: libibverbs1, " +
			"ibverbs-providers; RPM: libibverbs)"
	case managerLibrary:
		remedy = "install rdma-core's librdmacm (Debian: librdmacm1; RPM: librdmacm)"
	}
	return fmt.Sprintf("%s cannot be loaded: %s; %s", e.Library, e.Reason, remedy)
}

// Open loads the library that PEERLANE_VERBS_LIBRARY names, else libibverbs.so.1. The
// error of a library that cannot be loaded is a [*loadError].
func Open() (*Library, error) {
	l, err := OpenLibrary(cmp.Or(os.Getenv(LibraryVariable), defaultLibrary))
	if err == nil && l.Software() && os.Getenv(SoftwareVariable) != SoftwareAllowed {
		return nil, &fault.Error{Operation: "open", Object: l.path, Cause: ErrSoftwareDevice,
			Remedy: "remove " + LibraryVariable + " from relay.environment in config.toml"}
	}
	return l, err
}

// OpenLibrary is [Open] for a library given by path, or by a name that the loader
// searches for.
func OpenLibrary(path string) (*Library, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var message [512]C.char
	var missing C.int
	calls := C.peerlane_verbs_open(name, &message[0], C.size_t(len(message)), &missing)
	if calls == nil {
		return nil, libraryError(path, C.GoString(&message[0]), missing != 0)
	}
	return &Library{calls: calls, path: path}, nil
}

func libraryError(path, message string, missing bool) error {
	if missing {
		return &loadError{Library: path, Missing: message}
	}
	return &loadError{Library: path, Reason: message}
}

// location is the path or name that was opened.
func (l *Library) location() string { return l.path }

// Software reports whether the library is that of package softdevice.
func (l *Library) Software() bool { return l.calls.software != 0 }
