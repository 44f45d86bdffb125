package main

import (
	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cmd/version"
)

func newVersionCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print version, commit and date of this build",
		Long:  "Print version, commit and date of this build, its Go toolchain and platform.",
		Example: `  peerlane version
  peerlane version -o json | jq -r .version`,
		Args: noArgs,
	}
	form := addForm(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		build := version.Get()
		if form.value == formJSON {
			return a.printJSON(build)
		}
		a.out.Println("peerlane", build)
		return nil
	}
	return cmd
}
