/* Stands for a plugin of NIXL's own, which a forwarder finds. */
void *nixl_plugin_init(void);
void *nixl_plugin_init(void) { return (void *)0x77; }
void nixl_plugin_fini(void);
void nixl_plugin_fini(void) {}
