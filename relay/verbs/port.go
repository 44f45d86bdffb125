package verbs

/*
#include "calls.h"
*/
import "C"

import "fmt"

// PortState is a port's logical state (ibv_port_state).
type PortState uint8

// Port states that Peerlane tells apart.
const (
	PortDown   PortState = C.IBV_PORT_DOWN
	PortActive PortState = C.IBV_PORT_ACTIVE
)

func (s PortState) String() string {
	names := []string{"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// LinkLayer is the protocol of a port's cable.
type LinkLayer uint8

// Link layers (IBV_LINK_LAYER_*).
const (
	InfiniBand LinkLayer = C.IBV_LINK_LAYER_INFINIBAND
	Ethernet   LinkLayer = C.IBV_LINK_LAYER_ETHERNET
)

func (l LinkLayer) String() string {
	switch l {
	case 0: // devices older than Ethernet say nothing
		return "unspecified"
	case InfiniBand:
		return "InfiniBand"
	case Ethernet:
		return "Ethernet"
	}
	return fmt.Sprintf("link layer %d", uint8(l))
}

// MTU is a path's largest packet (ibv_mtu): 1 for 256 bytes, to 5 for 4096.
type MTU uint8

// MTUs.
const (
	MTU256 MTU = C.IBV_MTU_256 + iota
	MTU512
	MTU1024
	MTU2048
	MTU4096
)

// Bytes is the MTU in bytes, 0 for one that is not defined.
func (m MTU) Bytes() int {
	if m < MTU256 || m > MTU4096 {
		return 0
	}
	return 128 << m
}

// MTUOf is the largest MTU of at most so many bytes; ok is false under 256.
func MTUOf(bytes int) (m MTU, ok bool) {
	for m = MTU4096; m >= MTU256; m-- {
		if m.Bytes() <= bytes {
			return m, true
		}
	}
	return 0, false
}

// Port is the state of a port (ibv_port_attr).
type Port struct {
	State         PortState
	PhysicalState uint8 // 5 is LinkUp, as sysfs's phys_state says it
	MTU           MTU   // that is active
	MaxMTU        MTU
	LID           uint16 // 0 on Ethernet
	GRHRequired   bool   // each route needs a GRH, of InfiniBand too (IBV_QPF_GRH_REQUIRED)
	SMLID         uint16
	LinkLayer     LinkLayer
	GigabitRate   float64 // width × speed in Gb/s, 0 if the device says what is not known here
	GIDs          int     // the GID table's length
	PKeys         int
	MessageBytes  uint32 // of one message, at most
}

// Port asks about a port; the first is 1 (ibv_query_port).
func (c *Context) Port(n uint8) (Port, error) {
	var a C.struct_ibv_port_attr
	if r := C.peerlane_query_port(c.l.calls, c.c, C.uint8_t(n), &a); r != 0 {
		return Port{}, failed(int32(r), "ibv_query_port", fmt.Sprintf("%s, port %d", c.name, n))
	}
	return Port{
		State:         PortState(a.state),
		PhysicalState: uint8(a.phys_state),
		MTU:           MTU(a.active_mtu),
		MaxMTU:        MTU(a.max_mtu),
		LID:           uint16(a.lid),
		GRHRequired:   a.flags&C.IBV_QPF_GRH_REQUIRED != 0,
		SMLID:         uint16(a.sm_lid),
		LinkLayer:     LinkLayer(a.link_layer),
		GigabitRate:   laneCount[uint8(a.active_width)] * laneRate[uint8(a.active_speed)],
		GIDs:          int(a.gid_tbl_len),
		PKeys:         int(a.pkey_tbl_len),
		MessageBytes:  uint32(a.max_msg_sz),
	}, nil
}

// laneCount and laneRate are the codes of LinkWidthActive and LinkSpeedActive in the
// InfiniBand specification; rates are Gb/s of a lane.
var (
	laneCount = map[uint8]float64{1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
	laneRate  = map[uint8]float64{1: 2.5, 2: 5, 4: 10, 8: 10, 16: 14.0625, 32: 25.78125, 64: 53.125, 128: 106.25}
)
