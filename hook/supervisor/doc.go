// Package supervisor keeps the relay of one generation running. It executes peerlane-relay in
// its sandbox with the sockets of the generation, sends the configuration and the cluster key,
// starts the relay again after a failure, admits staging, has pairs of GPUs tested and serves
// the administration socket. When the container's init ends, it ends the relay and removes the
// generation.
//
// [Supervise] is a process that the hook forked, [TakeOver] a service of systemd.
package supervisor
