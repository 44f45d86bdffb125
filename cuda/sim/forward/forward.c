// A CUDA library in front of the driver's. It injects the simulator's faults (libcuda/fault.c)
// into calls, for tests of relays on real GPUs.
//
//	PEERLANE_CUDA_LIBRARY  this library
//	PEERLANE_FORWARD_TO    the driver's library (default: libcuda.so.1)
//	PEERLANE_FORWARD_FAULT, PEERLANE_FORWARD_CALLS  as PEERLANE_SIM_FAULT and PEERLANE_SIM_CALLS
//
// Unlike the simulator, the library cannot corrupt a copy, and the loss of a context fails every
// later call of the process.
//
// Build: make bin/libpeerlane-cuda-faults.so
#include "../../driver.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

struct fault;
void fault_load(void);
CUresult fault_due(const char *call, struct fault *f);

static peerlane_calls *driver;
static atomic_int failed; // result of every later call

// fault.c calls complain and context_fail.
__attribute__((format(printf, 1, 2))) void complain(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	fputs("cuda faults: ", stderr);
	vfprintf(stderr, format, arguments);
	fputc('\n', stderr);
	va_end(arguments);
}

void context_fail(CUresult r) { atomic_store(&failed, (int)r); }

static void load(void)
{
	char message[512];
	int missing;
	const char *path = getenv("PEERLANE_FORWARD_TO");
	fault_load();
	driver = peerlane_cuda_open(path && *path ? path : "libcuda.so.1", message, sizeof message, &missing);
	if (!driver)
		complain("opening the driver's library: %s", message);
}

static CUresult begin(const char *call)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pthread_once(&once, load);
	if (!driver)
		return (CUresult)3; // CUDA_ERROR_NOT_INITIALIZED
	if (strncmp(call, "cuGetError", 10) == 0)
		return (CUresult)0;
	int r = atomic_load(&failed);
	return r ? (CUresult)r : fault_due(call, NULL);
}

#define X(name, symbol, params, args) \
	EXPORT CUresult forward_##name(params) __asm__(symbol); \
	CUresult forward_##name(params) \
	{ \
		CUresult fault = begin(#name); \
		return fault ? fault : call_##name(driver, args); \
	}
CALLS(X)
OPTIONAL(X)
#undef X

EXPORT CUresult forward_cuCtxSynchronize(void) __asm__("cuCtxSynchronize");
CUresult forward_cuCtxSynchronize(void)
{
	CUresult fault = begin("cuCtxSynchronize");
	return fault ? fault : call_cuCtxSynchronize(driver);
}
