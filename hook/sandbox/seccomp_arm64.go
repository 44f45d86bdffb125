package sandbox

import "golang.org/x/sys/unix"

const auditArch = unix.AUDIT_ARCH_AARCH64

// deniedHere are calls that only this architecture has.
var deniedHere []uintptr

// forks are calls beside clone and clone3 that make a process.
var forks []uintptr
