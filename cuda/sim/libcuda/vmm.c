// Virtual memory management: cuMem*.
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

// wanted checks the properties of requested memory, and finds its device.
static CUresult wanted(const CUmemAllocationProp *prop, struct device **d)
{
	if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return CUDA_ERROR_INVALID_VALUE;
	if (prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_NOT_SUPPORTED;
	*d = host_device(prop->location.id);
	return *d ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuMemGetAllocationGranularity(size_t *n, const CUmemAllocationProp *prop, int option)
{
	CUresult r = enter("cuMemGetAllocationGranularity", NULL);
	struct device *d;
	if (r != CUDA_SUCCESS || (r = wanted(prop, &d)) != CUDA_SUCCESS)
		return r;
	if (!n || option < 0 || option > 1)
		return CUDA_ERROR_INVALID_VALUE;
	*n = GRANULARITY;
	return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *prop, unsigned long long flags)
{
	CUresult r = enter("cuMemCreate", NULL);
	struct device *d;
	struct memory *m;
	if (r != CUDA_SUCCESS || (r = wanted(prop, &d)) != CUDA_SUCCESS)
		return r;
	if (!h || flags || !n || n % GRANULARITY)
		return CUDA_ERROR_INVALID_VALUE;
	r = memory_create(d, n, prop->requestedHandleTypes, prop->allocFlags.gpuDirectRDMACapable, &m);
	if (r != CUDA_SUCCESS)
		return r;
	*h = handle_new(MEMORY, m);
	return *h ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle h)
{
	CUresult r = enter("cuMemRelease", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	struct memory *m = handle_take(MEMORY, h);
	release(m);
	return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Stores a copy of the descriptor of a memory, and releases the memory. */
static CUresult export_descriptor(struct memory *m, void *fd)
{
	int copy = fcntl(m->fd, F_DUPFD_CLOEXEC, 3);
	release(m);
	if (copy < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	*(int *)fd = copy;
	return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *fd, CUmemGenericAllocationHandle h, int type, unsigned long long flags)
{
	CUresult r = enter("cuMemExportToShareableHandle", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	struct memory *m = handle_get(MEMORY, h);
	if (!m || !fd || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !m->exportable) {
		release(m);
		return CUDA_ERROR_INVALID_VALUE;
	}
	return export_descriptor(m, fd);
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *h, void *fd, int type)
{
	CUresult r = enter("cuMemImportFromShareableHandle", NULL);
	struct memory *m;
	if (r != CUDA_SUCCESS)
		return r;
	if (!h || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_INVALID_VALUE;
	r = memory_import((int)(intptr_t)fd, &m);
	if (r != CUDA_SUCCESS)
		return r;
	*h = handle_new(MEMORY, m);
	return *h ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle h)
{
	CUresult r = enter("cuMemGetAllocationPropertiesFromHandle", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	struct memory *m = handle_get(MEMORY, h);
	if (!m || !prop) {
		release(m);
		return CUDA_ERROR_INVALID_VALUE;
	}
	memset(prop, 0, sizeof *prop);
	prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
	prop->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	prop->location.id = m->device->ordinal;
	prop->requestedHandleTypes = m->exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0;
	prop->allocFlags.gpuDirectRDMACapable = m->rdma;
	release(m);
	return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *h, void *p)
{
	CUresult r = enter("cuMemRetainAllocationHandle", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	pthread_mutex_lock(&ranges_mutex);
	struct range *range = range_find((uintptr_t)p);
	struct memory *m = range && range->kind == MAPPED ? retain(range->memory) : NULL;
	pthread_mutex_unlock(&ranges_mutex);
	if (!m || !h) {
		release(m);
		return CUDA_ERROR_INVALID_VALUE;
	}
	*h = handle_new(MEMORY, m);
	return *h ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t alignment, CUdeviceptr want, unsigned long long flags)
{
	(void)want; // a request that the driver need not fulfil either
	CUresult r = enter("cuMemAddressReserve", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	if (!p || flags || !n || n % GRANULARITY || (alignment & (alignment - 1)))
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&ranges_mutex);
	*p = reserve(n, alignment);
	pthread_mutex_unlock(&ranges_mutex);
	return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr p, size_t n)
{
	CUresult r = enter("cuMemAddressFree", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	pthread_mutex_lock(&ranges_mutex);
	r = unreserve(p, n);
	pthread_mutex_unlock(&ranges_mutex);
	return r;
}

CUresult cuMemMap(CUdeviceptr p, size_t n, size_t offset, CUmemGenericAllocationHandle h, unsigned long long flags)
{
	CUresult r = enter("cuMemMap", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	struct memory *m = handle_get(MEMORY, h);
	r = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&ranges_mutex);
	if (m && !flags && !offset && n && p % GRANULARITY == 0 && n % GRANULARITY == 0 && n <= m->size && reserved(p, n)) {
		struct range *range = range_add(p, n);
		if (range) {
			range->kind = MAPPED;
			range->memory = retain(m);
			r = CUDA_SUCCESS;
		}
	}
	pthread_mutex_unlock(&ranges_mutex);
	release(m);
	return r;
}

// covered reports whether [p, p+n) consists of whole mappings without a gap. The caller
// holds the mutex.
static bool covered(uintptr_t p, size_t n)
{
	uintptr_t end = p + n;
	if (!n || end < p)
		return false;
	while (p < end) {
		struct range *r = range_find(p);
		if (!r || r->kind != MAPPED || r->base != p || r->size > end - p)
			return false;
		p = r->base + r->size;
	}
	return true;
}

CUresult cuMemUnmap(CUdeviceptr p, size_t n)
{
	CUresult r = enter("cuMemUnmap", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	pthread_mutex_lock(&ranges_mutex);
	struct range *range = range_find(p);
	if (range && range->kind == MAPPED && range->base == p && range->size == n)
		range_remove(range);
	else
		r = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&ranges_mutex);
	return r;
}

CUresult cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *desc, size_t count)
{
	CUresult r = enter("cuMemSetAccess", NULL);
	if (r != CUDA_SUCCESS)
		return r;
	if (!desc || !count)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < count; i++) {
		int flags = desc[i].flags;
		if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
		    (flags && flags != CU_MEM_ACCESS_FLAGS_PROT_READ && flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE))
			return CUDA_ERROR_INVALID_VALUE;
		if (!host_device(desc[i].location.id))
			return CUDA_ERROR_INVALID_DEVICE;
	}
	pthread_mutex_lock(&ranges_mutex);
	if (covered(p, n)) {
		for (struct range *range; n; p += range->size, n -= range->size) {
			range = range_find(p);
			for (size_t i = 0; i < count; i++)
				range->rights[host_place(host_device(desc[i].location.id))] = (unsigned char)desc[i].flags;
		}
	} else {
		r = CUDA_ERROR_INVALID_VALUE;
	}
	pthread_mutex_unlock(&ranges_mutex);
	return r;
}

// Return the descriptor of the memory: no kernel maps this memory for a NIC.
CUresult cuMemGetHandleForAddressRange(void *fd, CUdeviceptr p, size_t n, int type, unsigned long long flags)
{
	CUresult r = enter("cuMemGetHandleForAddressRange", NULL);
	struct context *c;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	if (!fd || flags > 1 || type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || !n || p % 4096 || n % 4096)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&ranges_mutex);
	struct range *range = range_find(p);
	struct memory *m = NULL;
	if (range && range->memory->fd >= 0 && n <= range->size - (p - range->base))
		m = retain(range->memory);
	pthread_mutex_unlock(&ranges_mutex);
	if (!m)
		return CUDA_ERROR_INVALID_VALUE;
	return export_descriptor(m, fd);
}

char *peerlaneSimReach(uintptr_t p, size_t n, int *vmm)
{
	char *data = NULL;
	pthread_mutex_lock(&ranges_mutex);
	struct range *range = range_find(p);
	if (range && range->memory->device && n <= range->size - (p - range->base)) {
		data = range->memory->data + (p - range->base);
		*vmm = range->kind == MAPPED;
	}
	pthread_mutex_unlock(&ranges_mutex);
	return data;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *n, CUdeviceptr p)
{
	CUresult r = enter("cuMemGetAddressRange", NULL);
	struct context *c;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	pthread_mutex_lock(&ranges_mutex);
	struct range *range = range_find(p);
	if (!range || !range->memory->device) {
		r = CUDA_ERROR_INVALID_VALUE;
	} else {
		if (base)
			*base = range->base;
		if (n)
			*n = range->size;
	}
	pthread_mutex_unlock(&ranges_mutex);
	return r;
}

CUresult cuPointerSetAttribute(const void *v, int attribute, CUdeviceptr p)
{
	CUresult r = enter("cuPointerSetAttribute", NULL);
	struct context *c;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	if (!v || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
		return CUDA_ERROR_INVALID_VALUE;
	// Synchronous copies are complete when the call returns.
	pthread_mutex_lock(&ranges_mutex);
	struct range *range = range_find(p);
	if (!range || range->kind != ALLOCATED)
		r = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&ranges_mutex);
	return r;
}

CUresult cuPointerGetAttribute(void *v, int attribute, CUdeviceptr p)
{
	CUresult r = enter("cuPointerGetAttribute", NULL);
	struct context *c;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	if (!v)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&ranges_mutex);
	struct range *range = range_find(p);
	if (!range) {
		r = CUDA_ERROR_INVALID_VALUE;
	} else {
		struct device *d = range->memory->device;
		switch (attribute) {
		case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
			*(unsigned *)v = d ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
			break;
		case CU_POINTER_ATTRIBUTE_BUFFER_ID:
			*(unsigned long long *)v = range->memory->number;
			break;
		case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
			*(int *)v = d ? d->ordinal : range->owner->device->ordinal;
			break;
		case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
			*(unsigned *)v = d && range->memory->rdma;
			break;
		default:
			r = CUDA_ERROR_INVALID_VALUE;
		}
	}
	pthread_mutex_unlock(&ranges_mutex);
	return r;
}
