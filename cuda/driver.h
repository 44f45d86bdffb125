// The part of the CUDA driver API that Peerlane calls: a table of function pointers that
// driver.c fills from a library opened at run time, and a trampoline for each entry,
// because Go cannot call a C pointer.
//
// Layouts and numbers are those of cuda.h, CUDA 11.7 to 13, on 64-bit Linux. In cuda.h,
// handles (context, stream, event) are opaque pointers; here the handles are integers of
// the same size, so that Go's garbage collector never sees them.
#ifndef PEERLANE_CUDA_DRIVER_H
#define PEERLANE_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uintptr_t CUcontext;
typedef uintptr_t CUstream;
typedef uintptr_t CUevent;
typedef uintptr_t CUmodule;
typedef uintptr_t CUfunction;
typedef uintptr_t CUgraph;
typedef uintptr_t CUgraphExec;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;

typedef struct { unsigned char bytes[16]; } CUuuid;
typedef struct { unsigned char reserved[64]; } CUipcEventHandle;
typedef struct { unsigned char reserved[64]; } CUipcMemHandle;

typedef struct {
	int type; // CU_MEM_LOCATION_TYPE_DEVICE
	int id;
} CUmemLocation;

typedef struct {
	int type;                 // CU_MEM_ALLOCATION_TYPE_PINNED
	int requestedHandleTypes; // CU_MEM_HANDLE_TYPE_*
	CUmemLocation location;
	void *win32HandleMetaData;
	struct {
		unsigned char compressionType;
		unsigned char gpuDirectRDMACapable;
		unsigned short usage;
		unsigned char reserved[4];
	} allocFlags;
} CUmemAllocationProp;

typedef struct {
	CUmemLocation location;
	int flags; // CU_MEM_ACCESS_FLAGS_PROT_*
} CUmemAccessDesc;

typedef struct {
	size_t srcXInBytes, srcY;
	int srcMemoryType; // CU_MEMORYTYPE_*
	const void *srcHost;
	CUdeviceptr srcDevice;
	void *srcArray;
	size_t srcPitch;
	size_t dstXInBytes, dstY;
	int dstMemoryType;
	void *dstHost;
	CUdeviceptr dstDevice;
	void *dstArray;
	size_t dstPitch;
	size_t WidthInBytes, Height;
} CUDA_MEMCPY2D;

typedef struct {
	int srcAccessOrder; // CU_MEMCPY_SRC_ACCESS_ORDER_*
	CUmemLocation srcLocHint, dstLocHint;
	unsigned flags; // CU_MEMCPY_FLAG_*
} CUmemcpyAttributes;

// CUstreamBatchMemOpParams is a union in cuda.h; this is the member writeValue.
typedef struct {
	int operation; // CU_STREAM_MEM_OP_*
	CUdeviceptr address;
	uint64_t value64;
	unsigned flags;
	CUdeviceptr alias;
	uint64_t rest;
} CUstreamBatchMemOpParams;

_Static_assert(sizeof(CUstreamBatchMemOpParams) == 48, "CUstreamBatchMemOpParams of cuda.h has 48 bytes");
_Static_assert(sizeof(CUmemcpyAttributes) == 24, "CUmemcpyAttributes of cuda.h has 24 bytes");
_Static_assert(sizeof(CUDA_MEMCPY2D) == 128, "CUDA_MEMCPY2D of cuda.h has 128 bytes");
_Static_assert(sizeof(CUmemAllocationProp) == 32, "CUmemAllocationProp of cuda.h has 32 bytes");
_Static_assert(offsetof(CUmemAllocationProp, allocFlags) == 24, "allocFlags is at 24");
_Static_assert(sizeof(CUmemAccessDesc) == 12, "CUmemAccessDesc of cuda.h has 12 bytes");

enum {
	CU_MEM_ALLOCATION_TYPE_PINNED = 1,
	CU_MEM_LOCATION_TYPE_DEVICE = 1,
	CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
	CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
	CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
	CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
	CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1,
	CU_MEMORYTYPE_HOST = 1,
	CU_MEMORYTYPE_DEVICE = 2,
	CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6,
	CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
	CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
	CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE = 15,
	CU_LIMIT_STACK_SIZE = 0,
	CU_LIMIT_PRINTF_FIFO_SIZE = 1,
	CU_LIMIT_MALLOC_HEAP_SIZE = 2,
	CUDA_ERROR_NOT_SUPPORTED = 801,
	CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
	CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE = 1,
	CU_MEMHOSTALLOC_PORTABLE = 1,
	CU_MEMHOSTALLOC_DEVICEMAP = 2,
	CU_MEMHOSTREGISTER_PORTABLE = 1,
	CU_MEMHOSTREGISTER_DEVICEMAP = 2,
	CU_STREAM_NON_BLOCKING = 1,
	CU_STREAM_WAIT_VALUE_GEQ = 0,
	CU_STREAM_WAIT_VALUE_AND = 2,
	CU_STREAM_WRITE_VALUE_DEFAULT = 0,
	CU_STREAM_MEM_OP_WRITE_VALUE_64 = 5,
	CU_EVENT_DISABLE_TIMING = 2,
	CU_EVENT_INTERPROCESS = 4,
	CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1,
	CU_JIT_ERROR_LOG_BUFFER = 5,
	CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6,
};

// CALLS lists every call: X(name, symbol, parameters, arguments). The symbol is
// the version of the call that cuda.h's macros choose.
#define A(...) __VA_ARGS__
#define CALLS(X) \
X(cuInit, "cuInit", A(unsigned flags), A(flags)) \
X(cuDriverGetVersion, "cuDriverGetVersion", A(int *version), A(version)) \
X(cuGetErrorName, "cuGetErrorName", A(CUresult r, const char **s), A(r, s)) \
X(cuGetErrorString, "cuGetErrorString", A(CUresult r, const char **s), A(r, s)) \
X(cuDeviceGetCount, "cuDeviceGetCount", A(int *n), A(n)) \
X(cuDeviceGet, "cuDeviceGet", A(CUdevice *dev, int ordinal), A(dev, ordinal)) \
X(cuDeviceGetByPCIBusId, "cuDeviceGetByPCIBusId", A(CUdevice *dev, const char *id), A(dev, id)) \
X(cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId", A(char *id, int n, CUdevice dev), A(id, n, dev)) \
X(cuDeviceGetName, "cuDeviceGetName", A(char *name, int n, CUdevice dev), A(name, n, dev)) \
X(cuDeviceGetUuid, "cuDeviceGetUuid_v2", A(CUuuid *uuid, CUdevice dev), A(uuid, dev)) \
X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", A(size_t *n, CUdevice dev), A(n, dev)) \
X(cuDeviceGetAttribute, "cuDeviceGetAttribute", A(int *v, int attribute, CUdevice dev), A(v, attribute, dev)) \
X(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", A(int *can, CUdevice dev, CUdevice peer), A(can, dev, peer)) \
X(cuCtxCreate, "cuCtxCreate_v2", A(CUcontext *ctx, unsigned flags, CUdevice dev), A(ctx, flags, dev)) \
X(cuCtxDestroy, "cuCtxDestroy_v2", A(CUcontext ctx), A(ctx)) \
X(cuCtxSetCurrent, "cuCtxSetCurrent", A(CUcontext ctx), A(ctx)) \
X(cuCtxGetCurrent, "cuCtxGetCurrent", A(CUcontext *ctx), A(ctx)) \
X(cuCtxSetLimit, "cuCtxSetLimit", A(int limit, size_t value), A(limit, value)) \
X(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", A(CUcontext peer, unsigned flags), A(peer, flags)) \
X(cuMemGetInfo, "cuMemGetInfo_v2", A(size_t *free, size_t *total), A(free, total)) \
X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity", \
	A(size_t *n, const CUmemAllocationProp *prop, int option), A(n, prop, option)) \
X(cuMemCreate, "cuMemCreate", \
	A(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *prop, unsigned long long flags), A(h, n, prop, flags)) \
X(cuMemRelease, "cuMemRelease", A(CUmemGenericAllocationHandle h), A(h)) \
X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", \
	A(int *fd, CUmemGenericAllocationHandle h, int type, unsigned long long flags), A(fd, h, type, flags)) \
X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", \
	A(CUmemGenericAllocationHandle *h, uintptr_t fd, int type), A(h, fd, type)) \
X(cuMemGetAllocationPropertiesFromHandle, "cuMemGetAllocationPropertiesFromHandle", \
	A(CUmemAllocationProp *prop, CUmemGenericAllocationHandle h), A(prop, h)) \
X(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", \
	A(CUmemGenericAllocationHandle *h, uintptr_t p), A(h, p)) \
X(cuMemAddressReserve, "cuMemAddressReserve", \
	A(CUdeviceptr *p, size_t n, size_t alignment, CUdeviceptr want, unsigned long long flags), A(p, n, alignment, want, flags)) \
X(cuMemAddressFree, "cuMemAddressFree", A(CUdeviceptr p, size_t n), A(p, n)) \
X(cuMemMap, "cuMemMap", \
	A(CUdeviceptr p, size_t n, size_t offset, CUmemGenericAllocationHandle h, unsigned long long flags), A(p, n, offset, h, flags)) \
X(cuMemUnmap, "cuMemUnmap", A(CUdeviceptr p, size_t n), A(p, n)) \
X(cuMemSetAccess, "cuMemSetAccess", \
	A(CUdeviceptr p, size_t n, const CUmemAccessDesc *desc, size_t count), A(p, n, desc, count)) \
X(cuMemGetHandleForAddressRange, "cuMemGetHandleForAddressRange", \
	A(int *fd, CUdeviceptr p, size_t n, int type, unsigned long long flags), A(fd, p, n, type, flags)) \
X(cuMemGetAddressRange, "cuMemGetAddressRange_v2", A(CUdeviceptr *base, size_t *n, CUdeviceptr p), A(base, n, p)) \
X(cuPointerGetAttribute, "cuPointerGetAttribute", A(void *v, int attribute, CUdeviceptr p), A(v, attribute, p)) \
X(cuPointerSetAttribute, "cuPointerSetAttribute", A(const void *v, int attribute, CUdeviceptr p), A(v, attribute, p)) \
X(cuMemAlloc, "cuMemAlloc_v2", A(CUdeviceptr *p, size_t n), A(p, n)) \
X(cuMemFree, "cuMemFree_v2", A(CUdeviceptr p), A(p)) \
X(cuMemHostAlloc, "cuMemHostAlloc", A(void **p, size_t n, unsigned flags), A(p, n, flags)) \
X(cuMemFreeHost, "cuMemFreeHost", A(void *p), A(p)) \
X(cuMemHostRegister, "cuMemHostRegister_v2", A(void *p, size_t n, unsigned flags), A(p, n, flags)) \
X(cuMemHostUnregister, "cuMemHostUnregister", A(void *p), A(p)) \
X(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", A(CUdeviceptr *d, void *p, unsigned flags), A(d, p, flags)) \
X(cuMemcpyAsync, "cuMemcpyAsync", A(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s), A(dst, src, n, s)) \
X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", A(CUdeviceptr dst, const void *src, size_t n, CUstream s), A(dst, src, n, s)) \
X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", A(void *dst, CUdeviceptr src, size_t n, CUstream s), A(dst, src, n, s)) \
X(cuMemcpy2DAsync, "cuMemcpy2DAsync_v2", A(const CUDA_MEMCPY2D *c, CUstream s), A(c, s)) \
X(cuMemcpyPeerAsync, "cuMemcpyPeerAsync", \
	A(CUdeviceptr dst, CUcontext dc, CUdeviceptr src, CUcontext sc, size_t n, CUstream s), A(dst, dc, src, sc, n, s)) \
X(cuStreamCreate, "cuStreamCreate", A(CUstream *s, unsigned flags), A(s, flags)) \
X(cuStreamDestroy, "cuStreamDestroy_v2", A(CUstream s), A(s)) \
X(cuStreamSynchronize, "cuStreamSynchronize", A(CUstream s), A(s)) \
X(cuStreamQuery, "cuStreamQuery", A(CUstream s), A(s)) \
X(cuStreamWaitEvent, "cuStreamWaitEvent", A(CUstream s, CUevent e, unsigned flags), A(s, e, flags)) \
X(cuStreamWriteValue64, "cuStreamWriteValue64_v2", A(CUstream s, CUdeviceptr p, uint64_t v, unsigned flags), A(s, p, v, flags)) \
X(cuStreamWaitValue64, "cuStreamWaitValue64_v2", A(CUstream s, CUdeviceptr p, uint64_t v, unsigned flags), A(s, p, v, flags)) \
X(cuEventCreate, "cuEventCreate", A(CUevent *e, unsigned flags), A(e, flags)) \
X(cuEventDestroy, "cuEventDestroy_v2", A(CUevent e), A(e)) \
X(cuEventRecord, "cuEventRecord", A(CUevent e, CUstream s), A(e, s)) \
X(cuEventQuery, "cuEventQuery", A(CUevent e), A(e)) \
X(cuEventSynchronize, "cuEventSynchronize", A(CUevent e), A(e)) \
X(cuIpcGetEventHandle, "cuIpcGetEventHandle", A(CUipcEventHandle *h, CUevent e), A(h, e)) \
X(cuIpcOpenEventHandle, "cuIpcOpenEventHandle", A(CUevent *e, CUipcEventHandle h), A(e, h)) \
X(cuIpcGetMemHandle, "cuIpcGetMemHandle", A(CUipcMemHandle *h, CUdeviceptr p), A(h, p)) \
X(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2", A(CUdeviceptr *p, CUipcMemHandle h, unsigned flags), A(p, h, flags)) \
X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", A(CUdeviceptr p), A(p)) \
X(cuModuleLoadDataEx, "cuModuleLoadDataEx", \
	A(CUmodule *m, const void *image, unsigned n, int *options, void **values), A(m, image, n, options, values)) \
X(cuModuleGetFunction, "cuModuleGetFunction", A(CUfunction *f, CUmodule m, const char *name), A(f, m, name)) \
X(cuModuleUnload, "cuModuleUnload", A(CUmodule m), A(m)) \
X(cuLaunchKernel, "cuLaunchKernel", \
	A(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, \
	  void **parameters, void **extra), \
	A(f, gx, gy, gz, bx, by, bz, shared, s, parameters, extra)) \
X(cuMemsetD8Async, "cuMemsetD8Async", A(CUdeviceptr p, unsigned char v, size_t n, CUstream s), A(p, v, n, s)) \
X(cuStreamBeginCapture, "cuStreamBeginCapture_v2", A(CUstream s, int mode), A(s, mode)) \
X(cuStreamEndCapture, "cuStreamEndCapture", A(CUstream s, CUgraph *g), A(s, g)) \
X(cuStreamIsCapturing, "cuStreamIsCapturing", A(CUstream s, int *status), A(s, status)) \
X(cuGraphInstantiate, "cuGraphInstantiateWithFlags", A(CUgraphExec *e, CUgraph g, unsigned long long flags), A(e, g, flags)) \
X(cuGraphLaunch, "cuGraphLaunch", A(CUgraphExec e, CUstream s), A(e, s)) \
X(cuGraphExecDestroy, "cuGraphExecDestroy", A(CUgraphExec e), A(e)) \
X(cuGraphDestroy, "cuGraphDestroy", A(CUgraph g), A(g))

// OPTIONAL lists calls that return CUDA_ERROR_NOT_SUPPORTED if the driver lacks them.
// cuMemcpyBatchAsync is the version of CUDA 12.8, which later drivers still have; the
// macros of 13.0 choose another version without failIdx. cuStreamBatchMemOp_v2 is of CUDA
// 11.7.
#define OPTIONAL(X) \
X(cuStreamBatchMemOp, "cuStreamBatchMemOp_v2", \
	A(CUstream s, unsigned n, CUstreamBatchMemOpParams *list, unsigned flags), A(s, n, list, flags)) \
X(cuMemcpyBatchAsync, "cuMemcpyBatchAsync", \
	A(CUdeviceptr *dst, CUdeviceptr *src, size_t *sizes, size_t n, CUmemcpyAttributes *attributes, size_t *from, size_t count, \
	  size_t *failed, CUstream s), \
	A(dst, src, sizes, n, attributes, from, count, failed, s))

// peerlane_calls is the table. cuCtxSynchronize is a separate field: the list cannot
// express a call without an argument.
typedef struct {
#define X(name, symbol, params, args) CUresult (*name)(params);
	CALLS(X)
	OPTIONAL(X)
#undef X
	CUresult (*cuCtxSynchronize)(void);
	int simulated;
} peerlane_calls;

#define X(name, symbol, params, args) \
	static inline CUresult call_##name(const peerlane_calls *t, params) { return t->name(args); }
CALLS(X)
#undef X
#define X(name, symbol, params, args) \
	static inline CUresult call_##name(const peerlane_calls *t, params) { return t->name ? t->name(args) : CUDA_ERROR_NOT_SUPPORTED; }
OPTIONAL(X)
#undef X
static inline CUresult call_cuCtxSynchronize(const peerlane_calls *t) { return t->cuCtxSynchronize(); }

// peerlane_cuda_open opens the library at path and fills the table. On failure it returns
// NULL, and writes the loader's message or the name of the first missing symbol into the
// buffer of n bytes; missing reports a missing symbol.
peerlane_calls *peerlane_cuda_open(const char *path, char *message, size_t n, int *missing);

#endif
