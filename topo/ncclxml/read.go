package ncclxml

import (
	"bytes"
	"cmp"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
	"github.com/peerlane/peerlane/topo/internal/cpuset"
	"github.com/peerlane/peerlane/topo/internal/pci"
	"github.com/peerlane/peerlane/topo/internal/textfile"
)

// Limits of a topology file. Files of real machines have about 10,000 bytes, some hundred elements
// and a depth of 10.
const (
	maxXML         = 16 << 20 // bytes
	maxXMLElements = 1 << 16
	maxXMLDepth    = 64
	maxXMLNodes    = 1024 // <cpu>
	maxXMLDevices  = 512  // GPUs and NICs: the number of paths is the square
	maxXMLWidth    = 1024 // lanes of a PCIe link, of which the standard has 32
)

// Read reads a topology file of NCCL or RCCL: the XML that NCCL_TOPO_DUMP_FILE writes and
// NCCL_TOPO_FILE reads, with <system version="1"> or "2". Errors contain name.
//
// Skeletons of cloud providers have no <gpu> and no <nic>. For a skeleton, Read derives the kind
// of a device from the PCI class, names a NIC nic@ADDRESS, and numbers GPUs by address.
//
// A file can describe several hosts (host_hash). Read then sets Host of every device, and numbers
// the GPUs of every host from 0.
func Read(r io.Reader, name string) (*topo.Host, error) {
	h, err := readNCCLXML(r)
	if err == nil {
		err = h.CheckText()
	}
	if err != nil {
		return nil, &textfile.FileError{Form: "NCCL topology file", Name: name, Err: err}
	}
	h.Source = topo.Source{Kind: topo.SourceNCCLXML, File: name}
	return h, nil
}

// Causes of a refused file.
var (
	ErrHwloc = errors.New("it is a file of hwloc (<topology>); a file of NCCL begins with <system>, and " +
		"NCCL_TOPO_DUMP_FILE makes it")
	ErrNoCPU = errors.New("it has no <cpu>")
)

// RootError is the cause of a refused file of another root element.
type RootError struct{ Root string }

func (e *RootError) Error() string {
	return fmt.Sprintf("its root is <%s>; an NCCL topology begins with <system>", e.Root)
}

// VersionError is the cause of a refused file of another version.
type VersionError struct{ Version string }

func (e *VersionError) Error() string {
	return fmt.Sprintf("unknown version %q; must be 1 (NCCL) or 2 (RCCL)", e.Version)
}

// DuplicateNetError is the cause of a refused file with two NICs of a name.
type DuplicateNetError struct{ Name string }

func (e *DuplicateNetError) Error() string { return fmt.Sprintf("it has two <net> named %q", e.Name) }

func readNCCLXML(r io.Reader) (*topo.Host, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxXML+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxXML {
		return nil, fmt.Errorf("it is larger than %d MiB, the maximum for a topology", maxXML>>20)
	}
	text = textfile.WithoutDashes(text)
	if err := checkXML(text); err != nil {
		return nil, err
	}
	var root xmlRoot
	if err := xml.Unmarshal(text, &root); err != nil {
		return nil, err
	}
	switch {
	case root.XMLName.Local == "topology":
		return nil, ErrHwloc
	case root.XMLName.Local != "system":
		return nil, &RootError{root.XMLName.Local}
	case root.Version != "1" && root.Version != "2":
		return nil, &VersionError{root.Version}
	case len(root.CPUs) == 0:
		return nil, ErrNoCPU
	case len(root.CPUs) > maxXMLNodes:
		return nil, fmt.Errorf("it has %d <cpu>, more than %d", len(root.CPUs), maxXMLNodes)
	}
	x := xmlReader{host: &topo.Host{}, nodes: map[string]bool{}, addresses: map[string]bool{}, names: map[string]bool{}}
	for _, c := range root.CPUs {
		x.several = x.several || hostHash(c) != hostHash(root.CPUs[0])
	}
	for _, c := range root.CPUs {
		if err := x.cpu(c); err != nil {
			return nil, err
		}
	}
	x.finish()
	return x.host, nil
}

// checkXML refuses text with more elements or a greater depth than a topology has, before
// Unmarshal allocates memory. A syntax error has the line and the column.
func checkXML(text []byte) error {
	d := xml.NewDecoder(bytes.NewReader(text))
	elements, depth := 0, 0
	for {
		token, err := d.RawToken()
		if errors.Is(err, io.EOF) {
			return nil // Unmarshal reports unclosed elements and a missing root
		}
		line, column := d.InputPos()
		if err != nil {
			return &textfile.PlaceError{Line: line, Column: column, Err: err}
		}
		switch token.(type) {
		case xml.StartElement:
			elements++
			depth++
		case xml.EndElement:
			depth--
		}
		switch {
		case elements > maxXMLElements:
			return &textfile.PlaceError{Line: line, Column: column,
				Err: fmt.Errorf("it has more than %d elements, the maximum for a topology", maxXMLElements)}
		case depth > maxXMLDepth:
			return &textfile.PlaceError{Line: line, Column: column,
				Err: fmt.Errorf("its elements are nested more than %d deep, the maximum for a topology", maxXMLDepth)}
		}
	}
}

type xmlRoot struct {
	XMLName xml.Name
	Version string   `xml:"version,attr"`
	CPUs    []xmlCPU `xml:"cpu"`
}

// xmlPlace is the end of an element's start tag, from 1.
type xmlPlace struct{ line, column int }

// fail returns an error with the line and the column of the element.
func (p xmlPlace) fail(format string, args ...any) error {
	return &textfile.PlaceError{Line: p.line, Column: p.column, Err: fmt.Errorf(format, args...)}
}

type xmlCPU struct {
	NUMA     string   `xml:"numaid,attr"`
	HostHash string   `xml:"host_hash,attr"`
	Affinity string   `xml:"affinity,attr"`
	Arch     string   `xml:"arch,attr"`
	Vendor   string   `xml:"vendor,attr"`
	Family   string   `xml:"familyid,attr"`
	Model    string   `xml:"modelid,attr"`
	PCI      []xmlPCI `xml:"pci"`
	NICs     []xmlNIC `xml:"nic"`
	xmlPlace `xml:"-"`
}

// UnmarshalXML remembers the place.
func (c *xmlCPU) UnmarshalXML(d *xml.Decoder, start xml.StartElement) error {
	type plain xmlCPU
	line, column := d.InputPos()
	err := d.DecodeElement((*plain)(c), &start)
	c.xmlPlace = xmlPlace{line, column}
	return err
}

// hostHash returns the number of a host as NCCL reads host_hash; 0 if the number is missing.
func hostHash(c xmlCPU) uint64 {
	hash, _ := strconv.ParseUint(strings.TrimPrefix(c.HostHash, "0x"), 16, 64)
	return hash
}

type xmlPCI struct {
	BusID           string    `xml:"busid,attr"`
	Class           string    `xml:"class,attr"`
	Vendor          string    `xml:"vendor,attr"`
	Device          string    `xml:"device,attr"`
	SubsystemVendor string    `xml:"subsystem_vendor,attr"`
	SubsystemDevice string    `xml:"subsystem_device,attr"`
	Speed           string    `xml:"link_speed,attr"`
	Width           string    `xml:"link_width,attr"`
	PCI             []xmlPCI  `xml:"pci"`
	GPUs            []xmlGPU  `xml:"gpu"` // RCCL lists several partitions of a device
	NICs            []xmlNIC  `xml:"nic"`
	Peers           []xmlLink `xml:"pcilink"`
	xmlPlace        `xml:"-"`
}

// UnmarshalXML remembers the place.
func (p *xmlPCI) UnmarshalXML(d *xml.Decoder, start xml.StartElement) error {
	type plain xmlPCI
	line, column := d.InputPos()
	err := d.DecodeElement((*plain)(p), &start)
	p.xmlPlace = xmlPlace{line, column}
	return err
}

type xmlGPU struct {
	Dev     string    `xml:"dev,attr"`
	SM      string    `xml:"sm,attr"`
	GCN     string    `xml:"gcn,attr"` // RCCL: the architecture, "906"
	GDR     string    `xml:"gdr,attr"`
	NVLinks []xmlLink `xml:"nvlink"`
	XGMI    []xmlLink `xml:"xgmi"`
	C2C     []xmlLink `xml:"c2c"`
}

type xmlLink struct {
	Target string `xml:"target,attr"`
	Count  string `xml:"count,attr"`
	Class  string `xml:"tclass,attr"`
	MBps   string `xml:"bw,attr"` // of C2C
}

type xmlNIC struct {
	Nets []xmlNet `xml:"net"`
}

type xmlNet struct {
	Name  string  `xml:"name,attr"`
	Dev   string  `xml:"dev,attr"`
	Speed string  `xml:"speed,attr"` // Mbit/s
	Port  string  `xml:"port,attr"`
	GDR   string  `xml:"gdr,attr"`
	Net   string  `xml:"net,attr"` // "0" for a <net> that serves only GIN or RMA
	GUID  *string `xml:"guid,attr"`
}

type xmlReader struct {
	host      *topo.Host
	several   bool            // the file describes several hosts
	nodes     map[string]bool // <cpu> by host and NUMA node; addresses and names have the host too
	addresses map[string]bool // of <pci>
	names     map[string]bool // of <net>
	at        string          // the current host
	// unnumbered are the hosts with a GPU that has no dev.
	unnumbered map[string]bool
	classless  int
	// loose is, by host, the NUMA node of NICs without a PCI device.
	loose map[string]int
	// unusable holds values that are not numbers; finish writes a note for every kind of value.
	unusable []unusableValue
}

// unusableValue is the first unusable value of a kind, and the number of such values.
type unusableValue struct {
	attribute, value, of, effect string
	count                        int
}

// ignore records that an attribute of a device has no usable value, and the effect of that.
func (x *xmlReader) ignore(attribute, value, of, effect string) {
	i := slices.IndexFunc(x.unusable, func(u unusableValue) bool { return u.attribute == attribute })
	if i < 0 {
		i = len(x.unusable)
		x.unusable = append(x.unusable, unusableValue{attribute: attribute, value: value, of: of, effect: effect})
	}
	x.unusable[i].count++
}

// link returns the speed and the width of a function's link. "" and 0 mean unknown.
func (x *xmlReader) link(p xmlPCI, busID string) (speed string, width int) {
	if p.Speed != "" && !strings.HasPrefix(p.Speed, "Unknown") && bandwidths.LinkSpeed(p.Speed) == 0 {
		x.ignore("link_speed", p.Speed, busID, "the link counts as PCIe 3.0")
	} else {
		speed = p.Speed
	}
	width, err := strconv.Atoi(p.Width)
	if p.Width != "" && err != nil || width < 0 || width > maxXMLWidth {
		x.ignore("link_width", p.Width, busID, "the link counts as x16")
		width = 0
	}
	return speed, width
}

func (x *xmlReader) cpu(c xmlCPU) error {
	numa, err := strconv.Atoi(c.NUMA)
	if err == nil {
		err = topo.CheckNUMA(numa)
	}
	if err != nil {
		return c.fail("numaid of a <cpu>: %w", err)
	}
	x.at = ""
	if x.several {
		x.at = fmt.Sprintf("%#x", hostHash(c))
	}
	if key := x.at + "/" + strconv.Itoa(numa); x.nodes[key] {
		return c.fail("it has two <cpu> with numaid %d", numa)
	} else {
		x.nodes[key] = true
	}
	family, _ := strconv.Atoi(c.Family) // absent in skeletons; the table then has a default
	model, _ := strconv.Atoi(c.Model)
	cpus, _ := cpuset.Parse(c.Affinity) // the kernel uses the same form; no path depends on the list
	x.host.CPUs = append(x.host.CPUs, topo.CPU{
		Host: x.at, NUMA: numa, CPUs: cpus.String(), Arch: c.Arch, Vendor: c.Vendor, Family: family, Model: model,
		Socket: bandwidths.Socket(c.Arch, c.Vendor, family, model),
	})
	for _, p := range c.PCI {
		if err := x.pci(p, numa, ""); err != nil {
			return err
		}
	}
	if len(c.NICs) == 0 {
		return nil
	}
	// A <nic> directly below a <cpu> has no PCI device that NCCL could find. NCCL attaches such
	// NICs to the first <cpu> that has a <nic> (ncclTopoAddCpu).
	first, known := x.loose[x.at]
	if !known {
		if x.loose == nil {
			x.loose = map[string]int{}
		}
		first, x.loose[x.at] = numa, numa
	}
	if err := x.nics(c.NICs, topo.NIC{Host: x.at, NUMA: first, Place: topo.Place{Link: bandwidths.Local}}); err != nil {
		return c.fail("%w", err)
	}
	return nil
}

func (x *xmlReader) pci(p xmlPCI, numa int, above string) error {
	busID, err := topo.ParseBusID(p.BusID)
	if err != nil {
		return p.fail("busid of a <pci>: %w", err)
	}
	if key := x.at + "/" + busID; x.addresses[key] {
		return p.fail("it has two <pci> with busid %s", busID)
	} else {
		x.addresses[key] = true
	}
	speed, width := x.link(p, busID)
	place := topo.Place{Switch: above, Link: bandwidths.PCIe(speed, width), LinkSpeed: speed, LinkWidth: width}
	identity := topo.PCIIdentity{
		Class: p.Class, Vendor: p.Vendor, Device: p.Device,
		SubsystemVendor: p.SubsystemVendor, SubsystemDevice: p.SubsystemDevice,
	}
	switch {
	case len(p.GPUs) > 0 || len(p.NICs) == 0 && len(p.PCI) == 0 && pci.Graphics(p.Class, p.Vendor):
		if err := x.gpu(p, topo.GPU{Host: x.at, BusID: busID, Vendor: pci.MakerOf(p.Vendor), Minor: -1, NUMA: numa,
			Place: place, Device: identity}); err != nil {
			return p.fail("%w", err)
		}
		return nil
	case len(p.NICs) > 0:
		if err := x.nics(p.NICs, networkOf(p, topo.NIC{Host: x.at, BusID: busID, NUMA: numa, Place: place,
			Device: identity})); err != nil {
			return p.fail("%w", err)
		}
		return nil
	case strings.HasPrefix(p.Class, pci.ClassNetwork):
		nic := networkOf(p, topo.NIC{Host: x.at, Name: "nic@" + busID, BusID: busID, NUMA: numa, Place: place,
			Device: identity})
		if err := x.addNIC(nic); err != nil {
			return p.fail("%w", err)
		}
		return nil
	case strings.HasPrefix(p.Class, pci.ClassNVSwitch): // the GPUs list the links to the NVSwitch
		return nil
	case p.Class == "" && len(p.PCI) == 0:
		x.classless++
		return nil
	}
	s := topo.Switch{Host: x.at, BusID: busID, NUMA: numa, Place: place, Device: identity}
	for _, peer := range p.Peers {
		target, err := topo.ParseBusID(peer.Target)
		if err != nil {
			return p.fail("target of a <pcilink> of switch %s: %w", busID, err)
		}
		s.Peers = append(s.Peers, target)
	}
	x.host.Switches = append(x.host.Switches, s)
	for _, below := range p.PCI {
		if err := x.pci(below, numa, busID); err != nil {
			return err
		}
	}
	return nil
}

// networkOf sets the protocol of a NIC from the identity of the PCI function.
func networkOf(p xmlPCI, nic topo.NIC) topo.NIC {
	switch {
	case p.Vendor == pci.VendorAmazon && strings.HasPrefix(p.Device, "0xefa"):
		nic.Protocol = "EFA"
	case p.Vendor == pci.VendorAmazon && strings.HasPrefix(p.Device, "0xec2"), // ENA
		p.Vendor == pci.VendorVirtio:
		nic.Ethernet = true
	case p.Vendor == pci.VendorAlibaba && p.Device == "0x107f":
		nic.Protocol = "eRDMA"
	case strings.HasPrefix(p.Class, "0x0207"):
		nic.Protocol = "InfiniBand"
	}
	return nic
}

func (x *xmlReader) gpu(p xmlPCI, gpu topo.GPU) error {
	if len(p.GPUs) == 0 {
		if v := p.Vendor; v != "" && v != pci.VendorNVIDIA && v != pci.VendorAMD && v != pci.VendorHygon {
			x.host.Note("graphics device %s of vendor %s is ignored: its maker is not NVIDIA, AMD or Hygon", gpu.BusID, v)
			return nil
		}
		x.unnumber(gpu.Host)
		return x.addGPU(gpu)
	}
	if len(p.GPUs) > 1 {
		x.host.Note("GPU %s has %d partitions and counts as one GPU", gpu.BusID, len(p.GPUs))
	}
	first := p.GPUs[0]
	var err error
	switch gpu.Index, err = strconv.Atoi(first.Dev); {
	case err == nil && gpu.Index > topo.MaxIndex, errors.Is(err, strconv.ErrRange):
		return fmt.Errorf("dev of GPU %s: %w", gpu.BusID, topo.CheckIndex(gpu.Index))
	case err != nil || gpu.Index < 0:
		gpu.Index = 0
		x.unnumber(gpu.Host)
	}
	if gpu.GDR, err = flag(first.GDR); err != nil {
		return fmt.Errorf("gdr of GPU %s: %w", gpu.BusID, err)
	}
	links := first.NVLinks
	var bandwidth float64
	if first.GCN != "" || len(first.XGMI) > 0 {
		if !ofRCCL(gpu) { // only RCCL writes gcn and <xgmi>
			gpu.Vendor = "AMD"
		}
		gpu.GCN, links, bandwidth = first.GCN, first.XGMI, bandwidths.XGMI(first.GCN)
	} else {
		gpu.Capability, _ = strconv.Atoi(first.SM) // absent: the table has a default
		bandwidth = bandwidths.NVLink(gpu.Capability)
	}
	if err := addC2C(&gpu, first.C2C); err != nil {
		return err
	}
	if err := addLinks(&gpu, links, bandwidth); err != nil {
		return err
	}
	return x.addGPU(gpu)
}

func (x *xmlReader) addGPU(gpu topo.GPU) (err error) {
	gpu.Order, err = x.place()
	x.host.GPUs = append(x.host.GPUs, gpu)
	return err
}

// place returns the position of the next device in the file.
func (x *xmlReader) place() (int, error) {
	n := len(x.host.GPUs) + len(x.host.NICs)
	if n == maxXMLDevices {
		return n, fmt.Errorf("it has more than %d GPUs and NICs", maxXMLDevices)
	}
	return n, nil
}

func (x *xmlReader) unnumber(host string) {
	if x.unnumbered == nil {
		x.unnumbered = map[string]bool{}
	}
	x.unnumbered[host] = true
}

// flag parses "1" or "0"; nil if empty.
func flag(text string) (*bool, error) {
	if text == "" {
		return nil, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return nil, err
	}
	ok := n != 0
	return &ok, nil
}

// addC2C adds the chip-to-chip link. The unit of bw is MB/s.
func addC2C(gpu *topo.GPU, links []xmlLink) error {
	for _, l := range links {
		count, errCount := strconv.Atoi(l.Count)
		mbps, errRate := strconv.Atoi(l.MBps)
		if errCount != nil || errRate != nil || count < 1 || count > 1000 || mbps < 1 ||
			gpu.C2C*1000+float64(count)*float64(mbps) > 1e9 {
			return fmt.Errorf("GPU %s has a C2C link with count %q and bandwidth %q", gpu.BusID, l.Count, l.MBps)
		}
		gpu.C2C += float64(count) * float64(mbps) / 1000
	}
	return nil
}

// addLinks adds NVLinks. Links to NVSwitches count as links to a single NVSwitch.
func addLinks(gpu *topo.GPU, links []xmlLink, bandwidth float64) error {
	for _, l := range links {
		count, err := strconv.Atoi(l.Count)
		if err != nil || count < 1 || count > 1000 {
			return fmt.Errorf("GPU %s has an NVLink with count %q", gpu.BusID, l.Count)
		}
		var peer string
		switch {
		case strings.HasPrefix(l.Class, pci.ClassNVLinkCPU): // the bridge class that POWER9 has
			gpu.NVLinkCPU += float64(count) * bandwidth
			continue
		case pci.Graphics(l.Class, ""):
			if peer, err = topo.ParseBusID(l.Target); err != nil {
				return fmt.Errorf("target of an NVLink of GPU %s: %w", gpu.BusID, err)
			}
		}
		i := slices.IndexFunc(gpu.NVLinks, func(known topo.NVLink) bool { return known.Peer == peer })
		if i < 0 {
			i = len(gpu.NVLinks)
			gpu.NVLinks = append(gpu.NVLinks, topo.NVLink{Peer: peer})
		}
		if gpu.NVLinks[i].Count += count; gpu.NVLinks[i].Count > 1000 {
			return fmt.Errorf("GPU %s has more than 1000 NVLinks to one peer", gpu.BusID)
		}
		gpu.NVLinks[i].Bandwidth += float64(count) * bandwidth
	}
	return nil
}

// nics adds a NIC for every <net> of a PCI function.
func (x *xmlReader) nics(nics []xmlNIC, at topo.NIC) error {
	for _, n := range nics {
		for i, net := range n.Nets {
			if net.Net == "0" {
				continue
			}
			nic := at
			nic.Name, nic.Bond = net.Name, pci.BondName.MatchString(net.Name)
			if nic.Name == "" && at.BusID != "" {
				nic.Name = "nic@" + at.BusID
				if i > 0 {
					nic.Name += fmt.Sprintf("#%d", i)
				}
			}
			if nic.Name == "" {
				return fmt.Errorf("a <net> under the <cpu> with numaid %d has no name", at.NUMA)
			}
			p := topo.Port{}
			p.Number, _ = strconv.Atoi(net.Port) // absent in old files
			mbps, err := strconv.Atoi(net.Speed) // some NICs write -1, for unknown
			switch {
			case net.Speed != "" && err != nil || mbps >= 1e9:
				x.ignore("speed", net.Speed, nic.Name, "the port counts as 10 Gbit/s")
			case mbps > 0:
				p.RateGbps = float64(mbps) / 1000
			}
			nic.Ports = []topo.Port{p}
			if nic.GDR, err = flag(net.GDR); err != nil {
				return fmt.Errorf("gdr of <net> %s: %w", nic.Name, err)
			}
			// NCCL writes gdr for a <net> with dev. NCCL completes a <net> without dev from the
			// host.
			if net.GDR == "" && net.Dev != "" {
				nic.GDR = new(bool)
			}
			if net.GUID != nil {
				nic.GUID = *net.GUID
				// NCCL's socket transport has GUID 0.
				guid, err := strconv.ParseUint(strings.TrimPrefix(nic.GUID, "0x"), 16, 64)
				nic.Ethernet = nic.Ethernet || err == nil && guid == 0
			}
			if err := x.addNIC(nic); err != nil {
				return err
			}
		}
	}
	return nil
}

func (x *xmlReader) addNIC(nic topo.NIC) (err error) {
	key := nic.Host + "/" + nic.Name
	if x.names[key] {
		// NCCL repeats a <net> without a PCI device below every <cpu>.
		if nic.BusID == "" && slices.ContainsFunc(x.host.NICs,
			func(n topo.NIC) bool { return n.Host == nic.Host && n.Name == nic.Name && n.BusID == "" }) {
			return nil
		}
		return &DuplicateNetError{nic.Name}
	}
	x.names[key] = true
	nic.Order, err = x.place()
	x.host.NICs = append(x.host.NICs, nic)
	return err
}

// joinDataDirect merges two <net> that NCCL lists for the same port: X at the NIC's PCI function,
// and X_dma at the Data Direct function. With NCCL_IB_DATA_DIRECT=2 a file lists only X_dma.
func joinDataDirect(h *topo.Host) {
	type name struct{ host, nic string }
	places := map[name]int{}
	for i, n := range h.NICs {
		places[name{n.Host, n.Name}] = i
	}
	joined := map[int]bool{}
	for i, n := range h.NICs {
		own, ok := strings.CutSuffix(n.Name, DataDirectSuffix)
		if !ok || own == "" || n.BusID == "" || n.Ethernet {
			continue
		}
		at, both := places[name{n.Host, own}]
		if !both {
			h.NICs[i].Name, h.NICs[i].DataDirect = own, n.BusID
			continue
		}
		first := &h.NICs[at]
		if first.BusID == "" || first.GUID == "" || first.GUID != n.GUID || first.BusID == n.BusID || first.DataDirect != "" {
			continue
		}
		first.Own = &topo.Function{NUMA: first.NUMA, Place: first.Place}
		first.DataDirect, first.NUMA, first.Place, first.GDR = n.BusID, n.NUMA, n.Place, n.GDR
		joined[i] = true
	}
	kept := h.NICs[:0]
	for i, n := range h.NICs {
		if !joined[i] {
			kept = append(kept, n)
		}
	}
	h.NICs = kept
}

// Limits of the PCIe link of a management bridge. Files of hwloc have no number of lanes.
const (
	bridgeLanes = 2
	bridgeLink  = 6.0 // GB/s, two lanes of PCIe 5.0
)

// SuspectBridges notes NICs of a file that may be management bridges of NVSwitches. A file has no
// vital product data, so SuspectBridges decides by the link.
func SuspectBridges(h *topo.Host) {
	for _, n := range h.NICs {
		known := n.Device.Vendor == pci.VendorMellanox && n.Device.Device == pci.DeviceConnectX7
		other := n.Device.Vendor != "" && n.Device.Device != "" && !known
		tiny := n.LinkWidth >= 1 && n.LinkWidth <= bridgeLanes || n.LinkWidth == 0 && known && n.Link > 0 &&
			n.Link <= bridgeLink
		if !tiny || other || n.Ethernet || n.Software || n.BusID == "" {
			continue
		}
		h.Note("%s may be a management bridge of NVSwitches, as on boards with B200, instead of a NIC: its PCIe link "+
			"carries %.3g GB/s, and the file has no vital product data (to exclude it: plan.exclude.nics)",
			nicOnHost(n), n.Link)
	}
}

// finish numbers the GPUs of every host, and sorts devices.
func (x *xmlReader) finish() {
	h := x.host
	if x.classless > 0 {
		h.Note("%d PCI devices of unknown type, without a class, a <gpu> or a <nic>, are ignored",
			x.classless)
	}
	for _, u := range x.unusable {
		others := ""
		if u.count > 1 {
			others = fmt.Sprintf(", and of %d more", u.count-1)
		}
		h.Note("%s %s of %s%s is invalid: %s", u.attribute, textfile.QuoteStart([]byte(u.value)), u.of, others, u.effect)
	}
	order := map[string]int{}
	for i, name := range h.Hosts() {
		order[name] = i
	}
	if x.several {
		h.Note("the file describes %d hosts; a plan is for one of them (peerlane plan --host)", len(order))
	}
	type numbered struct {
		host  string
		index int
	}
	seen := map[numbered]bool{}
	for _, g := range h.GPUs {
		if seen[numbered{g.Host, g.Index}] {
			x.unnumber(g.Host)
		}
		seen[numbered{g.Host, g.Index}] = true
	}
	slices.SortFunc(h.GPUs, func(a, b topo.GPU) int {
		if a.Host != b.Host {
			return cmp.Compare(order[a.Host], order[b.Host])
		}
		if x.unnumbered[a.Host] {
			return topo.CompareBusID(a.BusID, b.BusID)
		}
		return cmp.Compare(a.Index, b.Index)
	})
	next := map[string]int{}
	for i := range h.GPUs {
		g := &h.GPUs[i]
		if x.unnumbered[g.Host] {
			g.Index = next[g.Host]
			next[g.Host]++
		}
	}
	joinDataDirect(h)
	SuspectBridges(h)
	slices.SortFunc(h.NICs, func(a, b topo.NIC) int {
		return cmp.Or(cmp.Compare(order[a.Host], order[b.Host]), topo.CompareNatural(a.Name, b.Name))
	})
	h.Judge()
}
