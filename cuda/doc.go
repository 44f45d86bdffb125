// Package cuda is a thin binding of the CUDA driver API, with one method for each call, named after
// the call. Errors are the driver's results.
//
// [Open] opens the library at run time (dlopen): programs build without a CUDA toolkit and start on
// hosts without a driver. The library is libcuda.so.1, or the value of PEERLANE_CUDA_LIBRARY.
// Package cuda/sim provides a simulator on host memory. The suite in cuda/conformance runs on both
// the simulator and the driver.
//
// # Threads and contexts
//
// A [Driver] is safe for concurrent use. CUDA keeps the current context per operating system
// thread, and goroutines move between threads: call [runtime.LockOSThread] before
// [Driver.CtxSetCurrent], and keep the lock while the context is in use. Streams and events belong
// to a context, and most but not all calls on a stream or event ignore the current context; so set
// the context on every thread that calls the driver.
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
// Structures and constants match cuda.h of CUDA 11.7 to 13; sizes are in bytes.
package cuda
