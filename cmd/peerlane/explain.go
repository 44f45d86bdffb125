//go:build !front

package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/internal/fault"
)

func newExplainCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "explain [CODE]",
		Short: "Show cause and remedies of an error by its code",
		Long: `Show cause and remedies of an error by the code at its end, such as [PL1203]. Lower
case, and omitting PL, are accepted. Without a code, list all codes.
docs/troubleshooting.md has the same entries.`,
		Example: `  peerlane explain PL1203
  peerlane explain
  peerlane explain PL1203 -o json | jq -r .remedies[]`,
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			var codes []string
			for _, e := range fault.Entries() {
				codes = append(codes, string(e.Code)+"\t"+e.Title)
			}
			return codes, cobra.ShellCompDirectiveNoFileComp
		},
	}
	form := addForm(cmd)
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		if len(args) == 0 {
			if form.value == formJSON {
				return a.printJSON(fault.Entries())
			}
			for _, e := range fault.Entries() {
				a.out.Printf("%s  %s\n", e.Code, e.Title)
			}
			return nil
		}
		e, err := findEntry(args[0])
		if err != nil {
			return usageError{cmd.CommandPath(), err}
		}
		if form.value == formJSON {
			return a.printJSON(e)
		}
		a.printEntry(e)
		return nil
	}
	return cmd
}

// findEntry returns the entry of a code, in any case, with or without brackets. The error names
// the nearest code.
func findEntry(typed string) (fault.Entry, error) {
	code := strings.Trim(strings.ToUpper(typed), "[]")
	if !strings.HasPrefix(code, "PL") {
		code = "PL" + code
	}
	if e, ok := fault.Find(fault.Code(code)); ok {
		return e, nil
	}
	var known []string
	for _, e := range fault.Entries() {
		known = append(known, string(e.Code))
	}
	nearest, _ := config.Nearest(code, known)
	return fault.Entry{}, fmt.Errorf("unknown code %s; the nearest is %s; list all codes with peerlane explain", typed,
		nearest)
}

// printEntry prints an entry for a terminal of 80 columns.
func (a *app) printEntry(e fault.Entry) {
	a.out.Printf("%s: %s\n\n", e.Code, e.Title)
	a.out.PrintLines("Cause:\n" + wrapped("  ", "  ", e.Cause) + "\nRemedies:\n")
	for _, remedy := range e.Remedies {
		a.out.PrintLines(wrapped("  - ", "    ", remedy))
	}
	if e.See != "" {
		a.out.Printf("\nSee docs/%s.\n", e.See)
	}
}

// wrapped breaks text into lines of at most 80 characters. The first line begins with the prefix
// first, the others with next.
func wrapped(first, next, text string) string {
	const columns = 80
	var b strings.Builder
	line := first
	for _, word := range strings.Fields(text) {
		if len(line)+len(word)+1 > columns && strings.TrimSpace(line) != "-" && strings.TrimSpace(line) != "" {
			b.WriteString(strings.TrimRight(line, " ") + "\n")
			line = next
		}
		line += word + " "
	}
	return b.String() + strings.TrimRight(line, " ") + "\n"
}
