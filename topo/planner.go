package topo

import (
	"cmp"
	"fmt"
	"maps"
	"math/bits"
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
	// idle are NICs that are left out because the host is slower with them.
	idle map[int]bool
	// options are what each GPU can do over each NIC while those are idle; nil
	// where nobody has asked yet.
	options [][]*option // [GPU][NIC]
}

func newPlanner(h *Host, c PlanConfig) (*planner, error) {
	p := &planner{
		network: newNetwork(h), host: h, config: c, rails: map[string]int{},
		pinned: make([]*Lane, len(h.GPUs)),
	}
	for _, g := range h.GPUs {
		p.refused = append(p.refused, p.refusal(g))
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
	p.leave(nil)
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

// leave leaves NICs idle.
func (p *planner) leave(idle map[int]bool) {
	p.idle = idle
	p.options = make([][]*option, len(p.host.GPUs))
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

// servers are the GPUs near a NIC that a lane of GPU g can be staged on: all of
// them, or those that NVLink joins to it where it joins some. One whose limit has
// no room for a lane's slots is left out, and those of the others are then the
// larger.
func (p *planner) servers(g, n int) []int {
	found := make([]int, 0, len(p.beside[n]))
	for _, s := range p.beside[n] {
		if s != g && p.toGPU[g][s].Type < DIS && !p.exclude.toGPU[[2]int{g, s}] {
			found = append(found, s)
		}
	}
	far := func(s int) bool { return copyKind(p.toGPU[g][s].Path) > NVL }
	if slices.ContainsFunc(found, func(s int) bool { return !far(s) }) {
		found = slices.DeleteFunc(found, far)
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
		if !p.idle[n] && p.near(g, n) {
			away := p.toNIC[g][n].Type
			options[n], direct = &option{KindDirect, away, away, []int{g}}, true
		}
	}
	if direct {
		return options
	}
	for n := range options {
		if !p.usable(n) || p.idle[n] || p.exclude.toNIC[[2]int{g, n}] {
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
	lanes := p.decide()
	p.leaveIdle(lanes)
	if len(p.idle) > 0 {
		lanes = p.decide()
	}
	for g := range lanes {
		if lanes[g].Reason == "" {
			lanes[g].Reason = p.reason(g, lanes[g])
		}
	}
	return lanes
}

// decide is plan without reasons.
func (p *planner) decide() []Lane {
	lanes := p.spread()
	p.compare(lanes)
	p.estimate(lanes)
	return lanes
}

// What leaveIdle looks through.
const (
	allSubsets = 6   // NICs, of which every subset is tried
	mostNICs   = 64  // with more of them nothing is tried
	mostPairs  = 512 // nor with more pairs of a GPU and a NIC
)

// leaveIdle finds the NICs that the host is faster without: the slowest lane
// decides, and of equal choices the one with the fewest idle NICs. A slow NIC can
// be such a one, when it is the only one near a GPU.
func (p *planner) leaveIdle(lanes []Lane) {
	var nics []int
	sum := 0.0
	for n := range p.host.NICs {
		if p.usable(n) {
			nics = append(nics, n)
			sum += p.nicRate(n)
		}
	}
	best, open := p.slowest(lanes)
	// No plan is faster than all NICs together.
	couldBe := func(sum float64) bool { return compareRoughly(best, sum/float64(open)) < 0 }
	if !p.known || open == 0 || best == 0 || len(nics) < 2 || len(nics) > mostNICs || len(nics)*len(lanes) > mostPairs || !couldBe(sum) {
		return
	}
	try := func(idle map[int]bool) bool {
		left := sum
		for n := range idle {
			left -= p.nicRate(n)
		}
		if !couldBe(left) {
			return false
		}
		before := p.idle
		p.leave(idle)
		if rate, _ := p.slowest(p.decide()); compareRoughly(rate, best) > 0 {
			best = rate
			return true
		}
		p.leave(before)
		return false
	}
	if len(nics) > allSubsets {
		for better := true; better; {
			better = false
			for _, n := range nics {
				idle := maps.Clone(p.idle)
				if idle == nil {
					idle = map[int]bool{}
				}
				idle[n] = true
				better = len(idle) < len(nics) && try(idle) || better
			}
		}
		return
	}
	for count := 1; count < len(nics); count++ {
		for subset := range 1 << len(nics) {
			if bits.OnesCount(uint(subset)) != count {
				continue
			}
			idle := map[int]bool{}
			for i, n := range nics {
				if subset>>i&1 == 1 {
					idle[n] = true
				}
			}
			try(idle)
		}
	}
}

// slowest is the rate of the slowest of the lanes that configuration leaves open,
// and their number.
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

// problem is the choice that is left of NICs to GPUs: the lanes that are settled
// already, and the GPUs that are open.
func (p *planner) problem() (s *spreading, lanes []Lane, open []int) {
	s = &spreading{
		onNIC: make([]float64, len(p.host.NICs)), onGPU: make([]float64, len(p.host.GPUs)),
	}
	known := true // whether NICs can be told apart by what they carry
	for n := range p.host.NICs {
		known = known && (!p.usable(n) || p.idle[n] || p.host.NICs[n].RateGbps() > 0)
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
	lanes = make([]Lane, len(p.host.GPUs))
	for g := range p.host.GPUs {
		lanes[g] = p.empty(g)
		switch {
		case p.refused[g] != "":
			lanes[g].Role, lanes[g].Reason = RoleRefused, p.refused[g]
		case p.pinned[g] != nil:
			lanes[g] = *p.pinned[g]
			p.putOn(lanes[g], s.onNIC, s.onGPU)
		default:
			open = append(open, g)
			s.option = append(s.option, p.optionsOf(g))
		}
	}
	return s, lanes, open
}

// spread chooses a NIC for every GPU that configuration gives no lane.
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
	l := p.empty(g)
	o := p.option(g, nics[0])
	l.Kind = o.kind
	if o.kind == KindStaged {
		p.stageOn(&l, g, o.servers, nics)
	}
	p.setNICs(&l, g, nics)
	return l
}

func (p *planner) setNICs(l *Lane, g int, nics []int) {
	for _, n := range nics {
		l.NICs = append(l.NICs, p.host.NICs[n].Name)
	}
	l.Rail = p.rail(l.NICs[0])
	l.Path = p.toNIC[g][nics[0]].Type
}

func (p *planner) stageOn(l *Lane, g int, servers, nics []int) {
	l.Relay = true
	for _, s := range servers {
		l.Servers = append(l.Servers, p.host.GPUs[s].BusID)
	}
	copies, network := p.legs(g, servers, nics)
	l.Copy = &copies
	if len(nics) > 0 {
		l.Network = &network
	}
}

// atOnce is the number of staged lanes from which on compare takes all relays out
// at once that do not pay.
const atOnce = 64

// compare takes the relay out of lanes that it does not make faster: while all
// lanes are busy or, where that is the same, with the lane alone. Each is compared
// with itself through the CPU's memory, the others as planned, and the one that
// loses most by the relay goes first: the others can be the faster for it.
func (p *planner) compare(lanes []Lane) {
	if !p.known {
		return
	}
	var planned, bouncing []carried
	var open []int
	for g, l := range lanes {
		c := p.carriedBy(l)
		planned = append(planned, c)
		if l.Kind == KindStaged && !l.Pinned && l.Path < DIS {
			open = append(open, g)
			c.kind = KindBounce
		}
		bouncing = append(bouncing, c)
	}
	loads, without := p.loads(planned), p.loads(bouncing)
	capacity := p.capacity()
	for len(open) > 0 {
		busy, _ := share(loads, capacity)
		worst, most := []int(nil), 0.0
		for _, g := range open {
			staged := loads[g]
			loads[g] = without[g]
			bounced, _ := share(loads, capacity)
			loads[g] = staged
			c := &Comparison{busy[g], bounced[g], alone(staged, capacity), alone(without[g], capacity)}
			lanes[g].Compared = c
			loss := c.Without / c.Relay
			switch {
			case c.relayIsFaster():
			case len(open) >= atOnce:
				worst = append(worst, g)
			case worst == nil || loss > most*(1+1e-9):
				worst, most = []int{g}, loss
			}
		}
		if worst == nil {
			return
		}
		for _, g := range worst {
			l := &lanes[g]
			l.Kind, l.Relay, l.Servers, l.Copy, l.Network = KindBounce, false, []string{}, nil, nil
			loads[g] = without[g]
		}
		open = slices.DeleteFunc(open, func(g int) bool { return slices.Contains(worst, g) })
	}
}

func (c *Comparison) relayIsFaster() bool {
	return cmp.Or(compareRoughly(c.Relay, c.Without), compareRoughly(c.RelayAlone, c.WithoutAlone)) > 0
}

// String is both figures, and those of the lane alone where they decided.
func (c *Comparison) String() string {
	if compareRoughly(c.Relay, c.Without) == 0 {
		return fmt.Sprintf("%s either way while all lanes are busy; alone %s with the relay, %s through host memory",
			gbs(c.Relay), gbs(c.RelayAlone), gbs(c.WithoutAlone))
	}
	return fmt.Sprintf("%s with the relay, %s through host memory", gbs(c.Relay), gbs(c.Without))
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
	first := p.nic(l.NICs[0])
	several := len(l.NICs) > 1
	number := func(one, more string) string {
		if several {
			return more
		}
		return one
	}
	to, path := list(l.NICs), describe(p.toNIC[g][first].Path)
	if l.Kind == KindDirect {
		return fmt.Sprintf("%s %s its memory directly (%s), so no relay is needed%s",
			to, number("reads and writes", "read and write"), path, p.withoutGDR([]int{g}, l.NICs))
	}
	sentence := fmt.Sprintf("%s, %s, %s far (%s), so its traffic ", to, p.why(g, first, several), number("is", "are"), path)
	staging := p.option(g, first).servers
	switch {
	case l.Kind == KindStaged:
		sentence += fmt.Sprintf("is staged on %s, near %s (copies: %s)", p.names(staging), number("that NIC", "those NICs"), describe(*l.Copy))
		if l.Compared != nil {
			sentence += "; " + l.Compared.String()
		}
		return sentence + p.withoutGDR(staging, l.NICs)
	case l.Compared != nil:
		return sentence + fmt.Sprintf("bounces through host memory: staged on %s it would not be faster: %v", p.names(staging), l.Compared)
	}
	return sentence + fmt.Sprintf("bounces through host memory: no GPU that it could be staged on is near enough to %s (%v)", number("that NIC", "those NICs"), p.limit[first])
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

// why says how NICs came to a lane.
func (p *planner) why(g, chosen int, several bool) string {
	for n := range p.host.NICs {
		if p.option(g, n) != nil && p.nearer(g, n, chosen) {
			return "chosen to spread the lanes evenly"
		}
	}
	if several {
		return "the nearest NICs"
	}
	return "the nearest NIC"
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
	return what + "; so no GPU is near one and nothing can be relayed, unless [[plan.lane]] in config.toml assigns servers and NICs"
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
	far, relayed, rejected := 0, 0, 0
	for _, l := range lanes {
		for _, name := range l.NICs {
			used[name] = true
		}
		gdr = gdr || p.lacksGDR(l)
		if l.Role != RoleFar || len(l.NICs) == 0 {
			continue
		}
		far++
		switch {
		case l.Relay:
			relayed++
		case l.Compared != nil:
			rejected++
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
		case p.idle[n]:
			notes = append(notes, fmt.Sprintf("NIC %s is left idle: by the estimate, the slowest GPU is faster without it", nic.Name))
		case p.usable(n) && !used[nic.Name] && open:
			notes = append(notes, fmt.Sprintf("NIC %s is idle: no GPU is the better for it", nic.Name))
		}
	}
	for _, n := range slices.Sorted(maps.Keys(functions)) {
		notes = append(notes, fmt.Sprintf("%s has %d virtual functions or subfunctions, which lanes leave to others: they share its port (plan.virtual_functions)", p.host.NICs[n].Name, functions[n]))
	}
	switch {
	case far > 0 && relayed == 0 && rejected > 0:
		notes = append(notes, "the relay brings nothing on this host: by the estimate, no far GPU is faster with it")
	case far > 0 && relayed == 0:
		notes = append(notes, "the relay brings nothing on this host: no GPU is near enough to a NIC for others to be staged on; gdr.max_path in config.toml says what is near")
	case far == 0 && slices.ContainsFunc(lanes, func(l Lane) bool { return l.Role == RoleNear }):
		notes = append(notes, "the relay brings nothing on this host: every GPU with a lane is near a NIC")
	}
	if relayed > 0 && p.known && !p.fasterByRelays(lanes) {
		notes = append(notes, "with all lanes busy the relay brings nothing here; a far GPU alone is faster")
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

// lacksGDR says whether by the source a lane lacks the GPUDirect RDMA that it
// needs.
func (p *planner) lacksGDR(l Lane) bool {
	gpus := l.Servers
	if l.Kind == KindDirect {
		gpus = []string{l.GPU}
	}
	var places []int
	for _, gpu := range gpus {
		places = append(places, p.gpu(gpu))
	}
	return len(places) > 0 && p.withoutGDR(places, l.NICs) != ""
}

// fasterByRelays says whether a relayed lane is faster than it would be without
// any relay on the host, all lanes busy.
func (p *planner) fasterByRelays(lanes []Lane) bool {
	without := slices.Clone(lanes)
	for g := range without {
		if without[g].Kind == KindStaged && without[g].Path < DIS {
			without[g].Kind = KindBounce
		}
	}
	bounced := p.ratesOf(without).busy
	for g, l := range lanes {
		if l.Relay && compareRoughly(l.Bandwidth, bounced[g]) > 0 {
			return true
		}
	}
	return false
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
