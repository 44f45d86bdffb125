// Package topo is the model of a host: its NUMA nodes, PCIe switches, GPUs and NICs, and the
// links between them. A Host is a value that other packages fill and read:
//
//   - topo/reader reads a running host (sysfs, procfs, NVML) and files that describe one
//     (NCCL's XML, hwloc's XML, the text of nvidia-smi, captures);
//   - topo/graph finds the path between two devices, and NCCL's policy for the path;
//   - topo/planner assigns NICs and server GPUs to lanes, and estimates the lanes' rates;
//   - topo/ncclxml reads and writes NCCL's topology files;
//   - topo/virtualswitch is the topology that NCCL sees in a container with lanes;
//   - topo/picture draws a host and its lanes.
//
// Bandwidths are GB/s of 1e9 bytes, in one direction of a link.
package topo
