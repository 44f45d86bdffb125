package planner

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/topo"
)

// Roles of a GPU.
const (
	// RoleNear is a GPU that an RDMA NIC may reach directly. A near GPU can serve far GPUs.
	RoleNear = "near"
	// RoleFar is a GPU that is not near and not refused.
	RoleFar = "far"
	// RoleRefused is a GPU that Peerlane cannot use.
	RoleRefused = "refused"
)

// Kinds of lanes and of members.
const (
	// KindDirect is a lane whose NIC reads and writes the memory of the GPU. No member of the lane
	// needs a server GPU; a member can go through the memory of the CPU.
	KindDirect = "direct"
	// KindStaged is a lane through server GPUs, with a relay. The lane can have direct members and
	// members through the memory of the CPU too.
	KindStaged = "staged"
	// KindBounce is a lane through the memory of the CPU.
	KindBounce = "bounce"
)

// nearDirect is the value of Config.Near that allows near GPUs only direct lanes.
const nearDirect = "direct"

// Config is the part of the administrator in a plan.
type Config struct {
	// Near is the rule for GPUs near a NIC. With nearDirect, the GPU uses only NICs near the GPU,
	// directly. With any other value, the GPU also uses distant NICs, staged on the GPUs near the
	// NIC, if the slowest lane becomes faster.
	Near string
	// GDR is the largest distance between a NIC and a near GPU.
	GDR GDRPolicy
	// Software lets lanes use software RDMA (rxe, siw), which cannot reach the memory of a GPU. Use
	// it for trials.
	Software bool
	// VirtualFunctions lets lanes use the virtual functions and subfunctions of a NIC that lanes
	// can use too. Otherwise the planner leaves the functions to other tenants.
	VirtualFunctions bool
	// AnyVendor plans GPUs of any vendor, for study: no relay supports the GPUs.
	AnyVendor bool
	// Lanes are assignments that override the topology.
	Lanes []Assignment
	// Exclude keeps devices from lanes.
	Exclude Exclude
	// Rails numbers NICs by name, so that the hosts of a cluster agree. The number of an unlisted
	// NIC is the index in the list of the host.
	Rails map[string]int
	// Groups are GPUs that containers request together, by name of the group.
	Groups map[string][]string
	// Staging bounds the memory that relays take from server GPUs.
	Staging StagingConfig
}

// GDRPolicy limits the paths over which a NIC may reach the memory of a GPU directly.
type GDRPolicy struct {
	// The farthest path over which a NIC reads and writes the memory of a GPU directly:
	// PIX, PXB, P2C, PHB, NODE or SYS. Up to that path, the GPU is *near*, the lane is direct, and
	// the GPU can serve far GPUs.
	MaxPath topo.PathType `toml:"max_path"`
	// The farthest path of single NICs, by name: `mlx5_0 = "PHB"`.
	NICs map[string]topo.PathType `toml:"nics,omitempty"`
}

// Exclude names the devices and pairs of devices that only assigned lanes may use.
type Exclude struct {
	// GPUs that get no lane and serve no lane, by index, UUID or PCI address.
	GPUs []string `toml:"gpus,omitempty"`
	// NICs that carry no lane, by name.
	NICs []string `toml:"nics,omitempty"`
	// Pairs of devices that do not work together: `["3", "mlx5_0"]` keeps the lane of GPU 3 from mlx5_0,
	// and `["3", "1"]` keeps GPU 3 from serving GPU 1, and GPU 1 from serving GPU 3.
	Pairs [][]string `toml:"pairs,omitempty"`
}

// StagingConfig is the memory that relays take from server GPUs, bytes.
type StagingConfig struct {
	// Slots is the number of slots per direction of a lane, striped over the server GPUs. SlotBytes
	// is the size of a slot.
	Slots     int
	SlotBytes uint64
	// Limit is the maximum for the sum of the relays on a GPU; nil for no limit. GPUs overrides
	// Limit for single GPUs, by index, UUID or PCI address.
	Limit *uint64
	GPUs  map[string]uint64
}

// bytes returns the memory that a lane takes from a server GPU, with even shares.
func (c StagingConfig) bytes(servers int) uint64 {
	slots := uint64(c.Slots+servers-1) / uint64(servers)
	return 2 * slots * c.SlotBytes
}

// bytesOn returns the memory that a lane takes from a server GPU. The share of the slots is the
// weight of the members on the server, over the weight of the staged members.
func (c StagingConfig) bytesOn(l *Lane, server string) uint64 {
	own, all := 0, 0
	for _, m := range l.Members {
		if m.Server != l.GPU {
			all += m.Weight
		}
		if m.Server == server {
			own += m.Weight
		}
	}
	if own == 0 {
		return c.bytes(len(l.Servers))
	}
	return 2 * uint64(max(1, (c.Slots*own+all-1)/all)) * c.SlotBytes
}

// Assignment is a lane that the configuration sets.
type Assignment struct {
	// The GPU: an index, a UUID or a PCI address.
	GPU string `json:"gpu" toml:"gpu"`
	// The kind of lane: direct, staged or bounce. The default with servers is staged. The default without
	// servers is direct if the GPU is near an assigned NIC, and bounce otherwise.
	Kind string `json:"kind,omitempty" toml:"kind,omitempty"`
	// The GPUs to stage on, by index, UUID or PCI address. The default of a staged lane
	// is the GPUs near the first NIC.
	Servers []string `json:"servers" toml:"servers,omitempty"`
	// The NICs, by name. A NIC outside the topology, such as a software device, is allowed. The default
	// is the NIC nearest to the first server.
	NICs []string `json:"nics" toml:"nics,omitempty"`
}

// Plan holds the lanes of a host, in the order of the GPUs.
type Plan struct {
	Version int         `json:"version"`
	Source  topo.Source `json:"source"`
	GPUs    []topo.GPU  `json:"gpus"`
	NICs    []topo.NIC  `json:"nics"`
	Lanes   []Lane      `json:"lanes"`
	// CPUs and Switches connect GPUs and NICs, for ContainerXML; empty in a plan of an earlier
	// release.
	CPUs     []topo.CPU    `json:"cpus,omitempty"`
	Switches []topo.Switch `json:"switches,omitempty"`
	// Groups are in the order of names.
	Groups []Group `json:"groups,omitempty"`
	// Staging is the memory that relays take from server GPUs, in the order of GPUs.
	Staging []Staging `json:"staging,omitempty"`
	// Notes are sentences about the host as a whole.
	Notes []string `json:"notes,omitempty"`
}

// Lane holds the routes of a GPU to the network.
type Lane struct {
	GPU  string `json:"gpu"`  // PCI address
	Role string `json:"role"` // RoleNear, RoleFar or RoleRefused
	// Kind is KindDirect, KindStaged or KindBounce; empty without a route.
	Kind  string `json:"kind,omitempty"`
	Relay bool   `json:"relay"` // whether Kind is KindStaged
	// Pinned reports whether the configuration assigns the lane.
	Pinned bool `json:"pinned,omitempty"`
	// Members are the routes of the traffic, with the share of the traffic per route.
	Members []Member `json:"members,omitempty"`
	// Servers are the PCI addresses of the GPUs that hold the staging memory, from Members; empty
	// without Relay.
	Servers []string `json:"servers"`
	// NICs are the names of the NICs of Members.
	NICs []string `json:"nics"`
	// Rail is the number of the first NIC; -1 without a NIC. Without a number in the configuration,
	// Rail is the index in the RDMA NICs of the host. NICs outside the topology have the next
	// numbers.
	Rail int `json:"rail"`
	// Path is the type of the path from the GPU to the first NIC without the relay; DIS without a
	// NIC and for a NIC outside the topology.
	Path topo.PathType `json:"path"`
	// Copy is the worst path between the GPU and a server, and Network the worst path between a
	// server and a NIC: the worst type, and the bandwidth of the narrowest link. Copy is nil unless
	// Relay. Network is nil unless Relay, and if no NIC is in the topology.
	Copy    *topo.Path `json:"copy,omitempty"`
	Network *topo.Path `json:"network,omitempty"`
	// Bandwidth is the estimated rate per direction, GB/s, while every lane of the host is busy
	// (Plan.Estimate); 0 if the source does not state every bandwidth.
	Bandwidth float64 `json:"bandwidth"`
	// Compared has the estimates that decide between relay and CPU memory; nil without an
	// alternative.
	Compared *Comparison `json:"compared,omitempty"`
	// Reason explains the lane in a sentence.
	Reason string `json:"reason"`
}

// Comparison is the estimate of a lane through the relay and through the memory of the CPU, GB/s
// per direction. Relay and Without are rates while every lane is busy, with the rest of the lanes
// as planned. RelayAlone and WithoutAlone are rates with the rest of the lanes idle.
type Comparison struct {
	Relay        float64 `json:"relay"`
	Without      float64 `json:"without"`
	RelayAlone   float64 `json:"relayAlone"`
	WithoutAlone float64 `json:"withoutAlone"`
}

// Group holds GPUs that containers request together.
type Group struct {
	Name string   `json:"name"`
	GPUs []string `json:"gpus"` // PCI addresses, in the order of indices
}

// Staging is the memory that relays may take from a server GPU, bytes.
type Staging struct {
	GPU string `json:"gpu"` // PCI address
	// PerContainer is the maximum for the relay of a container with a single lane. All is the sum
	// with a container for every lane on the GPU.
	PerContainer uint64 `json:"perContainer"`
	Lanes        int    `json:"lanes"`
	All          uint64 `json:"all"`
	// Limit is the maximum for the sum of the relays of the host; nil for no limit.
	Limit *uint64 `json:"limit,omitempty"`
}

// Lane returns the lane of a GPU. name is an index, a UUID or a PCI address.
func (p *Plan) Lane(name string) (Lane, error) {
	gpu, err := p.GPU(name)
	if err != nil {
		return Lane{}, err
	}
	i := slices.IndexFunc(p.Lanes, func(l Lane) bool { return l.GPU == gpu.BusID })
	if i < 0 {
		return Lane{}, fmt.Errorf("GPU %s is in the plan but has no lane", gpu.BusID)
	}
	return p.Lanes[i], nil
}

// GPU returns a GPU of the plan. name is an index, a UUID or a PCI address.
func (p *Plan) GPU(name string) (topo.GPU, error) { return topo.FindGPU(p.GPUs, name) }

// SeveralHostsError reports a topology with more than one host.
type SeveralHostsError struct{ Hosts []string }

func (e *SeveralHostsError) Error() string {
	return fmt.Sprintf("planning: the topology has %d hosts (%s), but a plan describes one host; select it with "+
		"peerlane plan --host N, from 0 to %d", len(e.Hosts), strings.Join(e.Hosts, ", "), len(e.Hosts)-1)
}

// Make returns a plan with a lane for every GPU of a host. Equal hosts and configurations give
// equal plans, in any order of the devices. A host without relays has a plan too: the reasons of
// the lanes name the missing device. An error is an error of the configuration, or a
// [SeveralHostsError].
func Make(h *topo.Host, c Config) (*Plan, error) {
	if hosts := h.Hosts(); len(hosts) > 1 {
		return nil, &SeveralHostsError{hosts}
	}
	h = sortedHost(h)
	p, err := newPlanner(h, c)
	if err != nil {
		return nil, err
	}
	groups, err := p.groups()
	if err != nil {
		return nil, err
	}
	lanes := p.plan()
	plan := &Plan{
		Version: Version, Source: h.Source, Notes: p.notes(lanes),
		GPUs: h.GPUs, NICs: planned(h.NICs), CPUs: h.CPUs, Switches: h.Switches, Lanes: lanes, Groups: groups,
		Staging: p.staging(lanes),
	}
	plan.sortByIndex()
	return plan, nil
}

// sortByIndex sorts GPUs, lanes, staging and the members of groups by the index of the GPU.
func (p *Plan) sortByIndex() {
	index := map[string]int{}
	for _, g := range slices.Backward(p.GPUs) {
		index[g.BusID] = g.Index
	}
	slices.SortStableFunc(p.GPUs, func(a, b topo.GPU) int { return cmp.Compare(a.Index, b.Index) })
	slices.SortStableFunc(p.Lanes, func(a, b Lane) int { return cmp.Compare(index[a.GPU], index[b.GPU]) })
	slices.SortStableFunc(p.Staging, func(a, b Staging) int { return cmp.Compare(index[a.GPU], index[b.GPU]) })
	for _, g := range p.Groups {
		slices.SortStableFunc(g.GPUs, func(a, b string) int { return cmp.Compare(index[a], index[b]) })
	}
}

// planned returns copies of NICs without the fields that no plan depends on: new firmware, or
// another address in the subnet, makes no plan stale.
func planned(nics []topo.NIC) []topo.NIC {
	nics = slices.Clone(nics)
	for i := range nics {
		nics[i].Firmware = ""
		nics[i].Ports = slices.Clone(nics[i].Ports)
		for j := range nics[i].Ports {
			p := &nics[i].Ports[j]
			p.PhysicalState, p.GUID, p.LID, p.SMLID = "", "", 0, 0
		}
	}
	return nics
}

// sortedHost returns a copy of a host with sorted devices: GPUs and switches by address, NICs by
// name, CPUs by NUMA node.
func sortedHost(h *topo.Host) *topo.Host {
	s := *h
	s.CPUs, s.Switches = slices.Clone(h.CPUs), slices.Clone(h.Switches)
	s.GPUs, s.NICs = slices.Clone(h.GPUs), slices.Clone(h.NICs)
	slices.SortStableFunc(s.CPUs, func(a, b topo.CPU) int { return cmp.Compare(a.NUMA, b.NUMA) })
	slices.SortStableFunc(s.Switches, func(a, b topo.Switch) int { return topo.CompareBusID(a.BusID, b.BusID) })
	slices.SortStableFunc(s.GPUs, func(a, b topo.GPU) int {
		return cmp.Or(topo.CompareBusID(a.BusID, b.BusID), cmp.Compare(a.Index, b.Index))
	})
	slices.SortStableFunc(s.NICs, func(a, b topo.NIC) int { return topo.CompareNatural(a.Name, b.Name) })
	return &s
}

// groups returns the groups of the configuration.
func (p *planner) groups() ([]Group, error) {
	var groups []Group
	for _, name := range slices.Sorted(maps.Keys(p.config.Groups)) {
		var places []int
		for _, gpu := range p.config.Groups[name] {
			g, err := p.findWorking(gpu)
			if err == nil && slices.Contains(places, g) {
				err = &twiceError{gpu: p.host.GPUs[g].Index}
			}
			if err != nil {
				return nil, &keyError{"groups." + name, err}
			}
			places = append(places, g)
		}
		if len(places) == 0 {
			return nil, &keyError{"groups." + name, errEmptyGroup}
		}
		slices.Sort(places)
		group := Group{Name: name}
		for _, g := range places {
			group.GPUs = append(group.GPUs, p.host.GPUs[g].BusID)
		}
		groups = append(groups, group)
	}
	return groups, nil
}

// staging returns the memory that lanes take from server GPUs.
func (p *planner) staging(lanes []Lane) []Staging {
	if p.config.Staging.Slots == 0 {
		return nil
	}
	var list []Staging
	for g, gpu := range p.host.GPUs {
		s := Staging{GPU: gpu.BusID, Limit: p.stagingLimit[g]}
		for _, l := range lanes {
			if slices.Contains(l.Servers, gpu.BusID) {
				s.Lanes++
				bytes := p.config.Staging.bytesOn(&l, gpu.BusID)
				s.PerContainer = max(s.PerContainer, bytes)
				s.All += bytes
			}
		}
		if s.Lanes > 0 {
			list = append(list, s)
		}
	}
	return list
}
