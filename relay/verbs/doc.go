// Package verbs binds rdma-core: devices, registered memory, reliable connected (RC) queue pairs,
// completions and events of libibverbs.so.1, and the connection manager of librdmacm.so.1. Both are
// opened at run time: a build needs no rdma-core, nor does a host without RDMA.
//
// Objects are destroyed in the reverse order of creation: [Pair] and [Region] before the [Domain],
// pairs before the [Queue], and the [Context] last. A Close that comes too early is an error
// (EBUSY) and closes nothing.
//
// Objects of a context belong to a single goroutine at a time; there are no locks. The calls of
// every turn ([Pair.PostSend], [Pair.PostRecv], [Queue.Poll], [Queue.Arm], [Queue.Acknowledge])
// allocate nothing.
//
// Package relay/verbs/softdevice has a libibverbs.so.1 for tests, where there is no device.
package verbs
