package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/hook/config"
	"github.com/peerlane/peerlane/topo"
)

func newPlanCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Show each GPU's lane to the network, and why it is that one",
		Long: `Plan a lane for each GPU of this host, or of an NCCL topology file: its NIC, the
GPUs that its traffic is staged on, and the reason. The configuration file
(etc/peerlane/config.toml) can assign lanes and say what counts as near.

PATH and GB/S are those from the GPU to its NIC without the relay.`,
		Example: `  peerlane plan
  peerlane plan --input topo.xml -o json`,
		Args: noArgs,
	}
	host, form := addHost(cmd), addForm(cmd)
	host.addSoftware()
	cmd.RunE = func(*cobra.Command, []string) error {
		plan, _, err := a.plan(host)
		if err != nil {
			return err
		}
		if form.value == formJSON {
			return a.printJSON(plan)
		}
		a.printPlan(plan)
		return nil
	}
	return cmd
}

// plan reads the host and the configuration, and plans.
func (a *app) plan(host *hostFlags) (*topo.Plan, config.Config, error) {
	h, err := host.read()
	if err != nil {
		return nil, config.Config{}, err
	}
	return a.planFor(h, host.software)
}

// planFor reads the configuration, and plans.
func (a *app) planFor(h *topo.Host, software bool) (*topo.Plan, config.Config, error) {
	c, err := config.Load(a.layout.ConfigFile())
	if err != nil {
		return nil, config.Config{}, err
	}
	c.Plan.Software = c.Plan.Software || software
	plan, err := topo.MakePlan(h, c.Plan)
	if err != nil {
		return nil, config.Config{}, fmt.Errorf("%s: %w", a.layout.ConfigFile(), err)
	}
	return plan, c, nil
}

func (a *app) printPlan(p *topo.Plan) {
	fmt.Fprintf(a.out, "Plan of the host read from %s\n\n", origin(p.Source))
	if len(p.Lanes) > 0 {
		a.section("Lanes", a.laneTable(p))
	}
	a.printNotes(p.Notes)
}

func (a *app) laneTable(p *topo.Plan) table.Writer {
	t := a.newTable("GPU", "ADDRESS", "ROLE", "STAGED ON", "NIC", "PATH", "GB/S", "REASON")
	index := map[string]string{}
	for _, g := range p.GPUs {
		index[g.BusID] = strconv.Itoa(g.Index)
	}
	for _, l := range p.Lanes {
		var servers []string
		for _, s := range l.Servers {
			servers = append(servers, index[s])
		}
		on, path, bandwidth := "", "", ""
		if len(servers) > 0 {
			on = "GPU " + strings.Join(servers, ", ")
		}
		if l.Path != topo.DIS {
			path, bandwidth = a.paint(l.Path.String(), typeColours(l.Path)...), bandwidthOf(topo.Path{Type: l.Path, Bandwidth: l.Bandwidth})
		}
		t.AppendRow(table.Row{
			index[l.GPU], l.GPU, a.role(l.Role), dash(on), dash(strings.Join(l.NICs, ", ")), dash(path), dash(bandwidth), l.Reason,
		})
	}
	a.wrapLast(t, "REASON")
	return t
}

func (a *app) role(role string) string {
	switch role {
	case topo.RoleNear:
		return a.paint(role, text.FgGreen)
	case topo.RoleRefused:
		return a.paint(role, text.FgRed)
	}
	return a.paint(role, text.FgYellow)
}
