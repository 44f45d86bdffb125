// Package supervisor keeps the relay of one generation running. It executes peerlane-relay in its
// sandbox with the sockets of the generation, sends the configuration and the cluster key,
// restarts the relay after a failure, admits staging, tests pairs of GPUs, and serves the
// administration socket. When the container's init ends, it ends the relay and removes the
// generation.
//
// [Supervise] runs in a process that the hook forked, and [TakeOver] in a systemd service.
package supervisor
