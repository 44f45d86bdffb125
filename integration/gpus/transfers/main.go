// Command transfers makes every GPU of a machine exchange random messages through relays, compares
// every byte, and kills clients, relays and NICs meanwhile. Run it by hand on machines with GPUs
// (docs/benchmarks.md), in a folder with peerlane, peerlane-hook and peerlane-relay:
//
//	make bin/gpu-transfers
//	bin/gpu-transfers --transfers 100000 --save result.json
//
// The exit status is 0 if the requested number of messages has crossed, without a corrupt byte, an
// unexplained failure, a hang or remaining objects.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/integration/traffic"
	"github.com/peerlane/peerlane/relay/launch"
)

func main() {
	if err := command().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "transfers:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var t traffic.Torture
	var largest, bytes, save string
	c := &cobra.Command{
		Use: "transfers", Short: "Exchange random messages between all GPUs, verified, while everything is killed",
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
	}
	flags := c.Flags()
	flags.StringVar(&t.GPUs, "gpus", testbed.GPUsReal, "GPUs to use: auto, real, simulated")
	flags.IntVar(&t.MaxGPUs, "most", 0, "maximum number of GPUs (default all)")
	flags.IntVar(&t.Transfers, "transfers", 100_000, "messages to exchange")
	flags.DurationVar(&t.Limit, "limit", 9*time.Minute, "fail after this time")
	flags.Uint64Var(&t.Seed, "seed", uint64(time.Now().UnixNano()), "seed of the random choices")
	flags.IntVar(&t.Pairs, "pairs", 0, "pairs of clients for each two GPUs and route (default enough for 8 pairs)")
	flags.StringVar(&largest, "largest", "64MiB", "largest message; sizes are log-uniform")
	flags.StringVar(&bytes, "buffers", "512MiB", "size of each client's three buffers")
	flags.StringSliceVar(&t.Memory, "memory", []string{traffic.MemoryGPU}, "kinds of clients' buffers: gpu, staging, host")
	flags.StringVar(&t.Load, "load", traffic.Loads[0], "kernels to run on all GPUs: "+strings.Join(traffic.Loads, ", "))
	flags.DurationVar(&t.KillEach, "kill-each", time.Second, "average time between two kills; 0 for no kills")
	flags.IntVar(&t.Rails, "rails", 1,
		"NICs, software devices, of each lane; with 2 half of the kills take a NIC's port down")
	flags.StringVar(&save, "save", "", "save the result as JSON in `FILE`")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		for _, size := range []struct {
			text string
			to   *uint64
		}{{largest, &t.Largest}, {bytes, &t.Bytes}} {
			var err error
			if *size.to, err = humanize.ParseBytes(size.text); err != nil {
				return err
			}
		}
		if t.Largest < 1 || t.Bytes < 1<<20 || !slices.Contains(traffic.Loads, t.Load) {
			return errors.New("--largest is at least 1 byte, --buffers 1 MiB, and --load one of " +
				strings.Join(traffic.Loads, ", "))
		}
		self, err := os.Executable()
		if err != nil {
			return err
		}
		t.Binaries = filepath.Dir(self)
		t.Progress = func(text string) { fmt.Fprintln(os.Stderr, text) }
		fmt.Fprintf(os.Stderr, "--seed %d repeats the same choices\n", t.Seed)
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, unix.SIGTERM)
		defer stop()
		return run(ctx, t, save)
	}
	c.SetContext(context.Background())
	return c
}

func run(ctx context.Context, t traffic.Torture, save string) error {
	r, err := t.Run(ctx)
	if err != nil {
		return err
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if save != "" {
		if err := os.WriteFile(save, append(text, '\n'), 0o644); err != nil {
			return err
		}
	}
	fmt.Printf("%s.\n%d transfers in %.1f s, %.0f a second, %s: %d by route staged, %d by route direct; by size, in "+
		"decades from 1 byte: %v\n",
		r.Host, r.Transfers, r.Seconds, r.PerSecond, humanize.IBytes(
			r.Bytes), r.Routes[launch.RouteStaged], r.Routes[launch.RouteDirect], r.Sizes)
	fmt.Printf("between GPUs: %v; handed over: %v\nkernels (%s) ran for at least %.0f %% of the time on each GPU\n",
		r.Pairs, r.Hands, r.Load, 100*r.Computed)
	fmt.Printf("NICs that lost their port: %d\n", r.Flaps)
	fmt.Printf("killed: %v; errors of clients: %v\nwrong = %d\n", r.Kills, r.Explained, r.Wrong)
	for _, p := range append(r.Problems, r.Left...) {
		fmt.Println(p)
	}
	if !r.OK(t) {
		return fmt.Errorf("FAILED: %d transfers of %d, %d wrong, %d problems, %d remaining objects", r.Transfers, t.Transfers,
			r.Wrong, len(r.Problems), len(r.Left))
	}
	return nil
}
