// Package graph finds the nearest paths between the GPUs and NICs of a host, by the rules of
// NCCL 2.30 (src/graph/paths.cc) or of nvidia-smi topo -m, and applies NCCL's policies on P2P,
// GPUDirect RDMA and PXN to the paths.
//
// All returns every pair, Each yields the pairs in sequence, and Table and PathTable hold four
// bytes for each pair of a large host. The planner uses PathFinder and Policy directly.
package graph
