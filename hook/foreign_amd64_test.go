package hook_test

import "golang.org/x/sys/unix"

// forkCalls make a process, beside clone and clone3.
var forkCalls = map[string]uintptr{"fork": unix.SYS_FORK, "vfork": unix.SYS_VFORK}
