// Package topo reads how near the GPUs and RDMA NICs of a host are to each
// other, and plans each GPU's way to the network from it.
//
// A [Host] comes from a running system ([ReadSysfs]: the PCIe tree of sysfs,
// completed from /proc/driver/nvidia and, where there is one, from NVML) or
// from a file ([ReadInput]: a capture of such a system, a topology file of NCCL
// or hwloc). All readers fill the same tree: a GPU or NIC sits below a PCIe
// switch, a switch below another one or below a NUMA node, and NVLinks join GPUs
// directly or through NVSwitches. [Host.Path] is the nearest way between two
// devices in it, named and weighed as NCCL does, so that a plan agrees with what
// NCCL will do on the same host. The text of nvidia-smi topo -m, which ReadInput
// reads as well, states the types of paths alone; then these take the tree's
// place.
//
// [MakePlan] gives every GPU a [Lane]:
//
//   - a near GPU, one that a NIC may reach directly ([GDRPolicy]), has a direct
//     lane;
//   - a far GPU is staged on the GPUs that are near a NIC, where that is faster
//     by [Host.Estimate];
//   - elsewhere it bounces through the CPU's memory, and its lane says why.
//
// Configuration can say otherwise for a GPU ([Assignment]). Each lane carries
// the sentence that explains it, and equal hosts have equal plans.
//
// [Host.NCCLXML] writes a host for NCCL, and [Host.VirtualSwitch] is one in which
// each GPU has its lane's NIC beside it.
//
// The package is pure Go and reads only below the roots that it is given;
// NVML, which needs cgo, is in topo/nvml, and a host to try all this on without
// any GPU is in topo/recorded.
package topo
