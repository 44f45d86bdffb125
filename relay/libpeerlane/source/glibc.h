/* Binds what glibc gave new versions after 2.28 to the old ones, which newer ones
 * have too, so that the library loads wherever glibc is 2.28 or newer. Each source
 * includes it. A test reads the versions that the library needs. */
#ifndef PEERLANE_GLIBC_H
#define PEERLANE_GLIBC_H

#include <features.h>

/* Sanitizers put functions of their own, without versions, in place of these. */
#if defined(__GLIBC__) && !defined(PEERLANE_UNBOUND)
#if defined(__x86_64__)
#define PEERLANE_FIRST "GLIBC_2.2.5"
#define PEERLANE_CLOCKS "GLIBC_2.3.3"
#elif defined(__aarch64__)
#define PEERLANE_FIRST "GLIBC_2.17"
#define PEERLANE_CLOCKS "GLIBC_2.17"
#else
#error "which versions did glibc begin with on this architecture?"
#endif
#define PEERLANE_BIND(name, version) __asm__(".symver " #name "," #name "@" version)
PEERLANE_BIND(pthread_create, PEERLANE_FIRST);
PEERLANE_BIND(pthread_join, PEERLANE_FIRST);
PEERLANE_BIND(pthread_sigmask, PEERLANE_FIRST);
PEERLANE_BIND(pthread_attr_setstacksize, PEERLANE_FIRST);
PEERLANE_BIND(pthread_condattr_setclock, PEERLANE_CLOCKS);
PEERLANE_BIND(dlopen, PEERLANE_FIRST);
PEERLANE_BIND(dlsym, PEERLANE_FIRST);
PEERLANE_BIND(dladdr, PEERLANE_FIRST);
PEERLANE_BIND(dlclose, PEERLANE_FIRST);
#endif

#endif
