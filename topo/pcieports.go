package topo

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
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

// configuration reads /sys/bus/pci/devices/ADDRESS/config, once.
func (s *sysfs) configuration(device string) (configuration, error) {
	if c, known := s.configs[device]; known {
		return c, nil
	}
	c, err := s.readConfiguration(device)
	if err != nil {
		return c, err
	}
	s.configs[device] = c
	return c, nil
}

func (s *sysfs) readConfiguration(device string) (configuration, error) {
	file := s.path("bus/pci/devices", device, "config")
	f, err := s.files.Open(file)
	if gone(err) || errors.Is(err, fs.ErrPermission) {
		return configuration{}, nil
	}
	if err == nil {
		defer func() { _ = f.Close() }() // opened for reading: closing loses nothing
		var c configuration
		if c, err = readConfiguration(f); err == nil {
			if c.kind == "" {
				s.cut = true
			}
			return c, nil
		}
	}
	if refused(err) {
		s.host.note("the configuration space of PCI function %s cannot be read, and its type is inferred: %v", device, err)
		return configuration{}, nil
	}
	return configuration{}, err
}

// addPorts adds what lies between a host bridge and a device, top down and with
// the device, to the host.
func (s *sysfs) addPorts(devices []string) error {
	for i, device := range devices {
		if s.ports[device] {
			continue
		}
		s.ports[device] = true
		c, err := s.configuration(device)
		if err != nil {
			return err
		}
		p := PCIePort{BusID: device, Type: c.kind, Slot: c.slot, ACS: c.acs}
		if i > 0 {
			p.Above = devices[i-1]
		}
		if p.Type == "" {
			p.Type, p.Inferred = inferredType(i, len(devices)), true
		}
		s.host.PCIePorts = append(s.host.PCIePorts, p)
	}
	return nil
}

// inferredType tells a function's type by its place, counted from the host
// bridge, on a way of so many functions: below a port of the CPU there is a
// device or a switch, and a switch is an upstream port and those below it.
func inferredType(place, length int) string {
	switch {
	case place == length-1 && place == 0:
		return PortIntegratedEndpoint
	case place == length-1:
		return PortEndpoint
	case place == 0:
		return PortRoot
	case place%2 == 1:
		return PortUpstream
	}
	return PortDownstream
}

// mostNamed is how many devices a note names.
const mostNamed = 16

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

// noteACS says which switch ports keep GPUs and NICs below one switch from
// reaching each other in it, or that this cannot be seen.
func (s *sysfs) noteACS() {
	redirect, unknown := s.host.ACSRedirects()
	var ports []string
	for _, p := range redirect {
		ports = append(ports, p.BusID)
	}
	if len(ports) > 0 {
		s.host.note("ACS redirects what GPUs and NICs below one PCIe switch send to each other to the root complex, so GPUDirect passes the CPU and is slow; "+
			"it does so at the switch ports %s; on a host whose devices need no isolation from each other (no virtual machines), start the kernel with "+
			"pci=disable_acs_redir=ADDRESS;ADDRESS for these, or until the next start `setpci -s ADDRESS ECAP_ACS+6.w=0`", named(ports))
	}
	if len(unknown) > 0 && s.cut {
		s.host.note("the kernel shows configuration space to root alone: the types of PCIe ports are inferred, and whether ACS redirects what GPUs and NICs send to each other is unknown")
	}
}

// named lists names, not more than a reader can take in.
func named(names []string) string {
	if len(names) <= mostNamed {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:mostNamed], ", "), len(names)-mostNamed)
}
