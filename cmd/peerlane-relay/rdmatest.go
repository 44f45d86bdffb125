package main

import (
	"encoding/json"
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
		Short: "Test NICs of this host, with JSON on standard input and output",
		Long: `Read a job from standard input, test NICs of this host, and write the results to standard
output: JSON, a line for each NIC and memory. peerlane doctor --rdma runs this command;
the command serves no client.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return rdmaTest(os.Stdin, os.Stdout) },
	}
}

func rdmaTest(in io.Reader, out io.Writer) error {
	var job launch.RDMAJob
	if err := readJob(in, &job); err != nil {
		return err
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
