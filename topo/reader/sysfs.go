package reader

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
	"github.com/peerlane/peerlane/topo/internal/lazyregexp"
	"github.com/peerlane/peerlane/topo/internal/pci"
)

// Sysfs reads a host from sysfs and procfs. Sysfs finds GPUs of NVIDIA by PCI class and vendor, so
// that a host without a loaded driver has GPUs too, and RDMA NICs in /sys/class/infiniband. Sysfs
// skips missing files. A file that exists and cannot be read is an error.
func Sysfs(o topo.Options) (*topo.Host, error) {
	root, _ := o.Roots()
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, &fault.Error{Operation: "read the topology below", Object: root, Cause: err}
	}
	files := &attributes{root: strings.TrimSuffix(root, "/") + "/"}
	defer files.close()
	return readHost(o, files)
}

func readHost(o topo.Options, from files) (*topo.Host, error) {
	sysfsRoot, proc := o.Roots()
	// The root is absolute because plans contain the root, and processes in other directories read
	// plans.
	root, err := filepath.Abs(sysfsRoot)
	if err != nil {
		return nil, &fault.Error{Operation: "read the topology below", Object: sysfsRoot, Cause: err}
	}
	s := sysfs{
		files: from, root: root, proc: proc,
		switches: map[string]bool{}, ports: map[string]bool{}, configs: map[string]configuration{},
		cached: map[[2]string]string{},
	}
	s.host = &topo.Host{Source: topo.Source{Kind: topo.SourceSysfs, Sysfs: s.root}}
	for _, read := range []func() error{s.readNodes, s.readGPUs, s.readNICs} {
		if err := read(); err != nil {
			return nil, &fault.Error{Operation: "read the topology below", Object: s.root, Cause: err}
		}
	}
	s.addUnknownNode()
	slices.SortFunc(s.host.Switches, func(a, b topo.Switch) int { return topo.CompareBusID(a.BusID, b.BusID) })
	slices.SortFunc(s.host.PCIePorts, func(a, b topo.PCIePort) int { return topo.CompareBusID(a.BusID, b.BusID) })
	s.noteACS()
	if o.NVML != nil {
		complete(s.host, o.NVML, s.classOf)
	}
	s.host.Judge()
	if err := s.host.CheckText(); err != nil {
		return nil, &fault.Error{Operation: "read the topology below", Object: s.root, Cause: err}
	}
	return s.host, nil
}

// sysfs reads a host.
type sysfs struct {
	files      files
	root, proc string
	host       *topo.Host
	switches   map[string]bool // switches in host
	ports      map[string]bool // ports in host
	configs    map[string]configuration
	cached     map[[2]string]string // attributes of PCI functions that are read twice
	cut        bool                 // the kernel cut a configuration space
	refreshed  bool                 // Broadcom's driver has refreshed the links of switches
	noVPD      bool                 // the kernel refused vital product data
}

// path joins elements to the root. The elements are clean.
func (s *sysfs) path(elem ...string) string {
	n := len(s.root)
	for _, e := range elem {
		n += 1 + len(e)
	}
	path := make([]byte, 0, n)
	path = append(path, strings.TrimSuffix(s.root, "/")...)
	for _, e := range elem {
		path = append(append(path, '/'), e...)
	}
	return string(path)
}

// attribute reads a file with a single line; "" if the file does not exist.
func (s *sysfs) attribute(elem ...string) (string, error) {
	text, err := s.files.ReadFile(s.path(elem...))
	if gone(err) {
		return "", nil
	}
	return strings.TrimSpace(string(text)), err
}

// deviceAttribute reads an attribute that the device answers when read. A device that fails to answer
// still counts, with a note.
func (s *sysfs) deviceAttribute(elem ...string) (string, error) {
	text, err := s.attribute(elem...)
	if refused(err) {
		s.host.Note("an attribute cannot be read and counts as unknown: %v", err)
		return "", nil
	}
	return text, err
}

// gone reports whether a file does not exist, or the device vanished after the open.
func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV) }

// refused reports whether a file exists and is readable, but the device or the driver failed to
// answer.
func refused(err error) bool {
	for _, known := range []error{syscall.EINVAL, syscall.EIO, syscall.ENXIO, syscall.ETIMEDOUT, syscall.EAGAIN,
		syscall.EBUSY, syscall.EOPNOTSUPP} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

// list returns the sorted names in a directory; nil if the directory does not exist.
func (s *sysfs) list(elem ...string) ([]string, error) {
	entries, err := s.files.ReadDir(s.path(elem...))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, nil
}

// maxNodes is the maximum number of NUMA nodes of a kernel (MAX_NUMNODES).
const maxNodes = 1024

var nodePattern = lazyregexp.New(`^node([0-9]+)$`)

// readNodes reads /sys/devices/system/node.
func (s *sysfs) readNodes() error {
	cpu, err := s.processor()
	if err != nil {
		return err
	}
	names, err := s.list("devices/system/node")
	if err != nil {
		return err
	}
	for _, name := range names {
		m := nodePattern.FindStringSubmatch(name)
		if m == nil {
			continue
		}
		if len(s.host.CPUs) == maxNodes {
			return &countError{items: "NUMA nodes", max: maxNodes, countless: true}
		}
		numa, err := strconv.Atoi(m[1])
		if err == nil {
			err = topo.CheckNUMA(numa)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", s.path("devices/system/node", name), err)
		}
		cpus, err := s.attribute("devices/system/node", name, "cpulist")
		if err != nil {
			return err
		}
		node := cpu
		node.NUMA, node.CPUs = numa, cpus
		s.host.CPUs = append(s.host.CPUs, node)
	}
	if len(s.host.CPUs) == 0 { // a kernel without NUMA
		s.host.CPUs = []topo.CPU{cpu}
	}
	slices.SortFunc(s.host.CPUs, func(a, b topo.CPU) int { return cmp.Compare(a.NUMA, b.NUMA) })
	return nil
}

// processor parses /proc/cpuinfo. The first CPU stands for every CPU.
func (s *sysfs) processor() (topo.CPU, error) {
	text := make([]byte, 4096) // enough for the keys of the first processor before the flags
	f, err := s.files.Open(filepath.Join(s.proc, "cpuinfo"))
	if err == nil {
		defer func() { _ = f.Close() }() // opened for reading: closing loses nothing
		var n int
		n, err = f.ReadAt(text, 0)
		text = text[:n]
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		text = nil
	case err != nil && !errors.Is(err, io.EOF):
		return topo.CPU{}, err
	}
	first, _, _ := strings.Cut(string(text), "\n\n")
	info := fields(first)
	c := topo.CPU{Arch: "x86_64", Vendor: info["vendor_id"]}
	switch {
	case strings.HasPrefix(info["cpu"], "POWER"):
		c.Arch = "ppc64"
	case c.Vendor == "":
		c.Arch = "arm64"
	}
	// missing on architectures other than x86; the table needs the family only for x86
	c.Family, _ = strconv.Atoi(info["cpu family"])
	c.Model, _ = strconv.Atoi(info["model"])
	c.Socket = bandwidths.Socket(c.Arch, c.Vendor, c.Family, c.Model)
	return c, nil
}

// fields parses "key : value" lines, the format of /proc/cpuinfo and
// /proc/driver/nvidia/gpus/*/information.
func fields(text string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(line, ":"); ok {
			m[strings.TrimSpace(key)] = strings.TrimSpace(value)
		}
	}
	return m
}

// readGPUs finds NVIDIA's GPUs in /sys/bus/pci/devices.
func (s *sysfs) readGPUs() error {
	names, err := s.list("bus/pci/devices")
	if err != nil {
		return err
	}
	for _, name := range names {
		class, err := s.pciAttribute(name, "class")
		if err != nil {
			return err
		}
		if !pci.Graphics(class, pci.VendorHygon) { // VendorHygon accepts the most classes
			continue
		}
		vendor, err := s.pciAttribute(name, "vendor")
		if err != nil {
			return err
		}
		if other := pci.MakerOf(vendor); other != "" {
			if err := s.readOther(name, class, vendor); gone(err) {
				s.vanished(name)
			} else if err != nil {
				return err
			}
			continue
		}
		if vendor != pci.VendorNVIDIA || !strings.HasPrefix(class, pci.ClassVGA) && !strings.HasPrefix(class, pci.Class3D) {
			continue
		}
		if driver := s.driver(name); driver != "" && driver != "nvidia" {
			s.host.Note("GPU %s is bound to driver %s and is ignored: CUDA cannot use it", name, driver)
			continue
		}
		gpu, err := s.readGPU(name)
		if gone(err) {
			s.vanished(name)
			continue
		}
		if err != nil {
			return err
		}
		s.host.GPUs = append(s.host.GPUs, gpu)
	}
	if len(s.host.GPUs) > topo.MaxDevices {
		return &countError{items: "GPUs", count: len(s.host.GPUs), max: topo.MaxDevices}
	}
	// NVML numbers by PCI address, too, and knows no GPU of another maker.
	slices.SortFunc(s.host.GPUs, func(a, b topo.GPU) int {
		return cmp.Or(cmp.Compare(min(len(a.Vendor), 1), min(len(b.Vendor), 1)), topo.CompareBusID(a.BusID, b.BusID))
	})
	for i := range s.host.GPUs {
		s.host.GPUs[i].Index = i
	}
	return nil
}

func (s *sysfs) vanished(gpu string) {
	s.host.Note("GPU %s vanished while it was read, and is ignored", gpu)
}

// readOther adds a GPU of AMD or Hygon. A display without the amdgpu driver cannot compute, and
// does not count.
func (s *sysfs) readOther(name, class, vendor string) error {
	if vendor != pci.VendorAMD && vendor != pci.VendorHygon || !pci.Graphics(class, vendor) ||
		strings.HasPrefix(class, pci.ClassVGA) && s.driver(name) != "amdgpu" {
		return nil
	}
	busID, err := topo.ParseBusID(name)
	if err != nil {
		return err
	}
	gpu := topo.GPU{Vendor: pci.MakerOf(vendor), BusID: busID, Minor: -1}
	if gpu.NUMA, gpu.Place, err = s.place(name); err != nil {
		return err
	}
	if gpu.Device, err = s.identity(name); err != nil {
		return err
	}
	s.host.GPUs = append(s.host.GPUs, gpu)
	return nil
}

func (s *sysfs) readGPU(name string) (topo.GPU, error) {
	busID, err := topo.ParseBusID(name)
	if err != nil {
		return topo.GPU{}, err
	}
	gpu := topo.GPU{BusID: busID, Minor: -1}
	if gpu.NUMA, gpu.Place, err = s.place(name); err != nil {
		return topo.GPU{}, err
	}
	if gpu.Device, err = s.identity(name); err != nil {
		return topo.GPU{}, err
	}
	file := filepath.Join(s.proc, "driver/nvidia/gpus", name, "information")
	text, err := s.files.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		s.host.Note("GPU %s: no %s, so its UUID, name and device node are unknown; is the NVIDIA driver loaded?", busID, file)
		return gpu, nil
	}
	if err != nil {
		return topo.GPU{}, err
	}
	info := fields(string(text))
	gpu.Name = info["Model"]
	// The driver writes question marks until a client has opened the GPU once.
	if uuid := info["GPU UUID"]; !strings.Contains(uuid, "?") {
		gpu.UUID = uuid
	}
	if minor, err := strconv.Atoi(info["Device Minor"]); err == nil {
		gpu.Minor = minor
	}
	return gpu, nil
}

// classOf returns the class of a PCI device, "0x068000"; "" if sysfs does not show the device.
func (s *sysfs) classOf(device string) string {
	class, err := s.pciAttribute(device, "class")
	if err != nil {
		return ""
	}
	return class
}

func (s *sysfs) pciAttribute(device, name string) (string, error) {
	if name != "class" && name != "vendor" && name != "numa_node" {
		return s.attribute("bus/pci/devices", device, name)
	}
	// The caller reads class and vendor twice: to select functions, and for the identity of a
	// function; and numa_node of a root port for each device below.
	key := [2]string{device, name}
	text, known := s.cached[key]
	if !known {
		var err error
		if text, err = s.attribute("bus/pci/devices", device, name); err != nil {
			return "", err
		}
		s.cached[key] = text
	}
	return text, nil
}

// driver returns the name of the driver of a PCI device, "" without a driver.
func (s *sysfs) driver(device string) string {
	target, err := s.files.ReadLink(s.path("bus/pci/devices", device, "driver"))
	if err != nil {
		return ""
	}
	return filepath.Base(target)
}

// peers returns the switches that a Broadcom switch reaches without the CPU, from the files of
// Broadcom's driver in /sys/kernel/pci_switch_link/virtual_switch_links/ADDRESS
// (ncclOsGetBcmLinks).
func (s *sysfs) peers(device string, identity topo.PCIIdentity) ([]string, error) {
	if identity.Vendor != pci.VendorBroadcom {
		return nil, nil
	}
	// Reading the file makes the driver refresh the links (ncclTopoRefreshBcmP2pLinks). The driver
	// does not report success, and most hosts lack the file.
	if !s.refreshed {
		s.refreshed = true
		_, _ = s.files.ReadFile(s.path(switchRefresh))
	}
	names, err := s.list(switchLinks, device)
	if err != nil {
		return nil, err
	}
	var peers []string
	for _, name := range names {
		if !lazyregexp.DevicePattern.MatchString(name) {
			continue
		}
		if _, err := s.files.ReadLink(s.path("bus/pci/devices", name)); err == nil {
			peers = append(peers, name)
		}
	}
	return peers, nil
}

// Broadcom's driver lists here, by switch, the joined switches.
const (
	switchLinks   = "kernel/pci_switch_link/virtual_switch_links"
	switchRefresh = "kernel/pci_switch_link/refresh_switch_toplogy" // in these letters
)

// chain parses the path of a device in /sys/devices, and returns the host bridge, and the ports
// and the device below, top down.
func chain(path string) (hostBridge string, devices []string) {
	for element := range strings.SplitSeq(filepath.ToSlash(path), "/") {
		switch {
		case lazyregexp.HostBridgePattern.MatchString(element): // a VMD has a second host bridge
			hostBridge, devices = element, nil
		case lazyregexp.DevicePattern.MatchString(element):
			devices = append(devices, element)
		}
	}
	return hostBridge, devices
}

// place returns the place of a PCI device, and adds the switches above the device to the host.
func (s *sysfs) place(device string) (numa int, p topo.Place, err error) {
	target, err := s.files.ReadLink(s.path("bus/pci/devices", device))
	if err != nil {
		return 0, topo.Place{}, err
	}
	hostBridge, devices := chain(target)
	if len(devices) == 0 {
		return 0, topo.Place{}, fmt.Errorf("PCI device %s: its link to %s contains no PCI device", device, target)
	}
	if numa, err = s.numa(devices[0]); err != nil {
		return 0, topo.Place{}, err
	}
	if err = s.addPorts(devices); err != nil {
		return 0, topo.Place{}, err
	}
	if p, err = s.placeIn(hostBridge, devices, numa); err != nil {
		return 0, topo.Place{}, err
	}
	p.LinkNow, err = s.linkNow(devices[len(devices)-1])
	return numa, p, err
}

// linkNow returns the current bandwidth of the link above a device, from current_link_speed and
// current_link_width; 0 if unknown.
func (s *sysfs) linkNow(device string) (float64, error) {
	speed, err := s.deviceAttribute("bus/pci/devices", device, "current_link_speed")
	if err != nil {
		return 0, err
	}
	width, err := s.deviceAttribute("bus/pci/devices", device, "current_link_width")
	if err != nil {
		return 0, err
	}
	lanes, err := strconv.Atoi(width)
	if err != nil || lanes <= 0 || lanes > 32 || bandwidths.LinkSpeed(speed) == 0 {
		return 0, nil
	}
	return bandwidths.PCIe(speed, lanes), nil
}

// identity reads the class and the IDs of a PCI function.
func (s *sysfs) identity(device string) (id topo.PCIIdentity, err error) {
	for name, into := range map[string]*string{
		"class": &id.Class, "vendor": &id.Vendor, "device": &id.Device,
		"subsystem_vendor": &id.SubsystemVendor, "subsystem_device": &id.SubsystemDevice,
	} {
		if *into, err = s.pciAttribute(device, name); err != nil {
			return topo.PCIIdentity{}, err
		}
	}
	return id, nil
}

// placeIn counts every second bridge upwards as a switch. The bridge directly above a device is
// the port of the switch or CPU that holds the device. The bridge above the port is the upstream
// port of the switch, and stands for the switch.
func (s *sysfs) placeIn(hostBridge string, devices []string, numa int) (topo.Place, error) {
	last := len(devices) - 1
	p := topo.Place{HostBridge: hostBridge}
	var err error
	if p.LinkSpeed, p.LinkWidth, err = s.link(devices); err != nil {
		return p, err
	}
	p.Link = bandwidths.PCIe(p.LinkSpeed, p.LinkWidth)
	if last < 2 {
		return p, nil
	}
	p.Switch = devices[last-2]
	if s.switches[p.Switch] {
		return p, nil
	}
	s.switches[p.Switch] = true
	above, err := s.placeIn(hostBridge, devices[:last-1], numa)
	if err != nil {
		return topo.Place{}, err
	}
	identity, err := s.identity(p.Switch)
	if err != nil {
		return topo.Place{}, err
	}
	peers, err := s.peers(p.Switch, identity)
	if err != nil {
		return topo.Place{}, err
	}
	s.host.Switches = append(s.host.Switches, topo.Switch{BusID: p.Switch, NUMA: numa, Place: above, Device: identity,
		Peers: peers})
	return p, nil
}

// link returns the maximum of the link above the last device: the smaller value of the two ends.
// Idle devices lower the current speed, so link does not use the current speed.
func (s *sysfs) link(devices []string) (speed string, width int, err error) {
	const unknown = 255 // the kernel's word
	width = unknown
	if len(devices) == 1 {
		width = 0 // no port above: NCCL assumes 16 lanes
	}
	for _, end := range devices[max(0, len(devices)-2):] {
		endSpeed, err := s.deviceAttribute("bus/pci/devices", end, "max_link_speed")
		if err != nil {
			return "", 0, err
		}
		text, err := s.deviceAttribute("bus/pci/devices", end, "max_link_width")
		if err != nil {
			return "", 0, err
		}
		if endSpeed == "" && text == "" { // before Linux 4.13
			c, err := s.configuration(end)
			if err != nil {
				return "", 0, err
			}
			endSpeed, text = c.speed, strconv.Itoa(c.width)
		}
		if now := bandwidths.LinkSpeed(endSpeed); now > 0 && (speed == "" || now < bandwidths.LinkSpeed(speed)) {
			speed = endSpeed
		}
		// Virtual functions have 0. For 0 or a missing width, NCCL assumes 16 lanes, even if the
		// far end has fewer.
		lanes, err := strconv.Atoi(text)
		if err != nil {
			lanes = 0
		}
		width = min(width, max(lanes, 0))
	}
	if width == unknown {
		width = 0
	}
	return speed, width, nil
}

// numa returns the numa_node of a PCI device. -1, "unknown", becomes the only node on a host with
// a single node, as in most virtual machines.
func (s *sysfs) numa(device string) (int, error) {
	text, err := s.pciAttribute(device, "numa_node")
	if err != nil {
		return 0, err
	}
	numa, err := strconv.Atoi(cmp.Or(text, "-1"))
	if err == nil {
		err = topo.CheckNUMA(max(numa, -1))
	}
	if err != nil {
		return 0, fmt.Errorf("numa_node of PCI device %s: %w", device, err)
	}
	if numa < 0 && len(s.host.CPUs) == 1 {
		return s.host.CPUs[0].NUMA, nil
	}
	return max(numa, -1), nil
}

// addUnknownNode adds a node for devices whose NUMA node is unknown or not listed, as NCCL does.
// The added node is far from every other node.
func (s *sysfs) addUnknownNode() {
	listed := map[int]bool{}
	for _, c := range s.host.CPUs {
		listed[c.NUMA] = true
	}
	add := func(device string, numa int) {
		if listed[numa] {
			return
		}
		listed[numa] = true
		unknown := s.host.CPUs[0]
		unknown.NUMA, unknown.CPUs = numa, ""
		s.host.CPUs = append(s.host.CPUs, unknown)
		s.host.Note("%s is at NUMA node %d, which %s does not list; it counts as far from every other node",
			device, numa, s.path("devices/system/node"))
	}
	for _, g := range s.host.GPUs {
		add("GPU "+g.BusID, g.NUMA)
	}
	for _, n := range s.host.NICs {
		add("NIC "+n.Name, n.NUMA)
	}
}
