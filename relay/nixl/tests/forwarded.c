/* forwarded NIXL PLUGIN: loads NIXL's library and a forwarder, and prints what its init returns. */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv)
{
	void *(*init)(void) = NULL, *plugin;
	void (*fini)(void) = NULL;

	if (argc != 3 || !dlopen(argv[1], RTLD_NOW) || !(plugin = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL)))
		return 1;
	*(void **)&init = dlsym(plugin, "nixl_plugin_init");
	*(void **)&fini = dlsym(plugin, "nixl_plugin_fini");
	if (!init || !fini)
		return 1;
	printf("%p\n", init());
	fini();
	return 0;
}
