package reader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/lazyregexp"
	"github.com/peerlane/peerlane/topo/internal/pci"
)

// Recorder receives the files that Record reads. A path has no leading slash and begins with "sys"
// or "proc", even if Record reads other roots.
type Recorder interface {
	// Record calls Directory for directories that matter even if empty, possibly several times for
	// a directory. Record does not call Directory for the directories of files and links.
	Directory(path string) error
	File(path string, data []byte) error
	// target is the kernel's: relative, and inside sys.
	Link(path, target string) error
}

// Extent is how much of a host Record takes.
type Extent int

const (
	// Everything selects every PCI function and every RDMA device. Record accepts a configuration
	// space that the kernel cuts, and skips attributes that a device fails to return.
	everything Extent = iota
	// DevicesOnly selects the PCI root complexes with a function of NVIDIA or an RDMA device, and
	// the RDMA devices with a PCI function. Record fails on a configuration space that the kernel
	// cuts: only root sees whole configuration spaces.
	DevicesOnly
)

// Recorded attributes. No recorded attribute contains a serial number or the name of the host:
// serial_number, node_desc, uevent and vpd do. Record reduces vpd to the data that marks
// management bridges and Data Direct functions.
var (
	recordedOfFunction = []string{
		"class", "vendor", "device", "subsystem_vendor", "subsystem_device", "revision",
		"numa_node", "local_cpulist",
		"current_link_speed", "current_link_width", "max_link_speed", "max_link_width",
		"sriov_totalvfs", "sriov_numvfs",
		"resource", "config",
	}
	recordedLinksOfFunction = []string{"physfn"}
	// "parent" is the network interface below software RDMA.
	recordedOfRDMA = []string{"node_guid", "sys_image_guid", "node_type", "parent", "fw_ver"}
	// No GID, which can be an address of a network interface.
	recordedOfPort  = []string{"state", "phys_state", "rate", "link_layer", "lid", "sm_lid"}
	recordedOfVerbs = []string{"ibdev", "dev"}
	recordedOfNode  = []string{"cpulist", "distance"}
	// Keys for the bandwidth and the socket of a processor; "cpu" is POWER's key for the model.
	recordedOfProcessor = map[string]bool{
		"processor": true, "vendor_id": true, "cpu family": true, "model": true, "model name": true,
		"physical id": true, "cpu": true,
	}
)

var portPattern = lazyregexp.New(`^[0-9]+$`)

// Record reads the sysfs and procfs of a host, usually /sys and /proc, and passes the files about
// GPUs, RDMA devices and the connections between GPUs and RDMA devices to a Recorder: PCI
// functions and RDMA devices with links in /sys/bus and /sys/class, bonds and links of switches,
// NUMA nodes, processors, and the files of NVIDIA's driver in procfs. Record skips missing files.
// A file that exists and cannot be read is an error.
func Record(sysfs, proc string, extent Extent, to Recorder) error {
	r := recording{roots: map[string]string{"sys": sysfs, "proc": proc}, extent: extent, to: to}
	for _, read := range []func() error{r.devices, r.switches, r.nodes, r.processors, r.driver} {
		if err := read(); err != nil {
			return fmt.Errorf("capture the host that %s and %s show: %w", sysfs, proc, err)
		}
	}
	return nil
}

type recording struct {
	roots  map[string]string
	extent Extent
	to     Recorder
}

// member is an entry of a bus or class: usually a link to the directory of the device.
type member struct {
	path   string // of the entry
	target string // of the link; empty if the entry is the directory of the device
	at     string // the device's directory
}

// on returns the path on the host of a path in the recording.
func (r *recording) on(p string) string {
	tree, rest, _ := strings.Cut(p, "/")
	return filepath.Join(r.roots[tree], rest)
}

// list returns the sorted entries of a directory; nil if the directory does not exist.
func (r *recording) list(dir string) ([]fs.DirEntry, error) {
	entries, err := machine{}.ReadDir(r.on(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return entries, err
}

// directories returns the names of the subdirectories of dir that match pattern.
func (r *recording) directories(dir string, pattern *lazyregexp.Regexp) ([]string, error) {
	entries, err := r.list(dir)
	var names []string
	for _, e := range entries {
		if e.IsDir() && pattern.MatchString(e.Name()) {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// members returns the entries of a bus or a class.
func (r *recording) members(dir string) ([]member, error) {
	entries, err := r.list(dir)
	if err != nil {
		return nil, err
	}
	var found []member
	for _, e := range entries {
		m := member{path: path.Join(dir, e.Name())}
		switch {
		case e.IsDir():
			m.at = m.path
		case e.Type() == fs.ModeSymlink:
			if m.target, m.at, err = r.follow(m.path); err != nil {
				return nil, err
			}
		default:
			continue // an attribute of the class
		}
		found = append(found, m)
	}
	return found, nil
}

// follow reads a link, and returns the target in the recording. Both results are empty if the link
// does not exist.
func (r *recording) follow(link string) (target, at string, err error) {
	target, err = os.Readlink(r.on(link))
	if errors.Is(err, fs.ErrNotExist) {
		return "", "", nil
	}
	if err != nil {
		return "", "", err
	}
	at = path.Join(path.Dir(link), target)
	if path.IsAbs(target) || !strings.HasPrefix(at, "sys/") {
		return "", "", fmt.Errorf("link %s to %q leads out of sysfs", r.on(link), target)
	}
	return target, at, nil
}

// link records a link if the link exists, and returns the target.
func (r *recording) link(p string) (at string, err error) {
	target, at, err := r.follow(p)
	if err != nil || target == "" {
		return "", err
	}
	return at, r.to.Link(p, target)
}

// files records the named files of a directory that exist.
func (r *recording) files(dir string, names ...string) error {
	for _, name := range names {
		at := path.Join(dir, name)
		data, err := r.read(at)
		if gone(err) || r.extent == everything && refused(err) {
			continue
		}
		if err != nil {
			return err
		}
		if err := r.to.File(at, data); err != nil {
			return err
		}
	}
	return nil
}

// read reads a file. The size in the inode is the whole size of a configuration space, so read
// detects a cut. For other attributes of sysfs the size is a page.
func (r *recording) read(p string) ([]byte, error) {
	name := r.on(p)
	d, err := openRegular(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = d.Close() }()
	data, err := d.readAll()
	if err != nil {
		return nil, err
	}
	if r.extent != everything && path.Base(p) == "config" && int64(len(data)) < d.size {
		return nil, &fault.Error{Code: fault.NotRoot, Operation: "read", Object: name,
			Cause: fmt.Errorf("the kernel shows %d of %d bytes", len(data), d.size), Remedy: "run this as root"}
	}
	return data, nil
}

// rootComplex returns the part of a device's path up to the first PCI root,
// "sys/devices/pci0000:00"; empty for a device outside a PCI root. Below a volume management
// device is a second root, and in some virtual machines the first root is deep in /sys/devices.
func rootComplex(at string) string {
	end := 0
	for element := range strings.SplitSeq(at, "/") {
		end += len(element)
		if lazyregexp.HostBridgePattern.MatchString(element) {
			return at[:end]
		}
		end++ // the slash
	}
	return ""
}

// devices takes the PCI functions and the RDMA devices.
func (r *recording) devices() error {
	functions, err := r.members("sys/bus/pci/devices")
	if err != nil {
		return err
	}
	rdma, err := r.members("sys/class/infiniband")
	if err != nil {
		return err
	}
	verbs, err := r.members("sys/class/infiniband_verbs")
	if err != nil {
		return err
	}
	wanted := func(string) bool { return true }
	if r.extent == DevicesOnly {
		if wanted, err = r.wantedRoots(functions, rdma); err != nil {
			return err
		}
	}
	for _, f := range functions {
		if wanted(f.at) {
			if err := r.function(f); err != nil {
				return err
			}
		}
	}
	for _, d := range rdma {
		if wanted(d.at) {
			if err := r.rdma(d); err != nil {
				return err
			}
		}
	}
	for _, v := range verbs {
		if wanted(v.at) {
			if err := r.classDevice(v, recordedOfVerbs); err != nil {
				return err
			}
		}
	}
	return r.files("sys/class/infiniband_verbs", "abi_version")
}

// wantedRoots returns a function that reports whether a device is below a root complex with GPUs
// or RDMA devices.
func (r *recording) wantedRoots(functions, rdma []member) (func(at string) bool, error) {
	roots := map[string]bool{}
	for _, f := range functions {
		vendor, err := machine{}.ReadFile(r.on(path.Join(f.at, "vendor")))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if strings.TrimSpace(string(vendor)) == pci.VendorNVIDIA {
			roots[rootComplex(f.at)] = true
		}
	}
	for _, d := range rdma {
		roots[rootComplex(d.at)] = true
	}
	delete(roots, "") // software RDMA is outside PCI roots
	if len(roots) == 0 {
		return nil, errors.New("this host has no PCI function of NVIDIA and no RDMA device with a PCI function, so there " +
			"is " +
			"nothing to record")
	}
	return func(at string) bool { return roots[rootComplex(at)] }, nil
}

// entry records the link of a bus or class, and the directory of the device.
func (r *recording) entry(m member) error {
	if m.target != "" {
		if err := r.to.Link(m.path, m.target); err != nil {
			return err
		}
	}
	return r.to.Directory(m.at)
}

func (r *recording) function(f member) error {
	if err := r.entry(f); err != nil {
		return err
	}
	if err := r.files(f.at, recordedOfFunction...); err != nil {
		return err
	}
	if err := r.product(f.at); err != nil {
		return err
	}
	for _, name := range recordedLinksOfFunction {
		if _, err := r.link(path.Join(f.at, name)); err != nil {
			return err
		}
	}
	driver, err := r.link(path.Join(f.at, "driver"))
	if err != nil || driver == "" {
		return err
	}
	if err := r.to.Directory(driver); err != nil {
		return err
	}
	_, err = r.link(path.Join(driver, path.Base(f.path)))
	return err
}

// product records the vital product data that marks the purpose of a function. The kernel shows
// vital product data to root only.
func (r *recording) product(at string) error {
	var id topo.PCIIdentity
	for name, into := range map[string]*string{"vendor": &id.Vendor, "device": &id.Device} {
		text, err := r.read(path.Join(at, name))
		if gone(err) || refused(err) {
			return nil
		}
		if err != nil {
			return err
		}
		*into = strings.TrimSpace(string(text))
	}
	if !hasProduct(id) {
		return nil
	}
	name := path.Join(at, "vpd")
	d, err := openRegular(r.on(name))
	if gone(err) || r.extent == everything && errors.Is(err, fs.ErrPermission) {
		return nil
	}
	if err != nil {
		return err
	}
	data, err := readVPD(d)
	_ = d.Close()
	if gone(err) || refused(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if kept := parseVPD(data).reduced(); kept != nil {
		return r.to.File(name, kept)
	}
	return nil
}

// classDevice records an entry of a class, the attributes, and the device of the entry.
func (r *recording) classDevice(m member, attributes []string) error {
	if err := r.entry(m); err != nil {
		return err
	}
	if err := r.files(m.at, attributes...); err != nil {
		return err
	}
	device, err := r.link(path.Join(m.at, "device"))
	if err != nil || device == "" || r.extent == DevicesOnly {
		return err
	}
	// Software RDMA belongs to a network interface, and no other recorded file names the
	// interface.
	return r.to.Directory(device)
}

func (r *recording) rdma(d member) error {
	if err := r.classDevice(d, recordedOfRDMA); err != nil {
		return err
	}
	ports, err := r.directories(path.Join(d.at, "ports"), portPattern)
	if err != nil {
		return err
	}
	for _, port := range ports {
		dir := path.Join(d.at, "ports", port)
		if err := r.files(dir, recordedOfPort...); err != nil {
			return err
		}
		if err := r.bond(dir); err != nil {
			return err
		}
	}
	return nil
}

// bond records the interface of a port's first GID if the interface is a bond, and that the
// interface is a bond. bond does not record the names of other interfaces: a name can contain an
// address.
func (r *recording) bond(port string) error {
	gid := path.Join(port, firstGID)
	text, err := r.read(gid)
	if gone(err) || refused(err) {
		return nil
	}
	if err != nil {
		return err
	}
	name := strings.TrimSpace(string(text))
	if !interfaceName.MatchString(name) {
		return nil
	}
	at := path.Join("sys/class/net", name)
	if info, err := os.Stat(r.on(path.Join(at, "bonding"))); err != nil || !info.IsDir() {
		return nil
	}
	if err := r.to.File(gid, text); err != nil {
		return err
	}
	if info, err := os.Lstat(r.on(at)); err == nil && info.Mode().Type() == fs.ModeSymlink {
		if at, err = r.link(at); err != nil {
			return err
		}
	}
	return r.to.Directory(path.Join(at, "bonding"))
}

// switches takes the links that the driver of Broadcom's switches knows.
func (r *recording) switches() error {
	const dir = "sys/" + switchLinks
	_, _ = machine{}.ReadFile(r.on("sys/" + switchRefresh)) // as the reader does
	switches, err := r.list(dir)
	if err != nil {
		return err
	}
	for _, s := range switches {
		if !lazyregexp.DevicePattern.MatchString(s.Name()) {
			continue
		}
		peers, err := r.list(path.Join(dir, s.Name()))
		if err != nil {
			return err
		}
		for _, p := range peers {
			if lazyregexp.DevicePattern.MatchString(p.Name()) {
				if err := r.to.Directory(path.Join(dir, s.Name(), p.Name())); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// nodes takes the NUMA nodes.
func (r *recording) nodes() error {
	const dir = "sys/devices/system/node"
	nodes, err := r.directories(dir, nodePattern)
	if err != nil {
		return err
	}
	for _, node := range nodes {
		if err := r.files(path.Join(dir, node), recordedOfNode...); err != nil {
			return err
		}
	}
	return nil
}

// processors records /proc/cpuinfo without keys that change every second, and without keys that do
// not describe the socket.
func (r *recording) processors() error {
	text, err := machine{}.ReadFile(r.on("proc/cpuinfo"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var kept strings.Builder
	inside := false // a processor's lines, which an empty line ends
	for line := range strings.Lines(string(text)) {
		key, _, ok := strings.Cut(line, ":")
		if ok && recordedOfProcessor[strings.TrimSpace(key)] {
			kept.WriteString(line)
			inside = true
		} else if inside && strings.TrimSpace(line) == "" {
			kept.WriteString("\n")
			inside = false
		}
	}
	return r.to.File("proc/cpuinfo", []byte(kept.String()))
}

// driver records the files of NVIDIA's driver about the driver and the GPUs.
func (r *recording) driver() error {
	const dir = "proc/driver/nvidia"
	if err := r.files(dir, "version"); err != nil {
		return err
	}
	gpus, err := r.directories(path.Join(dir, "gpus"), lazyregexp.DevicePattern)
	if err != nil {
		return err
	}
	for _, gpu := range gpus {
		if err := r.files(path.Join(dir, "gpus", gpu), "information"); err != nil {
			return err
		}
	}
	return nil
}
