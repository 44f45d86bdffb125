#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static int find(void *library, void **slot, const char *symbol, char *message, size_t n)
{
	*slot = dlsym(library, symbol);
	if (!*slot)
		snprintf(message, n, "%s", symbol);
	return *slot != NULL;
}

peerlane_calls *peerlane_cuda_open(const char *path, char *message, size_t n, int *missing)
{
	*missing = 0;
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!library) {
		const char *why = dlerror();
		snprintf(message, n, "%s", why ? why : "the loader gives no reason");
		return NULL;
	}
	peerlane_calls *t = calloc(1, sizeof *t);
	if (!t) {
		snprintf(message, n, "out of memory");
		return NULL;
	}
	// Keep the library open if a symbol is missing: closing a libcuda that has started
	// threads is not safe.
#define X(name, symbol, params, args) \
	if (!find(library, (void **)&t->name, symbol, message, n)) \
		goto lacks;
	CALLS(X)
#undef X
#define X(name, symbol, params, args) *(void **)&t->name = dlsym(library, symbol);
	OPTIONAL(X)
#undef X
	if (!find(library, (void **)&t->cuCtxSynchronize, "cuCtxSynchronize", message, n))
		goto lacks;
	t->simulated = dlsym(library, "peerlaneSimVersion") != NULL;
	return t;
lacks:
	*missing = 1;
	free(t);
	return NULL;
}
