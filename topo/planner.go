package topo

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// planner decides on one host. GPUs and NICs are their places in host's lists,
// which are in order, so that a plan does not depend on how a source lists them.
type planner struct {
	*network
	host    *Host
	config  PlanConfig
	exclude exclusions
	limit   []PathType // [NIC]: how far a GPU may be and still be near it
	// refused says why a GPU has no lane and serves none; empty for others.
	refused []string
	// stagingLimit is what relays may take from each GPU; nil for no limit.
	stagingLimit []*uint64
	pinned       []*Lane // [GPU]
	rails        map[string]int
	// bad says why a NIC carries no lane that the topology decides; empty for
	// others.
	bad []string
	// beside are the GPUs near each NIC that can serve.
	beside [][]int
	// options are what each GPU can do over each NIC where bandwidths are not known; nil
	// where nobody has asked yet.
	options [][]*option // [GPU][NIC]
	// With bandwidths, reached is what the plan is measured by: the rates of lanes in the
	// best choice, before weights are whole numbers. ahead says that NCCL's own choice of ways
	// was faster than the plan's, and was taken over.
	reached []float64 // [GPU]
	bound   float64   // of the slowest lane
	ahead   string
	// asked is what NCCL does, with PXN and without.
	asked map[bool][]carried
	// stageable says whether any lane can be staged; nil where nothing has asked.
	stageable *bool
}

func newPlanner(h *Host, c PlanConfig) (*planner, error) {
	p := &planner{
		network: newNetwork(h), host: h, config: c, rails: map[string]int{},
		pinned: make([]*Lane, len(h.GPUs)),
	}
	for _, g := range h.GPUs {
		p.refused = append(p.refused, p.refusal(g))
	}
	if near := c.Near; near != "" && near != "auto" && near != NearDirect {
		return nil, fmt.Errorf("plan.near: %q is no way for near GPUs; auto and %s are possible", near, NearDirect)
	}
	for _, configure := range []func() error{p.setLimits, p.setExclusions, p.setRails, p.limitStaging} {
		if err := configure(); err != nil {
			return nil, err
		}
	}
	for n, nic := range h.NICs {
		p.bad = append(p.bad, p.unusable(n, &nic))
		var beside []int
		for g := range h.GPUs {
			if p.refused[g] == "" && p.near(g, n) {
				beside = append(beside, g)
			}
		}
		p.beside = append(p.beside, beside)
	}
	p.options = make([][]*option, len(h.GPUs))
	for _, a := range c.Lanes {
		if err := p.pin(a); err != nil {
			return nil, fmt.Errorf("plan.lane for GPU %q: %w", a.GPU, err)
		}
	}
	return p, nil
}

// refusal says why a GPU has no lane, other makers apart where those are asked
// for.
func (p *planner) refusal(g GPU) string {
	if p.config.AnyVendor && g.Vendor != "" {
		g.Vendor, g.Reason = "", ""
	}
	return g.refusal()
}

// usable NICs can carry a lane.
func (p *planner) usable(n int) bool { return p.bad[n] == "" }

// unusable says why a NIC carries no lane that the topology decides.
func (p *planner) unusable(n int, nic *NIC) string {
	switch {
	case nic.refusal() != "":
		return nic.refusal()
	case nic.Software && !p.config.Software:
		return "it is software RDMA, which is planned only with --software"
	case !nic.Active():
		return "it has no active port"
	case p.exclude.nics[n]:
		return "configuration excludes it"
	}
	if owner := p.owners[n]; owner != n && !p.config.VirtualFunctions && nic.parent() != "" {
		physical := &p.host.NICs[owner]
		if physical.parent() == "" && p.unusable(owner, physical) == "" {
			return fmt.Sprintf("it shares the port of %s, which lanes use themselves; plan.virtual_functions = true plans with both", physical.Name)
		}
	}
	return ""
}

// near GPUs can be reached by the NIC directly.
func (p *planner) near(g, n int) bool {
	return p.usable(n) && p.toNIC[g][n].Type <= p.limit[n] && !p.exclude.toNIC[[2]int{g, n}]
}

func (p *planner) isNear(g int) bool {
	for n := range p.host.NICs {
		if p.near(g, n) {
			return true
		}
	}
	return false
}

// servers are the GPUs near a NIC that a lane of GPU g is staged on where nothing tells
// how fast: all that stagers has, or those that NVLink joins to it where it joins some.
func (p *planner) servers(g, n int) []int {
	found := p.stagers(g, n)
	far := func(s int) bool { return copyKind(p.toGPU[g][s].Path) > NVL }
	if slices.ContainsFunc(found, func(s int) bool { return !far(s) }) {
		found = slices.DeleteFunc(found, far)
	}
	return found
}

// stagers are the GPUs near a NIC that a lane of GPU g can be staged on. One whose limit
// has no room for a lane's slots is left out, and those of the others are then the larger.
func (p *planner) stagers(g, n int) []int {
	found := make([]int, 0, len(p.beside[n]))
	for _, s := range p.beside[n] {
		if s != g && p.toGPU[g][s].Type < DIS && !p.exclude.toGPU[[2]int{g, s}] {
			found = append(found, s)
		}
	}
	for {
		before := len(found)
		found = slices.DeleteFunc(found, func(s int) bool {
			limit := p.stagingLimit[s]
			return limit != nil && (*limit == 0 || *limit < p.config.Staging.bytes(before))
		})
		if len(found) == before || len(found) == 0 {
			return found
		}
	}
}

// option is what GPU g can do over NIC n; nil for nothing. What is near goes
// directly and in no other way.
func (p *planner) option(g, n int) *option { return p.optionsOf(g)[n] }

// optionsOf are those of a GPU over each NIC.
func (p *planner) optionsOf(g int) []*option {
	if p.options[g] != nil {
		return p.options[g]
	}
	options := make([]*option, len(p.host.NICs))
	p.options[g] = options
	direct := false
	for n := range options {
		if p.near(g, n) {
			away := p.toNIC[g][n].Type
			options[n], direct = &option{KindDirect, away, away, []int{g}}, true
		}
	}
	if direct {
		return options
	}
	for n := range options {
		if !p.usable(n) || p.exclude.toNIC[[2]int{g, n}] {
			continue
		}
		away := p.toNIC[g][n].Type
		if servers := p.servers(g, n); len(servers) > 0 {
			copies, network := p.legs(g, servers, []int{n})
			options[n] = &option{KindStaged, max(copyKind(copies), network.Type), away, servers}
		} else if away < DIS {
			options[n] = &option{KindBounce, away, away, nil}
		}
	}
	return options
}

// copyKind takes all NVLinks for one kind.
func copyKind(path Path) PathType {
	if path.Type <= C2C {
		return NVL
	}
	return path.Type
}

// legs are the worst of the ways from a GPU to its servers and of those from
// these to NICs, each by its type and its bandwidth.
func (p *planner) legs(g int, servers, nics []int) (copies, network Path) {
	copies, network = Path{LOC, localBandwidth}, Path{LOC, localBandwidth}
	for _, s := range servers {
		copies = worse(copies, p.toGPU[g][s].Path)
		for _, n := range nics {
			network = worse(network, p.toNIC[s][n].Path)
		}
	}
	return copies, network
}

func worse(a, b Path) Path { return Path{max(a.Type, b.Type), min(a.Bandwidth, b.Bandwidth)} }

// plan decides on the lanes, in the order of GPUs.
func (p *planner) plan() []Lane {
	var lanes []Lane
	stageable := false
	for g := range p.host.GPUs {
		for n := range p.host.NICs {
			stageable = stageable || p.refused[g] == "" && p.usable(n) && len(p.stagers(g, n)) > 0
		}
	}
	p.stageable = &stageable
	if p.known {
		lanes = p.allocate()
		p.compare(lanes)
		p.estimate(lanes)
	} else {
		lanes = p.spread()
	}
	for g := range lanes {
		if lanes[g].Reason == "" {
			lanes[g].Reason = p.reason(g, lanes[g])
		}
	}
	return lanes
}

// settled are the lanes of GPUs that are refused or pinned, and empty ones for the others.
func (p *planner) settled() []Lane {
	lanes := make([]Lane, len(p.host.GPUs))
	for g := range p.host.GPUs {
		lanes[g] = p.empty(g)
		switch {
		case p.refused[g] != "":
			lanes[g].Role, lanes[g].Reason = RoleRefused, p.refused[g]
		case p.pinned[g] != nil:
			lanes[g] = *p.pinned[g]
		}
	}
	return lanes
}

// problem is the choice that is left of NICs to GPUs: the lanes that are settled
// already, and the GPUs that are open.
func (p *planner) problem() (s *spreading, lanes []Lane, open []int) {
	s = &spreading{
		onNIC: make([]float64, len(p.host.NICs)), onGPU: make([]float64, len(p.host.GPUs)),
	}
	known := true // whether NICs can be told apart by what they carry
	for n := range p.host.NICs {
		known = known && (!p.usable(n) || p.host.NICs[n].RateGbps() > 0)
	}
	for n := range p.host.NICs {
		rate := 1.0
		if known && p.usable(n) {
			rate = p.nicRate(n)
		}
		s.rate = append(s.rate, rate)
	}
	for _, g := range p.host.GPUs {
		s.link = append(s.link, cmp.Or(g.Link, 1))
	}
	lanes = p.settled()
	for g := range p.host.GPUs {
		switch {
		case p.refused[g] != "":
		case p.pinned[g] != nil:
			p.putOn(lanes[g], s.onNIC, s.onGPU)
		default:
			open = append(open, g)
			s.option = append(s.option, p.optionsOf(g))
		}
	}
	return s, lanes, open
}

// spread chooses a NIC for every GPU that configuration gives no lane, where the source does
// not tell how fast links are.
func (p *planner) spread() []Lane {
	s, lanes, open := p.problem()
	if len(s.rate) == 0 || len(open) == 0 {
		return lanes
	}
	chosen := make([][]int, len(p.host.GPUs)) // [GPU]: its NICs
	for i, n := range s.choose() {
		if n >= 0 {
			chosen[open[i]] = []int{n}
			s.onNIC[n]++
		}
	}
	p.stripe(chosen, s.onNIC)
	for _, g := range open {
		if len(chosen[g]) > 0 {
			lanes[g] = p.over(g, chosen[g])
		}
	}
	return lanes
}

// putOn adds a lane to what NICs and GPUs carry, in lanes.
func (p *planner) putOn(l Lane, nics, gpus []float64) {
	for _, name := range l.NICs {
		if n := p.nic(name); n >= 0 {
			nics[n] += 1 / float64(len(l.NICs))
		}
	}
	if l.Kind == KindDirect {
		gpus[p.gpu(l.GPU)]++
	}
	for _, s := range l.Servers {
		gpus[p.gpu(s)] += relayedCrossings / float64(len(l.Servers))
	}
}

// stripe gives a NIC that no lane has to each lane that can use it as well as
// its own.
func (p *planner) stripe(chosen [][]int, onNIC []float64) {
	for n := range p.host.NICs {
		if onNIC[n] > 0 {
			continue
		}
		for g, nics := range chosen {
			if len(nics) == 0 {
				continue
			}
			o, own := p.option(g, n), p.option(g, nics[0])
			if o != nil && o.kind == own.kind && o.worst <= own.worst && slices.Equal(o.servers, own.servers) {
				chosen[g] = append(chosen[g], n)
			}
		}
	}
}

// empty is a lane that leads nowhere.
func (p *planner) empty(g int) Lane {
	l := Lane{GPU: p.host.GPUs[g].BusID, Role: RoleFar, Servers: []string{}, NICs: []string{}, Rail: -1, Path: DIS}
	if p.isNear(g) {
		l.Role = RoleNear
	}
	return l
}

// over is a lane over NICs that the topology decided on.
func (p *planner) over(g int, nics []int) Lane {
	slices.SortStableFunc(nics, func(a, b int) int { return cmp.Compare(p.toNIC[g][a].Type, p.toNIC[g][b].Type) })
	o := p.option(g, nics[0])
	servers := []int{throughMemory}
	if o.kind != KindBounce {
		servers = o.servers // of a direct lane its own GPU
	}
	var parts []part
	for _, n := range nics {
		for _, s := range servers {
			parts = append(parts, part{s, n, 1})
		}
	}
	return p.lane(g, parts)
}

// lane is a lane over these ways, which have whole weights.
func (p *planner) lane(g int, parts []part) Lane {
	l := p.empty(g)
	var members []Member
	for _, q := range parts {
		m := Member{NIC: p.host.NICs[q.nic].Name, Weight: int(q.weight)}
		if q.server >= 0 {
			m.Server = p.host.GPUs[q.server].BusID
		}
		members = append(members, m)
	}
	l.setMembers(members)
	if len(parts) > 0 {
		l.Rail = p.rail(l.NICs[0])
		l.Path = p.toNIC[g][parts[0].nic].Type
	}
	p.setLegs(&l, g)
	return l
}

// setLegs writes down the worst of the legs of staged members.
func (p *planner) setLegs(l *Lane, g int) {
	l.Copy, l.Network = nil, nil
	for _, m := range l.Members {
		if l.KindOf(m) != KindStaged {
			continue
		}
		s := p.gpu(m.Server)
		var nics []int
		if n := p.nic(m.NIC); n >= 0 {
			nics = append(nics, n)
		}
		copies, network := p.legs(g, []int{s}, nics)
		if l.Copy != nil {
			copies = worse(copies, *l.Copy)
		}
		l.Copy = &copies
		if len(nics) > 0 {
			if l.Network != nil {
				network = worse(network, *l.Network)
			}
			l.Network = &network
		}
	}
}

// compare writes down what lanes through server GPUs would be through the CPU's memory, and
// lanes through that if they were staged: each alone changed, the others as planned.
func (p *planner) compare(lanes []Lane) {
	if len(lanes) > mostPolished {
		return
	}
	var planned []carried
	for _, l := range lanes {
		planned = append(planned, p.carriedBy(l))
	}
	loads := p.loads(planned)
	for g := range lanes {
		l := &lanes[g]
		if l.Pinned || l.Kind != KindStaged && l.Kind != KindBounce || l.Path == DIS {
			continue
		}
		other := p.otherwise(g, planned[g], l.Kind)
		if other == nil {
			continue
		}
		own, changed := loads[g], p.network.load(carried{g, other}, bothWays)
		capacity := p.capacity() // of the links of changed, too
		busy, _ := share(loads, capacity)
		loads[g] = changed
		then, _ := share(loads, capacity)
		loads[g] = own
		l.Compared = &Comparison{busy[g], then[g], alone(own, capacity), alone(changed, capacity)}
		if l.Kind == KindBounce {
			c := l.Compared
			c.Relay, c.Without, c.RelayAlone, c.WithoutAlone = c.Without, c.Relay, c.WithoutAlone, c.RelayAlone
		}
	}
}

// otherwise are the ways of a lane with the CPU's memory in the place of server GPUs, or
// these in the place of that: all near the NIC, those joined by NVLink where some are. It
// is nil where there are none.
func (p *planner) otherwise(g int, c carried, kind string) (parts []part) {
	for _, q := range c.parts {
		switch {
		case q.server == g:
			parts = append(parts, q)
		case kind == KindStaged:
			if p.toNIC[g][q.nic].Type == DIS {
				return nil
			}
			parts = append(parts, part{throughMemory, q.nic, q.weight})
		default:
			servers := p.servers(g, q.nic)
			if len(servers) == 0 {
				return nil
			}
			for _, s := range servers {
				parts = append(parts, part{s, q.nic, q.weight / float64(len(servers))})
			}
		}
	}
	return parts
}

// String is both figures, and those of the lane alone where those decided.
func (c *Comparison) String() string {
	if math.Abs(c.Relay-c.Without) <= simplerCost*max(c.Relay, c.Without) {
		return fmt.Sprintf("while all lanes are busy %s with the relay and %s through host memory; alone %s with the relay, %s through host memory",
			gbs(c.Relay), gbs(c.Without), gbs(c.RelayAlone), gbs(c.WithoutAlone))
	}
	return fmt.Sprintf("%s with the relay, %s through host memory, while all lanes are busy", gbs(c.Relay), gbs(c.Without))
}

func (p *planner) ratesOf(lanes []Lane) rated {
	var all []carried
	for _, l := range lanes {
		all = append(all, p.carriedBy(l))
	}
	return p.rates(all)
}

// estimate writes down what each lane carries.
func (p *planner) estimate(lanes []Lane) {
	if !p.known {
		return
	}
	for g, rate := range p.ratesOf(lanes).busy {
		lanes[g].Bandwidth = rate
	}
}

// reason says in a sentence why a lane is what it is.
func (p *planner) reason(g int, l Lane) string {
	if len(l.NICs) == 0 {
		return p.nothing()
	}
	kinds := map[string]bool{}
	var staging []int
	for _, m := range l.Members {
		kinds[l.KindOf(m)] = true
	}
	for _, s := range l.Servers {
		staging = append(staging, p.gpu(s))
	}
	var sentence string
	switch first := p.nic(l.NICs[0]); {
	case len(kinds) > 1 || p.near(g, first) && !kinds[KindDirect] || !l.regular() || p.differ(g, l.NICs):
		sentence = p.mixture(g, l)
	case kinds[KindDirect]:
		sentence = fmt.Sprintf("%s %s its memory directly (%s), so no relay is needed",
			list(l.NICs), number(l.NICs, "reads and writes", "read and write"), describe(p.toNIC[g][first].Path))
	default:
		sentence = fmt.Sprintf("%s, %s, %s far (%s), so its traffic ", list(l.NICs), p.why(g, l.NICs), number(l.NICs, "is", "are"), describe(p.toNIC[g][first].Path))
		if l.Relay {
			sentence += fmt.Sprintf("is staged on %s, near %s (copies: %s)", p.names(staging), number(l.NICs, "that NIC", "those NICs"), describe(*l.Copy))
		} else {
			sentence += "bounces through host memory"
		}
	}
	switch {
	case l.Kind == KindBounce && l.Compared == nil && p.known:
		sentence += fmt.Sprintf(": no GPU that it could be staged on is near enough to %s (%v)", number(l.NICs, "that NIC", "those NICs"), p.limit[p.nic(l.NICs[0])])
	case l.Kind == KindBounce && l.Compared != nil && l.Compared.Relay > l.Compared.Without*(1+simplerCost):
		sentence += fmt.Sprintf(": staged it would be faster, and another lane slower: %v", l.Compared)
	case l.Kind == KindBounce && l.Compared != nil:
		sentence += fmt.Sprintf(": staged it would not be faster: %v", l.Compared)
	case l.Compared != nil:
		sentence += "; " + l.Compared.String()
	}
	if p.ahead != "" {
		sentence += "; the lanes are " + p.ahead + ", because by the estimate that is faster than what the plan found"
	}
	var read []int
	if kinds[KindDirect] {
		read = append(read, g)
	}
	return sentence + p.withoutGDR(append(read, staging...), l.NICs)
}

// regular says whether every member of the lane has the same weight, and each NIC the same
// servers.
func (l *Lane) regular() bool {
	for _, m := range l.Members {
		if m.Weight != l.Members[0].Weight {
			return false
		}
	}
	return len(l.Members) == len(l.NICs)*max(1, len(l.Servers))
}

// differ says whether the ways from a GPU to NICs do.
func (p *planner) differ(g int, nics []string) bool {
	first := p.toNIC[g][p.nic(nics[0])].Path
	return slices.ContainsFunc(nics, func(name string) bool { return p.toNIC[g][p.nic(name)].Path != first })
}

// mixture says which part of a lane's traffic goes which way.
func (p *planner) mixture(g int, l Lane) string {
	var parts []string
	sum := l.Weights()
	for _, m := range l.Members {
		words := partOf(m.Weight, sum) + " parts"
		if len(l.Members) == 1 {
			words = "all"
		}
		n := p.nic(m.NIC)
		switch l.KindOf(m) {
		case KindDirect:
			words += fmt.Sprintf(" directly over %s (%s)", m.NIC, describe(p.toNIC[g][n].Path))
		case KindBounce:
			words += fmt.Sprintf(" through host memory over %s (%s)", m.NIC, describe(p.toNIC[g][n].Path))
		default:
			s := p.gpu(m.Server)
			words += fmt.Sprintf(" over %s, staged on %s (copies: %s)", m.NIC, p.names([]int{s}), describe(p.toGPU[g][s].Path))
		}
		parts = append(parts, words)
	}
	const most = 8
	if len(parts) > most {
		parts = append(parts[:most], fmt.Sprintf("and %d ways more", len(parts)-most))
	}
	why := "so that the slowest lane of the host is as fast as it can be"
	if p.isNear(g) && l.Kind != KindDirect {
		why += `, though the GPU is near a NIC (plan.near = "direct" in config.toml keeps it there)`
	}
	return "its traffic goes " + strings.Join(parts, "; ") + ", " + why
}

func number(nics []string, one, more string) string {
	if len(nics) > 1 {
		return more
	}
	return one
}

// withoutGDR says what the source has against GPUDirect RDMA between GPUs and
// NICs.
func (p *planner) withoutGDR(gpus []int, nics []string) string {
	var off []string
	for _, name := range nics {
		if n := p.nic(name); n >= 0 && isOff(p.host.NICs[n].GDR) {
			off = append(off, name)
		}
	}
	var indices []int
	for _, g := range gpus {
		if isOff(p.host.GPUs[g].GDR) {
			indices = append(indices, p.host.GPUs[g].Index)
		}
	}
	if len(indices) > 0 {
		off = append(off, gpuNames(indices))
	}
	if len(off) == 0 {
		return ""
	}
	return "; it needs GPUDirect RDMA, which by the file was off for " + list(off)
}

// isOff says whether a source says that a device has no GPUDirect RDMA.
func isOff(gdr *bool) bool { return gdr != nil && !*gdr }

// why says how NICs came to a lane, by where they are among the host's.
func (p *planner) why(g int, names []string) string {
	chosen := p.nic(names[0])
	nearer, alike, usable := "", false, false
	for n := range p.host.NICs {
		if p.toNIC[g][n].Type == DIS {
			continue
		}
		switch {
		case p.nearer(g, n, chosen) && (nearer == "" || p.usable(n) && !usable):
			nearer, usable = p.host.NICs[n].Name, p.usable(n)
		case !p.nearer(g, n, chosen) && !p.nearer(g, chosen, n) && !slices.Contains(names, p.host.NICs[n].Name):
			alike = true
		}
	}
	switch {
	case usable:
		return fmt.Sprintf("chosen so that the slowest lane is as fast as it can be, though %s is nearer", nearer)
	case nearer != "":
		return fmt.Sprintf("%s that can carry a lane (%s is nearer)", number(names, "the nearest NIC", "the nearest NICs"), nearer)
	case alike:
		return number(names, "one of the nearest NICs", "some of the nearest NICs")
	}
	return number(names, "the nearest NIC", "the nearest NICs")
}

// nothing says why there is no NIC to choose.
func (p *planner) nothing() string {
	var without []string
	for n, nic := range p.host.NICs {
		why := cmp.Or(p.bad[n], "no path leads there")
		without = append(without, nic.Name+": "+why)
	}
	what := "this host has no RDMA NIC"
	if len(without) > 0 {
		what = "this host has no RDMA NIC to use (" + strings.Join(without, "; ") + ")"
	}
	return what + "; so the lane reaches the containers of this host alone, by one copy, unless [[plan.lane]] in config.toml assigns servers and NICs"
}

// notes are sentences about the host as a whole.
func (p *planner) notes(lanes []Lane) []string {
	notes := slices.Clone(p.host.Notes)
	open := slices.ContainsFunc(lanes, func(l Lane) bool { return l.Role != RoleRefused })
	switch {
	case len(lanes) == 0:
		notes = append(notes, "this host has no GPU, so the plan has no lane")
	case !open:
		notes = append(notes, "every GPU of this host is refused, so the plan has no lane that leads anywhere")
	}
	gdr := false // by the file it was off where a lane needs it
	used := map[string]bool{}
	far, relayed := 0, 0
	for _, l := range lanes {
		for _, name := range l.NICs {
			used[name] = true
		}
		gdr = gdr || p.lacksGDR(l)
		if len(l.NICs) == 0 {
			continue
		}
		if l.Relay {
			relayed++
		}
		if l.Role == RoleFar {
			far++
		}
	}
	functions := map[int]int{} // left to others, of each NIC
	for n, nic := range p.host.NICs {
		switch {
		case used[nic.Name]:
		case p.owners[n] != n && !p.config.VirtualFunctions:
			functions[p.owners[n]]++
		case nic.refusal() == "" && !nic.Active():
			notes = append(notes, fmt.Sprintf("NIC %s has no active port (%s) and serves no lane that the topology decides", nic.Name, states(nic)))
		case p.usable(n) && !used[nic.Name] && open:
			notes = append(notes, p.idle(nic.Name, lanes))
		}
	}
	for _, nic := range p.host.NICs {
		if used[nic.Name] && nic.CannotFlush() {
			notes = append(notes, fmt.Sprintf("NIC %s (%s) cannot flush its writes into GPU memory: %s", nic.Name, nic.Protocol, CannotFlush))
		}
	}
	for _, n := range slices.Sorted(maps.Keys(functions)) {
		notes = append(notes, fmt.Sprintf("%s has %d virtual functions or subfunctions, which lanes leave to others: they share its port (plan.virtual_functions)", p.host.NICs[n].Name, functions[n]))
	}
	if relayed == 0 && p.stageable != nil && slices.ContainsFunc(lanes, func(l Lane) bool { return len(l.NICs) > 0 }) {
		notes = append(notes, p.noRelay(lanes, far)...)
	}
	if relayed > 0 && p.known && !p.gains(lanes) {
		notes = append(notes, "with all lanes busy the relay brings nothing here: by the estimate, no choice of lanes without relays is slower; a GPU alone is faster with it")
	}
	if p.ahead != "" {
		notes = append(notes, "the lanes are "+p.ahead+": by the estimate, that is faster than what the plan found")
	}
	if gpus := p.closeCalls(lanes); len(gpus) > 0 {
		notes = append(notes, fmt.Sprintf("constants decide by under 25 %% for %s: try peerlane plan --measure", p.names(gpus)))
	}
	if gdr {
		notes = append(notes, "by the file, GPUDirect RDMA was off for NICs or GPUs whose lanes need it; that can mean just that nvidia-peermem was not loaded when the file was written, so lanes are planned and estimated as if it were on, and only NCCL TODAY goes by the file")
	}
	if !p.known && relayed > 0 {
		notes = append(notes, "the source does not tell all bandwidths, so whether the relay makes a lane faster is not known")
	}
	return notes
}

// idle says of a NIC without a lane what the slowest GPU lacks for that.
func (p *planner) idle(name string, lanes []Lane) string {
	slowest, _ := p.slowest(lanes)
	switch {
	case !p.known:
		return fmt.Sprintf("NIC %s is idle: the source does not tell all bandwidths, and each lane has a NIC that is as near", name)
	case slowest == 0 || p.bound <= slowest*1.001:
		return fmt.Sprintf("NIC %s is idle: by the estimate, no use of it makes the slowest GPU faster", name)
	}
	return fmt.Sprintf("NIC %s is idle: by the estimate, no use of it makes the slowest GPU more than %.1f %% faster", name, 100*(p.bound/slowest-1))
}

// slowest is the rate of the slowest of the lanes that configuration leaves open, and
// their number.
func (p *planner) slowest(lanes []Lane) (rate float64, open int) {
	for _, l := range lanes {
		if l.Role == RoleRefused || l.Pinned {
			continue
		}
		if open == 0 || l.Bandwidth < rate {
			rate = l.Bandwidth
		}
		open++
	}
	return rate, open
}

// noRelay says why no lane of a host has a relay, where that is so: nothing can be staged,
// or, by the best of all choices, it is of no use.
func (p *planner) noRelay(lanes []Lane, far int) []string {
	const nothing = "the relay brings nothing on this host: "
	switch {
	case !*p.stageable && far > 0:
		return []string{nothing + "no GPU is near enough to a NIC for others to be staged on; gdr.max_path in config.toml says what is near"}
	case p.config.Near == NearDirect && far == 0:
		return []string{`no lane has a relay: every GPU with a lane is near a NIC, and plan.near in config.toml is "direct"`}
	case !p.known:
		return []string{nothing + "every GPU with a lane is near a NIC"}
	}
	gain := 1.0
	for g, l := range lanes {
		if l.Bandwidth > 0 && !l.Pinned {
			gain = max(gain, p.reached[g]/l.Bandwidth)
		}
	}
	switch slowest, _ := p.slowest(lanes); {
	case p.bound > slowest*(1+simplerCost+roundCost):
		return nil // not proven
	case gain > 1.001:
		return []string{fmt.Sprintf("relays would make no GPU of this host more than %.1f %% faster", 100*(gain-1))}
	case far == 0:
		return []string{nothing + "every GPU with a lane is near a NIC"}
	}
	return []string{nothing + "by the estimate, no GPU is faster with it"}
}

// gains says whether lanes with relays are faster, the slowest first, than the best choice
// without any.
func (p *planner) gains(lanes []Lane) bool {
	if len(lanes) > mostPolished {
		return true // it is not looked at
	}
	a := p.newAllocation(false)
	var with, without []float64
	if len(a.flows) > 0 {
		a.solve()
	}
	best := map[int]float64{}
	for f, g := range a.flows {
		best[g] = a.optimum[f]
	}
	for g, l := range lanes {
		if l.Role != RoleRefused && !l.Pinned {
			with, without = append(with, l.Bandwidth), append(without, best[g])
		}
	}
	slices.Sort(with)
	slices.Sort(without)
	for i := range with {
		if math.Abs(with[i]-without[i]) > simplerCost*max(with[i], without[i]) {
			return with[i] > without[i]
		}
	}
	return false
}

// lacksGDR says whether by the source a lane lacks the GPUDirect RDMA that it
// needs.
func (p *planner) lacksGDR(l Lane) bool {
	var places []int
	for _, m := range l.Members {
		if m.Server != "" {
			places = append(places, p.gpu(m.Server))
		}
	}
	return len(places) > 0 && p.withoutGDR(places, l.NICs) != ""
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
	return fmt.Sprintf("%v, %s", p.Type, gbs(p.Bandwidth))
}

func gbs(rate float64) string { return strconv.FormatFloat(rate, 'g', 4, 64) + " GB/s" }

func (p *planner) names(gpus []int) string {
	var indices []int
	for _, g := range gpus {
		indices = append(indices, p.host.GPUs[g].Index)
	}
	return gpuNames(indices)
}

// gpuNames lists GPUs by their indices: "GPU 0", "GPUs 0, 1 and 4".
func gpuNames(indices []int) string {
	var s []string
	for _, i := range indices {
		s = append(s, strconv.Itoa(i))
	}
	switch len(s) {
	case 0:
		return "no GPU"
	case 1:
		return "GPU " + s[0]
	}
	return "GPUs " + list(s)
}
