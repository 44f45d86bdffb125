// Package selftest runs the tests of pairs of GPUs and of RDMA in processes of peerlane-relay, and
// stores the results of this boot.
package selftest
