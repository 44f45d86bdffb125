package ncclxml

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
	"github.com/peerlane/peerlane/topo/internal/pci"
	"github.com/peerlane/peerlane/topo/internal/textfile"
)

// Limits of NCCL's reader (src/graph/xml.h). The reader holds NCCL_TOPO_XML_MAX_NODES elements,
// and needs a free element for the last end tag. A value with the closing quote must fit into
// MAX_STR_LEN.
const (
	maxNCCLElements = 255
	maxNCCLValue    = 253 // bytes
	maxNCCLCPUs     = 1024
)

// Values that NCCL writes in place of unknown values: the far end of an NVLink in a virtual
// machine, and the class of an NVSwitch.
const (
	ncclUnseen        = "fffffff:ffff:ff"
	ncclClassNVSwitch = "0x068000"
	ClassBridge       = "0x060400"
	ncclClass3D       = "0x030200"
	ClassEthernet     = "0x020000"
)

// Write returns the host as a topology file of NCCL 2.30, in the form that NCCL_TOPO_DUMP_FILE
// writes and NCCL_TOPO_FILE reads. For GPUs of AMD and Hygon, the form is version 2, of RCCL.
//
// Write omits unknown values: NCCL reads unknown values from the host. Write also omits NICs that
// NCCL would not list: NICs without an active port, and software RDMA. A comment at the top of the
// file lists omitted NICs, and comments hold Host.Notes.
//
// Write fails for a host without a tree (the text of nvidia-smi), for a host with more elements
// than NCCL reads, and for a name that NCCL cannot read.
func Write(h *topo.Host) ([]byte, error) {
	root, err := documentOf(h)
	if err != nil {
		return nil, fmt.Errorf("write NCCL's XML: %w", err)
	}
	if n := root.count(); n > maxNCCLElements {
		return nil, fmt.Errorf("write NCCL's XML: %w", &SizeError{n})
	}
	return root.text(), nil
}

// SizeError reports a host with more elements than NCCL reads.
type SizeError struct{ Elements int }

func (e *SizeError) Error() string {
	return fmt.Sprintf("it would have %d elements, more than the %d that NCCL reads; peerlane topo -o json has no such "+
		"limit", e.Elements, maxNCCLElements)
}

// UnwritableError is a text that NCCL's XML cannot hold: NCCL knows no entities
// and has room for 253 bytes.
type UnwritableError struct {
	What string // "the name of a NIC"
	Text string
}

func (e *UnwritableError) Error() string {
	return fmt.Sprintf("%s is %s, which NCCL cannot read: it does not support entities, or values of more than %d bytes",
		e.What, textfile.QuoteStart([]byte(e.Text)), maxNCCLValue)
}

// element is an element of XML.
type element struct {
	name       string
	attributes []string // name, value, name, value
	within     []*element
	comments   []string // comments before the element
	device     bool     // a GPU or NIC
	place      int      // order of a device in the input file
}

func (e *element) add(name string, attributes ...string) *element {
	inner := &element{name: name, attributes: attributes}
	e.within = append(e.within, inner)
	return inner
}

// set adds an attribute if value is not empty.
func (e *element) set(name, value string) {
	if value != "" {
		e.attributes = append(e.attributes, name, value)
	}
}

func (e *element) value(attribute string) string {
	for i := 0; i < len(e.attributes); i += 2 {
		if e.attributes[i] == attribute {
			return e.attributes[i+1]
		}
	}
	return ""
}

func (e *element) count() int {
	n := 1
	for _, inner := range e.within {
		n += inner.count()
	}
	return n
}

// check finds a value that cannot be written.
func (e *element) check() error {
	for i := 0; i < len(e.attributes); i += 2 {
		value := e.attributes[i+1]
		unfit := func(r rune) bool { return !unicode.IsPrint(r) || strings.ContainsRune(`"<>&`, r) }
		if len(value) > maxNCCLValue || !utf8.ValidString(value) || strings.ContainsFunc(value, unfit) {
			return &UnwritableError{fmt.Sprintf("attribute %s of a <%s>", e.attributes[i], e.name), value}
		}
	}
	for _, inner := range e.within {
		if err := inner.check(); err != nil {
			return err
		}
	}
	return nil
}

// text is the document (ncclTopoDumpXmlRec).
func (e *element) text() []byte {
	var b bytes.Buffer
	for _, c := range e.comments {
		fmt.Fprintf(&b, "<!-- %s -->\n", comment(c))
	}
	var write func(e *element, indent string)
	write = func(e *element, indent string) {
		b.WriteString(indent + "<" + e.name)
		for i := 0; i < len(e.attributes); i += 2 {
			fmt.Fprintf(&b, ` %s="%s"`, e.attributes[i], e.attributes[i+1])
		}
		if len(e.within) == 0 {
			b.WriteString("/>\n")
			return
		}
		b.WriteString(">\n")
		for _, inner := range e.within {
			write(inner, indent+"  ")
		}
		b.WriteString(indent + "</" + e.name + ">\n")
	}
	write(e, "")
	return b.Bytes()
}

// comment is a sentence that a comment can hold.
func comment(text string) string {
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
	return strings.ReplaceAll(strings.ReplaceAll(text, "--", "- -"), "--", "- -")
}

// ncclWriter builds the tree of a file.
type ncclWriter struct {
	host     *topo.Host
	root     *element
	cpus     map[graph.NodeID]*element
	switches map[graph.NodeID]*element
	bare     map[string]bool // hosts with GPUs known only by class
	rank     int
	nets     map[string]int // number of <net> by host
}

// ErrNoTree reports a host without a tree.
var ErrNoTree = errors.New("the text of nvidia-smi topo -m has path types without a tree, but NCCL's file needs a " +
	"tree; make a file with a tree by peerlane topo capture on that host")

// PlaceError reports a device at a NUMA node, or at a switch, that the host does not list.
type PlaceError struct {
	Device string
	NUMA   int    // if Switch is empty
	Switch string // PCI address
}

func (e *PlaceError) Error() string {
	if e.Switch != "" {
		return fmt.Sprintf("%s is at switch %s, which the host does not list", e.Device, e.Switch)
	}
	return fmt.Sprintf("%s is at NUMA node %d, which the host does not list", e.Device, e.NUMA)
}

// SwitchError reports a switch without a path to a CPU, or two switches with one address.
type SwitchError struct {
	BusID string
	Twice bool
}

func (e *SwitchError) Error() string {
	if e.Twice {
		return "two switches have the address " + e.BusID
	}
	return fmt.Sprintf("switch %s is not connected to a CPU", e.BusID)
}

func documentOf(h *topo.Host) (*element, error) {
	if h.Matrix != nil {
		return nil, ErrNoTree
	}
	h = AsNCCLReads(h)
	w := &ncclWriter{
		host: h, root: &element{name: "system", comments: h.Notes}, nets: map[string]int{},
		cpus: map[graph.NodeID]*element{}, switches: map[graph.NodeID]*element{}, bare: hostsKnownByClass(h),
	}
	version := "1"
	if slices.ContainsFunc(h.GPUs, ofRCCL) {
		version = "2"
	}
	w.root.set("version", version)
	w.addCPUs()
	if err := w.addSwitches(); err != nil {
		return nil, err
	}
	for _, g := range h.GPUs {
		if err := w.addGPU(g); err != nil {
			return nil, err
		}
	}
	if err := w.addNICs(); err != nil {
		return nil, err
	}
	w.order()
	return w.root, w.root.check()
}

// AsNCCLReads returns the host with the numbers that NCCL would read on the host, and without NICs
// that NCCL would not list.
func AsNCCLReads(h *topo.Host) *topo.Host {
	if h.Source.Kind == topo.SourceNCCLXML {
		return h
	}
	read := *h
	read.Notes = slices.Clone(h.Notes)
	read.CPUs = slices.Clone(h.CPUs)
	for i := range read.CPUs {
		// CPUID has an extended family, which NCCL shifts and the kernel adds.
		if c := &read.CPUs[i]; c.Family > 15 {
			c.Family = 15 + (c.Family-15)<<4
		}
	}
	read.NICs = nil
	listed := map[string]int{} // ports by PCI device
	nics := slices.Clone(h.NICs)
	slices.SortStableFunc(nics, func(a, b topo.NIC) int { return topo.CompareBusID(a.BusID, b.BusID) })
	for _, n := range nics {
		switch {
		case n.Software:
			read.Note("%s is omitted: it is software RDMA, which has no place in the tree", nicOnHost(n))
			continue
		case !n.Active():
			read.Note("%s is omitted: none of its ports is active", nicOnHost(n))
			continue
		}
		n.GUID, n.SystemGUID = ncclGUID(cmp.Or(n.SystemGUID, n.GUID)), ""
		n.Ports = slices.Clone(n.Ports)
		// NCCL numbers ports across the functions of a device (ncclIbGetRealPort).
		device := n.Host + "/" + n.BusID[:max(0, len(n.BusID)-len("00.0"))]
		for i := range n.Ports {
			if n.Ports[i].Active() {
				n.Ports[i].Number += listed[device]
				listed[device]++
			}
		}
		if n.DataDirect != "" {
			// NCCL lists both functions (ncclIbInitDevices, NCCL_IB_DATA_DIRECT).
			own := n.OwnFunction()
			own.BusID, own.Card = own.CardFunction(), ""
			read.NICs = append(read.NICs, own)
			n.Name += DataDirectSuffix
		}
		n.BusID, n.Card, n.DataDirect, n.Own = n.CardFunction(), "", "", nil
		read.NICs = append(read.NICs, n)
	}
	slices.SortStableFunc(read.NICs, func(a, b topo.NIC) int { return topo.CompareNatural(a.Name, b.Name) })
	return &read
}

// DataDirectSuffix ends NCCL's name of the <net> at a NIC's Data Direct function.
const DataDirectSuffix = "_dma"

func nicOnHost(n topo.NIC) string {
	if n.Host == "" {
		return n.Name
	}
	return n.Name + " of host " + n.Host
}

// ncclGUID converts the kernel's "5054:00ff:fe70:0001" to NCCL's form: the number that a
// little-endian machine reads from the same bytes. Empty for 0, the GUID of NCCL's socket
// transport.
func ncclGUID(text string) string {
	n, err := strconv.ParseUint(strings.ReplaceAll(text, ":", ""), 16, 64)
	if err != nil || n == 0 {
		return ""
	}
	return fmt.Sprintf("%#x", bits.ReverseBytes64(n))
}

// hostsKnownByClass returns the hosts for which only the addresses of GPUs are known, as in the
// skeletons of cloud providers. NCCL reads missing values from the host.
func hostsKnownByClass(h *topo.Host) map[string]bool {
	bare := map[string]bool{}
	next := map[string]int{}
	last := map[string]string{}
	for _, g := range h.GPUs {
		known := g.Capability != 0 || g.GCN != "" || g.GDR != nil || len(g.NVLinks) > 0 || g.NVLinkCPU > 0 || g.C2C > 0
		inOrder := g.Index == next[g.Host] && (g.Index == 0 || topo.CompareBusID(last[g.Host], g.BusID) < 0)
		next[g.Host]++
		last[g.Host] = g.BusID
		if isBare, seen := bare[g.Host]; !seen || isBare {
			bare[g.Host] = !known && inOrder && pci.Graphics(g.Device.Class, g.Device.Vendor) &&
				pci.MakerOf(g.Device.Vendor) == g.Vendor && (g.Vendor == "" || ofRCCL(g))
		}
	}
	return bare
}

// addCPUs adds the NUMA nodes with devices, and the first NUMA node of a host: NCCL attaches NICs
// without a PCI device to the first node.
func (w *ncclWriter) addCPUs() {
	used := map[graph.NodeID]bool{}
	for _, s := range w.host.Switches {
		used[graph.CPUID(s.Host, s.NUMA)] = true
	}
	for _, g := range w.host.GPUs {
		used[graph.CPUID(g.Host, g.NUMA)] = true
	}
	for _, n := range w.host.NICs {
		used[graph.CPUID(n.Host, n.NUMA)] = true
	}
	first := map[string]bool{}
	for _, c := range w.host.CPUs {
		id := graph.CPUID(c.Host, c.NUMA)
		if first[c.Host] && !used[id] {
			continue
		}
		first[c.Host] = true
		e := w.root.add("cpu")
		w.cpus[id] = e
		e.set("host_hash", c.Host)
		e.set("numaid", strconv.Itoa(c.NUMA))
		e.set("affinity", affinity(c.CPUs))
		e.set("arch", c.Arch)
		e.set("vendor", c.Vendor)
		if c.Family != 0 || c.Model != 0 {
			e.set("familyid", strconv.Itoa(c.Family))
			e.set("modelid", strconv.Itoa(c.Model))
		}
	}
}

// affinity converts a list of processors ("0-11,24-35") to a mask in the kernel's form
// ("0000000f,ff000fff"). Empty for a malformed list, and for a mask longer than NCCL reads. NCCL
// ignores processors from 1024 up.
func affinity(list string) string {
	var words []uint32
	for part := range strings.SplitSeq(list, ",") {
		from, to, _ := strings.Cut(part, "-")
		first, err := strconv.Atoi(from)
		last, errLast := strconv.Atoi(cmp.Or(to, from))
		if err != nil || errLast != nil || first < 0 || last < first {
			return ""
		}
		for n := first; n <= last && n < maxNCCLCPUs; n++ {
			for len(words) <= n/32 {
				words = append(words, 0)
			}
			words[n/32] |= 1 << (n % 32)
		}
	}
	mask := func(form string) string {
		var groups []string
		for _, word := range slices.Backward(words) {
			groups = append(groups, fmt.Sprintf(form, word))
		}
		return strings.Join(groups, ",")
	}
	for _, form := range []string{"%08x", "%x"} {
		if text := mask(form); len(text) <= maxNCCLValue {
			return text
		}
	}
	return ""
}

// above is the element that a device is in.
func (w *ncclWriter) above(host, what string, p topo.Place, numa int) (*element, error) {
	if p.Switch == "" {
		if e := w.cpus[graph.CPUID(host, numa)]; e != nil {
			return e, nil
		}
		return nil, &PlaceError{Device: what, NUMA: numa}
	}
	if e := w.switches[graph.NodeID{Kind: graph.SwitchNode, Host: host, Name: p.Switch}]; e != nil {
		return e, nil
	}
	return nil, &PlaceError{Device: what, Switch: p.Switch}
}

// addSwitches attaches a switch to the switch above.
func (w *ncclWriter) addSwitches() error {
	for _, s := range w.host.Switches {
		class := s.Device.Class
		if class == "" || pci.Graphics(class, "") || strings.HasPrefix(class, pci.ClassNetwork) ||
			strings.HasPrefix(class, pci.ClassNVSwitch) {
			class = ClassBridge // NCCL would mistake the class of the switch for a device
		}
		e := pciElement(s.BusID, class, s.Device, s.Place)
		for _, peer := range s.Peers {
			e.add("pcilink", "target", peer)
		}
		id := graph.NodeID{Kind: graph.SwitchNode, Host: s.Host, Name: s.BusID}
		if w.switches[id] != nil {
			return &SwitchError{s.BusID, true}
		}
		w.switches[id] = e
	}
	for _, s := range w.host.Switches {
		up, err := w.above(s.Host, "switch "+s.BusID, s.Place, s.NUMA)
		if err != nil {
			return err
		}
		up.within = append(up.within, w.switches[graph.NodeID{Kind: graph.SwitchNode, Host: s.Host, Name: s.BusID}])
	}
	return w.noCycle()
}

// Refuse a switch without a path to a CPU: NCCL would drop it.
func (w *ncclWriter) noCycle() error {
	reached := map[*element]bool{}
	var visit func(e *element)
	visit = func(e *element) {
		reached[e] = true
		for _, inner := range e.within {
			visit(inner)
		}
	}
	visit(w.root)
	for _, s := range w.host.Switches {
		if !reached[w.switches[graph.NodeID{Kind: graph.SwitchNode, Host: s.Host, Name: s.BusID}]] {
			return &SwitchError{s.BusID, false}
		}
	}
	return nil
}

// pciElement is a <pci>.
func pciElement(busID, class string, d topo.PCIIdentity, p topo.Place) *element {
	e := &element{name: "pci"}
	e.set("busid", busID)
	e.set("class", class)
	e.set("vendor", d.Vendor)
	e.set("device", d.Device)
	e.set("subsystem_vendor", d.SubsystemVendor)
	e.set("subsystem_device", d.SubsystemDevice)
	speed, width := linkWords(p)
	e.attributes = append(e.attributes, "link_speed", speed, "link_width", width) // NCCL wants both
	return e
}

// linkWords returns link_speed and link_width: the values of the input, or else the widest link
// with the bandwidth Place.Link. Both are empty for an unknown link; NCCL then assumes 8 GT/s and
// 16 lanes.
func linkWords(p topo.Place) (speed, width string) {
	lanes := ""
	if p.LinkWidth > 0 {
		lanes = strconv.Itoa(p.LinkWidth)
	}
	if p.Link == 0 || p.Link == bandwidths.PCIe(p.LinkSpeed, p.LinkWidth) {
		known := func(s bandwidths.PCIeSpeed) bool { return strings.HasPrefix(p.LinkSpeed, s.Begins) }
		if !slices.ContainsFunc(bandwidths.PCIeSpeeds, known) {
			return "", lanes
		}
		return p.LinkSpeed, lanes
	}
	best := math.Inf(1)
	for _, text := range []string{"2.5 GT/s PCIe", "5.0 GT/s PCIe", "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe",
		"64.0 GT/s PCIe"} {
		for _, n := range []int{16, 8, 4, 2, 1, 32, 12} { // the widths that PCI Express defines
			if off := math.Abs(bandwidths.PCIe(text, n) - p.Link); off < best {
				best, speed, width = off, text, strconv.Itoa(n)
			}
		}
	}
	return speed, width
}

func (w *ncclWriter) addGPU(g topo.GPU) error {
	up, err := w.above(g.Host, "GPU "+g.BusID, g.Place, g.NUMA)
	if err != nil {
		return err
	}
	class := g.Device.Class
	if !pci.Graphics(class, g.Device.Vendor) {
		class = ncclClass3D
	}
	e := pciElement(g.BusID, class, g.Device, g.Place)
	e.device, e.place = true, g.Order
	up.within = append(up.within, e)
	rank := w.rank
	w.rank++
	if w.bare[g.Host] {
		return nil
	}
	gpu := e.add("gpu", "dev", strconv.Itoa(g.Index))
	if g.Capability != 0 {
		gpu.set("sm", strconv.Itoa(g.Capability))
	}
	gpu.set("gcn", g.GCN)
	gpu.set("rank", strconv.Itoa(rank))
	gpu.set("gdr", flagText(g.GDR))
	link, bandwidth := "nvlink", bandwidths.NVLink(g.Capability)
	if ofRCCL(g) {
		link, bandwidth = "xgmi", bandwidths.XGMI(g.GCN)
	}
	for _, l := range g.NVLinks {
		target, class := l.Peer, ncclClass3D
		if l.Peer == "" {
			target, class = ncclUnseen, ncclClassNVSwitch
		}
		gpu.add(link, "target", target, "count", strconv.Itoa(l.Count), "tclass", class)
	}
	if g.NVLinkCPU > 0 {
		gpu.add(link, "target", ncclUnseen, "count", strconv.Itoa(int(math.Round(g.NVLinkCPU/bandwidth))), "tclass",
			pci.ClassNVLinkCPU)
	}
	if g.C2C > 0 {
		gpu.add("c2c", "bw", strconv.Itoa(int(math.Round(g.C2C*1000))), "count", "1")
	}
	return nil
}

// ofRCCL: AMD's library knows a GPU, and NVIDIA's does not.
func ofRCCL(g topo.GPU) bool { return g.Vendor == "AMD" || g.Vendor == "Hygon" }

func flagText(value *bool) string {
	switch {
	case value == nil:
		return ""
	case *value:
		return "1"
	}
	return "0"
}

// addNICs adds the NICs of a PCI function to a single <nic>.
func (w *ncclWriter) addNICs() error {
	functions := map[graph.NodeID]*element{} // the <nic> of a function
	for _, n := range w.host.NICs {
		at := graph.NodeID{Kind: graph.NICNode, Host: n.Host, Name: n.BusID}
		if n.BusID == "" {
			at = graph.CPUID(n.Host, n.NUMA)
		}
		nic := functions[at]
		if nic == nil {
			up, err := w.above(n.Host, "NIC "+n.Name, n.Place, n.NUMA)
			if err != nil {
				return err
			}
			if n.BusID != "" {
				class := n.Device.Class
				if !strings.HasPrefix(class, pci.ClassNetwork) {
					class = ClassEthernet
				}
				function := pciElement(n.BusID, class, n.Device, n.Place)
				function.device, function.place = true, n.Order
				up.within = append(up.within, function)
				if nicKnownByClass(n) {
					continue
				}
				up = function
			}
			nic = up.add("nic")
			functions[at] = nic
		}
		w.addNet(nic, n)
	}
	return nil
}

// nicKnownByClass reports whether only the PCI function of the NIC is known.
func nicKnownByClass(n topo.NIC) bool {
	d := n.Device
	known := networkOf(xmlPCI{Class: d.Class, Vendor: d.Vendor, Device: d.Device}, topo.NIC{})
	return n.Name == "nic@"+n.BusID && len(n.Ports) == 0 && n.GUID == "" && n.GDR == nil && n.Ethernet == known.Ethernet
}

// addNet adds a <net> with a single port.
func (w *ncclWriter) addNet(nic *element, n topo.NIC) {
	e := nic.add("net", "name", n.Name)
	e.device, e.place = true, n.Order
	if n.GDR != nil {
		// NCCL reads a <net> with dev and without gdr as a NIC without GPUDirect RDMA
		// (ncclTopoAddNet). NCCL completes a <net> without dev from the host.
		e.set("dev", strconv.Itoa(w.nets[n.Host]))
	}
	w.nets[n.Host]++
	port := BestPort(n)
	if mbps := math.Round(port.RateGbps * 1000); mbps > 0 && mbps < 1e9 {
		e.set("speed", strconv.Itoa(int(mbps)))
	}
	if len(n.Ports) > 0 {
		e.set("port", strconv.Itoa(port.Number))
	}
	guid := n.GUID
	if guid == "" && n.Ethernet {
		guid = "0x0"
	}
	e.set("guid", guid)
	e.set("gdr", flagText(n.GDR))
}

// BestPort returns the fastest active port; the zero Port if no port is active.
func BestPort(n topo.NIC) topo.Port {
	var best *topo.Port
	for i, p := range n.Ports {
		if p.Active() && (best == nil || p.RateGbps > best.RateGbps) {
			best = &n.Ports[i]
		}
	}
	if best == nil {
		return topo.Port{}
	}
	return *best
}

// order sorts elements as NCCL does: by PCI address, then elements without an address. NCCL breaks
// ties by the order of the file, so devices that were read from a file keep the order of the file.
func (w *ncclWriter) order() {
	read := w.host.Source.Kind == topo.SourceNCCLXML
	var sort func(e *element) (first int)
	sort = func(e *element) (first int) {
		first = math.MaxInt
		if e.device {
			first = e.place
		}
		firsts := map[*element]int{}
		for _, inner := range e.within {
			firsts[inner] = sort(inner)
			first = min(first, firsts[inner])
		}
		if e.name == "cpu" || e.name == "pci" || e.name == "nic" && read {
			slices.SortStableFunc(e.within, func(a, b *element) int {
				byName, byPlace := cmp.Compare(b.name, a.name) /* pcilink, pci, nic, gpu */, 0
				if read && a.name != "pcilink" && b.name != "pcilink" {
					byName, byPlace = 0, cmp.Compare(firsts[a], firsts[b])
				}
				return cmp.Or(byName, byPlace, topo.CompareBusID(a.value("busid"), b.value("busid")))
			})
		}
		return first
	}
	sort(w.root)
}
