// Protection domains and regions.
#include "softdevice.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static struct region *regions;

static const char *of(struct ibv_context *c) { return c->device->name; }

API struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct rule rule = host_script("ibv_alloc_pd", of(context));
	struct domain *d = rule.error ? NULL : calloc(1, sizeof *d);
	host_log("ibv_alloc_pd device=%s = %d", of(context), rule.error);
	if (!d) {
		errno = rule.error ? rule.error : ENOMEM;
		return NULL;
	}
	d->ibv.context = context;
	pthread_mutex_lock(&lock);
	((struct context *)context)->domains++;
	pthread_mutex_unlock(&lock);
	return &d->ibv;
}

API int ibv_dealloc_pd(struct ibv_pd *pd)
{
	struct domain *d = (struct domain *)pd;
	struct context *c = (struct context *)pd->context;
	pthread_mutex_lock(&lock);
	bool busy = d->regions || d->pairs;
	if (!busy)
		c->domains--;
	pthread_mutex_unlock(&lock);
	host_log("ibv_dealloc_pd device=%s regions=%d pairs=%d = %d", of(pd->context), d->regions, d->pairs, busy ? EBUSY : 0);
	if (busy)
		return EBUSY;
	free(d);
	return 0;
}

// permitted says whether the pages of [from, from+n) are there, for writing where that is
// asked for: what the kernel finds when it pins them.
static bool permitted(uintptr_t from, size_t n, bool write)
{
	FILE *f = fopen("/proc/self/maps", "re");
	if (!f)
		return false;
	char line[512];
	uintptr_t at = from;
	while (at < from + n && fgets(line, sizeof line, f)) {
		unsigned long begin, end;
		char rights[8];
		if (sscanf(line, "%lx-%lx %7s", &begin, &end, rights) != 3 || end <= at)
			continue;
		if (begin > at || rights[0] != 'r' || (write && rights[1] != 'w'))
			break;
		at = end;
	}
	fclose(f);
	return at >= from + n;
}

// gpu is where this process reaches memory of a simulated GPU, by the pointer that the
// GPU knows it by, or NULL; vmm says that it was not cuMemAlloc'ed.
static char *gpu(uintptr_t p, size_t n, int *vmm)
{
	const char *path = getenv("PEERLANE_CUDA_LIBRARY");
	void *simulator = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : NULL;
	if (!simulator)
		return NULL;
	char *(*reach)(uintptr_t, size_t, int *);
	*(void **)&reach = dlsym(simulator, "peerlaneSimReach");
	char *data = reach ? reach(p, n, vmm) : NULL;
	dlclose(simulator);
	return data;
}

// forget takes a region out of the list.
static void forget(struct region *r)
{
	pthread_mutex_lock(&lock);
	for (struct region **at = &regions; *at; at = &(*at)->next)
		if (*at == r) {
			*at = r->next;
			break;
		}
	((struct domain *)r->ibv.pd)->regions--;
	pthread_mutex_unlock(&lock);
}

static struct ibv_mr *register_region(struct ibv_pd *pd, char *data, void *addr, size_t n, uint64_t iova, unsigned access, bool of_gpu, void *mapped, size_t mapped_bytes)
{
	struct region *r = calloc(1, sizeof *r);
	if (!r) {
		errno = ENOMEM;
		return NULL;
	}
	r->ibv = (struct ibv_mr){.context = pd->context, .pd = pd, .addr = addr, .length = n, .lkey = host_number() << 8};
	r->ibv.rkey = r->ibv.lkey | 1; // so that one is not taken for the other
	r->iova = iova;
	r->data = data;
	r->access = access;
	r->gpu = of_gpu;
	r->mapped = mapped;
	r->mapped_bytes = mapped_bytes;
	pthread_mutex_lock(&lock);
	((struct domain *)pd)->regions++;
	r->next = regions;
	regions = r;
	pthread_mutex_unlock(&lock);
	return &r->ibv;
}

// by_engine registers GPU memory with the engine, NULL with errno; ENOENT means that the caller may map
// the memory itself. A device with a fault, or one that holds writes, maps the memory in this process.
static struct ibv_mr *by_engine(struct ibv_pd *pd, void *addr, size_t n, uint64_t iova, uintptr_t p, unsigned access)
{
	const struct description *d = &((struct context *)pd->context)->device->described;
	errno = ENOENT;
	if (d->fault != FAULT_NONE || d->holds)
		return NULL;
	struct ibv_mr *mr = register_region(pd, NULL, addr, n, iova, access, true, NULL, 0);
	if (!mr)
		return NULL;
	struct region *r = (struct region *)mr;
	int error = engine_register(pd, mr->lkey, p, n, access);
	if (!error) {
		r->engine = true;
		return mr;
	}
	forget(r);
	free(r);
	errno = error;
	return NULL;
}

static struct ibv_mr *registered(const char *call, struct ibv_pd *pd, void *memory, size_t n, uint64_t iova, unsigned access)
{
	struct description *d = &((struct context *)pd->context)->device->described;
	struct rule rule = host_script_of("ibv_reg_mr", of(pd->context), n);
	struct ibv_mr *mr = NULL;
	char *data = memory;
	int vmm = 0;
	errno = rule.error;
	if (rule.error)
		;
	else if (n == 0 || (access & IBV_ACCESS_REMOTE_WRITE && !(access & IBV_ACCESS_LOCAL_WRITE)))
		errno = EINVAL;
	else if ((data = gpu((uintptr_t)memory, n, &vmm)) && (d->peermem == PEERMEM_NO || (d->peermem == PEERMEM_ALLOC && vmm)))
		errno = EFAULT;
	else if (d->peermem == PEERMEM_YES && (mr = by_engine(pd, memory, n, iova, (uintptr_t)memory, access)))
		;
	else if (!data && !permitted((uintptr_t)memory, n, access & IBV_ACCESS_LOCAL_WRITE))
		errno = EFAULT;
	else
		mr = register_region(pd, data ? data : memory, memory, n, iova, access, data != NULL, NULL, 0);
	int error = mr ? 0 : errno;
	host_log("%s device=%s memory=%p length=%zu iova=%#llx access=%#x lkey=%#x rkey=%#x = %d", call, of(pd->context), memory, n,
		(unsigned long long)iova, access, mr ? mr->lkey : 0, mr ? mr->rkey : 0, error);
	errno = error;
	return mr;
}

API struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *memory, size_t n, int access)
{
	return registered("ibv_reg_mr", pd, memory, n, (uintptr_t)memory, (unsigned)access);
}

API struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *memory, size_t n, uint64_t iova, unsigned access)
{
	return registered("ibv_reg_mr_iova2", pd, memory, n, iova, access);
}

API struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t n, uint64_t iova, int fd, int access)
{
	struct description *d = &((struct context *)pd->context)->device->described;
	struct rule rule = host_script_of("ibv_reg_dmabuf_mr", of(pd->context), n);
	struct ibv_mr *mr = NULL;
	struct stat st = {0};
	uint64_t from = offset & ~UINT64_C(4095);
	errno = rule.error;
	if (rule.error)
		;
	else if (!d->dmabuf)
		errno = EOPNOTSUPP;
	else if (fstat(fd, &st) != 0)
		errno = EBADF;
	else if (n == 0)
		errno = EINVAL;
	else if ((mr = by_engine(pd, NULL, n, iova, iova, (unsigned)access)) || errno != ENOENT)
		;
	else if (offset + n > (uint64_t)st.st_size)
		errno = EINVAL;
	else {
		size_t bytes = n + (offset - from);
		void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)from);
		if (mapped != MAP_FAILED) {
			mr = register_region(pd, (char *)mapped + (offset - from), NULL, n, iova, (unsigned)access, true, mapped, bytes);
			if (!mr)
				munmap(mapped, bytes);
		}
	}
	int error = mr ? 0 : errno;
	host_log("ibv_reg_dmabuf_mr device=%s offset=%#llx length=%zu iova=%#llx fd=%d inode=%llu access=%#x lkey=%#x rkey=%#x = %d", of(pd->context),
		(unsigned long long)offset, n, (unsigned long long)iova, fd, (unsigned long long)st.st_ino, (unsigned)access, mr ? mr->lkey : 0, mr ? mr->rkey : 0, error);
	errno = error;
	return mr;
}

API int mlx5dv_get_data_direct_sysfs_path(struct ibv_context *context, char *path, size_t n)
{
	if (!((struct context *)context)->device->described.direct)
		return ENODEV;
	snprintf(path, n, "/devices/pci0000:00/0000:00:1f.0");
	return 0;
}

API struct ibv_mr *mlx5dv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t n, uint64_t iova, int fd, int access, int mlx5_access)
{
	struct rule rule = host_script("mlx5dv_reg_dmabuf_mr", of(pd->context));
	int error = rule.error ? rule.error : !((struct context *)pd->context)->device->described.direct || mlx5_access != MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT ? EOPNOTSUPP : 0;
	host_log("mlx5dv_reg_dmabuf_mr device=%s length=%zu fd=%d = %d", of(pd->context), n, fd, error);
	errno = error;
	return error ? NULL : ibv_reg_dmabuf_mr(pd, offset, n, iova, fd, access);
}

// held are the writes that NICs have told of and that are not in GPUs' memory, oldest first.
static struct held {
	struct held *next;
	struct region *by;
	char *at;
	size_t n;
	char data[];
} *held, **last = &held;

static void put_faulty(struct region *r, char *at, uint64_t offset, uint64_t n, const char *data);

// settle has what is held of a region, or of all by which the same device knows the same memory,
// be there or be lost.
static void settle(const struct region *r, bool there)
{
	struct held **at = &held;
	for (struct held *h; (h = *at);) {
		const struct region *by = h->by;
		if (by != r && (!there || by->ibv.context != r->ibv.context || by->iova != r->iova)) {
			at = &h->next;
			continue;
		}
		if (there)
			put_faulty((struct region *)by, h->at, (uint64_t)(h->at - by->data), h->n, h->data);
		*at = h->next;
		free(h);
	}
	last = at;
}

// settle_but_last lets all writes that are held of a region through, but the newest.
static void settle_but_last(const struct region *r)
{
	struct held *newest = NULL, **link = NULL;
	for (struct held **at = &held; *at; at = &(*at)->next)
		if ((*at)->by == r || ((*at)->by->ibv.context == r->ibv.context && (*at)->by->iova == r->iova))
			newest = *(link = at);
	if (!newest)
		return;
	*link = newest->next;
	settle(r, true);
	newest->next = NULL;
	*last = newest;
	last = &newest->next;
}

API int ibv_dereg_mr(struct ibv_mr *mr)
{
	struct region *r = (struct region *)mr;
	struct rule rule = host_script("ibv_dereg_mr", of(mr->context));
	if (rule.error) { // it stays
		host_log("ibv_dereg_mr device=%s lkey=%#x = %d", of(mr->context), mr->lkey, rule.error);
		return rule.error;
	}
	int vmm;
	// By the address that the GPU knows it by, where the caller gave that as the iova.
	bool there = !r->gpu || gpu((uintptr_t)r->iova, mr->length, &vmm);
	pthread_mutex_lock(&lock);
	settle(r, false); // nobody can read behind it by this key any more
	int pairs = ((struct domain *)mr->pd)->pairs;
	pthread_mutex_unlock(&lock);
	forget(r);
	if (r->engine)
		engine_forget(mr->lkey);
	host_log("ibv_dereg_mr device=%s lkey=%#x gpu=%d there=%d pairs=%d = 0", of(mr->context), mr->lkey, r->gpu, there, pairs);
	if (r->mapped)
		munmap(r->mapped, r->mapped_bytes);
	free(r->before);
	free(r);
	return 0;
}

static struct region *find(struct ibv_pd *pd, uint32_t key, bool remote, uint64_t address, uint64_t n, unsigned access)
{
	for (struct region *r = regions; r; r = r->next)
		if ((remote ? r->ibv.rkey : r->ibv.lkey) == key && r->ibv.pd == pd && (r->access & access) == access &&
		    address >= r->iova && n <= r->ibv.length && address - r->iova <= r->ibv.length - n)
			return r;
	return NULL;
}

char *memory_at(struct ibv_pd *pd, uint32_t key, bool remote, uint64_t address, uint64_t n, unsigned access)
{
	struct region *r = find(pd, key, remote, address, n, access);
	return r && r->data ? r->data + (address - r->iova) : NULL;
}

bool memory_writable(struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t n)
{
	return find(pd, key, true, address, n, IBV_ACCESS_REMOTE_WRITE) != NULL;
}

bool memory_relaxed(struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t n)
{
	struct region *r = find(pd, key, true, address, n, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING);
	return r && !r->engine;
}

bool memory_engine(struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t n)
{
	struct region *r = find(pd, key, false, address, n, 0);
	return r && r->engine;
}

static int fault_of(const struct region *r)
{
	return r->gpu ? ((struct context *)r->ibv.context)->device->described.fault : FAULT_NONE;
}

bool memory_copy(struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t n, char *into)
{
	struct region *r = find(pd, key, false, address, n, 0);
	if (!r)
		return false;
	if (r->engine)
		return engine_read(r->ibv.lkey, address, n, into);
	uint64_t offset = address - r->iova;
	if (fault_of(r) == FAULT_STALE_READ && (r->before || (r->before = calloc(1, r->ibv.length)))) {
		memcpy(into, r->before + offset, n);
		memcpy(r->before + offset, r->data + offset, n);
	} else {
		memcpy(into, r->data + offset, n);
	}
	return true;
}

// other is another GPU's region of the device, or another place of the same one, for writes that
// go astray.
static char *other(struct region *r, uint64_t offset, uint64_t n)
{
	for (struct region *o = regions; o; o = o->next)
		if (o->gpu && o->data != r->data && o->ibv.context == r->ibv.context && offset + n <= o->ibv.length)
			return o->data + offset;
	return NULL;
}

// put writes into a GPU's memory as a broken device does.
static void put_faulty(struct region *r, char *at, uint64_t offset, uint64_t n, const char *data)
{
	static unsigned writes;
	unsigned serial = ++writes;
	switch (fault_of(r)) {
	case FAULT_LOST_TAIL: // in one of a few writes
		if (serial % 61 == 0 && n > 1)
			n -= n > 16 ? 16 : 1;
		break;
	case FAULT_WRONG_GPU:
		if (!(at = other(r, offset, n)))
			return;
		break;
	case FAULT_TORN: // the last half of a cache line is not there yet
		if (serial % 61 == 0 && n >= 64) {
			uint64_t line = (64 - (uintptr_t)at % 64) % 64;
			if (line + 64 > n)
				line = 0;
			memcpy(at, data, line + 32);
			memcpy(at + line + 64, data + line + 64, n - line - 64);
			return;
		}
		break;
	default:
		break;
	}
	memcpy(at, data, n);
}

bool memory_write(struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t n, const char *data)
{
	struct region *r = find(pd, key, true, address, n, IBV_ACCESS_REMOTE_WRITE);
	if (!r)
		return false;
	if (r->engine)
		return engine_write(r->ibv.lkey, address, n, data);
	const struct description *d = &((struct context *)pd->context)->device->described;
	char *at = r->data + (address - r->iova);
	struct held *h = NULL;
	bool late = d->fault == FAULT_NO_FLUSH || d->fault == FAULT_REORDERED_FLUSH;
	if (r->gpu && late) // a write lets those before it through
		settle(r, true);
	if (r->gpu && (d->holds || late))
		h = malloc(sizeof *h + n);
	if (!h) {
		put_faulty(r, at, address - r->iova, n, data);
		return true;
	}
	*h = (struct held){.by = r, .at = at, .n = n};
	memcpy(h->data, data, n);
	*last = h;
	last = &h->next;
	return true;
}

bool memory_read(struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t n, char *data)
{
	struct region *r = find(pd, key, true, address, n, IBV_ACCESS_REMOTE_READ);
	if (!r)
		return false;
	if (r->engine)
		return engine_read(r->ibv.lkey, address, n, data);
	int fault = fault_of(r);
	if (fault == FAULT_REORDERED_FLUSH) { // the read is answered first
		memcpy(data, r->data + (address - r->iova), n);
		settle_but_last(r);
		return true;
	}
	// It comes behind all that the device has written there, by whatever key.
	if (fault != FAULT_NO_FLUSH)
		settle(r, true);
	memcpy(data, r->data + (address - r->iova), n);
	return true;
}
