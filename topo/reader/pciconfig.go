package reader

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"slices"

	"github.com/peerlane/peerlane/topo"
)

// Offsets in a configuration space (PCI Express Base Specification 6.0, 7.5.1 and 7.5.3, 7.6.2 and
// 7.7.8, 9.3.3).
const (
	configHeader         = 0x40
	configStatus         = 0x06
	configHeaderType     = 0x0e
	statusCapabilities   = 1 << 4
	configCapabilities   = 0x34
	configExtended       = 0x100
	capabilitySubsystem  = 0x0d
	capabilityPCIExpress = 0x10
	extendedACS          = 0x000d
	extendedSRIOV        = 0x0010

	// In the PCI Express capability: flags, link, slot, and the second word on
	// the link, which version 1 of the capability lacks.
	expressLink        = 0x0c
	expressSlot        = 0x14
	expressLink2       = 0x2c
	expressFlagsSlot   = 1 << 8
	expressTypeShift   = 4
	expressVersionMask = 0xf
	acsControl         = 0x06
)

var expressTypes = map[uint16]string{
	0x0: topo.PortEndpoint, 0x1: topo.PortLegacyEndpoint, 0x4: topo.PortRoot, 0x5: topo.PortUpstream,
	0x6: topo.PortDownstream,
	0x7: topo.PortToPCI, 0x8: topo.PortFromPCI, 0x9: topo.PortIntegratedEndpoint, 0xa: topo.PortEventCollector,
}

// acsControls are the bits of the ACS Control Register (7.7.8.3), in the words of
// lspci.
var acsControls = []string{"SrcValid", "TransBlk", topo.ACSRequestRedirect, topo.ACSCompletionRedirect, "UpstreamFwd",
	"EgressCtrl", "DirectTrans"}

// linkSpeeds holds the kernel's names of the speeds in the Supported Link Speeds Vector
// (7.5.3.18), from bit 1 on.
var linkSpeeds = []string{"2.5 GT/s PCIe", "5.0 GT/s PCIe", "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe",
	"64.0 GT/s PCIe"}

// configuration holds the values that Peerlane reads from a configuration space.
type configuration struct {
	// kind is a value of expressTypes, or PortConventional; empty if the space is cut, or the
	// function does not answer.
	kind string
	slot int // physical slot number; 0 without a slot
	// speed is the maximum speed of the link, in the kernel's words, and width is the number of
	// lanes; "" and 0 for a function without a link.
	speed string
	width int
	// acs holds the enabled controls; nil if the extended space is not readable, empty if no
	// control is enabled.
	acs []string
}

// capability is a part of a configuration space, up to the next capability.
type capability struct {
	id       uint16
	extended bool
	at, size int
}

// space reads a configuration space in pieces, because reading a register costs a cycle on the
// bus. space reads the first 256 bytes and the head of the extended space at once, and later bytes
// on demand.
type space struct {
	r     io.ReaderAt
	first []byte
}

// firstBytes is the size of the first read.
const firstBytes = configExtended + 4

func newSpace(r io.ReaderAt) (space, error) {
	first := make([]byte, firstBytes)
	n, err := r.ReadAt(first, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return space{}, err
	}
	return space{r, first[:n]}, nil
}

// bytes returns size bytes at an offset; fewer where the space ends.
func (s space) bytes(at, size int) ([]byte, error) {
	if at+size <= len(s.first) {
		return s.first[at : at+size], nil
	}
	if len(s.first) < firstBytes { // end of the space
		return s.first[min(at, len(s.first)):], nil
	}
	part := make([]byte, size)
	n, err := s.r.ReadAt(part, int64(at))
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return part[:n], nil
}

// capabilities returns the capabilities of both lists. Capabilities that describe how a function
// is joined to other functions have the needed size; for other capabilities, the size is the head.
// capabilities stops at a loop in a list.
func (s space) capabilities() ([]capability, error) {
	if len(s.first) <= configHeader || binary.LittleEndian.Uint16(s.first[configStatus:])&statusCapabilities == 0 {
		return nil, nil
	}
	var found []capability
	seen := map[int]bool{}
	for at := int(s.first[configCapabilities] &^ 3); at >= configHeader && at+2 <= min(len(s.first), configExtended) &&
		!seen[at]; {
		seen[at] = true
		c := capability{id: uint16(s.first[at]), at: at, size: 2}
		switch c.id {
		case capabilityPCIExpress:
			c.size = 0x3c
		case capabilitySubsystem:
			c.size = 8
		}
		c.size = min(c.size, configExtended-at)
		found = append(found, c)
		at = int(s.first[at+1] &^ 3)
	}
	for at := configExtended; at >= configExtended && !seen[at]; {
		seen[at] = true
		head, err := s.bytes(at, 4)
		if err != nil {
			return nil, err
		}
		if len(head) < 4 || binary.LittleEndian.Uint32(head) == 0 {
			break // no capability
		}
		header := binary.LittleEndian.Uint32(head)
		c := capability{id: uint16(header), extended: true, at: at, size: 4}
		switch c.id {
		case extendedACS:
			c.size = 8
		case extendedSRIOV:
			c.size = 0x40
		}
		found = append(found, c)
		at = int(header >> 20 &^ 3)
	}
	// A capability ends where the next begins: older versions of a capability are shorter.
	slices.SortFunc(found, func(a, b capability) int { return a.at - b.at })
	for i := range found[:max(0, len(found)-1)] {
		found[i].size = min(found[i].size, found[i+1].at-found[i].at)
	}
	return found, nil
}

// readConfiguration reads a configuration space as far as the kernel shows the space: 64 bytes
// except to root.
func readConfiguration(r io.ReaderAt) (configuration, error) {
	var c configuration
	s, err := newSpace(r)
	if err != nil || len(s.first) <= configHeader || s.first[configHeaderType] == 0xff {
		return c, err // cut, or a function that does not answer: every bit is 1
	}
	found, err := s.capabilities()
	if err != nil {
		return c, err
	}
	c.kind = topo.PortConventional
	if len(s.first) == firstBytes {
		c.acs = []string{}
	}
	for _, part := range found {
		data, err := s.bytes(part.at, part.size)
		if err != nil {
			return c, err
		}
		switch {
		case !part.extended && part.id == capabilityPCIExpress:
			c.express(data)
		case part.extended && part.id == extendedACS && len(data) >= acsControl+2:
			enabled := binary.LittleEndian.Uint16(data[acsControl:])
			c.acs = []string{}
			for bit, name := range acsControls {
				if enabled&(1<<bit) != 0 {
					c.acs = append(c.acs, name)
				}
			}
		}
	}
	return c, nil
}

// express reads the PCI Express capability.
func (c *configuration) express(data []byte) {
	word := func(at int) uint32 {
		if at+4 > len(data) {
			return 0
		}
		return binary.LittleEndian.Uint32(data[at:])
	}
	flags := uint16(word(0) >> 16)
	c.kind = expressTypes[flags>>expressTypeShift&0xf]
	link := word(expressLink)
	c.width = int(link >> 4 & 0x3f)
	highest := int(link & 0xf) // a bit of the vector, counted from 1
	if flags&expressVersionMask >= 2 {
		for bit := len(linkSpeeds); bit >= 1; bit-- {
			if word(expressLink2)&(1<<bit) != 0 {
				highest = bit
				break
			}
		}
	}
	if c.width > 0 && highest >= 1 && highest <= len(linkSpeeds) {
		c.speed = linkSpeeds[highest-1]
	}
	if flags&expressFlagsSlot != 0 && (c.kind == topo.PortRoot || c.kind == topo.PortDownstream) {
		c.slot = int(word(expressSlot) >> 19)
	}
}

// withoutSerials keeps the header of a configuration space, the list of capabilities, and the
// capabilities that describe how a function is joined to other functions. Other bytes become 0,
// because other capabilities hold serial numbers (extended capability 3), vital product data and
// data of vendors.
func withoutSerials(config []byte) []byte {
	kept := make([]byte, len(config))
	copy(kept, config[:min(len(config), configHeader)])
	s := space{bytes.NewReader(config), config[:min(len(config), firstBytes)]}
	found, _ := s.capabilities() // reading from memory does not fail
	for _, part := range found {
		end := min(part.at+part.size, len(config))
		copy(kept[part.at:end], config[part.at:end])
	}
	return kept
}
