package statetest

import (
	"fmt"
	"strings"
)

// Page returns the page of a machine in docs/states: the diagram, in Mermaid, and the table.
func Page(m Machine) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# States: %s\n\n", m.Title())
	b.WriteString("<!-- Made from the table by go test -update-states, in the package of the table. -->\n\n")
	b.WriteString(diagram(m))
	b.WriteString("\nA cell has the next state and the action. An empty cell is impossible.\n\n")
	b.WriteString(table(m))
	return b.String()
}

// diagram draws the transitions. Cells that change neither state nor object are in the table only.
func diagram(m Machine) string {
	names := m.Labels()
	var b strings.Builder
	b.WriteString("```mermaid\nstateDiagram-v2\n")
	for s, state := range names.States {
		fmt.Fprintf(&b, "    s%d: %s\n", s, state)
	}
	b.WriteString("    [*] --> s0\n")
	for s := range names.States {
		labels := map[int][]string{}
		for e, event := range names.Events {
			c := m.At(s, e)
			if !c.possible || c.next == s && c.action == 0 {
				continue
			}
			if c.action > 0 {
				event += " / " + names.Actions[c.action]
			}
			labels[c.next] = append(labels[c.next], event)
		}
		for next := range names.States {
			if len(labels[next]) > 0 {
				fmt.Fprintf(&b, "    s%d --> s%d: %s\n", s, next, strings.Join(labels[next], "<br>"))
			}
		}
	}
	b.WriteString("```\n")
	return b.String()
}

func table(m Machine) string {
	names := m.Labels()
	var b strings.Builder
	b.WriteString("| event |")
	for _, state := range names.States {
		fmt.Fprintf(&b, " %s |", state)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(names.States)) + "\n")
	for e, event := range names.Events {
		fmt.Fprintf(&b, "| %s |", event)
		for s := range names.States {
			cell := ""
			if c := m.At(s, e); c.possible {
				cell = text(m, c)
			}
			fmt.Fprintf(&b, " %s |", cell)
		}
		b.WriteString("\n")
	}
	return b.String()
}
