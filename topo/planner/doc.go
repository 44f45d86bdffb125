// Package planner makes the plan of a host's lanes. Make assigns a weighted set of members to
// every GPU; a member is a NIC and the GPU whose memory the NIC accesses. The assignment is
// max-min fair over the links of the host, then has the least load on server GPUs, then the
// fewest members. The plan is deterministic.
//
// A route takes a lane's bytes to a NIC directly, through the memory of the CPU, or through the memory
// of a server GPU; a path is the PCIe path between two devices.
//
// Plan.Estimate compares the rates of the plan with the rates of NCCL; Plan.Explain gives the
// reasons for a lane. Plan.Write and Read store a plan in a JSON file.
package planner
