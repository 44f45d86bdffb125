// Command peerlane-relay is the process that serves one container. The hook's supervisor starts the
// relay; users do not.
package main

import (
	"fmt"
	"io"
	"os"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cmd/manual"
	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/version"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// run executes the command line args and returns the exit status.
func run(args []string, out, errOut io.Writer) int {
	root := &cobra.Command{
		Use:           "peerlane-relay",
		Short:         "Run the relay of one container",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	level := root.PersistentFlags().String("log-level", "info", "trace, debug, info, warning or error")
	form := root.PersistentFlags().String("log-format", "text", "text or json")
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		parsed, err := logrus.ParseLevel(*level)
		if err != nil {
			return fmt.Errorf("--log-level: %w", err)
		}
		logrus.SetLevel(parsed)
		switch *form {
		case "text":
		case "json":
			logrus.SetFormatter(&logrus.JSONFormatter{})
		default:
			return fmt.Errorf("--log-format %s is neither text nor json", *form)
		}
		return nil
	}
	root.AddCommand(newServe(), newSelfTest(), newRDMATest(), newSoftwareDevice())
	root.AddCommand(manual.NewCommand(), &cobra.Command{
		Use:   "version",
		Short: "Print version, commit and date",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(c.OutOrStdout(), "peerlane-relay", version.Get())
			return err
		},
	})
	root.SetArgs(args)
	root.SetOut(out)
	// Until a command runs, an error is an error of the command line.
	status := 2
	for _, c := range root.Commands() {
		do := c.RunE
		c.RunE = func(c *cobra.Command, args []string) error {
			status = 1
			return do(c, args)
		}
	}
	if err := root.Execute(); err != nil {
		terminal.PrintError(errOut, "peerlane-relay", err)
		return status
	}
	return 0
}
