package cuda

/*
#include "driver.h"

#cgo noescape call_cuGetErrorName
#cgo nocallback call_cuGetErrorName
#cgo noescape call_cuGetErrorString
#cgo nocallback call_cuGetErrorString
*/
import "C"

import (
	"fmt"
	"slices"
	"strings"
)

// Result is a CUresult other than CUDA_SUCCESS. The constants are targets for [errors.Is].
type Result int32

// Results of the driver that Peerlane distinguishes (cudaError_enum of cuda.h).
const (
	ErrInvalidValue                Result = 1
	ErrOutOfMemory                 Result = 2
	ErrNotInitialized              Result = 3
	ErrDeinitialized               Result = 4
	ErrDeviceUnavailable           Result = 46
	ErrNoDevice                    Result = 100
	ErrInvalidDevice               Result = 101
	ErrInvalidImage                Result = 200
	ErrInvalidContext              Result = 201
	ErrMapFailed                   Result = 205
	ErrUnmapFailed                 Result = 206
	ErrAlreadyMapped               Result = 208
	ErrNotMapped                   Result = 211
	ErrECCUncorrectable            Result = 214
	ErrUnsupportedLimit            Result = 215
	ErrPeerAccessUnsupported       Result = 217
	ErrInvalidPTX                  Result = 218
	ErrNVLinkUncorrectable         Result = 220
	ErrOperatingSystem             Result = 304
	ErrInvalidHandle               Result = 400
	ErrIllegalState                Result = 401
	ErrNotFound                    Result = 500
	ErrNotReady                    Result = 600
	ErrIllegalAddress              Result = 700
	ErrPeerAccessAlreadyEnabled    Result = 704
	ErrContextIsDestroyed          Result = 709
	ErrHostMemoryAlreadyRegistered Result = 712
	ErrHostMemoryNotRegistered     Result = 713
	ErrHardwareStackError          Result = 714
	ErrMisalignedAddress           Result = 716
	ErrLaunchFailed                Result = 719
	ErrNotPermitted                Result = 800
	ErrNotSupported                Result = 801
	ErrSystemNotReady              Result = 802
	ErrSystemDriverMismatch        Result = 803
	ErrStreamCaptureUnsupported    Result = 900
	ErrStreamCaptureInvalidated    Result = 901
	ErrStreamCaptureMerge          Result = 902
	ErrStreamCaptureUnmatched      Result = 903
	ErrStreamCaptureUnjoined       Result = 904
	ErrStreamCaptureIsolation      Result = 905
	ErrCapturedEvent               Result = 907
	ErrStreamCaptureWrongThread    Result = 908
	ErrUnknown                     Result = 999
)

var names = map[Result]string{
	ErrInvalidValue:                "CUDA_ERROR_INVALID_VALUE",
	ErrOutOfMemory:                 "CUDA_ERROR_OUT_OF_MEMORY",
	ErrNotInitialized:              "CUDA_ERROR_NOT_INITIALIZED",
	ErrDeinitialized:               "CUDA_ERROR_DEINITIALIZED",
	ErrDeviceUnavailable:           "CUDA_ERROR_DEVICE_UNAVAILABLE",
	ErrNoDevice:                    "CUDA_ERROR_NO_DEVICE",
	ErrInvalidDevice:               "CUDA_ERROR_INVALID_DEVICE",
	ErrInvalidImage:                "CUDA_ERROR_INVALID_IMAGE",
	ErrInvalidContext:              "CUDA_ERROR_INVALID_CONTEXT",
	ErrMapFailed:                   "CUDA_ERROR_MAP_FAILED",
	ErrUnmapFailed:                 "CUDA_ERROR_UNMAP_FAILED",
	ErrAlreadyMapped:               "CUDA_ERROR_ALREADY_MAPPED",
	ErrNotMapped:                   "CUDA_ERROR_NOT_MAPPED",
	ErrECCUncorrectable:            "CUDA_ERROR_ECC_UNCORRECTABLE",
	ErrUnsupportedLimit:            "CUDA_ERROR_UNSUPPORTED_LIMIT",
	ErrPeerAccessUnsupported:       "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
	ErrInvalidPTX:                  "CUDA_ERROR_INVALID_PTX",
	ErrNVLinkUncorrectable:         "CUDA_ERROR_NVLINK_UNCORRECTABLE",
	ErrOperatingSystem:             "CUDA_ERROR_OPERATING_SYSTEM",
	ErrInvalidHandle:               "CUDA_ERROR_INVALID_HANDLE",
	ErrIllegalState:                "CUDA_ERROR_ILLEGAL_STATE",
	ErrNotFound:                    "CUDA_ERROR_NOT_FOUND",
	ErrNotReady:                    "CUDA_ERROR_NOT_READY",
	ErrIllegalAddress:              "CUDA_ERROR_ILLEGAL_ADDRESS",
	ErrPeerAccessAlreadyEnabled:    "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
	ErrContextIsDestroyed:          "CUDA_ERROR_CONTEXT_IS_DESTROYED",
	ErrHostMemoryAlreadyRegistered: "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
	ErrHostMemoryNotRegistered:     "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
	ErrHardwareStackError:          "CUDA_ERROR_HARDWARE_STACK_ERROR",
	ErrMisalignedAddress:           "CUDA_ERROR_MISALIGNED_ADDRESS",
	ErrLaunchFailed:                "CUDA_ERROR_LAUNCH_FAILED",
	ErrNotPermitted:                "CUDA_ERROR_NOT_PERMITTED",
	ErrNotSupported:                "CUDA_ERROR_NOT_SUPPORTED",
	ErrSystemNotReady:              "CUDA_ERROR_SYSTEM_NOT_READY",
	ErrSystemDriverMismatch:        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
	ErrStreamCaptureUnsupported:    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
	ErrStreamCaptureInvalidated:    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
	ErrStreamCaptureMerge:          "CUDA_ERROR_STREAM_CAPTURE_MERGE",
	ErrStreamCaptureUnmatched:      "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
	ErrStreamCaptureUnjoined:       "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
	ErrStreamCaptureIsolation:      "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
	ErrCapturedEvent:               "CUDA_ERROR_CAPTURED_EVENT",
	ErrStreamCaptureWrongThread:    "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
	ErrUnknown:                     "CUDA_ERROR_UNKNOWN",
}

func (r Result) Error() string {
	if name, ok := names[r]; ok {
		return fmt.Sprintf("%s (%d)", name, int32(r))
	}
	return fmt.Sprintf("CUDA error %d", int32(r))
}

// Sticky reports whether the context is lost: later calls on the context return the same result,
// and only a new process reliably recovers.
func (r Result) Sticky() bool {
	switch r {
	case ErrECCUncorrectable, ErrNVLinkUncorrectable, ErrIllegalAddress, ErrHardwareStackError,
		ErrMisalignedAddress, ErrLaunchFailed, ErrUnknown:
		return true
	case 702, 710, 715, 717, 718, 721: // caused by kernels only
		return true
	}
	return false
}

// deviceLost reports a failure of the device rather than of the program: an uncorrectable error of
// memory or NVLink, or no answer, which the driver reports as CUDA_ERROR_UNKNOWN after a GPU has
// left the bus.
func (r Result) deviceLost() bool {
	return r == ErrECCUncorrectable || r == ErrNVLinkUncorrectable || r == ErrUnknown
}

// Sticky reports whether the tree of err contains a sticky [Result].
func Sticky(err error) bool { return anyResult(err, Result.Sticky) }

// DeviceLost reports whether the tree of err contains a [Result] with DeviceLost.
func DeviceLost(err error) bool { return anyResult(err, Result.deviceLost) }

func anyResult(err error, match func(Result) bool) bool {
	switch e := err.(type) {
	case nil:
		return false
	case Result:
		return match(e)
	case interface{ Unwrap() error }:
		return anyResult(e.Unwrap(), match)
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), func(err error) bool { return anyResult(err, match) })
	}
	return false
}

// CallError is a failed driver call. It unwraps to the [Result].
type CallError struct {
	Call   string // "cuMemCreate"
	On     string // object of the call, for messages; may be empty
	Result Result
	Name   string // the driver's name of the result, "CUDA_ERROR_OUT_OF_MEMORY"
	Text   string // the driver's description: "out of memory"
}

func (e *CallError) Error() string {
	var b strings.Builder
	b.WriteString(e.Call)
	if e.On != "" {
		b.WriteString(" (" + e.On + ")")
	}
	fmt.Fprintf(&b, ": %s (%d)", e.Name, int32(e.Result))
	if e.Text != "" {
		b.WriteString(": " + e.Text)
	}
	return b.String()
}

// ErrorObject returns the call, as the object of an error that a relay sends.
func (e *CallError) ErrorObject() string { return e.Call }

// Unwrap returns the Result, for [errors.Is].
func (e *CallError) Unwrap() error { return e.Result }

// newCallError makes the error of a call that returned r, which is not CUDA_SUCCESS.
func (d *Driver) newCallError(r C.CUresult, call, on string) error {
	e := &CallError{Call: call, On: on, Result: Result(r)}
	e.Name, e.Text = d.Describe(e.Result)
	if e.Name == "" {
		e.Name = "unknown result"
	}
	return e
}

// Describe returns the driver's name and description of a result (cuGetErrorName,
// cuGetErrorString), both empty for an unknown result.
func (d *Driver) Describe(r Result) (name, text string) {
	var s *C.char
	if C.call_cuGetErrorName(d.calls, C.CUresult(r), &s) == 0 && s != nil {
		name = C.GoString(s)
	}
	s = nil
	if C.call_cuGetErrorString(d.calls, C.CUresult(r), &s) == 0 && s != nil {
		text = C.GoString(s)
	}
	return name, text
}

// result returns nil for CUDA_SUCCESS, and otherwise the error of the call.
func (d *Driver) result(r C.CUresult, call string) error {
	if r == 0 {
		return nil
	}
	return d.newCallError(r, call, "")
}
