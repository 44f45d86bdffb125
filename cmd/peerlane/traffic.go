//go:build !front

package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cmd/peerlane/traffic"
)

// newTrafficClientCommand is a client of the soak of relays.
func newTrafficClientCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "traffic-client", Hidden: true, Short: "Run a client that exchanges verified messages, with JSON orders on " +
			"standard input", Args: noArgs,
		RunE: func(*cobra.Command, []string) error { return traffic.Serve(os.Stdin, a.out.Document()) },
	}
}
