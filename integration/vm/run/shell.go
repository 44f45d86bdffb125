package main

import (
	"errors"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/peerlane/peerlane/integration/vm"
	"github.com/peerlane/peerlane/integration/vm/control"
)

func shellCommand() *cobra.Command {
	kind, guests := vm.Small, 1
	cmd := &cobra.Command{
		Use:   "shell [command...]",
		Short: "Open a root shell in a machine, or run a command there",
		Long: `Open a root shell in a machine, or run a command there.

Peerlane's programs are on PATH, its source is in /source, and /share is a
folder of this host that goes with the machine. With --guests 2 a second machine
is joined to the first: its addresses are 10.77.0.2 (rail0), 10.77.1.2 (rail1).`,
		RunE: func(cmd *cobra.Command, argv []string) (err error) {
			s, err := newSession(cmd.Context(), kind)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, s.close()) }()
			if err := s.start(cmd.Context(), guests); err != nil {
				return err
			}
			logf("up after %.1f s", s.machines[0].Booted.Seconds())
			command := control.Command{Argv: argv, Env: []string{"TERM=" + os.Getenv("TERM")}, Dir: "/root"}
			if len(argv) == 0 {
				command.Argv = []string{"/bin/bash", "-i"}
			}
			if stdin := int(os.Stdin.Fd()); term.IsTerminal(stdin) {
				cols, rows, err := term.GetSize(stdin)
				if err != nil {
					return err
				}
				command.Terminal = &control.Size{Rows: uint16(rows), Cols: uint16(cols)}
				before, err := term.MakeRaw(stdin)
				if err != nil {
					return err
				}
				defer func() { err = errors.Join(err, term.Restore(stdin, before)) }()
			}
			err = s.machines[0].Run(cmd.Context(), command, os.Stdin, os.Stdout, os.Stderr)
			var status *control.ExitError
			if len(argv) == 0 && errors.As(err, &status) {
				return nil // the exit status of a shell is that of its last command
			}
			return err
		},
	}
	cmd.Flags().StringVar(&kind, "image", kind, "`IMAGE` to boot: small, full")
	cmd.Flags().IntVar(&guests, "guests", guests, "number of machines: 1, or 2 joined machines")
	cmd.Flags().SetInterspersed(false)
	return cmd
}
