package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/selftest"
)

func newSelfTest() *cobra.Command {
	return &cobra.Command{
		Use:   "self-test",
		Short: "Test pairs of GPUs, with JSON on standard input and output",
		Long: `Read a job from standard input, test pairs of GPUs, and write the results to standard
output: JSON, a line for each pair. peerlane self-test and supervisors run this command;
the command serves no client.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return selfTest(os.Stdin, os.Stdout) },
	}
}

// maxJob is the maximum size of a job in bytes.
const maxJob = 4 << 20

// readJob reads the JSON of a test's job.
func readJob(in io.Reader, job any) error {
	if err := json.NewDecoder(io.LimitReader(in, maxJob)).Decode(job); err != nil {
		return fmt.Errorf("read the job from standard input: %w", err)
	}
	return nil
}

func selfTest(in io.Reader, out io.Writer) error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return os.NewSyscallError("PR_SET_DUMPABLE", err)
	}
	var job launch.PairJob
	if err := readJob(in, &job); err != nil {
		return err
	}
	d, err := cuda.Open()
	if err != nil {
		return err
	}
	host := launch.PairHost{Simulated: d.Simulated()}
	if host.Driver, err = d.DriverVersion(); err != nil {
		return err
	}
	var mu sync.Mutex // one line at a time
	lines := json.NewEncoder(out)
	if err := lines.Encode(host); err != nil {
		return err
	}
	var failed error
	report := func(p launch.Pair) {
		mu.Lock()
		defer mu.Unlock()
		if err := lines.Encode(p); err != nil {
			failed = err
		}
	}
	// A test that does not end blocks the driver, and with it any cleanup: exit at once.
	stuck := func(p launch.Pair) {
		report(p)
		os.Exit(1)
	}
	if err := selftest.Run(d, job, report, stuck); err != nil {
		return err
	}
	return failed
}
