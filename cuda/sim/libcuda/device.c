#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef PEERLANE_SIM_SOURCE
#define PEERLANE_SIM_SOURCE "unknown"
#endif

const char peerlaneSimVersion[] = "peerlane-sim-source:" PEERLANE_SIM_SOURCE;

#define DRIVER_VERSION 13000

static pthread_once_t once = PTHREAD_ONCE_INIT;
static CUresult loaded;
static atomic_bool initialized;

static void load(void)
{
	loaded = host_load();
	if (loaded != CUDA_SUCCESS)
		return;
	fault_load();
	stream_load();
	atomic_store(&initialized, true);
}

CUresult enter(const char *call, struct fault *f)
{
	if (f)
		*f = (struct fault){0};
	if (!atomic_load(&initialized))
		return CUDA_ERROR_NOT_INITIALIZED;
	CUresult r = fault_due(call, f);
	return r == CUDA_SUCCESS ? capture_forbids(call) : r;
}

CUresult cuInit(unsigned flags)
{
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_once(&once, load);
	return loaded == CUDA_SUCCESS ? enter("cuInit", NULL) : loaded;
}

CUresult cuDriverGetVersion(int *version)
{
	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	*version = DRIVER_VERSION;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *n)
{
	CUresult r = enter("cuDeviceGetCount", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	if (!n)
		return CUDA_ERROR_INVALID_VALUE;
	*n = host_visible();
	return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *dev, int ordinal)
{
	CUresult r = enter("cuDeviceGet", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	if (!dev)
		return CUDA_ERROR_INVALID_VALUE;
	if (!host_device(ordinal))
		return CUDA_ERROR_INVALID_DEVICE;
	*dev = ordinal;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *dev, const char *id)
{
	CUresult r = enter("cuDeviceGetByPCIBusId", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	unsigned domain = 0, bus, slot;
	if (!dev || !id)
		return CUDA_ERROR_INVALID_VALUE;
	if (sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3) {
		domain = 0;
		if (sscanf(id, "%x:%x", &bus, &slot) != 2)
			return CUDA_ERROR_INVALID_VALUE;
	}
	for (int i = 0; i < host_visible(); i++) {
		struct device *d = host_device(i);
		if (d->domain == domain && d->bus == bus && d->slot == slot) {
			*dev = i;
			return CUDA_SUCCESS;
		}
	}
	return CUDA_ERROR_INVALID_DEVICE;
}

// of begins a call about a device.
static CUresult of(const char *call, CUdevice dev, const void *out, struct device **d)
{
	CUresult r = enter(call, NULL);
	if (r != CUDA_SUCCESS)
		return r;
	*d = host_device(dev);
	if (!*d)
		return CUDA_ERROR_INVALID_DEVICE;
	return out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetPCIBusId(char *id, int n, CUdevice dev)
{
	struct device *d;
	CUresult r = of("cuDeviceGetPCIBusId", dev, id, &d);
	if (r != CUDA_SUCCESS)
		return r;
	if (n < 13)
		return CUDA_ERROR_INVALID_VALUE;
	snprintf(id, (size_t)n, "%04X:%02X:%02X.0", d->domain, d->bus, d->slot);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int n, CUdevice dev)
{
	struct device *d;
	CUresult r = of("cuDeviceGetName", dev, name, &d);
	if (r != CUDA_SUCCESS)
		return r;
	if (n < 1)
		return CUDA_ERROR_INVALID_VALUE;
	snprintf(name, (size_t)n, "%s", d->name);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
{
	struct device *d;
	CUresult r = of("cuDeviceGetUuid", dev, uuid, &d);
	if (r == CUDA_SUCCESS)
		memcpy(uuid->bytes, d->uuid, sizeof d->uuid);
	return r;
}

CUresult cuDeviceTotalMem_v2(size_t *n, CUdevice dev)
{
	struct device *d;
	CUresult r = of("cuDeviceTotalMem", dev, n, &d);
	if (r == CUDA_SUCCESS)
		*n = d->memory;
	return r;
}

CUresult cuDeviceGetAttribute(int *v, int attribute, CUdevice dev)
{
	struct device *d;
	CUresult r = of("cuDeviceGetAttribute", dev, v, &d);
	if (r != CUDA_SUCCESS)
		return r;
	switch (attribute) { // numbers of CUdevice_attribute, values of an H200
	case 16: *v = 132; break;              // MULTIPROCESSOR_COUNT
	case 20: *v = 0; break;                // COMPUTE_MODE: default
	case 33: *v = (int)d->bus; break;      // PCI_BUS_ID
	case 34: *v = (int)d->slot; break;     // PCI_DEVICE_ID
	case 39: *v = 2048; break;             // MAX_THREADS_PER_MULTIPROCESSOR
	case 40: *v = 3; break;                // ASYNC_ENGINE_COUNT
	case 50: *v = (int)d->domain; break;   // PCI_DOMAIN_ID
	case 75: *v = 9; break;                // COMPUTE_CAPABILITY_MAJOR
	case 76: *v = 0; break;                // COMPUTE_CAPABILITY_MINOR
	case 118:                              // GPU_DIRECT_RDMA_WRITES_ORDERING: owner
		*v = getenv("PEERLANE_SIM_WRITES_ORDERING") ? atoi(getenv("PEERLANE_SIM_WRITES_ORDERING")) : 100;
		break;
	case 41:                               // UNIFIED_ADDRESSING
	case 91:                               // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
	case 99:                               // HOST_REGISTER_SUPPORTED
	case 102:                              // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
	case 103:                              // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
	case 110:                              // GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
	case 116:                              // GPU_DIRECT_RDMA_SUPPORTED
	case 117:                              // GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: host
	case 122:                              // CAN_USE_64_BIT_STREAM_MEM_OPS
	case 124: *v = 1; break;               // DMA_BUF_SUPPORTED
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice dev, CUdevice peer)
{
	struct device *d;
	CUresult r = of("cuDeviceCanAccessPeer", dev, can, &d);
	if (r != CUDA_SUCCESS)
		return r;
	if (!host_device(peer))
		return CUDA_ERROR_INVALID_DEVICE;
	*can = dev != peer;
	return CUDA_SUCCESS;
}
