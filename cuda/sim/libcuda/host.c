// The simulated host: a directory in PEERLANE_SIM with the files host (a line per device)
// and log (counters that all processes share).
#define _GNU_SOURCE
#include "sim.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOG_MAGIC 0x474f4c4d4953504cull // "LPSIMLOG"
#define LOG_VERSION 1

struct log_header {
	uint64_t magic;
	uint32_t version, devices;
	uint64_t reserved[6];
};
_Static_assert(sizeof(struct log_header) == 64, "host.go reads the header as 64 bytes");
_Static_assert(sizeof(struct device_log) == 64, "host.go reads records of 64 bytes");

static struct device devices[MAX_DEVICES];
static int device_count;
static struct device *visible[MAX_DEVICES];
static int visible_count;

void complain(const char *format, ...)
{
	char line[512];
	va_list a;
	va_start(a, format);
	vsnprintf(line, sizeof line, format, a);
	va_end(a);
	dprintf(STDERR_FILENO, "peerlane CUDA simulator: %s\n", line);
}

static bool parse_uuid(const char *s, unsigned char uuid[16])
{
	if (strncmp(s, "GPU-", 4) != 0)
		return false;
	int digits = 0;
	for (s += 4; *s; s++) {
		if (*s == '-')
			continue;
		if (!isxdigit((unsigned char)*s) || digits == 32)
			return false;
		int v = isdigit((unsigned char)*s) ? *s - '0' : tolower((unsigned char)*s) - 'a' + 10;
		uuid[digits / 2] = digits % 2 ? uuid[digits / 2] | v : v << 4;
		digits++;
	}
	return digits == 32;
}

// read_host reads lines of: index minor uuid pci-address memory-bytes name.
static CUresult read_host(const char *dir)
{
	char path[4096], line[512];
	snprintf(path, sizeof path, "%s/host", dir);
	FILE *f = fopen(path, "re");
	if (!f) {
		complain("%s: %s; PEERLANE_SIM must name a directory that package cuda/sim wrote", path, strerror(errno));
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	CUresult result = CUDA_SUCCESS;
	while (fgets(line, sizeof line, f)) {
		line[strcspn(line, "\n")] = 0;
		if (!line[0] || line[0] == '#')
			continue;
		struct device *d = &devices[device_count];
		char uuid[64];
		unsigned long long memory;
		int name = 0;
		if (device_count == MAX_DEVICES ||
		    sscanf(line, "%d %d %63s %x:%x:%x.0 %llu %n", &d->index, &d->minor, uuid, &d->domain, &d->bus,
			   &d->slot, &memory, &name) != 7 ||
		    !name || !parse_uuid(uuid, d->uuid)) {
			complain("%s: not a device: %s", path, line);
			result = CUDA_ERROR_OPERATING_SYSTEM;
			break;
		}
		d->memory = memory;
		d->ordinal = -1;
		snprintf(d->name, sizeof d->name, "%s", line + name);
		device_count++;
	}
	fclose(f);
	return result;
}

static CUresult map_log(const char *dir)
{
	char path[4096];
	snprintf(path, sizeof path, "%s/log", dir);
	size_t size = sizeof(struct log_header) + (size_t)device_count * sizeof(struct device_log);
	int fd = open(path, O_RDWR | O_CLOEXEC);
	struct stat st;
	struct log_header *h = MAP_FAILED;
	if (fd >= 0 && fstat(fd, &st) == 0 && (size_t)st.st_size >= size)
		h = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	else if (fd >= 0)
		errno = EINVAL;
	int error = errno;
	if (fd >= 0)
		close(fd);
	if (h == MAP_FAILED) {
		complain("%s: %s; every process of the simulated host writes its counters there", path, strerror(error));
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	if (h->magic != LOG_MAGIC || h->version != LOG_VERSION || h->devices != (uint32_t)device_count) {
		complain("%s: not the log of this simulator, or not of this host", path);
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	for (int i = 0; i < device_count; i++)
		devices[i].log = (struct device_log *)(h + 1) + i;
	return CUDA_SUCCESS;
}

// reach finds the devices whose device node this process has. Containers get nodes one by
// one; by default a simulated host needs no nodes.
static void reach(void)
{
	const char *rule = getenv("PEERLANE_SIM_VISIBLE"), *dev = getenv("PEERLANE_SIM_DEV");
	bool by_node = rule && strcmp(rule, "nodes") == 0;
	for (int i = 0; i < device_count; i++) {
		char path[4096];
		snprintf(path, sizeof path, "%s/nvidia%d", dev && *dev ? dev : "/dev", devices[i].minor);
		devices[i].reachable = !by_node || access(path, F_OK) == 0;
	}
}

// show numbers the devices that CUDA_VISIBLE_DEVICES lists, by index among the reachable
// devices or by the beginning of the UUID. The first unknown name ends the list.
static void show(void)
{
	struct device *all[MAX_DEVICES];
	int n = 0;
	for (int i = 0; i < device_count; i++)
		if (devices[i].reachable)
			all[n++] = &devices[i];
	const char *list = getenv("CUDA_VISIBLE_DEVICES");
	if (!list) {
		for (int i = 0; i < n; i++)
			visible[all[i]->ordinal = visible_count++] = all[i];
		return;
	}
	char copy[4096], *rest = copy, *word;
	snprintf(copy, sizeof copy, "%s", list);
	while ((word = strsep(&rest, ","))) {
		while (isspace((unsigned char)*word))
			word++;
		struct device *d = NULL;
		char *end;
		long index = strtol(word, &end, 10);
		if (strncasecmp(word, "GPU-", 4) == 0) {
			for (int i = 0; i < n; i++) {
				char uuid[41];
				const unsigned char *u = all[i]->uuid;
				snprintf(uuid, sizeof uuid,
					 "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
					 u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14],
					 u[15]);
				if (strncasecmp(uuid, word, strlen(word)) == 0)
					d = all[i];
			}
		} else if (end != word && index >= 0 && index < n) {
			d = all[index];
		}
		if (!d || d->ordinal >= 0)
			return;
		visible[d->ordinal = visible_count++] = d;
	}
}

CUresult host_load(void)
{
	const char *dir = getenv("PEERLANE_SIM");
	if (!dir || !*dir) {
		complain("PEERLANE_SIM is not set: no simulated host");
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	CUresult r = read_host(dir);
	if (r == CUDA_SUCCESS)
		r = map_log(dir);
	if (r != CUDA_SUCCESS)
		return r;
	reach();
	show();
	return visible_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

int host_visible(void) { return visible_count; }

struct device *host_device(CUdevice ordinal)
{
	return ordinal >= 0 && ordinal < visible_count ? visible[ordinal] : NULL;
}

struct device *host_device_by_uuid(const unsigned char uuid[16])
{
	for (int i = 0; i < device_count; i++)
		if (memcmp(devices[i].uuid, uuid, 16) == 0)
			return &devices[i];
	return NULL;
}

int host_place(const struct device *d) { return (int)(d - devices); }
