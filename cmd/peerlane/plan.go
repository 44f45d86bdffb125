package main

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

func newPlanCommand(a *app) *cobra.Command {
	var explain string
	var estimate, measure bool
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Show each GPU's lane to the network, with the reason",
		Long: `Plan a lane for each GPU of this host, or of a topology file: NICs, server GPUs and
the reason. The configuration file (etc/peerlane/config.toml) can assign lanes and
define which paths are near.

LANE is the route: direct (the NIC reads and writes the GPU's memory), the server GPUs
of a staged lane, bounce (through host memory), or this host: a lane without a NIC
reaches only the other containers of this host. If the routes of a lane have unequal
shares of its traffic, LANE and NIC show the shares. PATH is the path from the GPU to
its NIC without a relay, and LEGS are the two paths with one: to the server GPUs, and
from them to the NIC. GB/S is the estimated rate of the lane in each direction while
every lane is busy.

--estimate compares NCCL with its defaults, without PXN and with PXN, NCCL with
GPUDirect RDMA disabled, and the plan. FULL is the link or port that is saturated while
every GPU is busy. docs/estimate.md describes the model and its limits.

The table fits 100 columns, or the terminal; -o wide has a line for each lane.

--measure first copies between every two GPUs and between GPUs and host memory, as
peerlane self-test --all --again does, and connects two queue pairs of each NIC with each
other, which read and write host memory and the memory of GPUs behind a CPU. It stores
the rates in /var/lib/peerlane/measured.json. Plans and estimates then use these rates
instead of constants, as long as the devices of the host stay the same.

With -o svg or -o html the plan is a picture in one file: the host as a tree, the lanes
in the colours of the estimate, and in html a table. Move the pointer over a part to see
details.`,
		Example: `  peerlane plan
  peerlane plan --explain gpu3
  peerlane plan --estimate --input topo.xml -o json
  peerlane plan --measure --estimate
  peerlane plan -o html > plan.html`,
		Args: noArgs,
	}
	host, form := addHost(cmd), addForm(cmd, formWide, formSVG, formHTML)
	host.addSoftware()
	cmd.Flags().StringVar(&host.one, "host", "",
		"plan host `N` of a file that describes several: a number from 0, or its host_hash")
	must(cmd.RegisterFlagCompletionFunc("host", func(*cobra.Command, []string, string) ([]string,
		cobra.ShellCompDirective) {
		return host.completeHosts()
	}))
	cmd.Flags().BoolVar(&host.anyVendor, "any-vendor", false,
		"plan GPUs of any vendor, for study; relays need NVIDIA GPUs")
	cmd.Flags().StringVar(&explain, "explain", "", "explain the lane of `GPU` in sentences")
	must(cmd.RegisterFlagCompletionFunc("explain", func(*cobra.Command, []string, string) ([]string,
		cobra.ShellCompDirective) {
		return a.completeGPUs(cmd, host)
	}))
	cmd.Flags().BoolVar(&measure, "measure", false,
		"first measure copies between GPUs and to host memory, and loopbacks of NICs, for all plans of this host; needs "+
			"root, up to two minutes, and memory on idle GPUs")
	cmd.Flags().BoolVar(&estimate, "estimate", false, "estimate each GPU's network bandwidth, three ways")
	cmd.RunE = func(*cobra.Command, []string) error {
		explains := cmd.Flags().Changed("explain")
		if explains && estimate {
			return usageError{cmd.CommandPath(),
				errors.New("--explain describes one GPU and --estimate all GPUs: give one or the other")}
		}
		if form.picture() && (explains || estimate) {
			return usageError{cmd.CommandPath(),
				fmt.Errorf("-o %s draws the plan with its estimate: omit --explain and --estimate", form.value)}
		}
		if measure {
			if err := a.measureHost(cmd, host); err != nil {
				return err
			}
		}
		p, err := a.plan(host)
		if err != nil {
			return err
		}
		switch {
		case form.picture():
			return a.printPicture(form.value, p.host, p.plan)
		case explains:
			sentences, err := p.plan.Explain(p.host, explain)
			if err != nil {
				return err
			}
			if form.value == formJSON {
				return a.printJSON(map[string][]string{"sentences": sentences})
			}
			for _, s := range sentences {
				a.out.Println(s)
			}
			return nil
		case estimate:
			e, err := p.plan.Estimate(p.host)
			if err != nil {
				return fmt.Errorf("%s: %w", origin(p.plan.Source), err)
			}
			if form.value == formJSON {
				return a.printJSON(estimated{e, p.plan.ModelLinks(p.host)})
			}
			a.printEstimate(p.plan, e)
			a.printModelLinks(p.host, p.plan)
			return nil
		case form.value == formJSON:
			return a.printJSON(p.plan)
		}
		a.printPlan(p.plan, form.value)
		if hook, err := hookPath(""); err == nil && host.live() {
			a.warnOfPairs(p, hook)
		}
		return nil
	}
	return cmd
}

// estimated is the JSON document of peerlane plan --estimate -o json.
type estimated struct {
	*planner.Estimate
	// Links lists the links whose rates are measured or assumed: all except PCIe links and
	// NVLinks, whose rates the host states.
	Links []planner.ModelLink `json:"links,omitempty"`
}

// planned holds a host, its plan and the configuration of the plan.
type planned struct {
	host   *topo.Host
	plan   *planner.Plan
	config config.Config
	// learned reports that the self-tests of this boot added rates that the stored measurement
	// lacks.
	learned bool
}

// plan reads the host and the configuration, and plans.
func (a *app) plan(host *hostFlags) (*planned, error) {
	h, err := host.read()
	if err != nil {
		return nil, err
	}
	return a.planFor(h, host.software, host.anyVendor)
}

// planFor reads the configuration, and plans.
func (a *app) planFor(h *topo.Host, software, anyVendor bool) (*planned, error) {
	c, err := config.Load(a.layout.ConfigFile())
	if err != nil {
		return nil, err
	}
	a.useMeasured(h)
	learned := h.Source.Sysfs == "/sys" && a.useKnownPairs(h, &planned{config: c})
	planning := c.PlannerConfig()
	planning.Software = planning.Software || software
	planning.AnyVendor = anyVendor
	plan, err := planner.Make(h, planning)
	if err != nil {
		if hosts := new(planner.SeveralHostsError); errors.As(err, &hosts) {
			return nil, fmt.Errorf("%s: %w", origin(h.Source), err)
		}
		return nil, fmt.Errorf("%s: %w", a.layout.ConfigFile(), err)
	}
	return &planned{h, plan, c, learned}, nil
}

func (a *app) printPlan(p *planner.Plan, form string) {
	a.out.Printf("Plan of the host read from %s\n\n", origin(p.Source))
	if len(p.Lanes) > 0 {
		a.section("Lanes", a.laneTable(p, form))
	}
	if len(p.Staging) > 0 {
		a.section("What relays may take from server GPUs", a.stagingTable(p))
	}
	a.printNotes(p.Notes)
}

// indices maps PCI addresses of GPUs to indices.
func indices(p *planner.Plan) map[string]string {
	index := map[string]string{}
	for _, g := range p.GPUs {
		index[g.BusID] = strconv.Itoa(g.Index)
	}
	return index
}

func (a *app) laneTable(p *planner.Plan, form string) *table.Writer {
	t := a.newTable("GPU", "ADDRESS", "ROLE", "LANE", "NIC", "PATH", "LEGS", "GB/S", "REASON")
	index := indices(p)
	for _, l := range p.Lanes {
		var servers []string
		for _, s := range l.Servers {
			servers = append(servers, index[s])
		}
		nics := strings.Join(l.NICs, ", ")
		carrier, bandwidth := l.Kind, ""
		path, legs := terminal.Paint("-"), terminal.Paint("-")
		if carrier == "" && l.Role != planner.RoleRefused {
			carrier = "this host" // route direct within this host, without a NIC
		}
		if len(servers) > 0 {
			carrier = "GPU " + strings.Join(servers, ", ")
		}
		if carriers, byNIC := shares(l, index); carriers != "" {
			carrier, nics = carriers, byNIC
		}
		if l.Path != topo.DIS {
			path = a.paint(l.Path.String(), typeColours(l.Path)...)
		}
		if l.Copy != nil {
			legs = a.paint(l.Copy.Type.String(), typeColours(l.Copy.Type)...)
		}
		if l.Network != nil {
			network := a.paint(l.Network.Type.String(), typeColours(l.Network.Type)...)
			if l.Copy == nil {
				legs = terminal.Concat("+", network)
			} else {
				legs = terminal.Concat(legs, "+", network)
			}
		}
		if l.Bandwidth > 0 {
			bandwidth = gigabytes(l.Bandwidth)
		}
		t.AppendRow(table.Row{
			index[l.GPU], l.GPU, a.role(l.Role), dash(carrier), dash(nics), path, legs, dash(bandwidth), l.Reason,
		})
	}
	a.fit(t, "REASON", form)
	return t
}

// shares formats the routes and the NICs of a lane with their shares of the traffic. A text is
// empty if the lane has a single one, or if the shares are equal.
func shares(l planner.Lane, index map[string]string) (carriers, nics string) {
	byCarrier, byNIC := map[string]int{}, map[string]int{}
	var carrierOrder, nicOrder []string
	for _, m := range l.Members {
		carrier := l.KindOf(m)
		if carrier == planner.KindStaged {
			carrier = "GPU " + index[m.Server]
		}
		if byCarrier[carrier] == 0 {
			carrierOrder = append(carrierOrder, carrier)
		}
		if byNIC[m.NIC] == 0 {
			nicOrder = append(nicOrder, m.NIC)
		}
		byCarrier[carrier] += m.Weight
		byNIC[m.NIC] += m.Weight
	}
	sum := l.Weights()
	alike, staged := true, true
	for _, weights := range []map[string]int{byCarrier, byNIC} {
		for _, w := range weights {
			alike = alike && w*len(weights) == sum
		}
	}
	for _, carrier := range carrierOrder {
		staged = staged && strings.HasPrefix(carrier, "GPU ")
	}
	if alike && (staged || len(carrierOrder) == 1) {
		return "", ""
	}
	words := func(order []string, weights map[string]int) string {
		var list []string
		for _, name := range order {
			if weights[name] == sum {
				return name
			}
			list = append(list, fmt.Sprintf("%s %d%%", name, (100*weights[name]+sum/2)/sum))
		}
		return strings.Join(list, ", ")
	}
	return words(carrierOrder, byCarrier), words(nicOrder, byNIC)
}

func (a *app) stagingTable(p *planner.Plan) *table.Writer {
	t := a.newTable("GPU", "ADDRESS", "LANES", "PER CONTAINER", "ONE FOR EACH LANE", "LIMIT")
	index := indices(p)
	for _, s := range p.Staging {
		limit := "none"
		if s.Limit != nil {
			limit = humanize.IBytes(*s.Limit)
		}
		t.AppendRow(table.Row{index[s.GPU], s.GPU, s.Lanes, humanize.IBytes(s.PerContainer), humanize.IBytes(s.All), limit})
	}
	return t
}

func (a *app) printEstimate(p *planner.Plan, e *planner.Estimate) {
	if len(e.GPUs) == 0 {
		a.out.Printf("Nothing to estimate for the host read from %s: it has no GPU that can have a lane.\n", origin(p.Source))
		a.printNotes(p.Notes)
		return
	}
	a.out.Printf("Estimate for the host read from %s, GB/s in each direction\n\n", origin(p.Source))
	for _, part := range []struct {
		title      string
		routeRates func(planner.Rates) planner.RouteRates
		limit      bool
	}{
		{"All GPUs at once", func(r planner.Rates) planner.RouteRates { return r.RouteRates }, true},
		{"One GPU alone", func(r planner.Rates) planner.RouteRates { return r.Alone }, false},
	} {
		headings := []any{"GPU", "ADDRESS", "LANE", "NCCL TODAY"}
		if e.PXN {
			headings = append(headings, "NCCL WITH PXN")
		}
		headings = append(headings, "GPUDIRECT OFF", "AS PLANNED")
		if part.limit {
			headings = append(headings, "FULL")
		}
		t := a.newTable(headings...)
		for _, g := range e.GPUs {
			lane, err := p.Lane(g.GPU)
			must(err) // the estimate covers the lanes of the plan
			w := part.routeRates(g.Rates)
			row := table.Row{g.Index, g.GPU, dash(lane.Kind), gigabytes(w.NCCL)}
			if e.PXN {
				row = append(row, directions(part.routeRates(g.Send).PXN, part.routeRates(g.Receive).PXN))
			}
			row = append(row, gigabytes(w.HostMemory), gigabytes(w.Relay))
			if part.limit {
				row = append(row, dash(g.Limit))
			}
			t.AppendRow(row)
		}
		u := part.routeRates(e.Uniformity)
		row := table.Row{"", "", "uniformity", share(u.NCCL)}
		if e.PXN {
			row = append(row, share(u.PXN))
		}
		t.AppendRow(append(row, share(u.HostMemory), share(u.Relay)))
		a.section(part.title, t)
	}
	a.out.Println("NCCL TODAY: NCCL's defaults without PXN.")
	if e.PXN {
		a.out.Println(
			"NCCL WITH PXN: sending / receiving. PXN sends through a GPU near the NIC, where the ranks of both share a " +
				"container.")
	}
	a.out.Println("GPUDIRECT OFF: the same NICs, all traffic through host memory.")
	a.out.Println("AS PLANNED: the lanes of this plan.")
	a.out.Println("FULL: the link or port that has no room for more.")
	a.out.Println("Uniformity is the slowest GPU's share of the fastest's.")
	a.printNotes(p.Notes)
}

// directions formats the rates of sending and receiving, or one figure if they are equal.
func directions(send, receive float64) string {
	if s, r := gigabytes(send), gigabytes(receive); s != r {
		return s + " / " + r
	}
	return gigabytes(send)
}

func share(part float64) string { return strconv.FormatFloat(part, 'f', 2, 64) }

func (a *app) role(role string) terminal.Styled {
	switch role {
	case planner.RoleNear:
		return a.paint(role, green)
	case planner.RoleRefused:
		return a.paint(role, red)
	}
	return a.paint(role, yellow)
}

// completeGPUs completes the index of a GPU of the plan, and describes it with the PCI address.
func (a *app) completeGPUs(cmd *cobra.Command, host *hostFlags) ([]string, cobra.ShellCompDirective) {
	if err := a.start(cmd); err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	a.log.SetOutput(io.Discard) // a shell reads the output
	p, err := a.plan(host)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var gpus []string
	for _, g := range p.plan.GPUs {
		gpus = append(gpus, fmt.Sprintf("%d\t%s", g.Index, g.BusID))
	}
	return gpus, cobra.ShellCompDirectiveNoFileComp
}
