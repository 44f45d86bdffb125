// The part of the CUDA driver API that the simulator provides, as libcuda
// exports it: the versions of symbols that cuda.h's macros choose, layouts and
// numbers of CUDA 11.7 to 13 on 64-bit Linux.
#ifndef PEERLANE_SIM_CUDA_ABI_H
#define PEERLANE_SIM_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

typedef enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_NOT_INITIALIZED = 3,
	CUDA_ERROR_NO_DEVICE = 100,
	CUDA_ERROR_INVALID_DEVICE = 101,
	CUDA_ERROR_INVALID_IMAGE = 200,
	CUDA_ERROR_INVALID_CONTEXT = 201,
	CUDA_ERROR_MAP_FAILED = 205,
	CUDA_ERROR_INVALID_PTX = 218,
	CUDA_ERROR_OPERATING_SYSTEM = 304,
	CUDA_ERROR_INVALID_HANDLE = 400,
	CUDA_ERROR_ILLEGAL_STATE = 401,
	CUDA_ERROR_NOT_FOUND = 500,
	CUDA_ERROR_NOT_READY = 600,
	CUDA_ERROR_ILLEGAL_ADDRESS = 700,
	CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
	CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
	CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
	CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
	CUDA_ERROR_MISALIGNED_ADDRESS = 716,
	CUDA_ERROR_NOT_PERMITTED = 800,
	CUDA_ERROR_NOT_SUPPORTED = 801,
	CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
	CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
	CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
	CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
	CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
	CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
	CUDA_ERROR_CAPTURED_EVENT = 907,
	CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
	CUDA_ERROR_UNKNOWN = 999,
} CUresult;

typedef int CUdevice;
typedef uintptr_t CUcontext; // pointers in cuda.h; handles of object.c here
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
typedef struct { int type, id; } CUmemLocation;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef struct {
	int type, requestedHandleTypes;
	CUmemLocation location;
	void *win32HandleMetaData;
	struct {
		unsigned char compressionType, gpuDirectRDMACapable;
		unsigned short usage;
		unsigned char reserved[4];
	} allocFlags;
} CUmemAllocationProp;
typedef struct {
	size_t srcXInBytes, srcY;
	int srcMemoryType;
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

// The member writeValue of cuda.h's union.
typedef struct {
	int operation;
	CUdeviceptr address;
	uint64_t value64;
	unsigned flags;
	CUdeviceptr alias;
	uint64_t rest;
} CUstreamBatchMemOpParams;

typedef struct {
	int srcAccessOrder;
	CUmemLocation srcLocHint, dstLocHint;
	unsigned flags;
} CUmemcpyAttributes;

enum {
	CU_MEM_ALLOCATION_TYPE_PINNED = 1,
	CU_MEM_LOCATION_TYPE_DEVICE = 1,
	CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
	CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
	CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
	CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1,
	CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
	CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6,
	CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
	CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
	CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE = 15,
	CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
	CU_MEMORYTYPE_HOST = 1,
	CU_MEMORYTYPE_DEVICE = 2,
	CU_STREAM_NON_BLOCKING = 1,
	CU_STREAM_WAIT_VALUE_GEQ = 0,
	CU_STREAM_WAIT_VALUE_EQ = 1,
	CU_STREAM_WAIT_VALUE_AND = 2,
	CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
	CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
	CU_STREAM_CAPTURE_MODE_RELAXED = 2,
	CU_STREAM_CAPTURE_STATUS_NONE = 0,
	CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
	CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2,
	CU_STREAM_WRITE_VALUE_DEFAULT = 0,
	CU_STREAM_MEM_OP_WRITE_VALUE_64 = 5,
	CU_EVENT_BLOCKING_SYNC = 1,
	CU_EVENT_DISABLE_TIMING = 2,
	CU_EVENT_INTERPROCESS = 4,
	CU_LIMIT_MAX = 11,
	CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1,
	CU_JIT_ERROR_LOG_BUFFER = 5,
	CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6,
};

API CUresult cuInit(unsigned flags);
API CUresult cuDriverGetVersion(int *version);
API CUresult cuGetErrorName(CUresult r, const char **s);
API CUresult cuGetErrorString(CUresult r, const char **s);

API CUresult cuDeviceGetCount(int *n);
API CUresult cuDeviceGet(CUdevice *dev, int ordinal);
API CUresult cuDeviceGetByPCIBusId(CUdevice *dev, const char *id);
API CUresult cuDeviceGetPCIBusId(char *id, int n, CUdevice dev);
API CUresult cuDeviceGetName(char *name, int n, CUdevice dev);
API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev);
API CUresult cuDeviceTotalMem_v2(size_t *n, CUdevice dev);
API CUresult cuDeviceGetAttribute(int *v, int attribute, CUdevice dev);
API CUresult cuDeviceCanAccessPeer(int *can, CUdevice dev, CUdevice peer);

API CUresult cuCtxCreate_v2(CUcontext *ctx, unsigned flags, CUdevice dev);
API CUresult cuCtxDestroy_v2(CUcontext ctx);
API CUresult cuCtxSetCurrent(CUcontext ctx);
API CUresult cuCtxGetCurrent(CUcontext *ctx);
API CUresult cuCtxSynchronize(void);
API CUresult cuCtxSetLimit(int limit, size_t value);
API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags);
API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total);

API CUresult cuMemGetAllocationGranularity(size_t *n, const CUmemAllocationProp *prop, int option);
API CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *prop, unsigned long long flags);
API CUresult cuMemRelease(CUmemGenericAllocationHandle h);
API CUresult cuMemExportToShareableHandle(void *fd, CUmemGenericAllocationHandle h, int type, unsigned long long flags);
API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *h, void *fd, int type);
API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle h);
API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *h, void *p);
API CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t alignment, CUdeviceptr want, unsigned long long flags);
API CUresult cuMemAddressFree(CUdeviceptr p, size_t n);
API CUresult cuMemMap(CUdeviceptr p, size_t n, size_t offset, CUmemGenericAllocationHandle h, unsigned long long flags);
API CUresult cuMemUnmap(CUdeviceptr p, size_t n);
API CUresult cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *desc, size_t count);
API CUresult cuMemGetHandleForAddressRange(void *fd, CUdeviceptr p, size_t n, int type, unsigned long long flags);
API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *n, CUdeviceptr p);
API CUresult cuPointerGetAttribute(void *v, int attribute, CUdeviceptr p);
API CUresult cuPointerSetAttribute(const void *v, int attribute, CUdeviceptr p);

API CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n);
API CUresult cuMemFree_v2(CUdeviceptr p);
API CUresult cuMemHostAlloc(void **p, size_t n, unsigned flags);
API CUresult cuMemFreeHost(void *p);
API CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned flags);
API CUresult cuMemHostUnregister(void *p);
API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *d, void *p, unsigned flags);

API CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s);
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t n, CUstream s);
API CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t n, CUstream s);
API CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream s);
API CUresult cuMemcpyBatchAsync(CUdeviceptr *dst, CUdeviceptr *src, size_t *sizes, size_t n, CUmemcpyAttributes *attributes,
				size_t *from, size_t count, size_t *failed, CUstream s);
API CUresult cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dc, CUdeviceptr src, CUcontext sc, size_t n, CUstream s);

API CUresult cuStreamCreate(CUstream *s, unsigned flags);
API CUresult cuStreamDestroy_v2(CUstream s);
API CUresult cuStreamSynchronize(CUstream s);
API CUresult cuStreamQuery(CUstream s);
API CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned flags);
API CUresult cuStreamWriteValue64_v2(CUstream s, CUdeviceptr p, uint64_t v, unsigned flags);
API CUresult cuStreamBatchMemOp_v2(CUstream s, unsigned n, CUstreamBatchMemOpParams *list, unsigned flags);
API CUresult cuStreamWaitValue64_v2(CUstream s, CUdeviceptr p, uint64_t v, unsigned flags);
API CUresult cuEventCreate(CUevent *e, unsigned flags);
API CUresult cuEventDestroy_v2(CUevent e);
API CUresult cuEventRecord(CUevent e, CUstream s);
API CUresult cuEventQuery(CUevent e);
API CUresult cuEventSynchronize(CUevent e);
API CUresult cuIpcGetEventHandle(CUipcEventHandle *h, CUevent e);
API CUresult cuIpcOpenEventHandle(CUevent *e, CUipcEventHandle h);

API CUresult cuIpcGetMemHandle(CUipcMemHandle *h, CUdeviceptr p);
API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *p, CUipcMemHandle h, unsigned flags);
API CUresult cuIpcCloseMemHandle(CUdeviceptr p);

API CUresult cuModuleLoadData(CUmodule *m, const void *image);
API CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, int *options, void **values);
API CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name);
API CUresult cuModuleUnload(CUmodule m);
API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
			    unsigned shared, CUstream s, void **parameters, void **extra);

API CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char v, size_t n, CUstream s);
API CUresult cuStreamBeginCapture_v2(CUstream s, int mode);
API CUresult cuStreamEndCapture(CUstream s, CUgraph *g);
API CUresult cuStreamIsCapturing(CUstream s, int *status);
API CUresult cuGraphInstantiateWithFlags(CUgraphExec *e, CUgraph g, unsigned long long flags);
API CUresult cuGraphLaunch(CUgraphExec e, CUstream s);
API CUresult cuGraphExecDestroy(CUgraphExec e);
API CUresult cuGraphDestroy(CUgraph g);

// peerlaneSimVersion marks the library as the simulator, and names the source of the
// build.
API extern const char peerlaneSimVersion[];

// peerlaneSimReach does the work of nvidia-peermem for RDMA drivers: it returns the
// address of the n bytes of a device's memory at p, or NULL. vmm reports memory of
// cuMemCreate.
API char *peerlaneSimReach(uintptr_t p, size_t n, int *vmm);

#endif
