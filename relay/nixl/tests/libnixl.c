/* Stands for libnixl.so of 1.0.0 and later; with -DOLD for that of an earlier release. */
extern int nixl_of_tests;
int nixl_of_tests;

#ifndef OLD
void _ZNK9nixlAgent14releaseMemViewEPv(void *view);
void _ZNK9nixlAgent14releaseMemViewEPv(void *view) { (void)view; }
#endif
