// Package verbs is RDMA as rdma-core has it: devices, registered memory, reliable
// connected (RC) queue pairs, completions and events of libibverbs.so.1, and the
// connection manager of librdmacm.so.1. Both are opened at run time: nothing of
// rdma-core is needed to build, and a host without RDMA needs none of it.
//
// What depends on what is given back in the reverse order of its making: [Pair] and
// [Region] before their [Domain], pairs before their [Queue], all before the
// [Context]. A Close that comes too early is an error (EBUSY) and closes nothing.
//
// What belongs to one context belongs to one goroutine at a time; there are no locks.
// The calls of every turn ([Pair.PostSend], [Pair.PostRecv], [Queue.Poll], [Queue.Arm],
// [Queue.Acknowledge]) allocate nothing.
//
// Package relay/verbs/softdevice has a libibverbs.so.1 for tests, where there is no device.
package verbs
