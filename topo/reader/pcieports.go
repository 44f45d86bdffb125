package reader

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/peerlane/peerlane/topo"
)

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
		s.host.Note("the configuration space of PCI function %s cannot be read, and its type is inferred: %v", device, err)
		return configuration{}, nil
	}
	return configuration{}, err
}

// addPorts adds the ports between a host bridge and a device, and the device, to the host. devices
// is top down.
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
		p := topo.PCIePort{BusID: device, Type: c.kind, Slot: c.slot, ACS: c.acs}
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

// inferredType infers the type of a function from the place on the path, counted from the host
// bridge. Below a port of the CPU follows a device or a switch, and a switch has an upstream port
// and downstream ports.
func inferredType(place, length int) string {
	switch {
	case place == length-1 && place == 0:
		return topo.PortIntegratedEndpoint
	case place == length-1:
		return topo.PortEndpoint
	case place == 0:
		return topo.PortRoot
	case place%2 == 1:
		return topo.PortUpstream
	}
	return topo.PortDownstream
}

// maxNamed is the maximum number of devices in a note.
const maxNamed = 16

// noteACS notes the switch ports whose ACS redirects traffic between GPUs and NICs below a switch
// to the root complex, or that the kernel does not show ACS.
func (s *sysfs) noteACS() {
	redirect, unknown := s.host.ACSRedirects()
	var ports []string
	for _, p := range redirect {
		ports = append(ports, p.BusID)
	}
	if len(ports) > 0 {
		s.host.Note("ACS redirects traffic between GPUs and NICs below one PCIe switch to the root complex, so "+
			"GPUDirect goes through the CPU and is slow; "+
			"the switch ports are %s; on a host whose devices need no isolation from each other (no virtual "+
			"machines), start the kernel with "+
			"pci=disable_acs_redir=ADDRESS;ADDRESS for these, or until the next start `setpci -s ADDRESS ECAP_ACS+6.w=0`",
			named(ports))
	}
	if len(unknown) > 0 && s.cut {
		s.host.Note("only root can read configuration space: the types of PCIe ports are inferred, and " +
			"whether ACS redirects traffic between GPUs and NICs is unknown")
	}
}

// named lists at most maxNamed names, and the number of further names.
func named(names []string) string {
	if len(names) <= maxNamed {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:maxNamed], ", "), len(names)-maxNamed)
}
