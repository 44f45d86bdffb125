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
	// RoleNear is a GPU that an RDMA NIC may reach directly. It can serve far
	// ones.
	RoleNear = "near"
	// RoleFar is any other GPU.
	RoleFar = "far"
	// RoleRefused is a GPU that Peerlane cannot work with.
	RoleRefused = "refused"
)

// Kinds of lanes, and of their members.
const (
	// KindDirect is a lane whose NIC reads and writes the GPU's memory. No member of it
	// needs a server GPU; one can go through the CPU's memory.
	KindDirect = "direct"
	// KindStaged is a lane through server GPUs, which is what a relay is for. Other
	// members of it can be direct, or go through the CPU's memory.
	KindStaged = "staged"
	// KindBounce is a lane through the CPU's memory.
	KindBounce = "bounce"
)

// NearDirect is PlanConfig.Near for lanes of near GPUs that are direct and nothing else.
const NearDirect = "direct"

// PlanConfig is the administrator's part in a plan.
type Config struct {
	// Near says how GPUs that are near a NIC use the network: NearDirect over their own
	// NICs and directly; else also over other NICs, staged on the GPUs near those, where
	// that makes the slowest lane faster.
	Near string
	// GDR says how far from a NIC a GPU still counts as near.
	GDR GDRPolicy
	// Software lets lanes use software RDMA (rxe, siw), which cannot reach a
	// GPU's memory: for trying things out.
	Software bool
	// VirtualFunctions lets lanes use the virtual functions and subfunctions of a NIC
	// that they can use itself: without it these are left to other tenants.
	VirtualFunctions bool
	// AnyVendor plans GPUs of any maker, for study: nothing relays them.
	AnyVendor bool
	// Lanes are assigned as they stand, whatever the topology says.
	Lanes []Assignment
	// Exclude keeps devices from lanes.
	Exclude Exclude
	// Rails numbers NICs by name, so that the hosts of a cluster agree. The
	// others have their place in the host's list.
	Rails map[string]int
	// Groups are GPUs that containers ask for together, by name.
	Groups map[string][]string
	// Staging bounds what relays take from server GPUs.
	Staging StagingConfig
}

// GDRPolicy says over which paths a NIC may reach a GPU's memory directly.
type GDRPolicy struct {
	// The farthest path over which a NIC reads and writes a GPU's memory
	// directly: such a GPU is *near*, its lane is direct, and it can serve far
	// ones. PIX, PXB, P2C, PHB, NODE or SYS.
	MaxPath topo.PathType `toml:"max_path"`
	// The same for single NICs, by name: `mlx5_0 = "PHB"`.
	NICs map[string]topo.PathType `toml:"nics,omitempty"`
}

// Exclude names what no lane that the topology decides uses.
type Exclude struct {
	// GPUs that get no lane and serve none, by index, UUID or PCI address.
	GPUs []string `toml:"gpus,omitempty"`
	// NICs that carry none, by name.
	NICs []string `toml:"nics,omitempty"`
	// Pairs that do not work together: `["3", "mlx5_0"]` keeps the lane of GPU 3
	// from that NIC, and `["3", "1"]` keeps GPUs 3 and 1 from serving each other.
	Pairs [][]string `toml:"pairs,omitempty"`
}

// StagingConfig says what relays take from server GPUs, bytes.
type StagingConfig struct {
	// Slots is their number in each direction of a lane, striped over its server
	// GPUs, and SlotBytes the size of each.
	Slots     int
	SlotBytes uint64
	// Limit is the most that relays together may take from a GPU; nil for no
	// limit. GPUs has it for single ones, by index, UUID or PCI address.
	Limit *uint64
	GPUs  map[string]uint64
}

// bytes is what a lane takes from each of so many servers.
func (c StagingConfig) bytes(servers int) uint64 {
	slots := uint64(c.Slots+servers-1) / uint64(servers)
	return 2 * slots * c.SlotBytes
}

// bytesOn is what a lane takes from one of its servers: of its slots the part that its
// members there have of all that are staged.
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

// Assignment is a lane by configuration.
type Assignment struct {
	// The GPU: an index, a UUID or a PCI address.
	GPU string `json:"gpu" toml:"gpu"`
	// What kind of lane: direct, staged or bounce. Without it a lane with
	// servers is staged, and one without is direct where the GPU is near one of
	// the NICs, and bounces elsewhere.
	Kind string `json:"kind,omitempty" toml:"kind,omitempty"`
	// The GPUs to stage on, named as gpu is. A staged lane without any takes
	// those near its first NIC.
	Servers []string `json:"servers" toml:"servers,omitempty"`
	// NICs by name. They need not be in the topology: an emulated NIC is not.
	// Without any it is the NIC nearest to the first server.
	NICs []string `json:"nics" toml:"nics,omitempty"`
}

// Plan is the lanes of one host, in the order of its GPUs.
type Plan struct {
	Version int         `json:"version"`
	Source  topo.Source `json:"source"`
	GPUs    []topo.GPU  `json:"gpus"`
	NICs    []topo.NIC  `json:"nics"`
	Lanes   []Lane      `json:"lanes"`
	// CPUs and Switches are what GPUs and NICs hang on, for ContainerXML; empty in a plan of
	// an earlier release.
	CPUs     []topo.CPU    `json:"cpus,omitempty"`
	Switches []topo.Switch `json:"switches,omitempty"`
	// Groups are in the order of their names.
	Groups []Group `json:"groups,omitempty"`
	// Staging is what relays take from each GPU that serves, in their order.
	Staging []Staging `json:"staging,omitempty"`
	// Notes are sentences about the host as a whole.
	Notes []string `json:"notes,omitempty"`
}

// Lane is one GPU's way to the network.
type Lane struct {
	GPU  string `json:"gpu"`  // PCI address
	Role string `json:"role"` // RoleNear, RoleFar or RoleRefused
	// Kind is KindDirect, KindStaged or KindBounce; empty where there is no way.
	Kind  string `json:"kind,omitempty"`
	Relay bool   `json:"relay"` // whether Kind is KindStaged
	// Pinned says that configuration assigns it.
	Pinned bool `json:"pinned,omitempty"`
	// Members are the ways that its traffic takes, and how much of it each has.
	Members []Member `json:"members,omitempty"`
	// Servers are the PCI addresses of the GPUs that hold its staging memory, those of
	// its Members; none unless Relay.
	Servers []string `json:"servers"`
	// NICs are the names of all that it is striped over, those of its Members.
	NICs []string `json:"nics"`
	// Rail is the number of the first NIC: its place among the host's RDMA NICs,
	// from 0, where configuration gives it no other; -1 without a NIC. NICs that
	// only configuration knows come after them.
	Rail int `json:"rail"`
	// Path is the type of the way from the GPU to its first NIC without the
	// relay; DIS for a NIC that is not in the topology, and without one.
	Path topo.PathType `json:"path"`
	// Copy is the worst of the ways between the GPU and its servers, and Network
	// that between the servers and the NICs: type, and bandwidth of the narrowest
	// link. Nil unless Relay, and Network also where no NIC is in the topology.
	Copy    *topo.Path `json:"copy,omitempty"`
	Network *topo.Path `json:"network,omitempty"`
	// Bandwidth is the estimate of what it carries in each direction, GB/s, while
	// all lanes of the host are busy (Host.Estimate); 0 where the source does not
	// tell enough.
	Bandwidth float64 `json:"bandwidth"`
	// Compared is what decided for the relay or against it; nil where there was
	// nothing to decide.
	Compared *Comparison `json:"compared,omitempty"`
	// Reason is a sentence for people.
	Reason string `json:"reason"`
}

// Comparison is the estimate of a lane through the relay and through the CPU's
// memory, the other lanes as planned: GB/s in each direction, while all lanes are
// busy and with this one alone. Of a lane without the relay it is as it was when
// the relay was taken out.
type Comparison struct {
	Relay        float64 `json:"relay"`
	Without      float64 `json:"without"`
	RelayAlone   float64 `json:"relayAlone"`
	WithoutAlone float64 `json:"withoutAlone"`
}

// Group is GPUs that containers ask for together.
type Group struct {
	Name string   `json:"name"`
	GPUs []string `json:"gpus"` // PCI addresses, in the order of indices
}

// Staging is what relays may take from a server GPU, bytes.
type Staging struct {
	GPU string `json:"gpu"` // PCI address
	// PerContainer is what the relay of a container with one lane takes, and All
	// what those of one container for each of the Lanes take together.
	PerContainer uint64 `json:"perContainer"`
	Lanes        int    `json:"lanes"`
	All          uint64 `json:"all"`
	// Limit is the cap of all relays of the host together; nil for none.
	Limit *uint64 `json:"limit,omitempty"`
}

// Lane is the lane of the GPU that name means: an index, a UUID or a PCI
// address.
func (p *Plan) Lane(name string) (Lane, error) {
	gpu, err := p.GPU(name)
	if err != nil {
		return Lane{}, err
	}
	i := slices.IndexFunc(p.Lanes, func(l Lane) bool { return l.GPU == gpu.BusID })
	if i < 0 {
		return Lane{}, fmt.Errorf("GPU %s is in the plan and has no lane", gpu.BusID)
	}
	return p.Lanes[i], nil
}

// GPU is the GPU that name means: an index, a UUID or a PCI address.
func (p *Plan) GPU(name string) (topo.GPU, error) { return topo.FindGPU(p.GPUs, name) }

// SeveralHostsError says that a topology cannot be planned as one host.
type SeveralHostsError struct{ Hosts []string }

func (e *SeveralHostsError) Error() string {
	return fmt.Sprintf("planning: the topology has %d hosts (%s), and a plan is for one; choose it with peerlane plan --host N, from 0 to %d", len(e.Hosts), strings.Join(e.Hosts, ", "), len(e.Hosts)-1)
}

// MakePlan gives each GPU of a host a lane. The same host and configuration
// give the same plan, in whatever order the host lists its devices. A host on
// which nothing can be relayed has a plan as well, whose reasons say what is
// missing; an error is one of configuration, or a [SeveralHostsError].
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
	return &Plan{
		Version: Version, Source: h.Source, Notes: p.notes(lanes),
		GPUs: h.GPUs, NICs: planned(h.NICs), CPUs: h.CPUs, Switches: h.Switches, Lanes: lanes, Groups: groups, Staging: p.staging(lanes),
	}, nil
}

// planned are NICs with what a plan can depend on: new firmware, or another address in
// the subnet, makes no plan stale.
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

// sorted is a host with its devices in order: GPUs by index, NICs by name,
// others by address.
func sortedHost(h *topo.Host) *topo.Host {
	s := *h
	s.CPUs, s.Switches = slices.Clone(h.CPUs), slices.Clone(h.Switches)
	s.GPUs, s.NICs = slices.Clone(h.GPUs), slices.Clone(h.NICs)
	slices.SortStableFunc(s.CPUs, func(a, b topo.CPU) int { return cmp.Compare(a.NUMA, b.NUMA) })
	slices.SortStableFunc(s.Switches, func(a, b topo.Switch) int { return topo.CompareBusID(a.BusID, b.BusID) })
	slices.SortStableFunc(s.GPUs, func(a, b topo.GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), topo.CompareBusID(a.BusID, b.BusID))
	})
	slices.SortStableFunc(s.NICs, func(a, b topo.NIC) int { return topo.CompareNatural(a.Name, b.Name) })
	return &s
}

// groups are those of the configuration.
func (p *planner) groups() ([]Group, error) {
	var groups []Group
	for _, name := range slices.Sorted(maps.Keys(p.config.Groups)) {
		var places []int
		for _, gpu := range p.config.Groups[name] {
			g, err := p.findWorking(gpu)
			if err == nil && slices.Contains(places, g) {
				err = fmt.Errorf("GPU %d is named twice", p.host.GPUs[g].Index)
			}
			if err != nil {
				return nil, fmt.Errorf("groups.%s: %w", name, err)
			}
			places = append(places, g)
		}
		if len(places) == 0 {
			return nil, fmt.Errorf("groups.%s: a group needs a GPU", name)
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

// staging is what lanes take from each GPU that serves.
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
