#include "aperture.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

// Escapes, classes and controls of the kernel driver.
enum {
	ESCAPE_FREE = 0x29,
	ESCAPE_CONTROL = 0x2a,
	ESCAPE_ALLOC = 0x2b,
	ESCAPE_MAP_MEMORY = 0x4e,
	ESCAPE_CARD_INFO = 200,
	ESCAPE_REGISTER_FD = 201,

	CLASS_ROOT_CLIENT = 0x41,
	CLASS_DEVICE = 0x80,

	CONTROL_IMPORT_OBJECT_FROM_FD = 0x3d06,
	CONTROL_GET_EXPORT_OBJECT_INFO = 0x3d08,

	OBJECT_RM = 1, // NV0000_CTRL_OS_UNIX_EXPORT_OBJECT_TYPE_RM
	MAX_CARDS = 32,
	FIRST_HANDLE = 0x50000000,
};

struct nvos00 { // NVOS00_PARAMETERS
	uint32_t root, parent, object, status;
};

struct nvos21 { // NVOS21_PARAMETERS
	uint32_t root, parent, object, class;
	uint64_t parameters;
	uint32_t size, status;
};

struct nvos54 { // NVOS54_PARAMETERS
	uint32_t client, object, command, flags;
	uint64_t parameters;
	uint32_t size, status;
};

struct nvos33 { // nv_ioctl_nvos33_parameters_with_fd
	uint32_t client, device, memory;
	uint64_t offset, length, address;
	uint32_t status, flags;
	int fd;
};

struct device { // NV0080_ALLOC_PARAMETERS
	uint32_t id, share, target_client, target_device, flags;
	uint64_t size, start, limit;
	uint32_t mode;
};

struct export_info { // NV0000_CTRL_OS_UNIX_GET_EXPORT_OBJECT_INFO_PARAMS
	int32_t fd;
	uint32_t device, gpu;
	uint16_t objects;
	uint8_t metadata[64];
};

struct import { // NV0000_CTRL_OS_UNIX_IMPORT_OBJECT_FROM_FD_PARAMS
	int32_t fd;
	uint32_t type, device, parent, object;
};

struct card { // nv_ioctl_card_info_t
	uint8_t valid;
	uint32_t domain;
	uint8_t bus, slot, function;
	uint16_t vendor, id;
	uint32_t gpu;
	uint16_t interrupt;
	uint64_t registers, registers_size, memory, memory_size;
	uint32_t minor;
	uint8_t name[10];
};

_Static_assert(sizeof(struct nvos21) == 32 && sizeof(struct nvos54) == 32 && sizeof(struct nvos33) == 56, "parameters of the kernel driver");
_Static_assert(sizeof(struct device) == 56 && sizeof(struct export_info) == 80 && sizeof(struct import) == 20 && sizeof(struct card) == 72, "parameters of the kernel driver");

#define NVIDIA_IOCTL(number, size) _IOC(_IOC_READ | _IOC_WRITE, 'F', number, size)

static int failed(peerlane_failure *f, int step, int error, uint32_t status)
{
	*f = (peerlane_failure){step, error, status};
	return -1;
}

static int control(peerlane_aperture *a, uint32_t command, void *parameters, uint32_t size, int step, peerlane_failure *f)
{
	struct nvos54 c = {.client = a->client, .object = a->client, .command = command, .parameters = (uintptr_t)parameters, .size = size};

	if (ioctl(a->control, NVIDIA_IOCTL(ESCAPE_CONTROL, sizeof c), &c))
		return failed(f, step, errno, 0);
	return c.status ? failed(f, step, 0, c.status) : 0;
}

int peerlane_aperture_open(peerlane_aperture *a, uint32_t domain, uint32_t bus, uint32_t slot, peerlane_failure *f)
{
	uint32_t handle = 0;
	struct nvos21 root = {.class = CLASS_ROOT_CLIENT, .parameters = (uintptr_t)&handle};
	struct card cards[MAX_CARDS];
	int found = 0;

	*a = (peerlane_aperture){.control = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC), .last = FIRST_HANDLE};
	if (a->control < 0)
		return failed(f, PEERLANE_APERTURE_CONTROL, errno, 0);
	// Releases before 530 write the status where later releases read the size.
	if (ioctl(a->control, NVIDIA_IOCTL(ESCAPE_ALLOC, sizeof root), &root) || root.status || root.size) {
		failed(f, PEERLANE_APERTURE_CLIENT, root.status || root.size ? 0 : errno, root.status | root.size);
		close(a->control);
		return -1;
	}
	a->client = root.object;
	memset(cards, 0, sizeof cards);
	if (ioctl(a->control, NVIDIA_IOCTL(ESCAPE_CARD_INFO, sizeof cards), cards)) {
		failed(f, PEERLANE_APERTURE_CARDS, errno, 0);
		close(a->control);
		return -1;
	}
	for (int i = 0; i < MAX_CARDS && !found; i++)
		if (cards[i].valid && cards[i].domain == domain && cards[i].bus == bus && cards[i].slot == slot) {
			a->minor = cards[i].minor;
			a->bytes = cards[i].memory_size;
			found = 1;
		}
	if (!found) {
		close(a->control);
		return failed(f, PEERLANE_APERTURE_CARDS, ENODEV, 0);
	}
	return 0;
}

void peerlane_aperture_close(peerlane_aperture *a) { close(a->control); }

// open_device opens the client's device, which must be the device of the memory.
static int open_device(peerlane_aperture *a, uint32_t instance, peerlane_failure *f)
{
	struct device parameters = {.id = instance};
	struct nvos21 alloc = {.root = a->client, .parent = a->client, .object = a->last + 1, .class = CLASS_DEVICE, .parameters = (uintptr_t)&parameters};

	if (a->device)
		return a->instance == instance ? 0 : failed(f, PEERLANE_APERTURE_DEVICE, EXDEV, 0);
	if (ioctl(a->control, NVIDIA_IOCTL(ESCAPE_ALLOC, sizeof alloc), &alloc))
		return failed(f, PEERLANE_APERTURE_DEVICE, errno, 0);
	if (alloc.status || alloc.size)
		return failed(f, PEERLANE_APERTURE_DEVICE, 0, alloc.status | alloc.size);
	a->device = alloc.object;
	a->instance = instance;
	a->last++;
	return 0;
}

void peerlane_aperture_release(peerlane_aperture *a, uint32_t memory)
{
	struct nvos00 parameters = {.root = a->client, .parent = a->device, .object = memory};

	(void)ioctl(a->control, NVIDIA_IOCTL(ESCAPE_FREE, sizeof parameters), &parameters);
}

int peerlane_aperture_map(peerlane_aperture *a, int fd, uint64_t offset, uint64_t bytes, void **data, uint32_t *memory, peerlane_failure *f)
{
	struct export_info info = {.fd = fd};
	struct import import;
	struct nvos33 map;
	char path[32];
	int node, handle = a->control;

	// Open the node first: the driver keeps the GPU initialized while the node is open.
	snprintf(path, sizeof path, "/dev/nvidia%u", a->minor);
	if ((node = open(path, O_RDWR | O_CLOEXEC)) < 0)
		return failed(f, PEERLANE_APERTURE_NODE, errno, 0);
	if (ioctl(node, NVIDIA_IOCTL(ESCAPE_REGISTER_FD, sizeof handle), &handle)) {
		failed(f, PEERLANE_APERTURE_NODE, errno, 0);
		goto close_node;
	}
	if (control(a, CONTROL_GET_EXPORT_OBJECT_INFO, &info, sizeof info, PEERLANE_APERTURE_EXPORT, f))
		goto close_node;
	if (info.objects != 1) {
		failed(f, PEERLANE_APERTURE_EXPORT, EINVAL, 0);
		goto close_node;
	}
	if (open_device(a, info.device, f))
		goto close_node;
	import = (struct import){.fd = fd, .type = OBJECT_RM, .device = a->device, .parent = a->device, .object = ++a->last};
	if (control(a, CONTROL_IMPORT_OBJECT_FROM_FD, &import, sizeof import, PEERLANE_APERTURE_IMPORT, f))
		goto close_node;
	map = (struct nvos33){.client = a->client, .device = a->device, .memory = import.object, .offset = offset, .length = bytes, .fd = node};
	if (ioctl(a->control, NVIDIA_IOCTL(ESCAPE_MAP_MEMORY, sizeof map), &map) || map.status) {
		failed(f, PEERLANE_APERTURE_MAP, map.status ? 0 : errno, map.status);
		goto release;
	}
	*data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, node, 0);
	if (*data == MAP_FAILED) {
		failed(f, PEERLANE_APERTURE_MMAP, errno, 0);
		goto release;
	}
	madvise(*data, bytes, MADV_DONTFORK);
	*memory = import.object;
	close(node); // the mapping keeps the memory
	return 0;

release:
	peerlane_aperture_release(a, import.object);
close_node:
	close(node);
	return -1;
}
