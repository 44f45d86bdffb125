// Modules and kernels. The simulator compiles nothing: it finds the names of the entries
// in the PTX, and implements the kernels of Peerlane's package cuda/kernels in C, each as
// an operation of its stream. A kernel runs beside the copies of other streams but
// occupies no SM, so its duration says nothing about a GPU.
#include "sim.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PARAMETERS 8
#define WORD 8
#define LIST_UNIT 16
#define LIST_PART 8192
#define CHECKED 65536 // words between two checks for the end

// view is a range of memory that a kernel received.
struct view {
	struct piece *pieces;
	size_t count;
};

struct launch {
	struct object object;
	const struct kernel *kernel;
	unsigned blocks;
	uint64_t parameters[MAX_PARAMETERS];
	struct view memory, flag, found;
	CUresult strike; // the error on a GPU
};

// kernel is a known kernel. Its parameters are 64 bits wide.
struct kernel {
	const char *name;
	unsigned parameters;
	int address, size, unit; // parameters with a range of memory, in units of unit bytes; -1: none
	enum rights need;        // the kernel's access to that memory
	int flag;                // parameter with the address of a flag; -1: none
	int found;               // parameter with the address of the results; -1: none
	unsigned words, shared;  // words of the results per block, and of all blocks together
	void (*run)(struct stream *s, struct launch *l);
};

// --- the memory of a kernel

static _Atomic uint64_t *at(const struct view *v, uint64_t word)
{
	size_t offset = word * WORD, i = 0;
	while (offset >= v->pieces[i].size)
		offset -= v->pieces[i++].size;
	return (_Atomic uint64_t *)(v->pieces[i].data + offset);
}

static uint64_t load(const struct view *v, uint64_t word) { return atomic_load_explicit(at(v, word), memory_order_acquire); }

static void store(const struct view *v, uint64_t word, uint64_t x)
{
	atomic_store_explicit(at(v, word), x, memory_order_release);
}

// --- the kernels; the parameters are in the order of kernels.ptx

static uint64_t pattern(uint64_t seed, uint64_t i)
{
	uint64_t x = i * 0x9e3779b97f4a7c15u + seed * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 29) * 0x94d049bb133111ebu;
	return x ^ x >> 32;
}

static void fill(struct stream *s, struct launch *l)
{
	uint64_t words = l->parameters[1], seed = l->parameters[2], first = l->parameters[3];
	for (uint64_t i = 0; i < words && (i % CHECKED || !stream_over(s)); i++)
		store(&l->memory, i, pattern(seed, first + i));
}

// differs counts the words that are not the pattern's; *low is the first.
static uint64_t differs(struct stream *s, struct launch *l, uint64_t words, uint64_t seed, uint64_t first, uint64_t *low)
{
	uint64_t wrong = 0;
	*low = UINT64_MAX;
	for (uint64_t i = 0; i < words && (i % CHECKED || !stream_over(s)); i++)
		if (load(&l->memory, i) != pattern(seed, first + i) && wrong++ == 0)
			*low = i;
	return wrong;
}

static void compare(struct stream *s, struct launch *l)
{
	uint64_t low, wrong = differs(s, l, l->parameters[1], l->parameters[2], l->parameters[3], &low);
	for (unsigned block = 0; block < l->blocks; block++) { // the first block reports all differences
		store(&l->found, 2 * block, block ? 0 : wrong);
		store(&l->found, 2 * block + 1, block ? UINT64_MAX : low);
	}
}

// arrives waits for the flag as the reader does. Polls are counted at the rate of a GPU,
// about one per microsecond over PCIe.
static bool arrives(struct stream *s, struct launch *l, uint64_t value, uint64_t polls)
{
	for (uint64_t since = now_ns(); !stream_over(s); patience(since)) {
		bool late = (now_ns() - since) / 1000 >= polls;
		if ((int64_t)(load(&l->flag, 0) - value) >= 0)
			return true;
		if (late)
			return false;
	}
	return false;
}

static void reader(struct stream *s, struct launch *l)
{
	uint64_t value = l->parameters[1], polls = l->parameters[2], rounds = l->parameters[3];
	uint64_t words = l->parameters[5], seed = l->parameters[6], total = 0, low;
	store(&l->found, 0, 1);
	store(&l->found, 3, UINT64_MAX);
	for (uint64_t round = 0; round < rounds; round++) {
		if (!arrives(s, l, value + round, polls)) {
			if (!stream_over(s))
				store(&l->found, 1, 2);
			return;
		}
		uint64_t wrong = differs(s, l, words, seed + round, 0, &low);
		if (wrong && !total) {
			store(&l->found, 3, low);
			store(&l->found, 4, round);
		}
		total += wrong;
		store(&l->found, 2, total);
		store(&l->found, 0, round + 2);
	}
	store(&l->found, 1, 1);
}

// ends reports whether a kernel that a time and a flag limit must end.
static bool ends(struct stream *s, struct launch *l, uint64_t since, uint64_t ns)
{
	return stream_over(s) || now_ns() - since >= ns || (l->flag.count && load(&l->flag, 0));
}

static void tell_rounds(struct launch *l, uint64_t rounds)
{
	for (unsigned block = 0; block < l->blocks; block++)
		store(&l->found, block, rounds);
}

static void spin(struct stream *s, struct launch *l)
{
	uint64_t rounds = 0, since = now_ns();
	for (; !ends(s, l, since, l->parameters[1]); rounds++)
		patience(since);
	tell_rounds(l, rounds + 1);
}

static void stream(struct stream *s, struct launch *l)
{
	uint64_t rounds = 0, since = now_ns();
	do {
		for (uint64_t i = 0; i < 2 * l->parameters[1] && (i % CHECKED || !stream_over(s)); i++)
			store(&l->memory, i, load(&l->memory, i) + 1);
		rounds++;
	} while (!ends(s, l, since, l->parameters[3]));
	tell_rounds(l, rounds);
}

// copy_range copies n bytes of device memory, and returns the error that a GPU has.
static CUresult copy_range(struct stream *s, uint64_t to, uint64_t from, uint64_t n)
{
	struct device *d = s->context->device;
	struct view t = {0}, f = {0};
	CUresult r = CUDA_SUCCESS;
	if (!n)
		return CUDA_SUCCESS;
	if ((to | from | n) % LIST_UNIT)
		return CUDA_ERROR_MISALIGNED_ADDRESS;
	if (locate(to, n, d, READ_WRITE, &t.pieces, &t.count) != CUDA_SUCCESS || !t.count ||
	    locate(from, n, d, READ, &f.pieces, &f.count) != CUDA_SUCCESS || !f.count)
		r = CUDA_ERROR_ILLEGAL_ADDRESS;
	for (size_t done = 0, i = 0, k = 0, t_at = 0, f_at = 0; r == CUDA_SUCCESS && done < n && !stream_over(s);) {
		struct piece *tp = &t.pieces[i], *fp = &f.pieces[k];
		size_t step = tp->size - t_at < fp->size - f_at ? tp->size - t_at : fp->size - f_at;
		struct segment g = {tp->data + t_at, fp->data + f_at, step, tp->memory, fp->memory};
		memmove(g.dst, g.src, step);
		segment_count(&g);
		done += step;
		t_at += step;
		f_at += step;
		if (t_at == tp->size)
			i++, t_at = 0;
		if (f_at == fp->size)
			k++, f_at = 0;
	}
	pieces_free(t.pieces, t.count);
	pieces_free(f.pieces, f.count);
	return r;
}

static void copy_list(struct stream *s, struct launch *l)
{
	uint64_t parts = l->parameters[2];
	for (uint64_t i = 0; i < l->parameters[1] && !stream_over(s); i++) {
		uint64_t n = load(&l->memory, 3 * i + 2);
		int none = 0;
		if (n > parts * LIST_PART) // the rest belongs to no warp
			n = parts * LIST_PART;
		CUresult r = copy_range(s, load(&l->memory, 3 * i), load(&l->memory, 3 * i + 1), n);
		if (r != CUDA_SUCCESS) {
			atomic_compare_exchange_strong(&s->context->sticky, &none, (int)r);
			return;
		}
	}
}

static const struct kernel kernels[] = {
	{"peerlane_fill", 4, 0, 1, 8, READ_WRITE, -1, -1, 0, 0, fill},
	{"peerlane_compare", 5, 0, 1, 8, READ, -1, 4, 2, 0, compare},
	{"peerlane_reader", 8, 4, 5, 8, READ, 0, 7, 0, 5, reader},
	{"peerlane_spin", 4, -1, -1, 0, NONE, 0, 2, 1, 0, spin},
	{"peerlane_stream", 6, 0, 1, 16, READ_WRITE, 2, 4, 1, 0, stream},
	{"peerlane_copy_list", 3, 0, 1, 24, READ, -1, -1, 0, 0, copy_list},
};

#define KERNELS (sizeof kernels / sizeof *kernels)

void launch_run(struct stream *s, struct launch *l)
{
	int none = 0;
	if (l->strike)
		atomic_compare_exchange_strong(&s->context->sticky, &none, (int)l->strike);
	else
		l->kernel->run(s, l);
}

// --- modules

struct function {
	struct object object;
	const struct kernel *kernel;
	struct context *context;
};

struct module {
	struct object object;
	struct context *context;
	bool has[KERNELS];
	pthread_mutex_t mutex;
	uint64_t functions[KERNELS]; // handles; 0 before the first query
};

static void function_destroy(struct object *o)
{
	release(((struct function *)o)->context);
	free(o);
}

static void module_destroy(struct object *o)
{
	struct module *m = (struct module *)o;
	for (size_t i = 0; i < KERNELS; i++)
		if (m->functions[i])
			release(handle_take(FUNCTION, m->functions[i]));
	pthread_mutex_destroy(&m->mutex);
	release(m->context);
	free(m);
}

// entries finds the known kernels in the PTX. It writes its error to log: text without
// PTX, or the first unknown entry.
static CUresult entries(const char *ptx, struct module *m, char *log, size_t n)
{
	static const char directive[] = ".entry";
	if (!strstr(ptx, ".version") || !strstr(ptx, ".target")) {
		snprintf(log, n, "simulator: no PTX: .version or .target is missing");
		return CUDA_ERROR_INVALID_PTX;
	}
	while ((ptx = strstr(ptx, directive))) {
		char name[128] = "";
		ptx += sizeof directive - 1;
		sscanf(ptx, " %127[A-Za-z0-9_$]", name);
		size_t i = 0;
		while (i < KERNELS && strcmp(kernels[i].name, name) != 0)
			i++;
		if (i == KERNELS) {
			snprintf(log, n, "simulator: it has no kernel %s, and compiles none", name);
			return CUDA_ERROR_INVALID_PTX;
		}
		m->has[i] = true;
	}
	return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned n, int *options, void **values)
{
	CUresult r = enter("cuModuleLoadDataEx", NULL);
	struct context *c;
	char nothing[1], *log = nothing;
	size_t room = sizeof nothing;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	if (!out || !image || (n && (!options || !values)))
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned i = 0; i < n; i++) {
		if (options[i] == CU_JIT_ERROR_LOG_BUFFER)
			log = values[i];
		else if (options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
			room = (uintptr_t)values[i];
	}
	if (log == nothing || !log)
		log = nothing, room = sizeof nothing;
	struct module *m = calloc(1, sizeof *m);
	if (!m)
		return CUDA_ERROR_OUT_OF_MEMORY;
	object_init(&m->object, module_destroy);
	pthread_mutex_init(&m->mutex, NULL);
	m->context = retain(c);
	r = entries(image, m, log, room);
	if (r != CUDA_SUCCESS) {
		release(m);
		return r;
	}
	*out = handle_new(MODULE, m);
	return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuModuleLoadData(CUmodule *m, const void *image) { return cuModuleLoadDataEx(m, image, 0, NULL, NULL); }

CUresult cuModuleGetFunction(CUfunction *out, CUmodule h, const char *name)
{
	CUresult r = enter("cuModuleGetFunction", NULL);
	struct context *c;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	if (!out || !name)
		return CUDA_ERROR_INVALID_VALUE;
	struct module *m = handle_get(MODULE, h);
	if (!m)
		return CUDA_ERROR_INVALID_HANDLE;
	size_t i = 0;
	while (i < KERNELS && !(m->has[i] && strcmp(kernels[i].name, name) == 0))
		i++;
	r = i < KERNELS ? context_state(m->context) : CUDA_ERROR_NOT_FOUND;
	pthread_mutex_lock(&m->mutex);
	if (r == CUDA_SUCCESS && !m->functions[i]) {
		struct function *f = calloc(1, sizeof *f);
		if (f) {
			object_init(&f->object, function_destroy);
			f->kernel = &kernels[i];
			f->context = retain(m->context);
			m->functions[i] = handle_new(FUNCTION, f);
		}
		if (!m->functions[i])
			r = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (r == CUDA_SUCCESS)
		*out = m->functions[i];
	pthread_mutex_unlock(&m->mutex);
	release(m);
	return r;
}

CUresult cuModuleUnload(CUmodule h)
{
	CUresult r = enter("cuModuleUnload", NULL);
	struct context *c;
	if (r != CUDA_SUCCESS || (r = context_current(&c)) != CUDA_SUCCESS)
		return r;
	struct module *m = handle_take(MODULE, h);
	release(m);
	return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

// --- launches

static void launch_destroy(struct object *o)
{
	struct launch *l = (struct launch *)o;
	pieces_free(l->memory.pieces, l->memory.count);
	pieces_free(l->flag.pieces, l->flag.count);
	pieces_free(l->found.pieces, l->found.count);
	free(l);
}

// look finds the memory of a parameter. A wrong address fails the kernel, not the launch.
static void look(struct launch *l, struct view *v, struct device *d, int address, uint64_t size, unsigned unit,
		 enum rights need)
{
	uint64_t p = l->parameters[address];
	if (!size || l->strike)
		return;
	if (p % (unit & -unit)) // the power of two in it
		l->strike = CUDA_ERROR_MISALIGNED_ADDRESS;
	else if (locate(p, size, d, need, &v->pieces, &v->count) != CUDA_SUCCESS || !v->count)
		l->strike = CUDA_ERROR_ILLEGAL_ADDRESS;
}

static struct launch *launch_new(const struct kernel *k, struct device *d, unsigned blocks, void **parameters)
{
	struct launch *l = calloc(1, sizeof *l);
	if (!l)
		return NULL;
	object_init(&l->object, launch_destroy);
	l->kernel = k;
	l->blocks = blocks;
	for (unsigned i = 0; i < k->parameters; i++)
		memcpy(&l->parameters[i], parameters[i], WORD);
	if (k->address >= 0) {
		uint64_t units = l->parameters[k->size];
		if (units > UINT64_MAX / (unsigned)k->unit)
			l->strike = CUDA_ERROR_ILLEGAL_ADDRESS;
		look(l, &l->memory, d, k->address, units * (unsigned)k->unit, (unsigned)k->unit, k->need);
	}
	if (k->flag >= 0 && l->parameters[k->flag])
		look(l, &l->flag, d, k->flag, WORD, WORD, READ);
	if (k->found >= 0)
		look(l, &l->found, d, k->found, ((uint64_t)k->words * blocks + k->shared) * WORD, WORD, READ_WRITE);
	return l;
}

CUresult cuLaunchKernel(CUfunction h, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
			unsigned shared, CUstream sh, void **parameters, void **extra)
{
	struct fault fault;
	CUresult r = enter("cuLaunchKernel", &fault);
	struct stream *s;
	if (r != CUDA_SUCCESS || (r = stream_get(sh, &s)) != CUDA_SUCCESS)
		return r;
	struct function *f = handle_get(FUNCTION, h);
	if (!f || f->context != s->context)
		r = CUDA_ERROR_INVALID_HANDLE;
	else if (!gx || gy != 1 || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || shared || !parameters || extra)
		r = CUDA_ERROR_INVALID_VALUE;
	if (r == CUDA_SUCCESS && !capturing(s))
		r = stream_engine(s, false, &fault);
	if (r == CUDA_SUCCESS) {
		struct launch *l = launch_new(f->kernel, s->context->device, gx, parameters);
		struct operation *op = l ? operation_new(KERNEL, &fault) : NULL;
		if (op) {
			uint64_t number;
			op->launch = l;
			r = stream_submit(s, op, &number);
		} else {
			release(l);
			r = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	release(f);
	release(s);
	return r;
}
