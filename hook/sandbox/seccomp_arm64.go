package sandbox

import "golang.org/x/sys/unix"

const auditArch = unix.AUDIT_ARCH_AARCH64

// deniedHere lists the denied calls that exist only on this architecture.
var deniedHere []uintptr

// forks lists the calls other than clone and clone3 that create a process.
var forks []uintptr
