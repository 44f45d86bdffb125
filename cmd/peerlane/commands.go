//go:build !front

package main

import (
	"cmp"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cmd/manual"
)

// delegate does nothing, because this program runs every command. The front has another version
// (front.go).
func delegate([]string) error { return nil }

// commands returns the subcommands of peerlane.
func commands(a *app) []*cobra.Command {
	return []*cobra.Command{
		newTopoCommand(a),
		newPlanCommand(a),
		newCDICommand(a),
		newRelayCommand(a),
		newRuntimeCommand(a),
		newSelfTestCommand(a),
		newDoctorCommand(a),
		newExplainCommand(a),
		newExporterCommand(a),
		newKeyCommand(a),
		newBenchCommand(a),
		newBenchClientCommand(a),
		newDemoCommand(a),
		newDemoClientCommand(a),
		newMeasureCommand(a),
		newVersionCommand(a),
		manual.NewCommand(),
	}
}

// Help prints the exit status last, so separate it from the text of a command.
func init() {
	cobra.AddTemplateFunc("longText", func(c *cobra.Command) string {
		text, _ := manual.Exit(c.Long)
		return cmp.Or(text, c.Short)
	})
	cobra.AddTemplateFunc("exitText", func(c *cobra.Command) string {
		_, exit := manual.Exit(c.Long)
		return exit
	})
}

// setTemplates sets the templates of help. A template makes the linker keep all methods of every
// type: the front has no templates and executes this program for help.
func setTemplates(root *cobra.Command) {
	root.SetHelpTemplate("{{longText .}}\n\n{{.UsageString}}")
	root.SetUsageTemplate(root.UsageTemplate() + "\nExit status:\n{{exitText .}}")
}
