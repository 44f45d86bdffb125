// Command gpu-nccl runs collectives of PyTorch's ranks, each with a GPU and a relay, over
// Peerlane's plugin, over NCCL's own networks, and over NVLink; the script run in this folder
// documents the usage. A rank is a container of runc or crun, or a process if the machine permits
// no container.
package main

import (
	"context"
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

	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/relay/launch"
)

func main() {
	if len(os.Args) > 2 && os.Args[1] == becomeRank {
		fmt.Fprintln(os.Stderr, "gpu-nccl:", become(os.Stdin, os.Args[2:]))
		os.Exit(1)
	}
	if err := command().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "gpu-nccl:", err)
		os.Exit(1)
	}
}

// options are the command line's options.
type options struct {
	binaries, plugin, out, python, script, program string
	runtime, gpus                                  string
	ranks                                          int
	quick, tune, installed, oneGPU                 bool
	phases, set                                    []string
	limit, budget                                  time.Duration
	// patience is the limit for ranks to end after other ranks have failed or finished.
	patience time.Duration
}

func command() *cobra.Command {
	o := options{patience: 4 * time.Second}
	c := &cobra.Command{
		Use: "gpu-nccl", Short: "Run PyTorch's collectives between containers, over Peerlane and over NCCL's own transports",
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
	}
	self, _ := os.Executable() // after an error the flag is empty
	flags := c.Flags()
	flags.StringVar(&o.binaries, "binaries", filepath.Dir(self),
		"`FOLDER` of peerlane-hook, peerlane-relay, the plugin, and perhaps runc")
	flags.StringVar(&o.plugin, "plugin", "", "the plugin's `FILE` (default libnccl-net-peerlane.so of the binaries)")
	flags.StringVar(&o.out, "out", "nccl-result", "`FOLDER` for result.json, table.md and logs.tar.gz")
	flags.StringVar(&o.python, "python", "python3", "python interpreter with PyTorch")
	flags.StringVar(&o.script, "rank-script", "rank.py", "script `FILE` of each rank")
	flags.StringVar(&o.program, "rank-program", "",
		"run `PROGRAM` with the job as its argument instead of python and the script")
	flags.StringVar(&o.runtime, "runtime", runtimeAuto,
		"isolation of ranks: runc, crun, none for plain processes, or auto")
	flags.StringVar(&o.gpus, "gpus", testbed.GPUsReal, "GPUs to use: real; simulated or simulated-one to try this program")
	flags.IntVar(&o.ranks, "ranks", 0,
		"number of ranks; ranks share GPUs if there are fewer GPUs (default one for each GPU, at least two)")
	flags.BoolVar(&o.oneGPU, "one-gpu", false, "have all ranks share the first GPU")
	flags.BoolVar(&o.quick, "quick", false, "take less than 150 s: fewer sizes and settings")
	flags.BoolVar(&o.tune, "tune", false, "more settings of NCCL over Peerlane, only all_reduce of 256 MiB")
	flags.BoolVar(&o.installed, "installed", false,
		"measure the packages that are installed on this host: containers with peerlane.dev/lane=auto and no variable of "+
			"NCCL's")
	flags.StringSliceVar(&o.phases, "phases", nil,
		"only these phases, see --list; and "+sleeping+", which takes two minutes more")
	flags.StringArrayVar(&o.set, "set", nil, "`NAME=VALUE` for ranks that use Peerlane; may be given again")
	flags.DurationVar(&o.limit, "limit", 55*time.Second, "time limit of a phase")
	flags.DurationVar(&o.budget, "budget", 0, "time limit of all phases (default 145s with --quick, else 9m30s)")
	list := flags.Bool("list", false, "list the phases")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		for _, s := range o.set {
			if name, _, ok := strings.Cut(s, "="); !ok || name == "" {
				return fmt.Errorf("--set %s is not NAME=VALUE", s)
			}
		}
		if o.budget == 0 {
			o.budget = 9*time.Minute + 30*time.Second
			switch {
			case o.installed:
				o.budget = 7 * time.Minute
			case o.quick:
				o.budget = 145 * time.Second
			}
		}
		if *list {
			for _, p := range plan(o, max(o.ranks, 2)) {
				fmt.Printf("%-24s %s\n", p.Name, strings.Join(p.Variables, " "))
			}
			return nil
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, unix.SIGTERM)
		defer stop()
		return run(ctx, o)
	}
	c.SetContext(context.Background())
	return c
}

// run runs every phase, and writes the results even if phases fail.
func run(ctx context.Context, o options) (err error) {
	begun := time.Now()
	// PyTorch aborts the process, whose core file would have gigabytes.
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return err
	}
	h, err := newHost(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	r := h.describe()
	fmt.Printf("%s\n%s; ranks: %d, %s; %s\n", r.Host, r.System, h.ranks, r.Isolation, r.Network)
	for _, p := range plan(o, h.ranks) {
		if len(o.phases) > 0 && !slices.Contains(o.phases, p.Name) {
			continue
		}
		if p.By == byNVLink && (o.oneGPU || h.ranks > len(h.Topology.GPUs)) {
			continue // within a node NCCL refuses two ranks on one GPU
		}
		if p.Route == launch.RouteStaged && h.OneGPU() {
			continue // staging needs a second GPU
		}
		// The rest of the budget must suffice for a result and cleanup.
		left := o.budget - time.Since(begun)
		if ctx.Err() != nil || left < 15*time.Second {
			r.Phases = append(r.Phases, &phase{settings: p, Skipped: fmt.Sprintf("%.0f s are left of %v", left.Seconds(),
				o.budget)})
			continue
		}
		limit := o.limit
		if p.Name == sleeping {
			limit += time.Duration(p.Job.Train.Sleep) * time.Second
		}
		found := h.phase(ctx, p, min(limit, left-5*time.Second))
		r.Phases = append(r.Phases, found)
		fmt.Println(found.line())
		if err := r.write(o.out); err != nil { // keep the results if this program is killed
			return err
		}
	}
	r.Seconds = time.Since(begun).Seconds()
	if err := errors.Join(r.write(o.out), h.pack(filepath.Join(o.out, "logs.tar.gz"))); err != nil {
		return err
	}
	fmt.Println(r.table())
	if problems := r.problems(); len(problems) > 0 {
		return fmt.Errorf("%d of %d phases failed; the logs are in %s:\n%s", len(problems), len(r.Phases),
			filepath.Join(o.out, "logs.tar.gz"), strings.Join(problems, "\n"))
	}
	return nil
}
