package topo

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
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
	Loops  []MeasuredLoop `json:"loops,omitempty"`
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

// MeasuredLoop has the rates of a NIC whose queue pairs are connected with each other, GB/s: the
// NIC reads and writes the memory of a GPU, or of the host, and the memory of the host at the other
// end.
type MeasuredLoop struct {
	NIC string  `json:"nic"`
	GPU string  `json:"gpu,omitempty"` // PCI address; empty for the memory of the host
	Out float64 `json:"out"`           // read by the NIC
	In  float64 `json:"in"`            // written by the NIC
}

// Rate returns the lower of the two rates.
func (l MeasuredLoop) Rate() float64 { return min(l.Out, l.In) }

// Add adds the rates of other that m lacks.
func (m *Measured) Add(other *Measured) {
	for _, c := range other.Copies {
		if !slices.ContainsFunc(m.Copies, func(o MeasuredCopy) bool { return o.GPU == c.GPU && o.Peer == c.Peer }) {
			m.Copies = append(m.Copies, c)
		}
	}
	for _, c := range other.Memory {
		if !slices.ContainsFunc(m.Memory, func(o MeasuredHost) bool { return o.GPU == c.GPU }) {
			m.Memory = append(m.Memory, c)
		}
	}
	for _, c := range other.Loops {
		if !slices.ContainsFunc(m.Loops, func(o MeasuredLoop) bool { return o.NIC == c.NIC && o.GPU == c.GPU }) {
			m.Loops = append(m.Loops, c)
		}
	}
}

// maxMeasured exceeds the rate of any link, GB/s.
const maxMeasured = 1e5

// ParseMeasured parses the JSON of a Measured.
func ParseMeasured(text []byte) (*Measured, error) {
	m := new(Measured)
	if err := json.Unmarshal(text, m); err != nil {
		return nil, err
	}
	check := func(device string, rates ...float64) error {
		for _, r := range rates {
			if !(r > 0) || r > maxMeasured {
				return fmt.Errorf("%.40q has an invalid rate of %g GB/s", device, r)
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
	for _, l := range m.Loops {
		if err := check(l.NIC, l.Out, l.In); err != nil {
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
