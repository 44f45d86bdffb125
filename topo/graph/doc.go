// Package graph finds the nearest paths between the GPUs and NICs of a host, by the rules of
// NCCL 2.30 (src/graph/paths.cc) or of nvidia-smi topo -m, and the paths that NCCL's policies on
// P2P, GPUDirect RDMA and PXN make of them.
//
// All returns every pair, Each yields one pair at a time, and Table and WayTable hold four bytes
// for each pair of a large host. The planner uses PathFinder and Policy directly.
package graph
