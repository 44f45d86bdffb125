// The part of a GPU's memory that the CPU reaches through the GPU's BAR1, by ioctls of NVIDIA's
// kernel driver: open-gpu-kernel-modules, src/common/sdk/nvidia/inc/nvos.h and ctrl0000unix.h,
// kernel-open/common/inc/nv-ioctl.h. Their layouts are those of releases 545 to 595; older ones refuse the calls.
#ifndef PEERLANE_APERTURE_H
#define PEERLANE_APERTURE_H

#include <stddef.h>
#include <stdint.h>

// A client of the kernel driver, with one GPU.
typedef struct {
	int control;        // /dev/nvidiactl
	uint32_t minor;     // /dev/nvidiaN
	uint32_t client;    // handles of the kernel driver
	uint32_t device;    // 0 until the first mapping
	uint32_t instance;  // of the device
	uint32_t last;      // handle given out
	uint64_t bytes;     // size of BAR1
} peerlane_aperture;

// Steps at which a call can fail.
enum {
	PEERLANE_APERTURE_CONTROL = 1,
	PEERLANE_APERTURE_CLIENT,
	PEERLANE_APERTURE_CARDS,
	PEERLANE_APERTURE_EXPORT,
	PEERLANE_APERTURE_DEVICE,
	PEERLANE_APERTURE_NODE,
	PEERLANE_APERTURE_IMPORT,
	PEERLANE_APERTURE_MAP,
	PEERLANE_APERTURE_MMAP,
};

// peerlane_failure is the failed step, with errno or the kernel driver's status
// (NV_STATUS).
typedef struct {
	int step, error;
	uint32_t status;
} peerlane_failure;

int peerlane_aperture_open(peerlane_aperture *a, uint32_t domain, uint32_t bus, uint32_t slot, peerlane_failure *f);
void peerlane_aperture_close(peerlane_aperture *a);

// peerlane_aperture_map maps part of an allocation that cuMemExportToShareableHandle exported.
// memory identifies the mapping for peerlane_aperture_release, which the caller calls
// after munmap.
int peerlane_aperture_map(peerlane_aperture *a, int fd, uint64_t offset, uint64_t bytes, void **data, uint32_t *memory, peerlane_failure *f);
void peerlane_aperture_release(peerlane_aperture *a, uint32_t memory);

#endif
