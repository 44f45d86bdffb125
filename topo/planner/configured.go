package planner

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
)

// exclusions are the devices and pairs of devices that configuration excludes from lanes.
type exclusions struct {
	nics map[int]bool
	// toNIC has pairs of a GPU and a NIC. toGPU has pairs of GPUs, in both orders.
	toNIC, toGPU map[[2]int]bool
}

// setLimits sets the largest distance of near GPUs, per NIC.
func (p *planner) setLimits() error {
	check := func(key string, t topo.PathType) error {
		switch t {
		case topo.PIX, topo.PXB, topo.P2C, topo.PHB, topo.NODE, topo.SYS:
			return nil
		}
		return &keyError{key, &valueError{t, "must be a path from a GPU to a NIC: PIX PXB P2C PHB NODE SYS"}}
	}
	limit := cmp.Or(p.config.GDR.MaxPath, topo.PXB)
	if err := check("gdr.max_path", limit); err != nil {
		return err
	}
	p.limit = slices.Repeat([]topo.PathType{limit}, len(p.host.NICs))
	for _, name := range slices.Sorted(maps.Keys(p.config.GDR.NICs)) {
		n, err := p.findNIC(name)
		if err == nil {
			err = check("a limit", p.config.GDR.NICs[name])
		}
		if err != nil {
			return &keyError{"gdr.nics." + name, err}
		}
		p.limit[n] = p.config.GDR.NICs[name]
	}
	return nil
}

func (p *planner) setExclusions() error {
	p.exclude = exclusions{nics: map[int]bool{}, toNIC: map[[2]int]bool{}, toGPU: map[[2]int]bool{}}
	for _, name := range p.config.Exclude.GPUs {
		g, err := p.findGPU(name)
		if err != nil {
			return &keyError{"plan.exclude.gpus", err}
		}
		p.refused[g] = cmp.Or(p.refused[g], "configuration excludes it (plan.exclude.gpus)")
	}
	for _, name := range p.config.Exclude.NICs {
		n, err := p.findNIC(name)
		if err != nil {
			return &keyError{"plan.exclude.nics", err}
		}
		p.exclude.nics[n] = true
	}
	for _, pair := range p.config.Exclude.Pairs {
		if err := p.excludePair(pair); err != nil {
			return &keyError{fmt.Sprintf("plan.exclude.pairs: %q", pair), err}
		}
	}
	return nil
}

func (p *planner) excludePair(pair []string) error {
	if len(pair) != 2 {
		return errPairForm
	}
	a, err := p.findGPU(pair[0])
	if err != nil {
		return err
	}
	if n := p.nic(pair[1]); n >= 0 {
		p.exclude.toNIC[[2]int{a, n}] = true
		return nil
	}
	b, err := p.findGPU(pair[1])
	switch {
	case err != nil:
		return &unknownNICError{pair[1], p.nicNames(), err}
	case a == b:
		return errSameGPU
	}
	p.exclude.toGPU[[2]int{a, b}], p.exclude.toGPU[[2]int{b, a}] = true, true
	return nil
}

// setRails numbers the NICs: by configuration, or by the place among the NICs that can carry a
// lane.
func (p *planner) setRails() error {
	for name, rail := range p.config.Rails {
		if rail < 0 || rail > 1023 {
			return &keyError{"plan.rails." + name, &valueError{rail, "must be 0 to 1023"}}
		}
		p.rails[name] = rail
	}
	next := 0
	for n, nic := range p.host.NICs {
		if nic.Refusal() != "" || nic.Software && !p.config.Software || !p.config.VirtualFunctions && p.owners[n] != n {
			continue
		}
		if _, configured := p.rails[nic.Name]; !configured {
			p.rails[nic.Name] = next
		}
		next++
	}
	return nil
}

// rail returns the number of a NIC. NICs that only configuration names follow the NICs of the
// topology, in the order of the names.
func (p *planner) rail(nic string) int {
	if _, known := p.rails[nic]; !known {
		next := 0
		for _, rail := range p.rails {
			next = max(next, rail+1)
		}
		p.rails[nic] = next
	}
	return p.rails[nic]
}

// limitStaging sets the limits of staging, per GPU. The planner stages no lane on a GPU whose
// limit is below the slots of a lane.
func (p *planner) limitStaging() error {
	p.stagingLimit = slices.Repeat([]*uint64{p.config.Staging.Limit}, len(p.host.GPUs))
	named := map[int]bool{}
	for _, name := range slices.Sorted(maps.Keys(p.config.Staging.GPUs)) {
		g, err := p.findGPU(name)
		if err == nil && named[g] {
			err = &twiceError{gpu: p.host.GPUs[g].Index}
		}
		if err != nil {
			return &keyError{"staging.gpus", err}
		}
		named[g] = true
		limit := p.config.Staging.GPUs[name]
		p.stagingLimit[g] = &limit
	}
	return nil
}

// findGPU returns the index of a GPU that configuration names.
func (p *planner) findGPU(name string) (int, error) {
	gpu, err := p.host.FindGPU(name)
	if err != nil {
		return 0, err
	}
	return p.gpu(gpu.BusID), nil
}

// findWorking is findGPU for GPUs that can have or serve a lane.
func (p *planner) findWorking(name string) (int, error) {
	g, err := p.findGPU(name)
	if err == nil && p.refused[g] != "" {
		err = &RefusedError{fmt.Sprintf("GPU %d", p.host.GPUs[g].Index), p.refused[g]}
	}
	return g, err
}

func (p *planner) findNIC(name string) (int, error) {
	if n := p.nic(name); n >= 0 {
		return n, nil
	}
	return 0, &unknownNICError{name: name, known: p.nicNames()}
}

func (p *planner) nicNames() string {
	var names []string
	for _, n := range p.host.NICs {
		names = append(names, n.Name)
	}
	return cmp.Or(strings.Join(names, ", "), "none")
}

// pin settles a lane by configuration.
func (p *planner) pin(a Assignment) error {
	g, err := p.findWorking(a.GPU)
	if err != nil {
		return err
	}
	switch {
	case p.pinned[g] != nil:
		return &twiceError{p.host.GPUs[g].Index, true}
	case len(a.Servers) == 0 && len(a.NICs) == 0:
		return errNoMember
	case a.Kind != "" && a.Kind != KindDirect && a.Kind != KindStaged && a.Kind != KindBounce:
		return &keyError{"kind", &valueError{a.Kind, "must be " + KindDirect + ", " + KindStaged + " or " + KindBounce}}
	case len(a.Servers) > 0 && a.Kind != "" && a.Kind != KindStaged:
		return &keyError{"kind", &valueError{a.Kind, "does not allow servers"}}
	}
	servers, err := p.assignedServers(g, a)
	if err != nil {
		return &keyError{"servers", err}
	}
	names, err := p.assignedNICs(a.NICs, servers)
	if err != nil {
		return err
	}
	var nics []int
	for _, name := range names {
		if n := p.nic(name); n >= 0 {
			nics = append(nics, n)
		}
	}
	if a.Kind == KindStaged && len(servers) == 0 {
		for _, n := range nics {
			servers = p.servers(g, n)
			break
		}
		if len(servers) == 0 {
			return &noServerError{names[0]}
		}
	}
	l := p.empty(g)
	l.Pinned, l.Rail = true, p.rail(names[0])
	if n := p.nic(names[0]); n >= 0 {
		l.Path = p.toNIC[g][n].Type
	}
	from := []string{""}
	switch {
	case len(servers) > 0:
		from = nil
		for _, s := range servers {
			from = append(from, p.host.GPUs[s].BusID)
		}
	case a.Kind == KindDirect, a.Kind == "" && slices.ContainsFunc(nics, func(n int) bool { return p.near(g, n) }):
		from = []string{l.GPU}
	}
	l.setMembers(p.evenly(names, from))
	p.setLegs(&l, g)
	l.Reason = p.pinnedReason(g, l)
	p.pinned[g] = &l
	return nil
}

// evenly returns the members of a pinned lane. The weight of a NIC is the rate of the NIC;
// servers of a NIC have equal weights. A NIC that the topology lacks counts as the slowest NIC.
func (p *planner) evenly(nics, servers []string) (members []Member) {
	slowest, rates := float64(bandwidths.Local), make([]float64, len(nics))
	for i, name := range nics {
		if n := p.nic(name); n >= 0 {
			rates[i] = p.nicRate(n)
			slowest = min(slowest, rates[i])
		}
	}
	maxWeight := maxWeights / max(1, len(nics)*len(servers)) // per member
	for i, name := range nics {
		weight := math.Round(cmp.Or(rates[i], slowest) / slowest)
		for _, s := range servers {
			members = append(members, Member{s, name, max(1, min(maxWeight, int(weight)))})
		}
	}
	return members
}

func (p *planner) assignedServers(g int, a Assignment) (servers []int, err error) {
	for _, name := range a.Servers {
		s, err := p.findWorking(name)
		switch {
		case err != nil:
			return nil, err
		case s == g:
			return nil, errServesSelf
		case slices.Contains(servers, s):
			return nil, &twiceError{gpu: p.host.GPUs[s].Index}
		}
		servers = append(servers, s)
	}
	return servers, nil
}

// assignedNICs checks the names. Without names, assignedNICs returns the NIC nearest to the
// first server.
func (p *planner) assignedNICs(names []string, servers []int) ([]string, error) {
	for i, name := range names {
		if name == "" || slices.Contains(names[:i], name) {
			return nil, &keyError{fmt.Sprintf("nics: %q", name), errNICName}
		}
		if n := p.nic(name); n >= 0 && p.host.NICs[n].Refusal() != "" {
			return nil, &keyError{"nics", &RefusedError{name, p.host.NICs[n].Refusal()}}
		}
	}
	if len(names) > 0 {
		return slices.Clone(names), nil
	}
	best := -1
	for n := range p.host.NICs {
		if !p.usable(n) || p.toNIC[servers[0]][n].Type == topo.DIS {
			continue
		}
		if best < 0 || p.nearer(servers[0], n, best) {
			best = n
		}
	}
	if best < 0 {
		return nil, errNoActiveNIC
	}
	return []string{p.host.NICs[best].Name}, nil
}

func (p *planner) pinnedReason(g int, l Lane) string {
	var names []string
	for _, name := range l.NICs {
		if n := p.nic(name); n >= 0 {
			name += " (" + describe(p.toNIC[g][n].Path) + ")"
		} else {
			name += " (not in the topology)"
		}
		names = append(names, name)
	}
	to := list(names)
	switch l.Kind {
	case KindStaged:
		var servers []int
		for _, s := range l.Servers {
			servers = append(servers, p.gpu(s))
		}
		return fmt.Sprintf("assigned by configuration: staged on %s (copies: %s) for %s", p.names(servers), describe(*l.Copy),
			to) + p.withoutGDR(servers, l.NICs)
	case KindBounce:
		return "assigned by configuration: through host memory to " + to
	}
	return "assigned by configuration: directly to " + to + p.withoutGDR([]int{g}, l.NICs)
}
