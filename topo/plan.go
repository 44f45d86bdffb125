package topo

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Roles of a GPU.
const (
	// RoleNear is a GPU that an RDMA NIC reaches without passing the CPU. It
	// can serve far ones.
	RoleNear = "near"
	// RoleFar is any other GPU.
	RoleFar = "far"
	// RoleRefused is a GPU that Peerlane cannot work with.
	RoleRefused = "refused"
)

// PlanConfig is the administrator's part in a plan.
type PlanConfig struct {
	// GDRMaxPath is the farthest path over which a GPU still counts as near a
	// NIC. The zero value stands for PXB.
	GDRMaxPath PathType `json:"gdrMaxPath" toml:"gdr_max_path"`
	// Software lets lanes use software RDMA (rxe, siw), which cannot reach a
	// GPU's memory: for trying things out.
	Software bool `json:"software,omitempty" toml:"software"`
	// Lanes are assigned as they stand, whatever the topology says.
	Lanes []Assignment `json:"lanes,omitempty" toml:"lane"`
}

// Assignment is a lane by configuration.
type Assignment struct {
	// GPU is an index, a UUID or a PCI address.
	GPU string `json:"gpu" toml:"gpu"`
	// Servers are the GPUs to stage on, named as GPU is; none for a lane that
	// is not relayed.
	Servers []string `json:"servers" toml:"servers"`
	// NICs are names. They need not be in the topology: an emulated NIC is
	// not. None stands for the NIC nearest to the first server.
	NICs []string `json:"nics" toml:"nics"`
}

// Plan is the lanes of one host, in the order of its GPUs.
type Plan struct {
	Version int    `json:"version"`
	Source  Source `json:"source"`
	GPUs    []GPU  `json:"gpus"`
	NICs    []NIC  `json:"nics"`
	Lanes   []Lane `json:"lanes"`
	// Notes are sentences about the host as a whole.
	Notes []string `json:"notes,omitempty"`
}

// Lane is one GPU's way to the network.
type Lane struct {
	GPU   string `json:"gpu"`  // PCI address
	Role  string `json:"role"` // RoleNear, RoleFar or RoleRefused
	Relay bool   `json:"relay"`
	// Servers are the PCI addresses of the GPUs that hold its staging memory;
	// none unless Relay.
	Servers []string `json:"servers"`
	NICs    []string `json:"nics"`
	// Rail is the place of the first NIC among the host's RDMA NICs, from 0;
	// -1 without a NIC. NICs that only configuration knows come after them.
	Rail int `json:"rail"`
	// Path and Bandwidth (GB/s in each direction) are those from the GPU to
	// its first NIC without the relay; DIS and 0 for a NIC that is not in the
	// topology, and without one.
	Path      PathType `json:"path"`
	Bandwidth float64  `json:"bandwidth"`
	// Reason is a sentence for people.
	Reason string `json:"reason"`
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
func (p *Plan) GPU(name string) (GPU, error) { return findGPU(p.GPUs, name) }

// MakePlan gives each GPU of a host a lane. The same host and configuration
// give the same plan. A host on which nothing can be relayed has a plan as
// well, whose reasons say what is missing; an error is always one of
// configuration.
func MakePlan(h *Host, c PlanConfig) (*Plan, error) {
	limit := cmp.Or(c.GDRMaxPath, PXB)
	switch limit {
	case PIX, PXB, P2C, PHB, NODE, SYS:
	default:
		return nil, fmt.Errorf("gdr_max_path: %v is no path from a GPU to a NIC; PIX PXB P2C PHB NODE SYS are", limit)
	}
	if hosts := h.hosts(); len(hosts) > 1 {
		return nil, fmt.Errorf("planning: the topology has %d hosts (%s), and a plan is for one", len(hosts), strings.Join(hosts, ", "))
	}
	p := newPlanner(h, c, limit)
	for _, a := range c.Lanes {
		if err := p.assign(a); err != nil {
			return nil, fmt.Errorf("plan.lane for GPU %q: %w", a.GPU, err)
		}
	}
	p.spread()
	for g := range h.GPUs {
		if p.lanes[g] == nil {
			p.lanes[g] = p.lane(g)
		}
	}
	plan := &Plan{
		Version: PlanVersion, Source: h.Source, Notes: p.notes(),
		GPUs: slices.Clone(h.GPUs), NICs: slices.Clone(h.NICs), Lanes: []Lane{},
	}
	for _, l := range p.lanes {
		plan.Lanes = append(plan.Lanes, *l)
	}
	return plan, nil
}

// lane writes down what spread decided.
func (p *planner) lane(g int) *Lane {
	l := &Lane{GPU: p.gpus[g].BusID, Role: RoleFar, Servers: []string{}, NICs: []string{}, Rail: -1, Path: DIS}
	if why := p.gpus[g].refusal(); why != "" {
		l.Role, l.Reason = RoleRefused, why
		return l
	}
	n := p.choice[g]
	if n < 0 {
		l.Reason = p.nothing()
		return l
	}
	nic, path := p.nics[n].Name, p.toNIC[g][n]
	l.NICs, l.Path, l.Bandwidth, l.Rail = []string{nic}, path.Type, path.Bandwidth, p.rail(nic)
	switch {
	case p.near(g, n):
		l.Role = RoleNear
		l.Reason = fmt.Sprintf("%s reads and writes its memory directly (%s), so no relay is needed", nic, describe(path))
	case len(p.servers[n]) == 0:
		l.Reason = fmt.Sprintf("%s is the nearest NIC (%s), and no GPU of this host is near enough to a NIC (%v) to relay for it",
			nic, describe(path), p.limit)
	default:
		l.Relay = true
		for _, s := range p.servers[n] {
			l.Servers = append(l.Servers, p.gpus[s].BusID)
		}
		chosen := "the nearest NIC"
		if p.nearest(g) != n {
			chosen = "chosen to spread the lanes evenly"
		}
		l.Reason = fmt.Sprintf("%s, %s, is far (%s), so its traffic is staged on %s, near that NIC (copies: %s)",
			nic, chosen, describe(path), p.names(p.servers[n]), describe(p.copyPath(g, p.servers[n])))
	}
	return l
}

// nothing says why there is no NIC to choose.
func (p *planner) nothing() string {
	var without []string
	for _, n := range p.nics {
		switch {
		case n.Ethernet:
			without = append(without, n.Name+" has no RDMA")
		case n.refusal() != "":
			without = append(without, n.Name+": "+n.refusal())
		case n.Software && !p.software:
			without = append(without, n.Name+" is software RDMA, which is planned only with --software")
		case !n.Active():
			without = append(without, n.Name+" has no active port")
		default:
			without = append(without, "no path leads to "+n.Name)
		}
	}
	what := "this host has no RDMA NIC"
	if len(without) > 0 {
		what = "this host has no RDMA NIC to use: " + strings.Join(without, ", ")
	}
	return what + "; so no GPU is near one and nothing can be relayed, unless [[plan.lane]] in config.toml assigns servers and NICs"
}

func (p *planner) notes() []string {
	notes := slices.Clone(p.host.Notes)
	if len(p.gpus) == 0 {
		notes = append(notes, "this host has no GPU, so the plan has no lane")
	}
	for _, n := range p.nics {
		if n.refusal() == "" && !n.Active() {
			notes = append(notes, fmt.Sprintf("NIC %s has no active port (%s) and serves no lane that the topology decides", n.Name, states(n)))
		}
	}
	return notes
}

func states(n NIC) string {
	var s []string
	for _, p := range n.Ports {
		s = append(s, fmt.Sprintf("port %d %s", p.Number, p.State))
	}
	return strings.Join(s, ", ")
}

func describe(p Path) string {
	if p.Type == DIS || p.Bandwidth == 0 { // a source can tell types alone
		return p.Type.String()
	}
	return fmt.Sprintf("%v, %s GB/s", p.Type, strconv.FormatFloat(p.Bandwidth, 'g', 4, 64))
}

// names lists GPUs by their indices: "GPU 0", "GPU 0, 1 and 4".
func (p *planner) names(gpus []int) string {
	var s []string
	for _, g := range gpus {
		s = append(s, strconv.Itoa(p.gpus[g].Index))
	}
	last := len(s) - 1
	if last == 0 {
		return "GPU " + s[0]
	}
	return "GPUs " + strings.Join(s[:last], ", ") + " and " + s[last]
}
