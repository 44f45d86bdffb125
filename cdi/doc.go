// Package cdi writes the Container Device Interface specifications that
// offer the lanes of a host to container engines.
//
// One plan becomes up to three specifications, one for each kind of device:
//
//	peerlane.dev/lane=N   the relay and its socket. Another device adds the GPU
//	                      (nvidia.com/gpu=N), and no other GPU and
//	                      no RDMA device becomes visible in the container.
//	peerlane.dev/gpu=N    lane=N, and the device nodes of the GPU, of the
//	                      server GPUs of its lane and of the lane's NICs. For
//	                      hosts with one tenant.
//	peerlane.dev/nic=M    the device nodes of a NIC, for programs that use verbs,
//	                      and no relay. For hosts with one tenant.
//
// N is the index, the UUID or the PCI address of a GPU, or the name of a group; N = all means
// every GPU with a lane. M is the name or the PCI address of a NIC; M = all means every NIC.
// [Generate] makes the specifications, [Notes] explains the specifications and the missing devices
// to an administrator, [Installation] installs the files.
//
// A lane= or gpu= device mounts an empty directory at /run/peerlane and the libraries in a
// directory of the loader, and calls peerlane-hook at createRuntime with the name of the GPU. The
// hook reads the plan from the host. The hook starts the container's relay and mounts the relay's
// socket over that directory. At poststop the hook removes the state of ended containers. A gpu=
// or nic= device states how to register GPU memory on this host ([Peermem.Registration]), and
// makes the hook lift the limit of locked memory.
//
// A specification has no value that changes while the host runs: the engine reads major and minor
// numbers when a container starts. Each specification states the lowest CDI version with its
// fields, because an engine refuses a newer version without a reason.
package cdi
