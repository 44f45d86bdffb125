package topo

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
)

// Measured is what copies on one host were measured to carry. The model takes it in
// place of constants of other machines.
type Measured struct {
	// Fingerprint is that of the host (Host.Fingerprint): another one's figures say
	// nothing.
	Fingerprint string `json:"fingerprint"`
	// At is when it was measured, in Unix seconds.
	At     int64          `json:"at"`
	Copies []MeasuredCopy `json:"copies,omitempty"`
	Memory []MeasuredHost `json:"memory,omitempty"`
}

// MeasuredCopy is the copies between two GPUs that the first one issues, GB/s.
type MeasuredCopy struct {
	GPU  string  `json:"gpu"`  // PCI address
	Peer string  `json:"peer"` // PCI address
	Out  float64 `json:"out"`  // from GPU to Peer
	In   float64 `json:"in"`
}

// MeasuredHost is the copies between a GPU and pinned memory of its host, GB/s.
type MeasuredHost struct {
	GPU string  `json:"gpu"` // PCI address
	Out float64 `json:"out"` // from the GPU
	In  float64 `json:"in"`
}

// mostMeasured is more than any link carries, GB/s.
const mostMeasured = 1e5

// ParseMeasured reads what Measured was written as.
func ParseMeasured(text []byte) (*Measured, error) {
	m := new(Measured)
	if err := json.Unmarshal(text, m); err != nil {
		return nil, err
	}
	check := func(gpu string, rates ...float64) error {
		for _, r := range rates {
			if !(r > 0) || r > mostMeasured {
				return fmt.Errorf("GPU %.40q has a rate of %g GB/s", gpu, r)
			}
		}
		return nil
	}
	for _, c := range m.Copies {
		if err := check(c.GPU, c.Out, c.In); err != nil {
			return nil, err
		}
	}
	for _, c := range m.Memory {
		if err := check(c.GPU, c.Out, c.In); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// Fingerprint tells hosts apart by their devices and by how these are joined: it
// changes when a device comes, goes or is plugged elsewhere, and not with the state of
// a port.
func (h *Host) Fingerprint() string {
	sum := sha256.New()
	add := func(words ...any) { fmt.Fprintln(sum, words...) }
	place := func(p Place) string { return fmt.Sprint(p.HostBridge, p.Switch, p.Link) }
	for _, c := range h.CPUs {
		add("cpu", c.NUMA, c.Vendor, c.Family, c.Model)
	}
	for _, s := range h.Switches {
		add("switch", s.BusID, s.NUMA, place(s.Place))
	}
	for _, g := range h.GPUs {
		add("gpu", g.BusID, g.UUID, g.Name, g.NUMA, place(g.Place), g.C2C, g.NVLinkCPU, len(g.NVLinks))
	}
	for _, n := range h.NICs {
		add("nic", n.Name, n.BusID, n.DataDirect, n.NUMA, place(n.Place))
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
}

// Measure has the model of this host take measured figures, if they are of this host.
func (h *Host) Measure(m *Measured) bool {
	if m == nil || m.Fingerprint != h.Fingerprint() {
		return false
	}
	h.Measured = m
	return true
}
