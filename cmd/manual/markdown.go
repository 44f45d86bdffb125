package manual

import (
	"fmt"
	"slices"
	"strings"
)

// outputFlag is the option for the output format. Markdown omits an outputFlag whose help begins
// with commonOutput, because every command that prints tables has the option.
const (
	outputFlag   = "output"
	commonOutput = "print in FORM: table, json ("
)

// Markdown returns the reference of a command and its subcommands: usage, options and exit status.
// Descriptions and examples are in the help and the man pages.
func (c Command) Markdown() string {
	var b strings.Builder
	for _, one := range c.all() {
		fmt.Fprintf(&b, "## %s\n\n%s.\n\n```\n%s\n```\n\n", one.Path, one.Short, one.Usage)
		var commands []Command
		if one.Path == c.Path { // the commands of a subcommand come later
			commands = one.Commands
		}
		for i, below := range commands {
			if i == 0 {
				b.WriteString("| command | |\n|---|---|\n")
			}
			fmt.Fprintf(&b, "| [%s](#%s) | %s |\n", below.Path, below.pageName(), cell(below.Short))
		}
		if len(commands) > 0 {
			b.WriteString("\n")
		}
		flags := slices.DeleteFunc(slices.Clone(one.Flags), func(f Flag) bool {
			return f.Name == outputFlag &&
				strings.HasPrefix(f.sentence(), commonOutput)
		})
		for i, f := range flags {
			if i == 0 {
				b.WriteString("| option | |\n|---|---|\n")
			}
			name := "--" + f.Name
			if f.Shorthand != "" {
				name = "-" + f.Shorthand + ", " + name
			}
			if f.Value != "" {
				name += " " + f.Value
			}
			fmt.Fprintf(&b, "| `%s` | %s |\n", cell(name), cell(markdownText(f.sentence())))
		}
		if len(flags) > 0 {
			b.WriteString("\n")
		}
		if one.Exit != DefaultExit {
			fmt.Fprintf(&b, "Exit status:\n\n```\n%s```\n\n", unindent(one.Exit))
		}
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}

// markdownText escapes the characters of a text that Markdown interprets.
func markdownText(s string) string {
	return strings.NewReplacer("*", `\*`, "_", `\_`, "<", `\<`, "[", `\[`).Replace(s)
}

// cell escapes a text for a cell of a table.
func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }
