package reader

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
	"github.com/peerlane/peerlane/topo/internal/lazyregexp"
	"github.com/peerlane/peerlane/topo/internal/pci"
)

// readNICs reads the RDMA devices of /sys/class/infiniband.
func (s *sysfs) readNICs() error {
	names, err := s.list("class/infiniband")
	if err != nil {
		return err
	}
	uverbs, err := s.uverbs()
	if err != nil {
		return err
	}
	if len(names) > topo.MaxDevices {
		return &countError{items: "RDMA devices", count: len(names), max: topo.MaxDevices}
	}
	bonds, members, cards := map[string]string{}, map[string]int{}, map[string]string{}
	for _, name := range names {
		nic, err := s.readNIC(name)
		if gone(err) {
			s.host.Note("RDMA device %s vanished while it was read, and is ignored", name)
			continue
		}
		if err != nil {
			return err
		}
		nic.Uverbs = uverbs[name]
		what, err := s.product(nic.BusID, nic.Device)
		if err != nil {
			return err
		}
		nic.Management = what.management
		if nic.Device.Device == pci.DeviceConnectX8 && what.card != "" {
			cards[name] = what.card
		}
		bond, err := s.bond(nic)
		if err != nil {
			return err
		}
		bonds[name] = bond
		members[bond]++
		s.host.NICs = append(s.host.NICs, nic)
	}
	for i := range s.host.NICs {
		nic := &s.host.NICs[i]
		// No device represents a bond with several devices.
		bond := bonds[nic.Name]
		nic.Bond = pci.BondName.MatchString(nic.Name) || bond != "" && members[bond] == 1
	}
	slices.SortFunc(s.host.NICs, func(a, b topo.NIC) int { return topo.CompareNatural(a.Name, b.Name) })
	return s.findDataDirect(cards)
}

// readNIC reads an RDMA device.
func (s *sysfs) readNIC(name string) (topo.NIC, error) {
	device, subfunction, err := s.pciDeviceOf(name)
	if err != nil {
		return topo.NIC{}, err
	}
	nic := topo.NIC{Name: name}
	if device == "" {
		// NCCL also attaches devices without a PCI function to the first CPU.
		nic.Software, nic.NUMA, nic.Place = true, s.host.CPUs[0].NUMA, topo.Place{Link: bandwidths.Local}
		s.host.Note("RDMA device %s has no PCI device (software RDMA such as rxe or siw): it cannot reach a "+
			"GPU's memory, and plans use it only with --software", name)
	} else {
		nic.BusID, nic.Subfunction, nic.Driver = device, subfunction, s.driver(device)
		if physical, err := s.files.ReadLink(s.path("bus/pci/devices", device, "physfn")); err == nil {
			nic.VirtualFunctionOf = filepath.Base(physical)
		}
		if nic.NUMA, nic.Place, err = s.place(device); err != nil {
			return topo.NIC{}, err
		}
		if nic.Card = s.card(cmp.Or(nic.VirtualFunctionOf, device), device); nic.Card != "" {
			if nic.NUMA, nic.Place, err = s.place(nic.Card); err != nil {
				return topo.NIC{}, err
			}
		}
		if nic.Device, err = s.identity(device); err != nil {
			return topo.NIC{}, err
		}
	}
	for attribute, into := range map[string]*string{"node_guid": &nic.GUID, "sys_image_guid": &nic.SystemGUID,
		"fw_ver": &nic.Firmware} {
		if *into, err = s.deviceAttribute("class/infiniband", name, attribute); err != nil {
			return topo.NIC{}, err
		}
	}
	if nic.Ports, err = s.nicPorts(name); err != nil {
		return topo.NIC{}, err
	}
	nic.Protocol, err = s.protocol(nic)
	return nic, err
}

// card returns the first function of the card of a physical function; "" if device is the first
// function, or the first function does not exist. NCCL places a NIC at the first function
// (ncclIbGetPciPath), so that the ports and virtual functions of a card are a single NIC. For
// virtual functions NCCL also sets the device number to 0; card uses physfn, which has the same
// result, and is also right for neighbouring cards on the first bus of a virtual machine.
func (s *sysfs) card(physical, device string) string {
	if !lazyregexp.DevicePattern.MatchString(physical) {
		return ""
	}
	first := physical[:len(physical)-1] + "0"
	if first == device {
		return ""
	}
	if _, err := s.files.ReadLink(s.path("bus/pci/devices", first)); err != nil {
		return ""
	}
	return first
}

// bond returns the bonding interface of a NIC's first GID, from
// /sys/class/infiniband/NIC/ports/N/gid_attrs/ndevs/0: the kernel gives the first GID of a port to
// the bond of the port's interface. "" without a bond.
func (s *sysfs) bond(nic topo.NIC) (string, error) {
	for _, p := range nic.Ports {
		name, err := s.attribute("class/infiniband", nic.Name, "ports", strconv.Itoa(p.Number), firstGID)
		if refused(err) {
			continue // the GID belongs to no interface
		}
		if err != nil {
			return "", err
		}
		if !interfaceName.MatchString(name) {
			continue
		}
		if _, err := s.files.Resolve(s.path("class/net", name, "bonding")); err == nil {
			return name, nil
		}
	}
	return "", nil
}

// firstGID is the file, relative to a port, with the interface of the first GID.
const firstGID = "gid_attrs/ndevs/0"

var (
	// interfaceName matches the name of a network interface that is safe as an element of a path.
	interfaceName      = lazyregexp.New(`^[^/\s.][^/\s]{0,14}$`)
	subfunctionPattern = lazyregexp.New(`\.sf\.[0-9]+$`)
)

// pciDeviceOf returns the PCI function of an RDMA device; "" without a PCI function. A subfunction
// (mlx5_core.sf.4) belongs to the PCI function above.
func (s *sysfs) pciDeviceOf(nic string) (device, subfunction string, err error) {
	path, err := s.files.Resolve(s.path("class/infiniband", nic, "device"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", "", nil
	}
	if err != nil {
		return "", "", err
	}
	_, devices := chain(path)
	if len(devices) == 0 {
		return "", "", nil
	}
	if last := filepath.Base(path); subfunctionPattern.MatchString(last) {
		subfunction = last
	}
	return devices[len(devices)-1], subfunction, nil
}

// protocol returns NIC.Protocol from /sys/class/infiniband/NIC/node_type ("1: CA"), the driver,
// and the link layer of the first active port, or of the first port if no port is active.
func (s *sysfs) protocol(nic topo.NIC) (string, error) {
	kind, err := s.attribute("class/infiniband", nic.Name, "node_type")
	if err != nil {
		return "", err
	}
	kind, _, _ = strings.Cut(kind, ":")
	vendor := ""
	if nic.BusID != "" && kind != "1" { // for a channel adapter, the link layer tells the protocol
		if vendor, err = s.pciAttribute(nic.BusID, "vendor"); err != nil {
			return "", err
		}
	}
	layer := ""
	if i := slices.IndexFunc(nic.Ports, topo.Port.Active); i >= 0 {
		layer = nic.Ports[i].LinkLayer
	} else if len(nic.Ports) > 0 {
		layer = nic.Ports[0].LinkLayer
	}
	switch {
	case nic.Driver == "efa" || vendor == pci.VendorAmazon:
		return "EFA", nil
	case nic.Driver == "erdma" || vendor == pci.VendorAlibaba:
		return "eRDMA", nil
	case kind == "4":
		return "iWARP", nil
	case layer == "InfiniBand":
		return "InfiniBand", nil
	case layer == "Ethernet":
		return "RoCE", nil
	}
	return "", nil
}

// uverbs maps RDMA devices to character devices, from /sys/class/infiniband_verbs/uverbsN/ibdev.
func (s *sysfs) uverbs() (map[string]string, error) {
	names, err := s.list("class/infiniband_verbs")
	if err != nil {
		return nil, err
	}
	byNIC := map[string]string{}
	for _, name := range names {
		if !strings.HasPrefix(name, "uverbs") { // abi_version is in the same directory
			continue
		}
		nic, err := s.attribute("class/infiniband_verbs", name, "ibdev")
		if err != nil {
			return nil, err
		}
		byNIC[nic] = name
	}
	return byNIC, nil
}

// nicPorts reads /sys/class/infiniband/NIC/ports.
func (s *sysfs) nicPorts(nic string) ([]topo.Port, error) {
	names, err := s.list("class/infiniband", nic, "ports")
	if err != nil {
		return nil, err
	}
	var ports []topo.Port
	for _, name := range names {
		number, err := strconv.Atoi(name)
		if err != nil {
			return nil, fmt.Errorf("port %q of %s: %w", name, nic, err)
		}
		p := topo.Port{Number: number}
		var rate, lid, smLID string
		for attribute, into := range map[string]*string{
			"state": &p.State, "phys_state": &p.PhysicalState, "link_layer": &p.LinkLayer, "rate": &rate, "lid": &lid,
			"sm_lid": &smLID,
		} {
			if *into, err = s.deviceAttribute("class/infiniband", nic, "ports", name, attribute); err != nil {
				return nil, err
			}
		}
		p.State, p.PhysicalState = portState(p.State), portState(p.PhysicalState)
		p.RateGbps, p.LID, p.SMLID = portRate(rate), portLID(lid), portLID(smLID)
		// A GID of another network namespace is unreadable, as for bonds.
		gid, err := s.attribute("class/infiniband", nic, "ports", name, "gids/0")
		if err != nil && !refused(err) {
			return nil, err
		}
		p.GUID = portGUID(gid)
		ports = append(ports, p)
	}
	slices.SortFunc(ports, func(a, b topo.Port) int { return a.Number - b.Number })
	return ports, nil
}

// portState reads "4: ACTIVE" and "5: LinkUp".
func portState(text string) string {
	if _, state, ok := strings.Cut(text, ": "); ok {
		return state
	}
	return text
}

// portLID parses "0x1f"; 0 if malformed.
func portLID(text string) int {
	lid, err := strconv.ParseUint(text, 0, 16)
	if err != nil {
		return 0
	}
	return int(lid)
}

// portGUID returns the second half of a GID, "fe80:0000:0000:0000:0c42:a103:00aa:bbcc"; "" for the
// zero GID of a port without GIDs, and for malformed text.
func portGUID(gid string) string {
	half := strings.Repeat("0000:", 4)
	if len(gid) != 2*len(half)-1 || strings.Trim(gid, "0:") == "" {
		return ""
	}
	return gid[len(half):]
}

// portRate parses "400 Gb/sec (4X NDR)" to Gbit/s; 0 if malformed.
func portRate(text string) float64 {
	number, _, _ := strings.Cut(text, " ")
	rate, err := strconv.ParseFloat(number, 64)
	if err != nil || !(rate > 0) || rate > 1e6 {
		return 0
	}
	return rate
}
