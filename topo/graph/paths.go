package graph

import (
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/topo"
)

// Pair is the path from a device to another device.
type Pair struct {
	// From and To are the PCI addresses of GPUs and the names of NICs.
	From string `json:"from"`
	To   string `json:"to"`
	// FromHost and ToHost are the hosts of the devices in a file with several hosts.
	FromHost string `json:"fromHost,omitempty"`
	ToHost   string `json:"toHost,omitempty"`
	// Path is the nearest path, before any policy.
	topo.Path
	// Hops is the number of links on the path; 0 where unknown.
	Hops int `json:"hops"`
	// Reason is a sentence that names the links on the path.
	Reason string `json:"reason"`
	// PXN is the path from a GPU to a NIC through another GPU; nil where NCCL uses no PXN.
	PXN *topo.PXNPath `json:"pxn,omitempty"`
	// Policy is the path after NCCL's default policies; nil where unknown: between two NICs,
	// for a NIC that is down, and for a source without a tree.
	Policy *topo.PolicyPath `json:"policy,omitempty"`
}

// All returns the nearest paths between every two devices, in the order of GPUs and NICs, by
// the given rules.
func All(h *topo.Host, rules topo.Rules) []Pair {
	n := len(h.GPUs) + len(h.NICs)
	return slices.AppendSeq(make([]Pair, 0, max(0, n*(n-1))), Each(h, rules))
}

// Each yields the pairs of All in sequence: the pairs of hundreds of devices take tens of
// megabytes.
func Each(h *topo.Host, rules topo.Rules) iter.Seq[Pair] {
	return func(yield func(Pair) bool) {
		var after *policy
		if h.Matrix == nil {
			after = newPolicy(h)
		}
		ends := Devices(h)
		finder := NewPathFinder(h, rules)
		var to []func(Endpoint) Nearest
		for _, b := range ends {
			to = append(to, finder.To(b))
			finder.keep()
		}
		for i, a := range ends {
			for j, b := range ends {
				if i == j {
					continue
				}
				w := to[j](a)
				pair := Pair{
					From: a.Name, FromHost: a.ID.Host, To: b.Name, ToHost: b.ID.Host,
					Path: w.Path, Hops: w.hops, Reason: w.reason(a, b),
				}
				if after != nil {
					pair.Policy, pair.PXN = after.answer(i, j).fields(after)
				}
				if !yield(pair) {
					return
				}
			}
		}
	}
}

// ToNICs returns the paths from a GPU to the given NICs, by RulesPlan.
func ToNICs(h *topo.Host, gpu topo.GPU, nics []topo.NIC) (pairs []Pair) {
	finder, from := NewPathFinder(h, topo.RulesPlan), gpuEndpoint(gpu)
	for _, nic := range nics {
		to := NICEndpoint(nic, h.Source)
		w := finder.To(to)(from)
		pairs = append(pairs, Pair{From: from.Name, To: to.Name, Path: w.Path, Hops: w.hops, Reason: w.reason(from, to)})
	}
	return pairs
}

// Table has the types and bandwidths of a host's paths. Devices whose paths are equal share a row:
// a large host has millions of pairs, but few devices that differ.
type Table struct {
	// Paths are the distinct paths.
	Paths []topo.Path
	first []int     // by device: the first device with the same row
	rows  [][]int32 // by device that is the first with its row: places in Paths
}

// NewTable finds types and bandwidths of the paths, without their links and policies.
func NewTable(h *topo.Host, rules topo.Rules) *Table {
	ends := Devices(h)
	finder := NewPathFinder(h, rules)
	t := &Table{first: finder.alike(ends), rows: make([][]int32, len(ends))}
	var firsts []int
	for i, first := range t.first {
		if first == i {
			firsts = append(firsts, i)
			t.rows[i] = slices.Repeat([]int32{-1}, len(ends))
		}
	}
	known := map[topo.Path]int32{}
	var last topo.Path // consecutive devices often have the same path
	lastAt := int32(-1)
	unknown := func(i, j int) bool { return t.rows[t.first[i]][j] < 0 }
	finder.between(ends, firsts, unknown, func(i, j int, w Nearest) {
		if lastAt < 0 || w.Path != last {
			at, ok := known[w.Path]
			if !ok {
				at = int32(len(t.Paths))
				known[w.Path] = at
				t.Paths = append(t.Paths, w.Path)
			}
			last, lastAt = w.Path, at
		}
		t.rows[t.first[i]][j] = lastAt
	})
	for _, i := range firsts {
		for j, first := range t.first {
			t.rows[i][j] = t.rows[i][first]
		}
	}
	return t
}

// Row returns the paths from a device, an index among the GPUs and then the NICs, to each other
// device, as indices of t.Paths. The cell of the device itself is that of another device with the
// same row, or -1.
func (t *Table) Row(from int) []int32 { return t.rows[t.first[from]] }

// First returns the first device whose row is that of the device.
func (t *Table) First(device int) int { return t.first[device] }

// DeviceError reports a name without a device, or with devices of several hosts.
type DeviceError struct {
	Name  string
	Hosts []string // two hosts with the name; nil for none
}

func (e *DeviceError) Error() string {
	if e.Hosts == nil {
		return fmt.Sprintf("no path to %q: not the PCI address of a GPU or NIC, nor the name of a NIC of this host", e.Name)
	}
	return fmt.Sprintf("no path to %q: hosts %s and %s both have it; name it as %s/%s", e.Name, e.Hosts[0], e.Hosts[1],
		e.Hosts[0], e.Name)
}

// Between finds the nearest path between two devices. A name is a PCI address or a NIC's name;
// "HOST/NAME" for several hosts. The rules are NCCL's, before the policies on P2P, GPUDirect RDMA
// and PXN. The error is a [DeviceError].
func Between(h *topo.Host, busA, busB string) (topo.Path, error) {
	devices := Devices(h)
	a, err := findDevice(devices, busA)
	if err != nil {
		return topo.Path{}, err
	}
	b, err := findDevice(devices, busB)
	if err != nil {
		return topo.Path{}, err
	}
	return NewPathFinder(h, topo.RulesNCCL).To(b)(a).Path, nil
}

func findDevice(devices []Endpoint, name string) (Endpoint, error) {
	host, local, qualified := strings.Cut(name, "/")
	named := func(d Endpoint) bool { return d.Name == name }
	if !qualified || slices.ContainsFunc(devices, named) { // a file's names can have any character
		host, local, qualified = "", name, false
	}
	busID, notBusID := topo.ParseBusID(local)
	var found []Endpoint
	for _, suits := range []func(Endpoint) bool{
		func(d Endpoint) bool { return d.Name == local },
		func(d Endpoint) bool { return notBusID == nil && d.busID == busID && !d.isNIC },
		func(d Endpoint) bool { return notBusID == nil && d.busID == busID },
	} {
		for _, d := range devices {
			if suits(d) && (!qualified || d.ID.Host == host) {
				found = append(found, d)
			}
		}
		if len(found) > 0 {
			break
		}
	}
	switch {
	case len(found) == 0:
		return Endpoint{}, &DeviceError{Name: name}
	case len(found) > 1 && found[0].ID.Host != found[1].ID.Host:
		return Endpoint{}, &DeviceError{name, []string{found[0].ID.Host, found[1].ID.Host}}
	}
	return found[0], nil
}
