/* A plugin of NIXL that stands for the plugin of the same name in NIXL's own directory: beside
 * libnixl.so, in plugins. NIXL reads one directory of plugins, and this is one of ours. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "glibc.h"

#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

EXPORTED void *nixl_plugin_init(void);
EXPORTED void nixl_plugin_fini(void);

static void *real;

static int look_at(struct dl_phdr_info *object, size_t size, void *path)
{
	const char *base = strrchr(object->dlpi_name, '/');

	(void)size;
	if (!base || (strncmp(base, "/libnixl.so", 11) && strncmp(base, "/libnixl-", 9)))
		return 0;
	snprintf(path, 4096, "%.*s", (int)(base - object->dlpi_name), object->dlpi_name);
	return 1;
}

void *nixl_plugin_init(void)
{
	static const char nowhere[] = "PEERLANE: %s: NIXL's own plugin cannot be loaded from %s/plugins\n";
	char directory[4096] = "", path[8192];
	void *(*init)(void) = NULL;
	Dl_info self;
	const char *name;

	if (!dladdr((void *)(uintptr_t)nixl_plugin_init, &self) || !(name = strrchr(self.dli_fname, '/')))
		return NULL;
	dl_iterate_phdr(look_at, directory);
	snprintf(path, sizeof path, "%s/plugins%s", directory, name);
	if (*directory)
		real = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (real)
		*(void **)&init = dlsym(real, "nixl_plugin_init");
	if (!init) {
		fprintf(stderr, nowhere, name + 1, *directory ? directory : "(libnixl.so is not loaded)");
		return NULL;
	}
	return init();
}

void nixl_plugin_fini(void)
{
	void (*fini)(void) = NULL;

	if (real)
		*(void **)&fini = dlsym(real, "nixl_plugin_fini");
	if (fini)
		fini();
}
