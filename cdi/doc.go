// Package cdi writes the Container Device Interface specifications that make a
// host's lanes devices of its container engines.
//
// One plan becomes up to three specifications, one for each kind of device:
//
//	peerlane.dev/lane=N   the relay and its socket. The GPU itself comes from
//	                      elsewhere (nvidia.com/gpu=N), and no other GPU and
//	                      no RDMA device becomes visible in the container.
//	peerlane.dev/gpu=N    all of that, and the device nodes of the GPU, of the
//	                      server GPUs of its lane and of the lane's NICs. For
//	                      hosts with one tenant.
//	peerlane.dev/nic=M    the device nodes of a NIC, for programs that want verbs
//	                      themselves, and no relay. For hosts with one tenant.
//
// N is the GPU's index, its UUID or its PCI address, or a group's name; N = all is
// every GPU with a lane. M is the NIC's name or its PCI address; M = all is every
// NIC. [Generate] makes the specifications, [Notes] says what they mean for an
// administrator and which devices are missing from them, [Write] installs them.
//
// A lane= or gpu= mounts an empty directory at /run/peerlane, and what programs
// load where their loader looks, and calls peerlane-hook at createRuntime, naming
// the GPU: never the plan, which the hook reads from the host. The hook starts the
// container's relay and attaches its socket over that directory. At poststop the
// hook is called once more to collect what has ended. A gpu= or nic= states by
// which way GPU memory is registered here ([Peermem.Registration]), and has the hook
// lift the limit of locked memory.
//
// Nothing that can change while the host runs is baked in: major and minor
// numbers are left to the engine, which reads them when a container starts. Each
// specification states the lowest CDI version that it needs, because an engine
// refuses one that is newer than itself without saying why.
package cdi
