package planner

import (
	"fmt"
	"slices"
	"strconv"
)

// Member is a route of a lane to the network. A member carries the share of the lane's bytes that
// the weight gives.
type Member struct {
	// Server is the PCI address of the GPU whose memory the NIC reads and writes: the lane's
	// GPU for a direct member, another GPU for a staged member. Server is empty for a route
	// through the CPU's memory.
	Server string `json:"server,omitempty"`
	NIC    string `json:"nic"`
	// Weight is at least 1. The sum of the weights of a lane is at most MaxWeights.
	Weight int `json:"weight"`
}

// maxWeights bounds the weights of a lane together.
const maxWeights = 1024

// KindOf returns the kind of a member of the lane.
func (l *Lane) KindOf(m Member) string {
	switch m.Server {
	case l.GPU:
		return KindDirect
	case "":
		return KindBounce
	}
	return KindStaged
}

// Weights returns the sum of the weights of the members.
func (l *Lane) Weights() (sum int) {
	for _, m := range l.Members {
		sum += m.Weight
	}
	return sum
}

// Even returns the members of a lane that has only servers and NICs: all pairs, with equal
// weights.
func (l *Lane) Even() (members []Member) {
	servers := l.Servers // empty for a lane without a route
	switch l.Kind {
	case KindDirect:
		servers = []string{l.GPU}
	case KindBounce:
		servers = []string{""}
	}
	for _, nic := range l.NICs {
		for _, s := range servers {
			members = append(members, Member{s, nic, 1})
		}
	}
	return members
}

// setMembers sets the members, and the fields that depend on the members: servers, NICs, kind
// and relay. NICs and servers are in the order of the members.
func (l *Lane) setMembers(members []Member) {
	l.Members, l.Servers, l.NICs = members, []string{}, []string{}
	direct := false
	for _, m := range members {
		if !slices.Contains(l.NICs, m.NIC) {
			l.NICs = append(l.NICs, m.NIC)
		}
		switch l.KindOf(m) {
		case KindDirect:
			direct = true
		case KindStaged:
			if !slices.Contains(l.Servers, m.Server) {
				l.Servers = append(l.Servers, m.Server)
			}
		}
	}
	l.Relay = len(l.Servers) > 0
	switch {
	case len(members) == 0:
		l.Kind = ""
	case l.Relay:
		l.Kind = KindStaged
	case direct:
		l.Kind = KindDirect
	default:
		l.Kind = KindBounce
	}
}

// checkMembers checks the properties of members that readers of a plan rely on.
func (l *Lane) checkMembers() error {
	if len(l.Members) == 0 {
		return nil
	}
	of := Lane{GPU: l.GPU}
	of.setMembers(l.Members)
	for _, m := range l.Members {
		if m.Weight < 1 || m.NIC == "" {
			return fmt.Errorf("it is contradictory: a member has NIC %q and weight %d", m.NIC, m.Weight)
		}
	}
	if sum := l.Weights(); sum > maxWeights {
		return fmt.Errorf("its members have a total weight of %d, more than %d", sum, maxWeights)
	}
	sorted := func(list []string) []string { return slices.Sorted(slices.Values(list)) }
	if l.Kind != "" && of.Kind != l.Kind || !slices.Equal(sorted(of.Servers), sorted(l.Servers)) ||
		!slices.Equal(sorted(of.NICs), sorted(l.NICs)) {
		return fmt.Errorf("it is contradictory: by its members it is %q over %q staged on %q, but its fields are %q over %q "+
			"staged on %q",
			of.Kind, of.NICs, of.Servers, l.Kind, l.NICs, l.Servers)
	}
	return nil
}

// partOf returns a share in words: "3 of 8".
func partOf(weight, sum int) string { return strconv.Itoa(weight) + " of " + strconv.Itoa(sum) }
