package topo

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
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
	for _, name := range names {
		device, subfunction, err := s.pciDeviceOf(name)
		if err != nil {
			return err
		}
		nic := NIC{Name: name, Uverbs: uverbs[name], Bond: bondName.MatchString(name)}
		if device == "" {
			// NCCL, too, puts what it finds no PCI function for at the first CPU.
			nic.Software, nic.NUMA, nic.Place = true, s.host.CPUs[0].NUMA, Place{Link: localBandwidth}
			s.host.note("RDMA device %s has no PCI device behind it (software RDMA, as rxe and siw are): it cannot reach a GPU's memory, and is planned only with --software", name)
		} else {
			nic.BusID, nic.Subfunction, nic.Driver = device, subfunction, s.driver(device)
			if nic.NUMA, nic.Place, err = s.place(device); err != nil {
				return err
			}
			if nic.Device, err = s.identity(device); err != nil {
				return err
			}
			if physical, err := s.files.ReadLink(s.path("bus/pci/devices", device, "physfn")); err == nil {
				nic.VirtualFunctionOf = filepath.Base(physical)
			}
		}
		for attribute, into := range map[string]*string{"node_guid": &nic.GUID, "sys_image_guid": &nic.SystemGUID} {
			if *into, err = s.attribute("class/infiniband", name, attribute); err != nil {
				return err
			}
		}
		if nic.Ports, err = s.ports(name); err != nil {
			return err
		}
		if nic.Protocol, err = s.protocol(nic); err != nil {
			return err
		}
		s.host.NICs = append(s.host.NICs, nic)
	}
	slices.SortFunc(s.host.NICs, func(a, b NIC) int { return compareNatural(a.Name, b.Name) })
	return nil
}

var (
	// bondName is what mlx5_ib calls the device of a RoCE LAG.
	bondName           = regexp.MustCompile(`_bond_[0-9]+$`)
	subfunctionPattern = regexp.MustCompile(`\.sf\.[0-9]+$`)
)

// pciDeviceOf is the PCI function of an RDMA device; "" where it has none. A
// subfunction (mlx5_core.sf.4) belongs to the function below which it lies.
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

// protocol tells NIC.Protocol by /sys/class/infiniband/NIC/node_type ("1: CA"),
// the driver, and the link layer of the first port that is active, or the first.
func (s *sysfs) protocol(nic NIC) (string, error) {
	kind, err := s.attribute("class/infiniband", nic.Name, "node_type")
	if err != nil {
		return "", err
	}
	kind, _, _ = strings.Cut(kind, ":")
	vendor := ""
	if nic.BusID != "" && kind != "1" { // a channel adapter is as its link layer says
		if vendor, err = s.pciAttribute(nic.BusID, "vendor"); err != nil {
			return "", err
		}
	}
	layer := ""
	if i := slices.IndexFunc(nic.Ports, Port.Active); i >= 0 {
		layer = nic.Ports[i].LinkLayer
	} else if len(nic.Ports) > 0 {
		layer = nic.Ports[0].LinkLayer
	}
	switch {
	case nic.Driver == "efa" || vendor == vendorAmazon:
		return "EFA", nil
	case nic.Driver == "erdma" || vendor == vendorAlibaba:
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

// uverbs maps RDMA devices to their character devices, by
// /sys/class/infiniband_verbs/uverbsN/ibdev.
func (s *sysfs) uverbs() (map[string]string, error) {
	names, err := s.list("class/infiniband_verbs")
	if err != nil {
		return nil, err
	}
	byNIC := map[string]string{}
	for _, name := range names {
		if !strings.HasPrefix(name, "uverbs") { // abi_version lies beside them
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

// ports reads /sys/class/infiniband/NIC/ports.
func (s *sysfs) ports(nic string) ([]Port, error) {
	names, err := s.list("class/infiniband", nic, "ports")
	if err != nil {
		return nil, err
	}
	var ports []Port
	for _, name := range names {
		number, err := strconv.Atoi(name)
		if err != nil {
			return nil, fmt.Errorf("port %q of %s: %w", name, nic, err)
		}
		p := Port{Number: number}
		for attribute, into := range map[string]*string{"state": &p.State, "link_layer": &p.LinkLayer} {
			if *into, err = s.attribute("class/infiniband", nic, "ports", name, attribute); err != nil {
				return nil, err
			}
		}
		// "4: ACTIVE"
		if _, state, ok := strings.Cut(p.State, ": "); ok {
			p.State = state
		}
		rate, err := s.attribute("class/infiniband", nic, "ports", name, "rate")
		if err != nil {
			return nil, err
		}
		p.RateGbps = portRate(rate)
		ports = append(ports, p)
	}
	slices.SortFunc(ports, func(a, b Port) int { return a.Number - b.Number })
	return ports, nil
}

// portRate reads "400 Gb/sec (4X NDR)", Gbit/s; 0 where it says none.
func portRate(text string) float64 {
	number, _, _ := strings.Cut(text, " ")
	rate, err := strconv.ParseFloat(number, 64)
	if err != nil || !(rate > 0) || rate > 1e6 {
		return 0
	}
	return rate
}
