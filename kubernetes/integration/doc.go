// Package integration tests peerlane-kubelet in clusters of one or two nodes: the API server, scheduler,
// controller manager and kubelets of Kubernetes, etcd, containerd and runc run on this machine, and
// each node has the simulated GPUs of a recorded host. The tests have the build tag cluster.
package integration
