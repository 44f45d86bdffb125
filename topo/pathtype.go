package topo

import (
	"fmt"
	"strings"
)

// PathType says what lies between two devices: the worst link on the way. A
// smaller one is nearer. The names are NCCL's (src/graph/graph.h, PATH_*), with
// nvidia-smi's NODE between PHB and SYS.
type PathType int

// The path types, nearest first.
const (
	LOC  PathType = iota // the device itself
	NVL                  // NVLink, directly or through NVSwitches
	NVB                  // NVLink through one other GPU
	C2C                  // the chip-to-chip link of a CPU and its GPU
	PIX                  // one PCIe switch
	PXB                  // several PCIe switches, and no host bridge
	P2C                  // C2C to the CPU, then PCIe
	PXN                  // NVLink to a GPU that is near the NIC
	PHB                  // a PCIe host bridge, usually the CPU
	NODE                 // several host bridges of one NUMA node
	SYS                  // the link between NUMA nodes
	DIS                  // no way at all
)

var pathTypeNames = [...]string{
	"LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "NODE", "SYS", "DIS",
}

func (t PathType) String() string {
	if t < 0 || int(t) >= len(pathTypeNames) {
		return fmt.Sprintf("PathType(%d)", int(t))
	}
	return pathTypeNames[t]
}

// ParsePathType is the inverse of String. Lower case is accepted.
func ParsePathType(s string) (PathType, error) {
	for i, name := range pathTypeNames {
		if strings.EqualFold(s, name) {
			return PathType(i), nil
		}
	}
	return 0, fmt.Errorf("path type %q is none of %s", s, strings.Join(pathTypeNames[:], " "))
}

// MarshalText writes the name, in JSON and elsewhere.
func (t PathType) MarshalText() ([]byte, error) {
	if t < 0 || int(t) >= len(pathTypeNames) {
		return nil, fmt.Errorf("path type %d has no name", int(t))
	}
	return []byte(t.String()), nil
}

// UnmarshalText reads the name.
func (t *PathType) UnmarshalText(text []byte) error {
	parsed, err := ParsePathType(string(text))
	if err != nil {
		return err
	}
	*t = parsed
	return nil
}
