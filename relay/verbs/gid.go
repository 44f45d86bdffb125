package verbs

/*
#include "calls.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"net/netip"
)

// GIDKind is how packets with a GID look on the wire (ibv_gid_type).
type GIDKind uint8

// Kinds of GIDs.
const (
	GIDofIB GIDKind = C.IBV_GID_TYPE_IB // also an iWARP device's
	RoCEv1  GIDKind = C.IBV_GID_TYPE_ROCE_V1
	RoCEv2  GIDKind = C.IBV_GID_TYPE_ROCE_V2
)

func (k GIDKind) String() string {
	switch k {
	case GIDofIB:
		return "IB"
	case RoCEv1:
		return "RoCE v1"
	case RoCEv2:
		return "RoCE v2"
	}
	return fmt.Sprintf("GID type %d", uint8(k))
}

// GID is an entry of a port's GID table.
type GID struct {
	Index     int // in the table
	GID       [16]byte
	Kind      GIDKind
	Interface int // the network interface's index (ip link), 0 without one
}

// Address is the GID as an IP address; an IPv4 address that is mapped into IPv6 is
// given as IPv4.
func (g GID) Address() netip.Addr { return netip.AddrFrom16(g.GID).Unmap() }

func (g GID) String() string {
	return fmt.Sprintf("GID %d (%s, %s)", g.Index, g.Address(), g.Kind)
}

// GIDs reads a port's GID table (ibv_query_gid_ex). Empty entries, and unreadable entries of a
// foreign network namespace, are left out.
func (c *Context) GIDs(port uint8) ([]GID, error) {
	p, err := c.Port(port)
	if err != nil {
		return nil, err
	}
	var gids []GID
	for i := range p.GIDs {
		var e C.struct_ibv_gid_entry
		if r := C.peerlane_query_gid(c.l.calls, c.c, C.uint8_t(port), C.uint32_t(i), &e); r != 0 {
			continue
		}
		g := GID{Index: i, GID: gidBytes(&e.gid), Kind: GIDKind(e.gid_type), Interface: int(e.ndev_ifindex)}
		if g.GID != [16]byte{} {
			gids = append(gids, g)
		}
	}
	return gids, nil
}

// AnyIndex lets [ChooseGID] choose.
const AnyIndex = -1

// Choice is which GID is wanted.
type Choice struct {
	Index  int     // this one, or AnyIndex
	Kind   GIDKind // preferred: RoCEv2 where it is left 0 and the port is RoCE's
	Prefer family
}

// family is of IP addresses.
type family uint8

// Families. The zero value is iPv4, as the addresses of most RoCE networks are.
const (
	iPv4 family = iota
	iPv6
)

// errNoGID is the error of a port without a GID to use.
var errNoGID = errors.New(
	"no GID that can be used: the port's network interface has no address, or belongs to another network namespace",
)

// emptyGIDError is the error of a requested index without a GID.
type emptyGIDError struct {
	index int
	gids  []GID
}

func (e *emptyGIDError) Error() string {
	return fmt.Sprintf("GID index %d is empty, or belongs to another network namespace; there are %v", e.index, e.gids)
}

// ChooseGID chooses the GID that a queue pair's packets come from: the requested GID, else on RoCE
// the first of the preferred kind and family, then of that kind with a different routed address,
// then a link-local GID, then of the second kind; the first one on InfiniBand and iWARP.
func ChooseGID(gids []GID, want Choice) (GID, error) {
	if want.Index != AnyIndex {
		for _, g := range gids {
			if g.Index == want.Index {
				return g, nil
			}
		}
		return GID{}, &emptyGIDError{want.Index, gids}
	}
	kind := want.Kind
	if kind == GIDofIB {
		kind = RoCEv2
	}
	var best GID
	least := -1
	for _, g := range gids {
		if r := g.rank(kind, want.Prefer); least < 0 || r < least {
			best, least = g, r
		}
	}
	if least < 0 {
		return GID{}, errNoGID
	}
	return best, nil
}

// rank is smaller for better GIDs. GIDs of InfiniBand have the same rank.
func (g GID) rank(kind GIDKind, family family) int {
	if g.Kind == GIDofIB {
		return 0
	}
	a := g.Address()
	r := 1
	switch {
	case a.IsLinkLocalUnicast():
		r = 3
	case a.Is4() != (family == iPv4):
		r = 2
	}
	if g.Kind != kind {
		r += 3
	}
	return r
}
