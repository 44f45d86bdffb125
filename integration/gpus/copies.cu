// Measures copies of every kind and size that a relay makes, on an idle GPU and on a GPU that is
// busy with kernels of another process:
//
//   nvcc -O2 -std=c++17 -arch=native -o copies integration/gpus/copies.cu -lcuda && ./copies [TEXT]
//
// TEXT selects the kinds whose names contain TEXT.
//
// A line has the median and the 99th percentile of 120 calls, microseconds, from the call until
// the completion of an event after the call. Every kind has a separate stream, so that the first
// work of the stream is of that kind. Needs CUDA 12.8 or newer, and about 60 s.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

__global__ void spin(long long cycles)
{
	for (long long since = clock64(); clock64() - since < cycles;)
		;
}

static double now() // us
{
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void check(CUresult r, const char *what)
{
	const char *text = "unknown error";
	if (!r)
		return;
	cuGetErrorString(r, &text);
	fprintf(stderr, "copies: %s: %s\n", what, text);
	exit(1);
}
#define CHECK(call) check(call, #call)

// exportable allocates device memory as clients of a relay export it.
static CUdeviceptr exportable(size_t bytes)
{
	CUmemAllocationProp properties = {};
	CUmemGenericAllocationHandle handle;
	CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, {0}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	CUdeviceptr at;

	properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	CHECK(cuMemCreate(&handle, bytes, &properties, 0));
	CHECK(cuMemAddressReserve(&at, bytes, 0, 0, 0));
	CHECK(cuMemMap(at, bytes, 0, handle, 0));
	CHECK(cuMemSetAccess(at, bytes, &access, 1));
	return at;
}

// hold keeps the GPU busy without an end, after a byte on the descriptor begin.
static void hold(int begin)
{
	char c;
	if (read(begin, &c, 1) != 1)
		return;
	cudaSetDevice(0);
	for (;;) {
		for (int i = 0; i < 8; i++)
			spin<<<264, 256>>>(20000000);
		if (cudaDeviceSynchronize())
			return;
	}
}

struct kind {
	const char *name;
	size_t smallest, largest;
	std::function<CUresult(size_t, CUstream)> copy;
};

int main(int argc, char **argv)
{
	const size_t largest = 16 << 20, within_largest = 256 << 20;
	const char *selected = argc > 1 ? argv[1] : "";
	int begin[2];
	if (pipe(begin))
		return 1;
	pid_t holder = fork(); // before CUDA is initialized
	if (!holder) {
		hold(begin[0]);
		return 1;
	}
	CUdevice device;
	CUcontext context;
	CUevent event;
	char *host;
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&device, 0));
	CHECK(cuDevicePrimaryCtxRetain(&context, device));
	CHECK(cuCtxSetCurrent(context));
	CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
	CHECK(cuMemAllocHost((void **)&host, within_largest));
	memset(host, 1, within_largest);
	CUdeviceptr to = exportable(within_largest), from = exportable(within_largest);

	auto rows = [&](size_t n, CUstream s) {
		CUDA_MEMCPY2D c = {};
		c.srcMemoryType = CU_MEMORYTYPE_HOST, c.srcHost = host, c.srcPitch = n / 2;
		c.dstMemoryType = CU_MEMORYTYPE_DEVICE, c.dstDevice = to, c.dstPitch = n / 2;
		c.WidthInBytes = n / 2, c.Height = 2;
		return cuMemcpy2DAsync(&c, s);
	};
	auto within = [&](size_t n, CUstream s) {
		CUmemcpyAttributes a = {};
		size_t first = 0;
		a.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, a.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
		return cuMemcpyBatchAsync(&to, &from, &n, 1, &a, &first, 1, s);
	};
	auto values = [&](size_t n, CUstream s) {
		CUstreamBatchMemOpParams p[8] = {};
		for (size_t i = 0; i < n / 8; i++) {
			p[i].operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
			p[i].writeValue.address = to + 8 * i;
			p[i].writeValue.value64 = 1;
		}
		return cuStreamBatchMemOp(s, n / 8, p, 0);
	};
	const std::vector<kind> kinds = {
		{"host to GPU: cuStreamWriteValue64, first of its stream", 8, 8, [&](size_t, CUstream s) { return cuStreamWriteValue64(s, to, 1, 0); }},
		{"host to GPU: cuStreamBatchMemOp, first of its stream", 16, 64, values},
		{"host to GPU: cuMemcpyDtoHAsync, then cuStreamWriteValue64", 8, 8, [&](size_t n, CUstream s) {
			 CUresult r = cuMemcpyDtoHAsync(host, to, n, s);
			 return r ? r : cuStreamWriteValue64(s, to, 1, 0);
		 }},
		{"host to GPU: cuMemcpyDtoHAsync, then cuStreamBatchMemOp", 8, 64, [&](size_t n, CUstream s) {
			 CUresult r = cuMemcpyDtoHAsync(host, to, 8, s);
			 return r ? r : values(n, s);
		 }},
		{"host to GPU: cuMemcpyHtoDAsync", 1, largest, [&](size_t n, CUstream s) { return cuMemcpyHtoDAsync(to, host, n, s); }},
		{"host to GPU: cuMemcpy2DAsync, 2 rows", 2, largest, rows},
		{"GPU to host: cuMemcpyDtoHAsync", 1, largest, [&](size_t n, CUstream s) { return cuMemcpyDtoHAsync(host, from, n, s); }},
		{"value to GPU: cuMemsetD8Async", 1, 16, [&](size_t n, CUstream s) { return cuMemsetD8Async(to, 1, n, s); }},
		{"value to GPU: cuMemsetD2D8Async, 1 row", 1, 16, [&](size_t n, CUstream s) { return cuMemsetD2D8Async(to, 512, 1, n, 1, s); }},
		{"value to GPU: cuMemcpyDtoHAsync, then cuMemsetD8Async", 1, 16, [&](size_t n, CUstream s) {
			 CUresult r = cuMemcpyDtoHAsync(host, to, 8, s);
			 return r ? r : cuMemsetD8Async(to, 1, n, s);
		 }},
		{"within the GPU: cuMemcpyAsync", 1, within_largest, [&](size_t n, CUstream s) { return cuMemcpyAsync(to, from, n, s); }},
		{"within the GPU: cuMemcpyBatchAsync", 8, within_largest, within},
		{"within the GPU: cuMemcpyDtoHAsync, then into it", 16, within_largest, [&](size_t n, CUstream s) {
			 CUresult r = cuMemcpyDtoHAsync(host, from, n, s);
			 return r ? r : n < 32 << 10 ? rows(n, s) : cuMemcpyHtoDAsync(to, host, n, s);
		 }},
	};
	for (int busy = 0; busy < 2; busy++) {
		if (busy) {
			if (write(begin[1], "x", 1) != 1)
				return 1;
			sleep(2); // for the context and the first kernels
		}
		for (const kind &k : kinds)
			for (size_t n : {1, 2, 8, 16, 64, 1 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20, 256 << 20}) {
				if (n < k.smallest || n > k.largest || !strstr(k.name, selected))
					continue;
				CUstream stream;
				CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
				std::vector<double> times;
				for (int i = 0; i < 120; i++) {
					usleep(50 + rand() % 500); // at any time of a slice
					double since = now();
					check(k.copy(n, stream), k.name);
					CHECK(cuEventRecord(event, stream));
					while (cuEventQuery(event) == CUDA_ERROR_NOT_READY)
						;
					times.push_back(now() - since);
				}
				CHECK(cuStreamDestroy(stream));
				std::sort(times.begin(), times.end());
				printf("%s, %9zu bytes, %s: p50 %.1f p99 %.1f\n", busy ? "busy" : "idle", n, k.name, times[60], times[118]);
				fflush(stdout);
			}
	}
	kill(holder, SIGKILL);
	waitpid(holder, nullptr, 0);
	return 0;
}
