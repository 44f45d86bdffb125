// Package address chooses the addresses and ports of a host's relays for remote hosts: interfaces
// chosen as NCCL_SOCKET_IFNAME chooses them, a family, a range of ports, and the form of an address
// in a listener's handle; and which of NCCL's variables have no part in it.
//
// It is apart from package network because the hook reads the configuration in front
// of every container, and has no use for cryptography.
package address
