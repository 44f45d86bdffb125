// Package sim provides a libcuda that works on host memory: the driver API's
// names and behaviour where there is no GPU, for tests and for `peerlane demo`.
//
// It is a shared library, written in C, that package cuda opens in place of
// libcuda.so.1, so that everything above the driver API runs unchanged. The
// memory of a device is a memfd: an export gives a real descriptor, which
// crosses processes and containers, and the memory goes with its last holder,
// also when that is killed. Streams are threads: a copy returns before its
// bytes arrive. The suite in cuda/conformance runs on the simulator and on the
// driver, and says what can be relied on.
//
// A simulated host is a directory ([Write]) with two files: host, the devices,
// and log, counters that every process of the host adds to ([ReadLog]).
// Processes find it by environment variables ([Environment]):
//
//	PEERLANE_CUDA_LIBRARY  the library; see package cuda
//	PEERLANE_SIM           the directory; log must be writable
//	PEERLANE_SIM_VISIBLE   "nodes": a process sees the devices whose node exists,
//	                       a file of any type; default: all
//	PEERLANE_SIM_DEV       where nodes are, default /dev: nvidia0, nvidia1, ... by minor number
//	CUDA_VISIBLE_DEVICES   as for CUDA: indices or UUIDs
//	PEERLANE_SIM_LATE_MS   delays every operation of a stream until somebody
//	                       waits for it, or for so many milliseconds
//	PEERLANE_SIM_BUSY      work that would wait for the time slice of another process's
//	                       kernel (libcuda/stream.c): "refuse", or waits so many milliseconds
//	PEERLANE_SIM_WRITES_ORDERING
//	                       GPU_DIRECT_RDMA_WRITES_ORDERING of each device, default 100
//	PEERLANE_SIM_FAULT     faults; the grammar is in libcuda/fault.c:
//	                       "cuMemcpyAsync:after=3:error=700;cuMemCreate:oom"
//	PEERLANE_SIM_CALLS     a file to which each call that can have a fault adds its name
//
// Of kernels it has those of package cuda/kernels, in C: it finds their names in
// PTX that it is given, and takes no other.
//
// A graph that was captured is done in the order of its capture.
//
// What it does not model: other kernels, the default stream's waiting for others,
// graphs that are built by hand, the time that things take on a GPU. Free memory is what one process knows of: others' allocations are not
// subtracted.
package sim
