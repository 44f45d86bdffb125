//go:build !front

package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/bench"
	"github.com/peerlane/peerlane/cmd/peerlane/demo"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/cmd/version"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
)

func newBenchCommand(a *app) *cobra.Command {
	names, what := bench.Tables()
	var list strings.Builder
	for i, name := range names {
		fmt.Fprintf(&list, "  %-13s %s\n", name, what[i])
	}
	o := bench.Options{}
	var sizes []string
	var input, save, listen, connect string
	cmd := &cobra.Command{
		Use:   "bench [--listen [ADDRESS] | --connect HOST]",
		Short: "Measure relays beside raw copies and the bounce through host memory",
		Long: `Measure cost and rates of transfers through relays. Clients are plain processes, each
with one GPU and a relay, which starts as a container's relay does. Root is not needed.
The tables:

` + list.String() + `
A ratio always has a baseline measured in the same run. The bench uses real GPUs if the
host has any, and else a simulator, whose figures are marked and say nothing about GPUs.
With one GPU both clients share it: route direct is measured, and tables that need a
second GPU are listed as not measured. Route staged uses software RDMA devices. The end of the
output has the goals of each table, the results, and the verdicts.

Between two hosts: run --listen on one host, then --connect on the other. Both need the
cluster key, and so root; each starts a relay and a client, which connect over the
transport that relays choose. The lanes are those of the hosts' plans; simulated GPUs use
the first RDMA NIC. The options of --connect select the measurements, which run in both
directions, and those of plain TCP sockets between the same addresses; each row has its
transport, and both hosts print the result. With --transport verbs all data goes over
RDMA, except messages of up to 4 KiB, which may go over the TCP control connection. The
default port of the bench is 19999; it also uses ports of network.ports.`,
		Example: `  peerlane bench
  peerlane bench --table routes --sizes 64KiB,1MiB,64MiB --depths 1,16 -o svg >routes.svg
  peerlane bench --table all --save result.json
  peerlane bench --table all --quick --gpus real --save result.json
  peerlane bench --table busy --busy server
  peerlane bench --table network --gpus real
  peerlane bench --listen                  on one host
  peerlane bench --connect host1           on another
  peerlane bench --connect host1 --transport verbs
  peerlane bench --input result.json -o html >result.html`,
		Args: func(cmd *cobra.Command, args []string) error {
			// The value of --listen is optional, so cobra accepts it only as --listen=ADDRESS.
			// Accept an argument as the address.
			if len(args) == 1 && cmd.Flags().Changed("listen") && listen == everywhere {
				listen = args[0]
				return nil
			}
			return noArgs(cmd, args)
		},
	}
	form := addForm(cmd, formSVG, formHTML)
	flags := cmd.Flags()
	flags.StringSliceVar(&o.Tables, "table", []string{"copy", "latency", "routes", "bounce"},
		"tables `NAME,...` to measure, or all")
	flags.StringSliceVar(&sizes, "sizes", nil, "message `SIZE,...` in place of each table's own")
	flags.IntSliceVar(&o.Depths, "depths", nil, "messages in flight `N,...` in place of each table's own")
	flags.StringSliceVar(&o.Routes, "routes", []string{launch.RouteDirect, launch.RouteStaged},
		"routes to measure: direct, staged (over verbs, by software RDMA devices)")
	flags.StringSliceVar(&o.Baselines, "baselines", []string{bench.BaselineRaw, bench.BaselineBounce,
		bench.BaselineLocal}, "baselines to measure: raw, bounce, local; ratios need their baseline")
	flags.StringSliceVar(&o.Busy, "busy", nil,
		"GPUs that table busy keeps busy: `client,server,both` (default all in turn)")
	flags.Float64SliceVar(&o.Pace, "pace", nil, "rates `GB/s,...` of each software device in table uniformity")
	flags.IntVar(&o.GPUsPerNIC, "gpus-per-nic", bench.PerNIC,
		"GPUs `N` that share a NIC in table uniformity, half of them near it")
	flags.DurationVar(&o.Duration, "duration", 0, "duration of each measurement (default 1s, simulated 200ms)")
	flags.BoolVar(&o.Quick, "quick", false, "fewer sizes and shorter measurements")
	flags.StringVar(&o.GPUs, "gpus", testbed.GPUsAuto, "GPUs to use: auto, real, simulated, simulated-one")
	flags.StringVar(&listen, "listen", "",
		"listen for another host's bench at `ADDRESS`, ADDRESS:PORT or :PORT (default all addresses, port 19999)")
	flags.Lookup("listen").NoOptDefVal = everywhere
	flags.StringVar(&connect, "connect", "", "measure lanes to `HOST` or HOST:PORT, where a bench listens")
	flags.StringVar(&o.Transport, "transport", launch.TransportAuto, "transport to the other host: auto, tcp or verbs")
	flags.StringVar(&save, "save", "", "also save the result as JSON in `FILE`, after each table")
	flags.StringVar(&input, "input", "", "print the result in `FILE` without measuring")
	complete(cmd, "table", append(names, "all")...)
	complete(cmd, "routes", launch.RouteDirect, launch.RouteStaged)
	complete(cmd, "baselines", bench.BaselineRaw, bench.BaselineBounce, bench.BaselineLocal)
	complete(cmd, "busy", bench.BusyClient, bench.BusyServer, bench.BusyBoth)
	complete(cmd, "gpus-per-nic", "2", "4", "8")
	complete(cmd, "transport", bench.Transports()...)
	complete(cmd, "listen", everywhere)
	complete(cmd, "connect")
	complete(cmd, "gpus", testbed.GPUsAuto, testbed.GPUsReal, testbed.GPUsSimulated, testbed.GPUsOne)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		between := listen != "" || connect != ""
		if err := benchFlags(cmd, between); err != nil {
			return usageError{cmd.CommandPath(), err}
		}
		if input != "" {
			f, err := os.Open(input)
			if err != nil {
				return err
			}
			defer f.Close()
			report, err := bench.Read(f)
			if err != nil {
				return fmt.Errorf("%s: %w", input, err)
			}
			return a.printBench(report, form)
		}
		for _, s := range sizes {
			n, err := parseSize("sizes", s, "4MiB", 1, 64<<30)
			if err != nil {
				return usageError{cmd.CommandPath(), err}
			}
			o.Sizes = append(o.Sizes, n)
		}
		if slices.Contains(o.Tables, "all") {
			o.Tables = names
		}
		if err := o.Check(); err != nil {
			return usageError{cmd.CommandPath(), err}
		}
		var err error
		if between {
			c, err := a.onNetwork()
			if err != nil {
				return err
			}
			o.Network, o.Verbs, o.Plan = c.Network, &c.Verbs, c.Plan
			if err := bench.CanMeet(o.Network); err != nil {
				return asRoot(err)
			}
		}
		if o.Binaries, err = binaries(); err != nil {
			return err
		}
		o.Release = version.Get().Version
		o.Command = append([]string{"peerlane", "bench"}, given(cmd)...)
		show, done := a.progress()
		o.Progress = func(step string) { show(demo.Progress{Step: step}) }
		if save != "" {
			o.Measured = func(r *bench.Report) error { return saveBench(save, r) }
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, unix.SIGTERM)
		defer stop()
		var report *bench.Report
		switch {
		case connect != "":
			report, err = bench.Connect(ctx, o, connect)
		case listen != "":
			report, err = bench.Listen(ctx, o, listen)
			if err == nil && o.Measured != nil {
				err = o.Measured(report)
			}
		default:
			report, err = bench.Run(ctx, o)
		}
		done()
		if err != nil {
			return asRoot(err)
		}
		if len(report.Problems) > 0 {
			err = fmt.Errorf("the measurement is incomplete: %s", strings.Join(report.Problems, "; "))
		}
		return errors.Join(err, a.printBench(report, form))
	}
	return cmd
}

// everywhere is the value of --listen without an address.
const everywhere = ":19999"

// benchFlags refuses flags that exclude each other, and flags without an effect on the
// measurement.
func benchFlags(cmd *cobra.Command, between bool) error {
	flags := cmd.Flags()
	if flags.Changed("connect") && flags.Lookup("connect").Value.String() == "" {
		return errors.New("--connect requires a host")
	}
	if flags.Changed("listen") && flags.Changed("connect") {
		return errors.New("--listen and --connect exclude each other")
	}
	if flags.Changed("transport") && !flags.Changed("connect") {
		return errors.New("--transport requires --connect; table network uses tcp")
	}
	var no []string
	if between {
		no = []string{"table", "routes", "baselines", "busy", "pace", "gpus-per-nic", "input"}
	}
	if flags.Changed("listen") {
		no = append(no, "sizes", "depths", "duration", "quick")
	}
	for _, name := range no {
		if flags.Changed(name) {
			return fmt.Errorf(
				"--%s is not supported between two hosts; use --connect with --sizes, --depths, --duration, --quick and "+
					"--transport", name)
		}
	}
	return nil
}

// onNetwork returns the configuration for measurements between hosts, with the path of the key
// file filled in. The relays of a bench belong to root, and prove the cluster key without a
// tenant.
func (a *app) onNetwork() (config.Config, error) {
	c, err := config.Load(a.layout.ConfigFile())
	if err != nil {
		return c, err
	}
	if c.Network.Listen == config.ListenOff {
		return c, &fault.Error{Code: fault.NoNetwork, Operation: "connect with another host",
			Cause:  errors.New(`network.listen is "off", so relays accept no connections of other hosts`),
			Remedy: "set network.listen in " + a.layout.ConfigFile()}
	}
	c.Network.TenantAnnotation = ""
	c.Network.Key, err = a.keyFile()
	return c, err
}

// saveBench writes a result to file in one step: after a failure the file has its former content.
// It writes directly to a symbolic link or a special file.
func saveBench(file string, r *bench.Report) error {
	text, err := marshalIndented(r)
	if err != nil {
		return err
	}
	if info, err := os.Lstat(file); err == nil && !info.Mode().IsRegular() {
		return os.WriteFile(file, text, 0o644)
	}
	made, err := os.CreateTemp(filepath.Dir(file), filepath.Base(file)+".*")
	if err != nil {
		return err
	}
	_, err = made.Write(text)
	if err = errors.Join(err, made.Chmod(0o644), made.Close()); err == nil {
		err = os.Rename(made.Name(), file)
	}
	if err != nil {
		_ = os.Remove(made.Name())
	}
	return err
}

// given returns the flags that the command line sets, except flags that name files.
func given(cmd *cobra.Command) []string {
	var list []string
	for _, name := range []string{"table", "sizes", "depths", "routes", "baselines", "busy", "pace", "gpus-per-nic",
		"duration", "quick", "gpus", "listen", "connect", "transport"} {
		switch f := cmd.Flags().Lookup(name); {
		case f.Changed && f.NoOptDefVal != "":
			list = append(list, "--"+name+"="+f.Value.String())
		case f.Changed:
			list = append(list, "--"+name, strings.Trim(f.Value.String(), "[]"))
		}
	}
	return list
}

func (a *app) printBench(r *bench.Report, form *form) error {
	switch form.value {
	case formJSON:
		return a.printJSON(r)
	case formSVG:
		_, _ = a.out.Document().Write(r.SVG()) // a.out keeps the error
		return nil
	case formHTML:
		page, err := r.HTML()
		_, _ = a.out.Document().Write(page)
		return err
	}
	a.out.Printf("Host: %s.\nCUDA driver %d, Peerlane %s, %s: %s\n\n", r.Host, r.Driver, r.Release,
		r.Date.Format(time.RFC3339), strings.Join(r.Command, " "))
	heading, cells := r.Table()
	columns := make([]any, len(heading))
	for i, h := range heading {
		columns[i] = h
	}
	t := a.newTable(columns...)
	for _, row := range cells {
		line := make(table.Row, len(row))
		for i, cell := range row {
			switch {
			case heading[i] == "REACHED" && cell == "no":
				line[i] = a.paint(cell, red)
			case heading[i] == "REACHED" && cell == "yes":
				line[i] = a.paint(cell, green)
			default:
				line[i] = dash(cell)
			}
		}
		t.AppendRow(line)
	}
	a.wrapLast(t, heading[len(heading)-1])
	a.out.Println(t.Render())
	a.out.Println()
	v := a.newTable("WHAT IS ASKED", "MUST REACH", "REACHED, THE WORST OF IT", "VERDICT")
	for _, verdict := range r.Verdicts() {
		v.AppendRow(table.Row{verdict.What, verdict.Asked, dash(verdict.Reached), verdict.Verdict})
	}
	a.wrapLast(v, "VERDICT")
	a.out.Println(v.Render())
	a.out.Println()
	a.out.Println(r.Summary())
	return nil
}

// newBenchClientCommand returns the hidden command of a client of peerlane bench.
func newBenchClientCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "bench-client", Hidden: true, Short: "Run a client of peerlane bench, with JSON orders on standard " +
			"input", Args: noArgs,
		RunE: func(*cobra.Command, []string) error { return bench.Serve(os.Stdin, a.out.Document()) },
	}
}
