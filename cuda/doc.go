// Package cuda is a thin binding of the CUDA driver API: one method a call,
// named after it, with the driver's own error as result.
//
// The library is opened at run time (dlopen), so that a program which uses the
// package builds without a CUDA toolkit and starts on a host without a driver.
// [Open] loads libcuda.so.1, or the library that PEERLANE_CUDA_LIBRARY names:
// package cuda/sim provides one that works on host memory. Whatever runs on
// the simulator is checked by the suite in cuda/conformance, which runs on the
// driver as well.
//
// # Threads and contexts
//
// A [Driver] may be used from any number of goroutines. But CUDA keeps the
// current context per operating system thread, and a goroutine moves between
// threads: one that makes a context current calls [runtime.LockOSThread]
// first, and stays locked as long as it relies on it. Streams and events
// belong to a context, and calls that take one use it whatever is current in
// most, but not in all cases; so set the context on every thread that works.
//
// # Memory and addresses
//
// A [Ptr] is an address of the unified address space: of a device, or of host
// memory that was allocated or registered with CUDA ([Driver.MemHostAlloc],
// [Driver.MemHostRegister]). The host must not dereference a device's.
//
// Asynchronous copies are asynchronous only to and from such host memory. Go's
// own memory may be passed to [Driver.MemcpyHtoDAsync] and
// [Driver.MemcpyDtoHAsync], because CUDA has finished with pageable memory when
// the call returns.
//
// Structures and constants are those of cuda.h for CUDA 11.7 to 13; sizes are
// in bytes.
package cuda
