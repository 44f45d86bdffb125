package verbs

import (
	"encoding/binary"

	"github.com/peerlane/peerlane/relay/verbs"
)

// hops is the hop limit of a packet.
const hops = 255

// route returns the route from this NIC to a port. InfiniBand needs a global route (GRH) if the port
// requires one, and across subnets. There the LID is that of the router, if the GID has it.
func (n *nic) route(lid uint16, gid [16]byte, c *Config) verbs.Route {
	r := verbs.Route{
		LID: lid, Global: !n.infiniband(), GID: gid,
		SourceIndex: uint8(n.gid.Index), HopLimit: hops, TrafficClass: uint8(c.TrafficClass),
		ServiceLevel: uint8(c.ServiceLevel),
		Port:         n.port, Reads: 1, ReceiverTimer: 12,
	}
	if !n.infiniband() {
		return r
	}
	across := subnet(n.gid.GID) != subnet(gid)
	r.Global = across || n.is.GRHRequired
	if f := flid(gid); across && f != 0 {
		r.LID = f
	}
	return r
}

// A GID of InfiniBand has a subnet prefix in its first 8 bytes. In site-local prefixes, which begin
// with fec0, the third 16 bits may be the LID of the port at its subnet's router, the FLID.
func flid(gid [16]byte) uint16 { return binary.BigEndian.Uint16(gid[4:]) }

// subnet returns the prefix of a GID without the FLID.
func subnet(gid [16]byte) uint64 {
	return binary.BigEndian.Uint64(gid[:]) &^ (0xffff << 16)
}

// routable returns the GID with a FLID that subnet managers put at index 1; ok is false without one.
func routable(gids []verbs.GID) (g verbs.GID, ok bool) {
	for _, g := range gids {
		if g.Index == 1 && g.Kind == verbs.GIDofIB && flid(g.GID) != 0 {
			return g, true
		}
	}
	return verbs.GID{}, false
}

// acceptECE asks a queue pair's device for the options that the other side offers, or has accepted.
// A device that refuses them, for example another vendor's, connects without ECE.
func (s *QPGroup) acceptECE(p *qp, theirs verbs.ECE) {
	if theirs.Vendor == 0 || !s.dialed && p.ece.Vendor == 0 || p.SetECE(theirs) != nil {
		p.ece = verbs.ECE{}
		return
	}
	p.ece = theirs
}

// acceptedECE reads the options that the dialing side's device has accepted, for the other side.
func (s *QPGroup) acceptedECE(p *qp) {
	if s.dialed && p.ece.Vendor != 0 {
		p.ece, _ = p.ECE() // the device has accepted SetECE
	}
}
