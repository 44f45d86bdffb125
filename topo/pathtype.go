package topo

import (
	"fmt"
	"strings"
)

// PathType is the worst link on the path between two devices. A smaller PathType is nearer. The
// names are NCCL's (src/graph/graph.h, PATH_*), with nvidia-smi's NODE between PHB and SYS.
type PathType int

// The path types, nearest first.
const (
	LOC  PathType = iota // the device itself
	NVL                  // NVLink, directly or through NVSwitches
	NVB                  // NVLink through another GPU
	C2C                  // the chip-to-chip link of a CPU and its GPU
	PIX                  // a single PCIe switch
	PXB                  // several PCIe switches, and no host bridge
	P2C                  // C2C to the CPU, then PCIe
	PXN                  // NVLink to a GPU that is near the NIC
	PHB                  // a PCIe host bridge, usually the CPU
	NODE                 // several host bridges of a NUMA node
	SYS                  // the link between NUMA nodes
	DIS                  // no path
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

// PathTypeError reports a text that is not a path type.
type PathTypeError struct{ Text string }

func (e *PathTypeError) Error() string {
	return fmt.Sprintf("unknown path type %q; use one of %s", e.Text, strings.Join(pathTypeNames[:], " "))
}

// ParsePathType is the inverse of String. Lower case is accepted.
func ParsePathType(s string) (PathType, error) {
	for i, name := range pathTypeNames {
		if strings.EqualFold(s, name) {
			return PathType(i), nil
		}
	}
	return 0, &PathTypeError{s}
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

// Path is the nearest path between two devices.
type Path struct {
	Type PathType `json:"type"`
	// Bandwidth is the bandwidth of the narrowest link on the path, GB/s (1e9 bytes) in a
	// single direction, with NCCL's figures; 0 where unknown.
	Bandwidth float64 `json:"bandwidth"`
}

// Rules select the naming of paths, where NCCL and nvidia-smi name a pair differently.
type Rules string

// Known rules.
const (
	// RulesNCCL names as NCCL 2.30 does (src/graph/paths.cc, ncclTopoSetPaths).
	RulesNCCL Rules = "nccl"
	// RulesSMI names paths like `nvidia-smi topo -m`: two host bridges of a NUMA node are NODE
	// and not PHB, only direct NVLinks and NVSwitches are NVL, and two switches never count as
	// a single switch.
	RulesSMI Rules = "smi"
	// RulesPlan are NCCL's rules with two exceptions: NODE, which gdr.max_path can distinguish
	// from PHB, and P2C, which NCCL finds only later.
	RulesPlan Rules = "plan"
)

// ParseRules reads the name of rules.
func ParseRules(s string) (Rules, error) {
	switch r := Rules(s); r {
	case RulesNCCL, RulesSMI:
		return r, nil
	}
	return "", fmt.Errorf("unknown rules %q; use nccl or smi", s)
}

// PXNPath is a path to a NIC over NVLink and the GPU Via, a PCI address; Via is near the NIC.
type PXNPath struct {
	Via       string  `json:"via"`
	Bandwidth float64 `json:"bandwidth"` // GB/s in a single direction
}

// PolicyPath is a path after NCCL's policies (src/graph/paths.cc, ncclTopoComputePaths). Pairs
// of GPUs without P2P, and pairs of GPU and NIC without GPUDirect RDMA, communicate through the
// CPU's memory.
type PolicyPath struct {
	Path
	// Direct reports that a device reads and writes the memory of the other device: P2P between
	// GPUs, GPUDirect RDMA between a GPU (for PXN the GPU on the path) and a NIC.
	Direct bool `json:"direct"`
}
