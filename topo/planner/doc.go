// Package planner makes the plan of a host's lanes. Make assigns each GPU a weighted set of
// members, each a NIC and the GPU whose memory the NIC accesses: max-min fair over the links of
// the host, then with the least load on server GPUs, then with the fewest members. The plan is
// deterministic.
//
// Plan.Estimate compares the rates of the plan with those of NCCL; Plan.Explain gives the reasons
// for a lane. Plan.Write and Read store a plan in a JSON file.
package planner
