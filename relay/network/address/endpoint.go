package address

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// EndpointBytes is the length of an endpoint in a listener's handle.
const EndpointBytes = 24

// Endpoint is where a relay is reached. An endpoint has no scope: the zone of a link-local address
// is an interface number of its host, and has no meaning on a remote host; the dialing host uses
// local interfaces (Dials).
type Endpoint struct {
	Address netip.Addr // without a zone
	Port    uint16
}

// Encode is the endpoint in a handle: 16 bytes of address, IPv4 mapped into IPv6
// (RFC 4291 section 2.5.5.2), 2 of the port, little-endian, and 6 zeros.
func (e Endpoint) Encode() [EndpointBytes]byte {
	var b [EndpointBytes]byte
	at := e.Address.As16()
	copy(b[:], at[:])
	binary.LittleEndian.PutUint16(b[16:], e.Port)
	return b
}

// DecodeEndpoint reads the output of Encode, and refuses unreachable addresses.
func DecodeEndpoint(b [EndpointBytes]byte) (Endpoint, error) {
	e := Endpoint{netip.AddrFrom16([16]byte(b[:16])).Unmap(), binary.LittleEndian.Uint16(b[16:])}
	if _, usable := kindOf(e.Address.WithZone("any")); !usable || e.Port == 0 || [6]byte(b[18:]) != [6]byte{} {
		return Endpoint{}, fmt.Errorf("the handle's address, %v port %d, is none that a relay listens on", e.Address, e.Port)
	}
	return e, nil
}

// Dials lists the addresses to dial for an endpoint: a link-local IPv6 address at the chosen local
// interfaces with a link-local address, and any further address once.
func (e Endpoint) Dials(chosen []Chosen) []netip.AddrPort {
	if !e.Address.Is6() || !e.Address.IsLinkLocalUnicast() {
		return []netip.AddrPort{netip.AddrPortFrom(e.Address, e.Port)}
	}
	var all []netip.AddrPort
	seen := map[string]bool{}
	for _, c := range chosen {
		if c.Address.Is6() && c.Address.IsLinkLocalUnicast() && !seen[c.Interface] {
			seen[c.Interface] = true
			all = append(all, netip.AddrPortFrom(e.Address.WithZone(c.Interface), e.Port))
		}
	}
	return all
}
