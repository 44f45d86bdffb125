// Package statetest tests state machines: it compares each cell of a table with a reviewed file, checks
// that the page of the table in docs/states is current, and changes tables for mutation tests.
package statetest

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/relay/internal/statemachine"
)

var update = flag.Bool("update-states", false, "write the pages of docs/states")

// impossible is the cell of an impossible event in a file of expected cells.
const impossible = "impossible"

// Machine is a table without its types: states, events and actions are numbers.
type Machine interface {
	// Title returns the name of the machine.
	Title() string
	// Labels returns the names of states, events and actions.
	Labels() statemachine.Names
	// At returns a cell.
	At(state, event int) Cell
	// Put replaces a cell.
	Put(state, event int, cell Cell)
}

// Cell is a cell of a Machine.
type Cell struct {
	next, action int
	possible     bool
}

// Of returns a copy of a table as a Machine.
func Of[S, E, A ~uint8](t *statemachine.Table[S, E, A]) Machine { return machine[S, E, A]{t.Clone()} }

// Live returns a table itself as a Machine: Put changes the table that the program uses.
func Live[S, E, A ~uint8](t *statemachine.Table[S, E, A]) Machine { return machine[S, E, A]{t} }

type machine[S, E, A ~uint8] struct{ *statemachine.Table[S, E, A] }

func (m machine[S, E, A]) Title() string              { return m.Name }
func (m machine[S, E, A]) Labels() statemachine.Names { return m.Names }

func (m machine[S, E, A]) At(state, event int) Cell {
	c, possible := m.Cell(S(state), E(event))
	return Cell{int(c.Next), int(c.Action), possible}
}

func (m machine[S, E, A]) Put(state, event int, c Cell) {
	m.Set(S(state), E(event), statemachine.Cell[S, A]{Next: S(c.next), Action: A(c.action)}, c.possible)
}

// text returns a cell as in a file of expected cells: "next", "next / action" or "impossible".
func text(m Machine, c Cell) string {
	names := m.Labels()
	switch {
	case !c.possible:
		return impossible
	case c.action == 0:
		return names.States[c.next]
	}
	return names.States[c.next] + " / " + names.Actions[c.action]
}

// Differences compares every cell of a machine with the reviewed file. A line of the file has a state, an
// event and a cell, with a colon after each of the first two; # begins a comment. A reviewer writes the
// file; no program does.
func Differences(m Machine, file string) ([]string, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var found []string
	want := map[string]string{}
	for number, line := range strings.Split(string(content), "\n") {
		if line, _, _ = strings.Cut(line, "#"); strings.TrimSpace(line) == "" {
			continue
		}
		parts := strings.SplitN(line, ":", 3)
		if len(parts) != 3 {
			return nil, fmt.Errorf("%s:%d: not \"state: event: cell\": %q", file, number+1, line)
		}
		key := strings.TrimSpace(parts[0]) + ": " + strings.TrimSpace(parts[1])
		if want[key] != "" {
			found = append(found, key+" is in the file twice")
		}
		want[key] = strings.TrimSpace(parts[2])
	}
	names := m.Labels()
	for s, state := range names.States {
		for e, event := range names.Events {
			key := state + ": " + event
			if got := text(m, m.At(s, e)); got != want[key] {
				found = append(found, fmt.Sprintf("%s: the table has %q, the file %q", key, got, want[key]))
			}
			delete(want, key)
		}
	}
	for key := range want {
		found = append(found, key+" is in the file and not in the table")
	}
	return found, nil
}

// Check fails t unless every cell of m equals the reviewed file, each change of a cell would fail this
// comparison, every state can be reached, and the page in docs, a folder, is current.
func Check(t *testing.T, m Machine, file, docs string) {
	t.Helper()
	found, err := Differences(m, file)
	if err != nil {
		t.Fatal(err)
	}
	for _, difference := range found {
		t.Errorf("%s: %s", m.Title(), difference)
	}
	for _, state := range unreachable(m) {
		t.Errorf("%s: no event leads to state %s", m.Title(), state)
	}
	mutants, survivors := 0, 0
	Mutate(m, func(name string) {
		mutants++
		if found, err := Differences(m, file); err != nil || len(found) == 0 {
			survivors++
			t.Errorf("%s: mutant %s survives: %v", m.Title(), name, err)
		}
	})
	names := m.Labels()
	t.Logf("%s: %d cells, %d mutants, %d survivors", m.Title(), len(names.States)*len(names.Events), mutants, survivors)
	path := filepath.Join(docs, m.Title()+".md")
	page := Page(m)
	if *update {
		if err := os.WriteFile(path, []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if have, err := os.ReadFile(path); err != nil || string(have) != page {
		t.Errorf("%s is stale: run go test -run %s -update-states (%v)", path, t.Name(), err)
	}
}

// unreachable returns the states that no sequence of events reaches.
func unreachable(m Machine) (list []string) {
	names := m.Labels()
	reached := map[int]bool{0: true}
	for queue := []int{0}; len(queue) > 0; queue = queue[1:] {
		for e := range names.Events {
			if c := m.At(queue[0], e); c.possible && !reached[c.next] {
				reached[c.next] = true
				queue = append(queue, c.next)
			}
		}
	}
	for s, state := range names.States {
		if !reached[s] {
			list = append(list, state)
		}
	}
	return list
}

// Mutate calls f with each mutant of a machine: every other next state and every other action of a possible
// cell, an impossible cell for a possible cell, and a transition without an action for an impossible cell.
func Mutate(m Machine, f func(name string)) {
	names := m.Labels()
	for s, state := range names.States {
		for e, event := range names.Events {
			original := m.At(s, e)
			try := func(c Cell) {
				m.Put(s, e, c)
				f(state + ": " + event + ": " + text(m, c))
			}
			if !original.possible {
				try(Cell{next: s, possible: true})
			} else {
				try(Cell{})
				for next := range names.States {
					if next != original.next {
						try(Cell{next, original.action, true})
					}
				}
				for action := range names.Actions {
					if action != original.action {
						try(Cell{original.next, action, true})
					}
				}
			}
			m.Put(s, e, original)
		}
	}
}
