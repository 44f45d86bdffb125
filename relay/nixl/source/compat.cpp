// Definitions of what newer C and C++ libraries have, so that the plugin needs neither: version
// 2.32 of glibc for the first, 11 of libstdc++ for the second.
#include "glibc.h"

#include <new>

#ifndef PEERLANE_UNBOUND

// Read by shared_ptr, which counts without atomic operations if it is not 0.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
} // namespace std

#endif
