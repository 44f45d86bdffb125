package manual

import (
	"fmt"
	"strings"
)

// Markdown returns the reference of a command and its subcommands.
func (c Command) Markdown() string {
	var b strings.Builder
	for _, one := range c.All() {
		fmt.Fprintf(&b, "## %s\n\n%s.\n\n```\n%s\n```\n\n", one.Path, one.Short, one.Usage)
		if one.Long != one.Short {
			for _, block := range blocks(one.Long) {
				if block.verbatim {
					fmt.Fprintf(&b, "```\n%s\n```\n\n", block.text)
				} else {
					fmt.Fprintf(&b, "%s\n\n", markdownText(block.text))
				}
			}
		}
		for i, below := range one.Commands {
			if i == 0 {
				b.WriteString("| command | |\n|---|---|\n")
			}
			fmt.Fprintf(&b, "| [%s](#%s) | %s |\n", below.Path, below.pageName(), cell(below.Short))
		}
		if len(one.Commands) > 0 {
			b.WriteString("\n")
		}
		for i, f := range one.Flags {
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
		if len(one.Flags) > 0 {
			b.WriteString("\n")
		}
		if one.Exit != DefaultExit {
			fmt.Fprintf(&b, "Exit status:\n\n```\n%s```\n\n", unindent(one.Exit))
		}
		if one.Example != "" {
			fmt.Fprintf(&b, "```console\n%s\n```\n\n", strings.TrimRight(unindent(one.Example), "\n"))
		}
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}

// markdownText keeps a text from being taken for Markdown's marks.
func markdownText(s string) string {
	return strings.NewReplacer("*", `\*`, "_", `\_`, "<", `\<`, "[", `\[`).Replace(s)
}

// cell escapes a text for a cell of a table.
func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }
