package planner

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
)

// planner makes the plan of a host. Variables for GPUs and NICs are indexes into the lists of host.
// The lists are sorted, so that a plan does not depend on the order of the source.
type planner struct {
	*network
	host    *topo.Host
	config  Config
	exclude exclusions
	limit   []topo.PathType // [NIC]: largest path type to a near GPU
	// refused holds the reason why a GPU has no lane and serves no lane; empty for a usable GPU.
	refused []string
	// stagingLimit holds the bytes that relays may take from a GPU; nil for no limit.
	stagingLimit []*uint64
	pinned       []*Lane // [GPU]
	rails        map[string]int
	// bad holds the reason why a NIC carries only assigned lanes; empty for a usable NIC.
	bad []string
	// beside holds the GPUs near a NIC that can serve.
	beside [][]int
	// options caches the results of optionsOf, which spread uses without known bandwidths.
	options [][]*option // [GPU][NIC]
	// reached holds the rates of lanes in the best choice, before rounding to whole weights, if
	// bandwidths are known. The notes compare the plan with reached. ahead describes the choice of
	// NCCL if the choice is faster than the choice of the planner and replaces that choice; empty
	// otherwise.
	reached []float64 // [GPU]
	bound   float64   // upper bound of the rate of the slowest lane, GB/s
	ahead   string
	// defaults caches the routes that NCCL takes, with PXN and without PXN.
	defaults map[bool][]carried
	// stageable reports whether a lane can be staged; nil before plan.
	stageable *bool
}

func newPlanner(h *topo.Host, c Config) (*planner, error) {
	p := &planner{
		network: newNetwork(h), host: h, config: c, rails: map[string]int{},
		pinned: make([]*Lane, len(h.GPUs)),
	}
	for _, g := range h.GPUs {
		p.refused = append(p.refused, p.refusal(g))
	}
	if near := c.Near; near != "" && near != "auto" && near != nearDirect {
		return nil, &keyError{"plan.near", &valueError{near, "must be auto or " + nearDirect}}
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
			return nil, &keyError{fmt.Sprintf("plan.lane for GPU %q", a.GPU), err}
		}
	}
	return p, nil
}

// refusal returns the reason why a GPU has no lane. With AnyVendor, the vendor is no reason.
func (p *planner) refusal(g topo.GPU) string {
	if p.config.AnyVendor && g.Vendor != "" {
		g.Vendor, g.Reason = "", ""
	}
	return g.Refusal()
}

// usable reports whether a NIC can carry a lane.
func (p *planner) usable(n int) bool { return p.bad[n] == "" }

// unusable returns the reason why a NIC carries only assigned lanes; empty for a usable NIC.
func (p *planner) unusable(n int, nic *topo.NIC) string {
	switch {
	case nic.Refusal() != "":
		return nic.Refusal()
	case nic.Software && !p.config.Software:
		return "it is software RDMA, which plans use only with --software"
	case !nic.Active():
		return "it has no active port"
	case p.exclude.nics[n]:
		return "configuration excludes it"
	}
	if owner := p.owners[n]; owner != n && !p.config.VirtualFunctions && nic.Parent() != "" {
		physical := &p.host.NICs[owner]
		if physical.Parent() == "" && p.unusable(owner, physical) == "" {
			return fmt.Sprintf("it shares the port of %s, which lanes use; plan.virtual_functions = true plans "+
				"with both", physical.Name)
		}
	}
	return ""
}

// near reports whether NIC n can reach GPU g directly.
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

// servers returns the GPUs near NIC n that stage a lane of GPU g without known bandwidths: the GPUs
// that NVLink joins to g, or, without NVLink to g, the GPUs of stagers.
func (p *planner) servers(g, n int) []int {
	found := p.stagers(g, n)
	far := func(s int) bool { return copyKind(p.toGPU[g][s].Path) > topo.NVL }
	if slices.ContainsFunc(found, func(s int) bool { return !far(s) }) {
		found = slices.DeleteFunc(found, far)
	}
	return found
}

// stagers returns the GPUs near NIC n that can stage a lane of GPU g. A GPU without room for the
// slots of a lane, by the limit of the GPU, drops out. The shares of the remaining GPUs grow, so
// stagers repeats the check.
func (p *planner) stagers(g, n int) []int {
	found := make([]int, 0, len(p.beside[n]))
	for _, s := range p.beside[n] {
		if s != g && p.toGPU[g][s].Type < topo.DIS && !p.exclude.toGPU[[2]int{g, s}] {
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

// option returns the route of GPU g over NIC n; nil without a route. A near GPU has only direct
// options.
func (p *planner) option(g, n int) *option { return p.optionsOf(g)[n] }

// optionsOf returns the options of a GPU, by NIC.
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
		} else if away < topo.DIS {
			options[n] = &option{KindBounce, away, away, nil}
		}
	}
	return options
}

// copyKind returns the type of a path, with NVL for every NVLink type.
func copyKind(path topo.Path) topo.PathType {
	if path.Type <= topo.C2C {
		return topo.NVL
	}
	return path.Type
}

// legs returns the worst path from a GPU to a server and the worst path from a server to a NIC: the
// worst type and the smallest bandwidth.
func (p *planner) legs(g int, servers, nics []int) (copies, network topo.Path) {
	copies, network = topo.Path{Type: topo.LOC, Bandwidth: bandwidths.Local},
		topo.Path{Type: topo.LOC, Bandwidth: bandwidths.Local}
	for _, s := range servers {
		copies = worse(copies, p.toGPU[g][s].Path)
		for _, n := range nics {
			network = worse(network, p.toNIC[s][n].Path)
		}
	}
	return copies, network
}

func worse(a, b topo.Path) topo.Path {
	return topo.Path{Type: max(a.Type, b.Type), Bandwidth: min(a.Bandwidth, b.Bandwidth)}
}

// plan returns the lanes, in the order of GPUs.
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

// settled returns the lanes of refused and pinned GPUs, and empty lanes for the remaining GPUs.
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

// problem returns the choice of NICs that remains, the settled lanes, and the open GPUs.
func (p *planner) problem() (s *spreading, lanes []Lane, open []int) {
	s = &spreading{
		onNIC: make([]float64, len(p.host.NICs)), onGPU: make([]float64, len(p.host.GPUs)),
	}
	known := true // whether every usable NIC states a rate
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

// spread chooses a NIC for every GPU without an assigned lane. plan uses spread if the source does
// not state every bandwidth.
func (p *planner) spread() []Lane {
	s, lanes, open := p.problem()
	if len(s.rate) == 0 || len(open) == 0 {
		return lanes
	}
	chosen := make([][]int, len(p.host.GPUs)) // [GPU]: NICs
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

// putOn adds a lane to the loads of NICs and GPUs, in lanes.
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

// stripe adds a NIC without a lane to every lane with an option over the NIC that is as good as the
// option over the chosen NIC.
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

// empty returns a lane without a route.
func (p *planner) empty(g int) Lane {
	l := Lane{GPU: p.host.GPUs[g].BusID, Role: RoleFar, Servers: []string{}, NICs: []string{}, Rail: -1, Path: topo.DIS}
	if p.isNear(g) {
		l.Role = RoleNear
	}
	return l
}

// over returns a lane over the NICs that spread chose.
func (p *planner) over(g int, nics []int) Lane {
	slices.SortStableFunc(nics, func(a, b int) int { return cmp.Compare(p.toNIC[g][a].Type, p.toNIC[g][b].Type) })
	o := p.option(g, nics[0])
	servers := []int{throughMemory}
	if o.kind != KindBounce {
		servers = o.servers // the GPU of the lane, if the lane is direct
	}
	var parts []part
	for _, n := range nics {
		for _, s := range servers {
			parts = append(parts, part{s, n, 1})
		}
	}
	return p.lane(g, parts)
}

// lane returns a lane over the parts, which have whole weights.
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

// setLegs sets Copy and Network of a lane to the worst paths of staged members.
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

// compare sets Compared of lanes: the rates of a staged lane if the lane used the memory of the
// CPU, and the rates of a bounce lane if the lane were staged. The rest of the lanes stay as
// planned.
func (p *planner) compare(lanes []Lane) {
	if len(lanes) > maxPolished {
		return
	}
	var planned []carried
	for _, l := range lanes {
		planned = append(planned, p.carriedBy(l))
	}
	loads := p.loads(planned)
	for g := range lanes {
		l := &lanes[g]
		if l.Pinned || l.Kind != KindStaged && l.Kind != KindBounce || l.Path == topo.DIS {
			continue
		}
		other := p.otherwise(g, planned[g], l.Kind)
		if other == nil {
			continue
		}
		own, changed := loads[g], p.network.load(carried{g, other}, bothDirections)
		capacity := p.capacity() // after the load of changed, which can add pipes
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

// otherwise returns the parts of a staged lane with the memory of the CPU in place of the server
// GPUs, or the parts of a bounce lane with the GPUs of servers in place of the memory of the CPU;
// nil if the alternative does not exist.
func (p *planner) otherwise(g int, c carried, kind string) (parts []part) {
	for _, q := range c.parts {
		switch {
		case q.server == g:
			parts = append(parts, q)
		case kind == KindStaged:
			if p.toNIC[g][q.nic].Type == topo.DIS {
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

// String returns the rates while every lane is busy. If the rates are nearly equal, String adds the
// rates of the lane alone, which decide.
func (c *Comparison) String() string {
	if math.Abs(c.Relay-c.Without) <= simplerCost*max(c.Relay, c.Without) {
		return fmt.Sprintf("while all lanes are busy %s with the relay and %s through host memory; alone %s with the "+
			"relay, %s through host memory",
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

// estimate sets Bandwidth of lanes.
func (p *planner) estimate(lanes []Lane) {
	if !p.known {
		return
	}
	for g, rate := range p.ratesOf(lanes).busy {
		lanes[g].Bandwidth = rate
	}
}

// reason returns a sentence that explains the lane.
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
		sentence = fmt.Sprintf("%s, %s, %s far (%s), so its traffic ", list(l.NICs), p.why(g, l.NICs),
			number(l.NICs, "is", "are"), describe(p.toNIC[g][first].Path))
		if l.Relay {
			sentence += fmt.Sprintf("is staged on %s, near %s (copies: %s)", p.names(staging),
				number(l.NICs, "that NIC", "those NICs"), describe(*l.Copy))
		} else {
			sentence += "bounces through host memory"
		}
	}
	switch {
	case l.Kind == KindBounce && l.Compared == nil && p.known:
		sentence += fmt.Sprintf(": no GPU that could stage it is near enough to %s (%v)",
			number(l.NICs, "that NIC", "those NICs"), p.limit[p.nic(l.NICs[0])])
	case l.Kind == KindBounce && l.Compared != nil && l.Compared.Relay > l.Compared.Without*(1+simplerCost):
		sentence += fmt.Sprintf(": staged it would be faster, but another lane would be slower: %v", l.Compared)
	case l.Kind == KindBounce && l.Compared != nil:
		sentence += fmt.Sprintf(": staged it would not be faster: %v", l.Compared)
	case l.Compared != nil:
		sentence += "; " + l.Compared.String()
	}
	if p.ahead != "" {
		sentence += "; the lanes are " + p.ahead + ", which the estimate shows as faster than the planner's choice"
	}
	var read []int
	if kinds[KindDirect] {
		read = append(read, g)
	}
	return sentence + p.withoutGDR(append(read, staging...), l.NICs)
}

// regular reports whether the members of the lane have equal weights, and the NICs equal servers.
func (l *Lane) regular() bool {
	for _, m := range l.Members {
		if m.Weight != l.Members[0].Weight {
			return false
		}
	}
	return len(l.Members) == len(l.NICs)*max(1, len(l.Servers))
}

// differ reports whether the paths from a GPU to the NICs differ.
func (p *planner) differ(g int, nics []string) bool {
	first := p.toNIC[g][p.nic(nics[0])].Path
	return slices.ContainsFunc(nics, func(name string) bool { return p.toNIC[g][p.nic(name)].Path != first })
}

// mixture returns a sentence with the share of the traffic per route of a lane.
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
	const maxServers = 8
	if len(parts) > maxServers {
		parts = append(parts[:maxServers], fmt.Sprintf("and %d more routes", len(parts)-maxServers))
	}
	why := "so that the slowest lane of the host is as fast as possible"
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

// withoutGDR returns a clause that names the GPUs and NICs with GPUDirect RDMA off by the source;
// empty without such devices.
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
	return "; it needs GPUDirect RDMA, which the file reports as off for " + list(off)
}

// isOff reports whether the source states that a device has no GPUDirect RDMA.
func isOff(gdr *bool) bool { return gdr != nil && !*gdr }

// why returns a phrase with the reason for the choice of NICs: the distance compared with unchosen
// NICs of the host.
func (p *planner) why(g int, names []string) string {
	chosen := p.nic(names[0])
	nearer, alike, usable := "", false, false
	for n := range p.host.NICs {
		if p.toNIC[g][n].Type == topo.DIS {
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
		return fmt.Sprintf("chosen so that the slowest lane is as fast as possible, though %s is nearer", nearer)
	case nearer != "":
		return fmt.Sprintf("%s that can carry a lane (%s is nearer)", number(names, "the nearest NIC", "the nearest NICs"),
			nearer)
	case alike:
		return number(names, "one of the nearest NICs", "some of the nearest NICs")
	}
	return number(names, "the nearest NIC", "the nearest NICs")
}

// nothing returns the reason why a lane has no NIC.
func (p *planner) nothing() string {
	var without []string
	for n, nic := range p.host.NICs {
		why := cmp.Or(p.bad[n], "no path leads to it")
		without = append(without, nic.Name+": "+why)
	}
	what := "this host has no RDMA NIC"
	if len(without) > 0 {
		what = "this host has no usable RDMA NIC (" + strings.Join(without, "; ") + ")"
	}
	return what + "; so the lane reaches only containers of this host, by one copy, unless [[plan.lane]] in " +
		"config.toml assigns servers and NICs"
}

// notes returns sentences about the host as a whole.
func (p *planner) notes(lanes []Lane) []string {
	notes := slices.Clone(p.host.Notes)
	open := slices.ContainsFunc(lanes, func(l Lane) bool { return l.Role != RoleRefused })
	switch {
	case len(lanes) == 0:
		notes = append(notes, "this host has no GPU, so the plan has no lane")
	case !open:
		notes = append(notes, "no GPU of this host can have a lane")
	}
	gdr := false // GPUDirect RDMA is off by the file, and a lane needs GPUDirect RDMA
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
	notes = append(notes, p.nicNotes(lanes, used, open)...)
	if relayed == 0 && p.stageable != nil && slices.ContainsFunc(lanes, func(l Lane) bool { return len(l.NICs) > 0 }) {
		notes = append(notes, p.noRelay(lanes, far)...)
	}
	return append(notes, p.estimateNotes(lanes, relayed, gdr)...)
}

// nicNotes returns sentences about idle NICs, NICs that cannot flush, and functions of NICs that
// lanes do not use.
func (p *planner) nicNotes(lanes []Lane, used map[string]bool, open bool) (notes []string) {
	functions := map[int]int{} // [NIC]: number of functions left to other tenants
	for n, nic := range p.host.NICs {
		switch {
		case used[nic.Name]:
		case p.owners[n] != n && !p.config.VirtualFunctions:
			functions[p.owners[n]]++
		case nic.Refusal() == "" && !nic.Active():
			notes = append(notes, fmt.Sprintf("NIC %s has no active port (%s) and carries only lanes of the configuration",
				nic.Name, states(nic)))
		case p.usable(n) && !used[nic.Name] && open:
			notes = append(notes, p.idle(nic.Name, lanes))
		}
	}
	for _, nic := range p.host.NICs {
		if used[nic.Name] && nic.CannotFlush() {
			notes = append(notes, fmt.Sprintf("NIC %s (%s) cannot flush its writes into GPU memory: %s", nic.Name, nic.Protocol,
				topo.CannotFlush))
		}
	}
	for _, n := range slices.Sorted(maps.Keys(functions)) {
		notes = append(notes, fmt.Sprintf("%s has %d virtual functions or subfunctions, which lanes leave to other "+
			"tenants: they share its port (plan.virtual_functions)", p.host.NICs[n].Name, functions[n]))
	}
	return notes
}

// estimateNotes returns sentences about the estimate of the lanes' rates. gdr means that the file
// has GPUDirect RDMA off and that a lane needs GPUDirect RDMA.
func (p *planner) estimateNotes(lanes []Lane, relayed int, gdr bool) (notes []string) {
	if relayed > 0 && p.known && !p.gains(lanes) {
		notes = append(notes, "with all lanes busy the relay has no benefit on this host: by the estimate, no choice of "+
			"lanes without relays is slower; a GPU alone is faster with it")
	}
	if p.ahead != "" {
		notes = append(notes, "the lanes are "+p.ahead+", which the estimate shows as faster than the planner's choice")
	}
	if gpus := p.closeCalls(lanes); len(gpus) > 0 {
		notes = append(notes, fmt.Sprintf("for %s the estimates differ by under 25 %% and depend on constants: try "+
			"peerlane plan --measure",
			p.names(gpus)))
	}
	if gdr {
		notes = append(notes, "the file reports GPUDirect RDMA as off for NICs or GPUs whose lanes need it; that can mean "+
			"that nvidia-peermem was not loaded when the file was written, so lanes are planned and estimated as if it "+
			"were on, and only NCCL TODAY uses the file's value")
	}
	if !p.known && relayed > 0 {
		notes = append(notes, "the source does not state all bandwidths, so whether the relay makes a lane faster is not "+
			"known")
	}
	return notes
}

// idle returns a note about a NIC without a lane, with the gain that the slowest GPU can have at
// most from the NIC.
func (p *planner) idle(name string, lanes []Lane) string {
	slowest, _ := p.slowest(lanes)
	switch {
	case !p.known:
		return fmt.Sprintf("NIC %s is idle: the source does not state all bandwidths, and each lane has a NIC that is as "+
			"near",
			name)
	case slowest == 0 || p.bound <= slowest*1.001:
		return fmt.Sprintf("NIC %s is idle: by the estimate, using it would not make the slowest GPU faster", name)
	}
	return fmt.Sprintf("NIC %s is idle: by the estimate, using it would make the slowest GPU at most %.1f %% faster",
		name, 100*(p.bound/slowest-1))
}

// slowest returns the rate of the slowest open lane, GB/s, and the number of open lanes. An open
// lane is neither refused nor pinned.
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

// noRelay returns the reason why no lane of the host has a relay: no GPU can stage, or the best
// choice with relays is not faster; nil without a proof.
func (p *planner) noRelay(lanes []Lane, far int) []string {
	const nothing = "the relay has no benefit on this host: "
	switch {
	case !*p.stageable && far > 0:
		return []string{nothing + "no GPU is near enough to a NIC to stage for others; gdr.max_path in config.toml " +
			"sets the distance"}
	case p.config.Near == nearDirect && far == 0:
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
		return []string{fmt.Sprintf("relays would make the GPUs of this host at most %.1f %% faster", 100*(gain-1))}
	case far == 0:
		return []string{nothing + "every GPU with a lane is near a NIC"}
	}
	return []string{nothing + "by the estimate, no GPU is faster with it"}
}

// gains reports whether the lanes are faster than the best choice without relays. The slowest lanes
// decide first. For a host with too many lanes, gains returns true without a check.
func (p *planner) gains(lanes []Lane) bool {
	if len(lanes) > maxPolished {
		return true // too large for the check
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

// lacksGDR reports whether a lane needs GPUDirect RDMA that is off by the source.
func (p *planner) lacksGDR(l Lane) bool {
	var places []int
	for _, m := range l.Members {
		if m.Server != "" {
			places = append(places, p.gpu(m.Server))
		}
	}
	return len(places) > 0 && p.withoutGDR(places, l.NICs) != ""
}

func states(n topo.NIC) string {
	var s []string
	for _, p := range n.Ports {
		s = append(s, fmt.Sprintf("port %d %s", p.Number, p.State))
	}
	return strings.Join(s, ", ")
}

func describe(p topo.Path) string {
	if p.Type == topo.DIS || p.Bandwidth == 0 { // a source can state types only
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
