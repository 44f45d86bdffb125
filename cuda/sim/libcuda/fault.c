// Injected faults, and the results' names.
//
// PEERLANE_SIM_FAULT is a list, separated by semicolons, of
//
//	CALL[:process=FILE][:after=N][:times=N]:EFFECT...
//
// CALL is the name of a call without its version, or the beginning of a name and *. The fault is
// due at every call after the first N (after), at most N times (times). With process=FILE the
// fault is due only in the process whose number the file holds, or in each process while the
// file holds 0, so that a test selects the process and the time. Effects: error=RESULT,
// delay=MILLISECONDS, corrupt=1 (one wrong byte in a copy), oom, lost (this and every later call
// fails). An error that loses the context (700, 719, 999 and so on) fails an operation on a
// stream at the turn of the operation, as on a GPU: the call itself succeeds.
//
// PEERLANE_SIM_CALLS names a file to which each call that can have a fault adds its name, a line
// per call.
#define _GNU_SOURCE
#include "sim.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef VARIABLES
#define VARIABLES "PEERLANE_SIM_" // ../forward has other variables
#endif

struct rule {
	char call[64], process[256];
	bool prefix;
	long after, times;
	atomic_long calls;
	unsigned delay_ms;
	bool corrupt, lost;
	CUresult error;
};

static struct rule rules[16];
static int rule_count;
static bool broken;
static atomic_bool lost;
static int calls = -1; // the file of PEERLANE_SIM_CALLS

static bool parse_rule(char *text, struct rule *rule)
{
	char *word = strsep(&text, ":");
	size_t n = strlen(word);
	if (n == 0 || n >= sizeof rule->call)
		return false;
	if (word[n - 1] == '*') {
		rule->prefix = true;
		word[--n] = 0;
	}
	memcpy(rule->call, word, n + 1);
	rule->times = -1;
	while ((word = strsep(&text, ":"))) {
		int number = 0;
		if (sscanf(word, "after=%ld", &rule->after) == 1 || sscanf(word, "times=%ld", &rule->times) == 1 ||
		    sscanf(word, "delay=%u", &rule->delay_ms) == 1 || sscanf(word, "process=%255s", rule->process) == 1)
			continue;
		if (sscanf(word, "error=%d", &number) == 1 && number > 0)
			rule->error = (CUresult)number;
		else if (strcmp(word, "corrupt=1") == 0 || strcmp(word, "corrupt") == 0)
			rule->corrupt = true;
		else if (strcmp(word, "oom") == 0)
			rule->error = CUDA_ERROR_OUT_OF_MEMORY;
		else if (strcmp(word, "lost") == 0)
			rule->lost = true;
		else
			return false;
	}
	return rule->delay_ms || rule->corrupt || rule->lost || rule->error;
}

void fault_load(void)
{
	const char *list = getenv(VARIABLES "CALLS");
	if (list && *list && (calls = open(list, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) < 0) {
		complain(VARIABLES "CALLS=%s: cannot be written", list);
		broken = true;
	}
	const char *text = getenv(VARIABLES "FAULT");
	if (!text || !*text)
		return;
	char copy[4096], *rest = copy, *word;
	snprintf(copy, sizeof copy, "%s", text);
	while ((word = strsep(&rest, ";"))) {
		if (!*word)
			continue;
		if (rule_count == 16 || !parse_rule(word, &rules[rule_count])) {
			complain(VARIABLES "FAULT=%s: not a fault", text);
			broken = true;
			return;
		}
		rule_count++;
	}
}

bool sticky(CUresult r)
{
	return r == 214 || r == 220 || r == 700 || r == 702 || r == 710 || (r >= 714 && r <= 719) || r == 721 || r == 999;
}

// named reports whether a file holds the number of this process, or 0.
static bool named(const char *file)
{
	char text[32], *end;
	int fd = open(file, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	ssize_t n = read(fd, text, sizeof text - 1);
	close(fd);
	if (n <= 0)
		return false;
	text[n] = 0;
	long pid = strtol(text, &end, 10);
	return end > text && (pid == 0 || pid == getpid());
}

CUresult fault_due(const char *call, struct fault *f)
{
	if (broken)
		return CUDA_ERROR_INVALID_VALUE;
	if (calls >= 0)
		dprintf(calls, "%s\n", call);
	if (atomic_load(&lost))
		return CUDA_ERROR_UNKNOWN;
	for (int i = 0; i < rule_count; i++) {
		struct rule *rule = &rules[i];
		if (rule->prefix ? strncmp(call, rule->call, strlen(rule->call)) : strcmp(call, rule->call))
			continue;
		if (*rule->process && !named(rule->process))
			continue;
		long number = atomic_fetch_add(&rule->calls, 1);
		if (number < rule->after || (rule->times >= 0 && number >= rule->after + rule->times))
			continue;
		if (rule->lost) {
			atomic_store(&lost, true);
			return CUDA_ERROR_UNKNOWN;
		}
		if (rule->error && f && sticky(rule->error))
			f->strike = rule->error;
		else if (rule->error) {
			if (sticky(rule->error))
				context_fail(rule->error);
			return rule->error;
		}
		if (f) {
			f->delay_ms += rule->delay_ms;
			f->corrupt |= rule->corrupt;
		} else if (rule->delay_ms) {
			struct timespec t = {rule->delay_ms / 1000, rule->delay_ms % 1000 * 1000000L};
			nanosleep(&t, NULL);
		}
	}
	return CUDA_SUCCESS;
}

static const struct {
	int result;
	const char *name, *text;
} results[] = {
	{0, "CUDA_SUCCESS", "no error"},
	{1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	{2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	{3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	{4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
	{46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
	{100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
	{101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	{200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
	{201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
	{205, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
	{206, "CUDA_ERROR_UNMAP_FAILED", "unmapping of buffer object failed"},
	{208, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
	{211, "CUDA_ERROR_NOT_MAPPED", "resource not mapped"},
	{214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
	{215, "CUDA_ERROR_UNSUPPORTED_LIMIT", "limit is not supported on this architecture"},
	{217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
	{218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
	{220, "CUDA_ERROR_NVLINK_UNCORRECTABLE", "uncorrectable NVLink error detected during the execution"},
	{304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
	{400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	{401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
	{500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
	{600, "CUDA_ERROR_NOT_READY", "device not ready"},
	{700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
	{702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
	{704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
	{705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
	{709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
	{712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
	{713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
	{714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"},
	{716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
	{719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
	{800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
	{801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
	{802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
	{803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
	{900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
	{901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
	{902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"},
	{903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
	{904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
	{905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
	{907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
	{908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread"},
	{999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult describe(CUresult r, const char **s, bool name)
{
	if (!s)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < sizeof results / sizeof *results; i++)
		if (results[i].result == (int)r) {
			*s = name ? results[i].name : results[i].text;
			return CUDA_SUCCESS;
		}
	*s = NULL;
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult r, const char **s) { return describe(r, s, true); }
CUresult cuGetErrorString(CUresult r, const char **s) { return describe(r, s, false); }
