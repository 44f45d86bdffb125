// Memory, and the addresses of memory.
//
// The memory of a device is a memfd: an export returns the descriptor, so memory crosses
// processes and containers like real GPU memory, and the kernel frees it with the last
// holder, even a killed one. Behind the data is one page that identifies the memory. The
// memfd is sealed against changes of size, so that no process can make an access of
// another process fault.
//
// The addresses of a device are reserved and inaccessible: as with GPU memory, the host
// cannot read memory by this address. The simulator accesses the data through a second
// mapping, memory.data.
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define TRAILER 4096
static const char magic[8] = "PLSIMMEM";

struct trailer { // the page behind the bytes
	char magic[8];
	uint32_t version, flags; // 1: exportable, 2: RDMA-capable
	uint64_t size;
	unsigned char uuid[16];
	uint64_t nonce, length; // for memory with an IPC handle: of the handle, and the requested size
};

static void destroy(struct object *o)
{
	struct memory *m = (struct memory *)o;
	if (m->counted)
		atomic_fetch_sub(&m->device->used, m->size);
	if (m->data && !m->borrowed)
		munmap(m->data, m->size);
	if (m->fd >= 0)
		close(m->fd);
	free(m);
}

static struct memory *new(size_t size)
{
	static _Atomic uint64_t last;
	struct memory *m = calloc(1, sizeof *m);
	if (m) {
		m->number = ++last;
		object_init(&m->object, destroy);
		m->fd = -1;
		m->size = size;
	}
	return m;
}

// reach maps the data of a memfd, in huge pages if the kernel permits that.
static bool reach(struct memory *m)
{
	char *data = mmap(NULL, m->size, PROT_READ | PROT_WRITE, MAP_SHARED, m->fd, 0);
	if (data == MAP_FAILED)
		return false;
	m->data = data;
	madvise(data, m->size, MADV_HUGEPAGE);
	return true;
}

CUresult memory_create(struct device *d, size_t size, bool exportable, bool rdma, struct memory **out)
{
	struct memory *m = new(size);
	if (!m)
		return CUDA_ERROR_OUT_OF_MEMORY;
	m->device = d;
	m->exportable = exportable;
	m->rdma = rdma;
	if (atomic_fetch_add(&d->used, size) + size > d->memory) {
		atomic_fetch_sub(&d->used, size);
		release(m);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	m->counted = true;
	struct trailer t = {.version = 1, .flags = (exportable ? 1 : 0) | (rdma ? 2 : 0), .size = size};
	memcpy(t.magic, magic, sizeof magic);
	memcpy(t.uuid, d->uuid, sizeof t.uuid);
	m->fd = memfd_create("peerlane-sim-gpu", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (m->fd < 0 || ftruncate(m->fd, (off_t)(size + TRAILER)) != 0 ||
	    pwrite(m->fd, &t, sizeof t, (off_t)size) != (ssize_t)sizeof t ||
	    fcntl(m->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0 || !reach(m)) {
		complain("%zu bytes of simulated device memory: %s", size, strerror(errno));
		release(m);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	atomic_fetch_add(&d->log->allocated, size);
	*out = m;
	return CUDA_SUCCESS;
}

CUresult memory_import(int fd, struct memory **out)
{
	const int sealed = F_SEAL_SHRINK | F_SEAL_GROW;
	int seals = fcntl(fd, F_GET_SEALS); // fails for a file other than a memfd
	struct stat st;
	struct trailer t;
	if (seals < 0 || (seals & sealed) != sealed || fstat(fd, &st) != 0 || st.st_size <= TRAILER)
		return CUDA_ERROR_INVALID_VALUE;
	size_t size = (size_t)st.st_size - TRAILER;
	if (pread(fd, &t, sizeof t, (off_t)size) != (ssize_t)sizeof t || memcmp(t.magic, magic, sizeof magic) != 0 ||
	    t.version != 1 || t.size != size || size % GRANULARITY)
		return CUDA_ERROR_INVALID_VALUE;
	struct device *d = host_device_by_uuid(t.uuid);
	if (!d || !d->reachable)
		return CUDA_ERROR_INVALID_DEVICE;
	struct memory *m = new(size);
	if (!m)
		return CUDA_ERROR_OUT_OF_MEMORY;
	m->device = d;
	m->exportable = t.flags & 1;
	m->rdma = t.flags & 2;
	m->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (m->fd < 0 || !reach(m)) {
		release(m);
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	*out = m;
	return CUDA_SUCCESS;
}

CUresult memory_name(struct memory *m, size_t size)
{
	struct trailer t;
	if (m->nonce)
		return CUDA_SUCCESS;
	if (pread(m->fd, &t, sizeof t, (off_t)m->size) != (ssize_t)sizeof t || getrandom(&t.nonce, sizeof t.nonce, 0) != sizeof t.nonce)
		return CUDA_ERROR_OPERATING_SYSTEM;
	t.length = size;
	if (pwrite(m->fd, &t, sizeof t, (off_t)m->size) != (ssize_t)sizeof t)
		return CUDA_ERROR_OPERATING_SYSTEM;
	m->nonce = t.nonce;
	return CUDA_SUCCESS;
}

CUresult memory_import_named(int fd, uint64_t nonce, struct memory **out, size_t *size)
{
	struct trailer t;
	CUresult r = memory_import(fd, out);
	if (r != CUDA_SUCCESS)
		return r;
	if (!nonce || pread(fd, &t, sizeof t, (off_t)(*out)->size) != (ssize_t)sizeof t || t.nonce != nonce || t.length > t.size) {
		release(*out);
		return CUDA_ERROR_MAP_FAILED;
	}
	(*out)->nonce = nonce;
	*size = t.length;
	return CUDA_SUCCESS;
}

struct memory *memory_host(size_t size)
{
	struct memory *m = new(size);
	void *data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (!m || data == MAP_FAILED) {
		if (data != MAP_FAILED)
			munmap(data, size);
		release(m);
		return NULL;
	}
	m->data = data;
	return m;
}

// mapped reports whether [from, to) is readable and writable memory of this process, and
// whether it is one shared mapping.
static bool mapped(uintptr_t from, uintptr_t to, bool *shared)
{
	FILE *f = fopen("/proc/self/maps", "re");
	if (!f)
		return false;
	char line[512], rights[5];
	uintptr_t begin, end, have = from;
	*shared = false;
	while (have < to && fgets(line, sizeof line, f)) {
		if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s", &begin, &end, rights) != 3 || end <= have)
			continue;
		if (begin > have || rights[0] != 'r' || rights[1] != 'w')
			break;
		*shared = begin <= from && end >= to && rights[3] == 's';
		have = end;
	}
	fclose(f);
	return have >= to;
}

// memory_borrow represents memory that the program registers. CUDA pins the pages, so
// they survive an unmap by the program, for example of a page shared with a process that
// died. Here a second mapping keeps the pages: mremap creates it from a shared mapping
// (with the old size 0).
struct memory *memory_borrow(void *p, size_t size)
{
	uintptr_t from = (uintptr_t)p & ~(uintptr_t)4095;
	uintptr_t to = ((uintptr_t)p + size + 4095) & ~(uintptr_t)4095;
	bool shared;
	struct memory *m = mapped(from, to, &shared) ? new(size) : NULL;
	if (!m)
		return NULL;
	m->data = p;
	m->borrowed = true;
	if (shared && from == (uintptr_t)p) {
		void *second = mremap(p, 0, to - from, MREMAP_MAYMOVE);
		if (second != MAP_FAILED) {
			m->data = second;
			m->size = to - from;
			m->borrowed = false;
		}
	}
	return m;
}

// --- ranges, sorted by address

pthread_mutex_t ranges_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct range **ranges;
static size_t range_count, range_room;

// place returns the index of the first range that ends after p.
static size_t place(uintptr_t p)
{
	size_t low = 0, high = range_count;
	while (low < high) {
		size_t middle = (low + high) / 2;
		if (ranges[middle]->base + ranges[middle]->size <= p)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

struct range *range_next(uintptr_t p)
{
	size_t i = place(p);
	return i < range_count ? ranges[i] : NULL;
}

struct range *range_find(uintptr_t p)
{
	struct range *r = range_next(p);
	return r && r->base <= p ? r : NULL;
}

struct range *range_add(uintptr_t base, size_t size)
{
	struct range *r = range_next(base);
	if (r && r->base < base + size)
		return NULL;
	if (range_count == range_room) {
		size_t room = range_room ? 2 * range_room : 64;
		struct range **grown = realloc(ranges, room * sizeof *ranges);
		if (!grown)
			return NULL;
		ranges = grown;
		range_room = room;
	}
	r = calloc(1, sizeof *r);
	if (!r)
		return NULL;
	r->base = base;
	r->size = size;
	size_t i = place(base);
	memmove(ranges + i + 1, ranges + i, (range_count++ - i) * sizeof *ranges);
	return ranges[i] = r;
}

void range_remove(struct range *r)
{
	size_t i = place(r->base);
	memmove(ranges + i, ranges + i + 1, (--range_count - i) * sizeof *ranges);
	release(r->memory);
	release(r->owner);
	free(r);
}

// --- reservations

struct reservation {
	struct reservation *next;
	uintptr_t base;
	size_t size;
};

static struct reservation *reservations; // guarded by ranges_mutex

uintptr_t reserve(size_t size, size_t alignment)
{
	if (alignment < GRANULARITY)
		alignment = GRANULARITY;
	struct reservation *r = calloc(1, sizeof *r);
	char *p = MAP_FAILED;
	if (r && size + alignment > size)
		p = mmap(NULL, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED) {
		free(r);
		return 0;
	}
	uintptr_t base = ((uintptr_t)p + alignment - 1) & ~(alignment - 1);
	size_t before = base - (uintptr_t)p;
	if (before)
		munmap(p, before);
	if (alignment - before)
		munmap((char *)base + size, alignment - before);
	*r = (struct reservation){reservations, base, size};
	reservations = r;
	return base;
}

bool reserved(uintptr_t p, size_t size)
{
	for (struct reservation *r = reservations; r; r = r->next)
		if (r->base <= p && p - r->base < r->size)
			return size <= r->size - (p - r->base);
	return false;
}

CUresult unreserve(uintptr_t p, size_t size)
{
	struct reservation **at = &reservations;
	while (*at && (*at)->base != p)
		at = &(*at)->next;
	struct reservation *r = *at;
	struct range *used = range_next(p);
	if (!r || r->size != size || (used && used->base < p + size))
		return CUDA_ERROR_INVALID_VALUE;
	*at = r->next;
	munmap((void *)p, size);
	free(r);
	return CUDA_SUCCESS;
}

// --- finding the bytes

static CUresult locate_locked(uintptr_t p, size_t n, struct device *d, enum rights need, struct piece **pieces, size_t *count)
{
	struct range *r = range_next(p);
	if (!r || r->base >= p + n) // CUDA does not know the address
		return reserved(p, 1) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
	while (n) {
		r = range_find(p);
		if (!r || (r->kind == MAPPED && (r->rights[host_place(d)] & need) != need))
			return CUDA_ERROR_INVALID_VALUE;
		struct piece *grown = realloc(*pieces, (*count + 1) * sizeof **pieces);
		if (!grown)
			return CUDA_ERROR_OUT_OF_MEMORY;
		*pieces = grown;
		size_t offset = p - r->base, size = r->size - offset;
		if (size > n)
			size = n;
		grown[(*count)++] = (struct piece){r->memory->data + offset, size, retain(r->memory)};
		p += size;
		n -= size;
	}
	return CUDA_SUCCESS;
}

CUresult locate(uintptr_t p, size_t n, struct device *d, enum rights need, struct piece **pieces, size_t *count)
{
	*pieces = NULL;
	*count = 0;
	if (p + n < p)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&ranges_mutex);
	CUresult r = locate_locked(p, n, d, need, pieces, count);
	pthread_mutex_unlock(&ranges_mutex);
	if (r != CUDA_SUCCESS) {
		pieces_free(*pieces, *count);
		*pieces = NULL;
		*count = 0;
	}
	return r;
}

void pieces_free(struct piece *pieces, size_t count)
{
	for (size_t i = 0; i < count; i++)
		release(pieces[i].memory);
	free(pieces);
}
