// Package virtualswitch is the topology of a container with lanes, for NCCL: each GPU behind a
// synthetic PCIe bridge, beside a virtual NIC for the GPU's lane.
package virtualswitch
