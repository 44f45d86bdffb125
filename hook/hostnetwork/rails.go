package hostnetwork

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/relay/launch"
	addresses "github.com/peerlane/peerlane/relay/network/address"
)

// adapter is the hardware of a network interface, read from sysfs, to which a relay has no access.
type adapter struct {
	// device is the RDMA device; empty without RDMA.
	device string
	// place is the position of device among the host's RDMA devices.
	place int
	// pci is the address of the PCI function; empty without one.
	pci string
	// speed is in Mbit/s; 0 if the kernel reports none.
	speed int
}

// maxStacked limits the depth of stacked interfaces, such as a VLAN on a bond.
const maxStacked = 8

// maxGIDs limits the entries to read from a port's GID table. The first GIDs of every interface of
// the port are among them.
const maxGIDs = 32

var pciFunction = regexp.MustCompile(`[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]`)

// readAdapters reads the hardware of interfaces below sys. Missing and unreadable values are
// empty, because an interface may be in another network namespace, or gone.
func readAdapters(sys string, names []string) map[string]adapter {
	rdma := rdmaDevices(sys)
	all := map[string]adapter{}
	for _, name := range names {
		a := adapter{pci: pciOf(sys, name, maxStacked)}
		for place, d := range rdma {
			if slices.Contains(d.interfaces, name) {
				a.device, a.place = d.name, place
				break
			}
		}
		if text, err := os.ReadFile(filepath.Join(sys, "class/net", name, "speed")); err == nil {
			if n, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil {
				a.speed = max(n, 0) // -1 without a link
			}
		}
		all[name] = a
	}
	return all
}

// pciOf returns the PCI function of an interface, or of the first interface below it.
func pciOf(sys, name string, depth int) string {
	dir := filepath.Join(sys, "class/net", name)
	if path, err := filepath.EvalSymlinks(filepath.Join(dir, "device")); err == nil {
		if all := pciFunction.FindAllString(path, -1); len(all) > 0 {
			return all[len(all)-1]
		}
	}
	lower, err := filepath.Glob(filepath.Join(dir, "lower_*"))
	if err != nil || depth == 0 {
		return ""
	}
	for _, path := range lower {
		if pci := pciOf(sys, strings.TrimPrefix(filepath.Base(path), "lower_"), depth-1); pci != "" {
			return pci
		}
	}
	return ""
}

type rdmaDevice struct {
	name       string
	interfaces []string
}

// rdmaDevices lists /sys/class/infiniband in the order of a plan, with the interfaces of the
// functions (device/net) and of the GIDs (ports/N/gid_attrs/ndevs), which include bonds and VLANs.
func rdmaDevices(sys string) (all []rdmaDevice) {
	entries, err := os.ReadDir(filepath.Join(sys, "class/infiniband"))
	if err != nil {
		return nil // the host has no RDMA devices
	}
	for _, e := range entries {
		d := rdmaDevice{name: e.Name()}
		dir := filepath.Join(sys, "class/infiniband", d.name)
		if own, err := os.ReadDir(filepath.Join(dir, "device/net")); err == nil {
			for _, n := range own {
				d.interfaces = append(d.interfaces, n.Name())
			}
		}
		ports, _ := filepath.Glob(filepath.Join(dir, "ports/*/gid_attrs/ndevs")) // the pattern is valid
		for _, port := range ports {
			for n := range maxGIDs {
				if text, err := os.ReadFile(filepath.Join(port, strconv.Itoa(n))); err == nil {
					d.interfaces = append(d.interfaces, strings.TrimSpace(string(text)))
				}
			}
		}
		all = append(all, d)
	}
	slices.SortFunc(all, func(a, b rdmaDevice) int { return compareNatural(a.name, b.name) })
	return all
}

// compareNatural orders mlx5_10 after mlx5_9, like a plan.
func compareNatural(a, b string) int {
	head := func(s string) (string, int) {
		text := strings.TrimRight(s, "0123456789")
		n, _ := strconv.Atoi(s[len(text):]) // 0 without a number
		return text, n
	}
	textA, a1 := head(a)
	textB, b1 := head(b)
	return cmp.Or(strings.Compare(textA, textB), cmp.Compare(a1, b1), strings.Compare(a, b))
}

// SetRails numbers the rails of addresses like relays of this host, and sets their RDMA devices.
// planned is plan.rails.
func SetRails(sys string, chosen []addresses.Chosen, c config.Network, planned map[string]int) error {
	var names []string
	for _, a := range chosen {
		names = append(names, a.Interface)
	}
	return setRails(chosen, readAdapters(sys, names), c.Rails, planned, c.Interfaces != "")
}

// setRails numbers the rails of a relay's addresses by network.rails (named) or plan.rails
// (planned), and otherwise by hardware. With RDMA devices, every device is a rail, numbered by its
// position in the host's list. Without, every PCI function is a rail, in the order of addresses.
// Without either, every interface of network.interfaces is a rail, in that order; if the list is
// empty, there is one rail. An interface with less than half the speed of the fastest has no rail.
func setRails(
	chosen []addresses.Chosen,
	of map[string]adapter,
	named []string,
	planned map[string]int,
	listed bool,
) error {
	for i := range chosen {
		chosen[i].Device = of[chosen[i].Interface].device
		chosen[i].Rail = addresses.NoRail
	}
	if len(named) > 0 {
		some := false
		for i, c := range chosen {
			if n := slices.IndexFunc(named, func(name string) bool { return name == c.Interface || name == c.Device }); n >= 0 {
				chosen[i].Rail, some = n, true
			}
		}
		if !some {
			return fmt.Errorf(
				"network.rails in config.toml names %s, but this host has no usable interface or RDMA device of such a name",
				strings.Join(named, ", "),
			)
		}
		return nil
	}
	number := railNumbers(chosen, of, planned)
	if number == nil {
		place := map[string]int{}
		for i, c := range chosen {
			if _, known := place[c.Interface]; !known && listed {
				place[c.Interface] = len(place)
			}
			chosen[i].Rail = min(place[c.Interface], launch.MaxRail)
		}
		return nil
	}
	fastest := 0
	for name := range number {
		fastest = max(fastest, of[name].speed)
	}
	for i, c := range chosen {
		speed := cmp.Or(of[c.Interface].speed, math.MaxInt)
		if n, known := number[c.Interface]; known && speed >= fastest/2 {
			chosen[i].Rail = min(n, launch.MaxRail)
		}
	}
	return nil
}

// railNumbers returns the rails of interfaces with RDMA devices, or else with PCI functions; nil
// if no interface has either.
func railNumbers(chosen []addresses.Chosen, of map[string]adapter, planned map[string]int) map[string]int {
	var functions []string
	number := map[string]int{}
	for _, c := range chosen {
		a := of[c.Interface]
		if a.device != "" {
			number[c.Interface] = a.place
			if n, configured := planned[a.device]; configured {
				number[c.Interface] = n
			}
		}
		functions = append(functions, a.pci)
	}
	if len(number) > 0 {
		return number
	}
	slices.Sort(functions)
	functions = slices.DeleteFunc(slices.Compact(functions), func(pci string) bool { return pci == "" })
	for _, c := range chosen {
		if n := slices.Index(functions, of[c.Interface].pci); n >= 0 {
			number[c.Interface] = n
		}
	}
	if len(number) == 0 {
		return nil
	}
	return number
}
