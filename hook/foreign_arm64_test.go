package hook_test

// forkCalls make a process, beside clone and clone3.
var forkCalls map[string]uintptr
