package topo

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// planner decides on one host. GPUs and NICs are their places in host's lists.
type planner struct {
	host  *Host
	limit PathType
	// software says that lanes may use software RDMA.
	software bool
	gpus     []GPU
	nics     []NIC
	toNIC    [][]Path // [GPU][NIC]
	toGPU    [][]Path // [GPU][GPU]
	servers  [][]int  // [NIC]: the GPUs that are near it
	load     []float64
	choice   []int   // [GPU]: its NIC, or -1
	lanes    []*Lane // [GPU]: those that are settled
	rails    map[string]int
}

func newPlanner(h *Host, c PlanConfig, limit PathType) *planner {
	p := &planner{
		host: h, limit: limit, software: c.Software, gpus: h.GPUs, nics: h.NICs,
		toNIC: make([][]Path, len(h.GPUs)), toGPU: make([][]Path, len(h.GPUs)),
		servers: make([][]int, len(h.NICs)), load: make([]float64, len(h.NICs)),
		choice: make([]int, len(h.GPUs)), lanes: make([]*Lane, len(h.GPUs)),
		rails: map[string]int{},
	}
	finder := newPathFinder(h, rulesPlan)
	for g, gpu := range h.GPUs {
		p.choice[g] = -1
		to := finder.from(gpuEndpoint(gpu))
		for _, nic := range h.NICs {
			p.toNIC[g] = append(p.toNIC[g], to(nicEndpoint(nic, h.Source)).Path)
		}
		for _, peer := range h.GPUs {
			p.toGPU[g] = append(p.toGPU[g], to(gpuEndpoint(peer)).Path)
		}
	}
	for n, nic := range h.NICs {
		if nic.refusal() == "" && (p.software || !nic.Software) {
			p.rail(nic.Name)
		}
		for g := range h.GPUs {
			if p.near(g, n) && h.GPUs[g].refusal() == "" {
				p.servers[n] = append(p.servers[n], g)
			}
		}
	}
	return p
}

// usable NICs can carry a lane.
func (p *planner) usable(n int) bool {
	nic := p.nics[n]
	return nic.refusal() == "" && nic.Active() && (p.software || !nic.Software)
}

func (p *planner) near(g, n int) bool { return p.usable(n) && p.toNIC[g][n].Type <= p.limit }

// candidates are the NICs that GPU g may use: those near it; else those that
// another GPU can relay to; else any that it can reach.
func (p *planner) candidates(g int) []int {
	for _, suits := range []func(n int) bool{
		func(n int) bool { return p.near(g, n) },
		func(n int) bool { return p.usable(n) && len(p.servers[n]) > 0 },
		func(n int) bool { return p.usable(n) && p.toNIC[g][n].Type < DIS },
	} {
		var found []int
		for n := range p.nics {
			if suits(n) {
				found = append(found, n)
			}
		}
		if found != nil {
			return found
		}
	}
	return nil
}

// compareNICs orders NICs by their distance from GPU g.
func (p *planner) compareNICs(g, a, b int) int {
	x, y := p.toNIC[g][a], p.toNIC[g][b]
	return cmp.Or(cmp.Compare(x.Type, y.Type), cmp.Compare(y.Bandwidth, x.Bandwidth))
}

// nearest is the NIC that GPU g now uses, or one that is nearer.
func (p *planner) nearest(g int) int {
	best := p.choice[g]
	for _, n := range p.candidates(g) {
		if p.compareNICs(g, n, best) < 0 {
			best = n
		}
	}
	return best
}

// spread chooses a NIC for every GPU that has no lane yet: the nearest, of
// equally near ones the least loaded. Then lanes move from loaded NICs to
// others as long as that evens out the load and makes no way worse.
func (p *planner) spread() {
	var open []int
	for g := range p.gpus {
		if p.lanes[g] == nil && p.gpus[g].refusal() == "" {
			open = append(open, g)
		}
	}
	// Near ones choose first: far ones can be relayed anywhere.
	slices.SortStableFunc(open, func(a, b int) int { return cmp.Compare(p.farness(a), p.farness(b)) })
	for _, g := range open {
		candidates := p.candidates(g)
		if len(candidates) == 0 {
			continue
		}
		n := slices.MinFunc(candidates, func(a, b int) int {
			return cmp.Or(p.compareNICs(g, a, b), cmp.Compare(p.loadWith(a, 1), p.loadWith(b, 1)))
		})
		p.choice[g] = n
		p.load[n]++
	}
	for p.move(open) {
	}
}

func (p *planner) farness(g int) int {
	if slices.ContainsFunc(p.candidates(g), func(n int) bool { return p.near(g, n) }) {
		return 0
	}
	return 1
}

// loadWith is the load of NIC n with more lanes on it: lanes by rate, where
// every NIC states one.
func (p *planner) loadWith(n int, more float64) float64 {
	rate := 1.0
	if !slices.ContainsFunc(p.nics, func(nic NIC) bool { return nic.refusal() == "" && nic.Active() && nic.RateGbps() == 0 }) {
		rate = p.nics[n].RateGbps()
	}
	return (p.load[n] + more) / rate
}

// move takes one lane from a NIC to a less loaded one.
func (p *planner) move(open []int) bool {
	for _, g := range open {
		from := p.choice[g]
		if from < 0 {
			continue
		}
		for _, to := range p.candidates(g) {
			if p.loadWith(to, 1) < p.loadWith(from, 0) && p.noWorse(g, from, to) {
				p.load[from]--
				p.load[to]++
				p.choice[g] = to
				return true
			}
		}
	}
	return false
}

// noWorse: a near GPU is as well served by any NIC that is near it. A far one
// is, if the copies to the servers there are of the same kind; then it does not
// matter how far it is from the NIC itself.
func (p *planner) noWorse(g, from, to int) bool {
	switch {
	case p.near(g, to):
		return true
	case len(p.servers[to]) > 0:
		return copyKind(p.copyPath(g, p.servers[to])) <= copyKind(p.copyPath(g, p.servers[from]))
	}
	return p.toNIC[g][to].Type <= p.toNIC[g][from].Type
}

// copyKind takes all NVLinks for one kind.
func copyKind(path Path) PathType {
	if path.Type <= C2C {
		return NVL
	}
	return path.Type
}

// copyPath is the worst path from a GPU to its servers.
func (p *planner) copyPath(g int, servers []int) Path {
	worst := Path{LOC, localBandwidth}
	for _, s := range servers {
		path := p.toGPU[g][s]
		worst = Path{max(worst.Type, path.Type), min(worst.Bandwidth, path.Bandwidth)}
	}
	return worst
}

// rail numbers NICs in the order in which it is asked for them.
func (p *planner) rail(nic string) int {
	if _, known := p.rails[nic]; !known {
		p.rails[nic] = len(p.rails)
	}
	return p.rails[nic]
}

// assign settles a lane by configuration.
func (p *planner) assign(a Assignment) error {
	g, err := p.find(a.GPU)
	if err != nil {
		return err
	}
	switch {
	case p.lanes[g] != nil:
		return fmt.Errorf("GPU %d already has an assignment", p.gpus[g].Index)
	case len(a.Servers) == 0 && len(a.NICs) == 0:
		return errors.New("neither servers nor nics are given")
	}
	var servers []int
	for _, name := range a.Servers {
		s, err := p.find(name)
		switch {
		case err != nil:
			return fmt.Errorf("servers: %w", err)
		case s == g:
			return fmt.Errorf("servers: GPU %d cannot serve itself: a copy within a GPU waits for the programs that run on it", p.gpus[g].Index)
		case slices.Contains(servers, s):
			return fmt.Errorf("servers: GPU %d is named twice", p.gpus[s].Index)
		}
		servers = append(servers, s)
	}
	nics, err := p.assignedNICs(a.NICs, servers)
	if err != nil {
		return err
	}
	l := &Lane{
		GPU: p.gpus[g].BusID, Role: RoleFar, Relay: len(servers) > 0, Servers: []string{},
		NICs: nics, Rail: p.rail(nics[0]), Path: DIS,
	}
	for _, s := range servers {
		l.Servers = append(l.Servers, p.gpus[s].BusID)
	}
	for i, name := range nics {
		n := p.nic(name)
		if n < 0 {
			continue
		}
		p.load[n] += 1 / float64(len(nics))
		if p.near(g, n) {
			l.Role = RoleNear
		}
		if i == 0 {
			l.Path, l.Bandwidth = p.toNIC[g][n].Type, p.toNIC[g][n].Bandwidth
		}
	}
	l.Reason = p.assignedReason(g, servers, nics)
	p.lanes[g] = l
	return nil
}

func (p *planner) assignedReason(g int, servers []int, nics []string) string {
	var names []string
	for _, name := range nics {
		if n := p.nic(name); n >= 0 {
			name += " (" + describe(p.toNIC[g][n]) + ")"
		} else {
			name += " (not in the topology)"
		}
		names = append(names, name)
	}
	to := strings.Join(names, ", ")
	if len(servers) == 0 {
		return "assigned by configuration: straight to " + to
	}
	return fmt.Sprintf("assigned by configuration: staged on %s (copies: %s) for %s",
		p.names(servers), describe(p.copyPath(g, servers)), to)
}

// find is the place of a GPU that can have a lane or serve one.
func (p *planner) find(name string) (int, error) {
	gpu, err := p.host.FindGPU(name)
	if err != nil {
		return 0, err
	}
	if why := gpu.refusal(); why != "" {
		return 0, fmt.Errorf("%s (this is GPU %d)", why, gpu.Index)
	}
	return slices.IndexFunc(p.gpus, func(g GPU) bool { return g.BusID == gpu.BusID }), nil
}

func (p *planner) nic(name string) int {
	return slices.IndexFunc(p.nics, func(n NIC) bool { return n.Name == name })
}

// assignedNICs checks the names; without any it takes the NIC nearest to the
// first server.
func (p *planner) assignedNICs(names []string, servers []int) ([]string, error) {
	for i, name := range names {
		if name == "" || slices.Contains(names[:i], name) {
			return nil, fmt.Errorf("nics: %q is empty or named twice", name)
		}
	}
	if len(names) > 0 {
		return slices.Clone(names), nil
	}
	var usable []int
	for n := range p.nics {
		if p.usable(n) && p.toNIC[servers[0]][n].Type < DIS {
			usable = append(usable, n)
		}
	}
	if len(usable) == 0 {
		return nil, errors.New(`no nics are given, and this host has no RDMA NIC with an active port to choose; an emulated one is named like nics = ["emulated0"]`)
	}
	n := slices.MinFunc(usable, func(a, b int) int { return p.compareNICs(servers[0], a, b) })
	return []string{p.nics[n].Name}, nil
}
