package sandbox

import "golang.org/x/sys/unix"

const auditArch = unix.AUDIT_ARCH_AARCH64

// deniedHere lists denied calls of this architecture only.
var deniedHere []uintptr

// forks lists calls besides clone and clone3 that create a process.
var forks []uintptr
