// Package sim provides a libcuda that works on host memory: the driver API's
// names and behaviour where there is no GPU, for tests and for `peerlane demo`.
//
// Package cuda opens this shared library, written in C, in place of libcuda.so.1, so that all code
// above the driver API runs unchanged. The memory of a device is a memfd: an export is a real
// descriptor, which crosses processes and containers, and the kernel frees the memory with the last
// holder, even after a kill. Streams are threads: a copy returns before the data arrives. The suite
// in cuda/conformance runs on the simulator and on the driver, and specifies the properties of
// both.
//
// A simulated host is a directory ([Write]) with two files: host, the devices, and log, counters
// that every process of the host increments ([ReadLog]). Environment variables ([Environment]) tell
// processes the directory:
//
//	PEERLANE_CUDA_LIBRARY  the library; see package cuda
//	PEERLANE_SIM           the directory; log must be writable
//	PEERLANE_SIM_VISIBLE   "nodes": a process sees the devices whose node exists,
//	                       a file of any type; default: all
//	PEERLANE_SIM_DEV       where nodes are, default /dev: nvidia0, nvidia1, ... by minor number
//	CUDA_VISIBLE_DEVICES   as for CUDA: indices or UUIDs
//	PEERLANE_SIM_LATE_MS   delays every operation of a stream until a call
//	                       waits for it, at most by this number of milliseconds
//	PEERLANE_SIM_BUSY      work that would wait for the time slice of another process's
//	                       kernel (libcuda/stream.c): "refuse", or its delay in milliseconds
//	PEERLANE_SIM_WRITES_ORDERING
//	                       GPU_DIRECT_RDMA_WRITES_ORDERING of each device, default 100
//	PEERLANE_SIM_APERTURE  "refuse": no memory is mapped through BAR1
//	PEERLANE_SIM_FAULT     faults; the grammar is in libcuda/fault.c:
//	                       "cuMemcpyAsync:after=3:error=700;cuMemCreate:oom"
//	PEERLANE_SIM_CALLS     a file to which each call that can have a fault adds its name
//
// The library of folder forward gives the calls of another library, such as the real driver, the
// same faults.
//
// The simulator implements the kernels of package cuda/kernels in C. A module is PTX with the names
// of these kernels; the simulator rejects other kernels.
//
// A captured graph runs in the order of its capture.
//
// Not modelled: other kernels, the synchronization of the default stream with other streams, graphs
// built by hand, and durations on a GPU. Free memory subtracts the allocations of the calling
// process only.
package sim
