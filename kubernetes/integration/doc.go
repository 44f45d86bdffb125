// Package integration tests peerlane-kubelet in a cluster of one node: the API server, scheduler,
// controller manager and kubelet of Kubernetes, etcd, containerd and runc run on this machine, and
// the node has the simulated GPUs of a recorded host. The tests have the build tag cluster.
package integration
