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
	// PortConventional is a function without the capability: of the PCI before
	// PCI Express, or of an emulation of it.
	PortConventional = "conventional"
)

// What ACS sends to the root complex, though the other device is below the same
// switch: requests, and the answers to them.
const (
	ACSRequestRedirect    = "ReqRedir"
	ACSCompletionRedirect = "CmpltRedir"
)

// PCIePort is a PCI function on the way from a GPU or NIC to its host bridge:
// the ports of the CPU and of switches, and the device itself.
type PCIePort struct {
	BusID string `json:"busid"`
	// Above is the address of the next function upwards; empty below the host
	// bridge.
	Above string `json:"above,omitempty"`
	// Type is one of the Port constants.
	Type string `json:"type"`
	// Inferred says that Type was told by the place in the tree, for the kernel
	// shows configuration space to root alone.
	Inferred bool `json:"inferred,omitempty"`
	// Slot is the physical slot number; 0 where there is none, or unknown.
	Slot int `json:"slot,omitempty"`
	// ACS are the controls of Access Control Services that are enabled, in the
	// words of lspci ("ReqRedir"); empty where none is, nil where unknown.
	ACS []string `json:"acs,omitzero"`
}

// redirects says that a switch's port sends what is meant for a device below the
// same switch to the root complex.
func (p PCIePort) redirects() bool {
	return slices.Contains(p.ACS, ACSRequestRedirect) || slices.Contains(p.ACS, ACSCompletionRedirect)
}

// ACSRedirects are the ports of switches whose Access Control Services send to the
// root complex what GPUs and NICs below one switch send to each other. Of the ports
// of unknown, which lie between such devices too, that cannot be told: the kernel
// shows the extended configuration space to root alone.
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
