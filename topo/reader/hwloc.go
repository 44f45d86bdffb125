package reader

import (
	"cmp"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
	"github.com/peerlane/peerlane/topo/internal/cpuset"
	"github.com/peerlane/peerlane/topo/internal/lazyregexp"
	"github.com/peerlane/peerlane/topo/internal/textfile"
	"github.com/peerlane/peerlane/topo/ncclxml"
)

// SourceHwlocXML is the Source.Kind of a host that was read from a topology of
// hwloc.
const SourceHwlocXML = "hwloc-xml"

const (
	// maxHwlocDepth bounds the nesting of elements. Real files have about 20 levels, and a tree of
	// PCI buses has at most 256.
	maxHwlocDepth = 300
	// maxHwlocNumber bounds the number of a NUMA node, as the kernel does.
	maxHwlocNumber = 1024
	// maxHwlocNodes bounds the count of NUMA nodes: the number of links is the square of the
	// count.
	maxHwlocNodes = 256
	// maxHwlocLinked bounds a matrix of NVLinks.
	maxHwlocLinked = 512
	// maxHwlocDevices bounds the count of GPUs and NICs: the number of paths is the square of the
	// count.
	maxHwlocDevices = 512
)

// hwlocXML reads a topology of hwloc 2, the output of `lstopo --of xml`. Errors contain name.
//
// hwlocXML finds GPUs and NICs by PCI class and vendor, and RDMA devices by objects of operating
// system type 3 (OpenFabrics). A network interface without RDMA device is Ethernet. The node of a
// device is unknown if hwloc attaches the device to several NUMA nodes, for example to the whole
// machine.
//
// A link has a bandwidth if the file has pci_link_speed. hwloc records the current speed of a
// link, so the host has a note.
func hwlocXML(r io.Reader, name string) (*topo.Host, error) {
	h, err := readHwlocXML(r)
	if err == nil {
		err = h.CheckText()
	}
	if err != nil {
		return nil, &textfile.FileError{Form: "hwloc topology", Name: name, Err: err}
	}
	h.Source = topo.Source{Kind: SourceHwlocXML, File: name}
	return h, nil
}

// hwlocPCI is a PCI function: an object of type PCIDev, or a Bridge of type 1-1.
type hwlocPCI struct {
	busID          string
	class          string // "0302"
	vendor, device string // "10de", "1db5"
	identity       topo.PCIIdentity
	bridge         bool
	linkSpeed      float64   // from hwloc, GB/s; 0 if unknown
	up             *hwlocPCI // the next function towards the CPU
	hostBridge     string
	nodes          cpuset.Set // of the nearest object above with a nodeset
	name           string
	systems        []*hwlocOS
}

// hwlocOS is an OSDev object: a device under the name of the operating system.
type hwlocOS struct {
	name  string
	kind  string // osdev_type: 0 block, 1 GPU, 2 network, 3 OpenFabrics, 5 coprocessor
	pci   *hwlocPCI
	infos map[string]string // infos of a GPU or RDMA device; nil for other devices
}

// hwlocFrame is an open element.
type hwlocFrame struct {
	object     string // type of an <object>, "" for other elements
	pci        *hwlocPCI
	os         *hwlocOS
	hostBridge string
	nodes      cpuset.Set
}

type hwlocNode struct {
	numa int
	cpus string
}

type hwlocReader struct {
	decoder      *xml.Decoder
	line, column int // start of the current token
	stack        []hwlocFrame
	nodes        []hwlocNode
	functions    []*hwlocPCI
	addresses    map[string]bool
	software     []*hwlocOS // RDMA devices without a PCI function
	objects      map[string]*hwlocPCI
	processor    map[string]string
	distances    *hwlocDistances
	links        []*hwlocDistances // matrices of NVLinks
	text         *strings.Builder  // text of the open element, nil if unused
	host         *topo.Host
	switches     map[string]bool
	names        map[string]string // address by name of a NIC
}

// hwlocDistances is a matrix of distances or bandwidths between objects.
type hwlocDistances struct {
	line, column  int
	count         int
	ids           []string // gp_index
	values        []uint64
	indexes, cell strings.Builder
}

func readHwlocXML(r io.Reader) (*topo.Host, error) {
	limited := &io.LimitedReader{R: r, N: textfile.MaxInput + 1}
	x := &hwlocReader{
		decoder: xml.NewDecoder(limited), host: &topo.Host{CPUs: []topo.CPU{}, Switches: []topo.Switch{}, GPUs: []topo.GPU{},
			NICs: []topo.NIC{}},
		addresses: map[string]bool{}, objects: map[string]*hwlocPCI{}, processor: map[string]string{},
		switches: map[string]bool{}, names: map[string]string{},
	}
	if err := x.read(); err != nil {
		if limited.N <= 0 {
			err = textfile.ErrTooLarge
		}
		return nil, err
	}
	if limited.N <= 0 {
		return nil, textfile.ErrTooLarge
	}
	if len(x.functions) == 0 {
		return nil, errNoPCI
	}
	if err := x.finish(); err != nil {
		return nil, err
	}
	return x.host, nil
}

func (x *hwlocReader) fail(format string, args ...any) error {
	return &textfile.PlaceError{Line: x.line, Column: x.column, Err: fmt.Errorf(format, args...)}
}

func (x *hwlocReader) read() error {
	rooted := false
	for {
		x.line, x.column = x.decoder.InputPos()
		token, err := x.decoder.Token()
		if errors.Is(err, io.EOF) && rooted {
			return nil
		}
		if err != nil {
			var syntax *xml.SyntaxError
			if errors.As(err, &syntax) { // a SyntaxError has no column; PlaceError has
				x.line, x.column = x.decoder.InputPos()
				err = errors.New(syntax.Msg)
			}
			return x.fail("%w", err)
		}
		switch t := token.(type) {
		case xml.StartElement:
			switch {
			case len(x.stack) == 0 && rooted:
				err = x.fail("a second root element <%s>", t.Name.Local)
			case len(x.stack) == 0:
				rooted = true
				err = x.root(t)
			case len(x.stack) == maxHwlocDepth:
				err = x.fail("elements are nested more than %d deep, the maximum for a topology", maxHwlocDepth)
			default:
				err = x.start(t)
			}
		case xml.EndElement:
			err = x.end(t.Name.Local)
		case xml.CharData:
			if x.text != nil {
				x.text.Write(t)
			}
		}
		if err != nil {
			return err
		}
	}
}

// attribute returns the value of an attribute, "" if missing.
func attribute(t xml.StartElement, name string) string {
	for _, a := range t.Attr {
		if a.Name.Local == name {
			return a.Value
		}
	}
	return ""
}

func (x *hwlocReader) root(t xml.StartElement) error {
	if t.Name.Local != "topology" {
		return x.fail("its root is <%s>; a topology of hwloc begins with <topology>", t.Name.Local)
	}
	if version := attribute(t, "version"); !strings.HasPrefix(version, "2.") {
		return x.fail("unsupported version %q; must be 2: hwloc 1 has another format, and hwloc 3 writes version 2 "+
			"with lstopo --of xml --export-xml-flags v2", version)
	}
	x.stack = append(x.stack, hwlocFrame{})
	return nil
}

func (x *hwlocReader) start(t xml.StartElement) error {
	above := x.stack[len(x.stack)-1]
	frame := above
	frame.object = ""
	var err error
	switch t.Name.Local {
	case "object":
		frame, err = x.object(t, above)
	case "info":
		x.info(t, above)
	case "distances2", "distances2hetero":
		x.distances, err = x.startDistances(t)
	case "indexes":
		if x.distances != nil {
			x.text = &x.distances.indexes
			x.text.WriteByte(' ')
		}
	case "u64values":
		if x.distances != nil {
			x.text = &x.distances.cell
			x.text.WriteByte(' ')
		}
	}
	x.stack = append(x.stack, frame)
	return err
}

func (x *hwlocReader) end(element string) error {
	x.stack = x.stack[:len(x.stack)-1]
	x.text = nil
	if x.distances != nil && strings.HasPrefix(element, "distances2") {
		d := x.distances
		x.distances = nil
		x.links = append(x.links, d)
		return d.parse()
	}
	return nil
}

// object reads an <object>. Missing attributes come from the object above.
func (x *hwlocReader) object(t xml.StartElement, above hwlocFrame) (hwlocFrame, error) {
	frame := above
	frame.object, frame.os = attribute(t, "type"), nil
	if set := attribute(t, "nodeset"); set != "" {
		nodes, err := cpuset.Parse(set)
		if err != nil {
			return frame, x.fail("nodeset of a %s: %w", frame.object, err)
		}
		frame.nodes = nodes
	}
	switch frame.object {
	case "NUMANode":
		numa, err := strconv.Atoi(attribute(t, "os_index"))
		if err != nil || numa < 0 || numa >= maxHwlocNumber {
			return frame, x.fail("a NUMANode with os_index %q", attribute(t, "os_index"))
		}
		if slices.ContainsFunc(x.nodes, func(n hwlocNode) bool { return n.numa == numa }) {
			return frame, x.fail("a second NUMANode with os_index %d", numa)
		}
		if len(x.nodes) == maxHwlocNodes {
			return frame, x.fail("it has more than %d NUMA nodes", maxHwlocNodes)
		}
		cpus, err := cpuset.Parse(attribute(t, "cpuset"))
		if err != nil {
			return frame, x.fail("cpuset of NUMANode %d: %w", numa, err)
		}
		x.nodes = append(x.nodes, hwlocNode{numa, cpus.String()})
	case "Bridge":
		if strings.HasPrefix(attribute(t, "bridge_type"), "0") {
			// "0000:[00-1f]": the domain and the buses below the bridge.
			domain, buses, ok := strings.Cut(attribute(t, "bridge_pci"), ":[")
			if first, _, dash := strings.Cut(buses, "-"); ok && dash {
				frame.hostBridge = "pci" + domain + ":" + first
			}
			frame.pci = nil
			return frame, nil
		}
		return x.function(t, frame, true)
	case "PCIDev":
		return x.function(t, frame, false)
	case "OSDev":
		frame.os = &hwlocOS{name: attribute(t, "name"), kind: attribute(t, "osdev_type"), pci: above.pci}
		if above.pci != nil && !above.pci.bridge {
			above.pci.systems = append(above.pci.systems, frame.os)
			x.objects[attribute(t, "gp_index")] = above.pci
		} else if frame.os.kind == "3" {
			x.software = append(x.software, frame.os)
		}
	}
	return frame, nil
}

// pciTypePattern matches "0302 [10de:1db5] [10de:1249] a1": class, IDs of vendor and device, IDs
// of the subsystem, revision.
var pciTypePattern = lazyregexp.New(`^([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\](?: \[([0-9a-f]{4}):([0-9a-f]{4})\])?`)

func (x *hwlocReader) function(t xml.StartElement, frame hwlocFrame, bridge bool) (hwlocFrame, error) {
	busID, err := topo.ParseBusID(attribute(t, "pci_busid"))
	if err != nil {
		return frame, x.fail("pci_busid of a %s: %w", frame.object, err)
	}
	if x.addresses[busID] {
		return frame, x.fail("a second object with pci_busid %s", busID)
	}
	x.addresses[busID] = true
	pciType := strings.ToLower(attribute(t, "pci_type"))
	m := pciTypePattern.FindStringSubmatch(pciType)
	if m == nil {
		return frame, x.fail("pci_type of %s is %q, not of the form 0302 [10de:1db5] [10de:1249] a1", busID, pciType)
	}
	f := &hwlocPCI{busID: busID, class: m[1], vendor: m[2], device: m[3], bridge: bridge, up: frame.pci,
		hostBridge: frame.hostBridge, nodes: frame.nodes}
	// hwloc omits the last byte of the class. The last byte is 0 for nearly every device.
	f.identity = topo.PCIIdentity{Class: "0x" + m[1] + "00", Vendor: "0x" + m[2], Device: "0x" + m[3]}
	if m[4] != "" {
		f.identity.SubsystemVendor, f.identity.SubsystemDevice = "0x"+m[4], "0x"+m[5]
	}
	if speed := attribute(t, "pci_link_speed"); speed != "" {
		f.linkSpeed, err = strconv.ParseFloat(speed, 64)
		if err != nil || !(f.linkSpeed >= 0) || f.linkSpeed > 1e5 {
			return frame, x.fail("pci_link_speed of %s is %q instead of a number of GB/s", busID, speed)
		}
	}
	x.functions = append(x.functions, f)
	x.objects[attribute(t, "gp_index")] = f
	frame.pci = f
	return frame, nil
}

// info reads <info name= value=>, a property of the enclosing object.
func (x *hwlocReader) info(t xml.StartElement, of hwlocFrame) {
	name, value := attribute(t, "name"), attribute(t, "value")
	switch {
	case of.os != nil:
		if of.os.kind == "1" || of.os.kind == "3" {
			if of.os.infos == nil {
				of.os.infos = map[string]string{}
			}
			of.os.infos[name] = value
		}
	case of.object == "PCIDev" && name == "PCIDevice":
		of.pci.name = value
	case of.object == "Machine" && name == "Architecture", of.object == "Package" && strings.HasPrefix(name, "CPU"),
		of.object == "Machine" && strings.HasPrefix(name, "CPU"):
		if x.processor[name] == "" { // a host has a single kind of processor
			x.processor[name] = value
		}
	}
}

// startDistances reads the attributes of a matrix; nil for a matrix without NVLinks.
func (x *hwlocReader) startDistances(t xml.StartElement) (*hwlocDistances, error) {
	if attribute(t, "name") != "NVLinkBandwidth" || attribute(t, "indexing") != "gp" {
		return nil, nil
	}
	count, err := strconv.Atoi(attribute(t, "nbobjs"))
	if err != nil || count < 1 || count > maxHwlocLinked {
		return nil, x.fail("a matrix of NVLinks between %q objects", attribute(t, "nbobjs"))
	}
	return &hwlocDistances{line: x.line, column: x.column, count: count}, nil
}

func (d *hwlocDistances) parse() error {
	fail := func(format string, args ...any) error {
		return &textfile.PlaceError{Line: d.line, Column: d.column, Err: fmt.Errorf(format, args...)}
	}
	for id := range strings.FieldsSeq(d.indexes.String()) {
		if i := strings.LastIndexByte(id, ':'); i >= 0 { // "OSDev:49" in a matrix of several types
			id = id[i+1:]
		}
		d.ids = append(d.ids, id)
	}
	for value := range strings.FieldsSeq(d.cell.String()) {
		v, err := strconv.ParseUint(value, 10, 64)
		if err != nil {
			return fail("the matrix of NVLinks has the value %q", value)
		}
		d.values = append(d.values, v)
	}
	if len(d.ids) != d.count || len(d.values) != d.count*d.count {
		return fail("the matrix of NVLinks has %d objects and %d values, but declares %d objects", len(d.ids),
			len(d.values), d.count)
	}
	return nil
}

// hwlocBandwidth converts the link speed of hwloc to the bandwidth that NCCL assumes
// (bandwidths.PCIe). hwloc multiplies lanes by the signalling rate of a lane after encoding
// (hwloc/topology-pci.c). 0 means unknown.
func hwlocBandwidth(speed float64) float64 {
	// Lanes of PCIe 1 and 2 carry 0.25 and 0.5 GB/s. Lanes of PCIe 3 and later carry multiples of
	// 8 * 128/130 / 8 GB/s, and no sum of such lanes is a multiple of 0.25 within the six digits
	// of a file.
	if quarter := speed / 0.25; math.Abs(quarter-math.Round(quarter)) < 1e-4 {
		return math.Round(speed*0.6/0.8*1e4) / 1e4
	}
	// Six digits are rounded off: 15.753846 is 16 lanes of 8 GT/s, 12 GB/s.
	return math.Round(speed*0.75*130/128*1e4) / 1e4
}

// finish makes the host.
func (x *hwlocReader) finish() error {
	x.cpus()
	indices := map[string]int{} // of GPUs, by address
	for _, f := range x.functions {
		switch {
		case f.bridge:
		case strings.HasPrefix(f.class, "03"):
			if err := x.gpu(f, indices); err != nil {
				return err
			}
		case strings.HasPrefix(f.class, "02"):
			if err := x.nic(f); err != nil {
				return err
			}
		}
		if len(x.host.GPUs)+len(x.host.NICs) > maxHwlocDevices {
			return &countError{items: "GPUs and NICs", max: maxHwlocDevices, countless: true}
		}
	}
	for _, o := range x.software { // rxe and siw: the file does not have the location
		nic := topo.NIC{Name: o.name, Software: true, GUID: o.infos["NodeGUID"], NUMA: x.host.CPUs[0].NUMA,
			Place: topo.Place{Link: bandwidths.Local}, Ports: hwlocPorts(o.infos)}
		if err := x.addNIC(nic); err != nil {
			return err
		}
	}
	x.number(indices)
	x.nvlinks()
	x.notes()
	h := x.host
	ncclxml.SuspectBridges(h)
	h.Judge()
	slices.SortFunc(h.Switches, func(a, b topo.Switch) int { return topo.CompareBusID(a.BusID, b.BusID) })
	slices.SortFunc(h.NICs, func(a, b topo.NIC) int { return topo.CompareNatural(a.Name, b.Name) })
	return nil
}

func (x *hwlocReader) cpus() {
	slices.SortFunc(x.nodes, func(a, b hwlocNode) int { return cmp.Compare(a.numa, b.numa) })
	if len(x.nodes) == 0 {
		x.nodes = []hwlocNode{{}}
	}
	// The bandwidth between nodes is unknown if the file does not name the processor.
	c := topo.CPU{Arch: x.processor["Architecture"], Vendor: x.processor["CPUVendor"]}
	if c.Arch != "" || c.Vendor != "" {
		// missing on architectures other than x86; the table needs the family only for x86
		c.Family, _ = strconv.Atoi(x.processor["CPUFamilyNumber"])
		c.Model, _ = strconv.Atoi(x.processor["CPUModelNumber"])
		switch {
		case strings.HasPrefix(c.Arch, "ppc64"):
			c.Arch = "ppc64"
		case c.Arch == "aarch64":
			c.Arch = "arm64"
		}
		c.Socket = bandwidths.Socket(c.Arch, c.Vendor, c.Family, c.Model)
	}
	for _, n := range x.nodes {
		c.NUMA, c.CPUs = n.numa, n.cpus
		x.host.CPUs = append(x.host.CPUs, c)
	}
}

// numa returns the NUMA node of a function: the node of the nearest object above with a nodeset.
// If the nodeset has several nodes, but not the whole machine, numa returns the first node, so
// that functions at a socket with several nodes stay together. For the whole machine the node is
// unknown, except on a machine with a single node. For an unknown node, numa returns -1, and adds a
// CPU of node -1 to the host.
func (x *hwlocReader) numa(f *hwlocPCI) int {
	nodes := make([]int, 0, 8)
	for _, n := range x.nodes {
		if f.nodes.Has(n.numa) {
			nodes = append(nodes, n.numa)
		}
	}
	switch {
	case len(x.nodes) == 1:
		return x.nodes[0].numa
	case len(nodes) > 0 && len(nodes) < len(x.nodes):
		return nodes[0]
	}
	if !slices.ContainsFunc(x.host.CPUs, func(c topo.CPU) bool { return c.NUMA == -1 }) {
		unknown := x.host.CPUs[0]
		unknown.NUMA, unknown.CPUs = -1, ""
		x.host.CPUs = append(x.host.CPUs, unknown)
		x.host.Note("hwloc states no NUMA node for %s and perhaps others (their locality is the whole machine); together "+
			"they count as one node, far from every other", f.busID)
	}
	return -1
}

// place returns the place of a function, and adds the switches above it to the host. As in sysfs,
// every second bridge upwards is a switch (see placeIn).
func (x *hwlocReader) place(f *hwlocPCI) topo.Place {
	p := topo.Place{HostBridge: f.hostBridge, Link: hwlocBandwidth(f.linkSpeed)}
	port := f.up
	if port == nil {
		return p
	}
	if at := hwlocBandwidth(port.linkSpeed); p.Link == 0 || at > 0 && at < p.Link {
		p.Link = at
	}
	if port.up == nil {
		return p
	}
	s := port.up
	p.Switch = s.busID
	if !x.switches[s.busID] {
		x.switches[s.busID] = true
		place := x.place(s)
		x.host.Switches = append(x.host.Switches, topo.Switch{BusID: s.busID, NUMA: x.numa(s), Place: place,
			Device: s.identity})
	}
	return p
}

var nvmlName = lazyregexp.New(`^nvml([0-9]{1,6})$`)

func (x *hwlocReader) gpu(f *hwlocPCI, indices map[string]int) error {
	maker, known := map[string]string{"10de": "", "1002": "AMD", "1d94": "Hygon"}[f.vendor]
	if !known {
		x.host.Note("graphics device %s of vendor 0x%s is ignored: its maker is not NVIDIA, AMD or Hygon", f.busID,
			f.vendor)
		return nil
	}
	gpu := topo.GPU{Vendor: maker, BusID: f.busID, Minor: -1, Name: f.name, NUMA: x.numa(f), Place: x.place(f),
		Device: f.identity}
	for _, o := range f.systems {
		if m := nvmlName.FindStringSubmatch(o.name); m != nil {
			n, err := strconv.Atoi(m[1])
			if err == nil {
				err = topo.CheckIndex(n)
			}
			if err != nil {
				return fmt.Errorf("%s of GPU %s: %w", o.name, f.busID, err)
			}
			indices[f.busID] = n
			gpu.UUID = o.infos["NVIDIAUUID"]
			gpu.Name = cmp.Or(o.infos["GPUModel"], gpu.Name)
		}
	}
	x.host.GPUs = append(x.host.GPUs, gpu)
	return nil
}

// number numbers GPUs as NVML does if the file has a number for every GPU, and by address
// otherwise.
func (x *hwlocReader) number(indices map[string]int) {
	h := x.host
	numbers := map[int]bool{}
	for _, n := range indices {
		numbers[n] = true
	}
	known := len(numbers) == len(h.GPUs) && len(indices) == len(h.GPUs)
	slices.SortFunc(h.GPUs, func(a, b topo.GPU) int {
		if known {
			return cmp.Compare(indices[a.BusID], indices[b.BusID])
		}
		return topo.CompareBusID(a.BusID, b.BusID)
	})
	for i := range h.GPUs {
		h.GPUs[i].Index = i
		if known {
			h.GPUs[i].Index = indices[h.GPUs[i].BusID]
		}
	}
}

// nic adds the interfaces of a function: the RDMA devices, or the function if no RDMA device
// exists.
func (x *hwlocReader) nic(f *hwlocPCI) error {
	at := topo.NIC{BusID: f.busID, NUMA: x.numa(f), Place: x.place(f), Device: f.identity}
	network := ""
	rdma := 0
	for _, o := range f.systems {
		switch o.kind {
		case "2":
			network = cmp.Or(network, o.name)
		case "3":
			rdma++
			nic := at
			nic.Name, nic.GUID, nic.SystemGUID = o.name, o.infos["NodeGUID"], o.infos["SysImageGUID"]
			nic.Ports, nic.Protocol = hwlocPorts(o.infos), hwlocProtocol(f)
			if err := x.addNIC(nic); err != nil {
				return err
			}
		}
	}
	if rdma > 0 {
		return nil
	}
	at.Name = cmp.Or(network, "nic@"+f.busID)
	at.Ethernet = f.class != "0207" // InfiniBand, possibly without a loaded driver
	return x.addNIC(at)
}

func (x *hwlocReader) addNIC(nic topo.NIC) error {
	where := cmp.Or(nic.BusID, "no PCI address")
	switch other, taken := x.names[nic.Name]; {
	case nic.Name == "":
		return &nameError{"", where, ""}
	case taken:
		return &nameError{nic.Name, other, where}
	case len(x.host.GPUs)+len(x.host.NICs) >= maxHwlocDevices:
		return &countError{items: "GPUs and NICs", max: maxHwlocDevices, countless: true}
	}
	x.names[nic.Name] = where
	x.host.NICs = append(x.host.NICs, nic)
	return nil
}

// hwlocProtocol returns the protocol of devices whose maker has a single protocol.
func hwlocProtocol(f *hwlocPCI) string {
	switch {
	case f.vendor == "1d0f" && strings.HasPrefix(f.device, "efa"):
		return "EFA"
	case f.vendor == "1ded":
		return "eRDMA"
	}
	return ""
}

// hwlocPorts reads "Port1State" and so on, the numbers of the kernel's
// /sys/class/infiniband/NIC/ports/N/state.
func hwlocPorts(infos map[string]string) []topo.Port {
	states := map[string]string{"0": "NOP", "1": "DOWN", "2": "INIT", "3": "ARMED", "4": "ACTIVE", "5": "ACTIVE_DEFER"}
	var ports []topo.Port
	for n := 1; n <= 255; n++ {
		state, known := infos["Port"+strconv.Itoa(n)+"State"]
		if !known {
			break
		}
		ports = append(ports, topo.Port{Number: n, State: cmp.Or(states[state], state)})
	}
	return ports
}

// nvlinks reads the matrix that hwloc builds with NVML, in MB/s per direction. hwloc assumes 20
// GB/s for a link of the first version and 25 GB/s for later versions. NCCL's assumption depends
// on the GPU, and the file does not name the GPU. Only a single model of GPU has links of the first
// version.
func (x *hwlocReader) nvlinks() {
	h := x.host
	gpus := map[string]int{}
	for i, g := range h.GPUs {
		gpus[g.BusID] = i
	}
	for _, d := range x.links {
		for i, from := range d.ids {
			if x.objects[from] == nil {
				continue
			}
			g, isGPU := gpus[x.objects[from].busID]
			if !isGPU {
				continue
			}
			for j, to := range d.ids {
				value := d.values[i*d.count+j]
				if i == j || value == 0 || value > 1e9 || x.objects[to] == nil {
					continue
				}
				far := x.objects[to]
				link := topo.NVLink{Peer: far.busID, Count: int(value / 25000)}
				switch _, peer := gpus[far.busID]; {
				case peer:
				case far.vendor == "10de" && far.class == "0680":
					link.Peer = "" // an NVSwitch
				default:
					continue
				}
				if value%25000 != 0 && value%20000 == 0 {
					link.Count = int(value / 20000)
					link.Bandwidth = float64(link.Count) * bandwidths.NVLink(60)
				}
				if link.Count > 0 {
					addNVLink(&h.GPUs[g], link)
				}
			}
		}
	}
}

// addNVLink adds to the links that a GPU has to a peer.
func addNVLink(g *topo.GPU, l topo.NVLink) {
	for i := range g.NVLinks {
		if g.NVLinks[i].Peer == l.Peer {
			g.NVLinks[i].Count += l.Count
			g.NVLinks[i].Bandwidth += l.Bandwidth
			return
		}
	}
	g.NVLinks = append(g.NVLinks, l)
}

func (x *hwlocReader) notes() {
	h := x.host
	known, unknown, bridges := 0, 0, false
	for _, f := range x.functions {
		bridges = bridges || f.bridge || f.hostBridge != ""
	}
	count := func(p topo.Place) {
		if p.Link > 0 {
			known++
		} else {
			unknown++
		}
	}
	for _, g := range h.GPUs {
		count(g.Place)
	}
	for _, n := range h.NICs {
		count(n.Place)
	}
	if !bridges {
		h.Note("the file has no bridges (lstopo can omit them), so it is unknown which devices share a switch")
	}
	if unknown > 0 {
		h.Note("the file has no link speed for %d of %d GPUs and NICs: a path over such a link has a type and no bandwidth",
			unknown, known+unknown)
	}
	if known > 0 {
		h.Note("hwloc writes the current speed of a link, which an idle GPU lowers, and some of its versions " +
			"write at most the speed of PCIe 3.0: bandwidths may be higher than shown")
	}
}
