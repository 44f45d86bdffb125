package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/rdmatest"
	"github.com/peerlane/peerlane/relay/verbs"
)

func newRDMATest() *cobra.Command {
	return &cobra.Command{
		Use:   "rdma-test",
		Short: "Test NICs of this host, as standard input says, in JSON",
		Long: `Test NICs of this host, as standard input says, in JSON, and write what is found to
standard output, a line for each NIC and memory. peerlane doctor --rdma runs it; it
serves nobody.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return rdmaTest(os.Stdin, os.Stdout) },
	}
}

func rdmaTest(in io.Reader, out io.Writer) error {
	var job launch.RDMAJob
	if err := json.NewDecoder(io.LimitReader(in, maxJob)).Decode(&job); err != nil {
		return fmt.Errorf("reading the job from standard input: %w", err)
	}
	if err := job.Verbs.Check(); err != nil {
		return err
	}
	l, err := verbs.Open()
	if err != nil {
		return err
	}
	lines := json.NewEncoder(out)
	var failed error
	rdmatest.Run(l, sync.OnceValues(cuda.Open), job, rdmatest.RateTime, func(r launch.RDMAResult) {
		if err := lines.Encode(r); err != nil {
			failed = err
		}
	})
	return failed
}
