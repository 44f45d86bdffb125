package testbed

import (
	"slices"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
)

// Outward returns the lane through which clients of this host reach another host: its GPU by PCI
// address, and the [plan] of the configuration that makes the lane, based on the host's own plan.
//
// It is the lane of the first far GPU whose NICs this host has, or else of the first GPU beside a
// NIC. Simulated GPUs are beside no NIC: the lane of a far GPU gets nic, the host's first NIC with
// an active port, so that tests can use RDMA without a GPU. A host without NICs reaches other
// hosts over TCP, with the lanes within the host.
func (h *Host) Outward(own config.Plan) (gpu string, plan config.Plan, nic string, err error) {
	if h.proc != "" { // the host is recorded
		kernel, err := reader.Sysfs(topo.Options{})
		if err != nil {
			return "", plan, "", err
		}
		return h.outwardNIC(kernel, own.Exclude.NICs)
	}
	made, err := planner.Make(h.Topology, config.Config{Plan: own}.PlannerConfig())
	if err != nil {
		return "", plan, "", err
	}
	if lane := reaching(made); lane != nil {
		return lane.GPU, own, "", nil
	}
	return h.outwardNIC(&topo.Host{}, nil)
}

// outwardNIC is Outward for GPUs that are beside no NIC of the host.
func (h *Host) outwardNIC(nics *topo.Host, excluded []string) (gpu string, plan config.Plan, nic string, err error) {
	plan.Lanes = slices.Clone(h.Lanes)
	made, err := planner.Make(h.Topology, planner.Config{Lanes: plan.Lanes})
	if err != nil {
		return "", plan, "", err
	}
	lanes, err := twoOf(made)
	if err != nil {
		return "", plan, "", err
	}
	first := lanes[0]
	if nic = firstNIC(nics, excluded); nic != "" {
		plan.Lanes = []planner.Assignment{{GPU: first.GPU, Kind: first.Kind, Servers: first.Servers, NICs: []string{nic}}}
	}
	return first.GPU, plan, nic, nil
}

// reaching returns the lane of a plan that reaches other hosts with NICs; nil without one.
func reaching(p *planner.Plan) *planner.Lane {
	exists := func(name string) bool {
		return slices.ContainsFunc(p.NICs, func(n topo.NIC) bool { return n.Name == name && n.Uverbs != "" })
	}
	for _, relayed := range []bool{true, false} {
		for i, l := range p.Lanes {
			if l.Relay == relayed && l.Role != planner.RoleRefused && slices.ContainsFunc(l.NICs, exists) {
				return &p.Lanes[i]
			}
		}
	}
	return nil
}

// firstNIC returns a NIC that relays can use, preferably a hardware NIC; empty without one.
func firstNIC(h *topo.Host, excluded []string) string {
	for _, software := range []bool{false, true} {
		for _, n := range h.NICs {
			if n.Software == software && n.Uverbs != "" && n.Active() && n.Reason == "" && n.Protocol != "EFA" &&
				!slices.Contains(excluded, n.Name) {
				return n.Name
			}
		}
	}
	return ""
}
