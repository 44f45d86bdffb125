package topo

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
)

// Measured has measured rates of copies on a host. The model prefers measured rates to the
// constants from other machines.
type Measured struct {
	// Fingerprint is the Host.Fingerprint of the measured host: rates of another host are
	// invalid.
	Fingerprint string `json:"fingerprint"`
	// At is the time of the measurement, in Unix seconds.
	At     int64          `json:"at"`
	Copies []MeasuredCopy `json:"copies,omitempty"`
	Memory []MeasuredHost `json:"memory,omitempty"`
}

// MeasuredCopy has the rates of copies between two GPUs, GB/s; GPU issues the copies.
type MeasuredCopy struct {
	GPU  string  `json:"gpu"`  // PCI address
	Peer string  `json:"peer"` // PCI address
	Out  float64 `json:"out"`  // from GPU to Peer
	In   float64 `json:"in"`
}

// MeasuredHost has the rates of copies between a GPU and pinned memory of its host, GB/s.
type MeasuredHost struct {
	GPU string  `json:"gpu"` // PCI address
	Out float64 `json:"out"` // from the GPU
	In  float64 `json:"in"`
}

// mostMeasured is more than any link carries, GB/s.
const mostMeasured = 1e5

// ParseMeasured parses the JSON of a Measured.
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

// Fingerprint identifies a host by the devices and the links between the devices. The
// fingerprint changes when a device is added, removed or moved to another slot. The state of a
// port does not change the fingerprint.
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

// Measure stores measured rates in the host, and returns false for rates of another host.
func (h *Host) Measure(m *Measured) bool {
	if m == nil || m.Fingerprint != h.Fingerprint() {
		return false
	}
	h.Measured = m
	return true
}
