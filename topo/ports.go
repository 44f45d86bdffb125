package topo

import "slices"

// Types of PCI functions, by the Device/Port Type of the PCI Express capability
// (7.5.3.2).
const (
	PortRoot               = "root-port"
	PortUpstream           = "upstream-port"
	PortDownstream         = "downstream-port"
	PortEndpoint           = "endpoint"
	PortLegacyEndpoint     = "legacy-endpoint"
	PortIntegratedEndpoint = "integrated-endpoint" // of the root complex
	PortEventCollector     = "event-collector"
	PortToPCI              = "pcie-to-pci-bridge"
	PortFromPCI            = "pci-to-pcie-bridge"
	// PortConventional is a function without the capability: conventional PCI, or an emulation
	// of PCI.
	PortConventional = "conventional"
)

// Controls of ACS that redirect traffic between devices below a switch to the root complex:
// requests, and completions.
const (
	ACSRequestRedirect    = "ReqRedir"
	ACSCompletionRedirect = "CmpltRedir"
)

// PCIePort is a PCI function between a GPU or NIC and its host bridge: a port of the CPU, a
// port of a switch, or the device itself.
type PCIePort struct {
	BusID string `json:"busid"`
	// Above is the address of the next function upwards; empty below the host
	// bridge.
	Above string `json:"above,omitempty"`
	// Type is a Port constant.
	Type string `json:"type"`
	// Inferred reports that Type follows from the place in the tree: only root can read
	// configuration space.
	Inferred bool `json:"inferred,omitempty"`
	// Slot is the physical slot number; 0 without a slot, or where unknown.
	Slot int `json:"slot,omitempty"`
	// ACS lists the enabled controls of Access Control Services, in lspci's notation
	// ("ReqRedir"); empty without an enabled control, nil where unknown.
	ACS []string `json:"acs,omitzero"`
}

// redirects reports whether a port of a switch redirects to the root complex the traffic
// between devices below the switch.
func (p PCIePort) redirects() bool {
	return slices.Contains(p.ACS, ACSRequestRedirect) || slices.Contains(p.ACS, ACSCompletionRedirect)
}

// ACSRedirects returns the ports of switches whose Access Control Services redirect to the root
// complex the traffic between GPUs and NICs below a switch. The ports of unknown also lie
// between such devices, but their ACS is unreadable: only root can read the extended
// configuration space.
func (h *Host) ACSRedirects() (redirect, unknown []PCIePort) {
	type count struct{ gpus, nics int }
	index := make(map[string]int, len(h.PCIePorts))
	for i, p := range h.PCIePorts {
		index[p.BusID] = i
	}
	below := make([]count, len(h.PCIePorts))
	add := func(device string, c count) {
		for at, known := index[device]; known; at, known = index[h.PCIePorts[at].Above] {
			below[at].gpus += c.gpus
			below[at].nics += c.nics
		}
	}
	for _, g := range h.GPUs {
		add(g.BusID, count{gpus: 1})
	}
	for _, n := range h.NICs {
		add(n.BusID, count{nics: 1})
	}
	for i, p := range h.PCIePorts {
		up, known := index[p.Above]
		if !known || p.Type != PortDownstream {
			continue
		}
		here, all := below[i], below[up]
		between := here.gpus > 0 && all.gpus+all.nics > here.gpus+here.nics || here.nics > 0 && all.gpus > here.gpus
		switch {
		case between && p.ACS == nil:
			unknown = append(unknown, p)
		case between && p.redirects():
			redirect = append(redirect, p)
		}
	}
	return redirect, unknown
}
