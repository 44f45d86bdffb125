//go:build !front

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/jedib0t/go-pretty/v6/progress"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/demo"
	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo/planner"
)

func newDemoCommand(a *app) *cobra.Command {
	o := demo.Options{}
	var size, slot string
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run two containers, each with a far GPU, that exchange data through their relays",
		Long: `Run two containers, each with a GPU far from every NIC. They exchange messages of 8
bytes to 64 MiB through their relays in both directions, synchronised by timelines,
and verify every byte.

The demo uses real GPUs if the host has any, and else a simulator of the half-populated
board in the README's picture, with eight GPUs and four NICs. Only --rates measures the
simulator's rates, which say nothing about GPUs. With one GPU both containers share it,
and messages take route direct. The staged route uses RDMA as between two hosts, by queue
pairs of a software device in place of each NIC: client GPU, slot on a server GPU, NIC,
slot, client GPU. A test of GPUs and NICs precedes it. The exit status is 0 only if every byte was
verified, every staged byte crossed a server GPU, and no object remains on the host.

With --copy client the relays make no copies on that route: each client copies on its
own stream, to and from memory on its server GPU, and synchronises by a timeline. The
container gets peerlane.dev/gpu= instead of lane=.`,
		Example: `  sudo peerlane demo
  sudo peerlane demo --route direct --runtime crun
  sudo peerlane demo --copy client
  peerlane demo --runtime none -o json`,
		Args: noArgs,
	}
	form := addForm(cmd)
	flags := cmd.Flags()
	flags.StringVar(&o.Runtime, "runtime", demo.RuntimeRunc,
		"OCI runtime: runc, crun, or none for plain processes (needs no root)")
	flags.StringVar(&o.Route, "route", launch.RouteAuto,
		"route of the messages: staged, direct for the single copy, or auto: staged where the host has two GPUs")
	flags.StringVar(&o.Copy, "copy", demo.CopyRelay,
		"process that copies between a client's GPU and its server GPU: relay or client")
	flags.StringVar(&o.GPUs, "gpus", testbed.GPUsAuto, "GPUs to use: auto, real, simulated, simulated-one")
	flags.StringVar(&size, "bytes", "256MiB", "minimum `SIZE` to move and verify in each direction")
	flags.BoolVar(&o.Rates, "rates", false, "also measure the simulator's rates; rates of real GPUs are always measured")
	flags.Uint64Var(&o.Seed, "seed", 1, "seed of the pattern")
	flags.IntVar(&o.Slots, "slots", 0, "staging slots in each direction; 0 for the default")
	flags.StringVar(&slot, "slot-size", "", "`SIZE` of a staging slot")
	complete(cmd, "runtime", demo.RuntimeRunc, demo.RuntimeCrun, demo.RuntimeNone)
	complete(cmd, "route", launch.RouteAuto, launch.RouteStaged, launch.RouteDirect)
	complete(cmd, "copy", demo.CopyRelay, demo.CopyClient)
	complete(cmd, "gpus", testbed.GPUsAuto, testbed.GPUsReal, testbed.GPUsSimulated, testbed.GPUsOne)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		for _, f := range []struct {
			name, value string
			allowed     []string
		}{
			{"runtime", o.Runtime, []string{demo.RuntimeRunc, demo.RuntimeCrun, demo.RuntimeNone}},
			{"route", o.Route, []string{launch.RouteAuto, launch.RouteStaged, launch.RouteDirect}},
			{"copy", o.Copy, []string{demo.CopyRelay, demo.CopyClient}},
			{"gpus", o.GPUs, []string{testbed.GPUsAuto, testbed.GPUsReal, testbed.GPUsSimulated, testbed.GPUsOne}},
		} {
			if !slices.Contains(f.allowed, f.value) {
				return usageError{cmd.CommandPath(), fmt.Errorf("--%s %s: unknown value; use %s", f.name, f.value,
					strings.Join(f.allowed, ", "))}
			}
		}
		var err error
		if o.Bytes, err = parseSize("bytes", size, "256MiB", 8, 1<<40); err != nil {
			return usageError{cmd.CommandPath(), err}
		}
		if slot != "" {
			if o.SlotBytes, err = parseSize("slot-size", slot, "4MiB", 64<<10, 1<<30); err != nil {
				return usageError{cmd.CommandPath(), err}
			}
		}
		if o.Slots < 0 || o.Slots > maxDemoSlots {
			return usageError{cmd.CommandPath(), fmt.Errorf("--slots %d: must be 0 to %d", o.Slots, maxDemoSlots)}
		}
		if o.Binaries, err = binaries(); err != nil {
			return err
		}
		var done func()
		o.Progress, done = a.progress()
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, unix.SIGTERM)
		defer stop()
		report, err := demo.Run(ctx, o)
		done()
		if err != nil {
			return err
		}
		if form.value == formJSON {
			err = a.printJSON(report)
		} else {
			a.printDemo(report)
		}
		if err == nil && !report.OK() {
			err = errors.New("the demo found errors: " +
				strings.Join(append(report.Problems, report.Left...), "; "))
		}
		return err
	}
	return cmd
}

// maxDemoSlots is the maximum of relay.slots.
const maxDemoSlots = 1024

// parseSize parses the size of a flag, and checks that it is between minimum and maximum.
func parseSize(flag, text, example string, minimum, maximum uint64) (uint64, error) {
	n, err := humanize.ParseBytes(text)
	if err != nil {
		return 0, fmt.Errorf("--%s %q: invalid size; use a form such as %q", flag, text, example)
	}
	if n < minimum || n > maximum {
		return 0, fmt.Errorf("--%s %s: must be %s to %s", flag, text, humanize.IBytes(minimum), humanize.IBytes(maximum))
	}
	return n, nil
}

// progress returns a function that shows the progress of the demo, as bars on a terminal and as
// lines elsewhere, and a function that ends the display.
func (a *app) progress() (show func(demo.Progress), done func()) {
	step := ""
	if a.errOut.File() == nil {
		return func(p demo.Progress) {
			if p.Step != step {
				step = p.Step
				a.errOut.Printf("%s …\n", step)
			}
		}, func() {}
	}
	w := progress.NewWriter()
	w.SetOutputWriter(a.errOut.Document())
	w.SetUpdateFrequency(100 * time.Millisecond)
	w.SetTrackerPosition(progress.PositionRight)
	w.Style().Visibility.Speed = false
	go w.Render()
	var current *progress.Tracker
	return func(p demo.Progress) {
			if p.Step != step {
				if current != nil {
					current.MarkAsDone()
				}
				step = p.Step
				current = &progress.Tracker{Message: step, Total: int64(p.Total), Units: progress.UnitsBytes}
				w.AppendTracker(current)
			}
			if p.Total > 0 {
				current.UpdateTotal(int64(p.Total))
				current.SetValue(int64(min(p.Done, p.Total-1))) // the last step completes the bar
			}
		}, func() {
			if current != nil {
				current.MarkAsDone()
			}
			w.Stop()
			for w.IsRenderInProgress() {
				time.Sleep(10 * time.Millisecond)
			}
		}
}

// printDemo prints the estimate, then isolation and verification, then measured rates.
func (a *app) printDemo(r *demo.Report) {
	a.out.Printf("Host: %s.\n\n", r.Host)
	if e := r.Estimate; e != nil && len(e.GPUs) > 0 {
		a.section("Estimate of the network, GB/s in each direction, all GPUs at once", a.gainTable(e))
		a.out.Printf("Near GPUs give up as much as far GPUs gain. peerlane plan --estimate has each GPU.\n\n")
	}
	a.section("Isolation: each container finds in itself", a.injectedTable(r))
	a.section("Messages, every byte compared with a seeded pattern", a.exchangeTable(r))
	if r.Transport == launch.TransportVerbs {
		a.section("GPUs and NICs (software device), tested before the exchange", a.tripleTable(r))
		for _, connection := range r.Connections {
			a.out.Printf("RDMA: %s\n", connection)
		}
		a.out.Println()
	}
	switch {
	case r.Copy == demo.CopyClient:
		a.section("Bytes into and out of the server GPUs, but by the clients' own copies", a.serverTable(r))
	case len(r.Servers) > 0 && r.Route == launch.RouteStaged:
		a.section("Bytes through the server GPUs", a.serverTable(r))
	}
	if r.Baselines != nil {
		a.section("GB/s (1e9 bytes a second)", a.rateTable(r))
		if whole, slowest, ok := r.WholeRoute(); ok {
			a.out.Printf("The whole staged route moves %.2f GB/s, %.2f of its slowest leg.\n", whole, whole/slowest)
		}
		c := r.Containers[0].Client
		a.out.Printf("Hand-off of 8 bytes by timelines, one way: median %s, 99th percentile %s.\n",
			c.HandOffMedian.Round(100*time.Nanosecond), c.HandOff99.Round(100*time.Nanosecond))
		if r.Simulated {
			a.out.Println("These rates and times are of the simulator, on host memory; they say nothing about GPUs.")
		}
	}
	left := terminal.Paint("nothing (processes, mounts, sockets, files and cgroups compared with before)")
	if len(r.Left) > 0 {
		left = a.paint(strings.Join(r.Left, "; "), red)
	}
	a.out.Printf("Left on the host: %s.\n", left)
	for _, p := range r.Problems {
		a.out.Printf("%s %s\n", a.paint("Wrong:", red), p)
	}
	if r.OK() {
		a.out.Println(a.paint("All verified.", green))
	}
}

// gainTable compares the slowest GPU, the fastest GPU and the sum, with NCCL today and with lanes.
func (a *app) gainTable(e *planner.Estimate) *table.Writer {
	t := a.newTable("", "NCCL TODAY", "WITH LANES")
	today := func(g planner.GPUEstimate) float64 { return g.NCCL }
	lanes := func(g planner.GPUEstimate) float64 { return g.Relay }
	of := func(rateOf func(planner.GPUEstimate) float64) (low, high, all float64) {
		low = rateOf(e.GPUs[0])
		for _, g := range e.GPUs {
			rate := rateOf(g)
			low, high, all = min(low, rate), max(high, rate), all+rate
		}
		return low, high, all
	}
	low, high, all := of(today)
	lowLane, highLane, allLanes := of(lanes)
	t.AppendRow(table.Row{"slowest GPU", gigabytes(low), gigabytes(lowLane)})
	t.AppendRow(table.Row{"fastest GPU", gigabytes(high), gigabytes(highLane)})
	t.AppendRow(table.Row{fmt.Sprintf("all %d GPUs", len(e.GPUs)), gigabytes(all), gigabytes(allLanes)})
	return t
}

func (a *app) injectedTable(r *demo.Report) *table.Writer {
	t := a.newTable("CONTAINER", "WHAT", "FOUND INSIDE")
	for _, c := range r.Containers {
		i := c.Injected
		t.AppendRow(table.Row{c.Name, "GPUs that CUDA shows", strings.Join(i.GPUs, ", ")})
		t.AppendRow(table.Row{"", "device nodes", dash(strings.Join(i.Devices, " "))})
		for _, m := range i.Mounts {
			if strings.HasPrefix(m, paths.ContainerDir+" ") {
				t.AppendRow(table.Row{"", "relay's socket", m})
			}
		}
		t.AppendRow(table.Row{"", "processes visible", i.PIDs})
	}
	a.wrapLast(t, "FOUND INSIDE")
	return t
}

// exchangeTable returns a table with a row for each direction and the path of the messages.
func (a *app) exchangeTable(r *demo.Report) *table.Writer {
	t := a.newTable("FROM", "TO", "MESSAGES", "BYTES", "VERIFIED", "PATH")
	index := indices(r.Plan)
	hops := func(c demo.Container, reverse bool) []string {
		lane, err := r.Plan.Lane(c.GPU.BusID)
		gpu := fmt.Sprintf("GPU %d", c.GPU.Index)
		if err != nil || r.Route == launch.RouteDirect || len(lane.Servers) == 0 {
			return []string{gpu}
		}
		var servers []string
		for _, s := range lane.Servers {
			servers = append(servers, index[s])
		}
		list := []string{gpu, "slots on GPU " + strings.Join(servers, ", ")}
		if len(lane.NICs) > 0 {
			list = append(list, lane.NICs[0])
		}
		if reverse {
			slices.Reverse(list)
		}
		return list
	}
	for i, c := range r.Containers {
		other := r.Containers[1-i]
		verified := a.paint("no", red)
		if other.Client.Verified {
			verified = a.paint("yes", green)
		}
		path := strings.Join(append(hops(c, false), hops(other, true)...), " → ")
		if r.Route == launch.RouteDirect {
			path += ", one copy"
		}
		t.AppendRow(table.Row{c.Name, other.Name, other.Client.Messages, humanize.IBytes(other.Client.VerifiedBytes),
			verified, path})
	}
	return t
}

// tripleTable returns a table with a row for each tested triple.
func (a *app) tripleTable(r *demo.Report) *table.Writer {
	t := a.newTable("CLIENT GPU", "SERVER GPU", "NIC", "MEMORY", "ROUNDS", "BYTES", "VERDICT")
	for _, n := range r.Triples {
		verdict := n.Verdict
		if n.Reason != "" {
			verdict += ": " + n.Reason
		}
		t.AppendRow(table.Row{n.GPU.Index, n.Server.Index, n.NIC, dash(n.Memory), n.Rounds, humanize.IBytes(n.Bytes),
			verdict})
	}
	return t
}

func (a *app) serverTable(r *demo.Report) *table.Writer {
	t := a.newTable("SERVER GPU", "ADDRESS", "IN, RELAYS SAY", "OUT, RELAYS SAY", "IN, DEVICE'S LOG", "OUT, DEVICE'S LOG")
	logged := func(n int64) string {
		if n < 0 {
			return "-" // the simulator keeps a log, real GPUs do not
		}
		return humanize.Comma(n)
	}
	for _, s := range r.Servers {
		t.AppendRow(table.Row{
			s.GPU.Index, s.GPU.BusID, humanize.Comma(int64(s.RelayIn)), humanize.Comma(int64(s.RelayOut)), logged(
				s.DeviceIn), logged(s.DeviceOut),
		})
	}
	return t
}

func (a *app) rateTable(r *demo.Report) *table.Writer {
	t := a.newTable("MESSAGE", strings.ToUpper(r.Copy+", "+r.Route), "RAW PEER COPY", "RATIO", "THROUGH HOST MEMORY",
		"RATIO")
	for i, rate := range r.Containers[0].Client.Rates {
		raw, bounce := r.Baselines.Raw[i].GBs, r.Baselines.Bounce[i].GBs
		t.AppendRow(table.Row{
			humanize.IBytes(rate.Size), fmt.Sprintf("%.2f", rate.GBs),
			fmt.Sprintf("%.2f", raw), fmt.Sprintf("%.2f", rate.GBs/raw),
			fmt.Sprintf("%.2f", bounce), fmt.Sprintf("%.2f", rate.GBs/bounce),
		})
	}
	if r.Route == launch.RouteStaged {
		for _, l := range r.Baselines.Legs {
			t.AppendRow(table.Row{
				"leg " + l.Name + ", " + humanize.IBytes(l.Size), fmt.Sprintf("%.2f", l.GBs),
				fmt.Sprintf("%.2f", l.Raw), fmt.Sprintf("%.2f", l.GBs/l.Raw), "", "",
			})
		}
	}
	return t
}

// newDemoClientCommand returns the hidden command that runs in the containers of the demo.
func newDemoClientCommand(a *app) *cobra.Command {
	o := demo.ClientOptions{}
	var script string
	cmd := &cobra.Command{Use: "demo-client", Hidden: true, Short: "Run a client of the demo", Args: noArgs}
	cmd.Flags().StringVar(&o.Name, "name", "", "A or B")
	cmd.Flags().StringVar(&script, "script", "", "the script, as JSON")
	cmd.Flags().StringVar(&o.Socket, "socket", paths.ContainerDir+"/"+paths.SocketName,
		"the relay's socket; - to read its path from the first line of standard input")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := json.Unmarshal([]byte(script), &o.Script); err != nil {
			return usageError{cmd.CommandPath(), fmt.Errorf("--script: %w", err)}
		}
		return demo.RunClient(os.Stdin, a.out.Document(), o)
	}
	return cmd
}

// newMeasureCommand returns the hidden command that measures on behalf of another process.
func newMeasureCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "measure", Hidden: true, Short: "Measure copies, with JSON jobs on standard input", Args: noArgs,
		RunE: func(*cobra.Command, []string) error { return measure.Serve(os.Stdin, a.out.Document()) },
	}
}
